/* Which paths lie on a kvfs mount, and the block table's answers about them.
 *
 * /proc/self/mountinfo is read when poll(2) says that it has changed, and asked at most every PERIOD_MS. Callers see a snapshot that never changes.
 * Snapshots and mounts are few and never freed, so they are used without locks. A mount that is gone is retired: its connection is closed when its
 * last user has left.
 *
 * A path is resolved as a string: no "..", no symbolic links, every directory's right to search it known from mode bits. The kernel is asked about
 * the directories above the mount point, every PERIOD_MS. */
#include "client/mountinfo.h"
#include "preload.h"

#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#define PERIOD_MS 5
#define RETRY_MS 1000
#define RETRY_MS_MAX 60000
#define MOUNTS_MAX 16
#define NESTED_MAX 64
#define PATH_SIZE 1024
#define COMPONENT_MAX 255
#define DEPTH_MAX 24
#define GROUPS_MAX 256
#define STATX_MNT_ID_MASK 0x1000u /* Linux 5.8; the C library's header may be older */
#define STATX_KNOWN (STATX_BASIC_STATS | STATX_BTIME | STATX_MNT_ID_MASK)

enum reach { NOBODY, SOMEBODY, ANYBODY };

struct mount {
    char path[PATH_SIZE], source[PATH_SIZE];
    uint32_t path_size;
    int id;
    unsigned major, minor;
    bool allow_other, kernel_checks; /* mount options allow_other, default_permissions */
    unsigned user, group;
    atomic_uint users;
    atomic_bool retired, answers, refuses_reads;
    atomic_bool stale; /* the pool was formatted again: the connection is of no use */
    atomic_flag lock;  /* connecting, checking */
    _Atomic(struct kvfs_client *) client;
    atomic_ullong check_ms; /* when to check again */
    atomic_ullong retry_ms; /* when to connect again */
    uint64_t retry_delay_ms;
    atomic_uint reach; /* enum reach: who may walk to the mount point */
    atomic_uint reach_user, reach_group;
    struct stat model; /* the root, as the kernel shows it */
    struct statx model_x;
    bool has_model_x;
};

struct nested {
    uint32_t mount, size;
    char path[PATH_SIZE];
};
struct snapshot {
    uint32_t count, nested_count;
    struct mount *mounts[MOUNTS_MAX];
    struct nested nested[NESTED_MAX]; /* mount points below a kvfs mount: paths there are not kvfs */
};

static _Atomic(struct snapshot *) current;
static struct mount *retired[MOUNTS_MAX * 4];
static uint32_t retired_count;
static atomic_flag refresh_lock = ATOMIC_FLAG_INIT;
static atomic_ullong refresh_ms;
static struct snapshot scratch;
static char *text;
static size_t text_capacity;
static int mounts_fd = -1;
static struct stat mounts_fd_is;
static atomic_bool paths_off, parse_again;
static char last_error[256];
static void (*on_retire)(const struct mount *mount);

static struct {
    atomic_uint sequence; /* odd: being written */
    atomic_int kind;      /* 0 not known, 1 not on kvfs, 2 on kvfs */
    struct mount *mount;
    uint64_t inode;
    uint32_t size;
    char path[PATH_SIZE]; /* below the mount point */
} cwd;
static atomic_flag cwd_lock = ATOMIC_FLAG_INIT;

static void *pages(size_t size) {
    void *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return memory == MAP_FAILED ? NULL : memory;
}

static bool below(const char *path, const char *directory, size_t size) {
    return strncmp(path, directory, size) == 0 && (path[size] == '/' || path[size] == 0);
}

/* ---- mountinfo ---- */

static bool mounts_changed(void) {
    struct stat st;
    if (mounts_fd >= 0 && (fstat(mounts_fd, &st) < 0 || st.st_ino != mounts_fd_is.st_ino || st.st_dev != mounts_fd_is.st_dev)) {
        internal_fd_forget(mounts_fd); /* closed where it could not be seen */
        mounts_fd = -1;
    }
    if (mounts_fd < 0) {
        int fd = (int)syscall(SYS_openat, AT_FDCWD, "/proc/self/mountinfo", O_RDONLY | O_CLOEXEC);
        if (fd < 0)
            return false;
        mounts_fd = internal_fd_raise(fd);
        return fstat(mounts_fd, &mounts_fd_is) == 0;
    }
    struct pollfd poll_fd = {.fd = mounts_fd, .events = POLLPRI};
    return poll(&poll_fd, 1, 0) > 0;
}

static ssize_t mounts_read(void) {
    if (!text && !(text = pages(text_capacity = 64 << 10)))
        return -1;
    for (;;) {
        size_t size = 0;
        ssize_t n = -1;
        if (lseek(mounts_fd, 0, SEEK_SET) == 0)
            while ((n = syscall(SYS_read, mounts_fd, text + size, text_capacity - 1 - size)) > 0)
                size += (size_t)n;
        if (n < 0)
            return -1;
        if (size < text_capacity - 1) {
            text[size] = 0;
            return (ssize_t)size;
        }
        char *larger = pages(text_capacity * 2);
        if (!larger)
            return -1;
        munmap(text, text_capacity);
        text = larger;
        text_capacity *= 2;
    }
}

static bool has_option(const char *options, const char *wanted) {
    size_t size = strlen(wanted);
    for (const char *at = options; (at = strstr(at, wanted)); at += size)
        if ((at == options || at[-1] == ',') && (at[size] == ',' || at[size] == 0))
            return true;
    return false;
}

static unsigned option_number(const char *options, const char *name) {
    const char *at = strstr(options, name);
    unsigned value = 0;
    for (at = at ? at + strlen(name) : ""; *at >= '0' && *at <= '9'; at++)
        value = value * 10 + (unsigned)(*at - '0');
    return value;
}

static struct mount *mount_known(const struct mount *wanted) {
    const struct snapshot *snapshot = atomic_load(&current);
    for (uint32_t i = 0; snapshot && i < snapshot->count; i++) {
        struct mount *mount = snapshot->mounts[i];
        /* The kernel uses numbers again. This may be another mount of the same pool, to which libkvfs connects by itself. */
        if (mount->id == wanted->id && mount->major == wanted->major && mount->minor == wanted->minor && !atomic_load(&mount->stale) &&
            strcmp(mount->path, wanted->path) == 0 && strcmp(mount->source, wanted->source) == 0)
            return mount;
    }
    return NULL;
}

static void mount_found(const struct mountinfo *line) {
    struct mount wanted = {.path_size = (uint32_t)strlen(line->path), .id = (int)line->id, .major = line->major, .minor = line->minor};
    /* Paths in a bind mount of a part of the pool would mean something else, and owners in an idmapped one. */
    if (!line->options || has_option(line->flags, "idmapped") || strcmp(line->root, "/") != 0 || wanted.path_size < 2 ||
        wanted.path_size >= PATH_SIZE || strlen(line->source) >= PATH_SIZE || scratch.count == MOUNTS_MAX)
        return;
    strcpy(wanted.path, line->path);
    strcpy(wanted.source, line->source);
    wanted.allow_other = has_option(line->options, "allow_other");
    wanted.kernel_checks = has_option(line->options, "default_permissions");
    wanted.user = option_number(line->options, "user_id=");
    wanted.group = option_number(line->options, "group_id=");
    struct mount *mount = mount_known(&wanted);
    if (!mount) {
        if (!(mount = pages(sizeof(*mount))))
            return;
        memcpy(mount, &wanted, sizeof(wanted));
        atomic_flag_clear(&mount->lock);
    }
    atomic_store(&mount->retry_ms, 0);
    atomic_store(&mount->check_ms, 0);
    scratch.mounts[scratch.count++] = mount;
}

static void nested_found(const char *path) {
    for (uint32_t i = 0; i < scratch.count; i++) {
        struct mount *mount = scratch.mounts[i];
        size_t size = strlen(path);
        if (!below(path, mount->path, mount->path_size) || size == mount->path_size)
            continue;
        if (scratch.nested_count == NESTED_MAX || size >= PATH_SIZE) { /* too many to know them all */
            memmove(&scratch.mounts[i], &scratch.mounts[i + 1], (--scratch.count - i) * sizeof(scratch.mounts[0]));
            i--;
            continue;
        }
        struct nested *nested = &scratch.nested[scratch.nested_count++];
        nested->mount = (uint32_t)mount->id;
        nested->size = (uint32_t)size;
        strcpy(nested->path, path);
    }
}

static void retire(struct mount *mount) {
    for (uint32_t i = 0; i < scratch.count; i++)
        if (scratch.mounts[i] == mount)
            return;
    atomic_store(&mount->retired, true);
    if (retired_count < sizeof(retired) / sizeof(retired[0]))
        retired[retired_count++] = mount;
}

static void close_retired(void) {
    for (uint32_t i = 0; i < retired_count; i++) {
        struct mount *mount = retired[i];
        if (on_retire)
            on_retire(mount);
        if (atomic_load(&mount->users))
            continue;
        kvfs_close(atomic_exchange(&mount->client, NULL));
        retired[i--] = retired[--retired_count];
    }
}

/* False: the read has to be repeated. */
static bool mounts_parse(void) {
    if (mounts_read() < 0)
        return false;
    struct snapshot *before = atomic_load(&current), *after;
    memset(&scratch, 0, sizeof(scratch));
    /* Two passes over the text, which the first pass cuts up: mount points are kept by their own first pass. */
    struct mountinfo line;
    char *save = NULL, *next = text;
    size_t points = 0;
    for (char *at = strtok_r(next, "\n", &save); at; at = strtok_r(NULL, "\n", &save)) {
        if (!mountinfo_parse(at, &line))
            continue;
        if (strcmp(line.kind, "fuse.kvfs") == 0)
            mount_found(&line);
        size_t size = strlen(line.path) + 1; /* never longer than the text that it overwrites */
        memmove(text + points, line.path, size);
        points += size;
    }
    for (size_t at = 0; at < points; at += strlen(text + at) + 1)
        nested_found(text + at);
    if (before ? memcmp(before, &scratch, sizeof(scratch)) == 0 : scratch.count == 0)
        return true;
    if (!(after = pages(sizeof(*after))))
        return false;
    memcpy(after, &scratch, sizeof(scratch));
    atomic_store(&current, after);
    mounts_moved();
    for (uint32_t i = 0; before && i < before->count; i++)
        retire(before->mounts[i]);
    return true;
}

static void refresh(void) {
    uint64_t now = preload_now_ms();
    if (now < atomic_load_explicit(&refresh_ms, memory_order_relaxed) || atomic_flag_test_and_set(&refresh_lock))
        return;
    if (preload_is_owner()) {
        struct inside inside = inside_begin();
        if (mounts_changed())
            atomic_store(&parse_again, true);
        if (atomic_exchange(&parse_again, false) && !mounts_parse())
            atomic_store(&parse_again, true);
        if (retired_count)
            close_retired();
        inside_end(inside);
        atomic_store(&refresh_ms, now + PERIOD_MS);
    }
    atomic_flag_clear(&refresh_lock);
}

/* ---- one mount ---- */

void mount_hold(struct mount *mount) { atomic_fetch_add(&mount->users, 1); }
void mount_release(struct mount *mount) { atomic_fetch_sub(&mount->users, 1); }
dev_t mount_device(const struct mount *mount) { return makedev(mount->major, mount->minor); }
struct kvfs_client *mount_client(struct mount *mount) { return atomic_load(&mount->client); }
void mount_refuse_reads(struct mount *mount) { atomic_store(&mount->refuses_reads, true); }
bool mount_reads(const struct mount *mount) { return !atomic_load_explicit(&mount->refuses_reads, memory_order_relaxed); }

/* Ids mean the same here as in the mount: both in the first user namespace. */
static bool ids_are_plain(const char *map) {
    char line[128];
    unsigned inside_id = 1, outside_id = 1, count = 0;
    int fd = (int)syscall(SYS_openat, AT_FDCWD, map, O_RDONLY | O_CLOEXEC);
    ssize_t n = fd < 0 ? -1 : syscall(SYS_read, fd, line, sizeof(line) - 1);
    if (fd >= 0)
        real_close(fd);
    line[n < 0 ? 0 : n] = 0;
    return sscanf(line, "%u %u %u", &inside_id, &outside_id, &count) == 3 && inside_id == 0 && outside_id == 0 && count == UINT32_MAX;
}

static bool mount_connect(struct mount *mount) {
    struct kvfs_options options = {.size = sizeof(options), .flags = KVFS_READ_ONLY};
    struct kvfs_client *client;
    int r = kvfs_connect(mount->path, NULL, &options, &client);
    if (r < 0) {
        snprintf(last_error, sizeof(last_error), "%s", kvfs_error());
        return false;
    }
    if (syscall(SYS_newfstatat, AT_FDCWD, mount->path, &mount->model, 0) < 0 || mount->model.st_dev != mount_device(mount)) {
        kvfs_close(client);
        return false;
    }
    mount->has_model_x = syscall(SYS_statx, AT_FDCWD, mount->path, 0, STATX_KNOWN, &mount->model_x) == 0;
    if (!ids_are_plain("/proc/self/uid_map") || !ids_are_plain("/proc/self/gid_map"))
        mounts_paths_off();
    COUNT(connects, 1);
    atomic_store(&mount->client, client);
    return true;
}

/* Is this mount the one found at its path? Another mount may lie over it. */
static bool mount_is_visible(const struct mount *mount) {
    struct statx st;
    /* Without AT_STATX_SYNC_AS_STAT's question to the daemon: the kernel knows device and mount. */
    if (syscall(SYS_statx, AT_FDCWD, mount->path, AT_SYMLINK_NOFOLLOW | AT_STATX_DONT_SYNC, STATX_INO | STATX_MNT_ID_MASK, &st) < 0)
        return false;
    uint64_t id;
    memcpy(&id, (char *)&st + 0x90, sizeof(id)); /* stx_mnt_id */
    return st.stx_dev_major == mount->major && st.stx_dev_minor == mount->minor && (!(st.stx_mask & STATX_MNT_ID_MASK) || id == (uint64_t)mount->id);
}

/* The users that may search the directories above the mount point. */
static enum reach mount_reach(struct mount *mount) {
    char path[PATH_SIZE];
    bool anybody = true;
    strcpy(path, mount->path);
    for (char *slash = path + mount->path_size; slash > path;) {
        while (*--slash != '/')
            ;
        slash[slash == path] = 0;
        struct stat st;
        if (syscall(SYS_newfstatat, AT_FDCWD, path, &st, 0) < 0)
            return NOBODY;
        anybody = anybody && (st.st_mode & 0111) == 0111;
    }
    if (anybody)
        return ANYBODY;
    uid_t user = geteuid();
    gid_t group = getegid();
    if (getuid() != user || getgid() != group)
        return NOBODY;
    atomic_store(&mount->reach_user, user); /* these ids have just walked there */
    atomic_store(&mount->reach_group, group);
    return SOMEBODY;
}

static void mount_check(struct mount *mount) {
    uint64_t now = preload_now_ms();
    if (now < atomic_load_explicit(&mount->check_ms, memory_order_relaxed) || atomic_flag_test_and_set(&mount->lock))
        return;
    if (preload_is_owner()) {
        struct inside inside = inside_begin();
        struct kvfs_client *client = mount_client(mount);
        struct kvfs_client_information information = {0};
        struct kvfs_attributes root;
        if (!client && now >= mount->retry_ms) {
            if (!mount_connect(mount)) {
                mount->retry_delay_ms = mount->retry_delay_ms ? mount->retry_delay_ms * 2 : RETRY_MS;
                mount->retry_delay_ms = mount->retry_delay_ms > RETRY_MS_MAX ? RETRY_MS_MAX : mount->retry_delay_ms;
                mount->retry_ms = now + mount->retry_delay_ms;
            }
            client = mount_client(mount);
        } else if (client && kvfs_client_information_get(client, &information) == 0 && !information.connected && now >= mount->retry_ms) {
            if (kvfs_find(client, "", &root) == -ESTALE) { /* looks for a new daemon, and finds that of another pool */
                atomic_store(&mount->stale, true);
                atomic_store(&parse_again, true);
            }
            mount->retry_ms = now + RETRY_MS;
        }
        if (client) {
            bool connected = kvfs_client_information_get(client, &information) == 0 && information.connected;
            atomic_store(&mount->reach, mount_reach(mount));
            atomic_store(&mount->answers, connected && mount->kernel_checks && mount_is_visible(mount));
        }
        inside_end(inside);
        atomic_store(&mount->check_ms, now + PERIOD_MS);
    }
    atomic_flag_clear(&mount->lock);
}

/* ---- paths ---- */

static struct mount *mount_of(const char *path) {
    const struct snapshot *snapshot = atomic_load_explicit(&current, memory_order_acquire);
    struct mount *found = NULL;
    for (uint32_t i = 0; snapshot && i < snapshot->count; i++) {
        struct mount *mount = snapshot->mounts[i];
        if (below(path, mount->path, mount->path_size) && (!found || mount->path_size >= found->path_size))
            found = mount;
    }
    for (uint32_t i = 0; found && i < snapshot->nested_count; i++)
        if (snapshot->nested[i].mount == (uint32_t)found->id && below(path, snapshot->nested[i].path, snapshot->nested[i].size))
            return NULL;
    return found;
}

/* Append a relative path. False if the string alone does not tell where it leads, or it is too long. */
static bool append(char *to, uint32_t at, const char *path) {
    while (*path) {
        size_t size = strcspn(path, "/");
        if (size == 0 || size > COMPONENT_MAX || (path[0] == '.' && (size == 1 || (size == 2 && path[1] == '.'))) || at + size + 2 > PATH_SIZE ||
            (path[size] == '/' && !path[size + 1]))
            return false;
        if (at)
            to[at++] = '/';
        memcpy(to + at, path, size);
        at += (uint32_t)size;
        path += size + (path[size] == '/');
    }
    to[at] = 0;
    return true;
}

void mounts_moved(void) { atomic_store(&cwd.kind, 0); }

static void cwd_look(void) {
    char path[PATH_SIZE];
    struct statx st;
    if (atomic_flag_test_and_set(&cwd_lock))
        return;
    struct inside inside = inside_begin();
    atomic_store(&cwd.kind, 1); /* before looking: a change meanwhile sets it to 0 again */
    if (preload_is_owner() && syscall(SYS_getcwd, path, sizeof(path)) > 0 && path[0] == '/') {
        struct mount *mount = mount_of(path);
        if (mount && syscall(SYS_statx, AT_FDCWD, "", AT_EMPTY_PATH | AT_STATX_DONT_SYNC, STATX_INO, &st) == 0) {
            atomic_fetch_add(&cwd.sequence, 1);
            cwd.mount = mount;
            cwd.inode = st.stx_ino;
            const char *rest = path + mount->path_size;
            strcpy(cwd.path, rest + (*rest == '/'));
            cwd.size = (uint32_t)strlen(cwd.path);
            atomic_fetch_add(&cwd.sequence, 1);
            int kind = 1;
            atomic_compare_exchange_strong(&cwd.kind, &kind, 2);
        }
    }
    inside_end(inside);
    atomic_flag_clear(&cwd_lock);
}

static struct mount *cwd_place(struct place *place) {
    unsigned before = atomic_load(&cwd.sequence);
    struct mount *mount = cwd.mount;
    place->base_inode = cwd.inode;
    place->base_size = cwd.size;
    memcpy(place->path, cwd.path, sizeof(cwd.path));
    atomic_thread_fence(memory_order_acquire);
    return before & 1 || atomic_load(&cwd.sequence) != before || atomic_load(&cwd.kind) != 2 ? NULL : mount;
}

bool place_get(int dirfd, const char *path, struct place *place) {
    place->mount = NULL;
    if (preload_inside || !atomic_load_explicit(&preload_active, memory_order_relaxed) || !path)
        return false;
    struct mount *mount;
    uint32_t base = 0;
    place->base_inode = 0;
    if (path[0] == '/') {
        refresh();
        mount = mount_of(path);
        if (!mount)
            return false;
        path += mount->path_size;
        path += *path == '/';
    } else {
        if (dirfd != AT_FDCWD || !path[0] || atomic_load_explicit(&cwd.kind, memory_order_relaxed) == 1)
            return false;
        refresh();
        if (atomic_load(&cwd.kind) == 0)
            cwd_look();
        mount = cwd_place(place);
        if (!mount)
            return false;
        base = place->base_size;
    }
    mount_hold(mount);
    if (atomic_load(&mount->retired)) {
        mount_release(mount);
        return false;
    }
    mount_check(mount);
    if (!mount_client(mount)) {
        mount_release(mount);
        COUNT(path_fallthroughs, 1);
        return false;
    }
    place->mount = mount;
    place->certain = append(place->path, base, path);
    return true;
}

void place_put(struct place *place) {
    if (place->mount)
        mount_release(place->mount);
}

static bool caller_is(unsigned user, unsigned group) {
    uid_t real_user, effective_user, saved_user;
    gid_t real_group, effective_group, saved_group;
    return getresuid(&real_user, &effective_user, &saved_user) == 0 && getresgid(&real_group, &effective_group, &saved_group) == 0 &&
           real_user == user && effective_user == user && saved_user == user && real_group == group && effective_group == group &&
           saved_group == group;
}

bool place_allows(const struct kvfs_attributes *attributes, enum ids ids, int wanted) {
    unsigned mode = attributes->mode, mask = (unsigned)wanted;
    if ((mode & mask) == mask && (mode >> 3 & mask) == mask && (mode >> 6 & mask) == mask)
        return true;
    if (attributes->uid == (ids == REAL_IDS ? getuid() : geteuid()))
        return (mode >> 6 & mask) == mask;
    if ((mode & mask) == (mode >> 3 & mask))
        return (mode & mask) == mask;
    gid_t groups[GROUPS_MAX];
    bool member = attributes->gid == (ids == REAL_IDS ? getgid() : getegid());
    int count = member ? 0 : getgroups(GROUPS_MAX, groups);
    if (count < 0)
        return false;
    for (int i = 0; i < count && !member; i++)
        member = groups[i] == attributes->gid;
    return ((member ? mode >> 3 : mode) & mask) == mask;
}

static int walk(struct place *place, enum ids ids, struct kvfs_attributes *out) {
    struct kvfs_attributes way[DEPTH_MAX];
    uint32_t count, base = place->base_inode ? 1 : 0;
    int r = kvfs_walk(mount_client(place->mount), place->path, way, DEPTH_MAX, &count);
    if (r < 0 && r != -ENOENT && r != -ENOTDIR)
        return -EAGAIN;
    if (place->base_inode) {
        for (uint32_t i = 0; i < place->base_size; i++)
            base += i == 0 || place->path[i] == '/';
        if (count < base || way[base - 1].inode != place->base_inode) {
            mounts_moved(); /* the working directory was renamed, or removed: look up its place */
            return -EAGAIN;
        }
    }
    for (uint32_t i = 0; i < count - (r == 0); i++)
        if (S_ISDIR(way[i].mode) && !place_allows(&way[i], ids, X_OK))
            return -EAGAIN;
    *out = way[count - 1];
    return r;
}

int place_find(struct place *place, enum ids ids, struct kvfs_attributes *out) {
    struct mount *mount = place->mount;
    if (!place->certain || !atomic_load(&mount->answers) || atomic_load_explicit(&paths_off, memory_order_relaxed))
        return -EAGAIN;
    struct inside inside = inside_begin();
    unsigned reach = atomic_load(&mount->reach);
    int r = -EAGAIN;
    if ((reach == ANYBODY || (reach == SOMEBODY && caller_is(atomic_load(&mount->reach_user), atomic_load(&mount->reach_group)))) &&
        (mount->allow_other || caller_is(mount->user, mount->group)))
        r = walk(place, ids, out);
    inside_end(inside);
    return r;
}

/* ---- attributes ---- */

/* Times before 1970 are negative: the fraction counts from the earlier second. */
static struct timespec timespec_of(int64_t ns) {
    int64_t rest = ns % 1000000000;
    return (struct timespec){ns / 1000000000 - (rest < 0), rest + (rest < 0 ? 1000000000 : 0)};
}

void mount_fill_stat(const struct mount *mount, const struct kvfs_attributes *attributes, struct stat *out) {
    memset(out, 0, sizeof(*out));
    out->st_dev = mount->model.st_dev;
    out->st_ino = attributes->inode;
    out->st_mode = attributes->mode;
    out->st_nlink = attributes->nlink;
    out->st_uid = attributes->uid;
    out->st_gid = attributes->gid;
    out->st_size = (off_t)attributes->size;
    out->st_blksize = mount->model.st_blksize;
    out->st_blocks = (blkcnt_t)((attributes->size + 511) / 512);
    out->st_atim = timespec_of(attributes->atime_ns);
    out->st_mtim = timespec_of(attributes->mtime_ns);
    out->st_ctim = timespec_of(attributes->ctime_ns);
}

static struct statx_timestamp timestamp(int64_t ns) {
    struct timespec time = timespec_of(ns);
    return (struct statx_timestamp){.tv_sec = time.tv_sec, .tv_nsec = (uint32_t)time.tv_nsec};
}

bool mount_fill_statx(const struct mount *mount, const struct kvfs_attributes *attributes, unsigned mask, struct statx *out) {
    const unsigned mount_root = 0x2000; /* STATX_ATTR_MOUNT_ROOT */
    if (!mount->has_model_x || mask & ~STATX_KNOWN)
        return false;
    *out = mount->model_x;
    if (attributes->inode != mount->model.st_ino)
        out->stx_attributes &= ~(uint64_t)mount_root;
    out->stx_ino = attributes->inode;
    out->stx_mode = (uint16_t)attributes->mode;
    out->stx_nlink = attributes->nlink;
    out->stx_uid = attributes->uid;
    out->stx_gid = attributes->gid;
    out->stx_size = attributes->size;
    out->stx_blocks = (attributes->size + 511) / 512;
    out->stx_atime = timestamp(attributes->atime_ns);
    out->stx_mtime = timestamp(attributes->mtime_ns);
    out->stx_ctime = timestamp(attributes->ctime_ns);
    return true;
}

/* ---- the process ---- */

void mounts_on_retire(void (*then)(const struct mount *mount)) { on_retire = then; }

void mounts_paths_off(void) { atomic_store(&paths_off, true); }

void mounts_forked(void) {
    const struct snapshot *snapshot = atomic_load(&current);
    for (uint32_t i = 0; snapshot && i < snapshot->count; i++) {
        struct mount *mount = snapshot->mounts[i];
        atomic_store(&mount->client, NULL); /* the parent's; libkvfs lets a child do nothing with it */
        atomic_store(&mount->users, 0);
        atomic_store(&mount->answers, false);
        atomic_store(&mount->check_ms, 0);
        atomic_store(&mount->retry_ms, 0);
        mount->retry_delay_ms = 0;
        atomic_flag_clear(&mount->lock);
    }
    retired_count = 0;
    mounts_fd = -1;
    atomic_store(&refresh_ms, 0);
    atomic_flag_clear(&refresh_lock);
    atomic_flag_clear(&cwd_lock);
    atomic_store(&cwd.sequence, 0);
    mounts_moved();
}

void mounts_last_error(char *error, uint32_t size) { snprintf(error, size, "%s", last_error); }
