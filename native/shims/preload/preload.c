/* The calls that are taken over. Each asks whether kvfs answers for the path or descriptor, and else makes the real call.
 *
 * They are declared under other names with the C library's as their symbols. Its headers promise compilers facts about these functions (that no path
 * is NULL, say) which callers have to keep. */
#include "base/descriptor.h"
#include "preload.h"

#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define TAKES(symbol) __asm__(#symbol) __attribute__((visibility("default")))
#define ALSO(symbol, same) __asm__(#symbol) __attribute__((visibility("default"), alias(#same)))

static bool on(void) { return !preload_inside && atomic_load_explicit(&preload_active, memory_order_relaxed); }

/* ---- opening ---- */

static int open_real(int dirfd, const char *path, int flags, mode_t mode, bool at) {
    return at ? REAL(int (*)(int, const char *, int, ...), openat)(dirfd, path, flags, mode)
              : REAL(int (*)(const char *, int, ...), open)(path, flags, mode);
}

static int open_any(int dirfd, const char *path, int flags, mode_t mode, bool at) {
    struct place place;
    if (!place_get(dirfd, path, &place)) {
        int fd = open_real(dirfd, path, flags, mode, at);
        if (internal_fd_has(fd)) /* its number was closed where it could not be seen */
            internal_fd_forget(fd);
        return fd;
    }
    struct kvfs_attributes attributes;
    int fd = -1, r = flags & (O_CREAT | __O_TMPFILE) ? -EAGAIN : place_find(&place, EFFECTIVE_IDS, &attributes);
    if (r == -ENOENT || r == -ENOTDIR) {
        COUNT(opens_absent, 1);
        errno = -r;
    } else {
        fd = open_real(dirfd, path, flags, mode, at);
        if (fd >= 0 && (flags & (O_ACCMODE | O_TRUNC | O_PATH | O_DIRECTORY)) == O_RDONLY)
            file_opened(place.mount, fd, flags);
    }
    place_put(&place);
    return fd;
}

#define OPEN_MODE(flags, last)                                                            \
    ({                                                                                    \
        va_list arguments;                                                                \
        va_start(arguments, last);                                                        \
        mode_t given = (flags) & (O_CREAT | __O_TMPFILE) ? va_arg(arguments, mode_t) : 0; \
        va_end(arguments);                                                                \
        given;                                                                            \
    })

int take_open(const char *path, int flags, ...) TAKES(open);
int take_open(const char *path, int flags, ...) { return open_any(AT_FDCWD, path, flags, OPEN_MODE(flags, flags), false); }
int take_open64(const char *path, int flags, ...) ALSO(open64, open);

int take_openat(int dirfd, const char *path, int flags, ...) TAKES(openat);
int take_openat(int dirfd, const char *path, int flags, ...) { return open_any(dirfd, path, flags, OPEN_MODE(flags, flags), true); }
int take_openat64(int dirfd, const char *path, int flags, ...) ALSO(openat64, openat);

/* Programs built with _FORTIFY_SOURCE call these. Calls without the mode that O_CREAT needs are to be aborted. */
int take_open_2(const char *path, int flags) TAKES(__open_2);
int take_open_2(const char *path, int flags) {
    if (flags & (O_CREAT | __O_TMPFILE))
        return REAL(int (*)(const char *, int), __open_2)(path, flags);
    return open_any(AT_FDCWD, path, flags, 0, false);
}
int take_open64_2(const char *path, int flags) ALSO(__open64_2, __open_2);

int take_openat_2(int dirfd, const char *path, int flags) TAKES(__openat_2);
int take_openat_2(int dirfd, const char *path, int flags) {
    if (flags & (O_CREAT | __O_TMPFILE))
        return REAL(int (*)(int, const char *, int), __openat_2)(dirfd, path, flags);
    return open_any(dirfd, path, flags, 0, true);
}
int take_openat64_2(int dirfd, const char *path, int flags) ALSO(__openat64_2, __openat_2);

/* ---- closing ---- */

int take_close(int fd) TAKES(close);
int take_close(int fd) {
    if (internal_fd_has(fd)) {
        if (preload_inside) {
            internal_fd_forget(fd);
        } else if (preload_is_owner()) { /* for the application there is no such descriptor */
            errno = EBADF;
            return -1;
        }
    } else if (file_is_open(fd) && preload_is_owner()) {
        file_closing(fd);
    }
    return real_close(fd);
}

/* fd is about to become another file. */
static void replacing(int fd) {
    if (!file_is_open(fd) && !internal_fd_has(fd))
        return;
    if (!preload_is_owner())
        return;
    if (internal_fd_has(fd))
        preload_give_up();
    file_closing(fd);
}

int take_dup(int from) TAKES(dup);
int take_dup(int from) {
    int fd = REAL(int (*)(int), dup)(from);
    if (fd >= 0 && file_is_open(from) && on())
        file_duplicated(from, fd);
    return fd;
}

int take_dup2(int from, int to) TAKES(dup2);
int take_dup2(int from, int to) {
    if (from != to)
        replacing(to);
    int fd = REAL(int (*)(int, int), dup2)(from, to);
    if (fd >= 0 && from != to && file_is_open(from) && on())
        file_duplicated(from, fd);
    return fd;
}

int take_dup3(int from, int to, int flags) TAKES(dup3);
int take_dup3(int from, int to, int flags) {
    if (from != to)
        replacing(to);
    int fd = REAL(int (*)(int, int, int), dup3)(from, to, flags);
    if (fd >= 0 && file_is_open(from) && on())
        file_duplicated(from, fd);
    return fd;
}

/* Close [first, last], except libkvfs's own descriptors. */
static int close_around(unsigned first, unsigned last, unsigned flags) {
    int (*real)(unsigned, unsigned, int) = REAL(int (*)(unsigned, unsigned, int), close_range);
    for (int fd = first < FILES_MAX ? (int)first : FILES_MAX; fd < FILES_MAX && (unsigned)fd <= last; fd++)
        file_closing(fd);
    for (int fd; first < FILES_MAX && (fd = internal_fd_next((int)first)) >= 0 && (unsigned)fd <= last; first = (unsigned)fd + 1)
        if ((unsigned)fd > first && real(first, (unsigned)fd - 1, (int)flags) < 0)
            return -1;
    return first <= last ? real(first, last, (int)flags) : 0;
}

int take_close_range(unsigned first, unsigned last, int flags) TAKES(close_range);
int take_close_range(unsigned first, unsigned last, int flags) {
    const int unshare_flag = 2, cloexec_flag = 4; /* CLOSE_RANGE_UNSHARE, CLOSE_RANGE_CLOEXEC */
    if (flags & unshare_flag)
        preload_give_up(); /* from here on threads may have descriptors of their own */
    if (first > last || flags & (unshare_flag | cloexec_flag) || !on() || !preload_is_owner())
        return REAL(int (*)(unsigned, unsigned, int), close_range)(first, last, flags);
    return close_around(first, last, (unsigned)flags);
}

void take_closefrom(int first) TAKES(closefrom);
void take_closefrom(int first) {
    first = first < 0 ? 0 : first;
    if (!on() || !preload_is_owner() || close_around((unsigned)first, UINT_MAX, 0) < 0)
        REAL(void (*)(int), closefrom)(first);
}

/* ---- reading ---- */

ssize_t take_read(int fd, void *data, size_t size) TAKES(read);
ssize_t take_read(int fd, void *data, size_t size) {
    ssize_t n;
    if (file_is_open(fd) && on() && file_read_next(fd, &(struct iovec){data, size}, 1, &n))
        return n;
    return REAL(ssize_t(*)(int, void *, size_t), read)(fd, data, size);
}

ssize_t take_read_chk(int fd, void *data, size_t size, size_t room) TAKES(__read_chk);
ssize_t take_read_chk(int fd, void *data, size_t size, size_t room) {
    if (size > room)
        return REAL(ssize_t(*)(int, void *, size_t, size_t), __read_chk)(fd, data, size, room);
    return take_read(fd, data, size);
}

ssize_t take_pread(int fd, void *data, size_t size, off_t offset) TAKES(pread);
ssize_t take_pread(int fd, void *data, size_t size, off_t offset) {
    ssize_t n;
    if (file_is_open(fd) && on() && file_read_at(fd, &(struct iovec){data, size}, 1, (uint64_t)offset, &n))
        return n;
    return REAL(ssize_t(*)(int, void *, size_t, off_t), pread)(fd, data, size, offset);
}
ssize_t take_pread64(int fd, void *data, size_t size, off_t offset) ALSO(pread64, pread);

ssize_t take_pread_chk(int fd, void *data, size_t size, off_t offset, size_t room) TAKES(__pread_chk);
ssize_t take_pread_chk(int fd, void *data, size_t size, off_t offset, size_t room) {
    if (size > room)
        return REAL(ssize_t(*)(int, void *, size_t, off_t, size_t), __pread_chk)(fd, data, size, offset, room);
    return take_pread(fd, data, size, offset);
}
ssize_t take_pread64_chk(int fd, void *data, size_t size, off_t offset, size_t room) ALSO(__pread64_chk, __pread_chk);

static bool vector_is_ours(int fd, int count) { return file_is_open(fd) && count > 0 && count <= IOV_MAX && on(); }

ssize_t take_readv(int fd, const struct iovec *iovs, int count) TAKES(readv);
ssize_t take_readv(int fd, const struct iovec *iovs, int count) {
    ssize_t n;
    if (vector_is_ours(fd, count) && file_read_next(fd, iovs, count, &n))
        return n;
    return REAL(ssize_t(*)(int, const struct iovec *, int), readv)(fd, iovs, count);
}

ssize_t take_preadv(int fd, const struct iovec *iovs, int count, off_t offset) TAKES(preadv);
ssize_t take_preadv(int fd, const struct iovec *iovs, int count, off_t offset) {
    ssize_t n;
    if (vector_is_ours(fd, count) && file_read_at(fd, iovs, count, (uint64_t)offset, &n))
        return n;
    return REAL(ssize_t(*)(int, const struct iovec *, int, off_t), preadv)(fd, iovs, count, offset);
}
ssize_t take_preadv64(int fd, const struct iovec *iovs, int count, off_t offset) ALSO(preadv64, preadv);

ssize_t take_preadv2(int fd, const struct iovec *iovs, int count, off_t offset, int flags) TAKES(preadv2);
ssize_t take_preadv2(int fd, const struct iovec *iovs, int count, off_t offset, int flags) {
    ssize_t n;
    if (flags == 0 && vector_is_ours(fd, count) &&
        (offset == -1 ? file_read_next(fd, iovs, count, &n) : file_read_at(fd, iovs, count, (uint64_t)offset, &n)))
        return n;
    return REAL(ssize_t(*)(int, const struct iovec *, int, off_t, int), preadv2)(fd, iovs, count, offset, flags);
}
ssize_t take_preadv64v2(int fd, const struct iovec *iovs, int count, off_t offset, int flags) ALSO(preadv64v2, preadv2);

/* ---- attributes ---- */

static bool complete(const struct kvfs_attributes *attributes) {
    return (S_ISDIR(attributes->mode) || attributes->sealed) && attributes->mtime_ns >= 0 && attributes->ctime_ns >= 0 && attributes->atime_ns >= 0;
}

/* 0: *place and *attributes are the answer; -1: errno is; 1: make the real call. place is held if the result is 0. */
static int look(int dirfd, const char *path, struct place *place, enum ids ids, struct kvfs_attributes *attributes) {
    if (!place_get(dirfd, path, place))
        return 1;
    int r = place_find(place, ids, attributes);
    if (r == 0)
        return 0;
    place_put(place);
    if (r == -EAGAIN) {
        COUNT(path_fallthroughs, 1);
        return 1;
    }
    COUNT(absent, 1);
    errno = -r;
    return -1;
}

static int stat_any(int dirfd, const char *path, struct stat *out, int flags) {
    struct place place;
    struct kvfs_attributes attributes;
    int r = flags & ~(AT_SYMLINK_NOFOLLOW | AT_NO_AUTOMOUNT) || !out ? 1 : look(dirfd, path, &place, EFFECTIVE_IDS, &attributes);
    if (r == 0) {
        r = complete(&attributes) ? 0 : 1;
        if (r == 0)
            mount_fill_stat(place.mount, &attributes, out);
        COUNT(stats, r == 0);
        COUNT(path_fallthroughs, r == 1);
        place_put(&place);
    }
    if (r < 1)
        return r;
    int (*real)(int, const char *, struct stat *, int) = REAL(int (*)(int, const char *, struct stat *, int), fstatat);
    return real ? real(dirfd, path, out, flags) : (int)syscall(SYS_newfstatat, dirfd, path, out, flags);
}

int take_stat(const char *path, struct stat *out) TAKES(stat);
int take_stat(const char *path, struct stat *out) { return stat_any(AT_FDCWD, path, out, 0); }
int take_stat64(const char *path, struct stat *out) ALSO(stat64, stat);
int take_lstat(const char *path, struct stat *out) TAKES(lstat);
int take_lstat(const char *path, struct stat *out) { return stat_any(AT_FDCWD, path, out, AT_SYMLINK_NOFOLLOW); }
int take_lstat64(const char *path, struct stat *out) ALSO(lstat64, lstat);
int take_fstatat(int dirfd, const char *path, struct stat *out, int flags) TAKES(fstatat);
int take_fstatat(int dirfd, const char *path, struct stat *out, int flags) { return stat_any(dirfd, path, out, flags); }
int take_fstatat64(int dirfd, const char *path, struct stat *out, int flags) ALSO(fstatat64, fstatat);

/* Programs built against a C library before 2.33 call these. */
#ifdef __x86_64__
#define STAT_VERSION 1
#else
#define STAT_VERSION 0
#endif
static int stat_old(int version, int dirfd, const char *path, struct stat *out, int flags) {
    if (version == STAT_VERSION)
        return stat_any(dirfd, path, out, flags);
    errno = EINVAL;
    return -1;
}
int take_xstat(int version, const char *path, struct stat *out) TAKES(__xstat);
int take_xstat(int version, const char *path, struct stat *out) { return stat_old(version, AT_FDCWD, path, out, 0); }
int take_xstat64(int version, const char *path, struct stat *out) ALSO(__xstat64, __xstat);
int take_lxstat(int version, const char *path, struct stat *out) TAKES(__lxstat);
int take_lxstat(int version, const char *path, struct stat *out) { return stat_old(version, AT_FDCWD, path, out, AT_SYMLINK_NOFOLLOW); }
int take_lxstat64(int version, const char *path, struct stat *out) ALSO(__lxstat64, __lxstat);
int take_fxstatat(int version, int dirfd, const char *path, struct stat *out, int flags) TAKES(__fxstatat);
int take_fxstatat(int version, int dirfd, const char *path, struct stat *out, int flags) { return stat_old(version, dirfd, path, out, flags); }
int take_fxstatat64(int version, int dirfd, const char *path, struct stat *out, int flags) ALSO(__fxstatat64, __fxstatat);

int take_statx(int dirfd, const char *path, int flags, unsigned mask, struct statx *out) TAKES(statx);
int take_statx(int dirfd, const char *path, int flags, unsigned mask, struct statx *out) {
    struct place place;
    struct kvfs_attributes attributes;
    int r = flags & ~(AT_SYMLINK_NOFOLLOW | AT_NO_AUTOMOUNT) || !out ? 1 : look(dirfd, path, &place, EFFECTIVE_IDS, &attributes);
    if (r == 0) {
        r = complete(&attributes) && mount_fill_statx(place.mount, &attributes, mask, out) ? 0 : 1;
        COUNT(stats, r == 0);
        COUNT(path_fallthroughs, r == 1);
        place_put(&place);
    }
    return r < 1 ? r : REAL(int (*)(int, const char *, int, unsigned, struct statx *), statx)(dirfd, path, flags, mask, out);
}

/* Writing and executing depend on more than mode bits. */
static int access_any(int dirfd, const char *path, int mode, int flags) {
    struct place place;
    struct kvfs_attributes attributes;
    enum ids ids = flags & AT_EACCESS ? EFFECTIVE_IDS : REAL_IDS;
    int r = mode & ~R_OK || flags & ~(AT_EACCESS | AT_SYMLINK_NOFOLLOW) ? 1 : look(dirfd, path, &place, ids, &attributes);
    if (r == 0) {
        r = mode == F_OK || place_allows(&attributes, ids, mode) ? 0 : 1;
        COUNT(accesses, r == 0);
        COUNT(path_fallthroughs, r == 1);
        place_put(&place);
    }
    return r;
}

int take_access(const char *path, int mode) TAKES(access);
int take_access(const char *path, int mode) {
    int r = access_any(AT_FDCWD, path, mode, 0);
    return r < 1 ? r : REAL(int (*)(const char *, int), access)(path, mode);
}

int take_faccessat(int dirfd, const char *path, int mode, int flags) TAKES(faccessat);
int take_faccessat(int dirfd, const char *path, int mode, int flags) {
    int r = access_any(dirfd, path, mode, flags);
    return r < 1 ? r : REAL(int (*)(int, const char *, int, int), faccessat)(dirfd, path, mode, flags);
}

/* ---- the premises of path answers ---- */

int take_chdir(const char *path) TAKES(chdir);
int take_chdir(const char *path) {
    int r = REAL(int (*)(const char *), chdir)(path);
    mounts_moved();
    return r;
}

int take_fchdir(int fd) TAKES(fchdir);
int take_fchdir(int fd) {
    int r = REAL(int (*)(int), fchdir)(fd);
    mounts_moved();
    return r;
}

int take_chroot(const char *path) TAKES(chroot);
int take_chroot(const char *path) {
    mounts_paths_off();
    return REAL(int (*)(const char *), chroot)(path);
}

int take_unshare(int flags) TAKES(unshare);
int take_unshare(int flags) {
    mounts_paths_off();
    return REAL(int (*)(int), unshare)(flags);
}

int take_setns(int fd, int type) TAKES(setns);
int take_setns(int fd, int type) {
    mounts_paths_off();
    return REAL(int (*)(int, int), setns)(fd, type);
}

int take_setfsuid(uid_t user) TAKES(setfsuid);
int take_setfsuid(uid_t user) {
    mounts_paths_off();
    return REAL(int (*)(uid_t), setfsuid)(user);
}

int take_setfsgid(gid_t group) TAKES(setfsgid);
int take_setfsgid(gid_t group) {
    mounts_paths_off();
    return REAL(int (*)(gid_t), setfsgid)(group);
}

/* ---- the source of libkvfs's descriptors ---- */

int take_socket(int domain, int type, int protocol) TAKES(socket);
int take_socket(int domain, int type, int protocol) {
    int fd = REAL(int (*)(int, int, int), socket)(domain, type, protocol);
    return fd >= 0 && preload_inside ? internal_fd_raise(fd) : fd;
}

ssize_t take_recvmsg(int fd, struct msghdr *message, int flags) TAKES(recvmsg);
ssize_t take_recvmsg(int fd, struct msghdr *message, int flags) {
    ssize_t n = REAL(ssize_t(*)(int, struct msghdr *, int), recvmsg)(fd, message, flags);
    if (n < 0 || !preload_inside)
        return n;
    for (struct cmsghdr *part = CMSG_FIRSTHDR(message); part; part = CMSG_NXTHDR(message, part)) {
        size_t count = part->cmsg_level == SOL_SOCKET && part->cmsg_type == SCM_RIGHTS ? (part->cmsg_len - CMSG_LEN(0)) / sizeof(int) : 0;
        for (size_t i = 0; i < count; i++) {
            int got;
            memcpy(&got, CMSG_DATA(part) + i * sizeof(int), sizeof(int));
            got = internal_fd_raise(got);
            memcpy(CMSG_DATA(part) + i * sizeof(int), &got, sizeof(int));
        }
    }
    return n;
}

/* libkvfs asks this of its rings (native/src/io/ring.h). */
__attribute__((visibility("default"))) int kvfs_own_descriptor(int fd);
int kvfs_own_descriptor(int fd) { return preload_inside && fd >= 0 ? internal_fd_raise(fd) : descriptor_above(fd); }
/* And this at the start of a thread of its own: file calls there are the real ones. Taken over they would come back here, and close the very client
 * whose lock the thread holds. */
__attribute__((visibility("default"))) void kvfs_own_thread(void);
void kvfs_own_thread(void) { preload_inside = 1; }

/* ---- the process ---- */

static void forked(void) {
    atomic_store(&preload_pid, getpid());
    preload_inside = 0;
    memset(&preload_count, 0, sizeof(preload_count));
    internal_fd_forked();
    files_forked();
    mounts_forked();
}

__attribute__((constructor)) static void begin(void) {
    mounts_on_retire(files_reap);
    atomic_store(&preload_pid, getpid());
    pthread_atfork(NULL, NULL, forked);
    atomic_store(&preload_active, true);
}

static void quote(char *text) {
    for (; *text; text++)
        if (*text < ' ' || *text > '~' || *text == '"' || *text == '\\')
            *text = '_';
}

/* KVFS_PRELOAD_STATS: a file that gets a line of JSON from every process that met a kvfs mount, at its exit. */
__attribute__((destructor)) static void end(void) {
    const char *path = getenv("KVFS_PRELOAD_STATS");
    char line[1024], command[32] = "", error[256];
    if (!path || !*path || !preload_is_owner() || !atomic_exchange(&preload_active, false))
        return;
    mounts_last_error(error, sizeof(error));
    if (!atomic_load(&preload_count.connects) && !error[0]) /* met no kvfs mount */
        return;
    int fd = open_real(AT_FDCWD, "/proc/self/comm", O_RDONLY | O_CLOEXEC, 0, false);
    if (fd >= 0) {
        ssize_t n = syscall(SYS_read, fd, command, sizeof(command) - 1);
        command[n > 0 ? n - 1 : 0] = 0;
        real_close(fd);
    }
    quote(command);
    quote(error);
#define N(field) (unsigned long long)atomic_load(&preload_count.field)
    int size = snprintf(line, sizeof(line),
                        "{\"pid\": %d, \"command\": \"%s\", \"connects\": %llu, \"error\": \"%s\", \"opens\": %llu, "
                        "\"opens_absent\": %llu, \"reads\": %llu, \"read_bytes\": %llu, \"stats\": %llu, \"accesses\": %llu, "
                        "\"absent\": %llu, \"path_fallthroughs\": %llu, \"read_fallthroughs\": %llu}\n",
                        (int)getpid(), command, N(connects), error, N(opens), N(opens_absent), N(reads), N(read_bytes), N(stats), N(accesses),
                        N(absent), N(path_fallthroughs), N(read_fallthroughs));
#undef N
    fd = open_real(AT_FDCWD, path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0644, false);
    if (fd < 0)
        return;
    if (write(fd, line, (size_t)size) < 0)
        perror(path);
    real_close(fd);
}

/* Exits without destructors: children of fork(), mostly. */
_Noreturn void take_exit(int status) TAKES(_exit);
_Noreturn void take_exit(int status) {
    end();
    REAL(void (*)(int), _exit)(status);
    __builtin_unreachable();
}
_Noreturn void take_Exit(int status) ALSO(_Exit, _exit);
