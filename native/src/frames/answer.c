/* Frames that the thread answers by itself: RESERVE with known directories and room, COMMIT with names in memory, uses. All others are Python's, whole or
 * from where they stand. */
#include "frames/frames.h"

#include <stdio.h>

/* Of what one user may tell of uses, in a second of one device; and what a block costs beside its own bytes. */
#define DEVICE_BYTES_S (UINT64_C(8) << 30)
#define BLOCK_COST (UINT64_C(16) << 10)
#define TOGETHER_S 2u
/* A commit waits this long for earlier reservations of its segments to be settled, then for the index instead. */
#define SETTLE_NS UINT64_C(20000000)
/* So often is looked whether other hands have ended those. */
#define SETTLE_POLL_NS UINT64_C(2000000)

/* ---- uses ---- */

/* Bytes that the user may tell now: they come at a rate. */
static uint64_t credit(struct clients *clients, struct user *user) {
    uint64_t rate = DEVICE_BYTES_S * clients->plane->config.device_count, most = rate * TOGETHER_S, now = now_ns();
    double come = (double)(now - user->told_ns) / 1e9 * (double)rate;
    user->told_left = user->told_ns && come < (double)most ? min_u64(most, user->told_left + (uint64_t)come) : most;
    user->told_ns = now;
    return user->told_left;
}

static void use(struct clients *clients, struct user *user, uint32_t type, const uint64_t *inodes, uint32_t count) {
    if (type == WIRE_DONE)
        kvfs_inode_done(clients->plane, inodes, count);
    else
        user->told_left = kvfs_inode_told(clients->plane, inodes, count, type == WIRE_HITS, credit(clients, user), BLOCK_COST);
}

bool frame_use(struct clients *clients, struct connection *connection) {
    uint32_t type = connection->head.type, size = connection->head.size;
    uint64_t cost = connection->cost, foreign_cost = size / sizeof(struct wire_foreign_block) * BLOCK_COST;
    struct user *user = connection->user->user;
    bool uses = type == WIRE_HITS || type == WIRE_TOUCH || type == WIRE_DONE;
    if (type == WIRE_FOREIGN && foreign_cost <= credit(clients, user)) {
        user->told_left -= foreign_cost;
        return false; /* Python has the rest of it */
    }
    if (!uses && type != WIRE_FOREIGN)
        return false;
    if (uses && size % 8) {
        char text[64];
        snprintf(text, sizeof(text), "inodes in %u bytes", size);
        connection_end(clients, connection, text);
        return true;
    }
    if (uses) {
        copy_bytes(clients->aligned, connection->data + sizeof(struct wire_frame), size);
        use(clients, user, type, clients->aligned, size / 8);
    }
    connection_used(connection);
    connection_give(clients, connection, cost);
    return true;
}

/* ---- directories ---- */

void connection_remember(struct connection *connection, const struct space *space) {
    uint32_t at = 0;
    while (at < KVFS_CLIENT_SPACES && connection->spaces[at] &&
           (connection->spaces[at]->base != space->base || connection->spaces[at]->size != space->size ||
            memcmp(connection->spaces[at]->path, space->path, space->size) != 0))
        at++;
    if (at == KVFS_CLIENT_SPACES)
        at = connection->next_space++ % KVFS_CLIENT_SPACES;
    if (!connection->spaces[at]) {
        if (connection->user->kept + sizeof(*space) > KVFS_CLIENT_MEMORY || !(connection->spaces[at] = malloc(sizeof(*space))))
            return;
        connection_keep(connection, sizeof(*space));
    }
    *connection->spaces[at] = *space;
}

static const struct space *space_find(struct kvfs_plane *plane, const struct connection *connection, const struct wire_where *where,
                                      const uint8_t *path) {
    uint64_t moves = atomic_load(&plane->reservations.changes);
    for (uint32_t i = 0; i < KVFS_CLIENT_SPACES; i++) {
        const struct space *space = connection->spaces[i];
        if (space && space->base == where->base && space->size == where->space_size && space->moves == moves &&
            memcmp(space->path, path, where->space_size) == 0)
            return space;
    }
    return NULL;
}

/* ---- RESERVE ---- */

/* False: it is Python's to begin. It also says which rule is broken. */
static bool reserve_start(struct clients *clients, struct connection *connection, struct frame *frame) {
    struct wire_where where;
    struct kvfs_table_statistics table;
    uint8_t missing[KVFS_SHARDS];
    uint32_t size = frame->told.size;
    if (!connection->writable || size < sizeof(where))
        return false;
    memcpy(&where, frame->payload, sizeof(where));
    uint64_t items_at = sizeof(where) + round_up(where.space_size, 8);
    if (where.count > KVFS_WIRE_ITEMS_MAX || where.flags & ~(WIRE_HASHES | WIRE_PARENTS) || where.space_size > KVFS_WIRE_SPACE_MAX || items_at > size)
        return false;
    const struct space *space = space_find(clients->plane, connection, &where, frame->payload + sizeof(where));
    kvfs_table_statistics(clients->plane->table, &table);
    if (!space || table.records >= table.records_max)
        return false;
    const uint8_t *items = frame->payload + items_at;
    if (kvfs_frame_check(WIRE_RESERVE, where.flags, items, size - items_at, where.count, 0, space->shards, missing) != 0)
        return false;
    frame->told.reserve = kvfs_reserve_begin(&connection->holder->told, where.flags, items, where.count, space->shards, connection->user->uid);
    return frame->told.reserve != NULL;
}

/* Its holder may be gone with the connection, which may end by this. */
static void answer(struct clients *clients, struct frame *frame, uint8_t *data, uint64_t size) {
    struct connection *connection = frame->connection;
    frame_finish(frame);
    connection_answer(clients, connection, frame, 0, data, size, -1);
    frame_free(frame);
}

static void note_change(struct clients *clients, struct connection *connection) {
    clients->changed |= holder_change(clients->plane, connection->holder);
    places_wake(clients->plane);
}

static void reserve_run(struct clients *clients, struct frame *frame) {
    struct kvfs_reserve *told = frame->told.reserve;
    int next = kvfs_reserve(clients->plane, told);
    bool done = next == KVFS_FRAME_DONE || next == -ENOSPC;
    if (done)
        kvfs_reserve_finish(clients->plane, told, now_ns() + (uint64_t)clients->config.clock_ns + clients->config.reservation_ns);
    note_change(clients, frame->connection);
    if (next == KVFS_FRAME_MORE)
        return;
    frame->connection->running = NULL;
    if (!done) {
        frame->told.next = next;
        frame_hand(clients, frame, frame->connection);
        return;
    }
    uint64_t size = told->answer_size;
    answer(clients, frame, reserve_take_answer(told), size);
}

/* ---- COMMIT ---- */

static bool commit_start(struct connection *connection, struct frame *frame) {
    uint64_t count;
    uint32_t size = frame->told.size;
    if (!connection->writable || size < sizeof(count))
        return false;
    memcpy(&count, frame->payload, sizeof(count));
    const uint8_t *items = frame->payload + sizeof(count);
    if (count > KVFS_WIRE_ITEMS_MAX || kvfs_frame_check(WIRE_COMMIT, 0, items, size - sizeof(count), (uint32_t)count, 0, NULL, NULL) != 0)
        return false;
    frame->told.commit = kvfs_commit_begin(&connection->holder->told, items, (uint32_t)count);
    return frame->told.commit != NULL;
}

static void commit_answer(struct clients *clients, struct frame *frame) {
    uint64_t size = frame->told.size - sizeof(uint64_t);
    size = size / sizeof(struct wire_commit) * sizeof(int64_t);
    uint8_t *data = malloc(size + 1);
    if (!data) {
        connection_end(clients, frame->connection, NULL);
        frame_free(frame);
        return;
    }
    copy_bytes(data, frame->told.commit->answers, size);
    answer(clients, frame, data, size);
}

static void commit_run(struct clients *clients, struct frame *frame) {
    struct kvfs_commit *told = frame->told.commit;
    int next = kvfs_commit(clients->plane, told);
    struct client_user *user = frame->connection->user;
    note_change(clients, frame->connection);
    clients->runs_ended = true;
    /* Blocks that have lost their names, and hosts that may know them, are Python's. */
    bool alone = next != KVFS_FRAME_NAMES && !told->replaced && !told->lingering_count;
    if (next == KVFS_FRAME_MORE && alone)
        return;
    frame->connection->running = NULL;
    frame->told.next = next;
    if (next != KVFS_FRAME_DONE || !alone || told->durable) {
        frame_hand(clients, frame, frame->connection);
        return;
    }
    if (commit_is_settled(clients->plane, told)) {
        commit_answer(clients, frame);
        return;
    }
    frame->settles_until_ns = now_ns() + SETTLE_NS;
    frames_add(&user->settling, frame);
    if (link_empty(&clients->settling))
        clients->settle_ns = now_ns() + SETTLE_POLL_NS;
    if (!user->settles.after)
        link_add(&clients->settling, &user->settles);
}

void frames_settle(struct clients *clients, struct client_user *user, uint64_t until) {
    struct frames waiting = user->settling, looked = {0};
    uint64_t now = 0;
    user->settling = (struct frames){0};
    while (waiting.first && now < until) {
        struct frame *frame = frames_take(&waiting);
        now = now_ns();
        if (commit_is_settled(clients->plane, frame->told.commit)) {
            /* The end of its connection would look for others among those that wait. */
            struct connection *connection = frame->connection;
            commit_answer(clients, frame);
            if (connection->ended) {
                frames_forget(&waiting, connection);
                frames_forget(&looked, connection);
            }
        } else if (frame->settles_until_ns <= now) {
            frame->told.commit->durable = 1;
            frame_hand(clients, frame, frame->connection);
        } else {
            frames_add(&looked, frame);
        }
    }
    /* The next part begins with those that had none. */
    user->looks = waiting.first != NULL;
    for (struct frame *frame; (frame = frames_take(&waiting)) || (frame = frames_take(&looked));)
        frames_add(&user->settling, frame);
}

void frames_settle_soon(struct clients *clients, uint64_t now) {
    if (link_empty(&clients->settling) || (!clients->runs_ended && now < clients->settle_ns))
        return;
    clients->runs_ended = false;
    clients->settle_ns = now + SETTLE_POLL_NS;
    for (struct link *at = clients->settling.after, *next; at != &clients->settling; at = next) {
        struct client_user *user = (void *)((char *)at - offsetof(struct client_user, settles));
        next = at->after;
        if (!user->settling.first) {
            link_drop(at);
            continue;
        }
        user->looks = true;
        user_ready(clients, user);
    }
}

/* ---- any frame ---- */

void frame_begin(struct clients *clients, struct connection *connection, struct frame *frame) {
    uint32_t type = frame->told.type;
    bool ours = type == WIRE_RESERVE ? reserve_start(clients, connection, frame) : type == WIRE_COMMIT && commit_start(connection, frame);
    if (ours) {
        connection->running = frame;
    } else {
        connection->handed_hears += frame->hears;
        frame_hand(clients, frame, connection);
    }
}

void frame_run(struct clients *clients, struct connection *connection) {
    struct frame *frame = connection->running;
    if (frame->told.reserve)
        reserve_run(clients, frame);
    else
        commit_run(clients, frame);
}
