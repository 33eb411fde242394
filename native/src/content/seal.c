/* Writing blocks: seal, spill, and the copy that moves a block. Data and header are written before anything names them. */
#include "content/content.h"

struct write_job {
    struct job job;
    struct node *node;
    struct kvfs_run *runs;
    uint32_t run_count, header_pages;
    uint8_t *record, *ancestors;
    uint32_t record_size, ancestors_size;
    uint8_t *old_record;                   /* copy only */
    void (*done)(void *owner, int result); /* told the end; NULL: the completion of `cookie` is */
    void *owner;
    void *out_record;
    uint32_t out_capacity;
};

static void *copy_of(const void *data, uint64_t size) {
    void *copy = malloc(size + 1);
    if (copy && size)
        memcpy(copy, data, size);
    return copy;
}

static void write_job_free(struct write_job *job) {
    if (!job)
        return;
    free(job->runs);
    free(job->record);
    free(job->ancestors);
    free(job->old_record);
    free(job);
}

/* ---- places ---- */

struct range {
    uint32_t file_page, page_count;
};

/* Lay ranges of file pages over the runs in order. The first run begins with header_pages (0 for a spill), every other one with one. */
static int plan(const struct kvfs_run *runs, uint32_t run_count, uint32_t header_pages, bool sealing, const struct range *ranges,
                uint32_t range_count, struct kvfs_extent *out, uint32_t *out_count) {
    assert(run_count > 0);
    assert(sealing == (header_pages > 0));
    uint32_t run = 0, used = sealing ? header_pages : 1, count = 0;
    for (uint32_t i = 0; i < range_count; i++) {
        uint32_t page = ranges[i].file_page, left = ranges[i].page_count;
        while (left) {
            while (run < run_count && used >= runs[run].page_count)
                run++, used = 1;
            if (run == run_count)
                return -ERANGE;
            uint32_t size = (uint32_t)min_u64(left, runs[run].page_count - used);
            out[count++] = (struct kvfs_extent){runs[run].generation, runs[run].segment, runs[run].page + used, size, page};
            used += size, page += size, left -= size;
        }
    }
    *out_count = count;
    return 0;
}

static int extent_order(const void *a, const void *b) {
    const struct kvfs_extent *x = a, *y = b;
    return x->file_page < y->file_page ? -1 : x->file_page > y->file_page;
}

/* Sort, and join ranges that are contiguous on both sides. */
static uint32_t extents_join(struct kvfs_extent *extents, uint32_t count) {
    qsort(extents, count, sizeof(*extents), extent_order);
    uint32_t joined = 0;
    for (uint32_t i = 0; i < count; i++) {
        struct kvfs_extent *before = joined ? &extents[joined - 1] : NULL;
        const struct kvfs_extent *e = &extents[i];
        assert(!before || before->file_page + before->page_count <= e->file_page); /* a page lies in one place */
        if (before && before->segment == e->segment && before->generation == e->generation && before->page + before->page_count == e->page &&
            before->file_page + before->page_count == e->file_page)
            before->page_count += e->page_count;
        else
            extents[joined++] = *e;
    }
    return joined;
}

/* ---- writing ---- */

/* Memory that a silent device still holds is never used again (I5). */
static void keep_for_device(struct ring *ring, struct slot *slot) {
    if (!ring_idle(ring))
        slot_ref(slot);
}

static void drain(struct ring *ring) {
    uint64_t until = now_ns() + ring->array->io_timeout_ms * 1000000ull;
    while (!ring_idle(ring) && now_ns() < until) {
        ring_wait(ring, 50000000);
        ring_reap(ring);
    }
}

static const uint8_t *file_page_data(const struct file *file, uint32_t page) {
    assert(page / CHUNK_PAGES < file->chunk_count);
    assert(file->chunks[page / CHUNK_PAGES].state == CHUNK_STAGED);
    return file->chunks[page / CHUNK_PAGES].slot->data + (uint64_t)(page % CHUNK_PAGES) * PAGE;
}

/* Adds the data of the extents that lie in a run, from extents[*at] on: its memory and the slots that hold it. */
static void run_memory(const struct file *file, const struct kvfs_run *run, const struct kvfs_extent *extents, uint32_t extent_count, uint32_t *at,
                       struct iovec *iovs, uint32_t *count, struct slot **slots, uint32_t *slot_count) {
    for (; *at < extent_count; (*at)++) {
        const struct kvfs_extent *e = &extents[*at];
        if (e->segment != run->segment || e->page < run->page || e->page >= run->page + run->page_count)
            return;
        uint32_t page = e->file_page, end = page + e->page_count;
        while (page < end) {
            uint32_t stop = (uint32_t)min_u64(end, (uint64_t)(page / CHUNK_PAGES + 1) * CHUNK_PAGES);
            iovs[(*count)++] = (struct iovec){(void *)(uintptr_t)file_page_data(file, page), (stop - page) * PAGE};
            slots[(*slot_count)++] = file->chunks[page / CHUNK_PAGES].slot;
            page = stop;
        }
    }
}

/* Write all runs of a frozen file: header (or extent header) and the data of `extents`, which the plan laid into the runs in order. */
static int runs_write(struct kvfs_plane *plane, struct ring *ring, struct write_job *job, const struct file *file, struct desc *header,
                      const struct kvfs_extent *extents, uint32_t extent_count) {
    uint32_t chunk_total = 0;
    for (uint32_t i = 0; i < extent_count; i++)
        chunk_total += extents[i].page_count / CHUNK_PAGES + 2;
    struct iovec *iovs = malloc((chunk_total + 1) * sizeof(*iovs));
    struct slot **slots = malloc((chunk_total + 1) * sizeof(*slots));
    int r = iovs && slots ? 0 : -ENOMEM;
    uint32_t at = 0;
    for (uint32_t i = 0; i < job->run_count && r == 0; i++) {
        const struct kvfs_run *run = &job->runs[i];
        uint32_t count = 0, slot_count = 0;
        struct slot *small = NULL;
        if (i == 0 && header) {
            iovs[count++] = (struct iovec){header->header, header->header_pages * PAGE};
        } else {
            small = slot_get_extra(&plane->staging_small);
            if (!small) {
                r = -ENOMEM;
                break;
            }
            extent_header_build(&plane->array.geometry, small->data, job->node->inode, run, at < extent_count ? extents[at].file_page : 0);
            iovs[count++] = (struct iovec){small->data, PAGE};
            slots[slot_count++] = small;
        }
        run_memory(file, run, extents, extent_count, &at, iovs, &count, slots, &slot_count);
        r = blocking_io(ring, true, run->segment, run->page, iovs, count, slots, slot_count);
        if (r < 0) {
            drain(ring);
            for (uint32_t k = 0; k < slot_count; k++)
                keep_for_device(ring, slots[k]);
        }
        slot_put(small);
    }
    assert(r < 0 || at == extent_count); /* all that was planned */
    free(iovs);
    free(slots);
    return r;
}

static uint32_t staged_pages(const struct file *file, uint32_t index) {
    const struct chunk *chunk = &file->chunks[index];
    if (chunk->state != CHUNK_STAGED || file->size <= index * CHUNK_SIZE)
        return 0;
    return (uint32_t)pages_of(min_u64(chunk->filled, file->size - index * CHUNK_SIZE));
}

/* The ranges of file pages that a seal (or spill: only chunks marked) has to write. out may be NULL to count. */
static uint32_t ranges_collect(const struct file *file, bool spill, struct range *out, uint32_t *pages) {
    uint32_t count = 0, next = UINT32_MAX;
    *pages = 0;
    for (uint32_t i = 0; i < file->chunk_count && i * CHUNK_SIZE < file->size; i++) {
        uint32_t n = staged_pages(file, i);
        if (!spill && file->chunks[i].state == CHUNK_PLACED && file->chunks[i].reload)
            n = (uint32_t)pages_of(min_u64(file->chunks[i].filled, file->size - i * CHUNK_SIZE));
        if (spill && !file->chunks[i].spilling)
            n = 0;
        if (!n)
            continue;
        if (next == i * CHUNK_PAGES) {
            if (out)
                out[count - 1].page_count += n;
        } else {
            if (out)
                out[count] = (struct range){i * CHUNK_PAGES, n};
            count++;
        }
        *pages += n;
        next = i * CHUNK_PAGES + n;
    }
    return count;
}

static void leaves_of_range(struct kvfs_plane *plane, struct file *file, const struct range *range, bool last_short) {
    uint64_t pages = pages_of(file->size);
    for (uint32_t page = range->file_page, end = page + range->page_count; page < end;) {
        uint32_t stop = (uint32_t)min_u64(end, (uint64_t)(page / CHUNK_PAGES + 1) * CHUNK_PAGES);
        struct chunk *chunk = &file->chunks[page / CHUNK_PAGES];
        uint64_t inside = (uint64_t)(page % CHUNK_PAGES) * PAGE, size = (stop - page) * PAGE;
        if (chunk->filled < inside + size)
            memset(chunk->slot->data + chunk->filled, 0, inside + size - chunk->filled);
        if (last_short && stop == pages && file->size % PAGE) {
            size -= PAGE - file->size % PAGE;
            memset(chunk->slot->data + inside + size, 0, PAGE - file->size % PAGE);
        }
        kvfs_leaf_checksums(chunk->slot->data + inside, size, plane->config.secret, &file->leaves[page]);
        page = stop;
    }
}

/* The parts that a seal writes: the header, and the extents that lie in its runs. */
struct seal {
    struct desc *header;
    struct kvfs_extent *written;
    uint32_t written_count;
};

static void seal_free(struct seal *seal) {
    free(seal->written);
    desc_put(seal->header);
}

/* Leaf checksums of the pages that no extent covers: of holes. */
static void leaves_of_holes(const struct kvfs_plane *plane, struct file *file, const struct kvfs_extent *extents, uint32_t extent_count) {
    static const uint8_t zeros[KVFS_PAGE_SIZE];
    uint64_t zero_leaf;
    uint32_t leaf_count = (uint32_t)pages_of(file->size);
    kvfs_leaf_checksums(zeros, PAGE, plane->config.secret, &zero_leaf);
    for (uint32_t page = 0, i = 0; page < leaf_count; page++) {
        while (i < extent_count && extents[i].file_page + extents[i].page_count <= page)
            i++;
        if (i < extent_count && extents[i].file_page <= page) {
            page = extents[i].file_page + extents[i].page_count - 1;
            continue;
        }
        if (page == leaf_count - 1 && file->size % PAGE)
            kvfs_leaf_checksums(zeros, file->size % PAGE, plane->config.secret, &file->leaves[page]);
        else
            file->leaves[page] = zero_leaf;
    }
}

/* Sums the leaves of a frozen file, all chunks of which are staged or stay where they are, and makes its header. The caller frees *seal. */
static int seal_prepare(struct kvfs_plane *plane, const struct write_job *job, struct seal *seal) {
    struct file *file = job->node->file;
    uint32_t pages, range_count = ranges_collect(file, false, NULL, &pages), kept = file_kept_extents(file, true, NULL, 0);
    struct range *ranges = malloc((range_count + 1) * sizeof(*ranges));
    struct kvfs_extent *extents = malloc((kept + range_count + job->run_count + 1) * sizeof(*extents));
    *seal = (struct seal){desc_new(job->header_pages), malloc((range_count + job->run_count + 1) * sizeof(*seal->written)), 0};
    pthread_mutex_lock(&job->node->lock);
    int r = ranges && extents && seal->written && seal->header ? file_grow_leaves(file, (uint32_t)pages_of(file->size)) : -ENOMEM;
    pthread_mutex_unlock(&job->node->lock);
    if (r < 0)
        goto out;
    uint32_t again = ranges_collect(file, false, ranges, &pages);
    assert(again == range_count);
    r = plan(job->runs, job->run_count, job->header_pages, true, ranges, range_count, seal->written, &seal->written_count);
    if (r < 0)
        goto out;
    uint32_t room = kept;
    kept = file_kept_extents(file, true, extents, room);
    assert(kept <= room);
    copy_bytes(extents + kept, seal->written, seal->written_count * sizeof(*extents));
    uint32_t extent_count = extents_join(extents, kept + seal->written_count);
    leaves_of_holes(plane, file, extents, extent_count);
    for (uint32_t i = 0; i < range_count; i++)
        leaves_of_range(plane, file, &ranges[i], true);
    r = header_build(&plane->array.geometry, seal->header, job->record, job->record_size, job->ancestors, job->ancestors_size, extents, extent_count,
                     file->leaves, job->runs[0].page_count);
out:
    free(ranges);
    free(extents);
    return r;
}

/* The block is on the devices; its header is told by kvfs_seal_record() until kvfs_seal_end(). */
static void seal_written(struct kvfs_plane *plane, const struct write_job *job, struct desc *header) {
    struct file *file = job->node->file;
    atomic_fetch_add(&header->refs, 1);
    pthread_mutex_lock(&job->node->lock);
    desc_put(file->sealed);
    file->sealed = header;
    pthread_mutex_unlock(&job->node->lock);
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < job->run_count; i++)
        bytes += job->runs[i].page_count * PAGE;
    COUNT(plane, blocks_written, 1);
    COUNT(plane, written_bytes, bytes);
}

/* By a worker. */
static int seal_run(struct kvfs_plane *plane, struct ring *ring, struct write_job *job) {
    struct file *file = job->node->file; /* frozen: only this job changes chunks until seal_end */
    assert(file);
    assert(file->sealing);
    for (uint32_t i = 0; i < file->chunk_count && i * CHUNK_SIZE < file->size; i++) {
        if (file->chunks[i].state == CHUNK_PLACED && file->chunks[i].reload) {
            int r = file_load_chunk(plane, ring, job->node, i, true);
            if (r < 0)
                return r;
        }
    }
    struct seal seal;
    int r = seal_prepare(plane, job, &seal);
    if (r == 0) {
        r = runs_write(plane, ring, job, file, seal.header, seal.written, seal.written_count);
        if (r < 0 && !ring_idle(ring))
            atomic_fetch_add(&seal.header->refs, 1); /* the device still reads it */
    }
    if (r == 0)
        seal_written(plane, job, seal.header);
    seal_free(&seal);
    return r;
}

static void job_done(struct kvfs_plane *plane, struct write_job *job, int64_t result) {
    uint64_t cookie = job->job.cookie;
    struct node *node = job->node;
    void (*done)(void *owner, int result) = job->done;
    void *owner = job->owner;
    write_job_free(job);
    if (node)
        node_put(plane, node);
    if (!done) {
        complete(plane, cookie, result);
        return;
    }
    atomic_fetch_sub(&plane->count.jobs_in_flight, 1);
    done(owner, (int)result);
}

static void seal_job(struct kvfs_plane *plane, struct ring *ring, struct job *base) {
    struct write_job *job = (struct write_job *)base;
    job_done(plane, job, seal_run(plane, ring, job));
}

/* ---- a seal by the thread that was asked for it ---- */

/* More than that is a worker's: its checksums would keep other requests waiting. So would the copy to a RAM disk. */
#define OWN_CHUNKS_MAX 4u
#define OWN_COPY_MAX ((uint64_t)256 << 10)

/* A block's only run on the way to the devices. */
struct own_seal {
    struct kvfs_plane *plane;
    struct write_job *job;
    struct desc *header; /* until no device reads it any more */
};

static void own_done(struct io_group *group, bool reaped) {
    struct own_seal *own = group->owner;
    if (!reaped) {
        if (group->result == 0)
            seal_written(own->plane, own->job, own->header);
        job_done(own->plane, own->job, group->result);
    }
    if (!reaped && group->expired)
        return;
    desc_put(own->header);
    free(own);
}

static bool write_copies(const struct kvfs_array *array, uint32_t segment) {
    const struct kvfs_member *member = &array->members[(uint64_t)segment * array->geometry.stripe_width];
    for (uint32_t i = 0; i < array->geometry.stripe_width; i++)
        if (atomic_load_explicit(&array->devices[member[i].device].kind, memory_order_relaxed)->copies)
            return true;
    return false;
}

/* Sums and queues the write; own_done() follows in a reap. 1: the job is a worker's. */
static int own_begin(struct kvfs_plane *plane, struct ring *ring, struct write_job *job) {
    const struct file *file = job->node->file; /* frozen */
    assert(file && file->sealing);
    if (job->run_count != 1 || file->size > OWN_CHUNKS_MAX * CHUNK_SIZE || file_kept_extents(file, false, NULL, 0) ||
        (file->size > OWN_COPY_MAX && write_copies(&plane->array, job->runs[0].segment)))
        return 1;
    struct seal seal;
    struct own_seal *own = malloc(sizeof(*own));
    int r = seal_prepare(plane, job, &seal);
    if (r == 0)
        r = own ? 0 : -ENOMEM;
    if (r == 0) {
        struct iovec iovs[OWN_CHUNKS_MAX + 1];
        struct slot *slots[OWN_CHUNKS_MAX];
        uint32_t at = 0, count = 1, slot_count = 0;
        iovs[0] = (struct iovec){seal.header->header, seal.header->header_pages * PAGE};
        run_memory(file, &job->runs[0], seal.written, seal.written_count, &at, iovs, &count, slots, &slot_count);
        assert(at == seal.written_count);
        *own = (struct own_seal){plane, job, seal.header};
        r = ring_io(ring, true, job->runs[0].segment, job->runs[0].page, iovs, count, slots, slot_count, own_done, own);
    }
    if (r == 0)
        seal.header = NULL; /* own has it */
    else
        free(own);
    seal_free(&seal);
    return r == -E2BIG ? 1 : r;
}

static int spill_run(struct kvfs_plane *plane, struct ring *ring, struct write_job *job) {
    struct file *file = job->node->file;
    uint32_t pages, new_count = 0, tail = UINT32_MAX;
    pthread_mutex_lock(&job->node->lock); /* chunks may be appended meanwhile; those being spilled do not change */
    assert(file->spilling);
    const uint64_t size = file->size;
    const bool one_short = file->short_page == UINT32_MAX;
    uint32_t range_count = ranges_collect(file, true, NULL, &pages);
    struct range *ranges = malloc((range_count + 1) * sizeof(*ranges));
    struct kvfs_extent *written = malloc((range_count + job->run_count + 1) * sizeof(*written));
    int r = ranges && written ? file_grow_leaves(file, (uint32_t)pages_of(file->size)) : -ENOMEM;
    if (r == 0) {
        uint32_t again = ranges_collect(file, true, ranges, &pages);
        assert(again == range_count);
        r = plan(job->runs, job->run_count, 0, false, ranges, range_count, written, &new_count);
    }
    if (r == 0)
        for (uint32_t i = 0; i < range_count; i++)
            leaves_of_range(plane, file, &ranges[i], one_short);
    /* The file's last page, if it is spilled and not whole. Its leaf covers the file's bytes alone, unless another page has such a leaf. */
    if (r == 0 && size % PAGE && range_count && ranges[range_count - 1].file_page + (uint64_t)ranges[range_count - 1].page_count == pages_of(size))
        tail = (uint32_t)(pages_of(size) - 1);
    /* The chunk array may move while the lock is open: write from a copy of it. */
    struct file copy = *file;
    copy.chunks = r == 0 ? copy_of(file->chunks, file->chunk_count * sizeof(struct chunk)) : NULL;
    pthread_mutex_unlock(&job->node->lock);
    if (r == 0)
        r = copy.chunks ? runs_write(plane, ring, job, &copy, NULL, written, new_count) : -ENOMEM;
    free(copy.chunks);
    pthread_mutex_lock(&job->node->lock);
    file = job->node->file;
    struct kvfs_extent *placed = NULL;
    uint32_t kept = 0;
    if (r == 0) {
        kept = file_kept_extents(file, false, NULL, 0);
        placed = malloc((kept + new_count + 1) * sizeof(*placed));
        if (!placed)
            r = -ENOMEM;
    }
    if (r == 0) {
        kept = file_kept_extents(file, false, placed, kept);
        copy_bytes(placed + kept, written, new_count * sizeof(*placed));
        free(file->placed);
        file->placed = placed;
        file->placed_count = extents_join(placed, kept + new_count);
        uint64_t bytes = 0;
        for (uint32_t i = 0; i < job->run_count; i++)
            bytes += job->runs[i].page_count * PAGE;
        COUNT(plane, written_bytes, bytes);
        /* Spilled pages that were loaded since count no more. Each run has an extent at least. */
        file->spill_pages = file->placed_count + (tail != UINT32_MAX || !one_short);
        file_count(plane, file);
    }
    for (uint32_t i = 0; i < file->chunk_count; i++) {
        struct chunk *chunk = &file->chunks[i];
        if (!chunk->spilling)
            continue;
        uint32_t filled = chunk->filled;
        chunk->spilling = false;
        if (r == 0) {
            file_drop_chunk(plane, file, i);
            chunk_place(job->node, chunk, filled);
        }
    }
    if (r == 0 && tail != UINT32_MAX) {
        file->chunks[tail / CHUNK_PAGES].reload =
            !one_short || file->size != size; /* it has grown, and its leaf does not cover what lies there now */
        if (one_short) {
            file->short_page = tail;
            file->short_size = (uint32_t)(size % PAGE);
        }
    }
    file->spilling = false;
    spill_ended(plane, file, r < 0 ? -EIO : 0);
    file_unpark(plane, file);
    bool discard = file->discarded;
    if (discard)
        file_free(plane, job->node);
    pthread_mutex_unlock(&job->node->lock);
    if (discard)
        node_put(plane, job->node);
    memory_unpark(plane);
    free(ranges);
    free(written);
    return r;
}

static void spill_job(struct kvfs_plane *plane, struct ring *ring, struct job *base) {
    struct write_job *job = (struct write_job *)base;
    job_done(plane, job, spill_run(plane, ring, job));
}

/* ---- carry-over ---- */

static int copy_run(struct kvfs_plane *plane, struct ring *ring, struct write_job *job) {
    struct kvfs_inode_record old;
    memcpy(&old, job->old_record, sizeof(old));
    struct kvfs_record want;
    record_from_inode(&old, &want);
    struct desc *from = NULL, *to = NULL;
    int r = desc_load(plane, ring, &want, &from);
    if (r < 0)
        return r;
    /* Holes stay holes: the ranges are those that the old extents cover. */
    struct range *ranges = malloc((from->extent_count + 1) * sizeof(*ranges));
    struct kvfs_extent *extents = malloc((from->extent_count + job->run_count + 1) * sizeof(*extents));
    to = desc_new(job->header_pages);
    uint32_t range_count = 0, new_count = 0;
    if (!ranges || !extents || !to) {
        r = -ENOMEM;
        goto out;
    }
    for (uint32_t i = 0; i < from->extent_count; i++)
        ranges[range_count++] = (struct range){from->extents[i].file_page, from->extents[i].page_count};
    r = plan(job->runs, job->run_count, job->header_pages, true, ranges, range_count, extents, &new_count);
    if (r < 0)
        goto out;
    uint32_t short_size = (uint32_t)(from->size % PAGE);
    struct placed placed = {from->extents, from->extent_count, from->leaves, short_size ? from->leaf_count - 1 : UINT32_MAX, short_size};
    for (uint32_t i = 0; i < new_count && r == 0; i++) {
        for (uint32_t done = 0; done < extents[i].page_count && r == 0;) {
            uint32_t pages = (uint32_t)min_u64(CHUNK_PAGES, extents[i].page_count - done);
            struct slot *slot = slot_get_extra(&plane->staging);
            if (!slot) {
                r = -ENOMEM;
                break;
            }
            r = placed_read(plane, ring, &placed, extents[i].file_page + done, pages, slot->data);
            if (r == 0)
                r = blocking_io(ring, true, extents[i].segment, extents[i].page + done, &(struct iovec){slot->data, pages * PAGE}, 1, &slot, 1);
            if (r < 0)
                drain(ring);
            slot_put(slot);
            done += pages;
        }
    }
    for (uint32_t i = 1; i < job->run_count && r == 0; i++) {
        struct slot *slot = slot_get_extra(&plane->staging_small);
        if (!slot) {
            r = -ENOMEM;
            break;
        }
        extent_header_build(&plane->array.geometry, slot->data, old.inode, &job->runs[i], 0);
        r = blocking_io(ring, true, job->runs[i].segment, job->runs[i].page, &(struct iovec){slot->data, PAGE}, 1, &slot, 1);
        slot_put(slot);
    }
    if (r < 0)
        goto out;
    new_count = extents_join(extents, new_count);
    r = header_build(&plane->array.geometry, to, job->record, job->record_size, job->ancestors, job->ancestors_size, extents, new_count, from->leaves,
                     job->runs[0].page_count);
    if (r == 0)
        r = blocking_io(ring, true, job->runs[0].segment, job->runs[0].page, &(struct iovec){to->header, to->header_pages * PAGE}, 1, NULL, 0);
    if (r < 0) {
        drain(ring);
        if (!ring_idle(ring))
            atomic_fetch_add(&to->refs, 1);
        goto out;
    }
    struct kvfs_block_header h;
    struct kvfs_inode_record record;
    memcpy(&h, to->header, sizeof(h));
    memcpy(&record, to->header + h.record_offset, sizeof(record));
    if (record.record_size > job->out_capacity) {
        r = -ERANGE;
        goto out;
    }
    memcpy(job->out_record, to->header + h.record_offset, record.record_size);
    r = (int)record.record_size;
    COUNT(plane, blocks_copied, 1);
    for (uint32_t i = 0; i < job->run_count; i++)
        COUNT(plane, written_bytes, job->runs[i].page_count * PAGE);
out:
    free(ranges);
    free(extents);
    desc_put(from);
    desc_put(to);
    return r;
}

static void copy_job(struct kvfs_plane *plane, struct ring *ring, struct job *base) {
    struct write_job *job = (struct write_job *)base;
    job_done(plane, job, copy_run(plane, ring, job));
}

/* ---- the calls ---- */

static int runs_valid(const struct kvfs_plane *plane, const struct kvfs_run *runs, uint32_t run_count, uint64_t pages) {
    uint64_t total = 0;
    for (uint32_t i = 0; i < run_count; i++) {
        if (runs[i].segment >= plane->config.segment_count || runs[i].page == 0 || runs[i].page_count == 0 ||
            (uint64_t)runs[i].page + runs[i].page_count > plane->array.geometry.segment_pages)
            return -ERANGE;
        total += runs[i].page_count;
    }
    return run_count && total == pages ? 0 : -ERANGE;
}

static struct write_job *write_job_new(void (*run)(struct kvfs_plane *, struct ring *, struct job *), uint64_t cookie, const struct kvfs_run *runs,
                                       uint32_t run_count, uint32_t header_pages, const void *record, uint32_t record_size, const void *ancestors,
                                       uint32_t ancestors_size) {
    struct write_job *job = calloc(1, sizeof(*job));
    if (!job)
        return NULL;
    job->job.run = run;
    job->job.cookie = cookie;
    job->runs = copy_of(runs, run_count * sizeof(*runs));
    job->run_count = run_count;
    job->header_pages = header_pages;
    job->record = copy_of(record, record_size);
    job->record_size = record_size;
    job->ancestors = copy_of(ancestors, ancestors_size);
    job->ancestors_size = ancestors_size;
    if (!job->runs || !job->record || !job->ancestors) {
        write_job_free(job);
        return NULL;
    }
    return job;
}

/* Extents that stay, and not 0 if the seal reads placed chunks to write them again: a worker does that. */
static uint32_t kept_extents_max(const struct file *file) {
    uint32_t placed = file_kept_extents(file, false, NULL, 0), kept = file_kept_extents(file, true, NULL, 0);
    return kept > placed ? kept : placed;
}

int kvfs_seal_begin(struct kvfs_plane *plane, uint64_t inode, struct kvfs_seal_info *out) {
    memset(out, 0, sizeof(*out));
    struct node *node = node_get(plane, inode, false);
    if (!node)
        return -ENOENT;
    pthread_mutex_lock(&node->lock);
    struct file *file = node->file;
    int r = !file ? -ENOENT : !file->slab && (file->sealing || file->spilling) ? -EBUSY : 0;
    if (r == 0 && file->dirty) {
        uint32_t pages;
        /* A file of nothing but a hole gets one page: without extents it would mean one right behind the header. */
        if (file->size && !ranges_collect(file, false, NULL, &pages) && !file_kept_extents(file, true, NULL, 0))
            r = file_stage_zeros(plane, file);
    }
    if (r == 0 && file->dirty) {
        file->sealing = true;
        out->dirty = 1;
        out->size = file->size;
        out->mtime_ns = file->mtime_ns;
        out->shared = file->shared;
        out->ranges = ranges_collect(file, false, NULL, &out->data_pages);
        out->kept_extents = kept_extents_max(file);
    }
    pthread_mutex_unlock(&node->lock);
    node_put(plane, node);
    return r;
}

static int seal_job_new(struct kvfs_plane *plane, uint64_t cookie, uint64_t inode, const struct kvfs_run *runs, uint32_t run_count,
                        uint32_t header_pages, const void *record, uint32_t record_size, const void *ancestors, uint32_t ancestors_size,
                        struct write_job **out) {
    struct node *node = node_get(plane, inode, false);
    if (!node)
        return -ENOENT;
    pthread_mutex_lock(&node->lock);
    uint32_t pages = 0;
    int r = node->file && node->file->sealing ? 0 : -EINVAL;
    if (r == 0)
        ranges_collect(node->file, false, NULL, &pages);
    pthread_mutex_unlock(&node->lock);
    if (r == 0)
        r = runs_valid(plane, runs, run_count, (uint64_t)header_pages + run_count - 1 + pages);
    if (r == 0 && (record_size < sizeof(struct kvfs_inode_record) || header_pages == 0 || runs[0].page_count < header_pages))
        r = -EINVAL;
    struct write_job *job =
        r == 0 ? write_job_new(seal_job, cookie, runs, run_count, header_pages, record, record_size, ancestors, ancestors_size) : NULL;
    if (!job) {
        node_put(plane, node);
        return r < 0 ? r : -ENOMEM;
    }
    job->node = node;
    COUNT(plane, jobs_in_flight, 1);
    *out = job;
    return 0;
}

int kvfs_seal_write(struct kvfs_plane *plane, uint64_t cookie, uint64_t inode, const struct kvfs_run *runs, uint32_t run_count, uint32_t header_pages,
                    const void *record, uint32_t record_size, const void *ancestors, uint32_t ancestors_size) {
    struct write_job *job = NULL;
    int r = seal_job_new(plane, cookie, inode, runs, run_count, header_pages, record, record_size, ancestors, ancestors_size, &job);
    if (r == 0)
        pool_add(&plane->store, &job->job);
    return r;
}

int seal_to(struct kvfs_plane *plane, uint64_t inode, const struct kvfs_run *runs, uint32_t run_count, const struct kvfs_inode_record *record,
            const void *ancestors, uint32_t ancestors_size, void (*done)(void *owner, int result), void *owner, struct write_job **out) {
    int r = seal_job_new(plane, 0, inode, runs, run_count, record->header_pages, record, record->record_size, ancestors, ancestors_size, out);
    if (r == 0) {
        (*out)->done = done;
        (*out)->owner = owner;
    }
    return r;
}

void seal_go(struct kvfs_plane *plane, struct write_job *job, struct ring *ring) {
    int r = ring ? own_begin(plane, ring, job) : 1;
    if (r > 0)
        pool_add(&plane->store, &job->job);
    else if (r < 0)
        job_done(plane, job, r);
}

int kvfs_seal_record(struct kvfs_plane *plane, uint64_t inode, void *out, uint32_t capacity) {
    struct node *node = node_get(plane, inode, false);
    if (!node)
        return -ENOENT;
    pthread_mutex_lock(&node->lock);
    int r = -ENOENT;
    if (node->file && node->file->sealed) {
        const uint8_t *header = node->file->sealed->header;
        struct kvfs_block_header h;
        struct kvfs_inode_record record;
        memcpy(&h, header, sizeof(h));
        memcpy(&record, header + h.record_offset, sizeof(record));
        assert(h.record_offset + (uint64_t)record.record_size <= node->file->sealed->header_pages * PAGE); /* header_build made it */
        r = record.record_size <= capacity ? (int)record.record_size : -ERANGE;
        if (r > 0)
            memcpy(out, header + h.record_offset, record.record_size);
    }
    pthread_mutex_unlock(&node->lock);
    node_put(plane, node);
    return r;
}

int kvfs_seal_end(struct kvfs_plane *plane, uint64_t inode, int ok) {
    struct node *node = node_get(plane, inode, false);
    if (!node)
        return -ENOENT;
    struct shard *shard = shard_of(plane, inode);
    pthread_mutex_lock(&shard->lock);
    bool writers = node->writers > 0;
    pthread_mutex_lock(&node->lock);
    struct file *file = node->file;
    if (ok && file && node->handles) /* once the last writer has gone, readers keep the content that is sealed now */
        hold_charge(plane, node, file->size);
    pthread_mutex_unlock(&shard->lock);
    bool freed = false;
    int r = file && file->sealing ? 0 : -EINVAL;
    if (r == 0) {
        struct desc *desc = file->sealed;
        file->sealed = NULL;
        if (ok && desc) {
            assert(desc->size == file->size); /* frozen since seal_begin told it */
            for (uint32_t i = 0; i < file->chunk_count; i++)
                if (file->chunks[i].state == CHUNK_STAGED)
                    file_drop_chunk(plane, file, i);
            r = file_from_desc(plane, node, desc);
            file->dirty = false;
            desc_put(node->desc);
            node->desc = desc;
            written_is_sealed(plane, file, r == 0 && !file->slab && !node->mappable && !atomic_load(&node->guest_wrote));
        } else {
            desc_put(desc);
        }
        file->sealing = false;
        file_unpark(plane, file);
        if (file->discarded || (!file->dirty && !writers)) {
            file_free(plane, node);
            freed = true;
        }
    }
    pthread_mutex_unlock(&node->lock);
    memory_unpark(plane);
    if (freed)
        node_put(plane, node);
    node_put(plane, node);
    return r;
}

int kvfs_spill_begin(struct kvfs_plane *plane, uint64_t inode, struct kvfs_seal_info *out) {
    memset(out, 0, sizeof(*out));
    struct node *node = node_get(plane, inode, false);
    if (!node)
        return -ENOENT;
    pthread_mutex_lock(&node->lock);
    struct file *file = node->file;
    bool nothing = false;
    int r = !file ? -ENOENT : file->sealing || file->spilling || file->discarded ? -EBUSY : 0;
    if (r == 0) {
        uint32_t last = file->size ? (uint32_t)((file->size - 1) / CHUNK_SIZE) : 0;
        uint64_t taken = 0;
        bool whole = spill_is_whole(plane, file);
        for (uint32_t i = 0; i < file->chunk_count && taken < 64; i++) {
            struct chunk *chunk = &file->chunks[i];
            if (chunk->state == CHUNK_STAGED && chunk->filled && (whole || i < last || chunk->filled == CHUNK_SIZE)) {
                chunk->spilling = true;
                taken++;
            }
        }
        file->spilling = taken > 0;
        nothing = !taken;
        if (nothing)
            spill_ended(plane, file, 0);
        out->size = file->size;
        out->ranges = ranges_collect(file, true, NULL, &out->data_pages);
        out->dirty = taken > 0;
    }
    pthread_mutex_unlock(&node->lock);
    node_put(plane, node);
    if (nothing)
        memory_unpark(plane);
    return r;
}

/* The spill that was asked or has begun does not take place. Takes the node's lock. */
static void spill_give_up(struct kvfs_plane *plane, struct node *node) {
    pthread_mutex_lock(&node->lock);
    struct file *file = node->file;
    bool freed = false;
    if (file && (file->spilling || file->spill_asked))
        spill_ended(plane, file, -ENOSPC);
    if (file && file->spilling) {
        for (uint32_t i = 0; i < file->chunk_count; i++)
            file->chunks[i].spilling = false;
        file->spilling = false;
        file_unpark(plane, file);
        if (file->discarded) {
            file_free(plane, node);
            freed = true;
        }
    }
    pthread_mutex_unlock(&node->lock);
    memory_unpark(plane);
    if (freed)
        node_put(plane, node);
}

int kvfs_spill_write(struct kvfs_plane *plane, uint64_t cookie, uint64_t inode, const struct kvfs_run *runs, uint32_t run_count) {
    struct node *node = node_get(plane, inode, false);
    if (!node)
        return -ENOENT;
    pthread_mutex_lock(&node->lock);
    uint32_t pages = 0;
    int r = node->file && node->file->spilling ? 0 : -EINVAL;
    if (r == 0)
        ranges_collect(node->file, true, NULL, &pages);
    pthread_mutex_unlock(&node->lock);
    if (r == 0)
        r = runs_valid(plane, runs, run_count, (uint64_t)pages + run_count);
    struct write_job *job = r == 0 ? write_job_new(spill_job, cookie, runs, run_count, 0, "", 0, "", 0) : NULL;
    if (!job) {
        spill_give_up(plane, node);
        node_put(plane, node);
        return r < 0 ? r : -ENOMEM;
    }
    job->node = node;
    COUNT(plane, jobs_in_flight, 1);
    pool_add(&plane->store, &job->job);
    return 0;
}

int kvfs_spill_cancel(struct kvfs_plane *plane, uint64_t inode) {
    struct node *node = node_get(plane, inode, false);
    if (!node)
        return -ENOENT;
    spill_give_up(plane, node);
    node_put(plane, node);
    return 0;
}

int kvfs_store_copy(struct kvfs_plane *plane, uint64_t cookie, const void *old_record, uint32_t old_size, const struct kvfs_run *runs,
                    uint32_t run_count, uint32_t header_pages, const void *record, uint32_t record_size, const void *ancestors,
                    uint32_t ancestors_size, void *out_record, uint32_t capacity) {
    if (old_size < sizeof(struct kvfs_inode_record) || record_size < sizeof(struct kvfs_inode_record) || header_pages == 0 || run_count == 0 ||
        runs[0].page_count < header_pages)
        return -EINVAL;
    struct write_job *job = write_job_new(copy_job, cookie, runs, run_count, header_pages, record, record_size, ancestors, ancestors_size);
    if (job)
        job->old_record = copy_of(old_record, old_size);
    if (!job || !job->old_record) {
        write_job_free(job);
        return -ENOMEM;
    }
    job->out_record = out_record;
    job->out_capacity = capacity;
    COUNT(plane, jobs_in_flight, 1);
    pool_add(&plane->store, &job->job);
    return 0;
}
