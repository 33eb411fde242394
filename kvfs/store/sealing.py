"""Writing blocks: seals of staged files, spills of large files before that, copies for the evictor.

One writing of an inode at a time. Its new place enters index, block table and accounts in one step, after data and
header are on the devices. Renames and other changes made meanwhile are taken along.
"""

from __future__ import annotations

import logging
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from errno import EBADMSG, EBUSY, ENOENT

import trio

from kvfs.errors import DeviceError, KvfsError
from kvfs.names import step
from kvfs.plane import JOB_TIMEOUT_S, OpenState, PlaneError, Run, SealInfo, failure, wait_job
from kvfs.pool.format import Stream
from kvfs.record import PARENT_OFFSET, RECORD_PARENT, Inode, InodeFlags
from kvfs.store.blocks import Blocks
from kvfs.store.eviction import EvictionPolicy
from kvfs.store.segment import Head
from kvfs.store.tasks import Tasks
from kvfs.types import ROOT_INODE, InodeNumber

log = logging.getLogger(__name__)

_WRITE_TRIES = 3
# A record's ancestors are kept this long at most: the times in them are hints, names are never stale.
_ANCESTORS_MAX = 8192
_ANCESTORS_SIZE_MAX = 1 << 20
_RECORD_SLACK = 4096
_BUSY_POLL_S = 0.002


@dataclass(slots=True)
class _Seal:
    """A seal that has begun."""

    inode: Inode  # as it was then
    record: bytes  # the same, packed
    info: SealInfo
    new: Inode  # as its header will have it, but for the place
    ancestors: bytes
    head: Head
    request: tuple[int, int] | None  # the FLUSH that it is for
    runs: list[Run] = field(default_factory=list)

    @property
    def pages(self) -> int:
        return self.new.header_pages + self.info.data_pages


class Sealing:
    """All writing of blocks by the daemon itself."""

    def __init__(self, blocks: Blocks, policy: EvictionPolicy, tasks: Tasks) -> None:
        self._segments, self._index, self._plane = blocks.segments, blocks.index, blocks.plane
        self._versions, self._blocks, self.names = blocks.versions, blocks, blocks.names
        self._policy, self._tasks = policy, tasks
        self._busy: dict[int, trio.Event] = {}
        self._ancestors: dict[int, bytes] = {}
        self._held: dict[int, set[int]] = {}
        self._reseal: set[InodeNumber] = set()
        # Seals that wait for room in the segment of their head.
        self._waiting: defaultdict[Head, deque[tuple[_Seal, Callable[[KvfsError | None], None]]]] = defaultdict(deque)
        self._ancestors_as_of = 0  # blocks.directory_moves
        self.sealed = self.retries = 0
        self._making_room = False

    def is_busy(self, inode: int) -> bool:
        """It is being sealed, copied, or opened for writing right now."""
        return inode in self._busy

    def busy_of(self, inodes: Iterable[int]) -> set[int]:
        """The busy ones."""
        return self._busy.keys() & inodes if self._busy else set()

    @asynccontextmanager
    async def turn(self, inode: InodeNumber) -> AsyncIterator[None]:
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

        A nameless file is not sealed: it cannot be opened again. Raises NoSpaceError, PlaneError; then it is still
        dirty.
        """
        async with self.turn(inode):
            seal = await self._begin_late(inode)
            return None if seal is None else await self._finish(seal)

    async def seal_quietly(self, inode: InodeNumber) -> None:
        """Without a waiter: if it fails, the bytes stay staged, and retry() tries again."""
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

    def seal_soon(self, number: InodeNumber, done: Callable[[KvfsError | None], None]) -> None:
        """Like seal(), without a wait: reports through `done(error)`, possibly before returning. Most seals need no
        task: there is room, and the writes succeed."""
        if number in self._busy:
            self._tasks.start(self._seal_late, number, done)
            return
        try:
            seal = self._begin(number)
        except KvfsError as error:
            if error.errno == EBUSY:
                self._tasks.start(self._seal_late, number, done)
            else:
                done(error)
            return
        if seal is None:
            done(None)
            return
        self._busy[number] = trio.Event()
        waiting = self._waiting[seal.head]
        if not waiting and (run := self._segments.allocate_now(seal.head, seal.pages)) is not None:
            self._write_soon(seal, [run], done)
            return
        waiting.append((seal, done))
        if len(waiting) == 1:
            self._tasks.start(self._find_room, seal.head)

    async def _find_room(self, head: Head) -> None:
        """For all that wait: what comes while this waits for a segment waits too."""
        waiting = self._waiting[head]
        while waiting:
            seal, done = waiting[0]
            try:
                with trio.CancelScope(shield=True):
                    runs = await self._segments.allocate(head, seal.new.header_pages, seal.info.data_pages)
            except KvfsError as error:
                waiting.popleft()
                self._end(seal, None)
                self._busy.pop(seal.inode.inode).set()
                done(error)
            else:
                waiting.popleft()
                self._write_soon(seal, runs, done)

    def _write_soon(self, seal: _Seal, runs: list[Run], done: Callable[[KvfsError | None], None]) -> None:
        seal.runs.extend(runs)
        try:
            self._start_write(seal, lambda result: self._on_written(seal, result, done))
        except PlaneError as error:
            self._tasks.start(self._finish_late, seal, error, done)

    def _on_written(self, seal: _Seal, result: int, done: Callable[[KvfsError | None], None]) -> None:
        number = seal.inode.inode
        try:
            if result < 0:
                raise failure(result, f"seal of inode {number}")
            written = Inode.unpack(self._plane.seal_record(number))
        except PlaneError as error:
            self._tasks.start(self._finish_late, seal, error, done)
            return

        def settled() -> None:
            self._busy.pop(number).set()
            done(None)

        self._end(seal, written)
        self._segments.when_settled(seal.runs, settled)

    async def _seal_late(self, number: InodeNumber, done: Callable[[KvfsError | None], None]) -> None:
        try:
            await self.seal(number)
        except KvfsError as error:
            done(error)
        else:
            done(None)

    async def _finish_late(self, seal: _Seal, error: PlaneError, done: Callable[[KvfsError | None], None]) -> None:
        """The first try to write it has failed."""
        problem: KvfsError | None = None
        try:
            with trio.CancelScope(shield=True):
                await self._finish(seal, error)
        except KvfsError as caught:
            problem = caught
        finally:
            self._busy.pop(seal.inode.inode).set()
        done(problem)

    async def _begin_late(self, number: InodeNumber) -> _Seal | None:
        """As _begin(), once a seal by the data plane has ended."""
        until = trio.current_time() + JOB_TIMEOUT_S
        while True:
            try:
                return self._begin(number)
            except PlaneError as error:
                if error.errno != EBUSY or trio.current_time() > until:
                    raise
            await trio.sleep(_BUSY_POLL_S)

    async def make_room(self) -> None:
        """FLUSHes of the data plane wait for room in a segment."""
        if self._making_room:
            return
        self._making_room = True
        try:
            while pages := self._plane.flush_wanted():
                await self._segments.make_room(self._segments.head(Stream.NEW), pages)
                self._plane.flush_retry()
        except KvfsError:
            self._plane.flush_give_up()  # each finds out by itself, and answers so
        finally:
            self._making_room = False

    async def bury(self, run: Run) -> None:
        """The data plane could not write this run."""
        self.retries += 1
        await self._segments.tombstone([run])
        self._segments.release([run])

    def _begin(self, number: InodeNumber) -> _Seal | None:
        """Freeze what is staged, and find out what its block needs. Returns None if there is nothing to seal."""
        record = self._index.raw(number)
        if record is None:
            return None
        inode = Inode.unpack(record)
        if inode.nameless:
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
        try:
            for segment in self._extent_segments(number) if info.kept_extents else ():
                if self._segments.all[segment].lost:
                    raise DeviceError(f"inode {number}: part of it lies in segment {segment}, whose device is away")
            new = inode.copy()
            new.size, new.mtime_ns, new.version, new.extents = info.size, info.mtime_ns, version, ()
            new.ctime_ns = max(inode.ctime_ns, info.mtime_ns)
            new.flags = (inode.flags | InodeFlags.SEALED) & ~InodeFlags.ASK
            if inode.sealed or info.shared:
                new.flags |= InodeFlags.REWRITTEN
            ancestors = self.ancestors(inode.parent)
            extents = info.ranges + info.kept_extents + self._segments.runs_bound(info.data_pages)
            new.header_pages = self._plane.header_pages(info.size, new.record_size, len(ancestors), extents)
            return _Seal(inode, record, info, new, ancestors, self._segments.head(self._policy.stream_of(info.size)),
                         self.names.request)  # fmt: skip
        except BaseException:
            with suppress(PlaneError):
                self._plane.seal_end(number, False)
            self._versions.end(version)
            raise

    async def _finish(self, seal: _Seal, error: PlaneError | None = None) -> Inode | None:
        """Write it and let it enter. `error`: the first try to write it has failed by that."""
        written: Inode | None = None
        try:
            written = await self._write(seal, error)
        finally:
            sealed = self._end(seal, written)
        await self._segments.settle(seal.runs)
        return sealed

    @step
    def _end(self, seal: _Seal, written: Inode | None) -> Inode | None:
        """The new inode enters, and what was frozen is let go. Returns None if it was not written, or has lost its
        name."""
        number, sealed = seal.inode.inode, None
        if seal.request is not None:
            self.names.change_for(seal.request)
        try:
            if written is not None and self._blocks.enter(seal.inode, seal.record, written, copy=False):
                sealed = written
        finally:
            with suppress(PlaneError):
                self._plane.seal_end(number, sealed is not None)
            self._versions.end(seal.new.version)
            self._segments.release(seal.runs)
        if sealed is not None:
            self._hold(number, set())
            self.sealed += 1
        return sealed

    async def _write(self, seal: _Seal, error: PlaneError | None) -> Inode:
        """Write data and header to new runs, which are the caller's to release; returns the inode as its header has
        it."""
        number = seal.inode.inode
        for attempt in range(1, _WRITE_TRIES + 1):
            if error is None:
                needed = (seal.head, seal.new.header_pages, seal.info.data_pages)
                seal.runs.extend(await self._segments.allocate(*needed))
                try:
                    await wait_job(lambda done: self._start_write(seal, done), f"seal of inode {number}")
                    return Inode.unpack(self._plane.seal_record(number))
                except PlaneError as caught:
                    error = caught
            # Nothing more goes to these segments, other devices come next.
            await self._segments.tombstone(seal.runs)
            self._segments.release(seal.runs)
            seal.runs.clear()
            if attempt == _WRITE_TRIES or error.errno == ENOENT:
                raise error
            self.retries += 1
            log.warning("inode %d: %s; trying other segments", number, error)
            error = None
        raise AssertionError

    def _start_write(self, seal: _Seal, done: Callable[[int], None]) -> None:
        new, first = seal.new, seal.runs[0]
        new.segment, new.page, new.generation = first.segment, first.page, first.generation
        self._plane.seal_write(seal.inode.inode, seal.runs, new.header_pages, new.pack(), seal.ancestors, done)

    # ---- spilling ----

    async def spill_quietly(self, inode: InodeNumber) -> None:
        """Move what is staged of a large file to the devices before its seal. Without a waiter."""
        try:
            async with self.turn(inode):
                await self._spill(inode)
        except KvfsError as error:
            log.warning("inode %d: not spilled: %s", inode, error)

    async def _spill(self, number: InodeNumber) -> None:
        until = trio.current_time() + JOB_TIMEOUT_S
        while True:
            try:
                info = self._plane.spill_begin(number)
                break
            except PlaneError as error:
                if error.errno == ENOENT:
                    return
                if error.errno != EBUSY or trio.current_time() > until:
                    with suppress(PlaneError):
                        self._plane.spill_cancel(number)  # it was asked, and memory that is to come is waited for
                    raise
            await trio.sleep(_BUSY_POLL_S)  # a seal by the data plane
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
            await self._segments.tombstone(runs)
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
        if not after and number not in self._held:
            return
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
        """Drop all that discarded files hold."""
        for number in list(self._held):
            if number not in self._busy:
                self._hold(number, self._extent_segments(number))

    # ---- opening for writing ----

    async def rewrite(self, inode: InodeNumber, keep_content: bool) -> None:
        """From the return on all handles of a sealed file read through staging. PlaneError if it is gone.

        Neither eviction nor carry-over touches the block meanwhile; afterwards they see that it is being written.
        """
        async with self.turn(inode):
            await self._plane.file_rewrite(inode, keep_content)

    # ---- carrying over ----

    async def carry(self, record: bytes) -> bool:
        """Copy a block to the carried-over stream. False if it is gone, or cannot be read and was dropped."""
        number = Inode.unpack(record).inode
        # Being sealed, perhaps waiting for the very space that this makes: not waited for.
        if number in self._busy:
            return False
        async with self.turn(number):
            return await self._carry(number)

    async def _carry(self, number: InodeNumber) -> bool:
        old_record = self._index.raw(number)
        if old_record is None or self._plane.inode_is_open(number) == OpenState.BEING_WRITTEN:
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
            return self._blocks.enter(before, old_record, Inode.unpack(copied), copy=True)
        except PlaneError as error:
            await self._segments.tombstone(runs)
            log.warning("inode %d: not carried over: %s", number, error)
            if error.errno == EBADMSG:
                self._blocks.drop_bad(number, before.segment)
            return False
        finally:
            self._segments.release(runs)

    # ---- copying up ----

    async def copy_up(self, theirs: Inode, enter: Callable[[Inode], None]) -> None:
        """Store a block of another node here, as a new inode; `enter` takes it in once it is on the devices. KvfsError:
        it is gone, or there is no room."""
        data_pages = sum(extent.page_count for extent in theirs.all_extents())
        new = theirs.copy()
        new.extents = ()
        new.inode, new.version = self._blocks.next_inode(), self._blocks.next_version()
        ancestors = self.ancestors(theirs.parent)
        extents = len(theirs.all_extents()) + self._segments.runs_bound(data_pages)
        new.header_pages = self._plane.header_pages(theirs.size, len(new.pack()), len(ancestors), extents)
        runs = await self._segments.allocate(self._segments.head(Stream.NEW), new.header_pages, data_pages)
        try:
            new.segment, new.page, new.generation = runs[0].segment, runs[0].page, runs[0].generation
            old = theirs.pack()
            capacity = len(old) + 24 * extents + _RECORD_SLACK
            copied = await self._plane.store_copy(old, runs, new.header_pages, new.pack(), ancestors, capacity)
            await self._segments.settle(runs)
            enter(Inode.unpack(copied))
        except PlaneError:
            await self._segments.tombstone(runs)
            raise
        finally:
            self._segments.release(runs)

    # ---- ancestors ----

    def ancestors(self, parent: int) -> bytes:
        """The records of the directories from `parent` up, without the root."""
        if self._ancestors_as_of != self._blocks.directory_moves:
            self._ancestors_as_of = self._blocks.directory_moves
            self._ancestors.clear()
        known = self._ancestors.get(parent)
        if known is not None:
            return known
        parts: list[bytes] = []
        number, size = parent, 0
        while number != ROOT_INODE:
            self._index.keep(number)  # the data plane seals the next
            record = self._index.raw(number)
            if record is None or size + len(record) > _ANCESTORS_SIZE_MAX:
                break
            parts.append(record)
            size += len(record)
            (number,) = RECORD_PARENT.unpack_from(record, PARENT_OFFSET)
        found = b"".join(parts)
        if len(self._ancestors) >= _ANCESTORS_MAX:
            self._ancestors.clear()
        self._ancestors[parent] = found
        return found

    def forget_ancestors(self) -> None:
        self._ancestors.clear()
