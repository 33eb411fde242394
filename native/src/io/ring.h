/* Device I/O with deadlines: rings, groups and their parts. */
#ifndef KVFS_RING_H
#define KVFS_RING_H

#include <liburing.h>

#include "base/arena.h"
#include "io/array.h"

#define RING_DELAYED_MAX 1024
#define RING_CANCELS ((uint64_t)255 << 1 | 1)     /* user_data of cancellations: nobody waits for them */
#define GROUP_IOVS 320
#define GROUP_BYTES ((uint64_t)2 << 20)

struct ring;
struct io_group;
/* Called twice for a group that missed its deadline: with expired (answer now, the memory is still the device's), then with reaped. */
typedef void (*io_callback)(struct io_group *group, bool reaped);

struct io_part {
    struct io_group *group;
    uint64_t device_offset;
    uint64_t started_ns;
    uint32_t size;
    uint32_t device;
    uint16_t iov_first, iov_count;
    uint8_t fault;                       /* io/fault.c */
    bool done;
    const struct device_ops *ops;        /* as the device was when the part began, like `remote` */
    void (*ended)(struct ring *ring, struct io_part *part, int result); /* who looks at the result first, and completes again; or NULL */
    struct nvme_remote *remote;
    uint16_t commands_left;              /* from here on: of an NVMe/TCP device, or by passthrough, until done */
    int error;
    struct io_part *next;                /* NVMe/TCP (io/nvme/queue.c) */
    uint32_t begun;                      /* bytes that commands cover */
};
struct io_group {
    struct io_group *next, *previous;   /* in flight, by deadline */
    struct ring *ring;
    io_callback callback;
    void *owner;
    uint64_t deadline_ns;
    uint32_t segment;
    int result;                          /* 0 or the first -errno */
    uint16_t part_count, parts_left, iov_count;
    bool write, expired;
    struct slot *slots[8];
    uint32_t slot_count;
    struct io_part parts[KVFS_STRIPE_WIDTH_MAX];
    struct iovec iovs[GROUP_IOVS];
};
/* What a ring has beside its io_uring: queues to NVMe/TCP controllers. */
struct ring_beside {
    void (*submit)(struct ring *ring);
    uint32_t (*reap)(struct ring *ring);
    void (*event)(struct ring *ring, uint64_t user_data, uint32_t flags);    /* one of its polls, whose user_data has a bit of 6 set and not the 1 */
    uint64_t (*timeout)(struct ring *ring, uint64_t timeout_ns);
    void (*free)(struct ring *ring);
};
struct ring {
    struct io_uring uring;
    struct kvfs_array *array;
    struct io_group *oldest, *newest;    /* the first and the last to expire */
    struct io_group *free;
    uint64_t until_ns;                   /* I/O that begins now ends by then: what it is a part of has a deadline. 0: nothing more */
    uint32_t in_flight;                  /* parts */
    uint32_t queued;                     /* SQEs not yet submitted */
    struct { uint64_t due_ns; struct io_part *part; int result; } *delayed; /* results that wait: of RAM disks for the next reap, of faults longer */
    uint32_t delayed_count;
    uint32_t armed;                      /* bit per poll tag: a poll is under way */
    const struct ring_beside *beside;    /* from the first part of an NVMe/TCP device on */
    struct nvme_queue *queues;           /* to NVMe/TCP controllers */
    struct io_part *remote_failed;
    bool remote_ready, remote_busy;      /* there is work for the next reap; it is under way */
    uint32_t devices_seen;               /* array->devices_changed when the registered files were last looked at */
};
int ring_init(struct ring *ring, struct kvfs_array *array, unsigned entries);
void ring_free(struct ring *ring);
/* Read or write pages [page, page + sum of iovs) of a segment. -ENOMEM, -E2BIG (more than a group holds). Nothing is submitted yet. */
int ring_io(struct ring *ring, bool write, uint32_t segment, uint32_t page, const struct iovec *iovs, uint32_t iov_count,
            struct slot *const *slots, uint32_t slot_count, io_callback callback, void *owner);
void ring_submit(struct ring *ring);
/* Runs callbacks of what has completed or expired. Returns how many CQEs were seen. */
uint32_t ring_reap(struct ring *ring);
/* Submits and sleeps until a completion or timeout; then the caller reaps. */
void ring_wait(struct ring *ring, uint64_t timeout_ns);
/* For struct device_ops: a part ends with its size, or -errno. Not in start: what ends there goes through ring_part_delay(). */
void ring_part_complete(struct ring *ring, struct io_part *part, int result);
/* It ends with this result in a later reap. False: too many wait. */
bool ring_part_delay(struct ring *ring, struct io_part *part, uint64_t due_ns, int result);
void uring_cancel(struct ring *ring, struct io_part *part);             /* device_ops.cancel of what io_uring does */
struct io_uring_sqe *ring_sqe(struct ring *ring);
/* Let readability of fd end the next ring_wait; armed once a tag (0 to 7). One-shot, or at every edge from now on: then nobody needs to read fd. */
void ring_poll(struct ring *ring, int fd, uint32_t tag, bool edges);
/* The ring's memory is in use by a device that gave no answer: it can not be freed. */
bool ring_idle(const struct ring *ring);
/* One blocking I/O of any size. */
int blocking_io(struct ring *ring, bool write, uint32_t segment, uint32_t page, const struct iovec *iovs, uint32_t iov_count,
                struct slot *const *slots, uint32_t slot_count);

#endif
