"""A plane's mount that another process keeps for the next daemon: fuse/held.c, content/written.c, content/opens.c."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from typing import Any

from kvfs._native import ffi, lib
from kvfs.errors import KvfsError

_WHY = {
    errno.EOPNOTSUPP: "Linux 6.9 is needed; or it was mounted without exports, and this daemon has some",
}
# Of what an earlier daemon left.
_UNKNOWN = {
    errno.EBADMSG: "that is none: its size or its first bytes are of nothing that kvfs makes",
    errno.EINVAL: "with numbers that cannot be; or this kernel (before Linux 6.9) does not send requests again",
    errno.EPROTO: "with flags that this build does not know: start the build that left it",
}


class PartError(KvfsError):
    """A part of a mount that is held, which this build cannot serve. `known`: the oldest and the newest version that it
    can."""

    def __init__(self, text: str, known: tuple[int, int]) -> None:
        super().__init__(text)
        self.known = known


class HeldMount:
    """Of one plane."""

    def __init__(self, plane: Any) -> None:
        """plane: a struct kvfs_plane *, which lives while calls are made."""
        self._plane = plane

    def begin(self, written: int) -> None:
        """Another process keeps the mount. `written`: memory of written_make(), told which inodes are open for writing.
        Before the mount is served."""
        _check(lib.kvfs_fuse_hold(self._plane, written))

    def keep_opens(self, opens: int) -> None:
        """`opens`: memory of opens_make(), which gets the open files. The handles that earlier daemons gave out exist
        again. Behind begin(), before any block may go."""
        _check(lib.kvfs_opens_keep(self._plane, opens))

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
        """Whether the mount may be bound with an idmapping: it was made so, by any daemon."""
        return bool(lib.kvfs_fuse_idmap(self._plane))

    def leave(self, timeout_ms: int) -> None:
        """Answer what is under way, and end the transport; the mount waits for the next daemon."""
        lib.kvfs_fuse_leave(self._plane, timeout_ms)


def check_state(state: bytes, descriptors: int) -> int:
    """The version of an earlier daemon's words as state(). KvfsError: this build cannot serve it. As the others it
    changes nothing."""
    return _known("an answer to INIT", lambda out: lib.kvfs_held_check(state, len(state), descriptors, out))


def check_written(fd: int) -> int:
    """The same of a list of written inodes."""
    return _known("a list of written inodes", lambda out: lib.kvfs_written_check(fd, out))


def check_opens(fd: int) -> int:
    """The same of a list of open handles."""
    return _known("a list of open handles", lambda out: lib.kvfs_opens_check(fd, out))


def check_journal(fd: int) -> int:
    """The same of a journal of names."""
    return _known("a journal of names", lambda out: lib.kvfs_journal_check(fd, out))


def _known(what: str, check: Callable[[Any], int]) -> int:
    versions = ffi.new("struct kvfs_versions *")
    result = check(versions)
    found, oldest, newest = int(versions.found), int(versions.oldest), int(versions.newest)
    if result == -errno.EPROTONOSUPPORT:
        known = f"version {newest}" if oldest == newest else f"versions {oldest} to {newest}"
        why = f"{what} of version {found}, and this build knows {known}: start the build that left it"
        raise PartError(why, (oldest, newest))
    if result < 0:
        raise PartError(f"{what} {_UNKNOWN.get(-result, os.strerror(-result))}", (oldest, newest))
    return found


def opens_make() -> int:
    """Memory for a list of the handles by which is read. The descriptor is the caller's."""
    return _check(lib.kvfs_opens_make())


def written_make() -> int:
    """Memory for a list of the inodes that are open for writing. The descriptor is the caller's."""
    return _check(lib.kvfs_written_make())


def _check(result: int) -> int:
    if result < 0:
        error = KvfsError(f"the mount that is held: {_WHY.get(-result, os.strerror(-result))}")
        error.errno = -result
        raise error
    return result
