/* Chains of blocks: the functions that C alone calls. The rest, and the rules: kvfs_chains.h. */
#ifndef KVFS_CONTENT_CHAINS_H
#define KVFS_CONTENT_CHAINS_H

#include "kvfs_chains.h"

/* The slot is another block's from now on. */
void kvfs_chains_clear(struct kvfs_chains *chains, uint32_t slot);
/* The same block has another slot now. */
void kvfs_chains_move(struct kvfs_chains *chains, uint32_t from, uint32_t to);
/* The slot of a block's parent, or UINT32_MAX: it is not known, or not there. Any thread; others may change it meanwhile. */
uint32_t kvfs_chains_parent(const struct kvfs_chains *chains, uint32_t slot);
/* Keep so many ghosts from now on, one at least; never more than at creation. */
void kvfs_chains_limit(struct kvfs_chains *chains, uint32_t ghosts);
void kvfs_chains_statistics(const struct kvfs_chains *chains, struct kvfs_chains_statistics *out);

#endif
