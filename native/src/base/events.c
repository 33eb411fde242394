/* What the data plane tells Python: events, completions and calls, behind one eventfd. */
#include "internal.h"

#include <unistd.h>

/* Something was added: unlocks, then wakes Python unless it has been woken; who wakes must not hold the lock that the woken one wants. */
static void unlock_and_wake(struct kvfs_plane *plane) {
    bool wake = !plane->signalled;
    uint64_t one = 1;
    plane->signalled = true;
    pthread_mutex_unlock(&plane->queue_lock);
    if (wake) {
        ssize_t n = write(plane->event_fd, &one, sizeof(one));
        (void)n;
    }
}

/* With the lock. Who is about to wake Python may not have written yet: then it stays signalled, and is readable soon. */
static void queue_drained(struct kvfs_plane *plane) {
    uint64_t count;
    if (plane->signalled && plane->event_count == 0 && plane->completion_count == 0 && !plane->calls)
        plane->signalled = read(plane->event_fd, &count, sizeof(count)) != sizeof(count);
}

void event_add(struct kvfs_plane *plane, uint32_t type, uint64_t inode, uint64_t value) {
    if (!plane->events) /* a client's devices: nobody takes events */
        return;
    pthread_mutex_lock(&plane->queue_lock);
    /* A failing device makes the same event many times a second: once in the queue is enough. */
    for (uint32_t i = plane->event_count; i-- > 0 && plane->event_count - i < 64;) {
        struct kvfs_event *e = &plane->events[i];
        if (e->type == type && e->inode == inode && e->value == value) {
            pthread_mutex_unlock(&plane->queue_lock);
            return;
        }
    }
    if (type == KVFS_EVENT_SLOW && plane->slow_waiting == SLOW_EVENTS_MAX) { /* Python has stopped, perhaps for hours */
        pthread_mutex_unlock(&plane->queue_lock);
        return;
    }
    if (plane->event_count == plane->event_capacity) {
        uint32_t capacity = plane->event_capacity * 2;
        struct kvfs_event *grown = realloc(plane->events, capacity * sizeof(*grown));
        if (grown) {
            plane->events = grown;
            plane->event_capacity = capacity;
        }
    }
    if (plane->event_count < plane->event_capacity) {
        plane->events[plane->event_count++] = (struct kvfs_event){.type = type, .inode = inode, .value = value};
        plane->slow_waiting += type == KVFS_EVENT_SLOW;
    }
    unlock_and_wake(plane);
}

void complete(struct kvfs_plane *plane, uint64_t cookie, int64_t result) {
    pthread_mutex_lock(&plane->queue_lock);
    while (plane->completion_count == plane->completion_capacity) {
        uint32_t capacity = plane->completion_capacity * 2;
        struct kvfs_completion *grown = realloc(plane->completions, capacity * sizeof(*grown));
        if (!grown) { /* a completion must not be lost: wait for memory */
            pthread_mutex_unlock(&plane->queue_lock);
            usleep(10000);
            pthread_mutex_lock(&plane->queue_lock);
            continue;
        }
        plane->completions = grown;
        plane->completion_capacity = capacity;
    }
    plane->completions[plane->completion_count++] = (struct kvfs_completion){cookie, result};
    pthread_cond_signal(&plane->queue_more);
    atomic_fetch_sub(&plane->count.jobs_in_flight, 1);
    unlock_and_wake(plane);
}

void call_add(struct kvfs_plane *plane, struct call *call) {
    call->next = NULL;
    pthread_mutex_lock(&plane->queue_lock);
    if (plane->calls)
        plane->calls_last->next = call;
    else
        plane->calls = call;
    plane->calls_last = call;
    unlock_and_wake(plane);
}

int kvfs_take_calls(struct kvfs_plane *plane, struct kvfs_call *out, uint32_t count) {
    uint32_t n = 0;
    pthread_mutex_lock(&plane->queue_lock);
    while (plane->calls && n < count) {
        struct call *call = plane->calls;
        plane->calls = call->next;
        out[n++] = call->body;
        free(call);
    }
    queue_drained(plane);
    pthread_mutex_unlock(&plane->queue_lock);
    return (int)n;
}

int kvfs_event_fd(struct kvfs_plane *plane) { return plane->event_fd; }

int kvfs_take_events(struct kvfs_plane *plane, struct kvfs_event *out, uint32_t count) {
    pthread_mutex_lock(&plane->queue_lock);
    uint32_t n = (uint32_t)min_u64(count, plane->event_count);
    memcpy(out, plane->events, n * sizeof(*out));
    for (uint32_t i = 0; i < n; i++)
        plane->slow_waiting -= out[i].type == KVFS_EVENT_SLOW;
    memmove(plane->events, plane->events + n, (plane->event_count - n) * sizeof(*out));
    plane->event_count -= n;
    queue_drained(plane);
    pthread_mutex_unlock(&plane->queue_lock);
    return (int)n;
}

static int take_completions_locked(struct kvfs_plane *plane, struct kvfs_completion *out, uint32_t count) {
    uint32_t n = (uint32_t)min_u64(count, plane->completion_count);
    memcpy(out, plane->completions, n * sizeof(*out));
    memmove(plane->completions, plane->completions + n, (plane->completion_count - n) * sizeof(*out));
    plane->completion_count -= n;
    queue_drained(plane);
    return (int)n;
}

int kvfs_take_completions(struct kvfs_plane *plane, struct kvfs_completion *out, uint32_t count) {
    pthread_mutex_lock(&plane->queue_lock);
    int n = take_completions_locked(plane, out, count);
    pthread_mutex_unlock(&plane->queue_lock);
    return n;
}

int kvfs_wait_completions(struct kvfs_plane *plane, struct kvfs_completion *out, uint32_t count, uint32_t timeout_ms) {
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += timeout_ms / 1000;
    until.tv_nsec += (long)(timeout_ms % 1000) * 1000000;
    if (until.tv_nsec >= 1000000000)
        until.tv_sec++, until.tv_nsec -= 1000000000;
    pthread_mutex_lock(&plane->queue_lock);
    while (plane->completion_count == 0)
        if (pthread_cond_timedwait(&plane->queue_more, &plane->queue_lock, &until) != 0)
            break;
    int n = take_completions_locked(plane, out, count);
    pthread_mutex_unlock(&plane->queue_lock);
    return n;
}
