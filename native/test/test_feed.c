/* sources: base block/feed.c block/feed_reader.c */
/* The feed of changes: every record is told or its loss is, in order, to readers beside the writer. No content of the memory breaks a reader. */
#include "block/feed.h"

#include <fcntl.h>
#include <sys/mman.h>

#include "check.h"

#define SIZE ((uint64_t)FEED_SIZE_MIN)
#define READERS 3

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
#define RECORDS 200000u
#else
#define RECORDS 1000000u
#endif

static struct feed *feed;
static _Atomic int written;

/* A record's text follows from its number: a reader can tell whether it is whole. */
static uint32_t text_of(uint64_t number, char text[FEED_TEXT_MAX]) {
    uint64_t state = number;
    uint32_t size = (uint32_t)(random_below(&state, 64) ? random_below(&state, 200) : random_below(&state, FEED_TEXT_MAX + 1));
    memset(text, 'a' + (int)(number % 26), size);
    return size;
}

static void record_add(uint64_t number) {
    char text[FEED_TEXT_MAX];
    struct feed_record record = {.kind = FEED_STORED + number % 4,
                                 .reason = number % 9,
                                 .size = number * 3,
                                 .time_ns = (int64_t)number,
                                 .anchor = number ^ 0xfff,
                                 .text_size = text_of(number, text)};
    feed_add(feed, &record, text);
    CHECK(record.number == number);
}

static void record_check(const struct feed_record *record, const char *text) {
    char wanted[FEED_TEXT_MAX];
    uint64_t number = record->number;
    CHECK(record->kind == FEED_STORED + number % 4 && record->reason == number % 9 && record->size == number * 3);
    CHECK(record->time_ns == (int64_t)number && record->anchor == (number ^ 0xfff));
    CHECK_SAY(record->text_size == text_of(number, wanted) && memcmp(text, wanted, record->text_size) == 0, "record %lu", number);
}

static struct feed_reader attach_at(uint64_t position, uint64_t number) {
    struct feed_reader reader;
    CHECK(feed_attach(feed_fd(feed), SIZE, position, number, &reader) == 0);
    return reader;
}

static struct feed_reader attach(void) {
    uint64_t position, number;
    feed_end(feed, &position, &number);
    return attach_at(position, number);
}

static void test_each_record_is_told_once_and_in_order(void) {
    struct feed_record record;
    char text[FEED_TEXT_MAX];
    uint64_t lost;
    CHECK(feed_create(SIZE, &feed) == 0 && feed_size(feed) == SIZE);
    struct feed_reader first = attach();
    CHECK(feed_read(&first, &record, text, &lost) == 0);
    for (uint64_t number = 1; number <= 20000; number++) {
        record_add(number);
        CHECK(feed_read(&first, &record, text, &lost) == 1 && lost == 0 && record.number == number);
        record_check(&record, text);
        CHECK(feed_read(&first, &record, text, &lost) == 0);
    }
    /* One that comes later is told what comes later. */
    struct feed_reader second = attach();
    record_add(20001);
    CHECK(feed_read(&second, &record, text, &lost) == 1 && lost == 0 && record.number == 20001);
    feed_detach(&first);
    feed_detach(&second);
    feed_destroy(feed);
}

static void test_one_that_was_overrun_is_told_how_many_it_lost(void) {
    struct feed_record record;
    char text[FEED_TEXT_MAX];
    CHECK(feed_create(SIZE, &feed) == 0);
    struct feed_reader reader = attach();
    uint64_t told = 0, lost_all = 0, lost, number = 0;
    for (int round = 0; round < 50; round++) {
        uint64_t state = (uint64_t)round, count = 1 + random_below(&state, 8000);
        while (count--)
            record_add(++number);
        int r;
        while ((r = feed_read(&reader, &record, text, &lost)) == 1) {
            record_check(&record, text);
            told++;
            lost_all += lost;
            CHECK(record.number == told + lost_all);
        }
        CHECK(r == 0 && told + lost_all == number);
    }
    CHECK(lost_all > 0 && told > number / 20);
    feed_detach(&reader);
    feed_destroy(feed);
}

static void *read_all(void *argument) {
    uint64_t pause_every = *(const uint64_t *)argument, told = 0, lost_all = 0, lost;
    struct feed_reader reader = attach_at(0, 0);
    struct feed_record record;
    char text[FEED_TEXT_MAX];
    for (;;) {
        bool done = atomic_load(&written);
        int r = feed_read(&reader, &record, text, &lost);
        CHECK_SAY(r >= 0, "%d", r);
        if (r == 0 && done)
            break;
        if (r == 0)
            continue;
        record_check(&record, text);
        lost_all += lost;
        CHECK_SAY(record.number == ++told + lost_all, "record %lu after %lu and %lu lost", record.number, told, lost_all);
        if (pause_every && told % pause_every == 0)
            nanosleep(&(struct timespec){.tv_nsec = 2000000}, NULL);
    }
    CHECK_SAY(told + lost_all == RECORDS, "%lu told, %lu lost", told, lost_all);
    feed_detach(&reader);
    return NULL;
}

static void test_readers_beside_the_writer(void) {
    static const uint64_t pauses[READERS] = {0, 100, 10000};
    pthread_t threads[READERS];
    CHECK(feed_create(SIZE, &feed) == 0);
    atomic_store(&written, 0);
    for (int i = 0; i < READERS; i++)
        CHECK(pthread_create(&threads[i], NULL, read_all, (void *)(uintptr_t)&pauses[i]) == 0);
    for (uint64_t number = 1; number <= RECORDS; number++)
        record_add(number);
    atomic_store(&written, 1);
    for (int i = 0; i < READERS; i++)
        CHECK(pthread_join(threads[i], NULL) == 0);
    feed_destroy(feed);
}

/* Memory that another process made, with anything in it. */
static int memory_make(uint64_t size, int seals, uint8_t **memory) {
    int fd = memfd_create("feed", MFD_ALLOW_SEALING);
    CHECK(fd >= 0 && ftruncate(fd, (off_t)(PAGE + size)) == 0);
    *memory = mmap(NULL, PAGE + size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    CHECK(*memory != MAP_FAILED && (!seals || fcntl(fd, F_ADD_SEALS, seals) == 0));
    return fd;
}

static void test_what_is_no_feed_is_refused(void) {
    struct feed_reader reader;
    uint8_t *memory;
    uint64_t words[2] = {FEED_MAGIC, SIZE};
    int fd = memory_make(SIZE, 0, &memory);
    memcpy(memory, words, sizeof(words));
    CHECK(feed_attach(fd, SIZE, 0, 0, &reader) == -EBADMSG); /* it could be cut off */
    CHECK(fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK) == 0 && feed_attach(fd, SIZE, 0, 0, &reader) == 0);
    feed_detach(&reader);
    CHECK(feed_attach(fd, SIZE * 2, 0, 0, &reader) == -EBADMSG && feed_attach(fd, SIZE - FEED_CHUNK, 0, 0, &reader) == -EBADMSG);
    CHECK(feed_attach(fd, SIZE, 4, 0, &reader) == -EBADMSG && feed_attach(fd, UINT64_MAX, 0, 0, &reader) == -EBADMSG);
    words[1] = SIZE * 2;
    memcpy(memory, words, sizeof(words));
    CHECK(feed_attach(fd, SIZE, 0, 0, &reader) == -EBADMSG);
    words[0]++, words[1] = SIZE;
    memcpy(memory, words, sizeof(words));
    CHECK(feed_attach(fd, SIZE, 0, 0, &reader) == -EBADMSG);
    munmap(memory, PAGE + SIZE);
    close(fd);
    CHECK(feed_create(SIZE + 8, &feed) == -EINVAL && feed_create(0, &feed) == -EINVAL && feed_create(2ull << 30, &feed) == -EINVAL);
    CHECK(feed_attach(-1, SIZE, 0, 0, &reader) < 0);
}

static void test_no_content_breaks_a_reader(void) {
    uint8_t *memory;
    uint64_t state = 7;
    int fd = memory_make(SIZE, F_SEAL_SHRINK, &memory), errors = 0, told = 0;
    struct feed_header *header = (void *)memory;
    header->magic = FEED_MAGIC;
    header->size = SIZE;
    for (int round = 0; round < 3000; round++) {
        uint64_t *words = (void *)(memory + PAGE), ended = random_below(&state, 4 * SIZE) & ~7ull;
        for (uint64_t i = 0; i < SIZE / 8; i += 1 + random_below(&state, 64)) {
            uint64_t text = random_below(&state, 3) ? random_below(&state, 300) : random_below(&state, 65536);
            words[i] = random_below(&state, 4)   ? (8 * FEED_HEAD_WORDS + round_up(text, 8)) | (random_below(&state, 6) << 32) | text << 48
                       : random_below(&state, 2) ? random_next(&state)
                                                 : 0;
        }
        atomic_store(&header->ended, random_below(&state, 50) ? ended : random_next(&state));
        atomic_store(&header->begun, random_below(&state, 4) ? ended : random_next(&state));
        struct feed_reader reader;
        struct feed_record record;
        char text[FEED_TEXT_MAX];
        uint64_t lost;
        CHECK(feed_attach(fd, SIZE, random_below(&state, 4 * SIZE) & ~7ull, random_below(&state, 100), &reader) == 0);
        for (int i = 0; i < 100; i++) {
            int r = feed_read(&reader, &record, text, &lost);
            CHECK(r == 0 || r == 1 || r == -EBADMSG);
            errors += r < 0;
            told += r == 1;
            if (r == 1)
                CHECK(record.text_size <= FEED_TEXT_MAX && !memchr(text, 0, record.text_size));
            if (r <= 0)
                break;
        }
        feed_detach(&reader);
    }
    CHECK_SAY(errors > 100, "%d errors, %d records", errors, told);
    munmap(memory, PAGE + SIZE);
    close(fd);
}

int main(void) {
    RUN(test_each_record_is_told_once_and_in_order);
    RUN(test_one_that_was_overrun_is_told_how_many_it_lost);
    RUN(test_readers_beside_the_writer);
    RUN(test_what_is_no_feed_is_refused);
    RUN(test_no_content_breaks_a_reader);
    return 0;
}
