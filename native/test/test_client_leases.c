/* sources: base block io client pod */
/* Leases and touches of libkvfs: what it asks, what it makes of the answers, and of answers that are none. */
#include "client_harness.h"

#define COUNT 3u

static const uint64_t size = 5000;

static void test_a_lease(void) {
    pool_new(16384);
    struct kvfs_client *client = connect_with((struct kvfs_options){.flags = KVFS_READ_ONLY, .timeout_ms = 30000}), *writer = connect_plain();
    struct batch *b = put_batch(writer, 0, COUNT, &size, 1, 1), *missing = batch_new(50, COUNT, &size, 1, 0);
    uint8_t held[2 * COUNT];
    uint64_t lease;
    CHECK(kvfs_lease(client, &b->keys, 1000, &lease, held) == COUNT && lease == 1 && held[0] == 1 && held[2] == 1);
    CHECK(d.lease_frames == 1 && d.leased == COUNT);
    CHECK(kvfs_release(client, lease) == 1 && kvfs_release(client, lease) == 0 && kvfs_release(client, 0) == 0 && d.releases == 2);
    /* Nobody is asked for a missing block. */
    CHECK(kvfs_lease(client, &missing->keys, 1000, &lease, held) == 0 && lease == 0 && held[0] == 0 && d.lease_frames == 1);
    CHECK(kvfs_lease(client, &b->keys, 0, &lease, held) == -EINVAL && says("0 milliseconds"));
    struct kvfs_keys none = {NULL, NULL, 0, 0};
    CHECK(kvfs_lease(client, &none, 1000, &lease, NULL) == 0 && lease == 0 && kvfs_touch(client, &none) == 0);
    /* No room for some. */
    locked();
    d.lease_odd = true;
    unlocked();
    CHECK(kvfs_lease(client, &b->keys, 1000, &lease, held) == 2 && lease == 2 && held[0] == 1 && held[1] == 0 && held[2] == 1);
    CHECK(d.lease_frames == 2); /* a refusal is not asked for again */
    locked();
    d.lease_odd = false;
    unlocked();
    CHECK(kvfs_touch(client, &b->keys) == COUNT && kvfs_touch(client, &missing->keys) == 0);
    CHECK(kvfs_lease(client, &b->keys, 1000, &lease, held) == COUNT); /* answered after the touch was heard */
    CHECK(d.touched == COUNT && statistics(client).hits == 0 && statistics(client).lookups == 0);
    daemon_stop(false);
    CHECK(kvfs_lease(client, &b->keys, 1000, &lease, held) == -ENOTCONN && says("daemon is gone") && lease == 0 && held[0] == 0);
    CHECK(kvfs_release(client, 3) == 0 && kvfs_touch(client, &b->keys) == COUNT);
    kvfs_close(client);
    kvfs_close(writer);
    batch_free(b);
    batch_free(missing);
    printf("ok leases are asked for by inode, and end with their daemon\n");
}

/* The block of key 1 gets another inode between look-up and lease. */
static void replace(void) {
    struct kvfs_record record;
    char name[2 * KVFS_KEY_MAX];
    struct block *block = block_of(BLOCK + 1);
    CHECK(kvfs_table_find_inode(d.table, BLOCK + 1, &record) == 0);
    memcpy(name, block->name, block->name_size);
    CHECK(kvfs_table_remove(d.table, BLOCK + 1, 0) == 0);
    record.inode = BLOCK + 1000;
    CHECK(kvfs_table_put(d.table, &record, name, block->name_size, 0) == 0);
}

static void test_a_block_that_is_replaced_meanwhile(void) {
    pool_new(16384);
    struct kvfs_client *client = connect_plain();
    struct batch *b = put_batch(client, 0, COUNT, &size, 1, 1);
    uint8_t held[COUNT];
    uint64_t lease;
    locked();
    d.before_lease = replace;
    unlocked();
    CHECK(kvfs_lease(client, &b->keys, 1000, &lease, held) == COUNT && held[1] == 1 && lease == 1);
    CHECK(d.lease_frames == 2 && d.leased == COUNT); /* the second adds to the same lease */
    kvfs_close(client);
    batch_free(b);
    daemon_stop(false);
    printf("ok a block that was replaced after its look-up is looked up again\n");
}

static void test_many(void) {
    enum { MANY = KVFS_WIRE_ITEMS_MAX + 10 };
    pool_new(16384);
    struct kvfs_client *client = connect_plain();
    struct batch *b = put_batch(client, 0, 1, &size, 1, 1);
    uint32_t *sizes = malloc(MANY * sizeof(*sizes));
    uint8_t *data = malloc(MANY * (uint64_t)b->keys.sizes[0]), *held = malloc(MANY);
    uint64_t lease;
    for (uint32_t i = 0; i < MANY; i++) {
        sizes[i] = b->keys.sizes[0];
        memcpy(data + i * (uint64_t)sizes[i], b->keys.data, sizes[i]);
    }
    struct kvfs_keys keys = {data, sizes, MANY, 0};
    CHECK(kvfs_lease(client, &keys, 1000, &lease, held) == MANY && lease == 1 && held[MANY - 1] == 1);
    CHECK(d.lease_frames == 2 && d.leased == MANY);
    CHECK(kvfs_touch(client, &keys) == MANY && kvfs_release(client, lease) == 1);
    CHECK(d.touched > 0 && d.touched <= MANY); /* a hint */
    kvfs_close(client);
    batch_free(b);
    free(data);
    free(sizes);
    free(held);
    daemon_stop(false);
    printf("ok one lease of more blocks than a frame has\n");
}

/* An error in time, never a crash, and nothing held. */
static void test_hostile_answers(void) {
    for (uint32_t t = 0; t < 2; t++)
        for (enum trick trick = HANG; trick < TRICKS_OF_ANSWERS; trick++) {
            pool_new(16384);
            struct kvfs_client *client = connect_with((struct kvfs_options){.timeout_ms = 250 * slowness()});
            struct batch *b = put_batch(client, 0, COUNT, &size, 1, 1);
            uint8_t held[COUNT];
            uint64_t lease = 0, started = milliseconds();
            locked();
            d.trick = trick;
            d.trick_type = t ? WIRE_RELEASE : WIRE_LEASE;
            unlocked();
            int r = kvfs_lease(client, &b->keys, 1000, &lease, held);
            if (t) {
                CHECK(r == COUNT);
                r = kvfs_release(client, lease);
            }
            CHECK_SAY(milliseconds() - started < 2000 * slowness(), "type %u, trick %d: %llu ms", t, trick,
                      (unsigned long long)(milliseconds() - started));
            if (trick == HANG_UP || trick == CLOSE_INSTEAD)
                CHECK_SAY(r == (t ? 0 : -ENOTCONN), "type %u, trick %d: %d", t, trick, r);
            else if (trick == HANG || trick == HALF_FRAME || trick == HALF_PAYLOAD)
                CHECK_SAY(r == -ETIMEDOUT, "type %u, trick %d: %d", t, trick, r);
            else if (trick != RANDOM_ANSWER && trick != STATUS_POSITIVE)
                CHECK_SAY(r == (trick == STATUS_ERROR ? -EIO : -EPROTO), "type %u, trick %d: %d: %s", t, trick, r, kvfs_error());
            if (!t && r < 0)
                CHECK(lease == 0 && !held[0] && !held[1] && !held[2]);
            locked();
            d.trick = HONEST;
            unlocked();
            batch_get(client, b, 1);
            kvfs_close(client);
            batch_free(b);
            daemon_stop(false);
        }
    printf("ok answers that are none are errors in time\n");
}

int main(void) {
    alarm(300 * slowness());
    signal(SIGPIPE, SIG_DFL);
    devices_open();
    test_a_lease();
    test_a_block_that_is_replaced_meanwhile();
    test_many();
    test_hostile_answers();
    devices_close();
    return 0;
}
