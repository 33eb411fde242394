/* Requests: their memory, and their durations. */
#include "content/content.h"

struct request *request_get(struct kvfs_plane *plane) {
    pthread_mutex_lock(&plane->request_lock);
    struct request *request = plane->requests_free;
    if (request)
        plane->requests_free = request->next;
    plane->requests_busy++;
    pthread_mutex_unlock(&plane->request_lock);
    if (!request)
        request = malloc(sizeof(*request));
    if (request) {
        memset(request, 0, sizeof(*request));
    } else {
        pthread_mutex_lock(&plane->request_lock);
        plane->requests_busy--;
        pthread_mutex_unlock(&plane->request_lock);
    }
    return request;
}

void request_put(struct kvfs_plane *plane, struct request *request) {
    assert(request->groups_left == 0);
    assert(request->groups_held == 0); /* devices own nothing of it */
    assert(request->slot_count <= READ_SLOTS);
    for (uint32_t i = 0; i < request->slot_count; i++)
        slot_put(request->slots[i]);
    desc_put(request->desc);
    slab_put(request->slab);
    node_put(plane, request->node);
    if (request->release)
        request->release(request);
    pthread_mutex_lock(&plane->request_lock);
    request->next = plane->requests_free;
    plane->requests_free = request;
    plane->requests_busy--;
    pthread_mutex_unlock(&plane->request_lock);
}

bool requests_are_busy(struct kvfs_plane *plane) {
    pthread_mutex_lock(&plane->request_lock);
    bool busy = plane->requests_busy != 0;
    pthread_mutex_unlock(&plane->request_lock);
    return busy;
}

uint64_t latency_add(struct kvfs_plane *plane, uint32_t operation, uint64_t arrived_ns) {
    uint64_t took = now_ns() - arrived_ns;
    uint32_t bucket = took ? 64 - (uint32_t)__builtin_clzll(took) : 0;
    if (bucket > 39)
        bucket = 39;
    atomic_fetch_add_explicit(&plane->latency[operation].count, 1, memory_order_relaxed);
    atomic_fetch_add_explicit(&plane->latency[operation].total_ns, took, memory_order_relaxed);
    atomic_fetch_add_explicit(&plane->latency[operation].buckets[bucket], 1, memory_order_relaxed);
    return took;
}

void slow_add(struct kvfs_plane *plane, uint32_t opcode, uint64_t inode, uint64_t took_ns) {
    unsigned long long second = now_ns() / 1000000000, was = atomic_load(&plane->slow_window), is;
    COUNT(plane, slow_requests, 1);
    do {
        is = was >> 8 >= second ? was + 1 : second << 8 | 1;
        if ((is & 255) > SLOW_EVENTS_MAX)
            return;
    } while (!atomic_compare_exchange_weak(&plane->slow_window, &was, is));
    event_add(plane, KVFS_EVENT_SLOW, inode, (uint64_t)opcode << 56 | min_u64(took_ns / 1000, ((uint64_t)1 << 56) - 1));
}
