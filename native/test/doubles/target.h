/* A double of an NVMe/TCP target, in the test's own process: memory behind sockets. It follows the specification in many shapes (digests, alignment,
 * chunks of R2T and C2HData, SUCCESS or a response) and breaks it on demand. It shares with the initiator the wire's structures and the crc alone.
 */
#ifndef KVFS_TEST_DOUBLES_TARGET_H
#define KVFS_TEST_DOUBLES_TARGET_H

#include "io/nvme/tcp.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <unistd.h>

#include "../check.h"

#define NAMESPACES 2u /* a target */
#define ZONES_OFFSET ((uint64_t)1 << 20)
#define ZONE ((uint64_t)1 << 20)
#define SEGMENTS 4u
#define SIZE (ZONES_OFFSET + ZONE * SEGMENTS)
#define CONNECTIONS_MAX 512
#define MS 1000000ull

enum trick {
    HONEST,
    /* Instead of an answer to an I/O command. */
    SWALLOW,
    RESET,
    HALF_PDU,
    FAIL,
    WRONG_CID,
    FREE_CID,
    TWICE,
    BAD_TYPE,
    BAD_HLEN,
    BAD_PLEN,
    HUGE_PLEN,
    BAD_FLAGS,
    TERM,
    EMPTY_SUCCESS,
    BAD_HEADER_DIGEST,
    BAD_DATA_DIGEST,
    /* Of data for a read. */
    DATA_OFFSET,
    DATA_TOO_LONG,
    DATA_ZERO,
    DATA_PDO,
    DATA_PLEN,
    DATA_FOR_WRITE,
    DATA_SUCCESS_EARLY,
    /* Of an R2T. */
    R2T_OFFSET,
    R2T_TOO_LONG,
    R2T_ZERO,
    R2T_FOR_READ,
    R2T_TWICE,
    RANDOM_BYTES,
    TRICKS,
    /* Of a greeting. */
    GREET_SILENT,
    GREET_RANDOM,
    GREET_HANG_UP,
    GREET_MAXH2C,
    GREET_CPDA,
    GREET_DIGESTS,
    GREET_VERSION
};

struct target {
    struct sockaddr_in address;
    int listener;
    pthread_t thread;
    atomic_bool stopping;
    pthread_mutex_t lock; /* memory */
    uint8_t *memory[NAMESPACES];
    uint64_t size[NAMESPACES];
    uint8_t identity[NAMESPACES]; /* first byte of the NGUID */
    atomic_uint trick, every;     /* every n-th I/O command, from the next on */
    atomic_uint count, connections, refuse, delay_ms, alive;
    /* Shape. */
    uint32_t chunk, r2t_chunk, cpda, capsule, mdts, shift, queues;
    atomic_bool success;
    int sockets[CONNECTIONS_MAX];
    uint32_t socket_count;
    pthread_t threads[CONNECTIONS_MAX];
};

/* A command and the data in its capsule. */
struct capsule {
    struct capsule *next;
    struct nvme_command_pdu pdu;
    uint32_t size;
    uint8_t data[8192];
};

struct connection {
    struct target *target;
    struct capsule *waiting, *waiting_last; /* came while another one's data was awaited */
    int fd;
    bool header_digest, data_digest;
    uint16_t qid;
    bool connected, enabled;
    uint64_t seed;
    uint32_t cc;
};

static inline bool read_all(int fd, void *data, size_t size) {
    for (size_t at = 0; at < size;) {
        ssize_t n = recv(fd, (uint8_t *)data + at, size - at, 0);
        if (n <= 0)
            return false;
        at += (size_t)n;
    }
    return true;
}

static inline bool write_all(int fd, const void *data, size_t size) {
    for (size_t at = 0; at < size;) {
        ssize_t n = send(fd, (const uint8_t *)data + at, size - at, MSG_NOSIGNAL);
        if (n <= 0)
            return false;
        at += (size_t)n;
    }
    return true;
}

/* Headers with digest, padding of `pad` bytes, data with digest. break_digest: 1 of the header, 2 of the data. */
static inline bool send_pdu(struct connection *c, void *header, uint32_t hlen, const uint8_t *data, uint32_t size, uint32_t pad, int break_digest) {
    uint8_t head[256] = {0};
    struct nvme_pdu *pdu = header;
    uint32_t at = hlen + (c->header_digest ? 4 : 0), crc;
    bool term = pdu->type == NVME_PDU_C2H_TERM;
    if (size)
        at += pad;
    if (!pdu->plen) {
        pdu->hlen = pdu->hlen ? pdu->hlen : (uint8_t)hlen;
        pdu->pdo = size ? (uint8_t)at : 0;
        pdu->plen = at + size + (size && c->data_digest ? 4 : 0);
        pdu->flags |= (uint8_t)((c->header_digest && !term ? NVME_PDU_HDGST : 0) | (size && c->data_digest ? NVME_PDU_DDGST : 0));
    }
    memcpy(head, header, hlen);
    crc = nvme_crc32c(0, head, hlen) ^ (break_digest == 1);
    if (c->header_digest)
        memcpy(head + hlen, &crc, 4);
    if (!write_all(c->fd, head, at))
        return false;
    crc = nvme_crc32c(0, data, size) ^ (break_digest == 2);
    return !size || (write_all(c->fd, data, size) && (!c->data_digest || write_all(c->fd, &crc, 4)));
}

static inline bool respond(struct connection *c, uint16_t cid, uint16_t status, uint64_t value) {
    struct nvme_response_pdu pdu = {.head = {.type = NVME_PDU_RESPONSE}, .completion = {.cid = cid, .status = (uint16_t)(status << 1)}};
    pdu.completion.value = value;
    return send_pdu(c, &pdu, sizeof(pdu), NULL, 0, 0, 0);
}

static inline bool send_data(struct connection *c, uint16_t cid, const uint8_t *data, uint32_t size, bool io, int break_digest) {
    struct target *t = c->target;
    uint32_t chunk = io && t->chunk ? t->chunk : size;
    bool success = atomic_load(&t->success);
    for (uint32_t at = 0; at < size; at += chunk) {
        uint32_t step = (uint32_t)min_u64(chunk, size - at);
        bool last = at + step == size;
        struct nvme_data pdu = {.head = {.type = NVME_PDU_C2H_DATA, .flags = (uint8_t)(last ? NVME_PDU_LAST | (success ? NVME_PDU_SUCCESS : 0) : 0)},
                                .cid = cid,
                                .offset = at,
                                .size = step};
        if (!send_pdu(c, &pdu, sizeof(pdu), data + at, step, random_below(&c->seed, 3) * 4, break_digest))
            return false;
    }
    return success || respond(c, cid, 0, 0);
}

static inline bool digest_take(struct connection *c, const void *data, uint32_t size) {
    uint32_t crc;
    if (!read_all(c->fd, &crc, 4))
        return false;
    CHECK(crc == nvme_crc32c(0, data, size));
    return true;
}

/* A command whose first bytes have come; NULL: the connection is over. */
static inline struct capsule *capsule_take(struct connection *c, const struct nvme_pdu *head) {
    struct capsule *capsule = calloc(1, sizeof(*capsule));
    CHECK(capsule && head->type == NVME_PDU_COMMAND && head->hlen == sizeof(capsule->pdu) && !!(head->flags & NVME_PDU_HDGST) == c->header_digest);
    struct nvme_command_pdu *pdu = &capsule->pdu;
    uint32_t before = sizeof(*pdu) + (c->header_digest ? 4 : 0);
    uint8_t pad[128];
    pdu->head = *head;
    bool ok = read_all(c->fd, &pdu->command, sizeof(pdu->command)) && (!c->header_digest || digest_take(c, pdu, sizeof(*pdu)));
    uint32_t size = capsule->size = ok && pdu->command.sgl.id == NVME_SGL_IN_CAPSULE ? pdu->command.sgl.size : 0;
    if (ok) {
        CHECK(size <= sizeof(capsule->data) && (size == 0 || head->pdo % ((c->target->cpda + 1) * 4) == 0));
        CHECK(head->plen == (size ? head->pdo + size + (c->data_digest ? 4 : 0) : before));
        CHECK(pdu->command.opcode == NVME_OPCODE_FABRICS || size <= (c->qid ? c->target->capsule : 8192));
    }
    if (ok && size)
        ok = read_all(c->fd, pad, head->pdo - before) && read_all(c->fd, capsule->data, size) &&
             (!c->data_digest || digest_take(c, capsule->data, size));
    if (!ok)
        free(capsule);
    return ok ? capsule : NULL;
}

/* The data of a command that wants to send some: NULL: the connection is over. */
static inline uint8_t *take_data(struct connection *c, const struct nvme_command *command, const uint8_t *carried, uint32_t size, enum trick trick) {
    struct target *t = c->target;
    uint8_t *data = malloc(size + 1);
    CHECK(data);
    if (command->sgl.id == NVME_SGL_IN_CAPSULE) {
        memcpy(data, carried, size);
        return data;
    }
    uint32_t grant = t->r2t_chunk ? t->r2t_chunk : size;
    for (uint32_t at = 0; at < size;) {
        uint32_t granted = (uint32_t)min_u64(grant, size - at), got = 0;
        struct nvme_r2t r2t = {.head = {.type = NVME_PDU_R2T}, .cid = command->cid, .ttag = (uint16_t)(at / 512 + 7), .offset = at, .size = granted};
        if (trick == R2T_OFFSET)
            r2t.offset += 512;
        else if (trick == R2T_TOO_LONG)
            r2t.size = size - at + 4;
        else if (trick == R2T_ZERO)
            r2t.size = 0;
        if (!send_pdu(c, &r2t, sizeof(r2t), NULL, 0, 0, 0) ||
            (trick == R2T_TWICE && (r2t.head.plen = 0, !send_pdu(c, &r2t, sizeof(r2t), NULL, 0, 0, 0))))
            break;
        while (got < granted) {
            struct nvme_data pdu;
            uint8_t pad[128];
            if (!read_all(c->fd, &pdu.head, sizeof(pdu.head)) || pdu.head.type == NVME_PDU_H2C_TERM)
                goto over;
            if (pdu.head.type == NVME_PDU_COMMAND) { /* its turn comes */
                struct capsule *capsule = capsule_take(c, &pdu.head);
                if (!capsule)
                    goto over;
                if (c->waiting_last)
                    c->waiting_last->next = capsule;
                else
                    c->waiting = capsule;
                c->waiting_last = capsule;
                continue;
            }
            if (!read_all(c->fd, &pdu.cid, sizeof(pdu) - sizeof(pdu.head)))
                goto over;
            CHECK(pdu.head.type == NVME_PDU_H2C_DATA && pdu.head.hlen == sizeof(pdu) && pdu.cid == command->cid && pdu.ttag == r2t.ttag);
            CHECK(pdu.offset == at + got && pdu.size <= granted - got && pdu.size && pdu.size <= 4096);
            CHECK(!!(pdu.head.flags & NVME_PDU_LAST) == (pdu.size == granted - got));
            CHECK(pdu.head.pdo % ((t->cpda + 1) * 4) == 0 && pdu.head.plen == pdu.head.pdo + pdu.size + (c->data_digest ? 4 : 0));
            if (c->header_digest && !digest_take(c, &pdu, sizeof(pdu)))
                goto over;
            if (!read_all(c->fd, pad, pdu.head.pdo - sizeof(pdu) - (c->header_digest ? 4 : 0)) || !read_all(c->fd, data + at + got, pdu.size))
                goto over;
            if (c->data_digest && !digest_take(c, data + at + got, pdu.size))
                goto over;
            got += pdu.size;
        }
        at += granted;
    }
    return data;
over:
    free(data);
    return NULL;
}

static inline bool trick_play(struct connection *c, const struct nvme_command *command, uint32_t size, enum trick trick) {
    struct target *t = c->target;
    static const uint8_t zeros[65536];
    bool reading = command->opcode == NVME_IO_READ;
    struct nvme_response_pdu answer = {.head = {.type = NVME_PDU_RESPONSE}, .completion = {.cid = command->cid}};
    struct nvme_data data = {.head = {.type = NVME_PDU_C2H_DATA, .flags = NVME_PDU_LAST}, .cid = command->cid, .size = (uint32_t)min_u64(size, 4096)};
    uint8_t junk[512];
    uint32_t at = sizeof(data) + (c->header_digest ? 4 : 0), digest = c->data_digest ? 4 : 0;
    switch (trick) {
    case SWALLOW: return true;
    case RESET: {
        struct linger hard = {1, 0};
        setsockopt(c->fd, SOL_SOCKET, SO_LINGER, &hard, sizeof(hard));
        return false;
    }
    case HALF_PDU: return write_all(c->fd, &answer, 11) && false;
    case FAIL: return respond(c, command->cid, NVME_SC_READ_ERROR, 0);
    case WRONG_CID: return respond(c, 999, 0, 0);
    case FREE_CID: return respond(c, (uint16_t)(command->cid ^ 31), 0, 0);
    case TWICE: return respond(c, command->cid, NVME_SC_INTERNAL, 0) && respond(c, command->cid, NVME_SC_INTERNAL, 0);
    case BAD_TYPE: answer.head.type = (uint8_t[]){2, 3 + 5, 4, 6, 10, 255}[random_below(&c->seed, 6)]; break;
    case BAD_HLEN: answer.head.hlen = (uint8_t)random_below(&c->seed, 24); break;
    case BAD_PLEN: answer.head = (struct nvme_pdu){.type = NVME_PDU_RESPONSE, .hlen = 24, .plen = 23, .flags = c->header_digest}; break;
    case HUGE_PLEN: answer.head = (struct nvme_pdu){.type = NVME_PDU_RESPONSE, .hlen = 24, .plen = UINT32_MAX, .flags = c->header_digest}; break;
    case BAD_FLAGS: answer.head = (struct nvme_pdu){.type = NVME_PDU_RESPONSE, .hlen = 24, .plen = at, .flags = !c->header_digest}; break;
    case TERM: {
        struct nvme_term term = {.head = {.type = NVME_PDU_C2H_TERM, .hlen = 24, .plen = 24}, .fes = (uint16_t)random_below(&c->seed, 9)};
        return write_all(c->fd, &term, sizeof(term));
    }
    case EMPTY_SUCCESS: break;
    case BAD_HEADER_DIGEST: return send_pdu(c, &answer, sizeof(answer), NULL, 0, 0, 1);
    case BAD_DATA_DIGEST:
        return reading ? send_data(c, command->cid, zeros, (uint32_t)min_u64(size, sizeof(zeros)), true, 2)
                       : respond(c, command->cid, NVME_SC_WRITE_FAULT, 0);
    case DATA_OFFSET: data.offset = 512; return send_pdu(c, &data, sizeof(data), zeros, data.size, 0, 0);
    case DATA_TOO_LONG: data.size = size + 4; return send_pdu(c, &data, sizeof(data), zeros, 4096, 0, 0);
    case DATA_ZERO: data.size = 0; return send_pdu(c, &data, sizeof(data), zeros, 0, 0, 0);
    case DATA_PDO:
        data.head.pdo = (uint8_t)(random_below(&c->seed, 2) ? at - 4 : at + 132);
        data.head.plen = data.head.pdo + data.size + digest, data.head.hlen = 24,
        data.head.flags |= (uint8_t)(c->header_digest | c->data_digest << 1);
        return send_pdu(c, &data, sizeof(data), zeros, data.size, 0, 0);
    case DATA_PLEN:
        data.head.pdo = (uint8_t)at, data.head.plen = (uint32_t)random_next(&c->seed), data.head.hlen = 24;
        data.head.flags |= (uint8_t)(c->header_digest | c->data_digest << 1);
        return send_pdu(c, &data, sizeof(data), zeros, data.size, 0, 0);
    case DATA_FOR_WRITE: data.cid = (uint16_t)(reading ? 77 : command->cid); return send_pdu(c, &data, sizeof(data), zeros, data.size, 0, 0);
    case DATA_SUCCESS_EARLY:
        data.size = size > 512 ? 512 : 4, data.head.flags |= NVME_PDU_SUCCESS;
        return send_pdu(c, &data, sizeof(data), zeros, data.size, 0, 0);
    case R2T_FOR_READ: {
        struct nvme_r2t r2t = {.head = {.type = NVME_PDU_R2T}, .cid = (uint16_t)(reading ? command->cid : 55), .size = size};
        return send_pdu(c, &r2t, sizeof(r2t), NULL, 0, 0, 0);
    }
    case RANDOM_BYTES:
        for (uint32_t i = 0; i < sizeof(junk); i++)
            junk[i] = (uint8_t)random_next(&c->seed);
        junk[0] = (uint8_t[]){5, 7, 9, 3}[random_below(&c->seed, 4)];
        if (random_below(&c->seed, 2))
            junk[1] = c->header_digest, junk[2] = 24, junk[8] = (uint8_t)command->cid, junk[9] = 0;
        return write_all(c->fd, junk, random_below(&c->seed, sizeof(junk)) + 1);
    default: CHECK(false);
    }
    (void)t;
    return send_pdu(c, &answer, sizeof(answer), NULL, 0, 0, 0);
}

static inline bool io_command(struct connection *c, const struct nvme_command *command, const uint8_t *carried) {
    struct target *t = c->target;
    uint32_t every = atomic_load(&t->every);
    enum trick trick = every && atomic_fetch_add(&t->count, 1) % every == every - 1 ? (enum trick)atomic_load(&t->trick) : HONEST;
    if (atomic_load(&t->delay_ms))
        usleep(atomic_load(&t->delay_ms) * 1000);
    uint64_t offset = (command->cdw10 | (uint64_t)command->cdw11 << 32) << t->shift, size = ((command->cdw12 & 0xffff) + 1ull) << t->shift;
    uint32_t space = command->nsid - 1;
    if (command->opcode == NVME_IO_FLUSH)
        return respond(c, command->cid, 0, 0);
    CHECK((command->opcode == NVME_IO_READ || command->opcode == NVME_IO_WRITE) && command->flags == NVME_COMMAND_SGL && command->sgl.size == size);
    CHECK(!t->mdts || size <= 4096u << t->mdts);
    if (space >= NAMESPACES || offset + size > t->size[space])
        return respond(c, command->cid, space >= NAMESPACES ? NVME_SC_INVALID_NAMESPACE : NVME_SC_LBA_RANGE, 0);
    if (trick != HONEST && !(trick >= R2T_OFFSET && trick <= R2T_TWICE && trick != R2T_FOR_READ))
        return trick_play(c, command, (uint32_t)size, trick);
    if (command->opcode == NVME_IO_WRITE) {
        uint8_t *data = take_data(c, command, carried, (uint32_t)size, trick);
        if (!data)
            return false;
        pthread_mutex_lock(&t->lock);
        memcpy(t->memory[space] + offset, data, size);
        pthread_mutex_unlock(&t->lock);
        free(data);
        return respond(c, command->cid, 0, 0);
    }
    uint8_t *data = malloc(size);
    CHECK(data);
    pthread_mutex_lock(&t->lock);
    memcpy(data, t->memory[space] + offset, size);
    pthread_mutex_unlock(&t->lock);
    bool ok = send_data(c, command->cid, data, (uint32_t)size, true, 0);
    free(data);
    return ok;
}

static inline bool admin_command(struct connection *c, const struct nvme_command *command) {
    struct target *t = c->target;
    union {
        struct nvme_controller controller;
        struct nvme_namespace space;
        uint32_t list[1024];
        struct nvme_discovery_head head;
        struct nvme_discovery_entry entry;
    } page;
    memset(&page, 0, sizeof(page));
    switch (command->opcode) {
    case NVME_ADMIN_IDENTIFY:
        if (command->cdw10 == NVME_CNS_CONTROLLER) {
            page.controller.sgls = NVME_SGLS_FABRICS;
            page.controller.mdts = (uint8_t)t->mdts;
            page.controller.ioccsz = 4 + t->capsule / 16;
            page.controller.oaes = NVME_ASYNC_NAMESPACES;
            page.controller.vwc = 1;
            memcpy(page.controller.model, "double          ", 16);
        } else if (command->cdw10 == NVME_CNS_ACTIVE_NAMESPACES) {
            for (uint32_t i = 0; i < NAMESPACES; i++)
                page.list[i] = i + 1;
        } else if (command->cdw10 == NVME_CNS_NAMESPACE && command->nsid <= NAMESPACES) {
            page.space.nsze = t->size[command->nsid - 1] >> t->shift;
            page.space.lbaf[0].lbads = (uint8_t)t->shift;
            page.space.nguid[0] = t->identity[command->nsid - 1];
        } else {
            return respond(c, command->cid, command->nsid > NAMESPACES ? NVME_SC_INVALID_NAMESPACE : NVME_SC_INVALID_FIELD, 0);
        }
        return send_data(c, command->cid, (const uint8_t *)&page, 4096, false, 0);
    case NVME_ADMIN_GET_LOG_PAGE:
        if (command->cdw12 == 0)
            page.head = (struct nvme_discovery_head){.genctr = 3, .numrec = 2};
        else
            memcpy(page.entry.subnqn, "nqn.2026-11.test:one", 20), page.entry.trtype = 3, page.entry.subtype = 2,
                                                                   memcpy(page.entry.trsvcid, "4420   ", 7);
        return send_data(c, command->cid, (const uint8_t *)&page, (command->cdw10 >> 16) * 4 + 4, false, 0);
    case NVME_ADMIN_SET_FEATURES: return respond(c, command->cid, 0, (t->queues - 1) << 16 | (t->queues - 1));
    case NVME_ADMIN_ASYNC_EVENT: return true;
    case NVME_ADMIN_ABORT: return respond(c, command->cid, 0, 1);
    case NVME_ADMIN_KEEP_ALIVE: atomic_fetch_add(&t->alive, 1); return respond(c, command->cid, 0, 0);
    default: return respond(c, command->cid, NVME_SC_INVALID_OPCODE, 0);
    }
}

static inline bool fabrics_command(struct connection *c, const struct nvme_command *command, const uint8_t *carried) {
    struct nvme_property property;
    struct nvme_connect connect;
    memcpy(&property, command, sizeof(property));
    memcpy(&connect, command, sizeof(connect));
    if (connect.fctype == NVME_CONNECT) {
        const struct nvme_connect_data *data = (const struct nvme_connect_data *)carried;
        CHECK(carried && command->sgl.size == sizeof(*data) && data->hostid[0] == 9);
        CHECK(connect.qid == 0 ? data->cntlid == NVME_CNTLID_DYNAMIC : data->cntlid == 5);
        if (atomic_load(&c->target->refuse) == 1 + (connect.qid > 0))
            return respond(c, command->cid, NVME_SC_CONNECT_HOST, 0);
        c->qid = connect.qid;
        c->connected = true;
        return respond(c, command->cid, 0, 5);
    }
    if (connect.fctype == NVME_PROPERTY_SET) {
        c->cc = property.offset == NVME_CC ? (uint32_t)property.value : c->cc;
        return respond(c, command->cid, 0, 0);
    }
    uint64_t value = property.offset == NVME_CAP    ? 255 | 10ull << 24 | NVME_CAP_CQR
                     : property.offset == NVME_CSTS ? (c->cc & NVME_CC_SHN ? NVME_CSTS_SHST_DONE : 0) | (c->cc & 1)
                                                    : 0;
    return respond(c, command->cid, 0, value);
}

static inline bool greet(struct connection *c) {
    struct nvme_icreq hello;
    enum trick trick = (enum trick)atomic_load(&c->target->trick);
    if (!read_all(c->fd, &hello, sizeof(hello)))
        return false;
    CHECK(hello.head.type == NVME_PDU_ICREQ && hello.head.plen == 128 && hello.head.hlen == 128 && hello.pfv == 0);
    struct nvme_icresp answer = {
        .head = {.type = NVME_PDU_ICRESP, .hlen = 128, .plen = 128}, .cpda = (uint8_t)c->target->cpda, .digests = hello.digests, .maxh2cdata = 4096};
    if (trick == GREET_RANDOM)
        for (uint32_t i = 0; i < sizeof(answer); i++)
            ((uint8_t *)&answer)[i] = (uint8_t)random_next(&c->seed);
    answer.maxh2cdata = trick == GREET_MAXH2C ? 4092 : answer.maxh2cdata;
    answer.cpda = trick == GREET_CPDA ? 32 : answer.cpda;
    answer.digests = trick == GREET_DIGESTS ? hello.digests ^ 1 : answer.digests;
    answer.pfv = trick == GREET_VERSION ? 1 : answer.pfv;
    if (trick == GREET_HANG_UP)
        return false;
    if (trick == GREET_SILENT) {
        uint8_t byte;
        while (read_all(c->fd, &byte, 1)) {
        }
        return false;
    }
    c->header_digest = hello.digests & 1;
    c->data_digest = hello.digests & 2;
    return write_all(c->fd, &answer, sizeof(answer));
}

static inline void *connection_main(void *argument) {
    struct connection *c = argument;
    bool alive = greet(c);
    while (alive) {
        struct capsule *capsule = c->waiting;
        if (capsule && !(c->waiting = capsule->next))
            c->waiting_last = NULL;
        struct nvme_pdu head;
        if (!capsule && (!read_all(c->fd, &head, sizeof(head)) || head.type == NVME_PDU_H2C_TERM || !(capsule = capsule_take(c, &head))))
            break;
        struct nvme_command command = capsule->pdu.command;
        CHECK(c->connected || command.opcode == NVME_OPCODE_FABRICS);
        alive = command.opcode == NVME_OPCODE_FABRICS ? fabrics_command(c, &command, capsule->size ? capsule->data : NULL)
                : c->qid                              ? io_command(c, &command, capsule->data)
                                                      : admin_command(c, &command);
        free(capsule);
    }
    shutdown(c->fd, SHUT_RDWR);
    while (c->waiting) {
        struct capsule *next = c->waiting->next;
        free(c->waiting);
        c->waiting = next;
    }
    free(c);
    return NULL;
}

static inline void *target_main(void *argument) {
    struct target *t = argument;
    while (!atomic_load(&t->stopping)) {
        struct pollfd poll_fd = {.fd = t->listener, .events = POLLIN};
        if (poll(&poll_fd, 1, 20) <= 0)
            continue;
        int fd = accept4(t->listener, NULL, NULL, SOCK_CLOEXEC);
        if (fd < 0)
            continue;
        int one = 1;
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
        atomic_fetch_add(&t->connections, 1);
        struct connection *c = calloc(1, sizeof(*c));
        CHECK(c && t->socket_count < CONNECTIONS_MAX);
        *c = (struct connection){.target = t, .fd = fd, .seed = (uint64_t)t->socket_count * 77 + 1};
        t->sockets[t->socket_count] = fd;
        CHECK(pthread_create(&t->threads[t->socket_count++], NULL, connection_main, c) == 0);
    }
    return NULL;
}

static uint32_t queues_granted = 8; /* by the next targets; the last one is for labels */

static inline void target_start(struct target *t, bool again) {
    if (!again) {
        memset(t, 0, sizeof(*t));
        pthread_mutex_init(&t->lock, NULL);
        for (uint32_t i = 0; i < NAMESPACES; i++) {
            t->size[i] = SIZE;
            t->memory[i] = calloc(1, SIZE);
            t->identity[i] = (uint8_t)(i + 1);
            CHECK(t->memory[i]);
        }
        t->address = (struct sockaddr_in){.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
        t->shift = 9;
        t->queues = queues_granted;
        t->capsule = 8192;
    }
    atomic_store(&t->stopping, false);
    t->socket_count = 0;
    int one = 1;
    socklen_t size = sizeof(t->address);
    t->listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    setsockopt(t->listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
    CHECK(bind(t->listener, (struct sockaddr *)&t->address, sizeof(t->address)) == 0 && listen(t->listener, 64) == 0);
    CHECK(getsockname(t->listener, (struct sockaddr *)&t->address, &size) == 0);
    CHECK(pthread_create(&t->thread, NULL, target_main, t) == 0);
}

static inline void target_stop(struct target *t, bool forever) {
    atomic_store(&t->stopping, true);
    pthread_join(t->thread, NULL);
    close(t->listener);
    for (uint32_t i = 0; i < t->socket_count; i++)
        shutdown(t->sockets[i], SHUT_RDWR);
    for (uint32_t i = 0; i < t->socket_count; i++) {
        pthread_join(t->threads[i], NULL);
        close(t->sockets[i]);
    }
    for (uint32_t i = 0; forever && i < NAMESPACES; i++)
        free(t->memory[i]);
}

#endif
