/* Inside libkvfs_preload.so: file calls of an unchanged application, on files of a kvfs mount, answered by libkvfs.
 *
 * The rule of the whole library: an answer is given here only where it is certain that the mount would give the same one. Everything else, also in
 * doubt, is the real call. An open file always has a real descriptor of the mount; only its reads are taken over.
 *
 * Each file uses those above it:
 *
 *     process.c      state of the process
 *     descriptors.c  libkvfs's own descriptors, which the application must neither see nor close
 *     mounts.c       which paths belong to a kvfs mount, its connection, and what its block table says of a path
 *     files.c        which descriptors are files that libkvfs can read
 *     preload.c      the calls that are taken over
 *
 * The calls here may be made in signal handlers wherever the real ones may. No call waits for a lock that the same thread may hold. Memory is
 * allocated only by the open, and the first reads, of a file on a kvfs mount. */
#ifndef KVFS_PRELOAD_H
#define KVFS_PRELOAD_H

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>

#include "kvfs.h"

#if __SIZEOF_POINTER__ != 8
#error "struct stat and struct stat64 are one only where off_t has 64 bits"
#endif

#define FILES_MAX 65536 /* descriptors from here on are the mount's */

/* ---- the real calls ---- */

/* The next definition of a symbol behind this library's; NULL: this C library has none. */
static inline void *real_symbol(_Atomic(void *) *cache, const char *name) {
    void *found = atomic_load_explicit(cache, memory_order_relaxed);
    if (!found)
        atomic_store_explicit(cache, found = dlsym(RTLD_NEXT, name), memory_order_relaxed);
    return found;
}
#define REAL(type, name)                   \
    ({                                     \
        static _Atomic(void *) cache;      \
        (type) real_symbol(&cache, #name); \
    })

/* ---- process.c ---- */

int real_close(int fd);

extern atomic_bool preload_active;            /* false: before the library is ready, and after it has given up */
extern atomic_int preload_pid;                /* the owner of these descriptors and clients; a child of vfork() shares this memory, but has its own */
extern _Thread_local unsigned preload_inside; /* this thread is inside libkvfs, or in this library: file calls are the real ones */
bool preload_is_owner(void);                  /* costs a system call */
/* From here on every call is the real one. */
void preload_give_up(void);
uint64_t preload_now_ms(void); /* coarse, monotonic */

/* Around calls of libkvfs: its own file calls are real ones, it is not cancelled half way, and errno stays as it was. */
struct inside {
    int error, cancel_state;
};
struct inside inside_begin(void);
void inside_end(struct inside inside);

struct counters {
    atomic_ullong connects, opens, opens_absent, reads, read_bytes, stats, accesses, absent, path_fallthroughs, read_fallthroughs;
};
extern struct counters preload_count;
#define COUNT(field, n) atomic_fetch_add_explicit(&preload_count.field, (n), memory_order_relaxed)

/* ---- descriptors.c ---- */

/* Move a descriptor to a high number, out of the application's way, and remember it. Returns the new number. -1: there is none above 2; it is closed. */
int internal_fd_raise(int fd);
bool internal_fd_has(int fd);
void internal_fd_forget(int fd);
int internal_fd_next(int fd);  /* the first own descriptor from fd on; -1: none */
void internal_fd_forked(void); /* closes the child's copies */

/* ---- mounts.c ---- */

struct mount;
/* A path on a kvfs mount, resolved as a string only. Holds the mount until place_put(). */
struct place {
    struct mount *mount; /* NULL: not on a kvfs mount, or not certain */
    uint32_t base_size;  /* of `path`: the directory it is relative to, which must have this inode number */
    uint64_t base_inode; /* 0: relative to the mount's root */
    bool certain;        /* the string alone says which file it is */
    char path[1024];     /* below the mount point */
};
bool place_get(int dirfd, const char *path, struct place *place);
void place_put(struct place *place);
enum ids { EFFECTIVE_IDS, REAL_IDS };
/* 0 and the attributes, -ENOENT or -ENOTDIR as the kernel would say for this caller; -EAGAIN: ask the mount. */
int place_find(struct place *place, enum ids ids, struct kvfs_attributes *out);
/* True: the mode bits alone give the caller these rights (R_OK, X_OK). False: perhaps; capabilities are the kernel's business. */
bool place_allows(const struct kvfs_attributes *attributes, enum ids ids, int wanted);

void mount_fill_stat(const struct mount *mount, const struct kvfs_attributes *attributes, struct stat *out);
bool mount_fill_statx(const struct mount *mount, const struct kvfs_attributes *attributes, unsigned mask, struct statx *out);
dev_t mount_device(const struct mount *mount);
struct kvfs_client *mount_client(struct mount *mount);
void mount_hold(struct mount *mount);
void mount_release(struct mount *mount);
void mount_refuse_reads(struct mount *mount);
bool mount_reads(const struct mount *mount);
/* Called before a mount that is gone is released: its holders for closed descriptors release it first. Once, before there are threads. */
void mounts_on_retire(void (*then)(const struct mount *mount));
/* The working directory has changed. */
void mounts_moved(void);
/* A change that is not followed makes answers about paths uncertain: no more of them are given. */
void mounts_paths_off(void);
void mounts_forked(void);
/* The reason why the last connection was not made. */
void mounts_last_error(char *error, uint32_t size);

/* ---- files.c ---- */

/* fd was opened on this mount, for reading only: take over reads if it is a sealed file. */
void file_opened(struct mount *mount, int fd, int flags);
/* The number `to` was made to mean the same as `from`. */
void file_duplicated(int from, int to);
/* fd is about to be closed. */
void file_closing(int fd);
bool file_is_open(int fd);
/* Release the files that closed descriptors of this mount still hold; NULL: of every mount. May free memory. */
void files_reap(const struct mount *mount);
void files_forked(void);
/* True: *result is what the call returns (always a count). False: make the real call. */
bool file_read_at(int fd, const struct iovec *iovs, int count, uint64_t offset, ssize_t *result);
bool file_read_next(int fd, const struct iovec *iovs, int count, ssize_t *result);

#endif
