/* Blocks into GPU memory through a ring of pinned slots; with gds, through it only what cuFile is not to read (client/gpu/direct.c).
 *
 * A slot is free; being read into; ready (verified, to be copied); being copied; or stuck, with a device that gave no answer. Copies go to
 * one stream of our own and end in its order, so a queue of events says which slots are free again. In that queue a fence stands where the
 * stream waits for the caller's: what takes long there is the caller's work, and no copy of ours that hangs.
 */
#include "client/client.h"
#include "client/gpu/gpu.h"
#include "kvfs_gpu.h"

#include <dlfcn.h>
#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>

#define HUGE_PAGE ((uint64_t)2 << 20)
#define RINGS_MAX 4                  /* where devices hold on to slots, there is a second ring, and so on */
#define PAUSE_NS 20000

enum slot_state { SLOT_FREE, SLOT_READING, SLOT_READY, SLOT_COPYING, SLOT_STUCK };
struct gpu_slot {
    uint8_t *memory;
    cuda_pointer destination;
    uint64_t size;
    enum slot_state state;
    struct gpu_block *block;             /* READING */
};
struct gpu_copy { cuda_event event; uint32_t first, count; };  /* slots; count 0: a fence */
struct kvfs_gpu {
    pid_t pid;
    struct kvfs_client *client;
    const struct gpu_driver *driver;
    pthread_mutex_t lock;                /* a call */
    int device, handle;                  /* the GPU's number, and CUDA's handle for it */
    cuda_context primary, context;       /* the slots are registered in one; stream and events belong to the other, that of the buffers */
    cuda_stream stream;
    cuda_event before, after;            /* the caller's stream to ours and back */
    struct gpu_slot *slots;              /* ring_slots for each ring there may be */
    uint32_t slot_count, ring_slots, ring_count, cursor;
    uint64_t slot_size, ring_size;
    uint8_t *rings[RINGS_MAX];
    struct gpu_copy *copies;             /* a ring, oldest at copy_first; two a slot: a fence has a copy behind it */
    uint32_t copy_first, copy_count, copy_capacity;
    uint64_t progress_ns;                /* since when the oldest copy is the oldest */
    int broken;                          /* CUDA cannot say any more which slots are in use */
    char why[200];
    struct kvfs_gpu_statistics count;
    struct direct *direct;               /* NULL: staged */
    struct { uint64_t blocks, bytes, fallbacks, mismatches; } direct_count;
};

/* How a block is read. All but STAGED: its whole pages by cuFile; then it is staged, from where they end. */
enum block_way {
    WAY_STAGED,
    WAY_HEADER,                          /* is being read */
    WAY_FENCE,                           /* for the caller's stream, which may still write to the buffer */
    WAY_READING,
    WAY_PROVING,                         /* one piece of it after the other */
    WAY_LOOKING                          /* whether it still lies there */
};

/* A block of which pieces are read or to be read. */
struct gpu_block {
    bool used;
    uint32_t key, next, pieces, active;  /* pieces begun, of how many, and how many of them are being read */
    uint32_t tries;
    int64_t failure;
    struct kvfs_record record;
    struct desc *desc;                   /* that verified the pieces so far */
    enum block_way way;
    uint64_t from;                       /* bytes before this are not staged: cuFile has read them */
    uint32_t proven;                     /* pages */
    struct direct_read *read;
    struct direct_proof *proof;
    struct direct_look *look;
};
struct gpu_call {
    struct kvfs_gpu *gpu;
    struct session *session;
    struct lane *lane;
    const struct kvfs_keys *keys;
    const struct kvfs_buffer *buffers;
    const uint8_t *next_place;           /* of key next_key */
    const uint8_t **places;              /* of the keys of blocks */
    struct gpu_block *blocks;            /* ring_slots */
    int64_t *results;
    cuda_stream stream;                  /* the caller's */
    uint32_t next_key, blocks_used, read;
    bool fenced, passed;                 /* our stream waits for the caller's; that has come so far */
    bool direct;
    int error;
    struct shards shards;
};

/* ---- the driver ---- */

static int driver_load(const struct gpu_driver **out) {
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    static struct gpu_driver driver;
    static pid_t loaded;
    const char *path = getenv("KVFS_CUDA_LIBRARY"), *missing = NULL;
    path = path && *path ? path : "libcuda.so.1";
    int r = 0;
    pthread_mutex_lock(&lock);
    if (loaded && loaded != getpid())
        r = client_fail(-ECHILD, "CUDA was started by process %d and does not survive fork(): start processes by spawn", (int)loaded);
    if (!loaded) {
        void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
        if (!library)
            r = client_fail(-ENODEV, "no CUDA here: %s", dlerror());
#define LOAD(function, version, parameters)                                    \
    if (library) {                                                             \
        void *symbol = dlsym(library, #function version);                      \
        memcpy(&driver.function, &symbol, sizeof(symbol));                     \
        missing = symbol ? missing : #function version;                        \
    }
        GPU_DRIVER_FUNCTIONS(LOAD)
#undef LOAD
        if (missing) {
            r = client_fail(-ENODEV, "%s lacks %s: a CUDA driver older than 10.0?", path, missing);
            dlclose(library);
        }
        int error = r == 0 ? driver.cuInit(0) : 0;
        if (error) {
            const char *name = NULL;
            r = client_fail(-ENODEV, "no GPU here: cuInit: %s", driver.cuGetErrorName(error, &name) == 0 && name ? name : "unknown error");
        }
        loaded = r == 0 ? getpid() : 0;
    }
    pthread_mutex_unlock(&lock);
    *out = &driver;
    return r;
}

int cuda_fail(const struct gpu_driver *driver, int device, const char *what, int error) {
    const char *name = NULL;
    if (driver->cuGetErrorName(error, &name) || !name)
        name = "unknown error";
    return client_fail(-EIO, "GPU %d: %s: %s (%d)", device, what, name, error);
}

static int gpu_break(struct kvfs_gpu *gpu, int error) {
    gpu->broken = error;
    snprintf(gpu->why, sizeof(gpu->why), "%s", kvfs_error());
    return error;
}

/* ---- the queue of copies ---- */

static int copy_push(struct kvfs_gpu *gpu, uint32_t first, uint32_t count) {
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

/* Free the slots whose copies have ended. -EIO, -ETIMEDOUT: the GPU hangs. */
static int copies_reap(struct kvfs_gpu *gpu) {
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

static void pause_ns(uint64_t ns) {
    struct timespec ts = {.tv_nsec = (long)ns};
    nanosleep(&ts, NULL);
}

/* Wait for every copy. An error leaves the GPU broken. */
static int copies_settle(struct kvfs_gpu *gpu) {
    uint64_t limit_ns = gpu->client->options.timeout_ms * 1000000ull * STALL_TIMEOUTS, last_ns = now_ns();
    for (;;) {
        int error = gpu->stream ? gpu->driver->cuStreamQuery(gpu->stream) : CUDA_SUCCESS;
        int r = error && error != CUDA_ERROR_NOT_READY ? cuda_fail(gpu->driver, gpu->device, "cuStreamQuery", error) : copies_reap(gpu);
        if (gpu->copy_count) /* those have a limit */
            last_ns = now_ns();
        if (r == 0 && error && now_ns() - last_ns > limit_ns)
            r = client_fail(-ETIMEDOUT, "GPU %d: its stream has not ended in %llu ms", gpu->device,
                            (unsigned long long)(limit_ns / 1000000));
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

/* Stream and events in a context, which becomes current. */
static int context_enter(struct kvfs_gpu *gpu, cuda_context context) {
    int r = 0;
    if (gpu->context && gpu->context != context) {
        r = CUDA(gpu, cuCtxPushCurrent, gpu->context);
        if (r < 0)
            return r;
        r = copies_settle(gpu);
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

struct place { cuda_context context; unsigned type; int ordinal; cuda_pointer start; size_t size; };
static int place_of(struct kvfs_gpu *gpu, cuda_pointer pointer, struct place *out) {
    int attributes[] = {CUDA_POINTER_CONTEXT, CUDA_POINTER_MEMORY_TYPE, CUDA_POINTER_DEVICE_ORDINAL, CUDA_POINTER_RANGE_START,
                        CUDA_POINTER_RANGE_SIZE};
    *out = (struct place){.ordinal = -1};
    void *data[] = {&out->context, &out->type, &out->ordinal, &out->start, &out->size};
    int error = gpu->driver->cuPointerGetAttributes(5, attributes, data, pointer);
    if (error == CUDA_ERROR_INVALID_VALUE || error == CUDA_ERROR_INVALID_CONTEXT) /* a pointer that CUDA never saw; most drivers say 0 */
        *out = (struct place){.ordinal = -1};
    else if (error)
        return cuda_fail(gpu->driver, gpu->device, "cuPointerGetAttributes", error);
    return 0;
}

int kvfs_gpu_device_of(const void *pointer) {
    const struct gpu_driver *driver;
    unsigned type = 0;
    int ordinal = -1, attributes[] = {CUDA_POINTER_MEMORY_TYPE, CUDA_POINTER_DEVICE_ORDINAL}, r = driver_load(&driver);
    void *data[] = {&type, &ordinal};
    if (r < 0)
        return r;
    cuda_context context = NULL;
    int error = driver->cuPointerGetAttributes(2, attributes, data, (cuda_pointer)(uintptr_t)pointer);
    if (error == CUDA_ERROR_INVALID_CONTEXT && driver->cuDevicePrimaryCtxRetain(&context, 0) == CUDA_SUCCESS) { /* a thread without one */
        if (driver->cuCtxPushCurrent(context) == CUDA_SUCCESS) {
            error = driver->cuPointerGetAttributes(2, attributes, data, (cuda_pointer)(uintptr_t)pointer);
            driver->cuCtxPopCurrent(&context);
        }
        driver->cuDevicePrimaryCtxRelease(0);
    }
    if (error || ordinal < 0 || (type != CUDA_MEMORYTYPE_DEVICE && type != CUDA_MEMORYTYPE_UNIFIED))
        return client_fail(-EINVAL, "%p is no GPU memory", pointer);
    return ordinal;
}

static int place_check(struct kvfs_gpu *gpu, uint32_t i, uint32_t count, const struct place *place, uint64_t at) {
    const char *kind = place->type == CUDA_MEMORYTYPE_HOST ? "host memory" : "no memory that CUDA knows: of the host, or freed";
    if (place->type != CUDA_MEMORYTYPE_DEVICE && place->type != CUDA_MEMORYTYPE_UNIFIED)
        return client_fail(-EINVAL, "buffer %u of %u: 0x%llx is %s", i, count, (unsigned long long)at, kind);
    if (place->ordinal != gpu->device)
        return client_fail(-EINVAL, "buffer %u of %u: 0x%llx is on GPU %d; this reader is GPU %d's", i, count, (unsigned long long)at,
                           place->ordinal, gpu->device);
    return 0;
}

/* Every buffer is memory of this GPU and of one context. The primary context is current. */
static int buffers_check(struct kvfs_gpu *gpu, const struct kvfs_buffer *buffers, uint32_t count, cuda_context *context) {
    uint32_t first = 0;
    *context = NULL;
    for (uint32_t i = 0; i < count; i++) {
        cuda_pointer at = (cuda_pointer)(uintptr_t)buffers[i].data;
        uint64_t size = buffers[i].size;
        struct place place, end;
        if (size == 0)
            continue;
        int r = place_of(gpu, at, &place);
        if (r == 0)
            r = place_check(gpu, i, count, &place, at);
        if (r < 0)
            return r;
        if (place.context && place.size && size > place.size - (at - place.start))
            return client_fail(-EINVAL, "buffer %u of %u: %llu bytes at 0x%llx, %llu past the end of its allocation of %llu", i, count,
                               (unsigned long long)size, (unsigned long long)at,
                               (unsigned long long)(size - (place.size - (at - place.start))), (unsigned long long)place.size);
        if (!place.context) { /* mapped memory (cuMemMap, pools) has no context, and an address range of several allocations */
            r = place_of(gpu, at + size - 1, &end);
            if (r == 0)
                r = place_check(gpu, i, count, &end, at + size - 1);
            if (r < 0)
                return r;
            place.context = gpu->primary;
        }
        if (*context && *context != place.context)
            return client_fail(-EINVAL, "buffer %u of %u: 0x%llx belongs to another CUDA context than buffer %u", i, count,
                               (unsigned long long)at, first);
        if (!*context)
            first = i;
        *context = place.context;
    }
    return 0;
}

/* What is recorded on a stream that is being captured belongs to a graph, and is not done now. */
static int stream_check(struct kvfs_gpu *gpu, cuda_stream stream) {
    int capturing = 0, r = stream ? CUDA(gpu, cuStreamIsCapturing, stream, &capturing) : 0;
    if (r == 0 && capturing)
        return client_fail(-EINVAL, "stream 0x%llx is being captured into a graph: read outside of it",
                           (unsigned long long)(uintptr_t)stream);
    return r;
}

/* ---- open, close ---- */

static uint8_t *ring_map(struct kvfs_gpu *gpu) {
    uint64_t size = gpu->ring_size;
    uint8_t *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_HUGETLB, -1, 0);
    gpu->count.slots_huge = memory != MAP_FAILED;
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

/* Slots: a mapping, registered once. */
static int ring_add(struct kvfs_gpu *gpu) {
    uint8_t *memory = ring_map(gpu);
    if (!memory)
        return client_fail(-ENOMEM, "no memory for %u slots of %llu bytes", gpu->ring_slots, (unsigned long long)gpu->slot_size);
    int r = CUDA(gpu, cuCtxPushCurrent, gpu->primary);
    if (r == 0) {
        r = CUDA(gpu, cuMemHostRegister, memory, gpu->ring_size, CUDA_MEMHOSTREGISTER_PORTABLE);
        gpu->driver->cuCtxPopCurrent(&(cuda_context){NULL});
    }
    if (r < 0) {
        munmap(memory, gpu->ring_size);
        return r;
    }
    gpu->rings[gpu->ring_count++] = memory;
    for (uint32_t i = 0; i < gpu->ring_slots; i++)
        gpu->slots[gpu->slot_count++].memory = memory + i * gpu->slot_size;
    return 0;
}

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
    o.slot_count = o.slot_count ? o.slot_count : 16;
    o.slot_size = o.slot_size ? o.slot_size : 1 << 20;
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

/* Take slots back that no device will write into any more; how many are still out of use. */
static uint32_t slots_recover(struct kvfs_gpu *gpu) {
    uint32_t stuck = 0;
    for (uint32_t i = 0; i < gpu->slot_count; i++) {
        struct gpu_slot *slot = &gpu->slots[i];
        if (slot->state == SLOT_STUCK && !client_overlaps_zombie(gpu->client, slot->memory, gpu->slot_size))
            slot->state = SLOT_FREE;
        stuck += slot->state == SLOT_STUCK;
    }
    return stuck;
}

void kvfs_gpu_close(struct kvfs_gpu *gpu) {
    if (!gpu || gpu->pid != getpid()) /* a child's copy: CUDA does not survive fork() */
        return;
    pthread_mutex_lock(&gpu->lock);
    const struct gpu_driver *driver = gpu->driver;
    if (!gpu->broken && gpu->context && driver->cuCtxPushCurrent(gpu->context) == CUDA_SUCCESS) {
        if (copies_settle(gpu) == 0)
            context_drop(gpu);
        driver->cuCtxPopCurrent(&(cuda_context){NULL});
    }
    uint64_t until = now_ns() + gpu->client->options.timeout_ms * 1000000ull;
    while (slots_recover(gpu) && now_ns() < until)
        pause_ns(1000000);
    if (!gpu->broken && driver->cuCtxPushCurrent(gpu->primary) == CUDA_SUCCESS) {
        for (uint32_t i = 0; i < gpu->ring_count; i++) /* what a GPU or a device may still use stays */
            if (driver->cuMemHostUnregister(gpu->rings[i]) == CUDA_SUCCESS &&
                !client_overlaps_zombie(gpu->client, gpu->rings[i], gpu->ring_size))
                munmap(gpu->rings[i], gpu->ring_size);
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

/* ---- pieces ---- */

/* In turn: so neighbours in a block are neighbours in the ring, and are copied together. */
static struct gpu_slot *slot_find(struct kvfs_gpu *gpu) {
    for (uint32_t i = 0; i < gpu->slot_count; i++) {
        struct gpu_slot *slot = &gpu->slots[(gpu->cursor + i) % gpu->slot_count];
        if (slot->state == SLOT_FREE)
            return slot;
    }
    return NULL;
}

/* Slots i - 1 and i, in memory. */
static bool neighbours(const struct kvfs_gpu *gpu, uint32_t i) {
    return i && gpu->slots[i].memory == gpu->slots[i - 1].memory + gpu->slot_size;
}

/* The first of count free slots side by side. */
static struct gpu_slot *slots_side_by_side(struct kvfs_gpu *gpu, uint32_t count) {
    uint32_t run = 0;
    for (uint32_t i = 0; i < gpu->slot_count; i++) {
        run = gpu->slots[i].state != SLOT_FREE ? 0 : neighbours(gpu, i) ? run + 1 : 1;
        if (run == count)
            return &gpu->slots[i + 1 - count];
    }
    return NULL;
}

static void slot_assign(struct gpu_call *call, struct gpu_slot *slot, const struct gpu_block *block, uint32_t piece) {
    uint64_t offset = block->from + piece * call->gpu->slot_size;
    slot->destination = (cuda_pointer)(uintptr_t)call->buffers[block->key].data + offset;
    slot->size = min_u64(block->record.size - offset, call->gpu->slot_size);
}

static bool same_leaves(const struct desc *a, const struct desc *b) {
    return a == b || (a->size == b->size && memcmp(a->leaves, b->leaves, a->leaf_count * sizeof(*a->leaves)) == 0);
}

static void piece_done(struct lane *lane, struct fetch *fetch) {
    (void)lane;
    struct gpu_call *call = fetch->owner;
    struct gpu_slot *slot = &call->gpu->slots[fetch->cookie];
    struct gpu_block *block = slot->block;
    int64_t failure = fetch->result < 0 ? fetch->result : 0;
    slot->state = fetch->groups_held ? SLOT_STUCK : failure ? SLOT_FREE : SLOT_READY;
    block->active--;
    if (failure == 0 && block->desc && !same_leaves(block->desc, fetch->desc)) { /* other content than the pieces before: both are right, */
        failure = -ESTALE;                                                        /* but not together */
        slot->state = SLOT_FREE;
    } else if (failure == 0 && block->desc != fetch->desc) {
        desc_put(block->desc);
        block->desc = fetch->desc;
        block->record = fetch->record;
        atomic_fetch_add(&block->desc->refs, 1);
    }
    if (!block->failure || block->failure == -ESTALE)
        block->failure = failure ? failure : block->failure;
}

static int piece_start(struct gpu_call *call, struct gpu_block *block, struct gpu_slot *slot) {
    struct fetch *fetch = fetch_get(call->lane);
    if (!fetch)
        return -ENOMEM;
    slot_assign(call, slot, block, block->next);
    slot->state = SLOT_READING;
    slot->block = block;
    call->gpu->cursor = (uint32_t)(slot - call->gpu->slots + 1) % call->gpu->slot_count;
    fetch->record = block->record;
    fetch->desc = block->desc;
    if (fetch->desc)
        atomic_fetch_add(&fetch->desc->refs, 1);
    fetch->offset = block->from + block->next * call->gpu->slot_size;
    fetch->size = slot->size;
    fetch->data = slot->memory;
    fetch->done = piece_done;
    fetch->owner = call;
    fetch->cookie = (uint64_t)(slot - call->gpu->slots);
    block->next++;
    block->active++;
    call->gpu->count.pieces++;
    fetch_start(call->lane, fetch);
    return 0;
}

/* Let our stream wait for all that is on the caller's. */
static int fence(struct gpu_call *call) {
    struct kvfs_gpu *gpu = call->gpu;
    if (call->fenced)
        return 0;
    int r = CUDA(gpu, cuEventRecord, gpu->before, call->stream);
    if (r == 0)
        r = CUDA(gpu, cuStreamWaitEvent, gpu->stream, gpu->before, 0);
    if (r == 0)
        r = copy_push(gpu, 0, 0);
    call->fenced = r == 0;
    return r;
}

/* Of the user's stream, all that was there; then what is ready, each run of neighbours in one copy. */
static int copies_start(struct gpu_call *call) {
    struct kvfs_gpu *gpu = call->gpu;
    struct gpu_slot *slots = gpu->slots;
    int r = 0;
    for (uint32_t i = 0, end; i < gpu->slot_count && r == 0; i = end) {
        end = i + 1;
        if (slots[i].state != SLOT_READY)
            continue;
        uint64_t size = slots[i].size;
        while (end < gpu->slot_count && slots[end].state == SLOT_READY && slots[end - 1].size == gpu->slot_size && neighbours(gpu, end) &&
               slots[end].destination == slots[end - 1].destination + gpu->slot_size)
            size += slots[end++].size;
        for (uint32_t k = i; k < end; k++)
            slots[k].state = size ? SLOT_COPYING : SLOT_FREE;
        if (size == 0)
            continue;
        r = fence(call);
        if (r == 0)
            r = CUDA(gpu, cuMemcpyHtoDAsync, slots[i].destination, slots[i].memory, size, gpu->stream);
        if (r == 0)
            r = copy_push(gpu, i, end - i);
        gpu->count.copies += r == 0;
    }
    return r;
}

/* ---- blocks ---- */

static void block_over(struct gpu_call *call, struct gpu_block *block, int64_t result) {
    struct kvfs_client *client = call->gpu->client;
    call->results[block->key] = result == -ESTALE ? -ENOENT : result;
    if (result >= 0) {
        call->read++;
        client_hit(client, call->session, block->record.inode);
        TALLY(client, hits, 1);
        TALLY(client, gets, 1);
        TALLY(client, get_bytes, (uint64_t)result);
        call->gpu->count.blocks++;
        call->gpu->count.bytes += (uint64_t)result;
        call->gpu->direct_count.blocks += block->from > 0;
        call->gpu->direct_count.bytes += block->from;
    } else if (result != -ERANGE) {
        TALLY(client, misses, 1);
    }
    desc_put(block->desc);
    block->desc = NULL;
    block->used = false;
    call->blocks_used--;
}

/* All that is not there yet goes through the ring. */
static void block_stage(struct gpu_call *call, struct gpu_block *block, uint64_t from) {
    uint64_t slot_size = call->gpu->slot_size, pieces = (block->record.size - from + slot_size - 1) / slot_size;
    block->way = WAY_STAGED;
    block->from = from;
    block->next = 0;
    block->pieces = pieces || from ? (uint32_t)pieces : 1;
}

static void header_done(struct lane *lane, struct fetch *fetch) {
    (void)lane;
    struct gpu_call *call = fetch->owner;
    struct gpu_block *block = &call->blocks[fetch->cookie];
    block->active--;
    block->way = WAY_STAGED;
    if (fetch->result < 0) {
        block->failure = fetch->result;
        return;
    }
    block->way = WAY_FENCE;
    block->desc = fetch->desc;
    block->record = fetch->record;
    atomic_fetch_add(&block->desc->refs, 1);
}

static void header_start(struct gpu_call *call, struct gpu_block *block) {
    struct fetch *fetch = fetch_get(call->lane);
    if (!fetch)
        return;
    block->way = WAY_HEADER;
    block->active++;
    fetch->record = block->record;
    fetch->done = header_done;
    fetch->owner = call;
    fetch->cookie = (uint64_t)(block - call->blocks);
    fetch_start(call->lane, fetch);
}

/* Look the name up, for the first time or again. */
static void block_find(struct gpu_call *call, struct gpu_block *block) {
    struct kvfs_gpu *gpu = call->gpu;
    uint32_t i = block->key;
    desc_put(block->desc);
    block->desc = NULL;
    block->next = 0;
    block->failure = 0;
    int r = key_find(gpu->client, call->session, &call->shards, call->places[block - call->blocks], call->keys->sizes[i], &block->record);
    if (r < 0 && r != -ENOENT && !call->error)
        call->error = r;
    if (r == 0 && block->record.size > call->buffers[i].size)
        r = -ERANGE;
    if (r < 0) {
        block_over(call, block, r);
        return;
    }
    block_stage(call, block, 0);
    struct gpu_slot *slot = gpu->client->stage && block->pieces <= gpu->ring_slots ? slots_side_by_side(gpu, block->pieces) : NULL;
    if (!slot || !stage_take(gpu->client, &block->record, slot->memory, now_ns() + gpu->client->options.timeout_ms * 1000000ull)) {
        if (call->direct && block->record.size >= PAGE)
            header_start(call, block);
        return;
    }
    for (; block->next < block->pieces; block->next++, slot++) {
        slot_assign(call, slot, block, block->next);
        slot->state = SLOT_READY;
    }
    gpu->count.prestaged++;
}

static void block_begin(struct gpu_call *call) {
    struct gpu_block *block = call->blocks;
    while (block->used)
        block++;
    *block = (struct gpu_block){.used = true, .key = call->next_key};
    call->places[block - call->blocks] = call->next_place;
    call->next_place += call->keys->sizes[call->next_key++];
    call->blocks_used++;
    block_find(call, block);
}

/* Blocks that need no more reading, or failed. */
static void blocks_end(struct gpu_call *call) {
    for (uint32_t i = 0; i < call->gpu->ring_slots; i++) {
        struct gpu_block *block = &call->blocks[i];
        if (!block->used || block->active || block->way != WAY_STAGED || (!block->failure && block->next < block->pieces))
            continue;
        if (block->failure == -ESTALE && block->tries++ < CLIENT_RETRIES) {
            memset(&call->shards, 0, sizeof(call->shards));
            call->gpu->count.restarts++;
            block_find(call, block);
        } else {
            block_over(call, block, block->failure ? block->failure : (int64_t)block->record.size);
        }
    }
}

/* Start as many pieces as there are slots. Whether it was for want of a slot that it stopped. */
static bool pieces_start(struct gpu_call *call) {
    struct kvfs_gpu *gpu = call->gpu;
    for (;;) {
        struct gpu_block *block = NULL;
        for (uint32_t i = 0; i < gpu->ring_slots && !block; i++) {
            struct gpu_block *b = &call->blocks[i];
            if (b->used && b->way == WAY_STAGED && !b->failure && b->next < b->pieces && (b->next == 0 || b->desc))
                block = b;
        }
        bool more = call->next_key < call->keys->count && call->blocks_used < gpu->ring_slots && !call->error;
        if (!block && !more)
            return false;
        struct gpu_slot *slot = slot_find(gpu);
        if (!slot)
            return true;
        if (block) {
            int r = piece_start(call, block, slot);
            block->failure = r < 0 ? r : block->failure;
        } else {
            block_begin(call);
        }
    }
}

/* No slot is to be had: devices hold them all. */
static void blocks_give_up(struct gpu_call *call) {
    for (uint32_t i = 0; i < call->gpu->ring_slots; i++)
        if (call->blocks[i].used)
            block_over(call, &call->blocks[i], -ETIMEDOUT);
    for (; call->next_key < call->keys->count; call->next_key++) {
        call->results[call->next_key] = -ETIMEDOUT;
        TALLY(call->gpu->client, misses, 1);
    }
}

/* ---- blocks by gds ---- */

/* What cuFile began, the ring does. Nobody writes to the buffer any more. */
static void block_fall_back(struct gpu_call *call, struct gpu_block *block) {
    call->gpu->direct_count.fallbacks++;
    block_stage(call, block, 0);
}

static uint32_t whole_pages(const struct gpu_block *block) { return (uint32_t)(block->record.size / PAGE); }

static int block_begin_reading(struct gpu_call *call, struct gpu_block *block) {
    struct kvfs_gpu *gpu = call->gpu;
    int r = fence(call);
    if (r == 0 && !call->passed) {
        int error = gpu->driver->cuEventQuery(gpu->before);
        if (error == CUDA_ERROR_NOT_READY)
            return 0;
        r = error ? cuda_fail(gpu->driver, gpu->device, "cuEventQuery", error) : 0;
        call->passed = r == 0;
    }
    if (r < 0)
        return r;
    block->read = direct_start(gpu->direct, block->desc, whole_pages(block), (cuda_pointer)(uintptr_t)call->buffers[block->key].data);
    block->way = WAY_READING;
    block->proven = 0;
    if (!block->read)
        block_fall_back(call, block);
    return 0;
}

static void block_go_on_reading(struct gpu_call *call, struct gpu_block *block) {
    int r = direct_poll(call->gpu->direct, block->read);
    if (r == -EINPROGRESS)
        return;
    block->read = NULL;
    block->way = WAY_PROVING;
    if (r == -EAGAIN) {
        block_fall_back(call, block);
    } else if (r < 0) {
        TALLY(call->gpu->client, timeouts, 1);
        block->failure = r;
        block->way = WAY_STAGED;
    }
}

static int block_prove(struct gpu_call *call, struct gpu_block *block) {
    struct kvfs_gpu *gpu = call->gpu;
    uint32_t pages = (uint32_t)min_u64(whole_pages(block) - block->proven, DIRECT_PROOF_PAGES);
    if (!block->proof)
        return direct_proof_start(gpu->direct, gpu->stream, (cuda_pointer)(uintptr_t)call->buffers[block->key].data + block->proven * PAGE,
                                  block->desc->leaves + block->proven, pages, &block->proof);
    int r = direct_proof_poll(gpu->direct, block->proof);
    if (r == -EINPROGRESS)
        return 0;
    if (r == -EBADMSG) { /* rewritten meanwhile, or a flipped bit: the ring finds out which, and tells the daemon */
        gpu->direct_count.mismatches++;
        block_fall_back(call, block);
    } else if (r < 0) {
        return r;
    } else if ((block->proven += pages) == whole_pages(block)) {
        block->look = direct_look_start(call->lane, block->desc);
        block->way = block->look ? WAY_LOOKING : WAY_STAGED;
        block->failure = block->look ? 0 : -ENOMEM;
    }
    block->proof = NULL;
    return 0;
}

static void block_look(struct gpu_call *call, struct gpu_block *block) {
    int r = direct_look_poll(block->look, &block->record);
    if (r == -EINPROGRESS)
        return;
    block->look = NULL;
    if (r == 0)
        block_stage(call, block, whole_pages(block) * PAGE);
    else if (call->session->gone) /* nobody can say whether it is still there; the ring's checksums do not need to know */
        block_fall_back(call, block);
    else
        block->way = WAY_STAGED, block->failure = r;
}

/* Whether there is something to wait for that does not wake the lane. */
static int blocks_direct(struct gpu_call *call, bool *waiting) {
    int r = 0;
    *waiting = false;
    for (uint32_t i = 0; i < call->gpu->ring_slots && r == 0; i++) {
        struct gpu_block *block = &call->blocks[i];
        enum block_way way;
        do { /* a state that was left shows the next at once */
            way = block->used ? block->way : WAY_STAGED;
            switch (way) {
            case WAY_FENCE: r = block_begin_reading(call, block); break;
            case WAY_READING: block_go_on_reading(call, block); break;
            case WAY_PROVING: r = block_prove(call, block); break;
            case WAY_LOOKING: block_look(call, block); break;
            default: break;
            }
        } while (r == 0 && block->way != way && block->used);
        *waiting = *waiting || (block->used && block->way >= WAY_FENCE && block->way != WAY_LOOKING);
    }
    return r;
}

/* After an error: until no thread writes, or is known to be late. What the GPU still proves, copies_settle() waits for. */
static void direct_settle(struct gpu_call *call) {
    for (uint32_t i = 0; i < call->gpu->ring_slots; i++) {
        struct gpu_block *block = &call->blocks[i];
        while (block->read && direct_poll(call->gpu->direct, block->read) == -EINPROGRESS)
            pause_ns(PAUSE_NS);
        if (block->look)
            direct_look_poll(block->look, &block->record);
        block->read = NULL;
        block->look = NULL;
    }
    direct_proofs_drop(call->gpu->direct);
}

static int blocks_read(struct gpu_call *call) {
    struct kvfs_gpu *gpu = call->gpu;
    for (;;) {
        bool waiting = false;
        int r = gpu->direct ? blocks_direct(call, &waiting) : 0;
        if (r == 0)
            r = copies_start(call);
        if (r == 0)
            r = copies_reap(gpu);
        if (r < 0)
            return r;
        blocks_end(call);
        bool starved = pieces_start(call), ready = false;
        for (uint32_t i = 0; i < gpu->slot_count; i++)
            ready = ready || gpu->slots[i].state == SLOT_READY;
        if (ready)
            continue;
        if (call->error || (!call->blocks_used && call->next_key == call->keys->count))
            return call->error;
        if (starved) {
            gpu->count.slot_waits++;
            /* One device that hangs may come to hold every slot: the others' blocks are still to be read. */
            if (2 * slots_recover(gpu) > gpu->slot_count && gpu->ring_count < RINGS_MAX && ring_add(gpu) == 0)
                continue;
        }
        if (call->lane->active_count)
            lane_run(call->lane, waiting || (starved && gpu->copy_count) ? PAUSE_NS : 1000000000);
        else if (waiting || (starved && gpu->copy_count))
            pause_ns(PAUSE_NS);
        else if (starved)
            blocks_give_up(call);
    }
}

/* The caller's stream goes on when the bytes are there; without one, the call does. */
static int blocks_fence(struct gpu_call *call) {
    struct kvfs_gpu *gpu = call->gpu;
    if (!call->fenced)
        return 0;
    if (!call->stream)
        return copies_settle(gpu);
    int r = CUDA(gpu, cuEventRecord, gpu->after, gpu->stream);
    return r == 0 ? CUDA(gpu, cuStreamWaitEvent, call->stream, gpu->after, 0) : r;
}

static int gpu_get(struct gpu_call *call) {
    struct kvfs_gpu *gpu = call->gpu;
    int r = blocks_read(call);
    while (call->lane->active_count) /* after an error: until no device writes, or is known to be stuck */
        lane_run(call->lane, 1000000000);
    if (r == 0)
        r = blocks_fence(call);
    if (r == 0)
        return 0;
    char why[sizeof(gpu->why)]; /* the first sentence is the one that says what happened */
    snprintf(why, sizeof(why), "%s", kvfs_error());
    if (gpu->direct)
        direct_settle(call);
    for (uint32_t i = 0; i < gpu->slot_count; i++)
        if (gpu->slots[i].state == SLOT_READY)
            gpu->slots[i].state = SLOT_FREE;
    for (uint32_t i = 0; i < gpu->ring_slots; i++)
        desc_put(call->blocks[i].desc);
    if (!gpu->broken && copies_settle(gpu) < 0)
        snprintf(gpu->why, sizeof(gpu->why), "%s", why);
    return client_fail(r, "%s", why);
}

int kvfs_gpu_get(struct kvfs_gpu *gpu, const struct kvfs_keys *keys, const struct kvfs_buffer *device_buffers, uint64_t stream,
                 int64_t *results) {
    struct gpu_call call = {.gpu = gpu, .keys = keys, .buffers = device_buffers, .results = results, .next_place = keys->data,
                            .stream = (cuda_stream)(uintptr_t)stream};
    struct kvfs_client *client = gpu->client;
    cuda_context context = NULL;
    int r = session_get(client, &call.session);
    if (r < 0)
        return r;
    pthread_mutex_lock(&gpu->lock);
    if (gpu->broken)
        r = client_fail(gpu->broken, "GPU %d is out of use since: %s", gpu->device, gpu->why);
    if (r == 0)
        r = client_check_buffers(client, device_buffers, keys->count);
    bool primary = r == 0 && (r = CUDA(gpu, cuCtxPushCurrent, gpu->primary)) == 0;
    if (r == 0)
        r = buffers_check(gpu, device_buffers, keys->count, &context);
    call.direct = r == 0 && gpu->direct && direct_session(gpu->direct, call.session) == 0;
    bool entered = r == 0 && (r = context_enter(gpu, context ? context : gpu->primary)) == 0;
    if (r == 0)
        r = stream_check(gpu, call.stream);
    if (r == 0)
        slots_recover(gpu);
    if (r == 0)
        r = lane_take(client, call.session, &call.lane);
    if (r == 0) {
        call.blocks = calloc(gpu->ring_slots, sizeof(*call.blocks));
        call.places = calloc(gpu->ring_slots, sizeof(*call.places));
        r = call.blocks && call.places ? gpu_get(&call) : client_fail(-ENOMEM, "no memory for %u blocks", gpu->ring_slots);
        TALLY(client, lookups, keys->count);
        free(call.blocks);
        free(call.places);
        lane_give(call.lane);
    }
    if (entered)
        gpu->driver->cuCtxPopCurrent(&(cuda_context){NULL});
    if (primary)
        gpu->driver->cuCtxPopCurrent(&(cuda_context){NULL});
    pthread_mutex_unlock(&gpu->lock);
    session_put(call.session);
    for (uint32_t i = 0; r < 0 && i < keys->count; i++)
        results[i] = r;
    return r < 0 ? r : (int)call.read;
}
