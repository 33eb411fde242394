/* Replies: to any request, and to READs and WRITEs when content is done with them. */
#include "fuse/fuse.h"

#include <unistd.h>

void reply_data(struct server *server, uint64_t unique, const void *data, uint32_t size) {
    struct iovec iov = {(void *)(uintptr_t)data, size};
    server->transport->ops->reply(server, unique, 0, 0, &iov, size ? 1 : 0);
}

void reply_error(struct server *server, uint64_t unique, int error) { server->transport->ops->reply(server, unique, error, 0, NULL, 0); }

/* size bytes that were read: from request->skip on out of its slots, or already in a guest's memory. */
static void read_reply(struct request *request, uint32_t size) {
    struct kvfs_plane *plane = request->io->plane;
    struct iovec iovs[READ_SLOTS];
    uint32_t count = 0, placed = request->direct ? (uint32_t)min_u64(size, request->placed_max) : 0, left = size - placed;
    uint64_t skip = request->skip;
    for (uint32_t i = 0; i < request->slot_count && left; i++) {
        struct slot *slot = request->slots[i];
        uint64_t length = min_u64(left, slot->size - skip);
        iovs[count++] = (struct iovec){slot->data + skip, length};
        left -= (uint32_t)length;
        skip = 0;
    }
    assert(left == 0);
    COUNT(plane, reads, 1); /* before the reader can look at it */
    COUNT(plane, read_bytes, size);
    request->server->transport->ops->reply(request->server, request->unique, 0, placed, iovs, count);
    slow_look(plane, FUSE_READ, request->node->inode, latency_add(plane, LATENCY_READ, request->arrived_ns));
}

void reply_to_read(struct request *request, int64_t result) {
    assert(!request->write);
    assert(result <= request->size);
    if (result > 0 && request->unread) {
        struct handle handle = {.node = request->node, .transport = request->transport, .unread = true};
        handle_reads(request->io->plane, &handle, request->fh);
    }
    if (result >= 0) {
        read_reply(request, (uint32_t)result);
        return;
    }
    reply_error(request->server, request->unique, (int)result);
    slow_look(request->io->plane, FUSE_READ, request->node->inode, now_ns() - request->arrived_ns);
}

static void written_without_handle(struct kvfs_plane *plane, struct node *node) {
    struct shard *shard = shard_of(plane, node->inode);
    pthread_mutex_lock(&shard->lock);
    bool nobody = node->writers == 0;
    pthread_mutex_unlock(&shard->lock);
    if (nobody)
        node_released(plane, node, true);
}

uint64_t write_count(struct kvfs_plane *plane, uint32_t size, uint64_t arrived_ns) {
    COUNT(plane, writes, 1);
    COUNT(plane, write_bytes, size);
    return latency_add(plane, LATENCY_WRITE, arrived_ns);
}

void write_over(struct request *request) {
    struct kvfs_plane *plane = request->io->plane;
    if (request->transport->guest) {
        if (atomic_load(&request->node->host_cached))
            notify_inode(plane, request->node->inode);
        written_without_handle(plane, request->node); /* the guest may have released the handle meanwhile, and nothing else would seal this */
    }
}

void reply_to_write(struct request *request, int64_t result) {
    assert(request->write);
    assert(result <= 0);
    if (result < 0) {
        reply_error(request->server, request->unique, (int)result);
        slow_look(request->io->plane, FUSE_WRITE, request->node->inode, now_ns() - request->arrived_ns);
    } else {
        struct fuse_write_out out = {.size = request->size};
        uint64_t took = write_count(request->io->plane, request->size, request->arrived_ns);
        slow_look(request->io->plane, FUSE_WRITE, request->node->inode, took);
        reply_data(request->server, request->unique, &out, sizeof(out));
    }
    write_over(request);
}
