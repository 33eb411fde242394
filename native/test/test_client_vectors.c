/* sources: base block io client pod */
/* Reads into memory in pieces, and of parts of blocks, with a double of the daemon (doubles/daemon.h). Any pieces and ranges against a model, on any
 * layout. Devices are read for nothing but the leaves that are asked for, and the header pages that prove these. */
#include "client_harness.h"

#define BLOCKS 7u
static const uint64_t SIZES[BLOCKS] = {0, 1, 4095, 4096, 4097, 70001, (2 << 20) + 1};

static uint64_t device_bytes(struct kvfs_client *client) {
    uint64_t total = 0;
    for (uint32_t i = 0; i < DEVICES; i++)
        total += atomic_load(&client->connection->array.devices[i].read_bytes);
    return total;
}

/* Pieces of one block in an arena, with gaps of their own: some lie side by side, some are empty, some aligned. */
struct scatter {
    uint8_t *arena;
    uint64_t arena_size, used;
    struct kvfs_buffer *pieces;
    uint32_t count, capacity;
};

static void scatter_new(struct scatter *s, uint64_t arena_size, uint32_t capacity) {
    *s = (struct scatter){.arena_size = round_up(arena_size, PAGE), .capacity = capacity};
    s->arena = pages_get(s->arena_size / PAGE);
    memset(s->arena, 0xa5, s->arena_size);
    s->pieces = calloc(capacity, sizeof(*s->pieces));
}

static void scatter_free(struct scatter *s) {
    free(s->arena);
    free(s->pieces);
}

static void scatter_add(struct scatter *s, uint64_t at, uint64_t size) {
    CHECK(s->count < s->capacity && at + size <= s->arena_size && at >= s->used);
    s->pieces[s->count++] = (struct kvfs_buffer){s->arena + at, size};
    s->used = at + size;
}

/* Pieces for `size` bytes, none larger than `largest`. */
static void scatter_random(struct scatter *s, uint64_t size, uint64_t largest, uint64_t *seed) {
    s->count = 0;
    s->used = 0;
    while (size && s->count + 2 < s->capacity) {
        uint64_t part = 1 + random_below(seed, min_u64(size, largest)), at = s->used;
        switch (random_below(seed, 6)) {
        case 0: break;                                                       /* beside the one before */
        case 1: at += 1 + random_below(seed, 900); break;                    /* anywhere */
        case 2: at = round_up(at, 512) + 512 * random_below(seed, 4); break; /* where some devices can write */
        case 3: scatter_add(s, at, 0); break;
        default: at = round_up(at, PAGE); part = part > PAGE ? part / PAGE * PAGE : part;
        }
        scatter_add(s, at, part);
        size -= part;
    }
    if (size)
        scatter_add(s, s->used + 7, size);
}

static uint64_t scatter_size(const struct scatter *s) {
    uint64_t size = 0;
    for (uint32_t i = 0; i < s->count; i++)
        size += s->pieces[i].size;
    return size;
}

/* The pieces hold these bytes, and nothing else in the arena was touched. */
static void scatter_check(struct scatter *s, const uint8_t *model, uint64_t size) {
    for (uint32_t i = 0; i < s->count; i++) {
        uint64_t part = min_u64(size, s->pieces[i].size);
        CHECK_SAY(part == 0 || memcmp(s->pieces[i].data, model, part) == 0, "piece %u of %u", i, s->count);
        memset(s->pieces[i].data, 0xa5, part);
        model += part;
        size -= part;
    }
    CHECK(size == 0);
    for (uint64_t i = 0; i < s->arena_size && i < s->used + 8 * PAGE; i++)
        CHECK_SAY(s->arena[i] == 0xa5, "byte %llu", (unsigned long long)i);
}

static int64_t read_one(struct kvfs_client *client, const char *key, bool range, uint64_t offset, const struct kvfs_buffer *pieces, uint32_t count) {
    uint32_t key_size = (uint32_t)strlen(key);
    struct kvfs_keys keys = {key, &key_size, 1, 0};
    struct kvfs_vector vector = {pieces, count, 0, offset};
    int64_t result = 12345;
    int r = (range ? kvfs_get_ranges : kvfs_get_vectors)(client, &keys, &vector, &result);
    CHECK(r < 0 || (r == 1) == (result >= 0));
    return r < 0 ? r : result;
}

static void layout(uint32_t split, bool header_alone, uint32_t header_extra) {
    locked();
    d.split = split;
    d.header_alone = header_alone;
    d.header_extra = header_extra;
    unlocked();
}

static void any_pieces(uint64_t stripe_unit, uint64_t seed) {
    printf("   seed %llu\n", (unsigned long long)seed);
    pool_new(stripe_unit);
    struct kvfs_client *client = connect_plain();
    struct scatter s;
    scatter_new(&s, 5 << 20, 600);
    for (uint32_t round = 0; round < 4; round++) {
        layout(1 + round % 3, round == 2, round == 3 ? 5 : 0);
        struct batch *b = put_batch(client, 0, BLOCKS, SIZES, BLOCKS, round);
        for (uint32_t i = 0; i < BLOCKS; i++) {
            char key[16];
            const uint8_t *model = b->buffers[i].data;
            uint64_t size = SIZES[i];
            sprintf(key, "key-%u", i);
            for (uint32_t n = 0; n < (size > 100000 ? 4u : 12u); n++) {
                uint64_t slack = random_below(&seed, 3) ? 0 : random_below(&seed, 10000);
                scatter_random(&s, size + slack, n % 2 ? 3000 : 70000, &seed);
                int64_t got = read_one(client, key, false, 77, s.pieces, s.count);
                CHECK_SAY(got == (int64_t)size, "%lld of %llu: %s", (long long)got, (unsigned long long)size, kvfs_error());
                scatter_check(&s, model, size);
                uint64_t offset = random_below(&seed, size + 5000), wanted = random_below(&seed, size + 5000);
                if (n % 3 == 0)
                    offset = offset / PAGE * PAGE, wanted = round_up(wanted, PAGE);
                scatter_random(&s, wanted, n % 2 ? 2000 : 70000, &seed);
                uint64_t expected = offset >= size ? 0 : min_u64(scatter_size(&s), size - offset);
                got = read_one(client, key, true, offset, s.pieces, s.count);
                CHECK_SAY(got == (int64_t)expected, "%lld of %llu at %llu: %s", (long long)got, (unsigned long long)expected,
                          (unsigned long long)offset, kvfs_error());
                scatter_check(&s, expected ? model + offset : model, expected);
            }
            if (size) { /* too small by a byte: nothing is read */
                scatter_random(&s, size, 5000, &seed);
                s.pieces[s.count - 1].size--;
                CHECK(read_one(client, key, false, 0, s.pieces, s.count) == -ERANGE);
                scatter_check(&s, model, 0);
            }
        }
        batch_free(b);
    }
    struct kvfs_client_statistics statistic = statistics(client);
    CHECK(statistic.checksum_errors == 0 && statistic.retries == 0 && statistic.timeouts == 0 && statistic.bounced_bytes > 0);
    scatter_free(&s);
    kvfs_close(client);
    daemon_stop(false);
}

static void test_any_pieces_and_ranges(void) {
    any_pieces(16384, 1);
    any_pieces(131072, now_ns());
}

/* 32 layers, each at home in a tensor of its own; 500 pieces; pages, each in another place. */
static void test_many_pieces(void) {
    static const struct {
        uint32_t count;
        uint64_t size, stride;
    } shapes[] = {{32, 65536, 65536 + 4096}, {32, 65536, 65536 + 16}, {500, 4096, 8192}, {500, 4095, 5000}, {512, 4096, 4096}};
    static const uint64_t size = 2 << 20;
    pool_new(16384);
    struct kvfs_client *client = connect_plain();
    struct batch *b = put_batch(client, 0, 1, &size, 1, 1);
    struct scatter s;
    scatter_new(&s, 8 << 20, 513);
    for (uint32_t i = 0; i < sizeof(shapes) / sizeof(shapes[0]); i++) {
        uint64_t bounced = statistics(client).bounced_bytes, total = shapes[i].count * shapes[i].size;
        s.count = 0, s.used = 0;
        for (uint32_t k = 0; k < shapes[i].count; k++)
            scatter_add(&s, k * shapes[i].stride, shapes[i].size);
        if (total < size)
            scatter_add(&s, 6 << 20, size - total);
        CHECK_SAY(read_one(client, "key-0", false, 0, s.pieces, s.count) == (int64_t)size, "shape %u: %s", i, kvfs_error());
        scatter_check(&s, b->buffers[0].data, size);
        bounced = statistics(client).bounced_bytes - bounced;
        bool in_place = shapes[i].size % PAGE == 0 && shapes[i].stride % PAGE == 0;
        CHECK_SAY(in_place == (bounced == 0), "shape %u: %llu bytes", i, (unsigned long long)bounced);
    }
    scatter_free(&s);
    batch_free(b);
    kvfs_close(client);
    daemon_stop(false);
}

/* Vectors of one call may share nothing; what overlaps is named. A key may come many times. */
static void test_a_batch_of_vectors(void) {
    static const uint64_t size = 100000;
    pool_new(65536);
    struct kvfs_client *client = connect_plain();
    struct batch *b = put_batch(client, 0, 1, &size, 1, 1);
    uint8_t *memory = pages_get(100), *model = b->buffers[0].data;
    uint32_t key_sizes[] = {5, 5, 7, 5};
    struct kvfs_keys keys = {"key-0key-0nothingkey-0", key_sizes, 4, 0};
    struct kvfs_buffer pieces[] = {{memory, 1000}, {memory + 4096, 4096}, {memory + 9000, 10}, {memory + 10000, 3000}, {memory + 20000, 5000}};
    struct kvfs_vector vectors[] = {{&pieces[0], 2, 0, 50}, {&pieces[2], 1, 0, 99995}, {&pieces[3], 1, 0, 0}, {&pieces[4], 1, 0, 8192}};
    int64_t results[4];
    CHECK_SAY(kvfs_get_ranges(client, &keys, vectors, results) == 3, "%s", kvfs_error());
    CHECK(results[0] == 5096 && results[1] == 5 && results[2] == -ENOENT && results[3] == 5000);
    CHECK(memcmp(memory, model + 50, 1000) == 0 && memcmp(memory + 4096, model + 1050, 4096) == 0);
    CHECK(memcmp(memory + 9000, model + 99995, 5) == 0 && memcmp(memory + 20000, model + 8192, 5000) == 0);
    pieces[3].data = memory + 8191;
    CHECK(kvfs_get_ranges(client, &keys, vectors, results) == -EINVAL && says("buffers 0, piece 1 and 2 overlap"));
    pieces[3] = (struct kvfs_buffer){NULL, 1};
    CHECK(kvfs_get_ranges(client, &keys, vectors, results) == -EINVAL && says("buffer 2"));
    pieces[1] = (struct kvfs_buffer){(void *)(UINTPTR_MAX - 10), 100};
    CHECK(kvfs_get_ranges(client, &keys, vectors, results) == -EINVAL && says("buffer 0, piece 1"));
    /* No pieces at all: only the question whether it is there. */
    struct kvfs_vector none[4] = {{0}};
    CHECK(kvfs_get_ranges(client, &keys, none, results) == 3 && results[0] == 0 && results[2] == -ENOENT);
    CHECK(kvfs_get_vectors(client, &keys, none, results) == 0 && results[0] == -ERANGE && results[2] == -ENOENT);
    free(memory);
    batch_free(b);
    kvfs_close(client);
    daemon_stop(false);
}

enum { LAYER = 65536 };

/* 64 KiB out of each of 20 blocks: their 16 leaves and the header's one or two pages, and nothing else. */
static void layers_cost_their_leaves(struct kvfs_client *client, uint64_t size, uint32_t header_pages) {
    enum { COUNT = 20 };
    struct batch *b = put_batch(client, 0, COUNT, &size, 1, header_pages);
    CHECK(kvfs_header_pages(size, 256, 512, 4) == header_pages);
    struct kvfs_buffer *pieces = calloc(COUNT, sizeof(*pieces));
    struct kvfs_vector *vectors = calloc(COUNT, sizeof(*vectors));
    uint8_t *memory = pages_get(COUNT * (LAYER / PAGE + 1));
    for (uint32_t round = 0; round < 5; round++) {
        const uint64_t offsets[] = {0, 7 * LAYER, size - LAYER, 3 * LAYER + 1, 11 * LAYER + 4000};
        uint64_t leaves = LAYER / PAGE + (offsets[round] % PAGE != 0), before = device_bytes(client);
        for (uint32_t i = 0; i < COUNT; i++) {
            pieces[i] = (struct kvfs_buffer){memory + i * (LAYER + PAGE), LAYER};
            vectors[i] = (struct kvfs_vector){&pieces[i], 1, 0, offsets[round]};
        }
        CHECK_SAY(kvfs_get_ranges(client, &b->keys, vectors, b->results) == COUNT, "%s", kvfs_error());
        for (uint32_t i = 0; i < COUNT; i++)
            CHECK(b->results[i] == LAYER && memcmp(pieces[i].data, (uint8_t *)b->buffers[i].data + offsets[round], LAYER) == 0);
        CHECK_SAY(device_bytes(client) - before == COUNT * (leaves + header_pages) * PAGE, "%llu bytes",
                  (unsigned long long)(device_bytes(client) - before));
    }
    free(memory);
    free(vectors);
    free(pieces);
    batch_free(b);
}

static void test_ranges_cost_their_leaves(void) {
    pool_new(131072);
    struct kvfs_client *client = connect_with((struct kvfs_options){.timeout_ms = 30000, .depth = 32});
    struct batch *b;
    layers_cost_their_leaves(client, 1 << 20, 1);
    layers_cost_their_leaves(client, 2 << 20, 2);
    /* Of a header of many pages only those that the leaves need, also where the first page has to be read to know them. */
    static const uint64_t large = 9 << 20;
    uint8_t *memory = pages_get(40);
    for (uint32_t i = 0; i < 6; i++) {
        layout(i % 3 + 1, false, i < 3 ? 0 : i == 3 ? 3 : 700);
        b = put_batch(client, 100, 1, &large, 1, i);
        struct kvfs_buffer piece = {memory, 8 * PAGE};
        for (uint64_t offset = 0; offset + 8 * PAGE <= large; offset += 500 * PAGE) {
            uint64_t before = device_bytes(client);
            CHECK_SAY(read_one(client, "key-100", true, offset, &piece, 1) == 8 * PAGE, "%s", kvfs_error());
            CHECK(memcmp(memory, (uint8_t *)b->buffers[0].data + offset, 8 * PAGE) == 0);
            uint64_t pages = (device_bytes(client) - before) / PAGE;
            CHECK_SAY(pages >= 9 && pages <= 8 + 5, "%llu pages", (unsigned long long)pages);
        }
        batch_free(b);
    }
    free(memory);
    kvfs_close(client);
    daemon_stop(false);
}

/* A damaged leaf is a miss for whom it concerns, and for nobody else. */
static void test_damage_inside_and_outside_of_a_range(void) {
    static const uint64_t size = 4 << 20; /* three pages of header */
    pool_new(65536);
    struct kvfs_client *client = connect_plain();
    for (uint32_t split = 1; split <= 2; split++) {
        layout(split, false, 0);
        struct batch *b = put_batch(client, 0, 1, &size, 1, split);
        uint8_t *memory = pages_get(8), *model = b->buffers[0].data;
        struct kvfs_buffer piece = {memory, 3 * PAGE};
        locked();
        struct block *block = block_named("key-0");
        CHECK(block->header_pages == 3);
        block_corrupt(block, 20);
        unlocked();
        uint64_t errors = statistics(client).checksum_errors;
        static const uint64_t good[] = {0, 17, 21, 1000}, bad[] = {18, 19, 20};
        for (uint32_t i = 0; i < 4; i++) {
            CHECK(read_one(client, "key-0", true, good[i] * PAGE, &piece, 1) == 3 * PAGE);
            CHECK(memcmp(memory, model + good[i] * PAGE, 3 * PAGE) == 0);
        }
        CHECK(statistics(client).checksum_errors == errors);
        for (uint32_t i = 0; i < 3; i++)
            CHECK(read_one(client, "key-0", true, bad[i] * PAGE, &piece, 1) == -EIO);
        CHECK(read_one(client, "key-0", false, 0, b->buffers, 1) == -EIO);
        /* A page of the header that other leaves need. */
        locked();
        block_corrupt(block, 20);
        block_corrupt(block, -3);
        unlocked();
        CHECK(read_one(client, "key-0", true, 4 * PAGE, &piece, 1) == 3 * PAGE);
        CHECK(read_one(client, "key-0", true, 1016 * PAGE, &piece, 1) == -EIO);
        locked();
        block_corrupt(block, -3);
        block_corrupt(block, -1);
        unlocked();
        CHECK(read_one(client, "key-0", true, 4 * PAGE, &piece, 1) == -EIO);
        locked();
        block_corrupt(block, -1);
        unlocked();
        CHECK(read_one(client, "key-0", false, 0, b->buffers, 1) == (int64_t)size);
        batch_free(b);
        free(memory);
    }
    kvfs_close(client);
    daemon_stop(false);
}

/* The block moves, or is replaced, while parts of it are read. */
static void test_a_block_that_moves(void) {
    static const uint64_t size = 9 << 20;
    pool_new(65536);
    struct kvfs_client *client = connect_plain();
    struct batch *b = put_batch(client, 0, 1, &size, 1, 1);
    uint8_t *memory = pages_get(8);
    struct kvfs_buffer pieces[] = {{memory, 5000}, {memory + 6000, 7000}};
    for (uint32_t i = 0; i < 8; i++) {
        locked();
        block_move(block_named("key-0"), 1 + i % 3);
        unlocked();
        CHECK(read_one(client, "key-0", true, i * 1000000, pieces, 2) == 12000);
        CHECK(memcmp(memory, (uint8_t *)b->buffers[0].data + i * 1000000, 5000) == 0);
        CHECK(memcmp(memory + 6000, (uint8_t *)b->buffers[0].data + i * 1000000 + 5000, 7000) == 0);
    }
    free(memory);
    batch_free(b);
    kvfs_close(client);
    daemon_stop(false);
}

/* A device that is silent owns every piece until it has answered, in place or bounced. */
static void test_silence(void) {
    const uint32_t timeout_ms = 200 * slowness();
    static const uint64_t size = 200000;
    pool_new(16384);
    struct kvfs_client *client = connect_with((struct kvfs_options){.timeout_ms = timeout_ms});
    struct batch *b = put_batch(client, 0, 1, &size, 1, 1);
    uint8_t *memory = pages_get(100);
    fault_all(client, KVFS_FAULT_HOLD, 1, 1, 0);
    uint64_t started = milliseconds();
    { /* the pieces' array is gone when the device answers */
        struct kvfs_buffer *pieces = malloc(3 * sizeof(*pieces));
        pieces[0] = (struct kvfs_buffer){memory, 100 * PAGE / 10};
        pieces[1] = (struct kvfs_buffer){memory + 20 * PAGE + 1, 5000};
        pieces[2] = (struct kvfs_buffer){memory + 40 * PAGE, 60 * PAGE};
        CHECK(read_one(client, "key-0", false, 0, pieces, 3) == -ETIMEDOUT);
        memset(pieces, 0xff, 3 * sizeof(*pieces));
        free(pieces);
    }
    CHECK(milliseconds() - started >= timeout_ms && milliseconds() - started < 3 * timeout_ms);
    CHECK(kvfs_busy(client, memory, 1) == 1 && kvfs_busy(client, memory + 20 * PAGE + 5000, 1) == 1 && kvfs_busy(client, memory + 45 * PAGE, 1) == 1);
    CHECK(kvfs_busy(client, memory + 20 * PAGE, 1) == 0 && kvfs_busy(client, memory + 30 * PAGE, 9 * PAGE) == 0);
    struct kvfs_buffer again[] = {{memory + 30 * PAGE, PAGE}, {memory + 44 * PAGE, PAGE}};
    CHECK(read_one(client, "key-0", true, 0, again, 2) == -EBUSY && says("buffer 0, piece 1"));
    CHECK(read_one(client, "key-0", true, 0, again, 1) == -ETIMEDOUT); /* at once */
    CHECK(milliseconds() - started < 3 * timeout_ms);
    fault_all(client, KVFS_FAULT_NONE, 3, 0, 0);
    wait_idle(client);
    usleep(5 * timeout_ms * 1000);
    CHECK_SAY(read_one(client, "key-0", true, 0, again, 2) == 2 * PAGE && memcmp(memory + 44 * PAGE, (uint8_t *)b->buffers[0].data + PAGE, PAGE) == 0,
              "%s", kvfs_error());
    free(memory);
    batch_free(b);
    kvfs_close(client);
    daemon_stop(false);
}

/* Parts of a staged block come from memory, and leave it there for the other parts; all of it is given up. */
static void test_prestaged_parts(void) {
    static const uint64_t size = 300000;
    pool_new(65536);
    struct kvfs_client *client = connect_plain();
    struct batch *b = put_batch(client, 0, 1, &size, 1, 1);
    uint8_t *memory = pages_get(100), *model = b->buffers[0].data;
    CHECK(kvfs_prestage(client, &b->keys) == 1);
    struct kvfs_buffer pieces[] = {{memory + 1, 5000}, {memory + 6000, 0}, {memory + 6000, 7000}};
    CHECK(read_one(client, "key-0", true, 100, pieces, 3) == 12000); /* it waits until the block is there */
    uint64_t reads = device_reads(client);
    for (uint64_t offset = 0; offset < size; offset += 12000) {
        uint64_t expected = min_u64(12000, size - offset);
        CHECK(read_one(client, "key-0", true, offset, pieces, 3) == (int64_t)expected);
        CHECK(memcmp(memory + 1, model + offset, 5000) == 0 && memcmp(memory + 6000, model + offset + 5000, 7000) == 0);
    }
    struct kvfs_buffer whole[] = {{memory + 5, 100001}, {memory + 200000, 199999}};
    CHECK(read_one(client, "key-0", false, 0, whole, 2) == (int64_t)size);
    CHECK(memcmp(memory + 5, model, 100001) == 0 && memcmp(memory + 200000, model + 100001, 199999) == 0);
    CHECK(device_reads(client) == reads);
    struct kvfs_client_statistics s = statistics(client);
    CHECK(s.prestaged == 1 && s.prestage_used == 1 && s.prestage_wasted == 0);
    CHECK(read_one(client, "key-0", false, 0, whole, 2) == (int64_t)size && device_reads(client) > reads);
    free(memory);
    batch_free(b);
    kvfs_close(client);
    daemon_stop(false);
}

int main(void) {
    alarm(300 * slowness());
    devices_open();
    RUN(test_any_pieces_and_ranges);
    RUN(test_many_pieces);
    RUN(test_a_batch_of_vectors);
    RUN(test_ranges_cost_their_leaves);
    RUN(test_damage_inside_and_outside_of_a_range);
    RUN(test_a_block_that_moves);
    RUN(test_silence);
    RUN(test_prestaged_parts);
    devices_close();
    return 0;
}
