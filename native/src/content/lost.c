/* Handles of earlier daemons, under a mount that was taken over: the kernel reads on by numbers that nobody here has given out.
 *
 * These are the ones that opens.c has not: beyond its list, or of a daemon that kept none. A sealed block needs the inode alone. It counts as open from
 * the first READ by such a number to that number's RELEASE. How many there are, only the kernel knows. It forgets an inode after the last close. So one of
 * before that a request of this kernel removes or replaces counts as open until then. */
#include "content/content.h"

#include <sys/stat.h>

#define BUCKETS 256u
#define MOST 65536u /* beyond it they read on, but nothing counts them */

struct lost {
    struct lost *next;
    uint64_t inode, fh;
    bool nameless; /* no handle's, but the kernel's for as long as it knows the inode */
    struct node *node;
};
struct lost_handles {
    pthread_mutex_t lock;
    uint64_t inode_end; /* greater than all inodes of before */
    uint32_t count;
    struct lost *buckets[BUCKETS];
};

int lost_begin(struct kvfs_plane *plane) {
    struct lost_handles *lost = calloc(1, sizeof(*lost));
    if (!lost)
        return -ENOMEM;
    pthread_mutex_init(&lost->lock, NULL);
    lost->inode_end = kvfs_names_next_inode(plane->names);
    assert(!plane->lost);
    plane->lost = lost;
    return 0;
}

static struct lost **bucket_of(struct lost_handles *lost, uint64_t inode) { return &lost->buckets[inode % BUCKETS]; }

/* The caller has counted an opener of the node, and referenced it; both are the entry's now. False: there is one already, or no room. */
static bool add(struct lost_handles *lost, struct node *node, uint64_t fh, bool nameless) {
    struct lost *made = malloc(sizeof(*made));
    pthread_mutex_lock(&lost->lock);
    struct lost **bucket = bucket_of(lost, node->inode), *at = *bucket;
    while (at && !(at->inode == node->inode && at->nameless == nameless && at->fh == fh))
        at = at->next;
    bool added = made && !at && lost->count < MOST;
    if (added) {
        *made = (struct lost){.next = *bucket, .inode = node->inode, .fh = fh, .nameless = nameless, .node = node};
        *bucket = made;
        lost->count++;
    }
    pthread_mutex_unlock(&lost->lock);
    if (!added)
        free(made);
    return added;
}

static struct node *find(struct lost_handles *lost, uint64_t inode, uint64_t fh) {
    struct node *node = NULL;
    pthread_mutex_lock(&lost->lock);
    for (const struct lost *at = *bucket_of(lost, inode); at && !node; at = at->next)
        if (at->inode == inode && at->fh == fh && !at->nameless) {
            node = at->node;
            atomic_fetch_add(&node->refs, 1);
        }
    pthread_mutex_unlock(&lost->lock);
    return node;
}

/* As an OPEN, which it is not: it is counted by nothing. */
static int open_again(struct kvfs_plane *plane, uint64_t inode, struct node **out) {
    struct kvfs_record record;
    int r = node_open(plane, inode, user_get(plane, 0), false, &record, out);
    if (r == 0 && record.flags & KVFS_INODE_SEALED)
        atomic_fetch_sub(&plane->count.opens_found, 1);
    return r;
}

static void unopen(struct kvfs_plane *plane, struct node *node) {
    struct shard *shard = shard_of(plane, node->inode);
    pthread_mutex_lock(&shard->lock);
    node_unopen(plane, node, user_get(plane, 0), false);
    pthread_mutex_unlock(&shard->lock);
}

int lost_read(struct kvfs_plane *plane, bool counted, uint64_t inode, uint64_t fh, struct node **out) {
    struct kvfs_record record;
    counted = counted && plane->lost && inode < plane->lost->inode_end;
    if (counted && (*out = find(plane->lost, inode, fh)))
        return 0;
    if (is_foreign(inode) || kvfs_table_find_inode(plane->table, inode, &record) < 0 || !(record.flags & KVFS_INODE_SEALED) || !S_ISREG(record.mode))
        return -EBADF;
    if (!counted) {
        *out = node_get(plane, inode, true);
        return *out ? 0 : -ENOMEM;
    }
    int r = open_again(plane, inode, out);
    if (r < 0)
        return r == -ESTALE ? -EBADF : r;
    atomic_fetch_add(&(*out)->refs, 1);
    if (!add(plane->lost, *out, fh, false)) { /* two READs at a time */
        unopen(plane, *out);
        node_put(plane, *out);
    }
    return 0;
}

void lost_keep(struct kvfs_plane *plane, uint64_t inode) {
    struct kvfs_record record;
    struct node *node;
    if (!plane->lost || inode >= plane->lost->inode_end || !names_are_asked() || kvfs_table_find_inode(plane->table, inode, &record) < 0 ||
        (record.flags & (KVFS_INODE_SEALED | KVFS_INODE_NAMELESS)) != KVFS_INODE_SEALED || open_again(plane, inode, &node) < 0)
        return;
    if (!add(plane->lost, node, 0, true)) {
        unopen(plane, node);
        node_put(plane, node);
    }
}

static void closed(struct kvfs_plane *plane, struct node *node) {
    unopen(plane, node);
    node_released(plane, node, false);
    node_put(plane, node);
}

/* Out of the list; the caller's now. */
static struct node *take(struct lost_handles *lost, uint64_t inode, bool any, uint64_t fh) {
    struct node *node = NULL;
    pthread_mutex_lock(&lost->lock);
    for (struct lost **link = bucket_of(lost, inode); *link && !node; link = node ? link : &(*link)->next) {
        struct lost *at = *link;
        if (at->inode == inode && (any || (at->fh == fh && !at->nameless))) {
            node = at->node;
            *link = at->next;
            lost->count--;
            free(at);
        }
    }
    pthread_mutex_unlock(&lost->lock);
    return node;
}

void lost_close(struct kvfs_plane *plane, uint64_t inode, uint64_t fh) {
    struct node *node = plane->lost ? take(plane->lost, inode, false, fh) : NULL;
    if (node)
        closed(plane, node);
}

void lost_forget(struct kvfs_plane *plane, uint64_t inode) {
    struct node *node;
    struct kvfs_record record;
    if (!plane->lost || inode >= plane->lost->inode_end)
        return;
    bool found = false;
    for (; (node = take(plane->lost, inode, true, 0)); found = true)
        closed(plane, node);
    /* One that an earlier daemon kept. A file that is open here says so by itself, at its last close. */
    if (!found && kvfs_table_find_inode(plane->table, inode, &record) == 0 && record.flags & KVFS_INODE_NAMELESS)
        name_let_go(plane, inode);
}

void lost_end(struct kvfs_plane *plane) {
    if (!plane->lost)
        return;
    for (uint32_t i = 0; i < BUCKETS; i++)
        for (struct lost *at; (at = plane->lost->buckets[i]);) {
            plane->lost->buckets[i] = at->next;
            free(at);
        }
    pthread_mutex_destroy(&plane->lost->lock);
    free(plane->lost);
    plane->lost = NULL;
}
