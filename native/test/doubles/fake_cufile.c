/* A double of libcufile for tests: its DMA is pread(2) into memory that the double of libcuda has made reachable. It counts reads as
 * cuFile's level 3 statistics do, under the UUIDs of that double's GPUs, and it does what a test asks for: fake_cufile_*() below. */
#include <errno.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))
#define GPU_AT 1144 /* where libcufile 1.20 has its first GPU */

struct status {
    int error, cuda_error;
};
struct description {
    int type;
    union {
        int fd;
        void *handle;
    };
    const void *operations;
};
struct handle {
    int fd;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static unsigned handles, reads, held, hold_from, flip_at, fail_at, short_size;
static int fail_with, open_error, register_error, statistics_error;
static bool indirect, unknown;
static uint64_t direct_reads, posix_reads;

/* Where no test can call: in a probe's process. */
__attribute__((constructor)) static void from_environment(void) {
    const char *text = getenv("FAKE_CUFILE");
    indirect = text && strcmp(text, "indirect") == 0;
    unknown = text && strcmp(text, "unknown") == 0;
    register_error = text && strcmp(text, "unregistered") == 0 ? 5027 : 0;
}

/* So did libcufile 1.15, after a descriptor that it did not take. */
__attribute__((destructor)) static void crash_at_the_end(void) {
    if (register_error)
        abort();
}

EXPORT struct status cuFileDriverOpen(void) { return (struct status){open_error, 0}; }
EXPORT struct status cuFileSetStatsLevel(int level) { return (struct status){level == 3 ? statistics_error : 5022, 0}; }
EXPORT struct status cuFileStatsStart(void) { return (struct status){statistics_error, 0}; }
EXPORT struct status cuFileGetVersion(int *version) { return *version = 1200, (struct status){0, 0}; }

EXPORT struct status cuFileGetStatsL3(void *statistics) {
    uint8_t *at = (uint8_t *)statistics + GPU_AT;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < 2 && !unknown; i++, at += 16 + 29 * 8) { /* both the same: no test reads into two */
        memcpy(at, "fake CUDA devic", 15);
        at[15] = (uint8_t)('0' + i);
        memcpy(at + 64, &direct_reads, 8); /* n_nvfs_reads */
        memcpy(at + 72, &posix_reads, 8);
    }
    pthread_mutex_unlock(&lock);
    return (struct status){statistics_error, 0};
}

EXPORT struct status cuFileHandleRegister(void **out, struct description *description) {
    struct stat st;
    if (register_error || description->type != 1 || fstat(description->fd, &st))
        return (struct status){register_error ? register_error : 5027, 0};
    struct handle *handle = calloc(1, sizeof(*handle));
    handle->fd = description->fd;
    pthread_mutex_lock(&lock);
    handles++;
    pthread_mutex_unlock(&lock);
    *out = handle;
    return (struct status){0, 0};
}

EXPORT void cuFileHandleDeregister(struct handle *handle) {
    pthread_mutex_lock(&lock);
    handles--;
    pthread_mutex_unlock(&lock);
    free(handle);
}

EXPORT ssize_t cuFileRead(struct handle *handle, uint8_t *base, size_t size, int64_t file_offset, int64_t base_offset) {
    pthread_mutex_lock(&lock);
    unsigned mine = ++reads;
    bool flip = flip_at && mine >= flip_at;
    int error = fail_at && mine >= fail_at ? fail_with : 0;
    size = short_size && size > short_size ? short_size : size;
    held++;
    while (hold_from && mine >= hold_from)
        pthread_cond_wait(&changed, &lock);
    held--;
    *(indirect ? &posix_reads : &direct_reads) += 1;
    pthread_mutex_unlock(&lock);
    if (error == -1)
        errno = EIO;
    if (error)
        return error;
    void *aligned = NULL; /* for O_DIRECT */
    if (posix_memalign(&aligned, 4096, size))
        abort();
    ssize_t n = pread(handle->fd, aligned, size, file_offset);
    if (n > 0)
        memcpy(base + base_offset, aligned, (size_t)n);
    free(aligned);
    if (flip && n > 0)
        base[base_offset + n / 2] ^= 4;
    return n;
}

/* ---- what tests ask for ---- */

/* From the nth read from now on; 0: none any more. A read that is held goes on then, and does its work. */
#define FROM_NTH(name, variable)          \
    EXPORT void name(unsigned nth) {      \
        pthread_mutex_lock(&lock);        \
        variable = nth ? reads + nth : 0; \
        pthread_cond_broadcast(&changed); \
        pthread_mutex_unlock(&lock);      \
    }
FROM_NTH(fake_cufile_hold, hold_from)
FROM_NTH(fake_cufile_flip, flip_at)
FROM_NTH(fake_cufile_fail_from, fail_at)

#define SET(name, type, variable)    \
    EXPORT void name(type value) {   \
        pthread_mutex_lock(&lock);   \
        variable = value;            \
        pthread_mutex_unlock(&lock); \
    }
SET(fake_cufile_fail_with, int, fail_with)   /* the result of such a read */
SET(fake_cufile_short, unsigned, short_size) /* bytes that a read ends at */
SET(fake_cufile_open_error, int, open_error)
SET(fake_cufile_register_error, int, register_error)
SET(fake_cufile_statistics_error, int, statistics_error)
SET(fake_cufile_indirect, int, indirect) /* reads are counted as those of the compatibility mode */
SET(fake_cufile_unknown, int, unknown)   /* the statistics know no GPU */

#define GET(name, variable)          \
    EXPORT unsigned name(void) {     \
        pthread_mutex_lock(&lock);   \
        unsigned value = variable;   \
        pthread_mutex_unlock(&lock); \
        return value;                \
    }
GET(fake_cufile_reads, reads)
GET(fake_cufile_held, held)
GET(fake_cufile_left, handles)
