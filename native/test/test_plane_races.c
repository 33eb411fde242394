/* sources: base block names io content pod frames fuse virtiofs plane.c */
/* The data plane where two things happen to one file at once: a device holds the I/O of the first until the second is done. Proven under the
 * sanitizers: neither loses what the other wrote, in whichever order they end, and whether the held I/O succeeds or fails. */
#include "kernel_harness.h"

/* A WRITE of part of a chunk that lies on the devices reads it first, on a worker, without a lock. The bytes that it read must not undo the work of
 * others meanwhile, nor may they make it fail. */
static void test_writes_beside_a_slow_load(void) {
    const uint64_t size = CHUNK_SIZE + 70000;
    enum { SEALED, SEALED_TWICE, SPILLED, CUT, GROWN, EMPTIED, REOPENED, WAYS };
    patient(true);
    for (unsigned way = 0; way < WAYS; way++) {
        for (unsigned fails = 0; fails < 2; fails++) {
            char name[32];
            snprintf(name, sizeof(name), "slow-load-%u-%u", way, fails);
            uint8_t *data = pattern(3 * CHUNK_SIZE, 100 + way), *model = calloc(1, 3 * CHUNK_SIZE);
            uint64_t fh, length = size;
            CHECK(model);
            uint64_t inode = create(name, &fh);
            memcpy(model, data, size);
            CHECK(write_at(inode, fh, 0, data, CHUNK_SIZE) == 0 && write_at(inode, fh, CHUNK_SIZE, data + CHUNK_SIZE, 70000) == 0);
            CHECK(flush_and_seal(inode, fh, name) == 0);
            hold_next_read(fails ? EIO : 0);
            uint64_t slow = write_soon(inode, fh, 5000, data + 900000, 3000);
            wait_chunk_held();
            /* Another loads the same chunk, in time, and writes to it. */
            CHECK((write_soon(inode, fh, 100001, data + 1000000, 5000), answer_of(unique)) == 0);
            memcpy(model + 100001, data + 1000000, 5000);
            switch (way) {
            case SEALED_TWICE:
                CHECK(flush_and_seal(inode, fh, name) == 0);
                CHECK((write_soon(inode, fh, 7000, data, 9000), answer_of(unique)) == 0);
                memcpy(model + 7000, data, 9000);
                break;
            case CUT: /* and what was cut off reads as zeros */
                CHECK(flush_and_seal(inode, fh, name) == 0);
                CHECK(kvfs_file_truncate(plane, inode, 101000) == 0 && kvfs_file_truncate(plane, inode, 500000) == 0);
                memset(model + 101000, 0, 3 * CHUNK_SIZE - 101000);
                length = 500000;
                break;
            case GROWN:
                CHECK((write_soon(inode, fh, 2 * CHUNK_SIZE, data, 4096), answer_of(unique)) == 0);
                memcpy(model + 2 * CHUNK_SIZE, data, 4096);
                length = 2 * CHUNK_SIZE + 4096;
                break;
            case EMPTIED:
                CHECK(kvfs_file_truncate(plane, inode, 0) == 0);
                CHECK((write_soon(inode, fh, 50000, data + 77, CHUNK_SIZE - 50000), answer_of(unique)) == 0);
                memset(model, 0, 3 * CHUNK_SIZE);
                memcpy(model + 50000, data + 77, CHUNK_SIZE - 50000);
                length = CHUNK_SIZE;
                break;
            default: break;
            }
            if (way == SPILLED)
                spill_now(inode);
            else
                CHECK(flush_and_seal(inode, fh, name) == 0);
            if (way == REOPENED) { /* the file goes with its last writer, and there is another with the next */
                release(inode, fh);
                uint64_t until = now_ns() + 20000000000ull;
                while (kvfs_inode_is_open(plane, inode) == 2 && now_ns() < until) /* after the answer */
                    usleep(200);
                CHECK(kvfs_inode_is_open(plane, inode) != 2);
                fh = open_write(inode, O_RDWR);
                CHECK(kvfs_inode_is_open(plane, inode) == 2);
            }
            struct pollfd ready = {.fd = kernel, .events = POLLIN};
            CHECK(poll(&ready, 1, 0) == 0); /* it did wait for all of that */
            let_go();
            CHECK(answer_of(slow) == 0);
            memcpy(model + 5000, data + 900000, 3000);
            for (int sealed = 0; sealed < 2; sealed++) {
                for (uint64_t at = 0; at < length; at += CHUNK_SIZE)
                    CHECK(read_check(inode, fh, at, CHUNK_SIZE, model, length) == 0);
                if (!sealed)
                    CHECK(flush_and_seal(inode, fh, name) == 0);
            }
            release(inode, fh);
            free(data);
            free(model);
            forget_blocks();
        }
    }
    patient(false);
    printf("ok a write that loads slowly undoes nothing that was written, sealed, spilled or cut meanwhile\n");
}

/* The same of a READ: bytes of when it began, or of now, and no error of a place that the chunk has left. */
static void test_reads_beside_a_seal(void) {
    patient(true);
    for (unsigned fails = 0; fails < 2; fails++) {
        uint8_t *data = pattern(2 * CHUNK_SIZE, 200);
        uint64_t fh;
        const char *name = fails ? "slow-read-1" : "slow-read-0";
        uint64_t inode = create(name, &fh);
        CHECK(write_at(inode, fh, 0, data, CHUNK_SIZE) == 0 && flush_and_seal(inode, fh, name) == 0);
        hold_next_read(fails ? EIO : 0);
        struct fuse_read_in in = {.fh = fh, .offset = 0, .size = 300000};
        ask(FUSE_READ, inode, &in, sizeof(in), NULL, 0);
        uint64_t slow = unique;
        wait_held();
        CHECK((write_soon(inode, fh, 0, data + CHUNK_SIZE, CHUNK_SIZE), answer_of(unique)) == 0);
        CHECK(flush_and_seal(inode, fh, name) == 0);
        struct pollfd ready = {.fd = kernel, .events = POLLIN};
        CHECK(poll(&ready, 1, 0) == 0);
        let_go();
        CHECK(answer_of(slow) == 0);
        const uint8_t *got = reply + sizeof(struct fuse_out_header);
        CHECK(memcmp(got, data + CHUNK_SIZE, 300000) == 0 || (!fails && memcmp(got, data, 300000) == 0));
        release(inode, fh);
        free(data);
        forget_blocks();
    }
    patient(false);
    printf("ok a read that waits while its file is sealed anew is right, and does not fail\n");
}

/* A block that is copied elsewhere while somebody begins to write it: it is written from where it was, and stays there. */
static void test_a_block_being_written_does_not_move(void) {
    uint8_t *data = pattern(200000, 300), record[512];
    uint64_t fh, files[4];
    uint64_t inode = create("stays", &fh);
    CHECK(kvfs_dirty_files(plane, files, 4) == 1 && files[0] == inode);
    CHECK(write_at(inode, fh, 0, data, 200000) == 0 && flush_and_seal(inode, fh, "stays") == 0);
    CHECK(kvfs_dirty_files(plane, files, 4) == 0);
    struct kvfs_record before, after;
    CHECK(kvfs_table_find_inode(plane->table, inode, &before) == 0);
    make_record(record, inode, "stays", 200000, KVFS_INODE_SEALED, before.page + 1, before.header_pages);
    CHECK(kvfs_inode_is_open(plane, inode) == 2 && kvfs_inode_move(plane, record) == -EBUSY);
    CHECK(kvfs_table_find_inode(plane->table, inode, &after) == 0 && after.page == before.page);
    release(inode, fh);
    int error;
    uint64_t reader = open_read(inode, &error);
    CHECK(error == 0 && kvfs_names_put(plane->names, record, 0) == 0);
    CHECK(kvfs_inode_move(plane, record) == 0); /* a reader looks again */
    CHECK(kvfs_table_find_inode(plane->table, inode, &after) == 0 && after.page == before.page + 1);
    release(inode, reader);
    /* A handle that only cuts it is a writer too: the close seals that. */
    fh = open_write(inode, O_RDONLY | O_TRUNC);
    CHECK(kvfs_dirty_files(plane, files, 4) == 1 && files[0] == inode);
    CHECK(kvfs_dirty_files(plane, files, 0) == 1);
    CHECK(flush_and_seal(inode, fh, "stays") == 0 && kvfs_dirty_files(plane, files, 4) == 0);
    release(inode, fh);
    CHECK(kvfs_table_find_inode(plane->table, inode, &after) == 0 && after.size == 0);
    free(data);
    printf("ok a block that is being written does not move, and one that was cut by its open is sealed by its close\n");
}

/* A spill writes without a lock, and then says anew where the file's chunks lie. Some chunks are placed already and must be written again, as their
 * last page was cut or got a successor, before the spill or meanwhile. Their bytes lie where they lay, and nowhere else. */
static void test_spills_beside_changes(void) {
    enum { CUT, CUT_AND_GROWN, GROWN, GROWN_MEANWHILE, LOADED_MEANWHILE, WRITTEN_MEANWHILE, WAYS };
    const uint64_t size = 2 * CHUNK_SIZE + 70001;
    patient(true);
    for (unsigned way = 0; way < WAYS; way++) {
        for (unsigned fails = 0; fails < 2; fails++) {
            char name[32];
            snprintf(name, sizeof(name), "spill-%u-%u", way, fails);
            uint8_t *data = pattern(6 * CHUNK_SIZE, 400 + way), *model = calloc(1, 6 * CHUNK_SIZE);
            uint64_t fh, length = size, slow = 0;
            CHECK(model);
            uint64_t inode = create(name, &fh);
            memcpy(model, data, size);
            for (uint64_t at = 0; at < size; at += CHUNK_SIZE)
                CHECK(write_at(inode, fh, at, data + at, (uint32_t)min_u64(CHUNK_SIZE, size - at)) == 0);
            CHECK(flush_and_seal(inode, fh, name) == 0);
            if (way == CUT || way == CUT_AND_GROWN) {
                length = CHUNK_SIZE + 5000;
                CHECK(kvfs_file_truncate(plane, inode, length) == 0);
                memset(model + length, 0, 6 * CHUNK_SIZE - length);
                if (way == CUT_AND_GROWN) {
                    length = 2 * CHUNK_SIZE + 1;
                    CHECK(kvfs_file_truncate(plane, inode, length) == 0);
                }
            }
            if (way <= GROWN) { /* the spilled bytes lie behind a hole */
                length = 4 * CHUNK_SIZE + 4096;
                CHECK(write_at(inode, fh, 3 * CHUNK_SIZE, data, CHUNK_SIZE) == 0 && write_at(inode, fh, 4 * CHUNK_SIZE, data, 4096) == 0);
                memcpy(model + 3 * CHUNK_SIZE, data, CHUNK_SIZE);
                memcpy(model + 4 * CHUNK_SIZE, data, 4096);
            } else {
                CHECK((write_soon(inode, fh, 5000, data + 77, 3000), answer_of(unique)) == 0);
                memcpy(model + 5000, data + 77, 3000);
            }
            hold_next(2, fails ? EIO : 0);
            spill_start(inode);
            wait_held();
            CHECK(kvfs_file_truncate(plane, inode, 1) == -EBUSY && kvfs_spill_begin(plane, inode, &(struct kvfs_seal_info){0}) == -EBUSY);
            CHECK(kvfs_seal_begin(plane, inode, &(struct kvfs_seal_info){0}) == -EBUSY);
            switch (way) {
            case GROWN_MEANWHILE:
                length = 5 * CHUNK_SIZE + 4096;
                CHECK((write_soon(inode, fh, 5 * CHUNK_SIZE, data, 4096), answer_of(unique)) == 0);
                memcpy(model + 5 * CHUNK_SIZE, data, 4096);
                break;
            case LOADED_MEANWHILE:
                CHECK((write_soon(inode, fh, CHUNK_SIZE + 100, data, 4096), answer_of(unique)) == 0);
                memcpy(model + CHUNK_SIZE + 100, data, 4096);
                break;
            case WRITTEN_MEANWHILE: slow = write_soon(inode, fh, 6000, data, 4096); break;
            default: break;
            }
            read_all(inode, fh, model, length);
            CHECK(nothing_answered());
            let_go();
            CHECK(completion() == (fails ? -EIO : 0));
            if (slow) {
                CHECK(answer_of(slow) == 0);
                memcpy(model + 6000, data, 4096);
            }
            read_and_seal(inode, fh, name, model, length);
            free(data);
            free(model);
            forget_blocks();
        }
    }
    patient(false);
    printf("ok a spill loses nothing of the chunks that it does not write, nor of what is written meanwhile\n");
}

/* A page that was spilled whole, and then ends the file: cut behind what was ever written to it, or at its very end. */
static void test_cuts_of_spilled_chunks(void) {
    static const uint64_t cuts[] = {1, 4095, 4096, 4099, 4100, 4101, 5000, 8191, 8192, 9000};
    for (unsigned i = 0; i < sizeof(cuts) / sizeof(cuts[0]); i++) {
        for (unsigned grows = 0; grows < 3; grows++) {
            char name[32];
            snprintf(name, sizeof(name), "cut-%u-%u", i, grows);
            uint8_t *data = pattern(CHUNK_SIZE, 500 + i), *model = calloc(1, 3 * CHUNK_SIZE);
            uint64_t fh, length = CHUNK_SIZE + cuts[i];
            CHECK(model);
            uint64_t inode = create(name, &fh);
            CHECK(write_at(inode, fh, 0, data, CHUNK_SIZE) == 0 && write_at(inode, fh, CHUNK_SIZE, data, 4100) == 0);
            CHECK(write_at(inode, fh, 2 * CHUNK_SIZE, data, 10) == 0);
            spill_now(inode);
            CHECK(kvfs_file_truncate(plane, inode, length) == 0);
            memcpy(model, data, CHUNK_SIZE);
            memcpy(model + CHUNK_SIZE, data, min_u64(cuts[i], 4100));
            if (grows == 1) {
                length = CHUNK_SIZE + 8100;
                CHECK(length < CHUNK_SIZE + cuts[i] || kvfs_file_truncate(plane, inode, length) == 0);
                length = length < CHUNK_SIZE + cuts[i] ? CHUNK_SIZE + cuts[i] : length;
            } else if (grows == 2) {
                CHECK((write_soon(inode, fh, length + 9000, data, 100), answer_of(unique)) == 0);
                memcpy(model + length + 9000, data, 100);
                length += 9100;
            }
            read_and_seal(inode, fh, name, model, length);
            free(data);
            free(model);
            forget_blocks();
        }
    }
    printf("ok a file that ends in a page that was spilled has all its bytes\n");
}

/* A seal writes what was frozen. Later writes wait, and are part of the next seal. */
static void test_changes_beside_a_seal(void) {
    const uint64_t size = CHUNK_SIZE + 70001;
    patient(true);
    for (unsigned fails = 0; fails < 2; fails++) {
        char name[32];
        snprintf(name, sizeof(name), "seal-%u", fails);
        uint8_t *data = pattern(3 * CHUNK_SIZE, 600), *model = calloc(1, 3 * CHUNK_SIZE);
        uint64_t fh;
        CHECK(model);
        uint64_t inode = create(name, &fh);
        CHECK(write_at(inode, fh, 0, data, CHUNK_SIZE) == 0 && write_at(inode, fh, CHUNK_SIZE, data + CHUNK_SIZE, 70001) == 0);
        memcpy(model, data, size);
        hold_next(2, fails ? EIO : 0);
        seal_start(inode, name, true);
        wait_held();
        uint64_t slow[3] = {write_soon(inode, fh, 100, data + 1, 5000), write_soon(inode, fh, CHUNK_SIZE, data + 2, CHUNK_SIZE),
                            write_soon(inode, fh, 2 * CHUNK_SIZE + 100, data + 3, 5000)};
        CHECK(kvfs_file_truncate(plane, inode, 1) == -EBUSY && kvfs_file_allocate(plane, inode, 3 * CHUNK_SIZE) == -EBUSY);
        CHECK(kvfs_spill_begin(plane, inode, &(struct kvfs_seal_info){0}) == -EBUSY);
        CHECK(kvfs_slab_extend(plane, inode, PAGE, 1, &(struct kvfs_run){.generation = 7, .segment = 6, .page = 16, .page_count = 1000}, 1) ==
              -EBUSY);
        struct fuse_read_in in = {.fh = fh, .offset = 0, .size = 4096};
        ask(FUSE_READ, inode, &in, sizeof(in), NULL, 0); /* the answers come in any order, and this is the first */
        CHECK(answer_of(unique) == 0 && memcmp(reply + sizeof(struct fuse_out_header), model, 4096) == 0);
        CHECK(nothing_answered());
        let_go();
        CHECK(seal_finish(inode) == (fails ? -EIO : 0));
        for (unsigned i = 0; i < 3; i++)
            CHECK(answer_of(slow[i]) == 0);
        memcpy(model + 100, data + 1, 5000);
        memcpy(model + CHUNK_SIZE, data + 2, CHUNK_SIZE);
        memcpy(model + 2 * CHUNK_SIZE + 100, data + 3, 5000);
        read_and_seal(inode, fh, name, model, 2 * CHUNK_SIZE + 5100);
        free(data);
        free(model);
        forget_blocks();
    }
    patient(false);
    printf("ok what is written while a seal is under way is not lost, whether that succeeds or fails\n");
}

/* A block that begins to be written is read first, without a lock; it may be copied to another place meanwhile, and get other times. */
static void test_a_reopen_beside_a_copy(void) {
    const uint64_t size = 300001;
    uint8_t *data = pattern(CHUNK_SIZE, 700), old[512], new[512], copied[4096], *garbage = pattern(65536, 701);
    uint64_t fh;
    patient(true);
    uint64_t inode = create("reopened", &fh);
    CHECK(write_at(inode, fh, 0, data, (uint32_t)size) == 0 && flush_and_seal(inode, fh, "reopened") == 0);
    release(inode, fh);
    for (uint64_t until = now_ns() + 20000000000ull; kvfs_inode_is_open(plane, inode); usleep(200)) /* RELEASE is answered before the file goes */
        CHECK(now_ns() < until);
    struct kvfs_record before, after;
    CHECK(kvfs_table_find_inode(plane->table, inode, &before) == 0 && before.header_pages == 1);
    hold_next_read(0);
    CHECK(kvfs_file_rewrite(plane, 8, inode, 1) == 0);
    wait_held();
    hold_no_more();
    struct kvfs_run run = {.generation = 7, .segment = 1, .page = (uint32_t)next_spill_page, .page_count = (uint32_t)pages_of(size) + 1};
    size_t old_size = make_record(old, inode, "reopened", size, KVFS_INODE_SEALED, before.page, 1);
    size_t new_size = make_record(new, inode, "reopened", size, KVFS_INODE_SEALED, run.page, 1);
    struct kvfs_inode_record r;
    memcpy(&r, new, sizeof(r));
    r.segment = 1;
    memcpy(new, &r, sizeof(r));
    CHECK(kvfs_store_copy(plane, 2, old, (uint32_t)old_size, &run, 1, 1, new, (uint32_t)new_size, "", 0, copied, sizeof(copied)) == 0);
    CHECK(completion() > 0 && kvfs_names_put(plane->names, old, 0) == 0);
    CHECK(kvfs_inode_move(plane, copied) == 0); /* it is not being written yet */
    memcpy(&r, copied, sizeof(r));
    r.mtime_ns = 1234567890123;
    memcpy(copied, &r, sizeof(r));
    CHECK(kvfs_inode_update(plane, copied) == 0 && kvfs_file_set_mtime(plane, inode, r.mtime_ns) == -ENOENT);
    /* The old place is another block's. */
    CHECK(kvfs_store_write(plane, 3, 0, before.page, garbage, 65536) == 0 && completion() == 65536);
    let_go();
    CHECK(completion() == 0 && kvfs_inode_is_open(plane, inode) == KVFS_BEING_WRITTEN);
    CHECK(kvfs_inode_move(plane, old) == -EBUSY);
    struct fuse_getattr_in get = {0};
    void *body;
    ask(FUSE_GETATTR, inode, &get, sizeof(get), NULL, 0);
    CHECK(answer(&body, NULL) == 0);
    struct fuse_attr_out attr;
    memcpy(&attr, body, sizeof(attr));
    CHECK(attr.attr.size == size && attr.attr.mtime == 1234 && attr.attr.mtimensec == 567890123);
    fh = open_write(inode, O_RDWR);
    CHECK((write_soon(inode, fh, 5000, data + 1, 3000), answer_of(unique)) == 0);
    memcpy(data + 5000, memcpy(garbage, data + 1, 3000), 3000);
    read_and_seal(inode, fh, "reopened", data, size);
    CHECK(kvfs_table_find_inode(plane->table, inode, &after) == 0 && after.segment == 0 && after.page != before.page);
    free(data);
    free(garbage);
    forget_blocks();
    patient(false);
    printf("ok a block that is copied elsewhere while it is opened for writing is written from there, with the times that it has by then\n");
}

/* An open for writing may find that the last writer has just let the file go. */
static void test_preallocation_without_a_file(void) {
    uint8_t *data = pattern(10000, 800);
    uint64_t fh;
    uint64_t inode = create("let-go", &fh);
    CHECK(write_at(inode, fh, 0, data, 10000) == 0 && flush_and_seal(inode, fh, "let-go") == 0);
    struct fuse_open_in in = {.flags = O_WRONLY};
    ask(FUSE_OPEN, inode, &in, sizeof(in), NULL, 0);
    uint64_t opening = unique, id = forwarded_request()->unique;
    CHECK(kvfs_file_rewrite(plane, 8, inode, 1) == 0 && completion() == 0);
    release(inode, fh);
    for (uint64_t until = now_ns() + 20000000000ull; kvfs_inode_is_open(plane, inode) == KVFS_BEING_WRITTEN; usleep(200))
        CHECK(now_ns() < until);
    struct fuse_open_out out = {.fh = inode};
    session_reply(id, 0, &out, sizeof(out));
    CHECK(answer_of(opening) == 0);
    memcpy(&out, reply + sizeof(struct fuse_out_header), sizeof(out));
    struct fuse_fallocate_in allocate = {.fh = out.fh, .length = 50000};
    ask(FUSE_FALLOCATE, inode, &allocate, sizeof(allocate), NULL, 0);
    struct fuse_in_header *got = forwarded_request();
    const char *asked = (const char *)(got + 1) + FUSE_COMPAT_SETXATTR_IN_SIZE;
    CHECK(got->opcode == FUSE_SETXATTR && got->nodeid == inode && strcmp(asked, "kvfs.allocate") == 0 && atoi(asked + strlen(asked) + 1) == 50000);
    CHECK(kvfs_file_allocate(plane, inode, 50000) == -ENOENT);
    session_reply(got->unique, 0, NULL, 0);
    CHECK(answer(NULL, NULL) == 0);
    CHECK((write_soon(inode, out.fh, 0, data + 1, 100), answer_of(unique)) == 0);
    CHECK(flush_and_seal(inode, out.fh, "let-go") == 0);
    release(inode, out.fh);
    free(data);
    forget_blocks();
    printf("ok room for a file whose last writer has just gone is asked for, not refused\n");
}

#define GREEDY 7777u

/* A file of GREEDY, who pays for what is written inside it. */
static uint64_t greedy_file(unsigned number, uint64_t *fh) {
    char name[32];
    snprintf(name, sizeof(name), "greedy-%u", number);
    uint64_t inode = create(name, fh);
    CHECK(kvfs_file_truncate(plane, inode, 100000) == 0);
    struct node *node = node_get(plane, inode, false);
    pthread_mutex_lock(&node->lock);
    file_charge(plane, node->file, user_get(plane, GREEDY));
    pthread_mutex_unlock(&node->lock);
    node_put(plane, node);
    return inode;
}

/* Ends each spill that is asked for, well or not, until the request is answered. Returns how many that were. */
static unsigned spills_end(bool well) {
    unsigned count = 0;
    struct kvfs_event event;
    const uint64_t until = now_ns() + 60000000000ull;
    while (nothing_answered()) {
        CHECK(now_ns() < until);
        if (!kvfs_take_events(plane, &event, 1))
            usleep(1000);
        else if (event.type == KVFS_EVENT_SPILL) {
            struct kvfs_seal_info info;
            if (well) {
                spill_now(event.inode);
            } else {
                CHECK(kvfs_spill_begin(plane, event.inode, &info) == 0 && info.dirty && info.data_pages == 25);
                CHECK(kvfs_spill_cancel(plane, event.inode) == 0);
            }
            count++;
        }
    }
    return count;
}

/* 64 slots of 1 MiB are all that there is. */
static void test_a_write_that_can_have_no_memory_is_refused(void) {
    enum { SHARE = 4, FILES = 64 - SHARE, SIZE = 99000 };
    uint64_t inodes[FILES + 1], handles[FILES + 1], fh, other = create("modest", &fh);
    uint8_t *data = pattern(1 << 20, 99);
    struct kvfs_statistics before, after;
    struct kvfs_event event;
    while (kvfs_take_events(plane, &event, 1))
        ;
    kvfs_statistics_get(plane, &before);
    CHECK(before.staged_bytes == 0);
    kvfs_set_staging_share(plane, 0); /* the least */
    for (unsigned i = 0; i <= FILES; i++)
        inodes[i] = greedy_file(i, &handles[i]);
    for (unsigned i = 0; i < FILES; i++)
        CHECK(write_at(inodes[i], handles[i], 0, data, SIZE) == 0);
    CHECK(!kvfs_take_events(plane, &event, 1)); /* nothing is asked for while there is enough */
    uint64_t id = write_soon(inodes[FILES], handles[FILES], 0, data, SIZE);
    CHECK(spills_end(false) >= FILES && answer_of(id) == -EDQUOT);
    kvfs_statistics_get(plane, &after);
    CHECK(after.staged_bytes == (uint64_t)FILES << 20 && after.staging_refusals == before.staging_refusals + 1);
    CHECK(after.staging_waits == before.staging_waits + 1 && after.staging_short);
    CHECK(write_at(other, fh, 0, data, 1 << 20) == 0); /* the share that was left */
    /* Now spills succeed, and the next write goes on. */
    usleep(1100000); /* those that failed are asked again */
    id = write_soon(inodes[FILES], handles[FILES], 0, data, SIZE);
    CHECK(spills_end(true) >= 2 && answer_of(id) == 0);
    for (unsigned i = 0; i <= FILES; i++) { /* those that were spilled, with their short last pages, too */
        CHECK(read_check(inodes[i], handles[i], 0, SIZE, data, 100000) == 0);
        CHECK(kvfs_file_discard(plane, inodes[i]) == 0);
        release(inodes[i], handles[i]);
    }
    CHECK(kvfs_file_discard(plane, other) == 0);
    release(other, fh);
    while (kvfs_take_events(plane, &event, 1))
        ;
    kvfs_statistics_get(plane, &after);
    CHECK(after.staged_bytes == 0);
    kvfs_set_staging_share(plane, UINT64_MAX);
    forget_blocks();
    free(data);
    printf("ok a write that can have no memory is refused at once, and one for which there will be some waits\n");
}

/* A spill that does not take place holds nothing back: neither the file, nor what waits for its memory. */
static void test_spills_that_do_not_take_place(void) {
    uint64_t fh, inode = create("not-spilled", &fh), slow;
    uint8_t *data = pattern(CHUNK_SIZE, 77);
    struct kvfs_seal_info info;
    struct kvfs_event event;
    struct kvfs_run run = {.generation = 7, .segment = 1, .page = 1, .page_count = 3};
    CHECK(write_at(inode, fh, 0, data, CHUNK_SIZE) == 0);
    struct node *node = node_get(plane, inode, false);
    for (unsigned way = 0; way < 3; way++) {
        while (kvfs_take_events(plane, &event, 1))
            ;
        pthread_mutex_lock(&node->lock);
        node->file->spill_failed_until_ns = 0; /* later */
        spill_ask(plane, node->file);
        pthread_mutex_unlock(&node->lock);
        CHECK(plane->asked_bytes == CHUNK_SIZE && kvfs_take_events(plane, &event, 1) == 1 && event.type == KVFS_EVENT_SPILL);
        if (way == 2) { /* a seal is under way for too long */
            CHECK(kvfs_seal_begin(plane, inode, &info) == 0 && kvfs_spill_begin(plane, inode, &info) == -EBUSY);
            CHECK(kvfs_spill_cancel(plane, inode) == 0 && plane->asked_bytes == 0);
            CHECK(kvfs_seal_end(plane, inode, 0) == 0);
        } else {
            CHECK(kvfs_spill_begin(plane, inode, &info) == 0 && info.data_pages == CHUNK_PAGES);
            slow = write_soon(inode, fh, 0, data, 100);
            for (uint64_t until = now_ns() + 20000000000ull; !atomic_load(&plane->count.parked); usleep(200))
                CHECK(now_ns() < until);
            run.page_count = way ? 3 : CHUNK_PAGES + 1;
            run.segment = way ? 1 : SEGMENTS; /* there is none such */
            CHECK(kvfs_spill_write(plane, 9, inode, &run, 1) == -ERANGE);
            CHECK(answer_of(slow) == 0 && plane->asked_bytes == 0);
            CHECK(kvfs_seal_begin(plane, inode, &info) == 0 && kvfs_seal_end(plane, inode, 0) == 0);
        }
        pthread_mutex_lock(&node->lock);
        spill_ask(plane, node->file); /* it failed just now, and is let alone for a while */
        pthread_mutex_unlock(&node->lock);
        CHECK(plane->asked_bytes == 0 && !kvfs_take_events(plane, &event, 1));
    }
    node_put(plane, node);
    CHECK(kvfs_file_discard(plane, inode) == 0);
    release(inode, fh);
    free(data);
    printf("ok a spill that does not take place holds nothing back, and is not asked again at once\n");
}

/* Headers of a spill's runs are charged beside a file's bytes, until its pages go. */
static void test_a_file_that_is_spilled_again_and_again_is_charged_once(void) {
    uint64_t fh, inode = create("again", &fh), before = atomic_load(&plane->open_bytes);
    uint8_t *data = pattern(CHUNK_SIZE, 79);
    struct node *node = node_get(plane, inode, false);
    for (unsigned i = 0; i < 20; i++) {
        CHECK((write_soon(inode, fh, 0, data, i ? 100 : CHUNK_SIZE), answer_of(unique)) == 0); /* loads what was spilled */
        spill_now(inode);
        pthread_mutex_lock(&node->lock);
        CHECK(node->file->spill_pages == 1 && atomic_load(&plane->open_bytes) == before + CHUNK_SIZE + PAGE);
        pthread_mutex_unlock(&node->lock);
    }
    CHECK(kvfs_file_truncate(plane, inode, 0) == 0 && atomic_load(&plane->open_bytes) == before);
    node_put(plane, node);
    CHECK(kvfs_file_discard(plane, inode) == 0);
    release(inode, fh);
    free(data);
    forget_blocks();
    printf("ok a file that is spilled again and again is charged for what lies on the devices, and once\n");
}

/* The next SPILL that is asked, of that inode. */
static void spill_wait(uint64_t inode) {
    struct kvfs_event event;
    const uint64_t until = now_ns() + 40000000000ull;
    do {
        CHECK(now_ns() < until);
        CHECK(nothing_answered());
        event.type = 0;
        if (!kvfs_take_events(plane, &event, 1))
            usleep(1000);
    } while (event.type != KVFS_EVENT_SPILL);
    CHECK(event.inode == inode);
}

/* A user who has nothing else, and devices that fail. The next try goes to others, so the WRITE waits for it, and a fault is not told as a quota. */
static void test_spills_that_devices_fail(void) {
    enum { CHUNKS = 60, TRIES = 3 };
    uint64_t fh, inode = greedy_file(100, &fh), id;
    uint8_t *data = pattern(CHUNK_SIZE, 78);
    struct kvfs_event event;
    patient(true);
    kvfs_set_staging_share(plane, 0);
    CHECK(kvfs_file_truncate(plane, inode, (CHUNKS + 1) * CHUNK_SIZE) == 0);
    for (unsigned fails = 1; fails <= TRIES; fails += TRIES - 1) {
        while (kvfs_take_events(plane, &event, 1))
            ;
        const unsigned last = fails > 1 ? CHUNKS - 1 : CHUNKS; /* its last chunk is in memory since the first round */
        for (unsigned i = 0; i < last; i++)
            CHECK(write_at(inode, fh, i * CHUNK_SIZE, data, CHUNK_SIZE) == 0);
        id = write_soon(inode, fh, last * CHUNK_SIZE, data, CHUNK_SIZE);
        for (unsigned i = 0; i < fails; i++) {
            spill_wait(inode);
            hold_next(2, EIO);
            spill_start(inode);
            wait_held();
            let_go();
            CHECK(completion() == -EIO);
            forget_blocks();
        }
        if (fails < TRIES) {
            spill_wait(inode);
            spill_now(inode);
            CHECK(answer_of(id) == 0);
        } else {
            CHECK(answer_of(id) == -EIO);
        }
        forget_blocks();
    }
    CHECK(kvfs_file_discard(plane, inode) == 0);
    release(inode, fh);
    while (kvfs_take_events(plane, &event, 1))
        ;
    kvfs_set_staging_share(plane, UINT64_MAX);
    patient(false);
    free(data);
    printf("ok a write waits while devices fail a spill, %u times, and is told so\n", (unsigned)TRIES);
}

int main(void) {
    plane_begin();
    test_writes_beside_a_slow_load();
    test_reads_beside_a_seal();
    test_a_block_being_written_does_not_move();
    test_spills_beside_changes();
    test_cuts_of_spilled_chunks();
    test_changes_beside_a_seal();
    test_a_reopen_beside_a_copy();
    test_preallocation_without_a_file();
    test_a_write_that_can_have_no_memory_is_refused();
    test_spills_that_do_not_take_place();
    test_a_file_that_is_spilled_again_and_again_is_charged_once();
    test_spills_that_devices_fail();
    plane_end();
    return 0;
}
