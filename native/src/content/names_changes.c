/* CREATE, UNLINK and RENAME of files, in one step each (I4): names in memory, block table, places, and the directory's times. All that they need is in
 * memory, almost always. Python does the rest, by the same names and table (kvfs/namespace/files.py). */
#include "content/content.h"

#include <sys/stat.h>

/* The step of the kernel's own file times: more would only be more updates, when thousands of files a second enter a directory. */
#define TOUCH_NS 4000000
#define NOREPLACE 1u
#define DEPTH_MAX 4096u /* of directories: longer than PATH_MAX allows */

static bool step_begin(struct kvfs_plane *plane, uint32_t reasons) {
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

static bool is_free(struct kvfs_plane *plane, uint64_t parent, const char *name) {
    const struct kvfs_inode_record *holder;
    uint32_t size = (uint32_t)strlen(name);
    return !names_is_untold(plane->names, parent, name, size) && name_holder(plane, parent, name, size, &holder) == 0;
}

/* A copy with another name, which may be its own. NULL: no memory. */
static struct kvfs_inode_record *record_named(const struct kvfs_inode_record *from, uint64_t parent, const char *name) {
    uint32_t size = (uint32_t)strlen(name);
    uint64_t rest = from->record_size - sizeof(*from) - round_up(from->name_size, 8);
    struct kvfs_inode_record *to = calloc(1, sizeof(*to) + round_up(size, 8) + rest);
    if (!to)
        return NULL;
    *to = *from;
    to->parent = parent;
    to->name_size = (uint16_t)size;
    to->record_size = (uint32_t)(sizeof(*to) + round_up(size, 8) + rest);
    memcpy(to + 1, name, size);
    memcpy((char *)(to + 1) + round_up(size, 8), record_extents(from), rest);
    return to;
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

static int create(struct kvfs_plane *plane, uint64_t parent, const char *name, uint32_t mode, uint32_t uid, uint32_t gid, struct kvfs_record *out) {
    const struct kvfs_inode_record *directory = directory_here(plane, parent);
    if (!directory || directory->flags & KVFS_INODE_BORROWED || !is_free(plane, parent, name))
        return -EAGAIN;
    int64_t now = time_now();
    struct kvfs_inode_record *record, head = {.kind = KVFS_KIND_FILE,
                                              .record_size = sizeof(head),
                                              .inode = kvfs_names_next_inode(plane->names),
                                              .version = kvfs_names_next_version(plane->names),
                                              .mtime_ns = now,
                                              .ctime_ns = now,
                                              .atime_ns = now,
                                              .mode = S_IFREG | (mode & 07777),
                                              .uid = uid,
                                              .gid = directory->mode & S_ISGID ? directory->gid : gid,
                                              .nlink = 1};
    if (!(record = record_named(&head, parent, name)))
        return -EAGAIN;
    uint64_t inode = head.inode;
    bool made = kvfs_file_create(plane, inode) == 0;
    bool named = made && kvfs_name_put(plane, record, 0) == 0;
    if (!named || names_take(plane->names, record) < 0) {
        free(record);
        if (named)
            kvfs_inode_remove(plane, inode);
        else if (made)
            kvfs_file_discard(plane, inode);
        return -EAGAIN;
    }
    record_from_inode(record, out);
    name_touch(plane, parent, now);
    return 0;
}

int name_create(struct kvfs_plane *plane, uint64_t parent, const char *name, uint32_t mode, uint32_t uid, uint32_t gid, struct kvfs_record *out) {
    if (!step_begin(plane, KVFS_LEAVE_CLOSED | KVFS_LEAVE_HIDING | KVFS_LEAVE_BEHIND | KVFS_LEAVE_FULL))
        return -EAGAIN;
    int r = create(plane, parent, name, mode, uid, gid, out);
    kvfs_names_end(plane->names);
    return r;
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

/* As name_remove(), and whether the file is open and lives on without a name (enum kvfs_kept). */
static int file_remove(struct kvfs_plane *plane, uint64_t parent, const char *name, uint32_t size, int *kept) {
    const struct kvfs_inode_record *record;
    int held = directory_here(plane, parent) ? name_holder(plane, parent, name, size, &record) : -EAGAIN;
    if (held != 1)
        return held == 0 ? -ENOENT : -EAGAIN;
    if (record->kind != KVFS_KIND_FILE || record->flags & KVFS_INODE_SLAB || name_is_pinned(plane, record->inode))
        return -EAGAIN;
    int64_t now = time_now();
    struct kvfs_inode_record *copy = record_again(record);
    *kept = copy ? kvfs_inode_remove(plane, record->inode) : -ENOMEM;
    if (*kept < 0) {
        free(copy);
        return -EAGAIN;
    }
    /* Without memory the names still have it: Python removes it there. */
    if (name_drop(plane, copy, *kept, now) < 0)
        return -EAGAIN;
    name_touch(plane, parent, now);
    return 0;
}

int name_remove(struct kvfs_plane *plane, uint64_t parent, const char *name, uint32_t size) {
    int kept;
    return file_remove(plane, parent, name, size, &kept);
}

/* 1: removed; 0: it is not in the directory any more; -EAGAIN: Python's. */
static int child_remove(struct kvfs_plane *plane, uint64_t parent, uint64_t inode, struct kvfs_removed *out) {
    const struct kvfs_inode_record *record = names_record(plane->names, inode);
    if (!record)
        return names_has(plane->names, inode) ? 0 : -EAGAIN;
    if (!record_is_named(record) || record->parent != parent)
        return 0;
    char name[KVFS_NAME_MAX]; /* the record goes with it */
    uint32_t size = record->name_size;
    assert(size <= sizeof(name));
    memcpy(name, record_name(record), size);
    uint64_t bytes = record->flags & KVFS_INODE_SEALED ? record->size : 0;
    int kept = 0, r = file_remove(plane, parent, name, size, &kept);
    if (r < 0)
        return r == -ENOENT ? 0 : r;
    untold_add(plane->names, parent, name, size);
    out->files++;
    out->bytes += bytes;
    out->open += kept > 0;
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

int name_unlink(struct kvfs_plane *plane, uint64_t parent, const char *name) {
    if (!step_begin(plane, KVFS_LEAVE_CLOSED | KVFS_LEAVE_HIDING | KVFS_LEAVE_FULL))
        return -EAGAIN;
    int r = name_remove(plane, parent, name, (uint32_t)strlen(name));
    kvfs_names_end(plane->names);
    places_wake(plane);
    return r < 0 ? -EAGAIN : 0;
}

static int rename_file(struct kvfs_plane *plane, uint64_t parent, const char *name, uint64_t new_parent, const char *new_name) {
    const struct kvfs_inode_record *record, *target;
    uint32_t size = (uint32_t)strlen(name), new_size = (uint32_t)strlen(new_name);
    const struct kvfs_inode_record *directory = directory_here(plane, new_parent);
    if (!directory_here(plane, parent) || !directory || directory->flags & KVFS_INODE_BORROWED ||
        name_holder(plane, parent, name, size, &record) != 1 || record->kind != KVFS_KIND_FILE || record->flags & KVFS_INODE_SLAB)
        return -EAGAIN;
    if (name_holder(plane, new_parent, new_name, new_size, &target) != 0 || names_is_untold(plane->names, new_parent, new_name, new_size))
        return -EAGAIN;
    if (parent != new_parent && (name_is_pinned(plane, record->inode) || name_is_pinned(plane, new_parent)))
        return -EAGAIN;
    bool sealed = record->flags & KVFS_INODE_SEALED;
    int64_t now = time_now();
    struct kvfs_inode_record *renamed = record_named(record, new_parent, new_name), *before = record_again(record);
    if (renamed) {
        renamed->ctime_ns = now;
        renamed->version = sealed ? kvfs_names_next_version(plane->names) : renamed->version;
    }
    bool named = renamed && before && kvfs_name_put(plane, renamed, 0) == 0;
    bool taken = named && names_take(plane->names, renamed) == 0;
    if (named && !taken)
        kvfs_name_put(plane, before, 0); /* a name that was there a moment ago has room */
    if (taken && sealed)
        place_note(plane->names, renamed->segment, KVFS_NOTE_RENAMED);
    free(before);
    if (!taken) {
        free(renamed);
        return -EAGAIN;
    }
    name_touch(plane, parent, now);
    if (new_parent != parent)
        name_touch(plane, new_parent, now);
    return 0;
}

int name_rename(struct kvfs_plane *plane, uint64_t parent, const char *name, uint64_t new_parent, const char *new_name, uint32_t flags) {
    if (flags & ~NOREPLACE || !step_begin(plane, KVFS_LEAVE_CLOSED | KVFS_LEAVE_HIDING | KVFS_LEAVE_FULL))
        return -EAGAIN;
    int r = rename_file(plane, parent, name, new_parent, new_name);
    kvfs_names_end(plane->names);
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
