/* Test double of five calls of libkvfs that libkvfs_cufile makes. Every read fails with -$KVFS_DOUBLE_ERROR. With ETIMEDOUT, a "device" writes
 * 0xee into the caller's memory 300 ms later, and kvfs_busy() says so until then. Preloaded. */
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define LATE_NS 300000000

static atomic_int busy;
static struct {
    void *data;
    uint64_t size;
} late;

int kvfs_connect(const char *path, const char *space, const void *options, void **out) {
    (void)path, (void)space, (void)options;
    *out = &late;
    return 0;
}

int kvfs_file_open(void *client, uint64_t inode, void **out) {
    (void)client, (void)inode;
    *out = &late;
    return 0;
}

void kvfs_file_close(void *file) { (void)file; }

static void *device(void *argument) {
    nanosleep(&(struct timespec){0, LATE_NS}, NULL);
    memset(late.data, 0xee, late.size);
    atomic_store(&busy, 0);
    return argument;
}

int64_t kvfs_file_read(void *file, uint64_t offset, void *data, uint64_t size) {
    const char *given = getenv("KVFS_DOUBLE_ERROR");
    int error = given ? atoi(given) : EIO;
    pthread_t thread;
    (void)file, (void)offset;
    if (error == ETIMEDOUT && !atomic_exchange(&busy, 1)) {
        late.data = data;
        late.size = size;
        pthread_create(&thread, NULL, device, NULL);
        pthread_detach(thread);
    }
    return -error;
}

int kvfs_busy(void *client, const void *data, uint64_t size) {
    (void)client, (void)data, (void)size;
    return atomic_load(&busy);
}
