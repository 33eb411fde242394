/* Checks of sizes, names and strings. Every kernel sends valid ones, and libfuse and Python rely on that. A guest may send anything (I18). */
#include "fuse/fuse.h"

#define XATTR_NAME_SIZE_MAX 255

size_t body_minimum(uint32_t opcode) {
    switch (opcode) {
    case FUSE_INIT: return 16;
    case FUSE_LOOKUP: return 1;
    case FUSE_GETATTR: return sizeof(struct fuse_getattr_in);
    case FUSE_SETATTR: return sizeof(struct fuse_setattr_in);
    case FUSE_OPEN: return sizeof(struct fuse_open_in);
    case FUSE_CREATE: return sizeof(struct fuse_create_in) + 1;
    case FUSE_READ:
    case FUSE_READDIR:
    case FUSE_READDIRPLUS: return sizeof(struct fuse_read_in);
    case FUSE_WRITE: return sizeof(struct fuse_write_in);
    case FUSE_FLUSH: return sizeof(struct fuse_flush_in);
    case FUSE_RELEASE: return sizeof(struct fuse_release_in);
    case FUSE_FSYNC:
    case FUSE_FSYNCDIR: return sizeof(struct fuse_fsync_in);
    case FUSE_FALLOCATE: return sizeof(struct fuse_fallocate_in);
    case FUSE_OPENDIR: return sizeof(struct fuse_open_in);
    case FUSE_RELEASEDIR: return sizeof(struct fuse_release_in);
    case FUSE_MKNOD: return sizeof(struct fuse_mknod_in) + 1;
    case FUSE_MKDIR: return sizeof(struct fuse_mkdir_in) + 1;
    case FUSE_RENAME: return sizeof(struct fuse_rename_in) + 1;
    case FUSE_RENAME2: return sizeof(struct fuse_rename2_in) + 1;
    case FUSE_SETXATTR: return FUSE_COMPAT_SETXATTR_IN_SIZE + 1;
    case FUSE_GETXATTR:
    case FUSE_LISTXATTR: return sizeof(struct fuse_getxattr_in);
    case FUSE_ACCESS: return sizeof(struct fuse_access_in);
    default: return 0;
    }
}

/* A string that begins at *at and ends before size; *at is then behind it. Returns its length, or -EINVAL: it is empty, or does not end. */
static ssize_t string_check(const uint8_t *body, size_t size, size_t *at) {
    size_t length = *at < size ? strnlen((const char *)body + *at, size - *at) : 0;
    if (length == 0 || *at + length == size)
        return -EINVAL;
    *at += length + 1;
    return (ssize_t)length;
}

static int name_check(const uint8_t *body, size_t size, size_t *at) {
    const char *name = (const char *)body + *at;
    ssize_t length = string_check(body, size, at);
    if (length < 0)
        return (int)length;
    if (length > KVFS_NAME_MAX)
        return -ENAMETOOLONG;
    return memchr(name, '/', (size_t)length) || strcmp(name, ".") == 0 || strcmp(name, "..") == 0 ? -EINVAL : 0;
}

/* Checks names and strings. 0, -EINVAL, -ENAMETOOLONG, or -ERANGE for the name of an xattr. */
int strings_check(uint32_t opcode, const uint8_t *body, size_t size) {
    size_t at = 0;
    ssize_t length;
    switch (opcode) {
    case FUSE_LOOKUP:
    case FUSE_UNLINK:
    case FUSE_RMDIR: return name_check(body, size, &at);
    case FUSE_CREATE: at = sizeof(struct fuse_create_in); return name_check(body, size, &at);
    case FUSE_MKNOD: at = sizeof(struct fuse_mknod_in); return name_check(body, size, &at);
    case FUSE_MKDIR: at = sizeof(struct fuse_mkdir_in); return name_check(body, size, &at);
    case FUSE_RENAME:
    case FUSE_RENAME2: {
        at = opcode == FUSE_RENAME ? sizeof(struct fuse_rename_in) : sizeof(struct fuse_rename2_in);
        int r = name_check(body, size, &at);
        return r < 0 ? r : name_check(body, size, &at);
    }
    case FUSE_SYMLINK: {
        int r = name_check(body, size, &at);
        if (r < 0)
            return r;
        length = string_check(body, size, &at);
        return length < 0 ? (int)length : length >= 4096 ? -ENAMETOOLONG : 0;
    }
    case FUSE_SETXATTR: {
        struct fuse_setxattr_in set;
        memcpy(&set, body, FUSE_COMPAT_SETXATTR_IN_SIZE);
        at = FUSE_COMPAT_SETXATTR_IN_SIZE;
        length = string_check(body, size, &at);
        return length < 0 ? (int)length : length > XATTR_NAME_SIZE_MAX ? -ERANGE : set.size != size - at ? -EINVAL : 0;
    }
    case FUSE_GETXATTR:
    case FUSE_REMOVEXATTR:
        at = opcode == FUSE_GETXATTR ? sizeof(struct fuse_getxattr_in) : 0;
        length = string_check(body, size, &at);
        return length < 0 ? (int)length : length > XATTR_NAME_SIZE_MAX ? -ERANGE : 0;
    default: return 0;
    }
}
