/* Changes of names and records: what makes, renames and removes names, and sets attributes. One implementation, in native/src/content/ (making.c,
 * naming.c, attributes.c), for threads of C and for the control plane.
 *
 * A change needs records in memory. What it lacks it says, and has changed nothing. Python brings that from the index, without a lock, and calls again.
 * What was brought stays in memory until kvfs_naming_end(). Nothing that is brought replaces what is newer in memory, nor a removal that no commit has.
 */
#ifndef KVFS_NAMING_H
#define KVFS_NAMING_H

#include <stdint.h>
#include "kvfs_format.h"

struct kvfs_plane;

enum kvfs_naming_kind {
    KVFS_NAMING_UNLINK = 1,
    KVFS_NAMING_DELETE = 2, /* as UNLINK, of files alone */
    KVFS_NAMING_RMDIR = 3,
    KVFS_NAMING_RENAME = 4,
    KVFS_NAMING_TAKE = 5,   /* `inode` loses its name: a miss from now on. Handles read on */
    KVFS_NAMING_END = 6,    /* `inode`, which has lost its name, goes, unless it is open */
    KVFS_NAMING_CREATE = 7, /* an empty file, which is being written from then on */
    KVFS_NAMING_MKDIR = 8,
    KVFS_NAMING_SYMLINK = 9, /* `data`: where it leads */
    KVFS_NAMING_COPY = 10,   /* `data`: the record of a block of another node, as it was stored here under this name */
    KVFS_NAMING_BORROW = 11, /* a directory of other nodes is looked up; who has the name here is looked up instead. -ENOENT: no node has it */
    KVFS_NAMING_OWN = 12,    /* directory `inode`, and all above it, are this node's, too */
    /* These change the record of `inode`, and no name. -ESTALE: it is gone. */
    KVFS_NAMING_SET = 13,       /* `set` */
    KVFS_NAMING_FOLLOW = 14,    /* a directory has the rights that another node gave it later. -ENOENT: no other node has it */
    KVFS_NAMING_MARK = 15,      /* flags (enum kvfs_inode_flags) are `on` and `off` */
    KVFS_NAMING_ATTRIBUTE = 16, /* extended attribute `key` is `data`. -ENOSPC: there is no room for it */
    KVFS_NAMING_UNSET = 17      /* there is none. -ENODATA: there was none */
};
enum kvfs_set {
    KVFS_SET_MODE = 1,
    KVFS_SET_UID = 2,
    KVFS_SET_GID = 4,
    KVFS_SET_SIZE = 8, /* the content was cut or grown to `size` */
    KVFS_SET_ATIME = 16,
    KVFS_SET_MTIME = 32,
    KVFS_SET_CONTENT = 64, /* it is opened for writing. Nothing changes but the mode, by KILL */
    KVFS_SET_KILL = 128    /* who changes the content, or the owner, is not root, and of group `killer_gid`: set-user-ID bits go */
};
enum kvfs_need {
    KVFS_NEED_INODES = 1, /* the records of `inodes`. Those that the index does not have are added to `gone` */
    KVFS_NEED_NAME = 2,   /* the record of the inode that has name `which`; KVFS_KNOWN_FREE << which: there is none */
    KVFS_NEED_ABOVE = 3,  /* the same of inodes[0] and all directories above it */
    KVFS_NEED_EMPTY = 4,  /* whether directory inodes[0] is empty in the index: `empty` or `full`. KVFS_KNOWN_OPEN: somebody has it open */
    KVFS_NEED_CALLER = 5  /* of threads of C alone: pins, directories and hosts' notices are the control plane's to count or give */
};
enum kvfs_known { KVFS_KNOWN_FREE = 1, KVFS_KNOWN_NEW_FREE = 2, KVFS_KNOWN_OPEN = 4 };
#define KVFS_NAMING_INODES 4
#define KVFS_NAMING_OPEN 1 /* a flag of END: also while it is open, as the store ends */
#define KVFS_NAMING_TRIES 16

struct kvfs_naming {
    /* what is asked */
    uint64_t parent, new_parent;
    uint64_t inode; /* TAKE, END */
    const char *name, *new_name;
    uint32_t name_size, new_name_size;
    uint32_t kind;           /* enum kvfs_naming_kind */
    uint32_t flags;          /* of renameat2(2); KVFS_NAMING_OPEN */
    uint32_t mode, uid, gid; /* of what is made; SET */
    uint32_t set;            /* enum kvfs_set */
    uint32_t killer_gid;
    uint32_t on, off; /* MARK */
    uint32_t data_size, key_size;
    const void *data;
    const char *key;
    uint64_t size;
    int64_t atime_ns, mtime_ns;
    /* what was brought */
    uint64_t hidden[2]; /* these inodes are on devices that are away: name and new_name are free while they have them */
    uint64_t gone[KVFS_NAMING_TRIES * KVFS_NAMING_INODES];
    uint64_t empty, full;
    uint32_t gone_count;
    uint32_t known; /* enum kvfs_known */
    /* what it lacks */
    uint64_t inodes[KVFS_NAMING_INODES];
    uint32_t inode_count;
    uint32_t which;
    /* what was done */
    uint32_t kept;    /* enum kvfs_kept: what lost its name lives on */
    uint32_t lingers; /* it had its name until a rename: look-ups of a moment ago may still open it */
    uint32_t untold;  /* hosts may believe that the name leads to an evicted block, or in a directory's rights of before */
    uint32_t below;   /* a directory's record is another: headers and summaries below it are to say so */
    uint32_t begun;
    struct kvfs_inode_record *removed;        /* as it was; NULL: nothing lost its name */
    struct kvfs_inode_record *before, *after; /* what was renamed; without `before` what was made, or looked up */
};

/* 0: done; -errno; or enum kvfs_need. The first call begins, kvfs_naming_end() ends it, whatever came of it. From the one control-plane thread. */
int kvfs_naming(struct kvfs_plane *plane, struct kvfs_naming *naming);
void kvfs_naming_end(struct kvfs_plane *plane, struct kvfs_naming *naming);

#endif
