/* Checks of the caller's buffers and stream, before a GPU reader works with them. */
#include "client/gpu/reader.h"

struct pointer_attributes {
    cuda_context context;
    unsigned type;
    int ordinal;
    cuda_pointer start;
    size_t size;
};
static int pointer_look_up(struct kvfs_gpu *gpu, cuda_pointer pointer, struct pointer_attributes *out) {
    int attributes[] = {CUDA_POINTER_CONTEXT, CUDA_POINTER_MEMORY_TYPE, CUDA_POINTER_DEVICE_ORDINAL, CUDA_POINTER_RANGE_START,
                        CUDA_POINTER_RANGE_SIZE};
    *out = (struct pointer_attributes){.ordinal = -1};
    void *data[] = {&out->context, &out->type, &out->ordinal, &out->start, &out->size};
    int error = gpu->driver->cuPointerGetAttributes(5, attributes, data, pointer);
    if (error == CUDA_ERROR_INVALID_VALUE || error == CUDA_ERROR_INVALID_CONTEXT) /* a pointer that CUDA never saw; most drivers say 0 */
        *out = (struct pointer_attributes){.ordinal = -1};
    else if (error)
        return cuda_fail(gpu->driver, gpu->device, "cuPointerGetAttributes", error);
    return 0;
}

static int pointer_check(struct kvfs_gpu *gpu, uint32_t i, uint32_t count, const struct pointer_attributes *found, uint64_t at) {
    const char *kind = found->type == CUDA_MEMORYTYPE_HOST ? "host memory" : "no memory that CUDA knows: of the host, or freed";
    if (found->type != CUDA_MEMORYTYPE_DEVICE && found->type != CUDA_MEMORYTYPE_UNIFIED)
        return client_fail(-EINVAL, "buffer %u of %u: 0x%llx is %s", i, count, (unsigned long long)at, kind);
    if (found->ordinal != gpu->device)
        return client_fail(-EINVAL, "buffer %u of %u: 0x%llx is on GPU %d; this reader is GPU %d's", i, count, (unsigned long long)at, found->ordinal,
                           gpu->device);
    return 0;
}

/* Every buffer is memory of this GPU and of one context. The primary context is current. */
int buffers_check(struct kvfs_gpu *gpu, const struct kvfs_buffer *buffers, uint32_t count, cuda_context *context) {
    uint32_t first = 0;
    *context = NULL;
    for (uint32_t i = 0; i < count; i++) {
        cuda_pointer at = (cuda_pointer)(uintptr_t)buffers[i].data;
        uint64_t size = buffers[i].size;
        struct pointer_attributes found, end;
        if (size == 0)
            continue;
        int r = pointer_look_up(gpu, at, &found);
        if (r == 0)
            r = pointer_check(gpu, i, count, &found, at);
        if (r < 0)
            return r;
        if (found.context && found.size && size > found.size - (at - found.start))
            return client_fail(-EINVAL, "buffer %u of %u: %llu bytes at 0x%llx, %llu past the end of its allocation of %llu", i, count,
                               (unsigned long long)size, (unsigned long long)at, (unsigned long long)(size - (found.size - (at - found.start))),
                               (unsigned long long)found.size);
        if (!found.context) { /* mapped memory (cuMemMap, pools) has no context, and an address range of several allocations */
            r = pointer_look_up(gpu, at + size - 1, &end);
            if (r == 0)
                r = pointer_check(gpu, i, count, &end, at + size - 1);
            if (r < 0)
                return r;
            found.context = gpu->primary;
        }
        if (*context && *context != found.context)
            return client_fail(-EINVAL, "buffer %u of %u: 0x%llx belongs to another CUDA context than buffer %u", i, count, (unsigned long long)at,
                               first);
        if (!*context)
            first = i;
        *context = found.context;
    }
    return 0;
}

/* Work that is recorded on a stream under capture belongs to a graph, and is not done now. */
int stream_check(struct kvfs_gpu *gpu, cuda_stream stream) {
    int capturing = 0, r = stream ? CUDA(gpu, cuStreamIsCapturing, stream, &capturing) : 0;
    if (r == 0 && capturing)
        return client_fail(-EINVAL, "stream 0x%llx is being captured into a graph: read outside of it", (unsigned long long)(uintptr_t)stream);
    return r;
}
