/* Records for the tests of the block table: every field follows from inode, parent and version, so that a mixed-up copy shows. */
#ifndef KVFS_TEST_TABLE_RECORDS_H
#define KVFS_TEST_TABLE_RECORDS_H

#include <string.h>

#include "check.h"
#include "block/table.h"

static inline struct kvfs_record record_of(uint64_t inode, uint64_t parent, uint64_t version) {
    uint64_t seed = inode * 0x9e3779b97f4a7c15ULL + version * 0xc2b2ae3d27d4eb4fULL + parent;

    return (struct kvfs_record){
        .inode = inode,
        .parent = parent,
        .version = version,
        .size = random_next(&seed) >> 16,
        .generation = random_next(&seed),
        .segment = (uint32_t)random_next(&seed),
        .page = (uint32_t)random_next(&seed),
        .header_pages = (uint32_t)random_next(&seed) >> 8,
        .extent_count = (uint32_t)random_next(&seed),
        .mtime_ns = (int64_t)random_next(&seed),
        .ctime_ns = (int64_t)random_next(&seed),
        .mode = (uint32_t)random_next(&seed) >> 16,
        .uid = (uint32_t)random_next(&seed),
        .gid = (uint32_t)random_next(&seed),
        .nlink = (uint32_t)random_next(&seed) >> 2,
        .kind = (uint8_t)(1 + random_below(&seed, 3)),
        .flags = (uint8_t)(random_next(&seed) & ~(unsigned)(KVFS_INODE_NAMELESS | KVFS_INODE_ASK)),
    };
}

/* Whether a lookup returned record_of() for its inode, parent and version, with these flags besides. The key is its name's, for the caller. */
static inline int record_is_whole(const struct kvfs_record *got, uint8_t flags) {
    struct kvfs_record expected = record_of(got->inode, got->parent, got->version);

    expected.flags |= flags;
    expected.slot = got->slot;
    expected.key_low = got->key_low;
    expected.key_high = got->key_high;
    return memcmp(&expected, got, sizeof(expected)) == 0;
}

#endif
