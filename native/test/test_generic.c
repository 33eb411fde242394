/* sources: base io */
/* NVMe passthrough: a run of a segment becomes commands that cover it exactly, none larger than the device takes. A double of the devices takes the
 * commands out of the submission queue before the kernel sees them, and leaves NOPs there. Commands that it leaves alone are refused by the kernel,
 * as these devices are files. */
#include "io/nvme/generic.h"

#include <linux/nvme_ioctl.h>
#include <sys/mman.h>
#include <unistd.h>

#include "check.h"

#define DEVICES 4u
#define ZONES_OFFSET ((uint64_t)1 << 20)
#define ZONE ((uint64_t)1 << 20)
#define SEGMENTS 4u
#define SIZE (ZONES_OFFSET + ZONE * SEGMENTS)

static struct kvfs_array array;
static uint8_t *media[DEVICES];
static uint32_t commands;

static void array_make(uint32_t width, uint32_t block_size, uint32_t transfer_size) {
    const struct geometry geometry = {.stripe_unit = 65536, .zone_size = ZONE, .stripe_width = width, .segment_count = SEGMENTS};
    CHECK(array_init(&array, &geometry, DEVICES) == 0);
    array.io_timeout_ms = 5000;
    array.passthrough = true;
    for (uint32_t i = 0; i < DEVICES; i++) {
        array.devices[i].fd = memfd_create("device", MFD_CLOEXEC);
        array.devices[i].zones_offset = ZONES_OFFSET;
        array.devices[i].nsid = i + 1;
        array.devices[i].block_size = block_size;
        array.devices[i].transfer_size = transfer_size;
        device_kind_set(&array.devices[i], &passthrough_ops);
    }
    for (uint32_t s = 0; s < SEGMENTS; s++)
        for (uint32_t i = 0; i < width; i++)
            array.members[s * width + i] = (struct kvfs_member){(s + i) % DEVICES, s};
}

static void array_end(void) {
    for (uint32_t i = 0; i < DEVICES; i++)
        close(array.devices[i].fd);
    array_free(&array);
}

/* Does what the commands say that lie in the submission queue. */
static void devices_work(struct ring *ring) {
    struct io_uring_sq *sq = &ring->uring.sq;
    for (unsigned at = sq->sqe_head; at != sq->sqe_tail; at++) {
        struct io_uring_sqe *sqe = &sq->sqes[(at & sq->ring_mask) << 1];
        const struct nvme_uring_cmd *cmd = (const void *)sqe->cmd;
        CHECK(sqe->opcode == IORING_OP_URING_CMD && sqe->fd >= 0 && sqe->fd < (int)DEVICES && cmd->nsid == (uint32_t)sqe->fd + 1);
        const struct device *device = &array.devices[sqe->fd];
        struct iovec one = {(void *)(uintptr_t)cmd->addr, cmd->data_len};
        const struct iovec *iovs = sqe->cmd_op == NVME_URING_CMD_IO_VEC ? (const struct iovec *)(uintptr_t)cmd->addr : &one;
        uint32_t count = sqe->cmd_op == NVME_URING_CMD_IO_VEC ? cmd->data_len : 1;
        CHECK(sqe->cmd_op == NVME_URING_CMD_IO_VEC || sqe->cmd_op == NVME_URING_CMD_IO);
        uint64_t offset = ((uint64_t)cmd->cdw11 << 32 | cmd->cdw10) * device->block_size, size = 0;
        for (uint32_t i = 0; i < count; i++) {
            CHECK(offset + size + iovs[i].iov_len <= SIZE);
            if (cmd->opcode == 1)
                memcpy(media[sqe->fd] + offset + size, iovs[i].iov_base, iovs[i].iov_len);
            else
                memcpy(iovs[i].iov_base, media[sqe->fd] + offset + size, iovs[i].iov_len);
            size += iovs[i].iov_len;
        }
        CHECK(size <= device->transfer_size && size == (cmd->cdw12 + 1ull) * device->block_size && (cmd->opcode == 1 || cmd->opcode == 2));
        uint64_t user_data = sqe->user_data;
        io_uring_prep_nop(sqe);
        sqe->user_data = user_data;
        commands++;
    }
}

struct wait {
    uint32_t left;
    int result;
};

static void io_done(struct io_group *group, bool reaped) {
    struct wait *wait = group->owner;
    CHECK(!reaped && wait->left == 1);
    wait->left = 0;
    wait->result = group->result;
}

static int io(struct ring *ring, bool write, uint32_t page, const struct iovec *iovs, uint32_t count, bool double_works) {
    struct wait wait = {1, 0};
    CHECK(ring_io(ring, write, 1, page, iovs, count, NULL, 0, io_done, &wait) == 0);
    if (double_works)
        devices_work(ring);
    while (wait.left) {
        ring_wait(ring, 1000000000u);
        ring_reap(ring);
    }
    CHECK(ring_idle(ring));
    return wait.result;
}

static void test_runs_become_commands_that_cover_them(void) {
    static const uint32_t widths[] = {1, 2, 4}, transfers[] = {65536, 131072, 262144}, blocks[] = {512, 4096};
    for (uint32_t shape = 0; shape < 18; shape++) {
        struct ring ring;
        uint64_t seed = shape, pages;
        array_make(widths[shape % 3], blocks[shape / 9], transfers[shape / 3 % 3]);
        CHECK(ring_init(&ring, &array, 2048) == 0);
        uint8_t *model = malloc(array.geometry.segment_size), *data = malloc(array.geometry.segment_size);
        CHECK(model && data);
        for (uint32_t turn = 0; turn < 60; turn++) {
            bool write = turn % 2 == 0;
            struct iovec iovs[64];
            uint64_t size = 0;
            uint32_t count = 1 + (uint32_t)random_below(&seed, 64);
            pages = array.geometry.segment_pages;
            if (turn == 0) { /* all of it, so that the model is whole */
                iovs[0] = (struct iovec){data, size = array.geometry.segment_size};
                count = 1;
            }
            for (uint32_t i = 0; turn && i < count; i++) { /* in memory sometimes one after the other, sometimes a page apart */
                uint64_t gap = i && random_below(&seed, 2) ? PAGE : 0;
                uint64_t length = PAGE * (1 + random_below(&seed, 20));
                uint8_t *at = i ? (uint8_t *)iovs[i - 1].iov_base + iovs[i - 1].iov_len + gap : data;
                if (at + length > data + array.geometry.segment_size) {
                    count = i;
                    break;
                }
                iovs[i] = (struct iovec){at, length};
                size += length;
            }
            uint32_t page = (uint32_t)random_below(&seed, pages - size / PAGE + 1);
            for (uint64_t i = 0; i < array.geometry.segment_size; i += 8) {
                uint64_t value = random_next(&seed);
                memcpy(data + i, &value, 8);
            }
            uint32_t before = commands;
            CHECK_SAY(io(&ring, write, page, iovs, count, true) == 0, "shape %u, turn %u", shape, turn);
            CHECK(commands > before);
            uint64_t at = page * (uint64_t)PAGE;
            for (uint32_t i = 0; i < count; i++) {
                if (write)
                    memcpy(model + at, iovs[i].iov_base, iovs[i].iov_len);
                CHECK_SAY(memcmp(model + at, iovs[i].iov_base, iovs[i].iov_len) == 0, "shape %u, turn %u, iovec %u", shape, turn, i);
                at += iovs[i].iov_len;
            }
        }
        free(model);
        free(data);
        ring_free(&ring);
        array_end();
    }
}

/* All commands of a part must have ended before its memory is given back: one callback, with the error. */
static void test_commands_that_fail_end_their_run_once(void) {
    struct ring ring;
    array_make(2, 4096, 16384);
    CHECK(ring_init(&ring, &array, 256) == 0);
    uint8_t *data = calloc(64, PAGE);
    CHECK(data);
    CHECK(io(&ring, true, 3, &(struct iovec){data, 64 * PAGE}, 1, false) < 0);
    CHECK(atomic_load(&array.devices[1].errors) == 1 && atomic_load(&array.devices[2].errors) == 1);
    CHECK(io(&ring, true, 3, &(struct iovec){data, 64 * PAGE}, 1, true) == 0);
    free(data);
    ring_free(&ring);
    array_end();
}

int main(void) {
    for (uint32_t i = 0; i < DEVICES; i++)
        CHECK(media[i] = calloc(1, SIZE));
    RUN(test_runs_become_commands_that_cover_them);
    RUN(test_commands_that_fail_end_their_run_once);
    for (uint32_t i = 0; i < DEVICES; i++)
        free(media[i]);
    return 0;
}
