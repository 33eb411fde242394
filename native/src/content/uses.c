/* Uses of blocks, which order eviction, and misses: lookups of missing names that were not made next.
 *
 * Uses are hints. A word may be another block's for a moment, or miss one of two opens at once. */
#include "content/chains.h"
#include "content/content.h"

static uint32_t tick_now(struct kvfs_plane *plane) { return atomic_load_explicit(&plane->tick, memory_order_relaxed); }

/* A block with this use is used again. */
static void use_again(struct kvfs_plane *plane, uint32_t slot, uint32_t use) {
    uint32_t hits = use & 0xff, tick = tick_now(plane);
    COUNT(plane, uses, 1);
    kvfs_worth_count(&plane->used, tick, &use, 1);
    atomic_store_explicit(&plane->uses[slot], tick << 8 | (hits < 255 ? hits + 1 : hits), memory_order_relaxed);
    kvfs_chains_used(plane->chains, slot);
}

static void use_add(struct kvfs_plane *plane, uint32_t slot) {
    use_again(plane, slot, atomic_load_explicit(&plane->uses[slot], memory_order_relaxed));
}

/* Used now, and no hit. */
static void use_renew(struct kvfs_plane *plane, uint32_t slot) {
    uint32_t hits = atomic_load_explicit(&plane->uses[slot], memory_order_relaxed) & 0xff;
    atomic_store_explicit(&plane->uses[slot], tick_now(plane) << 8 | hits, memory_order_relaxed);
    kvfs_chains_used(plane->chains, slot);
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

/* Pages that a kernel has in its cache are read unseen. Of a block that was never read from here it has none. */
void found_unread(struct kvfs_plane *plane, const struct kvfs_record *record) {
    if (record->flags & KVFS_INODE_FOREIGN)
        return;
    uint32_t use = atomic_load_explicit(&plane->uses[record->slot], memory_order_relaxed), tick = tick_now(plane);
    if (!(use & 0xff) || use >> 8 == tick)
        return;
    kvfs_worth_count(&plane->used, tick, &use, 1);
    use_renew(plane, record->slot);
}

void use_look(struct kvfs_plane *plane, const struct kvfs_record *record) {
    if (record->flags & KVFS_INODE_FOREIGN)
        return;
    uint32_t use = atomic_load_explicit(&plane->uses[record->slot], memory_order_relaxed);
    if (use >> 8 != tick_now(plane))
        use_again(plane, record->slot, use);
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

uint64_t kvfs_inode_told(struct kvfs_plane *plane, const uint64_t *inodes, uint32_t count, int found, uint64_t budget, uint64_t cost) {
    for (uint32_t i = 0; i < count && budget >= cost; i++) {
        struct kvfs_record record;
        budget -= cost;
        if (kvfs_table_find_inode(plane->table, inodes[i], &record) < 0)
            continue;
        uint64_t size = found ? record.size : 0;
        if (size > budget)
            continue;
        budget -= size;
        if (found)
            found_add(plane, &record);
        else
            use_renew(plane, record.slot);
    }
    return budget;
}

void kvfs_inode_done(struct kvfs_plane *plane, const uint64_t *inodes, uint32_t count) {
    for (uint32_t i = 0; i < count; i++) {
        struct kvfs_record record;
        if (kvfs_table_find_inode(plane->table, inodes[i], &record) == 0)
            atomic_store_explicit(&plane->uses[record.slot], ((tick_now(plane) - KVFS_DONE_AGE) & 0xffffff) << 8, memory_order_relaxed);
    }
}

void kvfs_uses_begin(struct kvfs_plane *plane, const uint32_t *ages, uint32_t segment_count) {
    uint32_t count;
    const uint64_t *places = kvfs_table_places(plane->table, &count);
    for (uint32_t slot = 0; slot < count; slot++) {
        uint64_t place = __atomic_load_n(&places[slot], __ATOMIC_RELAXED);
        if (place >> 32 && (uint32_t)place < segment_count)
            atomic_store_explicit(&plane->uses[slot], ((0 - ages[(uint32_t)place]) & 0xffffff) << 8, memory_order_relaxed);
    }
}

void kvfs_segments_weigh(struct kvfs_plane *plane, const struct kvfs_worths *worths, float price, uint32_t tick, struct kvfs_weight *segments,
                         uint32_t segment_count, struct kvfs_ages *ages) {
    struct kvfs_weighed blocks = {.uses = (const uint32_t *)plane->uses, .orphans = kvfs_chains_orphans(plane->chains)};
    blocks.places = kvfs_table_places(plane->table, &blocks.count);
    kvfs_weigh(worths, price, tick, &blocks, segments, segment_count, ages);
    places_live(plane->names, segments, segment_count);
}

/* Ghosts kept, by block. */
#define GHOSTS_KEPT 2

void kvfs_ghosts_count(struct kvfs_plane *plane, uint32_t tick, struct kvfs_ages *ages) {
    struct kvfs_table_statistics table;
    kvfs_names_begin(plane->names);
    kvfs_table_statistics(plane->table, &table);
    kvfs_chains_limit(plane->chains, (uint32_t)table.records * GHOSTS_KEPT);
    kvfs_names_end(plane->names);
    uint32_t at = 0, count, uses[1024];
    while ((count = kvfs_chains_ghosts(plane->chains, &at, uses, 1024)))
        kvfs_worth_count(ages, tick, uses, count);
}

void kvfs_used_take(struct kvfs_plane *plane, struct kvfs_ages *out) {
    for (uint32_t row = 0; row < KVFS_WORTH_CLASSES; row++)
        for (uint32_t i = 0; i < KVFS_WORTH_AGES; i++)
            out->counts[row][i] = __atomic_exchange_n(&plane->used.counts[row][i], 0, __ATOMIC_RELAXED);
}

void inode_follow(struct kvfs_plane *plane, uint64_t inode, uint64_t parent) {
    struct kvfs_record block, before;
    if (kvfs_table_find_inode(plane->table, inode, &block) == 0 && kvfs_table_find_inode(plane->table, parent, &before) == 0)
        kvfs_chains_follow(plane->chains, block.slot, before.slot);
}

void kvfs_inode_follow(struct kvfs_plane *plane, uint64_t inode, uint64_t parent) {
    kvfs_names_begin(plane->names);
    inode_follow(plane, inode, parent);
    kvfs_names_end(plane->names);
}

int64_t kvfs_inode_parent(struct kvfs_plane *plane, uint64_t inode) {
    struct kvfs_record block, before;
    int64_t parent = -ENOENT;
    kvfs_names_begin(plane->names);
    if (kvfs_table_find_inode(plane->table, inode, &block) == 0) {
        uint32_t slot = kvfs_chains_parent(plane->chains, block.slot);
        uint64_t at = slot, low, high; /* numbers of the scan are from 1 on */
        if (slot != UINT32_MAX && kvfs_table_scan(plane->table, &at, &before, &low, &high) == 1 && before.slot == slot)
            parent = (int64_t)before.inode;
    }
    kvfs_names_end(plane->names);
    return parent;
}

void kvfs_plane_chains(struct kvfs_plane *plane, struct kvfs_chains_statistics *out) {
    kvfs_names_begin(plane->names);
    kvfs_chains_statistics(plane->chains, out);
    kvfs_names_end(plane->names);
}

void use_enter(struct kvfs_plane *plane, const struct kvfs_record *block, const struct kvfs_record *before) {
    uint32_t use = tick_now(plane) << 8, ghost;
    if (before) {
        use = atomic_load_explicit(&plane->uses[before->slot], memory_order_relaxed);
        kvfs_chains_move(plane->chains, before->slot, block->slot);
    } else {
        kvfs_chains_clear(plane->chains, block->slot);
    }
    atomic_store_explicit(&plane->uses[block->slot], use, memory_order_relaxed);
    if (block->key_low && kvfs_chains_enter(plane->chains, block->slot, block->key_low, &ghost))
        use_again(plane, block->slot, ghost);
}

void use_replace(struct kvfs_plane *plane, const struct kvfs_record *other, const struct kvfs_record *block) {
    kvfs_chains_move(plane->chains, other->slot, block->slot);
    kvfs_chains_used(plane->chains, block->slot);
}

void use_leave(struct kvfs_plane *plane, const struct kvfs_record *block, bool evicted) {
    uint32_t use = atomic_load_explicit(&plane->uses[block->slot], memory_order_relaxed);
    kvfs_chains_leave(plane->chains, block->slot, block->key_low, use, evicted);
}

void kvfs_set_tick(struct kvfs_plane *plane, uint32_t tick) { atomic_store_explicit(&plane->tick, tick & 0xffffff, memory_order_relaxed); }
