/* The way to a daemon from where only its mount is seen, as in a container: the mount itself is asked. This process makes a pair of sockets. It asks for
 * an extended attribute of its directory that names one of them by its number. The daemon takes that descriptor of the asking process, sends
 * a connection over it, and answers. (kvfs/frontend/asked.py is its half.)
 *
 * A mount whose daemon stands still answers nobody, and the call cannot be broken off: a thread makes it, which stays until it returns. There is at
 * most one for each client. One that is asked for nothing but an answer tells a mount that is held from a dead one: the dead one answers at once. */
#include "base/descriptor.h"
#include "client/client.h"

#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <sys/socket.h>
#include <sys/vfs.h>
#include <sys/xattr.h>
#include <unistd.h>

#define GREETING "KVFSASK1"
#define AWAIT_PAUSE_US 2000 /* between two looks for the answer of a mount */

/* Shared by client and thread. */
struct ask {
    atomic_uint refs;
    atomic_bool done; /* result is set */
    int theirs;       /* the end that the daemon takes; the thread's. -1: it is asked for no connection, but whether it answers */
    int result;
    char path[4096];
};

static void ask_put(struct ask *ask) {
    if (ask && atomic_fetch_sub(&ask->refs, 1) == 1)
        free(ask);
}

void ask_forget(struct kvfs_client *client) {
    ask_put(client->ask);
    client->ask = NULL;
}

static void *ask_main(void *argument) {
    struct ask *ask = argument;
    struct statfs about;
    char name[64], answer[64];
    kvfs_own_thread();
    snprintf(name, sizeof(name), "user.kvfs.connect.%d", ask->theirs);
    if (statfs(ask->path, &about) < 0)
        ask->result = -errno;
    else if (about.f_type != FUSE_MAGIC) /* another filesystem would be asked for an attribute that it has never heard of */
        ask->result = -ENOTCONN;
    else if (ask->theirs >= 0 && getxattr(ask->path, name, answer, sizeof(answer)) < 0)
        ask->result = -errno;
    atomic_store(&ask->done, true);
    if (ask->theirs >= 0)
        close(ask->theirs); /* the waiter at the other end wakes up */
    ask_put(ask);
    return NULL;
}

/* The connection that the daemon has sent; -ENOTCONN: none, so the reason is the call's. */
static int connection_receive(int ours, uint64_t deadline_ns) {
    char text[sizeof(GREETING) - 1];
    int fds[KVFS_WIRE_FDS_MAX];
    uint32_t count = 0;
    int r = wire_receive_all(ours, text, sizeof(text), deadline_ns, fds, &count);
    if (r == 0 && (count != 1 || memcmp(text, GREETING, sizeof(text)) != 0))
        r = -EPROTO;
    if (r == 0)
        return fds[0];
    for (uint32_t i = 0; i < count; i++)
        close(fds[i]);
    return r;
}

/* In words, for what the call returned. NULL: the mount is not there, or nobody serves it. */
static const char *why(int result) {
    switch (-result) {
    case ENOTCONN:
    case ECONNABORTED:
    case ENOENT:
    case ENOTDIR: return NULL;
    case ENODATA: return "its daemon lets no client in there: kvfs mount --native-in DIR does";
    case EOPNOTSUPP: return "a guest has no process that the daemon could connect with";
    case ESRCH: return "its daemon does not see this process: it must run in the host's pid namespace";
    case EPERM: return "its daemon may not take a socket from this process: it needs CAP_SYS_PTRACE";
    case EACCES: return "this user may not read that directory";
    default: return strerror(-result);
    }
}

static int ask_start(struct kvfs_client *client, int theirs, struct ask **out) {
    struct ask *ask = calloc(1, sizeof(*ask));
    if (!ask)
        return -ENOMEM;
    atomic_store(&ask->refs, 2);
    ask->theirs = theirs;
    snprintf(ask->path, sizeof(ask->path), "%s", client->place);
    pthread_t thread;
    sigset_t all, before; /* a program's signals are not for our threads */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int r = -pthread_create(&thread, NULL, ask_main, ask);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (r < 0) {
        free(ask);
        return r;
    }
    pthread_detach(thread);
    *out = ask;
    return 0;
}

int ask_mount(struct kvfs_client *client, uint64_t deadline_ns) {
    if (client->ask && !atomic_load(&client->ask->done))
        return client_fail(-ETIMEDOUT, "%s: the mount gives no answer", client->path);
    ask_forget(client);
    int pair[2];
    if (descriptors_above(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair), pair) < 0)
        return client_fail(-errno, "%s: no descriptor to ask the mount with: %s", client->path, descriptor_reason(errno));
    int r = ask_start(client, pair[1], &client->ask);
    if (r < 0) {
        close(pair[0]);
        close(pair[1]);
        return client_fail(r, "%s: no thread to ask the mount with: %s", client->path, strerror(-r));
    }
    int fd = connection_receive(pair[0], deadline_ns);
    close(pair[0]);
    if (fd >= 0)
        return fd;
    if (fd == -ETIMEDOUT)
        return client_fail(fd, "%s: the mount gave no answer in %u ms", client->path, client->options.timeout_ms);
    if (fd != -ENOTCONN)
        return client_fail(fd, "%s: asked for a connection, the mount's daemon sent something else: %s", client->path, descriptor_reason(-fd));
    /* Set before the thread closed its end; a daemon that ends the pair while the call is under way said nothing. */
    int result = atomic_load(&client->ask->done) ? client->ask->result : 0;
    if (result == 0)
        return client_fail(-ENOTCONN, "%s: the mount's daemon said that it connects, and did not", client->path);
    const char *reason = why(result);
    return reason ? client_fail(-ENOTCONN, "%s: no connection by the mount: %s", client->path, reason) : -ESHUTDOWN;
}

int mount_await(struct kvfs_client *client, uint64_t deadline_ns) {
    if (client->ask && atomic_load(&client->ask->done))
        ask_forget(client);
    int r = client->ask ? 0 : ask_start(client, -1, &client->ask);
    while (r == 0 && !atomic_load(&client->ask->done)) {
        if (now_ns() >= deadline_ns)
            return -ETIMEDOUT;
        usleep(AWAIT_PAUSE_US);
    }
    return r < 0 || !why(client->ask->result) ? -ENOTCONN : 0;
}
