"""Writing blocks: seals of what is staged, spills of large files before that, copies for the evictor.

One writing of an inode at a time. Its new place enters index, block table and accounts in one step, after data and
header are on the devices; what was renamed or changed meanwhile is taken along.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from errno import EBADMSG, ENOENT
from typing import Protocol

import trio

from kvfs.errors import DeviceError, KvfsError
from kvfs.index.interface import Index
from kvfs.plane import Plane, PlaneError, Run, SealInfo
from kvfs.store.eviction import EvictionPolicy, Stream
from kvfs.store.format import PARENT_OFFSET
from kvfs.store.segments import Segments, Versions
from kvfs.types import ROOT_INODE, Inode, InodeFlags, InodeNumber

log = logging.getLogger(__name__)

BEING_WRITTEN = 2  # plane.inode_is_open
_WRITE_TRIES = 3
_PARENT = struct.Struct("<Q")
# A record's ancestors are kept this long at most: the times in them are hints, names are never stale.
_ANCESTORS_MAX = 8192
_ANCESTORS_SIZE_MAX = 1 << 20
_RECORD_SLACK = 4096


class Blocks(Protocol):
    """What is asked of the store."""

    def count_pinned(self, before: Inode | None, after: Inode | None) -> None: ...

    def drop_bad(self, number: InodeNumber, segment: int) -> None: ...


class Sealing:
    """All writing of blocks by the daemon itself."""

    def __init__(
        self, segments: Segments, index: Index, plane: Plane, policy: EvictionPolicy, versions: Versions, blocks: Blocks
    ) -> None:
        self._segments, self._index, self._plane = segments, index, plane
        self._policy, self._versions, self._blocks = policy, versions, blocks
        self._busy: dict[int, trio.Event] = {}
        self._ancestors: dict[int, bytes] = {}
        self._held: dict[int, set[int]] = {}
        self._reseal: set[InodeNumber] = set()
        self.directory_moves = 0
        self.sealed = self.retries = 0

    def is_busy(self, inode: int) -> bool:
        """It is being sealed, copied, or opened for writing right now."""
        return inode in self._busy

    @asynccontextmanager
    async def _turn(self, inode: InodeNumber) -> AsyncIterator[None]:
        """Alone with an inode, and not cancelled: the data plane holds the file frozen in the middle of a seal."""
        while (busy := self._busy.get(inode)) is not None:
            await busy.wait()
        self._busy[inode] = trio.Event()
        try:
            with trio.CancelScope(shield=True):
                yield
        finally:
            self._busy.pop(inode).set()

    # ---- sealing ----

    async def seal(self, inode: InodeNumber) -> Inode | None:
        """Make the staged content a block. Returns the new inode; None if nothing was dirty or the file is gone.

        A nameless file is not sealed: nobody can open it again. Raises NoSpaceError, PlaneError; then it is still
        dirty.
        """
        async with self._turn(inode):
            return await self._seal(inode)

    async def seal_quietly(self, inode: InodeNumber) -> None:
        """Nobody waits for it: if it fails, the bytes stay staged, and retry() tries again."""
        try:
            await self.seal(inode)
            self._reseal.discard(inode)
        except KvfsError as error:
            if inode not in self._reseal:
                log.error("inode %d: not sealed after its last close: %s", inode, error)
            self._reseal.add(inode)

    async def retry(self) -> None:
        for inode in list(self._reseal):
            if self._index.raw(inode) is None:
                self._reseal.discard(inode)
            else:
                await self.seal_quietly(inode)

    async def wait_idle(self) -> None:
        while self._busy:
            await next(iter(self._busy.values())).wait()

    async def _seal(self, number: InodeNumber) -> Inode | None:
        inode = self._index.get(number)
        if inode is None or InodeFlags.NAMELESS in inode.flags:
            return None
        try:
            info = self._plane.seal_begin(number)
        except PlaneError as error:
            if error.errno == ENOENT:
                return None
            raise
        if not info.dirty:
            return None
        version = self._versions.begin()
        runs: list[Run] = []
        sealed: Inode | None = None
        try:
            for segment in self._extent_segments(number):
                if self._segments.all[segment].lost:
                    raise DeviceError(f"inode {number}: part of it lies in segment {segment}, whose device is away")
            written = await self._write(inode, info, version, runs)
            if self._enter(inode, written, copy=False):
                sealed = written
        finally:
            with suppress(PlaneError):
                self._plane.seal_end(number, sealed is not None)
            self._versions.end(version)
            self._segments.release(runs)
        await self._segments.settle(runs)
        if sealed is not None:
            self._hold(number, set())
            self.sealed += 1
        return sealed

    async def _write(self, inode: Inode, info: SealInfo, version: int, runs: list[Run]) -> Inode:
        """Write data and header to new runs; returns the inode as its header has it. `runs` are the caller's to
        release."""
        new = inode.copy()
        new.size, new.mtime_ns, new.version, new.extents = info.size, info.mtime_ns, version, ()
        new.ctime_ns = max(inode.ctime_ns, info.mtime_ns)
        new.flags = (inode.flags | InodeFlags.SEALED) & ~InodeFlags.ASK
        if inode.sealed:
            new.flags |= InodeFlags.REWRITTEN
        ancestors = self.ancestors(inode.parent)
        extents = info.ranges + info.kept_extents + self._segments.runs_bound(info.data_pages)
        record_size = len(new.pack())
        header_pages = self._plane.header_pages(info.size, record_size, len(ancestors), extents)
        new.header_pages = header_pages
        stream = self._policy.stream_of(info.size)
        for attempt in range(1, _WRITE_TRIES + 1):
            runs.extend(await self._segments.allocate(self._segments.head(stream), header_pages, info.data_pages))
            new.segment, new.page, new.generation = runs[0].segment, runs[0].page, runs[0].generation
            try:
                await self._plane.seal_write(inode.inode, runs, header_pages, new.pack(), ancestors)
                return Inode.unpack(self._plane.seal_record(inode.inode))
            except PlaneError as error:
                # Nothing more goes to these segments, other devices come next.
                await self._segments.bury(runs)
                self._segments.release(runs)
                runs.clear()
                if attempt == _WRITE_TRIES or error.errno == ENOENT:
                    raise
                self.retries += 1
                log.warning("inode %d: %s; trying other segments", inode.inode, error)
        raise AssertionError

    # ---- spilling ----

    async def spill_quietly(self, inode: InodeNumber) -> None:
        """Move what is staged of a large file to the devices before its seal. Nobody waits for it."""
        try:
            async with self._turn(inode):
                await self._spill(inode)
        except KvfsError as error:
            log.warning("inode %d: not spilled: %s", inode, error)

    async def _spill(self, number: InodeNumber) -> None:
        try:
            info = self._plane.spill_begin(number)
        except PlaneError as error:
            if error.errno == ENOENT:
                return
            raise
        if not info.dirty:
            return
        try:
            head = self._segments.head(self._policy.stream_of(info.size))
            runs = await self._segments.allocate(head, 0, info.data_pages)
        except BaseException:
            self._plane.spill_cancel(number)
            raise
        try:
            await self._plane.spill_write(number, runs)
            self._hold(number, self._extent_segments(number))
        except PlaneError:
            await self._segments.bury(runs)
            raise
        finally:
            self._segments.release(runs)

    def _extent_segments(self, number: int) -> set[int]:
        try:
            return {int(extent.segment) for extent in self._plane.file_extents(number)}
        except PlaneError as error:
            if error.errno != ENOENT:
                raise
            return set()

    def _hold(self, number: int, after: set[int]) -> None:
        """A file that is being written has pages in these segments, which its record does not say."""
        before = self._held.pop(number, set())
        if after:
            self._held[number] = after
        for segment in after - before:
            self._segments.all[segment].held += 1
        for segment in before - after:
            self._segments.all[segment].held -= 1
            self._segments.free_if_empty(self._segments.all[segment])

    def hold_extents(self, number: int) -> None:
        """A file that is being written has pages that the data plane placed by itself."""
        self._hold(number, self._extent_segments(number))

    def check_held(self) -> None:
        """Files that were discarded hold nothing any more."""
        for number in list(self._held):
            if number not in self._busy:
                self._hold(number, self._extent_segments(number))

    # ---- opening for writing ----

    async def rewrite(self, inode: InodeNumber, keep_content: bool) -> None:
        """From the return on all handles of a sealed file read through staging. PlaneError if it is gone.

        Neither eviction nor carry-over touches the block meanwhile; afterwards they see that it is being written.
        """
        async with self._turn(inode):
            await self._plane.file_rewrite(inode, keep_content)

    # ---- carrying over ----

    async def carry(self, record: bytes) -> bool:
        """Copy a block to the carried-over stream. False if it is gone, or cannot be read and was dropped."""
        number = Inode.unpack(record).inode
        # Being sealed, perhaps waiting for the very space that this makes: not waited for.
        if number in self._busy:
            return False
        async with self._turn(number):
            return await self._carry(number)

    async def _carry(self, number: InodeNumber) -> bool:
        old_record = self._index.raw(number)
        if old_record is None or self._plane.inode_is_open(number) == BEING_WRITTEN:
            return False
        before = Inode.unpack(old_record)
        if not before.sealed:
            return False
        data_pages = sum(extent.page_count for extent in before.all_extents())
        new = before.copy()
        new.extents = ()
        ancestors = self.ancestors(before.parent)
        extents = len(before.all_extents()) + self._segments.runs_bound(data_pages)
        new.header_pages = self._plane.header_pages(before.size, len(new.pack()), len(ancestors), extents)
        runs = await self._segments.allocate(self._segments.head(Stream.CARRIED), new.header_pages, data_pages)
        try:
            new.segment, new.page, new.generation = runs[0].segment, runs[0].page, runs[0].generation
            capacity = len(old_record) + 24 * extents + _RECORD_SLACK
            copied = await self._plane.store_copy(old_record, runs, new.header_pages, new.pack(), ancestors, capacity)
            return self._enter(before, Inode.unpack(copied), copy=True)
        except PlaneError as error:
            await self._segments.bury(runs)
            log.warning("inode %d: not carried over: %s", number, error)
            if error.errno == EBADMSG:
                self._blocks.drop_bad(number, before.segment)
            return False
        finally:
            self._segments.release(runs)

    # ---- entering ----

    def _enter(self, before: Inode, written: Inode, *, copy: bool) -> bool:
        """The block is on the devices: index, table and accounts learn of it in one step. False if it lost its name, or
        a copy is of what the file was: then it is an orphan in its segment, that no summary will name."""
        current = self._index.get(written.inode)
        home = self._segments.all[written.segment]
        if current is None or (self._overtaken(before, current) if copy else InodeFlags.NAMELESS in current.flags):
            self._segments.mark_dirty(home, gone=True)
            return False
        if current != before:
            _take_changes(written, before, current)
            self._segments.mark_dirty(home, gone=True)
        self._index.put(written, current)
        if current.sealed:
            self._segments.mark_dirty(self._segments.all[current.segment], gone=True)
        self._segments.account(current if current.sealed else None, written)
        if not copy:
            self._blocks.count_pinned(current, written)
        self._plane.inode_update(written.pack())
        return True

    def _overtaken(self, before: Inode, current: Inode) -> bool:
        place = (before.segment, before.page, before.generation)
        moved = (current.segment, current.page, current.generation) != place
        return moved or self._plane.inode_is_open(current.inode) == BEING_WRITTEN

    # ---- ancestors ----

    def ancestors(self, parent: int) -> bytes:
        """The records of the directories from `parent` up, without the root."""
        known = self._ancestors.get(parent)
        if known is not None:
            return known
        parts: list[bytes] = []
        number, size = parent, 0
        while number != ROOT_INODE:
            record = self._index.raw(number)
            if record is None or size + len(record) > _ANCESTORS_SIZE_MAX:
                break
            parts.append(record)
            size += len(record)
            (number,) = _PARENT.unpack_from(record, PARENT_OFFSET)
        found = b"".join(parts)
        if len(self._ancestors) >= _ANCESTORS_MAX:
            self._ancestors.clear()
        self._ancestors[parent] = found
        return found

    def forget_ancestors(self) -> None:
        self._ancestors.clear()

    def directory_moved(self) -> None:
        self.directory_moves += 1
        self._ancestors.clear()


def _take_changes(written: Inode, before: Inode, current: Inode) -> None:
    """What was changed while a block was written, `before` to `current`: the index has it, the block header has not."""
    written.parent, written.name, written.nlink = current.parent, current.name, current.nlink
    written.mode, written.uid, written.gid, written.xattrs = current.mode, current.uid, current.gid, current.xattrs
    written.atime_ns, written.ctime_ns = current.atime_ns, max(written.ctime_ns, current.ctime_ns)
    if current.mtime_ns != before.mtime_ns:
        written.mtime_ns = current.mtime_ns
    kept = InodeFlags.PINNED | InodeFlags.NAMELESS
    written.flags = (written.flags & ~kept) | (current.flags & kept)
    written.version = max(written.version, current.version)
