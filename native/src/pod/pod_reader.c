/* The readers of the pod map: attach and find. Layout and protocol: pod_layout.h. */
#include "pod/pod_layout.h"

#include "base/sealed_memory.h"

#define READ_ATTEMPTS 64

static inline void cpu_relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

int kvfs_pod_attach(int fd, uint64_t secret, struct kvfs_pod **out) {
    struct pod_constants constants;
    struct kvfs_pod *pod;
    void *memory;
    int64_t size = sealed_size(fd);
    int rc = size < 0 ? (int)size : sealed_peek(fd, &constants, sizeof(constants));

    if (rc < 0)
        return rc;
    if (constants.magic != POD_MAGIC || constants.version != POD_VERSION || constants.bucket_size != sizeof(struct pod_bucket) ||
        constants.checksum != pod_checksum(&constants, secret) || !pod_possible(&constants))
        return -EBADMSG;
    pod = calloc(1, sizeof(*pod));
    if (!pod)
        return -ENOMEM;
    pod->constants = constants;
    pod->secret = secret;
    pod->fd = -1;
    pod_lay_out(pod);
    if (pod->constants.buckets != constants.buckets || pod->constants.size != constants.size || (uint64_t)size != constants.size) {
        free(pod);
        return -EBADMSG;
    }
    memory = mmap(NULL, constants.size, PROT_READ, MAP_SHARED | MAP_NORESERVE, fd, 0);
    if (memory == MAP_FAILED) {
        rc = -errno;
        free(pod);
        return rc;
    }
    pod->memory = memory;
    pod_lay_out(pod);
    *out = pod;
    return 0;
}

void kvfs_pod_detach(struct kvfs_pod *pod) {
    if (!pod)
        return;
    assert(!pod->writer);
    munmap(pod->memory, pod->constants.size);
    free(pod);
}

enum search { SEARCH_FOUND, SEARCH_MISSED, SEARCH_TORN };

static bool is_avoided(const struct kvfs_pod *pod, uint32_t segment) {
    uint64_t until_ns = get(&pod->segments[segment].avoided_until_ns);
    uint64_t own = get(&pod->avoided[segment % POD_AVOIDED]);

    /* The clock is asked only for a segment that was avoided once. */
    if (until_ns && now_ns() < until_ns)
        return true;
    return own && (own & 0xffffff) == segment && now_ns() / 1000000 < own >> 24;
}

/* The block's place, if its segment is alive. */
static bool find_place(const struct kvfs_pod *pod, const struct pod_value *value, struct kvfs_pod_found *out) {
    const struct pod_segment *segment;
    uint64_t number = value->place / pod->constants.segment_pages, state;

    if (number >= pod->constants.segment_count)
        return false;
    segment = &pod->segments[number];
    state = get_acquire(&segment->state);
    out->generation = get_acquire(&segment->generation);
    if ((uint8_t)state != value->tag || get(&segment->state) != state || !out->generation || out->generation & POD_ENDED)
        return false;
    out->segment = (uint32_t)number;
    out->page = (uint32_t)(value->place - number * pod->constants.segment_pages);
    out->slot = (uint16_t)(state >> 8);
    return !is_avoided(pod, out->segment);
}

/* An entry with this fingerprint. */
static enum search examine(const struct kvfs_pod *pod, const struct pod_entry *entry, const struct pod_place *place, struct kvfs_pod_found *out) {
    uint64_t word = get_acquire(&entry->word);
    struct pod_value value = pod_unpack(word ^ place->mask);
    const struct pod_shape *shape = &pod->shapes[value.shape];
    enum search result = SEARCH_MISSED;

    if (value.shape != POD_SHAPE_GONE) {
        uint64_t size = get(&shape->size), pages_mode = get(&shape->pages_mode), owner = get(&shape->owner);

        *out = (struct kvfs_pod_found){
            .size = size,
            .header_pages = (uint32_t)pages_mode,
            .mode = (uint32_t)(pages_mode >> 32),
            .uid = (uint32_t)owner,
            .gid = (uint32_t)(owner >> 32),
            .keyed = value.keyed,
        };
        if (pod_is_directory(out->mode)) {
            out->slot = (uint16_t)value.place;
            out->directory = 1;
            result = SEARCH_FOUND;
        } else if (find_place(pod, &value, out)) {
            result = SEARCH_FOUND;
        }
    }
    atomic_thread_fence(memory_order_acquire);
    return get(&entry->word) == word && get(&entry->fingerprint) == place->fingerprint ? result : SEARCH_TORN;
}

static enum search search(const struct kvfs_pod *pod, const struct pod_place *place, struct kvfs_pod_found *out) {
    enum search result = SEARCH_MISSED;

    for (int i = 0; i < 2; i++) {
        const struct pod_bucket *bucket = &pod->buckets[place->buckets[i]];

        for (int j = 0; j < POD_ENTRIES; j++) {
            if (get_acquire(&bucket->entries[j].fingerprint) != place->fingerprint)
                continue;
            switch (examine(pod, &bucket->entries[j], place, out)) {
            case SEARCH_FOUND: return SEARCH_FOUND;
            case SEARCH_TORN: result = SEARCH_TORN; break;
            case SEARCH_MISSED: break;
            }
        }
    }
    return result;
}

int kvfs_pod_find(const struct kvfs_pod *pod, uint64_t key_low, uint64_t key_high, struct kvfs_pod_found *out) {
    struct pod_place place = pod_place(pod, key_low, key_high);
    const _Atomic uint64_t *move_count = pod_move_count(pod, place.fingerprint);

    __builtin_prefetch(&pod->buckets[place.buckets[1]]);
    for (int attempt = 0; attempt < READ_ATTEMPTS; attempt++) {
        uint64_t moves = get_acquire(move_count);

        switch (search(pod, &place, out)) {
        case SEARCH_FOUND: return 0;
        case SEARCH_MISSED:
            atomic_thread_fence(memory_order_acquire);
            if (get(move_count) == moves)
                return -ENOENT;
            break;
        case SEARCH_TORN: break;
        }
        cpu_relax();
    }
    return -EAGAIN;
}

uint32_t kvfs_pod_owner(const struct kvfs_pod *pod, uint32_t segment) { return pod_owner(&pod->constants, segment); }

void kvfs_pod_avoid(struct kvfs_pod *pod, uint32_t segment, uint64_t until_ns) {
    if (segment >= pod->constants.segment_count)
        return;
    if (pod->writer)
        set(&pod->segments[segment].avoided_until_ns, until_ns);
    else
        set(&pod->avoided[segment % POD_AVOIDED], until_ns ? segment | (until_ns / 1000000 + 1) << 24 : 0);
}

void kvfs_pod_avoid_none(struct kvfs_pod *pod) {
    assert(pod->writer);
    for (uint64_t segment = 0; segment < pod->constants.segment_count; segment++)
        if (get(&pod->segments[segment].avoided_until_ns))
            set(&pod->segments[segment].avoided_until_ns, 0);
}
