/* The block table's functions: those of its one writer, and those of its readers. */
#ifndef KVFS_BLOCK_TABLE_H
#define KVFS_BLOCK_TABLE_H

#include "kvfs_table.h"

/* Writer side: one thread at a time. 0 or -errno. */
int kvfs_table_create(uint64_t records_max, uint64_t secret, uint64_t mount_epoch, struct kvfs_table **out);
void kvfs_table_destroy(struct kvfs_table *table);

/* Insert or change: afterwards `name` in record->parent leads to record->inode and nothing else does. If the inode had another name
 * (rename), that name is gone. If the name led to another inode, that inode's record is freed. With keep_replaced it stays findable by its
 * number, with KVFS_INODE_NAMELESS set. At no moment does a concurrent find miss a `name` that was there before. -ENOSPC when full. */
int kvfs_table_put(struct kvfs_table *table, const struct kvfs_record *record, const char *name, uint32_t name_size, int keep_replaced);
/* Change attributes or place of an inode in the table; its name stays. -ENOENT. */
int kvfs_table_update(struct kvfs_table *table, const struct kvfs_record *record);
/* Remove name and record, or with keep only the name (NAMELESS is set). -ENOENT. */
int kvfs_table_remove(struct kvfs_table *table, uint64_t inode, int keep);
/* Put every inode record of a buffer of concatenated `struct kvfs_inode_record`s. Each is validated. -EBADMSG names no offset, but no
 * record behind the bad one is loaded. Returns how many were put, or -errno. */
int64_t kvfs_table_load(struct kvfs_table *table, const void *records, uint64_t size);

/* Where each sealed file with a name begins, by its record's slot: segment | pages << 32, with the pages of header and content. 0: no such file.
 * *count: of slots that were ever used. Any thread of the daemon; the writer changes it meanwhile. */
const uint64_t *kvfs_table_places(const struct kvfs_table *table, uint32_t *count);

/* Records that eviction cannot take: directories, symbolic links, files that are not sealed, and those without a name. From now on `kept` is told of
 * each that comes (1) or goes (-1), and who pays for it: its owner, or whom kvfs_table_charge() has named. Before the first record. */
void kvfs_table_watch(struct kvfs_table *table, void (*kept)(void *of, uint32_t user, int change), void *of);
/* If it is such a record, this user pays for it from now on, whoever owns it; 0: the owner does. -ENOENT. */
int kvfs_table_charge(struct kvfs_table *table, uint64_t inode, uint32_t user);

/* A file of this inode number begins (1) or ends (-1) to have content that is not in its record. Any thread of the daemon. */
void kvfs_table_count_written(struct kvfs_table *table, uint64_t inode, int change);

/* Reader side: any thread, any process. 0, -ENOENT, or -EAGAIN: ask the daemon. Reasons for -EAGAIN: a bounded number of retries was not
 * enough, the table is incomplete, or two names share a key. */
int kvfs_table_attach(int fd, uint64_t secret, struct kvfs_table **out); /* maps read-only; checks magic, version, sizes: -EBADMSG */
void kvfs_table_detach(struct kvfs_table *table);                        /* an attached one, or NULL */
/* By kvfs_name_key() of parent and name; low is 1 where both halves are zero. */
int kvfs_table_find_key(const struct kvfs_table *table, uint64_t key_low, uint64_t key_high, struct kvfs_record *out);
/* The next record that has a name, with the name's key. *slot is 0 to begin with, and belongs to the scan. 1, or 0: there are no more. A record that
 * is renamed meanwhile may be missed or met twice. */
int kvfs_table_scan(const struct kvfs_table *table, uint64_t *slot, struct kvfs_record *out, uint64_t *key_low, uint64_t *key_high);
int kvfs_table_find_inode(const struct kvfs_table *table, uint64_t inode, struct kvfs_record *out);
/* 0: no file of this inode number is being written; a record looked up after that is up to date. 1: perhaps. */
int kvfs_table_is_written(const struct kvfs_table *table, uint64_t inode);
uint64_t kvfs_table_mount_epoch(const struct kvfs_table *table);

#endif
