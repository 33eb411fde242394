/* sources: content/chains.c */
/* Chains and ghosts against a model of arrays: parents, marks, and ghosts in the order in which they are forgotten. Circles end. */
#include "content/chains.h"

#include <stdbool.h>
#include <string.h>

#include "check.h"

enum { SLOTS = 40, GHOSTS = 16, KEYS = 90, STEPS = 300000, NONE = -1 };

static struct kvfs_chains *chains;

/* The model: by key. A parent is a key, of a block or of a ghost. */
static int slot_of[KEYS], parent_of[KEYS], key_at[SLOTS];
static bool ghost[KEYS], orphan[KEYS];
static uint32_t use_of[KEYS];
static int ring[GHOSTS], hand;

static uint64_t hash_of(int key) { return (uint64_t)(key + 1) * 0x9e3779b97f4a7c15u; }

static bool is_orphan(uint32_t slot) { return kvfs_chains_orphans(chains)[slot / 64] >> slot % 64 & 1; }

static void start(void) {
    CHECK(kvfs_chains_create(SLOTS, GHOSTS, &chains) == 0);
    for (int i = 0; i < KEYS; i++)
        slot_of[i] = parent_of[i] = NONE, ghost[i] = orphan[i] = false;
    for (int i = 0; i < SLOTS; i++)
        key_at[i] = NONE;
    for (int i = 0; i < GHOSTS; i++)
        ring[i] = NONE;
    hand = 0;
}

static void forget(int key) {
    ghost[key] = false;
    parent_of[key] = NONE;
    for (int i = 0; i < KEYS; i++)
        if (parent_of[i] == key)
            parent_of[i] = NONE;
    for (int i = 0; i < GHOSTS; i++)
        if (ring[i] == key)
            ring[i] = NONE;
}

static void model_mark(int key) {
    for (int i = 0; i < KEYS; i++)
        if (parent_of[i] == key) {
            bool deeper = slot_of[i] == NONE || !orphan[i];
            if (slot_of[i] != NONE)
                orphan[i] = true;
            if (deeper)
                model_mark(i);
        }
}

static void leave(int key, bool evicted) {
    uint32_t slot = (uint32_t)slot_of[key];
    kvfs_chains_leave(chains, slot, hash_of(key), use_of[key], evicted);
    model_mark(key);
    key_at[slot] = slot_of[key] = NONE;
    orphan[key] = false;
    if (!evicted) {
        forget(key);
        return;
    }
    if (ring[hand] != NONE)
        forget(ring[hand]);
    ring[hand] = key;
    ghost[key] = true;
    hand = (hand + 1) % GHOSTS;
}

static int behind(int key, int wanted) { /* whether `wanted` is among the parents of key: then it would be a circle */
    for (int i = 0; key != NONE && i < KEYS; i++, key = parent_of[key])
        if (key == wanted)
            return 1;
    return 0;
}

static void compare(uint64_t step) {
    struct kvfs_chains_statistics said;
    kvfs_chains_statistics(chains, &said);
    uint64_t parents = 0, ghosts = 0, uses = 0, found = 0;
    for (int key = 0; key < KEYS; key++) {
        ghosts += ghost[key];
        uses += ghost[key] ? use_of[key] : 0;
        if (slot_of[key] == NONE)
            continue;
        uint32_t slot = (uint32_t)slot_of[key], parent = kvfs_chains_parent(chains, slot);
        int wanted = parent_of[key] != NONE ? slot_of[parent_of[key]] : NONE;
        parents += parent_of[key] != NONE;
        CHECK_SAY((int)parent == wanted, "step %lu: parent of key %d", step, key);
        CHECK_SAY(is_orphan(slot) == orphan[key], "step %lu: key %d an orphan: %d", step, key, orphan[key]);
    }
    uint32_t at = 0, some[5], count;
    while ((count = kvfs_chains_ghosts(chains, &at, some, 5)))
        while (count)
            found += some[--count];
    CHECK_SAY(said.parents == parents && said.ghosts == ghosts && found == uses, "step %lu: %lu %lu, %lu %lu, %lu %lu", step, said.parents, parents,
              said.ghosts, ghosts, found, uses);
}

static void chains_are_as_a_model_has_them(void) {
    uint64_t seed = 3, returned = 0, orphans = 0;
    start();
    for (uint64_t step = 0; step < STEPS; step++) {
        int key = (int)random_below(&seed, KEYS), slot = (int)random_below(&seed, SLOTS), other = (int)random_below(&seed, KEYS);
        uint32_t use = 0;
        switch (random_below(&seed, 6)) {
        case 0:
        case 1:
            if (slot_of[key] != NONE || key_at[slot] != NONE)
                break;
            kvfs_chains_clear(chains, (uint32_t)slot);
            CHECK(kvfs_chains_enter(chains, (uint32_t)slot, hash_of(key), &use) == ghost[key]);
            CHECK(!ghost[key] || use == use_of[key]);
            returned += ghost[key];
            for (int i = 0; i < GHOSTS; i++)
                if (ring[i] == key)
                    ring[i] = NONE;
            if (!ghost[key])
                parent_of[key] = NONE;
            ghost[key] = false;
            slot_of[key] = slot;
            key_at[slot] = key;
            use_of[key] = (uint32_t)step + 1;
            break;
        case 2:
            if (slot_of[key] == NONE || (slot_of[other] == NONE && random_below(&seed, 4)) || (slot_of[other] != NONE && behind(other, key)))
                break;
            kvfs_chains_follow(chains, (uint32_t)slot_of[key], (uint32_t)slot_of[other]);
            parent_of[key] = slot_of[other] == NONE ? NONE : other;
            orphan[key] = false;
            break;
        case 3:
            if (slot_of[key] == NONE || key_at[slot] != NONE)
                break;
            kvfs_chains_move(chains, (uint32_t)slot_of[key], (uint32_t)slot);
            key_at[slot_of[key]] = NONE;
            key_at[slot] = key;
            slot_of[key] = slot;
            break;
        case 4:
            if (slot_of[key] != NONE) {
                orphans += orphan[key];
                leave(key, random_below(&seed, 4) > 0);
            }
            break;
        default:
            if (slot_of[key] != NONE) {
                kvfs_chains_used(chains, (uint32_t)slot_of[key]);
                orphan[key] = false;
            }
        }
        compare(step);
    }
    CHECK(returned > 1000 && orphans > 1000);
    kvfs_chains_destroy(chains);
}

static void circles_end(void) {
    CHECK(kvfs_chains_create(100, 0, &chains) == 0);
    for (uint32_t i = 0; i < 100; i++)
        kvfs_chains_follow(chains, i, (i + 1) % 100);
    kvfs_chains_follow(chains, 7, 7);
    CHECK(kvfs_chains_parent(chains, 7) == UINT32_MAX);
    kvfs_chains_follow(chains, 7, 8);
    kvfs_chains_leave(chains, 50, 1, 0, 1);
    for (uint32_t i = 0; i < 100; i++)
        CHECK(is_orphan(i) == (i != 50));
    kvfs_chains_destroy(chains);
}

/* As many as fit, then one for each that has left, from wherever among them. So what a parent's eviction takes is bounded. */
static void children_are_bounded(void) {
    enum { MOST = 65536, MORE = 100 };
    struct kvfs_chains_statistics said;
    uint64_t seed = 5;
    uint32_t use;
    CHECK(kvfs_chains_create(MOST + MORE + 1, 4, &chains) == 0);
    for (uint32_t slot = 1; slot <= MOST + MORE; slot++)
        kvfs_chains_follow(chains, slot, 0);
    for (uint32_t round = 0; round < 2 * MORE; round++) {
        kvfs_chains_statistics(chains, &said);
        CHECK(said.parents == MOST);
        uint32_t slot = round == 0 ? 1 : round == 1 ? MOST : 1 + (uint32_t)random_below(&seed, MOST), late = MOST + 1 + round % MORE;
        bool known = kvfs_chains_parent(chains, slot) == 0, late_known = kvfs_chains_parent(chains, late) == 0;
        kvfs_chains_follow(chains, slot, UINT32_MAX);
        kvfs_chains_follow(chains, late, 0);
        CHECK(kvfs_chains_parent(chains, late) == (known || late_known ? 0 : UINT32_MAX));
        kvfs_chains_follow(chains, slot, 0);
        if (round == MORE) { /* the parent goes, and comes back: still as many */
            kvfs_chains_leave(chains, 0, 9, 1, 1);
            CHECK(kvfs_chains_parent(chains, late) == UINT32_MAX && kvfs_chains_enter(chains, 0, 9, &use) == 1);
        }
    }
    kvfs_chains_destroy(chains);
}

static void what_cannot_be_is_refused(void) {
    CHECK(kvfs_chains_create(0, 5, &chains) < 0);
    CHECK(kvfs_chains_create(UINT32_MAX, 0, &chains) < 0);
    CHECK(kvfs_chains_create(UINT32_MAX - 5, 5, &chains) < 0);
    kvfs_chains_destroy(NULL);
}

int main(void) {
    RUN(chains_are_as_a_model_has_them);
    RUN(circles_end);
    RUN(children_are_bounded);
    RUN(what_cannot_be_is_refused);
    return 0;
}
