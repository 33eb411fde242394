/* Shared by test_gpu.c and test_gpu_direct.c. It holds the doubles of libcuda (doubles/fake_cuda.c) and of the daemon (a thread that hands out table
 * and devices, which are files). It also holds blocks on those devices, and batches of them with the expected results. */
#ifndef KVFS_TEST_GPU_HARNESS_H
#define KVFS_TEST_GPU_HARNESS_H

#include "client/client.h"
#include "client/gpu/driver.h"
#include "kvfs_gpu.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"

#define DEVICES 2u
#define ZONE ((uint64_t)48 << 20)
#define ZONES 3u
#define SEGMENTS (DEVICES * ZONES)
#define GENERATION 7u
#define SECRET 0x1234567890abcdefull
#ifndef IDLE_TIMEOUT_MS
#define IDLE_TIMEOUT_MS 400u
#endif
#define TIMEOUT_MS (IDLE_TIMEOUT_MS * slowness())
#define STALL_MS (5 * TIMEOUT_MS)
#define KIB ((uint64_t)1 << 10)
#define MIB ((uint64_t)1 << 20)

static uint32_t stripe_width = 1; /* segments of one device each: what happens to one device leaves the other's blocks alone */
static char directory[64];
static int device_fds[DEVICES], listener = -1;
static atomic_int daemon_socket = -1;
static struct geometry builder; /* to build headers with */
static struct kvfs_table *table;
static struct kvfs_client *client;
static uint32_t next_page[SEGMENTS];
static uint64_t next_inode = 100, next_version = 100;

/* ---- the double of libcuda ---- */

static struct {
    int (*cuMemAlloc_v2)(cuda_pointer *, size_t);
    int (*cuMemFree_v2)(cuda_pointer);
    int (*cuCtxCreate_v2)(cuda_context *, unsigned, int);
    int (*cuCtxPushCurrent_v2)(cuda_context);
    int (*cuCtxPopCurrent_v2)(cuda_context *);
    int (*cuCtxGetCurrent)(cuda_context *);
    int (*cuDevicePrimaryCtxRetain)(cuda_context *, int);
    int (*cuDevicePrimaryCtxRelease_v2)(int);
    int (*cuStreamCreate)(cuda_stream *, unsigned);
    int (*cuStreamDestroy_v2)(cuda_stream);
    int (*cuStreamSynchronize)(cuda_stream);
    int (*cuMemsetD8Async)(cuda_pointer, unsigned char, size_t, cuda_stream);
    int (*cuMemcpyDtoHAsync_v2)(void *, cuda_pointer, size_t, cuda_stream);
    int (*cuMemHostRegister_v2)(void *, size_t, unsigned);
    int (*cuMemHostUnregister)(void *);
    int (*cuInit)(unsigned);
    void (*fake_cuda_fail)(const char *, unsigned, int);
    void (*fake_cuda_break)(unsigned, int);
    void (*fake_cuda_heal)(void);
    void (*fake_cuda_delay)(unsigned);
    void (*fake_cuda_hold)(int);
    void (*fake_cuda_reachable)(int);
    int (*fake_cuda_work)(cuda_stream, unsigned);
    void (*fake_cuda_capture)(cuda_stream, int);
    cuda_pointer (*fake_cuda_map)(size_t, int);
    int (*fake_cuda_peek)(void *, cuda_pointer, size_t);
    unsigned (*fake_cuda_copies)(void);
    unsigned (*fake_cuda_violations)(void);
    unsigned (*fake_cuda_left)(void);
} cuda;
static cuda_context primary;

static inline void cuda_load(void) {
    char path[512];
    ssize_t n = readlink("/proc/self/exe", path, 400);
    CHECK(n > 0);
    path[n] = 0;
    strcpy(strrchr(path, '/'), "/libcuda-fake.so");
    setenv("KVFS_CUDA_LIBRARY", path, 1);
    void *library = dlopen(path, RTLD_NOW);
    CHECK_SAY(library, "%s", dlerror());
    const char *names[] = {"cuMemAlloc_v2",        "cuMemFree_v2",         "cuCtxCreate_v2",           "cuCtxPushCurrent_v2",
                           "cuCtxPopCurrent_v2",   "cuCtxGetCurrent",      "cuDevicePrimaryCtxRetain", "cuDevicePrimaryCtxRelease_v2",
                           "cuStreamCreate",       "cuStreamDestroy_v2",   "cuStreamSynchronize",      "cuMemsetD8Async",
                           "cuMemcpyDtoHAsync_v2", "cuMemHostRegister_v2", "cuMemHostUnregister",      "cuInit",
                           "fake_cuda_fail",       "fake_cuda_break",      "fake_cuda_heal",           "fake_cuda_delay",
                           "fake_cuda_hold",       "fake_cuda_reachable",  "fake_cuda_work",           "fake_cuda_capture",
                           "fake_cuda_map",        "fake_cuda_peek",       "fake_cuda_copies",         "fake_cuda_violations",
                           "fake_cuda_left"};
    static_assert(sizeof(cuda) == sizeof(names), "a name for every function");
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        void *symbol = dlsym(library, names[i]);
        CHECK_SAY(symbol, "%s", names[i]);
        memcpy((uint8_t *)&cuda + i * sizeof(symbol), &symbol, sizeof(symbol));
    }
    CHECK(cuda.cuInit(0) == 0 && cuda.cuDevicePrimaryCtxRetain(&primary, 0) == 0);
}

static inline cuda_pointer device_memory(uint64_t size) {
    cuda_pointer pointer;
    CHECK(cuda.cuCtxPushCurrent_v2(primary) == 0 && cuda.cuMemAlloc_v2(&pointer, size) == 0);
    CHECK(cuda.cuCtxPopCurrent_v2(&(cuda_context){NULL}) == 0);
    return pointer;
}

static inline void device_free(cuda_pointer pointer) {
    CHECK(cuda.cuCtxPushCurrent_v2(primary) == 0 && cuda.cuMemFree_v2(pointer) == 0);
    CHECK(cuda.cuCtxPopCurrent_v2(&(cuda_context){NULL}) == 0);
}

/* ---- the double of the daemon ---- */

static inline void *daemon_main(void *argument) {
    (void)argument;
    for (;;) {
        int fd = accept(listener, NULL, NULL);
        if (fd < 0)
            return NULL;
        atomic_store(&daemon_socket, fd);
        struct wire_hello hello;
        CHECK(recv(fd, &hello, sizeof(hello), MSG_WAITALL) == sizeof(hello));
        struct {
            struct wire_welcome w;
            uint64_t offsets[DEVICES];
            struct kvfs_member members[SEGMENTS];
        } welcome = {.w = {.version = KVFS_WIRE_VERSION,
                           .mount_epoch = 3,
                           .secret = SECRET,
                           .zone_size = ZONE,
                           .stripe_unit = 128 * KIB,
                           .stripe_width = stripe_width,
                           .segment_count = SEGMENTS / stripe_width,
                           .device_count = DEVICES,
                           .reservation_ms = 30000}};
        for (uint32_t i = 0; i < DEVICES; i++)
            welcome.offsets[i] = KVFS_LABEL_SIZE;
        for (uint32_t i = 0; i < SEGMENTS; i++)
            welcome.members[i] = (struct kvfs_member){.device = i % DEVICES, .zone = i / DEVICES};
        struct wire_frame frame = {.size = sizeof(welcome), .type = WIRE_HELLO};
        CHECK(send(fd, &frame, sizeof(frame), MSG_NOSIGNAL) == sizeof(frame));
        CHECK(send(fd, &welcome, sizeof(welcome), MSG_NOSIGNAL) == sizeof(welcome));
        int fds[1 + DEVICES] = {kvfs_table_fd(table), device_fds[0], device_fds[1]};
        union {
            char space[CMSG_SPACE(sizeof(fds))];
            struct cmsghdr align;
        } control;
        frame = (struct wire_frame){.type = WIRE_DESCRIPTORS};
        struct iovec iov = {&frame, sizeof(frame)};
        struct msghdr message = {.msg_iov = &iov, .msg_iovlen = 1, .msg_control = control.space, .msg_controllen = sizeof(control.space)};
        memset(&control, 0, sizeof(control));
        struct cmsghdr *part = CMSG_FIRSTHDR(&message);
        part->cmsg_level = SOL_SOCKET;
        part->cmsg_type = SCM_RIGHTS;
        part->cmsg_len = CMSG_LEN(sizeof(fds));
        memcpy(CMSG_DATA(part), fds, sizeof(fds));
        CHECK(sendmsg(fd, &message, MSG_NOSIGNAL) == sizeof(frame));
        uint8_t said[4096];
        while (recv(fd, said, sizeof(said), 0) > 0) /* hits, reports */
            ;
        close(fd);
    }
}

/* Write to a segment's own addresses. The second member of a segment of two devices is the second device. */
static inline void segment_write(uint32_t segment, uint64_t offset, const void *data, uint64_t size) {
    const uint64_t unit = stripe_width == 1 ? ZONE : 128 * KIB;
    for (uint64_t done = 0, n; done < size; done += n) {
        uint64_t at = offset + done, member = segment * stripe_width + at / unit % stripe_width;
        n = min_u64(size - done, unit - at % unit);
        off_t place = (off_t)(KVFS_LABEL_SIZE + member / DEVICES * ZONE + at / unit / stripe_width * unit + at % unit);
        CHECK(pwrite(device_fds[member % DEVICES], (const uint8_t *)data + done, n, place) == (ssize_t)n);
    }
}

static inline void segment_head(uint32_t segment, uint64_t generation) {
    uint8_t page[KVFS_PAGE_SIZE] = {0};
    struct kvfs_segment_header header = {.magic = KVFS_MAGIC_SEGMENT,
                                         .version = KVFS_FORMAT_VERSION,
                                         .generation = generation,
                                         .segment = segment,
                                         .stripe_width = stripe_width,
                                         .zone_size = ZONE};
    memcpy(page, &header, sizeof(header));
    header.checksum = kvfs_checksum(page, PAGE, SECRET);
    memcpy(page, &header, sizeof(header));
    segment_write(segment, 0, page, PAGE);
}

static inline void table_directory(uint64_t inode, uint64_t parent, const char *name) {
    struct kvfs_record record = {.inode = inode, .parent = parent, .version = 1, .kind = KVFS_KIND_DIRECTORY, .mode = 0040755, .nlink = 1};
    CHECK(kvfs_table_put(table, &record, name, (uint32_t)strlen(name), 0) == 0);
}

static inline void pool_open(void) {
    char path[sizeof(directory) + 32];
    /* On tmpfs, if there is one: without /run/udev the real libcufile takes no file of ext4. */
    snprintf(directory, sizeof(directory), "%s/kvfs-gpu-XXXXXX", access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp");
    CHECK(mkdtemp(directory));
    builder = (struct geometry){.secret = SECRET,
                                .zone_size = ZONE,
                                .stripe_unit = 128 * KIB,
                                .stripe_width = stripe_width,
                                .segment_count = SEGMENTS / stripe_width,
                                .mount_epoch = 3};
    builder.segment_size = ZONE * stripe_width;
    builder.segment_pages = (uint32_t)(builder.segment_size / PAGE);
    for (uint32_t i = 0; i < SEGMENTS; i++)
        next_page[i] = 1;
    for (uint32_t i = 0; i < DEVICES; i++) {
        snprintf(path, sizeof(path), "%s/device%u", directory, i);
        device_fds[i] = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
        CHECK(device_fds[i] >= 0 && ftruncate(device_fds[i], (off_t)(KVFS_LABEL_SIZE + ZONE * ZONES)) == 0);
        struct kvfs_label label = {.magic = KVFS_MAGIC_LABEL, .version = KVFS_FORMAT_VERSION, .device_index = i};
        CHECK(pwrite(device_fds[i], &label, sizeof(label), 0) == sizeof(label));
    }
    for (uint32_t i = 0; i < SEGMENTS / stripe_width; i++)
        segment_head(i, GENERATION);
    CHECK(kvfs_table_create(4096, SECRET, 3, &table) == 0);
    table_directory(1, 0, "");
    kvfs_table_set_complete(table, 1);
    for (uint32_t i = 0; i < 256; i++) {
        char name[3];
        snprintf(name, sizeof(name), "%02x", i);
        table_directory(2 + i, 1, name);
    }
    next_inode = 1000;
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    snprintf(address.sun_path, sizeof(address.sun_path), "%s/control.sock", directory);
    listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    CHECK(listener >= 0 && bind(listener, (struct sockaddr *)&address, sizeof(address)) == 0 && listen(listener, 8) == 0);
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, daemon_main, NULL) == 0);
    CHECK(pthread_detach(thread) == 0);
    struct kvfs_options options = {.size = sizeof(options), .timeout_ms = TIMEOUT_MS};
    CHECK_SAY(client_open(directory, directory, 1, "", &options, &client) == 0, "%s", kvfs_error());
}

static inline void pool_close(void) {
    char path[sizeof(directory) + 32];
    kvfs_close(client);
    shutdown(listener, SHUT_RDWR);
    for (uint32_t i = 0; i < DEVICES; i++) {
        snprintf(path, sizeof(path), "%s/device%u", directory, i);
        unlink(path);
    }
    snprintf(path, sizeof(path), "%s/control.sock", directory);
    unlink(path);
    rmdir(directory);
}

/* The content of block `seed`. */
static inline void pattern(uint8_t *data, uint64_t size, uint64_t seed) {
    uint64_t state = seed * 0x9e3779b97f4a7c15ull + 1;
    for (uint64_t i = 0; i < size; i += 8) {
        uint64_t word = random_next(&state);
        memcpy(data + i, &word, min_u64(8, size - i));
    }
}

/* A block's header and data on a device, and its record; nothing points there yet. */
static inline struct kvfs_record block_write(uint64_t inode, const char *name, uint32_t segment, uint32_t page, uint64_t size, uint64_t seed) {
    uint8_t record[512] = {0};
    uint32_t name_size = (uint32_t)strlen(name), record_size = (uint32_t)(sizeof(struct kvfs_inode_record) + round_up(name_size, 8));
    uint32_t header_pages = kvfs_header_pages(size, record_size, 0, 0), leaves = (uint32_t)pages_of(size);
    struct kvfs_inode_record r = {.record_size = record_size,
                                  .kind = KVFS_KIND_FILE,
                                  .flags = KVFS_INODE_SEALED,
                                  .name_size = (uint16_t)name_size,
                                  .inode = inode,
                                  .parent = 2,
                                  .version = ++next_version,
                                  .size = size,
                                  .generation = GENERATION,
                                  .segment = segment,
                                  .page = page,
                                  .header_pages = header_pages,
                                  .mode = 0100644,
                                  .nlink = 1};
    memcpy(record, &r, sizeof(r));
    memcpy(record + sizeof(r), name, name_size);
    uint8_t *data = calloc(1, leaves * PAGE + 1);
    uint64_t *sums = calloc(leaves + 1, sizeof(*sums));
    pattern(data, size, seed);
    kvfs_leaf_checksums(data, size, SECRET, sums);
    struct desc *desc = desc_new(header_pages);
    CHECK(header_build(&builder, desc, record, record_size, NULL, 0, NULL, 0, sums, header_pages + leaves) == 0);
    segment_write(segment, page * PAGE, desc->header, header_pages * PAGE);
    segment_write(segment, (page + header_pages) * PAGE, data, leaves * PAGE);
    desc_put(desc);
    free(sums);
    free(data);
    struct kvfs_record out;
    record_from_inode(&r, &out);
    return out;
}

/* A key is one byte, a number and a device. */
static inline void key_name(uint8_t key[6], char name[13], uint32_t number) {
    key[0] = 0; /* all in one directory, of inode 2 */
    memcpy(key + 1, &number, 4);
    key[5] = 'k';
    name[key_hex(key, 6, name)] = 0;
}

static inline void block_add(uint32_t number, uint64_t size, uint32_t device) {
    uint8_t key[6];
    char name[13];
    key_name(key, name, number);
    uint32_t pages = (uint32_t)(pages_of(size) + pages_of(size) / 512 + 4), segment = device;
    while (segment < SEGMENTS / stripe_width && next_page[segment] + pages > builder.segment_pages)
        segment += stripe_width == 1 ? DEVICES : 1;
    CHECK(segment < SEGMENTS / stripe_width);
    struct kvfs_record record = block_write(++next_inode, name, segment, next_page[segment], size, number);
    next_page[segment] += pages;
    CHECK(kvfs_table_put(table, &record, name, (uint32_t)strlen(name), 0) == 0);
}

/* ---- a batch, and what must come of it ---- */

#define GUARD 64u
struct batch {
    struct kvfs_keys keys;
    uint8_t names[512][6];
    uint32_t sizes[512];
    uint32_t numbers[512];
    struct kvfs_buffer buffers[512];
    int64_t results[512];
    cuda_pointer memory;
    uint64_t memory_size;
};

/* Buffers of `room` bytes side by side, GUARD bytes between them, all of it poisoned. */
static inline void batch_open(struct batch *batch, const uint32_t *numbers, uint32_t count, uint64_t room) {
    char name[13];
    memset(batch, 0, sizeof(*batch));
    CHECK(count <= 512);
    batch->keys = (struct kvfs_keys){batch->names, batch->sizes, count, 0};
    batch->memory_size = count * (room + GUARD) + GUARD;
    batch->memory = device_memory(batch->memory_size);
    for (uint32_t i = 0; i < count; i++) {
        key_name(batch->names[i], name, numbers[i]);
        batch->sizes[i] = 6;
        batch->numbers[i] = numbers[i];
        batch->buffers[i] = (struct kvfs_buffer){(void *)(uintptr_t)(batch->memory + GUARD + i * (room + GUARD)), room};
        batch->results[i] = -1;
    }
}
static inline void batch_close(struct batch *batch) { device_free(batch->memory); }

/* Every block that has a result is there, whole, and not a byte beside a buffer has changed (fresh memory is 0xee). */
static inline uint32_t batch_check(struct batch *batch) {
    uint8_t *got = malloc(batch->memory_size), *expected = malloc(batch->memory_size + 8);
    uint32_t blocks = 0;
    CHECK(cuda.fake_cuda_peek(got, batch->memory, batch->memory_size) == 0);
    memset(expected, 0xee, batch->memory_size);
    for (uint32_t i = 0; i < batch->keys.count; i++) {
        uint64_t at = (uint64_t)(uintptr_t)batch->buffers[i].data - batch->memory;
        if (batch->results[i] >= 0) {
            pattern(expected + at, (uint64_t)batch->results[i], batch->numbers[i]);
            blocks++;
        } else { /* undefined */
            memcpy(expected + at, got + at, batch->buffers[i].size);
        }
    }
    for (uint64_t at = 0; at < batch->memory_size; at++)
        CHECK_SAY(got[at] == expected[at], "byte %llu of %llu: 0x%02x, expected 0x%02x", (unsigned long long)at,
                  (unsigned long long)batch->memory_size, got[at], expected[at]);
    free(got);
    free(expected);
    return blocks;
}

static inline struct kvfs_gpu *reader_open(uint32_t slot_count, uint64_t slot_size) {
    struct kvfs_gpu_options options = {.size = sizeof(options), .slot_count = slot_count, .slot_size = slot_size};
    struct kvfs_gpu *gpu;
    CHECK_SAY(kvfs_gpu_open(client, &options, &gpu) == 0, "%s", kvfs_error());
    return gpu;
}

static inline struct kvfs_gpu_statistics statistics_of(struct kvfs_gpu *gpu) {
    struct kvfs_gpu_statistics statistics;
    CHECK(kvfs_gpu_statistics_get(gpu, &statistics) == 0);
    return statistics;
}

static inline int get(struct kvfs_gpu *gpu, struct batch *batch, cuda_stream stream) {
    return kvfs_gpu_get(gpu, &batch->keys, batch->buffers, (uint64_t)(uintptr_t)stream, batch->results);
}

static inline void faults(uint32_t device, uint32_t fault, uint32_t value) {
    fault_set(&client->connection->array.devices[device], fault, 1, 1, value);
}

static inline bool says(const char *text) { return strstr(kvfs_error(), text) != NULL; }
static inline bool says_after(const char *text, uint32_t ms) {
    char all[200];
    snprintf(all, sizeof(all), "%s %u ms", text, ms);
    return says(all);
}

/* ---- the blocks: 0..11 of odd sizes, 20..59 of 200 KiB, alternately on the two devices; 70: large ---- */

static const uint64_t odd_sizes[12] = {0, 1, 4095, 4096, 4097, 64 * KIB, 64 * KIB + 5, MIB - 1, MIB, MIB + 1, 5 * MIB / 2 + 3, 5 * MIB};
#define MANY 40u
static uint32_t many[MANY];

static inline void blocks_add(void) {
    for (uint32_t i = 0; i < 12; i++)
        block_add(i, odd_sizes[i], i % DEVICES);
    for (uint32_t i = 0; i < MANY; i++)
        block_add(many[i] = 20 + i, 200 * KIB + i, i % DEVICES);
    block_add(70, 12 * MIB, 0);
}

/* Rewrites one block until told to stop. It has one name, one inode, and contents 80 and 81 in turn. Each lies at the next of four places, so that
 * pieces of both may meet in one read. */
#define REWRITTEN 80u
#define REWRITTEN_SIZE (600 * KIB + 77)
struct rewriter {
    uint64_t inode;
    uint32_t pause_us;
    atomic_bool stopping;
};
static void *rewrite_main(void *argument) {
    struct rewriter *rewriter = argument;
    uint8_t key[6];
    char name[13];
    key_name(key, name, REWRITTEN);
    for (uint32_t turn = 0; !atomic_load(&rewriter->stopping); turn++) {
        uint32_t segment = (4 + turn % 2) / stripe_width, page = (uint32_t)(ZONE / PAGE - 1000 + (turn / 2 % 2) * 400);
        struct kvfs_record record = block_write(rewriter->inode, name, segment, page, REWRITTEN_SIZE, REWRITTEN + turn % 3 % 2);
        CHECK(kvfs_table_put(table, &record, name, (uint32_t)strlen(name), 0) == 0);
        usleep(rewriter->pause_us);
    }
    return NULL;
}

#endif
