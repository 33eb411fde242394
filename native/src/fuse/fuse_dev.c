/* The /dev/fuse transport: server threads, each with a clone of the device. */
#include "base/descriptor.h"
#include "fuse/fuse.h"

#include <fcntl.h>
#include <sys/ioctl.h>
#include <unistd.h>

#define POLL_FUSE 0
#define NOTIFY_RESEND 7    /* FUSE_NOTIFY_RESEND, Linux 6.9 */
#define NOTIFY_INC_EPOCH 8 /* FUSE_NOTIFY_INC_EPOCH, Linux 6.16 */

static uint32_t weight_of(uint32_t opcode, size_t size) {
    switch (opcode) {
    case FUSE_RELEASE:
    case FUSE_FORGET:
    case FUSE_BATCH_FORGET: return 0;
    case FUSE_READ: return 2;
    case FUSE_WRITE: return size > SMALL_SIZE ? 2 : 1;
    default: return 1;
    }
}

static int ring_serve(struct server *server) {
    size_t size = 0;
    int r = uring_take(server, &size);
    if (size)
        dispatch(server, size);
    return r;
}

/* One request, if there is one. 1, 0, or -errno when the transport has ended. */
static int fuse_serve(struct server *server, uint32_t *run) {
    struct kvfs_plane *plane = server->plane;
    if (!server->landing && !(server->landing = slot_get_extra(&plane->staging)))
        return 0; /* out of memory: requests stay queued in the kernel */
    bool rings = atomic_load_explicit(&server->transport->uring_on, memory_order_acquire);
    if (rings && (server->index || server->io.ring.armed & (1u << POLL_FUSE)))
        return ring_serve(server);
    struct iovec iovs[2] = {{server->head, REQUEST_HEAD}, {server->landing->data, server->landing->size}};
    ssize_t n = readv(server->fd, iovs, 2);
    if (n < 0 && errno != EAGAIN && errno != EINTR && errno != ENOENT)
        return -errno;
    if (n < 0 && rings && errno == EAGAIN)
        ring_poll(&server->io.ring, server->fd, POLL_FUSE, false); /* until that fires there is nothing to read */
    if (n < 0)
        return rings ? ring_serve(server) : 0;
    const struct fuse_in_header *in = (const struct fuse_in_header *)(const void *)server->head;
    *run += weight_of(in->opcode, (size_t)n);
    if (in->opcode != FUSE_WRITE && n > REQUEST_HEAD && n <= REQUEST_SMALL) /* the landing memory holds payload alone */
        memcpy(server->head + REQUEST_HEAD, server->landing->data, (size_t)n - REQUEST_HEAD);
    dispatch(server, (size_t)n);
    return 1;
}

static bool fuse_arm(struct server *server) {
    bool rings = atomic_load(&server->transport->uring_on);
    if (!rings || server->index == 0)
        ring_poll(&server->io.ring, server->fd, POLL_FUSE, false);
    return rings && uring_pending(server);
}

/* A failed write means that the request was interrupted or the transport is gone: nobody waits. */
static void fuse_reply(struct server *server, uint64_t unique, int error, uint32_t placed, const struct iovec *iovs, uint32_t count) {
    (void)placed;
    if (uring_owns(unique)) {
        uring_reply(server, unique, error, iovs, count);
        return;
    }
    struct iovec out[READ_SLOTS + 2];
    struct fuse_out_header head = {.len = sizeof(head), .error = error, .unique = unique};
    out[0] = (struct iovec){&head, sizeof(head)};
    for (uint32_t i = 0; i < count && error == 0; i++) {
        out[i + 1] = iovs[i];
        head.len += (uint32_t)iovs[i].iov_len;
    }
    if (atomic_load_explicit(&server->transport->ended, memory_order_relaxed))
        return;
    ssize_t n = writev(server->fd, out, error == 0 ? (int)count + 1 : 1);
    (void)n;
}

static const struct transport_ops fuse_ops = {fuse_serve, fuse_arm, fuse_reply, NULL};

/* The device itself for the first server, clones of it for the others. */
static int fuse_open(int fd, bool clone) {
    if (clone) {
        int copy = descriptor_above(open("/dev/fuse", O_RDWR | O_CLOEXEC));
        uint32_t source = (uint32_t)fd;
        if (copy < 0 || ioctl(copy, FUSE_DEV_IOC_CLONE, &source) < 0) {
            int error = -errno;
            if (copy >= 0)
                close(copy);
            return error;
        }
        fd = copy;
    }
    int flags = fcntl(fd, F_GETFL);
    if (flags < 0 || fcntl(fd, F_SETFL, flags | O_NONBLOCK) < 0 || fcntl(fd, F_SETFD, FD_CLOEXEC) < 0)
        return -errno;
    return fd;
}

static struct transport *transport_new(struct kvfs_plane *plane) {
    struct transport *transport = calloc(1, sizeof(*transport));
    if (!transport)
        return NULL;
    transport->plane = plane;
    transport->ops = &fuse_ops;
    transport->max_read = plane->config.max_read;
    return transport;
}

/* Among the plane's transports, if there is room: 0 or -EUSERS. */
static int transport_enter(struct transport *transport) {
    struct fuse *fuse = transport->plane->fuse;
    pthread_mutex_lock(&fuse->transports_lock);
    uint32_t place = 0;
    while (place < TRANSPORTS_MAX && fuse->transports[place])
        place++;
    if (place < TRANSPORTS_MAX)
        fuse->transports[place] = transport;
    pthread_mutex_unlock(&fuse->transports_lock);
    return place < TRANSPORTS_MAX ? 0 : -EUSERS;
}

int transport_start(struct kvfs_plane *plane, int fd) {
    struct transport *transport = transport_new(plane);
    if (!transport)
        return -ENOMEM;
    int r = 0;
    for (uint32_t i = 0; i < plane->config.server_threads && r == 0; i++) {
        int own = fuse_open(fd, i > 0);
        r = own < 0 ? own : server_init(transport, i, own);
        if (r < 0 && i > 0) { /* no clone (an unprivileged user without access to /dev/fuse): serve with the threads so far */
            server_free(&transport->servers[i]);
            r = 0;
            break;
        }
        transport->servers[i].reader = i == 0;
        transport->server_count = i + 1;
    }
    if (r == 0)
        r = transport_enter(transport);
    if (r < 0) {
        transport->servers[0].fd = -1; /* stays the caller's */
        transport_free(transport);
        return r;
    }
    return servers_start(transport);
}

static int notify_write(struct transport *transport, int code) {
    struct fuse_out_header head = {.len = sizeof(head), .error = code, .unique = 0};
    return write(transport->servers[0].fd, &head, sizeof(head)) < 0 ? -errno : 0;
}

/* Before its threads start, so nothing else is read or answered yet. */
static int ask_again(struct transport *transport) {
    int r = notify_write(transport, NOTIFY_RESEND);
    return r == 0 && transport->inc_epoch ? notify_write(transport, NOTIFY_INC_EPOCH) : r;
}

/* A thread for each descriptor: a request is answered by the one that it came from. */
int transport_take(struct kvfs_plane *plane, const int *fds, uint32_t count, const struct kvfs_held *held) {
    struct transport *transport = transport_new(plane);
    int r = transport ? 0 : -ENOMEM;
    uint32_t own = 0;
    for (; own < count && r == 0; own++) {
        int fd = fuse_open(fds[own], false);
        r = server_init(transport, own, fds[own]);
        r = fd < 0 ? fd : r;
        transport->servers[own].reader = own == 0;
        transport->server_count = own + 1;
    }
    for (; own < count; own++)
        close(fds[own]);
    if (r == 0) {
        transport->taken = true;
        transport->max_read = held->max_read;
        transport_agreed(transport, held->minor, held->flags);
        atomic_store(&transport->initialized, true);
        handles_adopt(plane, transport);
        r = lost_begin(plane);
        if (r == 0)
            r = ask_again(transport);
        if (r == 0)
            r = transport_enter(transport);
    }
    if (r < 0) {
        if (transport)
            transport_free(transport);
        return r;
    }
    return servers_start(transport);
}
