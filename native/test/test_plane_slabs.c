/* sources: base block names io content pod frames fuse virtiofs plane.c */
/* Slabs in the data plane: read and written in place, cut, settled as files, and failed by a write whose fate is unknown. */
#include "kernel_harness.h"

static struct kvfs_event slab_event(uint32_t type, uint64_t inode) {
    struct kvfs_event events[64];
    uint64_t until = now_ns() + 20000000000ull;
    while (now_ns() < until) {
        int count = kvfs_take_events(plane, events, 64);
        for (int i = 0; i < count; i++)
            if (events[i].type == type && events[i].inode == inode)
                return events[i];
        usleep(1000);
    }
    CHECK(!"an event came");
    return events[0];
}

static int preallocate(uint64_t inode, uint64_t fh, uint64_t size, const struct kvfs_run *runs, uint32_t run_count) {
    struct fuse_fallocate_in in = {.fh = fh, .length = size};
    ask(FUSE_FALLOCATE, inode, &in, sizeof(in), NULL, 0);
    struct fuse_in_header *got = forwarded_request();
    CHECK(got->opcode == FUSE_SETXATTR && got->nodeid == inode);
    struct fuse_setxattr_in set;
    memcpy(&set, got + 1, FUSE_COMPAT_SETXATTR_IN_SIZE);
    const char *name = (const char *)(got + 1) + FUSE_COMPAT_SETXATTR_IN_SIZE, *value = name + strlen(name) + 1;
    CHECK(strcmp(name, "kvfs.slab") == 0 && set.size == (size_t)(forwarded + got->len - (const uint8_t *)value));
    CHECK(strtoull(value, NULL, 10) == size);
    uint64_t id = got->unique;
    /* Here segments are small: the file gets a tenth of what it asked for. */
    int r = kvfs_slab_extend(plane, inode, run_count * (uint64_t)runs[0].page_count * PAGE, 0, runs, run_count);
    session_reply(id, r, NULL, 0);
    CHECK(answer(NULL, NULL) == r);
    return r;
}

static void test_slab(void) {
    const struct kvfs_run runs[2] = {{.generation = 7, .segment = 6, .page = 16, .page_count = 1000},
                                     {.generation = 7, .segment = 7, .page = 16, .page_count = 1000}};
    const uint64_t size = 2000 * PAGE;
    uint64_t fh;
    uint8_t *shadow = calloc(1, size), *data = pattern(2 << 20, 17);
    CHECK(shadow);
    uint64_t inode = create("slab", &fh);
    CHECK(kvfs_slab_pages(plane, inode) == 0 && kvfs_slab_wanted(plane, inode, KVFS_SLAB_MIN) == 0);
    CHECK(preallocate(inode, fh, KVFS_SLAB_MIN, runs, 2) == 0);
    CHECK(kvfs_slab_pages(plane, inode) == 2000 && kvfs_file_size(plane, inode) == (int64_t)size);
    CHECK(kvfs_slab_extend(plane, inode, 1ull << 40, 0, NULL, 0) == -ERANGE && kvfs_slab_extend(plane, inode + 999, 0, 0, runs, 1) == -ENOENT);
    CHECK(read_check(inode, fh, 999 * PAGE, 1 << 20, shadow, size) == 0); /* zeros, over the end of a run */
    /* Whole pages and parts, also over the end of a run; each is there at once, and nothing beside it changes. */
    static const struct {
        uint64_t offset;
        uint32_t size;
    } writes[] = {{0, 4096},           {999 * 4096, 8192},     {1, 100}, {4095, 2}, {900 * 4096, 1 << 20}, {900 * 4096 + 77, 900001},
                  {1999 * 4096, 4096}, {1999 * 4096 + 5, 4091}};
    for (unsigned i = 0; i < sizeof(writes) / sizeof(writes[0]); i++) {
        CHECK(write_at(inode, fh, writes[i].offset, data + i, writes[i].size) == 0);
        memcpy(shadow + writes[i].offset, data + i, writes[i].size);
        for (uint64_t at = 0; at < size; at += 1000001)
            CHECK(read_check(inode, fh, at, 1 << 20, shadow, size) == 0);
    }
    CHECK(write_at(inode, fh, size - 4096, data, 8192) == -ENOSPC);
    struct kvfs_seal_info info;
    CHECK(kvfs_seal_begin(plane, inode, &info) == 0 && !info.dirty && kvfs_file_truncate(plane, inode, 1) == -EBUSY);
    /* Cut inside a page and grown again: zeros. */
    const uint64_t cut = 950 * PAGE + 1000;
    CHECK(kvfs_slab_resize(plane, 3, inode, cut) == 0 && completion() == 0);
    memset(shadow + cut, 0, size - cut);
    CHECK(read_check(inode, fh, 940 * PAGE, 1 << 20, shadow, cut) == 0);
    CHECK(kvfs_slab_resize(plane, 3, inode, size + 1) == 0 && completion() == -ENOSPC);
    CHECK(kvfs_slab_resize(plane, 3, inode, size) == 0 && completion() == 0);
    for (uint64_t at = 0; at < size; at += 1 << 20)
        CHECK(read_check(inode, fh, at, 1 << 20, shadow, size) == 0);
    fault(KVFS_FAULT_ERROR, 3, EIO);
    CHECK(read_check(inode, fh, 0, 4096, shadow, size) == -EIO && write_at(inode, fh, 50 * PAGE, data, 4096) == -EIO);
    fault(KVFS_FAULT_NONE, 3, 0);
    CHECK(read_check(inode, fh, 0, 1 << 20, shadow, size) == 0); /* pages that were not written are still zeros */
    CHECK(kvfs_slab_close(plane, inode) == -EBUSY && kvfs_slab_to_file(plane, 4, inode, 0) == 0 && completion() == -EBUSY);
    release(inode, fh);
    CHECK(slab_event(KVFS_EVENT_SLAB_CLOSED, inode).value == 1); /* overwritten */
    CHECK(kvfs_slab_to_file(plane, 4, inode, 0) == 0 && completion() == -EPERM);
    CHECK(kvfs_slab_close(plane, inode) == 0);
    slab_event(KVFS_EVENT_SLAB_FREE, inode);
    CHECK(kvfs_slab_pages(plane, inode) == -ENOENT && kvfs_inode_is_open(plane, inode) == 0);
    printf("ok a slab is read and written in place, in whole pages and in parts\n");

    /* Written once: an ordinary file. */
    inode = create("once", &fh);
    CHECK(preallocate(inode, fh, KVFS_SLAB_MIN, runs, 2) == 0);
    CHECK(kvfs_slab_resize(plane, 3, inode, size - 100) == 0 && completion() == 0);
    memset(shadow, 0, size);
    for (uint64_t at = 300 * PAGE; at < 1200 * PAGE; at += 250 * PAGE + 10) { /* the devices hold the other slab's bytes there */
        CHECK(write_at(inode, fh, at, data, 70000) == 0);
        memcpy(shadow + at, data, 70000);
    }
    CHECK(write_at(inode, fh, size - 3000, data, 2900) == 0);
    memcpy(shadow + size - 3000, data, 2900);
    int error;
    uint64_t reader = open_read(inode, &error);
    CHECK(error == 0);
    release(inode, fh);
    CHECK(slab_event(KVFS_EVENT_SLAB_CLOSED, inode).value == 0);
    CHECK(kvfs_slab_to_file(plane, 4, inode, 0) == 0 && completion() == 0);
    slab_event(KVFS_EVENT_SLAB_FREE, inode);
    struct kvfs_extent extents[8];
    CHECK(kvfs_file_extents(plane, inode, extents, 8) == 2);
    for (int sealed = 0; sealed < 2; sealed++) {
        for (uint64_t at = 0; at < size; at += 1 << 20)
            CHECK(read_check(inode, reader, at, 1 << 20, shadow, size - 100) == 0);
        if (!sealed)
            CHECK(seal(inode, "once", false) == 0);
    }
    release(inode, reader);
    printf("ok a slab that was not overwritten becomes a block\n");

    /* It becomes a file under the hands of who overwrites it, and may then be larger than its segments were. */
    inode = create("grown", &fh);
    CHECK(preallocate(inode, fh, KVFS_SLAB_MIN, runs, 2) == 0);
    memset(shadow, 0, size);
    for (uint32_t turn = 0; turn < 2; turn++)
        CHECK(write_at(inode, fh, 700 * PAGE, data + turn, 1 << 20) == 0);
    memcpy(shadow + 700 * PAGE, data + 1, 1 << 20);
    CHECK(kvfs_slab_resize(plane, 3, inode, size - PAGE) == 0 && completion() == 0);
    CHECK(kvfs_slab_to_file(plane, 4, inode, 0) == 0 && completion() == -EBUSY);
    CHECK(kvfs_slab_to_file(plane, 4, inode, 1) == 0 && completion() == 0);
    slab_event(KVFS_EVENT_SLAB_FREE, inode);
    CHECK(kvfs_slab_to_file(plane, 4, inode, 1) == 0 && completion() == -ENOENT);
    CHECK(kvfs_file_allocate(plane, inode, size - 2 * PAGE) == 0 && kvfs_file_size(plane, inode) == (int64_t)(size - PAGE));
    CHECK(kvfs_file_allocate(plane, inode, size) == 0 && kvfs_file_size(plane, inode) == (int64_t)size);
    CHECK(write_at(inode, fh, 701 * PAGE + 5, data, 100) == 0 && write_at(inode, fh, size - PAGE, data, 4096) == 0);
    memcpy(shadow + 701 * PAGE + 5, data, 100);
    memcpy(shadow + size - PAGE, data, 4096);
    for (int sealed = 0; sealed < 2; sealed++) {
        for (uint64_t at = 0; at < size; at += 1 << 20)
            CHECK(read_check(inode, fh, at, 1 << 20, shadow, size) == 0);
        if (!sealed)
            CHECK(seal(inode, "grown", true) == 0);
    }
    release(inode, fh);
    inode = create("chosen", &fh);
    CHECK(kvfs_slab_extend(plane, inode, PAGE, 1, runs, 1) == 0);
    CHECK(kvfs_slab_to_file(plane, 4, inode, 1) == 0 && completion() == -EPERM && kvfs_slab_pages(plane, inode) == 1000);
    release(inode, fh);
    slab_event(KVFS_EVENT_SLAB_CLOSED, inode);
    CHECK(kvfs_slab_close(plane, inode) == 0);
    slab_event(KVFS_EVENT_SLAB_FREE, inode);
    printf("ok a slab becomes a file while it is written\n");

    /* A write that a device gave no answer to may land at any time: no more is read or written. */
    inode = create("silent", &fh);
    CHECK(preallocate(inode, fh, KVFS_SLAB_MIN, runs, 1) == 0);
    CHECK(write_at(inode, fh, 0, data, 65536) == 0);
    fault(KVFS_FAULT_DELAY, 2, 2000 * slowness());
    CHECK(write_at(inode, fh, 0, data, 65536) == -EIO);
    fault(KVFS_FAULT_NONE, 3, 0);
    CHECK(read_check(inode, fh, 0, 4096, data, size) == -EIO && write_at(inode, fh, 8192, data, 4096) == -EIO);
    CHECK(kvfs_inode_remove(plane, inode) == 1);
    release(inode, fh);
    slab_event(KVFS_EVENT_IDLE, inode);
    CHECK(kvfs_inode_remove(plane, inode) == 0);
    slab_event(KVFS_EVENT_SLAB_FREE, inode); /* when the device has answered */
    CHECK(kvfs_segment_busy(plane, 6) == 0);
    free(shadow);
    free(data);
    printf("ok a slab has failed with a write whose fate is unknown\n");
}

/* A slab's write of parts of pages is held while it reads them. Other requests wait for it if they touch the same pages, cut the slab, or make it a
 * file. */
static void test_slab_writes_beside_changes(void) {
    enum { WRITTEN, CUT, SETTLED, WAYS };
    const struct kvfs_run runs[2] = {{.generation = 7, .segment = 6, .page = 16, .page_count = 1000},
                                     {.generation = 7, .segment = 7, .page = 16, .page_count = 1000}};
    const uint64_t size = 2000 * PAGE;
    patient(true);
    for (unsigned way = 0; way < WAYS; way++) {
        uint64_t fh, length = size, whole = 0;
        uint8_t *model = calloc(1, size), *data = pattern(1 << 20, 900 + way);
        char name[32];
        CHECK(model);
        snprintf(name, sizeof(name), "slab-beside-%u", way);
        uint64_t inode = create(name, &fh);
        CHECK(preallocate(inode, fh, KVFS_SLAB_MIN, runs, 2) == 0);
        CHECK(write_at(inode, fh, 10 * PAGE, data, 4 * PAGE) == 0);
        memcpy(model + 10 * PAGE, data, 4 * PAGE);
        hold_next_read(0);
        uint64_t parts = write_soon(inode, fh, 11 * PAGE + 100, data + 9000, 3000), other = 0;
        wait_held();
        hold_no_more();
        if (way == WRITTEN) {
            whole = write_soon(inode, fh, 11 * PAGE, data + 65536, PAGE);
            other = write_soon(inode, fh, 12 * PAGE, data + 65536, PAGE);
            CHECK(answer_of(other) == 0);
            memcpy(model + 12 * PAGE, data + 65536, PAGE);
        } else if (way == CUT) {
            CHECK(kvfs_slab_resize(plane, 3, inode, 11 * PAGE + 500) == 0);
        } else {
            CHECK(kvfs_slab_to_file(plane, 3, inode, 1) == 0);
        }
        if (way != WRITTEN) {
            struct node *node = node_get(plane, inode, false);
            for (bool frozen = false; !frozen; usleep(200)) {
                pthread_mutex_lock(&node->lock);
                frozen = node->file->sealing;
                pthread_mutex_unlock(&node->lock);
            }
            node_put(plane, node);
            whole = write_soon(inode, fh, 13 * PAGE, data + 65536, PAGE);
            CHECK(read_check(inode, fh, 10 * PAGE, PAGE, model, length) == 0);
        }
        CHECK(nothing_answered() && kvfs_file_size(plane, inode) == (int64_t)size);
        let_go();
        CHECK(answer_of(parts) == 0);
        memcpy(model + 11 * PAGE + 100, data + 9000, 3000);
        if (way == WRITTEN) {
            memcpy(model + 11 * PAGE, data + 65536, PAGE);
        } else {
            CHECK(completion() == 0);
            if (way == CUT) {
                memset(model + 11 * PAGE + 500, 0, size - 11 * PAGE - 500);
                length = 14 * PAGE; /* by the write that waited */
            }
            memcpy(model + 13 * PAGE, data + 65536, PAGE);
        }
        CHECK(answer_of(whole) == 0);
        read_all(inode, fh, model, length);
        if (way == SETTLED) {
            slab_event(KVFS_EVENT_SLAB_FREE, inode);
            read_and_seal(inode, fh, name, model, length);
        } else {
            release(inode, fh);
            slab_event(KVFS_EVENT_SLAB_CLOSED, inode);
            CHECK(kvfs_slab_close(plane, inode) == 0);
            slab_event(KVFS_EVENT_SLAB_FREE, inode);
        }
        free(model);
        free(data);
        forget_blocks();
    }
    patient(false);
    printf("ok a slab's write of parts of pages is whole, whatever comes meanwhile\n");
}

/* A write that loads its chunk while the file is closed, emptied and made a slab goes to the slab. */
static void test_a_slow_write_to_what_is_a_slab_by_then(void) {
    const struct kvfs_run run = {.generation = 7, .segment = 6, .page = 16, .page_count = 1000};
    const uint64_t size = 1000 * PAGE;
    uint8_t *data = pattern(CHUNK_SIZE, 950), *model = calloc(1, size);
    uint64_t fh;
    CHECK(model);
    patient(true);
    uint64_t inode = create("slab-by-then", &fh);
    CHECK(write_at(inode, fh, 0, data, CHUNK_SIZE) == 0 && flush_and_seal(inode, fh, "slab-by-then") == 0);
    hold_next_read(0);
    uint64_t slow = write_soon(inode, fh, 5000, data + 1, 3000);
    wait_held();
    release(inode, fh);
    for (uint64_t until = now_ns() + 20000000000ull; kvfs_inode_is_open(plane, inode) == KVFS_BEING_WRITTEN; usleep(200))
        CHECK(now_ns() < until);
    fh = open_write(inode, O_RDWR | O_TRUNC | O_DIRECT);
    CHECK(kvfs_slab_extend(plane, inode, size, 0, &run, 1) == 0 && nothing_answered());
    let_go();
    CHECK(answer_of(slow) == 0);
    memcpy(model + 5000, data + 1, 3000);
    read_all(inode, fh, model, size);
    CHECK(kvfs_inode_remove(plane, inode) == 1);
    release(inode, fh);
    slab_event(KVFS_EVENT_IDLE, inode);
    CHECK(kvfs_inode_remove(plane, inode) == 0);
    slab_event(KVFS_EVENT_SLAB_FREE, inode);
    free(model);
    free(data);
    forget_blocks();
    patient(false);
    printf("ok a write that began before its file was a slab is the slab's\n");
}

static void test_a_file_that_grew_meanwhile_becomes_no_slab(void) {
    const struct kvfs_run run = {.generation = 7, .segment = 6, .page = 16, .page_count = 1000};
    const uint64_t size = 2000 * PAGE;
    uint8_t *zeros = calloc(1, size);
    uint64_t fh, inode = create("grew", &fh);
    CHECK(zeros && kvfs_file_truncate(plane, inode, size) == 0);
    CHECK(kvfs_slab_extend(plane, inode, 1000 * PAGE, 0, &run, 1) == -EBUSY && kvfs_slab_pages(plane, inode) == 0);
    read_all(inode, fh, zeros, size);
    CHECK(kvfs_inode_remove(plane, inode) == 1);
    release(inode, fh);
    slab_event(KVFS_EVENT_IDLE, inode);
    CHECK(kvfs_inode_remove(plane, inode) == 0);
    free(zeros);
    printf("ok a file that grew while a slab was made for it becomes none\n");
}

/* ---- devices that change ---- */

static void *uses_change(void *over) {
    while (!atomic_load((atomic_bool *)over))
        for (uint32_t i = 0; i < DEVICES; i++)
            atomic_fetch_add(&plane->array.devices[i].uses, 1);
    return NULL;
}

static atomic_int step; /* 1: a step is on; 2: it is over */

static void *step_of_another(void *unused) {
    (void)unused;
    kvfs_names_begin(plane->names);
    atomic_store(&step, 1);
    usleep(100000);
    atomic_store(&step, 2);
    kvfs_names_end(plane->names);
    return NULL;
}

/* The block table has one writer at a time: no slab leaves it while a thread is within a step (I7). */
static void test_a_slab_leaves_the_table_within_a_step(void) {
    uint64_t fh, inode = create("closes", &fh);
    const struct kvfs_run run = {7, 3, 1, 1000, 0};
    CHECK(kvfs_slab_extend(plane, inode, PAGE, 1, &run, 1) == 0);
    release(inode, fh);
    slab_event(KVFS_EVENT_SLAB_CLOSED, inode);
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, step_of_another, NULL) == 0);
    while (!atomic_load(&step))
        usleep(100);
    CHECK(kvfs_slab_close(plane, inode) == 0 && atomic_load(&step) == 2);
    CHECK(pthread_join(thread, NULL) == 0);
    slab_event(KVFS_EVENT_SLAB_FREE, inode);
    printf("ok a slab leaves the table within a step\n");
}

/* A device is another between a part's making and its start: it is refused in ring_io() itself, which calls back before it returns. */
static void test_io_that_is_refused_as_it_begins(void) {
    const struct kvfs_run run = {.generation = 7, .segment = 6, .page = 16, .page_count = 1000};
    const uint64_t size = 1 << 20, slab_size = 1000 * PAGE;
    uint8_t *data = pattern(size, 955), *model = calloc(1, slab_size);
    CHECK(model);
    memcpy(model, data, size);
    uint64_t fh, slab_fh, block = create("changing", &fh), slab = create("changing-slab", &slab_fh);
    uint32_t refused = 0;
    int error;
    CHECK(write_at(block, fh, 0, data, (uint32_t)size) == 0 && flush_and_seal(block, fh, "changing") == 0);
    release(block, fh);
    fh = open_read(block, &error);
    CHECK(error == 0 && kvfs_slab_extend(plane, slab, slab_size, 0, &run, 1) == 0);
    CHECK(write_at(slab, slab_fh, 0, data, (uint32_t)size) == 0);
    atomic_bool over = false;
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, uses_change, &over) == 0);
    for (uint64_t began = now_ns(), i = 0; i < 2000 || (refused < 20 && now_ns() - began < 20000000000ull); i++) {
        bool of_slab = i % 2;
        error = read_check(of_slab ? slab : block, of_slab ? slab_fh : fh, i % 16 * 65536, 65536 * (1 + i % 3), model, of_slab ? slab_size : size);
        CHECK(error == 0 || error == -EIO);
        refused += error != 0;
    }
    atomic_store(&over, true);
    CHECK(pthread_join(thread, NULL) == 0);
    CHECK(refused > 0);
    read_all(block, fh, data, size);
    read_all(slab, slab_fh, model, slab_size);
    release(block, fh);
    CHECK(kvfs_inode_remove(plane, slab) == 1);
    release(slab, slab_fh);
    slab_event(KVFS_EVENT_IDLE, slab);
    CHECK(kvfs_inode_remove(plane, slab) == 0);
    slab_event(KVFS_EVENT_SLAB_FREE, slab);
    free(model);
    free(data);
    printf("ok I/O that a device refuses as it begins is answered\n");
}

/* ---- without memory ---- */

/* The Makefile links calls of malloc, calloc and realloc to these. */
static _Thread_local bool no_memory; /* for this thread */
static atomic_size_t no_realloc_to;  /* this size, for any thread */
void *__real_malloc(size_t size);
void *__real_calloc(size_t count, size_t size);
void *__real_realloc(void *old, size_t size);
void *__wrap_malloc(size_t size);
void *__wrap_calloc(size_t count, size_t size);
void *__wrap_realloc(void *old, size_t size);
void *__wrap_malloc(size_t size) { return no_memory ? NULL : __real_malloc(size); }
void *__wrap_calloc(size_t count, size_t size) { return no_memory ? NULL : __real_calloc(count, size); }
void *__wrap_realloc(void *old, size_t size) { return no_memory || size == atomic_load(&no_realloc_to) ? NULL : __real_realloc(old, size); }

static uint64_t write_direct(uint64_t inode, uint64_t fh, const uint8_t *data, uint32_t size) {
    struct fuse_write_in in = {.fh = fh, .size = size, .flags = O_DIRECT};
    ask(FUSE_WRITE, inode, &in, sizeof(in), data, size);
    return unique;
}

static void remove_open(uint64_t inode, uint64_t fh) {
    CHECK(kvfs_inode_remove(plane, inode) == 1);
    release(inode, fh);
    slab_event(KVFS_EVENT_IDLE, inode);
    CHECK(kvfs_inode_remove(plane, inode) == 0);
}

static void test_a_parked_write_is_answered_without_memory(void) {
    uint8_t *data = pattern(4096, 960);
    uint64_t fh, inode = create("parked", &fh);
    CHECK(kvfs_file_truncate(plane, inode, KVFS_SLAB_MIN) == 0);
    uint64_t parked = write_direct(inode, fh, data, 4096);
    slab_event(KVFS_EVENT_SLAB_WANTED, inode);
    CHECK(nothing_answered());
    no_memory = true;
    CHECK(kvfs_slab_answer(plane, inode) == 0);
    no_memory = false;
    CHECK(answer_of(parked) == 0);
    CHECK(read_check(inode, fh, 0, 4096, data, KVFS_SLAB_MIN) == 0);
    remove_open(inode, fh);
    free(data);
    printf("ok a parked write goes on where there is no memory\n");
}

static void test_a_write_does_not_wait_for_an_event_that_was_lost(void) {
    struct kvfs_event taken;
    uint8_t *data = pattern(4096, 961);
    uint64_t fh, inode = create("unheard", &fh);
    CHECK(kvfs_file_truncate(plane, inode, KVFS_SLAB_MIN) == 0);
    while (kvfs_take_events(plane, &taken, 1) == 1)
        ;
    for (uint32_t i = 0; i < plane->events.event_capacity; i++)
        event_add(plane, KVFS_EVENT_BAD_BLOCK, 1, i);
    atomic_store(&no_realloc_to, plane->events.event_capacity * 2 * sizeof(taken));
    CHECK(answer_of(write_direct(inode, fh, data, 4096)) == 0);
    atomic_store(&no_realloc_to, 0);
    for (uint32_t i = 0; i < plane->events.event_capacity; i++)
        CHECK(kvfs_take_events(plane, &taken, 1) == 1 && taken.type == KVFS_EVENT_BAD_BLOCK && taken.value == i);
    CHECK(read_check(inode, fh, 0, 4096, data, KVFS_SLAB_MIN) == 0);
    remove_open(inode, fh);
    free(data);
    printf("ok a write does not wait for a slab that nobody was asked for\n");
}

int main(void) {
    plane_begin();
    test_slab();
    test_slab_writes_beside_changes();
    test_a_slow_write_to_what_is_a_slab_by_then();
    test_a_file_that_grew_meanwhile_becomes_no_slab();
    test_a_slab_leaves_the_table_within_a_step();
    test_io_that_is_refused_as_it_begins();
    test_a_parked_write_is_answered_without_memory();
    test_a_write_does_not_wait_for_an_event_that_was_lost();
    plane_end();
    return 0;
}
