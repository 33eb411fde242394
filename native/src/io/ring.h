/* Device I/O with deadlines: rings, groups and their parts. */
#ifndef KVFS_RING_H
#define KVFS_RING_H

#include <liburing.h>

#include "base/arena.h"
#include "io/array.h"

#define RING_DELAYED_MAX 1024
#define RING_CANCELS ((uint64_t)255 << 1 | 1) /* user_data of cancellations, whose results are ignored */
#define RING_COMMAND ((uint64_t)1 << 63)      /* in user_data: of a command that is not I/O of a device */
#define GROUP_IOVS 320
#define GROUP_BYTES ((uint64_t)2 << 20)

struct ring;
struct ring_threads;
struct thread_file;
struct io_group;
/* Called twice for a group that missed its deadline: at first group->expired is set (answer now, the memory is still the device's), later
 * `reaped` is true. */
typedef void (*io_callback)(struct io_group *group, bool reaped);

/* Of a ring: the descriptor that it goes on with, instead of this one, or -1 and errno. Exported by libkvfs for libkvfs_preload, which has its own: a
 * program that closes all descriptors leaves those alone. */
int kvfs_own_descriptor(int fd);
/* A thread of our own has begun: in libkvfs_preload its calls are not the program's. */
void kvfs_own_thread(void);

/* io/turns.c: a part waits for its turn, is under way, or has been given up on, as its device gave no answer in time. */
enum part_stage { PART_WAITS, PART_RUNS, PART_LEFT };
struct io_part {
    struct io_group *group;
    uint64_t device_offset;
    uint64_t started_ns; /* the device has had it since then */
    uint32_t size;
    uint32_t device;
    uint16_t iov_first, iov_count;
    uint8_t fault; /* io/fault.c */
    uint8_t stage; /* enum part_stage */
    bool done;
    uint32_t uses;                                                      /* device->uses when the part was made */
    struct io_part *before, *after;                                     /* under way, by their start; of one that waits `after` is the owner's next */
    struct io_part *owner_next, *owner_last;                            /* of an owner's first that waits: the next owner's first, and its own last */
    uint64_t owner_left;                                                /* bytes of all that it has waiting */
    const struct device_ops *ops;                                       /* of the device's kind when the part began */
    void (*ended)(struct ring *ring, struct io_part *part, int result); /* takes the result first, and completes the part again; or NULL */
    struct nvme_remote *remote;
    uint16_t commands_left; /* this and the following: of NVMe devices, while the part is under way */
    int error;
    struct io_part *next;     /* of an NVMe/TCP queue (io/nvme/queue.c), or of threads (io/threads.c) */
    uint32_t begun;           /* bytes that commands cover */
    struct thread_file *file; /* io/threads.c: what the device's descriptor led to when the part began */
    struct ring_threads *home;
};
struct io_group {
    struct io_group *next; /* free */
    struct ring *ring;
    io_callback callback;
    void *owner;
    uint64_t patience_ns; /* a device is silent for so long at most */
    uint64_t start_by_ns; /* no part begins after this; 0: whenever it is its turn */
    uint32_t segment;
    int result; /* 0 or the first -errno */
    uint16_t part_count, parts_left, iov_count;
    bool write, expired;
    struct slot *slots[8];
    uint32_t slot_count;
    struct io_part parts[KVFS_STRIPE_WIDTH_MAX];
    struct iovec iovs[GROUP_IOVS];
};
/* Operations on queues that a ring has beside its io_uring: to NVMe/TCP controllers. */
struct ring_beside {
    void (*submit)(struct ring *ring);
    uint32_t (*reap)(struct ring *ring);
    void (*event)(struct ring *ring, uint64_t user_data, uint32_t flags); /* of one of its polls: user_data is even and has a bit of 6 */
    uint64_t (*timeout)(struct ring *ring, uint64_t timeout_ns);
    void (*free)(struct ring *ring);
};
/* The parts of one device that a ring has (io/turns.c). */
struct ring_device {
    struct io_part *first, *last;   /* under way, by their start */
    struct io_part *owners, *owned; /* the first that waits of each owner, in the order of their turns; of the last owner */
    uint64_t bytes, limit;          /* under way */
    uint64_t answered_ns;           /* the last answer to this ring */
    bool taking;                    /* its parts are being begun */
    bool oldest;                    /* the next turn is the oldest owner's */
};
/* The call of io_uring that was refused. */
enum ring_step { RING_SETUP, RING_REGISTER, RING_ENTER };
struct ring {
    struct io_uring uring;
    struct ring_threads *threads; /* the ring goes by threads (io/threads.c), and `uring` is not made; or NULL */
    struct kvfs_array *array;
    struct ring_device *devices; /* by the array's */
    struct io_group *free;
    uint64_t until_ns;    /* deadline of the request that I/O belongs to from now on (I6), if no device answers; 0: none */
    uint64_t start_by_ns; /* of I/O from now on: the group's */
    uint64_t expires_ns;  /* no part under way expires before this */
    uint64_t answered_ns; /* when a device last answered */
    uint32_t in_flight;   /* parts, with those that wait */
    uint32_t waiting;     /* of these, for their turn */
    uint32_t queued;      /* SQEs not yet submitted */
    struct {
        uint64_t due_ns;
        struct io_part *part;
        int result;
    } *delayed; /* results that wait: of RAM disks for the next reap, of delayed parts longer */
    uint32_t delayed_count;
    uint32_t armed;                   /* bit per poll tag: a poll is under way */
    const struct ring_beside *beside; /* from the first part of an NVMe/TCP device on */
    struct nvme_queue *queues;        /* to NVMe/TCP controllers */
    struct io_part *remote_failed;
    bool remote_ready, remote_busy;                                       /* the next reap has work; a reap is under way */
    uint32_t devices_seen;                                                /* array->devices_changed when the registered files were last looked at */
    void (*commanded)(struct ring *ring, uint64_t user_data, int result); /* a command with RING_COMMAND has ended */
    void *commands_owner;
};
int ring_init(struct ring *ring, struct kvfs_array *array, unsigned entries);
int ring_init_wide(struct ring *ring, struct kvfs_array *array, unsigned entries); /* with SQEs of 128 bytes, where the kernel has them (5.19) */
void ring_free(struct ring *ring);
/* Read or write pages [page, page + sum of iovs) of a segment. -ENOMEM, -E2BIG (more than a group holds). Nothing is submitted yet. Groups of one owner
 * begin in the order of these calls. The callback may come before the return of 0: a part may be refused as it begins, and its owner counts the group
 * before this call. After an error no callback comes. */
int ring_io(struct ring *ring, bool write, uint32_t segment, uint32_t page, const struct iovec *iovs, uint32_t iov_count, struct slot *const *slots,
            uint32_t slot_count, io_callback callback, void *owner);
void ring_submit(struct ring *ring);
/* Calls back groups that have completed or expired. Returns how many completions were seen. */
uint32_t ring_reap(struct ring *ring);
/* Submits and sleeps until a completion or timeout; then the caller reaps. */
void ring_wait(struct ring *ring, uint64_t timeout_ns);
/* In the middle of long work: devices that have answered get what waits for them. It calls back. */
void ring_feed(struct ring *ring);
/* The owner needs no more: its parts that have not begun end with -ECANCELED. */
void ring_drop(struct ring *ring, const void *owner);
/* A device has answered I/O under this deadline: what follows has the whole time again. */
void ring_renew(const struct ring *ring, uint64_t *until_ns);
/* For device_ops: a part ends, with its size or -errno. A start() uses ring_part_delay() instead. */
void ring_part_complete(struct ring *ring, struct io_part *part, int result);
/* Let the part end with this result in a later reap. False: too many wait. */
bool ring_part_delay(struct ring *ring, struct io_part *part, uint64_t due_ns, int result);
void uring_cancel(struct ring *ring, struct io_part *part); /* device_ops.cancel for parts that are io_uring operations */
void ring_nop(struct ring *ring, struct io_part *part);     /* the part ends in a later reap, with 0 */
struct io_uring_sqe *ring_sqe(struct ring *ring);           /* of rings by io_uring alone */
/* Let readability of fd end the next ring_wait; one poll for each tag (0 to 7). With `edges` every later edge does too, and fd need not be read. */
void ring_poll(struct ring *ring, int fd, uint32_t tag, bool edges);
/* False while a device has not answered: the ring's memory is in use and cannot be freed. */
bool ring_idle(const struct ring *ring);
/* One blocking I/O of any size. */
int blocking_io(struct ring *ring, bool write, uint32_t segment, uint32_t page, const struct iovec *iovs, uint32_t iov_count,
                struct slot *const *slots, uint32_t slot_count);

/* ---- io/turns.c: which part begins when ---- */

int turns_init(struct ring *ring); /* -ENOMEM */
void turns_add(struct ring *ring, struct io_part *part);
/* The next part of the device, which waits no longer; NULL: none waits, or there is no room. *refused: 0, and it is under way; or why it may not begin. */
struct io_part *turns_take(struct ring *ring, uint32_t device, int *refused);
/* A part that waits for its turn does so no longer. */
void turns_cut(struct ring *ring, struct io_part *part);
/* A part that is under way has ended, or is given up on. */
void turns_leave(struct ring *ring, struct io_part *part);
void turns_answered(struct ring *ring, struct io_part *part, uint64_t now);
/* The time at which a part that is under way expires, and since when its device has been silent. */
uint64_t turns_until(const struct ring *ring, const struct io_part *part);
uint64_t turns_silent_since(const struct ring *ring, const struct io_part *part);
struct io_part *turns_of(const struct ring *ring, uint32_t device, const void *owner); /* the first of the owner's that waits */

/* ---- io/threads.c: a ring where io_uring is denied ---- */

/* One more ring of the array: 0, -EAGAIN (no thread could be made), -EMFILE, -ENOMEM. */
int threads_ring_init(struct ring *ring);
void threads_ring_free(struct ring *ring);
void threads_part(struct ring *ring, struct io_part *part);
void threads_cancel(struct ring *ring, struct io_part *part);
void threads_nop(struct ring *ring, struct io_part *part);
/* Parts that have ended, by `next`, their results in `error`; or NULL. */
struct io_part *threads_take(struct ring *ring);
void threads_wait(struct ring *ring, uint64_t timeout_ns);
void threads_poll(struct ring *ring, int fd, uint32_t tag, bool edges);
/* Of ring_beside: fd's events come to its `event` with user_data. events: of epoll(7); 0 ends the watch. */
int threads_watch(struct ring *ring, int fd, uint32_t events, uint64_t user_data);
/* The descriptors of devices may lead elsewhere now. */
void threads_renew(struct kvfs_array *array);
/* True while a thread is in I/O whose ring may be gone: the memory of that I/O stays. */
bool threads_busy(const struct kvfs_array *array);
void threads_free(struct kvfs_array *array);
/* How many there are; *failed: how often one more could not be made. */
uint32_t threads_count(struct kvfs_array *array, uint32_t *failed);

/* The meaning of an error of ring_init() to people, "" or with a leading "; ". */
const char *ring_advice(int error);
/* The way of rings, and why: "io_uring", or "threads (io_uring_enter: Operation not permitted): 3 of them". */
void ring_tell(struct kvfs_array *array, char *out, uint32_t capacity);

#endif
