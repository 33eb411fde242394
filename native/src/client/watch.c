/* An idle client hears of the end of its daemon. A thread of the client waits for nothing but the socket's hanging up. Then a pool that was unmounted
 * is let go of: its devices are closed, so that they can be formatted, detached or removed. A daemon that died leaves its socket's file, and its table
 * is right until another daemon comes: reads go on, and the devices stay open. */
#include "base/descriptor.h"
#include "client/client.h"

#include <poll.h>
#include <signal.h>
#include <sys/eventfd.h>

#define LOOK_AGAIN_MS 500

/* Returns the socket to wait for; -1: there is none. *again: what is to be let go of is still used, or another daemon may come. *strange: looks at a
 * socket's file that is not the daemon's. One is not enough: a daemon that starts takes the file away a moment before it listens. */
static int look(struct kvfs_client *client, unsigned *strange, bool *again) {
    pthread_mutex_lock(&client->lock);
    connection_poll(client->connection);
    const struct connection *connection = client->connection;
    *strange = connection->gone && connection->fds && !listener_is_same(client, connection) ? *strange + 1 : 0;
    if (connection->gone && (connection->closed || *strange > 1))
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
    while (!atomic_load(&client->closing)) {
        bool again;
        struct pollfd polls[2] = {{.fd = look(client, &strange, &again), .events = POLLRDHUP}, {.fd = client->watch_fd, .events = POLLIN}};
        if (poll(polls, 2, again ? LOOK_AGAIN_MS : -1) <= 0)
            continue;
        uint64_t count;
        if (polls[1].revents & POLLIN && read(client->watch_fd, &count, sizeof(count)) < 0)
            continue;
        if (polls[1].revents & ~POLLIN) /* the program has closed it */
            return NULL;
        if (polls[0].revents) /* a thread that waits for an answer may be the one to receive it */
            poll(NULL, 0, 1);
    }
    return NULL;
}

void client_watch(struct kvfs_client *client) {
    /* Without it the client lets go at its next call. */
    int fd = kvfs_own_descriptor(descriptor_above(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)));
    if (fd < 0)
        return;
    client->watch_fd = fd;
    sigset_t all, before; /* a program's signals are not for our threads */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int r = pthread_create(&client->watcher, NULL, watch_main, client);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (r != 0) {
        close(fd);
        client->watch_fd = -1;
    }
}

void client_watch_end(struct kvfs_client *client) {
    if (client->watch_fd < 0)
        return;
    atomic_store(&client->closing, true);
    wake_fd(client->watch_fd);
    pthread_join(client->watcher, NULL);
    close(client->watch_fd);
    client->watch_fd = -1;
}
