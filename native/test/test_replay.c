/* sources: load/replay.c */
/* kvfs_replay.h on a directory, many threads at once, for the sanitizers: what tests/unit/test_replay.py counts is not counted here again.
 * The client is a double: a set of keys in memory, whose bytes it checks and makes itself. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "kvfs_replay.h"

#define CHECK(condition) ((condition) ? (void)0 : (fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition), exit(1)))
#define REQUESTS 200u
#define BLOCKS 12u
#define BLOCK_SIZE 8192u
#define KEYS 4096u
#define STEP 1000000007u /* between hashes */

struct kvfs_client {
    pthread_mutex_t lock;
    uint64_t hashes[KEYS];
    unsigned char *data[KEYS];
    uint32_t count;
    int failing; /* every put of so many fails */
    uint32_t puts;
};

static uint64_t hash_of(const struct kvfs_keys *keys, uint32_t index) {
    uint64_t parts[2];
    CHECK(keys->sizes[index] == sizeof(parts));
    memcpy(parts, (const unsigned char *)keys->data + index * sizeof(parts), sizeof(parts));
    return __builtin_bswap64(parts[1]);
}

static uint32_t place_of(const struct kvfs_client *client, uint64_t hash) {
    uint32_t place = 0;
    while (place < client->count && client->hashes[place] != hash)
        place++;
    return place;
}

int kvfs_exists(struct kvfs_client *client, const struct kvfs_keys *keys, uint8_t *found) {
    pthread_mutex_lock(&client->lock);
    for (uint32_t i = 0; i < keys->count; i++)
        found[i] = place_of(client, hash_of(keys, i)) < client->count;
    pthread_mutex_unlock(&client->lock);
    return 0;
}

int kvfs_get(struct kvfs_client *client, const struct kvfs_keys *keys, const struct kvfs_buffer *buffers, int64_t *results) {
    pthread_mutex_lock(&client->lock);
    for (uint32_t i = 0; i < keys->count; i++) {
        uint32_t place = place_of(client, hash_of(keys, i));
        CHECK(buffers[i].size == BLOCK_SIZE);
        results[i] = place < client->count ? (int64_t)BLOCK_SIZE : -ENOENT;
        if (place < client->count)
            memcpy(buffers[i].data, client->data[place], BLOCK_SIZE);
    }
    pthread_mutex_unlock(&client->lock);
    return (int)keys->count;
}

/* Each block follows the one before it in the trace, or is the first of its request. */
static void parents_check(const struct kvfs_keys *keys, const struct kvfs_keys *parents) {
    CHECK(parents && parents->count == keys->count);
    uint32_t known = 0; /* keys lie without gaps */
    for (uint32_t i = 0; i < keys->count; i++) {
        uint64_t block = hash_of(keys, i) / STEP;
        if (!parents->sizes[i]) {
            CHECK(block % 4 == 0);
            continue;
        }
        const struct kvfs_keys one = {.data = (const unsigned char *)parents->data + known++ * 16u, .sizes = parents->sizes + i, .count = 1};
        CHECK(hash_of(&one, 0) / STEP == (block + REQUESTS * 2 - 1) % (REQUESTS * 2));
    }
}

int kvfs_put_vectors(struct kvfs_client *client, const struct kvfs_keys *keys, const struct kvfs_vector *vectors,
                     const struct kvfs_put_options *options, int64_t *results) {
    CHECK(options && options->size == sizeof(*options) && options->flags == KVFS_IF_ABSENT);
    parents_check(keys, options->parents);
    pthread_mutex_lock(&client->lock);
    for (uint32_t i = 0; i < keys->count; i++) {
        uint64_t hash = hash_of(keys, i);
        uint32_t place = place_of(client, hash);
        results[i] = client->failing && ++client->puts % client->failing == 0 ? -ENOSPC : place < client->count ? -EEXIST : 0;
        if (results[i])
            continue;
        CHECK(client->count < KEYS && vectors[i].count == 1 && vectors[i].pieces->size == BLOCK_SIZE);
        client->hashes[place] = hash;
        client->data[client->count++] = malloc(BLOCK_SIZE);
        memcpy(client->data[place], vectors[i].pieces->data, BLOCK_SIZE);
    }
    pthread_mutex_unlock(&client->lock);
    return (int)keys->count;
}

static struct kvfs_replay_request requests[REQUESTS];
static struct kvfs_replay_record records[REQUESTS];
static uint32_t blocks[REQUESTS * BLOCKS];
static uint64_t hashes[REQUESTS * 2];

/* Request n has the blocks 2m .. 2m + BLOCKS, m = n or a little less: neighbours share most of theirs. */
static void trace_make(void) {
    for (uint32_t i = 0; i < REQUESTS * 2; i++)
        hashes[i] = (uint64_t)STEP * i;
    for (uint32_t i = 0; i < REQUESTS; i++) {
        requests[i] = (struct kvfs_replay_request){.first = i * BLOCKS, .count = BLOCKS};
        for (uint32_t k = 0; k < BLOCKS; k++)
            blocks[i * BLOCKS + k] = (i / 4 * 4 + k) % (REQUESTS * 2);
    }
}

static struct kvfs_replay replay_make(int directory, struct kvfs_client *client) {
    memset(records, 0, sizeof(records));
    return (struct kvfs_replay){
        .directory = directory,
        .client = client,
        .flags = KVFS_REPLAY_BUFFERED | KVFS_REPLAY_VERIFY | KVFS_REPLAY_TOUCH,
        .requests = requests,
        .request_count = REQUESTS,
        .blocks = blocks,
        .hashes = hashes,
        .hash_count = REQUESTS * 2,
        .records = records,
        .block_size = BLOCK_SIZE,
        .threads = 6,
        .io_threads = 6,
        .window = 5,
    };
}

/* Every block of every request was loaded, stored, there already, or lost or failed and then stored. */
static void records_check(const struct kvfs_replay *replay, uint32_t failures) {
    uint32_t failed = 0, stored = 0;
    CHECK(replay->done == REQUESTS);
    for (uint32_t i = 0; i < REQUESTS; i++) {
        const struct kvfs_replay_record *record = &records[i];
        CHECK(record->end_ns >= record->start_ns && record->wrong == 0 && record->loaded <= record->found && record->found <= BLOCKS);
        CHECK(record->loaded + record->stored + record->present + record->failed == BLOCKS);
        failed += record->failed;
        stored += record->stored;
    }
    CHECK(stored > 0 && failed == failures);
}

static void test_directory(const char *path, uint64_t lru_blocks) {
    int directory = open(path, O_RDONLY | O_DIRECTORY);
    CHECK(directory >= 0);
    struct kvfs_replay replay = replay_make(directory, NULL);
    replay.lru_blocks = lru_blocks;
    CHECK(kvfs_replay_run(&replay) == 0);
    records_check(&replay, 0);
    close(directory);
}

static void test_client(int failing) {
    struct kvfs_client client = {.lock = PTHREAD_MUTEX_INITIALIZER, .failing = failing};
    struct kvfs_replay replay = replay_make(-1, &client);
    CHECK(kvfs_replay_run(&replay) == 0);
    records_check(&replay, failing ? (uint32_t)replay.store_errors[ENOSPC] : 0);
    CHECK(!failing || replay.store_errors[ENOSPC] > 0);
    for (uint32_t i = 0; i < client.count; i++)
        free(client.data[i]);
}

static void test_stopped_before_it_begins(void) {
    struct kvfs_client client = {.lock = PTHREAD_MUTEX_INITIALIZER};
    struct kvfs_replay replay = replay_make(-1, &client);
    replay.stop = 1;
    CHECK(kvfs_replay_run(&replay) == 0);
    CHECK(replay.done == 0 && records[0].end_ns == 0 && client.count == 0);
}

static void with_directory(uint64_t lru_blocks) {
    const char *parent = getenv("TMPDIR");
    char path[256], command[300];
    snprintf(path, sizeof(path), "%s/kvfs-replay-XXXXXX", parent ? parent : "/tmp");
    CHECK(mkdtemp(path));
    test_directory(path, lru_blocks);
    snprintf(command, sizeof(command), "rm -r '%s'", path);
    CHECK(system(command) == 0);
}

int main(void) {
    trace_make();
    with_directory(0);
    with_directory(40);
    test_client(0);
    test_client(7);
    test_stopped_before_it_begins();
    puts("replay: ok");
    return 0;
}
