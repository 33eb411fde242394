/* Blocks from GPU memory: a share of them is copied into pinned memory, and put from there while the next share is copied. */
#include "client/gpu/reader.h"
#include "client/put.h"

#include <stdio.h>

#define SHARE_BYTES ((uint64_t)32 << 20)
#define HUGE_PAGE ((uint64_t)2 << 20)

struct share {
    uint32_t first, count;
    const uint8_t *keys, *parents; /* of its first block */
};
struct gpu_put {
    struct kvfs_gpu *gpu;
    const struct kvfs_keys *keys;
    const struct kvfs_vector *from;
    struct kvfs_put_options options;
    int64_t *results;
    cuda_stream stream; /* the caller's */
    struct kvfs_buffer *staged;
    struct kvfs_vector *vectors; /* a piece each, of `staged` */
    struct share next;
    uint32_t stored;
};

static uint64_t vector_size(const struct kvfs_vector *vector) {
    uint64_t size = 0;
    for (uint32_t i = 0; i < vector->count; i++)
        size += vector->pieces[i].size;
    return size;
}

/* Room for two shares that hold the largest block. */
static int memory_take(struct gpu_put *call) {
    struct kvfs_gpu *gpu = call->gpu;
    uint64_t share = SHARE_BYTES;
    for (uint32_t i = 0; i < call->keys->count; i++) {
        uint64_t size = vector_size(&call->from[i]);
        share = round_up(size > share ? size : share, HUGE_PAGE);
    }
    if (gpu->put_size >= 2 * share)
        return 0;
    int r = CUDA(gpu, cuCtxPushCurrent, gpu->primary);
    if (r < 0)
        return r;
    pinned_free(gpu, gpu->put_memory, gpu->put_size);
    gpu->driver->cuCtxPopCurrent(&(cuda_context){NULL});
    gpu->put_memory = NULL;
    gpu->put_size = 0;
    bool huge;
    r = pinned_new(gpu, 2 * share, &gpu->put_memory, &huge);
    gpu->put_size = r == 0 ? 2 * share : 0;
    return r;
}

/* Start the copies of the blocks that fit into a half of the memory. They begin with pages there. */
static int share_copy(struct gpu_put *call, uint32_t half, struct share *share) {
    struct kvfs_gpu *gpu = call->gpu;
    const struct kvfs_keys *keys = call->keys, *parents = call->options.parents;
    uint64_t room = gpu->put_size / 2, at = 0;
    uint8_t *memory = gpu->put_memory + half * room;
    int r = 0;
    *share = call->next;
    for (uint32_t i = share->first; i < keys->count && r == 0; i++) {
        uint64_t size = vector_size(&call->from[i]);
        if (size > room - at)
            break;
        call->staged[i] = (struct kvfs_buffer){memory + at, size};
        call->vectors[i] = (struct kvfs_vector){.pieces = &call->staged[i], .count = 1};
        for (uint32_t k = 0; k < call->from[i].count && r == 0; k++) {
            const struct kvfs_buffer *piece = &call->from[i].pieces[k];
            if (piece->size)
                r = CUDA(gpu, cuMemcpyDtoHAsync, memory + at, (cuda_pointer)(uintptr_t)piece->data, piece->size, gpu->stream);
            at += piece->size;
        }
        at = round_up(at, PAGE);
        share->count++;
        call->next.first++;
        call->next.keys += keys->sizes[i];
        if (parents)
            call->next.parents += parents->sizes[i];
    }
    return r;
}

static int share_put(struct gpu_put *call, const struct share *share) {
    const struct kvfs_keys *of = call->options.parents;
    struct kvfs_keys keys = {share->keys, call->keys->sizes + share->first, share->count, call->keys->kind};
    struct kvfs_keys parents = of ? (struct kvfs_keys){share->parents, of->sizes + share->first, share->count, of->kind} : (struct kvfs_keys){0};
    struct kvfs_put_options options = {sizeof(options), call->options.flags, of ? &parents : NULL};
    int r = kvfs_put_vectors(call->gpu->client, &keys, call->vectors + share->first, &options, call->results + share->first);
    call->stored += r > 0 ? (uint32_t)r : 0;
    return r < 0 ? r : 0;
}

static int shares_put(struct gpu_put *call) {
    struct share now, next;
    int r = stream_fence(call->gpu, call->stream);
    if (r == 0)
        r = share_copy(call, 0, &now);
    for (uint32_t half = 1; r == 0 && now.count; half ^= 1) {
        r = copies_wait(call->gpu);
        if (r == 0)
            r = share_copy(call, half, &next);
        if (r == 0)
            r = share_put(call, &now);
        now = next;
    }
    if (r == 0)
        return 0;
    char why[sizeof(call->gpu->why)]; /* the first message is the one that says what happened */
    snprintf(why, sizeof(why), "%s", kvfs_error());
    if (!call->gpu->broken && copies_wait(call->gpu) < 0)
        snprintf(call->gpu->why, sizeof(call->gpu->why), "%s", why);
    return client_fail(r, "%s", why);
}

/* All pieces of all blocks, as buffers_check() takes them; NULL: no memory. */
static struct kvfs_buffer *pieces_of(const struct kvfs_keys *keys, const struct kvfs_vector *vectors, uint32_t *count) {
    uint64_t all = 0;
    for (uint32_t i = 0; i < keys->count; i++)
        all += vectors[i].count;
    struct kvfs_buffer *pieces = all < UINT32_MAX ? malloc((all + 1) * sizeof(*pieces)) : NULL;
    *count = 0;
    for (uint32_t i = 0; pieces && i < keys->count; i++)
        for (uint32_t k = 0; k < vectors[i].count; k++)
            pieces[(*count)++] = vectors[i].pieces[k];
    return pieces;
}

/* The contexts are ours, and the memory for the call is there. */
static int gpu_put(struct gpu_put *call, const struct kvfs_buffer *pieces, uint32_t piece_count) {
    struct kvfs_gpu *gpu = call->gpu;
    cuda_context context = NULL;
    int r = CUDA(gpu, cuCtxPushCurrent, gpu->primary);
    if (r < 0)
        return r;
    r = buffers_check(gpu, pieces, piece_count, &context);
    if (r == 0 && (r = context_enter(gpu, context ? context : gpu->primary)) == 0) {
        r = stream_check(gpu, call->stream);
        if (r == 0)
            r = memory_take(call);
        if (r == 0)
            r = shares_put(call);
        gpu->driver->cuCtxPopCurrent(&(cuda_context){NULL});
    }
    gpu->driver->cuCtxPopCurrent(&(cuda_context){NULL});
    return r;
}

int kvfs_gpu_put(struct kvfs_gpu *gpu, const struct kvfs_keys *keys, const struct kvfs_vector *device_vectors, const struct kvfs_put_options *options,
                 uint64_t stream, int64_t *results) {
    struct gpu_put call = {.gpu = gpu, .keys = keys, .from = device_vectors, .results = results, .stream = (cuda_stream)(uintptr_t)stream};
    uint32_t piece_count = 0;
    for (uint32_t i = 0; i < keys->count; i++)
        results[i] = -ECANCELED;
    if (gpu->pid != getpid())
        return client_fail(-ECHILD, "this GPU reader was opened by process %d", (int)gpu->pid);
    int r = put_options_take(options, keys, &call.options);
    if (r == 0)
        r = put_keys_check(keys);
    if (r < 0 || keys->count == 0)
        return r;
    struct kvfs_buffer *pieces = pieces_of(keys, device_vectors, &piece_count);
    call.staged = calloc(keys->count, sizeof(*call.staged));
    call.vectors = calloc(keys->count, sizeof(*call.vectors));
    call.next = (struct share){.keys = keys->data, .parents = call.options.parents ? call.options.parents->data : NULL};
    pthread_mutex_lock(&gpu->lock);
    if (!pieces || !call.staged || !call.vectors)
        r = client_fail(-ENOMEM, "no memory for a batch of %u", keys->count);
    else if (gpu->broken)
        r = client_fail(gpu->broken, "GPU %d is out of use since: %s", gpu->device, gpu->why);
    else
        r = gpu_put(&call, pieces, piece_count);
    pthread_mutex_unlock(&gpu->lock);
    free(pieces);
    free(call.staged);
    free(call.vectors);
    return r < 0 ? r : (int)call.stored;
}
