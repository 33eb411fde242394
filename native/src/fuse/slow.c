/* The slow half of READ and WRITE, on a worker: requests that must wait for a device. */
#include "fuse/fuse.h"

static void slow_write(struct kvfs_plane *plane, struct ring *ring, struct request *request) {
    struct node *node = request->node;
    struct server *leader = &request->transport->servers[0];
    int r;
    /* The chunks that a request needs may be sealed or spilled again before the write. The request then tries again until its deadline. */
    const uint64_t until = request->arrived_ns + plane->config.request_timeout_ms * 1000000ull;
    for (;;) {
        if (slab_worker_write(plane, ring, request))
            return;
        pthread_mutex_lock(&node->lock);
        bool slab = node->file && node->file->slab; /* by now */
        r = slab ? 0 : node->file ? file_write(plane, node, request) : -ENOENT;
        pthread_mutex_unlock(&node->lock);
        if (r == -EAGAIN) { /* parked, and perhaps gone */
            server_wake(leader);
            return;
        }
        if (r == -ENOENT) {
            r = file_reopen(plane, ring, node);
        } else if (slab) {
            continue;
        } else if (r == -EINPROGRESS) {
            r = 0;
            for (uint64_t i = request->offset / CHUNK_SIZE; i <= (request->offset + request->size - 1) / CHUNK_SIZE && r == 0; i++)
                r = file_load_chunk(plane, ring, node, (uint32_t)i, false);
        } else {
            break;
        }
        if (r == 0 && now_ns() > until)
            r = -ETIMEDOUT;
        if (r < 0)
            break;
    }
    request->done(request, r == -EBADMSG || r == -ETIMEDOUT ? -EIO : r);
    request_put(plane, request);
}

static void slow_read(struct kvfs_plane *plane, struct ring *ring, struct request *request) {
    struct node *node = request->node;
    int r = 0;
    uint64_t size = 0;
    pthread_mutex_lock(&node->lock);
    bool staged = node->file != NULL;
    if (staged && request->offset < node->file->size)
        size = min_u64(request->size, node->file->size - request->offset);
    pthread_mutex_unlock(&node->lock);
    for (uint64_t done = 0; staged && done < size && r == 0; done += CHUNK_SIZE) {
        struct slot *slot = slot_get_extra(&plane->reading);
        if (!slot) {
            r = -ENOMEM;
            break;
        }
        assert(request->slot_count < READ_SLOTS);
        request->slots[request->slot_count++] = slot;
        r = file_read_slow(plane, ring, node, request->offset + done, (uint32_t)min_u64(CHUNK_SIZE, size - done), slot->data);
    }
    if (!staged || r == -ESTALE) { /* sealed meanwhile: read the block, blocking */
        while (request->slot_count)
            slot_put(request->slots[--request->slot_count]);
        r = file_reopen(plane, ring, node);
        if (r == 0 && request->retries++ < 8) {
            atomic_fetch_add(&node->refs, 1); /* the request's own reference ends with it */
            slow_read(plane, ring, request);
            node_released(plane, node, true);
            node_put(plane, node);
            return;
        }
    }
    if (r < 0) {
        COUNT(plane, read_errors, 1);
        request->done(request, -EIO);
    } else {
        request->done(request, (int64_t)size);
    }
    request_put(plane, request);
}

static_assert(offsetof(struct request, job) == 0, "a request begins with its job");

static void run_request(struct kvfs_plane *plane, struct ring *ring, struct job *base) {
    struct request *request = (struct request *)base;
    ring->until_ns = request->write ? 0 : request->until_ns;
    (request->write ? slow_write : slow_read)(plane, ring, request);
    ring->until_ns = 0;
}

void request_slow(struct request *request) {
    assert(request->groups_held == 0);
    request->job.run = run_request;
    pool_add(&request->io->plane->fuse->slow, &request->job);
}
