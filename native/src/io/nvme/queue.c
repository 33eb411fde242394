/* A ring's own queue to an NVMe/TCP controller: parts of I/O become commands. Only the ring's thread comes here; nothing is locked.
 *
 * A controller may grant fewer queues than there are rings. Then a connection goes from ring to ring. A ring with nothing under way on its
 * connection lets others take it (`use`); a ring that has kept one for a while gives way. Without commands a connection has no state but its
 * socket.
 *
 * A queue connects when the first I/O needs it. While the controller is down reads fail at once: they are misses. Writes wait for the
 * controller until their own deadline, or until their device is out of service. If writes failed at once, they would be tried elsewhere
 * and use up segment after segment. The ring's io_uring only says when a socket can be read or written.
 */
#include "io/nvme/tcp.h"

#include <poll.h>
#include <stdio.h>
#include <sys/epoll.h>

#define TAG_IN 2u /* a tag in user_data, beside the queue's address */
#define TAG_OUT 4u

#define SLICE_NS 4000000ull /* a queue is kept for this long while others want one */
#define REST_NS 2000000ull  /* then it is left to them for this long; they look every millisecond */

/* The user of a queue's connection: its own ring; the first ring that takes it; another ring that has taken it. */
enum queue_use { USE_OURS, USE_SPARE, USE_TAKEN };
enum queue_state { QUEUE_CLOSED, QUEUE_OPENING, QUEUE_CONNECTING, QUEUE_READY };
struct nvme_queue {
    struct nvme_link link; /* first member: callbacks get back from it */
    struct ring *ring;
    struct nvme_host *host;
    struct nvme_queue *next;
    enum queue_state state;
    uint32_t generation, entries, transfer_size;
    uint16_t qid, cntlid;
    uint64_t opened_ns;
    struct io_part *first, *last; /* parts that have not begun, or not wholly */
    bool readable;
    bool watched, watched_out; /* polls are under way */
    bool cancel;               /* the poll for reading belongs to a closed link */
    int watched_fd;            /* of the polls, where the ring goes by threads */
    bool fresh;                /* parts have come since the last step */
    bool full;                 /* the controller has no queue left for this thread */
    bool wants;                /* counted in the host's `wanting` */
    bool yielding;             /* begins nothing: others want the connection */
    atomic_uint use;           /* enum queue_use */
    uint64_t held_ns, rest_until_ns;
    int error;         /* the link is unusable */
    uint32_t finished; /* parts, in this step */
    struct iovec connect_iov;
    struct nvme_connect_data connect;
};

static struct nvme_queue *queue_of(struct ring *ring, struct nvme_host *host) {
    for (struct nvme_queue *queue = ring->queues; queue; queue = queue->next)
        if (queue->host == host)
            return queue;
    struct nvme_queue *queue = calloc(1, sizeof(*queue));
    if (!queue)
        return NULL;
    if (nvme_link_init(&queue->link, host->target.depth ? host->target.depth : 128) < 0) {
        free(queue);
        return NULL;
    }
    queue->ring = ring;
    queue->host = host;
    queue->next = ring->queues;
    ring->queues = queue;
    return queue;
}

static void part_finish(struct nvme_queue *queue, struct io_part *part) {
    queue->finished++;
    ring_part_complete(queue->ring, part, part->error ? part->error : (int)part->size);
}

static void part_done(struct nvme_link *link, struct nvme_request *request, int result) {
    struct nvme_queue *queue = (struct nvme_queue *)link;
    struct io_part *part = request->owner;
    if (result < 0 && !part->error)
        part->error = result;
    if (--part->commands_left == 0 && part->begun == part->size)
        part_finish(queue, part);
}

/* ---- opening and closing ---- */

static void queue_close(struct nvme_queue *queue, int error) {
    if (queue->qid)
        nvme_host_leave(queue->host, queue->qid, &queue->link);
    queue->qid = 0;
    queue->state = QUEUE_CLOSED;
    queue->cancel = queue->watched;
    queue->readable = false;
    queue->error = 0;
    nvme_link_close(&queue->link, error);
    struct io_part **at = &queue->first; /* parts with failed commands end; the others wait for another association */
    queue->last = NULL;
    while (*at) {
        struct io_part *part = *at;
        if (part->error && part->commands_left == 0) {
            *at = part->next;
            part->begun = part->size;
            part_finish(queue, part);
        } else {
            queue->last = part;
            at = &part->next;
        }
    }
}

/* ---- sharing ---- */

static void want(struct nvme_queue *queue, bool wants) {
    if (wants != queue->wants)
        atomic_fetch_add(&queue->host->wanting, wants ? 1u : -1u);
    queue->wants = wants;
}

/* True if the connection is ours. If another ring has taken it, the queue is closed from here on. */
static bool queue_own(struct nvme_queue *queue, uint64_t now) {
    unsigned use = USE_SPARE;
    if (atomic_load(&queue->use) == USE_OURS)
        return true;
    if (atomic_compare_exchange_strong(&queue->use, &use, USE_OURS)) {
        queue->held_ns = now;
        queue->yielding = false;
        return true;
    }
    pthread_mutex_lock(&queue->host->lock); /* the taker holds the lock until it has the connection */
    pthread_mutex_unlock(&queue->host->lock);
    queue->link.fd = -1;
    queue->link.state = NVME_LINK_CLOSED;
    queue->qid = 0;
    queue->state = QUEUE_CLOSED;
    queue->cancel = queue->watched;
    queue->readable = false;
    atomic_store(&queue->use, USE_OURS);
    return false;
}

/* Let others take a connection on which nothing is under way. */
static void queue_spare(struct nvme_queue *queue, uint64_t now) {
    const struct nvme_link *link = &queue->link;
    if (queue->state != QUEUE_READY || queue->error || (queue->first && !queue->yielding) || link->in_flight || link->abandoned || link->head_have ||
        link->in_data || nvme_link_sending(link))
        return;
    if (queue->yielding)
        queue->rest_until_ns = now + REST_NS;
    atomic_store(&queue->use, USE_SPARE);
}

/* Take a connection that another ring can spare, with its qid. */
static bool queue_adopt(struct nvme_queue *queue, uint32_t generation, uint64_t now) {
    struct nvme_host *host = queue->host;
    pthread_mutex_lock(&host->lock);
    bool up = atomic_load(&host->generation) == generation && atomic_load(&host->state) == NVME_HOST_UP;
    for (uint32_t i = 1; up && i <= host->queue_count && !queue->qid; i++) {
        struct nvme_queue *other = (struct nvme_queue *)host->links[i];
        unsigned use = USE_SPARE;
        if (!other || other == queue || !atomic_compare_exchange_strong(&other->use, &use, USE_TAKEN))
            continue;
        struct nvme_link *link = &queue->link;
        link->fd = other->link.fd;
        link->state = other->link.state;
        link->header_digest = other->link.header_digest;
        link->data_digest = other->link.data_digest;
        link->align = other->link.align;
        link->maxh2cdata = other->link.maxh2cdata;
        link->in_capsule_size = other->link.in_capsule_size;
        link->head_have = 0;
        link->head_need = other->link.head_need;
        queue->entries = other->entries;
        queue->transfer_size = other->transfer_size;
        queue->cntlid = other->cntlid;
        queue->qid = (uint16_t)i;
        host->links[i] = link;
        uint32_t kept = 0; /* its commands have ended, and their numbers are used again */
        for (uint32_t k = 0; k < host->abort_count; k++)
            if (host->aborts[k].qid != i)
                host->aborts[kept++] = host->aborts[k];
        host->abort_count = kept;
    }
    pthread_mutex_unlock(&host->lock);
    if (!queue->qid)
        return false;
    queue->generation = generation;
    queue->held_ns = now;
    queue->yielding = false;
    queue->readable = true;
    queue->state = QUEUE_READY;
    return true;
}

static void queue_lost(struct nvme_queue *queue, int error, const char *reason) {
    char text[NVME_REASON + 32];
    snprintf(text, sizeof(text), "queue %u: %s", queue->qid, reason);
    nvme_host_lost(queue->host, queue->generation, text);
    queue_close(queue, error);
}

static void connect_done(struct nvme_link *link, struct nvme_request *request, int result) {
    struct nvme_queue *queue = (struct nvme_queue *)link;
    if (result == 0) {
        queue->state = QUEUE_READY;
    } else if (!queue->error) {
        queue->error = result;
        if (!link->reason[0])
            snprintf(link->reason, sizeof(link->reason), "Connect ended with status %#x", request->completion.status >> 1);
    }
}

static void queue_open(struct nvme_queue *queue, uint32_t generation, uint64_t now) {
    struct nvme_host *host = queue->host;
    queue->full = !nvme_host_room(host);
    if (queue->full && queue_adopt(queue, generation, now))
        queue->full = false;
    if (queue->full || queue->qid)
        return;
    pthread_mutex_lock(&host->lock);
    struct sockaddr_storage address = host->address;
    queue->link.in_capsule_size = host->in_capsule_size;
    queue->entries = host->entries;
    queue->transfer_size = host->transfer_size;
    queue->cntlid = host->cntlid;
    pthread_mutex_unlock(&host->lock);
    queue->generation = generation;
    queue->opened_ns = queue->held_ns = now;
    queue->yielding = false;
    int r = nvme_link_connect(&queue->link, &address, host->target.header_digest, host->target.data_digest);
    if (r < 0) {
        queue_lost(queue, -ENOTCONN, queue->link.reason);
        return;
    }
    queue->qid = nvme_host_join(host, &queue->link, generation);
    queue->full = !queue->qid && atomic_load(&host->generation) == generation && atomic_load(&host->state) == NVME_HOST_UP;
    if (!queue->qid) {
        queue_close(queue, -ENOTCONN);
        return;
    }
    queue->state = QUEUE_OPENING;
    queue->readable = true;
}

static void queue_connect(struct nvme_queue *queue) {
    struct nvme_request *request = nvme_request_get(&queue->link);
    nvme_connect_fill(&queue->host->target, queue->cntlid, queue->qid, queue->entries, 0, &request->command, &queue->connect);
    queue->connect_iov = (struct iovec){&queue->connect, sizeof(queue->connect)};
    request->data = (struct nvme_cursor){&queue->connect_iov, 0};
    request->size = sizeof(queue->connect);
    request->write = true;
    request->done = connect_done;
    nvme_request_send(&queue->link, request);
    queue->state = QUEUE_CONNECTING;
}

/* ---- parts to commands ---- */

static void append(struct nvme_queue *queue, struct io_part *part) {
    part->next = NULL;
    if (queue->last)
        queue->last->next = part;
    else
        queue->first = part;
    queue->last = part;
}

static void pop(struct nvme_queue *queue) {
    queue->first = queue->first->next;
    if (!queue->first)
        queue->last = NULL;
}

/* With `finish`, parts that cannot begin end here; without it, the next reap ends them. */
static void issue(struct nvme_queue *queue, bool finish) {
    while (queue->first && !queue->yielding && queue->link.in_flight < queue->entries - 1) {
        struct io_part *part = queue->first;
        const struct nvme_remote *remote = part->remote;
        const uint32_t shift = remote->identity.block_shift;
        if (!part->error && !atomic_load_explicit(&remote->usable, memory_order_relaxed))
            part->error = -ENOTCONN; /* not "gone": the host finds out whether the device is gone, and reports it, perhaps later */
        if (!part->error && (part->size > remote->identity.size || part->device_offset > remote->identity.size - part->size))
            part->error = -EIO; /* the device is smaller than its label says */
        if (part->error && !finish) {
            queue->ring->remote_ready = true;
            return;
        }
        if (part->error) {
            part->begun = part->size;
            pop(queue);
            if (part->commands_left == 0)
                part_finish(queue, part);
            continue;
        }
        struct nvme_request *request = nvme_request_get(&queue->link);
        if (!request)
            return;
        uint32_t size = (uint32_t)min_u64(part->size - part->begun, min_u64(queue->transfer_size, 65536ull << shift));
        uint64_t first = (part->device_offset + part->begun) >> shift;
        request->command = (struct nvme_command){.opcode = part->group->write ? NVME_IO_WRITE : NVME_IO_READ,
                                                 .nsid = remote->nsid,
                                                 .cdw10 = (uint32_t)first,
                                                 .cdw11 = (uint32_t)(first >> 32),
                                                 .cdw12 = (size >> shift) - 1};
        struct nvme_cursor cursor = {&part->group->iovs[part->iov_first], part->begun};
        while (cursor.inside >= cursor.iov->iov_len)
            cursor.inside -= cursor.iov->iov_len, cursor.iov++;
        request->data = cursor;
        request->size = size;
        request->write = part->group->write;
        request->done = part_done;
        request->owner = part;
        part->commands_left++;
        part->begun += size;
        if (part->begun == part->size)
            pop(queue);
        nvme_request_send(&queue->link, request);
    }
}

/* Fail waiting reads, and waiting writes to devices that are out of service. Other writes go on waiting. */
static void fail_waiting(struct nvme_queue *queue, int error) {
    const struct device *devices = queue->ring->array->devices;
    struct io_part *part = queue->first, *next;
    queue->first = queue->last = NULL;
    for (; part; part = next) {
        next = part->next;
        if (part->group->write && !part->error && !atomic_load(&devices[part->device].stopped)) {
            append(queue, part);
            continue;
        }
        if (!part->error)
            part->error = error;
        part->begun = part->size;
        if (part->commands_left == 0)
            part_finish(queue, part);
    }
}

/* ---- steps ---- */

static bool give_up(const struct nvme_queue *queue, uint64_t now) {
    uint64_t patience = queue->ring->array->io_timeout_ms * 1000000ull;
    if (queue->state == QUEUE_OPENING || queue->state == QUEUE_CONNECTING)
        return now - queue->opened_ns > patience;
    for (uint32_t i = 0; queue->link.abandoned && i < queue->link.depth; i++) {
        const struct nvme_request *request = &queue->link.requests[i];
        if (request->used && request->abandoned && now - request->abandoned_ns > patience)
            return true;
    }
    return false;
}

/* The same where the ring goes by threads: one watch, by epoll(7). A closed descriptor is watched no longer, and its number may be another queue's. */
static void watch_threads(struct nvme_queue *queue) {
    struct ring *ring = queue->ring;
    const bool open = queue->state != QUEUE_CLOSED, sending = open && nvme_link_sending(&queue->link);
    const uint64_t tag = (uint64_t)(uintptr_t)queue | TAG_IN;
    if (queue->cancel) {
        bool taken = false;
        for (const struct nvme_queue *other = ring->queues; other; other = other->next)
            taken |= other != queue && other->watched && !other->cancel && other->watched_fd == queue->watched_fd;
        if (!taken)
            threads_watch(ring, queue->watched_fd, 0, tag);
        queue->cancel = queue->watched = queue->watched_out = false;
        ring->remote_ready = true; /* the queue may open again */
    }
    if (!open || (queue->watched && queue->watched_out == sending))
        return;
    if (threads_watch(ring, queue->link.fd, EPOLLIN | EPOLLET | (sending ? EPOLLOUT : 0u), tag) < 0) {
        ring->remote_ready = true; /* tried again */
        return;
    }
    queue->watched = true;
    queue->watched_out = sending;
    queue->watched_fd = queue->link.fd;
}

/* Let the ring watch the socket. */
static void watch(struct nvme_queue *queue) {
    struct ring *ring = queue->ring;
    if (ring->threads) {
        watch_threads(queue);
        return;
    }
    bool open = queue->state != QUEUE_CLOSED, in = open && !queue->watched;
    bool out = open && !queue->watched_out && nvme_link_sending(&queue->link);
    for (int i = 0; i < 3; i++) {
        if (!(i == 0 ? queue->cancel : i == 1 ? in : out))
            continue; /* one of three */
        struct io_uring_sqe *sqe = io_uring_get_sqe(&ring->uring);
        if (!sqe) {
            io_uring_submit(&ring->uring);
            sqe = io_uring_get_sqe(&ring->uring);
        }
        if (!sqe) {
            ring->remote_ready = true; /* tried again */
            return;
        }
        ring->queued++;
        uint64_t tag = (uint64_t)(uintptr_t)queue;
        if (i == 0) {
            io_uring_prep_cancel64(sqe, tag | TAG_IN, 0);
            sqe->user_data = RING_CANCELS;
            queue->cancel = false;
        } else if (i == 1) {
            io_uring_prep_poll_multishot(sqe, queue->link.fd, POLLIN);
            sqe->user_data = tag | TAG_IN;
            queue->watched = true;
        } else {
            io_uring_prep_poll_add(sqe, queue->link.fd, POLLOUT);
            sqe->user_data = tag | TAG_OUT;
            queue->watched_out = true;
        }
    }
}

static uint32_t queue_step(struct nvme_queue *queue, uint64_t now) {
    struct nvme_host *host = queue->host;
    queue->finished = 0;
    queue->fresh = false;
    uint32_t state = atomic_load(&host->state), generation = atomic_load(&host->generation);
    if (atomic_load(&queue->use) == USE_SPARE && queue->first && now < queue->rest_until_ns) {
        watch(queue);
        return 0;
    }
    if (queue->state != QUEUE_CLOSED)
        queue_own(queue, now);
    if (queue->state != QUEUE_CLOSED && (state != NVME_HOST_UP || queue->generation != generation))
        queue_close(queue, -ENOTCONN);
    if (state == NVME_HOST_DOWN || (state == NVME_HOST_UP && atomic_load(&host->lost) == generation)) {
        fail_waiting(queue, -ENOTCONN);
        want(queue, false);
        watch(queue);
        return queue->finished;
    }
    if (queue->state == QUEUE_CLOSED && queue->first && state == NVME_HOST_UP && !queue->watched) {
        queue_open(queue, generation, now);
        if (queue->state == QUEUE_CLOSED && !queue->full) /* else the queue waits its turn */
            fail_waiting(queue, -ENOTCONN);
    }
    if (queue->state != QUEUE_CLOSED) {
        if (queue->state != QUEUE_READY && !queue->error) {
            queue->error = nvme_link_send(&queue->link);
            queue->readable = true;
        }
        if (queue->readable && !queue->error) {
            queue->readable = false;
            queue->error = nvme_link_receive(&queue->link);
        }
        if (queue->state == QUEUE_OPENING && !queue->error && queue->link.state == NVME_LINK_READY)
            queue_connect(queue);
        queue->yielding = atomic_load(&host->wanting) && now - queue->held_ns > SLICE_NS;
        if (queue->state == QUEUE_READY && !queue->error)
            issue(queue, true);
        if (!queue->error)
            queue->error = nvme_link_send(&queue->link);
        if (queue->error)
            queue_lost(queue, queue->error == -EPROTO ? -EPROTO : -ENOTCONN, queue->link.reason);
        else if (give_up(queue, now))
            queue_lost(queue, -ETIMEDOUT, queue->state == QUEUE_READY ? "no answer to a command that was given up on" : "no answer to Connect");
    }
    want(queue, queue->state == QUEUE_CLOSED && queue->full && queue->first);
    watch(queue);
    queue_spare(queue, now);
    return queue->finished;
}

/* ---- the tables that rings go by ---- */

static const struct ring_beside queues;

static void part_start(struct ring *ring, struct io_part *part) {
    part->remote = atomic_load(&ring->array->devices[part->device].remote);
    part->begun = 0;
    part->commands_left = 0;
    part->error = part->remote ? 0 : -ENOTCONN; /* not connected yet, or another kind of device by now */
    struct nvme_queue *queue = part->remote ? queue_of(ring, part->remote->host) : NULL;
    ring->beside = &queues;
    if (!queue) { /* ends at the next reap */
        if (!part->error)
            part->error = -ENOMEM;
        part->remote = NULL;
        part->next = ring->remote_failed;
        ring->remote_failed = part;
        ring->remote_ready = true;
        return;
    }
    append(queue, part);
    queue->fresh = true;
}

static void queues_submit(struct ring *ring) {
    if (ring->remote_busy) /* called from a callback: the current step sends */
        return;
    for (struct nvme_queue *queue = ring->queues; queue; queue = queue->next) {
        if (!queue->first)
            continue;
        uint32_t generation = atomic_load_explicit(&queue->host->generation, memory_order_relaxed);
        uint64_t now = now_ns();
        if (atomic_load(&queue->use) == USE_SPARE && now < queue->rest_until_ns)
            continue;
        if (queue->state == QUEUE_READY && !queue_own(queue, now))
            ring->remote_ready = true;
        if (queue->state != QUEUE_READY || queue->error || queue->generation != generation) {
            ring->remote_ready |= queue->fresh || queue->state == QUEUE_READY;
            continue;
        }
        issue(queue, false);
        queue->error = nvme_link_send(&queue->link);
        if (queue->error)
            ring->remote_ready = true;
        watch(queue);
    }
}

static uint32_t queues_reap(struct ring *ring) {
    if (ring->remote_busy)
        return 0;
    uint32_t finished = 0;
    uint64_t now = now_ns();
    ring->remote_busy = true;
    ring->remote_ready = false;
    while (ring->remote_failed) {
        struct io_part *part = ring->remote_failed;
        ring->remote_failed = part->next;
        ring_part_complete(ring, part, part->error);
        finished++;
    }
    for (struct nvme_queue *queue = ring->queues; queue; queue = queue->next)
        finished += queue_step(queue, now);
    ring->remote_busy = false;
    return finished;
}

static void queues_event(struct ring *ring, uint64_t user_data, uint32_t flags) {
    struct nvme_queue *queue = (struct nvme_queue *)(uintptr_t)(user_data & ~7ull);
    if (ring->threads) {
        queue->readable = true;
    } else if ((user_data & 7) == TAG_IN) {
        queue->readable = true;
        if (!(flags & IORING_CQE_F_MORE))
            queue->watched = false;
    } else {
        queue->watched_out = false;
    }
    ring->remote_ready = true;
}

static void part_expire(struct ring *ring, struct io_part *part, uint64_t now) {
    struct nvme_queue *queue = part->remote ? queue_of(ring, part->remote->host) : NULL;
    if (!queue) /* the queue has failed, and ends at the next reap */
        return;
    struct io_part **at = &queue->first, *before = NULL;
    while (*at && *at != part)
        before = *at, at = &before->next;
    if (*at) {
        *at = part->next;
        if (queue->last == part)
            queue->last = before;
    }
    part->begun = part->size;
    if (!part->error)
        part->error = -ETIMEDOUT;
    for (uint32_t i = 0; i < queue->link.depth && part->commands_left; i++) {
        struct nvme_request *request = &queue->link.requests[i];
        if (!request->used || request->done != part_done || request->owner != part || request->abandoned)
            continue;
        if (request->sent)
            nvme_host_abort(queue->host, queue->qid, request->command.cid);
        if (nvme_request_abandon(&queue->link, request, now))
            part->commands_left--;
    }
    if (!queue->first)
        want(queue, false);
    if (part->commands_left == 0)
        part_finish(queue, part);
}

static uint64_t queues_timeout(struct ring *ring, uint64_t timeout_ns) {
    if (ring->remote_ready)
        return 0;
    for (struct nvme_queue *queue = ring->queues; queue; queue = queue->next)
        if (queue->state != QUEUE_READY ? queue->first != NULL : queue->link.abandoned != 0)
            timeout_ns = min_u64(timeout_ns, queue->full ? 1000000 : 10000000); /* no event tells that a host is up, nor that time is over */
        else if (queue->first && queue->yielding)
            timeout_ns = min_u64(timeout_ns, 1000000);
    return timeout_ns;
}

static void queues_free(struct ring *ring) {
    while (ring->queues) {
        struct nvme_queue *queue = ring->queues;
        ring->queues = queue->next;
        want(queue, false);
        if (!queue_own(queue, 0))
            queue->qid = 0;
        if (queue->qid)
            nvme_host_leave(queue->host, queue->qid, &queue->link);
        nvme_link_free(&queue->link);
        free(queue);
    }
}

static const struct ring_beside queues = {
    .submit = queues_submit, .reap = queues_reap, .event = queues_event, .timeout = queues_timeout, .free = queues_free};

const struct device_ops nvme_tcp_ops = {.start = part_start, .expire = part_expire};
