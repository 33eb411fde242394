/* Whole blocks by key into the caller's memory. */
#include "client/client.h"

struct get_call {
    struct kvfs_client *client;
    struct connection *connection;
    const struct kvfs_keys *keys;
    const struct kvfs_buffer *buffers;
    int64_t *results;
    const uint8_t **places; /* of the keys */
    uint8_t *tries;         /* how often a name led to an inode that was gone */
    uint32_t read;
    int error;
    struct shards shards;
};

static void get_done(struct lane *lane, struct fetch *fetch);

static void get_start(struct get_call *call, struct lane *lane, uint32_t i, uint64_t until_ns) {
    struct kvfs_record record;
    int r = key_find(call->client, call->connection, &call->shards, call->keys->kind, call->places[i], call->keys->sizes[i], &record);
    if (r < 0 && r != -ENOENT && !call->error)
        call->error = r;
    if (r == 0 && record.size > call->buffers[i].size)
        r = -ERANGE;
    if (r < 0) {
        call->results[i] = r;
        if (r == -ENOENT)
            TALLY(call->client, misses, 1);
        return;
    }
    if (stage_take(call->client, &record, call->buffers[i].data, until_ns)) {
        call->results[i] = (int64_t)record.size;
        call->read++;
        client_hit(call->client, call->connection, record.inode);
        TALLY(call->client, hits, 1);
        TALLY(call->client, gets, 1);
        TALLY(call->client, get_bytes, record.size);
        return;
    }
    struct fetch *fetch = fetch_get(lane);
    if (!fetch) {
        call->results[i] = -ENOMEM;
        return;
    }
    fetch->record = record;
    fetch->size = record.size;
    fetch->data = call->buffers[i].data;
    fetch->until_ns = until_ns;
    fetch->done = get_done;
    fetch->owner = call;
    fetch->cookie = i;
    fetch_start(lane, fetch);
}

static void get_done(struct lane *lane, struct fetch *fetch) {
    struct get_call *call = fetch->owner;
    uint32_t i = (uint32_t)fetch->cookie;
    if (fetch->result == -ESTALE && call->tries[i]++ < CLIENT_RETRIES) { /* replaced or evicted meanwhile: what does the name say now? */
        memset(&call->shards, 0, sizeof(call->shards));
        get_start(call, lane, i, fetch->until_ns);
        return;
    }
    call->results[i] = fetch->result == -ESTALE ? -ENOENT : fetch->result;
    if (fetch->result < 0) {
        TALLY(call->client, misses, 1);
        return;
    }
    call->read++;
    client_hit(call->client, call->connection, fetch->record.inode);
    TALLY(call->client, hits, 1);
    TALLY(call->client, gets, 1);
    TALLY(call->client, get_bytes, (uint64_t)fetch->result);
}

int kvfs_get(struct kvfs_client *client, const struct kvfs_keys *keys, const struct kvfs_buffer *buffers, int64_t *results) {
    struct get_call call = {.client = client, .keys = keys, .buffers = buffers, .results = results};
    struct lane *lane;
    uint64_t began = now_ns(); /* a block's turn; that of the first is the call's beginning */
    int r = connection_get(client, &call.connection);
    if (r < 0)
        return r;
    r = client_check_buffers(client, buffers, keys->count);
    if (r == 0)
        r = lane_take(client, call.connection, &lane);
    if (r < 0) {
        connection_put(call.connection);
        return r;
    }
    call.places = malloc((keys->count + 1) * sizeof(*call.places));
    call.tries = calloc(keys->count + 1, 1);
    if (call.places && call.tries) {
        const uint8_t *key = keys->data;
        for (uint32_t i = 0; i < keys->count; key += keys->sizes[i++])
            call.places[i] = key;
        uint32_t next = 0;
        bool more;
        do {
            /* A block that waits for its proof keeps no device busy: up to two more are read meanwhile. */
            while (next < keys->count && lane->active_count - lane->ready_count < client->options.depth &&
                   lane->active_count < client->options.depth + 2)
                get_start(&call, lane, next++, began + client->options.timeout_ms * 1000000ull);
            more = lane_step(lane, 1000000000) || next < keys->count;
            began = now_ns();
        } while (more);
    } else {
        call.error = client_fail(-ENOMEM, "no memory for a batch of %u", keys->count);
    }
    TALLY(client, lookups, keys->count);
    free(call.places);
    free(call.tries);
    lane_give(lane);
    connection_put(call.connection);
    return call.error < 0 ? call.error : (int)call.read;
}
