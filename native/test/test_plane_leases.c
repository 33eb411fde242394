/* sources: base block names io content pod frames fuse virtiofs plane.c */
/* Leases against a model: what they keep, within which bounds, and what ends them. Then beside threads that open, remove and evict the same blocks. */
#include "kernel_harness.h"

#define BLOCKS 64u
#define SIZE 20000u /* 5 pages, and one of the header */
#define PAGES 6u
#define LEASES 12u
#define STEPS 20000
#define THREADS 3u
#define TURNS 3000

static struct kvfs_names *names;
static const struct kvfs_lease_room plenty = {UINT64_MAX, UINT64_MAX, UINT32_MAX, 0};
static uint64_t inodes[BLOCKS];

/* In names, table and accounts, as a block that was stored: in segment 0. */
static void block_put(uint32_t i, uint64_t size) {
    uint8_t out[512];
    char name[32];
    sprintf(name, "block%u", i);
    inodes[i] = kvfs_names_next_inode(names);
    uint32_t record_size = (uint32_t)make_record(out, inodes[i], name, size, KVFS_INODE_SEALED, 1, 1);
    struct kvfs_inode_record *copy = malloc(record_size);
    CHECK(copy);
    memcpy(copy, out, record_size);
    kvfs_names_begin(names);
    CHECK(kvfs_name_put(plane, copy, 0) == 0 && names_take(names, copy) == 0);
    place_account(names, copy, 1);
    kvfs_names_end(names);
}

static bool evict_one(uint64_t inode) {
    uint8_t gone;
    struct kvfs_evicted evicted;
    kvfs_blocks_evict(plane, 0, &inode, 1, &gone, &evicted);
    return gone;
}

static bool is_there(uint64_t inode) {
    struct kvfs_record record;
    return kvfs_table_find_inode(plane->table, inode, &record) == 0;
}

static uint32_t lease_of(const uint64_t *which, uint32_t count, struct kvfs_lease_room room, struct kvfs_lease **out) {
    uint8_t held[BLOCKS];
    uint32_t sum = 0;
    *out = kvfs_lease_create();
    CHECK(*out);
    int kept = kvfs_lease_add(plane, *out, which, count, &room, held);
    for (uint32_t i = 0; i < count; i++)
        sum += held[i];
    CHECK(kept >= 0 && (uint32_t)kept == sum && (*out)->count == sum);
    return sum;
}

static void leased_are(uint32_t blocks, uint64_t pages) {
    struct kvfs_leased leased;
    kvfs_leased_get(plane, &leased);
    CHECK_SAY(leased.blocks == blocks && leased.pages == pages, "%u blocks, %llu pages", leased.blocks, (unsigned long long)leased.pages);
}

static uint64_t open_bytes(void) {
    struct kvfs_statistics statistics;
    kvfs_statistics_get(plane, &statistics);
    return statistics.open_bytes;
}

static void test_a_lease_keeps_its_blocks(void) {
    uint64_t before = open_bytes();
    struct kvfs_lease *one, *two;
    for (uint32_t i = 0; i < 4; i++)
        block_put(i, SIZE);
    uint64_t asked[] = {inodes[0], inodes[1], 1, 999999999, inodes[1], 0, UINT64_MAX};
    CHECK(lease_of(asked, 7, plenty, &one) == 3 && one->pages == 3 * PAGES); /* neither directories nor what is not there */
    leased_are(2, 2 * PAGES);
    CHECK(open_bytes() == before + 2 * PAGES * PAGE);
    CHECK(lease_of(&inodes[1], 1, plenty, &two) == 1);
    leased_are(2, 2 * PAGES);
    CHECK(kvfs_inode_is_open(plane, inodes[0]) == KVFS_LEASED && kvfs_inode_is_open(plane, inodes[2]) == KVFS_NOT_OPEN);
    CHECK(!evict_one(inodes[0]) && !evict_one(inodes[1]) && evict_one(inodes[2]));
    kvfs_lease_end(plane, one);
    leased_are(1, PAGES);
    CHECK(evict_one(inodes[0]) && !evict_one(inodes[1]));
    kvfs_lease_end(plane, two);
    leased_are(0, 0);
    CHECK(evict_one(inodes[1]) && open_bytes() == before);
    /* It adds to what is open, and keeps what is open beyond a share. */
    struct kvfs_record record;
    struct node *node;
    CHECK(node_open(plane, inodes[3], user_get(plane, 5000), false, &record, &node) == 0);
    kvfs_set_share(plane, 0, KVFS_WHOLE, 1);
    CHECK(kvfs_inode_is_open(plane, inodes[3]) == KVFS_OPEN_BEYOND_SHARE);
    CHECK(lease_of(&inodes[3], 1, plenty, &one) == 1);
    CHECK(kvfs_inode_is_open(plane, inodes[3]) == KVFS_LEASED && !evict_one(inodes[3]));
    kvfs_set_share(plane, UINT64_MAX, KVFS_WHOLE, 0);
    CHECK(kvfs_inode_is_open(plane, inodes[3]) == KVFS_OPEN);
    kvfs_lease_end(plane, one);
    CHECK(kvfs_inode_is_open(plane, inodes[3]) == KVFS_OPEN);
    struct shard *shard = shard_of(plane, inodes[3]);
    pthread_mutex_lock(&shard->lock);
    node_unopen(plane, node, user_get(plane, 5000), false);
    pthread_mutex_unlock(&shard->lock);
    node_put(plane, node);
    CHECK(evict_one(inodes[3]) && open_bytes() == before);
    printf("ok a lease keeps its blocks until it ends, and no others\n");
}

static void test_what_loses_its_name_loses_its_lease(void) {
    struct kvfs_lease *lease, *again;
    uint8_t record[512], busy;
    for (uint32_t i = 0; i < 4; i++)
        block_put(i, SIZE);
    uint64_t before = open_bytes();
    CHECK(lease_of(inodes, 4, plenty, &lease) == 4);
    CHECK(name_unlink(plane, 1, "block0") == 0 && !is_there(inodes[0]));
    leased_are(3, 3 * PAGES);
    /* Another has its name: for a moment longer who looked it up may open it. */
    uint64_t old = inodes[1];
    make_record(record, ++next_inode, "block1", 10, KVFS_INODE_SEALED, 1, 1);
    CHECK(kvfs_name_put(plane, record, old) == KVFS_KEPT_LINGERS && is_there(old));
    leased_are(2, 2 * PAGES);
    CHECK(kvfs_inode_is_open(plane, old) == KVFS_NOT_OPEN && lease_of(&old, 1, plenty, &again) == 0);
    kvfs_lease_end(plane, again);
    CHECK(kvfs_inode_remove(plane, old) == 0 && kvfs_inode_remove(plane, next_inode) == 0);
    /* Its device goes, and comes back: a lease of before keeps nothing, a new one does. */
    CHECK(kvfs_inode_evict(plane, &inodes[2], 1, &busy) == 0 && !is_there(inodes[2]));
    leased_are(1, PAGES);
    make_record(record, inodes[2], "block2", SIZE, KVFS_INODE_SEALED, 1, 1);
    CHECK(kvfs_name_put(plane, record, 0) == 0 && kvfs_inode_is_open(plane, inodes[2]) == KVFS_NOT_OPEN);
    CHECK(lease_of(&inodes[2], 1, plenty, &again) == 1 && kvfs_inode_is_open(plane, inodes[2]) == KVFS_LEASED);
    leased_are(2, 2 * PAGES);
    /* A block that has grown beyond its lease is not kept. */
    make_record(record, inodes[3], "block3", SIZE + 5 * PAGE, KVFS_INODE_SEALED, 1, 1);
    CHECK(kvfs_inode_update(plane, record) == 0 && kvfs_inode_is_open(plane, inodes[3]) == KVFS_NOT_OPEN);
    make_record(record, inodes[3], "block3", SIZE, KVFS_INODE_SEALED, 9, 3); /* a copy */
    CHECK(kvfs_inode_update(plane, record) == 0 && kvfs_inode_is_open(plane, inodes[3]) == KVFS_LEASED);
    kvfs_lease_end(plane, lease);
    leased_are(1, PAGES);
    CHECK(kvfs_inode_is_open(plane, inodes[2]) == KVFS_LEASED);
    kvfs_lease_end(plane, again);
    leased_are(0, 0);
    CHECK(open_bytes() == before);
    for (uint32_t i = 2; i < 4; i++)
        CHECK(evict_one(inodes[i]));
    printf("ok a block that is removed, replaced, away or larger is not kept\n");
}

static void test_bounds(void) {
    struct kvfs_lease *lease, *other;
    struct kvfs_lease_room room = plenty;
    for (uint32_t i = 0; i < 20; i++)
        block_put(i, i == 0 ? 30 * PAGE : SIZE);
    room.blocks = 3;
    CHECK(lease_of(inodes, 20, room, &lease) == 3 && lease->pages == 31 + 2 * PAGES);
    kvfs_lease_end(plane, lease);
    room = plenty;
    room.pages = 3 * PAGES + 1; /* one that is too large does not take the room of others */
    CHECK(lease_of(inodes, 20, room, &lease) == 3 && lease->pages == 3 * PAGES);
    /* All clients together; who leases what is leased costs them nothing. */
    room = plenty;
    room.all_pages = 5 * PAGES;
    CHECK(lease_of(inodes, 20, room, &other) == 5);
    leased_are(5, 5 * PAGES);
    kvfs_lease_end(plane, lease);
    kvfs_lease_end(plane, other);
    /* No more than is left to what is open or written. */
    uint64_t before = open_bytes();
    kvfs_set_space(plane, before + 8 * PAGES * PAGE, ENOSPC);
    CHECK(lease_of(inodes, 20, plenty, &lease) == 4);
    CHECK(!space_lacks(plane, 4 * PAGES * PAGE) && space_lacks(plane, 4 * PAGES * PAGE + 1));
    kvfs_lease_end(plane, lease);
    kvfs_set_space(plane, before, ENOSPC);
    CHECK(lease_of(inodes, 20, plenty, &lease) == 0);
    kvfs_lease_end(plane, lease);
    kvfs_set_space(plane, UINT64_MAX, ENOSPC);
    leased_are(0, 0);
    CHECK(open_bytes() == before);
    for (uint32_t i = 0; i < 20; i++)
        CHECK(evict_one(inodes[i]));
    printf("ok leases hold what they may, and no more\n");
}

/* Any order of leases, ends, removals, evictions and new blocks. */
static void test_against_a_model(void) {
    struct kvfs_lease *leases[LEASES] = {0};
    uint64_t leased[LEASES][8], dice = 7;
    uint32_t counts[LEASES] = {0};
    for (uint32_t i = 0; i < BLOCKS; i++)
        block_put(i, SIZE);
    for (uint32_t step = 0; step < STEPS; step++) {
        uint32_t l = (uint32_t)random_below(&dice, LEASES), b = (uint32_t)random_below(&dice, BLOCKS);
        char name[32];
        uint32_t holders = 0;
        for (uint32_t i = 0; i < LEASES; i++)
            for (uint32_t k = 0; k < counts[i]; k++)
                holders += leased[i][k] == inodes[b];
        switch (random_below(&dice, 4)) {
        case 0:
            if (leases[l]) {
                kvfs_lease_end(plane, leases[l]);
                leases[l] = NULL;
                counts[l] = 0;
            }
            break;
        case 1:
            leases[l] = leases[l] ? leases[l] : kvfs_lease_create();
            if (counts[l] < 8) {
                uint8_t held;
                CHECK(kvfs_lease_add(plane, leases[l], &inodes[b], 1, &plenty, &held) == 1 && held);
                leased[l][counts[l]++] = inodes[b];
                CHECK(leases[l]->count == counts[l]);
            }
            break;
        case 2:
            CHECK(evict_one(inodes[b]) == !holders);
            if (!holders)
                block_put(b, SIZE);
            break;
        default:
            if (random_below(&dice, 4))
                break;
            sprintf(name, "block%u", b);
            CHECK(name_unlink(plane, 1, name) == 0);
            block_put(b, SIZE);
        }
        uint32_t blocks = 0;
        for (uint32_t i = 0; i < BLOCKS; i++)
            blocks += kvfs_inode_is_open(plane, inodes[i]) == KVFS_LEASED;
        leased_are(blocks, blocks * (uint64_t)PAGES);
    }
    for (uint32_t i = 0; i < LEASES; i++)
        if (leases[i])
            kvfs_lease_end(plane, leases[i]);
    leased_are(0, 0);
    printf("ok %d steps as the model has them\n", STEPS);
}

static atomic_uint working;

static void *churn(void *argument) {
    uint64_t dice = 100 + (uintptr_t)argument;
    struct kvfs_record record;
    for (uint32_t turn = 0; turn < TURNS; turn++) {
        char name[32];
        struct node *node;
        sprintf(name, "block%u", (unsigned)random_below(&dice, BLOCKS));
        if (kvfs_table_find_name(plane->table, 1, name, (uint32_t)strlen(name), &record) < 0)
            continue;
        if (turn % 3 == 0) {
            name_unlink(plane, 1, name);
        } else if (node_open(plane, record.inode, user_get(plane, 7000), false, &record, &node) == 0) {
            struct shard *shard = shard_of(plane, node->inode);
            pthread_mutex_lock(&shard->lock);
            node_unopen(plane, node, user_get(plane, 7000), false);
            pthread_mutex_unlock(&shard->lock);
            node_put(plane, node);
        }
    }
    atomic_fetch_sub(&working, 1);
    return NULL;
}

/* As the control plane: one thread leases, ends, evicts, and stores again. */
static void test_beside_threads(void) {
    pthread_t threads[THREADS];
    struct kvfs_lease *leases[LEASES] = {0};
    uint64_t dice = 11, evicted = 0, before = open_bytes();
    atomic_store(&working, THREADS);
    for (uintptr_t i = 0; i < THREADS; i++)
        CHECK(pthread_create(&threads[i], NULL, churn, (void *)i) == 0);
    for (uint32_t turn = 0; atomic_load(&working); turn++) {
        uint32_t l = turn % LEASES, b = (uint32_t)random_below(&dice, BLOCKS);
        if (leases[l])
            kvfs_lease_end(plane, leases[l]);
        lease_of(inodes + b / 2, BLOCKS / 4, plenty, &leases[l]);
        b = (uint32_t)random_below(&dice, BLOCKS);
        evicted += evict_one(inodes[b]);
        if (!is_there(inodes[b]))
            block_put(b, SIZE);
    }
    for (uint32_t i = 0; i < THREADS; i++)
        CHECK(pthread_join(threads[i], NULL) == 0);
    for (uint32_t i = 0; i < LEASES; i++)
        if (leases[i])
            kvfs_lease_end(plane, leases[i]);
    leased_are(0, 0);
    CHECK(open_bytes() == before);
    for (uint32_t i = 0; i < BLOCKS; i++)
        CHECK(kvfs_inode_is_open(plane, inodes[i]) == KVFS_NOT_OPEN);
    printf("ok beside threads, %llu evicted\n", (unsigned long long)evicted);
}

int main(void) {
    plane_begin();
    names = kvfs_plane_names(plane);
    kvfs_names_number(names, UINT64_C(3) << KVFS_COUNTER_BITS, 0);
    CHECK(kvfs_places_make(names, SEGMENTS, 4096, 1u << 20));
    directory_put(1, 1, "");
    kvfs_names_leave(names, KVFS_LEAVE_CLOSED, 0);
    test_a_lease_keeps_its_blocks();
    test_what_loses_its_name_loses_its_lease();
    test_bounds();
    test_against_a_model();
    test_beside_threads();
    plane_end();
    return 0;
}
