/* Shared by the C tests: CHECK, and a small seeded generator. */
#ifndef KVFS_TEST_CHECK_H
#define KVFS_TEST_CHECK_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

/* Add what helps to repeat a failure, say the seed, as a printf format and its arguments. */
#define CHECK_SAY(condition, ...)                                                    \
    do {                                                                             \
        if (!(condition)) {                                                          \
            fprintf(stderr, "%s:%d: %s is false: ", __FILE__, __LINE__, #condition); \
            fprintf(stderr, __VA_ARGS__);                                            \
            fputc('\n', stderr);                                                     \
            exit(1);                                                                 \
        }                                                                            \
    } while (0)
#define CHECK(condition) CHECK_SAY(condition, "-")

#define RUN(test)                 \
    do {                          \
        test();                   \
        printf("ok %s\n", #test); \
        fflush(stdout);           \
    } while (0)

static inline double seconds_of(clockid_t clock) {
    struct timespec ts;

    clock_gettime(clock, &ts);
    return (double)ts.tv_sec + (double)ts.tv_nsec / 1e9;
}

/* By what a test multiplies its deadlines: 3 on an idle machine, for it may not stay so, more where others have the CPU. Measured once, which
 * takes 0.4 s. */
static inline uint32_t slowness(void) {
    static uint32_t known;
    double worst = 1;

    for (int i = 0; !known && i < 8; i++) {
        double wall = seconds_of(CLOCK_MONOTONIC), cpu = seconds_of(CLOCK_THREAD_CPUTIME_ID), used;
        while ((used = seconds_of(CLOCK_THREAD_CPUTIME_ID) - cpu) < 0.025)
            ;
        wall = (seconds_of(CLOCK_MONOTONIC) - wall) / used;
        worst = wall > worst ? wall : worst;
        nanosleep(&(struct timespec){.tv_nsec = 25000000}, NULL);
    }
    if (!known)
        known = worst < 1.5 ? 3 : worst > 3 ? 6 : (uint32_t)(2 * worst);
    return known;
}

/* Where a test makes its devices: $TMPDIR, or memory, for a disk may pause for longer than the deadlines of a test. */
static inline const char *scratch(void) {
    const char *given = getenv("TMPDIR");

    return given ? given : access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp";
}

/* splitmix64 */
static inline uint64_t random_next(uint64_t *state) {
    uint64_t x = *state += 0x9e3779b97f4a7c15ULL;

    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
    return x ^ (x >> 31);
}

static inline uint64_t random_below(uint64_t *state, uint64_t limit) { return random_next(state) % limit; }

#endif
