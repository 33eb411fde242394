/* The /dev/fuse transport: server threads, each with a clone of the device and a ring of its own.
 *
 * One thread, the leader, waits for requests and for the session's replies; the others follow: they are woken when requests queue up behind the
 * leader, take part while there is work, and go back to sleep. So one client costs one wake-up a request and many clients use every core. Before it
 * sleeps the leader polls for a short while, as long as that has lately been worth it and no more than one client seems to be at work.
 */
#include "internal.h"

#include <fcntl.h>
#include <sched.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <unistd.h>

#define POLL_FUSE 0
#define POLL_SESSION 1
#define POLL_WAKE 2
/* Weight of requests served without finding the queue empty in between, from which on a follower is worth its wake-up. A RELEASE that comes
 * with the next OPEN weighs nothing: one client would wake the second thread for every file. */
#define BACKLOG 4
#define IDLE_NS 1000000000ull
/* After requests have queued up, several clients are at work: what a poll would burn they can use (8 readers of 2 MiB on two cores: 9.3
 * against 5.1 GB/s). */
#define CROWDED_NS 5000000ull

static void wake(struct server *server) {
    uint64_t one = 1;
    if (write(server->wake_fd, &one, sizeof(one)) < 0)
        return; /* the counter is at its limit: it is awake */
}

void leader_wake(struct kvfs_plane *plane) {
    for (uint32_t i = 0; i < TRANSPORTS_MAX; i++)
        if (plane->transports[i] && !atomic_load(&plane->transports[i]->ended))
            wake(&plane->transports[i]->servers[0]);
}

static void wake_follower(struct server *server) {
    struct transport *transport = server->transport;
    for (uint32_t i = 1; i < transport->server_count; i++) {
        struct server *other = &transport->servers[i];
        if (other != server && !atomic_exchange(&other->active, true)) {
            COUNT(server->plane, wakeups, 1);
            wake(other);
            return;
        }
    }
}

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

/* One request, if there is one. 1, 0, or -errno when the transport has ended. */
static int serve_one(struct server *server, uint32_t *run) {
    struct kvfs_plane *plane = server->plane;
    if (!server->landing && !(server->landing = slot_get_extra(&plane->staging)))
        return 0; /* out of memory: requests stay queued in the kernel */
    struct iovec iovs[2] = {{server->head, REQUEST_HEAD}, {server->landing->data, server->landing->size}};
    ssize_t n = readv(server->fd, iovs, 2);
    if (n < 0)
        return errno == EAGAIN || errno == EINTR || errno == ENOENT ? 0 : -errno;
    const struct fuse_in_header *in = (const struct fuse_in_header *)(const void *)server->head;
    *run += weight_of(in->opcode, (size_t)n);
    fastpath_request(server, (size_t)n, &server->landing);
    return 1;
}

static void sleep_until_work(struct server *server, bool leader, uint64_t timeout_ns) {
    struct kvfs_plane *plane = server->plane;
    COUNT(plane, sleeps, 1);
    if (leader) {
        ring_poll(&server->ring, server->fd, POLL_FUSE);
        if (plane->mux.fd >= 0)
            ring_poll(&server->ring, plane->mux.fd, POLL_SESSION);
    }
    if (!(server->ring.armed & (1u << POLL_WAKE))) { /* its poll has fired, or was never armed: empty it first, then arm */
        uint64_t count;
        ssize_t n = read(server->wake_fd, &count, sizeof(count));
        (void)n;
    }
    ring_poll(&server->ring, server->wake_fd, POLL_WAKE);
    ring_wait(&server->ring, timeout_ns);
}

static void transport_end(struct transport *transport) {
    struct kvfs_plane *plane = transport->plane;
    mux_transport_ended(plane, transport);
    handles_drop(plane, transport);
    if (atomic_fetch_sub(&plane->transport_count, 1) == 1) {
        mux_close(plane);
        event_add(plane, KVFS_EVENT_TRANSPORTS_GONE, 0, 0);
    }
}

static void *server_main(void *argument) {
    struct server *server = argument;
    struct kvfs_plane *plane = server->plane;
    struct transport *transport = server->transport;
    const bool leader = server->index == 0;
    const uint64_t spin_ns = plane->config.spin_us * 1000ull;
    uint64_t expired_ns = 0, crowded_ns = 0;
    uint32_t run = 0, useless = 0;
    bool spinning = false, trimmed = false;
    for (;;) {
        bool reading = leader || atomic_load(&server->active);
        int work = (int)ring_reap(&server->ring);
        if (work && server->waiting_reads)
            fastpath_retry_reads(server);
        if (reading) {
            int r = serve_one(server, &run);
            if (r < 0)
                break;
            if (r > 0 && run >= BACKLOG) {
                wake_follower(server);
                crowded_ns = now_ns() + CROWDED_NS;
                run = 0;
            } else if (r == 0) {
                run = 0;
            }
            work += r;
        }
        if (leader && plane->mux.live_count && mux_receive(plane))
            work++;
        ring_submit(&server->ring);
        if (atomic_load_explicit(&transport->ended, memory_order_relaxed) || atomic_load_explicit(&plane->stopping, memory_order_relaxed))
            break;
        uint64_t now = now_ns();
        if (leader && now - expired_ns > 50000000) {
            expired_ns = now;
            mux_expire(plane, now);
            if (plane->mux.queue)
                mux_flush(plane);
        }
        if (work) {
            if (spinning)
                useless = 0;
            server->last_work_ns = now;
            trimmed = false;
            continue;
        }
        /* Poll for a while; after many whiles without success only now and then, so that a rare request does not cost a spin each time. */
        if (leader && spin_ns && now > crowded_ns && now - server->last_work_ns < spin_ns && (useless < 8 || spinning)) {
            if (!spinning && !atomic_exchange(&plane->spinning, true)) {
                spinning = true;
                COUNT(plane, spins, 1);
            }
            if (spinning) {
                sched_yield();
                continue;
            }
        }
        if (spinning) {
            spinning = false;
            atomic_store(&plane->spinning, false);
            useless++;
        }
        if (!leader && reading)
            atomic_store(&server->active, false);
        uint64_t timeout = leader ? trimmed ? 60 * IDLE_NS : IDLE_NS : 60 * IDLE_NS;
        if (server->waiting_reads)
            timeout = 1000000;
        else if (leader && mux_waiting(plane))
            timeout = 20000000;
        sleep_until_work(server, leader, timeout);
        now = now_ns();
        if (useless >= 8 && now - server->last_work_ns < spin_ns * 4)
            useless = 0; /* traffic is dense again */
        if (leader && !trimmed && now - server->last_work_ns > IDLE_NS) {
            trimmed = true;
            arena_trim(&plane->staging);
            arena_trim(&plane->reading);
            arena_trim(&plane->reading_small);
            arena_trim(&plane->staging_small);
        }
        if (server->waiting_reads)
            fastpath_retry_reads(server);
        if (leader && now - server->last_work_ns > 100000000)
            memory_unpark(plane); /* nothing that waits for memory waits for ever */
        server->last_work_ns = server->last_work_ns == 0 ? now : server->last_work_ns;
    }
    if (spinning)
        atomic_store(&plane->spinning, false);
    atomic_store(&transport->ended, true);
    for (uint32_t i = 0; i < transport->server_count; i++)
        if (&transport->servers[i] != server)
            wake(&transport->servers[i]);
    uint64_t until = now_ns() + plane->config.io_timeout_ms * 2000000ull;
    while (!ring_idle(&server->ring) && now_ns() < until) {
        ring_wait(&server->ring, 10000000);
        ring_reap(&server->ring);
    }
    while (server->waiting_reads) {
        struct request *request = server->waiting_reads;
        server->waiting_reads = request->next;
        request_put(plane, request);
    }
    slot_put(server->landing);
    server->landing = NULL;
    if (atomic_fetch_sub(&transport->servers_running, 1) == 1)
        transport_end(transport);
    return NULL;
}

static int server_init(struct transport *transport, uint32_t index, int fd) {
    struct server *server = &transport->servers[index];
    server->plane = transport->plane;
    server->transport = transport;
    server->index = index;
    server->wake_fd = -1;
    server->fd = fd;
    if (index) {
        server->fd = open("/dev/fuse", O_RDWR | O_CLOEXEC);
        if (server->fd < 0)
            return -errno;
        uint32_t source = (uint32_t)fd;
        if (ioctl(server->fd, FUSE_DEV_IOC_CLONE, &source) < 0)
            return -errno;
    }
    int flags = fcntl(server->fd, F_GETFL);
    if (flags < 0 || fcntl(server->fd, F_SETFL, flags | O_NONBLOCK) < 0 || fcntl(server->fd, F_SETFD, FD_CLOEXEC) < 0)
        return -errno;
    server->wake_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    if (server->wake_fd < 0)
        return -errno;
    server->head = malloc(REQUEST_SMALL + 8);
    if (!server->head)
        return -ENOMEM;
    return ring_init(&server->ring, transport->plane, 256);
}

void transport_free(struct transport *transport) {
    for (uint32_t i = 0; i < SERVERS_MAX; i++) {
        struct server *server = &transport->servers[i];
        if (!server->plane)
            continue;
        ring_free(&server->ring);
        free(server->head);
        if (server->wake_fd >= 0)
            close(server->wake_fd);
        if (server->fd >= 0)
            close(server->fd);
    }
    free(transport);
}

int transport_start(struct kvfs_plane *plane, int fd) {
    struct transport *transport = calloc(1, sizeof(*transport));
    if (!transport)
        return -ENOMEM;
    transport->plane = plane;
    transport->max_read = plane->config.max_read;
    uint32_t count = plane->config.server_threads;
    int r = 0;
    for (uint32_t i = 0; i < count && r == 0; i++) {
        r = server_init(transport, i, fd);
        if (r < 0 && i > 0) { /* no clone (an unprivileged user without access to /dev/fuse): serve with what there is */
            if (transport->servers[i].fd >= 0)
                close(transport->servers[i].fd);
            free(transport->servers[i].head);
            memset(&transport->servers[i], 0, sizeof(transport->servers[i]));
            r = 0;
            break;
        }
        transport->server_count = i + 1;
    }
    pthread_mutex_lock(&plane->transports_lock);
    uint32_t place = 0;
    while (place < TRANSPORTS_MAX && plane->transports[place])
        place++;
    if (r == 0 && place == TRANSPORTS_MAX)
        r = -EUSERS;
    if (r == 0) {
        plane->transports[place] = transport;
        atomic_fetch_add(&plane->transport_count, 1);
        atomic_store(&transport->servers_running, transport->server_count);
    }
    pthread_mutex_unlock(&plane->transports_lock);
    if (r < 0) {
        transport->servers[0].fd = -1; /* stays the caller's */
        transport_free(transport);
        return r;
    }
    for (uint32_t i = 0; i < transport->server_count; i++) {
        struct server *server = &transport->servers[i];
        int error = pthread_create(&server->thread, NULL, server_main, server);
        if (error) {
            atomic_store(&transport->ended, true);
            atomic_fetch_sub(&transport->servers_running, 1);
            r = -error;
        } else {
            server->started = true;
        }
    }
    return r;
}

void transport_stop(struct transport *transport) {
    atomic_store(&transport->ended, true);
    for (uint32_t i = 0; i < transport->server_count; i++)
        wake(&transport->servers[i]);
    for (uint32_t i = 0; i < transport->server_count; i++)
        if (transport->servers[i].started)
            pthread_join(transport->servers[i].thread, NULL);
}
