"""A plane's mount that another process keeps for the next daemon: fuse/held.c and content/written.c."""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Sequence
from typing import Any

from kvfs._native import ffi, lib
from kvfs.errors import KvfsError

_WHY = {
    errno.EPROTONOSUPPORT: "another build of kvfs left it, which this one does not understand: start that build",
    errno.EBADMSG: "its list of the inodes that are open for writing is none",
    errno.EINVAL: "its numbers cannot be; or this kernel (before Linux 6.9) does not send requests again",
    errno.EOPNOTSUPP: "Linux 6.9 is needed; or it was mounted without exports, and this daemon has some",
}


_NUMBER, _HEAD = struct.Struct("=I"), struct.Struct("=QI")


class HeldMount:
    """Of one plane."""

    def __init__(self, plane: Any) -> None:
        """plane: a struct kvfs_plane *, which lives as long as calls are made."""
        self._plane = plane

    def begin(self, written: int) -> None:
        """Another process keeps the mount. `written`: memory of written_make(), told which inodes are open for writing.
        Before the mount is served."""
        _check(lib.kvfs_fuse_hold(self._plane, written))

    def state(self) -> tuple[list[int], bytes]:
        """The mount's descriptors, which stay the plane's, and what its kernel and the daemon have agreed on."""
        fds, held = ffi.new("int[]", lib.KVFS_HELD_DESCRIPTORS_MAX), ffi.new("struct kvfs_held *")
        count = _check(lib.kvfs_fuse_held(self._plane, fds, len(fds), held))
        return ffi.unpack(fds, count), bytes(ffi.buffer(held))

    def take(self, fds: Sequence[int], state: bytes) -> None:
        """Serve the mount of an earlier daemon, of which this is the state(). The descriptors are the plane's."""
        held = ffi.new("struct kvfs_held *")
        if len(state) != ffi.sizeof(held[0]):
            raise KvfsError(f"the mount that is held: a state of {len(state)} bytes; {ffi.sizeof(held[0])} are known")
        ffi.memmove(held, state, len(state))
        _check(lib.kvfs_fuse_take(self._plane, list(fds), len(fds), held))

    def idmap(self) -> bool:
        """Whether the mount may be bound with an idmapping: it was made so, by whatever daemon."""
        return bool(lib.kvfs_fuse_idmap(self._plane))

    def leave(self, timeout_ms: int) -> None:
        """Answer what is under way, and end the transport; the mount waits for the next daemon."""
        lib.kvfs_fuse_leave(self._plane, timeout_ms)


def check_versions(mountpoint: str, state: bytes, written: int, journal: int | None) -> None:
    """KvfsError if an earlier daemon left anything of a version that this build does not know. Before anything is
    changed: the mount then waits for the right build, which takes it over with its journal."""
    parts = [
        ("an answer to INIT", _NUMBER.unpack_from(state)[0] if len(state) >= _NUMBER.size else 0,
         lib.KVFS_HELD_VERSION),
        ("a list of written inodes", _version_of(written), lib.KVFS_WRITTEN_VERSION),
    ]  # fmt: skip
    if journal is not None:
        parts.append(("a journal of names", _version_of(journal), lib.KVFS_JOURNAL_VERSION))
    for what, found, known in parts:
        if found != known:
            raise KvfsError(
                f"{mountpoint}: the mount that is held has {what} of version {found}, and this build knows version "
                f"{known}: start the build that left it, which takes it over, or end the mount with kvfs umount"
            )


def _version_of(fd: int) -> int:
    """Of memory that begins with a magic number and a version; 0: it is too short for that."""
    head = os.pread(fd, _HEAD.size, 0)
    return int(_HEAD.unpack(head)[1]) if len(head) == _HEAD.size else 0


def written_make() -> int:
    """Memory for a list of the inodes that are open for writing. The descriptor is the caller's."""
    return _check(lib.kvfs_written_make())


def _check(result: int) -> int:
    if result < 0:
        error = KvfsError(f"the mount that is held: {_WHY.get(-result, os.strerror(-result))}")
        error.errno = -result
        raise error
    return result
