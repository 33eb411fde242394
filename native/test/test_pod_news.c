/* sources: pod block/block_table.c block/block_table_reader.c block/checksum.c block/checksum_avx2.c block/checksum_avx512.c */
/* The news: each change is told once, when it is due, and what nobody needs to know is not told. */
#include "pod/pod_layout.h"

#include <poll.h>

#include "check.h"

#define SECRET 42
#define START 77
#define SLOT 5
#define MS 1000000ull
#define SECOND 1000000000ull

static uint8_t batch[KVFS_POD_BATCH_SIZE_MAX];
static struct kvfs_news_taken taken;

static struct kvfs_news *create(uint64_t bytes) {
    struct kvfs_news_config config = {.bytes_max = bytes, .secret = SECRET, .start = START, .slot = SLOT};
    struct kvfs_news *news;

    CHECK(kvfs_news_create(&config, &news) == 0);
    return news;
}

static struct kvfs_news_item item_of(uint8_t kind, uint64_t key, uint64_t version, uint64_t hold_ns) {
    struct kvfs_news_item item = {.key_low = key, .key_high = ~key, .version = version, .hold_ns = hold_ns, .kind = kind};

    if (kind == KVFS_POD_HERE) {
        item.generation = 100;
        item.size = 4096;
        item.segment = 7;
        item.page = 1 + (uint32_t)key % 1000;
        item.header_pages = 1;
        item.mode = 0100644;
        item.flags = KVFS_NEWS_KEYED;
    } else if (kind == KVFS_POD_DIRECTORY_HERE) {
        item.mode = 0040755;
    }
    return item;
}

static void add(struct kvfs_news *news, uint8_t kind, uint64_t key, uint64_t version, uint8_t flags, uint64_t hold_ns) {
    struct kvfs_news_item item = item_of(kind, key, version, hold_ns);

    item.flags |= flags;
    kvfs_news_add(news, &item);
}

static struct kvfs_pod_batch *head(void) { return (struct kvfs_pod_batch *)(void *)batch; }
static struct kvfs_pod_batch_segment *segments(void) { return (void *)(batch + sizeof(struct kvfs_pod_batch)); }
static struct kvfs_pod_batch_shape *shapes(void) { return (void *)(segments() + head()->segment_count); }
static struct kvfs_pod_batch_record *records(void) { return (void *)(shapes() + head()->shape_count); }

/* Returns the count of records, -1: no batch. */
static int take(struct kvfs_news *news, uint64_t now) {
    struct kvfs_pod_batch out;
    int64_t size = kvfs_news_take(news, now, batch, sizeof(batch), &taken);

    CHECK(size >= 0);
    if (!size)
        return -1;
    CHECK(kvfs_pod_batch_check(batch, (uint64_t)size, SECRET, &out) == 0 && out.start == START && out.slot == SLOT);
    CHECK(out.number == taken.number && out.record_count == taken.record_count);
    return (int)out.record_count;
}

static bool is(int index, uint8_t kind, uint64_t key, uint64_t version) {
    const struct kvfs_pod_batch_record *record = &records()[index];

    return (record->page_kind >> 24 & 127) == kind && record->key_low == key && record->key_high == ~key && record->version == version;
}

static bool readable(struct kvfs_news *news) {
    struct pollfd poll_fd = {.fd = kvfs_news_fd(news), .events = POLLIN};

    return poll(&poll_fd, 1, 0) == 1;
}

static struct kvfs_news_statistics statistics(struct kvfs_news *news) {
    struct kvfs_news_statistics out;

    kvfs_news_statistics(news, &out);
    return out;
}

static void test_what_is_due_is_told_in_order(void) {
    struct kvfs_news *news = create(1 << 20);
    uint64_t before = now_ns();

    CHECK(!readable(news) && take(news, before + SECOND) == -1 && taken.next_due_ns == UINT64_MAX);
    add(news, KVFS_POD_HERE, 1, 11, 0, 20 * MS);
    add(news, KVFS_POD_HERE, 2, 12, 0, SECOND);
    add(news, KVFS_POD_GONE, 3, 13, 0, 20 * MS);
    add(news, KVFS_POD_DIRECTORY_HERE, 4, 14, 0, 0);
    add(news, KVFS_POD_DIRECTORY_GONE, 5, 15, 0, 20 * MS);
    CHECK(readable(news));
    CHECK(take(news, now_ns()) == 1 && is(0, KVFS_POD_DIRECTORY_HERE, 4, 14) && taken.number == 0 && taken.version_max == 14);
    CHECK(taken.next_due_ns >= before + 20 * MS && taken.next_due_ns <= now_ns() + 25 * MS);
    CHECK(take(news, before + 19 * MS) == -1 && !readable(news));
    CHECK(take(news, now_ns() + 30 * MS) == 3 && taken.number == 1);
    CHECK(is(0, KVFS_POD_HERE, 1, 11) && is(1, KVFS_POD_GONE, 3, 13) && is(2, KVFS_POD_DIRECTORY_GONE, 5, 15));
    CHECK(head()->segment_count == 1 && segments()[0].generation == 100 && segments()[0].segment == 7 && segments()[0].flags == 0);
    CHECK(head()->shape_count == 1 && shapes()[0].size == 4096 && shapes()[0].header_pages == 1 && shapes()[0].mode == 0100644);
    CHECK(records()[0].page_kind == (2 | (uint32_t)(KVFS_POD_HERE | KVFS_POD_KEYED) << 24));
    CHECK(take(news, now_ns() + 900 * MS) == -1 && take(news, now_ns() + 1100 * MS) == 1 && is(0, KVFS_POD_HERE, 2, 12) && taken.number == 4);
    CHECK(taken.next_due_ns == UINT64_MAX && taken.lost == 0);
    CHECK(kvfs_news_take(news, 0, batch, sizeof(batch) - 1, &taken) == -ENOSPC);
    kvfs_news_destroy(news);
}

static void test_the_last_item_of_a_key_counts(void) {
    struct kvfs_news *news = create(1 << 20);

    add(news, KVFS_POD_HERE, 1, 11, 0, SECOND);
    add(news, KVFS_POD_HERE, 2, 12, 0, 20 * MS);
    add(news, KVFS_POD_HERE, 1, 13, 0, 20 * MS); /* due earlier now */
    add(news, KVFS_POD_GONE, 2, 14, 0, SECOND);  /* due as before */
    add(news, KVFS_POD_HIT, 1, 3, 0, 20 * MS);
    add(news, KVFS_POD_HIT, 1, 4, 0, 20 * MS);
    CHECK(take(news, now_ns() + 30 * MS) == 3 && taken.version_max == 14);
    CHECK(is(0, KVFS_POD_HERE, 1, 13) && is(1, KVFS_POD_GONE, 2, 14) && is(2, KVFS_POD_HIT, 1, 7));
    CHECK(take(news, UINT64_MAX - 1) == -1);
    kvfs_news_destroy(news);
}

static void test_what_came_and_went_unseen_is_not_told(void) {
    struct kvfs_news *news = create(1 << 20);

    add(news, KVFS_POD_HERE, 1, 11, KVFS_NEWS_FIRST | KVFS_NEWS_HIDDEN, SECOND);
    add(news, KVFS_POD_HERE, 1, 12, KVFS_NEWS_HIDDEN, SECOND); /* written again: still nobody knew the name */
    add(news, KVFS_POD_GONE, 1, 13, 0, 20 * MS);
    add(news, KVFS_POD_HERE, 2, 13, KVFS_NEWS_FIRST, 20 * MS); /* the name that it was given */
    CHECK(take(news, now_ns() + 2 * SECOND) == 1 && is(0, KVFS_POD_HERE, 2, 13) && statistics(news).vanished == 1);
    /* Told before: then its end is told. */
    add(news, KVFS_POD_HERE, 2, 14, 0, 20 * MS);
    add(news, KVFS_POD_GONE, 2, 15, 0, 20 * MS);
    add(news, KVFS_POD_HERE, 2, 16, KVFS_NEWS_FIRST, 20 * MS);
    add(news, KVFS_POD_GONE, 2, 17, 0, 20 * MS);
    CHECK(take(news, now_ns() + 2 * SECOND) == 1 && is(0, KVFS_POD_GONE, 2, 17));
    add(news, KVFS_POD_DIRECTORY_HERE, 3, 18, KVFS_NEWS_FIRST, 20 * MS);
    add(news, KVFS_POD_DIRECTORY_GONE, 3, 19, 0, 20 * MS);
    CHECK(take(news, now_ns() + 2 * SECOND) == -1 && statistics(news).held == 0);
    kvfs_news_destroy(news);
}

static void test_lives_are_told_before_the_records_of_their_batch(void) {
    struct kvfs_news *news = create(1 << 20);

    add(news, KVFS_POD_HERE, 1, 11, 0, 20 * MS); /* segment 7, generation 100 */
    kvfs_news_life(news, 8, 50, 0);
    kvfs_news_life(news, 7, 100, 1);
    kvfs_news_life(news, 7, 101, 0);
    CHECK(take(news, now_ns() + SECOND) == 1 && head()->segment_count == 3);
    CHECK(segments()[0].segment == 7 && segments()[0].generation == 100 && segments()[0].flags == 1);
    CHECK(segments()[1].segment == 8 && segments()[1].generation == 50 && segments()[1].flags == 0);
    CHECK(segments()[2].segment == 7 && segments()[2].generation == 101 && segments()[2].flags == 0 && records()[0].segment == 0);
    kvfs_news_life(news, 9, 60, 1);
    CHECK(take(news, now_ns() + SECOND) == 0 && head()->segment_count == 1 && taken.number == 1);
    add(news, KVFS_POD_GONE, 1, 12, 0, 0);
    CHECK(take(news, now_ns() + SECOND) == 1 && taken.number == 2);
    kvfs_news_destroy(news);
}

static void test_a_flush_leaves_hidden_names_alone(void) {
    struct kvfs_news *news = create(1 << 20);

    for (uint64_t key = 1; key <= 100; key++)
        add(news, KVFS_POD_HERE, key, 10 + key, key % 2 ? KVFS_NEWS_HIDDEN : 0, key % 2 ? SECOND : 20 * MS + key % 7 * 5 * MS);
    CHECK(take(news, 1) == -1);
    for (uint64_t key = 101; key <= 200; key++)
        add(news, KVFS_POD_HERE, key, 10 + key, key % 2 ? KVFS_NEWS_HIDDEN : 0, key % 2 ? SECOND : 20 * MS);
    kvfs_news_flush(news);
    add(news, KVFS_POD_HERE, 300, 400, 0, 20 * MS);
    CHECK(readable(news) && take(news, 1) == 100 && is(0, KVFS_POD_HERE, 2, 12) && is(99, KVFS_POD_HERE, 200, 210));
    CHECK(take(news, 1) == -1 && taken.next_due_ns < now_ns() + 30 * MS);
    CHECK(take(news, now_ns() + 30 * MS) == 1 && is(0, KVFS_POD_HERE, 300, 400));
    CHECK(take(news, now_ns() + SECOND + 5 * MS) == 100);
    kvfs_news_destroy(news);
}

static void test_the_thread_is_woken_no_more_than_it_must(void) {
    struct kvfs_news *news = create(1 << 20);

    CHECK(take(news, 0) == -1 && !readable(news));
    add(news, KVFS_POD_HERE, 1, 11, 0, 20 * MS);
    CHECK(readable(news) && take(news, 0) == -1 && !readable(news));
    /* It will look again in time for all of these. */
    for (uint64_t key = 2; key < 100; key++)
        add(news, KVFS_POD_HERE, key, 11, 0, 20 * MS + MS * key);
    CHECK(!readable(news));
    add(news, KVFS_POD_HERE, 100, 11, 0, 0);
    CHECK(readable(news) && take(news, now_ns()) == 1 && is(0, KVFS_POD_HERE, 100, 11) && take(news, now_ns()) == -1);
    CHECK(statistics(news).wakes == 2 && !readable(news));
    /* A batch, or half a ring. */
    for (uint64_t key = 1000; key < 1000 + KVFS_POD_BATCH_RECORDS_MAX; key++) {
        CHECK(!readable(news));
        add(news, KVFS_POD_HERE, key, 11, 0, SECOND);
    }
    CHECK(readable(news));
    kvfs_news_destroy(news);
}

static void test_what_there_is_no_room_for_is_counted(void) {
    struct kvfs_news_config config = {.bytes_max = 100, .slot = SLOT};
    struct kvfs_news *news;
    uint64_t told = 0, next = 0;

    CHECK(kvfs_news_create(&config, &news) == -EINVAL);
    config.bytes_max = 1 << 20;
    config.slot = KVFS_POD_NODES_MAX;
    CHECK(kvfs_news_create(&config, &news) == -EINVAL);
    news = create(1 << 18);
    for (uint64_t key = 0; key < 5000; key++)
        add(news, KVFS_POD_HERE, key, 1 + key, 0, SECOND);
    uint64_t lost = statistics(news).lost;
    CHECK(lost > 1000 && lost < 4000);
    /* The held items are too many for their memory: some go before they are due. */
    while (take(news, 0) > 0) {
        CHECK(taken.lost == (told ? 0 : lost) && taken.number == next);
        for (uint32_t i = 0; i < taken.record_count; i++)
            CHECK(is((int)i, KVFS_POD_HERE, told + i, 1 + told + i));
        told += taken.record_count;
        next += taken.record_count + taken.lost;
    }
    while (take(news, now_ns() + 2 * SECOND) > 0)
        told += taken.record_count;
    CHECK_SAY(told + lost == 5000, "%lu told, %lu lost", told, lost);
    kvfs_news_destroy(news);
    kvfs_news_destroy(NULL);
}

static void test_who_adds_much_waits_for_half_of_the_queue(void) {
    struct kvfs_news *news = create(1 << 20); /* 4,096 in the ring */

    for (uint64_t key = 0; key < 2048; key++)
        add(news, KVFS_POD_HERE, key, 11, 0, 0);
    CHECK(kvfs_news_pace(news) == 0);
    add(news, KVFS_POD_HERE, 2048, 11, 0, 0);
    CHECK(kvfs_news_pace(news) == -ETIMEDOUT);
    CHECK(take(news, now_ns()) > 0 && kvfs_news_pace(news) == 0 && statistics(news).lost == 0);
    kvfs_news_destroy(news);
}

static void test_batches_are_as_large_as_they_may_be(void) {
    struct kvfs_news *news = create(64 << 20);
    uint64_t told = 0;

    for (uint64_t key = 0; key < 50000; key++) {
        struct kvfs_news_item item = item_of(KVFS_POD_HERE, key, 1 + key, 0);
        if (key >= 20000) /* each with a segment and a shape of its own */
            item.segment = (uint32_t)key, item.uid = (uint32_t)key;
        kvfs_news_add(news, &item);
    }
    while (take(news, UINT64_MAX - 1) > 0) {
        CHECK(told + taken.record_count == 50000 || head()->size > KVFS_POD_BATCH_SIZE_MAX - 72);
        for (uint32_t i = 0; i < taken.record_count; i++) {
            uint64_t key = told + i;
            CHECK(is((int)i, KVFS_POD_HERE, key, 1 + key));
            CHECK(segments()[records()[i].segment].segment == (key >= 20000 ? key : 7));
            CHECK(shapes()[records()[i].shape].uid == (key >= 20000 ? key : 0));
        }
        told += taken.record_count;
    }
    CHECK(told == 50000);
    kvfs_news_destroy(news);
}

/* ---- a model: what a follower of all batches knows is what the owner has, as soon as nothing is held ---- */

enum { KEYS = 400 };

static void test_a_follower_knows_what_the_owner_has(void) {
    uint64_t told = 0;

    for (uint64_t seed = 1; seed <= 20; seed++) {
        struct kvfs_news *news = create(1 << 18);
        uint64_t owner[KEYS] = {0}, follower[KEYS] = {0}, state = seed, version = 1, now = now_ns(), number = 0;

        for (int step = 0; step < 20000; step++) {
            uint64_t key = random_below(&state, KEYS);
            bool hidden = key % 5 == 0;

            version++;
            if (!owner[key] || random_below(&state, 3)) {
                add(news, KVFS_POD_HERE, key, version, (uint8_t)((owner[key] ? 0 : KVFS_NEWS_FIRST) | (hidden ? KVFS_NEWS_HIDDEN : 0)),
                    hidden ? SECOND : 20 * MS);
                owner[key] = version;
            } else {
                add(news, KVFS_POD_GONE, key, version, hidden ? KVFS_NEWS_HIDDEN : 0, hidden ? SECOND : 20 * MS);
                owner[key] = 0;
            }
            if (random_below(&state, 50) && step != 19999)
                continue;
            bool flush = random_below(&state, 10) == 0;
            if (flush)
                kvfs_news_flush(news);
            now = now_ns() + random_below(&state, 30) * MS;
            if (step == 19999)
                now = UINT64_MAX - 1;
            while (take(news, now) > 0) {
                CHECK(taken.number == number && taken.lost == 0);
                number += taken.record_count;
                told += taken.record_count;
                for (uint32_t i = 0; i < taken.record_count; i++) {
                    const struct kvfs_pod_batch_record *record = &records()[i];
                    follower[record->key_low] = (record->page_kind >> 24 & 127) == KVFS_POD_HERE ? record->version : 0;
                }
            }
            for (uint64_t i = 0; flush && i < KEYS; i++)
                CHECK_SAY(i % 5 == 0 || follower[i] == owner[i], "seed %lu, step %d, key %lu", seed, step, i);
        }
        CHECK(memcmp(owner, follower, sizeof(owner)) == 0 && statistics(news).held == 0 && statistics(news).lost == 0);
        kvfs_news_destroy(news);
    }
    CHECK(told > 10000);
}

/* ---- threads ---- */

#if defined(__SANITIZE_THREAD__)
#define ADDED 100000u
#else
#define ADDED 300000u
#endif
#define PRODUCERS 3
static struct kvfs_news *shared;
static _Atomic int finished;

static void *produce(void *argument) {
    uint64_t thread = *(const uint64_t *)argument, state = thread;

    for (uint64_t i = 0; i < ADDED; i++) {
        add(shared, KVFS_POD_HERE, thread * ADDED + i, i + 1, 0, random_below(&state, 3) * MS);
        if (random_below(&state, 1000) == 0)
            kvfs_news_flush(shared);
        if (i % 64 == 0)
            nanosleep(&(struct timespec){.tv_nsec = 1000}, NULL);
    }
    atomic_fetch_add(&finished, 1);
    return NULL;
}

/* It sleeps until it is woken or something is due, as the daemon's thread does: were a wake lost, it would sleep too long. */
static void test_threads_beside_one_another(void) {
    static const uint64_t numbers[PRODUCERS] = {0, 1, 2};
    pthread_t threads[PRODUCERS];
    uint8_t *seen = calloc(PRODUCERS, ADDED);
    uint64_t told = 0, number = 0, late = 0;

    shared = create(256 << 20); /* room for all of them */
    for (int i = 0; i < PRODUCERS; i++)
        CHECK(pthread_create(&threads[i], NULL, produce, (void *)(uintptr_t)&numbers[i]) == 0);
    while (told < (uint64_t)PRODUCERS * ADDED) {
        struct pollfd poll_fd = {.fd = kvfs_news_fd(shared), .events = POLLIN};

        while (take(shared, now_ns()) > 0) {
            CHECK(taken.number == number && taken.lost == 0);
            number += taken.record_count;
            told += taken.record_count;
            for (uint32_t i = 0; i < taken.record_count; i++)
                CHECK(seen[records()[i].key_low]++ == 0);
        }
        if (told == (uint64_t)PRODUCERS * ADDED)
            break;
        uint64_t now = now_ns();
        int timeout = taken.next_due_ns == UINT64_MAX ? 20000 : taken.next_due_ns <= now ? 0 : (int)((taken.next_due_ns - now) / MS + 1);
        CHECK(poll(&poll_fd, 1, timeout) == 1 || timeout < 20000);
        late += timeout == 20000;
    }
    for (int i = 0; i < PRODUCERS; i++)
        CHECK(pthread_join(threads[i], NULL) == 0);
    printf("   %lu items in %lu batches, %lu wakes, slept without end %lu times\n", told, statistics(shared).batches, statistics(shared).wakes, late);
    free(seen);
    kvfs_news_destroy(shared);
}

int main(void) {
    RUN(test_what_is_due_is_told_in_order);
    RUN(test_the_last_item_of_a_key_counts);
    RUN(test_what_came_and_went_unseen_is_not_told);
    RUN(test_lives_are_told_before_the_records_of_their_batch);
    RUN(test_a_flush_leaves_hidden_names_alone);
    RUN(test_the_thread_is_woken_no_more_than_it_must);
    RUN(test_what_there_is_no_room_for_is_counted);
    RUN(test_who_adds_much_waits_for_half_of_the_queue);
    RUN(test_batches_are_as_large_as_they_may_be);
    RUN(test_a_follower_knows_what_the_owner_has);
    RUN(test_threads_beside_one_another);
    return 0;
}
