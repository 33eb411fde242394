/* Batches that run beside their submitter. A reader keeps blocks of many batches in flight on one lane; a writer puts and deletes, in the order of
 * submission. A batch belongs to one list at a time: those that wait, then a thread, then those that completed.
 */
#include "base/descriptor.h"
#include "client/client.h"

#include <signal.h>
#include <stdio.h>
#include <sys/eventfd.h>

/* All that was submitted and not yet drained. A batch may have more blocks if nothing else is there. */
#define BATCHES_MAX 4096u
#define BLOCKS_MAX (256u << 10)
/* Puts that are joined: so many blocks fill the windows of a put, and the first of them does not wait for many others. */
#define JOIN_BLOCKS 512u
#define JOIN_BYTES ((uint64_t)128 << 20)
/* The end of a put takes a reservation, a write and a commit. */
#define CLOSE_TIMEOUTS 4u
#define POLL_WAKE 0u

enum kind { READ, READ_RANGES, PUT, EXISTS, DELETE };

struct queued {
    struct queued *next;
    struct kvfs_queue *queue;
    enum kind kind;
    /* Copies, which lie behind this struct. */
    struct kvfs_keys keys, parents;
    struct kvfs_vector *vectors;
    uint32_t flags; /* of a put */
    bool has_parents;
    uint64_t bytes; /* of memory */
    int64_t *results;
    uint8_t *found; /* or deleted */
    struct get_batch *read;
    struct kvfs_queue_completion completion;
};
struct list {
    struct queued *first, *last;
};

struct kvfs_queue {
    struct kvfs_client *client;
    uint32_t depth;
    int fd;   /* an eventfd, readable while `completed` has some */
    int wake; /* an eventfd that ends the reader's wait for devices */
    pthread_t reader, writer;
    pthread_mutex_t lock; /* all that follows */
    pthread_cond_t reader_wait, writer_wait, ended;
    struct list reads, writes, completed;
    int64_t last_id;
    uint64_t batches, blocks;
    uint32_t threads;   /* how many run */
    bool reader_asleep; /* it waits for devices, and would take a batch */
    bool stopping;
    atomic_bool over; /* as `stopping`, for a put that waits for a daemon */
};

static void list_add(struct list *list, struct queued *batch) {
    batch->next = NULL;
    *(list->last ? &list->last->next : &list->first) = batch;
    list->last = batch;
}

static struct queued *list_take(struct list *list) {
    struct queued *batch = list->first;
    if (batch) {
        list->first = batch->next;
        if (!list->first)
            list->last = NULL;
    }
    return batch;
}

/* ---- completions ---- */

/* With the lock. */
static void complete_locked(struct queued *batch, int64_t result, const char *reason) {
    struct kvfs_queue *queue = batch->queue;
    batch->completion.result = result;
    snprintf(batch->completion.error, sizeof(batch->completion.error), "%s", result < 0 ? reason : "");
    if (!queue->completed.first)
        wake_fd(queue->fd);
    list_add(&queue->completed, batch);
}

static void complete(struct queued *batch, int64_t result, const char *reason) {
    pthread_mutex_lock(&batch->queue->lock);
    complete_locked(batch, result, reason);
    pthread_mutex_unlock(&batch->queue->lock);
}

static bool usable(struct kvfs_queue *queue) {
    if (queue->client->pid == getpid())
        return true;
    client_fail(-ECHILD, "%s: this queue is of process %d; after fork() connect again", queue->client->path, (int)queue->client->pid);
    return false;
}

int kvfs_queue_fd(struct kvfs_queue *queue) { return usable(queue) ? queue->fd : -ECHILD; }

int kvfs_queue_drain(struct kvfs_queue *queue, struct kvfs_queue_completion *out, uint32_t capacity) {
    struct queued *batch, *drained = NULL;
    uint32_t count = 0;
    if (!usable(queue))
        return -ECHILD;
    pthread_mutex_lock(&queue->lock);
    while (count < capacity && (batch = list_take(&queue->completed))) {
        out[count++] = batch->completion;
        queue->batches--;
        queue->blocks -= batch->keys.count;
        batch->next = drained;
        drained = batch;
    }
    if (count && !queue->completed.first) {
        uint64_t value;
        ssize_t n = read(queue->fd, &value, sizeof(value));
        assert(n == sizeof(value) || n < 0);
    }
    pthread_mutex_unlock(&queue->lock);
    while ((batch = drained)) {
        drained = batch->next;
        free(batch);
    }
    return (int)count;
}

/* ---- the reader ---- */

static void read_over(struct get_batch *read) {
    struct queued *batch = read->owner;
    complete(batch, read->error < 0 ? read->error : (int64_t)read->read, read->reason);
    get_end(read);
    free(read);
}

static struct queued *read_take(struct kvfs_queue *queue) {
    pthread_mutex_lock(&queue->lock);
    struct queued *batch = queue->stopping ? NULL : list_take(&queue->reads);
    pthread_mutex_unlock(&queue->lock);
    return batch;
}

/* Begin with a batch. False: the client has another connection by now, and the lane is to end first. */
static bool read_begin(struct kvfs_queue *queue, struct get_loop *loop, struct queued *batch) {
    struct connection *connection;
    struct get_batch *read = NULL;
    int r = connection_get(queue->client, &connection);
    if (r == 0 && loop->lane && loop->lane->connection != connection) {
        connection_put(connection);
        return false;
    }
    if (r == 0 && !loop->lane) { /* the lane keeps the reference */
        r = lane_take(queue->client, connection, &loop->lane);
        if (r < 0)
            connection_put(connection);
        loop->turn_ns = now_ns();
    } else if (r == 0) {
        connection_put(connection);
    }
    if (r == 0 && !(read = calloc(1, sizeof(*read))))
        r = client_fail(-ENOMEM, "no memory for a batch of %u", batch->keys.count);
    if (r == 0) {
        read->client = queue->client;
        read->keys = &batch->keys;
        read->vectors = batch->vectors;
        read->ranges = batch->kind == READ_RANGES;
        read->results = batch->results;
        read->done = read_over;
        read->owner = batch;
        r = get_begin(read);
    }
    if (r == 0) {
        get_add(loop, read);
        return true;
    }
    complete(batch, r, kvfs_error());
    if (read)
        get_end(read);
    free(read);
    return true;
}

/* Wait for a block, or a batch that the lane has room for. True while blocks are to be read. */
static bool read_wait(struct kvfs_queue *queue, struct get_loop *loop, bool may_begin) {
    struct ring *ring = &loop->lane->ring;
    uint64_t value;
    pthread_mutex_lock(&queue->lock);
    bool asleep = may_begin && get_wants(loop), waits = asleep && queue->reads.first && !queue->stopping;
    queue->reader_asleep = asleep;
    bool stopping = queue->stopping;
    pthread_mutex_unlock(&queue->lock);
    if (stopping)
        get_cancel(loop);
    if (asleep)
        ring_poll(ring, queue->wake, POLL_WAKE, false);
    bool more = get_step(loop, waits ? 0 : 1000000000);
    pthread_mutex_lock(&queue->lock);
    queue->reader_asleep = false;
    pthread_mutex_unlock(&queue->lock);
    if (asleep && !(ring->armed & 1u << POLL_WAKE) && read(queue->wake, &value, sizeof(value)) < 0)
        assert(errno == EAGAIN);
    return more;
}

/* Another user of the lane must not wait for our poll. */
static void poll_end(struct kvfs_queue *queue, struct ring *ring) {
    uint64_t value;
    wake_fd(queue->wake);
    while (ring->armed & 1u << POLL_WAKE) {
        ring_wait(ring, 1000000);
        ring_reap(ring);
    }
    ssize_t n = read(queue->wake, &value, sizeof(value));
    (void)n;
}

/* Read until no batch waits, or the client has another connection. Returns a batch that is for that one. */
static struct queued *reads_run(struct kvfs_queue *queue, struct queued *batch) {
    struct get_loop loop = {.depth = queue->depth};
    struct queued *moved = NULL;
    bool more;
    if (!batch)
        batch = read_take(queue);
    do {
        for (; batch && !moved; batch = loop.lane && !get_wants(&loop) ? NULL : read_take(queue)) {
            if (!read_begin(queue, &loop, batch)) {
                moved = batch;
                break;
            }
            if (loop.lane)
                get_fill(&loop);
        }
        if (!loop.lane)
            return NULL;
        more = read_wait(queue, &loop, !moved);
        batch = !moved && get_wants(&loop) ? read_take(queue) : NULL;
    } while (more || batch); /* the take decides: a batch may have come since any earlier look, and what was taken is nobody else's */
    struct connection *connection = loop.lane->connection;
    poll_end(queue, &loop.lane->ring);
    lane_give(loop.lane);
    connection_put(connection);
    return moved;
}

static void cancel_locked(struct kvfs_queue *queue, struct list *list) {
    struct queued *batch;
    assert(queue->stopping);
    while ((batch = list_take(list)))
        complete_locked(batch, -ECANCELED, "the queue was closed");
}

static void thread_ends(struct kvfs_queue *queue) {
    queue->threads--;
    pthread_cond_broadcast(&queue->ended);
    pthread_mutex_unlock(&queue->lock);
}

static void *reader_main(void *argument) {
    struct kvfs_queue *queue = argument;
    struct queued *moved = NULL;
    pthread_mutex_lock(&queue->lock);
    while (!queue->stopping || moved) {
        if (!queue->reads.first && !moved) {
            pthread_cond_wait(&queue->reader_wait, &queue->lock);
            continue;
        }
        pthread_mutex_unlock(&queue->lock);
        moved = reads_run(queue, moved);
        pthread_mutex_lock(&queue->lock);
    }
    cancel_locked(queue, &queue->reads);
    thread_ends(queue);
    return NULL;
}

/* ---- the writer ---- */

static void put_alone(struct queued *batch) {
    struct kvfs_put_options options = {sizeof(options), batch->flags, batch->has_parents ? &batch->parents : NULL};
    int r = kvfs_put_vectors(batch->queue->client, &batch->keys, batch->vectors, &options, batch->results);
    complete(batch, r, kvfs_error());
}

static bool joins(const struct queued *first, const struct queued *batch) {
    return first->kind == PUT && batch->kind == PUT && batch->flags == first->flags && batch->has_parents == first->has_parents &&
           batch->keys.kind == first->keys.kind;
}

/* With the lock: what is written next, and puts behind it that can be joined with it. */
static struct queued *writes_take(struct kvfs_queue *queue) {
    struct queued *first = list_take(&queue->writes), *last = first, *batch;
    uint64_t blocks = first->keys.count, bytes = first->bytes;
    first->next = NULL;
    while ((batch = queue->writes.first) && joins(first, batch) && (blocks += batch->keys.count) <= JOIN_BLOCKS &&
           (bytes += batch->bytes) <= JOIN_BYTES) {
        last->next = list_take(&queue->writes);
        last = batch;
        last->next = NULL;
    }
    return first;
}

static bool keys_join(struct kvfs_keys *out, const struct queued *first, bool parents) {
    uint64_t count = 0, size = 0;
    for (const struct queued *batch = first; batch; batch = batch->next) {
        const struct kvfs_keys *keys = parents ? &batch->parents : &batch->keys;
        for (uint32_t i = 0; i < keys->count; i++)
            size += keys->sizes[i];
        count += keys->count;
    }
    uint32_t *sizes = malloc((count + 1) * sizeof(*sizes));
    uint8_t *data = malloc(size + 1);
    *out = (struct kvfs_keys){data, sizes, (uint32_t)count, parents ? first->parents.kind : first->keys.kind};
    for (const struct queued *batch = first; sizes && data && batch; batch = batch->next) {
        const struct kvfs_keys *keys = parents ? &batch->parents : &batch->keys;
        const uint8_t *from = keys->data;
        for (uint32_t i = 0; i < keys->count; i++) {
            memcpy(data, from, keys->sizes[i]);
            data += keys->sizes[i];
            from += keys->sizes[i];
            *sizes++ = keys->sizes[i];
        }
    }
    return sizes && data;
}

/* All of them in one put. False: it could not be begun, for one's mistake, or for want of memory. */
static bool puts_together(struct queued *first) {
    struct kvfs_client *client = first->queue->client;
    struct kvfs_keys keys = {0}, parents = {0};
    struct kvfs_put_options options = {sizeof(options), first->flags, first->has_parents ? &parents : NULL};
    bool good = keys_join(&keys, first, false) && (!first->has_parents || keys_join(&parents, first, true));
    struct kvfs_vector *vectors = malloc((keys.count + 1) * sizeof(*vectors));
    int64_t *results = malloc((keys.count + 1) * sizeof(*results));
    int r = -ENOMEM;
    uint32_t at = 0;
    if (good && vectors && results) {
        for (const struct queued *batch = first; batch; at += batch->keys.count, batch = batch->next)
            memcpy(vectors + at, batch->vectors, batch->keys.count * sizeof(*vectors));
        for (uint32_t i = 0; i < keys.count; i++)
            results[i] = -ECANCELED;
        r = kvfs_put_vectors(client, &keys, vectors, &options, results);
    }
    /* A key in two of them, or memory that a device owns: nothing was done. */
    good = r != -ENOMEM && r != -EINVAL && r != -EBUSY && r != -EOPNOTSUPP;
    at = 0;
    for (struct queued *batch = first, *next; good && batch; batch = next) {
        uint32_t count = batch->keys.count, stored = 0;
        next = batch->next;
        memcpy(batch->results, results + at, count * sizeof(*results));
        for (uint32_t i = 0; i < count; i++)
            stored += results[at + i] == 0;
        at += count;
        complete(batch, r < 0 && stored < count ? r : (int64_t)stored, kvfs_error());
    }
    free(results);
    free(vectors);
    free((void *)(uintptr_t)keys.data);
    free((void *)(uintptr_t)keys.sizes);
    free((void *)(uintptr_t)parents.data);
    free((void *)(uintptr_t)parents.sizes);
    return good;
}

static void writes_run(struct queued *first) {
    struct kvfs_client *client = first->queue->client;
    if (first->kind == PUT && first->next && puts_together(first))
        return;
    for (struct queued *batch = first, *next; batch; batch = next) {
        next = batch->next;
        if (batch->kind == PUT) {
            put_alone(batch);
            continue;
        }
        int r = batch->kind == DELETE ? kvfs_delete(client, &batch->keys, batch->found) : kvfs_exists(client, &batch->keys, batch->found);
        for (uint32_t i = 0; batch->kind == EXISTS && r >= 0 && i < batch->keys.count; i++)
            r += batch->found[i];
        complete(batch, r, kvfs_error());
    }
}

static void *writer_main(void *argument) {
    struct kvfs_queue *queue = argument;
    daemon_wait_over(&queue->over);
    pthread_mutex_lock(&queue->lock);
    while (!queue->stopping) {
        if (!queue->writes.first) {
            pthread_cond_wait(&queue->writer_wait, &queue->lock);
            continue;
        }
        struct queued *first = writes_take(queue);
        pthread_mutex_unlock(&queue->lock);
        writes_run(first);
        pthread_mutex_lock(&queue->lock);
    }
    cancel_locked(queue, &queue->writes);
    thread_ends(queue);
    return NULL;
}

/* ---- submission ---- */

static uint64_t keys_size(const struct kvfs_keys *keys) {
    uint64_t size = 0;
    for (uint32_t i = 0; i < keys->count; i++)
        size += keys->sizes[i];
    return size;
}

static void keys_copy(struct kvfs_keys *out, const struct kvfs_keys *keys, uint32_t *sizes, uint8_t *data) {
    copy_bytes(sizes, keys->sizes, keys->count * sizeof(*sizes));
    copy_bytes(data, keys->data, keys_size(keys));
    *out = (struct kvfs_keys){data, sizes, keys->count, keys->kind};
}

/* Vectors may be NULL, as may parents. NULL: no memory. */
static struct queued *queued_new(struct kvfs_queue *queue, enum kind kind, const struct kvfs_keys *keys, const struct kvfs_vector *vectors,
                                 const struct kvfs_keys *parents) {
    static const struct kvfs_keys none;
    uint64_t count = keys->count, pieces = 0;
    parents = parents ? parents : &none;
    for (uint32_t i = 0; vectors && i < count; i++)
        pieces += vectors[i].count;
    struct queued *batch = malloc(sizeof(*batch) + count * sizeof(*vectors) + pieces * sizeof(struct kvfs_buffer) +
                                  (count + parents->count) * sizeof(uint32_t) + keys_size(keys) + keys_size(parents));
    if (!batch)
        return NULL;
    *batch = (struct queued){.queue = queue, .kind = kind, .vectors = (struct kvfs_vector *)(void *)(batch + 1)};
    struct kvfs_buffer *piece = (struct kvfs_buffer *)(void *)(batch->vectors + count);
    uint32_t *sizes = (uint32_t *)(void *)(piece + pieces);
    uint8_t *data = (uint8_t *)(sizes + count + parents->count);
    keys_copy(&batch->keys, keys, sizes, data);
    keys_copy(&batch->parents, parents, sizes + count, data + keys_size(keys));
    for (uint32_t i = 0; vectors && i < count; piece += vectors[i++].count) {
        batch->vectors[i] = vectors[i];
        batch->vectors[i].pieces = piece;
        copy_bytes(piece, vectors[i].pieces, vectors[i].count * sizeof(*piece));
        for (uint32_t k = 0; k < vectors[i].count; k++)
            batch->bytes += piece[k].size;
    }
    return batch;
}

/* Takes the batch over. result: of one that is complete already, else -EAGAIN. */
static int64_t submit(struct queued *batch, int64_t result) {
    struct kvfs_queue *queue = batch->queue;
    const char *path = queue->client->path;
    uint32_t count = batch->keys.count;
    bool reads = batch->kind == READ || batch->kind == READ_RANGES;
    pthread_mutex_lock(&queue->lock);
    int64_t id = queue->stopping ? client_fail(-ECANCELED, "%s: this queue is being closed", path)
                 : queue->batches == BATCHES_MAX || (queue->blocks && queue->blocks + count > BLOCKS_MAX)
                     ? client_fail(-EAGAIN, "%s: %llu batches of %llu blocks wait, or were not drained; %u of %u are possible", path,
                                   (unsigned long long)queue->batches, (unsigned long long)queue->blocks, BATCHES_MAX, BLOCKS_MAX)
                     : ++queue->last_id;
    if (id > 0) {
        queue->batches++;
        queue->blocks += count;
        batch->completion.id = id;
        for (uint32_t i = 0; batch->results && i < count; i++)
            batch->results[i] = -ECANCELED;
        if (batch->found && result < 0)
            memset(batch->found, 0, count);
        if (count == 0 || result >= 0) {
            complete_locked(batch, count ? result : 0, "");
        } else {
            list_add(reads ? &queue->reads : &queue->writes, batch);
            pthread_cond_signal(reads ? &queue->reader_wait : &queue->writer_wait);
            if (reads && queue->reader_asleep) {
                queue->reader_asleep = false;
                wake_fd(queue->wake);
            }
        }
    }
    pthread_mutex_unlock(&queue->lock);
    if (id < 0)
        free(batch);
    return id;
}

static int64_t submit_new(struct kvfs_queue *queue, enum kind kind, const struct kvfs_keys *keys, const struct kvfs_vector *vectors,
                          const struct kvfs_put_options *options, int64_t *results, uint8_t *found) {
    struct kvfs_put_options known = {0};
    int64_t now = -EAGAIN;
    if (!usable(queue))
        return -ECHILD;
    if (options)
        memcpy(&known, options, min_u64(options->size, sizeof(known)));
    if (known.parents && known.parents->count != keys->count)
        return client_fail(-EINVAL, "%u parents of %u keys", known.parents->count, keys->count);
    struct queued *batch = queued_new(queue, kind, keys, vectors, known.parents);
    if (!batch)
        return client_fail(-ENOMEM, "no memory for a batch of %u", keys->count);
    batch->flags = known.flags;
    batch->has_parents = known.parents != NULL;
    batch->results = results;
    batch->found = found;
    if (kind == EXISTS && keys->count && (now = keys_exist_at_once(queue->client, keys, found)) < 0 && now != -EAGAIN) {
        free(batch); /* a key that cannot be */
        return now;
    }
    return submit(batch, now);
}

int64_t kvfs_queue_get(struct kvfs_queue *queue, const struct kvfs_keys *keys, const struct kvfs_vector *vectors, int64_t *results) {
    return submit_new(queue, READ, keys, vectors, NULL, results, NULL);
}

int64_t kvfs_queue_get_ranges(struct kvfs_queue *queue, const struct kvfs_keys *keys, const struct kvfs_vector *vectors, int64_t *results) {
    return submit_new(queue, READ_RANGES, keys, vectors, NULL, results, NULL);
}

int64_t kvfs_queue_put(struct kvfs_queue *queue, const struct kvfs_keys *keys, const struct kvfs_vector *vectors,
                       const struct kvfs_put_options *options, int64_t *results) {
    return submit_new(queue, PUT, keys, vectors, options, results, NULL);
}

int64_t kvfs_queue_exists(struct kvfs_queue *queue, const struct kvfs_keys *keys, uint8_t *found) {
    return submit_new(queue, EXISTS, keys, NULL, NULL, NULL, found);
}

int64_t kvfs_queue_delete(struct kvfs_queue *queue, const struct kvfs_keys *keys, uint8_t *deleted) {
    return submit_new(queue, DELETE, keys, NULL, NULL, NULL, deleted);
}

/* ---- opening and closing ---- */

static void queue_free(struct kvfs_queue *queue) {
    struct queued *batch;
    while ((batch = list_take(&queue->completed)))
        free(batch);
    if (queue->fd >= 0)
        close(queue->fd);
    if (queue->wake >= 0)
        close(queue->wake);
    pthread_cond_destroy(&queue->reader_wait);
    pthread_cond_destroy(&queue->writer_wait);
    pthread_cond_destroy(&queue->ended);
    pthread_mutex_destroy(&queue->lock);
    free(queue);
}

/* No thread begins anything from now on; with a deadline, wait until both have ended. */
static bool queue_stop(struct kvfs_queue *queue, uint64_t deadline_ns) {
    struct timespec until = {.tv_sec = (time_t)(deadline_ns / 1000000000u), .tv_nsec = (long)(deadline_ns % 1000000000u)};
    int waited = 0;
    pthread_mutex_lock(&queue->lock);
    queue->stopping = true;
    atomic_store(&queue->over, true);
    pthread_cond_broadcast(&queue->reader_wait);
    pthread_cond_broadcast(&queue->writer_wait);
    wake_fd(queue->wake);
    while (queue->threads && waited == 0)
        waited = pthread_cond_timedwait(&queue->ended, &queue->lock, &until);
    bool ended = queue->threads == 0;
    pthread_mutex_unlock(&queue->lock);
    return ended;
}

int kvfs_queue_open(struct kvfs_client *client, uint32_t depth, struct kvfs_queue **out) {
    *out = NULL;
    if (client->pid != getpid())
        return client_fail(-ECHILD, "%s: connected by process %d", client->path, (int)client->pid);
    if (depth > 256)
        return client_fail(-EINVAL, "depth %u: 1 to 256 are possible", depth);
    struct kvfs_queue *queue = calloc(1, sizeof(*queue));
    if (!queue)
        return client_fail(-ENOMEM, "no memory for a queue");
    queue->client = client;
    queue->depth = depth ? depth : 64;
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_mutex_init(&queue->lock, NULL);
    pthread_cond_init(&queue->reader_wait, &attributes);
    pthread_cond_init(&queue->writer_wait, &attributes);
    pthread_cond_init(&queue->ended, &attributes);
    pthread_condattr_destroy(&attributes);
    queue->fd = descriptor_above(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
    queue->wake = descriptor_above(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
    if (queue->fd < 0 || queue->wake < 0) {
        int error = client_fail(-errno, "%s: no eventfd for a queue: %s", client->path, descriptor_reason(errno));
        queue_free(queue);
        return error;
    }
    sigset_t all, before; /* a program's signals are not for our threads */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    queue->threads = 2;
    int r = pthread_create(&queue->reader, NULL, reader_main, queue), second = r ? r : pthread_create(&queue->writer, NULL, writer_main, queue);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (second) {
        pthread_mutex_lock(&queue->lock);
        queue->threads -= r ? 2 : 1;
        pthread_mutex_unlock(&queue->lock);
        queue_stop(queue, UINT64_MAX);
        if (!r)
            pthread_join(queue->reader, NULL);
        queue_free(queue);
        return client_fail(-second, "%s: no threads for a queue: %s", client->path, strerror(second));
    }
    *out = queue;
    return 0;
}

int kvfs_queue_close(struct kvfs_queue *queue) {
    if (!queue)
        return 0;
    if (!usable(queue))
        return -ECHILD;
    uint64_t timeout_ms = (uint64_t)CLOSE_TIMEOUTS * queue->client->options.timeout_ms;
    if (!queue_stop(queue, now_ns() + timeout_ms * 1000000))
        return client_fail(-ETIMEDOUT, "%s: a queue's put still runs after %llu ms", queue->client->path, (unsigned long long)timeout_ms);
    pthread_join(queue->reader, NULL);
    pthread_join(queue->writer, NULL);
    queue_free(queue);
    return 0;
}
