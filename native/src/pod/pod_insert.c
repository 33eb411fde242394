/* Entries of the pod map: where a new one finds room, and how one changes, moves and goes. Layout and protocol: pod_layout.h. */
#include "pod/pod_layout.h"

/* The search for room looks at so many buckets: the two, their 8 others, the 32 of those, and some more. */
#define SEARCH_BUCKETS 128

static uint64_t seconds(void) {
    struct timespec ts;

    clock_gettime(CLOCK_MONOTONIC_COARSE, &ts);
    return (uint64_t)ts.tv_sec;
}

static uint64_t version_of(const struct kvfs_pod *pod, struct pod_slot slot) { return *pod_version(pod, slot) & POD_VERSION_MASK; }

static struct pod_slot find_slot(const struct kvfs_pod *pod, const struct pod_place *place) {
    for (int i = 0; i < 2; i++)
        for (int j = 0; j < POD_ENTRIES; j++)
            if (get(&pod->buckets[place->buckets[i]].entries[j].fingerprint) == place->fingerprint)
                return (struct pod_slot){.bucket = place->buckets[i], .index = j};
    return (struct pod_slot){.index = -1};
}

/* A place in this bucket that holds nothing live: an empty one, else a dead one, else the oldest memory of a `gone`. */
static struct pod_slot find_free(const struct kvfs_pod *pod, uint64_t bucket) {
    struct pod_slot best = {.bucket = bucket, .index = -1};
    uint64_t oldest = UINT64_MAX;

    for (int i = 0; i < POD_ENTRIES; i++)
        if (!get(&pod->buckets[bucket].entries[i].fingerprint))
            return (struct pod_slot){.bucket = bucket, .index = i};
    /* Without this a search in a full map of live entries takes twice as long. */
    if (!pod->writer->count.dead && !pod->writer->count.gone)
        return best;
    for (int i = 0; i < POD_ENTRIES; i++) {
        struct pod_slot slot = {.bucket = bucket, .index = i};
        struct pod_value value;
        enum pod_state state = pod_state(pod, slot, &value);

        if (state == POD_DEAD)
            return slot;
        if (state == POD_GONE && value.place < oldest) {
            oldest = value.place;
            best = slot;
        }
    }
    return best;
}

/* Readers must see the place empty before they can see half of what is next. */
static void entry_write(struct kvfs_pod *pod, struct pod_slot slot, uint64_t fingerprint, uint64_t word) {
    struct pod_entry *entry = pod_entry(pod, slot);

    set(&entry->fingerprint, 0);
    atomic_thread_fence(memory_order_release);
    set(&entry->word, word);
    set_release(&entry->fingerprint, fingerprint);
}

/* The accounts of what holds nothing live, before it is written over. */
static void take_over(struct kvfs_pod *pod, struct pod_slot slot) {
    struct pod_value value;
    enum pod_state state = pod_state(pod, slot, &value);

    assert(state != POD_LIVE);
    pod_release(pod, state, &value);
}

/* Copy first; the move count tells readers who look for the entry to look again; then the caller writes over the old place. */
static void entry_move(struct kvfs_pod *pod, struct pod_slot from, struct pod_slot to) {
    struct pod_entry *entry = pod_entry(pod, from);
    uint64_t fingerprint = get(&entry->fingerprint);
    _Atomic uint64_t *moves = pod_move_count(pod, fingerprint);

    entry_write(pod, to, fingerprint, get(&entry->word));
    *pod_version(pod, to) = *pod_version(pod, from);
    set_release(moves, get(moves) + 1);
    pod->writer->count.displaced++;
}

struct step {
    uint64_t bucket;
    int parent; /* in steps[]; -1: one of the key's own buckets */
    int index;  /* the entry of the parent's bucket that would move here */
};

static bool is_above(const struct step *steps, int at, uint64_t bucket) {
    for (; at >= 0; at = steps[at].parent)
        if (steps[at].bucket == bucket)
            return true;
    return false;
}

/* Entries move from the end of the way to its beginning, so that none is ever nowhere. Returns the place that is free then: in one of the key's own
 * buckets. It held a copy that nobody misses. */
static struct pod_slot move_along(struct kvfs_pod *pod, const struct step *steps, int at, int index, struct pod_slot to) {
    take_over(pod, to);
    for (;;) {
        struct pod_slot from = {.bucket = steps[at].bucket, .index = index};

        entry_move(pod, from, to);
        to = from;
        index = steps[at].index;
        at = steps[at].parent;
        if (at < 0)
            return to;
    }
}

/* Breadth first: the shortest way moves the fewest. All entries that are seen here are live. */
static struct pod_slot make_room(struct kvfs_pod *pod, const struct pod_place *place) {
    struct step steps[SEARCH_BUCKETS] = {{.bucket = place->buckets[0], .parent = -1}, {.bucket = place->buckets[1], .parent = -1}};
    int count = 2;

    for (int at = 0; at < count; at++) {
        const struct pod_bucket *bucket = &pod->buckets[steps[at].bucket];
        uint64_t others[POD_ENTRIES];

        for (int i = 0; i < POD_ENTRIES; i++) {
            others[i] = pod_other_bucket(pod_mix(get(&bucket->entries[i].fingerprint)), steps[at].bucket, pod->constants.buckets);
            __builtin_prefetch(&pod->buckets[others[i]]);
        }
        for (int i = 0; i < POD_ENTRIES; i++) {
            struct pod_slot free;

            if (others[i] == place->buckets[0] || others[i] == place->buckets[1] || is_above(steps, at, others[i]))
                continue;
            free = find_free(pod, others[i]);
            if (free.index >= 0)
                return move_along(pod, steps, at, i, free);
            if (count < SEARCH_BUCKETS)
                steps[count++] = (struct step){.bucket = others[i], .parent = at, .index = i};
        }
    }
    return (struct pod_slot){.index = -1};
}

/* A live entry of the two buckets goes: the block of the lowest version. A directory goes only for a directory; it leads to more than itself. */
static struct pod_slot drop_one(struct kvfs_pod *pod, const struct pod_place *place, uint64_t version, bool directory) {
    struct pod_slot victim = {.index = -1};
    struct pod_value victim_value = {.place = 0};
    bool victim_directory = false;

    for (int i = 0; i < 2 * POD_ENTRIES; i++) {
        struct pod_slot slot = {.bucket = place->buckets[i / POD_ENTRIES], .index = i % POD_ENTRIES};
        struct pod_value value;
        bool is_directory;

        if (pod_state(pod, slot, &value) != POD_LIVE)
            continue;
        is_directory = pod_is_directory((uint32_t)(get(&pod->shapes[value.shape].pages_mode) >> 32));
        if (is_directory && !directory)
            continue;
        if (!directory || is_directory)
            if (version_of(pod, slot) > version)
                continue;
        if (victim.index >= 0 && (is_directory != victim_directory ? is_directory : version_of(pod, slot) >= version_of(pod, victim)))
            continue;
        victim = slot;
        victim_value = value;
        victim_directory = is_directory;
    }
    if (victim.index < 0) {
        pod->writer->count.refused++;
        return victim;
    }
    pod_clear(pod, victim);
    pod_release(pod, POD_LIVE, &victim_value);
    pod->writer->count.dropped++;
    return victim;
}

/* A place in one of the two buckets that holds nothing live; an empty one if there is one. Nothing of it is left in the accounts. */
static struct pod_slot find_either(struct kvfs_pod *pod, const struct pod_place *place) {
    struct pod_slot first = find_free(pod, place->buckets[0]), second;

    if (first.index < 0 || get(&pod_entry(pod, first)->fingerprint)) {
        second = find_free(pod, place->buckets[1]);
        if (second.index >= 0 && (first.index < 0 || !get(&pod_entry(pod, second)->fingerprint)))
            first = second;
    }
    if (first.index >= 0)
        take_over(pod, first);
    return first;
}

static struct pod_slot find_room(struct kvfs_pod *pod, const struct pod_place *place, uint64_t version, bool directory) {
    struct pod_slot slot = find_either(pod, place);

    if (slot.index < 0 && pod->writer->count.entries < pod->constants.entries_max)
        slot = make_room(pod, place);
    return slot.index >= 0 ? slot : drop_one(pod, place, version, directory);
}

/* ---- changes, all with the mutex ---- */

static void confirm(struct kvfs_pod *pod, struct pod_slot slot, uint64_t version, uint32_t owner) {
    *pod_version(pod, slot) = version | (uint64_t)pod->writer->repeat_parity[owner] << POD_PARITY_SHIFT;
}

/* Of two places of one version, found on flash. A block that was copied mostly lies in a younger segment, or further behind in its own. Not
 * always: the segment of copies may have been opened first. Then the owner's news tell. */
static bool is_newer_place(const struct kvfs_pod *pod, const struct kvfs_pod_entry *entry, const struct pod_value *value) {
    uint64_t segment = value->place / pod->constants.segment_pages;
    uint64_t generation = get(&pod->segments[segment].generation) & ~POD_ENDED;

    if (entry->generation != generation)
        return entry->generation > generation;
    return segment == entry->segment ? entry->page > value->place % pod->constants.segment_pages : entry->segment > segment;
}

static bool is_directory(const struct kvfs_pod *pod, const struct pod_value *value) {
    return pod_is_directory((uint32_t)(get(&pod->shapes[value->shape].pages_mode) >> 32));
}

/* 0: apply; 1: known already; -ESTALE. An owner's news come in order. So of one version the last place is the block's, and a directory that is told
 * again is there again. On flash a header may name a directory that was removed after it. */
static int compare(const struct kvfs_pod *pod, struct pod_slot slot, const struct kvfs_pod_entry *entry, enum pod_state state,
                   const struct pod_value *value, enum pod_source source) {
    uint64_t version = version_of(pod, slot);

    if (entry->directory && state == POD_GONE && source == POD_NEWS)
        return 0;
    if (entry->version != version || state == POD_GONE)
        return entry->version > version ? 0 : -ESTALE;
    if (entry->directory)
        return state == POD_LIVE ? 1 : 0;
    if (pod_is_directory((uint32_t)(get(&pod->shapes[value->shape].pages_mode) >> 32)))
        return -ESTALE;
    if (state == POD_DEAD)
        return 0;
    if (value->place == (uint64_t)entry->segment * pod->constants.segment_pages + entry->page)
        return 1;
    return source == POD_NEWS || is_newer_place(pod, entry, value) ? 0 : -ESTALE;
}

int pod_put(struct kvfs_pod *pod, const struct kvfs_pod_entry *entry, const struct pod_place *place, uint32_t shape, enum pod_source source) {
    struct pod_writer *writer = pod->writer;
    struct pod_slot slot = find_slot(pod, place);
    struct pod_value old, value = {.place = entry->slot, .shape = shape, .keyed = entry->keyed};
    bool replaces = slot.index >= 0, holders_known = true;
    uint64_t word;

    if (!entry->directory) {
        value.place = (uint64_t)entry->segment * pod->constants.segment_pages + entry->page;
        value.tag = (uint8_t)get(&pod->segments[entry->segment].state);
    }
    word = pod_pack(value) ^ place->mask;
    if (replaces) {
        enum pod_state state = pod_state(pod, slot, &old);
        int r = compare(pod, slot, entry, state, &old, source);

        /* It has the directory, whosever rights count. */
        if (entry->directory && (r >= 0 || state == POD_LIVE))
            holders_known = pod_holder_add(pod, entry->key_low, entry->key_high, entry->slot);
        if (r < 0)
            return r;
        /* Known: only whether it is keyed may be news. */
        if (r && (entry->directory || old.keyed == entry->keyed) && old.shape == shape) {
            /* It is the last teller's then, whose repeat it goes with. */
            if (!holders_known)
                set_release(&pod_entry(pod, slot)->word, word);
            confirm(pod, slot, entry->version, entry->slot);
            return 0;
        }
        pod_release(pod, state, &old);
        set_release(&pod_entry(pod, slot)->word, word);
        writer->count.replaced++;
    } else {
        if (entry->directory)
            pod_holder_add(pod, entry->key_low, entry->key_high, entry->slot);
        slot = find_room(pod, place, entry->version, entry->directory);
        if (slot.index < 0)
            return -ENOSPC;
        entry_write(pod, slot, place->fingerprint, word);
        writer->count.inserted++;
    }
    confirm(pod, slot, entry->version, entry->slot);
    writer->shape_users[shape]++;
    writer->count.entries++;
    if (entry->directory) {
        writer->count.directories++;
    } else {
        writer->lives[entry->segment].entries++;
        writer->lives[entry->segment].used = 1;
    }
    return 0;
}

/* Remember that this version's name has gone. */
static void become_gone(struct kvfs_pod *pod, struct pod_slot slot, const struct pod_place *place, uint64_t version) {
    struct pod_value value = {.place = seconds(), .shape = POD_SHAPE_GONE};
    struct pod_entry *entry = pod_entry(pod, slot);
    uint64_t word = pod_pack(value) ^ place->mask;

    if (get(&entry->fingerprint) == place->fingerprint)
        set_release(&entry->word, word);
    else
        entry_write(pod, slot, place->fingerprint, word);
    *pod_version(pod, slot) = version;
    pod->writer->count.gone++;
}

int pod_remove(struct kvfs_pod *pod, const struct pod_place *place, uint64_t version) {
    struct pod_slot slot = find_slot(pod, place);
    struct pod_value value;
    enum pod_state state;

    if (slot.index < 0) {
        /* Worth a free place, but no entry's. */
        slot = find_either(pod, place);
        if (slot.index < 0)
            return 0;
    } else {
        if (version_of(pod, slot) > version)
            return -ESTALE;
        state = pod_state(pod, slot, &value);
        pod_release(pod, state, &value);
        pod->writer->count.removed += state == POD_LIVE;
    }
    become_gone(pod, slot, place, version);
    return 0;
}

void pod_directory_leave(struct kvfs_pod *pod, const struct pod_place *place, uint32_t slot, int other) {
    struct pod_slot at = find_slot(pod, place);
    struct pod_value value;

    if (at.index < 0 || pod_state(pod, at, &value) != POD_LIVE || !is_directory(pod, &value))
        return;
    if (other < 0) {
        pod_release(pod, POD_LIVE, &value);
        pod_clear(pod, at);
        pod->writer->count.removed++;
    } else if (value.place == slot) {
        value.place = (uint64_t)other;
        set_release(&pod_entry(pod, at)->word, pod_pack(value) ^ place->mask);
    }
}

int pod_directory_gone(struct kvfs_pod *pod, uint64_t key_low, uint64_t key_high, const struct pod_place *place, uint32_t slot, uint64_t version) {
    int other = pod_holder_remove(pod, key_low, key_high, slot);
    struct pod_slot at = find_slot(pod, place);
    struct pod_value value;

    if (other >= 0) {
        pod_directory_leave(pod, place, slot, other);
        return 0;
    }
    /* Its rights may be of a higher version than this node knew. */
    if (at.index >= 0 && pod_state(pod, at, &value) == POD_LIVE && is_directory(pod, &value) && version_of(pod, at) > version)
        version = version_of(pod, at);
    return pod_remove(pod, place, version);
}

void pod_supersede(struct kvfs_pod *pod, const struct pod_place *place, uint64_t version) {
    struct pod_slot slot = find_slot(pod, place);
    struct pod_value value;

    if (slot.index < 0 || version_of(pod, slot) >= version || pod_state(pod, slot, &value) != POD_LIVE)
        return;
    pod_release(pod, POD_LIVE, &value);
    pod->writer->count.superseded++;
    /* Version - 1: the record that says so may come again, and be applied then. */
    become_gone(pod, slot, place, version - 1);
}

void pod_withdraw(struct kvfs_pod *pod, const struct pod_place *place, uint64_t version) {
    struct pod_slot slot = find_slot(pod, place);
    struct pod_value value;

    if (slot.index < 0 || version_of(pod, slot) != version || pod_state(pod, slot, &value) != POD_LIVE)
        return;
    pod_release(pod, POD_LIVE, &value);
    pod_clear(pod, slot);
}

/* ---- single records ---- */

int kvfs_pod_put(struct kvfs_pod *pod, const struct kvfs_pod_entry *entry) {
    struct kvfs_pod_batch_shape content = {
        .size = entry->size, .header_pages = entry->header_pages, .mode = entry->mode, .uid = entry->uid, .gid = entry->gid};
    struct pod_place place = pod_place(pod, entry->key_low, entry->key_high);
    int r = 0, shape;

    assert(pod->writer);
    if (!entry->version || entry->version >> POD_NUMBER_BITS || !pod_shape_sound(pod, &content) ||
        !entry->directory != !pod_is_directory(entry->mode) || entry->slot >= pod->constants.nodes)
        return -EINVAL;
    if (!entry->directory && (entry->segment >= pod->constants.segment_count || !entry->page ||
                              entry->page + (uint64_t)entry->header_pages > pod->constants.segment_pages))
        return -EINVAL;
    if (entry->slot == pod->writer->own_slot || (!entry->directory && pod_owner(&pod->constants, entry->segment) != entry->slot))
        return -EPERM;
    pod_lock(pod);
    if (!entry->directory)
        r = pod_life(pod, entry->segment, entry->generation, false);
    if (!r) {
        shape = pod_shape_take(pod, &content);
        if (shape < 0) {
            pod->writer->count.shapes_full++;
            r = shape;
        } else {
            r = pod_put(pod, entry, &place, (uint32_t)shape, POD_FLASH);
            pod_shape_give(pod, (uint32_t)shape);
        }
    }
    if (r)
        pod_supersede(pod, &place, entry->version);
    pod_unlock(pod);
    return r;
}

int kvfs_pod_remove(struct kvfs_pod *pod, uint64_t key_low, uint64_t key_high, uint64_t version) {
    struct pod_place place = pod_place(pod, key_low, key_high);
    int r;

    assert(pod->writer);
    if (!version || version >> POD_NUMBER_BITS)
        return -EINVAL;
    /* The block table's change must be seen by whoever changes the map after this. */
    atomic_thread_fence(memory_order_seq_cst);
    pod_lock(pod);
    r = pod_remove(pod, &place, version);
    pod_unlock(pod);
    return r;
}

int kvfs_pod_forget(struct kvfs_pod *pod, uint64_t key_low, uint64_t key_high, uint32_t segment, uint32_t page) {
    struct pod_place place = pod_place(pod, key_low, key_high);
    struct pod_slot slot;
    struct pod_value value;
    enum pod_state state;
    int r = -ENOENT;

    assert(pod->writer);
    pod_lock(pod);
    slot = find_slot(pod, &place);
    if (slot.index >= 0) {
        state = pod_state(pod, slot, &value);
        if ((state == POD_LIVE || state == POD_DEAD) && !pod_is_directory((uint32_t)(get(&pod->shapes[value.shape].pages_mode) >> 32)) &&
            value.place == (uint64_t)segment * pod->constants.segment_pages + page) {
            pod_release(pod, state, &value);
            pod_clear(pod, slot);
            pod->writer->count.forgotten++;
            r = 0;
        }
    }
    pod_unlock(pod);
    return r;
}

uint64_t kvfs_pod_version(struct kvfs_pod *pod, uint64_t key_low, uint64_t key_high) {
    struct pod_place place = pod_place(pod, key_low, key_high);
    struct pod_slot slot;
    struct pod_value value;
    uint64_t version = 0;

    assert(pod->writer);
    atomic_thread_fence(memory_order_seq_cst); /* as in kvfs_pod_remove() */
    pod_lock(pod);
    slot = find_slot(pod, &place);
    if (slot.index >= 0 && pod_state(pod, slot, &value) == POD_LIVE)
        version = version_of(pod, slot);
    pod_unlock(pod);
    return version;
}
