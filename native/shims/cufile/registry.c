/* Handles that were registered, by key and by descriptor. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>

#include "base/descriptor.h"
#include "shim.h"

#define BUCKETS 1024

static pthread_rwlock_t lock = PTHREAD_RWLOCK_INITIALIZER;
static struct handle *handles[BUCKETS];
static struct buffer *buffers[BUCKETS];

static unsigned bucket(const void *key) { return (unsigned)(((uintptr_t)key * 0x9e3779b97f4a7c15u) >> 54); }

/* ---- fork() ---- */

void registry_lock(void) { pthread_rwlock_wrlock(&lock); }
void registry_unlock(void) { pthread_rwlock_unlock(&lock); }

void registry_forked(void) {
    pthread_rwlock_init(&lock, NULL);
    for (unsigned i = 0; i < BUCKETS; i++)
        for (struct handle *handle = handles[i]; handle; handle = handle->next)
            pthread_mutex_init(&handle->lock, NULL);
}

/* ---- handles ---- */

struct handle *handle_find(void *key) {
    pthread_rwlock_rdlock(&lock);
    struct handle *handle = handles[bucket(key)];
    while (handle && handle->key != key)
        handle = handle->next;
    if (handle)
        atomic_fetch_add(&handle->refs, 1);
    pthread_rwlock_unlock(&lock);
    return handle;
}

void handle_put(struct handle *handle) {
    if (!handle || atomic_fetch_sub(&handle->refs, 1) != 1)
        return;
    if (handle->forks == fork_count)
        kvfs_file_close(handle->file); /* else the parent's */
    if (handle->fd >= 0)
        close(handle->fd);
    pthread_mutex_destroy(&handle->lock);
    free(handle->path);
    free(handle);
}

static struct handle *unlinked(struct handle **link) {
    struct handle *handle = *link;
    if (handle)
        *link = handle->next;
    return handle;
}

static struct handle **linked(void *key) {
    struct handle **link = &handles[bucket(key)];
    while (*link && (*link)->key != key)
        link = &(*link)->next;
    return link;
}

struct handle *handle_add(void *real_handle, int fd, const struct place *place, bool own) {
    struct handle *handle = calloc(1, sizeof(*handle));
    if (!handle)
        return NULL;
    int flags = fcntl(fd, F_GETFL);
    handle->key = own ? handle : real_handle;
    handle->own = own;
    handle->fd = own ? fcntl(fd, F_DUPFD_CLOEXEC, DESCRIPTOR_MIN) : -1;
    handle->number = own ? fd : -1;
    handle->access = flags & O_ACCMODE;
    handle->place = *place;
    handle->path = place->mount ? mount_below(place->mount, fd) : NULL;
    handle->refs = 2;
    pthread_mutex_init(&handle->lock, NULL);
    if (flags < 0 || (own && handle->fd < 0)) {
        handle->refs = 1;
        handle_put(handle);
        return NULL;
    }
    pthread_rwlock_wrlock(&lock);
    struct handle *old = unlinked(linked(handle->key)); /* the real library has given the address again */
    handle->next = handles[bucket(handle->key)];
    handles[bucket(handle->key)] = handle;
    pthread_rwlock_unlock(&lock);
    handle_put(old);
    COUNT(handles, 1);
    return handle;
}

void handle_remove(void *key) {
    pthread_rwlock_wrlock(&lock);
    struct handle *handle = unlinked(linked(key));
    pthread_rwlock_unlock(&lock);
    handle_put(handle);
}

bool handle_number_taken(int fd) {
    bool taken = false;
    pthread_rwlock_rdlock(&lock);
    for (unsigned i = 0; i < BUCKETS && !taken; i++)
        for (struct handle *handle = handles[i]; handle && !taken; handle = handle->next)
            taken = handle->own && handle->number == fd;
    pthread_rwlock_unlock(&lock);
    return taken;
}

static int open_native(struct kvfs_client *client, const struct handle *handle, struct kvfs_file **out) {
    struct kvfs_attributes found;
    int r = kvfs_file_open(client, handle->place.inode, out);
    if (r < 0 && handle->path && kvfs_find(client, handle->path, &found) == 0 && found.inode == handle->place.inode)
        r = kvfs_file_open(client, handle->place.inode, out);
    return r;
}

struct kvfs_file *handle_file(struct handle *handle) {
    struct kvfs_file *file = atomic_load(&handle->file);
    if (file && handle->forks == fork_count)
        return file;
    struct kvfs_client *client = handle->place.mount ? mount_client(handle->place.mount) : NULL;
    if (!client)
        return NULL;
    pthread_mutex_lock(&handle->lock);
    file = handle->forks == fork_count ? atomic_load(&handle->file) : NULL;
    if (!file && open_native(client, handle, &file) == 0) {
        handle->forks = fork_count;
        atomic_store(&handle->file, file);
    }
    pthread_mutex_unlock(&handle->lock);
    return file;
}

/* ---- buffers ---- */

static struct buffer **buffer_linked(const void *base) {
    struct buffer **link = &buffers[bucket(base)];
    while (*link && (*link)->base != base)
        link = &(*link)->next;
    return link;
}

bool buffer_add(const void *base, size_t size) {
    struct buffer *buffer = malloc(sizeof(*buffer));
    if (!buffer)
        return false;
    bool mapped = memory_is_mapped(base, size);
    pthread_rwlock_wrlock(&lock);
    struct buffer **link = buffer_linked(base);
    bool fresh = !*link;
    if (fresh) {
        *buffer = (struct buffer){NULL, base, size, mapped};
        *link = buffer;
    }
    pthread_rwlock_unlock(&lock);
    if (!fresh)
        free(buffer);
    return fresh;
}

bool buffer_remove(const void *base) {
    pthread_rwlock_wrlock(&lock);
    struct buffer **link = buffer_linked(base), *buffer = *link;
    if (buffer)
        *link = buffer->next;
    pthread_rwlock_unlock(&lock);
    free(buffer);
    return buffer != NULL;
}

struct buffer buffer_find(const void *base) {
    struct buffer none = {0};
    pthread_rwlock_rdlock(&lock);
    struct buffer *buffer = *buffer_linked(base);
    struct buffer result = buffer ? *buffer : none;
    pthread_rwlock_unlock(&lock);
    return result;
}

void registry_forget(void) {
    struct handle *gone = NULL;
    pthread_rwlock_wrlock(&lock);
    for (unsigned i = 0; i < BUCKETS; i++) {
        while (handles[i]) {
            struct handle *handle = unlinked(&handles[i]);
            handle->next = gone;
            gone = handle;
        }
        while (buffers[i]) {
            struct buffer *buffer = buffers[i];
            buffers[i] = buffer->next;
            free(buffer);
        }
    }
    pthread_rwlock_unlock(&lock);
    while (gone) {
        struct handle *handle = gone;
        gone = handle->next;
        handle_put(handle);
    }
}
