/* The messages of vhost_fuse: vhost-user's front end, as far as a virtio-fs device needs it (QEMU's docs/interop/vhost-user.rst).
 *
 * Guest addresses and the front end's own are the same here: those of the caller's mappings. */
#define _GNU_SOURCE
#include "vhost_fuse_internal.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#define PAGE 4096u

/* ---- messages ---- */

static int message_send(struct vhost_fuse *vhost, uint32_t request, uint32_t flags, const void *payload, uint32_t size, const int *fds,
                        uint32_t fd_count) {
    struct header header = {request, FLAG_VERSION | flags, size};
    struct iovec iovs[2] = {{&header, sizeof(header)}, {(void *)(uintptr_t)payload, size}};
    union {
        struct cmsghdr align;
        uint8_t bytes[CMSG_SPACE(sizeof(int) * (VHOST_FUSE_REGIONS_MAX + 1))];
    } control;
    struct msghdr message = {.msg_iov = iovs, .msg_iovlen = size ? 2 : 1};
    if (vhost->broken)
        return vhost->broken;
    if (fd_count) {
        memset(&control, 0, sizeof(control));
        message.msg_control = &control;
        message.msg_controllen = CMSG_SPACE(sizeof(int) * fd_count);
        struct cmsghdr *c = CMSG_FIRSTHDR(&message);
        c->cmsg_level = SOL_SOCKET;
        c->cmsg_type = SCM_RIGHTS;
        c->cmsg_len = CMSG_LEN(sizeof(int) * fd_count);
        memcpy(CMSG_DATA(c), fds, sizeof(int) * fd_count);
    }
    ssize_t n = sendmsg(vhost->fd, &message, MSG_NOSIGNAL);
    if (n == (ssize_t)(sizeof(header) + size))
        return 0;
    if (n >= 0 || errno == EAGAIN)
        return vhost_broken(vhost, -ETIMEDOUT, "message %u: not taken in %u ms", request, vhost->timeout_ms);
    return vhost_broken(vhost, -errno, "message %u: %s", request, strerror(errno));
}

static int part_receive(struct vhost_fuse *vhost, uint32_t request, void *out, size_t size) {
    ssize_t n = recv(vhost->fd, out, size, MSG_WAITALL);
    if (n == (ssize_t)size)
        return 0;
    if (n < 0 && errno != EAGAIN && errno != ECONNRESET)
        return vhost_broken(vhost, -errno, "answer to message %u: %s", request, strerror(errno));
    if (n == 0 || (n < 0 && errno == ECONNRESET))
        return vhost_broken(vhost, -ECONNRESET, "the back end closed its socket before it answered message %u", request);
    return vhost_broken(vhost, -ETIMEDOUT, "message %u: %zd of %zu bytes of its answer in %u ms", request, n < 0 ? 0 : n, size, vhost->timeout_ms);
}

/* An answer of `size` bytes. */
static int answer_receive(struct vhost_fuse *vhost, uint32_t request, void *out, uint32_t size) {
    struct header header;
    int r = part_receive(vhost, request, &header, sizeof(header));
    if (r < 0)
        return r;
    if (header.request != request || (header.flags & (3u | FLAG_REPLY)) != (FLAG_VERSION | FLAG_REPLY) || header.size != size)
        return vhost_broken(vhost, -EPROTO, "message %u: an answer to %u, flags 0x%x, of %u bytes, expected %u", request, header.request,
                            header.flags, header.size, size);
    return part_receive(vhost, request, out, size);
}

static int ask(struct vhost_fuse *vhost, uint32_t request, uint64_t *out) {
    int r = message_send(vhost, request, 0, NULL, 0, NULL, 0);
    return r < 0 ? r : answer_receive(vhost, request, out, sizeof(*out));
}

/* With an acknowledgement, if the back end gives them. */
static int tell(struct vhost_fuse *vhost, uint32_t request, const void *payload, uint32_t size, const int *fds, uint32_t fd_count) {
    uint64_t refused = 0;
    int r = message_send(vhost, request, vhost->acknowledged ? FLAG_NEED_REPLY : 0, payload, size, fds, fd_count);
    if (r == 0 && vhost->acknowledged)
        r = answer_receive(vhost, request, &refused, sizeof(refused));
    return r == 0 && refused ? vhost_broken(vhost, -EPROTO, "message %u: refused", request) : r;
}

/* ---- the start ---- */

static int negotiate(struct vhost_fuse *vhost) {
    uint64_t offered = 0, protocol = 0, queues = VHOST_RINGS;
    if (ask(vhost, GET_FEATURES, &offered) < 0)
        return vhost->broken;
    if (!(offered & 1ull << VIRTIO_F_VERSION_1))
        return vhost_broken(vhost, -EPROTO, "features 0x%" PRIx64 ": without VERSION_1", offered);
    uint64_t features = offered & FEATURES;
    if (features & FEATURE_PROTOCOL) {
        if (ask(vhost, GET_PROTOCOL_FEATURES, &protocol) < 0)
            return vhost->broken;
        protocol &= PROTOCOL_MQ | PROTOCOL_REPLY_ACK;
        if (tell(vhost, SET_PROTOCOL_FEATURES, &protocol, sizeof(protocol), NULL, 0) < 0)
            return vhost->broken;
        vhost->acknowledged = protocol & PROTOCOL_REPLY_ACK;
    }
    if (protocol & PROTOCOL_MQ && ask(vhost, GET_QUEUE_NUM, &queues) < 0)
        return vhost->broken;
    if (queues < VHOST_RINGS)
        return vhost_broken(vhost, -EPROTO, "%" PRIu64 " queues, needs %u", queues, VHOST_RINGS);
    vhost->indirect = features & 1ull << VIRTIO_RING_F_INDIRECT_DESC;
    vhost->event_index = features & 1ull << VIRTIO_RING_F_EVENT_IDX;
    int r = tell(vhost, SET_OWNER, NULL, 0, NULL, 0);
    return r < 0 ? r : tell(vhost, SET_FEATURES, &features, sizeof(features), NULL, 0);
}

static int memory_share(struct vhost_fuse *vhost) {
    struct table table = {.count = vhost->region_count};
    int fds[VHOST_FUSE_REGIONS_MAX + 1];
    for (uint32_t i = 0; i < vhost->region_count; i++) {
        const struct vhost_fuse_region *region = &vhost->regions[i];
        table.regions[i].guest_address = table.regions[i].user_address = (uintptr_t)region->data;
        table.regions[i].size = region->size;
        table.regions[i].offset = region->offset;
        fds[i] = region->fd;
    }
    uint32_t size = (uint32_t)(sizeof(table) - (VHOST_FUSE_REGIONS_MAX + 1 - table.count) * sizeof(table.regions[0]));
    return tell(vhost, SET_MEM_TABLE, &table, size, fds, table.count);
}

static int state_tell(struct vhost_fuse *vhost, uint32_t request, uint32_t index, uint32_t number) {
    struct state state = {index, number};
    return tell(vhost, request, &state, sizeof(state), NULL, 0);
}

static int ring_start(struct vhost_fuse *vhost, struct vhost_ring *ring) {
    struct address address = {.index = ring->index, .desc = (uintptr_t)ring->desc, .used = (uintptr_t)ring->used, .avail = (uintptr_t)ring->avail};
    uint64_t index = ring->index;
    int r = state_tell(vhost, SET_VRING_NUM, ring->index, ring->size);
    if (r == 0)
        r = state_tell(vhost, SET_VRING_BASE, ring->index, 0);
    if (r == 0)
        r = tell(vhost, SET_VRING_ADDR, &address, sizeof(address), NULL, 0);
    if (r == 0)
        r = tell(vhost, SET_VRING_KICK, &index, sizeof(index), &ring->kick_fd, 1);
    if (r == 0)
        r = tell(vhost, SET_VRING_CALL, &index, sizeof(index), &vhost->call_fd, 1);
    return r == 0 ? state_tell(vhost, SET_VRING_ENABLE, ring->index, 1) : r;
}

/* ---- making ---- */

static uint64_t pages(uint64_t size) { return (size + PAGE - 1) / PAGE * PAGE; }

/* Where the parts of a ring lie, from `at` on; returns its end. Called without memory first, for the size. */
static uint64_t ring_place(struct vhost_ring *ring, uint8_t *memory, uint64_t at) {
    uint64_t size = ring->size, avail = at + pages(size * sizeof(struct vring_desc));
    uint64_t used = avail + pages(sizeof(struct vring_avail) + (size + 1) * sizeof(uint16_t));
    uint64_t tables = used + pages(sizeof(struct vring_used) + size * sizeof(struct vring_used_elem) + sizeof(uint16_t));
    if (memory) {
        ring->desc = (struct vring_desc *)(void *)(memory + at);
        ring->avail = (struct vring_avail *)(void *)(memory + avail);
        ring->used = (struct vring_used *)(void *)(memory + used);
        ring->tables = (struct vring_desc *)(void *)(memory + tables);
    }
    return tables + pages(size * size * sizeof(struct vring_desc));
}

static int rings_make(struct vhost_fuse *vhost, uint32_t size) {
    struct vhost_fuse_region *own = &vhost->regions[0];
    uint64_t at = 0;
    for (uint32_t i = 0; i < VHOST_RINGS; i++) {
        struct vhost_ring *ring = &vhost->rings[i];
        ring->index = i;
        ring->size = ring->free_count = size;
        ring->next_free = calloc(size, sizeof(*ring->next_free));
        ring->slots = calloc(size, sizeof(*ring->slots));
        ring->kick_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
        if (!ring->next_free || !ring->slots || ring->kick_fd < 0)
            return vhost_broken(vhost, -ENOMEM, "queue %u of %u descriptors: %s", i, size, strerror(errno));
        for (uint32_t j = 0; j < size; j++)
            ring->next_free[j] = (uint16_t)(j + 1);
        own->size = ring_place(ring, NULL, own->size);
    }
    vhost->call_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    vhost->memory_fd = memfd_create("vhost-fuse-rings", MFD_CLOEXEC);
    if (vhost->call_fd < 0 || vhost->memory_fd < 0 || ftruncate(vhost->memory_fd, (off_t)own->size) < 0)
        return vhost_broken(vhost, -errno, "rings of %" PRIu64 " bytes: %s", own->size, strerror(errno));
    void *map = mmap(NULL, own->size, PROT_READ | PROT_WRITE, MAP_SHARED, vhost->memory_fd, 0);
    if (map == MAP_FAILED)
        return vhost_broken(vhost, -errno, "rings of %" PRIu64 " bytes: %s", own->size, strerror(errno));
    own->data = map;
    own->fd = vhost->memory_fd;
    for (uint32_t i = 0; i < VHOST_RINGS; i++) {
        at = ring_place(&vhost->rings[i], map, at);
        if (!vhost->event_index)
            vhost->rings[i].avail->flags = VRING_AVAIL_F_NO_INTERRUPT;
    }
    return 0;
}

static int socket_connect(struct vhost_fuse *vhost) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    struct timeval timeout = {.tv_sec = vhost->timeout_ms / 1000, .tv_usec = vhost->timeout_ms % 1000 * 1000};
    memcpy(address.sun_path, vhost->path, sizeof(vhost->path));
    vhost->fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (vhost->fd < 0 || setsockopt(vhost->fd, SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof(timeout)) < 0 ||
        setsockopt(vhost->fd, SOL_SOCKET, SO_SNDTIMEO, &timeout, sizeof(timeout)) < 0 ||
        connect(vhost->fd, (struct sockaddr *)&address, sizeof(address)) < 0)
        return vhost_broken(vhost, -errno, "connect: %s", strerror(errno));
    return 0;
}

int vhost_fuse_connect(const struct vhost_fuse_config *config, struct vhost_fuse **out) {
    uint32_t size = config->queue_size;
    *out = NULL;
    if (size < 2 || size > VHOST_FUSE_QUEUE_SIZE_MAX || size & (size - 1) || config->region_count > VHOST_FUSE_REGIONS_MAX ||
        config->timeout_ms == 0 || strlen(config->path) >= sizeof((*out)->path))
        return -EINVAL;
    for (uint32_t i = 0; i < config->region_count; i++) {
        const struct vhost_fuse_region *region = &config->regions[i];
        if (region->size == 0 || region->size % PAGE || region->offset % PAGE || (uintptr_t)region->data % PAGE)
            return -EINVAL;
    }
    struct vhost_fuse *vhost = calloc(1, sizeof(*vhost));
    if (!vhost)
        return -ENOMEM;
    *out = vhost;
    memcpy(vhost->path, config->path, strlen(config->path));
    vhost->timeout_ms = config->timeout_ms;
    vhost->fd = vhost->memory_fd = vhost->call_fd = -1;
    for (uint32_t i = 0; i < VHOST_RINGS; i++)
        vhost->rings[i].kick_fd = -1;
    vhost->region_count = 1 + config->region_count;
    for (uint32_t i = 0; i < config->region_count; i++)
        vhost->regions[1 + i] = config->regions[i];
    if (socket_connect(vhost) < 0 || negotiate(vhost) < 0 || rings_make(vhost, size) < 0 || memory_share(vhost) < 0)
        return vhost->broken;
    for (uint32_t i = 0; i < VHOST_RINGS; i++)
        if (ring_start(vhost, &vhost->rings[i]) < 0)
            return vhost->broken;
    vhost->started = true;
    return 0;
}

void vhost_fuse_close(struct vhost_fuse *vhost) {
    for (uint32_t i = 0; i < VHOST_RINGS && vhost->started && !vhost->broken; i++) {
        struct state state = {i, 0};
        if (state_tell(vhost, SET_VRING_ENABLE, i, 0) == 0 && message_send(vhost, GET_VRING_BASE, 0, &state, sizeof(state), NULL, 0) == 0)
            answer_receive(vhost, GET_VRING_BASE, &state, sizeof(state));
    }
    if (!vhost->broken)
        vhost_broken(vhost, -EPIPE, "closed");
    if (vhost->fd >= 0)
        close(vhost->fd);
    for (uint32_t i = 0; i < VHOST_RINGS; i++) {
        struct vhost_ring *ring = &vhost->rings[i];
        for (uint32_t j = 0; ring->slots && j < ring->size; j++)
            if (ring->slots[j].live)
                ring->slots[j].done(ring->slots[j].context, -ECANCELED);
        if (ring->kick_fd >= 0)
            close(ring->kick_fd);
        free(ring->next_free);
        free(ring->slots);
    }
    if (vhost->regions[0].data)
        munmap(vhost->regions[0].data, vhost->regions[0].size);
    if (vhost->memory_fd >= 0)
        close(vhost->memory_fd);
    if (vhost->call_fd >= 0)
        close(vhost->call_fd);
    free(vhost);
}
