/* sources: base block names io content pod frames fuse virtiofs plane.c */
/* The whole data plane without a kernel: this program plays both the kernel (kernel_harness.h) and Python (plane_harness.h). Devices are files.
 * Proven under the sanitizers: writes in any order are sealed and read back. Faults become EIO within the deadline and never wrong bytes. Late
 * replies are dropped. A transport that goes away leaves nothing. */
#include "kernel_harness.h"

/* The kernel is told how long a request may wait only where that was asked for, and the kernel can. */
static void test_request_timeout(void) {
    const uint32_t configured = plane->config.kernel_timeout_s, requested[] = {0, 1, 120, 65535};
    CHECK(configured);
    for (unsigned i = 0; i < 4; i++)
        for (unsigned offered = 0; offered < 2; offered++) {
            struct fuse_init_in init = {.major = FUSE_KERNEL_VERSION, .minor = 45, .flags = 0xffffffff, .flags2 = offered << (42 - 32)};
            void *body;
            size_t size;
            turn(&plane->config.kernel_timeout_s, requested[i]);
            ask(FUSE_INIT, 0, &init, sizeof(init), NULL, 0);
            CHECK(answer(&body, &size) == 0 && size == 64);
            uint32_t flags2;
            uint16_t timeout;
            memcpy(&flags2, (uint8_t *)body + 32, sizeof(flags2));
            memcpy(&timeout, (uint8_t *)body + 40, sizeof(timeout));
            bool expected = offered && requested[i];
            CHECK((flags2 >> (42 - 32) & 1) == expected && timeout == (expected ? requested[i] : 0));
        }
    turn(&plane->config.kernel_timeout_s, configured);
    say_hello(0);
}

static void test_write_seal_read(void) {
    static const uint64_t sizes[] = {0, 1, 4095, 4096, 4097, 65536, 65537, 1000001, 1 << 20, (1 << 20) + 1, 3145728, 3000017};
    for (unsigned i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        uint64_t size = sizes[i], fh;
        uint8_t *data = pattern(size + 1, i);
        char name[64];
        snprintf(name, sizeof(name), "block%u", i);
        uint64_t inode = create(name, &fh);
        /* Backwards, in pieces: any order before the seal. */
        for (uint64_t end = size; end;) {
            uint64_t piece = i % 2 ? min_u64(end, 300000) : min_u64(end, end % CHUNK_SIZE ? end % CHUNK_SIZE : CHUNK_SIZE);
            CHECK(write_at(inode, fh, end - piece, data + end - piece, (uint32_t)piece) == 0);
            end -= piece;
        }
        for (uint64_t at = 0; at < size; at += 1 << 20)
            CHECK(read_check(inode, fh, at, 1 << 20, data, size) == 0);
        CHECK(flush_and_seal(inode, fh, name) == 0);
        for (uint64_t at = 0; at <= size; at += 700000)
            CHECK(read_check(inode, fh, at, 1 << 20, data, size) == 0);
        release(inode, fh);
        int error;
        fh = open_read(inode, &error);
        CHECK(error == 0);
        for (uint64_t at = 0; at <= size; at += 333333)
            CHECK(read_check(inode, fh, at, 1 << 20, data, size) == 0);
        release(inode, fh);
        free(data);
    }
    printf("ok writes in any order are sealed and read back\n");
}

static void test_faults(void) {
    uint64_t size = 2 << 20, fh;
    uint8_t *data = pattern(size, 99);
    uint64_t inode = create("faulty", &fh);
    CHECK(write_at(inode, fh, 0, data, 1 << 20) == 0 && write_at(inode, fh, 1 << 20, data + (1 << 20), 1 << 20) == 0);
    fault(KVFS_FAULT_ERROR, 2, EIO);
    CHECK(flush_and_seal(inode, fh, "faulty") == -EIO);
    fault(KVFS_FAULT_NONE, 3, 0);
    CHECK(read_check(inode, fh, 0, 1 << 20, data, size) == 0); /* a failed seal loses nothing */
    CHECK(flush_and_seal(inode, fh, "faulty") == 0);
    release(inode, fh);
    int error;
    fh = open_read(inode, &error);
    const struct {
        uint32_t kind, value;
        const char *name;
    } faults[] = {{KVFS_FAULT_ERROR, EIO, "error"},
                  {KVFS_FAULT_SHORT, 0, "short read"},
                  {KVFS_FAULT_FLIP, 4097, "flipped bit"},
                  {KVFS_FAULT_DELAY, 2000 * slowness(), "silence"}};
    for (unsigned i = 0; i < 4; i++) {
        fault(faults[i].kind, 1, faults[i].value);
        uint64_t began = now_ns();
        CHECK(read_check(inode, fh, 1 << 20, 1 << 20, data, size) == -EIO);
        CHECK(now_ns() - began < 3000000000ull * slowness());
        if (faults[i].kind == KVFS_FAULT_DELAY) { /* the next read, at once as from kernels, is the same read, with its deadline over */
            began = now_ns();
            CHECK(read_check(inode, fh, 1 << 20, 4096, data, size) == -EIO);
            CHECK(now_ns() - began < 400000000ull * slowness());
            usleep(600000);
        }
        fault(KVFS_FAULT_NONE, 3, 0);
        CHECK(read_check(inode, fh, 1 << 20, 1 << 20, data, size) == 0);
        printf("ok a device's %s is EIO, and over when it is over\n", faults[i].name);
    }
    release(inode, fh);
    struct kvfs_event events[64];
    CHECK(kvfs_take_events(plane, events, 64) > 0);
    struct kvfs_statistics statistics;
    kvfs_statistics_get(plane, &statistics);
    CHECK(statistics.checksum_errors > 0 && statistics.read_errors >= 4);
    free(data);
}

/* Its memory is with reads of other threads, whose devices answer for longer than a deadline; then none answers. */
static void test_a_read_that_waits_for_memory_goes_by_the_answers_to_any_ring(void) {
    static struct slot *taken[2048];
    static uint8_t landing[PAGE] __attribute__((aligned(PAGE)));
    const uint64_t size = 1 << 20, timeout_ns = plane->array.io_timeout_ms * 1000000ull;
    struct arena *arenas[] = {&plane->reading, &plane->reading_small};
    struct ring other;
    uint64_t fh;
    uint8_t *data = pattern(size, 17);
    uint64_t inode = create("waits", &fh);
    CHECK(write_at(inode, fh, 0, data, (uint32_t)size) == 0 && flush_and_seal(inode, fh, "waits") == 0);
    release(inode, fh);
    int error;
    fh = open_read(inode, &error);
    CHECK(ring_init(&other, &plane->array, 8) == 0);
    for (int answers = 1; answers >= 0; answers--) {
        uint32_t count = 0, all = arenas[0]->slot_count + arenas[1]->slot_count;
        CHECK(all <= sizeof(taken) / sizeof(*taken));
        for (uint64_t until = now_ns() + 20000000000ull; count < all && now_ns() < until;) /* reads before this may hold some */
            if ((taken[count] = slot_get(arenas[0])) || (taken[count] = slot_get(arenas[1])))
                count++;
        CHECK(count == all);
        struct fuse_read_in in = {.fh = fh, .offset = 65536, .size = 131072};
        const uint64_t began = now_ns();
        ask(FUSE_READ, inode, &in, sizeof(in), NULL, 0);
        while (answers && now_ns() - began < 3 * timeout_ns) {
            CHECK(blocking_io(&other, false, 0, 0, &(struct iovec){landing, PAGE}, 1, NULL, 0) == 0);
            CHECK_SAY(nothing_answered(), "an answer after %d of %d ms", (int)((now_ns() - began) / 1000000), (int)(timeout_ns / 1000000));
            usleep(1000);
        }
        while (answers && count)
            slot_put(taken[--count]);
        void *body;
        size_t length;
        error = answer(&body, &length);
        if (answers) {
            CHECK(error == 0 && length == in.size && memcmp(body, data + in.offset, length) == 0);
        } else {
            CHECK_SAY(error == -EIO && now_ns() - began >= timeout_ns, "%d after %d ms", error, (int)((now_ns() - began) / 1000000));
            while (count)
                slot_put(taken[--count]);
        }
    }
    ring_free(&other);
    usleep(600000); /* until then it is the same read, with its deadline over */
    CHECK(read_check(inode, fh, 0, (uint32_t)size, data, size) == 0);
    release(inode, fh);
    free(data);
    printf("ok a read that waits for memory goes by the answers to any ring\n");
}

/* Of READs: on a busy machine another request may be slow, too. */
static uint32_t slow_events(struct kvfs_event *first) {
    struct kvfs_event events[64];
    uint32_t found = 0;
    for (int n; (n = kvfs_take_events(plane, events, 64)) > 0;)
        for (int i = 0; i < n; i++)
            if (events[i].type == KVFS_EVENT_SLOW && events[i].value >> 56 == FUSE_READ && found++ == 0)
                *first = events[i];
    return found;
}

static uint64_t slow_requests(void) {
    struct kvfs_statistics statistics;
    kvfs_statistics_get(plane, &statistics);
    return statistics.slow_requests;
}

/* As turn(). */
__attribute__((no_sanitize("thread"), noinline)) static void slow_from(uint64_t ns) { plane->slow_ns = ns; }

static void test_slow_requests_are_told_of(void) {
    const uint32_t slow_ms = 100, delay_ms = 150;
    uint64_t fh, size = 1 << 20;
    uint8_t *data = pattern(size, 5);
    uint64_t inode = create("slow", &fh);
    CHECK(write_at(inode, fh, 0, data, (uint32_t)size) == 0 && flush_and_seal(inode, fh, "slow") == 0);
    release(inode, fh);
    int error;
    fh = open_read(inode, &error);
    struct kvfs_event event = {0};
    slow_events(&event);
    uint64_t before = slow_requests();
    CHECK(plane->slow_ns == UINT64_MAX); /* as started: off */
    slow_from(slow_ms * (uint64_t)1000000);
    fault(KVFS_FAULT_DELAY, 1, delay_ms);
    CHECK(read_check(inode, fh, 65536, 4096, data, size) == 0);
    uint64_t until = now_ns() + 20000000000ull;
    while (slow_requests() == before && now_ns() < until) /* it is counted after the answer */
        usleep(1000);
    fault(KVFS_FAULT_NONE, 3, 0);
    CHECK(slow_requests() > before);
    uint32_t told = 0;
    while ((told = slow_events(&event)) == 0 && now_ns() < until)
        usleep(1000);
    CHECK(told == 1 && event.inode == inode && event.value >> 56 == FUSE_READ);
    uint64_t took_us = event.value & (((uint64_t)1 << 56) - 1);
    CHECK(took_us >= slow_ms * 1000 && took_us < 20000000);

    slow_from(UINT64_MAX); /* off */
    before = slow_requests();
    fault(KVFS_FAULT_DELAY, 1, delay_ms);
    CHECK(read_check(inode, fh, 262144, 4096, data, size) == 0);
    fault(KVFS_FAULT_NONE, 3, 0);
    CHECK(slow_events(&event) == 0 && slow_requests() == before);

    /* Many: all are counted, ten a second are told of; and of those that nobody takes, ten wait. */
    slow_events(&event);
    before = slow_requests();
    uint64_t began = now_ns();
    for (uint32_t i = 0; i < 1000; i++)
        slow_add(plane, FUSE_READ, i, 1000000000);
    uint32_t seconds = (uint32_t)((now_ns() - began) / 1000000000) + 2; /* begun ones */
    told = slow_events(&event);
    CHECK(told > 0 && told <= SLOW_EVENTS_MAX && told <= seconds * SLOW_EVENTS_MAX && slow_requests() >= before + 1000);
    for (uint32_t i = 0; i < 1000; i++) {
        atomic_store(&plane->slow_window, 0); /* another second */
        slow_add(plane, FUSE_READ, i, 1000000000);
    }
    CHECK(slow_events(&event) == SLOW_EVENTS_MAX);
    atomic_store(&plane->slow_window, 0);
    slow_add(plane, FUSE_READ, 1, UINT64_MAX); /* taken: there is place again, and what took longest is still a read */
    CHECK(slow_events(&event) == 1 && event.value >> 56 == FUSE_READ);

    slow_from(slow_ms * (uint64_t)1000000);
    /* One that fails by its deadline is slow, too. */
    before = slow_requests();
    fault(KVFS_FAULT_DELAY, 1, 2000 * slowness());
    CHECK(read_check(inode, fh, 131072, 4096, data, size) == -EIO);
    until = now_ns() + 20000000000ull;
    while (slow_requests() == before && now_ns() < until)
        usleep(1000);
    CHECK(slow_requests() > before);
    fault(KVFS_FAULT_NONE, 3, 0);
    slow_from(UINT64_MAX);
    release(inode, fh);
    free(data);
    printf("ok slow requests are told of once, and many of them ten times a second\n");
}

static int64_t store_page(bool write, uint32_t segment, uint8_t *page) {
    CHECK((write ? kvfs_store_write(plane, 9, segment, 1, page, 4096) : kvfs_store_read(plane, 9, segment, 1, page, 4096)) == 0);
    return completion();
}

static uint64_t sum(const uint64_t *buckets) {
    uint64_t total = 0;
    for (int i = 0; i < KVFS_DEVICE_BUCKETS; i++)
        total += buckets[i];
    return total;
}

static void test_a_device_that_stops_and_is_another_file_afterwards(void) {
    uint8_t *page = aligned_alloc(4096, 4096), *back = aligned_alloc(4096, 4096);
    CHECK(page && back);
    memset(page, 'a', 4096);
    const uint32_t segment = 5, device = plane->array.members[segment * DEVICES].device;
    struct kvfs_device_statistics before, after;
    CHECK(kvfs_device_statistics_get(plane, device, &before) == 0);
    CHECK(sum(before.read_buckets) == before.reads && sum(before.write_buckets) == before.writes);
    CHECK(store_page(true, segment, page) == 4096);
    CHECK(kvfs_device_statistics_get(plane, device, &after) == 0);
    CHECK(sum(after.write_buckets) == sum(before.write_buckets) + 1);
    CHECK(kvfs_device_stop(plane, device) == 0);
    CHECK(store_page(true, segment, page) == -EIO);
    CHECK(store_page(false, segment, back) == -EIO);
    CHECK(kvfs_device_statistics_get(plane, device, &before) == 0);
    CHECK(before.writes == after.writes && before.errors == after.errors); /* nothing was tried */
    /* The number leads to an empty file now: every ring has to notice. */
    int fresh = open(scratch(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
    CHECK(fresh >= 0 && ftruncate(fresh, (off_t)(ZONE * SEGMENTS + (1 << 20))) == 0);
    CHECK(dup2(fresh, device_fds[device]) >= 0 && close(fresh) == 0);
    CHECK(kvfs_device_use(plane, device) == 0);
    for (int i = 0; i < 16; i++) {
        CHECK(store_page(false, segment, back) == 4096);
        CHECK(back[0] == 0 && back[4095] == 0);
    }
    CHECK(store_page(true, segment, page) == 4096 && store_page(false, segment, back) == 4096 && memcmp(page, back, 4096) == 0);
    CHECK(kvfs_device_stop(plane, DEVICES) == -ERANGE && kvfs_device_use(plane, DEVICES) == -ERANGE);
    free(page);
    free(back);
    printf("ok a device that stops fails at once, and is another file when it is used again\n");
}

static void test_deadline_of_forwarded_requests(void) {
    struct fuse_create_in in = {.flags = O_RDWR | O_CREAT, .mode = 0100644};
    uint64_t began = now_ns();
    ask(FUSE_CREATE, 1, &in, sizeof(in), "late", 5);
    uint64_t id = forwarded_call(FUSE_CREATE).id;
    CHECK(answer(NULL, NULL) == -EIO);
    CHECK(now_ns() - began < 2000000000ull * slowness());
    /* The late reply is dropped, and the file it opened is released: it comes back as one to seal. */
    uint64_t inode = ++next_inode;
    uint8_t record[512];
    make_record(record, inode, "late", 0, 0, 0, 0);
    CHECK(kvfs_name_put(plane, record, 0) == 0 && kvfs_file_create(plane, inode) == 0);
    kvfs_answer(plane, id, 0, inode, NULL);
    kvfs_answer(plane, id, 0, inode, NULL); /* an answer counts once */
    uint64_t until = now_ns() + 30000000000ull;
    bool seen = false;
    while (!seen && now_ns() < until) {
        struct kvfs_event events[16];
        int n = kvfs_take_events(plane, events, 16);
        for (int i = 0; i < n; i++)
            seen |= events[i].type == KVFS_EVENT_RESEAL && events[i].inode == inode;
        usleep(1000);
    }
    CHECK(seen);
    CHECK(kvfs_inode_is_open(plane, inode) == 2);
    CHECK(kvfs_inode_remove(plane, inode) == 0);
    CHECK(kvfs_inode_is_open(plane, inode) == 0);
    printf("ok a forwarded request has its deadline, and a late reply leaves nothing open\n");
}

/* Its bytes are loaded and written, then made durable, all before the deadline of the WRITE. It counts as written when that is done. */
static void test_a_synchronous_write_has_one_deadline(void) {
    struct mux *mux = &plane->fuse->mux;
    uint8_t *data = pattern(CHUNK_SIZE, 9);
    uint64_t fh;
    patient(true);
    say_hello(1u << (36 - 32)); /* FUSE_DIRECT_IO_ALLOW_MMAP */
    uint64_t inode = create_with("synchronous", O_WRONLY | O_CREAT, &fh);
    CHECK(created.open_flags & OPEN_DIRECT_IO);
    CHECK(write_at(inode, fh, 0, data, CHUNK_SIZE) == 0 && flush_and_seal(inode, fh, "synchronous") == 0);
    for (int fails = 0; fails < 2; fails++) {
        struct fuse_write_in in = {.fh = fh, .size = 1000, .flags = O_WRONLY | O_DSYNC};
        struct kvfs_statistics before, during, after;
        kvfs_statistics_get(plane, &before);
        hold_next_read(0);
        ask(FUSE_WRITE, inode, &in, sizeof(in), data, in.size);
        uint64_t write = unique;
        wait_chunk_held();
        ask(FUSE_STATFS, 1, NULL, 0, NULL, 0);
        uint64_t statfs = unique, statfs_id = forwarded_request()->unique;
        let_go();
        struct fuse_in_header *got = forwarded_request();
        uint64_t id = got->unique;
        CHECK(got->opcode == FUSE_FSYNC && got->nodeid == inode);
        pthread_mutex_lock(&mux->lock);
        CHECK(mux->oldest->opcode == FUSE_FSYNC && mux->newest->opcode == FUSE_STATFS);
        CHECK(mux->oldest->next == mux->newest && mux->newest->previous == mux->oldest && mux->oldest->deadline_ns < mux->newest->deadline_ns);
        pthread_mutex_unlock(&mux->lock);
        kvfs_statistics_get(plane, &during);
        session_reply(id, fails ? -EIO : 0, NULL, 0);
        CHECK(answer_of(write) == (fails ? -EIO : 0));
        session_reply(statfs_id, -EPERM, NULL, 0);
        CHECK(answer_of(statfs) == -EPERM);
        kvfs_statistics_get(plane, &after);
        CHECK(during.writes == before.writes && during.write_bytes == before.write_bytes);
        CHECK(after.writes == before.writes + !fails && after.write_bytes == before.write_bytes + (fails ? 0 : in.size));
        CHECK(flush_and_seal(inode, fh, "synchronous") == 0);
    }
    release(inode, fh);
    CHECK(kvfs_inode_remove(plane, inode) == 0);
    free(data);
    forget_blocks();
    patient(false);
    say_hello(0);
    printf("ok a synchronous write has one deadline, and is counted when it is durable\n");
}

/* No Linux sends one, but other drivers of guests may. */
static void test_attributes_are_set_by_a_directory_s_handle(void) {
    struct fuse_setattr_in set = {.valid = FATTR_MODE | FATTR_FH, .fh = 12345, .mode = 0700}, got;
    ask(FUSE_SETATTR, 1, &set, sizeof(set), NULL, 0);
    struct fuse_in_header *in = forwarded_request();
    memcpy(&got, in + 1, sizeof(got));
    CHECK(in->opcode == FUSE_SETATTR && in->nodeid == 1 && got.valid == FATTR_MODE && got.mode == 0700);
    session_reply(in->unique, -EPERM, NULL, 0);
    CHECK(answer(NULL, NULL) == -EPERM);
    set.valid |= FATTR_SIZE;
    ask(FUSE_SETATTR, 1, &set, sizeof(set), NULL, 0);
    CHECK(answer(NULL, NULL) == -EBADF);
    printf("ok attributes are set by a directory's handle, a size only by a writer's\n");
}

static void test_calls(void) {
    struct {
        struct fuse_rename2_in in;
        char names[300];
    } two = {.in = {.newdir = 77, .flags = 1}};
    struct {
        struct fuse_rename_in in;
        char names[300];
    } one = {.in = {.newdir = 78}};
    char longest[257];
    memset(longest, 'n', 255);
    longest[255] = 0;
    memcpy(two.names, "old", 4);
    memcpy(two.names + 4, longest, 256);
    ask(FUSE_RENAME2, 1, &two, sizeof(two.in) + 4 + 256, NULL, 0);
    struct kvfs_call call = forwarded_call(FUSE_RENAME);
    CHECK(call.inode == 1 && call.new_parent == 77 && call.flags == 1 && call.name_size == 3 && call.new_name_size == 255);
    CHECK(memcmp(call.name, "old", 3) == 0 && memcmp(call.new_name, longest, 255) == 0);
    kvfs_answer(plane, call.id, -EEXIST, 0, NULL);
    CHECK(answer(NULL, NULL) == -EEXIST);
    memcpy(one.names, "a\0b", 4);
    ask(FUSE_RENAME, 1, &one, sizeof(one.in) + 4, NULL, 0);
    call = forwarded_call(FUSE_RENAME);
    CHECK(call.new_parent == 78 && call.flags == 0 && call.name[0] == 'a' && call.new_name[0] == 'b' && call.new_name_size == 1);
    kvfs_answer(plane, call.id, 0, 0, NULL);
    CHECK(answer(NULL, NULL) == 0);
    ask(FUSE_UNLINK, 1, longest, 256, NULL, 0);
    call = forwarded_call(FUSE_UNLINK);
    CHECK(call.inode == 1 && call.name_size == 255);
    kvfs_answer(plane, call.id + 1, -EPERM, 0, NULL); /* nobody's */
    kvfs_answer(plane, 0, -EPERM, 0, NULL);
    kvfs_answer(plane, UINT64_MAX, -EPERM, 0, NULL);
    kvfs_answer(plane, call.id, -ENOENT, 0, NULL);
    CHECK(answer(NULL, NULL) == -ENOENT);
    /* A CREATE whose inode is gone again is an error, not a handle. */
    struct fuse_create_in in = {.flags = O_RDWR | O_CREAT, .mode = 0100644};
    ask(FUSE_CREATE, 1, &in, sizeof(in), "gone", 5);
    kvfs_answer(plane, forwarded_call(FUSE_CREATE).id, 0, 999999, NULL);
    CHECK(answer(NULL, NULL) == -EIO);
    /* Closed: by the session again. */
    kvfs_calls_open(plane, 0);
    ask(FUSE_UNLINK, 1, "x", 2, NULL, 0);
    struct fuse_in_header *got = forwarded_request();
    CHECK(got->opcode == FUSE_UNLINK);
    session_reply(got->unique, -EACCES, NULL, 0);
    CHECK(answer(NULL, NULL) == -EACCES);
    kvfs_calls_open(plane, 1);
    printf("ok calls come whole, and an answer counts once\n");
}

/* FOPEN_DIRECT_IO is 1, FOPEN_KEEP_CACHE 2. */
static void test_page_caches_are_bypassed(void) {
    uint8_t *data = pattern(70000, 11);
    uint64_t old, kept = create_with("kept", O_WRONLY | O_CREAT, &old);
    CHECK(!(created.open_flags & 1)); /* a kernel that could not map it, were it open like that */
    release(kept, old);
    CHECK(kvfs_inode_remove(plane, kept) == 0);
    say_hello(UINT32_MAX);                       /* one that can: FUSE_DIRECT_IO_ALLOW_MMAP */
    for (int others = 0; others < 3; others++) { /* openers meanwhile: nobody, a reader, a reader and a writer */
        uint64_t fh, inode = create_with(others ? "shared" : "alone", O_WRONLY | O_CREAT, &fh);
        CHECK(created.open_flags & 1);
        CHECK(write_at(inode, fh, 0, data, 70000) == 0);
        int error;
        uint64_t reader = others ? open_read(inode, &error) : 0;
        CHECK(!others || (error == 0 && opened.open_flags & 1 && read_check(inode, reader, 0, 65536, data, 70000) == 0));
        if (others == 2) {
            struct fuse_open_in in = {.flags = O_RDWR};
            ask(FUSE_OPEN, inode, &in, sizeof(in), NULL, 0);
            struct fuse_in_header *got = forwarded_request();
            CHECK(got->opcode == FUSE_OPEN);
            struct fuse_open_out out = {.fh = inode};
            void *body;
            session_reply(got->unique, 0, &out, sizeof(out));
            CHECK(answer(&body, NULL) == 0);
            memcpy(&out, body, sizeof(out));
            CHECK(out.open_flags & 1);
            release(inode, out.fh);
        }
        struct kvfs_seal_info info;
        CHECK(kvfs_seal_begin(plane, inode, &info) == 0 && info.dirty && info.shared == (others > 0));
        CHECK(kvfs_seal_end(plane, inode, 0) == 0);
        CHECK(flush_and_seal(inode, fh, others ? "shared" : "alone") == 0);
        release(inode, fh);
        if (others)
            release(inode, reader);
        reader = open_read(inode, &error);
        CHECK(error == 0 && !(opened.open_flags & 1)); /* sealed: cached like any other */
        CHECK(read_check(inode, reader, 0, 65536, data, 70000) == 0);
        release(inode, reader);
        CHECK(kvfs_inode_remove(plane, inode) == 0);
    }
    uint64_t fh, inode = create("mapped", &fh);
    CHECK(!(created.open_flags & 1)); /* it may be mapped */
    release(inode, fh);
    CHECK(kvfs_inode_remove(plane, inode) == 0);
    say_hello(0);
    free(data);
    printf("ok what is only written bypasses the page cache, and so do those who open it meanwhile\n");
}

static void test_rewrite_in_place(void) {
    uint64_t size = 2500000, fh;
    uint8_t *data = pattern(size + (1 << 20), 5);
    uint64_t inode = create("rewritten", &fh);
    for (uint64_t at = 0; at < size; at += 1 << 20)
        CHECK(write_at(inode, fh, at, data + at, (uint32_t)min_u64(1 << 20, size - at)) == 0);
    CHECK(flush_and_seal(inode, fh, "rewritten") == 0);
    unsigned seed = 77;
    for (int round = 0; round < 12; round++) {
        for (int i = 0; i < 5; i++) {
            seed = seed * 1103515245u + 12345u;
            uint64_t at = seed % size;
            uint32_t length = (uint32_t)min_u64(1 + (seed >> 8) % 200000, size - at);
            for (uint32_t k = 0; k < length; k++)
                data[at + k] ^= (uint8_t)(0x5a + round);
            CHECK(write_at(inode, fh, at, data + at, length) == 0);
        }
        if (round % 3 == 2) {
            seed = seed * 1103515245u + 12345u;
            uint64_t cut = size - seed % 5000;
            CHECK(kvfs_file_truncate(plane, inode, cut) == 0);
            memset(data + cut, 0, size - cut);
            CHECK(kvfs_file_truncate(plane, inode, size) == 0);
        }
        for (uint64_t at = 0; at < size; at += 500001)
            CHECK(read_check(inode, fh, at, 600000, data, size) == 0);
        CHECK(flush_and_seal(inode, fh, "rewritten") == 0);
        for (uint64_t at = 0; at < size; at += 500001)
            CHECK(read_check(inode, fh, at, 600000, data, size) == 0);
    }
    release(inode, fh);
    free(data);
    printf("ok a sealed file is rewritten, cut and grown in place\n");
}

static void test_unlinked_while_open(void) {
    uint64_t fh;
    uint8_t *data = pattern(200000, 6);
    uint64_t inode = create("unlinked", &fh);
    CHECK(write_at(inode, fh, 0, data, 200000) == 0);
    CHECK(flush_and_seal(inode, fh, "unlinked") == 0);
    CHECK(kvfs_inode_remove(plane, inode) == 1);
    CHECK(read_check(inode, fh, 0, 200000, data, 200000) == 0);
    release(inode, fh);
    CHECK(kvfs_inode_remove(plane, inode) == 0);
    int error;
    open_read(inode, &error);
    CHECK(error == -ESTALE);
    free(data);
    printf("ok an unlinked file lives as long as its handle, then opening it is ESTALE\n");
}

static void test_bad_requests(void) {
    /* Lengths, handles and opcodes that no kernel would send. */
    struct fuse_read_in read = {.fh = 0xdeadbeef, .size = 4096};
    ask(FUSE_READ, 1234, &read, sizeof(read), NULL, 0);
    CHECK(answer(NULL, NULL) == -EBADF);
    ask(FUSE_READ, 1234, &read, 4, NULL, 0);
    CHECK(answer(NULL, NULL) == -EINVAL);
    struct fuse_write_in write = {.fh = 1, .size = 100};
    ask(FUSE_WRITE, 1234, &write, sizeof(write), "short", 5);
    CHECK(answer(NULL, NULL) == -EBADF);
    char name[300];
    memset(name, 'x', sizeof(name));
    name[299] = 0;
    ask(FUSE_LOOKUP, 1, name, sizeof(name), NULL, 0);
    CHECK(answer(NULL, NULL) == -ENAMETOOLONG);
    ask(9999, 1, NULL, 0, NULL, 0);
    CHECK(answer(NULL, NULL) == -ENOSYS);
    ask(FUSE_LOOKUP, 1, "nothing", 8, NULL, 0);
    CHECK(answer(NULL, NULL) == -ENOENT);
    printf("ok malformed requests get an error each\n");
}

int main(void) {
    plane_begin();
    test_request_timeout();
    test_bad_requests();
    test_write_seal_read();
    test_faults();
    test_a_read_that_waits_for_memory_goes_by_the_answers_to_any_ring();
    test_slow_requests_are_told_of();
    test_deadline_of_forwarded_requests();
    test_a_synchronous_write_has_one_deadline();
    test_attributes_are_set_by_a_directory_s_handle();
    test_calls();
    test_page_caches_are_bypassed();
    test_rewrite_in_place();
    test_unlinked_while_open();
    test_a_device_that_stops_and_is_another_file_afterwards();
    plane_end();
    return 0;
}
