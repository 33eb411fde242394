/* Checksums of a block's leaves, and keys of names. */
#ifndef KVFS_BLOCK_CHECKSUM_H
#define KVFS_BLOCK_CHECKSUM_H

#include "kvfs_checksum.h"

/* Leaf checksums (xxh3-64) of `size` bytes, one per 4096. The last leaf may be short and is summed over its real bytes
 * only. */
void kvfs_leaf_checksums(const void *data, uint64_t size, uint64_t secret, uint64_t *out);
/* 0, or the 1-based index of the first leaf that differs. */
uint64_t kvfs_leaf_verify(const void *data, uint64_t size, uint64_t secret, const uint64_t *expected);
/* The same by the portable reference, for tests: bit-identical. */
void kvfs_leaf_checksums_reference(const void *data, uint64_t size, uint64_t secret, uint64_t *out);
void kvfs_name_key(uint64_t parent, const char *name, uint32_t name_size, uint64_t secret, uint64_t *low, uint64_t *high);

#endif
