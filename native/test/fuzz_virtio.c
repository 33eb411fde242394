/* sources: base block names io content pod frames fuse virtiofs plane.c */
/* libFuzzer: a guest's rings and FUSE requests, as wild as it likes. The input is a program of small steps. They write descriptors, requests and
 * indexes into guest memory, and let the transport take them, without its threads. One queue is well formed (the fuzzer gets to the requests), one is
 * raw bytes (it gets to the descriptors). Other steps are a front end's messages to a second guest, and Python's work meanwhile. Python makes,
 * renames, removes, seals and spills files, and has a slab. Where a step says so, a thread changes the rings, the descriptors and the requests while
 * they are read.
 *
 * Without libFuzzer (gcc) FUZZ_DRIVER makes it a program that makes up inputs: fuzz_virtio SECONDS [SEED], or fuzz_virtio FILE... */
#include "virtiofs/virtio.h"

#include <linux/virtio_config.h>
#include <stdio.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include "check.h"
#include "completions.h"

#define MEMORY ((uint64_t)1 << 20)
#define GUEST 0x10000ull
#define SIZE 16u
#define SECRET 7

static struct kvfs_plane *plane;
static struct guest *guest;
static uint8_t *memory;
static int session;
static struct guest *front_guest; /* of the front end's messages */
static int shared, other_file;
static uint64_t handles[3];                       /* of the file that is being written, of the sealed one, of the slab */
static uint64_t slab, next_inode = 100, named[4]; /* inodes; of the names a to d */
static uint32_t next_page = 2000;
static atomic_bool flipping;
static struct kvfs_names *names;
static struct kvfs_place *places;

static void *flip_main(void *unused) {
    uint64_t seed = 1;
    (void)unused;
    while (!atomic_load(&plane->stopping)) {
        if (!atomic_load(&flipping)) {
            usleep(50);
            continue;
        }
        uint64_t word = random_next(&seed), place = word >> 32;
        place = place % 3 == 0 ? place % 0x8000 : place % 3 == 1 ? 0x8000 + place % 0x10000 : 0x20000 + place % 0x14000;
        __atomic_store_n(memory + place, (uint8_t)(word % 4 ? word >> 8 & 0x1f : word >> 8), __ATOMIC_RELAXED);
    }
    return NULL;
}

static size_t make_record(uint8_t *out, uint64_t inode, const char *name, size_t name_size, uint64_t size, uint8_t flags, uint32_t page,
                          uint32_t header_pages) {
    struct kvfs_inode_record r = {.record_size = (uint32_t)(sizeof(r) + round_up(name_size, 8)),
                                  .kind = KVFS_KIND_FILE,
                                  .flags = flags,
                                  .name_size = (uint16_t)name_size,
                                  .inode = inode,
                                  .parent = 1,
                                  .version = inode,
                                  .size = size,
                                  .generation = 1,
                                  .page = page,
                                  .header_pages = header_pages,
                                  .mode = 0100644,
                                  .nlink = 1};
    memset(out, 0, r.record_size);
    memcpy(out, &r, sizeof(r));
    copy_bytes(out + sizeof(r), name, name_size);
    return r.record_size;
}

static int64_t completion(void) {
    struct kvfs_completion done;
    CHECK(wait_completion(plane, &done, 60000));
    return done.result;
}

static uint32_t place_for(uint32_t pages) {
    if (next_page + pages > 4000)
        next_page = 100; /* bytes that lay there have lost their proof */
    next_page += pages;
    return next_page - pages;
}

static int file_make(char letter) {
    uint8_t record[512];
    uint64_t inode = next_inode++, *place = &named[letter & 3];
    char name = (char)('a' + (letter & 3));
    make_record(record, inode, &name, 1, 0, 0, 0, 0);
    int r = kvfs_name_put(plane, record, *place);
    if (r >= 0)
        r = kvfs_file_create(plane, inode);
    *place = inode;
    return r;
}

/* As Python seals: frozen, written, published; or given up. */
static void file_seal(uint64_t inode, char name, bool publish) {
    struct kvfs_seal_info info;
    uint8_t record[8192];
    if (kvfs_slab_pages(plane, inode) > 0 || kvfs_seal_begin(plane, inode, &info) < 0 || !info.dirty)
        return;
    size_t size = make_record(record, inode, &name, 1, info.size, KVFS_INODE_SEALED, 1, 0);
    uint32_t header_pages = kvfs_header_pages(info.size, (uint32_t)size, 0, info.ranges + info.kept_extents + 2), page;
    bool good = header_pages + info.data_pages < 1500;
    if (good) {
        page = place_for(header_pages + info.data_pages);
        size = make_record(record, inode, &name, 1, info.size, KVFS_INODE_SEALED, page, header_pages);
        struct kvfs_run run = {.generation = 1, .segment = 0, .page = page, .page_count = header_pages + info.data_pages};
        good = kvfs_seal_write(plane, 1, inode, &run, 1, header_pages, record, (uint32_t)size, "", 0) == 0 && completion() == 0;
    }
    if (good && publish)
        good = kvfs_seal_record(plane, inode, record, sizeof(record)) > 0 && kvfs_inode_update(plane, record) == 0;
    CHECK(kvfs_seal_end(plane, inode, good && publish) == 0);
}

static void file_spill(uint64_t inode, bool cancel) {
    struct kvfs_seal_info info;
    if (kvfs_slab_pages(plane, inode) > 0 || kvfs_spill_begin(plane, inode, &info) < 0)
        return;
    if (cancel || info.data_pages == 0 || info.data_pages > 1500) {
        kvfs_spill_cancel(plane, inode);
        return;
    }
    struct kvfs_run run = {.generation = 1, .segment = 0, .page_count = info.data_pages + 1};
    run.page = place_for(run.page_count);
    if (kvfs_spill_write(plane, 1, inode, &run, 1) == 0)
        completion();
    else
        kvfs_spill_cancel(plane, inode);
}

static void slab_make(void) {
    uint8_t record[512];
    struct kvfs_run run = {.generation = 1, .segment = 1, .page = 1, .page_count = 1000};
    slab = next_inode++;
    make_record(record, slab, "slab", 4, 0, 0, 0, 0);
    CHECK(kvfs_name_put(plane, record, 0) >= 0 && kvfs_file_create(plane, slab) == 0);
    CHECK(kvfs_slab_extend(plane, slab, 900 * PAGE, 0, &run, 1) == 0);
}

/* One thing that Python does. */
static void python(const uint8_t *data) {
    uint64_t inode = data[1] % 6 < 4 ? named[data[1] % 4] : data[1] % 6 == 4 ? slab : 2, size = (uint64_t)data[2] << (data[3] % 20);
    char letter = (char)(data[1] % 4), name = (char)('a' + letter);
    if (!inode)
        inode = 2;
    bool is_slab = kvfs_slab_pages(plane, inode) > 0;
    switch (data[0] % 12) {
    case 0: file_make(letter); break;
    case 1:
        if (named[(int)letter])
            kvfs_inode_remove(plane, named[(int)letter]);
        named[(int)letter] = 0;
        break;
    case 2: file_seal(inode, name, data[3] & 1); break;
    case 3: file_spill(inode, data[3] & 1); break;
    case 4: kvfs_file_truncate(plane, inode, size); break;
    case 5: kvfs_file_allocate(plane, inode, size); break;
    case 6:
        if (kvfs_file_rewrite(plane, 1, inode == slab ? 2 : inode, data[3] & 1) == 0)
            completion();
        break;
    case 7:
        if (is_slab && kvfs_slab_resize(plane, 1, inode, size) == 0)
            completion();
        break;
    case 8: kvfs_slab_answer(plane, inode); break;
    case 9:
        if (data[3] % 8 == 0)
            kvfs_slab_fail(plane, inode);
        break;
    case 10: {
        uint64_t inodes[4] = {named[0], named[1], named[2], named[3]};
        uint32_t uses[4];
        kvfs_inode_uses(plane, inodes, 4, uses);
        kvfs_inode_touch(plane, inodes, 4, 1);
        kvfs_file_set_mtime(plane, inode, (int64_t)size);
        break;
    }
    default: kvfs_inode_is_open(plane, inode); break;
    }
}

static void start(void) {
    static const struct kvfs_member members[2] = {{0, 0}, {0, 1}};
    static const uint64_t offsets[1] = {0};
    int device = memfd_create("device", MFD_CLOEXEC);
    shared = memfd_create("guest", MFD_CLOEXEC);
    other_file = memfd_create("short", MFD_CLOEXEC);
    CHECK(device >= 0 && shared >= 0 && ftruncate(device, 32 << 20) == 0 && ftruncate(shared, (off_t)MEMORY) == 0);
    struct kvfs_plane_config config = {.secret = SECRET,
                                       .mount_epoch = 1,
                                       .zone_size = 16 << 20,
                                       .stripe_unit = 65536,
                                       .staging_size = 16 << 20,
                                       .read_memory_size = 16 << 20,
                                       .records_max = 1000,
                                       .stripe_width = 1,
                                       .segment_count = 2,
                                       .device_count = 1,
                                       .io_timeout_ms = 1000,
                                       .request_timeout_ms = 1000,
                                       .server_threads = 1,
                                       .store_threads = 1,
                                       .verify = 1};
    CHECK(kvfs_plane_create(&config, &device, offsets, members, &plane) == 0);
    kvfs_table_set_complete(kvfs_plane_table(plane), 1);
    struct kvfs_record root = {.inode = 1, .parent = 1, .mode = 040755, .nlink = 2, .kind = KVFS_KIND_DIRECTORY};
    CHECK(kvfs_table_put(kvfs_plane_table(plane), &root, "", 0, 0) == 0);
    /* A file that is being written, and one that says it is sealed where nothing is: reading it finds no proof. */
    for (uint64_t inode = 2; inode < 4; inode++) {
        struct kvfs_record file = {.inode = inode,
                                   .parent = 1,
                                   .mode = 0100644,
                                   .nlink = 1,
                                   .kind = KVFS_KIND_FILE,
                                   .size = 100000,
                                   .generation = 1,
                                   .page = 1,
                                   .header_pages = 1,
                                   .flags = inode == 3 ? KVFS_INODE_SEALED : 0};
        CHECK(kvfs_table_put(kvfs_plane_table(plane), &file, inode == 3 ? "sealed" : "written", inode == 3 ? 6 : 7, 0) == 0);
    }
    CHECK(kvfs_file_create(plane, 2) == 0);
    kvfs_set_space(plane, (uint64_t)64 << 20, ENOSPC);
    names = kvfs_plane_names(plane);
    struct kvfs_inode_record top = {.record_size = sizeof(top), .inode = 1, .parent = 1, .kind = KVFS_KIND_DIRECTORY, .mode = 040755, .nlink = 2};
    kvfs_names_number(names, UINT64_C(1) << KVFS_COUNTER_BITS, 0);
    places = kvfs_places_make(names, 2, 4096, 1 << 20);
    CHECK(places && kvfs_names_put(names, &top, 0) == 0);
    kvfs_place_head(names, KVFS_HEAD_NEW, 1, 1);
    session = kvfs_session_open(plane);
    CHECK(session >= 0);
    kvfs_calls_open(plane, 1);
    struct kvfs_virtiofs_config virtiofs = {.tag = "fuzz", .queue_count = 1, .queue_size_max = 1024};
    CHECK(guest_new(plane, &virtiofs, &guest) == 0 && guest_new(plane, &virtiofs, &front_guest) == 0);
    slab_make();
    pthread_t flipper;
    CHECK(pthread_create(&flipper, NULL, flip_main, NULL) == 0);
    struct region_description description = {GUEST, MEMORY, GUEST, 0};
    struct guest_region *region;
    CHECK(region_map(&guest->owner, shared, &description, NULL, 0, &region) == 0);
    memory = region->data;
    struct guest_memory *all = memory_change(NULL, region, NULL);
    CHECK(all);
    for (uint32_t i = 0; i < 2; i++) {
        struct virtqueue *queue = &guest->queues[i];
        queue->memory = all;
        atomic_fetch_add(&all->refs, 1);
        queue->size = SIZE;
        queue->elements = calloc(QUEUE_SIZE_MAX, sizeof(*queue->elements));
        queue->indirect = true;
        CHECK(virtqueue_call_set(queue, eventfd(0, EFD_NONBLOCK)) == 0);
        queue->addressed = true;
        queue->desc_user = GUEST + i * 0x4000;
        queue->avail_user = queue->desc_user + 0x1000;
        queue->used_user = queue->desc_user + 0x2000;
        CHECK(queue->elements && virtqueue_map(queue) == 0);
    }
}

/* Python's part of what the data plane does by itself: it commits, ends runs that failed, makes room or says that there is none. From time to time it
 * leaves nothing to the data plane. */
static void names_work(void) {
    static uint32_t turn;
    uint64_t size;
    turn++;
    kvfs_names_leave(names, KVFS_LEAVE_CLOSED, turn % 8 == 7);
    if (turn % 4 == 0) {
        CHECK(kvfs_names_commit_begin(names, &size));
        kvfs_names_commit_end(names, turn % 16 != 0);
    }
    struct kvfs_noted noted[2];
    kvfs_places_noted(names, noted, 2);
    for (struct kvfs_failed_run run; kvfs_place_failed(names, 1, &run);)
        kvfs_place_release(names, 1, run.page);
    if (!kvfs_flush_wanted(plane))
        return;
    kvfs_names_begin(names);
    if (!places[1].run_count)
        places[1].next_page = 1;
    kvfs_names_end(names);
    if (turn % 3)
        kvfs_flush_retry(plane);
    else
        kvfs_flush_give_up(plane);
}

/* Answer a listing by "a" to "d", some of which are gone; now and then more come behind. */
static void names_bring(uint64_t call) {
    static uint32_t turn;
    uint64_t inodes[4];
    for (uint32_t i = 0; i < 4; i++)
        inodes[i] = named[i] ? named[i] : 70 + i;
    struct kvfs_listed names = {.inodes = inodes, .sizes = (const uint8_t[]){1, 1, 1, 1}, .text = "abcd", .count = 4, .end = turn++ % 4 != 0};
    if (kvfs_answer(plane, call, 0, 0, &names) == -EAGAIN) {
        names.end = 1;
        CHECK(kvfs_answer(plane, call, 0, 0, &names) == 0);
    }
}

static void session_drain(void) {
    names_work();
    static uint8_t message[REQUEST_SMALL + 64];
    ssize_t n;
    while ((n = recv(session, message, sizeof(message), MSG_DONTWAIT)) > 0) {
        struct fuse_in_header in;
        CHECK(n >= (ssize_t)sizeof(in));
        memcpy(&in, message, sizeof(in));
        CHECK(in.len == (uint32_t)n); /* a message to Python is whole */
        struct fuse_out_header out = {.len = sizeof(out), .error = -EIO, .unique = in.unique};
        if (in.opcode != FUSE_RELEASEDIR || in.unique != UINT64_MAX - 1)
            CHECK(send(session, &out, sizeof(out), MSG_DONTWAIT) == sizeof(out) || errno == EAGAIN);
    }
    struct kvfs_call call;
    while (kvfs_take_calls(plane, &call, 1) > 0) {
        CHECK(call.name_size <= KVFS_NAME_MAX && call.new_name_size <= KVFS_NAME_MAX);
        CHECK(!memchr(call.name, '/', call.name_size) && !memchr(call.new_name, '/', call.new_name_size));
        CHECK((call.opcode == FUSE_RENAME) == (call.new_name_size > 0));
        if (call.opcode == FUSE_READDIR || call.opcode == FUSE_READDIRPLUS) {
            names_bring(call.id);
            continue;
        }
        CHECK((call.opcode == FUSE_FLUSH) == (call.name_size == 0));
        char letter = (char)(call.name[0] - 'a');
        bool ours = call.inode == 1 && call.name_size == 1 && letter >= 0 && letter < 4;
        int r = call.opcode == FUSE_CREATE && !ours ? 0 : -EIO;
        if (call.opcode == FUSE_CREATE && ours)
            r = file_make(letter);
        else if (call.opcode == FUSE_UNLINK && ours && named[(int)letter]) {
            r = kvfs_inode_remove(plane, named[(int)letter]);
            named[(int)letter] = 0;
        } else if (call.opcode == FUSE_FLUSH && call.inode >= 100 && call.inode != slab) {
            file_seal(call.inode, 'a', true);
            r = 0;
        }
        kvfs_answer(plane, call.id, r < 0 ? -EIO : 0, ours ? named[(int)letter] : 2, NULL);
    }
}

static void settle(struct server *server) {
    uint32_t run = 0;
    for (int i = 0; i < 64 && guest_serve(server, &run) > 0; i++)
        ;
    uint64_t until = now_ns() + 5000000000ull;
    do {
        ring_submit(&server->io.ring);
        session_drain();
        while (mux_receive(plane))
            ;
        ring_reap(&server->io.ring);
    } while (!ring_idle(&server->io.ring) && now_ns() < until);
}

static void reset(void) {
    for (uint32_t i = 0; i < 2; i++)
        guest_queue_stop(guest, &guest->queues[i], false, 0);
    transport_forget(guest->transport);
    session_drain();
    while (mux_receive(plane))
        ;
    struct kvfs_event events[64];
    while (kvfs_take_events(plane, events, 64) > 0)
        ;
    memset(memory, 0, 0x8000);
    if (kvfs_slab_pages(plane, slab) <= 0 || kvfs_slab_close(plane, slab) == 0) {
        uint64_t until = now_ns() + 5000000000ull;
        while (kvfs_slab_pages(plane, slab) >= 0 && now_ns() < until)
            kvfs_take_events(plane, events, 64);
        slab_make();
    }
    for (uint32_t i = 0; i < 2; i++) {
        struct virtqueue *queue = &guest->queues[i];
        queue->broken = false;
        queue->last_avail = queue->used_index = 0;
        queue->event_index = i;
        atomic_store(&queue->running, true);
    }
    for (uint32_t i = 0; i < 2; i++) {
        struct kvfs_record record;
        struct node *node;
        CHECK(node_open(plane, 2 + i, user_get(plane, 0), i == 0, &record, &node) == 0);
        CHECK(handle_open(plane, guest->transport, node, user_get(plane, 0), i ? O_RDONLY : O_RDWR, i == 0, i != 0, 0, &handles[i]) == 0);
    }
    struct kvfs_record record;
    struct node *node;
    handles[2] = 0;
    if (node_open(plane, slab, user_get(plane, 0), true, &record, &node) == 0)
        CHECK(handle_open(plane, guest->transport, node, user_get(plane, 0), O_RDWR, true, false, 0, &handles[2]) == 0);
}

/* A chain as a driver makes it, around `size` bytes of FUSE request that come from the fuzzer, with a header whose length is right. */
static void well_formed(uint32_t turn, const uint8_t *data, size_t size, uint32_t room) {
    struct virtqueue *queue = &guest->queues[1];
    uint16_t head = (uint16_t)(turn % 5 * 3);
    uint8_t *request = memory + 0x20000 + turn % 5 * 0x4000, *reply = memory + 0x80000;
    struct fuse_in_header in = {.len = (uint32_t)(sizeof(in) + size - min_u64(size, 2)), .unique = turn};
    static const uint8_t often[16] = {FUSE_READ,  FUSE_WRITE,   FUSE_WRITE,   FUSE_CREATE,    FUSE_LOOKUP,  FUSE_UNLINK,  FUSE_RENAME, FUSE_OPEN,
                                      FUSE_FLUSH, FUSE_RELEASE, FUSE_SETATTR, FUSE_FALLOCATE, FUSE_READDIR, FUSE_GETATTR, FUSE_READ,   FUSE_MKDIR};
    static const uint8_t fixed[64] = {[FUSE_CREATE] = sizeof(struct fuse_create_in), [FUSE_RENAME] = sizeof(struct fuse_rename_in), [FUSE_MKDIR] = 8};
    uint64_t nodes[6] = {0, 1, 2, 3, slab, named[turn % 4]};
    in.opcode = size ? data[0] & 0x80 ? often[data[0] & 15] : data[0] % 60 : 0;
    in.nodeid = size > 1 ? nodes[data[1] % 6] : 1;
    memcpy(request, &in, sizeof(in));
    copy_bytes(request + sizeof(in), data + min_u64(size, 2), size - min_u64(size, 2));
    uint32_t handle = in.nodeid == slab ? 2 : in.nodeid == 2 ? 0 : 1;
    if ((in.nodeid == 2 || in.nodeid == 3 || in.nodeid == slab) && size > 10 && data[2] & 1) { /* no fuzzer would guess it */
        memcpy(request + sizeof(in), &handles[handle], 8);
        uint64_t place = size > 20 ? (uint64_t)data[14] << (data[15] % 16) : 0;
        if (in.opcode == FUSE_READ || in.opcode == FUSE_WRITE) {
            struct fuse_write_in io = {
                .fh = handles[handle], .offset = place, .size = in.opcode == FUSE_READ ? room : (uint32_t)(size % 3 * 4096 + size % 9)};
            memcpy(request + sizeof(in), &io, sizeof(io));
            in.len = (uint32_t)(sizeof(in) + sizeof(io) + (in.opcode == FUSE_WRITE ? io.size : 0));
            memcpy(request, &in, sizeof(in));
        }
    }
    if ((in.opcode == FUSE_CREATE || in.opcode == FUSE_LOOKUP || in.opcode == FUSE_UNLINK || in.opcode == FUSE_RENAME || in.opcode == FUSE_MKDIR) &&
        size > 3) {
        char two[5] = {(char)('a' + data[2] % 4), 0, (char)('a' + data[3] % 4), 0};
        uint32_t length = in.opcode == FUSE_RENAME ? 4 : 2;
        if (in.opcode == FUSE_RENAME && data[2] & 4)
            memcpy(request + sizeof(in), &(uint64_t){1}, sizeof(uint64_t)); /* to the same directory */
        memcpy(request + sizeof(in) + fixed[in.opcode], two, length);
        in.len = (uint32_t)sizeof(in) + fixed[in.opcode] + length;
        in.nodeid = 1;
        memcpy(request, &in, sizeof(in));
    }
    struct vring_desc *desc = (struct vring_desc *)(void *)(memory + 0x4000);
    struct vring_avail *avail = queue->avail;
    if (queue->elements[head].live)
        return;
    desc[head] = (struct vring_desc){GUEST + (uint64_t)(request - memory), in.len, VRING_DESC_F_NEXT, (uint16_t)(head + 1)};
    desc[head + 1] = (struct vring_desc){GUEST + (uint64_t)(reply - memory), 16, VRING_DESC_F_WRITE | VRING_DESC_F_NEXT, (uint16_t)(head + 2)};
    desc[head + 2] = (struct vring_desc){GUEST + (uint64_t)(reply - memory) + 0x1000, room, VRING_DESC_F_WRITE, 0};
    avail->ring[avail->idx % SIZE] = head;
    avail->idx++;
}

/* ---- the front end ---- */

struct served {
    int fd;
    atomic_bool ended;
};

static void *serve_main(void *argument) {
    struct served *served = argument;
    vhost_user_serve(front_guest, served->fd);
    atomic_store(&served->ended, true);
    return NULL;
}

static void front_send(int fd, uint32_t request, uint32_t flags, const void *payload, uint32_t size, int passed) {
    struct vhost_header header = {request, 1 | flags, size};
    struct iovec iovs[2] = {{&header, sizeof(header)}, {(void *)(uintptr_t)payload, size}};
    union {
        struct cmsghdr align;
        uint8_t bytes[CMSG_SPACE(sizeof(int))];
    } control;
    struct msghdr msg = {.msg_iov = iovs, .msg_iovlen = 2};
    if (passed >= 0) {
        memset(&control, 0, sizeof(control));
        msg.msg_control = &control;
        msg.msg_controllen = sizeof(control);
        struct cmsghdr *c = CMSG_FIRSTHDR(&msg);
        c->cmsg_level = SOL_SOCKET;
        c->cmsg_type = SCM_RIGHTS;
        c->cmsg_len = CMSG_LEN(sizeof(int));
        memcpy(CMSG_DATA(c), &passed, sizeof(int));
    }
    sendmsg(fd, &msg, MSG_NOSIGNAL | MSG_DONTWAIT); /* it may have been hung up on */
}

/* Messages from the input, after a start as a front end makes it; its queue is served meanwhile. */
static void front(const uint8_t *data, size_t size) {
    int pair[2], event = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK), pipes[2];
    uint8_t replies[4096];
    CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) == 0 && event >= 0 && pipe(pipes) == 0);
    struct served served = {.fd = pair[1]};
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, serve_main, &served) == 0);
    const int passed[6] = {-1, -1, shared, event, pipes[0], other_file};
    const uint64_t protocol = 1ull << 3 | 1ull << 12 | 1ull << 15, region[5] = {0, GUEST, MEMORY, GUEST, 0}, queue = 1;
    const uint64_t features = 1ull << VIRTIO_F_VERSION_1 | 1ull << VIRTIO_RING_F_INDIRECT_DESC | 1ull << VIRTIO_RING_F_EVENT_IDX | 1ull << 30;
    const uint32_t number[2] = {1, SIZE}, base[2] = {1, 0}, enable[2] = {1, 1};
    const struct {
        uint32_t index, flags;
        uint64_t desc, used, avail, log;
    } address = {1, 0, GUEST + 0x4000, GUEST + 0x6000, GUEST + 0x5000, 0};
    if (size && data[0] & 1) {
        front_send(pair[0], 16, 0, &protocol, 8, -1);
        front_send(pair[0], 2, 0, &features, 8, -1);
        front_send(pair[0], 37, 0, region, sizeof(region), shared);
    }
    if (size && data[0] & 2) {
        const uint16_t layout[12] = {0, 1, 0, 0, 0, 0, 0, 0, 2, SIZE}; /* 64 KiB */
        front_send(pair[0], 32, 8, layout, 20, shared);
        front_send(pair[0], 8, 8, number, 8, -1);
        front_send(pair[0], 10, 8, base, 8, -1);
        front_send(pair[0], 9, 8, &address, sizeof(address), -1);
        for (uint32_t request = 12; request < 15; request++)
            front_send(pair[0], request, 8, &queue, 8, event);
        front_send(pair[0], 18, 8, enable, 8, -1);
    }
    for (size_t at = 1; at + 3 <= size;) {
        uint32_t length = (uint32_t)min_u64(data[at + 2], size - at - 3);
        front_send(pair[0], data[at] % 44, data[at + 1] & 8, data + at + 3, length, passed[data[at + 1] % 6]);
        at += 3 + length;
        while (recv(pair[0], replies, sizeof(replies), MSG_DONTWAIT) > 0)
            ;
    }
    uint64_t until = now_ns() + (size && data[0] & 4 ? 3000000 : 300000);
    while (now_ns() < until && !atomic_load(&served.ended))
        settle(&front_guest->transport->servers[0]);
    shutdown(pair[0], SHUT_RDWR);
    while (!atomic_load(&served.ended))
        settle(&front_guest->transport->servers[0]); /* requests under way are answered, or they would be waited for */
    CHECK(pthread_join(thread, NULL) == 0);
    close(pair[0]);
    close(pipes[0]);
    close(pipes[1]);
    close(event);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (!plane)
        start();
    struct server *server = &guest->transport->servers[0];
    reset();
    for (uint32_t turn = 0; size >= 4 && turn < 64; turn++) {
        uint8_t step = data[0];
        uint32_t at = data[1] | (uint32_t)data[2] << 8, length = (uint32_t)min_u64(data[3] * (step & 0x80 ? 64u : 1u), size - 4);
        data += 4;
        size -= 4;
        switch (step % 8) {
        case 0: copy_bytes(memory + at % 0x3000, data, min_u64(length, 0x3000 - at % 0x3000)); break; /* the raw queue's rings */
        case 1: copy_bytes(memory + 0x8000 + at, data, length); break;                                /* where they may lead */
        case 2: well_formed(turn, data, length, at % 3 * 0x8000 + at % 7); break;
        case 3:
            atomic_store(&flipping, step & 0x40);
            settle(server);
            atomic_store(&flipping, false);
            break;
        case 4:
            if (length >= 4)
                python(data);
            break;
        case 5:
            if (step & 0x20) { /* dear */
                atomic_store(&flipping, step & 0x40);
                front(data, length);
                atomic_store(&flipping, false);
            }
            break;
        case 6: well_formed(turn, data, length, 0x10000); break;
        default: settle(server); break;
        }
        data += length;
        size -= length;
    }
    settle(server);
    return 0;
}

#ifdef FUZZ_DRIVER
/* Inputs of steps whose lengths fit, and most of whose bytes are small. */
static size_t make_input(uint64_t *seed, uint8_t *out, size_t capacity) {
    size_t size = 0;
    for (uint64_t turns = random_below(seed, 24) + 1; turns && size + 300 < capacity; turns--) {
        uint32_t length = (uint32_t)random_below(seed, random_below(seed, 4) ? 64 : 256);
        out[size++] = (uint8_t)(random_next(seed) & 0x7f);
        out[size++] = (uint8_t)random_next(seed);
        out[size++] = (uint8_t)random_next(seed);
        out[size++] = (uint8_t)length;
        for (uint32_t i = 0; i < length; i++)
            out[size++] = (uint8_t)(random_below(seed, 3) ? random_next(seed) & 0x1f : random_next(seed));
        if (length && random_below(seed, 2))
            out[size - length] |= 0x80;
    }
    return size;
}

int main(int argc, char **argv) {
    static uint8_t input[1 << 20];
    char *end = NULL;
    unsigned long seconds = argc > 1 ? strtoul(argv[1], &end, 10) : 0;
    if (argc > 1 && *end) {
        for (int i = 1; i < argc; i++) {
            FILE *file = fopen(argv[i], "rb");
            CHECK_SAY(file, "%s", argv[i]);
            LLVMFuzzerTestOneInput(input, fread(input, 1, sizeof(input), file));
            fclose(file);
        }
        return 0;
    }
    uint64_t seed = argc > 2 ? strtoull(argv[2], NULL, 0) : now_ns(), until = now_ns() + seconds * 1000000000ull, count = 0;
    printf("seed %llu\n", (unsigned long long)seed);
    fflush(stdout);
    for (; now_ns() < until; count++) {
        size_t size = make_input(&seed, input, sizeof(input) < 8192 ? sizeof(input) : 8192);
        FILE *last = fopen("fuzz-virtio.last", "wb"); /* an input that breaks it is kept */
        CHECK(last && fwrite(input, 1, size, last) == size && fclose(last) == 0);
        LLVMFuzzerTestOneInput(input, size);
    }
    unlink("fuzz-virtio.last");
    printf("%llu inputs\n", (unsigned long long)count);
    return 0;
}
#endif
