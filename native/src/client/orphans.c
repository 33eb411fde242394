/* Memory that devices still own: of reads that were given up on, until the devices have answered. */
#include "client/client.h"

#include <stdio.h>

static pthread_mutex_t orphans_lock = PTHREAD_MUTEX_INITIALIZER;
static struct orphan *orphans;
static atomic_uint orphan_count;

void orphan_add(struct orphan *orphan) {
    pthread_mutex_lock(&orphans_lock);
    orphan->next = orphans;
    orphans = orphan;
    atomic_fetch_add(&orphan_count, 1);
    pthread_mutex_unlock(&orphans_lock);
}

void orphan_remove(struct orphan *orphan) {
    pthread_mutex_lock(&orphans_lock);
    struct orphan **link = &orphans;
    while (*link && *link != orphan)
        link = &(*link)->next;
    assert(*link);
    *link = orphan->next;
    atomic_fetch_sub(&orphan_count, 1);
    pthread_mutex_unlock(&orphans_lock);
}

static bool orphan_overlaps(const uint8_t *data, uint64_t size) {
    bool found = false;
    if (!atomic_load(&orphan_count))
        return false;
    pthread_mutex_lock(&orphans_lock);
    for (struct orphan *orphan = orphans; orphan && !found; orphan = orphan->next)
        found = orphan->data < data + size && data < orphan->data + orphan->size;
    pthread_mutex_unlock(&orphans_lock);
    return found;
}

bool client_overlaps_orphan(struct kvfs_client *client, const void *data, uint64_t size) {
    if (orphan_overlaps(data, size))
        return true;
    if (!atomic_load(&client->orphans))
        return false;
    bool owed = false;
    pthread_mutex_lock(&client->lock);
    bool found = connection_overlaps(client->connection, data, size, &owed);
    for (struct connection *connection = client->retired; connection; connection = connection->next)
        found = connection_overlaps(connection, data, size, &owed) || found;
    client_prune(client);
    pthread_mutex_unlock(&client->lock);
    return found;
}

bool client_owed(struct kvfs_client *client) {
    bool owed = false;
    pthread_mutex_lock(&client->lock);
    connection_overlaps(client->connection, NULL, 0, &owed);
    for (struct connection *connection = client->retired; connection; connection = connection->next)
        connection_overlaps(connection, NULL, 0, &owed);
    pthread_mutex_unlock(&client->lock);
    return owed;
}

int kvfs_busy(struct kvfs_client *client, const void *data, uint64_t size) {
    if (client->pid != getpid())
        return client_fail(-ECHILD, "%s: connected by process %d", client->path, (int)client->pid);
    return client_overlaps_orphan(client, data, size);
}

/* ---- a batch's destinations ---- */

static int by_address(const void *a, const void *b) {
    const struct kvfs_buffer *const *x = a, *const *y = b;
    return (*x)->data<(*y)->data ? -1 : (*x)->data>(*y)->data;
}

/* A buffer as messages name it: of vectors, by the block and, if that has more, its piece. */
struct buffer_name {
    char text[48];
};
static struct buffer_name named(const struct kvfs_vector *vectors, uint32_t i) {
    struct buffer_name name;
    uint32_t block = 0;
    while (vectors && i >= vectors[block].count)
        i -= vectors[block++].count;
    if (vectors && vectors[block].count > 1)
        snprintf(name.text, sizeof(name.text), "%u, piece %u", block, i);
    else
        snprintf(name.text, sizeof(name.text), "%u", vectors ? block : i);
    return name;
}

/* Of vectors the buffers are the pieces, else vectors is NULL. */
static int check(struct kvfs_client *client, const struct kvfs_buffer *buffers, uint64_t count, const struct kvfs_vector *vectors) {
    bool sorted = true, orphans = atomic_load(&client->orphans) || atomic_load(&orphan_count);
    for (uint32_t i = 0; i < count; i++) {
        uint64_t start = (uint64_t)(uintptr_t)buffers[i].data;
        if (start + buffers[i].size < start || (!start && buffers[i].size))
            return client_fail(-EINVAL, "buffer %s: %llu bytes at 0x%llx", named(vectors, i).text, (unsigned long long)buffers[i].size,
                               (unsigned long long)start);
        if (orphans && client_overlaps_orphan(client, buffers[i].data, buffers[i].size))
            return client_fail(-EBUSY, "buffer %s: a device that gave no answer in time may still write into it", named(vectors, i).text);
        if (i && start < (uint64_t)(uintptr_t)buffers[i - 1].data + buffers[i - 1].size)
            sorted = false;
    }
    if (sorted)
        return 0;
    const struct kvfs_buffer **order = malloc(count * sizeof(*order));
    if (!order)
        return client_fail(-ENOMEM, "no memory for a batch of %llu", (unsigned long long)count);
    uint32_t some = 0;
    for (uint32_t i = 0; i < count; i++)
        if (buffers[i].size)
            order[some++] = &buffers[i];
    qsort(order, some, sizeof(*order), by_address);
    int r = 0;
    for (uint32_t i = 1; i < some && r == 0; i++)
        if ((uint8_t *)order[i - 1]->data + order[i - 1]->size > (uint8_t *)order[i]->data)
            r = client_fail(-EINVAL, "buffers %s and %s overlap", named(vectors, (uint32_t)(order[i - 1] - buffers)).text,
                            named(vectors, (uint32_t)(order[i] - buffers)).text);
    free(order);
    return r;
}

int client_check_buffers(struct kvfs_client *client, const struct kvfs_buffer *buffers, uint32_t count) {
    return check(client, buffers, count, NULL);
}

int client_check_vectors(struct kvfs_client *client, const struct kvfs_vector *vectors, uint32_t count) {
    uint64_t total = 0, at = 0;
    for (uint32_t i = 0; i < count; i++)
        total += vectors[i].count;
    if (total > UINT32_MAX)
        return client_fail(-EINVAL, "%llu pieces in one batch", (unsigned long long)total);
    struct kvfs_buffer *buffers = malloc((total + 1) * sizeof(*buffers));
    if (!buffers)
        return client_fail(-ENOMEM, "no memory for a batch of %llu pieces", (unsigned long long)total);
    for (uint32_t i = 0; i < count; at += vectors[i++].count)
        copy_bytes(buffers + at, vectors[i].pieces, vectors[i].count * sizeof(*buffers));
    int r = check(client, buffers, total, vectors);
    free(buffers);
    return r;
}
