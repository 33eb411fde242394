/* Shared by the tests of libkvfs: the double of the daemon, batches of blocks and their expected results, faults of devices. */
#ifndef KVFS_TEST_CLIENT_HARNESS_H
#define KVFS_TEST_CLIENT_HARNESS_H

#include "doubles/daemon.h"

static inline uint64_t milliseconds(void) { return now_ns() / 1000000; }

/* Blocks whose first word is their seed, from which every other byte follows: a reader can tell whether one is whole. */
static inline void fill(uint8_t *data, uint64_t size, uint64_t seed) {
    uint64_t state = seed, word = seed;
    for (uint64_t at = 0; at < size; at += 8) {
        memcpy(data + at, &word, min_u64(8, size - at));
        word = random_next(&state);
    }
}

static inline bool filled(const uint8_t *data, uint64_t size, uint64_t seed) {
    uint64_t state = seed, word = seed;
    for (uint64_t at = 0; at < size; at += 8) {
        if (memcmp(data + at, &word, min_u64(8, size - at)) != 0)
            return false;
        word = random_next(&state);
    }
    return true;
}

struct batch {
    uint32_t count;
    struct kvfs_keys keys;
    uint8_t *key_data;
    uint32_t *key_sizes;
    struct kvfs_buffer *buffers;
    int64_t *results;
    uint8_t **memories;
    uint64_t *memory_sizes;
};

/* Keys are "key-<number>", numbers from first on; buffers lie `offset` behind a page's start, with a guard on both sides. */
static inline struct batch *batch_new(uint32_t first, uint32_t count, const uint64_t *sizes, uint32_t size_count, uint32_t offset) {
    struct batch *b = calloc(1, sizeof(*b));
    uint64_t used = 0;
    b->count = count;
    b->key_data = malloc((count + 1) * 24);
    b->key_sizes = malloc((count + 1) * sizeof(*b->key_sizes));
    b->buffers = calloc(count + 1, sizeof(*b->buffers));
    b->results = calloc(count + 1, sizeof(*b->results));
    b->memories = calloc(count + 1, sizeof(*b->memories));
    b->memory_sizes = calloc(count + 1, sizeof(*b->memory_sizes));
    for (uint32_t i = 0; i < count; i++) {
        b->key_sizes[i] = (uint32_t)sprintf((char *)b->key_data + used, "key-%u", first + i);
        used += b->key_sizes[i];
        uint64_t size = sizes[i % size_count];
        b->memory_sizes[i] = round_up(GUARD + offset + size + GUARD, PAGE);
        b->memories[i] = pages_get(b->memory_sizes[i] / PAGE);
        memset(b->memories[i], 0xa5, b->memory_sizes[i]);
        b->buffers[i] = (struct kvfs_buffer){b->memories[i] + GUARD + offset, size};
        b->results[i] = 12345;
    }
    b->keys = (struct kvfs_keys){b->key_data, b->key_sizes, count, 0};
    return b;
}

static inline void batch_free(struct batch *b) {
    for (uint32_t i = 0; i < b->count; i++)
        free(b->memories[i]);
    free(b->memories);
    free(b->memory_sizes);
    free(b->results);
    free(b->buffers);
    free(b->key_sizes);
    free(b->key_data);
    free(b);
}

static inline void batch_fill(struct batch *b, uint64_t version) {
    for (uint32_t i = 0; i < b->count; i++)
        fill(b->buffers[i].data, b->buffers[i].size, (version << 32) + i);
}

static inline void guards_check(const struct batch *b) {
    for (uint32_t i = 0; i < b->count; i++) {
        const uint8_t *data = b->buffers[i].data, *memory = b->memories[i], *end = memory + b->memory_sizes[i];
        for (const uint8_t *at = memory; at < data; at++)
            CHECK_SAY(*at == 0xa5, "%td bytes before buffer %u", data - at, i);
        for (const uint8_t *at = data + b->buffers[i].size; at < end; at++)
            CHECK_SAY(*at == 0xa5, "%td bytes behind buffer %u", at - data - (ptrdiff_t)b->buffers[i].size, i);
    }
}

/* Everything was read, and is what batch_fill made. */
static inline void batch_check(const struct batch *b, uint64_t version) {
    for (uint32_t i = 0; i < b->count; i++) {
        CHECK_SAY(b->results[i] == (int64_t)b->buffers[i].size, "block %u: %lld, %s", i, (long long)b->results[i], kvfs_error());
        CHECK_SAY(filled(b->buffers[i].data, b->buffers[i].size, (version << 32) + i), "block %u", i);
    }
    guards_check(b);
}

static inline struct kvfs_client *connect_with(struct kvfs_options options) {
    struct kvfs_client *client = NULL;
    options.size = sizeof(options);
    int r = client_open("/mnt/test", d.directory, 1, "team/llama", &options, &client);
    CHECK_SAY(r == 0, "%d: %s", r, kvfs_error());
    return client;
}

static inline struct kvfs_client *connect_plain(void) { return connect_with((struct kvfs_options){.timeout_ms = 30000}); }

static inline struct batch *put_batch(struct kvfs_client *client, uint32_t first, uint32_t count, const uint64_t *sizes, uint32_t size_count,
                                      uint64_t version) {
    struct batch *b = batch_new(first, count, sizes, size_count, 0);
    batch_fill(b, version);
    int r = kvfs_put(client, &b->keys, b->buffers, b->results);
    for (uint32_t i = 0; i < count; i++)
        CHECK_SAY(b->results[i] == 0, "block %u: %lld", i, (long long)b->results[i]);
    CHECK_SAY(r == (int)count, "%d: %s", r, kvfs_error());
    return b;
}

static inline void batch_get(struct kvfs_client *client, struct batch *b, uint64_t version) {
    for (uint32_t i = 0; i < b->count; i++)
        memset(b->buffers[i].data, 0x11, b->buffers[i].size);
    int r = kvfs_get(client, &b->keys, b->buffers, b->results);
    CHECK_SAY(r == (int)b->count, "%d of %u: %s", r, b->count, kvfs_error());
    batch_check(b, version);
}

static inline struct kvfs_client_statistics statistics(struct kvfs_client *client) {
    struct kvfs_client_statistics out;
    CHECK(kvfs_client_statistics_get(client, &out) == 0);
    return out;
}

static inline void fault(struct kvfs_client *client, uint32_t device, uint32_t kind, uint32_t direction, uint32_t every, uint32_t value) {
    fault_set(&client->connection->array.devices[device], kind, direction, every, value);
}

static inline void fault_all(struct kvfs_client *client, uint32_t kind, uint32_t direction, uint32_t every, uint32_t value) {
    for (uint32_t i = 0; i < DEVICES; i++)
        fault(client, i, kind, direction, every, value);
}

static inline uint64_t device_reads(struct kvfs_client *client) {
    uint64_t total = 0;
    for (uint32_t i = 0; i < DEVICES; i++)
        total += atomic_load(&client->connection->array.devices[i].reads);
    return total;
}

static inline void wait_idle(struct kvfs_client *client) {
    uint64_t until = milliseconds() + 30000;
    while (statistics(client).busy) {
        CHECK(milliseconds() < until);
        kvfs_busy(client, "", 1);
        usleep(1000);
    }
}

/* The block of a key, with the double's lock held. */
static inline struct block *block_named(const char *key) {
    char name[2 * KVFS_KEY_MAX];
    struct kvfs_record record;
    uint32_t size = key_hex((const uint8_t *)key, (uint32_t)strlen(key), name);
    if (kvfs_table_find_name(d.table, shard_inode(name), name, size, &record) < 0)
        return NULL;
    return block_of(record.inode);
}

static inline uint64_t inode_named(const char *key) {
    locked();
    struct block *block = block_named(key);
    unlocked();
    CHECK(block);
    return (uint64_t)(block - d.blocks) + BLOCK;
}

/* The block moves, and its old place is written again, with the double's lock held. */
static inline void block_move(struct block *block, uint32_t split) {
    uint8_t *data = pages_get(pages_of(block->size) + 1);
    struct block old = *block;
    uint32_t page = 0;
    for (uint32_t i = 0; i < block->run_count; i++) {
        uint32_t before = i ? 1 : block->header_pages, pages = block->runs[i].page_count - before;
        if (pages)
            store_io(false, block->runs[i].segment, block->runs[i].page + before, data + page * PAGE, pages);
        page += pages;
    }
    block_write(block->name, block->name_size, data, block->size, split, 0, 0, block);
    for (uint32_t i = 0; i < old.run_count && old.runs[i].generation == d.generations[old.runs[i].segment]; i++)
        store_io(true, old.runs[i].segment, old.runs[i].page + old.runs[i].page_count / 2, data, 1);
    free(data);
}

static inline int64_t get_one(struct kvfs_client *client, const char *key, void *data, uint64_t size) {
    uint32_t key_size = (uint32_t)strlen(key);
    struct kvfs_keys keys = {key, &key_size, 1, 0};
    struct kvfs_buffer buffer = {data, size};
    int64_t result = 12345;
    int r = kvfs_get(client, &keys, &buffer, &result);
    return r < 0 ? r : result;
}

static inline int64_t put_one(struct kvfs_client *client, const char *key, const void *data, uint64_t size) {
    uint32_t key_size = (uint32_t)strlen(key);
    struct kvfs_keys keys = {key, &key_size, 1, 0};
    struct kvfs_buffer buffer = {(void *)(uintptr_t)data, size};
    int64_t result = 12345;
    int r = kvfs_put(client, &keys, &buffer, &result);
    CHECK((r == 1) == (result == 0));
    return r < 0 ? r : result;
}

static inline bool says(const char *part) { return strstr(kvfs_error(), part) != NULL; }

#endif
