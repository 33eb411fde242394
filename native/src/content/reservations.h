/* Reservations of native clients, as the calls for their frames see them. Not installed. Everything here is called within a step. */
#ifndef KVFS_RESERVATIONS_H
#define KVFS_RESERVATIONS_H

#include "kvfs_frames.h"
#include "names/names.h"

#define RESERVATION_BUCKETS (1u << 14)

struct holder {
    struct kvfs_holder told; /* first */
    struct link reservations;
    struct user *user;
    struct link changed; /* among those whose accounts Python has not taken */
    bool moved;          /* its reservations are others than at the last holder_change() */
};
struct reservation {
    struct reservation *next; /* of its bucket */
    struct link owned;        /* its holder's, while that can do anything with it */
    struct link turn;         /* open: by expiry, or its frame's; then among those that are to be buried */
    struct holder *holder;
    struct version version;
    uint64_t number, until, moves;
    uint64_t parent;                  /* the block before it in its chain, as its client says; 0: not known */
    struct kvfs_inode_record *record; /* as its header is to have it; NULL once it has entered */
    uint32_t pages, run_count;
    bool open;     /* it may be committed */
    bool lent;     /* its holder may be writing to it */
    bool unburied; /* its runs are in flight */
    bool rests;    /* it is not lent any more, and what was under way may still land */
    struct kvfs_run runs[];
};
struct reservations {
    struct reservation *by_number[RESERVATION_BUCKETS];
    struct link open, returned; /* both the oldest first */
    struct link changed;        /* holders */
    atomic_ullong changes;      /* of directories: moves, and those that went or were replaced */
    uint32_t awaited;           /* RESERVEs that wait for pages of others */
    uint64_t last_number, pages, committed, superseded, reclaimed;
    uint64_t gains;                       /* so far: somebody has less than before, of pages or of reservations, or may have more */
    uint64_t resting;                     /* pages without a reservation, where late writes may still land */
    uint64_t share_pages;                 /* kvfs_reservations_limit() */
    uint64_t moves;                       /* of directories so far */
    uint32_t open_count, open_max, users; /* users with clients */
};

uint32_t frame_shard(uint32_t flags, uint32_t directory, const void *name); /* the number of an item's directory (kvfs_frames.h) */
void reservations_init(struct kvfs_plane *plane);
void reservations_free(struct kvfs_plane *plane);
/* Of this holder, open or late. NULL: it has none of that number. */
struct reservation *reservation_find(struct kvfs_plane *plane, const struct holder *holder, uint64_t number);
/* After what was done for it: whether Python has accounts to take. */
bool holder_change(struct kvfs_plane *plane, struct holder *holder);
/* Somebody waits for pages, or there are runs to bury, and something has come since there were so many gains. Then *gains is their number now. */
bool reservations_have_come(struct kvfs_plane *plane, uint64_t *gains);
/* All before the runs of the blocks that entered has ended. */
bool commit_is_settled(struct kvfs_plane *plane, const struct kvfs_commit *frame);
uint8_t *reserve_take_answer(struct kvfs_reserve *frame); /* free() it */
/* Its runs are taken: from now on its holder may write there, and it counts. `made` is the list that it is on until reservations_stamp(). */
void reservation_open(struct kvfs_plane *plane, struct reservation *reservation, struct link *made);
void reservations_stamp(struct kvfs_plane *plane, struct link *made, uint64_t until);
void reservation_charge(struct kvfs_plane *plane, struct holder *holder, uint64_t pages);
/* 0: the holder may reserve so many pages more; KVFS_FRAME_ROOM: others hold them; -ENOSPC. */
int reservation_ask(struct kvfs_plane *plane, const struct holder *holder, uint64_t pages);
void reservation_discharge(struct kvfs_plane *plane, struct holder *holder, uint64_t pages);
/* The block has entered, or never will: its runs end. Returns those to tell once the step is over. Frees it. */
struct settled *reservation_end(struct kvfs_plane *plane, struct reservation *reservation);
/* `late`: the client lives and may write there still. Not `begun`: it never wrote there. */
void reservation_take_back(struct kvfs_plane *plane, struct reservation *reservation, bool late, bool begun);
/* Late writes have landed, or never will. May free it. */
void reservation_end_late(struct kvfs_plane *plane, struct reservation *reservation);

#endif
