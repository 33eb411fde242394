/* Uses of blocks, which order eviction, and misses: lookups of missing names that were not made next.
 *
 * Uses are hints. A word may be another block's for a moment, or miss one of two opens at once. */
#include "content/content.h"

static uint32_t tick_now(struct kvfs_plane *plane) { return atomic_load_explicit(&plane->tick, memory_order_relaxed); }

static void use_add(struct kvfs_plane *plane, uint32_t slot) {
    uint32_t hits = atomic_load_explicit(&plane->uses[slot], memory_order_relaxed) & 0xff;
    atomic_store_explicit(&plane->uses[slot], tick_now(plane) << 8 | (hits < 255 ? hits + 1 : hits), memory_order_relaxed);
}

/* Used now, and no hit. */
static void use_renew(struct kvfs_plane *plane, uint32_t slot) {
    uint32_t hits = atomic_load_explicit(&plane->uses[slot], memory_order_relaxed) & 0xff;
    atomic_store_explicit(&plane->uses[slot], tick_now(plane) << 8 | hits, memory_order_relaxed);
}

/* Hits order eviction, and that is slow. Those of a moment are told together. */
#define HIT_HOLD_NS 1000000000u

void foreign_hit(struct kvfs_plane *plane, const struct kvfs_record *record) {
    const struct kvfs_news_item item = {
        .kind = KVFS_POD_HIT, .key_low = record->key_low, .key_high = record->key_high, .version = 1, .hold_ns = HIT_HOLD_NS};
    if (plane->news)
        kvfs_news_add(plane->news, &item);
}

void found_add(struct kvfs_plane *plane, const struct kvfs_record *record) {
    if (record->flags & KVFS_INODE_FOREIGN) {
        foreign_hit(plane, record);
        return;
    }
    struct timespec now;
    clock_gettime(CLOCK_REALTIME_COARSE, &now);
    int64_t age = now.tv_sec - record->mtime_ns / 1000000000;
    uint32_t bucket = age > 0 ? 64 - (uint32_t)__builtin_clzll((uint64_t)age) : 0;
    atomic_fetch_add_explicit(&plane->found_ages[bucket < KVFS_AGES ? bucket : KVFS_AGES - 1], 1, memory_order_relaxed);
    use_add(plane, record->slot);
}

uint64_t name_hash(struct kvfs_plane *plane, uint64_t parent, const char *name, size_t size) {
    uint64_t low, high;
    kvfs_name_key(parent, name, (uint32_t)size, plane->config.secret, &low, &high);
    return low | 1;
}

/* Of two names that share a place, the older one counts as missed, whether it is made later or not. */
void missed_add(struct kvfs_plane *plane, uint64_t hash) {
    COUNT(plane, lookup_misses, 1);
    atomic_store_explicit(&plane->missed_names[(hash >> 1) % MISSED_NAMES], hash, memory_order_relaxed);
}

void missed_made(struct kvfs_plane *plane, uint64_t parent, const char *name) {
    uint64_t hash = name_hash(plane, parent, name, strlen(name));
    if (atomic_compare_exchange_strong(&plane->missed_names[(hash >> 1) % MISSED_NAMES], &(unsigned long long){hash}, 0))
        COUNT(plane, misses_made, 1);
}

int kvfs_inode_uses(struct kvfs_plane *plane, const uint64_t *inodes, uint32_t count, uint32_t *uses) {
    for (uint32_t i = 0; i < count; i++) {
        struct kvfs_record record;
        bool found = kvfs_table_find_inode(plane->table, inodes[i], &record) == 0;
        uses[i] = found ? atomic_load_explicit(&plane->uses[record.slot], memory_order_relaxed) : 0;
    }
    return 0;
}

int kvfs_inode_touch(struct kvfs_plane *plane, const uint64_t *inodes, uint32_t count, int found) {
    for (uint32_t i = 0; i < count; i++) {
        struct kvfs_record record;
        if (kvfs_table_find_inode(plane->table, inodes[i], &record) < 0)
            continue;
        if (found)
            found_add(plane, &record);
        else
            use_renew(plane, record.slot);
    }
    return 0;
}

void use_enter(struct kvfs_plane *plane, uint32_t slot, const uint32_t *before) {
    uint32_t use = before ? atomic_load_explicit(&plane->uses[*before], memory_order_relaxed) : tick_now(plane) << 8;
    atomic_store_explicit(&plane->uses[slot], use, memory_order_relaxed);
}

void kvfs_set_tick(struct kvfs_plane *plane, uint32_t tick) { atomic_store_explicit(&plane->tick, tick & 0xffffff, memory_order_relaxed); }
