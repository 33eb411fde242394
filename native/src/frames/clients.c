/* The thread of native clients' connections, and what Python calls for them. */
#include "frames/frames.h"

#include <stdio.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>

#include "base/descriptor.h"

#define TURN_NS UINT64_C(1000000)
/* So often are accounts taken, and so often at most where somebody waits. */
#define ACCOUNT_NS UINT64_C(20000000)
#define ACCOUNT_SOON_NS UINT64_C(1000000)
#define EVENTS_MAX 64

/* ---- turns ---- */

static struct connection *of_work(struct link *link) { return (struct connection *)(void *)((char *)link - offsetof(struct connection, work)); }
static struct client_user *of_turn(struct link *link) { return (struct client_user *)(void *)((char *)link - offsetof(struct client_user, turn)); }

static void frame_take(struct clients *clients, struct connection *connection) {
    const struct wire_frame *head = &connection->head;
    atomic_fetch_add_explicit(&clients->frames, 1, memory_order_relaxed);
    if (frame_use(clients, connection))
        return;
    struct frame *frame = malloc(sizeof(*frame) + head->size);
    if (!frame) {
        connection_end(clients, connection, NULL);
        return;
    }
    *frame = (struct frame){.told = {.client = connection->number, .what = KVFS_CLIENT_FRAME, .type = head->type, .size = head->size},
                            .plane = clients->plane,
                            .connection = connection,
                            .cost = connection->cost,
                            .id = head->id,
                            .hears = frame_hears(head->type),
                            .fd = -1};
    frame->told.payload = frame->payload;
    copy_bytes(frame->payload, connection->data + sizeof(*head), head->size);
    connection_used(connection);
    frame_begin(clients, connection, frame);
}

/* A frame, or a part of one. False: it waits for something. */
static bool connection_step(struct clients *clients, struct connection *connection) {
    if (!connection->running && !connection_frame(clients, connection))
        return false;
    if (!connection->running)
        frame_take(clients, connection);
    if (connection->running)
        frame_run(clients, connection);
    return !connection->ended;
}

void clients_turn(struct clients *clients) {
    struct client_user *user = of_turn(clients->turns.after);
    link_drop(&user->turn);
    uint64_t begun = now_ns(), until = begun + TURN_NS;
    if (user->looks)
        frames_settle(clients, user, begun + TURN_NS / 2);
    for (bool first = true; !link_empty(&user->ready) && (first || now_ns() < until); first = false) {
        struct connection *connection = of_work(user->ready.after);
        link_drop(&connection->work);
        if (connection_step(clients, connection) && !connection->work.after)
            link_add(&user->ready, &connection->work);
    }
    if (!link_empty(&user->ready) || user->looks)
        user_ready(clients, user);
}

/* ---- what Python tells ---- */

static void command_run(struct clients *clients, struct command *command) {
    struct connection *connection = command->what == COMMAND_SERVE ? command->connection : connection_find(clients, command->client);
    if (!connection)
        return;
    switch (command->what) {
    case COMMAND_SERVE: connection_enter(clients, connection); break;
    case COMMAND_END: connection_end(clients, connection, NULL); break;
    case COMMAND_CLOSE: connection_close(clients, connection); break;
    case COMMAND_REMEMBER: connection_remember(connection, &command->space); break;
    }
}

static void answer_run(struct clients *clients, struct frame *frame) {
    struct connection *connection = connection_find(clients, frame->told.client);
    if (!connection)
        return;
    if (frame->failed) {
        connection_end(clients, connection, NULL);
    } else if (frame->hears) {
        connection->handed_hears--;
        connection_give(clients, connection, frame->cost);
        if (connection->paused)
            connection_ready(clients, connection);
    } else if (frame->dropped) {
        connection_give(clients, connection, frame->cost);
    } else {
        uint8_t *data = frame->answer;
        frame->answer = NULL;
        connection_answer(clients, connection, frame, frame->status, data, frame->answer_size, frame->fd);
    }
}

static void hear_python(struct clients *clients) {
    uint64_t count;
    if (read(clients->wake, &count, sizeof(count)) < 0)
        return;
    pthread_mutex_lock(&clients->lock);
    struct command *commands = clients->commands;
    struct frames answered = clients->answered;
    clients->commands = NULL;
    clients->answered = (struct frames){0};
    clients->woken = false;
    pthread_mutex_unlock(&clients->lock);
    for (struct command *next; commands; commands = next) {
        next = commands->next;
        command_run(clients, commands);
        free(commands);
    }
    for (struct frame *frame; (frame = frames_take(&answered));) {
        answer_run(clients, frame);
        frame_free(frame);
    }
}

/* ---- the thread ---- */

static void reap(struct clients *clients) {
    while (clients->dead) {
        struct connection *connection = clients->dead;
        struct client_user *user = connection->user, **at = &clients->users;
        clients->dead = connection->next;
        connection_free(connection);
        if (!user || --user->refs)
            continue;
        if (user->turn.after)
            link_drop(&user->turn);
        if (user->settles.after)
            link_drop(&user->settles);
        while (*at != user)
            at = &(*at)->next;
        *at = user->next;
        free(user);
    }
}

void clients_account(struct clients *clients, uint64_t now) {
    if (!clients->changed)
        return;
    if (clients->account_ns == UINT64_MAX)
        clients->account_ns = now + ACCOUNT_NS;
    if (reservations_have_come(clients->plane, &clients->gains))
        clients->account_ns = min_u64(clients->account_ns, clients->accounted_ns + ACCOUNT_SOON_NS);
    if (now < clients->account_ns)
        return;
    clients->changed = !event_add(clients->plane, KVFS_EVENT_RESERVED, 0, 0);
    clients->account_ns = clients->changed ? now + ACCOUNT_NS : UINT64_MAX;
    clients->accounted_ns = now;
}

static int wait_ms(struct clients *clients, uint64_t now) {
    uint64_t until = min_u64(clients->sweep_ns, clients->account_ns);
    if (!link_empty(&clients->turns))
        return 0;
    if (!link_empty(&clients->settling))
        until = min_u64(until, clients->settle_ns);
    return until == UINT64_MAX ? -1 : until <= now ? 0 : (int)min_u64((until - now) / 1000000 + 1, 60000);
}

static void *clients_main(void *argument) {
    struct clients *clients = argument;
    struct epoll_event events[EVENTS_MAX];
    while (!atomic_load(&clients->stopping)) {
        int count = epoll_wait(clients->poll, events, EVENTS_MAX, wait_ms(clients, now_ns()));
        for (int i = 0; i < count; i++) {
            struct connection *connection = events[i].data.ptr;
            if (!connection) {
                hear_python(clients);
                continue;
            }
            if (connection->ended)
                continue;
            connection->readable |= (events[i].events & ~(uint32_t)EPOLLOUT) != 0;
            if (events[i].events & (EPOLLOUT | EPOLLHUP | EPOLLERR)) {
                connection->sendable = true;
                connection_flush(clients, connection);
            }
            if (connection->readable && !connection->starved && !connection->paused)
                connection_ready(clients, connection);
        }
        if (!link_empty(&clients->turns))
            clients_turn(clients);
        uint64_t now = now_ns();
        frames_settle_soon(clients, now);
        if (clients->sweep_ns <= now)
            connections_sweep(clients, now);
        clients_account(clients, now);
        reap(clients);
    }
    return NULL;
}

int kvfs_clients_start(struct kvfs_plane *plane, const struct kvfs_clients_config *config) {
    struct clients *clients = calloc(1, sizeof(*clients));
    assert(!plane->clients);
    if (!clients)
        return -ENOMEM;
    *clients = (struct clients){.plane = plane, .config = *config, .sweep_ns = UINT64_MAX, .account_ns = UINT64_MAX};
    pthread_mutex_init(&clients->lock, NULL);
    link_init(&clients->turns);
    link_init(&clients->settling);
    link_init(&clients->handing);
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = NULL};
    clients->poll = descriptor_above(epoll_create1(EPOLL_CLOEXEC));
    clients->wake = descriptor_above(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
    clients->told = descriptor_above(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
    clients->aligned = malloc(8 * KVFS_WIRE_ITEMS_MAX);
    int r = !clients->aligned ? -ENOMEM : clients->poll < 0 || clients->wake < 0 || clients->told < 0 ? -errno : 0;
    if (r == 0 && epoll_ctl(clients->poll, EPOLL_CTL_ADD, clients->wake, &event) < 0)
        r = -errno;
    if (r == 0)
        r = -pthread_create(&clients->thread, NULL, clients_main, clients);
    clients->started = r == 0;
    plane->clients = clients;
    if (r < 0)
        clients_stop(plane);
    return r < 0 ? r : clients->told;
}

void clients_stop(struct kvfs_plane *plane) {
    struct clients *clients = plane->clients;
    if (!clients)
        return;
    if (clients->started) {
        atomic_store(&clients->stopping, true);
        wake_fd(clients->wake);
        pthread_join(clients->thread, NULL);
    }
    for (uint32_t i = 0; i < CONNECTION_BUCKETS; i++)
        while (clients->buckets[i])
            connection_end(clients, clients->buckets[i], NULL);
    reap(clients);
    for (struct command *command = clients->commands, *next; command; command = next) {
        next = command->next;
        if (command->what == COMMAND_SERVE)
            connection_free(command->connection);
        free(command);
    }
    for (struct frame *frame; (frame = frame_handed(clients)) || (frame = frames_take(&clients->answered));)
        frame_free(frame);
    int fds[] = {clients->poll, clients->wake, clients->told};
    for (uint32_t i = 0; i < 3; i++)
        if (fds[i] >= 0)
            close(fds[i]);
    pthread_mutex_destroy(&clients->lock);
    free(clients->aligned);
    free(clients);
    plane->clients = NULL;
}

/* ---- for Python ---- */

/* With the lock, which it releases. */
static void wake_thread(struct clients *clients) {
    bool wake = !clients->woken;
    clients->woken = true;
    pthread_mutex_unlock(&clients->lock);
    if (wake)
        wake_fd(clients->wake);
}

static void command_add(struct clients *clients, struct command *command) {
    pthread_mutex_lock(&clients->lock);
    command->next = NULL;
    if (clients->commands)
        clients->commands_last->next = command;
    else
        clients->commands = command;
    clients->commands_last = command;
    wake_thread(clients);
}

int64_t kvfs_client_serve(struct kvfs_plane *plane, const struct kvfs_client *client) {
    struct command *command = calloc(1, sizeof(*command));
    struct connection *connection = command ? connection_new(client) : NULL;
    if (!connection) {
        free(command);
        return -ENOMEM;
    }
    command->what = COMMAND_SERVE;
    command->connection = connection;
    connection->number = ++plane->clients->last_number;
    int64_t number = (int64_t)connection->number;
    command_add(plane->clients, command);
    return number;
}

/* No word of this kind may be lost. */
static struct command *command_make(void) {
    struct command *command;
    while (!(command = calloc(1, sizeof(*command))))
        usleep(10000);
    return command;
}

void kvfs_client_end(struct kvfs_plane *plane, uint64_t client, int tell) {
    struct command *command = command_make();
    command->what = tell ? COMMAND_CLOSE : COMMAND_END;
    command->client = client;
    command_add(plane->clients, command);
}

void kvfs_client_remember(struct kvfs_plane *plane, uint64_t client, uint64_t base, const void *space, uint32_t space_size,
                          const struct kvfs_shard shards[KVFS_SHARDS]) {
    struct command *command = calloc(1, sizeof(*command));
    if (!command || space_size > KVFS_WIRE_SPACE_MAX) {
        free(command);
        return;
    }
    command->what = COMMAND_REMEMBER;
    command->client = client;
    command->space = (struct space){.base = base, .moves = atomic_load(&plane->reservations.changes), .size = space_size};
    copy_bytes(command->space.path, space, space_size);
    memcpy(command->space.shards, shards, sizeof(command->space.shards));
    command_add(plane->clients, command);
}

int kvfs_clients_take(struct kvfs_plane *plane, struct kvfs_client_frame **out, uint32_t count) {
    struct clients *clients = plane->clients;
    struct frame *frame;
    uint64_t told;
    uint32_t n = 0;
    pthread_mutex_lock(&clients->lock);
    while (n < count && (frame = frame_handed(clients)))
        out[n++] = &frame->told;
    /* Who hands on writes to the descriptor after the lock: then it is readable soon. */
    if (link_empty(&clients->handing) && clients->told_python)
        clients->told_python = read(clients->told, &told, sizeof(told)) != sizeof(told);
    pthread_mutex_unlock(&clients->lock);
    return (int)n;
}

static void frame_return(struct kvfs_plane *plane, struct frame *frame) {
    struct clients *clients = plane->clients;
    frame_finish(frame); /* before its holder goes: nothing of it waits for the thread */
    if (frame->told.what == KVFS_CLIENT_ENDED) {
        frame_free(frame);
        return;
    }
    pthread_mutex_lock(&clients->lock);
    frames_add(&clients->answered, frame);
    wake_thread(clients);
}

void kvfs_client_answer(struct kvfs_plane *plane, struct kvfs_client_frame *told, int32_t status, const void *data, uint64_t size, int fd) {
    struct frame *frame = (struct frame *)(void *)told;
    frame->dropped = status == KVFS_CLIENT_NO_ANSWER;
    status = status > 0 || status < -KVFS_WIRE_ERRNO_MAX ? -EIO : status;
    if (!data && status == 0 && told->reserve) {
        frame->answer_size = told->reserve->answer_size;
        frame->answer = reserve_take_answer(told->reserve);
    } else if (!data && status == 0 && told->commit) {
        data = told->commit->answers;
        size = (told->size - sizeof(uint64_t)) / sizeof(struct wire_commit) * sizeof(int64_t);
    }
    if (!frame->answer && size) {
        /* A client has chosen the size: Python waits for no such memory. */
        frame->answer = malloc(size);
        frame->failed = !frame->answer;
        copy_bytes(frame->answer, data, frame->answer ? size : 0);
        frame->answer_size = size;
    }
    frame->status = status;
    frame->fd = fd;
    frame_return(plane, frame);
}

struct clients_count clients_count(struct kvfs_plane *plane) {
    struct clients *clients = plane->clients;
    return (struct clients_count){atomic_load(&clients->connected), atomic_load(&clients->frames), atomic_load(&clients->handed_count)};
}
