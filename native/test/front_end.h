/* A double of a vhost-user front end and of the guest behind it: memory in a memfd, split rings built by hand, FUSE requests in them. For
 * tests of the data plane; it does what it is told, right or wrong. */
#ifndef KVFS_TEST_FRONT_END_H
#define KVFS_TEST_FRONT_END_H

#include "virtiofs/virtio.h"

#include <linux/virtio_config.h>
#include <poll.h>
#include <stdio.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "check.h"

#define FRONT_MEMORY ((uint64_t)32 << 20)
#define FRONT_GUEST 0x40000000ull
#define FRONT_USER 0x7f1200000000ull
#define FRONT_RINGS 0x40000u           /* bytes a queue: descriptors, available, used, and a page for small things */
#define FRONT_DATA ((uint64_t)4 << 20) /* from here on: indirect tables, requests, payload */
#define FRONT_FEATURES (1ull << VIRTIO_F_VERSION_1 | 1ull << VIRTIO_RING_F_INDIRECT_DESC | 1ull << VIRTIO_RING_F_EVENT_IDX | 1ull << 30)

enum {
    VU_GET_FEATURES = 1,
    VU_SET_FEATURES,
    VU_SET_OWNER,
    VU_SET_MEM_TABLE = 5,
    VU_SET_VRING_NUM = 8,
    VU_SET_VRING_ADDR,
    VU_SET_VRING_BASE,
    VU_GET_VRING_BASE,
    VU_SET_VRING_KICK,
    VU_SET_VRING_CALL,
    VU_SET_VRING_ERR,
    VU_GET_PROTOCOL_FEATURES,
    VU_SET_PROTOCOL_FEATURES,
    VU_GET_QUEUE_NUM,
    VU_SET_VRING_ENABLE,
    VU_GET_CONFIG = 24,
    VU_GET_INFLIGHT_FD = 31,
    VU_SET_INFLIGHT_FD,
    VU_GET_MAX_MEM_SLOTS = 36,
    VU_ADD_MEM_REG,
    VU_REM_MEM_REG
};

struct front_queue {
    uint32_t size;
    uint16_t next, seen; /* of avail, of used */
    uint64_t at;         /* offset of its rings */
    int kick, call, error;
    struct vring_desc *desc;
    struct vring_avail *avail;
    struct vring_used *used;
};
struct front {
    int fd, memory_fd;
    uint8_t *memory;
    uint64_t features;
    struct front_queue queues[4];
    uint64_t unique;
};

/* ---- the protocol ---- */

static int vu_send(struct front *f, uint32_t request, uint32_t flags, const void *payload, uint32_t size, const int *fds, uint32_t fd_count) {
    struct {
        uint32_t request, flags, size;
    } header = {request, 1 | flags, size};
    struct iovec iovs[2] = {{&header, sizeof(header)}, {(void *)(uintptr_t)payload, size}};
    union {
        struct cmsghdr align;
        uint8_t bytes[CMSG_SPACE(sizeof(int) * 16)];
    } control;
    struct msghdr msg = {.msg_iov = iovs, .msg_iovlen = size ? 2 : 1};
    if (fd_count) {
        memset(&control, 0, sizeof(control));
        msg.msg_control = &control;
        msg.msg_controllen = CMSG_SPACE(sizeof(int) * fd_count);
        struct cmsghdr *c = CMSG_FIRSTHDR(&msg);
        c->cmsg_level = SOL_SOCKET;
        c->cmsg_type = SCM_RIGHTS;
        c->cmsg_len = CMSG_LEN(sizeof(int) * fd_count);
        memcpy(CMSG_DATA(c), fds, sizeof(int) * fd_count);
    }
    return sendmsg(f->fd, &msg, MSG_NOSIGNAL) == (ssize_t)(sizeof(header) + size) ? 0 : -1;
}

/* The size of a reply's payload; -1: hung up. */
static int vu_receive(struct front *f, void *payload, uint32_t capacity, int *fd) {
    struct {
        uint32_t request, flags, size;
    } header;
    struct iovec iov = {&header, sizeof(header)};
    union {
        struct cmsghdr align;
        uint8_t bytes[CMSG_SPACE(sizeof(int))];
    } control;
    struct msghdr msg = {.msg_iov = &iov, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof(control)};
    struct timeval limit = {.tv_sec = 20};
    CHECK(setsockopt(f->fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit)) == 0);
    ssize_t n;
    do /* the free of an io_uring interrupts its thread once more */
        n = recvmsg(f->fd, &msg, MSG_WAITALL | MSG_CMSG_CLOEXEC);
    while (n < 0 && errno == EINTR);
    if (n == 0 || (n < 0 && errno == ECONNRESET))
        return -1;
    CHECK_SAY(n == sizeof(header) && header.size <= capacity && (header.flags & 7) == 5, "%zd bytes, error %d, request %u, size %u", n, errno,
              header.request, header.size);
    if (fd)
        *fd = -1;
    struct cmsghdr *c = CMSG_FIRSTHDR(&msg);
    if (c && fd)
        memcpy(fd, CMSG_DATA(c), sizeof(int));
    CHECK(header.size == 0 || recv(f->fd, payload, header.size, MSG_WAITALL) == (ssize_t)header.size);
    return (int)header.size;
}

static uint64_t vu_ask(struct front *f, uint32_t request) {
    uint64_t value;
    CHECK(vu_send(f, request, 0, NULL, 0, NULL, 0) == 0 && vu_receive(f, &value, 8, NULL) == 8);
    return value;
}

/* With an acknowledgement; what it says: 0 is good. */
static uint64_t vu_tell(struct front *f, uint32_t request, const void *payload, uint32_t size, const int *fds, uint32_t fd_count) {
    uint64_t value;
    CHECK(vu_send(f, request, 8, payload, size, fds, fd_count) == 0);
    return vu_receive(f, &value, 8, NULL) == 8 ? value : UINT64_MAX;
}

static uint64_t vu_region(struct front *f, uint32_t request, uint64_t offset, uint64_t size) {
    uint64_t payload[5] = {0, FRONT_GUEST + offset, size, FRONT_USER + offset, offset};
    return vu_tell(f, request, payload, sizeof(payload), &f->memory_fd, request == VU_ADD_MEM_REG);
}

static uint64_t vu_state(struct front *f, uint32_t request, uint32_t index, uint32_t number) {
    uint32_t payload[2] = {index, number};
    return vu_tell(f, request, payload, sizeof(payload), NULL, 0);
}

static void front_connect(struct front *f, const char *path) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    memset(f, 0, sizeof(*f));
    snprintf(address.sun_path, sizeof(address.sun_path), "%s", path);
    f->fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    CHECK(f->fd >= 0 && connect(f->fd, (struct sockaddr *)&address, sizeof(address)) == 0);
    f->memory_fd = memfd_create("guest", MFD_CLOEXEC);
    CHECK(f->memory_fd >= 0 && ftruncate(f->memory_fd, (off_t)FRONT_MEMORY) == 0);
    f->memory = mmap(NULL, FRONT_MEMORY, PROT_READ | PROT_WRITE, MAP_SHARED, f->memory_fd, 0);
    CHECK(f->memory != MAP_FAILED);
    f->features = FRONT_FEATURES;
    for (int i = 0; i < 4; i++)
        f->queues[i].kick = f->queues[i].call = f->queues[i].error = -1;
}

static void front_negotiate(struct front *f) {
    uint64_t protocol = vu_ask(f, VU_GET_PROTOCOL_FEATURES);
    CHECK((vu_ask(f, VU_GET_FEATURES) & f->features) == f->features);
    CHECK(vu_send(f, VU_SET_PROTOCOL_FEATURES, 0, &protocol, 8, NULL, 0) == 0);
    CHECK(vu_tell(f, VU_SET_OWNER, NULL, 0, NULL, 0) == 0);
    CHECK(vu_tell(f, VU_SET_FEATURES, &f->features, 8, NULL, 0) == 0);
}

/* A driver that starts: rings empty, or as they were (keep). */
static void front_queue_start(struct front *f, uint32_t index, uint32_t size, uint16_t base, bool keep) {
    struct front_queue *q = &f->queues[index];
    q->size = size;
    q->at = index * FRONT_RINGS;
    q->desc = (struct vring_desc *)(void *)(f->memory + q->at);
    q->avail = (struct vring_avail *)(void *)(f->memory + q->at + 0x8000);
    q->used = (struct vring_used *)(void *)(f->memory + q->at + 0x10000);
    if (!keep) {
        memset(f->memory + q->at, 0, FRONT_RINGS);
        q->next = q->seen = base;
        q->avail->idx = q->used->idx = base;
    }
    CHECK(vu_state(f, VU_SET_VRING_NUM, index, size) == 0);
    CHECK(vu_state(f, VU_SET_VRING_BASE, index, base) == 0);
    struct {
        uint32_t index, flags;
        uint64_t desc, used, avail, log;
    } address = {index, 0, FRONT_USER + q->at, FRONT_USER + q->at + 0x10000, FRONT_USER + q->at + 0x8000, 0};
    CHECK(vu_tell(f, VU_SET_VRING_ADDR, &address, sizeof(address), NULL, 0) == 0);
    int *fds[3] = {&q->kick, &q->call, &q->error};
    for (uint32_t i = 0; i < 3; i++) {
        if (*fds[i] >= 0)
            close(*fds[i]);
        *fds[i] = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
        uint64_t payload = index;
        CHECK(*fds[i] >= 0 && vu_tell(f, VU_SET_VRING_KICK + i, &payload, 8, fds[i], 1) == 0);
    }
    CHECK(vu_state(f, VU_SET_VRING_ENABLE, index, 1) == 0);
}

static uint16_t front_queue_stop(struct front *f, uint32_t index) {
    uint32_t payload[2] = {index, 0};
    CHECK(vu_state(f, VU_SET_VRING_ENABLE, index, 0) == 0);
    CHECK(vu_send(f, VU_GET_VRING_BASE, 0, payload, 8, NULL, 0) == 0 && vu_receive(f, payload, 8, NULL) == 8 && payload[0] == index);
    return (uint16_t)payload[1];
}

static void front_start(struct front *f, const char *path, uint32_t size) {
    front_connect(f, path);
    front_negotiate(f);
    CHECK(vu_region(f, VU_ADD_MEM_REG, 0, FRONT_MEMORY) == 0);
    for (uint32_t i = 0; i < 2; i++)
        front_queue_start(f, i, size, 0, false);
}

static void front_end(struct front *f) {
    close(f->fd);
    for (int i = 0; i < 4; i++) {
        if (f->queues[i].kick >= 0)
            close(f->queues[i].kick), close(f->queues[i].call), close(f->queues[i].error);
    }
    munmap(f->memory, FRONT_MEMORY);
    close(f->memory_fd);
}

/* ---- rings ---- */

static void front_kick(struct front_queue *q) {
    uint64_t one = 1;
    CHECK(write(q->kick, &one, 8) == 8);
}

static void front_offer(struct front_queue *q, uint16_t head) {
    q->avail->ring[q->next & (q->size - 1)] = head;
    __atomic_store_n(&q->avail->idx, ++q->next, __ATOMIC_RELEASE);
    front_kick(q);
}

/* The next answer's length and head; false: none came. */
static bool front_wait(struct front_queue *q, uint32_t timeout_ms, uint32_t *head, uint32_t *length) {
    uint64_t until = now_ns() + timeout_ms * 1000000ull;
    *(uint16_t *)(void *)&q->avail->ring[q->size] = q->seen; /* used_event: signal the next one */
    while (__atomic_load_n(&q->used->idx, __ATOMIC_ACQUIRE) == q->seen) {
        struct pollfd p = {.fd = q->call, .events = POLLIN};
        if (now_ns() > until)
            return false;
        uint64_t count;
        if (poll(&p, 1, 1) == 1 && read(q->call, &count, 8) < 0)
            return false;
    }
    struct vring_used_elem *e = &q->used->ring[q->seen++ & (q->size - 1)];
    *head = e->id;
    *length = e->len;
    return true;
}

static uint64_t front_address(const struct front *f, const void *at) { return FRONT_GUEST + (uint64_t)((const uint8_t *)at - f->memory); }

/* A part of a request or of the room for its reply. */
struct piece {
    void *data;
    uint32_t size;
    bool writable;
};

/* Write a chain: in the ring from `head` on, or in an indirect table at `table`. */
static void front_chain(struct front *f, struct front_queue *q, uint16_t head, void *table, const struct piece *pieces, uint32_t count) {
    struct vring_desc *at = table ? table : q->desc;
    for (uint32_t i = 0; i < count; i++) {
        uint32_t index = table ? i : head + i;
        at[index] = (struct vring_desc){front_address(f, pieces[i].data), pieces[i].size,
                                        (uint16_t)((pieces[i].writable ? VRING_DESC_F_WRITE : 0) | (i + 1 < count ? VRING_DESC_F_NEXT : 0)),
                                        (uint16_t)(index + 1)};
    }
    if (table)
        q->desc[head] = (struct vring_desc){front_address(f, table), count * (uint32_t)sizeof(struct vring_desc), VRING_DESC_F_INDIRECT, 0};
}

#endif
