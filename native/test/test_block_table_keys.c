/* sources: block/block_table.c block/block_table_reader.c */
/* With a poor hash in place of xxh3: keys that meet, and chains without end. */
#include <errno.h>
#include <string.h>

#include "check.h"
#include "block/checksum.h"
#include "table_records.h"

uint64_t kvfs_checksum(const void *data, uint64_t size, uint64_t secret) { return *(const unsigned char *)data + size + secret; }

/* Names of the form "same..." have one key in all directories; others one bucket and one tag, but different keys; "zero" has the key 0. */
void kvfs_name_key(uint64_t parent, const char *name, uint32_t name_size, uint64_t secret, uint64_t *low, uint64_t *high) {
    (void)parent;
    (void)secret;
    *low = *high = 0;
    if (name_size == 4 && !memcmp(name, "zero", 4))
        return;
    *low = 0xabcd000000000000ULL;
    if (name_size < 4 || memcmp(name, "same", 4))
        for (uint32_t i = 0; i < name_size; i++)
            *high = *high * 31 + (unsigned char)name[i];
}

static void put(struct kvfs_table *table, uint64_t inode, uint64_t parent, const char *name) {
    struct kvfs_record record = record_of(inode, parent, 1);

    CHECK(kvfs_table_put(table, &record, name, (uint32_t)strlen(name), 0) == 0);
}

static int find(const struct kvfs_table *table, uint64_t parent, const char *name, struct kvfs_record *out) {
    return kvfs_table_find_name(table, parent, name, (uint32_t)strlen(name), out);
}

static uint64_t ambiguous(const struct kvfs_table *table) {
    struct kvfs_table_statistics statistics;

    kvfs_table_statistics(table, &statistics);
    return statistics.ambiguous;
}

static struct kvfs_table *create(uint64_t records_max) {
    struct kvfs_table *table;

    CHECK(kvfs_table_create(records_max, 1, 1, &table) == 0);
    kvfs_table_set_complete(table, 1);
    return table;
}

static void test_two_names_with_one_key_are_marked_ask(void) {
    struct kvfs_table *table = create(100);
    struct kvfs_record record;

    put(table, 10, 1, "same-a");
    CHECK(find(table, 1, "same-a", &record) == 0 && !(record.flags & KVFS_INODE_ASK));
    put(table, 11, 2, "same-b");
    CHECK(ambiguous(table) == 1);
    CHECK(find(table, 2, "same-b", &record) == 0 && (record.flags & KVFS_INODE_ASK));
    CHECK(find(table, 1, "same-a", &record) == 0 && (record.flags & KVFS_INODE_ASK));
    put(table, 12, 2, "same-b"); /* one directory: a replacement, for all that can be known */
    CHECK(ambiguous(table) == 1);
    kvfs_table_destroy(table);
}

static void test_a_key_of_zero_is_a_name(void) {
    struct kvfs_table *table = create(100);
    struct kvfs_record record;

    put(table, 10, 1, "zero");
    CHECK(find(table, 1, "zero", &record) == 0 && record.inode == 10);
    CHECK(kvfs_table_remove(table, 10, 1) == 0);
    CHECK(find(table, 1, "zero", &record) == -ENOENT);
    CHECK(kvfs_table_find_inode(table, 10, &record) == 0 && (record.flags & KVFS_INODE_NAMELESS));
    kvfs_table_destroy(table);
}

static void test_chains_of_any_length_are_kept_and_walks_are_bounded(void) {
    enum { COUNT = 5000, REACHED = 64 * 9 };
    struct kvfs_table *table = create(COUNT);
    struct kvfs_table_statistics statistics;
    struct kvfs_record record;
    uint64_t seed = 3;
    char name[32];

    for (int round = 0; round < 2; round++) {
        for (uint64_t i = 0; i < COUNT; i++) {
            sprintf(name, "%lu", i);
            put(table, i + 2, 1, name);
        }
        for (uint64_t i = 0; i < COUNT; i++) {
            int rc;

            sprintf(name, "%lu", i);
            rc = find(table, 1, name, &record);
            CHECK(rc == -EAGAIN || (rc == 0 && record.inode == i + 2));
            if (!round)
                CHECK(rc == (i < REACHED ? 0 : -EAGAIN));
            CHECK(kvfs_table_find_inode(table, i + 2, &record) == 0);
        }
        CHECK(find(table, 1, "none", &record) == -EAGAIN);
        for (uint64_t left = COUNT, inode = random_below(&seed, COUNT); left; inode = (inode + 7919) % COUNT, left--)
            CHECK(kvfs_table_remove(table, inode + 2, 0) == 0);
        CHECK(find(table, 1, "none", &record) == -ENOENT);
        kvfs_table_statistics(table, &statistics);
        CHECK(statistics.records == 0 && statistics.overflow_buckets == 0);
    }
    kvfs_table_destroy(table);
}

int main(void) {
    RUN(test_two_names_with_one_key_are_marked_ask);
    RUN(test_a_key_of_zero_is_a_name);
    RUN(test_chains_of_any_length_are_kept_and_walks_are_bounded);
    return 0;
}
