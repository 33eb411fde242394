/* One NVMe/TCP connection: PDUs and digests, commands by their cid. NVMe TCP transport 1.0, chapter 3.
 *
 * Received data goes from the socket straight to the command's memory, and the next PDU's header comes with the same system call. Sends are
 * gathered over several commands. All input is checked (I18): a PDU that breaks a rule ends the connection, with a reason in words.
 */
#include "base/descriptor.h"
#include "io/nvme/tcp.h"

#include <netinet/tcp.h>
#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <unistd.h>

#define HEAD_SIZE 24u /* of every PDU from a controller, but for ICResp */
#define PAD_MAX 128u
#define CONNECT_ROOM 8192u /* in-capsule data of Fabrics commands, on any queue */
static_assert(sizeof(struct nvme_data) == HEAD_SIZE && sizeof(struct nvme_r2t) == HEAD_SIZE && sizeof(struct nvme_term) == HEAD_SIZE &&
                  sizeof(struct nvme_response_pdu) == HEAD_SIZE,
              "wire");

static _Thread_local uint8_t sink[64 << 10]; /* takes dropped data */

int nvme_link_fail(struct nvme_link *link, int error, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(link->reason, sizeof(link->reason), format, arguments);
    va_end(arguments);
    return error;
}

/* For a PDU that breaks the rules: tell the controller, unless a PDU of ours is half sent, and give up. */
static int violation(struct nvme_link *link, enum nvme_fatal_error fes, uint32_t fei) {
    struct {
        struct nvme_term term;
        uint8_t head[HEAD_SIZE];
    } pdu = {.term = {.head = {.type = NVME_PDU_H2C_TERM, .hlen = HEAD_SIZE, .plen = sizeof(pdu)}, .fes = (uint16_t)fes, .fei = fei}};
    memcpy(pdu.head, link->head, HEAD_SIZE);
    if (!link->hello_left && !(link->first && link->first->head_sent)) {
        ssize_t n = send(link->fd, &pdu, sizeof(pdu), MSG_DONTWAIT | MSG_NOSIGNAL);
        (void)n;
    }
    return -EPROTO;
}

int nvme_status_error(uint16_t status) {
    switch (status >> 1 & 0x7ff) {
    case NVME_SC_SUCCESS: return 0;
    case NVME_SC_INVALID_NAMESPACE: return -ENODEV;
    case NVME_SC_ABORTED:
    case NVME_SC_PATH_HOST_ABORTED: return -ETIMEDOUT;
    case NVME_SC_CAPACITY: return -ENOSPC;
    case NVME_SC_CONNECT_BUSY: return -EBUSY;
    case NVME_SC_RESERVATION_CONFLICT: return -EBADE; /* the kernel's errno for it */
    case NVME_SC_CONNECT_HOST: return -EACCES;
    default: return -EIO;
    }
}

/* ---- life ---- */

int nvme_link_init(struct nvme_link *link, uint32_t depth) {
    memset(link, 0, sizeof(*link));
    link->fd = -1;
    link->requests = calloc(depth, sizeof(*link->requests));
    if (!link->requests)
        return -ENOMEM;
    link->depth = depth;
    for (uint32_t i = depth; i-- > 0;) {
        link->requests[i].next = link->free;
        link->free = &link->requests[i];
    }
    return 0;
}

void nvme_link_free(struct nvme_link *link) {
    if (link->fd >= 0)
        close(link->fd);
    free(link->requests);
    link->fd = -1;
    link->requests = NULL;
    link->state = NVME_LINK_CLOSED;
}

int nvme_link_connect(struct nvme_link *link, const struct sockaddr_storage *address, bool header_digest, bool data_digest) {
    assert(link->state == NVME_LINK_CLOSED && link->fd < 0);
    int fd = descriptor_above(socket(address->ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0)), one = 1;
    if (fd < 0)
        return nvme_link_fail(link, -errno, "socket: %s", strerror(errno));
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
    socklen_t size = address->ss_family == AF_INET6 ? sizeof(struct sockaddr_in6) : sizeof(struct sockaddr_in);
    if (connect(fd, (const struct sockaddr *)address, size) < 0 && errno != EINPROGRESS) {
        int error = errno;
        close(fd);
        return nvme_link_fail(link, -error, "connect: %s", strerror(error));
    }
    link->fd = fd;
    link->header_digest = header_digest;
    link->data_digest = data_digest;
    link->align = 4;
    link->received = 0;
    link->reason[0] = 0;
    struct nvme_icreq hello = {.head = {.type = NVME_PDU_ICREQ, .hlen = sizeof(hello), .plen = sizeof(hello)},
                               .digests = (uint8_t)((header_digest ? NVME_DIGEST_HEADER : 0) | (data_digest ? NVME_DIGEST_DATA : 0))};
    memcpy(link->hello, &hello, sizeof(hello));
    link->hello_left = sizeof(hello);
    link->head_have = 0;
    link->head_need = sizeof(struct nvme_icresp);
    link->in_data = false;
    link->state = NVME_LINK_CONNECTING;
    return 0;
}

void nvme_link_shutdown(struct nvme_link *link) {
    if (link->fd >= 0)
        shutdown(link->fd, SHUT_RDWR);
}

/* ---- requests ---- */

struct nvme_request *nvme_request_get(struct nvme_link *link) {
    struct nvme_request *request = link->free;
    if (!request)
        return NULL;
    link->free = request->next;
    link->in_flight++;
    memset(request, 0, offsetof(struct nvme_request, head));
    request->used = true;
    request->abandoned_ns = 0;
    request->next = NULL;
    return request;
}

void nvme_request_put(struct nvme_link *link, struct nvme_request *request) {
    if (request->abandoned)
        link->abandoned--;
    link->in_flight--;
    request->used = request->abandoned = false;
    request->next = link->free;
    link->free = request;
}

static void request_finish(struct nvme_link *link, struct nvme_request *request, int result) {
    if (request->done)
        request->done(link, request, result);
    nvme_request_put(link, request);
}

void nvme_link_close(struct nvme_link *link, int error) {
    if (link->fd >= 0) {
        shutdown(link->fd, SHUT_RDWR); /* ends a poll of the socket */
        close(link->fd);
    }
    link->fd = -1;
    link->state = NVME_LINK_CLOSED;
    link->first = link->last = NULL;
    link->hello_left = 0;
    for (uint32_t i = 0; i < link->depth; i++)
        if (link->requests[i].used)
            request_finish(link, &link->requests[i], error);
}

static void unlink_request(struct nvme_link *link, struct nvme_request *request) {
    struct nvme_request **at = &link->first, *before = NULL;
    while (*at != request)
        before = *at, at = &before->next;
    *at = request->next;
    if (link->last == request)
        link->last = before;
    request->queued = false;
    request->next = NULL;
}

bool nvme_request_abandon(struct nvme_link *link, struct nvme_request *request, uint64_t now) {
    if (request->queued && !request->head_sent && !request->sent) { /* the controller never hears of it */
        unlink_request(link, request);
        nvme_request_put(link, request);
        return true;
    }
    request->abandoned = true;
    request->abandoned_ns = now;
    link->abandoned++;
    if (request->write)
        return false;
    request->done = NULL;
    return true;
}

/* ---- sending ---- */

static uint32_t padded(const struct nvme_link *link, uint32_t size) { return (uint32_t)round_up(size, link->align); }

static void cursor_advance(struct nvme_cursor *cursor, uint64_t size) {
    while (size) {
        uint64_t step = min_u64(size, cursor->iov->iov_len - cursor->inside);
        cursor->inside += step;
        size -= step;
        if (cursor->inside == cursor->iov->iov_len)
            cursor->iov++, cursor->inside = 0;
    }
}

static uint32_t cursor_crc(struct nvme_cursor cursor, uint64_t size, uint32_t crc) {
    while (size) {
        uint64_t step = min_u64(size, cursor.iov->iov_len - cursor.inside);
        crc = nvme_crc32c(crc, (const uint8_t *)cursor.iov->iov_base + cursor.inside, step);
        cursor.iov++, cursor.inside = 0;
        size -= step;
    }
    return crc;
}

/* Returns the count of entries; lowers *size to the bytes that fit. */
static uint32_t cursor_iovs(struct nvme_cursor cursor, uint32_t *size, struct iovec *out, uint32_t room) {
    uint32_t count = 0, left = *size;
    while (left && count < room) {
        uint64_t step = min_u64(left, cursor.iov->iov_len - cursor.inside);
        out[count++] = (struct iovec){(uint8_t *)cursor.iov->iov_base + cursor.inside, step};
        cursor.iov++, cursor.inside = 0;
        left -= (uint32_t)step;
    }
    *size -= left;
    return count;
}

/* Digests and padding behind a header in request->head, and the data that follows. */
static void pdu_finish(struct nvme_link *link, struct nvme_request *request, uint8_t hlen, uint32_t data_size) {
    struct nvme_pdu *pdu = (struct nvme_pdu *)request->head;
    uint32_t size = hlen + (link->header_digest ? NVME_DIGEST_SIZE : 0);
    request->trailer_size = data_size && link->data_digest ? NVME_DIGEST_SIZE : 0;
    if (data_size) {
        memset(request->head + size, 0, padded(link, size) - size);
        size = padded(link, size);
    }
    pdu->hlen = hlen;
    pdu->pdo = data_size ? (uint8_t)size : 0;
    pdu->plen = size + data_size + request->trailer_size;
    pdu->flags |= (uint8_t)((link->header_digest ? NVME_PDU_HDGST : 0) | (request->trailer_size ? NVME_PDU_DDGST : 0));
    if (link->header_digest) {
        uint32_t crc = nvme_crc32c(0, request->head, hlen);
        memcpy(request->head + hlen, &crc, sizeof(crc));
    }
    if (request->trailer_size) {
        uint32_t crc = cursor_crc(request->data, data_size, 0);
        memcpy(request->trailer, &crc, sizeof(crc));
    }
    request->head_size = (uint16_t)size;
    request->head_sent = request->trailer_sent = 0;
    request->data_left = data_size;
}

static void enqueue(struct nvme_link *link, struct nvme_request *request) {
    request->queued = true;
    request->next = NULL;
    if (link->last)
        link->last->next = request;
    else
        link->first = request;
    link->last = request;
}

void nvme_request_send(struct nvme_link *link, struct nvme_request *request) {
    struct nvme_command *command = &request->command;
    uint32_t room = command->opcode == NVME_OPCODE_FABRICS ? CONNECT_ROOM : link->in_capsule_size;
    bool carried = request->write && request->size && request->size <= room;
    command->cid = (uint16_t)(request - link->requests);
    command->flags = NVME_COMMAND_SGL;
    command->sgl = (struct nvme_sgl){.size = request->size, .id = carried ? NVME_SGL_IN_CAPSULE : NVME_SGL_TRANSPORT};
    struct nvme_command_pdu *pdu = (struct nvme_command_pdu *)request->head;
    pdu->head = (struct nvme_pdu){.type = NVME_PDU_COMMAND};
    pdu->command = *command;
    pdu_finish(link, request, sizeof(*pdu), carried ? request->size : 0);
    enqueue(link, request);
}

/* The next PDU of the data that an R2T has asked for. */
static void data_pdu(struct nvme_link *link, struct nvme_request *request) {
    uint32_t size = (uint32_t)min_u64(request->granted, link->maxh2cdata);
    request->granted -= size;
    struct nvme_data *pdu = (struct nvme_data *)request->head;
    *pdu = (struct nvme_data){.head = {.type = NVME_PDU_H2C_DATA, .flags = request->granted ? 0 : NVME_PDU_LAST},
                              .cid = request->command.cid,
                              .ttag = request->ttag,
                              .offset = request->moved,
                              .size = size};
    pdu_finish(link, request, sizeof(*pdu), size);
}

bool nvme_link_sending(const struct nvme_link *link) {
    return link->state == NVME_LINK_CONNECTING || link->hello_left || (link->first && link->state == NVME_LINK_READY);
}

/* `n` bytes more have gone out. */
static void sent(struct nvme_link *link, uint64_t n) {
    while (n || (link->first && link->first->head_sent == link->first->head_size && !link->first->data_left &&
                 link->first->trailer_sent == link->first->trailer_size)) {
        struct nvme_request *request = link->first;
        uint32_t step = (uint32_t)min_u64(n, request->head_size - request->head_sent);
        request->head_sent = (uint16_t)(request->head_sent + step);
        n -= step;
        step = (uint32_t)min_u64(n, request->data_left);
        cursor_advance(&request->data, step);
        request->data_left -= step;
        request->moved += step;
        n -= step;
        step = (uint32_t)min_u64(n, (uint64_t)(request->trailer_size - request->trailer_sent));
        request->trailer_sent = (uint8_t)(request->trailer_sent + step);
        n -= step;
        if (request->head_sent < request->head_size || request->data_left || request->trailer_sent < request->trailer_size)
            return;
        request->sent = true;
        if (request->granted && !request->answered) {
            data_pdu(link, request);
            continue;
        }
        link->first = request->next;
        if (!link->first)
            link->last = NULL;
        request->queued = false;
        request->head_sent = 0;
        if (request->answered)
            request_finish(link, request, nvme_status_error(request->completion.status));
    }
}

int nvme_link_send(struct nvme_link *link) {
    if (link->state == NVME_LINK_CONNECTING) {
        struct pollfd poll_fd = {.fd = link->fd, .events = POLLOUT};
        int error = 0;
        socklen_t size = sizeof(error);
        if (poll(&poll_fd, 1, 0) <= 0)
            return 0;
        if (getsockopt(link->fd, SOL_SOCKET, SO_ERROR, &error, &size) < 0 || error)
            return nvme_link_fail(link, error ? -error : -errno, "connect: %s", strerror(error ? error : errno));
        link->state = NVME_LINK_GREETING;
    }
    if (link->hello_left) {
        ssize_t n = send(link->fd, link->hello + sizeof(link->hello) - link->hello_left, link->hello_left, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (n > 0)
            link->hello_left -= (uint32_t)n;
        else if (n < 0 && errno != EAGAIN && errno != EINTR)
            return nvme_link_fail(link, -errno, "send: %s", strerror(errno));
    }
    while (link->state == NVME_LINK_READY && link->first) {
        struct iovec iovs[NVME_IOVS];
        uint32_t count = 0;
        uint64_t wanted = 0;
        for (struct nvme_request *request = link->first; request && count + 3 <= NVME_IOVS && wanted < 1 << 20; request = request->next) {
            uint32_t head = request->head_size - request->head_sent, data = request->data_left;
            uint32_t trailer = request->trailer_size - request->trailer_sent;
            if (head)
                iovs[count++] = (struct iovec){request->head + request->head_sent, head};
            uint32_t whole = data;
            count += cursor_iovs(request->data, &data, iovs + count, NVME_IOVS - 1 - count);
            wanted += head + data;
            if (data < whole)
                break;
            if (trailer)
                iovs[count++] = (struct iovec){request->trailer + request->trailer_sent, trailer};
            wanted += trailer;
            if (request->granted) /* another PDU of its own comes first */
                break;
        }
        struct msghdr message = {.msg_iov = iovs, .msg_iovlen = count};
        ssize_t n = sendmsg(link->fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0 && errno == EAGAIN)
            return 0;
        if (n < 0)
            return nvme_link_fail(link, -errno, "send: %s", strerror(errno));
        sent(link, (uint64_t)n);
        if ((uint64_t)n < wanted)
            return 0;
    }
    return 0;
}

/* ---- receiving ---- */

static uint32_t head_size(const struct nvme_link *link) { return HEAD_SIZE + (link->header_digest ? NVME_DIGEST_SIZE : 0); }

static int icresp(struct nvme_link *link) {
    const struct nvme_icresp *pdu = (const struct nvme_icresp *)link->head;
    uint8_t wanted = (uint8_t)((link->header_digest ? NVME_DIGEST_HEADER : 0) | (link->data_digest ? NVME_DIGEST_DATA : 0));
    if (pdu->head.type != NVME_PDU_ICRESP || pdu->head.hlen != sizeof(*pdu) || pdu->head.plen != sizeof(*pdu) || pdu->head.flags)
        return nvme_link_fail(link, -EPROTO, "the answer to ICReq is of type %u, hlen %u, plen %u, flags %#x: no ICResp; is this NVMe/TCP?",
                              pdu->head.type, pdu->head.hlen, pdu->head.plen, pdu->head.flags);
    if (pdu->pfv != 0 || pdu->cpda > 31 || pdu->maxh2cdata < 4096 || pdu->maxh2cdata % 4 || pdu->digests & ~wanted)
        return nvme_link_fail(link, -EPROTO, "ICResp: format %u, alignment %u, maxh2cdata %u, digests %#x (wanted %#x)", pdu->pfv, pdu->cpda,
                              pdu->maxh2cdata, pdu->digests, wanted);
    if (pdu->digests != wanted)
        return nvme_link_fail(link, -EPROTO, "ICResp: digests %#x, but the URL asks for %#x", pdu->digests, wanted);
    link->align = (pdu->cpda + 1u) * 4;
    link->maxh2cdata = pdu->maxh2cdata;
    link->state = NVME_LINK_READY;
    return 0;
}

static int terminated(struct nvme_link *link) {
    const struct nvme_term *pdu = (const struct nvme_term *)link->head;
    static const char *const words[] = {"", "header field", "PDU sequence", "header digest", "data out of range", "limit", "parameter"};
    return nvme_link_fail(link, -EPROTO, "the controller ends the connection: C2HTermReq, fatal error %u (%s), information %#x", pdu->fes,
                          pdu->fes < 7 ? words[pdu->fes] : "unknown", pdu->fei);
}

static struct nvme_request *request_of(struct nvme_link *link, uint16_t cid) {
    struct nvme_request *request = cid < link->depth ? &link->requests[cid] : NULL;
    return request && request->used && request->sent && !request->answered ? request : NULL;
}

static int response(struct nvme_link *link) {
    const struct nvme_response_pdu *pdu = (const struct nvme_response_pdu *)link->head;
    const struct nvme_completion *completion = &pdu->completion;
    struct nvme_request *request = request_of(link, completion->cid);
    if (pdu->head.plen != head_size(link) || pdu->head.flags & ~NVME_PDU_HDGST)
        return nvme_link_fail(link, violation(link, NVME_FES_HEADER_FIELD, 4), "response: plen %u, flags %#x", pdu->head.plen, pdu->head.flags);
    if (!request)
        return nvme_link_fail(link, violation(link, NVME_FES_PARAMETER, 8 + 12), "response: cid %u is not under way", completion->cid);
    request->completion = *completion;
    if (request->queued) { /* its data is being sent: a PDU that has begun is sent to its end */
        request->granted = 0;
        request->answered = true;
        if (!nvme_status_error(completion->status))
            return nvme_link_fail(link, violation(link, NVME_FES_SEQUENCE, 0), "response: success for cid %u, whose data is still being sent",
                                  completion->cid);
        if (request->head_sent)
            return 0;
        unlink_request(link, request);
    }
    int result = nvme_status_error(completion->status);
    /* No command that is sent here may get fewer bytes than it asked for. */
    if (result == 0 && request->moved != request->size)
        return nvme_link_fail(link, violation(link, NVME_FES_SEQUENCE, 0), "response: success for cid %u with %u of %u bytes moved", completion->cid,
                              request->moved, request->size);
    request_finish(link, request, result == 0 && request->corrupt ? -EBADMSG : result);
    return 0;
}

static int ready_to_transfer(struct nvme_link *link) {
    const struct nvme_r2t *pdu = (const struct nvme_r2t *)link->head;
    struct nvme_request *request = request_of(link, pdu->cid);
    if (pdu->head.plen != head_size(link) || pdu->head.flags & ~NVME_PDU_HDGST)
        return nvme_link_fail(link, violation(link, NVME_FES_HEADER_FIELD, 4), "R2T: plen %u, flags %#x", pdu->head.plen, pdu->head.flags);
    if (!request || !request->write || request->command.sgl.id == NVME_SGL_IN_CAPSULE)
        return nvme_link_fail(link, violation(link, NVME_FES_PARAMETER, 8), "R2T: cid %u is no write that waits for one", pdu->cid);
    if (request->queued)
        return nvme_link_fail(link, violation(link, NVME_FES_LIMIT, 0), "R2T: cid %u has one under way", pdu->cid);
    if (pdu->offset != request->moved || pdu->size == 0 || pdu->size > request->size - request->moved)
        return nvme_link_fail(link, violation(link, NVME_FES_RANGE, 0), "R2T: %u bytes at %u of cid %u, which has sent %u of %u", pdu->size,
                              pdu->offset, pdu->cid, request->moved, request->size);
    request->granted = pdu->size;
    request->ttag = pdu->ttag;
    data_pdu(link, request);
    enqueue(link, request);
    return 0;
}

static int data_begun(struct nvme_link *link) {
    const struct nvme_data *pdu = (const struct nvme_data *)link->head;
    struct nvme_request *request = request_of(link, pdu->cid);
    uint32_t before = head_size(link), digest = link->data_digest ? NVME_DIGEST_SIZE : 0;
    if (pdu->head.pdo < before || pdu->head.pdo > before + PAD_MAX || pdu->size == 0 || pdu->head.plen < digest + pdu->head.pdo ||
        pdu->head.plen - digest - pdu->head.pdo != pdu->size)
        return nvme_link_fail(link, violation(link, NVME_FES_HEADER_FIELD, 3), "C2HData: pdo %u, plen %u for %u bytes", pdu->head.pdo, pdu->head.plen,
                              pdu->size);
    if (!!(pdu->head.flags & NVME_PDU_DDGST) != link->data_digest || (pdu->head.flags & NVME_PDU_SUCCESS && !(pdu->head.flags & NVME_PDU_LAST)))
        return nvme_link_fail(link, violation(link, NVME_FES_HEADER_FIELD, 1), "C2HData: flags %#x", pdu->head.flags);
    if (!request || request->write || request->size == 0)
        return nvme_link_fail(link, violation(link, NVME_FES_PARAMETER, 8), "C2HData: cid %u is no read under way", pdu->cid);
    if (pdu->offset != request->moved || pdu->size > request->size - request->moved ||
        (pdu->head.flags & NVME_PDU_SUCCESS && pdu->size != request->size - request->moved))
        return nvme_link_fail(link, violation(link, NVME_FES_RANGE, 0), "C2HData: %u bytes at %u of cid %u, which has received %u of %u", pdu->size,
                              pdu->offset, pdu->cid, request->moved, request->size);
    link->into = request;
    link->in_data = true;
    link->success = pdu->head.flags & NVME_PDU_SUCCESS;
    link->pad_left = pdu->head.pdo - before;
    link->data_left = pdu->size;
    link->trailer_left = digest;
    link->crc = 0;
    return 0;
}

static void data_ended(struct nvme_link *link) {
    struct nvme_request *request = link->into;
    uint32_t crc;
    memcpy(&crc, link->trailer, sizeof(crc));
    if (link->data_digest && crc != link->crc)
        request->corrupt = true; /* this command fails; the connection is still in step (transport 3.3.2) */
    link->in_data = false;
    link->into = NULL;
    if (link->success) {
        request->completion = (struct nvme_completion){.cid = request->command.cid};
        request_finish(link, request, request->corrupt ? -EBADMSG : 0);
    }
}

static int head_complete(struct nvme_link *link) {
    const struct nvme_pdu *pdu = (const struct nvme_pdu *)link->head;
    link->head_have = 0;
    if (link->state == NVME_LINK_GREETING) {
        int r = icresp(link);
        link->head_need = head_size(link);
        return r;
    }
    if (pdu->type != NVME_PDU_RESPONSE && pdu->type != NVME_PDU_C2H_DATA && pdu->type != NVME_PDU_R2T)
        return nvme_link_fail(link, violation(link, NVME_FES_HEADER_FIELD, 0), "a PDU of type %u", pdu->type);
    if (pdu->hlen != HEAD_SIZE || !!(pdu->flags & NVME_PDU_HDGST) != link->header_digest)
        return nvme_link_fail(link, violation(link, NVME_FES_HEADER_FIELD, 2), "PDU of type %u: hlen %u, flags %#x", pdu->type, pdu->hlen,
                              pdu->flags);
    if (link->header_digest) {
        uint32_t crc, actual = nvme_crc32c(0, link->head, HEAD_SIZE);
        memcpy(&crc, link->head + HEAD_SIZE, sizeof(crc));
        if (crc != actual)
            return nvme_link_fail(link, violation(link, NVME_FES_HEADER_DIGEST, crc), "PDU of type %u: header digest %#x, expected %#x", pdu->type,
                                  crc, actual);
    }
    return pdu->type == NVME_PDU_RESPONSE ? response(link) : pdu->type == NVME_PDU_R2T ? ready_to_transfer(link) : data_begun(link);
}

/* `n` bytes of data have arrived in place. */
static void data_received(struct nvme_link *link, uint32_t n) {
    struct nvme_request *request = link->into;
    if (!request->abandoned) {
        if (link->data_digest)
            link->crc = cursor_crc(request->data, n, link->crc);
        cursor_advance(&request->data, n);
    }
    request->moved += n;
    link->data_left -= n;
}

int nvme_link_receive(struct nvme_link *link) {
    while (link->state >= NVME_LINK_GREETING) {
        struct iovec iovs[NVME_IOVS];
        uint32_t count = 0, pad = 0, data = 0, trailer = 0, head = 0;
        if (link->in_data) {
            if ((pad = link->pad_left))
                iovs[count++] = (struct iovec){sink, pad};
            if (link->into->abandoned) {
                if ((data = (uint32_t)min_u64(link->data_left, sizeof(sink))))
                    iovs[count++] = (struct iovec){sink, data};
            } else {
                data = link->data_left;
                count += cursor_iovs(link->into->data, &data, iovs + count, NVME_IOVS - 3);
            }
            if (data == link->data_left && (trailer = link->trailer_left))
                iovs[count++] = (struct iovec){link->trailer + NVME_DIGEST_SIZE - trailer, trailer};
        }
        if (data == link->data_left || !link->in_data) {
            head = link->head_need - link->head_have;
            iovs[count++] = (struct iovec){link->head + link->head_have, head};
        }
        struct msghdr message = {.msg_iov = iovs, .msg_iovlen = count};
        ssize_t got = recvmsg(link->fd, &message, MSG_DONTWAIT);
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0 && errno == EAGAIN)
            return 0;
        if (got < 0)
            return nvme_link_fail(link, -errno, "receive: %s", strerror(errno));
        if (got == 0)
            return nvme_link_fail(link, -ECONNRESET, "the controller closed the connection%s%s",
                                  link->in_data || link->head_have ? " in the middle of a PDU" : "",
                                  link->state == NVME_LINK_GREETING ? " before ICResp" : "");
        uint64_t n = (uint64_t)got;
        bool all = n == (uint64_t)pad + data + trailer + head;
        link->received += n;
        if (link->in_data) {
            uint32_t step = (uint32_t)min_u64(n, pad);
            link->pad_left -= step;
            n -= step;
            step = (uint32_t)min_u64(n, data);
            data_received(link, step);
            n -= step;
            step = (uint32_t)min_u64(n, trailer);
            link->trailer_left -= step;
            n -= step;
            if (!link->pad_left && !link->data_left && !link->trailer_left)
                data_ended(link);
        }
        link->head_have += (uint32_t)n;
        if (link->head_have >= HEAD_SIZE && ((const struct nvme_pdu *)link->head)->type == NVME_PDU_C2H_TERM)
            return terminated(link);
        if (link->head_have == link->head_need && !link->in_data) {
            int r = head_complete(link);
            if (r < 0 || link->in_flight == 0)
                return r;
        } else if (!all) {
            return 0;
        }
    }
    return 0;
}
