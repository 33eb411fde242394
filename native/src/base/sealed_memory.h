/* Memory that processes share (memfd_create(2)): of a kind that nobody can make smaller. Mapped, or made. */
#ifndef KVFS_SEALED_MEMORY_H
#define KVFS_SEALED_MEMORY_H

#include "base/descriptor.h"

#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "kvfs_format.h"

/* The size of what has at least a page. -EBADMSG: smaller, or not sealed, so that it could be truncated while we read it: SIGBUS. -errno. */
static inline int64_t sealed_size(int fd) {
    struct stat status;
    int seals = fcntl(fd, F_GET_SEALS);

    if (fstat(fd, &status) < 0)
        return -errno;
    return seals < 0 || !(seals & F_SEAL_SHRINK) || status.st_size < KVFS_PAGE_SIZE ? -EBADMSG : status.st_size;
}

#ifndef F_SEAL_FUTURE_WRITE
#define F_SEAL_FUTURE_WRITE 0x0010
#endif

/* Sealed by its one writer: those to whom the memory is given read it, and nothing changes its size. A mapping that is there stays writable; no later
 * one can be. No seal forbids fallocate(2), which takes the memory of all that is sparse. So nobody but the owner opens it anew for writing, by
 * /proc. 0 or -errno. */
static inline int sealed_make(int fd) {
    int seals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_FUTURE_WRITE | F_SEAL_SEAL;

    return fchmod(fd, 0444) < 0 || fcntl(fd, F_ADD_SEALS, seals) < 0 ? -errno : 0;
}

/* Memory of a fixed size that begins with a header, for processes that write it in turn. Its descriptor, or -errno. */
static inline int sealed_create(const char *name, uint64_t size, const void *header, size_t header_size) {
    int fd = descriptor_above(memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING)), r = fd < 0 ? -errno : 0;

    if (r == 0 && ftruncate(fd, (off_t)size) < 0)
        r = -errno;
    if (r == 0 && pwrite(fd, header, header_size, 0) != (ssize_t)header_size)
        r = -EIO;
    if (r == 0 && fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) < 0)
        r = -errno;
    if (r < 0 && fd >= 0)
        close(fd);
    return r < 0 ? r : fd;
}

/* Copy the begin of its first page. 0 or -errno. */
static inline int sealed_peek(int fd, void *out, size_t size) {
    void *memory = mmap(NULL, KVFS_PAGE_SIZE, PROT_READ, MAP_SHARED, fd, 0);

    if (memory == MAP_FAILED)
        return -errno;
    memcpy(out, memory, size);
    munmap(memory, KVFS_PAGE_SIZE);
    return 0;
}

/* Memory that outlives builds begins so, in all its versions. */
struct sealed_head {
    uint64_t magic;
    uint32_t version;
};

/* Its version, or 0 where it has none: *version. -EBADMSG: it is other memory; -EPROTONOSUPPORT: the version is not one of these. 0 or -errno. */
static inline int sealed_version(int fd, uint64_t magic, uint32_t oldest, uint32_t newest, uint32_t *version) {
    struct sealed_head head = {0};
    int64_t size = sealed_size(fd);
    int r = size < 0 ? (int)size : sealed_peek(fd, &head, sizeof(head));

    *version = r < 0 || head.magic != magic ? 0 : head.version;
    if (r == 0 && head.magic != magic)
        r = -EBADMSG;
    return r < 0 ? r : head.version < oldest || head.version > newest ? -EPROTONOSUPPORT : 0;
}

#endif
