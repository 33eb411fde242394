/* sources: content/worth.c */
/* Prints the cost of weighing all segments of a pool, for each block and for each block that is stored. Where segments are many, one part in 256 of
 * them goes between two weighings, as kvfs/store/evictor.py has it. Not run by `make check`. */
#include <stdlib.h>

#include "check.h"
#include "kvfs_worth.h"

#define BLOCKS 1000000u
#define ROUNDS 5

int main(void) {
    static struct kvfs_worths worths;
    static uint32_t uses[BLOCKS];
    static uint64_t places[BLOCKS];
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
            kvfs_weigh(&worths, 0.1f, 2048, uses, places, BLOCKS, weights, segments);
            double took = seconds_of(CLOCK_THREAD_CPUTIME_ID) - start;
            best = took < best ? took : best;
        }
        uint32_t weighings = segments < 256 ? segments : 256; /* while the pool is written once */
        printf("%5u segments: %.1f ns a block, %.2f us a stored block\n", segments, best / BLOCKS * 1e9, best / BLOCKS * 1e6 * weighings);
        free(weights);
    }
    return 0;
}
