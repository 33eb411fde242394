/* sources: base io */
/* The NVMe/TCP initiator against a double of a target (doubles/target.h). Proven under the sanitizers: a wrong greeting is an error. All bytes
 * written are read again, in each shape that the specification allows, by one thread and by many.
 */
#include "nvme_harness.h"

static void crc_of_known_and_odd_pieces(void) {
    uint8_t data[20000];
    CHECK(nvme_crc32c(0, "123456789", 9) == 0xe3069283u);
    fill(data, sizeof(data), 4);
    uint64_t seed = 5;
    for (uint32_t i = 0; i < 200; i++) {
        uint64_t from = random_below(&seed, 100), size = random_below(&seed, sizeof(data) - 100), cut = random_below(&seed, size + 1);
        uint32_t slow = ~0u;
        for (uint64_t at = from; at < from + size; at++) {
            slow ^= data[at];
            for (int bit = 0; bit < 8; bit++)
                slow = slow >> 1 ^ (slow & 1 ? 0x82f63b78u : 0);
        }
        CHECK(nvme_crc32c(0, data + from, size) == ~slow);
        CHECK(nvme_crc32c(nvme_crc32c(0, data + from, cut), data + from + cut, size - cut) == ~slow);
    }
}

static void helpers_read_write_list_discover(void) {
    for (uint32_t digests = 0; digests < 4; digests++) {
        static struct target t;
        target_start(&t, false);
        struct kvfs_nvme_target target = where(&t, 2, digests);
        struct kvfs_nvme *nvme;
        struct kvfs_nvme_info info;
        struct kvfs_nvme_subsystem found[4];
        uint8_t data[65536], back[65536];
        uint32_t list[4];
        CHECK_SAY(kvfs_nvme_open(&target, &nvme) == 0, "%s", kvfs_nvme_error());
        CHECK(kvfs_nvme_info(nvme, &info) == 0 && info.size == SIZE && info.block_size == 512 && strcmp(info.model, "double") == 0);
        fill(data, sizeof(data), digests);
        CHECK(kvfs_nvme_write(nvme, 4096, data, sizeof(data)) == 0 && kvfs_nvme_flush(nvme) == 0);
        CHECK(kvfs_nvme_read(nvme, 4096, back, sizeof(back)) == 0 && memcmp(data, back, sizeof(data)) == 0);
        CHECK(kvfs_nvme_read(nvme, SIZE - 4096, back, 8192) == -EINVAL);
        CHECK(kvfs_nvme_namespaces(nvme, list, 4) == 2 && list[1] == 2);
        target_stop(&t, false); /* it comes back, and the next call finds it */
        target_start(&t, true);
        CHECK_SAY(kvfs_nvme_read(nvme, 4096, back, sizeof(back)) == 0, "%s", kvfs_nvme_error());
        CHECK(kvfs_nvme_discover(&target, found, 4) == 2 && strcmp(found[1].nqn, target.nqn) == 0 && strcmp(found[0].port, "4420") == 0);
        t.identity[1] = 99;
        target_stop(&t, false);
        target_start(&t, true);
        CHECK(kvfs_nvme_read(nvme, 4096, back, 4096) == -ESTALE);
        kvfs_nvme_close(nvme);
        target.nsid = 3;
        CHECK(kvfs_nvme_open(&target, &nvme) < 0 && strstr(kvfs_nvme_error(), "namespace 3"));
        target.nsid = 1;
        atomic_store(&t.refuse, 1);
        CHECK(kvfs_nvme_open(&target, &nvme) == -EACCES);
        target_stop(&t, true);
        CHECK(kvfs_nvme_open(&target, &nvme) == -ECONNREFUSED);
    }
}

static void greetings_that_are_wrong_are_errors(void) {
    static struct target t;
    target_start(&t, false);
    struct kvfs_nvme_target target = where(&t, 1, 3);
    struct kvfs_nvme *nvme;
    for (enum trick trick = GREET_SILENT; trick <= GREET_VERSION; trick++) {
        atomic_store(&t.trick, trick);
        uint64_t began = now_ns();
        CHECK(kvfs_nvme_open(&target, &nvme) < 0 && kvfs_nvme_error()[0]);
        CHECK(now_ns() - began < 2500 * MS * slowness());
    }
    target_stop(&t, true);
}

static void what_is_written_is_read_in_every_shape(void) {
    for (uint32_t shape = 0; shape < 15; shape++) {
        world_start(shape % 4, shape, 5000);
        struct ring ring;
        struct wait wait;
        uint64_t seed = shape, stripe = world.array.geometry.segment_size;
        uint8_t *model = calloc(SEGMENTS, stripe), *data = malloc(GROUP_BYTES), *back = malloc(GROUP_BYTES);
        CHECK(model && data && back && ring_init(&ring, &world.array, 64) == 0);
        for (uint32_t i = 0; i < 60; i++) {
            uint32_t segment = (uint32_t)random_below(&seed, SEGMENTS), pages = (uint32_t)random_below(&seed, i % 4 ? 20 : 400) + 1;
            uint32_t page = (uint32_t)random_below(&seed, world.array.geometry.segment_pages - pages);
            fill(data, pages * PAGE, i);
            CHECK_SAY(io(&ring, true, segment, page, data, pages * PAGE, &wait) == 0, "shape %u: %d", shape, wait.result);
            memcpy(model + segment * stripe + page * PAGE, data, pages * PAGE);
            page = (uint32_t)random_below(&seed, world.array.geometry.segment_pages - pages);
            CHECK(io(&ring, false, segment, page, back, pages * PAGE, &wait) == 0);
            CHECK(memcmp(model + segment * stripe + page * PAGE, back, pages * PAGE) == 0);
        }
        ring_free(&ring);
        world_end();
        free(model), free(data), free(back);
    }
}

static void *many_main(void *argument) {
    uint32_t segment = (uint32_t)(uintptr_t)argument;
    struct ring ring;
    struct wait waits[16];
    uint8_t *data = malloc(16 * 16 * PAGE), *back = malloc(16 * 16 * PAGE);
    CHECK(data && back && ring_init(&ring, &world.array, 64) == 0);
    for (uint32_t round = 0; round < 20; round++)
        for (uint32_t write = 2; write-- > 0;) {
            fill(data, 16 * 16 * PAGE, segment * 1000 + round);
            for (uint32_t i = 0; i < 16; i++) {
                waits[i] = (struct wait){.left = 1};
                CHECK(ring_io(&ring, write, segment, i * 16, &(struct iovec){(write ? data : back) + i * 16 * PAGE, 16 * PAGE}, 1, NULL, 0, io_done,
                              &waits[i]) == 0);
            }
            ring_submit(&ring);
            for (uint32_t i = 0; i < 16; i++)
                while (waits[i].left) {
                    ring_reap(&ring);
                    if (waits[i].left)
                        ring_wait(&ring, 1000 * MS);
                }
            for (uint32_t i = 0; i < 16; i++)
                CHECK(waits[i].result == 0);
            CHECK(write || memcmp(data, back, 16 * 16 * PAGE) == 0);
        }
    ring_free(&ring);
    free(data), free(back);
    return NULL;
}

static void threads_have_queues_of_their_own(void) {
    world_start(3, 1, 10000);
    pthread_t threads[SEGMENTS];
    for (uintptr_t i = 0; i < SEGMENTS; i++)
        CHECK(pthread_create(&threads[i], NULL, many_main, (void *)i) == 0);
    for (uint32_t i = 0; i < SEGMENTS; i++)
        pthread_join(threads[i], NULL);
    world_end();
}

static void rings_share_the_queues_that_are_granted(void) {
    world_start(0, 0, 5000 * slowness());
    struct ring rings[9];
    struct wait wait;
    uint8_t *back = malloc(PAGE * 64);
    CHECK(back);
    for (uint32_t i = 0; i < 9; i++)
        CHECK(ring_init(&rings[i], &world.array, 64) == 0);
    for (uint32_t i = 0; i < 36; i++) { /* seven queues, and nobody who has one is awake to give it away */
        int r = io(&rings[i * 4 % 9], false, 1, 0, back, PAGE * 64, &wait);
        CHECK_SAY(r == 0, "ring %u: %d", i * 4 % 9, r);
    }
    for (uint32_t i = 0; i < 9; i++)
        ring_free(&rings[i]);
    world_end();
    free(back);
    for (queues_granted = 2; queues_granted < 5; queues_granted += 2) { /* one queue, three: all are wanted all the time */
        world_start(3, 1, 10000 * slowness());
        pthread_t threads[SEGMENTS];
        for (uintptr_t i = 0; i < SEGMENTS; i++)
            CHECK(pthread_create(&threads[i], NULL, many_main, (void *)i) == 0);
        for (uint32_t i = 0; i < SEGMENTS; i++)
            pthread_join(threads[i], NULL);
        world_end();
    }
    queues_granted = 8;
}

int main(void) {
    slowness(); /* measured now: later it would take time from what is timed */
    RUN(crc_of_known_and_odd_pieces);
    RUN(helpers_read_write_list_discover);
    RUN(greetings_that_are_wrong_are_errors);
    RUN(what_is_written_is_read_in_every_shape);
    RUN(threads_have_queues_of_their_own);
    RUN(rings_share_the_queues_that_are_granted);
    return 0;
}
