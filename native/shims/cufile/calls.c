/* The exported calls of cuFile: each goes to libkvfs for a file of a pool, and to the real library for any other. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>

#include "shim.h"

#define EXPORT __attribute__((visibility("default")))
#define VERSION 1200 /* of libcufile, 1.20: the interface's version when there is no other library */

/* Exported functions have the signatures of the real library. */
#define X(type, name, parameters, arguments) EXPORT type cuFile##name parameters;
CUFILE_CALLS(X)
#undef X

/* ---- driver ---- */

struct cufile_status cuFileDriverOpen(void) {
    fork_guard();
    const struct real *library = real();
    return library ? library->DriverOpen() : emulate_driver_open();
}

static struct cufile_status close_driver(struct cufile_status (*close_real)(void)) {
    long (*use_count)(void) = real()->UseCount;
    if (use_count() <= 1)
        batches_forget();
    struct cufile_status result = close_real();
    if (use_count() <= 0)
        registry_forget();
    return result;
}

static struct cufile_status emulated_close(void) {
    if (emulate_driver_close()) {
        batches_forget();
        registry_forget();
    }
    return OK;
}

struct cufile_status cuFileDriverClose(void) {
    fork_guard();
    const struct real *library = real();
    return library ? close_driver(library->DriverClose) : emulated_close();
}

struct cufile_status cuFileDriverClose_v2(void) {
    fork_guard();
    const struct real *library = real();
    return library ? close_driver(library->DriverClose_v2) : emulated_close();
}

long cuFileUseCount(void) {
    const struct real *library = real();
    return library ? library->UseCount() : emulate_use_count();
}

struct cufile_status cuFileDriverGetProperties(struct cufile_properties *out) {
    const struct real *library = real();
    return library ? library->DriverGetProperties(out) : emulate_properties(out);
}

struct cufile_status cuFileGetVersion(int *out) {
    const struct real *library = real();
    if (library)
        return library->GetVersion(out);
    if (!out)
        return ERROR(CUFILE_INVALID);
    *out = VERSION;
    return OK;
}

/* ---- handles and buffers ---- */

/* The errors by which the real library refuses a file because of its filesystem. */
static bool refuses_file(int error) {
    return error == CUFILE_UNSUPPORTED || error == CUFILE_NOT_DIRECT || error == CUFILE_DISABLED || error == CUFILE_NO_HANDLE;
}

struct cufile_status cuFileHandleRegister(cufile_handle *out, struct cufile_description *description) {
    fork_guard();
    const struct real *library = real();
    struct place place;
    if (!library)
        return emulate_handle_register(out, description);
    struct cufile_status result = library->HandleRegister(out, description);
    if (!out || !description || description->type != 1 || (result.error && !refuses_file(result.error)) || !mounts_find(description->fd, &place))
        return result;
    if (result.error)
        return emulate_handle_register(out, description);
    handle_put(handle_add(*out, description->fd, &place, false)); /* no memory: treated like any other handle */
    return result;
}

void cuFileHandleDeregister(cufile_handle key) {
    struct handle *handle = handle_find(key);
    const struct real *library = real();
    handle_remove(key);
    if (library && !(handle && handle->own))
        library->HandleDeregister(key);
    handle_put(handle);
}

struct cufile_status cuFileBufRegister(const void *base, size_t size, int flags) {
    fork_guard();
    const struct real *library = real();
    if (!library)
        return emulate_buffer_register(base, size, flags);
    struct cufile_status result = library->BufRegister(base, size, flags);
    if (!result.error)
        buffer_add(base, size);
    return result;
}

struct cufile_status cuFileBufDeregister(const void *base) {
    const struct real *library = real();
    if (!library)
        return emulate_buffer_deregister(base);
    struct cufile_status result = library->BufDeregister(base);
    if (!result.error)
        buffer_remove(base);
    return result;
}

/* ---- reads and writes ---- */

static int64_t taken_read(struct handle *handle, void *base, uint64_t size, int64_t file_offset, int64_t buffer_offset) {
    struct buffer buffer = buffer_find(base);
    if (!read_is_plain(handle, base, size, file_offset, buffer_offset, &buffer))
        return -1;
    return native_read(handle, (uint8_t *)base + buffer_offset, size, (uint64_t)file_offset, buffer.mapped);
}

static bool is_own(const struct handle *handle) { return !real() || (handle && handle->own); }

static ssize_t invalid(void) {
    errno = EINVAL;
    return -1;
}

ssize_t cuFileRead(cufile_handle key, void *base, size_t size, off_t file_offset, off_t buffer_offset) {
    fork_guard();
    struct handle *handle = handle_find(key);
    ssize_t result = handle ? taken_read(handle, base, size, file_offset, buffer_offset) : -1;
    if (result < 0) {
        if (!is_own(handle))
            result = real_read(handle, key, base, size, file_offset, buffer_offset);
        else
            result = key && base ? emulate_read(handle, base, size, file_offset, buffer_offset) : invalid();
    }
    handle_put(handle);
    return result;
}

ssize_t cuFileWrite(cufile_handle key, const void *base, size_t size, off_t file_offset, off_t buffer_offset) {
    fork_guard();
    struct handle *handle = handle_find(key);
    ssize_t result;
    if (!is_own(handle))
        result = real()->Write(key, base, size, file_offset, buffer_offset);
    else
        result = key && base ? emulate_write(handle, base, size, file_offset, buffer_offset) : invalid();
    if (handle)
        COUNT(writes, 1);
    handle_put(handle);
    return result;
}

static int64_t taken_readv(struct handle *handle, const struct cufile_vector *vectors, size_t count, off_t file_offset) {
    int64_t done = 0;
    if (!vectors || !count || count > 1023)
        return -1;
    for (size_t i = 0; i < count; i++) {
        struct buffer buffer = buffer_find(vectors[i].base);
        if (vectors[i].size && !read_is_plain(handle, vectors[i].base, vectors[i].size, file_offset, 0, &buffer))
            return -1;
    }
    for (size_t i = 0; i < count; i++) {
        if (!vectors[i].size)
            continue;
        int64_t n = taken_read(handle, vectors[i].base, vectors[i].size, file_offset + done, 0);
        if (n < 0)
            return -1;
        done += n;
        if ((size_t)n < vectors[i].size)
            break;
    }
    return done;
}

ssize_t cuFileReadv(cufile_handle key, const struct cufile_vector *vectors, size_t count, off_t file_offset, unsigned flags) {
    fork_guard();
    struct handle *handle = handle_find(key);
    ssize_t result = handle ? taken_readv(handle, vectors, count, file_offset) : -1;
    if (result < 0) {
        if (!is_own(handle))
            result = real()->Readv(key, vectors, count, file_offset, flags);
        else
            result = key ? emulate_vector(handle, vectors, count, file_offset, false) : invalid();
    }
    handle_put(handle);
    return result;
}

ssize_t cuFileWritev(cufile_handle key, const struct cufile_vector *vectors, size_t count, off_t file_offset, unsigned flags) {
    fork_guard();
    struct handle *handle = handle_find(key);
    ssize_t result;
    if (!is_own(handle))
        result = real()->Writev(key, vectors, count, file_offset, flags);
    else
        result = key ? emulate_vector(handle, vectors, count, file_offset, true) : invalid();
    if (handle)
        COUNT(writes, 1);
    handle_put(handle);
    return result;
}

/* ---- streams: a call waits for earlier work on the stream, and is done when it returns ---- */

struct cufile_status cuFileReadAsync(cufile_handle key, void *base, size_t *size, off_t *file_offset, off_t *buffer_offset, ssize_t *done,
                                     cufile_stream stream) {
    fork_guard();
    struct handle *handle = handle_find(key);
    struct cufile_status result = ERROR(CUFILE_INVALID);
    bool ready = handle && base && size && file_offset && buffer_offset && done && cuda_synchronize(stream);
    int64_t n = ready ? taken_read(handle, base, *size, *file_offset, *buffer_offset) : -1;
    if (ready)
        COUNT(async_reads, 1);
    if (n >= 0) {
        *done = n;
        result = OK;
    } else if (!is_own(handle)) {
        result = real()->ReadAsync(key, base, size, file_offset, buffer_offset, done, stream);
    } else if (ready) {
        n = emulate_read(handle, base, *size, *file_offset, *buffer_offset);
        *done = n < 0 ? -errno : n;
        result = OK;
    } else if (done) {
        *done = -EINVAL;
    }
    handle_put(handle);
    return result;
}

struct cufile_status cuFileWriteAsync(cufile_handle key, void *base, size_t *size, off_t *file_offset, off_t *buffer_offset, ssize_t *done,
                                      cufile_stream stream) {
    fork_guard();
    struct handle *handle = handle_find(key);
    struct cufile_status result = ERROR(CUFILE_INVALID);
    if (!is_own(handle)) {
        result = real()->WriteAsync(key, base, size, file_offset, buffer_offset, done, stream);
    } else if (handle && base && size && file_offset && buffer_offset && done && cuda_synchronize(stream)) {
        ssize_t n = emulate_write(handle, base, *size, *file_offset, *buffer_offset);
        *done = n < 0 ? -errno : n;
        result = OK;
    } else if (done) {
        *done = -EINVAL;
    }
    if (handle)
        COUNT(writes, 1);
    handle_put(handle);
    return result;
}

struct cufile_status cuFileStreamRegister(cufile_stream stream, unsigned flags) {
    const struct real *library = real();
    return library ? library->StreamRegister(stream, flags) : emulate_stream(stream, true);
}

struct cufile_status cuFileStreamDeregister(cufile_stream stream) {
    const struct real *library = real();
    return library ? library->StreamDeregister(stream) : emulate_stream(stream, false);
}

/* ---- batches ---- */

struct cufile_status cuFileBatchIOSetUp(cufile_batch *out, unsigned count) {
    fork_guard();
    const struct real *library = real();
    if (library) {
        struct cufile_status result = library->BatchIOSetUp(out, count);
        void *key;
        if (!result.error && count <= BATCH_SIZE_MAX)
            batch_add(*out, count, &key); /* no memory, or too many to keep: all of it is the real library's */
        return result;
    }
    if (!out || count < 1 || count > BATCH_SIZE_MAX || !emulate_use_count())
        return ERROR(CUFILE_INVALID);
    return batch_add(NULL, count, out) ? OK : ERROR(CUFILE_NO_MEMORY);
}

struct cufile_status cuFileBatchIOSubmit(cufile_batch key, unsigned count, struct cufile_item *items, unsigned flags) {
    fork_guard();
    struct batch *batch = batch_find(key);
    struct cufile_status result;
    if (!batch)
        return real() ? real()->BatchIOSubmit(key, count, items, flags) : ERROR(CUFILE_NO_BATCH);
    if (items && count >= 1 && count <= batch->capacity) {
        result = batch_submit(batch, count, items, flags);
    } else {
        result = batch->own ? ERROR(CUFILE_SUBMIT_REFUSED) : real()->BatchIOSubmit(key, count, items, flags);
        batch_clear(batch);
    }
    batch_put(batch);
    return result;
}

struct cufile_status cuFileBatchIOGetStatus(cufile_batch key, unsigned least, unsigned *count, struct cufile_event *events,
                                            struct timespec *timeout) {
    struct batch *batch = batch_find(key);
    struct cufile_status result;
    if (!batch)
        return real() ? real()->BatchIOGetStatus(key, least, count, events, timeout) : ERROR(CUFILE_NO_BATCH);
    bool idle = batch_is_idle(batch);
    bool valid = count && events && *count && least <= *count && least <= batch->capacity;
    if (valid && idle && !batch->own)
        result = batch_take_foreign(batch, least, count, events, timeout);
    else if (valid)
        result = batch_status(batch, least, count, events, timeout);
    else
        result = batch->own ? ERROR(CUFILE_INVALID) : real()->BatchIOGetStatus(key, least, count, events, timeout);
    batch_put(batch);
    return result;
}

struct cufile_status cuFileBatchIOCancel(cufile_batch key) {
    struct batch *batch = batch_find(key);
    if (batch) {
        batch_clear(batch);
        batch_put(batch);
    }
    if (real())
        return real()->BatchIOCancel(key);
    return batch ? OK : ERROR(CUFILE_NO_BATCH);
}

void cuFileBatchIODestroy(cufile_batch key) {
    batch_remove(key);
    if (real())
        real()->BatchIODestroy(key);
}
