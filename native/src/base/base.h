/* The ground that every room of the data plane stands on: pages, clocks, small helpers. Not installed. */
#ifndef KVFS_BASE_H
#define KVFS_BASE_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <assert.h>
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include "kvfs_format.h"

#ifdef NDEBUG
#error "assertions stay in: build without NDEBUG"
#endif

#define PAGE ((uint64_t)KVFS_PAGE_SIZE)

static inline uint64_t now_ns(void) {
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}
/* ns since 1970. */
static inline int64_t time_now(void) {
    struct timespec ts;
    clock_gettime(CLOCK_REALTIME, &ts);
    return ts.tv_sec * 1000000000ll + ts.tv_nsec;
}
/* Make an eventfd readable. A write fails only where the counter is at its limit: then it is readable. */
static inline void wake_fd(int fd) {
    uint64_t one = 1;
    ssize_t n = write(fd, &one, sizeof(one));
    (void)n;
}
/* Whether somebody holds the lock: for assertions. */
static inline bool is_locked(pthread_mutex_t *lock) {
    if (pthread_mutex_trylock(lock))
        return true;
    pthread_mutex_unlock(lock);
    return false;
}
static inline uint64_t round_up(uint64_t size, uint64_t unit) { return (size + unit - 1) / unit * unit; }
/* memcpy that takes NULL with a size of 0. */
static inline void copy_bytes(void *to, const void *from, uint64_t size) {
    if (size)
        memcpy(to, from, size);
}
static inline uint64_t pages_of(uint64_t size) { return (size + PAGE - 1) / PAGE; }
static inline uint64_t min_u64(uint64_t a, uint64_t b) { return a < b ? a : b; }

#endif
