/* Slabs: files that are preallocated and overwritten in place. Their pages lie in whole segments of their own, and READ and WRITE go straight to
 * the devices: no checksums, no header, no staging.
 *
 * A page that was never written reads as zeros: what the device has there is some other block's. Which pages were written is known in memory
 * alone, as a slab does not outlive its daemon. A write of whole pages goes from the memory that it arrived in; one of parts of pages reads and
 * writes those again, on a worker, alone on them. A write whose fate is unknown (a device gave no answer) may land at any later time: the slab has
 * failed then, and says EIO from then on. */
#include "internal.h"

#include <stdlib.h>
#include <unistd.h>

#define STEP_PAGES 512u /* of one I/O: what a group holds */
#define RMW_SIZE CHUNK_SIZE

struct slab_run {
    uint64_t generation;
    uint32_t segment, page;
    atomic_ullong *written; /* a bit per page */
};
struct slab {
    atomic_uint refs; /* the file, and every request under way */
    struct kvfs_plane *plane;
    uint64_t inode;
    uint32_t first_segment; /* tells it from another slab of the inode, as nobody else has the segment before it is free */
    /* As many as there are segments: it never moves. Those beyond run_count (under the node's lock) are not there yet. */
    struct slab_run *runs;
    uint32_t run_count, run_pages;
    bool chosen;      /* by its owner, whatever becomes of it */
    bool overwritten; /* a whole page was written again: it is used as a slab */
    atomic_bool failed;
    struct request *writing; /* under the node's lock, as are these two */
    uint32_t exclusive;      /* of them, those that are alone on their pages */
};

static uint64_t slab_pages(const struct slab *slab) { return (uint64_t)slab->run_count * slab->run_pages; }

struct slab *slab_ref(struct slab *slab) {
    atomic_fetch_add(&slab->refs, 1);
    return slab;
}

void slab_put(struct slab *slab) {
    if (!slab || atomic_fetch_sub(&slab->refs, 1) != 1)
        return;
    for (uint32_t i = 0; i < slab->run_count; i++)
        free(slab->runs[i].written);
    free(slab->runs);
    event_add(slab->plane, KVFS_EVENT_SLAB_FREE, slab->inode, slab->first_segment);
    free(slab);
}

/* ---- pages ---- */

static bool is_written(const struct slab *slab, uint64_t page) {
    uint64_t inside = page % slab->run_pages;
    return atomic_load_explicit(&slab->runs[page / slab->run_pages].written[inside / 64], memory_order_acquire) >> (inside % 64) & 1;
}

static void set_written(struct slab *slab, uint64_t page, bool written) {
    uint64_t inside = page % slab->run_pages;
    atomic_ullong *word = &slab->runs[page / slab->run_pages].written[inside / 64];
    if (written)
        atomic_fetch_or_explicit(word, 1ull << (inside % 64), memory_order_release);
    else
        atomic_fetch_and_explicit(word, ~(1ull << (inside % 64)), memory_order_release);
}

/* Where the pages from `from` on end that lie together in a segment and were all written, or all not; at most `to`. */
static uint64_t stretch(const struct slab *slab, uint64_t from, uint64_t to, bool written) {
    uint64_t end = min_u64(to, (from / slab->run_pages + 1) * slab->run_pages), at = from + 1;
    while (at < end && is_written(slab, at) == written)
        at++;
    return at;
}

static uint32_t place(const struct slab *slab, uint64_t page, uint32_t *segment) {
    const struct slab_run *run = &slab->runs[page / slab->run_pages];
    *segment = run->segment;
    return run->page + (uint32_t)(page % slab->run_pages);
}

/* ---- reads and writes of whole pages ---- */

static void slab_finish(struct request *request);

static void slab_io_done(struct io_group *group, bool reaped) {
    struct request *request = group->owner;
    if (reaped) {
        if (--request->groups_held == 0 && request->groups_left == 0)
            request_put(request->server->plane, request);
        return;
    }
    if (group->expired) {
        if (request->opcode == FUSE_WRITE)
            atomic_store(&request->slab->failed, true);
    } else {
        request->groups_held--;
    }
    if (group->result && !request->result)
        request->result = group->result;
    if (--request->groups_left == 0)
        slab_finish(request);
}

/* The memory of `count` pages of a READ from its page `at` on. */
static uint32_t read_memory(const struct request *request, uint64_t at, uint64_t count, struct iovec *iovs) {
    uint32_t n = 0;
    uint64_t byte = at * PAGE, end = byte + count * PAGE;
    while (byte < end) {
        struct slot *slot = request->slots[byte / request->slots[0]->size];
        uint64_t inside = byte % slot->size, length = min_u64(slot->size - inside, end - byte);
        iovs[n++] = (struct iovec){slot->data + inside, length};
        byte += length;
    }
    return n;
}

static int slab_io(struct request *request, uint64_t page, const struct iovec *iovs, uint32_t count) {
    struct ring *ring = &request->server->ring;
    uint32_t segment, at = place(request->slab, page, &segment);
    ring->until_ns = request->until_ns;
    int r = ring_io(ring, request->opcode == FUSE_WRITE, segment, at, iovs, count, request->slots, request->slot_count, slab_io_done, request);
    ring->until_ns = 0;
    if (r == 0) {
        request->groups_left++;
        request->groups_held++;
    }
    return r;
}

/* Runs on the request's server thread, whose ring it is. */
static void slab_submit(struct request *request) {
    struct slab *slab = request->slab;
    struct iovec iovs[READ_SLOTS + 1];
    uint64_t first = request->offset / PAGE, last = pages_of(request->offset + request->size);
    int r = 0;
    request->groups_left = 1; /* ours, until all is queued */
    request->server->batching = true;
    for (uint64_t at = first, stop; at < last && r == 0; at = stop) {
        if (request->opcode == FUSE_WRITE) {
            stop = min_u64(min_u64(last, (at / slab->run_pages + 1) * slab->run_pages), at + STEP_PAGES);
            iovs[0] = (struct iovec){request->payload + (at - first) * PAGE, (stop - at) * PAGE};
            r = slab_io(request, at, iovs, 1);
            continue;
        }
        bool written = is_written(slab, at);
        stop = min_u64(stretch(slab, at, last, written), at + STEP_PAGES);
        uint32_t count = read_memory(request, at - first, stop - at, iovs);
        if (written)
            r = slab_io(request, at, iovs, count);
        else
            for (uint32_t i = 0; i < count; i++)
                memset(iovs[i].iov_base, 0, iovs[i].iov_len);
    }
    if (r < 0 && !request->result)
        request->result = r;
    if (--request->groups_left == 0)
        slab_finish(request);
}

/* With the node's lock held; the node has a slab. The request's size is what there is to read, not more than the file has. */
bool slab_read_begin(struct node *node, struct request *request) {
    struct file *file = node->file;
    request->slab = slab_ref(file->slab);
    uint64_t size = request->offset < file->size ? min_u64(request->size, file->size - request->offset) : 0;
    request->size = (uint32_t)min_u64(size, request->transport->max_read);
    return !atomic_load(&file->slab->failed);
}

void slab_read(struct request *request, bool good) {
    struct kvfs_plane *plane = request->server->plane;
    request->skip = (uint32_t)(request->offset % PAGE);
    uint64_t bytes = request->size ? round_up(request->skip + request->size, PAGE) : 0;
    struct arena *arena = bytes <= SMALL_SIZE ? &plane->reading_small : &plane->reading;
    request->result = good ? 0 : -EIO;
    for (uint64_t got = 0; got < bytes && request->result == 0; got += arena->slot_size) {
        struct slot *slot = slot_get_extra(arena);
        if (slot)
            request->slots[request->slot_count++] = slot;
        else
            request->result = -ENOMEM;
    }
    if (request->result == 0 && bytes)
        slab_submit(request);
    else
        slab_finish(request);
}

static void write_park(struct kvfs_plane *plane, struct file *file, struct request *request) {
    request->next = NULL;
    if (file->parked_last)
        file->parked_last->next = request;
    else
        file->parked = request;
    file->parked_last = request;
    COUNT(plane, parked, 1);
}

static bool overlap(const struct request *a, const struct request *b) {
    return a->offset / PAGE < pages_of(b->offset + b->size) && b->offset / PAGE < pages_of(a->offset + a->size);
}

/* With the node's lock held. 0: it is entered, to be written; -EAGAIN: parked; -EINPROGRESS: for a worker; else an error. */
int slab_write_begin(struct node *node, struct request *request, bool worker) {
    struct file *file = node->file;
    struct slab *slab = file->slab;
    uint64_t end = request->offset + request->size;
    if (atomic_load(&slab->failed))
        return -EIO;
    if (end < request->offset || end > slab_pages(slab) * PAGE)
        return -ENOSPC;
    bool parts = request->offset % PAGE || end % PAGE || (uintptr_t)request->payload % PAGE;
    if (parts && !worker)
        return -EINPROGRESS;
    bool wait = file->sealing;
    if (!wait && (parts || slab->exclusive))
        for (const struct request *other = slab->writing; other && !wait; other = other->next)
            wait = (parts || other->exclusive) && overlap(request, other);
    if (wait) {
        write_park(slab->plane, file, request);
        return -EAGAIN;
    }
    request->slab = slab_ref(slab);
    request->exclusive = parts;
    slab->exclusive += parts;
    request->previous = NULL;
    request->next = slab->writing;
    if (slab->writing)
        slab->writing->previous = request;
    slab->writing = request;
    return 0;
}

void slab_write(struct request *request) { slab_submit(request); }

/* A file that has its size, and no content, and is written with O_DIRECT: it is to be overwritten in place, however it came to O_DIRECT. */
bool slab_ask(struct kvfs_plane *plane, struct node *node, struct request *request) {
    struct file *file = node->file;
    if (file->size < KVFS_SLAB_MIN || file->slab_refused || request->offset + request->size > file->size)
        return false;
    if (!file->slab_asked) {
        if (!file_untouched(file)) {
            file->slab_refused = true;
            return false;
        }
        file->slab_asked = true;
        event_add(plane, KVFS_EVENT_SLAB_WANTED, node->inode, file->size);
    }
    write_park(plane, file, request);
    return true;
}

/* What was written counts, before it is answered. */
static void write_end(struct request *request, int error) {
    struct slab *slab = request->slab;
    struct node *node = request->node;
    uint64_t end = request->offset + request->size;
    pthread_mutex_lock(&node->lock);
    if (error == 0) {
        uint64_t first = request->offset / PAGE, last = pages_of(end);
        if (!slab->overwritten && !(request->flags & FUSE_WRITE_CACHE))
            for (uint64_t page = pages_of(request->offset); page < end / PAGE && !slab->overwritten; page++)
                slab->overwritten = is_written(slab, page);
        for (uint64_t page = first; page < last; page++)
            set_written(slab, page, true);
    }
    if (request->previous)
        request->previous->next = request->next;
    else
        slab->writing = request->next;
    if (request->next)
        request->next->previous = request->previous;
    slab->exclusive -= request->exclusive;
    struct file *file = node->file;
    if (file && file->slab == slab) {
        if (error == 0) {
            struct timespec ts;
            clock_gettime(CLOCK_REALTIME, &ts);
            file->mtime_ns = ts.tv_sec * 1000000000ll + ts.tv_nsec;
            if (end > file->size)
                file->size = end;
        }
        if (file->parked && !file->sealing)
            file_unpark(slab->plane, file);
    }
    pthread_mutex_unlock(&node->lock);
}

static void slab_finish(struct request *request) {
    struct kvfs_plane *plane = request->server->plane;
    int error = request->result ? -EIO : 0;
    if (request->opcode == FUSE_WRITE) {
        write_end(request, error);
        request_reply_write(plane, request, error);
    } else if (error) {
        COUNT(plane, read_errors, 1);
        request_reply_failed(plane, request, error);
    } else {
        request_reply_read(plane, request, request->size);
    }
    if (request->groups_held == 0)
        request_put(plane, request);
}

/* ---- on a worker, blocking ---- */

/* `count` pages of a slab, to or from a slot. */
static int pages_io(struct ring *ring, struct slab *slab, bool write, uint64_t page, uint64_t count, struct slot *slot, uint64_t inside) {
    for (uint64_t at = page, end = page + count, stop; at < end; at = stop) {
        stop = min_u64(end, (at / slab->run_pages + 1) * slab->run_pages);
        uint32_t segment, where = place(slab, at, &segment);
        struct iovec iov = {slot->data + inside + (at - page) * PAGE, (stop - at) * PAGE};
        int r = blocking_io(ring, write, segment, where, &iov, 1, &slot, 1);
        if (r == -ETIMEDOUT && write)
            atomic_store(&slab->failed, true);
        if (r < 0)
            return r;
    }
    return 0;
}

/* What the pages have: zeros where nothing was written. */
static int pages_load(struct ring *ring, struct slab *slab, uint64_t page, uint64_t count, struct slot *slot, uint64_t inside) {
    int r = 0;
    for (uint64_t at = page, end = page + count, stop; at < end && r == 0; at = stop) {
        bool written = is_written(slab, at);
        stop = stretch(slab, at, end, written);
        if (written)
            r = pages_io(ring, slab, false, at, stop - at, slot, inside + (at - page) * PAGE);
        else
            memset(slot->data + inside + (at - page) * PAGE, 0, (stop - at) * PAGE);
    }
    return r;
}

static int write_parts(struct kvfs_plane *plane, struct ring *ring, struct request *request) {
    const uint8_t *payload = request->payload;
    uint64_t at = request->offset, end = at + request->size;
    int r = 0;
    while (at < end && r == 0) {
        struct slot *slot = slot_get_extra(&plane->staging);
        if (!slot)
            return -ENOMEM;
        uint64_t page = at / PAGE, stop = min_u64(end, page * PAGE + RMW_SIZE), last = pages_of(stop) - 1;
        if (at % PAGE || stop < (page + 1) * PAGE)
            r = pages_load(ring, request->slab, page, 1, slot, 0);
        if (r == 0 && stop % PAGE && last > page)
            r = pages_load(ring, request->slab, last, 1, slot, (last - page) * PAGE);
        if (r == 0) {
            memcpy(slot->data + at % PAGE, payload, stop - at);
            r = pages_io(ring, request->slab, true, page, last - page + 1, slot, 0);
        }
        slot_put(slot);
        payload += stop - at;
        at = stop;
    }
    return r;
}

/* A WRITE that waited, or is of parts of pages. False: the file is no slab (any more). */
bool slab_worker_write(struct kvfs_plane *plane, struct ring *ring, struct request *request) {
    struct node *node = request->node;
    pthread_mutex_lock(&node->lock);
    bool slab = node->file && node->file->slab;
    int r = slab ? slab_write_begin(node, request, true) : 0;
    pthread_mutex_unlock(&node->lock);
    if (!slab)
        return false;
    if (r == -EAGAIN)
        return true;
    if (r == 0) {
        r = write_parts(plane, ring, request) ? -EIO : 0;
        write_end(request, r);
    }
    request_reply_write(plane, request, r);
    request_put(plane, request);
    return true;
}

/* ---- what the control plane asks ---- */

/* Nothing of a file's content was ever written. With the node's lock held. */
bool file_untouched(const struct file *file) {
    if (file->slab || file->sealing || file->spilling || file->discarded || file->placed_count)
        return false;
    for (uint32_t i = 0; i < file->chunk_count; i++)
        if (file->chunks[i].state != CHUNK_HOLE)
            return false;
    return true;
}

uint64_t slab_capacity(const struct slab *slab) { return slab_pages(slab) * PAGE; }

/* Whether it could be a file as any other. With the node's lock held. */
static bool slab_may_settle(struct kvfs_plane *plane, const struct file *file) {
    const struct slab *slab = file->slab;
    return !slab->chosen && !atomic_load(&slab->failed) && file->size <= file_size_max(plane);
}

/* Whether the slab goes with its last descriptor, whatever its name. With the node's lock held. */
bool slab_passes(struct kvfs_plane *plane, const struct file *file) { return file->slab->overwritten || !slab_may_settle(plane, file); }

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
        if (runs[i].segment >= plane->config.segment_count || runs[i].page == 0 || runs[i].page_count != runs[0].page_count || runs[0].page_count == 0 ||
            (uint64_t)runs[i].page + runs[i].page_count > plane->array.geometry.segment_pages)
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
    if (r == 0) {
        slab->chosen |= chosen != 0;
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
    pthread_mutex_lock(&shard->lock);
    pthread_mutex_lock(&node->lock);
    int r = node->handles ? -EBUSY : node->file && node->file->slab ? 0 : -ENOENT;
    pthread_mutex_unlock(&node->lock);
    if (r == 0)
        r = kvfs_table_remove(plane->table, inode, 0);
    pthread_mutex_unlock(&shard->lock);
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

/* ---- jobs: a slab gets another size, or becomes a file as any other ---- */

struct slab_job {
    struct job job;
    struct node *node;
    uint64_t size;
    bool writers_stay;
};

/* With the node's lock held. True: the file was given up meanwhile, and is gone; the caller puts the node once more. */
static bool thaw(struct kvfs_plane *plane, struct node *node) {
    struct file *file = node->file;
    file->sealing = false;
    file_unpark(plane, file);
    if (file->discarded)
        file_free(plane, node);
    return !node->file;
}

/* Let nobody write. With the node's lock held, which it opens while it waits. An error: it is thawed, and `gone` as thaw() says. */
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
        if (size % PAGE && is_written(slab, size / PAGE)) {
            struct slot *slot = slot_get_extra(&plane->staging);
            r = slot ? pages_load(ring, slab, size / PAGE, 1, slot, 0) : -ENOMEM;
            if (r == 0) {
                memset(slot->data + size % PAGE, 0, PAGE - size % PAGE);
                r = pages_io(ring, slab, true, size / PAGE, 1, slot, 0);
            }
            slot_put(slot);
        }
        for (uint64_t page = pages_of(size); r == 0 && page < pages_of(before); page++)
            set_written(slab, page, false);
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

/* Prove what a chunk's pages will be known by, and fill those that were never written. 1: it is placed; 0: a hole. */
static int settle_chunk(struct kvfs_plane *plane, struct ring *ring, struct slab *slab, struct file *file, uint32_t index) {
    uint64_t first = (uint64_t)index * CHUNK_PAGES, last = min_u64(first + CHUNK_PAGES, pages_of(file->size));
    uint64_t size = min_u64(CHUNK_SIZE, file->size - index * CHUNK_SIZE);
    bool any = false;
    for (uint64_t page = first; page < last && !any; page++)
        any = is_written(slab, page);
    if (!any)
        return 0;
    struct slot *slot = slot_get_extra(&plane->staging);
    int r = slot ? pages_load(ring, slab, first, last - first, slot, 0) : -ENOMEM;
    for (uint64_t at = first, stop; at < last && r == 0; at = stop) {
        bool written = is_written(slab, at);
        stop = stretch(slab, at, last, written);
        if (!written)
            r = pages_io(ring, slab, true, at, stop - at, slot, (at - first) * PAGE);
    }
    if (r == 0)
        kvfs_leaf_checksums(slot->data, size, plane->config.secret, &file->leaves[first]);
    slot_put(slot);
    return r < 0 ? r : 1;
}

/* Returns with the node's lock held: who finds a file finds one that is not frozen. */
static int settle(struct kvfs_plane *plane, struct ring *ring, struct node *node) {
    struct file *file = node->file; /* frozen */
    struct slab *slab = file->slab;
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
        r = settle_chunk(plane, ring, slab, file, i);
        states[i] = r == 1;
    }
    pthread_mutex_lock(&node->lock);
    if (r >= 0) {
        for (uint32_t i = 0; i < slab->run_count && (uint64_t)i * slab->run_pages < pages; i++) {
            const struct slab_run *run = &slab->runs[i];
            uint32_t from = i * slab->run_pages;
            placed[extents++] = (struct kvfs_extent){run->generation, run->segment, run->page, (uint32_t)min_u64(slab->run_pages, pages - from), from};
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

static void settle_job(struct kvfs_plane *plane, struct ring *ring, struct job *base) {
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
        if (job->writers_stay ? !slab_may_settle(plane, node->file) : slab_passes(plane, node->file)) {
            r = -EPERM;
        } else {
            pthread_mutex_unlock(&node->lock);
            r = settle(plane, ring, node);
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

int kvfs_slab_settle(struct kvfs_plane *plane, uint64_t cookie, uint64_t inode, int writers_stay) {
    return job_start(plane, cookie, inode, 0, writers_stay != 0, settle_job);
}
