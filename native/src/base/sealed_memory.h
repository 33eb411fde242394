/* Memory of another process (memfd_create(2)), mapped to be read: of a kind that its maker cannot make smaller. */
#ifndef KVFS_SEALED_MEMORY_H
#define KVFS_SEALED_MEMORY_H

#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "kvfs_format.h"

/* The size of what has at least a page. -EBADMSG: smaller, or not sealed, so that it could be truncated while we read it: SIGBUS. -errno. */
static inline int64_t sealed_size(int fd) {
    struct stat status;
    int seals = fcntl(fd, F_GET_SEALS);

    if (fstat(fd, &status) < 0)
        return -errno;
    return seals < 0 || !(seals & F_SEAL_SHRINK) || status.st_size < KVFS_PAGE_SIZE ? -EBADMSG : status.st_size;
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

#endif
