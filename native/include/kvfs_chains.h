/* Chains of blocks, and ghosts of evicted ones.
 *
 * A block is worth little without the one before it in its prefix, its parent. So those behind a block that goes are marked as orphans, each until its
 * next use. A ghost is the memory of an evicted block: of its uses, from which eviction learns what it threw away, and of those behind it.
 *
 * Blocks are known by their slots in the block table. One thread at a time changes chains; marks are read and taken away by any. Functions that C alone
 * calls: content/chains.h. */
#ifndef KVFS_CHAINS_H
#define KVFS_CHAINS_H

#include <stdint.h>

struct kvfs_chains;

struct kvfs_chains_statistics {
    uint64_t parents; /* blocks whose parent is known: there, or a ghost */
    uint64_t orphans; /* blocks that were marked, since the start */
    uint64_t ghosts;
    uint64_t returned; /* ghosts that came back, since the start */
    uint64_t forgotten;
    uint64_t bytes; /* at most */
};

/* 0 or -ENOMEM, -EINVAL. ghosts: as many at most; 0: none. Memory is taken as it is used. */
int kvfs_chains_create(uint32_t slots, uint32_t ghosts, struct kvfs_chains **out);
void kvfs_chains_destroy(struct kvfs_chains *chains);

/* The slot's block has this key, not 0. 1: the key had a ghost, whose use is in *use; those behind that follow the block. 0: it had none. */
int kvfs_chains_enter(struct kvfs_chains *chains, uint32_t slot, uint64_t key, uint32_t *use);
/* The block in `slot` comes behind the one in `parent`; UINT32_MAX: behind none. It is no longer an orphan. Behind one block 65,536 are known at
 * most: of later ones the parent is not. */
void kvfs_chains_follow(struct kvfs_chains *chains, uint32_t slot, uint32_t parent);
/* A block is gone, and the blocks behind it are orphans. evicted: it leaves a ghost with this key and use; otherwise it is forgotten. */
void kvfs_chains_leave(struct kvfs_chains *chains, uint32_t slot, uint64_t key, uint32_t use, int evicted);

/* One bit a slot: its block is an orphan. Any thread. */
const uint64_t *kvfs_chains_orphans(const struct kvfs_chains *chains);
/* The block was used: it is no orphan. Any thread. */
void kvfs_chains_used(struct kvfs_chains *chains, uint32_t slot);
/* Uses of ghosts from *at on, up to `capacity`; returns how many, 0 at the end. *at begins with 0. Any thread. */
uint32_t kvfs_chains_ghosts(const struct kvfs_chains *chains, uint32_t *at, uint32_t *uses, uint32_t capacity);

#endif
