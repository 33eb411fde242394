/* What makes names: CREATE, MKDIR, SYMLINK, copies of other nodes' blocks, and their directories as they are looked up. Each is one step (I4), in the order
 * of naming.c. It looks at everything, takes the memory, then changes the table, which can refuse, then the names (I11). */
#include "content/naming.h"

#include <sys/stat.h>

#define TARGET_SIZE_MAX 4095u /* readlink(2) gives at most a page */

/* Takes the record over. `links`: of the directory. -errno: nothing has changed. */
static int make(const struct change_of *c, struct kvfs_inode_record *record, int links, int64_t now) {
    struct kvfs_plane *plane = c->plane;
    const uint64_t inode = record->inode, parent = record->parent;
    const bool written = record->kind == KVFS_KIND_FILE && !(record->flags & KVFS_INODE_SEALED);
    struct kvfs_inode_record *above = NULL;
    bool prepared = false, created = false;
    int r = naming_copy(c, record, &c->n->after);
    if (r == 0 && (r = names_prepare(plane->names, record)) == 0)
        prepared = true;
    if (r == 0)
        r = naming_links_prepare(c, parent, links, &above);
    if (r == 0 && written)
        created = (r = kvfs_file_create(plane, inode)) == 0;
    if (r == 0)
        r = kvfs_name_put(plane, record, 0);
    if (r < 0) {
        if (created)
            kvfs_file_discard(plane, inode);
        naming_links_unprepare(c, above);
        if (prepared)
            names_unprepare(plane->names, record);
        free(record);
        return r;
    }
    place_account(plane->names, record, 1);
    r = names_take(plane->names, record);
    assert(r == 0);
    naming_links_set(c, parent, above, now);
    c->n->inode = inode;
    return 0;
}

/* The directory in which something is made is this node's too. 0, -errno, or a need. */
static int own_parent(const struct change_of *c) {
    const struct kvfs_inode_record *directory = names_record(c->plane->names, c->n->parent);
    if (!(directory->flags & KVFS_INODE_BORROWED))
        return 0;
    return c->counts ? naming_own(c, c->n->parent) : KVFS_NEED_CALLER;
}

/* The name is free, in a directory, and `number`, if it is not 0, is nobody's. 0, -errno, or a need. */
static int check(const struct change_of *c, uint64_t number) {
    struct kvfs_naming *n = c->n;
    const struct kvfs_inode_record *holder, *there;
    if (n->name_size > KVFS_NAME_MAX)
        return -ENAMETOOLONG;
    const struct kvfs_inode_record *directory = naming_record(c, n->parent);
    there = number ? naming_record(c, number) : NULL;
    int r = naming_look_up(c, 0, &holder);
    if (r || n->inode_count)
        return r ? r : KVFS_NEED_INODES;
    if ((r = naming_directory(directory)) < 0)
        return r;
    if (holder || record_is_named(there))
        return -EEXIST;
    n->untold = names_is_untold(c->plane->names, n->parent, n->name, n->name_size);
    return n->untold && !c->counts ? KVFS_NEED_CALLER : 0;
}

/* A record without a name. */
static struct kvfs_inode_record head_of(const struct change_of *c, uint8_t kind, uint32_t mode, int64_t now) {
    const struct kvfs_naming *n = c->n;
    const struct kvfs_inode_record *directory = names_record(c->plane->names, n->parent);
    const bool handed_down = directory->mode & S_ISGID;
    return (struct kvfs_inode_record){.record_size = sizeof(struct kvfs_inode_record),
                                      .kind = kind,
                                      .mtime_ns = now,
                                      .ctime_ns = now,
                                      .atime_ns = now,
                                      .mode = mode | (handed_down && kind == KVFS_KIND_DIRECTORY ? S_ISGID : 0),
                                      .uid = n->uid,
                                      .gid = handed_down ? directory->gid : n->gid,
                                      .nlink = kind == KVFS_KIND_DIRECTORY ? 2 : 1};
}

static int make_named(const struct change_of *c, const struct kvfs_inode_record *head, const void *rest, uint64_t rest_size) {
    struct kvfs_inode_record *record = record_build(head, c->n->parent, c->n->name, c->n->name_size, rest, rest_size);
    return record ? make(c, record, head->kind == KVFS_KIND_DIRECTORY, head->mtime_ns) : -ENOMEM;
}

static int create(const struct change_of *c) {
    int r = check(c, 0);
    if (r || (r = own_parent(c)))
        return r;
    struct kvfs_inode_record head = head_of(c, KVFS_KIND_FILE, S_IFREG | (c->n->mode & 07777), time_now());
    head.inode = kvfs_names_next_inode(c->plane->names);
    head.version = kvfs_names_next_version(c->plane->names);
    return make_named(c, &head, NULL, 0);
}

static int make_link(const struct change_of *c) {
    static const char key[] = "kvfs.symlink";
    struct kvfs_naming *n = c->n;
    if (n->data_size > TARGET_SIZE_MAX)
        return -ENAMETOOLONG;
    int r = check(c, 0);
    if (r || (r = own_parent(c)))
        return r;
    struct kvfs_inode_record head = head_of(c, KVFS_KIND_SYMLINK, S_IFLNK | 0777, time_now());
    head.inode = kvfs_names_next_inode(c->plane->names);
    head.version = kvfs_names_next_version(c->plane->names);
    head.size = n->data_size;
    /* An attribute: the sizes of key and value, then both. */
    uint8_t attribute[6 + sizeof(key) + TARGET_SIZE_MAX];
    const uint16_t key_size = sizeof(key) - 1;
    memcpy(attribute, &key_size, 2);
    memcpy(attribute + 2, &n->data_size, 4);
    memcpy(attribute + 6, key, key_size);
    copy_bytes(attribute + 6 + key_size, n->data, n->data_size);
    head.xattr_size = 6u + key_size + n->data_size;
    return make_named(c, &head, attribute, head.xattr_size);
}

static uint64_t number_in_pod(const struct change_of *c) {
    return kvfs_directory_number(c->n->parent, c->n->name, c->n->name_size, c->plane->array.geometry.secret);
}

/* In a pod a directory has the same number on every node. */
static int make_directory(const struct change_of *c) {
    struct kvfs_record theirs;
    const bool in_pod = c->plane->pod && c->n->name_size <= KVFS_NAME_MAX;
    const uint64_t number = in_pod ? number_in_pod(c) : 0;
    int r = check(c, number);
    if (r)
        return r;
    if (in_pod && naming_theirs(c, &theirs) == 1)
        return -EEXIST;
    if ((r = own_parent(c)))
        return r;
    struct kvfs_inode_record head = head_of(c, KVFS_KIND_DIRECTORY, S_IFDIR | (c->n->mode & 07777), time_now());
    head.inode = number ? number : kvfs_names_next_inode(c->plane->names);
    head.version = kvfs_names_next_version(c->plane->names);
    return make_named(c, &head, NULL, 0);
}

/* The other nodes hear of it when something is made in it. */
static int borrow(const struct change_of *c) {
    struct kvfs_naming *n = c->n;
    const struct kvfs_inode_record *holder;
    struct kvfs_record theirs;
    if (!c->plane->pod || n->name_size > KVFS_NAME_MAX || naming_rights(c, n->parent, n->name, n->name_size, &theirs) < 0)
        return -ENOENT;
    int r = check(c, number_in_pod(c));
    if (r == -EEXIST) {
        r = naming_look_up(c, 0, &holder);
        assert(r == 0);
        if (!holder)
            return -EEXIST;
        n->inode = holder->inode;
        return naming_copy(c, holder, &n->after);
    }
    if (r)
        return r;
    struct kvfs_inode_record head = head_of(c, KVFS_KIND_DIRECTORY, theirs.mode, time_now());
    head.inode = number_in_pod(c);
    head.flags = KVFS_INODE_BORROWED;
    head.version = theirs.version;
    head.mode = theirs.mode;
    head.uid = theirs.uid;
    head.gid = theirs.gid;
    return make_named(c, &head, NULL, 0);
}

/* The record was checked as it came from a device. */
static int copy(const struct change_of *c) {
    struct kvfs_naming *n = c->n;
    struct kvfs_inode_record head;
    int r = check(c, 0);
    if (r || (r = naming_pins(c, n->parent)) || (r = own_parent(c)))
        return r;
    assert(n->data_size >= sizeof(head));
    memcpy(&head, n->data, sizeof(head)); /* the buffer need not be aligned */
    assert(head.record_size == n->data_size && head.flags & KVFS_INODE_SEALED);
    const uint64_t rest_at = sizeof(head) + round_up(head.name_size, 8);
    assert(rest_at <= n->data_size);
    return make_named(c, &head, (const uint8_t *)n->data + rest_at, n->data_size - rest_at);
}

static int own_inode(const struct change_of *c) {
    struct kvfs_naming *n = c->n;
    const struct kvfs_inode_record *directory = naming_record(c, n->inode);
    if (n->inode_count)
        return KVFS_NEED_INODES;
    int r = naming_directory(directory);
    if (r == 0 && directory->flags & KVFS_INODE_BORROWED)
        r = naming_own(c, n->inode);
    return r ? r : naming_copy(c, names_record(c->plane->names, n->inode), &n->after);
}

int naming_make(const struct change_of *c) {
    switch (c->n->kind) {
    case KVFS_NAMING_CREATE: return create(c);
    case KVFS_NAMING_MKDIR: return make_directory(c);
    case KVFS_NAMING_SYMLINK: return make_link(c);
    case KVFS_NAMING_COPY: return copy(c);
    case KVFS_NAMING_BORROW: return borrow(c);
    default: return own_inode(c);
    }
}
