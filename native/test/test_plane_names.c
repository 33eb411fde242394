/* sources: base block names io content pod fuse virtiofs plane.c */
/* Files that the data plane makes, seals, renames and removes without Python, and what it tells Python of them. Then many threads at once, beside
 * commits. */
#include "kernel_harness.h"
#include "kvfs_naming.h"

#define SEGMENT 2u
#define GENERATION 9u
#define END_PAGE 4096u

static struct kvfs_names *names;
static struct kvfs_place *places;

static uint32_t segment_notes(uint32_t segment) {
    struct kvfs_noted noted[SEGMENTS];
    uint32_t count = kvfs_places_noted(names, noted, SEGMENTS), found = 0;
    for (uint32_t i = 0; i < count; i++)
        found |= noted[i].segment == segment ? noted[i].notes : 0;
    return found;
}

static void names_open(void) {
    names = kvfs_plane_names(plane);
    kvfs_names_number(names, UINT64_C(3) << KVFS_COUNTER_BITS, 0);
    places = kvfs_places_make(names, SEGMENTS, END_PAGE, 1u << 20);
    CHECK(places);
    directory_put(1, 1, "");
    kvfs_place_head(names, SEGMENT, GENERATION);
    kvfs_names_leave(names, KVFS_LEAVE_CLOSED, 0);
}

static uint64_t create_here(const char *name, uint64_t *fh) {
    struct fuse_create_in in = {.flags = O_RDWR | O_CREAT, .mode = 0100640};
    void *body;
    ask(FUSE_CREATE, 1, &in, sizeof(in), name, strlen(name) + 1);
    CHECK(answer(&body, NULL) == 0);
    struct fuse_entry_out entry;
    memcpy(&entry, body, sizeof(entry));
    memcpy(&created, (uint8_t *)body + sizeof(entry), sizeof(created));
    *fh = created.fh;
    CHECK(entry.nodeid >> KVFS_COUNTER_BITS == 3 && entry.attr.mode == 0100640 && entry.attr.size == 0);
    return entry.nodeid;
}

static void flush_soon(uint64_t inode, uint64_t fh) {
    struct fuse_flush_in in = {.fh = fh};
    ask(FUSE_FLUSH, inode, &in, sizeof(in), NULL, 0);
}

static int rename_here(const char *name, const char *new_name) {
    char both[600];
    struct fuse_rename_in in = {.newdir = 1};
    size_t size = (size_t)sprintf(both, "%s%c%s", name, 0, new_name) + 1;
    ask(FUSE_RENAME, 1, &in, sizeof(in), both, size);
    return answer(NULL, NULL);
}

static struct kvfs_inode_record record_of(uint64_t inode) {
    uint8_t out[1024];
    struct kvfs_inode_record record = {0};
    if (kvfs_names_get(names, inode, out, sizeof(out)) > 0)
        memcpy(&record, out, sizeof(record));
    return record;
}

static void test_a_file_is_made_sealed_renamed_and_removed_here(void) {
    uint64_t fh, found;
    uint8_t *data = pattern(70000, 3);
    uint64_t inode = create_here("tmp", &fh);
    CHECK(write_at(inode, fh, 0, data, 70000) == 0);
    flush_soon(inode, fh);
    CHECK(answer(NULL, NULL) == 0);
    struct kvfs_inode_record record = record_of(inode);
    CHECK(record.flags == KVFS_INODE_SEALED && record.size == 70000 && record.segment == SEGMENT && record.generation == GENERATION);
    CHECK(places[SEGMENT].live_pages == record.header_pages + 18 && places[SEGMENT].run_count == 0);
    CHECK(segment_notes(SEGMENT) & KVFS_NOTE_ENTERED);
    release(inode, fh);
    CHECK(rename_here("tmp", "block") == 0);
    CHECK(record_of(inode).version > record.version && record_of(inode).name_size == 5);
    CHECK(segment_notes(SEGMENT) & KVFS_NOTE_RENAMED);
    CHECK(kvfs_names_find(names, 1, "block", 5, &found) && found == inode);
    struct kvfs_record there;
    CHECK(kvfs_table_find_name(plane->table, 1, "block", 5, &there) == 0 && there.inode == inode);
    CHECK(kvfs_table_find_name(plane->table, 1, "tmp", 3, &there) == -ENOENT);
    int error;
    uint64_t reader = open_read(inode, &error);
    CHECK(error == 0 && read_check(inode, reader, 0, 70000, data, 70000) == 0);
    release(inode, reader);
    ask(FUSE_UNLINK, 1, "block", 6, NULL, 0);
    CHECK(answer(NULL, NULL) == 0);
    CHECK(record_of(inode).inode == 0 && places[SEGMENT].live_pages == 0);
    CHECK(segment_notes(SEGMENT) & KVFS_NOTE_GONE);
    CHECK(kvfs_table_find_name(plane->table, 1, "block", 5, &there) == -ENOENT);
    free(data);
    printf("ok a file is made, sealed, renamed and removed here\n");
}

static struct kvfs_look look_at(uint64_t inode, uint32_t segment) {
    struct kvfs_look look;
    kvfs_blocks_look(plane, segment, &inode, 1, &look);
    CHECK(look.inode == inode);
    return look;
}

/* Commits what has changed. Returns 1 if the index is to forget the inode, 0 if it is to know it, -1 if it has not changed. */
static int committed(uint64_t inode) {
    uint64_t size;
    const uint8_t *at = kvfs_names_commit_begin(names, &size), *end = at + size;
    CHECK(at);
    int said = -1;
    for (struct kvfs_change change; at < end; at += sizeof(change) + change.record_size) {
        memcpy(&change, at, sizeof(change));
        if (change.inode == inode)
            said = !change.record_size;
    }
    kvfs_names_commit_end(names, 1);
    return said;
}

static void test_eviction_takes_all_but_what_is_open(void) {
    uint64_t fh[2], inodes[2], reader;
    uint8_t *data = pattern(70000, 6);
    int error;
    const char *block_names[2] = {"goes", "open"};
    for (int i = 0; i < 2; i++) {
        inodes[i] = create_here(block_names[i], &fh[i]);
        CHECK(write_at(inodes[i], fh[i], 0, data, 70000) == 0);
        CHECK(look_at(inodes[i], SEGMENT).open == KVFS_BEING_WRITTEN && look_at(inodes[i], SEGMENT).pages == 0);
        flush_soon(inodes[i], fh[i]);
        CHECK(answer(NULL, NULL) == 0);
        release(inodes[i], fh[i]);
    }
    reader = open_read(inodes[1], &error);
    CHECK(error == 0 && read_check(inodes[1], reader, 0, 70000, data, 70000) == 0);
    uint32_t pages = record_of(inodes[0]).header_pages + 18;
    struct kvfs_look look = look_at(inodes[0], SEGMENT);
    CHECK(look.pages == pages && look.pages_all == pages && look.open == KVFS_NOT_OPEN && !look.absent && look_at(inodes[0], 1).pages == 0);
    CHECK(look_at(inodes[1], SEGMENT).open == KVFS_OPEN && (look_at(inodes[1], SEGMENT).use & 255) == 1);
    CHECK(committed(inodes[0]) == 0);
    _Alignas(8) uint8_t records[2][1024];
    for (int i = 0; i < 2; i++)
        CHECK(kvfs_names_get(names, inodes[i], records[i], sizeof(records[i])) > 0);
    kvfs_names_forget(names); /* then the block table knows where they are */
    directory_put(1, 1, "");
    CHECK(look_at(inodes[0], SEGMENT).pages == pages && look_at(inodes[0], 1).pages == 0);
    uint8_t gone[2];
    struct kvfs_evicted evicted;
    kvfs_blocks_evict(plane, SEGMENT, inodes, 2, gone, &evicted);
    CHECK(evicted.blocks == 0 && !gone[0] && !gone[1]); /* without the records there are no names to remove */
    for (int i = 0; i < 2; i++)
        CHECK(kvfs_names_load(names, records[i], ((struct kvfs_inode_record *)(void *)records[i])->record_size) == 0);
    kvfs_blocks_evict(plane, 1, inodes, 2, gone, &evicted);
    CHECK(evicted.blocks == 0); /* they lie elsewhere */
    segment_notes(SEGMENT);
    CHECK(places[SEGMENT].live_pages == 2 * pages);
    kvfs_blocks_evict(plane, SEGMENT, inodes, 2, gone, &evicted);
    CHECK(evicted.blocks == 1 && evicted.pages == pages && gone[0] && !gone[1]);
    CHECK(places[SEGMENT].live_pages == pages && segment_notes(SEGMENT) & KVFS_NOTE_GONE);
    struct kvfs_record there;
    CHECK(kvfs_table_find_inode(plane->table, inodes[0], &there) == -ENOENT && kvfs_table_find_inode(plane->table, inodes[1], &there) == 0);
    uint64_t found = 7;
    CHECK(kvfs_names_find(names, 1, "goes", 4, &found) == 1 && found == 0 && look_at(inodes[0], SEGMENT).pages == 0);
    CHECK(names_is_untold(names, 1, "goes", 4) && !names_is_untold(names, 1, "open", 4));
    CHECK(committed(inodes[0]) == 1);
    release(inodes[1], reader);
    kvfs_blocks_evict(plane, UINT32_MAX, inodes, 2, gone, &evicted);
    CHECK(evicted.blocks == 1 && !gone[0] && gone[1] && places[SEGMENT].live_pages == 0);
    CHECK(committed(inodes[1]) == 1);
    kvfs_names_untold(names, 0, "", 0);
    free(data);
    printf("ok eviction takes all but what is open\n");
}

static void test_a_group_goes_as_a_whole(void) {
    uint64_t fh, inodes[3], reader;
    uint8_t *data = pattern(70000, 6), gone[3];
    struct kvfs_evicted evicted;
    int error;
    const char *block_names[3] = {"first", "second", "third"};
    for (int i = 0; i < 3; i++) {
        inodes[i] = create_here(block_names[i], &fh);
        CHECK(write_at(inodes[i], fh, 0, data, 70000) == 0);
        flush_soon(inodes[i], fh);
        CHECK(answer(NULL, NULL) == 0);
        release(inodes[i], fh);
    }
    uint32_t pages = record_of(inodes[0]).header_pages + 18;
    reader = open_read(inodes[2], &error); /* the last that it looks at */
    CHECK(error == 0);
    kvfs_group_evict(plane, inodes, 3, gone, &evicted);
    CHECK(evicted.blocks == 0 && evicted.pages == 0 && !gone[0] && !gone[1] && !gone[2] && places[SEGMENT].live_pages == 3 * pages);
    CHECK(read_check(inodes[2], reader, 0, 70000, data, 70000) == 0);
    release(inodes[2], reader);
    kvfs_group_evict(plane, inodes, 3, gone, &evicted);
    CHECK(evicted.blocks == 3 && evicted.pages == 3 * pages && gone[0] && gone[1] && gone[2] && places[SEGMENT].live_pages == 0);
    kvfs_group_evict(plane, inodes, 3, gone, &evicted);
    CHECK(evicted.blocks == 0 && !gone[0]);
    kvfs_names_untold(names, 0, "", 0);
    free(data);
    printf("ok a group goes as a whole\n");
}

static void test_files_of_a_directory_go_in_one_step(void) {
    enum { FILES = 5, ELSEWHERE = FILES, ABSENT, DIRECTORY, ALL };
    uint64_t fh[FILES], inodes[ALL], reader;
    uint8_t *data = pattern(70000, 6), left[ALL];
    struct kvfs_removed removed;
    struct kvfs_record there;
    int error;
    char long_name[KVFS_NAME_MAX + 1] = {0};
    memset(long_name, 'n', KVFS_NAME_MAX);
    const char *all_names[FILES] = {"closed", "open", "written", "gone", long_name};
    for (int i = 0; i < FILES; i++) {
        inodes[i] = create_here(all_names[i], &fh[i]);
        CHECK(write_at(inodes[i], fh[i], 0, data, 70000) == 0);
        if (i == 2)
            continue; /* its writer has it open */
        flush_soon(inodes[i], fh[i]);
        CHECK(answer(NULL, NULL) == 0);
        release(inodes[i], fh[i]);
    }
    reader = open_read(inodes[1], &error);
    CHECK(error == 0 && name_unlink(plane, 1, "gone") == 0);
    directory_put(70, 1, "seventy");
    inodes[ELSEWHERE] = 1;
    inodes[ABSENT] = 7777;
    inodes[DIRECTORY] = 70;
    uint32_t pages = record_of(inodes[0]).header_pages + 18;
    kvfs_names_leave(names, KVFS_LEAVE_HIDING, 1); /* Python looks at each */
    kvfs_files_remove(plane, 1, inodes, ALL, left, &removed);
    CHECK(removed.files == 0 && left[0] && left[1] && places[SEGMENT].live_pages == 3 * pages);
    kvfs_names_leave(names, KVFS_LEAVE_HIDING, 0);
    kvfs_files_remove(plane, 70, inodes, FILES, left, &removed); /* another directory */
    CHECK(removed.files == 0 && !left[0] && record_of(inodes[0]).inode == inodes[0]);
    kvfs_files_remove(plane, 1, inodes, ALL, left, &removed);
    CHECK(removed.files == 4 && removed.open == 2 && removed.bytes == 3 * 70000);
    for (int i = 0; i < FILES; i++) {
        CHECK(left[i] == (i == 3) && kvfs_table_find_name(plane->table, 1, all_names[i], (uint32_t)strlen(all_names[i]), &there) == -ENOENT);
        CHECK(names_is_untold(names, 1, all_names[i], (uint32_t)strlen(all_names[i])) == (i != 3));
    }
    CHECK(!left[ELSEWHERE] && left[ABSENT] && left[DIRECTORY] && record_of(70).kind == KVFS_KIND_DIRECTORY);
    CHECK(segment_notes(SEGMENT) & KVFS_NOTE_GONE && places[SEGMENT].live_pages == pages);
    CHECK(read_check(inodes[1], reader, 0, 70000, data, 70000) == 0);
    release(inodes[1], reader);
    release(inodes[2], fh[2]);
    struct kvfs_event event;
    while (kvfs_take_events(plane, &event, 1)) /* IDLE: Python ends them */
        ;
    for (int i = 1; i < 3; i++)
        CHECK(kvfs_inode_remove(plane, inodes[i]) == 0 && kvfs_names_remove(names, inodes[i]) == 0);
    CHECK(kvfs_inode_remove(plane, 70) == 0 && kvfs_names_remove(names, 70) == 0);
    places[SEGMENT].live_pages -= pages; /* as Python's step does */
    kvfs_names_untold(names, 0, "", 0);
    free(data);
    printf("ok files of a directory go in one step\n");
}

static void test_python_gets_what_is_not_in_memory(void) {
    uint64_t fh, inode = create_here("one", &fh);
    release(inode, fh);
    struct kvfs_event event;
    while (kvfs_take_events(plane, &event, 1)) /* RESEAL: it is empty, and was never closed by a FLUSH */
        ;
    char both[] = "one\0two";
    struct fuse_rename_in in = {.newdir = 77};
    ask(FUSE_RENAME, 1, &in, sizeof(in), both, sizeof(both)); /* a directory that is not here */
    struct kvfs_call call = forwarded_call(FUSE_RENAME);
    kvfs_answer(plane, call.id, -ENOENT, 0, NULL);
    CHECK(answer(NULL, NULL) == -ENOENT);
    struct fuse_create_in create = {.flags = O_RDWR | O_CREAT, .mode = 0100640};
    ask(FUSE_CREATE, 1, &create, sizeof(create), "one", 4); /* a name that is taken */
    call = forwarded_call(FUSE_CREATE);
    kvfs_answer(plane, call.id, -EEXIST, 0, NULL);
    CHECK(answer(NULL, NULL) == -EEXIST);
    kvfs_names_untold(names, 1, "stale", 5); /* a name that a host may believe in */
    ask(FUSE_CREATE, 1, &create, sizeof(create), "stale", 6);
    call = forwarded_call(FUSE_CREATE);
    kvfs_answer(plane, call.id, -EIO, 0, NULL);
    CHECK(answer(NULL, NULL) == -EIO);
    kvfs_names_untold(names, 0, "", 0);
    kvfs_names_begin(names); /* Python is in the middle of a step */
    ask(FUSE_UNLINK, 1, "one", 4, NULL, 0);
    call = forwarded_call(FUSE_UNLINK);
    kvfs_names_end(names);
    kvfs_answer(plane, call.id, -EBUSY, 0, NULL);
    CHECK(answer(NULL, NULL) == -EBUSY);
    ask(FUSE_UNLINK, 1, "one", 4, NULL, 0);
    CHECK(answer(NULL, NULL) == 0);
    printf("ok Python gets what is not in memory\n");
}

/* Python counts what is pinned. The rest of the pool is none of a pin's business. */
static void test_below_a_pin_python_seals(void) {
    struct {
        struct kvfs_inode_record record;
        char name[8];
    } pinned = {.record = {.record_size = sizeof(pinned),
                           .inode = 50,
                           .parent = 1,
                           .kind = KVFS_KIND_DIRECTORY,
                           .flags = KVFS_INODE_PINNED,
                           .mode = 040755,
                           .nlink = 2,
                           .name_size = 6},
                .name = "pinned"};
    CHECK(kvfs_names_put(names, &pinned, 0) == 0 && kvfs_name_put(plane, &pinned, 0) == 0);
    kvfs_names_leave(names, KVFS_LEAVE_PINS, 1);
    struct kvfs_record record;
    CHECK(name_create(plane, 50, "below", 0644, 0, 0, &record) == 0);
    CHECK(name_unlink(plane, 50, "below") > 0);
    CHECK(name_rename(plane, 50, "below", 1, "elsewhere", 0) > 0);
    struct flush flush = {.plane = plane, .inode = record.inode};
    CHECK(flush_start(&flush, NULL) == -EAGAIN);
    CHECK(name_create(plane, 1, "beside", 0644, 0, 0, &record) == 0);
    CHECK(name_rename(plane, 1, "beside", 50, "inside", 0) > 0);
    CHECK(name_rename(plane, 1, "beside", 50, "below", 0) > 0 && name_rename(plane, 50, "below", 50, "again", 0) == 0);
    CHECK(name_rename(plane, 50, "again", 50, "below", 0) == 0 && name_unlink(plane, 1, "beside") == 0);
    kvfs_names_leave(names, KVFS_LEAVE_PINS, 0);
    CHECK(name_unlink(plane, 50, "below") == 0);
    printf("ok below a pin Python seals, moves and removes\n");
}

static void test_a_seal_that_fails_is_pythons(void) {
    uint64_t fh, inode = create_here("fails", &fh);
    uint8_t *data = pattern(9000, 4);
    CHECK(write_at(inode, fh, 0, data, 9000) == 0);
    segment_notes(SEGMENT);
    uint32_t live = places[SEGMENT].live_pages;
    fault(KVFS_FAULT_ERROR, 2, EIO);
    flush_soon(inode, fh);
    struct kvfs_call call = forwarded_call(FUSE_FLUSH);
    fault(KVFS_FAULT_NONE, 2, 0);
    CHECK(call.inode == inode && segment_notes(SEGMENT) & KVFS_NOTE_FAILED);
    struct kvfs_failed_run run;
    CHECK(kvfs_place_failed(names, SEGMENT, &run) == 1 && kvfs_place_failed(names, SEGMENT, &run) == 0);
    CHECK(places[SEGMENT].run_count == 1 && places[SEGMENT].first_page == run.page && places[SEGMENT].live_pages == live);
    CHECK(kvfs_names_in_flight(names, NULL, 0) == 0);
    /* A block behind the run is not acknowledged before the run has ended. */
    uint64_t other_fh, other = create_here("behind", &other_fh);
    CHECK(write_at(other, other_fh, 0, data, 9000) == 0);
    flush_soon(other, other_fh);
    usleep(100000);
    CHECK(nothing_answered() && record_of(other).flags == KVFS_INODE_SEALED);
    kvfs_place_release(names, SEGMENT, run.page);
    CHECK(answer(NULL, NULL) == 0 && places[SEGMENT].run_count == 0);
    kvfs_answer(plane, call.id, -EIO, 0, NULL);
    release(inode, fh);
    release(other, other_fh);
    CHECK(kvfs_file_discard(plane, inode) == 0);
    free(data);
    printf("ok a seal that fails is Python's\n");
}

static uint32_t slots_free(void) {
    pthread_mutex_lock(&plane->staging.lock);
    uint32_t count = plane->staging.free_count;
    pthread_mutex_unlock(&plane->staging.lock);
    return count;
}

/* The thread that took a FLUSH of up to 4 MiB sums and writes itself, and serves others meanwhile. A device that does not answer in time costs that
 * FLUSH its deadline, and keeps the memory until it does. */
static void test_a_device_is_silent_under_a_servers_ring(void) {
    const uint32_t size = 600000;
    uint64_t fh, large_fh, inode = create_here("silent", &fh), large = create_here("large", &large_fh);
    uint8_t *data = pattern(1 << 20, 8);
    pthread_mutex_lock(&plane->store.lock); /* no worker gets a job */
    CHECK(write_at(inode, fh, 0, data, size) == 0);
    flush_soon(inode, fh);
    CHECK(answer(NULL, NULL) == 0 && record_of(inode).flags == KVFS_INODE_SEALED);
    release(inode, fh);
    CHECK(write_at(large, large_fh, 0, data, 1 << 20) == 0 && write_at(large, large_fh, 4 << 20, data, 1 << 20) == 0); /* and a hole */
    flush_soon(large, large_fh);
    usleep(50000);
    CHECK(nothing_answered());
    pthread_mutex_unlock(&plane->store.lock);
    CHECK(answer(NULL, NULL) == 0 && record_of(large).size == 5 << 20);
    release(large, large_fh);
    for (uint32_t fails = 0; fails < 2; fails++) { /* in the end the device says that it wrote, or that it did not */
        uint32_t slots = slots_free();
        inode = create_here(fails ? "fails late" : "silent again", &fh);
        CHECK(write_at(inode, fh, 0, data, size) == 0);
        segment_notes(SEGMENT);
        hold_next(2, fails ? EIO : 0);
        flush_soon(inode, fh);
        uint64_t flush = unique;
        wait_held();
        ask(FUSE_LOOKUP, 1, "nobody", 7, NULL, 0);
        CHECK(answer_of(unique) == -ENOENT && atomic_load(&plane->array.orphans) == 0);
        struct kvfs_call call = forwarded_call(FUSE_FLUSH); /* after the deadline */
        CHECK(call.inode == inode && segment_notes(SEGMENT) & KVFS_NOTE_FAILED && atomic_load(&plane->array.orphans) == 1);
        struct kvfs_failed_run run;
        CHECK(kvfs_place_failed(names, SEGMENT, &run) == 1);
        kvfs_answer(plane, call.id, -EIO, 0, NULL);
        CHECK(answer_of(flush) == -EIO);
        release(inode, fh);
        CHECK(kvfs_file_discard(plane, inode) == 0 && slots_free() < slots);
        let_go();
        for (uint64_t until = now_ns() + 20000000000ull; atomic_load(&plane->array.orphans) || slots_free() < slots; usleep(200))
            CHECK(now_ns() < until);
        kvfs_place_release(names, SEGMENT, run.page);
        CHECK(atomic_load(&plane->count.jobs_in_flight) == 0 && places[SEGMENT].run_count == 0);
        for (uint32_t i = 0; i < DEVICES; i++)
            atomic_store(&plane->array.devices[i].stuck_until_ns, 0);
    }
    free(data);
    printf("ok a small seal is written by the thread that was asked; a silent device costs it its deadline\n");
}

static void test_a_flush_waits_for_room(void) {
    uint64_t fh, inode = create_here("waits", &fh);
    uint8_t *data = pattern(9000, 5);
    CHECK(write_at(inode, fh, 0, data, 9000) == 0);
    kvfs_place_head(names, UINT32_MAX, 0);
    flush_soon(inode, fh);
    struct kvfs_event event = {0};
    for (uint64_t until = now_ns() + 20000000000ull; event.type != KVFS_EVENT_ROOM; usleep(200)) {
        kvfs_take_events(plane, &event, 1);
        CHECK(now_ns() < until);
    }
    CHECK(kvfs_flush_wanted(plane) == 4 && nothing_answered());
    kvfs_flush_retry(plane); /* still none */
    CHECK(kvfs_flush_wanted(plane) == 4 && nothing_answered());
    kvfs_flush_give_up(plane);
    CHECK(kvfs_flush_wanted(plane) == 0);
    struct kvfs_call call = forwarded_call(FUSE_FLUSH);
    kvfs_answer(plane, call.id, -ENOSPC, 0, NULL);
    CHECK(answer(NULL, NULL) == -ENOSPC);
    flush_soon(inode, fh);
    for (uint64_t until = now_ns() + 20000000000ull; !kvfs_flush_wanted(plane); usleep(200))
        CHECK(now_ns() < until);
    kvfs_place_head(names, SEGMENT, GENERATION);
    kvfs_flush_retry(plane);
    CHECK(answer(NULL, NULL) == 0);
    release(inode, fh);
    /* The segment is full: the next of the supply is appended to. */
    uint32_t rest = END_PAGE - places[SEGMENT].next_page, filler = kvfs_place_take(names, SEGMENT, rest);
    CHECK(filler && kvfs_place_supply(names, 5, 11) == 0);
    inode = create_here("next", &fh);
    CHECK(write_at(inode, fh, 0, data, 9000) == 0);
    flush_soon(inode, fh);
    CHECK(answer(NULL, NULL) == 0);
    CHECK(record_of(inode).segment == 5 && record_of(inode).generation == 11 && kvfs_place_lead(names) == 5);
    CHECK(segment_notes(5) & KVFS_NOTE_LED);
    CHECK(kvfs_place_withdraw(names, 5) == 0);
    kvfs_place_release(names, SEGMENT, filler);
    release(inode, fh);
    free(data);
    printf("ok a FLUSH waits for room, in its order\n");
}

static void flush_parks(uint64_t inode, uint64_t fh) {
    flush_soon(inode, fh);
    for (uint64_t until = now_ns() + 20000000000ull; !kvfs_flush_wanted(plane); usleep(200))
        CHECK(now_ns() < until);
    CHECK(nothing_answered());
}

/* Leaves so many pages in the segment that is appended to. */
static void leave_room(uint32_t pages) {
    uint32_t head = kvfs_place_lead(names), size = END_PAGE - pages - places[head].next_page, filler = kvfs_place_take(names, head, size);
    CHECK(filler);
    kvfs_place_release(names, head, filler);
}

/* A write of a block over two segments fails, the first one or the second: both runs are Python's to bury. */
static void block_fails_between(uint32_t first, uint32_t second, uint32_t write) {
    const uint32_t size = 400 * PAGE, live = places[first].live_pages;
    uint8_t *data = pattern(size, 8);
    uint64_t fh, inode = create_here(write == 1 ? "first fails" : "second fails", &fh);
    for (uint32_t at = 0; at < size; at += 50 * PAGE)
        CHECK(write_at(inode, fh, at, data + at, 50 * PAGE) == 0);
    CHECK(kvfs_place_lead(names) == first);
    leave_room(300);
    CHECK(kvfs_place_supply(names, second, second + 6) == 0);
    CHECK(kvfs_fault_set(plane, 2, KVFS_FAULT_ERROR, 2, write, EIO) == 0);
    flush_soon(inode, fh);
    struct kvfs_call call = forwarded_call(FUSE_FLUSH);
    fault(KVFS_FAULT_NONE, 2, 0);
    struct kvfs_failed_run run;
    CHECK(call.inode == inode && places[first].live_pages == live && places[second].live_pages == 0);
    CHECK(kvfs_place_failed(names, first, &run) == 1 && run.page == END_PAGE - 300 && run.page_count == 300);
    CHECK(kvfs_place_failed(names, second, &run) == 1 && run.page == 1 && run.page_count == 102);
    kvfs_place_release(names, first, END_PAGE - 300);
    kvfs_place_release(names, second, 1);
    kvfs_answer(plane, call.id, -EIO, 0, NULL);
    CHECK(answer(NULL, NULL) == -EIO && kvfs_names_in_flight(names, NULL, 0) == 0);
    release(inode, fh);
    CHECK(kvfs_file_discard(plane, inode) == 0);
    free(data);
}

/* Where one segment would stay a sixteenth empty, or the block is larger than a quarter of one. */
static void test_a_block_goes_on_in_the_next_segment(void) {
    const uint32_t size = 400 * PAGE, first = kvfs_place_lead(names);
    const uint64_t bytes_before = atomic_load(&plane->count.written_bytes);
    uint8_t *data = pattern(size, 8);
    uint64_t fh, inode = create_here("spans", &fh);
    for (uint32_t at = 0; at < size; at += 50 * PAGE)
        CHECK(write_at(inode, fh, at, data + at, 50 * PAGE) == 0);
    leave_room(300);
    segment_notes(first);
    flush_parks(inode, fh);
    CHECK(kvfs_flush_wanted(plane) == 401 && places[first].next_page == END_PAGE - 300); /* nothing was taken */
    CHECK(kvfs_place_supply(names, 6, 12) == 0);
    /* It is answered when what was placed before it in its second segment has ended, too. */
    uint32_t before = kvfs_place_take(names, 6, 3);
    kvfs_flush_retry(plane);
    for (uint64_t until = now_ns() + 20000000000ull; record_of(inode).flags != KVFS_INODE_SEALED; usleep(200))
        CHECK(now_ns() < until);
    usleep(50000);
    kvfs_names_begin(names); /* the thread that wrote it has ended the runs */
    CHECK(nothing_answered() && places[first].run_count == 0 && places[6].run_count == 1);
    kvfs_names_end(names);
    kvfs_place_release(names, 6, before);
    CHECK(answer(NULL, NULL) == 0 && places[6].run_count == 0);
    struct kvfs_inode_record record = record_of(inode);
    CHECK(record.segment == first && record.page == END_PAGE - 300 && record.extent_count == 2 && record.header_pages == 1);
    CHECK(kvfs_place_lead(names) == 6 && places[first].next_page == END_PAGE && places[6].next_page == 1 + 3 + 102);
    CHECK(places[6].live_pages == 101 && segment_notes(6) & KVFS_NOTE_LED);
    CHECK(atomic_load(&plane->count.written_bytes) - bytes_before == 402 * PAGE);
    release(inode, fh);
    int error;
    uint64_t reader = open_read(inode, &error);
    CHECK(error == 0);
    for (uint32_t at = 0; at < size; at += 50 * PAGE)
        CHECK(read_check(inode, reader, at, 50 * PAGE, data, size) == 0);
    release(inode, reader);
    CHECK(look_at(inode, first).pages == 300 && look_at(inode, 6).pages == 101);
    free(data);
    block_fails_between(6, 7, 1);
    block_fails_between(7, 3, 2);
    /* One larger than a segment is Python's; nothing is taken for it. */
    struct kvfs_run runs[PLACE_RUNS_MAX];
    uint32_t next = places[3].next_page;
    kvfs_names_begin(names);
    CHECK(place_take(names, 2, END_PAGE - 2, runs) == -EAGAIN && place_take(names, 1, END_PAGE - 2, runs) == -ENOSPC);
    kvfs_names_end(names);
    CHECK(places[3].next_page == next && kvfs_place_lead(names) == 3);
    printf("ok a block goes on in the next segment\n");
}

/* ---- many threads ---- */

#define THREADS 4
#define TURNS 3000

static atomic_uint working;
#define BLOCKS 40u
#define FIRST_BLOCK (UINT64_C(1) << 40)

static atomic_ullong made, renamed, removed, left_to_python, looked_at;
static uint64_t evicted_here, forgotten, groups_gone, groups_kept;

/* A sealed block of two pages in directory 60. */
static void block_put(uint64_t inode, uint32_t number) {
    struct {
        struct kvfs_inode_record record;
        char name[16];
    } block = {.record = {.inode = inode, .parent = 60, .kind = KVFS_KIND_FILE, .mode = 0100644, .nlink = 1, .flags = KVFS_INODE_SEALED}};
    block.record.size = 4096;
    block.record.segment = SEGMENT;
    block.record.header_pages = 1;
    block.record.name_size = (uint16_t)sprintf(block.name, "block%u", number);
    block.record.record_size = (uint32_t)(sizeof(block.record) + round_up(block.record.name_size, 8));
    kvfs_names_begin(names);
    block.record.version = kvfs_names_next_version(names);
    struct kvfs_record there;
    if (kvfs_table_find_name(plane->table, 60, block.name, block.record.name_size, &there) == -ENOENT) {
        CHECK(kvfs_name_put(plane, &block, 0) == 0 && kvfs_names_put(names, &block, 0) == 0);
        place_account(names, &block.record, 1);
    }
    kvfs_names_end(names);
}

static void block_open(uint64_t inode, unsigned thread) {
    struct kvfs_record record;
    struct node *node;
    if (node_open(plane, inode, user_get(plane, thread), false, &record, &node) < 0)
        return;
    looked_at++;
    struct shard *shard = shard_of(plane, inode);
    pthread_mutex_lock(&shard->lock);
    node_unopen(plane, node, user_get(plane, thread), false);
    pthread_mutex_unlock(&shard->lock);
    node_put(plane, node);
}

static void *churn(void *argument) {
    unsigned thread = (unsigned)(uintptr_t)argument;
    uint64_t dice = thread + 1;
    for (uint32_t turn = 0; turn < TURNS; turn++) {
        char name[32], new_name[32];
        /* Some names are everybody's. */
        snprintf(name, sizeof(name), "%s%u", turn % 4 ? "own" : "shared", turn % 4 ? thread * 1000 + turn % 50 : turn % 7);
        snprintf(new_name, sizeof(new_name), "%s%u", turn % 3 ? "new" : "shared", turn % 3 ? thread * 1000 + turn % 60 : turn % 5);
        struct kvfs_record record;
        int r = 0;
        uint64_t block = random_below(&dice, BLOCKS);
        switch (random_below(&dice, 6)) {
        case 3: snprintf(name, sizeof(name), "block%u", (unsigned)block), r = name_unlink(plane, 60, name); break;
        case 4:
            snprintf(name, sizeof(name), "block%u", (unsigned)block);
            snprintf(new_name, sizeof(new_name), "block%u", (unsigned)random_below(&dice, BLOCKS));
            r = name_rename(plane, 60, name, 60, new_name, 0);
            break;
        case 5:
            snprintf(name, sizeof(name), "block%u", (unsigned)block);
            if (kvfs_table_find_name(plane->table, 60, name, (uint32_t)strlen(name), &record) == 0)
                block_open(record.inode, thread);
            break;
        case 0: r = name_create(plane, 60 + turn % 2, name, 0644, thread, thread, &record), made += r == 0; break;
        case 1: r = name_rename(plane, 60 + turn % 2, name, 60, new_name, 1 /* RENAME_NOREPLACE */), renamed += r == 0; break;
        default: r = name_unlink(plane, 60, turn % 2 ? name : new_name), removed += r == 0; break;
        }
        CHECK(r >= 0 || r == -ENOENT || r == -EEXIST);
        left_to_python += r > 0;
    }
    atomic_fetch_sub(&working, 1);
    return NULL;
}

/* All members of the segment, and their pages are those that count. */
static uint32_t members_check(uint64_t inodes[4096]) {
    uint64_t pages = 0;
    kvfs_names_begin(names);
    uint32_t count = kvfs_names_members(names, SEGMENT, NULL, 0, inodes, 4096);
    CHECK(count <= 4096);
    for (uint32_t i = 0; i < count; i++)
        pages += names_record(names, inodes[i]) ? record_pages(names_record(names, inodes[i]), SEGMENT) : 0;
    CHECK(pages == places[SEGMENT].live_pages);
    kvfs_names_end(names);
    return count;
}

/* Eviction of some of what is there; the rest of the members stay, and so do blocks that are open. */
static void evict_some(uint32_t turn) {
    uint64_t inodes[4096];
    struct kvfs_look looks[4096];
    uint8_t gone[4096];
    struct kvfs_evicted evicted;
    for (uint32_t i = 0; i < 4; i++)
        block_put(FIRST_BLOCK + turn * 4ull + i, (turn * 4 + i) % BLOCKS);
    uint32_t count = members_check(inodes);
    kvfs_blocks_look(plane, SEGMENT, inodes, count, looks);
    if (turn % 8 == 6) {
        struct kvfs_removed files;
        kvfs_files_remove(plane, 60, inodes, count / 4, gone, &files);
        forgotten += files.files;
    }
    if (turn % 8 && turn % 4 != 1)
        return;
    if (turn % 4 == 1) {
        uint32_t members = count / 2 < 3 ? count / 2 : 3;
        kvfs_group_evict(plane, inodes, members, gone, &evicted);
        struct kvfs_record there;
        for (uint32_t i = 0; evicted.blocks && i < members; i++) /* all of them, however many threads open and remove them */
            CHECK(gone[i] || kvfs_table_find_inode(plane->table, inodes[i], &there) == -ENOENT);
        groups_gone += evicted.blocks > 0;
        groups_kept += members && !evicted.blocks;
    } else {
        kvfs_blocks_evict(plane, turn % 16 ? UINT32_MAX : SEGMENT, inodes, count / 2, gone, &evicted);
    }
    evicted_here += evicted.blocks;
    members_check(inodes);
}

/* Removals and renames by Python's hand. Directory 62 goes up and down, and takes the place of an empty one. */
static void name_some(uint32_t turn) {
    char name[32], new_name[32];
    const bool down = turn % 2;
    snprintf(name, sizeof(name), "block%u", turn % BLOCKS);
    snprintf(new_name, sizeof(new_name), "block%u", turn * 7 % BLOCKS);
    const struct kvfs_naming asked[] = {
        {.kind = KVFS_NAMING_RENAME, .parent = 60, .name = name, .new_parent = 60, .new_name = new_name},
        {.kind = KVFS_NAMING_UNLINK, .parent = 60, .name = new_name},
        {.kind = KVFS_NAMING_RENAME, .parent = down ? 60 : 61, .name = "moves", .new_parent = down ? 61 : 60, .new_name = "moves"},
    };
    for (uint32_t i = 0; i < 3; i++) {
        struct kvfs_naming n = asked[i];
        n.name_size = (uint32_t)strlen(n.name);
        n.new_name_size = n.new_name ? (uint32_t)strlen(n.new_name) : 0;
        int r = kvfs_naming(plane, &n);
        CHECK(r == 0 || r == -ENOENT);
        CHECK(i < 2 || (r == 0 && n.before && n.after));
        kvfs_naming_end(plane, &n);
    }
}

/* Python meanwhile: commits, some of which fail, evictions, and steps. */
static void test_threads_beside_commits(void) {
    directory_put(60, 1, "sixty");
    directory_put(61, 60, "below");
    directory_put(62, 61, "moves");
    pthread_t threads[THREADS];
    atomic_store(&working, THREADS);
    for (uintptr_t i = 0; i < THREADS; i++)
        CHECK(pthread_create(&threads[i], NULL, churn, (void *)i) == 0);
    for (uint32_t turn = 0; atomic_load(&working) || evicted_here < 10 || !groups_gone || !forgotten; turn++) {
        uint64_t size;
        CHECK(kvfs_names_commit_begin(names, &size));
        usleep(300);
        kvfs_names_commit_end(names, turn % 4 != 0);
        evict_some(turn);
        name_some(turn);
        kvfs_names_begin(names);
        kvfs_inode_update(plane, &(struct kvfs_inode_record){.record_size = 128, .inode = 60, .kind = KVFS_KIND_DIRECTORY, .mode = 040755});
        kvfs_names_end(names);
        struct kvfs_event event;
        while (kvfs_take_events(plane, &event, 1))
            ;
    }
    for (uint32_t i = 0; i < THREADS; i++)
        CHECK(pthread_join(threads[i], NULL) == 0);
    CHECK(made > 100 && renamed > 20 && removed > 20);
    /* Names in memory and the block table agree: what one has, the other has. */
    uint64_t left = 0;
    for (uint64_t parent = 60; parent <= 61; parent++) {
        struct kvfs_name *listed = calloc(4096, sizeof(*listed));
        int count = kvfs_names_list(names, parent, "", 0, listed, 4096);
        CHECK(count >= 0 && count < 4096);
        for (int i = 0; i < count; i++) {
            struct kvfs_record record;
            int r = kvfs_table_find_name(plane->table, parent, listed[i].name, listed[i].size, &record);
            CHECK(listed[i].inode ? r == 0 && record.inode == listed[i].inode : r == -ENOENT);
            bool directory = r == 0 && record.kind == KVFS_KIND_DIRECTORY;
            left += listed[i].inode && !directory && memcmp(listed[i].name, "block", 5) != 0;
        }
        free(listed);
    }
    CHECK(left == made - removed && looked_at > 0);
    printf("ok threads beside commits: %llu made, %llu renamed, %llu removed, %llu left to Python; %llu groups gone, %llu kept\n",
           (unsigned long long)made, (unsigned long long)renamed, (unsigned long long)removed, (unsigned long long)left_to_python,
           (unsigned long long)groups_gone, (unsigned long long)groups_kept);
}

int main(void) {
    plane_begin();
    names_open();
    test_a_file_is_made_sealed_renamed_and_removed_here();
    test_eviction_takes_all_but_what_is_open();
    test_a_group_goes_as_a_whole();
    test_files_of_a_directory_go_in_one_step();
    test_python_gets_what_is_not_in_memory();
    test_below_a_pin_python_seals();
    test_a_seal_that_fails_is_pythons();
    test_a_device_is_silent_under_a_servers_ring();
    test_a_flush_waits_for_room();
    test_a_block_goes_on_in_the_next_segment();
    test_threads_beside_commits();
    plane_end();
    return 0;
}
