/* Leases and touches: the table says which inodes the keys lead to, and the daemon is told these. Of blocks of other nodes it is told the keys of
 * their names, in frames of their own; one lease has both kinds. */
#include "client/client.h"

#include <stdio.h>

/* A block that was replaced after its look-up is looked up again, so often. */
#define LEASE_TRIES 3

/* One frame's request: blocks of this node, or of others. */
struct lease_part {
    uint32_t count;
    uint32_t asked[KVFS_WIRE_ITEMS_MAX]; /* keys, by number */
    struct {
        struct wire_lease head;
        union {
            uint64_t inodes[KVFS_WIRE_ITEMS_MAX];
            struct wire_foreign_block blocks[KVFS_WIRE_ITEMS_MAX];
        };
    } frame;
};
struct lease_call {
    struct kvfs_client *client;
    struct connection *connection;
    const struct kvfs_keys *keys;
    uint64_t *inodes; /* of each key: the last that was asked for; 0: none */
    uint8_t *held;
    uint64_t lease;
    uint32_t milliseconds;
    uint32_t refused; /* of the frames of one try */
    struct lease_part own, foreign;
};

static int lease_ask(struct lease_call *call, struct lease_part *part) {
    uint8_t *reply = NULL;
    uint32_t reply_size = 0, count = part->count, item_size = part == &call->own ? sizeof(uint64_t) : sizeof(struct wire_foreign_block);
    uint64_t lease = 0;
    part->count = 0;
    if (!count)
        return 0;
    part->frame.head = (struct wire_lease){.lease = call->lease, .milliseconds = call->milliseconds};
    int r = wire_ask(call->client, call->connection, part == &call->own ? WIRE_LEASE : WIRE_FOREIGN_LEASE, &part->frame,
                     (uint32_t)sizeof(struct wire_lease) + item_size * count, call->client->options.timeout_ms, &reply, &reply_size);
    if (r < 0)
        return r;
    if (reply_size == sizeof(lease) + count)
        memcpy(&lease, reply, sizeof(lease));
    bool good = reply_size == sizeof(lease) + count && (!call->lease || !lease || lease == call->lease);
    for (uint32_t i = 0; good && i < count; i++) {
        bool held = reply[sizeof(lease) + i];
        good = lease || !held;
        call->held[part->asked[i]] = held;
        call->refused += !held;
    }
    free(reply);
    if (!good)
        return client_fail(-EPROTO, "%s: the daemon answered a lease of %u blocks with %u bytes that make no sense", call->client->pool, count,
                           reply_size);
    call->lease = lease ? lease : call->lease;
    return 0;
}

/* Ask for every key that is not held, and now leads to an inode that was not asked for. A block of another node has a number of its place. */
static int lease_try(struct lease_call *call) {
    struct shards shards = {0};
    struct kvfs_record record;
    const uint8_t *key = call->keys->data;
    int r = 0;
    call->refused = 0;
    for (uint32_t i = 0; i < call->keys->count && r == 0; key += call->keys->sizes[i++]) {
        int found = call->held[i] ? -ENOENT : key_find(call->client, call->connection, &shards, call->keys->kind, key, call->keys->sizes[i], &record);
        if (found < 0 && found != -ENOENT)
            return found;
        if (found < 0 || record.inode == call->inodes[i])
            continue;
        struct lease_part *part = record.flags & KVFS_INODE_FOREIGN ? &call->foreign : &call->own;
        call->inodes[i] = record.inode;
        if (part == &call->own)
            part->frame.inodes[part->count] = record.inode;
        else
            part->frame.blocks[part->count] = foreign_block(&record);
        part->asked[part->count++] = i;
        if (part->count == KVFS_WIRE_ITEMS_MAX)
            r = lease_ask(call, part);
    }
    if (r == 0)
        r = lease_ask(call, &call->own);
    return r == 0 ? lease_ask(call, &call->foreign) : r;
}

static int release_ask(struct kvfs_client *client, struct connection *connection, uint64_t lease) {
    uint8_t *reply;
    uint32_t reply_size;
    uint64_t ended = 0;
    int r = wire_ask(client, connection, WIRE_RELEASE, &lease, sizeof(lease), client->options.timeout_ms, &reply, &reply_size);
    if (r < 0)
        return r;
    if (reply_size == sizeof(ended))
        memcpy(&ended, reply, sizeof(ended));
    free(reply);
    if (reply_size != sizeof(ended) || ended > 1)
        return client_fail(-EPROTO, "%s: the daemon answered a release with %u bytes", client->pool, reply_size);
    return (int)ended;
}

int kvfs_lease(struct kvfs_client *client, const struct kvfs_keys *keys, uint32_t milliseconds, uint64_t *lease, uint8_t *held) {
    int total = 0;
    for (uint32_t i = 0; i < keys->count; i++)
        held[i] = 0;
    *lease = 0;
    if (!milliseconds)
        return client_fail(-EINVAL, "a lease of 0 milliseconds");
    struct lease_call *call = calloc(1, sizeof(*call));
    uint64_t *inodes = calloc(keys->count + 1ull, sizeof(*inodes));
    int r = call && inodes ? 0 : client_fail(-ENOMEM, "no memory for a lease of %u blocks", keys->count);
    if (r == 0) {
        call->client = client;
        call->keys = keys;
        call->inodes = inodes;
        call->held = held;
        call->milliseconds = milliseconds;
    }
    struct daemon_wait wait = {0};
    bool again = r == 0;
    while (again) {
        r = daemon_get(client, &wait, &call->connection);
        if (r < 0)
            break;
        for (uint32_t i = 0; i < LEASE_TRIES; i++)
            if ((r = lease_try(call)) < 0 || !call->refused)
                break;
        again = daemon_retry(call->connection, &wait, r);
        if (again) { /* a lease ends with its daemon */
            connection_put(call->connection);
            call->connection = NULL;
            call->lease = call->own.count = call->foreign.count = 0;
            memset(inodes, 0, keys->count * sizeof(*inodes));
            memset(held, 0, keys->count);
        }
    }
    if (!call || !call->connection)
        goto out;
    if (r < 0) { /* where the daemon answers still */
        if (call->lease && r != -ETIMEDOUT && r != -ENOTCONN) {
            char reason[512];
            snprintf(reason, sizeof(reason), "%s", kvfs_error());
            release_ask(client, call->connection, call->lease);
            client_fail(r, "%s", reason);
        }
        memset(held, 0, keys->count);
    } else {
        *lease = call->lease;
        for (uint32_t i = 0; i < keys->count; i++)
            total += held[i];
    }
    connection_put(call->connection);
out:
    free(call);
    free(inodes);
    return r < 0 ? r : total;
}

int kvfs_release(struct kvfs_client *client, uint64_t lease) {
    struct connection *connection;
    int r = daemon_get(client, NULL, &connection);
    if (r == 0) {
        r = lease ? release_ask(client, connection, lease) : 0;
        connection_put(connection);
    }
    return r == -ENOTCONN ? 0 : r; /* it ended with its daemon */
}

/* Tell the daemon of the blocks that exist: WIRE_TOUCH or WIRE_DONE. Returns how many do. */
static int keys_tell(struct kvfs_client *client, const struct kvfs_keys *keys, uint16_t type) {
    struct connection *connection;
    struct shards shards = {0};
    uint64_t inodes[CLIENT_HITS_MAX];
    struct wire_foreign_block blocks[CLIENT_FOREIGN_MAX];
    uint32_t waiting = 0, foreign = 0;
    const uint8_t *key = keys->data;
    int r = connection_get(client, &connection), found = 0;
    if (r < 0)
        return r;
    if (type == WIRE_DONE)
        client_hit(client, connection, NULL);                   /* reads before it are no uses after it */
    bool tells = type != WIRE_DONE || connection->version >= 5; /* an older daemon hangs up on what it does not know */
    for (uint32_t i = 0; i < keys->count; key += keys->sizes[i++]) {
        struct kvfs_record record;
        r = key_find(client, connection, &shards, keys->kind, key, keys->sizes[i], &record);
        if (r < 0 && r != -ENOENT)
            break;
        if (r == 0 && record.flags & KVFS_INODE_FOREIGN)
            blocks[foreign++] = foreign_block(&record);
        else if (r == 0)
            inodes[waiting++] = record.inode;
        found += r == 0;
        if (waiting == CLIENT_HITS_MAX) {
            if (tells)
                wire_notify(connection, type, inodes, waiting * (uint32_t)sizeof(*inodes));
            waiting = 0;
        }
        if (foreign == CLIENT_FOREIGN_MAX) {
            if (type == WIRE_TOUCH)
                foreign_notify(connection, WIRE_FOREIGN_TOUCH, blocks, foreign);
            foreign = 0;
        }
    }
    if (waiting && tells)
        wire_notify(connection, type, inodes, waiting * (uint32_t)sizeof(*inodes));
    if (foreign && type == WIRE_TOUCH)
        foreign_notify(connection, WIRE_FOREIGN_TOUCH, blocks, foreign);
    connection_put(connection);
    return r < 0 && r != -ENOENT ? r : found;
}

int kvfs_touch(struct kvfs_client *client, const struct kvfs_keys *keys) { return keys_tell(client, keys, WIRE_TOUCH); }

int kvfs_done(struct kvfs_client *client, const struct kvfs_keys *keys) { return keys_tell(client, keys, WIRE_DONE); }
