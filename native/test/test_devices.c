/* sources: base io */
/* The table of device operations: a kind of device is one table and a line in device_probe(), and faults wrap any kind. The double here is a
 * kind of its own: memory that answers at the next reap, or only when it is told to. */
#include "io/nvme/tcp.h"
#include "io/ring.h"

#include <fcntl.h>
#include <stdio.h>
#include <sys/mman.h>

#include "check.h"

#define DEVICES 4u
#define ZONE ((uint64_t)1 << 20)
#define SEGMENTS 2u
#define SIZE (ZONE * SEGMENTS)
#define RUN_PAGES 64u /* a stripe unit on each device */
#define RUN_SIZE (RUN_PAGES * PAGE)

static struct kvfs_array array;
static uint8_t *media[DEVICES];
static uint32_t starts, cancels, expires, errors, error_seen;
static bool silent; /* the double takes parts and keeps them */
static struct io_part *kept[DEVICES];
static uint32_t kept_count;

static void double_start(struct ring *ring, struct io_part *part) {
    uint8_t *at = media[part->device] + part->device_offset;
    starts++;
    if (silent) {
        kept[kept_count++] = part;
        return;
    }
    for (uint32_t i = part->iov_first; i < part->iov_first + (uint32_t)part->iov_count; i++) {
        const struct iovec *iov = &part->group->iovs[i];
        if (part->group->write)
            memcpy(at, iov->iov_base, iov->iov_len);
        else
            memcpy(iov->iov_base, at, iov->iov_len);
        at += iov->iov_len;
    }
    CHECK(ring_part_delay(ring, part, 0, (int)part->size));
}

static void double_cancel(struct ring *ring, struct io_part *part) {
    (void)ring;
    CHECK(!part->done);
    cancels++;
}

static void double_expire(struct ring *ring, struct io_part *part, uint64_t now) {
    (void)now;
    expires++;
    ring_part_complete(ring, part, -ETIMEDOUT);
}

static const struct device_ops double_ops = {.start = double_start};
static const struct device_ops double_cancels = {.start = double_start, .cancel = double_cancel};
static const struct device_ops double_expires = {.start = double_start, .expire = double_expire};

static void on_error(struct kvfs_array *of, uint32_t device, int error) {
    CHECK(of == &array && device < DEVICES);
    errors++;
    error_seen = (uint32_t)error;
}

static void array_make(const struct device_ops *kind) {
    const struct geometry geometry = {.stripe_unit = 65536, .zone_size = ZONE, .stripe_width = DEVICES, .segment_count = SEGMENTS};
    memset(&array, 0, sizeof(array));
    CHECK(array_init(&array, &geometry, DEVICES) == 0);
    array.io_timeout_ms = 200 * slowness();
    array.on_error = on_error;
    starts = cancels = expires = errors = error_seen = kept_count = 0;
    silent = false;
    for (uint32_t i = 0; i < DEVICES; i++) {
        CHECK(media[i] = calloc(1, SIZE));
        array.devices[i].fd = memfd_create("device", MFD_CLOEXEC);
        CHECK(array.devices[i].fd >= 0 && ftruncate(array.devices[i].fd, (off_t)SIZE) == 0);
        device_kind_set(&array.devices[i], kind);
        for (uint32_t s = 0; s < SEGMENTS; s++)
            array.members[s * DEVICES + i] = (struct kvfs_member){i, s};
    }
}

static void array_end(void) {
    for (uint32_t i = 0; i < DEVICES; i++) {
        close(array.devices[i].fd);
        free(media[i]);
    }
    array_free(&array);
}

struct wait {
    bool expired, done;
    int result;
};

static void wait_done(struct io_group *group, bool reaped) {
    struct wait *wait = group->owner;
    CHECK(!wait->done && (!reaped || wait->expired));
    wait->done = reaped || !group->expired;
    wait->expired = group->expired;
    wait->result = group->result;
}

static void io_start(struct ring *ring, bool write, uint8_t *data, struct wait *wait) {
    *wait = (struct wait){0};
    CHECK(ring_io(ring, write, 1, 0, &(struct iovec){data, RUN_SIZE}, 1, NULL, 0, wait_done, wait) == 0);
    ring_submit(ring);
}

static int io(struct ring *ring, bool write, uint8_t *data) {
    struct wait wait;
    io_start(ring, write, data, &wait);
    while (!wait.done) {
        ring_wait(ring, 100000000);
        ring_reap(ring);
    }
    CHECK(ring_idle(ring));
    return wait.result;
}

static uint8_t *pattern(unsigned seed) {
    uint8_t *data = malloc(RUN_SIZE);
    CHECK(data);
    for (uint64_t i = 0; i < RUN_SIZE; i++)
        data[i] = (uint8_t)((seed = seed * 1103515245u + 12345u) >> 16);
    return data;
}

static void test_a_kind_is_one_table(void) {
    struct ring ring;
    array_make(&double_ops);
    CHECK(ring_init(&ring, &array, 64) == 0);
    uint8_t *data = pattern(1), *back = calloc(1, RUN_SIZE);
    CHECK(back && io(&ring, true, data) == 0 && io(&ring, false, back) == 0);
    CHECK(memcmp(data, back, RUN_SIZE) == 0 && starts == 2 * DEVICES && errors == 0);
    for (uint32_t i = 0; i < DEVICES; i++)
        CHECK(memcmp(media[i] + ZONE, data + i * 65536, 65536) == 0 && atomic_load(&array.devices[i].reads) == 1);
    free(data);
    free(back);
    ring_free(&ring);
    array_end();
}

static void test_faults_wrap_a_kind(void) {
    struct ring ring;
    struct wait wait;
    array_make(&double_ops);
    CHECK(ring_init(&ring, &array, 64) == 0);
    uint8_t *data = pattern(2), *other = pattern(3), *back = calloc(1, RUN_SIZE);
    CHECK(back && io(&ring, true, data) == 0);
    struct device *device = &array.devices[2];
    fault_set(device, KVFS_FAULT_ERROR, 1, 1, ENOSPC);
    CHECK(io(&ring, false, back) == -ENOSPC && errors == 1 && error_seen == ENOSPC);
    fault_set(device, KVFS_FAULT_ERROR, 2, 1, ENOSPC);
    CHECK(io(&ring, false, back) == 0); /* of writes, not of reads */
    fault_set(device, KVFS_FAULT_SHORT, 3, 2, 0);
    CHECK(io(&ring, false, back) == 0 && io(&ring, false, back) == -EIO); /* every second */
    fault_set(device, KVFS_FAULT_FLIP, 1, 1, 77);
    CHECK(io(&ring, false, back) == 0 && back[2 * 65536 + 77] == (data[2 * 65536 + 77] ^ 1u << 77 % 8));
    uint32_t before = starts;
    fault_set(device, KVFS_FAULT_LOST_WRITE, 2, 1, 0);
    CHECK(io(&ring, true, other) == 0 && starts == before + DEVICES - 1);
    CHECK(memcmp(media[2] + ZONE, data + 2 * 65536, 65536) == 0 && memcmp(media[1] + ZONE, other + 65536, 65536) == 0);
    fault_set(device, KVFS_FAULT_DELAY, 1, 1, array.io_timeout_ms * 3 / 2);
    CHECK(io(&ring, false, back) == -ETIMEDOUT && atomic_load(&array.orphans) == 0); /* expired, then reaped */
    array.io_timeout_ms = 60000;
    fault_set(device, KVFS_FAULT_HOLD, 1, 1, 0);
    io_start(&ring, false, back, &wait);
    for (int i = 0; i < 5; i++) {
        ring_wait(&ring, 2000000);
        ring_reap(&ring);
        CHECK(!wait.done && ring.in_flight == 1);
    }
    fault_set(device, KVFS_FAULT_NONE, 1, 1, 0);
    while (!wait.done) {
        ring_wait(&ring, 100000000);
        ring_reap(&ring);
    }
    CHECK(wait.result == 0 && io(&ring, false, back) == 0 && memcmp(back + 65536, other + 65536, 65536) == 0);
    free(data);
    free(other);
    free(back);
    ring_free(&ring);
    array_end();
}

/* A cancelled part is told as expired first, and its memory stays the device's until the device answers. An expired part ends at once. */
static void test_a_missed_deadline_is_told_in_order(void) {
    for (unsigned gives_up = 0; gives_up < 2; gives_up++) {
        struct ring ring;
        struct wait wait;
        array_make(gives_up ? &double_expires : &double_cancels);
        CHECK(ring_init(&ring, &array, 64) == 0);
        uint8_t *data = pattern(4);
        silent = true;
        io_start(&ring, false, data, &wait);
        CHECK(kept_count == DEVICES);
        while (!wait.expired) {
            ring_wait(&ring, 100000000);
            ring_reap(&ring);
        }
        CHECK(wait.result == -ETIMEDOUT && cancels == (gives_up ? 0 : DEVICES) && expires == (gives_up ? DEVICES : 0));
        CHECK(errors == DEVICES && error_seen == ETIMEDOUT);
        CHECK(wait.done == (bool)gives_up && ring_idle(&ring) == (bool)gives_up && atomic_load(&array.orphans) == !gives_up);
        for (uint32_t i = 0; i < DEVICES && !gives_up; i++)
            ring_part_complete(&ring, kept[i], (int)kept[i]->size);
        CHECK(wait.done && ring_idle(&ring) && atomic_load(&array.orphans) == 0 && atomic_load(&array.segment_busy[1]) == 0);
        free(data);
        ring_free(&ring);
        array_end();
    }
}

/* A part ends as it began, also when its device is another kind by then; faults stay around the new kind. */
static void test_a_device_becomes_another_kind(void) {
    struct ring ring;
    struct wait wait;
    array_make(&double_cancels);
    CHECK(ring_init(&ring, &array, 64) == 0);
    uint8_t *data = pattern(5), *back = calloc(1, RUN_SIZE);
    CHECK(back);
    silent = true;
    io_start(&ring, true, data, &wait);
    fault_set(&array.devices[0], KVFS_FAULT_NONE, 3, 1, 0);
    for (uint32_t i = 0; i < DEVICES; i++) {
        device_probe(&array.devices[i]);
        CHECK(atomic_load(&array.devices[i].kind) == &uring_ops);
    }
    CHECK(atomic_load(&array.devices[0].ops) == &fault_ops && atomic_load(&array.devices[1].ops) == &uring_ops);
    for (uint32_t i = 0; i < DEVICES; i++)
        ring_part_complete(&ring, kept[i], (int)kept[i]->size);
    CHECK(wait.done && wait.result == 0);
    uint32_t before = starts;
    CHECK(io(&ring, true, data) == 0 && io(&ring, false, back) == 0 && starts == before && memcmp(data, back, RUN_SIZE) == 0);
    free(data);
    free(back);
    ring_free(&ring);
    array_end();
}

static void test_a_descriptor_tells_its_kind(void) {
    const struct kvfs_nvme_target target = {
        .nsid = 1, .port = 4420, .host = "127.0.0.1", .nqn = "nqn.2026-11.test:a", .hostnqn = "nqn.2026-11.test:b"};
    array_make(&double_ops);
    int fd = array.devices[0].fd, target_fd = kvfs_nvme_descriptor(&target);
    struct device *device = &array.devices[0];
    CHECK(target_fd >= 0);
    device->fd = target_fd;
    device_probe(device);
    CHECK(atomic_load(&device->kind) == &nvme_tcp_ops);
    device->fd = fd;
    device_probe(device);
    CHECK(atomic_load(&device->kind) == &uring_ops);
    close(target_fd);
    array_end();
}

/* A part of an NVMe/TCP device that has no connection fails at the next reap, once. */
static void test_a_device_without_its_controller(void) {
    struct ring ring;
    array_make(&nvme_tcp_ops);
    CHECK(ring_init(&ring, &array, 64) == 0);
    uint8_t *data = pattern(6);
    CHECK(io(&ring, true, data) == -ENOTCONN && errors == DEVICES && error_seen == ENOTCONN);
    free(data);
    ring_free(&ring);
    array_end();
}

int main(void) {
    RUN(test_a_kind_is_one_table);
    RUN(test_faults_wrap_a_kind);
    RUN(test_a_missed_deadline_is_told_in_order);
    RUN(test_a_device_becomes_another_kind);
    RUN(test_a_descriptor_tells_its_kind);
    RUN(test_a_device_without_its_controller);
    return 0;
}
