/* sources: base block names io content pod frames fuse virtiofs plane.c */
/* The feed of a plane: each change of a block's name once, in order, and nothing before somebody has subscribed. */
#include "block/feed.h"
#include "kernel_harness.h"
#include "kvfs.h"

#define SEGMENT 2u
#define PLACE_PAGES 4096u
#define SUB 77u

static struct feed_reader reader;
static uint64_t number;
static uint64_t next_number = UINT64_C(5) << KVFS_COUNTER_BITS;

static struct block {
    struct kvfs_inode_record record;
    char name[24];
} block_of(uint64_t inode, uint64_t parent, const char *name, uint32_t page, uint8_t flags) {
    struct block made = {.record = {.inode = inode,
                                    .parent = parent,
                                    .version = ++next_number,
                                    .kind = KVFS_KIND_FILE,
                                    .mode = 0100644,
                                    .nlink = 1,
                                    .size = 100 * inode,
                                    .segment = SEGMENT,
                                    .page = page,
                                    .generation = 1,
                                    .flags = flags}};
    made.record.name_size = (uint16_t)strlen(name);
    made.record.record_size = (uint32_t)(sizeof(made.record) + round_up(made.record.name_size, 8));
    memcpy(made.name, name, made.record.name_size);
    return made;
}

/* The next record is this. */
static void expect_at(int line, enum feed_kind kind, enum kvfs_event_reason reason, uint64_t anchor, const char *path) {
    struct feed_record record;
    char text[FEED_TEXT_MAX];
    uint64_t lost;
    CHECK_SAY(feed_read(&reader, &record, text, &lost) == 1 && !lost && record.number == ++number, "line %d", line);
    CHECK_SAY(record.kind == kind && record.reason == reason && record.anchor == anchor, "line %d: %u %u at %lu", line, record.kind, record.reason,
              record.anchor);
    CHECK_SAY(record.text_size == strlen(path) && memcmp(text, path, record.text_size) == 0, "line %d: %.*s", line, (int)record.text_size, text);
}
#define EXPECT(kind, reason, path) expect_at(__LINE__, kind, reason, 1, path)

static void nothing_more_at(int line) {
    struct feed_record record;
    char text[FEED_TEXT_MAX];
    uint64_t lost;
    CHECK_SAY(feed_read(&reader, &record, text, &lost) == 0, "line %d: %u %.*s", line, record.kind, (int)record.text_size, text);
}
#define NOTHING_MORE nothing_more_at(__LINE__)

/* A block's content is nothing to the feed. */
static void put(struct block block, uint64_t replaced) {
    CHECK(kvfs_name_put(plane, &block, replaced) >= 0 && kvfs_names_put(plane->names, &block, 0) == 0);
}

static void test_nobody_listens(void) {
    put(block_of(500, 1, "before", 1, KVFS_INODE_SEALED), 0);
    CHECK(!plane->feed && kvfs_inode_remove(plane, 500) == 0 && kvfs_names_remove(plane->names, 500) == 0);
    struct kvfs_feed_place place;
    CHECK(kvfs_feed_begin(plane, 1000, &place) == -EINVAL && !plane->feed);
    CHECK(kvfs_feed_begin(plane, FEED_SIZE_MIN, &place) == 0 && place.size == FEED_SIZE_MIN && place.position == 0 && place.number == 0);
    CHECK(feed_attach(place.fd, place.size, place.position, place.number, &reader) == 0);
    NOTHING_MORE;
}

static void test_blocks_come_and_go(void) {
    directory_put(SUB, 1, "sub");
    put(block_of(501, SUB, "a", 1, KVFS_INODE_SEALED), 0);
    EXPECT(FEED_STORED, KVFS_REASON_WRITTEN, "sub/a");
    put(block_of(502, SUB, "a", 2, KVFS_INODE_SEALED), 501); /* the older one lingers, without a name */
    EXPECT(FEED_STORED, KVFS_REASON_REPLACED, "sub/a");
    CHECK(kvfs_inode_remove(plane, 501) >= 0);
    NOTHING_MORE;
    struct block renamed = block_of(502, 1, "b", 2, KVFS_INODE_SEALED);
    CHECK(kvfs_name_put(plane, &renamed, 0) == 0);
    EXPECT(FEED_REMOVED, KVFS_REASON_RENAMED, "sub/a");
    EXPECT(FEED_STORED, KVFS_REASON_RENAMED, "b");
    CHECK(kvfs_names_put(plane->names, &renamed, 1) == 0);
    renamed.record.mode = 0100600;
    CHECK(kvfs_inode_update(plane, &renamed) == 0);
    renamed.record.page = 3;
    CHECK(kvfs_inode_move(plane, &renamed) == 0); /* a copy of the same bytes */
    NOTHING_MORE;
    renamed.record.page = 4;
    CHECK(kvfs_inode_update(plane, &renamed) == 0);
    EXPECT(FEED_STORED, KVFS_REASON_REPLACED, "b");
    put(block_of(503, 1, "b", 0, 0), 502); /* a file that is no block */
    EXPECT(FEED_REMOVED, KVFS_REASON_REPLACED, "b");
    struct block sealed = block_of(503, 1, "b", 5, KVFS_INODE_SEALED);
    CHECK(kvfs_inode_update(plane, &sealed) == 0 && kvfs_names_put(plane->names, &sealed, 1) == 0);
    EXPECT(FEED_STORED, KVFS_REASON_WRITTEN, "b");
    CHECK(kvfs_inode_remove(plane, 503) == 0 && kvfs_names_remove(plane->names, 503) == 0);
    EXPECT(FEED_REMOVED, KVFS_REASON_DELETED, "b");
    put(block_of(504, 1, "c", 0, 0), 0);
    CHECK(kvfs_inode_remove(plane, 504) == 0);
    NOTHING_MORE;
}

static void test_evictions_and_devices(void) {
    uint64_t inodes[2] = {510, 511};
    uint8_t gone[2];
    struct kvfs_evicted evicted;
    struct block away = block_of(511, SUB, "away", 8, KVFS_INODE_SEALED);
    CHECK(kvfs_places_make(plane->names, SEGMENTS, PLACE_PAGES, 1u << 20));
    put(block_of(510, SUB, "evicted", 7, KVFS_INODE_SEALED), 0);
    put(away, 0);
    EXPECT(FEED_STORED, KVFS_REASON_WRITTEN, "sub/evicted");
    EXPECT(FEED_STORED, KVFS_REASON_WRITTEN, "sub/away");
    kvfs_names_begin(plane->names);
    place_account(plane->names, names_record(plane->names, 510), 1);
    kvfs_names_end(plane->names);
    kvfs_blocks_evict(plane, SEGMENT, inodes, 1, gone, &evicted);
    CHECK(evicted.blocks == 1);
    EXPECT(FEED_REMOVED, KVFS_REASON_EVICTED, "sub/evicted");
    CHECK(kvfs_inode_evict(plane, inodes + 1, 1, gone) == 0);
    EXPECT(FEED_REMOVED, KVFS_REASON_AWAY, "sub/away");
    CHECK(kvfs_blocks_load(plane, &away, away.record.record_size) == 1);
    EXPECT(FEED_STORED, KVFS_REASON_FOUND, "sub/away");
    CHECK(kvfs_inode_hide(plane, 511) == 0); /* as one that is open when its device goes */
    EXPECT(FEED_REMOVED, KVFS_REASON_AWAY, "sub/away");
    CHECK(kvfs_blocks_load(plane, &away, away.record.record_size) == 1);
    EXPECT(FEED_STORED, KVFS_REASON_FOUND, "sub/away");
    CHECK(kvfs_blocks_load(plane, &away, away.record.record_size) == 1 && kvfs_blocks_load(plane, &away, 60) == -EBADMSG);
    NOTHING_MORE;
}

static void test_names_that_memory_does_not_have(void) {
    put(block_of(520, SUB, "x", 9, KVFS_INODE_SEALED), 0);
    EXPECT(FEED_STORED, KVFS_REASON_WRITTEN, "sub/x");
    struct block far = block_of(521, 999, "far", 10, KVFS_INODE_SEALED);
    CHECK(kvfs_blocks_load(plane, &far, far.record.record_size) == 1); /* its directory is not in memory */
    expect_at(__LINE__, FEED_STORED, KVFS_REASON_FOUND, 999, "far");
    CHECK(kvfs_inode_remove(plane, 521) == 0);
    EXPECT(FEED_LOST, KVFS_REASON_DELETED, "");
}

static void test_directories_are_renamed(void) {
    struct block moved = block_of(SUB, 1, "moved", 0, 0);
    moved.record.kind = KVFS_KIND_DIRECTORY;
    moved.record.mode = 040755;
    CHECK(kvfs_name_put(plane, &moved, 0) == 0 && kvfs_names_put(plane->names, &moved, 1) == 0);
    EXPECT(FEED_LOOK, KVFS_REASON_RENAMED, "sub");
    EXPECT(FEED_LOOK, KVFS_REASON_RENAMED, "moved");
    CHECK(kvfs_inode_remove(plane, 520) == 0);
    EXPECT(FEED_REMOVED, KVFS_REASON_DELETED, "moved/x");
    moved.record.mtime_ns++;
    CHECK(kvfs_inode_update(plane, &moved) == 0);
    NOTHING_MORE;
}

static void test_the_last_subscriber_leaves(void) {
    struct kvfs_feed_place place;
    kvfs_feed_stop(plane);
    CHECK(!plane->feed);
    put(block_of(530, 1, "unheard", 11, KVFS_INODE_SEALED), 0);
    NOTHING_MORE; /* a reader keeps its mapping */
    feed_detach(&reader);
    CHECK(kvfs_feed_begin(plane, FEED_SIZE_MIN, &place) == 0 && place.number == 0);
}

int main(void) {
    plane_begin();
    free(pattern(1, 1));
    kvfs_names_number(plane->names, UINT64_C(3) << KVFS_COUNTER_BITS, 0);
    directory_put(1, 1, "");
    RUN(test_nobody_listens);
    RUN(test_blocks_come_and_go);
    RUN(test_evictions_and_devices);
    RUN(test_names_that_memory_does_not_have);
    RUN(test_directories_are_renamed);
    RUN(test_the_last_subscriber_leaves);
    plane_end();
    return 0;
}
