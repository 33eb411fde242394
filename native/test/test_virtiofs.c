/* sources: base block names io content pod frames fuse virtiofs plane.c */
/* Guests of the data plane, without a kernel or a VMM. This program plays the front end and the guest (front_end.h, a double), and Python (the
 * session's end). It proves under the sanitizers: blocks are written and read through virtqueues, aligned reads without a copy. A hostile guest's
 * rings stop its queue and nothing else. Resets, vanished front ends and vanished memory with requests in flight leave nothing behind. Requests
 * survive a back end where the front end tracks them. */
#include "guest_harness.h"

static void test_protocol(void) {
    struct front f;
    front_connect(&f, path);
    front_negotiate(&f);
    CHECK(vu_ask(&f, VU_GET_QUEUE_NUM) == 4 && vu_ask(&f, VU_GET_MAX_MEM_SLOTS) >= 32);
    struct {
        uint32_t offset, size, flags;
        uint8_t data[40];
    } config = {0, 40, 0, {0}};
    CHECK(vu_send(&f, VU_GET_CONFIG, 0, &config, sizeof(config), NULL, 0) == 0 && vu_receive(&f, &config, sizeof(config), NULL) == sizeof(config));
    CHECK(memcmp(config.data, "kvfs\0\0", 6) == 0 && config.data[36] == 3);
    config.offset = 8;
    CHECK(vu_send(&f, VU_GET_CONFIG, 0, &config, sizeof(config), NULL, 0) == 0 && vu_receive(&f, &config, sizeof(config), NULL) == 0);
    /* Refused one by one; the connection stays, because they ask for an acknowledgement. */
    uint64_t odd = 1ull << 40 | FRONT_FEATURES, negative[5] = {0, FRONT_GUEST, UINT64_MAX - 4096, FRONT_USER, 0};
    CHECK(vu_tell(&f, VU_SET_FEATURES, &odd, 8, NULL, 0) == 1);
    CHECK(vu_state(&f, VU_SET_VRING_NUM, 0, 100) == 1 && vu_state(&f, VU_SET_VRING_NUM, 0, 2048) == 1 && vu_state(&f, VU_SET_VRING_NUM, 9, 128) == 1);
    CHECK(vu_tell(&f, VU_ADD_MEM_REG, negative, sizeof(negative), &f.memory_fd, 1) == 1);
    CHECK(vu_region(&f, VU_ADD_MEM_REG, 0, FRONT_MEMORY + 4096) == 1); /* longer than the file */
    CHECK(vu_region(&f, VU_ADD_MEM_REG, 0, FRONT_MEMORY / 2) == 0);
    CHECK(vu_region(&f, VU_ADD_MEM_REG, 4096, 8192) == 1); /* lies over another */
    CHECK(vu_region(&f, VU_REM_MEM_REG, 4096, 8192) == 1);
    CHECK(vu_region(&f, VU_REM_MEM_REG, 0, FRONT_MEMORY / 2) == 0);
    uint64_t kick = 0;
    CHECK(vu_tell(&f, VU_SET_VRING_KICK, &kick, 8, &f.memory_fd, 1) == 1); /* not an eventfd */
    CHECK(statistics(number).protocol_errors >= 8 && statistics(number).connected == 1);
    struct front second;
    front_connect(&second, path);
    CHECK(recv(second.fd, &kick, 1, 0) == 0); /* one at a time: turned away, not left waiting */
    front_end(&second);
    /* Not asking for one, and a message that is too long: hung up. */
    CHECK(vu_send(&f, VU_SET_FEATURES, 0, &odd, 8, NULL, 0) == 0);
    CHECK(vu_receive(&f, &odd, 8, NULL) == -1);
    front_end(&f);
    wait_gone(number);
    static uint8_t long_message[2000];
    front_connect(&f, path);
    CHECK(vu_send(&f, VU_SET_MEM_TABLE, 0, long_message, sizeof(long_message), NULL, 0) == 0 && vu_receive(&f, &odd, 8, NULL) == -1);
    front_end(&f);
    wait_gone(number);
}

static void test_blocks(void) {
    static const uint64_t sizes[] = {0, 1, 4095, 4096, 65537, 1000001, 1 << 20, (1 << 20) + 1, 3000017};
    static const uint32_t queue_sizes[] = {128, 1024};
    for (unsigned round = 0; round < 2; round++) {
        struct front f;
        front_start(&f, path, queue_sizes[round]);
        fuse_init(&f);
        CHECK(ask(&f, FUSE_LOOKUP, 1, "nothing", 8, NULL, 0) == -ENOENT);
        for (unsigned i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
            uint64_t size = sizes[i];
            uint8_t *data = pattern(size, i + 1);
            char name[64];
            snprintf(name, sizeof(name), "block%u.%u", round, i);
            uint64_t inode = make_block(&f, name, data, size), fh = open_read(&f, inode);
            struct fuse_entry_out entry;
            CHECK(ask(&f, FUSE_LOOKUP, 1, name, (uint32_t)strlen(name) + 1, &entry, sizeof(entry)) == 0);
            CHECK(entry.nodeid == inode && entry.attr.size == size && entry.entry_valid == 0 && entry.entry_valid_nsec == 0 && entry.attr_valid == 0);
            struct kvfs_virtiofs_statistics before = statistics(number), after;
            uint64_t aligned = 0;
            for (uint64_t at = 0; at <= size; at += MIB) {
                CHECK(read_check(&f, inode, fh, at, MIB, 0, data, size) == 0);
                aligned += min_u64(MIB, size - at);
            }
            after = statistics(number);
            CHECK(after.zero_copy_bytes - before.zero_copy_bytes == aligned && after.copied_bytes == before.copied_bytes);
            /* Not whole pages, not at pages, not in pages: right too, by copying. */
            CHECK(read_check(&f, inode, fh, 0, 10000, 0, data, size) == 0);
            CHECK(read_check(&f, inode, fh, 4096, 100, 0, data, size) == 0);
            CHECK(read_check(&f, inode, fh, 777, 500000, 0, data, size) == 0);
            CHECK(read_check(&f, inode, fh, 0, 500000, 512, data, size) == 0);
            after = statistics(number);
            CHECK(size == 0 || after.copied_bytes > before.copied_bytes);
            release(&f, inode, fh);
            /* By node id alone, with a handle of another daemon: reads on. Writing by it does not. */
            CHECK(read_check(&f, inode, 0xdeadbeefcafe, 0, 65536, 0, data, size) == 0);
            CHECK(write_at(&f, inode, 0xdeadbeefcafe, 0, (const uint8_t *)"x", 1) == -EBADF);
            free(data);
        }
        front_end(&f);
        wait_gone(number);
        CHECK(open_handles() == 0);
    }
}

/* A handle is its transport's, its inode's, and this daemon's. */
static void test_handles_of_others(void) {
    struct front f;
    front_start(&f, path, 128);
    fuse_init(&f);
    uint8_t *data = pattern(MIB, 7);
    uint64_t other = make_block(&f, "others", data, MIB), writer, reader = open_read(&f, other), half = create(&f, "half", &writer);
    CHECK(open_handles() == 2 && writer >> 22 != 1 && writer >> 22 == (reader >> 22) + 1);
    struct fuse_release_in in = {.fh = writer};
    struct fuse_fsync_in sync = {.fh = writer};
    struct fuse_flush_in flush = {.fh = writer};
    struct fuse_fallocate_in room = {.fh = writer, .length = MIB};
    struct fuse_setattr_in cut = {.valid = FATTR_SIZE | FATTR_FH, .fh = writer};
    CHECK(ask(&f, FUSE_RELEASE, other, &in, sizeof(in), NULL, 0) == 0);
    CHECK(ask(&f, FUSE_RELEASEDIR, half, &in, sizeof(in), NULL, 0) == 0);
    CHECK(open_handles() == 2);
    CHECK(ask(&f, FUSE_FLUSH, other, &flush, sizeof(flush), NULL, 0) == -EBADF);
    CHECK(ask(&f, FUSE_FSYNC, other, &sync, sizeof(sync), NULL, 0) == -EBADF);
    CHECK(ask(&f, FUSE_FALLOCATE, other, &room, sizeof(room), NULL, 0) == -EBADF);
    CHECK(ask(&f, FUSE_SETATTR, other, &cut, sizeof(cut), NULL, 0) == -EBADF);
    cut.fh = reader; /* its own, and open for reading alone */
    CHECK(ask(&f, FUSE_SETATTR, other, &cut, sizeof(cut), NULL, 0) == -EBADF);
    CHECK(write_at(&f, other, writer, 0, data, 100) == -EBADF);
    CHECK(read_check(&f, other, writer, 0, 65536, 0, data, MIB) == 0); /* of the inode that was asked for */
    in.fh = writer ^ (uint64_t)1 << 63;
    CHECK(ask(&f, FUSE_RELEASE, half, &in, sizeof(in), NULL, 0) == 0 && open_handles() == 2);
    CHECK(write_at(&f, half, writer, 0, data, 5000) == 0);
    release(&f, other, reader);
    release(&f, half, writer);
    CHECK(open_handles() == 0);
    front_end(&f);
    wait_gone(number);
    CHECK(kvfs_inode_remove(plane, half) == 0);
    free(data);
}

static void test_faults(void) {
    struct front f;
    front_start(&f, path, 128);
    fuse_init(&f);
    uint64_t size = 2 * MIB;
    uint8_t *data = pattern(size, 99);
    uint64_t inode = make_block(&f, "faulty", data, size), fh = open_read(&f, inode);
    CHECK(read_check(&f, inode, fh, 0, MIB, 0, data, size) == 0);
    const struct {
        uint32_t kind, value;
        const char *name;
    } faults[] = {{KVFS_FAULT_ERROR, EIO, "error"},
                  {KVFS_FAULT_SHORT, 0, "short read"},
                  {KVFS_FAULT_FLIP, 4097, "flipped bit"},
                  {KVFS_FAULT_DELAY, 1200 * slowness(), "silence"}};
    for (unsigned i = 0; i < 4; i++) {
        fault(faults[i].kind, 1, faults[i].value);
        uint64_t began = now_ns();
        CHECK(read_check(&f, inode, fh, MIB, MIB, 0, data, size) == -EIO);
        uint64_t took = now_ns() - began;
        /* The guest's pages are the device's until it has answered, or the answer would be written over what they are used for next. */
        CHECK(took < 5000000000ull * slowness() && (faults[i].kind != KVFS_FAULT_DELAY || took > 1100000000ull * slowness()));
        if (faults[i].kind == KVFS_FAULT_DELAY) { /* while a device is stuck reads go through our own memory, and have a deadline */
            usleep(600000 * slowness());          /* else it is the same read asked again, and its deadline is over */
            began = now_ns();
            CHECK(read_check(&f, inode, fh, MIB, MIB, 0, data, size) == -EIO);
            CHECK(now_ns() - began < 1100000000ull * slowness());
            usleep(600000 * slowness());
        }
        fault(KVFS_FAULT_NONE, 3, 0);
        CHECK(read_check(&f, inode, fh, MIB, MIB, 0, data, size) == 0);
        printf("ok a device's %s is EIO to a guest, and clean pages\n", faults[i].name);
    }
    CHECK(statistics(number).io_errors >= 4);
    atomic_store(&plane->array.stuck_until_ns, 0);
    front_end(&f);
    wait_gone(number);
    free(data);
}

struct hostile {
    const char *name;
    struct vring_desc desc[4];
    uint16_t head;
};

static void test_hostile_chains(void) {
    const uint64_t good = FRONT_GUEST + REQUEST_AT, end = FRONT_GUEST + FRONT_MEMORY;
    const uint16_t NEXT = VRING_DESC_F_NEXT, WRITE = VRING_DESC_F_WRITE, INDIRECT = VRING_DESC_F_INDIRECT;
    const struct hostile cases[] = {
        {"a loop", {{good, 40, NEXT, 1}, {good, 40, NEXT, 0}}, 0},
        {"a loop of itself", {{good, 0, NEXT, 0}}, 0},
        {"an address below", {{FRONT_GUEST - 8, 40, 0, 0}}, 0},
        {"an address beyond", {{end - 8, 40, 0, 0}}, 0},
        {"an address that wraps", {{UINT64_MAX - 8, 40, 0, 0}}, 0},
        {"a huge length", {{good, UINT32_MAX, 0, 0}}, 0},
        {"huge lengths together", {{FRONT_GUEST, 12u << 20, NEXT, 1}, {FRONT_GUEST, 12u << 20, 0, 0}}, 0},
        {"writable before readable", {{good, 64, (uint16_t)(WRITE | NEXT), 1}, {good, 40, 0, 0}}, 0},
        {"a next beyond the queue", {{good, 40, NEXT, 128}}, 0},
        {"a head beyond the queue", {{good, 40, 0, 0}}, 128},
        {"an indirect table of no entry", {{good, 0, INDIRECT, 0}}, 0},
        {"an indirect table of half an entry", {{good, 24, INDIRECT, 0}}, 0},
        {"an indirect table too long", {{good, 1025 * 16, INDIRECT, 0}}, 0},
        {"an indirect table beyond", {{end - 16, 64, INDIRECT, 0}}, 0},
        {"an indirect table with a next", {{good, 16, (uint16_t)(INDIRECT | NEXT), 1}, {good, 40, 0, 0}}, 0},
        {"an indirect table in another", {{FRONT_GUEST + TABLE_AT, 16, INDIRECT, 0}}, 0},
        {"an indirect loop", {{FRONT_GUEST + TABLE_AT + 16, 32, INDIRECT, 0}}, 0},
    };
    struct front f;
    front_start(&f, path, 128);
    fuse_init(&f);
    for (unsigned i = 0; i < sizeof(cases) / sizeof(cases[0]) + 2; i++) {
        struct front_queue *q = &f.queues[1];
        const char *name = i < sizeof(cases) / sizeof(cases[0]) ? cases[i].name : i % 2 ? "an available index that jumps" : "a head that is in use";
        uint64_t before = statistics(number).descriptor_errors, count;
        struct vring_desc *table = (struct vring_desc *)(void *)(f.memory + TABLE_AT);
        table[0] = (struct vring_desc){good, 16, INDIRECT, 0};
        table[1] = (struct vring_desc){good, 40, NEXT, 1};
        table[2] = (struct vring_desc){good, 40, NEXT, 0};
        if (i < sizeof(cases) / sizeof(cases[0])) {
            memcpy(q->desc, cases[i].desc, sizeof(cases[i].desc));
            front_offer(q, cases[i].head);
        } else if (strchr(name, 'j')) {
            __atomic_store_n(&q->avail->idx, (uint16_t)(q->next + 129), __ATOMIC_RELEASE);
            front_kick(q);
        } else { /* twice the same, the first one waits for Python */
            struct piece room = {f.memory + REPLY_AT, 4096, true};
            put(&f, 1, 5, REQUEST_AT, FUSE_MKDIR, 1, "\0\0\0\0\0\0\0\0name", 13, &room, 1, true);
            CHECK(forwarded_request()->opcode == FUSE_MKDIR);
            front_offer(q, 5);
        }
        struct pollfd p = {.fd = q->error, .events = POLLIN};
        CHECK_SAY(poll(&p, 1, 10000) == 1 && read(q->error, &count, 8) == 8, "%s", name);
        CHECK_SAY(statistics(number).descriptor_errors == before + 1 && statistics(number).queues_running == 1, "%s", name);
        /* The driver resets the device: it works again. */
        front_queue_stop(&f, 1);
        front_queue_start(&f, 1, 128, 0, false);
        CHECK_SAY(ask(&f, FUSE_LOOKUP, 1, "nothing", 8, NULL, 0) == -ENOENT, "%s", name);
        printf("ok %s stops the queue, a reset heals it\n", name);
    }
    front_end(&f);
    wait_gone(number);
    struct kvfs_event events[64];
    int n, seen = 0;
    while ((n = kvfs_take_events(plane, events, 64)) > 0)
        for (int i = 0; i < n; i++)
            seen += events[i].type == KVFS_EVENT_GUEST && events[i].inode == (uint64_t)number && events[i].value >> 32 == 1;
    CHECK(seen == 7); /* one for each kind of error: the same one is not told twice */
}

static void test_hostile_requests(void) {
    struct front f;
    front_start(&f, path, 128);
    fuse_init(&f);
    uint8_t *data = pattern(100000, 8);
    uint64_t inode = make_block(&f, "target", data, 100000), fh = open_read(&f, inode);
    char name[600];
    memset(name, 'x', sizeof(name));
    CHECK(ask(&f, FUSE_LOOKUP, 1, name, 300, NULL, 0) == -EINVAL); /* no end */
    name[299] = 0;
    CHECK(ask(&f, FUSE_LOOKUP, 1, name, 300, NULL, 0) == -ENAMETOOLONG);
    static const struct {
        uint32_t opcode, size;
        const char *body;
        int error;
    } cases[] = {
        {FUSE_LOOKUP, 1, "", -EINVAL},
        {FUSE_LOOKUP, 4, "a/b", -EINVAL},
        {FUSE_LOOKUP, 2, ".", -EINVAL},
        {FUSE_LOOKUP, 3, "..", -EINVAL},
        {FUSE_LOOKUP, 0, "", -EINVAL},
        {FUSE_UNLINK, 3, "abc", -EINVAL},
        {FUSE_RMDIR, 3, "..", -EINVAL},
        {FUSE_MKDIR, 8, "\0\0\0\0\0\0\0\0", -EINVAL},
        {FUSE_MKDIR, 12, "\0\0\0\0\0\0\0\0a/b", -EINVAL},
        {FUSE_MKNOD, 17, "\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0n", -EINVAL},
        {FUSE_SYMLINK, 5, "name", -EINVAL},
        {FUSE_SYMLINK, 8, "name\0abc", -EINVAL},
        {FUSE_RENAME, 12, "\1\0\0\0\0\0\0\0old", -EINVAL},
        {FUSE_RENAME2, 23, "\1\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0old\0new", -EINVAL},
        {FUSE_SETXATTR, 16, "\xff\0\0\0\0\0\0\0user.a\0", -EINVAL},
        {FUSE_GETXATTR, 12, "\1\0\0\0\0\0\0\0abcd", -EINVAL},
        {FUSE_REMOVEXATTR, 4, "abcd", -EINVAL},
        {FUSE_READ, 8, "12345678", -EINVAL},
        {FUSE_OPEN, 3, "abc", -EINVAL},
        {FUSE_RELEASEDIR, 4, "abcd", -EINVAL},
        {FUSE_SETATTR, 8, "12345678", -EINVAL},
        {9999, 4, "abcd", -ENOSYS},
        {FUSE_IOCTL, 0, "", -ENOTTY},
        {FUSE_LINK, 13, "\1\0\0\0\0\0\0\0name", -EPERM},
        {FUSE_SETLK, 0, "", -ENOSYS},
        {0, 0, "", -ENOSYS},
    };
    for (unsigned i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        int error = ask(&f, cases[i].opcode, 1, cases[i].body, cases[i].size, NULL, 0);
        CHECK_SAY(error == cases[i].error, "opcode %u, case %u: %d", cases[i].opcode, i, error);
    }
    /* A length that is not the chain's; a reply that has too little room, or none. */
    struct piece room = {f.memory + REPLY_AT, 8, true};
    struct fuse_getattr_in get = {0};
    put(&f, 1, 0, REQUEST_AT, FUSE_GETATTR, inode, &get, sizeof(get), &room, 1, true);
    CHECK(wait_answer(&f, 1, REQUEST_AT, NULL) == -EIO);
    struct fuse_read_in read = {.fh = fh, .offset = 0, .size = MIB};
    room.size = 4096;
    put(&f, 1, 0, REQUEST_AT, FUSE_READ, inode, &read, sizeof(read), &room, 1, true);
    CHECK(wait_answer(&f, 1, REQUEST_AT, NULL) == -EIO);
    struct fuse_read_in beyond[] = {{.fh = fh, .offset = UINT64_MAX - 100, .size = 4096},
                                    {.fh = fh, .offset = 1ull << 62, .size = 65536},
                                    {.fh = fh, .offset = 0, .size = UINT32_MAX},
                                    {.fh = fh ^ 1ull << 40, .offset = 1ull << 45, .size = 4096}};
    for (unsigned i = 0; i < 4; i++) {
        uint32_t length = 0;
        put(&f, 1, 0, REQUEST_AT, FUSE_READ, inode, &beyond[i], sizeof(read), &room, 1, true);
        int error = wait_answer(&f, 1, REQUEST_AT, &length);
        CHECK_SAY(i == 2 ? error == -EINVAL : (error == 0 && length == 0) || error == -EINVAL, "case %u: %d", i, error);
    }
    uint32_t head, length;
    struct front_queue *q = &f.queues[1];
    struct piece bare[2] = {{f.memory + REQUEST_AT, 12, false}, {f.memory + REPLY_AT, 4, true}};
    uint64_t errors = statistics(number).descriptor_errors;
    front_chain(&f, q, 0, NULL, bare, 2); /* shorter than any header, and no room */
    front_offer(q, 0);
    CHECK(front_wait(q, 10000, &head, &length) && head == 0 && length == 0);
    CHECK(statistics(number).descriptor_errors == errors + 1);
    /* The queue of high priority: FORGET has no reply, and more descriptors than it needs do no harm. */
    struct {
        struct fuse_in_header in;
        struct fuse_forget_in forget;
    } forget = {.in = {.len = sizeof(forget), .opcode = FUSE_FORGET, .nodeid = inode}};
    memcpy(f.memory + REQUEST_AT, &forget, sizeof(forget));
    struct piece one = {f.memory + REQUEST_AT, sizeof(forget), false};
    front_chain(&f, &f.queues[0], 3, NULL, &one, 1);
    front_offer(&f.queues[0], 3);
    CHECK(front_wait(&f.queues[0], 10000, &head, &length) && head == 3 && length == 0);
    CHECK(read_check(&f, inode, fh, 0, 65536, 0, data, 100000) == 0);
    front_end(&f);
    wait_gone(number);
    free(data);
}

static void test_gone_in_flight(void) {
    uint64_t size = MIB;
    uint8_t *data = pattern(size, 31);
    struct front f;
    struct piece room, pieces[400];
    struct fuse_in_header *got;
    front_start(&f, path, 128);
    fuse_init(&f);
    uint64_t inode = make_block(&f, "inflight", data, size);
    for (int round = 0; round < 4; round++) {
        uint64_t fh = open_read(&f, inode), writer;
        char name[32];
        snprintf(name, sizeof(name), "half%d", round);
        uint64_t half = create(&f, name, &writer);
        CHECK(write_at(&f, half, writer, 0, data, 5000) == 0 && open_handles() == 2);
        room = (struct piece){f.memory + REPLY_AT, 4096, true};
        put(&f, 1, 1, REQUEST_AT + 0x10000, FUSE_OPENDIR, 1, &(struct fuse_open_in){0}, sizeof(struct fuse_open_in), &room, 1, true);
        got = forwarded_request();
        CHECK(got->opcode == FUSE_OPENDIR);
        uint64_t id = got->unique;
        fault(KVFS_FAULT_DELAY, 1, 300);
        struct fuse_read_in in = {.fh = fh, .offset = 0, .size = MIB};
        uint32_t count = scattered(&f, MIB, 0, pieces);
        put(&f, 1, 2, REQUEST_AT + 0x20000, FUSE_READ, inode, &in, sizeof(in), pieces, count, true);
        usleep(50000);
        if (round % 2 == 0) { /* memory goes first, then the front end */
            CHECK(vu_region(&f, VU_REM_MEM_REG, 0, FRONT_MEMORY) == 0);
            CHECK(statistics(number).queues_running == 0);
        }
        if (round == 3) { /* a reset: waits for the device, and answers both */
            front_queue_stop(&f, 1);
            CHECK(f.queues[1].used->idx == f.queues[1].next);
        }
        front_end(&f);
        wait_gone(number);
        CHECK(open_handles() == 0);
        struct fuse_open_out out = {.fh = 1};
        session_reply(id, 0, &out, sizeof(out)); /* late: dropped, and closed again */
        do
            got = forwarded_request();
        while (got->opcode != FUSE_RELEASEDIR);
        CHECK(got->nodeid == 1 && open_handles() == 0);
        fault(KVFS_FAULT_NONE, 3, 0);
        CHECK(kvfs_inode_remove(plane, half) == 0);
        front_start(&f, path, 128);
        fuse_init(&f);
        fh = open_read(&f, inode);
        CHECK(read_check(&f, inode, fh, 0, MIB, 0, data, size) == 0);
        release(&f, inode, fh);
    }
    front_end(&f);
    wait_gone(number);
    free(data);
}

/* A back end's death is played by a hang-up; the front end has kept the requests in flight, and memory and rings are as they were. */
static void test_inflight_tracking(void) {
    struct front f;
    front_connect(&f, path);
    front_negotiate(&f);
    CHECK(vu_region(&f, VU_ADD_MEM_REG, 0, FRONT_MEMORY) == 0);
    struct {
        uint64_t map_size, map_offset;
        uint16_t queue_count, queue_size;
    } layout = {0, 0, 2, 128};
    int inflight = -1;
    CHECK(vu_send(&f, VU_GET_INFLIGHT_FD, 0, &layout, sizeof(layout), NULL, 0) == 0);
    CHECK(vu_receive(&f, &layout, sizeof(layout), &inflight) > 0 && inflight >= 0 && layout.map_size >= 2 * 128 * 16);
    CHECK(vu_tell(&f, VU_SET_INFLIGHT_FD, &layout, sizeof(layout), &inflight, 1) == 0);
    for (uint32_t i = 0; i < 2; i++)
        front_queue_start(&f, i, 128, 65530, false); /* the indexes wrap on the way */
    fuse_init(&f);
    for (int i = 0; i < 10; i++)
        CHECK(ask(&f, FUSE_LOOKUP, 1, "nothing", 8, NULL, 0) == -ENOENT);
    struct piece room = {f.memory + REPLY_AT, 4096, true};
    put(&f, 1, 7, REQUEST_AT + 0x10000, FUSE_UNLINK, 1, "name", 5, &room, 1, true);
    forwarded_call(FUSE_UNLINK);
    close(f.fd);
    wait_gone(number);
    struct front again;
    front_connect(&again, path);
    close(again.memory_fd);
    munmap(again.memory, FRONT_MEMORY);
    int fd = again.fd;
    again = f;
    again.fd = fd;
    front_negotiate(&again);
    CHECK(vu_region(&again, VU_ADD_MEM_REG, 0, FRONT_MEMORY) == 0);
    CHECK(vu_tell(&again, VU_SET_INFLIGHT_FD, &layout, sizeof(layout), &inflight, 1) == 0);
    for (uint32_t i = 0; i < 2; i++)
        front_queue_start(&again, i, 128, 0, true); /* a base that is wrong: what was tracked counts */
    kvfs_answer(plane, forwarded_call(FUSE_UNLINK).id, -ENOENT, 0, NULL);
    uint32_t head, length;
    CHECK(front_wait(&again.queues[1], 10000, &head, &length) && head == 7 && length == 16);
    CHECK(ask(&again, FUSE_LOOKUP, 1, "nothing", 8, NULL, 0) == -ENOENT);
    close(inflight);
    front_end(&again);
    wait_gone(number);
}

static struct fuse_attr_out attributes(struct front *f, uint64_t inode) {
    struct fuse_getattr_in in = {0};
    struct fuse_attr_out out;
    CHECK(ask(f, FUSE_GETATTR, inode, &in, sizeof(in), &out, sizeof(out)) == 0);
    return out;
}

/* A guest's one-second promise about an open block stays true for that long, whoever wants to rewrite it. */
static void test_promise(void) {
    struct front f;
    front_start(&f, path, 128);
    fuse_init(&f);
    uint8_t *data = pattern(70000, 3);
    uint64_t inode = make_block(&f, "promised", data, 70000);
    CHECK(attributes(&f, inode).attr_valid == 0); /* not open: nobody would know of the promise */
    for (int keep = 0; keep < 2; keep++) {
        struct kvfs_completion done;
        uint64_t fh = open_read(&f, inode), began = now_ns();
        CHECK(attributes(&f, inode).attr_valid == 1);
        CHECK(kvfs_file_rewrite(plane, 9, inode, keep) == 0);
        struct fuse_attr_out out = attributes(&f, inode);
        CHECK(out.attr_valid == 0 && out.attr.size == 70000);
        CHECK(wait_completion(plane, &done, 20000) && done.result == 0);
        CHECK(now_ns() - began >= 1000000000ull);
        out = attributes(&f, inode);
        CHECK(out.attr_valid == 0 && out.attr.size == (keep ? 70000 : 0));
        CHECK(read_check(&f, inode, fh, 0, 65536, 0, data, keep ? 70000 : 0) == 0);
        release(&f, inode, fh);
        CHECK(kvfs_file_discard(plane, inode) == 0);
        began = now_ns();
        CHECK(kvfs_file_rewrite(plane, 9, inode, keep) == 0); /* nobody was told anything: at once */
        CHECK(wait_completion(plane, &done, 20000) && done.result == 0 && now_ns() - began < 1000000000ull * slowness());
        CHECK(kvfs_file_discard(plane, inode) == 0);
    }
    front_end(&f);
    wait_gone(number);
    free(data);
}

struct storm {
    const char *path;
    uint64_t inode;
    const uint8_t *data;
    uint64_t size;
    unsigned seed;
    uint64_t done;
};

/* A guest with many reads at once, on both request queues; now and then it vanishes in the middle. */
static void *storm_main(void *argument) {
    struct storm *s = argument;
    uint64_t seed = s->seed;
    for (int life = 0; life < 6; life++) {
        struct front f;
        front_start(&f, s->path, 128);
        front_queue_start(&f, 2, 128, 0, false);
        for (uint32_t batch = 0; batch < 12; batch++) {
            struct {
                uint64_t offset;
                uint8_t *at;
            } reads[16];
            for (uint16_t i = 0; i < 16; i++) {
                reads[i].offset = random_below(&seed, s->size / 4096) * 4096;
                reads[i].at = f.memory + OUT_AT + i * 0x100000ull;
                struct fuse_read_in in = {.fh = 77, .offset = reads[i].offset, .size = 262144};
                struct piece room = {reads[i].at, 262144, true};
                put(&f, 1 + i % 2, (uint16_t)(i * 8), REQUEST_AT + i * 0x10000ull, FUSE_READ, s->inode, &in, sizeof(in), &room, 1, i % 4 < 2);
            }
            if (batch == 11 && life % 2)
                break; /* gone, with 16 reads under way */
            for (uint32_t i = 0; i < 16; i++) {
                uint32_t head, length;
                CHECK(front_wait(&f.queues[1 + i % 2], 20000, &head, &length) && head < 128 && head % 8 == 0);
                head /= 8;
                uint64_t want = min_u64(262144, s->size - reads[head].offset);
                CHECK(length == sizeof(struct fuse_out_header) + want);
                CHECK(memcmp(reads[head].at, s->data + reads[head].offset, want) == 0);
                s->done++;
            }
        }
        front_end(&f);
    }
    return NULL;
}

static void test_two_guests(void) {
    uint64_t size = 4 * MIB;
    uint8_t *data = pattern(size, 55);
    struct front f;
    front_start(&f, path, 128);
    fuse_init(&f);
    uint64_t inode = make_block(&f, "shared", data, size);
    front_end(&f);
    wait_gone(number);
    atomic_store(&plane->array.stuck_until_ns, 0); /* on a slow machine an earlier test may have missed a deadline */
    struct storm storms[2] = {{path, inode, data, size, 1, 0}, {other_path, inode, data, size, 2, 0}};
    pthread_t threads[2];
    for (int i = 0; i < 2; i++)
        CHECK(pthread_create(&threads[i], NULL, storm_main, &storms[i]) == 0);
    for (int i = 0; i < 2; i++)
        CHECK(pthread_join(threads[i], NULL) == 0 && storms[i].done > 1000);
    wait_gone(number);
    wait_gone(other_number);
    struct kvfs_virtiofs_statistics other = statistics(other_number);
    CHECK_SAY(other.zero_copy_bytes > 0 && other.descriptor_errors == 0, "%llu bytes without a copy, %llu copied, %llu errors",
              (unsigned long long)other.zero_copy_bytes, (unsigned long long)other.copied_bytes, (unsigned long long)other.descriptor_errors);
    free(data);
}

/* A front end that cuts its memory off: its queue breaks, the daemon and other guests go on. */
static void test_cut_memory(void) {
    struct front f, other;
    front_start(&other, other_path, 128);
    fuse_init(&other);
    for (int round = 0; round < 3; round++) {
        front_start(&f, path, 128);
        fuse_init(&f);
        CHECK(ftruncate(f.memory_fd, 0) == 0); /* from here on the double may not touch it either */
        front_kick(&f.queues[1]);
        struct pollfd p = {.fd = f.queues[1].error, .events = POLLIN};
        CHECK(poll(&p, 1, 10000) == 1);
        fuse_init(&other);
        front_end(&f);
        wait_gone(number);
    }
    CHECK(statistics(number).descriptor_errors >= 3);
    front_end(&other);
    wait_gone(other_number);
}

/* Rings as the oldest drivers have them: no EVENT_IDX, no indirect descriptors. */
static void test_plain_rings(void) {
    struct front f;
    front_connect(&f, path);
    f.features = 1ull << VIRTIO_F_VERSION_1 | 1ull << 30;
    front_negotiate(&f);
    uint64_t table[1 + 4 * 2] = {2,
                                 FRONT_GUEST,
                                 FRONT_MEMORY / 2,
                                 FRONT_USER,
                                 0,
                                 FRONT_GUEST + FRONT_MEMORY / 2,
                                 FRONT_MEMORY / 2,
                                 FRONT_USER + FRONT_MEMORY / 2,
                                 FRONT_MEMORY / 2};
    int fds[2] = {f.memory_fd, f.memory_fd};
    CHECK(vu_tell(&f, VU_SET_MEM_TABLE, table, sizeof(table), fds, 2) == 0);
    for (uint32_t i = 0; i < 2; i++)
        front_queue_start(&f, i, 8, 0, false);
    struct front_queue *q = &f.queues[1];
    for (int i = 0; i < 300; i++) {
        /* The name lies across two regions. */
        uint8_t *name = f.memory + FRONT_MEMORY / 2 - 3;
        memcpy(name, "nothing", 8);
        struct fuse_in_header in = {.len = sizeof(in) + 8, .opcode = FUSE_LOOKUP, .unique = 1, .nodeid = 1};
        memcpy(f.memory + REQUEST_AT, &in, sizeof(in));
        struct piece pieces[3] = {{f.memory + REQUEST_AT, sizeof(in), false}, {name, 8, false}, {f.memory + REPLY_AT, 16, true}};
        front_chain(&f, q, (uint16_t)(i % 2 * 4), NULL, pieces, 3);
        front_offer(q, (uint16_t)(i % 2 * 4));
        uint32_t head, length;
        struct fuse_out_header out;
        CHECK(front_wait(q, 10000, &head, &length) && length == 16);
        memcpy(&out, f.memory + REPLY_AT, sizeof(out));
        CHECK(out.error == -ENOENT);
    }
    q->desc[0] = (struct vring_desc){FRONT_GUEST + TABLE_AT, 16, VRING_DESC_F_INDIRECT, 0}; /* was not negotiated */
    front_offer(q, 0);
    struct pollfd p = {.fd = q->error, .events = POLLIN};
    CHECK(poll(&p, 1, 10000) == 1);
    front_end(&f);
    wait_gone(number);
}

/* A front end may lose a kick or a signal, or change descriptors while one is on its way: a pause, never a hang. */
static void test_lost_signals(void) {
    struct front f;
    front_start(&f, path, 128);
    fuse_init(&f);
    struct front_queue *q = &f.queues[1];
    uint16_t *used_event = (uint16_t *)(void *)&q->avail->ring[q->size];
    struct pollfd called = {.fd = q->call, .events = POLLIN};
    struct piece room = {f.memory + REPLY_AT, 4096, true};
    uint64_t count, until = now_ns() + 20000000000ull;
    uint32_t head, length;
    *used_event = (uint16_t)(q->seen + 100); /* as if the signal had been lost */
    while (poll(&called, 1, 0) == 1)
        CHECK(read(q->call, &count, 8) == 8);
    put(&f, 1, 0, REQUEST_AT, FUSE_LOOKUP, 1, "nothing", 8, &room, 1, true);
    while (__atomic_load_n(&q->used->idx, __ATOMIC_ACQUIRE) == q->seen && now_ns() < until)
        usleep(1000);
    CHECK(poll(&called, 1, 200) == 0);
    CHECK(poll(&called, 1, 20000) == 1);
    CHECK(front_wait(q, 1000, &head, &length));
    *used_event = q->seen; /* heard: no more */
    while (poll(&called, 1, 0) == 1)
        CHECK(read(q->call, &count, 8) == 8);
    CHECK(poll(&called, 1, 2500) == 0);

    int kick = q->kick, nobody = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    q->kick = nobody;
    put(&f, 1, 0, REQUEST_AT, FUSE_LOOKUP, 1, "nothing", 8, &room, 1, true);
    q->kick = kick;
    CHECK(front_wait(q, 20000, &head, &length));

    uint64_t payload = 1;
    CHECK(vu_tell(&f, VU_SET_VRING_CALL, &payload, 8, &nobody, 1) == 0);
    called.fd = nobody;
    CHECK(read(nobody, &count, 8) == 8); /* the kick above */
    CHECK(vu_tell(&f, VU_SET_VRING_CALL, &payload, 8, &nobody, 1) == 0);
    CHECK(poll(&called, 1, 1000) == 1);
    close(q->call);
    q->call = nobody;
    front_end(&f);
    wait_gone(number);
}

/* A front end that fills the eventfds it is to be signalled by, and makes them wait for room: nobody waits. */
static void test_deaf_front_end(void) {
    struct front f, other;
    front_start(&f, path, 128);
    front_start(&other, other_path, 128);
    fuse_init(&f);
    fuse_init(&other);
    int deaf = eventfd(0, EFD_CLOEXEC);
    uint64_t full = UINT64_MAX - 1, queue = 1, fh;
    CHECK(deaf >= 0 && write(deaf, &full, 8) == 8);
    CHECK(vu_tell(&f, VU_SET_VRING_CALL, &queue, 8, &deaf, 1) == 0 && vu_tell(&f, VU_SET_VRING_ERR, &queue, 8, &deaf, 1) == 0);
    CHECK(fcntl(deaf, F_SETFL, 0) == 0);
    alarm(60);               /* or a wait would be for ever */
    create(&f, "deaf", &fh); /* this thread answers, as Python's does */
    for (int i = 0; i < 10; i++)
        CHECK(ask(&f, FUSE_LOOKUP, 1, "nothing", 8, NULL, 0) == -ENOENT);
    struct front_queue *q = &f.queues[1];
    q->desc[0] = (struct vring_desc){0, 40, 0, 0};
    front_offer(q, 0);
    uint64_t until = now_ns() + 20000000000ull;
    while (statistics(number).queues_running == 2 && now_ns() < until)
        usleep(1000);
    CHECK(statistics(number).queues_running == 1);
    CHECK(ask(&other, FUSE_LOOKUP, 1, "nothing", 8, NULL, 0) == -ENOENT);
    front_end(&f);
    wait_gone(number);
    alarm(0);
    front_end(&other);
    wait_gone(other_number);
    close(deaf);
}

/* Of another filesystem than the kernel's own in memory: refused, unless the operator allows it. */
static void test_foreign_memory(void) {
    char other_fs[128];
    snprintf(other_fs, sizeof(other_fs), "./kvfs-memory-XXXXXX");
    int file = mkstemp(other_fs), pipes[2], opened = -1;
    struct statfs fs;
    CHECK(file >= 0 && unlink(other_fs) == 0 && ftruncate(file, (off_t)FRONT_MEMORY) == 0 && fstatfs(file, &fs) == 0 && pipe(pipes) == 0);
    if (fcntl(file, F_GET_SEALS) >= 0) {
        printf("skipped test_foreign_memory: the working directory is on a tmpfs\n");
        close(file);
        close(pipes[0]);
        close(pipes[1]);
        return;
    }
    struct {
        uint64_t map_size, map_offset;
        uint16_t queue_count, queue_size;
    } layout = {65536, 0, 2, 128};
    struct kvfs_virtiofs_config config = {
        .tag = "allowed", .queue_count = 1, .queue_size_max = 128, .memory_type_count = 2, .memory_types = {1, (uint64_t)fs.f_type}};
    char allowed_path[sizeof(path)];
    snprintf(allowed_path, sizeof(allowed_path), "%s/allowed", directory);
    int allowed = listen_with(allowed_path, &config);
    for (int i = 0; i < 2; i++) {
        struct front f;
        front_connect(&f, i ? allowed_path : path);
        front_negotiate(&f);
        opened = f.memory_fd;
        uint64_t refused = statistics(i ? allowed : number).protocol_errors;
        int foreign[] = {pipes[0], f.fd, file};
        for (int k = 0; k < 3; k++) {
            f.memory_fd = foreign[k];
            uint64_t expected = k < 2 || i == 0, table[5] = {1, FRONT_GUEST, FRONT_MEMORY, FRONT_USER, 0};
            CHECK_SAY(vu_region(&f, VU_ADD_MEM_REG, 0, FRONT_MEMORY) == expected, "%d %d", i, k);
            CHECK_SAY(vu_tell(&f, VU_SET_MEM_TABLE, table, sizeof(table), &foreign[k], 1) == expected, "%d %d", i, k);
            CHECK_SAY(vu_tell(&f, VU_SET_INFLIGHT_FD, &layout, sizeof(layout), &foreign[k], 1) == expected, "%d %d", i, k);
        }
        CHECK(statistics(i ? allowed : number).protocol_errors == refused + (i ? 6 : 9));
        f.memory_fd = opened;
        front_end(&f);
        wait_gone(i ? allowed : number);
    }
    CHECK(kvfs_virtiofs_remove(plane, allowed) == 0);
    struct kvfs_virtiofs_statistics s;
    uint64_t until = now_ns() + 20000000000ull;
    while (kvfs_virtiofs_statistics(plane, allowed, &s) == 0 && now_ns() < until)
        usleep(1000);
    CHECK(kvfs_virtiofs_statistics(plane, allowed, &s) == -ENOENT && unlink(allowed_path) == 0);
    close(file);
    close(pipes[0]);
    close(pipes[1]);
}

/* Rings that a front end moves, lengthens, or takes the memory of, while their queue is looked at. */
static void test_rings_that_move(void) {
    struct front f;
    front_start(&f, path, 128);
    fuse_init(&f);
    struct vring {
        uint32_t index, flags;
        uint64_t desc, used, avail, log;
    } good = {1, 0, FRONT_USER + FRONT_RINGS, FRONT_USER + FRONT_RINGS + 0x10000, FRONT_USER + FRONT_RINGS + 0x8000, 0}, bad = good;
    bad.avail = FRONT_USER + FRONT_MEMORY;
    for (int i = 0; i < 50; i++) {
        CHECK(vu_tell(&f, VU_SET_VRING_ADDR, &bad, sizeof(bad), NULL, 0) == 1 && statistics(number).queues_running == 1);
        front_kick(&f.queues[1]);
        CHECK(vu_tell(&f, VU_SET_VRING_ADDR, &good, sizeof(good), NULL, 0) == 0 && statistics(number).queues_running == 2);
        CHECK(ask(&f, FUSE_LOOKUP, 1, "nothing", 8, NULL, 0) == -ENOENT);
    }
    /* Longer than what was asked for when they were found to lie in the guest's memory. */
    front_queue_stop(&f, 1);
    struct vring end = {1, 0, FRONT_USER, FRONT_USER + FRONT_MEMORY - 8 * 8 - 8, FRONT_USER + 0x8000, 0};
    CHECK(vu_state(&f, VU_SET_VRING_NUM, 1, 8) == 0 && vu_tell(&f, VU_SET_VRING_ADDR, &end, sizeof(end), NULL, 0) == 0);
    CHECK(vu_state(&f, VU_SET_VRING_NUM, 1, 1024) == 0 && vu_state(&f, VU_SET_VRING_BASE, 1, 0) == 0);
    uint64_t queue = 1;
    CHECK(vu_tell(&f, VU_SET_VRING_KICK, &queue, 8, &f.queues[1].kick, 1) == 0 && vu_state(&f, VU_SET_VRING_ENABLE, 1, 1) == 0);
    CHECK(statistics(number).queues_running == 1);
    CHECK(vu_state(&f, VU_SET_VRING_NUM, 1, 8) == 0 && statistics(number).queues_running == 2);
    front_end(&f);
    wait_gone(number);
    /* At the front end's address 0, which is one as any other. */
    front_connect(&f, path);
    front_negotiate(&f);
    uint64_t region[5] = {0, FRONT_GUEST, FRONT_MEMORY, 0, 0};
    CHECK(vu_tell(&f, VU_ADD_MEM_REG, region, sizeof(region), &f.memory_fd, 1) == 0);
    struct vring zero = {1, 0, 0x10000, 0, 0x8000, 0};
    CHECK(vu_state(&f, VU_SET_VRING_NUM, 1, 8) == 0 && vu_tell(&f, VU_SET_VRING_ADDR, &zero, sizeof(zero), NULL, 0) == 0);
    f.queues[1].kick = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    f.queues[1].call = f.queues[1].error = dup(f.queues[1].kick);
    CHECK(vu_tell(&f, VU_SET_VRING_KICK, &queue, 8, &f.queues[1].kick, 1) == 0 && vu_state(&f, VU_SET_VRING_ENABLE, 1, 1) == 0);
    CHECK(statistics(number).queues_running == 1);
    CHECK(vu_tell(&f, VU_REM_MEM_REG, region, sizeof(region), NULL, 0) == 0 && statistics(number).queues_running == 0);
    front_kick(&f.queues[1]);
    CHECK(vu_ask(&f, VU_GET_QUEUE_NUM) == 4);
    front_end(&f);
    wait_gone(number);
}

static void test_end(void) {
    struct front f;
    front_start(&f, path, 128);
    fuse_init(&f);
    struct piece room = {f.memory + REPLY_AT, 4096, true};
    put(&f, 1, 3, REQUEST_AT + 0x10000, FUSE_UNLINK, 1, "name", 5, &room, 1, true);
    forwarded_call(FUSE_UNLINK);
    CHECK(kvfs_virtiofs_remove(plane, number) == 0 && kvfs_virtiofs_remove(plane, 40) == -ENOENT);
    uint32_t head, length;
    CHECK(front_wait(&f.queues[1], 20000, &head, &length) && head == 3 && length == 16); /* the session's deadline: answered, not lost */
    uint64_t value;
    CHECK(vu_receive(&f, &value, 8, NULL) == -1);
    front_end(&f);
    struct kvfs_virtiofs_statistics s;
    uint64_t until = now_ns() + 20000000000ull;
    while (kvfs_virtiofs_statistics(plane, number, &s) == 0 && now_ns() < until)
        usleep(1000);
    CHECK(kvfs_virtiofs_statistics(plane, number, &s) == -ENOENT && transport_count() == 1);
    CHECK(unlink(path) == 0 && listen_at(path) == number); /* its number is free again */
}

int main(void) {
    slowness(); /* measured now: later it would take time from what is timed */
    snprintf(directory, sizeof(directory), "%.32s/kvfs-virtiofs-XXXXXX", scratch());
    CHECK(mkdtemp(directory));
    start();
    RUN(test_protocol);
    RUN(test_blocks);
    RUN(test_handles_of_others);
    RUN(test_plain_rings);
    RUN(test_lost_signals);
    RUN(test_hostile_chains);
    RUN(test_hostile_requests);
    RUN(test_faults);
    RUN(test_gone_in_flight);
    RUN(test_inflight_tracking);
    RUN(test_promise);
    RUN(test_two_guests);
    RUN(test_cut_memory);
    RUN(test_deaf_front_end);
    RUN(test_foreign_memory);
    RUN(test_rings_that_move);
    RUN(test_end);
    struct front f; /* the plane ends under a guest */
    front_start(&f, other_path, 128);
    fuse_init(&f);
    kvfs_plane_destroy(plane);
    front_end(&f);
    close(session);
    for (uint32_t i = 0; i < DEVICES; i++) {
        char device[200];
        snprintf(device, sizeof(device), "%s/device%u", directory, i);
        unlink(device);
        close(device_fds[i]);
    }
    unlink(path);
    unlink(other_path);
    rmdir(directory);
    printf("ok the plane comes down under a guest with nothing left\n");
    return 0;
}
