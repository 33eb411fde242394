/* Slabs: files that are preallocated and overwritten in place. Their pages lie in whole segments of their own. READ and WRITE go straight to the
 * devices: there are no checksums, no header, no staging.
 *
 * A page that was never written reads as zeros, as the device holds some other block's bytes there. Only memory knows which pages were written: a
 * slab does not outlive its daemon. A write of whole pages goes out from the memory that it arrived in. A write that covers pages in part is done by
 * a worker, which reads these pages first; no other write is on them meanwhile. A write that a device did not answer may land at any later time: the
 * slab has then failed, and answers EIO. */
#include "content/slab.h"

#define STEP_PAGES 512u /* of one I/O: as many as a group holds */
#define RMW_SIZE CHUNK_SIZE

/* ---- reads and writes of whole pages ---- */

static void slab_finish(struct request *request);

static void slab_io_done(struct io_group *group, bool reaped) {
    struct request *request = group->owner;
    if (reaped) {
        if (--request->groups_held == 0 && request->groups_left == 0)
            request_put(request->io->plane, request);
        return;
    }
    if (group->expired) {
        if (request->write)
            atomic_store(&request->slab->failed, true);
    } else {
        request->groups_held--;
    }
    if (!group->result)
        ring_renew(group->ring, &request->until_ns);
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
    struct ring *ring = &request->io->ring;
    uint32_t segment, at = slab_locate(request->slab, page, &segment);
    ring->until_ns = request->until_ns;
    request->groups_left++; /* counted first: the callback may come before ring_io() returns */
    request->groups_held++;
    int r = ring_io(ring, request->write, segment, at, iovs, count, request->slots, request->slot_count, slab_io_done, request);
    ring->until_ns = 0;
    if (r < 0) {
        request->groups_left--;
        request->groups_held--;
    }
    return r;
}

/* Runs on the server thread that took the request: the ring is that thread's. */
static void slab_submit(struct request *request) {
    struct slab *slab = request->slab;
    struct iovec iovs[READ_SLOTS + 1];
    uint64_t first = request->offset / PAGE, last = pages_of(request->offset + request->size);
    int r = 0;
    assert(!request->write || request->offset % PAGE == 0); /* parts of pages are a worker's */
    assert(!request->write || request->size % PAGE == 0);
    assert(!request->write || (uintptr_t)request->payload % PAGE == 0);
    request->groups_left = 1; /* our own reference, until all is queued */
    request->io->batching = true;
    for (uint64_t at = first, stop; at < last && r == 0; at = stop) {
        if (request->write) {
            stop = min_u64(min_u64(last, (at / slab->run_pages + 1) * slab->run_pages), at + STEP_PAGES);
            iovs[0] = (struct iovec){request->payload + (at - first) * PAGE, (stop - at) * PAGE};
            r = slab_io(request, at, iovs, 1);
            continue;
        }
        bool written = slab_page_written(slab, at);
        stop = min_u64(slab_stretch(slab, at, last, written), at + STEP_PAGES);
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

/* With the node's lock held; the node has a slab. Cuts the request's size to the file's end. */
bool slab_read_begin(struct node *node, struct request *request) {
    struct file *file = node->file;
    assert(file->size <= slab_capacity(file->slab));
    request->slab = slab_ref(file->slab);
    uint64_t size = request->offset < file->size ? min_u64(request->size, file->size - request->offset) : 0;
    request->size = (uint32_t)size;
    return !atomic_load(&file->slab->failed);
}

void slab_read(struct request *request, bool good) {
    struct kvfs_plane *plane = request->io->plane;
    request->skip = (uint32_t)(request->offset % PAGE);
    uint64_t bytes = request->size ? round_up(request->skip + request->size, PAGE) : 0;
    struct arena *arena = bytes <= SMALL_SIZE ? &plane->reading_small : &plane->reading;
    request->result = good ? 0 : -EIO;
    for (uint64_t got = 0; got < bytes && request->result == 0; got += arena->slot_size) {
        struct slot *slot = slot_get_extra(arena);
        assert(request->slot_count < READ_SLOTS);
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

static bool overlap(const struct request *a, const struct request *b) {
    return a->offset / PAGE < pages_of(b->offset + b->size) && b->offset / PAGE < pages_of(a->offset + a->size);
}

/* With the node's lock held. 0: it is in the list, to be written; -EAGAIN: parked; -EINPROGRESS: for a worker; else an error. */
int slab_write_begin(struct node *node, struct request *request, bool worker) {
    struct file *file = node->file;
    struct slab *slab = file->slab;
    uint64_t end = request->offset + request->size;
    assert(!request->slab); /* it is entered once */
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
        file_park(slab->plane, file, request);
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

/* A file is to become a slab if it has its size and no content, and is written with O_DIRECT. O_DIRECT may come from open(2) or from fcntl(2). */
bool slab_ask(struct kvfs_plane *plane, struct node *node, struct request *request) {
    struct file *file = node->file;
    if (file->size < KVFS_SLAB_MIN || file->slab_refused || request->offset + request->size > file->size)
        return false;
    if (!file->slab_asked) {
        if (!file_untouched(file)) {
            file->slab_refused = true;
            return false;
        }
        /* If nobody hears of it, nobody answers: then the WRITE does not wait. */
        if (!event_add(plane, KVFS_EVENT_SLAB_WANTED, node->inode, file->size))
            return false;
        file->slab_asked = true;
    }
    file_park(plane, file, request);
    return true;
}

/* Notes the written pages, before the answer. */
static void write_end(struct request *request, int error) {
    struct slab *slab = request->slab;
    struct node *node = request->node;
    uint64_t end = request->offset + request->size;
    pthread_mutex_lock(&node->lock);
    assert(slab->writing);
    assert(end <= slab_capacity(slab));
    if (error == 0) {
        uint64_t first = request->offset / PAGE, last = pages_of(end);
        if (!slab->overwritten && !(request->cached))
            for (uint64_t page = pages_of(request->offset); page < end / PAGE && !slab->overwritten; page++)
                slab->overwritten = slab_page_written(slab, page);
        for (uint64_t page = first; page < last; page++)
            slab_page_mark(slab, page, true);
    }
    if (request->previous)
        request->previous->next = request->next;
    else
        slab->writing = request->next;
    if (request->next)
        request->next->previous = request->previous;
    assert(slab->exclusive >= request->exclusive);
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
    struct kvfs_plane *plane = request->io->plane;
    int error = request->result ? -EIO : 0;
    if (request->write) {
        write_end(request, error);
        request->done(request, error);
    } else if (error) {
        COUNT(plane, read_errors, 1);
        request->done(request, error);
    } else {
        request->done(request, request->size);
    }
    if (request->groups_held == 0)
        request_put(plane, request);
}

/* ---- on a worker, blocking ---- */

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
            r = slab_pages_load(ring, request->slab, page, 1, slot, 0);
        if (r == 0 && stop % PAGE && last > page)
            r = slab_pages_load(ring, request->slab, last, 1, slot, (last - page) * PAGE);
        if (r == 0) {
            memcpy(slot->data + at % PAGE, payload, stop - at);
            r = slab_pages_io(ring, request->slab, true, page, last - page + 1, slot, 0);
        }
        slot_put(slot);
        payload += stop - at;
        at = stop;
    }
    return r;
}

/* Writes parts of pages, and WRITEs that waited. False: the file is no slab, or no longer one. */
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
    request->done(request, r);
    request_put(plane, request);
    return true;
}

/* ---- jobs: a slab gets another size, or becomes an ordinary file ---- */
