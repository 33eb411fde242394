/* A mount that outlives this process: another one keeps its descriptors (kvfs/hold), and the next daemon takes them.
 *
 * The kernel knows nothing of the change. It sends the requests that had no answer again, with bit 63 in their numbers, once it is asked to. Those that
 * it has not sent yet just wait. It looks every name up again, as renames of the last second may be undone. */
#include "fuse/fuse.h"

#include <unistd.h>

#define MINOR_RESEND 40
#define MINOR_MAX 1000 /* nonsense beyond */

int kvfs_fuse_hold(struct kvfs_plane *plane, int written_fd) {
    assert(!plane->fuse->held);
    int r = written_keep(plane, written_fd);
    plane->fuse->held = r == 0;
    return r;
}

static struct transport *host_transport(struct kvfs_plane *plane) {
    for (uint32_t i = 0; i < TRANSPORTS_MAX; i++)
        if (plane->fuse->transports[i] && !plane->fuse->transports[i]->guest)
            return plane->fuse->transports[i];
    return NULL;
}

int kvfs_fuse_held(struct kvfs_plane *plane, int *fds, uint32_t capacity, struct kvfs_held *out) {
    const struct transport *transport = host_transport(plane);
    if (!transport || !atomic_load(&transport->initialized))
        return -EAGAIN;
    if (transport->minor < MINOR_RESEND)
        return -EOPNOTSUPP;
    if (transport->server_count > capacity)
        return -ENOSPC;
    *out = (struct kvfs_held){.version = KVFS_HELD_VERSION,
                              .minor = transport->minor,
                              .flags = transport->flags,
                              .max_read = transport->max_read,
                              .max_write = plane->config.max_write};
    for (uint32_t i = 0; i < transport->server_count; i++)
        fds[i] = transport->servers[i].fd;
    return (int)transport->server_count;
}

int kvfs_held_check(const void *state, uint32_t size, uint32_t count, struct kvfs_versions *out) {
    struct kvfs_held held = {0};
    memcpy(&held, state, min_u64(size, sizeof(held)));
    *out = (struct kvfs_versions){held.version, KVFS_HELD_OLDEST, KVFS_HELD_VERSION};
    if (held.version < KVFS_HELD_OLDEST || held.version > KVFS_HELD_VERSION)
        return -EPROTONOSUPPORT;
    if (size != sizeof(held))
        return -EBADMSG;
    if (!flags_are_known(held.flags))
        return -EPROTO;
    bool reserved = false;
    for (uint32_t i = 0; i < sizeof(held.reserved) / sizeof(held.reserved[0]); i++)
        reserved |= held.reserved[i] != 0;
    if (!count || count > SERVERS_MAX || reserved || held.minor < MINOR_RESEND || held.minor > MINOR_MAX || held.max_read < KVFS_PAGE_SIZE ||
        held.max_read > (READ_SLOTS - 1) * CHUNK_SIZE || held.max_write < KVFS_PAGE_SIZE || held.max_write > CHUNK_SIZE)
        return -EINVAL;
    return 0;
}

static int held_check(struct kvfs_plane *plane, uint32_t count, const struct kvfs_held *held) {
    struct kvfs_versions versions;
    int r = kvfs_held_check(held, sizeof(*held), count, &versions);
    if (r < 0)
        return r;
    return atomic_load(&plane->fuse->guest_count) && !(held->flags & FUSE_AUTO_INVAL_DATA) ? -EOPNOTSUPP : 0;
}

int kvfs_fuse_take(struct kvfs_plane *plane, const int *fds, uint32_t count, const struct kvfs_held *held) {
    assert(plane->fuse->held);
    int r = held_check(plane, count, held);
    if (r < 0) {
        for (uint32_t i = 0; i < count; i++)
            close(fds[i]);
        return r;
    }
    return transport_take(plane, fds, count, held);
}

int kvfs_fuse_idmap(struct kvfs_plane *plane) {
    const struct transport *transport = host_transport(plane);
    return transport && atomic_load(&transport->initialized) && transport->idmap;
}

void kvfs_fuse_leave(struct kvfs_plane *plane, uint32_t timeout_ms) {
    struct transport *transport = host_transport(plane);
    atomic_store(&plane->leaving, true);
    atomic_store(&plane->fuse->leave_until_ns, now_ns() + timeout_ms * 1000000ull + 1);
    for (uint32_t i = 0; transport && i < transport->server_count; i++)
        server_wake(&transport->servers[i]);
}
