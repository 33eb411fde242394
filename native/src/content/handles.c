/* Handles: the openers of inodes and directories, by transport. */
#include "content/content.h"

static struct handle **handle_place(struct handle_table *table, uint32_t index) { return &table->chunks[index / 1024][index % 1024]; }

static int handle_add(struct kvfs_plane *plane, const struct handle *from, uint64_t *fh) {
    struct handle_table *table = &plane->handles;
    struct handle *handle = calloc(1, sizeof(*handle));
    if (!handle)
        return -ENOMEM;
    static atomic_uint salts;
    *handle = *from;
    handle->salt = atomic_fetch_add(&salts, 1) + 1;
    int r = 0;
    pthread_mutex_lock(&table->lock);
    if (table->free_count) {
        handle->index = table->free[--table->free_count];
    } else if (table->count < 4096u * 1024u) {
        handle->index = table->count;
        struct handle ***chunk = &table->chunks[handle->index / 1024];
        if (!*chunk && !(*chunk = calloc(1024, sizeof(struct handle *))))
            r = -ENOMEM;
        else
            table->count++;
    } else {
        r = -ENFILE;
    }
    if (r == 0) {
        assert(!*handle_place(table, handle->index));
        *handle_place(table, handle->index) = handle;
    }
    pthread_mutex_unlock(&table->lock);
    if (r < 0) {
        free(handle);
        return r;
    }
    COUNT(plane, open_handles, 1);
    *fh = (uint64_t)handle->salt << 32 | handle->index;
    return 0;
}

int handle_open(struct kvfs_plane *plane, struct transport *transport, struct node *node, struct user *user, uint32_t flags, bool writer,
                uint64_t *fh) {
    struct handle handle = {.node = node, .transport = transport, .user = user, .flags = flags, .writer = writer};
    if (writer && flags & O_DIRECT) {
        pthread_mutex_lock(&node->lock);
        if (node->file)
            node->file->direct = true;
        pthread_mutex_unlock(&node->lock);
    }
    return handle_add(plane, &handle, fh);
}

int handle_open_directory(struct kvfs_plane *plane, struct transport *transport, uint64_t inode, uint64_t *fh) {
    struct handle handle = {.directory = inode, .transport = transport};
    return handle_add(plane, &handle, fh);
}

static struct handle *handle_look(struct handle_table *table, struct transport *transport, uint64_t fh) {
    uint32_t index = (uint32_t)fh;
    if (index >= table->count)
        return NULL;
    struct handle *handle = *handle_place(table, index);
    assert(!handle || handle->index == index);
    return handle && handle->salt == (uint32_t)(fh >> 32) && handle->transport == transport ? handle : NULL;
}

bool handle_find(struct kvfs_plane *plane, struct transport *transport, uint64_t fh, struct handle *out) {
    pthread_mutex_lock(&plane->handles.lock);
    struct handle *handle = handle_look(&plane->handles, transport, fh);
    bool found = handle && handle->node;
    if (found) {
        atomic_fetch_add(&handle->node->refs, 1);
        *out = *handle;
    }
    pthread_mutex_unlock(&plane->handles.lock);
    return found;
}

uint32_t handle_listed(struct kvfs_plane *plane, struct transport *transport, uint64_t fh, uint32_t more) {
    pthread_mutex_lock(&plane->handles.lock);
    struct handle *handle = handle_look(&plane->handles, transport, fh);
    uint32_t listed = handle &&!handle->node ? handle->listed += more : UINT32_MAX;
    pthread_mutex_unlock(&plane->handles.lock);
    return listed;
}

static void handle_free_index(struct handle_table *table, uint32_t index) {
    if (table->free_count == table->free_capacity) {
        uint32_t capacity = table->free_capacity ? table->free_capacity * 2 : 1024;
        uint32_t *grown = realloc(table->free, capacity * sizeof(uint32_t));
        if (!grown)
            return; /* the index is not used again: 8 bytes lost */
        table->free = grown;
        table->free_capacity = capacity;
    }
    table->free[table->free_count++] = index;
}

struct node *handle_close(struct kvfs_plane *plane, struct transport *transport, uint64_t fh, bool *was_writer) {
    struct handle_table *table = &plane->handles;
    pthread_mutex_lock(&table->lock);
    struct handle *handle = handle_look(table, transport, fh);
    if (handle && !handle->node)
        handle = NULL;
    if (handle) {
        *handle_place(table, handle->index) = NULL;
        handle_free_index(table, handle->index);
    }
    pthread_mutex_unlock(&table->lock);
    if (!handle)
        return NULL;
    struct node *node = handle->node;
    *was_writer = handle->writer;
    struct shard *shard = shard_of(plane, node->inode);
    pthread_mutex_lock(&shard->lock);
    node_unopen(plane, node, handle->user, handle->writer);
    pthread_mutex_unlock(&shard->lock);
    atomic_fetch_sub(&plane->count.open_handles, 1);
    free(handle);
    return node;
}

bool handle_close_directory(struct kvfs_plane *plane, struct transport *transport, uint64_t fh, uint64_t inode) {
    struct handle_table *table = &plane->handles;
    pthread_mutex_lock(&table->lock);
    struct handle *handle = handle_look(table, transport, fh);
    if (handle && (handle->node || handle->directory != inode))
        handle = NULL;
    if (handle) {
        *handle_place(table, handle->index) = NULL;
        handle_free_index(table, handle->index);
    }
    pthread_mutex_unlock(&table->lock);
    if (handle)
        atomic_fetch_sub(&plane->count.open_handles, 1);
    free(handle);
    return handle != NULL;
}

/* After a handle has gone: Python hears of its duties. A file that is sealed and has no writer goes back to the fast path. */
void node_released(struct kvfs_plane *plane, struct node *node, bool was_writer) {
    struct shard *shard = shard_of(plane, node->inode);
    pthread_mutex_lock(&shard->lock);
    bool last = node->handles == 0, last_writer = was_writer && node->writers == 0;
    pthread_mutex_unlock(&shard->lock);
    struct kvfs_record record;
    if (last || last_writer) { /* a slab without a name ends as any file does */
        pthread_mutex_lock(&node->lock);
        bool slab = node->file && node->file->slab, passes = slab && slab_passes(plane, node->file);
        pthread_mutex_unlock(&node->lock);
        if (slab) {
            last_writer = false;
            bool named = kvfs_table_find_inode(plane->table, node->inode, &record) == 0 && !(record.flags & KVFS_INODE_NAMELESS);
            if (named && (last || !passes))
                event_add(plane, KVFS_EVENT_SLAB_CLOSED, node->inode, passes);
        }
    }
    if (last_writer) {
        bool file_gone = false;
        pthread_mutex_lock(&node->lock);
        if (node->file && node->file->dirty && !node->file->discarded)
            event_add(plane, KVFS_EVENT_RESEAL, node->inode, 0);
        else if (node->file && !node->file->sealing && !node->file->spilling) {
            file_free(plane, node);
            file_gone = true;
        }
        pthread_mutex_unlock(&node->lock);
        if (file_gone) {
            node_put(plane, node);
        }
    }
    if (last) {
        if (kvfs_table_find_inode(plane->table, node->inode, &record) == 0 && record.flags & KVFS_INODE_NAMELESS)
            event_add(plane, KVFS_EVENT_IDLE, node->inode, 0);
    }
}

uint64_t handles_drop(struct kvfs_plane *plane, struct transport *transport, uint32_t *from) {
    struct handle_table *table = &plane->handles;
    for (;; ++*from) {
        pthread_mutex_lock(&table->lock);
        bool end = *from >= table->count;
        struct handle *handle = end ? NULL : *handle_place(table, *from);
        uint64_t fh = handle && handle->transport == transport ? (uint64_t)handle->salt << 32 | handle->index : 0;
        uint64_t directory = fh && !handle->node ? handle->directory : 0;
        pthread_mutex_unlock(&table->lock);
        if (end)
            return 0;
        if (!fh)
            continue;
        if (directory) {
            if (handle_close_directory(plane, transport, fh, directory)) {
                ++*from;
                return directory;
            }
            continue;
        }
        bool was_writer = false;
        struct node *node = handle_close(plane, transport, fh, &was_writer);
        if (node) {
            node_released(plane, node, was_writer);
            node_put(plane, node);
        }
    }
}
