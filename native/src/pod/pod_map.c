/* The writer of the pod map: its memory, lives of segments, shapes, and the sweep. Layout and protocol: pod_layout.h. */
#include "base/descriptor.h"
#include "pod/pod_layout.h"
#include "base/sealed_memory.h"

#include <fcntl.h>
#include <sys/mman.h>

/* A new life that would wait may bring the sweep forward by so much: some milliseconds. */
#define SWEEP_AT_ONCE (UINT64_C(1) << 16)
#define SLICE 1024u /* buckets that are looked at under one hold of the mutex */
/* Younger than this a memory of `gone` goes only to make room. Owners repeat what is at most ten minutes old. */
#define GONE_SECONDS 900

static uint64_t seconds(void) {
    struct timespec ts;

    clock_gettime(CLOCK_MONOTONIC_COARSE, &ts);
    return (uint64_t)ts.tv_sec;
}

/* ---- memory ---- */

static void *reserve_memory(uint64_t size) {
    void *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

    return memory == MAP_FAILED ? NULL : memory;
}

static int create_writer(struct kvfs_pod *pod) {
    struct pod_writer *writer = calloc(1, sizeof(*writer));

    if (!writer)
        return -ENOMEM;
    pod->writer = writer;
    pthread_mutex_init(&writer->lock, NULL);
    writer->versions_size = pod->constants.buckets * POD_ENTRIES * sizeof(*writer->versions);
    writer->lives_size = pod->constants.segment_count * sizeof(*writer->lives);
    writer->versions = reserve_memory(writer->versions_size);
    writer->lives = reserve_memory(writer->lives_size);
    if (!writer->versions || !writer->lives)
        return -ENOMEM;
    /* Keys are random, so every page is touched soon. With large ones an insert has fewer TLB misses. */
    if (writer->versions_size >= 2u << 20)
        madvise(writer->versions, writer->versions_size, MADV_HUGEPAGE);
    for (uint32_t shape = POD_SHAPE_GONE; shape-- > 0;)
        writer->shape_free[writer->shape_free_count++] = (uint16_t)shape;
    return pod_directories_create(pod);
}

int kvfs_pod_create(const struct kvfs_pod_config *config, struct kvfs_pod **out) {
    struct kvfs_pod *pod;
    void *memory;
    int r;

    struct pod_constants constants = {
        .magic = POD_MAGIC,
        .version = POD_VERSION,
        .bucket_size = sizeof(struct pod_bucket),
        .entries_max = config->entries_max,
        .segment_count = config->segment_count,
        .segment_pages = config->segment_pages,
        .lot = config->lot,
        .nodes = config->nodes,
    };
    if (!pod_possible(&constants) || config->own_slot >= config->nodes)
        return -EINVAL;
    pod = calloc(1, sizeof(*pod));
    if (!pod)
        return -ENOMEM;
    pod->constants = constants;
    pod->secret = config->secret;
    pod_lay_out(pod);
    pod->fd = descriptor_above(memfd_create("kvfs-pod-map", MFD_ALLOW_SEALING | MFD_CLOEXEC));
    if (pod->fd < 0 || ftruncate(pod->fd, (off_t)pod->constants.size) < 0)
        goto failed;
    memory = mmap(NULL, pod->constants.size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, pod->fd, 0);
    if (memory == MAP_FAILED)
        goto failed;
    pod->memory = memory;
    pod_lay_out(pod);
    if (pod->constants.size >= 2u << 20)
        madvise(memory, pod->constants.size, MADV_HUGEPAGE); /* where the machine's setting for shared memory allows it */
    r = sealed_make(pod->fd);
    if (r == 0)
        r = create_writer(pod);
    if (r)
        goto out;
    pod->writer->own_slot = config->own_slot;
    pod->constants.checksum = pod_checksum(&pod->constants, pod->secret);
    memcpy(pod->memory, &pod->constants, sizeof(pod->constants));
    *out = pod;
    return 0;

failed:
    r = -errno;
out:
    kvfs_pod_destroy(pod);
    return r;
}

void kvfs_pod_destroy(struct kvfs_pod *pod) {
    struct pod_writer *writer = pod ? pod->writer : NULL;

    if (!pod)
        return;
    if (pod->memory)
        munmap(pod->memory, pod->constants.size);
    if (pod->fd >= 0)
        close(pod->fd);
    if (writer && writer->versions)
        munmap(writer->versions, writer->versions_size);
    if (writer && writer->lives)
        munmap(writer->lives, writer->lives_size);
    if (writer)
        pod_directories_destroy(pod);
    if (writer)
        pthread_mutex_destroy(&writer->lock);
    free(writer);
    free(pod);
}

int kvfs_pod_fd(const struct kvfs_pod *pod) { return pod->fd; }

void kvfs_pod_statistics(struct kvfs_pod *pod, struct kvfs_pod_statistics *out) {
    const struct pod_writer *writer = pod->writer;

    pod_lock(pod);
    *out = writer->count;
    out->entries_max = pod->constants.entries_max;
    out->capacity = pod->constants.buckets * POD_ENTRIES;
    out->bytes = pod->constants.size + writer->versions_size + writer->lives_size + pod_directories_size(pod);
    out->shapes = POD_SHAPE_GONE - writer->shape_free_count;
    pod_unlock(pod);
}

/* ---- entries ---- */

enum pod_state pod_state(const struct kvfs_pod *pod, struct pod_slot slot, struct pod_value *value) {
    const struct pod_entry *entry = pod_entry(pod, slot);
    uint64_t fingerprint = get(&entry->fingerprint), generation;
    const struct pod_segment *segment;

    if (!fingerprint)
        return POD_EMPTY;
    *value = pod_unpack(get(&entry->word) ^ pod_mix(fingerprint));
    if (value->shape == POD_SHAPE_GONE)
        return POD_GONE;
    if (pod_is_directory((uint32_t)(get(&pod->shapes[value->shape].pages_mode) >> 32)))
        return POD_LIVE;
    segment = &pod->segments[value->place / pod->constants.segment_pages];
    generation = get(&segment->generation);
    return (uint8_t)get(&segment->state) == value->tag && generation && !(generation & POD_ENDED) ? POD_LIVE : POD_DEAD;
}

void pod_release(struct kvfs_pod *pod, enum pod_state state, const struct pod_value *value) {
    struct pod_writer *writer = pod->writer;

    switch (state) {
    case POD_EMPTY: return;
    case POD_GONE: writer->count.gone--; return;
    case POD_DEAD: writer->count.dead--; break;
    case POD_LIVE:
        writer->count.entries--;
        if (pod_is_directory((uint32_t)(get(&pod->shapes[value->shape].pages_mode) >> 32)))
            writer->count.directories--;
        else
            writer->lives[value->place / pod->constants.segment_pages].entries--;
    }
    pod_shape_give(pod, value->shape);
}

void pod_clear(struct kvfs_pod *pod, struct pod_slot slot) { set_release(&pod_entry(pod, slot)->fingerprint, 0); }

/* ---- shapes: an index by content, and a count of users ---- */

static uint32_t shape_home(const struct kvfs_pod_batch_shape *shape) {
    uint64_t hash =
        pod_mix(shape->size ^ pod_mix(shape->header_pages | (uint64_t)shape->mode << 32) ^ pod_mix(~(shape->uid | (uint64_t)shape->gid << 32)));

    return (uint32_t)hash % (2 * POD_SHAPES);
}

static struct kvfs_pod_batch_shape shape_content(const struct kvfs_pod *pod, uint32_t number) {
    const struct pod_shape *shape = &pod->shapes[number];
    uint64_t pages_mode = get(&shape->pages_mode), owner = get(&shape->owner);

    return (struct kvfs_pod_batch_shape){.size = get(&shape->size),
                                         .header_pages = (uint32_t)pages_mode,
                                         .mode = (uint32_t)(pages_mode >> 32),
                                         .uid = (uint32_t)owner,
                                         .gid = (uint32_t)(owner >> 32)};
}

static bool same_shape(const struct kvfs_pod *pod, uint32_t number, const struct kvfs_pod_batch_shape *shape) {
    struct kvfs_pod_batch_shape content = shape_content(pod, number);

    return memcmp(&content, shape, sizeof(content)) == 0;
}

int pod_shape_take(struct kvfs_pod *pod, const struct kvfs_pod_batch_shape *wanted) {
    struct pod_writer *writer = pod->writer;
    struct pod_shape *shape;
    uint32_t number = writer->shape_last, at;

    if (writer->shape_users[number] && same_shape(pod, number, wanted)) {
        writer->shape_users[number]++;
        return (int)number;
    }
    for (at = shape_home(wanted); writer->shape_index[at]; at = (at + 1) % (2 * POD_SHAPES)) {
        number = writer->shape_index[at] - 1u;
        if (same_shape(pod, number, wanted)) {
            writer->shape_last = (uint16_t)number;
            writer->shape_users[number]++;
            return (int)number;
        }
    }
    if (!writer->shape_free_count)
        return -ENOSPC;
    number = writer->shape_free[--writer->shape_free_count];
    shape = &pod->shapes[number];
    /* Readers of the entries that had this number before see that they went. */
    atomic_thread_fence(memory_order_release);
    set(&shape->size, wanted->size);
    set(&shape->pages_mode, wanted->header_pages | (uint64_t)wanted->mode << 32);
    set(&shape->owner, wanted->uid | (uint64_t)wanted->gid << 32);
    writer->shape_index[at] = (uint16_t)(number + 1);
    writer->shape_last = (uint16_t)number;
    writer->shape_users[number] = 1;
    return (int)number;
}

void pod_shape_give(struct kvfs_pod *pod, uint32_t number) {
    struct pod_writer *writer = pod->writer;
    struct kvfs_pod_batch_shape content;
    uint32_t hole, next;

    assert(writer->shape_users[number]);
    if (--writer->shape_users[number])
        return;
    content = shape_content(pod, number);
    for (hole = shape_home(&content); writer->shape_index[hole] != number + 1; hole = (hole + 1) % (2 * POD_SHAPES))
        ;
    /* Those behind the hole move into it, unless it lies before their home. */
    for (next = (hole + 1) % (2 * POD_SHAPES); writer->shape_index[next]; next = (next + 1) % (2 * POD_SHAPES)) {
        uint32_t home;

        content = shape_content(pod, writer->shape_index[next] - 1u);
        home = shape_home(&content);
        if ((next - home) % (2 * POD_SHAPES) < (next - hole) % (2 * POD_SHAPES))
            continue;
        writer->shape_index[hole] = writer->shape_index[next];
        hole = next;
    }
    writer->shape_index[hole] = 0;
    writer->shape_free[writer->shape_free_count++] = (uint16_t)number;
}

bool pod_shape_sound(const struct kvfs_pod *pod, const struct kvfs_pod_batch_shape *shape) {
    uint64_t leaves = pages_of(shape->size);

    if ((shape->mode & ~KVFS_POD_EXTENTS) >> 16 || shape->size >> 48)
        return false;
    if (pod_is_directory(shape->mode))
        return !shape->size && !shape->header_pages && !(shape->mode & KVFS_POD_EXTENTS);
    /* A regular file. A header holds a checksum of 8 bytes for each page of the file. */
    return (shape->mode & 0170000) == 0100000 && shape->header_pages && shape->header_pages < pod->constants.segment_pages &&
           leaves * sizeof(uint64_t) + sizeof(struct kvfs_block_header) <= shape->header_pages * PAGE;
}

/* ---- lives of segments ---- */

/* Whether all dead entries of the half that the next tag is in are gone. */
static bool may_cross(struct kvfs_pod *pod, struct pod_life *life) {
    struct pod_writer *writer = pod->writer;

    if (writer->count.sweeps < life->sweeps)
        pod_sweep(pod, min_u64(SWEEP_AT_ONCE, 2 * pod->constants.buckets));
    return writer->count.sweeps >= life->sweeps;
}

/* End the tag. False: the next one may still be on dead entries. */
static bool next_tag(struct kvfs_pod *pod, uint32_t segment) {
    struct pod_writer *writer = pod->writer;
    struct pod_life *life = &writer->lives[segment];
    uint64_t state = get(&pod->segments[segment].state);
    uint8_t tag = (uint8_t)(state + 1);

    if (life->used) {
        if (tag % 128 == 0) {
            if (!may_cross(pod, life))
                return false;
            /* The half that is left here may come again after a sweep that began later than now. */
            life->sweeps = (uint32_t)writer->count.sweeps + (writer->sweep_at ? 2 : 1);
        }
        state = tag;
        life->used = 0;
    }
    set_release(&pod->segments[segment].state, (state & 0xff) | (uint64_t)pod_owner(&pod->constants, segment) << 8);
    return true;
}

static void end_life(struct kvfs_pod *pod, uint32_t segment) {
    struct pod_life *life = &pod->writer->lives[segment];

    pod->writer->count.entries -= life->entries;
    pod->writer->count.dead += life->entries;
    pod->writer->count.segments--;
    pod->writer->count.lives++;
    life->entries = 0;
}

int pod_life(struct kvfs_pod *pod, uint32_t number, uint64_t generation, bool ended) {
    struct pod_segment *segment;
    uint64_t known;
    bool alive;

    if (number >= pod->constants.segment_count || !generation || generation >> POD_NUMBER_BITS)
        return -EINVAL;
    segment = &pod->segments[number];
    known = get(&segment->generation);
    alive = known && !(known & POD_ENDED);
    known &= ~POD_ENDED;
    if (generation < known)
        return -ESTALE;
    if (generation == known && (alive ? !ended : ended))
        return 0;
    if (generation == known && !alive)
        return -ESTALE;
    /* By this store all entries of the life before are dead. */
    if (alive) {
        set_release(&segment->generation, (ended ? generation : known) | POD_ENDED);
        end_life(pod, number);
    }
    if (ended) {
        set_release(&segment->generation, generation | POD_ENDED);
        return 0;
    }
    if (!next_tag(pod, number)) {
        pod->writer->count.waiting++;
        return -EAGAIN;
    }
    set_release(&segment->generation, generation);
    pod->writer->count.segments++;
    return 0;
}

int kvfs_pod_life(struct kvfs_pod *pod, uint32_t segment, uint64_t generation, int ended) {
    int r;

    assert(pod->writer);
    pod_lock(pod);
    r = pod_life(pod, segment, generation, ended);
    pod_unlock(pod);
    return r;
}

/* ---- the sweep ---- */

static uint64_t sweep_bucket(struct kvfs_pod *pod, uint64_t bucket, uint64_t now) {
    uint64_t went = 0;

    for (int i = 0; i < POD_ENTRIES; i++) {
        struct pod_slot slot = {.bucket = bucket, .index = i};
        struct pod_value value;
        enum pod_state state = pod_state(pod, slot, &value);

        if (state == POD_DEAD || (state == POD_GONE && value.place + GONE_SECONDS < now)) {
            pod_clear(pod, slot);
            pod_release(pod, state, &value);
            went++;
        }
    }
    return went;
}

uint64_t pod_sweep(struct kvfs_pod *pod, uint64_t buckets) {
    struct pod_writer *writer = pod->writer;
    uint64_t went = 0, now = seconds();

    while (buckets--) {
        /* Where there is nothing to find it need not look. */
        if (writer->count.dead || writer->count.gone)
            went += sweep_bucket(pod, writer->sweep_at, now);
        if (++writer->sweep_at == pod->constants.buckets) {
            writer->sweep_at = 0;
            writer->count.sweeps++;
        }
    }
    writer->count.swept += went;
    return went;
}

uint64_t kvfs_pod_sweep(struct kvfs_pod *pod, uint64_t buckets) {
    uint64_t went = 0;

    assert(pod->writer);
    while (buckets) {
        uint64_t slice = min_u64(buckets, SLICE);

        pod_lock(pod);
        went += pod_sweep(pod, slice);
        pod_unlock(pod);
        buckets -= slice;
    }
    return went;
}
