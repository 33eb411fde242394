/* The worth of blocks, and the loss of segments that go. Every block is looked at: with as little as can be for each. */
#include "kvfs_worth.h"

#include <math.h>
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

void kvfs_worth(const struct kvfs_worths *worths, uint32_t tick, const uint32_t *uses, const uint8_t *orphans, uint32_t count, float *out) {
    struct lines lines;
    lines_make(worths, &lines);
    for (uint32_t i = 0; i < count; i++)
        out[i] = worth_of(&lines, aged_of(&lines, tick, uses[i])) * (orphans && orphans[i] ? worths->orphan : 1);
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
