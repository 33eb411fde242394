/* A slab, as the files of slabs see it. */
#ifndef KVFS_SLAB_H
#define KVFS_SLAB_H

#include "content/content.h"

struct slab_run {
    uint64_t generation;
    uint32_t segment, page;
    atomic_ullong *written; /* a bit per page */
};
struct slab {
    atomic_uint refs; /* of the file, and of every request under way */
    struct kvfs_plane *plane;
    uint64_t inode;
    uint32_t first_segment; /* tells it from another slab of the inode: the segment is this slab's alone until it is free */
    /* Room for as many runs as there are segments, so the array never moves. Runs beyond run_count (under the node's lock) are not there yet. */
    struct slab_run *runs;
    uint32_t run_count, run_pages;
    bool chosen;      /* its owner asked for a slab, whatever becomes of it */
    bool overwritten; /* a page was written twice: it is used as a slab */
    atomic_bool failed;
    struct request *writing; /* under the node's lock, and so is `exclusive` */
    uint32_t exclusive;      /* writes of the list that are alone on their pages */
};

static inline uint64_t slab_pages(const struct slab *slab) { return (uint64_t)slab->run_count * slab->run_pages; }

bool slab_page_written(const struct slab *slab, uint64_t page);
void slab_page_mark(struct slab *slab, uint64_t page, bool written);
/* The end of a stretch of pages: from `from`, at most to `to`, together in a segment, and all written or all not. */
uint64_t slab_stretch(const struct slab *slab, uint64_t from, uint64_t to, bool written);
uint32_t slab_locate(const struct slab *slab, uint64_t page, uint32_t *segment);
/* On a worker: `count` pages of a slab, to or from a slot. */
int slab_pages_io(struct ring *ring, struct slab *slab, bool write, uint64_t page, uint64_t count, struct slot *slot, uint64_t inside);
/* On a worker: the content of pages; pages that were never written are zeros. */
int slab_pages_load(struct ring *ring, struct slab *slab, uint64_t page, uint64_t count, struct slot *slot, uint64_t inside);

#endif
