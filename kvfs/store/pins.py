"""Pins: files and directories that eviction leaves alone. A directory's pin holds for everything below it.

The pinned inodes are meta values of the index, so a restart need not read every inode to know them. The value is the
user. Pins of a user beyond the share hold no longer, until enough of them has gone.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterator

import trio

from kvfs.index.interface import Index
from kvfs.names import Leave, Names
from kvfs.record import FLAGS_OFFSET, NUMBER_OFFSET, RECORD_NUMBERS, Inode, InodeFlags, Kind
from kvfs.store.segment import usage
from kvfs.store.shares import PINNED, ROOT, Shares
from kvfs.types import PAGE_SIZE, ROOT_INODE, InodeNumber

_PREFIX = b"pin:"
_KEY = struct.Struct(">Q")
_USER = struct.Struct("<I")
_PINNED = int(InodeFlags.PINNED)
# A path has at most this many directories here: longer than PATH_MAX allows.
_DEPTH_MAX = 4096
_BATCH = 512


class Pins:
    def __init__(self, index: Index, shares: Shares, names: Names) -> None:
        self._index, self._shares, self._names = index, shares, names
        # By inode: the user to whom the pin is charged.
        self._pinned: dict[int, int] = {}
        for key, value in index.meta_items(_PREFIX):
            inode = _KEY.unpack(key[len(_PREFIX) :])[0]
            self._pinned[inode] = _USER.unpack(value)[0] if len(value) == _USER.size else self._owner(inode)
        self.pages = 0
        self.changed = trio.Event()
        self._names.leave(Leave.PINS, bool(self._pinned))

    def __bool__(self) -> bool:
        return bool(self._pinned)

    def numbers(self) -> list[int]:
        """The inodes that are pinned themselves."""
        return sorted(self._pinned)

    def _owner(self, number: int) -> int:
        inode = self._index.get(InodeNumber(number))
        return ROOT if inode is None else inode.uid

    def add(self, inode: int, user: int | None = None) -> None:
        """user None: the owner of the inode."""
        user = self._owner(inode) if user is None else user
        self._pinned[inode] = user
        self._names.leave(Leave.PINS, True)
        self._index.meta_put(_PREFIX + _KEY.pack(inode), _USER.pack(user))
        self.changed.set()

    def remove(self, inode: int) -> None:
        if self._pinned.pop(inode, None) is not None:
            self._names.leave(Leave.PINS, bool(self._pinned))
            self._index.meta_put(_PREFIX + _KEY.pack(inode), None)
            self.changed.set()

    def follow(self, inode: Inode) -> None:
        """Recovery found this inode on the devices, pinned or not: the last commit may not know of that."""
        if (InodeFlags.PINNED in inode.flags) == (inode.inode in self._pinned):
            return
        if InodeFlags.PINNED in inode.flags:
            self.add(inode.inode)
        else:
            self.remove(inode.inode)

    def holds(self, record: bytes) -> bool:
        """Whether this inode, or a directory above it, is pinned by a user within the share."""
        return any(self._shares.keeps(user) for user in self._users(record))

    def charged(self, number: InodeNumber) -> int | None:
        """The user to whom the pin of this very inode is charged; None: it has none."""
        return self._pinned.get(number)

    def user(self, record: bytes) -> int | None:
        """The user to whom this inode is charged as pinned; None: it is not pinned."""
        return next(self._users(record), None)

    def _users(self, record: bytes) -> Iterator[int]:
        """The users who have pinned the inode or a directory above it, the nearest first."""
        if not self._pinned:
            return
        for _ in range(_DEPTH_MAX):
            number, parent = RECORD_NUMBERS.unpack_from(record, NUMBER_OFFSET)
            user = self._pinned.get(number)
            if user is not None:
                yield user
            elif record[FLAGS_OFFSET] & _PINNED:  # a rebuild has not added it yet
                yield ROOT
            if number == ROOT_INODE:
                return
            above = self._index.raw(parent)
            if above is None:
                # The directory is not known yet; its pin may be.
                user = self._pinned.get(parent)
                if user is not None:
                    yield user
                return
            record = above

    async def pages_of(self, number: InodeNumber) -> int:
        """Pages that a pin of this inode would hold, and others do not."""
        inode = self._index.get(number)
        if inode is None:
            return 0
        return await self._below(number) if inode.kind == Kind.DIRECTORY else sum(usage(inode).values())

    async def count(self) -> None:
        """Count the pages of everything pinned anew, in all and by user. Walks the pinned directories."""
        pages: Counter[int] = Counter()
        for number, user in list(self._pinned.items()):
            inode = self._index.get(InodeNumber(number))
            if inode is not None:
                pages[user] += await self.pages_of(inode.inode)
            elif self._index.hidden(number) is None:
                self.remove(number)
        self.pages = pages.total()
        self._shares.replace(PINNED, {user: count * PAGE_SIZE for user, count in pages.items()})

    async def _below(self, top: InodeNumber) -> int:
        """Pages of all below a directory, but of inodes with a pin of their own."""
        pages = 0
        directories = [top]
        while directories:
            directory = directories.pop()
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
        return pages

    @property
    def bytes(self) -> int:
        return self.pages * PAGE_SIZE
