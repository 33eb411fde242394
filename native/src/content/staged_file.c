/* Files being written: their bytes in chunks of 1 MiB. A chunk is a hole, staged in memory, or placed on devices.
 *
 * An inode number has one content at a time (I19): from the open for writing until the seal, every handle of the inode reads it here. */
#include "content/content.h"

#define FILE_CHUNKS_MAX (1u << 22) /* 4 TiB */

/* In bytes. A block's header has 8 bytes for each leaf and must fit in a segment: it gets at most half of one. */
uint64_t file_size_max(const struct kvfs_plane *plane) {
    return min_u64(FILE_CHUNKS_MAX * CHUNK_SIZE, plane->config.zone_size * plane->config.stripe_width * 256);
}

struct file *file_new(uint64_t inode) {
    struct file *file = calloc(1, sizeof(*file));
    if (!file)
        return NULL;
    struct timespec ts;
    clock_gettime(CLOCK_REALTIME, &ts);
    file->mtime_ns = ts.tv_sec * 1000000000ll + ts.tv_nsec;
    file->short_page = UINT32_MAX;
    file->inode = inode;
    return file;
}

int file_grow_chunks(struct file *file, uint32_t count) {
    if (count <= file->chunk_count)
        return 0;
    if (count > FILE_CHUNKS_MAX)
        return -EFBIG;
    uint32_t capacity = file->chunk_count ? file->chunk_count : 4;
    while (capacity < count)
        capacity *= 2;
    struct chunk *grown = realloc(file->chunks, capacity * sizeof(*grown));
    if (!grown)
        return -ENOMEM;
    memset(grown + file->chunk_count, 0, (capacity - file->chunk_count) * sizeof(*grown));
    file->chunks = grown;
    file->chunk_count = capacity;
    return 0;
}

int file_grow_leaves(struct file *file, uint32_t count) {
    if (count <= file->leaf_capacity)
        return 0;
    uint64_t *grown = realloc(file->leaves, count * sizeof(*grown));
    if (!grown)
        return -ENOMEM;
    memset(grown + file->leaf_capacity, 0, (count - file->leaf_capacity) * sizeof(*grown));
    file->leaves = grown;
    file->leaf_capacity = count;
    return 0;
}

/* The size has changed, and so have the bytes that eviction must keep. */
void file_count(struct kvfs_plane *plane, struct file *file) {
    uint64_t size = file->slab ? 0 : file->size + file->spill_pages * PAGE;
    atomic_fetch_add(&plane->open_bytes, size - file->counted); /* modulo 2^64 where it shrinks */
    if (file->payer)
        atomic_fetch_add(&file->payer->writing, size - file->counted);
    file->counted = size;
}

void file_charge(struct kvfs_plane *plane, struct file *file, struct user *user) {
    if (file->payer == user)
        return;
    if (file->payer) {
        unsigned long long before = atomic_fetch_sub(&file->payer->writing, file->counted);
        assert(before >= file->counted);
    }
    if (user)
        atomic_fetch_add(&user->writing, file->counted);
    staged_charge(plane, file, user);
}

int file_admit(struct kvfs_plane *plane, struct node *node, struct user *user) {
    pthread_mutex_lock(&node->lock);
    struct file *file = node->file;
    bool first = file && !file->payer;
    if (first)
        file_charge(plane, file, user);
    int r = first && file->counted && writer_lacks(plane, user, 0) ? -EDQUOT : 0;
    pthread_mutex_unlock(&node->lock);
    return r;
}

void chunk_place(struct node *node, struct chunk *chunk, uint32_t filled) {
    assert(!chunk->slot);
    assert(filled <= CHUNK_SIZE);
    *chunk = (struct chunk){.state = CHUNK_PLACED, .filled = filled, .placement = ++node->placements};
}

/* Take over a sealed content: every chunk is placed. */
int file_from_desc(struct kvfs_plane *plane, struct node *node, const struct desc *desc) {
    struct file *file = node->file;
    uint32_t chunks = (uint32_t)((desc->size + CHUNK_SIZE - 1) / CHUNK_SIZE);
    int r = file_grow_chunks(file, chunks);
    if (r == 0)
        r = file_grow_leaves(file, desc->leaf_count);
    if (r < 0)
        return r;
    struct kvfs_extent *placed = malloc(desc->extent_count * sizeof(*placed) + 1);
    if (!placed)
        return -ENOMEM;
    copy_bytes(placed, desc->extents, desc->extent_count * sizeof(*placed));
    free(file->placed);
    file->placed = placed;
    file->placed_count = desc->extent_count;
    file->spill_pages = 0;
    copy_bytes(file->leaves, desc->leaves, desc->leaf_count * sizeof(*file->leaves));
    for (uint32_t i = 0; i < file->chunk_count; i++) {
        struct chunk *chunk = &file->chunks[i];
        assert(chunk->state != CHUNK_STAGED);
        if (i < chunks)
            chunk_place(node, chunk, (uint32_t)min_u64(CHUNK_SIZE, desc->size - i * CHUNK_SIZE));
        else
            memset(chunk, 0, sizeof(*chunk));
    }
    file->size = desc->size;
    file_count(plane, file);
    file->short_size = (uint32_t)(desc->size % PAGE);
    file->short_page = file->short_size ? (uint32_t)(desc->size / PAGE) : UINT32_MAX;
    return 0;
}

void file_drop_chunk(struct kvfs_plane *plane, struct file *file, uint32_t index) {
    assert(index < file->chunk_count);
    struct chunk *chunk = &file->chunks[index];
    assert(!chunk->slot == (chunk->state != CHUNK_STAGED));
    if (chunk->slot) {
        staged_count(plane, file, -(int64_t)chunk->slot->size);
        slot_put(chunk->slot);
    }
    if (file->short_page != UINT32_MAX && file->short_page / CHUNK_PAGES == index)
        file->short_page = UINT32_MAX;
    memset(chunk, 0, sizeof(*chunk));
}

void chunk_stage(struct kvfs_plane *plane, struct file *file, uint32_t index, struct slot *slot, uint32_t filled) {
    assert(filled <= slot->size);
    file_drop_chunk(plane, file, index);
    struct chunk *chunk = &file->chunks[index];
    chunk->slot = slot;
    chunk->filled = filled;
    chunk->state = CHUNK_STAGED;
    staged_count(plane, file, (int64_t)slot->size);
}

int file_stage_zeros(struct kvfs_plane *plane, struct file *file) {
    struct slot *slot = slot_get_extra(&plane->staging_small);
    int r = slot ? file_grow_chunks(file, 1) : -ENOMEM;
    if (r < 0) {
        slot_put(slot);
        return r;
    }
    slot->data[0] = 0;
    chunk_stage(plane, file, 0, slot, 1);
    return 0;
}

/* The file's short last page gets a longer tail or successors, so its leaf no longer covers all of the file's bytes there. */
static void file_grows(struct kvfs_plane *plane, struct file *file, uint64_t size) {
    if (size <= file->size)
        return;
    if (file->short_page != UINT32_MAX)
        file->chunks[file->short_page / CHUNK_PAGES].reload = true;
    file->size = size;
    file_count(plane, file);
}

/* The arena of slots that `need` bytes of a chunk lie in. */
static struct arena *staging_arena(struct kvfs_plane *plane, uint64_t need) { return need <= SMALL_SIZE ? &plane->staging_small : &plane->staging; }

/* Whether a WRITE of at least one byte can go on: 0, or an error of file_write(). */
static int write_admit(struct kvfs_plane *plane, struct node *node, struct request *request) {
    struct file *file = node->file;
    uint64_t offset = request->offset, end = offset + request->size;
    if (file->sealing) {
        file_park(plane, file, request);
        return -EAGAIN;
    }
    uint64_t growth = end > file->size ? end - file->size : 0;
    int r = 0;
    if (growth) {
        file_charge(plane, file, request->user);
        r = space_ask(plane, file->payer, growth);
    }
    uint32_t first = (uint32_t)(offset / CHUNK_SIZE), last = (uint32_t)((end - 1) / CHUNK_SIZE);
    if (r == 0)
        r = file_grow_chunks(file, last + 1);
    if (r < 0)
        return r;
    bool fills = false, load = false;
    uint64_t more = 0; /* memory */
    for (uint32_t i = first; i <= last; i++) {
        struct chunk *chunk = &file->chunks[i];
        if (chunk->spilling) {
            file_park(plane, file, request);
            return -EAGAIN;
        }
        bool whole = offset <= i * CHUNK_SIZE && end >= (i + 1) * CHUNK_SIZE;
        uint64_t need = min_u64(end, (i + 1) * CHUNK_SIZE) - i * CHUNK_SIZE, has = chunk->slot ? chunk->slot->size : 0;
        load |= chunk->state == CHUNK_PLACED && !whole;
        fills |= need > chunk->filled;
        if (chunk->state == CHUNK_PLACED && need < chunk->filled)
            need = chunk->filled;
        need = staging_arena(plane, need)->slot_size;
        more += need > has ? need - has : 0;
    }
    /* ftruncate(2) asks for no space. The space that it added is asked for here, when bytes come to lie there. */
    r = fills ? space_ask(plane, file->payer, growth) : 0;
    if (r == 0)
        r = staging_ask(plane, node, request, more); /* whatever the memory is: slots, or the request's own, which the file takes over */
    return r == 0 && load ? -EINPROGRESS : r;
}

/* Copy `size` bytes to `inside` of a chunk. */
static int chunk_write(struct kvfs_plane *plane, struct file *file, uint32_t index, uint64_t inside, const uint8_t *payload, uint64_t size) {
    struct chunk *chunk = &file->chunks[index];
    uint64_t need = inside + size;
    if (chunk->state != CHUNK_STAGED || chunk->slot->size < need) {
        struct slot *slot = slot_get_extra(staging_arena(plane, need));
        if (!slot)
            return -ENOMEM;
        uint32_t filled = chunk->state == CHUNK_STAGED ? chunk->filled : 0;
        if (filled)
            memcpy(slot->data, chunk->slot->data, filled);
        chunk_stage(plane, file, index, slot, filled);
    }
    if (chunk->filled < inside)
        memset(chunk->slot->data + chunk->filled, 0, inside - chunk->filled);
    memcpy(chunk->slot->data + inside, payload, size);
    if (chunk->filled < need)
        chunk->filled = (uint32_t)need;
    assert(chunk->filled <= chunk->slot->size);
    return 0;
}

int file_write(struct kvfs_plane *plane, struct node *node, struct request *request) {
    struct file *file = node->file;
    uint64_t offset = request->offset, end = offset + request->size;
    if (end > file_size_max(plane))
        return -EFBIG;
    if (request->size == 0)
        return 0;
    assert(!file->slab);
    assert(request->size <= CHUNK_SIZE);
    int r = write_admit(plane, node, request);
    if (r < 0)
        return r;
    written_is_sealed(plane, file, false);
    const uint8_t *payload = request->payload;
    for (uint64_t at = offset, size; at < end; at += size, payload += size) {
        uint32_t index = (uint32_t)(at / CHUNK_SIZE);
        uint64_t inside = at % CHUNK_SIZE;
        size = min_u64(CHUNK_SIZE - inside, end - at);
        bool from_start = inside == 0 && at == offset && request->slot_count == 1 && payload == request->slots[0]->data;
        if (from_start && (size == CHUNK_SIZE || (file->chunks[index].state == CHUNK_HOLE && size > SMALL_SIZE && size == request->size))) {
            /* The payload already lies in its final place: take the memory over instead of copying it. */
            chunk_stage(plane, file, index, request->slots[0], (uint32_t)size);
            request->slot_count = 0;
            continue;
        }
        r = chunk_write(plane, file, index, inside, payload, size);
        if (r < 0)
            return r;
    }
    file_grows(plane, file, end);
    file->dirty = true;
    struct timespec ts;
    clock_gettime(CLOCK_REALTIME, &ts);
    file->mtime_ns = ts.tv_sec * 1000000000ll + ts.tv_nsec;
    atomic_store_explicit(&file->touched, true, memory_order_relaxed);
    if (file->staged_bytes > CHUNK_SIZE * 2 && staging_fills(plane, file))
        spill_ask(plane, file);
    return 0;
}

int file_copy_out(const struct file *file, uint64_t offset, uint32_t size, uint8_t *out) {
    uint64_t end = offset + size;
    for (uint64_t at = offset; at < end;) {
        uint32_t index = (uint32_t)(at / CHUNK_SIZE);
        if (index < file->chunk_count && file->chunks[index].state == CHUNK_PLACED)
            return -EINPROGRESS;
        at = (index + 1) * CHUNK_SIZE;
    }
    for (uint64_t at = offset; at < end;) {
        uint32_t index = (uint32_t)(at / CHUNK_SIZE);
        uint64_t inside = at % CHUNK_SIZE, length = min_u64(CHUNK_SIZE - inside, end - at), real = 0;
        if (index < file->chunk_count && file->chunks[index].state == CHUNK_STAGED) {
            const struct chunk *chunk = &file->chunks[index];
            assert(chunk->filled <= chunk->slot->size);
            real = chunk->filled > inside ? min_u64(length, chunk->filled - inside) : 0;
            memcpy(out, chunk->slot->data + inside, real);
        }
        memset(out + real, 0, length - real);
        out += length;
        at += length;
    }
    return 0;
}

int file_truncate(struct kvfs_plane *plane, struct node *node, uint64_t size) {
    struct file *file = node->file;
    assert(is_locked(&node->lock));
    assert(!file->slab);
    assert(!file->sealing);
    if (size > file_size_max(plane))
        return -EFBIG;
    written_is_sealed(plane, file, false);
    if (size < file->size) {
        uint32_t keep = (uint32_t)((size + CHUNK_SIZE - 1) / CHUNK_SIZE);
        for (uint32_t i = keep; i < file->chunk_count; i++)
            if (file->chunks[i].state != CHUNK_HOLE)
                file_drop_chunk(plane, file, i);
        uint32_t inside = (uint32_t)(size % CHUNK_SIZE);
        if (inside && keep - 1 < file->chunk_count) {
            struct chunk *chunk = &file->chunks[keep - 1];
            /* The leaf of a last page covers only the file's part of the page. So a placed page that becomes the last one needs another leaf, even if
             * no byte of it is cut off. */
            if (chunk->state == CHUNK_PLACED && (inside < chunk->filled || (inside % PAGE && inside < round_up(chunk->filled, PAGE))))
                chunk->reload = true;
            if (chunk->filled > inside)
                chunk->filled = inside;
        }
        file->size = size;
        uint32_t kept = file_kept_extents(file, false, NULL, 0) + (file->short_page != UINT32_MAX);
        file->spill_pages = file->spill_pages < kept ? file->spill_pages : kept;
        file_count(plane, file);
    } else {
        file_grows(plane, file, size);
    }
    file->dirty = true;
    struct timespec ts;
    clock_gettime(CLOCK_REALTIME, &ts);
    file->mtime_ns = ts.tv_sec * 1000000000ll + ts.tv_nsec;
    return 0;
}

/* The parts of the placed extents that count: those of chunks that are still placed. While sealing, chunks that must be written again do not count;
 * until the seal has read them, these parts are the only copy. */
uint32_t file_kept_extents(const struct file *file, bool sealing, struct kvfs_extent *out, uint32_t capacity) {
    uint32_t count = 0;
    uint64_t pages = pages_of(file->size);
    for (uint32_t i = 0; i < file->placed_count; i++) {
        struct kvfs_extent e = file->placed[i];
        uint32_t at = e.file_page, end = (uint32_t)min_u64((uint64_t)e.file_page + e.page_count, pages);
        while (at < end) {
            uint32_t index = at / CHUNK_PAGES;
            uint32_t stop = (uint32_t)min_u64(end, (uint64_t)(index + 1) * CHUNK_PAGES);
            bool kept = index < file->chunk_count && file->chunks[index].state == CHUNK_PLACED && !(sealing && file->chunks[index].reload);
            if (kept) {
                struct kvfs_extent *before = count && count <= capacity ? &out[count - 1] : NULL;
                uint32_t page = e.page + (at - e.file_page);
                if (before && before->segment == e.segment && before->generation == e.generation && before->page + before->page_count == page &&
                    before->file_page + before->page_count == at) {
                    before->page_count += stop - at;
                } else {
                    if (count < capacity)
                        out[count] = (struct kvfs_extent){e.generation, e.segment, page, stop - at, at};
                    count++;
                }
            }
            at = stop;
        }
    }
    return count;
}

/* The kernel may have pages of it that are sealed nowhere, and a sealed block is served in their place. */
static bool written_stays(struct kvfs_plane *plane, const struct file *file) {
    struct kvfs_record record;
    if (!file->written_place || (!file->dirty && !atomic_load(&plane->leaving)))
        return false;
    return atomic_load(&plane->leaving) || (kvfs_table_find_inode(plane->table, file->inode, &record) == 0 && record.flags & KVFS_INODE_SEALED);
}

void file_free(struct kvfs_plane *plane, struct node *node) {
    struct file *file = node->file;
    if (file->overtaken) /* the last seal may be older than that */
        event_add(plane, KVFS_EVENT_OVERTAKEN, node->inode, file->overtaken);
    for (uint32_t i = 0; i < file->chunk_count; i++)
        if (file->chunks[i].slot)
            file_drop_chunk(plane, file, i);
    assert(file->staged_bytes == 0);
    unsigned long long before = atomic_fetch_sub(&plane->open_bytes, file->counted);
    assert(before >= file->counted);
    spill_ended(plane, file, 0);
    file_charge(plane, file, NULL);
    file_unpark(plane, file); /* they find no file, and end as EIO */
    desc_put(file->sealed);
    slab_put(file->slab);
    if (!written_stays(plane, file))
        written_remove(plane, file);
    free(file->chunks);
    free(file->placed);
    free(file->leaves);
    free(file);
    node->file = NULL;
    kvfs_table_count_written(plane->table, node->inode, -1);
    atomic_fetch_sub(&plane->count.staged_files, 1);
}

int file_allocate(struct kvfs_plane *plane, struct node *node, uint64_t size) {
    struct file *file = node->file;
    if (size <= file->size)
        return 0;
    if (file->sealing || file->slab)
        return -EBUSY;
    int r = space_ask(plane, file->payer, size - file->size);
    return r < 0 ? r : file_truncate(plane, node, size);
}

/* True if no content of the file was ever written. With the node's lock held. */
bool file_untouched(const struct file *file) {
    if (file->slab || file->sealing || file->spilling || file->discarded || file->placed_count)
        return false;
    for (uint32_t i = 0; i < file->chunk_count; i++)
        if (file->chunks[i].state != CHUNK_HOLE)
            return false;
    return true;
}
