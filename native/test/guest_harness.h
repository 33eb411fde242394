/* FUSE requests through a ring, as a guest makes them: for test_virtiofs.c. */
#ifndef KVFS_TEST_GUEST_HARNESS_H
#define KVFS_TEST_GUEST_HARNESS_H

#include "front_end.h"
#include "plane_harness.h"

#include <sys/stat.h>
#include <sys/vfs.h>

#define MIB ((uint32_t)1 << 20)

static char directory[64], path[128], other_path[128];
static int number, other_number;

#define REQUEST_AT FRONT_DATA
#define TABLE_AT (FRONT_DATA + 0x40000)
#define REPLY_AT (FRONT_DATA + 0x60000)
#define IN_AT (FRONT_DATA + 0x100000)  /* payload that the guest writes */
#define OUT_AT (FRONT_DATA + 0x400000) /* room for what it reads */

/* Put a request into the queue: header and body at `place`, payload and room as they are. Head `head`. */
static inline void put(struct front *f, uint32_t queue, uint16_t head, uint64_t place, uint32_t opcode, uint64_t node, const void *body,
                       uint32_t body_size, struct piece *payload, uint32_t payload_count, bool indirect) {
    struct front_queue *q = &f->queues[queue];
    uint32_t in_size = 0, count = 0;
    struct piece pieces[600];
    for (uint32_t i = 0; i < payload_count; i++)
        in_size += payload[i].writable ? 0 : payload[i].size;
    struct fuse_in_header in = {.len = (uint32_t)sizeof(in) + body_size + in_size, .opcode = opcode, .unique = ++f->unique, .nodeid = node};
    memcpy(f->memory + place, &in, sizeof(in));
    if (body_size)
        memcpy(f->memory + place + sizeof(in), body, body_size);
    pieces[count++] = (struct piece){f->memory + place, sizeof(in), false};
    if (body_size)
        pieces[count++] = (struct piece){f->memory + place + sizeof(in), body_size, false};
    for (uint32_t i = 0; i < payload_count; i++)
        if (!payload[i].writable)
            pieces[count++] = payload[i];
    pieces[count++] = (struct piece){f->memory + place + 0x8000, sizeof(struct fuse_out_header), true};
    for (uint32_t i = 0; i < payload_count; i++)
        if (payload[i].writable)
            pieces[count++] = payload[i];
    front_chain(f, q, head, indirect ? f->memory + place + 0xa000 : NULL, pieces, count);
    front_offer(q, head);
}

static inline int wait_answer(struct front *f, uint32_t queue, uint64_t place, uint32_t *body_size) {
    uint32_t head, length;
    struct fuse_out_header out;
    CHECK(front_wait(&f->queues[queue], 20000, &head, &length));
    CHECK(length >= sizeof(out));
    memcpy(&out, f->memory + place + 0x8000, sizeof(out));
    CHECK(out.unique == f->unique && out.len == length);
    if (body_size)
        *body_size = length - (uint32_t)sizeof(out);
    return out.error;
}

static inline int ask(struct front *f, uint32_t opcode, uint64_t node, const void *body, uint32_t body_size, void *out, uint32_t out_size) {
    struct piece room = {f->memory + REPLY_AT, 4096, true};
    memset(f->memory + REPLY_AT, 0, 4096);
    put(f, 1, 0, REQUEST_AT, opcode, node, body, body_size, &room, 1, true);
    int error = wait_answer(f, 1, REQUEST_AT, NULL);
    if (out && error == 0)
        memcpy(out, f->memory + REPLY_AT, out_size);
    return error;
}

static inline void fuse_init(struct front *f) {
    struct fuse_init_in init = {.major = FUSE_KERNEL_VERSION, .minor = 38, .flags = 0xffffffff, .flags2 = 0xffffffff};
    struct fuse_init_out out;
    CHECK(ask(f, FUSE_INIT, 0, &init, sizeof(init), &out, sizeof(out)) == 0);
    CHECK(!(out.flags2 >> (42 - 32) & 1)); /* FUSE_REQUEST_TIMEOUT is for the host's own connection */
    CHECK(out.major == FUSE_KERNEL_VERSION && out.minor == 38 && out.flags & FUSE_AUTO_INVAL_DATA && !(out.flags & FUSE_EXPLICIT_INVAL_DATA));
}

static inline uint64_t create(struct front *f, const char *name, uint64_t *fh) {
    struct {
        struct fuse_create_in in;
        char name[64];
    } body = {.in = {.flags = O_RDWR | O_CREAT, .mode = 0100644}};
    struct piece room = {f->memory + REPLY_AT, 4096, true};
    snprintf(body.name, sizeof(body.name), "%s", name);
    put(f, 1, 0, REQUEST_AT, FUSE_CREATE, 1, &body, (uint32_t)(sizeof(body.in) + strlen(name) + 1), &room, 1, true);
    struct kvfs_call call = forwarded_call(FUSE_CREATE);
    uint64_t inode = ++next_inode;
    uint8_t record[512];
    make_record(record, inode, name, 0, 0, 0, 0);
    CHECK(kvfs_name_put(plane, record, 0) == 0 && kvfs_file_create(plane, inode) == 0);
    struct {
        struct fuse_entry_out entry;
        struct fuse_open_out open;
    } out;
    kvfs_answer(plane, call.id, 0, inode, NULL);
    CHECK(wait_answer(f, 1, REQUEST_AT, NULL) == 0);
    memcpy(&out, f->memory + REPLY_AT, sizeof(out));
    CHECK(out.entry.entry_valid == 0 && out.entry.attr_valid == 0);
    *fh = out.open.fh;
    return inode;
}

static inline int write_at(struct front *f, uint64_t inode, uint64_t fh, uint64_t offset, const uint8_t *data, uint32_t size) {
    struct fuse_write_in in = {.fh = fh, .offset = offset, .size = size};
    struct piece pieces[2] = {{f->memory + IN_AT, size, false}, {f->memory + REPLY_AT, sizeof(struct fuse_write_out), true}};
    memcpy(f->memory + IN_AT, data, size);
    put(f, 1, 0, REQUEST_AT, FUSE_WRITE, inode, &in, sizeof(in), pieces, size ? 2 : 0, true);
    return wait_answer(f, 1, REQUEST_AT, NULL);
}

static inline int flush_and_seal(struct front *f, uint64_t inode, uint64_t fh, const char *name) {
    struct fuse_flush_in in = {.fh = fh};
    put(f, 1, 0, REQUEST_AT, FUSE_FLUSH, inode, &in, sizeof(in), NULL, 0, true);
    struct kvfs_call call = forwarded_call(FUSE_FLUSH);
    CHECK(call.inode == inode);
    int64_t r = seal(inode, name, false);
    kvfs_answer(plane, call.id, r < 0 ? -EIO : 0, 0, NULL);
    return wait_answer(f, 1, REQUEST_AT, NULL);
}

static inline uint64_t open_read(struct front *f, uint64_t inode) {
    struct fuse_open_in in = {.flags = O_RDONLY};
    struct fuse_open_out out;
    CHECK(ask(f, FUSE_OPEN, inode, &in, sizeof(in), &out, sizeof(out)) == 0);
    CHECK(!(out.open_flags & 2)); /* never FOPEN_KEEP_CACHE */
    return out.fh;
}

static inline void release(struct front *f, uint64_t inode, uint64_t fh) {
    struct fuse_release_in in = {.fh = fh};
    CHECK(ask(f, FUSE_RELEASE, inode, &in, sizeof(in), NULL, 0) == 0);
}

/* Room for a read in pages of its own each, every second one from the far end: no two lie side by side. */
static inline uint32_t scattered(struct front *f, uint32_t size, uint32_t shift, struct piece *pieces) {
    uint32_t count = 0;
    for (uint32_t done = 0; done < size; count++) {
        uint32_t length = (uint32_t)min_u64(4096, size - done);
        pieces[count] = (struct piece){f->memory + OUT_AT + (count % 2 ? 1000 - count : count) * 8192ull + shift, length, true};
        done += length;
    }
    return count;
}

static inline int read_check(struct front *f, uint64_t inode, uint64_t fh, uint64_t offset, uint32_t size, uint32_t shift, const uint8_t *expected,
                             uint64_t file_size) {
    struct fuse_read_in in = {.fh = fh, .offset = offset, .size = size};
    struct piece pieces[400];
    uint32_t count = scattered(f, size, shift, pieces), length;
    memset(f->memory + OUT_AT, 0xee, (size_t)8 << 20);
    put(f, 1, 0, REQUEST_AT, FUSE_READ, inode, &in, sizeof(in), pieces, count, true);
    int error = wait_answer(f, 1, REQUEST_AT, &length);
    if (error) { /* nothing unproven is left behind */
        for (uint32_t i = 0; i < count; i++)
            for (uint32_t k = 0; k < pieces[i].size; k++)
                CHECK(((uint8_t *)pieces[i].data)[k] == 0 || ((uint8_t *)pieces[i].data)[k] == 0xee);
        return error;
    }
    uint64_t want = offset >= file_size ? 0 : min_u64(size, file_size - offset);
    CHECK(length == want);
    for (uint32_t i = 0, at = 0; at < want; at += pieces[i++].size)
        CHECK(memcmp(pieces[i].data, expected + offset + at, min_u64(pieces[i].size, want - at)) == 0);
    return 0;
}

static inline struct kvfs_virtiofs_statistics statistics(int of) {
    struct kvfs_virtiofs_statistics s;
    CHECK(kvfs_virtiofs_statistics(plane, of, &s) == 0);
    return s;
}

static inline void wait_gone(int of) {
    uint64_t until = now_ns() + 20000000000ull;
    while (statistics(of).connected && now_ns() < until)
        usleep(1000);
    CHECK(!statistics(of).connected);
}

static inline uint64_t open_handles(void) {
    struct kvfs_statistics s;
    kvfs_statistics_get(plane, &s);
    return s.open_handles;
}

static inline uint64_t make_block(struct front *f, const char *name, const uint8_t *data, uint64_t size) {
    uint64_t fh, inode = create(f, name, &fh);
    for (uint64_t at = 0; at < size; at += MIB)
        CHECK(write_at(f, inode, fh, at, data + at, (uint32_t)min_u64(MIB, size - at)) == 0);
    CHECK(flush_and_seal(f, inode, fh, name) == 0);
    release(f, inode, fh);
    return inode;
}

static inline int listen_with(const char *at, const struct kvfs_virtiofs_config *config) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    snprintf(address.sun_path, sizeof(address.sun_path), "%s", at);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    CHECK(fd >= 0 && bind(fd, (struct sockaddr *)&address, sizeof(address)) == 0 && listen(fd, 4) == 0);
    int r = kvfs_virtiofs_add(plane, fd, config);
    CHECK(r >= 0);
    close(fd);
    return r;
}

static inline int listen_at(const char *at) {
    return listen_with(at, &(struct kvfs_virtiofs_config){.tag = "kvfs", .queue_count = 3, .queue_size_max = 1024});
}

static inline void start(void) {
    start_plane(directory, 2);
    snprintf(path, sizeof(path), "%s/guest", directory);
    snprintf(other_path, sizeof(other_path), "%s/other", directory);
    number = listen_at(path);
    other_number = listen_at(other_path);
    CHECK(number == 0 && other_number == 1 && transport_count() == 2);
}

#endif
