/* Files and block devices, by io_uring or, where that is denied, by threads (io/threads.c); RAM disks, by preadv in the ring's own thread. */
#include "io/ring.h"

static void start(struct ring *ring, struct io_part *part) {
    if (ring->threads) {
        threads_part(ring, part);
        return;
    }
    const struct iovec *iov = &part->group->iovs[part->iov_first];
    const bool write = part->group->write;
    struct io_uring_sqe *sqe = ring_sqe(ring);
    int fd = (int)part->device; /* as the ring has registered it */
    if (part->iov_count == 1 && write)
        io_uring_prep_write(sqe, fd, iov->iov_base, (unsigned)iov->iov_len, part->device_offset);
    else if (part->iov_count == 1)
        io_uring_prep_read(sqe, fd, iov->iov_base, (unsigned)iov->iov_len, part->device_offset);
    else if (write)
        io_uring_prep_writev(sqe, fd, iov, part->iov_count, part->device_offset);
    else
        io_uring_prep_readv(sqe, fd, iov, part->iov_count, part->device_offset);
    sqe->flags |= (uint8_t)(IOSQE_FIXED_FILE | (ring->array->devices[part->device].blocks ? IOSQE_ASYNC : 0));
    io_uring_sqe_set_data(sqe, part);
}

void uring_cancel(struct ring *ring, struct io_part *part) {
    if (ring->threads) {
        threads_cancel(ring, part);
        return;
    }
    struct io_uring_sqe *sqe = io_uring_get_sqe(&ring->uring);
    if (!sqe)
        return;
    ring->queued++;
    io_uring_prep_cancel(sqe, part, 0);
    sqe->user_data = RING_CANCELS;
}

const struct device_ops uring_ops = {.start = start, .cancel = uring_cancel};

/* io_uring would hand I/O of a RAM disk to a kernel thread, and the wake-ups cost more than the copy. */
static void memory_start(struct ring *ring, struct io_part *part) {
    const struct iovec *iov = &part->group->iovs[part->iov_first];
    int fd = ring->array->devices[part->device].fd;
    if (part->size > ring->array->inline_max || ring->delayed_count == RING_DELAYED_MAX) {
        start(ring, part);
        return;
    }
    off_t offset = (off_t)part->device_offset;
    ssize_t n = part->group->write ? pwritev(fd, iov, part->iov_count, offset) : preadv(fd, iov, part->iov_count, offset);
    bool kept = ring_part_delay(ring, part, 0, n < 0 ? -errno : (int)n);
    assert(kept);
}

const struct device_ops memory_ops = {.start = memory_start, .cancel = uring_cancel, .copies = true};
