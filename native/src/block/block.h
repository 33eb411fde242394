/* How blocks look and lie in a pool: its geometry, block headers, and the descriptors that hold verified ones. */
#ifndef KVFS_BLOCK_H
#define KVFS_BLOCK_H

#include "base/base.h"
#include "block/checksum.h"
#include "block/table.h"
#include "kvfs_plane.h"

/* The sizes and the secret of a pool. Constant while it is open. */
struct geometry {
    uint64_t secret; /* of all checksums */
    uint64_t mount_epoch;
    uint64_t zone_size, stripe_unit, segment_size;
    uint32_t stripe_width, segment_count, segment_pages;
};

/* A verified block header, shared by all reads of a block. */
struct desc {
    atomic_uint refs;
    uint64_t inode, version, size, generation;
    uint32_t segment, page, header_pages, leaf_count, extent_count;
    const uint64_t *leaves;
    struct kvfs_extent *extents; /* at least one unless the file is empty; sorted by file_page */
    struct kvfs_extent inline_extent;
    uint8_t *header; /* header_pages * 4096, page aligned */
    uint8_t *parts;  /* enum desc_part of each header page, where only some are read; NULL: all are */
};
enum desc_part { PART_ABSENT, PART_WANTED, PART_READ, PART_PROVEN };
struct desc *desc_new(uint32_t header_pages);
void desc_put(struct desc *desc);
/* Check a header that was read into desc->header against what the table (or index) said; fills the rest. 0 or -EBADMSG. */
int desc_verify(const struct geometry *geometry, struct desc *desc, const struct kvfs_record *record);
/* Mark as wanted those header pages that hold the sums, the record and leaves [first, end), as far as the table's record tells. 0 or -ENOMEM. */
int desc_narrow(struct desc *desc, const struct kvfs_record *record, uint32_t first, uint32_t end);
/* desc_verify() for such a header: only these leaves are proved. -EAGAIN: pages are marked as wanted, which are to be read first. */
int desc_verify_part(const struct geometry *geometry, struct desc *desc, const struct kvfs_record *record, uint32_t first, uint32_t end);
/* True if kvfs can have written these inode records in a mount up to epoch_max. */
bool records_sound(const struct geometry *geometry, uint64_t epoch_max, const uint8_t *records, uint64_t size);
/* Magic, version, layout and every checksum of `pages` pages of header; copies out the fixed parts. 0 or -EBADMSG. */
int header_check(const struct geometry *geometry, const uint8_t *header, uint32_t pages, struct kvfs_block_header *out,
                 struct kvfs_inode_record *record);
/* True if kvfs can have written such a header, which was checked: its key is that of its record, and its words for eviction are possible. */
bool header_sound(const struct geometry *geometry, const uint8_t *header, const struct kvfs_block_header *h, const struct kvfs_inode_record *r);
/* The field parent_check of a block with this key; 0 of parent 0. */
uint64_t header_parent_check(const struct geometry *geometry, uint64_t parent, uint64_t key_low, uint64_t key_high);
int header_build(const struct geometry *geometry, struct desc *desc, const uint8_t *record, uint32_t record_size, const uint8_t *ancestors,
                 uint32_t ancestors_size, const struct kvfs_extent *extents, uint32_t extent_count, const uint64_t *leaves, uint32_t run_pages);
void extent_header_build(const struct geometry *geometry, uint8_t *page, uint64_t inode, const struct kvfs_run *run, uint32_t file_page);
void record_from_inode(const struct kvfs_inode_record *from, struct kvfs_record *to);

#endif
