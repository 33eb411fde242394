/* The devices of a pool and how its segments lie on them: what a daemon and a native client both need to read and write. */
#ifndef KVFS_ARRAY_H
#define KVFS_ARRAY_H

#include "base/base.h"
#include "block/block.h"

struct nvme_host;
struct nvme_remote;

struct fault_rule { atomic_uint fault, direction, every, value, counter; };
struct device {
    int fd;                              /* the number stays; what it leads to may change (kvfs_device_use) */
    _Atomic(struct nvme_remote *) remote;   /* NVMe/TCP: fd only stands for it. Else NULL */
    atomic_uint nsid;                    /* NVMe passthrough: I/O is commands of at most transfer_size. Else 0 */
    atomic_uint block_size, transfer_size;
    atomic_bool stopped;                 /* out of service: its I/O fails at once */
    atomic_bool memory;                  /* a RAM disk: I/O of at most inline_max bytes is done inline */
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
    atomic_bool faults;                  /* some fault was set */
    atomic_ullong stuck_until_ns;        /* some device missed a deadline: for ten of them no read goes to a guest's own pages */
    atomic_ullong zombies;               /* I/Os that missed their deadline and have not come back */
    /* Any thread; NULL: nobody listens. A device's I/O ended with -error; an NVMe/TCP device has another message. */
    void (*on_error)(struct kvfs_array *array, uint32_t device, int error);
    void (*on_message)(struct kvfs_array *array, uint32_t device);
};
/* geometry's segment_size and segment_pages follow from the rest. Descriptors, offsets and members are the caller's to set. 0 or -ENOMEM. */
int array_init(struct kvfs_array *array, const struct geometry *geometry, uint32_t device_count);
void array_free(struct kvfs_array *array);   /* also after array_init failed; hosts have stopped */

#endif
