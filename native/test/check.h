/* What the C tests share: CHECK, and a small seeded generator. */
#ifndef KVFS_TEST_CHECK_H
#define KVFS_TEST_CHECK_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

/* Add what helps to repeat a failure, say the seed, as a printf format and its arguments. */
#define CHECK_SAY(condition, ...)                                                           \
    do {                                                                                    \
        if (!(condition)) {                                                                 \
            fprintf(stderr, "%s:%d: %s is false: ", __FILE__, __LINE__, #condition);        \
            fprintf(stderr, __VA_ARGS__);                                                   \
            fputc('\n', stderr);                                                            \
            exit(1);                                                                        \
        }                                                                                   \
    } while (0)
#define CHECK(condition) CHECK_SAY(condition, "-")

#define RUN(test)                 \
    do {                          \
        test();                   \
        printf("ok %s\n", #test); \
        fflush(stdout);           \
    } while (0)

/* splitmix64 */
static inline uint64_t random_next(uint64_t *state)
{
    uint64_t x = *state += 0x9e3779b97f4a7c15ULL;

    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
    return x ^ (x >> 31);
}

static inline uint64_t random_below(uint64_t *state, uint64_t limit)
{
    return random_next(state) % limit;
}

#endif
