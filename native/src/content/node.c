/* Open inodes. A node id is the inode number, which is never used again, so nobody counts lookups (I26).
 *
 * A node exists only while an inode is open, leased or being written. */
#include "content/content.h"

static struct node **bucket_of(struct shard *shard, uint64_t inode) { return &shard->nodes[(inode * 0x9e3779b97f4a7c15ull) >> 54]; }

struct node *node_find_locked(struct shard *shard, uint64_t inode) {
    struct node *node = *bucket_of(shard, inode);
    while (node && node->inode != inode)
        node = node->next;
    return node;
}

struct node *node_get_locked(struct shard *shard, uint64_t inode, bool create) {
    struct node **bucket = bucket_of(shard, inode), *node = node_find_locked(shard, inode);
    if (!node && create) {
        node = calloc(1, sizeof(*node));
        if (node) {
            node->inode = inode;
            pthread_mutex_init(&node->lock, NULL);
            node->next = *bucket;
            *bucket = node;
        }
    }
    if (node)
        atomic_fetch_add(&node->refs, 1);
    return node;
}

struct node *node_get(struct kvfs_plane *plane, uint64_t inode, bool create) {
    struct shard *shard = shard_of(plane, inode);
    pthread_mutex_lock(&shard->lock);
    struct node *node = node_get_locked(shard, inode, create);
    pthread_mutex_unlock(&shard->lock);
    return node;
}

/* With the shard's lock held. */
void node_unopen(struct kvfs_plane *plane, struct node *node, struct user *user, bool writer) {
    assert(node->handles > 0);
    assert(node->writers >= writer);
    node->writers -= writer;
    node->handles--;
    hold_drop(plane, node, user);
}

static struct kvfs_record *record_copy(const struct kvfs_record *record) {
    struct kvfs_record *copy = malloc(sizeof(*copy));
    if (copy)
        *copy = *record;
    return copy;
}

int node_open(struct kvfs_plane *plane, uint64_t inode, struct user *user, bool writer, struct kvfs_record *record, struct node **out) {
    struct shard *shard = shard_of(plane, inode);
    pthread_mutex_lock(&shard->lock);
    int r = record_find(plane, inode, record);
    struct node *node = r == 0 ? node_get_locked(shard, inode, true) : NULL;
    struct node *failed = NULL;
    if (r == -ENOENT && is_foreign(inode) && (node = node_get_locked(shard, inode, false))) {
        if (node->foreign) { /* open, and so long ago, or by an earlier daemon, that nobody else knows it */
            r = node_record(plane, node, record);
        } else {
            failed = node;
            node = NULL;
        }
    }
    const bool foreign = r == 0 && record->flags & KVFS_INODE_FOREIGN, fresh = node && foreign && !node->foreign;
    if (node && foreign && !node->foreign && !(node->foreign = record_copy(record))) {
        failed = node;
        node = NULL;
    }
    if (node && foreign && !node->handles) {
        pthread_mutex_lock(&node->lock);
        if (!node->content.inode)
            node->content = foreign_known_content(plane->known, inode);
        if (fresh)
            opens_foreign_add(plane, node);
        pthread_mutex_unlock(&node->lock);
    }
    if (node && !hold_add(node, user)) {
        failed = node;
        node = NULL;
    }
    if (node) {
        COUNT(plane, opens_found, !writer && record->flags & KVFS_INODE_SEALED);
        if (node->handles++ == 0) {
            node->payer = user;
            hold_charge(plane, node, foreign ? 0 : record->size); /* its owner evicts it as it likes */
        } else {
            hold_offer(plane, node, user);
        }
        node->writers += writer;
    }
    pthread_mutex_unlock(&shard->lock);
    node_put(plane, failed);
    *out = node;
    return r == -ENOENT ? -ESTALE : r < 0 ? r : node ? 0 : -ENOMEM;
}

int record_find_open(struct kvfs_plane *plane, uint64_t inode, struct kvfs_record *out) {
    int r = record_find(plane, inode, out);
    struct node *node = r == -ENOENT && is_foreign(inode) ? node_get(plane, inode, false) : NULL;
    if (node && node->foreign)
        r = node_record(plane, node, out);
    node_put(plane, node);
    return r;
}

bool node_promise(struct kvfs_plane *plane, uint64_t inode) {
    struct node *node = node_get(plane, inode, false);
    if (!node)
        return false;
    struct shard *shard = shard_of(plane, inode);
    pthread_mutex_lock(&shard->lock);
    pthread_mutex_lock(&node->lock);
    bool good = node->handles && node->writers == 0 && !node->file && !node->rewriting;
    if (good)
        node->promised_until_ns = now_ns() + PROMISE_S * 1000000000ull + PROMISE_SLACK_NS;
    pthread_mutex_unlock(&node->lock);
    pthread_mutex_unlock(&shard->lock);
    node_put(plane, node);
    return good;
}

void node_put(struct kvfs_plane *plane, struct node *node) {
    if (!node)
        return;
    struct shard *shard = shard_of(plane, node->inode);
    pthread_mutex_lock(&shard->lock);
    unsigned before = atomic_fetch_sub(&node->refs, 1);
    assert(before > 0);
    if (before == 1) {
        struct node **link = bucket_of(shard, node->inode);
        while (*link != node)
            link = &(*link)->next;
        *link = node->next;
    } else {
        node = NULL;
    }
    pthread_mutex_unlock(&shard->lock);
    if (node) {
        if (node->desc)
            desc_put(node->desc);
        assert(!node->file);
        assert(!node->handles);
        assert(!node->leases);
        opens_foreign_remove(plane, node);
        free(node->foreign);
        pthread_mutex_destroy(&node->lock);
        free(node);
    }
}
