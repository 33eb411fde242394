/* sources: block/block_table.c block/block_table_reader.c block/checksum.c block/checksum_avx2.c block/checksum_avx512.c */
/* One writer renames, replaces, removes and grows as fast as it can. Readers, some in a mapping of their own, must never see a wrong record, nor miss
 * a record that was never removed. */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>

#include "check.h"
#include "table_records.h"

#define SECRET 42
#define READERS 3
#define PARENT 1
#define PERMANENT_NAMES 64  /* "p<i>": always there, replaced all the time. Their inodes are i modulo 64 */
#define PERMANENT_INODES 64 /* renamed and updated all the time, never removed */
#define FIRST_PERMANENT_INODE 2
#define FIRST_REPLACING_INODE 1024
#define FILLER (1ULL << 40) /* inodes that come and go, so that buckets split and chains grow and shrink */

#if defined(__SANITIZE_THREAD__)
#define ROUNDS 60000
#define LOOKUPS_MIN 100000
#else
#define ROUNDS 300000
#define LOOKUPS_MIN 500000
#endif

static struct kvfs_table *table;
static _Atomic int done;
static _Atomic uint64_t lookups[READERS];
/* For each permanent name: the number of the last finished replacement. */
static _Atomic uint64_t finished[PERMANENT_NAMES];
static _Atomic uint64_t versions[PERMANENT_INODES];

static void put(uint64_t inode, uint64_t version, const char *format, uint64_t number, int keep) {
    struct kvfs_record record = record_of(inode, PARENT, version);
    char name[32];

    CHECK(kvfs_table_put(table, &record, name, (uint32_t)sprintf(name, format, number), keep) == 0);
}

static void replace(uint64_t *state) {
    uint64_t name = random_below(state, PERMANENT_NAMES);
    uint64_t before = atomic_load(&finished[name]);
    uint64_t inode = FIRST_REPLACING_INODE + (before + 1) * PERMANENT_NAMES + name;
    int keep = random_below(state, 3) == 0;

    if (random_below(state, 2))
        put(inode, 1, "temporary-%lu", name, 0); /* then it is a rename */
    put(inode, 2, "p%lu", name, keep);
    if (keep)
        CHECK(kvfs_table_remove(table, inode - PERMANENT_NAMES, 0) == 0);
    atomic_store(&finished[name], before + 1);
}

static void rename_permanent(uint64_t *state) {
    uint64_t number = random_below(state, PERMANENT_INODES);
    uint64_t version = atomic_load(&versions[number]) + 1;
    struct kvfs_record record = record_of(FIRST_PERMANENT_INODE + number, PARENT, version);

    switch (random_below(state, 4)) {
    case 0: CHECK(kvfs_table_update(table, &record) == 0); break;
    case 1:
        CHECK(kvfs_table_remove(table, record.inode, 1) == 0); /* the inode stays */
        put(record.inode, version, "r%lu", number, 0);
        break;
    default: put(record.inode, version, version % 2 ? "r%lu" : "s%lu", number, 0);
    }
    atomic_store(&versions[number], version);
}

static void *write_all(void *argument) {
    uint64_t state = *(const uint64_t *)argument;
    uint64_t filled = 0, emptied = 0;

    for (uint64_t round = 0;; round++) {
        int starved = 0;

        replace(&state);
        rename_permanent(&state);
        if (round < ROUNDS) {
            /* Three in, two out. */
            for (int i = 0; i < 3; i++, filled++)
                put(FILLER + filled, 1, "filler-%lu", filled, 0);
            for (int i = 0; i < 2; i++, emptied++)
                CHECK(kvfs_table_remove(table, FILLER + emptied, 0) == 0);
            continue;
        }
        for (int i = 0; i < READERS; i++)
            starved |= atomic_load(&lookups[i]) < LOOKUPS_MIN;
        if (!starved)
            break;
    }
    atomic_store(&done, 1);
    return NULL;
}

struct reader {
    int index;
    const struct kvfs_table *table;
    uint64_t found;
    uint64_t again;
};

static int find(struct reader *reader, const char *format, uint64_t number, struct kvfs_record *out) {
    char name[32];
    int rc = kvfs_table_find_name(reader->table, PARENT, name, (uint32_t)sprintf(name, format, number), out);

    CHECK(rc == 0 || rc == -ENOENT || rc == -EAGAIN);
    reader->found += rc == 0;
    reader->again += rc == -EAGAIN;
    return rc;
}

static void look_once(struct reader *reader, uint64_t *state) {
    uint64_t number = random_below(state, 64);
    uint64_t before, after;
    struct kvfs_record record;
    int rc;

    /* A name that is replaced: never missed, never older than the last replacement that was finished before we looked. */
    before = atomic_load(&finished[number]);
    rc = find(reader, "p%lu", number, &record);
    CHECK(rc != -ENOENT);
    if (rc == 0) {
        after = atomic_load(&finished[number]);
        CHECK((record.inode - FIRST_REPLACING_INODE) % PERMANENT_NAMES == number);
        uint64_t serial = (record.inode - FIRST_REPLACING_INODE) / PERMANENT_NAMES;
        CHECK_SAY(serial >= before && serial <= after + 1, "%lu not in %lu..%lu", serial, before, after + 1);
        CHECK(record.version == 2 && record_is_whole(&record, 0));
    }
    /* An inode that is renamed, loses its name and is updated: never missed, never old. */
    before = atomic_load(&versions[number]);
    rc = kvfs_table_find_inode(reader->table, FIRST_PERMANENT_INODE + number, &record);
    CHECK(rc == 0 || rc == -EAGAIN);
    if (rc == 0) {
        after = atomic_load(&versions[number]);
        CHECK(record.inode == FIRST_PERMANENT_INODE + number && record.version >= before && record.version <= after + 1);
        CHECK(record_is_whole(&record, record.flags & KVFS_INODE_NAMELESS));
    }
    /* Names that may or may not be there lead to their own inode. */
    if (find(reader, random_below(state, 2) ? "r%lu" : "s%lu", number, &record) == 0)
        CHECK(record.inode == FIRST_PERMANENT_INODE + number && record_is_whole(&record, 0));
    if (find(reader, "temporary-%lu", number, &record) == 0)
        CHECK(record.inode % PERMANENT_NAMES == number && record.version == 1 && record_is_whole(&record, 0));
    number = random_below(state, 3 * ROUNDS);
    if (find(reader, "filler-%lu", number, &record) == 0)
        CHECK(record.inode == FILLER + number && record_is_whole(&record, 0));
    rc = find(reader, "never-%lu", number, &record);
    CHECK(rc != 0);
    rc = kvfs_table_find_inode(reader->table, FILLER * 2 + number, &record);
    CHECK(rc != 0);
}

static void *read_all(void *argument) {
    struct reader *reader = argument;
    uint64_t state = (uint64_t)reader->index + 1000;

    while (!atomic_load(&done)) {
        look_once(reader, &state);
        atomic_fetch_add(&lookups[reader->index], 7);
    }
    return NULL;
}

static void test_readers_agree_with_a_writer_at_work(void) {
    struct kvfs_table *attached;
    struct reader readers[READERS];
    pthread_t threads[READERS + 1];
    uint64_t seed = 7;

    CHECK(kvfs_table_create(10000000, SECRET, 1, &table) == 0);
    CHECK(kvfs_table_attach(kvfs_table_fd(table), SECRET, &attached) == 0);
    for (uint64_t i = 0; i < PERMANENT_NAMES; i++)
        put(FIRST_REPLACING_INODE + i, 2, "p%lu", i, 0);
    for (uint64_t i = 0; i < PERMANENT_INODES; i++)
        put(FIRST_PERMANENT_INODE + i, 0, "s%lu", i, 0);
    kvfs_table_set_complete(table, 1);
    CHECK(pthread_create(&threads[READERS], NULL, write_all, &seed) == 0);
    for (int i = 0; i < READERS; i++) {
        readers[i] = (struct reader){.index = i, .table = i % 2 ? table : attached};
        CHECK(pthread_create(&threads[i], NULL, read_all, &readers[i]) == 0);
    }
    for (int i = 0; i <= READERS; i++)
        CHECK(pthread_join(threads[i], NULL) == 0);
    for (int i = 0; i < READERS; i++) {
        printf("   reader %d: %lu lookups, %lu by name found, %lu told to ask\n", i, atomic_load(&lookups[i]), readers[i].found, readers[i].again);
        CHECK(readers[i].found > 0);
        /* Bounded retries give up when the writer sleeps inside a write: seldom. */
        CHECK(readers[i].again * 10 < atomic_load(&lookups[i]));
    }
    kvfs_table_destroy(attached);
    kvfs_table_destroy(table);
}

int main(void) {
    RUN(test_readers_agree_with_a_writer_at_work);
    return 0;
}
