/* Another node's news, applied to the pod map. Rules: kvfs_pod.h. */
#include "pod/pod_layout.h"

#define CHUNK 32u /* records under one hold of the mutex, whose buckets are fetched at once */
#define SHAPES_MAX (KVFS_POD_BATCH_SIZE_MAX / sizeof(struct kvfs_pod_batch_shape))
#define SEGMENTS_MAX (KVFS_POD_BATCH_SIZE_MAX / sizeof(struct kvfs_pod_batch_segment))

/* One batch at work. */
struct apply {
    struct kvfs_pod *pod;
    struct kvfs_pod_batch head;
    const struct kvfs_table *table;
    struct kvfs_pod_conflict *conflicts;
    struct kvfs_pod_hit *hits;
    struct kvfs_pod_applied *out;
    const struct kvfs_pod_batch_segment *segments; /* these three lie in bytes[] */
    const struct kvfs_pod_batch_shape *shapes;
    const struct kvfs_pod_batch_record *records;
    int16_t lives[SEGMENTS_MAX];                        /* 0, or the error of all records there */
    int16_t shape_of[SHAPES_MAX];                       /* in the map, or an error */
    int16_t results[CHUNK];                             /* of the chunk's records: 0, 1: nothing to do in the map, or an error */
    struct pod_place places[CHUNK];                     /* of the chunk's records */
    _Alignas(8) uint8_t bytes[KVFS_POD_BATCH_SIZE_MAX]; /* a copy, which nobody else can change */
};

static bool number_possible(uint64_t number) { return number && number >> POD_NUMBER_BITS == 0; }

static void see_version(struct apply *apply, uint64_t number) {
    if (number_possible(number) && number > apply->out->version_max)
        apply->out->version_max = number;
}

/* The head and its counts have been checked. */
static void find_parts(struct apply *apply) {
    const uint8_t *at = apply->bytes + sizeof(apply->head);

    apply->segments = (const struct kvfs_pod_batch_segment *)at;
    at += apply->head.segment_count * sizeof(apply->segments[0]);
    apply->shapes = (const struct kvfs_pod_batch_shape *)at;
    at += apply->head.shape_count * sizeof(apply->shapes[0]);
    apply->records = (const struct kvfs_pod_batch_record *)at;
}

static void apply_lives(struct apply *apply) {
    struct kvfs_pod *pod = apply->pod;

    for (uint32_t i = 0; i < apply->head.segment_count; i++) {
        const struct kvfs_pod_batch_segment *segment = &apply->segments[i];

        if (i % CHUNK == 0)
            pod_lock(pod);
        see_version(apply, segment->generation);
        if (segment->segment >= pod->constants.segment_count)
            apply->lives[i] = -EINVAL;
        else if (pod_owner(&pod->constants, segment->segment) != apply->head.slot)
            apply->lives[i] = -EPERM;
        else
            apply->lives[i] = (int16_t)pod_life(pod, segment->segment, segment->generation, segment->flags & 1);
        if (i % CHUNK == CHUNK - 1 || i + 1 == apply->head.segment_count)
            pod_unlock(pod);
    }
}

static void take_shapes(struct apply *apply) {
    pod_lock(apply->pod);
    for (uint32_t i = 0; i < apply->head.shape_count; i++)
        apply->shape_of[i] = (int16_t)(pod_shape_sound(apply->pod, &apply->shapes[i]) ? pod_shape_take(apply->pod, &apply->shapes[i]) : -EINVAL);
    pod_unlock(apply->pod);
}

static void give_shapes(struct apply *apply) {
    pod_lock(apply->pod);
    for (uint32_t i = 0; i < apply->head.shape_count; i++)
        if (apply->shape_of[i] >= 0)
            pod_shape_give(apply->pod, (uint32_t)apply->shape_of[i]);
    pod_unlock(apply->pod);
}

static uint8_t kind_of(const struct kvfs_pod_batch_record *record) { return (uint8_t)(record->page_kind >> 24) & (uint8_t)~KVFS_POD_KEYED; }

static int apply_here(struct apply *apply, const struct kvfs_pod_batch_record *record, const struct pod_place *place) {
    struct kvfs_pod *pod = apply->pod;
    bool directory = kind_of(record) == KVFS_POD_DIRECTORY_HERE;
    struct kvfs_pod_entry entry = {
        .key_low = record->key_low, .key_high = record->key_high, .version = record->version, .slot = apply->head.slot, .directory = directory};
    int r = 0, shape;

    if (record->shape >= apply->head.shape_count || apply->shape_of[record->shape] == -EINVAL ||
        pod_is_directory(apply->shapes[record->shape].mode) != directory)
        return -EINVAL;
    shape = apply->shape_of[record->shape];
    if (!directory) {
        if (record->segment >= apply->head.segment_count)
            return -EINVAL;
        entry.segment = apply->segments[record->segment].segment;
        entry.generation = apply->segments[record->segment].generation;
        entry.page = record->page_kind & 0xffffff;
        entry.keyed = record->page_kind >> 31;
        r = apply->lives[record->segment];
        if (r == -EINVAL || r == -EPERM)
            return r;
        if (!entry.page || entry.page + (uint64_t)apply->shapes[record->shape].header_pages > pod->constants.segment_pages)
            return -EINVAL;
        /* The life may have ended behind it in this batch, or beside it by another thread. */
        if (!r)
            r = pod_life(pod, entry.segment, entry.generation, false);
    }
    if (!r && shape < 0) {
        pod->writer->count.shapes_full++;
        r = shape;
    }
    if (!r)
        r = pod_put(pod, &entry, place, (uint32_t)shape, POD_NEWS);
    else
        pod_supersede(pod, place, record->version);
    /* Which of the two is stale, for the counts. */
    return r == -ESTALE && !directory && pod_life(pod, entry.segment, entry.generation, false) ? -ESHUTDOWN : r;
}

static int apply_record(struct apply *apply, const struct kvfs_pod_batch_record *record, const struct pod_place *place) {
    uint8_t kind = kind_of(record);

    if (kind == KVFS_POD_HIT)
        return 1;
    if (!kind || kind > KVFS_POD_HIT)
        return -EPROTONOSUPPORT;
    if (!number_possible(record->version) || !(record->key_low | record->key_high))
        return -EINVAL;
    see_version(apply, record->version);
    if (kind == KVFS_POD_HERE || kind == KVFS_POD_DIRECTORY_HERE)
        return apply_here(apply, record, place);
    if (kind == KVFS_POD_DIRECTORY_GONE)
        return pod_directory_gone(apply->pod, record->key_low, record->key_high, place, apply->head.slot, record->version);
    return pod_remove(apply->pod, place, record->version);
}

static void add_conflict(struct apply *apply, const struct kvfs_pod_batch_record *record, const struct kvfs_record *own) {
    apply->conflicts[apply->out->conflict_count++] = (struct kvfs_pod_conflict){
        .inode = own->inode,
        .own_version = own->version,
        .version = record->version,
        .key_low = record->key_low,
        .key_high = record->key_high,
        .kind = kind_of(record),
        .slot = apply->head.slot,
    };
}

/* This node's own table, asked after the map has changed. Returns the record's result. */
static int meet_own(struct apply *apply, const struct kvfs_pod_batch_record *record, const struct pod_place *place, int result) {
    struct kvfs_record own;
    uint8_t kind = kind_of(record);
    int r = kvfs_table_find_key(apply->table, record->key_low, record->key_high, &own);
    bool block;

    if (r) {
        apply->out->unsure += r == -EAGAIN;
        return result;
    }
    block = own.kind == KVFS_KIND_FILE && own.flags & KVFS_INODE_SEALED;
    if (kind == KVFS_POD_HIT) {
        if (block)
            apply->hits[apply->out->hit_count++] = (struct kvfs_pod_hit){.inode = own.inode, .count = record->version};
        return result;
    }
    /* Two nodes that make one directory make the same one. The rights that were set last are this node's, too. */
    if (own.kind == KVFS_KIND_DIRECTORY && kind != KVFS_POD_HERE) {
        if (kind == KVFS_POD_DIRECTORY_HERE && record->version > own.version)
            add_conflict(apply, record, &own);
        return result;
    }
    if (own.version > record->version || own.kind == KVFS_KIND_DIRECTORY) {
        if (kind == KVFS_POD_GONE || kind == KVFS_POD_DIRECTORY_GONE)
            return -EEXIST;
        pod_lock(apply->pod);
        pod_withdraw(apply->pod, place, record->version);
        pod_unlock(apply->pod);
        return -EEXIST;
    }
    /* A file that is still written meets the map when it is sealed. */
    if (block)
        add_conflict(apply, record, &own);
    return result;
}

static void count_result(struct kvfs_pod_applied *out, int result) {
    switch (result) {
    case 0: out->applied++; break;
    case 1: out->hits++; break;
    case -ESTALE: out->old++; break;
    case -ESHUTDOWN: out->ended++; break;
    case -EPERM: out->foreign++; break;
    case -ENOSPC: out->no_room++; break;
    case -EAGAIN: out->waiting++; break;
    case -EPROTONOSUPPORT: out->unknown++; break;
    case -EEXIST: out->own++; break;
    default: out->malformed++;
    }
}

static void apply_chunk(struct apply *apply, uint32_t first, uint32_t count) {
    struct kvfs_pod *pod = apply->pod;

    for (uint32_t i = 0; i < count; i++) {
        const struct kvfs_pod_batch_record *record = &apply->records[first + i];

        apply->places[i] = pod_place(pod, record->key_low, record->key_high);
        pod_prefetch(pod, &apply->places[i]);
    }
    pod_lock(pod);
    for (uint32_t i = 0; i < count; i++)
        apply->results[i] = (int16_t)apply_record(apply, &apply->records[first + i], &apply->places[i]);
    pod_sweep(pod, count);
    pod_unlock(pod);
    /* First the map, then the table: one that changes them in the other order is seen here, or sees this. */
    atomic_thread_fence(memory_order_seq_cst);
    for (uint32_t i = 0; i < count; i++) {
        int r = apply->results[i];

        /* Also what was refused meets the own block, unless it makes no sense. */
        if (apply->table && r != -EINVAL && r != -EPERM && r != -EPROTONOSUPPORT)
            r = meet_own(apply, &apply->records[first + i], &apply->places[i], r);
        count_result(apply->out, r);
    }
}

/* Copies the batch, then checks the copy. */
static int take_batch(struct apply *apply, uint32_t expected_slot, const void *batch, uint64_t size) {
    const struct kvfs_pod *pod = apply->pod;
    int r;

    if (size > sizeof(apply->bytes))
        return -EBADMSG;
    memcpy(apply->bytes, batch, size);
    r = kvfs_pod_batch_check(apply->bytes, size, pod->secret, &apply->head);
    if (r)
        return r;
    if (expected_slot >= pod->constants.nodes || expected_slot == pod->writer->own_slot)
        return -EINVAL;
    return apply->head.slot == expected_slot ? 0 : -EPERM;
}

int kvfs_pod_apply(struct kvfs_pod *pod, uint32_t expected_slot, const void *batch, uint64_t size, const struct kvfs_table *table,
                   struct kvfs_pod_conflict *conflicts, struct kvfs_pod_hit *hits, struct kvfs_pod_applied *out) {
    struct apply *apply = malloc(sizeof(*apply)); /* some 90 KiB */
    int r;

    assert(pod->writer);
    memset(out, 0, sizeof(*out));
    if (!apply)
        return -ENOMEM;
    apply->pod = pod;
    apply->table = table;
    apply->conflicts = conflicts;
    apply->hits = hits;
    apply->out = out;
    r = take_batch(apply, expected_slot, batch, size);
    pod_lock(pod);
    pod->writer->count.batches += !r;
    pod->writer->count.versions_unknown += r == -EPROTONOSUPPORT;
    pod->writer->count.batches_refused += r && r != -EPROTONOSUPPORT;
    pod_unlock(pod);
    if (!r) {
        uint32_t records = apply->head.record_count;

        out->start = apply->head.start;
        out->number = apply->head.number;
        out->records = records;
        find_parts(apply);
        apply_lives(apply);
        take_shapes(apply);
        for (uint32_t first = 0; first < records; first += CHUNK)
            apply_chunk(apply, first, (uint32_t)min_u64(CHUNK, records - first));
        give_shapes(apply);
    }
    free(apply);
    return r;
}
