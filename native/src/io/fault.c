/* Fault injection: a kind of device that wraps another. It decides when a part begins, and changes or delays the part's result. */
#include "io/ring.h"

#define HELD_LOOK_NS 1000000ull

static uint8_t fault_next(struct device *device, bool write) {
    struct fault_rule *rule = &device->faults;
    unsigned every = atomic_load(&rule->every);
    if (!every || !(atomic_load(&rule->direction) & (write ? 2u : 1u)))
        return KVFS_FAULT_NONE;
    return atomic_fetch_add(&rule->counter, 1) % every == every - 1 ? (uint8_t)atomic_load(&rule->fault) : KVFS_FAULT_NONE;
}

/* A held part ends when its device has another fault, or none. */
static void held(struct ring *ring, struct io_part *part, int result) {
    bool holds = atomic_load(&ring->array->devices[part->device].faults.fault) == KVFS_FAULT_HOLD;
    if (holds && ring_part_delay(ring, part, now_ns() + HELD_LOOK_NS, result))
        return;
    part->ended = NULL;
    ring_part_complete(ring, part, result);
}

static void ended(struct ring *ring, struct io_part *part, int result) {
    unsigned value = atomic_load(&ring->array->devices[part->device].faults.value);
    struct iovec *iov = &part->group->iovs[part->iov_first];
    part->ended = NULL;
    switch (part->fault) {
    case KVFS_FAULT_ERROR: result = -(int)value; break;
    case KVFS_FAULT_SHORT: result = result > 0 ? result / 2 : result; break;
    case KVFS_FAULT_FLIP:
        if (result > 0 && !part->group->write)
            ((uint8_t *)iov->iov_base)[value % iov->iov_len] ^= 1u << (value % 8);
        break;
    case KVFS_FAULT_LOST_WRITE: result = (int)part->size; break;
    case KVFS_FAULT_DELAY:
        if (ring_part_delay(ring, part, now_ns() + value * 1000000ull, result))
            return;
        break;
    case KVFS_FAULT_HOLD:
        part->ended = held;
        if (ring_part_delay(ring, part, now_ns(), value ? -(int)value : result))
            return;
        part->ended = NULL;
        break;
    default: break;
    }
    ring_part_complete(ring, part, result);
}

static void start(struct ring *ring, struct io_part *part) {
    struct device *device = &ring->array->devices[part->device];
    part->ops = atomic_load(&device->kind);
    part->fault = fault_next(device, part->group->write);
    if (part->fault != KVFS_FAULT_NONE)
        part->ended = ended;
    if (part->fault != KVFS_FAULT_LOST_WRITE) {
        part->ops->start(ring, part);
        return;
    }
    part->ops = &uring_ops;
    ring_nop(ring, part);
}

const struct device_ops fault_ops = {.start = start, .cancel = uring_cancel};

void fault_set(struct device *device, uint32_t fault, uint32_t direction, uint32_t every, uint32_t value) {
    struct fault_rule *rule = &device->faults;
    atomic_store(&rule->fault, fault);
    atomic_store(&rule->direction, direction);
    atomic_store(&rule->value, value);
    atomic_store(&rule->counter, 0);
    atomic_store(&rule->every, fault == KVFS_FAULT_NONE ? 0 : every);
    atomic_store(&device->ops, &fault_ops);
}
