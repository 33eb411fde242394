/* Lanes: a ring for one call at a time, with its fetches; and what of them devices still owe. */
#include "client/client.h"

int lane_take(struct kvfs_client *client, struct connection *connection, struct lane **out) {
    pthread_mutex_lock(&connection->lock);
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_sec += client->options.timeout_ms / 1000;
    until.tv_nsec += client->options.timeout_ms % 1000 * 1000000;
    if (until.tv_nsec >= 1000000000)
        until.tv_sec++, until.tv_nsec -= 1000000000;
    int r = 0;
    while (!connection->idle && connection->lane_count >= LANES_MAX && r == 0)
        r = pthread_cond_timedwait(&connection->lane_idle, &connection->lock, &until);
    assert(connection->lane_count <= LANES_MAX);
    struct lane *lane = connection->idle;
    if (lane)
        connection->idle = lane->next;
    else if (connection->lane_count < LANES_MAX)
        connection->lane_count++, r = 1;
    else
        r = client_fail(-EBUSY, "%s: %u calls are under way, and none ended in %u ms", client->path, LANES_MAX, client->options.timeout_ms);
    pthread_mutex_unlock(&connection->lock);
    if (r == 1) {
        lane = calloc(1, sizeof(*lane));
        r = lane ? ring_init(&lane->ring, &connection->array, 256) : -ENOMEM;
        if (r < 0) {
            free(lane);
            pthread_mutex_lock(&connection->lock);
            connection->lane_count--;
            pthread_cond_signal(&connection->lane_idle);
            pthread_mutex_unlock(&connection->lock);
            return client_fail(r, "%s: rings: %s%s", client->path, descriptor_reason(-r), ring_advice(r));
        }
        lane->connection = connection;
    }
    if (!lane)
        return r < 0 ? r : client_fail(-EBUSY, "%s: no lane became free", client->path);
    assert(lane->connection == connection);
    assert(lane->active_count == 0);
    lane->client = client;
    if (!ring_idle(&lane->ring))
        lane_reap(lane, false);
    *out = lane;
    return 0;
}

void lane_give(struct lane *lane) {
    struct connection *connection = lane->connection;
    assert(lane->active_count == 0);
    assert(!lane->ready);
    pthread_mutex_lock(&connection->lock);
    lane->next = connection->idle;
    connection->idle = lane;
    pthread_cond_signal(&connection->lane_idle);
    pthread_mutex_unlock(&connection->lock);
}

/* False: a device may still write; what it writes to stays. */
bool lane_free(struct lane *lane) {
    lane_reap(lane, false);
    if (!ring_idle(&lane->ring))
        return false;
    assert(lane->orphan_count == 0);
    ring_free(&lane->ring);
    while (lane->free) {
        struct fetch *next = lane->free->next;
        free(lane->free->side);
        spans_free(&lane->free->spans);
        free(lane->free);
        lane->free = next;
    }
    for (uint32_t i = 0; i < 8; i++)
        free(lane->bounces[i]);
    free(lane);
    return true;
}

/* ---- fetches ---- */

struct fetch *fetch_get(struct lane *lane) {
    struct fetch *fetch = lane->free;
    if (fetch) {
        lane->free = fetch->next;
        uint8_t *side = fetch->side;
        struct spans spans = fetch->spans;
        memset(fetch, 0, sizeof(*fetch));
        fetch->side = side;
        fetch->spans = spans;
    } else {
        fetch = calloc(1, sizeof(*fetch));
        void *side = NULL;
        if (!fetch || posix_memalign(&side, KVFS_PAGE_SIZE, SIDE_PAGES * PAGE)) {
            free(fetch);
            return NULL;
        }
        fetch->side = side;
    }
    fetch->lane = lane;
    return fetch;
}

void fetch_recycle(struct fetch *fetch) {
    struct lane *lane = fetch->lane;
    assert(fetch->groups_left == 0);
    assert(fetch->groups_held == 0); /* devices own nothing of it */
    desc_put(fetch->desc);
    if (fetch->bounce)
        lane_bounce_give(lane, fetch->bounce, fetch->bounce_size);
    fetch->desc = NULL;
    fetch->bounce = NULL;
    fetch->next = lane->free;
    lane->free = fetch;
}

void lane_reap(struct lane *lane, bool locked) {
    ring_submit(&lane->ring);
    ring_reap(&lane->ring);
    if (!lane->orphan_count)
        return;
    if (!locked)
        pthread_mutex_lock(&lane->connection->lock);
    for (struct fetch **link = &lane->connection->orphans; *link;) {
        struct fetch *fetch = *link;
        if (fetch->lane != lane || fetch->groups_held) {
            link = &fetch->next;
            continue;
        }
        *link = fetch->next;
        assert(lane->orphan_count > 0);
        lane->orphan_count--;
        atomic_fetch_sub(&lane->client->orphans, 1);
        fetch_recycle(fetch);
    }
    if (!locked)
        pthread_mutex_unlock(&lane->connection->lock);
}

/* connection->lock is held. True: devices owe answers to idle lanes. */
static bool idle_reap(struct connection *connection) {
    bool owed = false;
    for (struct lane *lane = connection->idle; lane; lane = lane->next)
        if (!ring_idle(&lane->ring)) {
            lane_reap(lane, true);
            owed = owed || !ring_idle(&lane->ring);
        }
    return owed;
}

void connection_reap(struct connection *connection) {
    pthread_mutex_lock(&connection->lock);
    idle_reap(connection);
    pthread_mutex_unlock(&connection->lock);
}

/* *owed: whether devices owe answers, to reads or, which are no orphans, to writes. */
bool connection_overlaps(struct connection *connection, const uint8_t *data, uint64_t size, bool *owed) {
    bool found = false;
    pthread_mutex_lock(&connection->lock);
    *owed = idle_reap(connection) || *owed || connection->orphans;
    for (struct fetch *fetch = connection->orphans; fetch; fetch = fetch->next)
        found = found || spans_overlap(&fetch->spans, data, size);
    pthread_mutex_unlock(&connection->lock);
    return found;
}
