/* Keys and their names: looked up in the block table, deleted and listed by the daemon. */
#include "client/client.h"

static int digit(uint8_t c) { return c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1; }

/* at_once: the daemon is not asked; -EAGAIN. */
static int table_or_daemon(struct kvfs_client *client, struct connection *connection, uint64_t parent, const char *name, uint32_t size, bool at_once,
                           struct kvfs_record *out) {
    int r = kvfs_table_find_name(connection->table, parent, name, size, out);
    if (r != -EAGAIN && !(r == 0 && out->flags & KVFS_INODE_ASK))
        return r;
    if (at_once)
        return -EAGAIN;
    uint64_t words[2 + (KVFS_NAME_MAX + 8) / 8] = {parent, size};
    uint8_t *reply;
    uint32_t reply_size;
    memcpy(words + 2, name, size);
    r = wire_ask(client, connection, WIRE_LOOKUP, words, 16 + (uint32_t)round_up(size, 8), client->options.timeout_ms, &reply, &reply_size);
    if (r < 0)
        return r == -ENOENT || r == -ENOTCONN ? -ENOENT : r; /* without a daemon nobody can say: a miss */
    struct kvfs_inode_record record;
    if (reply_size < sizeof(record)) {
        free(reply);
        return client_fail(-EPROTO, "%s: the daemon answered a look-up with %u bytes", client->pool, reply_size);
    }
    memcpy(&record, reply, sizeof(record));
    free(reply);
    record_from_inode(&record, out);
    return 0;
}

/* The inode number of the directory that a path of `size` bytes leads to from *inode. 0, -ENOENT. */
static int directory_find(struct kvfs_client *client, struct connection *connection, const char *path, uint32_t size, bool at_once, uint64_t *inode) {
    struct kvfs_record record;
    for (uint32_t at = 0; at < size;) {
        const char *slash = memchr(path + at, '/', size - at);
        uint32_t part = slash ? (uint32_t)(slash - (path + at)) : size - at;
        int r = table_or_daemon(client, connection, *inode, path + at, part, at_once, &record);
        if (r == 0 && record.kind != KVFS_KIND_DIRECTORY)
            r = -ENOENT;
        else if (r == -ENOENT && connection->pod) { /* perhaps another node's, which has the same number everywhere */
            record.inode = kvfs_directory_number(*inode, path + at, part, connection->array.geometry.secret);
            r = 0;
        }
        if (r < 0)
            return r;
        *inode = record.inode;
        at += part + 1;
    }
    return 0;
}

/* The directory of a file below the namespace. 0 and its inode number, which is 0 if there is none. */
static int file_directory(struct kvfs_client *client, struct connection *connection, struct shards *shards, const struct key_file *file,
                          bool is_short, uint64_t *inode) {
    uint32_t size = file->name_at ? file->name_at - 1 : 0;
    uint8_t shard = is_short ? (uint8_t)(digit((uint8_t)file->path[0]) << 4 | digit((uint8_t)file->path[1])) : 0;
    bool known =
        is_short ? shards->known[shard] : shards->last_known && shards->last_size == size && memcmp(shards->last_path, file->path, size) == 0;
    if (known) {
        *inode = is_short ? shards->inodes[shard] : shards->last;
        return 0;
    }
    *inode = shards->space;
    int r = directory_find(client, connection, file->path, size, shards->at_once, inode);
    if (r < 0 && r != -ENOENT)
        return r;
    if (r < 0)
        *inode = 0;
    if (is_short) {
        shards->inodes[shard] = *inode;
        shards->known[shard] = 1;
    } else {
        shards->last = *inode;
        shards->last_size = size;
        shards->last_known = true;
        memcpy(shards->last_path, file->path, size);
    }
    return 0;
}

int key_find(struct kvfs_client *client, struct connection *connection, struct shards *shards, uint32_t kind, const uint8_t *key, uint32_t key_size,
             struct kvfs_record *out) {
    struct key_file file;
    uint64_t directory;
    int r = key_check(kind, key, key_size);
    if (r < 0)
        return r;
    if (!shards->space) {
        uint64_t inode = client->base;
        r = directory_find(client, connection, client->space, (uint32_t)strlen(client->space), shards->at_once, &inode);
        if (r < 0)
            return r;
        shards->space = inode;
    }
    key_file(kind, key, key_size, &file);
    r = file_directory(client, connection, shards, &file, key_is_short(kind, key_size), &directory);
    if (r < 0)
        return r;
    if (!directory)
        return -ENOENT;
    const char *name = file.path + file.name_at;
    uint32_t name_size = file.path_size - file.name_at;
    r = table_or_daemon(client, connection, directory, name, name_size, shards->at_once, out);
    if (r == -ENOENT && connection->pod)
        r = foreign_find(connection->pod, &connection->array.geometry, directory, name, name_size, out);
    if (r == 1)
        r = -ENOENT;
    if (r == 0 && (out->kind != KVFS_KIND_FILE || !(out->flags & KVFS_INODE_SEALED)))
        r = -ENOENT;
    return r;
}

/* Either of sizes and found may be NULL. at_once: nobody is asked; -EAGAIN. `prefix`: end with the first key that is missing. Returns how many
 * keys before the end exist. */
static int look_up(struct kvfs_client *client, const struct kvfs_keys *keys, bool at_once, bool prefix, int64_t *sizes, uint8_t *found) {
    struct connection *connection;
    struct shards shards = {.at_once = at_once};
    uint32_t asked = 0, missing = 0;
    const uint8_t *key = keys->data;
    int r = (at_once ? connection_get_at_once : connection_get)(client, &connection);
    if (r < 0)
        return r;
    for (uint32_t i = 0; i < keys->count && !(prefix && missing); key += keys->sizes[i++]) {
        struct kvfs_record record;
        r = key_find(client, connection, &shards, keys->kind, key, keys->sizes[i], &record);
        if (r < 0 && r != -ENOENT)
            break;
        asked++;
        if (sizes)
            sizes[i] = r == 0 ? (int64_t)record.size : -ENOENT;
        if (found)
            found[i] = r == 0;
        missing += r == -ENOENT;
    }
    connection_put(connection);
    if (r < 0 && r != -ENOENT)
        return r;
    TALLY(client, lookups, asked);
    TALLY(client, misses, missing);
    return (int)(asked - missing);
}

int kvfs_sizes(struct kvfs_client *client, const struct kvfs_keys *keys, int64_t *sizes) {
    int r = look_up(client, keys, false, false, sizes, NULL);
    return r < 0 ? r : 0;
}

int kvfs_exists(struct kvfs_client *client, const struct kvfs_keys *keys, uint8_t *found) {
    int r = look_up(client, keys, false, false, NULL, found);
    return r < 0 ? r : 0;
}

int kvfs_exists_prefix(struct kvfs_client *client, const struct kvfs_keys *keys) { return look_up(client, keys, false, true, NULL, NULL); }

int keys_exist_at_once(struct kvfs_client *client, const struct kvfs_keys *keys, uint8_t *found) {
    return look_up(client, keys, true, false, NULL, found);
}

int kvfs_fresh(struct kvfs_client *client) {
    struct connection *connection;
    uint8_t *reply = NULL;
    uint32_t reply_size = 0;
    struct daemon_wait wait = {0};
    bool again;
    int r;
    do {
        r = daemon_get(client, &wait, &connection);
        if (r < 0)
            return r;
        if (connection->pod)
            r = wire_ask(client, connection, WIRE_FRESH, NULL, 0, client->options.timeout_ms, &reply, &reply_size);
        free(reply);
        again = daemon_retry(connection, &wait, r);
        connection_put(connection);
    } while (again);
    return r;
}

/* ---- delete, list ---- */

/* As many keys from `first` on as one request takes; *key is the first one's, and then the next one's. Returns how many, or -errno. */
static int delete_request(struct kvfs_client *client, const struct kvfs_keys *keys, uint32_t first, const uint8_t **key, struct message_buffer *out) {
    struct names_request request;
    uint32_t flags = 0, count = 0, most = (uint32_t)min_u64(keys->count - first, KVFS_WIRE_ITEMS_MAX);
    for (uint32_t i = first; i < first + most; i++)
        flags |= key_is_short(keys->kind, keys->sizes[i]) ? 0 : WIRE_TABLE;
    int r = 0;
    names_begin(&request, flags);
    for (; r == 0 && count < most; count++) {
        struct key_file file;
        uint32_t size = keys->sizes[first + count];
        r = key_check(keys->kind, *key, size);
        if (r < 0)
            break;
        key_file(keys->kind, *key, size, &file);
        int directory = names_directory(&request, &file);
        if (directory < 0)
            break;
        struct wire_delete item = {.name_size = file.path_size - file.name_at, .directory = (uint32_t)directory};
        message_append(&request.items, &item, sizeof(item));
        message_append(&request.items, file.path + file.name_at, item.name_size);
        *key += size;
    }
    names_end(&request, client, count, out);
    if (r < 0)
        free(out->data);
    return r < 0 ? r : (int)count;
}

/* Keys from `first` on, on one connection. Returns up to which key all are answered. */
static uint32_t delete_some(struct kvfs_client *client, struct connection *connection, const struct kvfs_keys *keys, uint32_t first,
                            const uint8_t **key, uint8_t *deleted, int *result) {
    int r = 0;
    while (first < keys->count) {
        struct message_buffer request;
        const uint8_t *behind = *key;
        r = delete_request(client, keys, first, &behind, &request);
        if (r < 0)
            break;
        uint32_t count = (uint32_t)r, reply_size = 0;
        uint8_t *reply = NULL;
        r = message_ask(client, connection, WIRE_DELETE, &request, &reply, &reply_size);
        if (r == 0 && reply_size != count)
            r = client_fail(-EPROTO, "%s: the daemon answered a delete of %u keys with %u bytes", client->pool, count, reply_size);
        for (uint32_t i = 0; r == 0 && i < count; i++)
            deleted[first + i] = reply[i] != 0;
        free(reply);
        if (r < 0)
            break;
        first += count;
        *key = behind;
    }
    *result = r;
    return first;
}

int kvfs_delete(struct kvfs_client *client, const struct kvfs_keys *keys, uint8_t *deleted) {
    struct daemon_wait wait = {0};
    const uint8_t *key = keys->data;
    uint32_t done = 0;
    bool again = true;
    int r = 0, total = 0;
    while (again) {
        struct connection *connection;
        r = writer_get(client, &wait, &connection);
        if (r < 0)
            break;
        done = delete_some(client, connection, keys, done, &key, deleted, &r);
        again = daemon_retry(connection, &wait, r);
        connection_put(connection);
    }
    for (uint32_t i = 0; i < done; i++)
        total += deleted[i];
    TALLY(client, deletes, (uint64_t)total);
    return r < 0 ? r : total;
}

static int list_try(struct kvfs_client *client, struct connection *connection, const void *after, uint32_t after_size, void *data, uint64_t data_size,
                    uint32_t *sizes, uint32_t capacity) {
    int r = 0;
    struct message_buffer request = {0};
    char name[2 * KVFS_KEY_MAX];
    uint64_t name_size = key_hex(after, after_size, name), count = 0, used = 0;
    capacity = (uint32_t)min_u64(capacity, min_u64(KVFS_WIRE_ITEMS_MAX, data_size / KVFS_KEY_MAX));
    message_append_where(&request, client, WIRE_LONG, capacity);
    message_append(&request, &name_size, 8);
    message_append(&request, name, name_size);
    uint8_t *reply = NULL;
    uint32_t reply_size = 0;
    if (capacity == 0)
        r = client_fail(-ERANGE, "%llu bytes hold no key: %u are needed for each", (unsigned long long)data_size, KVFS_KEY_MAX);
    if (r == 0)
        r = message_ask(client, connection, WIRE_LIST, &request, &reply, &reply_size);
    else
        free(request.data);
    if (r == 0 && reply_size < 8)
        r = -EPROTO;
    if (r == 0)
        memcpy(&count, reply, 8);
    if (count > capacity)
        r = -EPROTO;
    uint64_t at = 8;
    for (uint32_t i = 0; i < count && r == 0; i++) {
        uint64_t size = 0;
        if (at + 8 <= reply_size)
            memcpy(&size, reply + at, 8);
        if (size < 2 || size > 2 * KVFS_KEY_MAX || size % 2 || at + 8 + size > reply_size) {
            r = -EPROTO;
            break;
        }
        for (uint32_t k = 0; k < size && r == 0; k += 2) {
            int high = digit(reply[at + 8 + k]), low = digit(reply[at + 9 + k]);
            if (high < 0 || low < 0)
                r = -EPROTO;
            ((uint8_t *)data)[used++] = (uint8_t)(high << 4 | low);
        }
        sizes[i] = (uint32_t)(size / 2);
        at += 8 + round_up(size, 8);
    }
    if (r == -EPROTO)
        client_fail(r, "%s: the daemon's list of %llu names in %u bytes makes no sense", client->pool, (unsigned long long)count, reply_size);
    free(reply);
    return r < 0 ? r : (int)count;
}

int kvfs_list(struct kvfs_client *client, const void *after, uint32_t after_size, void *data, uint64_t data_size, uint32_t *sizes,
              uint32_t capacity) {
    struct daemon_wait wait = {0};
    bool again = true;
    int r = 0;
    if (after_size > KVFS_KEY_MAX)
        return client_fail(-EINVAL, "a key of %u bytes: at most %u", after_size, KVFS_KEY_MAX);
    while (again) {
        struct connection *connection;
        r = daemon_get(client, &wait, &connection);
        if (r < 0)
            break;
        r = list_try(client, connection, after, after_size, data, data_size, sizes, capacity);
        again = daemon_retry(connection, &wait, r);
        connection_put(connection);
    }
    return r;
}
