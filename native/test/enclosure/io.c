/* I/O commands on a mapped namespace: by the time one runs, a write's data is in it, and a read's is sent from it. */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "enclosure.h"

#define DATASET_SIZE_MAX (256 * sizeof(struct nvme_range))

static struct backing *find_backing(const struct connection *connection, uint32_t nsid) {
    struct subsystem *subsystem = connection->subsystem;
    struct backing *backing;

    if (nsid == 0 || nsid > subsystem->namespace_count)
        return NULL;
    backing = &subsystem->namespaces[nsid - 1];
    return atomic_load_explicit(&backing->attached, memory_order_relaxed) ? backing : NULL;
}

static uint16_t check_range(struct request *request, uint64_t first, uint64_t count) {
    uint64_t blocks = request->backing->size / enclosure.options.block_size;

    if (first > blocks || count > blocks - first)
        return NVME_SC_LBA_RANGE | NVME_STATUS_DNR;
    request->offset = first * enclosure.options.block_size;
    return NVME_SC_SUCCESS;
}

static uint64_t first_block(const struct nvme_command *command) { return (uint64_t)command->cdw11 << 32 | command->cdw10; }

uint16_t io_prepare(struct connection *connection, struct request *request) {
    const struct nvme_command *command = &request->command;
    uint64_t count = (command->cdw12 & 0xffff) + 1;
    uint16_t status;

    if (command->opcode == NVME_IO_FLUSH && command->nsid == UINT32_MAX)
        return NVME_SC_SUCCESS;
    request->backing = find_backing(connection, command->nsid);
    if (request->backing == NULL)
        return NVME_SC_INVALID_NAMESPACE | NVME_STATUS_DNR;
    if ((command->opcode == NVME_IO_WRITE || command->opcode == NVME_IO_WRITE_ZEROES || command->opcode == NVME_IO_DATASET) &&
        !reserve_allows(connection, request->backing))
        return NVME_SC_RESERVATION_CONFLICT | NVME_STATUS_DNR;
    switch (command->opcode) {
    case NVME_IO_READ:
    case NVME_IO_WRITE:
        request->to_host = command->opcode == NVME_IO_READ;
        if (enclosure.options.mdts && count * enclosure.options.block_size > 4096ull << enclosure.options.mdts)
            return NVME_SC_INVALID_FIELD | NVME_STATUS_DNR;
        status = check_range(request, first_block(command), count);
        if (status)
            return status;
        request->size = (uint32_t)(count * enclosure.options.block_size);
        request->data = request->backing->map + request->offset;
        return NVME_SC_SUCCESS;
    case NVME_IO_WRITE_ZEROES: return check_range(request, first_block(command), count);
    case NVME_IO_DATASET:
        /* Linux always sends the largest list, of which the first ranges count. */
        request->size = ((command->cdw10 & 0xff) + 1) * (uint32_t)sizeof(struct nvme_range);
        if (command->sgl.size > request->size && command->sgl.size <= DATASET_SIZE_MAX)
            request->size = command->sgl.size;
        request->data = request->own = malloc(request->size);
        return request->own ? NVME_SC_SUCCESS : NVME_SC_INTERNAL;
    case NVME_IO_RESERVATION_REGISTER:
    case NVME_IO_RESERVATION_ACQUIRE:
    case NVME_IO_RESERVATION_RELEASE:
        request->size = command->opcode == NVME_IO_RESERVATION_RELEASE ? 8 : sizeof(struct nvme_reservation_keys);
        request->data = request->own = malloc(request->size);
        return request->own ? NVME_SC_SUCCESS : NVME_SC_INTERNAL;
    case NVME_IO_FLUSH: return NVME_SC_SUCCESS;
    default: return NVME_SC_INVALID_OPCODE | NVME_STATUS_DNR;
    }
}

/* Bytes of a namespace become zeros, and take no space where that can be had. */
static void discard(struct backing *backing, uint64_t offset, uint64_t size) {
    if (size && fallocate(backing->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)offset, (off_t)size) < 0)
        memset(backing->map + offset, 0, size);
}

static uint16_t flush(const struct backing *backing) { return fdatasync(backing->fd) ? NVME_SC_INTERNAL : NVME_SC_SUCCESS; }

static uint16_t run_dataset(struct request *request) {
    const struct nvme_range *ranges = (const void *)request->data;
    uint32_t count = (request->command.cdw10 & 0xff) + 1;

    for (uint32_t i = 0; i < count; i++) {
        uint16_t status = check_range(request, ranges[i].first_block, ranges[i].block_count);

        if (status)
            return status;
    }
    for (uint32_t i = 0; i < count && request->command.cdw11 & NVME_DATASET_DEALLOCATE; i++)
        discard(request->backing, ranges[i].first_block * enclosure.options.block_size,
                (uint64_t)ranges[i].block_count * enclosure.options.block_size);
    return NVME_SC_SUCCESS;
}

uint16_t io_run(struct connection *connection, struct request *request) {
    struct backing *backing = request->backing;

    switch (request->command.opcode) {
    case NVME_IO_READ:
        atomic_fetch_add_explicit(&backing->reads, 1, memory_order_relaxed);
        atomic_fetch_add_explicit(&backing->read_bytes, request->size, memory_order_relaxed);
        return NVME_SC_SUCCESS;
    case NVME_IO_WRITE:
        atomic_fetch_add_explicit(&backing->writes, 1, memory_order_relaxed);
        atomic_fetch_add_explicit(&backing->written_bytes, request->size, memory_order_relaxed);
        return request->command.cdw12 & NVME_IO_FUA ? flush(backing) : NVME_SC_SUCCESS;
    case NVME_IO_WRITE_ZEROES:
        discard(backing, request->offset, ((request->command.cdw12 & 0xffff) + 1ull) * enclosure.options.block_size);
        return NVME_SC_SUCCESS;
    case NVME_IO_DATASET: return run_dataset(request);
    case NVME_IO_RESERVATION_REGISTER:
    case NVME_IO_RESERVATION_ACQUIRE:
    case NVME_IO_RESERVATION_RELEASE: return reserve_run(connection, request);
    default:
        for (uint32_t i = 0; i < connection->subsystem->namespace_count; i++)
            if ((backing == NULL || backing == &connection->subsystem->namespaces[i]) && flush(&connection->subsystem->namespaces[i]))
                return NVME_SC_INTERNAL;
        return NVME_SC_SUCCESS;
    }
}
