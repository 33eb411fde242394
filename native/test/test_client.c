/* sources: base block io client pod */
/* libkvfs with a double of the daemon (doubles/daemon.h): what is put is what is got at any size, alignment and layout, from any number of
 * threads. test_client_devices.c and test_client_daemon.c have the rest of it. */
#include "client_harness.h"

/* ---- what is put is what is got ---- */

static const uint64_t SIZES[] = {0, 1, 4095, 4096, 4097, 1 << 20, (2 << 20) + 1, 9 << 20};
#define SIZE_COUNT ((uint32_t)(sizeof(SIZES) / sizeof(SIZES[0])))

static void round_trips(uint64_t stripe_unit) {
    static const uint32_t offsets[] = {0, 512, 1, 16};
    pool_new(stripe_unit);
    struct kvfs_client *client = connect_plain();
    uint64_t version = 0, put = 0;
    for (uint32_t layout = 0; layout < 5; layout++) {
        locked();
        d.split = layout > 2 ? layout - 1 : layout + 1;
        d.header_alone = layout > 2;
        unlocked();
        for (uint32_t k = 0; k < 4; k++) {
            /* The largest ones at one alignment a layout, and one stripe unit: time. */
            bool large = k == layout % 4 && layout % 2 == (stripe_unit > 16384);
            uint32_t count = large ? SIZE_COUNT : SIZE_COUNT - 2;
            put += count;
            struct batch *out = batch_new(0, count, SIZES, SIZE_COUNT, offsets[k]);
            batch_fill(out, ++version);
            CHECK_SAY(kvfs_put(client, &out->keys, out->buffers, out->results) == (int)count, "%s", kvfs_error());
            guards_check(out);
            for (uint32_t j = 0; j < 2; j++) {
                struct batch *in = batch_new(0, count, SIZES, SIZE_COUNT, offsets[(k + 1 + 2 * j) % 4]);
                batch_get(client, in, version);
                batch_free(in);
            }
            batch_get(client, out, version);
            batch_free(out);
        }
    }
    struct kvfs_client_statistics s = statistics(client);
    CHECK(s.checksum_errors == 0 && s.timeouts == 0 && s.retries == 0 && s.busy == 0 && s.puts == put);
    CHECK(s.gets == 3 * s.puts && s.get_bytes == 3 * s.put_bytes && s.bounced_bytes > 0);
    kvfs_close(client);
    daemon_stop(false);
}

static void test_round_trips(void) {
    round_trips(16384);
    round_trips(131072);
}

static void test_keys(void) {
    pool_new(65536);
    struct kvfs_client *client = connect_plain();
    uint8_t memory[8192], found[4] = {9, 9, 9, 9};
    int64_t sizes[4];
    /* Nothing is there yet, not even the namespace: misses, and at once. */
    uint64_t started = milliseconds();
    CHECK(get_one(client, "nothing", memory, sizeof(memory)) == -ENOENT);
    CHECK(get_one(client, "nothing else", memory, sizeof(memory)) == -ENOENT);
    CHECK_SAY(milliseconds() - started < 900 * slowness(), "two misses took %llu ms", (unsigned long long)(milliseconds() - started));
    fill(memory, 5000, 77);
    CHECK(put_one(client, "a", memory, 5000) == 0);
    CHECK(get_one(client, "a", memory, sizeof(memory)) == 5000 && filled(memory, 5000, 77));
    started = milliseconds();
    CHECK(get_one(client, "b", memory, sizeof(memory)) == -ENOENT);
    CHECK_SAY(milliseconds() - started < 900 * slowness(), "a miss took %llu ms", (unsigned long long)(milliseconds() - started));
    /* The buffer is too small, by one byte: nothing is read. */
    memset(memory, 0x22, sizeof(memory));
    CHECK(get_one(client, "a", memory, 4999) == -ERANGE);
    for (uint32_t i = 0; i < sizeof(memory); i++)
        CHECK(memory[i] == 0x22);
    CHECK(get_one(client, "a", memory, 5000) == 5000);
    CHECK(get_one(client, "a", NULL, 5000) == -EINVAL);
    CHECK(get_one(client, "a", NULL, 0) == -ERANGE);
    /* Replaced: by another size, by nothing, and by as much again. */
    fill(memory, 8000, 78);
    CHECK(put_one(client, "a", memory, 8000) == 0);
    memset(memory, 0, sizeof(memory));
    CHECK(get_one(client, "a", memory, sizeof(memory)) == 8000 && filled(memory, 8000, 78));
    CHECK(put_one(client, "a", NULL, 0) == 0);
    CHECK(get_one(client, "a", memory, sizeof(memory)) == 0);
    CHECK(get_one(client, "a", NULL, 0) == 0);
    CHECK(put_one(client, "a", NULL, 4) == -EINVAL);
    /* Sizes of keys. */
    uint8_t keys[400];
    for (uint32_t i = 0; i < sizeof(keys); i++)
        keys[i] = (uint8_t)(255 - i);
    uint32_t key_sizes[4] = {1, 127, 126, 2};
    struct kvfs_keys batch = {keys, key_sizes, 4, 0};
    struct kvfs_buffer buffers[4] = {{memory, 10}, {memory + 100, 100}, {memory + 1000, 1000}, {memory + 3000, 3000}};
    int64_t results[4];
    CHECK(kvfs_put(client, &batch, buffers, results) == 4);
    CHECK(kvfs_exists(client, &batch, found) == 0 && found[0] == 1 && found[1] == 1 && found[2] == 1 && found[3] == 1);
    CHECK(kvfs_sizes(client, &batch, sizes) == 0 && sizes[0] == 10 && sizes[1] == 100 && sizes[2] == 1000 && sizes[3] == 3000);
    uint8_t deleted[4] = {9, 9, 9, 9};
    batch.count = 2;
    CHECK(kvfs_delete(client, &batch, deleted) == 2 && deleted[0] == 1 && deleted[1] == 1 && deleted[2] == 9);
    CHECK(kvfs_delete(client, &batch, deleted) == 0 && deleted[0] == 0 && deleted[1] == 0);
    batch.count = 4;
    CHECK(kvfs_exists(client, &batch, found) == 0 && found[0] == 0 && found[1] == 0 && found[2] == 1 && found[3] == 1);
    CHECK(kvfs_sizes(client, &batch, sizes) == 0 && sizes[0] == -ENOENT && sizes[3] == 3000);
    for (uint32_t wrong = 0; wrong < 2; wrong++) {
        key_sizes[1] = wrong ? KVFS_KEY_MAX + 1 : 0;
        CHECK(kvfs_get(client, &batch, buffers, results) == -EINVAL && says("key"));
        CHECK(kvfs_put(client, &batch, buffers, results) == -EINVAL && says("key"));
        CHECK(kvfs_delete(client, &batch, deleted) == -EINVAL && says("key"));
        CHECK(kvfs_exists(client, &batch, found) == -EINVAL && says("key"));
        CHECK(kvfs_sizes(client, &batch, sizes) == -EINVAL && says("key"));
        CHECK(kvfs_prestage(client, &batch) == -EINVAL && says("key"));
    }
    CHECK(kvfs_list(client, keys, KVFS_KEY_MAX + 1, keys, sizeof(keys), key_sizes, 4) == -EINVAL);
    key_sizes[1] = 127;
    /* Nothing to do. */
    struct kvfs_keys none = {NULL, NULL, 0, 0};
    CHECK(kvfs_get(client, &none, NULL, NULL) == 0 && kvfs_put(client, &none, NULL, NULL) == 0 && kvfs_delete(client, &none, NULL) == 0);
    CHECK(kvfs_exists(client, &none, NULL) == 0 && kvfs_sizes(client, &none, NULL) == 0 && kvfs_prestage(client, &none) == 0);
    kvfs_close(client);
    daemon_stop(false);
}

static void test_overlaps(void) {
    pool_new(65536);
    struct kvfs_client *client = connect_plain();
    uint64_t size = 6000;
    struct batch *b = put_batch(client, 0, 4, &size, 1, 1);
    uint8_t *memory = pages_get(16);
    struct kvfs_buffer buffers[4] = {{memory + 18000, size}, {memory, size}, {memory + 11999, size}, {memory + 6000, size}};
    CHECK(kvfs_get(client, &b->keys, buffers, b->results) == -EINVAL && says("overlap"));
    buffers[2].data = memory + 12000;
    CHECK_SAY(kvfs_get(client, &b->keys, buffers, b->results) == 4, "%s", kvfs_error());
    CHECK(filled(buffers[2].data, size, (1ull << 32) + 2));
    buffers[1] = buffers[3];
    CHECK(kvfs_get(client, &b->keys, buffers, b->results) == -EINVAL);
    buffers[1] = (struct kvfs_buffer){(void *)(UINTPTR_MAX - 100), 200};
    CHECK(kvfs_get(client, &b->keys, buffers, b->results) == -EINVAL);
    /* The same key twice: to be read it may be, to be stored not. */
    b->key_sizes[3] = b->key_sizes[2];
    memcpy(b->key_data + 15, b->key_data + 10, 5);
    buffers[1] = (struct kvfs_buffer){memory, size};
    CHECK(kvfs_get(client, &b->keys, buffers, b->results) == 4 && filled(buffers[3].data, size, (1ull << 32) + 2));
    CHECK(kvfs_put(client, &b->keys, buffers, b->results) == -EINVAL && says("keys 2 and 3"));
    CHECK(b->results[0] == -ECANCELED);
    free(memory);
    batch_free(b);
    kvfs_close(client);
    daemon_stop(false);
}

static void test_batch_of_thousands(void) {
    static const uint64_t sizes[] = {100, 5000, 0, 4096, 333, 12000};
    enum { COUNT = 5000 };
    pool_new(65536);
    struct kvfs_client *client = connect_with((struct kvfs_options){.timeout_ms = 10000, .depth = 64});
    struct batch *b = put_batch(client, 0, COUNT, sizes, 6, 3);
    batch_get(client, b, 3);
    uint8_t *found = calloc(COUNT, 1), *names = malloc(COUNT * KVFS_KEY_MAX);
    int64_t *known = calloc(COUNT, sizeof(*known));
    CHECK(kvfs_exists(client, &b->keys, found) == 0 && kvfs_sizes(client, &b->keys, known) == 0);
    for (uint32_t i = 0; i < COUNT; i++)
        CHECK(found[i] == 1 && known[i] == (int64_t)b->buffers[i].size);
    /* All keys, in order, page by page: of many and of few. */
    uint32_t *listed = calloc(COUNT, sizeof(*listed));
    for (uint32_t step = 1000; step; step = step == 1000 ? 1 : 0) {
        char after[128] = "", text[128];
        uint32_t after_size = 0, total = 0;
        int n;
        while ((n = kvfs_list(client, after, after_size, names, step * KVFS_KEY_MAX, listed, COUNT)) > 0) {
            CHECK((uint32_t)n <= step);
            const uint8_t *at = names;
            for (int i = 0; i < n; at += listed[i++]) {
                memcpy(text, at, listed[i]);
                text[listed[i]] = 0;
                CHECK(strcmp(text, after) > 0);
                strcpy(after, text);
                after_size = listed[i];
            }
            total += (uint32_t)n;
            if (step == 1 && total == 20)
                break;
        }
        CHECK_SAY(n >= 0 && total == (step == 1 ? 20 : COUNT), "%d, %u: %s", n, total, kvfs_error());
    }
    CHECK(kvfs_list(client, NULL, 0, names, 126, listed, COUNT) == -ERANGE);
    CHECK(kvfs_list(client, NULL, 0, names, 1000, listed, 0) == -ERANGE);
    CHECK(kvfs_delete(client, &b->keys, found) == COUNT);
    CHECK(kvfs_list(client, NULL, 0, names, COUNT * KVFS_KEY_MAX, listed, COUNT) == 0);
    CHECK(kvfs_get(client, &b->keys, b->buffers, b->results) == 0);
    for (uint32_t i = 0; i < COUNT; i++)
        CHECK(found[i] == 1 && b->results[i] == -ENOENT);
    struct kvfs_client_statistics s = statistics(client);
    CHECK(s.puts == COUNT && s.gets == COUNT && s.deletes == COUNT && s.hits == COUNT && s.misses == COUNT);
    free(found);
    free(names);
    free(known);
    free(listed);
    batch_free(b);
    kvfs_close(client);
    daemon_stop(false);
}

static void test_depths(void) {
    static const uint64_t sizes[] = {20000, 70000, 4096, 300000};
    static const uint32_t depths[] = {1, 2, 7, 33, 64};
    pool_new(16384);
    locked();
    d.split = 2;
    unlocked();
    for (uint32_t i = 0; i < 5; i++) {
        struct kvfs_client *client = connect_with((struct kvfs_options){.timeout_ms = 10000, .depth = depths[i]});
        struct batch *b = put_batch(client, 0, 70, sizes, 4, i);
        batch_get(client, b, i);
        batch_free(b);
        kvfs_close(client);
    }
    struct kvfs_client *client;
    struct kvfs_options options = {.size = sizeof(options), .depth = 65};
    CHECK(client_open("/mnt/test", d.directory, 1, "", &options, &client) == -EINVAL && says("depth 65"));
    options = (struct kvfs_options){.size = sizeof(options), .flags = 4};
    CHECK(client_open("/mnt/test", d.directory, 1, "", &options, &client) == -EINVAL && says("flags 0x4"));
    daemon_stop(false);
}

/* A header of many pages, as a block of many GiB has: more pieces than one I/O can have, with the data or alone. */
static void test_large_headers(void) {
    static const uint64_t size = 4 << 20;
    pool_new(16384);
    struct kvfs_client *client = connect_plain();
    for (uint32_t i = 0; i < 4; i++) {
        locked();
        d.header_extra = i % 2 ? 1000 : 70;
        d.split = 1 + i / 2;
        unlocked();
        struct batch *b = put_batch(client, 0, 1, &size, 1, i);
        batch_get(client, b, i);
        batch_free(b);
    }
    kvfs_close(client);
    daemon_stop(false);
}

/* ---- any file ---- */

static void test_file_reads(void) {
    pool_new(16384);
    struct kvfs_client *client = connect_plain();
    static const uint64_t sizes[] = {1, 4096, 70001, 2500000};
    uint64_t seed = 5;
    uint8_t key[] = {'k'};
    char name[3] = "";
    key_hex(key, 1, name);
    for (uint32_t i = 0; i < 12; i++) {
        uint64_t size = sizes[i % 4], inode;
        uint8_t *model = malloc(size), *memory = pages_get(size / PAGE + 40);
        uint32_t split = 1 + i / 4;
        bool hole = i == 11;
        fill(model, size, i);
        if (hole)
            memset(model + 40 * PAGE, 0, 60 * PAGE);
        locked();
        directory_put(TEAM, 1, "team");
        directory_put(SPACE, TEAM, "llama");
        directory_put(shard_inode(name), SPACE, name);
        d.header_alone = split == 2;
        inode = block_write(name, 2, model, size, hole ? 2 : split, hole ? 40 * PAGE : 0, hole ? 100 * PAGE : 0, NULL);
        unlocked();
        struct kvfs_file *file;
        CHECK(kvfs_file_open(client, inode, &file) == 0);
        for (uint32_t n = 0; n < 60; n++) {
            uint64_t offset = random_below(&seed, size + 100), length = random_below(&seed, n % 3 ? 30000 : size + 5000);
            uint64_t at = random_below(&seed, 2) ? offset % PAGE + PAGE : PAGE + random_below(&seed, PAGE); /* without a copy, or with */
            if (n % 5 == 0)
                offset = offset / PAGE * PAGE, length = round_up(length, PAGE);
            uint64_t want = offset >= size ? 0 : min_u64(length, size - offset);
            memset(memory, 0xa5, at + want + PAGE);
            int64_t got = kvfs_file_read(file, offset, memory + at, length);
            CHECK_SAY(got == (int64_t)want, "%lld of %llu at %llu: %s", (long long)got, (unsigned long long)want, (unsigned long long)offset,
                      kvfs_error());
            CHECK(want == 0 || memcmp(memory + at, model + offset, want) == 0);
            for (uint64_t b = 0; b < at; b++)
                CHECK(memory[b] == 0xa5);
            for (uint64_t b = at + want; b < at + want + PAGE; b++)
                CHECK(memory[b] == 0xa5);
        }
        CHECK(kvfs_file_read(file, UINT64_MAX, memory, 10) == 0 && kvfs_file_read(file, 0, NULL, 0) == 0);
        CHECK(kvfs_file_read(file, 0, NULL, 10) == -EINVAL);
        /* Moved, it reads on; replaced, the file is not there any more. */
        if (!hole) {
            locked();
            block_move(block_of(inode), 1 + i % 3);
            unlocked();
            memset(memory, 0, size);
            CHECK(kvfs_file_read(file, 0, memory, size) == (int64_t)size && memcmp(memory, model, size) == 0);
        }
        locked();
        block_write(name, 2, model, size / 2, 1, 0, 0, NULL);
        unlocked();
        int64_t gone = kvfs_file_read(file, 0, memory, size);
        CHECK_SAY(gone == -EAGAIN, "%lld", (long long)gone);
        kvfs_file_close(file);
        free(model);
        free(memory);
    }
    struct kvfs_file *file;
    struct kvfs_attributes a;
    CHECK(kvfs_file_open(client, 77777, &file) == -ENOENT && kvfs_file_open(client, SPACE, &file) == -EAGAIN);
    CHECK(kvfs_find(client, "", &a) == 0 && a.inode == 1 && kvfs_find(client, "team/llama", &a) == 0 && a.inode == SPACE && !a.sealed);
    CHECK(kvfs_find(client, "team/llama/6b/6b", &a) == 0 && a.size == 1250000 && a.sealed && a.mode == 0100644);
    CHECK(kvfs_find(client, "team/llama/6b/6b/x", &a) == -ENOTDIR && kvfs_find(client, "team/nothing", &a) == -ENOENT);
    CHECK(kvfs_find(client, "nothing/x", &a) == -ENOENT);
    kvfs_file_close(NULL);
    kvfs_close(client);
    daemon_stop(false);
}

/* ---- many threads ---- */

static struct {
    struct kvfs_client *client;
    atomic_uint good;
} crowd;

static void *crowd_get(void *argument) {
    static const uint64_t size = 30000;
    struct batch *b = batch_new(0, 8, &size, 1, (uint32_t)(uintptr_t)argument % 3);
    for (int i = 0; i < 3; i++)
        batch_get(crowd.client, b, 1);
    batch_free(b);
    atomic_fetch_add(&crowd.good, 1);
    return NULL;
}

static void test_more_threads_than_lanes(void) {
    enum { THREADS = LANES_MAX + 8 };
    static const uint64_t size = 30000;
    pool_new(16384);
    crowd.client = connect_plain();
    batch_free(put_batch(crowd.client, 0, 8, &size, 1, 1));
    fault_all(crowd.client, KVFS_FAULT_DELAY, 1, 5, 20);
    pthread_t threads[THREADS];
    for (uintptr_t i = 0; i < THREADS; i++)
        CHECK(pthread_create(&threads[i], NULL, crowd_get, (void *)i) == 0);
    for (int i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
    CHECK(atomic_load(&crowd.good) == THREADS && crowd.client->connection->lane_count <= LANES_MAX);
    kvfs_close(crowd.client);
    daemon_stop(false);
}

/* ---- prestaging ---- */

static void staged_wait(struct kvfs_client *client, uint64_t reads) {
    uint64_t until = milliseconds() + 30000;
    while (device_reads(client) < reads)
        CHECK(milliseconds() < until);
    usleep(50000 * slowness()); /* verified, too */
}

static void *stage_taker(void *argument) {
    (void)argument;
    static const uint64_t size = 300000;
    struct batch *b = batch_new(0, 8, &size, 1, 0);
    for (int i = 0; i < 10; i++) {
        CHECK(kvfs_prestage(crowd.client, &b->keys) >= 0);
        batch_get(crowd.client, b, 3);
    }
    batch_free(b);
    return NULL;
}

static void test_prestage(void) {
    static const uint64_t size = 300000;
    pool_new(65536);
    struct kvfs_client *client = connect_with((struct kvfs_options){.timeout_ms = 10000, .staging_size = 16 << 20});
    struct batch *b = put_batch(client, 0, 8, &size, 1, 1), *missing = batch_new(100, 8, &size, 1, 0);
    /* Used: no device is read a second time. */
    CHECK(kvfs_prestage(client, &missing->keys) == 0);
    CHECK(kvfs_prestage(client, &b->keys) == 8);
    CHECK(kvfs_prestage(client, &b->keys) == 0);
    staged_wait(client, 8 * 4);
    uint64_t reads = device_reads(client);
    batch_get(client, b, 1);
    struct kvfs_client_statistics s = statistics(client);
    CHECK(s.prestaged == 8 && s.prestage_used == 8 && s.prestage_wasted == 0 && device_reads(client) == reads);
    batch_get(client, b, 1);
    CHECK(statistics(client).prestage_used == 8 && device_reads(client) > reads);
    /* Taken while it is being read. */
    CHECK(kvfs_prestage(client, &b->keys) == 8);
    batch_get(client, b, 1);
    s = statistics(client);
    CHECK(s.prestage_used + s.prestage_wasted <= s.prestaged && s.prestaged == 16);
    /* Bounded: 8 slots of 2 MiB; the oldest make room. */
    struct batch *more = put_batch(client, 20, 12, &size, 1, 2);
    CHECK(kvfs_prestage(client, &more->keys) <= 12);
    usleep(200000 * slowness());
    CHECK(kvfs_prestage(client, &more->keys) >= 4);
    usleep(200000 * slowness());
    CHECK(statistics(client).prestage_wasted >= 4);
    batch_get(client, more, 2);
    batch_get(client, more, 2);
    /* A block larger than all of it is not staged; one of several slots is. */
    static const uint64_t large[] = {5 << 20, 17 << 20};
    locked();
    d.split = 3;
    unlocked();
    struct batch *two = put_batch(client, 40, 2, large, 2, 5);
    CHECK(kvfs_prestage(client, &two->keys) == 1);
    batch_get(client, two, 5);
    batch_free(two);
    locked();
    d.split = 1;
    unlocked();
    /* Replaced, moved, deleted while staged: never what was. */
    CHECK(kvfs_prestage(client, &b->keys) == 8);
    usleep(100000 * slowness());
    batch_free(put_batch(client, 0, 3, &size, 1, 3));
    locked();
    for (unsigned i = 3; i < 6; i++) {
        char key[16];
        sprintf(key, "key-%u", i);
        block_move(block_named(key), 2);
    }
    unlocked();
    struct kvfs_keys last = {b->key_data + 30, b->key_sizes + 6, 2, 0};
    uint8_t deleted[2];
    CHECK(kvfs_delete(client, &last, deleted) == 2);
    CHECK(kvfs_get(client, &b->keys, b->buffers, b->results) == 6);
    for (uint32_t i = 0; i < 8; i++)
        CHECK(i < 6 ? filled(b->buffers[i].data, size, ((i < 3 ? 3ull : 1ull) << 32) + i) : b->results[i] == -ENOENT);
    /* Takers of the same blocks, all at once. */
    batch_free(put_batch(client, 0, 8, &size, 1, 3));
    crowd.client = client;
    pthread_t threads[6];
    for (int i = 0; i < 6; i++)
        CHECK(pthread_create(&threads[i], NULL, stage_taker, NULL) == 0);
    for (int i = 0; i < 6; i++)
        pthread_join(threads[i], NULL);
    s = statistics(client);
    CHECK_SAY(s.prestage_used + s.prestage_wasted <= s.prestaged, "%llu and %llu of %llu", (unsigned long long)s.prestage_used,
              (unsigned long long)s.prestage_wasted, (unsigned long long)s.prestaged);
    batch_free(more);
    batch_free(missing);
    kvfs_close(client);
    /* Closed with reads in flight: on time, and late. */
    const uint32_t timeout_ms = 500 * slowness();
    for (uint32_t late = 0; late < 2; late++) {
        client = connect_with((struct kvfs_options){.timeout_ms = timeout_ms, .staging_size = 64 << 20});
        fault_all(client, KVFS_FAULT_DELAY, 1, 1, timeout_ms / 2 + late * timeout_ms);
        CHECK(kvfs_prestage(client, &b->keys) == 8);
        usleep(20000);
        if (late) { /* a taker does not wait for ever */
            CHECK(kvfs_get(client, &b->keys, b->buffers, b->results) == 0);
            CHECK(b->results[0] == -ETIMEDOUT);
        }
        kvfs_close(client);
    }
    batch_free(b);
    daemon_stop(false);
}

/* ---- the rest ---- */

static void test_fork(void) {
    static const uint64_t size = 50000;
    pool_new(16384);
    struct kvfs_client *client = connect_plain();
    struct batch *b = put_batch(client, 0, 4, &size, 1, 1);
    struct kvfs_file *file;
    CHECK(kvfs_file_open(client, inode_named("key-1"), &file) == 0);
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        uint8_t found[4];
        int64_t known[4];
        uint32_t name_sizes[4];
        struct kvfs_client_information information;
        struct kvfs_attributes attributes;
        struct kvfs_file *other;
        bool good = kvfs_get(client, &b->keys, b->buffers, b->results) == -ECHILD && says("fork") &&
                    kvfs_put(client, &b->keys, b->buffers, b->results) == -ECHILD && kvfs_delete(client, &b->keys, found) == -ECHILD &&
                    kvfs_exists(client, &b->keys, found) == -ECHILD && kvfs_sizes(client, &b->keys, known) == -ECHILD &&
                    kvfs_list(client, NULL, 0, found, 4, name_sizes, 4) == -ECHILD && kvfs_prestage(client, &b->keys) == -ECHILD &&
                    kvfs_busy(client, found, 4) == -ECHILD && kvfs_client_information_get(client, &information) == -ECHILD &&
                    kvfs_find(client, "", &attributes) == -ECHILD && kvfs_file_open(client, 1, &other) == -ECHILD &&
                    kvfs_file_read(file, 0, b->buffers[0].data, 10) == -ECHILD;
        kvfs_close(client);
        _exit(good ? 0 : 1);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    batch_get(client, b, 1);
    batch_free(put_batch(client, 0, 4, &size, 1, 2));
    kvfs_file_close(file);
    batch_free(b);
    kvfs_close(client);
    daemon_stop(false);
}

static void test_reports(void) {
    static const uint64_t size = 500;
    pool_new(16384);
    struct kvfs_client *client = connect_plain();
    struct batch *b = put_batch(client, 0, 300, &size, 1, 1);
    batch_get(client, b, 1);
    batch_get(client, b, 1);
    uint64_t until = milliseconds() + 30000, hits = 0;
    while (hits + CLIENT_HITS_MAX <= 600) { /* of 600 reads, told before the client ends; on a slow machine a second has told of some before */
        CHECK(milliseconds() < until);
        usleep(1000);
        locked();
        hits = d.hits;
        unlocked();
    }
    usleep(1050000);
    batch_get(client, b, 1); /* a second later, the totals too */
    uint32_t reports = 0;
    while (!reports) {
        CHECK(milliseconds() < until);
        usleep(1000);
        locked();
        reports = d.reports;
        unlocked();
    }
    kvfs_close(client);
    for (bool all = false; !all;) {
        CHECK(milliseconds() < until);
        usleep(1000);
        locked();
        all = d.hits == 900 && d.report.gets == 900 && d.report.get_bytes == 900 * size && d.report.puts == 300;
        unlocked();
    }
    batch_free(b);
    daemon_stop(false);
}

int main(void) {
    alarm(300 * slowness());
    signal(SIGPIPE, SIG_DFL); /* it must not be needed */
    devices_open();
    RUN(test_keys);
    RUN(test_overlaps);
    RUN(test_round_trips);
    RUN(test_batch_of_thousands);
    RUN(test_depths);
    RUN(test_large_headers);
    RUN(test_file_reads);
    RUN(test_more_threads_than_lanes);
    RUN(test_prestage);
    RUN(test_fork);
    RUN(test_reports);
    devices_close();
    return 0;
}
