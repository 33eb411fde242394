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

/* ---- which blocks of a segment stay when it is emptied ---- */

/* A block, as eviction looks at it (kvfs_blocks_look()). The caller may say more of it before it chooses. */
struct kvfs_look {
    uint64_t inode;
    double worth;
    uint32_t pages;     /* in the segment; 0: it has nothing */
    uint32_t pages_all; /* in all segments */
    uint32_t use;
    uint32_t unit;  /* blocks of one unit, from 1 on, are kept together or go together; 0: it is alone. By the caller */
    uint8_t open;   /* enum kvfs_open_state */
    uint8_t absent; /* 1: nothing else is known before kvfs_names_load() of its record */
    uint8_t orphan;
    uint8_t held; /* it stays, whatever it is worth: open, leased, or as the caller says */
    uint8_t busy; /* it cannot even be copied now: being written, or as the caller says */
    uint8_t reserved[3];
};
enum kvfs_choose_by {
    KVFS_CHOOSE_HELD,  /* keep what is held alone */
    KVFS_CHOOSE_HITS,  /* and all that had a hit, as if it was held */
    KVFS_CHOOSE_WORTH, /* and what is worth more than the price, the dearest first, within the budget; the older of two equal ones */
};
struct kvfs_choice {
    double price;    /* in, as are those up to `by` */
    uint64_t budget; /* of pages copied */
    uint32_t tick;   /* now */
    uint32_t units;  /* the last unit */
    uint32_t by;     /* enum kvfs_choose_by */
    uint32_t reserved;
    /* Out. */
    double lost;               /* the worth of those that go */
    uint64_t held_pages;       /* in all segments */
    uint64_t kept_pages;       /* in this segment, of those that are kept for their worth */
    uint64_t copied_pages;     /* of the same, in all segments */
    uint32_t busy;             /* blocks that are: then nothing can be done, and the rest is not set */
    uint32_t held, kept, gone; /* blocks */
};
/* Set the worths of the blocks (not where `worths` is NULL: then they are as the caller says), and choose. copies: room for `count` inodes; those that
 * are held, then those that are kept for their worth, both in the order of `looks`. -ENOMEM. */
int kvfs_looks_choose(const struct kvfs_worths *worths, struct kvfs_look *looks, uint32_t count, struct kvfs_choice *choice, uint64_t *copies);

#endif
