/* Which part of an I/O begins when.
 *
 * A ring has so many bytes under way on each device; what is more waits here, and no deadline of it runs. The bound follows the device: it is as much as
 * the device answers in a fraction of the deadline. So a queue of many rings and processes is short too. Every second turn is that of the oldest owner,
 * the others are of the owner with the fewest bytes left. So a small read does not wait for a large one before it, and nobody waits for ever. Blocks of
 * one size end one after the other, so the reader that proves them has work.
 *
 * A part that is under way has its deadline from its start, or from the device's last answer to the ring, whichever is later. So it is not late for being
 * behind others. A part that a device has lost among others which it answers ends after EXTENSIONS deadlines from its start. A device that gives no answer
 * for a whole deadline is silent: what waits for it ends with what is under way (ring.c). */
#include "io/ring.h"

#define LIMIT_MIN ((uint64_t)1 << 20) /* bytes under way; a ring begins with so many */
#define LIMIT_MAX ((uint64_t)32 << 20)
#define EXTENSIONS 4u
/* Of the deadline: an answer that took less raises the bound, one that took twice as long lowers it. */
#define QUICK_SHARE 16u
/* Of the deadline: so often at most an answer is told to all rings, whose threads share the line. */
#define TOLD_SHARE 64u

int turns_init(struct ring *ring) {
    ring->expires_ns = UINT64_MAX;
    ring->devices = calloc(ring->array->device_count, sizeof(*ring->devices));
    if (!ring->devices)
        return -ENOMEM;
    for (uint32_t i = 0; i < ring->array->device_count; i++)
        ring->devices[i].limit = LIMIT_MIN;
    return 0;
}

/* ---- what waits ---- */

void turns_add(struct ring *ring, struct io_part *part) {
    struct ring_device *device = &ring->devices[part->device];
    struct io_part *first = device->owned;
    if (first && first->group->owner != part->group->owner)
        for (first = device->owners; first && first->group->owner != part->group->owner;)
            first = first->owner_next;
    part->stage = PART_WAITS;
    part->after = NULL;
    ring->waiting++;
    if (first) {
        first->owner_last->after = part;
        first->owner_last = part;
        first->owner_left += part->size;
        return;
    }
    part->owner_next = NULL;
    part->owner_last = part;
    part->owner_left = part->size;
    *(device->owned ? &device->owned->owner_next : &device->owners) = part;
    device->owned = part;
}

/* The owner's next takes the place of its first at `at`, which is behind `before`. */
static void first_cut(struct ring_device *device, struct io_part **at, struct io_part *before) {
    struct io_part *part = *at, *next = part->after;
    if (next) {
        next->owner_next = part->owner_next;
        next->owner_last = part->owner_last;
        next->owner_left = part->owner_left - part->size;
    }
    *at = next ? next : part->owner_next;
    if (device->owned == part)
        device->owned = next ? next : before;
}

void turns_cut(struct ring *ring, struct io_part *part) {
    struct ring_device *device = &ring->devices[part->device];
    struct io_part **at = &device->owners, *before = NULL;
    assert(part->stage == PART_WAITS);
    while (*at && (*at)->group->owner != part->group->owner) {
        before = *at;
        at = &before->owner_next;
    }
    struct io_part *first = *at, *last = first;
    assert(first); /* it waits */
    ring->waiting--;
    if (first == part) {
        first_cut(device, at, before);
        return;
    }
    while (last->after != part)
        last = last->after;
    last->after = part->after;
    first->owner_left -= part->size;
    if (first->owner_last == part)
        first->owner_last = last;
}

/* ---- what is under way ---- */

static void enter(struct ring *ring, struct io_part *part, uint64_t now) {
    struct ring_device *device = &ring->devices[part->device];
    part->stage = PART_RUNS;
    part->started_ns = now;
    part->ops = atomic_load_explicit(&ring->array->devices[part->device].ops, memory_order_acquire);
    part->before = device->last;
    part->after = NULL;
    *(device->last ? &device->last->after : &device->first) = part;
    device->last = part;
    device->bytes += part->size;
    ring->expires_ns = min_u64(ring->expires_ns, now + part->group->patience_ns);
}

void turns_leave(struct ring *ring, struct io_part *part) {
    struct ring_device *device = &ring->devices[part->device];
    assert(part->stage == PART_RUNS);
    assert(device->bytes >= part->size);
    part->stage = PART_LEFT;
    *(part->before ? &part->before->after : &device->first) = part->after;
    *(part->after ? &part->after->before : &device->last) = part->before;
    device->bytes -= part->size;
}

void turns_answered(struct ring *ring, struct io_part *part, uint64_t now) {
    struct ring_device *device = &ring->devices[part->device];
    const uint64_t patience = ring->array->io_timeout_ms * 1000000ull, quick = patience / QUICK_SHARE, took = now - part->started_ns;
    ring->answered_ns = device->answered_ns = now;
    if (now > atomic_load_explicit(&ring->array->answered_ns, memory_order_relaxed) + patience / TOLD_SHARE)
        atomic_store_explicit(&ring->array->answered_ns, now, memory_order_relaxed);
    if (took > 2 * quick)
        device->limit = device->limit > LIMIT_MIN + part->size ? device->limit - part->size : LIMIT_MIN;
    else if (took < quick && device->owners)
        device->limit = min_u64(device->limit + part->size, LIMIT_MAX);
}

uint64_t turns_silent_since(const struct ring *ring, const struct io_part *part) {
    const uint64_t answered_ns = ring->devices[part->device].answered_ns;
    return answered_ns > part->started_ns ? answered_ns : part->started_ns;
}

uint64_t turns_until(const struct ring *ring, const struct io_part *part) {
    const uint64_t patience = part->group->patience_ns;
    return min_u64(turns_silent_since(ring, part) + patience, part->started_ns + EXTENSIONS * patience);
}

struct io_part *turns_of(const struct ring *ring, uint32_t device, const void *owner) {
    struct io_part *first = ring->devices[device].owners;
    while (first && first->group->owner != owner)
        first = first->owner_next;
    return first;
}

/* ---- turns ---- */

/* Meanwhile its device may have gone, or be another; or it is too late for a write. */
static int refusal(const struct ring *ring, const struct io_part *part, uint64_t now) {
    const struct device *device = &ring->array->devices[part->device];
    if (atomic_load_explicit(&device->stopped, memory_order_relaxed) || atomic_load(&device->uses) != part->uses)
        return -EIO;
    return part->group->start_by_ns && now > part->group->start_by_ns ? -ETIMEDOUT : 0;
}

/* Two are always possible: a device is not idle between them, and one that is lost does not make it silent. */
static bool has_room(const struct ring_device *device, const struct io_part *part) {
    return device->first == device->last || device->bytes + part->size <= device->limit;
}

/* The part whose turn it is waits no longer. */
static struct io_part *turn_of(struct ring_device *device) {
    struct io_part **at = &device->owners, **found = at, *before = NULL, *found_before = NULL;
    device->oldest = !device->oldest;
    for (; !device->oldest && *at; before = *at, at = &before->owner_next)
        if ((*at)->owner_left < (*found)->owner_left) {
            found = at;
            found_before = before;
        }
    struct io_part *part = *found;
    first_cut(device, found, found_before);
    return part;
}

struct io_part *turns_take(struct ring *ring, uint32_t index, int *refused) {
    struct ring_device *device = &ring->devices[index];
    if (!device->owners || !has_room(device, device->owners))
        return NULL;
    const uint64_t now = now_ns();
    struct io_part *part = turn_of(device);
    ring->waiting--;
    *refused = refusal(ring, part, now);
    if (!*refused)
        enter(ring, part, now);
    return part;
}
