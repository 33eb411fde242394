/* The worth of blocks, the loss of segments that go, and which of a segment's blocks stay. Every block is looked at: with as little as can be for
 * each. */
#include "kvfs_worth.h"

#include <errno.h>
#include <math.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#define TICK_MASK 0xffffffu
#define AGE_END 0x800000u /* half of the clock: from there on a use is ahead of it */
#define OCTAVE_FIRST 2u   /* ages from 4 on have four indexes an octave */

/* The index of the last age that is not greater. */
static inline uint32_t age_index(uint32_t age) {
    if (age < 1u << OCTAVE_FIRST)
        return age;
    uint32_t octave = 31 - (uint32_t)__builtin_clz(age);
    return 4 * (octave - 1) + (age >> (octave - 2) & 3);
}

uint32_t kvfs_worth_age(uint32_t index) {
    if (index < 1u << OCTAVE_FIRST)
        return index;
    uint32_t octave = index / 4 + 1;
    return index < KVFS_WORTH_AGES ? (4 + index % 4) << (octave - 2) : UINT32_MAX;
}

uint32_t kvfs_worth_class(uint32_t hits) {
    static const uint32_t last[KVFS_WORTH_CLASSES - 1] = {0, 1, 2, 4, 8, 19};
    uint32_t row = 0;
    while (row < KVFS_WORTH_CLASSES - 1 && hits > last[row])
        row++;
    return row;
}

/* The line from each age to the next: worth = start + slope * age. */
struct lines {
    float start[KVFS_WORTH_CLASSES][KVFS_WORTH_AGES], slope[KVFS_WORTH_CLASSES][KVFS_WORTH_AGES];
    uint8_t classes[256];
};

static void lines_make(const struct kvfs_worths *worths, struct lines *lines) {
    for (uint32_t hits = 0; hits < 256; hits++)
        lines->classes[hits] = (uint8_t)kvfs_worth_class(hits);
    for (uint32_t row = 0; row < KVFS_WORTH_CLASSES; row++)
        for (uint32_t i = 0; i < KVFS_WORTH_AGES; i++) {
            const float *worth = &worths->worths[row][i];
            double age = kvfs_worth_age(i), slope = 0;
            if (i + 1 < KVFS_WORTH_AGES)
                slope = ((double)worth[1] - worth[0]) / (kvfs_worth_age(i + 1) - age);
            lines->slope[row][i] = (float)slope;
            lines->start[row][i] = (float)(worth[0] - slope * age);
        }
}

struct aged {
    uint32_t row, index, age;
};

static inline uint32_t age_of(uint32_t tick, uint32_t use) {
    uint32_t age = (tick - (use >> 8)) & TICK_MASK;
    return age < AGE_END ? age : 0;
}

static inline struct aged aged_of(const struct lines *lines, uint32_t tick, uint32_t use) {
    uint32_t age = age_of(tick, use);
    return (struct aged){lines->classes[use & 0xff], age_index(age), age};
}

static inline float worth_of(const struct lines *lines, struct aged at) {
    return lines->start[at.row][at.index] + lines->slope[at.row][at.index] * (float)at.age;
}

void kvfs_worth_count(struct kvfs_ages *ages, uint32_t tick, const uint32_t *uses, uint32_t count) {
    for (uint32_t i = 0; i < count; i++) {
        uint32_t age = age_of(tick, uses[i]);
        __atomic_fetch_add(&ages->counts[kvfs_worth_class(uses[i] & 0xff)][age_index(age)], 1, __ATOMIC_RELAXED);
    }
}

void kvfs_weigh(const struct kvfs_worths *worths, float price, uint32_t tick, const struct kvfs_weighed *blocks, struct kvfs_weight *segments,
                uint32_t segment_count, struct kvfs_ages *ages) {
    struct lines lines;
    lines_make(worths, &lines);
    memset(segments, 0, segment_count * sizeof(*segments));
    memset(ages, 0, sizeof(*ages));
    for (uint32_t slot = 0; slot < blocks->count; slot++) {
        uint64_t place = __atomic_load_n(&blocks->places[slot], __ATOMIC_RELAXED);
        uint32_t segment = (uint32_t)place, pages = (uint32_t)(place >> 32);
        if (!pages || segment >= segment_count)
            continue;
        struct aged at = aged_of(&lines, tick, __atomic_load_n(&blocks->uses[slot], __ATOMIC_RELAXED));
        float worth = worth_of(&lines, at);
        if (__atomic_load_n(&blocks->orphans[slot / 64], __ATOMIC_RELAXED) >> slot % 64 & 1)
            worth *= worths->orphan;
        ages->counts[at.row][at.index]++;
        segments[segment].loss += (double)(worth < price ? worth : price) * pages;
        segments[segment].pages += pages;
        segments[segment].count++;
    }
}

void kvfs_losses(const struct kvfs_weight *segments, uint32_t count, uint64_t area, double *out) {
    for (uint32_t i = 0; i < count; i++) {
        double loss = segments[i].loss, pages = (double)segments[i].pages, live = (double)segments[i].live, size = (double)area;
        if (pages == 0)
            out[i] = live > 0 ? HUGE_VAL : 0;
        else
            out[i] = live > pages ? loss * (live / pages) / size : loss / (size + pages - live);
    }
}

/* ---- which blocks of a segment stay ---- */

static void looks_weigh(const struct kvfs_worths *worths, uint32_t tick, struct kvfs_look *looks, uint32_t count) {
    struct lines lines;
    lines_make(worths, &lines);
    for (uint32_t i = 0; i < count; i++)
        looks[i].worth = (double)(worth_of(&lines, aged_of(&lines, tick, looks[i].use)) * (looks[i].orphan ? worths->orphan : 1));
}

struct candidate {
    double worth;
    uint32_t at;
    bool kept;
};

struct unit {
    uint64_t pages, pages_all;
    bool kept;
};

static int dearest_first(const void *a, const void *b) {
    const struct candidate *x = a, *y = b;
    if (x->worth != y->worth)
        return x->worth < y->worth ? 1 : -1;
    return x->at < y->at ? -1 : x->at > y->at;
}

static int first_first(const void *a, const void *b) {
    const struct candidate *x = a, *y = b;
    return x->at < y->at ? -1 : x->at > y->at;
}

/* It stays, whatever it is worth. */
static bool look_stays(const struct kvfs_look *look, const struct kvfs_choice *choice) {
    return look->held || (choice->by == KVFS_CHOOSE_HITS && look->use & 0xff);
}

/* The blocks that may be kept for their worth. Their units come to know how large they are. */
static uint32_t candidates_find(const struct kvfs_look *looks, uint32_t count, const struct kvfs_choice *choice, struct candidate *found,
                                struct unit *units) {
    uint32_t candidates = 0;
    for (uint32_t i = 0; i < count; i++) {
        const struct kvfs_look *look = &looks[i];
        if (!look->pages || look_stays(look, choice))
            continue;
        struct unit *unit = look->unit && look->unit <= choice->units ? &units[look->unit] : NULL;
        if (unit) {
            unit->pages += look->pages;
            unit->pages_all += look->pages_all;
        }
        if (look->worth > choice->price)
            found[candidates++] = (struct candidate){look->worth, i, false};
    }
    return candidates;
}

/* Keep as many as the budget allows. Of a unit the first that comes decides for all: they are worth the same. */
static void candidates_keep(const struct kvfs_look *looks, struct kvfs_choice *choice, struct candidate *found, uint32_t count, struct unit *units) {
    qsort(found, count, sizeof(*found), dearest_first);
    for (uint32_t i = 0; i < count; i++) {
        const struct kvfs_look *look = &looks[found[i].at];
        struct unit alone = {look->pages, look->pages_all, false};
        struct unit *unit = look->unit && look->unit <= choice->units ? &units[look->unit] : &alone;
        if (!unit->kept && choice->copied_pages + unit->pages_all <= choice->budget) {
            unit->kept = true;
            choice->kept_pages += unit->pages;
            choice->copied_pages += unit->pages_all;
        }
        found[i].kept = unit->kept;
    }
    qsort(found, count, sizeof(*found), first_first);
}

int kvfs_looks_choose(const struct kvfs_worths *worths, struct kvfs_look *looks, uint32_t count, struct kvfs_choice *choice, uint64_t *copies) {
    struct kvfs_choice chosen = {.price = choice->price, .budget = choice->budget, .tick = choice->tick, .units = choice->units, .by = choice->by};
    if (worths)
        looks_weigh(worths, choice->tick, looks, count);
    for (uint32_t i = 0; i < count; i++)
        chosen.busy += looks[i].busy;
    *choice = chosen;
    if (chosen.busy)
        return 0;
    struct candidate *found = NULL;
    struct unit *units = NULL;
    uint32_t candidates = 0;
    if (chosen.by == KVFS_CHOOSE_WORTH) {
        found = calloc((size_t)count + 1, sizeof(*found));
        units = calloc((size_t)chosen.units + 1, sizeof(*units));
        if (!found || !units) {
            free(found);
            free(units);
            return -ENOMEM;
        }
        candidates = candidates_find(looks, count, &chosen, found, units);
        candidates_keep(looks, &chosen, found, candidates, units);
    }
    for (uint32_t i = 0; i < count; i++)
        if (looks[i].pages && look_stays(&looks[i], &chosen)) {
            chosen.held_pages += looks[i].pages_all;
            copies[chosen.held++] = looks[i].inode;
        }
    uint32_t next = 0;
    for (uint32_t i = 0; i < count; i++) {
        if (!looks[i].pages || look_stays(&looks[i], &chosen))
            continue;
        bool kept = next < candidates && found[next].at == i && found[next].kept;
        next += next < candidates && found[next].at == i;
        if (kept)
            copies[chosen.held + chosen.kept++] = looks[i].inode;
        else {
            chosen.lost += looks[i].worth;
            chosen.gone++;
        }
    }
    free(found);
    free(units);
    *choice = chosen;
    return 0;
}
