/* Where the pool of a path is, and its daemon. */
#include "base/descriptor.h"
#include "client/client.h"
#include "client/mountinfo.h"

#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/vfs.h>
#include <unistd.h>

/* A pool's own directory stands for the root of its files: the way to one that has no mount here. */
static bool is_pool(const char *path, char pool[PATH_MAX], uint64_t *base) {
    char file[PATH_MAX + 16];
    snprintf(file, sizeof(file), "%s/pool.toml", path);
    if (faccessat(AT_FDCWD, file, F_OK, AT_EACCESS) < 0 || !realpath(path, pool))
        return false;
    *base = 1;
    return true;
}

/* The pool behind a path: the source of its mount, or the path itself. */
int pool_of(const char *path, char pool[4096], uint64_t *base) {
    struct statx st;
    if (statx(AT_FDCWD, path, AT_STATX_DONT_SYNC, STATX_TYPE | STATX_INO | STATX_MNT_ID, &st) < 0)
        return client_fail(-errno, "%s: %s%s", path, strerror(errno), errno == ENOTCONN ? "; kvfs mount of its pool serves it again" : "");
    if (!S_ISDIR(st.stx_mode))
        return client_fail(-ENOTDIR, "%s: not a directory", path);
    *base = st.stx_ino;
    FILE *mounts = fopen("/proc/self/mountinfo", "re");
    struct statfs about;
    if (!mounts && errno == ENOENT && is_pool(path, pool, base))
        return 0;
    if (!mounts && errno == ENOENT && statfs(path, &about) == 0 &&
        about.f_type == FUSE_MAGIC) { /* without /proc: the mount is asked, if it is one of ours */
        strcpy(pool, path);
        return 0;
    }
    if (!mounts)
        return client_fail(-errno, "/proc/self/mountinfo: %s", descriptor_reason(errno));
    char *line = NULL;
    size_t capacity = 0;
    int r = client_fail(-EINVAL, "%s: its mount is not in /proc/self/mountinfo", path);
    while (getline(&line, &capacity, mounts) >= 0) {
        struct mountinfo mount;
        if (!mountinfo_parse(line, &mount) || mount.id != st.stx_mnt_id)
            continue;
        const char *kind = mount.kind, *source = mount.source;
        if (!source)
            break;
        if (strcmp(kind, "fuse.kvfs") != 0 && is_pool(path, pool, base))
            r = 0;
        else if (strcmp(kind, "fuse.kvfs") != 0)
            r = client_fail(-EINVAL, "%s: not on a kvfs mount: it lies on %s (%s); kvfs mount POOL %s mounts a pool there", path, kind, source, path);
        else if (source[0] != '/' || strlen(source) >= PATH_MAX)
            r = client_fail(-EINVAL, "%s: the pool of this mount, '%s', is no path from here", path, source);
        else
            r = 0, strcpy(pool, source);
        break;
    }
    free(line);
    fclose(mounts);
    return r;
}

/* Zeros: there is none. */
void listener_of(const struct kvfs_client *client, uint64_t out[4]) {
    char path[PATH_MAX + 16];
    struct stat about;
    memset(out, 0, 4 * sizeof(*out));
    if (client->way == BY_MOUNT)
        return;
    snprintf(path, sizeof(path), "%s/control.sock", client->pool);
    if (stat(path, &about) == 0) {
        out[0] = about.st_dev;
        out[1] = about.st_ino;
        out[2] = (uint64_t)about.st_ctim.tv_sec;
        out[3] = (uint64_t)about.st_ctim.tv_nsec;
    }
}

/* The process behind the connection still listens: nothing can have been changed without it. */
bool listener_is_same(const struct kvfs_client *client, const struct connection *connection) {
    uint64_t now[4];
    listener_of(client, now);
    return now[1] && memcmp(now, connection->listener, sizeof(now)) == 0;
}

/* *here: a control socket is at the pool's directory, whether or not it answers. */
static int control_open(struct kvfs_client *client, uint64_t deadline_ns, bool *here) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    int directory = -1;
    /* sockaddr_un has 108 bytes; a longer path goes by the directory's descriptor, which a process that was setuid may not follow. */
    if ((size_t)snprintf(address.sun_path, sizeof(address.sun_path), "%s/control.sock", client->pool) >= sizeof(address.sun_path)) {
        directory = descriptor_above(open(client->pool, O_PATH | O_DIRECTORY | O_CLOEXEC));
        if (directory < 0 && (errno == EMFILE || errno == ENFILE))
            return client_fail(-errno, "%s: %s", client->pool, descriptor_reason(errno));
        *here = directory >= 0;
        if (directory < 0)
            return client_fail(errno == EACCES ? -EACCES : -ENOTCONN, "%s: %s", client->pool, strerror(errno));
        snprintf(address.sun_path, sizeof(address.sun_path), "/proc/self/fd/%d/control.sock", directory);
    }
    int fd = descriptor_above(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    int r = fd < 0 ? -errno : 0;
    while (r == 0 && connect(fd, (struct sockaddr *)&address, sizeof(address)) < 0) {
        r = errno == EINTR ? 0 : -errno;
        if (r == -EAGAIN && now_ns() < deadline_ns) { /* a full backlog */
            usleep(2000);
            r = 0;
        }
    }
    if (directory >= 0)
        close(directory);
    if (r == 0)
        return fd;
    if (fd >= 0)
        close(fd);
    *here = r != -ENOENT && r != -ENOTDIR && r != -EACCES;
    if (r == -EMFILE || r == -ENFILE)
        return client_fail(r, "%s: no descriptor for a connection: %s", client->pool, descriptor_reason(-r));
    if (r == -EACCES)
        return client_fail(r, "%s/control.sock: this user may not connect", client->pool);
    const char *why = r == -ENOENT || r == -ECONNREFUSED ? "it is not mounted" : strerror(-r);
    return client_fail(-ENOTCONN, "%s: no daemon answers: %s; kvfs mount %s MOUNTPOINT serves it", client->pool, why, client->pool);
}

int socket_open(struct kvfs_client *client, uint64_t deadline_ns) {
    bool here = true;
    int fd = client->way == BY_MOUNT ? -ENOTCONN : control_open(client, deadline_ns, &here);
    if (fd >= 0)
        client->way = BY_CONTROL; /* it stays so: a daemon that is away for a moment takes its socket with it */
    if (fd >= 0 || client->way == BY_CONTROL || (client->way == BY_ANY && here))
        return fd;
    int asked = ask_mount(client, deadline_ns);
    if (asked >= 0)
        client->way = BY_MOUNT;
    if (asked < 0 && fd == -EACCES) /* the socket is here, so its answer is the one that helps */
        return client_fail(fd, "%s/control.sock: this user may not connect", client->pool);
    if (asked != -ESHUTDOWN)
        return asked;
    return client->way == BY_MOUNT ? client_fail(-ENOTCONN, "%s: nobody serves this mount any more", client->path) : fd;
}
