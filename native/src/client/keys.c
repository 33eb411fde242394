/* Keys as names of files: where a key's block lies, and how a request to the daemon names it. */
#include "client/client.h"

#include "kvfs_checksum.h"

static const char DIGITS[] = "0123456789abcdef";

uint32_t key_hex(const uint8_t *key, uint32_t key_size, char *out) {
    for (uint32_t i = 0; i < key_size; i++) {
        out[2 * i] = DIGITS[key[i] >> 4];
        out[2 * i + 1] = DIGITS[key[i] & 15];
    }
    return 2 * key_size;
}

/* A path below the namespace, of names that a directory can hold. */
static int path_check(const char *path, uint32_t size) {
    if (size == 0 || size > KVFS_PATH_MAX)
        return client_fail(-EINVAL, "a path of %u bytes: 1 to %u are possible", size, KVFS_PATH_MAX);
    if (memchr(path, 0, size))
        return client_fail(-EINVAL, "path '%.200s': a zero byte at %zu of %u", path, strnlen(path, size), size);
    for (const char *at = path, *end = path + size; at <= end;) {
        const char *slash = memchr(at, '/', (size_t)(end - at));
        size_t part = (size_t)((slash ? slash : end) - at);
        if (part == 0 || part > KVFS_NAME_MAX || (at[0] == '.' && (part == 1 || (part == 2 && at[1] == '.'))))
            return client_fail(-EINVAL, "path '%.*s': names of 1 to %u bytes between slashes, none of them '.' or '..', are expected",
                               (int)min_u64(size, 200), path, KVFS_NAME_MAX);
        at += part + 1;
    }
    return 0;
}

int key_check(uint32_t kind, const void *key, uint32_t key_size) {
    if (kind == KVFS_PATHS)
        return path_check(key, key_size);
    if (kind != KVFS_KEYS)
        return client_fail(-EINVAL, "keys of kind %u: %u and %u are known", kind, KVFS_KEYS, KVFS_PATHS);
    if (key_size == 0 || key_size > KVFS_KEY_MAX)
        return client_fail(-EINVAL, "a key of %u bytes: 1 to %u are possible", key_size, KVFS_KEY_MAX);
    return 0;
}

bool key_is_short(uint32_t kind, uint32_t key_size) { return kind == KVFS_KEYS && key_size <= KVFS_KEY_SHORT; }

void key_file(uint32_t kind, const void *key, uint32_t key_size, struct key_file *out) {
    if (kind == KVFS_PATHS) {
        const char *slash = memrchr(key, '/', key_size);
        out->path = key;
        out->path_size = key_size;
        out->name_at = slash ? (uint32_t)(slash - out->path) + 1 : 0;
        return;
    }
    char *digits = out->memory + 3;
    uint32_t size = key_hex(key, key_size, digits);
    memcpy(out->memory, digits, 2);
    out->memory[2] = '/';
    out->path = out->memory;
    out->path_size = 3 + size;
    out->name_at = 3;
    if (key_size > KVFS_KEY_SHORT) {
        /* Its first digits name a directory: 254 of them, and the next as a letter from g on, which no short key's name has. */
        memmove(digits + KVFS_NAME_MAX + 1, digits + KVFS_NAME_MAX, size - KVFS_NAME_MAX);
        digits[KVFS_NAME_MAX - 1] = (char)('g' + (((const uint8_t *)key)[KVFS_KEY_SHORT] >> 4));
        digits[KVFS_NAME_MAX] = '/';
        out->path_size++;
        out->name_at += KVFS_NAME_MAX + 1;
    }
}

/* ---- requests about keys ---- */

void names_begin(struct names_request *request, uint32_t flags) {
    memset(request, 0, sizeof(*request));
    request->flags = flags;
}

int names_directory(struct names_request *request, const struct key_file *file) {
    if (!(request->flags & WIRE_TABLE))
        return 0;
    uint64_t size = file->name_at ? file->name_at - 1 : 0;
    uint32_t slot = (uint32_t)kvfs_checksum(file->path, size, 0) % DIRECTORY_SLOTS;
    for (; request->slots[slot]; slot = (slot + 1) % DIRECTORY_SLOTS) {
        const uint8_t *entry = request->table.data + request->directory_at[request->slots[slot] - 1];
        if (memcmp(entry, &size, sizeof(size)) == 0 && memcmp(entry + sizeof(size), file->path, size) == 0)
            return request->slots[slot] - 1;
    }
    if (request->directory_count == KVFS_WIRE_DIRECTORIES_MAX)
        return -1;
    request->directory_at[request->directory_count] = (uint32_t)request->table.size;
    message_append(&request->table, &size, sizeof(size));
    message_append(&request->table, file->path, size);
    if (!request->table.failed)
        request->slots[slot] = (uint16_t)(request->directory_count + 1);
    return (int)request->directory_count++;
}

void names_end(struct names_request *request, const struct kvfs_client *client, uint32_t count, struct message_buffer *out) {
    uint64_t directories = request->directory_count;
    *out = (struct message_buffer){.failed = request->table.failed || request->items.failed};
    message_append_where(out, client, request->flags, count);
    if (request->flags & WIRE_TABLE) {
        message_append(out, &directories, sizeof(directories));
        message_append(out, request->table.data, request->table.size);
    }
    message_append(out, request->items.data, request->items.size);
    free(request->table.data);
    free(request->items.data);
}
