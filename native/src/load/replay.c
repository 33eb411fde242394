/* kvfs_replay.h. A replay's `threads` threads serve requests; on a directory they hand blocks to two pools of I/O threads, as engines do.
 * One pool loads, one stores. A client has its own depth and needs no pools.
 */
#include "base/descriptor.h"
#include "base/base.h"
#include "client/transfer.h"
#include "kvfs_replay.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define KEY_SIZE 16u
#define NAME_SIZE 96u
#define NONE UINT32_MAX
#define STOP_CHECK_NS 50000000u

struct serving;

/* Blocks of one request that I/O threads work on together. Its fields but the first are the pool's lock's. */
struct batch {
    struct serving *serving;
    const uint32_t *blocks;
    uint8_t *done; /* by each operation: whether the block was loaded; whether it is there now */
    uint32_t count, next, left;
    struct batch *after;
    pthread_cond_t ended;
};

struct run;

struct pool {
    struct run *run;
    bool (*operation)(struct serving *serving, uint32_t block, unsigned char *data);
    unsigned char *(*memory)(struct serving *serving);
    pthread_mutex_t lock;
    pthread_cond_t changed;
    struct batch *first, *last;
    bool closing;
};

enum lru_state { LRU_ABSENT, LRU_BEING_WRITTEN, LRU_THERE };

/* The list that an engine keeps of its own files: by last use, over the indexes of blocks. */
struct lru {
    pthread_mutex_t lock;
    uint32_t *newer, *older; /* ends have NONE */
    uint8_t *state;          /* enum lru_state */
    uint32_t newest, oldest;
    uint64_t count;
};

struct run {
    struct kvfs_replay *replay;
    uint64_t start_ns, next;
    unsigned char *content; /* of a block, but for its stamps */
    struct pool loads, stores;
    struct lru lru;
};

/* A thread that serves one request after the other. */
struct serving {
    struct run *run;
    pthread_t thread;
    struct kvfs_replay_record *record;
    unsigned char *load_memory, *store_memory; /* window blocks each; the second holds content */
    uint8_t *flags, *done;                     /* a block of the request each */
    uint8_t *keys, *parent_keys;
    uint32_t *key_sizes, *parent_sizes, *chosen, *parents; /* parents: of the chosen blocks; NONE: it is the request's first */
    struct kvfs_buffer *buffers;
    struct kvfs_vector *vectors;
    int64_t *results;
};

static void add(uint32_t *counter) { __atomic_fetch_add(counter, 1, __ATOMIC_RELAXED); }

static void count_error(uint64_t *errors, int error) {
    __atomic_fetch_add(&errors[error > 0 && error < KVFS_REPLAY_ERRNO_COUNT ? error : 0], 1, __ATOMIC_RELAXED);
}

/* ---- names and content ---- */

/* Big-endian: a mix of the hash, so that ids that count up spread over the directories, and the hash. */
static void key_of(uint64_t hash, uint8_t *out) {
    uint64_t parts[2] = {__builtin_bswap64(hash * 0x9e3779b97f4a7c15u), __builtin_bswap64(hash)};
    memcpy(out, parts, KEY_SIZE);
}

static void name_of(uint64_t hash, char *out) {
    uint64_t mixed = hash * 0x9e3779b97f4a7c15u;
    snprintf(out, NAME_SIZE, "%02x/%016" PRIx64 "%016" PRIx64, (unsigned)(mixed >> 56), mixed, hash);
}

/* splitmix64: incompressible, and the same in every run. */
static void content_make(unsigned char *out, uint64_t size) {
    uint64_t state = 1;
    for (uint64_t i = 0; i < size / 8; i++) {
        uint64_t x = state += 0x9e3779b97f4a7c15u;
        x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
        x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
        x ^= x >> 31;
        memcpy(out + 8 * i, &x, 8);
    }
}

static void stamp(unsigned char *data, uint64_t size, uint64_t hash) {
    for (uint64_t offset = 0; offset < size; offset += PAGE) {
        uint64_t both[2] = {hash, offset};
        memcpy(data + offset, both, sizeof(both));
    }
}

static bool right(const struct run *run, const unsigned char *data, uint64_t hash) {
    uint64_t size = run->replay->block_size;
    bool whole = run->replay->flags & KVFS_REPLAY_VERIFY;
    for (uint64_t offset = 0; offset < size; offset += whole || size == PAGE ? PAGE : size - PAGE) {
        uint64_t both[2] = {hash, offset};
        if (memcmp(data + offset, both, sizeof(both)))
            return false;
        if (whole && memcmp(data + offset + sizeof(both), run->content + offset + sizeof(both), PAGE - sizeof(both)))
            return false;
    }
    return true;
}

/* ---- the engine's own index ---- */

static void lru_unlink(struct lru *lru, uint32_t block) {
    uint32_t newer = lru->newer[block], older = lru->older[block];
    *(newer == NONE ? &lru->newest : &lru->older[newer]) = older;
    *(older == NONE ? &lru->oldest : &lru->newer[older]) = newer;
    lru->state[block] = LRU_ABSENT;
    lru->count--;
}

static void lru_push(struct lru *lru, uint32_t block, enum lru_state state) {
    lru->newer[block] = NONE;
    lru->older[block] = lru->newest;
    *(lru->newest == NONE ? &lru->oldest : &lru->newer[lru->newest]) = block;
    lru->newest = block;
    lru->state[block] = state;
    lru->count++;
}

/* True: the index has the block, which becomes the most recent one. */
static bool lru_has(struct run *run, uint32_t block) {
    pthread_mutex_lock(&run->lru.lock);
    bool there = run->lru.state[block] == LRU_THERE;
    if (there) {
        lru_unlink(&run->lru, block);
        lru_push(&run->lru, block, LRU_THERE);
    }
    pthread_mutex_unlock(&run->lru.lock);
    return there;
}

static void lru_drop(struct run *run, uint32_t block, enum lru_state state) {
    pthread_mutex_lock(&run->lru.lock);
    if (run->lru.state[block] == state)
        lru_unlink(&run->lru, block);
    pthread_mutex_unlock(&run->lru.lock);
}

static void lru_unlink_oldest(struct run *run) {
    char name[NAME_SIZE];
    name_of(run->replay->hashes[run->lru.oldest], name);
    unlinkat(run->replay->directory, name, 0);
    lru_unlink(&run->lru, run->lru.oldest);
}

/* Enter a block that will be written; false: somebody has, or is at it. The oldest are deleted for it, under the lock, so that a block whose
 * file is being deleted is not written at the same time. */
static bool lru_enter(struct run *run, uint32_t block) {
    pthread_mutex_lock(&run->lru.lock);
    bool absent = run->lru.state[block] == LRU_ABSENT;
    while (absent && run->lru.count >= run->replay->lru_blocks)
        lru_unlink_oldest(run);
    if (absent)
        lru_push(&run->lru, block, LRU_BEING_WRITTEN);
    pthread_mutex_unlock(&run->lru.lock);
    return absent;
}

/* It is written. If it was the oldest meanwhile, its file goes now. */
static void lru_written(struct run *run, uint32_t block, const char *name) {
    pthread_mutex_lock(&run->lru.lock);
    if (run->lru.state[block] == LRU_BEING_WRITTEN)
        run->lru.state[block] = LRU_THERE;
    else
        unlinkat(run->replay->directory, name, 0);
    pthread_mutex_unlock(&run->lru.lock);
}

static int lru_create(struct run *run) {
    struct lru *lru = &run->lru;
    uint64_t count = run->replay->hash_count;
    lru->newest = lru->oldest = NONE;
    pthread_mutex_init(&lru->lock, NULL);
    if (!run->replay->lru_blocks)
        return 0;
    lru->newer = malloc(count * sizeof(*lru->newer));
    lru->older = malloc(count * sizeof(*lru->older));
    lru->state = calloc(count, sizeof(*lru->state));
    if (!lru->newer || !lru->older || !lru->state)
        return -ENOMEM;
    for (uint64_t i = 0; i < run->replay->resident_count; i++)
        lru_push(lru, run->replay->resident[i], LRU_THERE);
    while (lru->count > run->replay->lru_blocks)
        lru_unlink_oldest(run);
    return 0;
}

static void lru_destroy(struct run *run) {
    pthread_mutex_destroy(&run->lru.lock);
    free(run->lru.newer);
    free(run->lru.older);
    free(run->lru.state);
}

/* ---- files ---- */

static bool file_exists(struct run *run, uint32_t block) {
    char name[NAME_SIZE];
    if (run->replay->lru_blocks)
        return lru_has(run, block);
    name_of(run->replay->hashes[block], name);
    return !faccessat(run->replay->directory, name, F_OK, 0);
}

static void loaded_badly(struct serving *serving, uint32_t block, int error) {
    struct run *run = serving->run;
    if (error == ENOENT) {
        add(&serving->record->lost);
        if (run->replay->lru_blocks)
            lru_drop(run, block, LRU_THERE);
    } else {
        add(&serving->record->failed);
        count_error(run->replay->load_errors, error);
    }
}

static bool file_load(struct serving *serving, uint32_t block, unsigned char *data) {
    struct run *run = serving->run;
    struct kvfs_replay *replay = run->replay;
    char name[NAME_SIZE];
    name_of(replay->hashes[block], name);
    int file = descriptor_above(openat(replay->directory, name, O_RDONLY | O_CLOEXEC | (replay->flags & KVFS_REPLAY_BUFFERED ? 0 : O_DIRECT)));
    int result = file < 0 ? -errno : transfer(file, data, replay->block_size, 0, false);
    if (!result && replay->flags & KVFS_REPLAY_TOUCH) {
        const struct timespec times[2] = {{.tv_nsec = UTIME_NOW}, {.tv_nsec = UTIME_OMIT}};
        futimens(file, times); /* a hint, as engines treat it */
    }
    if (file >= 0)
        close(file);
    if (result)
        loaded_badly(serving, block, -result);
    else if (!right(run, data, replay->hashes[block]))
        add(&serving->record->wrong);
    else
        return true;
    return false;
}

static int file_write(struct run *run, uint64_t hash, const char *name, unsigned char *data) {
    struct kvfs_replay *replay = run->replay;
    static uint64_t written;
    char temporary[NAME_SIZE], directory[3] = {name[0], name[1], 0};
    snprintf(temporary, sizeof(temporary), "%s/.%016" PRIx64 ".%d.%" PRIu64 ".tmp", directory, hash, (int)getpid(),
             __atomic_fetch_add(&written, 1, __ATOMIC_RELAXED));
    int flags = O_CREAT | O_EXCL | O_WRONLY | O_CLOEXEC | (replay->flags & KVFS_REPLAY_BUFFERED ? 0 : O_DIRECT);
    int file = descriptor_above(openat(replay->directory, temporary, flags, 0644));
    if (file < 0 && errno == ENOENT) {
        if (mkdirat(replay->directory, directory, 0755) && errno != EEXIST)
            return -errno;
        file = descriptor_above(openat(replay->directory, temporary, flags, 0644));
    }
    if (file < 0)
        return -errno;
    int result = transfer(file, data, replay->block_size, 0, true);
    if (close(file) && !result)
        result = -errno;
    if (!result && renameat(replay->directory, temporary, replay->directory, name))
        result = -errno;
    if (result)
        unlinkat(replay->directory, temporary, 0);
    return result;
}

static bool file_store(struct serving *serving, uint32_t block, unsigned char *data) {
    struct run *run = serving->run;
    uint64_t hash = run->replay->hashes[block];
    char name[NAME_SIZE];
    name_of(hash, name);
    bool present = run->replay->lru_blocks ? !lru_enter(run, block) : !faccessat(run->replay->directory, name, F_OK, 0);
    if (present) {
        add(&serving->record->present);
        return true;
    }
    stamp(data, run->replay->block_size, hash);
    int result = file_write(run, hash, name, data);
    if (!result) {
        if (run->replay->lru_blocks)
            lru_written(run, block, name);
        add(&serving->record->stored);
        return true;
    }
    if (run->replay->lru_blocks)
        lru_drop(run, block, LRU_BEING_WRITTEN);
    add(&serving->record->failed);
    count_error(run->replay->store_errors, -result);
    return false;
}

/* ---- the pools of I/O threads ---- */

static unsigned char *load_memory(struct serving *serving) { return serving->load_memory; }
static unsigned char *store_memory(struct serving *serving) { return serving->store_memory; }

static void *pool_thread(void *argument) {
    struct pool *pool = argument;
    pthread_mutex_lock(&pool->lock);
    for (;;) {
        while (!pool->first && !pool->closing)
            pthread_cond_wait(&pool->changed, &pool->lock);
        struct batch *batch = pool->first;
        if (!batch)
            break;
        uint32_t index = batch->next++;
        if (batch->next == batch->count)
            pool->first = batch->after;
        pthread_mutex_unlock(&pool->lock);
        unsigned char *data = pool->memory(batch->serving) + index * pool->run->replay->block_size;
        batch->done[index] = pool->operation(batch->serving, batch->blocks[index], data);
        pthread_mutex_lock(&pool->lock);
        if (!--batch->left)
            pthread_cond_signal(&batch->ended);
    }
    pthread_mutex_unlock(&pool->lock);
    return NULL;
}

/* One operation a block, at most `window` of them; returns when all have ended. */
static void pool_run(struct pool *pool, struct serving *serving, const uint32_t *blocks, uint32_t count, uint8_t *done) {
    struct batch batch = {.serving = serving, .blocks = blocks, .done = done, .count = count, .left = count};
    pthread_cond_init(&batch.ended, NULL);
    pthread_mutex_lock(&pool->lock);
    if (pool->first)
        pool->last->after = &batch;
    else
        pool->first = &batch;
    pool->last = &batch;
    if (count > 1)
        pthread_cond_broadcast(&pool->changed);
    else
        pthread_cond_signal(&pool->changed);
    while (batch.left)
        pthread_cond_wait(&batch.ended, &pool->lock);
    pthread_mutex_unlock(&pool->lock);
    pthread_cond_destroy(&batch.ended);
}

/* ---- a client ---- */

static struct kvfs_keys keys_set(struct serving *serving, const uint32_t *blocks, uint32_t count, unsigned char *memory) {
    struct kvfs_replay *replay = serving->run->replay;
    for (uint32_t i = 0; i < count; i++) {
        key_of(replay->hashes[blocks[i]], serving->keys + (uint64_t)i * KEY_SIZE);
        serving->key_sizes[i] = KEY_SIZE;
        if (memory)
            serving->buffers[i] = (struct kvfs_buffer){memory + i * replay->block_size, replay->block_size};
    }
    return (struct kvfs_keys){.data = serving->keys, .sizes = serving->key_sizes, .count = count};
}

static void client_exists(struct serving *serving, const uint32_t *blocks, uint32_t count, uint8_t *found) {
    struct kvfs_keys keys = keys_set(serving, blocks, count, NULL);
    int result = kvfs_exists(serving->run->replay->client, &keys, found);
    if (result < 0) {
        memset(found, 0, count);
        add(&serving->record->failed);
        count_error(serving->run->replay->load_errors, -result);
    }
}

static void client_load(struct serving *serving, const uint32_t *blocks, uint32_t count, uint8_t *done) {
    struct run *run = serving->run;
    struct kvfs_keys keys = keys_set(serving, blocks, count, serving->load_memory);
    int result = kvfs_get(run->replay->client, &keys, serving->buffers, serving->results);
    for (uint32_t i = 0; i < count; i++) {
        int64_t size = result < 0 ? result : serving->results[i];
        done[i] = false;
        if (size < 0)
            loaded_badly(serving, blocks[i], (int)-size);
        else if (size != (int64_t)run->replay->block_size)
            loaded_badly(serving, blocks[i], EIO);
        else if (!right(run, serving->load_memory + i * run->replay->block_size, run->replay->hashes[blocks[i]]))
            add(&serving->record->wrong);
        else
            done[i] = true;
    }
}

/* The chosen blocks, as kvfs's connectors store: if absent, and with parents. */
static void client_store(struct serving *serving, uint32_t count) {
    struct kvfs_replay *replay = serving->run->replay;
    struct kvfs_keys keys = keys_set(serving, serving->chosen, count, serving->store_memory);
    struct kvfs_keys parents = {.data = serving->parent_keys, .sizes = serving->parent_sizes, .count = count};
    uint8_t *key = serving->parent_keys; /* of the next that has one: keys lie without gaps */
    for (uint32_t i = 0; i < count; i++) {
        stamp(serving->store_memory + i * replay->block_size, replay->block_size, replay->hashes[serving->chosen[i]]);
        serving->vectors[i] = (struct kvfs_vector){.pieces = serving->buffers + i, .count = 1};
        serving->parent_sizes[i] = serving->parents[i] == NONE ? 0 : KEY_SIZE;
        if (serving->parents[i] != NONE)
            key_of(replay->hashes[serving->parents[i]], key);
        key += serving->parent_sizes[i];
    }
    const struct kvfs_put_options options = {.size = sizeof(options), .flags = KVFS_IF_ABSENT, .parents = &parents};
    int result = kvfs_put_vectors(replay->client, &keys, serving->vectors, &options, serving->results);
    for (uint32_t i = 0; i < count; i++) {
        int64_t error = result < 0 ? result : serving->results[i];
        struct kvfs_replay_record *record = serving->record;
        add(!error ? &record->stored : error == -EEXIST ? &record->present : &record->failed);
        if (error && error != -EEXIST)
            count_error(replay->store_errors, (int)-error);
    }
}

/* ---- requests ---- */

/* flags[i]: whether a block is there, as far as it was asked. A client is asked for all of them at once. */
static uint32_t look_up(struct serving *serving, const uint32_t *blocks, uint32_t count) {
    struct run *run = serving->run;
    uint32_t found = 0;
    memset(serving->flags, 0, count);
    if (run->replay->client)
        client_exists(serving, blocks, count, serving->flags);
    else
        while (found < count && (serving->flags[found] = file_exists(run, blocks[found])))
            found++;
    for (found = 0; found < count && serving->flags[found];)
        found++;
    return found;
}

static uint32_t smaller(uint32_t a, uint32_t b) { return a < b ? a : b; }

static void load(struct serving *serving, const uint32_t *blocks, uint32_t count) {
    struct run *run = serving->run;
    uint32_t n;
    for (uint32_t at = 0; at < count; at += n) {
        n = smaller(count - at, run->replay->window);
        if (run->replay->client)
            client_load(serving, blocks + at, n, serving->flags + at);
        else
            pool_run(&run->loads, serving, blocks + at, n, serving->flags + at);
    }
}

/* The blocks from `at` on that are missing as far as this process knows. Those that others stored meanwhile are not stored again, as engines do. */
static void store(struct serving *serving, const uint32_t *blocks, uint32_t at, uint32_t count) {
    struct run *run = serving->run;
    while (at < count) {
        uint32_t n = 0;
        for (; at < count && n < run->replay->window; at++) {
            if (serving->flags[at]) {
                add(&serving->record->present);
                continue;
            }
            serving->parents[n] = at ? blocks[at - 1] : NONE;
            serving->chosen[n++] = blocks[at];
        }
        if (!n)
            break;
        if (run->replay->client)
            client_store(serving, n);
        else
            pool_run(&run->stores, serving, serving->chosen, n, serving->done);
    }
}

static void serve(struct serving *serving, const struct kvfs_replay_request *request) {
    struct run *run = serving->run;
    struct kvfs_replay_record *record = serving->record;
    const uint32_t *blocks = run->replay->blocks + request->first;
    uint64_t before = now_ns(), after;
    record->start_ns = before - run->start_ns;
    record->found = look_up(serving, blocks, request->count);
    after = now_ns();
    record->lookup_ns = after - before;
    before = after;
    load(serving, blocks, record->found);
    /* Blocks behind one that could not be loaded are of no use to this request: they are computed again. */
    while (record->loaded < record->found && serving->flags[record->loaded])
        record->loaded++;
    after = now_ns();
    record->load_ns = after - before;
    before = after;
    store(serving, blocks, record->loaded, request->count);
    after = now_ns();
    record->store_ns = after - before;
    record->end_ns = after - run->start_ns;
    __atomic_fetch_add(&run->replay->done, 1, __ATOMIC_RELEASE);
}

static bool stopped(const struct run *run) { return __atomic_load_n(&run->replay->stop, __ATOMIC_RELAXED); }

/* Returns whether the request may begin. */
static bool wait_due(const struct run *run, uint64_t due_ns) {
    for (uint64_t now; !stopped(run);) {
        now = now_ns() - run->start_ns;
        if (now >= due_ns)
            return true;
        uint64_t left = due_ns - now < STOP_CHECK_NS ? due_ns - now : STOP_CHECK_NS;
        struct timespec time = {.tv_nsec = (long)left};
        nanosleep(&time, NULL);
    }
    return false;
}

static void *serving_thread(void *argument) {
    struct serving *serving = argument;
    struct run *run = serving->run;
    for (;;) {
        uint64_t index = __atomic_fetch_add(&run->next, 1, __ATOMIC_RELAXED);
        if (index >= run->replay->request_count || !wait_due(run, run->replay->requests[index].due_ns))
            return NULL;
        serving->record = &run->replay->records[index];
        serve(serving, &run->replay->requests[index]);
    }
}

/* ---- life ---- */

static unsigned char *memory_map(uint64_t size) {
    unsigned char *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED)
        return NULL;
    madvise(memory, size, MADV_HUGEPAGE);
    return memory;
}

static int serving_create(struct serving *serving, struct run *run, uint32_t most) {
    const struct kvfs_replay *replay = run->replay;
    uint64_t size = replay->window * replay->block_size;
    *serving = (struct serving){
        .run = run,
        .load_memory = memory_map(size),
        .store_memory = memory_map(size),
        .flags = calloc(most, 1),
        .done = calloc(most, 1),
        .keys = calloc(most, KEY_SIZE),
        .parent_keys = calloc(most, KEY_SIZE),
        .key_sizes = calloc(most, sizeof(uint32_t)),
        .parent_sizes = calloc(most, sizeof(uint32_t)),
        .chosen = calloc(most, sizeof(uint32_t)),
        .parents = calloc(most, sizeof(uint32_t)),
        .buffers = calloc(most, sizeof(struct kvfs_buffer)),
        .vectors = calloc(most, sizeof(struct kvfs_vector)),
        .results = calloc(most, sizeof(int64_t)),
    };
    if (!serving->load_memory || !serving->store_memory || !serving->flags || !serving->done || !serving->keys || !serving->parent_keys ||
        !serving->key_sizes || !serving->parent_sizes || !serving->chosen || !serving->parents || !serving->buffers || !serving->vectors ||
        !serving->results)
        return -ENOMEM;
    memset(serving->load_memory, 0, size); /* faults are not the replay's */
    for (uint32_t i = 0; i < replay->window; i++)
        memcpy(serving->store_memory + i * replay->block_size, run->content, replay->block_size);
    return 0;
}

static void serving_destroy(struct serving *serving) {
    uint64_t size = serving->run ? serving->run->replay->window * serving->run->replay->block_size : 0;
    if (serving->load_memory)
        munmap(serving->load_memory, size);
    if (serving->store_memory)
        munmap(serving->store_memory, size);
    free(serving->flags);
    free(serving->done);
    free(serving->keys);
    free(serving->parent_keys);
    free(serving->key_sizes);
    free(serving->parent_sizes);
    free(serving->chosen);
    free(serving->parents);
    free(serving->buffers);
    free(serving->vectors);
    free(serving->results);
}

static void pool_create(struct pool *pool, struct run *run, bool (*operation)(struct serving *, uint32_t, unsigned char *),
                        unsigned char *(*memory)(struct serving *)) {
    *pool = (struct pool){.run = run, .operation = operation, .memory = memory};
    pthread_mutex_init(&pool->lock, NULL);
    pthread_cond_init(&pool->changed, NULL);
}

static void pool_close(struct pool *pool) {
    pthread_mutex_lock(&pool->lock);
    pool->closing = true;
    pthread_cond_broadcast(&pool->changed);
    pthread_mutex_unlock(&pool->lock);
}

int kvfs_replay_run(struct kvfs_replay *replay) {
    assert(replay->threads > 0 && replay->io_threads > 0 && replay->window > 0);
    assert(replay->block_size > 0 && replay->block_size % PAGE == 0);
    assert((replay->directory >= 0) == !replay->client);
    struct run run = {.replay = replay};
    uint32_t most = replay->window, serving_count = 0, pool_count = 0;
    for (uint64_t i = 0; i < replay->request_count; i++)
        most = replay->requests[i].count > most ? replay->requests[i].count : most;
    pool_create(&run.loads, &run, file_load, load_memory);
    pool_create(&run.stores, &run, file_store, store_memory);
    int result = lru_create(&run);
    struct serving *servings = calloc(replay->threads, sizeof(*servings));
    pthread_t *threads = calloc(2 * (uint64_t)replay->io_threads, sizeof(*threads));
    run.content = memory_map(replay->block_size);
    if (!servings || !threads || !run.content)
        result = -ENOMEM;
    if (result)
        goto out;
    content_make(run.content, replay->block_size);
    for (uint32_t i = 0; i < replay->threads && !result; i++)
        result = serving_create(&servings[i], &run, most);
    for (; !replay->client && pool_count < 2 * replay->io_threads && !result; pool_count += !result)
        result = -pthread_create(&threads[pool_count], NULL, pool_thread, pool_count % 2 ? &run.stores : &run.loads);
    run.start_ns = now_ns();
    for (; serving_count < replay->threads && !result; serving_count += !result)
        result = -pthread_create(&servings[serving_count].thread, NULL, serving_thread, &servings[serving_count]);
    if (result)
        __atomic_store_n(&replay->stop, 1, __ATOMIC_RELAXED);
    for (uint32_t i = 0; i < serving_count; i++)
        pthread_join(servings[i].thread, NULL);
    pool_close(&run.loads);
    pool_close(&run.stores);
    for (uint32_t i = 0; i < pool_count; i++)
        pthread_join(threads[i], NULL);
out:
    for (uint32_t i = 0; servings && i < replay->threads; i++)
        serving_destroy(&servings[i]);
    if (run.content)
        munmap(run.content, replay->block_size);
    pthread_cond_destroy(&run.loads.changed);
    pthread_cond_destroy(&run.stores.changed);
    pthread_mutex_destroy(&run.loads.lock);
    pthread_mutex_destroy(&run.stores.lock);
    lru_destroy(&run);
    free(servings);
    free(threads);
    return result;
}
