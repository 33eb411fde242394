/* FUSE over io_uring (Linux 6.14): requests come as completions of the servers' own rings, beside /dev/fuse.
 *
 * The kernel has a queue for each possible CPU, and puts a request into the queue of its caller's CPU. A queue has a few entries, each with a
 * header and a payload buffer of ours. An entry is the kernel's until a request comes in it, then ours until the answer is committed. The answer lies
 * in the same memory, and the commit fetches the entry's next request.
 *
 * A server owns the queues index, index + server_count, ..., and runs on their CPUs: a caller then wakes a thread on its own CPU. The kernel copies
 * a request in the thread that submitted its entry. So the owner alone submits; other threads lay their answers down, and wake the owner.
 *
 * INIT, FORGET and INTERRUPT still come by /dev/fuse, and notifications go there. The leader reads it. If the kernel refuses an entry it sends
 * everything by /dev/fuse, as before. Source: Documentation/filesystems/fuse/fuse-io-uring.rst and include/uapi/linux/fuse.h of Linux 6.14. */
#include "base/descriptor.h"
#include "fuse/fuse.h"

#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <sys/mman.h>

/* Buffers of all queues together. Untouched pages cost nothing, and the kernel takes the entry that was used last. */
#define MEMORY_MAX ((uint64_t)1 << 30)
/* Each request under way holds an entry. Beyond that, callers on the same CPU wait. */
#define DEPTH_MAX 32u
#define DEPTH_MIN 4u
/* Kernels count requests from 2 on, so none has this bit. The one above is theirs: a request that is sent again has it (FUSE_UNIQUE_RESEND, Linux 6.9). */
#define ID_MARK ((uint64_t)1 << 62)
#define POSSIBLE_CPUS "/sys/devices/system/cpu/possible"

/* Headers older than 6.14 lack these. */
#define COMMAND_REGISTER 1
#define COMMAND_COMMIT_AND_FETCH 2
struct entry_header { /* fuse_uring_req_header */
    uint8_t in_out[128];
    uint8_t operation[128]; /* the first argument, such as fuse_write_in; all others are payload */
    uint64_t flags, commit_id;
    uint32_t payload_size, padding;
    uint64_t reserved;
};
struct entry_command { /* fuse_uring_cmd_req */
    uint64_t flags, commit_id;
    uint16_t queue;
    uint8_t padding[6];
};
static_assert(sizeof(struct entry_header) == 288 && sizeof(struct entry_command) == 24, "ABI");

struct uring_entry {
    struct uring_entry *next; /* in one of its server's lists */
    struct server *server;
    struct iovec memory[2]; /* header, payload */
    atomic_ullong id;       /* of the request that waits for its answer; 0: none */
    uint64_t unique, commit_id;
    uint32_t salt;
    bool used;
};
struct uring {
    uint32_t queue_count, depth, entry_count, payload_size;
    uint64_t size;
    struct entry_header *memory; /* headers, then payloads */
    struct uring_entry *entries;
};

static _Thread_local const struct server *here; /* the server whose thread this is, once its entries are registered */

uint32_t uring_cpus_count(const char *text) {
    uint32_t count = 0, from, to;
    for (int length = 0; *text && *text != '\n'; text += length + (text[length] == ',')) {
        if (sscanf(text, "%u%n", &from, &length) != 1)
            return 0;
        to = from;
        if (text[length] == '-') {
            text += length + 1;
            if (sscanf(text, "%u%n", &to, &length) != 1)
                return 0;
        }
        if (to < from || to >= UINT16_MAX)
            return 0;
        count += to - from + 1;
    }
    return count;
}

static uint32_t queues_count(void) {
    char text[4096];
    int fd = descriptor_above(open(POSSIBLE_CPUS, O_RDONLY | O_CLOEXEC));
    ssize_t n = fd < 0 ? -1 : read(fd, text, sizeof(text) - 1);
    if (fd >= 0)
        close(fd);
    text[n > 0 ? n : 0] = 0;
    return uring_cpus_count(text);
}

void uring_free(struct uring *uring) {
    if (!uring)
        return;
    if (uring->memory)
        munmap(uring->memory, uring->size);
    free(uring->entries);
    free(uring);
}

static struct uring *uring_new(uint32_t queue_count, uint32_t payload_size) {
    uint64_t depth = queue_count ? MEMORY_MAX / ((uint64_t)queue_count * payload_size) : 0;
    if (depth < DEPTH_MIN)
        return NULL;
    struct uring *uring = calloc(1, sizeof(*uring));
    if (!uring)
        return NULL;
    uring->queue_count = queue_count;
    uring->depth = (uint32_t)min_u64(depth, DEPTH_MAX);
    uring->entry_count = queue_count * uring->depth;
    uring->payload_size = payload_size;
    uint64_t headers = round_up(uring->entry_count * sizeof(struct entry_header), KVFS_PAGE_SIZE);
    uring->size = headers + (uint64_t)uring->entry_count * payload_size;
    uring->entries = calloc(uring->entry_count, sizeof(*uring->entries));
    void *memory = mmap(NULL, uring->size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    uring->memory = memory == MAP_FAILED ? NULL : memory;
    if (!uring->entries || !uring->memory) {
        uring_free(uring);
        return NULL;
    }
    madvise(memory, uring->size, MADV_NOHUGEPAGE); /* a small answer touches a page, not 2 MiB */
    for (uint32_t i = 0; i < uring->entry_count; i++) {
        uring->entries[i].memory[0] = (struct iovec){&uring->memory[i], sizeof(struct entry_header)};
        uring->entries[i].memory[1] = (struct iovec){(uint8_t *)memory + headers + (uint64_t)i * payload_size, payload_size};
    }
    return uring;
}

bool uring_prepare(struct transport *transport) {
    for (uint32_t i = 0; i < transport->server_count; i++)
        if (!(transport->servers[i].io.ring.uring.flags & IORING_SETUP_SQE128))
            return false;
    if (!transport->uring)
        transport->uring = uring_new(queues_count(), transport->max_read > CHUNK_SIZE ? transport->max_read : (uint32_t)CHUNK_SIZE);
    return transport->uring != NULL;
}

void uring_begin(struct transport *transport) {
    atomic_store(&transport->uring_on, true);
    for (uint32_t i = 1; i < transport->server_count; i++) {
        atomic_store(&transport->servers[i].active, true);
        server_wake(&transport->servers[i]);
    }
}

/* ---- the owner's thread ---- */

static void entry_submit(struct uring_entry *entry, uint32_t command) {
    struct server *server = entry->server;
    const struct uring *uring = server->transport->uring;
    uint32_t index = (uint32_t)(entry - uring->entries);
    struct entry_command body = {.commit_id = entry->commit_id, .queue = (uint16_t)(index / uring->depth)};
    struct io_uring_sqe *sqe = ring_sqe(&server->io.ring);
    memset(sqe, 0, 128);
    sqe->opcode = IORING_OP_URING_CMD;
    sqe->fd = server->fd;
    sqe->cmd_op = command;
    sqe->user_data = RING_COMMAND | index;
    if (command == COMMAND_REGISTER) {
        sqe->addr = (uintptr_t)entry->memory;
        sqe->len = 2;
    }
    memcpy(sqe->cmd, &body, sizeof(body));
}

/* An entry has a request, or is lost. */
static void entry_event(struct ring *ring, uint64_t user_data, int result) {
    struct server *server = ring->commands_owner;
    struct uring_entry *entry = &server->transport->uring->entries[(uint32_t)user_data];
    if (result < 0) { /* refused: everything comes by /dev/fuse. Or unmounted, which the leader learns from /dev/fuse */
        if (entry->used && result != -ENOTCONN && result != -ECONNABORTED)
            server->uring_error = result;
        return;
    }
    entry->used = true;
    entry->next = NULL;
    if (server->arrived_last)
        server->arrived_last->next = entry;
    else
        server->arrived = entry;
    server->arrived_last = entry;
}

/* Runs on the CPUs of its queues, as far as this process may use them. */
static void server_pin(const struct server *server) {
    cpu_set_t allowed, wanted;
    CPU_ZERO(&wanted);
    if (sched_getaffinity(0, sizeof(allowed), &allowed) < 0)
        return;
    for (uint32_t cpu = server->index; cpu < server->transport->uring->queue_count && cpu < CPU_SETSIZE; cpu += server->transport->server_count)
        CPU_SET(cpu, &wanted);
    CPU_AND(&wanted, &wanted, &allowed);
    if (CPU_COUNT(&wanted))
        sched_setaffinity(0, sizeof(wanted), &wanted);
}

static void entries_register(struct server *server) {
    struct uring *uring = server->transport->uring;
    here = server;
    server->reader = true;
    server->io.ring.commands_owner = server;
    server->io.ring.commanded = entry_event;
    server_pin(server);
    for (uint32_t queue = server->index; queue < uring->queue_count; queue += server->transport->server_count)
        for (uint32_t i = 0; i < uring->depth; i++) {
            struct uring_entry *entry = &uring->entries[queue * uring->depth + i];
            entry->server = server;
            entry_submit(entry, COMMAND_REGISTER);
        }
}

static void answers_commit(struct server *server) {
    struct uring_entry *answered = atomic_exchange(&server->answered, NULL), *oldest = NULL;
    while (answered) {
        struct uring_entry *next = answered->next;
        answered->next = oldest;
        oldest = answered;
        answered = next;
    }
    while (oldest) {
        struct uring_entry *next = oldest->next; /* a submission gives the entry away */
        entry_submit(oldest, COMMAND_COMMIT_AND_FETCH);
        oldest = next;
    }
}

int uring_operation_size(const struct fuse_in_header *in, uint64_t payload_size, uint64_t payload_max) {
    uint64_t rest = sizeof(*in) + payload_size;
    if (payload_size > payload_max || in->len < rest || in->len - rest > sizeof(((struct entry_header *)NULL)->operation))
        return -EINVAL;
    bool write = in->opcode == FUSE_WRITE;
    return write && in->len - rest != sizeof(struct fuse_write_in) ? -EINVAL : (int)(in->len - rest);
}

/* Lays the request out as /dev/fuse would. Its size; 0: its parts do not fit together. */
static size_t request_lay(struct server *server, const struct uring_entry *entry) {
    const struct entry_header *header = entry->memory[0].iov_base;
    const struct fuse_in_header *in = (const struct fuse_in_header *)(const void *)server->head;
    const void *payload = entry->memory[1].iov_base;
    const uint32_t payload_size = header->payload_size;
    int size = uring_operation_size(in, payload_size, in->opcode == FUSE_WRITE ? server->landing->size : entry->memory[1].iov_len);
    if (size < 0)
        return 0;
    uint8_t *body = server->head + sizeof(*in);
    memcpy(body, header->operation, (size_t)size);
    if (in->opcode == FUSE_WRITE)
        memcpy(server->landing->data, payload, payload_size);
    else if (in->len <= REQUEST_SMALL)
        memcpy(body + size, payload, payload_size);
    return in->len;
}

int uring_take(struct server *server, size_t *size) {
    if (here != server)
        entries_register(server);
    if (server->uring_error)
        return server->uring_error;
    answers_commit(server);
    struct uring_entry *entry = server->arrived;
    if (!entry)
        return 0;
    server->arrived = entry->next;
    if (!server->arrived)
        server->arrived_last = NULL;
    const struct entry_header *header = entry->memory[0].iov_base;
    struct fuse_in_header *in = (struct fuse_in_header *)(void *)server->head;
    memcpy(in, header->in_out, sizeof(*in));
    uint64_t id = ID_MARK | (uint64_t)(++entry->salt & 0x3fffffff) << 32 | (uint32_t)(entry - server->transport->uring->entries);
    entry->unique = in->unique;
    entry->commit_id = header->commit_id;
    in->unique = id;
    atomic_store(&entry->id, id);
    COUNT(server->plane, ring_requests, 1);
    *size = request_lay(server, entry);
    if (*size == 0)
        uring_reply(server, id, -EINVAL, NULL, 0);
    return 1;
}

bool uring_pending(struct server *server) { return server->arrived || atomic_load(&server->answered); }

/* ---- any thread ---- */

bool uring_owns(uint64_t id) { return id >> 62 == ID_MARK >> 62; }

void uring_reply(struct server *server, uint64_t id, int error, const struct iovec *iovs, uint32_t count) {
    struct uring *uring = server->transport->uring;
    assert((uint32_t)id < uring->entry_count);
    struct uring_entry *entry = &uring->entries[(uint32_t)id];
    unsigned long long expected = id;
    if (!atomic_compare_exchange_strong(&entry->id, &expected, 0))
        return; /* answered already */
    struct entry_header *header = entry->memory[0].iov_base;
    uint64_t size = 0;
    for (uint32_t i = 0; i < count && error == 0; i++) {
        if (iovs[i].iov_len > entry->memory[1].iov_len - size) {
            error = -EIO;
            break;
        }
        memcpy((uint8_t *)entry->memory[1].iov_base + size, iovs[i].iov_base, iovs[i].iov_len);
        size += iovs[i].iov_len;
    }
    header->payload_size = error ? 0 : (uint32_t)size;
    struct fuse_out_header head = {.len = (uint32_t)sizeof(head) + header->payload_size, .error = error, .unique = entry->unique};
    memcpy(header->in_out, &head, sizeof(head));
    if (here == entry->server) {
        entry_submit(entry, COMMAND_COMMIT_AND_FETCH);
        return;
    }
    struct server *owner = entry->server;
    struct uring_entry *first = atomic_load(&owner->answered);
    do
        entry->next = first;
    while (!atomic_compare_exchange_weak(&owner->answered, &first, entry));
    if (!first) /* else the owner has been woken, and has not looked yet */
        server_wake(owner);
}
