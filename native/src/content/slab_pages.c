/* The pages of a slab: which of them were written, where they lie, and their I/O on a worker. */
#include "content/slab.h"

struct slab *slab_ref(struct slab *slab) {
    atomic_fetch_add(&slab->refs, 1);
    return slab;
}

void slab_put(struct slab *slab) {
    if (!slab || atomic_fetch_sub(&slab->refs, 1) != 1)
        return;
    assert(!slab->writing);
    for (uint32_t i = 0; i < slab->run_count; i++)
        free(slab->runs[i].written);
    free(slab->runs);
    event_add(slab->plane, KVFS_EVENT_SLAB_FREE, slab->inode, slab->first_segment);
    free(slab);
}

bool slab_page_written(const struct slab *slab, uint64_t page) {
    uint64_t inside = page % slab->run_pages;
    return atomic_load_explicit(&slab->runs[page / slab->run_pages].written[inside / 64], memory_order_acquire) >> (inside % 64) & 1;
}

void slab_page_mark(struct slab *slab, uint64_t page, bool written) {
    uint64_t inside = page % slab->run_pages;
    atomic_ullong *word = &slab->runs[page / slab->run_pages].written[inside / 64];
    if (written)
        atomic_fetch_or_explicit(word, 1ull << (inside % 64), memory_order_release);
    else
        atomic_fetch_and_explicit(word, ~(1ull << (inside % 64)), memory_order_release);
}

uint64_t slab_stretch(const struct slab *slab, uint64_t from, uint64_t to, bool written) {
    uint64_t end = min_u64(to, (from / slab->run_pages + 1) * slab->run_pages), at = from + 1;
    while (at < end && slab_page_written(slab, at) == written)
        at++;
    return at;
}

uint32_t slab_locate(const struct slab *slab, uint64_t page, uint32_t *segment) {
    const struct slab_run *run = &slab->runs[page / slab->run_pages];
    *segment = run->segment;
    return run->page + (uint32_t)(page % slab->run_pages);
}

/* ---- on a worker, blocking ---- */

int slab_pages_io(struct ring *ring, struct slab *slab, bool write, uint64_t page, uint64_t count, struct slot *slot, uint64_t inside) {
    assert(inside % PAGE == 0);
    assert(inside + count * PAGE <= slot->size);
    for (uint64_t at = page, end = page + count, stop; at < end; at = stop) {
        stop = min_u64(end, (at / slab->run_pages + 1) * slab->run_pages);
        uint32_t segment, where = slab_locate(slab, at, &segment);
        struct iovec iov = {slot->data + inside + (at - page) * PAGE, (stop - at) * PAGE};
        int r = blocking_io(ring, write, segment, where, &iov, 1, &slot, 1);
        if (r == -ETIMEDOUT && write)
            atomic_store(&slab->failed, true);
        if (r < 0)
            return r;
    }
    return 0;
}

int slab_pages_load(struct ring *ring, struct slab *slab, uint64_t page, uint64_t count, struct slot *slot, uint64_t inside) {
    int r = 0;
    for (uint64_t at = page, end = page + count, stop; at < end && r == 0; at = stop) {
        bool written = slab_page_written(slab, at);
        stop = slab_stretch(slab, at, end, written);
        if (written)
            r = slab_pages_io(ring, slab, false, at, stop - at, slot, inside + (at - page) * PAGE);
        else
            memset(slot->data + inside + (at - page) * PAGE, 0, (stop - at) * PAGE);
    }
    return r;
}
