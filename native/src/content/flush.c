/* A seal for a FLUSH: a new file becomes a block, without Python. Files of which a part lies on the devices already, and blocks that were rewritten,
 * are Python's (kvfs/store/sealing.py). */
#include "content/content.h"

#define ANCESTORS_SIZE_MAX (1u << 20)
#define RECORD_MAX (1u << 20)
#define ROOT_INODE 1u

int64_t ancestors_size(struct kvfs_plane *plane, uint64_t parent, bool partial) {
    uint64_t size = 0;
    for (uint64_t inode = parent; inode != ROOT_INODE;) {
        const struct kvfs_inode_record *record = names_record(plane->names, inode);
        if (!record && !partial)
            return -EAGAIN;
        if (!record || size + record->record_size > ANCESTORS_SIZE_MAX)
            break;
        size += record->record_size;
        inode = record->parent;
    }
    return (int64_t)size;
}

void ancestors_copy(struct kvfs_plane *plane, uint64_t parent, uint8_t *out, uint64_t size) {
    for (uint64_t inode = parent; size;) {
        const struct kvfs_inode_record *record = names_record(plane->names, inode);
        memcpy(out, record, record->record_size);
        out += record->record_size;
        size -= record->record_size;
        inode = record->parent;
    }
}

uint32_t runs_bound(const struct kvfs_plane *plane, uint32_t data_pages) {
    const struct places *places = names_places(plane->names);
    return 2 + data_pages / (places->end_page > 2 ? places->end_page - 2 : 1);
}

static void runs_fail(struct flush *flush) {
    for (uint32_t i = 0; i < flush->run_count; i++)
        place_fail(flush->plane->names, flush->runs[i].segment, flush->runs[i].page);
}

/* Takes a place, and makes the record that its header will have. Errors are those of place_take(). */
static int place_block(struct flush *flush, const struct kvfs_seal_info *info, uint32_t ancestors_size, struct kvfs_inode_record **out) {
    struct kvfs_plane *plane = flush->plane;
    struct kvfs_inode_record *record = record_again(flush->before);
    if (!record)
        return -ENOMEM;
    uint32_t extents = info->ranges + runs_bound(plane, info->data_pages);
    uint32_t header_pages = kvfs_header_pages(info->size, record->record_size, ancestors_size, extents);
    flush->wanted = header_pages + info->data_pages;
    int r = place_take(plane->names, KVFS_HEAD_NEW, header_pages, info->data_pages, flush->runs);
    if (r < 0) {
        free(record);
        return r;
    }
    flush->run_count = (uint32_t)r;
    kvfs_set_tick(plane, place_tick(plane->names));
    record->size = info->size;
    record->version = version_begin(plane->names, &flush->version);
    record->mtime_ns = info->mtime_ns;
    record->ctime_ns = record->ctime_ns > info->mtime_ns ? record->ctime_ns : info->mtime_ns;
    record->flags = (uint8_t)((record->flags | KVFS_INODE_SEALED | (info->shared ? KVFS_INODE_REWRITTEN : 0)) & ~KVFS_INODE_ASK);
    record->header_pages = header_pages;
    record->generation = flush->runs[0].generation;
    record->segment = flush->runs[0].segment;
    record->page = flush->runs[0].page;
    *out = record;
    return 0;
}

static void flush_written(void *owner, int result);

/* The part of flush_start() within a step. The file is frozen if *frozen is set. */
static int begin(struct flush *flush, bool *frozen, struct write_job **job) {
    struct kvfs_plane *plane = flush->plane;
    const struct kvfs_inode_record *current = names_record(plane->names, flush->inode);
    if (!current || current->kind != KVFS_KIND_FILE || current->extent_count ||
        current->flags & (KVFS_INODE_SEALED | KVFS_INODE_NAMELESS | KVFS_INODE_SLAB) || name_is_pinned(plane, flush->inode))
        return -EAGAIN;
    struct kvfs_seal_info info;
    int r = kvfs_seal_begin(plane, flush->inode, &info);
    *frozen = r == 0 && info.dirty;
    if (!*frozen || info.kept_extents)
        return -EAGAIN;
    int64_t size = ancestors_size(plane, current->parent, false);
    if (size < 0)
        return -EAGAIN;
    uint8_t *ancestors = malloc((size_t)size + 1);
    flush->before = record_again(current);
    r = flush->before && ancestors ? 0 : -ENOMEM;
    if (r == 0)
        ancestors_copy(plane, current->parent, ancestors, (uint64_t)size);
    struct kvfs_inode_record *record = NULL;
    if (r == 0)
        r = place_block(flush, &info, (uint32_t)size, &record);
    if (r == 0) {
        r = seal_to(plane, flush->inode, flush->runs, flush->run_count, record, ancestors, (uint32_t)size, flush_written, flush, job);
        if (r < 0) { /* no memory: nothing was written to the runs, and a scan would end there */
            version_end(&flush->version);
            runs_fail(flush);
        }
    }
    free(record);
    free(ancestors);
    return r;
}

/* Waits for room; the one who makes room is told. */
static void park(struct flush *flush) {
    struct kvfs_plane *plane = flush->plane;
    flush->next = NULL;
    if (plane->flushes)
        plane->flushes_last->next = flush;
    else
        plane->flushes = flush;
    plane->flushes_last = flush;
}

int flush_start(struct flush *flush, struct ring *ring) {
    struct kvfs_plane *plane = flush->plane;
    struct write_job *job = NULL;
    flush->before = NULL;
    if (!names_try(plane->names))
        return -EAGAIN;
    bool frozen = false, parked = false;
    int r = names_left(plane->names) & ~(uint32_t)(KVFS_LEAVE_BEHIND | KVFS_LEAVE_PINS | KVFS_LEAVE_FULL) ? -EAGAIN : begin(flush, &frozen, &job);
    if (r < 0) {
        if (frozen)
            kvfs_seal_end(plane, flush->inode, 0);
        free(flush->before);
        flush->before = NULL;
        parked = r == -ENOSPC;
        if (parked)
            park(flush);
    }
    kvfs_names_end(plane->names);
    places_wake(plane);
    if (parked)
        event_add(plane, KVFS_EVENT_ROOM, 0, 0);
    if (r == 0) {
        assert(job);
        seal_go(plane, job, ring); /* the flush may be gone */
    }
    return r == 0 || parked ? 0 : -EAGAIN;
}

uint32_t kvfs_flush_wanted(struct kvfs_plane *plane) {
    kvfs_names_begin(plane->names);
    uint32_t wanted = plane->flushes ? plane->flushes->wanted : 0;
    kvfs_names_end(plane->names);
    return wanted;
}

static struct flush *flushes_take(struct kvfs_plane *plane) {
    kvfs_names_begin(plane->names);
    struct flush *first = plane->flushes;
    plane->flushes = plane->flushes_last = NULL;
    kvfs_names_end(plane->names);
    return first;
}

void kvfs_flush_retry(struct kvfs_plane *plane) {
    for (struct flush *flush = flushes_take(plane), *next; flush; flush = next) {
        next = flush->next;
        if (flush_start(flush, NULL) < 0)
            flush->done(flush, -EAGAIN);
    }
}

void kvfs_flush_give_up(struct kvfs_plane *plane) {
    for (struct flush *flush = flushes_take(plane), *next; flush; flush = next) {
        next = flush->next;
        flush->done(flush, -EAGAIN);
    }
}

/* ---- the end ---- */

/* The record of the header, with the changes from `before` to `current` that were made meanwhile. Returns NULL without memory. */
static struct kvfs_inode_record *changes_taken(const struct kvfs_inode_record *written, const struct kvfs_inode_record *before,
                                               const struct kvfs_inode_record *current) {
    uint32_t extents_size = written->extent_count * (uint32_t)sizeof(struct kvfs_extent), xattr_size = current->xattr_size;
    uint64_t name_size = round_up(current->name_size, 8), size = sizeof(*current) + name_size + extents_size + round_up(xattr_size, 8);
    struct kvfs_inode_record *to = calloc(1, size);
    if (!to)
        return NULL;
    const uint8_t kept = KVFS_INODE_PINNED | KVFS_INODE_NAMELESS;
    *to = *written;
    to->record_size = (uint32_t)size;
    to->parent = current->parent;
    to->name_size = current->name_size;
    to->xattr_size = xattr_size;
    to->nlink = current->nlink;
    to->mode = current->mode;
    to->uid = current->uid;
    to->gid = current->gid;
    to->atime_ns = current->atime_ns;
    to->ctime_ns = written->ctime_ns > current->ctime_ns ? written->ctime_ns : current->ctime_ns;
    to->mtime_ns = current->mtime_ns != before->mtime_ns ? current->mtime_ns : written->mtime_ns;
    to->flags = (uint8_t)((written->flags & ~kept) | (current->flags & kept));
    to->version = written->version > current->version ? written->version : current->version;
    uint8_t *at = (uint8_t *)(to + 1);
    memcpy(at, record_name(current), current->name_size);
    copy_bytes(at + name_size, record_extents(written), extents_size);
    copy_bytes(at + name_size + extents_size, (const uint8_t *)(record_extents(current) + current->extent_count), xattr_size);
    return to;
}

/* The block is on the devices: names, table and places learn of it in one step. 0: it has lost its name, and is an orphan in its segment; 1: it
 * entered; -ENOMEM. */
static int enter(struct flush *flush, const struct kvfs_inode_record *written) {
    struct kvfs_plane *plane = flush->plane;
    const struct kvfs_inode_record *current = names_record(plane->names, flush->inode);
    bool named = current && !(current->flags & KVFS_INODE_NAMELESS);
    bool changed = !named || current->record_size != flush->before->record_size || memcmp(current, flush->before, current->record_size) != 0;
    if (changed)
        place_note(plane->names, flush->runs[0].segment, KVFS_NOTE_DIRTY | KVFS_NOTE_GONE);
    struct kvfs_inode_record *entered = named ? changes_taken(written, flush->before, current) : NULL;
    if (!named)
        return 0;
    if (!entered || names_take(plane->names, entered) < 0) {
        free(entered);
        return -ENOMEM;
    }
    kvfs_inode_update(plane, entered);
    place_account(plane->names, entered, 1);
    if (name_is_pinned(plane, flush->inode))
        event_add(plane, KVFS_EVENT_PINNED, flush->inode, 0);
    return 1;
}

static void flush_end(struct flush *flush, int result) {
    free(flush->before);
    flush->before = NULL;
    flush->done(flush, result);
}

/* Its segments' ends may come in two threads. */
static void flush_settled(struct settled *settled) {
    struct flush *flush = ((struct flush_run *)(void *)settled)->flush;
    if (atomic_fetch_sub(&flush->unsettled, 1) == 1)
        flush_end(flush, 0);
}

static void flush_written(void *owner, int result) {
    struct flush *flush = owner;
    struct kvfs_plane *plane = flush->plane;
    _Alignas(struct kvfs_inode_record) uint8_t small[1024];
    uint8_t *record = small;
    int size = result < 0 ? result : kvfs_seal_record(plane, flush->inode, small, sizeof(small));
    if (size == -ERANGE) {
        record = malloc(RECORD_MAX);
        size = record ? kvfs_seal_record(plane, flush->inode, record, RECORD_MAX) : -ENOMEM;
    }
    kvfs_names_begin(plane->names);
    kvfs_names_request(flush->connection, flush->unique);
    int entered = size > 0 ? enter(flush, (const struct kvfs_inode_record *)(void *)record) : size;
    version_end(&flush->version);
    kvfs_names_end(plane->names);
    kvfs_names_request(0, 0);
    kvfs_seal_end(plane, flush->inode, entered > 0);
    struct settled *told[PLACE_RUNS_MAX] = {NULL};
    uint32_t run_count = flush->run_count; /* the flush may be gone once the first is told */
    atomic_store(&flush->unsettled, run_count);
    kvfs_names_begin(plane->names);
    for (uint32_t i = 0; i < run_count && entered >= 0; i++) {
        flush->ends[i] = (struct flush_run){{NULL, flush_settled}, flush};
        told[i] = place_end(plane->names, flush->runs[i].segment, flush->runs[i].page, &flush->ends[i].settled);
    }
    if (entered < 0)
        runs_fail(flush);
    kvfs_names_end(plane->names);
    if (record != small)
        free(record);
    for (uint32_t i = 0; i < run_count; i++)
        settled_tell(told[i]);
    places_wake(plane);
    if (entered < 0)
        flush_end(flush, -EAGAIN);
}
