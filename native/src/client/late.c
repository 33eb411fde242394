/* Memory that devices still own: of reads that were given up on, until the devices have answered. */
#include "client/client.h"

static pthread_mutex_t claims_lock = PTHREAD_MUTEX_INITIALIZER;
static struct claim *claims;
static atomic_uint claim_count;

void claim_add(struct claim *claim) {
    pthread_mutex_lock(&claims_lock);
    claim->next = claims;
    claims = claim;
    atomic_fetch_add(&claim_count, 1);
    pthread_mutex_unlock(&claims_lock);
}

void claim_remove(struct claim *claim) {
    pthread_mutex_lock(&claims_lock);
    struct claim **link = &claims;
    while (*link != claim)
        link = &(*link)->next;
    *link = claim->next;
    atomic_fetch_sub(&claim_count, 1);
    pthread_mutex_unlock(&claims_lock);
}

static bool claimed(const uint8_t *data, uint64_t size) {
    bool found = false;
    if (!atomic_load(&claim_count))
        return false;
    pthread_mutex_lock(&claims_lock);
    for (struct claim *claim = claims; claim && !found; claim = claim->next)
        found = claim->data < data + size && data < claim->data + claim->size;
    pthread_mutex_unlock(&claims_lock);
    return found;
}

bool client_overlaps_zombie(struct kvfs_client *client, const void *data, uint64_t size) {
    if (claimed(data, size))
        return true;
    if (!atomic_load(&client->zombies))
        return false;
    bool owed = false;
    pthread_mutex_lock(&client->lock);
    bool found = session_overlaps(client->session, data, size, &owed);
    for (struct session *session = client->retired; session; session = session->next)
        found = session_overlaps(session, data, size, &owed) || found;
    client_prune(client);
    pthread_mutex_unlock(&client->lock);
    return found;
}

bool client_owed(struct kvfs_client *client) {
    bool owed = false;
    pthread_mutex_lock(&client->lock);
    session_overlaps(client->session, NULL, 0, &owed);
    for (struct session *session = client->retired; session; session = session->next)
        session_overlaps(session, NULL, 0, &owed);
    pthread_mutex_unlock(&client->lock);
    return owed;
}

int kvfs_busy(struct kvfs_client *client, const void *data, uint64_t size) {
    if (client->pid != getpid())
        return client_fail(-ECHILD, "%s: connected by process %d", client->path, (int)client->pid);
    return client_overlaps_zombie(client, data, size);
}

/* ---- a batch's destinations ---- */

static int by_address(const void *a, const void *b) {
    const struct kvfs_buffer *const *x = a, *const *y = b;
    return (*x)->data < (*y)->data ? -1 : (*x)->data > (*y)->data;
}

int client_check_buffers(struct kvfs_client *client, const struct kvfs_buffer *buffers, uint32_t count) {
    bool sorted = true, zombies = atomic_load(&client->zombies) || atomic_load(&claim_count);
    for (uint32_t i = 0; i < count; i++) {
        uint64_t start = (uint64_t)(uintptr_t)buffers[i].data;
        if (start + buffers[i].size < start || (!start && buffers[i].size))
            return client_fail(-EINVAL, "buffer %u: %llu bytes at 0x%llx", i, (unsigned long long)buffers[i].size, (unsigned long long)start);
        if (zombies && client_overlaps_zombie(client, buffers[i].data, buffers[i].size))
            return client_fail(-EBUSY, "buffer %u: a device that gave no answer in time may still write into it", i);
        if (i && start < (uint64_t)(uintptr_t)buffers[i - 1].data + buffers[i - 1].size)
            sorted = false;
    }
    if (sorted)
        return 0;
    const struct kvfs_buffer **order = malloc(count * sizeof(*order));
    if (!order)
        return client_fail(-ENOMEM, "no memory for a batch of %u", count);
    uint32_t some = 0;
    for (uint32_t i = 0; i < count; i++)
        if (buffers[i].size)
            order[some++] = &buffers[i];
    qsort(order, some, sizeof(*order), by_address);
    int r = 0;
    for (uint32_t i = 1; i < some && r == 0; i++)
        if ((uint8_t *)order[i - 1]->data + order[i - 1]->size > (uint8_t *)order[i]->data)
            r = client_fail(-EINVAL, "buffers %td and %td overlap", order[i - 1] - buffers, order[i] - buffers);
    free(order);
    return r;
}
