/* The bytes of the journal of names (docs/format.md, "Journal of names"): a header of one page, then a ring of entries. Memory of a machine, never on a
 * device: in the machine's byte order. */
#ifndef KVFS_JOURNAL_LAYOUT_H
#define KVFS_JOURNAL_LAYOUT_H

#include <assert.h>
#include <stdatomic.h>
#include <stdint.h>

#include "kvfs_names.h"

#define JOURNAL_MAGIC UINT64_C(0x314c4e524a46564b) /* "KVFJRNL1" */
#define JOURNAL_HEADER_SIZE 4096u

/* Positions count bytes since the journal was made, and lie in the ring at their remainder: head <= tail <= head + the ring's size. All before the
 * tail is whole: it moves at the end of a step. */
struct journal_header {
    uint64_t magic;
    uint32_t version;
    uint32_t header_size;
    uint64_t size;     /* of all the memory */
    uint64_t id;       /* drawn; the index says of which journal it has what */
    uint64_t checksum; /* of what is before it */
    uint64_t reserved[3];
    _Atomic uint64_t head;     /* of the first entry */
    _Atomic uint64_t tail;     /* behind the last one */
    _Atomic uint64_t durable;  /* the index has all up to this sequence number */
    _Atomic uint64_t sequence; /* the last number that was given */
};
static_assert(sizeof(struct journal_header) == 96, "format");

/* Its checksum: of the entry with this field zero, seeded with the id; then of the data, seeded with the former. */
struct journal_entry {
    struct kvfs_journal_entry told;
    uint64_t checksum;
};
static_assert(sizeof(struct kvfs_journal_entry) == 48 && sizeof(struct journal_entry) == 56, "format");

#endif
