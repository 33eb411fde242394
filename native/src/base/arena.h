/* Page-aligned payload memory: an arena of slots, each with a count of its users. */
#ifndef KVFS_ARENA_H
#define KVFS_ARENA_H

#include "base/base.h"

#define SMALL_SIZE ((uint64_t)64 << 10) /* of slots for small files, and the unit of bounce buffers */

struct arena;
struct slot {
    uint8_t *data;
    uint64_t size;
    atomic_uint refs;    /* one of its holder, one of each device I/O under way */
    struct arena *arena; /* NULL: allocated beyond the arena */
    struct slot *next;
};
struct arena {
    pthread_mutex_t lock;
    uint8_t *memory;
    uint64_t slot_size;
    uint32_t slot_count, free_count, touched;
    struct slot *slots;
    struct slot *free;
};
int arena_init(struct arena *arena, uint64_t slot_size, uint32_t slot_count);
void arena_free(struct arena *arena);
struct slot *slot_get(struct arena *arena);       /* NULL when empty */
struct slot *slot_get_extra(struct arena *arena); /* beyond the arena when it is empty; NULL: no memory */
void slot_ref(struct slot *slot);
void slot_put(struct slot *slot);
void arena_trim(struct arena *arena); /* give the pages of free slots back */

#endif
