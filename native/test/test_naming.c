/* sources: base block names io content pod fuse virtiofs plane.c */
/* Changes of names and records: what they lack is said and brought, as Python does it, with nothing in memory. And where memory ends nothing has
 * changed. */
#include "kernel_harness.h"

#include "kvfs_naming.h"
#include "names/names_state.h"

#define SEGMENT 2u
#define END_PAGE 4096u
#define ALL 40u
#define TOP 60u

static struct kvfs_names *names;
static struct kvfs_place *places;
static int allocations_left = -1; /* then memory ends; -1: it does not */
static bool fails_once;           /* then the next allocation but one has memory again */
static bool has_failed;
static __thread bool may_fail;

void *__real_malloc(size_t size);
void *__real_calloc(size_t count, size_t size);
void *__real_realloc(void *old, size_t size);
void *__wrap_malloc(size_t size);
void *__wrap_calloc(size_t count, size_t size);
void *__wrap_realloc(void *old, size_t size);
static bool memory_out(void) {
    if (!may_fail || allocations_left < 0 || (has_failed && fails_once))
        return false;
    if (allocations_left) {
        allocations_left--;
        return false;
    }
    return has_failed = true;
}
void *__wrap_malloc(size_t size) { return memory_out() ? NULL : __real_malloc(size); }
void *__wrap_calloc(size_t count, size_t size) { return memory_out() ? NULL : __real_calloc(count, size); }
void *__wrap_realloc(void *old, size_t size) { return memory_out() ? NULL : __real_realloc(old, size); }

/* The index: records by inode, as the last commit has them. */
static uint8_t stored[ALL][512];
static bool reads_alone; /* no thread has a step while it is read */

static struct kvfs_inode_record stored_head(uint32_t at) {
    struct kvfs_inode_record head;
    memcpy(&head, stored[at], sizeof(head));
    return head;
}

static int stored_at(uint64_t inode) {
    for (int i = 0; i < (int)ALL; i++)
        if (inode && stored_head((uint32_t)i).inode == inode)
            return i;
    return -1;
}

static int stored_name(uint64_t parent, const char *name, uint32_t size) {
    for (int i = 0; i < (int)ALL; i++) {
        struct kvfs_inode_record head = stored_head((uint32_t)i);
        if (head.inode && head.parent == parent && head.name_size == size && memcmp(stored[i] + sizeof(head), name, size) == 0)
            return i;
    }
    return -1;
}

static void commit(bool forget) {
    uint64_t size;
    const uint8_t *at = kvfs_names_commit_begin(names, &size), *end = at + size;
    CHECK(at);
    for (struct kvfs_change change; at < end; at += sizeof(change) + change.record_size) {
        memcpy(&change, at, sizeof(change));
        int i = stored_at(change.inode);
        if (i >= 0)
            memset(stored[i], 0, sizeof(stored[i]));
        for (i = 0; change.record_size && stored_head((uint32_t)i).inode; i++)
            CHECK(i + 1 < (int)ALL);
        CHECK(change.record_size <= sizeof(stored[0]));
        if (change.record_size)
            memcpy(stored[i], at + sizeof(change), change.record_size);
    }
    kvfs_names_commit_end(names, 1);
    if (forget)
        kvfs_names_forget(names);
}

static void *lock_try(void *argument) {
    (void)argument;
    reads_alone = names_try(names);
    if (reads_alone)
        kvfs_names_end(names);
    return NULL;
}

static void load(uint64_t inode) {
    int i = stored_at(inode);
    if (i >= 0)
        CHECK(kvfs_names_load(names, stored[i], stored_head((uint32_t)i).record_size) == 0);
}

/* As kvfs/store/bringing.py. */
static void bring(struct kvfs_naming *n, int need) {
    const uint64_t inode = n->inodes[0];
    bool empty = true;
    uint64_t gone[1];
    switch (need) {
    case KVFS_NEED_INODES:
        for (uint32_t i = 0; i < n->inode_count; i++) {
            load(n->inodes[i]);
            if (kvfs_names_absent(names, &n->inodes[i], 1, gone))
                n->gone[n->gone_count++] = n->inodes[i];
        }
        return;
    case KVFS_NEED_NAME: {
        const char *name = n->which ? n->new_name : n->name;
        uint32_t size = n->which ? n->new_name_size : n->name_size;
        uint64_t parent = n->which ? n->new_parent : n->parent, found;
        int i = stored_name(parent, name, size);
        if (i >= 0)
            load(stored_head((uint32_t)i).inode);
        if (!kvfs_names_find(names, parent, name, size, &found))
            n->known |= KVFS_KNOWN_FREE << n->which;
        return;
    }
    case KVFS_NEED_ABOVE:
        for (uint64_t at = inode; at != 1;) {
            uint8_t out[512];
            struct kvfs_inode_record head;
            load(at);
            CHECK(kvfs_names_get(names, at, out, sizeof(out)) > 0);
            memcpy(&head, out, sizeof(head));
            at = head.parent;
        }
        load(1);
        return;
    case KVFS_NEED_EMPTY:
        for (uint32_t i = 0; i < ALL; i++) {
            struct kvfs_inode_record head = stored_head(i);
            uint64_t found;
            if (head.inode && head.inode != 1 && head.parent == inode)
                empty &= kvfs_names_find(names, inode, (char *)stored[i] + sizeof(head), head.name_size, &found) && !found;
        }
        *(empty ? &n->empty : &n->full) = inode;
        return;
    default: CHECK(!"a need that nothing here has");
    }
}

static struct kvfs_inode_record made; /* by the last change_with() */

static int change_with(struct kvfs_naming n, bool fails, uint32_t *rounds) {
    n.name_size = n.name ? (uint32_t)strlen(n.name) : 0;
    n.new_name_size = n.new_name ? (uint32_t)strlen(n.new_name) : 0;
    int r = KVFS_NEED_INODES;
    for (*rounds = 0; r > 0 && *rounds < KVFS_NAMING_TRIES; ++*rounds) {
        may_fail = fails;
        r = kvfs_naming(plane, &n);
        may_fail = false;
        CHECK(r == 0 || (!n.removed && !n.before && !n.after));
        if (r > 0) {
            pthread_t other;
            CHECK(pthread_create(&other, NULL, lock_try, NULL) == 0 && pthread_join(other, NULL) == 0);
            CHECK(reads_alone);
            bring(&n, r);
        }
    }
    memset(&made, 0, sizeof(made));
    if (n.after)
        memcpy(&made, n.after, sizeof(made));
    kvfs_naming_end(plane, &n);
    return r;
}

/* As a thread of C, which may leave it to Python. */
static int change_here(struct kvfs_naming n) {
    may_fail = true;
    struct kvfs_record record;
    int r = n.kind == KVFS_NAMING_RENAME   ? name_rename(plane, n.parent, n.name, n.new_parent, n.new_name, n.flags)
            : n.kind == KVFS_NAMING_UNLINK ? name_unlink(plane, n.parent, n.name)
            : n.kind == KVFS_NAMING_CREATE ? name_create(plane, n.parent, n.name, n.mode, n.uid, n.gid, &record)
                                           : (int)KVFS_NEED_CALLER;
    may_fail = false;
    return r;
}

static int change(struct kvfs_naming n) {
    uint32_t rounds;
    return change_with(n, false, &rounds);
}

static struct kvfs_naming renames(uint64_t parent, const char *name, uint64_t new_parent, const char *new_name) {
    return (struct kvfs_naming){.kind = KVFS_NAMING_RENAME, .parent = parent, .name = name, .new_parent = new_parent, .new_name = new_name};
}
static struct kvfs_naming unlinks(uint64_t parent, const char *name) {
    return (struct kvfs_naming){.kind = KVFS_NAMING_UNLINK, .parent = parent, .name = name};
}
static struct kvfs_naming rmdirs(uint64_t parent, const char *name) {
    return (struct kvfs_naming){.kind = KVFS_NAMING_RMDIR, .parent = parent, .name = name};
}

static struct kvfs_naming makes(uint32_t kind, uint64_t parent, const char *name) {
    return (struct kvfs_naming){
        .kind = kind, .parent = parent, .name = name, .mode = 0640, .uid = 7, .gid = 8, .data = "where it leads", .data_size = 14};
}
static struct kvfs_naming sets(uint64_t inode, uint32_t set) {
    return (struct kvfs_naming){.kind = KVFS_NAMING_SET,
                                .inode = inode,
                                .set = set,
                                .mode = 0604,
                                .uid = 3,
                                .gid = 4,
                                .size = 99,
                                .atime_ns = 5,
                                .mtime_ns = 6,
                                .killer_gid = 9};
}
static struct kvfs_naming attributes(uint32_t kind, uint64_t inode, const char *key, const char *value) {
    return (struct kvfs_naming){
        .kind = kind, .inode = inode, .key = key, .key_size = (uint32_t)strlen(key), .data = value, .data_size = (uint32_t)strlen(value)};
}

/* A sealed block of two pages; without `sealed` a file that nothing was written of. */
static void file_put(uint64_t inode, uint64_t parent, const char *name, bool sealed) {
    struct {
        struct kvfs_inode_record record;
        char name[16];
    } block = {.record = {.inode = inode, .parent = parent, .kind = KVFS_KIND_FILE, .mode = 0100644, .nlink = 1}};
    block.record.flags = sealed ? KVFS_INODE_SEALED : 0;
    block.record.size = sealed ? 4096 : 0;
    block.record.segment = sealed ? SEGMENT : 0;
    block.record.header_pages = sealed;
    block.record.name_size = (uint16_t)sprintf(block.name, "%s", name);
    block.record.record_size = (uint32_t)(sizeof(block.record) + round_up(block.record.name_size, 8));
    kvfs_names_begin(names);
    block.record.version = kvfs_names_next_version(names);
    CHECK(kvfs_name_put(plane, &block, 0) == 0 && kvfs_names_put(names, &block, 0) == 0);
    if (sealed)
        place_account(names, &block.record, 1);
    kvfs_names_end(names);
}

/* Where a name leads, in names and block table alike; 0: nowhere. */
static uint64_t leads(uint64_t parent, const char *name) {
    uint64_t inode = 0;
    struct kvfs_record there;
    uint32_t size = (uint32_t)strlen(name);
    int r = kvfs_table_find_name(plane->table, parent, name, size, &there);
    CHECK(r == 0 || r == -ENOENT);
    if (kvfs_names_find(names, parent, name, size, &inode))
        CHECK(inode == (r == 0 ? there.inode : 0));
    return r == 0 ? there.inode : 0;
}

static struct kvfs_inode_record head_of(uint64_t inode) {
    uint8_t out[512];
    struct kvfs_inode_record head = {0};
    load(inode);
    if (kvfs_names_get(names, inode, out, sizeof(out)) > 0)
        memcpy(&head, out, sizeof(head));
    return head;
}

static void begin_tree(void) {
    directory_put(1, 1, "");
    directory_put(TOP, 1, "top");
    directory_put(61, TOP, "a");
    directory_put(62, TOP, "b");
    directory_put(63, 61, "deep");
    directory_put(64, 62, "empty");
    for (uint32_t i = 0; i < 4; i++) {
        char name[8];
        sprintf(name, "%u", i);
        file_put(70 + i, 63, name, true);
        file_put(80 + i, 62, name, true);
    }
}

/* What has a name that this test has not given a number. */
static uint32_t made_list(uint64_t out[ALL]) {
    static struct kvfs_name listed[ALL];
    uint32_t count = 0;
    for (uint64_t parent = TOP; parent < 70; parent++) {
        int some = kvfs_names_list(names, parent, "", 0, listed, ALL);
        for (int i = 0; i < some; i++)
            if (listed[i].inode >= 90)
                out[count++] = listed[i].inode;
    }
    return count;
}

static void inode_end(uint64_t inode) {
    load(inode);
    if (kvfs_names_get(names, inode, NULL, 0) > 0) {
        kvfs_inode_remove(plane, inode);
        CHECK(kvfs_names_remove(names, inode) == 0);
    }
}

static void end_tree(void) {
    uint64_t all[ALL];
    for (uint32_t count = made_list(all); count--;)
        inode_end(all[count]);
    for (uint64_t inode = TOP; inode < 90; inode++)
        inode_end(inode);
    commit(false);
    places[SEGMENT].live_pages = 0;
    static struct kvfs_event events[4096];
    while (kvfs_take_events(plane, events, 4096))
        ;
}

static void test_what_is_lacked_is_brought(void) {
    begin_tree();
    kvfs_names_limit(names, 0, 0);
    commit(true);
    uint32_t rounds;
    CHECK(change_with(renames(63, "0", 62, "0"), false, &rounds) == 0 && rounds == 2);
    CHECK(leads(62, "0") == 70 && leads(63, "0") == 0 && head_of(70).parent == 62 && head_of(70).version > head_of(71).version);
    CHECK(head_of(80).flags & KVFS_INODE_NAMELESS && places[SEGMENT].live_pages == 16);
    commit(true);
    CHECK(change(unlinks(63, "1")) == 0 && leads(63, "1") == 0 && places[SEGMENT].live_pages == 14);
    CHECK(change(unlinks(63, "1")) == -ENOENT); /* the index has it still */
    load(71);
    CHECK(change(unlinks(63, "1")) == -ENOENT && head_of(71).inode == 0);
    commit(true);
    CHECK(change(rmdirs(61, "deep")) == -ENOTEMPTY && change(unlinks(61, "deep")) == -EISDIR && change(rmdirs(62, "1")) == -ENOTDIR);
    commit(true);
    CHECK(change(renames(TOP, "a", 63, "loop")) == -EINVAL && change(renames(TOP, "a", 61, "loop")) == -EINVAL);
    CHECK(change(renames(61, "deep", TOP, "b")) == -ENOTEMPTY && change(renames(62, "1", 62, "empty")) == -EISDIR);
    CHECK(change(renames(61, "deep", 62, "1")) == -ENOTDIR && change(renames(62, "1", 81, "x")) == -ENOTDIR);
    CHECK(change(renames(62, "1", 999, "x")) == -ENOENT && change(renames(999, "1", 62, "x")) == -ENOENT);
    uint32_t links[2] = {head_of(61).nlink, head_of(62).nlink};
    commit(true);
    CHECK(change_with(renames(61, "deep", 62, "empty"), false, &rounds) == 0 && rounds <= 4);
    CHECK(leads(62, "empty") == 63 && leads(61, "deep") == 0 && head_of(64).inode == 0 && head_of(63).parent == 62);
    CHECK(head_of(61).nlink == links[0] - 1 && head_of(62).nlink == links[1]);
    commit(true);
    CHECK(change(rmdirs(TOP, "a")) == 0 && leads(TOP, "a") == 0);
    kvfs_names_limit(names, 32768, 65536);
    end_tree();
    printf("ok what a change lacks is brought\n");
}

static void test_what_is_made_needs_its_directory_alone(void) {
    begin_tree();
    kvfs_names_limit(names, 0, 0);
    commit(true);
    uint32_t rounds;
    CHECK(change_with(makes(KVFS_NAMING_CREATE, 63, "new"), false, &rounds) == 0 && rounds == 2);
    uint64_t file = leads(63, "new");
    CHECK(file == made.inode && made.kind == KVFS_KIND_FILE && made.mode == 0100640 && made.uid == 7 && made.gid == 8 && made.nlink == 1);
    CHECK(kvfs_inode_is_open(plane, file) == KVFS_BEING_WRITTEN && head_of(63).mtime_ns == made.mtime_ns);
    CHECK(change(makes(KVFS_NAMING_CREATE, 63, "new")) == -EEXIST && change(makes(KVFS_NAMING_MKDIR, 63, "new")) == -EEXIST);
    commit(true);
    CHECK(change(makes(KVFS_NAMING_SYMLINK, 63, "0")) == -EEXIST && change(makes(KVFS_NAMING_CREATE, 81, "x")) == -ENOTDIR);
    CHECK(change(makes(KVFS_NAMING_MKDIR, 999, "x")) == -ENOENT);
    CHECK(change(unlinks(63, "0")) == 0 && change(makes(KVFS_NAMING_CREATE, 63, "0")) == 0 && leads(63, "0") != 70); /* the index has 70 still */
    char long_name[KVFS_NAME_MAX + 2] = {0};
    memset(long_name, 'n', KVFS_NAME_MAX + 1);
    CHECK(change(makes(KVFS_NAMING_CREATE, 63, long_name)) == -ENAMETOOLONG);
    long_name[KVFS_NAME_MAX] = 0;
    CHECK(change(makes(KVFS_NAMING_CREATE, 63, long_name)) == 0);
    commit(true);
    uint32_t links = head_of(62).nlink;
    struct kvfs_naming of_group = {.kind = KVFS_NAMING_SET, .inode = 62, .set = KVFS_SET_MODE | KVFS_SET_GID, .mode = 02775, .gid = 50};
    CHECK(change(of_group) == 0);
    commit(true);
    CHECK(change(makes(KVFS_NAMING_MKDIR, 62, "new")) == 0 && made.mode == 042640 && made.gid == 50 && made.nlink == 2 &&
          head_of(62).nlink == links + 1);
    CHECK(change(makes(KVFS_NAMING_SYMLINK, 62, "link")) == 0 && made.mode == 0120777 && made.gid == 50 && made.size == 14 &&
          head_of(62).nlink == links + 1);
    struct kvfs_record record;
    CHECK(name_create(plane, 62, "link", 0600, 1, 1, &record) == -EEXIST && name_create(plane, 62, "by C", 0600, 1, 1, &record) == 0);
    CHECK(record.inode == leads(62, "by C") && record.mode == 0100600 && record.gid == 50);
    kvfs_names_untold(names, 62, "stale", 5);
    CHECK(name_create(plane, 62, "stale", 0600, 1, 1, &record) == KVFS_NEED_CALLER && leads(62, "stale") == 0); /* Python tells hosts */
    CHECK(change(makes(KVFS_NAMING_CREATE, 62, "stale")) == 0);
    kvfs_names_untold(names, 0, "", 0);
    kvfs_names_limit(names, 32768, 65536);
    end_tree();
    printf("ok what is made needs its directory alone\n");
}

static void test_attributes_need_their_record_alone(void) {
    begin_tree();
    file_put(75, 62, "unsealed", false);
    kvfs_names_limit(names, 0, 0);
    commit(true);
    uint32_t rounds;
    uint64_t version = head_of(81).version;
    CHECK(change_with(sets(81, KVFS_SET_MODE | KVFS_SET_ATIME), false, &rounds) == 0);
    struct kvfs_inode_record head = head_of(81);
    CHECK(head.mode == 0100604 && head.uid == 0 && head.atime_ns == 5 && head.mtime_ns == 0 && head.version > version &&
          memcmp(&head, &made, sizeof(head)) == 0);
    version = head.version;
    CHECK(change(sets(81, KVFS_SET_ATIME)) == 0 && head_of(81).version == version); /* neither header nor summary needs that */
    CHECK(change(sets(81, KVFS_SET_MTIME)) == 0 && head_of(81).mtime_ns == 6 && head_of(81).version > version);
    CHECK(change(sets(75, KVFS_SET_SIZE)) == 0 && head_of(75).size == 99 && change(sets(81, KVFS_SET_SIZE)) == 0 && head_of(81).size == 4096);
    struct kvfs_naming suid = {.kind = KVFS_NAMING_SET, .inode = 81, .set = KVFS_SET_MODE, .mode = 06745};
    CHECK(change(suid) == 0 && change(sets(81, KVFS_SET_UID)) == 0 && head_of(81).mode == 0102745 && head_of(81).uid == 3);
    CHECK(change(suid) == 0 && change(sets(81, KVFS_SET_CONTENT | KVFS_SET_KILL)) == 0 && head_of(81).mode == 0100745);
    CHECK(change(sets(999, KVFS_SET_MODE)) == -ESTALE && change(attributes(KVFS_NAMING_ATTRIBUTE, 999, "user.a", "1")) == -ESTALE);
    commit(true);
    CHECK(change(attributes(KVFS_NAMING_ATTRIBUTE, 81, "user.a", "first")) == 0 &&
          change(attributes(KVFS_NAMING_ATTRIBUTE, 81, "user.bc", "second")) == 0);
    CHECK(change(attributes(KVFS_NAMING_ATTRIBUTE, 81, "user.a", "")) == 0 && head_of(81).xattr_size == 6 + 6 + 6 + 7 + 6);
    commit(true);
    CHECK(change(attributes(KVFS_NAMING_UNSET, 81, "user.b", "")) == -ENODATA && change(attributes(KVFS_NAMING_UNSET, 81, "user.a", "")) == 0);
    CHECK(head_of(81).xattr_size == 6 + 7 + 6 && change(attributes(KVFS_NAMING_UNSET, 81, "user.a", "")) == -ENODATA);
    static char large[4097];
    memset(large, 'v', 4096 - 19 - 6 - 6);
    CHECK(change(attributes(KVFS_NAMING_ATTRIBUTE, 81, "user.l", large)) == 0);
    CHECK(change(attributes(KVFS_NAMING_ATTRIBUTE, 81, "user.m", "")) == -ENOSPC);
    memset(large, 'v', 4096);
    CHECK(change(attributes(KVFS_NAMING_ATTRIBUTE, 81, "user.l", large)) == -ENOSPC && head_of(81).xattr_size == 4096);
    CHECK(change(attributes(KVFS_NAMING_UNSET, 81, "user.l", "")) == 0 && change(attributes(KVFS_NAMING_UNSET, 81, "user.bc", "")) == 0);
    CHECK(change(makes(KVFS_NAMING_SYMLINK, 62, "link")) == 0);
    CHECK(change(attributes(KVFS_NAMING_UNSET, made.inode, "kvfs.symlink", "")) == -ENODATA);
    version = head_of(81).version;
    struct kvfs_naming pins = {.kind = KVFS_NAMING_MARK, .inode = 81, .on = KVFS_INODE_PINNED};
    CHECK(change(pins) == 0 && head_of(81).flags == (KVFS_INODE_SEALED | KVFS_INODE_PINNED) && head_of(81).version > version);
    version = head_of(81).version;
    CHECK(change(pins) == 0 && head_of(81).version == version);
    struct kvfs_naming unpins = {.kind = KVFS_NAMING_MARK, .inode = 81, .off = KVFS_INODE_PINNED};
    CHECK(change(unpins) == 0 && head_of(81).flags == KVFS_INODE_SEALED);
    CHECK(change((struct kvfs_naming){.kind = KVFS_NAMING_FOLLOW, .inode = 62}) == -ENOENT); /* this is no pod */
    kvfs_names_limit(names, 32768, 65536);
    end_tree();
    printf("ok attributes need their record alone\n");
}

/* As a device may have it: the key `k` four times, without a value. */
static void twice_put(uint64_t inode) {
    struct {
        struct kvfs_inode_record record;
        char name[8];
        uint8_t attributes[32];
    } file = {.record = head_of(inode)};
    const uint16_t key_size = 1;
    memcpy(file.name, "1", 1);
    file.record.xattr_size = 28;
    file.record.record_size = sizeof(file);
    for (uint32_t at = 0; at < 28; at += 7) {
        memcpy(file.attributes + at, &key_size, sizeof(key_size));
        file.attributes[at + 6] = 'k';
    }
    CHECK(file.record.name_size == 1 && kvfs_names_put(names, &file, 1) == 0);
}

static void test_a_key_that_a_record_has_twice_is_set_and_removed_once(void) {
    begin_tree();
    static char large[1001];
    memset(large, 'v', 1000);
    twice_put(81);
    CHECK(change(attributes(KVFS_NAMING_ATTRIBUTE, 81, "k", large)) == 0 && head_of(81).xattr_size == 6 + 1 + 1000);
    CHECK(change(attributes(KVFS_NAMING_UNSET, 81, "k", "")) == 0 && head_of(81).xattr_size == 0);
    twice_put(81);
    CHECK(change(attributes(KVFS_NAMING_ATTRIBUTE, 81, "l", large)) == 0 && head_of(81).xattr_size == 28 + 6 + 1 + 1000);
    CHECK(change(attributes(KVFS_NAMING_UNSET, 81, "k", "")) == 0 && head_of(81).xattr_size == 6 + 1 + 1000);
    CHECK(change(attributes(KVFS_NAMING_UNSET, 81, "k", "")) == -ENODATA);
    CHECK(change(attributes(KVFS_NAMING_UNSET, 81, "l", "")) == 0); /* the index's records here have less room */
    end_tree();
    printf("ok a key that a record has twice is set and removed once\n");
}

static void test_the_index_knows_where_the_table_does_not(void) {
    begin_tree();
    commit(true);
    kvfs_table_set_complete(plane->table, 0);
    CHECK(kvfs_inode_hide(plane, 72) == 0); /* a rebuild has not got to it */
    CHECK(change(renames(63, "2", 62, "free")) == 0 && head_of(72).parent == 62);
    CHECK(kvfs_inode_hide(plane, 73) == 0);
    CHECK(change(unlinks(63, "3")) == 0 && head_of(73).inode == 0 && change(unlinks(63, "3")) == -ENOENT);
    CHECK(change(unlinks(63, "none")) == -ENOENT);
    kvfs_table_set_complete(plane->table, 1);
    end_tree();
    printf("ok the index knows where the block table does not\n");
}

static void test_threads_of_c_do_files_and_leave_the_rest(void) {
    begin_tree();
    struct kvfs_event event;
    while (kvfs_take_events(plane, &event, 1))
        ;
    CHECK(name_rename(plane, 63, "0", 62, "0", 1) == -EEXIST && name_rename(plane, 63, "0", 62, "0", 2) == -EINVAL);
    CHECK(name_rename(plane, 63, "0", 62, "0", 0) == 0 && leads(62, "0") == 70);
    bool lingers = false;
    while (kvfs_take_events(plane, &event, 1))
        lingers |= event.type == KVFS_EVENT_LINGERS && event.inode == 80;
    CHECK(lingers && head_of(80).flags & KVFS_INODE_NAMELESS && head_of(80).nlink == 1);
    CHECK(name_rename(plane, 62, "1", 62, "1", 0) == 0 && name_rename(plane, 62, "1", 62, "empty", 0) == -EISDIR);
    CHECK(name_rename(plane, 61, "deep", 62, "1", 0) == -ENOTDIR && name_unlink(plane, 62, "empty") == -EISDIR);
    CHECK(name_rename(plane, 61, "deep", 62, "moved", 0) == KVFS_NEED_CALLER && leads(61, "deep") == 63); /* Python counts directories */
    kvfs_names_untold(names, 62, "stale", 5);
    CHECK(name_rename(plane, 62, "1", 62, "stale", 0) == KVFS_NEED_CALLER && leads(62, "1") == 81);
    kvfs_names_untold(names, 0, "", 0);
    CHECK(name_unlink(plane, 62, "none") == -ENOENT && name_unlink(plane, 62, "1") == 0);
    kvfs_names_begin(names);
    CHECK(name_remove(plane, 62, "empty", 5) == -EISDIR && name_remove(plane, 62, "2", 1) == 0);
    kvfs_names_end(names);
    end_tree();
    printf("ok threads of C do files and leave the rest\n");
}

/* What the inode is, but for its number if it is none of this test's. */
static size_t look_at(uint64_t inode, char *out, size_t size) {
    uint8_t record[1024];
    struct kvfs_record there;
    int64_t r = kvfs_names_get(names, inode, record, sizeof(record));
    if (r <= 0)
        return 0;
    struct kvfs_inode_record head;
    memcpy(&head, record, sizeof(head));
    int found = kvfs_table_find_inode(plane->table, inode, &there);
    char name[256] = {0};
    memcpy(name, record + sizeof(head), head.name_size);
    const struct kvfs_inode_record *older = entry_find(names, inode)->older; /* what a kill brings back */
    CHECK(head.flags & KVFS_INODE_NAMELESS || inode == 1 || leads(head.parent, name) == inode);
    if (found == 0)
        CHECK(there.mode == head.mode && there.uid == head.uid && there.gid == head.gid && there.nlink == head.nlink && there.size == head.size);
    const uint8_t *rest = record + sizeof(head) + round_up(head.name_size, 8);
    return (size_t)snprintf(out, size, "%u in %u, %s, kind %u, mode %o of %u %u, size %u, flags %u, nlink %u, in table %d %u, over %u, %.*s;",
                            inode < 90 ? (unsigned)inode : 0u, (unsigned)head.parent, name, head.kind, head.mode, head.uid, head.gid,
                            (unsigned)head.size, head.flags, head.nlink, found, found ? 0u : there.flags, older ? (unsigned)older->inode : 0u,
                            head.xattr_size > 6 ? (int)head.xattr_size - 6 : 0, (const char *)rest + 6);
}

/* All that a change can touch, as text. */
static void look(char *out, size_t size) {
    size_t at = 0;
    uint64_t all[ALL];
    for (uint64_t inode = 1; inode < 90; inode++)
        at += look_at(inode, out + at, size - at);
    for (uint32_t count = made_list(all); count--;)
        at += look_at(all[count], out + at, size - at);
    CHECK(at < size);
    snprintf(out + at, size - at, "live %u, written %u", places[SEGMENT].live_pages, (unsigned)atomic_load(&plane->count.staged_files));
}

/* The next event needs memory. */
static void events_fill(void) {
    CHECK(event_add(plane, KVFS_EVENT_IDLE, 1000, 0));
    plane->events.event_capacity = plane->events.event_count;
}

static void begin_borrowing_tree(bool borrows, bool commits) {
    begin_tree();
    file_put(75, 62, "unsealed", false);
    directory_put(65, 64, "borrowed");
    struct {
        struct kvfs_inode_record record;
        char name[8];
    } borrowed = {.record = head_of(65), .name = "borrowed"};
    borrowed.record.flags = KVFS_INODE_BORROWED;
    if (borrows)
        CHECK(kvfs_names_put(names, &borrowed, 1) == 0 && kvfs_inode_update(plane, &borrowed) == 0);
    else
        CHECK(kvfs_inode_remove(plane, 65) == 0 && kvfs_names_remove(names, 65) == 0);
    if (commits)
        commit(false);
}

/* The change with the n-th allocation failing, and with all from the n-th on, for each n, by Python's hand or by a thread of C. */
static void memory_ends_in(struct kvfs_naming asked, bool borrows, bool here, bool once) {
    static char before[16384], after[16384], done[16384];
    int left = -1;                                          /* it is not so at first, and tells what is expected */
    for (bool commits = false, more = true; more; left++) { /* names in no list, as those of clean records, and changed ones */
        begin_borrowing_tree(borrows, commits);
        look(before, sizeof(before));
        if (here)
            events_fill();
        allocations_left = left;
        fails_once = once;
        has_failed = false;
        uint32_t rounds;
        int r = here ? change_here(asked) : change_with(asked, true, &rounds);
        allocations_left = -1;
        look(after, sizeof(after));
        if (left < 0)
            memcpy(done, after, sizeof(done));
        /* A directory that became this node's own stays so. */
        if (r == 0)
            CHECK(strcmp(after, done) == 0 && strcmp(before, after) != 0);
        else
            CHECK((r == -ENOMEM && has_failed && (borrows || strcmp(before, after) == 0)) || (r > 0 && here && strcmp(before, after) == 0));
        CHECK(left < 200);
        if (left >= 0 && !has_failed) {
            CHECK(here ? r >= 0 : r == 0 && left > 0);
            more = !commits;
            commits = true;
            left = -2;
        }
        end_tree();
    }
}

static void test_where_memory_ends_nothing_has_changed(void) {
    const struct kvfs_naming asked[] = {
        unlinks(63, "0"),
        unlinks(62, "unsealed"),
        renames(63, "0", 62, "new"),
        renames(63, "0", 62, "0"),
        renames(62, "unsealed", 63, "0"),
        renames(63, "0", 62, "unsealed"),
        renames(61, "deep", 62, "deep"),
        renames(61, "deep", 61, "shallow"),
        renames(61, "deep", 62, "empty"),
        rmdirs(62, "empty"),
        {.kind = KVFS_NAMING_TAKE, .inode = 80},
        {.kind = KVFS_NAMING_DELETE, .parent = 62, .name = "1"},
        makes(KVFS_NAMING_CREATE, 62, "new"),
        makes(KVFS_NAMING_MKDIR, 62, "new"),
        makes(KVFS_NAMING_SYMLINK, 62, "new"),
        sets(70, KVFS_SET_MODE | KVFS_SET_MTIME),
        sets(62, KVFS_SET_UID),
        sets(75, KVFS_SET_SIZE),
        attributes(KVFS_NAMING_ATTRIBUTE, 70, "user.a", "value"),
        attributes(KVFS_NAMING_ATTRIBUTE, 63, "user.b", "of a directory"),
        {.kind = KVFS_NAMING_MARK, .inode = 71, .on = KVFS_INODE_PINNED},
        /* From here on with a directory that was borrowed. */
        renames(62, "3", 65, "into borrowed"),
        makes(KVFS_NAMING_CREATE, 65, "into borrowed"),
        makes(KVFS_NAMING_MKDIR, 65, "into borrowed"),
        sets(65, KVFS_SET_MODE),
        {.kind = KVFS_NAMING_OWN, .inode = 65},
    };
    const uint32_t count = sizeof(asked) / sizeof(asked[0]);
    for (uint32_t i = 0; i < count; i++)
        for (uint32_t way = 0; way < 4; way++)
            memory_ends_in(asked[i], i + 5 >= count, way & 1, way & 2);
    printf("ok where memory ends nothing has changed\n");
}

int main(void) {
    plane_begin();
    names = kvfs_plane_names(plane);
    kvfs_names_number(names, UINT64_C(3) << KVFS_COUNTER_BITS, 0);
    places = kvfs_places_make(names, SEGMENTS, END_PAGE, 1u << 20);
    CHECK(places);
    kvfs_place_head(names, SEGMENT, 9);
    kvfs_names_leave(names, KVFS_LEAVE_CLOSED, 0);
    test_what_is_lacked_is_brought();
    test_what_is_made_needs_its_directory_alone();
    test_attributes_need_their_record_alone();
    test_a_key_that_a_record_has_twice_is_set_and_removed_once();
    test_the_index_knows_where_the_table_does_not();
    test_threads_of_c_do_files_and_leave_the_rest();
    test_where_memory_ends_nothing_has_changed();
    plane_end();
    return 0;
}
