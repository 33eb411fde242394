/* The plane: builds and takes down the parts, counts. */
#include "block/feed.h"
#include "frames/frames.h"
#include "io/nvme/tcp.h"
#include "virtiofs/virtio.h"

#include <stdarg.h>
#include <stdio.h>
#include <unistd.h>

static _Thread_local char last_error[256];

const char *kvfs_plane_error(void) { return last_error; }

static int fail(int error, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(last_error, sizeof(last_error), format, arguments);
    va_end(arguments);
    return error;
}

/* ---- create and destroy ---- */

static int config_check(const struct kvfs_plane_config *c, const struct kvfs_member *members) {
    if (c->device_count == 0 || c->device_count > KVFS_DEVICES_MAX)
        return fail(-EINVAL, "%u devices: 1 to %u are possible", c->device_count, KVFS_DEVICES_MAX);
    if (c->stripe_width == 0 || c->stripe_width > KVFS_STRIPE_WIDTH_MAX || c->stripe_width > c->device_count)
        return fail(-EINVAL, "stripe width %u with %u devices", c->stripe_width, c->device_count);
    if (c->stripe_unit < 16384 || c->stripe_unit % KVFS_PAGE_SIZE || c->zone_size % c->stripe_unit || c->zone_size == 0)
        return fail(-EINVAL, "stripe unit %llu, zone size %llu", (unsigned long long)c->stripe_unit, (unsigned long long)c->zone_size);
    if (c->staging_size >> 40 || c->read_memory_size >> 40)
        return fail(-EINVAL, "staging of %llu bytes, read memory of %llu: at most 1 TiB each", (unsigned long long)c->staging_size,
                    (unsigned long long)c->read_memory_size);
    if (c->segment_count == 0 || c->zone_size * c->stripe_width / PAGE > UINT32_MAX)
        return fail(-EINVAL, "%u segments of %llu bytes", c->segment_count, (unsigned long long)(c->zone_size * c->stripe_width));
    for (uint64_t i = 0; i < (uint64_t)c->segment_count * c->stripe_width; i++)
        if (members[i].device >= c->device_count)
            return fail(-EINVAL, "segment %llu lies on device %u of %u", (unsigned long long)(i / c->stripe_width), members[i].device,
                        c->device_count);
    return 0;
}

static void on_error(struct kvfs_array *array, uint32_t device, int error) {
    event_add((struct kvfs_plane *)((char *)array - offsetof(struct kvfs_plane, array)), KVFS_EVENT_IO_ERROR, 0,
              (uint64_t)device << 32 | (uint32_t)error);
}

static void on_message(struct kvfs_array *array, uint32_t device) {
    event_add((struct kvfs_plane *)((char *)array - offsetof(struct kvfs_plane, array)), KVFS_EVENT_DEVICE, 0, device);
}

/* Zeros in a configuration mean the usual. */
static void config_complete(struct kvfs_plane_config *c) {
    long cores = sysconf(_SC_NPROCESSORS_ONLN);
    if (!c->server_threads)
        c->server_threads = cores < 1 ? 1 : (uint32_t)cores;
    if (c->server_threads > SERVERS_MAX)
        c->server_threads = SERVERS_MAX;
    if (!c->store_threads)
        c->store_threads = 8;
    if (!c->max_read)
        c->max_read = 1 << 20;
    if (c->max_read > 4u << 20)
        c->max_read = 4u << 20;
    if (!c->max_write || c->max_write > CHUNK_SIZE)
        c->max_write = (uint32_t)CHUNK_SIZE;
    if (!c->io_timeout_ms)
        c->io_timeout_ms = 5000;
    if (!c->request_timeout_ms)
        c->request_timeout_ms = 30000;
    if (c->staging_size < 16 * CHUNK_SIZE)
        c->staging_size = 16 * CHUNK_SIZE;
    if (c->read_memory_size < 16 * CHUNK_SIZE)
        c->read_memory_size = 16 * CHUNK_SIZE;
}

static int array_build(struct kvfs_plane *plane, const int *device_fds, const uint64_t *zones_offset, const struct kvfs_member *members) {
    const struct kvfs_plane_config *c = &plane->config;
    const struct geometry geometry = {.secret = c->secret,
                                      .mount_epoch = c->mount_epoch,
                                      .zone_size = c->zone_size,
                                      .stripe_unit = c->stripe_unit,
                                      .stripe_width = c->stripe_width,
                                      .segment_count = c->segment_count};
    plane->array.io_timeout_ms = c->io_timeout_ms;
    plane->array.inline_max = UINT32_MAX;
    plane->array.on_error = on_error;
    plane->array.on_message = on_message;
    int r = array_init(&plane->array, &geometry, c->device_count);
    if (r < 0)
        return fail(-ENOMEM, "no memory for %u segments", c->segment_count);
    memcpy(plane->array.members, members, (uint64_t)c->segment_count * c->stripe_width * sizeof(*members));
    for (uint32_t i = 0; i < c->device_count; i++) {
        plane->array.devices[i].fd = device_fds[i];
        plane->array.devices[i].zones_offset = zones_offset[i];
        device_probe(&plane->array.devices[i]);
    }
    return 0;
}

static int memory_build(struct kvfs_plane *plane) {
    const struct kvfs_plane_config *c = &plane->config;
    plane->uses = calloc(c->records_max + 1, sizeof(*plane->uses)); /* untouched pages cost nothing */
    /* Slots count to records_max: a rename at the limit has one more. */
    int made = kvfs_chains_create(c->records_max + 1, c->records_max, &plane->chains);
    if (made < 0)
        return fail(made, "no memory for chains of %u blocks", c->records_max);
    if (!plane->uses)
        return fail(-ENOMEM, "no memory for %u segments", c->segment_count);
    for (uint32_t i = 0; i < SHARDS; i++)
        pthread_mutex_init(&plane->shards[i].lock, NULL);
    pthread_mutex_init(&plane->request_lock, NULL);
    pthread_mutex_init(&plane->staged_lock, NULL);
    atomic_store(&plane->space, UINT64_MAX);
    atomic_store(&plane->share, UINT64_MAX);
    atomic_store(&plane->names_share, KVFS_WHOLE);
    atomic_store(&plane->staging_share, UINT64_MAX);
    plane->slow_ns = c->slow_ms ? c->slow_ms * (uint64_t)1000000 : UINT64_MAX;
    int r = handles_init(plane);
    if (r < 0)
        return fail(r, "getrandom: no numbers for handles");
    r = events_init(&plane->events);
    if (r < 0)
        return fail(r, "eventfd: %s", strerror(-r));
    r = fuse_create(plane);
    if (r == 0)
        r = guests_create(plane);
    if (r == 0)
        r = arena_init(&plane->staging, CHUNK_SIZE, (uint32_t)(c->staging_size / CHUNK_SIZE / 4 * 3));
    if (r == 0)
        r = arena_init(&plane->staging_small, SMALL_SIZE, (uint32_t)(c->staging_size / SMALL_SIZE / 4));
    if (r == 0)
        r = arena_init(&plane->reading, CHUNK_SIZE, (uint32_t)(c->read_memory_size / CHUNK_SIZE / 4 * 3));
    if (r == 0)
        r = arena_init(&plane->reading_small, SMALL_SIZE, (uint32_t)(c->read_memory_size / SMALL_SIZE / 4));
    if (r < 0)
        return fail(r, "no memory for staging of %llu bytes", (unsigned long long)c->staging_size);
    r = kvfs_table_create(c->records_max, c->secret, c->mount_epoch, &plane->table);
    if (r < 0)
        return fail(r, "block table of %llu records: %s", (unsigned long long)c->records_max, strerror(-r));
    kvfs_table_watch(plane->table, user_names, plane);
    return kvfs_names_create(&plane->names) < 0 ? fail(-ENOMEM, "no memory for names") : 0;
}

static int workers_start(struct kvfs_plane *plane, const int *device_fds) {
    char reason[NVME_REASON];
    int r = nvme_hosts_start(&plane->array, device_fds, true, reason, sizeof(reason));
    if (r < 0)
        return fail(r, "%s", reason);
    r = pool_start(plane, &plane->store, plane->config.store_threads);
    if (r == 0)
        r = fuse_start(plane);
    return r < 0 ? fail(r, "rings: %s%s", strerror(-r), ring_advice(r)) : 0;
}

int kvfs_plane_create(const struct kvfs_plane_config *config, const int *device_fds, const uint64_t *zones_offset, const struct kvfs_member *members,
                      struct kvfs_plane **out) {
    int r = config_check(config, members);
    if (r < 0)
        return r;
    struct kvfs_plane *plane = calloc(1, sizeof(*plane));
    if (!plane)
        return fail(-ENOMEM, "no memory");
    plane->config = *config;
    plane->events.fd = -1;
    reservations_init(plane);
    config_complete(&plane->config);
    r = array_build(plane, device_fds, zones_offset, members);
    if (r == 0)
        r = memory_build(plane);
    if (r == 0)
        r = workers_start(plane, device_fds);
    if (r < 0) {
        kvfs_plane_destroy(plane);
        return r;
    }
    *out = plane;
    return 0;
}

static void nodes_free(struct kvfs_plane *plane) {
    for (uint32_t s = 0; s < SHARDS; s++)
        for (uint32_t b = 0; b < 1024; b++)
            while (plane->shards[s].nodes[b]) {
                struct node *node = plane->shards[s].nodes[b];
                plane->shards[s].nodes[b] = node->next;
                if (node->file) {
                    node->file->parked = NULL;
                    file_free(plane, node);
                }
                desc_put(node->desc);
                for (struct hold *hold = node->hold.next, *next; hold; hold = next) {
                    next = hold->next;
                    free(hold);
                }
                free(node->foreign);
                free(node);
            }
}

void kvfs_plane_destroy(struct kvfs_plane *plane) {
    atomic_store(&plane->leaving, true); /* no file ends by being sealed any more */
    if (plane->names)
        kvfs_flush_give_up(plane);
    clients_stop(plane);
    if (plane->fuse)
        mux_end(plane);
    atomic_store(&plane->stopping, true);
    if (plane->guests)
        guests_stop(plane);
    if (plane->fuse)
        fuse_stop(plane);
    pool_stop(&plane->store);
    if (plane->guests)
        guests_free(plane);
    if (plane->fuse)
        fuse_free(plane);
    if (plane->array.devices)
        nvme_hosts_stop(&plane->array);
    if (plane->array.segment_busy)
        nodes_free(plane);
    for (uint32_t i = 0; i < plane->handles.count; i++)
        free(plane->handles.chunks[i / 1024][i % 1024]);
    for (uint32_t i = 0; i < 4096; i++)
        free(plane->handles.chunks[i]);
    free(plane->handles.free);
    while (plane->requests_free) {
        struct request *next = plane->requests_free->next;
        free(plane->requests_free);
        plane->requests_free = next;
    }
    feed_destroy(plane->feed);
    lost_end(plane);
    foreign_leave(plane);
    if (plane->table)
        kvfs_table_destroy(plane->table);
    reservations_free(plane);
    kvfs_names_destroy(plane->names);
    if (!threads_busy(&plane->array)) { /* else a thread may still read into it: the process ends soon */
        arena_free(&plane->staging);
        arena_free(&plane->staging_small);
        arena_free(&plane->reading);
        arena_free(&plane->reading_small);
    }
    written_free(plane->written);
    opens_free(plane->opens);
    events_free(&plane->events);
    kvfs_chains_destroy(plane->chains);
    free(plane->uses);
    array_free(&plane->array);
    free(plane);
}

struct kvfs_table *kvfs_plane_table(struct kvfs_plane *plane) { return plane->table; }

struct kvfs_names *kvfs_plane_names(struct kvfs_plane *plane) { return plane->names; }

/* ---- statistics and faults ---- */

void kvfs_statistics_get(struct kvfs_plane *plane, struct kvfs_statistics *out) {
    memset(out, 0, sizeof(*out));
#define TAKE(field) out->field = atomic_load_explicit(&plane->count.field, memory_order_relaxed)
    TAKE(misses_made); /* before the misses that they are of */
    TAKE(requests);
    TAKE(forwarded);
    TAKE(forward_timeouts);
    TAKE(lookups);
    TAKE(lookup_misses);
    TAKE(opens);
    TAKE(opens_found);
    TAKE(uses);
    TAKE(stale_opens);
    TAKE(reads);
    TAKE(read_bytes);
    TAKE(writes);
    TAKE(write_bytes);
    TAKE(checksum_errors);
    TAKE(read_errors);
    TAKE(staged_files);
    TAKE(open_handles);
    TAKE(parked);
    TAKE(spins);
    TAKE(sleeps);
    TAKE(wakeups);
    TAKE(blocks_written);
    TAKE(blocks_copied);
    TAKE(written_bytes);
    TAKE(jobs_in_flight);
    TAKE(slow_requests);
    TAKE(handed);
    TAKE(flushes_sealed);
    TAKE(ring_requests);
    TAKE(staging_waits);
    TAKE(staging_refusals);
#undef TAKE
    out->zombies = atomic_load_explicit(&plane->array.orphans, memory_order_relaxed);
    /* A name that is being made counts until it is asked for; that takes back what was said of it, but what is told never falls. */
    unsigned long long missed = out->lookup_misses > out->misses_made ? out->lookup_misses - out->misses_made : 0,
                       told = atomic_load(&plane->missed_told);
    while (missed > told && !atomic_compare_exchange_weak(&plane->missed_told, &told, missed))
        ;
    out->names_missed = missed > told ? missed : told;
    for (uint32_t i = 0; i < KVFS_AGES; i++)
        out->found_ages[i] = atomic_load_explicit(&plane->found_ages[i], memory_order_relaxed);
    out->forwarded_in_flight = plane->fuse->mux.live_count;
    out->staged_bytes = atomic_load(&plane->staged_bytes);
    out->staging_size = plane->config.staging_size;
    out->staging_short = staging_is_short(plane);
    out->open_bytes = atomic_load(&plane->open_bytes);
}

void kvfs_rings_tell(struct kvfs_plane *plane, char *out, uint32_t capacity) { ring_tell(&plane->array, out, capacity); }

int kvfs_device_statistics_get(struct kvfs_plane *plane, uint32_t device, struct kvfs_device_statistics *out) {
    if (device >= plane->config.device_count)
        return -ERANGE;
    struct device *d = &plane->array.devices[device];
    *out = (struct kvfs_device_statistics){.reads = atomic_load(&d->reads),
                                           .read_bytes = atomic_load(&d->read_bytes),
                                           .writes = atomic_load(&d->writes),
                                           .write_bytes = atomic_load(&d->write_bytes),
                                           .errors = atomic_load(&d->errors),
                                           .timeouts = atomic_load(&d->timeouts),
                                           .read_ns = atomic_load(&d->read_ns),
                                           .write_ns = atomic_load(&d->write_ns)};
    for (uint32_t i = 0; i < KVFS_DEVICE_BUCKETS; i++) {
        out->read_buckets[i] = atomic_load_explicit(&d->buckets[0][i], memory_order_relaxed);
        out->write_buckets[i] = atomic_load_explicit(&d->buckets[1][i], memory_order_relaxed);
    }
    return 0;
}

/* ---- what Python takes ---- */

int kvfs_event_fd(struct kvfs_plane *plane) { return plane->events.fd; }

static int handed(struct kvfs_plane *plane, int count) {
    COUNT(plane, handed, (unsigned)count);
    return count;
}

int kvfs_take_calls(struct kvfs_plane *plane, struct kvfs_call *out, uint32_t count) {
    return handed(plane, events_take_calls(&plane->events, out, count));
}

int kvfs_take_events(struct kvfs_plane *plane, struct kvfs_event *out, uint32_t count) {
    return handed(plane, events_take(&plane->events, out, count));
}

int kvfs_take_completions(struct kvfs_plane *plane, struct kvfs_completion *out, uint32_t count) {
    return handed(plane, events_take_completions(&plane->events, out, count));
}

int kvfs_device_message(struct kvfs_plane *plane, uint32_t device, char *out, uint32_t capacity) {
    return nvme_device_message(&plane->array, device, out, capacity);
}

/* ---- devices that come and go ---- */

int kvfs_device_stop(struct kvfs_plane *plane, uint32_t device) {
    if (device >= plane->config.device_count)
        return -ERANGE;
    atomic_store(&plane->array.devices[device].stopped, true);
    return 0;
}

int kvfs_device_use(struct kvfs_plane *plane, uint32_t device) {
    if (device >= plane->config.device_count)
        return -ERANGE;
    device_probe(&plane->array.devices[device]);
    char reason[NVME_REASON + 96];
    int r = nvme_device_use(&plane->array, device, reason, sizeof(reason));
    if (r < 0)
        return fail(r, "%s", reason);
    atomic_store(&plane->array.devices[device].stuck_until_ns, 0);
    atomic_fetch_add(&plane->array.devices[device].uses, 1);
    atomic_fetch_add(&plane->array.devices_changed, 1);
    atomic_store(&plane->array.devices[device].stopped, false);
    return 0;
}

int kvfs_latency_get(struct kvfs_plane *plane, uint32_t operation, struct kvfs_latency *out) {
    if (operation >= 5)
        return -ERANGE;
    out->count = atomic_load(&plane->latency[operation].count);
    out->total_ns = atomic_load(&plane->latency[operation].total_ns);
    for (uint32_t i = 0; i < 40; i++)
        out->buckets[i] = atomic_load(&plane->latency[operation].buckets[i]);
    return 0;
}

int kvfs_fault_set(struct kvfs_plane *plane, uint32_t device, uint32_t fault, uint32_t direction, uint32_t every, uint32_t value) {
    if (device >= plane->config.device_count || fault > KVFS_FAULT_HOLD)
        return -ERANGE;
    fault_set(&plane->array.devices[device], fault, direction, every, value);
    return 0;
}
