/* sources: base block names io content pod frames fuse virtiofs plane.c */
/* The data plane's accounts: uses of blocks by their opens, shares of users, and inodes that listings make. */
#include "kernel_harness.h"

static uint32_t use_of(uint64_t inode) {
    uint32_t use;
    CHECK(kvfs_inode_uses(plane, &inode, 1, &use) == 0);
    return use;
}

static struct kvfs_user user_of(uint32_t id) {
    struct kvfs_user users[64];
    int count = kvfs_users(plane, users, 64);
    for (int i = 0; i < count; i++)
        if (users[i].id == id)
            return users[i];
    return (struct kvfs_user){0};
}

static uint64_t open_of(uint32_t id) { return user_of(id).open_bytes; }

static uint64_t writing_of(uint32_t id) { return user_of(id).writing_bytes; }

static int open_by(uint64_t inode, uint32_t id, struct node **node) {
    struct kvfs_record record;
    return node_open(plane, inode, user_get(plane, id), false, &record, node);
}

static void unopen_by(struct node *node, uint32_t id) {
    struct shard *shard = shard_of(plane, node->inode);
    pthread_mutex_lock(&shard->lock);
    node_unopen(plane, node, user_get(plane, id), false);
    pthread_mutex_unlock(&shard->lock);
    node_put(plane, node);
}

static void test_shares(void) {
    enum { GREEDY = 5000, MODEST = 5001, DAEMON = 5002, COUNT = 4, SIZE = 100000 };
    uint8_t record[512], busy[COUNT];
    uint64_t inodes[COUNT];
    char name[32];
    for (int i = 0; i < COUNT; i++) {
        inodes[i] = ++next_inode;
        sprintf(name, "share-%d", i);
        make_record(record, inodes[i], name, SIZE, KVFS_INODE_SEALED, 1, 1);
        CHECK(kvfs_name_put(plane, record, 0) == 0);
    }
    struct kvfs_statistics before, after;
    kvfs_statistics_get(plane, &before);
    kvfs_set_share(plane, 2 * SIZE, KVFS_WHOLE, DAEMON);
    struct node *greedy[COUNT], *again, *other;
    for (int i = 0; i < COUNT; i++)
        CHECK(open_by(inodes[i], GREEDY, &greedy[i]) == 0);
    CHECK(open_by(inodes[0], GREEDY, &again) == 0);
    CHECK(open_of(GREEDY) == COUNT * SIZE); /* a block counts once, however often it is open */
    CHECK(kvfs_inode_user(plane, inodes[0]) == GREEDY && kvfs_inode_user(plane, 1) == -ENOENT);
    CHECK(kvfs_inode_is_open(plane, inodes[0]) == KVFS_OPEN_BEYOND_SHARE);
    /* A user with room takes over a charge from one without. */
    CHECK(open_by(inodes[0], MODEST, &other) == 0);
    CHECK(kvfs_inode_user(plane, inodes[0]) == MODEST && open_of(MODEST) == SIZE && open_of(GREEDY) == (COUNT - 1) * SIZE);
    CHECK(kvfs_inode_is_open(plane, inodes[0]) == KVFS_OPEN);
    /* The space of writers: what may go is as good as free. */
    kvfs_set_space(plane, before.open_bytes + COUNT * SIZE, ENOSPC);
    CHECK(!space_lacks(plane, SIZE) && space_lacks(plane, SIZE + 1));
    /* One goes; then the others are within the share, and stay. */
    CHECK(kvfs_inode_evict(plane, inodes, COUNT, busy) == COUNT - 1 && busy[0] && !busy[1] && busy[2] && busy[3]);
    CHECK(open_of(GREEDY) == 2 * SIZE && kvfs_inode_is_open(plane, inodes[2]) == KVFS_OPEN);
    CHECK(open_by(inodes[1], GREEDY, &again) == -ESTALE);
    /* Pins and the like count first. */
    kvfs_user_hold(plane, GREEDY, 1);
    CHECK(kvfs_inode_is_open(plane, inodes[2]) == KVFS_OPEN_BEYOND_SHARE);
    kvfs_user_hold(plane, GREEDY, 0);
    /* The last one to have it open is charged for it. */
    unopen_by(other, MODEST);
    CHECK(kvfs_inode_user(plane, inodes[0]) == GREEDY && open_of(MODEST) == 0);
    kvfs_set_share(plane, 0, KVFS_WHOLE, DAEMON);
    CHECK(kvfs_inode_is_open(plane, inodes[2]) == KVFS_OPEN_BEYOND_SHARE);
    CHECK(open_by(inodes[2], DAEMON, &other) == 0 && kvfs_inode_is_open(plane, inodes[2]) == KVFS_OPEN);
    unopen_by(other, DAEMON);
    CHECK(open_by(inodes[3], 0, &other) == 0 && kvfs_inode_is_open(plane, inodes[3]) == KVFS_OPEN);
    unopen_by(other, 0);
    unopen_by(greedy[0], GREEDY);
    for (int i = 0; i < COUNT; i++)
        unopen_by(greedy[i], GREEDY);
    kvfs_set_share(plane, UINT64_MAX, KVFS_WHOLE, 0);
    kvfs_set_space(plane, UINT64_MAX, ENOSPC);
    CHECK(open_of(GREEDY) == 0 && open_of(0) == 0 && open_of(DAEMON) == 0);
    kvfs_statistics_get(plane, &after);
    CHECK(after.open_bytes == before.open_bytes);
    for (int i = 0; i < COUNT; i++)
        CHECK(i == 1 || kvfs_inode_remove(plane, inodes[i]) == 0);
    /* A file being written counts too, for the user who opened it first or made it grow. It is refused when a share for others would not be left. */
    kvfs_statistics_get(plane, &before);
    uint64_t written = ++next_inode;
    make_record(record, written, "share-written", 0, 0, 1, 1);
    CHECK(kvfs_name_put(plane, record, 0) == 0 && kvfs_file_create(plane, written) == 0);
    struct node *node = node_get(plane, written, false);
    CHECK(node && file_admit(plane, node, user_get(plane, GREEDY)) == 0 && kvfs_file_truncate(plane, written, SIZE) == 0);
    CHECK(writing_of(GREEDY) == SIZE && file_admit(plane, node, user_get(plane, MODEST)) == 0 && writing_of(MODEST) == 0);
    kvfs_set_share(plane, 2 * SIZE, KVFS_WHOLE, DAEMON);
    kvfs_set_space(plane, before.open_bytes + 4 * SIZE, ENOSPC);
    CHECK(kvfs_file_truncate(plane, written, 2 * SIZE) == 0); /* the share */
    CHECK(kvfs_file_truncate(plane, written, 2 * SIZE + 1) == -EDQUOT && kvfs_file_allocate(plane, written, 2 * SIZE + 1) == -EDQUOT);
    kvfs_set_space(plane, before.open_bytes + 5 * SIZE, ENOSPC);
    CHECK(kvfs_file_truncate(plane, written, 3 * SIZE) == 0 && kvfs_file_truncate(plane, written, 3 * SIZE + 1) == -EDQUOT);
    pthread_mutex_lock(&node->lock);
    file_charge(plane, node->file, user_get(plane, DAEMON)); /* a user who may hold all */
    pthread_mutex_unlock(&node->lock);
    CHECK(writing_of(GREEDY) == 0 && writing_of(DAEMON) == 3 * SIZE && kvfs_file_truncate(plane, written, 9 * SIZE) == 0);
    CHECK(kvfs_file_truncate(plane, written, 0) == 0 && writing_of(DAEMON) == 0 && kvfs_file_truncate(plane, written, SIZE) == 0);
    CHECK(kvfs_inode_remove(plane, written) == 0 && writing_of(DAEMON) == 0);
    node_put(plane, node);
    kvfs_set_share(plane, UINT64_MAX, KVFS_WHOLE, 0);
    kvfs_set_space(plane, UINT64_MAX, ENOSPC);
    kvfs_statistics_get(plane, &after);
    CHECK(after.open_bytes == before.open_bytes);
    /* More users than places: they share one, and nothing is lost. */
    inodes[0] = ++next_inode;
    make_record(record, inodes[0], "share-many", SIZE, KVFS_INODE_SEALED, 1, 1);
    CHECK(kvfs_name_put(plane, record, 0) == 0);
    for (uint32_t id = 10000; id < 10000 + 2 * USERS_MAX; id++) {
        CHECK(open_by(inodes[0], id, &other) == 0);
        unopen_by(other, id);
    }
    CHECK(user_get(plane, 4000000000u) == user_get(plane, 4000000001u) && kvfs_inode_remove(plane, inodes[0]) == 0);
    kvfs_statistics_get(plane, &after);
    CHECK(after.open_bytes == before.open_bytes);
    printf("ok beyond a user's share what is open may go, unless another has it open within the share\n");
}

static int make_directory(uint32_t user, const char *name) {
    struct fuse_mkdir_in in = {.mode = 0755};
    asking_user = user;
    ask(FUSE_MKDIR, 1, &in, sizeof(in), name, strlen(name) + 1);
    asking_user = 0;
    if (kvfs_names_ask(plane, user) == 0)
        session_reply(forwarded_request()->unique, -EEXIST, NULL, 0); /* it came to the session */
    return answer(NULL, NULL);
}

static void test_names_have_shares(void) {
    enum { GREEDY = 7000, MODEST = 7001, DAEMON = 7002, RECORDS = 100000 };
    struct fuse_create_in in = {.flags = O_RDWR | O_CREAT, .mode = 0100644};
    struct user *greedy = user_get(plane, GREEDY);
    int64_t most = 0;
    kvfs_set_share(plane, UINT64_MAX, KVFS_WHOLE / 4, DAEMON);
    /* As many directories as a user may have, and then as many files. */
    while (names_ask(plane, greedy, true) == 0)
        CHECK(++most <= RECORDS && (user_names(plane, GREEDY, 1), true));
    CHECK(most > RECORDS / 4 && most < RECORDS / 3 && user_of(GREEDY).names == (uint64_t)most); /* a third: nothing of this is in the table */
    CHECK(kvfs_names_ask(plane, GREEDY) == -EDQUOT && make_directory(GREEDY, "more") == -EDQUOT && names_ask(plane, greedy, false) == 0);
    while (names_ask(plane, greedy, false) == 0)
        user_names(plane, GREEDY, 1);
    asking_user = GREEDY;
    ask(FUSE_CREATE, 1, &in, sizeof(in), "more", 5);
    CHECK(answer(NULL, NULL) == -EDQUOT);
    ask(FUSE_SYMLINK, 1, "more\0", 5, "to", 3);
    CHECK(answer(NULL, NULL) == -EDQUOT);
    struct fuse_mknod_in node = {.mode = 0100644};
    ask(FUSE_MKNOD, 1, &node, sizeof(node), "more", 5);
    CHECK(answer(NULL, NULL) == -EDQUOT);
    asking_user = 0;
    /* Others go on, and root and the daemon's own user make all that they want. */
    CHECK(make_directory(MODEST, "a") == -EEXIST && make_directory(0, "b") == -EEXIST && make_directory(DAEMON, "c") == -EEXIST);
    user_names(plane, DAEMON, RECORDS);
    CHECK(kvfs_names_ask(plane, DAEMON) == 0);
    user_names(plane, DAEMON, -RECORDS);
    /* However many users there are, the next one finds something left. Blocks do not count, as eviction can take them. */
    user_names(plane, GREEDY, -(int)user_of(GREEDY).names);
    uint8_t record[512];
    uint64_t first = next_inode + 1, last = first + 1999;
    char name[32];
    for (next_inode = last; next_inode >= first; next_inode--) {
        sprintf(name, "kept-%llu", (unsigned long long)next_inode);
        make_record(record, next_inode, name, 0, next_inode % 2 ? KVFS_INODE_SEALED : 0, 1, 1);
        ((struct kvfs_inode_record *)(void *)record)->uid = GREEDY;
        CHECK(kvfs_name_put(plane, record, 0) == 0);
    }
    next_inode = last;
    CHECK(user_of(GREEDY).names == 1000);
    for (uint64_t inode = first; inode <= last; inode++)
        CHECK(kvfs_inode_remove(plane, inode) == 0);
    CHECK(user_of(GREEDY).names == 0);
    kvfs_set_share(plane, UINT64_MAX, KVFS_WHOLE, 0);
    user_names(plane, GREEDY, RECORDS);
    CHECK(kvfs_names_ask(plane, GREEDY) == 0); /* a share of all is none */
    user_names(plane, GREEDY, -RECORDS);
    printf("ok names that eviction cannot take have shares\n");
}

static void test_opens_are_uses(void) {
    uint64_t fh;
    uint8_t *data = pattern(10000, 8);
    kvfs_set_tick(plane, 0x1000005);
    uint64_t inode = create("used", &fh);
    CHECK(use_of(inode) == 5 << 8);
    kvfs_set_tick(plane, 6);
    CHECK(write_at(inode, fh, 0, data, 10000) == 0);
    CHECK(flush_and_seal(inode, fh, "used") == 0);
    CHECK(read_check(inode, fh, 0, 10000, data, 10000) == 0);
    release(inode, fh);
    CHECK(use_of(inode) == 5 << 8); /* neither the writer's own reads nor the seal */
    int error;
    for (uint32_t i = 1; i <= 2; i++) {
        kvfs_set_tick(plane, 10 + i);
        fh = open_read(inode, &error);
        CHECK(error == 0);
        CHECK(read_check(inode, fh, 0, 10000, data, 10000) == 0);
        CHECK(read_check(inode, fh, 0, 10000, data, 10000) == 0);
        release(inode, fh);
        CHECK(use_of(inode) == ((10 + i) << 8 | i)); /* once an open, however often it is read */
    }
    /* An open alone is no hit. It sets the time of a block that was read before: its pages may lie in the kernel's cache. */
    kvfs_set_tick(plane, 15);
    for (int i = 0; i < 5; i++) {
        fh = open_read(inode, &error);
        CHECK(error == 0 && use_of(inode) == (i ? 15 << 8 | 2 : 12 << 8 | 2));
        release(inode, fh);
        CHECK(use_of(inode) == (15 << 8 | 2));
    }
    uint64_t other_fh, unread = create("unread", &other_fh);
    CHECK(write_at(unread, other_fh, 0, data, 10000) == 0 && flush_and_seal(unread, other_fh, "unread") == 0);
    release(unread, other_fh);
    kvfs_set_tick(plane, 16);
    for (int i = 0; i < 5; i++) {
        fh = open_read(unread, &error);
        release(unread, fh);
        CHECK(error == 0 && use_of(unread) == 15 << 8); /* and does nothing for one that was not */
    }
    fh = open_read(unread, &error);
    CHECK(error == 0);
    CHECK(read_check(unread, fh, 1ull << 40, 4096, data, 10000) == 0 && read_check(unread, fh, 0, 0, data, 10000) == 0);
    CHECK(use_of(unread) == 15 << 8); /* nothing was read */
    CHECK(read_check(unread, fh, 0, 4096, data, 10000) == 0 && use_of(unread) == (16 << 8 | 1));
    release(unread, fh);
    CHECK(kvfs_inode_remove(plane, unread) == 0);
    struct kvfs_statistics before, after;
    kvfs_statistics_get(plane, &before);
    kvfs_set_tick(plane, 20);
    CHECK(kvfs_inode_touch(plane, &inode, 1, 0) == 0 && use_of(inode) == (20 << 8 | 2)); /* used, and no hit */
    kvfs_statistics_get(plane, &after);
    CHECK(memcmp(before.found_ages, after.found_ages, sizeof(before.found_ages)) == 0);
    for (int i = 0; i < 300; i++)
        CHECK(kvfs_inode_touch(plane, &inode, 1, 1) == 0);
    CHECK(use_of(inode) == (20 << 8 | 255));
    CHECK(kvfs_inode_remove(plane, inode) == 0);
    CHECK(use_of(inode) == 0);
    free(data);
    printf("ok opens are uses\n");
}

/* ---- listings: names from Python, attributes from the table ---- */

static uint64_t open_directory(void) {
    struct fuse_open_in in = {.flags = O_RDONLY};
    struct fuse_open_out out = {.fh = 1};
    ask(FUSE_OPENDIR, 1, &in, sizeof(in), NULL, 0);
    session_reply(forwarded_request()->unique, 0, &out, sizeof(out));
    void *body;
    CHECK(answer(&body, NULL) == 0);
    memcpy(&out, body, sizeof(out));
    return out.fh;
}

static void close_directory(uint64_t fh) {
    struct fuse_release_in in = {.fh = fh};
    ask(FUSE_RELEASEDIR, 1, &in, sizeof(in), NULL, 0);
    session_reply(forwarded_request()->unique, 0, NULL, 0);
    CHECK(answer(NULL, NULL) == 0);
}

struct listed {
    const char *name;
    uint64_t inode;
};

/* Ask for a listing through a handle; it comes as a call. */
static struct kvfs_call list_call(uint32_t opcode, uint64_t fh, uint64_t offset, uint32_t size) {
    struct fuse_read_in in = {.fh = fh, .offset = offset, .size = size};
    struct kvfs_call call;
    ask(opcode, 1, &in, sizeof(in), NULL, 0);
    while (kvfs_take_calls(plane, &call, 1) == 0)
        usleep(100);
    CHECK(call.opcode == opcode && call.inode == 1 && call.new_parent == (offset > 2 ? offset - 2 : 0));
    return call;
}

static int list_answer(uint64_t id, const struct listed *entries, uint32_t count, int end) {
    uint64_t inodes[2000];
    uint8_t sizes[2000];
    char names[4000];
    uint32_t used = 0;
    for (uint32_t i = 0; i < count; i++) {
        inodes[i] = entries[i].inode;
        sizes[i] = (uint8_t)strlen(entries[i].name);
        CHECK(used + sizes[i] <= sizeof(names));
        memcpy(names + used, entries[i].name, sizes[i]);
        used += sizes[i];
    }
    const struct kvfs_listed listed = {.inodes = inodes, .sizes = sizes, .text = names, .count = count, .end = (uint32_t)end};
    return kvfs_answer(plane, id, 0, 0, &listed);
}

/* List through a handle; Python brings `entries`, and there are no more. Returns the kernel's. */
static const uint8_t *list(uint32_t opcode, uint64_t fh, uint64_t offset, const struct listed *entries, uint32_t count, size_t *size) {
    struct kvfs_call call = list_call(opcode, fh, offset, 32768);
    CHECK(list_answer(call.id, entries, count, 1) == 0);
    void *body;
    CHECK(answer(&body, size) == 0);
    return body;
}

/* The next entry of a READDIRPLUS; CHECKs its name. */
static struct fuse_direntplus next_listed(const uint8_t **at, const char *name) {
    struct fuse_direntplus plus;
    uint32_t head = offsetof(struct fuse_direntplus, dirent) + offsetof(struct fuse_dirent, name);
    memcpy(&plus, *at, head);
    CHECK(plus.dirent.namelen == strlen(name) && memcmp(*at + head, name, plus.dirent.namelen) == 0);
    *at += round_up(head + plus.dirent.namelen, 8);
    return plus;
}

static uint64_t nodes_listed(uint64_t fh, uint64_t inode) {
    struct listed twenty[20];
    size_t size;
    uint64_t nodes = 0;
    for (uint32_t i = 0; i < 20; i++)
        twenty[i] = (struct listed){"listed-sealed", inode};
    const uint8_t *at = list(FUSE_READDIRPLUS, fh, 5000, twenty, 20, &size), *end = at + size;
    while (at < end)
        nodes += next_listed(&at, "listed-sealed").entry_out.nodeid != 0;
    return nodes;
}

static void test_listings(void) {
    uint64_t fh, written_fh, directory = open_directory(), began = now_ns();
    uint8_t *data = pattern(10000, 12);
    kvfs_set_tick(plane, 3);
    uint64_t sealed = create("listed-sealed", &fh), written = create("listed-written", &written_fh);
    CHECK(write_at(sealed, fh, 0, data, 10000) == 0 && flush_and_seal(sealed, fh, "listed-sealed") == 0);
    release(sealed, fh);
    CHECK(write_at(written, written_fh, 0, data, 777) == 0);
    uint32_t use = use_of(sealed);
    kvfs_set_tick(plane, 9);
    /* "listed-written" was another block when Python listed it, and "gone" is no more. */
    const struct listed entries[] = {{"gone", 4242}, {"listed-sealed", sealed}, {"listed-written", written + 1}};
    size_t size;
    const uint8_t *at = list(FUSE_READDIRPLUS, directory, 0, entries, 3, &size), *begin = at;
    struct fuse_direntplus e = next_listed(&at, ".");
    CHECK(e.entry_out.nodeid == 0 && e.dirent.ino == 1 && e.dirent.off == 1);
    e = next_listed(&at, "..");
    CHECK(e.entry_out.nodeid == 0 && e.dirent.off == 2);
    e = next_listed(&at, "listed-sealed");
    CHECK(e.entry_out.nodeid == sealed && e.entry_out.attr.ino == sealed && e.entry_out.attr.size == 10000 && e.dirent.off == sealed + 2);
    CHECK(e.entry_out.generation == 0 && e.entry_out.entry_valid == 1 && e.entry_out.attr_valid == 1);
    e = next_listed(&at, "listed-written");
    CHECK(e.entry_out.nodeid == written && e.entry_out.attr.size == 777 && e.entry_out.entry_valid == 1 && e.entry_out.attr_valid == 0);
    CHECK(e.dirent.ino == written && e.dirent.off == written + 1 + 2 && e.dirent.type == 8 && at == begin + size);
    CHECK(use_of(sealed) == use); /* seen is not used */
    list(FUSE_READDIR, directory, 0, entries, 3, &size);
    CHECK(size == 2 * 32 + 2 * 40);
    /* A listing makes so many inodes, and no more; all of them together in a minute, too. */
    uint64_t nodes = 2, total, before;
    while ((before = nodes_listed(directory, sealed)) != 0)
        nodes += before;
    CHECK(nodes == 65536);
    total = nodes;
    for (uint32_t i = 0; i < 5; i++) {
        uint64_t another = open_directory();
        for (nodes = 0; (before = nodes_listed(another, sealed)) != 0;)
            nodes += before;
        CHECK(nodes <= 65536 && (i > 0 || nodes == 65536));
        total += nodes;
        close_directory(another);
    }
    CHECK(total == 262144 || now_ns() - began > 60000000000ull);
    close_directory(directory);
    release(written, written_fh);
    CHECK(kvfs_inode_remove(plane, sealed) == 0 && kvfs_inode_remove(plane, written) == 0);
    free(data);
    printf("ok listings have attributes, make a bounded number of inodes, and are no uses\n");
}

static uint64_t calls_of(void) {
    struct kvfs_statistics now;
    kvfs_statistics_get(plane, &now);
    return now.forwarded;
}

/* Ask for a listing that a page here answers: no call. Returns the count of names; *offset is that of the last. */
static uint32_t list_here(uint64_t fh, uint64_t *offset, uint32_t size) {
    struct fuse_read_in in = {.fh = fh, .offset = *offset, .size = size};
    uint64_t before = calls_of();
    uint32_t count = 0;
    void *body;
    size_t length;
    ask(FUSE_READDIR, 1, &in, sizeof(in), NULL, 0);
    CHECK(answer(&body, &length) == 0 && calls_of() == before);
    for (const uint8_t *at = body; at < (const uint8_t *)body + length; count++) {
        struct fuse_dirent dirent;
        memcpy(&dirent, at, offsetof(struct fuse_dirent, name));
        at += round_up(offsetof(struct fuse_dirent, name) + dirent.namelen, 8);
        *offset = dirent.off;
    }
    return count;
}

static void test_pages_of_names_answer_listings(void) {
    enum { COUNT = 40 };
    static char names[COUNT][8];
    struct listed entries[COUNT];
    uint64_t directory = open_directory(), other = open_directory(), offset, fh;
    for (uint32_t i = 0; i < COUNT; i++) {
        snprintf(names[i], sizeof(names[i]), "p%02u", i);
        entries[i] = (struct listed){names[i], create(names[i], &fh)};
        release(entries[i].inode, fh);
    }
    size_t size;
    /* 2 + 8 of 32 bytes fit. The rest of the page answers the next ones, with no call. */
    struct kvfs_call call = list_call(FUSE_READDIR, directory, 0, 320);
    CHECK(call.name_size == 0 && list_answer(call.id, entries, COUNT / 2, 0) == 0 && answer(NULL, &size) == 0 && size == 320);
    offset = entries[7].inode + 2;
    CHECK(list_here(directory, &offset, 320) == 10 && offset == entries[17].inode + 2);
    CHECK(list_here(directory, &offset, 320) == 2 && offset == entries[19].inode + 2);
    /* Behind its end the next page is asked for, by the last name. */
    call = list_call(FUSE_READDIR, directory, offset, 320);
    CHECK(call.name_size == 3 && memcmp(call.name, "p19", 3) == 0);
    /* All that it brings is gone: the names behind are needed. The same call is answered by them. */
    const struct listed gone[] = {{"q1", 77001}, {"q2", 77002}};
    CHECK(list_answer(call.id, gone, 2, 0) == -EAGAIN);
    CHECK(list_answer(call.id, entries + 20, 20, 1) == 0 && answer(NULL, &size) == 0 && size == 320);
    CHECK(list_answer(call.id, entries, 20, 1) == 0); /* late, and dropped */
    /* A name that went is left out, and the place behind it is known; one that another inode has by now is listed with that one. */
    offset = entries[31].inode + 2;
    CHECK(kvfs_inode_remove(plane, entries[31].inode) == 0 && kvfs_inode_remove(plane, entries[33].inode) == 0);
    CHECK(list_here(directory, &offset, 4096) == 7 && offset == entries[39].inode + 2);
    CHECK(list_here(directory, &offset, 4096) == 0); /* the end */
    /* Another handle has another page. A listing from the beginning brings its names anew. */
    call = list_call(FUSE_READDIR, other, entries[7].inode + 2, 320);
    CHECK(call.name_size == 0 && list_answer(call.id, entries + 8, 4, 1) == 0 && answer(NULL, &size) == 0 && size == 128);
    call = list_call(FUSE_READDIR, directory, 0, 320);
    CHECK(list_answer(call.id, entries, 4, 1) == 0 && answer(NULL, &size) == 0 && size == 64 + 128);
    /* Names that come after the deadline, whose error the kernel has: nothing is left of the request. */
    struct kvfs_statistics now;
    call = list_call(FUSE_READDIR, directory, 0, 320);
    CHECK(answer(NULL, NULL) == -EIO && list_answer(call.id, entries, 4, 1) == 0);
    kvfs_statistics_get(plane, &now);
    CHECK(now.forwarded_in_flight == 0);
    call = list_call(FUSE_READDIR, directory, 0, 320);
    CHECK(list_answer(call.id, entries, 4, 1) == 0 && answer(NULL, &size) == 0 && size == 64 + 128);
    /* A page is used for a second. */
    offset = entries[1].inode + 2;
    CHECK(list_here(directory, &offset, 320) == 2);
    usleep(1100000);
    call = list_call(FUSE_READDIR, directory, entries[1].inode + 2, 320);
    CHECK(call.name_size == 3 && memcmp(call.name, "p01", 3) == 0);
    kvfs_answer(plane, call.id, -ESTALE, 0, NULL);
    CHECK(answer(NULL, NULL) == -ESTALE);
    /* Closed handles have none. More handles than there are pages: the oldest are brought again. */
    close_directory(other);
    close_directory(directory);
    uint64_t many[70];
    for (uint32_t i = 0; i < 70; i++) {
        many[i] = open_directory();
        call = list_call(FUSE_READDIR, many[i], 0, 4096);
        CHECK(list_answer(call.id, entries, 4, 1) == 0 && answer(NULL, &size) == 0 && size == 64 + 128);
    }
    offset = entries[0].inode + 2;
    CHECK(list_here(many[69], &offset, 4096) == 3);
    call = list_call(FUSE_READDIR, many[0], entries[0].inode + 2, 4096);
    CHECK(list_answer(call.id, entries + 1, 3, 1) == 0 && answer(NULL, &size) == 0 && size == 96);
    for (uint32_t i = 0; i < 70; i++)
        close_directory(many[i]);
    /* A block takes the name of another one that was not listed yet: no two entries have one offset, and none is listed twice. */
    directory = open_directory();
    call = list_call(FUSE_READDIR, directory, 0, 320);
    CHECK(list_answer(call.id, entries, 8, 1) == 0 && answer(NULL, &size) == 0 && size == 320);
    uint8_t record[1024];
    make_record(record, entries[0].inode, names[2], 0, 0, 1, 1);
    CHECK(kvfs_name_put(plane, record, entries[2].inode) == 0);
    offset = entries[1].inode + 2;
    CHECK(list_here(directory, &offset, 32) == 1 && offset == entries[2].inode + 2);
    CHECK(list_here(directory, &offset, 32) == 1 && offset == entries[3].inode + 2);
    close_directory(directory);
    for (uint32_t i = 0; i < COUNT; i++)
        if (i != 2 && i != 31 && i != 33)
            CHECK(kvfs_inode_remove(plane, entries[i].inode) == 0);
    printf("ok pages of names answer listings\n");
}

int main(void) {
    plane_begin();
    test_names_have_shares();
    test_shares();
    test_opens_are_uses();
    test_listings();
    test_pages_of_names_answer_listings();
    plane_end();
    return 0;
}
