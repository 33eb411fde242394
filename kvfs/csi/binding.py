"""A program for one request that touches mounts. Such a call may never return where a mount does not answer.

It reads the request as JSON on stdin, and writes the answer so: {"code": a gRPC code or "OK", "message": words, ...}.
`worker.py` starts it as a file, without site-packages, and kills it at the deadline. So it imports the standard library
alone. Every path from outside is opened by openat2 below a directory that is trusted, and no link in it is followed.
Mounts move by descriptors (open_tree, move_mount; Linux 5.12 for mount_setattr): a path could change in between.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import stat
import sys
from dataclasses import dataclass
from typing import Any, NoReturn

_SYS_OPEN_TREE, _SYS_MOVE_MOUNT, _SYS_OPENAT2, _SYS_MOUNT_SETATTR = 428, 429, 437, 442  # one number on every machine
_OPEN_TREE_CLONE, _OPEN_TREE_CLOEXEC = 1, os.O_CLOEXEC
_AT_EMPTY_PATH = 0x1000
_MOVE_MOUNT_EMPTY_PATHS = 0x04 | 0x40
_RESOLVE_NO_XDEV, _RESOLVE_NO_SYMLINKS, _RESOLVE_BENEATH = 0x01, 0x04, 0x08
_ATTRIBUTES = {"ro": 0x1, "nosuid": 0x2, "nodev": 0x4, "noexec": 0x8}
_MNT_DETACH, _UMOUNT_NOFOLLOW = 2, 8
# Mounts over one another on one target: more of them is somebody's loop.
_STACK_MOST = 16

libc = ctypes.CDLL(None, use_errno=True)


class Refusal(Exception):
    """An answer that is an error: a gRPC code's name, and words."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def refuse(code: str, message: str) -> NoReturn:
    raise Refusal(code, message)


def _system(number: int, what: str, *arguments: Any) -> int:
    found = int(libc.syscall(ctypes.c_long(number), *arguments))
    if found < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{what}: {os.strerror(error)}")
    return found


def open_below(directory: int, name: str, flags: int, resolve: int = 0) -> int:
    """Open a name below a directory, through no symbolic link and not out of it."""
    how = (ctypes.c_uint64 * 3)(flags | os.O_CLOEXEC, 0, _RESOLVE_NO_SYMLINKS | _RESOLVE_BENEATH | resolve)
    return _system(
        _SYS_OPENAT2, f"open {name}", ctypes.c_int(directory), os.fsencode(name or "."), how, ctypes.c_size_t(24)
    )


@dataclass(frozen=True)
class Mount:
    """A line of /proc/self/mountinfo."""

    number: int
    device: str
    root: str
    kind: str
    source: str
    options: frozenset[str]


def mount_of(descriptor: int) -> Mount:
    """The mount that an O_PATH descriptor is on. No file system is asked."""
    with open(f"/proc/self/fdinfo/{descriptor}") as lines:
        number = next(int(line.split()[1]) for line in lines if line.startswith("mnt_id:"))
    with open("/proc/self/mountinfo") as lines:
        for line in lines:
            left, _, right = line.partition(" - ")
            words, more = left.split(" "), right.rstrip("\n").split(" ")
            if int(words[0]) == number:
                return Mount(number, words[2], words[3], more[0], more[1], frozenset(words[5].split(",")))
    refuse("UNAVAILABLE", f"mount {number} went while it was looked for in /proc/self/mountinfo")


def pool_mount(path: str) -> tuple[int, Mount]:
    """A descriptor of the node's kvfs mount, which has answered."""
    try:
        root = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        refuse("UNAVAILABLE", f"{path}, the node's kvfs mount: {error.strerror}")
    mount = mount_of(root)
    if mount.kind != "fuse.kvfs":
        refuse("UNAVAILABLE", f"{path} is no kvfs mount, but {mount.kind}: is the kvfs daemon of this node up?")
    try:
        os.statvfs(f"/proc/self/fd/{root}")
    except OSError as error:
        refuse("UNAVAILABLE", f"{path}: the kvfs mount does not answer: {error.strerror}")
    return root, mount


def target_parent(kubelet: str, target: str) -> tuple[int, str]:
    """The directory of a target below kubelet's, and the target's name in it."""
    prefix = kubelet.rstrip("/") + "/"
    inside = target.removeprefix(prefix)
    parts = inside.split("/")
    if not target.startswith(prefix) or any(part in ("", ".", "..") for part in parts) or "\0" in target:
        refuse("INVALID_ARGUMENT", f"target path {target!r} is not below {prefix} in its plain form")
    try:
        above = os.open(kubelet, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        parent = open_below(above, "/".join(parts[:-1]), os.O_PATH | os.O_DIRECTORY)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EXDEV):
            refuse("INVALID_ARGUMENT", f"target path {target!r} leads through a symbolic link")
        if error.errno == errno.ENAMETOOLONG:
            refuse("INVALID_ARGUMENT", f"target path of {len(target)} characters: {error.strerror}")
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            refuse("NOT_FOUND", f"the directory of target path {target!r}: {os.strerror(error.errno)}")
        raise
    os.close(above)
    return parent, parts[-1]


def open_target(parent: int, name: str, target: str) -> int:
    """An O_PATH descriptor of the target: the topmost mount there, or the directory."""
    found = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    # A link, unlike a mount that is dead, is on the parent's mount: only then may its type be asked.
    if mount_of(found).number == mount_of(parent).number:
        kind = os.fstat(found).st_mode
        if not stat.S_ISDIR(kind):
            os.close(found)
            what = "a symbolic link" if stat.S_ISLNK(kind) else "no directory"
            refuse("FAILED_PRECONDITION", f"target path {target!r} is {what}: it is left as it is")
    return found


def unmount(parent: int, name: str, target: str) -> None:
    path = f"/proc/self/fd/{parent}/{name}"
    if libc.umount2(os.fsencode(path), _MNT_DETACH | _UMOUNT_NOFOLLOW):
        error = ctypes.get_errno()
        refuse("INTERNAL", f"unmounting {target!r}: {os.strerror(error)}")


def namespace_directory(root: int, namespace: str) -> int:
    """The directory of a namespace at the mount's root, made if it is new. As an emptyDir it is open to every user of
    the pods that it is bound into; others do not reach it."""
    flags = os.O_RDONLY | os.O_DIRECTORY
    try:
        top = open_below(root, "", flags, _RESOLVE_NO_XDEV)
        try:
            os.mkdir(namespace, 0o777, dir_fd=top)
        except FileExistsError:
            return open_below(top, namespace, flags | os.O_NOFOLLOW, _RESOLVE_NO_XDEV)
        found = open_below(top, namespace, flags | os.O_NOFOLLOW, _RESOLVE_NO_XDEV)
        os.fchmod(found, 0o777)
        return found
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            refuse("FAILED_PRECONDITION", f"{namespace!r} in the kvfs mount is no directory: {error.strerror}")
        code = "UNAVAILABLE" if error.errno in (errno.ENOTCONN, errno.EIO, errno.ECONNABORTED) else "INTERNAL"
        refuse(code, f"the directory {namespace!r} of the kvfs mount: {error.strerror}")


def is_dead(descriptor: int) -> bool:
    try:
        os.statvfs(f"/proc/self/fd/{descriptor}")
    except OSError as error:
        return error.errno in (errno.ENOTCONN, errno.ECONNABORTED)
    return False


def is_published(there: Mount, pool: Mount, namespace: str, read_only: bool, target: str) -> bool:
    """Whether the mount at a target is the one asked for; False if it is stale and goes. Raises if it is another's."""
    if there.kind != "fuse.kvfs":
        refuse("FAILED_PRECONDITION", f"target path {target!r} is occupied: {there.kind} is mounted there")
    if there.device != pool.device:
        return False
    wanted = f"{pool.root.rstrip('/')}/{namespace}"
    if there.root == wanted + "//deleted":
        return False
    if there.root != wanted:
        refuse("ALREADY_EXISTS", f"target path {target!r} has the volume {there.root!r}, asked was {wanted!r}")
    if ("ro" in there.options) != read_only:
        is_now = "read-only" if "ro" in there.options else "writable"
        refuse("ALREADY_EXISTS", f"target path {target!r} is published already, and {is_now}")
    return True


def clear_target(parent: int, name: str, target: str, pool: Mount, namespace: str, read_only: bool) -> int | None:
    """The empty directory at the target, without a mount; None if what is asked for is mounted there."""
    for _ in range(_STACK_MOST):
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, 0o750, dir_fd=parent)
        found = open_target(parent, name, target)
        there = mount_of(found)
        if there.number == mount_of(parent).number:
            if inside := os.listdir(f"/proc/self/fd/{found}"):
                refuse("FAILED_PRECONDITION", f"target path {target!r} is not empty: it has {len(inside)} entries")
            return found
        if is_published(there, pool, namespace, read_only, target):
            return None
        # Of another connection: one that ended is replaced, one that lives is another pool's.
        if there.device != pool.device and not is_dead(found):
            refuse("FAILED_PRECONDITION", f"target path {target!r} belongs to the kvfs mount of {there.source!r}, which"
                   f" answers on another connection ({there.device}, here {pool.device})")  # fmt: skip
        os.close(found)
        unmount(parent, name, target)
    refuse("FAILED_PRECONDITION", f"target path {target!r} has more than {_STACK_MOST} mounts over one another")


def publish(request: dict[str, Any]) -> dict[str, Any]:
    namespace, target, flags = request["namespace"], request["target"], set(request["flags"])
    parent, name = target_parent(request["kubelet"], target)
    root, pool = pool_mount(request["mount"])
    found = clear_target(parent, name, target, pool, namespace, "ro" in flags)
    if found is None:
        return {}
    source = namespace_directory(root, namespace)
    tree = _system(
        _SYS_OPEN_TREE, f"open_tree {namespace}", ctypes.c_int(source), b"",
        ctypes.c_uint(_OPEN_TREE_CLONE | _OPEN_TREE_CLOEXEC | _AT_EMPTY_PATH),
    )  # fmt: skip
    bits = sum(_ATTRIBUTES[flag] for flag in flags | {"nosuid", "nodev"})
    attributes = (ctypes.c_uint64 * 4)(bits, 0, 0, 0)
    _system(
        _SYS_MOUNT_SETATTR, f"mount_setattr {','.join(sorted(flags))}", ctypes.c_int(tree), b"",
        ctypes.c_uint(_AT_EMPTY_PATH), attributes, ctypes.c_size_t(32),
    )  # fmt: skip
    _system(
        _SYS_MOVE_MOUNT, f"move_mount to {target}", ctypes.c_int(tree), b"", ctypes.c_int(found), b"",
        ctypes.c_uint(_MOVE_MOUNT_EMPTY_PATHS),
    )  # fmt: skip
    return {}


def unpublish(request: dict[str, Any]) -> dict[str, Any]:
    target = request["target"]
    try:
        parent, name = target_parent(request["kubelet"], target)
    except Refusal as refusal:
        if refusal.code == "NOT_FOUND":
            return {}
        raise
    for _ in range(_STACK_MOST):
        try:
            found = open_target(parent, name, target)
        except FileNotFoundError:
            return {}
        there = mount_of(found)
        os.close(found)
        if there.number == mount_of(parent).number:
            try:
                os.rmdir(name, dir_fd=parent)
            except OSError as error:
                refuse("FAILED_PRECONDITION", f"target path {target!r} stays: {error.strerror}")
            return {}
        if there.kind != "fuse.kvfs":
            refuse("FAILED_PRECONDITION", f"target path {target!r} has no kvfs volume: {there.kind} is mounted there")
        unmount(parent, name, target)
    refuse("FAILED_PRECONDITION", f"target path {target!r} has more than {_STACK_MOST} mounts over one another")


def statistics(request: dict[str, Any]) -> dict[str, Any]:
    path = request["target"]
    parent, name = target_parent(request["kubelet"], path)
    try:
        found = open_target(parent, name, path)
    except FileNotFoundError:
        refuse("NOT_FOUND", f"volume path {path!r} is not there")
    if mount_of(found).kind != "fuse.kvfs":
        refuse("NOT_FOUND", f"volume path {path!r} has no kvfs volume")
    try:
        now = os.statvfs(f"/proc/self/fd/{found}")
    except OSError as error:
        return {"abnormal": f"the volume does not answer: {error.strerror}; a new pod gets the new mount"}
    size, free = now.f_blocks * now.f_frsize, now.f_bavail * now.f_frsize
    return {"bytes": [free, size, size - free], "inodes": [now.f_favail, now.f_files, now.f_files - now.f_favail]}


def probe(request: dict[str, Any]) -> dict[str, Any]:
    pool_mount(request["mount"])
    return {}


VERBS = {"publish": publish, "unpublish": unpublish, "statistics": statistics, "probe": probe}


def main() -> None:
    os.umask(0)
    request = json.load(sys.stdin)
    try:
        answer = {"code": "OK", **VERBS[request["verb"]](request)}
    except Refusal as refusal:
        answer = {"code": refusal.code, "message": str(refusal)}
    except OSError as error:
        hint = ""
        if error.errno == errno.EPERM:
            hint = " (mounting needs CAP_SYS_ADMIN)"
        elif error.errno == errno.ENOSYS:
            hint = " (Linux 5.12 or newer is needed)"
        answer = {"code": "INTERNAL", "message": f"{request.get('target', request['mount'])!r}: {error}{hint}"}
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
