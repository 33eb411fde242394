/* Checksums: xxh3 seeded with the pool's secret. Those of leaves and names: block/checksum.h. */
#ifndef KVFS_CHECKSUM_H
#define KVFS_CHECKSUM_H

#include <stdint.h>

uint64_t kvfs_checksum(const void *data, uint64_t size, uint64_t secret);

#endif
