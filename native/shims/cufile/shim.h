/* Inside libkvfs_cufile.so: a libcufile.so.0 that takes reads of files on kvfs mounts to libkvfs.
 *
 * The rule of the whole library: a read is done here only where it is certain that the real libcufile would have given the same bytes and
 * the same count. All else, also in doubt, is the real library's call, with the arguments as they came. To that end a file on a kvfs mount
 * is registered with the real library too, and the application holds the real handle: whatever goes there needs no translation. Only where
 * there is no real library, or it refuses the file, is a handle ours alone ("own"); own.c then answers as the real one would.
 *
 *     calls.c      the calls that are taken over, but for batches
 *     batch.c      batches, and the threads that read for them
 *     own.c        what the real library would have answered, where it cannot
 *     registry.c   handles and buffers
 *     mounts.c     which descriptors lie on a kvfs mount, and the connection to its pool
 *     transfer.c   bytes into memory, host or GPU
 *     cuda.c       the few calls of libcuda that this takes
 *     real.c       the real library
 *     forward.S    every other symbol of libcufile: a jump to the real one
 */
#ifndef KVFS_CUFILE_SHIM_H
#define KVFS_CUFILE_SHIM_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

#include "abi.h"
#include "kvfs.h"

#define OK ((struct cufile_status){0, 0})
#define ERROR(code) ((struct cufile_status){(code), 0})

/* ---- real.c ---- */

struct real {
#define X(type, name, parameters, arguments) type (*name) parameters;
    CUFILE_CALLS(X)
#undef X
};
/* Finds and loads it at the first call; NULL: there is none. A call that an older one does not have answers CUFILE_UNSUPPORTED. */
const struct real *real(void);

/* ---- mounts.c ---- */

struct mount;
struct place { struct mount *mount; uint64_t inode; };
/* False: not a regular file on a kvfs mount, or nobody to ask about it. */
bool mounts_find(int fd, struct place *out);
/* NULL: not connected, and not to be connected now; or connected by the process that forked this one. */
struct kvfs_client *mount_client(struct mount *mount);
void mounts_forked(void);

/* ---- registry.c ---- */

struct handle {
    struct handle *next;
    void *key;                           /* what the application holds: the real library's handle, or this */
    atomic_uint refs;
    bool own;
    int fd;                              /* own: a duplicate; else -1 */
    int number;                          /* own: the application's descriptor */
    int access;                          /* O_RDONLY, O_WRONLY, O_RDWR */
    struct place place;
    unsigned forks;                      /* of the process that opened file */
    pthread_mutex_t lock;                /* opening file */
    _Atomic(struct kvfs_file *) file;
};
/* With a reference; NULL: none of ours. */
struct handle *handle_find(void *key);
void handle_put(struct handle *handle);
/* A reference more. The registry's own goes with handle_remove(). NULL: no memory. */
struct handle *handle_add(void *real_handle, int fd, const struct place *place, bool own);
void handle_remove(void *key);           /* unknown: nothing */
bool handle_number_taken(int fd);        /* by an own handle */
struct kvfs_file *handle_file(struct handle *handle); /* NULL: libkvfs cannot read it, now */

/* Registered buffers, by the address they were registered with. size 0: none there. mapped: whether it was, when it was registered. */
struct buffer { struct buffer *next; const void *base; size_t size; bool mapped; };
bool buffer_add(const void *base, size_t size); /* false: there, or no memory */
bool buffer_remove(const void *base);
struct buffer buffer_find(const void *base);

void registry_forget(void);              /* the driver was closed */
extern unsigned fork_count;              /* how often this process is a fork of one that was used */
void fork_guard(void);                   /* once before anything else */

/* ---- cuda.c ---- */

/* 0: host memory; 1: GPU memory, reached only by copies; 2: host memory known to CUDA, so mapped. */
int cuda_memory_kind(const void *pointer);
/* GPU memory, in pieces through pinned memory: fill() puts up to size bytes from offset on into it, drain() takes them; bytes or -errno.
 * Both wait until all is copied. Bytes of all pieces up to a short one, or -errno: of a piece, or of CUDA. */
typedef int64_t (*cuda_piece)(void *owner, void *memory, uint64_t size, uint64_t offset);
int64_t cuda_fill(void *destination, uint64_t size, uint64_t offset, cuda_piece fill, void *owner);
int64_t cuda_drain(const void *source, uint64_t size, uint64_t offset, cuda_piece drain, void *owner);
/* Work that is on the stream is done. False: no CUDA, an error, or the stream is being captured. */
bool cuda_synchronize(cufile_stream stream);
void cuda_forked(void);

/* ---- transfer.c ---- */

/* By libkvfs. Bytes, or -1: not done, the destination's bytes undefined. mapped: memory_is_mapped() said so of it. */
int64_t native_read(struct handle *handle, void *destination, uint64_t size, uint64_t offset, bool mapped);
/* Whether a store there is no fault; pages that are missing are faulted in. */
bool memory_is_good(const void *memory, uint64_t size);
/* The same by the process's map, touching nothing: for large memory, once. */
bool memory_is_mapped(const void *memory, uint64_t size);
/* Of an own handle, by its descriptor: bytes or -errno. */
int64_t descriptor_read(struct handle *handle, void *destination, uint64_t size, uint64_t offset);
int64_t descriptor_write(struct handle *handle, const void *source, uint64_t size, uint64_t offset);

/* ---- own.c: with the real library's error codes. Each returns as its cuFile namesake does. ---- */

struct cufile_status own_driver_open(void);
struct cufile_status own_driver_close(void);
long own_use_count(void);
struct cufile_status own_properties(struct cufile_properties *out);
struct cufile_status own_handle_register(cufile_handle *out, struct cufile_description *description);
struct cufile_status own_buffer_register(const void *base, size_t size, int flags);
struct cufile_status own_buffer_deregister(const void *base);
/* handle NULL: unknown; base is not. */
ssize_t own_read(struct handle *handle, void *base, size_t size, off_t file_offset, off_t buffer_offset);
ssize_t own_write(struct handle *handle, const void *base, size_t size, off_t file_offset, off_t buffer_offset);
ssize_t own_vector(struct handle *handle, const struct cufile_vector *vectors, size_t count, off_t file_offset, bool write);
struct cufile_status own_stream(cufile_stream stream, bool add);
/* 0, or why the real library would refuse to have it in a batch. */
int own_check_item(struct handle *handle, const struct cufile_item *item);

/* ---- batch.c ---- */

void batches_forget(void);               /* the driver was closed */
void batches_forked(void);
void batches_lock(void);                 /* around fork() */
void batches_unlock(void);

/* ---- calls.c ---- */

/* A read that both libraries would do alike. buffer: what is registered at base. */
bool read_is_plain(struct handle *handle, const void *base, uint64_t size, int64_t file_offset, int64_t buffer_offset,
                   const struct buffer *buffer);
/* handle NULL: not on a kvfs mount. */
ssize_t real_read(struct handle *handle, void *key, void *base, size_t size, off_t file_offset, off_t buffer_offset);

struct counters {
    atomic_ullong handles, native_reads, native_bytes, gpu_bytes, forwarded_reads, forwarded_bytes, writes, batches, async_reads;
};
extern struct counters counters;
#define COUNT(field, n) atomic_fetch_add_explicit(&counters.field, (n), memory_order_relaxed)

#endif
