/* get_put: blocks of a mounted kvfs pool through libkvfs. Stores eight, finds them, reads them back, lists and deletes them.
 *
 *     make -C native/examples && build/examples/get_put /mnt/kv
 *
 * Needs kvfs.h and libkvfs.so alone. Everything it makes lies under /mnt/kv/get_put-example.
 */
#include <kvfs.h>

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { COUNT = 8, BLOCK_SIZE = 2 << 20, KEY_SIZE = 16, ALIGNMENT = 4096 };

/* The content of block i, so that a reader can tell. */
static void fill(uint8_t *block, uint32_t i) {
    for (uint32_t at = 0; at < BLOCK_SIZE; at++)
        block[at] = (uint8_t)(at * 31 + (at >> 12) + i * 97);
}

/* Every call returns a count or -errno, and leaves a message that names what was wrong with what. */
static int failed(const char *what) {
    fprintf(stderr, "get_put: %s: %s\n", what, kvfs_error());
    return 1;
}

static int work(struct kvfs_client *client, uint8_t *memory, uint8_t *wanted) {
    /* A batch: keys back to back and the size of each; a buffer and a result for each. */
    char names[COUNT * KEY_SIZE + 1];
    uint32_t sizes[COUNT];
    struct kvfs_buffer buffers[COUNT];
    int64_t results[COUNT];
    for (uint32_t i = 0; i < COUNT; i++) {
        snprintf(names + i * KEY_SIZE, KEY_SIZE + 1, "example block %02" PRIu32, i);
        sizes[i] = KEY_SIZE;
        buffers[i] = (struct kvfs_buffer){memory + (size_t)i * BLOCK_SIZE, BLOCK_SIZE};
        fill(memory + (size_t)i * BLOCK_SIZE, i);
    }
    struct kvfs_keys keys = {.data = names, .sizes = sizes, .count = COUNT};

    /* All eight are entered at once; what is there under these keys is replaced. */
    int stored = kvfs_put(client, &keys, buffers, results);
    if (stored < 0)
        return failed("put");
    for (uint32_t i = 0; i < COUNT; i++)
        if (results[i] < 0)
            fprintf(stderr, "get_put: block %" PRIu32 " was not stored: %s\n", i, strerror((int)-results[i]));
    printf("stored %d of %d blocks\n", stored, COUNT);

    /* From shared memory: no request, no read. */
    uint8_t found[COUNT];
    if (kvfs_exists(client, &keys, found) < 0)
        return failed("exists");
    for (uint32_t i = 0; i < COUNT; i++)
        printf("block %" PRIu32 " is %s\n", i, found[i] ? "there" : "not there");

    /* A pool is a cache: any block may be gone by now. A miss is a result, no error of the call. */
    memset(memory, 0, (size_t)COUNT * BLOCK_SIZE);
    int read = kvfs_get(client, &keys, buffers, results);
    if (read < 0)
        return failed("get");
    for (uint32_t i = 0; i < COUNT; i++) {
        fill(wanted, i);
        if (results[i] == -ETIMEDOUT) /* its memory is the device's until kvfs_busy() says 0 */
            fprintf(stderr, "get_put: block %" PRIu32 ": a device gave no answer in time\n", i);
        else if (results[i] < 0)
            fprintf(stderr, "get_put: block %" PRIu32 " is a miss: %s\n", i, strerror((int)-results[i]));
        else if (results[i] != BLOCK_SIZE || memcmp(buffers[i].data, wanted, BLOCK_SIZE) != 0)
            return fprintf(stderr, "get_put: block %" PRIu32 ": wrong bytes\n", i), 1;
    }
    printf("read %d of %d blocks, %d MiB, every byte right\n", read, COUNT, read * (BLOCK_SIZE >> 20));

    /* Page by page: each begins behind the last key of the one before. */
    uint8_t page[4 * KVFS_KEY_MAX], last[KVFS_KEY_MAX];
    uint32_t page_sizes[4], last_size = 0;
    int count;
    while ((count = kvfs_list(client, last_size ? last : NULL, last_size, page, sizeof(page), page_sizes, 4)) > 0) {
        const uint8_t *key = page;
        for (int i = 0; i < count; key += page_sizes[i++])
            printf("key '%.*s'\n", (int)page_sizes[i], (const char *)key);
        last_size = page_sizes[count - 1];
        memcpy(last, key - last_size, last_size);
    }
    if (count < 0)
        return failed("list");

    uint8_t deleted[COUNT];
    int gone = kvfs_delete(client, &keys, deleted);
    if (gone < 0)
        return failed("delete");
    printf("deleted %d of %d blocks\n", gone, COUNT);
    return 0;
}

int main(int argc, char **argv) {
    if (argc != 2)
        return fprintf(stderr, "usage: get_put DIRECTORY (of a kvfs mount)\n"), 2;
    struct kvfs_client *client;
    if (kvfs_connect(argv[1], "get_put-example", NULL, &client) < 0)
        return failed("connect");
    /* Aligned memory is read into and written from without a copy. */
    void *memory = NULL, *wanted = malloc(BLOCK_SIZE);
    int status = 1;
    if (wanted && posix_memalign(&memory, ALIGNMENT, (size_t)COUNT * BLOCK_SIZE) == 0)
        status = work(client, memory, wanted);
    /* Memory that a device still owns is never given back: its late bytes would land in whatever comes there next. */
    int busy = memory && kvfs_busy(client, memory, (uint64_t)COUNT * BLOCK_SIZE) != 0;
    kvfs_close(client);
    if (!busy)
        free(memory);
    free(wanted);
    return status;
}
