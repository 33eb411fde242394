/* Any file by path or inode number: attributes, and parts of sealed files. */
#include "client/client.h"

static void attributes_of(const struct kvfs_record *record, bool sealed, struct kvfs_attributes *out) {
    *out = (struct kvfs_attributes){.inode = record->inode,
                                    .size = record->size,
                                    .version = record->version,
                                    .mtime_ns = record->mtime_ns,
                                    .ctime_ns = record->ctime_ns,
                                    .atime_ns = record->atime_ns,
                                    .mode = record->mode,
                                    .uid = record->uid,
                                    .gid = record->gid,
                                    .nlink = record->nlink,
                                    .sealed = sealed};
}

int kvfs_walk(struct kvfs_client *client, const char *path, struct kvfs_attributes *out, uint32_t capacity, uint32_t *count) {
    struct connection *connection;
    struct kvfs_record record;
    *count = 0;
    int r = connection_get(client, &connection);
    if (r < 0)
        return r;
    r = kvfs_table_find_inode(connection->table, 1, &record);
    while (r == 0) {
        bool sealed = record.kind == KVFS_KIND_FILE && record.flags & KVFS_INODE_SEALED;
        if (record.kind == KVFS_KIND_SYMLINK || record.flags & KVFS_INODE_ASK)
            r = -EAGAIN;
        if (r == 0 && sealed && !(record.flags & KVFS_INODE_FOREIGN)) { /* looked up again once it is known that nobody writes it */
            sealed = !kvfs_table_is_written(connection->table, record.inode);
            r = sealed ? kvfs_table_find_inode(connection->table, record.inode, &record) : 0;
            if (r == -ENOENT || record.flags & (KVFS_INODE_ASK | KVFS_INODE_NAMELESS))
                r = -EAGAIN;
        }
        if (r == 0 && *count == capacity)
            r = -EAGAIN;
        if (r < 0)
            break;
        attributes_of(&record, sealed, &out[(*count)++]);
        if (!*path)
            break;
        uint32_t size = (uint32_t)strcspn(path, "/");
        uint64_t parent = record.inode;
        r = record.kind == KVFS_KIND_DIRECTORY ? kvfs_table_find_name(connection->table, parent, path, size, &record) : -ENOTDIR;
        if (r == -ENOENT && connection->pod)
            r = foreign_find(connection->pod, &connection->array.geometry, parent, path, size, &record);
        if (r == 0 && record.flags & KVFS_INODE_FOREIGN)
            r = foreign_known_add(connection->known, &record, NULL, 0);
        r = r == 1 ? -EAGAIN : r; /* the daemon enters a directory of another node when somebody looks it up */
        path += size + (path[size] == '/');
    }
    TALLY(client, lookups, 1);
    if (r == -ENOENT)
        TALLY(client, misses, 1);
    connection_put(connection);
    return r;
}

int kvfs_find(struct kvfs_client *client, const char *path, struct kvfs_attributes *out) {
    struct kvfs_attributes found[64];
    uint32_t count;
    int r = kvfs_walk(client, path, found, 64, &count);
    if (r == 0)
        *out = found[count - 1];
    return r;
}

struct kvfs_file {
    struct kvfs_client *client;
    uint64_t inode;
    pthread_mutex_t lock;
    struct desc *desc;          /* verified; of the place where the block was last read */
    struct kvfs_record foreign; /* another node's block, as it was opened; inode 0: it is none */
};

static int file_record(struct connection *connection, const struct kvfs_file *file, struct kvfs_record *record) {
    const uint64_t inode = file->inode;
    if (is_foreign(inode)) {
        *record = file->foreign;
        if (!record->inode && connection->pod)
            foreign_known_get(connection->known, inode, record, NULL);
        return connection->pod && record->inode ? 0 : -EAGAIN;
    }
    if (kvfs_table_is_written(connection->table, inode)) /* before the record is looked up: then it is up to date */
        return -EAGAIN;
    int r = kvfs_table_find_inode(connection->table, inode, record);
    if (r == 0 && (record->kind != KVFS_KIND_FILE || !(record->flags & KVFS_INODE_SEALED) || record->flags & KVFS_INODE_ASK))
        r = -EAGAIN;
    return r;
}

int kvfs_file_open(struct kvfs_client *client, uint64_t inode, struct kvfs_file **out) {
    struct connection *connection;
    struct kvfs_record record;
    int r = connection_get(client, &connection);
    if (r < 0)
        return r;
    r = file_record(connection, &(struct kvfs_file){.inode = inode}, &record);
    connection_put(connection);
    struct kvfs_file *file = r == 0 ? calloc(1, sizeof(*file)) : NULL;
    if (!file)
        return r < 0 ? r : client_fail(-ENOMEM, "no memory for a file");
    file->client = client;
    file->inode = inode;
    if (is_foreign(inode))
        file->foreign = record;
    pthread_mutex_init(&file->lock, NULL);
    *out = file;
    return 0;
}

void kvfs_file_close(struct kvfs_file *file) {
    if (!file)
        return;
    desc_put(file->desc);
    pthread_mutex_destroy(&file->lock);
    free(file);
}

/* With the lock. Another node's block is found again by its name, which may lead to a newer block by now: an open file keeps one content. */
static bool is_same_content(const struct kvfs_file *file, const struct fetch *fetch) {
    const struct kvfs_record *opened = &file->foreign, *read = &fetch->record;
    if (!opened->inode)
        return true;
    if (file->desc)
        return file->desc->inode == fetch->desc->inode && file->desc->version == fetch->desc->version;
    return opened->generation == read->generation && opened->segment == read->segment && opened->page == read->page;
}

static void file_read_done(struct lane *lane, struct fetch *fetch) {
    (void)lane;
    struct kvfs_file *file = fetch->owner;
    int64_t *result = (int64_t *)(uintptr_t)fetch->cookie;
    *result = fetch->result;
    if (fetch->result < 0)
        return;
    pthread_mutex_lock(&file->lock);
    if (!is_same_content(file, fetch)) {
        *result = -EAGAIN;
    } else if (file->desc != fetch->desc) {
        desc_put(file->desc);
        file->desc = fetch->desc;
        atomic_fetch_add(&fetch->desc->refs, 1);
    }
    pthread_mutex_unlock(&file->lock);
}

int64_t kvfs_file_read(struct kvfs_file *file, uint64_t offset, void *data, uint64_t size) {
    struct kvfs_client *client = file->client;
    struct connection *connection;
    struct lane *lane;
    struct kvfs_record record;
    uint64_t until = now_ns() + client->options.timeout_ms * 1000000ull;
    int64_t result = connection_get(client, &connection);
    if (result < 0)
        return result;
    result = file_record(connection, file, &record);
    if (result == -ENOENT) /* evicted, or replaced and gone */
        result = -EAGAIN;
    if (result == 0)
        result = client_check_buffers(client, &(struct kvfs_buffer){data, size}, 1);
    if (result == 0 && offset < record.size && size)
        result = lane_take(client, connection, &lane);
    if (result < 0 || offset >= record.size || size == 0) {
        connection_put(connection);
        return result;
    }
    struct fetch *fetch = fetch_get(lane);
    if (fetch) {
        fetch->record = record;
        fetch->offset = offset;
        fetch->size = min_u64(size, record.size - offset);
        fetch->until_ns = until;
        fetch->done = file_read_done;
        fetch->owner = file;
        fetch->cookie = (uintptr_t)&result;
        pthread_mutex_lock(&file->lock);
        struct desc *desc = file->desc;
        if (desc && desc->generation == record.generation && desc->segment == record.segment && desc->page == record.page) {
            atomic_fetch_add(&desc->refs, 1);
            fetch->desc = desc;
        }
        pthread_mutex_unlock(&file->lock);
        if (offset == 0)
            client_hit(client, connection, &record);
        fetch_start(lane, fetch, &(struct kvfs_buffer){data, fetch->size}, 1);
        while (lane_run(lane, 1000000000))
            ;
        if (result > 0) {
            TALLY(client, gets, 1);
            TALLY(client, get_bytes, (uint64_t)result);
        }
    } else {
        result = client_fail(-ENOMEM, "no memory for a read");
    }
    lane_give(lane);
    connection_put(connection);
    return result == -ESTALE ? -EAGAIN : result;
}
