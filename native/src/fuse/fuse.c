/* The plane's FUSE part: made, started, and taken down again. */
#include "fuse/fuse.h"

int fuse_create(struct kvfs_plane *plane) {
    struct fuse *fuse = plane->fuse = calloc(1, sizeof(*fuse));
    if (!fuse)
        return -ENOMEM;
    pthread_mutex_init(&fuse->transports_lock, NULL);
    pthread_mutex_init(&fuse->notifier.lock, NULL);
    pthread_cond_init(&fuse->notifier.more, NULL);
    listings_init(&fuse->listings);
    return mux_init(plane);
}

int fuse_start(struct kvfs_plane *plane) {
    int r = pool_start(plane, &plane->fuse->slow, 4);
    return r < 0 ? r : notifier_start(plane);
}

void fuse_stop(struct kvfs_plane *plane) {
    for (uint32_t i = 0; i < TRANSPORTS_MAX; i++)
        if (plane->fuse->transports[i])
            transport_stop(plane->fuse->transports[i]);
    notifier_stop(plane);
    pool_stop(&plane->fuse->slow);
}

void fuse_free(struct kvfs_plane *plane) {
    for (uint32_t i = 0; i < TRANSPORTS_MAX; i++)
        if (plane->fuse->transports[i])
            transport_free(plane->fuse->transports[i]);
    mux_free(plane);
    listings_free(&plane->fuse->listings);
    free(plane->fuse);
}

int kvfs_fuse_add(struct kvfs_plane *plane, int fd) { return transport_start(plane, fd); }
