/* Shared by the clients of `tools/bench`: content of blocks, and small helpers. `program` is the name that messages begin with. */
#ifndef KVFS_BENCH_COMMON_H
#define KVFS_BENCH_COMMON_H

#include <inttypes.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>
#include <time.h>

#define PAGE 4096u

static const char program[];

__attribute__((noreturn, format(printf, 1, 2))) static inline void die(const char *format, ...) {
    va_list arguments;
    fprintf(stderr, "%s: ", program);
    va_start(arguments, format);
    vfprintf(stderr, format, arguments);
    va_end(arguments);
    fputc('\n', stderr);
    exit(1);
}

static inline uint64_t now_ns(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (uint64_t)time.tv_sec * 1000000000u + (uint64_t)time.tv_nsec;
}

static inline double seconds_of(struct timeval time) { return (double)time.tv_sec + (double)time.tv_usec / 1e6; }

static inline void *allocate(uint64_t size) {
    void *memory = NULL;
    if (posix_memalign(&memory, PAGE, size ? size : PAGE))
        die("no memory for %" PRIu64 " bytes", size);
    memset(memory, 0, size ? size : PAGE);
    return memory;
}

/* splitmix64 */
static inline uint64_t random64(uint64_t *state) {
    uint64_t x = *state += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

/* Random pages, the same for every block but for a stamp at the head of each page. packable: memory-backed devices keep only that head. */
static inline void content_make(unsigned char *out, uint64_t size, uint64_t seed, bool packable) {
    for (uint64_t i = 0; i < size / 8; i++) {
        uint64_t value = random64(&seed);
        if (!packable || i % 512 < 8)
            memcpy(out + 8 * i, &value, 8);
    }
}

static inline void content_stamp(unsigned char *out, uint64_t size, uint64_t block) {
    for (uint64_t offset = 0; offset + 16 <= size; offset += PAGE) {
        uint64_t stamp[2] = {block, offset};
        memcpy(out + offset, stamp, sizeof(stamp));
    }
}

/* Order for qsort() of latencies. */
static inline int by_value(const void *a, const void *b) {
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return x < y ? -1 : x > y;
}

#endif
