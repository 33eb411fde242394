/* The block table: every name of the pool and every sealed block's place, in shared memory.
 *
 * One writer at a time (a thread of the daemon, within a step), and any number of readers in any process. Readers take no lock, register nowhere and
 * write nothing (I7). A memfd sealed against future writable mappings, created at its largest size, sparse. A projection of the index.
 */
#ifndef KVFS_TABLE_H
#define KVFS_TABLE_H

#include <stdint.h>
#include "kvfs_format.h"

/* The result of a lookup: a consistent copy. */
struct kvfs_record {
    uint64_t inode;
    uint64_t parent;
    uint64_t version;
    uint64_t size;
    uint64_t generation;
    uint32_t segment;
    uint32_t page;
    uint32_t header_pages;
    uint32_t extent_count;
    int64_t mtime_ns;
    int64_t ctime_ns;
    int64_t atime_ns;
    uint32_t mode;
    uint32_t uid;
    uint32_t gid;
    uint32_t nlink;
    uint8_t kind;  /* enum kvfs_kind */
    uint8_t flags; /* enum kvfs_inode_flags */
    uint8_t keyed; /* FOREIGN: the block's header has this very key; otherwise it was renamed after its seal */
    uint8_t reserved0;
    uint32_t slot;              /* of the record in the table, 0 to records_max; a rename may change it; for private side arrays */
    uint64_t key_low, key_high; /* of its name; only of blocks found in the table or in a pod map */
};

struct kvfs_table_statistics {
    uint64_t records; /* live */
    uint64_t blocks;  /* of them sealed files with a name */
    uint64_t records_max;
    uint64_t bytes; /* shared memory in use (bucket pages, record slots up to the high-water mark) */
    uint64_t buckets;
    uint64_t overflow_buckets;
    uint64_t ambiguous; /* names whose 128-bit key met another name's */
};

struct kvfs_table;

/* What Python asks of a table. The rest is C's: block/table.h. */
int kvfs_table_fd(const struct kvfs_table *table); /* owned by the table; safe to pass read-only */
/* While incomplete (at a rebuild), a missing name is -EAGAIN for readers, not -ENOENT. A new table is incomplete. */
void kvfs_table_set_complete(struct kvfs_table *table, int complete);
/* By any thread. 0, -ENOENT, or -EAGAIN: ask the daemon. */
int kvfs_table_find_name(const struct kvfs_table *table, uint64_t parent, const char *name, uint32_t name_size, struct kvfs_record *out);
void kvfs_table_statistics(const struct kvfs_table *table, struct kvfs_table_statistics *out);

#endif
