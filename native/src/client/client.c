/* Connecting to a pool, and closing. */
#include "client/client.h"

#include <limits.h>
#include <stdio.h>
#include <unistd.h>

static int space_check(const char *space) {
    if (strlen(space) >= 1024)
        return client_fail(-EINVAL, "namespace of %zu bytes: at most 1023", strlen(space));
    for (const char *at = space; *space;) {
        size_t size = strcspn(at, "/");
        if (size == 0 || size > KVFS_NAME_MAX || (size == 1 && at[0] == '.') || (size == 2 && at[0] == '.' && at[1] == '.'))
            return client_fail(-EINVAL, "namespace '%s': a relative path of names is expected", space);
        if (!at[size])
            break;
        at += size + 1;
    }
    return 0;
}

/* Programs under libkvfs_preload or libcufile cannot set the option; the environment does it for them. 0 is refused there too. */
static int timeout_from_environment(uint32_t *timeout_ms) {
    const char *text = getenv("KVFS_TIMEOUT_MS");
    if (!text || !*text) {
        *timeout_ms = 2000;
        return 0;
    }
    char *end;
    errno = 0;
    unsigned long value = strtoul(text, &end, 10);
    if (*text < '0' || *text > '9' || *end || errno || value < 1 || value > 3600000)
        return client_fail(-EINVAL, "KVFS_TIMEOUT_MS is '%.32s': 1 to 3600000 are possible", text);
    *timeout_ms = (uint32_t)value;
    return 0;
}

/* The program may go elsewhere before the mount is asked again. */
static void place_of(const char *path, char place[4096]) {
    char here[4096];
    if (path[0] == '/' || !getcwd(here, sizeof(here)) || snprintf(place, 4096, "%s/%s", here, path) >= 4096)
        strcpy(place, path);
}

int client_open(const char *path, const char *pool, uint64_t base, const char *space, const struct kvfs_options *options, struct kvfs_client **out) {
    struct kvfs_options o = {0};
    if (options)
        memcpy(&o, options, min_u64(options->size, sizeof(o)));
    if (!o.timeout_ms && timeout_from_environment(&o.timeout_ms) < 0)
        return -EINVAL;
    o.depth = o.depth ? o.depth : 8;
    o.staging_size = o.staging_size ? o.staging_size : 256ull << 20;
    if (o.flags & ~(uint32_t)(KVFS_READ_ONLY | KVFS_NO_VERIFY) || o.depth > 64 || o.timeout_ms > 3600000 || o.staging_size >> 42)
        return client_fail(-EINVAL, "options: flags 0x%x, depth %u (1 to 64), timeout %u ms, staging of %llu bytes", o.flags, o.depth, o.timeout_ms,
                           (unsigned long long)o.staging_size);
    struct kvfs_client *client = calloc(1, sizeof(*client));
    if (client)
        client->hits = malloc(CLIENT_HITS_MAX * sizeof(*client->hits));
    if (!client || !client->hits) {
        free(client);
        return client_fail(-ENOMEM, "no memory for a client");
    }
    client->pid = getpid();
    client->watch_fds[0] = client->watch_fds[1] = -1;
    client->options = o;
    client->hits_sent_ns = now_ns();
    client->base = base;
    pthread_mutex_init(&client->lock, NULL);
    strcpy(client->space, space);
    strcpy(client->path, path);
    strcpy(client->pool, pool);
    place_of(path, client->place);
    int r = connection_first(client);
    if (r < 0) {
        ask_forget(client);
        free(client->hits);
        free(client);
        return r;
    }
    client_watch(client);
    *out = client;
    return 0;
}

int kvfs_connect(const char *path, const char *space, const struct kvfs_options *options, struct kvfs_client **out) {
    char pool[PATH_MAX];
    uint64_t base = 0;
    *out = NULL;
    int r = strlen(path) < PATH_MAX ? space_check(space ? space : "") : client_fail(-ENAMETOOLONG, "path of %zu bytes", strlen(path));
    if (r == 0)
        r = pool_of(path, pool, &base);
    return r == 0 ? client_open(path, pool, base, space ? space : "", options, out) : r;
}

void kvfs_close(struct kvfs_client *client) {
    if (!client || client->pid != getpid()) /* a child's copy: the rings are its parent's */
        return;
    stage_stop(client);
    client_watch_end(client);
    struct connection *connection = client->connection;
    client_hit(client, connection, NULL);
    uint64_t until = now_ns() + client->options.timeout_ms * 1000000ull;
    while (client_owed(client) && now_ns() < until)
        usleep(1000);
    while (client->retired) {
        struct connection *next = client->retired->next;
        connection_put(client->retired);
        client->retired = next;
    }
    connection_put(connection);
    claims_free(client);
    ask_forget(client);
    pthread_mutex_destroy(&client->lock);
    free(client->hits);
    free(client);
}
