/* A data plane over four files, and a double of Python at the session's end: for tests of what lies before it. */
#ifndef KVFS_TEST_PLANE_HARNESS_H
#define KVFS_TEST_PLANE_HARNESS_H

#include "fuse/fuse.h"

#include <fcntl.h>
#include <stdio.h>
#include <sys/socket.h>
#include <unistd.h>

#include "check.h"
#include "completions.h"

#define DEVICES 4
#define ZONE ((uint64_t)16 << 20)
#define SEGMENTS 8u
#define SECRET 0x1234567890abcdefull

static struct kvfs_plane *plane;
static int session = -1, device_fds[DEVICES];
static uint64_t next_inode = 1000, next_page = 1, next_spill_page = 1;
static uint8_t forwarded[1 << 20];

static void start_plane(const char *directory, uint32_t server_threads) {
    uint64_t offsets[DEVICES];
    static struct kvfs_member members[SEGMENTS * DEVICES];
    for (uint32_t i = 0; i < DEVICES; i++) {
        char path[512];
        snprintf(path, sizeof(path), "%s/device%u", directory, i);
        device_fds[i] = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
        CHECK(device_fds[i] >= 0 && ftruncate(device_fds[i], (off_t)(ZONE * SEGMENTS + (1 << 20))) == 0);
        offsets[i] = 1 << 20;
        for (uint32_t s = 0; s < SEGMENTS; s++)
            members[s * DEVICES + i] = (struct kvfs_member){(i + s) % DEVICES, s};
    }
    struct kvfs_plane_config config = {.secret = SECRET,
                                       .mount_epoch = 3,
                                       .zone_size = ZONE,
                                       .stripe_unit = 65536,
                                       .staging_size = 64 << 20,
                                       .read_memory_size = 32 << 20,
                                       .records_max = 100000,
                                       .stripe_width = DEVICES,
                                       .segment_count = SEGMENTS,
                                       .device_count = DEVICES,
                                       .io_timeout_ms = 400 * slowness(),
                                       .request_timeout_ms = 500 * slowness(),
                                       .server_threads = server_threads,
                                       .store_threads = 2,
                                       .max_read = 1 << 20,
                                       .verify = 1,
                                       .spin_us = 20,
                                       .kernel_timeout_s = 90};
    CHECK(kvfs_plane_create(&config, device_fds, offsets, members, &plane) == 0);
    kvfs_table_set_complete(kvfs_plane_table(plane), 1);
    struct kvfs_record root = {.inode = 1, .parent = 1, .mode = 040755, .nlink = 2, .kind = KVFS_KIND_DIRECTORY};
    CHECK(kvfs_table_put(kvfs_plane_table(plane), &root, "", 0, 0) == 0);
    session = kvfs_session_open(plane);
    CHECK(session >= 0);
    kvfs_calls_open(plane, 1);
}

static struct fuse_in_header *forwarded_request(void) {
    struct timeval limit = {.tv_sec = 20};
    struct fuse_in_header *in = (struct fuse_in_header *)(void *)forwarded;
    int flags = fcntl(session, F_GETFL);
    fcntl(session, F_SETFL, flags & ~O_NONBLOCK);
    CHECK(setsockopt(session, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit)) == 0);
    do
        CHECK(recv(session, forwarded, sizeof(forwarded), 0) > 0);
    while (in->opcode == FUSE_INIT);
    return in;
}

static void session_reply(uint64_t id, int error, const void *body, size_t size) {
    uint8_t out[4096];
    struct fuse_out_header head = {.len = (uint32_t)(sizeof(head) + size), .error = error, .unique = id};
    memcpy(out, &head, sizeof(head));
    if (size)
        memcpy(out + sizeof(head), body, size);
    CHECK(send(session, out, head.len, 0) == (ssize_t)head.len);
}

/* The next call; CHECKs what it is. */
static struct kvfs_call forwarded_call(uint32_t opcode) {
    struct kvfs_call call;
    uint64_t until = now_ns() + 20000000000ull;
    while (kvfs_take_calls(plane, &call, 1) == 0) {
        CHECK(now_ns() < until);
        usleep(200);
    }
    CHECK(call.opcode == opcode);
    return call;
}

static inline uint32_t transport_count(void) { return atomic_load(&plane->fuse->transport_count); }

static int64_t completion(void) {
    struct kvfs_completion done;
    CHECK(wait_completion(plane, &done, 20000));
    return done.result;
}

static size_t make_record(uint8_t *out, uint64_t inode, const char *name, uint64_t size, uint8_t flags, uint32_t page, uint32_t header_pages) {
    size_t name_size = strlen(name);
    struct kvfs_inode_record r = {.record_size = (uint32_t)(sizeof(r) + round_up(name_size, 8)),
                                  .kind = KVFS_KIND_FILE,
                                  .flags = flags,
                                  .name_size = (uint16_t)name_size,
                                  .inode = inode,
                                  .parent = 1,
                                  .version = inode,
                                  .size = size,
                                  .generation = 7,
                                  .segment = 0,
                                  .page = page,
                                  .header_pages = header_pages,
                                  .mode = 0100644,
                                  .nlink = 1};
    memset(out, 0, r.record_size);
    memcpy(out, &r, sizeof(r));
    memcpy(out + sizeof(r), name, name_size);
    return r.record_size;
}

/* As Python seals: a block in two runs, the second with a page for its extent header, or in one. */
static void seal_start(uint64_t inode, const char *name, bool split) {
    struct kvfs_seal_info info;
    CHECK(kvfs_seal_begin(plane, inode, &info) == 0);
    CHECK(info.dirty);
    uint8_t record[4096];
    size_t size = make_record(record, inode, name, info.size, KVFS_INODE_SEALED, (uint32_t)next_page, 0);
    uint32_t header_pages = kvfs_header_pages(info.size, (uint32_t)size, 0, info.ranges + info.kept_extents + 2);
    size = make_record(record, inode, name, info.size, KVFS_INODE_SEALED, (uint32_t)next_page, header_pages);
    uint32_t later = split ? info.data_pages - info.data_pages / 2 : 0, first = header_pages + info.data_pages - later;
    struct kvfs_run runs[2] = {{.generation = 7, .segment = 0, .page = (uint32_t)next_page, .page_count = first},
                               {.generation = 7, .segment = 0, .page = (uint32_t)next_page + first, .page_count = later + 1}};
    next_page += first + later + split;
    CHECK(next_page < plane->array.geometry.segment_pages);
    CHECK(kvfs_seal_write(plane, 1, inode, runs, 1 + split, header_pages, record, (uint32_t)size, "", 0) == 0);
}

static int64_t seal_finish(uint64_t inode) {
    int64_t r = completion();
    if (r == 0) {
        uint8_t final[4096];
        CHECK(kvfs_seal_record(plane, inode, final, sizeof(final)) > 0);
        CHECK(kvfs_inode_update(plane, final) == 0);
    }
    CHECK(kvfs_seal_end(plane, inode, r == 0) == 0);
    return r;
}

static int64_t seal(uint64_t inode, const char *name, bool split) {
    seal_start(inode, name, split);
    return seal_finish(inode);
}

/* Nobody reads any more of what was sealed by now: its pages are written again. */
static inline void forget_blocks(void) { next_page = next_spill_page = 1; }

static void fault(uint32_t kind, uint32_t direction, uint32_t value) {
    for (uint32_t i = 0; i < DEVICES; i++)
        CHECK(kvfs_fault_set(plane, i, kind, direction, 1, value) == 0);
}

static inline uint8_t *pattern(uint64_t size, unsigned seed) {
    uint8_t *data = malloc(size + 1);
    CHECK(data);
    for (uint64_t i = 0; i < size; i++)
        data[i] = (uint8_t)((seed = seed * 1103515245u + 12345u) >> 16);
    return data;
}

#endif
