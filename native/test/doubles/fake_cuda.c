/* A double of libcuda for tests: no GPU and no claim about one. Two devices whose memory is host memory behind addresses that fault when a CPU
 * touches them; one thread a stream. Calls without a context, handles of another context and invalid values fail as CUDA's do.
 *
 * It counts violations, which a real driver would forgive or answer with wrong bytes. One is a source that changes or is unregistered while its copy
 * is queued. Others are a copy from memory that is not pinned, or from another context than the destination's. A stream that blocks on the default
 * one is another. And it does what a test asks for: fake_cuda_*() below.
 */
#include <pthread.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))
#define DEVICES 2
#define PIECE ((uint64_t)2 << 20) /* of mapped memory */

enum {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    NOT_INITIALIZED = 3,
    INVALID_DEVICE = 101,
    INVALID_CONTEXT = 201,
    INVALID_HANDLE = 400,
    NOT_READY = 600,
    ILLEGAL_ADDRESS = 700,
    ALREADY_REGISTERED = 712,
    NOT_REGISTERED = 713
};

/* The kernels, as the C compiler makes them. */
static _Thread_local uint64_t thread_index;
#define GPU_LEAF(...) __VA_ARGS__
#define GPU_KERNEL static
#define GPU_FUNCTION static
#define GPU_INDEX thread_index
#include "client/gpu/leaf.h"
static const char *const kernels[] = {"kvfs_leaf_lanes", "kvfs_leaf_sums"};

struct context {
    int device;
    bool primary, destroyed;
    uint32_t retained;
    struct stream *defaults[2];
    struct context *next;
};
struct event {
    struct context *context;
    uint64_t recorded, done;
    bool destroyed;
    struct event *next;
};
enum kind { COPY_IN, COPY_OUT, FILL, RECORD, WAIT, SLEEP, LANES, SUMS };
struct operation {
    struct operation *next;
    enum kind kind;
    uint8_t *to;
    const uint8_t *from;
    uint64_t size, digest, at; /* at: of an event */
    struct event *event;
    struct gpu_leaf_keys keys; /* of a kernel, as size its leaves and as digest its nonce */
};
struct stream {
    struct context *context;
    pthread_t thread;
    struct operation *first, *last;
    bool ending, destroyed, capturing;
    struct stream *next;
};
struct memory {
    uint64_t address, size;
    uint8_t *data;
    bool reachable;
    struct context *context;
    int device;
    struct memory *next;
};
struct pinned {
    uint8_t *start;
    uint64_t size;
    struct pinned *next;
};
struct function {
    struct module *module;
    int which;
};
struct module {
    struct context *context;
    struct function functions[2];
    struct module *next;
};
struct rule {
    char function[40];
    unsigned countdown;
    int error;
    struct rule *next;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static struct context *contexts, *primaries[DEVICES];
static struct event *events;
static struct stream *streams;
static struct memory *memories;
static struct pinned *pins;
static struct rule *rules;
static struct module *modules;
static pid_t started;
static int sticky; /* an error that every call answers from now on */
static unsigned delay_us, copy_countdown, copies, violations;
static int copy_error;
static bool held, reachable;
static char violation[200];
static _Thread_local struct context *stack[64];
static _Thread_local unsigned depth;

/* Where no test can call: in a probe's process. */
__attribute__((constructor)) static void from_environment(void) { reachable = getenv("FAKE_CUDA_REACHABLE") != NULL; }

static void violate(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(violation, sizeof(violation), format, arguments);
    va_end(arguments);
    violations++;
    fprintf(stderr, "fake_cuda (a test double): %s\n", violation);
}

static uint64_t digest_of(const uint8_t *data, uint64_t size) {
    uint64_t sum = size, word;
    for (; size >= 8; data += 8, size -= 8) {
        memcpy(&word, data, 8);
        sum = (sum ^ word) * 0x9e3779b97f4a7c15ull;
    }
    for (; size; data++, size--)
        sum = (sum ^ *data) * 0x9e3779b97f4a7c15ull;
    return sum;
}

/* With the lock held. */
static int enter_rule(const char *function) {
    for (struct rule *rule = rules; rule; rule = rule->next)
        if (rule->countdown && strcmp(rule->function, function) == 0 && --rule->countdown == 0)
            return rule->error;
    return SUCCESS;
}

static int enter(const char *function, bool needs_context) {
    int error = enter_rule(function);
    if (error)
        return error;
    if (sticky)
        return sticky;
    if (started != getpid())
        return NOT_INITIALIZED;
    return needs_context && (!depth || stack[depth - 1]->destroyed) ? INVALID_CONTEXT : SUCCESS;
}
#define ENTER(needs_context)   \
    pthread_mutex_lock(&lock); \
    int r = enter(__func__, needs_context)
#define LEAVE                    \
    pthread_mutex_unlock(&lock); \
    return r

static struct memory *memory_at(uint64_t address) {
    struct memory *m = memories;
    while (m && (address < m->address || address >= m->address + m->size))
        m = m->next;
    return m;
}

static struct pinned *pinned_at(const void *start, uint64_t size) {
    struct pinned *p = pins;
    while (p && ((uint8_t *)start < p->start || (uint8_t *)start + size > p->start + p->size))
        p = p->next;
    return p;
}

/* ---- streams ---- */

static void operation_run(struct operation *o) { /* without the lock */
    if (o->kind == COPY_IN && digest_of(o->from, o->size) != o->digest) {
        pthread_mutex_lock(&lock);
        violate("the source at %p changed while its copy was queued", (const void *)o->from);
        pthread_mutex_unlock(&lock);
    }
    if (o->kind == COPY_IN || o->kind == COPY_OUT)
        memcpy(o->to, o->from, o->size);
    else if (o->kind == FILL)
        memset(o->to, (int)o->at, o->size);
    else if (o->kind == LANES)
        for (thread_index = 0; thread_index < o->size * GPU_LEAF_LANES; thread_index++)
            kvfs_leaf_lanes((const gpu_u64 *)(const void *)o->from, o->size, o->keys, (gpu_u64 *)(void *)o->to);
    else if (o->kind == SUMS)
        for (thread_index = 0; thread_index < o->size; thread_index++)
            kvfs_leaf_sums((const gpu_u64 *)(const void *)o->from, o->size, o->keys, o->digest, (gpu_u64 *)(void *)o->to);
}

static void *stream_main(void *argument) {
    struct stream *s = argument;
    pthread_mutex_lock(&lock);
    for (;;) {
        struct operation *o = s->first;
        bool copy = o && o->kind == COPY_IN;
        if (!o && s->ending)
            break;
        if (!o || (o->kind == WAIT && o->event->done < o->at) || ((copy || (o->kind >= LANES)) && held) || sticky) {
            if (s->ending && (sticky || held))
                break;
            pthread_cond_wait(&changed, &lock);
            continue;
        }
        unsigned us = o->kind == SLEEP ? (unsigned)o->at : copy ? delay_us : 0;
        pthread_mutex_unlock(&lock);
        for (; us; us -= us < 1000 ? us : 1000)
            usleep(us < 1000 ? us : 1000);
        operation_run(o);
        pthread_mutex_lock(&lock);
        if (copy && ++copies && copy_countdown && --copy_countdown == 0)
            sticky = copy_error;
        if (o->kind == RECORD && o->at > o->event->done && !sticky)
            o->event->done = o->at;
        s->first = o->next;
        s->last = s->first ? s->last : NULL;
        free(o);
        pthread_cond_broadcast(&changed);
    }
    pthread_mutex_unlock(&lock);
    return NULL;
}

static struct stream *stream_new(struct context *context) {
    struct stream *s = calloc(1, sizeof(*s));
    s->context = context;
    s->next = streams;
    streams = s;
    if (pthread_create(&s->thread, NULL, stream_main, s))
        abort();
    return s;
}

/* 0 and 1: the legacy default stream of the current context; 2: that of the thread, here one for all threads. */
static struct stream *stream_of(struct stream *handle) {
    if ((uintptr_t)handle > 2) {
        for (struct stream *s = streams; s; s = s->next)
            if (s == handle && !s->destroyed)
                return s;
        return NULL;
    }
    struct stream **place = &stack[depth - 1]->defaults[(uintptr_t)handle == 2];
    if (!*place)
        *place = stream_new(stack[depth - 1]);
    return *place;
}

static struct event *event_of(struct event *handle) {
    struct event *e = events;
    while (e && (e != handle || e->destroyed))
        e = e->next;
    return e;
}

static void enqueue(struct stream *s, struct operation o) {
    struct operation *copy = malloc(sizeof(*copy));
    *copy = o;
    copy->next = NULL;
    if (s->last)
        s->last->next = copy;
    else
        s->first = copy;
    s->last = copy;
    pthread_cond_broadcast(&changed);
}

static int stream_settle(struct stream *s) {
    while (s->first && !sticky)
        pthread_cond_wait(&changed, &lock);
    return sticky;
}

EXPORT int cuStreamCreate(struct stream **out, unsigned flags) {
    ENTER(true);
    if (r == SUCCESS) {
        if (flags != 1)
            violate("a stream without CU_STREAM_NON_BLOCKING waits for the default stream");
        *out = stream_new(stack[depth - 1]);
    }
    LEAVE;
}

EXPORT int cuStreamDestroy_v2(struct stream *handle) {
    ENTER(true);
    struct stream *s = r == SUCCESS ? stream_of(handle) : NULL;
    if (s) { /* as CUDA: what is queued is still done */
        s->destroyed = s->ending = true;
        pthread_cond_broadcast(&changed);
        pthread_mutex_unlock(&lock);
        pthread_join(s->thread, NULL);
        pthread_mutex_lock(&lock);
    } else if (r == SUCCESS) {
        r = INVALID_HANDLE;
    }
    LEAVE;
}

EXPORT int cuStreamIsCapturing(struct stream *handle, int *status) {
    ENTER(true);
    struct stream *s = r == SUCCESS ? stream_of(handle) : NULL;
    if (r == SUCCESS && !s)
        r = INVALID_HANDLE;
    *status = s && s->capturing;
    LEAVE;
}

EXPORT int cuStreamQuery(struct stream *handle) {
    ENTER(true);
    struct stream *s = r == SUCCESS ? stream_of(handle) : NULL;
    if (r == SUCCESS)
        r = !s ? INVALID_HANDLE : s->first ? NOT_READY : SUCCESS;
    LEAVE;
}

EXPORT int cuStreamSynchronize(struct stream *handle) {
    ENTER(true);
    struct stream *s = r == SUCCESS ? stream_of(handle) : NULL;
    if (r == SUCCESS)
        r = s ? stream_settle(s) : INVALID_HANDLE;
    LEAVE;
}

EXPORT int cuStreamWaitEvent(struct stream *handle, struct event *event, unsigned flags) {
    ENTER(true);
    struct stream *s = r == SUCCESS ? stream_of(handle) : NULL;
    struct event *e = event_of(event);
    if (r == SUCCESS && (!s || !e || flags))
        r = INVALID_HANDLE;
    if (r == SUCCESS)
        enqueue(s, (struct operation){.kind = WAIT, .event = e, .at = e->recorded});
    LEAVE;
}

EXPORT int cuEventCreate(struct event **out, unsigned flags) {
    (void)flags;
    ENTER(true);
    if (r == SUCCESS) {
        *out = calloc(1, sizeof(**out));
        (*out)->context = stack[depth - 1];
        (*out)->next = events;
        events = *out;
    }
    LEAVE;
}

EXPORT int cuEventDestroy_v2(struct event *event) {
    ENTER(true);
    struct event *e = event_of(event);
    if (r == SUCCESS && !e)
        r = INVALID_HANDLE;
    if (r == SUCCESS)
        e->destroyed = true;
    LEAVE;
}

EXPORT int cuEventRecord(struct event *event, struct stream *handle) {
    ENTER(true);
    struct stream *s = r == SUCCESS ? stream_of(handle) : NULL;
    struct event *e = event_of(event);
    if (r == SUCCESS && (!s || !e || e->context != s->context))
        r = INVALID_HANDLE;
    if (r == SUCCESS)
        enqueue(s, (struct operation){.kind = RECORD, .event = e, .at = ++e->recorded});
    LEAVE;
}

EXPORT int cuEventQuery(struct event *event) {
    ENTER(true);
    struct event *e = event_of(event);
    if (r == SUCCESS)
        r = !e ? INVALID_HANDLE : e->done < e->recorded ? NOT_READY : SUCCESS;
    LEAVE;
}

EXPORT int cuEventSynchronize(struct event *event) {
    ENTER(true);
    struct event *e = event_of(event);
    if (r == SUCCESS && !e)
        r = INVALID_HANDLE;
    while (r == SUCCESS && e->done < e->recorded) {
        pthread_cond_wait(&changed, &lock);
        r = sticky;
    }
    LEAVE;
}

/* ---- devices and contexts ---- */

EXPORT int cuInit(unsigned flags) {
    pthread_mutex_lock(&lock);
    if (!started)
        started = getpid();
    int r = flags ? INVALID_VALUE : enter(__func__, false);
    LEAVE;
}

EXPORT int cuGetErrorName(int error, const char **name) {
    static const struct {
        int error;
        const char *name;
    } names[] = {{SUCCESS, "CUDA_SUCCESS"},
                 {INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE"},
                 {2, "CUDA_ERROR_OUT_OF_MEMORY"},
                 {NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED"},
                 {100, "CUDA_ERROR_NO_DEVICE"},
                 {INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE"},
                 {INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT"},
                 {INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE"},
                 {NOT_READY, "CUDA_ERROR_NOT_READY"},
                 {ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS"},
                 {ALREADY_REGISTERED, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"},
                 {NOT_REGISTERED, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED"},
                 {719, "CUDA_ERROR_LAUNCH_FAILED"}};
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++)
        if (names[i].error == error) {
            *name = names[i].name;
            return SUCCESS;
        }
    *name = NULL;
    return INVALID_VALUE;
}

EXPORT int cuDriverGetVersion(int *version) {
    *version = 12080;
    return SUCCESS;
}

EXPORT int cuDeviceGetCount(int *count) {
    ENTER(false);
    *count = DEVICES;
    LEAVE;
}

EXPORT int cuDeviceGet(int *device, int ordinal) {
    ENTER(false);
    if (r == SUCCESS && (ordinal < 0 || ordinal >= DEVICES))
        r = INVALID_DEVICE;
    *device = ordinal;
    LEAVE;
}

EXPORT int cuDeviceGetName(char *name, int size, int device) {
    snprintf(name, (size_t)size, "fake CUDA device %d (a test double)", device);
    return SUCCESS;
}

EXPORT int cuDeviceTotalMem_v2(size_t *size, int device) {
    (void)device;
    *size = (size_t)1 << 30;
    return SUCCESS;
}

EXPORT int cuCtxCreate_v2(struct context **out, unsigned flags, int device) {
    (void)flags;
    ENTER(false);
    if (r == SUCCESS && (device < 0 || device >= DEVICES || depth == 64))
        r = INVALID_DEVICE;
    if (r == SUCCESS) {
        *out = calloc(1, sizeof(**out));
        (*out)->device = device;
        (*out)->next = contexts;
        contexts = stack[depth++] = *out;
    }
    LEAVE;
}

EXPORT int cuDevicePrimaryCtxRetain(struct context **out, int device) {
    ENTER(false);
    if (r == SUCCESS && (device < 0 || device >= DEVICES))
        r = INVALID_DEVICE;
    if (r == SUCCESS) {
        if (!primaries[device]) {
            primaries[device] = calloc(1, sizeof(**out));
            primaries[device]->device = device;
            primaries[device]->primary = true;
        }
        primaries[device]->retained++;
        *out = primaries[device];
    }
    LEAVE;
}

EXPORT int cuDevicePrimaryCtxRelease_v2(int device) {
    ENTER(false);
    if (r == SUCCESS && (device < 0 || device >= DEVICES || !primaries[device] || !primaries[device]->retained))
        r = INVALID_CONTEXT;
    if (r == SUCCESS)
        primaries[device]->retained--;
    LEAVE;
}

EXPORT int cuCtxPushCurrent_v2(struct context *context) {
    ENTER(false);
    if (r == SUCCESS && (!context || context->destroyed || depth == 64))
        r = INVALID_CONTEXT;
    if (r == SUCCESS)
        stack[depth++] = context;
    LEAVE;
}

EXPORT int cuCtxPopCurrent_v2(struct context **out) {
    pthread_mutex_lock(&lock); /* works whatever else does not */
    int r = depth ? SUCCESS : INVALID_CONTEXT;
    if (r == SUCCESS)
        *out = stack[--depth];
    LEAVE;
}

EXPORT int cuCtxGetCurrent(struct context **out) {
    ENTER(false);
    *out = depth ? stack[depth - 1] : NULL;
    LEAVE;
}

/* ---- memory ---- */

static struct memory *memory_new(uint64_t size, struct context *context, int device) {
    struct memory *m = calloc(1, sizeof(*m));
    uint64_t room = (size + 2 * PIECE) / PIECE * PIECE;
    void *address = mmap(NULL, room, reachable ? PROT_READ | PROT_WRITE : PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (address == MAP_FAILED)
        abort();
    m->address = (uint64_t)(uintptr_t)address;
    m->size = size;
    m->reachable = reachable;
    m->data = reachable ? address : malloc(size);
    memset(m->data, 0xee, size);
    m->context = context;
    m->device = device;
    m->next = memories;
    memories = m;
    return m;
}

EXPORT int cuMemAlloc_v2(uint64_t *out, size_t size) {
    ENTER(true);
    if (r == SUCCESS && size == 0)
        r = INVALID_VALUE;
    if (r == SUCCESS)
        *out = memory_new(size, stack[depth - 1], stack[depth - 1]->device)->address;
    LEAVE;
}

EXPORT int cuMemFree_v2(uint64_t address) {
    ENTER(true);
    for (struct stream *s = streams; s && r == SUCCESS; s = s->next) /* as CUDA: waits */
        r = stream_settle(s);
    struct memory **link = &memories;
    while (r == SUCCESS && *link && (*link)->address != address)
        link = &(*link)->next;
    struct memory *m = r == SUCCESS ? *link : NULL;
    if (m) {
        *link = m->next;
        munmap((void *)(uintptr_t)m->address, (m->size + 2 * PIECE) / PIECE * PIECE);
        if (!m->reachable)
            free(m->data);
        free(m);
    } else if (r == SUCCESS) {
        r = INVALID_VALUE;
    }
    LEAVE;
}

EXPORT int cuPointerGetAttributes(unsigned count, int *attributes, void **data, uint64_t pointer) {
    ENTER(true);
    struct memory *m = memory_at(pointer);
    struct pinned *p = pinned_at((void *)(uintptr_t)pointer, 1);
    for (unsigned i = 0; i < count && r == SUCCESS; i++) {
        switch (attributes[i]) {
        case 1: *(void **)data[i] = m ? m->context : NULL; break;
        case 2: *(unsigned *)data[i] = m ? 2 : p ? 1 : 0; break;
        case 9: *(int *)data[i] = m ? m->device : p ? 0 : -2; break;
        case 11: *(uint64_t *)data[i] = !m ? 0 : m->context ? m->address : m->address + (pointer - m->address) / PIECE * PIECE; break;
        case 12: *(size_t *)data[i] = !m ? 0 : m->context ? m->size : PIECE; break;
        default: r = INVALID_VALUE;
        }
    }
    LEAVE;
}

EXPORT int cuMemHostRegister_v2(void *memory, size_t size, unsigned flags) {
    ENTER(true);
    if (r == SUCCESS && ((uintptr_t)memory % 4096 || !size || !(flags & 1)))
        r = INVALID_VALUE;
    for (struct pinned *p = pins; p && r == SUCCESS; p = p->next)
        if (p->start < (uint8_t *)memory + size && (uint8_t *)memory < p->start + p->size)
            r = ALREADY_REGISTERED;
    if (r == SUCCESS) {
        struct pinned *p = malloc(sizeof(*p));
        *p = (struct pinned){memory, size, pins};
        pins = p;
    }
    LEAVE;
}

EXPORT int cuMemHostUnregister(void *memory) {
    ENTER(true);
    struct pinned **link = &pins;
    while (*link && (*link)->start != memory)
        link = &(*link)->next;
    struct pinned *p = *link;
    if (r == SUCCESS && !p)
        r = NOT_REGISTERED;
    if (r == SUCCESS) {
        for (struct stream *s = streams; s; s = s->next)
            for (struct operation *o = s->first; o; o = o->next)
                if (o->kind == COPY_IN && o->from >= p->start && o->from < p->start + p->size)
                    violate("%p is unregistered while a copy from it is queued", memory);
        *link = p->next;
        free(p);
    }
    LEAVE;
}

static int range_of(uint64_t address, uint64_t size, uint8_t **out) {
    struct memory *m = memory_at(address);
    if (!m || size > m->size - (address - m->address))
        return INVALID_VALUE;
    *out = m->data + (address - m->address);
    return SUCCESS;
}

EXPORT int cuMemcpyHtoDAsync_v2(uint64_t to, const void *from, size_t size, struct stream *handle) {
    ENTER(true);
    struct stream *s = r == SUCCESS ? stream_of(handle) : NULL;
    struct operation o = {.kind = COPY_IN, .from = from, .size = size};
    if (r == SUCCESS)
        r = !s ? INVALID_HANDLE : range_of(to, size, &o.to);
    if (r == SUCCESS && s->context != stack[depth - 1])
        r = INVALID_HANDLE;
    if (r == SUCCESS) {
        if (memory_at(to)->context && memory_at(to)->context != s->context)
            violate("a copy into memory of another context than the stream's");
        if (!pinned_at(from, size))
            violate("a copy from %p, %zu bytes, that are not pinned", from, size);
        o.digest = digest_of(from, size);
        enqueue(s, o);
    }
    LEAVE;
}

EXPORT int cuMemcpyDtoHAsync_v2(void *to, uint64_t from, size_t size, struct stream *handle) {
    ENTER(true);
    struct stream *s = r == SUCCESS ? stream_of(handle) : NULL;
    struct operation o = {.kind = COPY_OUT, .to = to, .size = size};
    uint8_t *source = NULL;
    if (r == SUCCESS)
        r = !s ? INVALID_HANDLE : range_of(from, size, &source);
    o.from = source;
    if (r == SUCCESS)
        enqueue(s, o);
    LEAVE;
}

EXPORT int cuMemsetD8Async(uint64_t to, unsigned char value, size_t size, struct stream *handle) {
    ENTER(true);
    struct stream *s = r == SUCCESS ? stream_of(handle) : NULL;
    struct operation o = {.kind = FILL, .size = size, .at = value};
    if (r == SUCCESS)
        r = !s ? INVALID_HANDLE : range_of(to, size, &o.to);
    if (r == SUCCESS)
        enqueue(s, o);
    LEAVE;
}

/* ---- kernels ---- */

EXPORT int cuDeviceGetAttribute(int *value, int attribute, int device) {
    ENTER(false);
    (void)device;
    *value = attribute == 75 ? 9 : 0; /* compute capability 9.0 */
    LEAVE;
}

EXPORT int cuDeviceGetUuid(uint8_t *uuid, int device) {
    ENTER(false);
    memcpy(uuid, "fake CUDA device", 16);
    uuid[15] = (uint8_t)('0' + device);
    LEAVE;
}

/* Of this module's image only the kernels' names are looked at. */
EXPORT int cuModuleLoadData(struct module **module, const void *image) {
    ENTER(true);
    if (r == SUCCESS && (!strstr(image, kernels[0]) || !strstr(image, kernels[1])))
        r = 218; /* CUDA_ERROR_INVALID_PTX */
    if (r == SUCCESS) {
        *module = calloc(1, sizeof(**module));
        (*module)->context = stack[depth - 1];
        (*module)->next = modules;
        modules = *module;
    }
    LEAVE;
}

EXPORT int cuModuleUnload(struct module *module) {
    ENTER(true);
    struct module **link = &modules;
    while (r == SUCCESS && *link && *link != module)
        link = &(*link)->next;
    if (r == SUCCESS && !*link)
        r = INVALID_HANDLE;
    if (r == SUCCESS) {
        *link = module->next;
        free(module);
    }
    LEAVE;
}

EXPORT int cuModuleGetFunction(struct function **function, struct module *module, const char *name) {
    ENTER(true);
    int i = r == SUCCESS ? 0 : 2;
    while (i < 2 && strcmp(name, kernels[i]) != 0)
        i++;
    if (i < 2)
        *function = &module->functions[i];
    else if (r == SUCCESS)
        r = 500; /* CUDA_ERROR_NOT_FOUND */
    if (i < 2)
        module->functions[i] = (struct function){module, i};
    LEAVE;
}

EXPORT int cuLaunchKernel(struct function *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,
                          unsigned block_z, unsigned shared, struct stream *handle, void **parameters, void **extra) {
    ENTER(true);
    struct stream *s = r == SUCCESS ? stream_of(handle) : NULL;
    uint64_t leaves = *(uint64_t *)parameters[1], from = *(uint64_t *)parameters[0];
    bool sums = function->which == 1;
    struct operation o = {.kind = sums ? SUMS : LANES, .size = leaves, .keys = *(struct gpu_leaf_keys *)parameters[2]};
    uint8_t *source = NULL;
    if (r == SUCCESS && (!s || extra || shared || grid_y != 1 || grid_z != 1 || block_y != 1 || block_z != 1))
        r = INVALID_VALUE;
    if (r == SUCCESS && s->context != function->module->context)
        r = INVALID_HANDLE;
    if (r == SUCCESS && (uint64_t)grid_x * block_x < leaves * (sums ? 1 : GPU_LEAF_LANES))
        violate("a kernel of %u threads for %llu leaves", grid_x * block_x, (unsigned long long)leaves);
    /* Real ones fault when they run. */
    if (r == SUCCESS && (from % 8 || range_of(from, leaves * (sums ? 64 : 4096), &source) ||
                         range_of(*(uint64_t *)parameters[sums ? 4 : 3], leaves * (sums ? 8 : 64), &o.to))) {
        violate("a kernel reads or writes beside its memory");
        r = INVALID_VALUE;
    }
    o.from = source;
    o.digest = sums ? *(uint64_t *)parameters[3] : 0;
    if (r == SUCCESS)
        enqueue(s, o);
    LEAVE;
}

/* As libnvrtc, if it is opened under that name: it compiles nothing, and says so in what it makes. */
EXPORT int nvrtcCreateProgram(void **program, const char *source, const char *name, int count, const char *const *texts, const char *const *names) {
    (void)name, (void)count, (void)texts, (void)names;
    *program = strdup(source);
    return SUCCESS;
}
EXPORT int nvrtcCompileProgram(void *program, int count, const char *const *options) {
    pthread_mutex_lock(&lock);
    (void)program, (void)options;
    int r = enter_rule(__func__);
    r = r ? r : count == 1 ? SUCCESS : INVALID_VALUE;
    LEAVE;
}
EXPORT int nvrtcGetProgramLogSize(void *program, size_t *size) { return (void)program, *size = 20, SUCCESS; }
EXPORT int nvrtcGetProgramLog(void *program, char *text) { return (void)program, strcpy(text, "a double's refusal"), SUCCESS; }
EXPORT int nvrtcGetPTXSize(void *program, size_t *size) { return *size = strlen(program) + 1, SUCCESS; }
EXPORT int nvrtcGetPTX(void *program, char *text) { return strcpy(text, program), SUCCESS; }
EXPORT int nvrtcDestroyProgram(void **program) { return free(*program), *program = NULL, SUCCESS; }

/* These go through the default stream and wait for it, as CUDA's do; other streams do not. */
EXPORT int cuMemcpyDtoH_v2(void *to, uint64_t from, size_t size) {
    int error = cuMemcpyDtoHAsync_v2(to, from, size, NULL);
    return error ? error : cuStreamSynchronize(NULL);
}

EXPORT int cuMemsetD8_v2(uint64_t to, unsigned char value, size_t size) {
    int error = cuMemsetD8Async(to, value, size, NULL);
    return error ? error : cuStreamSynchronize(NULL);
}

/* ---- what tests ask for ---- */

EXPORT int fake_cuda_is_double(void) { return 1; }

/* The nth call from now of a symbol ("cuEventRecord") answers error; 0: no more. */
EXPORT void fake_cuda_fail(const char *function, unsigned nth, int error) {
    pthread_mutex_lock(&lock);
    struct rule *rule = rules;
    while (rule && strcmp(rule->function, function) != 0)
        rule = rule->next;
    if (!rule) {
        rule = calloc(1, sizeof(*rule));
        snprintf(rule->function, sizeof(rule->function), "%s", function);
        rule->next = rules;
        rules = rule;
    }
    rule->countdown = nth;
    rule->error = error;
    pthread_mutex_unlock(&lock);
}

/* The nth copy to a device from now breaks the GPU: every call answers error until fake_cuda_heal(). */
EXPORT void fake_cuda_break(unsigned nth, int error) {
    pthread_mutex_lock(&lock);
    copy_countdown = nth;
    copy_error = error;
    pthread_mutex_unlock(&lock);
}

EXPORT void fake_cuda_heal(void) {
    pthread_mutex_lock(&lock);
    sticky = 0;
    copy_countdown = 0;
    held = false;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
}

/* Each copy to a device takes this long. */
EXPORT void fake_cuda_delay(unsigned us) {
    pthread_mutex_lock(&lock);
    delay_us = us;
    pthread_mutex_unlock(&lock);
}

/* Memory from now on may be touched by the CPU, and so by a cuFile whose DMA is one. */
EXPORT void fake_cuda_reachable(int on) {
    pthread_mutex_lock(&lock);
    reachable = on;
    pthread_mutex_unlock(&lock);
}

/* Copies to devices, and kernels, do not begin until it is undone. */
EXPORT void fake_cuda_hold(int on) {
    pthread_mutex_lock(&lock);
    held = on;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
}

/* A kernel that takes this long. */
EXPORT int fake_cuda_work(struct stream *handle, unsigned us) {
    ENTER(true);
    struct stream *s = r == SUCCESS ? stream_of(handle) : NULL;
    if (r == SUCCESS && !s)
        r = INVALID_HANDLE;
    if (r == SUCCESS)
        enqueue(s, (struct operation){.kind = SLEEP, .at = us});
    LEAVE;
}

/* As if the stream were being captured into a graph. */
EXPORT void fake_cuda_capture(struct stream *handle, int on) {
    pthread_mutex_lock(&lock);
    handle->capturing = on;
    pthread_mutex_unlock(&lock);
}

/* As cuMemMap's: an address range of 2 MiB allocations that belongs to no context. */
EXPORT uint64_t fake_cuda_map(size_t size, int device) {
    pthread_mutex_lock(&lock);
    uint64_t address = memory_new(size, NULL, device)->address;
    pthread_mutex_unlock(&lock);
    return address;
}

/* The present bytes of device memory, whatever is queued. */
EXPORT int fake_cuda_peek(void *to, uint64_t from, size_t size) {
    pthread_mutex_lock(&lock);
    uint8_t *source;
    int r = range_of(from, size, &source);
    if (r == SUCCESS)
        memcpy(to, source, size);
    LEAVE;
}

EXPORT unsigned fake_cuda_copies(void) {
    pthread_mutex_lock(&lock);
    int r = (int)copies;
    LEAVE;
}

EXPORT unsigned fake_cuda_violations(void) {
    pthread_mutex_lock(&lock);
    int r = (int)violations;
    LEAVE;
}

EXPORT const char *fake_cuda_violation(void) { return violation; }

/* Handles that are still there: streams, events, registrations, retained contexts, modules. */
EXPORT unsigned fake_cuda_left(void) {
    pthread_mutex_lock(&lock);
    int r = 0;
    for (struct module *m = modules; m; m = m->next)
        r++;
    for (struct stream *s = streams; s; s = s->next)
        r += !s->destroyed && s != s->context->defaults[0] && s != s->context->defaults[1];
    for (struct event *e = events; e; e = e->next)
        r += !e->destroyed;
    for (struct pinned *p = pins; p; p = p->next)
        r++;
    for (int i = 0; i < DEVICES; i++)
        r += primaries[i] ? (int)primaries[i]->retained : 0;
    LEAVE;
}
