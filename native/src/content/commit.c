/* COMMIT and DELETE: blocks that native clients have written get their names, and names go. In one step for each block (I4): names, block table and
 * places agree (I11), also where memory ends. */
#include "content/content.h"

#include "kvfs_naming.h"
#include "kvfs_wire.h"

struct commit {
    struct kvfs_commit told; /* first */
    struct holder *holder;
    const uint8_t *items;
    uint32_t count, done, runs_capacity;
    int64_t *answers;
    struct kvfs_run *runs;
    struct settled *settled; /* to tell when the step is over */
};

/* ---- entering ---- */

/* The holder's name is the block's. Each has its memory before anything changes. 0, or -errno: nothing has changed. */
static int take_name(struct kvfs_plane *plane, struct commit *frame, struct kvfs_inode_record *block, const struct kvfs_inode_record *holder,
                     int64_t now) {
    struct kvfs_inode_record *gone = holder ? record_again(holder) : NULL;
    int kept = holder && !gone ? -ENOMEM : names_prepare(plane->names, block);
    if (kept == 0) {
        kept = kvfs_name_put(plane, block, holder ? holder->inode : 0);
        if (kept < 0)
            names_unprepare(plane->names, block);
    }
    if (kept < 0) {
        free(gone);
        return kept;
    }
    int r = names_take(plane->names, block);
    assert(r == 0);
    if (gone) {
        uint64_t inode = gone->inode;
        r = name_drop(plane, gone, kept, now);
        assert(r == 0);
        if (kept)
            frame->told.lingering[frame->told.lingering_count++] = inode;
    }
    place_account(plane->names, block, 1);
    name_touch(plane, block->parent, now);
    return 0;
}

/* The last commit may have the older block as in flight. A crash would bring that back if the successor was gone. So the successor's segments are
 * not used again before the index knows. */
static void successor_waits(struct kvfs_plane *plane, const struct kvfs_inode_record *successor) {
    const struct kvfs_extent *extents = record_extents(successor);
    if (successor->flags & KVFS_INODE_SEALED)
        place_note(plane->names, successor->segment, KVFS_NOTE_ENTERED);
    for (uint32_t i = 0; i < successor->extent_count; i++)
        place_note(plane->names, extents[i].segment, KVFS_NOTE_ENTERED);
}

/* As rename(2) would, over whatever file has the name. 1: it has entered, and the names have its record. 0: superseded, as a file made after it has
 * the name. -EAGAIN: the caller is to load names; with `forced` they were. -ENOSPC: the block table is full. Or an error. */
static int enter(struct kvfs_plane *plane, struct commit *frame, struct reservation *reservation, bool forced, int64_t now) {
    struct kvfs_inode_record *block = reservation->record;
    const struct kvfs_inode_record *holder = NULL;
    const char *name = record_name(block);
    if (!forced && names_left(plane->names) & (KVFS_LEAVE_CLOSED | KVFS_LEAVE_HIDING | KVFS_LEAVE_BEHIND))
        return -EAGAIN;
    if (!directory_here(plane, block->parent))
        return forced ? -ENOENT : -EAGAIN;
    int held = name_holder(plane, block->parent, name, block->name_size, &holder);
    if (held == -EAGAIN && forced) /* the table alone does not know */
        held = 0;
    if (forced && held > 0 && holder->inode == frame->told.hidden)
        held = 0;
    if (held < 0 || (!forced && name_is_pinned(plane, held ? holder->inode : block->parent)))
        return -EAGAIN;
    if (held && holder->kind == KVFS_KIND_DIRECTORY)
        return -EISDIR;
    if (held && holder->inode > block->inode) {
        successor_waits(plane, holder);
        place_note(plane->names, block->segment, KVFS_NOTE_DIRTY | KVFS_NOTE_GONE);
        return 0;
    }
    if (held && holder->flags & KVFS_INODE_SLAB && !forced)
        return -EAGAIN;
    bool untold = names_is_untold(plane->names, block->parent, name, block->name_size);
    uint32_t segment = block->segment;
    if (held && holder->version > block->version)
        block->version = kvfs_names_next_version(plane->names);
    bool raised = block->version != reservation->version.number;
    int r = take_name(plane, frame, block, held ? holder : NULL, now);
    if (r < 0)
        return r;
    reservation->record = NULL;
    if (reservation->parent)
        kvfs_inode_follow(plane, block->inode, reservation->parent);
    if (raised || reservation->moves != frame->told.moves) /* its header is not all of the truth */
        place_note(plane->names, segment, KVFS_NOTE_DIRTY | KVFS_NOTE_GONE);
    frame->told.durable |= raised;
    frame->told.replaced |= held || untold;
    return 1;
}

/* The answer waits until everything before these runs has ended. */
static void run_keep(struct commit *frame, const struct kvfs_run *run) {
    uint32_t i = 0;
    while (i < frame->told.run_count && (frame->runs[i].segment != run->segment || frame->runs[i].generation != run->generation))
        i++;
    if (i == frame->runs_capacity) {
        uint32_t capacity = i ? i * 2 : 8;
        struct kvfs_run *grown = realloc(frame->runs, capacity * sizeof(*grown));
        if (!grown) {
            frame->told.durable = 1;
            return;
        }
        frame->told.runs = frame->runs = grown;
        frame->runs_capacity = capacity;
    }
    if (i == frame->told.run_count)
        frame->runs[frame->told.run_count++] = *run;
    else if (frame->runs[i].page < run->page)
        frame->runs[i] = *run;
}

/* The item is answered. Returns whether its block has entered. */
static bool item_end(struct kvfs_plane *plane, struct commit *frame, struct reservation *reservation, int result) {
    if (result >= 0) {
        for (uint32_t i = 0; i < reservation->run_count; i++)
            run_keep(frame, &reservation->runs[i]);
        plane->reservations.committed += result > 0;
        plane->reservations.superseded += result == 0;
        struct settled **last = &frame->settled;
        while (*last)
            last = &(*last)->next;
        *last = reservation_end(plane, reservation);
    } else {
        frame->told.taken_back++;
        reservation_take_back(plane, reservation, result == -ETIMEDOUT, result != -ECANCELED);
    }
    frame->answers[frame->done++] = result < 0 ? result : 0;
    return result > 0;
}

static struct wire_commit item_read(const struct commit *frame) {
    struct wire_commit item;
    memcpy(&item, frame->items + frame->done * sizeof(item), sizeof(item));
    return item;
}

/* False: the item is the caller's. */
static bool item_commit(struct kvfs_plane *plane, struct commit *frame, int64_t now) {
    struct wire_commit item = item_read(frame);
    struct reservation *reservation = reservation_find(plane, frame->holder, item.reservation);
    if (!reservation || !reservation->open) {
        if (reservation && item.error != -ETIMEDOUT)
            reservation_end_late(plane, reservation);
        frame->answers[frame->done++] = -ETIMEDOUT;
        return true;
    }
    int result = item.error ? (int)item.error : enter(plane, frame, reservation, false, now);
    if ((result == -EAGAIN || result == -ENOSPC) && !item.error) { /* Python loads names, and waits for room in the table */
        frame->told.block = reservation->record;
        return false;
    }
    item_end(plane, frame, reservation, result);
    return true;
}

/* ---- COMMIT ---- */

struct kvfs_commit *kvfs_commit_begin(struct kvfs_holder *holder, const void *items, uint32_t count) {
    struct commit *frame = calloc(1, sizeof(*frame));
    if (frame && !(frame->answers = calloc(count + 1u, sizeof(*frame->answers)))) {
        free(frame);
        frame = NULL;
    }
    if (!frame)
        return NULL;
    frame->holder = (struct holder *)(void *)holder;
    frame->items = items;
    frame->count = count;
    frame->told.answers = frame->answers;
    return &frame->told;
}

static void told_now(struct commit *frame) {
    settled_tell(frame->settled);
    frame->settled = NULL;
}

int kvfs_commit(struct kvfs_plane *plane, struct kvfs_commit *told) {
    struct commit *frame = (struct commit *)(void *)told;
    int64_t now = time_now();
    bool left = false;
    told->lingering_count = 0;
    told->block = NULL;
    kvfs_names_begin(plane->names);
    for (uint32_t i = 0; !left && i < KVFS_FRAME_PART && frame->done < frame->count; i++)
        left = !item_commit(plane, frame, now);
    kvfs_names_end(plane->names);
    told_now(frame);
    return left ? KVFS_FRAME_NAMES : frame->done < frame->count ? KVFS_FRAME_MORE : KVFS_FRAME_DONE;
}

int kvfs_commit_item(struct kvfs_plane *plane, struct kvfs_commit *told, int error) {
    struct commit *frame = (struct commit *)(void *)told;
    told->lingering_count = 0;
    told->block = NULL;
    kvfs_names_begin(plane->names);
    struct reservation *reservation = reservation_find(plane, frame->holder, item_read(frame).reservation);
    assert(reservation && reservation->open);
    int result = error ? error : enter(plane, frame, reservation, true, time_now());
    bool entered = item_end(plane, frame, reservation, result == -EAGAIN ? -EIO : result);
    kvfs_names_end(plane->names);
    told_now(frame);
    return entered;
}

void kvfs_commit_end(struct kvfs_commit *told) {
    struct commit *frame = (struct commit *)(void *)told;
    free(frame->answers);
    free(frame->runs);
    free(frame);
}

/* ---- DELETE ---- */

int kvfs_remove_names(struct kvfs_plane *plane, struct kvfs_removal *frame, uint32_t flags, const void *items, uint32_t count,
                      const struct kvfs_shard shards[KVFS_SHARDS], uint8_t *deleted) {
    const uint8_t *data = items;
    int next = KVFS_FRAME_DONE;
    kvfs_names_begin(plane->names);
    bool leave = names_left(plane->names) & (KVFS_LEAVE_CLOSED | KVFS_LEAVE_HIDING);
    for (uint32_t i = 0; next == KVFS_FRAME_DONE && i < KVFS_FRAME_PART && frame->done < count; i++) {
        struct wire_delete item;
        memcpy(&item, data + frame->at, sizeof(item));
        const char *name = (const char *)data + frame->at + sizeof(item);
        uint32_t shard = frame_shard(flags, item.directory, name);
        uint64_t directory = shards[shard].directory;
        int r = !directory ? -ENOENT : leave ? (int)KVFS_NEED_CALLER : name_remove(plane, directory, name, item.name_size);
        frame->at += sizeof(item) + round_up(item.name_size, 8);
        if (r > 0) {
            next = KVFS_FRAME_NAMES;
            frame->name = name;
            frame->name_size = item.name_size;
            frame->shard = shard;
        } else {
            deleted[frame->done++] = r == 0;
        }
    }
    kvfs_names_end(plane->names);
    return next ? next : frame->done < count ? KVFS_FRAME_MORE : KVFS_FRAME_DONE;
}
