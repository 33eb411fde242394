/* One block of a put onto its devices: header, data, and the headers of further runs. */
#include "client/put.h"

/* Its memory, once no device needs it. */
void item_release(struct put_item *item) {
    assert(item->groups_held == 0);
    desc_put(item->header);
    free(item->side);
    if (item->bounce)
        lane_bounce_give(item->lane, item->bounce, item->bounce_size);
    item->header = NULL;
    item->side = item->bounce = NULL;
}

/* Its call is over, and no device needs it. */
void item_end(struct put_item *item) {
    struct connection *connection = item->lane->connection;
    assert(item->dismissed);
    item_release(item);
    if (!item->late) {
        free(item);
        return;
    }
    item->late_write.reservation = item->reserved.reservation;
    item->late_write.next = atomic_load(&connection->landed);
    while (!atomic_compare_exchange_weak(&connection->landed, &item->late_write.next, &item->late_write))
        ;
}

/* One of its groups has an outcome, or all have been started. */
void item_advance(struct put_item *item) {
    assert(item->groups_left > 0);
    if (--item->groups_left)
        return;
    assert(item->window->in_flight > 0);
    assert(item->call->in_flight > 0);
    item->window->in_flight--;
    item->call->in_flight--;
    if (item->groups_held == 0)
        item_release(item);
}

static void write_done(struct io_group *group, bool reaped) {
    struct put_item *item = group->owner;
    assert(item->groups_held > 0);
    if (reaped || !group->expired)
        item->groups_held--;
    if (!reaped) {
        if (group->result && !item->error) { /* EFBIG is the daemon's: no pool has room for it */
            item->error = group->result == -EFBIG ? -EOVERFLOW : group->result;
            ring_drop(group->ring, item);
        }
        item_advance(item);
    } else if (item->groups_held == 0 && item->dismissed) {
        item_end(item); /* given up on long ago; its device has answered */
    }
}

static int item_io(struct put_item *item, const struct wire_run *run, uint32_t page, const struct iovec *iovs, uint32_t count) {
    struct ring *ring = &item->lane->ring;
    /* A write that begins later might meet another's block: the daemon takes the place back then. */
    ring->start_by_ns = item->window->requested_ns + item->lane->connection->reservation_ms * 1000000ull;
    item->groups_left++; /* counted first: the callback may come before ring_io() returns */
    item->groups_held++;
    int r = ring_io(ring, true, run->segment, page, iovs, count, NULL, 0, write_done, item);
    ring->start_by_ns = 0;
    item->begun |= r == 0;
    if (r < 0) {
        item->groups_left--;
        item->groups_held--;
    }
    return r;
}

/* The daemon's reply about a block: runs, then the record with its extents, then ancestors. */
static const struct wire_run *runs_of(const struct put_item *item) { return (const struct wire_run *)(const void *)item->body; }
const uint8_t *item_record(const struct put_item *item) { return item->body + item->reserved.run_count * sizeof(struct wire_run); }
/* Run 0 needs no extent header: its page is the last one's. */
static uint8_t *tail_of(const struct put_item *item) { return item->side + (item->reserved.run_count - 1) * PAGE; }

/* The next memory of the block, of `pages` whole pages at most. Returns how many it has. */
static uint32_t piece_take(const struct put_item *item, struct piece_place *place, uint32_t pages, struct iovec *iov) {
    while (item->pieces[place->piece].size - place->at < PAGE)
        *place = (struct piece_place){place->piece + 1, 0};
    const struct kvfs_buffer *piece = &item->pieces[place->piece];
    uint32_t taken = (uint32_t)min_u64((piece->size - place->at) / PAGE, pages);
    *iov = (struct iovec){(uint8_t *)piece->data + place->at, taken * PAGE};
    place->at += taken * PAGE;
    return taken;
}

/* `head`, which may be NULL, and pages [from, to) of the block's data, to `page` of the run's segment. */
static int data_io(struct put_item *item, const struct wire_run *run, uint32_t page, const struct iovec *head, uint32_t from, uint32_t to) {
    uint32_t whole = (uint32_t)(item->size / PAGE), limit = (uint32_t)(GROUP_BYTES / PAGE);
    for (;;) {
        struct iovec iovs[GROUP_IOVS];
        struct piece_place place = item->place;
        uint32_t count = 0, at = from, end = (uint32_t)min_u64(to, from + limit);
        if (head)
            iovs[count++] = *head;
        while (at < min_u64(end, whole) && count < GROUP_IOVS - 1)
            at += piece_take(item, &place, (uint32_t)min_u64(end, whole) - at, &iovs[count++]);
        if (at == whole && at < end) {
            iovs[count++] = (struct iovec){tail_of(item), PAGE};
            at++;
        }
        int r = item_io(item, run, page, iovs, count);
        if (r == -E2BIG && at - from > 1) { /* edges of pieces and of stripe units together are more than a group holds */
            limit = (at - from) / 2;
            continue;
        }
        item->place = place;
        page += (head ? (uint32_t)(head->iov_len / PAGE) : 0) + (at - from);
        from = at;
        head = NULL;
        if (r < 0 || from == to)
            return r;
    }
}

/* Each piece begins where a device can take it, and with a page of the block. */
static bool pieces_direct(const struct put_item *item, uint32_t alignment) {
    uint64_t at = 0;
    for (uint32_t i = 0; i < item->piece_count; at += item->pieces[i++].size)
        if (item->pieces[i].size && ((uintptr_t)item->pieces[i].data % alignment || at % PAGE))
            return false;
    return true;
}

/* The block's bytes become one piece, in memory that a device can take. */
static int pieces_copy(struct put_item *item) {
    item->bounce_size = item->size + 1;
    item->bounce = lane_bounce(item->lane, &item->bounce_size);
    if (!item->bounce)
        return -ENOMEM;
    uint64_t at = 0;
    for (uint32_t i = 0; i < item->piece_count; at += item->pieces[i++].size)
        copy_bytes(item->bounce + at, item->pieces[i].data, item->pieces[i].size);
    assert(at == item->size);
    item->copied = (struct kvfs_buffer){item->bounce, item->size};
    item->pieces = &item->copied;
    item->piece_count = 1;
    TALLY(item->lane->client, bounced_bytes, item->size);
    return 0;
}

/* Checksums of the leaves, and the last page if it is not whole, padded. Pieces begin with pages. */
static void leaves_make(struct put_item *item, uint64_t *leaves) {
    uint64_t secret = item->lane->connection->array.geometry.secret, at = 0;
    for (uint32_t i = 0; i < item->piece_count; at += item->pieces[i++].size) {
        const struct kvfs_buffer *piece = &item->pieces[i];
        uint64_t rest = piece->size % PAGE;
        if (piece->size == 0)
            continue;
        assert(at % PAGE == 0);
        for (uint64_t done = 0; done < piece->size; done += GROUP_BYTES) { /* devices go on meanwhile */
            kvfs_leaf_checksums((const uint8_t *)piece->data + done, min_u64(piece->size - done, GROUP_BYTES), secret, leaves + (at + done) / PAGE);
            ring_feed(&item->lane->ring);
        }
        if (rest) {
            memcpy(tail_of(item), (const uint8_t *)piece->data + (piece->size - rest), rest);
            memset(tail_of(item) + rest, 0, PAGE - rest);
        }
    }
}

/* Check that, and make what goes to the devices. */
int item_prepare(struct put_item *item) {
    struct connection *connection = item->lane->connection;
    struct kvfs_array *array = &connection->array;
    const struct wire_reserved *w = &item->reserved;
    const struct wire_run *runs = runs_of(item);
    const uint8_t *record_at = item_record(item), *ancestors = record_at + round_up(w->record_size, 8);
    uint32_t leaf_count = (uint32_t)pages_of(item->size);
    struct kvfs_inode_record record;
    memcpy(&record, record_at, sizeof(record));
    uint64_t extents_at = sizeof(record) + round_up(record.name_size, 8), extents_size = sizeof(struct kvfs_extent) * (uint64_t)record.extent_count;
    if (record.record_size != w->record_size || extents_at + extents_size > w->record_size || record.size != item->size ||
        record.segment != runs[0].segment || record.page != runs[0].page || record.generation != runs[0].generation ||
        runs[0].page_count < w->header_pages || w->header_pages == 0)
        return -EPROTO;
    uint64_t room = 0;
    for (uint32_t i = 0; i < w->run_count; i++)
        room += runs[i].page_count - (i ? 1u : w->header_pages);
    if (room != leaf_count)
        return -EPROTO;
    item->header = desc_new(w->header_pages);
    uint8_t *bare = malloc(w->record_size);
    uint64_t *leaves = malloc((leaf_count + 1) * sizeof(*leaves));
    void *side = NULL;
    int r = item->header && bare && leaves && posix_memalign(&side, KVFS_PAGE_SIZE, w->run_count * PAGE) == 0 ? 0 : -ENOMEM;
    item->side = side;
    if (r == 0 && !pieces_direct(item, connection->memory_alignment))
        r = pieces_copy(item);
    if (r == 0) {
        leaves_make(item, leaves);
        memcpy(bare, record_at, extents_at);
        memcpy(bare + extents_at, record_at + extents_at + extents_size, w->record_size - extents_at - extents_size);
        const struct kvfs_extent *extents = (const struct kvfs_extent *)(const void *)(record_at + extents_at);
        struct kvfs_extent whole = {record.generation, record.segment, record.page + w->header_pages, leaf_count, 0};
        r = header_build(&array->geometry, item->header, bare, (uint32_t)(w->record_size - extents_size), ancestors, w->ancestors_size,
                         record.extent_count ? extents : &whole, record.extent_count ? record.extent_count : leaf_count > 0, leaves,
                         runs[0].page_count);
    }
    uint32_t page = runs[0].page_count - w->header_pages;
    for (uint32_t i = 1; i < w->run_count && r == 0; i++) {
        struct kvfs_run run = {runs[i].generation, runs[i].segment, runs[i].page, runs[i].page_count, 0};
        extent_header_build(&array->geometry, item->side + (i - 1) * PAGE, record.inode, &run, page);
        page += runs[i].page_count - 1;
    }
    free(bare);
    free(leaves);
    return r;
}

/* Queue its writes. */
int item_write(struct put_item *item) {
    const struct wire_reserved *w = &item->reserved;
    const struct wire_run *runs = runs_of(item);
    uint32_t page = 0;
    int r = 0;
    for (uint32_t i = 0; i < w->run_count && r == 0; i++) {
        uint32_t before = i ? 1 : w->header_pages, written = 0;
        /* A long header goes by itself: with data it may be more pieces than a group can have. */
        for (uint32_t count; i == 0 && before >= 64 && written < before && r == 0; written += count) {
            count = (uint32_t)min_u64(before - written, GROUP_BYTES / PAGE);
            r = item_io(item, &runs[0], runs[0].page + written, &(struct iovec){item->header->header + written * PAGE, count * PAGE}, 1);
        }
        if (r < 0 || (written && runs[0].page_count == written))
            continue;
        struct iovec head = {i ? item->side + (i - 1) * PAGE : item->header->header, before * PAGE};
        uint32_t pages = runs[i].page_count - before;
        r = data_io(item, &runs[i], runs[i].page + written, written ? NULL : &head, page, page + pages);
        page += pages;
    }
    return r;
}
