/* sources: base block io client pod load/measure.c */
/* kvfs_measure.h on files, many threads at once, for the sanitizers: tests/native/test_bench_verb.py has a pool's kinds. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "kvfs_measure.h"

#define CHECK(condition) ((condition) ? (void)0 : (fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition), exit(1)))
#define BLOCK_SIZE 8192u
#define COUNT 64u
#define SECOND 1000000000u

static char directory_path[] = "/tmp/test-measure-XXXXXX";
static int directory;

static struct kvfs_measure measure_of(uint32_t kind, uint32_t threads, uint64_t duration_ns) {
    return (struct kvfs_measure){.kind = kind,
                                 .threads = threads,
                                 .batch = 1,
                                 .directory = kind >= KVFS_MEASURE_FILE_READ ? directory : -1,
                                 .prefix = "block-",
                                 .block_size = BLOCK_SIZE,
                                 .count = COUNT,
                                 .duration_ns = duration_ns};
}

static uint64_t operations(const struct kvfs_measure *measure) {
    uint64_t sum = 0;
    for (uint32_t i = 0; i < KVFS_MEASURE_BUCKETS; i++)
        sum += measure->histogram[i];
    return sum;
}

/* Each block once; then reads and look-ups, until the time is over. */
static void test_files(void) {
    struct kvfs_measure measure = measure_of(KVFS_MEASURE_FILE_STORE, 8, 60ull * SECOND);
    CHECK(kvfs_measure_run(&measure) == 0 && measure.error == 0);
    CHECK(measure.blocks == COUNT && measure.misses == 0 && operations(&measure) == COUNT);
    CHECK(measure.elapsed_ns > 0 && measure.elapsed_ns < 60ull * SECOND);
    for (uint32_t kind = KVFS_MEASURE_FILE_READ; kind <= KVFS_MEASURE_FILE_LOOKUP; kind += 2) {
        measure = measure_of(kind, KVFS_MEASURE_THREADS_MAX, SECOND / 20);
        CHECK(kvfs_measure_run(&measure) == 0 && measure.error == 0);
        CHECK(measure.blocks > 0 && measure.misses == 0 && operations(&measure) == measure.blocks);
        CHECK(measure.elapsed_ns >= SECOND / 20 && measure.busiest_ns > 0);
    }
}

/* A block that is gone is a miss; all other errors end it, and are told. */
static void test_misses_and_errors(void) {
    struct kvfs_measure measure = measure_of(KVFS_MEASURE_FILE_READ, 4, SECOND / 50);
    measure.prefix = "none-";
    CHECK(kvfs_measure_run(&measure) == 0 && measure.error == 0);
    CHECK(measure.blocks == 0 && measure.misses == operations(&measure) && measure.misses > 0);
    measure = measure_of(KVFS_MEASURE_FILE_READ, 4, 60ull * SECOND);
    measure.block_size = 2 * BLOCK_SIZE; /* the files are shorter */
    CHECK(kvfs_measure_run(&measure) == 0 && measure.error == -EIO && measure.elapsed_ns < 60ull * SECOND);
    measure = measure_of(KVFS_MEASURE_FILE_STORE, 4, 60ull * SECOND);
    measure.prefix = "no/such/directory/";
    CHECK(kvfs_measure_run(&measure) == 0 && measure.error == 0 && measure.misses == COUNT);
}

/* Blocks over two files, in order and at random: each is written where it is read. */
static void test_raw(void) {
    int32_t files[2];
    for (int i = 0; i < 2; i++) {
        char name[32];
        snprintf(name, sizeof(name), "raw-%d", i);
        files[i] = openat(directory, name, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
        CHECK(files[i] >= 0);
    }
    struct kvfs_measure measure = measure_of(KVFS_MEASURE_WRITE, 4, 60ull * SECOND);
    measure.files = files;
    measure.file_count = 2;
    measure.once = 1;
    CHECK(kvfs_measure_run(&measure) == 0 && measure.error == 0 && measure.blocks == COUNT);
    for (int i = 0; i < 2; i++)
        CHECK(lseek(files[i], 0, SEEK_END) == (off_t)COUNT / 2 * BLOCK_SIZE);
    measure.kind = KVFS_MEASURE_READ;
    measure.once = 0;
    measure.duration_ns = SECOND / 20;
    measure.blocks = 0;
    CHECK(kvfs_measure_run(&measure) == 0 && measure.error == 0 && measure.blocks > 0);
    for (int i = 0; i < 2; i++)
        close(files[i]);
}

static void *stop_soon(void *argument) {
    struct kvfs_measure *measure = argument;
    nanosleep(&(struct timespec){.tv_nsec = SECOND / 50}, NULL);
    __atomic_store_n(&measure->stop, 1, __ATOMIC_RELAXED);
    return NULL;
}

static void test_a_stop_ends_it(void) {
    struct kvfs_measure measure = measure_of(KVFS_MEASURE_FILE_LOOKUP, 8, 600ull * SECOND);
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, stop_soon, &measure) == 0);
    CHECK(kvfs_measure_run(&measure) == 0 && measure.error == 0 && measure.elapsed_ns < 600ull * SECOND);
    pthread_join(thread, NULL);
}

int main(void) {
    CHECK(mkdtemp(directory_path));
    directory = open(directory_path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    CHECK(directory >= 0);
    int direct = open(directory_path, O_TMPFILE | O_RDWR | O_DIRECT | O_CLOEXEC, 0600);
    if (direct < 0 && errno == EINVAL) {
        printf("SKIPPED: no O_DIRECT in /tmp\n");
        return rmdir(directory_path);
    }
    close(direct);
    test_files();
    test_misses_and_errors();
    test_raw();
    test_a_stop_ends_it();
    char command[64];
    snprintf(command, sizeof(command), "rm -r %s", directory_path);
    CHECK(system(command) == 0);
    printf("measure: ok\n");
    return 0;
}
