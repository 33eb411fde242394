/* Prestaging: blocks that will be needed soon, read ahead into pinned memory by a thread of the client's own.
 *
 * A staged block is of one place (segment, page, generation), so it is never an old version of its name. Its bytes are verified before it counts.
 * Memory is one mapping of staging_size bytes in 2 MiB slots; a block takes as many neighbouring slots as it needs. When none are left the oldest
 * blocks go, used or not (those count as wasted).
 */
#include "client/client.h"

#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>

#define SLOT_SIZE ((uint64_t)2 << 20)

enum staged_state { STAGED_WANTED, STAGED_READING, STAGED_READY, STAGED_LOST };

struct staged {
    struct staged *next, *previous; /* by age, oldest first */
    struct kvfs_record record;
    enum staged_state state;
    uint32_t slot, slots;
    uint32_t takers; /* threads that copy out of it, or wait for it */
    bool taken;      /* by one of them: counted as used */
    bool given_up;   /* one has taken all of it: it goes with its last taker. Of a part of it there may be others */
};

struct stage {
    struct kvfs_client *client;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    pthread_t thread;
    uint8_t *memory;
    uint64_t size;
    uint32_t slot_count;
    uint8_t *used; /* by slot */
    struct staged *oldest, *newest;
    bool stopping;
};

static void unlink_staged(struct stage *stage, struct staged *block) {
    assert(!block->takers);
    assert(block->slot + block->slots <= stage->slot_count);
    *(block->previous ? &block->previous->next : &stage->oldest) = block->next;
    *(block->next ? &block->next->previous : &stage->newest) = block->previous;
    memset(stage->used + block->slot, 0, block->slots);
    free(block);
}

/* With the lock: slots for a block, made free from the oldest on. UINT32_MAX: none. */
static uint32_t slots_take(struct stage *stage, uint32_t wanted) {
    for (;;) {
        uint32_t run = 0;
        for (uint32_t i = 0; i < stage->slot_count; i++) {
            run = stage->used[i] ? 0 : run + 1;
            if (run == wanted) {
                memset(stage->used + i + 1 - wanted, 1, wanted);
                return i + 1 - wanted;
            }
        }
        struct staged *old = stage->oldest;
        while (old && (old->takers || (old->state != STAGED_READY && old->state != STAGED_WANTED)))
            old = old->next;
        if (!old)
            return UINT32_MAX;
        TALLY(stage->client, prestage_wasted, !old->taken);
        unlink_staged(stage, old);
    }
}

static struct staged *stage_find(struct stage *stage, const struct kvfs_record *record) {
    for (struct staged *block = stage->newest; block; block = block->previous)
        if (block->record.inode == record->inode && block->record.generation == record->generation && block->record.segment == record->segment &&
            block->record.page == record->page && block->state != STAGED_LOST)
            return block;
    return NULL;
}

static void staged_done(struct lane *lane, struct fetch *fetch) {
    struct stage *stage = fetch->owner;
    struct staged *block = (struct staged *)(uintptr_t)fetch->cookie;
    (void)lane;
    pthread_mutex_lock(&stage->lock);
    assert(block->state == STAGED_READING);
    /* It may have moved while it was read: the place is then where it was read from. */
    block->record = fetch->record;
    block->state = fetch->result >= 0 ? STAGED_READY : STAGED_LOST;
    if (block->state == STAGED_LOST && fetch->result != -ETIMEDOUT && !block->takers)
        unlink_staged(stage, block); /* after a timeout its slots stay the device's */
    pthread_cond_broadcast(&stage->changed);
    pthread_mutex_unlock(&stage->lock);
}

/* With the lock. */
static struct staged *next_wanted(struct stage *stage) {
    struct staged *block = stage->oldest;
    while (block && block->state != STAGED_WANTED)
        block = block->next;
    return block;
}

static void stage_round(struct stage *stage) {
    struct kvfs_client *client = stage->client;
    struct connection *connection;
    struct lane *lane;
    int r = connection_get(client, &connection);
    if (r == 0 && (r = lane_take(client, connection, &lane)) < 0)
        connection_put(connection);
    for (;;) {
        pthread_mutex_lock(&stage->lock);
        struct staged *block = stage->stopping ? NULL : next_wanted(stage);
        if (block && r < 0) {
            block->state = STAGED_LOST;
            if (!block->takers)
                unlink_staged(stage, block);
            pthread_cond_broadcast(&stage->changed);
            pthread_mutex_unlock(&stage->lock);
            continue;
        }
        if (block && lane->active_count < client->options.depth)
            block->state = STAGED_READING;
        else if (block)
            block = NULL;
        pthread_mutex_unlock(&stage->lock);
        if (!block && (r < 0 || lane->active_count == 0))
            break;
        struct fetch *fetch = block ? fetch_get(lane) : NULL;
        if (fetch) {
            fetch->record = block->record;
            fetch->size = block->record.size;
            fetch->done = staged_done;
            fetch->owner = stage;
            fetch->cookie = (uintptr_t)block;
            fetch_start(lane, fetch, &(struct kvfs_buffer){stage->memory + block->slot * SLOT_SIZE, fetch->size}, 1);
        } else if (block) {
            pthread_mutex_lock(&stage->lock);
            block->state = STAGED_LOST;
            pthread_cond_broadcast(&stage->changed);
            pthread_mutex_unlock(&stage->lock);
        }
        lane_run(lane, block ? 0 : 5000000);
    }
    if (r == 0) {
        lane_give(lane);
        connection_put(connection);
    }
}

static void *stage_main(void *argument) {
    struct stage *stage = argument;
    pthread_mutex_lock(&stage->lock);
    while (!stage->stopping) {
        if (!next_wanted(stage)) {
            pthread_cond_wait(&stage->changed, &stage->lock);
            continue;
        }
        pthread_mutex_unlock(&stage->lock);
        stage_round(stage);
        pthread_mutex_lock(&stage->lock);
    }
    pthread_mutex_unlock(&stage->lock);
    return NULL;
}

/* The first prestage starts it: a client that never asks pays nothing. */
static int stage_start(struct kvfs_client *client) {
    struct stage *stage = calloc(1, sizeof(*stage));
    if (!stage)
        return client_fail(-ENOMEM, "no memory for staging");
    stage->client = client;
    stage->slot_count = (uint32_t)min_u64(client->options.staging_size / SLOT_SIZE, 1u << 20);
    stage->slot_count = stage->slot_count ? stage->slot_count : 1;
    stage->size = stage->slot_count * SLOT_SIZE;
    stage->used = calloc(stage->slot_count, 1);
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_mutex_init(&stage->lock, NULL);
    pthread_cond_init(&stage->changed, &attributes);
    stage->memory = mmap(NULL, stage->size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (!stage->used || stage->memory == MAP_FAILED) {
        if (stage->memory != MAP_FAILED)
            munmap(stage->memory, stage->size);
        free(stage->used);
        free(stage);
        return client_fail(-ENOMEM, "no memory for staging of %llu bytes", (unsigned long long)client->options.staging_size);
    }
    madvise(stage->memory, stage->size, MADV_HUGEPAGE);
    mlock2(stage->memory, stage->size, MLOCK_ONFAULT); /* pinned where the limit (ulimit -l) allows it; it works without */
    int r = pthread_create(&stage->thread, NULL, stage_main, stage);
    if (r) {
        munmap(stage->memory, stage->size);
        free(stage->used);
        free(stage);
        return client_fail(-r, "no thread for staging: %s", strerror(r));
    }
    __atomic_store_n(&client->stage, stage, __ATOMIC_RELEASE);
    return 0;
}

void stage_stop(struct kvfs_client *client) {
    struct stage *stage = client->stage;
    if (!stage)
        return;
    pthread_mutex_lock(&stage->lock);
    stage->stopping = true;
    pthread_cond_broadcast(&stage->changed);
    pthread_mutex_unlock(&stage->lock);
    pthread_join(stage->thread, NULL);
    bool owed = false;
    while (stage->oldest) {
        owed = owed || client_overlaps_orphan(client, stage->memory, stage->size);
        if (stage->oldest->state == STAGED_READY)
            TALLY(client, prestage_wasted, !stage->oldest->taken);
        unlink_staged(stage, stage->oldest);
    }
    if (!owed) /* else a device may still write there: it stays */
        munmap(stage->memory, stage->size);
    free(stage->used);
    free(stage);
    client->stage = NULL;
}

int stage_take(struct kvfs_client *client, const struct kvfs_record *record, uint64_t offset, uint64_t size, const struct kvfs_buffer *pieces,
               uint64_t until_ns) {
    struct stage *stage = __atomic_load_n(&client->stage, __ATOMIC_ACQUIRE);
    if (!stage)
        return 0;
    pthread_mutex_lock(&stage->lock);
    struct staged *block = stage_find(stage, record);
    if (!block) {
        pthread_mutex_unlock(&stage->lock);
        return 0;
    }
    block->takers++;
    struct timespec until = {.tv_sec = (time_t)(until_ns / 1000000000u), .tv_nsec = (long)(until_ns % 1000000000u)};
    int waited = 0;
    while ((block->state == STAGED_WANTED || block->state == STAGED_READING) && !stage->stopping && waited == 0)
        waited = pthread_cond_timedwait(&stage->changed, &stage->lock, &until);
    int taken = block->state == STAGED_READY && block->record.size == record->size;
    if (taken) {
        pthread_mutex_unlock(&stage->lock);
        const uint8_t *data = stage->memory + block->slot * SLOT_SIZE + offset;
        for (uint64_t left = size, part; left; left -= part, data += part, pieces++) {
            part = min_u64(left, pieces->size);
            copy_bytes(pieces->data, data, part);
        }
        pthread_mutex_lock(&stage->lock);
        if (!block->taken)
            TALLY(client, prestage_used, 1);
        block->taken = true;
    }
    assert(block->takers > 0);
    block->given_up = block->given_up || (block->state == STAGED_READY && (!taken || size == record->size));
    if (--block->takers == 0 && block->state == STAGED_READY && block->given_up)
        unlink_staged(stage, block);
    pthread_mutex_unlock(&stage->lock);
    return taken;
}

/* With the lock: slots of reads that a device owed are free once it has answered. */
static void reclaim_lost(struct stage *stage) {
    for (struct staged *block = stage->oldest, *next; block; block = next) {
        next = block->next;
        if (block->state == STAGED_LOST && !block->takers &&
            !client_overlaps_orphan(stage->client, stage->memory + block->slot * SLOT_SIZE, block->slots * SLOT_SIZE))
            unlink_staged(stage, block);
    }
}

int kvfs_prestage(struct kvfs_client *client, const struct kvfs_keys *keys) {
    struct connection *connection;
    struct shards shards = {0};
    const uint8_t *key = keys->data;
    int r = connection_get(client, &connection), started = 0;
    if (r < 0)
        return r;
    pthread_mutex_lock(&client->lock);
    if (!client->stage)
        r = stage_start(client);
    pthread_mutex_unlock(&client->lock);
    struct stage *stage = client->stage;
    if (r == 0) {
        pthread_mutex_lock(&stage->lock);
        reclaim_lost(stage);
        pthread_mutex_unlock(&stage->lock);
    }
    for (uint32_t i = 0; i < keys->count && r == 0; key += keys->sizes[i++]) {
        struct kvfs_record record;
        r = key_find(client, connection, &shards, keys->kind, key, keys->sizes[i], &record);
        if (r == -ENOENT) {
            r = 0;
            continue;
        }
        uint64_t slots = (record.size + SLOT_SIZE - 1) / SLOT_SIZE;
        if (r < 0 || slots == 0 || slots > stage->slot_count)
            continue;
        struct staged *block = calloc(1, sizeof(*block));
        pthread_mutex_lock(&stage->lock);
        uint32_t slot = !block || stage_find(stage, &record) ? UINT32_MAX : slots_take(stage, (uint32_t)slots);
        if (slot != UINT32_MAX) {
            *block = (struct staged){.record = record, .state = STAGED_WANTED, .slot = slot, .slots = (uint32_t)slots, .previous = stage->newest};
            *(stage->newest ? &stage->newest->next : &stage->oldest) = block;
            stage->newest = block;
            block = NULL;
            started++;
            TALLY(client, prestaged, 1);
            pthread_cond_broadcast(&stage->changed);
        }
        pthread_mutex_unlock(&stage->lock);
        free(block);
    }
    connection_put(connection);
    return r < 0 ? r : started;
}
