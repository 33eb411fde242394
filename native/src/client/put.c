/* kvfs_put(): the daemon decides where, this writes, the daemon enters. */
#include "client/put.h"

#include "kvfs_checksum.h"

/* A batch goes in windows: one is reserved while the window before it is written and earlier ones are committed. The first window is small, as
 * nothing can be written until it is granted. The sum of all windows limits how much space one client withholds from others. */
#define WINDOWS_MAX 4u
#define WINDOW_ITEMS 256u
#define WINDOW_BYTES ((uint64_t)64 << 20)
#define FIRST_WINDOW_BYTES ((uint64_t)16 << 20)

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

static int64_t *result_of(const struct put_call *call, uint32_t i) { return &call->results[call->blocks[i].index]; }

static void call_fail(struct put_call *call, int error) {
    call->error = call->error ? call->error : error;
    call->next = call->count;
}

/* As a request for the call's blocks from `first` on has it, in which the block's own item is number i - first. */
static uint64_t parent_of(const struct put_call *call, uint32_t first, uint32_t i) {
    const struct put_block *block = &call->blocks[i];
    const struct chain *chain = &call->chain[block->index];
    if (!chain->behind_last)
        return chain->parent;
    if (i > first && block[-1].index + 1 == block->index)
        return WIRE_ITEM | (i - first - 1);
    return chain[-1].inode;
}

static int window_request(const struct put_call *call, uint32_t first, uint32_t count, struct message_buffer *out) {
    struct names_request request;
    uint32_t flags = call->chain && call->connection->version >= 5 ? WIRE_PARENTS : 0;
    for (uint32_t i = first; i < first + count; i++)
        flags |= key_is_short(call->kind, call->blocks[i].key_size) ? 0 : WIRE_TABLE;
    int r = 0;
    names_begin(&request, flags);
    for (uint32_t i = first; i < first + count && r == 0; i++) {
        const struct put_block *block = &call->blocks[i];
        struct key_file file;
        key_file(call->kind, block->key, block->key_size, &file);
        static_assert(WINDOW_ITEMS <= KVFS_WIRE_DIRECTORIES_MAX, "every item may have a directory of its own");
        int directory = names_directory(&request, &file);
        assert(directory >= 0);
        struct wire_reserve item = {.size = block->size, .name_size = file.path_size - file.name_at, .directory = (uint32_t)directory};
        message_append(&request.items, &item, sizeof(item));
        if (flags & WIRE_PARENTS) {
            uint64_t parent = parent_of(call, first, i);
            message_append(&request.items, &parent, sizeof(parent));
        }
        message_append(&request.items, file.path + file.name_at, item.name_size);
    }
    names_end(&request, call->client, count, out);
    return r == 0 ? message_check(out) : r;
}

/* Ask for places for the next blocks, if it is time. */
static void window_ask(struct put_call *call) {
    struct window *last = window_last(call), *window;
    if (call->next == call->count || call->window_count == WINDOWS_MAX || (last && (!last->opened || call->commit_first)))
        return;
    uint64_t bytes = 0, limit = last ? call->window_bytes : min_u64(call->window_bytes, FIRST_WINDOW_BYTES);
    uint32_t first = call->next, count = 0;
    while (first + count < call->count && count < WINDOW_ITEMS) {
        bytes += call->blocks[first + count].size;
        if (count && bytes > limit)
            break;
        count++;
    }
    struct message_buffer request = {0};
    int r = window_request(call, first, count, &request);
    window = r == 0 ? calloc(1, sizeof(*window)) : NULL;
    if (window) {
        *window = (struct window){.first = first, .count = count, .alone = true};
        for (struct window *other = call->windows; other; other = other->next)
            window->alone = window->alone && other->item_count == 0;
        wire_send(call->connection, WIRE_RESERVE, request.data, (uint32_t)request.size, call->client->options.timeout_ms, &window->pending);
        window->requested_ns = window->pending.sent_ns;
        if (last)
            last->next = window;
        else
            call->windows = window;
        call->window_count++;
        call->next = first + count;
        call->commit_first = false;
    } else {
        call_fail(call, r < 0 ? r : client_fail(-ENOMEM, "no memory for a batch of %u", count));
    }
    free(request.data);
}

/* Blocks without room are asked for again once everything before them is committed, and so can be evicted. There is no second try if all was
 * committed already, or if the daemon looked for room as long as it ever does. Such a search would repeat for every block that is left. */
static void window_without_room(struct put_call *call, struct window *window, uint32_t from, bool some) {
    if (window->pending.answered_ns - window->requested_ns > call->client->options.timeout_ms * 1000000ull / 2) {
        for (uint32_t i = window->first + window->count; i < call->count; i++)
            *result_of(call, i) = -ENOSPC;
        call->next = call->count;
    } else if (some || !window->alone) {
        window->count = from - window->first;
        call->next = from;
        call->commit_first = true;
    }
}

/* The places are known: take the daemon's answer apart. */
static void window_open(struct put_call *call, struct window *window) {
    uint32_t reply_size = 0, without_room = UINT32_MAX, placed = 0;
    uint64_t at = 0;
    window->opened = true;
    int r = wire_answer(call->client, &window->pending, &window->reply, &reply_size);
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
        *result_of(call, window->first + i) = reserved.error;
        if (reserved.error == -ENOSPC && without_room == UINT32_MAX) {
            without_room = window->first + i;
            placed = window->item_count;
        }
        struct put_item *item = reserved.error == 0 ? calloc(1, sizeof(*item)) : NULL;
        if (item) {
            const struct put_block *block = &call->blocks[window->first + i];
            *item = (struct put_item){.lane = call->lane,
                                      .call = call,
                                      .window = window,
                                      .pieces = block->vector->pieces,
                                      .piece_count = block->vector->count,
                                      .size = block->size,
                                      .index = window->first + i,
                                      .reserved = reserved,
                                      .body = window->reply + at + sizeof(reserved)};
            window->items[window->item_count++] = item;
            if (call->chain)
                memcpy(&call->chain[block->index].inode, item_record(item) + offsetof(struct kvfs_inode_record, inode), sizeof(uint64_t));
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
    assert(call->prepared == item);
    assert(window->items[window->started] == item);
    uint64_t limit = call->connection->reservation_ms * 1000000ull / 2;
    call->prepared = NULL;
    window->started++;
    window->in_flight++;
    call->in_flight++;
    item->groups_left = 1; /* until all of its groups are queued */
    /* Late writes, or those that a dead daemon's successor knows nothing of, would go to places that may be others' by then. */
    int error = call->error                               ? call->error
                : call->connection->gone                  ? -ENOTCONN
                : now_ns() - window->requested_ns > limit ? -ETIMEDOUT
                                                          : item_write(item);
    if (error < 0 && !item->error)
        item->error = error;
    item_advance(item);
    ring_submit(&call->lane->ring);
}

/* The error of a write in COMMIT. -ETIMEDOUT, and it alone, says that the write may still land. */
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
    assert(window->started == window->item_count);
    assert(window->in_flight == 0);
    assert(!window->committing);
    uint64_t entered = window->item_count;
    memcpy(window->commit, &entered, 8);
    for (uint32_t i = 0; i < window->item_count; i++) {
        struct put_item *item = window->items[i];
        struct wire_commit commit = {item->reserved.reservation, outcome(item)};
        memcpy(window->commit + 8 + i * sizeof(commit), &commit, sizeof(commit));
        if (item->late)
            atomic_fetch_add(&call->connection->late, 1);
        if (item->index < window->first + window->count)
            *result_of(call, item->index) = item->error;
    }
    window->committing = true;
    wire_send(call->connection, WIRE_COMMIT, window->commit, 8 + window->item_count * (uint32_t)sizeof(struct wire_commit),
              call->client->options.timeout_ms, &window->pending);
}

/* The commit is answered: give each block its result. */
static void window_close(struct put_call *call, struct window *window) {
    uint8_t *answer = NULL;
    uint32_t answer_size = 0;
    int r = window->item_count ? wire_answer(call->client, &window->pending, &answer, &answer_size) : 0;
    if (r == 0 && answer_size != 8 * window->item_count)
        r = client_fail(-EPROTO, "%s: the daemon answered a commit of %u blocks with %u bytes", call->client->pool, window->item_count, answer_size);
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
            *result_of(call, item->index) = r;
        else if (item->error == 0)
            memcpy(result_of(call, item->index), answer + 8 * i, 8);
        if (item->error == 0 && *result_of(call, item->index) == 0) {
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
    assert(call->window_count > 0);
    call->window_count--;
    free(window);
}

/* Send the commits of windows that are written; take in the answers to earlier ones. True: a window is closed. */
static bool windows_commit(struct put_call *call) {
    bool closed = false;
    for (struct window **link = &call->windows, *window = *link; window; window = *link) {
        bool written = window->opened && window->started == window->item_count && window->in_flight == 0;
        if (written && window->item_count && !window->committing)
            window_commit(call, window);
        if (written && (window->item_count == 0 || window->pending.done)) {
            *link = window->next;
            window_close(call, window);
            closed = true;
        } else {
            link = &window->next;
        }
    }
    return closed;
}

/* Wait for a write, or else for an answer. The youngest window's answer has places, and lets blocks be written. */
static void put_wait(struct put_call *call) {
    struct window *window = window_last(call);
    if (call->in_flight) {
        if (ring_reap(&call->lane->ring) == 0)
            ring_wait(&call->lane->ring, 1000000000);
        ring_reap(&call->lane->ring);
    } else if (window) {
        wire_wait(call->connection, &window->pending);
    }
}

static void put_run(struct put_call *call) {
    do {
        connection_poll(call->connection);
        struct window *last = window_last(call);
        if (last && !last->opened && last->pending.done)
            window_open(call, last);
        window_ask(call);
        struct put_item *item = item_next(call);
        if (item && call->in_flight < call->client->options.depth) {
            item_start(call, item);
            continue;
        }
        if (!windows_commit(call))
            put_wait(call);
    } while (call->windows || call->next < call->count);
    assert(call->in_flight == 0);
    assert(call->window_count == 0);
}

/* Notify the daemon which writes that it knows as late cannot land any more: it keeps their segments from being used until then. */
static void late_notify(struct kvfs_client *client, struct connection *connection) {
    if (!atomic_load(&connection->late))
        return;
    connection_reap(connection);
    struct late_write *write = atomic_exchange(&connection->landed, NULL), *next;
    while (write) {
        struct message_buffer request = {0};
        uint64_t count = 0;
        message_append(&request, &count, sizeof(count));
        for (; write && count < KVFS_WIRE_ITEMS_MAX; write = next, count++) {
            struct wire_commit commit = {write->reservation, -EIO};
            message_append(&request, &commit, sizeof(commit));
            next = write->next;
            free(write);
        }
        unsigned before = atomic_fetch_sub(&connection->late, (unsigned)count);
        assert(before >= count);
        if (!request.failed)
            memcpy(request.data, &count, sizeof(count));
        uint8_t *reply = NULL;
        uint32_t reply_size;
        message_ask(client, connection, WIRE_COMMIT, &request, &reply, &reply_size); /* it has nothing to say to that */
        free(reply);
    }
}

struct key_place {
    const uint8_t *data;
    uint32_t size, index;
};

static int by_key(const void *a, const void *b) {
    const struct key_place *x = a, *y = b;
    int r = memcmp(x->data, y->data, min_u64(x->size, y->size));
    return r ? r : x->size < y->size ? -1 : x->size > y->size;
}

int put_keys_check(const struct kvfs_keys *keys) {
    struct key_place *order = malloc((keys->count + 1) * sizeof(*order));
    if (!order)
        return client_fail(-ENOMEM, "no memory for a batch of %u", keys->count);
    const uint8_t *key = keys->data;
    int r = 0;
    for (uint32_t i = 0; i < keys->count; key += keys->sizes[i++]) {
        r = key_check(keys->kind, key, keys->sizes[i]);
        if (r < 0)
            break;
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

/* Blocks and their keys in the order of the call. */
static int blocks_set(const struct kvfs_keys *keys, const struct kvfs_vector *vectors, struct put_block *blocks) {
    const uint8_t *key = keys->data;
    int r = put_keys_check(keys);
    for (uint32_t i = 0; i < keys->count && r == 0; key += keys->sizes[i++])
        blocks[i] = (struct put_block){.vector = &vectors[i], .key = key, .key_size = keys->sizes[i], .index = i};
    return r;
}

/* The block's size, and whether its memory can be read. */
static int pieces_check(struct kvfs_client *client, struct put_block *block) {
    for (uint32_t i = 0; i < block->vector->count; i++) {
        const struct kvfs_buffer *piece = &block->vector->pieces[i];
        if (!piece->data && piece->size)
            return client_fail(-EINVAL, "buffer %u: %llu bytes at 0", block->index, (unsigned long long)piece->size);
        if (client_overlaps_orphan(client, piece->data, piece->size))
            return client_fail(-EBUSY, "buffer %u: a device that gave no answer in time may still write into it", block->index);
        if (__builtin_add_overflow(block->size, piece->size, &block->size))
            return client_fail(-EINVAL, "buffer %u: its pieces are more bytes than there are", block->index);
    }
    return 0;
}

/* Leave out the blocks that are there, each of which counts as used. One that this client could not read is stored again. */
static int blocks_filter(struct put_call *call, struct put_block *blocks) {
    struct shards shards = {0};
    uint32_t kept = 0;
    for (uint32_t i = 0; i < call->count; i++) {
        struct kvfs_record record;
        int r = key_find(call->client, call->connection, &shards, call->kind, blocks[i].key, blocks[i].key_size, &record);
        if (r < 0 && r != -ENOENT)
            return r;
        if (r < 0 || client_has_failed(call->client, record.inode)) {
            blocks[kept++] = blocks[i];
            continue;
        }
        call->results[blocks[i].index] = -EEXIST;
        if (call->chain)
            call->chain[blocks[i].index].inode = record.inode;
        client_hit(call->client, call->connection, &record);
    }
    TALLY(call->client, lookups, call->count);
    call->count = kept;
    return 0;
}

/* The block before each one: the last in this call, or one that is there. Others are not known. */
static int chain_make(struct put_call *call, const struct kvfs_keys *keys, const struct kvfs_keys *parents) {
    call->chain = calloc(parents->count + 1, sizeof(*call->chain));
    if (!call->chain)
        return client_fail(-ENOMEM, "no memory for a batch of %u", parents->count);
    struct shards shards = {0};
    const uint8_t *key = parents->data;
    for (uint32_t i = 0; i < parents->count; key += parents->sizes[i++]) {
        if (parents->sizes[i] == 0)
            continue;
        int r = key_check(parents->kind, key, parents->sizes[i]);
        if (r < 0)
            return r;
        const struct put_block *last = i ? &call->blocks[i - 1] : NULL;
        call->chain[i].behind_last =
            last && parents->kind == keys->kind && last->key_size == parents->sizes[i] && memcmp(last->key, key, last->key_size) == 0;
        struct kvfs_record record;
        if (!call->chain[i].behind_last && key_find(call->client, call->connection, &shards, parents->kind, key, parents->sizes[i], &record) == 0)
            call->chain[i].parent = record.flags & KVFS_INODE_FOREIGN ? 0 : record.inode;
    }
    return 0;
}

int put_options_take(const struct kvfs_put_options *given, const struct kvfs_keys *keys, struct kvfs_put_options *out) {
    memset(out, 0, sizeof(*out));
    if (given)
        memcpy(out, given, min_u64(given->size, sizeof(*out)));
    if (out->flags & ~(uint32_t)KVFS_IF_ABSENT)
        return client_fail(-EINVAL, "options: flags 0x%x", out->flags);
    if (out->parents && out->parents->count != keys->count)
        return client_fail(-EINVAL, "options: %u parents of %u blocks", out->parents->count, keys->count);
    return 0;
}

/* Leave out the blocks that an earlier try has dealt with. */
static void blocks_left(struct put_call *call, struct put_block *blocks) {
    uint32_t kept = 0;
    for (uint32_t i = 0; i < call->count; i++) {
        int64_t result = call->results[blocks[i].index];
        if (result == -ECANCELED || result == -ENOTCONN)
            blocks[kept++] = blocks[i];
    }
    call->count = kept;
}

/* The whole of a put with one daemon, for the blocks that have no result yet. *again: that daemon ended, and another is to come. */
static int put_try(struct put_call *call, const struct kvfs_keys *keys, const struct kvfs_vector *vectors, const struct kvfs_put_options *o,
                   struct put_block *blocks, struct daemon_wait *wait, bool *again) {
    struct kvfs_client *client = call->client;
    *again = false;
    int r = writer_get(client, wait, &call->connection);
    if (r < 0)
        return r;
    client_hits_send(client, call->connection);
    r = blocks_set(keys, vectors, blocks);
    for (uint32_t i = 0; i < keys->count && r == 0; i++)
        r = pieces_check(client, &blocks[i]);
    if (r == 0 && o->parents)
        r = chain_make(call, keys, o->parents);
    if (r == 0)
        blocks_left(call, blocks);
    if (r == 0 && o->flags & KVFS_IF_ABSENT)
        r = blocks_filter(call, blocks);
    if (r == 0) {
        late_notify(client, call->connection);
        r = call->count ? lane_take(client, call->connection, &call->lane) : 0;
    }
    if (r == 0 && call->count) {
        /* The daemon lends a quarter of the pool at most, to all clients together. */
        const struct kvfs_array *array = &call->connection->array;
        call->window_bytes = min_u64(WINDOW_BYTES, array->geometry.segment_size * array->geometry.segment_count / (8 * WINDOWS_MAX));
        put_run(call);
        lane_give(call->lane);
        r = call->error;
    }
    *again = daemon_retry(call->connection, wait, r);
    connection_put(call->connection);
    free(call->chain);
    return r;
}

/* A put means the same however often it is made, so what a daemon left in doubt is stored once more by the next one. */
int kvfs_put_vectors(struct kvfs_client *client, const struct kvfs_keys *keys, const struct kvfs_vector *vectors,
                     const struct kvfs_put_options *options, int64_t *results) {
    struct put_block *blocks = malloc((keys->count + 1) * sizeof(*blocks));
    if (!blocks)
        return client_fail(-ENOMEM, "no memory for a batch of %u", keys->count);
    for (uint32_t i = 0; i < keys->count; i++)
        results[i] = -ECANCELED;
    struct kvfs_put_options o;
    struct daemon_wait wait = {0};
    uint32_t stored = 0;
    int r = put_options_take(options, keys, &o);
    for (bool again = r == 0; again;) {
        struct put_call call = {.client = client, .results = results, .count = keys->count, .kind = keys->kind, .blocks = blocks};
        r = put_try(&call, keys, vectors, &o, blocks, &wait, &again);
        stored += call.stored;
    }
    free(blocks);
    return r < 0 ? r : (int)stored;
}

int kvfs_put(struct kvfs_client *client, const struct kvfs_keys *keys, const struct kvfs_buffer *buffers, int64_t *results) {
    struct kvfs_vector *vectors = malloc((keys->count + 1) * sizeof(*vectors));
    if (!vectors)
        return client_fail(-ENOMEM, "no memory for a batch of %u", keys->count);
    for (uint32_t i = 0; i < keys->count; i++)
        vectors[i] = (struct kvfs_vector){.pieces = &buffers[i], .count = 1};
    int r = kvfs_put_vectors(client, keys, vectors, NULL, results);
    free(vectors);
    return r;
}
