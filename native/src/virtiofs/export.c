/* Exports: the life of guests, from the listening socket of a front end to the end of their threads. */
#include "base/descriptor.h"
#include "virtiofs/virtio.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

static void guest_free(struct guest *guest) {
    for (uint32_t i = 0; i < guest->queue_count; i++)
        virtqueue_free(&guest->queues[i]);
    porters_put(guest->porters);
    transport_free(guest->transport);
    if (guest->listen_fd >= 0)
        close(guest->listen_fd);
    if (guest->stop_fd >= 0)
        close(guest->stop_fd);
    free(guest);
}

int guest_new(struct kvfs_plane *plane, const struct kvfs_virtiofs_config *config, struct guest **out) {
    struct guest *guest = calloc(1, sizeof(*guest));
    struct transport *transport = calloc(1, sizeof(*transport));
    if (!guest || !transport) {
        free(guest);
        free(transport);
        return -ENOMEM;
    }
    guest->transport = transport;
    guest->config = *config;
    guest->queue_count = config->queue_count + 1;
    guest->listen_fd = -1;
    guest->owner.of = 1;
    guest->stop_fd = descriptor_above(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
    transport->plane = plane;
    transport->ops = &guest_ops;
    transport->guest = guest;
    transport->user = KVFS_USER_GUEST;
    transport->max_read = plane->config.max_read;
    int r = guest->stop_fd < 0 ? -errno : 0;
    if (!(guest->porters = porters_new()))
        r = -ENOMEM;
    for (uint32_t i = 0; i < guest->queue_count; i++)
        virtqueue_init(&guest->queues[i], i);
    for (uint32_t i = 0; i < plane->config.server_threads && r == 0; i++) {
        int fd = descriptor_above(epoll_create1(EPOLL_CLOEXEC));
        r = fd < 0 ? -errno : server_init(transport, i, fd);
        struct server *server = &transport->servers[i];
        if (r == 0 && !(server->chain = malloc(sizeof(*server->chain))))
            r = -ENOMEM;
        server->reader = true;
        transport->server_count = i + 1;
    }
    if (r < 0)
        guest_free(guest);
    else
        *out = guest;
    return r;
}

static bool stopped(const struct guest *guest) { return atomic_load(&guest->stopping) || atomic_load(&guest->transport->plane->stopping); }

/* New connections are refused, and waiting ones are turned away like other front ends. If we closed the listening socket, the kernel would close
 * theirs. */
static void listen_end(struct guest *guest) {
    int fd = -1;
    shutdown(guest->listen_fd, SHUT_RDWR);
    while (porters_have_room(guest->porters) && (fd = descriptor_above(accept4(guest->listen_fd, NULL, NULL, SOCK_CLOEXEC))) >= 0)
        porter_end(porter_start(guest->porters, &guest->config, fd), fd);
    if (fd < 0 && porters_have_room(guest->porters))
        close(guest->listen_fd);
    guest->listen_fd = -1; /* a descriptor left open goes with the process, whose end then waits for nothing */
}

/* With transports_lock held. */
static void guest_ended(struct kvfs_plane *plane, struct guest *guest) {
    plane->guests->all[guest->number] = NULL;
    atomic_fetch_sub(&plane->fuse->guest_count, 1);
    guest->next = plane->guests->ended;
    plane->guests->ended = guest;
}

static void *guest_main(void *argument) {
    struct guest *guest = argument;
    struct kvfs_plane *plane = guest->transport->plane;
    while (!stopped(guest)) {
        bool room = porters_have_room(guest->porters);
        struct pollfd polls[2] = {{.fd = room ? guest->listen_fd : -1, .events = POLLIN}, {.fd = guest->stop_fd, .events = POLLIN}};
        if (poll(polls, 2, room ? 60000 : 1000) <= 0 || !(polls[0].revents & POLLIN))
            continue;
        int fd = descriptor_above(accept4(guest->listen_fd, NULL, NULL, SOCK_CLOEXEC));
        if (fd < 0) { /* gone already, or no descriptor left: the socket stays readable */
            bool none = errno == EMFILE || errno == ENFILE;
            if (none)
                guest_error(guest, UINT32_MAX, -errno);
            usleep(none ? 1000000 : 10000);
            continue;
        }
        atomic_store(&guest->connected, 1);
        atomic_fetch_add(&guest->connections, 1);
        vhost_user_serve(guest, fd);
        atomic_store(&guest->connected, 0);
    }
    listen_end(guest);
    transport_stop(guest->transport);
    pthread_mutex_lock(&plane->fuse->transports_lock);
    guest_ended(plane, guest);
    pthread_mutex_unlock(&plane->fuse->transports_lock);
    return NULL;
}

/* Frees the stacks and rings of guests that have ended. The rest goes with the plane, as late replies may still look for a guest. */
static void guests_reap(struct kvfs_plane *plane) {
    pthread_mutex_lock(&plane->fuse->transports_lock);
    struct guest *guest = plane->guests->ended;
    pthread_mutex_unlock(&plane->fuse->transports_lock);
    for (; guest; guest = guest->next) {
        if (!guest->threaded)
            continue;
        pthread_join(guest->thread, NULL);
        guest->threaded = false;
        for (uint32_t i = 0; i < guest->transport->server_count; i++)
            if (ring_idle(&guest->transport->servers[i].io.ring))
                ring_free(&guest->transport->servers[i].io.ring);
    }
}

int kvfs_virtiofs_add(struct kvfs_plane *plane, int listen_fd, const struct kvfs_virtiofs_config *config) {
    if (config->queue_count == 0 || config->queue_count >= QUEUES_MAX || config->queue_size_max < 8 || config->queue_size_max > QUEUE_SIZE_MAX ||
        config->queue_size_max & (config->queue_size_max - 1) || !config->tag[0] || config->memory_type_count > KVFS_VIRTIOFS_MEMORY_TYPES_MAX)
        return -EINVAL;
    guests_reap(plane);
    struct guest *guest;
    int r = guest_new(plane, config, &guest);
    if (r < 0)
        return r;
    guest->listen_fd = fcntl(listen_fd, F_DUPFD_CLOEXEC, DESCRIPTOR_MIN);
    int flags = guest->listen_fd < 0 ? -1 : fcntl(guest->listen_fd, F_GETFL);
    if (flags < 0 || fcntl(guest->listen_fd, F_SETFL, flags | O_NONBLOCK) < 0)
        r = -errno;
    pthread_mutex_lock(&plane->fuse->transports_lock);
    uint32_t number = 0;
    while (number < KVFS_VIRTIOFS_MAX && plane->guests->all[number])
        number++;
    if (r == 0 && number == KVFS_VIRTIOFS_MAX)
        r = -EUSERS;
    if (r == 0) {
        guest->number = number;
        guest->transport->user = KVFS_USER_GUEST + number;
        plane->guests->all[number] = guest;
        atomic_fetch_add(&plane->fuse->guest_count, 1);
    }
    pthread_mutex_unlock(&plane->fuse->transports_lock);
    if (r < 0) {
        guest_free(guest);
        return r;
    }
    r = servers_start(guest->transport);
    if (r == 0)
        r = -pthread_create(&guest->thread, NULL, guest_main, guest);
    if (r < 0) { /* some threads failed to start: the others end, and the guest is kept, as somebody may know it already */
        transport_stop(guest->transport);
        pthread_mutex_lock(&plane->fuse->transports_lock);
        guest_ended(plane, guest);
        pthread_mutex_unlock(&plane->fuse->transports_lock);
        return r;
    }
    guest->threaded = true;
    return (int)number;
}

/* With transports_lock held. */
static struct guest *guest_at(struct kvfs_plane *plane, int number) {
    return number >= 0 && number < KVFS_VIRTIOFS_MAX ? plane->guests->all[number] : NULL;
}

static void guest_ask_stop(struct guest *guest) {
    atomic_store(&guest->stopping, true);
    wake_fd(guest->stop_fd);
}

int kvfs_virtiofs_remove(struct kvfs_plane *plane, int number) {
    pthread_mutex_lock(&plane->fuse->transports_lock);
    struct guest *guest = guest_at(plane, number);
    if (guest)
        guest_ask_stop(guest);
    pthread_mutex_unlock(&plane->fuse->transports_lock);
    return guest ? 0 : -ENOENT;
}

int guests_create(struct kvfs_plane *plane) {
    plane->guests = calloc(1, sizeof(*plane->guests));
    return plane->guests ? 0 : -ENOMEM;
}

void guests_stop(struct kvfs_plane *plane) {
    pthread_mutex_lock(&plane->fuse->transports_lock);
    for (uint32_t i = 0; i < KVFS_VIRTIOFS_MAX; i++)
        if (plane->guests->all[i])
            guest_ask_stop(plane->guests->all[i]);
    pthread_mutex_unlock(&plane->fuse->transports_lock);
    for (uint32_t i = 0; i < KVFS_VIRTIOFS_MAX; i++) {
        pthread_mutex_lock(&plane->fuse->transports_lock);
        struct guest *guest = plane->guests->all[i];
        pthread_mutex_unlock(&plane->fuse->transports_lock);
        if (guest && guest->threaded) {
            pthread_join(guest->thread, NULL);
            guest->threaded = false;
        }
    }
    guests_reap(plane);
}

void guests_free(struct kvfs_plane *plane) {
    while (plane->guests->ended) {
        struct guest *guest = plane->guests->ended;
        plane->guests->ended = guest->next;
        guest_free(guest);
    }
    free(plane->guests);
}

int kvfs_virtiofs_statistics(struct kvfs_plane *plane, int number, struct kvfs_virtiofs_statistics *out) {
    memset(out, 0, sizeof(*out));
    pthread_mutex_lock(&plane->fuse->transports_lock);
    struct guest *guest = guest_at(plane, number);
    if (guest) {
        out->connected = atomic_load(&guest->connected);
        for (uint32_t i = 0; i < guest->queue_count; i++)
            out->queues_running += atomic_load(&guest->queues[i].running);
#define TAKE(field) out->field = atomic_load_explicit(&guest->field, memory_order_relaxed)
        TAKE(connections);
        TAKE(requests);
        TAKE(bytes_read);
        TAKE(bytes_written);
        TAKE(zero_copy_bytes);
        TAKE(copied_bytes);
        TAKE(protocol_errors);
        TAKE(descriptor_errors);
        TAKE(io_errors);
#undef TAKE
    }
    pthread_mutex_unlock(&plane->fuse->transports_lock);
    return guest ? 0 : -ENOENT;
}
