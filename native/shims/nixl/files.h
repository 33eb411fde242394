/* Files of a kvfs mount, as NIXL names them: a descriptor, or modes and a path. Sealed files are read by libkvfs, all else goes through the mount. */
#ifndef KVFS_NIXL_FILES_H
#define KVFS_NIXL_FILES_H

#include <optional>
#include <string>
#include <sys/types.h>

#include "pool.h"

/* "<modes>:<path>": ro or rw, then any of direct, sync, noatime, create, with commas between them. */
struct PathMode {
    std::string path;
    int flags = 0;

    static std::optional<PathMode> read(const std::string &meta);
    /* A descriptor, or -errno. A file is made on that mount alone: -EXDEV. */
    int open(const std::string &mount) const;
};

/* A registered file. Its descriptor is closed with it, if it was opened here. */
class File {
  public:
    File(int fd, bool owned) : fd_(fd), owned_(owned) {}
    File(const File &) = delete;
    File &operator=(const File &) = delete;
    ~File();
    /* success: it lies on the mount of the pool, as no other file may be read by its inode number. */
    nixl::Status check(const std::string &mount);

    nixl::Status read(const Client &client, uint64_t offset, const kvfs_buffer &memory, Owed &owed) const;
    nixl::Status write(uint64_t offset, const kvfs_buffer &memory) const;

  private:
    int64_t read_mount(uint64_t offset, const kvfs_buffer &memory) const;

    const int fd_;
    const bool owned_;
    uint64_t inode_ = 0;
};

/* Paths below the mount that a directory lies on. */
class Paths {
  public:
    explicit Paths(const std::string &directory) : directory_(directory) {}
    /* size, mode and mtime, from the block table where it knows them, else from the mount. Nothing: there is no such file. */
    nixl::Answer query(const Client &client, const std::string &path);

  private:
    /* The path below the mount's root; false: it cannot be told by looking at it. */
    bool below(const std::string &path, std::string *out);

    const std::string directory_;
    std::mutex lock_;
    std::string root_; /* with a slash at its end; empty until it is found */
};

#endif
