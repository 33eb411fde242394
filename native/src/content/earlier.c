/* Handles of earlier daemons, which have left their list (opens.c): they are there again, with their numbers.
 *
 * It is memory of another process, and perhaps of another build. So each field is checked. */
#include "base/sealed_memory.h"
#include "content/opens.h"

#include <sys/stat.h>
#include <unistd.h>

/* A node of a pod hears of what others have, and have moved, within that from its start. */
#define NEWS_NS 30000000000ull

static bool foreign_possible(const struct kvfs_plane *plane, const struct kvfs_record *r) {
    const uint64_t pages = plane->array.geometry.segment_pages, sums = pages_of(r->size) * sizeof(uint64_t) + sizeof(struct kvfs_block_header);
    return is_foreign(r->inode) && (r->key_low | r->key_high) && r->generation && r->segment < plane->config.segment_count && r->page &&
           r->header_pages && r->header_pages <= pages && r->page <= pages - r->header_pages && S_ISREG(r->mode) && r->mode >> 16 == 0 &&
           r->size >> 48 == 0 && sums <= r->header_pages * PAGE;
}

/* The node, referenced, once its record is there as it was. False: it is nonsense, or there already. */
static bool foreign_restore(struct kvfs_plane *plane, uint32_t index) {
    const struct opens_foreign *at = &plane->opens->foreign[index];
    const struct kvfs_record record = {.inode = atomic_load_explicit(&at->inode, memory_order_acquire),
                                       .parent = at->parent,
                                       .version = UINT64_MAX,
                                       .size = at->size,
                                       .generation = at->generation,
                                       .segment = at->segment,
                                       .page = at->page,
                                       .header_pages = at->header_pages,
                                       .extent_count = at->extents != 0,
                                       .mode = at->mode,
                                       .uid = at->uid,
                                       .gid = at->gid,
                                       .nlink = 1,
                                       .kind = KVFS_KIND_FILE,
                                       .flags = KVFS_INODE_FOREIGN | KVFS_INODE_SEALED,
                                       .keyed = at->keyed != 0,
                                       .key_low = at->key_low,
                                       .key_high = at->key_high};
    struct node *node = plane->pod && foreign_possible(plane, &record) ? node_get(plane, record.inode, true) : NULL;
    if (!node || node->foreign || !(node->foreign = malloc(sizeof(record)))) {
        node_put(plane, node);
        return false;
    }
    *node->foreign = record;
    node->content.inode = atomic_load_explicit(&at->content_inode, memory_order_acquire);
    node->content.version = atomic_load_explicit(&at->content_version, memory_order_relaxed);
    node->opens_place = index + 1;
    return true;
}

/* 0: the handle is there again. */
static int place_restore(struct kvfs_plane *plane, uint32_t index) {
    const struct opens_place *at = &plane->opens->places[index];
    const uint64_t fh = atomic_load_explicit(&at->fh, memory_order_acquire), inode = at->inode;
    const uint32_t flags = at->flags;
    struct handle handle = {.user = user_get(plane, at->user), .number = fh, .flags = flags, .earlier = true};
    struct kvfs_record record;
    if (handle_place_of(fh) != index || (flags & O_ACCMODE) != O_RDONLY || written_earlier(plane, inode))
        return -EBADMSG;
    int r = node_open(plane, inode, handle.user, false, &record, &handle.node);
    if (r < 0)
        return r;
    const bool sealed = record.flags & KVFS_INODE_SEALED && S_ISREG(record.mode);
    atomic_fetch_sub(&plane->count.opens_found, (record.flags & KVFS_INODE_SEALED) != 0);
    atomic_store(&handle.node->host_cached, true);
    r = sealed ? handle_restore(plane, &handle) : -EBADMSG;
    if (r < 0) {
        struct shard *shard = shard_of(plane, inode);
        pthread_mutex_lock(&shard->lock);
        node_unopen(plane, handle.node, handle.user, false);
        pthread_mutex_unlock(&shard->lock);
        node_put(plane, handle.node);
    }
    return r;
}

static void restore(struct kvfs_plane *plane) {
    struct opens *opens = plane->opens;
    for (uint32_t i = 0; i < OPENS_PLACES; i++)
        if (atomic_load(&opens->foreign[i].inode) && !foreign_restore(plane, i))
            atomic_store(&opens->foreign[i].inode, 0);
    for (uint32_t i = 0; i < OPENS_PLACES; i++)
        if (atomic_load(&opens->places[i].fh) && place_restore(plane, i) < 0)
            atomic_store(&opens->places[i].fh, 0);
    for (uint32_t i = 0; i < OPENS_PLACES; i++) { /* a block that no handle has goes */
        uint64_t inode = atomic_load(&opens->foreign[i].inode);
        struct node *node = inode ? node_get(plane, inode, false) : NULL;
        node_put(plane, node);
        node_put(plane, node);
    }
}

int kvfs_opens_keep(struct kvfs_plane *plane, int fd) {
    struct kvfs_versions versions;
    int r = kvfs_opens_check(fd, &versions);
    assert(!plane->opens);
    if (r < 0)
        return r;
    struct opens *opens = calloc(1, sizeof(*opens));
    if (!opens)
        return -ENOMEM;
    opens->memory = mmap(NULL, OPENS_SIZE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (opens->memory == MAP_FAILED) {
        r = -errno;
        free(opens);
        return r;
    }
    opens->places = (struct opens_place *)(void *)((uint8_t *)opens->memory + KVFS_PAGE_SIZE);
    opens->foreign = (struct opens_foreign *)(void *)((uint8_t *)opens->memory + OPENS_FOREIGN_AT);
    plane->opens = opens;
    plane->news_until_ns = now_ns() + NEWS_NS;
    restore(plane);
    return 0;
}
