/* What changes of names share: what they look at and lack, and the directories that change with them. And the end of an inode that has lost its name. */
#include "content/naming.h"

/* The step of the kernel's own file times: more would only be more updates, when thousands of files a second enter a directory. */
#define TOUCH_NS 4000000
#define DEPTH_MAX 4096u /* of directories: longer than PATH_MAX allows */
#define MAP_TRIES 1000u /* a look-up in the pod map that meets a change is repeated */

bool names_step_begin(struct kvfs_plane *plane, uint32_t reasons) {
    if (!names_try(plane->names))
        return false;
    if (!(names_left(plane->names) & reasons))
        return true;
    kvfs_names_end(plane->names);
    return false;
}

const struct kvfs_inode_record *directory_here(struct kvfs_plane *plane, uint64_t inode) {
    const struct kvfs_inode_record *record = names_record(plane->names, inode);
    return record && record->kind == KVFS_KIND_DIRECTORY && !(record->flags & KVFS_INODE_NAMELESS) ? record : NULL;
}

int name_holder(struct kvfs_plane *plane, uint64_t parent, const char *name, uint32_t size, const struct kvfs_inode_record **holder) {
    uint64_t inode;
    if (kvfs_names_find(plane->names, parent, name, size, &inode)) {
        *holder = inode ? names_record(plane->names, inode) : NULL;
        return inode == 0 ? 0 : *holder ? 1 : -EAGAIN;
    }
    struct kvfs_record record;
    return kvfs_table_find_name(plane->table, parent, name, size, &record) == -ENOENT ? 0 : -EAGAIN;
}

bool name_is_pinned(struct kvfs_plane *plane, uint64_t inode) {
    if (!(names_left(plane->names) & KVFS_LEAVE_PINS))
        return false;
    for (uint32_t depth = 0; depth < DEPTH_MAX; depth++) {
        const struct kvfs_inode_record *record = names_record(plane->names, inode);
        if (!record || record->flags & KVFS_INODE_PINNED)
            return true;
        if (record->parent == inode)
            return false;
        inode = record->parent;
    }
    return true;
}

struct kvfs_inode_record *record_build(const struct kvfs_inode_record *head, uint64_t parent, const char *name, uint32_t size, const void *rest,
                                       uint64_t rest_size) {
    uint64_t record_size = sizeof(*head) + round_up(size, 8) + round_up(rest_size, 8);
    struct kvfs_inode_record *to = calloc(1, record_size);
    if (!to)
        return NULL;
    *to = *head;
    to->parent = parent;
    to->name_size = (uint16_t)size;
    to->record_size = (uint32_t)record_size;
    memcpy(to + 1, name, size);
    copy_bytes((char *)(to + 1) + round_up(size, 8), rest, rest_size);
    return to;
}

struct kvfs_inode_record *record_named(const struct kvfs_inode_record *from, uint64_t parent, const char *name, uint32_t size) {
    uint64_t rest = from->record_size - sizeof(*from) - round_up(from->name_size, 8);
    return record_build(from, parent, name, size, record_extents(from), rest);
}

void name_touch(struct kvfs_plane *plane, uint64_t inode, int64_t now) {
    const struct kvfs_inode_record *directory = directory_here(plane, inode);
    if (!directory || (now >= directory->mtime_ns && now - directory->mtime_ns < TOUCH_NS))
        return;
    struct kvfs_inode_record *changed = record_again(directory);
    if (!changed)
        return;
    changed->mtime_ns = changed->ctime_ns = now;
    if (names_take(plane->names, changed) == 0)
        kvfs_inode_update(plane, changed);
    else
        free(changed);
}

int name_drop(struct kvfs_plane *plane, struct kvfs_inode_record *record, int kept, int64_t now) {
    bool sealed = record->flags & KVFS_INODE_SEALED;
    uint32_t segment = record->segment;
    int r;
    if (kept) {
        record->flags |= KVFS_INODE_NAMELESS;
        record->nlink = kept == KVFS_KEPT_LINGERS; /* a next daemon lets go of it */
        record->ctime_ns = now;
        r = names_take(plane->names, record);
        if (r == 0)
            kvfs_inode_update(plane, record);
        if (r == 0 && sealed)
            place_note(plane->names, segment, KVFS_NOTE_RENAMED | KVFS_NOTE_GONE);
    } else {
        r = kvfs_names_remove(plane->names, record->inode);
        if (r == 0 && sealed) {
            place_account(plane->names, record, -1);
            place_note(plane->names, segment, KVFS_NOTE_DIRTY | KVFS_NOTE_GONE);
        }
    }
    if (r < 0 || !kept)
        free(record);
    return r;
}

void places_wake(struct kvfs_plane *plane) {
    kvfs_names_begin(plane->names);
    struct places *places = names_places(plane->names);
    bool wake = places->wake;
    places->wake = false;
    kvfs_names_end(plane->names);
    if (wake)
        event_add(plane, KVFS_EVENT_PLACES, 0, 0);
}

/* ---- what they look at, and what they lack ---- */

static bool is_gone(const struct kvfs_naming *n, uint64_t inode) {
    for (uint32_t i = 0; i < n->gone_count; i++)
        if (n->gone[i] == inode)
            return true;
    return false;
}

const struct kvfs_inode_record *naming_record(const struct change_of *c, uint64_t inode) {
    struct kvfs_naming *n = c->n;
    const struct kvfs_inode_record *record = names_record(c->plane->names, inode);
    if (record || names_has(c->plane->names, inode) || is_gone(n, inode))
        return record;
    for (uint32_t i = 0; i < n->inode_count; i++)
        if (n->inodes[i] == inode)
            return NULL;
    assert(n->inode_count < KVFS_NAMING_INODES);
    n->inodes[n->inode_count++] = inode;
    return NULL;
}

int naming_lacks(const struct change_of *c, enum kvfs_need need, uint64_t inode) {
    c->n->inodes[0] = inode;
    c->n->inode_count = 1;
    return need;
}

int naming_look_up(const struct change_of *c, uint32_t which, const struct kvfs_inode_record **out) {
    struct kvfs_naming *n = c->n;
    struct kvfs_plane *plane = c->plane;
    uint64_t parent = which ? n->new_parent : n->parent, inode = 0;
    const char *name = which ? n->new_name : n->name;
    uint32_t size = which ? n->new_name_size : n->name_size;
    *out = NULL;
    if (!kvfs_names_find(plane->names, parent, name, size, &inode) && !(n->known & KVFS_KNOWN_FREE << which)) {
        struct kvfs_record there;
        int r = kvfs_table_find_name(plane->table, parent, name, size, &there);
        bool certain = r == 0 && there.parent == parent && !(there.flags & KVFS_INODE_ASK);
        if (certain)
            inode = there.inode;
        else if (r != -ENOENT || names_left(plane->names) & KVFS_LEAVE_HIDING) { /* the table has not all names */
            n->which = which;
            return KVFS_NEED_NAME;
        }
    }
    if (inode && inode != n->hidden[which])
        *out = naming_record(c, inode);
    return 0;
}

int naming_directory(const struct kvfs_inode_record *record) {
    return !record ? -ENOENT : record->kind != KVFS_KIND_DIRECTORY ? -ENOTDIR : record->flags & KVFS_INODE_NAMELESS ? -ENOENT : 0;
}

int naming_above(const struct change_of *c, uint64_t inode, uint64_t below, bool *loop) {
    uint64_t first = inode;
    bool pinned = false;
    for (uint32_t depth = 0; depth < DEPTH_MAX; depth++) {
        const struct kvfs_inode_record *record = names_record(c->plane->names, inode);
        if (!record && !names_has(c->plane->names, inode) && !is_gone(c->n, inode))
            return naming_lacks(c, KVFS_NEED_ABOVE, first);
        if (loop && inode == below)
            *loop = true;
        if (!record)
            return pinned;
        pinned |= (record->flags & KVFS_INODE_PINNED) != 0;
        if (record->parent == inode)
            return pinned;
        inode = record->parent;
    }
    return pinned;
}

int naming_pins(const struct change_of *c, uint64_t inode) {
    if (!(names_left(c->plane->names) & KVFS_LEAVE_PINS))
        return 0;
    int r = naming_above(c, inode, 0, NULL);
    return r > 1 ? r : r == 1 && !c->counts ? KVFS_NEED_CALLER : 0;
}

int naming_theirs(const struct change_of *c, struct kvfs_record *out) {
    int r = -ENOENT;
    for (uint32_t i = 0; i < MAP_TRIES && c->plane->pod; i++) {
        r = foreign_find(c->plane->pod, &c->plane->array.geometry, c->n->parent, c->n->name, c->n->name_size, out);
        if (r != -EAGAIN)
            break;
    }
    return r == -EAGAIN ? -ENOENT : r;
}

int naming_rights(const struct change_of *c, uint64_t parent, const char *name, uint32_t size, struct kvfs_record *out) {
    int r = -EAGAIN;
    for (uint32_t i = 0; i < MAP_TRIES && r == -EAGAIN; i++)
        r = foreign_rights(c->plane, parent, name, size, out);
    return r == -EAGAIN ? -ENOENT : r;
}

int naming_links_prepare(const struct change_of *c, uint64_t inode, int links, struct kvfs_inode_record **out) {
    const struct kvfs_inode_record *directory = links ? directory_here(c->plane, inode) : NULL;
    *out = NULL;
    if (!directory)
        return 0;
    struct kvfs_inode_record *changed = record_again(directory);
    if (!changed || names_removable(c->plane->names, inode) < 0) {
        free(changed);
        return -ENOMEM;
    }
    changed->nlink += (uint32_t)links;
    *out = changed;
    return 0;
}

void naming_links_unprepare(const struct change_of *c, struct kvfs_inode_record *changed) {
    if (changed)
        names_unremovable(c->plane->names, changed->inode);
    free(changed);
}

void naming_links_set(const struct change_of *c, uint64_t inode, struct kvfs_inode_record *changed, int64_t now) {
    if (!changed) {
        name_touch(c->plane, inode, now);
        return;
    }
    changed->mtime_ns = changed->ctime_ns = now;
    int r = names_take(c->plane->names, changed);
    assert(r == 0);
    kvfs_inode_update(c->plane, changed);
}

int naming_copy(const struct change_of *c, const struct kvfs_inode_record *record, struct kvfs_inode_record **out) {
    if (!c->counts)
        return 0;
    return (*out = record_again(record)) ? 0 : -ENOMEM;
}

int naming_own(const struct change_of *c, uint64_t inode) {
    struct kvfs_plane *plane = c->plane;
    int r = naming_above(c, inode, 0, NULL);
    if (r > 1)
        return r;
    for (;;) {
        /* The uppermost first. */
        const struct kvfs_inode_record *found = NULL, *record = names_record(plane->names, inode);
        for (uint32_t depth = 0; record && record->flags & KVFS_INODE_BORROWED && depth < DEPTH_MAX; depth++) {
            found = record;
            record = names_record(plane->names, record->parent);
        }
        if (!found)
            return 0;
        struct kvfs_inode_record *owned = record_again(found);
        if (!owned || names_prepare_move(plane->names, owned) < 0) {
            free(owned);
            return -ENOMEM;
        }
        owned->flags &= (uint8_t)~KVFS_INODE_BORROWED;
        if ((r = kvfs_name_put(plane, owned, 0)) < 0) {
            names_unprepare_move(plane->names, owned);
            free(owned);
            return r;
        }
        r = names_take(plane->names, owned);
        assert(r == 0);
    }
}
