/* sources: base block names */
/* The journal of names beside a plain model: whenever the process is killed, what it says above the index's last commit is what the names were. And a
 * journal that another has damaged is refused, or read up to the damage. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <fcntl.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "base/base.h"
#include "check.h"
#include "names/journal_layout.h"
#include "names/names.h"

#define SLOTS 32u
#define RECORD_MAX 1024u
#define ROUNDS 20000u
#define MEMORY (1u << 20)

struct slot {
    uint64_t inode; /* 0: there is none */
    uint32_t size;
    uint8_t record[RECORD_MAX];
};
struct model {
    struct slot slots[SLOTS];
};
static uint64_t seed = 34, last_inode;

static const struct kvfs_inode_record *made(struct slot *slot, uint64_t inode) {
    memset(slot, 0, sizeof(*slot));
    struct kvfs_inode_record record = {.kind = KVFS_KIND_FILE, .inode = inode, .parent = 1, .version = inode};
    uint64_t drawn = random_below(&seed, 8);
    record.flags = drawn == 0 ? 0 : drawn == 1 ? KVFS_INODE_SEALED | KVFS_INODE_NAMELESS : KVFS_INODE_SEALED;
    record.name_size = (uint16_t)snprintf((char *)slot->record + sizeof(record), 64, "%llu-%llu", (unsigned long long)inode,
                                          (unsigned long long)random_below(&seed, 1000));
    record.extent_count = (uint32_t)random_below(&seed, 4);
    for (uint32_t i = 0; i < record.extent_count; i++) {
        struct kvfs_extent extent = {.segment = i, .page_count = 1};
        memcpy(slot->record + sizeof(record) + round_up(record.name_size, 8) + i * sizeof(extent), &extent, sizeof(extent));
    }
    record.xattr_size = (uint32_t)random_below(&seed, 200); /* zeros: attributes without a name */
    slot->inode = inode;
    slot->size = record.record_size =
        (uint32_t)round_up(sizeof(record) + round_up(record.name_size, 8) + record.extent_count * sizeof(struct kvfs_extent) + record.xattr_size, 8);
    memset(slot->record + sizeof(record) + record.name_size, 0, round_up(record.name_size, 8) - record.name_size);
    memcpy(slot->record, &record, sizeof(record));
    return (const void *)slot->record;
}

static void change(struct kvfs_names *names, struct model *now) {
    struct slot *slot = &now->slots[random_below(&seed, SLOTS)];
    if (slot->inode && random_below(&seed, 4) == 0) {
        CHECK(kvfs_names_remove(names, slot->inode) == 0);
        memset(slot, 0, sizeof(*slot));
    } else {
        CHECK(kvfs_names_put(names, made(slot, slot->inode ? slot->inode : ++last_inode), 0) == 0);
    }
}

/* As memory is when the process is killed now. */
static int copy_of(int fd) {
    static uint8_t bytes[MEMORY];
    off_t size = lseek(fd, 0, SEEK_END);
    CHECK(size <= (off_t)sizeof(bytes) && pread(fd, bytes, (size_t)size, 0) == size);
    int copy = memfd_create("copy", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    CHECK(copy >= 0 && write(copy, bytes, (size_t)size) == size && fcntl(copy, F_ADD_SEALS, F_SEAL_SHRINK) == 0);
    return copy;
}

/* A next daemon takes the index, and all that is newer, as long as no number is missing. Returns the last number. */
static uint64_t replay(const void *entries, const struct kvfs_journal_found *found, struct model *to) {
    uint64_t next = found->durable + 1, at = 0;
    while (at < found->size) {
        const struct kvfs_journal_entry *entry = (const void *)((const uint8_t *)entries + at);
        at += sizeof(*entry) + round_up(entry->data_size, 8);
        if (entry->sequence < next) {
            next += entry->sequence == next;
            continue;
        }
        if (entry->sequence != next)
            break;
        next++;
        struct slot *slot = NULL, *empty = NULL;
        for (uint32_t i = 0; i < SLOTS; i++) {
            if (to->slots[i].inode == entry->inode)
                slot = &to->slots[i];
            else if (!to->slots[i].inode)
                empty = &to->slots[i];
        }
        slot = slot ? slot : empty;
        CHECK(slot);
        memset(slot, 0, sizeof(*slot));
        if (entry->kind == KVFS_JOURNAL_PUT) {
            CHECK(entry->data_size <= RECORD_MAX);
            slot->inode = entry->inode;
            slot->size = entry->data_size;
            memcpy(slot->record, entry + 1, entry->data_size);
        }
    }
    return next - 1;
}

static bool same(const struct model *a, const struct model *b) {
    for (uint32_t i = 0; i < SLOTS; i++) {
        const struct slot *slot = &a->slots[i], *other = NULL;
        for (uint32_t j = 0; j < SLOTS && slot->inode && !other; j++)
            other = b->slots[j].inode == slot->inode ? &b->slots[j] : NULL;
        if (slot->inode && (!other || other->size != slot->size || memcmp(other->record, slot->record, slot->size) != 0))
            return false;
    }
    return true;
}

static void check(int fd, const struct model *index, const struct model *expected) {
    struct kvfs_journal_found found;
    int r, copy = copy_of(fd);
    const void *entries = kvfs_journal_read(copy, &found, &r);
    CHECK_SAY(entries, "%d", r);
    CHECK(!found.refused);
    struct model got = *index;
    CHECK(replay(entries, &found, &got) == found.sequence);
    CHECK(same(&got, expected) && same(expected, &got));
    kvfs_journal_free(entries);
    close(copy);
}

/* Random steps and commits, of which some fail. Killed within a step, between two, and within a commit. */
static void test_a_kill_at_any_point_leaves_what_the_names_were(void) {
    struct kvfs_names *names;
    static struct model now, before, index, committing;
    bool begun = false;
    int fd = kvfs_journal_make(MEMORY);
    CHECK(fd >= 0 && kvfs_names_create(&names) == 0 && kvfs_names_journal(names, fd) == 0);
    for (uint32_t round = 0; round < ROUNDS; round++) {
        before = now;
        kvfs_names_begin(names);
        for (uint64_t i = 1 + random_below(&seed, 3); i > 0; i--)
            change(names, &now);
        if (round % 16 == 0)
            check(fd, &index, &before);
        kvfs_names_end(names);
        if (round % 8 == 0)
            check(fd, &index, &now);
        if (!begun && random_below(&seed, 50) == 0) {
            uint64_t size, id, sequence;
            kvfs_names_begin(names);
            committing = now;
            CHECK(kvfs_names_commit_begin(names, &size));
            CHECK(kvfs_names_journal_mark(names, &id, &sequence) == 1 && id);
            kvfs_names_end(names);
            begun = true;
            check(fd, &index, &now);
        } else if (begun && random_below(&seed, 20) == 0) {
            bool ok = random_below(&seed, 4) > 0;
            kvfs_names_commit_end(names, ok);
            /* Of nothing that the index does not keep a commit is the last word: the model's index has it all. */
            if (ok)
                index = committing;
            begun = false;
            check(fd, &index, &now);
        }
    }
    struct kvfs_journal_fill fill;
    CHECK(kvfs_names_journal_fill(names, &fill) == 1 && !fill.lost);
    kvfs_names_destroy(names);
    close(fd);
}

/* Entries of a request outlive the commit until its reply is written, also with the next daemon. */
static void test_what_a_request_did_stays_until_it_is_answered(void) {
    struct kvfs_names *names;
    struct model now = {0};
    struct kvfs_journal_fill fill;
    struct kvfs_journal_found found;
    int r, fd = kvfs_journal_make(KVFS_JOURNAL_SIZE_MIN);
    CHECK(kvfs_names_create(&names) == 0 && kvfs_names_journal(names, fd) == 0);
    made(&now.slots[0], ++last_inode);
    now.slots[0].record[offsetof(struct kvfs_inode_record, flags)] = KVFS_INODE_SEALED; /* others are told again with each commit */
    kvfs_names_request(7, 42);
    CHECK(kvfs_names_put(names, now.slots[0].record, 0) == 0);
    kvfs_names_request(0, 0);
    kvfs_names_journal_idle(names);
    const void *entries = kvfs_journal_read(fd, &found, &r);
    const struct kvfs_journal_entry *entry = entries;
    CHECK(entry && found.durable == found.sequence && found.count == 1);
    CHECK(entry->kind == KVFS_JOURNAL_PUT && entry->transport == 7 && entry->unique == 42);
    CHECK(!kvfs_names_was_asked(names, 7, 42));
    kvfs_journal_free(entries);
    kvfs_names_destroy(names);
    CHECK(kvfs_names_create(&names) == 0 && kvfs_names_journal(names, fd) == 0);
    kvfs_names_journal_idle(names);
    CHECK(kvfs_names_journal_fill(names, &fill) == 1 && fill.unanswered == 1 && fill.used > 0);
    CHECK(kvfs_names_was_asked(names, 7, 42) == 1 && !kvfs_names_was_asked(names, 7, 43) && !kvfs_names_was_asked(names, 8, 42));
    kvfs_names_answered(names, 7, 42);
    CHECK(!kvfs_names_was_asked(names, 7, 42));
    kvfs_names_journal_idle(names);
    CHECK(kvfs_names_journal_fill(names, &fill) == 1 && fill.unanswered == 0 && fill.used == 0);
    kvfs_names_destroy(names);
    close(fd);
}

/* An entry without room is missing, and its number tells so. After a commit all goes on. */
static void test_a_full_journal_says_what_it_lacks(void) {
    struct kvfs_names *names;
    static struct model now, index, whole, got;
    struct kvfs_journal_fill fill = {0};
    struct kvfs_journal_found found;
    int r, fd = kvfs_journal_make(KVFS_JOURNAL_SIZE_MIN);
    CHECK(kvfs_names_create(&names) == 0 && kvfs_names_journal(names, fd) == 0);
    while (!fill.lost) {
        whole = now;
        change(names, &now);
        CHECK(kvfs_names_journal_fill(names, &fill) == 1 && fill.used <= fill.size);
    }
    change(names, &now);
    const void *entries = kvfs_journal_read(fd, &found, &r);
    CHECK(entries && !found.refused && replay(entries, &found, &got) < found.sequence && same(&got, &whole) && same(&whole, &got));
    kvfs_journal_free(entries);
    index = now;
    kvfs_names_journal_idle(names);
    for (int i = 0; i < 20; i++)
        change(names, &now);
    check(fd, &index, &now);
    kvfs_names_destroy(names);
    close(fd);
}

/* The memory of what has gone is given back. */
static void test_memory_goes_with_the_entries(void) {
    struct kvfs_names *names;
    static struct model now;
    struct stat status;
    int fd = kvfs_journal_make(MEMORY);
    CHECK(kvfs_names_create(&names) == 0 && kvfs_names_journal(names, fd) == 0);
    for (uint32_t i = 0; i < 20000; i++) {
        change(names, &now);
        if (i % 500 == 499) {
            kvfs_names_journal_idle(names);
            CHECK(fstat(fd, &status) == 0 && status.st_blocks * 512 <= 64 << 10);
        }
    }
    kvfs_names_destroy(names);
    close(fd);
}

static int read_r(int fd) {
    struct kvfs_journal_found found;
    int r;
    const void *entries = kvfs_journal_read(fd, &found, &r);
    kvfs_journal_free(entries);
    return entries ? 0 : r;
}

static void test_what_is_no_journal_is_refused(void) {
    CHECK(kvfs_journal_make(4096) == -EINVAL && kvfs_journal_make((64 << 10) + 1) == -EINVAL);
    int fd = memfd_create("none", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    CHECK(ftruncate(fd, 64 << 10) == 0 && read_r(fd) == -EBADMSG); /* may shrink */
    CHECK(fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK) == 0 && read_r(fd) == -EBADMSG);
    close(fd);
    struct {
        uint64_t at, value;
        int r;
    } lies[] = {{0, 1, -EBADMSG},        {8, 2, -EPROTONOSUPPORT},   {16, 1 << 20, -EBADMSG}, {24, 5, -EBADMSG},  {64, 4096, -EBADMSG},
                {72, 1 << 20, -EBADMSG}, {72, UINT64_MAX, -EBADMSG}, {72, 4, -EBADMSG},       {80, 100, -EBADMSG}};
    for (uint32_t i = 0; i < sizeof(lies) / sizeof(*lies); i++) {
        struct kvfs_names *names;
        fd = kvfs_journal_make(KVFS_JOURNAL_SIZE_MIN);
        CHECK(fd >= 0 && read_r(fd) == 0 && pwrite(fd, &lies[i].value, 8, (off_t)lies[i].at) == 8);
        CHECK_SAY(read_r(fd) == lies[i].r, "%u: %d", i, read_r(fd));
        CHECK(kvfs_names_create(&names) == 0 && kvfs_names_journal(names, fd) == lies[i].r);
        kvfs_names_destroy(names);
        close(fd);
    }
}

/* A few bytes anywhere: what is read is a prefix of what was written, in whole steps. */
static void test_damaged_bytes_end_what_is_believed(void) {
    struct kvfs_names *names;
    static struct model now;
    struct kvfs_journal_found whole, found;
    int r, fd = kvfs_journal_make(KVFS_JOURNAL_SIZE_MIN);
    CHECK(kvfs_names_create(&names) == 0 && kvfs_names_journal(names, fd) == 0);
    for (int i = 0; i < 300; i++) {
        change(names, &now);
        if (i % 50 == 0)
            kvfs_names_journal_idle(names);
    }
    const void *all = kvfs_journal_read(fd, &whole, &r);
    CHECK(all && whole.count > 10);
    for (int i = 0; i < 3000; i++) {
        int copy = copy_of(fd);
        for (uint64_t n = 1 + random_below(&seed, 3); n > 0; n--) {
            uint8_t byte = (uint8_t)random_next(&seed);
            uint64_t at = random_below(&seed, 4) ? 4096 + random_below(&seed, KVFS_JOURNAL_SIZE_MIN - 4096) : random_below(&seed, 96);
            CHECK(pwrite(copy, &byte, 1, (off_t)at) == 1);
        }
        const void *entries = kvfs_journal_read(copy, &found, &r);
        CHECK(entries || r == -EBADMSG || r == -EPROTONOSUPPORT);
        if (entries && found.id == whole.id)
            for (uint64_t at = 0; at < found.size;) {
                const struct kvfs_journal_entry *entry = (const void *)((const uint8_t *)entries + at);
                at += sizeof(*entry) + round_up(entry->data_size, 8);
                CHECK(at <= found.size && entry->sequence <= found.sequence);
            }
        if (entries) {
            struct kvfs_names *next;
            CHECK(kvfs_names_create(&next) == 0 && kvfs_names_journal(next, copy) == 0);
            struct model own = {0};
            change(next, &own);
            kvfs_names_journal_idle(next);
            kvfs_names_destroy(next);
        }
        kvfs_journal_free(entries);
        close(copy);
    }
    kvfs_journal_free(all);
    kvfs_names_destroy(names);
    close(fd);
}

int main(void) {
    RUN(test_a_kill_at_any_point_leaves_what_the_names_were);
    RUN(test_what_a_request_did_stays_until_it_is_answered);
    RUN(test_a_full_journal_says_what_it_lacks);
    RUN(test_memory_goes_with_the_entries);
    RUN(test_what_is_no_journal_is_refused);
    RUN(test_damaged_bytes_end_what_is_believed);
    return 0;
}
