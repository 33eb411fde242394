/* sources: base io */
/* Turns of I/O: bytes under way are bounded, deadlines count from a device's last answer, and owners do not wait for each other's queues. The double answers when the test says so: steadily, late, out of order, or never. */
#include "io/ring.h"

#include "check.h"

#define DEVICES 2u
#define UNIT ((uint64_t)1 << 20)
#define ZONE ((uint64_t)64 << 20)
#define SEGMENTS 2u
#define MS 1000000ull
#define MANY 60u
#define BOUND ((uint64_t)32 << 20) /* no ring has more under way on a device */

static struct kvfs_array array;
static struct ring ring;
static struct io_part *kept[DEVICES][1024]; /* parts of a device, in the order of their start */
static uint32_t kept_count[DEVICES], starts, cancels, errors;
static uint64_t under_way[DEVICES], most;
static uint8_t *memory;

static void double_start(struct ring *of, struct io_part *part) {
    uint32_t device = part->device;
    CHECK(of == &ring && kept_count[device] < 1024);
    starts++;
    kept[device][kept_count[device]++] = part;
    under_way[device] += part->size;
    most = under_way[device] > most ? under_way[device] : most;
}

static void double_cancel(struct ring *of, struct io_part *part) {
    (void)of;
    CHECK(!part->done);
    cancels++;
}

static const struct device_ops double_ops = {.start = double_start, .cancel = double_cancel};

/* The device answers the i-th of those that it has. */
static void answer(uint32_t device, uint32_t i, int error) {
    struct io_part *part = kept[device][i];
    CHECK(i < kept_count[device]);
    memmove(&kept[device][i], &kept[device][i + 1], (--kept_count[device] - i) * sizeof(part));
    under_way[device] -= part->size;
    CHECK(ring_part_delay(&ring, part, 0, error < 0 ? error : (int)part->size));
}

static void on_error(struct kvfs_array *of, uint32_t device, int error) {
    CHECK(of == &array && device < DEVICES && error);
    errors++;
}

static void world_start(uint32_t width, uint32_t timeout_ms) {
    const struct geometry geometry = {.stripe_unit = UNIT, .zone_size = ZONE, .stripe_width = width, .segment_count = SEGMENTS};
    memset(&array, 0, sizeof(array));
    CHECK(array_init(&array, &geometry, DEVICES) == 0);
    array.io_timeout_ms = timeout_ms;
    array.on_error = on_error;
    starts = cancels = errors = 0;
    most = 0;
    for (uint32_t i = 0; i < DEVICES; i++) {
        kept_count[i] = 0;
        under_way[i] = 0;
        array.devices[i].fd = -1;
        device_kind_set(&array.devices[i], &double_ops);
    }
    for (uint32_t s = 0; s < SEGMENTS; s++)
        for (uint32_t m = 0; m < width; m++)
            array.members[s * width + m] = (struct kvfs_member){width == 1 ? s : m, s};
    CHECK(ring_init(&ring, &array, 64) == 0);
    CHECK(memory = calloc(2, UNIT));
}

static void world_end(void) {
    CHECK(ring_idle(&ring) && ring.waiting == 0 && atomic_load(&array.orphans) == 0);
    for (uint32_t s = 0; s < SEGMENTS; s++)
        CHECK(atomic_load(&array.segment_busy[s]) == 0);
    ring_free(&ring);
    array_free(&array);
    free(memory);
}

struct wait {
    uint32_t left, expired, order;
    int result;
};
static uint32_t ended;

static void wait_done(struct io_group *group, bool reaped) {
    struct wait *wait = group->owner;
    CHECK(!reaped || wait->expired);
    wait->expired += !reaped && group->expired;
    wait->left -= reaped || !group->expired;
    if (group->result && !wait->result)
        wait->result = group->result;
    if (!wait->left)
        wait->order = ++ended;
}

/* `count` I/Os of `size` bytes of segment 0: with width 1 on device 0. */
static void add(struct wait *wait, bool write, uint32_t count, uint64_t size) {
    *wait = (struct wait){0};
    for (uint32_t i = 0; i < count; i++) {
        wait->left++;
        CHECK(ring_io(&ring, write, 0, 0, &(struct iovec){memory, size}, 1, NULL, 0, wait_done, wait) == 0);
    }
}

static void step(uint64_t ms) {
    ring_wait(&ring, ms * MS);
    ring_reap(&ring);
}

/* Answer what the device has, one after the other, each after `ms`. */
static void answer_all(uint32_t device, uint64_t ms) {
    while (kept_count[device]) {
        for (uint64_t until = now_ns() + ms * MS; now_ns() < until;)
            step(1);
        if (kept_count[device]) /* else it was late after all */
            answer(device, 0, 0);
        step(0);
    }
}

/* A device that is slow, but answers: nothing is late for being behind others, by far more than a deadline. */
static void test_a_steady_device_misses_no_deadline(void) {
    const uint32_t timeout = 160 * slowness();
    struct wait waits[4];
    world_start(1, timeout);
    for (uint32_t i = 0; i < 4; i++)
        add(&waits[i], i % 2, MANY / 4, UNIT);
    uint64_t began = now_ns();
    answer_all(0, timeout / 16);
    CHECK(now_ns() - began > 3 * timeout * MS);
    for (uint32_t i = 0; i < 4; i++)
        CHECK_SAY(waits[i].left == 0 && waits[i].result == 0 && waits[i].expired == 0, "owner %u: %u left, %d", i, waits[i].left, waits[i].result);
    CHECK(starts == MANY && cancels == 0 && errors == 0 && atomic_load(&array.devices[0].timeouts) == 0);
    CHECK_SAY(most <= BOUND, "%llu bytes under way", (unsigned long long)most);
    world_end();
}

/* The bound follows the device: what it answers at once raises it, up to the limit; what takes long lowers it. */
static void test_the_bound_follows_the_device(void) {
    struct wait wait;
    world_start(1, 2000 * slowness());
    add(&wait, false, 200, UNIT);
    uint32_t first = kept_count[0];
    answer_all(0, 0);
    CHECK_SAY(first < 4 && most > 8 * UNIT && most <= BOUND && wait.result == 0 && wait.left == 0, "%u, then %llu bytes", first,
              (unsigned long long)most);
    add(&wait, false, 100, UNIT);
    CHECK(under_way[0] > 8 * UNIT);
    for (uint32_t i = 0; i < 40; i++) {
        kept[0][0]->started_ns -= 1000 * slowness() * MS; /* as if it had taken so long */
        answer(0, 0, 0);
        step(0);
    }
    CHECK_SAY(under_way[0] <= 2 * UNIT, "%llu bytes", (unsigned long long)under_way[0]);
    answer_all(0, 0);
    CHECK(wait.result == 0 && wait.left == 0);
    world_end();
}

/* A device that gives no answer is found out within its deadline. Parts that wait for it end too, and their memory is no device's. */
static void test_a_silent_device_keeps_nothing_waiting(void) {
    const uint32_t timeout = 200 * slowness();
    struct wait wait, other;
    world_start(2, timeout);
    add(&wait, false, MANY, 2 * UNIT); /* of both devices */
    uint64_t last = now_ns();
    for (uint32_t i = 0; i < 5; i++) {
        answer(0, 0, 0);
        answer(1, 0, 0);
        step(0);
        last = now_ns();
    }
    while (wait.left > wait.expired) {
        while (kept_count[1]) /* the other one goes on */
            answer(1, 0, 0);
        step(10);
        CHECK_SAY(now_ns() - last < (timeout + 5000 * slowness()) * MS, "%u of %u", wait.left, MANY);
    }
    CHECK(wait.result == -ETIMEDOUT && now_ns() - last >= timeout * MS);
    CHECK_SAY(wait.expired > 0 && wait.left == wait.expired && wait.expired == atomic_load(&array.orphans), "%u expired", wait.expired);
    CHECK(kept_count[0] == wait.left && atomic_load(&array.devices[0].timeouts) == kept_count[0] && errors == kept_count[0]);
    CHECK(atomic_load(&array.devices[1].timeouts) == 0);
    /* It comes back: late answers are taken, and what is new is answered. */
    add(&other, true, 3, 2 * UNIT);
    answer_all(0, 0);
    answer_all(1, 0);
    CHECK(other.left == 0 && other.result == 0 && wait.left == 0);
    world_end();
}

/* A client leaves such a device alone: nothing that waits goes there. */
static void test_both_devices_are_silent(void) {
    const uint32_t timeout = 200 * slowness();
    struct wait wait;
    world_start(2, timeout);
    array.fail_fast = true;
    add(&wait, false, MANY, 2 * UNIT);
    uint64_t began = now_ns();
    uint32_t before = starts;
    while (wait.left > wait.expired)
        step(10);
    CHECK(now_ns() - began < (timeout + 5000 * slowness()) * MS && wait.result == -ETIMEDOUT && starts == before);
    CHECK(ring_io(&ring, false, 0, 0, &(struct iovec){memory, UNIT}, 1, NULL, 0, wait_done, &wait) == -ETIMEDOUT);
    answer_all(0, 0);
    answer_all(1, 0);
    CHECK(wait.left == 0);
    world_end();
}

/* One command is lost among others that are answered: it ends, after no more than four deadlines, and the others never notice. */
static void test_a_lost_one_ends(void) {
    const uint32_t timeout = 100 * slowness();
    struct wait lost, others;
    world_start(1, timeout);
    array.fail_fast = true;
    add(&lost, false, 1, UNIT);
    uint64_t began = now_ns();
    add(&others, false, 1, PAGE);
    while (!lost.expired) {
        if (kept_count[0] > 1)
            answer(0, 1, 0);
        if (others.left == 0)
            add(&others, false, 1, PAGE);
        step(timeout / 20);
        CHECK(others.result == 0 && now_ns() - began < (4 * timeout + 5000 * slowness()) * MS);
    }
    CHECK(now_ns() - began >= 2 * timeout * MS && lost.result == -ETIMEDOUT && lost.left == 1);
    CHECK(errors == 1 && atomic_load(&array.devices[0].stuck_until_ns) == 0); /* the device is no silent one */
    answer_all(0, 0);
    CHECK(lost.left == 0 && others.left == 0 && others.result == 0);
    world_end();
}

/* Owners take turns: one of few bytes waits for what is under way, not for all that another has queued. */
static void test_a_small_one_does_not_wait_for_a_large_one(void) {
    struct wait large, small[3];
    world_start(1, 5000 * slowness());
    add(&large, false, 500, UNIT);
    for (uint32_t i = 0; i < 3; i++)
        add(&small[i], false, 2, PAGE);
    for (uint32_t i = 0; i < 16; i++) {
        answer(0, 0, 0);
        step(0);
    }
    for (uint32_t i = 0; i < 3; i++)
        CHECK_SAY(small[i].left == 0 && small[i].result == 0, "%u: %u left", i, small[i].left);
    CHECK(large.left > 480);
    uint32_t before = starts;
    ring_drop(&ring, &large); /* its owner needs it no more */
    CHECK(large.result == -ECANCELED && large.left == kept_count[0] && ring.waiting == 0);
    answer_all(0, 0);
    CHECK(large.left == 0 && starts == before);
    world_end();
}

/* Blocks of one size end one after the other, so that who proves them has work; and nobody waits for ever behind small ones. */
static void test_the_oldest_goes_on(void) {
    struct wait waits[4], small;
    world_start(1, 5000 * slowness());
    for (uint32_t i = 0; i < 4; i++)
        add(&waits[i], false, 40, UNIT);
    while (waits[0].left) {
        answer(0, 0, 0);
        step(0);
    }
    CHECK_SAY(waits[1].left > 0 && waits[3].left >= 39, "%u and %u left", waits[1].left, waits[3].left);
    uint32_t left = waits[1].left;
    for (uint32_t i = 0; i < 200 && waits[1].left; i++) {
        add(&small, false, 1, PAGE);
        for (uint32_t k = 0; small.left && k < 100; k++) {
            answer(0, 0, 0);
            step(0);
        }
        CHECK(small.left == 0);
    }
    CHECK_SAY(waits[1].left < left / 2, "%u of %u left", waits[1].left, left);
    answer_all(0, 0);
    for (uint32_t i = 0; i < 4; i++)
        CHECK(waits[i].left == 0 && waits[i].result == 0);
    world_end();
}

/* Parts that wait for a device never begin if it leaves, or is another by now; nor does a write whose time is over. */
static void test_what_waits_for_a_device_that_changes(void) {
    struct wait waits[3];
    world_start(1, 5000 * slowness());
    for (uint32_t turn = 0; turn < 3; turn++) {
        ring.start_by_ns = turn == 2 ? now_ns() + 20 * MS : 0;
        add(&waits[turn], true, 20, UNIT);
        ring.start_by_ns = 0;
        uint32_t before = starts, under = kept_count[0];
        if (turn == 0)
            atomic_store(&array.devices[0].stopped, true);
        else if (turn == 1)
            atomic_fetch_add(&array.devices[0].uses, 1);
        else
            usleep(30000);
        answer_all(0, 0);
        atomic_store(&array.devices[0].stopped, false);
        CHECK_SAY(starts == before && under < 20 && waits[turn].left == 0, "turn %u: %u more", turn, starts - before);
        CHECK(waits[turn].result == (turn == 2 ? -ETIMEDOUT : -EIO) && waits[turn].expired == 0);
    }
    world_end();
}

/* An error of one does not end others; a retry has what the first attempt left of its time, unless the device has answered since. */
static void test_errors_and_retries(void) {
    const uint32_t timeout = 1000 * slowness();
    struct wait wait, retry;
    world_start(1, timeout);
    add(&wait, false, 10, UNIT);
    answer(0, 0, -EIO);
    answer_all(0, 0);
    CHECK(wait.left == 0 && wait.result == -EIO && errors == 1);
    uint64_t until = now_ns() + timeout / 10 * MS, began = now_ns();
    ring.until_ns = until;
    add(&retry, false, 1, UNIT);
    while (!retry.expired)
        step(10);
    CHECK(now_ns() >= until && now_ns() - began < (timeout / 10 + 5000) * MS && errors == 1); /* the device had no whole deadline */
    CHECK(ring_io(&ring, false, 0, 0, &(struct iovec){memory, UNIT}, 1, NULL, 0, wait_done, &retry) == -ETIMEDOUT);
    ring_renew(&ring, &ring.until_ns);
    CHECK(ring.until_ns >= until + timeout / 2 * MS);
    ring.until_ns = 0;
    answer_all(0, 0);
    CHECK(retry.left == 0);
    world_end();
}

static struct wait other_wait;

static void refused_done(struct io_group *group, bool reaped) {
    struct wait *wait = group->owner;
    CHECK(!reaped && wait->left == 1 && group->result == -ETIMEDOUT);
    wait->left--;
    CHECK(ring.until_ns == 0 && ring.start_by_ns == 0);
    add(&other_wait, false, 1, UNIT);
}

/* A callback before ring_io() returns: I/O that it begins is another's, without the deadlines of the refused one. */
static void test_a_refusal_in_the_same_call(void) {
    struct wait wait = {.left = 1};
    world_start(1, 5000 * slowness());
    const uint64_t until = now_ns() + 1000 * MS;
    ring.until_ns = until;
    ring.start_by_ns = 1; /* long ago */
    CHECK(ring_io(&ring, true, 0, 0, &(struct iovec){memory, UNIT}, 1, NULL, 0, refused_done, &wait) == 0);
    CHECK(wait.left == 0 && ring.until_ns == until && ring.start_by_ns == 1);
    ring.until_ns = ring.start_by_ns = 0;
    CHECK(starts == 1 && kept[0][0]->group->start_by_ns == 0 && kept[0][0]->group->patience_ns == 5000 * slowness() * MS);
    answer_all(0, 0);
    CHECK(other_wait.left == 0 && other_wait.result == 0);
    world_end();
}

int main(void) {
    slowness();
    RUN(test_a_steady_device_misses_no_deadline);
    RUN(test_the_bound_follows_the_device);
    RUN(test_a_silent_device_keeps_nothing_waiting);
    RUN(test_both_devices_are_silent);
    RUN(test_a_lost_one_ends);
    RUN(test_a_small_one_does_not_wait_for_a_large_one);
    RUN(test_the_oldest_goes_on);
    RUN(test_what_waits_for_a_device_that_changes);
    RUN(test_errors_and_retries);
    RUN(test_a_refusal_in_the_same_call);
    return 0;
}
