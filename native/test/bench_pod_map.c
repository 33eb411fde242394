/* sources: pod block/block_table.c block/block_table_reader.c block/checksum.c block/checksum_avx2.c block/checksum_avx512.c */
/* Prints ns per look-up in the pod map, records applied a second, and how full it gets. Not run by `make check`; run with `make bench`.
 *
 *     build/native-test/plain-bench_pod_map [ENTRIES ...]       10000000 and 1000000 by default; 100000000 takes 3 GB and two minutes */
#include "pod/pod_layout.h"

#include <stdio.h>

#define SECRET 0x9e3779b97f4a7c15ULL
#define LOOKUPS 4000000
#define NODES 72
#define LOT 16
#define PAGES (1u << 18) /* segments of 1 GiB */
#define BLOCKS 512       /* of 2 MiB in a segment */

/* Of this thread: others may have the machine too. */
static double now(void) {
    struct timespec time;

    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return (double)time.tv_sec + (double)time.tv_nsec * 1e-9;
}

static void fail(const char *what) {
    fprintf(stderr, "failed: %s\n", what);
    exit(1);
}

static uint64_t seed = 1, generation = 1;

static uint64_t mix(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
    return x ^ (x >> 31);
}
static uint64_t random64(void) { return mix(seed += 0x9e3779b97f4a7c15ULL); }
static uint64_t low_of(uint64_t number) { return mix(number * 2 + 1); }
static uint64_t high_of(uint64_t number) { return mix(~number * 3); }

/* Blocks fill segments in turn; slot 0 is this node. */
static uint32_t segment_of(uint64_t number) {
    uint64_t segment = number / BLOCKS, lot = segment / LOT;

    return (uint32_t)((lot / (NODES - 1) * NODES + 1 + lot % (NODES - 1)) * LOT + segment % LOT);
}

static struct kvfs_pod *create(uint64_t entries_max, uint64_t blocks) {
    struct kvfs_pod_config config = {.entries_max = entries_max,
                                     .secret = SECRET,
                                     .segment_count = segment_of(blocks) + LOT * NODES,
                                     .segment_pages = PAGES,
                                     .lot = LOT,
                                     .nodes = NODES};
    struct kvfs_pod *pod;

    if (kvfs_pod_create(&config, &pod))
        fail("create");
    return pod;
}

/* One batch of blocks [first, first + count), of one lot, as its owner would make it. */
static uint64_t make_batch(uint64_t first, uint32_t count, uint64_t version, uint8_t *out) {
    struct kvfs_pod_batch *head = (void *)out;
    struct kvfs_pod_batch_segment *segments = (void *)(head + 1);
    uint32_t base = segment_of(first), last = segment_of(first + count - 1);
    struct kvfs_pod_batch_shape *shape;
    struct kvfs_pod_batch_record *records;

    *head = (struct kvfs_pod_batch){.magic = KVFS_MAGIC_NEWS,
                                    .version = 1,
                                    .start = 1,
                                    .number = first + 1,
                                    .slot = (uint16_t)(base / LOT % NODES),
                                    .segment_count = (uint16_t)(last - base + 1),
                                    .shape_count = 1,
                                    .record_count = count};
    for (uint32_t i = 0; i <= last - base; i++)
        segments[i] = (struct kvfs_pod_batch_segment){.generation = generation, .segment = base + i};
    shape = (void *)(segments + head->segment_count);
    *shape = (struct kvfs_pod_batch_shape){.size = 2 << 20, .header_pages = 2, .mode = 0100644};
    records = (void *)(shape + 1);
    for (uint32_t i = 0; i < count; i++)
        records[i] = (struct kvfs_pod_batch_record){.key_low = low_of(first + i),
                                                    .key_high = high_of(first + i),
                                                    .version = version + first + i,
                                                    .page_kind = (uint32_t)(1 + (first + i) % BLOCKS * 512) | 129u << 24,
                                                    .segment = (uint16_t)(segment_of(first + i) - base)};
    head->size = (uint32_t)((uint8_t *)(records + count) - out);
    head->checksum = kvfs_checksum(out, head->size, SECRET);
    return head->size;
}

/* Applies [0, blocks) and returns the seconds that the applying took, without the making. */
static double apply_all(struct kvfs_pod *pod, uint64_t blocks, uint64_t version, const struct kvfs_table *table) {
    enum { COUNT = BLOCKS * 2, BATCHES = 64 };
    static _Alignas(64) uint8_t batches[BATCHES][KVFS_POD_BATCH_SIZE_MAX];
    static struct kvfs_pod_conflict conflicts[KVFS_POD_BATCH_RECORDS_MAX];
    static struct kvfs_pod_hit hits[KVFS_POD_BATCH_RECORDS_MAX];
    double took = 0;

    for (uint64_t first = 0; first < blocks;) {
        uint64_t sizes[BATCHES];
        int count = 0;

        for (; count < BATCHES && first < blocks; count++, first += COUNT)
            sizes[count] = make_batch(first, (uint32_t)min_u64(COUNT, blocks - first), version, batches[count]);
        double start = now();
        for (int i = 0; i < count; i++) {
            struct kvfs_pod_applied applied;
            uint32_t slot = ((struct kvfs_pod_batch *)(void *)batches[i])->slot;

            if (kvfs_pod_apply(pod, slot, batches[i], sizes[i], table, conflicts, hits, &applied) || applied.malformed || applied.foreign)
                fail("apply");
        }
        took += now() - start;
    }
    return took;
}

static void bench_find(const struct kvfs_pod *pod, uint64_t blocks, const char *when) {
    uint64_t digest = 0, missed = 0;
    struct kvfs_pod_found found;
    double hit = 0, miss = 0, name = 0, start;

    for (int round = 0; round < 2; round++) { /* the first maps the pages */
        start = now();
        for (int i = 0; i < LOOKUPS; i++) {
            uint64_t number = random64() % blocks;

            if (kvfs_pod_find(pod, low_of(number), high_of(number), &found))
                missed++;
            digest += found.page;
        }
        hit = now() - start;
        start = now();
        for (int i = 0; i < LOOKUPS; i++) {
            uint64_t number = blocks + 1000000 + random64() % blocks;

            if (kvfs_pod_find(pod, low_of(number), high_of(number), &found) != -ENOENT)
                fail("miss");
        }
        miss = now() - start;
        start = now();
        for (int i = 0; i < LOOKUPS; i++) {
            char text[32] = "0123456789abcdef0123456789abcdef";
            uint64_t number = random64(), low, high;

            memcpy(text, &number, sizeof(number));
            kvfs_name_key(7, text, sizeof(text), 42, &low, &high);
            if (kvfs_pod_find(pod, low, high, &found) != -ENOENT)
                fail("miss by name");
        }
        name = now() - start;
    }
    printf("    %s: hit %5.1f ns, miss %5.1f ns, miss by a name of 32 bytes %5.1f ns; %.4f %% dropped; digest %lx\n", when, hit / LOOKUPS * 1e9,
           miss / LOOKUPS * 1e9, name / LOOKUPS * 1e9, 50.0 * (double)missed / LOOKUPS, digest);
}

static void bench_map(uint64_t blocks) {
    struct kvfs_pod *pod = create(blocks, blocks), *reader;
    struct kvfs_pod_statistics count;
    double took = apply_all(pod, blocks, 1, NULL);

    if (kvfs_pod_attach(kvfs_pod_fd(pod), SECRET, &reader))
        fail("attach");
    kvfs_pod_statistics(pod, &count);
    printf("%lu entries in %.2f GB, %.1f bytes each, fill %.3f\n", blocks, (double)count.bytes / 1e9, (double)count.bytes / (double)blocks,
           (double)count.entries / (double)count.capacity);
    printf("    apply into new memory %.2f M/s; %lu moved, %lu dropped\n", (double)blocks / took / 1e6, count.displaced,
           count.dropped + count.refused);
    took = apply_all(pod, blocks, 1, NULL);
    printf("    apply what is known   %.2f M/s\n", (double)blocks / took / 1e6);
    took = apply_all(pod, blocks, 1 + blocks, NULL);
    printf("    apply newer versions  %.2f M/s\n", (double)blocks / took / 1e6);
    bench_find(reader, blocks, "in another process's mapping");
    bench_find(pod, blocks, "in the writer's            ");
    /* Half of all segments end, and their blocks come again under other names: entries take the places of dead ones. */
    double start = now();
    for (uint64_t segment = 0; segment < blocks / BLOCKS; segment += 2)
        if (kvfs_pod_life(pod, segment_of(segment * BLOCKS), 1, 1))
            fail("life");
    took = now() - start;
    printf("    lives end             %.0f ns each\n", took * 1e9 / ((double)blocks / BLOCKS / 2));
    start = now();
    kvfs_pod_sweep(pod, pod->constants.buckets);
    took = now() - start;
    printf("    a whole sweep         %.3f s, %.1f ns a bucket\n", took, took * 1e9 / (double)pod->constants.buckets);
    generation = 2; /* every segment begins a new life: all that was there is dead, and is found and taken over meanwhile */
    took = apply_all(pod, blocks, 1 + 2 * blocks, NULL);
    generation = 1;
    kvfs_pod_statistics(pod, &count);
    printf("    apply over dead ones  %.2f M/s; %.4f %% dropped\n", (double)blocks / took / 1e6,
           100.0 * (double)(count.dropped + count.refused) / (double)blocks);
    kvfs_pod_detach(reader);
    kvfs_pod_destroy(pod);
}

/* One more record at each fill: its cost, and whether another had to go for it. */
static void bench_fill(uint64_t blocks) {
    struct kvfs_pod *pod = create(blocks, 2 * blocks);
    uint64_t capacity = pod->constants.buckets * POD_ENTRIES, number = 0;
    struct kvfs_pod_statistics before, after;

    pod->constants.entries_max = capacity; /* no limit but the places */
    printf("fill of %lu places\n", capacity);
    for (int percent = 70; percent <= 100; percent += percent < 90 ? 10 : 1) {
        double start = now();
        uint64_t first = number;

        kvfs_pod_statistics(pod, &before);
        for (after = before; after.entries < capacity * (unsigned)percent / 100 && number - first < capacity / 5 * 4;) {
            for (int i = 0; i < 1000; i++, number++) {
                struct kvfs_pod_entry entry = {.key_low = low_of(number),
                                               .key_high = high_of(number),
                                               .version = 1 + number,
                                               .generation = 1,
                                               .size = 2 << 20,
                                               .segment = segment_of(number),
                                               .page = (uint32_t)(1 + number % BLOCKS * 512),
                                               .header_pages = 2,
                                               .mode = 0100644};
                entry.slot = (uint16_t)(entry.segment / LOT % NODES);
                if (kvfs_pod_put(pod, &entry))
                    fail("put");
            }
            kvfs_pod_statistics(pod, &after);
        }
        printf("    to %3d %%: %6.1f ns a put, %.3f moves, %.6f dropped\n", percent, (now() - start) * 1e9 / (double)(number - first),
               (double)(after.displaced - before.displaced) / (double)(number - first),
               (double)(after.dropped - before.dropped) / (double)(number - first));
        if (after.entries < capacity * (unsigned)percent / 100)
            break;
    }
    kvfs_pod_destroy(pod);
}

/* Records of others that meet this node's own table, of a million names. */
static void bench_apply_beside_a_table(void) {
    struct kvfs_table *table;
    struct kvfs_pod *pod = create(1000000, 1000000);

    if (kvfs_table_create(10000000, SECRET, 1, &table))
        fail("table");
    for (uint64_t i = 0; i < 1000000; i++) {
        struct kvfs_record record = {.inode = i + 2, .parent = 1, .version = 1, .kind = KVFS_KIND_FILE, .nlink = 1};

        if (kvfs_table_put(table, &record, (const char *)&i, sizeof(i), 0))
            fail("table put");
    }
    kvfs_table_set_complete(table, 1);
    double first = apply_all(pod, 1000000, 1, table), second = apply_all(pod, 1000000, 1000001, table);
    printf("apply beside a table of 10^6 names: new %.2f M/s, newer versions %.2f M/s\n", 1.0 / first, 1.0 / second);
    kvfs_table_destroy(table);
    kvfs_pod_destroy(pod);
}

/* As a busy daemon has it: a few thousand items between two takes. */
static void bench_news(void) {
    enum { COUNT = 2000, ROUNDS = 500 };
    struct kvfs_news_config config = {.bytes_max = 4 << 20, .secret = SECRET, .start = 1, .slot = 1};
    struct kvfs_news_taken taken;
    static uint8_t out[KVFS_POD_BATCH_SIZE_MAX];
    struct kvfs_news *news;
    double added = 0, took = 0;

    if (kvfs_news_create(&config, &news))
        fail("news");
    for (uint64_t i = 0; i < (uint64_t)COUNT * ROUNDS;) {
        double start = now();

        for (uint64_t end = i + COUNT; i < end; i++) {
            struct kvfs_news_item item = {.key_low = low_of(i),
                                          .key_high = high_of(i),
                                          .version = 1 + i,
                                          .generation = 1,
                                          .size = 2 << 20,
                                          .segment = segment_of(i),
                                          .page = 1,
                                          .header_pages = 2,
                                          .mode = 0100644,
                                          .kind = KVFS_POD_HERE,
                                          .hold_ns = 20000000};
            kvfs_news_add(news, &item);
        }
        added += now() - start;
        start = now();
        while (kvfs_news_take(news, UINT64_MAX - 1, out, sizeof(out), &taken) > 0)
            ;
        took += now() - start;
        if (taken.lost)
            fail("news lost");
    }
    printf("news: %.1f ns an add, %.1f ns a record taken\n", added / COUNT / ROUNDS * 1e9, took / COUNT / ROUNDS * 1e9);
    kvfs_news_destroy(news);
}

int main(int argc, char **argv) {
    setvbuf(stdout, NULL, _IOLBF, 0);
    if (argc > 1) {
        for (int i = 1; i < argc; i++)
            bench_map(strtoull(argv[i], NULL, 10));
        return 0;
    }
    bench_news();
    bench_apply_beside_a_table();
    bench_fill(4000000);
    bench_map(1000000);
    bench_map(10000000);
    return 0;
}
