/* Three queues to Python behind one eventfd: events, completions and calls. */
#ifndef KVFS_EVENTS_H
#define KVFS_EVENTS_H

#include "base/base.h"
#include "kvfs_plane.h"

#define SLOW_EVENTS_MAX 10u /* a second, and in the queue */
struct call {
    struct call *next;
    struct kvfs_call body;
};
struct events {
    int fd; /* an eventfd, readable while a queue holds something; -1 */
    pthread_mutex_t lock;
    struct kvfs_event *events;
    struct kvfs_completion *completions;
    uint32_t event_count, event_capacity, completion_count, completion_capacity;
    uint32_t slow_waiting; /* of the events: KVFS_EVENT_SLOW */
    bool signalled;        /* fd is readable, or will be at once */
    struct call *calls, *calls_last;
};
int events_init(struct events *events);                                                /* -errno */
void events_free(struct events *events);                                               /* also after events_init failed */
bool events_add(struct events *events, uint32_t type, uint64_t inode, uint64_t value); /* false: it was lost, for want of memory */
void events_complete(struct events *events, uint64_t cookie, int64_t result);
void events_call(struct events *events, struct call *call); /* taken over */
int events_take(struct events *events, struct kvfs_event *out, uint32_t count);
int events_take_completions(struct events *events, struct kvfs_completion *out, uint32_t count);
int events_take_calls(struct events *events, struct kvfs_call *out, uint32_t count);

#endif
