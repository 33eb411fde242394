/* Frames between libkvfs and the daemon on the pool's control socket (SOCK_STREAM, little-endian). The other end are frames/ and
 * kvfs/frontend/clients.py.
 *
 * A connection that begins with "KVFSCLI1" instead of '{' speaks frames: struct wire_frame and `size` bytes behind it. The client asks,
 * the daemon answers with the same type and id, in any order: a client may have many requests under way. HITS, TOUCH, DONE, REPORT, BAD_BLOCK and FOREIGN
 * have no answer; CLOSE comes unasked. An answer with status < 0 is -errno and its payload a message. Either side hangs up on a frame that breaks a
 * rule below. When the connection ends, the daemon takes back every reservation that was not committed, and ends every lease.
 */
#ifndef KVFS_WIRE_H
#define KVFS_WIRE_H

#include "kvfs_format.h"

#define KVFS_WIRE_VERSION 5 /* RESERVE names the block before by its number */
/* Format 2 came with it: a library that knows format 1 cannot read its blocks. Spoken too, by both sides: an upgrade of either leaves the other at
 * work. */
#define KVFS_WIRE_OLDEST 4
#define KVFS_WIRE_SIZE_MAX 16777216   /* of a payload */
#define KVFS_WIRE_FDS_MAX 128         /* in one frame */
#define KVFS_WIRE_ITEMS_MAX 4096      /* in one request */
#define KVFS_WIRE_DIRECTORIES_MAX 256 /* in one request */
#define KVFS_WIRE_SPACE_MAX 1023      /* of a path */
#define KVFS_WIRE_ERRNO_MAX 4095      /* of a status */

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
    WIRE_CLOSE = 11,
    WIRE_LEASE = 12,
    WIRE_RELEASE = 13,
    WIRE_EVENTS = 14,
    WIRE_TOUCH = 15,
    WIRE_FOREIGN = 16,
    WIRE_FOREIGN_LEASE = 17,
    WIRE_FRESH = 18,
    WIRE_DONE = 19 /* from version 5 on */
};
struct wire_frame {
    uint32_t size;
    uint16_t type;
    uint16_t reserved;
    int32_t status;
    uint32_t id;
};
static_assert(sizeof(struct wire_frame) == 16, "wire");

/* The first bytes of a connection, no frame before them. Answered by a HELLO frame, or one with a status and a message. -EPROTO: the daemon does
 * not speak this version; the client connects once more for each older one that it speaks. The version of a welcome is that of its hello. */
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
 * devices in order, O_DIRECT, then in a pod the pod map's memfd. Devices are opened for reading only if the client asked for that.
 * The id of the HELLO frame is the user that the daemon takes the client for, plus 1; 0: an older daemon, which does not say. */
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
    uint32_t pod;            /* 1: the last descriptor is the pod map's memfd; 0: the pool is no pod */
    uint32_t held;           /* 1: the mount outlives this daemon, and a next one is likely (kvfs/hold); an older daemon says 0 */
};
static_assert(sizeof(struct wire_welcome) == 80, "wire");

enum wire_flag {
    WIRE_TABLE = 1,  /* RESERVE, DELETE: directories come before the items, and each item is in one of them */
    WIRE_HASHES = 2, /* RESERVE, of version 4: each item has a uint64_t that says nothing here */
    WIRE_LONG = 4,   /* LIST: keys of more than 127 bytes, too */
    WIRE_PARENTS = 8 /* RESERVE: each item names the block before it */
};
/* RESERVE, DELETE, LIST: whose names. Then space_size bytes of namespace path. With WIRE_TABLE uint64_t count, 1 to KVFS_WIRE_DIRECTORIES_MAX, and
 * so many directories like LIST's keys: paths below the namespace, of at most 1023 bytes. An empty one is the namespace itself. Then come the items;
 * each part is padded to 8. Without WIRE_TABLE an item's name is its key in hex, of 1 to 127 bytes. It goes into the directory of its first two
 * characters, and its field `directory` is 0. With WIRE_TABLE a name is any that a file may have, in directory number `directory`. A RESERVE makes
 * directories that are not there. */
struct wire_where {
    uint64_t base;
    uint16_t space_size;
    uint16_t flags; /* enum wire_flag */
    uint32_t count;
};
static_assert(sizeof(struct wire_where) == 16, "wire");

/* RESERVE item: this; with WIRE_PARENTS uint64_t parent; then name_size bytes. parent: the block before this one in its chain, 0: there is none, or it
 * is not known. It is an inode number, or WIRE_ITEM and the number of an item before it in this request, from 0 on. It is a hint about the item's own
 * block: nothing else follows from it. */
#define WIRE_ITEM (UINT64_C(1) << 63)
struct wire_reserve {
    uint64_t size;
    uint32_t name_size;
    uint32_t directory;
};
static_assert(sizeof(struct wire_reserve) == 16, "wire");
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

/* DELETE items: this and name_size bytes, padded to 8. Answer: count uint8_t, 1 if there was one. */
struct wire_delete {
    uint32_t name_size;
    uint32_t directory;
};
static_assert(sizeof(struct wire_delete) == 8, "wire");
/* LIST: count is the most keys wanted; then uint64_t size and so many bytes: the key in hex after which to begin (0: from the first). Answer:
 * uint64_t count, then keys in the same form, in byte order; none at the end. */
/* LOOKUP: uint64_t parent, uint64_t name_size, name. Answer: the inode record, or status -ENOENT. */
/* BAD_BLOCK: uint64_t inode, uint64_t segment: its checksums failed twice. */
/* HITS: uint64_t inodes of blocks read. TOUCH: the same, of blocks that are used now without a read. DONE: of blocks
 * that nobody needs any more, as far as the client knows. */
/* LEASE: this and uint64_t inodes, at least one: the client has looked their names up. The blocks are kept until `milliseconds` have passed, 3,600,000
 * at most. With a lease that was answered before they are added to it, until its deadline; none is kept if it has ended. Answer: uint64_t lease (0:
 * nothing is kept), then a uint8_t for each inode: 1: it is kept; 0: it is not. */
struct wire_lease {
    uint64_t lease;        /* 0: a new one */
    uint32_t milliseconds; /* at least 1 */
    uint32_t reserved;
};
static_assert(sizeof(struct wire_lease) == 16, "wire");
/* FOREIGN: this and so many blocks of other nodes, whose names are known by their keys alone. It has no answer. HIT: they were read. TOUCH: they are
 * used now without a read. BAD: their bytes do not prove; this node forgets these places. */
enum wire_foreign_what { WIRE_FOREIGN_HIT = 1, WIRE_FOREIGN_TOUCH = 2, WIRE_FOREIGN_BAD = 3 };
struct wire_foreign {
    uint32_t what;
    uint32_t count; /* 1 to KVFS_WIRE_ITEMS_MAX */
};
struct wire_foreign_block {
    uint64_t key_low, key_high;
    uint32_t segment, page; /* where it was found */
};
static_assert(sizeof(struct wire_foreign_block) == 24, "wire");
/* FOREIGN_LEASE: struct wire_lease, then struct wire_foreign_block, at least one. As LEASE, of blocks of other nodes. Each owner is asked, all at one
 * time, for at most 50 ms. Without an answer none of its blocks is kept. A lease may have blocks of both kinds: LEASE and FOREIGN_LEASE add to it. */
/* FRESH: nothing. Answered, with nothing, when all is here that the other nodes had. */
/* RELEASE: uint64_t lease. Answer: uint64_t: 1: it was in force until now; 0: it had ended. */
/* EVENTS: this. BEGIN is answered by a struct wire_feed, with the feed's descriptor on the first byte of the frame. The feed ends with the last
 * connection that asked for it. PATH is answered by a directory's path from the root, without a leading slash, or -ENOENT. */
enum wire_events_operation { KVFS_WIRE_EVENTS_BEGIN = 1, KVFS_WIRE_EVENTS_PATH = 2 };
struct wire_events {
    uint32_t operation;
    uint32_t reserved;
    uint64_t inode;
};
static_assert(sizeof(struct wire_events) == 16, "wire");
struct wire_feed {
    uint64_t size;     /* of its records */
    uint64_t position; /* of the next record */
    uint64_t number;   /* of the last one before */
};
static_assert(sizeof(struct wire_feed) == 24, "wire");
/* REPORT: uint64_t, in the order of struct kvfs_client_statistics: totals of this client so far, then `busy`, which is none. */

#endif
