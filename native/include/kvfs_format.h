/* On-disk structures of a kvfs pool, little-endian, as docs/format.md describes them.
 *
 * The same inode record is used four times: in the index's table `inodes`, inside every block header, in segment summaries, and as the
 * input of kvfs_table_load(). A record is made once, and written verbatim.
 */
#ifndef KVFS_FORMAT_H
#define KVFS_FORMAT_H

#include <assert.h>
#include <stdint.h>

#define KVFS_FORMAT_VERSION 2
#define KVFS_PAGE_SIZE 4096
#define KVFS_NAME_MAX 255
/* Inode numbers, versions, generations and sequences: the epoch of a mount, a counter, and the slot of the node that gave the number. Where a pool has
 * one node, the counter has the slot's bits too. A version is above all that its node has seen, so its epoch may be another node's. */
#define KVFS_SLOT_BITS 12
#define KVFS_COUNTER_BITS 40 /* of counter and slot */
#define KVFS_EPOCH_MAX ((UINT64_C(1) << 21) - 1)
/* The inode number of a pod's directory is made of its parent and its name: every node that makes it makes the same one. */
#define KVFS_INODE_DERIVED (UINT64_C(1) << 62)
/* Every checksum below is xxh3-64 with the pool's 64-bit secret as the seed, unless it says otherwise. */
#define KVFS_LABEL_SIZE 65536
#define KVFS_DEVICES_MAX 256
#define KVFS_STRIPE_WIDTH_MAX 32

/* Little-endian ASCII: "KVFSLABL", "KVFSSEGM", "KVFSBLCK", "KVFSEXTN", "KVFSSUMM". */
#define KVFS_MAGIC_LABEL 0x4c42414c5346564bULL
#define KVFS_MAGIC_SEGMENT 0x4d4745535346564bULL
#define KVFS_MAGIC_BLOCK 0x4b434c425346564bULL
#define KVFS_MAGIC_EXTENT 0x4e5458455346564bULL
#define KVFS_MAGIC_SUMMARY 0x4d4d55535346564bULL

enum kvfs_kind { KVFS_KIND_FILE = 1, KVFS_KIND_DIRECTORY = 2, KVFS_KIND_SYMLINK = 3 };

enum kvfs_inode_flags {
    KVFS_INODE_SEALED = 1,    /* has a block on the devices */
    KVFS_INODE_PINNED = 2,    /* never evicted */
    KVFS_INODE_REWRITTEN = 4, /* sealed more than once, or open elsewhere while it was written: never FOPEN_KEEP_CACHE */
    KVFS_INODE_NAMELESS = 8,  /* unlinked or replaced while open; only found by inode number */
    KVFS_INODE_ASK = 16,      /* the data plane must ask Python */
    KVFS_INODE_SLAB = 32,     /* overwritten in place, in its own segments; never on a device */
    KVFS_INODE_BORROWED = 64, /* a directory of another node of a pod, in which nothing was made here */
    KVFS_INODE_FOREIGN = 128  /* a block or directory of another node of the pod, by its pod map; never on a device */
};

/* A run of pages in a segment that holds a run of a file's pages. Pages are 4 KiB. A file page covered by no extent reads as zeros. */
struct kvfs_extent {
    uint64_t generation; /* of the segment when it was written */
    uint32_t segment;
    uint32_t page; /* first page of data, in the segment's own address space */
    uint32_t page_count;
    uint32_t file_page; /* first page in the file */
};
static_assert(sizeof(struct kvfs_extent) == 24, "format");

/* Fixed part of an inode record. Followed by: name, extents (extent_count * 24), xattrs (xattr_size), zeros to a multiple of 8; record_size
 * counts all of it. extents begin at 128 + name_size rounded up to 8. */
struct kvfs_inode_record {
    uint32_t record_size;
    uint8_t kind;  /* enum kvfs_kind */
    uint8_t flags; /* enum kvfs_inode_flags */
    uint16_t name_size;
    uint64_t inode;
    uint64_t parent;     /* inode number of the directory */
    uint64_t version;    /* pool-wide sequence: of the content and name; the highest wins */
    uint64_t size;       /* bytes */
    uint64_t generation; /* of the home segment */
    uint32_t segment;    /* home segment: where the block header lies */
    uint32_t page;       /* of the block header in the home segment */
    uint32_t header_pages;
    uint32_t extent_count; /* 0: one extent, directly behind the header, of ceil(size / 4096) pages */
    int64_t mtime_ns;
    int64_t ctime_ns;
    int64_t atime_ns;
    uint32_t mode; /* st_mode, with the type bits */
    uint32_t uid;
    uint32_t gid;
    uint32_t nlink;
    uint32_t xattr_size;
    uint32_t reserved0; /* zero: encryption key, compression */
    uint64_t reserved1; /* zero */
    uint64_t reserved2; /* zero */
};
static_assert(sizeof(struct kvfs_inode_record) == 128, "format");

/* First page of a segment. */
struct kvfs_segment_header {
    uint64_t magic;
    uint32_t version;
    uint32_t flags;    /* zero */
    uint64_t checksum; /* of the page with this field zero */
    uint64_t generation;
    uint64_t owner_epoch; /* mount epoch of the node that writes it */
    uint8_t pool_uuid[16];
    uint32_t segment;
    uint32_t stripe_width;
    uint64_t zone_size;
    uint64_t stripe_unit;
    uint32_t stream;
    uint32_t slot; /* of the node that owns the segment; 0 where a pool has one node */
    struct {
        uint32_t device;
        uint32_t zone;
    } members[KVFS_STRIPE_WIDTH_MAX];
};
static_assert(sizeof(struct kvfs_segment_header) == 88 + 8 * KVFS_STRIPE_WIDTH_MAX, "format");

/* First bytes of a block header. In order, each part 8-byte aligned: this struct; header_pages - 1 page checksums; the inode record; the
 * ancestors; leaf checksums (leaf_count of uint64_t); zeros. Page checksums are uint64_t, of header pages 1, 2, ...: each lies in a page
 * that is proven before it is used. Ancestors are ancestors_size bytes of concatenated inode records: the directories above, nearest first,
 * without the root. */
struct kvfs_block_header {
    uint64_t magic;
    uint32_t version;
    uint32_t flags;    /* zero */
    uint64_t checksum; /* of the first page with this field zero */
    uint64_t key_low;  /* xxh3-128, seeded with the secret, of (parent as 8 bytes, name) at the seal */
    uint64_t key_high;
    uint64_t owner_epoch;
    uint32_t header_pages;
    uint32_t leaf_count; /* ceil(size / 4096) */
    uint32_t record_offset;
    uint32_t ancestors_offset;
    uint32_t ancestors_size;
    uint32_t sums_offset; /* page checksums: 104 */
    uint32_t leaves_offset;
    uint32_t run_pages; /* pages from this header to the next header in this segment: header and the data behind it */
    /* For eviction. Nothing sets them yet: all are written as zero, which says that nothing is known. */
    uint64_t parent;       /* inode number of the block before this one in its chain */
    uint64_t parent_check; /* xxh3-64, seeded, of (parent, key_low, key_high): it was meant for this block; 0 if parent is 0 */
    int64_t keep_until_ns; /* since 1970: not to be evicted before */
};
static_assert(sizeof(struct kvfs_block_header) == 104, "format");

/* One page before a run of data that belongs to a block whose header lies elsewhere, so that a scan can step over it. */
struct kvfs_extent_header {
    uint64_t magic;
    uint32_t version;
    uint32_t flags;
    uint64_t checksum; /* of the page with this field zero */
    uint64_t inode;
    uint64_t generation;
    uint64_t owner_epoch;
    uint32_t segment;
    uint32_t page;      /* of this header */
    uint32_t run_pages; /* this page and the data behind it */
    uint32_t file_page;
};
static_assert(sizeof(struct kvfs_extent_header) == 64, "format");

/* A segment's summary: this header, then entries_size bytes of inode records. They are the records of blocks whose header lies in this segment,
 * under their current names, and of every directory above them. Two slots at the segment's end; the higher sequence is valid. */
struct kvfs_summary_header {
    uint64_t magic;
    uint32_t version;
    uint32_t flags;    /* bit 0: the segment is closed; bit 1: the entries are a zlib stream */
    uint64_t checksum; /* of these 88 bytes with this field zero, then of the entries */
    uint64_t generation;
    uint64_t sequence; /* counts the writes of this segment's summaries in this generation */
    uint64_t owner_epoch;
    uint8_t pool_uuid[16];
    uint32_t segment;
    uint32_t entry_count;
    uint64_t entries_size;
    uint32_t covered_page; /* headers at or behind this page are not described here: scan them */
    uint32_t reserved;
};
static_assert(sizeof(struct kvfs_summary_header) == 88, "format");

/* First 4 KiB of a label; the text of pool.toml follows at 4096. */
struct kvfs_label {
    uint64_t magic;
    uint32_t version;
    uint32_t flags;
    uint64_t checksum; /* of the whole label, 65536 bytes, with this field zero; unseeded: the secret is inside */
    uint8_t pool_uuid[16];
    uint8_t device_uuid[16];
    uint64_t mount_epoch;
    uint32_t device_index;
    uint32_t device_count;
    uint64_t device_size; /* bytes in use, a multiple of 4096: the second label ends here */
    uint64_t zone_size;
    uint64_t stripe_unit;
    uint32_t stripe_width;
    uint32_t zone_count;   /* on this device */
    uint64_t zones_offset; /* where zone 0 begins */
    uint64_t text_size;    /* bytes of pool.toml */
};
static_assert(sizeof(struct kvfs_label) == 120, "format");

#endif
