/* Reports of a client about itself: to the daemon, unasked, and to its caller. */
#include "client/client.h"

#include <stdio.h>
#include <unistd.h>

/* ---- to the caller ---- */

int kvfs_client_information_get(struct kvfs_client *client, struct kvfs_client_information *out) {
    memset(out, 0, sizeof(*out));
    if (client->pid != getpid())
        return client_fail(-ECHILD, "%s: connected by process %d", client->path, (int)client->pid);
    pthread_mutex_lock(&client->lock);
    struct connection *connection = client->connection;
    connection_poll(connection);
    memcpy(out->pool_uuid, connection->uuid, sizeof(out->pool_uuid));
    out->mount_epoch = connection->array.geometry.mount_epoch;
    out->connected = !connection->gone;
    out->writable = connection->writable;
    out->device_count = connection->array.device_count;
    out->memory_alignment = connection->memory_alignment;
    snprintf(out->pool, sizeof(out->pool), "%.255s", client->pool);
    pthread_mutex_unlock(&client->lock);
    return 0;
}

static_assert(offsetof(struct kvfs_client_statistics, busy) == (CLIENT_COUNTERS - 1) * sizeof(uint64_t), "busy is no counter");

int kvfs_client_statistics_get(struct kvfs_client *client, struct kvfs_client_statistics *out) {
    memset(out, 0, sizeof(*out));
    if (client->pid != getpid())
        return client_fail(-ECHILD, "%s: connected by process %d", client->path, (int)client->pid);
    uint64_t values[CLIENT_COUNTERS];
    for (size_t i = 0; i < CLIENT_COUNTERS; i++)
        values[i] = atomic_load_explicit(&client->count[i], memory_order_relaxed);
    memcpy(out, values, sizeof(*out));
    out->busy = atomic_load(&client->orphans);
    return 0;
}

int kvfs_client_rings(struct kvfs_client *client, char *out, uint32_t capacity) {
    if (client->pid != getpid())
        return client_fail(-ECHILD, "%s: connected by process %d", client->path, (int)client->pid);
    pthread_mutex_lock(&client->lock);
    ring_tell(&client->connection->array, out, capacity);
    pthread_mutex_unlock(&client->lock);
    return 0;
}

int kvfs_client_user(struct kvfs_client *client, char *out, uint32_t capacity) {
    if (client->pid != getpid())
        return client_fail(-ECHILD, "%s: connected by process %d", client->path, (int)client->pid);
    pthread_mutex_lock(&client->lock);
    uint32_t user = client->connection->user, own = client->connection->own_user;
    pthread_mutex_unlock(&client->lock);
    if (!user)
        snprintf(out, capacity, "unknown (an older daemon does not say)");
    else if (user - 1 == own)
        snprintf(out, capacity, "%u", own);
    else
        snprintf(out, capacity, "%u (%u in this process's user namespace)", user - 1, own);
    return 0;
}

/* ---- to a put ---- */

/* With the lock. */
static bool has_failed(const struct kvfs_client *client, uint64_t inode) {
    for (uint32_t i = 0; i < CLIENT_FAILED_MAX && i < client->failed_count; i++)
        if (client->failed[i] == inode)
            return true;
    return false;
}

void client_failed(struct kvfs_client *client, uint64_t inode) {
    pthread_mutex_lock(&client->lock);
    if (!has_failed(client, inode)) {
        client->failed[client->failed_count % CLIENT_FAILED_MAX] = inode;
        client->failed_count++;
    }
    pthread_mutex_unlock(&client->lock);
}

bool client_has_failed(struct kvfs_client *client, uint64_t inode) {
    pthread_mutex_lock(&client->lock);
    bool found = has_failed(client, inode);
    pthread_mutex_unlock(&client->lock);
    return found;
}

/* ---- to the daemon ---- */

struct wire_foreign_block foreign_block(const struct kvfs_record *record) {
    return (struct wire_foreign_block){record->key_low, record->key_high, record->segment, record->page};
}

void foreign_notify(struct connection *connection, uint32_t what, const struct wire_foreign_block *blocks, uint32_t count) {
    struct {
        struct wire_foreign head;
        struct wire_foreign_block blocks[CLIENT_FOREIGN_MAX];
    } frame = {.head = {.what = what, .count = count}};
    memcpy(frame.blocks, blocks, count * sizeof(*blocks));
    wire_notify(connection, WIRE_FOREIGN, &frame, (uint32_t)(sizeof(frame.head) + count * sizeof(*blocks)));
}

void client_bad_block(struct connection *connection, const struct kvfs_record *record) {
    uint64_t words[2] = {record->inode, record->segment};
    if (record->flags & KVFS_INODE_FOREIGN)
        foreign_notify(connection, WIRE_FOREIGN_BAD, &(struct wire_foreign_block){record->key_low, record->key_high, record->segment, record->page},
                       1);
    else
        wire_notify(connection, WIRE_BAD_BLOCK, words, sizeof(words));
}

void client_hits_send(struct kvfs_client *client, struct connection *connection) {
    pthread_mutex_lock(&client->lock);
    bool due = (client->hit_count || client->foreign_hit_count) && now_ns() - client->hits_sent_ns > 1000000000;
    pthread_mutex_unlock(&client->lock);
    if (due)
        client_hit(client, connection, NULL);
}

void client_hit(struct kvfs_client *client, struct connection *connection, const struct kvfs_record *record) {
    uint64_t hits[CLIENT_HITS_MAX], now = now_ns();
    struct wire_foreign_block foreign[CLIENT_FOREIGN_MAX];
    uint32_t count = 0, foreign_count = 0;
    struct kvfs_client_statistics report;
    const uint32_t totals = CLIENT_COUNTERS - 1;
    pthread_mutex_lock(&client->lock);
    bool due = !record || now - client->hits_sent_ns > 1000000000;
    if (record && record->flags & KVFS_INODE_FOREIGN)
        client->foreign_hits[client->foreign_hit_count++] = foreign_block(record);
    else if (record)
        client->hits[client->hit_count++] = record->inode;
    if (due || client->hit_count == CLIENT_HITS_MAX) {
        count = client->hit_count;
        memcpy(hits, client->hits, count * sizeof(*hits));
        client->hit_count = 0;
    }
    if (due || client->foreign_hit_count == CLIENT_FOREIGN_MAX) {
        foreign_count = client->foreign_hit_count;
        memcpy(foreign, client->foreign_hits, foreign_count * sizeof(*foreign));
        client->foreign_hit_count = 0;
    }
    if (due)
        client->hits_sent_ns = now;
    pthread_mutex_unlock(&client->lock);
    if (count)
        wire_notify(connection, WIRE_HITS, hits, count * (uint32_t)sizeof(*hits));
    if (foreign_count)
        foreign_notify(connection, WIRE_FOREIGN_HIT, foreign, foreign_count);
    if (due && kvfs_client_statistics_get(client, &report) == 0) {
        memmove((uint64_t *)&report + totals, &report.busy, sizeof(report.busy));
        wire_notify(connection, WIRE_REPORT, &report, (totals + 1) * (uint32_t)sizeof(uint64_t));
    }
}
