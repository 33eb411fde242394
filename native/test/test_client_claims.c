/* sources: base block io client pod */
/* Claims of libkvfs: leases that nobody waits for, what ends them, and answers that are late, none, or lies. */
#include "client_harness.h"

#define COUNT 3u
#define MINUTE 60000u
#define UNANSWERED 64u

static const uint64_t size = 5000;
static uint32_t barriers;

/* The daemon has answered all before this, and the client has received it. */
static void barrier(struct kvfs_client *client) {
    barriers++;
    CHECK(kvfs_release(client, 1u << 20) == 0);
}

static uint32_t releases(void) { return d.releases - barriers; }

static struct kvfs_keys part(const struct batch *b, uint32_t first, uint32_t count) {
    struct kvfs_keys keys = b->keys;
    for (uint32_t i = 0; i < first; i++)
        keys.data = (const uint8_t *)keys.data + keys.sizes[i];
    keys.sizes += first;
    keys.count = count;
    return keys;
}

static struct kvfs_client *begin(struct batch **b, uint32_t timeout_ms) {
    pool_new(16384);
    barriers = 0;
    struct kvfs_client *client = connect_with((struct kvfs_options){.timeout_ms = timeout_ms});
    *b = put_batch(client, 0, COUNT, &size, 1, 1);
    return client;
}

static void end(struct kvfs_client *client, struct batch *b) {
    kvfs_close(client);
    batch_free(b);
    daemon_stop(false);
}

static void test_a_claim(void) {
    struct batch *b, *missing = batch_new(50, COUNT, &size, 1, 0);
    struct kvfs_client *client = begin(&b, 30000);
    struct kvfs_keys first = part(b, 0, 1), rest = part(b, 1, 2);
    locked(); /* the daemon stands still */
    CHECK(kvfs_claim(client, &b->keys, MINUTE) == COUNT);
    unlocked();
    barrier(client);
    CHECK(d.lease_frames == 1 && d.leased == COUNT);
    CHECK(kvfs_unclaim(client, &first) == 1 && kvfs_unclaim(client, &first) == 0);
    barrier(client);
    CHECK(releases() == 0);
    CHECK(kvfs_unclaim(client, &rest) == 2);
    barrier(client);
    CHECK(releases() == 1 && d.leased == 0 && kvfs_unclaim(client, &b->keys) == 0);
    /* Each is given back to the oldest claim. */
    CHECK(kvfs_claim(client, &b->keys, MINUTE) == COUNT && kvfs_claim(client, &first, MINUTE) == 1);
    barrier(client);
    CHECK(d.lease_frames == 3 && kvfs_unclaim(client, &first) == 1 && kvfs_unclaim(client, &first) == 1);
    barrier(client);
    CHECK(releases() == 2 && kvfs_unclaim(client, &rest) == 2);
    barrier(client);
    CHECK(releases() == 3);
    /* Nobody is told of a missing block, or of none. */
    struct kvfs_keys none = {NULL, NULL, 0, 0};
    CHECK(kvfs_claim(client, &missing->keys, MINUTE) == 0 && kvfs_unclaim(client, &missing->keys) == 0);
    CHECK(kvfs_claim(client, &none, MINUTE) == 0 && kvfs_unclaim(client, &none) == 0 && d.lease_frames == 3);
    CHECK(kvfs_claim(client, &b->keys, 0) == -EINVAL && says("0 milliseconds"));
    CHECK(statistics(client).lookups == 0);
    daemon_stop(false);
    CHECK(kvfs_claim(client, &b->keys, MINUTE) == 0 && kvfs_unclaim(client, &b->keys) == 0);
    kvfs_close(client);
    batch_free(b);
    batch_free(missing);
    printf("ok a claim is one frame, and nobody waits for its answer\n");
}

static void test_keys_that_come_back_before_the_answer(void) {
    struct batch *b;
    struct kvfs_client *client = begin(&b, 30000);
    locked();
    CHECK(kvfs_claim(client, &b->keys, MINUTE) == COUNT && kvfs_unclaim(client, &b->keys) == COUNT);
    unlocked();
    barrier(client);
    CHECK(d.leased == COUNT && releases() == 0);
    CHECK(kvfs_unclaim(client, &b->keys) == 0); /* any call takes the answer in */
    barrier(client);
    CHECK(d.leased == 0 && releases() == 1);
    /* A key that is not granted is not held. */
    locked();
    d.lease_odd = true;
    unlocked();
    CHECK(kvfs_claim(client, &b->keys, MINUTE) == COUNT);
    barrier(client);
    CHECK(d.leased == 2 && kvfs_unclaim(client, &b->keys) == 2);
    barrier(client);
    CHECK(releases() == 2);
    /* With time it ends by itself. */
    CHECK(kvfs_claim(client, &b->keys, 1) == COUNT);
    for (uint64_t until = now_ns() + 2000000; now_ns() < until;)
        usleep(500);
    barrier(client);
    CHECK(kvfs_unclaim(client, &b->keys) == 0);
    barrier(client);
    CHECK(releases() == 2);
    end(client, b);
    printf("ok keys that come back before the answer, that are refused, or whose time is over\n");
}

static void test_many(void) {
    enum { MANY = KVFS_WIRE_ITEMS_MAX + 10 };
    struct batch *b;
    struct kvfs_client *client = begin(&b, 30000);
    uint32_t *sizes = malloc(MANY * sizeof(*sizes)), claims = 0;
    uint8_t *data = malloc(MANY * (uint64_t)b->keys.sizes[0]);
    for (uint32_t i = 0; i < MANY; i++) {
        sizes[i] = b->keys.sizes[0];
        memcpy(data + i * (uint64_t)sizes[i], b->keys.data, sizes[i]);
    }
    struct kvfs_keys keys = {data, sizes, MANY, 0}, one = part(b, 0, 1);
    CHECK(kvfs_claim(client, &keys, MINUTE) == MANY);
    barrier(client);
    CHECK(d.lease_frames == 2 && d.leased == MANY && kvfs_unclaim(client, &keys) == MANY);
    barrier(client);
    CHECK(releases() == 2);
    locked(); /* a daemon that answers nothing is not told without end */
    while (kvfs_claim(client, &one, MINUTE) == 1)
        claims++;
    unlocked();
    CHECK_SAY(claims > 0 && claims <= UNANSWERED, "%u claims without an answer", claims);
    barrier(client);
    CHECK(kvfs_claim(client, &one, MINUTE) == 1);
    for (uint32_t i = 0; i <= claims; i++)
        CHECK(kvfs_unclaim(client, &one) == 1);
    CHECK(kvfs_unclaim(client, &one) == 0);
    end(client, b); /* with an answer on its way */
    free(data);
    free(sizes);
    printf("ok claims of more blocks than a frame has, and more than may be on their way\n");
}

/* Neither a crash nor a wait, and all else goes on. */
static void test_hostile_answers(void) {
    for (uint32_t t = 0; t < 2; t++)
        for (enum trick trick = HANG; trick < TRICKS_OF_ANSWERS; trick++) {
            struct batch *b;
            uint32_t timeout_ms = 250 * (uint32_t)slowness();
            struct kvfs_client *client = begin(&b, timeout_ms);
            locked();
            d.trick = trick;
            d.trick_type = t ? WIRE_RELEASE : WIRE_LEASE;
            unlocked();
            uint64_t started = milliseconds();
            CHECK(kvfs_claim(client, &b->keys, MINUTE) == COUNT);
            int64_t left = COUNT;
            bool released = false;
            while (t && !released && milliseconds() - started < 2000 * slowness()) { /* until its answer is there to be given back */
                left -= kvfs_unclaim(client, &b->keys);
                locked();
                released = d.releases > 0;
                unlocked();
                usleep(500);
            }
            CHECK_SAY(left >= 0 && released == (t > 0), "type %u, trick %d: %lld left, released: %d", t, trick, (long long)left, released);
            for (uint64_t until = milliseconds() + timeout_ms; milliseconds() <= until;) /* No claim was sent later than now. */
                usleep(1000);
            int r = kvfs_claim(client, &b->keys, MINUTE); /* no daemon that is late, or was left, is told */
            CHECK_SAY(r >= 0 && (r == 0 || (trick != HANG && trick != HALF_FRAME && trick != HALF_PAYLOAD)), "type %u, trick %d: %d", t, trick, r);
            CHECK(kvfs_unclaim(client, &b->keys) >= 0);
            locked();
            d.trick = HONEST;
            unlocked();
            batch_get(client, b, 1);
            end(client, b);
        }
    printf("ok answers that are late, none, or lies\n");
}

struct looker {
    struct kvfs_client *client;
    atomic_bool looks, answered;
};

/* As a call does that looks for a daemon: others that need one wait for it. */
static void *look_for_a_daemon(void *argument) {
    struct looker *looker = argument;
    pthread_mutex_lock(&looker->client->lock);
    atomic_store(&looker->looks, true);
    for (uint64_t until = milliseconds() + 10000 * slowness(); !atomic_load(&looker->answered);) {
        CHECK(milliseconds() < until);
        usleep(1000);
    }
    pthread_mutex_unlock(&looker->client->lock);
    return NULL;
}

static void test_nobody_waits_for_who_looks_for_a_daemon(void) {
    struct batch *b;
    for (uint32_t unclaims = 0; unclaims < 2; unclaims++) {
        struct kvfs_client *client = begin(&b, 30000);
        struct looker looker = {.client = client};
        pthread_t thread;
        CHECK(pthread_create(&thread, NULL, look_for_a_daemon, &looker) == 0);
        while (!atomic_load(&looker.looks))
            usleep(100);
        CHECK((unclaims ? kvfs_unclaim(client, &b->keys) : kvfs_claim(client, &b->keys, MINUTE)) == 0); /* the client's first */
        atomic_store(&looker.answered, true);
        CHECK(pthread_join(thread, NULL) == 0);
        CHECK(kvfs_claim(client, &b->keys, MINUTE) == COUNT && kvfs_unclaim(client, &b->keys) == COUNT);
        end(client, b);
    }
    printf("ok a claim does not wait for a call that looks for a daemon\n");
}

struct worker {
    struct kvfs_client *client;
    struct batch *b;
};

static void *work(void *argument) {
    struct worker *worker = argument;
    for (uint32_t i = 0; i < 300; i++) {
        struct kvfs_keys keys = part(worker->b, i % COUNT, 1 + i % (COUNT - i % COUNT));
        int r = kvfs_claim(worker->client, &keys, i % 7 ? MINUTE : 1);
        CHECK_SAY(r == 0 || r == (int)keys.count, "%d", r);
        if (i % 5)
            CHECK(kvfs_unclaim(worker->client, &keys) >= 0);
        if (i % 50 == 0)
            CHECK(kvfs_release(worker->client, 1u << 20) == 0);
    }
    return NULL;
}

static void test_threads(void) {
    struct batch *b;
    struct kvfs_client *client = begin(&b, 30000);
    struct worker worker = {client, b};
    pthread_t threads[4];
    for (uint32_t i = 0; i < 4; i++)
        CHECK(pthread_create(&threads[i], NULL, work, &worker) == 0);
    for (uint32_t i = 0; i < 4; i++)
        CHECK(pthread_join(threads[i], NULL) == 0);
    while (kvfs_unclaim(client, &b->keys) > 0)
        ;
    end(client, b);
    printf("ok claims of many threads\n");
}

int main(void) {
    alarm(300 * slowness());
    signal(SIGPIPE, SIG_DFL);
    devices_open();
    test_a_claim();
    test_keys_that_come_back_before_the_answer();
    test_many();
    test_hostile_answers();
    test_nobody_waits_for_who_looks_for_a_daemon();
    test_threads();
    devices_close();
    return 0;
}
