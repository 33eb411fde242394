/* sources: base block io client pod */
/* The way into GPU memory, with two doubles: of libcuda (doubles/fake_cuda.c) and of the daemon (a thread that hands out table and devices).
 * Devices are files. It proves under the sanitizers: the bytes are those of the blocks, and nothing beside them is touched. Copies are ordered with
 * the caller's stream both ways. A slot is used again only after its copy. Every failure of CUDA is an error, every failure of a device a miss. A
 * block that is replaced meanwhile is never torn. It cannot prove anything about a real GPU. */
#include "gpu_harness.h"

static void test_whole_blocks(void) {
    uint32_t numbers[14] = {0, 1, 2, 900, 3, 4, 5, 6, 7, 8, 901, 9, 10, 11};
    const struct {
        uint32_t slot_count;
        uint64_t slot_size;
    } rings[] = {{1, 64 * KIB}, {4, 64 * KIB}, {16, 64 * KIB}, {4, MIB}, {16, MIB}, {3, 4 * MIB}};
    struct batch batch;
    for (size_t i = 0; i < sizeof(rings) / sizeof(rings[0]); i++) {
        struct kvfs_gpu *gpu = reader_open(rings[i].slot_count, rings[i].slot_size);
        CHECK(kvfs_gpu_mode(gpu) == KVFS_GPU_STAGED);
        batch_open(&batch, numbers, 14, 5 * MIB + 7);
        CHECK_SAY(get(gpu, &batch, NULL) == 12, "%s", kvfs_error());
        CHECK(batch_check(&batch) == 12);
        for (uint32_t k = 0; k < 14; k++)
            CHECK(batch.results[k] == (numbers[k] >= 900 ? -ENOENT : (int64_t)odd_sizes[numbers[k]]));
        struct kvfs_gpu_statistics statistics = statistics_of(gpu);
        CHECK(statistics.blocks == 12 && statistics.slots_stuck == 0 && statistics.restarts == 0);
        CHECK(statistics.copies <= statistics.pieces);
        batch_close(&batch);
        kvfs_gpu_close(gpu);
    }
}

/* The pieces of a block, which lie side by side in the ring, go in fewer copies. */
static void test_neighbours_are_copied_together(void) {
    struct kvfs_gpu *gpu = reader_open(16, 64 * KIB);
    struct batch batch;
    batch_open(&batch, (uint32_t[]){70}, 1, 12 * MIB);
    uint64_t pieces = 12 * MIB / (64 * KIB);
    cuda.fake_cuda_delay(300);
    CHECK(get(gpu, &batch, NULL) == 1 && batch_check(&batch) == 1);
    cuda.fake_cuda_delay(0);
    struct kvfs_gpu_statistics statistics = statistics_of(gpu);
    CHECK(statistics.pieces == pieces);
    CHECK_SAY(statistics.copies < pieces, "%llu copies", (unsigned long long)statistics.copies);
    batch_close(&batch);
    kvfs_gpu_close(gpu);
}

/* Blocks that end inside their slot, in buffers that touch each other: neighbours they are, but not to be copied together. */
static void test_buffers_side_by_side(void) {
    struct kvfs_gpu *gpu = reader_open(4, 256 * KIB);
    struct batch batch;
    batch_open(&batch, many, 16, 256 * KIB);
    for (uint32_t i = 0; i < 16; i++)
        batch.buffers[i].data = (void *)(uintptr_t)(batch.memory + i * 256 * KIB);
    CHECK(get(gpu, &batch, NULL) == 16 && batch_check(&batch) == 16);
    batch_close(&batch);
    kvfs_gpu_close(gpu);
}

static void test_order_with_the_callers_stream(void) {
    struct kvfs_gpu *gpu = reader_open(MANY, 256 * KIB);
    struct batch batch;
    cuda_stream stream;
    uint8_t *snapshot;
    CHECK(cuda.cuCtxPushCurrent_v2(primary) == 0 && cuda.cuStreamCreate(&stream, 1) == 0);
    for (int round = 0; round < 3; round++) {
        /* round 0: a stream; 1: the legacy default stream; 2: none, so the call waits. */
        cuda_stream used = round == 0 ? stream : round == 1 ? (cuda_stream)1 : NULL;
        batch_open(&batch, many, MANY, 200 * KIB + MANY);
        snapshot = malloc(batch.memory_size);
        /* Before: work on the stream that still writes the buffers. It must not come after the copies. */
        CHECK(cuda.fake_cuda_work(used, 60000) == 0);
        for (uint32_t i = 0; i < MANY; i++)
            CHECK(cuda.cuMemsetD8Async((cuda_pointer)(uintptr_t)batch.buffers[i].data, 0x55, batch.buffers[i].size, used) == 0);
        cuda.fake_cuda_delay(2000);
        cuda.fake_cuda_hold(round < 2); /* then the call returns before its first copy has begun */
        unsigned copies = cuda.fake_cuda_copies();
        CHECK_SAY(get(gpu, &batch, used) == MANY, "%s", kvfs_error());
        CHECK((cuda.fake_cuda_copies() == copies) == (round < 2));
        /* After: work that reads the buffers. It must not come before the copies. */
        if (round < 2) {
            CHECK(cuda.cuMemcpyDtoHAsync_v2(snapshot, batch.memory, batch.memory_size, used) == 0);
            cuda.fake_cuda_hold(0);
            CHECK(cuda.cuStreamSynchronize(used) == 0);
        } else {
            CHECK(cuda.fake_cuda_peek(snapshot, batch.memory, batch.memory_size) == 0);
        }
        cuda.fake_cuda_delay(0);
        for (uint32_t i = 0; i < MANY; i++) {
            uint64_t size = 200 * KIB + i, at = (uint64_t)(uintptr_t)batch.buffers[i].data - batch.memory;
            uint8_t *expected = malloc(size + 8);
            CHECK(batch.results[i] == (int64_t)size);
            pattern(expected, size, many[i]);
            CHECK_SAY(memcmp(snapshot + at, expected, size) == 0, "round %d, block %u", round, i);
            free(expected);
        }
        free(snapshot);
        batch_close(&batch);
    }
    CHECK(cuda.cuStreamDestroy_v2(stream) == 0 && cuda.cuCtxPopCurrent_v2(&(cuda_context){NULL}) == 0);
    kvfs_gpu_close(gpu);
}

/* Few slots and slow copies: a slot that were used again too early would show as a changed source, and as wrong bytes. */
static void test_slots_are_used_again_after_their_copy(void) {
    struct kvfs_gpu *gpu = reader_open(3, 64 * KIB);
    struct batch batch;
    cuda_stream stream;
    CHECK(cuda.cuCtxPushCurrent_v2(primary) == 0 && cuda.cuStreamCreate(&stream, 1) == 0);
    cuda.fake_cuda_delay(1000);
    for (int round = 0; round < 2; round++) {
        batch_open(&batch, many, MANY, 200 * KIB + MANY);
        CHECK(get(gpu, &batch, round ? stream : NULL) == (int)MANY);
        if (round)
            CHECK(cuda.cuStreamSynchronize(stream) == 0);
        CHECK(batch_check(&batch) == MANY);
        batch_close(&batch);
    }
    cuda.fake_cuda_delay(0);
    CHECK(statistics_of(gpu).slot_waits > 0);
    CHECK(cuda.cuStreamDestroy_v2(stream) == 0 && cuda.cuCtxPopCurrent_v2(&(cuda_context){NULL}) == 0);
    kvfs_gpu_close(gpu);
}

static void test_contexts(void) {
    struct kvfs_gpu *gpu = reader_open(4, MIB);
    struct batch batch;
    cuda_context current, second;
    batch_open(&batch, many, 4, 210 * KIB);
    CHECK(kvfs_gpu_device_of(batch.buffers[1].data) == 0);
    CHECK(kvfs_gpu_device_of(&batch) == -EINVAL && says("is no GPU memory"));
    CHECK(cuda.cuCtxGetCurrent(&current) == 0 && !current);
    CHECK(get(gpu, &batch, NULL) == 4 && batch_check(&batch) == 4); /* from a thread that has no context */
    CHECK(cuda.cuCtxGetCurrent(&current) == 0 && !current);
    /* Memory of another context of the same GPU; its context stays what it was. */
    CHECK(cuda.cuCtxCreate_v2(&second, 0, 0) == 0);
    cuda_pointer other;
    uint8_t *got = malloc(210 * KIB), *expected = malloc(210 * KIB);
    CHECK(cuda.cuMemAlloc_v2(&other, 210 * KIB) == 0);
    struct kvfs_buffer first = batch.buffers[0];
    for (int round = 0; round < 2; round++) {
        batch.buffers[0] = (struct kvfs_buffer){(void *)(uintptr_t)other, 210 * KIB};
        batch.keys.count = 1;
        CHECK_SAY(get(gpu, &batch, NULL) == 1, "%s", kvfs_error());
        CHECK(cuda.cuCtxGetCurrent(&current) == 0 && current == second);
        CHECK(cuda.fake_cuda_peek(got, other, 200 * KIB) == 0);
        pattern(expected, 200 * KIB, many[0]);
        CHECK(memcmp(got, expected, 200 * KIB) == 0);
        batch.keys.count = 4; /* of both contexts: no */
        CHECK(get(gpu, &batch, NULL) == -EINVAL && says("buffer 1 of 4") && says("context"));
        batch.buffers[0] = first; /* and back again */
        CHECK(get(gpu, &batch, NULL) == 4 && batch_check(&batch) == 4);
    }
    CHECK(cuda.cuMemFree_v2(other) == 0 && cuda.cuCtxPopCurrent_v2(&current) == 0 && current == second);
    free(got);
    free(expected);
    batch_close(&batch);
    kvfs_gpu_close(gpu);
}

static void test_bad_input(void) {
    struct kvfs_gpu *gpu = NULL;
    struct kvfs_gpu_options options = {.size = sizeof(options), .mode = KVFS_GPU_GDS + 1};
    CHECK(kvfs_gpu_open(client, &options, &gpu) == -EINVAL && !gpu && says("mode 3"));
    options = (struct kvfs_gpu_options){.size = sizeof(options), .device = 7};
    CHECK(kvfs_gpu_open(client, &options, &gpu) == -ENODEV && says("no GPU 7: CUDA sees 2"));
    options = (struct kvfs_gpu_options){.size = sizeof(options), .slot_size = 4096};
    CHECK(kvfs_gpu_open(client, &options, &gpu) == -EINVAL && says("4096"));
    gpu = reader_open(4, MIB);
    struct batch batch;
    batch_open(&batch, many, 3, 210 * KIB);
    const struct kvfs_buffer good = batch.buffers[1];
    static uint8_t host[4096];
    uint8_t *pinned = aligned_alloc(PAGE, PAGE);
    CHECK(cuda.cuCtxPushCurrent_v2(primary) == 0 && cuda.cuMemHostRegister_v2(pinned, PAGE, 1) == 0);
    const struct {
        void *data;
        uint64_t size;
        const char *text;
    } wrong[] = {
        {NULL, 100, "buffer 1: 100 bytes at 0x0"},
        {host, sizeof(host), "buffer 1 of 3: 0x"},
        {host, sizeof(host), "is no memory that CUDA knows"},
        {pinned, PAGE, "is host memory"},
        {batch.buffers[2].data, 210 * KIB + 2 * GUARD, "64 past the end of its allocation"},
        {batch.buffers[0].data, 210 * KIB, "overlap"},
    };
    for (size_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++) {
        batch.buffers[1] = (struct kvfs_buffer){wrong[i].data, wrong[i].size};
        if (i == 4)
            batch.buffers[2] = good;
        CHECK_SAY(get(gpu, &batch, NULL) == -EINVAL && says(wrong[i].text), "%zu: %s", i, kvfs_error());
        CHECK(batch.results[0] == -EINVAL && batch.results[2] == -EINVAL);
        if (i == 4)
            batch.buffers[2] = (struct kvfs_buffer){wrong[4].data, good.size};
    }
    /* Memory of another GPU. */
    cuda_context second;
    cuda_pointer other;
    CHECK(cuda.cuDevicePrimaryCtxRetain(&second, 1) == 0 && cuda.cuCtxPushCurrent_v2(second) == 0 && cuda.cuMemAlloc_v2(&other, MIB) == 0);
    batch.buffers[1] = (struct kvfs_buffer){(void *)(uintptr_t)other, MIB};
    CHECK(get(gpu, &batch, NULL) == -EINVAL && says("buffer 1 of 3") && says("is on GPU 1; this reader is GPU 0's"));
    CHECK(cuda.cuMemFree_v2(other) == 0 && cuda.cuCtxPopCurrent_v2(&second) == 0 && cuda.cuDevicePrimaryCtxRelease_v2(1) == 0);
    CHECK(cuda.cuMemHostUnregister(pinned) == 0 && cuda.cuCtxPopCurrent_v2(&second) == 0);
    free(pinned);
    /* Mapped memory, of no context, over a border between two of its allocations; and past its end. */
    cuda_pointer mapped = cuda.fake_cuda_map(4 * MIB, 0);
    batch.buffers[1] = (struct kvfs_buffer){(void *)(uintptr_t)(mapped + 2 * MIB - 4096), 210 * KIB};
    CHECK_SAY(get(gpu, &batch, NULL) == 3, "%s", kvfs_error());
    uint8_t *got = malloc(200 * KIB + 1), *expected = malloc(200 * KIB + 8);
    CHECK(cuda.fake_cuda_peek(got, mapped + 2 * MIB - 4096, 200 * KIB + 1) == 0);
    pattern(expected, 200 * KIB + 1, many[1]);
    CHECK(memcmp(got, expected, 200 * KIB + 1) == 0);
    free(got);
    free(expected);
    batch.buffers[1] = (struct kvfs_buffer){(void *)(uintptr_t)(mapped + 4 * MIB - 4096), 210 * KIB};
    CHECK(get(gpu, &batch, NULL) == -EINVAL && says("buffer 1 of 3"));
    device_free(mapped);
    /* Too small: that block only. */
    batch.buffers[1] = (struct kvfs_buffer){good.data, 200 * KIB};
    CHECK(get(gpu, &batch, NULL) == 2 && batch.results[1] == -ERANGE);
    batch.buffers[1] = (struct kvfs_buffer){NULL, 0};
    CHECK(get(gpu, &batch, NULL) == 2 && batch.results[1] == -ERANGE);
    batch.buffers[1] = good;
    CHECK(get(gpu, &batch, NULL) == 3 && batch_check(&batch) == 3);
    /* A stream of another context, one that is captured, none at all; a key that is too long; an empty batch. */
    cuda_stream stream;
    CHECK(cuda.cuCtxCreate_v2(&second, 0, 0) == 0 && cuda.cuStreamCreate(&stream, 1) == 0);
    CHECK(get(gpu, &batch, stream) == -EIO && says("cuEventRecord: CUDA_ERROR_INVALID_HANDLE"));
    CHECK(cuda.cuStreamDestroy_v2(stream) == 0 && cuda.cuCtxPopCurrent_v2(&second) == 0);
    CHECK(get(gpu, &batch, stream) == -EIO && says("cuStreamIsCapturing: CUDA_ERROR_INVALID_HANDLE"));
    CHECK(cuda.cuCtxPushCurrent_v2(primary) == 0 && cuda.cuStreamCreate(&stream, 1) == 0);
    cuda.fake_cuda_capture(stream, 1);
    CHECK(get(gpu, &batch, stream) == -EINVAL && says("is being captured"));
    CHECK(cuda.cuStreamDestroy_v2(stream) == 0 && cuda.cuCtxPopCurrent_v2(&second) == 0);
    batch.sizes[1] = 300;
    CHECK(get(gpu, &batch, NULL) == -EINVAL && says("300"));
    batch.keys.count = 0;
    CHECK(get(gpu, &batch, NULL) == 0);
    batch_close(&batch);
    kvfs_gpu_close(gpu);
}

static void test_every_failure_of_the_driver_is_an_error(void) {
    static const char *const opening[] = {"cuDeviceGetCount", "cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuCtxPushCurrent_v2",
                                          "cuMemHostRegister_v2"};
    static const char *const first_call[] = {"cuStreamCreate", "cuEventCreate"};
    static const char *const reading[] = {"cuCtxPushCurrent_v2", "cuPointerGetAttributes", "cuEventRecord", "cuStreamWaitEvent",
                                          "cuMemcpyHtoDAsync_v2"};
    unsigned left = cuda.fake_cuda_left();
    struct kvfs_gpu *gpu;
    struct batch batch;
    for (size_t i = 0; i < sizeof(opening) / sizeof(opening[0]); i++) {
        cuda.fake_cuda_fail(opening[i], 1, 719);
        CHECK(kvfs_gpu_open(client, NULL, &gpu) == -EIO && !gpu && says("CUDA_ERROR_LAUNCH_FAILED (719)"));
        CHECK_SAY(cuda.fake_cuda_left() == left, "%s", opening[i]);
    }
    for (size_t i = 0; i < sizeof(first_call) / sizeof(first_call[0]); i++) {
        gpu = reader_open(4, 64 * KIB);
        batch_open(&batch, many, 8, 210 * KIB);
        cuda.fake_cuda_fail(first_call[i], i + 1, 719);
        CHECK(get(gpu, &batch, NULL) == -EIO && says(first_call[i]));
        CHECK(get(gpu, &batch, NULL) == 8 && batch_check(&batch) == 8);
        batch_close(&batch);
        kvfs_gpu_close(gpu);
    }
    gpu = reader_open(4, 64 * KIB);
    cuda_stream stream;
    CHECK(cuda.cuCtxPushCurrent_v2(primary) == 0 && cuda.cuStreamCreate(&stream, 1) == 0);
    for (size_t i = 0; i < sizeof(reading) / sizeof(reading[0]); i++)
        for (unsigned nth = 1; nth <= 3; nth++) {
            batch_open(&batch, many, 8, 210 * KIB);
            char name[40];
            snprintf(name, sizeof(name), "%.*s", (int)strcspn(reading[i], "_"), reading[i]);
            cuda.fake_cuda_fail(reading[i], nth, 719);
            int r = get(gpu, &batch, nth == 2 ? stream : NULL);
            cuda.fake_cuda_fail(reading[i], 0, 0);
            if (r == 8) { /* there were fewer such calls */
                CHECK(nth >= 2);
            } else {
                CHECK_SAY(r == -EIO && says("GPU 0: ") && says(name) && says("719"), "%s: %s", name, kvfs_error());
                for (uint32_t k = 0; k < 8; k++)
                    CHECK(batch.results[k] == -EIO);
            }
            CHECK(get(gpu, &batch, stream) == 8 && cuda.cuStreamSynchronize(stream) == 0); /* and it goes on */
            CHECK(batch_check(&batch) == 8);
            batch_close(&batch);
        }
    /* The query for the end of copies fails: then no slot may be used again. */
    batch_open(&batch, many, 8, 210 * KIB);
    cuda.fake_cuda_fail("cuEventQuery", 2, 719);
    cuda.fake_cuda_fail("cuStreamQuery", 1, 719);
    CHECK(get(gpu, &batch, NULL) == -EIO && says("719"));
    CHECK(get(gpu, &batch, NULL) == -EIO && says("GPU 0 is out of use since: "));
    CHECK(cuda.cuStreamSynchronize(stream) == 0 && cuda.cuStreamDestroy_v2(stream) == 0);
    CHECK(cuda.cuCtxPopCurrent_v2(&(cuda_context){NULL}) == 0);
    kvfs_gpu_close(gpu); /* its memory, stream and events stay */
    batch_close(&batch);
    cuda.fake_cuda_fail("cuEventQuery", 0, 0);
    cuda.fake_cuda_fail("cuStreamQuery", 0, 0);
}

static void test_a_gpu_that_breaks_or_hangs(void) {
    struct batch batch;
    struct kvfs_gpu *gpu = reader_open(4, 64 * KIB);
    batch_open(&batch, many, MANY, 210 * KIB);
    cuda.fake_cuda_break(5, 700);
    CHECK(get(gpu, &batch, NULL) == -EIO && says("CUDA_ERROR_ILLEGAL_ADDRESS"));
    for (uint32_t i = 0; i < MANY; i++)
        CHECK(batch.results[i] == -EIO);
    CHECK(get(gpu, &batch, NULL) == -EIO && says("out of use"));
    cuda.fake_cuda_heal();
    kvfs_gpu_close(gpu);

    gpu = reader_open(4, 64 * KIB);
    cuda.fake_cuda_hold(1);
    uint64_t began = now_ns();
    CHECK_SAY(get(gpu, &batch, NULL) == -ETIMEDOUT && says_after("has not ended in", STALL_MS), "%s", kvfs_error());
    CHECK(now_ns() - began < 10ull * STALL_MS * 1000000);
    CHECK(get(gpu, &batch, NULL) == -ETIMEDOUT && says("out of use"));
    cuda.fake_cuda_hold(0);
    kvfs_gpu_close(gpu);
    batch_close(&batch);
}

/* A caller's stream may be busy for longer than any limit of ours. */
static void test_the_callers_work_is_waited_for(void) {
    struct kvfs_gpu *gpu = reader_open(4, 64 * KIB);
    struct batch batch;
    cuda_stream stream;
    CHECK(cuda.cuCtxPushCurrent_v2(primary) == 0 && cuda.cuStreamCreate(&stream, 1) == 0);
    batch_open(&batch, many, MANY, 210 * KIB);
    CHECK(cuda.fake_cuda_work(stream, (STALL_MS + 500) * 1000) == 0);
    CHECK_SAY(get(gpu, &batch, stream) == (int)MANY, "%s", kvfs_error());
    CHECK(cuda.cuStreamSynchronize(stream) == 0 && batch_check(&batch) == MANY);
    CHECK(cuda.cuStreamDestroy_v2(stream) == 0 && cuda.cuCtxPopCurrent_v2(&(cuda_context){NULL}) == 0);
    batch_close(&batch);
    kvfs_gpu_close(gpu);
}

static void test_a_stuck_device_is_a_miss(void) {
    struct kvfs_gpu *gpu = reader_open(6, 64 * KIB);
    struct batch batch;
    batch_open(&batch, many, MANY, 210 * KIB);
    faults(1, KVFS_FAULT_DELAY, 3 * TIMEOUT_MS);
    uint64_t began = now_ns();
    int read = get(gpu, &batch, NULL);
    uint64_t took_ms = (now_ns() - began) / 1000000;
    CHECK(statistics_of(gpu).slots_stuck > 0); /* at once: to compare the bytes takes longer than the device, on a slow machine */
    CHECK_SAY(read == MANY / 2, "%d read: %s", read, kvfs_error());
    for (uint32_t i = 0; i < MANY; i++)
        CHECK(batch.results[i] == (i % 2 ? -ETIMEDOUT : (int64_t)(200 * KIB + i)));
    CHECK(batch_check(&batch) == MANY / 2);
    CHECK_SAY(took_ms < 3 * TIMEOUT_MS, "%llu ms: it cost more than a timeout or two", (unsigned long long)took_ms);
    faults(1, KVFS_FAULT_NONE, 0);
    /* The slots come back, and no late byte of the device's has got into a block meanwhile. */
    struct batch one;
    batch_open(&one, many, 1, 210 * KIB);
    uint64_t until = now_ns() + 10000000000ull;
    while (statistics_of(gpu).slots_stuck && now_ns() < until) {
        CHECK(get(gpu, &one, NULL) == 1 && batch_check(&one) == 1);
        usleep(20000);
    }
    batch_close(&one);
    CHECK(statistics_of(gpu).slots_stuck == 0);
    usleep(TIMEOUT_MS * 1000);
    CHECK_SAY(get(gpu, &batch, NULL) == MANY, "%s", kvfs_error());
    CHECK(batch_check(&batch) == MANY);
    batch_close(&batch);
    kvfs_gpu_close(gpu);
}

/* Devices that hang again and again: rings are added, up to four; when those are stuck too, all is a miss, at once. */
static void test_every_slot_stuck(void) {
    struct kvfs_gpu *gpu = reader_open(2, 64 * KIB);
    struct batch batch;
    batch_open(&batch, many, MANY, 210 * KIB);
    for (uint32_t i = 0; i < DEVICES; i++)
        faults(i, KVFS_FAULT_DELAY, 45 * TIMEOUT_MS);
    /* A device that missed a deadline is left alone for four of them, and then tried by one read. */
    for (int round = 0; statistics_of(gpu).slots_stuck < 8; round++) {
        CHECK_SAY(round < 7, "%llu slots stuck", (unsigned long long)statistics_of(gpu).slots_stuck);
        CHECK(get(gpu, &batch, NULL) == 0);
        for (uint32_t i = 0; i < MANY; i++)
            CHECK(batch.results[i] == -ETIMEDOUT);
        usleep(9 * TIMEOUT_MS / 2 * 1000);
    }
    uint64_t began = now_ns();
    CHECK(get(gpu, &batch, NULL) == 0);
    for (uint32_t i = 0; i < MANY; i++)
        CHECK(batch.results[i] == -ETIMEDOUT);
    CHECK(statistics_of(gpu).slots_stuck == 8);
    CHECK(now_ns() - began < 3 * TIMEOUT_MS * 1000000ull);
    for (uint32_t i = 0; i < DEVICES; i++)
        faults(i, KVFS_FAULT_NONE, 0);
    uint64_t until = now_ns() + 100ull * TIMEOUT_MS * 1000000;
    while (statistics_of(gpu).slots_stuck && now_ns() < until)
        usleep(20000);
    CHECK_SAY(get(gpu, &batch, NULL) == MANY && batch_check(&batch) == MANY, "%s", kvfs_error());
    batch_close(&batch);
    kvfs_gpu_close(gpu);
}

static void test_flipped_bytes_are_a_miss(void) {
    struct kvfs_gpu *gpu = reader_open(4, 64 * KIB);
    struct batch batch;
    batch_open(&batch, many, MANY, 210 * KIB);
    faults(1, KVFS_FAULT_FLIP, 12345);
    CHECK(get(gpu, &batch, NULL) == MANY / 2);
    for (uint32_t i = 0; i < MANY; i++)
        CHECK(batch.results[i] == (i % 2 ? -EIO : (int64_t)(200 * KIB + i)));
    CHECK(batch_check(&batch) == MANY / 2);
    faults(1, KVFS_FAULT_ERROR, EIO);
    CHECK(get(gpu, &batch, NULL) == MANY / 2 && batch.results[1] == -EIO && batch_check(&batch) == MANY / 2);
    faults(1, KVFS_FAULT_NONE, 0);
    CHECK(get(gpu, &batch, NULL) == MANY && batch_check(&batch) == MANY);
    batch_close(&batch);
    kvfs_gpu_close(gpu);
}

/* The name no longer leads to a block; while it is read again, the name is given to another block. */
static void *replace_main(void *argument) {
    (void)argument;
    usleep(TIMEOUT_MS * 600); /* after the first read has failed, before the second */
    block_add(71, 200 * KIB, 1);
    return NULL;
}

static void test_a_block_that_is_gone_is_looked_up_again(void) {
    struct kvfs_gpu *gpu = reader_open(4, 64 * KIB);
    struct batch batch;
    uint8_t key[6];
    char name[13];
    pthread_t thread;
    key_name(key, name, 71);
    struct kvfs_record record = {.inode = ++next_inode,
                                 .parent = 2,
                                 .version = ++next_version,
                                 .size = 200 * KIB,
                                 .generation = GENERATION,
                                 .page = next_page[0] + 8,
                                 .header_pages = 1,
                                 .kind = KVFS_KIND_FILE,
                                 .flags = KVFS_INODE_SEALED};
    CHECK(kvfs_table_put(table, &record, name, (uint32_t)strlen(name), 0) == 0);
    batch_open(&batch, (uint32_t[]){71}, 1, 210 * KIB);
    faults(0, KVFS_FAULT_DELAY, TIMEOUT_MS * 4 / 10); /* both within one deadline */
    CHECK(pthread_create(&thread, NULL, replace_main, NULL) == 0);
    CHECK_SAY(get(gpu, &batch, NULL) == 1, "%lld", (long long)batch.results[0]);
    CHECK(pthread_join(thread, NULL) == 0);
    faults(0, KVFS_FAULT_NONE, 0);
    CHECK(batch_check(&batch) == 1 && statistics_of(gpu).restarts == 1);
    batch_close(&batch);
    kvfs_gpu_close(gpu);
}

static void test_prestaged_blocks(void) {
    struct kvfs_gpu *gpu = reader_open(8, 64 * KIB);
    struct batch batch;
    batch_open(&batch, many, MANY, 210 * KIB);
    CHECK(kvfs_prestage(client, &batch.keys) == (int)MANY);
    CHECK_SAY(get(gpu, &batch, NULL) == MANY && batch_check(&batch) == MANY, "%s", kvfs_error());
    struct kvfs_gpu_statistics statistics = statistics_of(gpu);
    CHECK_SAY(statistics.prestaged > 0 && statistics.blocks == MANY, "%llu", (unsigned long long)statistics.prestaged);
    batch_close(&batch);
    kvfs_gpu_close(gpu);
}

/* ---- threads ---- */

static void test_a_rewritten_block_is_never_torn(void) {
    struct kvfs_gpu *gpu = reader_open(4, 64 * KIB);
    struct batch batch;
    struct rewriter rewriter = {.inode = ++next_inode, .pause_us = 200};
    uint64_t size = REWRITTEN_SIZE, misses = 0, seen[2] = {0};
    uint8_t *got = malloc(size), *expected[2] = {malloc(size + 8), malloc(size + 8)};
    pattern(expected[0], size, REWRITTEN);
    pattern(expected[1], size, REWRITTEN + 1);
    batch_open(&batch, (uint32_t[]){REWRITTEN}, 1, size);
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, rewrite_main, &rewriter) == 0);
    uint64_t until = now_ns() + 3000000000ull;
    cuda.fake_cuda_delay(100);
    while (now_ns() < until || seen[0] + seen[1] == 0) {
        int r = get(gpu, &batch, NULL);
        CHECK_SAY(r >= 0 || r == -EBUSY || r == -ETIMEDOUT, "%s", kvfs_error()); /* a slow machine may miss the deadline */
        if (r < 0 || batch.results[0] < 0) {
            CHECK_SAY(r < 0 || batch.results[0] == -ENOENT || batch.results[0] == -EIO || batch.results[0] == -ETIMEDOUT, "%lld",
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
    cuda.fake_cuda_delay(0);
    atomic_store(&rewriter.stopping, true);
    CHECK(pthread_join(thread, NULL) == 0);
    printf("   %llu and %llu reads of the two contents, %llu misses, %llu begun again\n", (unsigned long long)seen[0], (unsigned long long)seen[1],
           (unsigned long long)misses, (unsigned long long)statistics_of(gpu).restarts);
    free(got);
    free(expected[0]);
    free(expected[1]);
    batch_close(&batch);
    kvfs_gpu_close(gpu);
}

struct reader {
    struct kvfs_gpu *gpu;
    cuda_stream stream;
};
static void *read_main(void *argument) {
    struct reader *reader = argument;
    struct batch *batch = malloc(sizeof(*batch));
    for (int round = 0; round < 4; round++) {
        batch_open(batch, many, MANY, 210 * KIB);
        CHECK(get(reader->gpu, batch, reader->stream) == (int)MANY);
        if (reader->stream) {
            CHECK(cuda.cuCtxPushCurrent_v2(primary) == 0 && cuda.cuStreamSynchronize(reader->stream) == 0);
            CHECK(cuda.cuCtxPopCurrent_v2(&(cuda_context){NULL}) == 0);
        }
        CHECK(batch_check(batch) == MANY);
        batch_close(batch);
    }
    free(batch);
    return NULL;
}

/* Four threads, two readers: two threads share each. */
static void test_readers_at_the_same_time(void) {
    struct kvfs_gpu *gpus[2] = {reader_open(3, 64 * KIB), reader_open(8, 256 * KIB)};
    struct reader readers[4];
    pthread_t threads[4];
    cuda.fake_cuda_delay(200);
    for (int i = 0; i < 4; i++) {
        readers[i].gpu = gpus[i % 2];
        readers[i].stream = NULL;
        if (i < 2)
            CHECK(cuda.cuCtxPushCurrent_v2(primary) == 0 && cuda.cuStreamCreate(&readers[i].stream, 1) == 0 &&
                  cuda.cuCtxPopCurrent_v2(&(cuda_context){NULL}) == 0);
        CHECK(pthread_create(&threads[i], NULL, read_main, &readers[i]) == 0);
    }
    for (int i = 0; i < 4; i++)
        CHECK(pthread_join(threads[i], NULL) == 0);
    cuda.fake_cuda_delay(0);
    CHECK(cuda.cuCtxPushCurrent_v2(primary) == 0);
    for (int i = 0; i < 2; i++) {
        CHECK(cuda.cuStreamDestroy_v2(readers[i].stream) == 0);
        kvfs_gpu_close(gpus[i]);
    }
    CHECK(cuda.cuCtxPopCurrent_v2(&(cuda_context){NULL}) == 0);
}

static void *release_main(void *argument) {
    (void)argument;
    usleep(100000);
    cuda.fake_cuda_hold(0);
    return NULL;
}

static void test_close_waits_for_copies(void) {
    struct kvfs_gpu *gpu = reader_open(16, 256 * KIB);
    struct batch batch;
    batch_open(&batch, many, 8, 210 * KIB);
    cuda.fake_cuda_hold(1);
    CHECK(get(gpu, &batch, (cuda_stream)1) == 8); /* all is enqueued, nothing has come */
    uint8_t byte;
    CHECK(cuda.fake_cuda_peek(&byte, (cuda_pointer)(uintptr_t)batch.buffers[7].data, 1) == 0 && byte == 0xee);
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, release_main, NULL) == 0);
    kvfs_gpu_close(gpu);
    CHECK(pthread_join(thread, NULL) == 0);
    CHECK(batch_check(&batch) == 8);
    batch_close(&batch);
}

static void test_fork(void) {
    struct kvfs_gpu *gpu = reader_open(2, 64 * KIB);
    struct batch batch;
    batch_open(&batch, many, 1, 210 * KIB);
    CHECK(get(gpu, &batch, NULL) == 1);
    pid_t child = fork();
    if (child == 0) {
        int failed = get(gpu, &batch, NULL) != -ECHILD;
        struct kvfs_gpu_statistics statistics;
        failed |= kvfs_gpu_statistics_get(gpu, &statistics) != -ECHILD;
        kvfs_gpu_close(gpu);
        _exit(failed);
    }
    int status;
    CHECK(child > 0 && waitpid(child, &status, 0) == child && status == 0);
    CHECK(get(gpu, &batch, NULL) == 1 && batch_check(&batch) == 1);
    batch_close(&batch);
    kvfs_gpu_close(gpu);
}

int main(void) {
    cuda_load();
    pool_open();
    blocks_add();
    unsigned left = cuda.fake_cuda_left();
    RUN(test_whole_blocks);
    RUN(test_neighbours_are_copied_together);
    RUN(test_buffers_side_by_side);
    RUN(test_order_with_the_callers_stream);
    RUN(test_slots_are_used_again_after_their_copy);
    RUN(test_contexts);
    RUN(test_bad_input);
    RUN(test_the_callers_work_is_waited_for);
    RUN(test_a_stuck_device_is_a_miss);
    RUN(test_every_slot_stuck);
    RUN(test_flipped_bytes_are_a_miss);
    RUN(test_a_block_that_is_gone_is_looked_up_again);
    RUN(test_prestaged_blocks);
    RUN(test_a_rewritten_block_is_never_torn);
    RUN(test_readers_at_the_same_time);
    RUN(test_close_waits_for_copies);
    RUN(test_fork);
    CHECK_SAY(cuda.fake_cuda_left() == left, "%u handles of CUDA are left", cuda.fake_cuda_left() - left);
    RUN(test_every_failure_of_the_driver_is_an_error);
    RUN(test_a_gpu_that_breaks_or_hangs);
    CHECK_SAY(cuda.fake_cuda_violations() == 0, "%u violations, see above", cuda.fake_cuda_violations());
    pool_close();
    printf("ok against a double of libcuda; nothing here was run on a GPU\n");
    return 0;
}
