/* sources: base io */
/* The NVMe/TCP initiator against a target that is late, gone or wrong (doubles/target.h). Proven under the sanitizers: whatever a target sends, I/O
 * ends within its deadline, with the right bytes or an error. Memory of a command that was given up is not written to. A target that comes back is
 * used again if it is the same one.
 */
#include "nvme_harness.h"

static void every_trick_ends_in_an_error_within_the_deadline(void) {
    for (uint32_t digests = 0; digests < 4; digests += 3)
        for (enum trick trick = SWALLOW; trick < TRICKS; trick++) {
            if (digests == 0 && (trick == BAD_HEADER_DIGEST || trick == BAD_DATA_DIGEST))
                continue; /* nobody would see it */
            world_start(digests, trick % 2 + 1, 300 * slowness());
            struct ring ring;
            struct wait wait;
            uint8_t *data = malloc(GROUP_BYTES), *back = malloc(GROUP_BYTES);
            CHECK(data && back && ring_init(&ring, &world.array, 64) == 0);
            fill(data, PAGE * 64, trick);
            await_recovery(&ring, back);
            await_io(&ring, true, data);
            for (uint32_t write = 0; write < 2; write++) {
                struct target *t = &world.targets[0];
                atomic_store(&t->trick, trick);
                atomic_store(&t->count, 0);
                atomic_store(&t->every, 1);
                bool ends_well = (write && (trick == DATA_OFFSET + 99)) || (trick == R2T_OFFSET && !write) || (trick == R2T_TOO_LONG && !write) ||
                                 (trick == R2T_ZERO && !write) || (trick == R2T_TWICE && !write);
                uint64_t began = now_ns();
                int r = io(&ring, write, 0, 0, write ? data : back, PAGE * 64, &wait);
                CHECK_SAY(ends_well ? r == 0 : r < 0, "trick %d, write %u: %d", trick, write, r);
                CHECK_SAY(wait.ended_ns - began < 600 * MS * slowness(), "trick %d, write %u: %llu us", trick, write,
                          (unsigned long long)(wait.ended_ns - began) / 1000);
                atomic_store(&t->every, 0);
                settle(&ring, &wait);
                await_recovery(&ring, back);
                if (!write)
                    CHECK(memcmp(data, back, PAGE * 64) == 0);
                else
                    await_io(&ring, true, data);
            }
            ring_free(&ring);
            world_end();
            free(data), free(back);
        }
}

static void memory_of_a_read_given_up_on_is_not_written(void) {
    world_start(2, 0, 200 * slowness());
    struct ring ring;
    struct wait wait;
    uint8_t *data = malloc(PAGE * 64), *back = malloc(PAGE * 64);
    CHECK(data && back && ring_init(&ring, &world.array, 64) == 0);
    fill(data, PAGE * 64, 1);
    CHECK(io(&ring, true, 1, 0, data, PAGE * 64, &wait) == 0);
    atomic_store(&world.targets[1].delay_ms, 350 * slowness());
    CHECK(io(&ring, false, 1, 0, back, PAGE * 64, &wait) == -ETIMEDOUT);
    CHECK(wait.expired == 0); /* reaped in the same step */
    memset(back, 0xa5, PAGE * 64);
    uint64_t until = now_ns() + 600 * MS * slowness();
    while (now_ns() < until) {
        ring_wait(&ring, 10 * MS);
        ring_reap(&ring);
    }
    for (uint32_t i = 0; i < PAGE * 64; i++)
        CHECK(back[i] == 0xa5);
    atomic_store(&world.targets[1].delay_ms, 0);
    await_recovery(&ring, back);
    CHECK(io(&ring, false, 1, 0, back, PAGE * 64, &wait) == 0 && memcmp(data, back, PAGE * 64) == 0);
    ring_free(&ring);
    world_end();
    free(data), free(back);
}

/* I/O that is a part of something ends when that is to end, if what began before takes longer, too; then no device is to blame. */
static void a_part_ends_with_the_deadline_of_the_whole(void) {
    world_start(0, 0, 4000 * slowness());
    struct ring ring;
    struct wait whole = {.left = 1}, part = {.left = 1};
    uint8_t *data = malloc(PAGE * 64), *back = malloc(PAGE * 128);
    CHECK(data && back && ring_init(&ring, &world.array, 64) == 0);
    fill(data, PAGE * 64, 1);
    CHECK(io(&ring, true, 1, 0, data, PAGE * 64, &whole) == 0);
    atomic_store(&world.targets[1].delay_ms, 500 * slowness());
    whole = (struct wait){.left = 1};
    CHECK(ring_io(&ring, false, 1, 0, &(struct iovec){back, PAGE * 64}, 1, NULL, 0, io_done, &whole) == 0);
    uint64_t began = now_ns();
    ring.until_ns = began;
    CHECK(ring_io(&ring, false, 1, 0, &(struct iovec){back + PAGE * 64, PAGE * 64}, 1, NULL, 0, io_done, &part) == -ETIMEDOUT);
    ring.until_ns = began + 100 * MS * slowness();
    CHECK(ring_io(&ring, false, 1, 0, &(struct iovec){back + PAGE * 64, PAGE * 64}, 1, NULL, 0, io_done, &part) == 0);
    ring.until_ns = 0;
    ring_submit(&ring);
    while (whole.left || part.left) {
        ring_wait(&ring, 1000 * MS);
        ring_reap(&ring);
    }
    CHECK(part.result == -ETIMEDOUT && part.ended_ns >= began + 100 * MS * slowness() && part.ended_ns < whole.ended_ns);
    CHECK(whole.result == 0 && memcmp(data, back, PAGE * 64) == 0);
    for (uint32_t i = 0; i < world.array.device_count; i++)
        CHECK(atomic_load(&world.array.devices[i].timeouts) == 0);
    settle(&ring, &part);
    ring_free(&ring);
    world_end();
    free(data), free(back);
}

/* A client leaves a device alone that missed a deadline; then one I/O finds out whether it answers, and the others do not wait with it. */
static void a_silent_device_is_tried_by_one(void) {
    const uint32_t timeout = 300 * slowness(); /* a read is one command, answered before the connection is given up */
    world_start(0, 0, timeout);
    world.array.fail_fast = true;
    struct ring ring;
    struct wait wait;
    uint8_t *data = malloc(PAGE), *back = malloc(PAGE);
    const struct iovec iov = {back, PAGE};
    CHECK(data && back && ring_init(&ring, &world.array, 64) == 0);
    fill(data, PAGE, 1);
    CHECK(io(&ring, true, 1, 0, data, PAGE, &wait) == 0);
    atomic_store(&world.targets[0].delay_ms, 2 * timeout);
    CHECK(io(&ring, false, 1, 0, back, PAGE, &wait) == -ETIMEDOUT);
    settle(&ring, &wait);
    for (int turn = 0; turn < 2; turn++) {
        CHECK(ring_io(&ring, false, 1, 0, &iov, 1, NULL, 0, io_done, &wait) == -ETIMEDOUT);
        usleep(5 * timeout * 1000);
        if (turn == 1)
            atomic_store(&world.targets[0].delay_ms, 0);
        struct wait other;
        wait = (struct wait){.left = 1};
        CHECK(ring_io(&ring, false, 1, 0, &iov, 1, NULL, 0, io_done, &wait) == 0);
        CHECK(ring_io(&ring, false, 1, 0, &iov, 1, NULL, 0, io_done, &other) == -ETIMEDOUT);
        ring_submit(&ring);
        while (wait.left) {
            ring_wait(&ring, 1000 * MS);
            ring_reap(&ring);
        }
        CHECK_SAY(wait.result == (turn == 0 ? -ETIMEDOUT : 0), "%d in turn %d", wait.result, turn);
        CHECK(turn == 0 || memcmp(data, back, PAGE) == 0);
        settle(&ring, &wait);
    }
    CHECK(io(&ring, false, 1, 0, back, PAGE, &wait) == 0);
    ring_free(&ring);
    world_end();
    free(data), free(back);
}

static void a_target_that_is_gone_fails_at_once_and_is_used_when_it_is_back(void) {
    world_start(0, 0, 2000);
    struct ring ring;
    struct wait wait;
    uint8_t *data = malloc(PAGE * 64), *back = malloc(PAGE * 64);
    char text[300];
    CHECK(data && back && ring_init(&ring, &world.array, 64) == 0);
    fill(data, PAGE * 64, 2);
    CHECK(io(&ring, true, 1, 0, data, PAGE * 64, &wait) == 0);
    target_stop(&world.targets[0], false);
    CHECK(io(&ring, false, 1, 0, back, PAGE * 64, &wait) < 0);
    uint64_t began = now_ns();
    for (uint32_t i = 0; i < 100; i++) {
        int r = io(&ring, false, 1, 0, back, PAGE * 64, &wait);
        CHECK_SAY(r < 0 && r != -ENODEV, "%d: a device that is gone for good", r);
    }
    CHECK(now_ns() - began < 500 * MS * slowness());
    CHECK(nvme_device_message(&world.array, 0, text, sizeof(text)) == 0 && strstr(text, "lost"));
    CHECK(nvme_device_message(&world.array, 3, text, sizeof(text)) == 1);
    target_start(&world.targets[0], true);
    await_recovery(&ring, back);
    CHECK(io(&ring, false, 1, 0, back, PAGE * 64, &wait) == 0 && memcmp(data, back, PAGE * 64) == 0);
    for (uint32_t other = 0; other < 3; other++) { /* another label; another epoch; another namespace */
        struct kvfs_label label = {.magic = KVFS_MAGIC_LABEL, .mount_epoch = other == 1 ? 4 : 3, .device_index = 0, .pool_uuid = {other == 0}};
        target_stop(&world.targets[0], false);
        memcpy(world.targets[0].memory[0], &label, sizeof(label));
        world.targets[0].identity[0] = other == 2 ? 50 : 1;
        target_start(&world.targets[0], true);
        uint64_t until = now_ns() + 20000 * MS;
        while (io(&ring, false, 1, 16, back, PAGE * 16, &wait) < 0) { /* device 1: the same enclosure */
            CHECK(now_ns() < until);
            usleep(10000);
        }
        CHECK(io(&ring, false, 1, 0, back, PAGE * 16, &wait) < 0); /* device 0 */
    }
    ring_free(&ring);
    world_end();
    free(data), free(back);
}

/* Nodes of a pod mount at any time and write no label for it. A label changes when the pool's description does. */
static void the_label_of_a_pod_names_no_mount_and_may_change_its_text(void) {
    label_epoch = 0;
    world_start(0, 0, 2000);
    label_epoch = 3;
    struct ring ring;
    struct wait wait;
    uint8_t *data = malloc(PAGE * 64), *back = malloc(PAGE * 64);
    CHECK(data && back && ring_init(&ring, &world.array, 64) == 0);
    fill(data, PAGE * 64, 2);
    CHECK(io(&ring, true, 1, 0, data, PAGE * 64, &wait) == 0);
    struct kvfs_label label = {.magic = KVFS_MAGIC_LABEL, .checksum = 77, .text_size = 1234, .device_index = 0};
    target_stop(&world.targets[0], false);
    memcpy(world.targets[0].memory[0], &label, sizeof(label));
    target_start(&world.targets[0], true);
    await_recovery(&ring, back);
    CHECK(io(&ring, false, 1, 0, back, PAGE * 64, &wait) == 0 && memcmp(data, back, PAGE * 64) == 0);
    ring_free(&ring);
    world_end();
    free(data), free(back);
}

static void a_silent_target_is_noticed_by_keep_alive(void) {
    world_start(0, 0, 5000);
    struct ring ring;
    struct wait wait;
    uint8_t *back = malloc(PAGE * 64);
    CHECK(back && ring_init(&ring, &world.array, 64) == 0);
    CHECK(io(&ring, false, 1, 0, back, PAGE * 64, &wait) == 0);
    uint64_t until = now_ns() + 3000 * MS * slowness();
    while (atomic_load(&world.targets[0].alive) < 2 || atomic_load(&world.targets[1].alive) < 2) {
        CHECK(now_ns() < until);
        usleep(1000);
    }
    ring_free(&ring);
    world_end();
    free(back);
}

int main(void) {
    slowness(); /* measured now: later it would take time from what is timed */
    RUN(memory_of_a_read_given_up_on_is_not_written);
    RUN(a_part_ends_with_the_deadline_of_the_whole);
    RUN(a_silent_device_is_tried_by_one);
    RUN(a_target_that_is_gone_fails_at_once_and_is_used_when_it_is_back);
    RUN(the_label_of_a_pod_names_no_mount_and_may_change_its_text);
    RUN(a_silent_target_is_noticed_by_keep_alive);
    RUN(every_trick_ends_in_an_error_within_the_deadline);
    return 0;
}
