/* The threads of a transport: each takes requests, answers those that it can, and reaps its own ring.
 *
 * One thread, the leader, also waits for the session's replies. Readers take requests all the time: the leader of /dev/fuse, and all threads of a
 * guest, each for its own queues. The others help. They are woken when requests queue up, take part while there is work, and go back to sleep. So one
 * client costs one wake-up a request, and many clients use every core.
 *
 * A thread polls for a short while before it sleeps, if at most one client seems active and its last requests came within such a while. One
 * thread of the plane polls at a time. */
#include "base/descriptor.h"
#include "fuse/fuse.h"

#include <fcntl.h>
#include <sched.h>
#include <sys/eventfd.h>
#include <unistd.h>

#define POLL_SESSION 1
#define POLL_WAKE 2
/* A helper is woken when requests of this weight were served without finding the queue empty in between. A RELEASE that comes with the next OPEN
 * weighs nothing: otherwise one client would wake the second thread for every file. */
#define BACKLOG 4
#define BATCH 8
#define IDLE_NS 1000000000ull
#define LEAVE_NS 1000000ull /* between looks for what is under way in a mount that is to be left */
#define UNPARK_NS 250000000ull
/* Requests that queue up mean that several clients are at work. They can use the time that a poll would burn (8 readers of 2 MiB on two cores: 9.3
 * against 5.1 GB/s). */
#define CROWDED_NS 5000000ull
/* Luck gains one for work that came within the time of a poll, and loses two for work that did not. A thread polls with half of LUCK_MAX. */
#define LUCK_MAX 16

static void wake_helper(struct server *server) {
    struct transport *transport = server->transport;
    for (uint32_t i = 0; i < transport->server_count; i++) {
        struct server *other = &transport->servers[i];
        if (other != server && (transport->guest || i) && !atomic_exchange(&other->active, true)) {
            COUNT(server->plane, wakeups, 1);
            server_wake(other);
            return;
        }
    }
}

/* The mount is to be left: no more requests are taken. */
static bool leaves(const struct server *server) {
    return atomic_load_explicit(&server->plane->fuse->leave_until_ns, memory_order_relaxed) && !server->transport->guest;
}

/* Nothing of it is under way, or not in time. */
static bool is_left(const struct server *server) {
    struct kvfs_plane *plane = server->plane;
    uint64_t until = atomic_load_explicit(&plane->fuse->leave_until_ns, memory_order_relaxed);
    if (!until || server->transport->guest)
        return false;
    return (!atomic_load(&server->transport->forwarded) && !requests_are_busy(plane)) || now_ns() > until;
}

/* False: work has come after all. */
static bool sleep_until_work(struct server *server, bool leader, uint64_t timeout_ns) {
    struct kvfs_plane *plane = server->plane;
    if (!(server->io.ring.armed & (1u << POLL_WAKE))) { /* its poll has fired, or was never armed: empty it first, then look, then arm */
        uint64_t count;
        ssize_t n = read(server->wake_fd, &count, sizeof(count));
        (void)n;
    }
    if (leaves(server)) { /* the kernel keeps the rest */
    } else if (server->reader ? server->transport->ops->arm(server) : atomic_load(&server->active)) {
        return false;
    }
    COUNT(plane, sleeps, 1);
    if (leader && plane->fuse->mux.fd >= 0 && (!server->transport->guest || atomic_load(&server->transport->forwarded)))
        ring_poll(&server->io.ring, plane->fuse->mux.fd, POLL_SESSION, false);
    ring_poll(&server->io.ring, server->wake_fd, POLL_WAKE, false);
    ring_wait(&server->io.ring, timeout_ns);
    return true;
}

static void transport_end(struct transport *transport) {
    struct kvfs_plane *plane = transport->plane;
    transport_forget(transport);
    if (atomic_fetch_sub(&plane->fuse->transport_count, 1) == 1) {
        mux_close(plane);
        event_add(plane, KVFS_EVENT_TRANSPORTS_GONE, 0, 0);
    }
}

/* How a thread spends its time between requests. */
struct pace {
    bool leader, spinning, trimmed;
    uint64_t spin_ns;    /* a poll lasts so long */
    uint64_t expired_ns; /* time of the last look at deadlines */
    uint64_t unparked_ns;
    uint64_t crowded_ns; /* until then several clients are taken to be at work */
    uint64_t idle_ns;    /* start of the idle time; 0: not idle */
    uint32_t run;        /* weight of requests in a row */
    int lucks[2], *luck; /* [1]: while our own I/O is under way */
};

/* One round: completions, a request, a reply of the session. Returns the amount of work done; -errno: the transport has ended. */
static int work_once(struct server *server, struct pace *pace, bool reading, bool *requested) {
    int work = (int)ring_reap(&server->io.ring);
    if (work && server->io.waiting_reads)
        reads_retry(&server->io);
    if (reading && !leaves(server)) {
        int r = server->transport->ops->serve(server, &pace->run);
        if (r < 0)
            return r;
        if (r > 0 && pace->run >= BACKLOG) {
            wake_helper(server);
            pace->crowded_ns = now_ns() + CROWDED_NS;
            pace->run = 0;
        } else if (r == 0) {
            pace->run = 0;
        }
        *requested = r > 0;
        work += r;
    }
    if (pace->leader && server->plane->fuse->mux.session_count && mux_receive(server->plane))
        work++;
    return work;
}

static void work_done(struct server *server, struct pace *pace, uint64_t now) {
    int *luck = pace->luck;
    if (pace->idle_ns)
        *luck = pace->idle_ns - server->last_work_ns <= pace->spin_ns ? *luck + (*luck < LUCK_MAX) : *luck < 2 ? 0 : *luck - 2;
    pace->idle_ns = 0;
    server->last_work_ns = now;
    pace->trimmed = false;
}

static void spin_end(struct server *server, struct pace *pace) {
    if (pace->spinning)
        atomic_store(&server->plane->fuse->spinning, false);
    pace->spinning = false;
}

/* There was no work: true if the thread is to look again at once, false if it is time to sleep. */
static bool spin(struct server *server, struct pace *pace, uint64_t now) {
    struct kvfs_plane *plane = server->plane;
    if (!pace->idle_ns)
        pace->luck = &pace->lucks[!ring_idle(&server->io.ring)];
    pace->idle_ns = now;
    bool ringing = atomic_load_explicit(&server->transport->uring_on, memory_order_relaxed); /* a client may need this very CPU */
    if (server->reader && !ringing && now > pace->crowded_ns && now - server->last_work_ns < pace->spin_ns && *pace->luck >= LUCK_MAX / 2) {
        if (!pace->spinning && !atomic_exchange(&plane->fuse->spinning, true)) {
            pace->spinning = true;
            COUNT(plane, spins, 1);
        }
        if (pace->spinning) {
            sched_yield();
            return true;
        }
    }
    spin_end(server, pace);
    return false;
}

static void rest(struct server *server, struct pace *pace) {
    struct kvfs_plane *plane = server->plane;
    uint64_t timeout = pace->leader && !pace->trimmed ? IDLE_NS : 60 * IDLE_NS;
    if (leaves(server))
        timeout = LEAVE_NS;
    if (server->io.waiting_reads)
        timeout = 1000000;
    else if (pace->leader && mux_waiting(plane))
        timeout = 20000000;
    else if (pace->leader && (atomic_load(&plane->count.parked) || staging_is_short(plane))) /* those that wait may be with the workers just now */
        timeout = UNPARK_NS;
    if (!sleep_until_work(server, pace->leader, timeout))
        return;
    uint64_t now = pace->idle_ns = now_ns();
    if (pace->leader && !pace->trimmed && now - server->last_work_ns > IDLE_NS) {
        pace->trimmed = true;
        arena_trim(&plane->staging);
        arena_trim(&plane->reading);
        arena_trim(&plane->reading_small);
        arena_trim(&plane->staging_small);
    }
    if (server->io.waiting_reads)
        reads_retry(&server->io);
    server->last_work_ns = server->last_work_ns == 0 ? now : server->last_work_ns;
}

static void server_end(struct server *server) {
    struct transport *transport = server->transport;
    ring_submit(&server->io.ring); /* the last answers */
    atomic_store(&transport->ended, true);
    for (uint32_t i = 0; i < transport->server_count; i++)
        if (&transport->servers[i] != server)
            server_wake(&transport->servers[i]);
    uint64_t patience = server->plane->array.io_timeout_ms * 2000000ull, until = now_ns() + patience;
    while (!ring_idle(&server->io.ring) && (now_ns() < until || now_ns() < server->io.ring.answered_ns + patience)) {
        ring_wait(&server->io.ring, 10000000);
        ring_reap(&server->io.ring);
    }
    while (server->io.waiting_reads) {
        struct request *request = server->io.waiting_reads;
        server->io.waiting_reads = request->next;
        request_put(server->plane, request);
    }
    slot_put(server->landing);
    server->landing = NULL;
    if (atomic_fetch_sub(&transport->servers_running, 1) == 1)
        transport_end(transport);
}

static void *server_main(void *argument) {
    struct server *server = argument;
    struct kvfs_plane *plane = server->plane;
    /* Between an answer and a guest's next request lie two of its interrupts, and an emulated CPU. */
    struct pace pace = {.leader = server->index == 0,
                        .spin_ns = plane->config.spin_us * (server->transport->guest ? 1500ull : 1000ull),
                        .lucks = {LUCK_MAX / 2, LUCK_MAX / 2}};
    pace.luck = pace.lucks;
    for (;;) {
        bool reading = server->reader || atomic_load(&server->active), requested = false;
        int work = work_once(server, &pace, reading, &requested);
        if (work < 0)
            break;
        /* I/O of a slab comes many requests at a time: one call for all that are there, up to BATCH. */
        if (server->io.batching && requested && server->io.ring.queued && server->io.ring.queued < BATCH)
            continue;
        server->io.batching = false;
        /* Answers in FUSE's ring go with the call that sleeps, if nothing else has come: one call a request. */
        bool ringing = atomic_load_explicit(&server->transport->uring_on, memory_order_relaxed);
        if (ringing && requested && !server->arrived && server->io.ring.queued < BATCH)
            continue;
        if (!ringing || work)
            ring_submit(&server->io.ring);
        if (atomic_load_explicit(&server->transport->ended, memory_order_relaxed) || atomic_load_explicit(&plane->stopping, memory_order_relaxed))
            break;
        if (pace.leader && is_left(server))
            break;
        uint64_t now = now_ns();
        if (pace.leader && now - pace.expired_ns > 50000000) {
            pace.expired_ns = now;
            mux_expire(plane, now);
            if (plane->fuse->mux.queue_count)
                mux_flush(plane);
        }
        if (pace.leader && now - pace.unparked_ns > UNPARK_NS) {
            pace.unparked_ns = now;
            memory_unpark(plane); /* so no request waits for memory for ever */
        }
        if (work) {
            work_done(server, &pace, now);
        } else if (!spin(server, &pace, now)) {
            if (reading)
                atomic_store(&server->active, false);
            rest(server, &pace);
        }
    }
    spin_end(server, &pace);
    server_end(server);
    return NULL;
}

int server_init(struct transport *transport, uint32_t index, int fd) {
    struct server *server = &transport->servers[index];
    server->plane = server->io.plane = transport->plane;
    server->transport = transport;
    server->index = index;
    server->fd = fd;
    server->wake_fd = descriptor_above(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
    if (server->wake_fd < 0)
        return -errno;
    server->head = malloc(REQUEST_SMALL + 8);
    if (!server->head)
        return -ENOMEM;
    return (transport->guest ? ring_init : ring_init_wide)(&server->io.ring, &transport->plane->array, 256);
}

void server_free(struct server *server) {
    if (!server->plane)
        return;
    ring_free(&server->io.ring);
    free(server->head);
    free(server->chain);
    if (server->wake_fd >= 0)
        close(server->wake_fd);
    if (server->fd >= 0)
        close(server->fd);
    memset(server, 0, sizeof(*server));
}

void transport_free(struct transport *transport) {
    for (uint32_t i = 0; i < SERVERS_MAX; i++)
        server_free(&transport->servers[i]);
    uring_free(transport->uring);
    free(transport);
}

/* The transport counts from here on, and ends when its last thread does. */
int servers_start(struct transport *transport) {
    int r = 0;
    atomic_fetch_add(&transport->plane->fuse->transport_count, 1);
    atomic_store(&transport->servers_running, transport->server_count);
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
        server_wake(&transport->servers[i]);
    for (uint32_t i = 0; i < transport->server_count; i++)
        if (transport->servers[i].started) {
            pthread_join(transport->servers[i].thread, NULL);
            transport->servers[i].started = false;
        }
}
