/* sources: base block names */
/* The names in memory beside a plain model: what is found and listed, what commits write, what stays after one that failed. */
#include <stdio.h>

#include "check.h"
#include "names/names.h"

#define INODES 48
#define NAMES 24
#define SEGMENTS 4
#define STEPS 200000

struct state {
    bool present, sealed, nameless;
    uint32_t name, parent, segment;
    uint32_t extents[2]; /* segments above 0, or 0 */
};
/* The model: what is now, and what the index has. */
static struct state now[INODES + 1], stored[INODES + 1];

static uint64_t random_state = 88172645463325252ull;
static uint32_t any(uint32_t below) {
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return (uint32_t)(random_state % below);
}

static uint32_t name_text(uint32_t name, char *out) { return (uint32_t)sprintf(out, "n%02u", name); }

static const void *record_of(uint32_t inode, const struct state *state) {
    static union {
        struct kvfs_inode_record record;
        uint8_t bytes[512];
    } made;
    memset(&made, 0, sizeof(made));
    char text[16];
    struct kvfs_inode_record *record = &made.record;
    record->inode = inode;
    record->parent = state->parent;
    record->kind = KVFS_KIND_FILE;
    record->flags = (uint8_t)((state->sealed ? KVFS_INODE_SEALED : 0) | (state->nameless ? KVFS_INODE_NAMELESS : 0));
    record->segment = state->segment;
    record->name_size = (uint16_t)name_text(state->name, text);
    memcpy(made.bytes + sizeof(*record), text, record->name_size);
    record->record_size = (uint32_t)(sizeof(*record) + round_up(record->name_size, 8));
    for (uint32_t i = 0; i < 2; i++)
        if (state->extents[i]) {
            struct kvfs_extent extent = {.segment = state->extents[i] - 1, .page_count = 1};
            memcpy(made.bytes + record->record_size, &extent, sizeof(extent));
            record->record_size += (uint32_t)sizeof(extent);
            record->extent_count++;
        }
    return made.bytes;
}

static bool durable(const struct state *state) { return state->present && state->sealed && !state->nameless; }

static uint32_t holder(const struct state *states, uint32_t parent, uint32_t name) {
    for (uint32_t i = 1; i <= INODES; i++)
        if (states[i].present && !states[i].nameless && states[i].parent == parent && states[i].name == name)
            return i;
    return 0;
}

static int load(struct kvfs_names *names, uint32_t inode) {
    const struct kvfs_inode_record *record = record_of(inode, &stored[inode]);
    return kvfs_names_load(names, record, record->record_size);
}

static void put(struct kvfs_names *names, uint32_t inode, const struct state *to) {
    bool known = now[inode].present;
    int r = kvfs_names_put(names, record_of(inode, to), known);
    if (r == -ENOENT) {
        CHECK(durable(&stored[inode]));
        CHECK(load(names, inode) == 0);
        r = kvfs_names_put(names, record_of(inode, to), known);
    }
    CHECK(r == 0);
    now[inode] = *to;
}

static void drop(struct kvfs_names *names, uint32_t inode) {
    int r = kvfs_names_remove(names, inode);
    if (r == -ENOENT && durable(&stored[inode])) {
        CHECK(load(names, inode) == 0);
        r = kvfs_names_remove(names, inode);
    }
    CHECK(r == 0);
    now[inode].present = false;
}

/* One change, as files make them: whoever has a name loses it before another gets it. */
static void change(struct kvfs_names *names) {
    uint32_t inode = 1 + any(INODES);
    struct state to = now[inode];
    if (!to.present) {
        if (durable(&stored[inode]))
            return; /* numbers are never used again; the model may not either, until a commit has removed it */
        to = (struct state){.present = true, .name = any(NAMES), .parent = 1 + any(2), .sealed = any(2)};
    } else if (any(4) == 0) {
        drop(names, inode);
        return;
    } else if (any(3) == 0) {
        to.sealed = any(4) > 0 || to.sealed;
        to.segment = any(SEGMENTS);
        for (uint32_t i = 0; i < 2; i++)
            to.extents[i] = any(3) ? 0 : 1 + any(SEGMENTS);
    } else if (any(3) == 0) {
        to.nameless = true;
    } else if (!to.nameless) {
        to.name = any(NAMES);
        to.parent = 1 + any(2);
    }
    uint32_t other = to.nameless ? 0 : holder(now, to.parent, to.name);
    if (other && other != inode)
        drop(names, other);
    put(names, inode, &to);
}

static bool lies_in(const struct state *state, uint32_t segment) {
    return state->present && ((state->sealed && state->segment == segment) || state->extents[0] == segment + 1 || state->extents[1] == segment + 1);
}

/* The segments' members beside a scan of all inodes, and the records of those that have their header there. */
static void compare_members(struct kvfs_names *names) {
    for (uint32_t segment = 0; segment < SEGMENTS; segment++) {
        uint8_t keys[INODES * 12] = {0};
        uint64_t found[INODES], absent[INODES], parents[INODES];
        uint32_t count = 0, at = 0, headers = 0;
        for (uint32_t i = 1; i <= INODES; i++)
            if (durable(&stored[i]) && lies_in(&stored[i], segment))
                keys[count++ * 12 + 11] = (uint8_t)i;
        count = kvfs_names_members(names, segment, keys, count, found, INODES);
        for (uint32_t i = 1; i <= INODES; i++)
            if (lies_in(&now[i], segment)) {
                CHECK(at < count && found[at] == i);
                at++;
            }
        CHECK(at == count);
        static uint8_t out[INODES * 256];
        struct kvfs_records records;
        kvfs_names_records(names, segment, found, count, out, sizeof(out), absent, parents, &records);
        CHECK(kvfs_names_absent(names, found, count, found) == records.absent_count);
        uint64_t from = 0;
        for (uint32_t i = 1, missed = 0; i <= INODES; i++) {
            if (missed < records.absent_count && absent[missed] == i) {
                missed++;
                continue;
            }
            if (!durable(&now[i]) || now[i].segment != segment)
                continue;
            const struct kvfs_inode_record *record = record_of(i, &now[i]);
            CHECK(from + record->record_size <= records.size && memcmp(out + from, record, record->record_size) == 0);
            from += record->record_size;
            headers++;
        }
        CHECK(from == records.size && headers == records.count && records.parent_count <= headers);
    }
}

static void compare(struct kvfs_names *names) {
    for (uint32_t parent = 1; parent <= 2; parent++) {
        struct kvfs_name listed[NAMES + 1];
        int count = kvfs_names_list(names, parent, "", 0, listed, NAMES + 1), at = 0;
        CHECK(count >= 0 && count <= NAMES);
        for (uint32_t name = 0; name < NAMES; name++) {
            char text[16];
            uint32_t size = name_text(name, text), is = holder(now, parent, name), was = holder(stored, parent, name);
            uint64_t found = 0;
            bool here = kvfs_names_find(names, parent, text, size, &found);
            CHECK(here ? found == is : is == was);
            bool shown = at < count && listed[at].size == size && memcmp(listed[at].name, text, size) == 0;
            CHECK(shown ? listed[at].inode == is : is == was);
            at += shown;
        }
        CHECK(at == count);
    }
    compare_members(names);
}

/* A commit names each inode that differs from the index, and no other. */
static void commit(struct kvfs_names *names, bool ok) {
    struct state after[INODES + 1], frozen[INODES + 1];
    memcpy(after, stored, sizeof(after));
    memcpy(frozen, now, sizeof(frozen));
    uint64_t size;
    const uint8_t *at = kvfs_names_commit_begin(names, &size), *end = at + size;
    CHECK(at != NULL);
    while (at < end) {
        struct kvfs_change said;
        memcpy(&said, at, sizeof(said));
        at += sizeof(said);
        const struct state *state = &frozen[said.inode];
        CHECK((said.record_size > 0) == durable(state));
        if (said.record_size)
            CHECK(memcmp(at, record_of((uint32_t)said.inode, state), said.record_size) == 0);
        if (said.is_new)
            CHECK(!durable(&stored[said.inode]));
        at += said.record_size;
        after[said.inode] = durable(state) ? *state : (struct state){0};
    }
    CHECK(at == end);
    for (uint32_t i = 1; i <= INODES; i++)
        CHECK(durable(&after[i]) == durable(&frozen[i]));
    for (uint32_t i = any(6); i-- > 0;)
        change(names); /* meanwhile */
    compare(names);
    kvfs_names_commit_end(names, ok);
    if (ok)
        memcpy(stored, after, sizeof(stored));
    compare(names);
}

static void test_model(void) {
    struct kvfs_names *names;
    CHECK(kvfs_names_create(&names) == 0);
    for (uint32_t step = 0; step < STEPS; step++) {
        change(names);
        compare_members(names);
        if (step % 16 == 0)
            compare(names);
        if (any(12) == 0)
            commit(names, any(3) > 0);
        if (any(40) == 0)
            kvfs_names_forget(names);
    }
    commit(names, true);
    commit(names, true);
    CHECK(kvfs_names_pending(names) == 0);
    kvfs_names_destroy(names);
}

/* Committed records leave memory in the end: a pool has more of them than a daemon has memory. */
static void test_committed_records_leave(void) {
    struct kvfs_names *names;
    CHECK(kvfs_names_create(&names) == 0);
    uint64_t size;
    for (uint32_t i = 1; i <= 100000; i++) {
        struct state state = {.present = true, .sealed = true, .parent = 1, .name = i};
        CHECK(kvfs_names_put(names, record_of(i, &state), 0) == 0);
    }
    CHECK(kvfs_names_pending(names) == 100000);
    CHECK(kvfs_names_commit_begin(names, &size) != NULL);
    kvfs_names_commit_end(names, 1);
    uint64_t found;
    CHECK(kvfs_names_get(names, 1, NULL, 0) == -ENOENT);
    CHECK(kvfs_names_find(names, 1, "n01", 3, &found) == 0);
    CHECK(kvfs_names_get(names, 100000, NULL, 0) > 0);
    CHECK(kvfs_names_find(names, 1, "n100000", 7, &found) == 1 && found == 100000);
    kvfs_names_destroy(names);
}

/* Files that come and go between two commits leave nothing behind. */
static void test_short_lives_leave_nothing(void) {
    struct kvfs_names *names;
    CHECK(kvfs_names_create(&names) == 0);
    struct kvfs_name listed[4];
    for (uint32_t i = 1; i <= 1000; i++) {
        struct state state = {.present = true, .parent = 1, .name = i};
        CHECK(kvfs_names_put(names, record_of(i, &state), 0) == 0);
        CHECK(kvfs_names_remove(names, i) == 0);
    }
    CHECK(kvfs_names_list(names, 1, "", 0, listed, 4) == 0);
    CHECK(kvfs_names_parents(names, NULL, 0) == 0);
    CHECK(kvfs_names_pending(names) == 0);
    kvfs_names_destroy(names);
}

/* Exactly the names that were said, however many; none after hosts were told. */
static void test_untold_names(void) {
    struct kvfs_names *names;
    CHECK(kvfs_names_create(&names) == 0);
    for (uint32_t round = 0; round < 2; round++) {
        char text[16];
        for (uint32_t i = 0; i < 20000; i += 2)
            kvfs_names_untold(names, 1 + i % 3, text, name_text(i, text));
        for (uint32_t i = 0; i < 20000; i++) {
            CHECK(names_is_untold(names, 1 + i % 3, text, name_text(i, text)) == (i % 2 == 0));
            CHECK(!names_is_untold(names, 4, text, name_text(i, text)));
        }
        kvfs_names_untold(names, 0, "", 0);
        CHECK(!names_is_untold(names, 1, text, name_text(0, text)));
    }
    kvfs_names_destroy(names);
}

int main(void) {
    test_model();
    test_untold_names();
    test_committed_records_leave();
    test_short_lives_leave_nothing();
    printf("names: ok\n");
    return 0;
}
