/* Answers to the host: PDUs are queued, gathered into one sendmsg, and, if a fault says so, made wrong. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>

#include "enclosure.h"
#include "digest.h"

#define IOVS_MAX 96

static struct out *push(struct connection *connection) {
    struct out *out;

    if (connection->out_count == connection->out_space) {
        uint32_t space = connection->out_space * 2;
        struct out *outs = malloc(space * sizeof(*outs));

        for (uint32_t i = 0; i < connection->out_count; i++)
            outs[i] = connection->outs[(connection->out_first + i) & (connection->out_space - 1)];
        free(connection->outs);
        connection->outs = outs;
        connection->out_space = space;
        connection->out_first = 0;
    }
    out = &connection->outs[(connection->out_first + connection->out_count++) & (connection->out_space - 1)];
    *out = (struct out){.head_size = 0};
    return out;
}

/* `head` is a whole PDU's header; its data, if any, is `out`'s. Fills in flags, pdo and plen, and adds the digests. */
static void finish(struct connection *connection, struct out *out, void *head, uint32_t hlen, const uint8_t *data, uint32_t size) {
    struct nvme_pdu *pdu = head;
    uint32_t behind = hlen, align = (connection->hpda + 1) * 4;

    pdu->hlen = (uint8_t)hlen;
    if (connection->header_digest) {
        pdu->flags |= NVME_PDU_HDGST;
        behind += NVME_DIGEST_SIZE;
    }
    if (size) {
        behind = (behind + align - 1) / align * align;
        pdu->pdo = (uint8_t)behind;
        if (connection->data_digest) {
            pdu->flags |= NVME_PDU_DDGST;
            out->tail_size = NVME_DIGEST_SIZE;
        }
    }
    pdu->plen = behind + size + out->tail_size;
    out->head_size = behind;
    out->data = data;
    out->size = size;
    memcpy(out->head, head, hlen);
    if (out->tail_size) {
        uint32_t digest = nvme_digest(0, data, size);

        memcpy(out->tail, &digest, sizeof(digest));
    }
}

/* After the last change to the header. */
static void seal(const struct connection *connection, struct out *out) {
    if (connection->header_digest) {
        uint32_t hlen = offsetof(struct nvme_response_pdu, completion) + sizeof(struct nvme_completion); /* 24: data, responses, R2Ts */
        uint32_t digest = nvme_digest(0, out->head, hlen);

        memcpy(out->head + hlen, &digest, sizeof(digest));
    }
}

static struct out *push_response(struct connection *connection, const struct request *request) {
    struct nvme_response_pdu pdu = {.head.type = NVME_PDU_RESPONSE};
    struct out *out = push(connection);

    pdu.completion.dw0 = request->dw0;
    pdu.completion.dw1 = request->dw1;
    pdu.completion.sqhd = connection->no_flow ? 0xffff : connection->sqhd;
    pdu.completion.cid = request->command.cid;
    pdu.completion.status = (uint16_t)(request->status << 1);
    finish(connection, out, &pdu, sizeof(pdu), NULL, 0);
    return out;
}

static struct out *push_data(struct connection *connection, const struct request *request, uint32_t offset, uint32_t size, uint8_t flags) {
    struct nvme_data pdu = {.head = {.type = NVME_PDU_C2H_DATA, .flags = flags}, .cid = request->command.cid, .offset = offset, .size = size};
    struct out *out = push(connection);

    finish(connection, out, &pdu, sizeof(pdu), request->data + offset, size);
    return out;
}

void answer_r2t(struct connection *connection, struct request *request, uint32_t size) {
    struct nvme_r2t pdu = {.head.type = NVME_PDU_R2T,
                           .cid = request->command.cid,
                           .ttag = (uint16_t)(request - connection->requests),
                           .offset = request->asked,
                           .size = size};
    struct out *out = push(connection);

    if (request->fault.kind == FAULT_PROTOCOL && request->fault.what == WHAT_R2T)
        pdu.offset += request->size;
    finish(connection, out, &pdu, sizeof(pdu), NULL, 0);
    seal(connection, out);
    request->asked += size;
}

/* A copy of what a PDU sends, to be made wrong. */
static uint8_t *own_data(struct out *out) {
    out->own = malloc(out->size);
    memcpy(out->own, out->data, out->size);
    out->data = out->own;
    return out->own;
}

static void redo_data_digest(struct out *out) {
    uint32_t digest = nvme_digest(0, out->data, out->size);

    if (out->tail_size)
        memcpy(out->tail, &digest, sizeof(digest));
}

/* The answer's PDUs are outs [first, out_count). */
static void corrupt(struct connection *connection, struct request *request, uint32_t first) {
    const struct fault_hit *fault = &request->fault;
    struct out *out = &connection->outs[(connection->out_first + first) & (connection->out_space - 1)];
    struct nvme_pdu *pdu = (struct nvme_pdu *)(void *)out->head;
    struct nvme_data *data = out->size ? (struct nvme_data *)(void *)out->head : NULL;
    struct nvme_response_pdu *response = out->size ? NULL : (struct nvme_response_pdu *)(void *)out->head;

    if (fault->kind == FAULT_FLIP && data) {
        uint64_t bit = (fault->at < 0 ? fault->random : (uint64_t)fault->at) % ((uint64_t)out->size * 8);

        own_data(out)[bit / 8] ^= (uint8_t)(1 << bit % 8);
        if (fault->what != WHAT_WIRE)
            redo_data_digest(out);
    } else if (fault->kind == FAULT_DIGEST && fault->what == WHAT_DATA) {
        out->tail[fault->random % NVME_DIGEST_SIZE] ^= 0x40;
    } else if (fault->kind == FAULT_HALF) {
        uint64_t whole = out->head_size + out->size + out->tail_size;
        uint64_t cut = fault->at < 0 ? whole / 2 : (uint64_t)fault->at < whole ? (uint64_t)fault->at : whole - 1;

        out->tail_size = 0;
        if (cut < out->head_size) {
            out->head_size = (uint32_t)cut;
            out->size = 0;
        } else {
            out->size = (uint32_t)(cut - out->head_size) < out->size ? (uint32_t)(cut - out->head_size) : out->size;
        }
        out->hang = fault->what == WHAT_HANG;
        out->hang_up = !out->hang;
        /* Later PDUs of the queue are not sent; the request ends with this one. */
        while (connection->out_count > first + 1)
            connection->out_count--;
        out->last = request;
        return;
    } else if (fault->kind == FAULT_PROTOCOL) {
        switch (fault->what) {
        case WHAT_HLEN: pdu->hlen ^= 8; break;
        case WHAT_PLEN: pdu->plen = data ? pdu->plen + 64 : 0x7fffffff; break;
        case WHAT_PDO: pdu->pdo = data ? (uint8_t)(pdu->pdo - 4) : 40; break;
        case WHAT_CID: *(data ? &data->cid : &response->completion.cid) ^= 0x5a5a; break;
        case WHAT_OFFSET: data ? (data->offset += 4096) : (response->completion.sqhd = 0xfff0); break;
        case WHAT_SIZE: data ? (data->size += 4096) : (response->completion.cid ^= 0x0f0f); break;
        case WHAT_FLAGS: pdu->flags = data ? NVME_PDU_SUCCESS | (pdu->flags & NVME_PDU_DDGST) : 0xf0; break;
        case WHAT_TYPE: pdu->type = 0x42; break;
        default: break;
        }
    }
}

static void answer_plain(struct connection *connection, struct request *request) {
    bool data = request->to_host && !request->status && request->size, success = enclosure.options.success && connection->no_flow;
    uint32_t step = enclosure.options.c2h_size ? enclosure.options.c2h_size : request->size;
    uint32_t shown = request->size;
    struct out *out = NULL;

    if (request->fault.kind == FAULT_PROTOCOL && request->fault.what == WHAT_SHORT)
        shown = shown / 2;
    for (uint32_t offset = 0; data && offset < shown; offset += step) {
        bool last = step >= shown - offset;
        uint8_t flags = (uint8_t)(last ? NVME_PDU_LAST | (success ? NVME_PDU_SUCCESS : 0) : 0);

        out = push_data(connection, request, offset, last ? shown - offset : step, flags);
    }
    if (!data || !success || shown == 0)
        out = push_response(connection, request);
    out->last = request;
    out->hang_up = request->hang_up;
}

void answer(struct connection *connection, struct request *request) {
    uint32_t first = connection->out_count;
    enum fault_what what = request->fault.kind == FAULT_PROTOCOL ? request->fault.what : WHAT_DEFAULT;

    request->stage = STAGE_SENDING;
    if (what == WHAT_ICRESP) {
        struct nvme_icreq again = {.hpda = (uint8_t)connection->hpda};

        answer_icresp(connection, &again);
    } else if (what == WHAT_TERM) {
        answer_term(connection, NVME_FES_SEQUENCE, 0, NULL);
    } else if (what == WHAT_C2H && !request->to_host && request->data) {
        struct out *out = push_data(connection, request, 0, request->size < 4096 ? request->size : 4096, NVME_PDU_LAST);

        seal(connection, out);
    } else if (what == WHAT_R2T && request->to_host) {
        struct nvme_r2t pdu = {.head.type = NVME_PDU_R2T, .cid = request->command.cid, .size = request->size};
        struct out *out = push(connection);

        finish(connection, out, &pdu, sizeof(pdu), NULL, 0);
        seal(connection, out);
    }
    if (connection->out_count > first)
        first = connection->out_count;
    answer_plain(connection, request);
    if (what == WHAT_TWICE) {
        struct out *out = &connection->outs[(connection->out_first + connection->out_count - 1) & (connection->out_space - 1)];

        out->last = NULL;
        answer_plain(connection, request);
    }
    if (request->fault.kind != FAULT_NONE)
        corrupt(connection, request, first);
    for (uint32_t i = first; i < connection->out_count; i++) {
        struct out *out = &connection->outs[(connection->out_first + i) & (connection->out_space - 1)];

        if (out->head_size >= 24)
            seal(connection, out);
        if (i == first && request->fault.kind == FAULT_DIGEST && request->fault.what != WHAT_DATA && connection->header_digest)
            out->head[24] ^= 0x40;
    }
}

void answer_icresp(struct connection *connection, const struct nvme_icreq *request) {
    const struct options *options = &enclosure.options;
    struct nvme_icresp pdu = {.head = {.type = NVME_PDU_ICRESP, .hlen = sizeof(pdu), .plen = sizeof(pdu)},
                              .cpda = (uint8_t)options->cpda,
                              .digests = (uint8_t)(request->digests & options->digests),
                              .maxh2cdata = options->max_h2c_size};
    struct fault_hit fault = {.kind = FAULT_NONE};
    struct out *out = push(connection);

    out->head_size = sizeof(pdu);
    if (fault_hits(connection, 0, CLASS_ICREQ, 0, &fault)) {
        if (fault.kind == FAULT_HALF) {
            out->head_size = fault.at < 0 ? sizeof(pdu) / 2 : (uint32_t)fault.at % sizeof(pdu);
            out->hang = fault.what == WHAT_HANG;
            out->hang_up = !out->hang;
        } else if (fault.kind == FAULT_RESET || fault.kind == FAULT_DROP) {
            connection->out_count--;
            connection->reset = connection->ended = fault.kind == FAULT_RESET;
            return;
        } else if (fault.kind == FAULT_PROTOCOL) {
            switch (fault.what) {
            case WHAT_PFV: pdu.pfv = 7; break;
            case WHAT_CPDA: pdu.cpda = 200; break;
            case WHAT_MAXH2CDATA: pdu.maxh2cdata = 13; break;
            case WHAT_DIGESTS: pdu.digests ^= NVME_DIGEST_HEADER | NVME_DIGEST_DATA; break;
            case WHAT_HLEN: pdu.head.hlen = 64; break;
            case WHAT_PLEN: pdu.head.plen = 1u << 30; break;
            default: pdu.head.type = 0x42; break;
            }
        }
    }
    memcpy(out->head, &pdu, sizeof(pdu));
}

void answer_term(struct connection *connection, enum nvme_fatal_error fes, uint32_t fei, const void *head) {
    const struct nvme_pdu *bad = head;
    uint32_t size = head == NULL ? 0 : bad->hlen >= sizeof(*bad) && bad->hlen <= sizeof(struct nvme_icreq) ? bad->hlen : sizeof(*bad);
    struct nvme_term pdu = {
        .head = {.type = NVME_PDU_C2H_TERM, .hlen = sizeof(pdu), .pdo = (uint8_t)(size ? sizeof(pdu) : 0), .plen = (uint32_t)sizeof(pdu) + size},
        .fes = (uint16_t)fes,
        .fei = fei};
    struct out *out = push(connection);

    memcpy(out->head, &pdu, sizeof(pdu));
    if (size)
        memcpy(out->head + sizeof(pdu), head, size);
    out->head_size = (uint32_t)sizeof(pdu) + size;
    out->hang_up = true;
}

static void pop(struct connection *connection) {
    struct out *out = &connection->outs[connection->out_first];
    bool hang_up = out->hang_up, hang = out->hang;

    free(out->own);
    connection->out_first = (connection->out_first + 1) & (connection->out_space - 1);
    connection->out_count--;
    connection->out_sent = 0;
    if (out->last)
        request_end(connection, out->last);
    if (hang_up)
        connection->ended = true;
    if (hang)
        connection->hung = true;
}

int answer_flush(struct connection *connection) {
    while (connection->out_count && !connection->ended && !connection->hung) {
        struct iovec iovs[IOVS_MAX];
        struct msghdr message = {.msg_iov = iovs};
        uint64_t skip = connection->out_sent;
        ssize_t sent;

        for (uint32_t i = 0; i < connection->out_count && message.msg_iovlen + 3 <= IOVS_MAX; i++) {
            struct out *out = &connection->outs[(connection->out_first + i) & (connection->out_space - 1)];
            struct iovec parts[3] = {{out->head, out->head_size}, {(void *)(uintptr_t)out->data, out->size}, {out->tail, out->tail_size}};

            for (int part = 0; part < 3; part++) {
                uint64_t size = parts[part].iov_len;

                if (size > skip)
                    iovs[message.msg_iovlen++] = (struct iovec){(char *)parts[part].iov_base + skip, size - skip};
                skip -= size < skip ? size : skip;
            }
            if (out->hang_up || out->hang)
                break;
        }
        sent = message.msg_iovlen ? sendmsg(connection->fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT) : 0;
        if (sent < 0)
            return -errno;
        for (;;) {
            struct out *out = &connection->outs[connection->out_first];
            uint64_t left;

            if (!connection->out_count || connection->ended || connection->hung)
                break;
            left = out->head_size + out->size + out->tail_size - connection->out_sent;
            if ((uint64_t)sent < left) {
                connection->out_sent += (uint64_t)sent;
                break;
            }
            sent -= (ssize_t)left;
            pop(connection);
        }
    }
    return 0;
}
