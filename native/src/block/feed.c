/* The writer of the feed. Layout and protocol: feed.h. */
#include "base/descriptor.h"
#include "block/feed.h"
#include "base/sealed_memory.h"

#include <fcntl.h>
#include <sys/mman.h>

struct feed {
    struct feed_header *header;
    uint64_t size, position, number;
    int fd;
};

int feed_create(uint64_t size, struct feed **out) {
    if (!feed_size_possible(size))
        return -EINVAL;
    struct feed *feed = calloc(1, sizeof(*feed));
    if (!feed)
        return -ENOMEM;
    feed->size = size;
    feed->fd = descriptor_above(memfd_create("kvfs-feed", MFD_ALLOW_SEALING | MFD_CLOEXEC));
    void *memory = MAP_FAILED;
    if (feed->fd >= 0 && ftruncate(feed->fd, (off_t)(PAGE + size)) == 0)
        memory = mmap(NULL, PAGE + size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, feed->fd, 0);
    feed->header = memory == MAP_FAILED ? NULL : memory;
    int r = feed->header ? sealed_make(feed->fd) : -errno;
    if (r < 0) {
        feed_destroy(feed);
        return r;
    }
    feed->header->size = size;
    feed->header->magic = FEED_MAGIC;
    *out = feed;
    return 0;
}

void feed_destroy(struct feed *feed) {
    if (!feed)
        return;
    if (feed->header)
        munmap(feed->header, PAGE + feed->size);
    if (feed->fd >= 0)
        close(feed->fd);
    free(feed);
}

int feed_fd(const struct feed *feed) { return feed->fd; }

uint64_t feed_size(const struct feed *feed) { return feed->size; }

void feed_end(const struct feed *feed, uint64_t *position, uint64_t *number) {
    *position = feed->position;
    *number = feed->number;
}

static void put_word(struct feed *feed, uint64_t position, uint64_t word) {
    atomic_store_explicit(feed_word(feed->header, feed->size, position), word, memory_order_relaxed);
}

void feed_add(struct feed *feed, struct feed_record *record, const char *text) {
    struct feed_header *header = feed->header;
    const uint64_t size = 8 * FEED_HEAD_WORDS + round_up(record->text_size, 8), left = FEED_CHUNK - feed->position % FEED_CHUNK;
    const bool skips = size > left;
    uint64_t at = feed->position + (skips ? left : 0), word = 0;
    assert(record->text_size <= FEED_TEXT_MAX);
    record->number = ++feed->number;
    atomic_store_explicit(&header->begun, at + size, memory_order_relaxed);
    atomic_thread_fence(memory_order_release);
    if (skips)
        put_word(feed, feed->position, 0);
    put_word(feed, at, size | (uint64_t)record->kind << 32 | (uint64_t)record->reason << 40 | (uint64_t)record->text_size << 48);
    put_word(feed, at + 8, record->number);
    put_word(feed, at + 16, record->size);
    put_word(feed, at + 24, (uint64_t)record->time_ns);
    put_word(feed, at + 32, record->anchor);
    at += 8 * FEED_HEAD_WORDS;
    for (uint32_t done = 0; done < record->text_size; done += 8, at += 8, word = 0) {
        memcpy(&word, text + done, min_u64(8, record->text_size - done));
        put_word(feed, at, word);
    }
    feed->position = at;
    atomic_store_explicit(&header->number, record->number, memory_order_relaxed);
    atomic_store_explicit(&header->ended, at, memory_order_release);
}
