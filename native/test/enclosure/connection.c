/* A connection: its thread, and what comes from the host. Every PDU is checked here before anything believes it. */
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include "enclosure.h"
#include "digest.h"

#define HEAD_MAX 256 /* pdo is a byte */
/* Data from here on is waited for as a whole: fewer wake-ups, each for more. */
#define WAIT_ALL_SIZE (32u << 10)
#define SILENCE_TICK_MS 10
#define DRAIN_TIMEOUT_MS 1000 /* after an error of the host, for it to close first */

void connection_wake(struct connection *connection) {
    uint64_t one = 1;

    if (write(connection->wake_fd, &one, sizeof(one)) < 0 && errno != EAGAIN)
        say("%s: cannot be woken: %s", connection->peer, strerror(errno));
}

static void end(struct connection *connection, const char *why) {
    connection->ended = true;
    snprintf(connection->why, sizeof(connection->why), "%s", why);
}

void connection_fatal(struct connection *connection, enum nvme_fatal_error fes, uint32_t fei, const void *head, const char *why) {
    if (connection->closing)
        return;
    snprintf(connection->why, sizeof(connection->why), "protocol error %d: %s", fes, why);
    answer_term(connection, fes, fei, head);
    connection->closing = true;
}

void connection_payload(struct connection *connection, struct request *request, uint8_t *target, uint32_t size, bool in_capsule) {
    connection->payload.request = request;
    connection->payload.target = target;
    connection->payload.size = connection->payload.left = size;
    connection->payload.digest_left = connection->data_digest;
    connection->payload.in_capsule = in_capsule;
}

/* ---- PDUs ---- */

static void take_icreq(struct connection *connection, const struct nvme_icreq *pdu) {
    const struct options *options = &enclosure.options;

    if (connection->greeted)
        connection_fatal(connection, NVME_FES_SEQUENCE, 0, pdu, "a second ICReq");
    else if (pdu->pfv != 0)
        connection_fatal(connection, NVME_FES_PARAMETER, offsetof(struct nvme_icreq, pfv), pdu, "ICReq's PFV is not 0");
    else if (pdu->hpda > 31)
        connection_fatal(connection, NVME_FES_PARAMETER, offsetof(struct nvme_icreq, hpda), pdu, "ICReq's HPDA is above 31");
    else {
        connection->hpda = pdu->hpda;
        connection->greeted = true;
        answer_icresp(connection, pdu);
        connection->header_digest = pdu->digests & options->digests & NVME_DIGEST_HEADER;
        connection->data_digest = pdu->digests & options->digests & NVME_DIGEST_DATA;
    }
}

static const char *check_size(const struct connection *connection, const struct nvme_pdu *pdu, uint32_t *field) {
    static const uint8_t hlens[] = {[NVME_PDU_ICREQ] = sizeof(struct nvme_icreq),
                                    [NVME_PDU_H2C_TERM] = sizeof(struct nvme_term),
                                    [NVME_PDU_COMMAND] = sizeof(struct nvme_command_pdu),
                                    [NVME_PDU_H2C_DATA] = sizeof(struct nvme_data)};
    uint32_t digest = connection->header_digest && pdu->type != NVME_PDU_ICREQ && pdu->type != NVME_PDU_H2C_TERM ? NVME_DIGEST_SIZE : 0;

    *field = offsetof(struct nvme_pdu, type);
    if (pdu->type >= sizeof(hlens) || !hlens[pdu->type])
        return "a PDU of a type that hosts do not send";
    if (!connection->greeted && pdu->type != NVME_PDU_ICREQ)
        return "a PDU before ICReq";
    *field = offsetof(struct nvme_pdu, hlen);
    if (pdu->hlen != hlens[pdu->type])
        return "a header of the wrong length";
    *field = offsetof(struct nvme_pdu, plen);
    if (pdu->plen < pdu->hlen + digest)
        return "a PDU shorter than its header";
    if (pdu->type == NVME_PDU_ICREQ && pdu->plen != sizeof(struct nvme_icreq))
        return "an ICReq of the wrong length";
    if (pdu->type == NVME_PDU_H2C_TERM && pdu->plen > sizeof(struct nvme_term) + NVME_TERM_DATA_MAX)
        return "an H2CTermReq that is too long";
    *field = offsetof(struct nvme_pdu, flags);
    if (digest && !(pdu->flags & NVME_PDU_HDGST))
        return "a PDU without the header digest agreed on";
    if (!digest && pdu->type != NVME_PDU_ICREQ && pdu->flags & NVME_PDU_HDGST)
        return "a header digest not agreed on";
    return NULL;
}

/* The size of the data behind a header, or UINT32_MAX. */
static uint32_t data_size(const struct connection *connection, const struct nvme_pdu *pdu) {
    uint32_t head = pdu->hlen + (connection->header_digest ? NVME_DIGEST_SIZE : 0), align = (enclosure.options.cpda + 1) * 4;
    uint32_t tail = pdu->flags & NVME_PDU_DDGST ? NVME_DIGEST_SIZE : 0;

    if (pdu->plen == head)
        return pdu->flags & NVME_PDU_DDGST ? UINT32_MAX : 0;
    if (pdu->pdo < head || pdu->pdo % align || pdu->plen < pdu->pdo + tail + 1 || !!tail != connection->data_digest)
        return UINT32_MAX;
    return pdu->plen - pdu->pdo - tail;
}

/* One header that is there as a whole, with what stands between it and its data. */
static void take_header(struct connection *connection, const uint8_t *head) {
    const struct nvme_pdu *pdu = (const void *)head;
    uint32_t size;

    if (pdu->type == NVME_PDU_ICREQ) {
        take_icreq(connection, (const void *)head);
        return;
    }
    if (pdu->type == NVME_PDU_H2C_TERM) {
        const struct nvme_term *term = (const void *)head;
        char why[80];

        snprintf(why, sizeof(why), "the host ended it: H2CTermReq, error %u, at %u", term->fes, term->fei);
        end(connection, why);
        return;
    }
    if (connection->header_digest) {
        uint32_t digest;

        memcpy(&digest, head + pdu->hlen, sizeof(digest));
        if (digest != nvme_digest(0, head, pdu->hlen)) {
            connection_fatal(connection, NVME_FES_HEADER_DIGEST, digest, pdu, "a wrong header digest");
            return;
        }
    }
    size = data_size(connection, pdu);
    if (size == UINT32_MAX) {
        connection_fatal(connection, NVME_FES_HEADER_FIELD, offsetof(struct nvme_pdu, pdo), pdu, "data that is not where it may be");
    } else if (pdu->type == NVME_PDU_COMMAND) {
        if (size > enclosure.options.in_capsule_size)
            connection_fatal(connection, NVME_FES_HEADER_FIELD, offsetof(struct nvme_pdu, plen), pdu, "more data in a capsule than it may hold");
        else
            request_command(connection, &((const struct nvme_command_pdu *)(const void *)head)->command, size);
    } else {
        const struct nvme_data *data = (const void *)head;

        if (size == 0 || data->size != size || size > enclosure.options.max_h2c_size)
            connection_fatal(connection, NVME_FES_HEADER_FIELD, offsetof(struct nvme_data, size), pdu, "H2CData of the wrong length");
        else
            request_data(connection, data);
    }
}

/* ---- the stream ---- */

/* Behind the payload's last byte: its digest. True when the payload is done with. */
static bool take_digest(struct connection *connection) {
    uint32_t digest, size = connection->payload.size;

    if (connection->payload.digest_left) {
        if (connection->end - connection->start < NVME_DIGEST_SIZE)
            return false;
        memcpy(&digest, connection->buffer + connection->start, sizeof(digest));
        connection->start += NVME_DIGEST_SIZE;
        request_payload_done(connection, digest == nvme_digest(0, connection->payload.target - size, size));
    } else {
        request_payload_done(connection, true);
    }
    return true;
}

/* Everything in the buffer that is whole. */
static void take(struct connection *connection) {
    while (!connection->closing && !connection->ended) {
        size_t there = connection->end - connection->start, need;
        uint8_t *head = connection->buffer + connection->start;
        const struct nvme_pdu *pdu = (const void *)head;
        const char *wrong;
        uint32_t field;

        if (connection->payload.request) {
            size_t size = there < connection->payload.left ? there : connection->payload.left;

            memcpy(connection->payload.target, head, size);
            connection->payload.target += size;
            connection->payload.left -= (uint32_t)size;
            connection->start += size;
            if (connection->payload.left)
                return;
            /* The request may ask for more data, and so set the next payload's. */
            if (!take_digest(connection))
                return;
            connection->payload.request = NULL;
            continue;
        }
        if (there < sizeof(*pdu))
            return;
        wrong = check_size(connection, pdu, &field);
        if (wrong) {
            uint8_t copy[sizeof(struct nvme_icreq)] = {0}; /* of a header that may not be there as a whole */

            memcpy(copy, head, there < sizeof(copy) ? there : sizeof(copy));
            connection_fatal(connection, connection->greeted ? NVME_FES_HEADER_FIELD : NVME_FES_SEQUENCE, field, copy, wrong);
            return;
        }
        need = pdu->hlen;
        if (connection->header_digest && pdu->type != NVME_PDU_H2C_TERM)
            need += NVME_DIGEST_SIZE;
        if (need < pdu->pdo && pdu->plen > pdu->pdo && pdu->type != NVME_PDU_ICREQ && pdu->type != NVME_PDU_H2C_TERM)
            need = pdu->pdo;
        if (there < need)
            return;
        connection->start += need;
        take_header(connection, head);
    }
}

/* Receive into the payload's place, or the buffer. 0, or -errno; -EPIPE at the stream's end. */
static int receive(struct connection *connection, bool may_wait) {
    int flags = may_wait ? 0 : MSG_DONTWAIT;
    ssize_t size;

    if (connection->start == connection->end) {
        connection->start = connection->end = 0;
    } else if (connection->end + HEAD_MAX > BUFFER_SIZE) {
        memmove(connection->buffer, connection->buffer + connection->start, connection->end - connection->start);
        connection->end -= connection->start;
        connection->start = 0;
    }
    if (connection->payload.request && connection->payload.left >= WAIT_ALL_SIZE) {
        size = recv(connection->fd, connection->payload.target, connection->payload.left, may_wait ? MSG_WAITALL : flags);
        if (size > 0) {
            connection->payload.target += size;
            connection->payload.left -= (uint32_t)size;
        }
    } else if (connection->payload.left) {
        struct iovec iovs[2] = {{connection->payload.target, connection->payload.left}, {connection->buffer, BUFFER_SIZE}};
        struct msghdr message = {.msg_iov = iovs, .msg_iovlen = 2};

        size = recvmsg(connection->fd, &message, flags);
        if (size > 0) {
            size_t data = (size_t)size < connection->payload.left ? (size_t)size : connection->payload.left;

            connection->payload.target += data;
            connection->payload.left -= (uint32_t)data;
            connection->end = (size_t)size - data;
        }
    } else {
        size = recv(connection->fd, connection->buffer + connection->end, BUFFER_SIZE - connection->end, flags);
        if (size > 0)
            connection->end += (size_t)size;
    }
    return size > 0 ? 0 : size == 0 ? -EPIPE : -errno;
}

/* ---- the thread ---- */

/* Nothing is read and nothing sent while a fault says so. False if the peer has gone meanwhile. */
static bool wait_silence(struct connection *connection) {
    while (connection->hung || fault_silent(connection)) {
        struct pollfd poller = {.fd = connection->fd, .events = POLLRDHUP};

        if (poll(&poller, 1, SILENCE_TICK_MS) > 0) {
            end(connection, "the host has gone while it heard nothing");
            return false;
        }
    }
    return true;
}

/* When this thread must look up though nothing has come. */
static int64_t next_due(const struct connection *connection) {
    int64_t due = request_next_due(connection);

    if (!connection->connected) {
        int64_t late = connection->accepted_ns + SETUP_TIMEOUT_MS * 1000000ll;

        due = due < late ? due : late;
    } else if (connection->qid == 0 && connection->controller->kato_ms) {
        int64_t late = connection->alive_ns + connection->controller->kato_ms * 1000000ll;

        due = due < late ? due : late;
    }
    return due;
}

static bool check_deadlines(struct connection *connection) {
    int64_t now = now_ns();

    if (!connection->connected && now >= connection->accepted_ns + SETUP_TIMEOUT_MS * 1000000ll)
        end(connection, "no Connect in time");
    else if (connection->connected && connection->qid == 0 && connection->controller->kato_ms &&
             now >= connection->alive_ns + connection->controller->kato_ms * 1000000ll)
        end(connection, "no Keep Alive in time");
    return !connection->ended;
}

static void wait_event(struct connection *connection) {
    struct pollfd pollers[2] = {{connection->fd, (short)(connection->closing ? 0 : POLLIN), 0}, {connection->wake_fd, POLLIN, 0}};
    int64_t due = next_due(connection), left = due == FOREVER_NS ? 3600000000000ll : due - now_ns();
    struct timespec timeout = {0};
    uint64_t woken;

    if (connection->out_count)
        pollers[0].events |= POLLOUT;
    if (left > 0) {
        timeout.tv_sec = left / 1000000000;
        timeout.tv_nsec = left % 1000000000;
    }
    if (ppoll(pollers, 2, &timeout, NULL) > 0 && pollers[1].revents & POLLIN && read(connection->wake_fd, &woken, sizeof(woken)) < 0)
        say("%s: eventfd: %s", connection->peer, strerror(errno));
}

static void serve(struct connection *connection) {
    while (!connection->ended) {
        /* Nothing to look after but the socket: one system call a wait. */
        bool alone = connection->connected && connection->qid && !connection->out_count && !atomic_load(&connection->held_count);
        int status;

        if (connection->hung && !wait_silence(connection))
            return;
        status = connection->closing ? -EAGAIN : receive(connection, alone);
        if (!wait_silence(connection))
            return;
        if (status == -EAGAIN) {
            wait_event(connection);
            if (!wait_silence(connection) || !check_deadlines(connection))
                return;
        } else if (status == -EPIPE || status == -ECONNRESET) {
            if (!connection->closing)
                end(connection, connection->start == connection->end && !connection->payload.request ? "the host closed it"
                                                                                                     : "the host closed it in the middle of a PDU");
            return;
        } else if (status && status != -EINTR) {
            end(connection, strerror(-status));
            return;
        }
        take(connection);
        request_due(connection);
        status = answer_flush(connection);
        if (status && status != -EAGAIN && status != -EINTR) {
            end(connection, status == -EFAULT ? "its namespace cannot be read" : strerror(-status));
            return;
        }
        if (connection->closing && !connection->out_count)
            return;
    }
}

static void drop(struct connection *connection) {
    pthread_mutex_lock(&enclosure.lock);
    for (struct connection **at = &enclosure.connections; *at; at = &(*at)->next)
        if (*at == connection) {
            *at = connection->next;
            break;
        }
    controller_leave(connection);
    pthread_mutex_unlock(&enclosure.lock);
    if (connection->reset) {
        struct linger linger = {.l_onoff = 1, .l_linger = 0};

        setsockopt(connection->fd, SOL_SOCKET, SO_LINGER, &linger, sizeof(linger));
    } else {
        /* Unread bytes from the host would turn the end into a reset, and a reset swallows the last bytes sent. */
        struct timeval patience = {.tv_usec = 100000};
        int64_t until = now_ns() + DRAIN_TIMEOUT_MS * 1000000ll;

        shutdown(connection->fd, SHUT_WR);
        setsockopt(connection->fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
        while (connection->closing && now_ns() < until) {
            ssize_t size = recv(connection->fd, connection->buffer, BUFFER_SIZE, 0);

            if (size == 0 || (size < 0 && errno != EAGAIN && errno != EINTR))
                break;
        }
    }
    if (enclosure.options.verbose || connection->closing)
        say("%s, queue %u: ended: %s", connection->peer, connection->qid, connection->why);
    close(connection->fd);
    close(connection->wake_fd);
    for (uint32_t i = 0; i < QUEUE_ENTRIES_MAX; i++)
        free(connection->requests[i].own);
    while (connection->out_count--) {
        free(connection->outs[connection->out_first].own);
        connection->out_first = (connection->out_first + 1) & (connection->out_space - 1);
    }
    free(connection->outs);
    free(connection->requests);
    free(connection->free_requests);
    free(connection->buffer);
    free(connection);
    pthread_mutex_lock(&enclosure.lock);
    enclosure.connection_count--;
    pthread_cond_broadcast(&enclosure.changed);
    pthread_mutex_unlock(&enclosure.lock);
}

static void *thread(void *argument) {
    struct connection *connection = argument;

    serve(connection);
    drop(connection);
    return NULL;
}

void connection_start(int fd, const char *peer) {
    struct connection *connection = calloc(1, sizeof(*connection));
    int on = 1;
    pthread_attr_t attributes;

    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
    connection->fd = fd;
    connection->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    snprintf(connection->peer, sizeof(connection->peer), "%s", peer);
    connection->entries = connection->free_count = 1; /* for Connect */
    connection->requests = calloc(QUEUE_ENTRIES_MAX, sizeof(*connection->requests));
    connection->free_requests = calloc(QUEUE_ENTRIES_MAX, sizeof(*connection->free_requests));
    connection->buffer = malloc(BUFFER_SIZE);
    connection->out_space = 64;
    connection->outs = malloc(connection->out_space * sizeof(*connection->outs));
    connection->accepted_ns = connection->alive_ns = now_ns();
    pthread_mutex_lock(&enclosure.lock);
    connection->next = enclosure.connections;
    enclosure.connections = connection;
    enclosure.connection_count++;
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    pthread_attr_setstacksize(&attributes, 256 << 10);
    if (connection->wake_fd < 0 || pthread_create(&connection->thread, &attributes, thread, connection)) {
        say("%s: no thread for it", peer);
        enclosure.connections = connection->next;
        enclosure.connection_count--;
        close(fd);
        close(connection->wake_fd);
        free(connection->outs);
        free(connection->requests);
        free(connection->free_requests);
        free(connection->buffer);
        free(connection);
    }
    pthread_attr_destroy(&attributes);
    pthread_mutex_unlock(&enclosure.lock);
}
