/* The calls of libkvfs that look and read: keys to records, records to bytes. */
#include "client/client.h"

#include <stdio.h>
#include <unistd.h>

/* ---- lanes ---- */

int lane_take(struct kvfs_client *client, struct session *session, struct lane **out) {
    pthread_mutex_lock(&session->lock);
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_sec += client->options.timeout_ms / 1000;
    until.tv_nsec += client->options.timeout_ms % 1000 * 1000000;
    if (until.tv_nsec >= 1000000000)
        until.tv_sec++, until.tv_nsec -= 1000000000;
    int r = 0;
    while (!session->idle && session->lane_count >= LANES_MAX && r == 0)
        r = pthread_cond_timedwait(&session->lane_idle, &session->lock, &until);
    struct lane *lane = session->idle;
    if (lane)
        session->idle = lane->next;
    else if (session->lane_count < LANES_MAX)
        session->lane_count++, r = 1;
    else
        r = client_fail(-EBUSY, "%s: %u calls are under way, and none ended in %u ms", client->path, LANES_MAX, client->options.timeout_ms);
    pthread_mutex_unlock(&session->lock);
    if (r == 1) {
        lane = calloc(1, sizeof(*lane));
        r = lane ? ring_init(&lane->ring, &session->array, 256) : -ENOMEM;
        if (r < 0) {
            free(lane);
            pthread_mutex_lock(&session->lock);
            session->lane_count--;
            pthread_cond_signal(&session->lane_idle);
            pthread_mutex_unlock(&session->lock);
            return client_fail(r, "%s: io_uring: %s%s", client->path, strerror(-r),
                               r == -ENOMEM  ? "; raise the memlock limit (ulimit -l)"
                               : r == -EPERM ? "; set /proc/sys/kernel/io_uring_disabled to 0"
                                             : "");
        }
        lane->session = session;
    }
    if (!lane)
        return r < 0 ? r : client_fail(-EBUSY, "%s: no lane became free", client->path);
    lane->client = client;
    if (!ring_idle(&lane->ring))
        lane_reap(lane, false);
    *out = lane;
    return 0;
}

void lane_give(struct lane *lane) {
    struct session *session = lane->session;
    assert(lane->active_count == 0);
    pthread_mutex_lock(&session->lock);
    lane->next = session->idle;
    session->idle = lane;
    pthread_cond_signal(&session->lane_idle);
    pthread_mutex_unlock(&session->lock);
}

uint8_t *lane_bounce(struct lane *lane, uint64_t *size) {
    uint64_t wanted = round_up(*size, SMALL_SIZE);
    for (uint32_t i = 0; i < 8; i++)
        if (lane->bounces[i] && lane->bounce_sizes[i] >= wanted) {
            uint8_t *bounce = lane->bounces[i];
            *size = lane->bounce_sizes[i];
            lane->bounces[i] = NULL;
            return bounce;
        }
    void *bounce = NULL;
    *size = wanted;
    return posix_memalign(&bounce, KVFS_PAGE_SIZE, wanted) ? NULL : bounce;
}

void lane_bounce_give(struct lane *lane, uint8_t *bounce, uint64_t size) {
    for (uint32_t i = 0; i < 8 && size <= 8 << 20; i++)
        if (!lane->bounces[i]) {
            lane->bounces[i] = bounce;
            lane->bounce_sizes[i] = size;
            return;
        }
    free(bounce);
}

/* ---- memory that devices still own ---- */

/* session->lock is held. Whether devices owe answers to idle lanes. */
static bool idle_reap(struct session *session) {
    bool owed = false;
    for (struct lane *lane = session->idle; lane; lane = lane->next)
        if (!ring_idle(&lane->ring)) {
            lane_reap(lane, true);
            owed = owed || !ring_idle(&lane->ring);
        }
    return owed;
}

void session_reap(struct session *session) {
    pthread_mutex_lock(&session->lock);
    idle_reap(session);
    pthread_mutex_unlock(&session->lock);
}

/* *owed: whether devices owe answers, to reads or, which are no zombies, to writes. */
static bool session_overlaps(struct session *session, const uint8_t *data, uint64_t size, bool *owed) {
    bool found = false;
    pthread_mutex_lock(&session->lock);
    *owed = idle_reap(session) || *owed || session->zombies;
    for (struct fetch *fetch = session->zombies; fetch; fetch = fetch->next)
        found = found || (fetch->data < data + size && data < fetch->data + fetch->size);
    pthread_mutex_unlock(&session->lock);
    return found;
}

/* client->lock is held: sessions of daemons that are gone go when nothing needs them. */
void client_prune(struct kvfs_client *client) {
    for (struct session **link = &client->retired; *link;) {
        struct session *session = *link;
        bool owed = false;
        if (atomic_load(&session->refs) > 1 || (session_overlaps(session, NULL, 0, &owed), owed)) {
            link = &session->next;
            continue;
        }
        *link = session->next;
        session_put(session);
    }
}

static pthread_mutex_t claims_lock = PTHREAD_MUTEX_INITIALIZER;
static struct claim *claims;
static atomic_uint claim_count;

void claim_add(struct claim *claim) {
    pthread_mutex_lock(&claims_lock);
    claim->next = claims;
    claims = claim;
    atomic_fetch_add(&claim_count, 1);
    pthread_mutex_unlock(&claims_lock);
}

void claim_remove(struct claim *claim) {
    pthread_mutex_lock(&claims_lock);
    struct claim **link = &claims;
    while (*link != claim)
        link = &(*link)->next;
    *link = claim->next;
    atomic_fetch_sub(&claim_count, 1);
    pthread_mutex_unlock(&claims_lock);
}

static bool claimed(const uint8_t *data, uint64_t size) {
    bool found = false;
    if (!atomic_load(&claim_count))
        return false;
    pthread_mutex_lock(&claims_lock);
    for (struct claim *claim = claims; claim && !found; claim = claim->next)
        found = claim->data < data + size && data < claim->data + claim->size;
    pthread_mutex_unlock(&claims_lock);
    return found;
}

bool client_overlaps_zombie(struct kvfs_client *client, const void *data, uint64_t size) {
    if (claimed(data, size))
        return true;
    if (!atomic_load(&client->zombies))
        return false;
    bool owed = false;
    pthread_mutex_lock(&client->lock);
    bool found = session_overlaps(client->session, data, size, &owed);
    for (struct session *session = client->retired; session; session = session->next)
        found = session_overlaps(session, data, size, &owed) || found;
    client_prune(client);
    pthread_mutex_unlock(&client->lock);
    return found;
}

bool client_owed(struct kvfs_client *client) {
    bool owed = false;
    pthread_mutex_lock(&client->lock);
    session_overlaps(client->session, NULL, 0, &owed);
    for (struct session *session = client->retired; session; session = session->next)
        session_overlaps(session, NULL, 0, &owed);
    pthread_mutex_unlock(&client->lock);
    return owed;
}

int kvfs_busy(struct kvfs_client *client, const void *data, uint64_t size) {
    if (client->pid != getpid())
        return client_fail(-ECHILD, "%s: connected by process %d", client->path, (int)client->pid);
    return client_overlaps_zombie(client, data, size);
}

static int by_address(const void *a, const void *b) {
    const struct kvfs_buffer *const *x = a, *const *y = b;
    return (*x)->data < (*y)->data ? -1 : (*x)->data > (*y)->data;
}

int client_check_buffers(struct kvfs_client *client, const struct kvfs_buffer *buffers, uint32_t count) {
    bool sorted = true, zombies = atomic_load(&client->zombies) || atomic_load(&claim_count);
    for (uint32_t i = 0; i < count; i++) {
        uint64_t start = (uint64_t)(uintptr_t)buffers[i].data;
        if (start + buffers[i].size < start || (!start && buffers[i].size))
            return client_fail(-EINVAL, "buffer %u: %llu bytes at 0x%llx", i, (unsigned long long)buffers[i].size, (unsigned long long)start);
        if (zombies && client_overlaps_zombie(client, buffers[i].data, buffers[i].size))
            return client_fail(-EBUSY, "buffer %u: a device that gave no answer in time may still write into it", i);
        if (i && start < (uint64_t)(uintptr_t)buffers[i - 1].data + buffers[i - 1].size)
            sorted = false;
    }
    if (sorted)
        return 0;
    const struct kvfs_buffer **order = malloc(count * sizeof(*order));
    if (!order)
        return client_fail(-ENOMEM, "no memory for a batch of %u", count);
    uint32_t some = 0;
    for (uint32_t i = 0; i < count; i++)
        if (buffers[i].size)
            order[some++] = &buffers[i];
    qsort(order, some, sizeof(*order), by_address);
    int r = 0;
    for (uint32_t i = 1; i < some && r == 0; i++)
        if ((uint8_t *)order[i - 1]->data + order[i - 1]->size > (uint8_t *)order[i]->data)
            r = client_fail(-EINVAL, "buffers %td and %td overlap", order[i - 1] - buffers, order[i] - buffers);
    free(order);
    return r;
}

/* ---- names ---- */

static int table_or_daemon(struct kvfs_client *client, struct session *session, uint64_t parent, const char *name, uint32_t size,
                           struct kvfs_record *out) {
    int r = kvfs_table_find_name(session->table, parent, name, size, out);
    if (r != -EAGAIN && !(r == 0 && out->flags & KVFS_INODE_ASK))
        return r;
    uint64_t words[2 + (KVFS_NAME_MAX + 8) / 8] = {parent, size};
    uint8_t *reply;
    uint32_t reply_size;
    memcpy(words + 2, name, size);
    r = wire_ask(client, session, WIRE_LOOKUP, words, 16 + (uint32_t)round_up(size, 8), client->options.timeout_ms, &reply, &reply_size);
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

int key_directory(struct kvfs_client *client, struct session *session, const char *path, uint64_t *inode) {
    struct kvfs_record record;
    while (*path) {
        uint32_t size = (uint32_t)strcspn(path, "/");
        int r = table_or_daemon(client, session, *inode, path, size, &record);
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

int key_find(struct kvfs_client *client, struct session *session, struct shards *shards, const uint8_t *key, uint32_t key_size,
             struct kvfs_record *out) {
    char name[2 * KVFS_KEY_MAX];
    int r = 0;
    if (key_size == 0 || key_size > KVFS_KEY_MAX)
        return client_fail(-EINVAL, "a key of %u bytes: 1 to %u are possible", key_size, KVFS_KEY_MAX);
    uint32_t size = key_hex(key, key_size, name);
    if (!shards->space) {
        uint64_t inode = client->base;
        r = key_directory(client, session, client->space, &inode);
        if (r < 0)
            return r;
        shards->space = inode;
    }
    if (!shards->known[key[0]]) {
        r = table_or_daemon(client, session, shards->space, name, 2, out);
        if (r < 0 && r != -ENOENT)
            return r;
        shards->inodes[key[0]] = r == 0 && out->kind == KVFS_KIND_DIRECTORY ? out->inode : 0;
        shards->known[key[0]] = 1;
    }
    if (!shards->inodes[key[0]])
        return -ENOENT;
    r = table_or_daemon(client, session, shards->inodes[key[0]], name, size, out);
    if (r == 0 && (out->kind != KVFS_KIND_FILE || !(out->flags & KVFS_INODE_SEALED)))
        r = -ENOENT;
    return r;
}

/* Either of sizes and found may be NULL. */
static int look_up(struct kvfs_client *client, const struct kvfs_keys *keys, int64_t *sizes, uint8_t *found) {
    struct session *session;
    struct shards shards = {0};
    uint32_t missing = 0;
    const uint8_t *key = keys->data;
    int r = session_get(client, &session);
    if (r < 0)
        return r;
    for (uint32_t i = 0; i < keys->count; key += keys->sizes[i++]) {
        struct kvfs_record record;
        r = key_find(client, session, &shards, key, keys->sizes[i], &record);
        if (r < 0 && r != -ENOENT)
            break;
        if (sizes)
            sizes[i] = r == 0 ? (int64_t)record.size : -ENOENT;
        if (found)
            found[i] = r == 0;
        missing += r == -ENOENT;
    }
    TALLY(client, lookups, keys->count);
    TALLY(client, misses, missing);
    session_put(session);
    return r == -ENOENT ? 0 : r;
}

int kvfs_sizes(struct kvfs_client *client, const struct kvfs_keys *keys, int64_t *sizes) { return look_up(client, keys, sizes, NULL); }

int kvfs_exists(struct kvfs_client *client, const struct kvfs_keys *keys, uint8_t *found) { return look_up(client, keys, NULL, found); }

/* ---- get ---- */

struct get_call {
    struct kvfs_client *client;
    struct session *session;
    const struct kvfs_keys *keys;
    const struct kvfs_buffer *buffers;
    int64_t *results;
    const uint8_t **places;              /* of the keys */
    uint8_t *tries;                      /* how often a name led to an inode that was gone */
    uint32_t read;
    int error;
    struct shards shards;
};

static void get_done(struct lane *lane, struct fetch *fetch);

static void get_start(struct get_call *call, struct lane *lane, uint32_t i, uint64_t until_ns) {
    struct kvfs_record record;
    int r = key_find(call->client, call->session, &call->shards, call->places[i], call->keys->sizes[i], &record);
    if (r < 0 && r != -ENOENT && !call->error)
        call->error = r;
    if (r == 0 && record.size > call->buffers[i].size)
        r = -ERANGE;
    if (r < 0) {
        call->results[i] = r;
        if (r == -ENOENT)
            TALLY(call->client, misses, 1);
        return;
    }
    if (stage_take(call->client, &record, call->buffers[i].data, until_ns)) {
        call->results[i] = (int64_t)record.size;
        call->read++;
        client_hit(call->client, call->session, record.inode);
        TALLY(call->client, hits, 1);
        TALLY(call->client, gets, 1);
        TALLY(call->client, get_bytes, record.size);
        return;
    }
    struct fetch *fetch = fetch_get(lane);
    if (!fetch) {
        call->results[i] = -ENOMEM;
        return;
    }
    fetch->record = record;
    fetch->size = record.size;
    fetch->data = call->buffers[i].data;
    fetch->until_ns = until_ns;
    fetch->done = get_done;
    fetch->owner = call;
    fetch->cookie = i;
    fetch_start(lane, fetch);
}

static void get_done(struct lane *lane, struct fetch *fetch) {
    struct get_call *call = fetch->owner;
    uint32_t i = (uint32_t)fetch->cookie;
    if (fetch->result == -ESTALE && call->tries[i]++ < CLIENT_RETRIES) { /* replaced or evicted meanwhile: what does the name say now? */
        memset(&call->shards, 0, sizeof(call->shards));
        get_start(call, lane, i, fetch->until_ns);
        return;
    }
    call->results[i] = fetch->result == -ESTALE ? -ENOENT : fetch->result;
    if (fetch->result < 0) {
        TALLY(call->client, misses, 1);
        return;
    }
    call->read++;
    client_hit(call->client, call->session, fetch->record.inode);
    TALLY(call->client, hits, 1);
    TALLY(call->client, gets, 1);
    TALLY(call->client, get_bytes, (uint64_t)fetch->result);
}

int kvfs_get(struct kvfs_client *client, const struct kvfs_keys *keys, const struct kvfs_buffer *buffers, int64_t *results) {
    struct get_call call = {.client = client, .keys = keys, .buffers = buffers, .results = results};
    struct lane *lane;
    uint64_t began = now_ns(); /* a block's turn; that of the first is the call's beginning */
    int r = session_get(client, &call.session);
    if (r < 0)
        return r;
    r = client_check_buffers(client, buffers, keys->count);
    if (r == 0)
        r = lane_take(client, call.session, &lane);
    if (r < 0) {
        session_put(call.session);
        return r;
    }
    call.places = malloc((keys->count + 1) * sizeof(*call.places));
    call.tries = calloc(keys->count + 1, 1);
    if (call.places && call.tries) {
        const uint8_t *key = keys->data;
        for (uint32_t i = 0; i < keys->count; key += keys->sizes[i++])
            call.places[i] = key;
        uint32_t next = 0;
        bool more;
        do {
            /* A block that waits for its proof keeps no device busy: up to two more are read meanwhile. */
            while (next < keys->count && lane->active_count - lane->ready_count < client->options.depth &&
                   lane->active_count < client->options.depth + 2)
                get_start(&call, lane, next++, began + client->options.timeout_ms * 1000000ull);
            more = lane_step(lane, 1000000000) || next < keys->count;
            began = now_ns();
        } while (more);
    } else {
        call.error = client_fail(-ENOMEM, "no memory for a batch of %u", keys->count);
    }
    TALLY(client, lookups, keys->count);
    free(call.places);
    free(call.tries);
    lane_give(lane);
    session_put(call.session);
    return call.error < 0 ? call.error : (int)call.read;
}

/* ---- any file ---- */

static void attributes_of(const struct kvfs_record *record, bool sealed, struct kvfs_attributes *out) {
    *out = (struct kvfs_attributes){
        .inode = record->inode, .size = record->size, .version = record->version, .mtime_ns = record->mtime_ns, .ctime_ns = record->ctime_ns,
        .atime_ns = record->atime_ns, .mode = record->mode, .uid = record->uid, .gid = record->gid, .nlink = record->nlink, .sealed = sealed};
}

int kvfs_walk(struct kvfs_client *client, const char *path, struct kvfs_attributes *out, uint32_t capacity, uint32_t *count) {
    struct session *session;
    struct kvfs_record record;
    *count = 0;
    int r = session_get(client, &session);
    if (r < 0)
        return r;
    r = kvfs_table_find_inode(session->table, 1, &record);
    while (r == 0) {
        bool sealed = record.kind == KVFS_KIND_FILE && record.flags & KVFS_INODE_SEALED;
        if (record.kind == KVFS_KIND_SYMLINK || record.flags & KVFS_INODE_ASK)
            r = -EAGAIN;
        if (r == 0 && sealed) { /* looked up again once it is known that nobody writes it */
            sealed = !kvfs_table_is_written(session->table, record.inode);
            r = sealed ? kvfs_table_find_inode(session->table, record.inode, &record) : 0;
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
        r = record.kind == KVFS_KIND_DIRECTORY ? kvfs_table_find_name(session->table, record.inode, path, size, &record) : -ENOTDIR;
        path += size + (path[size] == '/');
    }
    TALLY(client, lookups, 1);
    if (r == -ENOENT)
        TALLY(client, misses, 1);
    session_put(session);
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
    struct desc *desc;                   /* verified; of the place where the block was last read */
};

static int file_record(struct session *session, uint64_t inode, struct kvfs_record *record) {
    if (kvfs_table_is_written(session->table, inode)) /* before the record is looked up: then it is up to date */
        return -EAGAIN;
    int r = kvfs_table_find_inode(session->table, inode, record);
    if (r == 0 && (record->kind != KVFS_KIND_FILE || !(record->flags & KVFS_INODE_SEALED) || record->flags & KVFS_INODE_ASK))
        r = -EAGAIN;
    return r;
}

int kvfs_file_open(struct kvfs_client *client, uint64_t inode, struct kvfs_file **out) {
    struct session *session;
    struct kvfs_record record;
    int r = session_get(client, &session);
    if (r < 0)
        return r;
    r = file_record(session, inode, &record);
    session_put(session);
    struct kvfs_file *file = r == 0 ? calloc(1, sizeof(*file)) : NULL;
    if (!file)
        return r < 0 ? r : client_fail(-ENOMEM, "no memory for a file");
    file->client = client;
    file->inode = inode;
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

static void file_read_done(struct lane *lane, struct fetch *fetch) {
    (void)lane;
    struct kvfs_file *file = fetch->owner;
    *(int64_t *)(uintptr_t)fetch->cookie = fetch->result;
    if (fetch->result < 0)
        return;
    pthread_mutex_lock(&file->lock);
    if (file->desc != fetch->desc) {
        desc_put(file->desc);
        file->desc = fetch->desc;
        atomic_fetch_add(&fetch->desc->refs, 1);
    }
    pthread_mutex_unlock(&file->lock);
}

int64_t kvfs_file_read(struct kvfs_file *file, uint64_t offset, void *data, uint64_t size) {
    struct kvfs_client *client = file->client;
    struct session *session;
    struct lane *lane;
    struct kvfs_record record;
    uint64_t until = now_ns() + client->options.timeout_ms * 1000000ull;
    int64_t result = session_get(client, &session);
    if (result < 0)
        return result;
    result = file_record(session, file->inode, &record);
    if (result == -ENOENT) /* evicted, or replaced and gone */
        result = -EAGAIN;
    if (result == 0)
        result = client_check_buffers(client, &(struct kvfs_buffer){data, size}, 1);
    if (result == 0 && offset < record.size && size)
        result = lane_take(client, session, &lane);
    if (result < 0 || offset >= record.size || size == 0) {
        session_put(session);
        return result;
    }
    struct fetch *fetch = fetch_get(lane);
    if (fetch) {
        fetch->record = record;
        fetch->offset = offset;
        fetch->size = min_u64(size, record.size - offset);
        fetch->data = data;
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
            client_hit(client, session, record.inode);
        fetch_start(lane, fetch);
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
    session_put(session);
    return result == -ESTALE ? -EAGAIN : result;
}
