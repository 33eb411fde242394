/* Changes of the block table, each within a step (I4). They agree with what is open, as the shard's lock is held over both. */
#include "content/content.h"

#include <time.h>
#include <unistd.h>

/* The other half is _assert_record() in plane.py: all of the record is there. */
static struct kvfs_inode_record record_take(const void *record, struct kvfs_record *to) {
    struct kvfs_inode_record r;
    memcpy(&r, record, sizeof(r));
    assert(r.record_size >= sizeof(r) + r.name_size);
    record_from_inode(&r, to);
    return r;
}

/* With the shard's lock held. */
static int open_state(struct kvfs_plane *plane, struct shard *shard, uint64_t inode, struct node **out) {
    struct node *node = node_find_locked(shard, inode);
    if (!node)
        return 0;
    pthread_mutex_lock(&node->lock);
    bool file = node->file && !node->file->discarded, rewriting = node->rewriting;
    pthread_mutex_unlock(&node->lock);
    *out = node;
    if (file)
        return KVFS_BEING_WRITTEN;
    if (node->handles && (node->writers || rewriting || !hold_may_go(plane, node)))
        return KVFS_OPEN;
    return node_is_leased(plane, node) ? KVFS_LEASED : node->handles ? KVFS_OPEN_BEYOND_SHARE : KVFS_NOT_OPEN;
}

int kvfs_inode_is_open(struct kvfs_plane *plane, uint64_t inode) {
    struct shard *shard = shard_of(plane, inode);
    pthread_mutex_lock(&shard->lock);
    struct node *node;
    int state = open_state(plane, shard, inode, &node);
    pthread_mutex_unlock(&shard->lock);
    return state;
}

int kvfs_inode_overtaken(struct kvfs_plane *plane, uint64_t inode, uint64_t version) {
    struct shard *shard = shard_of(plane, inode);
    pthread_mutex_lock(&shard->lock);
    struct node *node = NULL;
    int state = open_state(plane, shard, inode, &node);
    if (state == KVFS_BEING_WRITTEN) {
        pthread_mutex_lock(&node->lock);
        struct file *file = node->file;
        if (!file || file->discarded) /* it has ended meanwhile */
            state = KVFS_OPEN;
        else if (version > file->overtaken)
            file->overtaken = version;
        pthread_mutex_unlock(&node->lock);
    }
    pthread_mutex_unlock(&shard->lock);
    return state;
}

/* An inode that lost its name lives on for open handles alone. Its staged content is not sealed. */
static int nameless(struct kvfs_plane *plane, uint64_t inode, bool linger, int (*change)(struct kvfs_plane *, uint64_t, int keep, const void *),
                    const void *argument) {
    struct shard *shard = shard_of(plane, inode);
    lost_keep(plane, inode);
    pthread_mutex_lock(&shard->lock);
    struct node *node = node_find_locked(shard, inode);
    int keep = node && node->handles > 0;
    bool lingers = !keep;
    struct kvfs_record record;
    if (!keep && linger && kvfs_table_find_inode(plane->table, inode, &record) == 0 && record.flags & KVFS_INODE_SEALED) {
        bool written = false;
        if (node) {
            pthread_mutex_lock(&node->lock);
            written = node->file != NULL;
            pthread_mutex_unlock(&node->lock);
        }
        keep = !written;
    }
    int r = change(plane, inode, keep, argument);
    if (r >= 0 && node)
        node_unlease(plane, node);
    pthread_mutex_unlock(&shard->lock);
    if (r < 0)
        return r;
    if (!keep)
        kvfs_file_discard(plane, inode);
    return keep && lingers ? KVFS_KEPT_LINGERS : keep;
}

static int table_remove(struct kvfs_plane *plane, uint64_t inode, int keep, const void *argument) {
    const enum kvfs_event_reason *reason = argument;
    struct change change;
    struct kvfs_record before;
    change_look(plane, inode, 0, NULL, 0, &change);
    bool there = kvfs_table_find_inode(plane->table, inode, &before) == 0;
    int r = kvfs_table_remove(plane->table, inode, keep);
    if (r == 0)
        change_remove(plane, *reason, &change);
    if (r == 0 && there)
        use_leave(plane, &before, false);
    return r;
}

static int table_put(struct kvfs_plane *plane, uint64_t inode, int keep, const void *record) {
    (void)inode;
    struct kvfs_record to;
    struct kvfs_inode_record r = record_take(record, &to);
    struct kvfs_record before, after;
    struct change change;
    change_look(plane, to.inode, to.parent, record_name(record), r.name_size, &change);
    bool known = kvfs_table_find_inode(plane->table, to.inode, &before) == 0;
    int error = kvfs_table_put(plane->table, &to, record_name(record), r.name_size, keep);
    /* A new inode is used now; a renamed one has another slot, and keeps its use. */
    if (error == 0 && kvfs_table_find_inode(plane->table, to.inode, &after) == 0 && !(known && after.slot == before.slot))
        use_enter(plane, &after, known ? &before : NULL);
    if (error == 0)
        change_put(plane, &r, record_name(record), KVFS_REASON_WRITTEN, &change);
    return error;
}

int kvfs_name_put(struct kvfs_plane *plane, const void *record, uint64_t replaced) {
    struct kvfs_record to, before, after;
    record_take(record, &to);
    kvfs_names_begin(plane->names);
    bool found = replaced && kvfs_table_find_inode(plane->table, replaced, &before) == 0;
    int r = replaced ? nameless(plane, replaced, true, table_put, record) : table_put(plane, 0, 0, record);
    /* The block of the same name takes the other's place in its chain. */
    if (r >= 0 && found && kvfs_table_find_inode(plane->table, to.inode, &after) == 0)
        use_replace(plane, &before, &after);
    kvfs_names_end(plane->names);
    return r;
}

int kvfs_inode_update(struct kvfs_plane *plane, const void *record) {
    struct kvfs_record to;
    struct kvfs_inode_record taken = record_take(record, &to);
    struct change change;
    kvfs_names_begin(plane->names);
    change_look(plane, to.inode, 0, NULL, 0, &change);
    int r = kvfs_table_update(plane->table, &to);
    if (r == 0)
        change_update(plane, &taken, record_name(record), &change);
    kvfs_names_end(plane->names);
    return r;
}

int kvfs_inode_move(struct kvfs_plane *plane, const void *record) {
    struct kvfs_record to, before;
    struct kvfs_inode_record taken = record_take(record, &to), *copy = record_again(record);
    struct shard *shard = shard_of(plane, to.inode);
    kvfs_names_begin(plane->names);
    pthread_mutex_lock(&shard->lock);
    struct node *node;
    int error = !copy ? -ENOMEM : open_state(plane, shard, to.inode, &node) == KVFS_BEING_WRITTEN ? -EBUSY : 0;
    if (!error && (!names_record(plane->names, to.inode) || kvfs_table_find_inode(plane->table, to.inode, &before) < 0))
        error = -ENOENT;
    if (!error)
        error = kvfs_table_update(plane->table, &to);
    if (!error && (error = names_take(plane->names, copy)) < 0)
        kvfs_table_update(plane->table, &before); /* to where it was a moment ago: it is there still */
    pthread_mutex_unlock(&shard->lock);
    if (error)
        free(copy);
    else
        change_moved(plane, &taken, record_name(record));
    kvfs_names_end(plane->names);
    return error;
}

static int inode_remove(struct kvfs_plane *plane, uint64_t inode, enum kvfs_event_reason reason) {
    kvfs_names_begin(plane->names);
    int r = nameless(plane, inode, false, table_remove, &reason);
    kvfs_names_end(plane->names);
    return r;
}

int kvfs_inode_remove(struct kvfs_plane *plane, uint64_t inode) { return inode_remove(plane, inode, KVFS_REASON_DELETED); }

int kvfs_inode_hide(struct kvfs_plane *plane, uint64_t inode) { return inode_remove(plane, inode, KVFS_REASON_AWAY); }

/* With the shard's lock: take the inode out of the table. False: it is open, or there is no memory for its removal from the names. Without `named` its
 * device is away, and a lease keeps nothing. */
static bool evict_locked(struct kvfs_plane *plane, struct shard *shard, uint64_t inode, bool named) {
    struct change change;
    struct node *node = NULL;
    int state = open_state(plane, shard, inode, &node);
    bool goes = state != KVFS_OPEN && state != KVFS_BEING_WRITTEN && (!named || (state != KVFS_LEASED && names_removable(plane->names, inode) == 0));
    if (goes) {
        struct kvfs_record before;
        change_look(plane, inode, 0, NULL, 0, &change);
        if (kvfs_table_find_inode(plane->table, inode, &before) == 0)
            use_leave(plane, &before, named);
        kvfs_table_remove(plane->table, inode, 0);
        change_remove(plane, named ? KVFS_REASON_EVICTED : KVFS_REASON_AWAY, &change);
    }
    if (goes && node && node->handles)
        hold_evict(plane, node); /* its handles find no record: they read EIO */
    if (goes && node)
        node_unlease(plane, node);
    return goes;
}

static bool evict(struct kvfs_plane *plane, uint64_t inode, bool named) {
    struct shard *shard = shard_of(plane, inode);
    pthread_mutex_lock(&shard->lock);
    bool goes = evict_locked(plane, shard, inode, named);
    pthread_mutex_unlock(&shard->lock);
    return goes;
}

int kvfs_inode_evict(struct kvfs_plane *plane, const uint64_t *inodes, uint32_t count, uint8_t *busy) {
    int total = 0;
    kvfs_names_begin(plane->names);
    for (uint32_t i = 0; i < count; i++) {
        busy[i] = !evict(plane, inodes[i], false);
        total += busy[i];
    }
    kvfs_names_end(plane->names);
    return total;
}

uint32_t kvfs_blocks_look(struct kvfs_plane *plane, uint32_t segment, const uint64_t *inodes, uint32_t count, struct kvfs_look *out) {
    uint32_t absent = 0;
    kvfs_names_begin(plane->names);
    for (uint32_t i = 0; i < count; i++) {
        struct kvfs_record at;
        const struct kvfs_inode_record *record = names_record(plane->names, inodes[i]);
        bool there = kvfs_table_find_inode(plane->table, inodes[i], &at) == 0;
        int open = kvfs_inode_is_open(plane, inodes[i]);
        out[i] = (struct kvfs_look){.inode = inodes[i], .open = (uint8_t)open};
        out[i].held = open == KVFS_OPEN || open == KVFS_LEASED;
        out[i].busy = open == KVFS_BEING_WRITTEN;
        bool unnamed = !names_has(plane->names, inodes[i]);
        if (there) {
            out[i].use = atomic_load_explicit(&plane->uses[at.slot], memory_order_relaxed);
            out[i].orphan = kvfs_chains_orphans(plane->chains)[at.slot / 64] >> at.slot % 64 & 1;
        }
        if (record) {
            out[i].pages = (uint32_t)record_pages(record, segment);
            out[i].pages_all = (uint32_t)record_pages(record, UINT32_MAX);
        } else if (there && unnamed && at.extent_count) {
            out[i].absent = 1;
            absent++;
        } else if (there && unnamed && at.kind == KVFS_KIND_FILE && at.flags & KVFS_INODE_SEALED) {
            out[i].pages_all = at.header_pages + (uint32_t)pages_of(at.size);
            out[i].pages = at.segment == segment ? out[i].pages_all : 0;
        }
    }
    kvfs_names_end(plane->names);
    return absent;
}

/* It has left the table: it leaves names and places. */
static void names_evict(struct kvfs_plane *plane, uint64_t inode, const struct kvfs_inode_record *record) {
    if (record_is_named(record))
        untold_add(plane->names, record->parent, record_name(record), record->name_size);
    place_account(plane->names, record, -1);
    place_note(plane->names, record->segment, KVFS_NOTE_DIRTY | KVFS_NOTE_GONE);
    int r = kvfs_names_remove(plane->names, inode);
    assert(r == 0);
}

/* Returns the pages that it gave back; 0: it stays. */
static uint64_t block_evict(struct kvfs_plane *plane, uint32_t segment, uint64_t inode) {
    const struct kvfs_inode_record *record = names_record(plane->names, inode);
    uint64_t pages = record && record_pages(record, segment) ? record_pages(record, UINT32_MAX) : 0;
    if (!pages || !evict(plane, inode, true))
        return 0;
    names_evict(plane, inode, record);
    return pages;
}

void kvfs_blocks_evict(struct kvfs_plane *plane, uint32_t segment, const uint64_t *inodes, uint32_t count, uint8_t *gone,
                       struct kvfs_evicted *evicted) {
    memset(evicted, 0, sizeof(*evicted));
    kvfs_names_begin(plane->names);
    for (uint32_t i = 0; i < count; i++) {
        uint64_t pages = block_evict(plane, segment, inodes[i]);
        gone[i] = pages > 0;
        evicted->blocks += gone[i];
        evicted->pages += pages;
    }
    kvfs_names_end(plane->names);
}

/* With all shards of the group locked. Whether it goes: none is open, all that is there is in memory, and memory for all removals is ready. */
static bool group_goes(struct kvfs_plane *plane, const uint64_t *inodes, uint32_t count) {
    bool go = true;
    for (uint32_t i = 0; i < count && go; i++) {
        struct node *node = NULL;
        struct kvfs_record at;
        int state = open_state(plane, shard_of(plane, inodes[i]), inodes[i], &node);
        bool known = names_has(plane->names, inodes[i]) || kvfs_table_find_inode(plane->table, inodes[i], &at) < 0;
        go = state != KVFS_OPEN && state != KVFS_BEING_WRITTEN && known;
    }
    uint32_t ready = 0;
    for (; ready < count && go; ready++)
        go = !names_record(plane->names, inodes[ready]) || names_removable(plane->names, inodes[ready]) == 0;
    for (uint32_t i = 0; i < ready && !go; i++)
        if (names_record(plane->names, inodes[i]))
            names_unremovable(plane->names, inodes[i]);
    return go;
}

void kvfs_group_evict(struct kvfs_plane *plane, const uint64_t *inodes, uint32_t count, uint8_t *gone, struct kvfs_evicted *evicted) {
    memset(evicted, 0, sizeof(*evicted));
    memset(gone, 0, count);
    uint64_t locked = 0; /* shards; always in this order, and nobody else holds two */
    _Static_assert(SHARDS <= 64, "a bit for each");
    kvfs_names_begin(plane->names);
    for (uint32_t i = 0; i < count; i++)
        locked |= (uint64_t)1 << (shard_of(plane, inodes[i]) - plane->shards);
    for (uint32_t s = 0; s < SHARDS; s++)
        if (locked >> s & 1)
            pthread_mutex_lock(&plane->shards[s].lock);
    bool go = group_goes(plane, inodes, count);
    for (uint32_t i = 0; i < count && go; i++) {
        const struct kvfs_inode_record *record = names_record(plane->names, inodes[i]);
        gone[i] = record && record_pages(record, UINT32_MAX) && evict_locked(plane, shard_of(plane, inodes[i]), inodes[i], true);
        if (record && !gone[i])
            names_unremovable(plane->names, inodes[i]);
    }
    for (uint32_t s = 0; s < SHARDS; s++)
        if (locked >> s & 1)
            pthread_mutex_unlock(&plane->shards[s].lock);
    for (uint32_t i = 0; i < count; i++) {
        if (!gone[i])
            continue;
        const struct kvfs_inode_record *record = names_record(plane->names, inodes[i]);
        evicted->blocks++;
        evicted->pages += record_pages(record, UINT32_MAX);
        names_evict(plane, inodes[i], record);
    }
    kvfs_names_end(plane->names);
}

int64_t kvfs_inode_user(struct kvfs_plane *plane, uint64_t inode) {
    struct node *node = node_get(plane, inode, false);
    if (!node)
        return -ENOENT;
    struct shard *shard = shard_of(plane, inode);
    pthread_mutex_lock(&shard->lock);
    int64_t r = node->payer ? (int64_t)(atomic_load(&node->payer->key) - 1) : -ENOENT;
    pthread_mutex_unlock(&shard->lock);
    node_put(plane, node);
    return r;
}
