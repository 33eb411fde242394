/* What changes of names share: what they look at, what they lack, and the directories that change with them. In a step. Not installed. */
#ifndef KVFS_NAMING_INTERNAL_H
#define KVFS_NAMING_INTERNAL_H

#include "content/content.h"

#include "kvfs_naming.h"

/* `counts`: Python asks, and counts pins, directories and notices itself, in the same step. */
struct change_of {
    struct kvfs_plane *plane;
    struct kvfs_naming *n;
    bool counts;
};

/* NULL: nobody has it, or it is lacked. */
const struct kvfs_inode_record *naming_record(const struct change_of *c, uint64_t inode);
/* Who has the name; NULL: nobody, or it is lacked. 0 or a need. */
int naming_look_up(const struct change_of *c, uint32_t which, const struct kvfs_inode_record **out);
/* Says that it lacks this of the inode; returns the need. */
int naming_lacks(const struct change_of *c, enum kvfs_need need, uint64_t inode);
/* 0: it is one, and things can be made in it. */
int naming_directory(const struct kvfs_inode_record *record);
/* Looks at the inode and all above it. 0: none is pinned; 1: one is; or a need. *loop: `below` is among them; NULL: that is of no interest. */
int naming_above(const struct change_of *c, uint64_t inode, uint64_t below, bool *loop);
/* 0: its pins are no thread's business, or Python has all in memory that it needs to count them; or a need. */
int naming_pins(const struct change_of *c, uint64_t inode);
/* The block (0) or directory (1) of this name at other nodes, or -ENOENT. */
int naming_theirs(const struct change_of *c, struct kvfs_record *out);
/* The rights of the directory of this name at other nodes, with their version, or -ENOENT. */
int naming_rights(const struct change_of *c, uint64_t parent, const char *name, uint32_t size, struct kvfs_record *out);
/* The directory as it will be with so many subdirectories more; NULL: only its times change. -ENOMEM. */
int naming_links_prepare(const struct change_of *c, uint64_t inode, int links, struct kvfs_inode_record **out);
void naming_links_unprepare(const struct change_of *c, struct kvfs_inode_record *changed);
void naming_links_set(const struct change_of *c, uint64_t inode, struct kvfs_inode_record *changed, int64_t now); /* takes it over */
/* Where Python asks: *out is a copy of the record. -ENOMEM. */
int naming_copy(const struct change_of *c, const struct kvfs_inode_record *record, struct kvfs_inode_record **out);
/* Something is made in a directory that was only looked up here: the other nodes are told that it is here, too, and all above it. So it stays if the
 * change fails. 0, -errno, or a need. */
int naming_own(const struct change_of *c, uint64_t inode);
/* By a thread of C, in a step. 0, -errno, or a need: then it is Python's. */
int naming_here(struct kvfs_plane *plane, struct kvfs_naming *n);

int naming_make(const struct change_of *c);       /* making.c */
int naming_attributes(const struct change_of *c); /* attributes.c */

#endif
