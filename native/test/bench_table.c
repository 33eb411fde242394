/* sources: block/block_table.c block/block_table_reader.c block/checksum.c block/checksum_avx2.c block/checksum_avx512.c */
/* Prints ns per lookup and GB/s of leaf verification. Not run by `make check`; run with `make bench`. */
#define _GNU_SOURCE
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "block/checksum.h"
#include "block/table.h"

#define SECRET 0x9e3779b97f4a7c15ULL
#define LOOKUPS 2000000
#define PARENT 7
#define RECORD_SIZE 160
#define COLD_SIZE (64ULL << 20)

static double now(void) {
    struct timespec time;

    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec * 1e-9;
}

static uint64_t seed = 1;

static uint64_t random64(void) {
    uint64_t x = seed += 0x9e3779b97f4a7c15ULL;

    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
    return x ^ (x >> 31);
}

/* As long as the names of a KV cache are: a hash in hexadecimal. */
static uint32_t name_of(uint64_t number, char *out) {
    static const char digits[] = "0123456789abcdef";
    uint64_t bits = number * 0xbf58476d1ce4e5b9ULL;

    for (int i = 0; i < 32; i++)
        out[i] = digits[(i < 16 ? bits >> (4 * i) : number >> (4 * (i - 16))) & 15];
    return 32;
}

static void fail(const char *what) {
    fprintf(stderr, "failed: %s\n", what);
    exit(1);
}

static void bench_table(uint64_t records) {
    struct kvfs_table *table;
    struct kvfs_table *reader;
    struct kvfs_table_statistics statistics;
    struct kvfs_record record;
    char *buffer = calloc(records, RECORD_SIZE);
    char name[32];
    uint64_t digest = 0;
    double start, took;

    if (!buffer || kvfs_table_create(400000000, SECRET, 1, &table))
        fail("create");
    for (uint64_t i = 0; i < records; i++) {
        struct kvfs_inode_record *in = (struct kvfs_inode_record *)(buffer + i * RECORD_SIZE);

        *in = (struct kvfs_inode_record){.record_size = RECORD_SIZE,
                                         .kind = KVFS_KIND_FILE,
                                         .name_size = 32,
                                         .inode = i + 2,
                                         .parent = PARENT,
                                         .size = 1 << 20,
                                         .mode = 0100644,
                                         .nlink = 1,
                                         .header_pages = 1};
        name_of(i, (char *)(in + 1));
    }
    for (int round = 0;; round++) { /* the first has the machine find the memory, which a virtual one pays for twice */
        start = now();
        if (kvfs_table_load(table, buffer, records * RECORD_SIZE) != (int64_t)records)
            fail("load");
        took = now() - start;
        printf("%8lu records: load into new memory %.2f M/s\n", records, (double)records / took / 1e6);
        if (round == 2)
            break;
        kvfs_table_destroy(table);
        if (kvfs_table_create(400000000, SECRET, 1, &table))
            fail("create");
    }
    start = now();
    if (kvfs_table_load(table, buffer, records * RECORD_SIZE) != (int64_t)records)
        fail("load");
    took = now() - start;
    kvfs_table_set_complete(table, 1);
    kvfs_table_statistics(table, &statistics);
    printf("    load again %.2f M/s; %.1f bytes a record, %lu buckets, %lu overflow buckets\n", (double)records / took / 1e6,
           (double)statistics.bytes / (double)records, statistics.buckets, statistics.overflow_buckets);
    if (kvfs_table_attach(kvfs_table_fd(table), SECRET, &reader))
        fail("attach");
    for (int round = 0; round < 2; round++) { /* the first maps the pages */
        start = now();
        for (int i = 0; i < LOOKUPS; i++) {
            if (kvfs_table_find_name(reader, PARENT, name, name_of(random64() % records, name), &record))
                fail("hit by name");
            digest += record.inode;
        }
        took = now() - start;
        printf("    find by name, hit    %6.1f ns\n", took / LOOKUPS * 1e9);
        start = now();
        for (int i = 0; i < LOOKUPS; i++)
            if (kvfs_table_find_name(reader, PARENT + 1, name, name_of(random64() % records, name), &record) != -2)
                fail("miss by name");
        took = now() - start;
        printf("    find by name, miss   %6.1f ns\n", took / LOOKUPS * 1e9);
        start = now();
        for (int i = 0; i < LOOKUPS; i++) {
            if (kvfs_table_find_inode(reader, 2 + random64() % records, &record))
                fail("hit by inode");
            digest += record.inode;
        }
        took = now() - start;
        printf("    find by inode, hit   %6.1f ns\n", took / LOOKUPS * 1e9);
        start = now();
        for (int i = 0; i < LOOKUPS; i++)
            if (kvfs_table_find_inode(reader, 2 + records + random64() % records, &record) != -2)
                fail("miss by inode");
        took = now() - start;
        printf("    find by inode, miss  %6.1f ns\n", took / LOOKUPS * 1e9);
    }
    printf("    digest %lx\n", digest);
    kvfs_table_destroy(reader);
    kvfs_table_destroy(table);
    free(buffer);
}

static double gigabytes(const unsigned char *data, uint64_t size, const uint64_t *sums, int rounds) {
    double start = now();

    for (int i = 0; i < rounds; i++)
        if (kvfs_leaf_verify(data, size, SECRET, sums))
            fail("verify");
    return (double)size * rounds / (now() - start) / 1e9;
}

static void bench_leaves(void) {
    unsigned char *data = aligned_alloc(4096, COLD_SIZE);
    unsigned char *evict = aligned_alloc(4096, COLD_SIZE);
    unsigned char *copy = aligned_alloc(4096, COLD_SIZE);
    uint64_t *sums = malloc(COLD_SIZE / 4096 * 8);
    double start;

    if (!data || !evict || !copy || !sums)
        fail("memory");
    for (uint64_t i = 0; i < COLD_SIZE / 8; i++)
        ((uint64_t *)data)[i] = random64();
    memset(copy, 2, COLD_SIZE);
    kvfs_leaf_checksums(data, COLD_SIZE, SECRET, sums);
    for (int round = 0; round < 3; round++) {
        memset(evict, round, COLD_SIZE);
        double cold = gigabytes(data, COLD_SIZE, sums, 1);
        double hot = gigabytes(data, 16 * 4096, sums, 20000);
        double second = gigabytes(data, 256 * 4096, sums, 1000);

        memset(evict, round, COLD_SIZE);
        start = now();
        kvfs_leaf_checksums_reference(data, COLD_SIZE, SECRET, sums);
        double reference = COLD_SIZE / (now() - start) / 1e9;
        memset(evict, round, COLD_SIZE);
        start = now();
        memcpy(copy, data, COLD_SIZE);
        /* Else the compiler sees that nobody reads the copy. */
        __asm__ volatile("" ::"r"(copy) : "memory");
        double memory = COLD_SIZE / (now() - start) / 1e9;
        start = now();
        for (int i = 0; i < 2000; i++)
            kvfs_leaf_checksums_reference(data, 16 * 4096, SECRET, sums);
        double hot_reference = 16 * 4096 * 2000.0 / (now() - start) / 1e9;

        printf("leaf verify GB/s: 64 KiB hot %.1f, 1 MiB hot %.1f, 64 MiB cold %.1f; reference hot %.1f cold %.1f; memcpy cold %.1f\n", hot, second,
               cold, hot_reference, reference, memory);
    }
}

int main(void) {
    bench_leaves();
    bench_table(10000);
    bench_table(1000000);
    return 0;
}
