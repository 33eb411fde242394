/* Test double of libcuda.so.1. GPU memory is memory that no CPU access reaches (it faults), kept in a second mapping. Copies on a stream are done by
 * the stream's thread, late, so that memory reused too soon shows. Every copy checks that there is a context. Never a GPU. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NO_CONTEXT = 201 };
#define ALLOCATIONS_MAX 64
#define CONTEXT ((void *)0xc0c0)
#define LATE_NS 1000000

struct allocation {
    uint8_t *address, *content;
    size_t size;
    bool pinned;
};
struct operation {
    struct operation *next;
    void *to;
    void *from;
    size_t size;
    long delay_ns;
};
struct stream {
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    struct operation *first, **last;
    bool busy;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct allocation allocations[ALLOCATIONS_MAX];
static unsigned allocation_count;
static _Thread_local unsigned context_depth;
static struct stream *default_stream;
static atomic_bool capturing;
atomic_int fake_cuda_live_copies, fake_cuda_errors;

static struct allocation *find(uintptr_t address, size_t size) {
    struct allocation *found = NULL;
    pthread_mutex_lock(&lock);
    for (unsigned i = 0; i < allocation_count && !found; i++) {
        struct allocation *a = &allocations[i];
        uintptr_t start = (uintptr_t)a->address, end = start + a->size;
        if (address >= start && address < end && address + size <= end)
            found = a;
    }
    pthread_mutex_unlock(&lock);
    return found;
}

static void add(void *address, void *content, size_t size, bool pinned) {
    pthread_mutex_lock(&lock);
    if (allocation_count == ALLOCATIONS_MAX)
        abort();
    allocations[allocation_count++] = (struct allocation){address, content, size, pinned};
    pthread_mutex_unlock(&lock);
}

static void *content_of(uintptr_t address, size_t size) {
    struct allocation *a = find(address, size);
    return a && !a->pinned ? a->content + (address - (uintptr_t)a->address) : NULL;
}

/* ---- for tests ---- */

void *fake_cuda_alloc(size_t size) {
    int fd = memfd_create("fake_cuda", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, (off_t)size) < 0)
        abort();
    void *content = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    void *address = mmap(NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    close(fd);
    add(address, content, size, false);
    return address;
}

int fake_cuda_peek(void *to, uintptr_t from, size_t size) {
    void *content = content_of(from, size);
    if (content)
        memcpy(to, content, size);
    return content ? SUCCESS : INVALID_VALUE;
}

int fake_cuda_poke(uintptr_t to, const void *from, size_t size) {
    void *content = content_of(to, size);
    if (content)
        memcpy(content, from, size);
    return content ? SUCCESS : INVALID_VALUE;
}

void fake_cuda_capture(int on) { atomic_store(&capturing, on); }

/* ---- streams ---- */

static void *stream_thread(void *argument) {
    struct stream *stream = argument;
    pthread_mutex_lock(&stream->lock);
    for (;;) {
        while (!stream->first)
            pthread_cond_wait(&stream->changed, &stream->lock);
        struct operation *operation = stream->first;
        stream->first = operation->next;
        if (!stream->first)
            stream->last = &stream->first;
        stream->busy = true;
        pthread_mutex_unlock(&stream->lock);
        nanosleep(&(struct timespec){operation->delay_ns / 1000000000, operation->delay_ns % 1000000000}, NULL);
        memcpy(operation->to, operation->from, operation->size);
        atomic_fetch_sub(&fake_cuda_live_copies, 1);
        free(operation);
        pthread_mutex_lock(&stream->lock);
        stream->busy = false;
        pthread_cond_broadcast(&stream->changed);
    }
    return NULL;
}

static struct stream *stream_new(void) {
    struct stream *stream = calloc(1, sizeof(*stream));
    stream->last = &stream->first;
    pthread_mutex_init(&stream->lock, NULL);
    pthread_cond_init(&stream->changed, NULL);
    pthread_create(&stream->thread, NULL, stream_thread, stream);
    return stream;
}

static struct stream *stream_of(void *handle) {
    pthread_mutex_lock(&lock);
    if (!handle && !default_stream)
        default_stream = stream_new();
    pthread_mutex_unlock(&lock);
    return handle ? handle : default_stream;
}

static void enqueue(void *handle, void *to, void *from, size_t size, long delay_ns) {
    struct stream *stream = stream_of(handle);
    struct operation *operation = malloc(sizeof(*operation));
    *operation = (struct operation){NULL, to, from, size, delay_ns};
    atomic_fetch_add(&fake_cuda_live_copies, 1);
    pthread_mutex_lock(&stream->lock);
    *stream->last = operation;
    stream->last = &operation->next;
    pthread_cond_broadcast(&stream->changed);
    pthread_mutex_unlock(&stream->lock);
}

/* Acts as a kernel that computes: when its turn comes, the bytes at `from` go to `to`. */
void fake_cuda_launch(void *stream, void *to, void *from, size_t size, long delay_ns) { enqueue(stream, to, from, size, delay_ns); }

int cuStreamCreate(void **out, unsigned flags) {
    *out = stream_new();
    return flags <= 1 && context_depth ? SUCCESS : NO_CONTEXT;
}
int cuStreamDestroy_v2(void *stream) { return stream ? SUCCESS : INVALID_VALUE; }
int cuStreamSynchronize(void *handle) {
    struct stream *stream = stream_of(handle);
    pthread_mutex_lock(&stream->lock);
    while (stream->first || stream->busy)
        pthread_cond_wait(&stream->changed, &stream->lock);
    pthread_mutex_unlock(&stream->lock);
    return SUCCESS;
}
int cuStreamIsCapturing(void *stream, int *out) {
    (void)stream;
    *out = atomic_load(&capturing);
    return SUCCESS;
}

/* ---- memory ---- */

int cuPointerGetAttribute(void *out, int attribute, uint64_t pointer) {
    struct allocation *a = find(pointer, 1);
    if (!a)
        return INVALID_VALUE;
    switch (attribute) {
    case 1: *(void **)out = NULL; return SUCCESS; /* as memory of a pool: no context of its own */
    case 2: *(unsigned *)out = a->pinned ? 1 : 2; return SUCCESS;
    case 8: *(unsigned *)out = 0; return SUCCESS;
    case 9: *(int *)out = 0; return SUCCESS;
    default: return INVALID_VALUE;
    }
}
int cuDeviceGet(int *device, int ordinal) {
    *device = ordinal;
    return ordinal == 0 ? SUCCESS : INVALID_VALUE;
}
int cuDevicePrimaryCtxRetain(void **context, int device) {
    *context = CONTEXT;
    return device == 0 ? SUCCESS : INVALID_VALUE;
}
int cuCtxPushCurrent_v2(void *context) {
    context_depth++;
    return context == CONTEXT ? SUCCESS : INVALID_VALUE;
}
int cuCtxPopCurrent_v2(void **context) {
    *context = CONTEXT;
    return context_depth-- ? SUCCESS : NO_CONTEXT;
}
int cuMemHostAlloc(void **out, size_t size, unsigned flags) {
    *out = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    add(*out, *out, size, true);
    return flags <= 7 && context_depth ? SUCCESS : NO_CONTEXT;
}
int cuMemFreeHost(void *memory) { return memory ? SUCCESS : INVALID_VALUE; }

static int copy(void *handle, void *to, void *from, size_t size) {
    if (!to || !from || !context_depth) {
        atomic_fetch_add(&fake_cuda_errors, 1);
        return context_depth ? INVALID_VALUE : NO_CONTEXT;
    }
    enqueue(handle, to, from, size, LATE_NS);
    return SUCCESS;
}
int cuMemcpyHtoDAsync_v2(uint64_t to, const void *from, size_t size, void *stream) {
    return copy(stream, content_of(to, size), (void *)(uintptr_t)from, size);
}
int cuMemcpyDtoHAsync_v2(void *to, uint64_t from, size_t size, void *stream) { return copy(stream, to, content_of(from, size), size); }
