/* Page-aligned payload memory in fixed slots, reused last in first out so that an idle pool stays small. */
#include "base/arena.h"

#include <sys/mman.h>

/* Slots are aligned to these, so that huge pages back them where the kernel grants them: fewer pages to pin for each I/O. */
#define UNIT ((uint64_t)2 << 20)

int arena_init(struct arena *arena, uint64_t slot_size, uint32_t slot_count) {
    memset(arena, 0, sizeof(*arena));
    pthread_mutex_init(&arena->lock, NULL);
    uint64_t size = slot_size * slot_count;
    uint8_t *memory = mmap(NULL, size + UNIT, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED)
        return -ENOMEM;
    uint8_t *start = (uint8_t *)round_up((uint64_t)(uintptr_t)memory, UNIT);
    if (start > memory)
        munmap(memory, (size_t)(start - memory));
    uint64_t tail = UNIT - (uint64_t)(start - memory);
    if (tail)
        munmap(start + size, tail);
    madvise(start, size, MADV_HUGEPAGE);
    arena->memory = start;
    arena->slot_size = slot_size;
    arena->slot_count = slot_count;
    arena->slots = calloc(slot_count, sizeof(struct slot));
    if (!arena->slots) {
        munmap(start, size);
        arena->memory = NULL;
        return -ENOMEM;
    }
    for (uint32_t i = slot_count; i-- > 0;) {
        struct slot *slot = &arena->slots[i];
        slot->data = start + (uint64_t)i * slot_size;
        slot->size = slot_size;
        slot->arena = arena;
        slot->next = arena->free;
        arena->free = slot;
    }
    arena->free_count = slot_count;
    return 0;
}

void arena_free(struct arena *arena) {
    if (!arena->memory)
        return;
    munmap(arena->memory, arena->slot_size * arena->slot_count);
    free(arena->slots);
    pthread_mutex_destroy(&arena->lock);
    arena->memory = NULL;
}

struct slot *slot_get(struct arena *arena) {
    pthread_mutex_lock(&arena->lock);
    struct slot *slot = arena->free;
    if (slot) {
        arena->free = slot->next;
        arena->free_count--;
        uint32_t index = (uint32_t)(slot - arena->slots);
        if (index >= arena->touched)
            arena->touched = index + 1;
        atomic_store_explicit(&slot->refs, 1, memory_order_relaxed);
    }
    pthread_mutex_unlock(&arena->lock);
    return slot;
}

struct slot *slot_get_extra(struct arena *arena) {
    struct slot *slot = slot_get(arena);
    if (slot)
        return slot;
    slot = calloc(1, sizeof(*slot));
    if (!slot)
        return NULL;
    /* Not from malloc: its heaps keep much of what such sizes leave behind, each thread's own, and a container's limit counts that. */
    void *data = mmap(NULL, arena->slot_size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data == MAP_FAILED) {
        free(slot);
        return NULL;
    }
    slot->data = data;
    slot->size = arena->slot_size;
    atomic_store(&slot->refs, 1);
    return slot;
}

void slot_ref(struct slot *slot) {
    unsigned before = atomic_fetch_add_explicit(&slot->refs, 1, memory_order_relaxed);
    assert(before > 0);
}

void slot_put(struct slot *slot) {
    if (!slot)
        return;
    unsigned before = atomic_fetch_sub_explicit(&slot->refs, 1, memory_order_acq_rel);
    assert(before > 0);
    if (before != 1)
        return;
    struct arena *arena = slot->arena;
    if (!arena) {
        munmap(slot->data, slot->size);
        free(slot);
        return;
    }
    pthread_mutex_lock(&arena->lock);
    slot->next = arena->free;
    arena->free = slot;
    arena->free_count++;
    pthread_mutex_unlock(&arena->lock);
}

/* Whole huge pages: one that is given back in parts comes back as small ones, for good. */
void arena_trim(struct arena *arena) {
    uint64_t size = arena->slot_size * arena->slot_count;
    uint32_t each = arena->slot_size < UNIT ? (uint32_t)(UNIT / arena->slot_size) : 1;
    uint64_t unit = each * arena->slot_size;
    uint32_t *free_slots = calloc(arena->slot_count / each + 1, sizeof(*free_slots));
    if (!free_slots)
        return;
    pthread_mutex_lock(&arena->lock);
    uint32_t kept = 0; /* a few stay, for the next request */
    for (struct slot *slot = arena->free; slot; slot = slot->next) {
        uint32_t index = (uint32_t)(slot - arena->slots);
        free_slots[index / each] += index >= arena->touched || kept++ >= 4;
    }
    for (uint64_t at = 0; at < size && at < arena->touched * arena->slot_size; at += unit)
        if (free_slots[at / unit] == min_u64(each, (size - at) / arena->slot_size))
            madvise(arena->memory + at, min_u64(unit, size - at), MADV_DONTNEED);
    pthread_mutex_unlock(&arena->lock);
    free(free_slots);
}
