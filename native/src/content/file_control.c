/* The control plane's requests on files being written: create, rewrite, cut, give up. */
#include "content/content.h"

#include <unistd.h>

/* Give the node a file, unless it has one. The node's reference belongs to the file from then on. */
static int file_install(struct kvfs_plane *plane, struct node *node) {
    node->file = file_new(node->inode);
    if (!node->file)
        return -ENOMEM;
    int r = written_add(plane, node->inode, &node->file->written_place);
    if (r < 0) {
        free(node->file);
        node->file = NULL;
        return r;
    }
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

struct rewrite_job {
    struct job job;
    struct node *node;
    uint64_t from_ns;
    bool keep_content;
};

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
        r = -EAGAIN; /* copied to another segment meanwhile */
    if (r == 0) {
        pthread_mutex_lock(&node->lock);
        if (!node->file) {
            r = file_install(plane, node);
            if (r == 0 && (r = file_from_desc(plane, node, desc)) < 0) {
                file_free(plane, node);
                atomic_fetch_sub(&node->refs, 1); /* never the last reference: the job holds one */
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
    if (node->file) /* frozen during a seal or spill: the caller tries again */
        return node->file->sealing || node->file->spilling || node->file->slab ? -EBUSY : file_truncate(plane, node, 0);
    int r = file_install(plane, node);
    if (r == 0)
        node->file->dirty = true;
    return r;
}

static void rewrite_job_run(struct kvfs_plane *plane, struct ring *ring, struct job *base) {
    struct rewrite_job *job = (struct rewrite_job *)base;
    uint64_t now = now_ns();
    if (job->from_ns > now) /* PROMISE_S at most */
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
    job->node->rewriting = false; /* the file itself blocks others from here on */
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
    uint64_t from_ns = node->file ? 0 : node->promised_until_ns;
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

int64_t kvfs_file_size(struct kvfs_plane *plane, uint64_t inode) {
    struct node *node = node_get(plane, inode, false);
    int64_t r = -ENOENT;
    if (!node)
        return r;
    pthread_mutex_lock(&node->lock);
    if (node->file)
        r = (int64_t)node->file->size;
    pthread_mutex_unlock(&node->lock);
    node_put(plane, node);
    return r;
}
