/* The calls of libkvfs that change something: the daemon decides where, this writes, the daemon enters. And list. */
#include "client/client.h"

#include <stdio.h>
#include <unistd.h>

/* A batch goes in windows: one is reserved while the one before is written and those before that are committed. Nothing is
 * written before the first answer: that one is for less. All together bound what one client keeps from others. */
#define WINDOWS_MAX 4u
#define WINDOW_ITEMS 256u
#define WINDOW_BYTES ((uint64_t)64 << 20)
#define FIRST_WINDOW_BYTES ((uint64_t)16 << 20)

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

static int message_check(const struct message_buffer *request) {
    if (request->failed || request->size > KVFS_WIRE_SIZE_MAX)
        return client_fail(-ENOMEM, "a request of %llu bytes", (unsigned long long)request->size);
    return 0;
}

static int ask(struct kvfs_client *client, struct session *session, uint16_t type, struct message_buffer *request, uint8_t **reply,
               uint32_t *reply_size) {
    int r = message_check(request);
    if (r == 0)
        r = wire_ask(client, session, type, request->data, (uint32_t)request->size, client->options.timeout_ms, reply, reply_size);
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
    if ((*out)->gone && (*out)->silent)
        r = client_fail(-ETIMEDOUT, "%s: the daemon gives no answer: nothing can be stored or deleted until it does", client->path);
    else if ((*out)->gone)
        r = client_fail(-ENOTCONN, "%s: the daemon is gone: nothing can be stored or deleted until it is back", client->path);
    else if (!(*out)->writable)
        r = client_fail(-EROFS, "%s: the daemon gave this user no right to write", client->path);
    if (r < 0)
        session_put(*out);
    return r;
}

/* ---- writing one block ---- */

struct window;
struct put_item {
    struct put_item *next;               /* in session->landed */
    struct lane *lane;
    struct put_call *call;
    struct window *window;
    const uint8_t *data, *source;        /* source: data, or a copy that the devices can take */
    uint64_t size;
    uint32_t index;                      /* in the call */
    struct wire_reserved reserved;
    const uint8_t *body;                 /* runs, record, ancestors: in the reply */
    struct desc *header;
    uint8_t *side;                       /* extent headers of further runs, then the padded last page */
    uint8_t *bounce;
    uint64_t bounce_size;
    uint32_t groups_left, groups_held;
    int error;
    bool begun;                          /* some of it was queued for a device */
    bool late;                           /* the daemon was told that some of it may still land */
    bool dismissed;                      /* its call is over, but a device owes an answer */
};

/* Asked for until `opened`; then its items are written; then, with `committing`, what was written is asked to be entered. */
struct window {
    struct window *next;
    uint32_t first, count;               /* blocks of the call that it answers for */
    struct put_item **items;             /* those that have a place; of blocks behind its own too, which it gives back */
    uint32_t item_count, started, in_flight;
    struct asked asked;
    uint64_t asked_ns;
    uint8_t *reply;                      /* to the reservation */
    uint8_t *commit;                     /* the request of that name */
    bool opened, committing, alone;      /* alone: nothing of this call was reserved when it was asked for */
};

struct put_call {
    struct kvfs_client *client;
    struct session *session;
    struct lane *lane;
    const struct kvfs_buffer *buffers;
    const uint8_t *const *places;
    const uint32_t *sizes;
    int64_t *results;
    uint32_t count, next;                /* blocks; those not yet asked for begin with next */
    uint64_t window_bytes;
    struct window *windows;              /* oldest first */
    uint32_t window_count, in_flight, stored;
    struct put_item *prepared;
    bool settle_first;                   /* no window is asked for before all others are committed */
    int error;                           /* ends the call: nothing more is asked for or written */
};

/* Its memory, once no device needs it. */
static void item_release(struct put_item *item) {
    desc_put(item->header);
    free(item->side);
    if (item->bounce)
        lane_bounce_give(item->lane, item->bounce, item->bounce_size);
    item->header = NULL;
    item->side = item->bounce = NULL;
}

/* Its call is over, and no device needs it. */
static void item_end(struct put_item *item) {
    struct session *session = item->lane->session;
    item_release(item);
    if (!item->late) {
        free(item);
        return;
    }
    item->next = atomic_load(&session->landed);
    while (!atomic_compare_exchange_weak(&session->landed, &item->next, item))
        ;
}

/* One of its groups has an outcome, or all have been started. */
static void item_advance(struct put_item *item) {
    if (--item->groups_left)
        return;
    item->window->in_flight--;
    item->call->in_flight--;
    if (item->groups_held == 0)
        item_release(item);
}

static void write_done(struct io_group *group, bool reaped) {
    struct put_item *item = group->owner;
    if (reaped || !group->expired)
        item->groups_held--;
    if (!reaped) {
        if (group->result && !item->error)
            item->error = group->result;
        item_advance(item);
    } else if (item->groups_held == 0 && item->dismissed) {
        item_end(item); /* given up on long ago; its device has answered */
    }
}

static int item_io(struct put_item *item, const struct wire_run *run, uint32_t page, const struct iovec *iovs, uint32_t count) {
    int r = ring_io(&item->lane->ring, true, run->segment, page, iovs, count, NULL, 0, write_done, item);
    if (r == 0) {
        item->groups_left++;
        item->groups_held++;
        item->begun = true;
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

/* What the daemon says of a block: runs, then the record with its extents, then ancestors. */
static const struct wire_run *runs_of(const struct put_item *item) { return (const struct wire_run *)(const void *)item->body; }
static const uint8_t *record_of(const struct put_item *item) { return item->body + item->reserved.run_count * sizeof(struct wire_run); }
static uint8_t *tail_of(const struct put_item *item) { return item->side + (item->reserved.run_count - 1) * PAGE; }

/* Check that, and make what goes to the devices. */
static int item_prepare(struct put_item *item) {
    struct lane *lane = item->lane;
    struct session *session = lane->session;
    struct kvfs_array *array = &session->array;
    const struct wire_reserved *w = &item->reserved;
    const struct wire_run *runs = runs_of(item);
    const uint8_t *record_at = record_of(item), *ancestors = record_at + round_up(w->record_size, 8);
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
    item->source = item->data;
    if (r == 0 && (uintptr_t)item->data % session->memory_alignment) {
        item->bounce_size = item->size + 1;
        item->bounce = lane_bounce(lane, &item->bounce_size);
        r = item->bounce ? 0 : -ENOMEM;
        if (r == 0) {
            memcpy(item->bounce, item->data, item->size);
            item->source = item->bounce;
            TALLY(lane->client, bounced_bytes, item->size);
        }
    }
    if (r == 0) {
        uint8_t *tail = tail_of(item); /* run 0 needs no extent header: its page is the last one's */
        if (tail_size) {
            memcpy(tail, item->source + (item->size - tail_size), tail_size);
            memset(tail + tail_size, 0, PAGE - tail_size);
        }
        kvfs_leaf_checksums(item->source, item->size, array->geometry.secret, leaves);
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
static int item_write(struct put_item *item) {
    const struct wire_reserved *w = &item->reserved;
    const struct wire_run *runs = runs_of(item);
    const uint8_t *tail = tail_of(item);
    uint32_t page = 0;
    int r = 0;
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
        iovs[0] = (struct iovec){i ? item->side + (i - 1) * PAGE : item->header->header, before * PAGE};
        uint32_t pages = runs[i].page_count - before;
        r = data_io(item, &runs[i], runs[i].page + written, iovs, written ? 0 : 1, page, page + pages, item->source, tail);
        page += pages;
    }
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

static struct window *window_last(struct put_call *call) {
    struct window *window = call->windows;
    while (window && window->next)
        window = window->next;
    return window;
}

static void call_fail(struct put_call *call, int error) {
    call->error = call->error ? call->error : error;
    call->next = call->count;
}

/* Ask for places for the next blocks, if it is time. */
static void window_ask(struct put_call *call) {
    struct window *last = window_last(call), *window;
    if (call->next == call->count || call->window_count == WINDOWS_MAX || (last && (!last->opened || call->settle_first)))
        return;
    uint64_t bytes = 0, limit = last ? call->window_bytes : min_u64(call->window_bytes, FIRST_WINDOW_BYTES);
    uint32_t first = call->next, count = 0;
    struct message_buffer request = {0};
    char name[2 * KVFS_KEY_MAX];
    while (first + count < call->count && count < WINDOW_ITEMS) {
        bytes += call->buffers[first + count].size;
        if (count && bytes > limit)
            break;
        count++;
    }
    append_where(&request, call->client, count);
    for (uint32_t i = first; i < first + count; i++) {
        struct wire_reserve item = {.size = call->buffers[i].size, .name_size = key_hex(call->places[i], call->sizes[i], name)};
        append(&request, &item, sizeof(item));
        append(&request, name, item.name_size);
    }
    int r = message_check(&request);
    window = r == 0 ? calloc(1, sizeof(*window)) : NULL;
    if (window) {
        *window = (struct window){.first = first, .count = count, .alone = true};
        for (struct window *other = call->windows; other; other = other->next)
            window->alone = window->alone && other->item_count == 0;
        wire_send(call->session, WIRE_RESERVE, request.data, (uint32_t)request.size, call->client->options.timeout_ms,
                  &window->asked);
        window->asked_ns = window->asked.sent_ns;
        if (last)
            last->next = window;
        else
            call->windows = window;
        call->window_count++;
        call->next = first + count;
        call->settle_first = false;
    } else {
        call_fail(call, r < 0 ? r : client_fail(-ENOMEM, "no memory for a batch of %u", count));
    }
    free(request.data);
}

/* What the daemon has no room for is asked for again once everything before it is committed, and so can be evicted. Not where that was so
 * already, nor where the daemon looked for room as long as it does: it would again, for every block that is left. */
static void window_without_room(struct put_call *call, struct window *window, uint32_t from, bool some) {
    if (window->asked.answered_ns - window->asked_ns > call->client->options.timeout_ms * 1000000ull / 2) {
        for (uint32_t i = window->first + window->count; i < call->count; i++)
            call->results[i] = -ENOSPC;
        call->next = call->count;
    } else if (some || !window->alone) {
        window->count = from - window->first;
        call->next = from;
        call->settle_first = true;
    }
}

/* The places are known: take the daemon's answer apart. */
static void window_open(struct put_call *call, struct window *window) {
    uint32_t reply_size = 0, without_room = UINT32_MAX, placed = 0;
    uint64_t at = 0;
    window->opened = true;
    int r = wire_answer(call->client, &window->asked, &window->reply, &reply_size);
    if (r == 0) {
        window->items = calloc(window->count, sizeof(struct put_item *));
        window->commit = malloc(8 + window->count * sizeof(struct wire_commit));
    }
    if (r == 0 && (!window->items || !window->commit))
        r = client_fail(-ENOMEM, "no memory for a batch of %u", window->count);
    for (uint32_t i = 0; i < window->count && r == 0; i++) {
        struct wire_reserved reserved;
        if (at + sizeof(reserved) <= reply_size)
            memcpy(&reserved, window->reply + at, sizeof(reserved));
        uint64_t size = at + sizeof(reserved) <= reply_size ? reserved_size(&reserved, reply_size - at) : 0;
        if (!size) {
            r = client_fail(-EPROTO, "%s: the daemon's reservation %u of %u makes no sense", call->client->pool, i, window->count);
            break;
        }
        call->results[window->first + i] = reserved.error;
        if (reserved.error == -ENOSPC && without_room == UINT32_MAX) {
            without_room = window->first + i;
            placed = window->item_count;
        }
        struct put_item *item = reserved.error == 0 ? calloc(1, sizeof(*item)) : NULL;
        if (item) {
            const struct kvfs_buffer *buffer = &call->buffers[window->first + i];
            *item = (struct put_item){.lane = call->lane, .call = call, .window = window, .data = buffer->data, .size = buffer->size,
                                      .index = window->first + i, .reserved = reserved, .body = window->reply + at + sizeof(reserved)};
            window->items[window->item_count++] = item;
        } else if (reserved.error == 0) {
            r = client_fail(-ENOMEM, "no memory for a batch of %u", window->count);
        }
        at += size;
    }
    if (r < 0)
        call_fail(call, r);
    else if (without_room != UINT32_MAX)
        window_without_room(call, window, without_room, placed > 0);
}

/* The next block that is to be written, its checksums and header made; NULL: there is none yet. */
static struct put_item *item_next(struct put_call *call) {
    while (!call->prepared) {
        struct window *window = call->windows;
        while (window && window->started == window->item_count)
            window = window->next;
        if (!window)
            return NULL;
        struct put_item *item = window->items[window->started];
        item->error = call->error ? call->error : item->index >= window->first + window->count ? -ECANCELED : item_prepare(item);
        if (item->error == 0) {
            call->prepared = item;
        } else {
            item_release(item);
            window->started++;
        }
    }
    return call->prepared;
}

static void item_start(struct put_call *call, struct put_item *item) {
    struct window *window = item->window;
    uint64_t limit = call->session->reservation_ms * 1000000ull / 2;
    call->prepared = NULL;
    window->started++;
    window->in_flight++;
    call->in_flight++;
    item->groups_left = 1; /* until all of its groups are queued */
    /* Late writes, or those that a dead daemon's successor knows nothing of, would go to places that may be others' by then. */
    int error = call->error ? call->error : call->session->gone ? -ENOTCONN : now_ns() - window->asked_ns > limit ? -ETIMEDOUT : item_write(item);
    if (error < 0 && !item->error)
        item->error = error;
    item_advance(item);
    ring_submit(&call->lane->ring);
}

/* What the daemon is told of a write: that it may still land is said of no other. */
static int64_t outcome(struct put_item *item) {
    item->late = item->groups_held > 0;
    if (item->late)
        return -ETIMEDOUT;
    if (item->error && !item->begun)
        return -ECANCELED;
    return item->error == -ETIMEDOUT ? -EIO : item->error;
}

/* All of it is written, or never will be: have it entered. */
static void window_commit(struct put_call *call, struct window *window) {
    uint64_t entered = window->item_count;
    memcpy(window->commit, &entered, 8);
    for (uint32_t i = 0; i < window->item_count; i++) {
        struct put_item *item = window->items[i];
        struct wire_commit commit = {item->reserved.reservation, outcome(item)};
        memcpy(window->commit + 8 + i * sizeof(commit), &commit, sizeof(commit));
        if (item->late)
            atomic_fetch_add(&call->session->late, 1);
        if (item->index < window->first + window->count)
            call->results[item->index] = item->error;
    }
    window->committing = true;
    wire_send(call->session, WIRE_COMMIT, window->commit, 8 + window->item_count * (uint32_t)sizeof(struct wire_commit),
              call->client->options.timeout_ms, &window->asked);
}

/* What was entered. */
static void window_close(struct put_call *call, struct window *window) {
    uint8_t *answer = NULL;
    uint32_t answer_size = 0;
    int r = window->item_count ? wire_answer(call->client, &window->asked, &answer, &answer_size) : 0;
    if (r == 0 && answer_size != 8 * window->item_count)
        r = client_fail(-EPROTO, "%s: the daemon answered a commit of %u blocks with %u bytes", call->client->pool, window->item_count,
                        answer_size);
    for (uint32_t i = 0; r == 0 && i < window->item_count; i++) {
        int64_t result;
        memcpy(&result, answer + 8 * i, 8);
        if (result > 0 || result < -4095)
            r = client_fail(-EPROTO, "%s: the daemon answered a commit with %lld, which is no error", call->client->pool, (long long)result);
    }
    if (r < 0)
        call_fail(call, r);
    for (uint32_t i = 0; i < window->item_count; i++) {
        struct put_item *item = window->items[i];
        if (item->error == 0 && r < 0) /* written, but whether it was entered nobody knows */
            call->results[item->index] = r;
        else if (item->error == 0)
            memcpy(&call->results[item->index], answer + 8 * i, 8);
        if (item->error == 0 && call->results[item->index] == 0) {
            call->stored++;
            TALLY(call->client, puts, 1);
            TALLY(call->client, put_bytes, item->size);
        }
        item->dismissed = true;
        if (item->groups_held == 0) /* else a device still reads what it was to write */
            item_end(item);
    }
    free(answer);
    free(window->items);
    free(window->reply);
    free(window->commit);
    call->window_count--;
    free(window);
}

/* Send the commits of windows that are written, take in the answers to those before. Whether one is done with. */
static bool windows_settle(struct put_call *call) {
    bool closed = false;
    for (struct window **link = &call->windows, *window = *link; window; window = *link) {
        bool written = window->opened && window->started == window->item_count && window->in_flight == 0;
        if (written && window->item_count && !window->committing)
            window_commit(call, window);
        if (written && (window->item_count == 0 || window->asked.done)) {
            *link = window->next;
            window_close(call, window);
            closed = true;
        } else {
            link = &window->next;
        }
    }
    return closed;
}

/* Wait for what will go on: a write, or an answer. Of two answers the younger one is places, and lets blocks be written. */
static void put_wait(struct put_call *call) {
    struct window *window = window_last(call);
    if (call->in_flight) {
        if (ring_reap(&call->lane->ring) == 0)
            ring_wait(&call->lane->ring, 1000000000);
        ring_reap(&call->lane->ring);
    } else if (window) {
        wire_wait(call->session, &window->asked);
    }
}

static void put_run(struct put_call *call) {
    do {
        session_look(call->session);
        struct window *last = window_last(call);
        if (last && !last->opened && last->asked.done)
            window_open(call, last);
        window_ask(call);
        struct put_item *item = item_next(call);
        if (item && call->in_flight < call->client->options.depth) {
            item_start(call, item);
            continue;
        }
        if (!windows_settle(call))
            put_wait(call);
    } while (call->windows || call->next < call->count);
}

/* Tell the daemon which writes that it knows as late cannot land any more: it keeps their segments from being used until then. */
static void late_tell(struct kvfs_client *client, struct session *session) {
    if (!atomic_load(&session->late))
        return;
    session_reap(session);
    struct put_item *item = atomic_exchange(&session->landed, NULL), *next;
    while (item) {
        struct message_buffer request = {0};
        uint64_t count = 0;
        append(&request, &count, sizeof(count));
        for (; item && count < KVFS_WIRE_ITEMS_MAX; item = next, count++) {
            struct wire_commit commit = {item->reserved.reservation, -EIO};
            append(&request, &commit, sizeof(commit));
            next = item->next;
            free(item);
        }
        atomic_fetch_sub(&session->late, (unsigned)count);
        if (!request.failed)
            memcpy(request.data, &count, sizeof(count));
        uint8_t *reply = NULL;
        uint32_t reply_size;
        ask(client, session, WIRE_COMMIT, &request, &reply, &reply_size); /* it has nothing to say to that */
        free(reply);
    }
}

void late_free(struct session *session) {
    for (struct put_item *item = atomic_exchange(&session->landed, NULL), *next; item; item = next) {
        next = item->next;
        free(item);
    }
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
    struct put_call call = {.client = client, .buffers = buffers, .sizes = keys->sizes, .results = results, .count = keys->count};
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
    if (r == 0) {
        late_tell(client, call.session);
        r = lane_take(client, call.session, &call.lane);
    }
    if (r < 0) {
        session_put(call.session);
        free(places);
        return r;
    }
    /* The daemon lends a quarter of the pool at most, to all clients together. */
    const struct kvfs_array *array = &call.session->array;
    call.places = places;
    call.window_bytes = min_u64(WINDOW_BYTES, array->geometry.segment_size * array->geometry.segment_count / (8 * WINDOWS_MAX));
    put_run(&call);
    lane_give(call.lane);
    session_put(call.session);
    free(places);
    return call.error < 0 ? call.error : (int)call.stored;
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
        r = ask(client, session, WIRE_DELETE, &request, &reply, &reply_size);
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
        r = ask(client, session, WIRE_LIST, &request, &reply, &reply_size);
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
