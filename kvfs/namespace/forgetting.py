"""Forget all below a path, as rm -r would, without a request for each name: `kvfs rm`.

It walks in small steps, so that other requests are answered in between. A directory goes when it is empty. An end in
the middle leaves a tree with fewer names in it, and the next time ends it. Blocks that are stored there meanwhile are
removed too, while that takes few passes. Open handles keep reading their files. In a pod it removes what this node has;
directories that others have too stay.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import trio

from kvfs.errors import InvalidArgumentError, NotDirectoryError, NotEmptyError, NotFoundError
from kvfs.index.lmdb import LmdbIndex
from kvfs.namespace.files import Namespace
from kvfs.record import Inode, Kind
from kvfs.store.store import Store
from kvfs.types import NAME_MAX, ROOT_INODE, InodeNumber

# Names that are listed at once, and removed in one step: half a millisecond.
_LIST = 512
_STEP = 64
# A directory in which blocks are stored meanwhile is emptied so often.
_PASSES = 3
# So many changes may wait for the index; then a commit is waited for.
_PENDING_MAX = 1 << 13
# Before a directory that had more names is looked at for the last time: each that no commit has is looked at then.
_REMOVED_MANY = 1 << 10
# Names that are brought into memory ahead of removals one by one: half a millisecond.
NEXT = 128


@dataclass(slots=True)
class Forgotten:
    """Names that went. `open`: files of these that are open. `filled`: directories that stay, as something is stored
    there all the time; `shared`: directories that stay: other nodes of the pod have them too."""

    files: int = 0
    bytes: int = 0
    open: int = 0
    directories: int = 0
    filled: int = 0
    shared: int = 0


@dataclass(slots=True)
class _Directory:
    number: InodeNumber
    parent: InodeNumber
    name: bytes
    after: bytes = b""
    passes: int = 1
    stays: bool = False  # something below it does
    removed: int = 0


@dataclass(slots=True)
class Forgetting:
    """One run. `room`: waits while the journal of names is full."""

    namespace: Namespace
    store: Store
    room: Callable[[], Awaitable[None]]
    done: Forgotten = field(default_factory=Forgotten)

    async def forget(self, path: str, *, whole: bool = False) -> Forgotten:
        """`path` begins at the mount's root, which goes with `whole` alone: all but itself. NotFoundError.

        A file or a link goes alone. No link is followed.
        """
        top = self._find(path)
        if top.inode == ROOT_INODE and not whole:
            raise InvalidArgumentError("/: that is the whole pool")
        if top.kind != Kind.DIRECTORY:
            await self._remove_files(top.parent, [top.inode])
            return self.done
        left = [_Directory(top.inode, top.parent, top.name)]
        while left:
            here = left[-1]
            entries = self.store.index.list(here.number, here.after, _LIST)
            if not entries:
                if here.removed > _REMOVED_MANY:
                    await self.store.blocks.commit()
                left.pop()
                if again := self._end(here):
                    left.append(again)
                elif here.stays and left:
                    left[-1].stays = True
                continue
            here.after = entries[-1][0]
            here.removed += len(entries)
            self.store.index.keep_above(here.number)  # subscribers are told of whole paths
            for at in range(0, len(entries), _STEP):
                some = [number for _, number in entries[at : at + _STEP]]
                for directory in await self._remove_files(here.number, some):
                    left.append(_Directory(directory.inode, here.number, directory.name))
        return self.done

    def _find(self, path: str) -> Inode:
        found = self.namespace.get(ROOT_INODE)
        for name in filter(None, os.fsencode(path).split(b"/")):
            if name in (b".", b"..") or len(name) > NAME_MAX:
                raise InvalidArgumentError(f"{path}: {os.fsdecode(name[:40])!r} is no name in a directory")
            if found.kind != Kind.DIRECTORY:
                raise NotDirectoryError(f"{path}: {os.fsdecode(found.name)!r} is no directory")
            number = self.store.index.lookup(found.inode, name)
            inode = None if number is None else self.store.index.get(number)
            if inode is None:
                raise NotFoundError(f"{path}: no such file or directory in this pool")
            found = inode
        return found

    async def _remove_files(self, directory: InodeNumber, numbers: list[InodeNumber]) -> list[Inode]:
        """Remove these of a directory, and return those that are directories themselves."""
        index, blocks = self.store.index, self.store.blocks
        if index.changes_pending >= _PENDING_MAX:
            await blocks.commit()
        await self.room()
        index.bring(numbers)  # the index is read before the step, not within
        removed = blocks.remove_files(directory, numbers)
        self.done.files += removed.files
        self.done.bytes += removed.bytes
        self.done.open += removed.open
        await trio.lowlevel.checkpoint()
        directories: list[Inode] = []
        for number in removed.left:
            inode = index.get(number)
            if inode is None or inode.nameless or inode.parent != directory:
                continue
            if inode.kind == Kind.DIRECTORY:
                directories.append(inode)
                continue
            self._remove_one(inode)
            await trio.lowlevel.checkpoint()
        return directories

    def _remove_one(self, inode: Inode) -> None:
        """What is pinned is counted here, and what is not in memory is brought."""
        try:
            self.namespace.unlink(inode.parent, inode.name)
        except NotFoundError:
            return
        self.store.blocks.untell(inode.parent, inode.name)
        self.done.files += 1
        self.done.bytes += inode.size if inode.sealed else 0
        still = self.store.index.get(inode.inode)
        self.done.open += still is not None

    def _end(self, here: _Directory) -> _Directory | None:
        """Nothing was left in it: it goes. Returns it if it is to be looked at again."""
        if here.number == ROOT_INODE:
            return None
        if here.stays:
            return None
        try:
            self.namespace.rmdir(here.parent, here.name)
        except NotEmptyError:
            if self.store.index.is_empty(here.number):
                self.done.shared += 1
            elif here.passes < _PASSES:
                return _Directory(here.number, here.parent, here.name, passes=here.passes + 1)
            else:
                self.done.filled += 1
            here.stays = True
        except NotFoundError:
            pass
        else:
            self.done.directories += 1
            self.store.blocks.untell(here.parent, here.name)
        return None


class NextNames:
    """Names are removed or renamed one by one, in their order, as by `rm -r`. The next ones of the same directory come
    into memory, where the data plane changes them without Python. In no order nothing comes: it would be in vain."""

    def __init__(self, index: LmdbIndex) -> None:
        self._index, self._next = index, (0, b"")

    def bring(self, parent: InodeNumber, name: bytes) -> None:
        """This name is about to be changed in Python: it is not in memory."""
        in_order = self._next == (parent, name)
        ahead = self._index.list_stored(parent, name, NEXT + 1 if in_order else 1)
        if in_order:
            self._index.bring([number for _, number in ahead[:NEXT]])
        self._next = (int(parent), ahead[-1][0] if ahead else b"")
