/* sources: arena.c block_table.c block_table_reader.c checksum.c checksum_avx2.c checksum_avx512.c events.c fastpath.c file.c fuse_dev.c guest.c header.c mux.c names.c node.c notify.c nvme_admin.c nvme_crc32c.c nvme_generic.c nvme_host.c nvme_link.c nvme_queue.c plane.c read.c reply.c ring.c seal.c server.c shared_memory.c slab.c store.c vhost_user.c virtqueue.c worker.c */
/* The whole data plane without a kernel: this program plays both the kernel (a socketpair in place of /dev/fuse: a double) and Python (the
 * session's end). Devices are files. What it proves under the sanitizers: writes in any order are sealed and read back, faults become EIO within
 * the deadline and never wrong bytes, late replies are dropped, a transport that goes away leaves nothing. */
#include "plane_harness.h"

static int kernel = -1;
static uint64_t unique = 100;

/* ---- the double of the kernel ---- */

static uint8_t message[2 << 20], reply[6 << 20];

static void ask(uint32_t opcode, uint64_t node, const void *a, size_t a_size, const void *b, size_t b_size) {
    struct fuse_in_header head = {.len = (uint32_t)(sizeof(head) + a_size + b_size), .opcode = opcode, .unique = ++unique, .nodeid = node};
    memcpy(message, &head, sizeof(head));
    if (a_size)
        memcpy(message + sizeof(head), a, a_size);
    if (b_size)
        memcpy(message + sizeof(head) + a_size, b, b_size);
    CHECK(send(kernel, message, head.len, 0) == (ssize_t)head.len);
}

/* The reply to the last ask; returns its error and the body's size. */
static int answer(void **body, size_t *size) {
    struct fuse_out_header head;
    struct timeval limit = {.tv_sec = 20};
    CHECK(setsockopt(kernel, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit)) == 0);
    for (;;) {
        ssize_t n = recv(kernel, reply, sizeof(reply), 0);
        CHECK(n >= (ssize_t)sizeof(head));
        memcpy(&head, reply, sizeof(head));
        if (head.unique != unique)
            continue; /* a notification */
        if (body)
            *body = reply + sizeof(head);
        if (size)
            *size = (size_t)n - sizeof(head);
        return head.error;
    }
}

static struct fuse_open_out created;

static uint64_t create_with(const char *name, uint32_t flags, uint64_t *fh) {
    struct fuse_create_in in = {.flags = flags, .mode = 0100644};
    ask(FUSE_CREATE, 1, &in, sizeof(in), name, strlen(name) + 1);
    struct kvfs_call call = forwarded_call(FUSE_CREATE);
    CHECK(call.inode == 1 && call.mode == 0100644 && call.flags == flags);
    CHECK(call.name_size == strlen(name) && memcmp(call.name, name, call.name_size) == 0 && call.new_name_size == 0);
    uint64_t inode = ++next_inode;
    uint8_t record[512];
    make_record(record, inode, name, 0, 0, 0, 0);
    CHECK(kvfs_name_put(plane, record, 0) == 0);
    CHECK(kvfs_file_create(plane, inode) == 0);
    kvfs_answer(plane, call.id, 0, inode);
    void *body;
    CHECK(answer(&body, NULL) == 0);
    struct fuse_entry_out entry;
    memcpy(&entry, body, sizeof(entry));
    CHECK(entry.nodeid == inode && entry.attr.ino == inode && entry.attr.mode == 0100644 && entry.attr.nlink == 1 && entry.attr.size == 0);
    memcpy(&created, (uint8_t *)body + sizeof(struct fuse_entry_out), sizeof(created));
    *fh = created.fh;
    return inode;
}

static uint64_t create(const char *name, uint64_t *fh) { return create_with(name, O_RDWR | O_CREAT, fh); }

static int write_at(uint64_t inode, uint64_t fh, uint64_t offset, const uint8_t *data, uint32_t size) {
    struct fuse_write_in in = {.fh = fh, .offset = offset, .size = size};
    ask(FUSE_WRITE, inode, &in, sizeof(in), data, size);
    return answer(NULL, NULL);
}

/* As the control plane seals: allocate, write, publish. Returns the completion. */

static int flush_and_seal(uint64_t inode, uint64_t fh, const char *name) {
    struct fuse_flush_in in = {.fh = fh};
    ask(FUSE_FLUSH, inode, &in, sizeof(in), NULL, 0);
    struct kvfs_call call = forwarded_call(FUSE_FLUSH);
    CHECK(call.inode == inode && call.name_size == 0);
    int64_t r = seal(inode, name, true);
    kvfs_answer(plane, call.id, r < 0 ? -EIO : 0, 0);
    return answer(NULL, NULL);
}

static void release(uint64_t inode, uint64_t fh) {
    struct fuse_release_in in = {.fh = fh};
    ask(FUSE_RELEASE, inode, &in, sizeof(in), NULL, 0);
    CHECK(answer(NULL, NULL) == 0);
}

static struct fuse_open_out opened;

static uint64_t open_read(uint64_t inode, int *error) {
    struct fuse_open_in in = {.flags = O_RDONLY};
    void *body;
    ask(FUSE_OPEN, inode, &in, sizeof(in), NULL, 0);
    *error = answer(&body, NULL);
    memset(&opened, 0, sizeof(opened));
    if (*error == 0)
        memcpy(&opened, body, sizeof(opened));
    return opened.fh;
}

/* Read and compare; returns the error of the reply. */
static int read_check(uint64_t inode, uint64_t fh, uint64_t offset, uint32_t size, const uint8_t *expected, uint64_t file_size) {
    struct fuse_read_in in = {.fh = fh, .offset = offset, .size = size};
    void *body;
    size_t length;
    ask(FUSE_READ, inode, &in, sizeof(in), NULL, 0);
    int error = answer(&body, &length);
    if (error)
        return error;
    uint64_t want = offset >= file_size ? 0 : min_u64(size, file_size - offset);
    CHECK(length == want);
    CHECK(memcmp(body, expected + offset, want) == 0);
    return 0;
}

static void say_hello(uint32_t flags2) {
    struct fuse_init_in init = {.major = FUSE_KERNEL_VERSION, .minor = 45, .flags = 0xffffffff, .flags2 = flags2};
    ask(FUSE_INIT, 0, &init, sizeof(init), NULL, 0);
    CHECK(answer(NULL, NULL) == 0);
}

static void start(const char *directory) {
    start_plane(directory, 1);
    int pair[2], size = 8 << 20;
    CHECK(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, pair) == 0);
    for (int i = 0; i < 2; i++)
        CHECK(setsockopt(pair[i], SOL_SOCKET, SO_SNDBUFFORCE, &size, sizeof(size)) == 0);
    kernel = pair[0];
    CHECK(kvfs_fuse_add(plane, pair[1]) == 0);
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
    const struct { uint32_t kind, value; const char *name; } faults[] = {
        {KVFS_FAULT_ERROR, EIO, "error"}, {KVFS_FAULT_SHORT, 0, "short read"}, {KVFS_FAULT_FLIP, 4097, "flipped bit"},
        {KVFS_FAULT_DELAY, 2000 * slowness(), "silence"}};
    for (unsigned i = 0; i < 4; i++) {
        fault(faults[i].kind, 1, faults[i].value);
        uint64_t began = now_ns();
        CHECK(read_check(inode, fh, 1 << 20, 1 << 20, data, size) == -EIO);
        CHECK(now_ns() - began < 3000000000ull * slowness());
        if (faults[i].kind == KVFS_FAULT_DELAY) { /* asked again at once, as kernels do, it is the same read, and its deadline is over; that the
                                                   * read before failed a moment ago, in time, changes nothing */
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
    const uint32_t segment = 5, device = plane->members[segment * DEVICES].device;
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
    kvfs_answer(plane, id, 0, inode);
    kvfs_answer(plane, id, 0, inode); /* an answer counts once */
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

static void test_calls(void) {
    struct { struct fuse_rename2_in in; char names[300]; } two = {.in = {.newdir = 77, .flags = 1}};
    struct { struct fuse_rename_in in; char names[300]; } one = {.in = {.newdir = 78}};
    char longest[257];
    memset(longest, 'n', 255);
    longest[255] = 0;
    memcpy(two.names, "old", 4);
    memcpy(two.names + 4, longest, 256);
    ask(FUSE_RENAME2, 1, &two, sizeof(two.in) + 4 + 256, NULL, 0);
    struct kvfs_call call = forwarded_call(FUSE_RENAME);
    CHECK(call.inode == 1 && call.new_parent == 77 && call.flags == 1 && call.name_size == 3 && call.new_name_size == 255);
    CHECK(memcmp(call.name, "old", 3) == 0 && memcmp(call.new_name, longest, 255) == 0);
    kvfs_answer(plane, call.id, -EEXIST, 0);
    CHECK(answer(NULL, NULL) == -EEXIST);
    memcpy(one.names, "a\0b", 4);
    ask(FUSE_RENAME, 1, &one, sizeof(one.in) + 4, NULL, 0);
    call = forwarded_call(FUSE_RENAME);
    CHECK(call.new_parent == 78 && call.flags == 0 && call.name[0] == 'a' && call.new_name[0] == 'b' && call.new_name_size == 1);
    kvfs_answer(plane, call.id, 0, 0);
    CHECK(answer(NULL, NULL) == 0);
    ask(FUSE_UNLINK, 1, longest, 256, NULL, 0);
    call = forwarded_call(FUSE_UNLINK);
    CHECK(call.inode == 1 && call.name_size == 255);
    kvfs_answer(plane, call.id + 1, -EPERM, 0); /* nobody's */
    kvfs_answer(plane, 0, -EPERM, 0);
    kvfs_answer(plane, UINT64_MAX, -EPERM, 0);
    kvfs_answer(plane, call.id, -ENOENT, 0);
    CHECK(answer(NULL, NULL) == -ENOENT);
    /* A CREATE whose inode is gone again is an error, not a handle. */
    struct fuse_create_in in = {.flags = O_RDWR | O_CREAT, .mode = 0100644};
    ask(FUSE_CREATE, 1, &in, sizeof(in), "gone", 5);
    kvfs_answer(plane, forwarded_call(FUSE_CREATE).id, 0, 999999);
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
    say_hello(UINT32_MAX); /* one that can: FUSE_DIRECT_IO_ALLOW_MMAP */
    for (int others = 0; others < 3; others++) { /* who opens it meanwhile: nobody, a reader, a reader and a writer */
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

static uint32_t use_of(uint64_t inode) {
    uint32_t use;
    CHECK(kvfs_inode_uses(plane, &inode, 1, &use) == 0);
    return use;
}

static void test_opens_are_uses(void) {
    uint64_t fh;
    uint8_t *data = pattern(10000, 8);
    kvfs_set_tick(plane, 0x1000005);
    uint64_t inode = create("used", &fh);
    CHECK(use_of(inode) == 5 << 8);
    kvfs_set_tick(plane, 6);
    CHECK(write_at(inode, fh, 0, data, 10000) == 0);
    CHECK(flush_and_seal(inode, fh, "used") == 0);
    CHECK(read_check(inode, fh, 0, 10000, data, 10000) == 0);
    release(inode, fh);
    CHECK(use_of(inode) == 5 << 8); /* neither the writer's own reads nor the seal */
    int error;
    for (uint32_t i = 1; i <= 2; i++) {
        kvfs_set_tick(plane, 10 + i);
        fh = open_read(inode, &error);
        CHECK(error == 0);
        CHECK(read_check(inode, fh, 0, 10000, data, 10000) == 0);
        CHECK(read_check(inode, fh, 0, 10000, data, 10000) == 0);
        release(inode, fh);
        CHECK(use_of(inode) == ((10 + i) << 8 | i)); /* once an open, however often it is read */
    }
    for (int i = 0; i < 300; i++)
        CHECK(kvfs_inode_touch(plane, &inode, 1) == 0);
    CHECK(use_of(inode) == (12 << 8 | 255));
    CHECK(kvfs_inode_remove(plane, inode) == 0);
    CHECK(use_of(inode) == 0);
    free(data);
    printf("ok opens are uses\n");
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

/* ---- slabs ---- */

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
    const struct kvfs_run runs[2] = {{.generation = 7, .segment = 6, .page = 16, .page_count = 1000}, {.generation = 7, .segment = 7, .page = 16, .page_count = 1000}};
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
    static const struct { uint64_t offset; uint32_t size; } writes[] = {
        {0, 4096}, {999 * 4096, 8192}, {1, 100}, {4095, 2}, {900 * 4096, 1 << 20}, {900 * 4096 + 77, 900001}, {1999 * 4096, 4096}, {1999 * 4096 + 5, 4091}};
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
    CHECK(read_check(inode, fh, 0, 1 << 20, shadow, size) == 0); /* what was not written is zeros still */
    CHECK(kvfs_slab_close(plane, inode) == -EBUSY && kvfs_slab_settle(plane, 4, inode) == 0 && completion() == -EBUSY);
    release(inode, fh);
    CHECK(slab_event(KVFS_EVENT_SLAB_CLOSED, inode).value == 1); /* overwritten */
    CHECK(kvfs_slab_settle(plane, 4, inode) == 0 && completion() == -EPERM);
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
    CHECK(kvfs_slab_settle(plane, 4, inode) == 0 && completion() == 0);
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

int main(void) {
    slowness(); /* measured now: later it would take time from what is timed */
    char directory[64];
    snprintf(directory, sizeof(directory), "%.32s/kvfs-plane-XXXXXX", scratch());
    CHECK(mkdtemp(directory));
    start(directory);
    test_bad_requests();
    test_write_seal_read();
    test_faults();
    test_deadline_of_forwarded_requests();
    test_calls();
    test_page_caches_are_bypassed();
    test_rewrite_in_place();
    test_unlinked_while_open();
    test_opens_are_uses();
    test_slab();
    test_a_device_that_stops_and_is_another_file_afterwards();
    close(kernel); /* unmount */
    uint64_t until = now_ns() + 30000000000ull;
    while (kvfs_transport_count(plane) && now_ns() < until)
        usleep(1000);
    kvfs_plane_destroy(plane);
    close(session);
    for (uint32_t i = 0; i < DEVICES; i++) {
        char path[512];
        snprintf(path, sizeof(path), "%s/device%u", directory, i);
        unlink(path);
        close(device_fds[i]);
    }
    rmdir(directory);
    printf("ok the plane comes down with nothing left\n");
    return 0;
}
