/* Reads of libkvfs: from the devices into the caller's memory, header and leaves checked before anybody is told. */
#include "client/client.h"

/* Of a group: the rest of GROUP_IOVS is for those that stripe units cut. */
#define RUN_IOVS (GROUP_IOVS / 2)

static void group_done(struct io_group *group, bool reaped);

static void fetch_ready(struct fetch *fetch) {
    struct lane *lane = fetch->lane;
    fetch->next = NULL;
    if (lane->ready_last)
        lane->ready_last->next = fetch;
    else
        lane->ready = fetch;
    lane->ready_last = fetch;
    lane->ready_count++;
}

static int fetch_io(struct fetch *fetch, uint32_t segment, uint32_t page, const struct iovec *iovs, uint32_t count) {
    struct ring *ring = &fetch->lane->ring;
    ring->until_ns = fetch->until_ns;
    fetch->groups_left++; /* counted first: the callback may come before ring_io() returns */
    fetch->groups_held++;
    int r = ring_io(ring, false, segment, page, iovs, count, NULL, 0, group_done, fetch);
    ring->until_ns = 0;
    if (r < 0) {
        fetch->groups_left--;
        fetch->groups_held--;
    }
    return r == -ERANGE ? -EIO : r; /* no such place */
}

static uint32_t first_page(const struct fetch *fetch) { return (uint32_t)(fetch->offset / PAGE); }
static uint32_t end_page(const struct fetch *fetch) { return (uint32_t)pages_of(fetch->offset + fetch->size); }

/* File pages [from, to), which lie at `page` of a segment, in groups that the ring can hold. */
static int fetch_run(struct fetch *fetch, uint32_t segment, uint32_t page, uint32_t from, uint32_t to, uint8_t *header, uint32_t header_pages) {
    struct iovec iovs[RUN_IOVS];
    uint64_t limit = GROUP_BYTES / PAGE;
    int r = 0;
    do {
        uint32_t count = 0, stop = (uint32_t)min_u64(to, from + limit);
        if (header_pages)
            iovs[count++] = (struct iovec){header, header_pages * PAGE};
        if (from < to)
            count += spans_memory(&fetch->spans, from, &stop, iovs + count, RUN_IOVS - count);
        r = fetch_io(fetch, segment, page, iovs, count);
        if (r == -E2BIG && limit > 1 && from < to) { /* a device of small commands cuts them more often */
            limit /= 2;
            r = 0;
            continue;
        }
        page += stop - from + header_pages;
        from = stop;
        header_pages = 0;
    } while (r == 0 && from < to);
    return r;
}

static int fetch_by_desc(struct fetch *fetch) {
    const struct desc *desc = fetch->desc;
    uint32_t at = first_page(fetch), end = end_page(fetch);
    int r = 0;
    for (uint32_t i = 0; i <= desc->extent_count && at < end && r == 0; i++) {
        const struct kvfs_extent *e = i < desc->extent_count ? &desc->extents[i] : NULL;
        if (e && e->file_page + e->page_count <= at)
            continue;
        uint32_t from = e ? (uint32_t)min_u64(e->file_page > at ? e->file_page : at, end) : end;
        for (uint32_t stop = from; at < from; at = stop, stop = from) { /* a hole */
            struct iovec iov;
            spans_memory(&fetch->spans, at, &stop, &iov, 1);
            memset(iov.iov_base, 0, iov.iov_len);
        }
        if (!e || at == end)
            break;
        uint32_t to = (uint32_t)min_u64(end, (uint64_t)e->file_page + e->page_count);
        r = fetch_run(fetch, e->segment, e->page + (at - e->file_page), at, to, NULL, 0);
        at = to;
    }
    return r;
}

/* Header pages [from, to). */
static int header_read(struct fetch *fetch, uint32_t from, uint32_t to) {
    int r = 0;
    for (uint32_t stop; from < to && r == 0; from = stop) {
        stop = (uint32_t)min_u64(to, from + GROUP_BYTES / PAGE);
        struct iovec iov = {fetch->desc->header + from * PAGE, (stop - from) * PAGE};
        r = fetch_io(fetch, fetch->record.segment, fetch->record.page + from, &iov, 1);
    }
    return r;
}

/* The pages of a narrow header that are marked as wanted. */
static int header_read_wanted(struct fetch *fetch) {
    struct desc *desc = fetch->desc;
    int r = 0;
    for (uint32_t from = 0, to; from < desc->header_pages && r == 0; from = to + 1) {
        for (to = from; to < desc->header_pages && desc->parts[to] == PART_WANTED; to++)
            desc->parts[to] = PART_READ;
        r = header_read(fetch, from, to);
    }
    return r;
}

/* The header; and the data, if it is known to lie behind it. */
static int header_submit(struct fetch *fetch) {
    const struct kvfs_record *record = &fetch->record;
    uint32_t pages = record->header_pages, first = first_page(fetch), end = end_page(fetch);
    bool behind = record->extent_count == 0;
    int r = 0;
    fetch->load_header = true;
    /* A header has 8 bytes a page, and what else it holds is bounded: a larger one is no header. */
    if (pages == 0 || pages > record->size / PAGE / 256 + 1024)
        return -ESTALE;
    if (!(fetch->desc = desc_new(pages)))
        return -ENOMEM;
    if (fetch->narrow && pages > 1) {
        r = desc_narrow(fetch->desc, record, first, end);
        if (r == 0)
            r = header_read_wanted(fetch);
    } else if (behind && first == 0 && pages < 64) { /* in one I/O */
        return fetch_run(fetch, record->segment, record->page, first, end, fetch->desc->header, pages);
    } else {
        r = header_read(fetch, 0, pages);
    }
    if (r == 0 && behind && end > first)
        r = fetch_run(fetch, record->segment, record->page + pages + first, first, end, NULL, 0);
    return r;
}

/* Everything that `submit` starts is under way, or failed. */
static void fetch_submit(struct fetch *fetch, int (*submit)(struct fetch *fetch)) {
    fetch->groups_left = 1; /* ours, until all is queued */
    fetch->error = 0;
    int r = submit(fetch);
    if (r == -E2BIG)
        r = -EIO;
    if (r < 0 && !fetch->error)
        fetch->error = r;
    if (--fetch->groups_left == 0)
        fetch_ready(fetch);
}

void fetch_start(struct lane *lane, struct fetch *fetch, const struct kvfs_buffer *pieces, uint32_t count) {
    assert(fetch->lane == lane);
    assert(fetch->done);
    assert(fetch->groups_held == 0);
    lane->active_count++;
    if (!fetch->until_ns)
        fetch->until_ns = now_ns() + lane->client->options.timeout_ms * 1000000ull;
    int r = spans_plan(&fetch->spans, pieces, count, fetch->offset, fetch->size, lane->connection->memory_alignment);
    if (r == 0 && fetch->spans.bounced_pages > SIDE_PAGES) {
        fetch->bounce_size = fetch->spans.bounced_pages * PAGE;
        fetch->bounce = lane_bounce(lane, &fetch->bounce_size);
        r = fetch->bounce ? 0 : -ENOMEM;
    }
    if (r < 0) {
        fetch->error = r;
        fetch_ready(fetch);
        return;
    }
    spans_bounce(&fetch->spans, fetch->bounce ? fetch->bounce : fetch->side);
    fetch_submit(fetch, fetch->desc ? fetch_by_desc : header_submit);
}

static void group_done(struct io_group *group, bool reaped) {
    struct fetch *fetch = group->owner;
    bool failed = false;
    assert(fetch->groups_held > 0);
    if (reaped) {
        fetch->groups_held--; /* an orphan is let go of by lane_reap() */
        return;
    }
    if (!group->expired)
        fetch->groups_held--;
    if (!group->result)
        ring_renew(group->ring, &fetch->until_ns);
    else if (!fetch->error)
        failed = true;
    if (group->result == -ETIMEDOUT)
        fetch->error = -ETIMEDOUT;
    else if (group->result && !fetch->error) /* whatever a device says: no other errno means that here */
        fetch->error = -EIO;
    if (failed)
        ring_drop(group->ring, fetch);
    assert(fetch->groups_left > 0);
    if (--fetch->groups_left == 0)
        fetch_ready(fetch);
}

static int verify_leaves(const struct fetch *fetch) {
    const struct desc *desc = fetch->desc;
    const struct spans *spans = &fetch->spans;
    uint64_t secret = fetch->lane->connection->array.geometry.secret;
    for (const struct span *span = spans->list; span < spans->list + spans->count; span++) {
        uint64_t size = min_u64(span->to * PAGE, desc->size) - span->from * PAGE; /* the file's last leaf covers what is real */
        for (uint64_t at = 0; at < size; at += GROUP_BYTES) {                     /* devices go on meanwhile */
            if (kvfs_leaf_verify(span->memory + at, min_u64(size - at, GROUP_BYTES), secret, desc->leaves + span->from + at / PAGE))
                return -EBADMSG;
            ring_feed(&fetch->lane->ring);
        }
    }
    return 0;
}

/* The bytes do not prove at this place (I10): has the block moved? True: it is being read from its new place. */
static bool fetch_again(struct fetch *fetch) {
    struct lane *lane = fetch->lane;
    struct connection *connection = lane->connection;
    struct kvfs_record now;
    const struct kvfs_record *then = &fetch->record;
    int found = then->flags & KVFS_INODE_FOREIGN ? foreign_again(connection->pod, &connection->array.geometry, then, &now)
                                                 : kvfs_table_find_inode(connection->table, then->inode, &now);
    if (found < 0 || !(now.flags & KVFS_INODE_SEALED) || now.size != then->size || fetch->retries++ == CLIENT_RETRIES) {
        fetch->error = -ESTALE;
        return false;
    }
    if (now.segment == then->segment && now.page == then->page && now.generation == then->generation) {
        if (fetch->bad_once) {
            TALLY(lane->client, checksum_errors, 1);
            client_bad_block(connection, then);
            fetch->error = then->flags & KVFS_INODE_FOREIGN ? -ESTALE : -EIO; /* a place of another node's may be old news */
            if (fetch->error == -ESTALE)                                      /* its number is of this place alone */
                client_failed(lane->client, then->inode);
            return false;
        }
        fetch->bad_once = true;
    }
    TALLY(lane->client, retries, 1);
    desc_put(fetch->desc);
    fetch->desc = NULL;
    fetch->record = now;
    fetch_submit(fetch, header_submit);
    return true;
}

/* Every byte is in memory, or will not come. */
static void fetch_finish(struct fetch *fetch) {
    struct lane *lane = fetch->lane;
    struct kvfs_array *array = &lane->connection->array;
    if (fetch->error == 0 && fetch->load_header) {
        fetch->error = fetch->desc->parts ? desc_verify_part(&array->geometry, fetch->desc, &fetch->record, first_page(fetch), end_page(fetch))
                                          : desc_verify(&array->geometry, fetch->desc, &fetch->record);
        if (fetch->error == -EAGAIN) { /* the pages so far lead to others */
            fetch_submit(fetch, header_read_wanted);
            return;
        }
        if (fetch->error == 0) {
            fetch->load_header = false;
            if (fetch->record.extent_count && fetch->size) { /* now its extents are known */
                fetch_submit(fetch, fetch_by_desc);
                return;
            }
        }
    }
    if (fetch->error == 0 && lane->connection->verify)
        fetch->error = verify_leaves(fetch);
    if (fetch->error == -EBADMSG && fetch->groups_held == 0 && fetch_again(fetch))
        return;
    if (fetch->error == 0 && fetch->spans.bounced_pages)
        TALLY(lane->client, bounced_bytes, spans_copy_out(&fetch->spans));
    if (fetch->error == -ETIMEDOUT)
        TALLY(lane->client, timeouts, 1);
    fetch->result = fetch->error == 0 ? (int64_t)fetch->size : fetch->error;
    bool held = fetch->groups_held > 0;
    if (held) { /* counted before anybody is told */
        fetch->result = -ETIMEDOUT;
        pthread_mutex_lock(&lane->connection->lock);
        fetch->next = lane->connection->orphans;
        lane->connection->orphans = fetch;
        pthread_mutex_unlock(&lane->connection->lock);
        lane->orphan_count++;
        atomic_fetch_add(&lane->client->orphans, 1);
    }
    if (fetch->result == -EIO || fetch->result == -ETIMEDOUT) {
        client_failed(lane->client, fetch->record.inode);
        if (fetch->record.flags & KVFS_INODE_FOREIGN) /* exists() says no meanwhile */
            kvfs_pod_avoid(lane->connection->pod, fetch->record.segment,
                           now_ns() + FOREIGN_AVOID * lane->client->options.timeout_ms * UINT64_C(1000000));
    }
    assert(lane->active_count > 0);
    lane->active_count--;
    fetch->done(lane, fetch);
    if (!held)
        fetch_recycle(fetch);
}

static uint32_t run(struct lane *lane, uint64_t timeout_ns, uint32_t limit) {
    ring_submit(&lane->ring);
    ring_reap(&lane->ring);
    if (!lane->ready && timeout_ns && lane->active_count) {
        ring_wait(&lane->ring, timeout_ns);
        ring_reap(&lane->ring);
    }
    for (struct fetch *fetch; limit && (fetch = lane->ready); limit--) {
        lane->ready = fetch->next;
        if (!lane->ready)
            lane->ready_last = NULL;
        assert(lane->ready_count > 0);
        lane->ready_count--;
        fetch_finish(fetch);
    }
    if (lane->orphan_count)
        lane_reap(lane, false);
    return lane->active_count;
}

uint32_t lane_run(struct lane *lane, uint64_t timeout_ns) { return run(lane, timeout_ns, UINT32_MAX); }

uint32_t lane_step(struct lane *lane, uint64_t timeout_ns) { return run(lane, timeout_ns, 1); }
