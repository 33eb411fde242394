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
/* Changed inodes with a header or an extent in the segment, and those of `stored`, ascending, that have not left it. Returns how many, of
 * which at most `capacity` are written. */
uint32_t kvfs_names_members(struct kvfs_names *names, uint32_t segment, const uint64_t *stored, uint32_t stored_count, uint64_t *out,
                            uint32_t capacity);
/* Changed inodes whose attribute user.kvfs.group is `group`; with a group of 0 bytes, of any group. As kvfs_names_members. */
uint32_t kvfs_names_group(struct kvfs_names *names, const char *group, uint32_t group_size, uint64_t *out, uint32_t capacity);
/* Inodes that no commit writes. As kvfs_names_members. */
uint32_t kvfs_names_volatile(struct kvfs_names *names, uint64_t *out, uint32_t capacity);

/* ---- changing ---- */

/* Take in a record as the index has it. Nothing happens if the inode is here. */
int kvfs_names_load(struct kvfs_names *names, const void *record);
/* Insert or change: afterwards the record's name leads to it, and its earlier name nowhere, unless it leads to another inode. `known`: the index
 * may have an earlier record of this inode. -ENOENT: then load it first. */
int kvfs_names_put(struct kvfs_names *names, const void *record, int known);
/* -ENOENT: load it first. */
int kvfs_names_remove(struct kvfs_names *names, uint64_t inode);
/* Forget all that is as the index has it: the index was changed beside this. */
void kvfs_names_forget(struct kvfs_names *names);

/* ---- committing ---- */

/* Changes since the last commit began, as one instant. For each inode comes a struct kvfs_change, then its record. A size of 0: the index is to forget it. Valid until kvfs_names_commit_end(). NULL: no memory, and nothing has begun. */
struct kvfs_change {
    uint64_t inode;
    uint32_t record_size;
    uint32_t is_new;
};
const void *kvfs_names_commit_begin(struct kvfs_names *names, uint64_t *size);
/* Call it in the step in which the index begins to show what was committed. Not ok: the changes stay. */
void kvfs_names_commit_end(struct kvfs_names *names, int ok);
/* Changes that no commit has begun to write. */
uint64_t kvfs_names_pending(struct kvfs_names *names);

#endif
