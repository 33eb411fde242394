/* The answers of cuFile where no real library is: handles, buffers and streams as its manual gives them. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "shim.h"

#define VECTORS_MAX 1023

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static long use_count;
static cufile_stream *streams;
static size_t stream_count;

static ssize_t refuse(int code) {
    errno = code;
    return -1;
}

static ssize_t transferred(int64_t result) { return result < 0 ? refuse((int)-result) : (ssize_t)result; }

/* ---- driver ---- */

/* Most calls open the driver if it is not open yet. */
static void open_driver(void) {
    pthread_mutex_lock(&lock);
    if (use_count == 0)
        use_count = 1;
    pthread_mutex_unlock(&lock);
}

struct cufile_status emulate_driver_open(void) {
    pthread_mutex_lock(&lock);
    use_count++;
    pthread_mutex_unlock(&lock);
    return OK;
}

bool emulate_driver_close(void) {
    pthread_mutex_lock(&lock);
    bool last = use_count <= 1;
    use_count = last ? 0 : use_count - 1;
    pthread_mutex_unlock(&lock);
    return last;
}

long emulate_use_count(void) {
    pthread_mutex_lock(&lock);
    long count = use_count;
    pthread_mutex_unlock(&lock);
    return count;
}

struct cufile_status emulate_properties(struct cufile_properties *out) {
    if (!out)
        return ERROR(CUFILE_INVALID);
    *out = (struct cufile_properties){.poll_threshold_kib = 4,
                                      .direct_io_kib = 16384,
                                      .control_flags = 2 /* compatibility mode */,
                                      .features = emulate_use_count() ? 15 : 0,
                                      .cache_kib = 131072,
                                      .pinned_kib = UINT32_MAX - 3,
                                      .buffer_cache_kib = emulate_use_count() ? 1024 : 0,
                                      .batch_size = BATCH_SIZE_MAX,
                                      .batch_timeout_ms = 5};
    return OK;
}

/* ---- handles and buffers ---- */

struct cufile_status emulate_handle_register(cufile_handle *out, struct cufile_description *description) {
    struct stat status;
    struct place place;
    open_driver();
    if (!out || !description)
        return ERROR(CUFILE_INVALID);
    if (description->type != 1)
        return ERROR(CUFILE_UNSUPPORTED);
    if (fstat(description->fd, &status) < 0)
        return ERROR(CUFILE_INVALID);
    if (!S_ISREG(status.st_mode))
        return ERROR(CUFILE_NO_REGULAR_FILE);
    if (!mounts_find(description->fd, &place))
        return ERROR(CUFILE_UNSUPPORTED);
    if (handle_number_taken(description->fd))
        return ERROR(CUFILE_HANDLE_TWICE);
    struct handle *handle = handle_add(NULL, description->fd, &place, true);
    if (!handle)
        return ERROR(CUFILE_NO_MEMORY);
    *out = handle->key;
    handle_put(handle);
    return OK;
}

struct cufile_status emulate_buffer_register(const void *base, size_t size, int flags) {
    open_driver();
    if (!base || !size)
        return ERROR(CUFILE_INVALID);
    if (buffer_find(base).size)
        return ERROR(CUFILE_BUFFER_TWICE);
    if (flags & 1)
        return ERROR(CUFILE_NO_RDMA);
    return buffer_add(base, size) ? OK : ERROR(CUFILE_BUFFER_TWICE);
}

struct cufile_status emulate_buffer_deregister(const void *base) {
    if (!emulate_use_count())
        return ERROR(CUFILE_CLOSING);
    if (!base)
        return ERROR(CUFILE_INVALID);
    return buffer_remove(base) ? OK : ERROR(CUFILE_NO_BUFFER);
}

struct cufile_status emulate_stream(cufile_stream stream, bool add) {
    struct cufile_status result = ERROR(CUFILE_INVALID);
    size_t i = 0;
    pthread_mutex_lock(&lock);
    while (i < stream_count && streams[i] != stream)
        i++;
    if (add && i == stream_count) {
        cufile_stream *larger = realloc(streams, (stream_count + 1) * sizeof(*streams));
        if (larger) {
            streams = larger;
            streams[stream_count++] = stream;
        }
        result = larger ? OK : ERROR(CUFILE_NO_MEMORY);
    } else if (!add && i < stream_count) {
        streams[i] = streams[--stream_count];
        result = OK;
    }
    pthread_mutex_unlock(&lock);
    return result;
}

/* ---- transfers ---- */

/* Returns 0, or the error by which a transfer is refused. The order of checks is the real library's. */
static int check(struct handle *handle, const void *base, size_t size, off_t file_offset, off_t buffer_offset, int forbidden) {
    struct buffer buffer = buffer_find(base);
    if (file_offset < 0 || size > (size_t)INT64_MAX - (size_t)file_offset)
        return size > (size_t)INT64_MAX && file_offset >= 0 ? EPERM : CUFILE_INVALID;
    if (!handle)
        return CUFILE_NO_HANDLE;
    if (handle->access == forbidden)
        return CUFILE_OPEN_FLAGS;
    if (buffer.size && (size_t)buffer_offset + size > buffer.size)
        return CUFILE_RANGE;
    if (buffer.size && buffer_offset < 0)
        return CUFILE_INTERNAL;
    return 0;
}

ssize_t emulate_read(struct handle *handle, void *base, size_t size, off_t file_offset, off_t buffer_offset) {
    open_driver();
    int refused = check(handle, base, size, file_offset, buffer_offset, O_WRONLY);
    if (refused || !size)
        return refused ? refuse(refused) : 0;
    return transferred(descriptor_read(handle, (uint8_t *)base + buffer_offset, size, (uint64_t)file_offset));
}

ssize_t emulate_write(struct handle *handle, const void *base, size_t size, off_t file_offset, off_t buffer_offset) {
    open_driver();
    int refused = check(handle, base, size, file_offset, buffer_offset, O_RDONLY);
    if (refused || !size)
        return refused ? refuse(refused) : 0;
    return transferred(descriptor_write(handle, (const uint8_t *)base + buffer_offset, size, (uint64_t)file_offset));
}

ssize_t emulate_vector(struct handle *handle, const struct cufile_vector *vectors, size_t count, off_t file_offset, bool write) {
    ssize_t done = 0;
    if (!vectors || !count || count > VECTORS_MAX || file_offset < 0)
        return refuse(EINVAL);
    open_driver();
    for (size_t i = 0; i < count; i++) {
        int refused = check(handle, vectors[i].base, vectors[i].size, file_offset, 0, write ? O_RDONLY : O_WRONLY);
        if (refused || !vectors[i].base)
            return refuse(refused ? refused : EPERM);
    }
    for (size_t i = 0; i < count; i++) {
        const struct cufile_vector *vector = &vectors[i];
        int64_t n = write ? descriptor_write(handle, vector->base, vector->size, (uint64_t)(file_offset + done))
                          : descriptor_read(handle, vector->base, vector->size, (uint64_t)(file_offset + done));
        if (n < 0)
            return transferred(n);
        done += n;
        if ((size_t)n < vector->size)
            break;
    }
    return done;
}

int emulate_check_item(struct handle *handle, const struct cufile_item *item) {
    if (!handle)
        return CUFILE_NO_HANDLE;
    if (item->mode != 1)
        return CUFILE_SUBMIT_FAILED;
    if (item->opcode != 0 && item->opcode != 1)
        return CUFILE_OPEN_FLAGS;
    if (!item->base)
        return CUFILE_INVALID;
    int refused = check(handle, item->base, item->size, item->file_offset, item->buffer_offset, item->opcode ? O_RDONLY : O_WRONLY);
    if (refused)
        return refused == EPERM || refused == CUFILE_INTERNAL ? CUFILE_INVALID : refused;
    return item->buffer_offset < 0 ? CUFILE_INVALID : 0;
}
