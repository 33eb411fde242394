/* The notifier: the one thread that sends notifications to the kernel, and does nothing else. Nothing waits for it. */
#include "internal.h"

#include <unistd.h>

#define NOTIFY_INC_EPOCH 8 /* FUSE_NOTIFY_INC_EPOCH, kernel 6.16 */
#define NOTIFY_FLUSH 0     /* goes nowhere: says that what was queued before it is sent; inode is the cookie */

static void notify_send(struct transport *transport, int code, const void *body, size_t size, const char *name, size_t name_size) {
    struct fuse_out_header head = {.len = (uint32_t)(sizeof(head) + size + name_size), .error = code, .unique = 0};
    struct iovec iovs[3] = {{&head, sizeof(head)}, {(void *)(uintptr_t)body, size}, {(void *)(uintptr_t)name, name_size}};
    if (writev(transport->servers[0].fd, iovs, name_size ? 3 : size ? 2 : 1) < 0)
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
                notify_send(transport, NOTIFY_INC_EPOCH, NULL, 0, NULL, 0);
            if (n && n->code == FUSE_NOTIFY_INVAL_INODE) {
                struct fuse_notify_inval_inode_out out = {.ino = n->inode, .off = 0, .len = 0};
                notify_send(transport, FUSE_NOTIFY_INVAL_INODE, &out, sizeof(out), NULL, 0);
            } else if (n && n->code == FUSE_NOTIFY_INVAL_ENTRY) {
                struct fuse_notify_inval_entry_out out = {.parent = n->inode, .namelen = n->name_size};
                notify_send(transport, FUSE_NOTIFY_INVAL_ENTRY, &out, sizeof(out), n->name, n->name_size + 1);
            }
        }
        if (n && n->code == NOTIFY_FLUSH)
            complete(plane, n->inode, 0);
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

static void notification_add(struct kvfs_plane *plane, uint32_t code, uint64_t inode, const char *name, uint32_t name_size) {
    struct notification *n = calloc(1, sizeof(*n));
    if (!n || name_size > KVFS_NAME_MAX) {
        free(n);
        if (code == NOTIFY_FLUSH)
            complete(plane, inode, -ENOMEM);
        else
            kvfs_notify_epoch(plane); /* coarser, and never less */
        return;
    }
    n->code = code;
    n->inode = inode;
    n->name_size = name_size;
    if (name_size)
        memcpy(n->name, name, name_size);
    pthread_mutex_lock(&plane->notify_lock);
    if (code == FUSE_NOTIFY_INVAL_INODE && plane->notify_last && plane->notify_last->code == code && plane->notify_last->inode == inode) {
        pthread_mutex_unlock(&plane->notify_lock); /* waits already: a guest that writes says so again and again */
        free(n);
        return;
    }
    if (plane->notify_last)
        plane->notify_last->next = n;
    else
        plane->notify_first = n;
    plane->notify_last = n;
    pthread_cond_signal(&plane->notify_more);
    pthread_mutex_unlock(&plane->notify_lock);
}

void kvfs_notify_epoch(struct kvfs_plane *plane) {
    pthread_mutex_lock(&plane->notify_lock);
    plane->notify_epoch = true;
    pthread_cond_signal(&plane->notify_more);
    pthread_mutex_unlock(&plane->notify_lock);
}

void kvfs_notify_inode(struct kvfs_plane *plane, uint64_t inode) { notification_add(plane, FUSE_NOTIFY_INVAL_INODE, inode, NULL, 0); }

void kvfs_notify_entry(struct kvfs_plane *plane, uint64_t parent, const char *name, uint32_t name_size) {
    notification_add(plane, FUSE_NOTIFY_INVAL_ENTRY, parent, name, name_size);
}

int kvfs_notify_flush(struct kvfs_plane *plane, uint64_t cookie) {
    COUNT(plane, jobs_in_flight, 1);
    notification_add(plane, NOTIFY_FLUSH, cookie, NULL, 0);
    return 0;
}
