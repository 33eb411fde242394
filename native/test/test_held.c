/* sources: base block names io content pod fuse virtiofs plane.c */
/* A mount that outlives its daemon: what the next one takes, what it refuses, and what it leaves. The kernel is a socketpair. */
#define _GNU_SOURCE
#include "kernel_harness.h"

#include "kvfs_naming.h"
#include "base/sealed_memory.h"

static int kernel_end(int *other) {
    int pair[2], size = 8 << 20;
    CHECK(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, pair) == 0);
    for (int i = 0; i < 2; i++)
        CHECK(setsockopt(pair[i], SOL_SOCKET, SO_SNDBUFFORCE, &size, sizeof(size)) == 0);
    *other = pair[1];
    return pair[0];
}

/* ---- the list of inodes that are open for writing ---- */

#define PLACES 65536u

static uint64_t place_of(int fd, uint32_t at) {
    uint64_t inode;
    CHECK(pread(fd, &inode, sizeof(inode), (off_t)(KVFS_PAGE_SIZE + at * sizeof(inode))) == sizeof(inode));
    return inode;
}

static uint32_t places_used(int fd) {
    uint32_t count = 0;
    for (uint32_t i = 0; i < PLACES; i++)
        count += place_of(fd, i) != 0;
    return count;
}

#define SEALED_MARK (UINT64_C(1) << 63)

/* Of the inode's place: 1 or 0; -1: it has none. */
static int is_marked(int fd, uint64_t inode) {
    for (uint32_t i = 0; i < PLACES; i++)
        if ((place_of(fd, i) & ~SEALED_MARK) == inode)
            return (place_of(fd, i) & SEALED_MARK) != 0;
    return -1;
}

/* A RELEASE is answered before its file goes. */
static void wait_places(int fd, uint32_t count) {
    for (uint64_t until = now_ns() + 20000000000ull; places_used(fd) != count; usleep(1000))
        CHECK(now_ns() < until);
}

static void place_set(int fd, uint32_t at, uint64_t inode) {
    CHECK(pwrite(fd, &inode, sizeof(inode), (off_t)(KVFS_PAGE_SIZE + at * sizeof(inode))) == sizeof(inode));
}

static void test_lists_that_are_none_are_refused(void) {
    int fd = memfd_create("test", MFD_ALLOW_SEALING);
    CHECK(fd >= 0 && ftruncate(fd, KVFS_PAGE_SIZE + PLACES * 8) == 0);
    CHECK(kvfs_fuse_hold(plane, fd) == -EBADMSG); /* not sealed */
    CHECK(fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK) == 0);
    CHECK(kvfs_fuse_hold(plane, fd) == -EBADMSG); /* no header */
    close(fd);
    fd = memfd_create("test", MFD_ALLOW_SEALING);
    CHECK(fd >= 0 && ftruncate(fd, KVFS_PAGE_SIZE) == 0 && fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK) == 0);
    CHECK(kvfs_fuse_hold(plane, fd) == -EBADMSG); /* too small */
    close(fd);
    int made = kvfs_written_make();
    CHECK(made >= 0 && sealed_size(made) == KVFS_PAGE_SIZE + PLACES * 8);
    uint32_t version = 2;
    CHECK(pwrite(made, &version, sizeof(version), 8) == sizeof(version));
    CHECK(kvfs_fuse_hold(plane, made) == -EPROTONOSUPPORT);
    close(made);
    CHECK(kvfs_fuse_hold(plane, session) < 0); /* no memory at all */
    CHECK(!plane->written && !plane->fuse->held);
    printf("ok lists that are none are refused\n");
}

/* ---- what is taken ---- */

static struct kvfs_held good(void) {
    return (struct kvfs_held){
        .version = KVFS_HELD_VERSION, .minor = 45, .flags = FUSE_ASYNC_READ | FUSE_DO_READDIRPLUS, .max_read = 1 << 20, .max_write = 1 << 20};
}

static void test_states_that_cannot_be_are_refused(void) {
    struct kvfs_held wrong[9];
    for (unsigned i = 0; i < 9; i++)
        wrong[i] = good();
    wrong[0].version = 2;
    wrong[1].minor = 39; /* its kernel sends nothing again */
    wrong[2].minor = UINT32_MAX;
    wrong[3].max_read = 0;
    wrong[4].max_read = (4 << 20) + 4096; /* more than a request has memory for */
    wrong[5].max_write = (1 << 20) + 1;
    wrong[6].max_write = 0;
    wrong[7].reserved[4] = 1;
    for (unsigned i = 0; i < 9; i++) {
        int fds[2], other[2];
        for (int k = 0; k < 2; k++)
            other[k] = kernel_end(&fds[k]);
        int r = kvfs_fuse_take(plane, fds, i == 8 ? 0 : 2, &wrong[i]);
        CHECK(r == (i == 0 ? -EPROTONOSUPPORT : -EINVAL));
        for (int k = 0; k < 2; k++) {
            if (i == 8)
                close(fds[k]);
            char byte;
            CHECK(recv(other[k], &byte, 1, 0) == 0); /* taken over, and closed */
            close(other[k]);
        }
    }
    CHECK(transport_count() == 0);
    printf("ok states that cannot be are refused\n");
}

static void notified(int code) {
    struct fuse_out_header head;
    CHECK(recv(kernel, &head, sizeof(head), 0) == sizeof(head));
    CHECK(head.len == sizeof(head) && head.unique == 0 && head.error == code);
}

static int read_lost(uint64_t inode, const uint8_t *data, uint64_t size) {
    static uint64_t nobodys = 12345;
    return read_check(inode, nobodys += 77, 0, (uint32_t)size, data, size);
}

static void test_a_mount_is_taken(int written) {
    const uint64_t size = 70000, doubtful = next_inode + 1, sound = next_inode + 2;
    place_set(written, 9, doubtful);
    place_set(written, PLACES - 1, 77777);
    place_set(written, 20, sound | SEALED_MARK); /* its earlier writer had sealed it, and not gone */
    CHECK(kvfs_fuse_hold(plane, written) == 0);
    CHECK(places_used(written) == 2);
    int fd;
    kernel = kernel_end(&fd);
    struct kvfs_held held = good();
    CHECK(kvfs_fuse_take(plane, &fd, 1, &held) == 0);
    notified(7); /* FUSE_NOTIFY_RESEND */
    notified(8); /* FUSE_NOTIFY_INC_EPOCH */
    uint8_t *data = pattern(size, 3);
    for (int i = 0; i < 2; i++) {
        const char *name = i ? "sound" : "doubtful";
        uint64_t fh, inode = create(name, &fh);
        CHECK(inode == (i ? sound : doubtful));
        CHECK(places_used(written) == 3); /* two of earlier daemons, and this one */
        CHECK(write_at(inode, fh, 0, data, (uint32_t)size) == 0);
        CHECK(read_lost(inode, data, size) == -EBADF); /* not sealed */
        CHECK(flush_and_seal(inode, fh, name) == 0);
        CHECK(write_at(inode, fh + 1, 0, data, 10) == -EBADF);
        release(inode, fh);
        wait_places(written, 2);
    }
    int error;
    /* The kernel may have pages of the one that was being written. Of the other it has none but of what is sealed. */
    CHECK(read_lost(sound, data, size) == 0);
    CHECK(read_lost(doubtful, data, size) == -EBADF);
    uint64_t fh = open_read(sound, &error);
    CHECK(error == 0 && opened.open_flags & OPEN_KEEP_CACHE);
    CHECK(read_check(sound, fh, 0, (uint32_t)size, data, size) == 0);
    release(sound, fh);
    fh = open_read(doubtful, &error);
    CHECK(error == 0 && !(opened.open_flags & OPEN_KEEP_CACHE));
    CHECK(read_check(doubtful, fh, 0, (uint32_t)size, data, size) == 0);
    release(doubtful, fh);
    /* A block that is being written again is in the list for as long as it has a writer. */
    fh = open_write(sound, O_RDWR);
    CHECK(places_used(written) == 3);
    CHECK(write_at(sound, fh, 10, data, 100) == 0);
    uint8_t *model = pattern(size, 3);
    memcpy(model + 10, data, 100);
    CHECK(flush_and_seal(sound, fh, "sound") == 0);
    CHECK(places_used(written) == 3);
    release(sound, fh);
    wait_places(written, 2);
    CHECK(read_lost(sound, model, size) == 0);
    int fds[KVFS_HELD_DESCRIPTORS_MAX];
    struct kvfs_held again;
    CHECK(kvfs_fuse_held(plane, fds, 0, &again) == -ENOSPC);
    CHECK(kvfs_fuse_held(plane, fds, KVFS_HELD_DESCRIPTORS_MAX, &again) == 1 && fds[0] == fd);
    CHECK(memcmp(&again, &held, sizeof(held)) == 0);
    free(data);
    free(model);
    printf("ok a mount is taken, with what its kernel has of earlier daemons\n");
}

/* Its content is sealed and its writer's RELEASE still to come: the next daemon reads it on. */
static void test_what_is_sealed_is_marked_until_it_changes(int written) {
    uint8_t *data = pattern(5000, 6);
    uint64_t fh, inode = create_with("marked", O_WRONLY | O_CREAT, &fh);
    CHECK(is_marked(written, inode) == 0);
    CHECK(write_at(inode, fh, 0, data, 5000) == 0);
    CHECK(is_marked(written, inode) == 0);
    for (int turn = 0; turn < 2; turn++) {
        CHECK(flush_and_seal(inode, fh, "marked") == 0);
        CHECK(is_marked(written, inode) == 1);
        CHECK(write_at(inode, fh, 100, data, 100) == 0);
        CHECK(is_marked(written, inode) == 0);
    }
    CHECK(flush_and_seal(inode, fh, "marked") == 0);
    CHECK(is_marked(written, inode) == 1);
    /* It might write by a mapping, which tells nobody in time. */
    uint64_t other = open_write(inode, O_RDWR);
    CHECK(is_marked(written, inode) == 0);
    CHECK(write_at(inode, other, 0, data, 10) == 0);
    CHECK(flush_and_seal(inode, other, "marked") == 0);
    CHECK(is_marked(written, inode) == 0);
    release(inode, other);
    CHECK(write_at(inode, fh, 0, data, 10) == 0);
    CHECK(flush_and_seal(inode, fh, "marked") == 0);
    release(inode, fh);
    wait_places(written, 2);
    free(data);
    printf("ok what is sealed and has a writer is marked until it changes\n");
}

static void test_a_full_list_refuses_writers(int written) {
    uint64_t fh, inode = create("full", &fh);
    CHECK(flush_and_seal(inode, fh, "full") == 0);
    release(inode, fh);
    wait_places(written, 2);
    uint8_t *before = malloc(PLACES * 8), *all = malloc(PLACES * 8);
    CHECK(before && all && pread(written, before, PLACES * 8, KVFS_PAGE_SIZE) == PLACES * 8);
    memset(all, 1, PLACES * 8);
    CHECK(pwrite(written, all, PLACES * 8, KVFS_PAGE_SIZE) == PLACES * 8);
    CHECK(kvfs_file_rewrite(plane, 8, inode, 0) == -ENFILE || completion() == -ENFILE);
    CHECK(kvfs_file_create(plane, 999999) == -ENFILE);
    directory_put(1, 1, "");
    struct kvfs_naming makes = {.kind = KVFS_NAMING_CREATE, .parent = 1, .name = "none", .name_size = 4};
    struct kvfs_record record;
    CHECK(kvfs_naming(plane, &makes) == -ENFILE && kvfs_table_find_name(plane->table, 1, "none", 4, &record) == -ENOENT);
    kvfs_naming_end(plane, &makes);
    CHECK(pwrite(written, before, PLACES * 8, KVFS_PAGE_SIZE) == PLACES * 8);
    fh = open_write(inode, O_RDWR); /* there is room again */
    release(inode, fh);
    wait_places(written, 2);
    free(before);
    free(all);
    printf("ok a full list refuses writers\n");
}

/* Requests under way are answered. Later ones wait in the kernel for the next daemon. */
static void test_a_mount_is_left(int written) {
    uint64_t fh, inode = create("left", &fh);
    uint8_t *data = pattern(5000, 4);
    CHECK(write_at(inode, fh, 0, data, 5000) == 0);
    ask(FUSE_UNLINK, 1, "none", 5, NULL, 0);
    uint64_t under_way = unique;
    struct kvfs_call call = forwarded_call(FUSE_UNLINK);
    kvfs_fuse_leave(plane, 20000 * slowness());
    ask(FUSE_GETATTR, inode, data, sizeof(struct fuse_getattr_in), NULL, 0);
    usleep(50000);
    CHECK(transport_count() == 1); /* it waits for the answer */
    kvfs_answer(plane, call.id, -ENOENT, 0, NULL);
    CHECK(answer_of(under_way) == -ENOENT);
    uint64_t until = now_ns() + 20000000000ull;
    while (transport_count()) {
        CHECK(now_ns() < until);
        usleep(1000);
    }
    char byte;
    CHECK(recv(kernel, &byte, 1, MSG_DONTWAIT) < 0 && errno == EAGAIN); /* no answer to the other */
    CHECK(places_used(written) == 3);                                   /* its pages may be those of no block */
    free(data);
    printf("ok a mount is left with what the kernel has not sent\n");
}

int main(void) {
    slowness();
    snprintf(plane_directory, sizeof(plane_directory), "%.32s/kvfs-plane-XXXXXX", scratch());
    CHECK(mkdtemp(plane_directory));
    start_plane(plane_directory, 1);
    test_lists_that_are_none_are_refused();
    int written = kvfs_written_make();
    CHECK(written >= 0);
    plane->fuse->held = true;
    test_states_that_cannot_be_are_refused();
    plane->fuse->held = false;
    test_a_mount_is_taken(written);
    test_what_is_sealed_is_marked_until_it_changes(written);
    test_a_full_list_refuses_writers(written);
    test_a_mount_is_left(written);
    close(kernel);
    plane_down();
    CHECK(places_used(written) == 3);
    close(written);
    return 0;
}
