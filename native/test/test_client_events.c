/* sources: base block io client pod */
/* Subscriptions: a namespace's part of the daemon's feed, with keys. No lie of the daemon is more than an error. */
#include "client_harness.h"

static struct kvfs_events *subscribed(struct kvfs_client *client) {
    struct kvfs_events *events;
    int r = kvfs_events_open(client, &events);
    CHECK_SAY(r == 0, "%d: %s", r, kvfs_error());
    return events;
}

static void change(enum feed_kind kind, uint64_t anchor, const char *text) {
    struct feed_record record = {
        .kind = kind, .reason = KVFS_REASON_EVICTED, .size = 77, .time_ns = 5, .anchor = anchor, .text_size = (uint32_t)strlen(text)};
    locked();
    feed_add(d.feed, &record, text);
    unlocked();
}

/* The next event is this one. */
#define EXPECT(events, wanted_kind, wanted_path)                                                                                             \
    do {                                                                                                                                     \
        struct kvfs_block_event event;                                                                                                       \
        int r = kvfs_events_next(events, &event, 5000);                                                                                      \
        CHECK_SAY(r == 1, "%d: %s", r, kvfs_error());                                                                                        \
        CHECK_SAY(event.kind == (wanted_kind) && strcmp(event.path, (wanted_path)) == 0 && event.path_size == strlen(event.path), "%u '%s'", \
                  event.kind, event.path);                                                                                                   \
    } while (0)

static void nothing(struct kvfs_events *events) {
    struct kvfs_block_event event;
    int r = kvfs_events_next(events, &event, 0);
    CHECK_SAY(r == 0, "%d, kind %u '%s'", r, event.kind, event.path);
}

static void test_paths_of_keys(void) {
    char path[1300], digits[600];
    uint8_t key[255];
    static const char *const none[] = {"",      "6",        "61",   "61/",   "61/6",  "61/616", "61/62",
                                       "61/6g", "61/61/61", "6161", "61/6A", "AA/AA", "61/61/", "/61/61"};
    for (uint32_t i = 0; i < sizeof(none) / sizeof(none[0]); i++)
        CHECK_SAY(key_of_path(none[i], (uint32_t)strlen(none[i]), key) == 0, "'%s'", none[i]);
    CHECK(key_of_path("61/61", 5, key) == 1 && key[0] == 'a');
    CHECK(key_of_path("0f/0ff0", 7, key) == 2 && key[0] == 0x0f && key[1] == 0xf0);
    for (uint32_t size = 1; size <= 260; size++) {
        for (uint32_t i = 0; i < size; i++)
            sprintf(digits + 2 * i, "%02x", (i * 37 + size) % 256);
        if (size <= 127)
            sprintf(path, "%.2s/%s", digits, digits);
        else /* the digit in the middle is a letter from g on: no short key has one */
            sprintf(path, "%.2s/%.254s%c/%s", digits, digits, 'g' + (int)strtol((char[]){digits[254], 0}, NULL, 16), digits + 255);
        uint32_t found = key_of_path(path, (uint32_t)strlen(path), key);
        CHECK_SAY(found == (size <= 255 ? size : 0), "%u: %u of %s", size, found, path);
        for (uint32_t i = 0; i < found; i++)
            CHECK(key[i] == (i * 37 + size) % 256);
        if (size > 128 && size <= 255) {
            path[3 + 254] = '0';
            CHECK(key_of_path(path, (uint32_t)strlen(path), key) == 0);
            path[3 + 254] = 'w';
            CHECK(key_of_path(path, (uint32_t)strlen(path), key) == 0);
        }
    }
}

static const char *paths_of(uint64_t inode) { return inode == 40 ? "team/llama/deep" : inode == 41 ? "team" : inode == 42 ? "elsewhere" : NULL; }

static void test_what_is_told(void) {
    struct kvfs_block_event event;
    pool_new(16384);
    d.path_of = paths_of;
    struct kvfs_client *client = connect_plain();
    struct kvfs_events *events = subscribed(client);
    nothing(events);
    change(FEED_STORED, 1, "team/llama/61/61");
    CHECK(kvfs_events_next(events, &event, 0) == 1 && event.kind == KVFS_STORED && event.key_size == 1 && event.key[0] == 'a' && event.number == 1);
    CHECK(event.size == 77 && event.time_ns == 5 && event.reason == KVFS_REASON_EVICTED && strcmp(event.path, "61/61") == 0);
    change(FEED_STORED, 1, "team/llamas/61/61");
    change(FEED_STORED, 1, "team/llama");
    change(FEED_STORED, 1, "x");
    change(FEED_REMOVED, 1, "team/llama/any file");
    CHECK(kvfs_events_next(events, &event, 0) == 1 && event.kind == KVFS_REMOVED && !event.key && !event.key_size && event.number == 5);
    CHECK(strcmp(event.path, "any file") == 0 && d.paths_asked == 0);
    /* Paths that the feed leaves out are asked for, once. */
    change(FEED_STORED, 40, "er");
    change(FEED_STORED, 41, "llama/b");
    change(FEED_STORED, 42, "c");
    change(FEED_STORED, 40, "est");
    change(FEED_STORED, 43, "gone");
    EXPECT(events, KVFS_STORED, "deep/er");
    EXPECT(events, KVFS_STORED, "b");
    EXPECT(events, KVFS_STORED, "deep/est");
    CHECK(d.paths_asked == 3 && kvfs_events_next(events, &event, 0) == 1 && event.kind == KVFS_GAP && event.lost == 1);
    change(FEED_LOST, 1, "");
    CHECK(kvfs_events_next(events, &event, 0) == 1 && event.kind == KVFS_GAP && event.lost == 1);
    /* Directories that are renamed. */
    change(FEED_LOOK, 1, "team/llama/61");
    change(FEED_LOOK, 1, "other");
    change(FEED_LOOK, 1, "team");
    change(FEED_LOOK, 1, "team/llama");
    change(FEED_LOOK, 1, "tea");
    EXPECT(events, KVFS_RESET, "61");
    EXPECT(events, KVFS_RESET, "");
    EXPECT(events, KVFS_RESET, "");
    nothing(events);
    /* One that was overrun is told how much it lost, and goes on. */
    for (int i = 0; i < 10000; i++)
        change(FEED_STORED, 1, "team/llama/61/61");
    CHECK(kvfs_events_next(events, &event, 0) == 1 && event.kind == KVFS_GAP && event.lost > 1000);
    uint64_t last = event.number;
    for (uint64_t told = event.lost; told < 10000; told++)
        CHECK(kvfs_events_next(events, &event, 0) == 1 && event.kind == KVFS_STORED && event.number == ++last);
    nothing(events);
    kvfs_events_close(events);
    kvfs_events_close(NULL);
    kvfs_close(client);
    daemon_stop(true);
}

static void test_a_daemon_that_goes_and_comes(void) {
    struct kvfs_block_event event;
    pool_new(16384);
    struct kvfs_client *client = connect_plain();
    struct kvfs_events *events = subscribed(client);
    change(FEED_STORED, 1, "team/llama/a");
    daemon_stop(false);
    EXPECT(events, KVFS_STORED, "a"); /* the old feed is still there */
    CHECK(kvfs_events_next(events, &event, 200) == 0);
    daemon_start();
    EXPECT(events, KVFS_RESET, "");
    change(FEED_STORED, 1, "team/llama/b");
    EXPECT(events, KVFS_STORED, "b");
    daemon_stop(true);
    CHECK(kvfs_events_next(events, &event, 200) == -ENOTCONN && says("unmounted"));
    CHECK(kvfs_events_next(events, &event, 0) == -ENOTCONN);
    daemon_start();
    EXPECT(events, KVFS_RESET, "");
    kvfs_events_close(events);
    kvfs_close(client);
    daemon_stop(true);
}

static uint32_t descriptors_of_devices(void) {
    uint32_t count = 0;
    for (int fd = 3; fd < 1024; fd++) {
        struct stat st, device;
        char path[32]; /* by path: the watcher may close the number beside this */
        snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
        bool there = stat(path, &st) == 0;
        for (uint32_t i = 0; there && i < DEVICES; i++)
            count += fstat(d.devices[i], &device) == 0 && st.st_ino == device.st_ino && st.st_dev == device.st_dev;
    }
    return count;
}

/* After an umount a client that only listens keeps no device open, and asks no more. Then it hears of the next daemon. */
static void test_a_subscription_keeps_no_device_of_an_unmounted_pool(void) {
    static const uint64_t size = 100000;
    pool_new(16384);
    uint32_t before = descriptors_of_devices();
    struct kvfs_client *client = connect_plain();
    struct kvfs_events *events = subscribed(client);
    struct batch *b = put_batch(client, 0, 3, &size, 1, 1);
    CHECK(descriptors_of_devices() == before + DEVICES);
    daemon_stop(true);
    for (uint64_t until = milliseconds() + 20000 * slowness(); descriptors_of_devices() != before; usleep(1000))
        CHECK(milliseconds() < until);
    pthread_mutex_lock(&client->lock);
    CHECK(!client->retired);
    pthread_mutex_unlock(&client->lock);
    struct kvfs_block_event event;
    CHECK(kvfs_events_next(events, &event, 0) == -ENOTCONN && says("unmounted"));
    daemon_start();
    EXPECT(events, KVFS_RESET, "");
    CHECK(descriptors_of_devices() == before + DEVICES);
    batch_get(client, b, 1);
    kvfs_events_close(events);
    kvfs_close(client);
    CHECK(descriptors_of_devices() == before);
    batch_free(b);
    daemon_stop(true);
}

static void test_no_lie_is_more_than_an_error(void) {
    struct kvfs_block_event event;
    struct kvfs_events *events;
    pool_new(16384);
    d.path_of = paths_of;
    for (enum trick trick = HALF_FRAME; trick < TRICKS_OF_ANSWERS; trick++) {
        struct kvfs_client *client = connect_with((struct kvfs_options){.timeout_ms = 300});
        locked();
        d.trick = trick, d.trick_type = WIRE_EVENTS, d.honest = 0;
        unlocked();
        int r = kvfs_events_open(client, &events);
        CHECK_SAY((r < 0 && !events) || trick == STATUS_POSITIVE, "trick %d: %d", trick, r);
        kvfs_events_close(events);
        locked();
        d.trick = HONEST;
        unlocked();
        kvfs_close(client);
    }
    struct kvfs_client *client = connect_plain();
    d.no_feed = true;
    CHECK(kvfs_events_open(client, &events) == -EPROTO && says("no descriptor"));
    d.no_feed = false;
    events = subscribed(client);
    /* A descriptor that comes with another answer is nobody's. */
    uint8_t names[64];
    uint32_t sizes[4];
    CHECK(kvfs_list(client, NULL, 0, names, 0, sizes, 4) == -ERANGE && kvfs_events_next(events, &event, 0) == 0);
    kvfs_events_close(events);
    kvfs_close(client);
    daemon_stop(true);
}

int main(void) {
    alarm(120 * slowness());
    devices_open();
    RUN(test_paths_of_keys);
    RUN(test_what_is_told);
    RUN(test_a_daemon_that_goes_and_comes);
    RUN(test_a_subscription_keeps_no_device_of_an_unmounted_pool);
    RUN(test_no_lie_is_more_than_an_error);
    devices_close();
    return 0;
}
