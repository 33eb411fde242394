/* The slow half of READ and WRITE: what must wait for a device, on a worker. */
#include "internal.h"

/* The slow half of READ and WRITE, on a worker that may wait for devices. */
void worker_request(struct kvfs_plane *plane, struct ring *ring, struct request *request) {
    struct node *node = request->node;
    int r = 0;
    if (request->opcode == FUSE_WRITE) {
        /* What it needs may be sealed or spilled again before it is written: it tries until its deadline, and never takes that for an end. */
        const uint64_t until = request->arrived_ns + plane->config.request_timeout_ms * 1000000ull;
        for (;;) {
            if (slab_worker_write(plane, ring, request))
                return;
            pthread_mutex_lock(&node->lock);
            bool slab = node->file && node->file->slab; /* by now */
            r = slab ? 0 : node->file ? file_write(plane, node, request) : -ENOENT;
            pthread_mutex_unlock(&node->lock);
            if (r == -EAGAIN)
                return;
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
        reply_write(plane, request, r == -EBADMSG || r == -ETIMEDOUT ? -EIO : r);
        return;
    }
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
        request->slots[request->slot_count++] = slot;
        r = file_read_slow(plane, ring, node, request->offset + done, (uint32_t)min_u64(CHUNK_SIZE, size - done), slot->data);
    }
    if (!staged || r == -ESTALE) { /* sealed meanwhile: read the block, blocking */
        while (request->slot_count)
            slot_put(request->slots[--request->slot_count]);
        r = file_reopen(plane, ring, node);
        if (r == 0 && request->retries++ < 8) {
            atomic_fetch_add(&node->refs, 1); /* the request's own ends with it */
            worker_request(plane, ring, request);
            node_released(plane, node, true);
            node_put(plane, node);
            return;
        }
    }
    if (r < 0) {
        COUNT(plane, read_errors, 1);
        request_reply_failed(plane, request, -EIO);
    } else {
        request_reply_read(plane, request, (uint32_t)size);
    }
    request_put(plane, request);
}

static void run_request(struct kvfs_plane *plane, struct ring *ring, struct job *job) {
    struct request *request = job->request;
    free(job);
    ring->until_ns = request->opcode == FUSE_READ ? request->until_ns : 0;
    worker_request(plane, ring, request);
    ring->until_ns = 0;
}

int worker_request_add(struct kvfs_plane *plane, struct request *request) {
    struct job *job = calloc(1, sizeof(*job));
    if (!job)
        return -ENOMEM;
    job->run = run_request;
    job->request = request;
    pool_add(&plane->slow, job);
    return 0;
}
