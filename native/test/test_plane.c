/* sources: base block io content fuse virtiofs plane.c */
/* The whole data plane without a kernel: this program plays both the kernel (a socketpair in place of /dev/fuse: a double) and Python (the
 * session's end). Devices are files. It proves under the sanitizers: writes in any order are sealed and read back. Faults become EIO within the
 * deadline and never wrong bytes. Late replies are dropped. A transport that goes away leaves nothing. */
#include "plane_harness.h"

#include <poll.h>

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

/* As the control plane opens for writing. */
static uint64_t open_write(uint64_t inode, uint32_t flags) {
    struct fuse_open_in in = {.flags = flags};
    ask(FUSE_OPEN, inode, &in, sizeof(in), NULL, 0);
    struct fuse_in_header *got = forwarded_request();
    CHECK(got->opcode == FUSE_OPEN && got->nodeid == inode);
    uint64_t id = got->unique;
    CHECK(kvfs_file_rewrite(plane, 8, inode, !(flags & O_TRUNC)) == 0 && completion() == 0);
    struct fuse_open_out out = {.fh = inode};
    void *body;
    session_reply(id, 0, &out, sizeof(out));
    CHECK(answer(&body, NULL) == 0);
    memcpy(&out, body, sizeof(out));
    return out.fh;
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

/* The kernel is told how long a request may wait only where that was asked for, and the kernel can. */
static void test_request_timeout(void) {
    const uint32_t configured = plane->config.kernel_timeout_s, requested[] = {0, 1, 120, 65535};
    CHECK(configured);
    for (unsigned i = 0; i < 4; i++)
        for (unsigned offered = 0; offered < 2; offered++) {
            struct fuse_init_in init = {.major = FUSE_KERNEL_VERSION, .minor = 45, .flags = 0xffffffff, .flags2 = offered << (42 - 32)};
            void *body;
            size_t size;
            plane->config.kernel_timeout_s = requested[i];
            ask(FUSE_INIT, 0, &init, sizeof(init), NULL, 0);
            CHECK(answer(&body, &size) == 0 && size == 64);
            uint32_t flags2;
            uint16_t timeout;
            memcpy(&flags2, (uint8_t *)body + 32, sizeof(flags2));
            memcpy(&timeout, (uint8_t *)body + 40, sizeof(timeout));
            bool expected = offered && requested[i];
            CHECK((flags2 >> (42 - 32) & 1) == expected && timeout == (expected ? requested[i] : 0));
        }
    plane->config.kernel_timeout_s = configured;
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
    plane->slow_ns = slow_ms * (uint64_t)1000000;
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

    plane->slow_ns = UINT64_MAX; /* off */
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

    plane->slow_ns = slow_ms * (uint64_t)1000000;
    /* One that fails by its deadline is slow, too. */
    before = slow_requests();
    fault(KVFS_FAULT_DELAY, 1, 2000 * slowness());
    CHECK(read_check(inode, fh, 131072, 4096, data, size) == -EIO);
    until = now_ns() + 20000000000ull;
    while (slow_requests() == before && now_ns() < until)
        usleep(1000);
    CHECK(slow_requests() > before);
    fault(KVFS_FAULT_NONE, 3, 0);
    plane->slow_ns = UINT64_MAX;
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

/* The reply to a request of any before; those to others are kept for when they are asked for. */
static int answer_of(uint64_t id) {
    static struct { uint64_t id; int error; } kept[16];
    static unsigned kept_count;
    for (unsigned i = 0; i < kept_count; i++)
        if (kept[i].id == id) {
            int error = kept[i].error;
            kept[i] = kept[--kept_count];
            return error;
        }
    for (;;) {
        struct fuse_out_header head;
        struct timeval limit = {.tv_sec = 60};
        CHECK(setsockopt(kernel, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit)) == 0);
        CHECK(recv(kernel, reply, sizeof(reply), 0) >= (ssize_t)sizeof(head));
        memcpy(&head, reply, sizeof(head));
        if (head.unique == id)
            return head.error;
        if (head.unique == 0)
            continue; /* a notification */
        CHECK(kept_count < 16);
        kept[kept_count].id = head.unique;
        kept[kept_count++].error = head.error;
    }
}

/* The next read (1) or write (2) of each device is held, until let_go(); it ends with the error then. Others go on. */
static uint32_t held_error;

static void hold_next(uint32_t direction, uint32_t error) {
    held_error = error;
    for (uint32_t i = 0; i < DEVICES; i++) {
        CHECK(kvfs_fault_set(plane, i, KVFS_FAULT_HOLD, direction, UINT32_MAX, error) == 0);
        atomic_store(&plane->array.devices[i].faults.counter, UINT32_MAX - 1);
    }
}

static void hold_next_read(uint32_t error) { hold_next(1, error); }

static void wait_held(void) {
    for (uint64_t until = now_ns() + 20000000000ull;; usleep(200)) {
        for (uint32_t i = 0; i < DEVICES; i++)
            if (atomic_load(&plane->array.devices[i].faults.counter) != UINT32_MAX - 1)
                return;
        CHECK(now_ns() < until);
    }
}

/* A read of a whole chunk is held: its parts on all devices are. */
static void wait_chunk_held(void) {
    for (uint64_t until = now_ns() + 20000000000ull; ; usleep(200)) {
        uint32_t held = 0;
        for (uint32_t i = 0; i < DEVICES; i++)
            held += atomic_load(&plane->array.devices[i].faults.counter) != UINT32_MAX - 1;
        if (held == DEVICES)
            return;
        CHECK(now_ns() < until);
    }
}

/* Held I/O stays held; no more I/O of the other devices will be. */
static void hold_no_more(void) {
    for (uint32_t i = 0; i < DEVICES; i++)
        if (atomic_load(&plane->array.devices[i].faults.counter) == UINT32_MAX - 1)
            CHECK(kvfs_fault_set(plane, i, KVFS_FAULT_NONE, 1, 1, 0) == 0);
}

/* Nothing was answered since. */
static bool nothing_answered(void) {
    struct pollfd ready = {.fd = kernel, .events = POLLIN};
    return poll(&ready, 1, 0) == 0;
}

/* It ends with the requested error, even if the device is done only now: a part is held when it ends, and counted when it begins. */
static void let_go(void) { fault(KVFS_FAULT_NONE, 1, held_error); }

static uint64_t write_soon(uint64_t inode, uint64_t fh, uint64_t offset, const uint8_t *data, uint32_t size) {
    struct fuse_write_in in = {.fh = fh, .offset = offset, .size = size};
    ask(FUSE_WRITE, inode, &in, sizeof(in), data, size);
    return unique;
}

static void spill_start(uint64_t inode) {
    struct kvfs_seal_info info;
    CHECK(kvfs_spill_begin(plane, inode, &info) == 0 && info.dirty);
    struct kvfs_run run = {.generation = 7, .segment = 1, .page = (uint32_t)next_spill_page, .page_count = info.data_pages + 1};
    next_spill_page += run.page_count;
    CHECK(next_spill_page < plane->array.geometry.segment_pages);
    CHECK(kvfs_spill_write(plane, 9, inode, &run, 1) == 0);
}

static void spill_now(uint64_t inode) {
    spill_start(inode);
    CHECK(completion() == 0);
}

/* A WRITE of part of a chunk that lies on the devices reads it first, on a worker, without a lock. The bytes that it read must not undo the work of
 * others meanwhile, nor may they make it fail. */
static void test_writes_beside_a_slow_load(void) {
    const uint64_t size = CHUNK_SIZE + 70000;
    enum { SEALED, SEALED_TWICE, SPILLED, CUT, GROWN, EMPTIED, REOPENED, WAYS };
    const uint64_t timeout = plane->array.io_timeout_ms, patience = plane->config.request_timeout_ms;
    plane->array.io_timeout_ms = plane->config.request_timeout_ms = 60000;
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
    plane->array.io_timeout_ms = timeout;
    plane->config.request_timeout_ms = patience;
    printf("ok a write that loads slowly undoes nothing that was written, sealed, spilled or cut meanwhile\n");
}

/* The same of a READ: bytes of when it began, or of now, and no error of a place that the chunk has left. */
static void test_reads_beside_a_seal(void) {
    const uint64_t timeout = plane->array.io_timeout_ms;
    plane->array.io_timeout_ms = 60000;
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
    plane->array.io_timeout_ms = timeout;
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
    CHECK(error == 0 && kvfs_inode_move(plane, record) == 0); /* a reader looks again */
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

/* Deadlines that nothing held meets. */
static void patient(bool begin) {
    static uint32_t io, request;
    if (begin)
        io = plane->array.io_timeout_ms, request = plane->config.request_timeout_ms;
    plane->array.io_timeout_ms = begin ? 60000 : io;
    plane->config.request_timeout_ms = begin ? 60000 : request;
}

static void read_all(uint64_t inode, uint64_t fh, const uint8_t *model, uint64_t length) {
    for (uint64_t at = 0; at < length; at += CHUNK_SIZE)
        CHECK(read_check(inode, fh, at, CHUNK_SIZE, model, length) == 0);
    CHECK(read_check(inode, fh, length, 4096, model, length) == 0);
}

/* As it is, sealed, and read by who opens it then. */
static void read_and_seal(uint64_t inode, uint64_t fh, const char *name, const uint8_t *model, uint64_t length) {
    read_all(inode, fh, model, length);
    CHECK(flush_and_seal(inode, fh, name) == 0);
    read_all(inode, fh, model, length);
    release(inode, fh);
    int error;
    fh = open_read(inode, &error);
    CHECK(error == 0);
    read_all(inode, fh, model, length);
    release(inode, fh);
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
        CHECK(kvfs_slab_extend(plane, inode, PAGE, 1, &(struct kvfs_run){.generation = 7, .segment = 6, .page = 16, .page_count = 1000}, 1) == -EBUSY);
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
    CHECK(completion() > 0 && kvfs_inode_move(plane, copied) == 0); /* it is not being written yet */
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

static struct kvfs_user user_of(uint32_t id) {
    struct kvfs_user users[64];
    int count = kvfs_users(plane, users, 64);
    for (int i = 0; i < count; i++)
        if (users[i].id == id)
            return users[i];
    return (struct kvfs_user){0};
}

static uint64_t open_of(uint32_t id) { return user_of(id).open_bytes; }

static uint64_t writing_of(uint32_t id) { return user_of(id).writing_bytes; }

static int open_by(uint64_t inode, uint32_t id, struct node **node) {
    struct kvfs_record record;
    return node_open(plane, inode, user_get(plane, id), false, &record, node);
}

static void unopen_by(struct node *node, uint32_t id) {
    struct shard *shard = shard_of(plane, node->inode);
    pthread_mutex_lock(&shard->lock);
    node_unopen(plane, node, user_get(plane, id), false);
    pthread_mutex_unlock(&shard->lock);
    node_put(plane, node);
}

static void test_shares(void) {
    enum { GREEDY = 5000, MODEST = 5001, DAEMON = 5002, COUNT = 4, SIZE = 100000 };
    uint8_t record[512], busy[COUNT];
    uint64_t inodes[COUNT];
    char name[32];
    for (int i = 0; i < COUNT; i++) {
        inodes[i] = ++next_inode;
        sprintf(name, "share-%d", i);
        make_record(record, inodes[i], name, SIZE, KVFS_INODE_SEALED, 1, 1);
        CHECK(kvfs_name_put(plane, record, 0) == 0);
    }
    struct kvfs_statistics before, after;
    kvfs_statistics_get(plane, &before);
    kvfs_set_share(plane, 2 * SIZE, DAEMON);
    struct node *greedy[COUNT], *again, *other;
    for (int i = 0; i < COUNT; i++)
        CHECK(open_by(inodes[i], GREEDY, &greedy[i]) == 0);
    CHECK(open_by(inodes[0], GREEDY, &again) == 0);
    CHECK(open_of(GREEDY) == COUNT * SIZE); /* a block counts once, however often it is open */
    CHECK(kvfs_inode_user(plane, inodes[0]) == GREEDY && kvfs_inode_user(plane, 1) == -ENOENT);
    CHECK(kvfs_inode_is_open(plane, inodes[0]) == KVFS_OPEN_BEYOND_SHARE);
    /* A user with room takes over a charge from one without. */
    CHECK(open_by(inodes[0], MODEST, &other) == 0);
    CHECK(kvfs_inode_user(plane, inodes[0]) == MODEST && open_of(MODEST) == SIZE && open_of(GREEDY) == (COUNT - 1) * SIZE);
    CHECK(kvfs_inode_is_open(plane, inodes[0]) == KVFS_OPEN);
    /* The space of writers: what may go is as good as free. */
    kvfs_set_space(plane, before.open_bytes + COUNT * SIZE, ENOSPC);
    CHECK(!space_lacks(plane, SIZE) && space_lacks(plane, SIZE + 1));
    /* One goes; then the others are within the share, and stay. */
    CHECK(kvfs_inode_evict(plane, inodes, COUNT, busy) == COUNT - 1 && busy[0] && !busy[1] && busy[2] && busy[3]);
    CHECK(open_of(GREEDY) == 2 * SIZE && kvfs_inode_is_open(plane, inodes[2]) == KVFS_OPEN);
    CHECK(open_by(inodes[1], GREEDY, &again) == -ESTALE);
    /* Pins and the like count first. */
    kvfs_user_hold(plane, GREEDY, 1);
    CHECK(kvfs_inode_is_open(plane, inodes[2]) == KVFS_OPEN_BEYOND_SHARE);
    kvfs_user_hold(plane, GREEDY, 0);
    /* The last one to have it open is charged for it. */
    unopen_by(other, MODEST);
    CHECK(kvfs_inode_user(plane, inodes[0]) == GREEDY && open_of(MODEST) == 0);
    kvfs_set_share(plane, 0, DAEMON);
    CHECK(kvfs_inode_is_open(plane, inodes[2]) == KVFS_OPEN_BEYOND_SHARE);
    CHECK(open_by(inodes[2], DAEMON, &other) == 0 && kvfs_inode_is_open(plane, inodes[2]) == KVFS_OPEN);
    unopen_by(other, DAEMON);
    CHECK(open_by(inodes[3], 0, &other) == 0 && kvfs_inode_is_open(plane, inodes[3]) == KVFS_OPEN);
    unopen_by(other, 0);
    unopen_by(greedy[0], GREEDY);
    for (int i = 0; i < COUNT; i++)
        unopen_by(greedy[i], GREEDY);
    kvfs_set_share(plane, UINT64_MAX, 0);
    kvfs_set_space(plane, UINT64_MAX, ENOSPC);
    CHECK(open_of(GREEDY) == 0 && open_of(0) == 0 && open_of(DAEMON) == 0);
    kvfs_statistics_get(plane, &after);
    CHECK(after.open_bytes == before.open_bytes);
    for (int i = 0; i < COUNT; i++)
        CHECK(i == 1 || kvfs_inode_remove(plane, inodes[i]) == 0);
    /* A file being written counts too, for the user who opened it first or made it grow. It is refused when a share for others would not be left. */
    kvfs_statistics_get(plane, &before);
    uint64_t written = ++next_inode;
    make_record(record, written, "share-written", 0, 0, 1, 1);
    CHECK(kvfs_name_put(plane, record, 0) == 0 && kvfs_file_create(plane, written) == 0);
    struct node *node = node_get(plane, written, false);
    CHECK(node && file_admit(plane, node, user_get(plane, GREEDY)) == 0 && kvfs_file_truncate(plane, written, SIZE) == 0);
    CHECK(writing_of(GREEDY) == SIZE && file_admit(plane, node, user_get(plane, MODEST)) == 0 && writing_of(MODEST) == 0);
    kvfs_set_share(plane, 2 * SIZE, DAEMON);
    kvfs_set_space(plane, before.open_bytes + 4 * SIZE, ENOSPC);
    CHECK(kvfs_file_truncate(plane, written, 2 * SIZE) == 0); /* the share */
    CHECK(kvfs_file_truncate(plane, written, 2 * SIZE + 1) == -EDQUOT && kvfs_file_allocate(plane, written, 2 * SIZE + 1) == -EDQUOT);
    kvfs_set_space(plane, before.open_bytes + 5 * SIZE, ENOSPC);
    CHECK(kvfs_file_truncate(plane, written, 3 * SIZE) == 0 && kvfs_file_truncate(plane, written, 3 * SIZE + 1) == -EDQUOT);
    pthread_mutex_lock(&node->lock);
    file_charge(node->file, user_get(plane, DAEMON)); /* a user who may hold all */
    pthread_mutex_unlock(&node->lock);
    CHECK(writing_of(GREEDY) == 0 && writing_of(DAEMON) == 3 * SIZE && kvfs_file_truncate(plane, written, 9 * SIZE) == 0);
    CHECK(kvfs_file_truncate(plane, written, 0) == 0 && writing_of(DAEMON) == 0 && kvfs_file_truncate(plane, written, SIZE) == 0);
    CHECK(kvfs_inode_remove(plane, written) == 0 && writing_of(DAEMON) == 0);
    node_put(plane, node);
    kvfs_set_share(plane, UINT64_MAX, 0);
    kvfs_set_space(plane, UINT64_MAX, ENOSPC);
    kvfs_statistics_get(plane, &after);
    CHECK(after.open_bytes == before.open_bytes);
    /* More users than places: they share one, and nothing is lost. */
    inodes[0] = ++next_inode;
    make_record(record, inodes[0], "share-many", SIZE, KVFS_INODE_SEALED, 1, 1);
    CHECK(kvfs_name_put(plane, record, 0) == 0);
    for (uint32_t id = 10000; id < 10000 + 2 * USERS_MAX; id++) {
        CHECK(open_by(inodes[0], id, &other) == 0);
        unopen_by(other, id);
    }
    CHECK(user_get(plane, 4000000000u) == user_get(plane, 4000000001u) && kvfs_inode_remove(plane, inodes[0]) == 0);
    kvfs_statistics_get(plane, &after);
    CHECK(after.open_bytes == before.open_bytes);
    printf("ok beyond a user's share what is open may go, unless another has it open within the share\n");
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

/* ---- listings: names from the session, attributes from the table ---- */

static uint64_t open_directory(void) {
    struct fuse_open_in in = {.flags = O_RDONLY};
    struct fuse_open_out out = {.fh = 1};
    ask(FUSE_OPENDIR, 1, &in, sizeof(in), NULL, 0);
    session_reply(forwarded_request()->unique, 0, &out, sizeof(out));
    void *body;
    CHECK(answer(&body, NULL) == 0);
    memcpy(&out, body, sizeof(out));
    return out.fh;
}

static void close_directory(uint64_t fh) {
    struct fuse_release_in in = {.fh = fh};
    ask(FUSE_RELEASEDIR, 1, &in, sizeof(in), NULL, 0);
    session_reply(forwarded_request()->unique, 0, NULL, 0);
    CHECK(answer(NULL, NULL) == 0);
}

struct listed { const char *name; uint64_t inode; };

/* List through a handle; the session's answer is `entries`. Returns the kernel's. */
static const uint8_t *list(uint32_t opcode, uint64_t fh, uint64_t offset, const struct listed *entries, uint32_t count, size_t *size) {
    uint8_t names[4000];
    uint32_t used = 0;
    struct fuse_read_in in = {.fh = fh, .offset = offset, .size = 32768};
    ask(opcode, 1, &in, sizeof(in), NULL, 0);
    struct fuse_in_header *request = forwarded_request();
    struct fuse_read_in asked;
    memcpy(&asked, request + 1, sizeof(asked));
    CHECK(request->opcode == FUSE_READDIRPLUS && asked.fh == 1 && asked.offset == (offset > 2 ? offset - 2 : 0));
    for (uint32_t i = 0; i < count; i++) {
        uint32_t length = (uint32_t)strlen(entries[i].name), head = offsetof(struct fuse_direntplus, dirent) + offsetof(struct fuse_dirent, name);
        struct fuse_direntplus plus = {.dirent = {.ino = entries[i].inode, .off = entries[i].inode, .namelen = length, .type = 8}};
        memset(names + used, 0, round_up(head + length, 8));
        memcpy(names + used, &plus, head);
        memcpy(names + used + head, entries[i].name, length);
        used += (uint32_t)round_up(head + length, 8);
        CHECK(used <= sizeof(names));
    }
    session_reply(request->unique, 0, names, used);
    void *body;
    CHECK(answer(&body, size) == 0);
    return body;
}

/* The next entry of a READDIRPLUS; CHECKs its name. */
static struct fuse_direntplus next_listed(const uint8_t **at, const char *name) {
    struct fuse_direntplus plus;
    uint32_t head = offsetof(struct fuse_direntplus, dirent) + offsetof(struct fuse_dirent, name);
    memcpy(&plus, *at, head);
    CHECK(plus.dirent.namelen == strlen(name) && memcmp(*at + head, name, plus.dirent.namelen) == 0);
    *at += round_up(head + plus.dirent.namelen, 8);
    return plus;
}

static uint64_t nodes_listed(uint64_t fh, uint64_t inode) {
    struct listed twenty[20];
    size_t size;
    uint64_t nodes = 0;
    for (uint32_t i = 0; i < 20; i++)
        twenty[i] = (struct listed){"listed-sealed", inode};
    const uint8_t *at = list(FUSE_READDIRPLUS, fh, 5000, twenty, 20, &size), *end = at + size;
    while (at < end)
        nodes += next_listed(&at, "listed-sealed").entry_out.nodeid != 0;
    return nodes;
}

static void test_listings(void) {
    uint64_t fh, written_fh, directory = open_directory(), began = now_ns();
    uint8_t *data = pattern(10000, 12);
    kvfs_set_tick(plane, 3);
    uint64_t sealed = create("listed-sealed", &fh), written = create("listed-written", &written_fh);
    CHECK(write_at(sealed, fh, 0, data, 10000) == 0 && flush_and_seal(sealed, fh, "listed-sealed") == 0);
    release(sealed, fh);
    CHECK(write_at(written, written_fh, 0, data, 777) == 0);
    uint32_t use = use_of(sealed);
    kvfs_set_tick(plane, 9);
    /* "listed-written" was another block when the session listed it the second time, and "gone" is no more. */
    const struct listed entries[] = {{"listed-sealed", sealed}, {"listed-written", written}, {"listed-written", written + 1}, {"gone", 4242}};
    size_t size;
    const uint8_t *at = list(FUSE_READDIRPLUS, directory, 0, entries, 4, &size), *begin = at;
    struct fuse_direntplus e = next_listed(&at, ".");
    CHECK(e.entry_out.nodeid == 0 && e.dirent.ino == 1 && e.dirent.off == 1);
    e = next_listed(&at, "..");
    CHECK(e.entry_out.nodeid == 0 && e.dirent.off == 2);
    e = next_listed(&at, "listed-sealed");
    CHECK(e.entry_out.nodeid == sealed && e.entry_out.attr.ino == sealed && e.entry_out.attr.size == 10000 && e.dirent.off == sealed + 2);
    CHECK(e.entry_out.generation == 0 && e.entry_out.entry_valid == 1 && e.entry_out.attr_valid == 1);
    e = next_listed(&at, "listed-written");
    CHECK(e.entry_out.nodeid == written && e.entry_out.attr.size == 777 && e.entry_out.entry_valid == 1 && e.entry_out.attr_valid == 0);
    e = next_listed(&at, "listed-written");
    CHECK(e.entry_out.nodeid == 0 && e.dirent.ino == written + 1);
    CHECK(next_listed(&at, "gone").entry_out.nodeid == 0 && at == begin + size);
    CHECK(use_of(sealed) == use); /* seen is not used */
    list(FUSE_READDIR, directory, 0, entries, 4, &size);
    CHECK(size == 2 * 32 + 40 + 2 * 40 + 32);
    /* A listing makes so many inodes, and no more; all of them together in a minute, too. */
    uint64_t nodes = 2, total, before;
    while ((before = nodes_listed(directory, sealed)) != 0)
        nodes += before;
    CHECK(nodes == 65536);
    total = nodes;
    for (uint32_t i = 0; i < 5; i++) {
        uint64_t another = open_directory();
        for (nodes = 0; (before = nodes_listed(another, sealed)) != 0;)
            nodes += before;
        CHECK(nodes <= 65536 && (i > 0 || nodes == 65536));
        total += nodes;
        close_directory(another);
    }
    CHECK(total == 262144 || now_ns() - began > 60000000000ull);
    close_directory(directory);
    release(written, written_fh);
    CHECK(kvfs_inode_remove(plane, sealed) == 0 && kvfs_inode_remove(plane, written) == 0);
    free(data);
    printf("ok listings have attributes, make a bounded number of inodes, and are no uses\n");
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
    CHECK(read_check(inode, fh, 0, 1 << 20, shadow, size) == 0); /* pages that were not written are still zeros */
    CHECK(kvfs_slab_close(plane, inode) == -EBUSY && kvfs_slab_settle(plane, 4, inode, 0) == 0 && completion() == -EBUSY);
    release(inode, fh);
    CHECK(slab_event(KVFS_EVENT_SLAB_CLOSED, inode).value == 1); /* overwritten */
    CHECK(kvfs_slab_settle(plane, 4, inode, 0) == 0 && completion() == -EPERM);
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
    CHECK(kvfs_slab_settle(plane, 4, inode, 0) == 0 && completion() == 0);
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
    CHECK(kvfs_slab_settle(plane, 4, inode, 0) == 0 && completion() == -EBUSY);
    CHECK(kvfs_slab_settle(plane, 4, inode, 1) == 0 && completion() == 0);
    slab_event(KVFS_EVENT_SLAB_FREE, inode);
    CHECK(kvfs_slab_settle(plane, 4, inode, 1) == 0 && completion() == -ENOENT);
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
    CHECK(kvfs_slab_settle(plane, 4, inode, 1) == 0 && completion() == -EPERM && kvfs_slab_pages(plane, inode) == 1000);
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
    const struct kvfs_run runs[2] = {{.generation = 7, .segment = 6, .page = 16, .page_count = 1000}, {.generation = 7, .segment = 7, .page = 16, .page_count = 1000}};
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
            CHECK(kvfs_slab_settle(plane, 3, inode, 1) == 0);
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

int main(void) {
    slowness(); /* measured now: later it would take time from what is timed */
    char directory[64];
    snprintf(directory, sizeof(directory), "%.32s/kvfs-plane-XXXXXX", scratch());
    CHECK(mkdtemp(directory));
    start(directory);
    test_request_timeout();
    test_bad_requests();
    test_write_seal_read();
    test_faults();
    test_slow_requests_are_told_of();
    test_deadline_of_forwarded_requests();
    test_calls();
    test_page_caches_are_bypassed();
    test_rewrite_in_place();
    test_writes_beside_a_slow_load();
    test_reads_beside_a_seal();
    test_a_block_being_written_does_not_move();
    test_spills_beside_changes();
    test_cuts_of_spilled_chunks();
    test_changes_beside_a_seal();
    test_a_reopen_beside_a_copy();
    test_preallocation_without_a_file();
    test_unlinked_while_open();
    test_shares();
    test_opens_are_uses();
    test_listings();
    test_slab();
    test_slab_writes_beside_changes();
    test_a_slow_write_to_what_is_a_slab_by_then();
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
