/* libkvfs: blocks of a mounted kvfs pool, from its devices straight into the caller's memory.
 *
 *     struct kvfs_client *client;
 *     if (kvfs_connect("/mnt/kv", "llama-3-8b", NULL, &client) < 0)
 *         errx(1, "%s", kvfs_error());
 *     kvfs_get(client, &keys, buffers, results);
 *
 * A block is an ordinary file of the mount, <directory>/<namespace>/<first 2 hex digits>/<key in hex>. A block written by one side can be
 * read by the other. Connecting asks the daemon for the block table (read-only) and the devices. After that a read asks nobody. The name is
 * looked up in the table. Header and data are read with io_uring into the caller's memory. Every leaf's checksum is checked before the call
 * returns. No kernel filesystem, no daemon, no copy (except where memory or size is not aligned: kvfs_client_statistics.bounced_bytes).
 *
 * Functions return 0 (or a count) or -errno; kvfs_error() then has the message. Any thread may call any function, except kvfs_close().
 * After fork() a child must connect again: every call on its parent's client is -ECHILD and touches nothing.
 *
 * Memory belongs to the caller, except while a device may still write into it. A call that gave up on a device (its results say -ETIMEDOUT)
 * leaves that buffer to the device until kvfs_busy() says 0. If the caller frees or reuses the buffer earlier, the device's late bytes land
 * in it.
 */
#ifndef KVFS_H
#define KVFS_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define KVFS_KEY_MAX 127 /* bytes: a name has 255, two for each */

struct kvfs_client;

enum kvfs_client_flags {
    KVFS_READ_ONLY = 1, /* no right to write is asked for: put and delete are -EROFS */
    KVFS_NO_VERIFY = 2  /* benchmarks only: leaves are not checked */
};

struct kvfs_options {
    uint32_t size;         /* sizeof(struct kvfs_options): the fields that this caller knows */
    uint32_t flags;        /* enum kvfs_client_flags */
    uint32_t timeout_ms;   /* deadline of a device and of the daemon; 0: $KVFS_TIMEOUT_MS, or 2000 */
    uint32_t depth;        /* blocks a call has in flight, 1 to 64; 0: 8 */
    uint64_t staging_size; /* bytes of pinned memory for kvfs_prestage(), at most; 0: 256 MiB */
};

struct kvfs_keys { /* back to back: key i is sizes[i] bytes, 1 to KVFS_KEY_MAX */
    const void *data;
    const uint32_t *sizes;
    uint32_t count;
    uint32_t reserved;
};

struct kvfs_buffer {
    void *data;
    uint64_t size;
};

struct kvfs_vector {                  /* one block, or a part of it, and its memory */
    const struct kvfs_buffer *pieces; /* in the order of the block's bytes */
    uint32_t count;
    uint32_t reserved;
    uint64_t offset; /* in the block; of kvfs_get_ranges() alone */
};

/* path: a mount point of kvfs, a directory below one, or the pool's own directory, which stands for its mount point. space: a namespace, a
 * relative path ("llama-3-8b", "team/llama"); NULL or "": none, then keys lie in the directory itself. options may be NULL. -EINVAL: not a
 * kvfs mount, or no namespace. -ENOTCONN: no daemon. -EACCES: the daemon refuses this user. -EPROTO: a daemon two versions away.
 * -ETIMEDOUT. */
int kvfs_connect(const char *path, const char *space, const struct kvfs_options *options, struct kvfs_client **out);
/* Waits for devices that have not answered, at most timeout_ms; memory that they still hold then stays the process's. */
void kvfs_close(struct kvfs_client *client);
/* The last error on this thread, as a message that names the object and the numbers. */
const char *kvfs_error(void);

/* found[i] = 1 if there is a block. Reads nothing, asks nobody. */
int kvfs_exists(struct kvfs_client *client, const struct kvfs_keys *keys, uint8_t *found);
/* sizes[i] = bytes of the block, or -ENOENT. */
int kvfs_sizes(struct kvfs_client *client, const struct kvfs_keys *keys, int64_t *sizes);
/* Read whole blocks. results[i]: bytes read, or the reason of a miss: -ENOENT, -ETIMEDOUT (a device gave no answer: see above), -EIO. Or
 * -ERANGE: the block is larger than the buffer (then nothing was read). Returns the number of blocks read. Before anything is read: -EINVAL
 * (buffers that overlap), -EBUSY (a buffer that a device still owns). */
int kvfs_get(struct kvfs_client *client, const struct kvfs_keys *keys, const struct kvfs_buffer *buffers, int64_t *results);
/* Write blocks from the caller's memory, many reserved and committed at once, but not all or none. A block that exists is replaced; a
 * reader sees the old one or the new one, whole. results[i]: 0 or -errno (-ENOSPC: all that is left is pinned or open; -EFBIG). Returns the
 * number of blocks stored. -EINVAL: the same key twice. -EROFS. -ENOTCONN: no daemon. */
int kvfs_put(struct kvfs_client *client, const struct kvfs_keys *keys, const struct kvfs_buffer *buffers, int64_t *results);
/* deleted[i] = 1 if the block existed. Returns their number. */
int kvfs_delete(struct kvfs_client *client, const struct kvfs_keys *keys, uint8_t *deleted);
/* Keys in byte order, from the first after `after` (NULL: from the first). Their sizes go into sizes[0 .. capacity), their bytes back to
 * back into data (data_size; KVFS_KEY_MAX bytes a key are always enough). Returns their number, 0 at the end. */
int kvfs_list(struct kvfs_client *client, const void *after, uint32_t after_size, void *data, uint64_t data_size, uint32_t *sizes, uint32_t capacity);
/* Start to read blocks that will be needed soon into pinned memory; the next kvfs_get() of each takes it from there. The oldest make room.
 * Returns how many were started; blocks that do not exist, or are in that memory already, are not. */
int kvfs_prestage(struct kvfs_client *client, const struct kvfs_keys *keys);
/* 1 while a device may still write into [data, data + size), else 0. */
int kvfs_busy(struct kvfs_client *client, const void *data, uint64_t size);

/* ---- any file of the mount, by inode number (st_ino): for libraries that intercept file calls ---- */

struct kvfs_file;
struct kvfs_attributes {
    uint64_t inode;
    uint64_t size;
    uint64_t version;
    int64_t mtime_ns, ctime_ns, atime_ns;
    uint32_t mode; /* st_mode */
    uint32_t uid, gid, nlink;
    uint32_t sealed; /* 0: a directory, or a file that is being written: the daemon knows its size */
    uint32_t reserved;
};
/* Attributes by a path below the mount point, without "." and ".." and without a leading slash; "" is the mount's root. -ENOENT, -ENOTDIR,
 * -EAGAIN: ask the mount (a symbolic link, or an inode that the table cannot answer for). No permission is checked. */
int kvfs_find(struct kvfs_client *client, const char *path, struct kvfs_attributes *out);
/* Like kvfs_find(), with every inode on the way. out[0] is the root, out[*count - 1] the last one found, also when the result is -ENOENT or
 * -ENOTDIR. */
int kvfs_walk(struct kvfs_client *client, const char *path, struct kvfs_attributes *out, uint32_t capacity, uint32_t *count);
/* -ENOENT, -EAGAIN: not a sealed file. */
int kvfs_file_open(struct kvfs_client *client, uint64_t inode, struct kvfs_file **out);
/* Up to size bytes from offset, like pread(2) on the mount. -EAGAIN: not, or no longer, a sealed file: use the mount. -EIO, -ETIMEDOUT. */
int64_t kvfs_file_read(struct kvfs_file *file, uint64_t offset, void *data, uint64_t size);
void kvfs_file_close(struct kvfs_file *file);

/* ---- what is known ---- */

struct kvfs_client_information {
    uint8_t pool_uuid[16];
    uint64_t mount_epoch;
    uint32_t connected; /* 0: the daemon is gone; verified reads go on */
    uint32_t writable;
    uint32_t device_count;
    uint32_t memory_alignment; /* of buffers, for reads without a copy */
    char pool[256];            /* the pool's directory, cut if longer */
};
int kvfs_client_information_get(struct kvfs_client *client, struct kvfs_client_information *out);

struct kvfs_client_statistics {
    uint64_t lookups, hits, misses;          /* names looked up; blocks read; missing names, and blocks that could not be read */
    uint64_t gets, get_bytes, bounced_bytes; /* blocks read; their bytes; bytes of them that were copied once */
    uint64_t retries, timeouts, checksum_errors;
    uint64_t puts, put_bytes, deletes;
    uint64_t prestaged, prestage_used, prestage_wasted; /* blocks */
    uint64_t reconnects, busy;                          /* busy: buffers that devices still own */
};
int kvfs_client_statistics_get(struct kvfs_client *client, struct kvfs_client_statistics *out);

#ifdef __cplusplus
}
#endif

#endif
