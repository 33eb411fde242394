/* The devices of a pool and how its segments lie on them. A daemon has one array, and so has each connection of a native client. */
#ifndef KVFS_ARRAY_H
#define KVFS_ARRAY_H

#include "base/base.h"
#include "block/block.h"

struct nvme_host;
struct nvme_remote;
struct threads;

struct ring;
struct io_part;
/* The operations of a kind of device on one part of an I/O. Only the ring's own thread calls them. Each part ends with ring_part_complete(). */
struct device_ops {
    void (*start)(struct ring *ring, struct io_part *part);
    /* The part has missed its deadline. cancel comes before the group's callback, and asks the kernel to end the part. expire comes after
     * the callback, gives the part up, and may end it at once. Either may be NULL. */
    void (*cancel)(struct ring *ring, struct io_part *part);
    void (*expire)(struct ring *ring, struct io_part *part, uint64_t now);
    bool copies; /* start() takes the time of a copy */
};

struct fault_rule {
    atomic_uint fault, direction, every, value, counter;
};
struct device {
    int fd;                                /* the number stays; the file behind it may change (kvfs_device_use) */
    const struct device_ops *_Atomic kind; /* as device_probe() found it */
    const struct device_ops *_Atomic ops;  /* rings start parts by these: the kind's, or fault_ops around them */
    _Atomic(struct nvme_remote *) remote;  /* NVMe/TCP, where fd only names the target. Else NULL */
    atomic_bool stopped;                   /* out of service: its I/O fails at once */
    atomic_uint uses;                      /* counts kvfs_device_use: what waits for the device of before does not begin */
    atomic_bool blocks;                    /* submitting its I/O may block, so a kernel thread does it */
    atomic_ullong stuck_until_ns;          /* fail_fast: after a missed deadline its I/O fails at once until then */
    uint64_t zones_offset;
    atomic_ullong reads, read_bytes, writes, write_bytes, errors, timeouts, read_ns, write_ns;
    atomic_ullong buckets[2][KVFS_DEVICE_BUCKETS]; /* of reads, of writes: by their times */
    struct fault_rule faults;
};
struct kvfs_array {
    struct geometry geometry;
    uint32_t device_count;
    uint32_t io_timeout_ms; /* of one device I/O */
    struct device *devices;
    struct kvfs_member *members; /* stripe_width of each segment */
    atomic_uint *segment_busy;   /* I/O under way, by segment */
    struct nvme_host *hosts;
    atomic_uint devices_changed; /* counts kvfs_device_use; each ring then registers the files again */
    uint32_t inline_max;         /* I/O of a RAM disk is done inline up to this size */
    bool fail_fast;
    atomic_ullong stuck_until_ns;      /* a device missed a deadline: for the time of ten, no read goes to a guest's own pages */
    atomic_ullong answered_ns;         /* of any device to any ring: the last, or one shortly before (turns.c) */
    atomic_ullong orphans;             /* I/Os that missed their deadline and have not come back */
    atomic_uint rings[2];              /* made since the start: by io_uring, by threads */
    atomic_uint refused;               /* why not by io_uring: -errno << 2 | enum ring_step, as first seen; or 0 */
    _Atomic(struct threads *) threads; /* io/threads.c: from the first ring of that kind on */
    /* Callbacks from any thread, or NULL. on_error: I/O of a device ended with -error. on_message: an NVMe/TCP device has a new message. */
    void (*on_error)(struct kvfs_array *array, uint32_t device, int error);
    void (*on_message)(struct kvfs_array *array, uint32_t device);
};
/* geometry's segment_size and segment_pages follow from the rest. Descriptors, offsets and members are the caller's to set. 0 or -ENOMEM. */
int array_init(struct kvfs_array *array, const struct geometry *geometry, uint32_t device_count);
void array_free(struct kvfs_array *array); /* also after array_init failed; hosts have stopped */
/* Find out what kind of device the descriptor leads to; before its first I/O, and when it leads elsewhere. */
void device_probe(struct device *device);
void device_kind_set(struct device *device, const struct device_ops *kind);

extern const struct device_ops uring_ops;    /* io/uring.c: files and block devices */
extern const struct device_ops memory_ops;   /* io/uring.c: RAM disks */
extern const struct device_ops nvme_tcp_ops; /* io/nvme/queue.c */
extern const struct device_ops fault_ops;    /* io/fault.c: around any of these */

/* Every `every`-th I/O in `direction` (1 reads, 2 writes, 3 both) from now on has the fault: enum kvfs_fault. Any thread. */
void fault_set(struct device *device, uint32_t fault, uint32_t direction, uint32_t every, uint32_t value);

#endif
