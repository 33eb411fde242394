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
    atomic_uint refs; /* the file, and every request under way */
    struct kvfs_plane *plane;
    uint64_t inode;
    uint32_t first_segment; /* tells it from another slab of the inode: nobody else has the segment until it is free */
    /* Room for as many runs as there are segments, so the array never moves. Those beyond run_count (under the node's lock) are not there yet. */
    struct slab_run *runs;
    uint32_t run_count, run_pages;
    bool chosen;      /* by its owner, whatever becomes of it */
    bool overwritten; /* a whole page was written again: it is used as a slab */
    atomic_bool failed;
    struct request *writing; /* under the node's lock, as are these two */
    uint32_t exclusive;      /* of them, those that are alone on their pages */
};

static inline uint64_t slab_pages(const struct slab *slab) { return (uint64_t)slab->run_count * slab->run_pages; }

bool slab_page_written(const struct slab *slab, uint64_t page);
void slab_page_mark(struct slab *slab, uint64_t page, bool written);
/* The end of the pages from `from` on that lie together in a segment and were all written, or all not; at most `to`. */
uint64_t slab_stretch(const struct slab *slab, uint64_t from, uint64_t to, bool written);
uint32_t slab_locate(const struct slab *slab, uint64_t page, uint32_t *segment);
/* On a worker: `count` pages of a slab, to or from a slot. */
int slab_pages_io(struct ring *ring, struct slab *slab, bool write, uint64_t page, uint64_t count, struct slot *slot, uint64_t inside);
/* On a worker: the content of pages; zeros where nothing was written. */
int slab_pages_load(struct ring *ring, struct slab *slab, uint64_t page, uint64_t count, struct slot *slot, uint64_t inside);

#endif
