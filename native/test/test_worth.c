/* sources: base block/block_table.c block/block_table_reader.c block/checksum.c block/checksum_avx2.c block/checksum_avx512.c content/worth.c */
/* Worths by class and age, what segments weigh, and the places that the table keeps for it through every change of a record. */
#include "kvfs_worth.h"

#include <math.h>
#include <stdbool.h>

#include "table_records.h"

#define SECRET UINT64_C(0x1234)
#define SEGMENTS 7

static struct kvfs_worths worths;

/* As the pool's policy has it: the chance of a next use falls with age, and rises with hits. */
static double exact(uint32_t hits, double age) { return (1.0 + kvfs_worth_class(hits)) * pow(age + 20, -1.5); }

static void worths_fill(void) {
    static const uint32_t hits_of[KVFS_WORTH_CLASSES] = {0, 1, 2, 3, 5, 9, 20};
    for (uint32_t row = 0; row < KVFS_WORTH_CLASSES; row++)
        for (uint32_t i = 0; i < KVFS_WORTH_AGES; i++)
            worths.worths[row][i] = (float)exact(hits_of[row], kvfs_worth_age(i));
    worths.orphan = 0.25f;
}

static double worth_at(uint32_t tick, uint32_t use, bool orphan) {
    struct kvfs_look look = {.use = use, .orphan = orphan};
    struct kvfs_choice choice = {.tick = tick, .by = KVFS_CHOOSE_HELD};
    CHECK(kvfs_looks_choose(&worths, &look, 1, &choice, &(uint64_t){0}) == 0);
    return look.worth;
}

static void ages_rise_to_the_end_of_the_clock(void) {
    CHECK(kvfs_worth_age(0) == 0 && kvfs_worth_age(KVFS_WORTH_AGES - 1) == 1u << 23 && kvfs_worth_age(KVFS_WORTH_AGES) == UINT32_MAX);
    for (uint32_t i = 1; i < KVFS_WORTH_AGES; i++)
        CHECK(kvfs_worth_age(i) > kvfs_worth_age(i - 1) && (i < 5 || kvfs_worth_age(i) * 4 <= kvfs_worth_age(i - 1) * 5));
    static const uint32_t classes[] = {0, 1, 2, 3, 3, 4, 4, 4, 4, 5};
    for (uint32_t hits = 0; hits < 256; hits++)
        CHECK(kvfs_worth_class(hits) == (hits < 10 ? classes[hits] : hits < 20 ? 5u : 6u));
}

static void worths_lie_on_lines_and_the_clock_goes_round(void) {
    uint64_t seed = 7;
    for (int i = 0; i < 200000; i++) {
        uint32_t age = (uint32_t)random_below(&seed, 1u << random_below(&seed, 24)), hits = (uint32_t)random_below(&seed, 256);
        uint32_t tick = (uint32_t)random_next(&seed) & 0xffffff, use = ((tick - age) & 0xffffff) << 8 | hits;
        double worth = worth_at(tick, use, false), wanted = exact(hits, age);
        CHECK_SAY(worth >= 0.999 * wanted && worth <= 1.03 * wanted, "age %u hits %u: %g, %g", age, hits, worth, wanted);
        /* A use that others added after the tick was read. */
        worth = worth_at((tick - age - 1) & 0xffffff, use, false);
        CHECK_SAY(age || fabs(worth - exact(hits, 0)) <= 1e-3 * worth, "hits %u: %g", hits, worth);
    }
}

static void segments_weigh_what_their_blocks_do(void) {
    enum { BLOCKS = 20000 };
    static uint32_t uses[BLOCKS];
    static uint64_t places[BLOCKS], orphans[BLOCKS / 64 + 1];
    static struct kvfs_ages ages, counted;
    struct kvfs_weight found[SEGMENTS + 1], wanted[SEGMENTS] = {{0}};
    uint64_t seed = 9;
    float price = (float)exact(0, 100);
    for (uint32_t i = 0; i < BLOCKS; i++) {
        uint32_t segment = (uint32_t)random_below(&seed, SEGMENTS + 2), pages = (uint32_t)random_below(&seed, 4);
        uses[i] = (uint32_t)random_next(&seed);
        places[i] = segment | (uint64_t)pages << 32;
        uint8_t orphan = random_below(&seed, 3) == 0;
        orphans[i / 64] |= (uint64_t)orphan << i % 64;
        float worth = (float)worth_at(1000, uses[i], orphan);
        if (segment < SEGMENTS && pages) {
            kvfs_worth_count(&counted, 1000, &uses[i], 1);
            wanted[segment].loss += (double)(worth < price ? worth : price) * pages;
            wanted[segment].pages += pages;
            wanted[segment].count++;
        }
    }
    memset(found, 0x5a, sizeof(found));
    struct kvfs_weighed blocks = {uses, places, orphans, BLOCKS};
    memset(&ages, 0x5a, sizeof(ages));
    kvfs_weigh(&worths, price, 1000, &blocks, found, SEGMENTS, &ages);
    for (uint32_t i = 0; i < SEGMENTS; i++)
        CHECK(found[i].pages == wanted[i].pages && found[i].count == wanted[i].count &&
              fabs(found[i].loss - wanted[i].loss) <= 1e-9 * wanted[i].loss);
    CHECK(found[SEGMENTS].pages == UINT64_C(0x5a5a5a5a5a5a5a5a)); /* there are no more */
    CHECK(memcmp(&ages, &counted, sizeof(ages)) == 0);
    blocks.count = 0;
    kvfs_weigh(&worths, price, 1000, &blocks, found, SEGMENTS, &ages);
    CHECK(found[0].pages == 0 && found[0].loss == 0 && ages.counts[0][0] == 0);
}

static void orphans_are_worth_a_part_and_ages_are_counted_where_they_begin(void) {
    uint32_t uses[] = {1000 << 8, 900 << 8 | 3, 900 << 8 | 3, 1001 << 8};
    static struct kvfs_ages ages;
    double found = worth_at(1000, uses[1], false);
    CHECK(worth_at(1000, uses[2], true) == found * 0.25 && worth_at(1000, uses[0], false) == worth_at(1000, uses[3], false));
    kvfs_worth_count(&ages, 1000, uses, 4);
    uint32_t index = 0;
    while (kvfs_worth_age(index + 1) <= 100)
        index++;
    CHECK(ages.counts[0][0] == 2 && ages.counts[3][index] == 2); /* one was used after the tick was read */
}

static void a_loss_is_by_the_page_that_is_gained(void) {
    static const struct kvfs_weight segments[] = {{8, 8, 0, 3}, {8, 8, 0, 10}, {0, 0, 0, 0}, {0, 0, 0, 1}, {5, 10, 0, 10}};
    static const double wanted[] = {8 / 15.0, 1, 0, HUGE_VAL, 0.5};
    double found[6] = {[5] = 7};
    kvfs_losses(segments, 5, 10, found);
    for (int i = 0; i < 5; i++)
        CHECK(found[i] == wanted[i]);
    CHECK(found[5] == 7);
}

/* As the caller sees them: what is held, and the dearest of the others while the budget lasts; units whole. */
static void blocks_stay_that_are_held_or_worth_their_copy(void) {
    struct kvfs_look looks[] = {
        {.inode = 10, .worth = 3, .pages = 2, .pages_all = 2},
        {.inode = 11, .worth = 5, .pages = 1, .pages_all = 4, .unit = 2},
        {.inode = 12, .worth = 9, .pages = 1, .pages_all = 1, .held = 1},
        {.inode = 13, .worth = 3, .pages = 2, .pages_all = 2, .use = 1},
        {.inode = 14, .worth = 9, .pages = 0, .pages_all = 7, .held = 1}, /* nothing of it is there */
        {.inode = 15, .worth = 5, .pages = 1, .pages_all = 1, .unit = 2},
        {.inode = 16, .worth = 1, .pages = 3, .pages_all = 3},
    };
    enum { COUNT = sizeof(looks) / sizeof(looks[0]) };
    uint64_t copies[COUNT];
    struct kvfs_choice choice = {.price = 1, .budget = 7, .units = 2, .by = KVFS_CHOOSE_WORTH};
    CHECK(kvfs_looks_choose(NULL, looks, COUNT, &choice, copies) == 0);
    CHECK(choice.held == 1 && choice.kept == 3 && choice.gone == 2 && choice.held_pages == 1);
    CHECK(copies[0] == 12 && copies[1] == 10 && copies[2] == 11 && copies[3] == 15); /* of 10 and 13 the older one */
    CHECK(choice.copied_pages == 7 && choice.kept_pages == 4 && choice.lost == 4);
    choice.budget = 4; /* the unit has 5 pages: none of it stays, and what is worth less does */
    CHECK(kvfs_looks_choose(NULL, looks, COUNT, &choice, copies) == 0);
    CHECK(choice.kept == 2 && copies[1] == 10 && copies[2] == 13 && choice.copied_pages == 4 && choice.lost == 11);
    choice.price = HUGE_VAL;
    CHECK(kvfs_looks_choose(NULL, looks, COUNT, &choice, copies) == 0 && choice.kept == 0 && choice.held == 1 && choice.gone == 5);
    choice.by = KVFS_CHOOSE_HITS;
    CHECK(kvfs_looks_choose(NULL, looks, COUNT, &choice, copies) == 0);
    CHECK(choice.held == 2 && choice.held_pages == 3 && copies[0] == 12 && copies[1] == 13 && choice.kept == 0);
    choice.by = KVFS_CHOOSE_HELD;
    CHECK(kvfs_looks_choose(NULL, looks, COUNT, &choice, copies) == 0 && choice.held == 1 && choice.kept == 0);
    looks[4].busy = 1;
    CHECK(kvfs_looks_choose(NULL, looks, COUNT, &choice, copies) == 0 && choice.busy == 1);
    CHECK(kvfs_looks_choose(NULL, looks, 0, &choice, copies) == 0 && !choice.busy && !choice.held && !choice.gone);
}

static uint64_t place_of(const struct kvfs_table *table, uint64_t inode) {
    struct kvfs_record record;
    uint32_t count;
    const uint64_t *places = kvfs_table_places(table, &count);
    if (kvfs_table_find_inode(table, inode, &record) < 0)
        return 0;
    CHECK(record.slot < count);
    return places[record.slot];
}

static uint64_t placed(const struct kvfs_table *table) {
    uint32_t count;
    const uint64_t *places = kvfs_table_places(table, &count);
    uint64_t found = 0;
    for (uint32_t i = 0; i < count; i++)
        found += places[i] != 0;
    return found;
}

static void places_follow_every_change_of_a_record(void) {
    struct kvfs_table *table;
    uint32_t count;
    CHECK(kvfs_table_create(2, SECRET, 1, &table) == 0);
    CHECK(kvfs_table_places(table, &count) && count == 0);
    struct kvfs_record record = {
        .inode = 5, .parent = 1, .version = 1, .size = 4097, .segment = 3, .header_pages = 1, .kind = KVFS_KIND_FILE, .nlink = 1};
    CHECK(kvfs_table_put(table, &record, "a", 1, 0) == 0);
    CHECK(place_of(table, 5) == 0); /* it is not sealed */
    record.flags = KVFS_INODE_SEALED;
    CHECK(kvfs_table_update(table, &record) == 0);
    CHECK(place_of(table, 5) == (3 | UINT64_C(3) << 32));
    record.segment = 0;
    record.size = 0;
    CHECK(kvfs_table_update(table, &record) == 0);
    CHECK(place_of(table, 5) == UINT64_C(1) << 32);
    CHECK(kvfs_table_put(table, &record, "b", 1, 0) == 0); /* a rename, to another slot */
    CHECK(place_of(table, 5) == UINT64_C(1) << 32 && placed(table) == 1);
    struct kvfs_record other = record;
    other.inode = 6;
    other.segment = 9;
    CHECK(kvfs_table_put(table, &other, "b", 1, 1) == 0); /* inode 5 has no name any more */
    CHECK(place_of(table, 5) == 0 && place_of(table, 6) == (9 | UINT64_C(1) << 32));
    CHECK(kvfs_table_remove(table, 6, 0) == 0);
    CHECK(kvfs_table_remove(table, 5, 0) == 0 && placed(table) == 0);
    record.size = (UINT64_C(1) << 48) - 1;
    CHECK(kvfs_table_put(table, &record, "a", 1, 0) == 0);
    CHECK(place_of(table, 5) == (uint64_t)UINT32_MAX << 32); /* as many as there is room for */
    kvfs_table_destroy(table);
}

int main(void) {
    worths_fill();
    RUN(ages_rise_to_the_end_of_the_clock);
    RUN(worths_lie_on_lines_and_the_clock_goes_round);
    RUN(segments_weigh_what_their_blocks_do);
    RUN(orphans_are_worth_a_part_and_ages_are_counted_where_they_begin);
    RUN(a_loss_is_by_the_page_that_is_gained);
    RUN(blocks_stay_that_are_held_or_worth_their_copy);
    RUN(places_follow_every_change_of_a_record);
    return 0;
}
