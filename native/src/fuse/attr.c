/* Attributes in replies: of a record, of a file that is being written, and how long a kernel may keep them. */
#include "fuse/fuse.h"

#include <sys/stat.h>

/* Times before 1970 are negative: the part of a second counts from the second before. */
static void time_split(int64_t ns, uint64_t *seconds, uint32_t *part) {
    int64_t rest = ns % 1000000000;
    *seconds = (uint64_t)(ns / 1000000000 - (rest < 0));
    *part = (uint32_t)(rest + (rest < 0 ? 1000000000 : 0));
}

void fill_attr(struct kvfs_plane *plane, const struct kvfs_record *record, struct fuse_attr *attr) {
    (void)plane;
    memset(attr, 0, sizeof(*attr));
    attr->ino = record->inode;
    attr->size = record->size;
    attr->blocks = (record->size + 511) / 512;
    time_split(record->atime_ns, &attr->atime, &attr->atimensec);
    time_split(record->mtime_ns, &attr->mtime, &attr->mtimensec);
    time_split(record->ctime_ns, &attr->ctime, &attr->ctimensec);
    attr->mode = record->mode;
    attr->nlink = record->flags & KVFS_INODE_NAMELESS ? 0 : record->nlink;
    attr->uid = record->uid;
    attr->gid = record->gid;
    attr->blksize = KVFS_PAGE_SIZE;
}

bool overlay_attr(struct kvfs_plane *plane, uint64_t inode, struct fuse_attr *attr) {
    if (!atomic_load_explicit(&plane->count.staged_files, memory_order_relaxed))
        return false;
    struct node *node = node_get(plane, inode, false);
    if (!node)
        return false;
    bool staged = false;
    pthread_mutex_lock(&node->lock);
    if (node->file) {
        staged = true;
        attr->size = node->file->size;
        attr->blocks = (attr->size + 511) / 512;
        time_split(node->file->mtime_ns, &attr->mtime, &attr->mtimensec);
    }
    pthread_mutex_unlock(&node->lock);
    node_put(plane, node);
    return staged;
}

/* Blocks are immutable: where the kernel can be told of an eviction (INC_EPOCH) it may keep names and attributes for long; of what is still
 * being written the name alone.
 *
 * A guest can be told nothing. So it keeps no name at all, not even a directory's: renamed, and another in its place, it would lead to the
 * blocks that were there before. Every open asks, and finds what is there now. What a guest may keep, for a second, is the attributes of a
 * directory, and of a block that it has open (node_lease): before each read its kernel wants to know whether the pages that it has are
 * still the file's. */
void entry_timeouts(struct transport *transport, const struct fuse_attr *attr, bool staged, struct fuse_entry_out *entry) {
    entry->entry_valid_nsec = entry->attr_valid_nsec = 0;
    entry->entry_valid = transport->inc_epoch ? LONG_SECONDS : 0;
    if (S_ISDIR(attr->mode)) {
        entry->entry_valid = transport->inc_epoch ? LONG_SECONDS : transport->guest ? 0 : 1;
        entry->attr_valid = 1;
    } else {
        entry->attr_valid = transport->inc_epoch && !staged ? LONG_SECONDS : 0;
    }
}

bool host_opens_uncached(struct node *node) {
    atomic_store(&node->host_cached, true); /* first: a guest that opens it now sees this, or we see it */
    return atomic_load(&node->guest_wrote);
}

/* What is written once goes from the writer's pages to ours: not by the kernel's, which it would fill and copy for nobody, and which the next
 * eviction would drop. Only of a new file open for nothing but writing, which nobody can have mapped. Pages that others then read would not
 * follow what is written: so they bypass the cache too, and what they mapped is not kept beyond the seal (KVFS_INODE_REWRITTEN). A kernel that
 * cannot map such files has them cached, its writers' too. */
bool cache_bypass(const struct transport *transport, struct node *node, bool created) {
    struct shard *shard = shard_of(transport->plane, node->inode);
    pthread_mutex_lock(&shard->lock); /* whoever opens it next counts as a handle after this, and finds what is said here */
    pthread_mutex_lock(&node->lock);
    struct file *file = node->file;
    if (file && created && node->handles == 1 && !file->slab && transport->direct_mmap)
        file->past_cache = true;
    else if (file && file->past_cache)
        file->shared = true;
    bool bypass = file && file->past_cache && transport->direct_mmap;
    pthread_mutex_unlock(&node->lock);
    pthread_mutex_unlock(&shard->lock);
    return bypass;
}
