/* Plain reads and writes of a file, for loads that stand beside kvfs's own. */
#ifndef KVFS_CLIENT_TRANSFER_H
#define KVFS_CLIENT_TRANSFER_H

#include <errno.h>
#include <stdbool.h>
#include <stdint.h>
#include <unistd.h>

/* All of it, or -errno; -EIO: the file is shorter. */
static inline int transfer(int file, unsigned char *data, uint64_t size, uint64_t offset, bool writing) {
    for (uint64_t at = 0; at < size;) {
        ssize_t n = writing ? pwrite(file, data + at, size - at, (off_t)(offset + at)) : pread(file, data + at, size - at, (off_t)(offset + at));
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return n ? -errno : -EIO;
        at += (uint64_t)n;
    }
    return 0;
}

#endif
