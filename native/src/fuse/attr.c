/* Attributes in replies: those of a record or of a file being written, and how long a kernel may keep them. */
#include "fuse/fuse.h"

#include <sys/stat.h>

/* Times before 1970 are negative: the fraction counts from the earlier second. */
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

/* How long a kernel may keep a name and attributes. Blocks are immutable: a kernel that can be told of an eviction (INC_EPOCH) keeps both for long.
 * For a file being written it keeps the name alone.
 *
 * A guest cannot be told. It keeps no names, not even of directories: after a rename, with another directory in its place, a kept name would lead to
 * the old blocks. So every open asks, and finds the present block. For a second a guest may keep the attributes of a directory, and of a block that
 * it has open (node_promise). Before each read its kernel checks by them whether its cached pages are still the file's. */
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
    atomic_store(&node->host_cached, true); /* first: a guest that opens it now sees this, or we see the guest's open */
    return atomic_load(&node->guest_wrote);
}

/* Content that is written once need not go through the kernel's page cache. The cache would be filled and copied for nobody, and dropped by the next
 * eviction. This holds for a new file that is open for writing alone, so nobody can have mapped it. Cached pages of other readers would not follow
 * the writes. So these readers bypass the cache too, and what they mapped is not kept beyond the seal (KVFS_INODE_REWRITTEN). A kernel that cannot
 * map such files caches them, also for the writer. */
bool cache_bypass(const struct transport *transport, struct node *node, bool created) {
    struct shard *shard = shard_of(transport->plane, node->inode);
    pthread_mutex_lock(&shard->lock); /* the next opener counts as a handle after this, and finds the flags set here */
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

uint32_t user_id(const struct transport *transport, const struct fuse_in_header *in) {
    struct kvfs_plane *plane = transport->plane;
    struct kvfs_record record;
    uint32_t user = in->uid;
    if (transport->user || !transport->idmap)
        return transport->user ? transport->user : user;
    if (user == NO_USER && record_find(plane, in->nodeid, &record) == 0)
        user = record.uid;
    return !user || user == NO_USER || user == atomic_load(&plane->exempt) ? NOBODY : user;
}
