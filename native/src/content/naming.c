/* Removals and renames, and the door to all changes of names. Each is one step (I4): names in memory, block table, places, and the directories' times. For
 * threads of C, and for Python, which brings what is not in memory and calls again (kvfs_naming.h, kvfs/store/bringing.py).
 *
 * Each looks at all that it needs first. It takes the memory next, then changes the table, which can refuse, then the names, which cannot any more (I11). */
#include "content/naming.h"

#define NOREPLACE 1u

/* What a thread of C may have made since Python looked is in memory. While a device is away none makes anything, and what is hidden there counts for
 * nothing, as Python has looked. */
static int is_empty(const struct change_of *c, uint64_t directory) {
    if (!c->counts)
        return KVFS_NEED_CALLER;
    if (c->n->full == directory)
        return -ENOTEMPTY;
    if (c->n->empty != directory)
        return naming_lacks(c, KVFS_NEED_EMPTY, directory);
    if (names_left(c->plane->names) & KVFS_LEAVE_HIDING)
        return 0;
    return names_has_new(c->plane->names, directory) ? -ENOTEMPTY : 0;
}

/* ---- removing ---- */

/* The inode loses its name, or without one goes for good unless it is open. -ENOMEM: nothing has changed. */
static int drop(const struct change_of *c, const struct kvfs_inode_record *record, int64_t now) {
    struct kvfs_plane *plane = c->plane;
    uint64_t inode = record->inode;
    bool directory = record->kind == KVFS_KIND_DIRECTORY, nameless = record->flags & KVFS_INODE_NAMELESS;
    struct kvfs_inode_record *copy = record_again(record);
    if (!copy || naming_copy(c, record, &c->n->removed) < 0 || names_removable(plane->names, inode) < 0) {
        free(copy);
        return -ENOMEM;
    }
    int kept = kvfs_inode_remove(plane, inode);
    assert(kept >= 0 || kept == -ENOENT); /* a rebuild has not got to it, or it is a directory that was removed before */
    if (kept < 0)
        kept = 0;
    if (directory && !nameless && c->n->known & KVFS_KNOWN_OPEN)
        kept = KVFS_KEPT_OPEN;
    c->n->kept = (uint32_t)kept;
    if (nameless && c->n->flags & KVFS_NAMING_OPEN)
        c->n->kept = (uint32_t)(kept = 0);
    if (kept && nameless) { /* opened again meanwhile */
        free(copy);
        free(c->n->removed);
        c->n->removed = NULL;
        return 0;
    }
    int r = name_drop(plane, copy, kept, now);
    assert(r == 0);
    return 0;
}

static int remove_file(const struct change_of *c) {
    struct kvfs_naming *n = c->n;
    const struct kvfs_inode_record *record;
    naming_record(c, n->parent);
    int r = naming_look_up(c, 0, &record);
    if (r || n->inode_count)
        return r ? r : KVFS_NEED_INODES;
    if (!record) {
        r = c->plane->pod ? foreign_drop(c->plane, n->parent, n->name, n->name_size) : -ENOENT;
        return r == 1 ? -EISDIR : r;
    }
    if (record->kind == KVFS_KIND_DIRECTORY)
        return -EISDIR;
    if (n->kind == KVFS_NAMING_DELETE && record->kind != KVFS_KIND_FILE)
        return -EINVAL;
    int64_t now = time_now();
    if ((r = naming_pins(c, record->inode)) || (r = drop(c, record, now)) < 0)
        return r;
    name_touch(c->plane, n->parent, now);
    return 0;
}

/* Other nodes have the directory too. They are told that this one has it no more; it is theirs, as a look-up makes it. 1; 0: nobody else has it, as the
 * news of this moment say. */
static int disown(const struct change_of *c, const struct kvfs_inode_record *record, int64_t now) {
    struct kvfs_plane *plane = c->plane;
    const char *name = c->n->name;
    uint32_t size = c->n->name_size;
    uint64_t inode = record->inode;
    struct kvfs_record theirs, again;
    struct kvfs_inode_record head = *record, *borrowed;
    head.record_size = (uint32_t)sizeof(head); /* no attributes */
    head.name_size = head.xattr_size = 0;
    head.extent_count = 0;
    if (!(borrowed = record_named(&head, record->parent, name, size)) || names_prepare_move(plane->names, borrowed) < 0) {
        free(borrowed);
        return -ENOMEM;
    }
    if (kvfs_inode_remove(plane, inode) < 0 || foreign_rights(plane, record->parent, name, size, &theirs) < 0 || theirs.inode != inode) {
        names_unprepare_move(plane->names, borrowed);
        free(borrowed);
        return 0;
    }
    borrowed->flags = KVFS_INODE_BORROWED;
    borrowed->version = theirs.version;
    borrowed->mode = theirs.mode;
    borrowed->uid = theirs.uid;
    borrowed->gid = theirs.gid;
    borrowed->nlink = 2;
    borrowed->mtime_ns = borrowed->ctime_ns = borrowed->atime_ns = now;
    if (kvfs_name_put(plane, borrowed, 0) < 0) {
        names_unprepare_move(plane->names, borrowed);
        free(borrowed);
        return 0;
    }
    uint64_t parent = record->parent, version = borrowed->version;
    int r = names_take(plane->names, borrowed);
    assert(r == 0);
    name_touch(plane, parent, now);
    /* News of a moment ago found nothing here. */
    if (foreign_rights(plane, parent, name, size, &again) == 0 && again.version > version)
        event_add(plane, KVFS_EVENT_OVERTAKEN, inode, again.version);
    return 1;
}

static int remove_directory(const struct change_of *c) {
    struct kvfs_naming *n = c->n;
    const struct kvfs_inode_record *record;
    struct kvfs_record theirs;
    naming_record(c, n->parent);
    int r = naming_look_up(c, 0, &record);
    if (r || n->inode_count)
        return r ? r : KVFS_NEED_INODES;
    bool shared = naming_theirs(c, &theirs) == 1;
    if (!record)
        return shared ? -ENOTEMPTY : -ENOENT; /* the last node that has something there may remove it */
    if (record->kind != KVFS_KIND_DIRECTORY)
        return -ENOTDIR;
    if ((r = is_empty(c, record->inode)))
        return r;
    if (shared && record->flags & KVFS_INODE_BORROWED)
        return -ENOTEMPTY; /* as above */
    int64_t now = time_now();
    if (shared && (r = disown(c, record, now)))
        return r == 1 ? -ENOTEMPTY : r;
    struct kvfs_inode_record *links;
    if ((r = naming_links_prepare(c, n->parent, -1, &links)) < 0 || (r = drop(c, record, now)) < 0) {
        naming_links_unprepare(c, links);
        if (shared) /* disown() has taken it from the table, where a name that was there a moment ago has room */
            kvfs_name_put(c->plane, record, 0);
        return r;
    }
    naming_links_set(c, n->parent, links, now);
    return 0;
}

/* An end that no request asks for: of a block that is bad or overtaken, or of an inode without a name. */
static int remove_inode(const struct change_of *c) {
    struct kvfs_naming *n = c->n;
    const struct kvfs_inode_record *record = naming_record(c, n->inode);
    if (n->inode_count)
        return KVFS_NEED_INODES;
    if (!record)
        return 0;
    bool nameless = record->flags & KVFS_INODE_NAMELESS;
    if (nameless != (n->kind == KVFS_NAMING_END))
        return 0;
    int r = naming_pins(c, n->inode);
    if (!r && !nameless && record->kind == KVFS_KIND_DIRECTORY)
        r = is_empty(c, n->inode);
    return r ? r : drop(c, record, time_now());
}

/* ---- renaming ---- */

/* What a rename takes before it changes anything. */
struct moving {
    struct kvfs_inode_record *renamed;   /* as it will be */
    struct kvfs_inode_record *gone;      /* a copy of what loses its name, or NULL */
    struct kvfs_inode_record *older;     /* for names_push() */
    struct kvfs_inode_record *from, *to; /* the directories: naming_links_prepare() */
    bool prepared;
};

static void move_unprepare(const struct change_of *c, struct moving *m) {
    naming_links_unprepare(c, m->to);
    naming_links_unprepare(c, m->from);
    if (m->prepared)
        names_unprepare_move(c->plane->names, m->renamed);
    free(m->older);
    free(m->gone);
    free(m->renamed);
}

/* -ENOMEM: the rest is to be given back. */
static int move_prepare(const struct change_of *c, const struct kvfs_inode_record *record, const struct kvfs_inode_record *target, int64_t now,
                        struct moving *m) {
    struct kvfs_names *names = c->plane->names;
    struct kvfs_naming *n = c->n;
    const bool directory = record->kind == KVFS_KIND_DIRECTORY, moved = n->parent != n->new_parent;
    const int replaced = target && target->kind == KVFS_KIND_DIRECTORY;
    if (!(m->renamed = record_named(record, n->new_parent, n->new_name, n->new_name_size)) || (target && !(m->gone = record_again(target))))
        return -ENOMEM;
    m->renamed->ctime_ns = now;
    if (record->flags & KVFS_INODE_SEALED || directory)
        m->renamed->version = kvfs_names_next_version(names);
    if (naming_copy(c, record, &n->before) < 0 || naming_copy(c, m->renamed, &n->after) < 0 || (target && naming_copy(c, target, &n->removed) < 0) ||
        (target && names_older(names, record->inode, target->inode, &m->older) < 0) || names_prepare_move(names, m->renamed) < 0)
        return -ENOMEM;
    m->prepared = true;
    if (naming_links_prepare(c, n->parent, moved ? -(int)directory : -replaced, &m->from) < 0 ||
        (moved && naming_links_prepare(c, n->new_parent, (int)directory - replaced, &m->to) < 0))
        return -ENOMEM;
    /* Before its last handle's close may tell that it goes. */
    const bool told = !target || replaced || c->counts || event_add(c->plane, KVFS_EVENT_LINGERS, target->inode, 0);
    return told ? 0 : -ENOMEM;
}

/* All has been looked at. -errno: nothing has changed. */
static int move(const struct change_of *c, const struct kvfs_inode_record *record, const struct kvfs_inode_record *target) {
    struct kvfs_plane *plane = c->plane;
    struct kvfs_naming *n = c->n;
    const int64_t now = time_now();
    const bool sealed = record->flags & KVFS_INODE_SEALED;
    struct moving m = {0};
    int r = move_prepare(c, record, target, now, &m);
    if (r == 0)
        r = kvfs_name_put(plane, m.renamed, target ? target->inode : 0);
    if (r < 0) {
        move_unprepare(c, &m);
        return r;
    }
    int kept = r;
    n->lingers = kept != 0;
    if (target)
        names_push(plane->names, record->inode, m.older);
    const uint32_t segment = m.renamed->segment;
    r = names_take(plane->names, m.renamed);
    assert(r == 0);
    if (m.gone) {
        if (m.gone->kind == KVFS_KIND_DIRECTORY && n->known & KVFS_KNOWN_OPEN)
            kept = KVFS_KEPT_OPEN;
        n->kept = (uint32_t)kept;
        r = name_drop(plane, m.gone, kept, now);
        assert(r == 0);
    }
    if (sealed)
        place_note(plane->names, segment, KVFS_NOTE_RENAMED);
    naming_links_set(c, n->parent, m.from, now);
    if (n->parent != n->new_parent)
        naming_links_set(c, n->new_parent, m.to, now);
    return 0;
}

/* What a rename of these two needs. 1: nothing is to do; 0; -errno or a need, above 1. */
static int move_check(const struct change_of *c, const struct kvfs_inode_record *record, const struct kvfs_inode_record *target) {
    struct kvfs_naming *n = c->n;
    const struct kvfs_inode_record *to = names_record(c->plane->names, n->new_parent);
    struct kvfs_record theirs;
    const bool directory = record && record->kind == KVFS_KIND_DIRECTORY;
    int r;
    if (!record)
        return naming_theirs(c, &theirs) >= 0 ? -EXDEV : -ENOENT; /* mv(1) copies then */
    if (directory && c->plane->pod)
        return -EXDEV;
    if ((r = naming_directory(to)) < 0)
        return r;
    if (target && n->flags & NOREPLACE)
        return -EEXIST;
    if (target == record)
        return 1;
    if (target && !directory && target->kind == KVFS_KIND_DIRECTORY)
        return -EISDIR;
    if (target && directory && target->kind != KVFS_KIND_DIRECTORY)
        return -ENOTDIR;
    if (!c->counts && (directory || to->flags & KVFS_INODE_BORROWED))
        return KVFS_NEED_CALLER;
    bool loop = false;
    if (directory && n->parent != n->new_parent && (r = naming_above(c, n->new_parent, record->inode, &loop)) > 1)
        return r;
    if (loop)
        return -EINVAL;
    return target && directory ? is_empty(c, target->inode) : 0;
}

static int rename_inode(const struct change_of *c) {
    struct kvfs_plane *plane = c->plane;
    struct kvfs_naming *n = c->n;
    const struct kvfs_inode_record *record, *target;
    if (n->flags & ~NOREPLACE)
        return -EINVAL;
    if (n->new_name_size > KVFS_NAME_MAX)
        return -ENAMETOOLONG;
    naming_record(c, n->parent);
    naming_record(c, n->new_parent);
    int r = naming_look_up(c, 0, &record);
    if (!r)
        r = naming_look_up(c, 1, &target);
    if (r || n->inode_count)
        return r ? r : KVFS_NEED_INODES;
    r = move_check(c, record, target);
    if (r)
        return r == 1 ? 0 : r;
    n->untold = names_is_untold(plane->names, n->new_parent, n->new_name, n->new_name_size);
    if (n->untold && !c->counts)
        return KVFS_NEED_CALLER;
    if ((n->parent != n->new_parent && ((r = naming_pins(c, record->inode)) || (r = naming_pins(c, n->new_parent)))) ||
        (target && (r = naming_pins(c, target->inode))))
        return r;
    if (names_record(plane->names, n->new_parent)->flags & KVFS_INODE_BORROWED && (r = naming_own(c, n->new_parent)))
        return r;
    return move(c, record, target);
}

/* ---- the interface ---- */

static int change(struct kvfs_plane *plane, struct kvfs_naming *n, bool counts) {
    const struct change_of c = {plane, n, counts};
    n->inode_count = 0;
    switch (n->kind) {
    case KVFS_NAMING_UNLINK:
    case KVFS_NAMING_DELETE: return remove_file(&c);
    case KVFS_NAMING_RMDIR: return remove_directory(&c);
    case KVFS_NAMING_RENAME: return rename_inode(&c);
    case KVFS_NAMING_TAKE:
    case KVFS_NAMING_END: return remove_inode(&c);
    case KVFS_NAMING_CREATE:
    case KVFS_NAMING_MKDIR:
    case KVFS_NAMING_SYMLINK:
    case KVFS_NAMING_COPY:
    case KVFS_NAMING_BORROW:
    case KVFS_NAMING_OWN: return naming_make(&c);
    default: return naming_attributes(&c);
    }
}

static void copies_free(struct kvfs_naming *n) {
    free(n->removed);
    free(n->before);
    free(n->after);
    n->removed = n->before = n->after = NULL;
}

int kvfs_naming(struct kvfs_plane *plane, struct kvfs_naming *n) {
    kvfs_names_begin(plane->names);
    if (!n->begun)
        names_hold(plane->names);
    n->begun = 1;
    int r = change(plane, n, true);
    if (r)
        copies_free(n);
    kvfs_names_end(plane->names);
    return r;
}

void kvfs_naming_end(struct kvfs_plane *plane, struct kvfs_naming *n) {
    copies_free(n);
    if (!n->begun)
        return;
    kvfs_names_begin(plane->names);
    names_let_go(plane->names);
    kvfs_names_end(plane->names);
    n->begun = 0;
}

int naming_here(struct kvfs_plane *plane, struct kvfs_naming *n) { return change(plane, n, false); }

int name_remove(struct kvfs_plane *plane, uint64_t parent, const char *name, uint32_t size) {
    struct kvfs_naming n = {.kind = KVFS_NAMING_DELETE, .parent = parent, .name = name, .name_size = size};
    return naming_here(plane, &n);
}

int name_create(struct kvfs_plane *plane, uint64_t parent, const char *name, uint32_t mode, uint32_t uid, uint32_t gid, struct kvfs_record *out) {
    struct kvfs_naming n = {
        .kind = KVFS_NAMING_CREATE, .parent = parent, .name = name, .name_size = (uint32_t)strlen(name), .mode = mode, .uid = uid, .gid = gid};
    if (!names_step_begin(plane, KVFS_LEAVE_CLOSED | KVFS_LEAVE_HIDING | KVFS_LEAVE_BEHIND | KVFS_LEAVE_FULL))
        return KVFS_NEED_CALLER;
    int r = naming_here(plane, &n);
    if (r == 0)
        record_from_inode(names_record(plane->names, n.inode), out);
    kvfs_names_end(plane->names);
    return r == -ENOSPC ? (int)KVFS_NEED_CALLER : r; /* it waits for room in the table */
}

int name_unlink(struct kvfs_plane *plane, uint64_t parent, const char *name) {
    struct kvfs_naming n = {.kind = KVFS_NAMING_UNLINK, .parent = parent, .name = name, .name_size = (uint32_t)strlen(name)};
    if (!names_step_begin(plane, KVFS_LEAVE_CLOSED | KVFS_LEAVE_HIDING | KVFS_LEAVE_FULL))
        return KVFS_NEED_CALLER;
    int r = naming_here(plane, &n);
    kvfs_names_end(plane->names);
    if (r == 0)
        places_wake(plane);
    return r;
}

int name_rename(struct kvfs_plane *plane, uint64_t parent, const char *name, uint64_t new_parent, const char *new_name, uint32_t flags) {
    struct kvfs_naming n = {.kind = KVFS_NAMING_RENAME,
                            .parent = parent,
                            .name = name,
                            .name_size = (uint32_t)strlen(name),
                            .new_parent = new_parent,
                            .new_name = new_name,
                            .new_name_size = (uint32_t)strlen(new_name),
                            .flags = flags};
    if (!names_step_begin(plane, KVFS_LEAVE_CLOSED | KVFS_LEAVE_HIDING | KVFS_LEAVE_FULL))
        return KVFS_NEED_CALLER;
    int r = naming_here(plane, &n);
    kvfs_names_end(plane->names);
    if (r == 0)
        places_wake(plane);
    return r;
}

/* 1: removed; 0: it is not in the directory any more; -1: Python's. */
static int child_remove(struct kvfs_plane *plane, uint64_t parent, uint64_t inode, struct kvfs_removed *out) {
    const struct kvfs_inode_record *record = names_record(plane->names, inode);
    if (!record)
        return names_has(plane->names, inode) ? 0 : -1;
    if (!record_is_named(record) || record->parent != parent)
        return 0;
    char name[KVFS_NAME_MAX]; /* the record goes with it */
    struct kvfs_naming n = {.kind = KVFS_NAMING_UNLINK, .parent = parent, .name = name, .name_size = record->name_size};
    assert(n.name_size <= sizeof(name));
    memcpy(name, record_name(record), n.name_size);
    uint64_t bytes = record->flags & KVFS_INODE_SEALED ? record->size : 0;
    int r = naming_here(plane, &n);
    if (r)
        return r == -ENOENT ? 0 : -1;
    untold_add(plane->names, parent, name, n.name_size);
    out->files++;
    out->bytes += bytes;
    out->open += n.kept > 0;
    return 1;
}

void kvfs_files_remove(struct kvfs_plane *plane, uint64_t directory, const uint64_t *inodes, uint32_t count, uint8_t *left,
                       struct kvfs_removed *removed) {
    memset(removed, 0, sizeof(*removed));
    kvfs_names_begin(plane->names);
    bool leave = names_left(plane->names) & (KVFS_LEAVE_CLOSED | KVFS_LEAVE_HIDING);
    for (uint32_t i = 0; i < count; i++)
        left[i] = leave || child_remove(plane, directory, inodes[i], removed) < 0;
    kvfs_names_end(plane->names);
}
