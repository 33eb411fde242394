/* The notifier sends notifications to the kernel and does nothing else. Nothing waits for it (I23).
 *
 * It sends INC_EPOCH, which takes no lock, and INVAL_INODE of attributes alone (a negative offset): with pages the kernel would wait for their locks.
 * INVAL_ENTRY is never sent. It waits, unkillably, for the directory's lock, whose holder may be waiting for our answer. If the daemon is killed
 * then, that thread never ends, /dev/fuse stays open, and the mount hangs for ever. INVAL_ENTRY is not needed either: a kernel without INC_EPOCH
 * caches no names of files (entry_timeouts). */
#include "fuse/fuse.h"

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
        pthread_mutex_lock(&plane->fuse->notifier.lock);
        while (!plane->fuse->notifier.first && !plane->fuse->notifier.epoch && !plane->fuse->notifier.stopping)
            pthread_cond_wait(&plane->fuse->notifier.more, &plane->fuse->notifier.lock);
        bool stop = plane->fuse->notifier.stopping, epoch = plane->fuse->notifier.epoch;
        struct notification *n = plane->fuse->notifier.first;
        if (n) {
            plane->fuse->notifier.first = n->next;
            if (!plane->fuse->notifier.first)
                plane->fuse->notifier.last = NULL;
        }
        plane->fuse->notifier.epoch = false;
        pthread_mutex_unlock(&plane->fuse->notifier.lock);
        for (uint32_t i = 0; i < TRANSPORTS_MAX && !stop; i++) {
            struct transport *transport = plane->fuse->transports[i];
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
    int r = -pthread_create(&plane->fuse->notifier.thread, NULL, notifier_main, plane);
    plane->fuse->notifier.started = r == 0;
    return r;
}

void notifier_stop(struct kvfs_plane *plane) {
    if (!plane->fuse->notifier.started)
        return;
    pthread_mutex_lock(&plane->fuse->notifier.lock);
    plane->fuse->notifier.stopping = true;
    pthread_cond_signal(&plane->fuse->notifier.more);
    pthread_mutex_unlock(&plane->fuse->notifier.lock);
    pthread_join(plane->fuse->notifier.thread, NULL);
    while (plane->fuse->notifier.first) {
        struct notification *next = plane->fuse->notifier.first->next;
        free(plane->fuse->notifier.first);
        plane->fuse->notifier.first = next;
    }
    plane->fuse->notifier.last = NULL;
}

void kvfs_notify_epoch(struct kvfs_plane *plane) {
    pthread_mutex_lock(&plane->fuse->notifier.lock);
    plane->fuse->notifier.epoch = true;
    pthread_cond_signal(&plane->fuse->notifier.more);
    pthread_mutex_unlock(&plane->fuse->notifier.lock);
}

/* -ENOMEM, or queued. */
static int notification_add(struct kvfs_plane *plane, uint64_t inode, uint64_t cookie) {
    int r = 0;
    pthread_mutex_lock(&plane->fuse->notifier.lock);
    assert(!plane->fuse->notifier.first == !plane->fuse->notifier.last);
    if (!inode || !plane->fuse->notifier.last || plane->fuse->notifier.last->inode != inode) { /* else the waiting one covers this one too */
        struct notification *n = calloc(1, sizeof(*n));
        r = n ? 0 : -ENOMEM;
        if (n) {
            n->inode = inode;
            n->cookie = cookie;
            if (plane->fuse->notifier.last)
                plane->fuse->notifier.last->next = n;
            else
                plane->fuse->notifier.first = n;
            plane->fuse->notifier.last = n;
            pthread_cond_signal(&plane->fuse->notifier.more);
        }
    }
    pthread_mutex_unlock(&plane->fuse->notifier.lock);
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
