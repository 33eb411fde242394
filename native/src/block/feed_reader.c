/* The readers of the feed. Layout and protocol: feed.h. */
#include "block/feed.h"

#include "base/sealed_memory.h"

#define ATTEMPTS 64

int feed_attach(int fd, uint64_t size, uint64_t position, uint64_t number, struct feed_reader *out) {
    int64_t there = sealed_size(fd);
    if (there < 0)
        return (int)there;
    if (!feed_size_possible(size) || (uint64_t)there != PAGE + size || position % 8)
        return -EBADMSG;
    void *memory = mmap(NULL, PAGE + size, PROT_READ, MAP_SHARED | MAP_NORESERVE, fd, 0);
    if (memory == MAP_FAILED)
        return -errno;
    const struct feed_header *header = memory;
    if (header->magic != FEED_MAGIC || header->size != size) {
        munmap(memory, PAGE + size);
        return -EBADMSG;
    }
    *out = (struct feed_reader){.memory = memory, .size = size, .position = position, .expected = number + 1};
    return 0;
}

void feed_detach(struct feed_reader *reader) {
    if (reader->memory)
        munmap((void *)(uintptr_t)reader->memory, PAGE + reader->size);
    reader->memory = NULL;
}

static uint64_t word_at(const struct feed_reader *reader, uint64_t position) {
    return atomic_load_explicit(feed_word(reader->memory, reader->size, position), memory_order_relaxed);
}

/* Nothing was written over what lies behind the reader's position. */
static bool is_whole(const struct feed_reader *reader) {
    const struct feed_header *header = (const void *)reader->memory;
    atomic_thread_fence(memory_order_acquire);
    return atomic_load_explicit(&header->begun, memory_order_relaxed) - reader->position <= reader->size;
}

/* Copies the record at the reader's position. Returns its size; 0: the chunk's last record lies behind; -EBADMSG. All of it may be torn. */
static int64_t record_copy(const struct feed_reader *reader, struct feed_record *out, char text[FEED_TEXT_MAX]) {
    uint64_t head = word_at(reader, reader->position), left = FEED_CHUNK - reader->position % FEED_CHUNK, size = (uint32_t)head;
    if (head == 0)
        return 0;
    *out = (struct feed_record){.kind = (uint8_t)(head >> 32), .reason = (uint8_t)(head >> 40), .text_size = (uint32_t)(head >> 48)};
    if (out->text_size > FEED_TEXT_MAX || size != 8 * FEED_HEAD_WORDS + round_up(out->text_size, 8) || size > left || out->kind < FEED_STORED ||
        out->kind > FEED_LOST)
        return -EBADMSG;
    out->number = word_at(reader, reader->position + 8);
    out->size = word_at(reader, reader->position + 16);
    out->time_ns = (int64_t)word_at(reader, reader->position + 24);
    out->anchor = word_at(reader, reader->position + 32);
    for (uint32_t done = 0; done < out->text_size; done += 8) {
        uint64_t word = word_at(reader, reader->position + 8 * FEED_HEAD_WORDS + done);
        memcpy(text + done, &word, min_u64(8, out->text_size - done));
    }
    return (int64_t)size;
}

/* Past the middle of what is there, at the begin of a chunk: time to catch up. */
static void catch_up(struct feed_reader *reader, uint64_t ended) { reader->position = round_up(ended - reader->size / 2, FEED_CHUNK); }

int feed_read(struct feed_reader *reader, struct feed_record *out, char text[FEED_TEXT_MAX], uint64_t *lost) {
    const struct feed_header *header = (const void *)reader->memory;
    *lost = 0;
    for (int attempt = 0; attempt < ATTEMPTS; attempt++) {
        uint64_t ended = atomic_load_explicit(&header->ended, memory_order_acquire);
        if (ended == reader->position)
            return 0;
        if (ended < reader->position || ended % 8)
            return -EBADMSG;
        if (ended - reader->position > reader->size) {
            catch_up(reader, ended);
            continue;
        }
        int64_t size = record_copy(reader, out, text);
        if (!is_whole(reader)) {
            catch_up(reader, ended);
            continue;
        }
        if (size < 0)
            return (int)size;
        if (size == 0) {
            reader->position = round_up(reader->position + 1, FEED_CHUNK);
            continue;
        }
        if (out->number < reader->expected || (uint64_t)size > ended - reader->position || memchr(text, 0, out->text_size))
            return -EBADMSG;
        *lost = out->number - reader->expected;
        reader->expected = out->number + 1;
        reader->position += (uint64_t)size;
        return 1;
    }
    return 0; /* overrun at every try: the next call goes on */
}
