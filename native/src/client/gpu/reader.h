/* A GPU reader: its ring of pinned slots, and the copies from there into GPU memory.
 *
 * A slot is free; being read into; ready (verified, to be copied); being copied; or stuck, with a device that gave no answer. Copies go to one
 * stream of our own and end in its order, so a queue of events says which slots are free again. A fence in that queue marks where the stream waits
 * for the caller's stream. A long wait there is the caller's work, and not a copy that hangs.
 */
#ifndef KVFS_GPU_READER_H
#define KVFS_GPU_READER_H

#include "client/client.h"
#include "client/gpu/direct.h"

#define RINGS_MAX 4 /* where devices hold on to slots, there is a second ring, and so on */
#define PAUSE_NS 20000

struct gpu_block; /* client/gpu/reader.c */
enum slot_state { SLOT_FREE, SLOT_READING, SLOT_READY, SLOT_COPYING, SLOT_STUCK };
struct gpu_slot {
    uint8_t *memory;
    cuda_pointer destination;
    uint64_t size;
    enum slot_state state;
    struct gpu_block *block; /* READING */
};
struct gpu_copy {
    cuda_event event;
    uint32_t first, count;
}; /* slots; count 0: a fence */
struct kvfs_gpu {
    pid_t pid;
    struct kvfs_client *client;
    const struct gpu_driver *driver;
    pthread_mutex_t lock;          /* a call */
    int device, handle;            /* the GPU's number, and CUDA's handle for it */
    cuda_context primary, context; /* the slots are registered in one; stream and events belong to the other, that of the buffers */
    cuda_stream stream;
    cuda_event before, after; /* the caller's stream to ours and back */
    struct gpu_slot *slots;   /* ring_slots for each ring there may be */
    uint32_t slot_count, ring_slots, ring_count, cursor;
    uint64_t slot_size, ring_size;
    uint8_t *rings[RINGS_MAX];
    uint8_t *put_memory; /* two shares of a put; NULL until the first */
    uint64_t put_size;
    struct gpu_copy *copies; /* a ring, oldest at copy_first; two a slot: a fence has a copy behind it */
    uint32_t copy_first, copy_count, copy_capacity;
    uint64_t progress_ns; /* since when the oldest copy is the oldest */
    int broken;           /* CUDA cannot say any more which slots are in use */
    char why[200];
    struct kvfs_gpu_statistics count;
    struct direct *direct; /* NULL: staged */
    struct {
        uint64_t blocks, bytes, fallbacks, mismatches;
    } direct_count;
};

/* ---- client/gpu/buffers.c ---- */

/* Every buffer is memory of this GPU and of one context. The primary context is current. */
int buffers_check(struct kvfs_gpu *gpu, const struct kvfs_buffer *buffers, uint32_t count, cuda_context *context);
/* Work that is recorded on a stream under capture belongs to a graph, and is not done now: -EINVAL. */
int stream_check(struct kvfs_gpu *gpu, cuda_stream stream);

/* ---- client/gpu/slots.c: the caller holds gpu->lock ---- */

/* An event behind what the stream has: when it comes, `count` slots from `first` on are free. count 0: a fence. */
int copy_push(struct kvfs_gpu *gpu, uint32_t first, uint32_t count);
/* Free the slots whose copies have ended. -EIO, -ETIMEDOUT: the GPU hangs. */
int copies_reap(struct kvfs_gpu *gpu);
/* Wait for every copy. An error leaves the GPU broken. */
int copies_wait(struct kvfs_gpu *gpu);
/* Stream and events in a context, which becomes current. */
int context_enter(struct kvfs_gpu *gpu, cuda_context context);
/* Memory of whole huge pages that the GPU's copies reach, in any context; huge: whether it lies in reserved ones. */
int pinned_new(struct kvfs_gpu *gpu, uint64_t size, uint8_t **out, bool *huge);
/* Memory that a device may still use stays mapped. memory may be NULL. The primary context is current. */
void pinned_free(struct kvfs_gpu *gpu, uint8_t *memory, uint64_t size);
/* Let our stream wait for all that is on the caller's. */
int stream_fence(struct kvfs_gpu *gpu, cuda_stream stream);
/* Slots: a mapping, registered once. */
int ring_add(struct kvfs_gpu *gpu);
/* Take slots back that no device will write into any more; how many are still out of use. */
uint32_t slots_recover(struct kvfs_gpu *gpu);
/* In turn: so neighbours in a block are neighbours in the ring, and are copied together. NULL: none is free. */
struct gpu_slot *slot_find(struct kvfs_gpu *gpu);
/* The first of count free slots side by side; NULL. */
struct gpu_slot *slots_side_by_side(struct kvfs_gpu *gpu, uint32_t count);
/* Slots i - 1 and i, in memory. */
bool slots_neighbour(const struct kvfs_gpu *gpu, uint32_t i);
void pause_ns(uint64_t ns);

#endif
