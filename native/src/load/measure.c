/* kvfs_measure.h: threads that begin at once, each with memory of its own. A kind is three functions and, if it has places, what readies them. */
#include "base/descriptor.h"
#include "client/client.h"
#include "client/transfer.h"
#include "kvfs_measure.h"

#include <fcntl.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/stat.h>

#define NAME_SIZE 80u
/* A header and its block are written together: room for the header behind the block. */
#define SPARE_BYTES ((uint64_t)256 << 10)
#define LENT_MAX 256u
#define RUNS_MAX 1024u

/* Pages of a segment. */
struct place {
    uint32_t segment, page, pages;
};

/* Places that the daemon lent to one thread. */
struct lent {
    struct place runs[RUNS_MAX];
    uint32_t ends[LENT_MAX + 1];          /* place i is runs [ends[i], ends[i + 1]) */
    struct wire_commit commits[LENT_MAX]; /* of all that were lent, those too that are not used */
    uint64_t lent_count, since_ns;
    uint32_t count, next;
};

struct worker {
    struct run *run;
    pthread_t thread;
    uint32_t index;
    uint64_t seed;
    unsigned char *memory; /* a block of noise, and SPARE_BYTES */
    struct lane *lane;
    struct lent *lent;
    bool has_failed;
    bool memory_is_owed; /* a device did not answer: the memory stays */
    uint64_t blocks, misses, histogram[KVFS_MEASURE_BUCKETS];
};

struct run {
    struct kvfs_measure *measure;
    struct connection *connection;
    struct place *places; /* of POOL_READ: where the blocks' bytes lie */
    uint64_t place_count;
    uint64_t next;        /* of blocks that are taken in order */
    uint32_t ended;       /* no further operation begins */
    pthread_mutex_t lock; /* measure's outcome, and the following */
    pthread_cond_t changed;
    uint32_t ready;  /* threads that have what they need, or failed */
    uint64_t end_ns; /* 0: not all are ready */
};

/* operate: 0 or -errno, of blocks [block, block + count). */
struct kind {
    int (*begin)(struct worker *worker);
    int (*refresh)(struct worker *worker);
    int (*operate)(struct worker *worker, uint64_t block, uint32_t count);
    void (*end)(struct worker *worker);
    bool in_order;
};

static uint64_t random_next(struct worker *worker) {
    uint64_t x = worker->seed += 0x9e3779b97f4a7c15u; /* splitmix64 */
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

static uint32_t name_of(const struct kvfs_measure *measure, uint64_t block, char name[NAME_SIZE]) {
    return (uint32_t)snprintf(name, NAME_SIZE, "%s%llu", measure->prefix, (unsigned long long)block);
}

/* ---- raw: files and devices ---- */

static int raw(struct worker *worker, uint64_t block, bool writing) {
    const struct kvfs_measure *measure = worker->run->measure;
    return transfer(measure->files[block % measure->file_count], worker->memory, measure->block_size,
                    block / measure->file_count * measure->block_size, writing);
}

static int raw_read(struct worker *worker, uint64_t block, uint32_t count) {
    (void)count;
    return raw(worker, block, false);
}

static int raw_write(struct worker *worker, uint64_t block, uint32_t count) {
    (void)count;
    return raw(worker, block, true);
}

/* ---- raw: a pool's devices ---- */

static int lane_begin(struct worker *worker) { return lane_take(worker->run->measure->client, worker->run->connection, &worker->lane); }

static void lane_end(struct worker *worker) {
    if (worker->lane)
        lane_give(worker->lane);
    worker->lane = NULL;
}

/* From or to the worker's memory from page `at` on. */
static int place_io(struct worker *worker, bool write, const struct place *place, uint32_t at) {
    struct iovec iov = {worker->memory + at * PAGE, place->pages * PAGE};
    return blocking_io(&worker->lane->ring, write, place->segment, place->page, &iov, 1, NULL, 0);
}

static int pool_read(struct worker *worker, uint64_t block, uint32_t count) {
    (void)block, (void)count;
    const struct geometry *geometry = &worker->run->connection->array.geometry;
    struct place all = worker->run->places[random_next(worker) % worker->run->place_count];
    uint32_t done = 0;
    for (int r = 0; done < all.pages; all.segment = (all.segment + 1) % geometry->segment_count, all.page = 1) {
        struct place place = all;
        place.pages = (uint32_t)min_u64(all.pages - done, geometry->segment_pages - all.page);
        if (place.pages && (r = place_io(worker, false, &place, done)) < 0)
            return r;
        done += place.pages;
    }
    return 0;
}

/* Where the blocks lie. One in pieces is taken as if it went on in the next segment: that is as much to read. */
static int places_find(struct run *run) {
    const struct kvfs_measure *measure = run->measure;
    struct shards *shards = calloc(1, sizeof(*shards));
    run->places = calloc(measure->count + 1, sizeof(*run->places));
    int r = shards && run->places ? 0 : -ENOMEM;
    for (uint64_t i = 0; i < measure->count && r == 0; i++) {
        char name[NAME_SIZE];
        uint32_t size = name_of(measure, measure->first + i, name);
        struct kvfs_record record;
        int found = key_find(measure->client, run->connection, shards, KVFS_PATHS, (const uint8_t *)name, size, &record);
        if (found == 0 && record.size == measure->block_size && !(record.flags & KVFS_INODE_FOREIGN))
            run->places[run->place_count++] =
                (struct place){record.segment, record.page + record.header_pages, (uint32_t)(measure->block_size / PAGE)};
        else if (found < 0 && found != -ENOENT)
            r = found;
    }
    free(shards);
    return r == 0 && run->place_count == 0 ? -ENOENT : r;
}

/* ---- raw: writes of a pool, to places that its daemon lends ---- */

static int lent_ask(struct worker *worker, uint32_t count, uint8_t **reply, uint32_t *reply_size) {
    const struct kvfs_measure *measure = worker->run->measure;
    struct names_request request;
    struct message_buffer out = {0};
    names_begin(&request, WIRE_TABLE);
    for (uint32_t i = 0; i < count; i++) {
        char name[NAME_SIZE];
        struct key_file file;
        key_file(KVFS_PATHS, name, name_of(measure, measure->first + worker->index * LENT_MAX + i, name), &file);
        int directory = names_directory(&request, &file);
        assert(directory >= 0);
        struct wire_reserve item = {.size = measure->block_size, .name_size = file.path_size - file.name_at, .directory = (uint32_t)directory};
        message_append(&request.items, &item, sizeof(item));
        message_append(&request.items, file.path + file.name_at, item.name_size);
    }
    names_end(&request, measure->client, count, &out);
    return message_ask(measure->client, worker->run->connection, WIRE_RESERVE, &out, reply, reply_size);
}

/* The next item of a reply. Returns its size; 0: it makes no sense. */
static uint64_t lent_take(struct worker *worker, const uint8_t *at, uint64_t left) {
    struct lent *lent = worker->lent;
    struct wire_reserved item;
    if (left < sizeof(item))
        return 0;
    memcpy(&item, at, sizeof(item));
    if (item.error < 0)
        return sizeof(item);
    uint64_t size = sizeof(item) + item.run_count * sizeof(struct wire_run) + round_up(item.record_size, 8) + round_up(item.ancestors_size, 8),
             pages = 0;
    if (item.run_count == 0 || size > left)
        return 0;
    uint32_t end = lent->ends[lent->count];
    for (uint32_t i = 0; i < item.run_count && end < RUNS_MAX; i++) {
        struct wire_run run;
        memcpy(&run, at + sizeof(item) + i * sizeof(run), sizeof(run));
        lent->runs[end++] = (struct place){run.segment, run.page, run.page_count};
        pages += run.page_count;
    }
    /* One that has more runs than there is room for is not written to. */
    if (end - lent->ends[lent->count] == item.run_count && pages > 0 && pages * PAGE <= worker->run->measure->block_size + SPARE_BYTES)
        lent->ends[++lent->count] = end;
    lent->commits[lent->lent_count++] = (struct wire_commit){item.reservation, -ECANCELED};
    return size;
}

/* Give them back, so that nothing is entered. All writes have ended: it is as if none had begun, and nothing has to rest for them. */
static int lent_give(struct worker *worker) {
    struct lent *lent = worker->lent;
    uint8_t request[sizeof(uint64_t) + sizeof(lent->commits)], *reply = NULL;
    uint32_t reply_size = 0, size = (uint32_t)(lent->lent_count * sizeof(struct wire_commit));
    if (!lent->lent_count)
        return 0;
    for (uint32_t i = 0; i < lent->lent_count && worker->has_failed; i++)
        lent->commits[i].error = worker->memory_is_owed ? -ETIMEDOUT : -EIO; /* some may still land */
    memcpy(request, &lent->lent_count, sizeof(uint64_t));
    memcpy(request + sizeof(uint64_t), lent->commits, size);
    lent->lent_count = lent->count = lent->next = 0;
    const struct run *run = worker->run;
    int r = wire_ask(run->measure->client, run->connection, WIRE_COMMIT, request, (uint32_t)sizeof(uint64_t) + size,
                     run->measure->client->options.timeout_ms, &reply, &reply_size);
    free(reply);
    return r;
}

/* In time, before the daemon takes them back. */
static int lent_refresh(struct worker *worker) {
    struct lent *lent = worker->lent;
    const struct run *run = worker->run;
    if (lent->count && now_ns() - lent->since_ns < run->connection->reservation_ms * UINT64_C(1000000) / 4)
        return 0;
    uint64_t share = run->measure->count / run->measure->threads;
    uint32_t count = share < 1 ? 1 : (uint32_t)min_u64(share, LENT_MAX), reply_size = 0;
    uint8_t *reply = NULL;
    int r = lent_give(worker);
    if (r == 0) {
        lent->since_ns = now_ns();
        r = lent_ask(worker, count, &reply, &reply_size);
    }
    uint64_t at = 0;
    for (uint32_t i = 0; i < count && r == 0; i++) {
        uint64_t size = lent_take(worker, reply + at, reply_size - at);
        r = size ? 0 : -EPROTO;
        at += size;
    }
    free(reply);
    return r == 0 && lent->count == 0 ? -ENOSPC : r;
}

static int lent_begin(struct worker *worker) {
    worker->lent = calloc(1, sizeof(*worker->lent));
    int r = worker->lent ? lane_begin(worker) : -ENOMEM;
    return r == 0 ? lent_refresh(worker) : r;
}

static void lent_end(struct worker *worker) {
    if (worker->lent)
        lent_give(worker);
    free(worker->lent);
    lane_end(worker);
}

static int pool_write(struct worker *worker, uint64_t block, uint32_t count) {
    (void)block, (void)count;
    struct lent *lent = worker->lent;
    uint32_t place = lent->next++ % lent->count, at = 0;
    int r = 0;
    for (uint32_t i = lent->ends[place]; i < lent->ends[place + 1] && r == 0; at += lent->runs[i++].pages)
        r = place_io(worker, true, &lent->runs[i], at);
    return r;
}

/* ---- libkvfs ---- */

/* One call for keys of [block, block + count): -errno of the call, or of the first block that has one. */
static int call(struct worker *worker, uint64_t block, uint32_t count) {
    struct kvfs_measure *measure = worker->run->measure;
    char names[KVFS_MEASURE_BATCH_MAX * NAME_SIZE];
    uint32_t sizes[KVFS_MEASURE_BATCH_MAX], at = 0;
    struct kvfs_buffer buffers[KVFS_MEASURE_BATCH_MAX];
    int64_t results[KVFS_MEASURE_BATCH_MAX] = {0};
    uint8_t found = 1;
    for (uint32_t i = 0; i < count; at += sizes[i++]) {
        sizes[i] = name_of(measure, block + i, names + at);
        buffers[i] = (struct kvfs_buffer){worker->memory, measure->block_size};
    }
    struct kvfs_keys keys = {.data = names, .sizes = sizes, .count = count, .kind = KVFS_PATHS};
    int r = measure->kind == KVFS_MEASURE_GET   ? kvfs_get(measure->client, &keys, buffers, results)
            : measure->kind == KVFS_MEASURE_PUT ? kvfs_put(measure->client, &keys, buffers, results)
                                                : kvfs_exists(measure->client, &keys, &found);
    for (uint32_t i = 0; i < count && r >= 0; i++)
        if (results[i] < 0)
            r = (int)results[i];
    return r < 0 ? r : found ? 0 : -ENOENT;
}

/* ---- files ---- */

static int file_read(struct worker *worker, uint64_t block, uint32_t count) {
    (void)count;
    const struct kvfs_measure *measure = worker->run->measure;
    char name[NAME_SIZE];
    name_of(measure, block, name);
    int file = descriptor_above(openat(measure->directory, name, O_RDONLY | O_CLOEXEC | O_DIRECT));
    if (file < 0)
        return -errno;
    int r = transfer(file, worker->memory, measure->block_size, 0, false);
    close(file);
    return r;
}

static int file_store(struct worker *worker, uint64_t block, uint32_t count) {
    (void)count;
    const struct kvfs_measure *measure = worker->run->measure;
    char name[NAME_SIZE], temporary[NAME_SIZE + 8];
    name_of(measure, block, name);
    snprintf(temporary, sizeof(temporary), ".%s.tmp", name);
    int file = descriptor_above(openat(measure->directory, temporary, O_CREAT | O_EXCL | O_WRONLY | O_CLOEXEC | O_DIRECT, 0600));
    if (file < 0)
        return -errno;
    int r = transfer(file, worker->memory, measure->block_size, 0, true);
    if (close(file) && r == 0)
        r = -errno;
    if (r == 0 && renameat(measure->directory, temporary, measure->directory, name))
        r = -errno;
    if (r)
        unlinkat(measure->directory, temporary, 0);
    return r;
}

static int file_lookup(struct worker *worker, uint64_t block, uint32_t count) {
    (void)count;
    const struct kvfs_measure *measure = worker->run->measure;
    char name[NAME_SIZE];
    name_of(measure, block, name);
    return faccessat(measure->directory, name, F_OK, 0) ? -errno : 0;
}

/* ---- threads ---- */

static const struct kind kinds[] = {
    [KVFS_MEASURE_READ] = {.operate = raw_read},
    [KVFS_MEASURE_WRITE] = {.operate = raw_write},
    [KVFS_MEASURE_POOL_READ] = {.begin = lane_begin, .operate = pool_read, .end = lane_end},
    [KVFS_MEASURE_POOL_WRITE] = {.begin = lent_begin, .refresh = lent_refresh, .operate = pool_write, .end = lent_end},
    [KVFS_MEASURE_GET] = {.operate = call},
    [KVFS_MEASURE_PUT] = {.operate = call, .in_order = true},
    [KVFS_MEASURE_EXISTS] = {.operate = call},
    [KVFS_MEASURE_FILE_READ] = {.operate = file_read},
    [KVFS_MEASURE_FILE_STORE] = {.operate = file_store, .in_order = true},
    [KVFS_MEASURE_FILE_LOOKUP] = {.operate = file_lookup},
};

static uint32_t bucket_of(uint64_t ns) {
    if (ns < 8)
        return (uint32_t)ns;
    uint32_t exponent = 63 - (uint32_t)__builtin_clzll(ns);
    return 8 * exponent + (uint32_t)(ns >> (exponent - 3) & 7);
}

static void failed(struct worker *worker, int error) {
    struct run *run = worker->run;
    worker->has_failed = true;
    worker->memory_is_owed = error == -ETIMEDOUT;
    pthread_mutex_lock(&run->lock);
    if (!run->measure->error) {
        run->measure->error = error;
        snprintf(run->measure->reason, sizeof(run->measure->reason), "%s", run->measure->client ? kvfs_error() : "");
    }
    pthread_mutex_unlock(&run->lock);
    __atomic_store_n(&run->ended, 1, __ATOMIC_RELAXED);
}

static bool is_over(struct run *run, uint64_t now) {
    return now >= run->end_ns || __atomic_load_n(&run->measure->stop, __ATOMIC_RELAXED) || __atomic_load_n(&run->ended, __ATOMIC_RELAXED);
}

/* The blocks of the next operation. Returns their number; 0: there are no more. */
static uint32_t blocks_next(struct worker *worker, bool in_order, uint64_t *block) {
    struct run *run = worker->run;
    const struct kvfs_measure *measure = run->measure;
    if (!in_order) {
        *block = measure->first + random_next(worker) % measure->count;
        return 1;
    }
    uint64_t at = __atomic_fetch_add(&run->next, measure->batch, __ATOMIC_RELAXED);
    *block = measure->first + at;
    return at >= measure->count ? 0 : (uint32_t)min_u64(measure->batch, measure->count - at);
}

static void work(struct worker *worker, const struct kind *kind) {
    struct run *run = worker->run;
    bool in_order = kind->in_order || run->measure->once;
    for (uint64_t now = now_ns(), block; !is_over(run, now);) {
        uint32_t count = blocks_next(worker, in_order, &block);
        int r = count && kind->refresh ? kind->refresh(worker) : 0;
        if (!count)
            return;
        uint64_t before = now_ns();
        if (r == 0)
            r = kind->operate(worker, block, count);
        now = now_ns();
        if (r < 0 && r != -ENOENT) {
            failed(worker, r);
            return;
        }
        worker->histogram[bucket_of(now - before)]++;
        worker->blocks += r == 0 ? count : 0;
        worker->misses += r == 0 ? 0 : count;
    }
}

static uint64_t cpu_ns(void) {
    struct timespec time;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return (uint64_t)time.tv_sec * 1000000000u + (uint64_t)time.tv_nsec;
}

static void *worker_thread(void *argument) {
    struct worker *worker = argument;
    struct run *run = worker->run;
    struct kvfs_measure *measure = run->measure;
    const struct kind *kind = &kinds[measure->kind];
    int r = kind->begin ? kind->begin(worker) : 0;
    if (r < 0)
        failed(worker, r);
    pthread_mutex_lock(&run->lock);
    run->ready++;
    pthread_cond_broadcast(&run->changed);
    while (!run->end_ns)
        pthread_cond_wait(&run->changed, &run->lock);
    pthread_mutex_unlock(&run->lock);
    uint64_t cpu = cpu_ns();
    work(worker, kind);
    cpu = cpu_ns() - cpu;
    uint64_t end = now_ns();
    pthread_mutex_lock(&run->lock);
    measure->busiest_ns = cpu > measure->busiest_ns ? cpu : measure->busiest_ns;
    measure->blocks += worker->blocks;
    measure->misses += worker->misses;
    uint64_t elapsed = end + measure->duration_ns - run->end_ns;
    measure->elapsed_ns = elapsed > measure->elapsed_ns ? elapsed : measure->elapsed_ns;
    for (uint32_t i = 0; i < KVFS_MEASURE_BUCKETS; i++)
        measure->histogram[i] += worker->histogram[i];
    pthread_mutex_unlock(&run->lock);
    if (kind->end)
        kind->end(worker);
    return NULL;
}

/* Its memory is there before anything is timed, and noise: what is written cannot be compressed. */
static int worker_create(struct worker *worker, struct run *run, uint32_t index, const struct worker *first) {
    uint64_t size = run->measure->block_size + SPARE_BYTES;
    *worker = (struct worker){.run = run, .index = index, .seed = ((uint64_t)index << 48) ^ now_ns()};
    void *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED)
        return -ENOMEM;
    madvise(memory, size, MADV_HUGEPAGE);
    worker->memory = memory;
    if (index)
        memcpy(memory, first->memory, size);
    for (uint64_t at = 0; at < size && !index; at += sizeof(uint64_t)) {
        uint64_t x = random_next(worker);
        memcpy(worker->memory + at, &x, sizeof(x));
    }
    return 0;
}

/* All begin together, once each has what it needs. */
static int run_threads(struct run *run, struct worker *workers) {
    struct kvfs_measure *measure = run->measure;
    uint32_t started = 0;
    int r = 0;
    for (; started < measure->threads && r == 0; started += r == 0)
        r = -pthread_create(&workers[started].thread, NULL, worker_thread, &workers[started]);
    if (r < 0)
        __atomic_store_n(&run->ended, 1, __ATOMIC_RELAXED);
    pthread_mutex_lock(&run->lock);
    while (run->ready < started)
        pthread_cond_wait(&run->changed, &run->lock);
    run->end_ns = now_ns() + measure->duration_ns;
    pthread_cond_broadcast(&run->changed);
    pthread_mutex_unlock(&run->lock);
    for (uint32_t i = 0; i < started; i++)
        pthread_join(workers[i].thread, NULL);
    return r;
}

int kvfs_measure_run(struct kvfs_measure *measure) {
    assert(measure->kind <= KVFS_MEASURE_FILE_LOOKUP);
    assert(measure->threads > 0 && measure->threads <= KVFS_MEASURE_THREADS_MAX);
    assert(measure->batch > 0 && measure->batch <= KVFS_MEASURE_BATCH_MAX);
    assert(measure->block_size > 0 && measure->block_size % PAGE == 0);
    assert(measure->count > 0 && measure->duration_ns > 0);
    bool of_client = measure->kind >= KVFS_MEASURE_POOL_READ && measure->kind <= KVFS_MEASURE_EXISTS;
    assert(of_client == (measure->client != NULL));
    assert((measure->kind <= KVFS_MEASURE_WRITE) == (measure->file_count > 0));
    struct run run = {.measure = measure, .lock = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER};
    struct worker *workers = calloc(measure->threads, sizeof(*workers));
    bool raw_of_pool = measure->kind == KVFS_MEASURE_POOL_READ || measure->kind == KVFS_MEASURE_POOL_WRITE;
    int r = workers ? 0 : -ENOMEM;
    if (r == 0 && raw_of_pool)
        r = measure->kind == KVFS_MEASURE_POOL_WRITE ? writer_get(measure->client, NULL, &run.connection)
                                                     : connection_get(measure->client, &run.connection);
    if (r == 0 && measure->kind == KVFS_MEASURE_POOL_READ)
        r = places_find(&run);
    for (uint32_t i = 0; i < measure->threads && r == 0; i++)
        r = worker_create(&workers[i], &run, i, workers);
    if (r == 0)
        r = run_threads(&run, workers);
    for (uint32_t i = 0; workers && i < measure->threads; i++)
        if (workers[i].memory && !workers[i].memory_is_owed)
            munmap(workers[i].memory, measure->block_size + SPARE_BYTES);
    if (run.connection)
        connection_put(run.connection);
    free(run.places);
    free(workers);
    return r;
}
