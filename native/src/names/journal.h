/* The journal of names: what a next daemon under the same mount is told (kvfs_names.h). Called within a step. */
#ifndef KVFS_JOURNAL_H
#define KVFS_JOURNAL_H

#include "base/base.h"
#include "kvfs_names.h"

struct journal;

/* The inode has this record now; NULL: it is gone. Nothing can fail: what has no room is missing, which its number tells. */
void journal_note(struct journal *journal, uint64_t inode, const struct kvfs_inode_record *record);
/* The step is over: what was noted in it counts from now on, all of it or, without room, nothing. */
void journal_publish(struct journal *journal);
/* A commit begins, of all that was noted up to now. */
void journal_commit_begin(struct kvfs_names *names);
/* It has ended well: its entries go. Without a step. */
void journal_commit_end(struct kvfs_names *names);
/* 7/8 of it wait for a commit. */
bool journal_is_full(const struct journal *journal);
void journal_destroy(struct journal *journal);

#endif
