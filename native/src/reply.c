/* Requests and replies: the parts that server threads, workers and the mux share. */
#include "internal.h"

#include <unistd.h>

struct request *request_get(struct kvfs_plane *plane) {
    pthread_mutex_lock(&plane->request_lock);
    struct request *request = plane->requests_free;
    if (request)
        plane->requests_free = request->next;
    pthread_mutex_unlock(&plane->request_lock);
    if (!request)
        request = malloc(sizeof(*request));
    if (request)
        memset(request, 0, sizeof(*request));
    return request;
}

void request_put(struct kvfs_plane *plane, struct request *request) {
    for (uint32_t i = 0; i < request->slot_count; i++)
        slot_put(request->slots[i]);
    desc_put(request->desc);
    node_put(plane, request->node);
    pthread_mutex_lock(&plane->request_lock);
    request->next = plane->requests_free;
    plane->requests_free = request;
    pthread_mutex_unlock(&plane->request_lock);
}

void latency_add(struct kvfs_plane *plane, uint32_t operation, uint64_t arrived_ns) {
    uint64_t took = now_ns() - arrived_ns;
    uint32_t bucket = took ? 64 - (uint32_t)__builtin_clzll(took) : 0;
    if (bucket > 39)
        bucket = 39;
    atomic_fetch_add_explicit(&plane->latency[operation].count, 1, memory_order_relaxed);
    atomic_fetch_add_explicit(&plane->latency[operation].total_ns, took, memory_order_relaxed);
    atomic_fetch_add_explicit(&plane->latency[operation].buckets[bucket], 1, memory_order_relaxed);
}

/* error: 0 or -errno. A failed write means that the request was interrupted or the transport is gone: nobody waits. */
void reply_iov(struct kvfs_plane *plane, struct transport *transport, int fd, uint64_t unique, int error, struct iovec *iovs, uint32_t count) {
    (void)plane;
    struct iovec out[READ_SLOTS + 2];
    struct fuse_out_header head = {.len = sizeof(head), .error = error, .unique = unique};
    out[0] = (struct iovec){&head, sizeof(head)};
    for (uint32_t i = 0; i < count && error == 0; i++) {
        out[i + 1] = iovs[i];
        head.len += (uint32_t)iovs[i].iov_len;
    }
    if (atomic_load_explicit(&transport->ended, memory_order_relaxed))
        return;
    ssize_t n = writev(fd, out, error == 0 ? (int)count + 1 : 1);
    (void)n;
}

void reply_data(struct server *server, uint64_t unique, const void *data, uint32_t size) {
    struct iovec iov = {(void *)(uintptr_t)data, size};
    reply_iov(server->plane, server->transport, server->fd, unique, 0, &iov, size ? 1 : 0);
}

void reply_error(struct server *server, uint64_t unique, int error) {
    reply_iov(server->plane, server->transport, server->fd, unique, error, NULL, 0);
}

/* size bytes from request->skip on, out of its slots. */
void request_reply_read(struct kvfs_plane *plane, struct request *request, uint32_t size) {
    struct iovec iovs[READ_SLOTS];
    uint32_t count = 0, left = size;
    uint64_t skip = request->skip;
    for (uint32_t i = 0; i < request->slot_count && left; i++) {
        struct slot *slot = request->slots[i];
        uint64_t length = min_u64(left, slot->size - skip);
        iovs[count++] = (struct iovec){slot->data + skip, length};
        left -= (uint32_t)length;
        skip = 0;
    }
    assert(left == 0);
    reply_iov(plane, request->transport, request->server->fd, request->unique, 0, iovs, count);
    COUNT(plane, reads, 1);
    COUNT(plane, read_bytes, size);
    latency_add(plane, LATENCY_READ, request->arrived_ns);
}
