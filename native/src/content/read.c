/* Reads of sealed blocks: table, device, checksum, reply. Nothing here enters Python, nothing is copied on the way. */
#include "content/content.h"

static void read_part_done(struct io_group *group, bool reaped);

/* Memory for pages [skip rounded .. size) of a read. */
static bool read_slots(struct kvfs_plane *plane, struct request *request, uint64_t bytes) {
    if (bytes <= SMALL_SIZE) {
        struct slot *slot = slot_get(&plane->reading_small);
        if (slot) {
            request->slots[0] = slot;
            request->slot_count = 1;
            return true;
        }
    }
    for (uint64_t got = 0; got < bytes; got += CHUNK_SIZE) {
        struct slot *slot = slot_get(&plane->reading);
        if (!slot) {
            while (request->slot_count)
                slot_put(request->slots[--request->slot_count]);
            return false;
        }
        assert(request->slot_count < READ_SLOTS);
        request->slots[request->slot_count++] = slot;
    }
    return true;
}

/* A guest keeps no bytes that are not proven. */
static void targets_clear(struct request *request) {
    for (uint32_t i = 0; i < request->target_count; i++)
        memset(request->targets[i].iov_base, 0, request->targets[i].iov_len);
}

static void read_finish(struct request *request, int error) {
    assert(error < 0);
    assert(request->groups_left == 0);
    struct kvfs_plane *plane = request->io->plane;
    COUNT(plane, read_errors, 1);
    struct node *node = request->node;
    uint64_t now = now_ns();
    pthread_mutex_lock(&node->lock);
    /* A retry does not extend the deadline: it inherits the first attempt's. A failure at the end of that deadline is recorded anew, so the next
     * retry inherits the deadline too. */
    if (node->failed_until_ns != request->until_ns || (now >= request->until_ns && node->failed_ns < request->until_ns)) {
        node->failed_ns = now;
        node->failed_until_ns = request->until_ns;
    }
    pthread_mutex_unlock(&node->lock);
    /* A device that gave no answer may still write into these slots and this header. The groups hold the slots, the request holds the header. Nobody
     * holds the pages of a guest: after the answer the guest uses them for something else. So the answer waits for the device beyond the deadline,
     * until the kernel gives up on the device. Meanwhile other reads go through slots. */
    request->owed = request->direct && request->groups_held;
    if (!request->owed) {
        targets_clear(request);
        request->done(request, error);
    }
    if (request->groups_held == 0)
        request_put(plane, request);
    else
        request->result = -ETIMEDOUT;
}

static void read_wait(struct request *request) {
    struct io_thread *io = request->io;
    request->next = NULL;
    if (io->waiting_last)
        io->waiting_last->next = request;
    else
        io->waiting_reads = request;
    io->waiting_last = request;
}

void reads_retry(struct io_thread *io) {
    const uint64_t timeout_ns = io->ring.array->io_timeout_ms * 1000000ull;
    const uint64_t answered_ns = atomic_load_explicit(&io->ring.array->answered_ns, memory_order_relaxed);
    struct request *request = io->waiting_reads;
    io->waiting_reads = io->waiting_last = NULL;
    while (request) {
        struct request *next = request->next;
        /* It waits for memory, which reads of all threads have, not for a device that is silent. A retry keeps the first attempt's deadline. */
        if (request->until_ns >= request->arrived_ns + timeout_ns && request->until_ns < answered_ns + timeout_ns)
            request->until_ns = answered_ns + timeout_ns;
        read_submit(request);
        request = next;
    }
}

static int read_io(struct request *request, uint32_t segment, uint32_t page, const struct iovec *iovs, uint32_t count) {
    struct ring *ring = &request->io->ring;
    ring->until_ns = request->until_ns;
    if (request->direct) /* a guest that is reset has its pages back after two deadlines */
        ring->start_by_ns = request->arrived_ns + ring->array->io_timeout_ms * 1000000ull;
    request->groups_left++; /* counted first: the callback may come before ring_io() returns */
    request->groups_held++;
    int r = ring_io(ring, false, segment, page, iovs, count, request->slots, request->slot_count, read_part_done, request);
    ring->until_ns = ring->start_by_ns = 0;
    if (r < 0) {
        request->groups_left--;
        request->groups_held--;
    }
    return r;
}

/* The memory of file pages [from, to) of a read that begins at page `first`. */
static uint32_t slots_memory(const struct request *request, uint32_t first, uint32_t from, uint32_t to, struct iovec *iovs) {
    uint32_t count = 0;
    uint64_t at = (uint64_t)(from - first) * PAGE, end = (uint64_t)(to - first) * PAGE;
    while (at < end) {
        struct slot *slot = request->slots[at / request->slots[0]->size];
        uint64_t inside = at % slot->size, length = min_u64(slot->size - inside, end - at);
        if (count && (uint8_t *)iovs[count - 1].iov_base + iovs[count - 1].iov_len == slot->data + inside)
            iovs[count - 1].iov_len += length;
        else
            iovs[count++] = (struct iovec){slot->data + inside, length};
        at += length;
    }
    return count;
}

static uint32_t targets_memory(const struct request *request, uint32_t first, uint32_t from, uint32_t to, struct iovec *iovs) {
    uint32_t count = 0;
    uint64_t at = (uint64_t)(from - first) * PAGE, end = (uint64_t)(to - first) * PAGE; /* counted from the target's start */
    for (uint32_t i = 0; at < end; i++) {
        const struct iovec *target = &request->targets[i];
        if (at < target->iov_len) {
            iovs[count++] = (struct iovec){(uint8_t *)target->iov_base + at, min_u64(target->iov_len, end) - at};
            at = target->iov_len;
        }
        at -= target->iov_len;
        end = end > target->iov_len ? end - target->iov_len : 0;
    }
    return count;
}

static uint32_t read_memory(const struct request *request, uint32_t first, uint32_t from, uint32_t to, struct iovec *iovs) {
    return (request->direct ? targets_memory : slots_memory)(request, first, from, to, iovs);
}

/* A guest's pages are many pieces, so an I/O has at most CHUNK_PAGES of them. */
static uint32_t read_step(const struct request *request, uint32_t from, uint32_t to) {
    return request->direct && to - from > CHUNK_PAGES ? from + CHUNK_PAGES : to;
}

/* Read file pages [from, to), which lie in the segment from `page` on. */
static int read_pages(struct request *request, uint32_t segment, uint32_t page, uint32_t first, uint32_t from, uint32_t to, struct iovec *iovs) {
    int r = 0;
    for (uint32_t at = from, stop; at < to && r == 0; at = stop) {
        stop = read_step(request, at, to);
        r = read_io(request, segment, page + (at - from), iovs, read_memory(request, first, at, stop, iovs));
    }
    return r;
}

/* The header is not known yet: read it together with the data right behind it. */
static int header_submit(struct request *request, uint32_t first, uint32_t last) {
    struct iovec iovs[CHUNK_PAGES + 1];
    const struct kvfs_record *record = &request->record;
    request->desc = desc_new(record->header_pages);
    request->load_header = true;
    if (!request->desc)
        return -ENOMEM;
    iovs[0] = (struct iovec){request->desc->header, record->header_pages * PAGE};
    uint32_t data = record->page + record->header_pages, count = 1, stop = first;
    if (record->extent_count == 0 && first == 0 && record->header_pages < 64) { /* one I/O */
        stop = read_step(request, first, last);
        count += read_memory(request, first, first, stop, iovs + 1);
    }
    int r = read_io(request, record->segment, record->page, iovs, count);
    return r < 0 || record->extent_count ? r : read_pages(request, record->segment, data + stop, first, stop, last, iovs);
}

static void zero_pages(const struct request *request, uint32_t first, uint32_t from, uint32_t to) {
    for (struct iovec page; from < to; from++) {
        read_memory(request, first, from, from + 1, &page);
        memset(page.iov_base, 0, PAGE);
    }
}

static int extents_submit(struct request *request, uint32_t first, uint32_t last) {
    struct iovec iovs[CHUNK_PAGES + 1];
    const struct desc *desc = request->desc;
    uint32_t at = first;
    int r = 0;
    for (uint32_t i = 0; i < desc->extent_count && at < last && r == 0; i++) {
        const struct kvfs_extent *e = &desc->extents[i];
        uint32_t e_end = e->file_page + e->page_count;
        if (e_end <= at)
            continue;
        uint32_t from = e->file_page > at ? e->file_page : at, to = (uint32_t)min_u64(last, e_end);
        zero_pages(request, first, at, (uint32_t)min_u64(from, last)); /* a hole */
        if (from < to)
            r = read_pages(request, e->segment, e->page + (from - e->file_page), first, from, to, iovs);
        at = to > at ? to : at;
    }
    zero_pages(request, first, at, last);
    return r;
}

/* It failed its proofs where it was. True: it lies elsewhere, and is to be read there. */
static bool read_follow(struct request *request) {
    if (!foreign_moved(request->io->plane, request->node, &request->record, request->desc))
        return false;
    desc_put(request->desc);
    request->desc = NULL;
    return true;
}

/* Start (or start again) a read: request->node, offset, size are set; desc is known or not. */
void read_submit(struct request *request) {
    struct kvfs_plane *plane = request->io->plane;
    if (request->until_ns <= now_ns()) {
        read_finish(request, -EIO);
        return;
    }
    if (request->awaits_news && !read_follow(request)) {
        read_wait(request);
        return;
    }
    request->awaits_news = false;
    if (!request->desc) {
        int r = node_record(plane, request->node, &request->record);
        if (r < 0 || !(request->record.flags & KVFS_INODE_SEALED) || request->record.header_pages == 0) {
            read_finish(request, -EIO);
            return;
        }
    }
    uint64_t file_size = request->desc ? request->desc->size : request->record.size;
    if (request->offset >= file_size) {
        request->done(request, 0);
        request_put(plane, request);
        return;
    }
    uint64_t end = min_u64(request->offset + request->size, file_size);
    uint32_t first = (uint32_t)(request->offset / PAGE), last = (uint32_t)pages_of(end);
    request->skip = (uint32_t)(request->offset % PAGE);
    if (request->slot_count == 0 && !request->direct && !read_slots(plane, request, (last - first) * PAGE)) {
        read_wait(request);
        return;
    }
    request->groups_left = 1; /* our own reference, until all is queued */
    request->groups_held = 0;
    request->result = 0;
    int r = request->desc ? extents_submit(request, first, last) : header_submit(request, first, last);
    if (r < 0)
        request->result = r;
    if (--request->groups_left == 0) {
        request->groups_left = 1;
        struct io_group none = {.owner = request, .result = 0};
        request->groups_held++;
        read_part_done(&none, false);
    }
}

static bool same_place(const struct kvfs_record *record, const struct desc *desc) {
    return record->generation == desc->generation && record->segment == desc->segment && record->page == desc->page;
}

static bool leaves_good(const struct request *request, uint64_t end) {
    const struct desc *desc = request->desc;
    uint32_t page = (uint32_t)(request->offset / PAGE), last = (uint32_t)pages_of(end);
    uint64_t left = min_u64((uint64_t)last * PAGE, desc->size) - (uint64_t)page * PAGE;
    for (uint32_t i = 0; left; i++) {
        uint8_t *data = request->direct ? request->targets[i].iov_base : request->slots[i]->data;
        uint64_t length = min_u64(left, request->direct ? request->targets[i].iov_len : request->slots[i]->size);
        if (kvfs_leaf_verify(data, length, request->io->plane->config.secret, desc->leaves + page))
            return false;
        page += (uint32_t)(length / PAGE);
        left -= length;
    }
    return true;
}

/* The padding of a block's last page does not belong to the file. A guest sees the whole page, so it is cleared. */
static void padding_clear(const struct request *request, uint64_t end) {
    struct iovec last;
    uint32_t first = (uint32_t)(request->offset / PAGE), page = (uint32_t)(end / PAGE);
    read_memory(request, first, page, page + 1, &last);
    memset((uint8_t *)last.iov_base + end % PAGE, 0, PAGE - end % PAGE);
}

static void read_succeed(struct request *request, uint64_t end) {
    struct node *node = request->node;
    struct desc *desc = request->desc;
    pthread_mutex_lock(&node->lock);
    if (node->desc != desc && !node->file) {
        desc_put(node->desc);
        atomic_fetch_add(&desc->refs, 1);
        node->desc = desc;
    }
    pthread_mutex_unlock(&node->lock);
    request->done(request, (int64_t)(end - request->offset));
    request_put(request->io->plane, request);
}

/* A foreign block proves itself, wherever its name leads by now. If it does not, its owner may have moved it. */
static void read_foreign_complete(struct request *request, int error, uint64_t end) {
    struct kvfs_plane *plane = request->io->plane;
    if (error == 0 && !foreign_proven(plane, request->node, request->desc))
        error = -ESTALE;
    if (error == 0) {
        read_succeed(request, end);
        return;
    }
    if (error == -EBADMSG && request->groups_held == 0 && request->retries++ < 4) {
        if (read_follow(request)) {
            read_submit(request);
            return;
        }
        if (now_ns() < plane->news_until_ns) { /* its owner may have told an earlier daemon, and this one hears of it soon */
            request->awaits_news = true;
            read_wait(request);
            return;
        }
    }
    if (error != -EBADMSG && error != -ESTALE && error != -ENOMEM) /* a header that the node has kept came without a look-up */
        foreign_avoid(plane, request->record.header_pages ? request->record.segment : request->desc->segment);
    read_finish(request, -EIO);
}

/* Everything is in memory: prove it, then reply. */
static void read_complete(struct request *request) {
    struct kvfs_plane *plane = request->io->plane;
    struct desc *desc = request->desc;
    int error = request->result;
    bool header_only = false;
    if (error == 0 && request->load_header) {
        error = desc_verify(&plane->array.geometry, desc, &request->record);
        if (error == 0 && !foreign_is_same(request->node, desc))
            error = -ESTALE; /* a sound block, which others may read */
        if (error == 0) {
            request->load_header = false;
            header_only = request->record.extent_count > 0;
        }
    }
    if (error == 0 && header_only) {
        read_submit(request); /* now the extents are known */
        return;
    }
    uint64_t end = 0;
    if (error == 0) {
        end = min_u64(request->offset + request->size, desc->size);
        if (plane->config.verify && !leaves_good(request, end))
            error = -EBADMSG;
        else if (request->direct && end % PAGE && end == desc->size)
            padding_clear(request, end);
    }
    if (request->node->foreign) {
        read_foreign_complete(request, error, end);
        return;
    }
    /* The bytes are proven for this location. The location may no longer be the inode's (I10): a segment is reused after its blocks have left the
     * table. */
    struct kvfs_record record = {0};
    int found = kvfs_table_find_inode(plane->table, request->node->inode, &record);
    bool moved = found == 0 && desc &&
                 !(request->load_header ? record.generation == request->record.generation && record.segment == request->record.segment &&
                                              record.page == request->record.page
                                        : same_place(&record, desc));
    if (moved && request->retries < 4 && request->groups_held == 0) {
        request->retries++;
        desc_put(request->desc);
        request->desc = NULL;
        read_submit(request);
        return;
    }
    if (error == 0 && (moved || found < 0))
        error = -EIO;
    if (error == -EBADMSG) {
        COUNT(plane, checksum_errors, 1);
        event_add(plane, KVFS_EVENT_BAD_BLOCK, request->node->inode, record.segment);
    }
    if (error < 0) {
        read_finish(request, -EIO);
        return;
    }
    read_succeed(request, end);
}

static void read_part_done(struct io_group *group, bool reaped) {
    struct request *request = group->owner;
    assert(request->groups_held > 0);
    if (reaped) {
        if (--request->groups_held == 0 && request->groups_left == 0) {
            if (request->owed) {
                targets_clear(request);
                request->done(request, -EIO);
            }
            request_put(request->io->plane, request);
        }
        return;
    }
    if (!group->expired)
        request->groups_held--;
    if (group->ring && !group->result)
        ring_renew(group->ring, &request->until_ns);
    if (group->result && !request->result)
        request->result = group->result;
    assert(request->groups_left > 0);
    if (--request->groups_left == 0)
        read_complete(request);
}
