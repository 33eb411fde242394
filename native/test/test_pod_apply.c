/* sources: pod block/block_table.c block/block_table_reader.c block/checksum.c block/checksum_avx2.c block/checksum_avx512.c */
/* Batches of other nodes: applied by version, skipped by reason, met by the own table; damaged and hostile ones do no harm. Readers beside a writer
 * that displaces entries, ends lives and uses segments again miss nothing that stays, and find nothing that never was. */
#include "pod/pod_layout.h"

#include <sched.h>

#include "check.h"

#define SECRET 42
#define NODES 8
#define LOT 4
#define OWN 3
#define SLOT 1 /* of the sender; its segments are 4 to 7, 36 to 39 */
#define SEGMENTS 64
#define PAGES 4096

static struct kvfs_pod *pod;
static struct kvfs_pod_conflict conflicts[KVFS_POD_BATCH_RECORDS_MAX];
static struct kvfs_pod_hit hits[KVFS_POD_BATCH_RECORDS_MAX];
static struct kvfs_pod_applied applied;

static void create(uint64_t entries_max) {
    struct kvfs_pod_config config = {
        .entries_max = entries_max, .secret = SECRET, .segment_count = SEGMENTS, .segment_pages = PAGES, .lot = LOT, .nodes = NODES, .own_slot = OWN};
    CHECK(kvfs_pod_create(&config, &pod) == 0);
}

/* ---- batches, made by hand ---- */

static struct {
    struct kvfs_pod_batch head;
    struct kvfs_pod_batch_segment segments[100];
    struct kvfs_pod_batch_shape shapes[100];
    struct kvfs_pod_batch_record records[KVFS_POD_BATCH_RECORDS_MAX];
} made;
static _Alignas(8) uint8_t bytes[2 * KVFS_POD_BATCH_SIZE_MAX];

static void begin(void) { made.head = (struct kvfs_pod_batch){.magic = KVFS_MAGIC_NEWS, .version = 1, .start = 9, .number = 1, .slot = SLOT}; }

static uint16_t segment(uint32_t number, uint64_t generation, uint32_t flags) {
    made.segments[made.head.segment_count] = (struct kvfs_pod_batch_segment){.generation = generation, .segment = number, .flags = flags};
    return made.head.segment_count++;
}

static uint16_t shape(uint64_t size, uint32_t header_pages, uint32_t mode) {
    made.shapes[made.head.shape_count] = (struct kvfs_pod_batch_shape){.size = size, .header_pages = header_pages, .mode = mode, .uid = 1, .gid = 2};
    return made.head.shape_count++;
}

static void key_of(uint64_t number, uint64_t *low, uint64_t *high) {
    char name[32];

    kvfs_name_key(7, name, (uint32_t)sprintf(name, "name-%lu", number), SECRET, low, high);
}

static void record(uint32_t kind, uint64_t key, uint64_t version, uint16_t segment_index, uint32_t page, uint16_t shape_index) {
    struct kvfs_pod_batch_record *out = &made.records[made.head.record_count++];

    *out = (struct kvfs_pod_batch_record){.version = version, .page_kind = page | kind << 24, .segment = segment_index, .shape = shape_index};
    key_of(key, &out->key_low, &out->key_high);
}

static void sign(uint64_t size) {
    struct kvfs_pod_batch *head = (void *)bytes;

    head->checksum = 0;
    head->checksum = kvfs_checksum(bytes, size, SECRET);
}

static uint64_t finish(void) {
    uint8_t *at = bytes;
    uint64_t size = sizeof(made.head) + made.head.segment_count * sizeof(made.segments[0]) + made.head.shape_count * sizeof(made.shapes[0]) +
                    made.head.record_count * sizeof(made.records[0]);

    made.head.size = (uint32_t)size;
    memcpy(at, &made.head, sizeof(made.head));
    at += sizeof(made.head);
    memcpy(at, made.segments, made.head.segment_count * sizeof(made.segments[0]));
    at += made.head.segment_count * sizeof(made.segments[0]);
    memcpy(at, made.shapes, made.head.shape_count * sizeof(made.shapes[0]));
    at += made.head.shape_count * sizeof(made.shapes[0]);
    memcpy(at, made.records, made.head.record_count * sizeof(made.records[0]));
    sign(size);
    return size;
}

static int apply(uint64_t size, const struct kvfs_table *table) {
    int r = kvfs_pod_apply(pod, SLOT, bytes, size, table, conflicts, hits, &applied);

    CHECK(applied.records == applied.applied + applied.old + applied.ended + applied.foreign + applied.malformed + applied.no_room + applied.waiting +
                                 applied.unknown + applied.own + applied.hits);
    return r;
}

static int find(uint64_t key, struct kvfs_pod_found *found) {
    uint64_t low, high;

    key_of(key, &low, &high);
    return kvfs_pod_find(pod, low, high, found);
}

/* ---- semantics ---- */

static void test_records_are_applied_or_skipped_for_a_reason(void) {
    struct kvfs_pod_found found;

    create(1000);
    begin();
    uint16_t good = segment(5, 100, 0), foreign = segment(8, 50, 0), ended = segment(6, 70, 1), next = segment(6, 71, 0),
             beyond = segment(SEGMENTS, 1, 0);
    uint16_t file = shape(8192, 1, 0100644), directory = shape(0, 0, 0040755), link = shape(10, 1, 0120777), tall = shape(4096, PAGES - 1, 0100644);
    record(KVFS_POD_HERE | KVFS_POD_KEYED, 1, 1000, good, 9, file);
    record(KVFS_POD_DIRECTORY_HERE, 2, 1001, 999, 0, directory);
    record(KVFS_POD_HERE, 3, 1002, foreign, 9, file);
    record(KVFS_POD_HERE, 4, 1003, ended, 9, file);
    record(KVFS_POD_HERE, 5, 1004, next, 9, file);
    record(KVFS_POD_HERE, 6, 1005, beyond, 9, file);
    record(KVFS_POD_HERE, 7, 1006, good, 9, link);
    record(KVFS_POD_HERE, 8, 1007, good, 9, directory);
    record(KVFS_POD_DIRECTORY_HERE, 9, 1008, good, 9, file);
    record(KVFS_POD_HERE, 10, 1009, good, 2, tall);
    record(KVFS_POD_HERE, 11, 1010, good, 1, tall);
    record(KVFS_POD_HERE, 12, 1011, good, 0, file);
    record(KVFS_POD_HERE, 13, 1012, 5, 9, file);
    record(KVFS_POD_HERE, 14, 1013, good, 9, 4);
    record(KVFS_POD_HERE, 15, 0, good, 9, file);
    record(KVFS_POD_HERE, 16, 1ull << 61, good, 9, file);
    record(KVFS_POD_HERE, 1, 999, good, 10, file);
    record(77, 17, 1014, good, 9, file);
    record(0, 18, 1015, good, 9, file);
    record(KVFS_POD_GONE, 19, 1016, 9999, 9, 9999);
    record(KVFS_POD_HERE, 19, 1016, good, 11, file);
    record(KVFS_POD_HIT, 20, 1ull << 60, good, 9, file);
    CHECK(apply(finish(), NULL) == 0 && applied.start == 9 && applied.number == 1 && applied.records == 22);
    CHECK(applied.version_max == 1016 && applied.conflict_count == 0 && applied.hit_count == 0);
    CHECK_SAY(applied.applied == 5 && applied.old == 2 && applied.ended == 1 && applied.foreign == 1 && applied.malformed == 10 &&
                  applied.unknown == 2 && applied.hits == 1,
              "%u %u %u %u %u %u", applied.applied, applied.old, applied.ended, applied.foreign, applied.malformed, applied.unknown);
    CHECK(find(1, &found) == 0 && found.generation == 100 && found.segment == 5 && found.page == 9 && found.size == 8192 && found.header_pages == 1);
    CHECK(found.mode == 0100644 && found.uid == 1 && found.gid == 2 && found.slot == SLOT && found.keyed && !found.directory);
    CHECK(find(2, &found) == 0 && found.directory && found.mode == 0040755 && found.slot == SLOT && found.segment == 0 && found.page == 0);
    CHECK(find(5, &found) == 0 && found.generation == 71 && !found.keyed && find(11, &found) == 0 && found.page == 1);
    for (uint64_t key = 3; key <= 20; key++)
        CHECK(key == 5 || key == 11 || find(key, &found) == -ENOENT);
    /* All of it again is harmless. */
    CHECK(apply(finish(), NULL) == 0 && applied.applied == 5 && find(1, &found) == 0 && find(2, &found) == 0);
    kvfs_pod_destroy(pod);
}

static void test_gone_and_ended_take_away(void) {
    struct kvfs_pod_found found;

    create(1000);
    begin();
    uint16_t s = segment(5, 100, 0), file = shape(8192, 1, 0100644);
    for (uint64_t key = 0; key < 100; key++)
        record(KVFS_POD_HERE, key, 1000 + key, s, 1 + (uint32_t)key, file);
    CHECK(apply(finish(), NULL) == 0 && applied.applied == 100);
    begin();
    record(KVFS_POD_GONE, 1, 2000, 0, 0, 0);
    record(KVFS_POD_GONE, 2, 1001, 0, 0, 0);
    record(KVFS_POD_DIRECTORY_GONE, 3, 1003, 0, 0, 0);
    CHECK(apply(finish(), NULL) == 0 && applied.applied == 2 && applied.old == 1);
    CHECK(find(1, &found) == -ENOENT && find(2, &found) == 0 && find(3, &found) == -ENOENT);
    begin();
    segment(5, 100, 1);
    CHECK(apply(finish(), NULL) == 0 && applied.version_max == 100);
    for (uint64_t key = 0; key < 100; key++)
        CHECK(find(key, &found) == -ENOENT);
    kvfs_pod_destroy(pod);
}

/* A block is carried over into a segment that was opened before its own, which then goes. */
static void test_of_one_version_the_last_place_counts(void) {
    struct kvfs_pod_found found;

    create(1000);
    begin();
    uint16_t own = segment(5, 100, 0), copies = segment(6, 70, 0), file = shape(8192, 1, 0100644);
    record(KVFS_POD_HERE, 1, 1000, own, 9, file);
    record(KVFS_POD_HERE, 1, 1000, copies, 17, file);
    CHECK(apply(finish(), NULL) == 0 && applied.applied == 2);
    CHECK(find(1, &found) == 0 && found.segment == 6 && found.page == 17 && found.generation == 70);
    begin();
    segment(5, 100, 1);
    CHECK(apply(finish(), NULL) == 0 && find(1, &found) == 0 && found.segment == 6);
    kvfs_pod_destroy(pod);
}

static void put_own(struct kvfs_table *table, uint64_t key, uint64_t inode, uint64_t version, uint8_t kind, uint8_t flags) {
    struct kvfs_record own = {.inode = inode, .parent = 7, .version = version, .nlink = 1, .kind = kind, .flags = flags, .mode = 0100644};
    char name[32];

    CHECK(kvfs_table_put(table, &own, name, (uint32_t)sprintf(name, "name-%lu", key), 0) == 0);
}

static void test_the_own_block_meets_the_record_by_version(void) {
    struct kvfs_pod_found found;
    struct kvfs_table *table;

    create(1000);
    CHECK(kvfs_table_create(1000, SECRET, 1, &table) == 0);
    for (uint64_t key = 1; key <= 8; key++)
        put_own(table, key, 100 + key, 1000, KVFS_KIND_FILE, KVFS_INODE_SEALED);
    put_own(table, 20, 120, 1000, KVFS_KIND_FILE, 0); /* still written */
    put_own(table, 21, 121, 5000, KVFS_KIND_DIRECTORY, 0);
    put_own(table, 22, 122, 1000, KVFS_KIND_DIRECTORY, 0);
    put_own(table, 23, 123, 1000, KVFS_KIND_DIRECTORY, 0);
    begin();
    uint16_t s = segment(5, 100, 0), gone = segment(6, 70, 1), file = shape(8192, 1, 0100644), directory = shape(0, 0, 0040755);
    record(KVFS_POD_HERE, 1, 1001, s, 1, file);
    record(KVFS_POD_HERE, 2, 999, s, 2, file);
    record(KVFS_POD_GONE, 3, 1001, 0, 0, 0);
    record(KVFS_POD_GONE, 4, 999, 0, 0, 0);
    record(KVFS_POD_HIT, 5, 17, 0, 0, 0);
    record(KVFS_POD_HIT, 99, 18, 0, 0, 0);
    record(KVFS_POD_HERE, 6, 1002, gone, 1, file); /* its place has ended, but this node's block is not the newest either */
    record(KVFS_POD_DIRECTORY_HERE, 7, 1003, 0, 0, directory);
    record(KVFS_POD_HERE, 20, 1004, s, 3, file);
    record(KVFS_POD_DIRECTORY_HERE, 21, 1005, 0, 0, directory);
    record(KVFS_POD_HERE, 22, 1006, s, 4, file);
    record(KVFS_POD_DIRECTORY_GONE, 22, 1007, 0, 0, 0);
    record(KVFS_POD_DIRECTORY_HERE, 23, 1009, 0, 0, directory); /* its rights were set later than this node knows */
    /* While the table is built it answers nothing for sure. */
    record(KVFS_POD_HERE, 98, 1008, s, 5, file);
    CHECK(apply(finish(), table) == 0 && applied.unsure == 2); /* of 98 and of the hit 99: the rest is found */
    kvfs_table_set_complete(table, 1);
    CHECK(apply(finish(), table) == 0 && applied.unsure == 0);
    CHECK_SAY(applied.own == 3 && applied.hits == 2 && applied.hit_count == 1 && hits[0].inode == 105 && hits[0].count == 17, "%u", applied.own);
    CHECK(applied.conflict_count == 5 && applied.ended == 1);
    CHECK(conflicts[4].inode == 123 && conflicts[4].kind == KVFS_POD_DIRECTORY_HERE && conflicts[4].version == 1009);
    CHECK(conflicts[0].inode == 101 && conflicts[0].version == 1001 && conflicts[0].own_version == 1000 && conflicts[0].kind == KVFS_POD_HERE);
    CHECK(conflicts[0].slot == SLOT && conflicts[0].key_low == made.records[0].key_low && conflicts[0].key_high == made.records[0].key_high);
    CHECK(conflicts[1].inode == 103 && conflicts[1].kind == KVFS_POD_GONE && conflicts[2].inode == 106);
    CHECK(conflicts[3].inode == 107 && conflicts[3].kind == KVFS_POD_DIRECTORY_HERE);
    CHECK(find(1, &found) == 0 && find(2, &found) == -ENOENT && find(7, &found) == 0 && find(20, &found) == 0 && find(21, &found) == 0);
    CHECK(find(22, &found) == -ENOENT);
    kvfs_table_destroy(table);
    kvfs_pod_destroy(pod);
}

static int apply_of(uint32_t slot) {
    made.head.slot = (uint16_t)slot;
    return kvfs_pod_apply(pod, slot, bytes, finish(), NULL, conflicts, hits, &applied);
}

/* One batch of one record about a directory, of this slot. */
static void tell(uint32_t slot, uint32_t kind, uint64_t key, uint64_t version, uint32_t mode) {
    begin();
    record(kind, key, version, 0, 0, shape(0, 0, 0040000 | mode));
    CHECK(apply_of(slot) == 0 && applied.applied + applied.old == 1);
}

static uint32_t mode_of(uint64_t key) {
    struct kvfs_pod_found found;

    return find(key, &found) == 0 && found.directory ? found.mode & 07777 : 0;
}

static void test_a_directory_goes_with_the_last_node_that_has_it(void) {
    struct kvfs_pod_found found;

    create(1000);
    tell(1, KVFS_POD_DIRECTORY_HERE, 7, 1000, 0755);
    tell(2, KVFS_POD_DIRECTORY_HERE, 7, 1000, 0755);
    tell(5, KVFS_POD_DIRECTORY_HERE, 7, 1000, 0755);
    CHECK(find(7, &found) == 0 && found.slot == 1);
    tell(1, KVFS_POD_DIRECTORY_GONE, 7, 5000, 0);
    CHECK(find(7, &found) == 0 && found.directory && (found.slot == 2 || found.slot == 5));
    tell(1, KVFS_POD_DIRECTORY_GONE, 7, 5001, 0); /* once more: it had it no more */
    tell(2, KVFS_POD_DIRECTORY_GONE, 7, 1000, 0);
    CHECK(find(7, &found) == 0 && found.slot == 5);
    tell(5, KVFS_POD_DIRECTORY_GONE, 7, 1000, 0);
    CHECK(find(7, &found) == -ENOENT);
    /* Each says in order whether it has it: a version that was there before is no reason to doubt it. */
    tell(5, KVFS_POD_DIRECTORY_HERE, 7, 1000, 0755);
    CHECK(mode_of(7) == 0755);
    tell(5, KVFS_POD_DIRECTORY_GONE, 7, 1000, 0);
    CHECK(find(7, &found) == -ENOENT);
    /* An old header on flash is one. */
    struct kvfs_pod_entry old = {.version = 1000, .mode = 0040755, .slot = 5, .directory = 1};
    key_of(7, &old.key_low, &old.key_high);
    CHECK(kvfs_pod_put(pod, &old) == -ESTALE && find(7, &found) == -ENOENT);
    kvfs_pod_destroy(pod);
}

static void test_the_rights_that_were_set_last_count_for_all_who_have_a_directory(void) {
    create(1000);
    tell(1, KVFS_POD_DIRECTORY_HERE, 7, 1000, 0755);
    tell(2, KVFS_POD_DIRECTORY_HERE, 7, 1002, 0700);
    CHECK(mode_of(7) == 0700);
    tell(5, KVFS_POD_DIRECTORY_HERE, 7, 1001, 0777); /* it has not heard of that */
    CHECK(mode_of(7) == 0700);
    tell(2, KVFS_POD_DIRECTORY_GONE, 7, 1002, 0); /* the node that closed it */
    CHECK(mode_of(7) == 0700);
    tell(1, KVFS_POD_DIRECTORY_HERE, 7, 1003, 0711);
    CHECK(mode_of(7) == 0711);
    kvfs_pod_destroy(pod);
}

static void test_a_directory_that_an_owner_does_not_repeat_stays_with_the_others(void) {
    create(1000);
    for (uint64_t key = 1; key <= 4; key++)
        tell(1, KVFS_POD_DIRECTORY_HERE, key, 1000 + key, 0755);
    tell(2, KVFS_POD_DIRECTORY_HERE, 2, 1002, 0755);
    tell(2, KVFS_POD_DIRECTORY_HERE, 3, 1003, 0755);
    CHECK(kvfs_pod_repeat_begin(pod, 1) == 0);
    tell(1, KVFS_POD_DIRECTORY_HERE, 1, 1001, 0755);
    tell(1, KVFS_POD_DIRECTORY_HERE, 2, 1002, 0755);
    CHECK(kvfs_pod_repeat_begin(pod, 1) == 0); /* interrupted */
    tell(1, KVFS_POD_DIRECTORY_HERE, 1, 1001, 0755);
    CHECK(kvfs_pod_repeat_end(pod, 1) == 3);
    CHECK(mode_of(1) && mode_of(2) && mode_of(3) && !mode_of(4));
    tell(2, KVFS_POD_DIRECTORY_GONE, 2, 1002, 0);
    tell(2, KVFS_POD_DIRECTORY_GONE, 3, 1003, 0);
    CHECK(mode_of(1) && !mode_of(2) && !mode_of(3));
    kvfs_pod_destroy(pod);
}

/* There is memory for who has some 6,000 of these. */
static void test_directories_whose_holders_are_not_known_go_with_a_repeat(void) {
    enum { COUNT = 9000 };
    struct kvfs_pod_statistics statistics;
    uint64_t low, high, known = 0, unknown = 0;

    create(10000);
    for (uint64_t key = 1; key <= COUNT; key++)
        tell(1, KVFS_POD_DIRECTORY_HERE, key, 1000, 0755);
    for (uint64_t key = 1; key <= COUNT; key++) {
        key_of(key, &low, &high);
        known += pod_holders_known(pod, high);
        unknown = pod_holders_known(pod, high) || unknown ? unknown : key;
    }
    CHECK(known > COUNT / 4 && known < COUNT - 100 && unknown);
    /* Two have it: it is the last teller's. */
    tell(2, KVFS_POD_DIRECTORY_HERE, unknown, 1000, 0755);
    CHECK(kvfs_pod_repeat_begin(pod, 1) == 0);
    tell(1, KVFS_POD_DIRECTORY_HERE, unknown + 1, 1000, 0755);
    CHECK(kvfs_pod_repeat_begin(pod, 1) == 0); /* interrupted */
    tell(1, KVFS_POD_DIRECTORY_HERE, unknown + 2, 1000, 0755);
    CHECK(kvfs_pod_repeat_end(pod, 1) == COUNT - 2);
    CHECK(mode_of(unknown) && !mode_of(unknown + 1) && mode_of(unknown + 2));
    CHECK(kvfs_pod_repeat_begin(pod, 1) == 0 && kvfs_pod_repeat_end(pod, 1) == 1);
    CHECK(kvfs_pod_repeat_begin(pod, 2) == 0 && kvfs_pod_repeat_end(pod, 2) == 1);
    kvfs_pod_statistics(pod, &statistics);
    CHECK(statistics.entries == 0 && statistics.directories == 0 && statistics.shapes == 0);
    kvfs_pod_destroy(pod);
}

/* A model: who has which directory, and its rights. */
static void test_a_model_of_directories_agrees(void) {
    enum { KEYS = 200 };
    for (uint64_t seed = 1; seed <= 4; seed++) {
        uint64_t state = seed, version[KEYS] = {0}, clock = 1000;
        uint32_t mode[KEYS] = {0};
        bool has[KEYS][NODES] = {{false}};

        create(10000);
        for (int i = 0; i < 20000; i++) {
            uint64_t key = random_below(&state, KEYS);
            uint32_t slot = (uint32_t)random_below(&state, NODES);
            bool any = false;

            if (slot == OWN)
                continue;
            if (random_below(&state, 2)) {
                bool later = !version[key] || random_below(&state, 3) == 0;
                uint32_t new_mode = (uint32_t)random_below(&state, 0777) + 1;
                if (later) {
                    version[key] = ++clock;
                    mode[key] = new_mode;
                }
                tell(slot, KVFS_POD_DIRECTORY_HERE, key, version[key], mode[key]);
                has[key][slot] = true;
            } else {
                tell(slot, KVFS_POD_DIRECTORY_GONE, key, ++clock, 0);
                has[key][slot] = false;
            }
            for (uint32_t other = 0; other < NODES; other++)
                any |= has[key][other];
            if (!any)
                version[key] = 0;
            struct kvfs_pod_found found;
            CHECK(mode_of(key) == (any ? mode[key] : 0) && (!any || (find(key, &found) == 0 && has[key][found.slot])));
        }
        kvfs_pod_destroy(pod);
    }
}

/* The owner's side makes the batch, another node's side reads it. */
static void test_news_arrive_as_they_were_told(void) {
    struct kvfs_news_config config = {.bytes_max = 1 << 20, .secret = SECRET, .start = 4, .slot = SLOT};
    struct kvfs_news *news;
    struct kvfs_news_taken taken;
    struct kvfs_pod_found found;

    create(10000);
    CHECK(kvfs_news_create(&config, &news) == 0);
    for (uint64_t key = 0; key < 1000; key++) {
        struct kvfs_news_item item = {.version = 10 + key,
                                      .generation = 100,
                                      .size = 4096 * (key % 9),
                                      .segment = 4 + (uint32_t)key % 4,
                                      .page = 1 + (uint32_t)key,
                                      .header_pages = 1,
                                      .mode = 0100600,
                                      .uid = (uint32_t)key % 5,
                                      .kind = KVFS_POD_HERE,
                                      .flags = key % 2 ? KVFS_NEWS_KEYED : 0};
        key_of(key, &item.key_low, &item.key_high);
        kvfs_news_add(news, &item);
    }
    int64_t size = kvfs_news_take(news, now_ns() + 1000000000, bytes, sizeof(bytes), &taken);
    CHECK(size > 0 && apply((uint64_t)size, NULL) == 0 && applied.applied == 1000 && applied.version_max == taken.version_max);
    for (uint64_t key = 0; key < 1000; key++)
        CHECK(find(key, &found) == 0 && found.page == 1 + key && found.segment == 4 + key % 4 && found.size == 4096 * (key % 9) &&
              found.uid == key % 5 && found.keyed == key % 2 && found.generation == 100);
    kvfs_news_destroy(news);
    kvfs_pod_destroy(pod);
}

/* ---- damage ---- */

static uint64_t make_large(uint64_t *state, uint64_t generation) {
    begin();
    for (uint32_t i = 0; i < 20; i++)
        segment(random_below(state, 5) ? 4 + (uint32_t)random_below(state, 4) : (uint32_t)random_below(state, 70),
                generation + (random_below(state, 5) == 0), random_below(state, 40) == 0);
    for (uint32_t i = 0; i < 20; i++)
        switch (random_below(state, 4)) {
        case 0: shape(0, 0, 0040755); break;
        case 1: shape(random_next(state) >> random_below(state, 64), (uint32_t)random_below(state, 3), (uint32_t)random_next(state)); break;
        default: shape(4096 * random_below(state, 500), (uint32_t)random_below(state, 3), 0100644);
        }
    for (uint32_t i = 0; i < 200; i++)
        record(random_below(state, 10) ? (uint32_t)random_below(state, 6) : (uint32_t)random_below(state, 256), random_below(state, 500),
               1 + random_below(state, 1000 * generation), (uint16_t)random_below(state, 21), (uint32_t)random_below(state, PAGES + 10),
               (uint16_t)random_below(state, 21));
    return finish();
}

static void test_every_flipped_byte_is_refused(void) {
    uint64_t state = 1;
    struct kvfs_pod_statistics before, after;

    create(1000);
    uint64_t size = make_large(&state, 1);
    kvfs_pod_statistics(pod, &before);
    for (uint64_t i = 0; i < size; i++) {
        bytes[i] ^= (uint8_t)(1u << i % 8);
        int r = apply(size, NULL);
        CHECK(r == -EBADMSG || (r == -EPROTONOSUPPORT && i >= 8 && i < 12));
        bytes[i] ^= (uint8_t)(1u << i % 8);
    }
    for (uint64_t cut = 0; cut < size; cut++)
        CHECK(apply(cut, NULL) == -EBADMSG);
    CHECK(apply(size + 1, NULL) == -EBADMSG && apply(KVFS_POD_BATCH_SIZE_MAX + 1, NULL) == -EBADMSG);
    kvfs_pod_statistics(pod, &after);
    CHECK(after.inserted == 0 && after.segments == 0 && after.batches == 0 && after.versions_unknown == 4 && after.batches_refused == 2 * size - 2);
    CHECK(apply(size, NULL) == 0);
    CHECK(kvfs_pod_apply(pod, SLOT + 1, bytes, size, NULL, conflicts, hits, &applied) == -EPERM);
    CHECK(kvfs_pod_apply(pod, OWN, bytes, size, NULL, conflicts, hits, &applied) == -EINVAL);
    CHECK(kvfs_pod_apply(pod, NODES, bytes, size, NULL, conflicts, hits, &applied) == -EINVAL);
    /* Bytes need not be aligned. */
    memmove(bytes + 1, bytes, size);
    CHECK(kvfs_pod_apply(pod, SLOT, bytes + 1, size, NULL, conflicts, hits, &applied) == 0);
    kvfs_pod_destroy(pod);
}

/* One that has the secret, and signs nonsense: no place beyond a limit is ever found, and none of another owner. */
static void test_signed_nonsense_does_no_harm(void) {
    uint64_t state = 2, found_count = 0, applied_count = 0;
    struct kvfs_table *table;

    create(300);
    CHECK(kvfs_table_create(1000, SECRET, 1, &table) == 0);
    for (uint64_t key = 0; key < 100; key++)
        put_own(table, key, 100 + key, random_below(&state, 100000), (uint8_t)(1 + key % 2), key % 3 ? KVFS_INODE_SEALED : 0);
    kvfs_table_set_complete(table, 1);
    for (int round = 0; round < 3000; round++) {
        uint64_t size = make_large(&state, 1 + (uint64_t)round / 10);
        for (uint64_t flips = random_below(&state, 20); flips--;)
            bytes[random_below(&state, 5) ? sizeof(struct kvfs_pod_batch) + random_below(&state, size - sizeof(struct kvfs_pod_batch))
                                          : random_below(&state, sizeof(struct kvfs_pod_batch))] = (uint8_t)random_next(&state);
        if (random_below(&state, 2))
            sign(size);
        int r = apply(size, random_below(&state, 2) ? table : NULL);
        CHECK(r == 0 || r == -EBADMSG || r == -EPROTONOSUPPORT || r == -EPERM);
        CHECK(applied.conflict_count <= applied.records && applied.hit_count <= applied.hits && applied.version_max >> 61 == 0);
        applied_count += applied.applied;
        for (uint64_t key = 0; key < 500; key += 7) {
            struct kvfs_pod_found found;
            r = find(key, &found);
            CHECK(r == 0 || r == -ENOENT);
            if (r)
                continue;
            found_count++;
            CHECK(found.slot == SLOT && found.generation >> 61 == 0);
            if (found.directory)
                CHECK(found.size == 0 && found.segment == 0 && (found.mode & 0170000) == 0040000);
            else
                CHECK(found.segment / LOT % NODES == SLOT && found.segment < SEGMENTS && found.page && found.page + found.header_pages <= PAGES &&
                      found.generation && found.size >> 48 == 0 && (found.mode & 0170000) == 0100000);
        }
    }
    struct kvfs_pod_statistics count;
    kvfs_pod_statistics(pod, &count);
    CHECK(count.entries <= count.capacity && count.entries + count.dead + count.gone <= count.capacity);
    CHECK_SAY(found_count > 1000 && applied_count > 1000, "%lu %lu", found_count, applied_count);
    kvfs_table_destroy(table);
    kvfs_pod_destroy(pod);
}

/* ---- threads ---- */

#if defined(__SANITIZE_THREAD__)
#define ROUNDS 150000u
#elif defined(__SANITIZE_ADDRESS__)
#define ROUNDS 400000u
#else
#define ROUNDS 1000000u
#endif
#define READERS 3
/* A small map that is always full, so that entries move for one another all the time, and look-ups meet them while they do. */
#define MAP 64u
#define STAYING 48u /* keys that are always there */
#define KEYS 100u
static _Atomic int done;
static _Atomic uint64_t versions[STAYING];
static uint64_t keys[2 * KEYS][2];

/* All of an entry follows from key, version and generation: a mixed-up copy shows. Keys that stay lie in segments 4 and 5 of generation 1,
 * which never end, and others in 6 and 7, which do all the time. */
static struct kvfs_pod_entry entry_of(uint64_t key, uint64_t version, uint64_t generation) {
    struct kvfs_pod_entry entry = {.version = version, .generation = generation, .header_pages = 1, .mode = 0100644, .slot = SLOT};

    entry.key_low = keys[key][0];
    entry.key_high = keys[key][1];
    entry.segment = key < STAYING ? 4 + (uint32_t)(key % 2) : 6 + (uint32_t)(key % 2);
    entry.page = (uint32_t)(1 + (version * 7 + key) % (PAGES - 2));
    entry.size = 1 + (key * 31 + version * 17 + generation) % 100;
    entry.uid = (uint32_t)(entry.size * 3);
    entry.gid = entry.uid + 1;
    entry.keyed = entry.page & 1;
    return entry;
}

static void *write_all(void *argument) {
    uint64_t state = *(const uint64_t *)argument, version = 10, generation = 1;

    for (uint32_t round = 0; round < ROUNDS; round++) {
        uint64_t key = random_below(&state, STAYING);
        struct kvfs_pod_entry entry = entry_of(key, ++version, 1);

        CHECK(kvfs_pod_put(pod, &entry) == 0);
        atomic_store(&versions[key], version);
        key = STAYING + random_below(&state, KEYS - STAYING);
        if (random_below(&state, 2)) {
            kvfs_pod_forget(pod, keys[key][0], keys[key][1], entry_of(key, 3, 0).segment, entry_of(key, 3, 0).page);
        } else {
            /* No room is no matter: the lowest versions go, so those that stay are younger. */
            entry = entry_of(key, 3, generation);
            int r = kvfs_pod_put(pod, &entry);
            CHECK(r == 0 || r == -ENOSPC || r == -ESTALE);
        }
        if (round % 97 == 0)
            generation++;
        if (round % 1000 == 0)
            kvfs_pod_sweep(pod, 2000);
    }
    atomic_store(&done, 1);
    return NULL;
}

struct reader {
    const struct kvfs_pod *map;
    uint64_t seed, looked, again;
};

/* Old or new, never missed. */
static void look_for_one_that_stays(struct reader *reader, uint64_t key) {
    uint64_t before = atomic_load(&versions[key]), after;
    struct kvfs_pod_found found;
    int r = kvfs_pod_find(reader->map, keys[key][0], keys[key][1], &found);

    reader->looked++;
    reader->again += r == -EAGAIN;
    CHECK_SAY(r == 0 || r == -EAGAIN, "key %lu is missed", key);
    if (r)
        return;
    CHECK(found.generation == 1 && found.segment == 4 + key % 2 && found.slot == SLOT && found.header_pages == 1);
    CHECK(found.uid == found.size * 3 && found.gid == found.uid + 1 && found.keyed == (found.page & 1));
    after = atomic_load(&versions[key]);
    if (before == after) { /* or the next one, which is there before it is told */
        struct kvfs_pod_entry entry = entry_of(key, before, 1);

        CHECK(found.page != entry.page || found.size == entry.size);
    }
}

static void *read_all(void *argument) {
    struct reader *reader = argument;
    uint64_t state = reader->seed;
    struct kvfs_pod_found found;

    while (!atomic_load(&done)) {
        for (int i = 0; i < 20; i++)
            look_for_one_that_stays(reader, random_below(&state, STAYING));
        uint64_t key = STAYING + random_below(&state, KEYS - STAYING);
        int r = kvfs_pod_find(reader->map, keys[key][0], keys[key][1], &found);
        CHECK(r == 0 || r == -ENOENT || r == -EAGAIN);
        if (r == 0) {
            struct kvfs_pod_entry entry = entry_of(key, 3, found.generation);
            CHECK(found.segment == entry.segment && found.page == entry.page && found.uid == entry.uid && found.size == entry.size &&
                  found.gid == entry.gid && found.keyed == entry.keyed);
        }
        CHECK(kvfs_pod_find(reader->map, keys[key + KEYS][0], keys[key + KEYS][1], &found) != 0);
    }
    return NULL;
}

static void test_readers_miss_nothing_that_stays(void) {
    struct kvfs_pod *attached;
    struct reader readers[READERS];
    pthread_t threads[READERS + 1];
    uint64_t seed = 5;
    struct kvfs_pod_statistics count;

    create(MAP);
    for (uint64_t key = 0; key < 2 * KEYS; key++)
        key_of(key, &keys[key][0], &keys[key][1]);
    CHECK(kvfs_pod_attach(kvfs_pod_fd(pod), SECRET, &attached) == 0);
    atomic_store(&done, 0);
    for (uint64_t key = 0; key < STAYING; key++) {
        struct kvfs_pod_entry entry = entry_of(key, 10, 1);
        CHECK(kvfs_pod_put(pod, &entry) == 0);
        atomic_store(&versions[key], 10);
    }
    CHECK(pthread_create(&threads[READERS], NULL, write_all, &seed) == 0);
    for (int i = 0; i < READERS; i++) {
        readers[i] = (struct reader){.map = i % 2 ? pod : attached, .seed = 100 + (uint64_t)i};
        CHECK(pthread_create(&threads[i], NULL, read_all, &readers[i]) == 0);
    }
    for (int i = 0; i <= READERS; i++)
        CHECK(pthread_join(threads[i], NULL) == 0);
    kvfs_pod_statistics(pod, &count);
    for (int i = 0; i < READERS; i++) {
        printf("   reader %d: %lu look-ups, %lu told to ask again\n", i, readers[i].looked, readers[i].again);
        CHECK(readers[i].again * 100 < readers[i].looked);
    }
    printf("   %lu moved, %lu dropped, %lu lives ended, %lu swept\n", count.displaced, count.dropped, count.lives, count.swept);
    CHECK(count.displaced > ROUNDS / 200 && count.lives > 100);
    kvfs_pod_detach(attached);
    kvfs_pod_destroy(pod);
}

/* ---- one key, stored here and on another node at once ---- */

#if defined(__SANITIZE_THREAD__)
#define MEETINGS 3000u
#else
#define MEETINGS 10000u
#endif
static struct kvfs_table *own_table;
static _Atomic uint32_t own_round, own_done;
static _Atomic int own_lost;

static uint64_t own_version(uint32_t round) { return 10 * round + (round / 4 % 2 ? 3 : 7); }

/* Awake for a while, so that the two meet; others want the CPU too. */
static void wait_for(_Atomic uint32_t *place, uint32_t value) {
    for (uint32_t spins = 0; atomic_load(place) != value; spins++)
        if (spins > 5000)
            sched_yield();
}

static void *store_own(void *argument) {
    for (uint32_t round = 1; round <= MEETINGS; round++) {
        uint64_t low, high;
        int lost = 0;

        wait_for(&own_round, round);
        key_of(round, &low, &high);
        put_own(own_table, round, 100 + round, own_version(round), KVFS_KIND_FILE, KVFS_INODE_SEALED);
        if (kvfs_pod_version(pod, low, high))
            lost = kvfs_pod_remove(pod, low, high, own_version(round)) == -ESTALE;
        atomic_store(&own_lost, lost);
        atomic_store(&own_done, round);
    }
    return argument;
}

static void test_of_two_that_store_one_key_at_once_one_learns_that_it_lost(void) {
    uint32_t told_here = 0, told_there = 0, withdrawn = 0;
    pthread_t thread;
    struct kvfs_pod_found found;

    create(2 * MEETINGS);
    CHECK(kvfs_table_create(2 * MEETINGS, SECRET, 1, &own_table) == 0);
    kvfs_table_set_complete(own_table, 1);
    atomic_store(&own_round, 0);
    CHECK(pthread_create(&thread, NULL, store_own, NULL) == 0);
    for (uint32_t round = 1; round <= MEETINGS; round++) {
        uint64_t other = 10 * round + 5;

        begin();
        uint16_t s = segment(5, 100, 0), file = shape(8192, 1, 0100644);
        record(KVFS_POD_HERE, round, other, s, 9, file);
        uint64_t size = finish();
        atomic_store(&own_round, round);
        if (round % 4 == 0)
            wait_for(&own_done, round);
        for (uint32_t wait = round * 7 % 1000; wait--;) /* now one is earlier, now the other */
            __asm__ volatile("");
        CHECK(apply(size, own_table) == 0);
        wait_for(&own_done, round);
        if (own_version(round) < other) {
            CHECK_SAY(applied.conflict_count == 1 || atomic_load(&own_lost), "round %u: nobody knows", round);
            CHECK(find(round, &found) == 0);
            told_here += applied.conflict_count;
            told_there += (uint32_t)atomic_load(&own_lost);
        } else {
            CHECK_SAY(find(round, &found) == -ENOENT, "round %u: an older one stays", round);
            withdrawn += applied.own;
        }
    }
    CHECK(pthread_join(thread, NULL) == 0);
    printf("   %u conflicts told by apply, %u by the own store; %u records met a newer block\n", told_here, told_there, withdrawn);
    kvfs_table_destroy(own_table);
    kvfs_pod_destroy(pod);
}

int main(void) {
    RUN(test_records_are_applied_or_skipped_for_a_reason);
    RUN(test_gone_and_ended_take_away);
    RUN(test_of_one_version_the_last_place_counts);
    RUN(test_the_own_block_meets_the_record_by_version);
    RUN(test_a_directory_goes_with_the_last_node_that_has_it);
    RUN(test_the_rights_that_were_set_last_count_for_all_who_have_a_directory);
    RUN(test_a_directory_that_an_owner_does_not_repeat_stays_with_the_others);
    RUN(test_directories_whose_holders_are_not_known_go_with_a_repeat);
    RUN(test_a_model_of_directories_agrees);
    RUN(test_news_arrive_as_they_were_told);
    RUN(test_every_flipped_byte_is_refused);
    RUN(test_signed_nonsense_does_no_harm);
    RUN(test_readers_miss_nothing_that_stays);
    RUN(test_of_two_that_store_one_key_at_once_one_learns_that_it_lost);
    return 0;
}
