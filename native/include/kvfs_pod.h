/* The pod map: names of other nodes' blocks and directories, in shared memory; and the news, by which nodes tell one another of changes.
 *
 * The map is a memfd, sealed against future writable mappings and created at its largest size. Any number of readers in any process take no lock and
 * write nothing. Writers are threads of the daemon; a mutex inside orders them. A look-up asks the block table first, then the map.
 * Keys are the block table's: kvfs_name_key(parent, name) under the pool's secret, and low 1 where both halves are zero.
 * Functions that C alone calls: pod/pod.h. Layout and protocol: pod/pod_layout.h.
 * Bytes of a batch of news: struct kvfs_pod_batch and what follows it, below.
 *
 * Rules of versions. `here` is applied if its version is higher than the entry's. Of equal versions the segment of the higher generation counts, then
 * the higher page. `gone` is applied if its version is not lower; it is remembered for a while, so that late news of lower versions is refused.
 * A `here` may come too late for its place, or find no room. It still ends an entry of a lower version: a miss, never old content.
 */
#ifndef KVFS_POD_H
#define KVFS_POD_H

#include <stdint.h>
#include "kvfs_format.h"
#include "kvfs_table.h"

/* ---- the map ---- */

struct kvfs_pod;

#define KVFS_POD_NODES_MAX 4096
#define KVFS_POD_LOT_MAX 64
#define KVFS_POD_SHAPES_MAX 4095
/* In `mode`: the block has several runs, so its data need not lie behind its header. */
#define KVFS_POD_EXTENTS (1u << 31)

struct kvfs_pod_config {
    uint64_t entries_max;   /* beyond it entries of the lowest versions make room; 1 to 2^34. 26 bytes each, soon used: keys are random */
    uint64_t secret;        /* the pool's */
    uint32_t segment_count; /* 1 to 2^22 */
    uint32_t segment_pages; /* 2 to 2^24; segment_count * segment_pages is at most 2^43 */
    uint32_t lot;           /* segments of a lot: a power of two, 1 to 64 */
    uint32_t nodes;         /* slots 0 to nodes - 1; segment s is of slot s / lot % nodes; 1 to 4096 */
    uint32_t own_slot;      /* its segments are refused: they are the block table's */
    uint32_t reserved;      /* zero */
};

/* The result of a look-up. */
struct kvfs_pod_found {
    uint64_t generation; /* of the segment's life; 0 for a directory */
    uint64_t size;       /* of the block, in bytes; 0 for a directory */
    uint32_t segment;    /* place of the block's header; 0 for a directory */
    uint32_t page;
    uint32_t header_pages;
    uint32_t mode; /* st_mode, with the type bits: a regular file or a directory */
    uint32_t uid;
    uint32_t gid;
    uint16_t slot;     /* of the owner; for a directory, of the node that announced it last */
    uint8_t keyed;     /* the block's header has this very key; 0: perhaps not, for it was renamed after its seal */
    uint8_t directory; /* its inode number follows from parent and name */
    uint32_t reserved;
};

/* One key, as `here` and `directory here` tell of it. */
struct kvfs_pod_entry {
    uint64_t key_low;
    uint64_t key_high;
    uint64_t version;
    uint64_t generation; /* of the segment's life */
    uint64_t size;       /* below 2^48 */
    uint32_t segment;
    uint32_t page;
    uint32_t header_pages;
    uint32_t mode;
    uint32_t uid;
    uint32_t gid;
    uint16_t slot; /* of the node that says so */
    uint8_t keyed;
    uint8_t directory; /* then size, place and header_pages are zero */
    uint32_t reserved;
};

/* Counts since the map was created, unless it says otherwise. */
struct kvfs_pod_statistics {
    uint64_t entries; /* live now; directories are among them, memories of `gone` are not */
    uint64_t directories;
    uint64_t dead; /* now: entries of lives that ended, which wait for the sweep */
    uint64_t gone; /* now: memories of `gone` */
    uint64_t entries_max;
    uint64_t capacity; /* places for entries */
    uint64_t bytes;    /* memory of map and writer when all of it is touched, as a map of random keys soon is */
    uint64_t shapes;   /* now */
    uint64_t segments; /* now: with a life known */
    uint64_t inserted;
    uint64_t replaced;
    uint64_t removed;     /* by `gone` */
    uint64_t superseded;  /* by a `here` that could not be applied itself */
    uint64_t forgotten;   /* by kvfs_pod_forget() */
    uint64_t dropped;     /* live entries that made room */
    uint64_t refused;     /* records without room: every entry of their two buckets was of a higher version */
    uint64_t shapes_full; /* records of a new shape while all shapes were in use */
    uint64_t displaced;   /* entries that moved to their other bucket */
    uint64_t lives;       /* ended ones, of segments */
    uint64_t swept;       /* entries that the sweep removed */
    uint64_t sweeps;      /* whole ones */
    uint64_t waiting;     /* refusals of a new life because the sweep lagged behind its segment's lives */
    uint64_t batches;
    uint64_t batches_refused;
    uint64_t versions_unknown; /* batches of a newer kvfs */
};

/* A map that C made (kvfs_pod_create()). */
int kvfs_pod_fd(const struct kvfs_pod *pod); /* owned by the map; safe to pass read-only */
/* A device is back: no segment is avoided. By the writer. */
void kvfs_pod_avoid_none(struct kvfs_pod *pod);
/* The slot of the node that owns the segment. */
uint32_t kvfs_pod_owner(const struct kvfs_pod *pod, uint32_t segment);

/* ---- single records: any thread of the daemon; each takes the mutex for under a microsecond ---- */

/* A segment's life: this generation lives, or has ended. All entries of earlier lives are dead by one store. 0; -ESTALE: a later one is known;
 * -EINVAL; -EAGAIN: a new life waits for the sweep, which kvfs_pod_sweep() brings forward. */
int kvfs_pod_life(struct kvfs_pod *pod, uint32_t segment, uint64_t generation, int ended);
/* Look at some buckets of 64 bytes for dead entries and old memories of `gone`. Every apply does as many as it has records. Returns how many went. */
uint64_t kvfs_pod_sweep(struct kvfs_pod *pod, uint64_t buckets);
/* An owner that repeats everything: after begin, all that it says `here` of is confirmed. End removes all of this slot's entries that were not
 * confirmed, and returns how many: their `gone` was lost. 0 or -EINVAL from begin. End takes the mutex in slices, and looks at the whole map. */
int kvfs_pod_repeat_begin(struct kvfs_pod *pod, uint32_t slot);
uint64_t kvfs_pod_repeat_end(struct kvfs_pod *pod, uint32_t slot);
void kvfs_pod_statistics(struct kvfs_pod *pod, struct kvfs_pod_statistics *out); /* of a created one */

/* ---- batches ---- */

#define KVFS_POD_BATCH_SIZE_MAX 65536
#define KVFS_POD_BATCH_RECORDS_MAX 2046
/* Little-endian ASCII "KVFSNEWS". */
#define KVFS_MAGIC_NEWS 0x5357454e5346564bULL

/* Little-endian. Followed by segment_count, shape_count, record_count of the structs below, and nothing else. */
struct kvfs_pod_batch {
    uint64_t magic;
    uint32_t version;  /* 1 */
    uint32_t size;     /* of the batch in bytes */
    uint64_t checksum; /* xxh3-64 of the batch with this field zero, seeded with the secret */
    uint64_t start;    /* random: this mount of the owner */
    uint64_t number;   /* of the first record; consecutive over the batches of a start, beginning with 1. A batch without records has one,
                        * too; items that were lost for want of room leave a gap */
    uint16_t slot;     /* of the owner */
    uint16_t segment_count;
    uint16_t shape_count;
    uint16_t reserved0;
    uint32_t record_count;
    uint32_t reserved1;
};
static_assert(sizeof(struct kvfs_pod_batch) == 56, "news");

/* Lives are applied in this order, before all records of the batch. */
struct kvfs_pod_batch_segment {
    uint64_t generation;
    uint32_t segment;
    uint32_t flags; /* 1: this life has ended */
};
static_assert(sizeof(struct kvfs_pod_batch_segment) == 16, "news");

struct kvfs_pod_batch_shape {
    uint64_t size;
    uint32_t header_pages;
    uint32_t mode;
    uint32_t uid;
    uint32_t gid;
};
static_assert(sizeof(struct kvfs_pod_batch_shape) == 24, "news");

enum kvfs_pod_kind {
    KVFS_POD_HERE = 1,
    KVFS_POD_GONE = 2,
    KVFS_POD_DIRECTORY_HERE = 3, /* shape counts, segment and page do not */
    KVFS_POD_DIRECTORY_GONE = 4,
    KVFS_POD_HIT = 5,    /* a block of the reader's own was read by the sender; version is how often */
    KVFS_POD_KEYED = 128 /* a flag next to the kind */
};

struct kvfs_pod_batch_record {
    uint64_t key_low;
    uint64_t key_high;
    uint64_t version;
    uint32_t page_kind; /* page | kind << 24 */
    uint16_t segment;   /* index in this batch */
    uint16_t shape;     /* index in this batch */
};
static_assert(sizeof(struct kvfs_pod_batch_record) == 32, "news");

/* A record that this node's own block loses against. */
struct kvfs_pod_conflict {
    uint64_t inode;       /* of the own block, in the block table */
    uint64_t own_version; /* which lost */
    uint64_t version;     /* which won */
    uint64_t key_low;
    uint64_t key_high;
    uint32_t kind; /* enum kvfs_pod_kind: here or gone */
    uint32_t slot; /* of the winner */
};

/* A block of this node that others read. */
struct kvfs_pod_hit {
    uint64_t inode;
    uint64_t count;
};

struct kvfs_pod_applied {
    uint64_t start;
    uint64_t number;      /* of the first record */
    uint64_t version_max; /* highest version or generation seen, of applied and skipped records: for the Lamport clock */
    uint32_t records;     /* in the batch: the sum of the counts up to hits */
    uint32_t applied;     /* here and gone that changed the map, or were known already */
    uint32_t old;         /* a higher version was present */
    uint32_t ended;       /* the segment's life had ended, or a later one was known */
    uint32_t foreign;     /* the segment is another owner's */
    uint32_t malformed;   /* place, shape, or an index that cannot be */
    uint32_t no_room;
    uint32_t waiting; /* for the sweep */
    uint32_t unknown; /* kinds of a newer kvfs */
    uint32_t own;     /* this node's own block has a higher version: skipped */
    uint32_t hits;
    uint32_t conflict_count; /* entries written to conflicts[] */
    uint32_t hit_count;      /* entries written to hits[]: of hits that the table knows */
    uint32_t unsure;         /* keys that the block table could not answer for (-EAGAIN): a conflict may hide there */
};

/* ---- news: what changed on this node, until it is published ---- */

struct kvfs_news;

enum kvfs_news_flags {
    KVFS_NEWS_KEYED = 1, /* the block's header has this very key */
    KVFS_NEWS_FIRST = 2, /* nothing had this name: if it goes before its news, the news is not needed */
    KVFS_NEWS_HIDDEN = 4 /* .tmp and dot names: kvfs_news_flush() leaves them */
};

/* Fields that a kind has no use for are zero. */
struct kvfs_news_item {
    uint64_t key_low;
    uint64_t key_high;
    uint64_t version; /* of a hit: how often */
    uint64_t generation;
    uint64_t size;
    uint64_t hold_ns; /* held back at least this long, and some 4 ms more where it is not 0 */
    uint32_t segment;
    uint32_t page;
    uint32_t header_pages;
    uint32_t mode;
    uint32_t uid;
    uint32_t gid;
    uint8_t kind;  /* enum kvfs_pod_kind */
    uint8_t flags; /* enum kvfs_news_flags */
    uint16_t reserved0;
    uint32_t reserved1;
};

struct kvfs_news_config {
    uint64_t bytes_max; /* memory of the queue: 64 KiB to 16 GiB */
    uint64_t secret;    /* the pool's */
    uint64_t start;     /* random, of this mount */
    uint32_t slot;      /* this node's */
    uint32_t reserved;
};

struct kvfs_news_taken {
    uint64_t number;       /* of the batch's first record */
    uint64_t next_due_ns;  /* CLOCK_MONOTONIC; UINT64_MAX: nothing is held */
    uint64_t lost;         /* items since the last take for which there was no room: repeat everything from the table */
    uint64_t version_max;  /* of the batch */
    uint32_t record_count; /* of the batch; 0 with a size: it has lives alone */
    uint32_t reserved;
};

struct kvfs_news_statistics {
    uint64_t added;
    uint64_t merged;   /* into a later item of their key */
    uint64_t vanished; /* came and went before their news */
    uint64_t lost;
    uint64_t batches;
    uint64_t records;
    uint64_t bytes; /* of the batches */
    uint64_t held;  /* now */
    uint64_t wakes;
};

/* An eventfd, owned by the queue: readable when something is due earlier than the last take said, or a batch is full. take() empties it. */
int kvfs_news_fd(const struct kvfs_news *news);
/* A segment's life has ended, or (not ended) a generation begins, which needs no news yet. Any thread. */
void kvfs_news_life(struct kvfs_news *news, uint32_t segment, uint64_t generation, int ended);
/* Pack what is due at now_ns into one batch. Returns its size, 0: nothing is due, or -ENOSPC: capacity is below KVFS_POD_BATCH_SIZE_MAX.
 * Call again until 0; then wait until next_due_ns or for the eventfd. One thread at a time. */
int64_t kvfs_news_take(struct kvfs_news *news, uint64_t now_ns, void *out, uint64_t capacity, struct kvfs_news_taken *taken);
/* All that was added before this call, hidden names aside, is due now. Any thread; wakes the eventfd. */
void kvfs_news_flush(struct kvfs_news *news);
void kvfs_news_statistics(struct kvfs_news *news, struct kvfs_news_statistics *out);

#endif
