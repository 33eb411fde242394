/* Frames between libkvfs and the daemon on the pool's control socket (SOCK_STREAM, little-endian). content/reserve.c, content/commit.c and
 * kvfs/frontend/clients.py are the other end.
 *
 * A connection that begins with "KVFSCLI1" instead of '{' speaks frames: struct wire_frame and `size` bytes behind it. The client asks,
 * the daemon answers with the same type and id, in any order: a client may have many requests under way. HITS, REPORT and BAD_BLOCK have no
 * answer; CLOSE comes unasked. An answer with status < 0 is -errno and its payload a message. Either side hangs up on a frame that breaks a rule below.
 * When the connection ends, the daemon takes back every reservation that was not committed.
 */
#ifndef KVFS_WIRE_FORMAT_H
#define KVFS_WIRE_FORMAT_H

#include "kvfs_format.h"

#define KVFS_WIRE_VERSION 3            /* version 3 has every frame of version 2, as it is there, and more */
#define KVFS_WIRE_OLDEST 2             /* spoken too, by both sides: an upgrade of either leaves the other at work */
#define KVFS_WIRE_SIZE_MAX (16u << 20) /* of a payload */
#define KVFS_WIRE_FDS_MAX 128          /* in one frame */
#define KVFS_WIRE_ITEMS_MAX 4096       /* in one request */
#define KVFS_WIRE_TOTALS_2 16          /* of a REPORT of version 2 */
#define KVFS_WIRE_ERRNO_MAX 4095       /* of a status */

enum wire_type {
    WIRE_HELLO = 1,
    WIRE_DESCRIPTORS = 2,
    WIRE_RESERVE = 3,
    WIRE_COMMIT = 4,
    WIRE_DELETE = 5,
    WIRE_LIST = 6,
    WIRE_LOOKUP = 7,
    WIRE_BAD_BLOCK = 8,
    WIRE_HITS = 9,
    WIRE_REPORT = 10,
    WIRE_CLOSE = 11
};
struct wire_frame {
    uint32_t size;
    uint16_t type;
    uint16_t reserved;
    int32_t status;
    uint32_t id;
};
static_assert(sizeof(struct wire_frame) == 16, "wire");

/* The version that has this type first. */
static inline uint32_t wire_type_since(uint16_t type) { return type <= WIRE_CLOSE ? 2 : 3; }

/* The first bytes of a connection, no frame before them. Answered by a HELLO frame, or one with a status and a message. -EPROTO: the daemon does
 * not speak this version; the client connects once more and tries the one before. The version of a welcome is that of its hello. */
struct wire_hello {
    uint8_t magic[8];    /* "KVFSCLI1" */
    uint32_t version;    /* KVFS_WIRE_OLDEST to KVFS_WIRE_VERSION */
    uint32_t flags;      /* enum kvfs_client_flags: KVFS_READ_ONLY */
    uint32_t timeout_ms; /* how long the client waits for an answer: a RESERVE is answered within three quarters of it */
    uint32_t reserved;
};
static_assert(sizeof(struct wire_hello) == 24, "wire");

/* Answer to hello, then device_count uint64_t (zones_offset), then segment_count * stripe_width { uint32_t device, zone }. Then come DESCRIPTORS
 * frames without payload, each with up to KVFS_WIRE_FDS_MAX descriptors (SCM_RIGHTS) on its first byte. They are the block table's memfd, then the
 * devices in order, O_DIRECT. Devices are opened for reading only if the client asked for that. */
struct wire_welcome {
    uint32_t version;
    uint32_t writable;
    uint8_t pool_uuid[16];
    uint64_t mount_epoch;
    uint64_t secret;
    uint64_t zone_size;
    uint64_t stripe_unit;
    uint32_t stripe_width;
    uint32_t segment_count;
    uint32_t device_count;
    uint32_t reservation_ms; /* after this long an uncommitted reservation is taken back */
};
static_assert(sizeof(struct wire_welcome) == 72, "wire");

/* RESERVE, DELETE, LIST: whose names. Then space_size bytes of namespace path; then what the type says, each item 8-byte aligned from
 * the payload's start. */
struct wire_where {
    uint64_t base;
    uint32_t space_size;
    uint32_t count;
};
static_assert(sizeof(struct wire_where) == 16, "wire");

/* RESERVE item: this and name_size bytes, padded to 8: the key's hex name; it goes into the directory of its first two characters. */
struct wire_reserve {
    uint64_t size;
    uint32_t name_size;
    uint32_t reserved;
};
/* Answer, one per item: this; run_count struct wire_run; record_size bytes; ancestors_size bytes; each part padded to 8. The record is the inode
 * record, with extents, as the block header is to have it. With error < 0 nothing follows. */
struct wire_reserved {
    uint64_t reservation;
    int32_t error;
    uint32_t header_pages;
    uint32_t run_count;
    uint32_t record_size;
    uint32_t ancestors_size;
    uint32_t reserved;
};
static_assert(sizeof(struct wire_reserved) == 32, "wire");
struct wire_run {
    uint64_t generation;
    uint32_t segment;
    uint32_t page;
    uint32_t page_count;
    uint32_t reserved;
};
static_assert(sizeof(struct wire_run) == 24, "wire");

/* COMMIT: uint64_t count, then items. error: 0 written, or -errno: not written, take it back. -ECANCELED: nothing of it was begun; -ETIMEDOUT: some
 * may still land, and another item for it says when it cannot any more. Answer: count int64_t, 0 or -errno. */
struct wire_commit {
    uint64_t reservation;
    int64_t error;
};

/* DELETE items: uint64_t name_size, name, padded to 8. Answer: count uint8_t, 1 if there was one. */
/* LIST: count is the most names wanted; one item like DELETE's: the name after which to begin (name_size 0: from the first). Answer: uint64_t
 * count, then items like DELETE's: names, in order; none at the end. */
/* LOOKUP: uint64_t parent, uint64_t name_size, name. Answer: the inode record, or status -ENOENT. */
/* BAD_BLOCK: uint64_t inode, uint64_t segment: its checksums failed twice. */
/* HITS: uint64_t inodes of blocks read. */
/* REPORT: uint64_t, in the order of struct kvfs_client_statistics: totals of this client so far, the last (`busy`) not among them. Version 2 has
 * the first 16 and the last. */

#endif
