/* Subscriptions: the daemon's feed of changes (block/feed.h), as events of one namespace. A subscriber maps the feed and polls it. It asks the daemon
 * only at its begin, for paths of directories that the feed leaves out, and after the daemon was gone. */
#include "block/feed.h"
#include "client/client.h"

#define KEY_MAX 255u      /* bytes */
#define SHORT_DIGITS 254u /* hex digits of the longest key whose name is one file's */
#define ANCHORS 32u       /* directories whose paths are remembered */
#define POLL_MIN_NS 200000u
#define POLL_MAX_NS 10000000u
#define GONE_NS 100000000u /* between two looks for a new daemon */

struct anchor {
    uint64_t inode;
    uint32_t size;
    char *path; /* from the root; NULL: none is remembered here */
};
struct kvfs_events {
    struct kvfs_client *client;
    struct connection *connection;
    struct feed_reader reader;
    struct anchor anchors[ANCHORS];
    uint32_t anchor_next;
    bool reset; /* a RESET of all is to be told: the reader is another daemon's */
    bool held;  /* `record` is read and not told: a gap before it was */
    char *base; /* the namespace's path from the root, and its size */
    uint32_t base_size;
    struct feed_record record;
    uint8_t key[KEY_MAX];
    char text[FEED_TEXT_MAX];
    char path[2 * FEED_TEXT_MAX + 2]; /* anchor, '/', text */
};

/* ---- keys ---- */

/* 0 to 15, or -1. */
static int digit(char c) { return c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1; }

uint32_t key_of_path(const char *path, uint32_t size, uint8_t *key) {
    char digits[2 * KEY_MAX];
    uint32_t count = 0;
    /* XX/<hex>, or XX/<254 digits and a letter g to v, a digit too>/<the others, an odd number>. */
    if (size < 5 || path[2] != '/')
        return 0;
    for (uint32_t i = 3; i < size; i++) {
        char c = path[i];
        bool joint = count == SHORT_DIGITS && i == 3 + SHORT_DIGITS && c >= 'g' && c <= 'v' && i + 2 < size && path[i + 1] == '/';
        if (count == sizeof(digits) || (!joint && digit(c) < 0))
            return 0;
        digits[count++] = joint ? "0123456789abcdef"[c - 'g'] : c;
        i += joint;
    }
    if (count % 2 || (count > SHORT_DIGITS && size == 3 + count) || memcmp(digits, path, 2) != 0)
        return 0;
    for (uint32_t i = 0; i < count; i += 2)
        key[i / 2] = (uint8_t)(digit(digits[i]) << 4 | digit(digits[i + 1]));
    return count / 2;
}

/* ---- paths ---- */

static int ask(struct kvfs_events *events, uint32_t operation, uint64_t inode, uint8_t **reply, uint32_t *reply_size, int *fd) {
    struct kvfs_client *client = events->client;
    struct wire_events request = {.operation = operation, .inode = inode};
    struct wire_pending pending;
    wire_send(events->connection, WIRE_EVENTS, &request, sizeof(request), client->options.timeout_ms, &pending);
    wire_wait(events->connection, &pending);
    int r = wire_answer(client, &pending, reply, reply_size);
    if (fd && r == 0)
        *fd = pending.descriptor;
    else if (pending.descriptor >= 0)
        close(pending.descriptor);
    return r;
}

static void anchors_forget(struct kvfs_events *events) {
    for (uint32_t i = 0; i < ANCHORS; i++) {
        free(events->anchors[i].path);
        events->anchors[i].path = NULL;
    }
}

/* The directory's path from the root, "" for that; valid until the next call. -ENOENT: it has gone. */
static int anchor_path(struct kvfs_events *events, uint64_t inode, const struct anchor **out) {
    static const struct anchor root = {.inode = 1, .path = ""};
    *out = &root;
    if (inode == 1)
        return 0;
    for (uint32_t i = 0; i < ANCHORS; i++)
        if (events->anchors[i].path && events->anchors[i].inode == inode) {
            *out = &events->anchors[i];
            return 0;
        }
    uint8_t *reply;
    uint32_t size;
    int r = ask(events, KVFS_WIRE_EVENTS_PATH, inode, &reply, &size, NULL);
    if (r < 0)
        return r;
    if (size >= FEED_TEXT_MAX || memchr(reply, 0, size)) {
        free(reply);
        return client_fail(-EPROTO, "%s: the daemon's path of directory %llu has %u bytes", events->client->pool, (unsigned long long)inode, size);
    }
    struct anchor *anchor = &events->anchors[events->anchor_next++ % ANCHORS];
    free(anchor->path);
    *anchor = (struct anchor){inode, size, (char *)reply};
    *out = anchor;
    return 0;
}

/* The namespace's path: of the client's directory, and the space below it. -ENOENT: that directory has gone. */
static int base_find(struct kvfs_events *events) {
    const struct kvfs_client *client = events->client;
    const struct anchor *anchor;
    int r = anchor_path(events, client->base, &anchor);
    if (r < 0)
        return r;
    uint32_t space = (uint32_t)strlen(client->space), joint = anchor->size && space;
    char *base = malloc(anchor->size + joint + space + 1u);
    if (!base)
        return client_fail(-ENOMEM, "%s: no memory for a path", client->pool);
    copy_bytes(base, anchor->path, anchor->size);
    memcpy(base + anchor->size, "/", joint);
    strcpy(base + anchor->size + joint, client->space);
    free(events->base);
    events->base = base;
    events->base_size = anchor->size + joint + space;
    return 0;
}

/* `path` is `above`, or lies below it. */
static bool is_below(const char *path, uint32_t size, const char *above, uint32_t above_size) {
    return size >= above_size && memcmp(path, above, above_size) == 0 && (!above_size || size == above_size || path[above_size] == '/');
}

/* ---- the feed ---- */

static int subscribe(struct kvfs_events *events) {
    struct kvfs_client *client = events->client;
    struct wire_feed feed;
    uint8_t *reply;
    uint32_t size;
    int fd, r = ask(events, KVFS_WIRE_EVENTS_BEGIN, 0, &reply, &size, &fd);
    if (r < 0)
        return r;
    if (size != sizeof(feed) || fd < 0)
        r = client_fail(-EPROTO, "%s: the daemon answered a subscription with %u bytes%s", client->pool, size, fd < 0 ? " and no descriptor" : "");
    if (r == 0) {
        memcpy(&feed, reply, sizeof(feed));
        struct feed_reader reader;
        r = feed_attach(fd, feed.size, feed.position, feed.number, &reader);
        if (r == 0) {
            feed_detach(&events->reader);
            events->reader = reader;
        } else {
            client_fail(r = -EPROTO, "%s: the daemon's feed of %llu bytes makes no sense", client->pool, (unsigned long long)feed.size);
        }
    }
    if (fd >= 0)
        close(fd);
    free(reply);
    return r;
}

/* The daemon was gone: subscribe to one that is there now. 0: there is none yet. 1: it is another, and anything may have changed. */
static int resubscribe(struct kvfs_events *events) {
    struct connection *connection;
    int r = connection_get(events->client, &connection);
    if (r < 0)
        return r == -ETIMEDOUT ? 0 : r;
    if (connection->gone || connection == events->connection) {
        connection_put(connection);
        return 0;
    }
    struct connection *before = events->connection;
    connection_lighten(connection);
    events->connection = connection;
    r = subscribe(events);
    if (r < 0) {
        events->connection = before;
        connection_put_light(connection);
        return r == -ETIMEDOUT || r == -ENOTCONN ? 0 : r;
    }
    connection_put_light(before);
    anchors_forget(events);
    r = base_find(events);
    events->held = false;
    events->reset = true;
    return r < 0 && r != -ENOENT ? r : 1;
}

static void event_make(struct kvfs_events *events, struct kvfs_block_event *out, uint32_t kind, const char *path, uint32_t size) {
    const struct feed_record *record = &events->record;
    *out = (struct kvfs_block_event){.kind = kind,
                                     .reason = record->reason,
                                     .number = record->number,
                                     .size = record->size,
                                     .time_ns = record->time_ns,
                                     .path = path,
                                     .path_size = size};
}

static void gap_make(const struct kvfs_events *events, struct kvfs_block_event *out, uint64_t lost) {
    const struct feed_record *record = &events->record;
    *out = (struct kvfs_block_event){.kind = KVFS_GAP, .number = record->number, .lost = lost, .time_ns = record->time_ns, .path = ""};
}

/* A directory has another path. 1: *out is told of it. */
static int look_told(struct kvfs_events *events, const char *path, uint32_t size, struct kvfs_block_event *out) {
    bool inside = is_below(path, size, events->base, events->base_size);
    bool around = is_below(events->base, events->base_size, path, size);
    anchors_forget(events);
    int r = events->client->base == 1 ? 0 : base_find(events);
    if (r < 0 && r != -ENOENT)
        return r;
    if (!inside && !around)
        return 0;
    uint32_t skip = !inside || size == events->base_size ? size : events->base_size + (events->base_size != 0);
    event_make(events, out, KVFS_RESET, path + skip, size - skip);
    return 1;
}

/* The record that was read, as an event. 1; 0: it is not of this namespace. */
static int record_told(struct kvfs_events *events, struct kvfs_block_event *out) {
    const struct feed_record *record = &events->record;
    const struct anchor *anchor;
    if (record->kind == FEED_LOST) {
        gap_make(events, out, 1);
        return 1;
    }
    int r = anchor_path(events, record->anchor, &anchor);
    if (r == -ENOENT) { /* nobody can tell where it was */
        gap_make(events, out, 1);
        return 1;
    }
    if (r < 0)
        return r;
    uint32_t joint = anchor->size && record->text_size, size = anchor->size + joint + record->text_size;
    char *path = events->path;
    copy_bytes(path, anchor->path, anchor->size);
    memcpy(path + anchor->size, "/", joint);
    copy_bytes(path + anchor->size + joint, events->text, record->text_size);
    path[size] = 0;
    if (record->kind == FEED_LOOK)
        return look_told(events, path, size, out);
    if (!is_below(path, size, events->base, events->base_size) || size == events->base_size)
        return 0;
    uint32_t skip = events->base_size + (events->base_size != 0);
    event_make(events, out, record->kind == FEED_STORED ? KVFS_STORED : KVFS_REMOVED, path + skip, size - skip);
    out->key_size = key_of_path(out->path, out->path_size, events->key);
    out->key = out->key_size ? events->key : NULL;
    return 1;
}

/* 1; 0: nothing is there, or nothing of this namespace for a while. */
static int next_now(struct kvfs_events *events, struct kvfs_block_event *out) {
    for (uint32_t passed = 0; passed < 4096; passed++) {
        uint64_t lost = 0;
        if (events->reset) {
            events->reset = false;
            *out = (struct kvfs_block_event){.kind = KVFS_RESET, .reason = KVFS_REASON_DAEMON, .path = ""};
            return 1;
        }
        if (!events->held) {
            int r = feed_read(&events->reader, &events->record, events->text, &lost);
            if (r < 0)
                return client_fail(-EPROTO, "%s: the daemon's feed makes no sense at byte %llu", events->client->pool,
                                   (unsigned long long)events->reader.position);
            if (r == 0)
                return 0;
            events->held = true;
        }
        if (lost) {
            gap_make(events, out, lost);
            out->number--; /* of the last that was lost */
            return 1;
        }
        int r = record_told(events, out);
        if (r == -ENOTCONN || r == -ETIMEDOUT)
            return 0; /* the daemon has gone: what it alone could tell is in the reset */
        events->held = false;
        if (r)
            return r;
    }
    return 0;
}

/* ---- the interface ---- */

int kvfs_events_open(struct kvfs_client *client, struct kvfs_events **out) {
    *out = NULL;
    struct kvfs_events *events = calloc(1, sizeof(*events));
    if (!events)
        return client_fail(-ENOMEM, "%s: no memory for a subscription", client->pool);
    events->client = client;
    int r = connection_get(client, &events->connection);
    if (r == 0)
        connection_lighten(events->connection);
    if (r == 0)
        r = subscribe(events);
    if (r == 0)
        r = base_find(events);
    if (r < 0) {
        kvfs_events_close(events);
        return r;
    }
    *out = events;
    return 0;
}

int kvfs_events_next(struct kvfs_events *events, struct kvfs_block_event *out, uint32_t timeout_ms) {
    struct kvfs_client *client = events->client;
    if (client->pid != getpid())
        return client_fail(-ECHILD, "%s: this client was connected by process %d; after fork() connect again", client->path, (int)client->pid);
    uint64_t until = now_ns() + timeout_ms * 1000000ull, pause = POLL_MIN_NS, look = 0;
    for (;;) {
        int r = next_now(events, out);
        if (r)
            return r;
        connection_poll(events->connection);
        uint64_t now = now_ns();
        if (events->connection->gone && now >= look) {
            r = resubscribe(events);
            if (r < 0)
                return r;
            if (r)
                continue;
            look = now_ns() + GONE_NS;
        }
        if (now >= until)
            return 0;
        nanosleep(&(struct timespec){.tv_nsec = (long)min_u64(pause, until - now)}, NULL);
        pause = min_u64(pause * 2, POLL_MAX_NS);
    }
}

void kvfs_events_close(struct kvfs_events *events) {
    if (!events)
        return;
    feed_detach(&events->reader);
    anchors_forget(events);
    free(events->base);
    connection_put_light(events->connection);
    free(events);
}
