/* Mounts of kvfs as this process sees them, and one client of libkvfs for each. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include "base/descriptor.h"
#include "base/base.h"
#include "client/mountinfo.h"
#include "shim.h"

#define MOUNTINFO "/proc/self/mountinfo"
#define RETRY_NS 1000000000ull /* the least time between two attempts to connect, and ten times that of the last attempt */

/* Never freed: handles point to them, and there is one for each mount the process has used. */
struct mount {
    struct mount *next;
    dev_t device;
    int identity; /* of the mount, field 1 */
    bool gone;
    char *path;
    pthread_mutex_t lock; /* for the fields below */
    struct kvfs_client *client;
    unsigned forks; /* of the process that connected */
    uint64_t next_try_ns;
};

unsigned fork_count;
static pthread_mutex_t mounts_lock = PTHREAD_MUTEX_INITIALIZER;
static struct mount *mounts;
static int watch = -1; /* on mountinfo, at its end: poll() reports mounts and unmounts since */

static void mount_seen(dev_t device, int identity, char *path) {
    struct mount *mount = mounts;
    while (mount && (mount->device != device || mount->identity != identity || strcmp(mount->path, path) != 0))
        mount = mount->next;
    if (!mount && (mount = calloc(1, sizeof(*mount)))) {
        pthread_mutex_init(&mount->lock, NULL);
        mount->device = device;
        mount->identity = identity;
        mount->path = path;
        mount->next = mounts;
        mounts = mount;
        path = NULL;
    }
    if (mount)
        mount->gone = false;
    free(path);
}

static void read_mounts(void) {
    for (struct mount *mount = mounts; mount; mount = mount->next)
        mount->gone = true;
    FILE *file = fopen(MOUNTINFO, "re");
    char *line = NULL;
    size_t capacity = 0;
    while (file && getline(&line, &capacity, file) > 0) {
        struct mountinfo mount;
        if (!mountinfo_parse(line, &mount) || strcmp(mount.kind, "fuse.kvfs") != 0)
            continue;
        char *path = strdup(mount.path);
        if (path)
            mount_seen(makedev(mount.major, mount.minor), (int)mount.id, path);
    }
    free(line);
    if (file)
        fclose(file);
}

/* Device numbers of mounts are used again: known ones are dropped once anything was mounted or unmounted. */
static void refresh(void) {
    bool changed = true;
    if (watch >= 0)
        changed = poll(&(struct pollfd){watch, POLLPRI, 0}, 1, 0) != 0;
    else
        watch = descriptor_above(open(MOUNTINFO, O_RDONLY | O_CLOEXEC));
    if (changed)
        read_mounts();
}

bool mounts_find(int fd, struct place *out) {
    struct statx status;
    /* The kernel answers by itself: no filesystem is asked. */
    if (statx(fd, "", AT_EMPTY_PATH | AT_STATX_DONT_SYNC, STATX_TYPE | STATX_INO, &status) < 0 || !S_ISREG(status.stx_mode))
        return false;
    dev_t device = makedev(status.stx_dev_major, status.stx_dev_minor);
    pthread_mutex_lock(&mounts_lock);
    refresh();
    struct mount *mount = mounts;
    while (mount && (mount->gone || mount->device != device))
        mount = mount->next;
    pthread_mutex_unlock(&mounts_lock);
    *out = (struct place){mount, status.stx_ino};
    return mount != NULL;
}

struct kvfs_client *mount_client(struct mount *mount) {
    pthread_mutex_lock(&mount->lock);
    if (mount->client && mount->forks != fork_count) {
        mount->client = NULL; /* the parent's: its memory stays, and nothing else of it is used here */
        mount->next_try_ns = 0;
    }
    if (!mount->client && now_ns() >= mount->next_try_ns) {
        struct kvfs_options options = {.size = sizeof(options), .flags = KVFS_READ_ONLY};
        struct stat status;
        uint64_t start_ns = now_ns();
        mount->forks = fork_count;
        /* Something else may have been mounted over it. */
        if (stat(mount->path, &status) == 0 && status.st_dev == mount->device)
            kvfs_connect(mount->path, NULL, &options, &mount->client);
        mount->next_try_ns = now_ns() + RETRY_NS + 10 * (now_ns() - start_ns);
    }
    struct kvfs_client *client = mount->client;
    pthread_mutex_unlock(&mount->lock);
    return client;
}

void mounts_forked(void) {
    pthread_mutex_init(&mounts_lock, NULL);
    for (struct mount *mount = mounts; mount; mount = mount->next)
        pthread_mutex_init(&mount->lock, NULL);
    if (watch >= 0)
        close(watch); /* its file is shared with the parent: bytes read by one are missed by the other */
    watch = -1;
}

char *mount_below(const struct mount *mount, int fd) {
    char link[64], path[4096];
    size_t prefix = strlen(mount->path);
    snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
    ssize_t size = readlink(link, path, sizeof(path) - 1);
    if (size < 0 || (size_t)size == sizeof(path) - 1)
        return NULL;
    path[size] = 0;
    return strncmp(path, mount->path, prefix) == 0 && path[prefix] == '/' ? strdup(path + prefix + 1) : NULL;
}
