/* virtio-fs: a transport whose requests come out of a guest's virtqueues, and whose replies go straight into the guest's memory.
 *
 * A request is known by its element: the queue, the head of the chain, and a salt. Together they are the id that fuse and the session see. So a reply
 * from any thread finds its place once, and a reply after a reset finds nothing. A READ of a sealed block needs no memory of ours. The device writes
 * to the guest's pages (guest_targets), the leaves are checked there, and then the answer is published.
 *
 * A guest has a fair share: IN_FLIGHT_MAX bytes under way, staging for its WRITEs included, and FORWARDED_MAX requests in the session. Beyond that
 * the guest's own queues wait, and nobody else's. */
#include "virtiofs/virtio.h"

#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#define POLL_KICKS 0
#define IN_FLIGHT_MAX ((uint64_t)64 << 20)
#define FORWARDED_MAX 2048u
#define REPLY_MIN sizeof(struct fuse_out_header)

static uint64_t element_id(const struct virtqueue *queue, uint16_t head, uint32_t salt) { return (uint64_t)salt << 32 | queue->index << 16 | head; }

/* The queue and the element of an id, with the queue's lock held; NULL, without the lock: the element is gone. */
static struct element *element_find(struct guest *guest, uint64_t id, struct virtqueue **out) {
    uint32_t index = (uint32_t)id >> 16, head = id & 0xffff;
    if (index >= guest->queue_count || head >= QUEUE_SIZE_MAX)
        return NULL;
    struct virtqueue *queue = &guest->queues[index];
    pthread_mutex_lock(&queue->lock);
    struct element *element = queue->elements ? &queue->elements[head] : NULL;
    if (element && element->live && !element->answering && element->salt == (uint32_t)(id >> 32)) {
        *out = queue;
        return element;
    }
    pthread_mutex_unlock(&queue->lock);
    return NULL;
}

static struct server *queue_server(struct guest *guest, uint32_t index) {
    return &guest->transport->servers[(index ? index - 1 : 0) % guest->transport->server_count];
}

void guest_error(struct guest *guest, uint32_t queue, int error) {
    event_add(guest->transport->plane, KVFS_EVENT_GUEST, guest->number, (uint64_t)queue << 32 | (uint32_t)-error);
}

/* ---- answering ---- */

static void cost_release(struct guest *guest, uint64_t cost) {
    unsigned long long before = atomic_fetch_sub(&guest->in_flight_bytes, cost);
    assert(before >= cost);
    if (atomic_load(&guest->limited) && atomic_exchange(&guest->limited, false))
        for (uint32_t i = 0; i < guest->transport->server_count; i++)
            server_wake(&guest->transport->servers[i]);
}

/* Copy to `offset` of the iovecs' bytes; the caller has checked that it fits. */
static void scatter(const struct iovec *iovs, uint64_t offset, const void *data, uint64_t size) {
    for (const uint8_t *from = data; size; iovs++) {
        if (offset >= iovs->iov_len) {
            offset -= iovs->iov_len;
            continue;
        }
        uint64_t length = min_u64(size, iovs->iov_len - offset);
        memcpy((uint8_t *)iovs->iov_base + offset, from, length);
        from += length;
        size -= length;
        offset = 0;
    }
}

static void guest_reply(struct server *server, uint64_t id, int error, uint32_t placed, const struct iovec *iovs, uint32_t count) {
    struct guest *guest = server->transport->guest;
    struct virtqueue *queue;
    struct element *element = element_find(guest, id, &queue);
    if (!element)
        return;
    element->answering = true; /* only this thread touches it from here on */
    pthread_mutex_unlock(&queue->lock);
    uint64_t body = placed, size = 0;
    for (uint32_t i = 0; i < count; i++)
        body += iovs[i].iov_len;
    if (error == 0 && REPLY_MIN + body > element->capacity)
        error = -EIO; /* the guest has left too little room for the data that it asked for */
    struct fuse_out_header head = {.len = (uint32_t)(REPLY_MIN + (error ? 0 : body)), .error = error, .unique = element->unique};
    if (element->capacity >= REPLY_MIN) {
        size = head.len;
        scatter(element->iovs, 0, &head, sizeof(head));
        uint64_t at = REPLY_MIN + placed;
        for (uint32_t i = 0; i < count && error == 0; i++) {
            scatter(element->iovs, at, iovs[i].iov_base, iovs[i].iov_len);
            at += iovs[i].iov_len;
        }
    }
    if (error == 0 && element->opcode == FUSE_READ) {
        atomic_fetch_add_explicit(&guest->bytes_read, body, memory_order_relaxed);
        atomic_fetch_add_explicit(&guest->zero_copy_bytes, placed, memory_order_relaxed);
        atomic_fetch_add_explicit(&guest->copied_bytes, body - placed, memory_order_relaxed);
    } else if (error == 0 && element->opcode == FUSE_WRITE && count) {
        const struct fuse_write_out *out = iovs[0].iov_base;
        atomic_fetch_add_explicit(&guest->bytes_written, out->size, memory_order_relaxed);
    } else if (error == -EIO) {
        atomic_fetch_add_explicit(&guest->io_errors, 1, memory_order_relaxed);
    }
    uint64_t cost = element->cost;
    pthread_mutex_lock(&queue->lock);
    virtqueue_publish(queue, (uint16_t)id, (uint32_t)size);
    pthread_mutex_unlock(&queue->lock);
    cost_release(guest, cost);
}

static void targets_release(struct request *request) {
    free(request->targets);
    guest_memory_put(request->target_memory);
}

static bool guest_targets(struct request *request) {
    struct guest *guest = request->transport->guest;
    struct kvfs_plane *plane = request->server->plane;
    uint32_t left = request->size / KVFS_PAGE_SIZE * KVFS_PAGE_SIZE, rest = request->size - left;
    uint64_t stuck_until_ns = atomic_load_explicit(&plane->array.stuck_until_ns, memory_order_relaxed);
    if (request->offset % PAGE || left == 0 || (stuck_until_ns && (now_ns() < stuck_until_ns || atomic_load(&plane->array.orphans))))
        return false;
    struct virtqueue *queue;
    struct element *element = element_find(guest, request->unique, &queue);
    if (!element)
        return false;
    struct iovec *targets = element->capacity >= REPLY_MIN + request->size ? malloc((element->iov_count + 1) * sizeof(*targets)) : NULL;
    uint64_t skip = REPLY_MIN;
    uint32_t count = 0;
    bool good = targets != NULL;
    assert(request->slot_count == 0);
    assert(!request->targets);
    for (uint32_t i = 0; good && i < element->iov_count && left; i++) {
        const struct iovec *iov = &element->iovs[i];
        if (skip >= iov->iov_len) {
            skip -= iov->iov_len;
            continue;
        }
        uint8_t *base = (uint8_t *)iov->iov_base + skip;
        uint64_t length = min_u64(iov->iov_len - skip, left);
        good = (uintptr_t)base % PAGE == 0 && length % PAGE == 0;
        targets[count++] = (struct iovec){base, length};
        left -= (uint32_t)length;
        skip = 0;
    }
    if (good && rest) {
        struct slot *slot = slot_get(&plane->reading_small);
        good = slot != NULL;
        if (good) {
            request->slots[request->slot_count++] = slot;
            targets[count++] = (struct iovec){slot->data, PAGE};
        }
    }
    assert(count <= element->iov_count + 1);
    if (good) {
        assert(left == 0); /* in whole pages: the check of the room has counted the bytes */
        element->direct = true;
        request->targets = targets;
        request->target_count = count;
        request->placed_max = request->size - rest;
        request->target_memory = element->memory;
        request->release = targets_release;
        atomic_fetch_add(&element->memory->refs, 1);
    } else {
        free(targets);
    }
    pthread_mutex_unlock(&queue->lock);
    return good;
}

/* ---- taking ---- */

static uint64_t gather(const struct chain *chain, uint64_t offset, uint8_t *out, uint64_t size) {
    uint64_t done = 0;
    for (uint32_t i = 0; i < chain->in_count && done < size; i++) {
        const struct iovec *iov = &chain->in[i];
        if (offset >= iov->iov_len) {
            offset -= iov->iov_len;
            continue;
        }
        uint64_t length = min_u64(size - done, iov->iov_len - offset);
        memcpy(out + done, (const uint8_t *)iov->iov_base + offset, length);
        done += length;
        offset = 0;
    }
    __asm__ volatile("" ::: "memory"); /* from here on the copy counts */
    return done;
}

static bool needs_no_reply(uint32_t opcode) { return opcode == FUSE_FORGET || opcode == FUSE_BATCH_FORGET || opcode == FUSE_INTERRUPT; }

static uint32_t weight_of(uint32_t opcode) { return opcode == FUSE_RELEASE ? 0 : opcode == FUSE_READ || opcode == FUSE_WRITE ? 2 : 1; }

static uint32_t cost_of(const struct server *server, const uint8_t *head, uint64_t size) {
    const struct fuse_in_header *in = (const struct fuse_in_header *)(const void *)head;
    struct fuse_read_in read;
    if (in->opcode == FUSE_WRITE)
        return (uint32_t)CHUNK_SIZE;
    if (in->opcode != FUSE_READ || size < sizeof(*in) + sizeof(read))
        return KVFS_PAGE_SIZE;
    memcpy(&read, in + 1, sizeof(read));
    return (uint32_t)min_u64(read.size, server->transport->max_read) + KVFS_PAGE_SIZE;
}

static void request_take(struct server *server, struct virtqueue *queue, uint32_t salt, uint32_t *run) {
    struct guest *guest = server->transport->guest;
    struct chain *chain = server->chain;
    struct fuse_in_header *in = (struct fuse_in_header *)(void *)server->head;
    uint64_t id = element_id(queue, chain->head, salt), size = chain->in_size;
    uint64_t got = gather(chain, 0, server->head, REQUEST_HEAD);
    atomic_fetch_add_explicit(&guest->requests, 1, memory_order_relaxed);
    bool whole = got >= sizeof(*in) && (chain->out_size >= REPLY_MIN || needs_no_reply(in->opcode));
    struct virtqueue *found;
    struct element *element = element_find(guest, id, &found);
    if (!element)
        return; /* reset meanwhile */
    if (!whole || needs_no_reply(in->opcode)) {
        if (!whole)
            atomic_fetch_add(&guest->descriptor_errors, 1);
        virtqueue_publish(queue, chain->head, 0);
        pthread_mutex_unlock(&queue->lock);
        return;
    }
    element->opcode = in->opcode;
    element->unique = in->unique;
    element->cost = cost_of(server, server->head, got);
    atomic_fetch_add(&guest->in_flight_bytes, element->cost);
    pthread_mutex_unlock(&queue->lock);
    in->unique = id;
    *run += weight_of(in->opcode);
    if (in->opcode == FUSE_WRITE && size > REQUEST_HEAD) {
        if (size - REQUEST_HEAD > server->landing->size) {
            reply_error(server, id, -EINVAL);
            return;
        }
        gather(chain, REQUEST_HEAD, server->landing->data, size - REQUEST_HEAD);
        atomic_fetch_add_explicit(&guest->copied_bytes, size - REQUEST_HEAD, memory_order_relaxed);
    } else if (size > REQUEST_HEAD && size <= REQUEST_SMALL) {
        gather(chain, REQUEST_HEAD, server->head + REQUEST_HEAD, size - REQUEST_HEAD);
    }
    dispatch(server, size);
}

static bool over_limit(struct guest *guest) {
    return atomic_load(&guest->in_flight_bytes) >= IN_FLIGHT_MAX || atomic_load(&guest->transport->forwarded) >= FORWARDED_MAX;
}

int guest_serve(struct server *server, uint32_t *run) {
    struct guest *guest = server->transport->guest;
    if (!server->landing && !(server->landing = slot_get_extra(&server->plane->staging)))
        return 0;
    if (over_limit(guest)) {
        atomic_store(&guest->limited, true);
        if (over_limit(guest))
            return 0;
    }
    bool all = atomic_load_explicit(&server->active, memory_order_relaxed);
    for (uint32_t i = 0; i < guest->queue_count; i++) {
        struct virtqueue *queue = &guest->queues[(server->next_queue + i) % guest->queue_count];
        if ((!all && queue_server(guest, queue->index) != server) || !atomic_load_explicit(&queue->running, memory_order_acquire))
            continue;
        uint32_t salt = 0;
        int r = 0;
        pthread_mutex_lock(&queue->serve);
        if (atomic_load(&queue->running))
            r = virtqueue_take(queue, server->chain);
        if (r > 0) {
            salt = queue->elements[server->chain->head].salt;
            virtqueue_quiet(queue);
            atomic_fetch_add(&guest->dispatching, 1);
        }
        if (r < 0) {
            atomic_fetch_add(&guest->descriptor_errors, 1);
            guest_error(guest, queue->index, r);
            virtqueue_break(queue);
        }
        pthread_mutex_unlock(&queue->serve);
        if (r > 0) {
            server->next_queue = queue->index + 1;
            request_take(server, queue, salt, run);
            atomic_fetch_sub(&guest->dispatching, 1);
            return 1;
        }
    }
    return 0;
}

static bool guest_arm(struct server *server) {
    struct guest *guest = server->transport->guest;
    bool found = false;
    for (uint32_t i = 0; i < guest->queue_count; i++) {
        struct virtqueue *queue = &guest->queues[i];
        if (queue_server(guest, i) != server || !atomic_load_explicit(&queue->running, memory_order_acquire))
            continue;
        pthread_mutex_lock(&queue->serve);
        if (atomic_load(&queue->running))
            found |= virtqueue_arm(queue);
        pthread_mutex_unlock(&queue->serve);
    }
    if (found && over_limit(guest)) { /* the request must wait; the thread that makes room wakes us */
        atomic_store(&guest->limited, true);
        found = !over_limit(guest);
    }
    ring_poll(&server->io.ring, server->fd, POLL_KICKS, true); /* a kick is a write, an edge: the counter is left alone */
    return found;
}

void guest_look_again(struct guest *guest) {
    for (uint32_t i = 0; i < guest->queue_count; i++) {
        struct virtqueue *queue = &guest->queues[i];
        pthread_mutex_lock(&queue->serve);
        bool running = atomic_load(&queue->running);
        bool missed = running && virtqueue_pending(queue) && queue->seen_avail == queue->last_avail;
        queue->seen_avail = queue->last_avail;
        pthread_mutex_lock(&queue->lock);
        if (running)
            virtqueue_remind(queue);
        pthread_mutex_unlock(&queue->lock);
        pthread_mutex_unlock(&queue->serve);
        if (missed)
            server_wake(queue_server(guest, i));
    }
}

const struct transport_ops guest_ops = {guest_serve, guest_arm, guest_reply, guest_targets};

/* ---- changes by the front end ---- */

void guest_queue_update(struct guest *guest, struct virtqueue *queue) {
    bool good = queue->enabled && !queue->broken && queue->kick_fd >= 0 && queue->used && queue->elements;
    if (good && !queue->started) {
        good = virtqueue_resume(queue) == 0;
        queue->started = good;
    }
    atomic_store(&queue->running, good);
    if (good)
        server_wake(queue_server(guest, queue->index));
}

int guest_queue_kick(struct guest *guest, struct virtqueue *queue, int fd) {
    struct server *server = queue_server(guest, queue->index);
    if (queue->kick_fd >= 0) {
        epoll_ctl(server->fd, EPOLL_CTL_DEL, queue->kick_fd, NULL);
        close(queue->kick_fd);
    }
    queue->kick_fd = fd;
    struct epoll_event event = {.events = EPOLLIN | EPOLLET, .data.u32 = queue->index};
    return fd >= 0 && epoll_ctl(server->fd, EPOLL_CTL_ADD, fd, &event) < 0 ? -errno : 0;
}

/* With the lock held: wait until nothing is under way. */
static bool wait_idle(struct virtqueue *queue, uint32_t timeout_ms) {
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_sec += timeout_ms / 1000;
    until.tv_nsec += timeout_ms % 1000 * 1000000l;
    if (until.tv_nsec >= 1000000000)
        until.tv_sec++, until.tv_nsec -= 1000000000;
    while (queue->in_flight)
        if (pthread_cond_timedwait(&queue->idle, &queue->lock, &until))
            break;
    return queue->in_flight == 0;
}

void guest_queue_stop(struct guest *guest, struct virtqueue *queue, bool answer, uint32_t timeout_ms) {
    pthread_mutex_lock(&queue->serve);
    atomic_store(&queue->running, false);
    pthread_mutex_unlock(&queue->serve);
    for (uint32_t i = 0; atomic_load(&guest->dispatching) && i < 10000; i++)
        usleep(100);
    pthread_mutex_lock(&queue->lock);
    if (answer && !wait_idle(queue, timeout_ms)) {
        for (uint32_t i = 0; i < QUEUE_SIZE_MAX; i++) {
            struct element *element = &queue->elements[i];
            if (!element->live || element->answering || element->direct)
                continue;
            uint64_t id = element_id(queue, (uint16_t)i, element->salt);
            pthread_mutex_unlock(&queue->lock);
            guest_reply(&guest->transport->servers[0], id, -EIO, 0, NULL, 0);
            pthread_mutex_lock(&queue->lock);
        }
        wait_idle(queue, guest->transport->plane->array.io_timeout_ms * 2); /* devices that still write to the guest's pages */
    }
    for (uint32_t i = 0; queue->in_flight && i < QUEUE_SIZE_MAX; i++) {
        struct element *element = &queue->elements[i];
        if (!element->live || element->answering)
            continue;
        uint64_t cost = element->cost;
        virtqueue_drop(queue, (uint16_t)i);
        pthread_mutex_unlock(&queue->lock);
        cost_release(guest, cost);
        pthread_mutex_lock(&queue->lock);
    }
    wait_idle(queue, 5000); /* answers that are being copied */
    pthread_mutex_unlock(&queue->lock);
}

void guest_disconnect(struct guest *guest) {
    for (uint32_t i = 0; i < guest->queue_count; i++) {
        struct virtqueue *queue = &guest->queues[i];
        guest_queue_stop(guest, queue, false, 0);
        pthread_mutex_lock(&queue->serve);
        pthread_mutex_lock(&queue->lock);
        guest_queue_kick(guest, queue, -1);
        virtqueue_reset(queue);
        pthread_mutex_unlock(&queue->lock);
        pthread_mutex_unlock(&queue->serve);
    }
    transport_forget(guest->transport);
}
