/* sources: base/arena.c */
/* Slots of payload memory: reuse, and what goes back to the kernel when nothing happens. */
#include "check.h"

#define CHUNK_SIZE ((uint64_t)1 << 20)

#include <sys/mman.h>

#include "base/arena.h"

#define UNIT ((uint64_t)2 << 20)

static uint64_t resident(const uint8_t *memory, uint64_t size) {
    unsigned char *pages = malloc(size / PAGE);
    uint64_t found = 0;

    CHECK(pages && !mincore((void *)(uintptr_t)memory, size, pages));
    for (uint64_t i = 0; i < size / PAGE; i++)
        found += pages[i] & 1;
    free(pages);
    return found * PAGE;
}

/* Slots of `size` bytes in four units of 2 MiB: all are touched, and the one at `busy` stays in use. */
static void trim(uint64_t size, uint32_t busy) {
    struct arena arena;
    uint32_t count = (uint32_t)(4 * UNIT / size);
    struct slot *slots[4 * 32];

    CHECK(arena_init(&arena, size, count) == 0 && (uintptr_t)arena.memory % UNIT == 0);
    for (uint32_t i = 0; i < count; i++) {
        slots[i] = slot_get(&arena);
        CHECK(slots[i]);
        memset(slots[i]->data, 1, size);
    }
    CHECK(!slot_get(&arena));
    for (uint32_t i = 0; i < count; i++)
        if (i != busy)
            slot_put(slots[i]);
    arena_trim(&arena);
    /* The last four that were given back stay, with the unit that each is in; so does the unit of the one in use. No unit goes in parts. */
    for (uint64_t at = 0; at < 4 * UNIT; at += UNIT) {
        bool kept = slots[busy]->data >= arena.memory + at && slots[busy]->data < arena.memory + at + UNIT;
        for (uint32_t i = count, last = 0; i-- > 0 && last < 4;) {
            last += i != busy;
            kept |= i != busy && slots[i]->data >= arena.memory + at && slots[i]->data < arena.memory + at + UNIT;
        }
        CHECK_SAY(resident(arena.memory + at, UNIT) == (kept ? UNIT : 0), "unit %d of slots of %d bytes: %d bytes are there", (int)(at / UNIT),
                  (int)size, (int)resident(arena.memory + at, UNIT));
    }
    for (uint64_t i = 0; i < size; i += PAGE)
        CHECK(slots[busy]->data[i] == 1);
    slot_put(slots[busy]);
    arena_free(&arena);
}

static void test_trim_gives_back_whole_huge_pages(void) {
    trim(CHUNK_SIZE, 0);
    trim(CHUNK_SIZE, 3);
    trim(SMALL_SIZE, 40);
    trim(UNIT, 1);
}

/* 100 slots of 64 KiB: three units, and a piece that is not one. The first four are given back last, and stay. */
static void test_the_piece_at_the_end_goes_too(void) {
    struct arena arena;
    struct slot *slots[100];

    CHECK(arena_init(&arena, SMALL_SIZE, 100) == 0);
    for (int i = 0; i < 100; i++) {
        slots[i] = slot_get(&arena);
        memset(slots[i]->data, 1, SMALL_SIZE);
    }
    for (int i = 100; i-- > 0;)
        slot_put(slots[i]);
    arena_trim(&arena);
    CHECK(resident(arena.memory, UNIT) == UNIT);
    CHECK(resident(arena.memory + UNIT, 100 * SMALL_SIZE - UNIT) == 0);
    arena_free(&arena);
}

/* A heap would keep it for the next: malloc maps a size once, and takes it from a heap after that. */
static void test_what_is_beyond_the_arena_goes_with_its_last_user(void) {
    const uint64_t sizes[] = {SMALL_SIZE, CHUNK_SIZE, UNIT};
    for (int i = 0; i < 3; i++) {
        struct arena arena;

        CHECK(arena_init(&arena, sizes[i], 1) == 0);
        struct slot *of_arena = slot_get(&arena);
        for (int turn = 0; turn < 3; turn++) {
            struct slot *slot = slot_get_extra(&arena);
            CHECK(of_arena && slot && !slot->arena && slot->size == sizes[i] && (uintptr_t)slot->data % PAGE == 0);
            uint8_t *data = slot->data;
            memset(data, 1, sizes[i]);
            slot_ref(slot);
            slot_put(slot);
            CHECK(resident(data, sizes[i]) == sizes[i]);
            slot_put(slot);
            unsigned char page;
            CHECK_SAY(mincore(data, PAGE, &page) == -1 && errno == ENOMEM, "%d bytes are mapped on, turn %d", (int)sizes[i], turn);
        }
        slot_put(of_arena);
        arena_free(&arena);
    }
}

int main(void) {
    RUN(test_trim_gives_back_whole_huge_pages);
    RUN(test_the_piece_at_the_end_goes_too);
    RUN(test_what_is_beyond_the_arena_goes_with_its_last_user);
    return 0;
}
