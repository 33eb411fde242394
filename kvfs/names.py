"""A handle to the names in memory (native/include/kvfs_names.h): typed calls.

Here is each inode whose record the index does not have yet. An inode that is not here is as the index says.
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import cast

from kvfs._native import ffi, lib
from kvfs.errors import KvfsError

_CAPACITY = 64 << 10
_CHANGE = struct.Struct("<QII")
_LIST_MAX = 4096


class NamesError(KvfsError):
    """There is no memory for a name."""


class MissingError(KvfsError):
    """The inode is not in memory: load it first."""


class Names:
    """The names of one pool. `with names:` is a step: meanwhile no thread of the data plane changes a name."""

    def __init__(self, names: object | None = None) -> None:
        """`names`: those of a data plane, which ends them; None makes own ones."""
        self._own = names is None
        if names is None:
            out = ffi.new("struct kvfs_names **")
            if lib.kvfs_names_create(out) < 0:
                raise NamesError("no memory for names")
            names = out[0]
        self._names = names
        self._record = ffi.new("uint8_t[]", _CAPACITY)
        self._number = ffi.new("uint64_t *")

    def close(self) -> None:
        if self._own:
            lib.kvfs_names_destroy(self._names)
            self._own = False

    def __enter__(self) -> None:
        lib.kvfs_names_begin(self._names)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        lib.kvfs_names_end(self._names)

    # ---- reading ----

    def get(self, inode: int) -> bytes | None:
        """The inode's record, b"" if it is gone, None if it is as the index says."""
        out, capacity = self._record, _CAPACITY
        while (size := lib.kvfs_names_get(self._names, inode, out, capacity)) > capacity:
            capacity = size
            out = ffi.new("uint8_t[]", capacity)
        return None if size < 0 else cast(bytes, ffi.buffer(out, size)[:])

    def find(self, parent: int, name: bytes) -> int | None:
        """The inode that the name leads to; 0 for a name that is gone, None for one that is as the index says."""
        if not lib.kvfs_names_find(self._names, parent, name, len(name), self._number):
            return None
        return cast(int, self._number[0])

    def listing(self, parent: int, after: bytes, limit: int) -> list[tuple[bytes, int]]:
        """Changed names of a directory greater than `after`, in byte order, with their inodes; 0 for a name that is
        gone."""
        out = ffi.new("struct kvfs_name[]", limit)
        count = lib.kvfs_names_list(self._names, parent, after, len(after), out, limit)
        if count < 0:
            raise NamesError(f"names of directory {parent}: {os.strerror(-count)}")
        return [(ffi.unpack(out[i].name, out[i].size), out[i].inode) for i in range(count)]

    def changed(self) -> Iterator[tuple[int, bytes, int]]:
        """Every changed name: parent, name, inode (0: gone)."""
        for parent in self._numbers(lambda out, capacity: lib.kvfs_names_parents(self._names, out, capacity)):
            after = b""
            while found := self.listing(parent, after, _LIST_MAX):
                yield from ((parent, name, inode) for name, inode in found)
                after = found[-1][0]

    def members(self, segment: int, stored: list[int]) -> list[int]:
        """The inodes of a segment: changed ones, and those of `stored`, ascending, that are still there. Unordered."""
        known = ffi.new("uint64_t[]", stored)
        return self._numbers(
            lambda out, capacity: lib.kvfs_names_members(self._names, segment, known, len(stored), out, capacity),
            len(stored) + 64,
        )

    def group(self, group: bytes) -> list[int]:
        """Changed inodes whose attribute names this group; b"": any group."""
        return self._numbers(lambda out, capacity: lib.kvfs_names_group(self._names, group, len(group), out, capacity))

    def volatile(self) -> list[int]:
        """Inodes that no commit writes."""
        return self._numbers(lambda out, capacity: lib.kvfs_names_volatile(self._names, out, capacity))

    @staticmethod
    def _numbers(ask: Callable[[object, int], int], capacity: int = 256) -> list[int]:
        while True:
            out = ffi.new("uint64_t[]", capacity)
            count = ask(out, capacity)
            if count <= capacity:
                return cast(list[int], ffi.unpack(out, count)) if count else []
            capacity = 2 * count

    # ---- changing ----

    def load(self, record: bytes) -> None:
        """Take in a record as the index has it."""
        if lib.kvfs_names_load(self._names, record) < 0:
            raise NamesError("no memory for a record")

    def put(self, record: bytes, known: bool) -> None:
        """Insert or change. `known`: the index may have an earlier record; MissingError: that is to be loaded first."""
        self._check(lib.kvfs_names_put(self._names, record, known))

    def remove(self, inode: int) -> None:
        """MissingError: its record is to be loaded first."""
        self._check(lib.kvfs_names_remove(self._names, inode))

    @staticmethod
    def _check(result: int) -> None:
        if result == -errno.ENOENT:
            raise MissingError("not in memory")
        if result < 0:
            raise NamesError("no memory for a record")

    def forget(self) -> None:
        """Forget all that is as the index has it."""
        lib.kvfs_names_forget(self._names)

    # ---- committing ----

    def commit_begin(self) -> list[tuple[int, bytes, bool]]:
        """Changes since the last commit: inode, record (b"": the index is to forget it), and whether the index has
        never had it."""
        size = ffi.new("uint64_t *")
        begun = lib.kvfs_names_commit_begin(self._names, size)
        if begun == ffi.NULL:
            raise NamesError("no memory for a commit")
        data = ffi.buffer(begun, size[0])[:] if size[0] else b""
        changes: list[tuple[int, bytes, bool]] = []
        at = 0
        while at < len(data):
            inode, record_size, is_new = _CHANGE.unpack_from(data, at)
            at += _CHANGE.size
            changes.append((inode, data[at : at + record_size], bool(is_new)))
            at += record_size
        return changes

    def commit_end(self, ok: bool) -> None:
        """In the step in which the index begins to show what was committed."""
        lib.kvfs_names_commit_end(self._names, int(ok))

    @property
    def pending(self) -> int:
        """Changes that no commit has begun to write."""
        return cast(int, lib.kvfs_names_pending(self._names))
