/* Reads of libkvfs: from the devices into the caller's memory, header and leaves checked before anybody is told. */
#include "client/client.h"

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
    int r = ring_io(ring, false, segment, page, iovs, count, NULL, 0, group_done, fetch);
    ring->until_ns = 0;
    if (r == 0) {
        fetch->groups_left++;
        fetch->groups_held++;
    }
    return r == -ERANGE || r == -E2BIG ? -EIO : r; /* no such place */
}

static uint32_t first_page(const struct fetch *fetch) { return (uint32_t)(fetch->offset / PAGE); }
static uint32_t end_page(const struct fetch *fetch) { return (uint32_t)pages_of(fetch->offset + fetch->size); }
/* True: only a part of this page is wanted, so it is read to the side. Such a page can be the first or the last one. */
static bool side_first(const struct fetch *fetch, uint32_t page) { return page == first_page(fetch) && fetch->offset % PAGE; }
static bool side_last(const struct fetch *fetch, uint32_t page) {
    return page + 1 == end_page(fetch) && (fetch->offset + fetch->size) % PAGE && !side_first(fetch, page);
}

static uint8_t *page_memory(const struct fetch *fetch, uint32_t page) {
    if (!fetch->direct)
        return fetch->bounce + (page - first_page(fetch)) * PAGE;
    return side_first(fetch, page) ? fetch->side : side_last(fetch, page) ? fetch->side + PAGE : fetch->direct + page * PAGE;
}

/* The memory of file pages [from, to). */
static uint32_t fetch_memory(const struct fetch *fetch, uint32_t from, uint32_t to, struct iovec *iovs) {
    uint32_t count = 0;
    while (from < to) {
        uint32_t stop = to;
        if (fetch->direct) {
            if (side_first(fetch, from) || side_last(fetch, from))
                stop = from + 1;
            else if (side_last(fetch, to - 1))
                stop = to - 1;
        }
        iovs[count++] = (struct iovec){page_memory(fetch, from), (stop - from) * PAGE};
        from = stop;
    }
    return count;
}

/* File pages [from, to), which lie at `page` of a segment, in groups that the ring can hold. */
static int fetch_run(struct fetch *fetch, uint32_t segment, uint32_t page, uint32_t from, uint32_t to, uint8_t *header, uint32_t header_pages) {
    struct iovec iovs[5];
    int r = 0;
    do {
        uint32_t count = 0, stop = (uint32_t)min_u64(to, from + GROUP_BYTES / PAGE), pages = stop - from + header_pages;
        if (header_pages)
            iovs[count++] = (struct iovec){header, header_pages * PAGE};
        count += fetch_memory(fetch, from, stop, iovs + count);
        r = fetch_io(fetch, segment, page, iovs, count);
        page += pages;
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
        for (; at < from; at++) /* a hole */
            memset(page_memory(fetch, at), 0, PAGE);
        if (!e || at == end)
            break;
        uint32_t to = (uint32_t)min_u64(end, (uint64_t)e->file_page + e->page_count);
        r = fetch_run(fetch, e->segment, e->page + (at - e->file_page), at, to, NULL, 0);
        at = to;
    }
    return r;
}

static void fetch_submit(struct fetch *fetch) {
    struct lane *lane = fetch->lane;
    const struct kvfs_record *record = &fetch->record;
    uint32_t first = first_page(fetch), end = end_page(fetch);
    int r = 0;
    fetch->groups_left = 1; /* ours, until all is queued */
    fetch->error = 0;
    fetch->direct = NULL;
    if (((uintptr_t)fetch->data - fetch->offset) % lane->connection->memory_alignment == 0) {
        fetch->direct = fetch->data - fetch->offset;
    } else if (!fetch->bounce && fetch->size) {
        fetch->bounce_size = (end - first) * PAGE;
        fetch->bounce = lane_bounce(lane, &fetch->bounce_size);
        r = fetch->bounce ? 0 : -ENOMEM;
    }
    if (r == 0 && !fetch->desc) {
        fetch->load_header = true;
        /* A header has 4 bytes a page, and what else it holds is bounded: a larger one is no header. */
        if (record->header_pages == 0 || record->header_pages > record->size / PAGE / 512 + 1024)
            r = -ESTALE;
        else if (!(fetch->desc = desc_new(record->header_pages)))
            r = -ENOMEM;
        uint8_t *header = r == 0 ? fetch->desc->header : NULL;
        if (r == 0 && record->extent_count == 0 && first == 0 && record->header_pages < 64) { /* header and data lie together */
            r = fetch_run(fetch, record->segment, record->page, first, end, header, record->header_pages);
        } else if (r == 0) {
            for (uint32_t at = 0, count; at < record->header_pages && r == 0; at += count) {
                count = (uint32_t)min_u64(record->header_pages - at, GROUP_BYTES / PAGE);
                r = fetch_io(fetch, record->segment, record->page + at, &(struct iovec){header + at * PAGE, count * PAGE}, 1);
            }
            if (r == 0 && record->extent_count == 0 && end > first)
                r = fetch_run(fetch, record->segment, record->page + record->header_pages + first, first, end, NULL, 0);
        }
    } else if (r == 0) {
        r = fetch_by_desc(fetch);
    }
    if (r < 0 && !fetch->error)
        fetch->error = r;
    if (--fetch->groups_left == 0)
        fetch_ready(fetch);
}

void fetch_start(struct lane *lane, struct fetch *fetch) {
    assert(fetch->lane == lane);
    assert(fetch->done);
    assert(fetch->groups_held == 0);
    lane->active_count++;
    if (!fetch->until_ns)
        fetch->until_ns = now_ns() + lane->client->options.timeout_ms * 1000000ull;
    fetch_submit(fetch);
}

static void group_done(struct io_group *group, bool reaped) {
    struct fetch *fetch = group->owner;
    assert(fetch->groups_held > 0);
    if (reaped) {
        fetch->groups_held--; /* an orphan is let go of by lane_reap() */
        return;
    }
    if (!group->expired)
        fetch->groups_held--;
    if (group->result == -ETIMEDOUT)
        fetch->error = -ETIMEDOUT;
    else if (group->result && !fetch->error) /* whatever a device says: no other errno means that here */
        fetch->error = -EIO;
    assert(fetch->groups_left > 0);
    if (--fetch->groups_left == 0)
        fetch_ready(fetch);
}

static int verify_leaves(const struct fetch *fetch) {
    const struct desc *desc = fetch->desc;
    uint64_t secret = fetch->lane->connection->array.geometry.secret;
    uint32_t page = first_page(fetch), end = end_page(fetch);
    while (page < end) {
        uint32_t stop = page + 1;
        if (!fetch->direct)
            stop = end;
        else if (!side_first(fetch, page) && !side_last(fetch, page))
            stop = side_last(fetch, end - 1) ? end - 1 : end;
        uint64_t size = min_u64(stop * PAGE, desc->size) - page * PAGE; /* the file's last leaf covers what is real */
        if (kvfs_leaf_verify(page_memory(fetch, page), size, secret, desc->leaves + page))
            return -EBADMSG;
        page = stop;
    }
    return 0;
}

/* Copy bytes that were read to the side, or bounced, to their destination. */
static void copy_out(struct fetch *fetch) {
    uint32_t first = first_page(fetch), last = end_page(fetch) - 1;
    if (fetch->size == 0)
        return;
    uint64_t end = fetch->offset + fetch->size;
    if (!fetch->direct) {
        memcpy(fetch->data, fetch->bounce + fetch->offset % PAGE, fetch->size);
        TALLY(fetch->lane->client, bounced_bytes, fetch->size);
        return;
    }
    if (side_first(fetch, first))
        memcpy(fetch->data, fetch->side + fetch->offset % PAGE, min_u64(PAGE - fetch->offset % PAGE, fetch->size));
    if (side_last(fetch, last))
        memcpy(fetch->data + (last * PAGE - fetch->offset), fetch->side + PAGE, end - last * PAGE);
}

/* The bytes do not prove at this place (I10): has the block moved? True: it is being read from its new place. */
static bool fetch_again(struct fetch *fetch) {
    struct lane *lane = fetch->lane;
    struct connection *connection = lane->connection;
    struct kvfs_record now;
    const struct kvfs_record *then = &fetch->record;
    int found = kvfs_table_find_inode(connection->table, then->inode, &now);
    if (found < 0 || !(now.flags & KVFS_INODE_SEALED) || now.size != then->size || fetch->retries++ == CLIENT_RETRIES) {
        fetch->error = -ESTALE;
        return false;
    }
    if (now.segment == then->segment && now.page == then->page && now.generation == then->generation) {
        if (fetch->bad_once) {
            TALLY(lane->client, checksum_errors, 1);
            client_bad_block(lane->client, connection, then->inode, then->segment);
            fetch->error = -EIO;
            return false;
        }
        fetch->bad_once = true;
    }
    TALLY(lane->client, retries, 1);
    desc_put(fetch->desc);
    fetch->desc = NULL;
    fetch->record = now;
    fetch_submit(fetch);
    return true;
}

/* Every byte is in memory, or will not come. */
static void fetch_finish(struct fetch *fetch) {
    struct lane *lane = fetch->lane;
    struct kvfs_array *array = &lane->connection->array;
    if (fetch->error == 0 && fetch->load_header) {
        fetch->error = desc_verify(&array->geometry, fetch->desc, &fetch->record);
        if (fetch->error == 0) {
            fetch->load_header = false;
            if (fetch->record.extent_count && fetch->size) { /* now its extents are known */
                fetch_submit(fetch);
                return;
            }
        }
    }
    if (fetch->error == 0 && lane->connection->verify)
        fetch->error = verify_leaves(fetch);
    if (fetch->error == -EBADMSG && fetch->groups_held == 0 && fetch_again(fetch))
        return;
    if (fetch->error == 0)
        copy_out(fetch);
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
    if (fetch->result == -EIO || fetch->result == -ETIMEDOUT)
        client_failed(lane->client, fetch->record.inode);
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
