/* The queues behind Python's eventfd: events, completions and calls. */
#include "base/descriptor.h"
#include "base/events.h"

#include <sys/eventfd.h>
#include <unistd.h>

int events_init(struct events *events) {
    pthread_mutex_init(&events->lock, NULL);
    events->event_capacity = events->completion_capacity = 1024;
    events->events = malloc(events->event_capacity * sizeof(*events->events));
    events->completions = malloc(events->completion_capacity * sizeof(*events->completions));
    events->fd = descriptor_above(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
    if (events->fd < 0)
        return -errno;
    return events->events && events->completions ? 0 : -ENOMEM;
}

void events_free(struct events *events) {
    if (events->fd >= 0)
        close(events->fd);
    free(events->events);
    free(events->completions);
    while (events->calls) {
        struct call *next = events->calls->next;
        free(events->calls);
        events->calls = next;
    }
}

/* Wake Python after an entry was added, unless it is awake. The lock is released first: the woken thread takes the same lock. */
static void unlock_and_wake(struct events *events) {
    bool wake = !events->signalled;
    events->signalled = true;
    pthread_mutex_unlock(&events->lock);
    if (wake)
        wake_fd(events->fd);
}

/* With the lock. Another thread may have set `signalled` and not yet written to the eventfd. Then `signalled` stays, and the fd is readable soon. */
static void queue_drained(struct events *events) {
    uint64_t count;
    if (events->signalled && events->event_count == 0 && events->completion_count == 0 && !events->calls)
        events->signalled = read(events->fd, &count, sizeof(count)) != sizeof(count);
}

bool events_add(struct events *events, uint32_t type, uint64_t inode, uint64_t value) {
    pthread_mutex_lock(&events->lock);
    /* A failing device makes the same event many times a second. The queue holds it once. */
    for (uint32_t i = events->event_count; i-- > 0 && events->event_count - i < 64;) {
        struct kvfs_event *e = &events->events[i];
        if (e->type == type && e->inode == inode && e->value == value) {
            pthread_mutex_unlock(&events->lock);
            return true;
        }
    }
    if (type == KVFS_EVENT_SLOW && events->slow_waiting == SLOW_EVENTS_MAX) { /* Python may have been stopped for hours */
        pthread_mutex_unlock(&events->lock);
        return true;
    }
    if (events->event_count == events->event_capacity) {
        uint32_t capacity = events->event_capacity * 2;
        struct kvfs_event *grown = realloc(events->events, capacity * sizeof(*grown));
        if (grown) {
            events->events = grown;
            events->event_capacity = capacity;
        }
    }
    bool room = events->event_count < events->event_capacity;
    if (room) {
        events->events[events->event_count++] = (struct kvfs_event){.type = type, .inode = inode, .value = value};
        events->slow_waiting += type == KVFS_EVENT_SLOW;
    }
    unlock_and_wake(events);
    return room;
}

void events_complete(struct events *events, uint64_t cookie, int64_t result) {
    pthread_mutex_lock(&events->lock);
    while (events->completion_count == events->completion_capacity) {
        uint32_t capacity = events->completion_capacity * 2;
        struct kvfs_completion *grown = realloc(events->completions, capacity * sizeof(*grown));
        if (!grown) { /* a completion must not be lost: wait for memory */
            pthread_mutex_unlock(&events->lock);
            usleep(10000);
            pthread_mutex_lock(&events->lock);
            continue;
        }
        events->completions = grown;
        events->completion_capacity = capacity;
    }
    events->completions[events->completion_count++] = (struct kvfs_completion){cookie, result};
    unlock_and_wake(events);
}

void events_call(struct events *events, struct call *call) {
    call->next = NULL;
    pthread_mutex_lock(&events->lock);
    if (events->calls)
        events->calls_last->next = call;
    else
        events->calls = call;
    events->calls_last = call;
    unlock_and_wake(events);
}

int events_take_calls(struct events *events, struct kvfs_call *out, uint32_t count) {
    uint32_t n = 0;
    pthread_mutex_lock(&events->lock);
    while (events->calls && n < count) {
        struct call *call = events->calls;
        events->calls = call->next;
        out[n++] = call->body;
        free(call);
    }
    queue_drained(events);
    pthread_mutex_unlock(&events->lock);
    return (int)n;
}

int events_take(struct events *events, struct kvfs_event *out, uint32_t count) {
    pthread_mutex_lock(&events->lock);
    uint32_t n = (uint32_t)min_u64(count, events->event_count);
    memcpy(out, events->events, n * sizeof(*out));
    for (uint32_t i = 0; i < n; i++)
        events->slow_waiting -= out[i].type == KVFS_EVENT_SLOW;
    memmove(events->events, events->events + n, (events->event_count - n) * sizeof(*out));
    events->event_count -= n;
    queue_drained(events);
    pthread_mutex_unlock(&events->lock);
    return (int)n;
}

int events_take_completions(struct events *events, struct kvfs_completion *out, uint32_t count) {
    pthread_mutex_lock(&events->lock);
    uint32_t n = (uint32_t)min_u64(count, events->completion_count);
    memcpy(out, events->completions, n * sizeof(*out));
    memmove(events->completions, events->completions + n, (events->completion_count - n) * sizeof(*out));
    events->completion_count -= n;
    queue_drained(events);
    pthread_mutex_unlock(&events->lock);
    return (int)n;
}
