/* The rings of vhost_fuse: descriptors, answers and their checks. The messages that set them up are vhost_fuse_setup.c's. */
#define _GNU_SOURCE
#include "vhost_fuse_internal.h"

#include <errno.h>
#include <inttypes.h>
#include <linux/fuse.h>
#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

/* So often deadlines and the socket are looked at while no answer comes. */
#define LOOK_NS 10000000u
#define ERRNO_MAX 4095

uint64_t vhost_now_ns(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (uint64_t)time.tv_sec * 1000000000u + (uint64_t)time.tv_nsec;
}

int vhost_broken(struct vhost_fuse *vhost, int error, const char *format, ...) {
    va_list arguments;
    if (vhost->broken)
        return vhost->broken;
    int length = snprintf(vhost->error, sizeof(vhost->error), "%s: ", vhost->path);
    va_start(arguments, format);
    if (length > 0 && length < (int)sizeof(vhost->error))
        vsnprintf(vhost->error + length, sizeof(vhost->error) - (size_t)length, format, arguments);
    va_end(arguments);
    return vhost->broken = error;
}

const char *vhost_fuse_error(const struct vhost_fuse *vhost) { return vhost->error; }

/* ---- giving ---- */

static bool is_shared(const struct vhost_fuse *vhost, const struct iovec *iov) {
    uintptr_t at = (uintptr_t)iov->iov_base;
    for (uint32_t i = 0; i < vhost->region_count; i++) {
        uintptr_t start = (uintptr_t)vhost->regions[i].data;
        if (at >= start && at - start <= vhost->regions[i].size && iov->iov_len <= vhost->regions[i].size - (at - start))
            return true;
    }
    return false;
}

static int check(const struct vhost_fuse *vhost, const struct iovec *iovs, uint32_t count, uint64_t head, uint64_t *size) {
    *size = 0;
    if (count && (iovs[0].iov_len < head || (uintptr_t)iovs[0].iov_base % _Alignof(uint64_t)))
        return -EINVAL;
    for (uint32_t i = 0; i < count; i++) {
        if (iovs[i].iov_len == 0 || iovs[i].iov_len > INT32_MAX)
            return -EINVAL;
        if (!is_shared(vhost, &iovs[i]))
            return -EFAULT;
        *size += iovs[i].iov_len;
    }
    return *size > INT32_MAX ? -EINVAL : 0;
}

static struct vring_desc descriptor(const struct iovec *iov, bool writable, bool more, uint32_t next) {
    return (struct vring_desc){(uintptr_t)iov->iov_base, (uint32_t)iov->iov_len,
                               (uint16_t)((writable ? VRING_DESC_F_WRITE : 0) | (more ? VRING_DESC_F_NEXT : 0)), (uint16_t)(more ? next : 0)};
}

/* The chain of a request, in an indirect table or in the ring's own descriptors; returns its head. */
static uint16_t chain_write(struct vhost_fuse *vhost, struct vhost_ring *ring, const struct iovec *out, uint32_t out_count, const struct iovec *in,
                            uint32_t in_count) {
    uint32_t count = out_count + in_count, used = vhost->indirect ? 1 : count;
    uint16_t head = ring->free_head, at = head, last = head;
    struct vring_desc *table = ring->tables + (size_t)head * ring->size;
    for (uint32_t i = 0; i < count; i++) {
        const struct iovec *iov = i < out_count ? &out[i] : &in[i - out_count];
        bool more = i + 1 < count;
        if (vhost->indirect) {
            table[i] = descriptor(iov, i >= out_count, more, i + 1);
        } else {
            ring->desc[at] = descriptor(iov, i >= out_count, more, ring->next_free[at]);
            last = at;
            at = ring->next_free[at];
        }
    }
    if (vhost->indirect)
        ring->desc[head] = (struct vring_desc){(uintptr_t)table, count * (uint32_t)sizeof(*table), VRING_DESC_F_INDIRECT, 0};
    ring->free_head = ring->next_free[last];
    ring->free_count -= used;
    ring->slots[head].last = last;
    ring->slots[head].descriptors = used;
    return head;
}

static void kick(struct vhost_fuse *vhost, struct vhost_ring *ring) {
    uint16_t before = ring->avail_index;
    __atomic_store_n(&ring->avail->idx, ++ring->avail_index, __ATOMIC_RELEASE);
    __atomic_thread_fence(__ATOMIC_SEQ_CST); /* the index before the back end's wish */
    const uint16_t *event = (const uint16_t *)(const void *)&ring->used->ring[ring->size];
    bool wanted = vhost->event_index ? vring_need_event(__atomic_load_n(event, __ATOMIC_RELAXED), ring->avail_index, before)
                                     : !(__atomic_load_n(&ring->used->flags, __ATOMIC_RELAXED) & VRING_USED_F_NO_NOTIFY);
    uint64_t one = 1;
    if (wanted && write(ring->kick_fd, &one, sizeof(one)) != sizeof(one) && errno != EAGAIN)
        vhost_broken(vhost, -errno, "kick of queue %u: %s", ring->index, strerror(errno));
}

int vhost_fuse_submit(struct vhost_fuse *vhost, enum vhost_fuse_queue queue, const struct iovec *out, uint32_t out_count, const struct iovec *in,
                      uint32_t in_count, vhost_fuse_done *done, void *context) {
    uint64_t out_size, in_size;
    struct vhost_ring *ring = &vhost->rings[queue];
    uint32_t count = out_count + in_count;
    if (vhost->broken)
        return -EPIPE;
    if (out_count == 0 || out_count > ring->size || in_count > ring->size || count > ring->size || !done)
        return -EINVAL;
    int r = check(vhost, out, out_count, sizeof(struct fuse_in_header), &out_size);
    if (r == 0)
        r = check(vhost, in, in_count, sizeof(struct fuse_out_header), &in_size);
    if (r < 0)
        return r;
    if (ring->free_count < (vhost->indirect ? 1 : count))
        return -EAGAIN;
    const struct fuse_in_header *head = out[0].iov_base;
    uint16_t index = chain_write(vhost, ring, out, out_count, in, in_count);
    struct vhost_slot *slot = &ring->slots[index];
    slot->live = true;
    slot->done = done;
    slot->context = context;
    slot->unique = head->unique;
    slot->opcode = head->opcode;
    slot->capacity = in_size;
    slot->answer = in_count ? in[0].iov_base : NULL;
    slot->started_ns = vhost_now_ns();
    ring->live++;
    ring->avail->ring[ring->avail_index & (ring->size - 1)] = index;
    kick(vhost, ring);
    return 0;
}

/* ---- taking ---- */

/* The answer's result; vhost->broken is set if it cannot be true. Its header is copied once: the back end may still write there. */
static int32_t answer_check(struct vhost_fuse *vhost, const struct vhost_ring *ring, const struct vhost_slot *slot, uint32_t length) {
    struct fuse_out_header head;
    if (!slot->answer) {
        if (length)
            vhost_broken(vhost, -EPROTO, "queue %u, opcode %u: %u bytes of answer to a request that has none", ring->index, slot->opcode, length);
        return 0;
    }
    if (length < sizeof(head) || length > slot->capacity) {
        vhost_broken(vhost, -EPROTO, "queue %u, opcode %u: an answer of %u bytes, expected %zu to %" PRIu64, ring->index, slot->opcode, length,
                     sizeof(head), slot->capacity);
        return 0;
    }
    memcpy(&head, slot->answer, sizeof(head));
    __asm__ volatile("" ::: "memory");
    if (head.len != length)
        vhost_broken(vhost, -EPROTO, "queue %u, opcode %u: its header says %u bytes, the ring %u", ring->index, slot->opcode, head.len, length);
    else if (head.unique != slot->unique)
        vhost_broken(vhost, -EPROTO, "queue %u, opcode %u: an answer to request %" PRIu64 ", expected %" PRIu64, ring->index, slot->opcode,
                     (uint64_t)head.unique, slot->unique);
    else if (head.error > 0 || head.error < -ERRNO_MAX || (head.error && length != sizeof(head)))
        vhost_broken(vhost, -EPROTO, "queue %u, opcode %u: error %d in an answer of %u bytes", ring->index, slot->opcode, head.error, length);
    return head.error ? head.error : (int32_t)(length - sizeof(head));
}

static void slot_free(struct vhost_ring *ring, uint16_t head) {
    struct vhost_slot *slot = &ring->slots[head];
    ring->next_free[slot->last] = ring->free_head;
    ring->free_head = head;
    ring->free_count += slot->descriptors;
    slot->live = false;
    ring->live--;
}

static uint16_t used_index(const struct vhost_ring *ring) { return __atomic_load_n(&ring->used->idx, __ATOMIC_ACQUIRE); }

static int ring_take(struct vhost_fuse *vhost, struct vhost_ring *ring) {
    uint16_t used = used_index(ring), fresh = (uint16_t)(used - ring->seen);
    if (fresh > ring->live)
        return vhost_broken(vhost, -EPROTO, "queue %u: the used index went from %u to %u, with %u requests under way", ring->index, ring->seen, used,
                            ring->live);
    for (uint16_t i = 0; i < fresh; i++) {
        const struct vring_used_elem *from = &ring->used->ring[ring->seen & (ring->size - 1)];
        uint32_t head = __atomic_load_n(&from->id, __ATOMIC_RELAXED), length = __atomic_load_n(&from->len, __ATOMIC_RELAXED);
        if (head >= ring->size || !ring->slots[head].live)
            return vhost_broken(vhost, -EPROTO, "queue %u: an answer to descriptor %u, which no request has", ring->index, head);
        struct vhost_slot slot = ring->slots[head];
        int32_t result = answer_check(vhost, ring, &slot, length);
        if (vhost->broken)
            return vhost->broken;
        ring->seen++;
        slot_free(ring, (uint16_t)head);
        slot.done(slot.context, result);
        if (vhost->broken)
            return vhost->broken;
    }
    return fresh;
}

/* While nothing comes: is a request late, or the back end gone? */
static int look(struct vhost_fuse *vhost) {
    uint64_t now = vhost_now_ns();
    uint8_t byte;
    if (now < vhost->look_ns)
        return 0;
    vhost->look_ns = now + LOOK_NS;
    for (uint32_t i = 0; i < VHOST_RINGS; i++)
        for (uint32_t j = 0; vhost->rings[i].live && j < vhost->rings[i].size; j++) {
            const struct vhost_slot *slot = &vhost->rings[i].slots[j];
            if (slot->live && now - slot->started_ns > vhost->timeout_ms * 1000000ull)
                return vhost_broken(vhost, -ETIMEDOUT, "queue %u, opcode %u, request %" PRIu64 ": no answer in %u ms", i, slot->opcode, slot->unique,
                                    vhost->timeout_ms);
        }
    ssize_t n = recv(vhost->fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
    if (n == 0 || (n < 0 && errno == ECONNRESET))
        return vhost_broken(vhost, -ECONNRESET, "the back end closed its socket, with %u requests under way",
                            vhost->rings[0].live + vhost->rings[1].live);
    if (n < 0 && errno != EAGAIN && errno != EINTR)
        return vhost_broken(vhost, -errno, "socket: %s", strerror(errno));
    return n > 0 ? vhost_broken(vhost, -EPROTO, "a message that nobody asked for") : 0;
}

int vhost_fuse_poll(struct vhost_fuse *vhost) {
    int count = 0;
    for (uint32_t i = 0; i < VHOST_RINGS && !vhost->broken; i++) {
        int r = ring_take(vhost, &vhost->rings[i]);
        count += r > 0 ? r : 0;
    }
    if (count == 0 && !vhost->broken)
        look(vhost);
    return vhost->broken ? vhost->broken : count;
}

/* Signals are wanted, or not; true: an answer is there already. */
static bool arm(struct vhost_fuse *vhost, bool wanted) {
    bool ready = false;
    for (uint32_t i = 0; i < VHOST_RINGS; i++) {
        struct vhost_ring *ring = &vhost->rings[i];
        if (!vhost->event_index)
            __atomic_store_n(&ring->avail->flags, wanted ? 0 : VRING_AVAIL_F_NO_INTERRUPT, __ATOMIC_RELAXED);
        else if (wanted)
            __atomic_store_n(&ring->avail->ring[ring->size], ring->seen, __ATOMIC_RELAXED);
        __atomic_thread_fence(__ATOMIC_SEQ_CST); /* the wish before the look */
        ready |= used_index(ring) != ring->seen;
    }
    return ready;
}

void vhost_fuse_wait(struct vhost_fuse *vhost, uint32_t timeout_ms) {
    struct pollfd polls[2] = {{.fd = vhost->call_fd, .events = POLLIN}, {.fd = vhost->fd, .events = POLLIN | POLLRDHUP}};
    uint64_t count;
    if (vhost->broken)
        return;
    if (!arm(vhost, true) && poll(polls, 2, (int)(timeout_ms > INT32_MAX ? INT32_MAX : timeout_ms)) > 0) {
        if (polls[0].revents && read(vhost->call_fd, &count, sizeof(count)) < 0 && errno != EAGAIN)
            vhost_broken(vhost, -errno, "eventfd: %s", strerror(errno));
        if (polls[1].revents)
            vhost->look_ns = 0; /* the next poll says what it is */
    }
    arm(vhost, false);
}
