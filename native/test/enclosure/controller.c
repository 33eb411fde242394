/* Controllers: Connect, properties, Disconnect, and what becomes of them when a connection ends. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#include "enclosure.h"

#define CONTROLLERS_MAX 0xffef
#define IN_DATA (1u << 16) /* of a Connect parameter that is wrong */

static struct subsystem *find_subsystem(const char *nqn) {
    for (uint32_t i = 0; i < enclosure.subsystem_count; i++)
        if (!strcmp(enclosure.subsystems[i]->nqn, nqn))
            return enclosure.subsystems[i];
    return NULL;
}

static struct controller *find_controller(uint16_t cntlid) {
    for (struct controller *controller = enclosure.controllers; controller; controller = controller->next)
        if (controller->cntlid == cntlid)
            return controller;
    return NULL;
}

static bool queue_in_use(const struct controller *controller, uint16_t qid) {
    for (const struct connection *other = enclosure.connections; other; other = other->next)
        if (other->controller == controller && other->qid == qid)
            return true;
    return false;
}

static struct controller *new_controller(struct connection *connection, struct subsystem *subsystem, const struct nvme_connect *connect,
                                         const struct nvme_connect_data *data) {
    struct controller *controller = calloc(1, sizeof(*controller));

    do {
        enclosure.last_cntlid = (uint16_t)(enclosure.last_cntlid % CONTROLLERS_MAX + 1);
    } while (find_controller(enclosure.last_cntlid));
    controller->cntlid = enclosure.last_cntlid;
    controller->subsystem = subsystem;
    controller->kato_ms = connect->kato_ms;
    controller->queues_granted = enclosure.options.queue_count;
    controller->write_cache = 1;
    controller->admin = connection;
    memcpy(controller->hostid, data->hostid, sizeof(controller->hostid));
    memcpy(controller->hostnqn, data->hostnqn, sizeof(controller->hostnqn));
    controller->next = enclosure.controllers;
    enclosure.controllers = controller;
    return controller;
}

/* Under the lock. 0, or the parameter at fault in *where. */
static uint16_t connect_queue(struct connection *connection, const struct nvme_connect *connect, const struct nvme_connect_data *data,
                              struct controller **found, uint32_t *where) {
    struct subsystem *subsystem = find_subsystem(data->subnqn);

    *where = IN_DATA | offsetof(struct nvme_connect_data, subnqn);
    if (subsystem == NULL)
        return NVME_SC_CONNECT_PARAMETER;
    *where = IN_DATA | offsetof(struct nvme_connect_data, cntlid);
    if (connect->qid == 0) {
        if (data->cntlid != NVME_CNTLID_DYNAMIC)
            return NVME_SC_CONNECT_PARAMETER;
        *found = new_controller(connection, subsystem, connect, data);
        return NVME_SC_SUCCESS;
    }
    *found = find_controller(data->cntlid);
    if (*found == NULL || (*found)->subsystem != subsystem)
        return NVME_SC_CONNECT_PARAMETER;
    *where = IN_DATA | offsetof(struct nvme_connect_data, hostnqn);
    if (strcmp((*found)->hostnqn, data->hostnqn) || memcmp((*found)->hostid, data->hostid, sizeof(data->hostid)))
        return NVME_SC_CONNECT_PARAMETER;
    *where = offsetof(struct nvme_connect, qid);
    if (subsystem->discovery || connect->qid > (*found)->queues_granted)
        return NVME_SC_CONNECT_PARAMETER;
    if (!((*found)->csts & NVME_CSTS_RDY) || queue_in_use(*found, connect->qid))
        return NVME_SC_SEQUENCE;
    return NVME_SC_SUCCESS;
}

static uint16_t connect_run(struct connection *connection, struct request *request) {
    const struct nvme_connect *connect = (const void *)&request->command;
    const struct nvme_connect_data *data = (const void *)request->data;
    struct controller *controller = NULL;
    uint32_t where = 0;
    uint16_t status = NVME_SC_SUCCESS;

    if (connect->recfmt != 0)
        return NVME_SC_CONNECT_FORMAT | NVME_STATUS_DNR;
    if (connect->sqsize == 0 || connect->sqsize >= enclosure.options.entries) {
        where = offsetof(struct nvme_connect, sqsize);
        status = NVME_SC_CONNECT_PARAMETER;
    } else if (!memchr(data->subnqn, 0, NVME_NQN_MAX + 1)) {
        where = IN_DATA | offsetof(struct nvme_connect_data, subnqn);
        status = NVME_SC_CONNECT_PARAMETER;
    } else if (!data->hostnqn[0] || !memchr(data->hostnqn, 0, NVME_NQN_MAX + 1)) {
        where = IN_DATA | offsetof(struct nvme_connect_data, hostnqn);
        status = NVME_SC_CONNECT_PARAMETER;
    }
    if (!status) {
        pthread_mutex_lock(&enclosure.lock);
        status = connect_queue(connection, connect, data, &controller, &where);
        if (!status) {
            connection->controller = controller;
            connection->subsystem = controller->subsystem;
            connection->qid = connect->qid;
            memcpy(connection->hostid, data->hostid, sizeof(connection->hostid));
        }
        pthread_mutex_unlock(&enclosure.lock);
    }
    if (status) {
        request->dw0 = status == NVME_SC_CONNECT_PARAMETER ? where : 0;
        return status | NVME_STATUS_DNR;
    }
    request->dw0 = controller->cntlid;
    connection->no_flow = connect->cattr & NVME_CONNECT_NO_SQ_FLOW;
    connection->entries = connect->sqsize + 1u;
    connection->sqhd = 1;
    /* This command is entry 0. */
    connection->free_count = 0;
    for (uint32_t i = connection->entries - 1; i > 0; i--)
        connection->free_requests[connection->free_count++] = i;
    connection->alive_ns = now_ns();
    connection->connected = true;
    if (enclosure.options.verbose)
        say("%s: controller %u of %s, queue %u, %u entries%s%s", connection->peer, controller->cntlid, controller->subsystem->nqn, connection->qid,
            connection->entries, connection->header_digest ? ", header digest" : "", connection->data_digest ? ", data digest" : "");
    return NVME_SC_SUCCESS;
}

static void end_queues(const struct controller *controller) {
    for (struct connection *other = enclosure.connections; other; other = other->next)
        if (other->controller == controller && other->qid)
            shutdown(other->fd, SHUT_RDWR);
}

static uint16_t property_get(const struct connection *connection, struct request *request) {
    const struct nvme_property *property = (const void *)&request->command;
    const struct controller *controller = connection->controller;
    uint64_t value;

    switch (property->offset) {
    case NVME_CAP: value = (enclosure.options.entries - 1) | NVME_CAP_CQR | 20ull << 24 | NVME_CAP_CSS_NVM; break;
    case NVME_VS: value = NVME_VS_1_4; break;
    case NVME_CC: value = controller->cc; break;
    case NVME_CSTS: value = controller->csts; break;
    default: return NVME_SC_INVALID_FIELD | NVME_STATUS_DNR;
    }
    if ((property->attrib & 7) != (property->offset == NVME_CAP ? 1 : 0))
        return NVME_SC_INVALID_FIELD | NVME_STATUS_DNR;
    request->dw0 = (uint32_t)value;
    request->dw1 = (uint32_t)(value >> 32);
    return NVME_SC_SUCCESS;
}

static uint16_t property_set(const struct connection *connection, const struct request *request) {
    const struct nvme_property *property = (const void *)&request->command;
    struct controller *controller = connection->controller;
    uint32_t value = (uint32_t)property->value;

    if (property->offset != NVME_CC || property->attrib & 7)
        return NVME_SC_INVALID_FIELD | NVME_STATUS_DNR;
    pthread_mutex_lock(&enclosure.lock);
    if (value & NVME_CC_EN && !(controller->cc & NVME_CC_EN)) {
        /* Entry sizes, page size 4 KiB, the NVM command set; a discovery controller has no I/O queues. */
        if (value & 0x7f0 || (!controller->subsystem->discovery && (value & 0xff0000) != NVME_CC_QUEUE_SIZES))
            controller->csts |= NVME_CSTS_CFS;
        else
            controller->csts |= NVME_CSTS_RDY;
    } else if (!(value & NVME_CC_EN) && controller->cc & NVME_CC_EN) {
        controller->csts = 0;
        end_queues(controller);
    }
    if (value & NVME_CC_SHN)
        controller->csts = (controller->csts & ~NVME_CSTS_SHST) | NVME_CSTS_SHST_DONE;
    controller->cc = value;
    pthread_mutex_unlock(&enclosure.lock);
    return NVME_SC_SUCCESS;
}

uint16_t fabrics_prepare(struct connection *connection, struct request *request) {
    uint8_t fctype = (uint8_t)request->command.nsid;

    switch (fctype) {
    case NVME_CONNECT:
        request->size = sizeof(struct nvme_connect_data);
        request->data = request->own = malloc(request->size);
        return request->command.sgl.id == NVME_SGL_IN_CAPSULE ? NVME_SC_SUCCESS : NVME_SC_SGL_TYPE | NVME_STATUS_DNR;
    case NVME_PROPERTY_GET:
    case NVME_PROPERTY_SET: connection->alive_ns = now_ns(); return connection->qid ? NVME_SC_INVALID_OPCODE | NVME_STATUS_DNR : NVME_SC_SUCCESS;
    case NVME_DISCONNECT: return connection->qid ? NVME_SC_SUCCESS : NVME_SC_DISCONNECT_QUEUE_TYPE | NVME_STATUS_DNR;
    default: return NVME_SC_INVALID_OPCODE | NVME_STATUS_DNR;
    }
}

uint16_t fabrics_run(struct connection *connection, struct request *request) {
    switch ((uint8_t)request->command.nsid) {
    case NVME_CONNECT: return connect_run(connection, request);
    case NVME_PROPERTY_GET: return property_get(connection, request);
    case NVME_PROPERTY_SET: return property_set(connection, request);
    default:
        /* Disconnect: what is under way is answered first, as it was queued first. */
        snprintf(connection->why, sizeof(connection->why), "the host disconnected");
        request->hang_up = true;
        return NVME_SC_SUCCESS;
    }
}

/* Under the lock, the connection off the list. A controller ends with its admin queue, and its other queues with it. */
void controller_leave(struct connection *connection) {
    struct controller *controller = connection->controller;

    if (controller == NULL || connection->qid)
        return;
    for (struct controller **at = &enclosure.controllers; *at; at = &(*at)->next)
        if (*at == controller) {
            *at = controller->next;
            break;
        }
    for (struct connection *other = enclosure.connections; other; other = other->next)
        if (other->controller == controller) {
            shutdown(other->fd, SHUT_RDWR);
            other->controller = NULL;
        }
    free(controller);
}

void controller_namespace_changed(struct subsystem *subsystem, uint32_t nsid) {
    for (struct controller *controller = enclosure.controllers; controller; controller = controller->next)
        if (controller->subsystem == subsystem) {
            controller->changed |= 1ull << (nsid - 1);
            controller->events_due |= 1;
            connection_wake(controller->admin);
        }
}

bool controller_take_event(struct controller *controller, uint32_t *dw0) {
    if (!(controller->events_due & ~controller->events_masked & 1) || !(controller->async_events & NVME_ASYNC_NAMESPACES))
        return false;
    controller->events_due &= ~1u;
    controller->events_masked |= 1;
    *dw0 = NVME_EVENT_NOTICE | NVME_NOTICE_NAMESPACES << 8 | NVME_LOG_CHANGED_NAMESPACES << 16;
    return true;
}
