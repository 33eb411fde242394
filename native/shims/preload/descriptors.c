/* libkvfs's own descriptors in the application's table. They are moved to high numbers, which dup2() to a small number does not hit. They are known,
 * so an application that closes "all" descriptors leaves these open. */
#include "base/descriptor.h"
#include "preload.h"

#include <sys/resource.h>
#include <unistd.h>

#define WORD_BITS 64

static atomic_ullong internal_fds[FILES_MAX / WORD_BITS];
static atomic_int internal_fd_end; /* above the highest number ever used */

bool internal_fd_has(int fd) {
    return fd >= 0 && fd < atomic_load_explicit(&internal_fd_end, memory_order_relaxed) &&
           atomic_load(&internal_fds[fd / WORD_BITS]) >> (fd % WORD_BITS) & 1;
}

void internal_fd_forget(int fd) {
    if (internal_fd_has(fd))
        atomic_fetch_and(&internal_fds[fd / WORD_BITS], ~(1ull << (fd % WORD_BITS)));
}

int internal_fd_raise(int fd) {
    struct rlimit limit;
    int from = getrlimit(RLIMIT_NOFILE, &limit) < 0 || limit.rlim_cur > 1024 ? 768 : (int)limit.rlim_cur * 3 / 4;
    int high = fcntl(fd, F_DUPFD_CLOEXEC, from);
    if (high >= 0) {
        real_close(fd);
        fd = high;
    } else { /* no number that high is free */
        fd = descriptor_above(fd);
    }
    if (fd < 0)
        return fd;
    if (fd < FILES_MAX) {
        atomic_fetch_or(&internal_fds[fd / WORD_BITS], 1ull << (fd % WORD_BITS));
        for (int end = atomic_load(&internal_fd_end); end <= fd && !atomic_compare_exchange_weak(&internal_fd_end, &end, fd + 1);)
            ;
    }
    return fd;
}

int internal_fd_next(int fd) {
    for (; fd < atomic_load(&internal_fd_end); fd++)
        if (internal_fd_has(fd))
            return fd;
    return -1;
}

void internal_fd_forked(void) {
    for (int fd = internal_fd_next(0); fd >= 0; fd = internal_fd_next(fd + 1)) {
        real_close(fd);
        internal_fd_forget(fd);
    }
}
