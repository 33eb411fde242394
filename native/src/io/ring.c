/* Device I/O: one ring a thread, I/O striped over devices, every I/O with a deadline. The kinds of devices are behind struct device_ops.
 *
 * A group is one run of a segment's pages. It becomes one part, a vectored I/O, on each device of the stripe that it touches. A part begins when it is
 * its turn (io/turns.c). A group that misses its deadline is reported at once, and cancelled. Its memory stays the kernel's until every part that has
 * begun has been reaped (I5).
 */
#include "io/ring.h"

#include <poll.h>
#include <stdio.h>

/* A device that missed a deadline gets no I/O for the time of so many deadlines. Until then the daemon has judged it. */
#define STUCK_FACTOR 4u
/* A ring of fewer entries is not tried where memory that may be locked does not suffice. */
#define ENTRIES_MIN 32u
#define PROOF_S 5

/* The kernel may give a new ring the memory of one that another thread has freed. liburing maps and unmaps it unseen by the thread sanitizer, so the
 * order of the two is said here. */
static atomic_uint rings_freed;

/* io_uring_enter alone may be denied, too: one operation that does nothing goes the whole way. */
static int proved(struct ring *ring) {
    struct __kernel_timespec ts = {.tv_sec = PROOF_S};
    struct io_uring_cqe *cqe;
    struct io_uring_sqe *sqe = io_uring_get_sqe(&ring->uring);
    if (ring->uring.flags & IORING_SETUP_SQE128)
        memset(sqe, 0, 2 * sizeof(*sqe));
    io_uring_prep_nop(sqe);
    sqe->user_data = RING_CANCELS;
    int r = io_uring_submit(&ring->uring);
    if (r >= 0)
        r = io_uring_wait_cqe_timeout(&ring->uring, &cqe, &ts);
    if (r < 0)
        return r;
    io_uring_cqe_seen(&ring->uring, cqe);
    return 0;
}

static int uring_make(struct ring *ring, unsigned entries, bool wide, enum ring_step *step) {
    struct kvfs_array *array = ring->array;
    struct io_uring_params params = {.flags = IORING_SETUP_CQSIZE | IORING_SETUP_COOP_TASKRUN | IORING_SETUP_CLAMP, .cq_entries = entries * 4};
    *step = RING_SETUP;
    if (wide)
        params.flags |= IORING_SETUP_SQE128;
    int r = io_uring_queue_init_params(entries, &ring->uring, &params);
    if (r == -EINVAL) { /* before 5.19 */
        memset(&params, 0, sizeof(params));
        params.flags = IORING_SETUP_CQSIZE | IORING_SETUP_CLAMP;
        params.cq_entries = entries * 4;
        r = io_uring_queue_init_params(entries, &ring->uring, &params);
    }
    if (r < 0)
        return r;
    (void)atomic_load(&rings_freed);
    bool same = ring->uring.enter_ring_fd == ring->uring.ring_fd;
    ring->uring.ring_fd = kvfs_own_descriptor(ring->uring.ring_fd);
    if (same)
        ring->uring.enter_ring_fd = ring->uring.ring_fd;
    int *fds = calloc(array->device_count, sizeof(int));
    if (ring->uring.ring_fd < 0)
        r = -errno;
    else if (!fds)
        r = -ENOMEM;
    for (uint32_t i = 0; fds && i < array->device_count; i++)
        fds[i] = array->devices[i].fd;
    if (r >= 0) {
        *step = RING_REGISTER;
        r = io_uring_register_files(&ring->uring, fds, array->device_count);
    }
    free(fds);
    if (r >= 0) {
        *step = RING_ENTER;
        r = proved(ring);
    }
    if (r < 0) {
        io_uring_queue_exit(&ring->uring);
        memset(&ring->uring, 0, sizeof(ring->uring));
    }
    return r;
}

/* By io_uring, or by threads where that is denied, or where memory that may be locked does not suffice for a small ring. */
static int setup(struct ring *ring, struct kvfs_array *array, unsigned entries, bool wide) {
    enum ring_step step;
    memset(ring, 0, sizeof(*ring));
    ring->array = array;
    ring->devices_seen = atomic_load(&array->devices_changed);
    ring->delayed = calloc(RING_DELAYED_MAX, sizeof(*ring->delayed));
    const bool memory = ring->delayed && turns_init(ring) == 0;
    int r = memory ? uring_make(ring, entries, wide, &step) : -ENOMEM;
    while (memory && r == -ENOMEM && entries > ENTRIES_MIN)
        r = uring_make(ring, entries /= 2, wide, &step);
    if (memory && (r == -EPERM || r == -EACCES || r == -ENOSYS || r == -ENOMEM)) {
        unsigned none = 0;
        atomic_compare_exchange_strong(&array->refused, &none, (unsigned)-r << 2 | step);
        r = threads_ring_init(ring);
    }
    if (r >= 0) {
        atomic_fetch_add(&array->rings[ring->threads != NULL], 1);
        return 0;
    }
    free(ring->delayed);
    free(ring->devices);
    ring->array = NULL;
    return r;
}

int ring_init(struct ring *ring, struct kvfs_array *array, unsigned entries) { return setup(ring, array, entries, false); }

int ring_init_wide(struct ring *ring, struct kvfs_array *array, unsigned entries) { return setup(ring, array, entries, true); }

void ring_tell(struct kvfs_array *array, char *out, uint32_t capacity) {
    static const char *const calls[] = {[RING_SETUP] = "io_uring_setup", [RING_REGISTER] = "io_uring_register", [RING_ENTER] = "io_uring_enter"};
    const unsigned refused = atomic_load(&array->refused), by_uring = atomic_load(&array->rings[0]), by_threads = atomic_load(&array->rings[1]);
    uint32_t failed, count = threads_count(array, &failed);
    if (!by_threads)
        snprintf(out, capacity, "io_uring");
    else
        snprintf(out, capacity, "%s (%s: %s%s): %u of them%s", by_uring ? "threads beside io_uring" : "threads", calls[refused & 3],
                 strerror((int)(refused >> 2)), refused >> 2 == ENOMEM ? "; CAP_IPC_LOCK or more memlock gives io_uring" : "", count,
                 failed ? "; more were refused: raise pids.max or ulimit -u" : "");
}

const char *ring_advice(int error) {
    switch (error) {
    case -EAGAIN:
        return "; io_uring is denied, and no thread could be made instead: raise pids.max of the cgroup or the limit of processes (ulimit -u)";
    case -ENOMEM: return "; io_uring has no memory to lock: give CAP_IPC_LOCK, or raise the memlock limit (ulimit -l)";
    case -EPERM:
    case -ENOSYS: return "; io_uring is denied: by a seccomp profile, or by kernel.io_uring_disabled";
    default: return "";
    }
}

/* Register again, as descriptors may lead elsewhere now. The kernel keeps a replaced file until its I/O has ended. */
static void files_renew(struct ring *ring, uint32_t changed) {
    if (ring->threads)
        threads_renew(ring->array);
    for (uint32_t i = 0; i < ring->array->device_count && !ring->threads; i++)
        io_uring_register_files_update(&ring->uring, i, &ring->array->devices[i].fd, 1);
    ring->devices_seen = changed;
}

bool ring_idle(const struct ring *ring) { return ring->in_flight == 0; }

void ring_free(struct ring *ring) {
    if (!ring->array)
        return;
    if (ring->beside)
        ring->beside->free(ring);
    atomic_fetch_add(&rings_freed, 1);
    if (ring->threads)
        threads_ring_free(ring);
    else
        io_uring_queue_exit(&ring->uring);
    while (ring->free) {
        struct io_group *next = ring->free->next;
        free(ring->free);
        ring->free = next;
    }
    free(ring->delayed);
    free(ring->devices);
    ring->array = NULL;
}

static struct io_group *group_get(struct ring *ring) {
    struct io_group *group = ring->free;
    if (group)
        ring->free = group->next;
    else
        group = malloc(sizeof(*group));
    if (!group)
        return NULL;
    group->result = 0;
    group->part_count = group->parts_left = group->iov_count = 0;
    group->expired = false;
    group->slot_count = 0;
    group->ring = ring;
    return group;
}

static void group_release(struct io_group *group) {
    struct ring *ring = group->ring;
    for (uint32_t i = 0; i < group->slot_count; i++)
        slot_put(group->slots[i]);
    group->slot_count = 0;
    group->next = ring->free;
    ring->free = group;
}

struct io_uring_sqe *ring_sqe(struct ring *ring) {
    struct io_uring_sqe *sqe = io_uring_get_sqe(&ring->uring);
    while (!sqe) {
        ring_submit(ring);
        sqe = io_uring_get_sqe(&ring->uring);
        if (!sqe)
            ring_reap(ring);
    }
    ring->queued++;
    return sqe;
}

void ring_nop(struct ring *ring, struct io_part *part) {
    if (ring->threads) {
        threads_nop(ring, part);
        return;
    }
    struct io_uring_sqe *sqe = ring_sqe(ring);
    io_uring_prep_nop(sqe);
    io_uring_sqe_set_data(sqe, part);
}

/* Cut the run into pieces by stripe unit, each on one device. The pieces of a device are one run there, and become one part. */
static int group_fill(struct io_group *group, const struct kvfs_array *array, uint64_t offset, const struct iovec *iovs, uint32_t iov_count) {
    const uint64_t unit = array->geometry.stripe_unit, zone_size = array->geometry.zone_size;
    const uint32_t width = array->geometry.stripe_width;
    struct piece {
        struct iovec iov;
        uint16_t next;
    } pieces[GROUP_IOVS];
    uint16_t first[KVFS_STRIPE_WIDTH_MAX], last[KVFS_STRIPE_WIDTH_MAX], counts[KVFS_STRIPE_WIDTH_MAX];
    uint64_t starts[KVFS_STRIPE_WIDTH_MAX], sizes[KVFS_STRIPE_WIDTH_MAX];
    memset(counts, 0, sizeof(counts));
    uint32_t piece_count = 0;
    const struct kvfs_member *members = &array->members[(uint64_t)group->segment * width];
    for (uint32_t i = 0; i < iov_count; i++) {
        uint8_t *data = iovs[i].iov_base;
        uint64_t left = iovs[i].iov_len;
        while (left) {
            uint64_t unit_index = offset / unit, inside = offset % unit;
            uint32_t member = (uint32_t)(unit_index % width);
            uint64_t size = min_u64(left, unit - inside);
            if (counts[member]) { /* contiguous in memory too? then one iovec */
                struct piece *before = &pieces[last[member]];
                if ((uint8_t *)before->iov.iov_base + before->iov.iov_len == data) {
                    before->iov.iov_len += size;
                    sizes[member] += size;
                    data += size, left -= size, offset += size;
                    continue;
                }
            }
            if (piece_count == GROUP_IOVS)
                return -E2BIG;
            pieces[piece_count].iov = (struct iovec){data, size};
            if (!counts[member]) {
                first[member] = (uint16_t)piece_count;
                starts[member] = unit_index / width * unit + inside;
                sizes[member] = 0;
            } else {
                pieces[last[member]].next = (uint16_t)piece_count;
            }
            last[member] = (uint16_t)piece_count++;
            counts[member]++;
            sizes[member] += size;
            data += size, left -= size, offset += size;
        }
    }
    for (uint32_t m = 0; m < width; m++) {
        if (!counts[m])
            continue;
        struct io_part *part = &group->parts[group->part_count++];
        part->group = group;
        part->device = members[m].device;
        part->device_offset = array->devices[part->device].zones_offset + members[m].zone * zone_size + starts[m];
        part->size = (uint32_t)sizes[m];
        part->iov_first = group->iov_count;
        part->iov_count = counts[m];
        part->done = false;
        uint16_t p = first[m];
        for (uint16_t i = 0; i < counts[m]; i++) {
            group->iovs[group->iov_count++] = pieces[p].iov;
            p = pieces[p].next;
        }
    }
    return 0;
}

/* True while a device of the group is left alone after a missed deadline. Afterwards one I/O tries the device, and the others still fail. */
static bool group_stuck(const struct io_group *group, struct kvfs_array *array, uint64_t now) {
    for (uint32_t i = 0; i < group->part_count; i++)
        if (atomic_load_explicit(&array->devices[group->parts[i].device].stuck_until_ns, memory_order_relaxed) > now)
            return true;
    for (uint32_t i = 0; i < group->part_count; i++) {
        atomic_ullong *until = &array->devices[group->parts[i].device].stuck_until_ns;
        unsigned long long seen = atomic_load_explicit(until, memory_order_relaxed);
        if (seen && !(seen <= now && atomic_compare_exchange_strong(until, &seen, now + array->io_timeout_ms * 1000000ull)))
            return true;
    }
    return false;
}

static void part_count(struct ring *ring, struct io_part *part) {
    assert(!part->done);
    assert(ring->in_flight > 0);
    part->done = true;
    ring->in_flight--;
    atomic_fetch_sub(&ring->array->segment_busy[part->group->segment], 1);
    part->group->parts_left--;
}

static void part_over(struct ring *ring, struct io_part *part) {
    struct io_group *group = part->group;
    part_count(ring, part);
    if (group->parts_left)
        return;
    bool expired = group->expired;
    if (expired)
        atomic_fetch_sub(&ring->array->orphans, 1);
    group->callback(group, expired);
    group_release(group);
}

static void part_refuse(struct ring *ring, struct io_part *part, int error) {
    if (!part->group->result)
        part->group->result = error;
    part_over(ring, part);
}

/* Those whose turn it is. */
static void parts_begin(struct ring *ring, uint32_t device) {
    struct io_part *part;
    int refused;
    if (ring->devices[device].taking) /* a start() has reaped */
        return;
    ring->devices[device].taking = true;
    while ((part = turns_take(ring, device, &refused)))
        if (refused)
            part_refuse(ring, part, refused);
        else
            part->ops->start(ring, part);
    ring->devices[device].taking = false;
}

int ring_io(struct ring *ring, bool write, uint32_t segment, uint32_t page, const struct iovec *iovs, uint32_t iov_count, struct slot *const *slots,
            uint32_t slot_count, io_callback callback, void *owner) {
    struct kvfs_array *array = ring->array;
    uint64_t size = 0;
    for (uint32_t i = 0; i < iov_count; i++)
        size += iovs[i].iov_len;
    if (segment >= array->geometry.segment_count || size == 0 || size % PAGE || page * PAGE + size > array->geometry.segment_size)
        return -ERANGE;
    struct io_group *group = group_get(ring);
    if (!group)
        return -ENOMEM;
    assert(slot_count <= sizeof(group->slots) / sizeof(group->slots[0]));
    group->segment = segment;
    group->write = write;
    group->callback = callback;
    group->owner = owner;
    int r = group_fill(group, array, page * PAGE, iovs, iov_count);
    if (r < 0) {
        group_release(group);
        return r;
    }
    for (uint32_t i = 0; i < group->part_count; i++)
        if (atomic_load_explicit(&array->devices[group->parts[i].device].stopped, memory_order_relaxed)) {
            group_release(group);
            return -EIO;
        }
    uint32_t changed = atomic_load_explicit(&array->devices_changed, memory_order_acquire);
    if (changed != ring->devices_seen)
        files_renew(ring, changed);
    uint64_t now = now_ns(), patience = array->io_timeout_ms * 1000000ull;
    if (ring->until_ns && ring->until_ns <= now) {
        group_release(group);
        return -ETIMEDOUT;
    }
    group->patience_ns = ring->until_ns ? min_u64(patience, ring->until_ns - now) : patience;
    group->start_by_ns = ring->start_by_ns;
    if (array->fail_fast && group_stuck(group, array, now)) {
        group_release(group);
        return -ETIMEDOUT;
    }
    for (uint32_t i = 0; i < slot_count; i++) {
        slot_ref(slots[i]);
        group->slots[i] = slots[i];
    }
    group->slot_count = slot_count;
    group->parts_left = group->part_count;
    atomic_fetch_add(&array->segment_busy[segment], group->part_count);
    uint32_t devices[KVFS_STRIPE_WIDTH_MAX], count = group->part_count;
    for (uint32_t i = 0; i < count; i++) { /* before any part begins: with the last one the group may be gone */
        struct io_part *part = &group->parts[i];
        part->remote = NULL;
        part->ended = NULL;
        part->uses = atomic_load(&array->devices[part->device].uses);
        devices[i] = part->device;
        ring->in_flight++;
        turns_add(ring, part);
    }
    const uint64_t until_ns = ring->until_ns, start_by_ns = ring->start_by_ns;
    ring->until_ns = ring->start_by_ns = 0; /* callbacks may begin I/O of others, and these are of this I/O */
    for (uint32_t i = 0; i < count; i++)
        parts_begin(ring, devices[i]);
    ring->until_ns = until_ns;
    ring->start_by_ns = start_by_ns;
    return 0;
}

void ring_submit(struct ring *ring) {
    if (ring->beside)
        ring->beside->submit(ring);
    if (!ring->queued)
        return;
    int r = io_uring_submit(&ring->uring);
    if (r >= 0)
        ring->queued -= min_u64((uint64_t)r, ring->queued);
}

static uint32_t bucket_of(uint64_t ns) {
    uint32_t bucket = ns ? 64 - (uint32_t)__builtin_clzll(ns) : 0;
    return bucket < KVFS_DEVICE_BUCKETS ? bucket : KVFS_DEVICE_BUCKETS - 1;
}

static void part_finish(struct ring *ring, struct io_part *part, int result) {
    struct io_group *group = part->group;
    struct device *device = &ring->array->devices[part->device];
    const uint64_t now = now_ns(), took = now - part->started_ns;
    if (result >= 0)
        turns_answered(ring, part, now);
    if (part->stage == PART_RUNS)
        turns_leave(ring, part);
    if (result < 0 || (uint32_t)result != part->size) {
        int error = result < 0 ? result : -EIO; /* short: the device is smaller than its label says */
        if (error == -ECANCELED)
            error = -ETIMEDOUT;
        if (!group->result)
            group->result = error;
        atomic_fetch_add(&device->errors, 1);
        if (!group->expired && ring->array->on_error)
            ring->array->on_error(ring->array, part->device, -error);
    }
    atomic_fetch_add_explicit(&device->buckets[group->write][bucket_of(took)], 1, memory_order_relaxed);
    if (group->write) {
        atomic_fetch_add_explicit(&device->writes, 1, memory_order_relaxed);
        atomic_fetch_add_explicit(&device->write_bytes, part->size, memory_order_relaxed);
        atomic_fetch_add_explicit(&device->write_ns, took, memory_order_relaxed);
    } else {
        atomic_fetch_add_explicit(&device->reads, 1, memory_order_relaxed);
        atomic_fetch_add_explicit(&device->read_bytes, part->size, memory_order_relaxed);
        atomic_fetch_add_explicit(&device->read_ns, took, memory_order_relaxed);
    }
    if (result >= 0 && atomic_load_explicit(&device->stuck_until_ns, memory_order_relaxed))
        atomic_store_explicit(&device->stuck_until_ns, 0, memory_order_relaxed);
    part_over(ring, part);
}

void ring_part_complete(struct ring *ring, struct io_part *part, int result) {
    if (__builtin_expect(part->ended != NULL, 0))
        part->ended(ring, part, result);
    else
        part_finish(ring, part, result);
}

bool ring_part_delay(struct ring *ring, struct io_part *part, uint64_t due_ns, int result) {
    if (ring->delayed_count == RING_DELAYED_MAX)
        return false;
    ring->delayed[ring->delayed_count].due_ns = due_ns;
    ring->delayed[ring->delayed_count].part = part;
    ring->delayed[ring->delayed_count++].result = result;
    return true;
}

/* A part of the group, which is under way, has missed its deadline. */
static void group_expire(struct ring *ring, struct io_group *group, uint64_t now) {
    const uint64_t patience = ring->array->io_timeout_ms * 1000000ull;
    uint32_t left = 0; /* parts to expire */
    if (!group->result)
        group->result = -ETIMEDOUT;
    for (uint32_t i = 0; i < group->part_count; i++) /* no device has these */
        if (!group->parts[i].done && group->parts[i].stage == PART_WAITS) {
            turns_cut(ring, &group->parts[i]);
            part_count(ring, &group->parts[i]);
        }
    if (!group->parts_left) {
        group->callback(group, false);
        group_release(group);
        return;
    }
    group->expired = true;
    atomic_store(&ring->array->stuck_until_ns, now + 10 * patience);
    atomic_fetch_add(&ring->array->orphans, 1);
    for (uint32_t i = 0; i < group->part_count; i++) {
        struct io_part *part = &group->parts[i];
        if (part->done)
            continue;
        struct device *device = &ring->array->devices[part->device];
        bool silent = now - turns_silent_since(ring, part) >= patience / 2, late = turns_until(ring, part) <= now;
        if (silent || (late && now - part->started_ns >= patience)) { /* else the time went to earlier I/O */
            atomic_fetch_add(&device->timeouts, 1);
            if (silent)
                atomic_store(&device->stuck_until_ns, now + STUCK_FACTOR * patience);
            if (ring->array->on_error)
                ring->array->on_error(ring->array, part->device, ETIMEDOUT);
        }
        turns_leave(ring, part);
        if (part->ops->cancel)
            part->ops->cancel(ring, part);
        left += part->ops->expire != NULL;
    }
    group->callback(group, false);
    for (uint32_t i = 0; left; i++) { /* the group may be gone with its last part */
        struct io_part *part = &group->parts[i];
        if (part->done || !part->ops->expire)
            continue;
        left--;
        part->ops->expire(ring, part, now);
    }
    ring_submit(ring);
}

/* End the parts under way on a device that have missed their deadline. If it was silent for a whole deadline, those that wait for it end too. */
static void device_expire(struct ring *ring, uint32_t device, bool silent, uint64_t now) {
    struct io_part *part = ring->devices[device].first, *wait;
    while (part) {
        uint64_t until = turns_until(ring, part);
        if (until > now) {
            ring->expires_ns = min_u64(ring->expires_ns, until);
            part = part->after;
            continue;
        }
        group_expire(ring, part->group, now);
        part = ring->devices[device].first; /* callbacks may have changed the list */
    }
    for (uint32_t count = silent ? ring->waiting : 0; count && (wait = ring->devices[device].owners); count--)
        group_expire(ring, wait->group, now);
}

static void expire(struct ring *ring) {
    if (ring->expires_ns == UINT64_MAX)
        return;
    const uint64_t now = now_ns();
    if (now < ring->expires_ns)
        return;
    ring->expires_ns = UINT64_MAX;
    bool silent[KVFS_DEVICES_MAX]; /* for all, before parts of one group end on several */
    for (uint32_t i = 0; i < ring->array->device_count; i++) {
        const struct io_part *part = ring->devices[i].first;
        silent[i] = part && now - turns_silent_since(ring, part) >= ring->array->io_timeout_ms * 1000000ull;
    }
    for (uint32_t i = 0; i < ring->array->device_count; i++)
        device_expire(ring, i, silent[i], now);
}

void ring_drop(struct ring *ring, const void *owner) {
    for (uint32_t i = 0; ring->waiting && i < ring->array->device_count; i++)
        for (struct io_part *part; (part = turns_of(ring, i, owner));) {
            turns_cut(ring, part);
            part_refuse(ring, part, -ECANCELED);
        }
}

void ring_renew(const struct ring *ring, uint64_t *until_ns) {
    uint64_t until = now_ns() + ring->array->io_timeout_ms * 1000000ull;
    if (*until_ns && *until_ns < until)
        *until_ns = until;
}

static uint32_t uring_reap(struct ring *ring) {
    uint32_t seen = 0;
    struct io_uring_cqe *cqe;
    while (io_uring_peek_cqe(&ring->uring, &cqe) == 0) {
        uint64_t data = cqe->user_data;
        int result = cqe->res;
        uint32_t flags = cqe->flags;
        io_uring_cqe_seen(&ring->uring, cqe);
        if (data & RING_COMMAND) {
            seen++;
            ring->commanded(ring, data, result);
        } else if (data & 1) {
            if (data != RING_CANCELS && !(flags & IORING_CQE_F_MORE))
                ring->armed &= ~(1u << (data >> 1));
        } else if (data & 6) {
            ring->beside->event(ring, data, flags);
        } else {
            seen++;
            ring_part_complete(ring, (struct io_part *)(uintptr_t)data, result);
        }
    }
    return seen;
}

static uint32_t homes_reap(struct ring *ring) {
    uint32_t seen = 0;
    for (struct io_part *part = threads_take(ring), *next; part; part = next ? next : threads_take(ring)) {
        int result = part->error;
        next = part->next;
        part->error = 0;
        seen++;
        ring_part_complete(ring, part, result);
    }
    return seen;
}

uint32_t ring_reap(struct ring *ring) {
    uint32_t seen = ring->threads ? homes_reap(ring) : uring_reap(ring);
    if (ring->beside)
        seen += ring->beside->reap(ring);
    if (ring->delayed_count) {
        uint64_t now = now_ns();
        for (uint32_t i = 0; i < ring->delayed_count;) {
            struct io_part *part = ring->delayed[i].part;
            if (ring->delayed[i].due_ns > now) {
                i++;
                continue;
            }
            int result = ring->delayed[i].result;
            ring->delayed[i] = ring->delayed[--ring->delayed_count];
            ring_part_complete(ring, part, result);
            seen++;
        }
    }
    expire(ring);
    if (ring->waiting) {
        for (uint32_t i = 0; ring->waiting && i < ring->array->device_count; i++)
            parts_begin(ring, i);
        ring_submit(ring);
    }
    return seen;
}

void ring_feed(struct ring *ring) {
    if (ring->waiting)
        ring_reap(ring);
}

void ring_wait(struct ring *ring, uint64_t timeout_ns) {
    if (ring->delayed_count) /* completions for the next reap, or delays of faults */
        timeout_ns = ring->delayed[0].due_ns ? min_u64(timeout_ns, 1000000) : 0;
    if (ring->expires_ns != UINT64_MAX) {
        uint64_t now = now_ns();
        timeout_ns = min_u64(timeout_ns, ring->expires_ns > now ? ring->expires_ns - now : 1);
    }
    if (ring->beside)
        timeout_ns = ring->beside->timeout(ring, timeout_ns);
    if (ring->threads) {
        if (ring->beside)
            ring->beside->submit(ring);
        threads_wait(ring, timeout_ns);
        return;
    }
    struct __kernel_timespec ts = {.tv_sec = (long long)(timeout_ns / 1000000000u), .tv_nsec = (long long)(timeout_ns % 1000000000u)};
    struct io_uring_cqe *cqe;
    int r = io_uring_submit_and_wait_timeout(&ring->uring, &cqe, 1, &ts, NULL);
    (void)r; /* -ETIME, -EINTR: the caller looks at the ring */
    ring->queued = io_uring_sq_ready(&ring->uring);
}

void ring_poll(struct ring *ring, int fd, uint32_t tag, bool edges) {
    if (ring->armed & (1u << tag))
        return;
    if (ring->threads) {
        threads_poll(ring, fd, tag, edges);
        return;
    }
    struct io_uring_sqe *sqe = ring_sqe(ring);
    if (edges)
        io_uring_prep_poll_multishot(sqe, fd, POLLIN);
    else
        io_uring_prep_poll_add(sqe, fd, POLLIN);
    sqe->user_data = (uint64_t)tag << 1 | 1;
    ring->armed |= 1u << tag;
}
