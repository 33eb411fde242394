/* Descriptors of ours are above 2, in the daemon and in any process that uses libkvfs. Programs print to 0, 1 and 2, and a process may have
 * closed those. A device that got one of these numbers would be overwritten. Every call that makes a descriptor stands in one of these
 * (tests/unit/test_descriptors.py). fopen(3) of a file of /proc is let be: nothing can be written to it.
 *
 * System calls are made directly: libkvfs_preload takes the functions over. */
#ifndef KVFS_DESCRIPTOR_H
#define KVFS_DESCRIPTOR_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <unistd.h>

#define DESCRIPTOR_MIN 3

/* The same file under a number of ours; -1 and errno as the call left them, or as fcntl(2): then fd is closed. */
static inline int descriptor_above(int fd) {
    if (fd < 0 || fd >= DESCRIPTOR_MIN)
        return fd;
    int above = (int)syscall(SYS_fcntl, fd, F_DUPFD_CLOEXEC, DESCRIPTOR_MIN), error = errno;
    syscall(SYS_close, fd);
    errno = error;
    return above;
}

/* Both, of socketpair(2); `made`: what that returned. -1: neither is open. */
static inline int descriptors_above(int made, int pair[2]) {
    if (made < 0)
        return made;
    for (int i = 0; i < 2; i++)
        pair[i] = descriptor_above(pair[i]);
    if (pair[0] >= 0 && pair[1] >= 0)
        return 0;
    int error = errno;
    for (int i = 0; i < 2; i++)
        if (pair[i] >= 0)
            syscall(SYS_close, pair[i]);
    errno = error;
    return -1;
}

#endif
