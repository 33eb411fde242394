/* The controllers of an array's NVMe/TCP devices. Each has a thread, which makes the association, keeps it alive, and makes it again after a
 * loss. Rings look at `state` and `generation`, and connect queues of their own (io/nvme/queue.c).
 *
 * An association lives and dies as a whole: when one queue's connection breaks, all are shut down. A namespace is used again only if it is
 * the same one, and its label names this pool, this device and this mount.
 */
#include "base/descriptor.h"
#include "io/nvme/tcp.h"

#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <sys/eventfd.h>
#include <unistd.h>

#define BACKOFF_MIN_MS 100u
#define BACKOFF_UP_MAX_MS 400u   /* after a loss of an association */
#define BACKOFF_MAX_MS 2000u     /* after a failure to make one */
#define POLL_NS 500000000ull     /* between polls of an unusable namespace */
#define SUSPECT_NS 1000000000ull /* wait for keep alive after a command without an answer */
#define STEADY_NS 2000000000ull  /* an association that lasted this long is made again at once */

static void notify(struct nvme_host *host, struct nvme_remote *only, const char *format, ...) __attribute__((format(printf, 3, 4)));
static void notify(struct nvme_host *host, struct nvme_remote *only, const char *format, ...) {
    char text[NVME_REASON + 64];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof(text), format, arguments);
    va_end(arguments);
    for (struct nvme_remote *remote = host->remotes; remote; remote = remote->next)
        if (!only || remote == only) {
            pthread_mutex_lock(&host->lock);
            snprintf(remote->message, sizeof(remote->message), "%.80s:%u: %s", host->target.host, host->target.port, text);
            pthread_mutex_unlock(&host->lock);
            if (host->array->on_message && atomic_load(&host->array->devices[remote->device].remote) == remote) /* else another took its place */
                host->array->on_message(host->array, remote->device);
        }
}

static uint64_t timeout_ns(const struct nvme_host *host) { return (host->target.timeout_ms ? host->target.timeout_ms : 5000) * 1000000ull; }
static uint32_t kato_ms(const struct nvme_host *host) { return host->target.kato_ms ? host->target.kato_ms : 5000; }

/* ---- for rings ---- */

bool nvme_host_room(struct nvme_host *host) {
    bool room = false;
    pthread_mutex_lock(&host->lock);
    for (uint32_t i = 1; i <= host->queue_count; i++)
        room = room || !host->links[i];
    pthread_mutex_unlock(&host->lock);
    return room;
}

uint16_t nvme_host_join(struct nvme_host *host, struct nvme_link *link, uint32_t generation) {
    uint16_t qid = 0;
    pthread_mutex_lock(&host->lock);
    if (atomic_load(&host->generation) == generation && atomic_load(&host->state) == NVME_HOST_UP)
        for (uint32_t i = 1; i <= host->queue_count && !qid; i++)
            if (!host->links[i]) {
                host->links[i] = link;
                qid = (uint16_t)i;
            }
    pthread_mutex_unlock(&host->lock);
    return qid;
}

void nvme_host_leave(struct nvme_host *host, uint16_t qid, struct nvme_link *link) {
    pthread_mutex_lock(&host->lock);
    if (host->links[qid] == link)
        host->links[qid] = NULL;
    pthread_mutex_unlock(&host->lock);
}

void nvme_host_lost(struct nvme_host *host, uint32_t generation, const char *reason) {
    pthread_mutex_lock(&host->lock);
    if (atomic_load(&host->generation) == generation && atomic_load(&host->lost) != generation) {
        snprintf(host->reason, sizeof(host->reason), "%s", reason);
        atomic_store(&host->lost, generation);
        wake_fd(host->wake_fd);
    }
    pthread_mutex_unlock(&host->lock);
}

void nvme_host_abort(struct nvme_host *host, uint16_t qid, uint16_t cid) {
    pthread_mutex_lock(&host->lock);
    if (host->abort_count < sizeof(host->aborts) / sizeof(host->aborts[0])) { /* an Abort is a courtesy: those that do not fit are left out */
        host->aborts[host->abort_count].qid = qid;
        host->aborts[host->abort_count++].cid = cid;
        wake_fd(host->wake_fd);
    }
    pthread_mutex_unlock(&host->lock);
}

/* ---- namespaces ---- */

static int label_check(struct nvme_remote *remote, const struct kvfs_label *label, struct nvme_admin *admin) {
    const struct kvfs_label *known = &remote->label;
    if (label->magic != known->magic || memcmp(label->pool_uuid, known->pool_uuid, 16) != 0 ||
        memcmp(label->device_uuid, known->device_uuid, 16) != 0)
        return nvme_admin_fail(admin, -ESTALE, "namespace %u came back with another label", remote->nsid);
    if (label->mount_epoch != known->mount_epoch && label->mount_epoch != remote->host->array->geometry.mount_epoch)
        return nvme_admin_fail(admin, -ESTALE, "namespace %u came back with epoch %llu in its label, expected %llu", remote->nsid,
                               (unsigned long long)label->mount_epoch, (unsigned long long)remote->host->array->geometry.mount_epoch);
    return 0;
}

static int remote_check(struct nvme_admin *admin, struct nvme_link *link, struct nvme_remote *remote, uint64_t deadline) {
    struct nvme_identity identity;
    uint8_t *page = NULL;
    if (atomic_exchange(&remote->anew, false))
        remote->known = false;
    int r = nvme_admin_identity(admin, remote->nsid, &identity, deadline);
    if (r == 0 && remote->known && memcmp(&identity, &remote->identity, sizeof(identity)) != 0)
        r = nvme_admin_fail(admin, -ESTALE, "namespace %u came back as another one: %llu bytes, before %llu", remote->nsid,
                            (unsigned long long)identity.size, (unsigned long long)remote->identity.size);
    if (r == 0 && link->state != NVME_LINK_READY)
        r = nvme_admin_queue(admin, link, (uint16_t)admin->queue_count, deadline);
    if (r == 0 && posix_memalign((void **)&page, PAGE, PAGE))
        r = nvme_admin_fail(admin, -ENOMEM, "no memory");
    if (r == 0)
        r = nvme_block_io(admin, link, remote->nsid, &identity, false, 0, page, PAGE, deadline);
    if (r == 0 && remote->known)
        r = label_check(remote, (const struct kvfs_label *)page, admin);
    if (r == 0 && !remote->known) {
        remote->identity = identity;
        memcpy(&remote->label, page, sizeof(remote->label));
        remote->known = true;
    }
    free(page);
    return r;
}

/* Check the namespaces that are not usable. A namespace that fails is polled again later. Returns 0 if any is usable, else the last failure. */
static int remotes_check(struct nvme_host *host, struct nvme_admin *admin, uint64_t deadline) {
    struct nvme_link link;
    int r = nvme_link_init(&link, 3), failure = 0;
    if (r < 0)
        return nvme_admin_fail(admin, r, "no memory");
    uint32_t good = 0;
    for (struct nvme_remote *remote = host->remotes; remote; remote = remote->next) {
        r = atomic_load(&remote->usable) ? 0 : remote_check(admin, &link, remote, deadline);
        if (r == 0)
            good++;
        else
            failure = r;
        bool back = r == 0 && !atomic_exchange(&remote->usable, true) && atomic_load(&host->state) == NVME_HOST_UP;
        bool news = back || (r < 0 && admin->link.state == NVME_LINK_READY && strcmp(remote->reason, admin->reason) != 0);
        pthread_mutex_lock(&host->lock);
        snprintf(remote->reason, sizeof(remote->reason), "%s", r < 0 ? admin->reason : "");
        pthread_mutex_unlock(&host->lock);
        if (back)
            notify(host, remote, "namespace %u is back", remote->nsid);
        else if (news)
            notify(host, remote, "%s", admin->reason);
    }
    nvme_link_close(&link, -ENOTCONN);
    nvme_link_free(&link);
    return good ? 0 : failure;
}

/* ---- the thread ---- */

struct service {
    uint64_t alive_asked_ns, alive_until_ns; /* keep alive: its send time, or 0; and the time when its answer is overdue */
    uint64_t next_alive_ns;
    bool suspect; /* a command missed its deadline, so the controller may be gone */
    bool namespaces_changed, watching;
};

static void alive_done(struct nvme_link *link, struct nvme_request *request, int result) {
    (void)link, (void)result; /* any answer will do */
    ((struct service *)request->owner)->alive_asked_ns = 0;
}

static void event_done(struct nvme_link *link, struct nvme_request *request, int result) {
    (void)link;
    struct service *service = request->owner;
    service->watching = false;
    uint32_t event = request->completion.dw0;
    if (result == 0 && (event & 7) == NVME_EVENT_NOTICE && (event >> 8 & 0xff) == NVME_NOTICE_NAMESPACES)
        service->namespaces_changed = true;
}

static void send_admin(struct service *service, struct nvme_admin *admin, struct nvme_command command, nvme_done done) {
    struct nvme_request *request = nvme_request_get(&admin->link);
    if (!request)
        return;
    request->command = command;
    request->done = done;
    request->owner = service;
    nvme_request_send(&admin->link, request);
}

/* Reading the log of changed namespaces allows the next event of this kind. */
static int namespaces_poll(struct nvme_host *host, struct nvme_admin *admin) {
    uint64_t deadline = now_ns() + kato_ms(host) * 500000ull;
    uint8_t *list = malloc(4096);
    if (!list)
        return 0;
    struct nvme_command command = {.opcode = NVME_ADMIN_GET_LOG_PAGE, .nsid = UINT32_MAX, .cdw10 = NVME_LOG_CHANGED_NAMESPACES | 1023u << 16};
    int r = nvme_execute(admin, &admin->link, &command, list, 4096, false, NULL, deadline);
    free(list);
    for (struct nvme_remote *remote = host->remotes; remote && admin->link.state == NVME_LINK_READY; remote = remote->next) {
        struct nvme_identity identity;
        int found = nvme_admin_identity(admin, remote->nsid, &identity, deadline);
        bool same = found == 0 && remote->known && memcmp(&identity, &remote->identity, sizeof(identity)) == 0;
        if (!same && atomic_exchange(&remote->usable, false))
            notify(host, remote, "namespace %u is gone or another one now: %s", remote->nsid, found < 0 ? admin->reason : "it has changed");
    }
    return admin->link.state == NVME_LINK_READY ? 0 : r < 0 ? r : -ENOTCONN;
}

static bool all_usable(const struct nvme_host *host) {
    for (const struct nvme_remote *remote = host->remotes; remote; remote = remote->next)
        if (!atomic_load(&remote->usable))
            return false;
    return true;
}

/* Keep alive is asked for at half of its time, and at once where a command missed its deadline. */
static int alive_step(struct service *service, struct nvme_admin *admin, uint64_t kato_ns, uint64_t now) {
    if (service->alive_asked_ns && now > service->alive_until_ns)
        return nvme_admin_fail(admin, -ETIMEDOUT, "no answer to keep alive in %llu ms",
                               (unsigned long long)(now - service->alive_asked_ns) / 1000000);
    if (service->suspect && service->alive_asked_ns)
        service->alive_until_ns = min_u64(service->alive_until_ns, now + SUSPECT_NS);
    if ((now >= service->next_alive_ns || service->suspect) && !service->alive_asked_ns) {
        service->alive_asked_ns = now;
        service->alive_until_ns = now + (service->suspect ? min_u64(kato_ns, SUSPECT_NS) : kato_ns);
        service->next_alive_ns = now + kato_ns / 2;
        send_admin(service, admin, (struct nvme_command){.opcode = NVME_ADMIN_KEEP_ALIVE}, alive_done);
    }
    service->suspect = false;
    return 0;
}

/* One Abort at a time: few controllers take many. True: there is more to do before a wait. */
static bool abort_step(struct nvme_host *host, struct nvme_admin *admin, struct service *service) {
    pthread_mutex_lock(&host->lock);
    if (host->abort_count && admin->link.in_flight < 8) {
        uint16_t qid = host->aborts[0].qid, cid = host->aborts[0].cid;
        memmove(host->aborts, host->aborts + 1, --host->abort_count * sizeof(host->aborts[0]));
        send_admin(service, admin, (struct nvme_command){.opcode = NVME_ADMIN_ABORT, .cdw10 = (uint32_t)cid << 16 | qid}, NULL);
        service->suspect = true;
    }
    bool more = service->suspect || (host->abort_count && admin->link.in_flight < 8);
    pthread_mutex_unlock(&host->lock);
    return more;
}

static void wait_for_news(struct nvme_host *host, struct nvme_admin *admin, uint64_t until, uint64_t now) {
    struct pollfd fds[2] = {{.fd = admin->link.fd, .events = (short)(POLLIN | (nvme_link_sending(&admin->link) ? POLLOUT : 0))},
                            {.fd = host->wake_fd, .events = POLLIN}};
    poll(fds, 2, until > now ? (int)((until - now) / 1000000 + 1) : 0);
    uint64_t count;
    if (fds[1].revents) {
        ssize_t n = read(host->wake_fd, &count, sizeof(count));
        (void)n;
    }
}

/* Returns when the association is lost, or the host is to stop (-ECANCELED). */
static int serve(struct nvme_host *host, struct nvme_admin *admin, struct service *service) {
    const uint64_t kato_ns = kato_ms(host) * 1000000ull;
    uint64_t next_poll = now_ns() + POLL_NS;
    service->next_alive_ns = now_ns() + kato_ns / 2;
    int r = 0;
    while (r == 0) {
        uint64_t now = now_ns();
        if (atomic_load(&host->stopping))
            return -ECANCELED;
        if (atomic_load(&host->lost) == atomic_load(&host->generation)) {
            pthread_mutex_lock(&host->lock);
            nvme_admin_fail(admin, -ENOTCONN, "%s", host->reason);
            pthread_mutex_unlock(&host->lock);
            return -ENOTCONN;
        }
        r = alive_step(service, admin, kato_ns, now);
        if (r < 0)
            return r;
        if (!service->watching && admin->oaes & NVME_ASYNC_NAMESPACES) {
            service->watching = true;
            send_admin(service, admin, (struct nvme_command){.opcode = NVME_ADMIN_ASYNC_EVENT}, event_done);
        }
        bool more = abort_step(host, admin, service);
        r = nvme_link_send(&admin->link);
        if (r == 0 && !more) {
            uint64_t until = service->alive_asked_ns ? service->alive_until_ns : service->next_alive_ns;
            wait_for_news(host, admin, all_usable(host) ? until : min_u64(until, next_poll), now);
        }
        if (r == 0)
            r = nvme_link_receive(&admin->link);
        if (r < 0)
            return nvme_admin_fail(admin, r, "%s", admin->link.reason);
        admin->wake_fd = -1; /* the following calls have short deadlines of their own */
        if (service->namespaces_changed) {
            service->namespaces_changed = false;
            r = namespaces_poll(host, admin);
            next_poll = 0;
        }
        if (atomic_exchange(&host->poll_now, false))
            next_poll = 0;
        if (r == 0 && now_ns() >= next_poll && !all_usable(host)) {
            remotes_check(host, admin, now_ns() + kato_ns / 2); /* keep alive waits meanwhile */
            next_poll = now_ns() + POLL_NS;
            r = admin->link.state == NVME_LINK_READY ? 0 : -ENOTCONN;
        }
        admin->wake_fd = host->wake_fd;
    }
    return r;
}

static void state_set(struct nvme_host *host, enum nvme_host_state state, const struct nvme_admin *admin) {
    pthread_mutex_lock(&host->lock);
    if (state == NVME_HOST_UP) {
        host->address = admin->address;
        host->cntlid = admin->cntlid;
        host->entries = (uint32_t)min_u64((host->target.depth ? host->target.depth : 128) + 1, admin->entries_max);
        host->queue_count = admin->queue_count > 1 ? admin->queue_count - 1 : 1; /* the last one was ours, for labels */
        host->transfer_size = admin->transfer_size;
        host->in_capsule_size = admin->in_capsule_size;
        host->abort_count = 0;
        atomic_fetch_add(&host->generation, 1);
    } else {
        for (uint32_t i = 1; i <= NVME_QUEUES_MAX; i++)
            if (host->links[i]) {
                nvme_link_shutdown(host->links[i]);
                host->links[i] = NULL;
            }
        for (struct nvme_remote *remote = host->remotes; remote; remote = remote->next)
            atomic_store(&remote->usable, false);
        snprintf(host->reason, sizeof(host->reason), "%s", admin->reason);
    }
    atomic_store(&host->state, state);
    pthread_cond_broadcast(&host->changed);
    pthread_mutex_unlock(&host->lock);
}

static void *host_main(void *argument) {
    struct nvme_host *host = argument;
    uint32_t backoff_ms = BACKOFF_MIN_MS;
    while (!atomic_load(&host->stopping)) {
        struct service service = {0}; /* outlives the link: requests point here until it is closed */
        struct nvme_admin admin = {.wake_fd = host->wake_fd, .link.fd = -1};
        uint64_t count, deadline = now_ns() + timeout_ns(host);
        ssize_t n = read(host->wake_fd, &count, sizeof(count)); /* drop wakes that were meant for the earlier association */
        (void)n;
        if (atomic_load(&host->stopping))
            break;
        int r = nvme_admin_open(&admin, &host->target, kato_ms(host), deadline);
        if (r == 0)
            r = remotes_check(host, &admin, deadline);
        uint64_t up_ns = now_ns();
        bool again = r == 0 && atomic_load(&host->generation) > 0;
        if (r == 0) {
            state_set(host, NVME_HOST_UP, &admin);
            for (struct nvme_remote *remote = host->remotes; remote && again; remote = remote->next)
                if (atomic_load(&remote->usable))
                    notify(host, remote, "connected again");
            r = serve(host, &admin, &service);
            if (r != -ECANCELED)
                backoff_ms = now_ns() - up_ns >= STEADY_NS ? 0 : (uint32_t)min_u64(backoff_ms, BACKOFF_UP_MAX_MS);
        }
        bool first = atomic_load(&host->state) != NVME_HOST_DOWN;
        state_set(host, NVME_HOST_DOWN, &admin);
        if (r != -ECANCELED && first)
            notify(host, NULL, "connection lost: %s", admin.reason);
        nvme_admin_close(&admin, r == -ECANCELED);
        struct pollfd poll_fd = {.fd = host->wake_fd, .events = POLLIN};
        while (backoff_ms && !atomic_load(&host->stopping) && poll(&poll_fd, 1, (int)backoff_ms) > 0) {
            n = read(host->wake_fd, &count, sizeof(count));
            if (!atomic_load(&host->stopping))
                break;
        }
        backoff_ms = backoff_ms == 0 ? BACKOFF_MIN_MS : (uint32_t)min_u64(backoff_ms * 2, BACKOFF_MAX_MS);
    }
    return NULL;
}

/* ---- start and stop ---- */

static bool same_controller(const struct kvfs_nvme_target *a, const struct kvfs_nvme_target *b) {
    struct kvfs_nvme_target other = *b;
    other.nsid = a->nsid;
    return memcmp(a, &other, sizeof(other)) == 0;
}

static struct nvme_host *host_of(struct kvfs_array *array, const struct kvfs_nvme_target *target) {
    for (struct nvme_host *host = array->hosts; host; host = host->next)
        if (same_controller(&host->target, target))
            return host;
    struct nvme_host *host = calloc(1, sizeof(*host));
    if (!host)
        return NULL;
    host->array = array;
    host->target = *target;
    pthread_mutex_init(&host->lock, NULL);
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&host->changed, &attributes);
    host->wake_fd = descriptor_above(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
    host->next = array->hosts;
    array->hosts = host;
    return host->wake_fd < 0 ? NULL : host;
}

/* Makes the remote, unless the device was there before. */
static struct nvme_remote *remote_of(struct kvfs_array *array, uint32_t device, const struct kvfs_nvme_target *target) {
    struct nvme_host *host = host_of(array, target);
    struct nvme_remote *remote = host ? atomic_load(&host->remotes) : NULL;
    while (remote && (remote->device != device || remote->nsid != target->nsid))
        remote = remote->next;
    if (!host || remote || !(remote = calloc(1, sizeof(*remote))))
        return remote;
    remote->host = host;
    remote->device = device;
    remote->nsid = target->nsid;
    remote->next = atomic_load(&host->remotes);
    atomic_store(&host->remotes, remote);
    return remote;
}

int nvme_device_use(struct kvfs_array *array, uint32_t device, char *error, size_t error_size) {
    struct kvfs_nvme_target target;
    if (!nvme_target_of(array->devices[device].fd, &target)) {
        atomic_store(&array->devices[device].remote, NULL);
        return 0;
    }
    snprintf(error, error_size, "no memory for NVMe/TCP controllers");
    struct nvme_remote *remote = remote_of(array, device, &target);
    if (!remote)
        return -ENOMEM;
    struct nvme_host *host = remote->host;
    atomic_store(&remote->anew, true);
    atomic_store(&remote->usable, false);
    atomic_store(&host->poll_now, true);
    if (!host->started) {
        int r = -pthread_create(&host->thread, NULL, host_main, host);
        if (r < 0)
            return r;
        host->started = true;
    }
    wake_fd(host->wake_fd);
    uint64_t until = now_ns() + timeout_ns(host) + BACKOFF_MAX_MS * 1000000ull;
    bool usable;
    while (!(usable = atomic_load(&remote->usable) && atomic_load(&host->state) == NVME_HOST_UP) && now_ns() < until)
        usleep(5000);
    pthread_mutex_lock(&host->lock);
    snprintf(error, error_size, "%.80s:%u: %s", host->target.host, host->target.port, remote->reason[0] ? remote->reason : host->reason);
    pthread_mutex_unlock(&host->lock);
    if (!usable)
        return -ENOTCONN;
    atomic_store(&array->devices[device].remote, remote);
    return 0;
}

int nvme_hosts_start(struct kvfs_array *array, const int *device_fds, bool wait, char *error, size_t error_size) {
    snprintf(error, error_size, "no memory for NVMe/TCP controllers");
    for (uint32_t i = 0; i < array->device_count; i++) {
        struct kvfs_nvme_target target;
        if (!nvme_target_of(device_fds[i], &target))
            continue;
        struct nvme_remote *remote = remote_of(array, i, &target);
        if (!remote)
            return -ENOMEM;
        atomic_store(&array->devices[i].remote, remote);
    }
    for (struct nvme_host *host = array->hosts; host; host = host->next) {
        int r = -pthread_create(&host->thread, NULL, host_main, host);
        if (r < 0)
            return r;
        host->started = true;
    }
    for (struct nvme_host *host = array->hosts; host && wait; host = host->next) {
        pthread_mutex_lock(&host->lock);
        while (atomic_load(&host->state) == NVME_HOST_STARTING) /* the host has a deadline of its own */
            pthread_cond_wait(&host->changed, &host->lock);
        bool up = atomic_load(&host->state) == NVME_HOST_UP;
        snprintf(error, error_size, "%.80s:%u: %s", host->target.host, host->target.port, host->reason);
        pthread_mutex_unlock(&host->lock);
        if (!up)
            return -ENOTCONN;
        for (struct nvme_remote *remote = host->remotes; remote; remote = remote->next)
            if (!atomic_load(&remote->usable)) {
                pthread_mutex_lock(&host->lock);
                snprintf(error, error_size, "%.80s:%u: %s", host->target.host, host->target.port, remote->reason);
                pthread_mutex_unlock(&host->lock);
                return -ENODEV;
            }
    }
    return 0;
}

void nvme_hosts_stop(struct kvfs_array *array) {
    for (struct nvme_host *host = array->hosts; host; host = host->next) {
        atomic_store(&host->stopping, true);
        wake_fd(host->wake_fd);
    }
    while (array->hosts) {
        struct nvme_host *host = array->hosts;
        array->hosts = host->next;
        if (host->started)
            pthread_join(host->thread, NULL);
        for (struct nvme_remote *remote = atomic_load(&host->remotes), *next; remote; remote = next) {
            next = remote->next;
            free(remote);
        }
        if (host->wake_fd >= 0)
            close(host->wake_fd);
        pthread_mutex_destroy(&host->lock);
        pthread_cond_destroy(&host->changed);
        free(host);
    }
}

int nvme_device_message(struct kvfs_array *array, uint32_t device, char *out, uint32_t capacity) {
    if (device >= array->device_count || capacity == 0)
        return -ERANGE;
    struct nvme_remote *remote = array->devices[device].remote;
    out[0] = 0;
    if (!remote)
        return 1;
    pthread_mutex_lock(&remote->host->lock);
    snprintf(out, capacity, "%s", remote->message);
    pthread_mutex_unlock(&remote->host->lock);
    return atomic_load(&remote->usable) && atomic_load(&remote->host->state) == NVME_HOST_UP;
}
