/* Opening, reading, writing and looking up files of a kvfs mount. */
#include "base/descriptor.h"
#include "files.h"

#include <cerrno>
#include <climits>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

using nixl::Status;

std::optional<PathMode> PathMode::read(const std::string &meta) {
    size_t colon = meta.find(':');
    if (colon == std::string::npos || colon + 1 == meta.size() || meta.find('\0') != std::string::npos)
        return std::nullopt;
    PathMode found;
    found.path = meta.substr(colon + 1);
    std::string modes = meta.substr(0, colon) + ",";
    for (size_t at = 0, end; at < modes.size(); at = end + 1) {
        end = modes.find(',', at);
        std::string mode = modes.substr(at, end - at);
        if (at == 0 && (mode == "ro" || mode == "rw"))
            found.flags = mode == "ro" ? O_RDONLY : O_RDWR;
        else if (at && mode == "direct")
            found.flags |= O_DIRECT;
        else if (at && mode == "sync")
            found.flags |= O_SYNC;
        else if (at && mode == "noatime")
            found.flags |= O_NOATIME;
        else if (at && mode == "create")
            found.flags |= O_CREAT;
        else
            return std::nullopt;
    }
    return found;
}

/* Before anything is made: is its directory on the mount? By the directory's descriptor, and never through a link in place of the file. */
static int make(const PathMode &mode, const std::string &mount) {
    size_t slash = mode.path.rfind('/');
    std::string directory = slash == std::string::npos ? "." : mode.path.substr(0, slash + 1), name = mode.path.substr(slash + 1);
    struct stat at, about;
    int dir = descriptor_above(open(directory.c_str(), O_PATH | O_DIRECTORY | O_CLOEXEC));
    if (dir < 0)
        return -errno;
    int fd = -1, error = EXDEV;
    if (fstat(dir, &about) < 0 || stat(mount.c_str(), &at) < 0) {
        error = errno;
    } else if (about.st_dev == at.st_dev) {
        fd = descriptor_above(openat(dir, name.c_str(), mode.flags | O_CREAT | O_EXCL | O_CLOEXEC, 0644));
        error = errno;
    }
    close(dir);
    return fd < 0 ? -error : fd;
}

int PathMode::open(const std::string &mount) const {
    int fd = -1, error = EEXIST;
    for (unsigned tries = 0; fd < 0 && error == EEXIST && tries < 2; tries++) { /* others may make it meanwhile */
        fd = descriptor_above(::open(path.c_str(), (flags & ~O_CREAT) | O_CLOEXEC));
        error = errno;
        if (fd < 0 && error == ENOENT && flags & O_CREAT) {
            fd = make(*this, mount);
            error = -fd;
        }
    }
    return fd < 0 ? -error : fd;
}

File::~File() {
    if (owned_)
        close(fd_);
}

Status File::check(const std::string &mount) {
    struct stat at, about;
    if (fstat(fd_, &about) < 0) {
        say("file descriptor %d: %s", fd_, strerror(errno));
        return Status::invalid_parameter;
    }
    if (stat(mount.c_str(), &at) < 0) {
        say("%s: %s", mount.c_str(), strerror(errno));
        return Status::backend;
    }
    if (at.st_dev != about.st_dev || !S_ISREG(about.st_mode)) {
        say("file descriptor %d: %s", fd_, S_ISREG(about.st_mode) ? ("not on the mount of " + mount).c_str() : "not a regular file");
        return Status::invalid_parameter;
    }
    inode_ = about.st_ino;
    return Status::success;
}

/* Bytes read, fewer at the end of the file; or -errno. */
int64_t File::read_mount(uint64_t offset, const kvfs_buffer &memory) const {
    uint64_t done = 0;
    while (done < memory.size) {
        ssize_t n = pread(fd_, (char *)memory.data + done, memory.size - done, (off_t)(offset + done));
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return -errno;
        if (n == 0)
            break;
        done += (uint64_t)n;
    }
    return (int64_t)done;
}

Status File::read(const Client &client, uint64_t offset, const kvfs_buffer &memory, Owed &owed) const {
    struct kvfs_file *file = nullptr;
    int64_t result = client ? kvfs_file_open(client.get(), inode_, &file) : -EAGAIN;
    if (result == 0)
        result = kvfs_file_read(file, offset, memory.data, memory.size);
    kvfs_file_close(file);
    if (result == -ETIMEDOUT)
        owed.add(client, memory);
    else if (result == -EBUSY) /* not into memory that a device owns, by no way */
        return Status::backend;
    else if (result < 0 && result != -EIO) /* not sealed, or nobody knows: the mount does */
        result = read_mount(offset, memory);
    if (result < 0)
        return status_of(result);
    return (uint64_t)result == memory.size ? Status::success : Status::mismatch;
}

Status File::write(uint64_t offset, const kvfs_buffer &memory) const {
    for (uint64_t done = 0; done < memory.size;) {
        ssize_t n = pwrite(fd_, (const char *)memory.data + done, memory.size - done, (off_t)(offset + done));
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0) {
            int error = n < 0 ? errno : EIO;
            say("file descriptor %d: %zu bytes at %llu were not written: %s", fd_, (size_t)memory.size, (unsigned long long)offset, strerror(error));
            return Status::backend;
        }
        done += (uint64_t)n;
    }
    return Status::success;
}

/* Where the filesystem that a directory lies on is mounted, with a slash at its end; empty: it cannot be found. A FUSE filesystem's root is inode 1. Of
 * a bind mount of a part of it there is none. */
static std::string root_of(const std::string &directory) {
    char real[PATH_MAX];
    struct stat at, up;
    if (!realpath(directory.c_str(), real) || stat(real, &at) < 0)
        return "";
    std::string root = real;
    for (up = at; up.st_dev == at.st_dev && up.st_ino != 1;) {
        root.resize(root.rfind('/'));
        if (root.empty() || stat(root.c_str(), &up) < 0)
            return "";
    }
    return up.st_dev == at.st_dev ? root + "/" : "";
}

bool Paths::below(const std::string &path, std::string *out) {
    std::lock_guard<std::mutex> guard(lock_);
    if (root_.empty())
        root_ = root_of(directory_);
    if (root_.empty() || path.compare(0, root_.size(), root_) != 0)
        return false;
    *out = path.substr(root_.size());
    std::string framed = "/" + *out + "/";
    return framed.find("//") == std::string::npos && framed.find("/./") == std::string::npos && framed.find("/../") == std::string::npos;
}

nixl::Answer Paths::query(const Client &client, const std::string &path) {
    struct kvfs_attributes found;
    std::string rest;
    int r = -EAGAIN;
    if (path.empty() || path.find('\0') != std::string::npos)
        return std::nullopt;
    if (client && below(path, &rest))
        r = kvfs_find(client.get(), rest.c_str(), &found);
    if (r == -ENOENT || r == -ENOTDIR)
        return std::nullopt;
    if (r < 0 || !found.sealed) {
        struct stat about;
        if (stat(path.c_str(), &about) < 0)
            return std::nullopt;
        found.size = (uint64_t)about.st_size;
        found.mode = about.st_mode;
        found.mtime_ns = about.st_mtim.tv_sec * 1000000000ll;
    }
    return nixl::Parameters{
        {"size", std::to_string(found.size)}, {"mode", std::to_string(found.mode)}, {"mtime", std::to_string(found.mtime_ns / 1000000000)}};
}
