/* Keys and their names: looked up in the block table, deleted and listed by the daemon. */
#include "client/client.h"

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

static int key_directory(struct kvfs_client *client, struct connection *connection, const char *path, bool at_once, uint64_t *inode) {
    struct kvfs_record record;
    while (*path) {
        uint32_t size = (uint32_t)strcspn(path, "/");
        int r = table_or_daemon(client, connection, *inode, path, size, at_once, &record);
        if (r == 0 && record.kind != KVFS_KIND_DIRECTORY)
            r = -ENOENT;
        if (r < 0)
            return r;
        *inode = record.inode;
        path += size + (path[size] == '/');
    }
    return 0;
}

uint32_t key_hex(const uint8_t *key, uint32_t key_size, char *out) {
    static const char digits[] = "0123456789abcdef";
    for (uint32_t i = 0; i < key_size; i++) {
        out[2 * i] = digits[key[i] >> 4];
        out[2 * i + 1] = digits[key[i] & 15];
    }
    return 2 * key_size;
}

int key_find(struct kvfs_client *client, struct connection *connection, struct shards *shards, const uint8_t *key, uint32_t key_size,
             struct kvfs_record *out) {
    char name[2 * KVFS_KEY_MAX];
    int r = 0;
    if (key_size == 0 || key_size > KVFS_KEY_MAX)
        return client_fail(-EINVAL, "a key of %u bytes: 1 to %u are possible", key_size, KVFS_KEY_MAX);
    uint32_t size = key_hex(key, key_size, name);
    if (!shards->space) {
        uint64_t inode = client->base;
        r = key_directory(client, connection, client->space, shards->at_once, &inode);
        if (r < 0)
            return r;
        shards->space = inode;
    }
    if (!shards->known[key[0]]) {
        r = table_or_daemon(client, connection, shards->space, name, 2, shards->at_once, out);
        if (r < 0 && r != -ENOENT)
            return r;
        shards->inodes[key[0]] = r == 0 && out->kind == KVFS_KIND_DIRECTORY ? out->inode : 0;
        shards->known[key[0]] = 1;
    }
    if (!shards->inodes[key[0]])
        return -ENOENT;
    r = table_or_daemon(client, connection, shards->inodes[key[0]], name, size, shards->at_once, out);
    if (r == 0 && (out->kind != KVFS_KIND_FILE || !(out->flags & KVFS_INODE_SEALED)))
        r = -ENOENT;
    return r;
}

/* Either of sizes and found may be NULL. Returns how many there are. */
static int look_up(struct kvfs_client *client, const struct kvfs_keys *keys, bool at_once, int64_t *sizes, uint8_t *found) {
    struct connection *connection;
    struct shards shards = {.at_once = at_once};
    uint32_t missing = 0;
    const uint8_t *key = keys->data;
    int r = (at_once ? connection_get_at_once : connection_get)(client, &connection);
    if (r < 0)
        return r;
    for (uint32_t i = 0; i < keys->count; key += keys->sizes[i++]) {
        struct kvfs_record record;
        r = key_find(client, connection, &shards, key, keys->sizes[i], &record);
        if (r < 0 && r != -ENOENT)
            break;
        if (sizes)
            sizes[i] = r == 0 ? (int64_t)record.size : -ENOENT;
        if (found)
            found[i] = r == 0;
        missing += r == -ENOENT;
    }
    connection_put(connection);
    if (r < 0 && r != -ENOENT)
        return r;
    TALLY(client, lookups, keys->count);
    TALLY(client, misses, missing);
    return (int)(keys->count - missing);
}

int kvfs_sizes(struct kvfs_client *client, const struct kvfs_keys *keys, int64_t *sizes) {
    int r = look_up(client, keys, false, sizes, NULL);
    return r < 0 ? r : 0;
}

int kvfs_exists(struct kvfs_client *client, const struct kvfs_keys *keys, uint8_t *found) {
    int r = look_up(client, keys, false, NULL, found);
    return r < 0 ? r : 0;
}

int keys_exist_at_once(struct kvfs_client *client, const struct kvfs_keys *keys, uint8_t *found) { return look_up(client, keys, true, NULL, found); }

/* ---- delete, list ---- */

int kvfs_delete(struct kvfs_client *client, const struct kvfs_keys *keys, uint8_t *deleted) {
    struct connection *connection;
    int r = writer_get(client, &connection), total = 0;
    if (r < 0)
        return r;
    const uint8_t *key = keys->data;
    for (uint32_t first = 0, count; first < keys->count && r == 0; first += count) {
        struct message_buffer request = {0};
        count = (uint32_t)min_u64(keys->count - first, KVFS_WIRE_ITEMS_MAX);
        message_append_where(&request, client, count);
        for (uint32_t i = first; i < first + count && r == 0; key += keys->sizes[i++]) {
            char name[2 * KVFS_KEY_MAX];
            if (keys->sizes[i] == 0 || keys->sizes[i] > KVFS_KEY_MAX) {
                r = client_fail(-EINVAL, "key %u has %u bytes: 1 to %u are possible", i, keys->sizes[i], KVFS_KEY_MAX);
                break;
            }
            uint64_t size = key_hex(key, keys->sizes[i], name);
            message_append(&request, &size, 8);
            message_append(&request, name, size);
        }
        uint8_t *reply = NULL;
        uint32_t reply_size = 0;
        if (r < 0) {
            free(request.data);
            break;
        }
        r = message_ask(client, connection, WIRE_DELETE, &request, &reply, &reply_size);
        if (r == 0 && reply_size != count)
            r = client_fail(-EPROTO, "%s: the daemon answered a delete of %u keys with %u bytes", client->pool, count, reply_size);
        for (uint32_t i = 0; r == 0 && i < count; i++)
            total += deleted[first + i] = reply[i] != 0;
        free(reply);
    }
    TALLY(client, deletes, (uint64_t)total);
    connection_put(connection);
    return r < 0 ? r : total;
}

static int digit(uint8_t c) { return c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1; }

int kvfs_list(struct kvfs_client *client, const void *after, uint32_t after_size, void *data, uint64_t data_size, uint32_t *sizes,
              uint32_t capacity) {
    struct connection *connection;
    if (after_size > KVFS_KEY_MAX)
        return client_fail(-EINVAL, "a key of %u bytes: at most %u", after_size, KVFS_KEY_MAX);
    int r = connection_get(client, &connection);
    if (r < 0)
        return r;
    struct message_buffer request = {0};
    char name[2 * KVFS_KEY_MAX];
    uint64_t name_size = key_hex(after, after_size, name), count = 0, used = 0;
    capacity = (uint32_t)min_u64(capacity, min_u64(KVFS_WIRE_ITEMS_MAX, data_size / KVFS_KEY_MAX));
    message_append_where(&request, client, capacity);
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
    connection_put(connection);
    return r < 0 ? r : (int)count;
}
