/* The feed: which files became blocks and which blocks' names ended, in shared memory, for subscribers in any process. Not installed.
 *
 * One writer, within a step (I4), so records lie in the order of the changes. Any number of readers map the memfd read-only. They take no lock and
 * register nowhere, so one that stops costs the writer nothing. A reader that was overrun learns from the records' numbers how many it lost.
 *
 * Positions count bytes since the feed began and never wrap; a position's place is its remainder by the size. Records are whole words and cross no chunk;
 * a zero word sends the reader to the next one. So each chunk begins with a record, where a reader that was overrun goes on. The writer says in
 * `begun` where its record will end, writes it, and says so in `ended`. A reader copies a record, then looks at `begun`: the copy counts
 * if nothing behind its position can have been written over. Readers believe nothing: a feed that makes no sense is -EBADMSG.
 */
#ifndef KVFS_FEED_H
#define KVFS_FEED_H

#include "base/base.h"

#define FEED_CHUNK 65536u
#define FEED_SIZE_MIN (4u * FEED_CHUNK)
#define FEED_SIZE_MAX (1u << 30)
#define FEED_TEXT_MAX 4096u

/* STORED: the text leads to a block from now on, to another one if it did before. REMOVED: it leads to none. LOOK: a directory came to this path or
 * left it, so everything below has another path. LOST: a name ended that nobody could tell any more. */
enum feed_kind { FEED_STORED = 1, FEED_REMOVED = 2, FEED_LOOK = 3, FEED_LOST = 4 };

struct feed_record {
    uint64_t number; /* 1 for the first of the feed, then one more each */
    uint64_t size;   /* of the block, in bytes */
    int64_t time_ns; /* CLOCK_REALTIME */
    uint64_t anchor; /* the directory that the text is relative to; 1: the root */
    uint32_t kind;   /* enum feed_kind */
    uint32_t reason; /* enum kvfs_event_reason */
    uint32_t text_size;
};

/* ---- the writer ---- */

struct feed;
/* size: of the records, a multiple of FEED_CHUNK. */
int feed_create(uint64_t size, struct feed **out);
void feed_destroy(struct feed *feed);
int feed_fd(const struct feed *feed); /* owned by the feed */
uint64_t feed_size(const struct feed *feed);
/* Sets the record's number. text_size is at most FEED_TEXT_MAX. */
void feed_add(struct feed *feed, struct feed_record *record, const char *text);
/* Where the next record will be, and the number of the last. */
void feed_end(const struct feed *feed, uint64_t *position, uint64_t *number);

/* ---- a reader: one thread at a time ---- */

struct feed_reader {
    const uint64_t *memory;
    uint64_t size, position;
    uint64_t expected; /* the number of the next record */
};
/* The descriptor stays the caller's. -EBADMSG: that is no feed of this size, or it could be cut off under its readers. */
int feed_attach(int fd, uint64_t size, uint64_t position, uint64_t number, struct feed_reader *out);
void feed_detach(struct feed_reader *reader);
/* 1: the next record, and its text without a terminator; 0: there is none yet. *lost is how many before it were overrun. */
int feed_read(struct feed_reader *reader, struct feed_record *out, char text[FEED_TEXT_MAX], uint64_t *lost);

/* ---- the layout ---- */

#define FEED_MAGIC 0x3144454546534656ull /* "VFSFEED1" */
#define FEED_HEAD_WORDS 5u
#define FEED_RECORD_MAX (8u * FEED_HEAD_WORDS + FEED_TEXT_MAX)
/* The first page; records begin behind it. A record has five words: size | kind << 32 | reason << 40 | text_size << 48; number; size of the
 * block; time; anchor. Then comes the text, padded with zeros. */
struct feed_header {
    uint64_t magic, size;
    uint64_t unused[6];
    _Atomic uint64_t begun, ended, number; /* a line of their own */
};
static inline _Atomic uint64_t *feed_word(const void *memory, uint64_t size, uint64_t position) {
    return (_Atomic uint64_t *)((uintptr_t)memory + PAGE + position % size);
}
static inline bool feed_size_possible(uint64_t size) { return size >= FEED_SIZE_MIN && size <= FEED_SIZE_MAX && size % FEED_CHUNK == 0; }

#endif
