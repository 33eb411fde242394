/* Blocking I/O, for workers. */
#include "io/ring.h"

struct blocking {
    uint32_t left;
    int result;
    uint64_t until_ns; /* the ring's, which is another while ring_io() calls back */
};

static void blocking_done(struct io_group *group, bool reaped) {
    if (reaped)
        return; /* the waiter went on at the deadline; the group has held the slots */
    struct blocking *wait = group->owner;
    if (!group->result) {
        ring_renew(group->ring, &wait->until_ns);
    } else if (!wait->result) {
        wait->result = group->result;
        ring_drop(group->ring, wait);
    }
    wait->left--;
}

int blocking_io(struct ring *ring, bool write, uint32_t segment, uint32_t page, const struct iovec *iovs, uint32_t iov_count,
                struct slot *const *slots, uint32_t slot_count) {
    struct blocking wait = {.until_ns = ring->until_ns};
    struct iovec part[8];
    uint32_t at = 0;
    uint64_t inside = 0;
    while (at < iov_count) {
        uint32_t count = 0;
        uint64_t size = 0;
        while (at < iov_count && count < 8 && size < GROUP_BYTES) {
            uint64_t length = min_u64(iovs[at].iov_len - inside, GROUP_BYTES - size);
            part[count++] = (struct iovec){(uint8_t *)iovs[at].iov_base + inside, length};
            size += length;
            inside += length;
            if (inside == iovs[at].iov_len)
                at++, inside = 0;
        }
        wait.left++;
        ring->until_ns = wait.until_ns;
        int r = ring_io(ring, write, segment, page, part, count, slots, slot_count > 8 ? 8 : slot_count, blocking_done, &wait);
        if (r < 0) {
            wait.left--;
            if (!wait.result)
                wait.result = r;
            break;
        }
        page += (uint32_t)(size / PAGE);
    }
    ring_submit(ring);
    while (wait.left) {
        ring_reap(ring);
        if (wait.left)
            ring_wait(ring, 1000000000);
    }
    ring->until_ns = wait.until_ns;
    return wait.result;
}
