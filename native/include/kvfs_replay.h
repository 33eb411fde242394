/* A trace of requests, replayed against a directory or a pool as an inference engine would use it: `kvfs replay`.
 *
 * A request is a prompt: the blocks of its prefix in order. The engine looks them up until the first one that is missing, loads those
 * before it, and stores the rest. On a directory (POSIX) that is access(2) a block; open, read, close; access, a temporary file, write,
 * close, rename. On a client (kvfs.h) it is kvfs_exists, kvfs_get, and kvfs_put_vectors of absent keys, with parents, as the connectors do.
 * Requests begin in the trace's order.
 *
 * A block is SPACE/<2 hex digits>/<32 hex digits>, which is also its name by kvfs_put, so that both ways find each other's blocks. Each of
 * its pages begins with the block's hash and the page's offset; loaded pages are checked.
 */
#ifndef KVFS_REPLAY_H
#define KVFS_REPLAY_H

#include <stdint.h>

#include "kvfs.h"

#define KVFS_REPLAY_ERRNO_COUNT 256

enum kvfs_replay_flags {
    KVFS_REPLAY_BUFFERED = 1, /* files without O_DIRECT */
    KVFS_REPLAY_VERIFY = 2,   /* compare every loaded byte, not the first and the last page's stamp alone */
    KVFS_REPLAY_TOUCH = 4     /* set a file's atime after a load, for programs that delete by it where the mount is noatime */
};

struct kvfs_replay_request {
    uint64_t due_ns; /* after the start; it may begin then */
    uint64_t first;  /* its blocks are blocks[first .. first + count) */
    uint32_t count;
    uint32_t reserved;
};

struct kvfs_replay_record {                /* the outcome of a request; all zero if it never began */
    uint64_t start_ns;                     /* after the replay's start */
    uint64_t lookup_ns, load_ns, store_ns; /* the duration of each step */
    uint64_t end_ns;                       /* after the replay's start; 0: it did not end */
    uint32_t found;                        /* blocks before the first miss */
    uint32_t loaded;                       /* of these, before the first that could not be loaded */
    uint32_t stored, present;              /* of the rest: written; already there */
    uint32_t lost;                         /* found, and gone by the load */
    uint32_t failed;                       /* loads and stores that failed otherwise */
    uint32_t wrong;                        /* loaded, and not the block's bytes */
    uint32_t reserved;
};

struct kvfs_replay {
    int32_t directory; /* descriptor of the directory that holds the blocks, or -1: use client */
    uint32_t flags;    /* enum kvfs_replay_flags */
    struct kvfs_client *client;
    const struct kvfs_replay_request *requests;
    uint64_t request_count;
    const uint32_t *blocks; /* indexes into hashes */
    const uint64_t *hashes; /* each once */
    uint64_t hash_count;
    struct kvfs_replay_record *records; /* request_count of them, zeroed */
    const uint32_t *resident;           /* with lru_blocks: blocks in the directory, the least recent first; indexes into hashes */
    uint64_t resident_count;
    uint64_t lru_blocks; /* keep at most this many files, by an index in memory and unlink(2) of the least recent; 0: no index */
    uint64_t block_size; /* a multiple of 4096 */
    uint32_t threads;    /* requests at once */
    uint32_t io_threads; /* files being loaded at once, and as many being stored */
    uint32_t window;     /* blocks of a request that are loaded or stored together */
    uint32_t stop;       /* may be set at any time: no further request begins */
    uint64_t done;       /* requests that ended; may be read at any time */
    uint64_t load_errors[KVFS_REPLAY_ERRNO_COUNT]; /* by errno; ENOENT is no error here, but `lost` */
    uint64_t store_errors[KVFS_REPLAY_ERRNO_COUNT];
};

/* Runs until every request has ended. Blocks; 2 * threads * window * block_size bytes of memory. -ENOMEM, -EAGAIN: no thread. */
int kvfs_replay_run(struct kvfs_replay *replay);

#endif
