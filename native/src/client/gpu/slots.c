/* A GPU reader's ring of pinned slots and queue of copies; opening and closing it. */
#include "client/gpu/reader.h"

#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>

#define HUGE_PAGE ((uint64_t)2 << 20)

static int gpu_break(struct kvfs_gpu *gpu, int error) {
    gpu->broken = error;
    snprintf(gpu->why, sizeof(gpu->why), "%s", kvfs_error());
    return error;
}

/* ---- the queue of copies ---- */

int copy_push(struct kvfs_gpu *gpu, uint32_t first, uint32_t count) {
    assert(gpu->copy_count < gpu->copy_capacity);
    struct gpu_copy *copy = &gpu->copies[(gpu->copy_first + gpu->copy_count) % gpu->copy_capacity];
    int r = CUDA(gpu, cuEventRecord, copy->event, gpu->stream);
    if (r < 0)
        return r;
    copy->first = first;
    copy->count = count;
    if (gpu->copy_count++ == 0)
        gpu->progress_ns = now_ns();
    return 0;
}

int copies_reap(struct kvfs_gpu *gpu) {
    while (gpu->copy_count) {
        struct gpu_copy *copy = &gpu->copies[gpu->copy_first];
        int error = gpu->driver->cuEventQuery(copy->event);
        if (error == CUDA_ERROR_NOT_READY) {
            uint64_t limit_ns = gpu->client->options.timeout_ms * 1000000ull * STALL_TIMEOUTS;
            if (copy->count && now_ns() - gpu->progress_ns > limit_ns)
                return client_fail(-ETIMEDOUT, "GPU %d: a copy of %u slots has not ended in %u ms", gpu->device, copy->count,
                                   gpu->client->options.timeout_ms * STALL_TIMEOUTS);
            return 0;
        }
        if (error)
            return cuda_fail(gpu->driver, gpu->device, "cuEventQuery", error);
        for (uint32_t i = 0; i < copy->count; i++)
            gpu->slots[copy->first + i].state = SLOT_FREE;
        gpu->copy_first = (gpu->copy_first + 1) % gpu->copy_capacity;
        gpu->copy_count--;
        gpu->progress_ns = now_ns();
    }
    return 0;
}

int stream_fence(struct kvfs_gpu *gpu, cuda_stream stream) {
    int r = CUDA(gpu, cuEventRecord, gpu->before, stream);
    if (r == 0)
        r = CUDA(gpu, cuStreamWaitEvent, gpu->stream, gpu->before, 0);
    return r == 0 ? copy_push(gpu, 0, 0) : r;
}

void pause_ns(uint64_t ns) {
    struct timespec ts = {.tv_nsec = (long)ns};
    nanosleep(&ts, NULL);
}

int copies_wait(struct kvfs_gpu *gpu) {
    uint64_t limit_ns = gpu->client->options.timeout_ms * 1000000ull * STALL_TIMEOUTS, last_ns = now_ns();
    for (;;) {
        int error = gpu->stream ? gpu->driver->cuStreamQuery(gpu->stream) : CUDA_SUCCESS;
        int r = error && error != CUDA_ERROR_NOT_READY ? cuda_fail(gpu->driver, gpu->device, "cuStreamQuery", error) : copies_reap(gpu);
        if (gpu->copy_count) /* those have a limit */
            last_ns = now_ns();
        if (r == 0 && error && now_ns() - last_ns > limit_ns)
            r = client_fail(-ETIMEDOUT, "GPU %d: its stream has not ended in %llu ms", gpu->device, (unsigned long long)(limit_ns / 1000000));
        if (r < 0)
            return gpu_break(gpu, r);
        if (error == CUDA_SUCCESS)
            break;
        pause_ns(PAUSE_NS);
    }
    gpu->copy_count = 0;
    for (uint32_t i = 0; i < gpu->slot_count; i++)
        if (gpu->slots[i].state == SLOT_COPYING)
            gpu->slots[i].state = SLOT_FREE;
    return 0;
}

/* ---- the context of the buffers ---- */

/* Its context is current. */
static void context_drop(struct kvfs_gpu *gpu) {
    const struct gpu_driver *driver = gpu->driver;
    for (uint32_t i = 0; i < gpu->copy_capacity; i++) {
        if (gpu->copies[i].event)
            driver->cuEventDestroy(gpu->copies[i].event);
        gpu->copies[i].event = NULL;
    }
    if (gpu->before)
        driver->cuEventDestroy(gpu->before);
    if (gpu->after)
        driver->cuEventDestroy(gpu->after);
    if (gpu->stream)
        driver->cuStreamDestroy(gpu->stream);
    if (gpu->direct)
        direct_leave(gpu->direct);
    gpu->before = gpu->after = NULL;
    gpu->stream = NULL;
    gpu->context = NULL;
}

int context_enter(struct kvfs_gpu *gpu, cuda_context context) {
    int r = 0;
    if (gpu->context && gpu->context != context) {
        r = CUDA(gpu, cuCtxPushCurrent, gpu->context);
        if (r < 0)
            return r;
        r = copies_wait(gpu);
        if (r == 0)
            context_drop(gpu);
        gpu->driver->cuCtxPopCurrent(&(cuda_context){NULL});
        if (r < 0)
            return r;
    }
    r = CUDA(gpu, cuCtxPushCurrent, context);
    if (r < 0 || gpu->context)
        return r;
    gpu->context = context;
    r = CUDA(gpu, cuStreamCreate, &gpu->stream, CUDA_STREAM_NON_BLOCKING);
    if (r == 0)
        r = CUDA(gpu, cuEventCreate, &gpu->before, CUDA_EVENT_DISABLE_TIMING);
    if (r == 0)
        r = CUDA(gpu, cuEventCreate, &gpu->after, CUDA_EVENT_DISABLE_TIMING);
    for (uint32_t i = 0; i < gpu->copy_capacity && r == 0; i++)
        r = CUDA(gpu, cuEventCreate, &gpu->copies[i].event, CUDA_EVENT_DISABLE_TIMING);
    if (r == 0 && gpu->direct)
        r = direct_enter(gpu->direct, context);
    if (r < 0) {
        context_drop(gpu);
        gpu->driver->cuCtxPopCurrent(&(cuda_context){NULL});
    }
    return r;
}

/* ---- slots ---- */

/* size: whole huge pages. */
static uint8_t *pinned_map(uint64_t size, bool *huge) {
    uint8_t *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_HUGETLB, -1, 0);
    *huge = memory != MAP_FAILED;
    if (memory == MAP_FAILED) {
        uint8_t *wide = mmap(NULL, size + HUGE_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (wide == MAP_FAILED)
            return NULL;
        uint64_t skip = round_up((uintptr_t)wide, HUGE_PAGE) - (uintptr_t)wide;
        if (skip)
            munmap(wide, skip);
        munmap(wide + skip + size, HUGE_PAGE - skip);
        memory = wide + skip;
        madvise(memory, size, MADV_HUGEPAGE);
    }
    madvise(memory, size, MADV_DONTFORK); /* a child that writes would move our pages away from under the DMA */
    return memory;
}

int pinned_new(struct kvfs_gpu *gpu, uint64_t size, uint8_t **out, bool *huge) {
    uint8_t *memory = pinned_map(size, huge);
    if (!memory)
        return client_fail(-ENOMEM, "no memory for %llu bytes that GPU %d can reach", (unsigned long long)size, gpu->device);
    int r = CUDA(gpu, cuCtxPushCurrent, gpu->primary);
    if (r == 0) {
        r = CUDA(gpu, cuMemHostRegister, memory, size, CUDA_MEMHOSTREGISTER_PORTABLE);
        gpu->driver->cuCtxPopCurrent(&(cuda_context){NULL});
    }
    if (r < 0)
        munmap(memory, size);
    else
        *out = memory;
    return r;
}

void pinned_free(struct kvfs_gpu *gpu, uint8_t *memory, uint64_t size) {
    if (memory && gpu->driver->cuMemHostUnregister(memory) == CUDA_SUCCESS && !client_overlaps_orphan(gpu->client, memory, size))
        munmap(memory, size);
}

int ring_add(struct kvfs_gpu *gpu) {
    uint8_t *memory = NULL;
    bool huge = false;
    int r = pinned_new(gpu, gpu->ring_size, &memory, &huge);
    gpu->count.slots_huge = huge;
    if (r < 0)
        return r;
    gpu->rings[gpu->ring_count++] = memory;
    for (uint32_t i = 0; i < gpu->ring_slots; i++)
        gpu->slots[gpu->slot_count++].memory = memory + i * gpu->slot_size;
    return 0;
}

uint32_t slots_recover(struct kvfs_gpu *gpu) {
    uint32_t stuck = 0;
    for (uint32_t i = 0; i < gpu->slot_count; i++) {
        struct gpu_slot *slot = &gpu->slots[i];
        if (slot->state == SLOT_STUCK && !client_overlaps_orphan(gpu->client, slot->memory, gpu->slot_size))
            slot->state = SLOT_FREE;
        stuck += slot->state == SLOT_STUCK;
    }
    return stuck;
}

struct gpu_slot *slot_find(struct kvfs_gpu *gpu) {
    for (uint32_t i = 0; i < gpu->slot_count; i++) {
        struct gpu_slot *slot = &gpu->slots[(gpu->cursor + i) % gpu->slot_count];
        if (slot->state == SLOT_FREE)
            return slot;
    }
    return NULL;
}

bool slots_neighbour(const struct kvfs_gpu *gpu, uint32_t i) { return i && gpu->slots[i].memory == gpu->slots[i - 1].memory + gpu->slot_size; }

struct gpu_slot *slots_side_by_side(struct kvfs_gpu *gpu, uint32_t count) {
    uint32_t run = 0;
    for (uint32_t i = 0; i < gpu->slot_count; i++) {
        run = gpu->slots[i].state != SLOT_FREE ? 0 : slots_neighbour(gpu, i) ? run + 1 : 1;
        if (run == count)
            return &gpu->slots[i + 1 - count];
    }
    return NULL;
}

/* ---- open, close ---- */

static void gpu_free(struct kvfs_gpu *gpu) {
    pthread_mutex_destroy(&gpu->lock);
    free(gpu->slots);
    free(gpu->copies);
    free(gpu);
}

static int device_open(struct kvfs_gpu *gpu, const struct kvfs_gpu_options *options) {
    uint32_t device = options->device;
    int count = 0;
    int r = CUDA(gpu, cuDeviceGetCount, &count);
    if (r == 0 && device >= (uint32_t)count)
        return client_fail(-ENODEV, "no GPU %u: CUDA sees %d", device, count);
    gpu->device = (int)device;
    if (r == 0)
        r = CUDA(gpu, cuDeviceGet, &gpu->handle, gpu->device);
    if (r == 0)
        r = CUDA(gpu, cuDevicePrimaryCtxRetain, &gpu->primary, gpu->handle);
    if (r < 0)
        return r;
    if (options->mode == KVFS_GPU_GDS && (r = CUDA(gpu, cuCtxPushCurrent, gpu->primary)) == 0) {
        r = direct_open(gpu->client, gpu->driver, gpu->device, gpu->handle, gpu->primary, options, &gpu->direct);
        gpu->driver->cuCtxPopCurrent(&(cuda_context){NULL});
    }
    if (r == 0 && (r = ring_add(gpu)) < 0 && gpu->direct && gpu->driver->cuCtxPushCurrent(gpu->primary) == CUDA_SUCCESS) {
        direct_close(gpu->direct, true);
        gpu->driver->cuCtxPopCurrent(&(cuda_context){NULL});
    }
    if (r < 0)
        gpu->driver->cuDevicePrimaryCtxRelease(gpu->handle);
    return r;
}

int kvfs_gpu_open(struct kvfs_client *client, const struct kvfs_gpu_options *options, struct kvfs_gpu **out) {
    struct kvfs_gpu_options o = {0};
    const struct gpu_driver *driver;
    *out = NULL;
    if (options)
        memcpy(&o, options, min_u64(options->size, sizeof(o)));
    o.slot_count = o.slot_count ? o.slot_count : 32;
    o.slot_size = o.slot_size ? o.slot_size : 256 << 10;
    if (o.mode > KVFS_GPU_GDS || o.slot_count > 1024 || o.slot_size % (64 << 10) || o.slot_size > 64 << 20)
        return client_fail(-EINVAL, "options: mode %u, %u slots (1 to 1024) of %llu bytes (a multiple of 64 KiB, at most 64 MiB)", o.mode,
                           o.slot_count, (unsigned long long)o.slot_size);
    if (client->pid != getpid())
        return client_fail(-ECHILD, "%s: connected by process %d; after fork() connect again", client->path, (int)client->pid);
    int r = driver_load(&driver);
    if (r < 0)
        return r;
    struct kvfs_gpu *gpu = calloc(1, sizeof(*gpu));
    if (!gpu)
        return client_fail(-ENOMEM, "no memory for a GPU reader");
    gpu->pid = getpid();
    gpu->client = client;
    gpu->driver = driver;
    gpu->ring_slots = o.slot_count;
    gpu->slot_size = o.slot_size;
    gpu->ring_size = round_up(o.slot_count * o.slot_size, HUGE_PAGE);
    gpu->copy_capacity = 2 * RINGS_MAX * o.slot_count;
    pthread_mutex_init(&gpu->lock, NULL);
    gpu->slots = calloc(RINGS_MAX * o.slot_count, sizeof(*gpu->slots));
    gpu->copies = calloc(gpu->copy_capacity, sizeof(*gpu->copies));
    r = gpu->slots && gpu->copies ? device_open(gpu, &o) : client_fail(-ENOMEM, "no memory for %u slots", o.slot_count);
    if (r < 0)
        gpu_free(gpu);
    else
        *out = gpu;
    return r;
}

void kvfs_gpu_close(struct kvfs_gpu *gpu) {
    if (!gpu || gpu->pid != getpid()) /* a child's copy: CUDA does not survive fork() */
        return;
    pthread_mutex_lock(&gpu->lock);
    const struct gpu_driver *driver = gpu->driver;
    if (!gpu->broken && gpu->context && driver->cuCtxPushCurrent(gpu->context) == CUDA_SUCCESS) {
        if (copies_wait(gpu) == 0)
            context_drop(gpu);
        driver->cuCtxPopCurrent(&(cuda_context){NULL});
    }
    uint64_t until = now_ns() + gpu->client->options.timeout_ms * 1000000ull;
    while (slots_recover(gpu) && now_ns() < until)
        pause_ns(1000000);
    if (!gpu->broken && driver->cuCtxPushCurrent(gpu->primary) == CUDA_SUCCESS) {
        for (uint32_t i = 0; i < gpu->ring_count; i++)
            pinned_free(gpu, gpu->rings[i], gpu->ring_size);
        pinned_free(gpu, gpu->put_memory, gpu->put_size);
        if (gpu->direct)
            direct_close(gpu->direct, true);
        driver->cuCtxPopCurrent(&(cuda_context){NULL});
        driver->cuDevicePrimaryCtxRelease(gpu->handle);
    } else if (gpu->direct) {
        direct_close(gpu->direct, false);
    }
    pthread_mutex_unlock(&gpu->lock);
    gpu_free(gpu);
}

int kvfs_gpu_mode(const struct kvfs_gpu *gpu) { return gpu->direct ? KVFS_GPU_GDS : KVFS_GPU_STAGED; }

int kvfs_gpu_statistics_get(struct kvfs_gpu *gpu, struct kvfs_gpu_statistics *out) {
    memset(out, 0, sizeof(*out));
    if (gpu->pid != getpid())
        return client_fail(-ECHILD, "this GPU reader was opened by process %d", (int)gpu->pid);
    pthread_mutex_lock(&gpu->lock);
    *out = gpu->count;
    out->slots_stuck = slots_recover(gpu);
    pthread_mutex_unlock(&gpu->lock);
    return 0;
}

int kvfs_gpu_direct_statistics_get(struct kvfs_gpu *gpu, struct kvfs_gpu_direct_statistics *out) {
    memset(out, 0, sizeof(*out));
    if (gpu->pid != getpid())
        return client_fail(-ECHILD, "this GPU reader was opened by process %d", (int)gpu->pid);
    pthread_mutex_lock(&gpu->lock);
    if (gpu->direct) {
        out->blocks = gpu->direct_count.blocks;
        out->bytes = gpu->direct_count.bytes;
        out->fallbacks = gpu->direct_count.fallbacks;
        out->mismatches = gpu->direct_count.mismatches;
        direct_statistics(gpu->direct, out);
    }
    pthread_mutex_unlock(&gpu->lock);
    return 0;
}
