/* Frames to and from the daemon (kvfs_wire.h): sent whole, received by whichever thread waits. */
#include "base/descriptor.h"
#include "client/client.h"

#include <poll.h>
#include <sched.h>
#include <stdio.h>
#include <sys/socket.h>
#include <unistd.h>

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
int wire_send_all(int fd, const void *head, uint64_t head_size, const void *data, uint64_t size, uint64_t deadline_ns) {
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

/* A descriptor was sent, and is lost. Whose limit was it? Asked of the kernel, which has not said so. */
static int no_place(int fd) {
    int another = fcntl(fd, F_DUPFD_CLOEXEC, DESCRIPTOR_MIN), error = errno;
    if (another >= 0)
        close(another);
    return another < 0 && error == ENFILE ? -ENFILE : -EMFILE;
}

/* Exactly size bytes; descriptors that come with them go to fds (KVFS_WIRE_FDS_MAX), or are closed. -EMFILE, -ENFILE: some found no place here. */
int wire_receive_all(int fd, void *data, uint64_t size, uint64_t deadline_ns, int *fds, uint32_t *fd_count) {
    uint8_t *at = data;
    union {
        char space[CMSG_SPACE(sizeof(int) * KVFS_WIRE_FDS_MAX)];
        struct cmsghdr align;
    } control;
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
                got = descriptor_above(got);
                if (got < 0)
                    message.msg_flags |= MSG_CTRUNC;
                else if (fds && *fd_count < KVFS_WIRE_FDS_MAX)
                    fds[(*fd_count)++] = got;
                else
                    close(got);
            }
        }
        if (message.msg_flags & MSG_CTRUNC)
            return no_place(fd);
        at += n;
        size -= (uint64_t)n;
    }
    return 0;
}

/* ---- what comes ---- */

/* With socket_lock. One that a lost connection has ended is not there any more. */
static void pending_remove(struct connection *connection, struct wire_pending *pending) {
    for (struct wire_pending **link = &connection->pending; *link; link = &(*link)->next)
        if (*link == pending) {
            *link = pending->next;
            return;
        }
}

/* With socket_lock: nothing more comes. Every request without an answer ends with the reason. */
static void connection_lose(struct connection *connection, int error) {
    connection->gone = true; /* later bytes would answer something else */
    shutdown(connection->socket, SHUT_RDWR);
    for (struct wire_pending *pending = connection->pending; pending; pending = connection->pending) {
        connection->pending = pending->next;
        pending->result = error == -EPROTO ? error : -ENOTCONN;
        atomic_store(&pending->done, true);
    }
    pthread_cond_broadcast(&connection->answered);
}

/* With socket_lock: a frame has begun. Returns the request that it answers; NULL: it breaks the rules, or is a CLOSE. */
static struct wire_pending *frame_begun(struct connection *connection) {
    const struct wire_frame *frame = &connection->frame;
    struct wire_pending *pending = connection->pending;
    while (pending && (pending->id != frame->id || pending->type != frame->type))
        pending = pending->next;
    connection->closed = connection->closed || frame->type == WIRE_CLOSE;
    if (!pending || frame->size > KVFS_WIRE_SIZE_MAX || frame->status < -KVFS_WIRE_ERRNO_MAX) {
        connection_lose(connection, frame->type == WIRE_CLOSE ? -ENOTCONN : -EPROTO);
        return NULL;
    }
    if (!connection->payload && !(connection->payload = malloc(frame->size + 1u)))
        connection_lose(connection, -ENOMEM);
    return connection->payload ? pending : NULL;
}

/* With socket_lock: as recv(). A descriptor comes with the first byte of an answer to EVENTS alone; any other is closed. */
static ssize_t connection_read(struct connection *connection, void *data, uint64_t size) {
    union {
        char space[CMSG_SPACE(sizeof(int) * KVFS_WIRE_FDS_MAX)];
        struct cmsghdr align;
    } control;
    struct iovec iov = {data, size};
    struct msghdr message = {.msg_iov = &iov, .msg_iovlen = 1, .msg_control = control.space, .msg_controllen = sizeof(control.space)};
    ssize_t n = recvmsg(connection->socket, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    for (struct cmsghdr *part = n > 0 ? CMSG_FIRSTHDR(&message) : NULL; part; part = CMSG_NXTHDR(&message, part)) {
        if (part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS)
            continue;
        uint32_t count = (uint32_t)((part->cmsg_len - CMSG_LEN(0)) / sizeof(int));
        for (uint32_t i = 0; i < count; i++) {
            int got;
            memcpy(&got, CMSG_DATA(part) + i * sizeof(int), sizeof(int));
            got = descriptor_above(got);
            if (connection->descriptor < 0 && connection->received == 0)
                connection->descriptor = got;
            else if (got >= 0)
                close(got);
        }
    }
    return n;
}

/* The descriptor that came with the frame; the caller's now. -1: none. */
static int descriptor_take(struct connection *connection) {
    int descriptor = connection->descriptor;
    connection->descriptor = -1;
    return descriptor;
}

/* With socket_lock: receive all that is there. */
static void connection_receive(struct connection *connection) {
    while (!connection->gone) {
        uint64_t head = sizeof(connection->frame), at = connection->received;
        struct wire_pending *pending = NULL;
        if (at >= head) {
            pending = frame_begun(connection);
            if (!pending)
                return;
        }
        if (pending && at == head + connection->frame.size) {
            pending_remove(connection, pending);
            pending->status = connection->frame.status;
            pending->reply = connection->payload;
            pending->reply_size = connection->frame.size;
            int descriptor = descriptor_take(connection);
            if (descriptor >= 0 && pending->type != WIRE_EVENTS)
                close(descriptor);
            else
                pending->descriptor = descriptor;
            pending->answered_ns = now_ns();
            atomic_store(&pending->done, true);
            connection->payload = NULL;
            connection->received = 0;
            pthread_cond_broadcast(&connection->answered);
            continue;
        }
        ssize_t n = pending ? connection_read(connection, connection->payload + (at - head), head + connection->frame.size - at)
                            : connection_read(connection, (uint8_t *)&connection->frame + at, head - at);
        if (n > 0)
            connection->received += (uint64_t)n;
        else if (n < 0 && errno == EAGAIN)
            return;
        else if (n == 0 || errno != EINTR)
            connection_lose(connection, -ENOTCONN);
    }
}

void connection_poll(struct connection *connection) {
    if (connection->gone || pthread_mutex_trylock(&connection->socket_lock) != 0)
        return;
    if (!connection->listening) /* the listening thread receives it */
        connection_receive(connection);
    pthread_mutex_unlock(&connection->socket_lock);
}

/* ---- requests ---- */

void wire_send(struct connection *connection, uint16_t type, const void *payload, uint32_t size, uint32_t timeout_ms, struct wire_pending *pending) {
    assert(size <= KVFS_WIRE_SIZE_MAX);
    *pending = (struct wire_pending){.type = type, .sent_ns = now_ns(), .descriptor = -1};
    pending->deadline_ns = pending->sent_ns + timeout_ms * 1000000ull;
    pthread_mutex_lock(&connection->send_lock);
    pthread_mutex_lock(&connection->socket_lock);
    pending->id = ++connection->next_id;
    pending->next = connection->pending;
    connection->pending = pending;
    if (connection->gone)
        connection_lose(connection, -ENOTCONN);
    if (connection->gone && connection->silent)
        pending->result = -ETIMEDOUT;
    pthread_mutex_unlock(&connection->socket_lock);
    struct wire_frame frame = {.size = size, .type = type, .id = pending->id};
    int r = connection->gone ? 0 : wire_send_all(connection->socket, &frame, sizeof(frame), payload, size, pending->deadline_ns);
    pthread_mutex_unlock(&connection->send_lock);
    if (r < 0) {
        pthread_mutex_lock(&connection->socket_lock);
        connection_lose(connection, r);
        pending->result = r == -ETIMEDOUT ? r : pending->result;
        pthread_mutex_unlock(&connection->socket_lock);
    }
}

static bool lock_at_once(pthread_mutex_t *lock) {
    for (uint32_t tries = 0; tries < 50; tries++) {
        if (pthread_mutex_trylock(lock) == 0)
            return true;
        sched_yield(); /* others hold it for a moment, or, where the daemon takes nothing, for a deadline */
    }
    return false;
}

bool wire_send_at_once(struct connection *connection, uint16_t type, const void *payload, uint32_t size, uint32_t timeout_ms,
                       struct wire_pending *pending) {
    struct wire_frame frame = {.size = size, .type = type};
    struct iovec iovs[2] = {{&frame, sizeof(frame)}, {(void *)(uintptr_t)payload, size}};
    struct msghdr message = {.msg_iov = iovs, .msg_iovlen = 2};
    assert(size <= KVFS_WIRE_SIZE_MAX);
    *pending = (struct wire_pending){.type = type, .sent_ns = now_ns(), .descriptor = -1};
    pending->deadline_ns = pending->sent_ns + timeout_ms * 1000000ull;
    if (connection->gone || !lock_at_once(&connection->send_lock))
        return false;
    /* An answer may be received as soon as it is sent: the request is known before, and forgotten where it was not sent. */
    pthread_mutex_lock(&connection->socket_lock);
    frame.id = pending->id = ++connection->next_id;
    pending->next = connection->pending;
    connection->pending = pending;
    pthread_mutex_unlock(&connection->socket_lock);
    ssize_t n = sendmsg(connection->socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    uint64_t sent = n > 0 ? (uint64_t)n : 0, head = min_u64(sent, sizeof(frame)), body = sent - head;
    bool good = sent == 0 || wire_send_all(connection->socket, (uint8_t *)&frame + head, sizeof(frame) - head, (const uint8_t *)payload + body,
                                           size - body, pending->deadline_ns) == 0;
    pthread_mutex_unlock(&connection->send_lock);
    if (sent && good)
        return true;
    pthread_mutex_lock(&connection->socket_lock);
    if (!good)
        connection_lose(connection, -ENOTCONN); /* half a frame was sent */
    pending_remove(connection, pending);
    pthread_mutex_unlock(&connection->socket_lock);
    return false;
}

void wire_wait(struct connection *connection, struct wire_pending *pending) {
    pthread_mutex_lock(&connection->socket_lock);
    while (!pending->done) {
        if (connection->listening) {
            struct timespec until = {.tv_sec = (time_t)(pending->deadline_ns / 1000000000u), .tv_nsec = (long)(pending->deadline_ns % 1000000000u)};
            pthread_cond_timedwait(&connection->answered, &connection->socket_lock, &until);
        } else {
            connection->listening = true;
            pthread_mutex_unlock(&connection->socket_lock);
            wait_for(connection->socket, POLLIN, pending->deadline_ns);
            pthread_mutex_lock(&connection->socket_lock);
            connection->listening = false;
            connection_receive(connection);
            pthread_cond_broadcast(&connection->answered);
        }
        if (!pending->done && now_ns() >= pending->deadline_ns) {
            connection_lose(connection, -ETIMEDOUT);
            pending->result = -ETIMEDOUT;
        }
    }
    pthread_mutex_unlock(&connection->socket_lock);
}

int wire_answer(struct kvfs_client *client, struct wire_pending *pending, uint8_t **reply, uint32_t *reply_size) {
    assert(pending->done);
    *reply = NULL;
    if (pending->result == -ETIMEDOUT)
        return client_fail(pending->result, "%s: the daemon gave no answer in %u ms", client->pool, client->options.timeout_ms);
    if (pending->result < 0)
        return client_fail(pending->result, "%s: the daemon is gone", client->pool);
    if (pending->status < 0) {
        pending->reply[pending->reply_size] = 0;
        client_fail(pending->status, "%s: %.500s", client->pool, pending->reply_size ? (char *)pending->reply : strerror(-pending->status));
        free(pending->reply);
        return pending->status;
    }
    *reply = pending->reply;
    *reply_size = pending->reply_size;
    return 0;
}

int wire_ask(struct kvfs_client *client, struct connection *connection, uint16_t type, const void *payload, uint32_t size, uint32_t timeout_ms,
             uint8_t **reply, uint32_t *reply_size) {
    *reply = NULL;
    struct wire_pending pending;
    wire_send(connection, type, payload, size, timeout_ms, &pending);
    wire_wait(connection, &pending);
    return wire_answer(client, &pending, reply, reply_size);
}

/* Notify the daemon, without an answer. Dropped where it would have to wait. Small frames are sent whole or not at all. */
void wire_notify(struct connection *connection, uint16_t type, const void *payload, uint32_t size) {
    uint8_t data[sizeof(struct wire_frame) + WIRE_NOTIFY_MAX];
    struct wire_frame frame = {.size = size, .type = type};
    assert(size <= WIRE_NOTIFY_MAX);
    if (connection->gone || pthread_mutex_trylock(&connection->send_lock) != 0)
        return;
    memcpy(data, &frame, sizeof(frame));
    memcpy(data + sizeof(frame), payload, size);
    ssize_t n = send(connection->socket, data, sizeof(frame) + size, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (n >= 0 && n != (ssize_t)(sizeof(frame) + size)) {
        pthread_mutex_lock(&connection->socket_lock);
        connection_lose(connection, -ENOTCONN);
        pthread_mutex_unlock(&connection->socket_lock);
    }
    pthread_mutex_unlock(&connection->send_lock);
}

/* ---- messages ---- */

void message_append(struct message_buffer *out, const void *data, uint64_t size) {
    uint64_t padded = round_up(size, 8);
    assert(out->size % 8 == 0);
    assert(out->size <= out->capacity);
    if (out->size + padded > out->capacity) {
        uint64_t capacity = round_up((out->size + padded) * 2, PAGE);
        uint8_t *grown = realloc(out->data, capacity);
        if (!grown) {
            out->failed = true;
            return;
        }
        out->data = grown;
        out->capacity = capacity;
    }
    copy_bytes(out->data + out->size, data, size);
    memset(out->data + out->size + size, 0, padded - size);
    out->size += padded;
}

void message_append_where(struct message_buffer *out, const struct kvfs_client *client, uint32_t flags, uint32_t count) {
    struct wire_where where = {.base = client->base, .space_size = (uint16_t)strlen(client->space), .flags = (uint16_t)flags, .count = count};
    message_append(out, &where, sizeof(where));
    message_append(out, client->space, where.space_size);
}

int message_check(const struct message_buffer *request) {
    if (request->failed || request->size > KVFS_WIRE_SIZE_MAX)
        return client_fail(-ENOMEM, "a request of %llu bytes", (unsigned long long)request->size);
    return 0;
}

int message_ask(struct kvfs_client *client, struct connection *connection, uint16_t type, struct message_buffer *request, uint8_t **reply,
                uint32_t *reply_size) {
    int r = message_check(request);
    if (r == 0)
        r = wire_ask(client, connection, type, request->data, (uint32_t)request->size, client->options.timeout_ms, reply, reply_size);
    free(request->data);
    return r;
}
