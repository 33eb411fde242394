/* Files being written: their bytes in chunks of 1 MiB, each a hole, staged in memory, or placed on the devices already.
 *
 * One content per inode number at a time: from the open for writing until the seal every handle of the inode reads here.
 */
#include "internal.h"

#define FILE_CHUNKS_MAX (1u << 22) /* 4 TiB */

/* Bytes. The header of a block, 4 bytes for each leaf, has to fit in a segment: it gets half of one at most. */
uint64_t file_size_max(const struct kvfs_plane *plane) {
    return min_u64(FILE_CHUNKS_MAX * CHUNK_SIZE, plane->config.zone_size * plane->config.stripe_width * 512);
}

struct file *file_new(void) {
    struct file *file = calloc(1, sizeof(*file));
    if (!file)
        return NULL;
    struct timespec ts;
    clock_gettime(CLOCK_REALTIME, &ts);
    file->mtime_ns = ts.tv_sec * 1000000000ll + ts.tv_nsec;
    file->short_page = UINT32_MAX;
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
    uint32_t *grown = realloc(file->leaves, count * sizeof(uint32_t));
    if (!grown)
        return -ENOMEM;
    memset(grown + file->leaf_capacity, 0, (count - file->leaf_capacity) * sizeof(uint32_t));
    file->leaves = grown;
    file->leaf_capacity = count;
    return 0;
}

/* The size has changed: so has what eviction must keep. */
void file_count(struct kvfs_plane *plane, struct file *file) {
    uint64_t size = file->slab ? 0 : file->size;
    atomic_fetch_add(&plane->open_bytes, size - file->counted); /* modulo 2^64 where it shrinks */
    if (file->payer)
        atomic_fetch_add(&file->payer->writing, size - file->counted);
    file->counted = size;
}

void file_charge(struct file *file, struct user *user) {
    if (file->payer == user)
        return;
    if (file->payer)
        atomic_fetch_sub(&file->payer->writing, file->counted);
    if (user)
        atomic_fetch_add(&user->writing, file->counted);
    file->payer = user;
}

int file_admit(struct kvfs_plane *plane, struct node *node, struct user *user) {
    pthread_mutex_lock(&node->lock);
    struct file *file = node->file;
    bool first = file && !file->payer;
    if (first)
        file_charge(file, user);
    int r = first && file->counted && writer_lacks(plane, user, 0) ? -EDQUOT : 0;
    pthread_mutex_unlock(&node->lock);
    return r;
}

void chunk_place(struct node *node, struct chunk *chunk, uint32_t filled) {
    assert(!chunk->slot);
    *chunk = (struct chunk){.state = CHUNK_PLACED, .filled = filled, .placement = ++node->placements};
}

/* Take over a sealed content: every chunk placed. */
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
    copy_bytes(file->leaves, desc->leaves, desc->leaf_count * sizeof(uint32_t));
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
    struct chunk *chunk = &file->chunks[index];
    if (chunk->slot) {
        file->staged_bytes -= chunk->slot->size;
        atomic_fetch_sub(&plane->staged_bytes, chunk->slot->size);
        slot_put(chunk->slot);
    }
    if (file->short_page != UINT32_MAX && file->short_page / CHUNK_PAGES == index)
        file->short_page = UINT32_MAX;
    memset(chunk, 0, sizeof(*chunk));
}

/* Put a slot under a chunk, in place of what was there. */
static void chunk_stage(struct kvfs_plane *plane, struct file *file, uint32_t index, struct slot *slot, uint32_t filled) {
    file_drop_chunk(plane, file, index);
    struct chunk *chunk = &file->chunks[index];
    chunk->slot = slot;
    chunk->filled = filled;
    chunk->state = CHUNK_STAGED;
    file->staged_bytes += slot->size;
    atomic_fetch_add(&plane->staged_bytes, slot->size);
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

/* A page that was the file's short last one is about to have successors or a longer tail: its leaf no longer says what the file has there. */
static void file_grows(struct kvfs_plane *plane, struct file *file, uint64_t size) {
    if (size <= file->size)
        return;
    if (file->short_page != UINT32_MAX)
        file->chunks[file->short_page / CHUNK_PAGES].reload = true;
    file->size = size;
    file_count(plane, file);
}

static struct slot *staging_slot(struct kvfs_plane *plane, uint64_t need) {
    struct slot *slot = need <= SMALL_SIZE ? slot_get(&plane->staging_small) : NULL;
    return slot ? slot : slot_get(&plane->staging);
}

static void request_append(struct request **first, struct request **last, struct request *request) {
    request->next = NULL;
    if (*last)
        (*last)->next = request;
    else
        *first = request;
    *last = request;
}

void file_unpark(struct kvfs_plane *plane, struct file *file) {
    struct request *request = file->parked;
    file->parked = file->parked_last = NULL;
    while (request) {
        struct request *next = request->next;
        atomic_fetch_sub(&plane->count.parked, 1);
        worker_request_add(plane, request);
        request = next;
    }
}

void memory_unpark(struct kvfs_plane *plane) {
    pthread_mutex_lock(&plane->request_lock);
    struct request *request = plane->memory_parked;
    plane->memory_parked = plane->memory_parked_last = NULL;
    pthread_mutex_unlock(&plane->request_lock);
    while (request) {
        struct request *next = request->next;
        atomic_fetch_sub(&plane->count.parked, 1);
        worker_request_add(plane, request);
        request = next;
    }
}

static int park_for_memory(struct kvfs_plane *plane, struct node *node, struct request *request) {
    if (now_ns() - request->arrived_ns > plane->config.request_timeout_ms * 1000000ull)
        return -EIO;
    struct file *file = node->file;
    if (!file->spill_asked) {
        file->spill_asked = true;
        event_add(plane, KVFS_EVENT_SPILL, node->inode, file->staged_bytes);
    }
    pthread_mutex_lock(&plane->request_lock);
    request_append(&plane->memory_parked, &plane->memory_parked_last, request);
    pthread_mutex_unlock(&plane->request_lock);
    COUNT(plane, parked, 1);
    return -EAGAIN;
}

int file_write(struct kvfs_plane *plane, struct node *node, struct request *request) {
    struct file *file = node->file;
    uint64_t offset = request->offset, end = offset + request->size;
    if (end > file_size_max(plane))
        return -EFBIG;
    if (request->size == 0)
        return 0;
    if (file->sealing) {
        request_append(&file->parked, &file->parked_last, request);
        COUNT(plane, parked, 1);
        return -EAGAIN;
    }
    uint64_t growth = end > file->size ? end - file->size : 0;
    if (growth) {
        file_charge(file, request->user);
        int r = space_ask(plane, file->payer, growth);
        if (r < 0)
            return r;
    }
    uint32_t first = (uint32_t)(offset / CHUNK_SIZE), last = (uint32_t)((end - 1) / CHUNK_SIZE);
    int r = file_grow_chunks(file, last + 1);
    if (r < 0)
        return r;
    bool fills = false;
    for (uint32_t i = first; i <= last; i++) {
        struct chunk *chunk = &file->chunks[i];
        if (chunk->spilling) {
            request_append(&file->parked, &file->parked_last, request);
            COUNT(plane, parked, 1);
            return -EAGAIN;
        }
        bool whole = offset <= i * CHUNK_SIZE && end >= (i + 1) * CHUNK_SIZE;
        if (chunk->state == CHUNK_PLACED && !whole)
            return -EINPROGRESS;
        fills |= min_u64(end, (i + 1) * CHUNK_SIZE) - i * CHUNK_SIZE > chunk->filled;
    }
    /* ftruncate(2) asks for no space, so what it added is asked for here, when bytes come to lie there. */
    if (fills && (r = space_ask(plane, file->payer, growth)) < 0)
        return r;
    const uint8_t *payload = request->payload;
    uint64_t at = offset;
    for (uint32_t i = first; i <= last; i++) {
        struct chunk *chunk = &file->chunks[i];
        uint64_t inside = at % CHUNK_SIZE, size = min_u64(CHUNK_SIZE - inside, end - at);
        bool from_start = inside == 0 && payload == request->payload && request->slot_count == 1 && payload == request->slots[0]->data;
        if (from_start && (size == CHUNK_SIZE || (chunk->state == CHUNK_HOLE && size > SMALL_SIZE && first == last))) {
            /* The payload lies where it is to stay: take the memory over instead of copying it. */
            chunk_stage(plane, file, i, request->slots[0], (uint32_t)size);
            request->slot_count = 0;
        } else {
            uint64_t need = inside + size;
            if (chunk->state != CHUNK_STAGED || chunk->slot->size < need) {
                struct slot *slot = staging_slot(plane, need);
                if (!slot) {
                    if (at > offset) { /* the first chunk is written: finish beyond the budget rather than tear the write */
                        slot = slot_get_extra(&plane->staging);
                        if (!slot)
                            return -ENOMEM;
                    } else {
                        return park_for_memory(plane, node, request);
                    }
                }
                uint32_t filled = chunk->state == CHUNK_STAGED ? chunk->filled : 0;
                if (filled)
                    memcpy(slot->data, chunk->slot->data, filled);
                chunk_stage(plane, file, i, slot, filled);
            }
            chunk = &file->chunks[i];
            if (chunk->filled < inside)
                memset(chunk->slot->data + chunk->filled, 0, inside - chunk->filled);
            memcpy(chunk->slot->data + inside, payload, size);
            if (chunk->filled < inside + size)
                chunk->filled = (uint32_t)(inside + size);
        }
        payload += size;
        at += size;
    }
    file_grows(plane, file, end);
    file->dirty = true;
    struct timespec ts;
    clock_gettime(CLOCK_REALTIME, &ts);
    file->mtime_ns = ts.tv_sec * 1000000000ll + ts.tv_nsec;
    uint64_t share = plane->config.staging_size / 4;
    if (!file->spill_asked && file->staged_bytes > CHUNK_SIZE * 2 &&
        (file->staged_bytes > share || atomic_load(&plane->staged_bytes) > plane->config.staging_size / 4 * 3)) {
        file->spill_asked = true;
        event_add(plane, KVFS_EVENT_SPILL, node->inode, file->staged_bytes);
    }
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
    if (size > file_size_max(plane))
        return -EFBIG;
    if (size < file->size) {
        uint32_t keep = (uint32_t)((size + CHUNK_SIZE - 1) / CHUNK_SIZE);
        for (uint32_t i = keep; i < file->chunk_count; i++)
            if (file->chunks[i].state != CHUNK_HOLE)
                file_drop_chunk(plane, file, i);
        uint32_t inside = (uint32_t)(size % CHUNK_SIZE);
        if (inside && keep - 1 < file->chunk_count) {
            struct chunk *chunk = &file->chunks[keep - 1];
            /* A last page has a leaf of as much as the file has of it: one that was placed has another, also if nothing of it is cut off. */
            if (chunk->state == CHUNK_PLACED && (inside < chunk->filled || (inside % PAGE && inside < round_up(chunk->filled, PAGE))))
                chunk->reload = true;
            if (chunk->filled > inside)
                chunk->filled = inside;
        }
        file->size = size;
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

/* What of the placed extents still counts: clipped to chunks that are placed, `sealing`: and not to be written again. Until a seal has read those,
 * their bytes are nowhere else. */
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
                if (before && before->segment == e.segment && before->generation == e.generation &&
                    before->page + before->page_count == page && before->file_page + before->page_count == at) {
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

void file_free(struct kvfs_plane *plane, struct node *node) {
    struct file *file = node->file;
    for (uint32_t i = 0; i < file->chunk_count; i++)
        if (file->chunks[i].slot)
            file_drop_chunk(plane, file, i);
    atomic_fetch_sub(&plane->open_bytes, file->counted);
    file_charge(file, NULL);
    file_unpark(plane, file); /* they find no file, and end as EIO */
    desc_put(file->sealed);
    slab_put(file->slab);
    free(file->chunks);
    free(file->placed);
    free(file->leaves);
    free(file);
    node->file = NULL;
    kvfs_table_count_written(plane->table, node->inode, -1);
    atomic_fetch_sub(&plane->count.staged_files, 1);
}

/* ---- blocking helpers, for workers ---- */

struct blocking { uint32_t left; int result; };

static void blocking_done(struct io_group *group, bool reaped) {
    if (reaped)
        return; /* its waiter has gone on at the deadline; the group holds the slots */
    struct blocking *wait = group->owner;
    if (group->result && !wait->result)
        wait->result = group->result;
    wait->left--;
}

int blocking_io(struct ring *ring, bool write, uint32_t segment, uint32_t page, const struct iovec *iovs, uint32_t iov_count,
                struct slot *const *slots, uint32_t slot_count) {
    struct blocking wait = {0, 0};
    struct iovec part[8];
    uint32_t at = 0;
    uint64_t inside = 0;
    while (at < iov_count) {
        uint32_t count = 0;
        uint64_t size = 0;
        while (at < iov_count && count < 8 && size < GROUP_BYTES) {
            uint64_t length = min_u64(iovs[at].iov_len - inside, GROUP_BYTES - size);
            part[count++] = (struct iovec){(uint8_t *)iovs[at].iov_base + inside, length};
            size += length;
            inside += length;
            if (inside == iovs[at].iov_len)
                at++, inside = 0;
        }
        wait.left++;
        int r = ring_io(ring, write, segment, page, part, count, slots, slot_count > 8 ? 8 : slot_count, blocking_done, &wait);
        if (r < 0) {
            wait.left--;
            if (!wait.result)
                wait.result = r;
            break;
        }
        page += (uint32_t)(size / PAGE);
    }
    ring_submit(ring);
    while (wait.left) {
        ring_reap(ring);
        if (wait.left)
            ring_wait(ring, 1000000000);
    }
    return wait.result;
}

/* A read into memory that may be freed before a late device answers needs a slot of its own, held by the group. */
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

/* A copy of what a blocking read needs, so that it can run without the lock. Freed with one free(). */
static struct placed *placed_snapshot(const struct file *file, uint32_t first_page, uint32_t page_count) {
    uint32_t end = (uint32_t)min_u64((uint64_t)first_page + page_count, file->leaf_capacity);
    uint32_t leaves = end > first_page ? end - first_page : 0;
    struct placed *copy = malloc(sizeof(*copy) + file->placed_count * sizeof(struct kvfs_extent) + leaves * sizeof(uint32_t));
    if (!copy)
        return NULL;
    struct kvfs_extent *extents = (struct kvfs_extent *)(copy + 1);
    uint32_t *sums = (uint32_t *)(extents + file->placed_count);
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
        return 0; /* nothing to do, or the write will be parked */
    }
    uint32_t filled = file->chunks[index].filled, first = index * CHUNK_PAGES;
    uint32_t pages = (uint32_t)min_u64(pages_of(filled), file->leaf_capacity > first ? file->leaf_capacity - first : 0);
    struct placed *placed = placed_snapshot(file, first, pages);
    pthread_mutex_unlock(&node->lock);
    if (!placed)
        return -ENOMEM;
    /* leaves of the snapshot begin at `first` */
    placed->leaves -= first;
    struct slot *slot = slot_get_extra(&plane->staging);
    int r = slot ? placed_read(plane, ring, placed, first, pages, slot->data) : -ENOMEM;
    free(placed);
    pthread_mutex_lock(&node->lock);
    file = node->file;
    /* Meanwhile another worker may have loaded the chunk, and it may have been written, and sealed or spilled: it is placed again, with other
     * bytes, and those that were read, or could not be read, are of the past. */
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
            /* Bytes that were proven are right, as of when this began. Those that were not may lie where others have come to lie since. */
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
