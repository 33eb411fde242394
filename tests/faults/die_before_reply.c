/* Preloaded into a daemon: it is killed as it writes the answer to a request of the kind whose number is in the file DIE_AT. So the request was done, and
 * its kernel does not know. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/uio.h>
#include <unistd.h>

#define REQUEST_HEAD 80
#define KINDS 65536
#define RESENT (UINT64_C(1) << 63)

struct in_header {
    uint32_t len, opcode;
    uint64_t unique;
};
struct out_header {
    uint32_t len;
    int32_t error;
    uint64_t unique;
};

static uint32_t kinds[KINDS]; /* by unique, which counts by two */
static uint32_t *kind_of(uint64_t unique) { return &kinds[(unique & ~RESENT) / 2 % KINDS]; }

ssize_t readv(int fd, const struct iovec *iovs, int count) {
    ssize_t (*next)(int, const struct iovec *, int) = (ssize_t(*)(int, const struct iovec *, int))dlsym(RTLD_NEXT, "readv");
    ssize_t n = next(fd, iovs, count);
    if (count == 2 && iovs[0].iov_len == REQUEST_HEAD && n >= (ssize_t)sizeof(struct in_header)) {
        const struct in_header *in = iovs[0].iov_base;
        *kind_of(in->unique) = in->opcode;
    }
    return n;
}

ssize_t writev(int fd, const struct iovec *iovs, int count) {
    ssize_t (*next)(int, const struct iovec *, int) = (ssize_t(*)(int, const struct iovec *, int))dlsym(RTLD_NEXT, "writev");
    const struct out_header *out = iovs[0].iov_base;
    const char *path = getenv("DIE_AT");
    if (path && count > 0 && iovs[0].iov_len == sizeof(*out) && out->unique && !out->error) {
        char text[16] = {0};
        int order = open(path, O_RDONLY | O_CLOEXEC);
        ssize_t size = order < 0 ? -1 : read(order, text, sizeof(text) - 1);
        if (order >= 0)
            close(order);
        if (size > 0 && (uint32_t)atoi(text) == *kind_of(out->unique) && unlink(path) == 0)
            kill(getpid(), SIGKILL);
    }
    return next(fd, iovs, count);
}
