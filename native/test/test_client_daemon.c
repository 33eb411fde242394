/* sources: base block io client pod */
/* libkvfs and its daemon: one that dies and comes again, one whose answers are late, and one that lies: no reply, however wrong, is believed. */
#include "client_harness.h"

#include <sys/syscall.h>

/* ---- daemons that come and go ---- */

static void test_daemon_dies(void) {
    static const uint64_t size = 50000;
    pool_new(16384);
    struct kvfs_client *client = connect_plain(), *unverified = connect_with((struct kvfs_options){.flags = KVFS_NO_VERIFY});
    struct kvfs_client_information information;
    struct batch *b = put_batch(client, 0, 5, &size, 1, 1);
    uint8_t found[5], names[1000];
    uint32_t name_sizes[5];
    CHECK(kvfs_client_information_get(client, &information) == 0 && information.connected && information.writable);
    CHECK(information.device_count == DEVICES && information.mount_epoch == d.epoch && strcmp(information.pool, d.directory) == 0);
    CHECK(memcmp(information.pool_uuid, d.uuid, 16) == 0 && information.memory_alignment);
    batch_get(unverified, b, 1);
    daemon_stop(false);
    batch_get(client, b, 1);
    CHECK(kvfs_exists(client, &b->keys, found) == 0 && found[4] == 1);
    CHECK(kvfs_put(client, &b->keys, b->buffers, b->results) == -ENOTCONN && says("daemon is gone"));
    CHECK(kvfs_delete(client, &b->keys, found) == -ENOTCONN);
    CHECK(kvfs_list(client, NULL, 0, names, sizeof(names), name_sizes, 5) == -ENOTCONN);
    CHECK(kvfs_client_information_get(client, &information) == 0 && !information.connected);
    CHECK(kvfs_get(unverified, &b->keys, b->buffers, b->results) == -ENOTCONN);
    CHECK(kvfs_prestage(client, &b->keys) == 5);
    batch_get(client, b, 1);
    daemon_start();
    batch_get(client, b, 1);
    batch_get(unverified, b, 1);
    CHECK(statistics(client).reconnects == 1);
    batch_free(put_batch(client, 0, 2, &size, 1, 7));
    CHECK(kvfs_client_information_get(client, &information) == 0 && information.connected && information.mount_epoch == d.epoch);
    /* Unmounted: until it is back nothing works, and the reason is told. */
    daemon_stop(true);
    CHECK(kvfs_get(client, &b->keys, b->buffers, b->results) == -ENOTCONN && says("unmounted"));
    CHECK(kvfs_put(client, &b->keys, b->buffers, b->results) == -ENOTCONN && says("unmounted"));
    CHECK(kvfs_exists(client, &b->keys, found) == -ENOTCONN && says("unmounted"));
    daemon_start();
    CHECK_SAY(kvfs_get(client, &b->keys, b->buffers, b->results) == 5, "%s", kvfs_error());
    CHECK(filled(b->buffers[1].data, size, (7ull << 32) + 1) && filled(b->buffers[2].data, size, (1ull << 32) + 2));
    /* Formatted again. */
    daemon_stop(false);
    d.uuid[0]++;
    daemon_start();
    CHECK(kvfs_get(client, &b->keys, b->buffers, b->results) == -ESTALE && says("another pool"));
    CHECK(kvfs_put(client, &b->keys, b->buffers, b->results) == -ESTALE);
    d.uuid[0]--;
    daemon_stop(false);
    /* No control socket at all: as a dead daemon. */
    char path[128];
    snprintf(path, sizeof(path), "%s/control.sock", d.directory);
    unlink(path);
    CHECK(kvfs_get(client, &b->keys, b->buffers, b->results) == 5);
    struct kvfs_client *none;
    CHECK(client_open("/mnt/test", d.directory, 1, "", NULL, &none) == -ENOTCONN && says("no daemon"));
    kvfs_close(client);
    kvfs_close(unverified);
    batch_free(b);
}

static struct {
    struct kvfs_client *client;
    atomic_bool stop;
} crowd;

static void *crowd_exist(void *argument) {
    (void)argument;
    static const uint64_t size = 30000;
    struct batch *b = batch_new(0, 8, &size, 1, 0);
    while (!atomic_load(&crowd.stop)) {
        batch_get(crowd.client, b, 1);
        kvfs_prestage(crowd.client, &b->keys);
    }
    batch_free(b);
    return NULL;
}

static void test_daemon_restarts_under_readers(void) {
    static const uint64_t size = 30000;
    pool_new(16384);
    crowd.client = connect_plain();
    batch_free(put_batch(crowd.client, 0, 8, &size, 1, 1));
    atomic_store(&crowd.stop, false);
    pthread_t threads[4];
    for (int i = 0; i < 4; i++)
        CHECK(pthread_create(&threads[i], NULL, crowd_exist, NULL) == 0);
    for (uint64_t i = 0; i < 8; i++) {
        usleep(60000);
        daemon_stop(false);
        usleep(20000);
        daemon_start();
        uint64_t until = milliseconds() + 5000 * slowness();
        while (statistics(crowd.client).reconnects < i / 2 + 1) {
            CHECK(milliseconds() < until);
            usleep(1000);
        }
    }
    atomic_store(&crowd.stop, true);
    for (int i = 0; i < 4; i++)
        pthread_join(threads[i], NULL);
    CHECK(statistics(crowd.client).reconnects >= 4);
    kvfs_close(crowd.client);
    daemon_stop(false);
}

/* ---- versions of the protocol ---- */

static void speaks(uint32_t oldest, uint32_t newest) {
    locked();
    d.oldest = oldest;
    d.newest = newest;
    d.hellos = 0;
    unlocked();
}

static void test_a_daemon_of_another_version_is_an_error_that_names_both(void) {
    static const uint64_t size = 50000;
    static const uint32_t versions[] = {KVFS_WIRE_VERSION + 1, KVFS_WIRE_OLDEST - 1, 0, UINT32_MAX};
    pool_new(16384);
    struct kvfs_client *client, *connected = connect_plain();
    struct batch *b = put_batch(connected, 0, 5, &size, 1, 1);
    for (uint32_t i = 0; i < 4; i++) {
        char expected[64];
        speaks(versions[i], versions[i]);
        snprintf(expected, sizeof(expected), "speaks version %u of", versions[i]);
        CHECK(client_open("/mnt/test", d.directory, 1, "team/llama", NULL, &client) == -EPROTO);
        CHECK_SAY(says(expected) && says("the client 5") && says("this library speaks versions 4 to 5"), "%s", kvfs_error());
        locked();
        CHECK(d.hellos == KVFS_WIRE_VERSION - KVFS_WIRE_OLDEST + 1);
        unlocked();
    }
    /* A client that was connected says the same; and goes on once it can. */
    daemon_stop(false);
    daemon_start();
    CHECK(kvfs_get(connected, &b->keys, b->buffers, b->results) == -EPROTO && says("speaks versions 4 to 5"));
    CHECK(kvfs_put(connected, &b->keys, b->buffers, b->results) == -EPROTO);
    daemon_stop(false);
    speaks(KVFS_WIRE_OLDEST, KVFS_WIRE_VERSION);
    daemon_start();
    batch_get(connected, b, 1);
    batch_free(b);
    kvfs_close(connected);
    daemon_stop(false);
}

/* The table cannot say: the daemon is asked. */
static void test_incomplete_table(void) {
    static const uint64_t size = 50000;
    pool_new(16384);
    struct kvfs_client *client = connect_plain();
    struct batch *b = put_batch(client, 0, 5, &size, 1, 1);
    locked();
    d.incomplete = true;
    kvfs_table_set_complete(d.table, 0);
    unlocked();
    batch_get(client, b, 1);
    CHECK(get_one(client, "nothing", b->buffers[0].data, size) == -ENOENT);
    locked();
    CHECK(d.lookups > 0);
    unlocked();
    /* Two names may share a key: which of the two this is only the daemon knows. */
    uint64_t inode = inode_named("key-1");
    struct kvfs_record record;
    struct kvfs_attributes attributes;
    struct kvfs_file *file;
    locked();
    d.incomplete = false;
    kvfs_table_set_complete(d.table, 1);
    CHECK(kvfs_table_find_inode(d.table, inode, &record) == 0);
    record.flags |= KVFS_INODE_ASK;
    CHECK(kvfs_table_update(d.table, &record) == 0);
    uint32_t lookups = d.lookups;
    unlocked();
    batch_get(client, b, 1);
    locked();
    CHECK(d.lookups == lookups + 1);
    unlocked();
    CHECK(kvfs_find(client, "team/llama/6b/6b65792d31", &attributes) == -EAGAIN && kvfs_file_open(client, inode, &file) == -EAGAIN);
    CHECK(kvfs_find(client, "team/llama/6b/6b65792d32", &attributes) == 0);
    daemon_stop(false);
    CHECK(get_one(client, "nothing", b->buffers[0].data, size) == -ENOENT);
    batch_free(b);
    kvfs_close(client);
}

/* ---- a daemon that lies ---- */

static void test_hostile_welcomes(void) {
    pool_new(16384);
    struct kvfs_client *client;
    struct kvfs_options options = {.size = sizeof(options)};
    for (enum trick trick = SILENT; trick < TRICKS_OF_WELCOME; trick++) {
        locked();
        d.trick = trick;
        unlocked();
        int expected = -EPROTO;
        if (trick == SILENT || trick == HALF_WELCOME_FRAME || trick == FEW_DESCRIPTORS)
            expected = -ETIMEDOUT;
        else if (trick == TRUNCATED_WELCOME)
            expected = -ENOTCONN;
        else if (trick == REFUSE)
            expected = -EACCES;
        options.timeout_ms = expected == -ETIMEDOUT ? 150 : 5000 * slowness(); /* the others answer, on a busy machine late */
        uint64_t started = milliseconds();
        int r = client_open("/mnt/test", d.directory, 1, "team/llama", &options, &client);
        uint64_t took_ms = milliseconds() - started;
        CHECK_SAY(took_ms < options.timeout_ms + 1000 * slowness(), "trick %d: %llu ms", trick, (unsigned long long)took_ms);
        CHECK_SAY(r == expected, "trick %d: %d: %s", trick, r, kvfs_error());
        CHECK_SAY(says(d.directory), "trick %d: %s", trick, kvfs_error());
        CHECK(trick != REFUSE || says("no, not you"));
    }
    locked();
    d.trick = HONEST;
    unlocked();
    /* No right to write. */
    client = connect_with((struct kvfs_options){.flags = KVFS_READ_ONLY});
    CHECK(put_one(client, "a", "x", 1) == -EROFS && says("reading only"));
    kvfs_close(client);
    locked();
    d.read_only = true;
    unlocked();
    client = connect_plain();
    CHECK(put_one(client, "a", "x", 1) == -EROFS && says("read-only"));
    kvfs_close(client);
    daemon_stop(false);
}

/* One request of each type, answered in every wrong way: an error in time; never a crash, never a success that is none. */
static void test_hostile_answers(void) {
    static const uint64_t size = 50000;
    static const uint16_t types[] = {WIRE_LOOKUP, WIRE_RESERVE, WIRE_COMMIT, WIRE_DELETE, WIRE_LIST};
    for (uint32_t t = 0; t < 5; t++)
        for (enum trick trick = HANG; trick < TRICKS_OF_ANSWERS; trick++) {
            /* Only look-ups have a short deadline: others may have to wait for eviction. */
            if (t > 0 && (trick == HANG || trick == HALF_FRAME || trick == HALF_PAYLOAD))
                continue;
            pool_new(16384);
            struct kvfs_client *client = connect_with((struct kvfs_options){.timeout_ms = 250 * slowness()});
            struct batch *b = put_batch(client, 0, 3, &size, 1, 1);
            uint8_t deleted[3], names[1000];
            uint32_t name_sizes[5];
            locked();
            d.trick = trick;
            d.trick_type = types[t];
            d.incomplete = t == 0;
            kvfs_table_set_complete(d.table, !d.incomplete);
            unlocked();
            uint64_t started = milliseconds();
            int r = 0;
            if (t == 0) {
                locked();
                CHECK(kvfs_table_remove(d.table, SHARD + 'k', 0) == 0); /* then the table cannot say */
                unlocked();
                r = kvfs_get(client, &b->keys, b->buffers, b->results);
                CHECK_SAY(r <= 0, "%d", r);
            } else if (t <= 2) {
                r = kvfs_put(client, &b->keys, b->buffers, b->results);
                for (uint32_t i = 0; i < 3 && trick != LONG_ANSWER && trick != STATUS_POSITIVE; i++)
                    CHECK_SAY(b->results[i] != 0, "type %u, trick %d: %d, %s", types[t], trick, r, kvfs_error());
            } else if (t == 3) {
                r = kvfs_delete(client, &b->keys, deleted);
            } else {
                r = kvfs_list(client, NULL, 0, names, sizeof(names), name_sizes, 5);
            }
            CHECK_SAY(milliseconds() - started < 2000 * slowness(), "type %u, trick %d: %llu ms", types[t], trick,
                      (unsigned long long)(milliseconds() - started));
            if (trick == HANG_UP || trick == CLOSE_INSTEAD)
                CHECK_SAY(r == -ENOTCONN || (t == 0 && r == 0), "type %u, trick %d: %d", types[t], trick, r);
            else if (trick == HANG || trick == HALF_FRAME || trick == HALF_PAYLOAD)
                CHECK_SAY(r == -ETIMEDOUT || (t == 0 && r == 0), "type %u, trick %d: %d", types[t], trick, r);
            else if (trick == WRONG_ID || trick == WRONG_ANSWER || trick == HUGE_ANSWER || trick == STATUS_MIN)
                CHECK_SAY(r == -EPROTO, "type %u, trick %d: %d: %s", types[t], trick, r, kvfs_error());
            else if (trick == EMPTY_ANSWER && t > 0)
                CHECK_SAY(r == -EPROTO, "type %u: %d", types[t], r);
            /* And with an honest daemon all is well again. */
            locked();
            d.trick = HONEST;
            d.incomplete = false;
            kvfs_table_set_complete(d.table, 1);
            if (t == 0) {
                char shard[] = "6b";
                directory_put(SHARD + 0x6b, SPACE, shard);
            }
            unlocked();
            if (trick == RANDOM_ANSWER || t == 0)
                kvfs_get(client, &b->keys, b->buffers, b->results);
            batch_free(put_batch(client, 0, 3, &size, 1, 2));
            batch_get(client, b, 2);
            batch_free(b);
            kvfs_close(client);
            daemon_stop(false);
        }
}

static void test_hostile_reservations(void) {
    static const uint64_t sizes[] = {50000, 6 << 20};
    pool_new(16384);
    struct kvfs_client *client = connect_plain();
    locked();
    d.split = 2;
    unlocked();
    struct batch *b = put_batch(client, 0, 4, sizes, 2, 1);
    for (enum trick trick = RUN_BEYOND; trick < TRICKS_OF_RESERVE; trick++) {
        locked();
        d.trick = trick;
        unlocked();
        batch_fill(b, 2);
        int r = kvfs_put(client, &b->keys, b->buffers, b->results);
        if (trick == HEADER_TOO_SMALL) {
            CHECK(b->results[1] != 0 && b->results[3] != 0);
        } else {
            CHECK_SAY(r <= 0, "trick %d: %d", trick, r);
            for (uint32_t i = 0; i < 4; i++)
                CHECK_SAY(b->results[i] < 0, "trick %d, block %u", trick, i);
        }
        locked();
        d.trick = HONEST;
        unlocked();
        batch_free(put_batch(client, 0, 4, sizes, 2, 3));
        batch_get(client, b, 3);
    }
    /* A reservation that is too old to be written to. */
    locked();
    d.reservation_ms = 0;
    uint32_t aborted = d.aborted;
    unlocked();
    struct kvfs_client *late = connect_plain();
    batch_fill(b, 4);
    CHECK(kvfs_put(late, &b->keys, b->buffers, b->results) == 0);
    for (uint32_t i = 0; i < 4; i++)
        CHECK(b->results[i] == -ETIMEDOUT);
    locked();
    CHECK(d.aborted == aborted + 4);
    unlocked();
    batch_get(client, b, 3);
    batch_free(b);
    kvfs_close(late);
    kvfs_close(client);
    daemon_stop(false);
}

/* ---- puts in windows ---- */

/* A window of the double's pool of 160 MiB is 5 MiB: 20 of these blocks. */
enum { WINDOW_BLOCKS = 90, WINDOW = 20 };
static const uint64_t window_size = 250000;

static struct batch *windows_new(uint64_t version) {
    struct batch *b = batch_new(0, WINDOW_BLOCKS, &window_size, 1, 0);
    batch_fill(b, version);
    return b;
}

/* Nothing stays reserved, and another put stores everything. */
static void windows_heal(struct kvfs_client *client, struct batch *b) {
    locked();
    d.trick = HONEST;
    d.fail_odd = 0;
    d.room = d.room_in_all = UINT32_MAX;
    CHECK_SAY(d.open == 0, "%u blocks are reserved", d.open);
    unlocked();
    batch_free(put_batch(client, 0, WINDOW_BLOCKS, &window_size, 1, 9));
    batch_get(client, b, 9);
    batch_free(b);
    kvfs_close(client);
    daemon_stop(false);
}

static void test_windows_go_on_while_commits_are_not_answered(void) {
    pool_new(16384);
    struct kvfs_client *client = connect_plain();
    locked();
    d.held_until = 3 * WINDOW + 1; /* two windows are written and a fourth is asked for before the first commit's answer */
    unlocked();
    struct batch *b = put_batch(client, 0, WINDOW_BLOCKS, &window_size, 1, 1);
    locked();
    CHECK(d.held_count == 0 && d.reserves == 5 && d.commits == 5 && d.committed == WINDOW_BLOCKS && d.open == 0);
    CHECK_SAY(d.open_most <= 4 * WINDOW, "%u blocks were reserved at one time", d.open_most);
    unlocked();
    batch_get(client, b, 1);
    windows_heal(client, b);
}

struct put_job {
    struct kvfs_client *client;
    struct batch *batch;
    int result;
};

static void *put_in_thread(void *argument) {
    struct put_job *job = argument;
    job->result = kvfs_put(job->client, &job->batch->keys, job->batch->buffers, job->batch->results);
    return NULL;
}

static void test_a_look_up_passes_a_put_that_waits(void) {
    static const uint64_t one = 5000;
    pool_new(16384);
    struct kvfs_client *client = connect_plain();
    struct batch *b = put_batch(client, 0, 1, &one, 1, 1);
    locked();
    d.held_until = UINT32_MAX; /* no commit is answered */
    kvfs_table_set_complete(d.table, 0);
    d.incomplete = true;
    unlocked();
    struct batch *other = windows_new(2);
    struct put_job job = {client, other, 0};
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, put_in_thread, &job) == 0);
    uint64_t until = milliseconds() + 30000;
    for (bool waits = false; !waits;) {
        CHECK(milliseconds() < until);
        usleep(1000);
        locked();
        waits = d.held_count >= 1;
        unlocked();
    }
    uint64_t started = milliseconds();
    struct kvfs_keys missing = {(const uint8_t *)"no such key", (uint32_t[]){11}, 1, 0};
    uint8_t found = 1;
    CHECK(kvfs_exists(client, &missing, &found) == 0 && found == 0);
    CHECK(milliseconds() - started < 5000);
    locked();
    CHECK(d.lookups > 0);
    d.held_until = 0;
    unlocked();
    CHECK(kvfs_delete(client, &b->keys, &found) == 1); /* any request lets the double answer */
    pthread_join(thread, NULL);
    CHECK_SAY(job.result == WINDOW_BLOCKS, "%d", job.result);
    batch_free(other);
    batch_free(b);
    kvfs_close(client);
    daemon_stop(false);
}

static void test_a_commit_of_an_earlier_window_fails(void) {
    pool_new(16384);
    struct kvfs_client *client = connect_plain();
    struct batch *b = windows_new(1);
    locked();
    d.fail_odd = -EISDIR;
    unlocked();
    CHECK(kvfs_put(client, &b->keys, b->buffers, b->results) == WINDOW_BLOCKS / 2);
    for (uint32_t i = 0; i < WINDOW_BLOCKS; i++) {
        uint32_t inside = i % WINDOW;
        CHECK_SAY(b->results[i] == (inside % 2 ? -EISDIR : 0), "block %u: %lld", i, (long long)b->results[i]);
    }
    /* The window fails as a whole; blocks behind it are given back, or were entered already. */
    locked();
    d.fail_odd = 0;
    d.trick = STATUS_ERROR;
    d.trick_type = WIRE_COMMIT;
    d.honest = 1;
    uint32_t committed = d.committed;
    unlocked();
    CHECK(kvfs_put(client, &b->keys, b->buffers, b->results) == -EIO);
    int64_t stored = 0;
    for (uint32_t i = 0; i < WINDOW_BLOCKS; i++) {
        CHECK_SAY(i < WINDOW ? b->results[i] == 0 : b->results[i] == -EIO || b->results[i] == -ECANCELED, "block %u: %lld", i,
                  (long long)b->results[i]);
        stored += b->results[i] == 0;
    }
    locked();
    CHECK(stored == WINDOW && d.committed >= committed + WINDOW);
    unlocked();
    windows_heal(client, b);
}

static void test_the_daemon_goes_between_two_windows(void) {
    static const uint16_t types[] = {WIRE_RESERVE, WIRE_COMMIT};
    for (uint32_t t = 0; t < 2; t++)
        for (uint32_t honest = 0; honest < 4; honest++) {
            pool_new(16384);
            struct kvfs_client *client = connect_plain();
            struct batch *b = windows_new(1);
            locked();
            d.trick = HANG_UP;
            d.trick_type = types[t];
            d.honest = honest;
            unlocked();
            int r = kvfs_put(client, &b->keys, b->buffers, b->results);
            CHECK_SAY(r == -ENOTCONN, "type %u, after %u: %d", types[t], honest, r);
            uint32_t stored = 0;
            for (uint32_t i = 0; i < WINDOW_BLOCKS; i++) {
                CHECK_SAY(b->results[i] == 0 || b->results[i] == -ENOTCONN || b->results[i] == -ECANCELED, "block %u: %lld", i,
                          (long long)b->results[i]);
                stored += b->results[i] == 0;
            }
            locked();
            CHECK_SAY(stored <= d.committed, "%u of %u", stored, d.committed);
            unlocked();
            windows_heal(client, b);
        }
}

static void test_no_room_in_a_later_window(void) {
    pool_new(16384);
    struct kvfs_client *client = connect_plain();
    struct batch *b = windows_new(1);
    for (uint32_t room = 1; room < 2 * WINDOW; room += 12) { /* committed blocks make room for later ones */
        locked();
        d.room = room;
        d.open_most = 0;
        unlocked();
        int r = kvfs_put(client, &b->keys, b->buffers, b->results);
        CHECK_SAY(r == WINDOW_BLOCKS, "room for %u: %d, %s", room, r, kvfs_error());
        locked();
        CHECK(d.open_most <= room && d.open == 0);
        unlocked();
        batch_get(client, b, 1);
    }
    for (uint32_t room = 0; room < 2 * WINDOW; room += 12) { /* nothing makes room */
        locked();
        d.room = UINT32_MAX;
        d.reserved = d.reserves = 0;
        d.room_in_all = room;
        unlocked();
        int r = kvfs_put(client, &b->keys, b->buffers, b->results);
        CHECK_SAY(r == (int)room, "room for %u: %d, %s", room, r, kvfs_error());
        for (uint32_t i = 0; i < WINDOW_BLOCKS; i++)
            CHECK_SAY(b->results[i] == (i < room ? 0 : -ENOSPC), "room for %u, block %u: %lld", room, i, (long long)b->results[i]);
        locked();
        CHECK_SAY(d.open == 0 && d.reserves <= 12, "%u requests", d.reserves);
        unlocked();
    }
    windows_heal(client, b);
}

/* ---- the watcher ---- */

/* As closefrom(3) does: then the numbers are files of the program's. By system calls: the thread sanitizer takes that for the race that it is. */
static void test_a_program_closes_the_watcher_s_descriptors(void) {
    for (int reused = 0; reused < 2; reused++) {
        pool_new(16384);
        struct kvfs_client *client = connect_plain();
        struct stat st, now[2];
        int file = open(d.directory, O_TMPFILE | O_RDWR | O_CLOEXEC, 0600), fds[2] = {client->watch_fds[0], client->watch_fds[1]};
        CHECK(file >= 0 && fds[0] >= 0 && fds[1] >= 0 && fstat(file, &st) == 0);
        usleep(100000); /* the watcher waits by now; or it finds them closed at once, and the same holds */
        for (int i = 0; i < 2; i++)
            CHECK(reused ? syscall(SYS_dup3, file, fds[i], O_CLOEXEC) == fds[i] : syscall(SYS_close, fds[i]) == 0);
        uint64_t begun = milliseconds();
        kvfs_close(client);
        CHECK_SAY(milliseconds() - begun < 10000u * slowness(), "%llu ms", (unsigned long long)(milliseconds() - begun));
        for (int i = 0; i < 2; i++) {
            CHECK((fstat(fds[i], &now[i]) == 0) == reused);
            CHECK(!reused || (now[i].st_ino == st.st_ino && now[i].st_size == 0 && close(fds[i]) == 0));
        }
        CHECK(lseek(file, 0, SEEK_CUR) == 0 && close(file) == 0);
        daemon_stop(false);
    }
}

int main(void) {
    alarm(300 * slowness());
    signal(SIGPIPE, SIG_DFL); /* it must not be needed */
    devices_open();
    RUN(test_daemon_dies);
    RUN(test_daemon_restarts_under_readers);
    RUN(test_a_daemon_of_another_version_is_an_error_that_names_both);
    RUN(test_incomplete_table);
    RUN(test_hostile_welcomes);
    RUN(test_hostile_answers);
    RUN(test_hostile_reservations);
    RUN(test_windows_go_on_while_commits_are_not_answered);
    RUN(test_a_look_up_passes_a_put_that_waits);
    RUN(test_a_commit_of_an_earlier_window_fails);
    RUN(test_the_daemon_goes_between_two_windows);
    RUN(test_no_room_in_a_later_window);
    RUN(test_a_program_closes_the_watcher_s_descriptors);
    devices_close();
    return 0;
}
