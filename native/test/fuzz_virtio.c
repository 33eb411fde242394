/* sources: arena.c block_table.c block_table_reader.c checksum.c checksum_avx2.c checksum_avx512.c events.c fastpath.c file.c fuse_dev.c guest.c header.c mux.c names.c node.c notify.c nvme_admin.c nvme_crc32c.c nvme_generic.c nvme_host.c nvme_link.c nvme_queue.c plane.c read.c reply.c ring.c seal.c server.c shared_memory.c slab.c store.c vhost_user.c virtqueue.c worker.c */
/* libFuzzer: a guest's rings and FUSE requests, as wild as it likes. The input is a program of small steps that write descriptors,
 * requests and indexes into guest memory, and let the transport take what is there, without its threads: every input does the same each
 * time. One queue is well formed (the fuzzer gets to the requests), one is raw bytes (it gets to the descriptors). The session's end is
 * emptied, and answers with errors. */
#include "virtio.h"

#include <linux/virtio_config.h>
#include <stdio.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include "check.h"

#define MEMORY ((uint64_t)1 << 20)
#define GUEST 0x10000ull
#define SIZE 16u
#define SECRET 7

static struct kvfs_plane *plane;
static struct guest *guest;
static uint8_t *memory;
static int session;
static uint64_t handles[2];             /* of the file that is being written, of the sealed one */

static void start(void) {
    static const struct kvfs_member members[2] = {{0, 0}, {0, 1}};
    static const uint64_t offsets[1] = {0};
    int device = memfd_create("device", MFD_CLOEXEC), shared = memfd_create("guest", MFD_CLOEXEC);
    CHECK(device >= 0 && shared >= 0 && ftruncate(device, 32 << 20) == 0 && ftruncate(shared, (off_t)MEMORY) == 0);
    struct kvfs_plane_config config = {.secret = SECRET, .mount_epoch = 1, .zone_size = 16 << 20, .stripe_unit = 65536, .staging_size = 16 << 20,
                                       .read_memory_size = 16 << 20, .records_max = 1000, .stripe_width = 1, .segment_count = 2, .device_count = 1,
                                       .io_timeout_ms = 1000, .request_timeout_ms = 1000, .server_threads = 1, .store_threads = 1, .verify = 1};
    CHECK(kvfs_plane_create(&config, &device, offsets, members, &plane) == 0);
    kvfs_table_set_complete(kvfs_plane_table(plane), 1);
    struct kvfs_record root = {.inode = 1, .parent = 1, .mode = 040755, .nlink = 2, .kind = KVFS_KIND_DIRECTORY};
    CHECK(kvfs_table_put(kvfs_plane_table(plane), &root, "", 0, 0) == 0);
    /* A file that is being written, and one that says it is sealed where nothing is: reading it finds no proof. */
    for (uint64_t inode = 2; inode < 4; inode++) {
        struct kvfs_record file = {.inode = inode, .parent = 1, .mode = 0100644, .nlink = 1, .kind = KVFS_KIND_FILE, .size = 100000, .generation = 1,
                                   .page = 1, .header_pages = 1, .flags = inode == 3 ? KVFS_INODE_SEALED : 0};
        CHECK(kvfs_table_put(kvfs_plane_table(plane), &file, inode == 3 ? "sealed" : "written", inode == 3 ? 6 : 7, 0) == 0);
    }
    CHECK(kvfs_file_create(plane, 2) == 0);
    kvfs_set_space(plane, (uint64_t)64 << 20, ENOSPC);
    session = kvfs_session_open(plane);
    CHECK(session >= 0);
    kvfs_calls_open(plane, 1);
    struct kvfs_virtiofs_config virtiofs = {.tag = "fuzz", .queue_count = 1, .queue_size_max = 1024};
    CHECK(guest_new(plane, &virtiofs, &guest) == 0);
    struct region_description description = {GUEST, MEMORY, GUEST, 0};
    struct guest_region *region;
    CHECK(region_map(shared, &description, &region) == 0);
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
        queue->call_fd = eventfd(0, EFD_NONBLOCK);
        queue->desc_user = GUEST + i * 0x4000;
        queue->avail_user = queue->desc_user + 0x1000;
        queue->used_user = queue->desc_user + 0x2000;
        CHECK(queue->elements && virtqueue_map(queue) == 0);
    }
}

static void session_drain(void) {
    static uint8_t message[REQUEST_SMALL + 64];
    ssize_t n;
    while ((n = recv(session, message, sizeof(message), MSG_DONTWAIT)) > 0) {
        struct fuse_in_header in;
        CHECK(n >= (ssize_t)sizeof(in));
        memcpy(&in, message, sizeof(in));
        CHECK(in.len == (uint32_t)n); /* what Python gets is whole */
        struct fuse_out_header out = {.len = sizeof(out), .error = -EIO, .unique = in.unique};
        if (in.opcode != FUSE_RELEASEDIR || in.unique != UINT64_MAX - 1)
            CHECK(send(session, &out, sizeof(out), MSG_DONTWAIT) == sizeof(out) || errno == EAGAIN);
    }
    struct kvfs_call call;
    while (kvfs_take_calls(plane, &call, 1) > 0) {
        CHECK(call.name_size <= KVFS_NAME_MAX && call.new_name_size <= KVFS_NAME_MAX);
        CHECK(!memchr(call.name, '/', call.name_size) && !memchr(call.new_name, '/', call.new_name_size));
        CHECK((call.opcode == FUSE_FLUSH) == (call.name_size == 0) && (call.opcode == FUSE_RENAME) == (call.new_name_size > 0));
        kvfs_answer(plane, call.id, call.opcode == FUSE_CREATE ? 0 : -EIO, 2);
    }
}

static void settle(struct server *server) {
    uint32_t run = 0;
    for (int i = 0; i < 64 && guest_serve(server, &run) > 0; i++)
        ;
    uint64_t until = now_ns() + 5000000000ull;
    do {
        ring_submit(&server->ring);
        session_drain();
        while (mux_receive(plane))
            ;
        ring_reap(&server->ring);
    } while (!ring_idle(&server->ring) && now_ns() < until);
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
        CHECK(node_open(plane, 2 + i, i == 0, &record, &node) == 0);
        CHECK(handle_open(plane, guest->transport, node, i ? O_RDONLY : O_RDWR, i == 0, &handles[i]) == 0);
    }
}

/* A chain as a driver makes it, around `size` bytes of FUSE request that come from the fuzzer, with a header whose length is right. */
static void well_formed(uint32_t turn, const uint8_t *data, size_t size, uint32_t room) {
    struct virtqueue *queue = &guest->queues[1];
    uint16_t head = (uint16_t)(turn % 5 * 3);
    uint8_t *request = memory + 0x20000 + turn % 5 * 0x4000, *reply = memory + 0x80000;
    struct fuse_in_header in = {.len = (uint32_t)(sizeof(in) + size - min_u64(size, 2)), .unique = turn};
    in.opcode = size ? data[0] % 60 : 0;
    in.nodeid = size > 1 ? data[1] % 5 : 1;
    memcpy(request, &in, sizeof(in));
    copy_bytes(request + sizeof(in), data + min_u64(size, 2), size - min_u64(size, 2));
    if ((in.nodeid == 2 || in.nodeid == 3) && size > 10 && data[2] & 1) /* no fuzzer would guess it */
        memcpy(request + sizeof(in), &handles[in.nodeid - 2], 8);
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
        switch (step % 4) {
        case 0: copy_bytes(memory + at % 0x3000, data, min_u64(length, 0x3000 - at % 0x3000)); break; /* the raw queue's rings */
        case 1: copy_bytes(memory + 0x8000 + at, data, length); break;                                /* what they may lead to */
        case 2: well_formed(turn, data, length, at % 3 * 0x8000 + at % 7); break;
        default: settle(server); break;
        }
        data += length;
        size -= length;
    }
    settle(server);
    return 0;
}
