/* The notifier: the one thread that sends notifications to the kernel, and does nothing else. Nothing waits for it.
 *
 * INC_EPOCH, which takes no lock, and INVAL_INODE of attributes alone (a negative offset): with pages it would wait for their locks.
 * INVAL_ENTRY waits, unkillably, for the lock of the directory; who has that may be waiting for our
 * answer. If the daemon is killed then, that thread never ends, so /dev/fuse stays open and the mount hangs for ever. Nor is it needed: where
 * there is no INC_EPOCH, names of files are not cached (entry_timeouts). */
#include "internal.h"

#include <unistd.h>

#define NOTIFY_INC_EPOCH 8 /* FUSE_NOTIFY_INC_EPOCH, kernel 6.16 */

static void notify_send(struct transport *transport, int code, void *body, size_t size) {
    struct fuse_out_header head = {.len = (uint32_t)(sizeof(head) + size), .error = code, .unique = 0};
    struct iovec iovs[2] = {{&head, sizeof(head)}, {body, size}};
    if (writev(transport->servers[0].fd, iovs, size ? 2 : 1) < 0)
        return; /* -ENOENT: the kernel does not know the inode; -ENODEV: unmounted */
}

static void *notifier_main(void *argument) {
    struct kvfs_plane *plane = argument;
    for (;;) {
        pthread_mutex_lock(&plane->notify_lock);
        while (!plane->notify_first && !plane->notify_epoch && !plane->notifier_stopping)
            pthread_cond_wait(&plane->notify_more, &plane->notify_lock);
        bool stop = plane->notifier_stopping, epoch = plane->notify_epoch;
        struct notification *n = plane->notify_first;
        if (n) {
            plane->notify_first = n->next;
            if (!plane->notify_first)
                plane->notify_last = NULL;
        }
        plane->notify_epoch = false;
        pthread_mutex_unlock(&plane->notify_lock);
        for (uint32_t i = 0; i < TRANSPORTS_MAX && !stop; i++) {
            struct transport *transport = plane->transports[i];
            if (!transport || atomic_load(&transport->ended) || !atomic_load(&transport->initialized))
                continue;
            if (epoch && transport->inc_epoch)
                notify_send(transport, NOTIFY_INC_EPOCH, NULL, 0);
            if (n && n->inode) {
                struct fuse_notify_inval_inode_out out = {.ino = n->inode, .off = -1, .len = 0};
                notify_send(transport, FUSE_NOTIFY_INVAL_INODE, &out, sizeof(out));
            }
        }
        if (n && !n->inode)
            complete(plane, n->cookie, 0);
        free(n);
        if (stop)
            return NULL;
    }
}

int notifier_start(struct kvfs_plane *plane) {
    int r = -pthread_create(&plane->notifier, NULL, notifier_main, plane);
    plane->notifier_started = r == 0;
    return r;
}

void notifier_stop(struct kvfs_plane *plane) {
    if (!plane->notifier_started)
        return;
    pthread_mutex_lock(&plane->notify_lock);
    plane->notifier_stopping = true;
    pthread_cond_signal(&plane->notify_more);
    pthread_mutex_unlock(&plane->notify_lock);
    pthread_join(plane->notifier, NULL);
    while (plane->notify_first) {
        struct notification *next = plane->notify_first->next;
        free(plane->notify_first);
        plane->notify_first = next;
    }
}

void kvfs_notify_epoch(struct kvfs_plane *plane) {
    pthread_mutex_lock(&plane->notify_lock);
    plane->notify_epoch = true;
    pthread_cond_signal(&plane->notify_more);
    pthread_mutex_unlock(&plane->notify_lock);
}

/* -ENOMEM, or queued. */
static int notification_add(struct kvfs_plane *plane, uint64_t inode, uint64_t cookie) {
    int r = 0;
    pthread_mutex_lock(&plane->notify_lock);
    if (!inode || !plane->notify_last || plane->notify_last->inode != inode) { /* else the one that waits says it too */
        struct notification *n = calloc(1, sizeof(*n));
        r = n ? 0 : -ENOMEM;
        if (n) {
            n->inode = inode;
            n->cookie = cookie;
            if (plane->notify_last)
                plane->notify_last->next = n;
            else
                plane->notify_first = n;
            plane->notify_last = n;
            pthread_cond_signal(&plane->notify_more);
        }
    }
    pthread_mutex_unlock(&plane->notify_lock);
    return r;
}

void notify_inode(struct kvfs_plane *plane, uint64_t inode) {
    if (notification_add(plane, inode, 0) < 0)
        kvfs_notify_epoch(plane);
}

int kvfs_notify_flush(struct kvfs_plane *plane, uint64_t cookie) {
    COUNT(plane, jobs_in_flight, 1);
    if (notification_add(plane, 0, cookie) < 0)
        complete(plane, cookie, -ENOMEM);
    return 0;
}
