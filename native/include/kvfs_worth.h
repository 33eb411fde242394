/* Worths of blocks for eviction, by their hits and by the time since their last use; and what segments lose that go.
 *
 * A use is a block's tick of last use << 8 | hits, as kvfs_inode_uses() has it. The table is filled by kvfs/store/eviction.py, which decides
 * about worths; here it is looked up. */
#ifndef KVFS_WORTH_H
#define KVFS_WORTH_H

#include <stdint.h>

/* Blocks of one class are worth the same at the same age. Their hits: 0, 1, 2, 3 to 4, 5 to 8, 9 to 19, and more. */
#define KVFS_WORTH_CLASSES 7
/* Ages in ticks: 0, 1, 2, 3, and from 4 on four to an octave, up to 1 << 23. Between two of them worths lie on a line. A use that is
 * ahead of the clock, which others moved on meanwhile, has age 0. */
#define KVFS_WORTH_AGES 89

/* The age of blocks that a user no longer needs; their uses are counted there. No other grows so old by itself: it takes 4,096 pools'
 * worth of writes. */
#define KVFS_DONE_AGE 4194304

/* Only ratios mean something. All are finite and not negative. */
struct kvfs_worths {
    float worths[KVFS_WORTH_CLASSES][KVFS_WORTH_AGES];
    float orphan; /* an orphan (kvfs_chains.h) is worth this part of that */
};

/* Numbers of blocks, by class and by the index of the last age that theirs has reached. */
struct kvfs_ages {
    uint64_t counts[KVFS_WORTH_CLASSES][KVFS_WORTH_AGES];
};

struct kvfs_weight {
    double loss;    /* the sum over the blocks that begin in the segment: pages x the worth, or the price where that is less */
    uint64_t pages; /* of these blocks, header and content, wherever they lie */
    uint64_t count; /* of these blocks */
    uint64_t live;  /* pages of blocks there, also of blocks that begin elsewhere. Set by the caller of kvfs_losses() */
};

uint32_t kvfs_worth_class(uint32_t hits);
uint32_t kvfs_worth_age(uint32_t index); /* the age with this index; UINT32_MAX: there is none */
/* The worth of each use at a tick. orphans: whether its block is one; NULL: none is. */
void kvfs_worth(const struct kvfs_worths *worths, uint32_t tick, const uint32_t *uses, const uint8_t *orphans, uint32_t count, float *out);
/* Count `count` uses at a tick. Threads may count into the same ages. */
void kvfs_worth_count(struct kvfs_ages *ages, uint32_t tick, const uint32_t *uses, uint32_t count);

/* Blocks by their slots, which may change meanwhile. */
struct kvfs_weighed {
    const uint32_t *uses;
    const uint64_t *places;  /* as kvfs_table_places() has them */
    const uint64_t *orphans; /* as kvfs_chains_orphans() has them */
    uint32_t count;
};
/* Weigh segments by these blocks, and count the blocks. Blocks in segments from segment_count on are passed over. */
void kvfs_weigh(const struct kvfs_worths *worths, float price, uint32_t tick, const struct kvfs_weighed *blocks, struct kvfs_weight *segments,
                uint32_t segment_count, struct kvfs_ages *ages);

/* By segment of `area` pages: what goes with it, by the page that is gained. Blocks that begin elsewhere go too, and are taken to be worth as much as
 * the others. Blocks that begin there may be in other segments in part, where room is gained likewise. Where no block begins, nothing is known:
 * infinite, and 0 if it is empty. */
void kvfs_losses(const struct kvfs_weight *segments, uint32_t count, uint64_t area, double *out);

#endif
