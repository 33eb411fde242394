/* The pod map and the news: the functions that C alone calls. The rest, and the rules: kvfs_pod.h. */
#ifndef KVFS_POD_FUNCTIONS_H
#define KVFS_POD_FUNCTIONS_H

#include "kvfs_pod.h"

/* ---- the map ---- */

/* Writer side: the daemon. 0 or -errno (-EINVAL: a field of config is out of its limits). */
int kvfs_pod_create(const struct kvfs_pod_config *config, struct kvfs_pod **out);
void kvfs_pod_destroy(struct kvfs_pod *pod); /* a created one, or NULL */
/* Reader side: another process. Maps read-only; checks seals, magic, version, sizes, checksum: -EBADMSG. */
int kvfs_pod_attach(int fd, uint64_t secret, struct kvfs_pod **out);
void kvfs_pod_detach(struct kvfs_pod *pod); /* an attached one, or NULL */

/* 0, -ENOENT, or -EAGAIN: a bounded number of retries was not enough, so ask again. Any thread, any process; never blocks. An entry that stays is
 * never missed, whatever the writer does beside it. The result is a place to look at, to be proved by what is read there. *out counts
 * with 0 alone. */
int kvfs_pod_find(const struct kvfs_pod *pod, uint64_t key_low, uint64_t key_high, struct kvfs_pod_found *out);
/* Until then (CLOCK_MONOTONIC, ns) entries of this segment are not found: its device fails for a reason that stays. 0 ends it. Any thread. In a
 * process that attached, for itself alone and for at most 64 segments at once. */
void kvfs_pod_avoid(struct kvfs_pod *pod, uint32_t segment, uint64_t until_ns);

/* ---- single records: any thread of the daemon; each takes the mutex for under a microsecond ---- */

/* 0: applied, or known already. -ESTALE: an entry, a `gone` or the segment has something newer. -EPERM: the segment is of another slot than
 * entry->slot, or of this node. -EINVAL: place or shape cannot be. -ENOSPC: no room. -EAGAIN: its segment waits for the sweep. */
int kvfs_pod_put(struct kvfs_pod *pod, const struct kvfs_pod_entry *entry);
/* `gone`: 0, or -ESTALE if the entry has a higher version. Also for a name of this node that comes over an entry. Change the block table first; then,
 * if kvfs_pod_version() is not 0, call this with the name's version. -ESTALE: this node's name is the one that loses. */
int kvfs_pod_remove(struct kvfs_pod *pod, uint64_t key_low, uint64_t key_high, uint64_t version);
/* The entry goes if it still has this place: a read there failed its proofs. 0, or -ENOENT. The owner's repeat may bring it again. */
int kvfs_pod_forget(struct kvfs_pod *pod, uint64_t key_low, uint64_t key_high, uint32_t segment, uint32_t page);
/* Version of the entry, or 0: there is none. */
uint64_t kvfs_pod_version(struct kvfs_pod *pod, uint64_t key_low, uint64_t key_high);

/* ---- batches ---- */

/* Check a batch, and copy out its head. 0; -EBADMSG: magic, sizes or checksum; -EPROTONOSUPPORT: version of a newer kvfs. Any thread. */
int kvfs_pod_batch_check(const void *batch, uint64_t size, uint64_t secret, struct kvfs_pod_batch *out);
/* Check a batch and apply it. conflicts and hits have room for KVFS_POD_BATCH_RECORDS_MAX each. table may be NULL: no conflicts and no hits.
 * Besides errors of the check: -EPERM: it is not of expected_slot; -EINVAL: expected_slot is this node's, or not below nodes; -ENOMEM. After an error
 * nothing has been applied. Numbers are the caller's to check, by kvfs_pod_batch_check(): batches twice are harmless, gaps are not noticed here.
 * Any thread of the daemon; takes the mutex for some 32 records at a time. The map is changed first, then the table is asked. So whoever changes the
 * table first, and then calls kvfs_pod_remove() with its version, is never hidden nor resurrected by an older record. */
int kvfs_pod_apply(struct kvfs_pod *pod, uint32_t expected_slot, const void *batch, uint64_t size, const struct kvfs_table *table,
                   struct kvfs_pod_conflict *conflicts, struct kvfs_pod_hit *hits, struct kvfs_pod_applied *out);

/* ---- news ---- */

int kvfs_news_create(const struct kvfs_news_config *config, struct kvfs_news **out); /* 0, -EINVAL, -ENOMEM, -errno */
void kvfs_news_destroy(struct kvfs_news *news);
/* Any thread of the daemon, within the step that changes the block table. Never blocks for longer than another add. No room: counted as lost. */
void kvfs_news_add(struct kvfs_news *news, const struct kvfs_news_item *item);
/* Wait, 2 s at most, until the queue of adds is half empty: for who adds much that can wait. Outside of steps. 0 or -ETIMEDOUT. */
int kvfs_news_pace(const struct kvfs_news *news);

#endif
