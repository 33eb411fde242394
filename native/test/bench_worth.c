/* sources: content/chains.c content/worth.c */
/* Prints the cost of weighing all segments of a pool, for each block and for each block that is stored. Where segments are many, one part in 256 of
 * them goes between two weighings, as kvfs/store/evictor.py has it. And the cost of learning: two ghosts a block are counted 64 times while the pool is
 * written. Not run by `make check`. */
#include <stdlib.h>

#include "check.h"
#include "content/chains.h"
#include "kvfs_worth.h"

#define BLOCKS 1000000u
#define ROUNDS 5

int main(void) {
    static struct kvfs_worths worths;
    static uint32_t uses[BLOCKS];
    static uint64_t places[BLOCKS], orphans[BLOCKS / 64 + 1];
    static struct kvfs_ages ages;
    uint64_t seed = 1;
    for (uint32_t i = 0; i < KVFS_WORTH_CLASSES * KVFS_WORTH_AGES; i++)
        worths.worths[i / KVFS_WORTH_AGES][i % KVFS_WORTH_AGES] = 1 / (float)(1 + i % KVFS_WORTH_AGES);
    for (uint32_t segments = 64; segments <= 65536; segments *= segments < 256 ? 4 : 16) {
        struct kvfs_weight *weights = calloc(segments, sizeof(*weights));
        CHECK(weights);
        for (uint32_t i = 0; i < BLOCKS; i++) {
            uses[i] = (uint32_t)random_below(&seed, 2048) << 8 | (uint32_t)(random_below(&seed, 4) ? 0 : random_below(&seed, 8));
            places[i] = random_below(&seed, segments) | UINT64_C(1) << 32;
        }
        double best = 1;
        for (int round = 0; round < ROUNDS; round++) {
            double start = seconds_of(CLOCK_THREAD_CPUTIME_ID);
            const struct kvfs_weighed blocks = {uses, places, orphans, BLOCKS};
            kvfs_weigh(&worths, 0.1f, 2048, &blocks, weights, segments, &ages);
            double took = seconds_of(CLOCK_THREAD_CPUTIME_ID) - start;
            best = took < best ? took : best;
        }
        uint32_t weighings = segments < 256 ? segments : 256; /* while the pool is written once */
        printf("%5u segments: %.1f ns a block, %.2f us a stored block\n", segments, best / BLOCKS * 1e9, best / BLOCKS * 1e6 * weighings);
        free(weights);
    }
    struct kvfs_chains *chains;
    CHECK(kvfs_chains_create(1, 2 * BLOCKS, &chains) == 0);
    for (uint32_t i = 1; i <= 2 * BLOCKS; i++)
        kvfs_chains_leave(chains, 0, i * UINT64_C(0x9e3779b97f4a7c15), uses[i % BLOCKS], 1);
    double start = seconds_of(CLOCK_THREAD_CPUTIME_ID);
    uint32_t at = 0, count, some[1024];
    while ((count = kvfs_chains_ghosts(chains, &at, some, 1024)))
        kvfs_worth_count(&ages, 2048, some, count);
    double took = seconds_of(CLOCK_THREAD_CPUTIME_ID) - start;
    printf("ghosts: %.1f ns each, %.2f us a stored block; %.1f bytes a block for chains and as many ghosts\n", took / BLOCKS / 2 * 1e9,
           took / BLOCKS * 1e6 * 64, 16.0 + 16 + 16 + 4 + 1.0 / 8);
    kvfs_chains_destroy(chains);
    return 0;
}
