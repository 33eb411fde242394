/* Leases: blocks that native clients keep from eviction between a look-up and a read.
 *
 * A lease counts in the nodes of its inodes, beside their handles. It keeps nothing that loses its name: who deletes or replaces a block is not held
 * up. Deadlines, clients and their bounds are Python's (kvfs/store/leases.py). */
#include "content/content.h"

struct lease {
    struct kvfs_lease told; /* first */
    struct node **nodes;    /* told.count of them, each with a reference */
};

static uint32_t pages_to_lease(const struct kvfs_record *record) { return record->header_pages + (uint32_t)pages_of(record->size); }

/* By the data alone: a copy may have a longer header. */
bool node_is_leased(struct kvfs_plane *plane, const struct node *node) {
    struct kvfs_record record;
    return node->leased_pages && kvfs_table_find_inode(plane->table, node->inode, &record) == 0 && pages_of(record.size) <= node->leased_pages;
}

void node_unlease(struct kvfs_plane *plane, struct node *node) {
    if (!node->leased_pages)
        return;
    unsigned long long pages = atomic_fetch_sub(&plane->leased_pages, node->leased_pages);
    unsigned blocks = atomic_fetch_sub(&plane->leased_blocks, 1);
    assert(pages >= node->leased_pages && blocks > 0);
    atomic_fetch_sub(&plane->open_bytes, (uint64_t)node->leased_pages * PAGE);
    node->leased_pages = 0;
}

/* With the shard's lock held. Count so many pages for the node; false: there is no room for that. Leases take half at most of what open blocks and files
 * being written leave. */
static bool charge(struct kvfs_plane *plane, struct node *node, uint32_t pages, uint64_t all_pages) {
    if (pages <= node->leased_pages)
        return true;
    uint64_t more = pages - node->leased_pages, all = atomic_load(&plane->leased_pages) + more;
    if (all > all_pages || space_lacks(plane, (more + all) * PAGE))
        return false;
    atomic_fetch_add(&plane->leased_pages, more);
    atomic_fetch_add(&plane->leased_blocks, !node->leased_pages);
    atomic_fetch_add(&plane->open_bytes, more * PAGE);
    node->leased_pages = pages;
    return true;
}

/* Takes what it needs from the room. NULL: the inode is not kept. */
static struct node *lease_one(struct kvfs_plane *plane, uint64_t inode, struct kvfs_lease_room *room) {
    struct kvfs_record record;
    struct shard *shard = shard_of(plane, inode);
    struct node *node = NULL, *refused = NULL;
    pthread_mutex_lock(&shard->lock);
    bool there = kvfs_table_find_inode(plane->table, inode, &record) == 0 && record.kind == KVFS_KIND_FILE &&
                 (record.flags & (KVFS_INODE_SEALED | KVFS_INODE_NAMELESS | KVFS_INODE_SLAB)) == KVFS_INODE_SEALED;
    if (there && room->blocks && pages_to_lease(&record) <= room->pages)
        node = node_get_locked(shard, inode, true);
    if (node && !charge(plane, node, pages_to_lease(&record), room->all_pages)) {
        /* Nothing larger finds room either. Not asked again: where room ends, the question is not cheap. */
        room->all_pages = min_u64(room->all_pages, atomic_load(&plane->leased_pages) + pages_to_lease(&record) - 1);
        refused = node;
        node = NULL;
    }
    if (node) {
        node->leases++;
        room->blocks--;
        room->pages -= pages_to_lease(&record);
    }
    pthread_mutex_unlock(&shard->lock);
    node_put(plane, refused);
    return node;
}

struct kvfs_lease *kvfs_lease_create(void) {
    struct lease *lease = calloc(1, sizeof(*lease));
    return lease ? &lease->told : NULL;
}

int kvfs_lease_add(struct kvfs_plane *plane, struct kvfs_lease *told, const uint64_t *inodes, uint32_t count, const struct kvfs_lease_room *given,
                   uint8_t *held) {
    struct lease *lease = (struct lease *)(void *)told;
    struct kvfs_lease_room room = *given;
    struct node **grown = realloc(lease->nodes, ((uint64_t)told->count + count + 1) * sizeof(struct node *));
    memset(held, 0, count);
    if (!grown)
        return -ENOMEM;
    lease->nodes = grown;
    int kept = 0;
    for (uint32_t i = 0; i < count; i++) {
        struct node *node = lease_one(plane, inodes[i], &room);
        if (!node)
            continue;
        lease->nodes[told->count++] = node;
        held[i] = 1;
        kept++;
    }
    told->pages += given->pages - room.pages;
    return kept;
}

void kvfs_lease_end(struct kvfs_plane *plane, struct kvfs_lease *told) {
    struct lease *lease = (struct lease *)(void *)told;
    for (uint32_t i = 0; i < told->count; i++) {
        struct node *node = lease->nodes[i];
        struct shard *shard = shard_of(plane, node->inode);
        pthread_mutex_lock(&shard->lock);
        assert(node->leases > 0);
        if (--node->leases == 0)
            node_unlease(plane, node);
        pthread_mutex_unlock(&shard->lock);
        node_put(plane, node);
    }
    free(lease->nodes);
    free(lease);
}

void kvfs_leased_get(struct kvfs_plane *plane, struct kvfs_leased *out) {
    *out = (struct kvfs_leased){.pages = atomic_load(&plane->leased_pages), .blocks = atomic_load(&plane->leased_blocks)};
}
