/* Layout of the list of open handles: opens.c tells it, earlier.c reads what is left there. */
#ifndef KVFS_OPENS_H
#define KVFS_OPENS_H

#include "content/content.h"

#define OPENS_MAGIC 0x315f534e45504f56ull /* "VOPENS_1" */
#define OPENS_PLACES 65536u
struct opens_header {
    uint64_t magic;
    uint32_t version, places;
};
struct opens_place {
    _Alignas(64) atomic_ullong fh;
    uint64_t inode, unique; /* unique: of the OPEN */
    uint32_t user, flags;
};
static_assert(sizeof(struct opens_place) == 64, "a cache line");
/* A block of another node, by the node id that it has here. Beside it lies what read.c proves by it. */
struct opens_foreign {
    _Alignas(64) atomic_ullong inode;
    uint64_t parent, key_low, key_high, size, generation;
    uint32_t segment, page, header_pages, mode, uid, gid;
    uint32_t extents, keyed;
    atomic_ullong content_inode, content_version;
};
static_assert(sizeof(struct opens_foreign) == 128, "two cache lines");
#define OPENS_FOREIGN_AT (KVFS_PAGE_SIZE + OPENS_PLACES * sizeof(struct opens_place))
#define OPENS_SIZE (OPENS_FOREIGN_AT + OPENS_PLACES * sizeof(struct opens_foreign))

struct opens {
    void *memory;
    struct opens_place *places;
    struct opens_foreign *foreign;
    atomic_uint next; /* where the search for a free place of a foreign block begins */
};

#endif
