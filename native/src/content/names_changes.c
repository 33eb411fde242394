/* CREATE of files, in one step (I4): names in memory, block table, and the directory's times. All that it needs is in memory, almost always. Python does
 * the rest, by the same names and table (kvfs/namespace/files.py). And what all changes of names share. */
#include "content/content.h"

#include <sys/stat.h>

/* The step of the kernel's own file times: more would only be more updates, when thousands of files a second enter a directory. */
#define TOUCH_NS 4000000
#define DEPTH_MAX 4096u /* of directories: longer than PATH_MAX allows */

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

static bool is_free(struct kvfs_plane *plane, uint64_t parent, const char *name) {
    const struct kvfs_inode_record *holder;
    uint32_t size = (uint32_t)strlen(name);
    return !names_is_untold(plane->names, parent, name, size) && name_holder(plane, parent, name, size, &holder) == 0;
}

struct kvfs_inode_record *record_named(const struct kvfs_inode_record *from, uint64_t parent, const char *name, uint32_t size) {
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
    if (!(record = record_named(&head, parent, name, (uint32_t)strlen(name))))
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
    if (!names_step_begin(plane, KVFS_LEAVE_CLOSED | KVFS_LEAVE_HIDING | KVFS_LEAVE_BEHIND | KVFS_LEAVE_FULL))
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

void places_wake(struct kvfs_plane *plane) {
    kvfs_names_begin(plane->names);
    struct places *places = names_places(plane->names);
    bool wake = places->wake;
    places->wake = false;
    kvfs_names_end(plane->names);
    if (wake)
        event_add(plane, KVFS_EVENT_PLACES, 0, 0);
}
