/* The readers of the block table: attach and find. Layout and protocol: block_table_layout.h. */
#define _GNU_SOURCE
#include "block/block_table_layout.h"

#include <sched.h>
#include <stdlib.h>

#include "base/sealed_memory.h"

#define READ_ATTEMPTS 64
#define SCAN_ATTEMPTS 10000
/* Keyed hashes put fewer than 40 entries in a bucket: a longer chain is a torn one. */
#define CHAIN_MAX 64

static inline void cpu_relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

int kvfs_table_attach(int fd, uint64_t secret, struct kvfs_table **out) {
    struct kvfs_table *table;
    struct constants constants;
    void *memory;
    int64_t size = sealed_size(fd);
    int rc = size < 0 ? (int)size : sealed_peek(fd, &constants, sizeof(constants));

    if (rc < 0)
        return rc;
    if (constants.magic != TABLE_MAGIC || constants.version != TABLE_VERSION || constants.bucket_size != sizeof(struct bucket) ||
        constants.slot_size != sizeof(struct slot) || constants.checksum != constants_checksum(&constants, secret) || !constants.records_max ||
        constants.records_max > RECORDS_MAX)
        return -EBADMSG;
    table = calloc(1, sizeof(*table));
    if (!table)
        return -ENOMEM;
    table->fd = -1;
    table->secret = secret;
    lay_out(table, constants.records_max);
    if (constants.size != table->size || (uint64_t)size != table->size) {
        free(table);
        return -EBADMSG;
    }
    memory = mmap(NULL, table->size, PROT_READ, MAP_SHARED | MAP_NORESERVE, fd, 0);
    if (memory == MAP_FAILED) {
        rc = -errno;
        free(table);
        return rc;
    }
    table->header = memory;
    lay_out(table, constants.records_max);
    *out = table;
    return 0;
}

void kvfs_table_detach(struct kvfs_table *table) {
    if (!table)
        return;
    munmap(table->header, table->size);
    free(table);
}

static void unpack(const struct packed *packed, uint32_t slot, struct kvfs_record *out) {
    const uint64_t *words = packed->words;

    *out = (struct kvfs_record){
        .inode = words[INODE],
        .parent = words[PARENT],
        .version = words[VERSION],
        .size = words[SIZE_MODE] & ((UINT64_C(1) << 48) - 1),
        .generation = words[GENERATION],
        .segment = (uint32_t)words[PLACE],
        .page = (uint32_t)(words[PLACE] >> 32),
        .header_pages = (uint32_t)words[COUNTS] & 0xffffff,
        .extent_count = (uint32_t)(words[COUNTS] >> 32),
        .mtime_ns = (int64_t)words[MTIME],
        .ctime_ns = (int64_t)words[CTIME],
        .atime_ns = (int64_t)words[ATIME],
        .mode = (uint32_t)(words[SIZE_MODE] >> 48),
        .uid = (uint32_t)words[OWNER],
        .gid = (uint32_t)(words[OWNER] >> 32),
        .nlink = packed->links_kind >> 2,
        .kind = packed->links_kind & 3,
        .flags = packed_flags(packed),
        .slot = slot - 1,
        .key_low = words[KEY_LOW],
        .key_high = words[KEY_HIGH],
    };
}

static bool matches(const struct packed *packed, const struct key *key) {
    if (!(packed->links_kind & 3))
        return false;
    if (key->by_name)
        return packed->words[KEY_LOW] == key->words[0] && packed->words[KEY_HIGH] == key->words[1];
    return packed->words[INODE] == key->words[0];
}

/* False: the record changed during the copy. */
static inline bool slot_read(const struct slot *slot, struct packed *packed) {
    uint32_t sequence = get_acquire(&slot->sequence);

    packed->links_kind = get(&slot->links_kind);
    for (int i = 0; i < WORDS; i++)
        packed->words[i] = get(&slot->words[i]);
    atomic_thread_fence(memory_order_acquire);
    return !(sequence & 1) && get(&slot->sequence) == sequence;
}

enum search { SEARCH_FOUND, SEARCH_MISSED, SEARCH_TORN };

static inline enum search search_chain(const struct kvfs_table *table, const struct bucket *bucket, const struct key *key, struct kvfs_record *out) {
    uint16_t tag = tag_of(key->hash);

    for (int length = 0; length < CHAIN_MAX; length++) {
        uint32_t overflow = get(&bucket->overflow);

        if (overflow > table->overflow_max)
            return SEARCH_TORN;
        for (int i = 0; i < BUCKET_ENTRIES; i++) {
            struct packed packed;
            uint32_t slot;

            if (get(&bucket->tags[i]) != tag)
                continue;
            slot = get(&bucket->slots[i]);
            if (!slot || slot > table->slots_max)
                continue;
            if (!slot_read(&table->slots[slot], &packed))
                return SEARCH_TORN;
            if (matches(&packed, key)) {
                unpack(&packed, slot, out);
                return SEARCH_FOUND;
            }
        }
        if (!overflow)
            return SEARCH_MISSED;
        bucket = &table->overflow[overflow];
    }
    return SEARCH_TORN;
}

static int find(const struct kvfs_table *table, const struct index *index, const struct key *key, struct kvfs_record *out) {
    /* Read before the search. Then the search finds all that was put before the table became complete. */
    bool complete = get_acquire(&table->header->complete);

    for (int attempt = 0; attempt < READ_ATTEMPTS; attempt++) {
        const struct bucket *bucket;
        uint32_t count, number, sequence;

        if (attempt)
            cpu_relax();
        count = get_acquire(index->count);
        if (count < INITIAL_BUCKETS || count > index->buckets_max)
            return -EAGAIN;
        number = bucket_of(key->hash, count);
        bucket = &index->buckets[number];
        sequence = get_acquire(&bucket->sequence);
        if (sequence & 1)
            continue;
        switch (search_chain(table, bucket, key, out)) {
        case SEARCH_FOUND: return 0;
        case SEARCH_TORN: continue;
        case SEARCH_MISSED: break;
        }
        atomic_thread_fence(memory_order_acquire);
        if (get(&bucket->sequence) != sequence)
            continue;
        count = get(index->count);
        if (count >= INITIAL_BUCKETS && count <= index->buckets_max && bucket_of(key->hash, count) == number)
            return complete ? -ENOENT : -EAGAIN;
    }
    return -EAGAIN;
}

int kvfs_table_find_name(const struct kvfs_table *table, uint64_t parent, const char *name, uint32_t name_size, struct kvfs_record *out) {
    struct key key;

    if (!name_size || name_size > KVFS_NAME_MAX)
        return -ENOENT;
    key = name_key(table, parent, name, name_size);
    return find(table, &table->names, &key, out);
}

int kvfs_table_find_key(const struct kvfs_table *table, uint64_t key_low, uint64_t key_high, struct kvfs_record *out) {
    struct key key = {.hash = key_low, .words = {key_low, key_high}, .by_name = true};

    return key_low | key_high ? find(table, &table->names, &key, out) : -ENOENT;
}

int kvfs_table_scan(const struct kvfs_table *table, uint64_t *slot, struct kvfs_record *out, uint64_t *key_low, uint64_t *key_high) {
    uint32_t fresh = get_acquire(&table->header->slots_fresh);

    if (fresh > table->slots_max + 1)
        fresh = table->slots_max + 1;
    for (uint64_t number = *slot + 1; number < fresh; number++) {
        struct packed packed = {.links_kind = 0};
        bool whole = false;

        /* The writer may sleep inside a write; one that is dead must not hold us. */
        for (int attempt = 0; attempt < SCAN_ATTEMPTS && !whole; attempt++) {
            if (attempt >= READ_ATTEMPTS)
                sched_yield();
            whole = slot_read(&table->slots[number], &packed);
        }
        *slot = number;
        if (!whole || !(packed.links_kind & 3) || !(packed.words[KEY_LOW] | packed.words[KEY_HIGH]))
            continue;
        unpack(&packed, (uint32_t)number, out);
        *key_low = packed.words[KEY_LOW];
        *key_high = packed.words[KEY_HIGH];
        return 1;
    }
    return 0;
}

int kvfs_table_find_inode(const struct kvfs_table *table, uint64_t inode, struct kvfs_record *out) {
    struct key key = inode_key(table, inode);

    return find(table, &table->inodes, &key, out);
}

int kvfs_table_is_written(const struct kvfs_table *table, uint64_t inode) {
    return get_acquire(&table->written[inode_hash(table, inode) % WRITTEN_COUNTS]) != 0;
}

uint64_t kvfs_table_mount_epoch(const struct kvfs_table *table) { return table->header->constants.mount_epoch; }

void kvfs_table_statistics(const struct kvfs_table *table, struct kvfs_table_statistics *out) {
    const struct header *header = table->header;
    uint64_t names = get(&header->counts[0]), inodes = get(&header->counts[1]);

    *out = (struct kvfs_table_statistics){
        .records = get(&header->records),
        .blocks = get(&header->blocks),
        .records_max = table->records_max,
        .bytes = KVFS_PAGE_SIZE + page_round(names * sizeof(struct bucket)) + page_round(inodes * sizeof(struct bucket)) +
                 page_round((uint64_t)get(&header->overflow_fresh) * sizeof(struct bucket)) +
                 page_round((uint64_t)get(&header->slots_fresh) * sizeof(struct slot)),
        .buckets = names + inodes,
        .overflow_buckets = get(&header->overflow_used),
        .ambiguous = get(&header->ambiguous),
    };
}
