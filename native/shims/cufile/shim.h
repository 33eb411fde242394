/* Inside libkvfs_cufile.so: a libcufile.so.0 that takes reads of files on kvfs mounts to libkvfs.
 *
 * The rule of the whole library: a read is done here only if the real libcufile would surely have given the same bytes and count. All else, also in
 * doubt, is the real library's call, with the arguments as they came. To that end a file on a kvfs mount is registered with the real library too, and
 * the application holds the real handle. Calls that go there need no translation. Only where there is no real library, or it refuses the file, is a
 * handle ours alone ("own"); emulate.c then answers as the real one would.
 *
 * Each file uses those above it:
 *
 *     real.c       the real library
 *     counters.c   what is counted, and told at the end
 *     cuda.c       the few calls of libcuda that this takes
 *     memory.c     whether memory may be read into
 *     mounts.c     which descriptors lie on a kvfs mount, and the connection to its pool
 *     registry.c   handles and buffers
 *     transfer.c   bytes into memory, host or GPU
 *     emulate.c    what the real library would have answered, where it cannot
 *     batch.c      batches, and the threads that read for them
 *     fork.c       what all of these must do when the process forks
 *     calls.c      the calls that are taken over
 *     forward.S    every other symbol of libcufile: a jump to the real one
 */
#ifndef KVFS_CUFILE_SHIM_H
#define KVFS_CUFILE_SHIM_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

#include "abi.h"
#include "kvfs.h"

#define BATCH_SIZE_MAX 128
#define OK ((struct cufile_status){0, 0})
#define ERROR(code) ((struct cufile_status){(code), 0})

/* ---- real.c ---- */

struct real {
#define X(type, name, parameters, arguments) type(*name) parameters;
    CUFILE_CALLS(X)
#undef X
};
/* Finds and loads it at the first call; NULL: it does not exist. A call that an older library lacks answers CUFILE_UNSUPPORTED. */
const struct real *real(void);

/* ---- counters.c ---- */

struct counters {
    atomic_ullong handles, native_reads, native_bytes, gpu_bytes, forwarded_reads, forwarded_bytes, writes, batches, async_reads;
};
extern struct counters counters;
#define COUNT(field, n) atomic_fetch_add_explicit(&counters.field, (n), memory_order_relaxed)

/* ---- cuda.c ---- */

/* 0: host memory; 1: GPU memory, reached only by copies; 2: host memory known to CUDA, so mapped. */
int cuda_memory_kind(const void *pointer);
/* GPU memory, in pieces through pinned memory. fill() puts up to size bytes from offset on into a piece, drain() takes them; bytes or -errno. Both
 * wait until all is copied. Bytes of all pieces up to a short one, or -errno of a piece or of CUDA. */
typedef int64_t (*cuda_piece)(void *owner, void *memory, uint64_t size, uint64_t offset);
int64_t cuda_fill(void *destination, uint64_t size, uint64_t offset, cuda_piece fill, void *owner);
int64_t cuda_drain(const void *source, uint64_t size, uint64_t offset, cuda_piece drain, void *owner);
/* Waits until earlier work on the stream is done. False: no CUDA, an error, or the stream is being captured. */
bool cuda_synchronize(cufile_stream stream);
void cuda_forked(void);

/* ---- memory.c ---- */

/* True: a store there does not fault. Missing pages are faulted in. */
bool memory_is_good(const void *memory, uint64_t size);
/* The same check by the process's map, touching nothing: for large memory, once. */
bool memory_is_mapped(const void *memory, uint64_t size);
bool host_memory_is_good(const void *memory, uint64_t size);

/* ---- mounts.c ---- */

struct mount;
struct place {
    struct mount *mount;
    uint64_t inode;
};
/* False: not a regular file on a kvfs mount, or no daemon to ask about it. */
bool mounts_find(int fd, struct place *out);
/* NULL: not connected, and no attempt is due; or connected by the process that forked this one. */
struct kvfs_client *mount_client(struct mount *mount);
char *mount_below(const struct mount *mount, int fd); /* an open file's path below the mount point, malloc'ed; NULL: it has none */
void mounts_forked(void);
extern unsigned fork_count; /* how often this process is a fork of one that was used */

/* ---- registry.c ---- */

struct handle {
    struct handle *next;
    void *key; /* the application's handle: the real library's, or this */
    atomic_uint refs;
    bool own;
    int fd;     /* own: a duplicate; else -1 */
    int number; /* own: the application's descriptor */
    int access; /* O_RDONLY, O_WRONLY, O_RDWR */
    struct place place;
    char *path;           /* below the mount point, or NULL: libkvfs finds another node's block by it */
    unsigned forks;       /* of the process that opened file */
    pthread_mutex_t lock; /* opening file */
    _Atomic(struct kvfs_file *) file;
};
/* Returned with a reference; NULL: not a handle of ours. */
struct handle *handle_find(void *key);
void handle_put(struct handle *handle);
/* Takes one more reference. handle_remove() puts the registry's own reference. NULL: no memory. */
struct handle *handle_add(void *real_handle, int fd, const struct place *place, bool own);
void handle_remove(void *key);                        /* unknown: nothing */
bool handle_number_taken(int fd);                     /* by an own handle */
struct kvfs_file *handle_file(struct handle *handle); /* NULL: libkvfs cannot read it, now */

/* Registered buffers, by the address they were registered with. size 0: none is there. mapped: its state at registration. */
struct buffer {
    struct buffer *next;
    const void *base;
    size_t size;
    bool mapped;
};
bool buffer_add(const void *base, size_t size); /* false: there, or no memory */
bool buffer_remove(const void *base);
struct buffer buffer_find(const void *base);

void registry_forget(void); /* the driver was closed */
void registry_lock(void);   /* around fork() */
void registry_unlock(void);
void registry_forked(void);

/* ---- transfer.c ---- */

/* Reads by libkvfs. Bytes, or -1: not done, the destination's bytes undefined. mapped: the result of memory_is_mapped(). */
int64_t native_read(struct handle *handle, void *destination, uint64_t size, uint64_t offset, bool mapped);
/* Read and write an own handle by its descriptor: bytes or -errno. */
int64_t descriptor_read(struct handle *handle, void *destination, uint64_t size, uint64_t offset);
int64_t descriptor_write(struct handle *handle, const void *source, uint64_t size, uint64_t offset);
/* A read that both libraries would do alike. buffer: the registered one at base. */
bool read_is_plain(struct handle *handle, const void *base, uint64_t size, int64_t file_offset, int64_t buffer_offset, const struct buffer *buffer);
/* handle NULL: not on a kvfs mount. */
ssize_t real_read(struct handle *handle, void *key, void *base, size_t size, off_t file_offset, off_t buffer_offset);

/* ---- emulate.c: with the real library's error codes. Each returns as its cuFile namesake does, but for emulate_driver_close(). ---- */

struct cufile_status emulate_driver_open(void);
bool emulate_driver_close(void); /* true: the last one; then batches and the registry are to be forgotten */
long emulate_use_count(void);
struct cufile_status emulate_properties(struct cufile_properties *out);
struct cufile_status emulate_handle_register(cufile_handle *out, struct cufile_description *description);
struct cufile_status emulate_buffer_register(const void *base, size_t size, int flags);
struct cufile_status emulate_buffer_deregister(const void *base);
/* handle NULL: unknown; base is not. */
ssize_t emulate_read(struct handle *handle, void *base, size_t size, off_t file_offset, off_t buffer_offset);
ssize_t emulate_write(struct handle *handle, const void *base, size_t size, off_t file_offset, off_t buffer_offset);
ssize_t emulate_vector(struct handle *handle, const struct cufile_vector *vectors, size_t count, off_t file_offset, bool write);
struct cufile_status emulate_stream(cufile_stream stream, bool add);
/* Returns 0, or the error by which the real library would refuse it in a batch. */
int emulate_check_item(struct handle *handle, const struct cufile_item *item);

/* ---- batch.c ---- */

/* A batch of the application: the items that are read here, and a count of the real library's items. */
struct batch {
    struct batch *next;
    void *key; /* the real library's batch, or this */
    bool own;
    unsigned refs;
    unsigned capacity;
    unsigned epoch;            /* reads submitted before the last clear() are dropped */
    unsigned waiting, running; /* queued or running; running, of any epoch */
    unsigned foreign;          /* with the real library */
    unsigned done_count;
    struct cufile_event done[BATCH_SIZE_MAX];
    pthread_cond_t changed;
};
struct batch *batch_find(void *key); /* with a reference; NULL: none of ours */
void batch_put(struct batch *batch);
/* real_batch NULL: *key becomes ours. False: no memory. */
bool batch_add(void *real_batch, unsigned capacity, void **key);
void batch_remove(void *key);          /* unknown: nothing */
void batch_clear(struct batch *batch); /* drops items that were submitted and not yet seen, and waits for reads that have begun */
bool batch_is_idle(struct batch *batch);
struct cufile_status batch_submit(struct batch *batch, unsigned count, const struct cufile_item *items, unsigned flags);
struct cufile_status batch_status(struct batch *batch, unsigned least, unsigned *count, struct cufile_event *events, struct timespec *timeout);
/* Events of the real library; least 0: only those that are there. */
struct cufile_status batch_take_foreign(struct batch *batch, unsigned least, unsigned *count, struct cufile_event *events, struct timespec *timeout);

void batches_forget(void); /* the driver was closed */
void batches_forked(void);
void batches_lock(void); /* around fork() */
void batches_unlock(void);

/* ---- fork.c ---- */

void fork_guard(void); /* once before anything else */

#endif
