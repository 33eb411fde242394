/* The handles by which a host's kernel reads, in memory that outlives this process: a list in a memfd that another process keeps.
 *
 * The next daemon has them again, with their numbers (handles.c). So a sealed block that is open stays, from that daemon's first moment to the RELEASE.
 * A block of another node of the pod is there with its place, its key, and the content that was read. It needs no news to be read on.
 *
 * A page with a header, then a place for each handle, and one for each block of others. The place of a handle is the one in the table of handles, so
 * nobody looks for it. A place counts once its first word is not 0. It is written last and cleared first, as a daemon may end at any instruction. An OPEN
 * whose answer was not sent comes again, with the same number: then the handle of the first is let go of.
 *
 * Handles beyond the list, those of writers and of guests are not in it. lost.c has the rest. */
#include "base/sealed_memory.h"
#include "content/opens.h"

#include <unistd.h>

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

int kvfs_opens_check(int fd, struct kvfs_versions *out) {
    struct opens_header header;
    *out = (struct kvfs_versions){.oldest = KVFS_OPENS_OLDEST, .newest = KVFS_OPENS_VERSION};
    int r = sealed_version(fd, OPENS_MAGIC, out->oldest, out->newest, &out->found);
    if (r == 0)
        r = sealed_peek(fd, &header, sizeof(header));
    if (r == 0 && (header.places != OPENS_PLACES || sealed_size(fd) != OPENS_SIZE))
        r = -EBADMSG;
    return r;
}

bool opens_asked(const struct kvfs_plane *plane, uint32_t place, uint64_t unique) {
    return plane->opens && place < OPENS_PLACES && plane->opens->places[place].unique == unique;
}

void opens_free(struct opens *opens) {
    if (opens)
        munmap(opens->memory, OPENS_SIZE);
    free(opens);
}
