/* A thread with a table of descriptors of its own takes in a front end's messages and the descriptors that come with them.
 *
 * A close can wait for the file's filesystem (FUSE's FLUSH), for ever if nobody serves it; fstatfs can wait, too. A descriptor is in the receiver's
 * table before anybody can know its kind. In the daemon's table such a close would stop the guest's thread. At the end of the process it would hold
 * up the close of all other descriptors, locks and devices among them. So a porter looks at each descriptor. Eventfds and memory go on to the guest's
 * thread by a socket pair; the porter closes the others. A porter whose close never returns holds nothing but its own stack.
 *
 * A porter closes the socket itself last: messages that nobody took go with it, and so do their descriptors. A TCP socket among these lingers for as
 * long as its maker has set.
 *
 * System calls are made directly, as sanitizers believe that a process has one table. */
#include "base/descriptor.h"
#include "virtiofs/virtio.h"

#include <linux/close_range.h>
#include <signal.h>
#include <stdio.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

/* The porters of one guest. Porters that do not end are bounded: beyond that a front end is turned away. */
#define PORTERS_MAX 8u

struct porter {
    struct porters *porters;
    struct kvfs_virtiofs_config config;
    int fd, channel; /* the front end's socket, our end of the pair: in both tables */
    struct ported message;
};

struct porters *porters_new(void) {
    struct porters *porters = malloc(sizeof(*porters));
    if (porters)
        atomic_store(&porters->refs, 1);
    return porters;
}

void porters_put(struct porters *porters) {
    if (porters && atomic_fetch_sub(&porters->refs, 1) == 1)
        free(porters);
}

bool porters_have_room(const struct porters *porters) { return atomic_load(&porters->refs) <= PORTERS_MAX; }

bool is_eventfd(int fd) {
    char path[48], name[64];
    snprintf(path, sizeof(path), "/proc/thread-self/fd/%d", fd); /* not a file's name: such names begin with a slash */
    ssize_t n = readlink(path, name, sizeof(name) - 1);
    if (n <= 0)
        return false;
    name[n] = 0;
    return strcmp(name, "anon_inode:[eventfd]") == 0;
}

/* -ECONNRESET: hung up. Until the first byte there is no deadline. */
static int receive(int fd, void *data, size_t size, struct msghdr *first) {
    uint8_t *at = data;
    bool begun = false;
    while (size) {
        struct iovec iov = {at, size};
        struct msghdr rest = {.msg_iov = &iov, .msg_iovlen = 1}, *msg = first && !begun ? first : &rest;
        msg->msg_iov = &iov;
        msg->msg_iovlen = 1;
        ssize_t n = syscall(SYS_recvmsg, fd, msg, MSG_CMSG_CLOEXEC);
        if (n == 0)
            return -ECONNRESET;
        if (n < 0 && (errno == EINTR || (errno == EAGAIN && first && !begun)))
            continue;
        if (n < 0)
            return errno == EAGAIN ? -ETIMEDOUT : -errno;
        at += n;
        size -= (size_t)n;
        begun = true;
    }
    return 0;
}

/* One message; its descriptors are in m->fds. */
static int message_take(int fd, struct ported *m, int *fds, uint32_t *fd_count) {
    union {
        struct cmsghdr align;
        uint8_t bytes[CMSG_SPACE(sizeof(int) * VHOST_FDS_MAX)];
    } control;
    struct msghdr msg = {.msg_control = &control, .msg_controllen = sizeof(control)};
    memset(&control, 0, sizeof(control));
    *fd_count = 0;
    int r = receive(fd, &m->header, sizeof(m->header), &msg);
    for (struct cmsghdr *c = CMSG_FIRSTHDR(&msg); c; c = CMSG_NXTHDR(&msg, c)) {
        if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS)
            continue;
        uint32_t count = (uint32_t)((c->cmsg_len - CMSG_LEN(0)) / sizeof(int));
        for (uint32_t i = 0; i < count && *fd_count < VHOST_FDS_MAX; i++)
            memcpy(&fds[(*fd_count)++], CMSG_DATA(c) + i * sizeof(int), sizeof(int));
    }
    if (r < 0)
        return r;
    if (msg.msg_flags & MSG_CTRUNC || m->header.size > sizeof(m->payload))
        return -EPROTO;
    return receive(fd, m->payload, m->header.size, NULL);
}

static int message_pass(int channel, struct ported *m, const int *fds, uint32_t fd_count) {
    struct iovec iov = {m, offsetof(struct ported, payload) + (m->error ? 0 : m->header.size)};
    union {
        struct cmsghdr align;
        uint8_t bytes[CMSG_SPACE(sizeof(int) * VHOST_FDS_MAX)];
    } control;
    struct msghdr msg = {.msg_iov = &iov, .msg_iovlen = 1};
    if (fd_count) {
        memset(&control, 0, sizeof(control));
        msg.msg_control = &control;
        msg.msg_controllen = CMSG_SPACE(sizeof(int) * fd_count);
        struct cmsghdr *c = CMSG_FIRSTHDR(&msg);
        c->cmsg_level = SOL_SOCKET;
        c->cmsg_type = SCM_RIGHTS;
        c->cmsg_len = CMSG_LEN(sizeof(int) * fd_count);
        memcpy(CMSG_DATA(c), fds, sizeof(int) * fd_count);
    }
    return syscall(SYS_sendmsg, channel, &msg, MSG_NOSIGNAL) < 0 ? -errno : 0;
}

static void *porter_main(void *argument) {
    struct porter *p = argument;
    struct ported *m = &p->message;
    unsigned low = (unsigned)(p->fd < p->channel ? p->fd : p->channel), high = (unsigned)(p->fd < p->channel ? p->channel : p->fd);
    long r = syscall(SYS_close_range, high + 1, ~0u, CLOSE_RANGE_UNSHARE);
    if (r == 0 && low)
        r = syscall(SYS_close_range, 0, low - 1, 0);
    long filled = 0; /* descriptors of front ends are above 2 in this table, too */
    while (r == 0 && filled >= 0 && filled < DESCRIPTOR_MIN)
        filled = syscall(SYS_openat, AT_FDCWD, "/dev/null", O_RDWR | O_CLOEXEC);
    if (r == 0 && high - low > 1)
        r = syscall(SYS_close_range, low + 1, high - 1, 0);
    if (r == 0 && filled < 0)
        r = -1;
    m->error = r < 0 ? -errno : 0;
    bool own = r == 0;
    r = message_pass(p->channel, m, NULL, 0); /* from here on the guest's thread has it */
    while (own && r == 0) {
        int fds[VHOST_FDS_MAX];
        uint32_t fd_count;
        memset(m, 0, offsetof(struct ported, payload));
        m->error = message_take(p->fd, m, fds, &fd_count);
        for (uint32_t i = 0; i < fd_count && !m->refused; i++)
            if (!is_eventfd(fds[i]))
                m->refused = shared_check(fds[i], p->config.memory_types, p->config.memory_type_count);
        r = message_pass(p->channel, m, fds, m->error || m->refused ? 0 : fd_count);
        if (m->error)
            r = m->error;
        for (uint32_t i = 0; i < fd_count; i++)
            syscall(SYS_close, fds[i]);
    }
    if (own) {
        uint8_t none;
        while (syscall(SYS_recvfrom, p->channel, &none, sizeof(none), 0, NULL, NULL) < 0 && errno == EINTR)
            ; /* until the guest's thread has closed its own descriptor of the socket */
        syscall(SYS_close, p->fd);
        syscall(SYS_close, p->channel);
    }
    porters_put(p->porters);
    free(p);
    return NULL;
}

int porter_start(struct porters *porters, const struct kvfs_virtiofs_config *config, int fd) {
    int pair[2];
    if (!porters_have_room(porters))
        return -EUSERS;
    struct porter *p = calloc(1, sizeof(*p));
    if (!p)
        return -ENOMEM;
    if (descriptors_above(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair), pair) < 0) {
        int error = -errno;
        free(p);
        return error;
    }
    *p = (struct porter){.porters = porters, .config = *config, .fd = fd, .channel = pair[1]};
    atomic_fetch_add(&porters->refs, 1);
    /* Signals are blocked in a thread without descriptors: a handler that writes to one would fail. */
    sigset_t all, before;
    pthread_t thread;
    pthread_attr_t attributes;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    int r = -pthread_create(&thread, &attributes, porter_main, p);
    pthread_attr_destroy(&attributes);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (r < 0) {
        porters_put(porters);
        free(p);
    } else { /* it reports as soon as it has its own table */
        int32_t error;
        ssize_t n;
        do
            n = recv(pair[0], &error, sizeof(error), 0);
        while (n < 0 && errno == EINTR);
        r = n == (ssize_t)sizeof(error) ? error : -EIO;
    }
    close(pair[1]);
    if (r < 0)
        close(pair[0]);
    return r < 0 ? r : pair[0];
}

void porter_end(int channel, int fd) {
    shutdown(fd, SHUT_RDWR); /* the porter may wait for a message, or be stuck with a descriptor of the socket */
    close(fd);
    if (channel >= 0)
        close(channel);
}
