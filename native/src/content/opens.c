/* The handles by which a host's kernel reads, in memory that outlives this process: a list in a memfd that another process keeps.
 *
 * The next daemon has them again, with their numbers (handles.c). So a sealed block that is open stays, from that daemon's first moment to the RELEASE.
 * A block of another node of the pod is there with its place, its key, and the content that was read: it needs no news to be read on.
 *
 * A page with a header, then a place for each handle, and one for each block of others. The place of a handle is the one in the table of handles, so
 * nobody looks for it. A place counts once its first word is not 0. That is written last, and cleared first: a daemon may end at any instruction. An OPEN
 * whose answer was not sent comes again, with the same number: then the handle of the first is let go of.
 *
 * Handles beyond the list, those of writers and of guests are not in it. lost.c has the rest. */
#include "base/sealed_memory.h"
#include "content/content.h"

#include <sys/stat.h>
#include <unistd.h>

#define OPENS_MAGIC 0x315f534e45504f56ull /* "VOPENS_1" */
#define OPENS_PLACES 65536u
/* A node of a pod hears of what others have, and have moved, within that from its start. */
#define NEWS_NS 30000000000ull

struct opens_header {
    uint64_t magic;
    uint32_t version, places;
};
struct opens_place {
    _Alignas(64) atomic_ullong fh;
    uint64_t inode, unique; /* unique: of the OPEN */
    uint32_t user, flags;
};
static_assert(sizeof(struct opens_place) == 64, "a cache line");
/* A block of another node, by the node id that it has here. Beside it lies what read.c proves by it. */
struct opens_foreign {
    _Alignas(64) atomic_ullong inode;
    uint64_t parent, key_low, key_high, size, generation;
    uint32_t segment, page, header_pages, mode, uid, gid;
    uint32_t extents, keyed;
    atomic_ullong content_inode, content_version;
};
static_assert(sizeof(struct opens_foreign) == 128, "two cache lines");
#define OPENS_FOREIGN_AT (KVFS_PAGE_SIZE + OPENS_PLACES * sizeof(struct opens_place))
#define OPENS_SIZE (OPENS_FOREIGN_AT + OPENS_PLACES * sizeof(struct opens_foreign))

struct opens {
    void *memory;
    struct opens_place *places;
    struct opens_foreign *foreign;
    atomic_uint next; /* where the search for a free place of a foreign block begins */
};

int kvfs_opens_make(void) {
    struct opens_header header = {.magic = OPENS_MAGIC, .version = KVFS_OPENS_VERSION, .places = OPENS_PLACES};
    return sealed_create("kvfs-opens", OPENS_SIZE, &header, sizeof(header));
}

/* ---- told ---- */

void opens_add(struct kvfs_plane *plane, uint32_t place, const struct handle *handle, uint64_t unique) {
    if (!plane->opens || place >= OPENS_PLACES || !unique || handle->writer)
        return;
    struct opens_place *at = &plane->opens->places[place];
    at->inode = handle->node->inode;
    at->unique = unique;
    at->user = (uint32_t)(atomic_load_explicit(&handle->user->key, memory_order_relaxed) - 1);
    at->flags = handle->flags;
    atomic_store_explicit(&at->fh, handle->number, memory_order_release);
}

void opens_remove(struct kvfs_plane *plane, uint32_t place) {
    if (plane->opens && place < OPENS_PLACES)
        atomic_store_explicit(&plane->opens->places[place].fh, 0, memory_order_release);
}

void opens_foreign_add(struct kvfs_plane *plane, struct node *node) {
    struct opens *opens = plane->opens;
    if (!opens)
        return;
    const struct kvfs_record *r = node->foreign;
    const uint32_t from = atomic_fetch_add(&opens->next, 1), former = node->opens_place;
    struct opens_foreign *at = NULL;
    unsigned long long none;
    for (uint32_t i = 0; i < OPENS_PLACES && !at; i++) {
        struct opens_foreign *free = &opens->foreign[(from + i) % OPENS_PLACES];
        none = 0;
        /* Taken with a number that is no node's: nobody reads it on. */
        if (atomic_load_explicit(&free->inode, memory_order_relaxed) == 0 && atomic_compare_exchange_strong(&free->inode, &none, 1))
            at = free;
    }
    if (at) {
        at->parent = r->parent;
        at->key_low = r->key_low;
        at->key_high = r->key_high;
        at->size = r->size;
        at->generation = r->generation;
        at->segment = r->segment;
        at->page = r->page;
        at->header_pages = r->header_pages;
        at->mode = r->mode;
        at->uid = r->uid;
        at->gid = r->gid;
        at->extents = r->extent_count;
        at->keyed = r->keyed;
        atomic_store_explicit(&at->content_version, node->content.version, memory_order_relaxed);
        atomic_store_explicit(&at->content_inode, node->content.inode, memory_order_relaxed);
        atomic_store_explicit(&at->inode, node->inode, memory_order_release);
    }
    /* The new place is there before the former goes. Of two the next daemon takes one: the block was found at either. */
    if (former)
        atomic_store_explicit(&opens->foreign[former - 1].inode, 0, memory_order_release);
    node->opens_place = at ? (uint32_t)(at - opens->foreign) + 1 : 0;
}

void opens_foreign_read(struct kvfs_plane *plane, const struct node *node) {
    if (!node->opens_place)
        return;
    struct opens_foreign *at = &plane->opens->foreign[node->opens_place - 1];
    atomic_store_explicit(&at->content_version, node->content.version, memory_order_relaxed);
    atomic_store_explicit(&at->content_inode, node->content.inode, memory_order_release);
}

void opens_foreign_remove(struct kvfs_plane *plane, const struct node *node) {
    if (node->opens_place && !atomic_load(&plane->leaving))
        atomic_store_explicit(&plane->opens->foreign[node->opens_place - 1].inode, 0, memory_order_release);
}

/* ---- of earlier daemons: memory of another process, perhaps of another build ---- */

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
    struct opens_header header;
    int64_t size = sealed_size(fd);
    int r = size < 0 ? (int)size : sealed_peek(fd, &header, sizeof(header));
    assert(!plane->opens);
    if (r == 0 && header.magic != OPENS_MAGIC)
        r = -EBADMSG;
    if (r == 0 && header.version != KVFS_OPENS_VERSION)
        r = -EPROTONOSUPPORT;
    if (r == 0 && (header.places != OPENS_PLACES || size != OPENS_SIZE))
        r = -EBADMSG;
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

bool opens_asked(const struct kvfs_plane *plane, uint32_t place, uint64_t unique) {
    return plane->opens && place < OPENS_PLACES && plane->opens->places[place].unique == unique;
}

void opens_free(struct opens *opens) {
    if (opens)
        munmap(opens->memory, OPENS_SIZE);
    free(opens);
}
