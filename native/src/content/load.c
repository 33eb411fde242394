/* Content that lies on devices, read by a worker, which waits: headers, and the placed chunks of files being written. */
#include "content/content.h"

/* Memory that may be freed before a late device answers is never read into. The read goes through a slot, which the group holds. */
static int bounce_read(struct kvfs_plane *plane, struct ring *ring, uint32_t segment, uint32_t page, uint8_t *data, uint64_t size) {
    while (size) {
        uint64_t length = min_u64(size, CHUNK_SIZE);
        struct slot *slot = slot_get_extra(&plane->reading);
        if (!slot)
            return -ENOMEM;
        int r = blocking_io(ring, false, segment, page, &(struct iovec){slot->data, length}, 1, &slot, 1);
        if (r == 0)
            memcpy(data, slot->data, length);
        slot_put(slot);
        if (r < 0)
            return r;
        data += length;
        size -= length;
        page += (uint32_t)(length / PAGE);
    }
    return 0;
}

int placed_read(struct kvfs_plane *plane, struct ring *ring, const struct placed *placed, uint32_t first_page, uint32_t page_count, uint8_t *data) {
    assert((uintptr_t)data % PAGE == 0);
    assert(page_count <= CHUNK_PAGES);
    memset(data, 0, page_count * PAGE);
    uint64_t end = (uint64_t)first_page + page_count;
    for (uint32_t i = 0; i < placed->extent_count; i++) {
        const struct kvfs_extent *e = &placed->extents[i];
        uint64_t from = e->file_page > first_page ? e->file_page : first_page;
        uint64_t to = min_u64(end, (uint64_t)e->file_page + e->page_count);
        if (from >= to)
            continue;
        uint8_t *at = data + (from - first_page) * PAGE;
        int r = bounce_read(plane, ring, e->segment, e->page + (uint32_t)(from - e->file_page), at, (to - from) * PAGE);
        if (r < 0)
            return r;
        for (uint64_t page = from; page < to; page++, at += PAGE) {
            uint64_t size = page == placed->short_page ? placed->short_size : PAGE;
            if (kvfs_leaf_verify(at, size, plane->config.secret, &placed->leaves[page])) {
                COUNT(plane, checksum_errors, 1);
                return -EBADMSG;
            }
        }
    }
    return 0;
}

int desc_load(struct kvfs_plane *plane, struct ring *ring, const struct kvfs_record *record, struct desc **out) {
    if (record->header_pages == 0 || record->header_pages > plane->array.geometry.segment_pages)
        return -EBADMSG;
    struct desc *desc = desc_new(record->header_pages);
    if (!desc)
        return -ENOMEM;
    int r = bounce_read(plane, ring, record->segment, record->page, desc->header, record->header_pages * PAGE);
    if (r == 0)
        r = desc_verify(&plane->array.geometry, desc, record);
    if (r < 0) {
        desc_put(desc);
        return r;
    }
    *out = desc;
    return 0;
}

/* A copy of the state that a blocking read needs, so that it can run without the lock. Freed with one free(). */
static struct placed *placed_snapshot(const struct file *file, uint32_t first_page, uint32_t page_count) {
    uint32_t end = (uint32_t)min_u64((uint64_t)first_page + page_count, file->leaf_capacity);
    uint32_t leaves = end > first_page ? end - first_page : 0;
    struct placed *copy = malloc(sizeof(*copy) + file->placed_count * sizeof(struct kvfs_extent) + leaves * sizeof(uint64_t));
    if (!copy)
        return NULL;
    struct kvfs_extent *extents = (struct kvfs_extent *)(copy + 1);
    uint64_t *sums = (uint64_t *)(extents + file->placed_count);
    copy_bytes(extents, file->placed, file->placed_count * sizeof(*extents));
    copy_bytes(sums, file->leaves + first_page, leaves * sizeof(*sums));
    *copy = (struct placed){extents, file->placed_count, sums, file->short_page, file->short_size};
    return copy;
}

/* The placement of a chunk, with the node's lock held; 0: it is not placed. */
static uint64_t placement_of(const struct node *node, uint32_t index) {
    const struct file *file = node->file;
    return file && index < file->chunk_count && file->chunks[index].state == CHUNK_PLACED ? file->chunks[index].placement : 0;
}

int file_load_chunk(struct kvfs_plane *plane, struct ring *ring, struct node *node, uint32_t index, bool for_seal) {
    pthread_mutex_lock(&node->lock);
    struct file *file = node->file;
    const uint64_t placement = placement_of(node, index);
    if (!placement || (file->sealing && !for_seal)) {
        pthread_mutex_unlock(&node->lock);
        return 0; /* nothing to load, or the write will be parked */
    }
    uint32_t filled = file->chunks[index].filled, first = index * CHUNK_PAGES;
    uint32_t pages = (uint32_t)min_u64(pages_of(filled), file->leaf_capacity > first ? file->leaf_capacity - first : 0);
    struct placed *placed = placed_snapshot(file, first, pages);
    pthread_mutex_unlock(&node->lock);
    if (!placed)
        return -ENOMEM;
    /* leaves of the snapshot begin at `first` */
    placed->leaves -= first;
    struct slot *slot = slot_get_extra(pages * PAGE <= SMALL_SIZE ? &plane->staging_small : &plane->staging);
    int r = slot ? placed_read(plane, ring, placed, first, pages, slot->data) : -ENOMEM;
    free(placed);
    pthread_mutex_lock(&node->lock);
    file = node->file;
    /* Meanwhile the chunk may have been loaded by another worker, written, and sealed or spilled. It is placed again then, with other bytes. The
     * bytes that were read here, or the error, are out of date. */
    bool same = placement_of(node, index) == placement && (!file->sealing || for_seal);
    if (same && r == 0) {
        chunk_stage(plane, file, index, slot, (uint32_t)min_u64(filled, file->chunks[index].filled));
        slot = NULL;
    }
    pthread_mutex_unlock(&node->lock);
    slot_put(slot);
    return same ? r : 0;
}

int file_read_slow(struct kvfs_plane *plane, struct ring *ring, struct node *node, uint64_t offset, uint32_t size, uint8_t *out) {
    uint64_t end = offset + size;
    for (uint64_t at = offset; at < end;) {
        uint32_t index = (uint32_t)(at / CHUNK_SIZE);
        uint64_t inside = at % CHUNK_SIZE, length = min_u64(CHUNK_SIZE - inside, end - at);
        int r, bad = 0;
        uint64_t placement;
        bool moved;
        do {
            pthread_mutex_lock(&node->lock);
            struct file *file = node->file;
            if (!file) {
                pthread_mutex_unlock(&node->lock);
                return -ESTALE; /* sealed meanwhile: the caller reads the block */
            }
            r = file_copy_out(file, at, (uint32_t)length, out);
            if (r != -EINPROGRESS) {
                pthread_mutex_unlock(&node->lock);
                break;
            }
            placement = placement_of(node, index);
            uint32_t filled = file->chunks[index].filled, first = index * CHUNK_PAGES + (uint32_t)(inside / PAGE);
            uint64_t real_end = min_u64(inside + length, filled);
            uint32_t pages = real_end > inside ? (uint32_t)(pages_of(real_end) - inside / PAGE) : 0;
            struct placed *placed = placed_snapshot(file, first, pages);
            pthread_mutex_unlock(&node->lock);
            struct slot *slot = slot_get_extra(&plane->reading);
            if (!placed || !slot) {
                free(placed);
                slot_put(slot);
                return -ENOMEM;
            }
            placed->leaves -= first;
            r = placed_read(plane, ring, placed, first, pages, slot->data);
            if (r == 0) {
                uint64_t real = real_end > inside ? real_end - inside : 0;
                memcpy(out, slot->data + inside % PAGE, real);
                memset(out + real, 0, length - real);
            }
            free(placed);
            slot_put(slot);
            /* Proven bytes are right as of the beginning of this read. Unproven bytes may belong to another block that has since been placed
             * there. */
            pthread_mutex_lock(&node->lock);
            moved = placement_of(node, index) != placement;
            pthread_mutex_unlock(&node->lock);
        } while (r < 0 && (moved || (r == -EBADMSG && ++bad < 3)) && now_ns() < ring->until_ns);
        if (r < 0)
            return r;
        out += length;
        at += length;
    }
    return 0;
}
