/* sources: base block io client pod */
/* Stores by libkvfs, with a double of the daemon (doubles/daemon.h): blocks whose memory is in pieces, or that are there already. And their names:
 * keys of every size, and paths. */
#include "client_harness.h"

#include "kvfs_checksum.h"

/* A block whose bytes are spread over memory, with a gap of at least one byte between two pieces. */
struct spread {
    struct kvfs_buffer pieces[1200];
    uint32_t count;
    uint8_t *memory, *content;
    uint64_t size;
};

static void spread_begin(struct spread *s, uint64_t size, uint64_t room) {
    *s = (struct spread){.memory = pages_get(room / PAGE + 1), .content = pages_get(pages_of(size)), .size = size};
    fill(s->content, size, size + 1);
}

static void spread_end(struct spread *s) {
    free(s->memory);
    free(s->content);
}

/* Pieces of `sizes`, over and over, each at `skew` behind a multiple of `step`. */
static void spread_make(struct spread *s, uint64_t size, const uint64_t *sizes, uint32_t size_count, uint64_t step, uint64_t skew) {
    uint64_t room = 0, at = 0, place = 0;
    for (uint32_t i = 0; i < size_count; i++)
        room += (size / sizes[i] + 2) * (round_up(sizes[i], step) + 2 * step);
    spread_begin(s, size, room);
    for (uint32_t i = 0; at < size; i++) {
        uint64_t n = min_u64(sizes[i % size_count], size - at);
        CHECK(s->count < 1200 && place + skew + n <= room);
        memcpy(s->memory + place + skew, s->content + at, n);
        s->pieces[s->count++] = (struct kvfs_buffer){s->memory + place + skew, n};
        place += round_up(n + skew, step) + step;
        at += n;
    }
}

static int64_t put_spread(struct kvfs_client *client, const char *key, const struct spread *s, uint32_t flags) {
    uint32_t key_size = (uint32_t)strlen(key);
    struct kvfs_keys keys = {key, &key_size, 1, 0};
    struct kvfs_vector vector = {.pieces = s->pieces, .count = s->count, .offset = 12345};
    struct kvfs_put_options options = {.size = sizeof(options), .flags = flags};
    int64_t result = 12345;
    int r = kvfs_put_vectors(client, &keys, &vector, flags ? &options : NULL, &result);
    CHECK((r == 1) == (result == 0));
    return r < 0 ? r : result;
}

static void check_block(struct kvfs_client *client, const char *key, const struct spread *s) {
    uint8_t *memory = pages_get(pages_of(s->size));
    int64_t got = get_one(client, key, memory, s->size);
    CHECK_SAY(got == (int64_t)s->size, "%lld of %llu bytes: %s", (long long)got, (unsigned long long)s->size, kvfs_error());
    CHECK_SAY(memcmp(memory, s->content, s->size) == 0, "%llu bytes in %u pieces", (unsigned long long)s->size, s->count);
    free(memory);
}

/* Pieces of whole pages, wherever they lie, and whatever the last one is: nothing is copied. */
static void test_whole_pages_are_not_copied(void) {
    static const uint64_t sizes[] = {0, 1, 4095, 4096, 40961, 200000, 2100000};
    static const uint64_t pieces[][2] = {{4096, 4096}, {8192, 4096}, {65536, 12288}, {1 << 20, 4096}};
    for (uint32_t stripe = 0; stripe < 2; stripe++) {
        pool_new(stripe ? 131072 : 16384);
        struct kvfs_client *client = connect_plain();
        uint32_t alignment = client->connection->memory_alignment;
        for (uint32_t split = 1; split <= RUNS_MAX; split++)
            for (uint32_t i = 0; i < 7; i++)
                for (uint32_t k = 0; k < 4; k++) {
                    struct spread s;
                    locked();
                    d.split = split;
                    unlocked();
                    spread_make(&s, sizes[i], pieces[k], 2, PAGE, (i + k) % 2 ? alignment % PAGE : 0);
                    uint64_t before = statistics(client).bounced_bytes; /* reads copy the last page */
                    CHECK_SAY(put_spread(client, "pages", &s, 0) == 0, "%s", kvfs_error());
                    CHECK(statistics(client).bounced_bytes == before);
                    check_block(client, "pages", &s);
                    spread_end(&s);
                }
        kvfs_close(client);
        daemon_stop(false);
    }
}

/* Pieces that cut pages, and memory that no device takes: all is copied, once. */
static void test_pieces_of_any_size_anywhere(void) {
    uint64_t seed = 3, bounced = 0;
    pool_new(16384);
    struct kvfs_client *client = connect_plain();
    for (uint32_t i = 0; i < 300; i++) {
        struct spread s;
        uint64_t size = random_below(&seed, i % 10 ? 70000 : 1500000), pieces[5];
        for (uint32_t k = 0; k < 5; k++)
            pieces[k] = 1 + random_below(&seed, i % 3 ? 60000 : 5000) + size / 1000;
        spread_make(&s, size, pieces, 5, 1 + random_below(&seed, 100), random_below(&seed, 50));
        CHECK_SAY(put_spread(client, "any", &s, 0) == 0, "%s", kvfs_error());
        bounced += size;
        CHECK(statistics(client).bounced_bytes <= 2 * bounced); /* it is read without a copy, or with */
        check_block(client, "any", &s);
        /* Empty pieces are none, first, between and last. */
        if (s.count > 3) {
            struct kvfs_buffer empty = {s.memory + 1, 0};
            memmove(s.pieces + 3, s.pieces + 1, (s.count - 1) * sizeof(s.pieces[0]));
            s.pieces[2] = empty;
            s.pieces[1] = s.pieces[0];
            s.pieces[0] = empty;
            s.count += 2;
            s.pieces[s.count++] = (struct kvfs_buffer){NULL, 0};
            CHECK(put_spread(client, "any", &s, 0) == 0);
            check_block(client, "any", &s);
        }
        spread_end(&s);
    }
    kvfs_close(client);
    daemon_stop(false);
}

/* More pieces than one I/O can have, by their own number and by stripe units. */
static void test_many_pieces(void) {
    static const uint64_t pieces[][2] = {{4096, 4096}, {4096, 8192}, {20480, 4096}, {12288, 12288}};
    pool_new(16384);
    struct kvfs_client *client = connect_plain();
    for (uint32_t i = 0; i < 12; i++) {
        struct spread s;
        locked();
        d.split = 1 + i % 3;
        d.header_extra = i % 4 == 3 ? 60 : 0; /* a long header goes with the data */
        unlocked();
        spread_make(&s, 500 * (pieces[i % 4][0] + pieces[i % 4][1]) / 2 + i % 2, pieces[i % 4], 2, PAGE, 0);
        CHECK(s.count >= 500);
        uint64_t before = statistics(client).bounced_bytes;
        CHECK_SAY(put_spread(client, "many", &s, 0) == 0, "%s", kvfs_error());
        CHECK(statistics(client).bounced_bytes == before);
        check_block(client, "many", &s);
        spread_end(&s);
    }
    kvfs_close(client);
    daemon_stop(false);
}

static void test_options(void) {
    pool_new(16384);
    struct kvfs_client *client = connect_plain();
    uint8_t memory[100] = "bytes";
    uint32_t key_sizes[2] = {1, 1};
    struct kvfs_keys keys = {"ab", key_sizes, 2, 0}, parents = {"a", key_sizes, 1, 0};
    struct kvfs_buffer pieces[2] = {{memory, 10}, {NULL, 10}}, vast[3] = {{memory, 10}, {memory, UINT64_MAX - 4}, {memory, 10}};
    struct kvfs_vector vectors[2] = {{.pieces = pieces, .count = 1}, {.pieces = pieces, .count = 2}};
    int64_t results[2] = {7, 7};
    struct kvfs_put_options options = {.size = sizeof(options), .flags = 2};
    CHECK(kvfs_put_vectors(client, &keys, vectors, &options, results) == -EINVAL && says("flags 0x2") && results[1] == -ECANCELED);
    options = (struct kvfs_put_options){.size = sizeof(options), .parents = &parents};
    CHECK(kvfs_put_vectors(client, &keys, vectors, &options, results) == -EINVAL && says("1 parents of 2 blocks"));
    options.parents = NULL;
    CHECK(kvfs_put_vectors(client, &keys, vectors, &options, results) == -EINVAL && says("buffer 1: 10 bytes at 0"));
    vectors[1] = (struct kvfs_vector){.pieces = vast, .count = 3};
    CHECK(kvfs_put_vectors(client, &keys, vectors, &options, results) == -EINVAL && says("buffer 1"));
    options.size = 4; /* a caller that knows no field */
    options.flags = 99;
    vectors[1].count = 1;
    CHECK_SAY(kvfs_put_vectors(client, &keys, vectors, &options, results) == 2, "%s", kvfs_error());
    keys.count = 0;
    CHECK(kvfs_put_vectors(client, &keys, NULL, NULL, NULL) == 0);
    kvfs_close(client);
    daemon_stop(false);
}

static void test_if_absent(void) {
    static const uint64_t size = 20000;
    enum { COUNT = 600 };
    pool_new(16384);
    struct kvfs_client *client = connect_plain();
    struct batch *b = batch_new(0, COUNT, &size, 1, 0), *odd = batch_new(0, COUNT, &size, 1, 0);
    struct kvfs_vector vectors[COUNT];
    struct kvfs_put_options options = {.size = sizeof(options), .flags = KVFS_IF_ABSENT};
    for (uint32_t i = 0; i < COUNT; i += 3)
        batch_free(put_batch(client, i, 1, &size, 1, 100 + i));
    locked();
    uint32_t reserved = d.reserved;
    unlocked();
    batch_fill(b, 7);
    for (uint32_t i = 0; i < COUNT; i++)
        vectors[i] = (struct kvfs_vector){.pieces = &b->buffers[i], .count = 1};
    CHECK_SAY(kvfs_put_vectors(client, &b->keys, vectors, &options, b->results) == COUNT - COUNT / 3, "%s", kvfs_error());
    for (uint32_t i = 0; i < COUNT; i++)
        CHECK(b->results[i] == (i % 3 ? 0 : -EEXIST));
    locked();
    CHECK(d.reserved - reserved == COUNT - COUNT / 3);
    unlocked();
    /* All are there: nothing is asked for, and each counts as used. */
    CHECK(kvfs_put_vectors(client, &b->keys, vectors, &options, b->results) == 0 && b->results[1] == -EEXIST);
    CHECK(kvfs_exists_prefix(client, &b->keys) == COUNT);
    CHECK(kvfs_get(client, &odd->keys, odd->buffers, odd->results) == COUNT);
    for (uint32_t i = 0; i < COUNT; i++)
        CHECK(filled(odd->buffers[i].data, size, i % 3 ? (7ull << 32) + i : (uint64_t)(100 + i) << 32));
    client_hit(client, client->connection, 0);
    uint64_t until = milliseconds() + 30000, hits = 0;
    while (hits < COUNT + COUNT / 3 + COUNT) {
        CHECK_SAY(milliseconds() < until, "%llu hits", (unsigned long long)hits);
        usleep(1000);
        locked();
        hits = d.hits;
        unlocked();
    }
    batch_free(odd);
    batch_free(b);
    kvfs_close(client);
    daemon_stop(false);
}

/* A block that could not be read is there, and yet it is stored again; the others are not. */
static void test_if_absent_stores_again_what_could_not_be_read(void) {
    pool_new(16384);
    struct kvfs_client *client = connect_plain();
    static const uint64_t pieces[] = {4096};
    struct spread s;
    uint8_t *memory = pages_get(20);
    spread_make(&s, 50000, pieces, 1, PAGE, 0);
    for (int what = 0; what < 3; what++) {
        CHECK(put_spread(client, "bad", &s, 0) == 0 && put_spread(client, "good", &s, 0) == 0);
        CHECK(put_spread(client, "bad", &s, KVFS_IF_ABSENT) == -EEXIST);
        if (what < 2) {
            locked();
            block_corrupt(block_named("bad"), what ? 3 : -1);
            unlocked();
            CHECK(put_spread(client, "bad", &s, KVFS_IF_ABSENT) == -EEXIST); /* nobody knows yet */
            CHECK(get_one(client, "bad", memory, 50000) == -EIO);
        } else {
            fault_all(client, KVFS_FAULT_ERROR, 1, 1, EIO);
            CHECK(get_one(client, "bad", memory, 50000) == -EIO);
            fault_all(client, 0, 3, 0, 0);
        }
        CHECK(put_spread(client, "good", &s, KVFS_IF_ABSENT) == -EEXIST);
        CHECK(put_spread(client, "bad", &s, KVFS_IF_ABSENT) == 0);
        check_block(client, "bad", &s);
        CHECK(put_spread(client, "bad", &s, KVFS_IF_ABSENT) == -EEXIST);
    }
    /* The oldest of very many are forgotten; one that is found bad again and again pushes nobody out. */
    uint64_t inode = inode_named("good");
    client_failed(client, inode);
    for (uint32_t i = 0; i < 5000; i++)
        client_failed(client, 77);
    CHECK(client_has_failed(client, inode) && client_has_failed(client, 77) && !client_has_failed(client, 78));
    for (uint64_t i = 0; i < CLIENT_FAILED_MAX; i++)
        client_failed(client, 1000000 + i);
    CHECK(!client_has_failed(client, inode) && client_has_failed(client, 1000000) && !client_has_failed(client, 77));
    free(memory);
    spread_end(&s);
    kvfs_close(client);
    daemon_stop(false);
}

static void test_exists_prefix(void) {
    static const uint64_t size = 100;
    pool_new(16384);
    struct kvfs_client *client = connect_plain();
    struct batch *b = batch_new(0, 20, &size, 1, 0);
    CHECK(kvfs_exists_prefix(client, &b->keys) == 0);
    batch_free(put_batch(client, 0, 7, &size, 1, 1));
    batch_free(put_batch(client, 8, 12, &size, 1, 1));
    uint64_t lookups = statistics(client).lookups;
    CHECK(kvfs_exists_prefix(client, &b->keys) == 7);
    CHECK(statistics(client).lookups == lookups + 8); /* no key behind the gap */
    b->keys.count = 7;
    CHECK(kvfs_exists_prefix(client, &b->keys) == 7);
    b->keys.count = 0;
    CHECK(kvfs_exists_prefix(client, &b->keys) == 0);
    b->keys.count = 20;
    b->key_sizes[3] = 0;
    CHECK(kvfs_exists_prefix(client, &b->keys) == -EINVAL);
    batch_free(b);
    kvfs_close(client);
    daemon_stop(false);
}

/* ---- keys of every size, and paths ---- */

/* Keys of one kind, back to back, and a block of some bytes for each. */
struct named {
    struct kvfs_keys keys;
    uint8_t data[400 * 1100];
    uint32_t sizes[400], used;
    uint8_t memory[400 * 8];
    struct kvfs_buffer buffers[400];
    int64_t results[400];
    uint8_t flags[400];
};

static void named_add(struct named *n, const void *key, uint32_t size) {
    uint32_t i = n->keys.count++;
    CHECK(i < 400 && n->used + size <= sizeof(n->data));
    memcpy(n->data + n->used, key, size);
    n->used += size;
    n->sizes[i] = size;
    n->buffers[i] = (struct kvfs_buffer){n->memory + 8 * i, 8};
    n->keys.data = n->data;
    n->keys.sizes = n->sizes;
}

/* Put, found, read, and then deleted, twice. */
static void named_live(struct kvfs_client *client, struct named *n) {
    int count = (int)n->keys.count;
    for (int i = 0; i < count; i++)
        fill(n->memory + 8 * i, 8, (uint64_t)i + 1);
    CHECK_SAY(kvfs_put(client, &n->keys, n->buffers, n->results) == count, "%s", kvfs_error());
    memset(n->memory, 0, sizeof(n->memory));
    CHECK(kvfs_exists_prefix(client, &n->keys) == count && kvfs_sizes(client, &n->keys, n->results) == 0 && n->results[count - 1] == 8);
    CHECK_SAY(kvfs_get(client, &n->keys, n->buffers, n->results) == count, "%s", kvfs_error());
    for (int i = 0; i < count; i++)
        CHECK(filled(n->memory + 8 * i, 8, (uint64_t)i + 1));
    CHECK(kvfs_prestage(client, &n->keys) == count);
    CHECK_SAY(kvfs_delete(client, &n->keys, n->flags) == count, "%s", kvfs_error());
    CHECK(kvfs_exists(client, &n->keys, n->flags) == 0 && n->flags[0] == 0 && n->flags[count - 1] == 0);
    CHECK(kvfs_delete(client, &n->keys, n->flags) == 0 && kvfs_get(client, &n->keys, n->buffers, n->results) == 0);
}

static void test_long_keys(void) {
    static const uint32_t sizes[] = {1, 126, 127, 128, 129, 200, 254, 255};
    static struct named n;
    pool_new(16384);
    struct kvfs_client *client = connect_plain();
    n = (struct named){0};
    for (uint32_t i = 0; i < 8; i++)
        for (uint32_t first = 0; first < 256; first += sizes[i] == 1 ? 32 : 51) {
            uint8_t key[256];
            for (uint32_t k = 0; k < sizes[i]; k++)
                key[k] = (uint8_t)(first + 7 * k);
            named_add(&n, key, sizes[i]);
        }
    named_live(client, &n);
    /* The name is the documented one. */
    uint8_t key[255];
    for (uint32_t k = 0; k < 255; k++)
        key[k] = (uint8_t)(255 - k);
    n = (struct named){0};
    named_add(&n, key, 128);
    named_add(&n, key, 255);
    CHECK(kvfs_put(client, &n.keys, n.buffers, n.results) == 2);
    char path[700], digits[510];
    struct kvfs_attributes attributes;
    key_hex(key, 255, digits);
    snprintf(path, sizeof(path), "team/llama/ff/%.254so/0", digits); /* key[127] is 0x80: 'g' + 8 */
    CHECK_SAY(key[127] == 0x80 && kvfs_find(client, path, &attributes) == 0 && attributes.sealed, "%s", path);
    snprintf(path, sizeof(path), "team/llama/ff/%.254so/%.255s", digits, digits + 255);
    CHECK_SAY(kvfs_find(client, path, &attributes) == 0 && attributes.sealed, "%s", path);
    kvfs_close(client);
    daemon_stop(false);
}

static void test_paths(void) {
    static struct named n;
    char text[1100];
    pool_new(16384);
    struct kvfs_client *client = connect_plain();
    n = (struct named){.keys.kind = KVFS_PATHS};
    static const char *paths[] = {"name", "a/name", "a/b/name", "a/b/c.bin", "a/...", "6b/6b", ".hidden/..x", " / ", "\xff/\x01"};
    for (uint32_t i = 0; i < sizeof(paths) / sizeof(paths[0]); i++)
        named_add(&n, paths[i], (uint32_t)strlen(paths[i]));
    memset(text, 'n', sizeof(text));
    named_add(&n, text, 255);
    for (uint32_t i = 1; i < 1023; i += 2)
        text[i] = '/';
    named_add(&n, text, 1023);
    named_live(client, &n);
    /* More directories than one frame can have: puts and removals are cut. */
    n = (struct named){.keys.kind = KVFS_PATHS};
    for (uint32_t i = 0; i < 300; i++)
        named_add(&n, text, (uint32_t)sprintf(text, "base/%03u/file", i));
    for (uint32_t i = 0; i < 90; i++)
        named_add(&n, text, (uint32_t)sprintf(text, "base/%03u/other", i));
    named_live(client, &n);
    /* A key's file by path is the same block. */
    CHECK(put_one(client, "k", "bytes", 5) == 0);
    n = (struct named){.keys.kind = KVFS_PATHS};
    named_add(&n, "6b/6b", 5);
    CHECK(kvfs_exists_prefix(client, &n.keys) == 1 && kvfs_delete(client, &n.keys, n.flags) == 1);
    CHECK(get_one(client, "k", n.memory, 8) == -ENOENT);
    kvfs_close(client);
    daemon_stop(false);
}

static void test_paths_that_cannot_be(void) {
    static const char *wrong[] = {"", "/a", "a/", "a//b", ".", "..", "./a", "a/..", "a/./b", "../a"};
    static struct named n;
    char text[1100];
    pool_new(16384);
    struct kvfs_client *client = connect_plain();
    for (uint32_t i = 0; i < 14; i++) {
        n = (struct named){.keys.kind = KVFS_PATHS};
        named_add(&n, "good", 4);
        memset(text, i == 11 ? '/' : 'x', sizeof(text));
        if (i < 10)
            named_add(&n, wrong[i], (uint32_t)strlen(wrong[i]));
        else if (i == 10)
            named_add(&n, "a\0b", 3);
        else
            named_add(&n, text, i == 13 ? 256 : 1024);
        CHECK(kvfs_put(client, &n.keys, n.buffers, n.results) == -EINVAL && says("path") && n.results[0] == -ECANCELED);
        CHECK(kvfs_get(client, &n.keys, n.buffers, n.results) == -EINVAL && kvfs_exists(client, &n.keys, n.flags) == -EINVAL);
        CHECK(kvfs_delete(client, &n.keys, n.flags) == -EINVAL && kvfs_sizes(client, &n.keys, n.results) == -EINVAL);
        CHECK(kvfs_exists_prefix(client, &n.keys) == 0); /* the first is missing: the second is not looked at */
    }
    n.keys = (struct kvfs_keys){"a", n.sizes, 1, 7};
    n.sizes[0] = 1;
    CHECK(kvfs_exists(client, &n.keys, n.flags) == -EINVAL && says("kind 7"));
    CHECK(kvfs_put(client, &n.keys, n.buffers, n.results) == -EINVAL && kvfs_delete(client, &n.keys, n.flags) == -EINVAL);
    kvfs_close(client);
    daemon_stop(false);
}

/* Each block's item says which one is before it: by its place in the request, or by the inode number of one that is there. Others are not known. */
static void test_parents(void) {
    static struct named n;
    char key[4] = "kab", path[20] = "6b/6b";
    uint32_t sizes[3] = {1, 1, 0};
    struct kvfs_keys parents = {"\xffk", sizes, 3, 0};
    struct kvfs_vector vectors[3];
    struct kvfs_put_options options = {.size = sizeof(options), .parents = &parents};
    pool_new(16384);
    struct kvfs_client *client = connect_plain();
    n = (struct named){0};
    for (uint32_t i = 0; i < 3; i++) {
        named_add(&n, key + i, 1);
        vectors[i] = (struct kvfs_vector){.pieces = &n.buffers[i], .count = 1};
    }
    memset(d.parents, 0xff, sizeof(d.parents));
    CHECK_SAY(kvfs_put_vectors(client, &n.keys, vectors, &options, n.results) == 3, "%s", kvfs_error());
    CHECK(d.parents[0] == 0 && d.parents[1] == (WIRE_ITEM | 0) && d.parents[2] == 0);
    struct kvfs_record before;
    CHECK(kvfs_table_find_name(d.table, shard_inode("6b"), "6b", 2, &before) == 0);
    parents = (struct kvfs_keys){path, (uint32_t[]){5, 0, 0}, 3, KVFS_PATHS};
    CHECK(kvfs_put_vectors(client, &n.keys, vectors, &options, n.results) == 3 && d.parents[1] == 0);
    CHECK(d.parents[0] == before.inode);
    parents.data = "a//bc";
    CHECK(kvfs_put_vectors(client, &n.keys, vectors, &options, n.results) == -EINVAL && says("path 'a//bc'"));
    kvfs_close(client);
    daemon_stop(false);
}

int main(void) {
    alarm(300 * slowness());
    signal(SIGPIPE, SIG_DFL);
    devices_open();
    RUN(test_whole_pages_are_not_copied);
    RUN(test_pieces_of_any_size_anywhere);
    RUN(test_many_pieces);
    RUN(test_options);
    RUN(test_if_absent);
    RUN(test_if_absent_stores_again_what_could_not_be_read);
    RUN(test_exists_prefix);
    RUN(test_long_keys);
    RUN(test_paths);
    RUN(test_paths_that_cannot_be);
    RUN(test_parents);
    devices_close();
    return 0;
}
