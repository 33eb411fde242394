/* Repeats of an owner: what it says no more is gone. Every version has the parity of the repeat in which its slot said so last, and so has every
 * directory of each slot. Layout and protocol: pod_layout.h. */
#include "pod/pod_layout.h"

#define WALKS_MAX 4
#define SLICE 1024u /* buckets or directories that are looked at under one hold of the mutex */

/* A block of it. Directories are several slots', but for those whose holders are not known. */
static bool is_of(const struct kvfs_pod *pod, struct pod_slot at, const struct pod_value *value, uint32_t slot) {
    if (pod_is_directory((uint32_t)(get(&pod->shapes[value->shape].pages_mode) >> 32)))
        return value->place == slot && !pod_holders_known(pod, get(&pod_entry(pod, at)->fingerprint));
    return pod_owner(&pod->constants, (uint32_t)(value->place / pod->constants.segment_pages)) == slot;
}

/* All that is live and the slot's alone, with this parity: removed, or given the other parity. */
static uint64_t walk(struct kvfs_pod *pod, uint32_t slot, unsigned parity, bool remove) {
    uint64_t count = 0;

    for (uint64_t bucket = 0; bucket < pod->constants.buckets;) {
        uint64_t end = min_u64(bucket + SLICE, pod->constants.buckets);

        pod_lock(pod);
        for (; bucket < end; bucket++) {
            for (int i = 0; i < POD_ENTRIES; i++) {
                struct pod_slot at = {.bucket = bucket, .index = i};
                struct pod_value value;

                if (pod_state(pod, at, &value) != POD_LIVE || *pod_version(pod, at) >> POD_PARITY_SHIFT != parity || !is_of(pod, at, &value, slot))
                    continue;
                count++;
                if (!remove) {
                    *pod_version(pod, at) ^= UINT64_C(1) << POD_PARITY_SHIFT;
                    continue;
                }
                pod_clear(pod, at);
                pod_release(pod, POD_LIVE, &value);
                pod->writer->count.removed++;
            }
        }
        pod_unlock(pod);
    }
    return count;
}

/* The directories that the slot told of in repeats of this parity: left, or given the other parity. */
static uint64_t walk_directories(struct kvfs_pod *pod, uint32_t slot, unsigned parity, bool remove) {
    uint64_t count = 0, low, high;
    bool more = true;

    for (uint32_t at = 0; more;) {
        pod_lock(pod);
        for (uint32_t end = at + SLICE; at < end && (more = pod_directories_next(pod, &at, slot, parity, &low, &high));) {
            struct pod_place place = pod_place(pod, low, high);

            if (!low && !high)
                continue;
            count++;
            if (remove)
                pod_directory_leave(pod, &place, slot, pod_holder_remove(pod, low, high, slot));
            else
                pod_holder_flip(pod, low, high, slot);
        }
        pod_unlock(pod);
    }
    return count;
}

int kvfs_pod_repeat_begin(struct kvfs_pod *pod, uint32_t slot) {
    struct pod_writer *writer = pod->writer;
    bool again;

    assert(writer);
    if (slot >= pod->constants.nodes || slot == writer->own_slot)
        return -EINVAL;
    pod_lock(pod);
    again = writer->repeating[slot];
    if (!again)
        writer->repeat_parity[slot] ^= 1;
    writer->repeating[slot] = 1;
    pod_unlock(pod);
    /* An interrupted repeat has confirmed nothing. */
    if (again) {
        walk(pod, slot, writer->repeat_parity[slot], false);
        walk_directories(pod, slot, writer->repeat_parity[slot], false);
    }
    return 0;
}

static uint64_t displaced(struct kvfs_pod *pod) {
    uint64_t count;

    pod_lock(pod);
    count = pod->writer->count.displaced;
    pod_unlock(pod);
    return count;
}

uint64_t kvfs_pod_repeat_end(struct kvfs_pod *pod, uint32_t slot) {
    struct pod_writer *writer = pod->writer;
    uint64_t count = 0, moved = UINT64_MAX;
    bool begun;

    assert(writer);
    if (slot >= pod->constants.nodes)
        return 0;
    pod_lock(pod);
    begun = writer->repeating[slot];
    pod_unlock(pod);
    if (!begun)
        return 0;
    /* An entry that moves while the walk passes may evade it: some of a million in the first walk, none in the next. */
    for (int walks = 0; walks < WALKS_MAX && moved != displaced(pod); walks++) {
        moved = displaced(pod);
        count += walk(pod, slot, writer->repeat_parity[slot] ^ 1u, true);
    }
    count += walk_directories(pod, slot, writer->repeat_parity[slot] ^ 1u, true);
    pod_lock(pod);
    writer->repeating[slot] = 0;
    pod_unlock(pod);
    return count;
}
