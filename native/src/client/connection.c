/* A connection with a daemon: made, found again after a restart, and let go. */
#include "base/descriptor.h"
#include "client/client.h"
#include "io/nvme/tcp.h"

#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include <sys/syscall.h>
#include <unistd.h>

#define WELCOME_MAX (256u << 20)
/* A daemon that did not answer is not asked again for four timeouts, as a device is not; at most this long. */
#define SILENT_TIMEOUTS 4u
#define SILENT_MAX_MS 10000u
#define AWAIT_PAUSE_US 20000 /* between two looks for the daemon that is to come */

static _Thread_local const atomic_bool *wait_over;

/* False: devices owe answers, and stay. */
static bool devices_close(struct connection *connection) {
    bool owed = false;
    while (connection->idle) {
        struct lane *lane = connection->idle;
        connection->idle = lane->next;
        owed = !lane_free(lane) || owed;
    }
    if (owed || !connection->fds)
        return !owed;
    nvme_hosts_stop(&connection->array);
    for (uint32_t i = 0; i < connection->array.device_count; i++)
        if (connection->fds[i] >= 0)
            close(connection->fds[i]);
    free(connection->fds);
    connection->fds = NULL;
    return true;
}

static void connection_free(struct connection *connection) {
    bool owed = !devices_close(connection);
    if (connection->socket >= 0)
        close(connection->socket);
    if (connection->descriptor >= 0)
        close(connection->descriptor);
    free(connection->payload);
    kvfs_table_detach(connection->table);
    kvfs_pod_detach(connection->pod);
    foreign_known_free(connection->known);
    connection->table = NULL;
    if (owed)
        return;
    for (struct late_write *write = atomic_exchange(&connection->landed, NULL), *next; write; write = next) {
        next = write->next;
        free(write);
    }
    array_free(&connection->array);
    free(connection);
}

void connection_put(struct connection *connection) {
    if (!connection)
        return;
    unsigned before = atomic_fetch_sub(&connection->refs, 1);
    assert(before > 0);
    if (before == 1)
        connection_free(connection);
}

void connection_lighten(struct connection *connection) { atomic_fetch_add(&connection->light, 1); }

void connection_put_light(struct connection *connection) {
    if (!connection)
        return;
    atomic_fetch_sub(&connection->light, 1); /* first: client_prune() reads these two in the other order */
    connection_put(connection);
}

/* ---- the welcome ---- */

static bool is_alignment(uint32_t bytes) { return bytes && bytes <= PAGE && (bytes & (bytes - 1)) == 0; }

/* statx's direct I/O alignment (Linux 6.1), which the C library's headers may not know yet. 512 is the block layer's default, for a driver that has not
 * said what it takes. Then memory has to be aligned to the driver's blocks. zram's have 4096 bytes: it writes beside memory that is less aligned, and
 * returns other bytes. */
static uint32_t memory_alignment(int fd) {
    union {
        uint8_t bytes[256];
        uint32_t words[64];
    } st;
    memset(&st, 0, sizeof(st));
    const uint32_t mask_dioalign = 0x2000, at = 0x98 / 4;
    if (syscall(SYS_statx, fd, "", AT_EMPTY_PATH, mask_dioalign, &st) < 0 || !(st.words[0] & mask_dioalign))
        return 512;
    uint32_t memory = st.words[at], block = st.words[at + 1];
    if (!is_alignment(memory))
        return 512;
    return memory == 512 && is_alignment(block) && block > memory ? block : memory;
}

static int connection_fill(struct kvfs_client *client, struct connection *connection, const struct wire_welcome *w, const uint8_t *rest,
                           uint64_t size) {
    struct kvfs_array *array = &connection->array;
    uint64_t members = (uint64_t)w->segment_count * w->stripe_width;
    if (w->device_count == 0 || w->device_count > KVFS_DEVICES_MAX || w->stripe_width == 0 || w->stripe_width > KVFS_STRIPE_WIDTH_MAX ||
        w->stripe_width > w->device_count || w->stripe_unit < 16384 || w->stripe_unit % PAGE || w->zone_size == 0 || w->zone_size % w->stripe_unit ||
        w->zone_size / PAGE > UINT32_MAX / w->stripe_width || w->segment_count == 0 || size != 8ull * w->device_count + 8 * members)
        return client_fail(-EPROTO, "%s: the daemon's welcome makes no sense: %u devices, stripe width %u, %u segments, %llu bytes", client->pool,
                           w->device_count, w->stripe_width, w->segment_count, (unsigned long long)size);
    const struct geometry geometry = {.secret = w->secret,
                                      .mount_epoch = w->mount_epoch,
                                      .zone_size = w->zone_size,
                                      .stripe_unit = w->stripe_unit,
                                      .stripe_width = w->stripe_width,
                                      .segment_count = w->segment_count};
    array->io_timeout_ms = client->options.timeout_ms;
    array->inline_max = 256 << 10;
    array->fail_fast = true;
    connection->verify = !(client->options.flags & KVFS_NO_VERIFY);
    int r = array_init(array, &geometry, w->device_count);
    connection->fds = malloc(w->device_count * sizeof(int));
    for (uint32_t i = 0; connection->fds && i < w->device_count; i++)
        connection->fds[i] = -1;
    if (r < 0 || !connection->fds)
        return client_fail(-ENOMEM, "%s: no memory for %u segments", client->pool, w->segment_count);
    for (uint32_t i = 0; i < w->device_count; i++) {
        memcpy(&array->devices[i].zones_offset, rest + 8ull * i, 8);
    }
    memcpy(array->members, rest + 8ull * w->device_count, members * sizeof(*array->members));
    for (uint64_t i = 0; i < members; i++)
        if (array->members[i].device >= w->device_count)
            return client_fail(-EPROTO, "%s: the daemon's welcome puts segment %llu on device %u of %u", client->pool,
                               (unsigned long long)(i / w->stripe_width), array->members[i].device, w->device_count);
    memcpy(connection->uuid, w->pool_uuid, sizeof(connection->uuid));
    connection->writable = w->writable && !(client->options.flags & KVFS_READ_ONLY);
    connection->reservation_ms = w->reservation_ms;
    connection->in_pod = w->pod == 1;
    connection->held = w->held == 1;
    return 0;
}

static int frame_check(struct kvfs_client *client, const struct wire_frame *frame, uint16_t type, uint32_t size_max) {
    if (frame->type != type || frame->size > size_max || frame->reserved)
        return client_fail(-EPROTO, "%s: the daemon answered with a frame of type %u and %u bytes, expected type %u and at most %u", client->pool,
                           frame->type, frame->size, type, size_max);
    return 0;
}

/* The daemon's refusal: its message. */
static int refusal(struct kvfs_client *client, int fd, const struct wire_frame *frame, uint64_t deadline_ns) {
    char text[512] = "";
    uint32_t size = (uint32_t)min_u64(frame->size, sizeof(text) - 1);
    if (frame->status < -KVFS_WIRE_ERRNO_MAX)
        return client_fail(-EPROTO, "%s: the daemon refuses with status %d", client->pool, frame->status);
    if (wire_receive_all(fd, text, size, deadline_ns, NULL, NULL) < 0)
        text[0] = 0;
    return client_fail(frame->status, "%s: %s", client->pool, text[0] ? text : strerror(-frame->status));
}

static int descriptors(struct kvfs_client *client, struct connection *connection, uint64_t deadline_ns) {
    uint32_t devices = connection->array.device_count, wanted = 1 + devices + connection->in_pod, have = 0;
    int table_fd = -1, pod_fd = -1, r = 0;
    while (have < wanted && r == 0) {
        struct wire_frame frame;
        int fds[KVFS_WIRE_FDS_MAX];
        uint32_t count = 0;
        r = wire_receive_all(connection->socket, &frame, sizeof(frame), deadline_ns, fds, &count);
        if (r == -EMFILE || r == -ENFILE)
            client_fail(r, "%s: no descriptor for device %u of %u: %s", client->pool, have ? have - 1 : 0, devices, descriptor_reason(-r));
        if (r == 0)
            r = frame_check(client, &frame, WIRE_DESCRIPTORS, 0);
        if (r == 0 && (count == 0 || have + count > wanted))
            r = client_fail(-EPROTO, "%s: the daemon sent %u descriptors with %u of %u there", client->pool, count, have, wanted);
        for (uint32_t i = 0; i < count; i++) {
            if (r < 0)
                close(fds[i]);
            else if (have++ == 0)
                table_fd = fds[i];
            else if (have == devices + 2)
                pod_fd = fds[i];
            else
                connection->fds[have - 2] = fds[i];
        }
    }
    if (r == 0) {
        r = kvfs_table_attach(table_fd, connection->array.geometry.secret, &connection->table);
        if (r == 0 && kvfs_table_mount_epoch(connection->table) != connection->array.geometry.mount_epoch)
            r = -EBADMSG;
        if (r < 0)
            client_fail(r = -EPROTO, "%s: the daemon's block table is not of this version, or of another mount", client->pool);
    }
    if (r == 0 && connection->in_pod) {
        r = kvfs_pod_attach(pod_fd, connection->array.geometry.secret, &connection->pod);
        if (r < 0)
            r = client_fail(-EPROTO, "%s: the daemon's pod map is not of this version: %s", client->pool, strerror(-r));
        else if (!(connection->known = foreign_known_new()))
            r = client_fail(-ENOMEM, "%s: no memory for blocks of other nodes", client->pool);
    }
    if (table_fd >= 0)
        close(table_fd);
    if (pod_fd >= 0)
        close(pod_fd);
    return r;
}

/* Say hello, and take in all that the daemon hands out. *refused: it does not speak this version. */
static int connection_welcome(struct kvfs_client *client, struct connection *connection, uint32_t version, uint64_t deadline, bool *refused) {
    struct wire_hello hello = {
        .magic = "KVFSCLI1", .version = version, .flags = client->options.flags & KVFS_READ_ONLY, .timeout_ms = client->options.timeout_ms};
    struct wire_frame frame;
    struct wire_welcome welcome;
    uint8_t *rest = NULL;
    int r = wire_send_all(connection->socket, &hello, sizeof(hello), NULL, 0, deadline);
    if (r == 0)
        r = wire_receive_all(connection->socket, &frame, sizeof(frame), deadline, NULL, NULL);
    if (r == -ETIMEDOUT)
        client_fail(r, "%s: the daemon gave no answer in %u ms", client->pool, client->options.timeout_ms);
    else if (r < 0)
        client_fail(r = -ENOTCONN, "%s: the daemon hung up: a daemon without native clients, or one that is ending", client->pool);
    else if (frame.type == WIRE_HELLO && frame.status < 0)
        *refused = (r = refusal(client, connection->socket, &frame, deadline)) == -EPROTO;
    else
        r = frame_check(client, &frame, WIRE_HELLO, WELCOME_MAX);
    if (r == 0 && !(rest = calloc(1, frame.size > sizeof(welcome) ? frame.size : sizeof(welcome))))
        r = client_fail(-ENOMEM, "%s: no memory for a welcome of %u bytes", client->pool, frame.size);
    if (r == 0) {
        r = wire_receive_all(connection->socket, rest, frame.size, deadline, NULL, NULL);
        if (r < 0)
            client_fail(r, "%s: the daemon broke off its welcome: %s", client->pool, strerror(-r));
    }
    if (r == 0) {
        memcpy(&welcome, rest, sizeof(welcome));
        connection->version = version;
        connection->user = frame.id;
        connection->own_user = geteuid();
        if (welcome.version != version)
            r = client_fail(-EPROTO, "%s: the daemon speaks version %u, this library %u", client->pool, welcome.version, version);
        else if (frame.size < sizeof(welcome))
            r = client_fail(-EPROTO, "%s: the daemon's welcome has %u bytes", client->pool, frame.size);
    }
    if (r == 0)
        r = connection_fill(client, connection, &welcome, rest + sizeof(welcome), frame.size - sizeof(welcome));
    if (r == 0) {
        r = descriptors(client, connection, deadline);
        if (r == -ETIMEDOUT || r == -ENOTCONN)
            client_fail(r, "%s: the daemon broke off before its last descriptor: %s", client->pool, strerror(-r));
    }
    free(rest);
    return r;
}

/* In the newest version that both speak. A daemon hangs up on a hello that it refuses, so each is said on a socket of its own. */
static int connection_agree(struct kvfs_client *client, struct connection *connection, uint64_t deadline) {
    char reason[512] = "";
    for (uint32_t version = KVFS_WIRE_VERSION;; version--) {
        bool refused = false;
        int r = connection_welcome(client, connection, version, deadline, &refused);
        if (!refused)
            return r;
        if (version == KVFS_WIRE_VERSION)
            snprintf(reason, sizeof(reason), "%s", kvfs_error());
        if (version == KVFS_WIRE_OLDEST)
            return client_fail(-EPROTO, "%s; this library speaks versions %u to %u", reason, KVFS_WIRE_OLDEST, KVFS_WIRE_VERSION);
        close(connection->socket);
        connection->socket = socket_open(client, deadline);
        if (connection->socket < 0)
            return connection->socket;
    }
}

static int devices_open(struct kvfs_client *client, struct connection *connection) {
    for (uint32_t i = 0; i < connection->array.device_count; i++) {
        struct device *device = &connection->array.devices[i];
        device->fd = connection->fds[i];
        device_probe(device);
        uint32_t alignment = memory_alignment(device->fd);
        if (alignment > connection->memory_alignment)
            connection->memory_alignment = alignment;
    }
    char reason[NVME_REASON];
    int r = nvme_hosts_start(&connection->array, connection->fds, false, reason, sizeof(reason)); /* one that is not there: misses, not an error */
    return r < 0 ? client_fail(r, "%s: %s", client->pool, reason) : 0;
}

static struct connection *connection_new(void) {
    struct connection *connection = calloc(1, sizeof(*connection));
    if (!connection)
        return NULL;
    atomic_store(&connection->refs, 1);
    pthread_mutex_init(&connection->lock, NULL);
    pthread_mutex_init(&connection->send_lock, NULL);
    pthread_mutex_init(&connection->socket_lock, NULL);
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&connection->lane_idle, &attributes);
    pthread_cond_init(&connection->answered, &attributes);
    connection->socket = connection->descriptor = -1;
    return connection;
}

int connection_open(struct kvfs_client *client, struct connection **out) {
    uint64_t deadline = now_ns() + client->options.timeout_ms * 1000000ull, listener[4], after[4];
    int fd;
    for (;;) { /* a daemon that comes meanwhile is another one */
        listener_of(client, listener);
        fd = socket_open(client, deadline);
        if (fd < 0)
            return fd;
        listener_of(client, after);
        if (memcmp(listener, after, sizeof(after)) == 0 || now_ns() >= deadline)
            break;
        close(fd);
    }
    struct connection *connection = connection_new();
    if (!connection) {
        close(fd);
        return client_fail(-ENOMEM, "%s: no memory for a session", client->pool);
    }
    connection->socket = fd;
    memcpy(connection->listener, listener, sizeof(listener));
    int r = connection_agree(client, connection, deadline);
    struct lane *lane;
    if (r == 0)
        r = devices_open(client, connection);
    if (r == 0 && (r = lane_take(client, connection, &lane)) == 0) /* a connection that can do no I/O is none */
        lane_give(lane);
    if (r < 0)
        connection_put(connection);
    else
        *out = connection;
    return r;
}

int connection_first(struct kvfs_client *client) {
    uint64_t until = now_ns() + client->options.timeout_ms * 1000000ull;
    int r = connection_open(client, &client->connection);
    /* One that took no connection and answers on the mount lets no client in; or it has come, or gone, just now. */
    for (uint32_t tries = 0; r == -ENOTCONN && tries < CLIENT_RETRIES; tries++) {
        int answer = mount_await(client, until);
        if (answer == -ETIMEDOUT)
            return client_fail(r, "%s: no daemon answers: the mount waits for its next one, and none has come in %u ms", client->path,
                               client->options.timeout_ms);
        if (answer < 0)
            break;
        r = connection_open(client, &client->connection);
    }
    return r;
}

/* ---- the connection of a call ---- */

/* client->lock is held: connections of daemons that are gone go when nothing needs them. */
void client_prune(struct kvfs_client *client) {
    for (struct connection **link = &client->retired; *link;) {
        struct connection *connection = *link;
        bool owed = false;
        unsigned refs = atomic_load(&connection->refs);
        if (refs > 1 + atomic_load(&connection->light) || (connection_overlaps(connection, NULL, 0, &owed), owed)) {
            link = &connection->next;
            continue;
        }
        *link = connection->next;
        devices_close(connection); /* a subscription may keep the rest */
        connection_put(connection);
    }
}

void client_leave(struct kvfs_client *client) {
    struct connection *old = client->connection, *none = old->fds ? connection_new() : NULL;
    if (!none)
        return;
    memcpy(none->uuid, old->uuid, sizeof(none->uuid));
    memcpy(none->listener, old->listener, sizeof(none->listener));
    none->array.geometry = old->array.geometry;
    none->memory_alignment = old->memory_alignment;
    none->verify = old->verify;
    none->gone = none->closed = true;
    none->held = old->held && !old->closed;
    old->next = client->retired;
    client->retired = old;
    client->connection = none;
    client_prune(client);
}

int connection_get(struct kvfs_client *client, struct connection **out) {
    if (client->pid != getpid())
        return client_fail(-ECHILD, "%s: this client was connected by process %d; after fork() connect again", client->path, (int)client->pid);
    pthread_mutex_lock(&client->lock);
    struct connection *connection = client->connection;
    connection_poll(connection);
    int r = 0;
    if (connection->gone) {
        struct connection *fresh = NULL;
        /* A new daemon listens before anything can be changed through it: while nobody listens, the old table is right. */
        r = now_ns() < client->silent_until_ns ? client_fail(-ETIMEDOUT, "%s: the daemon gives no answer", client->pool)
                                               : connection_open(client, &fresh);
        /* A mount that was asked is not asked again before it has answered. */
        if (r == -ETIMEDOUT && client->way != BY_MOUNT && now_ns() >= client->silent_until_ns)
            client->silent_until_ns = now_ns() + min_u64(SILENT_TIMEOUTS * client->options.timeout_ms, SILENT_MAX_MS) * 1000000ull;
        if (r == 0 && memcmp(fresh->uuid, connection->uuid, sizeof(fresh->uuid)) != 0) {
            connection_put(fresh);
            r = client_fail(-ESTALE, "%s: another pool is there now: it was formatted again", client->pool);
        } else if (r == 0) {
            connection->next = client->retired;
            client->retired = connection;
            client_prune(client);
            client->connection = connection = fresh;
            TALLY(client, reconnects, 1);
        } else if (r == -ENOTCONN && connection->closed) {
            client_leave(client);
            r = client_fail(-ENOTCONN, "%s: unmounted", client->path);
        } else if (connection->verify && !connection->closed && (r == -ENOTCONN || (r == -ETIMEDOUT && listener_is_same(client, connection)))) {
            connection->silent = r == -ETIMEDOUT;
            r = 0;
        }
    }
    if (r == 0) {
        atomic_fetch_add(&connection->refs, 1);
        *out = connection;
    }
    pthread_mutex_unlock(&client->lock);
    return r;
}

int connection_get_at_once(struct kvfs_client *client, struct connection **out) {
    if (client->pid != getpid())
        return client_fail(-ECHILD, "%s: this client was connected by process %d; after fork() connect again", client->path, (int)client->pid);
    /* Others hold it for a moment, or, while a daemon is looked for, for a deadline. */
    for (uint32_t tries = 0; pthread_mutex_trylock(&client->lock) != 0; tries++) {
        if (tries == 50)
            return -EAGAIN;
        sched_yield();
    }
    connection_poll(client->connection);
    int r = client->connection->gone ? -EAGAIN : 0;
    if (r == 0) {
        *out = client->connection;
        atomic_fetch_add(&(*out)->refs, 1);
    }
    pthread_mutex_unlock(&client->lock);
    return r;
}

/* ---- the daemon after one that has ended ---- */

void daemon_wait_over(const atomic_bool *over) { wait_over = over; }

static bool wait_is_over(void) { return wait_over && atomic_load(wait_over); }

/* No daemon was found, for that reason. Pause, and return true, if one is to come and there is time. */
static bool daemon_await(struct kvfs_client *client, struct daemon_wait *wait, int error) {
    pthread_mutex_lock(&client->lock);
    const struct connection *connection = client->connection;
    /* A mount that is asked answers once its next daemon does. */
    bool comes = connection->held && connection->gone && (!connection->closed || !connection->fds) &&
                 (error == -ENOTCONN || (error == -ETIMEDOUT && client->way == BY_MOUNT));
    pthread_mutex_unlock(&client->lock);
    if (!comes || !wait || wait_is_over())
        return false;
    uint64_t now = now_ns();
    if (!wait->until_ns)
        wait->until_ns = now + client->options.timeout_ms * 1000000ull;
    if (now >= wait->until_ns)
        return false;
    usleep((useconds_t)min_u64(AWAIT_PAUSE_US, (wait->until_ns - now) / 1000 + 1));
    return true;
}

static int daemon_try(struct kvfs_client *client, struct connection **out) {
    int r = connection_get(client, out);
    if (r < 0)
        return r;
    if ((*out)->gone && (*out)->silent)
        r = client_fail(-ETIMEDOUT, "%s: the daemon gives no answer: nothing can be stored, deleted or leased until it does", client->path);
    else if ((*out)->gone)
        r = client_fail(-ENOTCONN, "%s: the daemon is gone: nothing can be stored, deleted or leased until it is back", client->path);
    if (r < 0) {
        connection_put(*out);
        *out = NULL;
    }
    return r;
}

int daemon_get(struct kvfs_client *client, struct daemon_wait *wait, struct connection **out) {
    int r;
    do
        r = daemon_try(client, out);
    while (r < 0 && daemon_await(client, wait, r));
    return r;
}

bool daemon_retry(const struct connection *connection, struct daemon_wait *wait, int error) {
    if (error != -ENOTCONN || !connection->held || !connection->gone || connection->closed || wait_is_over())
        return false;
    return wait->retries++ < CLIENT_RETRIES;
}

int writer_get(struct kvfs_client *client, struct daemon_wait *wait, struct connection **out) {
    if (client->options.flags & KVFS_READ_ONLY)
        return client_fail(-EROFS, "%s: connected for reading only", client->path);
    int r = daemon_get(client, wait, out);
    if (r == 0 && !(*out)->writable) {
        connection_put(*out);
        r = client_fail(-EROFS, "%s: the pool is mounted read-only", client->path);
    }
    return r;
}
