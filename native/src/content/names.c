/* What the control plane tells the data plane about names and files: block table changes that must agree with who has what open. */
#include "internal.h"

#include <time.h>
#include <unistd.h>

static const char *record_name(const void *record) { return (const char *)record + sizeof(struct kvfs_inode_record); }

/* With the shard's lock held. */
static int open_state(struct kvfs_plane *plane, struct shard *shard, uint64_t inode, struct node **out) {
    struct node *node = shard->nodes[(inode * 0x9e3779b97f4a7c15ull) >> 54];
    while (node && node->inode != inode)
        node = node->next;
    if (!node)
        return 0;
    pthread_mutex_lock(&node->lock);
    bool file = node->file && !node->file->discarded, rewriting = node->rewriting;
    pthread_mutex_unlock(&node->lock);
    *out = node;
    if (file || !node->handles)
        return file ? KVFS_BEING_WRITTEN : KVFS_NOT_OPEN;
    return !node->writers && !rewriting && hold_may_go(plane, node) ? KVFS_OPEN_BEYOND_SHARE : KVFS_OPEN;
}

int kvfs_inode_is_open(struct kvfs_plane *plane, uint64_t inode) {
    struct shard *shard = shard_of(plane, inode);
    pthread_mutex_lock(&shard->lock);
    struct node *node;
    int state = open_state(plane, shard, inode, &node);
    pthread_mutex_unlock(&shard->lock);
    return state;
}

/* An inode that lost its name: it lives on only for open handles. Nobody will seal what is staged. */
static int nameless(struct kvfs_plane *plane, uint64_t inode, bool linger, int (*change)(struct kvfs_plane *, uint64_t, int keep, const void *),
                    const void *argument) {
    struct shard *shard = shard_of(plane, inode);
    pthread_mutex_lock(&shard->lock);
    struct node *node = shard->nodes[(inode * 0x9e3779b97f4a7c15ull) >> 54];
    while (node && node->inode != inode)
        node = node->next;
    int keep = node && node->handles > 0;
    struct kvfs_record record;
    if (!keep && linger && kvfs_table_find_inode(plane->table, inode, &record) == 0 && record.flags & KVFS_INODE_SEALED) {
        bool written = false;
        if (node) {
            pthread_mutex_lock(&node->lock);
            written = node->file != NULL;
            pthread_mutex_unlock(&node->lock);
        }
        keep = !written;
    }
    int r = change(plane, inode, keep, argument);
    pthread_mutex_unlock(&shard->lock);
    if (r < 0)
        return r;
    if (!keep)
        kvfs_file_discard(plane, inode);
    return keep;
}

static int change_remove(struct kvfs_plane *plane, uint64_t inode, int keep, const void *argument) {
    (void)argument;
    return kvfs_table_remove(plane->table, inode, keep);
}

static uint32_t tick_now(struct kvfs_plane *plane) { return atomic_load_explicit(&plane->tick, memory_order_relaxed); }

static int change_put(struct kvfs_plane *plane, uint64_t inode, int keep, const void *record) {
    (void)inode;
    struct kvfs_inode_record r;
    struct kvfs_record to;
    memcpy(&r, record, sizeof(r));
    record_from_inode(&r, &to);
    struct kvfs_record before, after;
    bool known = kvfs_table_find_inode(plane->table, to.inode, &before) == 0;
    int error = kvfs_table_put(plane->table, &to, record_name(record), r.name_size, keep);
    /* A new inode is used now; one that is renamed has another slot, and was used as before. */
    if (error == 0 && kvfs_table_find_inode(plane->table, to.inode, &after) == 0 && !(known && after.slot == before.slot)) {
        uint32_t use = known ? atomic_load_explicit(&plane->uses[before.slot], memory_order_relaxed) : tick_now(plane) << 8;
        atomic_store_explicit(&plane->uses[after.slot], use, memory_order_relaxed);
    }
    return error;
}

int kvfs_name_put(struct kvfs_plane *plane, const void *record, uint64_t replaced) {
    if (replaced)
        return nameless(plane, replaced, true, change_put, record);
    return change_put(plane, 0, 0, record);
}

int kvfs_inode_update(struct kvfs_plane *plane, const void *record) {
    struct kvfs_inode_record r;
    struct kvfs_record to;
    memcpy(&r, record, sizeof(r));
    record_from_inode(&r, &to);
    return kvfs_table_update(plane->table, &to);
}

int kvfs_inode_move(struct kvfs_plane *plane, const void *record) {
    struct kvfs_inode_record r;
    struct kvfs_record to;
    memcpy(&r, record, sizeof(r));
    record_from_inode(&r, &to);
    struct shard *shard = shard_of(plane, to.inode);
    pthread_mutex_lock(&shard->lock);
    struct node *node;
    int error = open_state(plane, shard, to.inode, &node) == KVFS_BEING_WRITTEN ? -EBUSY : kvfs_table_update(plane->table, &to);
    pthread_mutex_unlock(&shard->lock);
    return error;
}

int kvfs_inode_remove(struct kvfs_plane *plane, uint64_t inode) { return nameless(plane, inode, false, change_remove, NULL); }

int kvfs_inode_evict(struct kvfs_plane *plane, const uint64_t *inodes, uint32_t count, uint8_t *busy) {
    int total = 0;
    for (uint32_t i = 0; i < count; i++) {
        struct shard *shard = shard_of(plane, inodes[i]);
        pthread_mutex_lock(&shard->lock);
        struct node *node;
        int state = open_state(plane, shard, inodes[i], &node);
        busy[i] = state == KVFS_OPEN || state == KVFS_BEING_WRITTEN;
        if (!busy[i])
            kvfs_table_remove(plane->table, inodes[i], 0);
        if (state == KVFS_OPEN_BEYOND_SHARE)
            hold_evict(plane, node); /* its handles find no record: they read EIO */
        pthread_mutex_unlock(&shard->lock);
        total += busy[i];
    }
    return total;
}

/* ---- uses: what eviction goes by. Hints: a word may be another block's for a moment, or miss one of two opens at once. ---- */

static void use_add(struct kvfs_plane *plane, uint32_t slot) {
    uint32_t hits = atomic_load_explicit(&plane->uses[slot], memory_order_relaxed) & 0xff;
    atomic_store_explicit(&plane->uses[slot], tick_now(plane) << 8 | (hits < 255 ? hits + 1 : hits), memory_order_relaxed);
}

void found_add(struct kvfs_plane *plane, const struct kvfs_record *record) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME_COARSE, &now);
    int64_t age = now.tv_sec - record->mtime_ns / 1000000000;
    uint32_t bucket = age > 0 ? 64 - (uint32_t)__builtin_clzll((uint64_t)age) : 0;
    atomic_fetch_add_explicit(&plane->found_ages[bucket < KVFS_AGES ? bucket : KVFS_AGES - 1], 1, memory_order_relaxed);
    use_add(plane, record->slot);
}

/* ---- misses: names that were asked for, but for those that were then made ---- */

uint64_t name_hash(struct kvfs_plane *plane, uint64_t parent, const char *name, size_t size) {
    uint64_t low, high;
    kvfs_name_key(parent, name, (uint32_t)size, plane->config.secret, &low, &high);
    return low | 1;
}

/* Two names that share a place: the older one counts as missed, whether it is made or not. */
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

int kvfs_inode_touch(struct kvfs_plane *plane, const uint64_t *inodes, uint32_t count) {
    for (uint32_t i = 0; i < count; i++) {
        struct kvfs_record record;
        if (kvfs_table_find_inode(plane->table, inodes[i], &record) == 0)
            found_add(plane, &record);
    }
    return 0;
}

void kvfs_set_tick(struct kvfs_plane *plane, uint32_t tick) { atomic_store_explicit(&plane->tick, tick & 0xffffff, memory_order_relaxed); }

/* ---- files ---- */

/* Give the node a file, unless it has one. The node's reference is the file's from then on. */
static int file_install(struct kvfs_plane *plane, struct node *node) {
    node->file = file_new();
    if (!node->file)
        return -ENOMEM;
    atomic_fetch_add(&node->refs, 1);
    COUNT(plane, staged_files, 1);
    kvfs_table_count_written(plane->table, node->inode, 1);
    return 0;
}

int kvfs_file_create(struct kvfs_plane *plane, uint64_t inode) {
    struct node *node = node_get(plane, inode, true);
    if (!node)
        return -ENOMEM;
    pthread_mutex_lock(&node->lock);
    int r = node->file ? -EEXIST : file_install(plane, node);
    if (r == 0)
        node->file->dirty = true;
    pthread_mutex_unlock(&node->lock);
    node_put(plane, node);
    return r;
}

struct rewrite_job { struct job job; struct node *node; uint64_t from_ns; bool keep_content; };

static int rewrite(struct kvfs_plane *plane, struct ring *ring, struct node *node) {
    struct kvfs_record record;
    struct desc *desc = NULL;
    int r = -EBADMSG;
    for (int attempt = 0; attempt < 3 && r == -EBADMSG; attempt++) {
        r = kvfs_table_find_inode(plane->table, node->inode, &record);
        if (r == 0 && !(record.flags & KVFS_INODE_SEALED))
            r = -ENOENT;
        if (r == 0)
            r = desc_load(plane, ring, &record, &desc);
    }
    if (r == -EBADMSG) {
        COUNT(plane, checksum_errors, 1);
        event_add(plane, KVFS_EVENT_BAD_BLOCK, node->inode, record.segment);
    }
    if (r < 0)
        return r;
    struct shard *shard = shard_of(plane, node->inode);
    pthread_mutex_lock(&shard->lock);
    struct kvfs_record now;
    r = kvfs_table_find_inode(plane->table, node->inode, &now);
    if (r == 0 && (now.generation != record.generation || now.segment != record.segment || now.page != record.page))
        r = -EAGAIN; /* carried over meanwhile */
    if (r == 0) {
        pthread_mutex_lock(&node->lock);
        if (!node->file) {
            r = file_install(plane, node);
            if (r == 0 && (r = file_from_desc(plane, node, desc)) < 0) {
                file_free(plane, node);
                atomic_fetch_sub(&node->refs, 1); /* never the last: the job holds one */
            }
            if (r == 0)
                node->file->mtime_ns = now.mtime_ns;
        }
        pthread_mutex_unlock(&node->lock);
    }
    pthread_mutex_unlock(&shard->lock);
    desc_put(desc);
    return r;
}

int file_reopen(struct kvfs_plane *plane, struct ring *ring, struct node *node) {
    const uint64_t until = now_ns() + plane->config.request_timeout_ms * 1000000ull;
    int r;
    do
        r = rewrite(plane, ring, node);
    while (r == -EAGAIN && now_ns() < until);
    return r == -EAGAIN ? -EIO : r;
}

/* With the node's lock held. */
static int rewrite_empty(struct kvfs_plane *plane, struct node *node) {
    if (node->file) /* frozen while a seal or spill is under way: the caller comes again */
        return node->file->sealing || node->file->spilling || node->file->slab ? -EBUSY : file_truncate(plane, node, 0);
    int r = file_install(plane, node);
    if (r == 0)
        node->file->dirty = true;
    return r;
}

static void rewrite_job_run(struct kvfs_plane *plane, struct ring *ring, struct job *base) {
    struct rewrite_job *job = (struct rewrite_job *)base;
    uint64_t now = now_ns();
    if (job->from_ns > now) /* LEASE_S at most */
        usleep((useconds_t)((job->from_ns - now) / 1000 + 1));
    int r;
    if (job->keep_content) {
        r = file_reopen(plane, ring, job->node);
    } else {
        pthread_mutex_lock(&job->node->lock);
        r = rewrite_empty(plane, job->node);
        pthread_mutex_unlock(&job->node->lock);
    }
    pthread_mutex_lock(&job->node->lock);
    job->node->rewriting = false; /* the file itself says so from here on */
    pthread_mutex_unlock(&job->node->lock);
    uint64_t cookie = job->job.cookie;
    node_put(plane, job->node);
    free(job);
    complete(plane, cookie, r);
}

int kvfs_file_rewrite(struct kvfs_plane *plane, uint64_t cookie, uint64_t inode, int keep_content) {
    struct node *node = node_get(plane, inode, true);
    if (!node)
        return -ENOMEM;
    int r = 0;
    pthread_mutex_lock(&node->lock);
    uint64_t from_ns = node->file ? 0 : node->lease_until_ns;
    bool done = node->file || (!keep_content && from_ns <= now_ns());
    if (done && !keep_content)
        r = rewrite_empty(plane, node);
    node->rewriting = !done;
    pthread_mutex_unlock(&node->lock);
    COUNT(plane, jobs_in_flight, 1);
    if (done) {
        node_put(plane, node);
        complete(plane, cookie, r);
        return 0;
    }
    struct rewrite_job *job = calloc(1, sizeof(*job));
    if (!job) {
        pthread_mutex_lock(&node->lock);
        node->rewriting = false;
        pthread_mutex_unlock(&node->lock);
        atomic_fetch_sub(&plane->count.jobs_in_flight, 1);
        node_put(plane, node);
        return -ENOMEM;
    }
    job->job.run = rewrite_job_run;
    job->job.cookie = cookie;
    job->node = node;
    job->from_ns = from_ns;
    job->keep_content = keep_content;
    pool_add(&plane->store, &job->job);
    return 0;
}

static int with_file(struct kvfs_plane *plane, uint64_t inode, int (*change)(struct kvfs_plane *, struct node *, int64_t), int64_t value) {
    struct node *node = node_get(plane, inode, false);
    if (!node)
        return -ENOENT;
    pthread_mutex_lock(&node->lock);
    int r = node->file ? change(plane, node, value) : -ENOENT;
    pthread_mutex_unlock(&node->lock);
    node_put(plane, node);
    return r;
}

static int change_size(struct kvfs_plane *plane, struct node *node, int64_t size) {
    if (node->file->sealing || node->file->spilling || node->file->slab)
        return -EBUSY; /* a slab: kvfs_slab_resize */
    struct file *file = node->file;
    if ((uint64_t)size > file->size && writer_lacks(plane, file->payer, (uint64_t)size - file->size))
        return -EDQUOT;
    return file_truncate(plane, node, (uint64_t)size);
}

int file_allocate(struct kvfs_plane *plane, struct node *node, uint64_t size) {
    struct file *file = node->file;
    if (size <= file->size)
        return 0;
    if (file->sealing || file->slab)
        return -EBUSY;
    int r = space_ask(plane, file->payer, size - file->size);
    return r < 0 ? r : file_truncate(plane, node, size);
}

static int change_allocation(struct kvfs_plane *plane, struct node *node, int64_t size) { return file_allocate(plane, node, (uint64_t)size); }

static int change_mtime(struct kvfs_plane *plane, struct node *node, int64_t mtime_ns) {
    (void)plane;
    node->file->mtime_ns = mtime_ns;
    return 0;
}

int kvfs_file_truncate(struct kvfs_plane *plane, uint64_t inode, uint64_t size) {
    return size > INT64_MAX ? -EFBIG : with_file(plane, inode, change_size, (int64_t)size);
}

int kvfs_file_allocate(struct kvfs_plane *plane, uint64_t inode, uint64_t size) {
    return size > INT64_MAX ? -EFBIG : with_file(plane, inode, change_allocation, (int64_t)size);
}

int kvfs_file_set_mtime(struct kvfs_plane *plane, uint64_t inode, int64_t mtime_ns) { return with_file(plane, inode, change_mtime, mtime_ns); }

int kvfs_file_discard(struct kvfs_plane *plane, uint64_t inode) {
    struct node *node = node_get(plane, inode, false);
    if (!node)
        return -ENOENT;
    bool freed = false;
    pthread_mutex_lock(&node->lock);
    if (node->file) {
        node->file->discarded = true;
        if (!node->file->sealing && !node->file->spilling) {
            file_free(plane, node);
            freed = true;
        }
    }
    pthread_mutex_unlock(&node->lock);
    if (freed) {
        node_put(plane, node);
        memory_unpark(plane);
    }
    node_put(plane, node);
    return 0;
}

uint32_t kvfs_dirty_files(struct kvfs_plane *plane, uint64_t *out, uint32_t capacity) {
    uint32_t count = 0;
    for (uint32_t s = 0; s < SHARDS; s++) {
        struct shard *shard = &plane->shards[s];
        pthread_mutex_lock(&shard->lock);
        for (uint32_t b = 0; b < sizeof(shard->nodes) / sizeof(shard->nodes[0]); b++)
            for (struct node *node = shard->nodes[b]; node; node = node->next) {
                pthread_mutex_lock(&node->lock);
                bool dirty = node->file && node->file->dirty && !node->file->discarded;
                pthread_mutex_unlock(&node->lock);
                if (dirty && count++ < capacity)
                    out[count - 1] = node->inode;
            }
        pthread_mutex_unlock(&shard->lock);
    }
    return count;
}

int kvfs_file_extents(struct kvfs_plane *plane, uint64_t inode, struct kvfs_extent *out, uint32_t capacity) {
    struct node *node = node_get(plane, inode, false);
    if (!node)
        return -ENOENT;
    pthread_mutex_lock(&node->lock);
    int r = -ENOENT;
    if (node->file) {
        r = (int)node->file->placed_count;
        copy_bytes(out, node->file->placed, min_u64(capacity, node->file->placed_count) * sizeof(*out));
    }
    pthread_mutex_unlock(&node->lock);
    node_put(plane, node);
    return r;
}

void kvfs_set_space(struct kvfs_plane *plane, uint64_t bytes, int error) {
    atomic_store(&plane->space_error, error);
    atomic_store(&plane->space, bytes);
}
