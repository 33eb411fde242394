/* Slabs, by the control plane's requests: grow, shrink, become an ordinary file. */
#include "content/slab.h"

#include <unistd.h>

uint64_t slab_capacity(const struct slab *slab) { return slab_pages(slab) * PAGE; }

/* Whether it could become an ordinary file. With the node's lock held. */
static bool slab_may_be_file(struct kvfs_plane *plane, const struct file *file) {
    const struct slab *slab = file->slab;
    return !slab->chosen && !atomic_load(&slab->failed) && file->size <= file_size_max(plane);
}

/* Whether the slab goes with its last descriptor, even if it has a name. With the node's lock held. */
bool slab_passes(struct kvfs_plane *plane, const struct file *file) { return file->slab->overwritten || !slab_may_be_file(plane, file); }

int64_t kvfs_slab_pages(struct kvfs_plane *plane, uint64_t inode) {
    struct node *node = node_get(plane, inode, false);
    int64_t r = -ENOENT;
    if (!node)
        return r;
    pthread_mutex_lock(&node->lock);
    if (node->file)
        r = node->file->slab ? (int64_t)slab_pages(node->file->slab) : file_untouched(node->file) ? 0 : -EBUSY;
    pthread_mutex_unlock(&node->lock);
    node_put(plane, node);
    return r;
}

int kvfs_slab_wanted(struct kvfs_plane *plane, uint64_t inode, uint64_t size) {
    struct node *node = node_get(plane, inode, false);
    if (!node)
        return 0;
    pthread_mutex_lock(&node->lock);
    int wanted = size >= KVFS_SLAB_MIN && node->file && node->file->direct && file_untouched(node->file);
    pthread_mutex_unlock(&node->lock);
    node_put(plane, node);
    return wanted;
}

static struct slab *slab_new(struct kvfs_plane *plane, uint64_t inode, uint32_t first_segment, uint32_t run_pages) {
    struct slab *slab = calloc(1, sizeof(*slab));
    if (!slab)
        return NULL;
    slab->runs = calloc(plane->config.segment_count, sizeof(*slab->runs));
    if (!slab->runs) {
        free(slab);
        return NULL;
    }
    atomic_store(&slab->refs, 1);
    slab->plane = plane;
    slab->inode = inode;
    slab->first_segment = first_segment;
    slab->run_pages = run_pages;
    return slab;
}

/* With the node's lock held. */
static int slab_grow(struct kvfs_plane *plane, struct slab *slab, const struct kvfs_run *runs, uint32_t count) {
    if (count > plane->config.segment_count - slab->run_count || slab_pages(slab) + (uint64_t)count * slab->run_pages > UINT32_MAX)
        return -EFBIG;
    for (uint32_t i = 0; i < count; i++) {
        atomic_ullong *written = calloc((slab->run_pages + 63) / 64, sizeof(*written));
        if (!written) {
            while (i-- > 0)
                free(slab->runs[slab->run_count + i].written);
            return -ENOMEM;
        }
        slab->runs[slab->run_count + i] = (struct slab_run){runs[i].generation, runs[i].segment, runs[i].page, written};
    }
    slab->run_count += count;
    return 0;
}

int kvfs_slab_extend(struct kvfs_plane *plane, uint64_t inode, uint64_t size, int chosen, const struct kvfs_run *runs, uint32_t run_count) {
    for (uint32_t i = 0; i < run_count; i++)
        if (runs[i].segment >= plane->config.segment_count || runs[i].page == 0 || runs[i].page_count != runs[0].page_count ||
            runs[0].page_count == 0 || (uint64_t)runs[i].page + runs[i].page_count > plane->array.geometry.segment_pages)
            return -ERANGE;
    struct node *node = node_get(plane, inode, false);
    if (!node)
        return -ENOENT;
    struct slab *fresh = NULL;
    pthread_mutex_lock(&node->lock);
    struct file *file = node->file;
    int r = !file || file->discarded ? -ENOENT : file->slab && file->sealing ? -EAGAIN : !file->slab && !file_untouched(file) ? -EBUSY : 0;
    if (r == 0 && !file->slab && run_count && !(fresh = slab_new(plane, inode, runs[0].segment, runs[0].page_count)))
        r = -ENOMEM;
    struct slab *slab = fresh ? fresh : r == 0 ? file->slab : NULL;
    if (r == 0 && (!slab || (run_count && runs[0].page_count != slab->run_pages)))
        r = -ERANGE;
    if (r == 0)
        r = slab_grow(plane, slab, runs, run_count);
    if (r == 0 && size > slab_pages(slab) * PAGE)
        r = -ERANGE;
    if (r == 0 && file->size > slab_pages(slab) * PAGE)
        r = -EBUSY; /* truncated to more while its segments were taken: not the file that they were for */
    if (r == 0) {
        slab->chosen |= chosen != 0;
        written_is_sealed(plane, file, false);
        file->slab = slab;
        if (size > file->size)
            file->size = size;
        file->dirty = false;
        file_count(plane, file);
        fresh = NULL;
    }
    pthread_mutex_unlock(&node->lock);
    if (fresh) { /* never seen by anybody: no event */
        for (uint32_t i = 0; i < fresh->run_count; i++)
            free(fresh->runs[i].written);
        free(fresh->runs);
        free(fresh);
    }
    node_put(plane, node);
    return r;
}

int kvfs_slab_close(struct kvfs_plane *plane, uint64_t inode) {
    struct node *node = node_get(plane, inode, false);
    if (!node)
        return -ENOENT;
    struct shard *shard = shard_of(plane, inode);
    kvfs_names_begin(plane->names); /* the table has one writer at a time (I7) */
    pthread_mutex_lock(&shard->lock);
    pthread_mutex_lock(&node->lock);
    int r = node->handles ? -EBUSY : node->file && node->file->slab ? 0 : -ENOENT;
    pthread_mutex_unlock(&node->lock);
    if (r == 0)
        r = kvfs_table_remove(plane->table, inode, 0);
    pthread_mutex_unlock(&shard->lock);
    kvfs_names_end(plane->names);
    if (r == 0)
        kvfs_file_discard(plane, inode);
    node_put(plane, node);
    return r;
}

int kvfs_slab_answer(struct kvfs_plane *plane, uint64_t inode) {
    struct node *node = node_get(plane, inode, false);
    if (!node)
        return -ENOENT;
    pthread_mutex_lock(&node->lock);
    struct file *file = node->file;
    if (file) {
        file->slab_asked = false;
        file->slab_refused = !file->slab;
        if (!file->sealing)
            file_unpark(plane, file);
    }
    pthread_mutex_unlock(&node->lock);
    node_put(plane, node);
    return file ? 0 : -ENOENT;
}

int kvfs_slab_fail(struct kvfs_plane *plane, uint64_t inode) {
    struct node *node = node_get(plane, inode, false);
    if (!node)
        return -ENOENT;
    pthread_mutex_lock(&node->lock);
    bool slab = node->file && node->file->slab;
    if (slab)
        atomic_store(&node->file->slab->failed, true);
    pthread_mutex_unlock(&node->lock);
    node_put(plane, node);
    return slab ? 0 : -ENOENT;
}

/* ---- jobs: a slab gets another size, or becomes an ordinary file ---- */

struct slab_job {
    struct job job;
    struct node *node;
    uint64_t size;
    bool writers_stay;
};

/* With the node's lock held. True: the file was given up meanwhile and is freed; the caller puts the node once more. */
static bool thaw(struct kvfs_plane *plane, struct node *node) {
    struct file *file = node->file;
    assert(file->sealing);
    file->sealing = false;
    file_unpark(plane, file);
    if (file->discarded)
        file_free(plane, node);
    return !node->file;
}

/* Stops all writes. With the node's lock held, which is released while it waits. After an error the slab is thawed, and `gone` is thaw()'s result. */
static int freeze(struct kvfs_plane *plane, struct node *node, bool *gone) {
    uint64_t until = now_ns() + plane->array.io_timeout_ms * 2000000ull;
    struct file *file = node->file;
    if (!file || !file->slab || file->discarded)
        return -ENOENT;
    if (file->sealing)
        return -EBUSY;
    file->sealing = true; /* nobody frees it meanwhile */
    while (file->slab->writing) {
        pthread_mutex_unlock(&node->lock);
        usleep(200);
        pthread_mutex_lock(&node->lock);
        if (now_ns() > until) {
            *gone = thaw(plane, node);
            return -EBUSY;
        }
    }
    return 0;
}

static int resize(struct kvfs_plane *plane, struct ring *ring, struct node *node, uint64_t size) {
    struct slab *slab = node->file->slab;
    uint64_t before = node->file->size;
    int r = size > slab_pages(slab) * PAGE ? -ENOSPC : 0;
    if (r == 0 && size < before) {
        if (size % PAGE && slab_page_written(slab, size / PAGE)) {
            struct slot *slot = slot_get_extra(&plane->staging);
            r = slot ? slab_pages_load(ring, slab, size / PAGE, 1, slot, 0) : -ENOMEM;
            if (r == 0) {
                memset(slot->data + size % PAGE, 0, PAGE - size % PAGE);
                r = slab_pages_io(ring, slab, true, size / PAGE, 1, slot, 0);
            }
            slot_put(slot);
        }
        for (uint64_t page = pages_of(size); r == 0 && page < pages_of(before); page++)
            slab_page_mark(slab, page, false);
    }
    return r;
}

static void job_end(struct kvfs_plane *plane, struct slab_job *job, bool gone, int r) {
    uint64_t cookie = job->job.cookie;
    struct node *node = job->node;
    free(job);
    if (gone)
        node_put(plane, node);
    node_put(plane, node);
    complete(plane, cookie, r);
}

static void resize_job(struct kvfs_plane *plane, struct ring *ring, struct job *base) {
    struct slab_job *job = (struct slab_job *)base;
    struct node *node = job->node;
    bool gone = false;
    pthread_mutex_lock(&node->lock);
    int r = freeze(plane, node, &gone);
    if (r == 0) {
        pthread_mutex_unlock(&node->lock);
        r = resize(plane, ring, node, job->size);
        pthread_mutex_lock(&node->lock);
        if (r == 0) {
            struct timespec ts;
            clock_gettime(CLOCK_REALTIME, &ts);
            node->file->mtime_ns = ts.tv_sec * 1000000000ll + ts.tv_nsec;
            node->file->size = job->size;
        }
        gone = thaw(plane, node);
    }
    pthread_mutex_unlock(&node->lock);
    job_end(plane, job, gone, r);
}

/* Computes the leaves of a chunk, and writes zeros to pages that were never written. 1: it is placed; 0: a hole. */
static int convert_chunk(struct kvfs_plane *plane, struct ring *ring, struct slab *slab, struct file *file, uint32_t index) {
    uint64_t first = (uint64_t)index * CHUNK_PAGES, last = min_u64(first + CHUNK_PAGES, pages_of(file->size));
    uint64_t size = min_u64(CHUNK_SIZE, file->size - index * CHUNK_SIZE);
    bool any = false;
    for (uint64_t page = first; page < last && !any; page++)
        any = slab_page_written(slab, page);
    if (!any)
        return 0;
    struct slot *slot = slot_get_extra(&plane->staging);
    int r = slot ? slab_pages_load(ring, slab, first, last - first, slot, 0) : -ENOMEM;
    for (uint64_t at = first, stop; at < last && r == 0; at = stop) {
        bool written = slab_page_written(slab, at);
        stop = slab_stretch(slab, at, last, written);
        if (!written)
            r = slab_pages_io(ring, slab, true, at, stop - at, slot, (at - first) * PAGE);
    }
    if (r == 0)
        kvfs_leaf_checksums(slot->data, size, plane->config.secret, &file->leaves[first]);
    slot_put(slot);
    return r < 0 ? r : 1;
}

/* Returns with the node's lock held, so nobody finds a file that is frozen. */
static int convert(struct kvfs_plane *plane, struct ring *ring, struct node *node) {
    struct file *file = node->file; /* frozen */
    struct slab *slab = file->slab;
    assert(file->sealing);
    assert(!slab->writing);
    uint64_t pages = pages_of(file->size);
    uint32_t chunks = (uint32_t)((pages + CHUNK_PAGES - 1) / CHUNK_PAGES), extents = 0;
    struct kvfs_extent *placed = malloc(slab->run_count * sizeof(*placed) + 1);
    uint8_t *states = calloc(chunks + 1, 1);
    int r = placed && states && chunks <= UINT32_MAX / 2 ? 0 : -ENOMEM;
    pthread_mutex_lock(&node->lock);
    if (r == 0)
        r = file_grow_chunks(file, chunks);
    if (r == 0)
        r = file_grow_leaves(file, (uint32_t)pages);
    pthread_mutex_unlock(&node->lock);
    for (uint32_t i = 0; i < chunks && r >= 0; i++) {
        r = convert_chunk(plane, ring, slab, file, i);
        states[i] = r == 1;
    }
    pthread_mutex_lock(&node->lock);
    if (r >= 0) {
        for (uint32_t i = 0; i < slab->run_count && (uint64_t)i * slab->run_pages < pages; i++) {
            const struct slab_run *run = &slab->runs[i];
            uint32_t from = i * slab->run_pages;
            placed[extents++] =
                (struct kvfs_extent){run->generation, run->segment, run->page, (uint32_t)min_u64(slab->run_pages, pages - from), from};
        }
        for (uint32_t i = 0; i < chunks; i++) {
            struct chunk *chunk = &file->chunks[i];
            if (states[i])
                chunk_place(node, chunk, (uint32_t)min_u64(CHUNK_SIZE, file->size - i * CHUNK_SIZE));
            else
                memset(chunk, 0, sizeof(*chunk));
        }
        free(file->placed);
        file->placed = placed;
        file->placed_count = extents;
        placed = NULL;
        bool tail = file->size % PAGE && states[chunks - 1];
        file->short_size = (uint32_t)(file->size % PAGE);
        file->short_page = tail ? (uint32_t)(file->size / PAGE) : UINT32_MAX;
        file->slab = NULL;
        file->dirty = true;
        file_count(plane, file);
        slab_put(slab);
    }
    free(placed);
    free(states);
    return r < 0 ? r : 0;
}

static void convert_job(struct kvfs_plane *plane, struct ring *ring, struct job *base) {
    struct slab_job *job = (struct slab_job *)base;
    struct node *node = job->node;
    struct shard *shard = shard_of(plane, node->inode);
    bool gone = false;
    pthread_mutex_lock(&shard->lock);
    bool writers = node->writers > 0 && !job->writers_stay;
    pthread_mutex_unlock(&shard->lock);
    pthread_mutex_lock(&node->lock);
    int r = writers ? -EBUSY : freeze(plane, node, &gone);
    if (r == 0) {
        if (job->writers_stay ? !slab_may_be_file(plane, node->file) : slab_passes(plane, node->file)) {
            r = -EPERM;
        } else {
            pthread_mutex_unlock(&node->lock);
            r = convert(plane, ring, node);
        }
        gone = thaw(plane, node);
    }
    pthread_mutex_unlock(&node->lock);
    job_end(plane, job, gone, r);
}

static int job_start(struct kvfs_plane *plane, uint64_t cookie, uint64_t inode, uint64_t size, bool writers_stay,
                     void (*run)(struct kvfs_plane *, struct ring *, struct job *)) {
    struct node *node = node_get(plane, inode, false);
    if (!node)
        return -ENOENT;
    struct slab_job *job = calloc(1, sizeof(*job));
    if (!job) {
        node_put(plane, node);
        return -ENOMEM;
    }
    job->job.run = run;
    job->job.cookie = cookie;
    job->node = node;
    job->size = size;
    job->writers_stay = writers_stay;
    COUNT(plane, jobs_in_flight, 1);
    pool_add(&plane->store, &job->job);
    return 0;
}

int kvfs_slab_resize(struct kvfs_plane *plane, uint64_t cookie, uint64_t inode, uint64_t size) {
    return job_start(plane, cookie, inode, size, false, resize_job);
}

int kvfs_slab_to_file(struct kvfs_plane *plane, uint64_t cookie, uint64_t inode, int writers_stay) {
    return job_start(plane, cookie, inode, 0, writers_stay != 0, convert_job);
}
