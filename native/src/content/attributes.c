/* What changes records and no names: rights, times and sizes, extended attributes and pins. Each is one step (I4), in the order of naming.c: a look at all of
 * it, then the memory. */
#include "content/naming.h"

#include <sys/stat.h>

#define ATTRIBUTES_MAX 4096u /* bytes of one inode: they are in each block's header, and in the headers below a directory */
#define ATTRIBUTE_HEAD 6u    /* u16 size of the key, u32 size of the value; then both */
static const char LINK_KEY[] = "kvfs.symlink";

/* The inode's record. 0, -ESTALE, or a need. */
static int record_look(const struct change_of *c, const struct kvfs_inode_record **out) {
    *out = naming_record(c, c->n->inode);
    return c->n->inode_count ? KVFS_NEED_INODES : *out ? 0 : -ESTALE;
}

/* The record is as `changed` from now on, which it takes over; name and place are the same. `told`: headers and summaries are to say so, `rights` of a
 * directory's rights. Where `keeps_ctime` the inode's times stay. -ENOMEM: nothing has changed. */
static int change_record(const struct change_of *c, struct kvfs_inode_record *changed, bool told, bool rights, bool keeps_ctime) {
    struct kvfs_plane *plane = c->plane;
    const bool directory = changed->kind == KVFS_KIND_DIRECTORY, nameless = changed->flags & KVFS_INODE_NAMELESS;
    const bool sealed = changed->flags & KVFS_INODE_SEALED;
    told = told && (directory || sealed);
    if (!keeps_ctime)
        changed->ctime_ns = time_now();
    /* In a pod a directory's version is of its rights alone. */
    if (told && !nameless && (rights || !directory || !plane->pod))
        changed->version = kvfs_names_next_version(plane->names);
    if (naming_copy(c, changed, &c->n->after) < 0 || names_removable(plane->names, changed->inode) < 0) {
        free(changed);
        return -ENOMEM;
    }
    const uint32_t segment = changed->segment;
    int r = names_take(plane->names, changed);
    assert(r == 0);
    r = kvfs_inode_update(plane, changed);
    assert(r == 0 || r == -ENOENT); /* a rebuild has not got to it */
    if (told && directory)
        c->n->below = 1;
    else if (told)
        place_note(plane->names, segment, KVFS_NOTE_RENAMED | (nameless ? KVFS_NOTE_GONE : 0));
    return 0;
}

/* ---- rights, times and sizes ---- */

/* The mode after a change of owner or content. It has no set-user-ID. It has no set-group-ID if the group may execute, or if the user who makes the change
 * is neither root nor of the group. */
static uint32_t without_suid(uint32_t mode, bool of_group) {
    mode &= ~(uint32_t)S_ISUID;
    return mode & S_IXGRP || !of_group ? mode & ~(uint32_t)S_ISGID : mode;
}

static int set(const struct change_of *c) {
    struct kvfs_naming *n = c->n;
    const struct kvfs_inode_record *record;
    const bool owner = n->set & (KVFS_SET_UID | KVFS_SET_GID), rights = owner || n->set & KVFS_SET_MODE;
    int r = record_look(c, &record);
    if (r == 0 && rights && record->kind == KVFS_KIND_DIRECTORY && record->flags & KVFS_INODE_BORROWED)
        r = naming_own(c, n->inode);
    if (r)
        return r;
    record = names_record(c->plane->names, n->inode);
    struct kvfs_inode_record *to = record_again(record);
    if (!to)
        return -ENOMEM;
    const bool sealed = record->flags & KVFS_INODE_SEALED;
    if (n->set & KVFS_SET_SIZE && n->size >> 48) { /* the table has no room for it */
        free(to);
        return -EFBIG;
    }
    if (n->set & KVFS_SET_SIZE) {
        to->size = sealed ? to->size : n->size; /* a sealed record keeps the size of its header until the next seal */
        to->mtime_ns = time_now();
    }
    if (n->set & KVFS_SET_MODE)
        to->mode = (to->mode & S_IFMT) | (n->mode & 07777);
    if (n->set & KVFS_SET_UID)
        to->uid = n->uid;
    if (n->set & KVFS_SET_GID)
        to->gid = n->gid;
    const bool content = n->set & KVFS_SET_KILL && n->set & (KVFS_SET_SIZE | KVFS_SET_CONTENT);
    if (record->kind == KVFS_KIND_FILE && !(n->set & KVFS_SET_MODE) && (owner || content))
        to->mode = without_suid(to->mode, !(n->set & KVFS_SET_KILL) || n->killer_gid == record->gid);
    if (n->set & KVFS_SET_CONTENT && to->mode == record->mode) {
        free(to);
        return naming_copy(c, record, &n->after);
    }
    if (n->set & KVFS_SET_ATIME)
        to->atime_ns = n->atime_ns;
    if (n->set & KVFS_SET_MTIME)
        to->mtime_ns = n->mtime_ns;
    r = change_record(c, to, rights || n->set & KVFS_SET_MTIME, rights, false);
    if (r == 0 && n->set & KVFS_SET_MTIME)
        kvfs_file_set_mtime(c->plane, n->inode, n->mtime_ns);
    return r;
}

/* Another node has set the rights of a directory later. */
static int follow(const struct change_of *c) {
    struct kvfs_naming *n = c->n;
    const struct kvfs_inode_record *record;
    struct kvfs_record theirs;
    int r = record_look(c, &record);
    if (r)
        return r;
    if (!c->plane->pod || !record_is_named(record) || naming_rights(c, record->parent, record_name(record), record->name_size, &theirs) < 0)
        return -ENOENT;
    if (theirs.version <= record->version)
        return naming_copy(c, record, &n->after);
    struct kvfs_inode_record *to = record_again(record);
    if (!to)
        return -ENOMEM;
    to->version = theirs.version;
    to->mode = theirs.mode;
    to->uid = theirs.uid;
    to->gid = theirs.gid;
    r = change_record(c, to, false, false, false);
    n->below = n->untold = r == 0;
    return r;
}

/* ---- flags ---- */

static int mark(const struct change_of *c) {
    const struct kvfs_inode_record *record;
    int r = record_look(c, &record);
    if (r)
        return r;
    const uint8_t flags = (uint8_t)((record->flags & ~c->n->off) | c->n->on);
    if (flags == record->flags)
        return naming_copy(c, record, &c->n->after);
    struct kvfs_inode_record *to = record_again(record);
    if (!to)
        return -ENOMEM;
    to->flags = flags;
    return change_record(c, to, true, false, true);
}

/* ---- extended attributes ---- */

struct attribute {
    const uint8_t *begin, *end;
    const char *key;
    uint32_t key_size;
};

/* The one that begins at `at`. False: there is none. */
static bool attribute_read(const uint8_t *at, const uint8_t *end, struct attribute *out) {
    uint16_t key_size;
    uint32_t value_size;
    if (end - at < (int64_t)ATTRIBUTE_HEAD)
        return false;
    memcpy(&key_size, at, sizeof(key_size));
    memcpy(&value_size, at + 2, sizeof(value_size));
    if ((uint64_t)(end - at) - ATTRIBUTE_HEAD < (uint64_t)key_size + value_size)
        return false;
    *out = (struct attribute){at, at + ATTRIBUTE_HEAD + key_size + value_size, (const char *)at + ATTRIBUTE_HEAD, key_size};
    return true;
}

static uint8_t *attribute_write(uint8_t *to, const struct kvfs_naming *n) {
    const uint16_t key_size = (uint16_t)n->key_size;
    memcpy(to, &key_size, sizeof(key_size));
    memcpy(to + 2, &n->data_size, sizeof(n->data_size));
    memcpy(to + ATTRIBUTE_HEAD, n->key, n->key_size);
    copy_bytes(to + ATTRIBUTE_HEAD + n->key_size, n->data, n->data_size);
    return to + ATTRIBUTE_HEAD + n->key_size + n->data_size;
}

/* A value takes the place of the one before. A record from a device may have a key twice, which kvfs does not write: one is left. */
static int set_attribute(const struct change_of *c) {
    const struct kvfs_naming *n = c->n;
    const struct kvfs_inode_record *record;
    const bool removes = n->kind == KVFS_NAMING_UNSET;
    int r = record_look(c, &record);
    if (r)
        return r;
    const uint64_t extents = record->extent_count * sizeof(struct kvfs_extent);
    const uint8_t *at = (const uint8_t *)record_extents(record) + extents, *end = at + record->xattr_size;
    const uint64_t size = ATTRIBUTE_HEAD + (uint64_t)n->key_size + n->data_size;
    if (n->key_size > KVFS_NAME_MAX || n->data_size > ATTRIBUTES_MAX)
        return removes ? -ENODATA : -ENOSPC;
    uint8_t *rest = malloc(extents + record->xattr_size + size);
    if (!rest)
        return -ENOMEM;
    copy_bytes(rest, record_extents(record), extents);
    uint8_t *to = rest + extents;
    bool found = false;
    for (struct attribute one; attribute_read(at, end, &one); at = one.end) {
        const bool same = one.key_size == n->key_size && memcmp(one.key, n->key, n->key_size) == 0;
        if (same && !removes && !found) {
            to = attribute_write(to, n);
        } else if (!same) {
            memcpy(to, one.begin, (size_t)(one.end - one.begin));
            to += one.end - one.begin;
        }
        found |= same;
    }
    if (!found && !removes)
        to = attribute_write(to, n);
    struct kvfs_inode_record head = *record, *changed;
    head.xattr_size = (uint32_t)((uint64_t)(to - rest) - extents);
    if (removes && (!found || (n->key_size == sizeof(LINK_KEY) - 1 && memcmp(n->key, LINK_KEY, n->key_size) == 0)))
        r = -ENODATA;
    else if (!removes && head.xattr_size > ATTRIBUTES_MAX)
        r = -ENOSPC;
    else if (!(changed = record_build(&head, record->parent, record_name(record), record->name_size, rest, (uint64_t)(to - rest))))
        r = -ENOMEM;
    else
        r = change_record(c, changed, true, false, false);
    free(rest);
    return r;
}

int naming_attributes(const struct change_of *c) {
    switch (c->n->kind) {
    case KVFS_NAMING_SET: return set(c);
    case KVFS_NAMING_FOLLOW: return follow(c);
    case KVFS_NAMING_MARK: return mark(c);
    default: return set_attribute(c);
    }
}
