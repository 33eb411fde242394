/* One connection of a native client: its bytes in and out, and how many of them may be kept. */
#include "frames/frames.h"

#include <stdio.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include "base/descriptor.h"

#define FRAME_TIMEOUT_NS (30 * UINT64_C(1000000000)) /* of the rest of a frame that has begun, and of an answer that is being sent */
#define CLOSE_TIMEOUT_NS UINT64_C(1000000000)
#define UNREAD_NS (2 * UINT64_C(1000000000))
#define SWEEP_NS UINT64_C(250000000)
/* Frames without an answer that Python has of a connection. */
#define HEARS_MAX 64u
#define WATCHED (EPOLLIN | EPOLLRDHUP | EPOLLET)

static struct connection *of_user_link(struct link *link) {
    return (struct connection *)(void *)((char *)link - offsetof(struct connection, of_user));
}
static struct connection *of_work(struct link *link) { return (struct connection *)(void *)((char *)link - offsetof(struct connection, work)); }
static struct connection **bucket_of(const struct clients *clients, uint64_t number) {
    return (struct connection **)&clients->buckets[number % CONNECTION_BUCKETS];
}

/* ---- its life ---- */

struct connection *connection_new(const struct kvfs_client *client) {
    struct connection *made = calloc(1, sizeof(*made));
    struct frame *end = calloc(1, sizeof(*end) + 256);
    uint8_t *data = malloc(client->begun_size + 1);
    if (!made || !end || !data) {
        free(made);
        free(end);
        free(data);
        return NULL;
    }
    copy_bytes(data, client->begun, client->begun_size);
    *made = (struct connection){.fd = client->fd,
                                .uid = client->uid,
                                .version = client->version,
                                .writable = client->writable,
                                .holder = (struct holder *)(void *)client->holder,
                                .data = data,
                                .have = client->begun_size,
                                .capacity = client->begun_size + 1,
                                .until_ns = UINT64_MAX,
                                .readable = true,
                                .sendable = true,
                                .end = end};
    return made;
}

void connection_free(struct connection *connection) {
    for (uint32_t i = 0; i < KVFS_CLIENT_SPACES; i++)
        free(connection->spaces[i]);
    free(connection->data);
    free(connection->end);
    free(connection);
}

static struct client_user *user_of(struct clients *clients, uint32_t uid) {
    struct client_user *user = clients->users;
    while (user && user->uid != uid)
        user = user->next;
    if (user || !(user = calloc(1, sizeof(*user))))
        return user;
    user->uid = uid;
    user->user = user_get(clients->plane, uid);
    user->next = clients->users;
    clients->users = user;
    link_init(&user->connections);
    link_init(&user->ready);
    link_init(&user->starved);
    return user;
}

static void look_soon(struct clients *clients) { clients->sweep_ns = min_u64(clients->sweep_ns, now_ns() + SWEEP_NS); }

void connection_enter(struct clients *clients, struct connection *connection) {
    struct epoll_event event = {.events = WATCHED, .data.ptr = connection};
    struct connection **bucket = bucket_of(clients, connection->number);
    connection->next = *bucket;
    *bucket = connection;
    atomic_fetch_add(&clients->connected, 1);
    if ((connection->user = user_of(clients, connection->uid))) {
        connection->user->refs++;
        link_add(&connection->user->connections, &connection->of_user);
        connection_keep(connection, connection->capacity > CONNECTION_SIZE ? connection->capacity : CONNECTION_SIZE);
    }
    connection->in_poll = connection->user && epoll_ctl(clients->poll, EPOLL_CTL_ADD, connection->fd, &event) == 0;
    if (!connection->in_poll) {
        connection_end(clients, connection, NULL);
        return;
    }
    if (connection->have)
        connection->until_ns = now_ns() + FRAME_TIMEOUT_NS;
    connection_ready(clients, connection);
}

struct connection *connection_find(const struct clients *clients, uint64_t number) {
    struct connection *at = *bucket_of(clients, number);
    while (at && at->number != number)
        at = at->next;
    return at;
}

void user_ready(struct clients *clients, struct client_user *user) {
    if (!user->turn.after)
        link_add(&clients->turns, &user->turn);
}

void connection_ready(struct clients *clients, struct connection *connection) {
    struct client_user *user = connection->user;
    if (connection->ended)
        return;
    if (connection->starved)
        link_drop(&connection->work);
    else if (connection->work.after)
        return;
    connection->starved = false;
    link_add(&user->ready, &connection->work);
    user_ready(clients, user);
}

static void outputs_free(struct connection *connection) {
    for (struct output *output = connection->first, *next; output; output = next) {
        next = output->next;
        free(output->data);
        free(output);
    }
    connection->first = connection->last = NULL;
}

void connection_keep(struct connection *connection, uint64_t size) {
    connection->kept += size;
    connection->user->kept += size;
    atomic_fetch_add(&connection->user->user->kept, size); /* very many users have one number together */
}

/* Others of the user may have waited for them. */
static void give(struct clients *clients, struct client_user *user, uint64_t size) {
    assert(user->kept >= size);
    user->kept -= size;
    atomic_fetch_sub(&user->user->kept, size);
    while (size && !link_empty(&user->starved))
        connection_ready(clients, of_work(user->starved.after));
}

void connection_give(struct clients *clients, struct connection *connection, uint64_t size) {
    assert(connection->kept >= size);
    connection->kept -= size;
    give(clients, connection->user, size);
}

void connection_end(struct clients *clients, struct connection *connection, const char *breach) {
    struct connection **at = bucket_of(clients, connection->number);
    struct frame *end = connection->end;
    if (connection->ended)
        return;
    connection->ended = true;
    while (*at != connection)
        at = &(*at)->next;
    *at = connection->next;
    connection->next = clients->dead;
    clients->dead = connection;
    atomic_fetch_sub(&clients->connected, 1);
    if (connection->in_poll)
        epoll_ctl(clients->poll, EPOLL_CTL_DEL, connection->fd, NULL);
    outputs_free(connection);
    if (connection->running)
        frame_free(connection->running);
    connection->running = NULL;
    if (connection->work.after)
        link_drop(&connection->work);
    if (connection->user) {
        frames_forget(&connection->user->settling, connection);
        link_drop(&connection->of_user);
        give(clients, connection->user, connection->kept);
    }
    connection->kept = 0;
    connection->end = NULL;
    end->told = (struct kvfs_client_frame){.client = connection->number, .what = KVFS_CLIENT_ENDED, .payload = end->payload};
    end->told.size = breach ? (uint32_t)snprintf((char *)end->payload, 256, "%s", breach) : 0;
    end->told.size = end->told.size > 255 ? 255 : end->told.size;
    frame_hand(clients, end, connection);
}

/* ---- memory ---- */

static bool is_counted(struct clients *clients, struct connection *connection) {
    struct client_user *user = connection->user;
    bool own = connection->kept + connection->cost <= MEMORY_OF_CONNECTION;
    if (connection->counted)
        return true;
    if (own && user->kept + connection->cost <= KVFS_CLIENT_MEMORY) {
        connection_keep(connection, connection->cost);
        connection->until_ns = now_ns() + FRAME_TIMEOUT_NS;
        connection->starved_ns = 0;
        return connection->counted = true;
    }
    /* Only the user's room is worth another connection's end. */
    connection->own_starved = !own;
    connection->starved_ns = connection->starved_ns ? connection->starved_ns : now_ns();
    connection->starved = true;
    assert(!connection->work.after);
    link_add(&user->starved, &connection->work);
    look_soon(clients);
    return false;
}

/* Others of its user want the room: of those that have not read for long, the one that keeps most goes. */
static void end_unread(struct clients *clients, struct client_user *user, uint64_t now) {
    struct connection *most = NULL;
    for (struct link *at = user->connections.after; at != &user->connections; at = at->after) {
        struct connection *one = of_user_link(at);
        if (one->unread_ns && one->unread_ns + UNREAD_NS < now && (!most || one->kept > most->kept))
            most = one;
    }
    if (most)
        connection_end(clients, most, NULL);
}

/* ---- in ---- */

static bool resize(struct connection *connection, uint64_t capacity) {
    uint8_t *data = realloc(connection->data, capacity);
    if (!data)
        return false;
    connection->data = data;
    connection->capacity = capacity;
    return true;
}

static bool make_room(struct connection *connection, uint64_t size) {
    return size <= connection->capacity || resize(connection, size > connection->capacity * 2 ? size : connection->capacity * 2);
}

bool connection_receive(struct clients *clients, struct connection *connection) {
    uint64_t frame = sizeof(struct wire_frame) + connection->head.size;
    uint64_t wanted = connection->headed && frame > connection->have + RECEIVE_SIZE ? frame - connection->have : RECEIVE_SIZE;
    if (!make_room(connection, connection->have + wanted)) {
        connection_end(clients, connection, NULL);
        return false;
    }
    /* A descriptor that came along stays where it is, as its close may block: the bytes are looked at first. No byte more is received. */
    struct iovec to = {connection->data + connection->have, wanted};
    struct msghdr message = {.msg_iov = &to, .msg_iovlen = 1};
    ssize_t n = recvmsg(connection->fd, &message, MSG_PEEK | MSG_DONTWAIT);
    if (n > 0 && !(message.msg_flags & MSG_CTRUNC))
        n = recv(connection->fd, connection->data + connection->have, (size_t)n, MSG_DONTWAIT);
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
        connection->readable = false;
        return false;
    }
    if (n < 0 && errno == EINTR)
        return true;
    if (n > 0 && message.msg_flags & MSG_CTRUNC) {
        connection_end(clients, connection, "sent a descriptor");
        return false;
    }
    if (n <= 0) {
        connection_end(clients, connection, NULL);
        return false;
    }
    if (!connection->have)
        connection->until_ns = now_ns() + FRAME_TIMEOUT_NS;
    connection->have += (uint64_t)n;
    look_soon(clients);
    return true;
}

static void head_look(struct clients *clients, struct connection *connection) {
    struct wire_frame *head = &connection->head;
    uint64_t there = connection->have - min_u64(connection->have, sizeof(*head));
    uint32_t item_size, size_max;
    if (connection->headed || connection->have < sizeof(*head))
        return;
    memcpy(head, connection->data, sizeof(*head));
    size_max = frame_size_max(head->type, &item_size);
    if (size_max == UINT32_MAX || head->reserved || head->status || head->size > size_max) {
        char text[128];
        snprintf(text, sizeof(text), "a frame of type %u with %u bytes and status %d, in version %u", head->type, head->size, head->status,
                 connection->version);
        connection_end(clients, connection, text);
        return;
    }
    /* The count of items is needed, where there is one. */
    struct wire_where where = {0};
    if (there < min_u64(head->size, sizeof(where)))
        return;
    if (item_size && head->size >= sizeof(where))
        memcpy(&where, connection->data + sizeof(*head), sizeof(where));
    connection->headed = true;
    connection->cost = 2 * (uint64_t)head->size; /* where it is received, or as C has it until its end, and Python */
    if (!frame_hears(head->type))
        connection->cost += REQUEST_SIZE + min_u64(where.count, KVFS_WIRE_ITEMS_MAX) * item_size;
}

bool connection_frame(struct clients *clients, struct connection *connection) {
    for (;;) {
        head_look(clients, connection);
        if (connection->ended)
            return false;
        if (connection->headed) {
            bool to_python = frame_hears(connection->head.type) && connection->head.type != WIRE_HITS && connection->head.type != WIRE_TOUCH &&
                             connection->head.type != WIRE_DONE;
            connection->paused = to_python && connection->handed_hears >= HEARS_MAX;
            if (connection->paused || !is_counted(clients, connection))
                return false;
            if (connection->have - sizeof(struct wire_frame) >= connection->head.size)
                return true;
        }
        if (!connection->readable || !connection_receive(clients, connection))
            return false;
    }
}

void connection_used(struct connection *connection) {
    uint64_t used = sizeof(struct wire_frame) + connection->head.size;
    assert(connection->headed && connection->counted && connection->have >= used);
    connection->have -= used;
    memmove(connection->data, connection->data + used, connection->have);
    connection->headed = connection->counted = false;
    connection->until_ns = connection->have ? now_ns() + FRAME_TIMEOUT_NS : UINT64_MAX;
    if (connection->capacity > CONNECTION_SIZE && connection->have <= CONNECTION_SIZE)
        resize(connection, CONNECTION_SIZE);
}

/* Memory of one that says nothing. */
static void shrink(struct connection *connection) {
    if (connection->have == 0 && connection->capacity) {
        free(connection->data);
        connection->data = NULL;
        connection->capacity = 0;
    }
}

/* ---- out ---- */

/* The first byte takes a descriptor along, which is open for this call alone. */
static ssize_t send_with(const struct connection *connection, struct msghdr *message, int fd) {
    char path[32];
    union {
        struct cmsghdr head;
        char space[CMSG_SPACE(sizeof(int))];
    } rights = {0};
    snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
    int own = descriptor_above(open(path, O_RDONLY | O_CLOEXEC));
    if (own < 0)
        return -1;
    message->msg_control = &rights;
    message->msg_controllen = sizeof(rights.space);
    rights.head = (struct cmsghdr){.cmsg_len = CMSG_LEN(sizeof(int)), .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS};
    memcpy(CMSG_DATA(&rights.head), &own, sizeof(own));
    ssize_t n = sendmsg(connection->fd, message, MSG_DONTWAIT | MSG_NOSIGNAL);
    int error = errno;
    close(own);
    errno = error;
    return n;
}

/* Room to send is looked for where there was none: else each read of the peer's would wake the thread. */
static void arm(struct clients *clients, struct connection *connection) {
    struct epoll_event event = {.events = WATCHED | (connection->sendable ? 0 : EPOLLOUT), .data.ptr = connection};
    if (connection->ended || connection->armed != connection->sendable)
        return;
    connection->armed = !connection->sendable;
    if (epoll_ctl(clients->poll, EPOLL_CTL_MOD, connection->fd, &event) < 0)
        connection_end(clients, connection, NULL);
}

static void flush(struct clients *clients, struct connection *connection) {
    while (connection->first && connection->sendable && !connection->ended) {
        struct output *output = connection->first;
        uint64_t whole = sizeof(output->head) + output->size, from = output->sent;
        struct iovec parts[2] = {
            {(char *)&output->head + min_u64(from, sizeof(output->head)), sizeof(output->head) - min_u64(from, sizeof(output->head))},
            {output->data, output->size}};
        if (from > sizeof(output->head))
            parts[1] = (struct iovec){output->data + (from - sizeof(output->head)), whole - from};
        struct msghdr message = {.msg_iov = parts, .msg_iovlen = 2};
        ssize_t n =
            output->fd >= 0 && !from ? send_with(connection, &message, output->fd) : sendmsg(connection->fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
            connection->sendable = false;
            connection->unread_ns = connection->unread_ns ? connection->unread_ns : now_ns();
            look_soon(clients);
            return;
        }
        if (n < 0) {
            connection_end(clients, connection, NULL);
            return;
        }
        output->sent += (uint64_t)n;
        if (output->sent < whole)
            continue;
        connection->first = output->next;
        connection->unread_ns = 0;
        uint64_t cost = output->cost;
        free(output->data);
        free(output);
        connection_give(clients, connection, cost);
    }
    if (!connection->first && connection->closing)
        connection_end(clients, connection, NULL);
}

void connection_flush(struct clients *clients, struct connection *connection) {
    flush(clients, connection);
    arm(clients, connection);
}

static void send_later(struct clients *clients, struct connection *connection, struct output *output) {
    output->next = NULL;
    if (connection->first)
        connection->last->next = output;
    else
        connection->first = output;
    connection->last = output;
    connection_flush(clients, connection);
}

void connection_answer(struct clients *clients, struct connection *connection, const struct frame *frame, int32_t status, uint8_t *data,
                       uint64_t size, int fd) {
    struct output *output = malloc(sizeof(*output));
    uint64_t cost = REQUEST_SIZE + size;
    assert(status <= 0 && status >= -KVFS_WIRE_ERRNO_MAX && size <= UINT32_MAX);
    if (!output) {
        free(data);
        connection_end(clients, connection, NULL);
        return;
    }
    connection_keep(connection, cost);
    connection_give(clients, connection, frame->cost);
    *output = (struct output){.data = data, .size = size, .cost = cost, .fd = fd};
    output->head = (struct wire_frame){(uint32_t)size, (uint16_t)frame->told.type, 0, status, frame->id};
    send_later(clients, connection, output);
}

void connection_close(struct clients *clients, struct connection *connection) {
    struct output *output = malloc(sizeof(*output));
    connection->closing = true;
    connection->closes_ns = now_ns() + CLOSE_TIMEOUT_NS;
    look_soon(clients);
    if (!output) {
        connection_end(clients, connection, NULL);
        return;
    }
    *output = (struct output){.head = {0, WIRE_CLOSE, 0, 0, 0}, .fd = -1};
    send_later(clients, connection, output);
}

/* ---- deadlines ---- */

/* Returns whether it has one. */
static bool sweep_one(struct clients *clients, struct connection *connection, uint64_t now) {
    bool late = connection->unread_ns && connection->unread_ns + FRAME_TIMEOUT_NS < now;
    /* While it is not read, it is not late: it waits for room, for others' frames, or for a turn. */
    bool held = connection->starved || connection->paused || connection->running;
    if (held && connection->until_ns != UINT64_MAX)
        connection->until_ns = now + FRAME_TIMEOUT_NS;
    late = late || (!connection->work.after && connection->until_ns < now) || (connection->closing && connection->closes_ns < now);
    if (late)
        connection_end(clients, connection, NULL);
    else
        shrink(connection);
    return !late && (connection->unread_ns || connection->until_ns != UINT64_MAX || connection->starved || connection->closing);
}

void connections_sweep(struct clients *clients, uint64_t now) {
    bool any = false;
    for (struct client_user *user = clients->users; user; user = user->next) {
        bool wants = false;
        for (struct link *at = user->starved.after; at != &user->starved; at = at->after) {
            struct connection *one = of_work(at);
            if (!one->own_starved && one->starved_ns + UNREAD_NS < now) {
                one->starved_ns = now;
                wants = true;
            }
        }
        for (struct link *at = user->connections.after, *next; at != &user->connections; at = next) {
            next = at->after;
            any |= sweep_one(clients, of_user_link(at), now);
        }
        if (wants)
            end_unread(clients, user, now);
    }
    clients->sweep_ns = any ? now + SWEEP_NS : UINT64_MAX;
}
