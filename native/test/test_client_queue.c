/* sources: base block io client pod */
/* Batches that run beside their submitter, with a double of the daemon (doubles/daemon.h): results, order, depth, the eventfd, bounds. Then
 * deadlines, daemons that die, forks, and closing while work is under way. */
#include "client_harness.h"

#include <dirent.h>

/* Wait for `count` completions. A failure names the line that waits. */
#define drain(queue, out, count) drain_at(__LINE__, queue, out, count)
static void drain_at(int line, struct kvfs_queue *queue, struct kvfs_queue_completion *out, uint32_t count) {
    struct pollfd fd = {.fd = kvfs_queue_fd(queue), .events = POLLIN};
    for (uint32_t have = 0; have < count;) {
        CHECK_SAY(poll(&fd, 1, 60000) == 1, "%u of %u completions, line %d", have, count, line);
        int n = kvfs_queue_drain(queue, out + have, count - have);
        CHECK_SAY(n > 0, "%d: %s, line %d", n, kvfs_error(), line);
        have += (uint32_t)n;
    }
}

static bool readable(struct kvfs_queue *queue) {
    struct pollfd fd = {.fd = kvfs_queue_fd(queue), .events = POLLIN};
    return poll(&fd, 1, 0) == 1;
}

static struct kvfs_vector *vectors_of(const struct batch *b) {
    struct kvfs_vector *vectors = calloc(b->count + 1, sizeof(*vectors));
    for (uint32_t i = 0; i < b->count; i++)
        vectors[i] = (struct kvfs_vector){&b->buffers[i], 1, 0, 0};
    return vectors;
}

static struct kvfs_queue *open_queue(struct kvfs_client *client, uint32_t depth) {
    struct kvfs_queue *queue;
    CHECK_SAY(kvfs_queue_open(client, depth, &queue) == 0, "%s", kvfs_error());
    return queue;
}

static void close_queue(struct kvfs_queue *queue) { CHECK_SAY(kvfs_queue_close(queue) == 0, "%s", kvfs_error()); }

static void wipe(struct batch *b) {
    for (uint32_t i = 0; i < b->count; i++)
        memset(b->buffers[i].data, 0x11, b->buffers[i].size);
}

/* But the kernel's, which io_uring has. */
static uint32_t threads_of_process(void) {
    uint32_t threads = 0;
    DIR *tasks = opendir("/proc/self/task");
    CHECK(tasks);
    for (struct dirent *task; (task = readdir(tasks));) {
        char path[64], name[32] = "";
        snprintf(path, sizeof(path), "/proc/self/task/%.16s/comm", task->d_name);
        FILE *file = task->d_name[0] == '.' ? NULL : fopen(path, "r");
        if (file && fgets(name, sizeof(name), file))
            threads += strncmp(name, "iou-", 4) != 0;
        if (file)
            fclose(file);
    }
    closedir(tasks);
    return threads;
}

/* ---- what is put is what is got ---- */

static void test_round_trips(void) {
    static const uint64_t sizes[] = {0, 1, 4096, 70001, 300000};
    pool_new(16384);
    struct kvfs_client *client = connect_plain();
    struct kvfs_queue *queue = open_queue(client, 0);
    struct kvfs_queue_completion done[8];
    struct batch *b = batch_new(0, 20, sizes, 5, 0), *none = batch_new(100, 2, sizes, 2, 0);
    struct kvfs_vector *vectors = vectors_of(b), *of_none = vectors_of(none);
    uint8_t found[20] = {0}, deleted[20] = {0};
    batch_fill(b, 1);
    CHECK(!readable(queue) && kvfs_queue_drain(queue, done, 8) == 0);
    int64_t id = kvfs_queue_put(queue, &b->keys, vectors, NULL, b->results);
    CHECK_SAY(id == 1, "%s", kvfs_error());
    drain(queue, done, 1);
    CHECK_SAY(done[0].id == 1 && done[0].result == 20 && !done[0].error[0], "%lld: %s", (long long)done[0].result, done[0].error);
    for (uint32_t i = 0; i < 20; i++)
        CHECK(b->results[i] == 0);
    /* The answer to exists is there when it returns. */
    CHECK(kvfs_queue_exists(queue, &b->keys, found) == 2 && readable(queue));
    CHECK(kvfs_queue_drain(queue, done, 8) == 1 && done[0].id == 2 && done[0].result == 20 && found[19] == 1 && !readable(queue));
    /* Keys and vectors are copied: both may go. */
    wipe(b);
    uint32_t *key_sizes = malloc(20 * sizeof(*key_sizes));
    memcpy(key_sizes, b->key_sizes, 20 * sizeof(*key_sizes));
    struct kvfs_keys keys = {b->key_data, key_sizes, 20, 0};
    struct kvfs_vector *copy = vectors_of(b);
    CHECK(kvfs_queue_get(queue, &keys, copy, b->results) == 3);
    memset(key_sizes, 0xff, 20 * sizeof(*key_sizes));
    memset(copy, 0xff, 20 * sizeof(*copy));
    free(key_sizes);
    free(copy);
    CHECK(kvfs_queue_get(queue, &none->keys, of_none, none->results) == 4);
    drain(queue, done, 2);
    for (uint32_t i = 0; i < 2; i++)
        CHECK(done[i].result == (done[i].id == 3 ? 20 : 0));
    CHECK(none->results[0] == -ENOENT && none->results[1] == -ENOENT);
    batch_check(b, 1);
    /* Ranges. */
    wipe(b);
    for (uint32_t i = 0; i < 20; i++)
        vectors[i].offset = 1000;
    CHECK(kvfs_queue_get_ranges(queue, &b->keys, vectors, b->results) == 5);
    drain(queue, done, 1);
    CHECK(done[0].result == 20 && b->results[0] == 0 && b->results[3] == 69001);
    uint8_t *model = malloc(70001);
    fill(model, 70001, (1ull << 32) + 3);
    CHECK(memcmp(b->buffers[3].data, model + 1000, 69001) == 0);
    free(model);
    CHECK(kvfs_queue_delete(queue, &b->keys, deleted) == 6);
    drain(queue, done, 1);
    CHECK(done[0].result == 20 && deleted[0] == 1 && deleted[19] == 1);
    CHECK(kvfs_queue_exists(queue, &b->keys, found) == 7);
    drain(queue, done, 1);
    CHECK(done[0].result == 0 && found[0] == 0);
    /* Nothing to do. */
    struct kvfs_keys empty = {NULL, NULL, 0, 0};
    CHECK(kvfs_queue_get(queue, &empty, NULL, NULL) == 8 && kvfs_queue_put(queue, &empty, NULL, NULL, NULL) == 9);
    CHECK(kvfs_queue_exists(queue, &empty, NULL) == 10 && kvfs_queue_delete(queue, &empty, NULL) == 11);
    CHECK(kvfs_queue_drain(queue, done, 8) == 4 && done[3].id == 11 && done[3].result == 0);
    free(vectors);
    free(of_none);
    batch_free(b);
    batch_free(none);
    close_queue(queue);
    kvfs_close(client);
    daemon_stop(false);
}

/* ---- mistakes are one batch's ---- */

static void test_mistakes(void) {
    static const uint64_t size = 5000;
    pool_new(16384);
    struct kvfs_client *client = connect_plain();
    struct kvfs_queue *queue = open_queue(client, 1);
    struct kvfs_queue_completion done[8];
    struct batch *b = put_batch(client, 0, 3, &size, 1, 1);
    struct kvfs_vector *vectors = vectors_of(b);
    CHECK(kvfs_queue_open(client, 257, &(struct kvfs_queue *){NULL}) == -EINVAL && says("depth 257"));
    /* A key that cannot be, memory that overlaps: of a read. */
    b->key_sizes[1] = 0;
    int64_t wrong = kvfs_queue_get(queue, &b->keys, vectors, b->results);
    drain(queue, done, 1);
    CHECK(done[0].id == wrong && done[0].result == -EINVAL && strstr(done[0].error, "key"));
    CHECK(kvfs_queue_exists(queue, &b->keys, (uint8_t *)b->results) == -EINVAL && says("key"));
    b->key_sizes[1] = 5;
    vectors[2] = vectors[1];
    wrong = kvfs_queue_get(queue, &b->keys, vectors, b->results);
    drain(queue, done, 1);
    CHECK(done[0].id == wrong && done[0].result == -EINVAL && strstr(done[0].error, "overlap"));
    CHECK(b->results[0] == -ECANCELED && b->results[2] == -ECANCELED);
    vectors[2].pieces = &b->buffers[2];
    /* Smaller than its block: that block's alone. */
    b->buffers[1].size = 4999;
    wrong = kvfs_queue_get(queue, &b->keys, vectors, b->results);
    drain(queue, done, 1);
    CHECK(done[0].result == 2 && b->results[1] == -ERANGE && b->results[2] == 5000);
    b->buffers[1].size = 5000;
    /* Puts that wait together while the devices are held, one of them wrong: the others are stored. */
    fault_all(client, KVFS_FAULT_HOLD, 2, 1, 0);
    struct batch *puts[4];
    int64_t ids[4];
    for (uint32_t i = 0; i < 4; i++) {
        puts[i] = batch_new(10 + i, 2, &size, 1, 0);
        batch_fill(puts[i], 5 + i);
        if (i == 2)
            memcpy(puts[i]->key_data, puts[i]->key_data + 6, 6); /* a key twice */
        struct kvfs_vector *of_put = vectors_of(puts[i]);
        ids[i] = kvfs_queue_put(queue, &puts[i]->keys, of_put, NULL, puts[i]->results);
        CHECK(ids[i] > 0);
        free(of_put);
        if (i == 0)
            usleep(50000 * slowness());
    }
    fault_all(client, KVFS_FAULT_NONE, 3, 0, 0);
    drain(queue, done, 4);
    for (uint32_t i = 0; i < 4; i++) {
        CHECK(done[i].id == ids[i]);
        CHECK_SAY(done[i].result == (i == 2 ? -EINVAL : 2), "put %u: %lld, %s", i, (long long)done[i].result, done[i].error);
    }
    /* key-11 is in two of them: the later one was stored later. */
    uint8_t memory[5000];
    CHECK(get_one(client, "key-11", memory, 5000) == 5000 && filled(memory, 5000, (6ull << 32) + 0));
    CHECK(get_one(client, "key-14", memory, 5000) == 5000 && filled(memory, 5000, (8ull << 32) + 1));
    for (uint32_t i = 0; i < 4; i++)
        batch_free(puts[i]);
    struct kvfs_put_options options = {sizeof(options), 0, &(struct kvfs_keys){NULL, NULL, 2, 0}};
    CHECK(kvfs_queue_put(queue, &b->keys, vectors, &options, b->results) == -EINVAL && says("2 parents of 3 keys"));
    free(vectors);
    batch_free(b);
    close_queue(queue);
    kvfs_close(client);
    daemon_stop(false);
}

/* ---- many batches ---- */

/* Puts that wait for one another are joined; and order is kept with deletes between them. */
static void test_puts_are_joined_and_in_order(void) {
    enum { COUNT = 60 };
    static const uint64_t size = 3000;
    pool_new(16384);
    struct kvfs_client *client = connect_plain();
    struct kvfs_queue *queue = open_queue(client, 0);
    struct kvfs_queue_completion *done = calloc(4 * COUNT, sizeof(*done));
    struct batch *puts[COUNT];
    fault_all(client, KVFS_FAULT_DELAY, 2, 1, 100 * slowness()); /* of the first one */
    for (uint32_t i = 0; i < COUNT; i++) {
        puts[i] = batch_new(i, 1, &size, 1, 0);
        batch_fill(puts[i], i);
        struct kvfs_vector *vectors = vectors_of(puts[i]);
        CHECK(kvfs_queue_put(queue, &puts[i]->keys, vectors, NULL, puts[i]->results) == i + 1);
        free(vectors);
    }
    drain(queue, done, COUNT);
    fault_all(client, KVFS_FAULT_NONE, 3, 0, 0);
    locked();
    CHECK_SAY(d.reserves < 8 && d.committed == COUNT, "%u requests, %u blocks", d.reserves, d.committed);
    unlocked();
    for (uint32_t i = 0; i < COUNT; i++)
        CHECK(done[i].id == i + 1 && done[i].result == 1 && puts[i]->results[0] == 0);
    /* put, delete, put, exists of one key. */
    uint8_t deleted[COUNT], found[COUNT];
    int64_t again[COUNT]; /* a batch's results are the queue's until it is over */
    for (uint32_t i = 0; i < COUNT; i++) {
        struct kvfs_vector *vectors = vectors_of(puts[i]);
        CHECK(kvfs_queue_put(queue, &puts[i]->keys, vectors, NULL, puts[i]->results) > 0);
        CHECK(kvfs_queue_delete(queue, &puts[i]->keys, &deleted[i]) > 0);
        CHECK(kvfs_queue_put(queue, &puts[i]->keys, vectors, NULL, &again[i]) > 0);
        if (i % 2)
            CHECK(kvfs_queue_delete(queue, &puts[i]->keys, &deleted[i]) > 0);
        free(vectors);
    }
    drain(queue, done, 3 * COUNT + COUNT / 2);
    for (uint32_t i = 0; i < 3 * COUNT + COUNT / 2; i++)
        CHECK_SAY(done[i].result == 1 && (i == 0 || done[i].id == done[i - 1].id + 1), "%lld: %s", (long long)done[i].result, done[i].error);
    for (uint32_t i = 0; i < COUNT; i++) {
        CHECK(kvfs_exists(client, &puts[i]->keys, &found[i]) == 0 && found[i] == (i % 2 == 0) && deleted[i] == 1);
        batch_free(puts[i]);
    }
    free(done);
    close_queue(queue);
    kvfs_close(client);
    daemon_stop(false);
}

/* One submitter with batches of one block each: as many are in flight as the queue is deep, and no thread is made for them. */
static void test_depth(void) {
    enum { COUNT = 200 };
    static const uint64_t size = 20000;
    static const uint32_t depths[] = {1, 16, 64, 256};
    pool_new(131072);
    struct kvfs_client *client = connect_plain();
    struct batch *all = put_batch(client, 0, COUNT, &size, 1, 1);
    struct kvfs_queue_completion *done = calloc(COUNT, sizeof(*done));
    for (uint32_t i = 0; i < 4; i++) {
        struct kvfs_queue *queue = open_queue(client, depths[i]);
        uint32_t threads = threads_of_process();
        wipe(all);
        fault_all(client, KVFS_FAULT_HOLD, 1, 1, 0);
        const uint8_t *key = all->key_data;
        for (uint32_t k = 0; k < COUNT; key += all->key_sizes[k++]) {
            struct kvfs_keys keys = {key, &all->key_sizes[k], 1, 0};
            struct kvfs_vector vector = {&all->buffers[k], 1, 0, 0};
            CHECK(kvfs_queue_get(queue, &keys, &vector, &all->results[k]) == k + 1);
        }
        uint64_t until = milliseconds() + 20000;
        uint32_t wanted = depths[i] < COUNT ? depths[i] : COUNT, held = 0;
        while (held < wanted) { /* parts that devices hold: one a block, or two where a stripe unit ends */
            CHECK_SAY(milliseconds() < until, "%u of %u in flight", held, wanted);
            usleep(1000);
            held = 0;
            for (uint32_t segment = 0; segment < SEGMENTS; segment++)
                held += atomic_load(&client->connection->array.segment_busy[segment]);
        }
        usleep(20000);
        held = 0;
        for (uint32_t segment = 0; segment < SEGMENTS; segment++)
            held += atomic_load(&client->connection->array.segment_busy[segment]);
        CHECK_SAY(held <= 2 * wanted, "%u parts in flight at depth %u", held, depths[i]);
        while (threads_of_process() > threads) { /* one of the kernel's has its name a moment later */
            CHECK(milliseconds() < until);
            usleep(1000);
        }
        CHECK(!readable(queue));
        fault_all(client, KVFS_FAULT_NONE, 3, 0, 0);
        drain(queue, done, COUNT);
        batch_check(all, 1);
        close_queue(queue);
    }
    free(done);
    batch_free(all);
    kvfs_close(client);
    daemon_stop(false);
}

/* A batch behind one that waits for a device is not held up by it, while there is depth. */
static void test_batches_pass_one_another(void) {
    static const uint64_t size = 8192;
    pool_new(131072);
    struct kvfs_client *client = connect_plain();
    struct kvfs_queue *queue = open_queue(client, 8);
    struct batch *b = put_batch(client, 0, 60, &size, 1, 1);
    struct kvfs_vector *vectors = vectors_of(b);
    struct kvfs_queue_completion done[2];
    /* Of which device each block lies on: one held block, and one of another device. */
    fault(client, 0, KVFS_FAULT_HOLD, 1, 1, 0);
    struct kvfs_keys slow = b->keys, fast = b->keys;
    fast.count = 1;
    bool passed = false;
    CHECK(kvfs_queue_get(queue, &slow, vectors, b->results) == 1);
    usleep(50000);
    fault_all(client, KVFS_FAULT_NONE, 3, 0, 0);
    drain(queue, done, 1);
    CHECK(done[0].result == 60);
    batch_check(b, 1);
    uint8_t *memory = pages_get(4);
    const uint8_t *key = b->key_data;
    slow.count = 1;
    for (uint32_t i = 0; i < 60 && !passed; key += b->key_sizes[i++]) {
        struct kvfs_buffer piece = {memory, size};
        struct kvfs_vector vector = {&piece, 1, 0, 0};
        int64_t result;
        fast = (struct kvfs_keys){key, &b->key_sizes[i], 1, 0};
        fault(client, 0, KVFS_FAULT_HOLD, 1, 1, 0);
        int64_t id = kvfs_queue_get(queue, &slow, vectors, b->results), second = kvfs_queue_get(queue, &fast, &vector, &result);
        struct pollfd fd = {.fd = kvfs_queue_fd(queue), .events = POLLIN};
        CHECK(id > 0 && second > 0);
        if (poll(&fd, 1, 100) == 1 && kvfs_queue_drain(queue, done, 1) == 1 && done[0].id == second) {
            fault_all(client, KVFS_FAULT_NONE, 3, 0, 0);
            drain(queue, done, 1);
            passed = done[0].id == id;
        } else {
            fault_all(client, KVFS_FAULT_NONE, 3, 0, 0);
            drain(queue, done, done[0].id == id ? 1 : 2);
            while (kvfs_queue_drain(queue, done, 2) > 0)
                ;
            slow = fast; /* it lies elsewhere */
            vectors[0] = (struct kvfs_vector){&b->buffers[i], 1, 0, 0};
        }
        done[0].id = 0;
    }
    CHECK(passed);
    free(memory);
    free(vectors);
    batch_free(b);
    close_queue(queue);
    kvfs_close(client);
    daemon_stop(false);
}

/* ---- a batch that comes at any moment of the reader ---- */

/* A batch can come between any two looks of the reader, mostly for some ns. The Makefile links unlocks and waits to these. Behind the reader's n-th
 * unlock of the queue's lock they submit a batch, before the reader goes on: as another thread's that runs just then. */
static struct {
    _Atomic(pthread_mutex_t *) lock; /* the queue's; NULL: not known yet */
    atomic_int left;                 /* unlocks before the batch comes; below 1: none comes */
    atomic_uint waits;               /* for work, of the queue's threads: the double has none such */
    struct kvfs_queue *queue;
    struct batch *batch;
    struct kvfs_vector *vectors;
} moment;
static _Thread_local bool is_submitter, learns; /* learns: the lock is the next one that is unlocked */

int __real_pthread_mutex_unlock(pthread_mutex_t *lock);
int __real_pthread_cond_wait(pthread_cond_t *condition, pthread_mutex_t *lock);
int __wrap_pthread_mutex_unlock(pthread_mutex_t *lock);
int __wrap_pthread_cond_wait(pthread_cond_t *condition, pthread_mutex_t *lock);
int __wrap_pthread_mutex_unlock(pthread_mutex_t *lock) {
    int r = __real_pthread_mutex_unlock(lock);
    if (learns)
        atomic_store(&moment.lock, lock);
    else if (!is_submitter && lock == atomic_load(&moment.lock) && atomic_fetch_sub(&moment.left, 1) == 1)
        CHECK(kvfs_queue_get(moment.queue, &moment.batch->keys, moment.vectors, moment.batch->results) > 0);
    return r;
}
int __wrap_pthread_cond_wait(pthread_cond_t *condition, pthread_mutex_t *lock) {
    pthread_mutex_t *known = atomic_load(&moment.lock);
    if (!known || lock == known)
        atomic_fetch_add(&moment.waits, 1);
    return __real_pthread_cond_wait(condition, lock);
}

static void wait_asleep(uint32_t threads) {
    for (uint64_t until = milliseconds() + 60000; atomic_load(&moment.waits) < threads; usleep(100))
        CHECK_SAY(milliseconds() < until, "%u of %u threads wait for work", atomic_load(&moment.waits), threads);
}

/* Blocks of both batches are there, or are not. Returns how many unlocks the reader takes for one. */
static int at_each_moment(uint32_t first_key, int64_t result) {
    static const uint64_t size = 5000;
    struct kvfs_queue_completion done[3];
    struct batch *first = batch_new(first_key, 1, &size, 1, 0), *second = moment.batch = batch_new(first_key + 1, 1, &size, 1, 0);
    struct kvfs_vector *vectors = vectors_of(first);
    moment.vectors = vectors_of(second);
    int unlocks = 0;
    for (bool came = true; came; unlocks++) {
        atomic_store(&moment.waits, 0);
        atomic_store(&moment.left, unlocks + 1);
        CHECK(kvfs_queue_get(moment.queue, &first->keys, vectors, first->results) > 0);
        wait_asleep(1); /* the reader: the writer has nothing to wake for */
        came = atomic_exchange(&moment.left, 0) <= 0;
        int n = kvfs_queue_drain(moment.queue, done, 3);
        CHECK_SAY(n == 1 + came, "%d of %d completions while the reader sleeps: the last batch came behind unlock %d", n, 1 + came, unlocks + 1);
        for (int i = 0; i < n; i++)
            CHECK_SAY(done[i].result == result, "batch %lld: %lld, %s", (long long)done[i].id, (long long)done[i].result, done[i].error);
    }
    free(moment.vectors);
    free(vectors);
    batch_free(second);
    batch_free(first);
    return unlocks;
}

static void test_a_batch_that_comes_at_any_moment_is_read(void) {
    static const uint64_t size = 5000;
    pool_new(16384);
    struct kvfs_client *client = connect_plain();
    batch_free(put_batch(client, 0, 2, &size, 1, 1));
    is_submitter = true;
    for (uint32_t depth = 1; depth <= 2; depth++) { /* with one the reader does not look for others while it reads */
        struct kvfs_queue_completion done;
        atomic_store(&moment.waits, 0);
        moment.queue = open_queue(client, depth);
        wait_asleep(2);
        learns = true;
        CHECK(kvfs_queue_drain(moment.queue, &done, 0) == 0);
        learns = false;
        int misses = at_each_moment(100, 0), hits = at_each_moment(0, 1);
        CHECK_SAY(misses > 5 && hits > 5, "%d and %d unlocks", misses, hits);
        atomic_store(&moment.lock, NULL);
        close_queue(moment.queue);
    }
    is_submitter = false;
    kvfs_close(client);
    daemon_stop(false);
}

/* ---- the eventfd, and bounds ---- */

static void test_bounds(void) {
    static const uint64_t size = 100;
    pool_new(16384);
    struct kvfs_client *client = connect_plain();
    struct kvfs_queue *queue = open_queue(client, 4);
    struct batch *b = put_batch(client, 0, 1, &size, 1, 1);
    struct kvfs_queue_completion done[100];
    uint8_t found;
    int64_t id = 0, last;
    while ((last = kvfs_queue_exists(queue, &b->keys, &found)) > 0)
        CHECK(last == ++id);
    CHECK_SAY(last == -EAGAIN && id == 4096 && says("4096 batches"), "%lld after %lld", (long long)last, (long long)id);
    struct kvfs_vector vector = {b->buffers, 1, 0, 0};
    CHECK(kvfs_queue_get(queue, &b->keys, &vector, b->results) == -EAGAIN);
    /* Readable until the last one is drained, however many a drain takes. */
    for (uint32_t i = 0; i < 4096; i++) {
        CHECK(readable(queue) && kvfs_queue_drain(queue, done, 0) == 0 && readable(queue));
        CHECK(kvfs_queue_drain(queue, done, 1) == 1 && done[0].id == i + 1);
    }
    CHECK(!readable(queue) && kvfs_queue_drain(queue, done, 100) == 0);
    CHECK(kvfs_queue_get(queue, &b->keys, &vector, b->results) == 4097);
    drain(queue, done, 1);
    /* Blocks: a large batch alone is taken, others then wait for their turn. */
    enum { MANY = 300000 };
    uint32_t *key_sizes = malloc(MANY * sizeof(*key_sizes));
    uint8_t *names = malloc(MANY), *answers = malloc(MANY);
    memset(names, 'k', MANY);
    for (uint32_t i = 0; i < MANY; i++)
        key_sizes[i] = 1;
    struct kvfs_keys many = {names, key_sizes, MANY, 0};
    CHECK(kvfs_queue_exists(queue, &many, answers) == 4098);
    CHECK(kvfs_queue_exists(queue, &b->keys, &found) == -EAGAIN && says("blocks"));
    drain(queue, done, 1);
    CHECK(kvfs_queue_exists(queue, &b->keys, &found) == 4099);
    drain(queue, done, 1);
    free(key_sizes);
    free(names);
    free(answers);
    batch_free(b);
    close_queue(queue);
    kvfs_close(client);
    daemon_stop(false);
}

/* ---- devices and daemons ---- */

static void test_silent_device(void) {
    const uint32_t timeout_ms = 200 * slowness();
    static const uint64_t size = 100000;
    pool_new(16384);
    struct kvfs_client *client = connect_with((struct kvfs_options){.timeout_ms = timeout_ms});
    struct kvfs_queue *queue = open_queue(client, 4);
    struct batch *b = put_batch(client, 0, 6, &size, 1, 1), *again = batch_new(0, 6, &size, 1, 0);
    struct kvfs_vector *vectors = vectors_of(b), *others = vectors_of(again);
    struct kvfs_queue_completion done[6];
    fault(client, 3, KVFS_FAULT_HOLD, 1, 1, 0);
    uint64_t started = milliseconds();
    CHECK(kvfs_queue_get(queue, &b->keys, vectors, b->results) == 1);
    CHECK(milliseconds() - started < timeout_ms); /* no submitter waits */
    drain(queue, done, 1);
    CHECK_SAY(milliseconds() - started >= timeout_ms && milliseconds() - started < 3 * timeout_ms, "%llu ms",
              (unsigned long long)(milliseconds() - started));
    CHECK(done[0].result == 0);
    for (uint32_t i = 0; i < 6; i++)
        CHECK(b->results[i] == -ETIMEDOUT);
    CHECK(statistics(client).busy >= 4 && kvfs_busy(client, b->buffers[0].data, 1) == 1);
    CHECK(kvfs_queue_get(queue, &b->keys, vectors, b->results) == 2);
    drain(queue, done, 1);
    CHECK(done[0].result == -EBUSY && strstr(done[0].error, "buffer 0"));
    started = milliseconds(); /* the device is known as silent: at once */
    CHECK(kvfs_queue_get(queue, &again->keys, others, again->results) == 3);
    drain(queue, done, 1);
    CHECK(done[0].result == 0 && again->results[0] == -ETIMEDOUT && milliseconds() - started < timeout_ms);
    fault_all(client, KVFS_FAULT_NONE, 3, 0, 0);
    wait_idle(client);
    usleep(5 * timeout_ms * 1000);
    wipe(b);
    CHECK(kvfs_queue_get(queue, &b->keys, vectors, b->results) == 4);
    drain(queue, done, 1);
    CHECK(done[0].result == 6);
    batch_check(b, 1);
    free(vectors);
    free(others);
    batch_free(b);
    batch_free(again);
    close_queue(queue);
    kvfs_close(client);
    daemon_stop(false);
}

/* A daemon that dies while puts wait: each has its error. Reads go on; with the next daemon all does. */
static void test_daemon_dies(void) {
    static const uint64_t size = 20000;
    pool_new(16384);
    struct kvfs_client *client = connect_plain();
    struct kvfs_queue *queue = open_queue(client, 8);
    struct batch *b = put_batch(client, 0, 4, &size, 1, 1), *puts[6];
    struct kvfs_vector *vectors = vectors_of(b);
    struct kvfs_queue_completion done[6];
    uint8_t found[4];
    fault_all(client, KVFS_FAULT_HOLD, 2, 1, 0);
    for (uint32_t i = 0; i < 6; i++) {
        puts[i] = batch_new(10 + 2 * i, 2, &size, 1, 0);
        batch_fill(puts[i], 2);
        struct kvfs_vector *of_put = vectors_of(puts[i]);
        CHECK(kvfs_queue_put(queue, &puts[i]->keys, of_put, NULL, puts[i]->results) == i + 1);
        free(of_put);
        if (i == 0)
            usleep(50000 * slowness());
    }

    daemon_stop(false);
    fault_all(client, KVFS_FAULT_NONE, 3, 0, 0);
    drain(queue, done, 6);
    for (uint32_t i = 0; i < 6; i++)
        CHECK_SAY(done[i].id == i + 1 && done[i].result == -ENOTCONN && done[i].error[0] && puts[i]->results[0] < 0, "put %u: %lld, %s", i,
                  (long long)done[i].result, done[i].error);
    wipe(b);
    CHECK(kvfs_queue_get(queue, &b->keys, vectors, b->results) == 7);
    drain(queue, done, 1);
    CHECK_SAY(done[0].result == 4, "%lld: %s", (long long)done[0].result, done[0].error);
    batch_check(b, 1);
    /* Without a daemon exists asks the old table, from the queue's thread: nobody waits for the socket. */
    CHECK(kvfs_queue_exists(queue, &b->keys, found) == 8);
    drain(queue, done, 1);
    CHECK(done[0].result == 4);
    daemon_start();
    wipe(b);
    CHECK(kvfs_queue_get(queue, &b->keys, vectors, b->results) == 9);
    drain(queue, done, 1);
    CHECK(done[0].result == 4);
    batch_check(b, 1);
    struct kvfs_vector *of_put = vectors_of(puts[3]);
    CHECK(kvfs_queue_put(queue, &puts[3]->keys, of_put, NULL, puts[3]->results) == 10);
    drain(queue, done, 1);
    CHECK_SAY(done[0].result == 2 && statistics(client).reconnects == 1, "%s", done[0].error);
    free(of_put);
    for (uint32_t i = 0; i < 6; i++)
        batch_free(puts[i]);
    free(vectors);
    batch_free(b);
    close_queue(queue);
    kvfs_close(client);
    daemon_stop(false);
}

/* A table that cannot answer, and a daemon that does not: exists does not wait, its completion does. */
static void test_exists_never_waits(void) {
    static const uint64_t size = 100;
    pool_new(16384);
    struct kvfs_client *client = connect_with((struct kvfs_options){.timeout_ms = 300 * slowness()});
    struct kvfs_queue *queue = open_queue(client, 8);
    batch_free(put_batch(client, 0, 1, &size, 1, 1));
    struct kvfs_queue_completion done[2];
    uint32_t key_sizes[] = {5, 4};
    struct kvfs_keys keys = {"key-0none", key_sizes, 2, 0};
    uint8_t found[2];
    locked();
    d.incomplete = true;
    kvfs_table_set_complete(d.table, 0);
    unlocked();
    CHECK(kvfs_queue_exists(queue, &keys, found) == 1);
    drain(queue, done, 1);
    CHECK(done[0].result == 1 && found[0] == 1 && found[1] == 0);
    locked();
    d.trick = HANG;
    d.trick_type = WIRE_LOOKUP;
    unlocked();
    uint64_t started = milliseconds();
    CHECK(kvfs_queue_exists(queue, &keys, found) == 2);
    CHECK(milliseconds() - started < 200 * slowness() && !readable(queue));
    drain(queue, done, 1);
    CHECK(done[0].result == -ETIMEDOUT && done[0].error[0]);
    close_queue(queue);
    kvfs_close(client);
    daemon_stop(false);
}

/* ---- closing, and forks ---- */

static struct kvfs_client *held_client;
static atomic_bool closing;

/* The devices go on once the queue is being closed. */
static void *go_on(void *nothing) {
    while (!atomic_load(&closing))
        usleep(1000);
    usleep(100000);
    fault_all(held_client, KVFS_FAULT_NONE, 3, 0, 0);
    return nothing;
}

/* Closed while reads, and in later rounds puts, wait for devices: which go on, or in the last round stay silent. */
static void test_close_with_work_under_way(void) {
    enum { COUNT = 40 };
    static const uint64_t size = 100000;
    const uint32_t timeout_ms = 500 * slowness();
    pool_new(16384);
    struct kvfs_client *client = connect_with((struct kvfs_options){.timeout_ms = timeout_ms});
    batch_free(put_batch(client, 0, COUNT, &size, 1, 1));
    for (uint32_t round = 0; round < 3; round++) {
        struct kvfs_queue *queue = open_queue(client, 4);
        struct batch *b = batch_new(0, COUNT, &size, 1, 0), *puts = batch_new(100, 2, &size, 1, 0), *late = batch_new(200, 2, &size, 1, 0);
        struct kvfs_vector *vectors = vectors_of(b), *of_puts = vectors_of(puts), *of_late = vectors_of(late);
        wipe(b);
        pthread_t thread;
        fault_all(client, KVFS_FAULT_HOLD, 3, 1, 0);
        held_client = client;
        atomic_store(&closing, false);
        if (round < 2)
            CHECK(pthread_create(&thread, NULL, go_on, NULL) == 0);
        CHECK(kvfs_queue_get(queue, &b->keys, vectors, b->results) > 0);
        if (round) {
            CHECK(kvfs_queue_put(queue, &puts->keys, of_puts, NULL, puts->results) > 0);
            for (bool begun = false; !begun; usleep(1000)) { /* the other put does not join it */
                locked();
                begun = d.reserved == COUNT + 2 * round;
                unlocked();
            }
            CHECK(kvfs_queue_put(queue, &late->keys, of_late, NULL, late->results) > 0);
        }
        uint64_t started = milliseconds();
        atomic_store(&closing, true);
        close_queue(queue);
        CHECK(milliseconds() - started < 5 * timeout_ms);
        if (round < 2)
            pthread_join(thread, NULL);
        uint32_t read = 0, held = 0, canceled = 0;
        for (uint32_t i = 0; i < COUNT; i++) {
            read += b->results[i] == (int64_t)size;
            held += b->results[i] == -ETIMEDOUT;
            canceled += b->results[i] == -ECANCELED;
        }
        CHECK_SAY(read + held + canceled == COUNT && canceled > 0 && read <= 8, "%u read, %u held, %u canceled", read, held, canceled);
        CHECK(round < 2 || read == 0);
        CHECK(!round || late->results[0] == -ECANCELED);
        CHECK(round != 1 || (puts->results[0] == 0 && puts->results[1] == 0));
        fault_all(client, KVFS_FAULT_NONE, 3, 0, 0);
        wait_idle(client);
        free(vectors);
        free(of_puts);
        free(of_late);
        batch_free(b);
        batch_free(puts);
        batch_free(late);
        usleep(5 * timeout_ms * 1000 * (round == 1));
    }
    CHECK(kvfs_queue_close(NULL) == 0);
    kvfs_close(client);
    daemon_stop(false);
}

static void test_fork(void) {
    static const uint64_t size = 5000;
    pool_new(16384);
    struct kvfs_client *client = connect_plain();
    struct kvfs_queue *queue = open_queue(client, 4);
    struct batch *b = put_batch(client, 0, 1, &size, 1, 1);
    struct kvfs_vector vector = {b->buffers, 1, 0, 0};
    struct kvfs_queue_completion done;
    uint8_t found;
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        struct kvfs_queue *other;
        bool good = kvfs_queue_get(queue, &b->keys, &vector, b->results) == -ECHILD && says("fork") &&
                    kvfs_queue_get_ranges(queue, &b->keys, &vector, b->results) == -ECHILD &&
                    kvfs_queue_put(queue, &b->keys, &vector, NULL, b->results) == -ECHILD && kvfs_queue_exists(queue, &b->keys, &found) == -ECHILD &&
                    kvfs_queue_delete(queue, &b->keys, &found) == -ECHILD && kvfs_queue_drain(queue, &done, 1) == -ECHILD &&
                    kvfs_queue_fd(queue) == -ECHILD && kvfs_queue_open(client, 4, &other) == -ECHILD && kvfs_queue_close(queue) == -ECHILD;
        _exit(good ? 0 : 1);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    CHECK(kvfs_queue_get(queue, &b->keys, &vector, b->results) == 1);
    drain(queue, &done, 1);
    CHECK(done.result == 1);
    batch_check(b, 1);
    batch_free(b);
    close_queue(queue);
    kvfs_close(client);
    daemon_stop(false);
}

/* ---- many threads ---- */

static struct {
    struct kvfs_client *client;
    struct kvfs_queue *queue;
    atomic_uint submitted;
    atomic_bool stop;
} crowd;

static void *crowd_submit(void *argument) {
    static const uint64_t size = 9000;
    uint32_t first = 20 * (uint32_t)(uintptr_t)argument;
    struct batch *mine[8];
    struct kvfs_vector *vectors[8];
    for (uint32_t i = 0; i < 8; i++) {
        mine[i] = batch_new(first, 2, &size, 1, i % 3);
        vectors[i] = vectors_of(mine[i]);
        CHECK(kvfs_queue_get(crowd.queue, &mine[i]->keys, vectors[i], mine[i]->results) > 0);
        atomic_fetch_add(&crowd.submitted, 1);
    }
    while (!atomic_load(&crowd.stop))
        usleep(1000);
    for (uint32_t i = 0; i < 8; i++) {
        batch_check(mine[i], 1);
        batch_free(mine[i]);
        free(vectors[i]);
    }
    return NULL;
}

static void *crowd_drain(void *argument) {
    struct kvfs_queue_completion done[16];
    uint32_t *drained = argument;
    while (*drained < 64) {
        struct pollfd fd = {.fd = kvfs_queue_fd(crowd.queue), .events = POLLIN};
        CHECK(poll(&fd, 1, 60000) == 1);
        int n = kvfs_queue_drain(crowd.queue, done, 16);
        for (int i = 0; i < n; i++)
            CHECK_SAY(done[i].result == 2, "%lld: %s", (long long)done[i].result, done[i].error);
        *drained += (uint32_t)n;
    }
    return NULL;
}

static void test_many_threads(void) {
    static const uint64_t size = 9000;
    pool_new(16384);
    crowd.client = connect_plain();
    crowd.queue = open_queue(crowd.client, 16);
    batch_free(put_batch(crowd.client, 0, 160, &size, 1, 1));
    for (uint32_t i = 0; i < 8; i++) /* as the threads' own batches have it: the first block of each is version 1, number 0 */
        batch_free(put_batch(crowd.client, 20 * i, 2, &size, 1, 1));
    pthread_t threads[8], drainer;
    uint32_t drained = 0;
    CHECK(pthread_create(&drainer, NULL, crowd_drain, &drained) == 0);
    for (uintptr_t i = 0; i < 8; i++)
        CHECK(pthread_create(&threads[i], NULL, crowd_submit, (void *)i) == 0);
    pthread_join(drainer, NULL);
    atomic_store(&crowd.stop, true);
    for (int i = 0; i < 8; i++)
        pthread_join(threads[i], NULL);
    close_queue(crowd.queue);
    kvfs_close(crowd.client);
    daemon_stop(false);
}

int main(void) {
    alarm(300 * slowness());
    signal(SIGPIPE, SIG_DFL); /* it must not be needed */
    devices_open();
    RUN(test_round_trips);
    RUN(test_mistakes);
    RUN(test_puts_are_joined_and_in_order);
    RUN(test_depth);
    RUN(test_batches_pass_one_another);
    RUN(test_a_batch_that_comes_at_any_moment_is_read);
    RUN(test_bounds);
    RUN(test_silent_device);
    RUN(test_daemon_dies);
    RUN(test_exists_never_waits);
    RUN(test_close_with_work_under_way);
    RUN(test_fork);
    RUN(test_many_threads);
    devices_close();
    return 0;
}
