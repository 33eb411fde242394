/* sources: base block names io content pod frames fuse virtiofs plane.c */
/* Requests of native clients against a model: reservations of several clients, their commits, ends and expiries, beside a thread that makes and removes
 * the same names. Names, block table, places and the table of reservations agree after each step, also where memory ends. And frames of any bytes. */
#include "kernel_harness.h"

#include "kvfs_wire.h"

#define END_PAGE 4096u
#define HOLDERS 3u
#define KEYS 40u
#define OPEN_MAX 600u
#define DIRECTORY 77u
#define STEPS 1500

static struct kvfs_names *names;
static struct kvfs_place *places;
static uint32_t segment;
static struct kvfs_shard shards[KVFS_SHARDS];
static atomic_int allocations_left = -1; /* then memory ends; -1: it does not */
static __thread bool may_fail;

void *__real_malloc(size_t size);
void *__real_calloc(size_t count, size_t size);
void *__real_realloc(void *old, size_t size);
void *__wrap_malloc(size_t size);
void *__wrap_calloc(size_t count, size_t size);
void *__wrap_realloc(void *old, size_t size);
static bool memory_ends(void) { return may_fail && atomic_load(&allocations_left) >= 0 && atomic_fetch_sub(&allocations_left, 1) <= 0; }
static bool memory_out(void) {
    bool out = memory_ends();
    if (out)
        atomic_store(&allocations_left, 0); /* and stays out */
    return out;
}
void *__wrap_malloc(size_t size) { return memory_out() ? NULL : __real_malloc(size); }
void *__wrap_calloc(size_t count, size_t size) { return memory_out() ? NULL : __real_calloc(count, size); }
void *__wrap_realloc(void *old, size_t size) { return memory_out() ? NULL : __real_realloc(old, size); }

/* A reservation of the model. */
struct entry {
    uint64_t number, inode;
    uint32_t holder, key;
    uint64_t pages;
    bool open, late;
};
static struct entry model[OPEN_MAX];
static uint32_t model_count;
static struct kvfs_holder *holders[HOLDERS];
static uint64_t owners[KEYS];                                                     /* inode of each key's block; 0: none */
static uint64_t committed, superseded, reclaimed, clock_now = 1, rested[HOLDERS]; /* pages */

static void key_name(uint32_t key, char out[9]) { snprintf(out, 9, "%02x%06x", key % 5, key); }

static void names_open(void) {
    names = kvfs_plane_names(plane);
    kvfs_names_number(names, UINT64_C(3) << KVFS_COUNTER_BITS, 0);
    places = kvfs_places_make(names, SEGMENTS, END_PAGE, 1u << 20);
    CHECK(places);
    directory_put(1, 1, "");
    directory_put(DIRECTORY, 1, "space");
    kvfs_names_leave(names, KVFS_LEAVE_CLOSED, 0);
    for (uint32_t i = 0; i < KVFS_SHARDS; i++)
        shards[i] = (struct kvfs_shard){DIRECTORY, 8, 0};
    for (uint32_t i = 0; i < HOLDERS; i++)
        CHECK((holders[i] = kvfs_holder_create(plane, 7)) != NULL);
    kvfs_reservations_limit(plane, 2000, OPEN_MAX);
}

/* ---- frames ---- */

static uint64_t items_make(uint8_t *out, const uint32_t *keys, uint32_t count, uint64_t size) {
    uint64_t at = 0;
    for (uint32_t i = 0; i < count; i++) {
        char name[9];
        key_name(keys[i], name);
        struct wire_reserve item = {size, 8, 0};
        memcpy(out + at, &item, sizeof(item));
        memcpy(out + at + sizeof(item), name, 8);
        at += sizeof(item) + 8;
    }
    return at;
}

/* Reserve the keys for a holder; the model learns what the answer says. Returns the first error. */
static int reserve(uint32_t holder, const uint32_t *keys, uint32_t count, uint64_t size) {
    uint8_t items[4096], missing[KVFS_SHARDS];
    uint64_t items_size = items_make(items, keys, count, size);
    CHECK(kvfs_frame_check(WIRE_RESERVE, 0, items, items_size, count, 0, shards, missing) == 0);
    struct kvfs_reserve *frame = kvfs_reserve_begin(holders[holder], 0, items, count, shards, 7);
    if (!frame)
        return -ENOMEM;
    int next;
    do {
        kvfs_place_head(names, 1, segment, 9);
        next = kvfs_reserve(plane, frame);
        if (next == KVFS_FRAME_PLACE) {
            segment = (segment + 1) % SEGMENTS;
            uint32_t pages = frame->header_pages + frame->data_pages;
            places[segment].next_page = places[segment].run_count ? places[segment].next_page : 1;
            bool room = places[segment].next_page + pages <= END_PAGE;
            struct kvfs_run run = {9, segment, room ? kvfs_place_take(names, segment, pages) : 0, pages, 0};
            kvfs_reserve_place(plane, frame, &run, run.page ? 1 : 0, -EIO);
        }
    } while (next == KVFS_FRAME_MORE || next == KVFS_FRAME_PLACE);
    CHECK(next == KVFS_FRAME_DONE || next == KVFS_FRAME_ROOM || next == -ENOSPC);
    kvfs_reserve_finish(plane, frame, clock_now + 100);
    const uint8_t *at = frame->answer;
    int error = 0;
    for (uint32_t i = 0; i < count; i++) {
        struct wire_reserved reserved;
        memcpy(&reserved, at, sizeof(reserved));
        at += sizeof(reserved);
        error = error ? error : reserved.error;
        if (reserved.error)
            continue;
        struct kvfs_inode_record record;
        CHECK(reserved.run_count == 1);
        memcpy(&record, at + sizeof(struct wire_run), sizeof(record));
        at += sizeof(struct wire_run) + reserved.record_size + reserved.ancestors_size;
        CHECK(record.record_size == reserved.record_size && record.size == size && record.uid == 7 && record.gid == 8);
        CHECK(reserved.ancestors_size == sizeof(record) + 8 && record.parent == DIRECTORY && model_count < OPEN_MAX);
        model[model_count++] = (struct entry){reserved.reservation, record.inode, holder, keys[i], record.header_pages + pages_of(size), true, false};
    }
    CHECK(at == (const uint8_t *)frame->answer + frame->answer_size);
    kvfs_reserve_end(plane, frame);
    return error;
}

/* A nameless block goes as the control plane lets it go. */
static void block_go(uint64_t inode) {
    uint8_t record[512];
    CHECK(kvfs_names_get(names, inode, record, sizeof(record)) > 0);
    CHECK(kvfs_inode_remove(plane, inode) == 0);
    kvfs_names_begin(names);
    struct kvfs_inode_record *copy = record_again((const struct kvfs_inode_record *)(void *)record);
    CHECK(copy && name_drop(plane, copy, false, 1) == 0);
    kvfs_names_end(names);
}

static void model_take_back(struct entry *entry, bool late) {
    reclaimed++;
    entry->open = false;
    entry->late = late;
}

static void commit(uint32_t holder, struct entry **entries, const int64_t *errors, uint32_t count) {
    struct wire_commit items[64];
    for (uint32_t i = 0; i < count; i++)
        items[i] = (struct wire_commit){entries[i]->number, errors[i]};
    uint8_t missing[KVFS_SHARDS];
    CHECK(kvfs_frame_check(WIRE_COMMIT, 0, items, count * sizeof(items[0]), count, 0, shards, missing) == 0);
    struct kvfs_commit *frame = kvfs_commit_begin(holders[holder], items, count);
    CHECK(frame);
    int next = kvfs_commit(plane, frame);
    CHECK(next == KVFS_FRAME_DONE);
    for (uint32_t i = 0; i < count; i++) {
        struct entry *entry = entries[i];
        bool own = entry->holder == holder;
        if (!own || !entry->open) {
            CHECK(frame->answers[i] == -ETIMEDOUT);
            if (entry->late && own && errors[i] != -ETIMEDOUT) {
                entry->late = false;
                rested[holder] += entry->pages;
            }
            continue;
        }
        CHECK(frame->answers[i] == errors[i]);
        if (errors[i]) {
            model_take_back(entry, errors[i] == -ETIMEDOUT);
            rested[holder] += errors[i] == -EIO ? entry->pages : 0;
        } else {
            entry->open = false;
            bool older = owners[entry->key] > entry->inode;
            superseded += older;
            committed += !older;
            owners[entry->key] = older ? owners[entry->key] : entry->inode;
        }
    }
    for (uint32_t i = 0; i < frame->lingering_count; i++)
        block_go(frame->lingering[i]);
    kvfs_commit_end(frame);
}

static void bury_all(void) {
    const struct kvfs_run *runs;
    uint32_t count;
    uint64_t number;
    while ((number = kvfs_reservation_returned(plane, &runs, &count))) {
        CHECK(count == 1 && runs[0].page);
        kvfs_reservation_buried(plane, number);
    }
}

/* ---- agreement ---- */

static void check_all(bool buried) {
    uint32_t open[HOLDERS] = {0}, lent = 0, all = 0, found_lent = 0, in_flight = 0;
    uint64_t live = 0, found_live = 0, open_pages[HOLDERS] = {0}, late_pages[HOLDERS] = {0};
    for (uint32_t i = 0; i < model_count; i++) {
        open_pages[model[i].holder] += model[i].open ? model[i].pages : 0;
        late_pages[model[i].holder] += model[i].late ? model[i].pages : 0;
        open[model[i].holder] += model[i].open;
        lent += model[i].open || model[i].late;
        all += model[i].open;
    }
    for (uint32_t i = 0; i < HOLDERS; i++) {
        CHECK(holders[i]->open == open[i]);
        CHECK(holders[i]->open_pages == open_pages[i] && (!buried || holders[i]->pages == open_pages[i]));
        CHECK(!buried || (holders[i]->late_pages == late_pages[i] && holders[i]->rested_pages == rested[i]));
    }
    for (uint32_t i = 0; i < SEGMENTS; i++) {
        found_lent += places[i].lent;
        found_live += places[i].live_pages;
        in_flight += places[i].run_count;
    }
    struct kvfs_reservation_statistics statistics;
    kvfs_reservation_statistics_get(plane, &statistics);
    CHECK(statistics.open == all && found_lent == lent && (!buried || in_flight == all));
    CHECK(statistics.committed == committed && statistics.superseded == superseded && statistics.reclaimed == reclaimed);
    uint64_t versions[OPEN_MAX];
    CHECK(!buried || kvfs_names_in_flight(names, versions, OPEN_MAX) == all);
    for (uint32_t key = 0; key < KEYS; key++) {
        char name[9];
        uint64_t inode = 0;
        struct kvfs_record record;
        key_name(key, name);
        int found = kvfs_names_find(names, DIRECTORY, name, 8, &inode);
        CHECK((found ? inode : 0) == owners[key]);
        CHECK(kvfs_table_find_name(plane->table, DIRECTORY, name, 8, &record) == (owners[key] ? 0 : -ENOENT));
        CHECK(!owners[key] || record.inode == owners[key]);
        if (owners[key])
            live += record.header_pages + pages_of(record.size);
    }
    CHECK(live == found_live);
}

/* Entries that nothing depends on any more. */
static void model_shrink(void) {
    uint32_t kept = 0;
    for (uint32_t i = 0; i < model_count; i++)
        if (model[i].open || model[i].late)
            model[kept++] = model[i];
    model_count = kept;
}

/* ---- the tests ---- */

static void remove_some(void) {
    uint8_t items[KEYS * 16], deleted[KEYS];
    uint32_t keys[KEYS], count = 1 + (uint32_t)rand() % 5;
    for (uint32_t i = 0; i < count; i++) {
        char name[9];
        uint64_t size = 8;
        key_name(keys[i] = (uint32_t)rand() % KEYS, name);
        memcpy(items + i * 16, &size, 8);
        memcpy(items + i * 16 + 8, name, 8);
    }
    struct kvfs_removal frame = {0};
    CHECK(kvfs_remove_names(plane, &frame, 0, items, count, shards, deleted) == KVFS_FRAME_DONE);
    for (uint32_t i = 0; i < count; i++) {
        CHECK(deleted[i] == (owners[keys[i]] != 0));
        owners[keys[i]] = 0;
    }
}

static void commit_some(void) {
    static const int64_t any[] = {0, 0, 0, 0, -EIO, -ETIMEDOUT, -ECANCELED};
    struct entry *entries[16];
    int64_t errors[16];
    uint32_t holder = (uint32_t)rand() % HOLDERS, count = 0;
    for (uint32_t tries = 0; tries < 16 && model_count && count < 16; tries++) {
        struct entry *entry = &model[(uint32_t)rand() % model_count];
        if (entry->holder != holder && rand() % 8) /* now and then another's number */
            continue;
        entries[count] = entry;
        errors[count++] = any[(uint32_t)rand() % 7];
    }
    commit(holder, entries, errors, count);
}

static void leave(uint32_t holder) {
    uint64_t left = 0;
    kvfs_holder_leave(plane, holders[holder]);
    for (uint32_t i = 0; i < model_count; i++)
        if (model[i].holder == holder) {
            left += model[i].open || model[i].late ? model[i].pages : 0;
            if (model[i].open)
                model_take_back(&model[i], false);
            model[i].late = false;
        }
    bury_all();
    CHECK(holders[holder]->count == 0 && holders[holder]->rested_pages == rested[holder] + left);
    kvfs_reservations_rested(plane, 7, holders[holder]->rested_pages);
    rested[holder] = 0;
    kvfs_holder_free(plane, holders[holder]);
    CHECK((holders[holder] = kvfs_holder_create(plane, 7)) != NULL);
}

static void leave_one(void) { leave((uint32_t)rand() % HOLDERS); }

static void expire_some(void) {
    clock_now += (uint64_t)rand() % 120;
    uint64_t first, next;
    CHECK(kvfs_reservations_expire(plane, 0, &first) == 0);
    uint32_t count = kvfs_reservations_expire(plane, clock_now, &next);
    CHECK((count > 0) == (first <= clock_now) && next > clock_now);
    for (uint32_t i = 0; i < model_count && count; i++)
        if (model[i].open) { /* in the order of the model: the oldest first */
            model_take_back(&model[i], true);
            count--;
        }
    CHECK(count == 0);
}

static atomic_bool stopping;

/* Others' steps, on other names. */
static void *churn(void *unused) {
    (void)unused;
    for (uint32_t i = 0; !atomic_load(&stopping); i++) {
        char name[16];
        struct kvfs_record record;
        snprintf(name, sizeof(name), "churn%u", i % 50);
        if (name_create(plane, DIRECTORY, name, 0644, 1, 1, &record) == 0 && i % 3)
            name_unlink(plane, DIRECTORY, name);
        kvfs_names_pending(names);
    }
    return NULL;
}

static void test_any_order_agrees_with_the_model(void) {
    pthread_t thread;
    atomic_store(&stopping, false);
    CHECK(pthread_create(&thread, NULL, churn, NULL) == 0);
    for (int step = 0; step < STEPS; step++) {
        uint32_t keys[8], what = (uint32_t)rand() % 100, count = 1 + (uint32_t)rand() % 8;
        for (uint32_t i = 0; i < count; i++)
            keys[i] = (uint32_t)rand() % KEYS;
        if (what < 45 && model_count + count < OPEN_MAX)
            reserve((uint32_t)rand() % HOLDERS, keys, count, (uint64_t)rand() % 20000);
        else if (what < 85)
            commit_some();
        else if (what < 92)
            remove_some();
        else if (what < 96)
            expire_some();
        else
            leave_one();
        bool buried = rand() % 2;
        if (buried)
            bury_all();
        check_all(buried);
        model_shrink();
    }
    atomic_store(&stopping, true);
    pthread_join(thread, NULL);
    CHECK(committed > 300 && superseded > 10 && reclaimed > 100);
    printf("ok any order agrees with the model: %llu entered, %llu superseded, %llu taken back\n", (unsigned long long)committed,
           (unsigned long long)superseded, (unsigned long long)reclaimed);
}

/* The block's record says where its data lies, as that of a block in several segments does. */
static void extent_put(uint64_t inode) {
    _Alignas(8) uint8_t record[512];
    CHECK(kvfs_names_get(names, inode, record, sizeof(record)) > 0);
    struct kvfs_inode_record *block = (struct kvfs_inode_record *)(void *)record;
    if (block->extent_count)
        return;
    struct kvfs_extent data = {block->generation, block->segment, block->page + block->header_pages, (uint32_t)pages_of(block->size), 0};
    memcpy(record + block->record_size, &data, sizeof(data));
    block->extent_count = 1;
    block->record_size += (uint32_t)sizeof(data);
    CHECK(kvfs_names_put(names, block, 1) == 0);
}

/* Memory ends at every allocation of a step in turn. */
static void test_where_memory_ends_all_agree(void) {
    uint32_t key = 3, failed = 0;
    for (int replaced = 0; replaced < 2; replaced++)
        for (int after = 0; after < 20; after++) {
            CHECK(reserve(0, &key, 1, 9000) == 0);
            struct entry *entry = &model[model_count - 1];
            struct wire_commit item = {entry->number, 0};
            if (!replaced && owners[key]) {
                block_go(owners[key]);
                owners[key] = 0;
            }
            if (owners[key])
                extent_put(owners[key]);
            struct kvfs_commit *frame = kvfs_commit_begin(holders[0], &item, 1);
            may_fail = true;
            atomic_store(&allocations_left, after);
            CHECK(kvfs_commit(plane, frame) == KVFS_FRAME_DONE);
            atomic_store(&allocations_left, -1);
            may_fail = false;
            CHECK(frame->answers[0] == 0 || frame->answers[0] == -ENOMEM);
            if (frame->answers[0]) {
                failed++;
                model_take_back(entry, false);
                rested[0] += entry->pages;
            } else {
                entry->open = false;
                committed++;
                owners[key] = entry->inode;
            }
            for (uint32_t i = 0; i < frame->lingering_count; i++)
                block_go(frame->lingering[i]);
            kvfs_commit_end(frame);
            bury_all();
            check_all(true);
            may_fail = true;
            atomic_store(&allocations_left, after);
            int error = reserve(1, &key, 1, 5000);
            atomic_store(&allocations_left, -1);
            may_fail = false;
            CHECK(error == 0 || error == -ENOMEM || error == -EIO || error == -ENOSPC);
            check_all(true);
            model_shrink();
        }
    CHECK(failed >= 4);
    printf("ok where memory ends all agree: %u commits had none\n", failed);
}

/* A user alone may have all; beside another, or where it left something that rests, half. */
static void test_limits_are_of_users(void) {
    uint32_t keys[1] = {0}, alone = 0, beside = 0;
    while (reserve(0, keys, 1, 400000) == 0)
        alone++;
    leave(0);
    model_shrink();
    struct kvfs_holder *other = kvfs_holder_create(plane, 8);
    while (reserve(0, keys, 1, 400000) == 0)
        beside++;
    leave(0);
    model_shrink();
    CHECK(alone == 20 && beside == 10); /* of 99 pages, of 2000 */
    kvfs_holder_leave(plane, other);
    kvfs_holder_free(plane, other);
    while (reserve(0, keys, 1, 400000) == 0)
        beside++;
    CHECK(beside == 30);
    kvfs_holder_leave(plane, holders[0]);
    model_count = 0;
    reclaimed += 20;
    bury_all();
    uint64_t left = holders[0]->rested_pages;
    kvfs_holder_free(plane, holders[0]);
    CHECK(left == 20 * 99 && (holders[0] = kvfs_holder_create(plane, 7)));
    CHECK(reserve(0, keys, 1, 400000) == -ENOSPC); /* where late writes may land no block goes */
    kvfs_reservations_rested(plane, 7, left);
    CHECK(reserve(0, keys, 1, 400000) == 0);
    leave(0);
    model_shrink();
}

static void test_who_holds_too_much_waits_or_is_refused(void) {
    for (uint32_t i = 0; i < HOLDERS; i++)
        leave(i);
    model_shrink();
    struct kvfs_reservation_statistics all;
    kvfs_reservation_statistics_get(plane, &all);
    CHECK(all.pages == 0 && all.resting == 0);
    test_limits_are_of_users();
    uint32_t keys[8] = {0, 1, 2, 3, 4, 5, 6, 7};
    CHECK(reserve(0, keys, 1, UINT64_MAX) == -EFBIG);
    CHECK(reserve(0, keys, 1, UINT64_C(1) << 50) == -EFBIG);
    int error;
    do
        error = reserve(0, keys, 8, 200000);
    while (error == 0);
    CHECK(error == -ENOSPC && reserve(1, keys, 1, 200000) == -ENOSPC);
    check_all(true);
    kvfs_names_leave(names, KVFS_LEAVE_HIDING, 1); /* then each block is the caller's to prepare */
    struct wire_commit item = {model[model_count - 1].number, 0};
    struct kvfs_commit *frame = kvfs_commit_begin(holders[0], &item, 1);
    CHECK(kvfs_commit(plane, frame) == KVFS_FRAME_NAMES && frame->block);
    CHECK(kvfs_commit_item(plane, frame, 0) == 1 && frame->answers[0] == 0 && frame->run_count == 1);
    CHECK(kvfs_commit(plane, frame) == KVFS_FRAME_DONE);
    kvfs_names_leave(names, KVFS_LEAVE_HIDING, 0);
    for (uint32_t i = 0; i < frame->lingering_count; i++)
        block_go(frame->lingering[i]);
    kvfs_commit_end(frame);
    printf("ok who holds too much waits or is refused\n");
}

/* Reservations that nobody can commit are few, however small they are. */
static void test_what_was_taken_back_has_a_bound(void) {
    uint32_t keys[10] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9}, made = 0;
    uint64_t next;
    for (uint32_t i = 0; i < HOLDERS; i++)
        leave(i);
    model_shrink();
    kvfs_reservations_limit(plane, 2000, 40);
    for (uint32_t round = 0; round < 20 && reserve(0, keys, 10, 100) == 0; round++) {
        made += 10;
        clock_now += 1000;
        CHECK(kvfs_reservations_expire(plane, clock_now, &next) == 10);
        for (uint32_t i = 0; i < model_count; i++)
            if (model[i].open)
                model_take_back(&model[i], true);
        if (round % 2)
            bury_all(); /* late ones count as well */
    }
    CHECK_SAY(made == 20 && holders[0]->count == 20, "%u", made);
    kvfs_reservations_limit(plane, 2000, OPEN_MAX);
    leave(0);
    model_shrink();
    printf("ok what was taken back has a bound\n");
}

/* Items of a frame with a table and with parents: any names, each in the directory that it says. */
static void test_items_go_into_the_directories_of_a_table(void) {
    static const char *names_of[] = {"any name.bin", "k", "00ff", "\xff\x01"};
    uint8_t items[512], missing[KVFS_SHARDS], deleted[8];
    struct kvfs_shard table[KVFS_SHARDS] = {{DIRECTORY, 8, 0}, {0, 0, -ENOTDIR}, {DIRECTORY + 1, 9, 0}};
    struct wire_commit commits[4];
    uint64_t at = 0, parent = 77;
    uint32_t flags = WIRE_TABLE | WIRE_PARENTS;
    directory_put(DIRECTORY + 1, 1, "other");
    for (uint32_t i = 0; i < 4; i++) {
        uint32_t size = (uint32_t)strlen(names_of[i]);
        struct wire_reserve item = {5000, size, i == 3 ? 1 : i % 2 * 2};
        memset(items + at, 0, 48);
        memcpy(items + at, &item, sizeof(item));
        memcpy(items + at + 16, &parent, 8);
        memcpy(items + at + 24, names_of[i], size);
        at += 24 + round_up(size, 8);
    }
    CHECK(kvfs_frame_check(WIRE_RESERVE, flags, items, at, 4, 3, table, missing) == 1 && missing[0] == 1);
    CHECK(kvfs_frame_check(WIRE_RESERVE, flags, items, at, 4, 2, table, missing) == -EINVAL); /* number 2 of 2 */
    CHECK(kvfs_frame_check(WIRE_RESERVE, flags, items, at, 4, 257, table, missing) == -EINVAL);
    CHECK(kvfs_frame_check(WIRE_RESERVE, WIRE_TABLE, items, at, 4, 3, table, missing) == -EINVAL);
    struct kvfs_reserve *frame = kvfs_reserve_begin(holders[0], flags, items, 4, table, 7);
    kvfs_reservations_limit(plane, 100000, OPEN_MAX);
    kvfs_place_head(names, 1, segment = (segment + 1) % SEGMENTS, 9);
    places[segment].next_page = places[segment].run_count ? places[segment].next_page : 1;
    CHECK(kvfs_reserve(plane, frame) == KVFS_FRAME_DONE);
    kvfs_reserve_finish(plane, frame, clock_now + 1000);
    const uint8_t *answer = frame->answer;
    for (uint32_t i = 0; i < 4; i++) {
        struct wire_reserved reserved;
        struct kvfs_inode_record record;
        memcpy(&reserved, answer, sizeof(reserved));
        answer += sizeof(reserved);
        CHECK(reserved.error == (i == 3 ? -ENOTDIR : 0));
        if (i == 3)
            continue;
        memcpy(&record, answer + sizeof(struct wire_run), sizeof(record));
        CHECK(record.parent == (i % 2 ? DIRECTORY + 1 : DIRECTORY) && record.gid == (i % 2 ? 9 : 8) && record.name_size == strlen(names_of[i]));
        CHECK(memcmp(answer + sizeof(struct wire_run) + sizeof(record), names_of[i], record.name_size) == 0);
        answer += reserved.run_count * sizeof(struct wire_run) + reserved.record_size + round_up(reserved.ancestors_size, 8);
        commits[i] = (struct wire_commit){reserved.reservation, 0};
    }
    kvfs_reserve_end(plane, frame);
    struct kvfs_commit *commit_frame = kvfs_commit_begin(holders[0], commits, 3);
    CHECK(kvfs_commit(plane, commit_frame) == KVFS_FRAME_DONE);
    for (uint32_t i = 0; i < 3; i++)
        CHECK(commit_frame->answers[i] == 0);
    kvfs_commit_end(commit_frame);
    committed += 3;
    /* And are removed there: "k" is in the other directory, so in this one there is none. */
    at = 0;
    for (uint32_t i = 0; i < 5; i++) {
        const char *name = names_of[i % 4];
        struct wire_delete item = {(uint32_t)strlen(name), i == 1 ? 0 : i == 4 ? 1 : i % 2 * 2};
        memset(items + at, 0, 32);
        memcpy(items + at, &item, sizeof(item));
        memcpy(items + at + 8, name, item.name_size);
        at += 8 + round_up(item.name_size, 8);
    }
    CHECK(kvfs_frame_check(WIRE_DELETE, WIRE_TABLE, items, at, 5, 3, table, missing) == 1);
    CHECK(kvfs_frame_check(WIRE_DELETE, 0, items, at, 5, 0, table, missing) == -EINVAL);
    struct kvfs_removal removal = {0};
    CHECK(kvfs_remove_names(plane, &removal, WIRE_TABLE, items, 5, table, deleted) == KVFS_FRAME_DONE);
    CHECK(deleted[0] == 1 && deleted[1] == 0 && deleted[2] == 1 && deleted[3] == 0 && deleted[4] == 0);
    uint64_t inode = 0;
    CHECK(kvfs_names_find(names, DIRECTORY + 1, "k", 1, &inode) == 1 && inode);
    block_go(inode);
    bury_all();
    check_all(true);
    kvfs_reservations_limit(plane, 2000, OPEN_MAX);
    printf("ok items go into the directories of a table\n");
}

/* An item that was left to the caller may be ended by another frame, before the caller comes back to it. */
static void test_one_reservation_in_two_commits(void) {
    static const int64_t ends[] = {-ECANCELED, -EIO, -ETIMEDOUT, 0};
    for (uint32_t i = 0; i < HOLDERS; i++)
        leave(i);
    model_shrink();
    for (uint32_t i = 0; i < 8; i++) {
        uint32_t key = 5;
        int64_t end = ends[i % 4];
        CHECK(reserve(0, &key, 1, 9000) == 0);
        struct entry *entry = &model[model_count - 1];
        struct wire_commit first = {entry->number, 0}, second = {entry->number, end};
        struct kvfs_commit *left = kvfs_commit_begin(holders[0], &first, 1);
        kvfs_names_leave(names, KVFS_LEAVE_HIDING, 1);
        CHECK(kvfs_commit(plane, left) == KVFS_FRAME_NAMES && left->block);
        kvfs_names_leave(names, KVFS_LEAVE_HIDING, 0);
        commit(0, &entry, &second.error, 1);
        if (i < 4) { /* the caller comes to its item */
            CHECK(kvfs_commit_item(plane, left, i % 2 ? 0 : -EIO) == 0);
        }
        CHECK(kvfs_commit(plane, left) == KVFS_FRAME_DONE); /* or asks again */
        CHECK(left->answers[0] == -ETIMEDOUT && left->run_count == 0 && !left->block);
        if (entry->late) { /* the first says that no write is under way */
            entry->late = false;
            rested[0] += entry->pages;
        }
        kvfs_commit_end(left);
        bury_all();
        check_all(true);
        model_shrink();
    }
    printf("ok one reservation in two commits\n");
}

static void test_names_that_no_file_has_are_refused(void) {
    static const struct {
        const char *name;
        uint32_t size;
        bool good;
    } cases[] = {{"", 0, false},    {".", 1, false},    {"..", 2, false}, {"...", 3, true}, {".a", 2, true},
                 {"a/b", 3, false}, {"a\0b", 3, false}, {"/", 1, false},  {" ", 1, true}};
    uint8_t item[280] = {0}, missing[KVFS_SHARDS];
    for (uint32_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct wire_delete head = {cases[i].size, 0};
        memset(item, 0, sizeof(item));
        memcpy(item, &head, sizeof(head));
        memcpy(item + sizeof(head), cases[i].name, cases[i].size);
        int r = kvfs_frame_check(WIRE_DELETE, WIRE_TABLE, item, 8 + round_up(cases[i].size, 8), 1, 1, shards, missing);
        CHECK_SAY(r == (cases[i].good ? 0 : -EINVAL), "name %u: %d", i, r);
    }
    memset(item, 'a', sizeof(item));
    memcpy(item, &(struct wire_delete){255, 0}, 8);
    CHECK(kvfs_frame_check(WIRE_DELETE, WIRE_TABLE, item, 8 + 256, 1, 1, shards, missing) == 0);
    memcpy(item, &(struct wire_delete){256, 0}, 8);
    CHECK(kvfs_frame_check(WIRE_DELETE, WIRE_TABLE, item, 8 + 256, 1, 1, shards, missing) == -EINVAL);
    printf("ok names that no file has are refused\n");
}

static void test_frames_of_any_bytes(void) {
    uint8_t bytes[512], missing[KVFS_SHARDS];
    uint32_t good = 0, keys[4] = {1, 2, 3, 4};
    for (int i = 0; i < 300000; i++) {
        static const uint32_t types[] = {WIRE_RESERVE, WIRE_DELETE, WIRE_COMMIT};
        uint32_t type = types[rand() % 3], flags = rand() % 2 ? 0 : (uint32_t)rand() % 16, count = rand() % 8 ? 4 : (uint32_t)rand();
        uint64_t size = items_make(bytes, keys, 4, 1000);
        if (type == WIRE_RESERVE && flags & (WIRE_PARENTS | WIRE_HASHES))
            for (uint32_t k = size = 0; k < 4; k++, size += 32) {
                memcpy(bytes + size, &(struct wire_reserve){1000, 8, k * (flags & WIRE_TABLE)}, 16);
                memset(bytes + size + 16, rand(), 8);
                memcpy(bytes + size + 24, "0a0b0c0d", 8);
            }
        if (type == WIRE_DELETE)
            for (uint32_t k = size = 0; k < 4; k++, size += 16) {
                memcpy(bytes + size, &(struct wire_delete){8, k * (flags & WIRE_TABLE)}, 8);
                memcpy(bytes + size + 8, "0a0b0c0d", 8);
            }
        for (int changes = rand() % 3; changes; changes--)
            bytes[(uint64_t)rand() % size] = (uint8_t)rand();
        size -= rand() % 4 ? 0 : (uint64_t)rand() % size;
        uint8_t *exact = malloc(size + 1); /* a byte beyond is an error of the sanitizer's */
        memcpy(exact, bytes, size);
        good += kvfs_frame_check(type, flags, exact, size, count, flags & WIRE_TABLE ? 4 : 0, shards, missing) == 0;
        free(exact);
    }
    CHECK(good > 1000);
    printf("ok frames of any bytes: %u were none that breaks a rule\n", good);
}

/* Records of directories above make an answer large: it takes what its user has left of all that clients may have, and ends there. */
static void test_answers_of_deep_directories_are_bounded(void) {
    enum { DEPTH = 200, COUNT = 64 };
    const uint64_t left = 300000;
    uint64_t next;
    struct user *user = user_get(plane, 7);
    uint32_t keys[COUNT], found = 0, refused = 0;
    uint8_t items[4096], missing[KVFS_SHARDS];
    for (uint64_t i = 0; i < DEPTH; i++)
        directory_put(900 + i, i ? 899 + i : 1, "d");
    struct kvfs_shard deep[KVFS_SHARDS];
    for (uint32_t i = 0; i < KVFS_SHARDS; i++)
        deep[i] = (struct kvfs_shard){900 + DEPTH - 1, 8, 0};
    for (uint32_t i = 0; i < COUNT; i++)
        keys[i] = i % KEYS;
    kvfs_reservations_expire(plane, UINT64_MAX - 1, &next);
    bury_all();
    kvfs_reservations_limit(plane, 100000, OPEN_MAX);
    uint64_t size = items_make(items, keys, COUNT, 4096);
    CHECK(kvfs_frame_check(WIRE_RESERVE, 0, items, size, COUNT, 0, deep, missing) == 0);
    uint32_t empty = 0;
    while (places[empty].run_count)
        CHECK(++empty < SEGMENTS);
    places[empty].next_page = 1;
    kvfs_place_head(names, 1, empty, 9);
    atomic_store(&user->kept, KVFS_CLIENT_MEMORY - left);
    struct kvfs_reserve *frame = kvfs_reserve_begin(holders[0], 0, items, COUNT, deep, 7);
    CHECK(frame && kvfs_reserve(plane, frame) == KVFS_FRAME_DONE);
    CHECK(user->answering > 0 && user->answering <= left);
    /* Another frame of the user's, meanwhile. */
    struct kvfs_reserve *other = kvfs_reserve_begin(holders[0], 0, items, COUNT, deep, 7);
    CHECK(other && kvfs_reserve(plane, other) == KVFS_FRAME_DONE);
    CHECK(user->answering <= left && frame->answer_size + other->answer_size <= 2 * COUNT * KVFS_RESERVED_SIZE + left);
    kvfs_reserve_finish(plane, frame, clock_now + 100);
    const uint8_t *at = frame->answer;
    for (uint32_t i = 0; i < COUNT; i++) {
        struct wire_reserved reserved;
        memcpy(&reserved, at, sizeof(reserved));
        at += sizeof(reserved);
        if (reserved.error == 0)
            at += sizeof(struct wire_run) + reserved.record_size + reserved.ancestors_size;
        CHECK(reserved.error == 0 || reserved.error == -ENOSPC);
        found += reserved.error == 0;
        refused += reserved.error != 0;
    }
    CHECK_SAY(found > 5 && refused > 5, "%u, %u", found, refused);
    kvfs_reserve_end(plane, frame);
    kvfs_reserve_end(plane, other);
    CHECK(user->answering == 0);
    atomic_store(&user->kept, 0);
    kvfs_reservations_limit(plane, 2000, OPEN_MAX);
    kvfs_reservations_expire(plane, UINT64_MAX - 1, &next);
    bury_all();
    printf("ok answers of deep directories are bounded\n");
}

/* A step takes back some of what has expired: others wait for its end. */
static void test_what_has_expired_is_taken_back_in_steps(void) {
    enum { COUNT = 100, FRAMES = 11 };
    uint32_t keys[COUNT], empty = 0;
    uint8_t items[4096], missing[KVFS_SHARDS];
    uint64_t next;
    for (uint32_t i = 0; i < COUNT; i++)
        keys[i] = i % KEYS;
    uint64_t size = items_make(items, keys, COUNT, 0), until = clock_now + 100;
    CHECK(kvfs_frame_check(WIRE_RESERVE, 0, items, size, COUNT, 0, shards, missing) == 0);
    kvfs_reservations_limit(plane, 100000, 10000);
    while (places[empty].run_count)
        CHECK(++empty < SEGMENTS);
    places[empty].next_page = 1;
    kvfs_place_head(names, 1, empty, 9);
    for (uint32_t i = 0; i < FRAMES; i++) {
        struct kvfs_reserve *frame = kvfs_reserve_begin(holders[0], 0, items, COUNT, shards, 7);
        CHECK(frame && kvfs_reserve(plane, frame) == KVFS_FRAME_MORE && kvfs_reserve(plane, frame) == KVFS_FRAME_DONE);
        kvfs_reserve_finish(plane, frame, until);
        kvfs_reserve_end(plane, frame);
    }
    CHECK(holders[0]->open == FRAMES * COUNT);
    CHECK(kvfs_reservations_expire(plane, until, &next) == KVFS_EXPIRED_MAX && next == until);
    CHECK(kvfs_reservations_expire(plane, until, &next) == FRAMES * COUNT - KVFS_EXPIRED_MAX && next == UINT64_MAX);
    bury_all();
    kvfs_reservations_limit(plane, 2000, OPEN_MAX);
    printf("ok what has expired is taken back in steps\n");
}

int main(void) {
    (void)pattern;
    plane_begin();
    names_open();
    srand(7);
    test_any_order_agrees_with_the_model();
    test_where_memory_ends_all_agree();
    test_items_go_into_the_directories_of_a_table();
    test_one_reservation_in_two_commits();
    test_what_was_taken_back_has_a_bound();
    test_who_holds_too_much_waits_or_is_refused();
    test_names_that_no_file_has_are_refused();
    test_frames_of_any_bytes();
    test_answers_of_deep_directories_are_bounded();
    test_what_has_expired_is_taken_back_in_steps();
    for (uint32_t i = 0; i < HOLDERS; i++)
        kvfs_holder_leave(plane, holders[i]);
    bury_all();
    for (uint32_t i = 0; i < HOLDERS; i++)
        kvfs_holder_free(plane, holders[i]);
    plane_end();
    printf("ok the plane comes down with nothing left\n");
    return 0;
}
