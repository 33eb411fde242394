/* Two targets of two namespaces each, and an array of devices on them: for tests of the NVMe/TCP initiator. */
#ifndef KVFS_TEST_NVME_HARNESS_H
#define KVFS_TEST_NVME_HARNESS_H

#include "doubles/target.h"

#define DEVICES 4u
#define TARGETS 2u

static inline struct kvfs_nvme_target where(const struct target *t, uint32_t nsid, uint32_t digests) {
    struct kvfs_nvme_target out = {.nsid = nsid,
                                   .port = ntohs(t->address.sin_port),
                                   .timeout_ms = 1000 * slowness(),
                                   .kato_ms = 1000 * slowness(),
                                   .header_digest = digests & 1,
                                   .data_digest = digests >> 1,
                                   .depth = 32,
                                   .hostid = {9}};
    strcpy(out.host, "127.0.0.1");
    strcpy(out.nqn, "nqn.2026-11.test:one");
    strcpy(out.hostnqn, "nqn.2026-11.test:host");
    return out;
}

struct world {
    struct target targets[TARGETS];
    struct kvfs_array array;
    int fds[DEVICES];
};
static struct world world;

/* Of the labels at the start; those of a pod have 0 at any time. */
static uint64_t label_epoch = 3;

static inline void world_start(uint32_t digests, uint32_t shape, uint32_t timeout_ms) {
    memset(&world, 0, sizeof(world));
    for (uint32_t i = 0; i < TARGETS; i++) {
        struct target *t = &world.targets[i];
        target_start(t, false);
        t->chunk = (uint32_t[]){0, 512, 4096, 65536, 12288}[shape % 5];
        t->r2t_chunk = (uint32_t[]){0, 512, 8192, 131072}[shape % 4];
        t->cpda = (uint32_t[]){0, 31, 1}[shape % 3];
        t->capsule = (uint32_t[]){8192, 0, 4096}[shape % 3];
        t->mdts = (uint32_t[]){0, 3, 5}[shape % 3];
        t->shift = shape % 2 ? 9 : 12;
        atomic_store(&t->success, shape % 2);
    }
    struct kvfs_array *array = &world.array;
    const struct geometry geometry = {.stripe_unit = 65536, .zone_size = ZONE, .stripe_width = DEVICES, .segment_count = SEGMENTS, .mount_epoch = 3};
    CHECK(array_init(array, &geometry, DEVICES) == 0);
    array->io_timeout_ms = timeout_ms;
    for (uint32_t i = 0; i < DEVICES; i++) {
        struct target *t = &world.targets[i / NAMESPACES];
        struct kvfs_nvme_target target = where(t, i % NAMESPACES + 1, digests);
        struct kvfs_label label = {.magic = KVFS_MAGIC_LABEL, .mount_epoch = label_epoch, .device_index = i};
        memcpy(t->memory[i % NAMESPACES], &label, sizeof(label));
        world.fds[i] = kvfs_nvme_descriptor(&target);
        CHECK(world.fds[i] >= 0);
        array->devices[i].fd = world.fds[i];
        array->devices[i].zones_offset = ZONES_OFFSET;
        device_probe(&array->devices[i]);
        for (uint32_t s = 0; s < SEGMENTS; s++)
            array->members[s * DEVICES + i] = (struct kvfs_member){i, s};
    }
    char error[NVME_REASON] = "";
    int r = nvme_hosts_start(array, world.fds, true, error, sizeof(error));
    CHECK_SAY(r == 0, "%s", error);
}

static inline void world_end(void) {
    nvme_hosts_stop(&world.array);
    for (uint32_t i = 0; i < TARGETS; i++)
        target_stop(&world.targets[i], true);
    for (uint32_t i = 0; i < DEVICES; i++)
        close(world.fds[i]);
    array_free(&world.array);
}

struct wait {
    uint32_t left, expired;
    int result;
    uint64_t ended_ns;
};

static inline void io_done(struct io_group *group, bool reaped) {
    struct wait *wait = group->owner;
    if (reaped) {
        wait->expired--;
        return;
    }
    wait->expired += group->expired;
    wait->left--;
    wait->ended_ns = now_ns();
    if (group->result && !wait->result)
        wait->result = group->result;
}

/* One I/O to its end; *expired: groups whose memory is still the devices'. */
static inline int io(struct ring *ring, bool write, uint32_t segment, uint32_t page, void *data, uint64_t size, struct wait *wait) {
    memset(wait, 0, sizeof(*wait));
    wait->left = 1;
    int r = ring_io(ring, write, segment, page, &(struct iovec){data, size}, 1, NULL, 0, io_done, wait);
    CHECK(r == 0);
    ring_submit(ring);
    while (wait->left) {
        ring_reap(ring);
        if (wait->left)
            ring_wait(ring, 1000 * MS);
    }
    return wait->result;
}

static inline void settle(struct ring *ring, struct wait *wait) {
    uint64_t until = now_ns() + 10000 * MS;
    while (wait->expired) {
        ring_wait(ring, 10 * MS);
        ring_reap(ring);
        CHECK(now_ns() < until);
    }
}

static inline void fill(uint8_t *data, uint64_t size, uint64_t seed) {
    for (uint64_t i = 0; i < size; i += 8) {
        uint64_t word = random_next(&seed);
        memcpy(data + i, &word, 8);
    }
}

/* Until I/O works again: what a lost connection takes, and a back-off. */
static inline void await_io(struct ring *ring, bool write, uint8_t *data) {
    struct wait wait;
    uint64_t until = now_ns() + 20000 * MS;
    while (io(ring, write, 0, 0, data, PAGE * 64, &wait) < 0) { /* a busy machine may miss a short deadline, too */
        settle(ring, &wait);
        CHECK(now_ns() < until);
        usleep(5000);
    }
}

static inline void await_recovery(struct ring *ring, uint8_t *data) { await_io(ring, false, data); }

#endif
