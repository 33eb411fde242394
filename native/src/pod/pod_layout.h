/* Layout and protocol of the pod map; private to this room: pod_map.c, pod_insert.c, pod_repeat.c and pod_apply.c
 * write, pod_reader.c reads.
 *
 * Layout of the memfd: header page; move counts; shapes; segments; buckets. Each part is page aligned. A bucket is one cache line with 4 entries of
 * 16 bytes: {fingerprint, word}. The fingerprint is the key's high half (1 for 0; 0: no entry). The word is the entry's value ^ mix(fingerprint).
 *
 * Value: place, 43 bits (segment * segment_pages + page) | tag, 8 bits | shape, 12 bits | KEYED, 1 bit.
 * - Tag: the segment's life, in this node's own count. An entry is live while its tag is its segment's, and the segment has not ended.
 * - Shape: {size, header_pages, mode, uid, gid} of the block. There are 4095 of them, counted by their users.
 * - A directory is an entry whose shape's mode says so. Its place is the slot of a node that has it. pod_directories.c knows all of them.
 * - Shape 4095 is the memory of a `gone`; its place is the second when it was told. It is a miss, and may make room.
 *
 * A key may be in two buckets (cuckoo hashing). The first follows from the low half; the second is (H - first) modulo the count of buckets.
 * H follows from the fingerprint. So the other bucket of an entry follows from the entry and its bucket alone: the low half is stored nowhere.
 * The mask is of the fingerprint for the same reason: the sweep and the search for room decode entries whose keys they do not know.
 * A look-up compares 64 bits in one of two buckets of many: some 90 bits of the key. The rest is proved by what is read at the place.
 *
 * Protocol between the writers, which hold the mutex, and the readers, which write nothing:
 * - An entry is replaced by: fingerprint 0, word, fingerprint. A change of one key's value is one store of the word.
 * - A reader loads fingerprint, word, segment, shape; then fingerprint and word again. It believes what stayed the same. The mask makes nonsense of a
 *   word that belongs to another fingerprint, should the entry have changed twice between the loads.
 * - An entry moves to its other bucket by: copy, move count of its fingerprint, then the old place is written over. A reader that found nothing looks
 *   at the move count again: a miss counts if it is the same as before the search.
 * - A segment's new life: tag, then generation. A reader loads tag, generation, tag; the end of a life is one bit of the generation.
 * - A shape is written over after no entry has it, so a reader that finds its entry unchanged has read the entry's own shape.
 * - A tag comes again after 256 lives. Dead entries of its first use must be gone by then. So a segment enters a half of the tags
 *   only if a whole sweep has begun and ended since it left that half. Else its new life waits.
 *
 * Readers check what they load against limits, computed once from a header with a valid checksum. Writers rely on shared memory too: the seals let no
 * other process write.
 */
#ifndef KVFS_POD_LAYOUT_H
#define KVFS_POD_LAYOUT_H

#include "base/base.h"
#include "block/checksum.h"
#include "block/table.h"
#include "pod/pod.h"

#define POD_MAGIC 0x50414d444f50564bULL /* "KVPODMAP" */
#define POD_VERSION 1
#define POD_ENTRIES 4 /* of a bucket */
#define POD_MOVES 256
#define POD_SHAPES 4096
#define POD_SHAPE_GONE 4095u
#define POD_AVOIDED 64
#define POD_PLACE_BITS 43
#define POD_PLACE_MAX (UINT64_C(1) << POD_PLACE_BITS)
#define POD_ENTRIES_LIMIT (UINT64_C(1) << 34)
#define POD_ENDED (UINT64_C(1) << 63) /* beside a generation */
#define POD_NUMBER_BITS 61            /* of a version or generation */
/* Of 100 places 93 are filled. Up to 95 every insert found room in a search of 128 buckets; at 96 one in 7,000 did not, at 97 one in 90. The last
 * percent costs 0.8 us an insert, the one to 95 1.3 us (bench_pod_map.c). */
#define POD_FILL_PERCENT 93

struct pod_entry {
    _Atomic uint64_t fingerprint;
    _Atomic uint64_t word;
};

struct pod_bucket {
    _Alignas(64) struct pod_entry entries[POD_ENTRIES];
};
static_assert(sizeof(struct pod_bucket) == 64, "a cache line");

struct pod_segment {
    _Atomic uint64_t generation; /* 0: no life is known; POD_ENDED: it is over */
    _Atomic uint64_t state;      /* tag | owner's slot << 8 */
    _Atomic uint64_t avoided_until_ns;
    uint64_t reserved;
};
static_assert(sizeof(struct pod_segment) == 32, "half a cache line");

struct pod_shape {
    _Atomic uint64_t size;
    _Atomic uint64_t pages_mode; /* header_pages | mode << 32 */
    _Atomic uint64_t owner;      /* uid | gid << 32 */
};

/* Written once, before the map is handed out. */
struct pod_constants {
    uint64_t magic;
    uint32_t version;
    uint32_t bucket_size;
    uint64_t entries_max;
    uint64_t buckets;
    uint32_t segment_count;
    uint32_t segment_pages;
    uint32_t lot;
    uint32_t nodes;
    uint64_t size;     /* of the memfd */
    uint64_t checksum; /* of the fields above: also tells a reader that its secret is another pool's */
};
static_assert(sizeof(struct pod_constants) <= KVFS_PAGE_SIZE, "one page");

struct pod_writer;

struct kvfs_pod {
    struct pod_constants constants; /* a copy, which nobody else can change */
    uint64_t secret;
    uint8_t *memory;
    _Atomic uint64_t *moves;
    struct pod_shape *shapes;
    struct pod_segment *segments;
    struct pod_bucket *buckets;
    struct pod_writer *writer; /* NULL: attached */
    int fd;                    /* -1: attached */
    /* Of a process that attached: segment | ms << 24, at segment % POD_AVOIDED. */
    _Atomic uint64_t avoided[POD_AVOIDED];
};

#define get(place) atomic_load_explicit(place, memory_order_relaxed)
#define get_acquire(place) atomic_load_explicit(place, memory_order_acquire)
#define set(place, value) atomic_store_explicit(place, value, memory_order_relaxed)
#define set_release(place, value) atomic_store_explicit(place, value, memory_order_release)

/* ---- keys ---- */

static inline uint64_t pod_mix(uint64_t x) {
    x = (x ^ (x >> 33)) * 0xff51afd7ed558ccdULL;
    x = (x ^ (x >> 33)) * 0xc4ceb9fe1a85ec53ULL;
    return x ^ (x >> 33);
}

static inline uint64_t pod_reduce(uint64_t hash, uint64_t count) { return (uint64_t)((unsigned __int128)hash * count >> 64); }

/* Where a key may be. */
struct pod_place {
    uint64_t fingerprint;
    uint64_t mask;
    uint64_t buckets[2];
};

static inline uint64_t pod_other_bucket(uint64_t mask, uint64_t bucket, uint64_t count) {
    uint64_t sum = pod_reduce(mask * 0x9e3779b97f4a7c15ULL, count);

    return sum >= bucket ? sum - bucket : sum + count - bucket;
}

static inline struct pod_place pod_place(const struct kvfs_pod *pod, uint64_t key_low, uint64_t key_high) {
    struct pod_place place = {.fingerprint = key_high ? key_high : 1};
    uint64_t count = pod->constants.buckets;

    place.mask = pod_mix(place.fingerprint);
    place.buckets[0] = pod_reduce(key_low * 0x9e3779b97f4a7c15ULL, count);
    place.buckets[1] = pod_other_bucket(place.mask, place.buckets[0], count);
    return place;
}

static inline _Atomic uint64_t *pod_move_count(const struct kvfs_pod *pod, uint64_t fingerprint) { return &pod->moves[fingerprint % POD_MOVES]; }

/* ---- values ---- */

struct pod_value {
    uint64_t place;
    uint32_t shape;
    uint8_t tag;
    bool keyed;
};

static inline uint64_t pod_pack(struct pod_value value) {
    return value.place | (uint64_t)value.tag << POD_PLACE_BITS | (uint64_t)value.shape << (POD_PLACE_BITS + 8) | (uint64_t)value.keyed << 63;
}

static inline struct pod_value pod_unpack(uint64_t bits) {
    return (struct pod_value){
        .place = bits & (POD_PLACE_MAX - 1),
        .tag = (uint8_t)(bits >> POD_PLACE_BITS),
        .shape = (uint32_t)(bits >> (POD_PLACE_BITS + 8)) & (POD_SHAPES - 1),
        .keyed = bits >> 63,
    };
}

static inline bool pod_is_directory(uint32_t mode) { return (mode & 0170000) == 0040000; }

static inline uint32_t pod_owner(const struct pod_constants *constants, uint32_t segment) { return segment / constants->lot % constants->nodes; }

/* ---- layout ---- */

static inline uint64_t pod_checksum(const struct pod_constants *constants, uint64_t secret) {
    return kvfs_checksum(constants, offsetof(struct pod_constants, checksum), secret);
}

static inline bool pod_possible(const struct pod_constants *c) {
    return c->entries_max && c->entries_max <= POD_ENTRIES_LIMIT && c->segment_count && c->segment_count <= 1u << 22 && c->segment_pages >= 2 &&
           c->segment_pages <= 1u << 24 && (uint64_t)c->segment_count * c->segment_pages <= POD_PLACE_MAX && c->lot && c->lot <= KVFS_POD_LOT_MAX &&
           (c->lot & (c->lot - 1)) == 0 && c->nodes && c->nodes <= KVFS_POD_NODES_MAX;
}

/* Set what follows from the other constants: buckets and size. With memory, also where each part lies. */
static inline void pod_lay_out(struct kvfs_pod *pod) {
    struct pod_constants *c = &pod->constants;
    uint64_t offset = PAGE;

    c->buckets = c->entries_max * 100 / POD_FILL_PERCENT / POD_ENTRIES + 2;
    pod->moves = (_Atomic uint64_t *)(pod->memory + offset);
    offset += round_up(POD_MOVES * sizeof(*pod->moves), PAGE);
    pod->shapes = (struct pod_shape *)(pod->memory + offset);
    offset += round_up(POD_SHAPES * sizeof(*pod->shapes), PAGE);
    pod->segments = (struct pod_segment *)(pod->memory + offset);
    offset += round_up(c->segment_count * sizeof(*pod->segments), PAGE);
    pod->buckets = (struct pod_bucket *)(pod->memory + offset);
    offset += round_up(c->buckets * sizeof(*pod->buckets), PAGE);
    c->size = offset;
}

/* ---- the writer's memory and helpers ---- */

#define POD_PARITY_SHIFT 63 /* beside a version: the parity of the repeat in which its slot said so */
#define POD_VERSION_MASK ((UINT64_C(1) << POD_NUMBER_BITS) - 1)

/* A segment, as the writer alone knows it. */
struct pod_life {
    uint32_t entries;     /* of this life */
    uint32_t sweeps : 31; /* whole ones before the tag may go to its other half */
    uint32_t used : 1;    /* an entry has had this tag */
};

struct pod_writer {
    pthread_mutex_t lock;
    uint64_t *versions; /* of each entry: buckets * POD_ENTRIES */
    uint64_t versions_size;
    struct pod_life *lives;
    uint64_t lives_size;
    struct kvfs_pod_statistics count;
    uint64_t sweep_at; /* bucket */
    uint32_t own_slot;
    uint32_t shape_users[POD_SHAPES];
    uint16_t shape_free[POD_SHAPES]; /* a stack */
    uint32_t shape_free_count;
    uint16_t shape_index[2 * POD_SHAPES]; /* open addressing: shape + 1; 0: none */
    uint16_t shape_last;
    struct pod_directories *directories;
    uint8_t repeat_parity[KVFS_POD_NODES_MAX];
    uint8_t repeating[KVFS_POD_NODES_MAX];
};

/* One entry's place, for the writer. */
struct pod_slot {
    uint64_t bucket;
    int index; /* -1: none */
};

static inline struct pod_entry *pod_entry(const struct kvfs_pod *pod, struct pod_slot slot) { return &pod->buckets[slot.bucket].entries[slot.index]; }
static inline uint64_t *pod_version(const struct kvfs_pod *pod, struct pod_slot slot) {
    return &pod->writer->versions[slot.bucket * POD_ENTRIES + (uint64_t)slot.index];
}

static inline void pod_lock(struct kvfs_pod *pod) {
    int r = pthread_mutex_lock(&pod->writer->lock);
    assert(!r);
    (void)r;
}
static inline void pod_unlock(struct kvfs_pod *pod) { pthread_mutex_unlock(&pod->writer->lock); }

enum pod_state { POD_EMPTY, POD_DEAD, POD_GONE, POD_LIVE };

/* All of these with the mutex. */
enum pod_state pod_state(const struct kvfs_pod *pod, struct pod_slot slot, struct pod_value *value);
/* Accounts of an entry that goes; the entry itself is written by the caller. */
void pod_release(struct kvfs_pod *pod, enum pod_state state, const struct pod_value *value);
void pod_clear(struct kvfs_pod *pod, struct pod_slot slot);
/* A shape's number, with one user more; -ENOSPC: all are in use. */
int pod_shape_take(struct kvfs_pod *pod, const struct kvfs_pod_batch_shape *shape);
void pod_shape_give(struct kvfs_pod *pod, uint32_t shape);
bool pod_shape_sound(const struct kvfs_pod *pod, const struct kvfs_pod_batch_shape *shape);
int pod_life(struct kvfs_pod *pod, uint32_t segment, uint64_t generation, bool ended);
uint64_t pod_sweep(struct kvfs_pod *pod, uint64_t buckets);
/* Entries are told of by their owner, in order, or found on its flash, in no order. */
enum pod_source { POD_NEWS, POD_FLASH };
/* shape: of pod_shape_take(), which the caller gives back. It must fit the entry. */
int pod_put(struct kvfs_pod *pod, const struct kvfs_pod_entry *entry, const struct pod_place *place, uint32_t shape, enum pod_source source);
int pod_remove(struct kvfs_pod *pod, const struct pod_place *place, uint64_t version);
/* pod_directories.c: which slots have a directory. */
int pod_directories_create(struct kvfs_pod *pod);
void pod_directories_destroy(struct kvfs_pod *pod);
uint64_t pod_directories_size(const struct kvfs_pod *pod);
/* False: there is no memory for its holders. */
bool pod_holder_add(struct kvfs_pod *pod, uint64_t key_low, uint64_t key_high, uint32_t slot);
/* Whether it is known who has the directory of an entry with this fingerprint. */
bool pod_holders_known(const struct kvfs_pod *pod, uint64_t fingerprint);
/* Returns a slot that has it still; -ENOENT: none is known. */
int pod_holder_remove(struct kvfs_pod *pod, uint64_t key_low, uint64_t key_high, uint32_t slot);
/* Whether a directory is at *at, which goes on. Its key, if the slot told of it in a repeat of this parity; else zero. */
bool pod_directories_next(struct kvfs_pod *pod, uint32_t *at, uint32_t slot, unsigned parity, uint64_t *key_low, uint64_t *key_high);
void pod_holder_flip(struct kvfs_pod *pod, uint64_t key_low, uint64_t key_high, uint32_t slot); /* its parity */
/* The slot has the directory no more; `other` has it still, or if negative none. Its rights stay as they are while one has it. */
void pod_directory_leave(struct kvfs_pod *pod, const struct pod_place *place, uint32_t slot, int other);
/* DIRECTORY_GONE, of this slot. 0, or -ESTALE: a block of a higher version has the name. */
int pod_directory_gone(struct kvfs_pod *pod, uint64_t key_low, uint64_t key_high, const struct pod_place *place, uint32_t slot, uint64_t version);
/* An entry of a lower version goes: what says so cannot be applied itself. */
void pod_supersede(struct kvfs_pod *pod, const struct pod_place *place, uint64_t version);
/* The entry of exactly this version goes. */
void pod_withdraw(struct kvfs_pod *pod, const struct pod_place *place, uint64_t version);
static inline void pod_prefetch(const struct kvfs_pod *pod, const struct pod_place *place) {
    for (int i = 0; i < 2; i++) {
        __builtin_prefetch(&pod->buckets[place->buckets[i]], 1);
        __builtin_prefetch(&pod->writer->versions[place->buckets[i] * POD_ENTRIES], 1);
    }
}

#endif
