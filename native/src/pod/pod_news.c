/* The news of this node, until they are published: a bounded queue from the steps that change the block table to the one thread that publishes.
 *
 * A step copies an item into a ring, under a mutex of producers: 40 ns. The publishing thread moves items from the ring into its own memory, where
 * they are held until they are due. Chains find them by key, so that a later item of a key takes the earlier one's place; a heap orders them.
 *
 * The eventfd is written when something is due earlier than the thread will look again (wake_at), or when a whole batch has come. While the
 * thread is awake wake_at is 0. A producer publishes its item, then reads wake_at. The thread writes wake_at, then looks at the ring. So one of them
 * sees the other.
 */
#include "base/descriptor.h"
#include "pod/pod_layout.h"

#include <sys/eventfd.h>

/* Held items fall due on a grid of 4.2 ms: so a busy node publishes at most 240 batches a second that are not full. */
#define GRID_NS (UINT64_C(1) << 22)
#define LIFE_HOLD_NS UINT64_C(20000000)
#define BYTES_MIN (UINT64_C(64) << 10)
#define BYTES_MAX (UINT64_C(16) << 30)
#define NOBODY UINT32_MAX
#define INDEX_SIZE 8192u /* of a batch's segments and shapes while it is packed: twice as many as it can have */

/* A life, in an item of this kind: segment, generation, flags 1 if it has ended. */
enum { LIFE = 0, LIFE_ENDED = 1 };

struct held {
    struct kvfs_news_item item;
    uint64_t due_ns;
    uint64_t order;
    uint32_t at;   /* in the heap */
    uint32_t next; /* of the chain by key, or of the free list */
};

/* A batch while it is packed. */
struct packing {
    struct kvfs_pod_batch_segment segments[KVFS_POD_BATCH_SIZE_MAX / sizeof(struct kvfs_pod_batch_segment)];
    struct kvfs_pod_batch_shape shapes[KVFS_POD_BATCH_SIZE_MAX / sizeof(struct kvfs_pod_batch_shape)];
    struct kvfs_pod_batch_record records[KVFS_POD_BATCH_RECORDS_MAX];
    uint32_t segment_count, shape_count, record_count;
    uint16_t segment_index[INDEX_SIZE]; /* open addressing: + 1; 0: none */
    uint16_t shape_index[INDEX_SIZE];
};

struct kvfs_news {
    struct kvfs_news_config config;
    int fd;

    _Alignas(64) pthread_mutex_t producers;
    struct kvfs_news_item *ring; /* hold_ns: when it is due */
    uint64_t ring_count;         /* a power of two */
    _Atomic uint64_t added;      /* items, ever: the next one's place is its remainder */
    _Atomic uint64_t lost;
    _Atomic uint64_t wakes;
    uint64_t lost_told;

    _Alignas(64) _Atomic uint64_t taken; /* of them */
    _Atomic uint64_t wake_at;
    _Atomic uint64_t flush_before; /* items before this are due at once */

    _Alignas(64) pthread_mutex_t consumer;
    struct held *held;
    uint32_t *heap;
    uint32_t *chains; /* held + 1; 0: none */
    uint32_t held_max;
    uint32_t chain_count; /* a power of two */
    uint32_t count;       /* in the heap */
    uint32_t fresh;       /* never used from here on */
    uint32_t free;        /* held + 1: given back */
    uint64_t flushed_before;
    uint64_t number; /* of the next record */
    struct packing *packing;
    struct kvfs_news_statistics statistics;
};

/* ---- producers ---- */

static void wake(struct kvfs_news *news) {
    atomic_store(&news->wake_at, 0);
    atomic_fetch_add_explicit(&news->wakes, 1, memory_order_relaxed);
    wake_fd(news->fd);
}

static void add(struct kvfs_news *news, const struct kvfs_news_item *item) {
    uint64_t due_ns = now_ns() + item->hold_ns, at, wake_at;

    if (item->hold_ns)
        due_ns = (due_ns + GRID_NS - 1) & ~(GRID_NS - 1);
    pthread_mutex_lock(&news->producers);
    at = get(&news->added);
    if (at - get_acquire(&news->taken) >= news->ring_count) {
        set(&news->lost, get(&news->lost) + 1);
    } else {
        struct kvfs_news_item *place = &news->ring[at & (news->ring_count - 1)];

        *place = *item;
        place->hold_ns = due_ns;
        atomic_store(&news->added, at + 1);
    }
    wake_at = atomic_load(&news->wake_at);
    if (wake_at && (due_ns < wake_at || at + 1 - get(&news->taken) >= min_u64(KVFS_POD_BATCH_RECORDS_MAX, news->ring_count / 2)))
        wake(news);
    pthread_mutex_unlock(&news->producers);
}

void kvfs_news_add(struct kvfs_news *news, const struct kvfs_news_item *item) {
    assert(item->kind >= KVFS_POD_HERE && item->kind <= KVFS_POD_HIT);
    add(news, item);
}

#define PACE_MS 2000 /* the most that one wait takes */

int kvfs_news_pace(const struct kvfs_news *news) {
    for (int ms = 0; atomic_load(&news->added) - atomic_load(&news->taken) > news->ring_count / 2; ms++) {
        if (ms == PACE_MS)
            return -ETIMEDOUT;
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    }
    return 0;
}

void kvfs_news_life(struct kvfs_news *news, uint32_t segment, uint64_t generation, int ended) {
    struct kvfs_news_item item = {
        .kind = LIFE, .segment = segment, .generation = generation, .flags = ended ? LIFE_ENDED : 0, .hold_ns = LIFE_HOLD_NS};

    add(news, &item);
}

void kvfs_news_flush(struct kvfs_news *news) {
    pthread_mutex_lock(&news->producers);
    atomic_store(&news->flush_before, get(&news->added));
    wake(news);
    pthread_mutex_unlock(&news->producers);
}

/* ---- held items: a heap by (due, order), and chains by key ---- */

static bool earlier(const struct kvfs_news *news, uint32_t a, uint32_t b) {
    const struct held *x = &news->held[a], *y = &news->held[b];

    return x->due_ns != y->due_ns ? x->due_ns < y->due_ns : x->order < y->order;
}

static void heap_set(struct kvfs_news *news, uint32_t at, uint32_t number) {
    news->heap[at] = number;
    news->held[number].at = at;
}

static void heap_up(struct kvfs_news *news, uint32_t at) {
    uint32_t number = news->heap[at];

    for (; at && earlier(news, number, news->heap[(at - 1) / 2]); at = (at - 1) / 2)
        heap_set(news, at, news->heap[(at - 1) / 2]);
    heap_set(news, at, number);
}

static void heap_down(struct kvfs_news *news, uint32_t at) {
    uint32_t number = news->heap[at];

    for (uint32_t child; (child = 2 * at + 1) < news->count; at = child) {
        if (child + 1 < news->count && earlier(news, news->heap[child + 1], news->heap[child]))
            child++;
        if (!earlier(news, news->heap[child], number))
            break;
        heap_set(news, at, news->heap[child]);
    }
    heap_set(news, at, number);
}

static uint32_t *chain_of(struct kvfs_news *news, const struct kvfs_news_item *item) {
    return &news->chains[pod_mix(item->key_low * 3 ^ item->key_high) & (news->chain_count - 1)];
}

static bool has_key(const struct kvfs_news_item *item) { return item->kind != LIFE; }

/* Hits of a key, and its name, are apart. */
static bool same_key(const struct kvfs_news_item *a, const struct kvfs_news_item *b) {
    return a->key_low == b->key_low && a->key_high == b->key_high && (a->kind == KVFS_POD_HIT) == (b->kind == KVFS_POD_HIT);
}

static uint32_t held_find(struct kvfs_news *news, const struct kvfs_news_item *item) {
    for (uint32_t number = *chain_of(news, item); number; number = news->held[number - 1].next)
        if (same_key(&news->held[number - 1].item, item))
            return number - 1;
    return NOBODY;
}

static void held_insert(struct kvfs_news *news, const struct kvfs_news_item *item, uint64_t due_ns, uint64_t order) {
    uint32_t number = news->free ? news->free - 1 : news->fresh++;
    struct held *held = &news->held[number];

    assert(number < news->held_max);
    if (news->free)
        news->free = held->next;
    *held = (struct held){.item = *item, .due_ns = due_ns, .order = order};
    if (has_key(item)) {
        uint32_t *chain = chain_of(news, item);

        held->next = *chain;
        *chain = number + 1;
    }
    heap_set(news, news->count++, number);
    heap_up(news, held->at);
}

static void held_remove(struct kvfs_news *news, uint32_t number) {
    struct held *held = &news->held[number];
    uint32_t at = held->at, last;

    if (has_key(&held->item)) {
        uint32_t *link = chain_of(news, &held->item);

        while (*link != number + 1)
            link = &news->held[*link - 1].next;
        *link = held->next;
    }
    last = news->heap[--news->count];
    if (last != number) {
        heap_set(news, at, last);
        heap_up(news, at);
        heap_down(news, news->held[last].at);
    }
    held->next = news->free;
    news->free = number + 1;
}

static bool is_here(uint8_t kind) { return kind == KVFS_POD_HERE || kind == KVFS_POD_DIRECTORY_HERE; }

/* A later item of a key that is held. The first of them says whether anything stood there before both. */
static void merge(struct kvfs_news *news, uint32_t number, const struct kvfs_news_item *item, uint64_t due_ns) {
    struct held *held = &news->held[number];
    uint8_t first = is_here(held->item.kind) ? held->item.flags & KVFS_NEWS_FIRST : 0;

    news->statistics.merged++;
    if (item->kind == KVFS_POD_HIT) {
        held->item.version += item->version;
        return;
    }
    if (first && !is_here(item->kind)) {
        held_remove(news, number);
        news->statistics.vanished++;
        return;
    }
    held->item = *item;
    held->item.flags = (uint8_t)((item->flags & ~KVFS_NEWS_FIRST) | first);
    if (due_ns < held->due_ns) {
        held->due_ns = due_ns;
        heap_up(news, held->at);
    }
}

/* All that is held, hidden names aside, is due. */
static void make_due(struct kvfs_news *news) {
    for (uint32_t i = 0; i < news->count; i++) {
        struct held *held = &news->held[news->heap[i]];

        if (!has_key(&held->item) || !(held->item.flags & KVFS_NEWS_HIDDEN))
            held->due_ns = 0;
    }
    for (uint32_t i = news->count / 2; i-- > 0;)
        heap_down(news, i);
}

/* From the ring; false: there are more, but no room for them. */
static bool drain(struct kvfs_news *news) {
    uint64_t flush_before = atomic_load(&news->flush_before);
    uint64_t at = get(&news->taken), end = atomic_load(&news->added);

    if (flush_before > news->flushed_before) {
        make_due(news);
        news->flushed_before = flush_before;
    }
    for (; at != end; at++) {
        struct kvfs_news_item item = news->ring[at & (news->ring_count - 1)];
        bool flushed = at < news->flushed_before && !(has_key(&item) && item.flags & KVFS_NEWS_HIDDEN);
        uint64_t due_ns = flushed ? 0 : item.hold_ns;
        uint32_t number = has_key(&item) ? held_find(news, &item) : NOBODY;

        if (number != NOBODY)
            merge(news, number, &item, due_ns);
        else if (news->free || news->fresh < news->held_max)
            held_insert(news, &item, due_ns, at);
        else
            break;
        set_release(&news->taken, at + 1);
    }
    return at == end;
}

/* ---- packing ---- */

/* The most that one item adds. */
#define ITEM_SIZE_MAX (sizeof(struct kvfs_pod_batch_record) + sizeof(struct kvfs_pod_batch_shape) + sizeof(struct kvfs_pod_batch_segment))

static void pack_begin(struct packing *packing) {
    packing->segment_count = packing->shape_count = packing->record_count = 0;
    memset(packing->segment_index, 0, sizeof(packing->segment_index));
    memset(packing->shape_index, 0, sizeof(packing->shape_index));
}

static uint64_t size_of(const struct packing *packing) {
    return sizeof(struct kvfs_pod_batch) + packing->segment_count * sizeof(packing->segments[0]) + packing->shape_count * sizeof(packing->shapes[0]) +
           packing->record_count * sizeof(packing->records[0]);
}

static bool has_room(const struct packing *packing) {
    return size_of(packing) + ITEM_SIZE_MAX <= KVFS_POD_BATCH_SIZE_MAX && packing->record_count < KVFS_POD_BATCH_RECORDS_MAX;
}

static uint16_t pack_segment(struct packing *packing, uint32_t segment, uint64_t generation, uint32_t flags) {
    uint64_t at = pod_mix(segment ^ generation << 24);
    struct kvfs_pod_batch_segment *place;

    for (at %= INDEX_SIZE; packing->segment_index[at]; at = (at + 1) % INDEX_SIZE) {
        place = &packing->segments[packing->segment_index[at] - 1];
        if (place->segment == segment && place->generation == generation) {
            place->flags |= flags;
            return (uint16_t)(packing->segment_index[at] - 1);
        }
    }
    packing->segments[packing->segment_count] = (struct kvfs_pod_batch_segment){.generation = generation, .segment = segment, .flags = flags};
    packing->segment_index[at] = (uint16_t)++packing->segment_count;
    return (uint16_t)(packing->segment_count - 1);
}

static uint16_t pack_shape(struct packing *packing, const struct kvfs_news_item *item) {
    struct kvfs_pod_batch_shape shape = {
        .size = item->size, .header_pages = item->header_pages, .mode = item->mode, .uid = item->uid, .gid = item->gid};
    uint64_t at = pod_mix(shape.size ^ pod_mix(shape.header_pages | (uint64_t)shape.mode << 32) ^ pod_mix(~(shape.uid | (uint64_t)shape.gid << 32)));

    for (at %= INDEX_SIZE; packing->shape_index[at]; at = (at + 1) % INDEX_SIZE)
        if (memcmp(&packing->shapes[packing->shape_index[at] - 1], &shape, sizeof(shape)) == 0)
            return (uint16_t)(packing->shape_index[at] - 1);
    packing->shapes[packing->shape_count] = shape;
    packing->shape_index[at] = (uint16_t)++packing->shape_count;
    return (uint16_t)(packing->shape_count - 1);
}

static void pack_item(struct packing *packing, const struct kvfs_news_item *item) {
    struct kvfs_pod_batch_record record = {.key_low = item->key_low, .key_high = item->key_high, .version = item->version};
    uint32_t kind = item->kind;

    if (kind == LIFE) {
        pack_segment(packing, item->segment, item->generation, item->flags);
        return;
    }
    if (kind == KVFS_POD_HERE) {
        record.segment = pack_segment(packing, item->segment, item->generation, 0);
        record.page_kind = item->page & 0xffffff;
        if (item->flags & KVFS_NEWS_KEYED)
            kind |= KVFS_POD_KEYED;
    }
    if (is_here(item->kind))
        record.shape = pack_shape(packing, item);
    record.page_kind |= kind << 24;
    packing->records[packing->record_count++] = record;
}

static void append(uint8_t **at, const void *from, uint64_t size) {
    copy_bytes(*at, from, size);
    *at += size;
}

static int64_t write_batch(struct kvfs_news *news, const struct packing *packing, uint8_t *out) {
    struct kvfs_pod_batch head = {
        .magic = KVFS_MAGIC_NEWS,
        .version = 1,
        .size = (uint32_t)size_of(packing),
        .start = news->config.start,
        .number = news->number,
        .slot = (uint16_t)news->config.slot,
        .segment_count = (uint16_t)packing->segment_count,
        .shape_count = (uint16_t)packing->shape_count,
        .record_count = packing->record_count,
    };
    uint8_t *at = out;

    append(&at, &head, sizeof(head));
    append(&at, packing->segments, packing->segment_count * sizeof(packing->segments[0]));
    append(&at, packing->shapes, packing->shape_count * sizeof(packing->shapes[0]));
    append(&at, packing->records, packing->record_count * sizeof(packing->records[0]));
    head.checksum = kvfs_checksum(out, head.size, news->config.secret);
    memcpy(out, &head, sizeof(head));
    news->number += packing->record_count ? packing->record_count : 1; /* one without records has a number too, else nobody would miss it */
    news->statistics.batches++;
    news->statistics.records += packing->record_count;
    news->statistics.bytes += head.size;
    return head.size;
}

/* Items that are due so soon go with those that are due. A batch costs its sender, the engine and each reader some 100 us, a record far less. */
#define TOGETHER_NS UINT64_C(10000000)

/* Whether the first item is due now, or within the time `soon`. */
static bool is_due(const struct kvfs_news *news, uint64_t now, uint64_t soon, bool full) {
    uint64_t due_ns = news->count ? news->held[news->heap[0]].due_ns : 0;

    return news->count && (full || due_ns <= now || due_ns - now <= soon);
}

/* Due items go, in order. Where there is no room in the queue, a whole batch goes, due or not. */
static int64_t pack(struct kvfs_news *news, uint64_t now, bool full, void *out, struct kvfs_news_taken *taken) {
    struct packing *packing = news->packing;
    int64_t size = 0;

    if (!is_due(news, now, 0, full))
        return 0;
    pack_begin(packing);
    while (is_due(news, now, TOGETHER_NS, full)) {
        uint32_t number = news->heap[0];
        const struct kvfs_news_item *item = &news->held[number].item;

        if (!has_room(packing))
            break;
        pack_item(packing, item);
        if (has_key(item) && item->kind != KVFS_POD_HIT && item->version > taken->version_max)
            taken->version_max = item->version;
        held_remove(news, number);
    }
    if (packing->record_count || packing->segment_count) {
        taken->number = news->number;
        taken->record_count = packing->record_count;
        size = write_batch(news, packing, out);
    }
    return size;
}

int64_t kvfs_news_take(struct kvfs_news *news, uint64_t now, void *out, uint64_t capacity, struct kvfs_news_taken *taken) {
    uint64_t woken, lost;
    int64_t size;

    memset(taken, 0, sizeof(*taken));
    if (capacity < KVFS_POD_BATCH_SIZE_MAX)
        return -ENOSPC;
    pthread_mutex_lock(&news->consumer);
    atomic_store(&news->wake_at, 0);
    if (read(news->fd, &woken, sizeof(woken)) < 0)
        assert(errno == EAGAIN);
    for (;;) {
        bool all = drain(news);

        size = pack(news, now, !all, out, taken);
        taken->next_due_ns = news->count ? news->held[news->heap[0]].due_ns : UINT64_MAX;
        if (size)
            break;
        atomic_store(&news->wake_at, taken->next_due_ns ? taken->next_due_ns : 1);
        if (atomic_load(&news->added) == get(&news->taken) && atomic_load(&news->flush_before) <= news->flushed_before)
            break;
        atomic_store(&news->wake_at, 0);
    }
    lost = atomic_load(&news->lost);
    taken->lost = lost - news->lost_told;
    news->lost_told = lost;
    news->number += taken->lost; /* a gap: the others read flash */
    pthread_mutex_unlock(&news->consumer);
    return size;
}

/* ---- creation ---- */

static uint64_t power_below(uint64_t count) { return UINT64_C(1) << (63 - __builtin_clzll(count)); }

int kvfs_news_create(const struct kvfs_news_config *config, struct kvfs_news **out) {
    struct kvfs_news *news;
    uint64_t held_max;

    if (config->bytes_max < BYTES_MIN || config->bytes_max > BYTES_MAX || config->slot >= KVFS_POD_NODES_MAX)
        return -EINVAL;
    news = aligned_alloc(64, round_up(sizeof(*news), 64));
    if (!news)
        return -ENOMEM;
    memset(news, 0, sizeof(*news));
    news->config = *config;
    pthread_mutex_init(&news->producers, NULL);
    pthread_mutex_init(&news->consumer, NULL);
    /* A quarter or more is the ring's, half of it is for what is held. */
    held_max = config->bytes_max / 2 / (sizeof(*news->held) + sizeof(*news->heap) + sizeof(*news->chains));
    news->ring_count = power_below(config->bytes_max / 2 / sizeof(*news->ring));
    news->held_max = (uint32_t)held_max;
    news->chain_count = (uint32_t)power_below(held_max);
    news->ring = calloc(news->ring_count, sizeof(*news->ring));
    news->held = calloc(news->held_max, sizeof(*news->held));
    news->heap = calloc(news->held_max, sizeof(*news->heap));
    news->chains = calloc(news->chain_count, sizeof(*news->chains));
    news->packing = malloc(sizeof(*news->packing));
    news->fd = descriptor_above(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
    if (!news->ring || !news->held || !news->heap || !news->chains || !news->packing || news->fd < 0) {
        int r = news->fd < 0 ? -errno : -ENOMEM;

        kvfs_news_destroy(news);
        return r;
    }
    atomic_store(&news->wake_at, UINT64_MAX);
    *out = news;
    return 0;
}

void kvfs_news_destroy(struct kvfs_news *news) {
    if (!news)
        return;
    if (news->fd >= 0)
        close(news->fd);
    free(news->ring);
    free(news->held);
    free(news->heap);
    free(news->chains);
    free(news->packing);
    pthread_mutex_destroy(&news->producers);
    pthread_mutex_destroy(&news->consumer);
    free(news);
}

int kvfs_news_fd(const struct kvfs_news *news) { return news->fd; }

void kvfs_news_statistics(struct kvfs_news *news, struct kvfs_news_statistics *out) {
    pthread_mutex_lock(&news->consumer);
    *out = news->statistics;
    out->held = news->count + (atomic_load(&news->added) - get(&news->taken));
    pthread_mutex_unlock(&news->consumer);
    out->added = atomic_load(&news->added);
    out->lost = atomic_load(&news->lost);
    out->wakes = atomic_load(&news->wakes);
}
