/* A ring where io_uring is denied: each device of the array has a few threads, which do one blocking I/O at a time, for all rings.
 *
 * A device has threads of its own, so that one that hangs takes nobody else's. There is always one; more are made while I/O waits, up to THREADS_MAX,
 * and end when they have had nothing to do for a while. A part of an I/O waits in its device's queue, and is then a thread's. It comes back to its
 * ring's completions (`home`), and the ring's own thread reaps it. A part that is cancelled while it waits ends at once. One that is a thread's ends
 * when the device answers, as with io_uring: until then its memory is the kernel's (I5).
 *
 * A part keeps the file that its device's descriptor led to when it began: a thread never meets a descriptor that was closed and used again.
 * Descriptors that a ring polls are watched by epoll(7). Signals are blocked in the threads. A child after fork() has none of them, and makes an array of
 * its own.
 *
 * Locks: a home's is taken inside a pool's, never the other way round. */
#include "base/descriptor.h"
#include "io/ring.h"

#include <signal.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>

#define THREADS_MAX 32u /* of a device */
#define IDLE_S 10
#define END_S 1 /* then a device that has not answered is not waited for */
#define STACK_SIZE ((size_t)256 << 10)
#define EVENTS 16
#define HOME_EVENT UINT64_MAX
#define EDGES ((uint64_t)16) /* beside a tag: the poll stays */

struct thread_file {
    int fd;
    uint32_t users;   /* under the pool's lock: the pool, and parts */
    uint32_t running; /* threads that are in I/O of it */
};
struct pool {
    pthread_mutex_t lock;
    pthread_cond_t more, none;
    struct io_part *first, *last;
    struct thread_file *file;
    uint32_t waiting; /* parts in the queue */
    uint32_t count, idle, failed;
    uint32_t stale; /* threads that are in I/O of a file that the device has left: they take no place of others */
    bool ending;
};
struct threads {
    uint32_t device_count;
    struct pool pools[];
};
/* Where the parts of one ring come back to. It outlives a ring whose device has not answered. */
struct ring_threads {
    pthread_mutex_t lock;
    struct io_part *done, **done_end;
    atomic_bool some; /* done is not empty: a hint */
    bool asleep;
    int event_fd, epoll_fd;
    int watched[8]; /* by tag: the descriptor */
};

/* ---- completions ---- */

static void home_add(struct ring_threads *home, struct io_part *part) {
    pthread_mutex_lock(&home->lock);
    part->next = NULL;
    *home->done_end = part;
    home->done_end = &part->next;
    atomic_store_explicit(&home->some, true, memory_order_release);
    bool wake = home->asleep;
    home->asleep = false;
    if (wake)
        wake_fd(home->event_fd);
    pthread_mutex_unlock(&home->lock); /* from here on the ring may be gone */
}

/* ---- the threads of a device ---- */

static void file_put(struct thread_file *file) {
    if (--file->users)
        return;
    close(file->fd);
    free(file);
}

static int part_run(const struct io_part *part) {
    const struct iovec *iovs = &part->group->iovs[part->iov_first];
    const off_t offset = (off_t)part->device_offset;
    ssize_t n;
    do
        n = part->group->write ? pwritev2(part->file->fd, iovs, part->iov_count, offset, 0)
                               : preadv2(part->file->fd, iovs, part->iov_count, offset, 0);
    while (n < 0 && errno == EINTR);
    return n < 0 ? -errno : (int)n;
}

static void *thread_main(void *argument) {
    struct pool *pool = argument;
    kvfs_own_thread();
    pthread_mutex_lock(&pool->lock);
    for (;;) {
        bool late = false;
        while (!pool->first && !pool->ending && !(late && pool->count > 1)) {
            struct timespec until;
            clock_gettime(CLOCK_MONOTONIC, &until);
            until.tv_sec += IDLE_S;
            pool->idle++;
            late = pthread_cond_timedwait(&pool->more, &pool->lock, &until) == ETIMEDOUT;
            pool->idle--;
        }
        struct io_part *part = pool->first;
        if (!part)
            break;
        pool->first = part->next;
        if (!pool->first)
            pool->last = NULL;
        pool->waiting--;
        struct thread_file *file = part->file;
        file->running++;
        pool->stale += file != pool->file;
        pthread_mutex_unlock(&pool->lock);
        part->error = part_run(part);
        home_add(part->home, part);
        pthread_mutex_lock(&pool->lock);
        file->running--;
        pool->stale -= file != pool->file;
        file_put(file);
    }
    pool->count--;
    pthread_cond_signal(&pool->none);
    pthread_mutex_unlock(&pool->lock);
    return NULL;
}

/* 0 or -errno. The caller has counted it. */
static int thread_make(struct pool *pool) {
    pthread_attr_t attributes;
    pthread_t thread;
    sigset_t all, before;
    int r = pthread_attr_init(&attributes);
    if (r)
        return -r;
    pthread_attr_setstacksize(&attributes, STACK_SIZE);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    r = pthread_create(&thread, &attributes, thread_main, pool);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
    return -r;
}

void threads_part(struct ring *ring, struct io_part *part) {
    struct pool *pool = &atomic_load(&ring->array->threads)->pools[part->device];
    part->home = ring->threads;
    part->next = NULL;
    pthread_mutex_lock(&pool->lock);
    part->file = pool->file;
    part->file->users++;
    if (pool->last)
        pool->last->next = part;
    else
        pool->first = part;
    pool->last = part;
    pool->waiting++;
    bool more = pool->waiting > pool->idle && pool->count - pool->stale < THREADS_MAX;
    pool->count += more;
    pthread_cond_signal(&pool->more);
    pthread_mutex_unlock(&pool->lock);
    if (more && thread_make(pool) < 0) { /* those that there are do it, later */
        pthread_mutex_lock(&pool->lock);
        pool->count--;
        pool->failed++;
        pthread_mutex_unlock(&pool->lock);
    }
}

/* With the pool's lock: the queue without the part, or without all parts of a ring. */
static void queue_cut(struct pool *pool, const struct io_part *part, const struct ring_threads *home) {
    struct io_part **at = &pool->first, *before = NULL, *found;
    while ((found = *at)) {
        if (found != part && found->home != home) {
            before = found;
            at = &found->next;
            continue;
        }
        *at = found->next;
        if (pool->last == found)
            pool->last = before;
        pool->waiting--;
        file_put(found->file);
        found->error = -ECANCELED;
        home_add(found->home, found);
    }
}

void threads_cancel(struct ring *ring, struct io_part *part) {
    struct pool *pool = &atomic_load(&ring->array->threads)->pools[part->device];
    pthread_mutex_lock(&pool->lock);
    queue_cut(pool, part, NULL);
    pthread_mutex_unlock(&pool->lock);
}

void threads_nop(struct ring *ring, struct io_part *part) {
    part->error = 0;
    home_add(ring->threads, part);
}

/* ---- the threads of an array ---- */

static struct thread_file *file_of(const struct device *device) {
    struct thread_file *file = malloc(sizeof(*file));
    if (!file)
        return NULL;
    file->users = 1;
    file->running = 0;
    file->fd = kvfs_own_descriptor(descriptor_above(fcntl(device->fd, F_DUPFD_CLOEXEC, DESCRIPTOR_MIN)));
    if (file->fd >= 0)
        return file;
    free(file);
    return NULL;
}

void threads_renew(struct kvfs_array *array) {
    struct threads *threads = atomic_load(&array->threads);
    for (uint32_t i = 0; threads && i < array->device_count; i++) {
        struct thread_file *file = file_of(&array->devices[i]);
        if (!file)
            continue; /* no descriptor is left: the device is used as before, and its label tells what it is */
        pthread_mutex_lock(&threads->pools[i].lock);
        threads->pools[i].stale += threads->pools[i].file->running;
        file_put(threads->pools[i].file);
        threads->pools[i].file = file;
        pthread_mutex_unlock(&threads->pools[i].lock);
    }
}

static int pool_make(struct pool *pool, const struct device *device) {
    pthread_condattr_t attributes;
    pool->file = file_of(device);
    if (!pool->file)
        return errno ? -errno : -ENOMEM;
    pthread_mutex_init(&pool->lock, NULL);
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&pool->more, &attributes);
    pthread_cond_init(&pool->none, &attributes);
    pthread_condattr_destroy(&attributes);
    pool->count = 1;
    int r = thread_make(pool);
    if (r < 0) {
        file_put(pool->file);
        pool->file = NULL;
    }
    return r;
}

/* False: a thread is in I/O that has not come back, and the pool is its. */
static bool pool_end(struct pool *pool, const struct timespec *until) {
    pthread_mutex_lock(&pool->lock);
    pool->ending = true;
    pthread_cond_broadcast(&pool->more);
    while (pool->count)
        if (pthread_cond_timedwait(&pool->none, &pool->lock, until) == ETIMEDOUT)
            break;
    bool ended = pool->count == 0;
    if (ended)
        file_put(pool->file);
    pthread_mutex_unlock(&pool->lock);
    return ended;
}

static void pools_end(struct threads *threads) {
    struct timespec until;
    bool ended = true;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_sec += END_S;
    for (uint32_t i = 0; threads && i < threads->device_count; i++)
        if (threads->pools[i].file)
            ended &= pool_end(&threads->pools[i], &until);
    if (ended)
        free(threads);
}

void threads_free(struct kvfs_array *array) { pools_end(atomic_exchange(&array->threads, NULL)); }

/* Rings may be made at the same time: one's threads stay. No lock, which a fork() could leave locked in the child. */
static int threads_make(struct kvfs_array *array) {
    struct threads *threads, *none = NULL;
    int r = 0;
    if (atomic_load(&array->threads))
        return 0;
    threads = calloc(1, sizeof(*threads) + array->device_count * sizeof(struct pool));
    if (!threads)
        return -ENOMEM;
    threads->device_count = array->device_count;
    for (uint32_t i = 0; r == 0 && i < array->device_count; i++)
        r = pool_make(&threads->pools[i], &array->devices[i]);
    if (r < 0 || !atomic_compare_exchange_strong(&array->threads, &none, threads))
        pools_end(threads);
    return r;
}

bool threads_busy(const struct kvfs_array *array) {
    struct threads *threads = atomic_load(&array->threads);
    bool busy = false;
    for (uint32_t i = 0; threads && i < threads->device_count; i++) {
        pthread_mutex_lock(&threads->pools[i].lock);
        busy |= threads->pools[i].waiting || threads->pools[i].file->users > 1;
        pthread_mutex_unlock(&threads->pools[i].lock);
    }
    return busy;
}

uint32_t threads_count(struct kvfs_array *array, uint32_t *failed) {
    struct threads *threads = atomic_load(&array->threads);
    uint32_t count = 0;
    *failed = 0;
    for (uint32_t i = 0; threads && i < threads->device_count; i++) {
        pthread_mutex_lock(&threads->pools[i].lock);
        count += threads->pools[i].count;
        *failed += threads->pools[i].failed;
        pthread_mutex_unlock(&threads->pools[i].lock);
    }
    return count;
}

/* ---- rings ---- */

int threads_watch(struct ring *ring, int fd, uint32_t events, uint64_t user_data) {
    struct epoll_event event = {.events = events, .data.u64 = user_data};
    const int epoll_fd = ring->threads->epoll_fd;
    if (!events)
        return epoll_ctl(epoll_fd, EPOLL_CTL_DEL, fd, &event) < 0 ? -errno : 0;
    int r = epoll_ctl(epoll_fd, EPOLL_CTL_MOD, fd, &event);
    if (r < 0 && errno == ENOENT)
        r = epoll_ctl(epoll_fd, EPOLL_CTL_ADD, fd, &event);
    return r < 0 ? -errno : 0;
}

void threads_poll(struct ring *ring, int fd, uint32_t tag, bool edges) {
    struct ring_threads *home = ring->threads;
    if (home->watched[tag] >= 0 && home->watched[tag] != fd)
        threads_watch(ring, home->watched[tag], 0, 0);
    home->watched[tag] = fd;
    if (threads_watch(ring, fd, EPOLLIN | (edges ? EPOLLET : EPOLLONESHOT), (uint64_t)tag << 1 | 1 | (edges ? EDGES : 0)) == 0)
        ring->armed |= 1u << tag;
}

int threads_ring_init(struct ring *ring) {
    int r = threads_make(ring->array);
    if (r < 0)
        return r;
    struct ring_threads *home = calloc(1, sizeof(*home));
    if (!home)
        return -ENOMEM;
    pthread_mutex_init(&home->lock, NULL);
    home->done_end = &home->done;
    for (uint32_t i = 0; i < 8; i++)
        home->watched[i] = -1;
    home->event_fd = kvfs_own_descriptor(descriptor_above(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)));
    home->epoll_fd = home->event_fd < 0 ? -1 : kvfs_own_descriptor(descriptor_above(epoll_create1(EPOLL_CLOEXEC)));
    ring->threads = home;
    r = home->epoll_fd < 0 ? -errno : threads_watch(ring, home->event_fd, EPOLLIN | EPOLLET, HOME_EVENT);
    if (r < 0)
        threads_ring_free(ring);
    return r;
}

void threads_ring_free(struct ring *ring) {
    struct ring_threads *home = ring->threads;
    struct threads *threads = atomic_load(&ring->array->threads);
    for (uint32_t i = 0; ring->in_flight && threads && i < threads->device_count; i++) {
        pthread_mutex_lock(&threads->pools[i].lock);
        queue_cut(&threads->pools[i], NULL, home);
        pthread_mutex_unlock(&threads->pools[i].lock);
    }
    pthread_mutex_lock(&home->lock);
    home->asleep = false; /* nobody is woken any more */
    pthread_mutex_unlock(&home->lock);
    if (home->epoll_fd >= 0)
        close(home->epoll_fd);
    if (home->event_fd >= 0)
        close(home->event_fd);
    ring->threads = NULL;
    if (ring->in_flight) /* a thread comes back to it */
        return;
    pthread_mutex_destroy(&home->lock);
    free(home);
}

static void events_take(struct ring *ring, int timeout_ms) {
    struct epoll_event events[EVENTS];
    int count = epoll_wait(ring->threads->epoll_fd, events, EVENTS, timeout_ms);
    for (int i = 0; i < count; i++) {
        uint64_t data = events[i].data.u64;
        if (data == HOME_EVENT)
            continue;
        if (data & 1)
            ring->armed &= data & EDGES ? ~0u : ~(1u << (data >> 1));
        else
            ring->beside->event(ring, data, 0);
    }
}

struct io_part *threads_take(struct ring *ring) {
    struct ring_threads *home = ring->threads;
    if (ring->beside)
        events_take(ring, 0);
    if (!atomic_load_explicit(&home->some, memory_order_acquire))
        return NULL;
    pthread_mutex_lock(&home->lock);
    struct io_part *part = home->done;
    home->done = NULL;
    home->done_end = &home->done;
    atomic_store_explicit(&home->some, false, memory_order_relaxed);
    pthread_mutex_unlock(&home->lock);
    return part;
}

void threads_wait(struct ring *ring, uint64_t timeout_ns) {
    struct ring_threads *home = ring->threads;
    pthread_mutex_lock(&home->lock);
    bool some = home->done != NULL;
    home->asleep = !some && timeout_ns;
    pthread_mutex_unlock(&home->lock);
    events_take(ring, some ? 0 : (int)min_u64((timeout_ns + 999999) / 1000000, INT32_MAX));
    if (some || !timeout_ns)
        return;
    pthread_mutex_lock(&home->lock);
    home->asleep = false;
    pthread_mutex_unlock(&home->lock);
}
