/* Names in memory: the inode records that the index does not have yet, and some that it has.
 *
 * Each inode that changed since the last commit is here, and each that no commit writes: files not sealed, and nameless ones. Records that were
 * committed stay for a while. An inode that is not here is as the index says (kvfs/index). Records are whole: `struct kvfs_inode_record` with
 * name, extents and attributes. Any thread; nothing blocks longer than a step. 0, a count, or -errno.
 */
#ifndef KVFS_NAMES_H
#define KVFS_NAMES_H

#include <stdint.h>
#include "kvfs_format.h"

struct kvfs_names;

int kvfs_names_create(struct kvfs_names **out);
void kvfs_names_destroy(struct kvfs_names *names);

/* A step: until its end no other thread changes a name, a record or the block table (I4). Steps nest within a thread. */
void kvfs_names_begin(struct kvfs_names *names);
void kvfs_names_end(struct kvfs_names *names);

/* ---- reading ---- */

/* The record's size, of which at most `capacity` bytes are written to out. 0: the inode is gone. -ENOENT: it is as the index says. */
int64_t kvfs_names_get(struct kvfs_names *names, uint64_t inode, void *out, uint32_t capacity);
/* 1: *inode is the inode number that the name leads to, 0 for a name that is gone. 0: it is as the index says. */
int kvfs_names_find(struct kvfs_names *names, uint64_t parent, const char *name, uint32_t name_size, uint64_t *inode);
struct kvfs_name {
    uint64_t inode; /* 0: the name is gone */
    uint32_t size;
    char name[KVFS_NAME_MAX + 1];
};
/* The changed names of a directory greater than `after`, in byte order; `limit` of them at most. Returns how many, or -ENOMEM. */
int kvfs_names_list(struct kvfs_names *names, uint64_t parent, const char *after, uint32_t after_size, struct kvfs_name *out, uint32_t limit);
/* Directories with changed names. Returns how many there are, of which at most `capacity` are written. */
uint32_t kvfs_names_parents(struct kvfs_names *names, uint64_t *out, uint32_t capacity);
/* The inodes with a header or an extent in the segment, ascending. keys: the segment's in the index's table segment_inodes, 12 bytes each.
 * Returns how many there are, of which at most `capacity` are written, if more in no order. */
uint32_t kvfs_names_members(struct kvfs_names *names, uint32_t segment, const void *keys, uint32_t key_count, uint64_t *out, uint32_t capacity);
/* How many inodes in memory have an attribute user.kvfs.group. */
uint64_t kvfs_names_grouped(struct kvfs_names *names);
/* Changed inodes whose attribute user.kvfs.group is `group`. As kvfs_names_volatile. */
uint32_t kvfs_names_group(struct kvfs_names *names, const char *group, uint32_t group_size, uint64_t *out, uint32_t capacity);
/* The inodes that are not in memory, in their order. Returns how many. out has room for all. */
uint32_t kvfs_names_absent(struct kvfs_names *names, const uint64_t *inodes, uint32_t count, uint64_t *out);
struct kvfs_records {
    uint64_t size;         /* bytes of all records; if that is more than `capacity`, out is of no use */
    uint32_t count;        /* of records */
    uint32_t absent_count; /* of inodes that are not in memory */
    uint32_t parent_count; /* of directories */
    uint32_t reserved;     /* zero */
};
/* The records of these inodes, concatenated: in a segment of the sealed blocks with a name and their header there, with UINT32_MAX of all.
 * parents: the directories that they are in, some more than once. absent and parents have room for `count`. */
void kvfs_names_records(struct kvfs_names *names, uint32_t segment, const uint64_t *inodes, uint32_t count, void *out, uint64_t capacity,
                        uint64_t *absent, uint64_t *parents, struct kvfs_records *found);
/* Inodes that no commit writes. Returns how many there are, of which at most `capacity` are written. */
uint32_t kvfs_names_volatile(struct kvfs_names *names, uint64_t *out, uint32_t capacity);

/* ---- changing ---- */

/* Take in concatenated records as the index has them, but of inodes that are here. -ENOMEM: not all of them. */
int kvfs_names_load(struct kvfs_names *names, const void *records, uint64_t size);
/* Insert or change: afterwards the record's name leads to it, and its earlier name nowhere, unless it leads to another inode. `known`: the index
 * may have an earlier record of this inode. -ENOENT: then load it first. */
int kvfs_names_put(struct kvfs_names *names, const void *record, int known);
/* -ENOENT: load it first. */
int kvfs_names_remove(struct kvfs_names *names, uint64_t inode);
/* The most files and directories to keep that equal the index's, from the next one on. The last of each stays. For tests of their leaving. */
void kvfs_names_limit(struct kvfs_names *names, uint64_t files, uint64_t directories);
/* Forget all that is as the index has it: the index was changed by another hand. */
void kvfs_names_forget(struct kvfs_names *names);

/* ---- committing ---- */

/* Changes since the last commit began, as one instant. For each inode comes a struct kvfs_change, then its record. A size of 0: the index is to
 * forget it. Valid until kvfs_names_commit_end(). NULL: no memory, and nothing has begun. */
struct kvfs_change {
    uint64_t inode;
    uint32_t record_size;
    uint32_t is_new;
};
const void *kvfs_names_commit_begin(struct kvfs_names *names, uint64_t *size);
/* The inodes that the index may have already: big-endian numbers of 8 bytes, ascending, into `keys`, which has room for one of each change. Returns how
 * many. In any thread, as kvfs_index_changes(). */
uint64_t kvfs_index_known(const void *changes, uint64_t size, uint8_t *keys);
/* What the index's databases lose and get by these changes (docs/format.md, 5), each list ascending by its keys. */
enum kvfs_index_list {
    KVFS_INDEX_PUT_INODES = 0,
    KVFS_INDEX_PUT_NAMES = 1,
    KVFS_INDEX_PUT_MEMBERS = 2,
    KVFS_INDEX_PUT_GROUPS = 3,
    KVFS_INDEX_DROP_INODES = 4, /* values: none */
    KVFS_INDEX_DROP_NAMES = 5,  /* values: the inode, whose name it still has to be */
    KVFS_INDEX_DROP_MEMBERS = 6,
    KVFS_INDEX_DROP_GROUPS = 7,
    KVFS_INDEX_LISTS = 8
};
struct kvfs_index_changes {
    const uint8_t *bytes; /* keys and values, one behind another */
    uint64_t size;
    struct {
        const uint64_t *bounds; /* in `bytes`, 2 * count + 1: where each key begins, where its value does, and the end of the last */
        uint64_t count;
    } lists[8]; /* KVFS_INDEX_LISTS */
};
/* `records`: concatenated, ascending by inode, 8-byte aligned: what the index has of kvfs_index_known()'s. NULL and *error: -ENOMEM; -EBADMSG: the record
 * of inode *damaged is none. */
struct kvfs_index_changes *kvfs_index_changes(const void *changes, uint64_t size, const void *records, uint64_t records_size, int *error,
                                              uint64_t *damaged);
void kvfs_index_changes_free(struct kvfs_index_changes *changes);
/* Call it in the step in which the index begins to show what was committed. Not ok: the changes stay. */
void kvfs_names_commit_end(struct kvfs_names *names, int ok);
/* Changes that no commit has begun to write. */
uint64_t kvfs_names_pending(struct kvfs_names *names);

/* ---- numbers ---- */

/* Inode numbers and versions begin behind `number`: the mount epoch above a counter (I14). in_pod: its slot is theirs; otherwise they count in
 * those bits too. */
void kvfs_names_number(struct kvfs_names *names, uint64_t number, int in_pod);
/* Another node has given this version: this node's are above it from now on. Of an epoch that cannot be, it is ignored. */
void kvfs_names_seen(struct kvfs_names *names, uint64_t version);
uint64_t kvfs_names_next_inode(struct kvfs_names *names);
uint64_t kvfs_names_next_version(struct kvfs_names *names);
uint64_t kvfs_names_last_version(struct kvfs_names *names);
/* Versions that the data plane gave to blocks it is sealing. As kvfs_names_volatile. */
uint32_t kvfs_names_in_flight(struct kvfs_names *names, uint64_t *out, uint32_t capacity);

/* Why the data plane leaves changes to Python. */
enum kvfs_names_leave {
    KVFS_LEAVE_CLOSED = 1, /* the store is being opened, rebuilt or ended; so it begins */
    KVFS_LEAVE_HIDING = 2, /* a device is away: names may belong to blocks there */
    KVFS_LEAVE_BEHIND = 8, /* commits fail: new names are slowed down, then refused */
    KVFS_LEAVE_FULL = 16,  /* kvfs_names_journal_is_full(): new names, renames and removals wait for a commit */
    KVFS_LEAVE_PINS = 4    /* something is pinned. Below a pin threads of C neither seal, move nor remove files */
};
void kvfs_names_leave(struct kvfs_names *names, uint32_t reason, int on);
/* Hosts may believe that this name leads to an evicted block: Python makes it. With name_size 0: no host believes so of any. */
void kvfs_names_untold(struct kvfs_names *names, uint64_t parent, const char *name, uint32_t name_size);

/* ---- places: where in the segments blocks go ---- */

enum kvfs_note {
    KVFS_NOTE_CHANGED = 1,  /* next_page, live_pages, or what is in flight */
    KVFS_NOTE_ENTERED = 2,  /* a block came here, or was renamed */
    KVFS_NOTE_DIRTY = 4,    /* the summary must be written again */
    KVFS_NOTE_GONE = 8,     /* because something that it names is gone */
    KVFS_NOTE_SETTLED = 16, /* the first run in flight is another, or there is none */
    KVFS_NOTE_FAILED = 32,  /* a run was not written: kvfs_place_failed() */
    KVFS_NOTE_LED = 128,    /* it came from the supply, and is the one that is appended to */
    KVFS_NOTE_LEFT = 256,   /* it takes no further block: it had no room for one */
    KVFS_NOTE_RENAMED = 64, /* a block here has another name, or with GONE none */
    KVFS_NOTE_RESTS = 512   /* a native client that wrote here has gone: its writes may still land */
};
struct kvfs_place {
    uint32_t next_page;  /* the next run begins here */
    uint32_t live_pages; /* of present blocks */
    uint32_t run_count;  /* in flight */
    uint32_t first_page; /* of the first of them */
    uint32_t lent;       /* runs that a native client may be writing to, entitled or late */
    uint32_t notes;      /* enum kvfs_note, not taken yet */
    uint32_t awaited;    /* Python's: it waits for runs in flight to end; KVFS_EVENT_PLACES tells it */
};
/* A place to write to. In the first run of a seal, header_pages come first; in every other run one extent header page. */
struct kvfs_run {
    uint64_t generation;
    uint32_t segment;
    uint32_t page;
    uint32_t page_count;
    uint32_t reserved;
};
/* The places of all segments, by index; valid while the names live. Call once. end_page: of every segment. tick_pages: the clock of blocks goes on
 * by one with this number of pages written. NULL: no memory. */
struct kvfs_place *kvfs_places_make(struct kvfs_names *names, uint32_t segment_count, uint32_t end_page, uint64_t tick_pages);
/* Append a run; there is room. Returns its first page. */
uint32_t kvfs_place_take(struct kvfs_names *names, uint32_t segment, uint32_t pages);
/* The run has ended, whatever came of it. */
void kvfs_place_release(struct kvfs_names *names, uint32_t segment, uint32_t page);
/* A run that was not written, which is Python's to release from then on. 0: there is none. */
struct kvfs_failed_run {
    uint64_t generation;
    uint32_t page, page_count;
};
int kvfs_place_failed(struct kvfs_names *names, uint32_t segment, struct kvfs_failed_run *out);
/* New blocks of the data plane are appended to this segment, of this generation, then to the supply's. UINT32_MAX: to none, until the next
 * call. */
void kvfs_place_head(struct kvfs_names *names, uint32_t segment, uint64_t generation);
/* The segment that is appended to; UINT32_MAX: none. */
uint32_t kvfs_place_lead(struct kvfs_names *names);
/* Open segments that are appended to next, in their order, KVFS_SUPPLY_MAX at most. -ENOSPC: there are that many. */
#define KVFS_SUPPLY_MAX 64
int kvfs_place_supply(struct kvfs_names *names, uint32_t segment, uint64_t generation);
/* 1: the segment has left the supply. 0: it was not there. */
int kvfs_place_withdraw(struct kvfs_names *names, uint32_t segment);
uint64_t kvfs_places_written(struct kvfs_names *names); /* pages, since they were made */
/* Segments with notes, which are taken. Returns how many of `capacity` were written; call again until it is 0. */
struct kvfs_noted {
    uint32_t segment, notes;
};
uint32_t kvfs_places_noted(struct kvfs_names *names, struct kvfs_noted *out, uint32_t capacity);

/* ---- the journal: changes that the index does not have yet, in memory that outlives this process ---- */

/* native/src/names/journal_layout.h has the bytes. Entries of a step count together or not at all. */
enum kvfs_journal_kind {
    KVFS_JOURNAL_PUT = 1,   /* data: the record */
    KVFS_JOURNAL_REMOVE = 2 /* no data */
};
enum kvfs_journal_flags {
    KVFS_JOURNAL_LAST = 1, /* of its step */
    KVFS_JOURNAL_HELD = 2  /* nothing has changed: told again, as no commit writes it */
};
struct kvfs_journal_entry {
    uint32_t size; /* of entry, checksum and data: a multiple of 8 */
    uint8_t kind;  /* enum kvfs_journal_kind */
    uint8_t flags; /* enum kvfs_journal_flags */
    uint16_t reserved;
    uint64_t sequence; /* each entry has the next number. Some are missing where there was no room */
    uint64_t inode;
    uint64_t transport, unique; /* the request that its step has done; 0: none. In the last entry of the step */
    uint32_t data_size;
    uint32_t reserved1;
};
struct kvfs_journal_found {
    uint64_t id;
    uint64_t durable;  /* the index has all up to this number */
    uint64_t sequence; /* the last that was given */
    uint64_t size;     /* bytes of all entries */
    uint64_t count;    /* of entries */
    uint64_t refused;  /* bytes behind them that are none: damage */
};
/* Of memory that outlives daemons. It keeps the version in which it was made: later builds read and write it so. */
struct kvfs_versions {
    uint32_t found;          /* 0: it has none */
    uint32_t oldest, newest; /* known to this build */
};
#define KVFS_JOURNAL_VERSION 1 /* of new ones */
#define KVFS_JOURNAL_OLDEST 1
#define KVFS_JOURNAL_SIZE_MIN (64u << 10)
#define KVFS_JOURNAL_SIZE_MAX (UINT64_C(16) << 30)
/* Make an empty journal. Its descriptor (memfd_create(2)), sealed in size, or -errno; -EINVAL: a size that none has. */
int kvfs_journal_make(uint64_t size);
/* Whether it can be attached. 0 or as kvfs_journal_read(). Changes nothing. */
int kvfs_journal_check(int fd, struct kvfs_versions *out);
/* Its entries, each proven, without their checksums: struct kvfs_journal_entry, then data padded to 8 bytes. Free with kvfs_journal_free(). NULL, and *r
 * is -errno; -EBADMSG: this is no journal, or not sealed; -EPROTONOSUPPORT: of another version. */
const void *kvfs_journal_read(int fd, struct kvfs_journal_found *found, int *r);
void kvfs_journal_free(const void *entries);
/* From now on changes are written to this journal, behind its content: that counts as durable, but for requests that were not answered. A journal has
 * one writer. Call once, before a request is served. 0 or as kvfs_journal_read(). */
int kvfs_names_journal(struct kvfs_names *names, int fd);
/* The steps of this thread are for this request of a transport, by its `unique` without bit 63; 0: for none. */
void kvfs_names_request(uint64_t transport, uint64_t unique);
/* The kernel sends no request of the former daemon again. */
void kvfs_names_journal_settled(struct kvfs_names *names);
/* Of the commit that begins in this step: *id of the journal, *sequence of the last change that it has. 0: there is no journal. */
int kvfs_names_journal_mark(struct kvfs_names *names, uint64_t *id, uint64_t *sequence);
/* Nothing is pending, and no commit is under way: entries go as after one. */
void kvfs_names_journal_idle(struct kvfs_names *names);
struct kvfs_journal_fill {
    uint64_t size, used; /* bytes of the ring */
    uint64_t lost;       /* entries that had no room, since it was attached */
    uint64_t unanswered; /* requests whose entries wait for that */
};
/* 0: there is no journal. */
int kvfs_names_journal_fill(struct kvfs_names *names, struct kvfs_journal_fill *out);
/* 7/8 of it wait for a commit; the rest is for changes that cannot wait. */
int kvfs_names_journal_is_full(struct kvfs_names *names);

#endif
