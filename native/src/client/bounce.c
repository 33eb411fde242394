/* Memory of a lane that devices can take, for data that lies where they cannot. */
#include "client/client.h"

uint8_t *lane_bounce(struct lane *lane, uint64_t *size) {
    uint64_t wanted = round_up(*size, SMALL_SIZE);
    for (uint32_t i = 0; i < 8; i++)
        if (lane->bounces[i] && lane->bounce_sizes[i] >= wanted) {
            uint8_t *bounce = lane->bounces[i];
            *size = lane->bounce_sizes[i];
            lane->bounces[i] = NULL;
            return bounce;
        }
    void *bounce = NULL;
    *size = wanted;
    return posix_memalign(&bounce, KVFS_PAGE_SIZE, wanted) ? NULL : bounce;
}

void lane_bounce_give(struct lane *lane, uint8_t *bounce, uint64_t size) {
    assert((uintptr_t)bounce % PAGE == 0);
    assert(size % SMALL_SIZE == 0); /* as lane_bounce() made it */
    for (uint32_t i = 0; i < 8 && size <= 8 << 20; i++)
        if (!lane->bounces[i]) {
            lane->bounces[i] = bounce;
            lane->bounce_sizes[i] = size;
            return;
        }
    free(bounce);
}
