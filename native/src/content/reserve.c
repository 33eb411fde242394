/* RESERVE: places, inode numbers, versions and ancestors for a frame of blocks, packed as the client is to have them. And the check of frames'
 * items. */
#include "content/content.h"

#include <sys/stat.h>

#include "kvfs_wire.h"

struct reserve {
    struct kvfs_reserve told; /* first */
    struct holder *holder;
    const uint8_t *items;
    uint64_t at; /* the next item */
    uint32_t flags, count, done, uid;
    struct kvfs_shard shards[KVFS_SHARDS];
    uint64_t *inodes;            /* of its items that have one, where items name others */
    struct reservation *pending; /* charged; it waits for a place */
    uint8_t *answer, *ancestors;
    uint64_t capacity, ancestors_size, ancestors_capacity;
    uint64_t beyond; /* the part of user->answering that is its */
    struct link made;
    bool waits; /* for pages of others */
};
struct item {
    uint64_t size, end, parent;
    const char *name;
    uint32_t name_size;
    const struct kvfs_shard *shard;
};

/* ---- the check ---- */

static int digit(uint8_t c) { return c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1; }

static bool is_key(const uint8_t *name, uint64_t size) {
    if (size < 2 || size > KVFS_NAME_MAX || size % 2)
        return false;
    for (uint64_t i = 0; i < size; i++)
        if (digit(name[i]) < 0)
            return false;
    return true;
}

static bool is_name(const uint8_t *name, uint64_t size) {
    bool dots = size && name[0] == '.' && (size == 1 || (size == 2 && name[1] == '.'));
    return size && size <= KVFS_NAME_MAX && !dots && !memchr(name, 0, size) && !memchr(name, '/', size);
}

/* Any bytes have one: kvfs_frame_check() lets digits alone through where they count. */
uint32_t frame_shard(uint32_t flags, uint32_t directory, const void *key) {
    const uint8_t *name = key;
    if (flags & WIRE_TABLE)
        return directory % KVFS_SHARDS;
    return ((uint32_t)(digit(name[0]) & 15) << 4) | (uint32_t)(digit(name[1]) & 15);
}

static int commit_check(const uint8_t *items, uint64_t size, uint32_t count) {
    if (size != count * (uint64_t)sizeof(struct wire_commit))
        return -EINVAL;
    for (uint32_t i = 0; i < count; i++) {
        struct wire_commit item;
        memcpy(&item, items + i * sizeof(item), sizeof(item));
        if (item.error > 0 || item.error < -KVFS_WIRE_ERRNO_MAX)
            return -EINVAL;
    }
    return 0;
}

/* The parts of an item of RESERVE or DELETE before its name. */
static uint64_t item_head(uint32_t type, uint32_t flags) {
    return type == WIRE_RESERVE ? sizeof(struct wire_reserve) + (flags & (WIRE_PARENTS | WIRE_HASHES) ? sizeof(uint64_t) : 0)
                                : sizeof(struct wire_delete);
}

/* As the item names the block before it. */
static uint64_t item_parent(uint32_t flags, const uint8_t *item) {
    uint64_t parent = 0;
    if (flags & WIRE_PARENTS)
        memcpy(&parent, item + sizeof(struct wire_reserve), sizeof(parent));
    return parent;
}

static_assert(KVFS_SHARDS == KVFS_WIRE_DIRECTORIES_MAX, "one number for both");

int kvfs_frame_check(uint32_t type, uint32_t flags, const void *data, uint64_t size, uint32_t count, uint32_t directories,
                     const struct kvfs_shard known[KVFS_SHARDS], uint8_t missing[KVFS_SHARDS]) {
    const uint8_t *items = data;
    bool seen[KVFS_SHARDS] = {false}, tabled = flags & WIRE_TABLE;
    uint64_t at = 0, head = item_head(type, flags);
    int missing_count = 0;
    if (count > KVFS_WIRE_ITEMS_MAX || directories > KVFS_SHARDS)
        return -EINVAL;
    if (type == WIRE_COMMIT)
        return commit_check(items, size, count);
    for (uint32_t i = 0; i < count; i++) {
        struct wire_delete named; /* as wire_reserve ends */
        if (size - at < head)
            return -EINVAL;
        static_assert(offsetof(struct wire_reserve, name_size) == 8 && offsetof(struct wire_reserve, directory) == 12,
                      "as wire_delete, behind a size");
        memcpy(&named, items + at + (type == WIRE_RESERVE ? sizeof(uint64_t) : 0), sizeof(named));
        uint64_t parent = type == WIRE_RESERVE ? item_parent(flags, items + at) : 0;
        if (parent & WIRE_ITEM && parent >= (WIRE_ITEM | i))
            return -EINVAL;
        at += head;
        if (named.name_size > KVFS_NAME_MAX || size - at < round_up(named.name_size, 8))
            return -EINVAL;
        bool good = tabled ? named.directory < directories && is_name(items + at, named.name_size)
                           : named.directory == 0 && is_key(items + at, named.name_size);
        if (!good)
            return -EINVAL;
        uint32_t shard = frame_shard(flags, named.directory, items + at);
        if (!seen[shard] && !known[shard].directory)
            missing[missing_count++] = (uint8_t)shard;
        seen[shard] = true;
        at += round_up(named.name_size, 8);
    }
    return at == size ? missing_count : -EINVAL;
}

/* ---- the answer ---- */

static bool grow(uint8_t **memory, uint64_t *capacity, uint64_t size) {
    if (size <= *capacity)
        return true;
    uint64_t larger = *capacity * 2 > size ? *capacity * 2 : size;
    uint8_t *grown = realloc(*memory, larger);
    if (!grown)
        return false;
    *memory = grown;
    *capacity = larger;
    return true;
}

/* The answer may take so much memory, as far as that of its user goes. */
static bool answer_charge(struct reserve *frame, uint64_t size) {
    struct user *user = frame->holder->user;
    uint64_t usual = frame->count * (uint64_t)KVFS_RESERVED_SIZE, beyond = size - min_u64(size, usual);
    uint64_t more = beyond - min_u64(beyond, frame->beyond);
    if (more && atomic_load(&user->kept) + user->answering + more > KVFS_CLIENT_MEMORY)
        return false;
    frame->beyond += more;
    user->answering += more;
    return true;
}

static void answer_add(struct reserve *frame, const void *data, uint64_t size) {
    uint64_t padded = round_up(size, 8);
    assert(frame->told.answer_size + padded <= frame->capacity);
    copy_bytes(frame->answer + frame->told.answer_size, data, size);
    memset(frame->answer + frame->told.answer_size + size, 0, padded - size);
    frame->told.answer_size += padded;
}

/* There is always room for errors of all items. */
static void answer_error(struct reserve *frame, const struct item *item, int error) {
    struct wire_reserved reserved = {.error = error};
    answer_add(frame, &reserved, sizeof(reserved));
    frame->at = item->end;
    frame->done++;
}

/* Memory for an item's answer, beside that for errors of the items behind it. -ENOSPC: no client takes an answer of that size, or there is no memory
 * that its user may have. */
static int answer_prepare(struct reserve *frame, uint64_t record_size, uint32_t runs) {
    uint64_t size = frame->told.answer_size + runs * (uint64_t)sizeof(struct wire_run) + record_size + frame->ancestors_size +
                    (frame->count - frame->done) * (uint64_t)sizeof(struct wire_reserved);
    if (size > KVFS_WIRE_SIZE_MAX || !answer_charge(frame, size + frame->ancestors_size))
        return -ENOSPC;
    return grow(&frame->answer, &frame->capacity, size) ? 0 : -ENOMEM;
}

/* ---- one item ---- */

static struct item item_read(const struct reserve *frame) {
    struct wire_reserve head;
    memcpy(&head, frame->items + frame->at, sizeof(head));
    uint64_t name_at = frame->at + item_head(WIRE_RESERVE, frame->flags);
    const uint8_t *name = frame->items + name_at;
    uint64_t parent = item_parent(frame->flags, frame->items + frame->at);
    return (struct item){.size = head.size,
                         .end = name_at + round_up(head.name_size, 8),
                         .parent = parent & WIRE_ITEM ? frame->inodes[parent & ~WIRE_ITEM] : parent,
                         .name = (const char *)name,
                         .name_size = head.name_size,
                         .shard = &frame->shards[frame_shard(frame->flags, head.directory, name)]};
}

static struct reservation *reservation_new(const struct reserve *frame, const struct item *item, uint32_t runs) {
    uint64_t extents = runs > 1 ? runs * sizeof(struct kvfs_extent) : 0;
    struct reservation *made = calloc(1, sizeof(*made) + runs * sizeof(struct kvfs_run));
    struct kvfs_inode_record *record = calloc(1, sizeof(*record) + round_up(item->name_size, 8) + extents);
    if (!made || !record) {
        free(made);
        free(record);
        return NULL;
    }
    record->kind = KVFS_KIND_FILE;
    record->flags = KVFS_INODE_SEALED;
    record->name_size = (uint16_t)item->name_size;
    record->record_size = (uint32_t)(sizeof(*record) + round_up(item->name_size, 8));
    record->parent = item->shard->directory;
    record->size = item->size;
    record->mode = S_IFREG | 0644;
    record->uid = frame->uid;
    record->gid = item->shard->gid;
    record->nlink = 1;
    memcpy(record + 1, item->name, item->name_size);
    made->record = record;
    made->parent = item->parent;
    made->holder = frame->holder;
    return made;
}

/* Where the data lies: behind the block header in the first run, behind an extent header in the others. A single run needs none to say so. */
static void extents_set(struct kvfs_inode_record *record, const struct kvfs_run *runs, uint32_t run_count) {
    struct kvfs_extent *extents = (void *)((uint8_t *)(record + 1) + round_up(record->name_size, 8));
    uint32_t file_page = 0, overhead = record->header_pages;
    for (uint32_t i = 0; run_count > 1 && i < run_count; i++) {
        uint32_t pages = runs[i].page_count - overhead;
        extents[i] = (struct kvfs_extent){runs[i].generation, runs[i].segment, runs[i].page + overhead, pages, file_page};
        file_page += pages;
        overhead = 1;
        record->extent_count++;
        record->record_size += (uint32_t)sizeof(*extents);
    }
}

/* The pending item has its runs: from now on it is a reservation, and answered. */
static void item_finish(struct kvfs_plane *plane, struct reserve *frame, const struct kvfs_run *runs, uint32_t run_count) {
    struct reservation *made = frame->pending;
    struct kvfs_inode_record *record = made->record;
    frame->pending = NULL;
    memcpy(made->runs, runs, run_count * sizeof(*runs));
    made->run_count = run_count;
    record->inode = kvfs_names_next_inode(plane->names);
    if (frame->inodes)
        frame->inodes[frame->done] = record->inode;
    record->version = version_begin(plane->names, &made->version);
    record->mtime_ns = record->ctime_ns = record->atime_ns = time_now();
    record->generation = runs[0].generation;
    record->segment = runs[0].segment;
    record->page = runs[0].page;
    extents_set(record, runs, run_count);
    reservation_open(plane, made, &frame->made);
    struct wire_reserved reserved = {.reservation = made->number,
                                     .header_pages = record->header_pages,
                                     .run_count = run_count,
                                     .record_size = record->record_size,
                                     .ancestors_size = (uint32_t)frame->ancestors_size};
    answer_add(frame, &reserved, sizeof(reserved));
    static_assert(sizeof(struct wire_run) == sizeof(struct kvfs_run), "wire");
    answer_add(frame, runs, run_count * sizeof(*runs));
    answer_add(frame, record, record->record_size);
    answer_add(frame, frame->ancestors, frame->ancestors_size);
    frame->at = item_read(frame).end;
    frame->done++;
}

static void pending_drop(struct kvfs_plane *plane, struct reserve *frame) {
    reservation_discharge(plane, frame->holder, frame->pending->pages);
    frame->holder->told.count--;
    free(frame->pending->record);
    free(frame->pending);
    frame->pending = NULL;
}

/* The records above are copied now: directories may move while the item waits for a place. 0, -EAGAIN, -ENOMEM, -ENOSPC. */
static int ancestors_take(struct kvfs_plane *plane, struct reserve *frame, uint64_t parent) {
    int64_t size = ancestors_size(plane, parent, frame->told.loaded);
    if (size < 0)
        return (int)size;
    if (!answer_charge(frame, frame->told.answer_size + 2 * (uint64_t)size))
        return -ENOSPC;
    if (!grow(&frame->ancestors, &frame->ancestors_capacity, (uint64_t)size))
        return -ENOMEM;
    ancestors_copy(plane, parent, frame->ancestors, (uint64_t)size);
    frame->ancestors_size = (uint64_t)size;
    return 0;
}

/* Room for it in a segment that is appended to; nothing if there is none. */
static void place_try(struct kvfs_plane *plane, struct reserve *frame) {
    struct kvfs_run runs[PLACE_RUNS_MAX];
    int count = place_take(plane->names, place_client_head(plane->names), frame->told.header_pages, frame->told.data_pages, runs);
    if (count < 0)
        return;
    kvfs_set_tick(plane, place_tick(plane->names));
    item_finish(plane, frame, runs, (uint32_t)count);
}

/* 0: the item is answered; enum kvfs_frame_next; -ENOSPC: neither this one nor those behind it find a place. */
static int item_reserve(struct kvfs_plane *plane, struct reserve *frame) {
    struct kvfs_reserve *told = &frame->told;
    struct item item = item_read(frame);
    uint64_t data_pages = item.size / PAGE + (item.size % PAGE != 0);
    uint64_t share = plane->reservations.share_pages;
    int error = item.shard->error ? item.shard->error : data_pages > share || data_pages > UINT32_MAX / 2 ? -EFBIG : 0;
    if (error == 0)
        error = ancestors_take(plane, frame, item.shard->directory);
    if (error == -EAGAIN) {
        told->parent = item.shard->directory;
        return KVFS_FRAME_NAMES;
    }
    told->loaded = 0;
    if (error < 0) {
        answer_error(frame, &item, error);
        return 0;
    }
    uint32_t runs = runs_bound(plane, (uint32_t)data_pages);
    uint32_t record_size = (uint32_t)(sizeof(struct kvfs_inode_record) + round_up(item.name_size, 8));
    uint32_t header_pages = kvfs_header_pages(item.size, record_size, (uint32_t)frame->ancestors_size, runs);
    uint64_t pages = header_pages + data_pages;
    int asked = pages > share ? -EFBIG : reservation_ask(plane, frame->holder, pages);
    if (asked && asked != -EFBIG)
        return asked;
    error = asked ? asked : answer_prepare(frame, record_size + runs * (uint64_t)sizeof(struct kvfs_extent), runs);
    struct reservation *made = error ? NULL : reservation_new(frame, &item, runs);
    if (!made) {
        answer_error(frame, &item, error ? error : -ENOMEM);
        return 0;
    }
    made->pages = (uint32_t)pages;
    made->moves = plane->reservations.moves; /* as the ancestors are */
    made->record->header_pages = header_pages;
    /* Charged before the wait for a place, so that two that wait do not both find room. */
    reservation_charge(plane, frame->holder, pages);
    frame->pending = made;
    told->header_pages = header_pages;
    told->data_pages = (uint32_t)data_pages;
    place_try(plane, frame);
    return frame->pending ? KVFS_FRAME_PLACE : 0;
}

/* ---- the frame ---- */

struct kvfs_reserve *kvfs_reserve_begin(struct kvfs_holder *holder, uint32_t flags, const void *items, uint32_t count,
                                        const struct kvfs_shard shards[KVFS_SHARDS], uint32_t uid) {
    struct reserve *frame = calloc(1, sizeof(*frame));
    if (!frame)
        return NULL;
    frame->holder = (struct holder *)(void *)holder;
    frame->flags = flags;
    frame->items = items;
    frame->count = count;
    frame->uid = uid;
    memcpy(frame->shards, shards, sizeof(frame->shards));
    link_init(&frame->made);
    if (flags & WIRE_PARENTS)
        frame->inodes = calloc(count + 1, sizeof(*frame->inodes));
    bool made = !(flags & WIRE_PARENTS) || frame->inodes;
    if (!made || !grow(&frame->answer, &frame->capacity, count * (uint64_t)sizeof(struct wire_reserved) * 16 + 1)) {
        free(frame->inodes);
        free(frame);
        return NULL;
    }
    frame->told.answer = frame->answer;
    return &frame->told;
}

static void waits_set(struct kvfs_plane *plane, struct reserve *frame, bool waits) {
    plane->reservations.awaited += (uint32_t)waits - (uint32_t)frame->waits;
    frame->waits = waits;
}

int kvfs_reserve(struct kvfs_plane *plane, struct kvfs_reserve *told) {
    struct reserve *frame = (struct reserve *)(void *)told;
    int r = 0;
    assert(!frame->pending);
    kvfs_names_begin(plane->names);
    waits_set(plane, frame, false);
    for (uint32_t i = 0; r == 0 && i < KVFS_FRAME_PART && frame->done < frame->count; i++)
        r = item_reserve(plane, frame);
    waits_set(plane, frame, r == KVFS_FRAME_ROOM);
    kvfs_names_end(plane->names);
    told->answer = frame->answer;
    return r ? r : frame->done < frame->count ? KVFS_FRAME_MORE : KVFS_FRAME_DONE;
}

void kvfs_reserve_place(struct kvfs_plane *plane, struct kvfs_reserve *told, const struct kvfs_run *runs, uint32_t run_count, int error) {
    struct reserve *frame = (struct reserve *)(void *)told;
    kvfs_names_begin(plane->names);
    assert(frame->pending && run_count <= runs_bound(plane, told->data_pages));
    if (run_count) {
        item_finish(plane, frame, runs, run_count);
    } else {
        struct item item = item_read(frame);
        pending_drop(plane, frame);
        answer_error(frame, &item, error);
    }
    kvfs_names_end(plane->names);
}

void kvfs_reserve_finish(struct kvfs_plane *plane, struct kvfs_reserve *told, uint64_t until) {
    struct reserve *frame = (struct reserve *)(void *)told;
    kvfs_names_begin(plane->names);
    waits_set(plane, frame, false);
    if (frame->pending)
        pending_drop(plane, frame);
    while (frame->done < frame->count) {
        struct item item = item_read(frame);
        answer_error(frame, &item, item.shard->error ? item.shard->error : told->refusal ? told->refusal : -ENOSPC);
    }
    reservations_stamp(plane, &frame->made, until);
    kvfs_names_end(plane->names);
}

uint8_t *reserve_take_answer(struct kvfs_reserve *told) {
    struct reserve *frame = (struct reserve *)(void *)told;
    uint8_t *answer = frame->answer;
    frame->answer = NULL;
    told->answer = NULL;
    return answer;
}

void kvfs_reserve_end(struct kvfs_plane *plane, struct kvfs_reserve *told) {
    struct reserve *frame = (struct reserve *)(void *)told;
    kvfs_reserve_finish(plane, told, 0);
    kvfs_names_begin(plane->names);
    frame->holder->user->answering -= frame->beyond;
    kvfs_names_end(plane->names);
    free(frame->inodes);
    free(frame->answer);
    free(frame->ancestors);
    free(frame);
}
