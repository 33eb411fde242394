/* An association with an NVMe controller, for callers that may wait: Connect, properties, Identify, features, discovery. NVMe base 2.0,
 * chapters 3, 5 and 6. Also Python's calls about a namespace: its size, its labels (kvfs_plane.h).
 */
#include "base/descriptor.h"
#include "io/nvme/tcp.h"

#include <fcntl.h>
#include <netdb.h>
#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>

#define ADMIN_DEPTH 32u /* the smallest that a controller must take */
#define ADMIN_CAPSULE 8192u
#define TRANSFER_MAX (8u << 20)
#define TARGET_MAGIC 0x31454d564e46564bull /* "KVFNVME1" */
#define DISCOVERY_MAX 4096u                /* entries */

static _Thread_local char message[NVME_REASON + 320];

int nvme_admin_fail(struct nvme_admin *admin, int error, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(admin->reason, sizeof(admin->reason), format, arguments);
    va_end(arguments);
    return error;
}

/* ---- waiting ---- */

/* Wait until the link can go on. -ECANCELED: wake_fd is readable; -ETIMEDOUT. */
static int link_wait(struct nvme_admin *admin, const struct nvme_link *link, uint64_t deadline_ns) {
    uint64_t now = now_ns();
    struct pollfd fds[2] = {{.fd = link->fd, .events = (short)(POLLIN | (nvme_link_sending(link) ? POLLOUT : 0))},
                            {.fd = admin->wake_fd, .events = POLLIN}};
    int r = now >= deadline_ns ? 0 : poll(fds, 2, (int)((deadline_ns - now) / 1000000 + 1));
    if (r < 0 && errno != EINTR)
        return -errno;
    if (r > 0 && fds[1].revents)
        return -ECANCELED;
    return r == 0 ? -ETIMEDOUT : 0;
}

static int link_step(struct nvme_admin *admin, struct nvme_link *link) {
    int r = nvme_link_send(link);
    if (r == 0)
        r = nvme_link_receive(link);
    return r < 0 ? nvme_admin_fail(admin, r, "%s", link->reason) : 0;
}

struct waiting {
    bool done;
    int result;
    struct nvme_completion completion;
};

static void execute_done(struct nvme_link *link, struct nvme_request *request, int result) {
    (void)link;
    struct waiting *waiting = request->owner;
    waiting->done = true;
    waiting->result = result;
    waiting->completion = request->completion;
}

int nvme_execute(struct nvme_admin *admin, struct nvme_link *link, const struct nvme_command *command, void *data, uint32_t size, bool write,
                 struct nvme_completion *completion, uint64_t deadline_ns) {
    struct nvme_request *request = link->state == NVME_LINK_READY ? nvme_request_get(link) : NULL;
    if (!request)
        return nvme_admin_fail(admin, -ENOTCONN, "%s", link->reason[0] ? link->reason : "no connection");
    struct iovec iov = {data, size};
    struct waiting waiting = {0};
    request->command = *command;
    request->data = (struct nvme_cursor){&iov, 0};
    request->size = size;
    request->write = write;
    request->done = execute_done;
    request->owner = &waiting;
    nvme_request_send(link, request);
    int r = 0;
    while (r == 0 && !waiting.done) {
        r = link_step(admin, link);
        if (r == 0 && !waiting.done && (r = link_wait(admin, link, deadline_ns)) == -ETIMEDOUT)
            nvme_admin_fail(admin, r, "no answer to a command (opcode %#x) within the deadline", command->opcode);
    }
    if (!waiting.done) { /* the answer may still come, so this link is not used again */
        request->done = NULL;
        nvme_link_close(link, -ENOTCONN);
        return r;
    }
    if (completion)
        *completion = waiting.completion;
    if (waiting.result == -EBADMSG)
        return nvme_admin_fail(admin, -EBADMSG, "data digest of the answer to a command (opcode %#x) is wrong", command->opcode);
    if (waiting.result < 0)
        return nvme_admin_fail(admin, waiting.result, "a command (opcode %#x) ended with status %#x", command->opcode,
                               waiting.completion.status >> 1);
    return 0;
}

static int link_open(struct nvme_admin *admin, struct nvme_link *link, uint64_t deadline_ns) {
    int r = nvme_link_connect(link, &admin->address, admin->target->header_digest, admin->target->data_digest);
    if (r < 0)
        return nvme_admin_fail(admin, r, "%s", link->reason);
    while (r == 0 && link->state != NVME_LINK_READY) {
        r = link_step(admin, link);
        if (r == 0 && link->state != NVME_LINK_READY && (r = link_wait(admin, link, deadline_ns)) == -ETIMEDOUT)
            nvme_admin_fail(admin, r, "no answer to %s within the deadline", link->state == NVME_LINK_CONNECTING ? "a TCP connection" : "ICReq");
    }
    if (r < 0)
        nvme_link_close(link, -ENOTCONN);
    return r;
}

/* ---- commands ---- */

void nvme_connect_fill(const struct kvfs_nvme_target *target, uint16_t cntlid, uint16_t qid, uint32_t entries, uint32_t kato_ms,
                       struct nvme_command *command, struct nvme_connect_data *data) {
    struct nvme_connect connect = {.opcode = NVME_OPCODE_FABRICS,
                                   .fctype = NVME_CONNECT,
                                   .qid = qid,
                                   .sqsize = (uint16_t)(entries - 1),
                                   .cattr = NVME_CONNECT_NO_SQ_FLOW,
                                   .kato_ms = kato_ms};
    memcpy(command, &connect, sizeof(connect));
    memset(data, 0, sizeof(*data));
    memcpy(data->hostid, target->hostid, sizeof(data->hostid));
    data->cntlid = cntlid;
    memcpy(data->subnqn, target->nqn, strlen(target->nqn));
    memcpy(data->hostnqn, target->hostnqn, strlen(target->hostnqn));
}

static int connect_queue(struct nvme_admin *admin, struct nvme_link *link, uint16_t qid, uint32_t entries, uint32_t kato_ms, uint64_t deadline_ns) {
    struct nvme_command command;
    struct nvme_connect_data data;
    struct nvme_completion completion = {0};
    nvme_connect_fill(admin->target, admin->cntlid, qid, entries, kato_ms, &command, &data);
    int r = nvme_execute(admin, link, &command, &data, sizeof(data), true, &completion, deadline_ns);
    uint16_t status = completion.status >> 1 & 0x7ff;
    if (status == NVME_SC_CONNECT_PARAMETER)
        return nvme_admin_fail(admin, -EINVAL, "Connect of queue %u: parameter at offset %u of the %s is refused: %s", qid, completion.dw0 & 0xffff,
                               completion.dw0 >> 16 & 1 ? "data" : "command",
                               completion.dw0 >> 16 & 1 && (completion.dw0 & 0xffff) == offsetof(struct nvme_connect_data, subnqn)
                                   ? "no such subsystem"
                                   : "not as it should be");
    if (status == NVME_SC_CONNECT_HOST)
        return nvme_admin_fail(admin, -EACCES, "Connect of queue %u: the subsystem does not allow host %s", qid, admin->target->hostnqn);
    if (status)
        return nvme_admin_fail(admin, r, "Connect of queue %u: status %#x", qid, status);
    if (r == 0 && qid == 0)
        admin->cntlid = completion.dw0 & 0xffff;
    return r;
}

static int property_get(struct nvme_admin *admin, uint32_t offset, bool wide, uint64_t *out, uint64_t deadline_ns) {
    struct nvme_property property = {.opcode = NVME_OPCODE_FABRICS, .fctype = NVME_PROPERTY_GET, .attrib = wide, .offset = offset};
    struct nvme_command command;
    struct nvme_completion completion;
    memcpy(&command, &property, sizeof(command));
    int r = nvme_execute(admin, &admin->link, &command, NULL, 0, false, &completion, deadline_ns);
    if (r == 0)
        *out = wide ? completion.value : completion.dw0;
    return r;
}

static int property_set(struct nvme_admin *admin, uint32_t offset, uint64_t value, uint64_t deadline_ns) {
    struct nvme_property property = {.opcode = NVME_OPCODE_FABRICS, .fctype = NVME_PROPERTY_SET, .offset = offset, .value = value};
    struct nvme_command command;
    memcpy(&command, &property, sizeof(command));
    return nvme_execute(admin, &admin->link, &command, NULL, 0, false, NULL, deadline_ns);
}

static int identify(struct nvme_admin *admin, uint32_t cns, uint32_t nsid, void *out, uint64_t deadline_ns) {
    struct nvme_command command = {.opcode = NVME_ADMIN_IDENTIFY, .nsid = nsid, .cdw10 = cns};
    return nvme_execute(admin, &admin->link, &command, out, 4096, false, NULL, deadline_ns);
}

/* Text padded with spaces or zeros. */
static void text_take(char *out, const char *text, uint32_t size) {
    memcpy(out, text, size);
    out[size] = 0;
    for (uint32_t n = (uint32_t)strlen(out); n && out[n - 1] == ' '; n--)
        out[n - 1] = 0;
    for (char *c = out; *c; c++)
        if (*c < ' ' || *c > '~')
            *c = '?';
}

static int resolve(struct nvme_admin *admin) {
    char port[16];
    snprintf(port, sizeof(port), "%u", admin->target->port);
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_flags = AI_NUMERICSERV}, *found = NULL;
    int r = getaddrinfo(admin->target->host, port, &hints, &found);
    if (r != 0)
        return nvme_admin_fail(admin, -EHOSTUNREACH, "%s", gai_strerror(r));
    memset(&admin->address, 0, sizeof(admin->address));
    memcpy(&admin->address, found->ai_addr, min_u64(found->ai_addrlen, sizeof(admin->address)));
    freeaddrinfo(found);
    return 0;
}

static int enable(struct nvme_admin *admin, uint64_t deadline_ns) {
    uint64_t capabilities, status = 0;
    int r = property_get(admin, NVME_CAP, true, &capabilities, deadline_ns);
    if (r == 0)
        r = property_set(admin, NVME_CC, NVME_CC_EN | NVME_CC_QUEUE_SIZES, deadline_ns);
    uint64_t until = r < 0 ? 0 : min_u64(deadline_ns, now_ns() + (NVME_CAP_TIMEOUT_MS(capabilities) + 500) * 1000000ull);
    while (r == 0 && (r = property_get(admin, NVME_CSTS, false, &status, deadline_ns)) == 0 && !(status & NVME_CSTS_RDY)) {
        if (status & NVME_CSTS_CFS)
            return nvme_admin_fail(admin, -EIO, "the controller has failed: CSTS %#llx", (unsigned long long)status);
        if (now_ns() >= until)
            return nvme_admin_fail(admin, -ETIMEDOUT, "the controller did not become ready: CSTS %#llx", (unsigned long long)status);
        r = link_wait(admin, &admin->link, min_u64(until, now_ns() + 10000000));
        r = r == -ETIMEDOUT ? 0 : r;
    }
    if (r == 0)
        admin->entries_max = NVME_CAP_MQES(capabilities);
    return r;
}

static int features(struct nvme_admin *admin, uint64_t deadline_ns) {
    struct nvme_controller *controller = malloc(sizeof(*controller));
    if (!controller)
        return nvme_admin_fail(admin, -ENOMEM, "no memory");
    int r = identify(admin, NVME_CNS_CONTROLLER, 0, controller, deadline_ns);
    if (r == 0) {
        text_take(admin->model, controller->model, sizeof(controller->model));
        text_take(admin->serial, controller->serial, sizeof(controller->serial));
        admin->transfer_size = controller->mdts && controller->mdts < 12 ? 4096u << controller->mdts : TRANSFER_MAX;
        admin->write_cache = controller->vwc & 1;
        admin->reservations = controller->oncs & NVME_ONCS_RESERVATIONS;
        admin->oaes = controller->oaes;
        admin->in_capsule_size = controller->ioccsz > 4 ? (uint32_t)min_u64(controller->ioccsz * 16ull - 64, 1 << 20) : 0;
    }
    bool discovery = r == 0 && strcmp(admin->target->nqn, NVME_DISCOVERY_NQN) == 0;
    if (r == 0 && !discovery && (controller->sgls & 3) == 0)
        r = nvme_admin_fail(admin, -ENOTSUP, "the controller takes no SGLs (SGLS %#x)", controller->sgls);
    free(controller);
    if (r < 0 || discovery)
        return r;
    uint32_t wanted = (uint32_t)min_u64(admin->target->queues ? admin->target->queues : 128, NVME_QUEUES_MAX);
    struct nvme_command command = {.opcode = NVME_ADMIN_SET_FEATURES, .cdw10 = NVME_FEATURE_QUEUES, .cdw11 = (wanted - 1) << 16 | (wanted - 1)};
    struct nvme_completion completion;
    r = nvme_execute(admin, &admin->link, &command, NULL, 0, false, &completion, deadline_ns);
    if (r < 0)
        return r;
    admin->queue_count = (uint32_t)min_u64(wanted, min_u64(completion.dw0 & 0xffff, completion.dw0 >> 16) + 1);
    if (admin->oaes & NVME_ASYNC_NAMESPACES) {
        command = (struct nvme_command){.opcode = NVME_ADMIN_SET_FEATURES, .cdw10 = NVME_FEATURE_ASYNC_EVENTS, .cdw11 = NVME_ASYNC_NAMESPACES};
        r = nvme_execute(admin, &admin->link, &command, NULL, 0, false, NULL, deadline_ns);
    }
    return r;
}

int nvme_admin_open(struct nvme_admin *admin, const struct kvfs_nvme_target *target, uint32_t kato_ms, uint64_t deadline_ns) {
    admin->target = target;
    admin->cntlid = NVME_CNTLID_DYNAMIC;
    admin->shut = false;
    int r = resolve(admin);
    if (r == 0 && !admin->link.requests && (r = nvme_link_init(&admin->link, ADMIN_DEPTH - 1)) < 0)
        nvme_admin_fail(admin, r, "no memory");
    if (r < 0)
        return r;
    admin->link.in_capsule_size = ADMIN_CAPSULE;
    r = link_open(admin, &admin->link, deadline_ns);
    if (r == 0)
        r = connect_queue(admin, &admin->link, 0, ADMIN_DEPTH, kato_ms, deadline_ns);
    if (r == 0)
        r = enable(admin, deadline_ns);
    if (r == 0)
        r = features(admin, deadline_ns);
    if (r < 0)
        nvme_link_close(&admin->link, -ENOTCONN);
    return r;
}

void nvme_admin_close(struct nvme_admin *admin, bool orderly) {
    if (orderly && admin->link.state == NVME_LINK_READY) {
        uint64_t deadline = now_ns() + 500000000, status = 0;
        int r = property_set(admin, NVME_CC, NVME_CC_EN | NVME_CC_QUEUE_SIZES | NVME_CC_SHN_NORMAL, deadline);
        while (r == 0 && (r = property_get(admin, NVME_CSTS, false, &status, deadline)) == 0 && (status & NVME_CSTS_SHST) != NVME_CSTS_SHST_DONE)
            r = link_wait(admin, &admin->link, min_u64(deadline, now_ns() + 5000000)) == -ETIMEDOUT && now_ns() < deadline ? 0 : -ETIMEDOUT;
    }
    nvme_link_close(&admin->link, -ENOTCONN);
    nvme_link_free(&admin->link);
}

int nvme_admin_identity(struct nvme_admin *admin, uint32_t nsid, struct nvme_identity *out, uint64_t deadline_ns) {
    union {
        struct nvme_namespace namespace;
        uint8_t bytes[4096];
    } *page = malloc(sizeof(*page));
    if (!page)
        return nvme_admin_fail(admin, -ENOMEM, "no memory");
    memset(out, 0, sizeof(*out));
    int r = identify(admin, NVME_CNS_NAMESPACE, nsid, page, deadline_ns);
    const struct nvme_namespace *namespace = &page->namespace;
    if (r == -ENODEV || (r == 0 && namespace->nsze == 0)) {
        r = nvme_admin_fail(admin, -ENODEV, "no namespace %u in this subsystem", nsid);
    } else if (r == 0) {
        const struct nvme_lba_format *format = &namespace->lbaf[namespace->flbas & 15];
        if (format->lbads < 9 || format->lbads > 12 || format->metadata_size || namespace->nsze > UINT64_MAX >> 13)
            r = nvme_admin_fail(admin, -ENOTSUP,
                                "namespace %u: %llu blocks of 2^%u bytes with %u bytes of metadata; 512 to 4096 without it"
                                " are possible",
                                nsid, (unsigned long long)namespace->nsze, format->lbads, format->metadata_size);
        out->block_shift = format->lbads;
        out->size = r < 0 ? 0 : namespace->nsze << format->lbads;
        memcpy(out->nguid, namespace->nguid, sizeof(out->nguid));
        memcpy(out->eui64, namespace->eui64, sizeof(out->eui64));
    }
    if (r == 0 && identify(admin, NVME_CNS_DESCRIPTORS, nsid, page, deadline_ns) == 0) { /* a controller may have none */
        for (uint32_t at = 0; at + sizeof(struct nvme_descriptor) <= sizeof(page->bytes);) {
            const struct nvme_descriptor *descriptor = (const struct nvme_descriptor *)(page->bytes + at);
            at += sizeof(*descriptor);
            if (!descriptor->type || descriptor->size > sizeof(page->bytes) - at)
                break;
            if (descriptor->type == NVME_DESCRIPTOR_UUID && descriptor->size == sizeof(out->uuid))
                memcpy(out->uuid, page->bytes + at, sizeof(out->uuid));
            at += descriptor->size;
        }
    }
    free(page);
    return r;
}

int nvme_admin_queue(struct nvme_admin *admin, struct nvme_link *link, uint16_t qid, uint64_t deadline_ns) {
    link->in_capsule_size = admin->in_capsule_size;
    int r = link_open(admin, link, deadline_ns);
    if (r == 0)
        r = connect_queue(admin, link, qid, (uint32_t)min_u64(link->depth + 1, admin->entries_max), 0, deadline_ns);
    if (r < 0)
        nvme_link_close(link, -ENOTCONN);
    return r;
}

int nvme_block_io(struct nvme_admin *admin, struct nvme_link *link, uint32_t nsid, const struct nvme_identity *identity, bool write, uint64_t offset,
                  void *data, uint32_t size, uint64_t deadline_ns) {
    const uint32_t block = 1u << identity->block_shift;
    if (offset % block || size % block || size > identity->size || offset > identity->size - size)
        return nvme_admin_fail(admin, -EINVAL, "%u bytes at %llu: namespace %u has %llu, in blocks of %u", size, (unsigned long long)offset, nsid,
                               (unsigned long long)identity->size, block);
    int r = 0;
    for (uint32_t at = 0, step; at < size && r == 0; at += step) {
        step = (uint32_t)min_u64(size - at, min_u64(admin->transfer_size, 65536ull * block));
        uint64_t first = (offset + at) >> identity->block_shift;
        struct nvme_command command = {.opcode = write ? NVME_IO_WRITE : NVME_IO_READ,
                                       .nsid = nsid,
                                       .cdw10 = (uint32_t)first,
                                       .cdw11 = (uint32_t)(first >> 32),
                                       .cdw12 = ((step >> identity->block_shift) - 1) | (write ? NVME_IO_FUA : 0)};
        r = nvme_execute(admin, link, &command, (uint8_t *)data + at, step, write, NULL, deadline_ns);
    }
    return r;
}

/* ---- targets as Python gives them ---- */

const char *kvfs_nvme_error(void) { return message; }

static int target_check(const struct kvfs_nvme_target *t, char *why, size_t size) {
    const char *wrong = !memchr(t->host, 0, sizeof(t->host)) || !t->host[0]                         ? "no host"
                        : t->port == 0 || t->port > 65535                                           ? "no port"
                        : !memchr(t->nqn, 0, sizeof(t->nqn)) || !t->nqn[0]                          ? "no subsystem"
                        : !memchr(t->hostnqn, 0, sizeof(t->hostnqn)) || !t->hostnqn[0]              ? "no host name (hostnqn)"
                        : t->nsid == UINT32_MAX                                                     ? "no such namespace"
                        : t->queues > NVME_QUEUES_MAX || t->depth > NVME_DEPTH_MAX                  ? "too many queues, or too deep"
                        : t->kato_ms > 600000 || t->timeout_ms > 600000                             ? "times of more than ten minutes"
                        : t->header_digest > 1 || t->data_digest > 1 || t->reserved || t->reserved2 ? "flags that are neither 0 nor 1"
                                                                                                    : NULL;
    if (wrong)
        snprintf(why, size, "NVMe/TCP target: %s", wrong);
    return wrong ? -EINVAL : 0;
}

bool nvme_target_of(int fd, struct kvfs_nvme_target *out) {
    char why[80];
    int seals = fcntl(fd, F_GET_SEALS);
    return seals >= 0 && (seals & (F_SEAL_WRITE | F_SEAL_SHRINK)) == (F_SEAL_WRITE | F_SEAL_SHRINK) &&
           pread(fd, out, sizeof(*out), 0) == sizeof(*out) && out->magic == TARGET_MAGIC && target_check(out, why, sizeof(why)) == 0 && out->nsid;
}

int kvfs_nvme_descriptor(const struct kvfs_nvme_target *target) {
    int r = target_check(target, message, sizeof(message));
    if (r < 0)
        return r;
    struct kvfs_nvme_target stored = *target;
    stored.magic = TARGET_MAGIC;
    int fd = descriptor_above(memfd_create("kvfs-nvme-tcp", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    const int seals = F_SEAL_WRITE | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
    if (fd >= 0 && (write(fd, &stored, sizeof(stored)) != sizeof(stored) || fcntl(fd, F_ADD_SEALS, seals) < 0)) {
        r = -errno;
        close(fd);
        fd = r;
    } else if (fd < 0) {
        fd = -errno;
    }
    if (fd < 0)
        snprintf(message, sizeof(message), "memfd: %s", strerror(-fd));
    return fd;
}

/* ---- one controller, for labels and sizes ---- */

struct kvfs_nvme {
    struct kvfs_nvme_target target;
    struct nvme_admin admin;
    struct nvme_link link;
    struct nvme_identity identity;
};

static int failed(struct kvfs_nvme *nvme, int r) {
    snprintf(message, sizeof(message), "%s", nvme->admin.reason);
    return r;
}

static uint64_t deadline_of(const struct kvfs_nvme *nvme) {
    return now_ns() + (nvme->target.timeout_ms ? nvme->target.timeout_ms : 5000) * 1000000ull;
}

static int connected(struct kvfs_nvme *nvme, uint64_t deadline) {
    if (nvme->admin.link.state == NVME_LINK_READY && (nvme->link.state == NVME_LINK_READY || !nvme->target.nsid))
        return 0;
    nvme_link_close(&nvme->link, -ENOTCONN);
    nvme_link_close(&nvme->admin.link, -ENOTCONN);
    int r = nvme_admin_open(&nvme->admin, &nvme->target, 0, deadline);
    if (r == 0 && nvme->target.nsid) {
        r = nvme_admin_identity(&nvme->admin, nvme->target.nsid, &nvme->identity, deadline);
        if (r == 0)
            r = nvme_admin_queue(&nvme->admin, &nvme->link, 1, deadline);
    }
    return r;
}

int kvfs_nvme_open(const struct kvfs_nvme_target *target, struct kvfs_nvme **out) {
    int r = target_check(target, message, sizeof(message));
    if (r < 0)
        return r;
    struct kvfs_nvme *nvme = calloc(1, sizeof(*nvme));
    if (!nvme)
        return -ENOMEM;
    nvme->target = *target;
    nvme->admin.wake_fd = nvme->admin.link.fd = nvme->link.fd = -1;
    r = nvme_link_init(&nvme->link, 7);
    if (r == 0 && (r = connected(nvme, deadline_of(nvme))) < 0)
        failed(nvme, r);
    if (r < 0)
        kvfs_nvme_close(nvme);
    else
        *out = nvme;
    return r;
}

void kvfs_nvme_close(struct kvfs_nvme *nvme) {
    nvme_link_close(&nvme->link, -ENOTCONN);
    nvme_link_free(&nvme->link);
    nvme_admin_close(&nvme->admin, true);
    free(nvme);
}

int kvfs_nvme_info(struct kvfs_nvme *nvme, struct kvfs_nvme_info *out) {
    *out = (struct kvfs_nvme_info){.size = nvme->identity.size,
                                   .block_size = 1u << nvme->identity.block_shift,
                                   .transfer_size = nvme->admin.transfer_size,
                                   .queues = nvme->admin.queue_count,
                                   .write_cache = nvme->admin.write_cache};
    memcpy(out->model, nvme->admin.model, sizeof(out->model));
    memcpy(out->serial, nvme->admin.serial, sizeof(out->serial));
    return 0;
}

/* Tries twice if the connection is dead: the target may have been restarted since the last call. */
static int block_call(struct kvfs_nvme *nvme, bool write, uint64_t offset, void *data, uint32_t size) {
    const struct nvme_identity before = nvme->identity;
    uint64_t deadline = deadline_of(nvme);
    int r = -ENOTCONN;
    for (int attempt = 0; attempt < 2 && (attempt == 0 || nvme->link.state != NVME_LINK_READY) && r < 0 && r != -ETIMEDOUT; attempt++) {
        r = connected(nvme, deadline);
        if (r == 0 && memcmp(&before, &nvme->identity, sizeof(before)) != 0)
            return failed(nvme, nvme_admin_fail(&nvme->admin, -ESTALE, "namespace %u is another one than before", nvme->target.nsid));
        if (r == 0 && data) {
            r = nvme_block_io(&nvme->admin, &nvme->link, nvme->target.nsid, &nvme->identity, write, offset, data, size, deadline);
        } else if (r == 0) {
            struct nvme_command command = {.opcode = NVME_IO_FLUSH, .nsid = nvme->target.nsid};
            r = nvme_execute(&nvme->admin, &nvme->link, &command, NULL, 0, false, NULL, deadline);
        }
    }
    return r < 0 ? failed(nvme, r) : 0;
}

int kvfs_nvme_read(struct kvfs_nvme *nvme, uint64_t offset, void *data, uint32_t size) { return block_call(nvme, false, offset, data, size); }

int kvfs_nvme_write(struct kvfs_nvme *nvme, uint64_t offset, const void *data, uint32_t size) {
    return block_call(nvme, true, offset, (void *)(uintptr_t)data, size);
}

int kvfs_nvme_flush(struct kvfs_nvme *nvme) { return nvme->admin.write_cache ? block_call(nvme, true, 0, NULL, 0) : 0; }

int kvfs_nvme_reservation(struct kvfs_nvme *nvme, enum kvfs_reservation_step step, uint64_t key, uint64_t other) {
    static const struct {
        uint8_t opcode;
        uint32_t cdw10;
    } steps[] = {
        [KVFS_RESERVATION_REGISTER] = {NVME_IO_RESERVATION_REGISTER, NVME_REGISTER_NEW},
        [KVFS_RESERVATION_REPLACE] = {NVME_IO_RESERVATION_REGISTER, NVME_REGISTER_REPLACE | NVME_RESERVATION_ANY_KEY},
        [KVFS_RESERVATION_ACQUIRE] = {NVME_IO_RESERVATION_ACQUIRE, NVME_ACQUIRE_NEW | NVME_RESERVATION_WRITE_REGISTRANTS << 8},
        [KVFS_RESERVATION_PREEMPT] = {NVME_IO_RESERVATION_ACQUIRE, NVME_ACQUIRE_PREEMPT | NVME_RESERVATION_WRITE_REGISTRANTS << 8},
        [KVFS_RESERVATION_RELEASE] = {NVME_IO_RESERVATION_RELEASE, NVME_RESERVATION_WRITE_REGISTRANTS << 8},
        [KVFS_RESERVATION_END] = {NVME_IO_RESERVATION_REGISTER, NVME_REGISTER_END},
    };
    if ((uint32_t)step >= sizeof(steps) / sizeof(steps[0]))
        return -EINVAL;
    uint64_t deadline = deadline_of(nvme);
    int r = -ENOTCONN;
    for (int attempt = 0; attempt < 2 && r == -ENOTCONN; attempt++) { /* the target may have been restarted since the last call */
        r = connected(nvme, deadline);
        if (r == 0 && !nvme->admin.reservations)
            r = nvme_admin_fail(&nvme->admin, -EOPNOTSUPP, "no reservations there");
        if (r < 0)
            continue;
        bool registers = step == KVFS_RESERVATION_REGISTER || step == KVFS_RESERVATION_REPLACE;
        struct nvme_reservation_keys keys = {registers ? 0 : key, registers ? key : other};
        struct nvme_command command = {.opcode = steps[step].opcode, .nsid = nvme->target.nsid, .cdw10 = steps[step].cdw10};
        r = nvme_execute(&nvme->admin, &nvme->link, &command, &keys, step == KVFS_RESERVATION_RELEASE ? 8 : sizeof(keys), true, NULL, deadline);
    }
    return r < 0 ? failed(nvme, r) : 0;
}

int kvfs_nvme_namespaces(struct kvfs_nvme *nvme, uint32_t *out, uint32_t count) {
    uint32_t list[1024], found = 0;
    int r = identify(&nvme->admin, NVME_CNS_ACTIVE_NAMESPACES, 0, list, deadline_of(nvme));
    if (r < 0)
        return failed(nvme, r);
    for (uint32_t i = 0; i < 1024 && list[i]; i++, found++)
        if (found < count)
            out[found] = list[i];
    return (int)found;
}

/* ---- discovery (base 2.0, 3.1.3.3 and 5.16.1.23) ---- */

static int log_page(struct nvme_admin *admin, uint64_t offset, void *out, uint32_t size, uint64_t deadline_ns) {
    uint32_t dwords = size / 4 - 1;
    struct nvme_command command = {.opcode = NVME_ADMIN_GET_LOG_PAGE,
                                   .cdw10 = NVME_LOG_DISCOVERY | (dwords & 0xffff) << 16,
                                   .cdw11 = dwords >> 16,
                                   .cdw12 = (uint32_t)offset,
                                   .cdw13 = (uint32_t)(offset >> 32)};
    return nvme_execute(admin, &admin->link, &command, out, size, false, NULL, deadline_ns);
}

static int discovery(struct kvfs_nvme *nvme, struct kvfs_nvme_subsystem *out, uint32_t count, uint64_t deadline) {
    union {
        struct nvme_discovery_head head;
        struct nvme_discovery_entry entry;
    } page;
    for (;;) { /* until the log stays unchanged during a read */
        int r = log_page(&nvme->admin, 0, &page, sizeof(page), deadline);
        if (r < 0)
            return r;
        uint64_t generation = page.head.genctr, found = page.head.numrec;
        if (page.head.recfmt || found > DISCOVERY_MAX)
            return nvme_admin_fail(&nvme->admin, -EPROTO, "a discovery log of format %u with %llu entries", page.head.recfmt,
                                   (unsigned long long)found);
        for (uint32_t i = 0; i < found && i < count; i++) {
            r = log_page(&nvme->admin, 1024ull * (i + 1), &page, sizeof(page), deadline);
            if (r < 0)
                return r;
            char text[NVME_NQN_SIZE + 1];
            out[i] = (struct kvfs_nvme_subsystem){.type = page.entry.subtype, .transport = page.entry.trtype};
            text_take(text, page.entry.subnqn, NVME_NQN_SIZE);
            snprintf(out[i].nqn, sizeof(out[i].nqn), "%.255s", text);
            text_take(text, page.entry.traddr, sizeof(page.entry.traddr));
            snprintf(out[i].address, sizeof(out[i].address), "%.255s", text);
            text_take(text, page.entry.trsvcid, sizeof(page.entry.trsvcid));
            snprintf(out[i].port, sizeof(out[i].port), "%.31s", text);
        }
        r = log_page(&nvme->admin, 0, &page, sizeof(page), deadline);
        if (r < 0)
            return r;
        if (page.head.genctr == generation)
            return (int)found;
    }
}

int kvfs_nvme_discover(const struct kvfs_nvme_target *target, struct kvfs_nvme_subsystem *out, uint32_t count) {
    struct kvfs_nvme_target asked = *target;
    memset(asked.nqn, 0, sizeof(asked.nqn));
    strcpy(asked.nqn, NVME_DISCOVERY_NQN);
    asked.nsid = 0;
    struct kvfs_nvme *nvme;
    int r = kvfs_nvme_open(&asked, &nvme);
    if (r < 0)
        return r;
    r = discovery(nvme, out, count, deadline_of(nvme));
    if (r < 0)
        failed(nvme, r);
    kvfs_nvme_close(nvme);
    return r;
}
