/* The devices of a pool: their memory, and their kinds. */
#include "io/array.h"

#include <limits.h>
#include <linux/magic.h>
#include <stdio.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include "io/nvme/tcp.h"
#include "io/ring.h"

int array_init(struct kvfs_array *array, const struct geometry *geometry, uint32_t device_count) {
    uint64_t members = (uint64_t)geometry->segment_count * geometry->stripe_width;
    array->geometry = *geometry;
    array->geometry.segment_size = geometry->zone_size * geometry->stripe_width;
    array->geometry.segment_pages = (uint32_t)pages_of(array->geometry.segment_size);
    array->device_count = device_count;
    array->devices = calloc(device_count, sizeof(*array->devices));
    array->members = calloc(members, sizeof(*array->members));
    array->segment_busy = calloc(geometry->segment_count, sizeof(*array->segment_busy));
    return array->devices && array->members && array->segment_busy ? 0 : -ENOMEM;
}

void array_free(struct kvfs_array *array) {
    threads_free(array);
    free(array->segment_busy);
    free(array->members);
    free(array->devices);
}

/* ---- what a device is ---- */

/* True for a RAM disk: a read of it takes no longer than a copy. */
static bool is_memory(int fd) {
    struct stat st;
    char path[64], name[PATH_MAX];
    if (fstat(fd, &st) < 0 || !S_ISBLK(st.st_mode))
        return false;
    snprintf(path, sizeof(path), "/sys/dev/block/%u:%u", major(st.st_rdev), minor(st.st_rdev));
    ssize_t n = readlink(path, name, sizeof(name) - 1);
    if (n <= 0)
        return false;
    name[n] = 0;
    const char *base = strrchr(name, '/');
    return base && (strncmp(base, "/zram", 5) == 0 || strncmp(base, "/ram", 4) == 0 || strncmp(base, "/pmem", 5) == 0);
}

/* True if another process or host serves the file's filesystem. FUSE takes 12 requests at a time by default; the 13th waits in io_uring_enter,
 * whatever was asked for. One hanging server would then hang every thread that submits, in spite of all deadlines. If fstatfs fails, the
 * filesystem is such a one: many FUSE servers do not know that call. */
static bool may_block(int fd) {
    struct statfs st;
    return fstatfs(fd, &st) < 0 || st.f_type == FUSE_SUPER_MAGIC || st.f_type == NFS_SUPER_MAGIC || st.f_type == (__fsword_t)SMB2_SUPER_MAGIC;
}

void device_kind_set(struct device *device, const struct device_ops *kind) {
    const struct device_ops *before = atomic_exchange(&device->kind, kind);
    atomic_compare_exchange_strong(&device->ops, &before, kind); /* it fails where faults are wrapped around the kind: they stay */
}

void device_probe(struct device *device) {
    struct kvfs_nvme_target target;
    const struct device_ops *kind = is_memory(device->fd) ? &memory_ops : &uring_ops;
    if (nvme_target_of(device->fd, &target))
        kind = &nvme_tcp_ops;
    atomic_store(&device->blocks, may_block(device->fd));
    device_kind_set(device, kind);
}
