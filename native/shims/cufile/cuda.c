/* The CUDA driver by dlopen(): the kind of memory behind a pointer, and copies to and from device memory in pieces. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>

#include "shim.h"

#define PIECE_SIZE (4u << 20)

/* Names and numbers of the CUDA driver's interface. */
typedef uint64_t device_pointer;
enum { ATTRIBUTE_CONTEXT = 1, ATTRIBUTE_MEMORY_TYPE = 2, ATTRIBUTE_IS_MANAGED = 8, ATTRIBUTE_DEVICE = 9 };
enum { MEMORY_TYPE_HOST = 1 };
enum { HOST_ALLOC_PORTABLE = 1, STREAM_NON_BLOCKING = 1 };
#define CUDA_CALLS(X)                                                                                          \
    X(PointerGetAttribute, cuPointerGetAttribute, (void *out, int attribute, device_pointer pointer))          \
    X(CtxPushCurrent, cuCtxPushCurrent_v2, (void *context))                                                    \
    X(CtxPopCurrent, cuCtxPopCurrent_v2, (void **context))                                                     \
    X(DeviceGet, cuDeviceGet, (int *device, int ordinal))                                                      \
    X(DevicePrimaryCtxRetain, cuDevicePrimaryCtxRetain, (void **context, int device))                          \
    X(MemHostAlloc, cuMemHostAlloc, (void **out, size_t size, unsigned flags))                                 \
    X(MemFreeHost, cuMemFreeHost, (void *memory))                                                              \
    X(StreamCreate, cuStreamCreate, (void **stream, unsigned flags))                                           \
    X(StreamDestroy, cuStreamDestroy_v2, (void *stream))                                                       \
    X(StreamSynchronize, cuStreamSynchronize, (void *stream))                                                  \
    X(StreamIsCapturing, cuStreamIsCapturing, (void *stream, int *capturing))                                  \
    X(MemcpyHtoDAsync, cuMemcpyHtoDAsync_v2, (device_pointer to, const void *from, size_t size, void *stream)) \
    X(MemcpyDtoHAsync, cuMemcpyDtoHAsync_v2, (void *to, device_pointer from, size_t size, void *stream))

static struct {
#define X(name, symbol, parameters) int(*name) parameters;
    CUDA_CALLS(X)
#undef X
} driver;

/* Two pieces at a time: one is copied while the other is read. */
struct copier {
    struct copier *next;
    void *context;
    struct {
        void *memory, *stream;
    } slots[2];
};

#define CONTEXTS_MAX 64

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static atomic_bool found;
static struct copier *idle;
static void *primary_contexts[CONTEXTS_MAX]; /* by device; retained, for allocations that have no context of their own */

/* A program that has GPU memory has loaded libcuda, so it is looked up, never loaded. */
static bool have_driver(void) {
    if (atomic_load_explicit(&found, memory_order_acquire))
        return true;
    void *library = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
    if (!library)
        return false;
    bool complete = true;
    pthread_mutex_lock(&lock);
#define X(name, symbol, parameters) complete = (driver.name = dlsym(library, #symbol)) && complete;
    CUDA_CALLS(X)
#undef X
    atomic_store_explicit(&found, complete, memory_order_release);
    pthread_mutex_unlock(&lock);
    dlclose(library); /* the library's first loader holds it */
    return complete;
}

int cuda_memory_kind(const void *pointer) {
    unsigned type = 0, managed = 0;
    if (!have_driver() || driver.PointerGetAttribute(&type, ATTRIBUTE_MEMORY_TYPE, (uintptr_t)pointer) != 0)
        return 0;
    driver.PointerGetAttribute(&managed, ATTRIBUTE_IS_MANAGED, (uintptr_t)pointer);
    return type == MEMORY_TYPE_HOST && !managed ? 2 : 1;
}

/* NULL: none. */
static void *context_of(const void *pointer) {
    void *context = NULL;
    int ordinal = -1, device;
    if (driver.PointerGetAttribute(&context, ATTRIBUTE_CONTEXT, (uintptr_t)pointer) == 0 && context)
        return context;
    if (driver.PointerGetAttribute(&ordinal, ATTRIBUTE_DEVICE, (uintptr_t)pointer) != 0 || ordinal < 0 || ordinal >= CONTEXTS_MAX)
        return NULL;
    pthread_mutex_lock(&lock);
    if (!primary_contexts[ordinal] && driver.DeviceGet(&device, ordinal) == 0)
        driver.DevicePrimaryCtxRetain(&primary_contexts[ordinal], device);
    context = primary_contexts[ordinal];
    pthread_mutex_unlock(&lock);
    return context;
}

static void copier_free(struct copier *copier) {
    for (int i = 0; i < 2; i++) {
        if (copier->slots[i].stream)
            driver.StreamDestroy(copier->slots[i].stream);
        if (copier->slots[i].memory)
            driver.MemFreeHost(copier->slots[i].memory);
    }
    free(copier);
}

/* The context is the thread's own. There are as many as there ever were calls at one time. */
static struct copier *copier_take(void *context) {
    pthread_mutex_lock(&lock);
    struct copier **link = &idle;
    while (*link && (*link)->context != context)
        link = &(*link)->next;
    struct copier *copier = *link;
    if (copier)
        *link = copier->next;
    pthread_mutex_unlock(&lock);
    if (copier || !(copier = calloc(1, sizeof(*copier))))
        return copier;
    copier->context = context;
    for (int i = 0; i < 2; i++) {
        if (driver.MemHostAlloc(&copier->slots[i].memory, PIECE_SIZE, HOST_ALLOC_PORTABLE) != 0 ||
            driver.StreamCreate(&copier->slots[i].stream, STREAM_NON_BLOCKING) != 0) {
            copier_free(copier);
            return NULL;
        }
    }
    return copier;
}

static void copier_give(struct copier *copier) {
    pthread_mutex_lock(&lock);
    copier->next = idle;
    idle = copier;
    pthread_mutex_unlock(&lock);
}

static uint64_t piece_size(uint64_t left) { return left < PIECE_SIZE ? left : PIECE_SIZE; }

static int64_t fill_with(struct copier *copier, device_pointer to, uint64_t size, uint64_t offset, cuda_piece fill, void *owner) {
    uint64_t done = 0;
    int64_t result = 0;
    for (unsigned i = 0; done < size; i ^= 1) {
        uint64_t wanted = piece_size(size - done);
        if (driver.StreamSynchronize(copier->slots[i].stream) != 0)
            return -EIO;
        result = fill(owner, copier->slots[i].memory, wanted, offset + done);
        if (result > 0 && driver.MemcpyHtoDAsync(to + done, copier->slots[i].memory, (size_t)result, copier->slots[i].stream) != 0)
            result = -EIO;
        if (result < 0)
            break;
        done += (uint64_t)result;
        if ((uint64_t)result < wanted)
            break;
    }
    return result < 0 ? result : (int64_t)done;
}

static int64_t drain_with(struct copier *copier, device_pointer from, uint64_t size, uint64_t offset, cuda_piece drain, void *owner) {
    uint64_t done = 0;
    int64_t result = 0;
    for (unsigned i = 0; done < size; i ^= 1) {
        uint64_t wanted = piece_size(size - done);
        if (driver.MemcpyDtoHAsync(copier->slots[i].memory, from + done, wanted, copier->slots[i].stream) != 0 ||
            driver.StreamSynchronize(copier->slots[i].stream) != 0)
            return -EIO;
        result = drain(owner, copier->slots[i].memory, wanted, offset + done);
        if (result < 0)
            return result;
        done += (uint64_t)result;
        if ((uint64_t)result < wanted)
            break;
    }
    return (int64_t)done;
}

static int64_t move(const void *device_memory, uint64_t size, uint64_t offset, cuda_piece piece, void *owner, bool fill) {
    void *context = have_driver() ? context_of(device_memory) : NULL;
    if (!context || driver.CtxPushCurrent(context) != 0)
        return -EIO;
    int64_t result = -ENOMEM;
    struct copier *copier = copier_take(context);
    if (copier) {
        result = (fill ? fill_with : drain_with)(copier, (uintptr_t)device_memory, size, offset, piece, owner);
        bool ended = driver.StreamSynchronize(copier->slots[0].stream) == 0;
        ended = driver.StreamSynchronize(copier->slots[1].stream) == 0 && ended;
        if (ended)
            copier_give(copier); /* else a copy may still read its memory, which then stays */
        else
            result = -EIO;
    }
    driver.CtxPopCurrent(&context);
    return result;
}

int64_t cuda_fill(void *destination, uint64_t size, uint64_t offset, cuda_piece fill, void *owner) {
    return move(destination, size, offset, fill, owner, true);
}

int64_t cuda_drain(const void *source, uint64_t size, uint64_t offset, cuda_piece drain, void *owner) {
    return move(source, size, offset, drain, owner, false);
}

bool cuda_synchronize(cufile_stream stream) {
    int capturing = 0;
    return have_driver() && driver.StreamIsCapturing(stream, &capturing) == 0 && !capturing && driver.StreamSynchronize(stream) == 0;
}

void cuda_forked(void) {
    pthread_mutex_init(&lock, NULL);
    idle = NULL; /* CUDA does not survive fork() */
}
