/* An idle client hears of the end of its daemon. A thread of the client waits for nothing but the socket's hanging up. Then a pool that was unmounted
 * is let go of: its devices are closed, so that they can be formatted, detached or removed. A daemon that died leaves its socket's file, and its table
 * is right until another daemon comes: reads go on, and the devices stay open. */
#include "base/descriptor.h"
#include "client/client.h"

#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/stat.h>

#define LOOK_AGAIN_MS 500
/* Under a held mount the next daemon may take its time; one that ends in order takes its socket's file away. */
#define HELD_LOOKS 60
#define LOOK_MS 1000 /* another connection is seen by then; and so is the end, where a program has closed our descriptors with all others */

/* A program that closed ours may have a file of its own there by now: that is not waited for, written to, or closed. */
static bool is_ours(const struct kvfs_client *client, int end) {
    struct stat st;
    return client->watch_fds[end] >= 0 && fstat(client->watch_fds[end], &st) == 0 && S_ISSOCK(st.st_mode) && st.st_ino == client->watch_inodes[end];
}

/* Returns the socket to wait for; -1: there is none. *again: what is to be let go of is still used, or another daemon may come. *strange: looks at a
 * socket's file that is not the daemon's. One is not enough: a daemon that starts takes the file away a moment before it listens. */
static int look(struct kvfs_client *client, unsigned *strange, bool *again) {
    pthread_mutex_lock(&client->lock);
    connection_poll(client->connection);
    const struct connection *connection = client->connection;
    *strange = connection->gone && connection->fds && !listener_is_same(client, connection) ? *strange + 1 : 0;
    uint64_t listener[4];
    listener_of(client, listener);
    if (connection->gone && (connection->closed || *strange > (connection->held && !listener[1] ? HELD_LOOKS : 1)))
        client_leave(client);
    client_prune(client);
    connection = client->connection;
    *again = client->retired || (connection->gone && connection->fds);
    int fd = connection->gone ? -1 : connection->socket;
    pthread_mutex_unlock(&client->lock);
    return fd;
}

static void *watch_main(void *argument) {
    struct kvfs_client *client = argument;
    unsigned strange = 0;
    kvfs_own_thread();
    while (!atomic_load(&client->closing) && is_ours(client, 0)) {
        bool again;
        struct pollfd polls[2] = {{.fd = look(client, &strange, &again), .events = POLLRDHUP}, {.fd = client->watch_fds[0], .events = POLLIN}};
        if (poll(polls, 2, again ? LOOK_AGAIN_MS : LOOK_MS) <= 0)
            continue;
        if (polls[1].revents) /* the end, or the program has closed one of the two */
            break;
        if (polls[0].revents) /* a thread that waits for an answer may be the one to receive it */
            poll(NULL, 0, 1);
    }
    return NULL;
}

static void ends_close(struct kvfs_client *client) {
    for (int end = 0; end < 2; end++) {
        if (is_ours(client, end))
            close(client->watch_fds[end]);
        client->watch_fds[end] = -1;
    }
}

void client_watch(struct kvfs_client *client) {
    /* Without it the client lets go at its next call. */
    int *fds = client->watch_fds;
    if (descriptors_above(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, fds), fds) < 0) {
        fds[0] = fds[1] = -1;
        return;
    }
    bool good = true;
    for (int end = 0; end < 2; end++) {
        struct stat st;
        fds[end] = kvfs_own_descriptor(fds[end]);
        if (fds[end] >= 0 && fstat(fds[end], &st) == 0)
            client->watch_inodes[end] = st.st_ino;
        else
            good = false;
    }
    sigset_t all, before; /* a program's signals are not for our threads */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    good = good && pthread_create(&client->watcher, NULL, watch_main, client) == 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (!good)
        ends_close(client);
}

void client_watch_end(struct kvfs_client *client) {
    if (client->watch_fds[0] < 0)
        return;
    atomic_store(&client->closing, true);
    if (is_ours(client, 1))
        send(client->watch_fds[1], "", 1, MSG_DONTWAIT | MSG_NOSIGNAL);
    pthread_join(client->watcher, NULL);
    ends_close(client);
}
