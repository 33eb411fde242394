/* Blocks, and parts of them, by key into the caller's memory. */
#include "client/client.h"

#include <stdio.h>

static void get_done(struct lane *lane, struct fetch *fetch);

static void block_over(struct get_batch *batch, uint32_t i, int64_t result) {
    batch->results[i] = result;
    batch->read += result >= 0;
    assert(batch->left > 0);
    if (--batch->left == 0 && batch->done)
        batch->done(batch); /* it may be gone */
}

static void block_read(struct get_batch *batch, struct lane *lane, uint32_t i, const struct kvfs_record *record, uint64_t size) {
    client_hit(batch->client, lane->connection, record);
    TALLY(batch->client, hits, 1);
    TALLY(batch->client, gets, 1);
    TALLY(batch->client, get_bytes, size);
    block_over(batch, i, (int64_t)size);
}

static uint64_t room_of(const struct kvfs_vector *vector) {
    uint64_t size = 0;
    for (uint32_t i = 0; i < vector->count; i++)
        size += vector->pieces[i].size;
    return size;
}

static void get_start(struct get_batch *batch, struct lane *lane, uint32_t i, uint64_t until_ns) {
    const struct kvfs_vector *vector = &batch->vectors[i];
    struct kvfs_record record;
    uint64_t offset = 0, size = room_of(vector);
    int r = key_find(batch->client, lane->connection, &batch->shards, batch->keys->kind, batch->places[i], batch->keys->sizes[i], &record);
    if (r < 0 && r != -ENOENT && !batch->error) {
        batch->error = r;
        snprintf(batch->reason, sizeof(batch->reason), "%s", kvfs_error());
    }
    if (r == 0 && batch->ranges) {
        offset = min_u64(vector->offset, record.size);
        size = min_u64(size, record.size - offset);
    } else if (r == 0) {
        r = record.size > size ? -ERANGE : 0;
        size = record.size;
    }
    if (r < 0) {
        TALLY(batch->client, misses, r == -ENOENT);
        block_over(batch, i, r);
        return;
    }
    if ((batch->ranges && size == 0) || stage_take(batch->client, &record, offset, size, vector->pieces, until_ns)) {
        block_read(batch, lane, i, &record, size);
        return;
    }
    struct fetch *fetch = fetch_get(lane);
    if (!fetch) {
        block_over(batch, i, -ENOMEM);
        return;
    }
    fetch->record = record;
    fetch->offset = offset;
    fetch->size = size;
    fetch->narrow = batch->ranges;
    fetch->until_ns = until_ns;
    fetch->done = get_done;
    fetch->owner = batch;
    fetch->cookie = i;
    fetch_start(lane, fetch, vector->pieces, vector->count);
}

static void get_done(struct lane *lane, struct fetch *fetch) {
    struct get_batch *batch = fetch->owner;
    uint32_t i = (uint32_t)fetch->cookie;
    if (fetch->result == -ESTALE && batch->tries[i]++ < CLIENT_RETRIES) { /* replaced or evicted meanwhile: what does the name say now? */
        memset(&batch->shards, 0, sizeof(batch->shards));
        get_start(batch, lane, i, fetch->until_ns);
        return;
    }
    if (fetch->result >= 0) {
        block_read(batch, lane, i, &fetch->record, (uint64_t)fetch->result);
        return;
    }
    TALLY(batch->client, misses, 1);
    block_over(batch, i, fetch->result == -ESTALE ? -ENOENT : fetch->result);
}

/* ---- batches on a lane ---- */

int get_begin(struct get_batch *batch) {
    uint32_t count = batch->keys->count;
    int r = client_check_vectors(batch->client, batch->vectors, count);
    if (r < 0)
        return r;
    batch->left = count;
    batch->places = malloc((count + 1) * sizeof(*batch->places));
    batch->tries = calloc(count + 1, 1);
    if (!batch->places || !batch->tries)
        return client_fail(-ENOMEM, "no memory for a batch of %u", count);
    const uint8_t *key = batch->keys->data;
    for (uint32_t i = 0; i < count; key += batch->keys->sizes[i++])
        batch->places[i] = key;
    TALLY(batch->client, lookups, count);
    return 0;
}

void get_end(struct get_batch *batch) {
    free(batch->places);
    free(batch->tries);
}

void get_add(struct get_loop *loop, struct get_batch *batch) {
    assert(batch->begun == 0);
    assert(batch->left > 0);
    batch->next = NULL;
    if (loop->last)
        loop->last->next = batch;
    else
        loop->first = batch;
    loop->last = batch;
}

/* The next block; its batch may be gone once it has its result. */
static uint32_t next_block(struct get_loop *loop) {
    struct get_batch *batch = loop->first;
    uint32_t i = batch->begun++;
    if (batch->begun == batch->keys->count) {
        loop->first = batch->next;
        if (!loop->first)
            loop->last = NULL;
    }
    return i;
}

bool get_wants(const struct get_loop *loop) {
    /* A block that waits for its proof keeps no device busy: up to two more are read meanwhile. */
    return loop->lane->active_count - loop->lane->ready_count < loop->depth && loop->lane->active_count < loop->depth + 2;
}

void get_fill(struct get_loop *loop) {
    while (loop->first && get_wants(loop)) {
        struct get_batch *batch = loop->first;
        uint32_t i = next_block(loop);
        get_start(batch, loop->lane, i, loop->turn_ns + batch->client->options.timeout_ms * 1000000ull);
    }
}

bool get_step(struct get_loop *loop, uint64_t timeout_ns) {
    get_fill(loop);
    bool more = lane_step(loop->lane, timeout_ns) || loop->first;
    loop->turn_ns = now_ns();
    return more;
}

void get_cancel(struct get_loop *loop) {
    while (loop->first) {
        struct get_batch *batch = loop->first;
        uint32_t i = next_block(loop);
        block_over(batch, i, -ECANCELED);
    }
}

/* ---- calls ---- */

static int get(struct kvfs_client *client, const struct kvfs_keys *keys, const struct kvfs_vector *vectors, bool ranges, int64_t *results) {
    struct get_batch batch = {.client = client, .keys = keys, .vectors = vectors, .ranges = ranges, .results = results};
    struct get_loop loop = {.depth = client->options.depth, .turn_ns = now_ns()}; /* the first block's is the call's beginning */
    struct connection *connection;
    int r = connection_get(client, &connection);
    if (r < 0)
        return r;
    r = get_begin(&batch);
    if (r == 0)
        r = lane_take(client, connection, &loop.lane);
    if (r == 0) {
        if (keys->count)
            get_add(&loop, &batch);
        while (get_step(&loop, 1000000000))
            ;
        assert(batch.left == 0);
        lane_give(loop.lane);
        r = batch.error < 0 ? client_fail(batch.error, "%s", batch.reason) : (int)batch.read;
    }
    get_end(&batch);
    connection_put(connection);
    return r;
}

int kvfs_get_vectors(struct kvfs_client *client, const struct kvfs_keys *keys, const struct kvfs_vector *vectors, int64_t *results) {
    return get(client, keys, vectors, false, results);
}

int kvfs_get_ranges(struct kvfs_client *client, const struct kvfs_keys *keys, const struct kvfs_vector *vectors, int64_t *results) {
    return get(client, keys, vectors, true, results);
}

int kvfs_get(struct kvfs_client *client, const struct kvfs_keys *keys, const struct kvfs_buffer *buffers, int64_t *results) {
    struct kvfs_vector *vectors = calloc(keys->count + 1, sizeof(*vectors));
    if (!vectors)
        return client_fail(-ENOMEM, "no memory for a batch of %u", keys->count);
    for (uint32_t i = 0; i < keys->count; i++) {
        vectors[i].pieces = &buffers[i];
        vectors[i].count = 1;
    }
    int r = get(client, keys, vectors, false, results);
    free(vectors);
    return r;
}
