/* Which descriptors are files that libkvfs can read, and reading them.
 *
 * An entry belongs to a descriptor's number. Its memory is never freed, so a reader may count itself in at any time. An entry's contents are freed
 * when its number is used again, by the thread that opens. close() frees nothing, as it may come from a signal handler. */
#include "preload.h"

#include <pthread.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <time.h>
#include <unistd.h>

#define OPEN (1u << 31) /* reads may begin */
#define BUSY (1u << 30) /* being changed by one thread */
/* The rest of the state counts readers. */

/* Blocks begin at this size. Smaller buffered reads are the mount's, because the kernel reads ahead. Native reads were a fifth slower in pieces of
 * 256 KiB, half as fast at 64 KiB. Several small pieces of memory are one request for the kernel, and would be as many here. */
#define BLOCK_MIN (512u << 10)
/* The most that read(2) transfers. */
#define READ_MAX 0x7ffff000u
#define PAGE_SIZE 4096u
#define SYS_CACHESTAT 451

struct file {
    atomic_uint state;
    bool direct;
    uint64_t inode;
    struct mount *mount;
    struct kvfs_file *file;
};
static struct file files[FILES_MAX];
static atomic_int files_end; /* above the highest number ever used */

bool file_is_open(int fd) { return (unsigned)fd < FILES_MAX && atomic_load_explicit(&files[fd].state, memory_order_relaxed) & OPEN; }

void file_closing(int fd) {
    if (file_is_open(fd))
        atomic_fetch_and(&files[fd].state, ~OPEN);
}

static bool claim(struct file *file) {
    unsigned nobody = 0;
    return atomic_compare_exchange_strong(&file->state, &nobody, BUSY);
}

/* The entry is claimed. */
static void let_go(struct file *file) {
    if (!file->file)
        return;
    kvfs_file_close(file->file);
    mount_release(file->mount);
    file->file = NULL;
    file->mount = NULL;
}

void files_reap(const struct mount *mount) {
    for (int fd = 0, end = atomic_load(&files_end); fd < end; fd++) {
        struct file *file = &files[fd];
        if (!claim(file))
            continue;
        if (!mount || file->mount == mount)
            let_go(file);
        atomic_store(&file->state, 0);
    }
}

void files_forked(void) {
    for (int fd = 0, end = atomic_load(&files_end); fd < end; fd++) {
        files[fd].file = NULL; /* the parent's */
        files[fd].mount = NULL;
        atomic_store(&files[fd].state, 0);
    }
}

/* Asks no daemon, so the size may be old. */
static bool identify(int fd, struct statx *out) {
    return syscall(SYS_statx, fd, "", AT_EMPTY_PATH | AT_STATX_DONT_SYNC, STATX_INO | STATX_TYPE | STATX_SIZE, out) == 0;
}

void file_opened(struct mount *mount, int fd, int flags) {
    struct statx st;
    struct kvfs_file *opened;
    struct kvfs_client *client = mount_client(mount);
    if ((unsigned)fd >= FILES_MAX || !client || !mount_reads(mount) || !preload_is_owner())
        return;
    struct inside inside = inside_begin();
    file_closing(fd); /* if it is open here, it was closed by a call that could not be seen */
    struct file *file = &files[fd];
    if (identify(fd, &st) && S_ISREG(st.stx_mode) && makedev(st.stx_dev_major, st.stx_dev_minor) == mount_device(mount) && claim(file)) {
        let_go(file);
        if (kvfs_file_open(client, st.stx_ino, &opened) == 0) {
            mount_hold(mount);
            file->file = opened;
            file->mount = mount;
            file->inode = st.stx_ino;
            file->direct = flags & O_DIRECT;
            for (int end = atomic_load(&files_end); end <= fd && !atomic_compare_exchange_weak(&files_end, &end, fd + 1);)
                ;
            COUNT(opens, 1);
        }
        atomic_store(&file->state, file->file ? OPEN : 0);
    }
    inside_end(inside);
}

/* ---- reading ---- */

static struct file *enter(int fd) {
    struct file *file = &files[fd];
    unsigned state = atomic_load(&file->state);
    do {
        if (!(state & OPEN))
            return NULL;
    } while (!atomic_compare_exchange_weak(&file->state, &state, state + 1));
    return file;
}

static void leave(struct file *file) { atomic_fetch_sub(&file->state, 1); }

void file_duplicated(int from, int to) {
    struct file *file = enter(from);
    if (!file)
        return;
    file_opened(file->mount, to, file->direct ? O_DIRECT : 0);
    leave(file);
}

/* The requested bytes, if they are to be read here; else 0. */
static uint64_t wanted(const struct file *file, const struct iovec *iovs, int count) {
    uint64_t size = 0;
    for (int i = 0; i < count; i++) {
        if (count > 1 && iovs[i].iov_len < BLOCK_MIN)
            return 0;
        size += iovs[i].iov_len;
        if (iovs[i].iov_len > READ_MAX || size > READ_MAX || !iovs[i].iov_base)
            return 0;
    }
    return file->direct || size >= BLOCK_MIN ? size : 0;
}

/* Reads one piece; -errno. A device that gave no answer may still write into the caller's memory. The caller gets it back when that is over, as from
 * a read of a device. */
static int64_t read_piece(struct file *file, uint64_t offset, void *data, uint64_t size) {
    int64_t n = kvfs_file_read(file->file, offset, data, size);
    if (n == -ETIMEDOUT || n == -EBUSY)
        while (kvfs_busy(mount_client(file->mount), data, size) > 0)
            nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    if (n == -EPERM || n == -ENOSYS || n == -ENOMEM) /* no io_uring for this process: ask no more */
        mount_refuse_reads(file->mount);
    return n;
}

static bool read_pieces(struct file *file, const struct iovec *iovs, int count, uint64_t offset, ssize_t *result) {
    uint64_t done = 0;
    for (int i = 0; i < count; i++) {
        int64_t n = read_piece(file, offset + done, iovs[i].iov_base, iovs[i].iov_len);
        if (n < 0)
            return false;
        done += (uint64_t)n;
        if ((uint64_t)n < iovs[i].iov_len)
            break;
    }
    *result = (ssize_t)done;
    return true;
}

/* True: the kernel has all of it in its page cache, and is faster. cachestat(2), Linux 6.5. */
static bool is_cached(int fd, uint64_t offset, uint64_t size, uint64_t file_size) {
    struct {
        uint64_t offset, size;
    } range = {offset, size};
    struct {
        uint64_t pages, dirty, writeback, evicted, recently_evicted;
    } found;
    if (offset >= file_size)
        return false;
    if (size > file_size - offset)
        range.size = file_size - offset;
    uint64_t pages = (offset + range.size + PAGE_SIZE - 1) / PAGE_SIZE - offset / PAGE_SIZE;
    return syscall(SYS_CACHESTAT, fd, &range, &found, 0) == 0 && found.pages >= pages;
}

/* Reads at `offset`. If `offset` is NULL, reads from the file offset, which the kernel keeps: dup(), fork() and lseek() share it. */
static bool file_read(int fd, const struct iovec *iovs, int count, const uint64_t *offset, ssize_t *result) {
    bool good = false;
    struct statx st;
    struct file *file = enter(fd);
    if (!file)
        return false;
    struct inside inside = inside_begin();
    uint64_t size = wanted(file, iovs, count);
    if (size && mount_reads(file->mount)) {
        if (!identify(fd, &st) || st.stx_ino != file->inode || makedev(st.stx_dev_major, st.stx_dev_minor) != mount_device(file->mount)) {
            file_closing(fd); /* closed by a call that could not be seen, and perhaps another file since */
        } else {
            /* Without an offset: take the range first, then read it. Two readers at once each get their own range, as from the kernel. */
            off_t end = offset ? (off_t)(*offset + size) : lseek(fd, (off_t)size, SEEK_CUR);
            uint64_t at = (uint64_t)end - size;
            good = end >= 0 && (file->direct || !is_cached(fd, at, size, st.stx_size)) && read_pieces(file, iovs, count, at, result);
            if (!offset && end >= 0 && (!good || (uint64_t)*result < size))
                lseek(fd, (good ? *result : 0) - (off_t)size, SEEK_CUR);
        }
    }
    if (good) {
        COUNT(reads, 1);
        COUNT(read_bytes, (uint64_t)*result);
    } else {
        COUNT(read_fallthroughs, 1);
    }
    inside_end(inside);
    leave(file);
    return good;
}

bool file_read_at(int fd, const struct iovec *iovs, int count, uint64_t offset, ssize_t *result) {
    return offset <= INT64_MAX && file_read(fd, iovs, count, &offset, result);
}

bool file_read_next(int fd, const struct iovec *iovs, int count, ssize_t *result) { return file_read(fd, iovs, count, NULL, result); }
