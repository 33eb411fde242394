/* The life of a command: prepared (what data, where), its data fetched, run, answered; held at one of these steps if a fault says so. */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "enclosure.h"

static void advance(struct connection *connection, struct request *request);

void request_end(struct connection *connection, struct request *request) {
    free(request->own);
    if (request->held)
        atomic_fetch_sub(&connection->held_count, 1);
    *request = (struct request){.stage = STAGE_FREE};
    connection->free_requests[connection->free_count++] = (uint32_t)(request - connection->requests);
}

static void hold(struct connection *connection, struct request *request, int64_t due_ns) {
    request->held = true;
    request->due_ns = due_ns;
    atomic_fetch_add(&connection->held_count, 1);
}

static void release(struct connection *connection, struct request *request) {
    request->held = false;
    atomic_fetch_sub(&connection->held_count, 1);
}

/* The SGL must describe what the command is about: in the capsule exactly as much as came, or the transport's own. */
static uint16_t check_sgl(const struct request *request, uint32_t inline_size) {
    const struct nvme_sgl *sgl = &request->command.sgl;

    if (!request->size)
        return NVME_SC_SUCCESS;
    if (sgl->id == NVME_SGL_IN_CAPSULE) {
        if (request->to_host)
            return NVME_SC_SGL_TYPE | NVME_STATUS_DNR;
        if (sgl->address > inline_size || sgl->size > inline_size - sgl->address)
            return NVME_SC_SGL_OFFSET | NVME_STATUS_DNR;
    } else if (sgl->id != NVME_SGL_TRANSPORT || inline_size) {
        return NVME_SC_SGL_TYPE | NVME_STATUS_DNR;
    }
    return sgl->size == request->size ? NVME_SC_SUCCESS : NVME_SC_SGL_LENGTH | NVME_STATUS_DNR;
}

/* Among those that wait: what is being sent may have reached the host, which may use its CID again. */
static bool cid_in_use(const struct connection *connection, const struct request *request) {
    if (!connection->transfer_count && !atomic_load(&connection->held_count))
        return false;
    for (uint32_t i = 0; i < connection->entries; i++) {
        const struct request *other = &connection->requests[i];

        if (other != request && (other->held || other->stage == STAGE_TRANSFER) && other->command.cid == request->command.cid)
            return true;
    }
    return false;
}

static uint16_t prepare(struct connection *connection, struct request *request) {
    const struct nvme_command *command = &request->command;
    bool first = !connection->connected, connect = command->opcode == NVME_OPCODE_FABRICS && (command->nsid & 0xff) == NVME_CONNECT;

    if ((command->flags & 0xc3) != NVME_COMMAND_SGL)
        return NVME_SC_INVALID_FIELD | NVME_STATUS_DNR;
    if (first != connect)
        return NVME_SC_SEQUENCE | NVME_STATUS_DNR;
    if (cid_in_use(connection, request))
        return NVME_SC_CID_CONFLICT | NVME_STATUS_DNR;
    if (command->opcode == NVME_OPCODE_FABRICS)
        return fabrics_prepare(connection, request);
    return connection->qid ? io_prepare(connection, request) : admin_prepare(connection, request);
}

void request_command(struct connection *connection, const struct nvme_command *command, uint32_t inline_size) {
    struct request *request;
    uint32_t size = 0;
    uint8_t *own;

    if (!connection->free_count) {
        struct nvme_command_pdu pdu = {.head = {.type = NVME_PDU_COMMAND, .hlen = sizeof(pdu)}, .command = *command};

        connection_fatal(connection, NVME_FES_LIMIT, 0, &pdu, "more commands than the queue has entries");
        return;
    }
    request = &connection->requests[connection->free_requests[--connection->free_count]];
    request->command = *command;
    request->stage = STAGE_START;
    if (++connection->sqhd >= connection->entries)
        connection->sqhd = 0;
    request->status = prepare(connection, request);
    if (!request->status)
        request->status = check_sgl(request, inline_size);
    request->inline_size = inline_size;
    if (!request->status)
        size = request->size;
    if (fault_hits(connection, connection->qid ? command->nsid : 0, command_class(connection, command), size, &request->fault)) {
        if (request->fault.kind == FAULT_RESET) {
            connection->reset = connection->ended = true;
            return;
        }
        if (request->fault.kind == FAULT_STATUS)
            request->status = request->fault.status;
        /* Data of a command that runs later, or never, must not be in the namespace before. */
        if (request->fault.what == WHAT_COMMAND && !request->to_host && request->size && !request->status && request->own == NULL) {
            request->own = malloc(request->size);
            request->copy = true;
        }
    }
    if (!inline_size) {
        advance(connection, request);
        return;
    }
    if (!request->status && command->sgl.address == 0 && inline_size == request->size) {
        connection_payload(connection, request, request->own ? request->own : request->data, inline_size, true);
        return;
    }
    /* More than the command's own data, or data of a command that fails: through a buffer. */
    own = malloc(inline_size);
    if (!request->status && request->size && request->data == request->own)
        request->data = own + command->sgl.address;
    else
        request->copy = !request->status && request->size;
    request->copy_at = (uint32_t)command->sgl.address;
    free(request->own);
    request->own = own;
    connection_payload(connection, request, request->own, inline_size, true);
}

static void ask(struct connection *connection, struct request *request) {
    uint32_t left = request->size - request->asked, most = enclosure.options.r2t_size;

    if (request->stage != STAGE_TRANSFER)
        connection->transfer_count++;
    request->stage = STAGE_TRANSFER;
    answer_r2t(connection, request, most && most < left ? most : left);
}

static uint16_t run(struct connection *connection, struct request *request) {
    if (request->copy)
        memcpy(request->data, request->own + request->copy_at, request->size);
    if (request->command.opcode == NVME_OPCODE_FABRICS)
        return fabrics_run(connection, request);
    return connection->qid ? io_run(connection, request) : admin_run(connection, request);
}

static void advance(struct connection *connection, struct request *request) {
    bool late = request->fault.kind == FAULT_DELAY || request->fault.kind == FAULT_SLOW, drop = request->fault.kind == FAULT_DROP;

    if (request->stage == STAGE_START && request->status)
        request->stage = STAGE_ANSWER;
    if (request->stage == STAGE_START) {
        if (request->due_ns == 0 && drop && request->fault.what != WHAT_ANSWER) {
            hold(connection, request, FOREVER_NS);
            return;
        }
        if (request->due_ns == 0 && late && request->fault.what == WHAT_COMMAND) {
            hold(connection, request, now_ns() + request->fault.delay_ns);
            return;
        }
        if (request->size && !request->to_host && !request->inline_size) {
            ask(connection, request);
            return;
        }
        request->stage = STAGE_RUN;
    }
    if (request->stage == STAGE_RUN) {
        request->stage = STAGE_ANSWER;
        request->status = run(connection, request);
        if (request->event) {
            hold(connection, request, FOREVER_NS);
            return;
        }
        if (drop || (late && request->due_ns == 0)) {
            hold(connection, request, drop ? FOREVER_NS : now_ns() + request->fault.delay_ns);
            return;
        }
    }
    answer(connection, request);
}

void request_data(struct connection *connection, const struct nvme_data *pdu) {
    struct request *request = pdu->ttag < connection->entries ? &connection->requests[pdu->ttag] : NULL;
    uint8_t *target;

    if (request == NULL || request->stage != STAGE_TRANSFER || request->command.cid != pdu->cid) {
        connection_fatal(connection, NVME_FES_HEADER_FIELD, offsetof(struct nvme_data, ttag), pdu, "H2CData for no R2T");
        return;
    }
    if (pdu->offset != request->received || pdu->size > request->asked - request->received) {
        connection_fatal(connection, NVME_FES_RANGE, 0, pdu, "H2CData outside what the R2T asked for");
        return;
    }
    target = request->own ? request->own : request->data;
    connection_payload(connection, request, target + pdu->offset, pdu->size, false);
}

void request_payload_done(struct connection *connection, bool digest_ok) {
    struct request *request = connection->payload.request;

    if (!digest_ok && !request->status)
        request->status = NVME_SC_TRANSIENT_TRANSPORT;
    if (!connection->payload.in_capsule) {
        request->received += connection->payload.size;
        if (request->received < request->asked)
            return;
        if (request->asked < request->size) {
            ask(connection, request);
            return;
        }
        connection->transfer_count--;
        request->stage = request->status ? STAGE_ANSWER : STAGE_RUN;
    }
    advance(connection, request);
}

int64_t request_next_due(const struct connection *connection) {
    int64_t due = FOREVER_NS;

    for (uint32_t i = 0; i < connection->entries && atomic_load(&connection->held_count); i++)
        if (connection->requests[i].held && connection->requests[i].due_ns < due)
            due = connection->requests[i].due_ns;
    return due;
}

static struct request *held_event(struct connection *connection) {
    for (uint32_t i = 0; i < connection->entries; i++)
        if (connection->requests[i].held && connection->requests[i].event)
            return &connection->requests[i];
    return NULL;
}

/* Commands that waited: for their time, for an abort, for an event. */
void request_due(struct connection *connection) {
    int64_t now;

    if (!atomic_load(&connection->held_count))
        return;
    now = now_ns();
    for (uint32_t i = 0; i < connection->entries; i++) {
        struct request *request = &connection->requests[i];

        if (request->held && request->due_ns <= now) {
            release(connection, request);
            advance(connection, request);
        }
    }
    if (atomic_load(&connection->abort_state) == 1) {
        uint32_t found = 3;

        for (uint32_t i = 0; i < connection->entries; i++) {
            struct request *request = &connection->requests[i];

            if (request->held && request->command.cid == connection->abort_cid) {
                release(connection, request);
                request->status = NVME_SC_ABORTED;
                request->fault.kind = FAULT_NONE;
                request->event = false;
                answer(connection, request);
                found = 2;
            }
        }
        pthread_mutex_lock(&enclosure.lock);
        atomic_store(&connection->abort_state, found);
        pthread_cond_broadcast(&enclosure.changed);
        pthread_mutex_unlock(&enclosure.lock);
    }
    if (connection->qid == 0 && connection->controller) {
        struct request *event = held_event(connection);
        uint32_t dw0;
        bool due;

        pthread_mutex_lock(&enclosure.lock);
        due = event && controller_take_event(connection->controller, &dw0);
        pthread_mutex_unlock(&enclosure.lock);
        if (due) {
            release(connection, event);
            event->event = false;
            event->dw0 = dw0;
            answer(connection, event);
        }
    }
}
