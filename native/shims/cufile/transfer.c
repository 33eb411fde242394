/* One read or write of a file of a pool, to or from host or device memory. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <unistd.h>

#include "base/base.h"
#include "shim.h"

#define CHUNK ((uint64_t)64 << 20) /* of a read: a size far beyond the file's end is not checked to its end */
#define BUSY_POLL_NS 2000000

/* A device that gave no answer in time may still write there, and a caller of cuFile cannot know. So the caller is kept waiting, as by the kernel. */
static void wait_until_ours(struct handle *handle, const void *memory, uint64_t size) {
    struct kvfs_client *client = mount_client(handle->place.mount);
    while (client && kvfs_busy(client, memory, size) == 1)
        nanosleep(&(struct timespec){0, BUSY_POLL_NS}, NULL);
}

static int64_t read_piece(void *owner, void *memory, uint64_t size, uint64_t offset) {
    struct handle *handle = owner;
    struct kvfs_file *file = handle_file(handle);
    int64_t result = file ? kvfs_file_read(file, offset, memory, size) : -EAGAIN;
    if (result == -ETIMEDOUT || result == -EBUSY)
        wait_until_ours(handle, memory, size);
    return result;
}

int64_t native_read(struct handle *handle, void *destination, uint64_t size, uint64_t offset, bool mapped) {
    int error = errno, kind = cuda_memory_kind(destination);
    uint64_t done = 0;
    int64_t result = handle_file(handle) ? 0 : -1;
    if (result == 0 && kind == 1) {
        result = cuda_fill(destination, size, offset, read_piece, handle);
        if (result > 0)
            COUNT(gpu_bytes, (unsigned long long)result);
        done = result > 0 ? (uint64_t)result : 0;
    } else {
        while (result >= 0 && done < size) {
            uint8_t *to = (uint8_t *)destination + done;
            uint64_t wanted = min_u64(size - done, CHUNK);
            result = mapped || kind == 2 || host_memory_is_good(to, wanted) ? read_piece(handle, to, wanted, offset + done) : -EFAULT;
            if (result > 0)
                done += (uint64_t)result;
            if (result >= 0 && (uint64_t)result < wanted)
                break;
        }
    }
    errno = error;
    if (result < 0)
        return -1;
    COUNT(native_reads, 1);
    COUNT(native_bytes, done);
    return (int64_t)done;
}

static int64_t pread_piece(void *owner, void *memory, uint64_t size, uint64_t offset) {
    uint64_t done = 0;
    while (done < size) {
        ssize_t r = pread(((struct handle *)owner)->fd, (uint8_t *)memory + done, min_u64(size - done, CHUNK), (off_t)(offset + done));
        if (r < 0 && errno == EINTR)
            continue;
        if (r < 0)
            return -errno;
        if (r == 0)
            break;
        done += (uint64_t)r;
    }
    return (int64_t)done;
}

static int64_t pwrite_piece(void *owner, void *memory, uint64_t size, uint64_t offset) {
    uint64_t done = 0;
    while (done < size) {
        ssize_t r = pwrite(((struct handle *)owner)->fd, (uint8_t *)memory + done, min_u64(size - done, CHUNK), (off_t)(offset + done));
        if (r < 0 && errno == EINTR)
            continue;
        if (r < 0)
            return -errno;
        done += (uint64_t)r;
    }
    return (int64_t)done;
}

int64_t descriptor_read(struct handle *handle, void *destination, uint64_t size, uint64_t offset) {
    bool gpu = cuda_memory_kind(destination) == 1;
    int64_t result = gpu ? cuda_fill(destination, size, offset, pread_piece, handle) : pread_piece(handle, destination, size, offset);
    COUNT(forwarded_reads, 1);
    if (result > 0)
        COUNT(forwarded_bytes, (unsigned long long)result);
    return result;
}

int64_t descriptor_write(struct handle *handle, const void *source, uint64_t size, uint64_t offset) {
    bool gpu = cuda_memory_kind(source) == 1;
    return gpu ? cuda_drain(source, size, offset, pwrite_piece, handle) : pwrite_piece(handle, (void *)(uintptr_t)source, size, offset);
}

/* ---- which library reads ---- */

bool read_is_plain(struct handle *handle, const void *base, uint64_t size, int64_t file_offset, int64_t buffer_offset, const struct buffer *buffer) {
    if (!base || !size || handle->access == O_WRONLY || file_offset < 0 || size > (uint64_t)(INT64_MAX - file_offset))
        return false;
    return !buffer->size || (buffer_offset >= 0 && size <= buffer->size && (uint64_t)buffer_offset <= buffer->size - size);
}

ssize_t real_read(struct handle *handle, void *key, void *base, size_t size, off_t file_offset, off_t buffer_offset) {
    ssize_t result = real()->Read(key, base, size, file_offset, buffer_offset);
    if (handle)
        COUNT(forwarded_reads, 1);
    if (handle && result > 0)
        COUNT(forwarded_bytes, (unsigned long long)result);
    return result;
}
