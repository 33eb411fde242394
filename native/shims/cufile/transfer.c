#define _GNU_SOURCE
#include <errno.h>
#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>

#include "shim.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

#define CHUNK ((uint64_t)64 << 20)       /* of a read: a size far beyond the file's end is not checked to its end */
#define BUSY_POLL_NS 2000000

static uint64_t min_u64(uint64_t a, uint64_t b) { return a < b ? a : b; }

/* Faults in what is not there yet, and fails where a store would. Linux 5.14; before, and for memory of devices, it says no. */
static bool host_memory_is_good(const void *memory, uint64_t size) {
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), start = (uintptr_t)memory & ~(page - 1), end = (uintptr_t)memory + size;
    int r;
    if (end < start)
        return false;
    do
        r = madvise((void *)start, end - start, MADV_POPULATE_WRITE);
    while (r < 0 && (errno == EINTR || errno == EAGAIN));
    return r == 0;
}

bool memory_is_mapped(const void *memory, uint64_t size) {
    uintptr_t at = (uintptr_t)memory, end = at + size, from, to;
    char line[512], access[8];
    if (cuda_memory_kind(memory))
        return true;
    FILE *maps = fopen("/proc/self/maps", "re");
    while (maps && at < end && fgets(line, sizeof(line), maps))
        if (sscanf(line, "%lx-%lx %7s", &from, &to, access) == 3 && from <= at && at < to && access[0] == 'r' && access[1] == 'w')
            at = to;
    if (maps)
        fclose(maps);
    return end > (uintptr_t)memory && at >= end;
}

bool memory_is_good(const void *memory, uint64_t size) {
    return cuda_memory_kind(memory) != 0 || host_memory_is_good(memory, size);
}

/* A device that gave no answer in time may still write there, and a caller of cuFile cannot know: it is kept waiting, as by the kernel. */
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
