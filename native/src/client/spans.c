/* Where the pages of a read go: into the caller's memory, or beside it.
 *
 * The bytes that are wanted are spread over pieces of memory, of any size and alignment. Devices read whole pages. A page that lies wholly in one
 * piece, at an address that devices can write to, is read in place. Every other page is cut by the edge of a piece or of the range, or misaligned. It is
 * bounced: read to memory of the fetch, and copied out once its leaf is proved.
 */
#include "client/client.h"

/* The pieces of the plan, and twice as many spans and one, lie in one allocation that the fetch keeps. */
static int spans_room(struct spans *spans, uint32_t pieces) {
    if (pieces <= spans->capacity)
        return 0;
    uint32_t capacity = pieces < 4 ? 4 : pieces;
    void *memory = malloc(capacity * sizeof(struct kvfs_buffer) + (2 * (uint64_t)capacity + 1) * sizeof(struct span));
    if (!memory)
        return -ENOMEM;
    free(spans->pieces);
    spans->pieces = memory;
    spans->list = (struct span *)(void *)(spans->pieces + capacity);
    spans->capacity = capacity;
    return 0;
}

void spans_free(struct spans *spans) { free(spans->pieces); }

/* Copy the pieces as far as there are bytes for them; neighbours in memory become one. */
static void pieces_take(struct spans *spans, const struct kvfs_buffer *pieces, uint64_t size) {
    spans->piece_count = 0;
    for (; size; pieces++) {
        struct kvfs_buffer *last = spans->piece_count ? &spans->pieces[spans->piece_count - 1] : NULL;
        uint64_t part = min_u64(pieces->size, size);
        if (last && (uint8_t *)last->data + last->size == pieces->data)
            last->size += part;
        else if (part)
            spans->pieces[spans->piece_count++] = (struct kvfs_buffer){pieces->data, part};
        size -= part;
    }
}

static void span_add(struct spans *spans, uint64_t from, uint64_t to, uint8_t *memory) {
    if (from == to)
        return;
    spans->list[spans->count++] = (struct span){(uint32_t)from, (uint32_t)to, memory, false};
    if (!memory)
        spans->bounced_pages += (uint32_t)(to - from);
}

int spans_plan(struct spans *spans, const struct kvfs_buffer *pieces, uint32_t count, uint64_t offset, uint64_t size, uint32_t alignment) {
    if (spans_room(spans, count) < 0)
        return -ENOMEM;
    pieces_take(spans, pieces, size);
    spans->offset = offset;
    spans->size = size;
    spans->count = spans->bounced_pages = 0;
    uint64_t planned = offset / PAGE, at = offset;
    for (uint32_t i = 0; i < spans->piece_count; i++) {
        uint8_t *data = spans->pieces[i].data;
        uint64_t from = pages_of(at), to = (at + spans->pieces[i].size) / PAGE;
        if (from < to && ((uintptr_t)data - at) % alignment == 0) {
            span_add(spans, planned, from, NULL);
            span_add(spans, from, to, data + (from * PAGE - at));
            planned = to;
        }
        at += spans->pieces[i].size;
    }
    if (size)
        span_add(spans, planned, pages_of(at), NULL);
    assert(spans->count <= 2 * spans->capacity + 1);
    return 0;
}

void spans_bounce(struct spans *spans, uint8_t *memory) {
    for (struct span *span = spans->list; span < spans->list + spans->count; span++)
        if (!span->memory) {
            span->bounced = true;
            span->memory = memory;
            memory += (span->to - span->from) * PAGE;
        }
}

uint32_t spans_memory(const struct spans *spans, uint32_t from, uint32_t *to, struct iovec *iovs, uint32_t capacity) {
    const struct span *span = spans->list;
    uint32_t count = 0;
    while (span->to <= from)
        span++;
    for (; from < *to && count < capacity; span++) {
        uint32_t stop = (uint32_t)min_u64(*to, span->to);
        assert(span < spans->list + spans->count && span->from <= from);
        iovs[count++] = (struct iovec){span->memory + (from - span->from) * PAGE, (stop - from) * PAGE};
        from = stop;
    }
    *to = from;
    return count;
}

uint64_t spans_copy_out(const struct spans *spans) {
    uint64_t at = spans->offset, copied = 0; /* where the piece begins */
    const struct kvfs_buffer *piece = spans->pieces;
    for (const struct span *span = spans->list; span < spans->list + spans->count; span++) {
        if (!span->bounced)
            continue;
        uint64_t start = span->from * PAGE, from = start > spans->offset ? start : spans->offset;
        uint64_t to = min_u64(span->to * PAGE, spans->offset + spans->size);
        copied += to - from;
        while (from < to) {
            while (at + piece->size <= from)
                at += piece++->size;
            uint64_t size = min_u64(to, at + piece->size) - from;
            memcpy((uint8_t *)piece->data + (from - at), span->memory + (from - start), size);
            from += size;
        }
    }
    return copied;
}

bool spans_overlap(const struct spans *spans, const uint8_t *data, uint64_t size) {
    for (const struct kvfs_buffer *piece = spans->pieces; piece < spans->pieces + spans->piece_count; piece++)
        if ((uint8_t *)piece->data < data + size && data < (uint8_t *)piece->data + piece->size)
            return true;
    return false;
}
