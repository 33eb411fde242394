/* sources: base block names io content pod frames fuse virtiofs plane.c */
/* Handles that outlive their daemon: what is open for reading is open for the next one from the start. The kernel is a socketpair. */
#define _GNU_SOURCE
#include "kernel_harness.h"
#include "base/sealed_memory.h"

#define PLACES 65536u
#define RESEND (UINT64_C(1) << 63)
#define BLOCK 70000u

/* As opens.c has them. */
struct place {
    _Alignas(64) uint64_t fh;
    uint64_t inode, unique;
    uint32_t user, flags;
};
struct foreign_place {
    _Alignas(64) uint64_t inode;
    uint64_t parent, key_low, key_high, size, generation;
    uint32_t segment, page, header_pages, mode, uid, gid, extents, keyed;
    uint64_t content_inode, content_version;
};
#define SIZE (KVFS_PAGE_SIZE + PLACES * (sizeof(struct place) + sizeof(struct foreign_place)))

static int opens = -1, written = -1;

static struct place *places(void) {
    static uint8_t *memory;
    static int of = -1;
    if (of != opens) {
        memory = mmap(NULL, SIZE, PROT_READ | PROT_WRITE, MAP_SHARED, opens, 0);
        CHECK(memory != MAP_FAILED);
        of = opens;
    }
    return (struct place *)(void *)(memory + KVFS_PAGE_SIZE);
}

static struct foreign_place *foreign_places(void) { return (struct foreign_place *)(void *)(places() + PLACES); }

static uint32_t places_used(void) {
    uint32_t count = 0;
    for (uint32_t i = 0; i < PLACES; i++)
        count += __atomic_load_n(&places()[i].fh, __ATOMIC_ACQUIRE) != 0;
    return count;
}

static uint32_t foreign_used(void) {
    uint32_t count = 0;
    for (uint32_t i = 0; i < PLACES; i++)
        count += __atomic_load_n(&foreign_places()[i].inode, __ATOMIC_ACQUIRE) != 0;
    return count;
}

/* A RELEASE is answered before its block goes. */
static void wait_state(uint64_t inode, int state) {
    for (uint64_t until = now_ns() + 20000000000ull; kvfs_inode_is_open(plane, inode) != state; usleep(1000))
        CHECK(now_ns() < until);
}

static void join(void) {
    if (plane->pod)
        return;
    CHECK(kvfs_plane_join(plane, 1, 2, 1, 10000, 1 << 20, 1) == 0);
}

/* ---- daemons ---- */

static struct {
    struct kvfs_record record;
    char name[16];
} blocks[8];
static uint32_t block_count;

static void begin(bool taken) {
    int fd, pair[2], size = 8 << 20;
    CHECK(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, pair) == 0);
    for (int i = 0; i < 2; i++)
        CHECK(setsockopt(pair[i], SOL_SOCKET, SO_SNDBUFFORCE, &size, sizeof(size)) == 0);
    kernel = pair[0];
    fd = pair[1];
    CHECK(kvfs_fuse_hold(plane, written) == 0);
    CHECK(kvfs_opens_keep(plane, opens) == 0);
    if (!taken) {
        CHECK(kvfs_fuse_add(plane, fd) == 0);
        say_hello(0);
        return;
    }
    struct kvfs_held held = {
        .version = KVFS_HELD_VERSION, .minor = 45, .flags = FUSE_ASYNC_READ | FUSE_DO_READDIRPLUS, .max_read = 1 << 20, .max_write = 1 << 20};
    CHECK(kvfs_fuse_take(plane, &fd, 1, &held) == 0);
}

static void plane_again(void) {
    wait_orphans();
    kvfs_plane_destroy(plane);
    close(session);
    close(kernel);
    for (uint32_t i = 0; i < DEVICES; i++)
        close(device_fds[i]);
    start_plane(plane_directory, 1);
    for (uint32_t i = 0; i < block_count; i++)
        CHECK(kvfs_table_put(kvfs_plane_table(plane), &blocks[i].record, blocks[i].name, (uint32_t)strlen(blocks[i].name), 0) == 0);
    join();
}

/* The daemon is killed: nobody tells the list. The next one finds the blocks by its index. */
static void take_over(void) {
    plane_again();
    begin(true);
}

static uint64_t block_make(const char *name, unsigned seed) {
    uint64_t fh, inode = create_with(name, O_WRONLY | O_CREAT, &fh);
    uint8_t *data = pattern(BLOCK, seed);
    CHECK(write_at(inode, fh, 0, data, BLOCK) == 0);
    CHECK(flush_and_seal(inode, fh, name) == 0);
    release(inode, fh);
    wait_state(inode, KVFS_NOT_OPEN);
    CHECK(kvfs_table_find_inode(plane->table, inode, &blocks[block_count].record) == 0);
    strcpy(blocks[block_count++].name, name);
    free(data);
    return inode;
}

static int reads(uint64_t inode, uint64_t fh, unsigned seed) {
    uint8_t *data = pattern(BLOCK, seed);
    int r = read_check(inode, fh, 0, BLOCK, data, BLOCK);
    free(data);
    return r;
}

static void forget(uint64_t inode) {
    struct fuse_forget_in in = {.nlookup = 1};
    ask(FUSE_FORGET, inode, &in, sizeof(in), NULL, 0);
}

/* ---- own blocks ---- */

static void test_a_block_stays_open_from_the_start_to_its_release(void) {
    int error;
    uint64_t a = block_make("a", 1), b = block_make("b", 2), c = block_make("c", 3);
    uint64_t fa = open_read(a, &error), fa2 = open_read(a, &error), fb = open_read(b, &error), fc = open_read(c, &error);
    CHECK(places_used() == 4 && kvfs_inode_is_open(plane, a) == KVFS_OPEN);
    release(c, fc);
    wait_state(c, KVFS_NOT_OPEN);
    CHECK(places_used() == 3);
    for (int turn = 0; turn < 3; turn++) {
        take_over();
        CHECK(kvfs_inode_is_open(plane, a) == KVFS_OPEN && kvfs_inode_is_open(plane, b) == KVFS_OPEN);
        CHECK(kvfs_inode_is_open(plane, c) == KVFS_NOT_OPEN && places_used() == 3);
        uint64_t new = open_read(c, &error);
        CHECK(error == 0 && places_used() == 4 && new != fa &&new != fb);
        release(c, new);
        wait_state(c, KVFS_NOT_OPEN);
    }
    CHECK(reads(a, fa, 1) == 0 && reads(a, fa2, 1) == 0 && reads(b, fb, 2) == 0);
    CHECK(reads(b, fa, 2) == 0); /* another block's number: one that is sealed reads on by any */
    release(a, fa);
    CHECK(reads(a, fa2, 1) == 0 && kvfs_inode_is_open(plane, a) == KVFS_OPEN);
    release(a, fa2);
    wait_state(a, KVFS_NOT_OPEN);
    /* One that the kernel has forgotten is open no more. */
    CHECK(kvfs_inode_is_open(plane, b) == KVFS_OPEN);
    forget(b);
    wait_state(b, KVFS_NOT_OPEN);
    CHECK(places_used() == 0);
    printf("ok a block stays open from the start to its release\n");
}

static uint64_t open_as(uint64_t inode, uint64_t number) {
    struct fuse_open_in in = {.flags = O_RDONLY};
    void *body;
    unique = number - 1;
    struct fuse_in_header head = {.len = sizeof(head) + sizeof(in), .opcode = FUSE_OPEN, .unique = unique = number, .nodeid = inode};
    memcpy(message, &head, sizeof(head));
    memcpy(message + sizeof(head), &in, sizeof(in));
    CHECK(send(kernel, message, head.len, 0) == (ssize_t)head.len);
    CHECK(answer(&body, NULL) == 0);
    memcpy(&opened, body, sizeof(opened));
    return opened.fh;
}

/* Killed between the count and the answer. */
static void test_an_open_that_comes_again_counts_once(void) {
    uint64_t a = blocks[0].record.inode, before = unique;
    uint64_t first = open_as(a, 5000), fh = 0;
    for (int turn = 0; turn < 2; turn++) {
        take_over();
        CHECK(places_used() == 1 && kvfs_inode_is_open(plane, a) == KVFS_OPEN);
        fh = open_as(a, 5000 | RESEND);
        CHECK(fh != first && places_used() == 1);
        first = fh;
    }
    /* One that was answered stays. */
    uint64_t other = open_as(a, 6000);
    take_over();
    open_as(a, 7000 | RESEND);
    CHECK(places_used() == 3);
    release(a, other);
    release(a, opened.fh);
    CHECK(kvfs_inode_is_open(plane, a) == KVFS_OPEN);
    release(a, fh);
    wait_state(a, KVFS_NOT_OPEN);
    CHECK(places_used() == 0);
    unique = before + 10000;
    printf("ok an open that comes again counts once\n");
}

static void test_a_list_that_lies_opens_nothing(void) {
    const uint64_t a = blocks[0].record.inode;
    int error;
    uint64_t fh = open_read(a, &error);
    uint32_t at = 0;
    while (places()[at].fh != fh)
        at++;
    const struct place good = places()[at];
    plane_again();
    for (uint32_t i = 0; i < 8; i++)
        places()[100 + i] = good, places()[100 + i].fh = good.fh >> 22 << 22 | (100 + i);
    places()[at].fh = good.fh + 1; /* not of that place */
    places()[100].inode = 0;
    places()[101].inode = 987654321; /* nobody's */
    places()[102].inode = 1;         /* a directory */
    places()[103].flags = O_RDWR;
    places()[104].inode = UINT64_C(3) << 61 | 77; /* of another node, which has no place */
    places()[105].fh = 0;                         /* torn: the rest was written, or is left */
    places()[106].user = UINT32_MAX;              /* anybody */
    struct foreign_place *f = foreign_places();
    memset(f, 0xff, 8 * sizeof(*f));
    f[1].inode = 1; /* torn */
    f[2] = (struct foreign_place){.inode = UINT64_C(3) << 61 | 5, .key_low = 1, .generation = 1, .segment = SEGMENTS, .page = 1, .header_pages = 1};
    f[3] = f[2], f[3].segment = 0, f[3].mode = 0100644, f[3].size = UINT64_C(1) << 40;
    f[4] = f[3], f[4].size = 5, f[4].page = 0;
    f[5] = f[4], f[5].page = UINT32_MAX;
    f[6] = f[4], f[6].page = 1; /* sound, and no handle has it */
    f[7] = f[6];                /* once more */
    begin(true);
    CHECK(places_used() == 2 && foreign_used() == 0);
    CHECK(kvfs_inode_is_open(plane, a) == KVFS_OPEN && plane->handles.earlier_count == 2);
    CHECK(reads(a, places()[106].fh, 1) == 0);
    release(a, places()[106].fh);
    release(a, places()[107].fh);
    wait_state(a, KVFS_NOT_OPEN);
    CHECK(places_used() == 0);
    printf("ok a list that lies opens nothing\n");
}

static void refused(int fd, int error) {
    CHECK(kvfs_opens_keep(plane, fd) == error && !plane->opens);
    close(fd);
}

static void test_lists_that_are_none_are_refused(void) {
    plane_again();
    int fd = memfd_create("test", MFD_ALLOW_SEALING);
    CHECK(fd >= 0 && ftruncate(fd, SIZE) == 0);
    CHECK(kvfs_opens_keep(plane, fd) == -EBADMSG); /* not sealed */
    CHECK(fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK) == 0);
    refused(fd, -EBADMSG); /* no header */
    fd = kvfs_opens_make();
    CHECK(fd >= 0 && sealed_size(fd) == SIZE);
    uint32_t other = 2;
    CHECK(pwrite(fd, &other, sizeof(other), 8) == sizeof(other));
    refused(fd, -EPROTONOSUPPORT);
    fd = kvfs_opens_make();
    CHECK(pwrite(fd, &other, sizeof(other), 12) == sizeof(other)); /* places */
    refused(fd, -EBADMSG);
    refused(kvfs_written_make(), -EBADMSG);
    begin(true);
    printf("ok lists that are none are refused\n");
}

/* As many as there is room for, and more. */
static void test_a_full_list(void) {
    const uint64_t a = blocks[0].record.inode;
    plane_again();
    for (uint32_t i = 0; i < PLACES; i++)
        places()[i] = (struct place){.fh = UINT64_C(9) << 22 | i, .inode = a, .unique = 2, .user = 1000};
    uint64_t from = now_ns();
    begin(true);
    printf("   %u handles in %.1f ms\n", PLACES, (double)(now_ns() - from) / 1e6);
    CHECK(plane->handles.earlier_count == PLACES);
    int error;
    uint64_t fh = open_read(a, &error);
    CHECK(error == 0 && (fh & 0x3fffff) == PLACES);
    CHECK(reads(a, fh, 1) == 0 && reads(a, UINT64_C(9) << 22 | 77, 1) == 0);
    release(a, UINT64_C(9) << 22 | 77);
    CHECK(places_used() == PLACES - 1);
    uint64_t other = open_read(a, &error);
    CHECK(error == 0 && (other & 0x3fffff) == 77 && places_used() == PLACES);
    release(a, other);
    release(a, fh);
    CHECK(kvfs_inode_is_open(plane, a) == KVFS_OPEN);
    forget(a);
    wait_state(a, KVFS_NOT_OPEN);
    CHECK(places_used() == 0);
    printf("ok a full list\n");
}

/* Writers' handles are not in the list, and readers of what they write are dropped from it. */
static void test_writers_are_not_in_the_list(void) {
    uint64_t fh, inode = create_with("w", O_WRONLY | O_CREAT, &fh);
    int error;
    CHECK(places_used() == 0);
    uint64_t reader = open_read(inode, &error);
    CHECK(error == 0 && places_used() == 1);
    take_over(); /* the table does not have it */
    CHECK(places_used() == 0 && reads(inode, reader, 1) == -EBADF);
    release(inode, reader);
    printf("ok writers are not in the list\n");
}

/* ---- blocks of another node: slot 0 has segment 0, and this one is slot 1 ---- */

/* As the other node stores it: nothing here knows of it. */
static struct kvfs_record foreign_make(uint64_t inode, const char *name, unsigned seed) {
    const uint64_t before = next_inode;
    next_inode = inode - 1;
    CHECK(block_make(name, seed) == inode);
    next_inode = before > inode ? before : inode;
    struct kvfs_record record = blocks[--block_count].record;
    CHECK(kvfs_table_remove(plane->table, inode, 0) == 0);
    return record;
}

/* The other node's news, later than what this one knows of the name. */
static void heard(const struct kvfs_record *r, const char *name, uint64_t version) {
    struct kvfs_pod_entry entry = {.version = version,
                                   .generation = r->generation,
                                   .size = r->size,
                                   .segment = r->segment,
                                   .page = r->page,
                                   .header_pages = r->header_pages,
                                   .mode = r->mode | (r->extent_count ? KVFS_POD_EXTENTS : 0),
                                   .keyed = 1};
    foreign_key(&plane->array.geometry, 1, name, (uint32_t)strlen(name), &entry.key_low, &entry.key_high);
    CHECK(kvfs_pod_put(plane->pod, &entry) == 0);
}

static uint64_t lookup(const char *name) {
    void *body;
    ask(FUSE_LOOKUP, 1, name, strlen(name) + 1, NULL, 0);
    CHECK(answer(&body, NULL) == 0);
    struct fuse_entry_out entry;
    memcpy(&entry, body, sizeof(entry));
    CHECK(is_foreign(entry.nodeid));
    return entry.nodeid;
}

static const struct foreign_place *foreign_place_of(uint64_t inode) {
    for (uint32_t i = 0; i < PLACES; i++)
        if (__atomic_load_n(&foreign_places()[i].inode, __ATOMIC_ACQUIRE) == inode)
            return &foreign_places()[i];
    return NULL;
}

static void test_a_block_of_another_node_reads_on(void) {
    int error;
    void *body;
    forget_blocks();
    const struct kvfs_record x = foreign_make(5000, "x", 7);
    heard(&x, "x", 6000);
    const uint64_t id = lookup("x");
    uint64_t unread = open_read(id, &error), fh;
    CHECK(error == 0 && places_used() == 1 && foreign_used() == 1 && foreign_place_of(id)->content_inode == 0);
    for (int turn = 0; turn < 2; turn++) { /* unread, and read: nobody has told of it */
        take_over();
        struct fuse_getattr_in get = {0};
        ask(FUSE_GETATTR, id, &get, sizeof(get), NULL, 0);
        CHECK(answer(&body, NULL) == 0 && ((struct fuse_attr_out *)body)->attr.size == BLOCK);
        fh = open_read(id, &error); /* by /proc, say: without a look-up */
        CHECK(error == 0 && !!(opened.open_flags & OPEN_KEEP_CACHE) == turn);
        release(id, fh);
        CHECK(reads(id, unread, 7) == 0);
        CHECK(foreign_place_of(id)->content_inode == 5000 && foreign_place_of(id)->content_version == 5000);
    }
    /* Its owner moves it, and writes over the old place. */
    const struct kvfs_record moved = foreign_make(5000, "x", 7);
    forget_blocks();
    foreign_make(5001, "other", 8);
    next_page = moved.page + 200;
    take_over();
    CHECK(reads(id, unread, 7) == -EIO); /* after all its time: no news have come */
    usleep(600000);                      /* a later read inherits no deadline */
    struct fuse_read_in in = {.fh = unread, .size = BLOCK};
    ask(FUSE_READ, id, &in, sizeof(in), NULL, 0);
    usleep(20000);
    CHECK(nothing_answered());
    heard(&moved, "x", 6000);
    size_t length;
    uint8_t *data = pattern(BLOCK, 7);
    CHECK(answer(&body, &length) == 0 && length == BLOCK && memcmp(body, data, BLOCK) == 0);
    free(data);
    CHECK(foreign_used() == 1 && foreign_place_of(id)->page == moved.page && foreign_place_of(id)->content_inode == 5000);
    take_over();
    CHECK(reads(id, unread, 7) == 0); /* without news: the list has the new place */
    /* It goes, and another block has the name. */
    uint32_t page = (uint32_t)next_page;
    next_page = moved.page;
    foreign_make(5002, "another", 9);
    next_page = page;
    const struct kvfs_record newer = foreign_make(5003, "x", 10);
    take_over();
    heard(&newer, "x", 6003);
    CHECK(newer.size == moved.size && reads(id, unread, 10) == -EIO);
    uint64_t new_id = lookup("x");
    CHECK(new_id != id);
    fh = open_read(new_id, &error);
    CHECK(error == 0 && reads(new_id, fh, 10) == 0 && foreign_used() == 2);
    release(new_id, fh);
    release(id, unread);
    for (uint64_t until = now_ns() + 20000000000ull; foreign_used(); usleep(1000))
        CHECK(now_ns() < until);
    CHECK(places_used() == 0);
    printf("ok a block of another node reads on\n");
}

int main(void) {
    slowness();
    snprintf(plane_directory, sizeof(plane_directory), "%.32s/kvfs-plane-XXXXXX", scratch());
    CHECK(mkdtemp(plane_directory));
    start_plane(plane_directory, 1);
    join();
    CHECK((written = kvfs_written_make()) >= 0 && (opens = kvfs_opens_make()) >= 0);
    begin(false);
    test_a_block_stays_open_from_the_start_to_its_release();
    test_an_open_that_comes_again_counts_once();
    test_a_list_that_lies_opens_nothing();
    test_lists_that_are_none_are_refused();
    test_a_full_list();
    test_writers_are_not_in_the_list();
    test_a_block_of_another_node_reads_on();
    plane_end();
    close(opens);
    close(written);
    return 0;
}
