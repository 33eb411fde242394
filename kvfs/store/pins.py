"""Pins: files and directories that eviction leaves alone. A directory's pin holds for everything below it.

The pinned inodes are meta values of the index, so they are known after a restart without reading every inode.
"""

from __future__ import annotations

import struct

import trio

from kvfs.index.interface import Index
from kvfs.store.format import FLAGS_OFFSET, PARENT_OFFSET
from kvfs.store.segments import usage
from kvfs.types import PAGE_SIZE, ROOT_INODE, InodeFlags, InodeNumber, Kind

_PREFIX = b"pin:"
_KEY = struct.Struct(">Q")
_PARENT = struct.Struct("<Q")
_PINNED = int(InodeFlags.PINNED)
# A path has at most this many directories here: longer than PATH_MAX allows.
_DEPTH_MAX = 4096
_BATCH = 512


class Pins:
    def __init__(self, index: Index) -> None:
        self._index = index
        self._pinned = {_KEY.unpack(key[len(_PREFIX) :])[0] for key, _ in index.meta_items(_PREFIX)}
        self.pages = 0
        self.changed = trio.Event()

    def __bool__(self) -> bool:
        return bool(self._pinned)

    def add(self, inode: int) -> None:
        self._pinned.add(inode)
        self._index.meta_put(_PREFIX + _KEY.pack(inode), b"")
        self.changed.set()

    def remove(self, inode: int) -> None:
        if inode in self._pinned:
            self._pinned.discard(inode)
            self._index.meta_put(_PREFIX + _KEY.pack(inode), None)
            self.changed.set()

    def holds(self, record: bytes) -> bool:
        """Whether this inode, or a directory above it, is pinned."""
        if not self._pinned:
            return False
        for _ in range(_DEPTH_MAX):
            if record[FLAGS_OFFSET] & _PINNED:
                return True
            (parent,) = _PARENT.unpack_from(record, PARENT_OFFSET)
            if parent in self._pinned:
                return True
            above = self._index.raw(parent)
            if above is None or parent == ROOT_INODE:
                return False
            record = above
        return False

    async def count(self) -> None:
        """Bring `pages`, what everything pinned takes, up to date. Walks the pinned directories."""
        pages = 0
        seen: set[int] = set()
        directories: list[InodeNumber] = []
        for number in list(self._pinned):
            inode = self._index.get(InodeNumber(number))
            if inode is None:
                if self._index.hidden(number) is None:
                    self.remove(number)
            elif inode.kind == Kind.DIRECTORY:
                directories.append(inode.inode)
            else:
                pages += sum(usage(inode).values())
        while directories:
            directory = directories.pop()
            if directory in seen:
                continue
            seen.add(directory)
            after = b""
            while entries := self._index.list(directory, after, _BATCH):
                for _, number in entries:
                    inode = self._index.get(number)
                    if inode is None or int(number) in self._pinned:
                        continue
                    if inode.kind == Kind.DIRECTORY:
                        directories.append(number)
                    else:
                        pages += sum(usage(inode).values())
                after = entries[-1][0]
                await trio.lowlevel.checkpoint()
        self.pages = pages

    @property
    def bytes(self) -> int:
        return self.pages * PAGE_SIZE
