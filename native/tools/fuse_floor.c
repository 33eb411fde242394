/* The speed of light of a FUSE request on this machine: a server of one thread that knows nothing and says so.
 *
 *     fuse_floor DIRECTORY
 *
 * Mounts itself there (root), answers every LOOKUP with ENOENT straight from a blocking read of /dev/fuse, and ends with the unmount. A failing
 * stat through kvfs, as `tools/bench` measures it, cannot be faster than this.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/fuse.h>
#include <stdio.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/uio.h>
#include <unistd.h>

static unsigned char request[FUSE_MIN_READ_BUFFER + (1 << 20)] __attribute__((aligned(8)));

static void reply(int fd, uint64_t unique, int error, const void *body, size_t size) {
    struct fuse_out_header head = {.len = (uint32_t)(sizeof(head) + size), .error = error, .unique = unique};
    struct iovec iovs[2] = {{&head, sizeof(head)}, {(void *)(uintptr_t)body, size}};
    if (writev(fd, iovs, size ? 2 : 1) < 0)
        perror("fuse_floor: reply");
}

int main(int argc, char **argv) {
    if (argc != 2) {
        fprintf(stderr, "usage: fuse_floor DIRECTORY\n");
        return 2;
    }
    int fd = open("/dev/fuse", O_RDWR | O_CLOEXEC);
    char options[128];
    snprintf(options, sizeof(options), "fd=%d,rootmode=40000,user_id=0,group_id=0,allow_other", fd);
    if (fd < 0 || mount("fuse_floor", argv[1], "fuse.floor", MS_NOSUID | MS_NODEV, options) < 0) {
        perror("fuse_floor: mount");
        return 1;
    }
    for (;;) {
        ssize_t n = read(fd, request, sizeof(request));
        if (n < 0 && (errno == EINTR || errno == EAGAIN || errno == ENOENT))
            continue;
        if (n < (ssize_t)sizeof(struct fuse_in_header))
            return n < 0 && errno == ENODEV ? 0 : 1;
        const struct fuse_in_header *in = (const struct fuse_in_header *)(const void *)request;
        struct fuse_init_out init = {.major = FUSE_KERNEL_VERSION, .minor = 31, .max_write = 1 << 20, .max_background = 16};
        struct fuse_attr_out attr = {.attr_valid = 3600, .attr = {.ino = 1, .mode = 040755, .nlink = 2}};
        switch (in->opcode) {
        case FUSE_INIT: reply(fd, in->unique, 0, &init, sizeof(init)); break;
        case FUSE_GETATTR: reply(fd, in->unique, 0, &attr, sizeof(attr)); break;
        case FUSE_LOOKUP: reply(fd, in->unique, -ENOENT, NULL, 0); break;
        case FUSE_FORGET:
        case FUSE_BATCH_FORGET:
        case FUSE_INTERRUPT: break;
        default: reply(fd, in->unique, -ENOSYS, NULL, 0); break;
        }
    }
}
