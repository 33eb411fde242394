/* sources: base block io client pod */
/* libkvfs while blocks and devices change below it. Blocks that move, are replaced or evicted while they are read never give wrong bytes. Devices
 * that fail, lie or stay silent become misses within the deadline, and their late answers are accounted for. */
#include "client_harness.h"

/* ---- blocks that move, are replaced and evicted while they are read ---- */

#define CHURN_KEYS 8u
static struct {
    struct kvfs_client *client;
    atomic_bool stop;
    atomic_ullong read, missed;
} churn;

static void *churn_get(void *argument) {
    uint64_t state = (uintptr_t)argument;
    static const uint64_t size = 400000;
    struct batch *b = batch_new(0, CHURN_KEYS, &size, 1, state % 2 ? 0 : 1 + (uint32_t)state);
    while (!atomic_load(&churn.stop)) {
        CHECK_SAY(kvfs_get(churn.client, &b->keys, b->buffers, b->results) >= 0, "%s", kvfs_error());
        for (uint32_t i = 0; i < b->count; i++) {
            if (b->results[i] == -ENOENT) {
                atomic_fetch_add(&churn.missed, 1);
                continue;
            }
            uint64_t seed;
            CHECK_SAY(b->results[i] >= 8, "block %u: %lld", i, (long long)b->results[i]);
            memcpy(&seed, b->buffers[i].data, 8);
            CHECK_SAY((seed & 0xffff) == i, "block %u has the bytes of %llu", i, (unsigned long long)(seed & 0xffff));
            CHECK(filled(b->buffers[i].data, (uint64_t)b->results[i], seed));
            atomic_fetch_add(&churn.read, 1);
        }
    }
    guards_check(b);
    batch_free(b);
    return NULL;
}

static void *churn_files(void *argument) {
    uint64_t state = (uintptr_t)argument;
    uint8_t *memory = malloc(400000), *model = malloc(400000);
    while (!atomic_load(&churn.stop)) {
        char key[32];
        sprintf(key, "key-%u", (unsigned)random_below(&state, CHURN_KEYS));
        locked();
        struct block *block = block_named(key);
        uint64_t inode = block ? (uint64_t)(block - d.blocks) + BLOCK : 0, size = block ? block->size : 0, seed = block ? block->seed : 0;
        unlocked();
        struct kvfs_file *file;
        if (!seed || kvfs_file_open(churn.client, inode, &file) < 0)
            continue;
        fill(model, size, seed);
        for (int i = 0; i < 20; i++) {
            uint64_t offset = random_below(&state, size), length = random_below(&state, size);
            int64_t n = kvfs_file_read(file, offset, memory, length);
            CHECK_SAY(n == -EAGAIN || (n >= 0 && memcmp(memory, model + offset, (size_t)n) == 0), "%lld", (long long)n);
            if (n < 0)
                break;
            atomic_fetch_add(&churn.read, 1);
        }
        kvfs_file_close(file);
    }
    free(memory);
    free(model);
    return NULL;
}

static void *churn_put(void *argument) {
    uint64_t state = (uintptr_t)argument;
    uint8_t *memory = malloc(400000);
    while (!atomic_load(&churn.stop)) {
        char key[32];
        uint64_t i = random_below(&state, CHURN_KEYS), size = 8 + random_below(&state, 399000);
        sprintf(key, "key-%u", (unsigned)i);
        fill(memory, size, (random_next(&state) << 16) + i);
        int64_t r = put_one(churn.client, key, memory, size);
        CHECK_SAY(r == 0, "%lld: %s", (long long)r, kvfs_error());
    }
    free(memory);
    return NULL;
}

static void test_churn(void) {
    pool_new(131072);
    churn.client = connect_plain();
    atomic_store(&churn.stop, false);
    uint64_t size = 100000, state = 99;
    batch_free(put_batch(churn.client, 0, CHURN_KEYS, &size, 1, 0));
    pthread_t threads[5];
    for (uintptr_t i = 0; i < 5; i++)
        CHECK(pthread_create(&threads[i], NULL, i < 3 ? churn_get : i < 4 ? churn_files : churn_put, (void *)(i + 1)) == 0);
    uint8_t *memory = malloc(200000);
    uint64_t until = milliseconds() + 1500;
    for (uint32_t n = 0; milliseconds() < until; n++) {
        char key[32], name[64];
        uint64_t i = random_below(&state, CHURN_KEYS), seed = (random_next(&state) << 16) + i;
        uint32_t name_size = key_hex((uint8_t *)key, (uint32_t)sprintf(key, "key-%u", (unsigned)i), name);
        locked();
        struct block *block = block_named(key);
        if (n % 3 && block && block->seed) {
            block_move(block, 1 + n % 2);
        } else {
            uint64_t length = 8 + random_below(&state, 199000);
            fill(memory, length, seed);
            uint64_t inode = block_write(name, name_size, memory, length, 1 + n % 3, 0, 0, NULL);
            block_of(inode)->seed = seed;
        }
        if (n % 40 == 39 && !segment_reserved(d.currents[0])) { /* evicted, and its segment written again at once */
            segment_reuse(d.currents[0]);
            d.cursors[0] = 1;
        }
        if (d.block_count > BLOCKS_MAX / 2)
            until = 0;
        unlocked();
    }
    atomic_store(&churn.stop, true);
    for (int i = 0; i < 5; i++)
        pthread_join(threads[i], NULL);
    free(memory);
    struct kvfs_client_statistics s = statistics(churn.client);
    CHECK(atomic_load(&churn.read) > 100 && s.busy == 0);
    printf("   %llu reads, %llu misses, %llu retries, %llu checksum errors, %u moves and writes\n", (unsigned long long)atomic_load(&churn.read),
           (unsigned long long)atomic_load(&churn.missed), (unsigned long long)s.retries, (unsigned long long)s.checksum_errors, d.block_count);
    kvfs_close(churn.client);
    daemon_stop(false);
}

/* ---- devices that lie, fail and stay silent ---- */

static void bad_block_wait(uint32_t count, uint64_t inode) {
    uint64_t until = milliseconds() + 30000;
    for (;;) {
        locked();
        bool there = d.bad_blocks >= count;
        CHECK(!there || inode == 0 || (d.bad_inode == inode && d.bad_segment == block_of(inode)->runs[0].segment));
        unlocked();
        if (there)
            return;
        CHECK(milliseconds() < until);
        usleep(1000);
    }
}

static void test_corruption(void) {
    pool_new(65536);
    struct kvfs_client *client = connect_plain();
    uint64_t size = 200001;
    struct batch *b = put_batch(client, 0, 6, &size, 1, 1);
    static const int32_t pages[] = {0, 48, 20, -1};
    for (uint32_t i = 0; i < 4; i++) {
        char key[16];
        sprintf(key, "key-%u", i);
        locked();
        block_corrupt(block_named(key), pages[i]);
        unlocked();
    }
    /* The table leads to another place; and to none. */
    for (uint32_t i = 4; i < 6; i++) {
        char key[16];
        struct kvfs_record record;
        sprintf(key, "key-%u", i);
        locked();
        CHECK(kvfs_table_find_inode(d.table, BLOCK + (uint64_t)(block_named(key) - d.blocks), &record) == 0);
        if (i == 4)
            record.page++;
        else
            record.segment = SEGMENTS + 7;
        CHECK(kvfs_table_update(d.table, &record) == 0);
        unlocked();
    }
    CHECK(kvfs_get(client, &b->keys, b->buffers, b->results) == 0);
    for (uint32_t i = 0; i < 6; i++)
        CHECK_SAY(b->results[i] == -EIO, "block %u: %lld", i, (long long)b->results[i]);
    guards_check(b);
    bad_block_wait(5, 0);
    struct kvfs_client_statistics s = statistics(client);
    CHECK_SAY(s.checksum_errors == 5 && s.retries == 5 && s.misses == 6, "%llu, %llu", (unsigned long long)s.checksum_errors,
              (unsigned long long)s.retries);
    for (uint32_t i = 0; i < 4; i++) { /* one at a time: the right numbers */
        char key[16];
        sprintf(key, "key-%u", i);
        CHECK(get_one(client, key, b->buffers[0].data, size) == -EIO);
        bad_block_wait(6 + i, inode_named(key));
    }
    batch_free(b);
    /* Every other read flips a bit: the second reading is right. */
    b = put_batch(client, 10, 10, &size, 1, 2);
    fault(client, 1, KVFS_FAULT_FLIP, 1, 2, 5);
    kvfs_get(client, &b->keys, b->buffers, b->results);
    for (uint32_t i = 0; i < 10; i++)
        CHECK(b->results[i] == -EIO || (b->results[i] == (int64_t)size && filled(b->buffers[i].data, size, (2ull << 32) + i)));
    fault_all(client, KVFS_FAULT_FLIP, 1, 1, 3);
    CHECK(kvfs_get(client, &b->keys, b->buffers, b->results) == 0 && b->results[3] == -EIO);
    fault_all(client, KVFS_FAULT_NONE, 3, 0, 0);
    batch_get(client, b, 2);
    batch_free(b);
    kvfs_close(client);
    daemon_stop(false);
}

static void test_device_errors(void) {
    pool_new(16384);
    struct kvfs_client *client = connect_plain();
    uint64_t size = 150000;
    struct batch *b = put_batch(client, 0, 10, &size, 1, 1);
    static const uint32_t errors[] = {EIO, ENODEV, EREMOTEIO, ERANGE, EBADMSG, ESTALE};
    for (uint32_t i = 0; i < 6; i++) {
        fault(client, 2, KVFS_FAULT_ERROR, 1, 1, errors[i]);
        CHECK(kvfs_get(client, &b->keys, b->buffers, b->results) == 0);
        for (uint32_t k = 0; k < 10; k++) /* a miss, whatever the device says; never an answer that means something else */
            CHECK_SAY(b->results[k] == -EIO, "errno %u: %lld", errors[i], (long long)b->results[k]);
    }
    fault(client, 2, KVFS_FAULT_SHORT, 1, 1, 0);
    CHECK(kvfs_get(client, &b->keys, b->buffers, b->results) == 0 && b->results[9] == -EIO);
    fault_all(client, KVFS_FAULT_NONE, 3, 0, 0);
    batch_get(client, b, 1);
    /* Blocks that cannot be written are taken back; the rest is stored. */
    fault(client, 1, KVFS_FAULT_ERROR, 2, 7, EIO);
    batch_fill(b, 2);
    int stored = kvfs_put(client, &b->keys, b->buffers, b->results), zeros = 0;
    fault_all(client, KVFS_FAULT_NONE, 3, 0, 0);
    for (uint32_t i = 0; i < 10; i++) {
        CHECK(b->results[i] == 0 || b->results[i] == -EIO);
        zeros += b->results[i] == 0;
    }
    CHECK(stored == zeros && stored > 0 && stored < 10);
    locked();
    CHECK(d.aborted == 10u - (uint32_t)stored && d.committed == 10u + (uint32_t)stored);
    unlocked();
    int64_t *put_results = malloc(10 * sizeof(*put_results));
    memcpy(put_results, b->results, 10 * sizeof(*put_results));
    CHECK(kvfs_get(client, &b->keys, b->buffers, b->results) == 10);
    for (uint32_t i = 0; i < 10; i++)
        CHECK(filled(b->buffers[i].data, size, ((put_results[i] == 0 ? 2ull : 1ull) << 32) + i));
    free(put_results);
    /* A write that is lost is found when it is read. */
    locked();
    d.writes_lost = true;
    unlocked();
    fault(client, 1, KVFS_FAULT_LOST_WRITE, 2, 1, 0);
    batch_fill(b, 3);
    CHECK(kvfs_put(client, &b->keys, b->buffers, b->results) == 10);
    fault_all(client, KVFS_FAULT_NONE, 3, 0, 0);
    CHECK(kvfs_get(client, &b->keys, b->buffers, b->results) == 0 && b->results[0] == -EIO);
    /* The daemon refuses some blocks. */
    locked();
    d.refuse_odd = -EFBIG;
    unlocked();
    CHECK(kvfs_put(client, &b->keys, b->buffers, b->results) == 5);
    for (uint32_t i = 0; i < 10; i++)
        CHECK(b->results[i] == (i % 2 ? -EFBIG : 0));
    locked();
    d.refuse_odd = 0;
    d.fail_odd = -EISDIR;
    unlocked();
    CHECK(kvfs_put(client, &b->keys, b->buffers, b->results) == 5);
    for (uint32_t i = 0; i < 10; i++)
        CHECK(b->results[i] == (i % 2 ? -EISDIR : 0));
    batch_free(b);
    kvfs_close(client);
    daemon_stop(false);
}

static void test_deadlines(void) {
    const uint32_t timeout_ms = 200 * slowness(), late_ms = 600 * slowness();
    pool_new(16384);
    struct kvfs_client *client = connect_with((struct kvfs_options){.timeout_ms = timeout_ms});
    static const uint64_t sizes[] = {100000, 100001};
    struct batch *b = put_batch(client, 0, 6, sizes, 2, 1);
    uint8_t *unaligned = malloc(100010);
    fault(client, 3, KVFS_FAULT_DELAY, 1, 1, late_ms);
    uint64_t started = milliseconds();
    CHECK(kvfs_get(client, &b->keys, b->buffers, b->results) == 0);
    CHECK(milliseconds() - started >= timeout_ms && milliseconds() - started < 3 * timeout_ms);
    for (uint32_t i = 0; i < 6; i++)
        CHECK_SAY(b->results[i] == -ETIMEDOUT, "block %u: %lld", i, (long long)b->results[i]);
    struct kvfs_client_statistics s = statistics(client);
    CHECK(s.timeouts == 6 && s.busy == 6);
    uint8_t *data = b->buffers[2].data;
    CHECK(kvfs_busy(client, data, 100000) == 1 && kvfs_busy(client, data + 99999, 1) == 1 && kvfs_busy(client, data - 1, 2) == 1);
    CHECK(kvfs_busy(client, unaligned, 100010) == 0);
    CHECK(kvfs_get(client, &b->keys, b->buffers, b->results) == -EBUSY && says("buffer 0"));
    /* Other devices go on, to other memory; this one fails at once. */
    started = milliseconds();
    CHECK(get_one(client, "key-0", unaligned + 1, 100009) == -ETIMEDOUT);
    CHECK(milliseconds() - started < timeout_ms);
    while (kvfs_busy(client, data, 100000))
        CHECK(milliseconds() - started < late_ms + 10000);
    CHECK(milliseconds() - started + timeout_ms >= late_ms - 100);
    wait_idle(client);
    fault_all(client, KVFS_FAULT_NONE, 3, 0, 0);
    usleep(timeout_ms * 1000);
    batch_get(client, b, 1);
    /* Unaligned: the device writes elsewhere, but the caller need not know. */
    fault(client, 0, KVFS_FAULT_DELAY, 1, 1, late_ms);
    CHECK(get_one(client, "key-1", unaligned + 1, 100009) == -ETIMEDOUT);
    fault_all(client, KVFS_FAULT_NONE, 3, 0, 0);
    wait_idle(client);
    usleep(timeout_ms * 1000);
    CHECK(get_one(client, "key-1", unaligned + 1, 100009) == 100001 && filled(unaligned + 1, 100001, (1ull << 32) + 1));
    /* A read that is late within the deadline is none the worse. */
    fault_all(client, KVFS_FAULT_DELAY, 1, 3, 40);
    batch_get(client, b, 1);
    /* Writes: taken back, and the block that was there stays. */
    fault_all(client, KVFS_FAULT_NONE, 3, 0, 0);
    fault(client, 3, KVFS_FAULT_DELAY, 2, 1, late_ms);
    batch_fill(b, 2);
    started = milliseconds();
    CHECK_SAY(kvfs_put(client, &b->keys, b->buffers, b->results) == 0, "%s", kvfs_error());
    CHECK(milliseconds() - started < 3 * timeout_ms);
    for (uint32_t i = 0; i < 6; i++)
        CHECK(b->results[i] == -ETIMEDOUT);
    locked();
    CHECK(d.aborted == 6);
    unlocked();
    fault_all(client, KVFS_FAULT_NONE, 3, 0, 0);
    usleep(late_ms * 1000);
    batch_get(client, b, 1);
    batch_free(b);
    free(unaligned);
    kvfs_close(client);
    daemon_stop(false);
}

/* The daemon goes, another comes, and the batch is read from that. */
static void restart_under(struct kvfs_client *client, struct batch *batch) {
    daemon_stop(false);
    daemon_start();
    batch_get(client, batch, 1);
}

/* A connection of an earlier daemon that a device owes an answer. The client's watcher looks, too. */
static bool keeps_retired(struct kvfs_client *client) {
    pthread_mutex_lock(&client->lock);
    bool found = client->retired != NULL;
    pthread_mutex_unlock(&client->lock);
    return found;
}

/* A device owes an answer to a connection that is over: its memory is known all the same, and the connection goes when it has answered. */
static void test_restart_while_stuck(void) {
    const uint32_t timeout_ms = 200 * slowness(), late_ms = 600 * slowness();
    static const uint64_t size = 100000;
    pool_new(16384);
    struct kvfs_client *client = connect_with((struct kvfs_options){.timeout_ms = timeout_ms});
    struct batch *b = put_batch(client, 0, 3, &size, 1, 1), *other = batch_new(0, 3, &size, 1, 0);
    fault_all(client, KVFS_FAULT_DELAY, 1, 1, late_ms);
    CHECK(kvfs_get(client, &b->keys, b->buffers, b->results) == 0 && b->results[0] == -ETIMEDOUT);
    restart_under(client, other);
    CHECK(keeps_retired(client) && statistics(client).busy == 3 && kvfs_busy(client, b->buffers[1].data, 10) == 1);
    CHECK(kvfs_get(client, &b->keys, b->buffers, b->results) == -EBUSY);
    wait_idle(client);
    CHECK(kvfs_busy(client, b->buffers[1].data, 10) == 0 && !keeps_retired(client));
    batch_get(client, b, 1);
    restart_under(client, b);
    CHECK(statistics(client).reconnects == 2 && !keeps_retired(client));
    batch_free(other);
    batch_free(b);
    kvfs_close(client);
    daemon_stop(false);
}

/* The same for a write, whose memory the client may have back at once. */
static void test_restart_while_a_write_is_stuck(void) {
    const uint32_t timeout_ms = 200 * slowness(), late_ms = 1000 * slowness();
    static const uint64_t size = 100000;
    pool_new(16384);
    struct kvfs_client *client = connect_with((struct kvfs_options){.timeout_ms = timeout_ms});
    struct batch *b = put_batch(client, 0, 3, &size, 1, 1), *other = batch_new(3, 3, &size, 1, 0);
    batch_fill(other, 1);
    fault_all(client, KVFS_FAULT_DELAY, 2, 1, late_ms);
    CHECK(kvfs_put(client, &other->keys, other->buffers, other->results) == 0 && other->results[0] == -ETIMEDOUT);
    restart_under(client, b);
    CHECK(statistics(client).busy == 0 && keeps_retired(client));
    usleep(late_ms * 1000);
    restart_under(client, b);
    CHECK(statistics(client).reconnects == 2 && !keeps_retired(client));
    batch_free(other);
    batch_free(b);
    kvfs_close(client);
    daemon_stop(false);
}

/* The daemon hears that a write is late, and with the next put that it is late no more. It hears neither of a write that was never begun. */
static void test_a_late_write_is_told_again_when_it_has_landed(void) {
    const uint32_t timeout_ms = 200 * slowness(), late_ms = 600 * slowness();
    static const uint64_t size = 100000;
    pool_new(16384);
    struct kvfs_client *client = connect_with((struct kvfs_options){.timeout_ms = timeout_ms});
    struct batch *b = batch_new(0, 3, &size, 1, 1);
    batch_fill(b, 1);
    fault_all(client, KVFS_FAULT_DELAY, 2, 1, late_ms);
    CHECK(kvfs_put(client, &b->keys, b->buffers, b->results) == 0);
    for (uint32_t i = 0; i < 3; i++)
        CHECK(b->results[i] == -ETIMEDOUT);
    locked();
    CHECK(d.late == 3 && d.not_begun == 0 && d.aborted == 3);
    unlocked();
    fault_all(client, KVFS_FAULT_NONE, 2, 0, 0);
    CHECK(kvfs_put(client, &b->keys, b->buffers, b->results) == 0 && b->results[0] == -ETIMEDOUT); /* the devices are left alone */
    locked();
    CHECK(d.late == 3 && d.not_begun == 3 && d.aborted == 6);
    unlocked();
    usleep(late_ms * 1000);
    CHECK(kvfs_put(client, &b->keys, b->buffers, b->results) == 3);
    locked();
    CHECK(d.late == 0 && d.not_begun == 3 && d.open == 0);
    unlocked();
    batch_get(client, b, 1);
    batch_free(b);
    kvfs_close(client);
    daemon_stop(false);
}

/* One device of four is stuck, and 200 blocks are wanted: about one deadline, not one each. */
static void test_one_stuck_device(void) {
    enum { COUNT = 200 };
    const uint32_t timeout_ms = 500 * slowness();
    static const uint64_t sizes[] = {9000, 100000};
    pool_new(16384);
    struct kvfs_client *client = connect_with((struct kvfs_options){.timeout_ms = timeout_ms});
    struct batch *b = put_batch(client, 0, COUNT, sizes, 2, 1);
    fault(client, 3, KVFS_FAULT_DELAY, 1, 1, 5 * timeout_ms / 2);
    uint64_t started = milliseconds();
    int read = kvfs_get(client, &b->keys, b->buffers, b->results);
    uint64_t took = milliseconds() - started;
    CHECK_SAY(took < 2 * timeout_ms, "%llu ms", (unsigned long long)took);
    for (uint32_t i = 0; i < COUNT; i++) {
        CHECK(b->results[i] == -ETIMEDOUT ||
              (b->results[i] == (int64_t)b->buffers[i].size && filled(b->buffers[i].data, b->buffers[i].size, (1ull << 32) + i)));
        read -= b->results[i] >= 0;
    }
    CHECK(read == 0 && b->results[0] != 12345);
    started = milliseconds();
    CHECK(kvfs_busy(client, b->buffers[1].data, 100000) == 1);
    fault_all(client, KVFS_FAULT_NONE, 3, 0, 0);
    wait_idle(client);
    usleep(timeout_ms * 1000);
    batch_get(client, b, 1);
    batch_free(b);
    kvfs_close(client);
    daemon_stop(false);
}

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wredundant-decls"
__attribute__((weak)) void __lsan_disable(void);
__attribute__((weak)) void __lsan_enable(void);
#pragma GCC diagnostic pop

/* A client is closed while a device owes it an answer, to a read or to a write: soon, and later than anybody waits. Memory that the device owes no
 * more is freed (the leak sanitizer looks). */
static void test_close_while_stuck(void) {
    const uint32_t timeout_ms = 200 * slowness();
    static const uint64_t size = 100000;
    pool_new(16384);
    for (int i = 0; i < 4; i++) {
        bool never = i & 1, writing = i & 2;
        uint32_t late = never ? 10 * timeout_ms : timeout_ms + 100;
        if (never && __lsan_disable)
            __lsan_disable(); /* memory that a device still owns is never freed */
        struct kvfs_client *client = connect_with((struct kvfs_options){.timeout_ms = timeout_ms});
        struct batch *b = put_batch(client, 0, 3, &size, 1, 1);
        fault_all(client, KVFS_FAULT_DELAY, writing ? 2 : 1, 1, late);
        int r = writing ? kvfs_put(client, &b->keys, b->buffers, b->results) : kvfs_get(client, &b->keys, b->buffers, b->results);
        CHECK(r == 0 && b->results[2] == -ETIMEDOUT);
        uint64_t started = milliseconds();
        kvfs_close(client);
        CHECK(milliseconds() - started < 5 * timeout_ms);
        batch_free(b); /* the double's devices have written already */
        if (never && __lsan_enable)
            __lsan_enable();
    }
    daemon_stop(false);
}

int main(void) {
    alarm(300 * slowness());
    signal(SIGPIPE, SIG_DFL); /* it must not be needed */
    devices_open();
    RUN(test_churn);
    RUN(test_corruption);
    RUN(test_device_errors);
    RUN(test_deadlines);
    RUN(test_restart_while_stuck);
    RUN(test_restart_while_a_write_is_stuck);
    RUN(test_a_late_write_is_told_again_when_it_has_landed);
    RUN(test_one_stuck_device);
    RUN(test_close_while_stuck);
    devices_close();
    return 0;
}
