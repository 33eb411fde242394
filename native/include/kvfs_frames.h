/* Requests of native clients, one call for many blocks: places for blocks that they write themselves, the names of these blocks, and removals.
 *
 * A reservation has a place, an inode number and a version. Until its commit nothing leads to it. Then the block enters names, table and places in
 * one step (I4), under the rules of kvfs/store/reservations.py. Frames are as in kvfs_wire.h, without their heads; every byte may be a
 * liar's. A call handles KVFS_FRAME_PART items at most, so that no thread waits long for a step. A frame is one thread's at a time, a lease the
 * control plane's; all else is within steps. 0, a count, or -errno.
 */
#ifndef KVFS_FRAMES_H
#define KVFS_FRAMES_H

#include "kvfs_plane.h"

#define KVFS_FRAME_PART 64
/* An item of RESERVE in its answer, as is usual. One with many directories above it takes more, of what its user has left of all memory that
 * native clients may have (kvfs_clients.h). Where nothing is left an item finds no place. */
#define KVFS_RESERVED_SIZE 512u
#define KVFS_CLIENT_MEMORY 67108864u
#define KVFS_SHARDS 256

/* A directory that a frame's items are in. With a table of directories it has its number there. Without one it is that of the keys that begin with
 * two digits, and has their number. */
struct kvfs_shard {
    uint64_t directory; /* 0: it is not known, or there is none */
    uint32_t gid;       /* of new files there */
    int32_t error;      /* of every reservation there */
};

/* RESERVE, COMMIT or DELETE (enum wire_type): -EINVAL unless `size` bytes are `count` items as a frame with these flags (enum wire_flag) has them.
 * directories: in its table, 0 without one. Returns how many numbers of directories occur that are not among the known; they are written to
 * `missing`. */
int kvfs_frame_check(uint32_t type, uint32_t flags, const void *items, uint64_t size, uint32_t count, uint32_t directories,
                     const struct kvfs_shard known[KVFS_SHARDS], uint8_t missing[KVFS_SHARDS]);

/* ---- holders ---- */

/* One client. Only to be read, within a step. */
struct kvfs_holder {
    uint64_t open_pages;   /* of places it may commit */
    uint64_t pages;        /* and of places taken back, and not buried yet */
    uint64_t late_pages;   /* of buried places, where it may write all the same until it says that it cannot */
    uint64_t rested_pages; /* so far: of places that ended with segments that rest, as late writes may land there */
    uint32_t open;         /* reservations that it may commit */
    uint32_t count;        /* all that are left of it; with 0 it can be freed */
};
struct kvfs_holder *kvfs_holder_create(struct kvfs_plane *plane, uint32_t uid); /* NULL: no memory */
/* It is gone: everything that it has not committed is taken back. */
void kvfs_holder_leave(struct kvfs_plane *plane, struct kvfs_holder *holder);
void kvfs_holder_free(struct kvfs_plane *plane, struct kvfs_holder *holder);
/* When the oldest of its reservations has expired where it may write all the same; UINT64_MAX: it has none. */
uint64_t kvfs_holder_late(struct kvfs_plane *plane, struct kvfs_holder *holder);

struct kvfs_reservation_statistics {
    uint64_t open, pages, resting, committed, superseded, reclaimed;
    uint64_t gains; /* so far: of room for others' reservations */
};
void kvfs_reservation_statistics_get(struct kvfs_plane *plane, struct kvfs_reservation_statistics *out);
/* The most that all clients together may have reserved, pages and reservations. A client may have half of the reservations.
 * It may have as many that were taken back, and are not buried or where it may write all the same. A user has all of the
 * pages if no other has clients. Beside others it has half, and pages that rest count for it up to the other half. So nobody waits for what one user holds,
 * nor for what it has left. A user with pages that rest has half too: else it takes all segments by reserving again and again. If more than the share rests, all
 * of it counts. */
void kvfs_reservations_limit(struct kvfs_plane *plane, uint64_t share_pages, uint32_t open_max);
/* Late writes of clients that are gone cannot land any more in these pages of a user (rested_pages): they count for it no longer. */
void kvfs_reservations_rested(struct kvfs_plane *plane, uint32_t uid, uint64_t pages);
/* Directories have moved; or else one was removed or replaced. Within the step of the change. */
void kvfs_directories_changed(struct kvfs_plane *plane, int moved);
/* Those for which the data plane has reserved or ended something since the last call (KVFS_EVENT_RESERVED), `capacity` at most. Returns how many. */
uint32_t kvfs_holders_changed(struct kvfs_plane *plane, struct kvfs_holder **out, uint32_t capacity);

/* ---- RESERVE ---- */

enum kvfs_frame_next {
    KVFS_FRAME_DONE,
    KVFS_FRAME_MORE,  /* a part is done */
    KVFS_FRAME_ROOM,  /* others hold what there is: again when a reservation has ended. KVFS_EVENT_RESERVED comes within a millisecond then */
    KVFS_FRAME_PLACE, /* no segment of clients (kvfs_place_head()) has room for header_pages and data_pages: kvfs_reserve_place() */
    KVFS_FRAME_NAMES  /* a directory from `parent` up, or a name's holder, is not in memory: again, with `loaded` */
};
struct kvfs_reserve {
    /* The caller's, before each call. */
    uint32_t loaded; /* all directories from `parent` up that there are were loaded */
    int32_t refusal; /* for kvfs_reserve_finish(): -errno of items without an answer; 0: -ENOSPC */
    /* Told. */
    uint32_t header_pages, data_pages;
    uint64_t parent;
    const void *answer;
    uint64_t answer_size;
};
/* The items were checked with these flags, and stay the caller's until kvfs_reserve_end(). NULL: no memory. */
struct kvfs_reserve *kvfs_reserve_begin(struct kvfs_holder *holder, uint32_t flags, const void *items, uint32_t count,
                                        const struct kvfs_shard shards[KVFS_SHARDS], uint32_t uid);
/* enum kvfs_frame_next, or -ENOSPC: no item finds a place. */
int kvfs_reserve(struct kvfs_plane *plane, struct kvfs_reserve *frame);
/* After KVFS_FRAME_PLACE: the runs, or with run_count 0 the item's error. */
void kvfs_reserve_place(struct kvfs_plane *plane, struct kvfs_reserve *frame, const struct kvfs_run *runs, uint32_t run_count, int error);
/* Items without an answer get frame->refusal. Reservations expire at `until`, of any clock that does not go back. */
void kvfs_reserve_finish(struct kvfs_plane *plane, struct kvfs_reserve *frame, uint64_t until);
void kvfs_reserve_end(struct kvfs_plane *plane, struct kvfs_reserve *frame); /* as finish if that was not called; frees the answer, too */

/* ---- COMMIT ---- */

struct kvfs_commit {
    uint64_t hidden; /* the caller's, for kvfs_commit_item(): this inode has no right to its name. The caller removes it if the block enters */
    /* Told. */
    const void *block;      /* the record of the item that is left to the caller: valid within the step of that call, as another frame may end it */
    const int64_t *answers; /* of each item: 0, or -errno */
    /* Of the blocks that entered: the last run in each segment. Without memory for them, `durable`. */
    const struct kvfs_run *runs;
    uint32_t run_count;
    uint32_t durable;    /* a version rose: only the index makes a block safe */
    uint32_t replaced;   /* hosts may know a name's earlier holder; the caller resets it */
    uint32_t taken_back; /* items; the caller resets it */
    uint32_t lingering_count;
    uint64_t lingering[KVFS_FRAME_PART]; /* inodes that have lost their names to others in this call, and stay */
};
struct kvfs_commit *kvfs_commit_begin(struct kvfs_holder *holder, const void *items, uint32_t count);
/* KVFS_FRAME_DONE, KVFS_FRAME_MORE, or KVFS_FRAME_NAMES: the item is the caller's to load, and then kvfs_commit_item()'s. */
int kvfs_commit(struct kvfs_plane *plane, struct kvfs_commit *frame);
/* Enter the block whatever the reasons to leave it (enum kvfs_names_leave), or with an error take it back. Parent and the name's holder are in
 * memory if they exist. Returns 1: it has entered; 0: it has not, as where another frame has ended it meanwhile (-ETIMEDOUT). */
int kvfs_commit_item(struct kvfs_plane *plane, struct kvfs_commit *frame, int error);
void kvfs_commit_end(struct kvfs_commit *frame);

/* ---- DELETE ---- */

struct kvfs_removal {
    uint64_t at; /* with `done` 0 at the beginning */
    uint32_t done;
    uint32_t name_size; /* of the item that is left to the caller */
    const char *name;
    uint32_t shard; /* number of its directory */
    uint32_t reserved;
};
/* KVFS_FRAME_DONE, KVFS_FRAME_MORE, or KVFS_FRAME_NAMES: the caller removes item number `done`, and adds one to it. deleted[i]: 1 if there was one. */
int kvfs_remove_names(struct kvfs_plane *plane, struct kvfs_removal *frame, uint32_t flags, const void *items, uint32_t count,
                      const struct kvfs_shard shards[KVFS_SHARDS], uint8_t *deleted);

/* ---- leases ---- */

/* Blocks that eviction leaves alone, for one client and one deadline. Only to be read. */
struct kvfs_lease {
    uint64_t pages;
    uint32_t count; /* of blocks; one that was asked for twice counts twice */
    uint32_t reserved;
};
/* The room for leases: blocks and pages of this client, and the pages of all clients' blocks together. */
struct kvfs_lease_room {
    uint64_t pages, all_pages;
    uint32_t blocks;
    uint32_t reserved;
};
struct kvfs_lease *kvfs_lease_create(void); /* NULL: no memory */
/* Keep the sealed blocks with a name among these inodes, as far as there is room. held[i] = 1 for kept ones, whose number is returned, else
 * 0. Only room is leased that is left to open blocks and files being written. -ENOMEM: none is kept. */
int kvfs_lease_add(struct kvfs_plane *plane, struct kvfs_lease *lease, const uint64_t *inodes, uint32_t count, const struct kvfs_lease_room *room,
                   uint8_t *held);
/* Ends the lease, and frees it. */
void kvfs_lease_end(struct kvfs_plane *plane, struct kvfs_lease *lease);
struct kvfs_leased {
    uint64_t pages; /* of all clients; a block that was leased twice counts once */
    uint32_t blocks;
    uint32_t reserved;
};
void kvfs_leased_get(struct kvfs_plane *plane, struct kvfs_leased *out);

/* ---- taking back ---- */

/* Take back what has expired by `now`, so many in a step at most. Returns how many. Their clients may still write there. *next: when the next one
 * expires, or has; UINT64_MAX: there is none. */
#define KVFS_EXPIRED_MAX 1024u
uint32_t kvfs_reservations_expire(struct kvfs_plane *plane, uint64_t now, uint64_t *next);
/* One that was taken back: its number, 0 if there is none. A scan must be able to step over each of its runs; then it is buried. */
uint64_t kvfs_reservation_returned(struct kvfs_plane *plane, const struct kvfs_run **runs, uint32_t *run_count);
void kvfs_reservation_buried(struct kvfs_plane *plane, uint64_t number);

#endif
