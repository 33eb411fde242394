/* The part of libcufile's binary interface that these files use, on 64-bit Linux. The declarations are our own, from its documentation and from
 * observing libcufile 1.20. Names are ours; layouts and numbers are libcufile's. */
#ifndef KVFS_CUFILE_ABI_H
#define KVFS_CUFILE_ABI_H

#include <assert.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>
#include <time.h>

struct cufile_status {
    int error;
    int cuda_error;
}; /* error: 0, or one of these */
enum {
    CUFILE_NO_DRIVER = 5001,
    CUFILE_CLOSING = 5006,
    CUFILE_UNSUPPORTED = 5008,
    CUFILE_RANGE = 5017,
    CUFILE_NO_REGULAR_FILE = 5018,
    CUFILE_OPEN_FLAGS = 5019,
    CUFILE_NOT_DIRECT = 5020,
    CUFILE_INVALID = 5022,
    CUFILE_BUFFER_TWICE = 5023,
    CUFILE_NO_BUFFER = 5024,
    CUFILE_NO_HANDLE = 5027,
    CUFILE_HANDLE_TWICE = 5028,
    CUFILE_INTERNAL = 5030,
    CUFILE_DISABLED = 5034,
    CUFILE_SUBMIT_FAILED = 5035,
    CUFILE_BATCH_FULL = 5037,
    CUFILE_SUBMIT_REFUSED = 5040,
    CUFILE_NO_MEMORY = 5043,
    CUFILE_NO_RDMA = 5045,
    CUFILE_NO_BATCH = 5047
};

typedef void *cufile_handle;
typedef void *cufile_batch;
typedef void *cufile_stream; /* a CUstream */

struct cufile_description {
    int type; /* 1: a descriptor */
    union {
        int fd;
        void *handle;
    };
    const void *operations;
};
static_assert(sizeof(struct cufile_description) == 24, "ABI");

struct cufile_item { /* of a batch */
    int mode;        /* 1 */
    void *base;
    int64_t file_offset, buffer_offset;
    size_t size;
    cufile_handle handle;
    int opcode; /* 0 read, 1 write */
    void *cookie;
};
static_assert(sizeof(struct cufile_item) == 64, "ABI");

enum { CUFILE_COMPLETE = 0x10, CUFILE_FAILED = 0x40 };
struct cufile_event {
    void *cookie;
    int status;
    size_t result;
};
static_assert(sizeof(struct cufile_event) == 24, "ABI");

struct cufile_vector {
    void *base;
    size_t size;
};

struct cufile_properties {
    uint32_t major_version, minor_version;
    size_t poll_threshold_kib, direct_io_kib;
    uint32_t status_flags, control_flags, features, cache_kib, buffer_cache_kib, pinned_kib, batch_size, batch_timeout_ms;
};
static_assert(sizeof(struct cufile_properties) == 56, "ABI");

/* The calls that are taken over: result, name, parameters, arguments. */
#define CUFILE_CALLS(X)                                                                                                                \
    X(struct cufile_status, DriverOpen, (void), ())                                                                                    \
    X(struct cufile_status, DriverClose, (void), ())                                                                                   \
    X(struct cufile_status, DriverClose_v2, (void), ())                                                                                \
    X(long, UseCount, (void), ())                                                                                                      \
    X(struct cufile_status, DriverGetProperties, (struct cufile_properties * out), (out))                                              \
    X(struct cufile_status, GetVersion, (int *out), (out))                                                                             \
    X(struct cufile_status, HandleRegister, (cufile_handle * out, struct cufile_description * description), (out, description))        \
    X(void, HandleDeregister, (cufile_handle handle), (handle))                                                                        \
    X(struct cufile_status, BufRegister, (const void *base, size_t size, int flags), (base, size, flags))                              \
    X(struct cufile_status, BufDeregister, (const void *base), (base))                                                                 \
    X(ssize_t, Read, (cufile_handle handle, void *base, size_t size, off_t file_offset, off_t buffer_offset),                          \
      (handle, base, size, file_offset, buffer_offset))                                                                                \
    X(ssize_t, Write, (cufile_handle handle, const void *base, size_t size, off_t file_offset, off_t buffer_offset),                   \
      (handle, base, size, file_offset, buffer_offset))                                                                                \
    X(ssize_t, Readv, (cufile_handle handle, const struct cufile_vector *vectors, size_t count, off_t file_offset, unsigned flags),    \
      (handle, vectors, count, file_offset, flags))                                                                                    \
    X(ssize_t, Writev, (cufile_handle handle, const struct cufile_vector *vectors, size_t count, off_t file_offset, unsigned flags),   \
      (handle, vectors, count, file_offset, flags))                                                                                    \
    X(struct cufile_status, BatchIOSetUp, (cufile_batch * out, unsigned count), (out, count))                                          \
    X(struct cufile_status, BatchIOSubmit, (cufile_batch batch, unsigned count, struct cufile_item *items, unsigned flags),            \
      (batch, count, items, flags))                                                                                                    \
    X(struct cufile_status, BatchIOGetStatus,                                                                                          \
      (cufile_batch batch, unsigned least, unsigned *count, struct cufile_event *events, struct timespec *timeout),                    \
      (batch, least, count, events, timeout))                                                                                          \
    X(struct cufile_status, BatchIOCancel, (cufile_batch batch), (batch))                                                              \
    X(void, BatchIODestroy, (cufile_batch batch), (batch))                                                                             \
    X(struct cufile_status, ReadAsync,                                                                                                 \
      (cufile_handle handle, void *base, size_t *size, off_t *file_offset, off_t *buffer_offset, ssize_t *done, cufile_stream stream), \
      (handle, base, size, file_offset, buffer_offset, done, stream))                                                                  \
    X(struct cufile_status, WriteAsync,                                                                                                \
      (cufile_handle handle, void *base, size_t *size, off_t *file_offset, off_t *buffer_offset, ssize_t *done, cufile_stream stream), \
      (handle, base, size, file_offset, buffer_offset, done, stream))                                                                  \
    X(struct cufile_status, StreamRegister, (cufile_stream stream, unsigned flags), (stream, flags))                                   \
    X(struct cufile_status, StreamDeregister, (cufile_stream stream), (stream))

#endif
