/* Reservations (base 2.0, 8.19): hosts register with a key; one may hold a reservation, which keeps the writes of hosts that are not
 * registered away. Of its types there is one, write exclusive for registrants; nothing outlives the enclosure. */
#include <stdlib.h>
#include <string.h>

#include "enclosure.h"

#define CONFLICT (NVME_SC_RESERVATION_CONFLICT | NVME_STATUS_DNR)

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static struct registrant *find(struct backing *backing, const uint8_t hostid[16]) {
    for (uint32_t i = 0; i < REGISTRANTS_MAX; i++)
        if (backing->registrants[i].used && !memcmp(backing->registrants[i].hostid, hostid, 16))
            return &backing->registrants[i];
    return NULL;
}

static void forget(struct backing *backing, struct registrant *registrant) {
    if (backing->holder == registrant) {
        backing->holder = NULL;
        atomic_store(&backing->reserved, false);
    }
    *registrant = (struct registrant){0};
}

static void take(struct backing *backing, struct registrant *registrant) {
    backing->holder = registrant;
    atomic_store(&backing->reserved, true);
}

bool reserve_allows(const struct connection *connection, struct backing *backing) {
    bool allowed;

    if (!atomic_load_explicit(&backing->reserved, memory_order_relaxed))
        return true;
    pthread_mutex_lock(&lock);
    allowed = backing->holder == NULL || find(backing, connection->hostid) != NULL;
    pthread_mutex_unlock(&lock);
    return allowed;
}

static uint16_t do_register(const struct connection *connection, struct backing *backing, uint32_t action, bool any_key,
                            const struct nvme_reservation_keys *keys) {
    struct registrant *own = find(backing, connection->hostid);

    if (action == NVME_REGISTER_NEW) {
        if (own)
            return own->key == keys->other ? NVME_SC_SUCCESS : CONFLICT;
        for (uint32_t i = 0; i < REGISTRANTS_MAX && own == NULL; i++)
            if (!backing->registrants[i].used)
                own = &backing->registrants[i];
        if (own == NULL)
            return CONFLICT;
        *own = (struct registrant){.used = true, .key = keys->other};
        memcpy(own->hostid, connection->hostid, sizeof(own->hostid));
        return NVME_SC_SUCCESS;
    }
    if (own == NULL || (!any_key && own->key != keys->current))
        return CONFLICT;
    if (action == NVME_REGISTER_REPLACE)
        own->key = keys->other;
    else
        forget(backing, own);
    return NVME_SC_SUCCESS;
}

static uint16_t do_acquire(const struct connection *connection, struct backing *backing, uint32_t action, uint32_t type,
                           const struct nvme_reservation_keys *keys) {
    struct registrant *own = find(backing, connection->hostid);

    if (type != NVME_RESERVATION_WRITE_REGISTRANTS)
        return NVME_SC_INVALID_FIELD | NVME_STATUS_DNR;
    if (own == NULL || own->key != keys->current)
        return CONFLICT;
    if (action == NVME_ACQUIRE_PREEMPT) {
        bool found = false;

        for (uint32_t i = 0; i < REGISTRANTS_MAX; i++)
            if (backing->registrants[i].used && backing->registrants[i].key == keys->other && &backing->registrants[i] != own) {
                found = true;
                forget(backing, &backing->registrants[i]);
            }
        if (!found)
            return CONFLICT;
        if (backing->holder == NULL)
            take(backing, own);
        return NVME_SC_SUCCESS;
    }
    if (backing->holder && backing->holder != own)
        return CONFLICT;
    take(backing, own);
    return NVME_SC_SUCCESS;
}

static uint16_t do_release(const struct connection *connection, struct backing *backing, const struct nvme_reservation_keys *keys) {
    struct registrant *own = find(backing, connection->hostid);

    if (own == NULL || own->key != keys->current)
        return CONFLICT;
    if (backing->holder == own) {
        backing->holder = NULL;
        atomic_store(&backing->reserved, false);
    }
    return NVME_SC_SUCCESS;
}

uint16_t reserve_run(struct connection *connection, struct request *request) {
    const struct nvme_command *command = &request->command;
    uint32_t action = command->cdw10 & 7, type = command->cdw10 >> 8 & 0xff;
    struct nvme_reservation_keys keys = {0};
    uint16_t status = NVME_SC_INVALID_FIELD | NVME_STATUS_DNR;

    memcpy(&keys, request->data, request->size);
    pthread_mutex_lock(&lock);
    if (command->opcode == NVME_IO_RESERVATION_REGISTER && action <= NVME_REGISTER_REPLACE)
        status = do_register(connection, request->backing, action, command->cdw10 & NVME_RESERVATION_ANY_KEY, &keys);
    else if (command->opcode == NVME_IO_RESERVATION_ACQUIRE && action <= NVME_ACQUIRE_PREEMPT)
        status = do_acquire(connection, request->backing, action, type, &keys);
    else if (command->opcode == NVME_IO_RESERVATION_RELEASE && action == 0)
        status = do_release(connection, request->backing, &keys);
    pthread_mutex_unlock(&lock);
    return status;
}

/* How many hosts are registered, and whether one of them holds a reservation. */
void reserve_count(struct backing *backing, uint32_t *registered, bool *held) {
    *registered = 0;
    pthread_mutex_lock(&lock);
    for (uint32_t i = 0; i < REGISTRANTS_MAX; i++)
        *registered += backing->registrants[i].used;
    *held = backing->holder != NULL;
    pthread_mutex_unlock(&lock);
}
