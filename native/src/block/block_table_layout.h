/* Layout and protocol of the block table; private to block_table.c, the writer, and block_table_reader.c.
 * One array of record slots, and two linear-hashing indexes over it, by name key and by inode number.
 *
 * Layout of the memfd: header page; counts of files being written; name buckets; inode buckets; overflow buckets of both; record slots.
 * Each part is page aligned and as large as records_max can ever need. The memfd is sparse: only used pages cost memory.
 *
 * Linear hashing: an index of `count` buckets grows by one bucket at a time. Let P be the highest power of two in count. Bucket count - P
 * is split into itself and bucket `count`. So `count` alone says which bucket a hash lies in, and an insert waits for one split at most.
 * Indexes never shrink: the number of names hardly changes.
 *
 * Protocol between the one writer and the readers, which never write (I7 to I9):
 * - Every bucket and every slot begins with a sequence, odd while it is being written. A primary bucket's sequence also covers its chain
 *   of overflow buckets.
 * - A slot is filled before an index leads to it, and freed after no index does. Freed slots and overflow buckets are used again at once.
 * - A reader believes a record if the slot's sequence was stable while the reader copied, and the copy holds the key it looks for. The
 *   way to the slot does not matter.
 * - A reader believes a miss if the bucket's sequence was stable while it searched the chain, and `count` still leads to the bucket.
 *   During a split both buckets are odd, and `count` changes before either becomes even.
 * - So an entry moves to another slot by one store under the bucket's sequence, and a name in the table is never missed.
 * - Sequences wrap after 2^31 writes of one place. Only a reader that sleeps through exactly so many, between two loads, would be fooled.
 *
 * From shared memory readers use only the atomics below. Each is checked against limits, computed once from a header with a valid checksum.
 * The writer relies on its private memory (free lists), and on shared memory that the seals let no other process write.
 *
 * A slot packs a record's fields: header_pages has 24 bits, nlink 30, size 48, mode 16. Others are refused (-EINVAL).
 * kvfs_record.slot counts from 0 to records_max. There is one slot more than records: a rename at the limit needs room for its copy.
 * A rename of an inode (another name key) moves it to another slot; every other change leaves it where it is.
 */
#ifndef KVFS_BLOCK_TABLE_LAYOUT_H
#define KVFS_BLOCK_TABLE_LAYOUT_H

#include "block/table.h"

#include <assert.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>

#include "block/checksum.h"

#define TABLE_MAGIC 0x4c4241545346564bULL /* "KVFSTABL" */
#define TABLE_VERSION 2
#define BUCKET_ENTRIES 9
#define INITIAL_BUCKETS 64 /* one page */
/* Entries per primary bucket before the next split. At 8 of 9 some 30% of the buckets have an overflow bucket at every stage of growth.
 * Each index then needs 10.5 bytes for a record. At 6 it was 12.2 bytes, and lookups were no faster. */
#define LOAD 8
#define RECORDS_MAX (UINT32_C(1) << 31)
/* Files being written are counted by a hash of the inode number. A collision costs a reader one question to the mount. */
#define WRITTEN_COUNTS 16384

struct bucket {
    _Atomic uint32_t sequence;              /* of the chain, in a primary bucket */
    _Atomic uint32_t overflow;              /* next bucket of the chain, or 0 */
    _Atomic uint32_t slots[BUCKET_ENTRIES]; /* 0: no entry, nor in any place behind */
    _Atomic uint16_t tags[BUCKET_ENTRIES];  /* high 16 bits of the hash */
    uint16_t reserved;
};
static_assert(sizeof(struct bucket) == 64, "a cache line");

enum word { INODE, PARENT, VERSION, GENERATION, MTIME, CTIME, ATIME, KEY_LOW, KEY_HIGH, PLACE, OWNER, SIZE_MODE, COUNTS, WORDS };

struct slot {
    _Atomic uint32_t sequence;
    _Atomic uint32_t links_kind; /* nlink << 2 | kind; kind 0: free */
    _Atomic uint64_t words[WORDS];
};
static_assert(sizeof(struct slot) == 112, "memory per record");

/* A slot's content. */
struct packed {
    uint32_t links_kind;
    uint64_t words[WORDS];
};

/* Written once, before the table is handed out. */
struct constants {
    uint64_t magic;
    uint32_t version;
    uint32_t bucket_size;
    uint32_t slot_size;
    uint32_t reserved;
    uint64_t mount_epoch;
    uint64_t records_max;
    uint64_t size;     /* of the memfd */
    uint64_t checksum; /* of the fields above: also tells a reader that its secret is another pool's */
};

struct header {
    struct constants constants;
    _Alignas(64) _Atomic uint32_t counts[2]; /* buckets of the index by name and of the index by inode */
    _Atomic uint32_t complete;
    _Alignas(64) _Atomic uint64_t records; /* this line: for statistics */
    _Atomic uint64_t ambiguous;
    _Atomic uint32_t slots_fresh; /* never used from here on */
    _Atomic uint32_t overflow_fresh;
    _Atomic uint32_t overflow_used;
    _Atomic uint64_t blocks; /* sealed files with a name */
};
static_assert(sizeof(struct header) <= KVFS_PAGE_SIZE, "one page");

struct index {
    struct bucket *buckets;
    _Atomic uint32_t *count;
    uint32_t buckets_max;
    uint64_t entries; /* the writer's */
};

#define FREE_LEVELS 6
/* Free numbers in 1..max. Numbers from `fresh` on were never taken; numbers given back are a tree of bitmaps, 64 children a word. The
 * lowest number is taken first, so the used part of the table stays dense. Giving back needs no memory. */
struct free_set {
    uint64_t *levels[FREE_LEVELS];
    uint32_t depth;
    uint32_t fresh;
    uint32_t max;
    uint64_t memory_size;
};

struct kvfs_table {
    struct header *header;
    _Atomic uint32_t *written;
    struct index names;
    struct index inodes;
    struct bucket *overflow; /* [0] is unused */
    struct slot *slots;      /* [0] is unused */
    uint32_t overflow_max;
    uint32_t slots_max;
    uint32_t records_max;
    uint64_t secret;
    uint64_t size;
    int fd; /* -1: a reader */
    uint32_t overflow_used;
    uint64_t records;
    _Atomic uint64_t *places;                          /* the writer's: as kvfs_table_places() has it, of the slot with this number less one */
    uint32_t *payers;                                  /* the writer's, by slot less one: whom kvfs_table_charge() named; 0: the owner pays */
    void (*kept)(void *of, uint32_t user, int change); /* as kvfs_table_watch() has it; NULL: nobody counts */
    void *kept_of;
    struct free_set free_slots;
    struct free_set free_overflow;
};

/* The key of one lookup. No name has the key zero. */
struct key {
    uint64_t hash;
    uint64_t words[2]; /* name key, or inode number */
    bool by_name;
};

#define get(place) atomic_load_explicit(place, memory_order_relaxed)
#define get_acquire(place) atomic_load_explicit(place, memory_order_acquire)
#define set(place, value) atomic_store_explicit(place, value, memory_order_relaxed)
#define set_release(place, value) atomic_store_explicit(place, value, memory_order_release)

/* ---- keys and packing ---- */

static inline struct key name_key(const struct kvfs_table *table, uint64_t parent, const char *name, uint32_t name_size) {
    struct key key = {.by_name = true};

    kvfs_name_key(parent, name, name_size, table->secret, &key.words[0], &key.words[1]);
    if (!(key.words[0] | key.words[1]))
        key.words[0] = 1;
    key.hash = key.words[0];
    return key;
}

/* murmur3's finalizer: inode numbers count up, and carry an epoch in their high bits. */
static inline uint64_t inode_hash(const struct kvfs_table *table, uint64_t inode) {
    uint64_t x = inode ^ table->secret;

    x = (x ^ (x >> 33)) * 0xff51afd7ed558ccdULL;
    x = (x ^ (x >> 33)) * 0xc4ceb9fe1a85ec53ULL;
    return x ^ (x >> 33);
}

static inline struct key inode_key(const struct kvfs_table *table, uint64_t inode) {
    return (struct key){.hash = inode_hash(table, inode), .words = {inode, 0}};
}

static inline uint8_t packed_flags(const struct packed *packed) { return (uint8_t)(packed->words[COUNTS] >> 24); }

static inline uint16_t tag_of(uint64_t hash) { return (uint16_t)(hash >> 48); }

/* count >= 2 */
static inline uint32_t bucket_of(uint64_t hash, uint32_t count) {
    uint32_t mask = UINT32_MAX >> __builtin_clz(count - 1);
    uint32_t bucket = (uint32_t)hash & mask;

    return bucket < count ? bucket : bucket & (mask >> 1);
}

/* ---- layout ---- */

static inline uint64_t page_round(uint64_t size) { return (size + KVFS_PAGE_SIZE - 1) & ~(uint64_t)(KVFS_PAGE_SIZE - 1); }

/* Set what follows from records_max; with a header mapped, also where each part lies. */
static inline void lay_out(struct kvfs_table *table, uint64_t records_max) {
    uint64_t primary = records_max / LOAD + 2;
    uint64_t offset = KVFS_PAGE_SIZE;
    char *base = (char *)table->header;

    if (primary < INITIAL_BUCKETS)
        primary = INITIAL_BUCKETS;
    table->records_max = (uint32_t)records_max;
    table->slots_max = (uint32_t)records_max + 1;
    /* All buckets of a chain but its last are full, so an index of n entries has at most n / 9 overflow buckets. A split takes the new
     * chain's buckets before it gives back the old chain's. */
    table->overflow_max = (uint32_t)((records_max + 1) / 3 + 16);
    table->names.buckets_max = table->inodes.buckets_max = (uint32_t)primary;
    if (base)
        table->written = (_Atomic uint32_t *)(base + offset);
    offset += WRITTEN_COUNTS * sizeof(*table->written);
    if (base) {
        table->names.count = &table->header->counts[0];
        table->inodes.count = &table->header->counts[1];
        table->names.buckets = (struct bucket *)(base + offset);
    }
    offset += page_round(primary * sizeof(struct bucket));
    if (base)
        table->inodes.buckets = (struct bucket *)(base + offset);
    offset += page_round(primary * sizeof(struct bucket));
    if (base)
        table->overflow = (struct bucket *)(base + offset);
    offset += page_round(((uint64_t)table->overflow_max + 1) * sizeof(struct bucket));
    if (base)
        table->slots = (struct slot *)(base + offset);
    offset += page_round(((uint64_t)table->slots_max + 1) * sizeof(struct slot));
    table->size = offset;
}

static inline uint64_t constants_checksum(const struct constants *constants, uint64_t secret) {
    return kvfs_checksum(constants, offsetof(struct constants, checksum), secret);
}

#endif
