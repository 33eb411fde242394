/* Guest memory, and split virtqueues in it: indirect descriptors, EVENT_IDX, in-flight tracking. virtio 1.1, section 2.6. */
#include "base/descriptor.h"
#include "virtiofs/virtio.h"

#include <linux/aio_abi.h>
#include <sys/stat.h>
#include <unistd.h>

#define BELL_EVENTS 64

/* ---- memory ---- */

int region_map(const struct shared_owner *owner, int fd, const struct region_description *from, const uint64_t *types, uint32_t type_count,
               struct guest_region **out) {
    struct stat st;
    uint64_t end;
    int error = shared_check(fd, types, type_count);
    if (error < 0)
        return error;
    if (fstat(fd, &st) < 0)
        return -errno;
    if (from->size == 0 || __builtin_add_overflow(from->offset, from->size, &end) || end > INT64_MAX ||
        from->guest_address > UINT64_MAX - from->size || from->user_address > UINT64_MAX - from->size)
        return -EINVAL;
    if (!S_ISREG(st.st_mode) || (uint64_t)st.st_size < end)
        return -EINVAL;
    struct guest_region *region = calloc(1, sizeof(*region));
    if (!region)
        return -ENOMEM;
    /* Counted from the file's start: a huge page's offset need not be a multiple of ours. Whole (huge) pages: munmap requires them. */
    region->map_size = round_up(end, st.st_blksize > 0 ? (uint64_t)st.st_blksize : PAGE);
    region->map = shared_map(owner, fd, 0, region->map_size, &error);
    if (!region->map) {
        free(region);
        return error;
    }
    atomic_store(&region->refs, 1);
    region->data = (uint8_t *)region->map + from->offset;
    region->guest_address = from->guest_address;
    region->user_address = from->user_address;
    region->size = from->size;
    *out = region;
    return 0;
}

void region_put(struct guest_region *region) {
    if (!region)
        return;
    unsigned before = atomic_fetch_sub(&region->refs, 1);
    assert(before > 0);
    if (before != 1)
        return;
    shared_unmap(region->map, region->map_size);
    free(region);
}

void guest_memory_put(struct guest_memory *memory) {
    if (!memory)
        return;
    unsigned before = atomic_fetch_sub(&memory->refs, 1);
    assert(before > 0);
    if (before != 1)
        return;
    for (uint32_t i = 0; i < memory->count; i++)
        region_put(memory->regions[i]);
    free(memory);
}

struct guest_memory *memory_change(const struct guest_memory *from, struct guest_region *add, const struct guest_region *remove) {
    uint32_t count = from ? from->count : 0;
    struct guest_memory *memory = calloc(1, sizeof(*memory) + (count + 1) * sizeof(memory->regions[0]));
    if (!memory)
        return NULL;
    atomic_store(&memory->refs, 1);
    for (uint32_t i = 0; i < count; i++)
        if (from->regions[i] != remove) {
            atomic_fetch_add(&from->regions[i]->refs, 1);
            memory->regions[memory->count++] = from->regions[i];
        }
    if (add)
        memory->regions[memory->count++] = add;
    return memory;
}

struct guest_region *memory_find(const struct guest_memory *memory, const struct region_description *region) {
    for (uint32_t i = 0; memory && i < memory->count; i++)
        if (memory->regions[i]->guest_address == region->guest_address && memory->regions[i]->size == region->size &&
            memory->regions[i]->user_address == region->user_address)
            return memory->regions[i];
    return NULL;
}

bool memory_overlaps(const struct guest_memory *memory, const struct region_description *region) {
    for (uint32_t i = 0; memory && i < memory->count; i++) {
        const struct guest_region *r = memory->regions[i];
        if ((region->guest_address < r->guest_address + r->size && r->guest_address < region->guest_address + region->size) ||
            (region->user_address < r->user_address + r->size && r->user_address < region->user_address + region->size))
            return true;
    }
    return false;
}

void *memory_user(const struct guest_memory *memory, uint64_t address, uint64_t size) {
    for (uint32_t i = 0; memory && i < memory->count; i++) {
        const struct guest_region *r = memory->regions[i];
        if (address >= r->user_address && address - r->user_address < r->size && size <= r->size - (address - r->user_address))
            return r->data + (address - r->user_address);
    }
    return NULL;
}

/* Append the places of [address, address + size). -EFAULT: some of it lies nowhere; -E2BIG: more than `room` pieces. */
static int memory_iovs(const struct guest_memory *memory, uint64_t address, uint64_t size, struct iovec *iovs, uint32_t *count, uint32_t room) {
    while (size) {
        const struct guest_region *r = NULL;
        for (uint32_t i = 0; i < memory->count && !r; i++)
            if (address >= memory->regions[i]->guest_address && address - memory->regions[i]->guest_address < memory->regions[i]->size)
                r = memory->regions[i];
        if (!r)
            return -EFAULT;
        uint64_t inside = address - r->guest_address, length = min_u64(size, r->size - inside);
        if (*count && (uint8_t *)iovs[*count - 1].iov_base + iovs[*count - 1].iov_len == r->data + inside) {
            iovs[*count - 1].iov_len += length; /* the guest's pages lie side by side */
        } else if (*count == room) {
            return -E2BIG;
        } else {
            iovs[(*count)++] = (struct iovec){r->data + inside, length};
        }
        address += length; /* a region's end is at most 2^64 - 1: no wrap */
        size -= length;
    }
    return 0;
}

/* ---- signals ---- */

/* write() to a front end's eventfd can wait for ever. The front end can fill its counter; O_NONBLOCK is a flag of the open file, which the front end
 * shares and can clear at any time. The kernel's own signals leave a full counter unchanged. So a ring of io_uring has the eventfd for its
 * completions, and an operation that does nothing completes during its submission. The bell is one system call, like write() (0.55 us against
 * 0.28). Where io_uring is denied, io_submit(2) signals in the same way, at the end of a read of /dev/null. */
static void bell_submit(struct bell *bell) {
    struct io_event events[BELL_EVENTS];
    uint8_t none;
    struct iocb read = {.aio_fildes = (uint32_t)bell->null_fd,
                        .aio_lio_opcode = IOCB_CMD_PREAD,
                        .aio_buf = (uintptr_t)&none,
                        .aio_nbytes = 1,
                        .aio_flags = IOCB_FLAG_RESFD,
                        .aio_resfd = (uint32_t)bell->fd};
    struct iocb *reads[1] = {&read};
    if (syscall(SYS_io_submit, bell->context, 1, reads) == 1 || errno != EAGAIN)
        return;
    syscall(SYS_io_getevents, bell->context, 0, BELL_EVENTS, events, &(struct timespec){0, 0}); /* its ring was full */
    syscall(SYS_io_submit, bell->context, 1, reads);
}

static int bell_make_aio(struct bell *bell) {
    int r = 0;
    bell->null_fd = descriptor_above(open("/dev/null", O_RDONLY | O_CLOEXEC));
    if (bell->null_fd < 0 || syscall(SYS_io_setup, BELL_EVENTS, &bell->context) < 0) {
        r = -errno;
        if (bell->null_fd >= 0)
            close(bell->null_fd);
    }
    bell->aio = r == 0;
    return r;
}

/* io_uring_register or io_uring_enter alone may be denied. */
static int bell_proved(struct bell *bell) {
    struct io_uring_sqe *sqe = io_uring_get_sqe(&bell->ring);
    int none = -1, r;
    io_uring_prep_nop(sqe);
    r = io_uring_submit(&bell->ring);
    if (r >= 0)
        io_uring_cq_advance(&bell->ring, io_uring_cq_ready(&bell->ring));
    if (r >= 0)
        r = io_uring_register_files(&bell->ring, &none, 1);
    return r < 0 ? r : 0;
}

static void bell_ring(struct bell *bell) {
    if (!bell->set)
        return;
    if (bell->aio) {
        bell_submit(bell);
        return;
    }
    struct io_uring_sqe *sqe = io_uring_get_sqe(&bell->ring); /* NULL: the last one is still to be submitted */
    if (sqe)
        io_uring_prep_nop(sqe);
    io_uring_submit(&bell->ring);
    io_uring_cq_advance(&bell->ring, io_uring_cq_ready(&bell->ring));
}

static int bell_make(struct bell *bell) {
    int r = io_uring_queue_init(1, &bell->ring, 0);
    if (r == 0) {
        bell->ring.ring_fd = bell->ring.enter_ring_fd = descriptor_above(bell->ring.ring_fd);
        r = bell->ring.ring_fd < 0 ? -errno : bell_proved(bell);
        if (r < 0)
            io_uring_queue_exit(&bell->ring);
    }
    if (r == -EPERM || r == -EACCES || r == -ENOSYS || r == -ENOMEM)
        r = bell_make_aio(bell);
    bell->made = r == 0;
    return r;
}

/* The ring stays when the eventfd goes: the free of a ring interrupts every thread that has used it. */
static int bell_set(struct bell *bell, int fd) {
    if (bell->set && !bell->aio)
        io_uring_unregister_eventfd(&bell->ring);
    bell->set = false;
    if (fd < 0)
        return 0;
    int r = bell->made ? 0 : bell_make(bell);
    if (r == 0 && !bell->aio)
        r = io_uring_register_eventfd(&bell->ring, fd);
    bell->fd = fd;
    bell->set = r == 0;
    return r;
}

int virtqueue_call_set(struct virtqueue *queue, int fd) {
    int r = bell_set(&queue->bell, fd);
    if (queue->call_fd >= 0)
        close(queue->call_fd);
    queue->call_fd = fd;
    return r;
}

int virtqueue_error_set(struct virtqueue *queue, int fd) {
    if (queue->error_fd >= 0)
        close(queue->error_fd);
    queue->error_fd = fd;
    return 0;
}

/* ---- queues ---- */

int virtqueue_init(struct virtqueue *queue, uint32_t index) {
    memset(queue, 0, sizeof(*queue));
    pthread_mutex_init(&queue->serve, NULL);
    pthread_mutex_init(&queue->lock, NULL);
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&queue->idle, &attributes);
    pthread_condattr_destroy(&attributes);
    queue->index = index;
    queue->kick_fd = queue->call_fd = queue->error_fd = -1;
    return 0;
}

void virtqueue_free(struct virtqueue *queue) {
    for (uint32_t i = 0; queue->elements && i < QUEUE_SIZE_MAX; i++)
        if (queue->elements[i].live)
            virtqueue_drop(queue, (uint16_t)i);
    guest_memory_put(queue->memory);
    free(queue->elements);
    free(queue->again);
    if (queue->kick_fd >= 0)
        close(queue->kick_fd);
    virtqueue_call_set(queue, -1);
    virtqueue_error_set(queue, -1);
    if (queue->bell.made && queue->bell.aio) {
        syscall(SYS_io_destroy, queue->bell.context);
        close(queue->bell.null_fd);
    } else if (queue->bell.made) {
        io_uring_queue_exit(&queue->bell.ring);
    }
    pthread_mutex_destroy(&queue->serve);
    pthread_mutex_destroy(&queue->lock);
    pthread_cond_destroy(&queue->idle);
}

void virtqueue_reset(struct virtqueue *queue) {
    guest_memory_put(queue->memory);
    queue->memory = NULL;
    virtqueue_call_set(queue, -1);
    virtqueue_error_set(queue, -1);
    queue->desc = NULL;
    queue->avail = NULL;
    queue->used = NULL;
    queue->inflight = NULL;
    queue->desc_user = queue->avail_user = queue->used_user = 0;
    queue->addressed = false;
    queue->size = queue->again_count = queue->again_next = 0;
    queue->last_avail = queue->used_index = queue->seen_avail = queue->seen_used = 0;
    queue->reminded = false;
    queue->enabled = queue->started = queue->broken = queue->event_index = queue->indirect = false;
}

int virtqueue_map(struct virtqueue *queue) {
    uint64_t size = queue->addressed ? queue->size : 0;
    queue->desc = size ? memory_user(queue->memory, queue->desc_user, size * sizeof(struct vring_desc)) : NULL;
    queue->avail = size ? memory_user(queue->memory, queue->avail_user, sizeof(struct vring_avail) + (size + 1) * sizeof(uint16_t)) : NULL;
    queue->used = size ? memory_user(queue->memory, queue->used_user, sizeof(struct vring_used) + size * sizeof(struct vring_used_elem) + 2) : NULL;
    bool aligned = (uintptr_t)queue->desc % 16 == 0 && (uintptr_t)queue->avail % 2 == 0 && (uintptr_t)queue->used % 4 == 0;
    if (queue->desc && queue->avail && queue->used && aligned)
        return 0;
    queue->desc = NULL;
    queue->avail = NULL;
    queue->used = NULL;
    return -EFAULT;
}

static uint16_t *event_of_avail(const struct virtqueue *queue) { return &queue->avail->ring[queue->size]; }
static uint16_t *event_of_used(const struct virtqueue *queue) { return (uint16_t *)(void *)&queue->used->ring[queue->size]; }
static uint16_t avail_index(const struct virtqueue *queue) { return __atomic_load_n(&queue->avail->idx, __ATOMIC_ACQUIRE); }

bool virtqueue_pending(const struct virtqueue *queue) { return queue->again_next < queue->again_count || avail_index(queue) != queue->last_avail; }

bool virtqueue_arm(struct virtqueue *queue) {
    if (queue->event_index)
        __atomic_store_n(event_of_used(queue), queue->last_avail, __ATOMIC_RELAXED);
    else
        __atomic_store_n(&queue->used->flags, 0, __ATOMIC_RELAXED);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    return virtqueue_pending(queue);
}

void virtqueue_quiet(struct virtqueue *queue) {
    if (!queue->event_index)
        __atomic_store_n(&queue->used->flags, VRING_USED_F_NO_NOTIFY, __ATOMIC_RELAXED);
}

void virtqueue_break(struct virtqueue *queue) {
    queue->broken = true;
    atomic_store(&queue->running, false);
    pthread_mutex_lock(&queue->lock);
    /* Too rare to need a ring of its own. */
    if (queue->error_fd >= 0 && bell_set(&queue->bell, queue->error_fd) == 0)
        bell_ring(&queue->bell);
    bell_set(&queue->bell, queue->call_fd);
    pthread_mutex_unlock(&queue->lock);
}

/* Copies the guest's bytes once; all later checks are of the copy. */
static int table_copy(const struct virtqueue *queue, const struct vring_desc *indirect, struct chain *chain) {
    struct iovec pieces[8];
    uint32_t count = 0;
    int r = memory_iovs(queue->memory, indirect->addr, indirect->len, pieces, &count, 8);
    uint8_t *to = (uint8_t *)chain->table;
    for (uint32_t i = 0; i < count && r == 0; i++) {
        memcpy(to, pieces[i].iov_base, pieces[i].iov_len);
        to += pieces[i].iov_len;
    }
    __asm__ volatile("" ::: "memory");
    return r;
}

static struct vring_desc descriptor_copy(const struct vring_desc *from) {
    const uint64_t *words = (const uint64_t *)(const void *)from;
    uint64_t copy[2] = {__atomic_load_n(&words[0], __ATOMIC_RELAXED), __atomic_load_n(&words[1], __ATOMIC_RELAXED)};
    struct vring_desc d;
    memcpy(&d, copy, sizeof(d));
    return d;
}

static int chain_walk(const struct virtqueue *queue, struct chain *chain) {
    const struct vring_desc *table = NULL; /* private; NULL: the ring's own */
    uint32_t count = queue->size, index = chain->head;
    bool writable = false;
    chain->in_count = chain->out_count = 0;
    chain->in_size = chain->out_size = 0;
    for (uint32_t steps = 0;; steps++) {
        if (steps > QUEUE_SIZE_MAX)
            return -ELOOP;
        struct vring_desc d = table ? table[index] : descriptor_copy(&queue->desc[index]);
        if (d.flags & VRING_DESC_F_INDIRECT) {
            if (table || !queue->indirect || d.flags & VRING_DESC_F_NEXT || d.len == 0 || d.len % sizeof(d) || d.len / sizeof(d) > QUEUE_SIZE_MAX)
                return -EINVAL;
            int r = table_copy(queue, &d, chain);
            if (r < 0)
                return r;
            table = chain->table;
            count = d.len / sizeof(d);
            index = 0;
            continue;
        }
        int r;
        if (d.flags & VRING_DESC_F_WRITE) {
            writable = true;
            chain->out_size += d.len;
            r = memory_iovs(queue->memory, d.addr, d.len, chain->out, &chain->out_count, CHAIN_IOVS);
        } else {
            chain->in_size += d.len;
            r = writable ? -EINVAL : memory_iovs(queue->memory, d.addr, d.len, chain->in, &chain->in_count, CHAIN_IOVS);
        }
        if (r < 0)
            return r;
        if (chain->in_size > CHAIN_BYTES_MAX || chain->out_size > CHAIN_BYTES_MAX)
            return -E2BIG;
        if (!(d.flags & VRING_DESC_F_NEXT))
            return 0;
        index = d.next;
        if (index >= count)
            return -ERANGE;
    }
}

int virtqueue_take(struct virtqueue *queue, struct chain *chain) {
    static atomic_uint salts;
    bool again = queue->again_next < queue->again_count;
    int r = 0;
    if (again) {
        chain->head = queue->again[queue->again_next++];
    } else {
        uint16_t available = avail_index(queue);
        if (available == queue->last_avail)
            return 0;
        if ((uint16_t)(available - queue->last_avail) > queue->size)
            r = -EOVERFLOW;
        else
            chain->head = __atomic_load_n(&queue->avail->ring[queue->last_avail & (queue->size - 1)], __ATOMIC_RELAXED);
    }
    if (r == 0 && chain->head >= queue->size)
        r = -ERANGE;
    if (r == 0)
        r = chain_walk(queue, chain);
    struct iovec *iovs = NULL;
    if (r == 0 && !(iovs = malloc(chain->out_count * sizeof(*iovs) + 1)))
        return 0; /* later */
    pthread_mutex_lock(&queue->lock);
    struct element *element = r == 0 ? &queue->elements[chain->head] : NULL;
    if (element && element->live)
        r = -EBUSY; /* the guest reuses a chain that we still have */
    if (r == 0) {
        copy_bytes(iovs, chain->out, chain->out_count * sizeof(*iovs));
        atomic_fetch_add(&queue->memory->refs, 1);
        *element = (struct element){.live = true,
                                    .salt = atomic_fetch_add(&salts, 1) + 1,
                                    .iov_count = chain->out_count,
                                    .capacity = chain->out_size,
                                    .iovs = iovs,
                                    .memory = queue->memory};
        queue->in_flight++;
        queue->last_avail = (uint16_t)(queue->last_avail + !again);
        if (queue->inflight) {
            struct inflight_entry *entry = &queue->inflight->entries[chain->head];
            entry->counter = queue->inflight_counter++;
            __atomic_store_n(&entry->inflight, 1, __ATOMIC_RELEASE);
        }
        r = 1;
    } else {
        free(iovs);
    }
    pthread_mutex_unlock(&queue->lock);
    return r;
}

void virtqueue_drop(struct virtqueue *queue, uint16_t head) {
    assert(head < QUEUE_SIZE_MAX);
    struct element *element = &queue->elements[head];
    assert(element->live);
    assert(queue->in_flight > 0);
    guest_memory_put(element->memory);
    free(element->iovs);
    element->memory = NULL;
    element->iovs = NULL;
    element->live = false;
    if (--queue->in_flight == 0)
        pthread_cond_broadcast(&queue->idle);
}

void virtqueue_publish(struct virtqueue *queue, uint16_t head, uint32_t size) {
    virtqueue_drop(queue, head);
    if (!queue->used || head >= queue->size) /* its memory was taken away, or its rings are others by now */
        return;
    struct vring_used_elem entry = {.id = head, .len = size};
    queue->used->ring[queue->used_index & (queue->size - 1)] = entry;
    struct inflight_queue *inflight = queue->inflight;
    if (inflight) {
        inflight->entries[head].next = inflight->last_batch_head;
        __atomic_store_n(&inflight->last_batch_head, head, __ATOMIC_RELEASE);
    }
    uint16_t before = queue->used_index++;
    __atomic_store_n(&queue->used->idx, queue->used_index, __ATOMIC_RELEASE);
    if (inflight) {
        __atomic_store_n(&inflight->entries[head].inflight, 0, __ATOMIC_RELEASE);
        __atomic_store_n(&inflight->used_index, queue->used_index, __ATOMIC_RELEASE);
    }
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    bool wanted;
    if (queue->event_index)
        wanted = vring_need_event(__atomic_load_n(event_of_avail(queue), __ATOMIC_RELAXED), queue->used_index, before);
    else
        wanted = !(__atomic_load_n(&queue->avail->flags, __ATOMIC_RELAXED) & VRING_AVAIL_F_NO_INTERRUPT);
    if (wanted)
        virtqueue_signal(queue);
}

void virtqueue_signal(struct virtqueue *queue) { bell_ring(&queue->bell); }

void virtqueue_remind(struct virtqueue *queue) {
    if (!queue->used)
        return;
    bool quiet = queue->seen_used == queue->used_index;
    /* With events the guest says how far it has come; without them, only whether it wants a signal. */
    bool heard = queue->event_index ? __atomic_load_n(event_of_avail(queue), __ATOMIC_RELAXED) == queue->used_index
                                    : queue->reminded || __atomic_load_n(&queue->avail->flags, __ATOMIC_RELAXED) & VRING_AVAIL_F_NO_INTERRUPT;
    queue->seen_used = queue->used_index;
    queue->reminded = quiet;
    if (quiet && !heard)
        virtqueue_signal(queue);
}

struct taken {
    uint64_t counter;
    uint16_t head;
};

static int later(const void *a, const void *b) {
    uint64_t x = ((const struct taken *)a)->counter, y = ((const struct taken *)b)->counter;
    return x < y ? -1 : x > y;
}

int virtqueue_resume(struct virtqueue *queue) {
    queue->used_index = __atomic_load_n(&queue->used->idx, __ATOMIC_ACQUIRE);
    queue->again_count = queue->again_next = 0;
    struct inflight_queue *inflight = queue->inflight;
    if (!inflight)
        return 0;
    if (__atomic_load_n(&inflight->used_index, __ATOMIC_RELAXED) != queue->used_index) { /* the daemon ended before it noted an answer */
        uint16_t last = __atomic_load_n(&inflight->last_batch_head, __ATOMIC_RELAXED);
        if (last < queue->size)
            inflight->entries[last].inflight = 0;
        inflight->used_index = queue->used_index;
    }
    /* Each field is read once, as the front end can change all of them meanwhile: a sort of changing values may leave its array. */
    struct taken *taken = malloc(QUEUE_SIZE_MAX * sizeof(*taken));
    if (!queue->again)
        queue->again = malloc(QUEUE_SIZE_MAX * sizeof(*queue->again));
    if (!taken || !queue->again) {
        free(taken);
        return -ENOMEM;
    }
    queue->inflight_counter = 0;
    for (uint32_t i = 0; i < queue->size; i++) {
        if (__atomic_load_n(&inflight->entries[i].inflight, __ATOMIC_RELAXED) != 1)
            continue;
        struct taken entry = {__atomic_load_n(&inflight->entries[i].counter, __ATOMIC_RELAXED), (uint16_t)i};
        taken[queue->again_count++] = entry;
        if (entry.counter >= queue->inflight_counter)
            queue->inflight_counter = entry.counter + 1;
    }
    qsort(taken, queue->again_count, sizeof(*taken), later);
    for (uint32_t i = 0; i < queue->again_count; i++)
        queue->again[i] = taken[i].head;
    free(taken);
    /* The requests given to us are those answered and those not answered. */
    queue->last_avail = (uint16_t)(queue->used_index + queue->again_count);
    return 0;
}
