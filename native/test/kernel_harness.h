/* A kernel before the data plane of plane_harness.h: a socketpair in place of /dev/fuse, with this program at the kernel's end. Further what
 * tests of races share: I/O of devices that is held until a test lets it go. */
#ifndef KVFS_TEST_KERNEL_HARNESS_H
#define KVFS_TEST_KERNEL_HARNESS_H

#include "plane_harness.h"

#include <poll.h>

static int kernel = -1;
static uint64_t unique = 100;

/* ---- the double of the kernel ---- */

static uint8_t message[2 << 20], reply[6 << 20];
static uint32_t asking_user; /* of ask() */

static inline void ask(uint32_t opcode, uint64_t node, const void *a, size_t a_size, const void *b, size_t b_size) {
    struct fuse_in_header head = {
        .len = (uint32_t)(sizeof(head) + a_size + b_size), .opcode = opcode, .unique = ++unique, .nodeid = node, .uid = asking_user};
    memcpy(message, &head, sizeof(head));
    if (a_size)
        memcpy(message + sizeof(head), a, a_size);
    if (b_size)
        memcpy(message + sizeof(head) + a_size, b, b_size);
    CHECK(send(kernel, message, head.len, 0) == (ssize_t)head.len);
}

/* The reply to the last ask; returns its error and the body's size. */
static inline int answer(void **body, size_t *size) {
    struct fuse_out_header head;
    struct timeval limit = {.tv_sec = 20};
    CHECK(setsockopt(kernel, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit)) == 0);
    for (;;) {
        ssize_t n = recv(kernel, reply, sizeof(reply), 0);
        if (n < 0 && errno == EINTR) /* with a limit it is not begun again by itself */
            continue;
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

static inline uint64_t create_with(const char *name, uint32_t flags, uint64_t *fh) {
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
    kvfs_answer(plane, call.id, 0, inode, NULL);
    void *body;
    CHECK(answer(&body, NULL) == 0);
    struct fuse_entry_out entry;
    memcpy(&entry, body, sizeof(entry));
    CHECK(entry.nodeid == inode && entry.attr.ino == inode && entry.attr.mode == 0100644 && entry.attr.nlink == 1 && entry.attr.size == 0);
    memcpy(&created, (uint8_t *)body + sizeof(struct fuse_entry_out), sizeof(created));
    *fh = created.fh;
    return inode;
}

/* A directory in names and block table. */
static inline void directory_put(uint64_t inode, uint64_t parent, const char *name) {
    struct {
        struct kvfs_inode_record record;
        char name[16];
    } made = {.record = {.inode = inode, .parent = parent, .kind = KVFS_KIND_DIRECTORY, .mode = 040755, .nlink = 2}};
    made.record.name_size = (uint16_t)strlen(name);
    made.record.record_size = (uint32_t)(sizeof(made.record) + round_up(made.record.name_size, 8));
    memcpy(made.name, name, made.record.name_size);
    CHECK(kvfs_names_put(plane->names, &made, 0) == 0);
    if (inode != 1)
        CHECK(kvfs_name_put(plane, &made, 0) == 0);
}

static inline uint64_t create(const char *name, uint64_t *fh) { return create_with(name, O_RDWR | O_CREAT, fh); }

static inline int write_at(uint64_t inode, uint64_t fh, uint64_t offset, const uint8_t *data, uint32_t size) {
    struct fuse_write_in in = {.fh = fh, .offset = offset, .size = size};
    ask(FUSE_WRITE, inode, &in, sizeof(in), data, size);
    return answer(NULL, NULL);
}

static inline int flush_and_seal(uint64_t inode, uint64_t fh, const char *name) {
    struct fuse_flush_in in = {.fh = fh};
    ask(FUSE_FLUSH, inode, &in, sizeof(in), NULL, 0);
    struct kvfs_call call = forwarded_call(FUSE_FLUSH);
    CHECK(call.inode == inode && call.name_size == 0);
    int64_t r = seal(inode, name, true);
    kvfs_answer(plane, call.id, r < 0 ? -EIO : 0, 0, NULL);
    return answer(NULL, NULL);
}

static inline void release(uint64_t inode, uint64_t fh) {
    struct fuse_release_in in = {.fh = fh};
    ask(FUSE_RELEASE, inode, &in, sizeof(in), NULL, 0);
    CHECK(answer(NULL, NULL) == 0);
}

static struct fuse_open_out opened;

static inline uint64_t open_read(uint64_t inode, int *error) {
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
static inline uint64_t open_write(uint64_t inode, uint32_t flags) {
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
static inline int read_check(uint64_t inode, uint64_t fh, uint64_t offset, uint32_t size, const uint8_t *expected, uint64_t file_size) {
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

static inline void say_hello(uint32_t flags2) {
    struct fuse_init_in init = {.major = FUSE_KERNEL_VERSION, .minor = 45, .flags = 0xffffffff, .flags2 = flags2};
    ask(FUSE_INIT, 0, &init, sizeof(init), NULL, 0);
    CHECK(answer(NULL, NULL) == 0);
}

static inline void start(const char *directory) {
    start_plane(directory, 1);
    int pair[2], size = 8 << 20;
    CHECK(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, pair) == 0);
    for (int i = 0; i < 2; i++)
        CHECK(setsockopt(pair[i], SOL_SOCKET, SO_SNDBUFFORCE, &size, sizeof(size)) == 0);
    kernel = pair[0];
    CHECK(kvfs_fuse_add(plane, pair[1]) == 0);
    say_hello(0);
}

/* ---- I/O that is held ---- */

/* The reply to a request of any before; those to others are kept for when they are asked for. */
static inline int answer_of(uint64_t id) {
    static struct {
        uint64_t id;
        int error;
    } kept[16];
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
        ssize_t n = recv(kernel, reply, sizeof(reply), 0);
        if (n < 0 && errno == EINTR) /* as in answer() */
            continue;
        CHECK(n >= (ssize_t)sizeof(head));
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

static inline void hold_next(uint32_t direction, uint32_t error) {
    held_error = error;
    for (uint32_t i = 0; i < DEVICES; i++) {
        CHECK(kvfs_fault_set(plane, i, KVFS_FAULT_HOLD, direction, UINT32_MAX, error) == 0);
        atomic_store(&plane->array.devices[i].faults.counter, UINT32_MAX - 1);
    }
}

static inline void hold_next_read(uint32_t error) { hold_next(1, error); }

static inline void wait_held(void) {
    for (uint64_t until = now_ns() + 20000000000ull;; usleep(200)) {
        for (uint32_t i = 0; i < DEVICES; i++)
            if (atomic_load(&plane->array.devices[i].faults.counter) != UINT32_MAX - 1)
                return;
        CHECK(now_ns() < until);
    }
}

/* A read of a whole chunk is held: its parts on all devices are. */
static inline void wait_chunk_held(void) {
    for (uint64_t until = now_ns() + 20000000000ull;; usleep(200)) {
        uint32_t held = 0;
        for (uint32_t i = 0; i < DEVICES; i++)
            held += atomic_load(&plane->array.devices[i].faults.counter) != UINT32_MAX - 1;
        if (held == DEVICES)
            return;
        CHECK(now_ns() < until);
    }
}

/* Held I/O stays held; no more I/O of the other devices will be. */
static inline void hold_no_more(void) {
    for (uint32_t i = 0; i < DEVICES; i++)
        if (atomic_load(&plane->array.devices[i].faults.counter) == UINT32_MAX - 1)
            CHECK(kvfs_fault_set(plane, i, KVFS_FAULT_NONE, 1, 1, 0) == 0);
}

/* Nothing was answered since. */
static inline bool nothing_answered(void) {
    struct pollfd ready = {.fd = kernel, .events = POLLIN};
    return poll(&ready, 1, 0) == 0;
}

/* It ends with the requested error, even if the device is done only now: a part is held when it ends, and counted when it begins. */
static inline void let_go(void) { fault(KVFS_FAULT_NONE, 1, held_error); }

static inline uint64_t write_soon(uint64_t inode, uint64_t fh, uint64_t offset, const uint8_t *data, uint32_t size) {
    struct fuse_write_in in = {.fh = fh, .offset = offset, .size = size};
    ask(FUSE_WRITE, inode, &in, sizeof(in), data, size);
    return unique;
}

static inline void spill_start(uint64_t inode) {
    struct kvfs_seal_info info;
    CHECK(kvfs_spill_begin(plane, inode, &info) == 0 && info.dirty);
    struct kvfs_run run = {.generation = 7, .segment = 1, .page = (uint32_t)next_spill_page, .page_count = info.data_pages + 1};
    next_spill_page += run.page_count;
    CHECK(next_spill_page < plane->array.geometry.segment_pages);
    CHECK(kvfs_spill_write(plane, 9, inode, &run, 1) == 0);
}

static inline void spill_now(uint64_t inode) {
    spill_start(inode);
    CHECK(completion() == 0);
}

/* Options of a plane are there before its threads. A test turns one under them, and either value is right for a request that ends just now: the
 * thread sanitizer is not told. */
__attribute__((no_sanitize("thread"), noinline, unused)) static void turn(uint32_t *option, uint32_t value) { *option = value; }

/* Deadlines that nothing held meets. */
static inline void patient(bool begin) {
    static uint32_t io, request;
    if (begin)
        io = plane->array.io_timeout_ms, request = plane->config.request_timeout_ms;
    turn(&plane->array.io_timeout_ms, begin ? 60000 : io);
    turn(&plane->config.request_timeout_ms, begin ? 60000 : request);
}

static inline void read_all(uint64_t inode, uint64_t fh, const uint8_t *model, uint64_t length) {
    for (uint64_t at = 0; at < length; at += CHUNK_SIZE)
        CHECK(read_check(inode, fh, at, CHUNK_SIZE, model, length) == 0);
    CHECK(read_check(inode, fh, length, 4096, model, length) == 0);
}

/* As it is, sealed, and read by who opens it then. */
static inline void read_and_seal(uint64_t inode, uint64_t fh, const char *name, const uint8_t *model, uint64_t length) {
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

/* ---- a program of tests ---- */

static char plane_directory[64];

static inline void plane_begin(void) {
    slowness(); /* measured now: later it would take time from what is timed */
    snprintf(plane_directory, sizeof(plane_directory), "%.32s/kvfs-plane-XXXXXX", scratch());
    CHECK(mkdtemp(plane_directory));
    start(plane_directory);
}

/* An unmount: /dev/fuse reads as ENODEV then. A socket that closes with a reply unread reads as ECONNRESET at its other end, not as empty. */
static inline void unmount(void) {
    struct pollfd ready = {.fd = kernel, .events = POLLIN};
    ask(9999, 1, NULL, 0, NULL, 0);
    CHECK(poll(&ready, 1, 20000) == 1);
    close(kernel);
    for (uint64_t until = now_ns() + 20000000000ull; transport_count(); usleep(1000))
        CHECK(now_ns() < until);
}

/* Until every device has answered what missed its deadline: whatever has not stays the devices' memory, also when the plane ends. */
static inline void wait_orphans(void) {
    struct kvfs_statistics statistics;
    for (uint64_t until = now_ns() + 60000000000ull;; usleep(1000)) {
        kvfs_statistics_get(plane, &statistics);
        if (statistics.zombies == 0)
            return;
        CHECK(now_ns() < until);
    }
}

/* The plane and its devices' files. */
static inline void plane_down(void) {
    kvfs_plane_destroy(plane);
    close(session);
    for (uint32_t i = 0; i < DEVICES; i++) {
        char path[512];
        snprintf(path, sizeof(path), "%s/device%u", plane_directory, i);
        unlink(path);
        close(device_fds[i]);
    }
    rmdir(plane_directory);
}

static inline void plane_end(void) {
    wait_orphans();
    unmount();
    plane_down();
    printf("ok the plane comes down with nothing left\n");
}

#endif
