/* Frames of native clients: how large each may be, their queues, and their way to Python. */
#include "frames/frames.h"

#define LISTED_SIZE (8 + 512) /* of a key of LIST, at most */
#define WHERE_MAX (sizeof(struct wire_where) + KVFS_WIRE_SPACE_MAX + 1)
#define TABLE_MAX (8u + KVFS_WIRE_DIRECTORIES_MAX * (8u + KVFS_WIRE_SPACE_MAX + 1))
#define NAMES_MAX (WHERE_MAX + TABLE_MAX + KVFS_WIRE_ITEMS_MAX * (sizeof(struct wire_reserve) + 8 + 256))

static_assert(CONNECTION_SIZE + KVFS_CLIENT_SPACES * sizeof(struct space) + 2 * NAMES_MAX + REQUEST_SIZE + KVFS_WIRE_ITEMS_MAX * LISTED_SIZE <
                  MEMORY_OF_CONNECTION,
              "a frame that has to wait for room finds some");

uint32_t frame_size_max(uint32_t type, uint32_t *item_size) {
    *item_size = 0;
    switch (type) {
    case WIRE_RESERVE: *item_size = KVFS_RESERVED_SIZE; return NAMES_MAX;
    case WIRE_COMMIT: return 8 + KVFS_WIRE_ITEMS_MAX * sizeof(struct wire_commit);
    case WIRE_DELETE: return NAMES_MAX;
    case WIRE_LIST: *item_size = LISTED_SIZE; return WHERE_MAX + 8 + 512;
    case WIRE_LOOKUP: return 16 + 256;
    case WIRE_EVENTS: return sizeof(struct wire_events);
    case WIRE_BAD_BLOCK: return 16;
    case WIRE_HITS:
    case WIRE_TOUCH:
    case WIRE_DONE: return 8 * KVFS_WIRE_ITEMS_MAX;
    case WIRE_FOREIGN: return 8 + KVFS_WIRE_ITEMS_MAX * sizeof(struct wire_foreign_block);
    case WIRE_FOREIGN_LEASE: return sizeof(struct wire_lease) + KVFS_WIRE_ITEMS_MAX * sizeof(struct wire_foreign_block);
    case WIRE_FRESH: return 0;
    case WIRE_LEASE: return sizeof(struct wire_lease) + 8 * KVFS_WIRE_ITEMS_MAX;
    case WIRE_RELEASE: return 8;
    case WIRE_REPORT: return 8 * 64;
    default: return UINT32_MAX;
    }
}

bool frame_hears(uint32_t type) {
    return type == WIRE_HITS || type == WIRE_TOUCH || type == WIRE_DONE || type == WIRE_REPORT || type == WIRE_BAD_BLOCK || type == WIRE_FOREIGN;
}

void frames_add(struct frames *frames, struct frame *frame) {
    frame->next = NULL;
    if (frames->first)
        frames->last->next = frame;
    else
        frames->first = frame;
    frames->last = frame;
}

struct frame *frames_take(struct frames *frames) {
    struct frame *frame = frames->first;
    if (frame)
        frames->first = frame->next;
    return frame;
}

void frames_forget(struct frames *frames, const struct connection *connection) {
    struct frames others = {0};
    for (struct frame *frame; (frame = frames_take(frames));)
        if (frame->connection == connection)
            frame_free(frame);
        else
            frames_add(&others, frame);
    *frames = others;
}

void frame_finish(struct frame *frame) {
    if (frame->told.reserve)
        kvfs_reserve_end(frame->plane, frame->told.reserve);
    if (frame->told.commit)
        kvfs_commit_end(frame->told.commit);
    frame->told.reserve = NULL;
    frame->told.commit = NULL;
}

void frame_free(struct frame *frame) {
    frame_finish(frame);
    free(frame->answer);
    free(frame);
}

void frame_hand(struct clients *clients, struct frame *frame, const struct connection *connection) {
    struct user *user = user_get(clients->plane, connection->uid);
    frame->connection = NULL;
    atomic_fetch_add(&clients->handed_count, frame->told.what == KVFS_CLIENT_FRAME);
    pthread_mutex_lock(&clients->lock);
    frames_add(&user->handed, frame);
    if (!user->handing.after)
        link_add(&clients->handing, &user->handing);
    bool wake = !clients->told_python;
    clients->told_python = true;
    pthread_mutex_unlock(&clients->lock);
    if (wake)
        wake_fd(clients->told);
}

struct frame *frame_handed(struct clients *clients) {
    if (link_empty(&clients->handing))
        return NULL;
    struct user *user = (void *)((char *)clients->handing.after - offsetof(struct user, handing));
    struct frame *frame = frames_take(&user->handed);
    link_drop(&user->handing);
    if (user->handed.first)
        link_add(&clients->handing, &user->handing);
    return frame;
}
