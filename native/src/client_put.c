/* The calls of libkvfs that change something: the daemon decides where, this writes, the daemon enters. And list. */
#include "client.h"

#include <stdio.h>
#include <unistd.h>

/* What is reserved at one time: bounds the pool's space that one client keeps from others, and the work of one request. */
#define WINDOW_ITEMS 1024u
#define WINDOW_BYTES ((uint64_t)256 << 20)
/* A daemon that has to evict first may take longer to reserve than a device to read. */
#define RESERVE_TIMEOUT_MS 30000u

/* ---- messages ---- */

struct message_buffer { uint8_t *data; uint64_t size, capacity; bool failed; };

static void append(struct message_buffer *out, const void *data, uint64_t size) {
    uint64_t padded = round_up(size, 8);
    if (out->size + padded > out->capacity) {
        uint64_t capacity = round_up((out->size + padded) * 2, PAGE);
        uint8_t *grown = realloc(out->data, capacity);
        if (!grown) {
            out->failed = true;
            return;
        }
        out->data = grown;
        out->capacity = capacity;
    }
    copy_bytes(out->data + out->size, data, size);
    memset(out->data + out->size + size, 0, padded - size);
    out->size += padded;
}

static void append_where(struct message_buffer *out, const struct kvfs_client *client, uint32_t count) {
    struct wire_where where = {.base = client->base, .space_size = (uint32_t)strlen(client->space), .count = count};
    append(out, &where, sizeof(where));
    append(out, client->space, where.space_size);
}

static int ask(struct kvfs_client *client, struct session *session, uint16_t type, struct message_buffer *request, uint32_t timeout_ms,
               uint8_t **reply, uint32_t *reply_size) {
    int r = request->failed || request->size > KVFS_WIRE_SIZE_MAX ? client_fail(-ENOMEM, "a request of %llu bytes", (unsigned long long)request->size)
                                                                : wire_ask(client, session, type, request->data, (uint32_t)request->size, timeout_ms, reply, reply_size);
    free(request->data);
    return r;
}

/* A session that may write, with a daemon that lives. */
static int writer_get(struct kvfs_client *client, struct session **out) {
    if (client->options.flags & KVFS_READ_ONLY)
        return client_fail(-EROFS, "%s: connected for reading only", client->path);
    int r = session_get(client, out);
    if (r < 0)
        return r;
    if ((*out)->gone)
        r = client_fail(-ENOTCONN, "%s: the daemon is gone: nothing can be stored or deleted until it is back", client->path);
    else if (!(*out)->writable)
        r = client_fail(-EROFS, "%s: the daemon gave this user no right to write", client->path);
    if (r < 0)
        session_put(*out);
    return r;
}

/* ---- writing one block ---- */

struct put_item {
    struct put_item *next;
    struct lane *lane;
    const uint8_t *data;
    uint64_t size;
    struct wire_reserved reserved;
    const uint8_t *body;                 /* runs, record, ancestors: in the reply */
    struct desc *header;
    uint8_t *side;                       /* extent headers of further runs, then the padded last page */
    uint8_t *bounce;
    uint64_t bounce_size;
    uint32_t groups_left, groups_held;
    int error;
    bool counted;
};

struct put_call {
    struct kvfs_client *client;
    struct session *session;
    struct lane *lane;
    uint32_t in_flight;
};

static void item_free(struct put_item *item) {
    desc_put(item->header);
    free(item->side);
    if (item->bounce)
        lane_bounce_give(item->lane, item->bounce, item->bounce_size);
    free(item);
}

static void write_done(struct io_group *group, bool reaped) {
    struct put_item *item = group->owner;
    if (reaped || !group->expired)
        item->groups_held--;
    if (!reaped) {
        if (group->result && !item->error)
            item->error = group->result;
        item->groups_left--;
    } else if (item->groups_held == 0 && item->counted) {
        item_free(item); /* given up on long ago; its device has answered */
    }
}

static int item_io(struct put_item *item, const struct wire_run *run, uint32_t page, const struct iovec *iovs, uint32_t count) {
    int r = ring_io(&item->lane->ring, true, run->segment, page, iovs, count, NULL, 0, write_done, item);
    if (r == 0) {
        item->groups_left++;
        item->groups_held++;
    }
    return r;
}

/* Pages [from, to) of the block's data, behind what iovs holds already (used pages of it), to `page` of the run's segment. */
static int data_io(struct put_item *item, const struct wire_run *run, uint32_t page, struct iovec *iovs, uint32_t count, uint32_t from,
                   uint32_t to, const uint8_t *source, const uint8_t *tail) {
    uint32_t whole = (uint32_t)(item->size / PAGE);
    int r = 0;
    do {
        uint32_t stop = (uint32_t)min_u64(to, from + GROUP_BYTES / PAGE), pages = 0;
        for (uint32_t i = 0; i < count; i++)
            pages += (uint32_t)(iovs[i].iov_len / PAGE);
        if (from < stop && from < whole)
            iovs[count++] = (struct iovec){(void *)(uintptr_t)(source + from * PAGE), (min_u64(stop, whole) - from) * PAGE};
        if (stop > whole)
            iovs[count++] = (struct iovec){(void *)(uintptr_t)tail, PAGE};
        r = item_io(item, run, page, iovs, count);
        page += pages + (stop - from);
        from = stop;
        count = 0;
    } while (r == 0 && from < to);
    return r;
}

/* Check what the daemon says of a block, and take it apart: runs, record without extents, extents, ancestors. */
static int item_start(struct put_item *item) {
    struct lane *lane = item->lane;
    struct session *session = lane->session;
    struct kvfs_plane *plane = &session->plane;
    const struct wire_reserved *w = &item->reserved;
    const struct wire_run *runs = (const struct wire_run *)(const void *)item->body;
    const uint8_t *record_at = item->body + w->run_count * sizeof(*runs), *ancestors = record_at + round_up(w->record_size, 8);
    uint32_t leaf_count = (uint32_t)pages_of(item->size), tail_size = (uint32_t)(item->size % PAGE);
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
    uint32_t *leaves = malloc((leaf_count + 1) * sizeof(*leaves));
    void *side = NULL;
    int r = item->header && bare && leaves && posix_memalign(&side, KVFS_PAGE_SIZE, w->run_count * PAGE) == 0 ? 0 : -ENOMEM;
    item->side = side;
    const uint8_t *source = item->data;
    if (r == 0 && (uintptr_t)source % session->memory_alignment) {
        item->bounce_size = item->size + 1;
        item->bounce = lane_bounce(lane, &item->bounce_size);
        r = item->bounce ? 0 : -ENOMEM;
        if (r == 0) {
            memcpy(item->bounce, source, item->size);
            source = item->bounce;
            TALLY(lane->client, bounced_bytes, item->size);
        }
    }
    if (r == 0) {
        uint8_t *tail = item->side + (w->run_count - 1) * PAGE; /* run 0 needs no extent header: its page is the last one's */
        if (tail_size) {
            memcpy(tail, source + (item->size - tail_size), tail_size);
            memset(tail + tail_size, 0, PAGE - tail_size);
        }
        kvfs_leaf_checksums(source, item->size, plane->config.secret, leaves);
        memcpy(bare, record_at, extents_at);
        memcpy(bare + extents_at, record_at + extents_at + extents_size, w->record_size - extents_at - extents_size);
        const struct kvfs_extent *extents = (const struct kvfs_extent *)(const void *)(record_at + extents_at);
        struct kvfs_extent whole = {record.generation, record.segment, record.page + w->header_pages, leaf_count, 0};
        r = header_build(plane, item->header, bare, (uint32_t)(w->record_size - extents_size), ancestors, w->ancestors_size,
                         record.extent_count ? extents : &whole, record.extent_count ? record.extent_count : leaf_count > 0, leaves,
                         runs[0].page_count);
        uint32_t page = 0;
        for (uint32_t i = 0; i < w->run_count && r == 0; i++) {
            struct iovec iovs[4];
            uint32_t before = i ? 1 : w->header_pages, written = 0;
            /* A long header goes by itself: with data it may be more pieces than a group can have. */
            for (uint32_t count; i == 0 && before >= 64 && written < before && r == 0; written += count) {
                count = (uint32_t)min_u64(before - written, GROUP_BYTES / PAGE);
                r = item_io(item, &runs[0], runs[0].page + written, &(struct iovec){item->header->header + written * PAGE, count * PAGE}, 1);
            }
            if (r < 0 || (written && runs[0].page_count == written))
                continue;
            iovs[0] = (struct iovec){item->header->header, before * PAGE};
            if (i) {
                struct kvfs_run run = {runs[i].generation, runs[i].segment, runs[i].page, runs[i].page_count, 0};
                extent_header_build(plane, item->side + (i - 1) * PAGE, record.inode, &run, page);
                iovs[0] = (struct iovec){item->side + (i - 1) * PAGE, PAGE};
            }
            uint32_t pages = runs[i].page_count - before;
            r = data_io(item, &runs[i], runs[i].page + written, iovs, written ? 0 : 1, page, page + pages, source, tail);
            page += pages;
        }
    }
    free(bare);
    free(leaves);
    return r;
}

/* ---- windows ---- */

/* The parts of a reply about one item; 0 bytes: it does not fit. */
static uint64_t reserved_size(const struct wire_reserved *w, uint64_t left) {
    if (w->error < 0)
        return sizeof(*w);
    if (w->run_count == 0 || w->run_count > 4096 || w->record_size < sizeof(struct kvfs_inode_record) || w->header_pages > 1u << 20)
        return 0;
    uint64_t size = sizeof(*w) + w->run_count * sizeof(struct wire_run) + round_up(w->record_size, 8) + round_up(w->ancestors_size, 8);
    return size <= left ? size : 0;
}

static int window_reserve(struct put_call *call, const uint8_t *const *places, const uint32_t *sizes, const struct kvfs_buffer *buffers,
                          uint32_t count, uint8_t **reply, uint32_t *reply_size) {
    struct message_buffer request = {0};
    char name[2 * KVFS_KEY_MAX];
    append_where(&request, call->client, count);
    for (uint32_t i = 0; i < count; i++) {
        struct wire_reserve item = {.size = buffers[i].size, .name_size = key_hex(places[i], sizes[i], name)};
        append(&request, &item, sizeof(item));
        append(&request, name, item.name_size);
    }
    return ask(call->client, call->session, WIRE_RESERVE, &request, RESERVE_TIMEOUT_MS, reply, reply_size);
}

static void wait_writes(struct put_call *call, struct put_item **items, uint32_t count, uint32_t below) {
    for (;;) {
        uint32_t open = 0;
        for (uint32_t i = 0; i < count; i++)
            open += items[i] && items[i]->groups_left > 0;
        if (open <= below)
            return;
        ring_submit(&call->lane->ring);
        if (ring_reap(&call->lane->ring) == 0)
            ring_wait(&call->lane->ring, 1000000000);
    }
}

/* Write what was reserved, and say how it went. */
static int window_write(struct put_call *call, const struct kvfs_buffer *buffers, uint32_t count, const uint8_t *reply, uint32_t reply_size,
                        int64_t *results) {
    uint64_t started = now_ns(), limit = call->session->reservation_ms * 1000000ull / 2;
    struct put_item **items = calloc(count, sizeof(*items));
    struct message_buffer request = {0};
    uint64_t at = 0, entered = 0;
    int r = items ? 0 : client_fail(-ENOMEM, "no memory for a batch of %u", count);
    append(&request, &entered, 8);
    for (uint32_t i = 0; i < count && r == 0; i++) {
        struct wire_reserved reserved;
        if (at + sizeof(reserved) <= reply_size)
            memcpy(&reserved, reply + at, sizeof(reserved));
        uint64_t size = at + sizeof(reserved) <= reply_size ? reserved_size(&reserved, reply_size - at) : 0;
        if (!size) {
            r = client_fail(-EPROTO, "%s: the daemon's reservation %u of %u makes no sense", call->client->pool, i, count);
            break;
        }
        results[i] = reserved.error;
        if (reserved.error == 0 && !(items[i] = calloc(1, sizeof(*items[i]))))
            r = client_fail(-ENOMEM, "no memory for a batch of %u", count);
        if (items[i]) {
            struct put_item *item = items[i];
            item->lane = call->lane;
            item->data = buffers[i].data;
            item->size = buffers[i].size;
            item->reserved = reserved;
            item->body = reply + at + sizeof(reserved);
            /* Late writes, or those that a dead daemon's successor knows nothing of, would go to places that may be others' by then. */
            session_look(call->session);
            int error = call->session->gone ? -ENOTCONN : now_ns() - started > limit ? -ETIMEDOUT : item_start(item);
            if (error < 0 && !item->error)
                item->error = error;
            wait_writes(call, items, count, call->client->options.depth - 1);
        }
        at += size;
    }
    if (items)
        wait_writes(call, items, count, 0);
    for (uint32_t i = 0; items && i < count; i++) {
        struct put_item *item = items[i];
        if (!item)
            continue;
        struct wire_commit commit = {item->reserved.reservation, r < 0 ? r : item->error};
        append(&request, &commit, sizeof(commit));
        results[i] = commit.error;
        entered++;
    }
    uint8_t *answer = NULL;
    uint32_t answer_size = 0;
    if (request.data)
        memcpy(request.data, &entered, 8);
    if (entered) {
        int asked = ask(call->client, call->session, WIRE_COMMIT, &request, RESERVE_TIMEOUT_MS, &answer, &answer_size);
        if (asked == 0 && answer_size != 8 * entered)
            asked = client_fail(-EPROTO, "%s: the daemon answered a commit of %llu blocks with %u bytes", call->client->pool,
                                (unsigned long long)entered, answer_size);
        r = r < 0 ? r : asked;
    } else {
        free(request.data);
    }
    for (uint64_t i = 0; r == 0 && i < entered; i++) {
        int64_t result;
        memcpy(&result, answer + 8 * i, 8);
        if (result > 0 || result < -4095)
            r = client_fail(-EPROTO, "%s: the daemon answered a commit with %lld, which is no error", call->client->pool, (long long)result);
    }
    uint64_t n = 0;
    for (uint32_t i = 0; items && i < count; i++) {
        struct put_item *item = items[i];
        if (!item)
            continue;
        if (results[i] == 0 && r < 0) /* written, but whether it was entered nobody knows */
            results[i] = r;
        else if (results[i] == 0)
            memcpy(&results[i], answer + 8 * n, 8);
        n++;
        if (item->groups_held) /* a device still reads what it was to write */
            item->counted = true;
        else
            item_free(item);
    }
    free(answer);
    free(items);
    return r;
}

struct key_place { const uint8_t *data; uint32_t size, index; };

static int by_key(const void *a, const void *b) {
    const struct key_place *x = a, *y = b;
    int r = memcmp(x->data, y->data, min_u64(x->size, y->size));
    return r ? r : x->size < y->size ? -1 : x->size > y->size;
}

static int check_keys(const struct kvfs_keys *keys, const uint8_t **places) {
    struct key_place *order = malloc((keys->count + 1) * sizeof(*order));
    if (!order)
        return client_fail(-ENOMEM, "no memory for a batch of %u", keys->count);
    const uint8_t *key = keys->data;
    int r = 0;
    for (uint32_t i = 0; i < keys->count; key += keys->sizes[i++]) {
        if (keys->sizes[i] == 0 || keys->sizes[i] > KVFS_KEY_MAX) {
            r = client_fail(-EINVAL, "key %u has %u bytes: 1 to %u are possible", i, keys->sizes[i], KVFS_KEY_MAX);
            break;
        }
        places[i] = key;
        order[i] = (struct key_place){key, keys->sizes[i], i};
    }
    if (r == 0)
        qsort(order, keys->count, sizeof(*order), by_key);
    for (uint32_t i = 1; i < keys->count && r == 0; i++)
        if (by_key(&order[i - 1], &order[i]) == 0)
            r = client_fail(-EINVAL, "keys %u and %u are the same: which of the two is to be stored?", order[i - 1].index, order[i].index);
    free(order);
    return r;
}

int kvfs_put(struct kvfs_client *client, const struct kvfs_keys *keys, const struct kvfs_buffer *buffers, int64_t *results) {
    struct put_call call = {.client = client};
    const uint8_t **places = malloc((keys->count + 1) * sizeof(*places));
    int r = places ? writer_get(client, &call.session) : client_fail(-ENOMEM, "no memory for a batch of %u", keys->count);
    if (r < 0) {
        free(places);
        return r;
    }
    r = check_keys(keys, places);
    for (uint32_t i = 0; i < keys->count; i++) {
        results[i] = -ECANCELED;
        if (r == 0 && !buffers[i].data && buffers[i].size)
            r = client_fail(-EINVAL, "buffer %u: %llu bytes at 0", i, (unsigned long long)buffers[i].size);
        if (r == 0 && client_overlaps_zombie(client, buffers[i].data, buffers[i].size))
            r = client_fail(-EBUSY, "buffer %u: a device that gave no answer in time may still write into it", i);
    }
    if (r == 0)
        r = lane_take(client, call.session, &call.lane);
    if (r < 0) {
        session_put(call.session);
        free(places);
        return r;
    }
    /* The daemon lends a quarter of the pool at most, to all clients together. */
    const struct kvfs_plane *plane = &call.session->plane;
    uint64_t window = min_u64(WINDOW_BYTES, plane->segment_size * plane->config.segment_count / 16);
    uint32_t stored = 0;
    for (uint32_t first = 0, count; first < keys->count && r == 0; first += count) {
        uint64_t bytes = 0;
        for (count = 0; first + count < keys->count && count < WINDOW_ITEMS; count++) {
            bytes += buffers[first + count].size;
            if (count && bytes > window)
                break;
        }
        uint8_t *reply = NULL;
        uint32_t reply_size = 0;
        uint64_t asked_ns = now_ns();
        r = window_reserve(&call, places + first, keys->sizes + first, buffers + first, count, &reply, &reply_size);
        bool waited = now_ns() - asked_ns > client->options.timeout_ms * 1000000ull;
        if (r == 0)
            r = window_write(&call, buffers + first, count, reply, reply_size, results + first);
        free(reply);
        /* What found no room behind others of its window asks again: those are committed now, and can be evicted. Not where the daemon
         * looked for room as long as it does: it would again, for every block that is left. */
        bool some = false, none = false;
        for (uint32_t i = first; i < first + count && r == 0; i++)
            if (results[i] == -ENOSPC && waited)
                none = true;
            else if (results[i] == -ENOSPC && some)
                count = i - first;
            else
                some = some || results[i] == 0;
        for (uint32_t i = first + count; none && i < keys->count; i++)
            results[i] = -ENOSPC;
        if (none)
            count = keys->count - first;
        for (uint32_t i = first; i < first + count; i++)
            if (results[i] == 0) {
                stored++;
                TALLY(client, puts, 1);
                TALLY(client, put_bytes, buffers[i].size);
            }
    }
    lane_give(call.lane);
    session_put(call.session);
    free(places);
    return r < 0 ? r : (int)stored;
}

/* ---- delete, list ---- */

int kvfs_delete(struct kvfs_client *client, const struct kvfs_keys *keys, uint8_t *deleted) {
    struct session *session;
    int r = writer_get(client, &session), total = 0;
    if (r < 0)
        return r;
    const uint8_t *key = keys->data;
    for (uint32_t first = 0, count; first < keys->count && r == 0; first += count) {
        struct message_buffer request = {0};
        count = (uint32_t)min_u64(keys->count - first, KVFS_WIRE_ITEMS_MAX);
        append_where(&request, client, count);
        for (uint32_t i = first; i < first + count && r == 0; key += keys->sizes[i++]) {
            char name[2 * KVFS_KEY_MAX];
            if (keys->sizes[i] == 0 || keys->sizes[i] > KVFS_KEY_MAX) {
                r = client_fail(-EINVAL, "key %u has %u bytes: 1 to %u are possible", i, keys->sizes[i], KVFS_KEY_MAX);
                break;
            }
            uint64_t size = key_hex(key, keys->sizes[i], name);
            append(&request, &size, 8);
            append(&request, name, size);
        }
        uint8_t *reply = NULL;
        uint32_t reply_size = 0;
        if (r < 0) {
            free(request.data);
            break;
        }
        r = ask(client, session, WIRE_DELETE, &request, RESERVE_TIMEOUT_MS, &reply, &reply_size);
        if (r == 0 && reply_size != count)
            r = client_fail(-EPROTO, "%s: the daemon answered a delete of %u keys with %u bytes", client->pool, count, reply_size);
        for (uint32_t i = 0; r == 0 && i < count; i++)
            total += deleted[first + i] = reply[i] != 0;
        free(reply);
    }
    TALLY(client, deletes, (uint64_t)total);
    session_put(session);
    return r < 0 ? r : total;
}

static int digit(uint8_t c) { return c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1; }

int kvfs_list(struct kvfs_client *client, const void *after, uint32_t after_size, void *data, uint64_t data_size, uint32_t *sizes,
              uint32_t capacity) {
    struct session *session;
    if (after_size > KVFS_KEY_MAX)
        return client_fail(-EINVAL, "a key of %u bytes: at most %u", after_size, KVFS_KEY_MAX);
    int r = session_get(client, &session);
    if (r < 0)
        return r;
    struct message_buffer request = {0};
    char name[2 * KVFS_KEY_MAX];
    uint64_t name_size = key_hex(after, after_size, name), count = 0, used = 0;
    capacity = (uint32_t)min_u64(capacity, min_u64(KVFS_WIRE_ITEMS_MAX, data_size / KVFS_KEY_MAX));
    append_where(&request, client, capacity);
    append(&request, &name_size, 8);
    append(&request, name, name_size);
    uint8_t *reply = NULL;
    uint32_t reply_size = 0;
    if (capacity == 0)
        r = client_fail(-ERANGE, "%llu bytes hold no key: %u are needed for each", (unsigned long long)data_size, KVFS_KEY_MAX);
    if (r == 0)
        r = ask(client, session, WIRE_LIST, &request, RESERVE_TIMEOUT_MS, &reply, &reply_size);
    else
        free(request.data);
    if (r == 0 && reply_size < 8)
        r = -EPROTO;
    if (r == 0)
        memcpy(&count, reply, 8);
    if (count > capacity)
        r = -EPROTO;
    uint64_t at = 8;
    for (uint32_t i = 0; i < count && r == 0; i++) {
        uint64_t size = 0;
        if (at + 8 <= reply_size)
            memcpy(&size, reply + at, 8);
        if (size < 2 || size > 2 * KVFS_KEY_MAX || size % 2 || at + 8 + size > reply_size) {
            r = -EPROTO;
            break;
        }
        for (uint32_t k = 0; k < size && r == 0; k += 2) {
            int high = digit(reply[at + 8 + k]), low = digit(reply[at + 9 + k]);
            if (high < 0 || low < 0)
                r = -EPROTO;
            ((uint8_t *)data)[used++] = (uint8_t)(high << 4 | low);
        }
        sizes[i] = (uint32_t)(size / 2);
        at += 8 + round_up(size, 8);
    }
    if (r == -EPROTO)
        client_fail(r, "%s: the daemon's list of %llu names in %u bytes makes no sense", client->pool, (unsigned long long)count, reply_size);
    free(reply);
    session_put(session);
    return r < 0 ? r : (int)count;
}
