/* libkvfs: blocks of a mounted kvfs pool, from its devices straight into the caller's memory.
 *
 *     struct kvfs_client *client;
 *     if (kvfs_connect("/mnt/kv", "llama-3-8b", NULL, &client) < 0)
 *         errx(1, "%s", kvfs_error());
 *     kvfs_get(client, &keys, buffers, results);
 *
 * A block is an ordinary file of the mount. A key of 1 to 127 bytes is <directory>/<namespace>/<first 2 hex digits>/<key in hex>. Of a
 * longer one the first 254 digits, and the next as a letter ('g' for 0 to 'v' for f), are a directory there. The digits behind them are the
 * file's name. A key of the kind KVFS_PATHS is <directory>/<namespace>/<key>. A block written by one side can be read by the other.
 *
 * Connecting asks the daemon for the block table (read-only) and the devices. After that a read asks no daemon. The name is
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

#define KVFS_KEY_MAX 255 /* bytes */
#define KVFS_PATH_MAX 1023

struct kvfs_client;

enum kvfs_client_flags {
    KVFS_READ_ONLY = 1, /* no right to write is asked for: put and delete are -EROFS */
    KVFS_NO_VERIFY = 2  /* benchmarks only: leaves are not checked */
};

struct kvfs_options {
    uint32_t size;         /* sizeof(struct kvfs_options): the fields that this caller knows */
    uint32_t flags;        /* enum kvfs_client_flags */
    uint32_t timeout_ms;   /* of silence, of a device and of the daemon; 0: $KVFS_TIMEOUT_MS, or 2000 */
    uint32_t depth;        /* blocks that a call reads at a time, 1 to 64; 0: 8 */
    uint64_t staging_size; /* bytes of pinned memory for kvfs_prestage(), at most; 0: 256 MiB */
};

enum kvfs_key_kind {
    KVFS_KEYS = 0, /* any 1 to KVFS_KEY_MAX bytes */
    KVFS_PATHS = 1 /* the paths of files below the namespace, "a/b/name", of 1 to KVFS_PATH_MAX bytes; no part is "." or ".." */
};

struct kvfs_keys { /* back to back: key i is sizes[i] bytes */
    const void *data;
    const uint32_t *sizes;
    uint32_t count;
    uint32_t kind; /* enum kvfs_key_kind */
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

enum kvfs_put_flags {
    KVFS_IF_ABSENT = 1 /* an existing block is not written: its result is -EEXIST. It counts as used */
};

struct kvfs_put_options {
    uint32_t size;                   /* sizeof(struct kvfs_put_options): the fields that this caller knows */
    uint32_t flags;                  /* enum kvfs_put_flags */
    const struct kvfs_keys *parents; /* of each block the key of the block before it (size 0: it is the first); NULL: not known */
};

/* path: a mount point of kvfs, a directory below one, or the pool's own directory, which stands for its mount point. space: a namespace, a
 * relative path ("llama-3-8b", "team/llama"); NULL or "": none, then keys lie in the directory itself. options may be NULL. -EINVAL: not a
 * kvfs mount, or no namespace. -ENOTCONN: no daemon. -EACCES: the daemon refuses this user. -EPROTO: a daemon of another version.
 * -ETIMEDOUT. Between two daemons of a mount that outlives them (kvfs hold) the next one is waited for, timeout_ms in all; then -ENOTCONN. */
int kvfs_connect(const char *path, const char *space, const struct kvfs_options *options, struct kvfs_client **out);
/* Waits for devices that have not answered, at most timeout_ms; memory that they still hold then stays the process's. */
void kvfs_close(struct kvfs_client *client);
/* The last error on this thread, as a message that names the object and the numbers. */
const char *kvfs_error(void);

/* found[i] = 1 if there is a block. Reads nothing, asks no daemon. */
int kvfs_exists(struct kvfs_client *client, const struct kvfs_keys *keys, uint8_t *found);
/* How many keys, from the first on, exist without a gap. Reads nothing, asks no daemon; keys behind the first gap are not looked up. */
int kvfs_exists_prefix(struct kvfs_client *client, const struct kvfs_keys *keys);
/* sizes[i] = bytes of the block, or -ENOENT. */
int kvfs_sizes(struct kvfs_client *client, const struct kvfs_keys *keys, int64_t *sizes);
/* Read whole blocks. results[i]: bytes read, or the reason of a miss: -ENOENT, -ETIMEDOUT (a device gave no answer: see above), -EIO. Or
 * -ERANGE: the block is larger than the buffer (then nothing was read). Returns the number of blocks read. Before anything is read: -EINVAL
 * (buffers that overlap), -EBUSY (a buffer that a device still owns). */
int kvfs_get(struct kvfs_client *client, const struct kvfs_keys *keys, const struct kvfs_buffer *buffers, int64_t *results);
/* The same into memory in pieces: the block's first bytes go to pieces[0], the next ones to pieces[1]. Pieces have any size and alignment.
 * Whole pages of a block (4096 bytes) are read without a copy if they lie in one piece, aligned to kvfs_client_information.memory_alignment. */
int kvfs_get_vectors(struct kvfs_client *client, const struct kvfs_keys *keys, const struct kvfs_vector *vectors, int64_t *results);
/* Bytes of a block from vectors[i].offset on, as many as its pieces hold or the block has behind it. results[i] says how many, 0 at or behind the
 * end. Only their leaves are read and proved, and what of the block's header proves these. A key may come any number of times. */
int kvfs_get_ranges(struct kvfs_client *client, const struct kvfs_keys *keys, const struct kvfs_vector *vectors, int64_t *results);
/* Write blocks from the caller's memory, many reserved and committed at once, but not all or none. A block that exists is replaced; a
 * reader sees the old one or the new one, whole. results[i]: 0 or -errno. -ENOSPC: all that is left is pinned or open. -EFBIG: the pool cannot
 * hold this much. -EOVERFLOW: a device is a file, and this process may not write so far into one (RLIMIT_FSIZE). Returns the number of blocks
 * stored. -EINVAL: the same key twice. -EROFS. -ENOTCONN: no daemon. Under a mount that outlives its daemon (kvfs hold) the call waits for the
 * next one, timeout_ms in all. It stores once more what was in doubt. Delete, lease, fresh and list wait, too. */
int kvfs_put(struct kvfs_client *client, const struct kvfs_keys *keys, const struct kvfs_buffer *buffers, int64_t *results);
/* The same, of blocks whose memory is in pieces (vectors[i].offset is not looked at). Without a copy where every piece's address is aligned to
 * kvfs_client_information.memory_alignment and every piece but a block's last is whole pages of 4096 bytes. options may be NULL. With
 * KVFS_IF_ABSENT a block that this client could not read is written again: its bytes did not prove, or its device erred or gave no answer.
 * The last 1024 such blocks are known. */
int kvfs_put_vectors(struct kvfs_client *client, const struct kvfs_keys *keys, const struct kvfs_vector *vectors,
                     const struct kvfs_put_options *options, int64_t *results);
/* deleted[i] = 1 if the block existed. Returns their number. */
int kvfs_delete(struct kvfs_client *client, const struct kvfs_keys *keys, uint8_t *deleted);
/* Keep blocks from eviction until kvfs_release(), until `milliseconds` have passed, or until this client is gone: whichever comes first. More than
 * 3,600,000 are cut; of blocks of other nodes 60,000. held[i] = 1 for kept ones. 0: there is no such block, or leases hold all that they may: an
 * eighth of the pool, one client half of that. Returns their number. A lease keeps no block that others delete or replace, whose bytes are bad, or
 * whose device goes. A block of two leases is kept until both have ended. *lease: 0 if nothing is kept. On an error nothing is, but -ETIMEDOUT
 * leaves to its deadline what the daemon may have taken. Asks the daemon, once for 4,096 keys. -EINVAL: 0 milliseconds. -ENOTCONN. */
int kvfs_lease(struct kvfs_client *client, const struct kvfs_keys *keys, uint32_t milliseconds, uint64_t *lease, uint8_t *held);
/* 1: the lease was in force until now; 0: it had ended, with its deadline, connection or daemon, or is 0. -ETIMEDOUT: it ends by itself. */
int kvfs_release(struct kvfs_client *client, uint64_t lease);
/* A claim is a lease without a waiter, between a look-up and a load. One frame tells the daemon which of these blocks exist; a later call takes its
 * answer in. Blocks that the daemon does not grant are not kept. Nothing is claimed while it is gone, late with earlier claims, or full. Returns
 * how many blocks it was sent. -EINVAL: 0 milliseconds, or what cannot be a key. */
int kvfs_claim(struct kvfs_client *client, const struct kvfs_keys *keys, uint32_t milliseconds);
/* Each key is given back to its oldest claim; one that waits for no other key is released. Does not wait. Returns how many were claimed. */
int kvfs_unclaim(struct kvfs_client *client, const struct kvfs_keys *keys);
/* For eviction each block counts as read now; it is no hit of statistics. A hint: a daemon that is busy or gone does not hear of it. Returns how many
 * exist. */
int kvfs_touch(struct kvfs_client *client, const struct kvfs_keys *keys);
/* A hint: these blocks are no longer needed: their session has ended. They go before others, until they are used again. Blocks of other nodes of a
 * pod are their nodes' business: nothing is said of them. Returns how many exist. */
int kvfs_done(struct kvfs_client *client, const struct kvfs_keys *keys);
/* In a pod: return once everything is found here that the other nodes had stored or removed before this call. They are asked for held-back news;
 * names that engines are about to rename aside. 0, also where the pool is no pod. -ETIMEDOUT: a node that lives gave no answer in 100 ms; the
 * message names it. -EHOSTUNREACH: no engine can be reached. */
int kvfs_fresh(struct kvfs_client *client);
/* Keys in byte order, from the first after `after` (NULL: from the first). Their sizes go into sizes[0 .. capacity), their bytes back to
 * back into data (data_size; KVFS_KEY_MAX bytes a key are always enough). Returns their number, 0 at the end. */
int kvfs_list(struct kvfs_client *client, const void *after, uint32_t after_size, void *data, uint64_t data_size, uint32_t *sizes, uint32_t capacity);
/* Start to read blocks that will be needed soon into pinned memory; the next kvfs_get() of each takes it from there. The oldest make room.
 * Returns how many were started; blocks that do not exist, or are in that memory already, are not. */
int kvfs_prestage(struct kvfs_client *client, const struct kvfs_keys *keys);
/* 1 while a device may still write into [data, data + size), else 0. */
int kvfs_busy(struct kvfs_client *client, const void *data, uint64_t size);

/* ---- batches that run in parallel to their submitter ---- */

/* A queue has two threads, made when it is opened. One reads, with blocks of many batches in flight together. One puts and deletes, in the order
 * of submission. A call that submits copies keys and vectors, returns an id above 0 at once, and never waits for a device or the daemon. The memory
 * and the results are the caller's, who leaves them alone until the batch's completion. Results are as of the plain calls. Of untried items they
 * are -ECANCELED, or 0 in found and deleted. -EAGAIN: too much waits, or was not drained. Any thread may call any of these. */
struct kvfs_queue;
struct kvfs_queue_completion {
    int64_t id;
    int64_t result;  /* as the plain call returns it; of exists how many there are; or -errno of the whole batch */
    char error[240]; /* the message of that errno, else empty */
};
/* depth: blocks in flight, 1 to 256; 0: 64. */
int kvfs_queue_open(struct kvfs_client *client, uint32_t depth, struct kvfs_queue **out);
/* An eventfd, readable while completions wait; kvfs_queue_drain() takes its count back. Not to be read or closed by others. */
int kvfs_queue_fd(struct kvfs_queue *queue);
int64_t kvfs_queue_get(struct kvfs_queue *queue, const struct kvfs_keys *keys, const struct kvfs_vector *vectors, int64_t *results);
int64_t kvfs_queue_get_ranges(struct kvfs_queue *queue, const struct kvfs_keys *keys, const struct kvfs_vector *vectors, int64_t *results);
/* Batches that wait are joined into one put. Of a key that is in two, the later is stored later. options may be NULL. */
int64_t kvfs_queue_put(struct kvfs_queue *queue, const struct kvfs_keys *keys, const struct kvfs_vector *vectors,
                       const struct kvfs_put_options *options, int64_t *results);
/* Complete when this returns, where the table can answer; otherwise behind the puts that wait. */
int64_t kvfs_queue_exists(struct kvfs_queue *queue, const struct kvfs_keys *keys, uint8_t *found);
int64_t kvfs_queue_delete(struct kvfs_queue *queue, const struct kvfs_keys *keys, uint8_t *deleted);
/* Completions, in the order in which batches ended. Returns their number, at most capacity; never waits. */
int kvfs_queue_drain(struct kvfs_queue *queue, struct kvfs_queue_completion *out, uint32_t capacity);
/* Let what runs end, cancel the rest, and free the queue: then all results are set, and completions that were not drained are gone. Before
 * kvfs_close(). -ETIMEDOUT: a put still runs after four times timeout_ms; nothing is freed, close it again. */
int kvfs_queue_close(struct kvfs_queue *queue);

/* ---- events: what is stored and removed, by anybody, evictions included ---- */

struct kvfs_events;
enum kvfs_event_kind {
    KVFS_STORED = 1,  /* the path leads to this block from now on */
    KVFS_REMOVED = 2, /* the path leads to a block no longer */
    KVFS_GAP = 3,     /* `lost` changes anywhere in the pool, or fewer, are missing here: this subscriber was too slow */
    KVFS_RESET = 4    /* anything may have changed below `path` ("": in the namespace): a daemon came back, or a directory was renamed */
};
enum kvfs_event_reason {
    KVFS_REASON_WRITTEN = 1,  /* stored: new */
    KVFS_REASON_REPLACED = 2, /* stored: in place of an older block; removed: a file being written has the name */
    KVFS_REASON_RENAMED = 3,
    KVFS_REASON_DELETED = 4, /* by a user, or its bytes did not verify */
    KVFS_REASON_EVICTED = 5,
    KVFS_REASON_AWAY = 6,   /* removed: a device of it failed */
    KVFS_REASON_FOUND = 7,  /* stored: its device is back, or a rebuild of the index found it */
    KVFS_REASON_DAEMON = 8, /* reset: another daemon serves the pool */
};
struct kvfs_block_event {
    uint32_t kind;      /* enum kvfs_event_kind */
    uint32_t reason;    /* enum kvfs_event_reason; 0 of a gap */
    uint64_t number;    /* of the change, among all of the whole pool, since the first subscription to this daemon */
    uint64_t lost;      /* of a gap */
    uint64_t size;      /* of the block, in bytes */
    int64_t time_ns;    /* since 1970 */
    const char *path;   /* below the namespace; valid until the next call */
    const uint8_t *key; /* valid like `path`; NULL: the file's name is no key's */
    uint32_t path_size; /* without the terminating 0 */
    uint32_t key_size;
};
/* Subscribe to the client's namespace: all that changes after this call is reported, in order. A subscriber costs a store no
 * time, also if it stops. One thread at a time may use it; close it before the client. The errors of kvfs_connect(). */
int kvfs_events_open(struct kvfs_client *client, struct kvfs_events **out);
/* 1: *out is the next event. 0: none in timeout_ms. -ENOTCONN: unmounted; a later call goes on when the pool is mounted again, with a reset.
 * -EPROTO: the daemon's feed makes no sense. */
int kvfs_events_next(struct kvfs_events *events, struct kvfs_block_event *out, uint32_t timeout_ms);
void kvfs_events_close(struct kvfs_events *events);

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
/* The way of this client's device I/O: "io_uring"; or "threads (...)", and why io_uring does not serve. */
int kvfs_client_rings(struct kvfs_client *client, char *out, uint32_t capacity);
/* The user that the daemon takes this client for, by whom its shares and the owners of its blocks go: "7". In a user namespace the daemon knows
 * another number: "100007 (7 in this process's user namespace)". */
int kvfs_client_user(struct kvfs_client *client, char *out, uint32_t capacity);

#ifdef __cplusplus
}
#endif

#endif
