/* The devices of a pool and how its segments lie on them: what a daemon and a native client both need to read and write. */
#ifndef KVFS_ARRAY_H
#define KVFS_ARRAY_H

#include "base/base.h"
#include "block/block.h"

struct nvme_host;
struct nvme_remote;

struct ring;
struct io_part;
/* What a kind of device does with one part of an I/O. The ring's own thread calls. Each part ends with ring_part_complete(). */
struct device_ops {
    void (*start)(struct ring *ring, struct io_part *part);
    /* One of its io_uring operations has ended with *result: whether the part has, with *result. NULL: a part is one operation. */
    bool (*reaped)(struct io_part *part, int *result);
    /* The part has missed its deadline. Before its callback is told: let the kernel end it. After that: give it up, which may end it here. */
    void (*cancel)(struct ring *ring, struct io_part *part);
    void (*expire)(struct ring *ring, struct io_part *part, uint64_t now);
};

struct fault_rule { atomic_uint fault, direction, every, value, counter; };
struct device {
    int fd;                              /* the number stays; what it leads to may change (kvfs_device_use) */
    const struct device_ops *_Atomic kind;  /* as device_look() found it */
    const struct device_ops *_Atomic ops;   /* rings start parts by these: the kind's, or fault_ops around them */
    _Atomic(struct nvme_remote *) remote;   /* NVMe/TCP: fd only stands for it. Else NULL */
    atomic_uint nsid, block_size, transfer_size;    /* NVMe passthrough: I/O is commands of at most transfer_size. Else 0 */
    atomic_bool stopped;                 /* out of service: its I/O fails at once */
    atomic_bool blocks;                  /* submitting its I/O may wait for it: a kernel thread does that */
    atomic_ullong stuck_until_ns;        /* fail_fast: it missed a deadline, until then its I/O fails at once */
    uint64_t zones_offset;
    atomic_ullong reads, read_bytes, writes, write_bytes, errors, timeouts, read_ns, write_ns;
    atomic_ullong buckets[2][KVFS_DEVICE_BUCKETS];  /* of reads, of writes: by their times */
    struct fault_rule faults;
};
struct kvfs_array {
    struct geometry geometry;
    uint32_t device_count;
    uint32_t io_timeout_ms;              /* of one device I/O */
    struct device *devices;
    struct kvfs_member *members;         /* stripe_width of each segment */
    atomic_uint *segment_busy;           /* I/O under way, by segment */
    struct nvme_host *hosts;
    atomic_uint devices_changed;         /* counts kvfs_device_use: every ring then registers the files anew */
    uint32_t inline_max;                 /* I/O of a RAM disk is done inline up to this size */
    bool fail_fast;
    bool passthrough;                    /* some device has it: rings have large entries */
    atomic_ullong stuck_until_ns;        /* some device missed a deadline: for ten of them no read goes to a guest's own pages */
    atomic_ullong zombies;               /* I/Os that missed their deadline and have not come back */
    /* Any thread; NULL: nobody listens. A device's I/O ended with -error; an NVMe/TCP device has another message. */
    void (*on_error)(struct kvfs_array *array, uint32_t device, int error);
    void (*on_message)(struct kvfs_array *array, uint32_t device);
};
/* geometry's segment_size and segment_pages follow from the rest. Descriptors, offsets and members are the caller's to set. 0 or -ENOMEM. */
int array_init(struct kvfs_array *array, const struct geometry *geometry, uint32_t device_count);
void array_free(struct kvfs_array *array);   /* also after array_init failed; hosts have stopped */
/* Find out what kind of device the descriptor leads to; before its first I/O, and when it leads elsewhere. -errno of NVMe passthrough, which is
 * looked for only if the array has it. */
int device_look(const struct kvfs_array *array, struct device *device);
void device_kind_set(struct device *device, const struct device_ops *kind);

extern const struct device_ops uring_ops;        /* io/uring.c: files and block devices */
extern const struct device_ops memory_ops;       /* io/uring.c: RAM disks */
extern const struct device_ops passthrough_ops;  /* io/nvme/generic.c */
extern const struct device_ops nvme_tcp_ops;     /* io/nvme/queue.c */
extern const struct device_ops fault_ops;        /* io/fault.c: around any of these */

/* Every `every`-th I/O in `direction` (1 reads, 2 writes, 3 both) from now on has the fault: enum kvfs_fault. Any thread. */
void fault_set(struct device *device, uint32_t fault, uint32_t direction, uint32_t every, uint32_t value);

#endif
