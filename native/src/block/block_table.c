/* The writer of the block table. Layout, protocol and limits: block_table_layout.h. */
#define _GNU_SOURCE
#include "base/descriptor.h"
#include "base/sealed_memory.h"
#include "block/block_table_layout.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define LOAD_BATCH 16

/* Where the writer found an entry. Valid until the index changes. */
struct location {
    struct bucket *primary;
    struct bucket *bucket;
    int position;
};

static bool valid_kind(uint8_t kind) { return kind == KVFS_KIND_FILE || kind == KVFS_KIND_DIRECTORY || kind == KVFS_KIND_SYMLINK; }

static bool representable(const struct kvfs_record *record) {
    return record->inode && valid_kind(record->kind) && record->size >> 48 == 0 && record->mode >> 16 == 0 && record->header_pages >> 24 == 0 &&
           record->nlink >> 30 == 0;
}

static struct packed pack(const struct kvfs_record *record, uint8_t flags, const uint64_t key[2]) {
    assert(representable(record));
    /* clang-format off */
    return (struct packed){
        .links_kind = record->nlink << 2 | record->kind,
        .words = {
            [INODE] = record->inode,
            [PARENT] = record->parent,
            [VERSION] = record->version,
            [GENERATION] = record->generation,
            [MTIME] = (uint64_t)record->mtime_ns,
            [CTIME] = (uint64_t)record->ctime_ns,
            [ATIME] = (uint64_t)record->atime_ns,
            [KEY_LOW] = key[0],
            [KEY_HIGH] = key[1],
            [PLACE] = record->segment | (uint64_t)record->page << 32,
            [OWNER] = record->uid | (uint64_t)record->gid << 32,
            [SIZE_MODE] = record->size | (uint64_t)record->mode << 48,
            [COUNTS] = record->header_pages | (uint64_t)flags << 24 | (uint64_t)record->extent_count << 32,
        },
    };
    /* clang-format on */
}

/* ---- free sets: the writer's private memory ---- */

static int free_set_create(struct free_set *set, uint32_t max) {
    uint64_t sizes[FREE_LEVELS];
    uint64_t words = max;
    uint64_t *memory;

    set->max = max;
    set->fresh = 1;
    do {
        words = words / 64 + 1;
        assert(set->depth < FREE_LEVELS);
        sizes[set->depth++] = words;
        set->memory_size += words * sizeof(uint64_t);
    } while (words > 1);
    memory = mmap(NULL, set->memory_size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) {
        set->memory_size = 0;
        return -errno;
    }
    for (uint32_t level = 0; level < set->depth; level++) {
        set->levels[level] = memory;
        memory += sizes[level];
    }
    return 0;
}

static void free_set_destroy(struct free_set *set) {
    if (set->memory_size)
        munmap(set->levels[0], set->memory_size);
}

static void free_set_give(struct free_set *set, uint32_t number) {
    uint64_t index = number;

    assert(number && number < set->fresh);
    for (uint32_t level = 0; level < set->depth; level++, index /= 64) {
        uint64_t *word = &set->levels[level][index / 64];
        uint64_t before = *word;

        *word |= UINT64_C(1) << (index % 64);
        assert(level || *word != before);
        if (before)
            break;
    }
}

/* 0: none is left. */
static uint32_t free_set_take(struct free_set *set) {
    uint64_t index = 0, number;

    if (!set->levels[set->depth - 1][0])
        return set->fresh <= set->max ? set->fresh++ : 0;
    for (uint32_t level = set->depth; level-- > 0;)
        index = index * 64 + (uint64_t)__builtin_ctzll(set->levels[level][index]);
    number = index;
    for (uint32_t level = 0; level < set->depth; level++, index /= 64) {
        uint64_t *word = &set->levels[level][index / 64];

        *word &= ~(UINT64_C(1) << (index % 64));
        if (*word)
            break;
    }
    return (uint32_t)number;
}

/* ---- the writer's side of sequences, slots and buckets ---- */

static inline void begin_write(_Atomic uint32_t *sequence) {
    assert(get(sequence) % 2 == 0); /* one writer (I7), and never two writes of one place */
    set(sequence, get(sequence) + 1);
    atomic_thread_fence(memory_order_release);
}

static inline void end_write(_Atomic uint32_t *sequence) {
    assert(get(sequence) % 2 == 1);
    set_release(sequence, get(sequence) + 1);
}

static struct packed slot_content(const struct kvfs_table *table, uint32_t number) {
    const struct slot *slot = &table->slots[number];
    struct packed packed;

    packed.links_kind = get(&slot->links_kind);
    for (int i = 0; i < WORDS; i++)
        packed.words[i] = get(&slot->words[i]);
    return packed;
}

/* A sealed file with a name. */
static unsigned is_block(const struct packed *packed) {
    return (packed->links_kind & 3) == KVFS_KIND_FILE && packed_flags(packed) & KVFS_INODE_SEALED && !(packed_flags(packed) & KVFS_INODE_NAMELESS);
}

static uint64_t place_of(const struct packed *packed) {
    uint64_t size = packed->words[SIZE_MODE] & ((UINT64_C(1) << 48) - 1);
    uint64_t pages = (packed->words[COUNTS] & 0xffffff) + (size + KVFS_PAGE_SIZE - 1) / KVFS_PAGE_SIZE;

    return is_block(packed) ? (packed->words[PLACE] & UINT32_MAX) | (pages < UINT32_MAX ? pages : UINT32_MAX) << 32 : 0;
}

/* Eviction cannot take it. */
static bool is_kept(const struct packed *packed) { return packed->links_kind & 3 && !is_block(packed); }

static uint32_t payer_of(const struct kvfs_table *table, uint32_t number, const struct packed *packed) {
    return table->payers[number - 1] ? table->payers[number - 1] : (uint32_t)packed->words[OWNER];
}

/* Memory that is written takes room, also for a zero. */
static void payer_set(struct kvfs_table *table, uint32_t number, uint32_t user) {
    if (table->payers[number - 1] != user)
        table->payers[number - 1] = user;
}

static void tell_kept(struct kvfs_table *table, uint32_t number, const struct packed *before, const struct packed *now) {
    bool was = is_kept(before), is = is_kept(now);
    uint32_t from = payer_of(table, number, before), to = payer_of(table, number, now);

    if (!table->kept || (was == is && from == to))
        return;
    if (was)
        table->kept(table->kept_of, from, -1);
    if (is)
        table->kept(table->kept_of, to, 1);
}

static void slot_write(struct kvfs_table *table, uint32_t number, const struct packed *packed) {
    struct slot *slot = &table->slots[number];
    struct packed before = slot_content(table, number);

    if (is_kept(&before) || is_kept(packed))
        tell_kept(table, number, &before, packed);
    set(&table->header->blocks, get(&table->header->blocks) + is_block(packed) - is_block(&before));
    set(&table->places[number - 1], place_of(packed));
    begin_write(&slot->sequence);
    set(&slot->links_kind, packed->links_kind);
    for (int i = 0; i < WORDS; i++)
        set(&slot->words[i], packed->words[i]);
    end_write(&slot->sequence);
}

static bool slot_matches(const struct kvfs_table *table, uint32_t number, const struct key *key) {
    const struct slot *slot = &table->slots[number];

    if (key->by_name)
        return get(&slot->words[KEY_LOW]) == key->words[0] && get(&slot->words[KEY_HIGH]) == key->words[1];
    return get(&slot->words[INODE]) == key->words[0];
}

static uint64_t slot_hash(const struct kvfs_table *table, const struct index *index, uint32_t number) {
    const struct slot *slot = &table->slots[number];

    return index == &table->names ? get(&slot->words[KEY_LOW]) : inode_hash(table, get(&slot->words[INODE]));
}

static uint32_t slot_take(struct kvfs_table *table) {
    uint32_t number = free_set_take(&table->free_slots);

    assert(number);
    assert(!get(&table->slots[number].links_kind)); /* as slot_free() left it */
    table->records++;
    set(&table->header->records, table->records);
    set(&table->header->slots_fresh, table->free_slots.fresh);
    return number;
}

static void slot_free(struct kvfs_table *table, uint32_t number) {
    static const struct packed nothing;

    assert(get(&table->slots[number].links_kind));
    slot_write(table, number, &nothing);
    payer_set(table, number, 0);
    free_set_give(&table->free_slots, number);
    table->records--;
    set(&table->header->records, table->records);
}

static uint32_t overflow_take(struct kvfs_table *table) {
    uint32_t number = free_set_take(&table->free_overflow);

    assert(number);
    assert(!get(&table->overflow[number].slots[0]) && !get(&table->overflow[number].overflow)); /* as chain_cut() left it */
    table->overflow_used++;
    set(&table->header->overflow_used, table->overflow_used);
    set(&table->header->overflow_fresh, table->free_overflow.fresh);
    return number;
}

/* The bucket is empty and no chain leads to it. */
static void overflow_give(struct kvfs_table *table, uint32_t number) {
    free_set_give(&table->free_overflow, number);
    table->overflow_used--;
    set(&table->header->overflow_used, table->overflow_used);
}

static struct bucket *next_bucket(const struct kvfs_table *table, const struct bucket *bucket) {
    uint32_t overflow = get(&bucket->overflow);

    return overflow ? &table->overflow[overflow] : NULL;
}

/* ---- the writer's side of an index ---- */

/* The slot that `key` leads to, or 0. With `wanted`: only the entry of that slot. */
static uint32_t locate(const struct kvfs_table *table, const struct index *index, const struct key *key, uint32_t wanted, struct location *location) {
    uint16_t tag = tag_of(key->hash);

    location->primary = &index->buckets[bucket_of(key->hash, get(index->count))];
    for (struct bucket *bucket = location->primary; bucket; bucket = next_bucket(table, bucket)) {
        for (int i = 0; i < BUCKET_ENTRIES; i++) {
            uint32_t slot = get(&bucket->slots[i]);

            if (!slot)
                return 0;
            if (get(&bucket->tags[i]) != tag || !(wanted ? slot == wanted : slot_matches(table, slot, key)))
                continue;
            location->bucket = bucket;
            location->position = i;
            return slot;
        }
    }
    return 0;
}

static void location_redirect(const struct kvfs_table *table, const struct location *location, uint32_t slot) {
    assert(get(&table->slots[slot].links_kind)); /* filled before an index leads to it (I9) */
    begin_write(&location->primary->sequence);
    set(&location->bucket->slots[location->position], slot);
    end_write(&location->primary->sequence);
}

/* The caller holds the primary bucket's sequence odd. `*from` is a bucket of the chain with only full ones before it. */
static void chain_append(struct kvfs_table *table, struct bucket **from, uint16_t tag, uint32_t slot) {
    struct bucket *bucket = *from;
    int i;

    for (;;) {
        struct bucket *next;

        for (i = 0; i < BUCKET_ENTRIES && get(&bucket->slots[i]); i++)
            ;
        if (i < BUCKET_ENTRIES)
            break;
        next = next_bucket(table, bucket);
        if (!next) {
            uint32_t overflow = overflow_take(table);

            /* Empty: all were emptied before they were given back. */
            next = &table->overflow[overflow];
            set(&bucket->overflow, overflow);
        }
        bucket = next;
    }
    set(&bucket->tags[i], tag);
    set(&bucket->slots[i], slot);
    *from = bucket;
}

/* Give back the overflow buckets behind `bucket`, which hold nothing to keep. */
static void chain_cut(struct kvfs_table *table, struct bucket *bucket) {
    uint32_t overflow = get(&bucket->overflow);

    set(&bucket->overflow, 0);
    while (overflow) {
        struct bucket *dead = &table->overflow[overflow];
        uint32_t next = get(&dead->overflow);

        for (int i = 0; i < BUCKET_ENTRIES; i++)
            set(&dead->slots[i], 0);
        set(&dead->overflow, 0);
        overflow_give(table, overflow);
        overflow = next;
    }
}

static void index_split(struct kvfs_table *table, struct index *index) {
    uint32_t count = get(index->count);
    uint32_t low = count - (UINT32_C(1) << (31 - __builtin_clz(count)));
    struct bucket *old = &index->buckets[low];
    struct bucket *new = &index->buckets[count];
    struct bucket *keep = old, *tail = new;
    int kept = 0;

    /* The records tell which entries move. All of them are fetched at once, before readers have to wait. */
    for (struct bucket *bucket = old; bucket; bucket = next_bucket(table, bucket))
        for (int i = 0; i < BUCKET_ENTRIES && get(&bucket->slots[i]); i++)
            __builtin_prefetch(&table->slots[get(&bucket->slots[i])].words[index == &table->names ? KEY_LOW : INODE]);
    begin_write(&old->sequence);
    begin_write(&new->sequence);
    for (struct bucket *bucket = old; bucket; bucket = next_bucket(table, bucket)) {
        for (int i = 0; i < BUCKET_ENTRIES; i++) {
            uint32_t slot = get(&bucket->slots[i]);
            uint16_t tag = get(&bucket->tags[i]);

            if (!slot)
                break;
            if (bucket_of(slot_hash(table, index, slot), count + 1) == count) {
                chain_append(table, &tail, tag, slot);
                continue;
            }
            /* Kept entries move forward, onto places already read. */
            if (kept == BUCKET_ENTRIES) {
                keep = next_bucket(table, keep);
                kept = 0;
            }
            set(&keep->tags[kept], tag);
            set(&keep->slots[kept], slot);
            kept++;
        }
    }
    for (int i = kept; i < BUCKET_ENTRIES; i++)
        set(&keep->slots[i], 0);
    chain_cut(table, keep);
    set_release(index->count, count + 1);
    end_write(&new->sequence);
    end_write(&old->sequence);
}

static void index_insert(struct kvfs_table *table, struct index *index, uint64_t hash, uint32_t slot) {
    uint32_t count = get(index->count);
    struct bucket *primary = &index->buckets[bucket_of(hash, count)];
    struct bucket *tail = primary;

    assert(get(&table->slots[slot].links_kind)); /* filled before an index leads to it (I9) */
    begin_write(&primary->sequence);
    chain_append(table, &tail, tag_of(hash), slot);
    end_write(&primary->sequence);
    if (++index->entries > (uint64_t)count * LOAD && count < index->buckets_max)
        index_split(table, index);
}

/* The chain's last entry fills the hole, so chains stay dense. */
static void index_remove(struct kvfs_table *table, struct index *index, const struct location *location) {
    struct bucket *last = location->bucket, *before = NULL, *next;
    int i;

    if (last != location->primary)
        for (before = location->primary; next_bucket(table, before) != last; before = next_bucket(table, before))
            ;
    while ((next = next_bucket(table, last))) {
        before = last;
        last = next;
    }
    for (i = BUCKET_ENTRIES - 1; !get(&last->slots[i]); i--)
        ;
    begin_write(&location->primary->sequence);
    set(&location->bucket->tags[location->position], get(&last->tags[i]));
    set(&location->bucket->slots[location->position], get(&last->slots[i]));
    set(&last->slots[i], 0);
    if (!i && before)
        chain_cut(table, before);
    end_write(&location->primary->sequence);
    index->entries--;
}

/* ---- writer ---- */

static uint64_t places_size(const struct kvfs_table *table) { return page_round((uint64_t)table->slots_max * sizeof(*table->places)); }
static uint64_t payers_size(const struct kvfs_table *table) { return page_round((uint64_t)table->slots_max * sizeof(*table->payers)); }

/* Memory of the writer alone, of which only what is used costs. NULL: errno. */
static void *sparse_memory(uint64_t size) {
    void *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

    return memory == MAP_FAILED ? NULL : memory;
}

int kvfs_table_create(uint64_t records_max, uint64_t secret, uint64_t mount_epoch, struct kvfs_table **out) {
    struct kvfs_table *table;
    struct constants *constants;
    void *memory;
    int rc;

    if (!records_max || records_max > RECORDS_MAX)
        return -EINVAL;
    table = calloc(1, sizeof(*table));
    if (!table)
        return -ENOMEM;
    table->secret = secret;
    lay_out(table, records_max);
    table->fd = descriptor_above(memfd_create("kvfs-block-table", MFD_ALLOW_SEALING | MFD_CLOEXEC));
    if (table->fd < 0 || ftruncate(table->fd, (off_t)table->size) < 0)
        goto failed;
    memory = mmap(NULL, table->size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, table->fd, 0);
    if (memory == MAP_FAILED)
        goto failed;
    table->header = memory;
    lay_out(table, records_max);
    rc = sealed_make(table->fd);
    if (!rc)
        rc = free_set_create(&table->free_slots, table->slots_max);
    if (!rc)
        rc = free_set_create(&table->free_overflow, table->overflow_max);
    if (rc)
        goto out;
    table->places = sparse_memory(places_size(table));
    table->payers = table->places ? sparse_memory(payers_size(table)) : NULL;
    if (!table->payers)
        goto failed;
    constants = &table->header->constants;
    *constants = (struct constants){
        .magic = TABLE_MAGIC,
        .version = TABLE_VERSION,
        .bucket_size = sizeof(struct bucket),
        .slot_size = sizeof(struct slot),
        .mount_epoch = mount_epoch,
        .records_max = records_max,
        .size = table->size,
    };
    constants->checksum = constants_checksum(constants, secret);
    set(table->names.count, INITIAL_BUCKETS);
    set(table->inodes.count, INITIAL_BUCKETS);
    set(&table->header->slots_fresh, 1);
    set(&table->header->overflow_fresh, 1);
    *out = table;
    return 0;

failed:
    rc = -errno;
out:
    kvfs_table_destroy(table);
    return rc;
}

void kvfs_table_destroy(struct kvfs_table *table) {
    if (!table)
        return;
    if (table->header)
        munmap(table->header, table->size);
    if (table->fd >= 0)
        close(table->fd);
    if (table->places)
        munmap(table->places, places_size(table));
    if (table->payers)
        munmap(table->payers, payers_size(table));
    free_set_destroy(&table->free_slots);
    free_set_destroy(&table->free_overflow);
    free(table);
}

void kvfs_table_count_written(struct kvfs_table *table, uint64_t inode, int change) {
    atomic_fetch_add(&table->written[inode_hash(table, inode) % WRITTEN_COUNTS], (uint32_t)change);
}

int kvfs_table_fd(const struct kvfs_table *table) { return table->fd; }

void kvfs_table_watch(struct kvfs_table *table, void (*kept)(void *of, uint32_t user, int change), void *of) {
    assert(!table->records);
    table->kept = kept;
    table->kept_of = of;
}

int kvfs_table_charge(struct kvfs_table *table, uint64_t inode, uint32_t user) {
    struct key key = inode_key(table, inode);
    struct location location;
    uint32_t slot = locate(table, &table->inodes, &key, 0, &location), before;
    struct packed packed;

    if (!slot)
        return -ENOENT;
    packed = slot_content(table, slot);
    if (!is_kept(&packed))
        return 0;
    before = payer_of(table, slot, &packed);
    payer_set(table, slot, user);
    if (table->kept && payer_of(table, slot, &packed) != before) {
        table->kept(table->kept_of, before, -1);
        table->kept(table->kept_of, payer_of(table, slot, &packed), 1);
    }
    return 0;
}

const uint64_t *kvfs_table_places(const struct kvfs_table *table, uint32_t *count) {
    *count = get(&table->header->slots_fresh) - 1; /* slots count from 1 in there */
    return (const uint64_t *)table->places;
}

static void remove_name(struct kvfs_table *table, uint32_t slot, const uint64_t words[2]) {
    struct key key = {.hash = words[0], .words = {words[0], words[1]}, .by_name = true};
    struct location location;
    uint32_t found = locate(table, &table->names, &key, slot, &location);

    assert(found == slot);
    (void)found;
    index_remove(table, &table->names, &location);
}

/* No name leads to the slot any more. */
static void make_nameless(struct kvfs_table *table, uint32_t slot) {
    struct packed packed = slot_content(table, slot);

    packed.words[KEY_LOW] = packed.words[KEY_HIGH] = 0;
    packed.words[COUNTS] |= (uint64_t)KVFS_INODE_NAMELESS << 24;
    slot_write(table, slot, &packed);
}

static void free_record(struct kvfs_table *table, uint32_t slot) {
    struct key key = inode_key(table, get(&table->slots[slot].words[INODE]));
    struct location location;
    uint32_t found = locate(table, &table->inodes, &key, slot, &location);

    assert(found == slot);
    (void)found;
    index_remove(table, &table->inodes, &location);
    slot_free(table, slot);
}

/* Without a name the inode loses the one it had. */
static int put(struct kvfs_table *table, const struct kvfs_record *record, uint64_t hash, const struct key *name, bool keep_replaced) {
    static const uint64_t no_key[2];
    struct key inode = {.hash = hash, .words = {record->inode, 0}};
    struct location by_inode, by_name;
    uint32_t old = locate(table, &table->inodes, &inode, 0, &by_inode);
    uint32_t holder = name ? locate(table, &table->names, name, 0, &by_name) : 0;
    bool replaces = holder && holder != old;
    uint64_t old_key[2] = {0, 0};
    uint8_t flags = record->flags;
    struct packed packed;
    uint32_t slot = old;
    bool renamed;

    if (old) {
        old_key[0] = get(&table->slots[old].words[KEY_LOW]);
        old_key[1] = get(&table->slots[old].words[KEY_HIGH]);
    } else if (table->records - (replaces && !keep_replaced) >= table->records_max) {
        return -ENOSPC;
    }
    if (name)
        flags &= (uint8_t)~KVFS_INODE_NAMELESS;
    /* The key covers the parent: another parent under the same key is another name for certain. Which of the two a reader asks for
     * only Python can say. Two names in one directory with the same key would pass for one name: 128 bits say they will not meet. */
    if (replaces && get(&table->slots[holder].words[PARENT]) != record->parent) {
        flags |= KVFS_INODE_ASK;
        set(&table->header->ambiguous, get(&table->header->ambiguous) + 1);
    }
    packed = pack(record, flags, name ? name->words : no_key);
    if (old && !name && (old_key[0] | old_key[1]))
        remove_name(table, old, old_key);
    if (old && holder == old) {
        slot_write(table, old, &packed);
        return 0;
    }
    renamed = old && name && (old_key[0] | old_key[1]);
    if (!old || renamed)
        slot = slot_take(table);
    if (renamed)
        payer_set(table, slot, table->payers[old - 1]);
    slot_write(table, slot, &packed);
    if (renamed)
        location_redirect(table, &by_inode, slot);
    else if (!old)
        index_insert(table, &table->inodes, hash, slot);
    if (holder)
        location_redirect(table, &by_name, slot);
    else if (name)
        index_insert(table, &table->names, name->hash, slot);
    if (renamed) {
        remove_name(table, old, old_key);
        slot_free(table, old);
    }
    if (replaces && keep_replaced)
        make_nameless(table, holder);
    else if (replaces)
        free_record(table, holder);
    return 0;
}

int kvfs_table_put(struct kvfs_table *table, const struct kvfs_record *record, const char *name, uint32_t name_size, int keep_replaced) {
    struct key key;

    assert(table->fd >= 0);
    if (!representable(record))
        return -EINVAL;
    if (name_size > KVFS_NAME_MAX)
        return -ENAMETOOLONG;
    if (name_size)
        key = name_key(table, record->parent, name, name_size);
    return put(table, record, inode_hash(table, record->inode), name_size ? &key : NULL, keep_replaced);
}

int kvfs_table_update(struct kvfs_table *table, const struct kvfs_record *record) {
    struct key key = inode_key(table, record->inode);
    struct kvfs_record changed = *record;
    struct packed before, after;
    struct location location;
    uint8_t flags = record->flags & (uint8_t)~KVFS_INODE_NAMELESS;
    uint32_t slot;

    assert(table->fd >= 0);
    if (!representable(record))
        return -EINVAL;
    slot = locate(table, &table->inodes, &key, 0, &location);
    if (!slot)
        return -ENOENT;
    before = slot_content(table, slot);
    /* The name stays: also the parent, which is half of it, and whether there is one. */
    changed.parent = before.words[PARENT];
    flags |= packed_flags(&before) & KVFS_INODE_NAMELESS;
    after = pack(&changed, flags, &before.words[KEY_LOW]);
    slot_write(table, slot, &after);
    return 0;
}

int kvfs_table_remove(struct kvfs_table *table, uint64_t inode, int keep) {
    struct key key = inode_key(table, inode);
    struct packed packed;
    struct location location;
    uint32_t slot;

    assert(table->fd >= 0);
    slot = locate(table, &table->inodes, &key, 0, &location);
    if (!slot)
        return -ENOENT;
    packed = slot_content(table, slot);
    if (packed.words[KEY_LOW] | packed.words[KEY_HIGH])
        remove_name(table, slot, &packed.words[KEY_LOW]);
    if (keep)
        make_nameless(table, slot);
    else
        free_record(table, slot);
    return 0;
}

/* ---- load ---- */

struct load_entry {
    struct kvfs_record record;
    struct key name;
    uint64_t hash;
    bool named;
};

/* Returns the size of the record at `at`, or -EBADMSG. */
static int64_t parse(const struct kvfs_table *table, const unsigned char *at, uint64_t left, struct load_entry *out) {
    struct kvfs_inode_record in;
    uint64_t used;

    if (left < sizeof(in))
        return -EBADMSG;
    memcpy(&in, at, sizeof(in)); /* the buffer need not be aligned */
    used = sizeof(in) + ((in.name_size + 7u) & ~7u) + (uint64_t)in.extent_count * sizeof(struct kvfs_extent) + in.xattr_size;
    if (in.record_size < sizeof(in) || in.record_size % 8 || in.record_size > left || used > in.record_size)
        return -EBADMSG;
    if (in.name_size > KVFS_NAME_MAX || (!in.name_size && in.inode != 1))
        return -EBADMSG;
    out->record = (struct kvfs_record){
        .inode = in.inode,
        .parent = in.parent,
        .version = in.version,
        .size = in.size,
        .generation = in.generation,
        .segment = in.segment,
        .page = in.page,
        .header_pages = in.header_pages,
        .extent_count = in.extent_count,
        .mtime_ns = in.mtime_ns,
        .ctime_ns = in.ctime_ns,
        .atime_ns = in.atime_ns,
        .mode = in.mode,
        .uid = in.uid,
        .gid = in.gid,
        .nlink = in.nlink,
        .kind = in.kind,
        .flags = in.flags,
    };
    if (!representable(&out->record))
        return -EBADMSG;
    /* A nameless inode's record holds the name that it has lost. */
    out->named = in.name_size && in.inode != 1 && !(in.flags & KVFS_INODE_NAMELESS);
    out->hash = inode_hash(table, in.inode);
    __builtin_prefetch(&table->inodes.buckets[bucket_of(out->hash, get(table->inodes.count))], 1);
    if (out->named) {
        out->name = name_key(table, in.parent, (const char *)at + sizeof(in), in.name_size);
        __builtin_prefetch(&table->names.buckets[bucket_of(out->name.hash, get(table->names.count))], 1);
    }
    return in.record_size;
}

int64_t kvfs_table_load(struct kvfs_table *table, const void *records, uint64_t size) {
    struct load_entry entries[LOAD_BATCH];
    const unsigned char *at = records;
    int64_t loaded = 0, rc = 0;

    assert(table->fd >= 0);
    /* In batches, so that the buckets of a whole batch are fetched at once. */
    while (size && rc >= 0) {
        int count = 0;

        while (count < LOAD_BATCH && size) {
            rc = parse(table, at, size, &entries[count]);
            if (rc < 0)
                break;
            at += rc;
            size -= (uint64_t)rc;
            count++;
        }
        for (int i = 0; i < count; i++) {
            int failed = put(table, &entries[i].record, entries[i].hash, entries[i].named ? &entries[i].name : NULL, false);

            if (failed)
                return failed;
            loaded++;
        }
    }
    return rc < 0 ? rc : loaded;
}

void kvfs_table_set_complete(struct kvfs_table *table, int complete) {
    assert(table->fd >= 0);
    set_release(&table->header->complete, !!complete);
}
