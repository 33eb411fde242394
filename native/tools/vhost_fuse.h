/* vhost_fuse: FUSE requests to a vhost-user-fs back end, given as a guest's driver gives them, from user space and without a guest.
 *
 * A request is a list of buffers in memory that the caller shares; the answer comes by a callback out of vhost_fuse_poll. The library has no thread:
 * one thread at a time calls it. Sources: virtio 1.2, sections 2.7 (split rings) and 5.11 (file system devices); QEMU's
 * docs/interop/vhost-user.rst; linux/fuse.h. Every answer of the back end is checked, and every wait has a deadline. */
#ifndef KVFS_VHOST_FUSE_H
#define KVFS_VHOST_FUSE_H

#include <stdint.h>
#include <sys/uio.h>

/* One of them is the library's own, for its rings; SET_MEM_TABLE has room for eight. */
#define VHOST_FUSE_REGIONS_MAX 7u
#define VHOST_FUSE_QUEUE_SIZE_MAX 1024u

struct vhost_fuse;

/* Memory that requests and answers may lie in: `data` is the caller's shared mapping of the file `fd` from `offset` on. Pages are whole. */
struct vhost_fuse_region {
    int fd;
    void *data;
    uint64_t size, offset;
};

struct vhost_fuse_config {
    const char *path;    /* of the back end's socket */
    uint32_t queue_size; /* a power of two; the pieces of a request are at most as many */
    uint32_t timeout_ms; /* of each message, and of each request */
    const struct vhost_fuse_region *regions;
    uint32_t region_count;
};

/* The device's queues. Linux sends FORGET by the first, and everything else by the second. */
enum vhost_fuse_queue { VHOST_FUSE_PRIORITY, VHOST_FUSE_REQUESTS };

/* The answer: bytes after its FUSE header, or the -errno in it. -ECANCELED: the connection ended first. It may submit, and may not close. */
typedef void vhost_fuse_done(void *context, int32_t result);

/* Connect, share the memory and start the queues; blocks. *out is set, after a failure too, but for -ENOMEM and -EINVAL: vhost_fuse_error then has
 * the reason, and the caller closes it. */
int vhost_fuse_connect(const struct vhost_fuse_config *config, struct vhost_fuse **out);

/* Stop the queues (unless something failed), end every request by -ECANCELED, and disconnect. After a failure the back end may write to their memory
 * for as long as it lives. */
void vhost_fuse_close(struct vhost_fuse *vhost);

/* Why the connection is of no use any more; "" while it is. */
const char *vhost_fuse_error(const struct vhost_fuse *vhost);

/* Give a request; never blocks. `out` is read by the back end and begins with a whole fuse_in_header. `in` is written, and begins with room for a
 * whole fuse_out_header; without `in` there is no answer, as to FORGET. The buffers belong to the back end until `done`. -EAGAIN: the queue is full.
 * -EFAULT: a buffer lies in no region. -EINVAL: no valid request. -EPIPE: the connection is of no use. */
int vhost_fuse_submit(struct vhost_fuse *vhost, enum vhost_fuse_queue queue, const struct iovec *out, uint32_t out_count, const struct iovec *in,
                      uint32_t in_count, vhost_fuse_done *done, void *context);

/* Take the answers that are there; never blocks. Their count, or -errno: the back end is late, gone, or has broken the protocol. */
int vhost_fuse_poll(struct vhost_fuse *vhost);

/* Sleep until an answer is there, or for so long at most. A caller that polls all the time needs it never: no signal is asked for without it. */
void vhost_fuse_wait(struct vhost_fuse *vhost, uint32_t timeout_ms);

#endif
