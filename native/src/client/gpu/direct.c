/* gds: the devices' DMA straight into GPU memory, by cuFileRead on threads of our own, and its proof.
 *
 * A read is a block's whole pages, cut into parts: runs on one device. A part belongs to the caller while it is queued, to a thread while it is
 * read. A part that gives no answer in time cannot be cancelled. Then its memory is an orphan (kvfs_busy()) until it is back; read, thread, and all
 * that they need are left to it. A read is believed after two proofs. First the GPU computes the checksums, once the last part has ended. Then the
 * device and the table say that the block still lies there (I10).
 */
#include "base/descriptor.h"
#include "client/client.h"
#include "client/gpu/direct.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#define THREADS 8
#define PART_MAX ((uint64_t)1 << 20)
#define PROOFS 8
#define CANARY_SIZE ((uint64_t)KVFS_LABEL_SIZE)
#define STATISTICS_SIZE ((size_t)64 << 10) /* of libcufile 1.20's: 5 KiB */
#define LEAF_WORDS 40                      /* struct gpu_leaf_keys */

/* ---- cuFile, own declarations ---- */

struct cufile_status {
    int error, cuda_error;
};
struct cufile_description {
    int type; /* 1: a descriptor */
    union {
        int fd;
        void *handle;
    };
    const void *operations;
};
#define CUFILE_FUNCTIONS(X)                                                                             \
    X(struct cufile_status, DriverOpen, (void))                                                         \
    X(struct cufile_status, HandleRegister, (void **handle, struct cufile_description *description))    \
    X(void, HandleDeregister, (void *handle))                                                           \
    X(ssize_t, Read, (void *handle, void *base, size_t size, int64_t file_offset, int64_t base_offset)) \
    X(struct cufile_status, SetStatsLevel, (int level))                                                 \
    X(struct cufile_status, StatsStart, (void))                                                         \
    X(struct cufile_status, GetStatsL3, (void *statistics))
struct cufile {
#define CUFILE_MEMBER(result, function, parameters) result(*function) parameters;
    CUFILE_FUNCTIONS(CUFILE_MEMBER)
#undef CUFILE_MEMBER
};

static int cufile_load(const char *path, const struct cufile **out) {
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    static struct cufile cufile;
    static bool loaded;
    int r = 0;
    pthread_mutex_lock(&lock);
    if (!loaded) {
        FILE *modules = fopen("/proc/modules", "r");
        void *library = modules ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : NULL;
        const char *missing = NULL;
        if (!modules)
            r = client_fail(-EOPNOTSUPP, "no gds: without /proc/modules cuFileDriverOpen never returns");
        else if (!library)
            r = client_fail(-EOPNOTSUPP, "no gds: no libcufile: %s", dlerror());
        if (modules)
            fclose(modules);
#define LOAD(result, function, parameters)                 \
    if (library) {                                         \
        void *symbol = dlsym(library, "cuFile" #function); \
        memcpy(&cufile.function, &symbol, sizeof(symbol)); \
        missing = symbol ? missing : "cuFile" #function;   \
    }
        CUFILE_FUNCTIONS(LOAD)
#undef LOAD
        if (missing)
            r = client_fail(-EOPNOTSUPP, "no gds: %s lacks %s: older than 1.14?", path, missing);
        struct cufile_status status = {0};
        if (r == 0 && (status = cufile.DriverOpen()).error)
            r = client_fail(-EOPNOTSUPP, "no gds: cuFileDriverOpen: error %d (CUDA: %d)", status.error, status.cuda_error);
        if (r == 0 && ((status = cufile.SetStatsLevel(3)).error || (status = cufile.StatsStart()).error))
            r = client_fail(-EOPNOTSUPP, "no gds: cuFile's statistics: error %d: nothing would say whether reads are direct", status.error);
        loaded = r == 0;
    }
    pthread_mutex_unlock(&lock);
    *out = &cufile;
    return r;
}

/* ---- what there is of one GPU ---- */

struct direct_part {
    struct direct_part *next;
    struct direct_read *read;
    void *handle;
    uint32_t device;
    uint64_t file_offset, to, size;
    uint64_t started_ns; /* 0: queued */
    bool over;
    struct orphan orphan; /* late */
};
struct direct_read {
    cuda_context context;
    uint32_t count, left; /* parts; not over */
    int error;            /* of the first part that failed */
    bool late;            /* nobody waits any more: the last part frees it */
    int fd;               /* canary: the CPU reads the same here first, into host; else -1 */
    uint8_t *host;        /* whose read it is owns it, until it is late */
    struct direct_part parts[];
};
struct direct_proof {
    bool used;
    cuda_event event;
    uint64_t since_ns;
    uint64_t nonce;
    uint32_t pages;
    const uint64_t *leaves;
    uint64_t *sums; /* pinned */
    cuda_pointer lanes, device_sums;
};
struct counters_of {
    uint64_t known, direct, indirect;
};
struct direct {
    struct kvfs_client *client;
    const struct gpu_driver *driver;
    const struct cufile *cufile;
    int device;
    bool any_way; /* KVFS_GPU_INDIRECT */
    uint64_t timeout_ns;
    uint8_t uuid[16];
    cuda_context primary;
    struct counters_of before;
    const char *ptx;
    /* One connection: */
    struct connection *connection;
    bool refused;
    int *fds;
    void **handles;
    uint32_t handle_count;
    uint64_t keys[LEAF_WORDS];
    /* One context: */
    cuda_context context;
    cuda_module module;
    cuda_function lanes, sums;
    cuda_pointer memory;
    uint64_t *host_sums; /* pinned, PROOFS * DIRECT_PROOF_PAGES */
    uint64_t nonce;
    struct direct_proof proofs[PROOFS];
    /* Threads, all under the lock: */
    pthread_mutex_t lock;
    pthread_cond_t more, ended;
    struct direct_part *first, *last;
    uint32_t threads, overdue;
    uint64_t reads;
    bool stopping, abandoned;
};

/* Threads are gone, CUDA is done with. */
static void direct_free(struct direct *direct) {
    for (uint32_t i = 0; i < direct->handle_count; i++) {
        direct->cufile->HandleDeregister(direct->handles[i]);
        close(direct->fds[i]);
    }
    free(direct->handles);
    free(direct->fds);
    pthread_mutex_destroy(&direct->lock);
    pthread_cond_destroy(&direct->more);
    pthread_cond_destroy(&direct->ended);
    free(direct);
}

/* ---- threads ---- */

static int part_read(struct direct *direct, const struct direct_part *part) {
    const struct direct_read *read = part->read;
    int error = 0;
    if (read->fd >= 0 && pread(read->fd, read->host, part->size, (off_t)part->file_offset) != (ssize_t)part->size)
        return -EIO;
    if (direct->driver->cuCtxPushCurrent(read->context))
        return -EIO;
    for (uint64_t done = 0; done < part->size && !error;) {
        uint64_t left = part->size - done;
        ssize_t n = direct->cufile->Read(part->handle, (void *)(uintptr_t)(part->to + done), left, (int64_t)(part->file_offset + done), 0);
        error = n <= 0 || (uint64_t)n > left ? -EIO : 0;
        done += error ? 0 : (uint64_t)n;
    }
    direct->driver->cuCtxPopCurrent(&(cuda_context){NULL});
    return error;
}

static void read_free(struct direct_read *read) {
    if (read->fd >= 0)
        close(read->fd);
    free(read);
}

static void *thread_main(void *argument) {
    struct direct *direct = argument;
    pthread_mutex_lock(&direct->lock);
    for (;;) {
        while (!direct->first && !direct->stopping)
            pthread_cond_wait(&direct->more, &direct->lock);
        struct direct_part *part = direct->first;
        if (!part)
            break;
        struct direct_read *read = part->read;
        direct->first = part->next;
        part->started_ns = now_ns();
        pthread_mutex_unlock(&direct->lock);
        int error = part_read(direct, part);
        pthread_mutex_lock(&direct->lock);
        part->over = true;
        direct->reads++;
        read->error = read->error ? read->error : error;
        if (read->late) {
            orphan_remove(&part->orphan);
            direct->overdue--;
        }
        if (--read->left == 0 && read->late) {
            free(read->host);
            read_free(read);
        }
    }
    bool last = --direct->threads == 0 && direct->abandoned;
    pthread_cond_signal(&direct->ended);
    pthread_mutex_unlock(&direct->lock);
    if (last)
        direct_free(direct);
    return NULL;
}

static int threads_start(struct direct *direct) {
    pthread_attr_t attributes;
    int r = pthread_attr_init(&attributes);
    if (r == 0)
        r = pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    pthread_mutex_lock(&direct->lock);
    for (uint32_t i = 0; i < THREADS && r == 0; i++) {
        pthread_t thread;
        r = pthread_create(&thread, &attributes, thread_main, direct);
        direct->threads += r == 0;
    }
    pthread_mutex_unlock(&direct->lock);
    pthread_attr_destroy(&attributes);
    return r ? client_fail(-r, "no threads for gds: %s", strerror(r)) : 0;
}

static void read_queue(struct direct *direct, struct direct_read *read) {
    pthread_mutex_lock(&direct->lock);
    for (uint32_t i = 0; i < read->count; i++) {
        struct direct_part *part = &read->parts[i];
        if (direct->first)
            direct->last->next = part;
        else
            direct->first = part;
        direct->last = part;
    }
    pthread_cond_broadcast(&direct->more);
    pthread_mutex_unlock(&direct->lock);
}

static bool reads_late(struct direct *direct) {
    pthread_mutex_lock(&direct->lock);
    bool late = direct->overdue > 0;
    pthread_mutex_unlock(&direct->lock);
    return late;
}

/* Take back the parts that no thread has begun. The lock is held. */
static void read_unqueue(struct direct *direct, struct direct_read *read) {
    struct direct_part **link = &direct->first;
    direct->last = NULL;
    while (*link) {
        if ((*link)->read == read) {
            *link = (*link)->next;
            read->left--;
            read->error = read->error ? read->error : -EAGAIN;
        } else {
            direct->last = *link;
            link = &(*link)->next;
        }
    }
}

int direct_poll(struct direct *direct, struct direct_read *read) {
    int r = -EINPROGRESS;
    bool late = false;
    pthread_mutex_lock(&direct->lock);
    if (read->left) {
        uint64_t now = now_ns();
        for (uint32_t i = 0; i < read->count; i++)
            late = late || (!read->parts[i].over && read->parts[i].started_ns && now - read->parts[i].started_ns > direct->timeout_ns);
        if (late || direct->overdue == direct->threads)
            read_unqueue(direct, read);
    }
    if (read->left == 0) {
        r = read->error ? -EAGAIN : 0;
    } else if (late) {
        for (uint32_t i = 0; i < read->count; i++) {
            struct direct_part *part = &read->parts[i];
            if (part->over || !part->started_ns)
                continue;
            part->orphan = (struct orphan){.data = (const uint8_t *)(uintptr_t)part->to, .size = part->size};
            orphan_add(&part->orphan);
            direct->overdue++;
        }
        read->late = true;
        r = -ETIMEDOUT;
    }
    pthread_mutex_unlock(&direct->lock);
    if (r == 0 || r == -EAGAIN)
        read_free(read);
    return r;
}

static struct direct_read *read_new(cuda_context context, uint32_t count) {
    struct direct_read *read = calloc(1, sizeof(*read) + count * sizeof(read->parts[0]));
    if (!read)
        return NULL;
    read->context = context;
    read->fd = -1;
    read->count = read->left = count;
    for (uint32_t i = 0; i < count; i++)
        read->parts[i].read = read;
    return read;
}

/* ---- blocks ---- */

/* The parts of the first pages of a block: their number; into out, if it is not NULL. 0: there is a hole. */
static uint32_t parts_cut(const struct direct *direct, const struct desc *desc, uint32_t pages, uint64_t to, struct direct_part *out) {
    const struct kvfs_array *array = &direct->connection->array;
    const uint32_t width = array->geometry.stripe_width;
    const uint64_t unit = width == 1 ? array->geometry.zone_size : array->geometry.stripe_unit;
    uint32_t count = 0, at = 0;
    for (uint32_t i = 0; i < desc->extent_count && at < pages; i++) {
        const struct kvfs_extent *extent = &desc->extents[i];
        if (extent->file_page != at)
            return 0;
        uint64_t offset = extent->page * PAGE, left = min_u64(extent->page_count, pages - at) * PAGE;
        for (uint64_t size; left; left -= size, offset += size, to += size, count++) {
            size = min_u64(min_u64(left, unit - offset % unit), PART_MAX);
            if (!out)
                continue;
            const struct kvfs_member *member = &array->members[(uint64_t)extent->segment * width + offset / unit % width];
            out[count].device = member->device;
            out[count].handle = direct->handles[member->device];
            out[count].file_offset =
                array->devices[member->device].zones_offset + member->zone * array->geometry.zone_size + offset / unit / width * unit + offset % unit;
            out[count].to = to;
            out[count].size = size;
        }
        at += (uint32_t)min_u64(extent->page_count, pages - at);
    }
    return at == pages ? count : 0;
}

struct direct_read *direct_start(struct direct *direct, const struct desc *desc, uint32_t pages, cuda_pointer to) {
    uint32_t count = to % 8 ? 0 : parts_cut(direct, desc, pages, to, NULL);
    struct direct_read *read = count && !reads_late(direct) ? read_new(direct->context, count) : NULL;
    if (!read)
        return NULL;
    parts_cut(direct, desc, pages, to, read->parts);
    read_queue(direct, read);
    return read;
}

/* ---- the proof ---- */

int direct_proof_start(struct direct *direct, cuda_stream stream, cuda_pointer data, const uint64_t *leaves, uint32_t pages,
                       struct direct_proof **out) {
    struct direct_proof *proof = direct->proofs;
    *out = NULL;
    while (proof < direct->proofs + PROOFS && proof->used)
        proof++;
    if (proof == direct->proofs + PROOFS)
        return 0;
    struct {
        uint64_t words[LEAF_WORDS];
    } keys;
    memcpy(&keys, direct->keys, sizeof(keys));
    uint64_t count = pages;
    proof->nonce = direct->nonce = direct->nonce * 0x5851f42d4c957f2dull + 1;
    proof->pages = pages;
    proof->leaves = leaves;
    proof->since_ns = now_ns();
    void *lanes[] = {&data, &count, &keys, &proof->lanes}, *sums[] = {&proof->lanes, &count, &keys, &proof->nonce, &proof->device_sums};
    int r = CUDA(direct, cuLaunchKernel, direct->lanes, (pages * 8 + 127) / 128, 1, 1, 128, 1, 1, 0, stream, lanes, NULL);
    if (r == 0)
        r = CUDA(direct, cuLaunchKernel, direct->sums, (pages + 127) / 128, 1, 1, 128, 1, 1, 0, stream, sums, NULL);
    if (r == 0)
        r = CUDA(direct, cuMemcpyDtoHAsync, proof->sums, proof->device_sums, pages * sizeof(uint64_t), stream);
    if (r == 0)
        r = CUDA(direct, cuEventRecord, proof->event, stream);
    if (r < 0)
        return r;
    proof->used = true;
    *out = proof;
    return 0;
}

int direct_proof_poll(struct direct *direct, struct direct_proof *proof) {
    int error = direct->driver->cuEventQuery(proof->event), r = 0;
    if (error == CUDA_ERROR_NOT_READY) {
        uint64_t limit_ns = direct->timeout_ns * STALL_TIMEOUTS;
        if (now_ns() - proof->since_ns < limit_ns)
            return -EINPROGRESS;
        return client_fail(-ETIMEDOUT, "GPU %d: checksums of %u pages have not ended in %llu ms", direct->device, proof->pages,
                           (unsigned long long)(limit_ns / 1000000));
    }
    if (error)
        return cuda_fail(direct->driver, direct->device, "cuEventQuery", error);
    for (uint32_t i = 0; i < proof->pages && r == 0; i++)
        r = (proof->sums[i] ^ proof->nonce) == proof->leaves[i] ? 0 : -EBADMSG;
    proof->used = false;
    return r;
}

void direct_proofs_drop(struct direct *direct) {
    for (uint32_t i = 0; i < PROOFS; i++)
        direct->proofs[i].used = false;
}

/* ---- afterwards ---- */

struct direct_look_page {
    struct direct_look *look;
    uint32_t segment;
    uint64_t generation;
    uint8_t *page;
};
struct direct_look {
    struct lane *lane;
    uint32_t count, left, held; /* pages; not answered; not reaped */
    int error;
    bool over;
    uint8_t *memory;
    struct direct_look_page pages[];
};

static void look_free(struct direct_look *look) {
    free(look->memory);
    free(look);
}

static void look_done(struct io_group *group, bool reaped) {
    struct direct_look *look = ((struct direct_look_page *)group->owner)->look;
    look->held -= reaped || !group->expired;
    if (reaped) {
        if (look->over && look->held == 0)
            look_free(look);
        return;
    }
    if (group->result && !look->error)
        look->error = group->result == -ETIMEDOUT ? -ETIMEDOUT : -EIO;
    look->left--;
    look->lane->active_count--;
}

struct direct_look *direct_look_start(struct lane *lane, const struct desc *desc) {
    struct direct_look *look = calloc(1, sizeof(*look) + (desc->extent_count + 1) * sizeof(look->pages[0]));
    void *memory = NULL;
    if (!look || posix_memalign(&memory, KVFS_PAGE_SIZE, (desc->extent_count + 1) * PAGE)) {
        free(look);
        return NULL;
    }
    look->lane = lane;
    look->memory = memory;
    for (uint32_t i = 0; i <= desc->extent_count; i++) {
        uint32_t segment = i ? desc->extents[i - 1].segment : desc->segment, k = 0;
        uint64_t generation = i ? desc->extents[i - 1].generation : desc->generation;
        while (k < look->count && (look->pages[k].segment != segment || look->pages[k].generation != generation))
            k++;
        if (k == look->count)
            look->pages[look->count++] = (struct direct_look_page){look, segment, generation, look->memory + k * PAGE};
    }
    for (uint32_t i = 0; i < look->count && !look->error; i++) {
        look->left++; /* counted first: the callback may come before ring_io() returns */
        look->held++;
        lane->active_count++;
        int r = ring_io(&lane->ring, false, look->pages[i].segment, 0, &(struct iovec){look->pages[i].page, PAGE}, 1, NULL, 0, look_done,
                        &look->pages[i]);
        if (r < 0) {
            look->error = r;
            look->left--;
            look->held--;
            lane->active_count--;
        }
    }
    return look;
}

/* True: this page is the header of that segment, in that generation. */
static bool look_right(const struct connection *connection, const struct direct_look_page *page) {
    struct kvfs_segment_header header;
    uint64_t sum;
    memcpy(&header, page->page, sizeof(header));
    sum = header.checksum;
    memset(page->page + offsetof(struct kvfs_segment_header, checksum), 0, sizeof(sum));
    return header.magic == KVFS_MAGIC_SEGMENT && header.generation == page->generation && header.segment == page->segment &&
           memcmp(header.pool_uuid, connection->uuid, sizeof(connection->uuid)) == 0 &&
           kvfs_checksum(page->page, PAGE, connection->array.geometry.secret) == sum;
}

int direct_look_poll(struct direct_look *look, const struct kvfs_record *record) {
    struct connection *connection = look->lane->connection;
    struct kvfs_record now;
    if (look->left)
        return -EINPROGRESS;
    int r = look->error;
    for (uint32_t i = 0; i < look->count && r == 0; i++)
        r = look_right(connection, &look->pages[i]) ? 0 : -ESTALE;
    if (r == 0) { /* without a daemon the table may not know */
        connection_poll(connection);
        bool foreign = record->flags & KVFS_INODE_FOREIGN;
        bool there = (foreign ? foreign_again(connection->pod, &connection->array.geometry, record, &now) == 0
                              : !connection->gone && kvfs_table_find_inode(connection->table, record->inode, &now) == 0) &&
                     now.flags & KVFS_INODE_SEALED;
        r = there && now.size == record->size && now.segment == record->segment && now.page == record->page && now.generation == record->generation
                ? 0
                : -ESTALE;
    }
    look->over = true;
    if (look->held == 0)
        look_free(look);
    return r;
}

/* ---- what cuFile says ---- */

/* Per GPU the level 3 statistics begin with its UUID; behind it are words: read bytes, three of bandwidth and time, reads, then these. */
static struct counters_of cufile_counters(const struct direct *direct) {
    struct counters_of found = {0};
    uint8_t *all = calloc(1, STATISTICS_SIZE);
    if (all && direct->cufile->GetStatsL3(all).error == 0) {
        const uint8_t *at = memmem(all, STATISTICS_SIZE / 2, direct->uuid, sizeof(direct->uuid));
        uint64_t words[9];
        if (at) {
            memcpy(words, at + sizeof(direct->uuid), sizeof(words));
            found = (struct counters_of){1, words[5] + words[6], words[7]};
        }
    }
    free(all);
    return found;
}

void direct_statistics(struct direct *direct, struct kvfs_gpu_direct_statistics *out) {
    struct counters_of now = cufile_counters(direct);
    pthread_mutex_lock(&direct->lock);
    out->reads = direct->reads;
    out->overdue = direct->overdue;
    pthread_mutex_unlock(&direct->lock);
    out->known = now.known;
    out->direct_reads = now.direct - direct->before.direct;
    out->indirect_reads = now.indirect - direct->before.indirect;
}

/* ---- the devices of a connection ---- */

/* Read a device's label by both ways, and compare. */
static int canary(struct direct *direct, uint32_t i, cuda_pointer memory, uint8_t *got) {
    struct direct_read *read = read_new(direct->primary, 1);
    void *host = NULL;
    if (!read || posix_memalign(&host, KVFS_PAGE_SIZE, CANARY_SIZE)) {
        free(read);
        return client_fail(-ENOMEM, "no memory for a canary");
    }
    read->host = host;
    read->fd = fcntl(direct->fds[i], F_DUPFD_CLOEXEC, DESCRIPTOR_MIN);
    read->parts[0] = (struct direct_part){.read = read, .handle = direct->handles[i], .device = i, .to = memory, .size = CANARY_SIZE};
    int r = read->fd < 0 ? client_fail(-errno, "dup: %s", strerror(errno)) : CUDA(direct, cuMemsetD8, memory, 0xa5, CANARY_SIZE);
    if (r == 0)
        r = CUDA(direct, cuStreamSynchronize, NULL);
    if (r < 0) {
        free(host);
        read_free(read);
        return r;
    }
    read_queue(direct, read);
    while ((r = direct_poll(direct, read)) == -EINPROGRESS)
        nanosleep(&(struct timespec){.tv_nsec = 100000}, NULL);
    if (r == -ETIMEDOUT)
        return client_fail(-EOPNOTSUPP, "no gds: device %u: cuFileRead gave no answer in %llu ms", i,
                           (unsigned long long)(direct->timeout_ns / 1000000));
    uint64_t magic = KVFS_MAGIC_LABEL;
    if (r < 0)
        r = client_fail(-EOPNOTSUPP, "no gds: device %u: cuFileRead of %llu bytes into GPU memory failed", i, (unsigned long long)CANARY_SIZE);
    else
        r = CUDA(direct, cuMemcpyDtoH, got, memory, CANARY_SIZE);
    if (r == 0 && memcmp(host, &magic, sizeof(magic)) != 0)
        r = client_fail(-EOPNOTSUPP, "no gds: device %u has no label to compare", i);
    else if (r == 0 && memcmp(host, got, CANARY_SIZE) != 0)
        r = client_fail(-EOPNOTSUPP, "no gds: device %u: cuFileRead left other bytes in GPU memory than the device has", i);
    free(host);
    return r;
}

static int connection_prove(struct direct *direct) {
    struct counters_of before = cufile_counters(direct);
    uint8_t *got = malloc(CANARY_SIZE);
    cuda_pointer memory = 0;
    int r = got ? CUDA(direct, cuMemAlloc, &memory, CANARY_SIZE) : -ENOMEM;
    for (uint32_t i = 0; i < direct->handle_count && r == 0; i++)
        r = canary(direct, i, memory, got);
    if (memory && !reads_late(direct)) /* else it is the device's */
        direct->driver->cuMemFree(memory);
    free(got);
    if (r < 0 || direct->any_way)
        return r;
    struct counters_of after = cufile_counters(direct);
    if (!after.known)
        return client_fail(-EOPNOTSUPP, "no gds: cuFile's statistics do not know GPU %d: nothing says that its reads are direct", direct->device);
    if (after.indirect != before.indirect || after.direct == before.direct)
        return client_fail(-EOPNOTSUPP,
                           "no gds: by cuFile's statistics, of the reads of %u devices %llu were direct, %llu through host "
                           "memory",
                           direct->handle_count, (unsigned long long)(after.direct - before.direct),
                           (unsigned long long)(after.indirect - before.indirect));
    return 0;
}

static int connection_register(struct direct *direct) {
    const struct connection *connection = direct->connection;
    uint32_t count = connection->array.device_count;
    direct->fds = calloc(count, sizeof(*direct->fds));
    direct->handles = calloc(count, sizeof(*direct->handles));
    if (!direct->fds || !direct->handles)
        return client_fail(-ENOMEM, "no memory for %u devices", count);
    for (uint32_t i = 0; i < count; i++) {
        int fd = fcntl(connection->fds[i], F_DUPFD_CLOEXEC, DESCRIPTOR_MIN);
        struct cufile_description description = {.type = 1, .fd = fd};
        if (fd < 0)
            return client_fail(-errno, "device %u: dup: %s", i, strerror(errno));
        struct cufile_status status = direct->cufile->HandleRegister(&direct->handles[i], &description);
        if (status.error) {
            close(fd);
            return client_fail(-EOPNOTSUPP, "no gds: device %u: cuFileHandleRegister: error %d (CUDA: %d)", i, status.error, status.cuda_error);
        }
        direct->fds[direct->handle_count++] = fd;
    }
    return 0;
}

static void connection_forget(struct direct *direct) {
    for (uint32_t i = 0; i < direct->handle_count; i++) {
        direct->cufile->HandleDeregister(direct->handles[i]);
        close(direct->fds[i]);
    }
    direct->handle_count = 0;
    free(direct->handles);
    free(direct->fds);
    direct->handles = NULL;
    direct->fds = NULL;
    connection_put(direct->connection);
    direct->connection = NULL;
}

/* 0, or why not. No read is under way. */
static int connection_enter(struct direct *direct, struct connection *connection) {
    uint8_t drawn[XXH3_SECRET_DEFAULT_SIZE];
    connection_forget(direct);
    atomic_fetch_add(&connection->refs, 1);
    direct->connection = connection;
    XXH3_generateSecret_fromSeed(drawn, connection->array.geometry.secret);
    memcpy(direct->keys, drawn, sizeof(drawn));
    memcpy(direct->keys + 24, drawn + 121, 64);
    memcpy(direct->keys + 32, drawn + 11, 64);
    int r = connection_register(direct);
    r = r == 0 ? connection_prove(direct) : r;
    direct->refused = r < 0;
    return r;
}

int direct_session(struct direct *direct, struct connection *connection) {
    if (reads_late(direct) || connection->gone)
        return -EAGAIN;
    if (direct->connection != connection)
        connection_enter(direct, connection);
    return direct->refused ? -EAGAIN : 0;
}

/* ---- a context ---- */

int direct_enter(struct direct *direct, cuda_context context) {
    const size_t lanes = DIRECT_PROOF_PAGES * 64, sums = DIRECT_PROOF_PAGES * sizeof(uint64_t);
    int r = CUDA(direct, cuModuleLoadData, &direct->module, direct->ptx);
    direct->context = context;
    if (r == 0)
        r = CUDA(direct, cuModuleGetFunction, &direct->lanes, direct->module, "kvfs_leaf_lanes");
    if (r == 0)
        r = CUDA(direct, cuModuleGetFunction, &direct->sums, direct->module, "kvfs_leaf_sums");
    if (r == 0)
        r = CUDA(direct, cuMemAlloc, &direct->memory, PROOFS * (lanes + sums));
    for (uint32_t i = 0; i < PROOFS && r == 0; i++) {
        struct direct_proof *proof = &direct->proofs[i];
        *proof = (struct direct_proof){.sums = direct->host_sums + i * DIRECT_PROOF_PAGES,
                                       .lanes = direct->memory + i * lanes,
                                       .device_sums = direct->memory + PROOFS * lanes + i * sums};
        r = CUDA(direct, cuEventCreate, &proof->event, CUDA_EVENT_DISABLE_TIMING);
    }
    if (r < 0)
        direct_leave(direct);
    return r;
}

void direct_leave(struct direct *direct) {
    const struct gpu_driver *driver = direct->driver;
    for (uint32_t i = 0; i < PROOFS; i++) {
        if (direct->proofs[i].event)
            driver->cuEventDestroy(direct->proofs[i].event);
        direct->proofs[i] = (struct direct_proof){0};
    }
    if (direct->memory)
        driver->cuMemFree(direct->memory);
    if (direct->module)
        driver->cuModuleUnload(direct->module);
    direct->memory = 0;
    direct->module = NULL;
    direct->context = NULL;
}

/* ---- open, close ---- */

int direct_open(struct kvfs_client *client, const struct gpu_driver *driver, int device, int handle, cuda_context primary,
                const struct kvfs_gpu_options *options, struct direct **out) {
    struct direct *direct = calloc(1, sizeof(*direct));
    struct connection *connection = NULL;
    int major = 0, minor = 0;
    *out = NULL;
    if (!direct)
        return client_fail(-ENOMEM, "no memory for a GPU reader");
    direct->client = client;
    direct->driver = driver;
    direct->device = device;
    direct->primary = primary;
    direct->any_way = options->flags & KVFS_GPU_INDIRECT;
    direct->timeout_ns = client->options.timeout_ms * 1000000ull;
    direct->nonce = now_ns();
    pthread_mutex_init(&direct->lock, NULL);
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&direct->more, NULL);
    pthread_cond_init(&direct->ended, &monotonic);
    pthread_condattr_destroy(&monotonic);
    int r = CUDA(direct, cuDeviceGetAttribute, &major, CUDA_DEVICE_CAPABILITY_MAJOR, handle);
    if (r == 0)
        r = CUDA(direct, cuDeviceGetAttribute, &minor, CUDA_DEVICE_CAPABILITY_MINOR, handle);
    if (r == 0)
        r = CUDA(direct, cuDeviceGetUuid, direct->uuid, handle);
    if (r == 0)
        r = cufile_load(library_name(options->cufile, "KVFS_CUFILE_LIBRARY", "libcufile.so.0"), &direct->cufile);
    if (r == 0)
        r = kvfs_gpu_kernel(options->nvrtc, (uint32_t)(major * 10 + minor), &direct->ptx);
    if (r == 0)
        direct->before = cufile_counters(direct);
    uint64_t size = PROOFS * DIRECT_PROOF_PAGES * sizeof(uint64_t);
    void *memory = r == 0 ? mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) : MAP_FAILED;
    if (r == 0 && memory == MAP_FAILED)
        r = client_fail(-ENOMEM, "no memory for checksums");
    if (r == 0) {
        madvise(memory, size, MADV_DONTFORK);
        r = CUDA(direct, cuMemHostRegister, memory, size, CUDA_MEMHOSTREGISTER_PORTABLE);
        if (r == 0)
            direct->host_sums = memory;
        else
            munmap(memory, size);
    }
    if (r == 0)
        r = threads_start(direct);
    if (r == 0 && (r = connection_get(client, &connection)) == 0) {
        r = connection->gone ? client_fail(-EOPNOTSUPP, "no gds: the daemon is gone") : connection_enter(direct, connection);
        connection_put(connection);
    }
    if (r < 0) {
        char why[256]; /* the error of the close is not the cause */
        snprintf(why, sizeof(why), "%s", kvfs_error());
        direct_close(direct, true);
        return client_fail(r, "%s", why);
    }
    *out = direct;
    return 0;
}

void direct_close(struct direct *direct, bool usable) {
    uint64_t size = PROOFS * DIRECT_PROOF_PAGES * sizeof(uint64_t), until_ns = now_ns() + direct->timeout_ns;
    struct timespec until = {.tv_sec = (time_t)(until_ns / 1000000000u), .tv_nsec = (long)(until_ns % 1000000000u)};
    if (direct->host_sums && usable && direct->driver->cuMemHostUnregister(direct->host_sums) == CUDA_SUCCESS)
        munmap(direct->host_sums, size);
    connection_put(direct->connection); /* the descriptors are our own */
    direct->connection = NULL;
    pthread_mutex_lock(&direct->lock);
    direct->stopping = true;
    pthread_cond_broadcast(&direct->more);
    while (direct->threads && pthread_cond_timedwait(&direct->ended, &direct->lock, &until) == 0)
        ;
    direct->abandoned = direct->threads > 0;
    bool mine = !direct->abandoned;
    pthread_mutex_unlock(&direct->lock);
    if (mine)
        direct_free(direct);
}
