/* Admin commands: Identify, log pages, features, Keep Alive, Abort, Async Event Request. */
#include <arpa/inet.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>

#include "enclosure.h"

#define IDENTIFY_SIZE 4096u
#define LOG_TRANSFER_MAX (1u << 20)
#define ABORT_WAIT_MS 200
#define NSID_ALL UINT32_MAX

enum command_class command_class(const struct connection *connection, const struct nvme_command *command) {
    uint8_t fctype = (uint8_t)command->nsid;

    if (command->opcode == NVME_OPCODE_FABRICS)
        return fctype == NVME_CONNECT ? CLASS_CONNECT : fctype == NVME_DISCONNECT ? CLASS_OTHER : CLASS_PROPERTY;
    if (connection->qid)
        switch (command->opcode) {
        case NVME_IO_READ: return CLASS_READ;
        case NVME_IO_WRITE: return CLASS_WRITE;
        case NVME_IO_FLUSH: return CLASS_FLUSH;
        case NVME_IO_DATASET: return CLASS_DATASET;
        case NVME_IO_WRITE_ZEROES: return CLASS_ZEROES;
        default: return CLASS_OTHER;
        }
    switch (command->opcode) {
    case NVME_ADMIN_IDENTIFY: return CLASS_IDENTIFY;
    case NVME_ADMIN_SET_FEATURES:
    case NVME_ADMIN_GET_FEATURES: return CLASS_FEATURES;
    case NVME_ADMIN_GET_LOG_PAGE: return CLASS_LOG;
    case NVME_ADMIN_KEEP_ALIVE: return CLASS_KEEP_ALIVE;
    case NVME_ADMIN_ABORT: return CLASS_ABORT;
    default: return CLASS_OTHER;
    }
}

uint16_t admin_prepare(struct connection *connection, struct request *request) {
    const struct nvme_command *command = &request->command;

    connection->alive_ns = now_ns();
    if (!(connection->controller->csts & NVME_CSTS_RDY))
        return NVME_SC_SEQUENCE | NVME_STATUS_DNR;
    switch (command->opcode) {
    case NVME_ADMIN_IDENTIFY: request->size = IDENTIFY_SIZE; break;
    case NVME_ADMIN_GET_LOG_PAGE: {
        uint64_t dwords = ((uint64_t)(command->cdw11 & 0xffff) << 16 | command->cdw10 >> 16) + 1;

        if (dwords > LOG_TRANSFER_MAX / 4)
            return NVME_SC_INVALID_FIELD | NVME_STATUS_DNR;
        request->size = (uint32_t)dwords * 4;
        break;
    }
    case NVME_ADMIN_SET_FEATURES:
    case NVME_ADMIN_GET_FEATURES:
    case NVME_ADMIN_KEEP_ALIVE:
    case NVME_ADMIN_ABORT:
    case NVME_ADMIN_ASYNC_EVENT: return NVME_SC_SUCCESS;
    default: return NVME_SC_INVALID_OPCODE | NVME_STATUS_DNR;
    }
    request->to_host = true;
    request->data = request->own = calloc(1, request->size);
    return NVME_SC_SUCCESS;
}

/* ---- Identify ---- */

static void put_text(char *field, size_t size, const char *text) {
    memset(field, ' ', size);
    memcpy(field, text, strlen(text) < size ? strlen(text) : size);
}

static void identify_controller(const struct connection *connection, struct nvme_controller *identity) {
    const struct options *options = &enclosure.options;
    struct controller *controller = connection->controller;
    uint32_t hash = 2166136261u;
    char serial[sizeof(identity->serial) + 1];

    for (const char *at = controller->subsystem->nqn; *at; at++)
        hash = (hash ^ (uint8_t)*at) * 16777619u;
    snprintf(serial, sizeof(serial), "KVFS%08X", hash);
    put_text(identity->serial, sizeof(identity->serial), serial);
    put_text(identity->model, sizeof(identity->model), "kvfs test enclosure");
    put_text(identity->firmware, sizeof(identity->firmware), "1");
    identity->cmic = 2; /* of many controllers */
    identity->mdts = (uint8_t)options->mdts;
    identity->cntlid = controller->cntlid;
    identity->ver = NVME_VS_1_4;
    identity->oaes = NVME_ASYNC_NAMESPACES;
    identity->controller_type = controller->subsystem->discovery ? 2 : 1;
    identity->acl = ABORTS_MAX - 1;
    identity->aerl = ADMIN_EVENTS_MAX - 1;
    identity->lpa = 4; /* log pages longer than 4 KiB, offsets in them */
    identity->kas = 1;
    identity->sqes = 0x66;
    identity->cqes = 0x44;
    identity->maxcmd = (uint16_t)options->entries;
    identity->sgls = NVME_SGLS_FABRICS;
    memcpy(identity->subnqn, controller->subsystem->nqn, sizeof(identity->subnqn));
    identity->ioccsz = (uint32_t)(sizeof(struct nvme_command) + options->in_capsule_size) / 16;
    identity->iorcsz = sizeof(struct nvme_completion) / 16;
    identity->fcatt = controller->subsystem->discovery;
    identity->msdbd = 1;
    identity->ofcs = 1; /* Disconnect */
    if (!controller->subsystem->discovery) {
        identity->nn = controller->subsystem->namespace_count;
        identity->mnan = controller->subsystem->namespace_count;
        identity->oncs = NVME_ONCS_DATASET | NVME_ONCS_WRITE_ZEROES | NVME_ONCS_RESERVATIONS;
        identity->vwc = 1 | 3 << 1; /* Flush of all namespaces works */
    }
}

static struct backing *active(const struct connection *connection, uint32_t nsid) {
    struct subsystem *subsystem = connection->subsystem;

    if (!nsid || nsid > subsystem->namespace_count || !atomic_load(&subsystem->namespaces[nsid - 1].attached))
        return NULL;
    return &subsystem->namespaces[nsid - 1];
}

static void identify_namespace(const struct backing *backing, struct nvme_namespace *identity) {
    identity->lbaf[0].lbads = (uint8_t)__builtin_ctz(enclosure.options.block_size);
    if (backing == NULL)
        return;
    identity->nsze = identity->ncap = identity->nuse = backing->size / enclosure.options.block_size;
    identity->nmic = 1; /* seen through many controllers */
    identity->rescap = NVME_RESCAP_WRITE_REGISTRANTS;
    identity->dlfeat = NVME_DATA_DEALLOCATE_ZEROES;
    memcpy(identity->nvmcap, &backing->size, sizeof(backing->size));
    memcpy(identity->nguid, backing->nguid, sizeof(identity->nguid));
}

static void put_descriptor(uint8_t **at, enum nvme_descriptor_type type, const void *value, uint8_t size) {
    struct nvme_descriptor head = {.type = (uint8_t)type, .size = size};

    memcpy(*at, &head, sizeof(head));
    memcpy(*at + sizeof(head), value, size);
    *at += sizeof(head) + size;
}

static uint16_t identify(struct connection *connection, struct request *request) {
    const struct nvme_command *command = &request->command;
    uint32_t nsid = command->nsid, *list = (void *)request->data;
    const struct backing *backing = active(connection, nsid);
    bool exists = nsid && nsid <= connection->subsystem->namespace_count;
    uint8_t *at = request->data, csi = 0;

    switch (command->cdw10 & 0xff) {
    case NVME_CNS_CONTROLLER: identify_controller(connection, (void *)request->data); return NVME_SC_SUCCESS;
    case NVME_CNS_NAMESPACE:
        if (!exists && nsid != NSID_ALL)
            return NVME_SC_INVALID_NAMESPACE | NVME_STATUS_DNR;
        if (backing || nsid == NSID_ALL)
            identify_namespace(backing, (void *)request->data);
        return NVME_SC_SUCCESS;
    case NVME_CNS_ACTIVE_NAMESPACES:
        if (nsid >= NSID_ALL - 1)
            return NVME_SC_INVALID_NAMESPACE | NVME_STATUS_DNR;
        for (uint32_t i = 0; i < connection->subsystem->namespace_count; i++)
            if (i + 1 > nsid && active(connection, i + 1))
                *list++ = i + 1;
        return NVME_SC_SUCCESS;
    case NVME_CNS_DESCRIPTORS:
        if (backing == NULL)
            return NVME_SC_INVALID_NAMESPACE | NVME_STATUS_DNR;
        put_descriptor(&at, NVME_DESCRIPTOR_NGUID, backing->nguid, sizeof(backing->nguid));
        put_descriptor(&at, NVME_DESCRIPTOR_CSI, &csi, sizeof(csi));
        return NVME_SC_SUCCESS;
    case NVME_CNS_CSI_NAMESPACE:
    case NVME_CNS_CSI_CONTROLLER:
        /* The NVM command set's, in which nothing is said here. */
        return command->cdw11 >> 24 ? NVME_SC_INVALID_FIELD | NVME_STATUS_DNR : NVME_SC_SUCCESS;
    default: return NVME_SC_INVALID_FIELD | NVME_STATUS_DNR;
    }
}

/* ---- log pages ---- */

/* The whole discovery log; every subsystem is where the asker has connected to. Freed by the caller. */
static uint8_t *discovery_log(const struct connection *connection, size_t *size) {
    uint32_t count = enclosure.subsystem_count - 1;
    struct nvme_discovery_head *head = calloc(1, sizeof(*head) + count * sizeof(struct nvme_discovery_entry));
    struct sockaddr_storage address = {.ss_family = AF_UNSPEC};
    socklen_t address_size = sizeof(address);

    *size = sizeof(*head) + count * sizeof(struct nvme_discovery_entry);
    getsockname(connection->fd, (struct sockaddr *)&address, &address_size);
    head->genctr = enclosure.generation;
    head->numrec = count;
    for (uint32_t i = 0; i < count; i++) {
        struct nvme_discovery_entry *entry = (struct nvme_discovery_entry *)(head + 1) + i;
        bool ipv6 = address.ss_family == AF_INET6;
        const void *from = ipv6 ? (void *)&((struct sockaddr_in6 *)&address)->sin6_addr : (void *)&((struct sockaddr_in *)&address)->sin_addr;

        entry->trtype = NVME_TRANSPORT_TCP;
        entry->adrfam = ipv6 ? NVME_ADDRESS_IPV6 : NVME_ADDRESS_IPV4;
        entry->subtype = NVME_SUBSYSTEM_NVM;
        entry->portid = 1;
        entry->cntlid = NVME_CNTLID_DYNAMIC;
        entry->asqsz = 32;
        snprintf(entry->trsvcid, sizeof(entry->trsvcid), "%u", enclosure.options.port);
        memcpy(entry->subnqn, enclosure.subsystems[i]->nqn, sizeof(entry->subnqn));
        inet_ntop(address.ss_family, from, entry->traddr, sizeof(entry->traddr));
    }
    return (uint8_t *)head;
}

/* The namespaces that changed since the last look: a list of up to 1024. */
static uint8_t *changed_log(struct controller *controller, size_t *size, bool keep_event) {
    uint32_t *list = calloc(1024, sizeof(*list));
    uint32_t *at = list;

    *size = 1024 * sizeof(*list);
    pthread_mutex_lock(&enclosure.lock);
    for (uint32_t i = 0; i < NAMESPACES_MAX; i++)
        if (controller->changed >> i & 1)
            *at++ = i + 1;
    controller->changed = 0;
    if (!keep_event)
        controller->events_masked &= ~1u;
    pthread_mutex_unlock(&enclosure.lock);
    return (uint8_t *)list;
}

static uint16_t log_page(struct connection *connection, struct request *request) {
    const struct nvme_command *command = &request->command;
    uint64_t offset = (uint64_t)command->cdw13 << 32 | command->cdw12;
    bool discovery = connection->subsystem->discovery;
    uint8_t *page = NULL;
    size_t size = 0;

    switch (command->cdw10 & 0xff) {
    case NVME_LOG_DISCOVERY:
        if (discovery)
            page = discovery_log(connection, &size);
        break;
    case NVME_LOG_CHANGED_NAMESPACES:
        if (!discovery)
            page = changed_log(connection->controller, &size, command->cdw10 & NVME_LOG_RETAIN_EVENT);
        break;
    case NVME_LOG_ERRORS:
    case NVME_LOG_SMART:
    case NVME_LOG_FIRMWARE:
        size = 512;
        page = calloc(1, size);
        break;
    case NVME_LOG_EFFECTS:
        size = 4096;
        page = calloc(1, size);
        break;
    default: break;
    }
    if (page == NULL)
        return NVME_SC_INVALID_LOG_PAGE | NVME_STATUS_DNR;
    if (offset > size || offset % 4) {
        free(page);
        return NVME_SC_INVALID_FIELD | NVME_STATUS_DNR;
    }
    memcpy(request->data, page + offset, size - offset < request->size ? size - offset : request->size);
    free(page);
    return NVME_SC_SUCCESS;
}

/* ---- features ---- */

static uint16_t set_features(struct connection *connection, struct request *request) {
    const struct nvme_command *command = &request->command;
    struct controller *controller = connection->controller;
    uint32_t value = command->cdw11, submission = value & 0xffff, completion = value >> 16;

    if (command->cdw10 >> 31)
        return NVME_SC_FEATURE_NOT_SAVEABLE | NVME_STATUS_DNR;
    switch (command->cdw10 & 0xff) {
    case NVME_FEATURE_QUEUES: {
        uint32_t most = enclosure.options.queue_count, wanted = submission < completion ? submission : completion;

        if (submission == 0xffff || completion == 0xffff || connection->subsystem->discovery)
            return NVME_SC_INVALID_FIELD | NVME_STATUS_DNR;
        pthread_mutex_lock(&enclosure.lock);
        controller->queues_granted = wanted + 1 < most ? wanted + 1 : most;
        pthread_mutex_unlock(&enclosure.lock);
        request->dw0 = (controller->queues_granted - 1) * 0x10001u;
        return NVME_SC_SUCCESS;
    }
    case NVME_FEATURE_ASYNC_EVENTS:
        pthread_mutex_lock(&enclosure.lock);
        controller->async_events = value;
        pthread_mutex_unlock(&enclosure.lock);
        return NVME_SC_SUCCESS;
    case NVME_FEATURE_KATO: controller->kato_ms = value; return NVME_SC_SUCCESS;
    case NVME_FEATURE_WRITE_CACHE: controller->write_cache = value & 1; return NVME_SC_SUCCESS;
    default: return NVME_SC_INVALID_FIELD | NVME_STATUS_DNR;
    }
}

static uint16_t get_features(const struct connection *connection, struct request *request) {
    const struct controller *controller = connection->controller;

    switch (request->command.cdw10 & 0xff) {
    case NVME_FEATURE_QUEUES: request->dw0 = (controller->queues_granted - 1) * 0x10001u; return NVME_SC_SUCCESS;
    case NVME_FEATURE_ASYNC_EVENTS: request->dw0 = controller->async_events; return NVME_SC_SUCCESS;
    case NVME_FEATURE_KATO: request->dw0 = controller->kato_ms; return NVME_SC_SUCCESS;
    case NVME_FEATURE_WRITE_CACHE: request->dw0 = controller->write_cache; return NVME_SC_SUCCESS;
    default: return NVME_SC_INVALID_FIELD | NVME_STATUS_DNR;
    }
}

/* ---- Abort ---- */

static struct connection *find_queue(const struct controller *controller, uint16_t qid) {
    for (struct connection *other = enclosure.connections; other; other = other->next)
        if (other->controller == controller && other->qid == qid)
            return other;
    return NULL;
}

/* Only what is held can be aborted: everything else is answered before the Abort is read. */
static uint16_t abort_command(struct connection *connection, struct request *request) {
    uint16_t qid = (uint16_t)request->command.cdw10, cid = (uint16_t)(request->command.cdw10 >> 16);
    struct timespec until;
    struct connection *other;
    uint32_t state = 1;

    request->dw0 = 1;
    if (qid == 0)
        return NVME_SC_SUCCESS;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_nsec += ABORT_WAIT_MS * 1000000;
    until.tv_sec += until.tv_nsec / 1000000000;
    until.tv_nsec %= 1000000000;
    pthread_mutex_lock(&enclosure.lock);
    other = find_queue(connection->controller, qid);
    if (other && atomic_load(&other->held_count)) {
        other->abort_cid = cid;
        atomic_store(&other->abort_state, 1);
        connection_wake(other);
        /* It may go while the lock is not held: found again each time. */
        while (state == 1 && pthread_cond_timedwait(&enclosure.changed, &enclosure.lock, &until) == 0) {
            other = find_queue(connection->controller, qid);
            state = other ? atomic_load(&other->abort_state) : 3;
        }
        if (state == 2)
            request->dw0 = 0;
    }
    pthread_mutex_unlock(&enclosure.lock);
    return NVME_SC_SUCCESS;
}

uint16_t admin_run(struct connection *connection, struct request *request) {
    uint32_t events = 0;

    switch (request->command.opcode) {
    case NVME_ADMIN_IDENTIFY: return identify(connection, request);
    case NVME_ADMIN_GET_LOG_PAGE: return log_page(connection, request);
    case NVME_ADMIN_SET_FEATURES: return set_features(connection, request);
    case NVME_ADMIN_GET_FEATURES: return get_features(connection, request);
    case NVME_ADMIN_ABORT: return abort_command(connection, request);
    case NVME_ADMIN_ASYNC_EVENT:
        for (uint32_t i = 0; i < connection->entries; i++)
            events += connection->requests[i].event;
        if (events >= ADMIN_EVENTS_MAX)
            return NVME_SC_AER_LIMIT | NVME_STATUS_DNR;
        request->event = true;
        return NVME_SC_SUCCESS;
    default: return NVME_SC_SUCCESS; /* Keep Alive */
    }
}
