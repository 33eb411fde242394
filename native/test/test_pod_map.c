/* sources: pod block/block_table.c block/block_table_reader.c block/checksum.c block/checksum_avx2.c block/checksum_avx512.c */
/* The pod map: what is put is found, what ends is not, nothing that stays is missed, and a model agrees with all of it. */
#include "pod/pod_layout.h"

#include <fcntl.h>
#include <sys/mman.h>

#include "check.h"

#define SECRET 42
#define NODES 8
#define LOT 4
#define OWN 3
#define PAGES 4096

static struct kvfs_pod *create(uint64_t entries_max, uint32_t segments) {
    struct kvfs_pod_config config = {
        .entries_max = entries_max, .secret = SECRET, .segment_count = segments, .segment_pages = PAGES, .lot = LOT, .nodes = NODES, .own_slot = OWN};
    struct kvfs_pod *pod;

    CHECK(kvfs_pod_create(&config, &pod) == 0);
    return pod;
}

static uint16_t owner(uint32_t segment) { return (uint16_t)(segment / LOT % NODES); }

/* A segment of another node. */
static uint32_t segment_of(uint64_t number, uint32_t segments) {
    uint32_t segment = (uint32_t)(number % segments);

    return owner(segment) == OWN ? (segment + LOT) % segments : segment;
}

static void key_of(uint64_t number, uint64_t *low, uint64_t *high) { kvfs_name_key(7, (const char *)&number, sizeof(number), SECRET, low, high); }

static struct kvfs_pod_entry entry_of(uint64_t number, uint64_t version, uint32_t segment, uint64_t generation, uint32_t page) {
    struct kvfs_pod_entry entry = {
        .version = version,
        .generation = generation,
        .size = 4096 * (1 + number % 50),
        .segment = segment,
        .page = page,
        .header_pages = 1,
        .mode = 0100644,
        .uid = (uint32_t)(number % 3),
        .gid = 5,
        .slot = owner(segment),
        .keyed = number & 1,
    };

    key_of(number, &entry.key_low, &entry.key_high);
    return entry;
}

static struct kvfs_pod_entry directory_of(uint64_t number, uint64_t version, uint16_t slot) {
    struct kvfs_pod_entry entry = {.version = version, .mode = 0040755, .slot = slot, .directory = 1};

    key_of(number, &entry.key_low, &entry.key_high);
    return entry;
}

static int find(const struct kvfs_pod *pod, uint64_t number, struct kvfs_pod_found *found) {
    uint64_t low, high;

    key_of(number, &low, &high);
    return kvfs_pod_find(pod, low, high, found);
}

static int remove_key(struct kvfs_pod *pod, uint64_t number, uint64_t version) {
    uint64_t low, high;

    key_of(number, &low, &high);
    return kvfs_pod_remove(pod, low, high, version);
}

static uint64_t version_of(struct kvfs_pod *pod, uint64_t number) {
    uint64_t low, high;

    key_of(number, &low, &high);
    return kvfs_pod_version(pod, low, high);
}

static bool is(const struct kvfs_pod_found *found, const struct kvfs_pod_entry *entry) {
    return found->generation == entry->generation && found->size == entry->size && found->segment == entry->segment && found->page == entry->page &&
           found->header_pages == entry->header_pages && found->mode == entry->mode && found->uid == entry->uid && found->gid == entry->gid &&
           found->slot == entry->slot && found->keyed == entry->keyed && found->directory == entry->directory;
}

static struct kvfs_pod_statistics statistics(struct kvfs_pod *pod) {
    struct kvfs_pod_statistics out;

    kvfs_pod_statistics(pod, &out);
    return out;
}

/* The accounts against the memory itself. */
static void check_accounts(struct kvfs_pod *pod) {
    struct kvfs_pod_statistics count = statistics(pod);
    uint64_t states[4] = {0}, directories = 0, users = 0;
    uint32_t *lives = calloc(pod->constants.segment_count, sizeof(*lives));

    for (uint64_t bucket = 0; bucket < pod->constants.buckets; bucket++)
        for (int i = 0; i < POD_ENTRIES; i++) {
            struct pod_slot slot = {.bucket = bucket, .index = i};
            struct pod_value value;
            enum pod_state state = pod_state(pod, slot, &value);

            states[state]++;
            if (state != POD_DEAD && state != POD_LIVE)
                continue;
            users++;
            if (pod_is_directory((uint32_t)(get(&pod->shapes[value.shape].pages_mode) >> 32)))
                directories++;
            else if (state == POD_LIVE)
                lives[value.place / PAGES]++;
        }
    CHECK_SAY(states[POD_LIVE] == count.entries, "%lu live, %lu in the accounts", states[POD_LIVE], count.entries);
    CHECK(states[POD_DEAD] == count.dead && states[POD_GONE] == count.gone && directories == count.directories);
    for (uint32_t i = 0; i < pod->constants.segment_count; i++)
        CHECK(lives[i] == pod->writer->lives[i].entries);
    for (uint32_t i = 0; i < POD_SHAPES; i++)
        users -= pod->writer->shape_users[i];
    CHECK(users == 0);
    free(lives);
}

static void test_an_entry_is_found_as_it_was_put(void) {
    struct kvfs_pod *pod = create(1000, 64), *attached;
    struct kvfs_pod_found found;
    struct kvfs_pod_entry entry = entry_of(1, 10, 5, 100, 17), directory = directory_of(2, 11, 6);

    CHECK(kvfs_pod_attach(kvfs_pod_fd(pod), SECRET, &attached) == 0);
    CHECK(find(pod, 1, &found) == -ENOENT && find(attached, 1, &found) == -ENOENT);
    CHECK(kvfs_pod_put(pod, &entry) == 0 && kvfs_pod_put(pod, &directory) == 0);
    CHECK(find(pod, 1, &found) == 0 && is(&found, &entry) && find(attached, 1, &found) == 0 && is(&found, &entry));
    CHECK(find(attached, 2, &found) == 0 && is(&found, &directory));
    CHECK(find(attached, 3, &found) == -ENOENT && version_of(pod, 1) == 10 && version_of(pod, 2) == 11 && version_of(pod, 3) == 0);
    check_accounts(pod);
    kvfs_pod_detach(attached);
    kvfs_pod_destroy(pod);
}

static void test_the_highest_version_counts(void) {
    struct kvfs_pod *pod = create(1000, 64);
    struct kvfs_pod_found found;
    struct kvfs_pod_entry first = entry_of(1, 10, 5, 100, 17), second = entry_of(1, 20, 20, 50, 9), copy = entry_of(1, 20, 21, 60, 3);

    CHECK(kvfs_pod_put(pod, &second) == 0 && kvfs_pod_put(pod, &second) == 0 && kvfs_pod_put(pod, &first) == -ESTALE);
    CHECK(find(pod, 1, &found) == 0 && is(&found, &second));
    /* Of one version the younger segment counts, in whatever order they come. */
    CHECK(kvfs_pod_put(pod, &copy) == 0 && find(pod, 1, &found) == 0 && is(&found, &copy));
    CHECK(kvfs_pod_put(pod, &second) == -ESTALE && find(pod, 1, &found) == 0 && is(&found, &copy));
    CHECK(remove_key(pod, 1, 19) == -ESTALE && find(pod, 1, &found) == 0);
    CHECK(remove_key(pod, 1, 20) == 0 && find(pod, 1, &found) == -ENOENT && version_of(pod, 1) == 0);
    /* A late `here` of what has gone is refused, also of what was never seen. */
    CHECK(kvfs_pod_put(pod, &second) == -ESTALE && find(pod, 1, &found) == -ENOENT);
    second = entry_of(2, 30, 20, 50, 11);
    CHECK(remove_key(pod, 2, 30) == 0 && kvfs_pod_put(pod, &second) == -ESTALE);
    second.version = 31;
    CHECK(kvfs_pod_put(pod, &second) == 0 && find(pod, 2, &found) == 0 && is(&found, &second));
    check_accounts(pod);
    kvfs_pod_destroy(pod);
}

static void test_a_life_that_ends_takes_its_entries_with_it(void) {
    struct kvfs_pod *pod = create(1000, 64);
    struct kvfs_pod_found found;

    for (uint64_t i = 0; i < 300; i++) {
        struct kvfs_pod_entry entry = entry_of(i, 10 + i, i % 2 ? 5 : 20, 100, 1 + (uint32_t)i);
        CHECK(kvfs_pod_put(pod, &entry) == 0);
    }
    CHECK(kvfs_pod_life(pod, 5, 99, 1) == -ESTALE && kvfs_pod_life(pod, 5, 100, 0) == 0);
    CHECK(kvfs_pod_life(pod, 5, 100, 1) == 0 && kvfs_pod_life(pod, 5, 100, 1) == 0 && kvfs_pod_life(pod, 5, 100, 0) == -ESTALE);
    CHECK(statistics(pod).entries == 150 && statistics(pod).dead == 150 && statistics(pod).segments == 1);
    for (uint64_t i = 0; i < 300; i++)
        CHECK(find(pod, i, &found) == (i % 2 ? -ENOENT : 0));
    struct kvfs_pod_entry late = entry_of(1000, 500, 5, 100, 9), next = entry_of(1000, 500, 5, 101, 9);
    CHECK(kvfs_pod_put(pod, &late) == -ESTALE && find(pod, 1000, &found) == -ENOENT);
    CHECK(kvfs_pod_put(pod, &next) == 0 && find(pod, 1000, &found) == 0 && is(&found, &next));
    for (uint64_t i = 1; i < 300; i += 2)
        CHECK(find(pod, i, &found) == -ENOENT);
    /* A later generation ends the one before. */
    CHECK(kvfs_pod_life(pod, 20, 200, 0) == 0 && statistics(pod).entries == 1);
    check_accounts(pod);
    CHECK(kvfs_pod_sweep(pod, 2 * pod->constants.buckets) == 300 && statistics(pod).dead == 0);
    check_accounts(pod);
    CHECK(find(pod, 1000, &found) == 0);
    CHECK(kvfs_pod_life(pod, 64, 1, 0) == -EINVAL && kvfs_pod_life(pod, 1, 0, 0) == -EINVAL && kvfs_pod_life(pod, 1, 1ull << 61, 1) == -EINVAL);
    kvfs_pod_destroy(pod);
}

/* The place of the newest version is no more; the place of an older one would be found again. */
static void test_a_record_that_comes_too_late_still_ends_what_it_replaced(void) {
    struct kvfs_pod *pod = create(1000, 64);
    struct kvfs_pod_found found;
    struct kvfs_pod_entry old = entry_of(1, 10, 5, 100, 17), new = entry_of(1, 20, 20, 50, 9);

    CHECK(kvfs_pod_put(pod, &old) == 0 && kvfs_pod_life(pod, 20, 50, 1) == 0);
    CHECK(kvfs_pod_put(pod, &new) == -ESTALE && find(pod, 1, &found) == -ENOENT && kvfs_pod_put(pod, &old) == -ESTALE);
    CHECK(statistics(pod).superseded == 1);
    check_accounts(pod);
    kvfs_pod_destroy(pod);
}

static void test_a_place_that_failed_is_forgotten_for_this_place_alone(void) {
    struct kvfs_pod *pod = create(1000, 64);
    struct kvfs_pod_found found;
    struct kvfs_pod_entry entry = entry_of(1, 10, 5, 100, 17);

    CHECK(kvfs_pod_forget(pod, entry.key_low, entry.key_high, 5, 17) == -ENOENT);
    CHECK(kvfs_pod_put(pod, &entry) == 0);
    CHECK(kvfs_pod_forget(pod, entry.key_low, entry.key_high, 5, 18) == -ENOENT && find(pod, 1, &found) == 0);
    CHECK(kvfs_pod_forget(pod, entry.key_low, entry.key_high, 5, 17) == 0 && find(pod, 1, &found) == -ENOENT);
    CHECK(kvfs_pod_put(pod, &entry) == 0 && find(pod, 1, &found) == 0);
    check_accounts(pod);
    kvfs_pod_destroy(pod);
}

static void test_an_avoided_segment_has_no_entries_for_a_while(void) {
    struct kvfs_pod *pod = create(1000, 256), *attached, *other;
    struct kvfs_pod_found found;
    struct kvfs_pod_entry entry = entry_of(1, 10, 5, 100, 17), neighbour = entry_of(2, 10, 6, 100, 17), same_place = entry_of(3, 10, 5 + 64, 1, 1);

    CHECK(kvfs_pod_put(pod, &entry) == 0 && kvfs_pod_put(pod, &neighbour) == 0 && kvfs_pod_put(pod, &same_place) == 0);
    CHECK(kvfs_pod_attach(kvfs_pod_fd(pod), SECRET, &attached) == 0 && kvfs_pod_attach(kvfs_pod_fd(pod), SECRET, &other) == 0);
    kvfs_pod_avoid(attached, 5, now_ns() + 3600000000000);
    CHECK(find(attached, 1, &found) == -ENOENT && find(attached, 2, &found) == 0 && find(attached, 3, &found) == 0);
    CHECK(find(other, 1, &found) == 0 && find(pod, 1, &found) == 0);
    kvfs_pod_avoid(attached, 5, 0);
    CHECK(find(attached, 1, &found) == 0);
    /* The daemon avoids for all. */
    kvfs_pod_avoid(pod, 5, now_ns() + 3600000000000);
    CHECK(find(pod, 1, &found) == -ENOENT && find(attached, 1, &found) == -ENOENT && find(other, 1, &found) == -ENOENT &&
          find(other, 2, &found) == 0);
    kvfs_pod_avoid(pod, 5, now_ns() - 1);
    CHECK(find(other, 1, &found) == 0);
    kvfs_pod_avoid(pod, 5, now_ns() + 3600000000000);
    CHECK(find(other, 1, &found) == -ENOENT);
    kvfs_pod_avoid_none(pod);
    CHECK(find(other, 1, &found) == 0 && find(pod, 1, &found) == 0);
    kvfs_pod_avoid(pod, 256, 1);
    kvfs_pod_detach(attached);
    kvfs_pod_detach(other);
    kvfs_pod_destroy(pod);
}

static void test_what_cannot_be_is_refused(void) {
    struct kvfs_pod *pod = create(1000, 64);
    struct kvfs_pod_config config = {.entries_max = 10, .segment_count = 64, .segment_pages = PAGES, .lot = LOT, .nodes = NODES}, bad;
    struct kvfs_pod *none;
    struct kvfs_pod_found found;
#define REFUSED(error, field, content)                          \
    do {                                                        \
        struct kvfs_pod_entry entry = entry_of(1, 10, 5, 1, 1); \
        entry.field = content;                                  \
        CHECK(kvfs_pod_put(pod, &entry) == error);              \
    } while (0)
    REFUSED(-EINVAL, version, 0);
    REFUSED(-EINVAL, version, 1ull << 61);
    REFUSED(-EINVAL, generation, 0);
    REFUSED(-EINVAL, size, 1ull << 48);
    REFUSED(-EINVAL, size, 4096 * 503); /* more sums than a page has room for */
    REFUSED(-EINVAL, segment, 64);
    REFUSED(-EINVAL, page, 0);
    REFUSED(-EINVAL, page, PAGES);
    REFUSED(-EINVAL, header_pages, 0);
    REFUSED(-EINVAL, header_pages, PAGES);
    REFUSED(-EINVAL, header_pages, UINT32_MAX);
    REFUSED(-EINVAL, mode, 0120777);
    REFUSED(-EINVAL, mode, 0200644);
    REFUSED(-EINVAL, mode, 0040755);
    REFUSED(-EINVAL, directory, 1);
    REFUSED(-EINVAL, slot, NODES);
    REFUSED(-EPERM, slot, 2);
    REFUSED(-EPERM, slot, OWN);
    REFUSED(-EPERM, segment, 12); /* this node's own */
    REFUSED(0, page, PAGES - 1);
    CHECK(find(pod, 1, &found) == 0 && remove_key(pod, 1, 0) == -EINVAL);
#define IMPOSSIBLE(field, content)                      \
    do {                                                \
        bad = config;                                   \
        bad.field = content;                            \
        CHECK(kvfs_pod_create(&bad, &none) == -EINVAL); \
    } while (0)
    IMPOSSIBLE(entries_max, 0);
    IMPOSSIBLE(entries_max, (1ull << 34) + 1);
    IMPOSSIBLE(segment_count, 0);
    IMPOSSIBLE(segment_count, (1u << 22) + 1);
    IMPOSSIBLE(segment_pages, 1);
    IMPOSSIBLE(segment_pages, (1u << 24) + 1);
    IMPOSSIBLE(lot, 3);
    IMPOSSIBLE(lot, 128);
    IMPOSSIBLE(nodes, 0);
    IMPOSSIBLE(nodes, 4097);
    IMPOSSIBLE(own_slot, NODES);
    config.segment_count = 1u << 22;
    config.segment_pages = 1u << 22;
    CHECK(kvfs_pod_create(&config, &none) == -EINVAL);
    kvfs_pod_destroy(pod);
}

/* Fill it by more than it holds: live entries stay below the limit, the younger half is there nearly whole, and what is found is right. */
static void test_a_full_map_drops_the_oldest(void) {
    enum { MAX = 20000, PUT = 3 * MAX };
    struct kvfs_pod *pod = create(MAX, 1024);
    struct kvfs_pod_found found;
    uint64_t young = 0, old = 0;

    for (uint64_t i = 0; i < 500; i++) {
        struct kvfs_pod_entry directory = directory_of((1ull << 40) + i, 1, 6);
        CHECK(kvfs_pod_put(pod, &directory) == 0);
    }
    for (uint64_t i = 0; i < PUT; i++) {
        struct kvfs_pod_entry entry = entry_of(i, 10 + i, segment_of(i / 50, 1024), 1, 1 + (uint32_t)(i % 4000));
        CHECK(kvfs_pod_put(pod, &entry) == 0);
    }
    struct kvfs_pod_statistics count = statistics(pod);
    CHECK_SAY(count.entries + count.dropped == PUT + 500 && count.entries <= count.capacity && count.entries >= MAX * 95 / 100, "%lu entries",
              count.entries);
    for (uint64_t i = 0; i < PUT; i++) {
        struct kvfs_pod_entry entry = entry_of(i, 10 + i, segment_of(i / 50, 1024), 1, 1 + (uint32_t)(i % 4000));
        int r = find(pod, i, &found);

        CHECK(r == -ENOENT || (r == 0 && is(&found, &entry)));
        young += r == 0 && i >= PUT - MAX / 2;
        old += r == 0 && i < MAX;
    }
    CHECK_SAY(young > MAX / 2 * 9 / 10 && old < MAX / 5, "%lu young, %lu old", young, old);
    for (uint64_t i = 0; i < 500; i++)
        CHECK(find(pod, (1ull << 40) + i, &found) == 0 && found.directory);
    /* A record that is older than all in its buckets is refused. */
    struct kvfs_pod_entry late = entry_of(PUT + 1, 2, 5, 1, 1);
    CHECK(kvfs_pod_put(pod, &late) == -ENOSPC);
    check_accounts(pod);
    kvfs_pod_destroy(pod);
}

static void test_shapes_are_counted_and_used_again(void) {
    struct kvfs_pod *pod = create(20000, 64);
    struct kvfs_pod_found found;
    struct kvfs_pod_entry entry;

    for (uint64_t i = 0; i < 5000; i++) {
        entry = entry_of(i, 10, 5, 1, 1);
        entry.uid = (uint32_t)i;
        CHECK(kvfs_pod_put(pod, &entry) == (i < KVFS_POD_SHAPES_MAX ? 0 : -ENOSPC));
    }
    CHECK(statistics(pod).shapes == KVFS_POD_SHAPES_MAX && statistics(pod).shapes_full == 5000 - KVFS_POD_SHAPES_MAX);
    /* One that cannot be applied still ends the entry that it replaces. */
    entry = entry_of(9, 11, 5, 1, 1);
    entry.uid = 99999;
    CHECK(kvfs_pod_put(pod, &entry) == -ENOSPC && find(pod, 9, &found) == -ENOENT);
    CHECK(kvfs_pod_put(pod, &entry) == 0 && find(pod, 9, &found) == 0 && is(&found, &entry));
    for (uint64_t i = 0; i < 3000; i++)
        CHECK(remove_key(pod, i, 20) == 0);
    CHECK(statistics(pod).shapes == KVFS_POD_SHAPES_MAX - 3000);
    for (uint64_t i = 10000; i < 13000; i++) {
        entry = entry_of(i, 10, 5, 1, 1);
        entry.gid = (uint32_t)i;
        CHECK(kvfs_pod_put(pod, &entry) == 0 && find(pod, i, &found) == 0 && is(&found, &entry));
    }
    for (uint64_t i = 3000; i < KVFS_POD_SHAPES_MAX; i++) {
        entry = entry_of(i, 10, 5, 1, 1);
        entry.uid = (uint32_t)i;
        CHECK(find(pod, i, &found) == 0 && is(&found, &entry));
    }
    check_accounts(pod);
    kvfs_pod_destroy(pod);
}

/* A segment that lives 1,000 times: no entry of a life comes back when its tag does, also where the sweep lags behind. */
static void test_a_tag_comes_again_after_a_sweep(void) {
    static const uint64_t sizes[] = {500, 3000000};

    for (int round = 0; round < 2; round++) {
        struct kvfs_pod *pod = create(sizes[round], 64);
        struct kvfs_pod_found found;
        uint64_t waited = 0;

        for (uint64_t life = 1; life <= 1000; life++) {
            struct kvfs_pod_entry entry = entry_of(life, life, 5, life, 1);
            int r = kvfs_pod_put(pod, &entry);

            CHECK(r == 0 || (r == -EAGAIN && round == 1));
            waited += r != 0;
            CHECK(find(pod, life, &found) == (r ? -ENOENT : 0));
            for (uint64_t before = life > 300 ? life - 300 : 1; before < life; before++)
                CHECK(find(pod, before, &found) == -ENOENT);
        }
        CHECK(round == 0 ? waited == 0 && statistics(pod).sweeps > 0 : waited == statistics(pod).waiting);
        /* A segment that waited goes on after the sweep. */
        while (statistics(pod).sweeps < 20)
            kvfs_pod_sweep(pod, pod->constants.buckets);
        struct kvfs_pod_entry entry = entry_of(5000, 5000, 5, 5000, 1);
        CHECK(kvfs_pod_put(pod, &entry) == 0 && find(pod, 5000, &found) == 0);
        printf("   %lu entries: %lu of 1000 lives waited, %lu sweeps\n", sizes[round], waited, statistics(pod).sweeps);
        kvfs_pod_destroy(pod);
    }
}

static void test_a_repeat_ends_what_the_owner_no_longer_has(void) {
    struct kvfs_pod *pod = create(10000, 64);
    struct kvfs_pod_found found;
    struct kvfs_pod_entry entry;

    CHECK(kvfs_pod_repeat_begin(pod, OWN) == -EINVAL && kvfs_pod_repeat_begin(pod, NODES) == -EINVAL && kvfs_pod_repeat_end(pod, 1) == 0);
    for (int round = 0; round < 3; round++) {
        uint64_t base = 10000u * (unsigned)round;

        for (uint64_t i = base; i < base + 1000; i++) {
            entry = entry_of(i, 10, i % 2 ? 5 : 20, 1, 1 + (uint32_t)(i % 1000)); /* of slots 1 and 5 */
            CHECK(kvfs_pod_put(pod, &entry) == 0);
            entry = directory_of(i + 5000, 10, i % 2 ? 1 : 5);
            CHECK(kvfs_pod_put(pod, &entry) == 0);
        }
        CHECK(kvfs_pod_repeat_begin(pod, 1) == 0);
        /* Interrupted by another beginning: what was confirmed does not count. */
        for (uint64_t i = base + 501; round == 2 && i < base + 1000; i += 2) {
            entry = entry_of(i, 10, 5, 1, 1 + (uint32_t)(i % 1000));
            CHECK(kvfs_pod_put(pod, &entry) == 0);
        }
        if (round == 2)
            CHECK(kvfs_pod_repeat_begin(pod, 1) == 0);
        for (uint64_t i = base + 1; i < base + 500; i += 2) {
            entry = entry_of(i, 10, 5, 1, 1 + (uint32_t)(i % 1000));
            CHECK(kvfs_pod_put(pod, &entry) == 0);
            entry = directory_of(i + 5000, 10, 1);
            CHECK(kvfs_pod_put(pod, &entry) == 0);
        }
        CHECK(kvfs_pod_repeat_end(pod, 1) == (round ? 1000 : 500));
        for (uint64_t i = base; i < base + 1000; i++) {
            int expected = i % 2 && i >= base + 500 ? -ENOENT : 0;
            CHECK(find(pod, i, &found) == expected && find(pod, i + 5000, &found) == expected);
        }
        check_accounts(pod);
    }
    kvfs_pod_destroy(pod);
}

static void test_what_is_no_map_is_refused(void) {
    struct kvfs_pod *pod = create(1000, 64), *attached;
    struct pod_constants constants;
    int fd = memfd_create("pod", MFD_ALLOW_SEALING);
    uint8_t *memory;

    CHECK(kvfs_pod_attach(kvfs_pod_fd(pod), SECRET + 1, &attached) == -EBADMSG && kvfs_pod_attach(-1, SECRET, &attached) == -EBADF);
    CHECK(mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, kvfs_pod_fd(pod), 0) == MAP_FAILED);
    CHECK(fd >= 0 && ftruncate(fd, (off_t)pod->constants.size) == 0);
    memory = mmap(NULL, pod->constants.size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    CHECK(memory != MAP_FAILED);
    memcpy(memory, pod->memory, PAGE);
    CHECK(kvfs_pod_attach(fd, SECRET, &attached) == -EBADMSG); /* it could be cut off */
    CHECK(fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK) == 0 && kvfs_pod_attach(fd, SECRET, &attached) == 0);
    kvfs_pod_detach(attached);
    for (uint64_t i = 0; i < sizeof(constants); i++) {
        memory[i] ^= 1;
        CHECK(kvfs_pod_attach(fd, SECRET, &attached) == -EBADMSG);
        memory[i] ^= 1;
    }
    /* Signed by who has the secret, and still impossible. */
    constants = pod->constants;
    constants.entries_max = 1ull << 33;
    constants.checksum = pod_checksum(&constants, SECRET);
    memcpy(memory, &constants, sizeof(constants));
    CHECK(kvfs_pod_attach(fd, SECRET, &attached) == -EBADMSG);
    constants.segment_pages = 0;
    constants.checksum = pod_checksum(&constants, SECRET);
    memcpy(memory, &constants, sizeof(constants));
    CHECK(kvfs_pod_attach(fd, SECRET, &attached) == -EBADMSG);
    munmap(memory, pod->constants.size);
    close(fd);
    kvfs_pod_detach(NULL);
    kvfs_pod_destroy(pod);
    kvfs_pod_destroy(NULL);
}

/* Readers believe nothing: with anything in the memory, what they return is within the limits. */
static void test_no_content_breaks_a_reader(void) {
    struct kvfs_pod *pod = create(100, 64), *attached;
    struct kvfs_pod_found found;
    uint64_t state = 3, hits = 0;

    CHECK(kvfs_pod_attach(kvfs_pod_fd(pod), SECRET, &attached) == 0);
    for (int round = 0; round < 300; round++) {
        for (uint64_t i = PAGE; i < pod->constants.size; i += 8)
            *(uint64_t *)(void *)(pod->memory + i) = random_below(&state, 4) ? random_next(&state) : 0;
        for (uint64_t i = 0; i < 64; i++) {
            set(&pod->segments[i].generation, random_below(&state, 1000));
            if (random_below(&state, 4))
                set(&pod->segments[i].avoided_until_ns, 0);
        }
        for (uint64_t i = 0; i < 100; i++) {
            uint64_t low, high;
            struct pod_place place;
            struct pod_value value = {.place = random_below(&state, 65 * PAGES), .shape = (uint32_t)random_below(&state, POD_SHAPES)};

            key_of(i, &low, &high);
            place = pod_place(pod, low, high);
            value.tag = (uint8_t)get(&pod->segments[random_below(&state, 64)].state);
            set(&pod->buckets[place.buckets[i % 2]].entries[i % 4].fingerprint, place.fingerprint);
            set(&pod->buckets[place.buckets[i % 2]].entries[i % 4].word, i % 3 ? pod_pack(value) ^ place.mask : random_next(&state));
            int r = kvfs_pod_find(attached, low, high, &found);
            CHECK(r == 0 || r == -ENOENT || r == -EAGAIN);
            hits += r == 0;
            CHECK(r || found.directory || (found.segment < 64 && found.page < PAGES));
        }
    }
    CHECK_SAY(hits > 20, "%lu", hits);
    kvfs_pod_detach(attached);
    kvfs_pod_destroy(pod);
}

/* ---- a model: one array a number ---- */

enum { MODEL_KEYS = 3000, MODEL_SEGMENTS = 64 };
struct model {
    uint64_t version[MODEL_KEYS]; /* of entry or gone; 0: none known */
    struct kvfs_pod_entry entry[MODEL_KEYS];
    bool here[MODEL_KEYS];
    uint64_t generation[MODEL_SEGMENTS];
    bool ended[MODEL_SEGMENTS];
};

static bool model_live(const struct model *model, uint64_t key) {
    const struct kvfs_pod_entry *entry = &model->entry[key];

    return model->here[key] && (entry->directory || (!model->ended[entry->segment] && model->generation[entry->segment] == entry->generation));
}

static int model_life(struct model *model, uint32_t segment, uint64_t generation, bool ended) {
    if (generation < model->generation[segment] || (generation == model->generation[segment] && model->ended[segment] && !ended))
        return -ESTALE;
    model->generation[segment] = generation;
    model->ended[segment] = ended;
    return 0;
}

/* The map may know less: a dead entry's or a gone's version is lost with it. Here room is plenty, and no sweep comes. */
static int model_put(struct model *model, uint64_t key, const struct kvfs_pod_entry *entry) {
    int r = entry->directory ? 0 : model_life(model, entry->segment, entry->generation, false);
    bool live = model_live(model, key);

    if (!r && entry->version < model->version[key])
        r = -ESTALE;
    if (!r && entry->version == model->version[key] && (!model->here[key] || (live && memcmp(entry, &model->entry[key], sizeof(*entry)) != 0)))
        CHECK(0); /* the test gives no version twice */
    if (r) {
        if (live && entry->version > model->version[key]) {
            model->here[key] = false;
            model->version[key] = entry->version - 1;
        }
        return r;
    }
    model->version[key] = entry->version;
    model->entry[key] = *entry;
    model->here[key] = true;
    return 0;
}

static void test_a_model_agrees(void) {
    for (uint64_t seed = 1; seed <= 6; seed++) {
        struct kvfs_pod *pod = create(MODEL_KEYS * 2, MODEL_SEGMENTS);
        struct model *model = calloc(1, sizeof(*model));
        struct kvfs_pod_found found;
        uint64_t state = seed, clock = 1000;

        for (uint32_t i = 0; i < MODEL_SEGMENTS; i++)
            model->generation[i] = 0;
        for (int i = 0; i < 60000; i++) {
            uint64_t key = random_below(&state, MODEL_KEYS), version = ++clock - random_below(&state, 3) * random_below(&state, 500), low, high;
            uint32_t segment = segment_of(random_next(&state), MODEL_SEGMENTS);
            uint64_t generation = model->generation[segment] ? model->generation[segment] : 1;

            if (version == model->version[key])
                version = ++clock;
            switch (random_below(&state, 12)) {
            case 0:
                CHECK(remove_key(pod, key, version) == (version >= model->version[key] ? 0 : -ESTALE));
                if (version >= model->version[key]) {
                    model->here[key] = false;
                    model->version[key] = version;
                }
                break;
            case 1:
                if (random_below(&state, 20) == 0) {
                    bool ended = random_below(&state, 2);
                    generation += random_below(&state, 3) - 1;
                    if (!generation)
                        break;
                    CHECK(kvfs_pod_life(pod, segment, generation, ended) == model_life(model, segment, generation, ended));
                }
                break;
            case 2: {
                struct kvfs_pod_entry directory = directory_of(key, version, (uint16_t)(random_below(&state, 2) ? 1 : 6));
                CHECK(kvfs_pod_put(pod, &directory) == model_put(model, key, &directory));
                break;
            }
            case 3:
                key_of(key, &low, &high);
                if (model_live(model, key) && !model->entry[key].directory) {
                    CHECK(kvfs_pod_forget(pod, low, high, model->entry[key].segment, model->entry[key].page) == 0);
                    model->here[key] = false;
                    model->version[key] = 0;
                }
                break;
            default: {
                struct kvfs_pod_entry entry;
                if (model->ended[segment] && random_below(&state, 4))
                    generation++;
                entry = entry_of(key, version, segment, generation, 1 + (uint32_t)random_below(&state, PAGES - 1));
                int expected = model_put(model, key, &entry), r = kvfs_pod_put(pod, &entry);
                CHECK_SAY(r == expected, "seed %lu, step %d: %d, not %d", seed, i, r, expected);
            }
            }
            key = random_below(&state, MODEL_KEYS);
            int r = find(pod, key, &found);
            CHECK_SAY(r == (model_live(model, key) ? 0 : -ENOENT), "seed %lu, step %d, key %lu: %d", seed, i, key, r);
            CHECK(r || is(&found, &model->entry[key]));
            CHECK(version_of(pod, key) == (r ? 0 : model->version[key]));
        }
        check_accounts(pod);
        CHECK(statistics(pod).dropped == 0 && statistics(pod).waiting == 0);
        for (uint64_t key = 0; key < MODEL_KEYS; key++)
            CHECK(find(pod, key, &found) == (model_live(model, key) ? 0 : -ENOENT));
        free(model);
        kvfs_pod_destroy(pod);
    }
}

int main(void) {
    RUN(test_an_entry_is_found_as_it_was_put);
    RUN(test_the_highest_version_counts);
    RUN(test_a_life_that_ends_takes_its_entries_with_it);
    RUN(test_a_record_that_comes_too_late_still_ends_what_it_replaced);
    RUN(test_a_place_that_failed_is_forgotten_for_this_place_alone);
    RUN(test_an_avoided_segment_has_no_entries_for_a_while);
    RUN(test_what_cannot_be_is_refused);
    RUN(test_a_full_map_drops_the_oldest);
    RUN(test_shapes_are_counted_and_used_again);
    RUN(test_a_tag_comes_again_after_a_sweep);
    RUN(test_a_repeat_ends_what_the_owner_no_longer_has);
    RUN(test_what_is_no_map_is_refused);
    RUN(test_no_content_breaks_a_reader);
    RUN(test_a_model_agrees);
    return 0;
}
