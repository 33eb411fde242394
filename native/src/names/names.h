/* The names in memory, as the data plane's own threads use them. Not installed.
 *
 * Functions without kvfs_ in their names are called within a step. */
#ifndef KVFS_NAMES_INTERNAL_H
#define KVFS_NAMES_INTERNAL_H

#include "base/base.h"
#include "kvfs_names.h"
#include "kvfs_worth.h"

/* As kvfs_names_begin(), but gives up after 5 ms: Python may be in the middle of a long step. It is awake then, and gets the request. */
bool names_try(struct kvfs_names *names);
/* The inode's record; NULL: it is not here, or gone. Valid until its next change. */
const struct kvfs_inode_record *names_record(const struct kvfs_names *names, uint64_t inode);
/* As kvfs_names_put, and takes over the record, which malloc() made; after an error it is the caller's. */
int names_take(struct kvfs_names *names, struct kvfs_inode_record *record);
/* A file that is not sealed takes the name of another one, `target`. The block that had it stays in the journal until the file is sealed, renamed or
 * removed: after a kill the name leads to it. *older: a copy of that block's record, for names_push(); NULL: there is none. -ENOMEM. */
int names_older(const struct kvfs_names *names, uint64_t inode, uint64_t target, struct kvfs_inode_record **older);
void names_push(struct kvfs_names *names, uint64_t inode, struct kvfs_inode_record *older); /* takes it over */
/* Whether the inode is here, or known to be gone. */
bool names_has(const struct kvfs_names *names, uint64_t inode);
/* From now on, within this step, neither kvfs_names_remove() of this inode, which is here, needs memory, nor names_take() of it where name and place
 * stay. -ENOMEM. */
int names_removable(struct kvfs_names *names, uint64_t inode);
void names_unremovable(struct kvfs_names *names, uint64_t inode); /* neither is done */
/* enum kvfs_names_leave */
uint32_t names_left(const struct kvfs_names *names);
/* 1: the journal was attached with changes of this request, which was not answered since. */
int kvfs_names_was_asked(struct kvfs_names *names, uint64_t transport, uint64_t unique);
/* The answer to the request is written: its entries may go. */
void kvfs_names_answered(struct kvfs_names *names, uint64_t transport, uint64_t unique);
/* This thread's changes are by a kernel's request (kvfs_names_request()). */
bool names_are_asked(void);
void untold_add(struct kvfs_names *names, uint64_t parent, const char *name, uint32_t name_size);
bool names_is_untold(const struct kvfs_names *names, uint64_t parent, const char *name, uint32_t name_size);
/* Memory for the record of a new inode, or of a directory that has gone or lost its name. Within this step names_take() of it cannot fail, nor can a
 * change of the inode that has its name. -ENOMEM. */
int names_prepare(struct kvfs_names *names, const struct kvfs_inode_record *record);
void names_unprepare(struct kvfs_names *names, const struct kvfs_inode_record *record); /* it is not taken */
/* The same for a record that is here and gets this name; it lies where the present one does. Within this step neither names_take() of it can fail, nor a
 * change of the inode that has the name. -ENOMEM. */
int names_prepare_move(struct kvfs_names *names, const struct kvfs_inode_record *record);
void names_unprepare_move(struct kvfs_names *names, const struct kvfs_inode_record *record);
/* Until as many calls of names_let_go() nothing that is as the index has it leaves memory: what is loaded for a change stays for it. */
void names_hold(struct kvfs_names *names);
void names_let_go(struct kvfs_names *names);
/* A name of this directory that the index may not have leads to an inode. */
bool names_has_new(const struct kvfs_names *names, uint64_t parent);

/* ---- lists ---- */

struct link {
    struct link *before, *after;
};
static inline void link_init(struct link *head) { head->before = head->after = head; }
static inline bool link_empty(const struct link *head) { return head->after == head; }
static inline void link_add(struct link *head, struct link *link) {
    link->before = head->before;
    link->after = head;
    head->before->after = link;
    head->before = link;
}
static inline void link_drop(struct link *link) {
    link->before->after = link->after;
    link->after->before = link->before;
    link->before = link->after = NULL;
}

/* A version of a block, in flight until version_end(). */
struct version {
    struct link link; /* first: of those in flight */
    uint64_t number;
};
uint64_t version_begin(struct kvfs_names *names, struct version *version);
void version_end(struct version *version);

static inline const char *record_name(const struct kvfs_inode_record *record) { return (const char *)(record + 1); }
/* Attributes and extents follow the name, which is padded to 8 bytes. */
static inline const struct kvfs_extent *record_extents(const struct kvfs_inode_record *record) {
    return (const void *)(record_name(record) + round_up(record->name_size, 8));
}

/* The root has no name, and a nameless inode's record holds the name that it has lost. */
static inline bool record_is_named(const struct kvfs_inode_record *record) {
    return record && record->name_size && !(record->flags & KVFS_INODE_NAMELESS);
}
/* NULL: no memory. */
static inline struct kvfs_inode_record *record_again(const struct kvfs_inode_record *from) {
    struct kvfs_inode_record *to = malloc(from->record_size);
    if (to)
        memcpy(to, from, from->record_size);
    return to;
}

/* ---- places.c ---- */

/* Told when all runs before its own have ended, without a step. */
struct settled {
    struct settled *next;
    void (*told)(struct settled *settled);
};
struct run {
    struct run *next;
    uint32_t page, page_count;
    bool ended, failed;
    struct settled *settled; /* of the block in it, which has ended */
};
struct place_runs {
    struct run *first, *last;
    uint64_t generation; /* of the head; else unused */
};
struct places {
    struct kvfs_place *all;
    struct place_runs *runs;
    uint32_t *noted; /* segments with notes */
    uint32_t count, noted_count, end_page, head;
    uint64_t head_generation, written, tick_pages;
    struct {
        uint64_t generation;
        uint32_t segment;
    } supply[KVFS_SUPPLY_MAX];
    uint32_t supply_count;
    bool closed; /* Python itself appends where new blocks go */
    bool wake;   /* Python is to take notes now */
};
/* They are the first part of the names. */
static inline struct places *names_places(struct kvfs_names *names) { return (struct places *)(void *)names; }
static inline void places_free(struct places *places) {
    for (uint32_t i = 0; places->runs && i < places->count; i++)
        for (struct run *run = places->runs[i].first, *next; run; run = next) {
            next = run->next;
            free(run);
        }
    free(places->all);
    free(places->runs);
    free(places->noted);
    memset(places, 0, sizeof(*places));
}
/* Append a new block's header and data: one run, or two where the block goes on in the next segment, behind an extent header's page. Returns how
 * many. -ENOSPC: no segment has room, or none is opened ahead; -EAGAIN: it is larger than a segment, and Python's; -ENOMEM. */
#define PLACE_RUNS_MAX 2
int place_take(struct kvfs_names *names, uint32_t header_pages, uint32_t data_pages, struct kvfs_run runs[PLACE_RUNS_MAX]);
/* The run has ended. Returns those to tell once the step is over; `own`, which may be NULL, is among them, now or later. */
struct settled *place_end(struct kvfs_names *names, uint32_t segment, uint32_t page, struct settled *own);
void place_fail(struct kvfs_names *names, uint32_t segment, uint32_t page);
void place_note(struct kvfs_names *names, uint32_t segment, uint32_t notes);
void settled_tell(struct settled *list);
/* A block came (1) or went (-1): its pages count, or count no more. */
void place_account(struct kvfs_names *names, const struct kvfs_inode_record *record, int sign);
/* Set the live pages of each segment. In any thread. */
void places_live(struct kvfs_names *names, struct kvfs_weight *segments, uint32_t count);
uint32_t place_tick(const struct kvfs_names *names);
/* Pages of a sealed block in the segment, its header included; UINT32_MAX: in all. */
uint64_t record_pages(const struct kvfs_inode_record *record, uint32_t segment);

#endif
