/* How libkvfs finds a daemon, and what it gets from it: devices, block table, and answers. */
#include "client/client.h"
#include "client/mountinfo.h"
#include "io/nvme/tcp.h"

#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#define WELCOME_MAX (256u << 20)
#define ERRNO_MAX 4095
/* A daemon that did not answer is not asked again for four timeouts, as a device is not; at most this long. */
#define SILENT_TIMEOUTS 4u
#define SILENT_MAX_MS 10000u

static _Thread_local char sentence[768];

int client_fail(int error, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(sentence, sizeof(sentence), format, arguments);
    va_end(arguments);
    return error;
}

const char *kvfs_error(void) { return sentence; }

/* ---- the socket ---- */

static int wait_for(int fd, short events, uint64_t deadline_ns) {
    for (;;) {
        uint64_t now = now_ns();
        struct pollfd poll_fd = {.fd = fd, .events = events};
        int r = now >= deadline_ns ? 0 : poll(&poll_fd, 1, (int)((deadline_ns - now) / 1000000 + 1));
        if (r > 0)
            return 0;
        if (r == 0)
            return -ETIMEDOUT;
        if (errno != EINTR)
            return -errno;
    }
}

/* One after the other, in as few pieces as the socket takes. */
static int send_all(int fd, const void *head, uint64_t head_size, const void *data, uint64_t size, uint64_t deadline_ns) {
    uint64_t sent = 0;
    while (sent < head_size + size) {
        uint64_t first = min_u64(sent, head_size), rest = sent - first;
        struct iovec iovs[2] = {{(uint8_t *)(uintptr_t)head + first, head_size - first}, {(uint8_t *)(uintptr_t)data + rest, size - rest}};
        struct msghdr message = {.msg_iov = iovs, .msg_iovlen = 2};
        ssize_t n = sendmsg(fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (n < 0 && errno == EAGAIN) {
            int r = wait_for(fd, POLLOUT, deadline_ns);
            if (r < 0)
                return r;
        } else if (n < 0 && errno != EINTR) {
            return errno == EPIPE || errno == ECONNRESET ? -ENOTCONN : -errno;
        } else if (n > 0) {
            sent += (uint64_t)n;
        }
    }
    return 0;
}

/* Exactly size bytes; descriptors that come with them go to fds (KVFS_WIRE_FDS_MAX), or are closed. */
static int receive_all(int fd, void *data, uint64_t size, uint64_t deadline_ns, int *fds, uint32_t *fd_count) {
    uint8_t *at = data;
    union { char space[CMSG_SPACE(sizeof(int) * KVFS_WIRE_FDS_MAX)]; struct cmsghdr align; } control;
    while (size) {
        struct iovec iov = {at, size};
        struct msghdr message = {.msg_iov = &iov, .msg_iovlen = 1, .msg_control = control.space, .msg_controllen = sizeof(control.space)};
        ssize_t n = recvmsg(fd, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
        if (n < 0 && errno == EAGAIN) {
            int r = wait_for(fd, POLLIN, deadline_ns);
            if (r < 0)
                return r;
            continue;
        }
        if (n < 0 && errno == EINTR)
            continue;
        if (n == 0)
            return -ENOTCONN;
        if (n < 0)
            return errno == ECONNRESET ? -ENOTCONN : -errno;
        for (struct cmsghdr *part = CMSG_FIRSTHDR(&message); part; part = CMSG_NXTHDR(&message, part)) {
            if (part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS)
                continue;
            uint32_t count = (uint32_t)((part->cmsg_len - CMSG_LEN(0)) / sizeof(int));
            for (uint32_t i = 0; i < count; i++) {
                int got;
                memcpy(&got, CMSG_DATA(part) + i * sizeof(int), sizeof(int));
                if (fds && *fd_count < KVFS_WIRE_FDS_MAX)
                    fds[(*fd_count)++] = got;
                else
                    close(got);
            }
        }
        at += n;
        size -= (uint64_t)n;
    }
    return 0;
}

/* ---- finding the pool ---- */

/* A pool's own directory stands for the root of its files: the way to one that has no mount here. */
static bool is_pool(const char *path, char pool[PATH_MAX], uint64_t *base) {
    char file[PATH_MAX + 16];
    snprintf(file, sizeof(file), "%s/pool.toml", path);
    if (faccessat(AT_FDCWD, file, F_OK, AT_EACCESS) < 0 || !realpath(path, pool))
        return false;
    *base = 1;
    return true;
}

/* The pool behind a path: the source of its mount, or the path itself. */
static int pool_of(const char *path, char pool[PATH_MAX], uint64_t *base) {
    struct statx st;
    if (statx(AT_FDCWD, path, AT_STATX_DONT_SYNC, STATX_TYPE | STATX_INO | STATX_MNT_ID, &st) < 0)
        return client_fail(-errno, "%s: %s", path, strerror(errno));
    if (!S_ISDIR(st.stx_mode))
        return client_fail(-ENOTDIR, "%s: not a directory", path);
    *base = st.stx_ino;
    FILE *mounts = fopen("/proc/self/mountinfo", "re");
    if (!mounts)
        return client_fail(-errno, "/proc/self/mountinfo: %s", strerror(errno));
    char *line = NULL;
    size_t capacity = 0;
    int r = client_fail(-EINVAL, "%s: its mount is not in /proc/self/mountinfo", path);
    while (getline(&line, &capacity, mounts) >= 0) {
        struct mountinfo mount;
        if (!mountinfo_parse(line, &mount) || mount.id != st.stx_mnt_id)
            continue;
        const char *kind = mount.kind, *source = mount.source;
        if (!source)
            break;
        if (strcmp(kind, "fuse.kvfs") != 0 && is_pool(path, pool, base))
            r = 0;
        else if (strcmp(kind, "fuse.kvfs") != 0)
            r = client_fail(-EINVAL, "%s: not on a kvfs mount: it lies on %s (%s)", path, kind, source);
        else if (source[0] != '/' || strlen(source) >= PATH_MAX)
            r = client_fail(-EINVAL, "%s: the pool of this mount, '%s', is no path from here", path, source);
        else
            r = 0, strcpy(pool, source);
        break;
    }
    free(line);
    fclose(mounts);
    return r;
}

/* Zeros: there is none. */
static void listener_of(const struct kvfs_client *client, uint64_t out[4]) {
    char path[PATH_MAX + 16];
    struct stat about;
    memset(out, 0, 4 * sizeof(*out));
    snprintf(path, sizeof(path), "%s/control.sock", client->pool);
    if (stat(path, &about) == 0) {
        out[0] = about.st_dev;
        out[1] = about.st_ino;
        out[2] = (uint64_t)about.st_ctim.tv_sec;
        out[3] = (uint64_t)about.st_ctim.tv_nsec;
    }
}

/* The process that the session was with still is who listens: nothing can have been changed without it. */
static bool listener_is_same(const struct kvfs_client *client, const struct session *session) {
    uint64_t now[4];
    listener_of(client, now);
    return now[1] && memcmp(now, session->listener, sizeof(now)) == 0;
}

static int socket_open(struct kvfs_client *client, uint64_t deadline_ns) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    int directory = -1;
    /* sockaddr_un has 108 bytes; a longer path goes by the directory's descriptor, which a process that was setuid may not follow. */
    if ((size_t)snprintf(address.sun_path, sizeof(address.sun_path), "%s/control.sock", client->pool) >= sizeof(address.sun_path)) {
        directory = open(client->pool, O_PATH | O_DIRECTORY | O_CLOEXEC);
        if (directory < 0)
            return client_fail(errno == EACCES ? -EACCES : -ENOTCONN, "%s: %s", client->pool, strerror(errno));
        snprintf(address.sun_path, sizeof(address.sun_path), "/proc/self/fd/%d/control.sock", directory);
    }
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    int r = fd < 0 ? -errno : 0;
    while (r == 0 && connect(fd, (struct sockaddr *)&address, sizeof(address)) < 0) {
        r = errno == EINTR ? 0 : -errno;
        if (r == -EAGAIN && now_ns() < deadline_ns) { /* a full backlog */
            usleep(2000);
            r = 0;
        }
    }
    if (directory >= 0)
        close(directory);
    if (r == 0)
        return fd;
    if (fd >= 0)
        close(fd);
    if (r == -EACCES)
        return client_fail(r, "%s/control.sock: this user may not connect", client->pool);
    return client_fail(-ENOTCONN, "%s: no daemon answers: %s", client->pool, strerror(-r));
}

/* ---- sessions ---- */

static void session_free(struct session *session) {
    bool owed = false;
    while (session->idle) {
        struct lane *lane = session->idle;
        session->idle = lane->next;
        lane_reap(lane, false);
        if (!ring_idle(&lane->ring)) { /* a device may still write: what it writes to stays */
            owed = true;
            continue;
        }
        ring_free(&lane->ring);
        while (lane->free) {
            struct fetch *next = lane->free->next;
            free(lane->free->side);
            free(lane->free);
            lane->free = next;
        }
        for (uint32_t i = 0; i < 8; i++)
            free(lane->bounces[i]);
        free(lane);
    }
    if (session->socket >= 0)
        close(session->socket);
    free(session->payload);
    kvfs_table_detach(session->table);
    session->table = NULL;
    if (owed)
        return;
    late_free(session);
    nvme_hosts_stop(&session->array);
    for (uint32_t i = 0; session->fds && i < session->array.device_count; i++)
        if (session->fds[i] >= 0)
            close(session->fds[i]);
    free(session->fds);
    array_free(&session->array);
    free(session);
}

void session_put(struct session *session) {
    if (session && atomic_fetch_sub(&session->refs, 1) == 1)
        session_free(session);
}

/* statx's direct I/O alignment (Linux 6.1), which the C library's headers may not know yet. */
static uint32_t memory_alignment(int fd) {
    union { uint8_t bytes[256]; uint32_t words[64]; } st;
    memset(&st, 0, sizeof(st));
    const uint32_t mask_dioalign = 0x2000, at = 0x98 / 4;
    if (syscall(SYS_statx, fd, "", AT_EMPTY_PATH, mask_dioalign, &st) == 0 && st.words[0] & mask_dioalign && st.words[at] &&
        st.words[at] <= PAGE && (st.words[at] & (st.words[at] - 1)) == 0)
        return st.words[at];
    return 512;
}

static int session_fill(struct kvfs_client *client, struct session *session, const struct wire_welcome *w, const uint8_t *rest, uint64_t size) {
    struct kvfs_array *array = &session->array;
    uint64_t members = (uint64_t)w->segment_count * w->stripe_width;
    if (w->device_count == 0 || w->device_count > KVFS_DEVICES_MAX || w->stripe_width == 0 || w->stripe_width > KVFS_STRIPE_WIDTH_MAX ||
        w->stripe_width > w->device_count || w->stripe_unit < 16384 || w->stripe_unit % PAGE || w->zone_size == 0 ||
        w->zone_size % w->stripe_unit || w->zone_size / PAGE > UINT32_MAX / w->stripe_width || w->segment_count == 0 ||
        size != 8ull * w->device_count + 8 * members)
        return client_fail(-EPROTO, "%s: the daemon's welcome makes no sense: %u devices, stripe width %u, %u segments, %llu bytes", client->pool,
                           w->device_count, w->stripe_width, w->segment_count, (unsigned long long)size);
    const struct geometry geometry = {.secret = w->secret, .mount_epoch = w->mount_epoch, .zone_size = w->zone_size, .stripe_unit = w->stripe_unit,
                                      .stripe_width = w->stripe_width, .segment_count = w->segment_count};
    array->io_timeout_ms = client->options.timeout_ms;
    array->inline_max = 256 << 10;
    array->fail_fast = true;
    session->verify = !(client->options.flags & KVFS_NO_VERIFY);
    int r = array_init(array, &geometry, w->device_count);
    session->fds = malloc(w->device_count * sizeof(int));
    for (uint32_t i = 0; session->fds && i < w->device_count; i++)
        session->fds[i] = -1;
    if (r < 0 || !session->fds)
        return client_fail(-ENOMEM, "%s: no memory for %u segments", client->pool, w->segment_count);
    for (uint32_t i = 0; i < w->device_count; i++) {
        memcpy(&array->devices[i].zones_offset, rest + 8ull * i, 8);
    }
    memcpy(array->members, rest + 8ull * w->device_count, members * sizeof(*array->members));
    for (uint64_t i = 0; i < members; i++)
        if (array->members[i].device >= w->device_count)
            return client_fail(-EPROTO, "%s: the daemon's welcome puts segment %llu on device %u of %u", client->pool,
                               (unsigned long long)(i / w->stripe_width), array->members[i].device, w->device_count);
    memcpy(session->uuid, w->pool_uuid, sizeof(session->uuid));
    session->writable = w->writable && !(client->options.flags & KVFS_READ_ONLY);
    session->reservation_ms = w->reservation_ms;
    return 0;
}

static int frame_check(struct kvfs_client *client, const struct wire_frame *frame, uint16_t type, uint32_t size_max) {
    if (frame->type != type || frame->size > size_max || frame->reserved)
        return client_fail(-EPROTO, "%s: the daemon answered with a frame of type %u and %u bytes, expected type %u and at most %u",
                           client->pool, frame->type, frame->size, type, size_max);
    return 0;
}

/* The daemon's refusal: its sentence. */
static int refusal(struct kvfs_client *client, int fd, const struct wire_frame *frame, uint64_t deadline_ns) {
    char text[512] = "";
    uint32_t size = (uint32_t)min_u64(frame->size, sizeof(text) - 1);
    if (frame->status < -ERRNO_MAX)
        return client_fail(-EPROTO, "%s: the daemon refuses with status %d", client->pool, frame->status);
    if (receive_all(fd, text, size, deadline_ns, NULL, NULL) < 0)
        text[0] = 0;
    return client_fail(frame->status, "%s: %s", client->pool, text[0] ? text : strerror(-frame->status));
}

static int descriptors(struct kvfs_client *client, struct session *session, uint64_t deadline_ns) {
    uint32_t wanted = 1 + session->array.device_count, have = 0;
    int table_fd = -1, r = 0;
    while (have < wanted && r == 0) {
        struct wire_frame frame;
        int fds[KVFS_WIRE_FDS_MAX];
        uint32_t count = 0;
        r = receive_all(session->socket, &frame, sizeof(frame), deadline_ns, fds, &count);
        if (r == 0)
            r = frame_check(client, &frame, WIRE_DESCRIPTORS, 0);
        if (r == 0 && (count == 0 || have + count > wanted))
            r = client_fail(-EPROTO, "%s: the daemon sent %u descriptors with %u of %u there", client->pool, count, have, wanted);
        for (uint32_t i = 0; i < count; i++) {
            if (r < 0)
                close(fds[i]);
            else if (have++ == 0)
                table_fd = fds[i];
            else
                session->fds[have - 2] = fds[i];
        }
    }
    if (r == 0) {
        r = kvfs_table_attach(table_fd, session->array.geometry.secret, &session->table);
        if (r == 0 && kvfs_table_mount_epoch(session->table) != session->array.geometry.mount_epoch)
            r = -EBADMSG;
        if (r < 0)
            client_fail(r = -EPROTO, "%s: the daemon's block table is not of this version, or of another mount", client->pool);
    }
    if (table_fd >= 0)
        close(table_fd);
    return r;
}

static int session_open(struct kvfs_client *client, struct session **out) {
    uint64_t deadline = now_ns() + client->options.timeout_ms * 1000000ull, listener[4];
    listener_of(client, listener); /* first: a daemon that comes meanwhile is another one */
    int fd = socket_open(client, deadline);
    if (fd < 0)
        return fd;
    struct session *session = calloc(1, sizeof(*session));
    if (!session) {
        close(fd);
        return client_fail(-ENOMEM, "%s: no memory for a session", client->pool);
    }
    atomic_store(&session->refs, 1);
    pthread_mutex_init(&session->lock, NULL);
    pthread_mutex_init(&session->send_lock, NULL);
    pthread_mutex_init(&session->socket_lock, NULL);
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&session->lane_idle, &attributes);
    pthread_cond_init(&session->answered, &attributes);
    session->socket = fd;
    memcpy(session->listener, listener, sizeof(listener));
    struct wire_hello hello = {.magic = "KVFSCLI1", .version = KVFS_WIRE_VERSION, .flags = client->options.flags & KVFS_READ_ONLY,
                               .timeout_ms = client->options.timeout_ms};
    struct wire_frame frame;
    struct wire_welcome welcome;
    uint8_t *rest = NULL;
    int r = send_all(fd, &hello, sizeof(hello), NULL, 0, deadline);
    if (r == 0)
        r = receive_all(fd, &frame, sizeof(frame), deadline, NULL, NULL);
    if (r == -ETIMEDOUT)
        client_fail(r, "%s: the daemon gave no answer in %u ms", client->pool, client->options.timeout_ms);
    else if (r < 0)
        client_fail(r = -ENOTCONN, "%s: the daemon hung up: a daemon without native clients, or one that is ending", client->pool);
    else if (frame.type == WIRE_HELLO && frame.status < 0)
        r = refusal(client, fd, &frame, deadline);
    else
        r = frame_check(client, &frame, WIRE_HELLO, WELCOME_MAX);
    if (r == 0 && frame.size < sizeof(welcome))
        r = client_fail(-EPROTO, "%s: the daemon's welcome has %u bytes", client->pool, frame.size);
    if (r == 0 && !(rest = malloc(frame.size)))
        r = client_fail(-ENOMEM, "%s: no memory for a welcome of %u bytes", client->pool, frame.size);
    if (r == 0) {
        r = receive_all(fd, rest, frame.size, deadline, NULL, NULL);
        if (r < 0)
            client_fail(r, "%s: the daemon broke off its welcome: %s", client->pool, strerror(-r));
    }
    if (r == 0) {
        memcpy(&welcome, rest, sizeof(welcome));
        if (welcome.version != KVFS_WIRE_VERSION)
            r = client_fail(-EPROTO, "%s: the daemon speaks version %u, this library %u", client->pool, welcome.version, KVFS_WIRE_VERSION);
    }
    if (r == 0)
        r = session_fill(client, session, &welcome, rest + sizeof(welcome), frame.size - sizeof(welcome));
    if (r == 0) {
        r = descriptors(client, session, deadline);
        if (r == -ETIMEDOUT || r == -ENOTCONN)
            client_fail(r, "%s: the daemon broke off before its last descriptor: %s", client->pool, strerror(-r));
    }
    free(rest);
    for (uint32_t i = 0; r == 0 && i < session->array.device_count; i++) {
        struct device *device = &session->array.devices[i];
        device->fd = session->fds[i];
        device_look(&session->array, device);
        uint32_t alignment = memory_alignment(device->fd);
        if (alignment > session->memory_alignment)
            session->memory_alignment = alignment;
    }
    if (r == 0) {
        char reason[NVME_REASON];
        r = nvme_hosts_start(&session->array, session->fds, false, reason, sizeof(reason)); /* one that is not there: misses, not an error */
        if (r < 0)
            client_fail(r, "%s: %s", client->pool, reason);
    }
    if (r < 0)
        session_put(session);
    else
        *out = session;
    return r;
}

/* With socket_lock: nothing more comes. Whoever waits for an answer learns why, but for those that know already. */
static void session_lose(struct session *session, int error) {
    session->gone = true; /* what comes now would answer something else */
    shutdown(session->socket, SHUT_RDWR);
    for (struct asked *asked = session->asked; asked; asked = session->asked) {
        session->asked = asked->next;
        asked->result = error == -EPROTO ? error : -ENOTCONN;
        atomic_store(&asked->done, true);
    }
    pthread_cond_broadcast(&session->answered);
}

/* With socket_lock: a frame has begun. Whose answer it is; NULL: it breaks the rules, or says good-bye. */
static struct asked *frame_begun(struct session *session) {
    const struct wire_frame *frame = &session->frame;
    struct asked *asked = session->asked;
    while (asked && (asked->id != frame->id || asked->type != frame->type))
        asked = asked->next;
    session->goodbye = session->goodbye || frame->type == WIRE_GOODBYE;
    if (!asked || frame->size > KVFS_WIRE_SIZE_MAX || frame->status < -ERRNO_MAX) {
        session_lose(session, frame->type == WIRE_GOODBYE ? -ENOTCONN : -EPROTO);
        return NULL;
    }
    if (!session->payload && !(session->payload = malloc(frame->size + 1u)))
        session_lose(session, -ENOMEM);
    return session->payload ? asked : NULL;
}

/* With socket_lock: take in what is there. */
static void session_hear(struct session *session) {
    while (!session->gone) {
        uint64_t head = sizeof(session->frame), at = session->heard;
        struct asked *asked = NULL;
        if (at >= head) {
            asked = frame_begun(session);
            if (!asked)
                return;
        }
        if (asked && at == head + session->frame.size) {
            for (struct asked **link = &session->asked; *link; link = &(*link)->next)
                if (*link == asked) {
                    *link = asked->next;
                    break;
                }
            asked->status = session->frame.status;
            asked->reply = session->payload;
            asked->reply_size = session->frame.size;
            asked->answered_ns = now_ns();
            atomic_store(&asked->done, true);
            session->payload = NULL;
            session->heard = 0;
            pthread_cond_broadcast(&session->answered);
            continue;
        }
        ssize_t n = asked ? recv(session->socket, session->payload + (at - head), head + session->frame.size - at, MSG_DONTWAIT)
                          : recv(session->socket, (uint8_t *)&session->frame + at, head - at, MSG_DONTWAIT);
        if (n > 0)
            session->heard += (uint64_t)n;
        else if (n < 0 && errno == EAGAIN)
            return;
        else if (n == 0 || errno != EINTR)
            session_lose(session, -ENOTCONN);
    }
}

void session_look(struct session *session) {
    if (session->gone || pthread_mutex_trylock(&session->socket_lock) != 0)
        return;
    if (!session->listening) /* who listens hears it */
        session_hear(session);
    pthread_mutex_unlock(&session->socket_lock);
}

int session_get(struct kvfs_client *client, struct session **out) {
    if (client->pid != getpid())
        return client_fail(-ECHILD, "%s: this client was connected by process %d; after fork() connect again", client->path, (int)client->pid);
    pthread_mutex_lock(&client->lock);
    struct session *session = client->session;
    session_look(session);
    int r = 0;
    if (session->gone) {
        struct session *fresh = NULL;
        /* A new daemon listens before anything can be changed through it: while nobody listens, the old table is right. */
        r = now_ns() < client->silent_until_ns ? client_fail(-ETIMEDOUT, "%s: the daemon gives no answer", client->pool) : session_open(client, &fresh);
        if (r == -ETIMEDOUT && now_ns() >= client->silent_until_ns)
            client->silent_until_ns = now_ns() + min_u64(SILENT_TIMEOUTS * client->options.timeout_ms, SILENT_MAX_MS) * 1000000ull;
        if (r == 0 && memcmp(fresh->uuid, session->uuid, sizeof(fresh->uuid)) != 0) {
            session_put(fresh);
            r = client_fail(-ESTALE, "%s: another pool is there now: it was formatted again", client->pool);
        } else if (r == 0) {
            session->next = client->retired;
            client->retired = session;
            client_prune(client);
            client->session = session = fresh;
            TALLY(client, reconnects, 1);
        } else if (r == -ENOTCONN && session->goodbye) {
            r = client_fail(-ENOTCONN, "%s: unmounted", client->path);
        } else if (session->verify && (r == -ENOTCONN || (r == -ETIMEDOUT && listener_is_same(client, session)))) {
            session->silent = r == -ETIMEDOUT;
            r = 0;
        }
    }
    if (r == 0) {
        atomic_fetch_add(&session->refs, 1);
        *out = session;
    }
    pthread_mutex_unlock(&client->lock);
    return r;
}

/* ---- requests ---- */

void wire_send(struct session *session, uint16_t type, const void *payload, uint32_t size, uint32_t timeout_ms, struct asked *asked) {
    *asked = (struct asked){.type = type, .sent_ns = now_ns()};
    asked->deadline_ns = asked->sent_ns + timeout_ms * 1000000ull;
    pthread_mutex_lock(&session->send_lock);
    pthread_mutex_lock(&session->socket_lock);
    asked->id = ++session->next_id;
    asked->next = session->asked;
    session->asked = asked;
    if (session->gone)
        session_lose(session, -ENOTCONN);
    if (session->gone && session->silent)
        asked->result = -ETIMEDOUT;
    pthread_mutex_unlock(&session->socket_lock);
    struct wire_frame frame = {.size = size, .type = type, .id = asked->id};
    int r = session->gone ? 0 : send_all(session->socket, &frame, sizeof(frame), payload, size, asked->deadline_ns);
    pthread_mutex_unlock(&session->send_lock);
    if (r < 0) {
        pthread_mutex_lock(&session->socket_lock);
        session_lose(session, r);
        asked->result = r == -ETIMEDOUT ? r : asked->result;
        pthread_mutex_unlock(&session->socket_lock);
    }
}

void wire_wait(struct session *session, struct asked *asked) {
    pthread_mutex_lock(&session->socket_lock);
    while (!asked->done) {
        if (session->listening) {
            struct timespec until = {.tv_sec = (time_t)(asked->deadline_ns / 1000000000u), .tv_nsec = (long)(asked->deadline_ns % 1000000000u)};
            pthread_cond_timedwait(&session->answered, &session->socket_lock, &until);
        } else {
            session->listening = true;
            pthread_mutex_unlock(&session->socket_lock);
            wait_for(session->socket, POLLIN, asked->deadline_ns);
            pthread_mutex_lock(&session->socket_lock);
            session->listening = false;
            session_hear(session);
            pthread_cond_broadcast(&session->answered);
        }
        if (!asked->done && now_ns() >= asked->deadline_ns) {
            session_lose(session, -ETIMEDOUT);
            asked->result = -ETIMEDOUT;
        }
    }
    pthread_mutex_unlock(&session->socket_lock);
}

int wire_answer(struct kvfs_client *client, struct asked *asked, uint8_t **reply, uint32_t *reply_size) {
    assert(asked->done);
    *reply = NULL;
    if (asked->result == -ETIMEDOUT)
        return client_fail(asked->result, "%s: the daemon gave no answer in %u ms", client->pool, client->options.timeout_ms);
    if (asked->result < 0)
        return client_fail(asked->result, "%s: the daemon is gone", client->pool);
    if (asked->status < 0) {
        asked->reply[asked->reply_size] = 0;
        client_fail(asked->status, "%s: %.500s", client->pool, asked->reply_size ? (char *)asked->reply : strerror(-asked->status));
        free(asked->reply);
        return asked->status;
    }
    *reply = asked->reply;
    *reply_size = asked->reply_size;
    return 0;
}

int wire_ask(struct kvfs_client *client, struct session *session, uint16_t type, const void *payload, uint32_t size, uint32_t timeout_ms,
             uint8_t **reply, uint32_t *reply_size) {
    struct asked asked;
    wire_send(session, type, payload, size, timeout_ms, &asked);
    wire_wait(session, &asked);
    return wire_answer(client, &asked, reply, reply_size);
}

/* Tell without an answer; dropped where it would have to wait: small frames are sent whole or not at all. */
static void wire_tell(struct session *session, uint16_t type, const void *payload, uint32_t size) {
    uint8_t data[sizeof(struct wire_frame) + 8 * 512];
    struct wire_frame frame = {.size = size, .type = type};
    if (size > sizeof(data) - sizeof(frame) || session->gone || pthread_mutex_trylock(&session->send_lock) != 0)
        return;
    memcpy(data, &frame, sizeof(frame));
    memcpy(data + sizeof(frame), payload, size);
    ssize_t n = send(session->socket, data, sizeof(frame) + size, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (n >= 0 && n != (ssize_t)(sizeof(frame) + size)) {
        pthread_mutex_lock(&session->socket_lock);
        session_lose(session, -ENOTCONN);
        pthread_mutex_unlock(&session->socket_lock);
    }
    pthread_mutex_unlock(&session->send_lock);
}

void client_bad_block(struct kvfs_client *client, struct session *session, uint64_t inode, uint32_t segment) {
    (void)client;
    uint64_t words[2] = {inode, segment};
    wire_tell(session, WIRE_BAD_BLOCK, words, sizeof(words));
}

void client_hit(struct kvfs_client *client, struct session *session, uint64_t inode) {
    uint64_t hits[CLIENT_HITS_MAX], now = now_ns();
    uint32_t count = 0;
    struct kvfs_client_statistics report;
    bool tell = false;
    pthread_mutex_lock(&client->lock);
    if (inode)
        client->hits[client->hit_count++] = inode;
    if (client->hit_count == CLIENT_HITS_MAX || !inode || now - client->hits_sent_ns > 1000000000) {
        count = client->hit_count;
        memcpy(hits, client->hits, count * sizeof(*hits));
        client->hit_count = 0;
        tell = !inode || now - client->hits_sent_ns > 1000000000;
        client->hits_sent_ns = now;
    }
    pthread_mutex_unlock(&client->lock);
    if (count)
        wire_tell(session, WIRE_HITS, hits, count * (uint32_t)sizeof(*hits));
    if (tell && kvfs_client_statistics_get(client, &report) == 0)
        wire_tell(session, WIRE_REPORT, &report, sizeof(report));
}

/* ---- connect, close ---- */

static int space_check(const char *space) {
    if (strlen(space) >= 1024)
        return client_fail(-EINVAL, "namespace of %zu bytes: at most 1023", strlen(space));
    for (const char *at = space; *space;) {
        size_t size = strcspn(at, "/");
        if (size == 0 || size > KVFS_NAME_MAX || (size == 1 && at[0] == '.') || (size == 2 && at[0] == '.' && at[1] == '.'))
            return client_fail(-EINVAL, "namespace '%s': a relative path of names is expected", space);
        if (!at[size])
            break;
        at += size + 1;
    }
    return 0;
}

/* For programs that cannot say it themselves, those under libkvfs_preload or libcufile. 0 from the environment is refused too. */
static int timeout_from_environment(uint32_t *timeout_ms) {
    const char *text = getenv("KVFS_TIMEOUT_MS");
    if (!text || !*text) {
        *timeout_ms = 2000;
        return 0;
    }
    char *end;
    errno = 0;
    unsigned long value = strtoul(text, &end, 10);
    if (*text < '0' || *text > '9' || *end || errno || value < 1 || value > 3600000)
        return client_fail(-EINVAL, "KVFS_TIMEOUT_MS is '%.32s': 1 to 3600000 are possible", text);
    *timeout_ms = (uint32_t)value;
    return 0;
}

int client_open(const char *path, const char *pool, uint64_t base, const char *space, const struct kvfs_options *options, struct kvfs_client **out) {
    struct kvfs_options o = {0};
    if (options)
        memcpy(&o, options, min_u64(options->size, sizeof(o)));
    if (!o.timeout_ms && timeout_from_environment(&o.timeout_ms) < 0)
        return -EINVAL;
    o.depth = o.depth ? o.depth : 8;
    o.staging_size = o.staging_size ? o.staging_size : 256ull << 20;
    if (o.flags & ~(uint32_t)(KVFS_READ_ONLY | KVFS_NO_VERIFY) || o.depth > 64 || o.timeout_ms > 3600000 || o.staging_size >> 42)
        return client_fail(-EINVAL, "options: flags 0x%x, depth %u (1 to 64), timeout %u ms, staging of %llu bytes", o.flags, o.depth, o.timeout_ms,
                           (unsigned long long)o.staging_size);
    struct kvfs_client *client = calloc(1, sizeof(*client));
    if (client)
        client->hits = malloc(CLIENT_HITS_MAX * sizeof(*client->hits));
    if (!client || !client->hits) {
        free(client);
        return client_fail(-ENOMEM, "no memory for a client");
    }
    client->pid = getpid();
    client->options = o;
    client->hits_sent_ns = now_ns();
    client->base = base;
    pthread_mutex_init(&client->lock, NULL);
    strcpy(client->space, space);
    strcpy(client->path, path);
    strcpy(client->pool, pool);
    int r = session_open(client, &client->session);
    if (r < 0) {
        free(client->hits);
        free(client);
        return r;
    }
    *out = client;
    return 0;
}

int kvfs_connect(const char *path, const char *space, const struct kvfs_options *options, struct kvfs_client **out) {
    char pool[PATH_MAX];
    uint64_t base = 0;
    *out = NULL;
    int r = strlen(path) < PATH_MAX ? space_check(space ? space : "") : client_fail(-ENAMETOOLONG, "path of %zu bytes", strlen(path));
    if (r == 0)
        r = pool_of(path, pool, &base);
    return r == 0 ? client_open(path, pool, base, space ? space : "", options, out) : r;
}

void kvfs_close(struct kvfs_client *client) {
    if (!client || client->pid != getpid()) /* a child's copy: the rings are its parent's */
        return;
    stage_stop(client);
    struct session *session = client->session;
    client_hit(client, session, 0);
    uint64_t until = now_ns() + client->options.timeout_ms * 1000000ull;
    while (client_owed(client) && now_ns() < until)
        usleep(1000);
    while (client->retired) {
        struct session *next = client->retired->next;
        session_put(client->retired);
        client->retired = next;
    }
    session_put(session);
    pthread_mutex_destroy(&client->lock);
    free(client->hits);
    free(client);
}

/* ---- what is known ---- */

int kvfs_client_information_get(struct kvfs_client *client, struct kvfs_client_information *out) {
    memset(out, 0, sizeof(*out));
    if (client->pid != getpid())
        return client_fail(-ECHILD, "%s: connected by process %d", client->path, (int)client->pid);
    pthread_mutex_lock(&client->lock);
    struct session *session = client->session;
    session_look(session);
    memcpy(out->pool_uuid, session->uuid, sizeof(out->pool_uuid));
    out->mount_epoch = session->array.geometry.mount_epoch;
    out->connected = !session->gone;
    out->writable = session->writable;
    out->device_count = session->array.device_count;
    out->memory_alignment = session->memory_alignment;
    snprintf(out->pool, sizeof(out->pool), "%.255s", client->pool);
    pthread_mutex_unlock(&client->lock);
    return 0;
}

int kvfs_client_statistics_get(struct kvfs_client *client, struct kvfs_client_statistics *out) {
    memset(out, 0, sizeof(*out));
    if (client->pid != getpid())
        return client_fail(-ECHILD, "%s: connected by process %d", client->path, (int)client->pid);
#define TAKE(field) out->field = atomic_load_explicit(&client->count.field, memory_order_relaxed)
    TAKE(lookups); TAKE(hits); TAKE(misses); TAKE(gets); TAKE(get_bytes); TAKE(bounced_bytes); TAKE(retries); TAKE(timeouts);
    TAKE(checksum_errors); TAKE(puts); TAKE(put_bytes); TAKE(deletes); TAKE(prestaged); TAKE(prestage_used); TAKE(prestage_wasted);
    TAKE(reconnects);
#undef TAKE
    out->busy = atomic_load(&client->zombies);
    return 0;
}
