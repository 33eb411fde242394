/* Store jobs: raw reads and writes of segment pages, header scans, verification. Each runs on a worker and ends in a completion. */
#include "content/content.h"

struct store_job {
    struct job job;
    uint32_t segment, page, end_page, count;
    uint64_t size, generation, epoch_max;
    uint8_t *data; /* own copy: writes, records */
    void *out;
    uint32_t *segments;
    struct kvfs_scan_result *result;
    int flag;
};

static void store_done(struct kvfs_plane *plane, struct store_job *job, int64_t result) {
    uint64_t cookie = job->job.cookie;
    free(job->data);
    free(job->segments);
    free(job);
    complete(plane, cookie, result);
}

static struct store_job *store_job_new(void (*run)(struct kvfs_plane *, struct ring *, struct job *), uint64_t cookie) {
    struct store_job *job = calloc(1, sizeof(*job));
    if (job) {
        job->job.run = run;
        job->job.cookie = cookie;
    }
    return job;
}

static void store_add(struct kvfs_plane *plane, struct store_job *job) {
    COUNT(plane, jobs_in_flight, 1);
    pool_add(&plane->store, &job->job);
}

/* Move data between the caller's memory and a segment through slots, so that a silent device never holds memory that somebody may free. */
static int slot_io(struct kvfs_plane *plane, struct ring *ring, bool write, uint32_t segment, uint32_t page, uint8_t *data, uint64_t size) {
    int r = 0;
    while (size && r == 0) {
        uint64_t length = min_u64(size, CHUNK_SIZE);
        struct slot *slot = slot_get_extra(&plane->reading);
        if (!slot)
            return -ENOMEM;
        if (write)
            memcpy(slot->data, data, length);
        r = blocking_io(ring, write, segment, page, &(struct iovec){slot->data, length}, 1, &slot, 1);
        if (r == 0 && !write)
            memcpy(data, slot->data, length);
        slot_put(slot);
        data += length;
        size -= length;
        page += (uint32_t)(length / PAGE);
    }
    return r;
}

static void run_write(struct kvfs_plane *plane, struct ring *ring, struct job *base) {
    struct store_job *job = (struct store_job *)base;
    int r = slot_io(plane, ring, true, job->segment, job->page, job->data, job->size);
    if (r == 0)
        COUNT(plane, written_bytes, job->size);
    store_done(plane, job, r < 0 ? r : (int64_t)job->size);
}

static void run_read(struct kvfs_plane *plane, struct ring *ring, struct job *base) {
    struct store_job *job = (struct store_job *)base;
    int r = slot_io(plane, ring, false, job->segment, job->page, job->out, job->size);
    store_done(plane, job, r < 0 ? r : (int64_t)job->size);
}

static int place_valid(const struct kvfs_plane *plane, uint32_t segment, uint32_t page, uint64_t size) {
    return segment < plane->config.segment_count && size && size % PAGE == 0 && page * PAGE + size <= plane->array.geometry.segment_size ? 0
                                                                                                                                         : -ERANGE;
}

int kvfs_store_write(struct kvfs_plane *plane, uint64_t cookie, uint32_t segment, uint32_t page, const void *data, uint64_t size) {
    if (place_valid(plane, segment, page, size) < 0)
        return -ERANGE;
    struct store_job *job = store_job_new(run_write, cookie);
    if (job)
        job->data = malloc(size);
    if (!job || !job->data) {
        free(job);
        return -ENOMEM;
    }
    memcpy(job->data, data, size);
    job->segment = segment;
    job->page = page;
    job->size = size;
    store_add(plane, job);
    return 0;
}

int kvfs_store_read(struct kvfs_plane *plane, uint64_t cookie, uint32_t segment, uint32_t page, void *out, uint64_t size) {
    if (place_valid(plane, segment, page, size) < 0)
        return -ERANGE;
    struct store_job *job = store_job_new(run_read, cookie);
    if (!job)
        return -ENOMEM;
    job->out = out;
    job->segment = segment;
    job->page = page;
    job->size = size;
    store_add(plane, job);
    return 0;
}

/* ---- the same page of many segments at once ---- */

struct page_read {
    uint32_t *left;
    uint8_t *out;
    struct slot *slot;
};

static void page_done(struct io_group *group, bool reaped) {
    struct page_read *read = group->owner;
    if (!reaped) {
        if (group->result)
            memset(read->out, 0xff, PAGE);
        else
            memcpy(read->out, read->slot->data, PAGE);
        --*read->left;
    }
    if (!group->expired || reaped) {
        slot_put(read->slot);
        free(read);
    }
}

static void run_read_pages(struct kvfs_plane *plane, struct ring *ring, struct job *base) {
    struct store_job *job = (struct store_job *)base;
    uint32_t left = 0, next = 0;
    while (next < job->count || left) {
        while (next < job->count && left < 64) {
            uint8_t *out = (uint8_t *)job->out + next * PAGE;
            struct page_read *read = malloc(sizeof(*read));
            struct slot *slot = slot_get_extra(&plane->reading_small);
            if (read && slot) {
                *read = (struct page_read){&left, out, slot};
                left++;
                if (ring_io(ring, false, job->segments[next], job->page, &(struct iovec){slot->data, PAGE}, 1, NULL, 0, page_done, read) == 0) {
                    next++;
                    continue;
                }
                left--;
            }
            free(read);
            slot_put(slot);
            memset(out, 0xff, PAGE);
            next++;
        }
        ring_submit(ring);
        ring_reap(ring);
        if (left)
            ring_wait(ring, 100000000);
    }
    store_done(plane, job, 0);
}

int kvfs_store_read_pages(struct kvfs_plane *plane, uint64_t cookie, const uint32_t *segments, uint32_t count, uint32_t page, void *out) {
    if (page >= plane->array.geometry.segment_pages)
        return -ERANGE;
    struct store_job *job = store_job_new(run_read_pages, cookie);
    if (job)
        job->segments = malloc(count * sizeof(uint32_t) + 1);
    if (!job || !job->segments) {
        free(job);
        return -ENOMEM;
    }
    for (uint32_t i = 0; i < count; i++) {
        if (segments[i] >= plane->config.segment_count) {
            free(job->segments);
            free(job);
            return -ERANGE;
        }
        job->segments[i] = segments[i];
    }
    job->count = count;
    job->page = page;
    job->out = out;
    store_add(plane, job);
    return 0;
}

/* ---- single pages of a segment at once ---- */

struct page_write {
    uint32_t *left;
    int *result;
    struct slot *slot;
};

static void page_written(struct io_group *group, bool reaped) {
    struct page_write *page = group->owner;
    if (!reaped) {
        if (!*page->result)
            *page->result = group->result;
        --*page->left;
    }
    if (!group->expired || reaped) {
        slot_put(page->slot);
        free(page);
    }
}

static int page_write_begin(struct kvfs_plane *plane, struct ring *ring, const struct store_job *job, uint32_t i, uint32_t *left, int *result) {
    struct page_write *page = malloc(sizeof(*page));
    struct slot *slot = slot_get_extra(&plane->reading_small);
    int r = -ENOMEM;
    if (page && slot) {
        *page = (struct page_write){left, result, slot};
        memcpy(slot->data, job->data + i * PAGE, PAGE);
        ++*left;
        r = ring_io(ring, true, job->segment, job->segments[i], &(struct iovec){slot->data, PAGE}, 1, NULL, 0, page_written, page);
        *left -= r < 0;
    }
    if (r < 0) {
        free(page);
        slot_put(slot);
    }
    return r;
}

static void run_write_pages(struct kvfs_plane *plane, struct ring *ring, struct job *base) {
    struct store_job *job = (struct store_job *)base;
    uint32_t left = 0;
    int result = 0, r = 0;
    for (uint32_t i = 0; i < job->count && r == 0; i++)
        r = page_write_begin(plane, ring, job, i, &left, &result);
    ring_submit(ring);
    while (left) {
        ring_reap(ring);
        if (left)
            ring_wait(ring, 1000000000);
    }
    if (r == 0)
        r = result;
    if (r == 0)
        COUNT(plane, written_bytes, job->count * PAGE);
    store_done(plane, job, r);
}

int kvfs_store_write_pages(struct kvfs_plane *plane, uint64_t cookie, uint32_t segment, const uint32_t *pages, uint32_t count, const void *data) {
    for (uint32_t i = 0; i < count; i++)
        if (place_valid(plane, segment, pages[i], PAGE) < 0)
            return -ERANGE;
    struct store_job *job = store_job_new(run_write_pages, cookie);
    if (job && ((job->data = malloc(count * PAGE + 1)) == NULL || (job->segments = malloc(count * sizeof(*pages) + 1)) == NULL)) {
        free(job->data);
        free(job);
        job = NULL;
    }
    if (!job)
        return -ENOMEM;
    memcpy(job->data, data, count * PAGE);
    memcpy(job->segments, pages, count * sizeof(*pages));
    job->segment = segment;
    job->count = count;
    store_add(plane, job);
    return 0;
}

/* ---- scan ---- */

struct window {
    struct slot *slot;
    uint8_t *big; /* for a header larger than the slot */
    uint32_t first, count;
};

/* Make pages [page, page + count) of the segment readable; returns them, or NULL with *error. */
static uint8_t *window_at(struct kvfs_plane *plane, struct ring *ring, struct window *w, uint32_t segment, uint32_t page, uint32_t count,
                          uint32_t end_page, uint32_t ahead, int *error) {
    if (!w->big && page >= w->first && page + count <= w->first + w->count)
        return w->slot->data + (uint64_t)(page - w->first) * PAGE;
    free(w->big);
    w->big = NULL;
    if (count > CHUNK_PAGES) {
        void *memory = NULL;
        if (posix_memalign(&memory, KVFS_PAGE_SIZE, count * PAGE)) {
            *error = -ENOMEM;
            return NULL;
        }
        w->big = memory;
        *error = slot_io(plane, ring, false, segment, page, w->big, count * PAGE);
        return *error < 0 ? NULL : w->big;
    }
    w->first = page;
    w->count = (uint32_t)min_u64(ahead > count ? ahead : count, end_page - page);
    *error = blocking_io(ring, false, segment, page, &(struct iovec){w->slot->data, w->count * PAGE}, 1, &w->slot, 1);
    if (*error < 0)
        w->count = 0;
    return *error < 0 ? NULL : w->slot->data;
}

static int scan(struct kvfs_plane *plane, struct ring *ring, struct store_job *job) {
    struct kvfs_scan_result *result = job->result;
    struct window w = {.slot = slot_get_extra(&plane->reading)};
    if (!w.slot)
        return -ENOMEM;
    int error = 0;
    uint32_t page = job->page, ahead = 16;
    while (page < job->end_page) {
        uint8_t *data = window_at(plane, ring, &w, job->segment, page, 1, job->end_page, ahead, &error);
        if (!data)
            break;
        uint64_t magic;
        memcpy(&magic, data, sizeof(magic));
        if (magic == KVFS_MAGIC_EXTENT) {
            uint8_t copy[KVFS_PAGE_SIZE];
            struct kvfs_extent_header h;
            memcpy(copy, data, PAGE);
            memcpy(&h, copy, sizeof(h));
            memset(copy + offsetof(struct kvfs_extent_header, checksum), 0, 8);
            if (h.version != KVFS_FORMAT_VERSION || kvfs_checksum(copy, PAGE, plane->config.secret) != h.checksum ||
                h.generation != job->generation || h.segment != job->segment || h.page != page || h.run_pages == 0 ||
                (uint64_t)page + h.run_pages > job->end_page)
                break;
            page += h.run_pages;
            continue;
        }
        struct kvfs_block_header h;
        struct kvfs_inode_record record;
        memcpy(&h, data, sizeof(h));
        if (magic != KVFS_MAGIC_BLOCK || h.header_pages == 0 || h.run_pages < h.header_pages || (uint64_t)page + h.run_pages > job->end_page)
            break;
        data = window_at(plane, ring, &w, job->segment, page, h.header_pages, job->end_page, ahead, &error);
        if (!data)
            break;
        if (header_check(&plane->array.geometry, data, h.header_pages, &h, &record) < 0 || record.generation != job->generation ||
            record.segment != job->segment || record.page != page)
            break;
        if (!header_sound(&plane->array.geometry, data, &h, &record) ||
            !records_sound(&plane->array.geometry, job->epoch_max, data + h.record_offset, record.record_size) ||
            !records_sound(&plane->array.geometry, job->epoch_max, data + h.ancestors_offset, h.ancestors_size)) {
            result->impossible++; /* one block is lost, not those after it: the header says where they begin */
            page += h.run_pages;
            continue;
        }
        uint64_t need = (uint64_t)record.record_size + h.ancestors_size;
        if (result->size + need > job->size) {
            result->full = 1;
            break;
        }
        uint8_t *out = (uint8_t *)job->out + result->size;
        memcpy(out, data + h.record_offset, record.record_size);
        memcpy(out + record.record_size, data + h.ancestors_offset, h.ancestors_size);
        result->size += need;
        result->entry_count++;
        /* Small blocks: read many headers with one I/O. Large ones: the next header lies beyond any window worth reading. */
        ahead = h.run_pages <= 16 ? CHUNK_PAGES : 1;
        page += h.run_pages;
    }
    assert(page <= job->end_page);
    assert(result->size <= job->size);
    result->next_page = page;
    free(w.big);
    slot_put(w.slot);
    return error;
}

static void run_scan(struct kvfs_plane *plane, struct ring *ring, struct job *base) {
    struct store_job *job = (struct store_job *)base;
    store_done(plane, job, scan(plane, ring, job));
}

int kvfs_store_scan(struct kvfs_plane *plane, uint64_t cookie, uint32_t segment, uint64_t generation, uint64_t epoch_max, uint32_t first_page,
                    uint32_t end_page, void *out, uint64_t capacity, struct kvfs_scan_result *result) {
    if (segment >= plane->config.segment_count || first_page > end_page || end_page > plane->array.geometry.segment_pages)
        return -ERANGE;
    struct store_job *job = store_job_new(run_scan, cookie);
    if (!job)
        return -ENOMEM;
    memset(result, 0, sizeof(*result));
    job->segment = segment;
    job->generation = generation;
    job->epoch_max = epoch_max;
    job->page = first_page;
    job->end_page = end_page;
    job->out = out;
    job->size = capacity;
    job->result = result;
    store_add(plane, job);
    return 0;
}

/* ---- verify ---- */

static int verify(struct kvfs_plane *plane, struct ring *ring, struct store_job *job) {
    struct kvfs_inode_record record;
    struct kvfs_record want;
    memcpy(&record, job->data, sizeof(record));
    record_from_inode(&record, &want);
    struct desc *desc = NULL;
    int r = desc_load(plane, ring, &want, &desc);
    if (r < 0)
        return r;
    uint32_t short_size = (uint32_t)(desc->size % PAGE);
    struct placed placed = {desc->extents, desc->extent_count, desc->leaves, short_size ? desc->leaf_count - 1 : UINT32_MAX, short_size};
    struct slot *slot = slot_get_extra(&plane->reading);
    r = slot ? 0 : -ENOMEM;
    for (uint32_t i = 0; i < desc->extent_count && r == 0 && job->flag; i++)
        for (uint32_t done = 0; done < desc->extents[i].page_count && r == 0; done += CHUNK_PAGES)
            r = placed_read(plane, ring, &placed, desc->extents[i].file_page + done,
                            (uint32_t)min_u64(CHUNK_PAGES, desc->extents[i].page_count - done), slot->data);
    slot_put(slot);
    desc_put(desc);
    return r;
}

static void run_verify(struct kvfs_plane *plane, struct ring *ring, struct job *base) {
    struct store_job *job = (struct store_job *)base;
    store_done(plane, job, verify(plane, ring, job));
}

int kvfs_store_verify(struct kvfs_plane *plane, uint64_t cookie, const void *record, uint32_t record_size, int verify_data) {
    if (record_size < sizeof(struct kvfs_inode_record))
        return -EINVAL;
    struct store_job *job = store_job_new(run_verify, cookie);
    if (job)
        job->data = malloc(record_size);
    if (!job || !job->data) {
        free(job);
        return -ENOMEM;
    }
    memcpy(job->data, record, record_size);
    job->flag = verify_data;
    store_add(plane, job);
    return 0;
}

uint32_t kvfs_segment_busy(struct kvfs_plane *plane, uint32_t segment) {
    return segment < plane->config.segment_count ? atomic_load(&plane->array.segment_busy[segment]) : 0;
}
