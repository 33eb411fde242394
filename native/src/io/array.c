/* The devices of a pool: what a daemon and a native client make of its geometry. */
#include "io/array.h"

int array_init(struct kvfs_array *array, const struct geometry *geometry, uint32_t device_count) {
    uint64_t members = (uint64_t)geometry->segment_count * geometry->stripe_width;
    array->geometry = *geometry;
    array->geometry.segment_size = geometry->zone_size * geometry->stripe_width;
    array->geometry.segment_pages = (uint32_t)pages_of(array->geometry.segment_size);
    array->device_count = device_count;
    array->devices = calloc(device_count, sizeof(*array->devices));
    array->members = calloc(members, sizeof(*array->members));
    array->segment_busy = calloc(geometry->segment_count, sizeof(*array->segment_busy));
    return array->devices && array->members && array->segment_busy ? 0 : -ENOMEM;
}

void array_free(struct kvfs_array *array) {
    free(array->segment_busy);
    free(array->members);
    free(array->devices);
}
