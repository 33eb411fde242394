/* Blocks of other nodes as records: found by name in the pod map, and again by the node ids that they have here. */
#ifndef KVFS_FOREIGN_H
#define KVFS_FOREIGN_H

#include "block/block.h"
#include "pod/pod.h"

/* A segment whose device gave no answer is avoided for so many times the time that it had. */
#define FOREIGN_AVOID 4u
/* Bits of a node id that is made of a block's place; on no device. */
#define FOREIGN_BITS (UINT64_C(3) << 61)

static inline bool is_foreign(uint64_t inode) { return (inode & (UINT64_C(7) << 61)) == FOREIGN_BITS; }

/* The inode number of a directory of a pod. */
uint64_t kvfs_directory_number(uint64_t parent, const char *name, uint32_t name_size, uint64_t secret);
/* The key of a name, in block table and pod map. */
void foreign_key(const struct geometry *geometry, uint64_t parent, const char *name, uint32_t name_size, uint64_t *low, uint64_t *high);
/* The record of a block of another node, by its name. 0; 1: a directory, of which only inode, mode, uid and gid are set; -ENOENT; -EAGAIN. */
int foreign_find(const struct kvfs_pod *pod, const struct geometry *geometry, uint64_t parent, const char *name, uint32_t name_size,
                 struct kvfs_record *out);
/* The block that the key of `then` leads to now. 0, -ENOENT, -EAGAIN. */
int foreign_again(const struct kvfs_pod *pod, const struct geometry *geometry, const struct kvfs_record *then, struct kvfs_record *now);
/* A block's content, as its header names it. inode 0: nothing of it was read. */
struct foreign_content {
    uint64_t inode, version;
};
/* Records that were found, by their node ids: those of the last 65,536 or so. Any thread. A kernel asks by the id, a moment after the look-up. */
struct foreign_known;
struct foreign_known *foreign_known_new(void); /* NULL: no memory */
void foreign_known_free(struct foreign_known *known);
/* name may be NULL. -ENOENT: another block has this id. */
int foreign_known_add(struct foreign_known *known, const struct kvfs_record *record, const char *name, uint32_t name_size);
/* name: KVFS_NAME_MAX + 1 bytes, or NULL. Returns whether it is known. */
bool foreign_known_get(struct foreign_known *known, uint64_t inode, struct kvfs_record *out, char *name);
/* The content that was read under this node id, in any handle: a kernel may still have pages of it. {0}: nothing, or nobody remembers. */
struct foreign_content foreign_known_content(struct foreign_known *known, uint64_t inode);
void foreign_known_read(struct foreign_known *known, uint64_t inode, const struct foreign_content *content);

#endif
