/* Blocks into GPU memory through a ring of pinned slots; with gds, through it only what cuFile is not to read (client/gpu/direct.c). */
#include "client/gpu/reader.h"

#include <stdio.h>

/* How a block is read. All but STAGED: its whole pages by cuFile; then it is staged, from where they end. */
enum block_way {
    WAY_STAGED,
    WAY_HEADER, /* is being read */
    WAY_FENCE,  /* for the caller's stream, which may still write to the buffer */
    WAY_READING,
    WAY_PROVING, /* one piece of it after the other */
    WAY_LOOKING  /* whether it still lies there */
};

/* A block of which pieces are read or to be read. */
struct gpu_block {
    bool used;
    uint32_t key, next, pieces, active; /* pieces begun, of how many, and how many of them are being read */
    uint32_t tries;
    int64_t failure;
    struct kvfs_record record;
    struct desc *desc; /* it verified the pieces so far */
    enum block_way way;
    uint64_t from;   /* bytes before this are not staged: cuFile has read them */
    uint32_t proven; /* pages */
    struct direct_read *read;
    struct direct_proof *proof;
    struct direct_look *look;
};
struct gpu_call {
    struct kvfs_gpu *gpu;
    struct connection *connection;
    struct lane *lane;
    const struct kvfs_keys *keys;
    const struct kvfs_buffer *buffers;
    const uint8_t *next_place; /* of key next_key */
    const uint8_t **places;    /* of the keys of blocks */
    struct gpu_block *blocks;  /* ring_slots */
    int64_t *results;
    cuda_stream stream; /* the caller's */
    uint32_t next_key, blocks_used, read;
    bool fenced, passed; /* our stream waits for the caller's; that has come so far */
    bool direct;
    int error;
    struct shards shards;
};

/* ---- pieces ---- */

static void slot_assign(struct gpu_call *call, struct gpu_slot *slot, const struct gpu_block *block, uint32_t piece) {
    uint64_t offset = block->from + piece * call->gpu->slot_size;
    slot->destination = (cuda_pointer)(uintptr_t)call->buffers[block->key].data + offset;
    slot->size = min_u64(block->record.size - offset, call->gpu->slot_size);
}

static bool same_leaves(const struct desc *a, const struct desc *b) {
    return a == b || (a->size == b->size && memcmp(a->leaves, b->leaves, a->leaf_count * sizeof(*a->leaves)) == 0);
}

static void piece_done(struct lane *lane, struct fetch *fetch) {
    (void)lane;
    struct gpu_call *call = fetch->owner;
    struct gpu_slot *slot = &call->gpu->slots[fetch->cookie];
    struct gpu_block *block = slot->block;
    int64_t failure = fetch->result < 0 ? fetch->result : 0;
    slot->state = fetch->groups_held ? SLOT_STUCK : failure ? SLOT_FREE : SLOT_READY;
    block->active--;
    if (failure == 0 && block->desc && !same_leaves(block->desc, fetch->desc)) { /* other content than the pieces before: both are right, */
        failure = -ESTALE;                                                       /* but not together */
        slot->state = SLOT_FREE;
    } else if (failure == 0 && block->desc != fetch->desc) {
        desc_put(block->desc);
        block->desc = fetch->desc;
        block->record = fetch->record;
        atomic_fetch_add(&block->desc->refs, 1);
    }
    if (!block->failure || block->failure == -ESTALE)
        block->failure = failure ? failure : block->failure;
}

static int piece_start(struct gpu_call *call, struct gpu_block *block, struct gpu_slot *slot) {
    struct fetch *fetch = fetch_get(call->lane);
    if (!fetch)
        return -ENOMEM;
    slot_assign(call, slot, block, block->next);
    slot->state = SLOT_READING;
    slot->block = block;
    call->gpu->cursor = (uint32_t)(slot - call->gpu->slots + 1) % call->gpu->slot_count;
    fetch->record = block->record;
    fetch->desc = block->desc;
    if (fetch->desc)
        atomic_fetch_add(&fetch->desc->refs, 1);
    fetch->offset = block->from + block->next * call->gpu->slot_size;
    fetch->size = slot->size;
    fetch->done = piece_done;
    fetch->owner = call;
    fetch->cookie = (uint64_t)(slot - call->gpu->slots);
    block->next++;
    block->active++;
    call->gpu->count.pieces++;
    fetch_start(call->lane, fetch, &(struct kvfs_buffer){slot->memory, slot->size}, 1);
    return 0;
}

static int fence(struct gpu_call *call) {
    int r = call->fenced ? 0 : stream_fence(call->gpu, call->stream);
    call->fenced = r == 0;
    return r;
}

/* Copy the slots that are ready, behind all work on the caller's stream; neighbours go in one copy. */
static int copies_start(struct gpu_call *call) {
    struct kvfs_gpu *gpu = call->gpu;
    struct gpu_slot *slots = gpu->slots;
    int r = 0;
    for (uint32_t i = 0, end; i < gpu->slot_count && r == 0; i = end) {
        end = i + 1;
        if (slots[i].state != SLOT_READY)
            continue;
        uint64_t size = slots[i].size;
        while (end < gpu->slot_count && slots[end].state == SLOT_READY && slots[end - 1].size == gpu->slot_size && slots_neighbour(gpu, end) &&
               slots[end].destination == slots[end - 1].destination + gpu->slot_size)
            size += slots[end++].size;
        for (uint32_t k = i; k < end; k++)
            slots[k].state = size ? SLOT_COPYING : SLOT_FREE;
        if (size == 0)
            continue;
        r = fence(call);
        if (r == 0)
            r = CUDA(gpu, cuMemcpyHtoDAsync, slots[i].destination, slots[i].memory, size, gpu->stream);
        if (r == 0)
            r = copy_push(gpu, i, end - i);
        gpu->count.copies += r == 0;
    }
    return r;
}

/* ---- blocks ---- */

static void block_over(struct gpu_call *call, struct gpu_block *block, int64_t result) {
    struct kvfs_client *client = call->gpu->client;
    call->results[block->key] = result == -ESTALE ? -ENOENT : result;
    if (result >= 0) {
        call->read++;
        client_hit(client, call->connection, &block->record);
        TALLY(client, hits, 1);
        TALLY(client, gets, 1);
        TALLY(client, get_bytes, (uint64_t)result);
        call->gpu->count.blocks++;
        call->gpu->count.bytes += (uint64_t)result;
        call->gpu->direct_count.blocks += block->from > 0;
        call->gpu->direct_count.bytes += block->from;
    } else if (result != -ERANGE) {
        TALLY(client, misses, 1);
    }
    desc_put(block->desc);
    block->desc = NULL;
    block->used = false;
    call->blocks_used--;
}

/* All that is not there yet goes through the ring. */
static void block_stage(struct gpu_call *call, struct gpu_block *block, uint64_t from) {
    uint64_t slot_size = call->gpu->slot_size, pieces = (block->record.size - from + slot_size - 1) / slot_size;
    block->way = WAY_STAGED;
    block->from = from;
    block->next = 0;
    block->pieces = pieces || from ? (uint32_t)pieces : 1;
}

static void header_done(struct lane *lane, struct fetch *fetch) {
    (void)lane;
    struct gpu_call *call = fetch->owner;
    struct gpu_block *block = &call->blocks[fetch->cookie];
    block->active--;
    block->way = WAY_STAGED;
    if (fetch->result < 0) {
        block->failure = fetch->result;
        return;
    }
    block->way = WAY_FENCE;
    block->desc = fetch->desc;
    block->record = fetch->record;
    atomic_fetch_add(&block->desc->refs, 1);
}

static void header_start(struct gpu_call *call, struct gpu_block *block) {
    struct fetch *fetch = fetch_get(call->lane);
    if (!fetch)
        return;
    block->way = WAY_HEADER;
    block->active++;
    fetch->record = block->record;
    fetch->done = header_done;
    fetch->owner = call;
    fetch->cookie = (uint64_t)(block - call->blocks);
    fetch_start(call->lane, fetch, NULL, 0);
}

/* Look the name up, for the first time or again. */
static void block_find(struct gpu_call *call, struct gpu_block *block) {
    struct kvfs_gpu *gpu = call->gpu;
    uint32_t i = block->key;
    desc_put(block->desc);
    block->desc = NULL;
    block->next = 0;
    block->failure = 0;
    int r = key_find(gpu->client, call->connection, &call->shards, call->keys->kind, call->places[block - call->blocks], call->keys->sizes[i],
                     &block->record);
    if (r < 0 && r != -ENOENT && !call->error)
        call->error = r;
    if (r == 0 && block->record.size > call->buffers[i].size)
        r = -ERANGE;
    if (r < 0) {
        block_over(call, block, r);
        return;
    }
    block_stage(call, block, 0);
    struct gpu_slot *slot = gpu->client->stage && block->pieces <= gpu->ring_slots ? slots_side_by_side(gpu, block->pieces) : NULL;
    const struct kvfs_buffer whole = {slot ? slot->memory : NULL, block->record.size};
    uint64_t until_ns = now_ns() + gpu->client->options.timeout_ms * 1000000ull;
    if (!slot || !stage_take(gpu->client, &block->record, 0, whole.size, &whole, until_ns)) {
        if (call->direct && block->record.size >= PAGE)
            header_start(call, block);
        return;
    }
    for (; block->next < block->pieces; block->next++, slot++) {
        slot_assign(call, slot, block, block->next);
        slot->state = SLOT_READY;
    }
    gpu->count.prestaged++;
}

static void block_begin(struct gpu_call *call) {
    struct gpu_block *block = call->blocks;
    while (block->used)
        block++;
    *block = (struct gpu_block){.used = true, .key = call->next_key};
    call->places[block - call->blocks] = call->next_place;
    call->next_place += call->keys->sizes[call->next_key++];
    call->blocks_used++;
    block_find(call, block);
}

/* Blocks that need no more reading, or failed. */
static void blocks_end(struct gpu_call *call) {
    for (uint32_t i = 0; i < call->gpu->ring_slots; i++) {
        struct gpu_block *block = &call->blocks[i];
        if (!block->used || block->active || block->way != WAY_STAGED || (!block->failure && block->next < block->pieces))
            continue;
        if (block->failure == -ESTALE && block->tries++ < CLIENT_RETRIES) {
            memset(&call->shards, 0, sizeof(call->shards));
            call->gpu->count.restarts++;
            block_find(call, block);
        } else {
            block_over(call, block, block->failure ? block->failure : (int64_t)block->record.size);
        }
    }
}

/* Start as many pieces as there are slots. True: it stopped because no slot was free. */
static bool pieces_start(struct gpu_call *call) {
    struct kvfs_gpu *gpu = call->gpu;
    for (;;) {
        struct gpu_block *block = NULL;
        for (uint32_t i = 0; i < gpu->ring_slots && !block; i++) {
            struct gpu_block *b = &call->blocks[i];
            if (b->used && b->way == WAY_STAGED && !b->failure && b->next < b->pieces && (b->next == 0 || b->desc))
                block = b;
        }
        bool more = call->next_key < call->keys->count && call->blocks_used < gpu->ring_slots && !call->error;
        if (!block && !more)
            return false;
        struct gpu_slot *slot = slot_find(gpu);
        if (!slot)
            return true;
        if (block) {
            int r = piece_start(call, block, slot);
            block->failure = r < 0 ? r : block->failure;
        } else {
            block_begin(call);
        }
    }
}

/* No slot is to be had: devices hold them all. */
static void blocks_give_up(struct gpu_call *call) {
    for (uint32_t i = 0; i < call->gpu->ring_slots; i++)
        if (call->blocks[i].used)
            block_over(call, &call->blocks[i], -ETIMEDOUT);
    for (; call->next_key < call->keys->count; call->next_key++) {
        call->results[call->next_key] = -ETIMEDOUT;
        TALLY(call->gpu->client, misses, 1);
    }
}

/* ---- blocks by gds ---- */

/* The ring reads this block from its start. Nobody writes to the buffer any more. */
static void block_fall_back(struct gpu_call *call, struct gpu_block *block) {
    call->gpu->direct_count.fallbacks++;
    block_stage(call, block, 0);
}

static uint32_t whole_pages(const struct gpu_block *block) { return (uint32_t)(block->record.size / PAGE); }

static int block_begin_reading(struct gpu_call *call, struct gpu_block *block) {
    struct kvfs_gpu *gpu = call->gpu;
    int r = fence(call);
    if (r == 0 && !call->passed) {
        int error = gpu->driver->cuEventQuery(gpu->before);
        if (error == CUDA_ERROR_NOT_READY)
            return 0;
        r = error ? cuda_fail(gpu->driver, gpu->device, "cuEventQuery", error) : 0;
        call->passed = r == 0;
    }
    if (r < 0)
        return r;
    block->read = direct_start(gpu->direct, block->desc, whole_pages(block), (cuda_pointer)(uintptr_t)call->buffers[block->key].data);
    block->way = WAY_READING;
    block->proven = 0;
    if (!block->read)
        block_fall_back(call, block);
    return 0;
}

static void block_go_on_reading(struct gpu_call *call, struct gpu_block *block) {
    int r = direct_poll(call->gpu->direct, block->read);
    if (r == -EINPROGRESS)
        return;
    block->read = NULL;
    block->way = WAY_PROVING;
    if (r == -EAGAIN) {
        block_fall_back(call, block);
    } else if (r < 0) {
        TALLY(call->gpu->client, timeouts, 1);
        block->failure = r;
        block->way = WAY_STAGED;
    }
}

static int block_prove(struct gpu_call *call, struct gpu_block *block) {
    struct kvfs_gpu *gpu = call->gpu;
    uint32_t pages = (uint32_t)min_u64(whole_pages(block) - block->proven, DIRECT_PROOF_PAGES);
    if (!block->proof)
        return direct_proof_start(gpu->direct, gpu->stream, (cuda_pointer)(uintptr_t)call->buffers[block->key].data + block->proven * PAGE,
                                  block->desc->leaves + block->proven, pages, &block->proof);
    int r = direct_proof_poll(gpu->direct, block->proof);
    if (r == -EINPROGRESS)
        return 0;
    if (r == -EBADMSG) { /* rewritten meanwhile, or a flipped bit: the ring finds out which, and tells the daemon */
        gpu->direct_count.mismatches++;
        block_fall_back(call, block);
    } else if (r < 0) {
        return r;
    } else if ((block->proven += pages) == whole_pages(block)) {
        block->look = direct_look_start(call->lane, block->desc);
        block->way = block->look ? WAY_LOOKING : WAY_STAGED;
        block->failure = block->look ? 0 : -ENOMEM;
    }
    block->proof = NULL;
    return 0;
}

static void block_look(struct gpu_call *call, struct gpu_block *block) {
    int r = direct_look_poll(block->look, &block->record);
    if (r == -EINPROGRESS)
        return;
    block->look = NULL;
    if (r == 0)
        block_stage(call, block, whole_pages(block) * PAGE);
    else if (call->connection->gone) /* nobody can say whether it is still there; the ring's checksums do not need to know */
        block_fall_back(call, block);
    else
        block->way = WAY_STAGED, block->failure = r;
}

/* Advance all blocks. *waiting: something is waited for that does not wake the lane. */
static int blocks_direct(struct gpu_call *call, bool *waiting) {
    int r = 0;
    *waiting = false;
    for (uint32_t i = 0; i < call->gpu->ring_slots && r == 0; i++) {
        struct gpu_block *block = &call->blocks[i];
        enum block_way way;
        do { /* a state that was left shows the next at once */
            way = block->used ? block->way : WAY_STAGED;
            switch (way) {
            case WAY_FENCE: r = block_begin_reading(call, block); break;
            case WAY_READING: block_go_on_reading(call, block); break;
            case WAY_PROVING: r = block_prove(call, block); break;
            case WAY_LOOKING: block_look(call, block); break;
            default: break;
            }
        } while (r == 0 && block->way != way && block->used);
        *waiting = *waiting || (block->used && block->way >= WAY_FENCE && block->way != WAY_LOOKING);
    }
    return r;
}

/* After an error: wait until each thread has ended or is known to be late. copies_wait() waits for proofs on the GPU. */
static void direct_wait(struct gpu_call *call) {
    for (uint32_t i = 0; i < call->gpu->ring_slots; i++) {
        struct gpu_block *block = &call->blocks[i];
        while (block->read && direct_poll(call->gpu->direct, block->read) == -EINPROGRESS)
            pause_ns(PAUSE_NS);
        if (block->look)
            direct_look_poll(block->look, &block->record);
        block->read = NULL;
        block->look = NULL;
    }
    direct_proofs_drop(call->gpu->direct);
}

static int blocks_read(struct gpu_call *call) {
    struct kvfs_gpu *gpu = call->gpu;
    for (;;) {
        bool waiting = false;
        int r = gpu->direct ? blocks_direct(call, &waiting) : 0;
        if (r == 0)
            r = copies_start(call);
        if (r == 0)
            r = copies_reap(gpu);
        if (r < 0)
            return r;
        blocks_end(call);
        bool starved = pieces_start(call), ready = false;
        for (uint32_t i = 0; i < gpu->slot_count; i++)
            ready = ready || gpu->slots[i].state == SLOT_READY;
        if (ready)
            continue;
        if (call->error || (!call->blocks_used && call->next_key == call->keys->count))
            return call->error;
        if (starved) {
            gpu->count.slot_waits++;
            /* One device that hangs may come to hold every slot: the others' blocks are still to be read. */
            if (2 * slots_recover(gpu) > gpu->slot_count && gpu->ring_count < RINGS_MAX && ring_add(gpu) == 0)
                continue;
        }
        if (call->lane->active_count)
            lane_run(call->lane, waiting || (starved && gpu->copy_count) ? PAUSE_NS : 1000000000);
        else if (waiting || (starved && gpu->copy_count))
            pause_ns(PAUSE_NS);
        else if (starved)
            blocks_give_up(call);
    }
}

/* The caller's stream goes on when the bytes are there; without one, the call does. */
static int blocks_fence(struct gpu_call *call) {
    struct kvfs_gpu *gpu = call->gpu;
    if (!call->fenced)
        return 0;
    if (!call->stream)
        return copies_wait(gpu);
    int r = CUDA(gpu, cuEventRecord, gpu->after, gpu->stream);
    return r == 0 ? CUDA(gpu, cuStreamWaitEvent, call->stream, gpu->after, 0) : r;
}

static int gpu_get(struct gpu_call *call) {
    struct kvfs_gpu *gpu = call->gpu;
    int r = blocks_read(call);
    while (call->lane->active_count) /* after an error: until no device writes, or is known to be stuck */
        lane_run(call->lane, 1000000000);
    if (r == 0)
        r = blocks_fence(call);
    if (r == 0)
        return 0;
    char why[sizeof(gpu->why)]; /* the first message is the one that says what happened */
    snprintf(why, sizeof(why), "%s", kvfs_error());
    if (gpu->direct)
        direct_wait(call);
    for (uint32_t i = 0; i < gpu->slot_count; i++)
        if (gpu->slots[i].state == SLOT_READY)
            gpu->slots[i].state = SLOT_FREE;
    for (uint32_t i = 0; i < gpu->ring_slots; i++)
        desc_put(call->blocks[i].desc);
    if (!gpu->broken && copies_wait(gpu) < 0)
        snprintf(gpu->why, sizeof(gpu->why), "%s", why);
    return client_fail(r, "%s", why);
}

int kvfs_gpu_get(struct kvfs_gpu *gpu, const struct kvfs_keys *keys, const struct kvfs_buffer *device_buffers, uint64_t stream, int64_t *results) {
    struct gpu_call call = {
        .gpu = gpu, .keys = keys, .buffers = device_buffers, .results = results, .next_place = keys->data, .stream = (cuda_stream)(uintptr_t)stream};
    struct kvfs_client *client = gpu->client;
    cuda_context context = NULL;
    int r = connection_get(client, &call.connection);
    if (r < 0)
        return r;
    pthread_mutex_lock(&gpu->lock);
    if (gpu->broken)
        r = client_fail(gpu->broken, "GPU %d is out of use since: %s", gpu->device, gpu->why);
    if (r == 0)
        r = client_check_buffers(client, device_buffers, keys->count);
    bool primary = r == 0 && (r = CUDA(gpu, cuCtxPushCurrent, gpu->primary)) == 0;
    if (r == 0)
        r = buffers_check(gpu, device_buffers, keys->count, &context);
    call.direct = r == 0 && gpu->direct && direct_session(gpu->direct, call.connection) == 0;
    bool entered = r == 0 && (r = context_enter(gpu, context ? context : gpu->primary)) == 0;
    if (r == 0)
        r = stream_check(gpu, call.stream);
    if (r == 0)
        slots_recover(gpu);
    if (r == 0)
        r = lane_take(client, call.connection, &call.lane);
    if (r == 0) {
        call.blocks = calloc(gpu->ring_slots, sizeof(*call.blocks));
        call.places = calloc(gpu->ring_slots, sizeof(*call.places));
        r = call.blocks && call.places ? gpu_get(&call) : client_fail(-ENOMEM, "no memory for %u blocks", gpu->ring_slots);
        TALLY(client, lookups, keys->count);
        free(call.blocks);
        free(call.places);
        lane_give(call.lane);
    }
    if (entered)
        gpu->driver->cuCtxPopCurrent(&(cuda_context){NULL});
    if (primary)
        gpu->driver->cuCtxPopCurrent(&(cuda_context){NULL});
    pthread_mutex_unlock(&gpu->lock);
    connection_put(call.connection);
    for (uint32_t i = 0; r < 0 && i < keys->count; i++)
        results[i] = r;
    return r < 0 ? r : (int)call.read;
}
