/* One measure of a pool, a directory or devices: a kind of operation, by a number of threads, for a time. `kvfs bench` puts them together.
 *
 * Each thread does one operation after the other, and times it. A block is the file PREFIX<number> below a namespace, for libkvfs and for files.
 * The raw kinds are the same I/O without kvfs. Of files and devices it is pread(2) and pwrite(2). Of a pool it goes by its client's own ring, at the
 * places of blocks.
 */
#ifndef KVFS_MEASURE_H
#define KVFS_MEASURE_H

#include <stdint.h>

#include "kvfs.h"

#define KVFS_MEASURE_THREADS_MAX 32
#define KVFS_MEASURE_BUCKETS 512
#define KVFS_MEASURE_BATCH_MAX 64

enum kvfs_measure_kind {
    KVFS_MEASURE_READ = 0,       /* raw, of files */
    KVFS_MEASURE_WRITE = 1,      /* raw, to files */
    KVFS_MEASURE_POOL_READ = 2,  /* raw: as many bytes, at blocks' places, and nothing proved */
    KVFS_MEASURE_POOL_WRITE = 3, /* raw: to places that the daemon lends. They are given back, and nothing stays. */
    KVFS_MEASURE_GET = 4,        /* kvfs_get() of a block */
    KVFS_MEASURE_PUT = 5,        /* kvfs_put() of `batch` blocks */
    KVFS_MEASURE_EXISTS = 6,     /* kvfs_exists() of a block */
    KVFS_MEASURE_FILE_READ = 7,  /* open, read, close */
    KVFS_MEASURE_FILE_STORE = 8, /* a temporary file, write, close, rename */
    KVFS_MEASURE_FILE_LOOKUP = 9 /* access(2) */
};

struct kvfs_measure {
    uint32_t kind;              /* enum kvfs_measure_kind */
    uint32_t threads;           /* at most KVFS_MEASURE_THREADS_MAX */
    uint32_t batch;             /* of PUT: blocks of a call, at most KVFS_MEASURE_BATCH_MAX; otherwise 1 */
    uint32_t stop;              /* may be set at any time: no further operation begins */
    struct kvfs_client *client; /* of the kinds by libkvfs and of a pool; its keys are of the namespace */
    int32_t directory;          /* descriptor of the namespace's directory, for the kinds by files; or -1 */
    uint32_t file_count;
    const int32_t *files; /* of READ and WRITE, open with O_DIRECT: block i is in file i % file_count, at i / file_count * block_size */
    const char *prefix;
    uint64_t block_size;   /* a multiple of 4096 */
    uint64_t first, count; /* blocks [first, first + count) are read at random, or stored in order. POOL_WRITE has places of `count` at most */
    uint32_t once;         /* of READ and WRITE: each block once, in order */
    int32_t error;         /* 0, or the first -errno: it ended there. A block that is gone is none, but a miss. */
    uint64_t duration_ns;
    /* The outcome. */
    uint64_t blocks, misses;
    uint64_t elapsed_ns;
    uint64_t busiest_ns; /* CPU time of the thread that took most */
    /* Operations by latency. Bucket 8 * n + i is of those from (8 + i) * 2^(n - 3) ns on. */
    uint64_t histogram[KVFS_MEASURE_BUCKETS];
    char reason[512]; /* of the error, if libkvfs had words for it */
};

/* Runs until the time is over, all blocks are stored, or `stop`. Blocks. 0, or -errno where it could not begin; see also `error`. */
int kvfs_measure_run(struct kvfs_measure *measure);

#endif
