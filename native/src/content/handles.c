/* Handles: the openers of inodes and directories, by transport. */
#include "content/content.h"

#include <sys/random.h>

/* A number: its place in the table, and above it a salt, that of the handle before plus one. */
#define PLACE_BITS 22
#define PLACE(number) ((uint32_t)(number) & ((1u << PLACE_BITS) - 1))
static_assert(4096u * 1024u == 1u << PLACE_BITS, "chunks");

int handles_init(struct kvfs_plane *plane) {
    pthread_mutex_init(&plane->handles.lock, NULL);
    return getrandom(&plane->handles.last_salt, sizeof(uint64_t), 0) == sizeof(uint64_t) ? 0 : -EIO;
}

static struct handle **handle_place(struct handle_table *table, uint32_t index) { return &table->chunks[index / 1024][index % 1024]; }

uint32_t handle_place_of(uint64_t number) { return PLACE(number); }

/* With the lock held: a chunk for the table's next place. */
static bool chunk_there(struct handle_table *table, uint32_t place) {
    struct handle ***chunk = &table->chunks[place / 1024];
    return *chunk || (*chunk = calloc(1024, sizeof(struct handle *)));
}

/* unique: of the host's OPEN; 0: of none that a later daemon is told of. */
static int handle_add(struct kvfs_plane *plane, const struct handle *from, uint64_t unique, uint64_t *fh) {
    struct handle_table *table = &plane->handles;
    struct handle *handle = calloc(1, sizeof(*handle));
    if (!handle)
        return -ENOMEM;
    *handle = *from;
    uint32_t place = 0;
    int r = 0;
    pthread_mutex_lock(&table->lock);
    if (table->free_count) {
        place = table->free[--table->free_count];
    } else if (table->count < 4096u * 1024u) {
        place = table->count;
        if (chunk_there(table, place))
            table->count++;
        else
            r = -ENOMEM;
    } else {
        r = -ENFILE;
    }
    if (r == 0) {
        assert(!*handle_place(table, place));
        *handle_place(table, place) = handle;
        *fh = handle->number = ++table->last_salt << PLACE_BITS | place;
        opens_add(plane, place, handle, unique);
    }
    pthread_mutex_unlock(&table->lock);
    if (r < 0) {
        free(handle);
        return r;
    }
    COUNT(plane, open_handles, 1);
    return 0;
}

int handle_open(struct kvfs_plane *plane, struct transport *transport, struct node *node, struct user *user, uint32_t flags, bool writer, bool uses,
                uint64_t unique, uint64_t *fh) {
    struct handle handle = {.node = node, .transport = transport, .user = user, .flags = flags, .writer = writer, .unread = uses};
    if (writer && (flags & O_DIRECT || (flags & O_ACCMODE) == O_RDWR)) {
        pthread_mutex_lock(&node->lock);
        node->mappable |= (flags & O_ACCMODE) == O_RDWR;
        if (node->file && flags & O_DIRECT)
            node->file->direct = true;
        if (node->file && node->mappable)
            written_is_sealed(plane, node->file, false);
        pthread_mutex_unlock(&node->lock);
    }
    return handle_add(plane, &handle, unique, fh);
}

int handle_open_directory(struct kvfs_plane *plane, struct transport *transport, uint64_t inode, uint64_t *fh) {
    struct handle handle = {.directory = inode, .transport = transport};
    return handle_add(plane, &handle, 0, fh);
}

static struct handle *handle_look(struct handle_table *table, struct transport *transport, uint64_t fh, uint64_t inode, bool directory) {
    struct handle *handle = PLACE(fh) < table->count ? *handle_place(table, PLACE(fh)) : NULL;
    assert(!handle || PLACE(handle->number) == PLACE(fh));
    if (!handle || handle->number != fh || handle->transport != transport || directory != !handle->node)
        return NULL;
    return (directory ? handle->directory : handle->node->inode) == inode ? handle : NULL;
}

bool handle_find(struct kvfs_plane *plane, struct transport *transport, uint64_t fh, uint64_t inode, struct handle *out) {
    pthread_mutex_lock(&plane->handles.lock);
    struct handle *handle = handle_look(&plane->handles, transport, fh, inode, false);
    bool found = handle != NULL;
    if (found) {
        atomic_fetch_add(&handle->node->refs, 1);
        *out = *handle;
    }
    pthread_mutex_unlock(&plane->handles.lock);
    return found;
}

/* The handle's block was used, if that may be known. */
static void handle_used(struct kvfs_plane *plane, struct node *node, void (*used)(struct kvfs_plane *, const struct kvfs_record *)) {
    struct kvfs_record record;
    if (record_find(plane, node->inode, &record) == 0 && record.flags & KVFS_INODE_SEALED)
        used(plane, &record);
}

void handle_reads(struct kvfs_plane *plane, const struct handle *found, uint64_t fh) {
    if (!found->unread)
        return;
    pthread_mutex_lock(&plane->handles.lock);
    struct handle *handle = handle_look(&plane->handles, found->transport, fh, found->node->inode, false);
    bool first = handle && handle->unread;
    if (first)
        handle->unread = false;
    pthread_mutex_unlock(&plane->handles.lock);
    if (first)
        handle_used(plane, found->node, found_add);
}

void handle_set_uncached(struct kvfs_plane *plane, struct transport *transport, uint64_t fh, uint64_t inode) {
    pthread_mutex_lock(&plane->handles.lock);
    struct handle *handle = handle_look(&plane->handles, transport, fh, inode, false);
    if (handle)
        handle->uncached = true;
    pthread_mutex_unlock(&plane->handles.lock);
}

uint32_t handle_listed(struct kvfs_plane *plane, struct transport *transport, uint64_t fh, uint64_t inode, uint32_t more) {
    pthread_mutex_lock(&plane->handles.lock);
    struct handle *handle = handle_look(&plane->handles, transport, fh, inode, true);
    uint32_t listed = handle ? handle->listed += more : UINT32_MAX;
    pthread_mutex_unlock(&plane->handles.lock);
    return listed;
}

static void handle_free_place(struct handle_table *table, uint32_t place) {
    if (table->free_count == table->free_capacity) {
        uint32_t capacity = table->free_capacity ? table->free_capacity * 2 : 1024;
        uint32_t *grown = realloc(table->free, capacity * sizeof(uint32_t));
        if (!grown)
            return; /* the place is not used again: 8 bytes lost */
        table->free = grown;
        table->free_capacity = capacity;
    }
    table->free[table->free_count++] = place;
}

/* Out of the table; the caller's now. keeps: its kernel has it, and the next daemon's transport. */
static struct handle *handle_take(struct kvfs_plane *plane, struct transport *transport, uint64_t fh, uint64_t inode, bool directory, bool keeps) {
    struct handle_table *table = &plane->handles;
    pthread_mutex_lock(&table->lock);
    struct handle *handle = handle_look(table, transport, fh, inode, directory);
    if (handle) {
        *handle_place(table, PLACE(fh)) = NULL;
        handle_free_place(table, PLACE(fh));
        table->earlier_count -= handle->earlier;
        if (!keeps && !directory)
            opens_remove(plane, PLACE(fh));
    }
    pthread_mutex_unlock(&table->lock);
    return handle;
}

static struct node *close_handle(struct kvfs_plane *plane, struct transport *transport, uint64_t fh, uint64_t inode, bool *was_writer, bool keeps) {
    struct handle *handle = handle_take(plane, transport, fh, inode, false, keeps);
    if (!handle)
        return NULL;
    struct node *node = handle->node;
    if (handle->unread)
        handle_used(plane, node, found_unread);
    *was_writer = handle->writer;
    struct shard *shard = shard_of(plane, node->inode);
    pthread_mutex_lock(&shard->lock);
    node_unopen(plane, node, handle->user, handle->writer);
    pthread_mutex_unlock(&shard->lock);
    atomic_fetch_sub(&plane->count.open_handles, 1);
    free(handle);
    return node;
}

struct node *handle_close(struct kvfs_plane *plane, struct transport *transport, uint64_t fh, uint64_t inode, bool *was_writer) {
    return close_handle(plane, transport, fh, inode, was_writer, false);
}

bool handle_close_directory(struct kvfs_plane *plane, struct transport *transport, uint64_t fh, uint64_t inode) {
    struct handle *handle = handle_take(plane, transport, fh, inode, true, false);
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
    if (last && !atomic_load(&plane->leaving)) { /* the kernel's own handles are the next daemon's */
        if (kvfs_table_find_inode(plane->table, node->inode, &record) == 0 && record.flags & KVFS_INODE_NAMELESS)
            name_let_go(plane, node->inode);
    }
}

uint64_t handles_drop(struct kvfs_plane *plane, struct transport *transport, uint32_t *from) {
    struct handle_table *table = &plane->handles;
    for (;; ++*from) {
        pthread_mutex_lock(&table->lock);
        bool end = *from >= table->count;
        struct handle *handle = end ? NULL : *handle_place(table, *from);
        bool ours = handle && handle->transport == transport, directory = ours && !handle->node;
        uint64_t fh = ours ? handle->number : 0, inode = !ours ? 0 : directory ? handle->directory : handle->node->inode;
        pthread_mutex_unlock(&table->lock);
        if (end)
            return 0;
        if (!ours)
            continue;
        if (directory) {
            if (handle_close_directory(plane, transport, fh, inode)) {
                ++*from;
                return inode;
            }
            continue;
        }
        bool was_writer = false;
        struct node *node = close_handle(plane, transport, fh, inode, &was_writer, true);
        if (node) {
            node_released(plane, node, was_writer);
            node_put(plane, node);
        }
    }
}

/* ---- of earlier daemons ---- */

int handle_restore(struct kvfs_plane *plane, const struct handle *from) {
    struct handle_table *table = &plane->handles;
    const uint32_t place = PLACE(from->number);
    struct handle *handle = malloc(sizeof(*handle));
    int r = handle ? 0 : -ENOMEM;
    pthread_mutex_lock(&table->lock);
    assert(place >= table->count); /* they come by their places, before all others */
    while (r == 0 && table->count <= place) {
        if (!chunk_there(table, table->count))
            r = -ENOMEM;
        else if (table->count++ != place)
            handle_free_place(table, table->count - 1);
    }
    if (r == 0) {
        *handle = *from;
        *handle_place(table, place) = handle;
        table->earlier_end = place + 1;
        table->earlier_count++;
        COUNT(plane, open_handles, 1);
    }
    pthread_mutex_unlock(&table->lock);
    if (r < 0)
        free(handle);
    return r;
}

void handles_adopt(struct kvfs_plane *plane, struct transport *transport) {
    struct handle_table *table = &plane->handles;
    pthread_mutex_lock(&table->lock);
    for (uint32_t i = 0; i < table->earlier_end; i++) {
        struct handle *handle = *handle_place(table, i);
        if (handle && handle->earlier)
            handle->transport = transport;
    }
    pthread_mutex_unlock(&table->lock);
}

/* Of an inode; or if that is 0, the one that this OPEN has made. */
static void earlier_close(struct kvfs_plane *plane, uint64_t inode, uint64_t unique) {
    struct handle_table *table = &plane->handles;
    for (uint32_t i = 0;; i++) {
        struct handle *handle = NULL;
        struct transport *transport = NULL;
        uint64_t fh = 0, of = 0;
        pthread_mutex_lock(&table->lock);
        bool end = !table->earlier_count;
        for (; !end && !handle && i < table->earlier_end; i += !handle) {
            handle = *handle_place(table, i);
            if (handle && !(handle->earlier && (inode ? handle->node->inode == inode : opens_asked(plane, i, unique))))
                handle = NULL;
        }
        if (handle)
            fh = handle->number, of = handle->node->inode, transport = handle->transport;
        pthread_mutex_unlock(&table->lock);
        if (!handle)
            return;
        bool was_writer = false;
        struct node *node = handle_close(plane, transport, fh, of, &was_writer);
        if (node) {
            node_released(plane, node, was_writer);
            node_put(plane, node);
        }
    }
}

void handles_asked_again(struct kvfs_plane *plane, uint64_t unique) { earlier_close(plane, 0, unique); }

void handles_forget(struct kvfs_plane *plane, uint64_t inode) {
    pthread_mutex_lock(&plane->handles.lock);
    bool none = !plane->handles.earlier_count;
    pthread_mutex_unlock(&plane->handles.lock);
    struct node *node = none || !inode ? NULL : node_get(plane, inode, false);
    if (node) /* it is open: as a rule one that is forgotten is not */
        earlier_close(plane, inode, 0);
    node_put(plane, node);
}
