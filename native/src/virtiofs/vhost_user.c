/* vhost-user: a front end (QEMU, another VMM, a DPU's device emulation) hands over a guest's memory and virtqueues. This is the back end's side of
 * QEMU's docs/interop/vhost-user.rst, for a virtio-fs device.
 *
 * One thread a guest speaks it; servers meanwhile go on with the queues. Every message is checked against its length, its descriptors and the state
 * that it finds. A message that breaks the protocol ends the connection. Descriptors that came with a message are closed unless a part keeps them. */
#include "base/descriptor.h"
#include "virtiofs/virtio.h"

#include <linux/virtio_config.h>
#include <linux/virtio_fs.h>
#include <assert.h>
#include <poll.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#define FEATURE_PROTOCOL_FEATURES 30
#define FEATURES \
    (1ull << VIRTIO_F_VERSION_1 | 1ull << VIRTIO_RING_F_INDIRECT_DESC | 1ull << VIRTIO_RING_F_EVENT_IDX | 1ull << FEATURE_PROTOCOL_FEATURES)
#define PROTOCOL_MQ 0
#define PROTOCOL_REPLY_ACK 3
#define PROTOCOL_CONFIG 9
#define PROTOCOL_INFLIGHT_SHMFD 12
#define PROTOCOL_CONFIGURE_MEM_SLOTS 15
#define PROTOCOL_FEATURES                                                                                           \
    (1ull << PROTOCOL_MQ | 1ull << PROTOCOL_REPLY_ACK | 1ull << PROTOCOL_CONFIG | 1ull << PROTOCOL_INFLIGHT_SHMFD | \
     1ull << PROTOCOL_CONFIGURE_MEM_SLOTS)

enum {
    GET_FEATURES = 1,
    SET_FEATURES,
    SET_OWNER,
    RESET_OWNER,
    SET_MEM_TABLE,
    SET_LOG_BASE,
    SET_LOG_FD,
    SET_VRING_NUM,
    SET_VRING_ADDR,
    SET_VRING_BASE,
    GET_VRING_BASE,
    SET_VRING_KICK,
    SET_VRING_CALL,
    SET_VRING_ERR,
    GET_PROTOCOL_FEATURES,
    SET_PROTOCOL_FEATURES,
    GET_QUEUE_NUM,
    SET_VRING_ENABLE,
    GET_CONFIG = 24,
    SET_CONFIG,
    GET_INFLIGHT_FD = 31,
    SET_INFLIGHT_FD,
    GET_MAX_MEM_SLOTS = 36,
    ADD_MEM_REG,
    REM_MEM_REG
};
#define FLAG_VERSION 1u
#define FLAG_VERSION_MASK 3u
#define FLAG_REPLY 4u
#define FLAG_NEED_REPLY 8u
#define VRING_NO_FD 0x100u
#define TABLE_REGIONS_MAX 8
#define CONFIG_MAX 256
/* A message's rest must follow within this. Front ends wait for answers without any limit of their own: ours come within the deadlines
 * below. */
#define MESSAGE_TIMEOUT_S 5
/* A lost kick or signal would be a hang of the guest. */
#define LOOK_AGAIN_MS 1000
/* GET_VRING_BASE and the end: requests under way get this long, then they are answered with EIO. */
#define DRAIN_TIMEOUT_MS 5000u

struct vring_state {
    uint32_t index, number;
};
struct vring_address {
    uint32_t index, flags;
    uint64_t desc, used, avail, log;
};
struct config_message {
    uint32_t offset, size, flags;
    uint8_t data[CONFIG_MAX];
};
struct inflight_message {
    uint64_t map_size, map_offset;
    uint16_t queue_count, queue_size;
};
struct region_message {
    uint64_t guest_address, size, user_address, offset;
};

struct vhost_message {
    struct vhost_header header;
    union {
        uint64_t u64;
        struct vring_state state;
        struct vring_address address;
        struct config_message config;
        struct inflight_message inflight;
        struct {
            uint64_t padding;
            struct region_message region;
        } one;
        struct {
            uint32_t count, padding;
            struct region_message regions[TABLE_REGIONS_MAX];
        } table;
    };
    int fds[VHOST_FDS_MAX];
    uint32_t fd_count;
};
static_assert(sizeof(((struct vhost_message *)0)->table) <= VHOST_PAYLOAD_MAX && sizeof(struct config_message) <= VHOST_PAYLOAD_MAX, "payload");
struct front_end {
    struct guest *guest;
    int fd;
    uint64_t features, protocol_features;
    struct guest_memory *memory;
    uint8_t *inflight;
    uint64_t inflight_size;
    struct inflight_message inflight_layout;
};

/* ---- the socket ---- */

static void fds_close(struct vhost_message *message) {
    for (uint32_t i = 0; i < message->fd_count; i++)
        if (message->fds[i] >= 0)
            close(message->fds[i]);
    message->fd_count = 0;
}

/* Takes the first descriptor out of a message. */
static int fd_take(struct vhost_message *message) {
    int fd = message->fd_count ? message->fds[0] : -1;
    if (message->fd_count)
        message->fds[0] = -1;
    return fd;
}

/* A message from the porter. 0, -ECONNRESET when the front end has gone, or another -errno. */
static int message_receive(int channel, struct vhost_message *message, int *refused) {
    union {
        struct cmsghdr align;
        uint8_t bytes[CMSG_SPACE(sizeof(int) * VHOST_FDS_MAX)];
    } control;
    struct ported ported;
    struct iovec iov = {&ported, sizeof(ported)};
    struct msghdr msg = {.msg_iov = &iov, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof(control)};
    memset(message, 0, sizeof(*message));
    ssize_t n;
    do
        n = recvmsg(channel, &msg, MSG_CMSG_CLOEXEC);
    while (n < 0 && errno == EINTR);
    if (n <= 0)
        return n == 0 ? -ECONNRESET : -errno;
    struct cmsghdr *c = CMSG_FIRSTHDR(&msg);
    if (c) {
        message->fd_count = (uint32_t)((c->cmsg_len - CMSG_LEN(0)) / sizeof(int));
        memcpy(message->fds, CMSG_DATA(c), message->fd_count * sizeof(int));
    }
    bool lost = false; /* there is no number above 2 */
    for (uint32_t i = 0; i < message->fd_count; i++)
        lost = (message->fds[i] = descriptor_above(message->fds[i])) < 0 || lost;
    if (lost) {
        fds_close(message);
        return -EMFILE;
    }
    if (ported.error)
        return ported.error;
    message->header = ported.header;
    if ((message->header.flags & FLAG_VERSION_MASK) != FLAG_VERSION || message->header.flags & FLAG_REPLY ||
        message->header.size > sizeof(message->table))
        return -EPROTO;
    memcpy(&message->u64, ported.payload, message->header.size);
    *refused = ported.refused;
    return 0;
}

static int message_reply(int fd, const struct vhost_message *message, uint32_t size, int send_fd) {
    struct vhost_header header = {message->header.request, FLAG_VERSION | FLAG_REPLY, size};
    struct iovec iovs[2] = {{&header, sizeof(header)}, {(void *)(uintptr_t)&message->u64, size}};
    union {
        struct cmsghdr align;
        uint8_t bytes[CMSG_SPACE(sizeof(int))];
    } control;
    struct msghdr msg = {.msg_iov = iovs, .msg_iovlen = 2};
    if (send_fd >= 0) {
        memset(&control, 0, sizeof(control));
        msg.msg_control = &control;
        msg.msg_controllen = sizeof(control);
        struct cmsghdr *c = CMSG_FIRSTHDR(&msg);
        c->cmsg_level = SOL_SOCKET;
        c->cmsg_type = SCM_RIGHTS;
        c->cmsg_len = CMSG_LEN(sizeof(int));
        memcpy(CMSG_DATA(c), &send_fd, sizeof(int));
    }
    ssize_t n;
    do /* fits into any socket buffer: in one piece, or the front end does not read */
        n = sendmsg(fd, &msg, MSG_NOSIGNAL);
    while (n < 0 && errno == EINTR);
    return n == (ssize_t)(sizeof(header) + size) ? 0 : -EPIPE;
}

/* ---- memory ---- */

static void queue_lock(struct virtqueue *queue) {
    pthread_mutex_lock(&queue->serve);
    pthread_mutex_lock(&queue->lock);
}

static void queue_unlock(struct virtqueue *queue) {
    pthread_mutex_unlock(&queue->lock);
    pthread_mutex_unlock(&queue->serve);
}

/* Takes memory over. Requests under way keep their memory; a queue whose rings are no longer mapped stops. */
static void memory_set(struct front_end *front, struct guest_memory *memory) {
    for (uint32_t i = 0; i < front->guest->queue_count; i++) {
        struct virtqueue *queue = &front->guest->queues[i];
        queue_lock(queue);
        guest_memory_put(queue->memory);
        queue->memory = memory;
        atomic_fetch_add(&memory->refs, 1);
        virtqueue_map(queue);
        guest_queue_update(front->guest, queue);
        queue_unlock(queue);
    }
    guest_memory_put(front->memory);
    front->memory = memory;
}

static int memory_take(const struct front_end *front, int fd, const struct region_description *description, struct guest_region **out) {
    const struct kvfs_virtiofs_config *config = &front->guest->config;
    uint32_t count = atomic_load(&front->guest->transport->plane->fuse->guest_count);
    front->guest->owner.of = count ? count : 1;
    return region_map(&front->guest->owner, fd, description, config->memory_types, config->memory_type_count, out);
}

static int set_mem_table(struct front_end *front, struct vhost_message *message) {
    uint32_t count = message->table.count;
    if (message->header.size < 8 || count > TABLE_REGIONS_MAX || message->fd_count != count ||
        message->header.size < 8 + count * sizeof(struct region_message))
        return -EPROTO;
    struct guest_memory *memory = memory_change(NULL, NULL, NULL);
    int r = memory ? 0 : -ENOMEM;
    for (uint32_t i = 0; i < count && r == 0; i++) {
        const struct region_message *m = &message->table.regions[i];
        struct region_description description = {m->guest_address, m->size, m->user_address, m->offset};
        struct guest_region *region;
        r = memory_overlaps(memory, &description) ? -EINVAL : memory_take(front, message->fds[i], &description, &region);
        if (r < 0)
            break;
        struct guest_memory *grown = memory_change(memory, region, NULL);
        if (!grown) {
            region_put(region);
            r = -ENOMEM;
            break;
        }
        guest_memory_put(memory);
        memory = grown;
    }
    if (r < 0)
        guest_memory_put(memory);
    else
        memory_set(front, memory);
    return r;
}

static int change_region(struct front_end *front, struct vhost_message *message, bool add) {
    if (message->header.size < sizeof(message->one))
        return -EPROTO;
    const struct region_message *m = &message->one.region;
    struct region_description description = {m->guest_address, m->size, m->user_address, m->offset};
    struct guest_region *region = NULL;
    int r = 0;
    if (add && (message->fd_count != 1 || (front->memory && front->memory->count >= REGIONS_MAX)))
        return -EINVAL;
    if (add)
        r = memory_overlaps(front->memory, &description) ? -EINVAL : memory_take(front, message->fds[0], &description, &region);
    else if (!(region = memory_find(front->memory, &description)))
        r = -ENOENT;
    if (r < 0)
        return r;
    struct guest_memory *memory = memory_change(front->memory, add ? region : NULL, add ? NULL : region);
    if (memory)
        memory_set(front, memory);
    else if (add)
        region_put(region);
    return memory ? 0 : -ENOMEM;
}

/* ---- queues ---- */

static int event_take(struct vhost_message *message, int *out) {
    *out = -1;
    if (message->u64 & VRING_NO_FD)
        return message->fd_count ? -EPROTO : 0;
    if (message->fd_count != 1 || !is_eventfd(message->fds[0]))
        return -EPROTO;
    *out = fd_take(message);
    return 0;
}

static int set_event(struct guest *guest, struct virtqueue *queue, struct vhost_message *message) {
    int fd, r = event_take(message, &fd);
    if (r < 0)
        return r;
    if (message->header.request == SET_VRING_KICK) {
        if (fd < 0)
            return -EOPNOTSUPP; /* a queue that nobody kicks would have to be polled for ever */
        r = guest_queue_kick(guest, queue, fd);
        guest_queue_update(guest, queue);
        return r;
    }
    if (message->header.request == SET_VRING_ERR)
        return virtqueue_error_set(queue, fd);
    r = virtqueue_call_set(queue, fd);
    if (r == 0 && queue->used)
        virtqueue_signal(queue); /* the last signals went to the old one, which may have no listener any more */
    return r;
}

static uint64_t inflight_step(const struct inflight_message *layout) {
    return round_up(sizeof(struct inflight_queue) + layout->queue_size * sizeof(struct inflight_entry), 64);
}

static void inflight_attach(struct front_end *front, struct virtqueue *queue) {
    const struct inflight_message *layout = &front->inflight_layout;
    queue->inflight = NULL;
    if (!front->inflight || queue->index >= layout->queue_count || queue->size > layout->queue_size)
        return;
    queue->inflight = (struct inflight_queue *)(void *)(front->inflight + queue->index * inflight_step(layout));
    if (queue->inflight->version == 0) {
        queue->inflight->version = 1;
        queue->inflight->size = (uint16_t)queue->size;
    }
}

static int set_vring(struct front_end *front, struct virtqueue *queue, const struct vhost_message *message) {
    struct guest *guest = front->guest;
    uint32_t number = message->state.number;
    int r = 0;
    switch (message->header.request) {
    case SET_VRING_NUM:
        if (queue->started || number < 2 || number > guest->config.queue_size_max || number & (number - 1))
            return -EINVAL;
        if (!queue->elements && !(queue->elements = calloc(QUEUE_SIZE_MAX, sizeof(*queue->elements))))
            return -ENOMEM;
        queue->size = number;
        virtqueue_map(queue); /* rings of another length: they may lie nowhere now */
        break;
    case SET_VRING_BASE:
        if (queue->started || number > UINT16_MAX)
            return -EINVAL;
        queue->last_avail = (uint16_t)number;
        break;
    case SET_VRING_ENABLE:
        if (number > 1 || !(front->features & 1ull << FEATURE_PROTOCOL_FEATURES))
            return -EINVAL;
        queue->enabled = number == 1;
        break;
    default: /* SET_VRING_ADDR */
        if (queue->size == 0 || message->address.flags)
            return -EINVAL;
        queue->desc_user = message->address.desc;
        queue->avail_user = message->address.avail;
        queue->used_user = message->address.used;
        queue->addressed = true;
        r = virtqueue_map(queue); /* a running queue stops if its rings lie nowhere */
        break;
    }
    if (!queue->started)
        inflight_attach(front, queue);
    guest_queue_update(guest, queue);
    return r;
}

/* Stop a queue, and return the position where it is to go on. */
static void get_vring_base(struct front_end *front, struct virtqueue *queue, struct vhost_message *message) {
    guest_queue_stop(front->guest, queue, true, DRAIN_TIMEOUT_MS);
    queue_lock(queue);
    guest_queue_kick(front->guest, queue, -1);
    message->state.number = queue->last_avail;
    queue->started = queue->broken = false;
    for (uint32_t i = 0; queue->inflight && i < queue->size; i++) /* no request is left to be done again */
        queue->inflight->entries[i].inflight = 0;
    if (front->features & 1ull << FEATURE_PROTOCOL_FEATURES)
        queue->enabled = false;
    queue_unlock(queue);
}

static int set_features(struct front_end *front, uint64_t features) {
    if (features & ~FEATURES || !(features & 1ull << VIRTIO_F_VERSION_1))
        return -EINVAL;
    front->features = features;
    for (uint32_t i = 0; i < front->guest->queue_count; i++) {
        struct virtqueue *queue = &front->guest->queues[i];
        queue_lock(queue);
        queue->event_index = features & 1ull << VIRTIO_RING_F_EVENT_IDX;
        queue->indirect = features & 1ull << VIRTIO_RING_F_INDIRECT_DESC;
        if (!(features & 1ull << FEATURE_PROTOCOL_FEATURES))
            queue->enabled = true;
        guest_queue_update(front->guest, queue);
        queue_unlock(queue);
    }
    return 0;
}

/* ---- in-flight tracking ---- */

static int inflight_map(struct front_end *front, const struct inflight_message *layout, int fd) {
    struct stat st;
    const struct kvfs_virtiofs_config *config = &front->guest->config;
    uint64_t size = inflight_step(layout) * layout->queue_count;
    int error = shared_check(fd, config->memory_types, config->memory_type_count);
    if (error < 0)
        return error;
    for (uint32_t i = 0; i < front->guest->queue_count; i++)
        if (front->guest->queues[i].started)
            return -EBUSY;
    if (layout->queue_count == 0 || layout->queue_count > QUEUES_MAX || layout->queue_size == 0 || layout->queue_size > QUEUE_SIZE_MAX ||
        layout->map_offset % PAGE || layout->map_size < size || fstat(fd, &st) < 0 || layout->map_offset > INT64_MAX - size ||
        (uint64_t)st.st_size < layout->map_offset + size)
        return -EINVAL;
    void *map = shared_map(&front->guest->owner, fd, layout->map_offset, size, &error);
    if (!map)
        return error;
    uint8_t *before = front->inflight;
    uint64_t before_size = front->inflight_size;
    front->inflight = map;
    front->inflight_size = size;
    front->inflight_layout = *layout;
    for (uint32_t i = 0; i < front->guest->queue_count; i++) {
        queue_lock(&front->guest->queues[i]);
        inflight_attach(front, &front->guest->queues[i]);
        queue_unlock(&front->guest->queues[i]);
    }
    if (before)
        shared_unmap(before, before_size);
    return 0;
}

static int get_inflight_fd(struct front_end *front, struct vhost_message *message) {
    struct inflight_message *layout = &message->inflight;
    if (layout->queue_count == 0 || layout->queue_count > front->guest->queue_count || layout->queue_size == 0 || layout->queue_size > QUEUE_SIZE_MAX)
        return -EINVAL;
    layout->map_size = inflight_step(layout) * layout->queue_count;
    layout->map_offset = 0;
    int fd = descriptor_above(memfd_create("kvfs-inflight", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    int r = fd < 0 || ftruncate(fd, (off_t)layout->map_size) < 0 ? -errno : 0;
    if (r == 0 && fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) < 0)
        r = -errno;
    if (r == 0)
        r = inflight_map(front, layout, fd);
    if (r == 0)
        r = message_reply(front->fd, message, sizeof(*layout), fd);
    if (fd >= 0)
        close(fd);
    return r;
}

/* ---- messages ---- */

static int get_config(struct front_end *front, struct vhost_message *message) {
    struct config_message *config = &message->config;
    struct virtio_fs_config space = {.num_request_queues = front->guest->config.queue_count};
    uint32_t fixed = offsetof(struct config_message, data);
    if (message->header.size < fixed || config->size > CONFIG_MAX || message->header.size < fixed + config->size ||
        (uint64_t)config->offset + config->size > sizeof(space)) {
        config->size = 0; /* the protocol's way to say no */
        return message_reply(front->fd, message, 0, -1);
    }
    memcpy(space.tag, front->guest->config.tag, sizeof(space.tag));
    memcpy(config->data, (uint8_t *)&space + config->offset, config->size);
    return message_reply(front->fd, message, fixed + config->size, -1);
}

static uint32_t size_minimum(uint32_t request) {
    switch (request) {
    case SET_FEATURES:
    case SET_PROTOCOL_FEATURES:
    case SET_VRING_NUM:
    case SET_VRING_BASE:
    case GET_VRING_BASE:
    case SET_VRING_ENABLE:
    case SET_VRING_KICK:
    case SET_VRING_CALL:
    case SET_VRING_ERR: return sizeof(uint64_t);
    case SET_VRING_ADDR: return sizeof(struct vring_address);
    case GET_INFLIGHT_FD:
    case SET_INFLIGHT_FD: return offsetof(struct inflight_message, queue_size) + sizeof(uint16_t);
    default: return 0;
    }
}

/* 0: done, nothing sent. 1: answered. -errno: refused; its descriptors may have been refused already. */
static int handle(struct front_end *front, struct vhost_message *message, int refused) {
    struct guest *guest = front->guest;
    struct virtqueue *queue = NULL;
    uint32_t request = message->header.request;
    int r = 0;
    if (message->header.size < size_minimum(request))
        return -EPROTO;
    if (refused)
        return request == SET_MEM_TABLE || request == ADD_MEM_REG || request == SET_INFLIGHT_FD ? refused : -EPROTO;
    if ((request >= SET_VRING_NUM && request <= SET_VRING_ERR) || request == SET_VRING_ENABLE) {
        bool event = request == SET_VRING_KICK || request == SET_VRING_CALL || request == SET_VRING_ERR;
        uint64_t index = event ? message->u64 & 0xff : message->state.index;
        if (index >= guest->queue_count)
            return -EINVAL;
        queue = &guest->queues[index];
    }
    switch (request) {
    case GET_FEATURES: message->u64 = FEATURES; break;
    case GET_PROTOCOL_FEATURES: message->u64 = PROTOCOL_FEATURES; break;
    case GET_QUEUE_NUM: message->u64 = guest->queue_count; break;
    case GET_MAX_MEM_SLOTS: message->u64 = REGIONS_MAX; break;
    case SET_FEATURES: return set_features(front, message->u64);
    case SET_PROTOCOL_FEATURES:
        if (message->u64 & ~PROTOCOL_FEATURES)
            return -EINVAL;
        front->protocol_features = message->u64;
        return 0;
    case SET_OWNER: return 0;
    case RESET_OWNER: /* obsolete; the specification lets it disable the rings */
        for (uint32_t i = 0; i < guest->queue_count; i++)
            guest_queue_stop(guest, &guest->queues[i], true, DRAIN_TIMEOUT_MS);
        return 0;
    case SET_MEM_TABLE: return set_mem_table(front, message);
    case ADD_MEM_REG: return change_region(front, message, true);
    case REM_MEM_REG: return change_region(front, message, false);
    case SET_VRING_NUM:
    case SET_VRING_BASE:
    case SET_VRING_ADDR:
    case SET_VRING_ENABLE:
        queue_lock(queue);
        r = set_vring(front, queue, message);
        queue_unlock(queue);
        return r;
    case SET_VRING_KICK:
    case SET_VRING_CALL:
    case SET_VRING_ERR:
        queue_lock(queue);
        r = set_event(guest, queue, message);
        queue_unlock(queue);
        return r;
    case GET_VRING_BASE: get_vring_base(front, queue, message); break;
    case GET_CONFIG: r = get_config(front, message); return r < 0 ? r : 1;
    case GET_INFLIGHT_FD: r = get_inflight_fd(front, message); return r < 0 ? r : 1;
    case SET_INFLIGHT_FD: return message->fd_count == 1 ? inflight_map(front, &message->inflight, message->fds[0]) : -EPROTO;
    default: return -EOPNOTSUPP;
    }
    r = message_reply(front->fd, message, sizeof(uint64_t), -1);
    return r < 0 ? r : 1;
}

void vhost_user_serve(struct guest *guest, int fd) {
    struct front_end front = {.guest = guest, .fd = fd};
    struct timeval timeout = {.tv_sec = MESSAGE_TIMEOUT_S};
    struct vhost_message *message = malloc(sizeof(*message));
    int r = message ? 0 : -ENOMEM;
    if (setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof(timeout)) < 0 ||
        setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &timeout, sizeof(timeout)) < 0)
        r = -errno;
    int channel = r < 0 ? r : porter_start(guest->porters, &guest->config, fd);
    if (channel < 0)
        r = channel;
    bool stopping = false;
    while (r >= 0) {
        /* A second front end is turned away at once rather than left waiting for its first answer. */
        struct pollfd polls[4] = {{.fd = channel, .events = POLLIN},
                                  {.fd = guest->stop_fd, .events = POLLIN},
                                  {.fd = porters_have_room(guest->porters) ? guest->listen_fd : -1, .events = POLLIN},
                                  {.fd = fd, .events = POLLRDHUP}};
        int ready = poll(polls, 4, LOOK_AGAIN_MS);
        if (ready == 0)
            guest_look_again(guest);
        if (ready <= 0)
            continue;
        stopping = polls[1].revents != 0;
        if (stopping)
            break;
        if (polls[0].revents == 0 && polls[3].revents) { /* the porter may be stuck, and never take it */
            r = -ECONNRESET;
            break;
        }
        if (polls[0].revents == 0) {
            int second = descriptor_above(accept4(guest->listen_fd, NULL, NULL, SOCK_CLOEXEC));
            if (second >= 0)
                porter_end(porter_start(guest->porters, &guest->config, second), second);
            continue;
        }
        int refused = 0;
        r = message_receive(channel, message, &refused);
        if (r == 0) {
            bool ack = message->header.flags & FLAG_NEED_REPLY && front.protocol_features & 1ull << PROTOCOL_REPLY_ACK;
            r = handle(&front, message, refused);
            if (r <= 0 && ack) {
                if (r < 0) {
                    atomic_fetch_add(&guest->protocol_errors, 1);
                    guest_error(guest, UINT32_MAX, r);
                }
                message->u64 = r < 0;
                r = message_reply(fd, message, sizeof(uint64_t), -1);
            }
        }
        fds_close(message);
    }
    porter_end(channel, fd);
    if (r < 0 && r != -ECONNRESET && r != -EPIPE) {
        atomic_fetch_add(&guest->protocol_errors, 1);
        guest_error(guest, UINT32_MAX, r);
    }
    for (uint32_t i = 0; stopping && i < guest->queue_count; i++)
        guest_queue_stop(guest, &guest->queues[i], true, DRAIN_TIMEOUT_MS);
    guest_disconnect(guest);
    guest_memory_put(front.memory);
    if (front.inflight)
        shared_unmap(front.inflight, front.inflight_size);
    free(message);
}
