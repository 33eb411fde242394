/* sources: base block names */
/* What a commit does to the index, from records that are none: each is refused, and nothing beyond its bytes is read. */
#include <stdio.h>

#include "check.h"
#include "names/names.h"

#define FIRST 5

static uint64_t random_state = 88172645463325252ull;
static uint32_t any(uint32_t below) {
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return (uint32_t)(random_state % below);
}

/* A sealed file with a name, extents and an attribute, at `to`. Returns its size. */
static uint32_t make(uint8_t *to, uint64_t inode) {
    static const char group[] = "user.kvfs.group";
    struct kvfs_inode_record record = {.inode = inode, .parent = 1 + any(3), .kind = KVFS_KIND_FILE, .flags = KVFS_INODE_SEALED, .segment = any(4)};
    char name[32];
    record.name_size = (uint16_t)snprintf(name, sizeof(name), "block-%llu", (unsigned long long)inode);
    record.extent_count = any(4);
    const uint16_t key_size = sizeof(group) - 1;
    const uint32_t value_size = any(20);
    record.xattr_size = value_size ? 6 + key_size + value_size : 0;
    uint64_t at = sizeof(record) + round_up(record.name_size, 8);
    record.record_size = (uint32_t)(at + record.extent_count * sizeof(struct kvfs_extent) + round_up(record.xattr_size, 8));
    memset(to, 0, record.record_size);
    memcpy(to, &record, sizeof(record));
    memcpy(to + sizeof(record), name, record.name_size);
    for (uint32_t i = 0; i < record.extent_count; i++, at += sizeof(struct kvfs_extent))
        memcpy(to + at, &(struct kvfs_extent){.segment = any(6), .page_count = 1}, sizeof(struct kvfs_extent));
    if (value_size) {
        memcpy(to + at, &key_size, 2);
        memcpy(to + at + 2, &value_size, 4);
        memcpy(to + at + 6, group, key_size);
        memset(to + at + 6 + key_size, 'g', value_size);
    }
    return record.record_size;
}

/* The lists are ascending, and bounded by the bytes. */
static void check_lists(const struct kvfs_index_changes *changes) {
    uint64_t before = 0;
    for (uint32_t i = 0; i < KVFS_INDEX_LISTS; i++) {
        const uint64_t *bounds = changes->lists[i].bounds;
        CHECK(bounds[0] == before);
        for (uint64_t k = 0; k < changes->lists[i].count; k++) {
            const uint64_t *one = bounds + 2 * k;
            CHECK(one[0] <= one[1] && one[1] <= one[2] && one[2] <= changes->size);
            if (k) {
                uint64_t last = one[-1] - one[-2], size = one[1] - one[0];
                int order = memcmp(changes->bytes + one[-2], changes->bytes + one[0], last < size ? last : size);
                CHECK(order < 0 || (order == 0 && last < size));
            }
        }
        before = bounds[2 * changes->lists[i].count];
    }
    CHECK(before == changes->size);
}

int main(void) {
    struct kvfs_names *names;
    CHECK(kvfs_names_create(&names) == 0);
    uint8_t record[1024];
    uint64_t size, damaged = 0;
    int error = 0;
    for (uint64_t inode = FIRST; inode < FIRST + 40; inode++) {
        make(record, inode);
        CHECK(kvfs_names_put(names, record, inode % 2) == (inode % 2 ? -ENOENT : 0));
        if (inode % 2)
            CHECK(kvfs_names_load(names, record, ((struct kvfs_inode_record *)(void *)record)->record_size) == 0 &&
                  kvfs_names_remove(names, inode) == 0);
    }
    const void *begun = kvfs_names_commit_begin(names, &size);
    CHECK(begun);
    uint8_t keys[8 * 40];
    CHECK(kvfs_index_known(begun, size, keys) == 20);

    for (uint32_t round = 0; round < 20000; round++) {
        uint8_t all[4096];
        uint32_t whole = 0, count = any(4);
        for (uint32_t i = 0; i < count; i++)
            whole += make(all + whole, FIRST + 2 * i);
        uint32_t left = whole, hits = any(3);
        if (whole && any(3) == 0)
            left = any(whole);
        for (uint32_t i = 0; whole && i < hits; i++)
            all[any(2) ? any(whole) : any(16)] ^= (uint8_t)(1 << any(8));
        uint8_t *exact = malloc(left + 1); /* the sanitizer sees what lies behind */
        CHECK(exact);
        copy_bytes(exact, all, left);
        struct kvfs_index_changes *made = kvfs_index_changes(begun, size, exact, left, &error, &damaged);
        CHECK(made ? error == 0 : error == -EBADMSG);
        CHECK(made || left != whole || hits);
        if (made)
            check_lists(made);
        kvfs_index_changes_free(made);
        free(exact);
    }
    kvfs_names_commit_end(names, 1);
    kvfs_names_destroy(names);
    printf("index changes: ok\n");
    return 0;
}
