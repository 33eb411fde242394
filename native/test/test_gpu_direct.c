/* sources: base block io client pod */
/* gds, with doubles of libcuda, libcufile, libnvrtc and the daemon. It proves under the sanitizers: the kernel's checksums are the CPU's. No byte
 * that the GPU did not prove is a result. A read that hangs leaves its memory orphan_overlaps until it is back, and touches nothing else. The ring
 * does the reads that cuFile cannot do. Every condition of gds that fails is named. With KVFS_TEST_CUFILE=(the real libcufile), it does the reads
 * that need no double, on host memory that the double of libcuda calls a GPU's. Argument: the stripe width. */
#define IDLE_TIMEOUT_MS 1000u /* under a sanitizer the CPU is slow as a GPU */
#include "gpu_harness.h"

#define GPU_LEAF(...) __VA_ARGS__
#define GPU_KERNEL static
#define GPU_FUNCTION static
#define GPU_INDEX thread_index
static uint64_t thread_index;
#include "client/gpu/leaf.h"
#include "../shims/cufile/test/proc_modules.c"
#define XXH_INLINE_ALL
#include <xxhash.h>

static struct {
    void (*hold)(unsigned);
    void (*flip)(unsigned);
    void (*fail_from)(unsigned);
    void (*fail_with)(int);
    void (*short_)(unsigned);
    void (*open_error)(int);
    void (*register_error)(int);
    void (*statistics_error)(int);
    void (*indirect)(int);
    void (*unknown)(int);
    unsigned (*reads)(void);
    unsigned (*held)(void);
    unsigned (*left)(void);
} cufile;
static bool real; /* libcufile */

static void cufile_load(void) {
    const char *path = getenv("KVFS_TEST_CUFILE");
    char fake[512];
    setenv("KVFS_NVRTC_LIBRARY", getenv("KVFS_CUDA_LIBRARY"), 1);
    real = path && *path;
    if (real) {
        setenv("CUFILE_LOGFILE_PATH", "/dev/null", 0);
        setenv("KVFS_CUFILE_LIBRARY", path, 1);
        return;
    }
    snprintf(fake, sizeof(fake), "%s", getenv("KVFS_CUDA_LIBRARY"));
    strcpy(strrchr(fake, '/'), "/libcufile-fake.so");
    setenv("KVFS_CUFILE_LIBRARY", fake, 1);
    void *library = dlopen(fake, RTLD_NOW);
    CHECK_SAY(library, "%s", dlerror());
    const char *names[] = {"hold",     "flip",    "fail_from", "fail_with", "short", "open_error", "register_error", "statistics_error",
                           "indirect", "unknown", "reads",     "held",      "left"};
    static_assert(sizeof(cufile) == sizeof(names), "a name for every function");
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        char name[60];
        snprintf(name, sizeof(name), "fake_cufile_%s", names[i]);
        void *symbol = dlsym(library, name);
        CHECK_SAY(symbol, "%s", name);
        memcpy((uint8_t *)&cufile + i * sizeof(symbol), &symbol, sizeof(symbol));
    }
}

static struct kvfs_gpu *direct_reader(void) {
    struct kvfs_gpu_options options = {
        .size = sizeof(options), .mode = KVFS_GPU_GDS, .slot_count = 8, .slot_size = 256 * KIB, .flags = real ? KVFS_GPU_INDIRECT : 0};
    struct kvfs_gpu *gpu;
    CHECK_SAY(kvfs_gpu_open(client, &options, &gpu) == 0, "%s", kvfs_error());
    CHECK(kvfs_gpu_mode(gpu) == KVFS_GPU_GDS);
    return gpu;
}

static struct kvfs_gpu_direct_statistics direct_of(struct kvfs_gpu *gpu) {
    struct kvfs_gpu_direct_statistics statistics;
    CHECK(kvfs_gpu_direct_statistics_get(gpu, &statistics) == 0);
    return statistics;
}

static void open_refused(const char *text) {
    struct kvfs_gpu_options options = {.size = sizeof(options), .mode = KVFS_GPU_GDS};
    struct kvfs_gpu *gpu;
    CHECK_SAY(kvfs_gpu_open(client, &options, &gpu) == -EOPNOTSUPP && !gpu && says("no gds: ") && says(text), "%s, not: %s", text, kvfs_error());
}

/* ---- the kernel ---- */

static void test_the_kernel_is_the_cpus_checksum(void) {
    enum { PAGES = 70 };
    uint64_t seed = 1, expected[PAGES];
    /* Of the kernel's own type: to the compiler uint64_t is another, which a gpu_u64 * cannot lead to. */
    gpu_u64 *data = malloc(PAGES * PAGE), *lanes = malloc(PAGES * 64), sums[PAGES];
    for (uint32_t round = 0; round < 40; round++) {
        uint32_t pages = round < 8 ? round : 1 + (uint32_t)random_below(&seed, PAGES);
        uint64_t secret = round % 8 == 1 ? 0 : round % 8 == 2 ? UINT64_MAX : random_next(&seed);
        struct gpu_leaf_keys keys;
        uint8_t drawn[XXH3_SECRET_DEFAULT_SIZE];
        for (uint64_t i = 0; i < pages * PAGE / 8; i++)
            data[i] = round % 5 == 3 ? 0 : round % 5 == 4 ? UINT64_MAX : random_next(&seed);
        XXH3_generateSecret_fromSeed(drawn, secret);
        memcpy(keys.words, drawn, 192);
        memcpy(keys.words + 24, drawn + 121, 64);
        memcpy(keys.words + 32, drawn + 11, 64);
        memset(sums, 0x77, sizeof(sums));
        /* More threads than work, as a grid has. */
        for (thread_index = 0; thread_index < pages * 8 + 100; thread_index++)
            kvfs_leaf_lanes(data, pages, keys, lanes);
        for (thread_index = 0; thread_index < pages + 100; thread_index++)
            kvfs_leaf_sums(lanes, pages, keys, round * 0x123456789abcdefull, sums);
        kvfs_leaf_checksums(data, pages * PAGE, secret, expected);
        for (uint32_t i = 0; i < PAGES; i++)
            CHECK_SAY(sums[i] == (i < pages ? expected[i] ^ (round * 0x123456789abcdefull) : 0x7777777777777777ull), "round %u, page %u of %u", round,
                      i, pages);
    }
    free(lanes);
    free(data);
}

/* ---- reads ---- */

static void test_whole_blocks(void) {
    uint32_t numbers[14] = {0, 1, 2, 900, 3, 4, 5, 6, 7, 8, 901, 9, 10, 11};
    struct kvfs_gpu *gpu = direct_reader();
    struct batch batch;
    uint64_t bytes = 0, blocks = 0;
    for (uint32_t i = 0; i < 12; i++) {
        bytes += odd_sizes[i] / PAGE * PAGE;
        blocks += odd_sizes[i] >= PAGE;
    }
    for (uint32_t round = 0; round < 4; round++) {
        if (!real)
            cufile.short_(round == 1 ? 12288 : round == 2 ? 1000 : 0);
        batch_open(&batch, numbers, 14, 5 * MIB + 8);
        CHECK_SAY(get(gpu, &batch, NULL) == 12, "%s", kvfs_error());
        CHECK(batch_check(&batch) == 12);
        for (uint32_t k = 0; k < 14; k++)
            CHECK(batch.results[k] == (numbers[k] >= 900 ? -ENOENT : (int64_t)odd_sizes[numbers[k]]));
        struct kvfs_gpu_direct_statistics statistics = direct_of(gpu);
        CHECK(statistics.blocks == (round + 1) * blocks && statistics.bytes == (round + 1) * bytes);
        CHECK(statistics.fallbacks == 0 && statistics.mismatches == 0 && statistics.overdue == 0 && statistics.reads >= blocks);
        CHECK(real || (statistics.known && statistics.direct_reads && !statistics.indirect_reads));
        batch_close(&batch);
    }
    /* A block of many pieces of proof; and what its buffer's address makes unfit for a kernel, by the ring. */
    batch_open(&batch, (uint32_t[]){70, 70}, 2, 12 * MIB);
    batch.buffers[1].data = (uint8_t *)batch.buffers[1].data + 3;
    uint64_t before = direct_of(gpu).blocks;
    CHECK(get(gpu, &batch, NULL) == 2 && batch_check(&batch) == 2);
    CHECK(direct_of(gpu).blocks == before + 1 && direct_of(gpu).fallbacks == 1);
    batch_close(&batch);
    kvfs_gpu_close(gpu);
}

static void test_order_with_the_callers_stream(void) {
    struct kvfs_gpu *gpu = direct_reader();
    struct batch batch;
    cuda_stream stream;
    CHECK(cuda.cuCtxPushCurrent_v2(primary) == 0 && cuda.cuStreamCreate(&stream, 1) == 0);
    for (int round = 0; round < 3; round++) {
        cuda_stream used = round == 0 ? stream : round == 1 ? (cuda_stream)1 : NULL;
        batch_open(&batch, many, MANY, 200 * KIB + 64);
        CHECK(cuda.fake_cuda_work(used, 60000) == 0); /* work on the stream still writes to the buffers */
        for (uint32_t i = 0; i < MANY; i++)
            CHECK(cuda.cuMemsetD8Async((cuda_pointer)(uintptr_t)batch.buffers[i].data, 0xee, batch.buffers[i].size, used) == 0);
        CHECK_SAY(get(gpu, &batch, used) == MANY, "%s", kvfs_error());
        uint8_t *snapshot = malloc(batch.memory_size);
        CHECK(cuda.cuMemcpyDtoHAsync_v2(snapshot, batch.memory, batch.memory_size, used) == 0 && cuda.cuStreamSynchronize(used) == 0);
        CHECK(batch_check(&batch) == MANY);
        uint8_t *now = malloc(batch.memory_size);
        CHECK(cuda.fake_cuda_peek(now, batch.memory, batch.memory_size) == 0 && memcmp(now, snapshot, batch.memory_size) == 0);
        free(now);
        free(snapshot);
        batch_close(&batch);
    }
    CHECK(direct_of(gpu).blocks == 3 * MANY);
    CHECK(cuda.cuStreamDestroy_v2(stream) == 0 && cuda.cuCtxPopCurrent_v2(&(cuda_context){NULL}) == 0);
    kvfs_gpu_close(gpu);
}

static void test_what_cufile_cannot_read_the_ring_does(void) {
    struct kvfs_gpu *gpu = direct_reader();
    struct batch batch;
    for (uint32_t round = 0; round < 4; round++) {
        batch_open(&batch, many, MANY, 210 * KIB);
        uint64_t fallbacks = direct_of(gpu).fallbacks, mismatches = direct_of(gpu).mismatches;
        cufile.fail_with(round == 0 ? -1 : round == 1 ? -5011 : 0); /* errno; an error of its own; nothing read */
        if (round < 3)
            cufile.fail_from(round == 2 ? 1 : 7);
        else
            cufile.flip(7);
        if (round == 2)
            cufile.fail_with(-5023);
        CHECK_SAY(get(gpu, &batch, NULL) == MANY && batch_check(&batch) == MANY, "round %u: %s", round, kvfs_error());
        CHECK(direct_of(gpu).fallbacks - fallbacks >= MANY - 7);
        CHECK(direct_of(gpu).mismatches - mismatches == (round == 3 ? direct_of(gpu).fallbacks - fallbacks : 0));
        cufile.fail_from(0);
        cufile.flip(0);
        batch_close(&batch);
    }
    kvfs_gpu_close(gpu);
}

/* On the device: cuFile reads it faithfully, the kernel sees it, the ring agrees, the daemon is told. */
static void test_a_flipped_byte_on_a_device_is_a_miss(void) {
    struct kvfs_gpu *gpu = direct_reader();
    struct batch batch;
    struct kvfs_record record;
    uint8_t key[6], byte;
    char name[13];
    for (uint32_t turn = 0; turn < 2; turn++) { /* in a whole page, in the tail */
        key_name(key, name, many[3]);
        CHECK(kvfs_table_find_name(table, 2, name, 12, &record) == 0);
        uint64_t at = (record.page + record.header_pages) * PAGE + (turn ? record.size - 1 : 100000);
        off_t place = (off_t)(KVFS_LABEL_SIZE + record.segment / DEVICES * ZONE + at);
        CHECK(pread(device_fds[record.segment % DEVICES], &byte, 1, place) == 1);
        byte ^= 1;
        CHECK(pwrite(device_fds[record.segment % DEVICES], &byte, 1, place) == 1);
        batch_open(&batch, many, MANY, 210 * KIB);
        CHECK(get(gpu, &batch, NULL) == MANY - 1 && batch.results[3] == -EIO && batch_check(&batch) == MANY - 1);
        byte ^= 1;
        CHECK(pwrite(device_fds[record.segment % DEVICES], &byte, 1, place) == 1);
        CHECK(get(gpu, &batch, NULL) == MANY && batch_check(&batch) == MANY);
        batch_close(&batch);
    }
    CHECK(direct_of(gpu).mismatches == 1);
    kvfs_gpu_close(gpu);
}

/* Nothing is wrong with the bytes, but the segment is another one by now: whoever could say so did. */
static void test_a_segment_of_another_generation_is_a_miss(void) {
    struct kvfs_gpu *gpu = direct_reader();
    struct batch batch;
    batch_open(&batch, many, MANY, 210 * KIB);
    segment_head(1, GENERATION + 1);
    CHECK(get(gpu, &batch, NULL) == MANY / 2);
    for (uint32_t i = 0; i < MANY; i++)
        CHECK(batch.results[i] == (i % 2 ? -ENOENT : (int64_t)(200 * KIB + i)));
    segment_head(1, GENERATION);
    CHECK(get(gpu, &batch, NULL) == MANY && batch_check(&batch) == MANY);
    faults(1, KVFS_FAULT_DELAY, 5 * TIMEOUT_MS / 2); /* and a device that does not say it in time */
    CHECK(get(gpu, &batch, NULL) == MANY / 2 && batch.results[1] == -ETIMEDOUT && batch_check(&batch) == MANY / 2);
    faults(1, KVFS_FAULT_NONE, 0);
    usleep(4 * TIMEOUT_MS * 1000);
    CHECK(get(gpu, &batch, NULL) == MANY && batch_check(&batch) == MANY);
    batch_close(&batch);
    kvfs_gpu_close(gpu);
}

static void test_prestaged_blocks_come_from_memory(void) {
    struct kvfs_gpu *gpu = direct_reader();
    struct batch batch;
    batch_open(&batch, many, MANY, 210 * KIB);
    CHECK(kvfs_prestage(client, &batch.keys) == (int)MANY);
    CHECK_SAY(get(gpu, &batch, NULL) >= 0, "%s", kvfs_error());
    for (uint32_t i = 0; i < MANY; i++)
        CHECK_SAY(batch.results[i] == (int64_t)(200 * KIB + i), "block %u: %lld", i, (long long)batch.results[i]);
    CHECK(batch_check(&batch) == MANY);
    CHECK(statistics_of(gpu).prestaged > 0 && statistics_of(gpu).prestaged + direct_of(gpu).blocks == MANY);
    batch_close(&batch);
    kvfs_gpu_close(gpu);
}

/* ---- reads that hang ---- */

static void until_held(unsigned count) {
    uint64_t until = now_ns() + 10000000000ull;
    while (cufile.held() < count && now_ns() < until)
        usleep(1000);
    CHECK(cufile.held() >= count);
}

static void test_a_read_that_hangs_owns_its_memory(void) {
    struct kvfs_gpu *gpu = direct_reader();
    struct batch batch, other;
    batch_open(&batch, many, MANY, 210 * KIB);
    batch_open(&other, many, MANY, 210 * KIB);
    cufile.hold(21); /* twenty blocks, more or less, are there by then */
    uint64_t began = now_ns(), late = 0;
    int read = get(gpu, &batch, NULL);
    CHECK_SAY(read > 0 && now_ns() - began < 8 * TIMEOUT_MS * 1000000ull, "%d: %s", read, kvfs_error());
    for (uint32_t i = 0; i < MANY; i++) {
        int busy = kvfs_busy(client, batch.buffers[i].data, batch.buffers[i].size);
        CHECK(batch.results[i] == (busy ? -ETIMEDOUT : (int64_t)(200 * KIB + i)));
        late += (uint64_t)busy;
    }
    CHECK_SAY(late > 0 && late <= 8 && read == (int)(MANY - late) && direct_of(gpu).overdue >= late, "%llu late", (unsigned long long)late);
    CHECK(batch_check(&batch) == (uint32_t)read);
    CHECK(!kvfs_busy(client, (void *)(uintptr_t)other.memory, other.memory_size));
    /* The late memory is refused; other memory is filled, through the ring. */
    CHECK(get(gpu, &batch, NULL) == -EBUSY);
    uint64_t blocks = direct_of(gpu).blocks;
    CHECK(get(gpu, &other, NULL) == MANY && batch_check(&other) == MANY && direct_of(gpu).blocks == blocks);
    cufile.hold(0);
    uint64_t until = now_ns() + 10000000000ull;
    while (kvfs_busy(client, (void *)(uintptr_t)batch.memory, batch.memory_size) && now_ns() < until)
        usleep(1000);
    CHECK(direct_of(gpu).overdue == 0);
    CHECK_SAY(get(gpu, &batch, NULL) == MANY && batch_check(&batch) == MANY, "%s", kvfs_error());
    CHECK(direct_of(gpu).blocks == blocks + MANY);
    batch_close(&other);
    batch_close(&batch);
    kvfs_gpu_close(gpu);
}

static void test_close_leaves_a_read_that_hangs_its_memory(void) {
    struct kvfs_gpu *gpu = direct_reader();
    struct batch batch;
    unsigned left = cufile.left();
    batch_open(&batch, many, MANY, 210 * KIB);
    cufile.hold(1);
    CHECK(get(gpu, &batch, NULL) >= 0);
    until_held(1);
    uint64_t began = now_ns();
    kvfs_gpu_close(gpu);
    CHECK(now_ns() - began < 4 * TIMEOUT_MS * 1000000ull && cufile.left() == left);
    CHECK(kvfs_busy(client, (void *)(uintptr_t)batch.memory, batch.memory_size) == 1);
    cufile.hold(0);
    uint64_t until = now_ns() + 10000000000ull;
    while ((kvfs_busy(client, (void *)(uintptr_t)batch.memory, batch.memory_size) || cufile.left() != left - DEVICES) && now_ns() < until)
        usleep(1000);
    CHECK(!kvfs_busy(client, (void *)(uintptr_t)batch.memory, batch.memory_size) && cufile.left() == left - DEVICES);
    batch_close(&batch);
}

/* ---- conditions ---- */

static void test_every_condition_is_named(void) {
    unsigned left = cuda.fake_cuda_left(), handles = cufile.left();
    cufile.unknown(1);
    open_refused("cuFile's statistics do not know GPU 0");
    cufile.unknown(0);
    cufile.indirect(1);
    open_refused("of the reads of 2 devices 0 were direct, 2 through host memory");
    struct kvfs_gpu_options options = {.size = sizeof(options), .mode = KVFS_GPU_GDS, .flags = KVFS_GPU_INDIRECT};
    struct kvfs_gpu *gpu;
    CHECK(kvfs_gpu_open(client, &options, &gpu) == 0 && direct_of(gpu).indirect_reads == 2); /* for diagnosis */
    kvfs_gpu_close(gpu);
    cufile.indirect(0);
    cufile.register_error(5027);
    open_refused("device 0: cuFileHandleRegister: error 5027");
    cufile.register_error(0);
    cufile.flip(2);
    open_refused("device 1: cuFileRead left other bytes in GPU memory than the device has");
    cufile.flip(0);
    cufile.fail_with(-5011);
    cufile.fail_from(1);
    open_refused("device 0: cuFileRead of 65536 bytes into GPU memory failed");
    cufile.fail_from(0);
    uint64_t magic = KVFS_MAGIC_LABEL, none = 0;
    CHECK(pwrite(device_fds[1], &none, 8, 0) == 8);
    open_refused("device 1 has no label to compare");
    CHECK(pwrite(device_fds[1], &magic, 8, 0) == 8);
    CHECK(cuda.fake_cuda_left() == left && cufile.left() == handles);
    cufile.hold(1);
    char late[100];
    snprintf(late, sizeof(late), "device 0: cuFileRead gave no answer in %u ms", TIMEOUT_MS);
    open_refused(late);
    cufile.hold(0);
    const char *ptx;
    CHECK(kvfs_gpu_kernel("/nowhere/libnvrtc.so", 80, &ptx) == -EOPNOTSUPP && !ptx && says("no libnvrtc"));
    cuda.fake_cuda_fail("nvrtcCompileProgram", 1, 6);
    CHECK(kvfs_gpu_kernel(NULL, 80, &ptx) == -EOPNOTSUPP && says("makes no kernel for compute capability 8.0: a double's refusal"));
    CHECK(kvfs_gpu_kernel(NULL, 80, &ptx) == 0 && strstr(ptx, "kvfs_leaf_lanes"));
}

/* Before libcufile has been opened for good: the first of all. */
static void test_conditions_of_the_library(void) {
    char *path = strdup(getenv("KVFS_CUFILE_LIBRARY"));
    setenv("KVFS_CUFILE_LIBRARY", "/nowhere/libcufile.so.0", 1);
    open_refused("no libcufile: /nowhere/libcufile.so.0");
    setenv("KVFS_CUFILE_LIBRARY", getenv("KVFS_CUDA_LIBRARY"), 1);
    open_refused("lacks cuFile");
    setenv("KVFS_CUFILE_LIBRARY", path, 1);
    cufile.open_error(5033);
    open_refused("cuFileDriverOpen: error 5033");
    cufile.open_error(0);
    cufile.statistics_error(5022);
    open_refused("cuFile's statistics: error 5022");
    cufile.statistics_error(0);
    free(path);
}

static void test_a_new_daemon_is_proven_again(void) {
    struct kvfs_gpu *gpu = direct_reader();
    struct batch batch;
    batch_open(&batch, many, MANY, 210 * KIB);
    CHECK(get(gpu, &batch, NULL) == MANY && direct_of(gpu).blocks == MANY);
    shutdown(atomic_load(&daemon_socket), SHUT_RDWR);
    CHECK(get(gpu, &batch, NULL) == MANY && batch_check(&batch) == MANY && direct_of(gpu).blocks == 2 * MANY);
    shutdown(atomic_load(&daemon_socket), SHUT_RDWR);
    cufile.indirect(1); /* not any more: then the ring */
    CHECK(get(gpu, &batch, NULL) == MANY && batch_check(&batch) == MANY && direct_of(gpu).blocks == 2 * MANY);
    CHECK(direct_of(gpu).indirect_reads == DEVICES);
    cufile.indirect(0);
    batch_close(&batch);
    kvfs_gpu_close(gpu);
    CHECK(cufile.left() == 0);
}

static void test_failures_of_cuda_are_errors(void) {
    static const char *const reading[] = {"cuModuleLoadData", "cuModuleGetFunction", "cuMemAlloc_v2", "cuLaunchKernel", "cuMemcpyDtoHAsync_v2"};
    struct batch batch;
    for (size_t i = 0; i < sizeof(reading) / sizeof(reading[0]); i++) {
        struct kvfs_gpu *gpu = direct_reader();
        batch_open(&batch, many, MANY, 210 * KIB);
        char name[40];
        snprintf(name, sizeof(name), "%.*s", (int)strcspn(reading[i], "_"), reading[i]);
        cuda.fake_cuda_fail(reading[i], i < 3 ? 1 : 5, 719);
        CHECK_SAY(get(gpu, &batch, NULL) == -EIO && says(name) && says("719"), "%s: %s", name, kvfs_error());
        CHECK(get(gpu, &batch, NULL) == MANY && batch_check(&batch) == MANY && direct_of(gpu).blocks >= MANY);
        batch_close(&batch);
        kvfs_gpu_close(gpu);
    }
}

/* Memory that it may still use, and modules, stay. */
static void test_a_gpu_that_hangs_while_it_proves(void) {
    struct kvfs_gpu *gpu = direct_reader();
    struct batch batch;
    batch_open(&batch, many, MANY, 210 * KIB);
    cuda.fake_cuda_hold(1);
    CHECK_SAY(get(gpu, &batch, NULL) == -ETIMEDOUT && says_after("have not ended in", STALL_MS), "%s", kvfs_error());
    CHECK(get(gpu, &batch, NULL) == -ETIMEDOUT && says("out of use"));
    cuda.fake_cuda_hold(0);
    kvfs_gpu_close(gpu);
    batch_close(&batch);
}

/* ---- threads ---- */

static void test_a_rewritten_block_is_never_torn(void) {
    struct kvfs_gpu *gpu = direct_reader();
    struct batch batch;
    struct rewriter rewriter = {.inode = ++next_inode, .pause_us = 2000};
    uint64_t size = REWRITTEN_SIZE, misses = 0, seen[2] = {0};
    uint8_t *got = malloc(size), *expected[2] = {malloc(size + 8), malloc(size + 8)};
    pattern(expected[0], size, REWRITTEN);
    pattern(expected[1], size, REWRITTEN + 1);
    batch_open(&batch, (uint32_t[]){REWRITTEN}, 1, 601 * KIB);
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, rewrite_main, &rewriter) == 0);
    uint64_t until = now_ns() + 3000000000ull;
    while (now_ns() < until || direct_of(gpu).blocks == 0) {
        int r = get(gpu, &batch, NULL);
        CHECK_SAY(r >= 0 || r == -EBUSY || r == -ETIMEDOUT, "%s", kvfs_error()); /* a slow machine may miss the deadline */
        if (r == -ETIMEDOUT) {
            misses++;
            continue;
        }
        if (batch.results[0] < 0) {
            CHECK_SAY(r == -EBUSY || batch.results[0] == -ENOENT || batch.results[0] == -EIO || batch.results[0] == -ETIMEDOUT, "%lld",
                      (long long)batch.results[0]);
            misses++;
            continue;
        }
        CHECK(cuda.fake_cuda_peek(got, (cuda_pointer)(uintptr_t)batch.buffers[0].data, size) == 0);
        int which = got[0] != expected[0][0];
        CHECK_SAY(memcmp(got, expected[which], size) == 0, "torn");
        seen[which]++;
        CHECK(now_ns() < until + 20000000000ull);
    }
    atomic_store(&rewriter.stopping, true);
    CHECK(pthread_join(thread, NULL) == 0);
    struct kvfs_gpu_direct_statistics statistics = direct_of(gpu);
    printf("   %llu and %llu reads of the two contents, %llu direct, %llu misses, %llu mismatches\n", (unsigned long long)seen[0],
           (unsigned long long)seen[1], (unsigned long long)statistics.blocks, (unsigned long long)misses, (unsigned long long)statistics.mismatches);
    free(got);
    free(expected[0]);
    free(expected[1]);
    batch_close(&batch);
    kvfs_gpu_close(gpu);
}

static void *read_main(void *argument) {
    struct batch *batch = malloc(sizeof(*batch));
    for (int round = 0; round < 6; round++) {
        batch_open(batch, many, MANY, 210 * KIB);
        CHECK_SAY(get(argument, batch, NULL) == (int)MANY, "%s", kvfs_error());
        CHECK(batch_check(batch) == MANY);
        batch_close(batch);
    }
    free(batch);
    return NULL;
}

/* Four threads, two readers: two threads share each. */
static void test_readers_at_the_same_time(void) {
    struct kvfs_gpu *gpus[2] = {direct_reader(), direct_reader()};
    pthread_t threads[4];
    for (int i = 0; i < 4; i++)
        CHECK(pthread_create(&threads[i], NULL, read_main, gpus[i % 2]) == 0);
    for (int i = 0; i < 4; i++)
        CHECK(pthread_join(threads[i], NULL) == 0);
    for (int i = 0; i < 2; i++) {
        CHECK(direct_of(gpus[i]).blocks == 2 * 6 * MANY);
        kvfs_gpu_close(gpus[i]);
    }
}

int main(int count, char **arguments) {
    stripe_width = count > 1 ? (uint32_t)atoi(arguments[1]) : 1;
    CHECK(stripe_width == 1 || stripe_width == DEVICES);
    cuda_load();
    cufile_load();
    RUN(test_the_kernel_is_the_cpus_checksum);
    pool_open();
    cuda.fake_cuda_reachable(1);
    blocks_add();
    unsigned left = cuda.fake_cuda_left();
    if (!real)
        RUN(test_conditions_of_the_library);
    RUN(test_whole_blocks);
    RUN(test_order_with_the_callers_stream);
    RUN(test_prestaged_blocks_come_from_memory);
    if (stripe_width == 1) {
        RUN(test_a_flipped_byte_on_a_device_is_a_miss);
        RUN(test_a_segment_of_another_generation_is_a_miss);
    }
    RUN(test_a_rewritten_block_is_never_torn);
    RUN(test_readers_at_the_same_time);
    if (!real) {
        RUN(test_what_cufile_cannot_read_the_ring_does);
        RUN(test_a_read_that_hangs_owns_its_memory);
        RUN(test_close_leaves_a_read_that_hangs_its_memory);
        RUN(test_every_condition_is_named);
        RUN(test_a_new_daemon_is_proven_again);
    }
    CHECK_SAY(cuda.fake_cuda_left() == left, "%u handles of CUDA are left", cuda.fake_cuda_left() - left);
    RUN(test_failures_of_cuda_are_errors);
    RUN(test_a_gpu_that_hangs_while_it_proves);
    CHECK_SAY(cuda.fake_cuda_violations() == 0, "%u violations, see above", cuda.fake_cuda_violations());
    pool_close();
    printf("ok against doubles of libcuda and libnvrtc and %s libcufile, stripe width %u; nothing here was run on a GPU\n",
           real ? "the real" : "a double of", stripe_width);
    return 0;
}
