"""The store of one mounted pool: opens and closes it, keeps index, block table and summaries in step.

Everything that must agree changes in one step of the one trio thread, between two awaits: the index, the block table,
the segments' live pages, and which summaries are not true any more. Durable in this order: data and block header
(before the seal is answered), index (a second later, or at fsync), summaries; a segment that was evicted may be
written again before the index says so. What a crash takes: docs/internals/recovery.md. sealing.py writes blocks.
"""

from __future__ import annotations

import logging
import os
import shutil
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from errno import EBADMSG, EIO, ENOSPC
from pathlib import Path
from typing import TypeVarTuple

import trio

from kvfs.errors import DeviceError, FormatError, InUseError, KvfsError, NoSpaceError, UsageError
from kvfs.index.lmdb import IndexError_, LmdbIndex
from kvfs.plane import Event, EventType, OpenState, Plane, PlaneError, PlaneOptions, check_records
from kvfs.pool.config import PoolConfig
from kvfs.pool.devices import Device, Place
from kvfs.pool.format import META_CLEAN, META_EPOCH, META_IN_FLIGHT, META_NUMBER, META_OPENING, META_UUID, META_VERSION
from kvfs.pool.heart import Heart
from kvfs.pool.labels import write_labels
from kvfs.pool.lock import INDEX_NAME, PoolLock, locked
from kvfs.pool.opening import OpenPool, open_pool
from kvfs.record import RECORD_HEAD, Inode, InodeFlags, Kind, split_records
from kvfs.store import recovery
from kvfs.store.device_service import DeviceService
from kvfs.store.eviction import EvictionPolicy, LeastLoss
from kvfs.store.evictor import EvictionCounters, Evictor
from kvfs.store.groups import Groups
from kvfs.store.pins import Pins
from kvfs.store.reservations import Reservations, ReservationStatistics
from kvfs.store.sealing import Sealing
from kvfs.store.segments import Counter, Segment, Segments, SegmentStatistics, Versions, usage
from kvfs.store.shares import PINNED, ROOT, Shares
from kvfs.store.slabs import Slabs
from kvfs.types import COUNTER_BITS, EPOCH_MAX, PAGE_SIZE, ROOT_INODE, InodeNumber, SegmentIndex

log = logging.getLogger(__name__)

_COMMIT_CHANGES = 20_000
_COMMIT_POLL_S = 0.1
_PIN_COUNT_S = 60.0
_LINGER_S = 1.0
_SEAL_AT_CLOSE_S = 60.0
_WALK_BATCH = 512
# One segment of a device that is being drained.
_DRAIN_TIMEOUT_S = 120.0
_CHUNK = 1 << 20

Arguments = TypeVarTuple("Arguments")


@dataclass(frozen=True, slots=True)
class Space:
    """Bytes of the pool: all of it, in use by live blocks and slabs, and of those what eviction leaves alone: what is
    pinned, and slabs. And inodes."""

    size: int
    used: int
    pinned: int
    slabs: int
    inodes: int
    inodes_max: int


@dataclass(frozen=True, slots=True)
class StoreOptions:
    staging_size: int = 256 << 20
    read_memory_size: int = 128 << 20
    io_timeout_ms: int = 10_000
    request_timeout_ms: int = 60_000
    # A request that takes longer is told of by an event SLOW; 0: none is.
    slow_ms: int = 0
    server_threads: int = 0
    store_threads: int = 0
    max_read: int = 0
    max_write: int = 0
    spin_us: int = 100
    kernel_timeout_s: int = 0
    records_max: int = 0
    commit_interval_s: float = 1.0
    # The data plane's events that are not the store's: type, inode, value (IDLE, TRANSPORTS_GONE, WRITERS_GONE,
    # GUEST, SLOW).
    on_event: Callable[[int, int, int], None] | None = None
    # Descriptors lead to other devices than before, or there are others: who holds them must ask again.
    on_devices: Callable[[], None] | None = None
    # For others, who want the pool meanwhile.
    use: str = "open"
    # Push an owner aside that beats on the devices.
    take_over: bool = False
    # Told when opening has to wait for somebody.
    on_wait: Callable[[str], None] | None = None


@dataclass(frozen=True, slots=True)
class StoreStatistics:
    uuid: str
    epoch: int
    blocks: int
    segments: SegmentStatistics
    space: Space
    eviction: EvictionCounters
    bad_blocks: int
    sealed: int
    seal_retries: int
    index_bytes: int
    index_pending: int
    commit_failures: int
    rebuilding: bool
    notes: tuple[str, ...]
    reservations: ReservationStatistics


class Store:
    """Use: `async with Store.open(path) as store:`. Its background work runs while it is open; `run` may be awaited
    too."""

    def __init__(self, opened: OpenPool, index: LmdbIndex, plane: Plane, options: StoreOptions, heart: Heart,
                 lock: PoolLock, records_max: int, policy: EvictionPolicy) -> None:  # fmt: skip
        """For Store.open only."""
        self.path, self.epoch = opened.path, heart.me.epoch
        epoch, self._heart, self._lock = self.epoch, heart, lock
        self.index, self.plane = index, plane
        self._opened, self._options, self._records_max = opened, options, records_max
        self._policy = policy
        self.segments = Segments(opened.config, opened.config.members(), plane, index, epoch)
        self.service = DeviceService(opened, index, plane, self.segments, self, heart)
        self.notes = list(opened.notes)
        self._inodes, self._versions = Counter(epoch), Versions(epoch)
        self.sealing = Sealing(self.segments, index, plane, policy, self._versions, self)
        # What the namespace and the evictor ask of the store, and it does.
        self.seal, self.seal_soon, self.rewrite = self.sealing.seal, self.sealing.seal_soon, self.sealing.rewrite
        self.turn, self.carry, self.is_busy = self.sealing.turn, self.sealing.carry, self.sealing.is_busy
        self.shares = Shares(plane, opened.config.user_share, os.geteuid())
        self.reservations = Reservations(self.segments, index, plane, self._inodes, self._versions, self.sealing,
                                         self.shares)  # fmt: skip
        self.slabs = Slabs(self.segments, index, plane, self.sealing, opened.config.slab_quota, self.shares,
                           self._set_space)  # fmt: skip
        self._moved_directories: list[InodeNumber] = []
        self._directory_moved = trio.Event()
        self._lingering: dict[InodeNumber, float] = {}  # until when; the first is the next
        self._bad_blocks = 0
        self.rebuilding = False
        self._closed = self._ended = False
        self._commit_failed = False
        self._lost = trio.Event()
        self._nursery: trio.Nursery | None = None
        self._pinning = trio.Lock()
        self.pins: Pins
        self.evictor: Evictor

    # ---- opening ----

    @classmethod
    @asynccontextmanager
    async def open(
        cls, pool: Path, options: StoreOptions | None = None, policy: EvictionPolicy | None = None
    ) -> AsyncIterator[Store]:
        """Open a pool for use: locked, recovered, its block table loaded. Raises PoolError, DeviceError, PlaneError."""
        options = options or StoreOptions()
        with ExitStack() as stack:
            lock = stack.enter_context(locked(pool, options.use, tell=options.on_wait))
            opened = open_pool(pool, degraded=True, tell=options.on_wait)
            stack.callback(opened.close)
            known = _index_epoch(opened)
            if known > opened.epoch and not opened.absent:
                raise IndexError_(f"index {pool / INDEX_NAME}: it knows mount {known}, the labels none after "
                                  f"{opened.epoch}: other devices?")  # fmt: skip
            opened.leave_stale(known)
            heart = Heart.take(opened, use=options.use, known=known, next_epoch=True, force=options.take_over,
                               tell=options.on_wait)  # fmt: skip
            stack.callback(heart.stop)
            epoch = heart.me.epoch
            # Tried out before anything is written but beats: what this machine lacks is found here.
            size = sum(device.size for device in opened.config.devices)
            records_max = options.records_max or min(64 << 20, max(2 << 20, (size >> 13) + (1 << 20)))
            plane = make_plane(opened, options, epoch, records_max)
            stack.callback(plane.destroy)
            index, rebuild = _open_index(opened)
            stack.callback(index.close)
            # Labels of this mount are then of this index, also if it ends while it writes them.
            index.meta_put(META_OPENING, META_NUMBER.pack(epoch))
            index.commit_now()
            failed = write_labels(opened.config, opened.devices, epoch, opened.absent)
            opened.absent.update(failed)
            if failed and len(opened.absent) == len(opened.devices):
                raise DeviceError(next(iter(failed.values())))
            store = cls(opened, index, plane, options, heart, lock, records_max, policy or LeastLoss())
            failure: BaseException | None = None
            async with trio.open_nursery() as nursery:
                store._nursery = nursery
                store._guard()
                pumping = trio.CancelScope(shield=True)
                store.start_task(store._pump, pumping)
                # Not raised in here: the nursery would wrap it, and the caller looks for a KvfsError.
                try:
                    await store._start(rebuild)
                    yield store
                except BaseException as error:
                    failure = error
                if plane.abandoned is None:
                    with trio.CancelScope(shield=True):
                        await store.close()
                store._ended = True
                pumping.cancel()
                nursery.cancel_scope.cancel()
            if failure is not None:
                raise failure

    async def _start(self, rebuild: bool) -> None:
        index = self.index
        clean = index.meta_get(META_CLEAN) == b"1" and not rebuild
        index.meta_put(META_CLEAN, b"0")
        index.meta_put(META_EPOCH, META_NUMBER.pack(self.epoch))
        index.meta_put(META_UUID, self.config.uuid.bytes)
        if index.raw(ROOT_INODE) is None:
            index.put(self._root(), None)
        index.commit_now()
        self.segments.load(index.segment_items())
        self.pins = Pins(index, self.shares)
        self.service.start()
        if rebuild:
            self.notes.append("the index was missing or unreadable; it is being rebuilt from the devices")
            job = recovery.Rebuild(self.index, self.segments, self.plane, self.pins)
            await job.prepare()
        elif not clean:
            in_flight = array("Q", index.meta_get(META_IN_FLIGHT) or b"")
            await recovery.recover(self.index, self.segments, self.plane, _number(index, META_VERSION), set(in_flight))
        index.before_commit = self._before_commit
        index.commit_now()
        if not rebuild:
            for chunk in index.records(_CHUNK):
                self.plane.table_load(self._visible(chunk) if index.lost else chunk)
                await trio.lowlevel.checkpoint()
            self.plane.table_set_complete(True)
        else:
            self.plane.table_load(self._root_record())
        self.segments.start()
        if not clean and not rebuild:
            # What was found is what stays, even if the next thing that happens is a crash that takes the index along.
            await self.segments.flush_summaries()
        self.evictor = Evictor(self.segments, self.index, self.plane, self._policy, self.pins,
                               Groups(self.index, self.config.groups), self)  # fmt: skip
        self._set_space()
        await self.service.take_in_stale()
        self.rebuilding = rebuild
        if rebuild:
            self.start_task(self._rebuild, job)
        self.start_task(self.service.run)
        self.start_task(self._commit_loop)
        self.start_task(self._flush_loop)
        self.start_task(self._retry_loop)
        self.start_task(self.reservations.run)
        self.start_task(self.evictor.run, lambda: not self.rebuilding)
        self.start_task(self._prepare_loop)
        self.start_task(self._count_pins_loop)
        self.start_task(self._moved_loop)

    def _root(self) -> Inode:
        owner = os.stat(self.path)
        now = owner.st_mtime_ns
        return Inode(
            inode=ROOT_INODE, parent=ROOT_INODE, name=b"", kind=Kind.DIRECTORY, mode=0o040755, uid=owner.st_uid,
            gid=owner.st_gid, nlink=2, mtime_ns=now, ctime_ns=now, atime_ns=now,
        )  # fmt: skip

    def _visible(self, records: bytes) -> bytes:
        """Those of the records that do not lie on devices that are away."""
        places = split_records(records)
        pieces = [records[at : at + size] for at, size in places]
        return b"".join(piece for piece in pieces if self.index.raw(RECORD_HEAD.unpack_from(piece)[4]) is not None)

    def _root_record(self) -> bytes:
        record = self.index.raw(ROOT_INODE)
        assert record is not None
        return record

    async def _rebuild(self, job: recovery.Rebuild) -> None:
        try:
            count = await job.run()
            await self.index.make_durable()
            log.info("the index was rebuilt: %d blocks", count)
            self.notes = [note for note in self.notes if "rebuilt" not in note]
        except KvfsError as error:
            log.error("the rebuild of the index broke off: %s; what was found so far is there", error)
        self.rebuilding = False
        self.plane.table_set_complete(True)
        self.segments.need_space.set()

    # ---- owning ----

    def _guard(self) -> None:
        """Beat, and end as after a crash, at once, when another has taken the devices."""
        token = trio.lowlevel.current_trio_token()

        def lost(reason: str) -> None:
            with suppress(trio.RunFinishedError):
                token.run_sync_soon(self._lose, reason)

        async def wait() -> None:
            await self._lost.wait()
            raise InUseError(f"{self.path}: {self._heart.lost}")

        assert self._nursery is not None
        self._nursery.start_soon(wait)
        self._heart.start(lost)

    def _lose(self, reason: str) -> None:
        if self.plane.abandoned is None and not self._ended:
            log.critical("%s; it ends as after a crash: nothing more is written", reason)
            for device in range(len(self._opened.devices)):
                self.plane.device_stop(device)
            self.plane.abandon(reason)
            self._lost.set()

    def ending(self) -> None:
        """Whoever wants the pool may wait for it: it will not be long."""
        self._heart.ending()
        self._lock.describe(ending=True)

    # ---- numbers ----

    def next_inode(self) -> InodeNumber:
        return InodeNumber(self._inodes.next())

    def next_version(self) -> int:
        return self._versions.next()

    def _before_commit(self) -> None:
        """What every commit carries: segment states, and up to which version the index knows all, but which."""
        self.segments.save_changed()
        if self.index.changes_pending:
            self.index.meta_put(META_VERSION, META_NUMBER.pack(self._versions.last))
            self.index.meta_put(META_IN_FLIGHT, array("Q", self._versions.in_flight).tobytes())

    # ---- background ----

    async def run(self) -> None:
        """Until cancelled. The background tasks are the store's own; a failure in one ends `async with Store.open`."""
        await trio.sleep_forever()

    def start_task(self, task: Callable[[*Arguments], Awaitable[None]], *arguments: *Arguments) -> None:
        """In the background. If it fails the store ends as after a crash: at once, and nothing more is written, as
        nobody knows what is true any more."""

        async def run() -> None:
            try:
                await task(*arguments)
            except Exception as error:
                log.critical("a task of the store failed (%s): %s: %s; it ends as after a crash",
                             task.__qualname__, type(error).__name__, error)  # fmt: skip
                self.plane.abandon("a task of the store failed")
                raise

        assert self._nursery is not None
        self._nursery.start_soon(run)

    async def _pump(self, scope: trio.CancelScope) -> None:
        """Until the scope is cancelled: what is shielded waits for completions also when all else was cancelled."""
        with scope:
            await self.plane.pump(self._on_event)

    async def _commit_loop(self) -> None:
        while True:
            deadline = trio.current_time() + self._options.commit_interval_s
            while (now := trio.current_time()) < deadline and self.index.changes_pending < _COMMIT_CHANGES:
                pending = self.index.changes_pending
                await trio.sleep(min(_COMMIT_POLL_S, deadline - now) if pending else deadline - now)
            await self._commit_and_flush()

    async def _flush_loop(self) -> None:
        """Writers wait for segments that were freed: when the summaries say so, they may have them. The index, whose
        commit takes long on a busy disk, seldom has to say it first."""
        segments = self.segments
        while True:
            await segments.need_flush.wait()
            segments.need_flush = trio.Event()
            await segments.flush_summaries()
            if segments.waits_for_commit:
                await self._commit_and_flush()

    async def _commit_and_flush(self) -> None:
        self.plane.expire()
        try:
            await self.index.commit()
            if self._commit_failed:
                log.info("the index can be committed again")
            self._commit_failed = False
        except KvfsError as error:
            if not self._commit_failed:
                log.error("%s; tried again every second", error)
            self._commit_failed = True
            # Writers go on: nothing may wait for a disk that is not the pool's.
            try:
                self.index.distrust()
            except OSError as failure:
                log.error("index: cannot be marked for a rebuild: %s; freed segments wait for its commit", failure)
        await self.segments.flush_summaries()
        self.sealing.forget_ancestors()
        self.sealing.check_held()
        self._end_lingering()
        self._set_space()

    async def _retry_loop(self) -> None:
        """By itself: a seal may wait for space, which commits and summaries make."""
        while True:
            await trio.sleep(self._options.commit_interval_s)
            await self.sealing.retry()

    async def _prepare_loop(self) -> None:
        while True:
            try:
                await self.segments.prepare()
            except KvfsError as error:
                log.warning("no segment could be prepared: %s", error)
            await self.segments.ready_taken.wait()
            self.segments.ready_taken = trio.Event()

    async def _count_pins_loop(self) -> None:
        while True:
            await self.pins.count()
            self._set_space()
            with trio.move_on_after(_PIN_COUNT_S if self.pins else float("inf")):
                await self.pins.changed.wait()
            self.pins.changed = trio.Event()

    async def _moved_loop(self) -> None:
        """The summaries that name blocks below a directory that was renamed."""
        while True:
            await self._directory_moved.wait()
            self._directory_moved = trio.Event()
            while self._moved_directories:
                directory = self._moved_directories.pop()
                after = b""
                while entries := self.index.list(directory, after, _WALK_BATCH):
                    for _, number in entries:
                        inode = self.index.get(number)
                        if inode is not None and inode.kind == Kind.DIRECTORY:
                            self._moved_directories.append(number)
                        elif inode is not None and inode.sealed:
                            self.segments.mark_dirty(self.segments.all[inode.segment], gone=False)
                    after = entries[-1][0]
                    await trio.lowlevel.checkpoint()

    def _set_space(self) -> None:
        """What may be open or being written at one time: all that eviction can make room for, less what is pinned or
        reserved.

        A tenth is left for the tails of segments and for headers. So a write fails while the close after it still
        succeeds.
        """
        count = self.segments.usable
        segments = max(count - self.segments.reserve - 5, count // 2) - self.slabs.segment_count
        self.shares.resize(count * self.segments.area * PAGE_SIZE)
        self.shares.tell()
        pinned = self.shares.firm(PINNED) // PAGE_SIZE
        pages = segments * self.segments.area * 9 // 10 - pinned - self.reservations.pages
        self.plane.set_space(max(0, pages) * PAGE_SIZE, ENOSPC if count else EIO)

    # ---- events ----

    def _on_event(self, event: Event) -> None:
        if event.type == EventType.SPILL:
            self.start_task(self.sealing.spill_quietly, InodeNumber(event.inode))
        elif event.type == EventType.RESEAL:
            self.start_task(self.sealing.seal_quietly, InodeNumber(event.inode))
        elif event.type == EventType.BAD_BLOCK:
            # Being moved or written right now: whoever reads it again says so again.
            if self.is_busy(event.inode):
                return
            self.drop_bad(InodeNumber(event.inode), event.value)
        elif event.type == EventType.SLAB_WANTED:
            self.start_task(self.slabs.wanted, InodeNumber(event.inode), event.value)
        elif event.type == EventType.SLAB_CLOSED:
            self.start_task(self.slabs.closed, InodeNumber(event.inode), bool(event.value))
        elif event.type == EventType.SLAB_FREE:
            self.slabs.freed(InodeNumber(event.inode), event.value)
        elif event.type == EventType.IO_ERROR:
            self.service.note_error(event.value >> 32, event.value & 0xFFFFFFFF)
        elif event.type == EventType.DEVICE:
            self.service.note_connection(event.value, *self.plane.device_message(event.value))
        elif event.type == EventType.IDLE and self.index.hidden(event.inode) is not None:
            # Open when its device went: now nobody has it any more.
            with suppress(PlaneError):
                self.plane.inode_remove(event.inode)
        elif self._options.on_event is not None:
            self._options.on_event(int(event.type), event.inode, event.value)

    async def check_block(self, number: InodeNumber, segment: int) -> None:
        """A native client says that a block failed its checksums: it is dropped if that is so."""
        record = self.index.raw(number)
        if record is None or self.is_busy(number):
            return
        inode = Inode.unpack(record)
        if not inode.sealed or all(segment != used for used in usage(inode)):
            return
        try:
            await self.plane.store_verify(record, verify_data=True)
        except PlaneError as error:
            if error.errno == EBADMSG and self.index.raw(number) == record and not self.is_busy(number):
                self.drop_bad(number, segment)

    def drop_bad(self, number: InodeNumber, segment: int) -> None:
        """A block failed verification: it is a miss from now on, unless it has moved since."""
        inode = self.index.get(number)
        if inode is None or not inode.sealed or self.plane.inode_is_open(number) == OpenState.BEING_WRITTEN:
            return
        if segment != inode.segment and all(extent.segment != segment for extent in inode.extents):
            return
        self._bad_blocks += 1
        log.error("inode %d in segment %d: failed its checksums; dropped", number, inode.segment)
        if inode.nameless:
            return
        try:
            kept = self.plane.inode_remove(number)
        except PlaneError:
            kept = 0
        if kept:
            nameless = inode.copy()
            nameless.flags |= InodeFlags.NAMELESS
            nameless.nlink = 0
            self.index.put(nameless, inode)
            self.segments.mark_dirty(self.segments.all[inode.segment], gone=True)
        else:
            self.drop(inode)
        self.plane.notify_epoch()

    # ---- blocks that come and go ----

    def entered(self, inode: Inode) -> None:
        """A block that a native client wrote is in the index and in the block table."""
        self.segments.account(None, inode)
        self.count_pinned(None, inode)

    def drop(self, inode: Inode) -> None:
        """The block left the block table: it leaves the index and the accounts."""
        self.index.delete(inode)
        self.forget(inode)

    def linger(self, inode: InodeNumber) -> None:
        """A block whose name was taken by another: it can be opened for another second by who just looked it up."""
        self._lingering[inode] = trio.current_time() + _LINGER_S

    def lingers(self, inode: InodeNumber) -> bool:
        """It is not to go when its last handle is closed; an IDLE event follows when its time is over."""
        return inode in self._lingering

    def _end_lingering(self) -> None:
        while self._lingering and next(iter(self._lingering.values())) <= trio.current_time():
            number = next(iter(self._lingering))
            del self._lingering[number]
            if self._options.on_event is not None:
                self._options.on_event(int(EventType.IDLE), number, 0)

    def count_pinned(self, before: Inode | None, after: Inode | None) -> None:
        """What is pinned came, went or changed its size: writers learn of it at once."""
        if not self.pins:
            return
        known = after or before
        assert known is not None
        user = self.pins.user(known.pack())
        if user is not None:
            come = 0 if after is None else sum(usage(after).values())
            gone = 0 if before is None else sum(usage(before).values())
            self.pins.pages = max(0, self.pins.pages + come - gone)
            self.shares.add(PINNED, user, (come - gone) * PAGE_SIZE)
            self._set_space()

    def moved(self, before: Inode, after: Inode) -> None:
        """It lies in another directory: a pin may hold it that did not, or no longer."""
        if after.kind == Kind.DIRECTORY:
            self.pins.changed.set()  # all below it: counted anew
        else:
            self.count_pinned(before, None)
            self.count_pinned(None, after)

    def forget(self, inode: Inode) -> None:
        """A sealed block was removed from the index: its pages are free, its summary must not name it."""
        if not inode.sealed or inode.kind != Kind.FILE:
            return
        self.count_pinned(inode, None)
        if InodeFlags.PINNED in inode.flags:
            self.pins.remove(inode.inode)
        self.segments.mark_dirty(self.segments.all[inode.segment], gone=True)
        self.segments.account(inode, None)

    def renamed(self, inode: Inode, *, entered: bool = False) -> None:
        """Name or attributes of what is in the index have changed: summaries must say so. The version rises with it,
        unless it did when it `entered`."""
        if not entered and not inode.nameless:
            inode.version = self.next_version()
            self.index.put(inode, inode)
            self.plane.inode_update(inode.pack())
        if inode.kind == Kind.DIRECTORY:
            self.sealing.directory_moved()
            self._moved_directories.append(inode.inode)
            self._directory_moved.set()
        elif inode.sealed:
            self.segments.renamed(self.segments.all[inode.segment])

    # ---- pins ----

    async def pin(self, inode: InodeNumber, user: int = ROOT) -> None:
        """Keep a file, or everything below a directory, from eviction. ShareError if that is more than `user` may
        hold."""
        # One after the other: of two that have room each, the second may have none.
        async with self._pinning:
            if not self.shares.is_exempt(user):
                size = await self.pins.pages_of(inode) * PAGE_SIZE
                self.shares.check(user, size, f"pin of inode {inode}")
                self.shares.add(PINNED, user, size)
            self._set_pinned(inode, True, user)

    async def unpin(self, inode: InodeNumber) -> None:
        async with self._pinning:
            user = self.pins.charged(inode)
            size = 0 if user is None else await self.pins.pages_of(inode) * PAGE_SIZE
            self._set_pinned(inode, False)
            if user is not None:
                self.shares.add(PINNED, user, -size)

    def _set_pinned(self, number: InodeNumber, pinned: bool, user: int = ROOT) -> None:
        before = self.index.get(number)
        if before is None:
            return
        inode = before.copy()
        inode.flags = before.flags | InodeFlags.PINNED if pinned else before.flags & ~InodeFlags.PINNED
        self.index.put(inode, before)
        if pinned:
            self.pins.add(number, user)
        else:
            self.pins.remove(number)
            self.segments.look_again()
        if inode.sealed or inode.kind == Kind.DIRECTORY:
            self.renamed(inode)
        else:
            self.plane.inode_update(inode.pack())

    # ---- for the front ----

    async def evict(self, size: int | None, progress: Callable[[int, int], None] | None = None) -> int:
        """Evict blocks of `size` bytes together; None: all that are neither pinned nor open. Blocks that are worth a
        copy go last. Returns the bytes evicted."""
        start, wanted = self.evictor.counters.bytes, self.space().used if size is None else size

        def enough() -> bool:
            done = self.evictor.counters.bytes - start
            if progress is not None:
                progress(min(done, wanted), wanted)
            return size is not None and done >= size

        if self.rebuilding:
            raise KvfsError("the index is being rebuilt; nothing can be evicted until that is done")
        if size is not None:
            await self.evictor.free_until(enough)
            before = -1
            while not enough() and self.evictor.counters.bytes > before:
                # What is left lies in segments that are still written to, or were when this began.
                before = self.evictor.counters.bytes
                self.segments.retire_open()
                await self.evictor.free_until(enough)
        if not enough():
            self.segments.retire_open()
            await self.evictor.clear(enough)
        await self._commit_and_flush()
        return self.evictor.counters.bytes - start

    async def sync(self) -> None:
        """Everything sealed and changed so far is durable when this returns. KvfsError if it cannot be."""
        await self.service.sync()
        await self.index.commit()

    @property
    def config(self) -> PoolConfig:
        return self._opened.config

    @property
    def devices(self) -> Sequence[Device]:
        return self._opened.devices

    def space(self) -> Space:
        statistics = self.segments.statistics()
        table = self.plane.table_statistics()
        return Space(
            statistics.capacity, statistics.live_bytes, self.pins.bytes, self.slabs.bytes, table["records"],
            self._records_max,
        )  # fmt: skip

    def statistics(self) -> StoreStatistics:
        index = self.index.statistics()
        return StoreStatistics(
            uuid=str(self.config.uuid), epoch=self.epoch, blocks=self.plane.table_statistics()["blocks"],
            segments=self.segments.statistics(), space=self.space(), eviction=self.evictor.counters,
            bad_blocks=self._bad_blocks, sealed=self.sealing.sealed,
            seal_retries=self.sealing.retries, index_bytes=index.bytes, index_pending=index.changes_pending,
            commit_failures=index.commit_failures, rebuilding=self.rebuilding, notes=tuple(self.notes),
            reservations=self.reservations.statistics(),
        )  # fmt: skip

    # ---- devices ----

    def leave_table(self, number: InodeNumber) -> None:
        """Somebody asked for an inode that is not there: if its device has just gone, its name goes at once."""
        self.service.leave_table([number])

    def device_away(self, segments: Sequence[SegmentIndex]) -> None:
        """Nothing in these can be read or written."""
        self.slabs.fail(segments)

    def check_slabs(self, device: int, segments: Sequence[SegmentIndex]) -> None:
        """UsageError if a slab lies there: it can be neither moved nor read from anywhere else."""
        found = self.slabs.on_segments(segments)
        if found:
            inodes = ", ".join(str(number) for number in found[:8])
            raise UsageError(
                f"device {device}: {len(found)} slabs lie there (inodes {inodes}); end the programs that have them open"
            )

    def places_changed(self) -> None:
        """What can be written became more or less."""
        self._set_space()

    def devices_changed(self) -> None:
        if self._options.on_devices is not None:
            self._options.on_devices()

    async def remove_device(self, device: int, *, drain: bool) -> int:
        """Take a device out for good; `drain`: what is pinned, open or hot is carried over first. Returns how many
        blocks went."""
        self._check_settled()
        return await self.service.remove(device, self._drain if drain else None)

    async def replace_device(self, device: int, path: Place, *, force: bool) -> int:
        """Let another device take its place, empty. Returns how many blocks went with the old one."""
        self._check_settled()
        return await self.service.replace(device, path, force)

    def _check_settled(self) -> None:
        if self.rebuilding:
            raise KvfsError("the index is being rebuilt; devices can be changed when that is done")

    async def _drain(self, numbers: Sequence[SegmentIndex]) -> None:
        for number in numbers:
            done = False
            with trio.move_on_after(_DRAIN_TIMEOUT_S):
                while not await self.evictor.drain(self.segments.all[number]):
                    # No room: others go first.
                    if not await self.evictor.free_until(lambda: self.segments.free_count() > self.evictor.low):
                        await trio.sleep(0.1)
                    await self._commit_and_flush()
                done = True
            if not done:
                raise NoSpaceError(f"segment {number}: not drained in {_DRAIN_TIMEOUT_S:.0f} s: no room for its blocks")

    # ---- closing ----

    async def close(self) -> None:
        """Seal what is dirty, close the open segments, commit, mark the pool clean. Once."""
        if self._closed or not hasattr(self, "evictor"):
            return
        self._closed = True
        self.ending()
        clean = not self.rebuilding
        with trio.move_on_after(_SEAL_AT_CLOSE_S) as scope:
            await self.reservations.close()
            await self._seal_all()
        if scope.cancelled_caught:
            log.error("not everything could be sealed within %.0f s", _SEAL_AT_CLOSE_S)
            clean = clean and not self.reservations.pages  # segments with clients' runs in flight stay open
        self.slabs.close()
        self.segments.stop()
        for number in self.index.volatile_inodes():
            inode = self.index.get(number)
            if inode is not None and inode.sealed:
                self.drop(inode)
        try:
            await self.index.commit()
            for _ in range(2):  # the second writes the other copy where the first names what is gone
                await self.segments.flush_summaries()
            await self.service.sync()
            self.index.meta_put(META_CLEAN, b"1" if clean else b"0")
            await self.index.commit()
        except KvfsError as error:
            log.error("the pool could not be closed cleanly: %s", error)

    async def _seal_all(self) -> None:
        """What is not sealed yet, and what the data plane still wants sealed."""
        for number in self.plane.dirty_files():
            if not self.is_busy(number):
                await self.sealing.seal_quietly(number)
        await self.sealing.retry()
        await self.sealing.wait_idle()


def make_plane(opened: OpenPool, options: StoreOptions, epoch: int, records_max: int) -> Plane:
    """A data plane over the pool's devices."""
    config = opened.config
    members = config.members()
    return Plane(
        PlaneOptions(
            secret=config.secret, mount_epoch=epoch, zone_size=config.geometry.zone_size,
            stripe_unit=config.geometry.stripe_unit, stripe_width=config.geometry.stripe_width,
            segment_count=len(members), records_max=records_max, staging_size=options.staging_size,
            read_memory_size=options.read_memory_size, io_timeout_ms=options.io_timeout_ms,
            request_timeout_ms=options.request_timeout_ms, server_threads=options.server_threads,
            store_threads=options.store_threads, max_read=options.max_read, max_write=options.max_write,
            spin_us=options.spin_us, kernel_timeout_s=options.kernel_timeout_s, slow_ms=options.slow_ms,
        ),
        [device.fd for device in opened.devices],
        [device.zones_offset for device in config.devices],
        members,
    )  # fmt: skip


def _open_index(opened: OpenPool) -> tuple[LmdbIndex, bool]:
    """The pool's index, and whether it must be rebuilt: missing, unreadable, of another pool, or half rebuilt."""
    path = opened.path / INDEX_NAME
    if path.is_dir():
        index: LmdbIndex | None = None
        try:
            index = LmdbIndex(path)
            uuid = index.meta_get(META_UUID)
            if uuid == opened.config.uuid.bytes and not index.incomplete:
                check_index(index, opened)
                return index, False
            log.warning("%s: %s; it is made anew", path, "half rebuilt" if uuid else "empty")
        except KvfsError as error:
            log.warning("%s; it is made anew", error)
        except Exception as error:  # whatever LMDB says of a damaged file
            log.warning("index %s: %s; it is made anew", path, error)
        if index is not None:
            index.close()
        shutil.rmtree(path, ignore_errors=True)
    return LmdbIndex(path, durable=False), True


def check_index(index: LmdbIndex, opened: OpenPool) -> None:
    """FormatError unless it is of the pool's last mount, and all that a mount takes from it can be a kvfs's."""
    known_epoch(index, opened)
    members, end_page = opened.config.members(), opened.config.geometry.end_page
    for number, data in index.segment_items():
        if number >= len(members):
            raise FormatError(f"segment {number} of a pool with {len(members)}")
        state = Segment(SegmentIndex(number))
        state.unpack_into(data)
        if state.next_page > end_page or state.generation >> COUNTER_BITS > opened.epoch:
            raise FormatError(f"segment {number}: page {state.next_page} of {end_page}, generation "
                              f"{state.generation:#x} at mount {opened.epoch}")  # fmt: skip
    _number(index, META_VERSION)
    in_flight = index.meta_get(META_IN_FLIGHT) or b""
    if len(in_flight) % 8:
        raise FormatError(f"the versions in flight have {len(in_flight)} bytes")
    for chunk in index.records(_CHUNK):
        check_records(chunk, epoch_max=opened.epoch, segment_count=len(members), end_page=end_page, origin="inodes")


def known_epoch(index: LmdbIndex, opened: OpenPool) -> int:
    """The last mount that the index knows. FormatError if the devices know a later one: that was with another index, of
    another directory or a copy, and what it wrote, replaced and removed is not known to this one."""
    known = _number(index, META_EPOCH)
    if max(known, _number(index, META_OPENING)) < opened.epoch:
        raise FormatError(f"it knows mount {known}, the labels mount {opened.epoch}: with another index")
    return known


def _index_epoch(opened: OpenPool) -> int:
    """The last mount that the index knows; 0 if there is no index that can say."""
    path = opened.path / INDEX_NAME
    if not (path / "data.mdb").exists():
        return 0
    try:
        index = LmdbIndex(path, read_only=True)
    except KvfsError:
        return 0
    try:
        own = index.meta_get(META_UUID) == opened.config.uuid.bytes and not index.incomplete
        known = known_epoch(index, opened) if own else 0
        if known >= EPOCH_MAX:
            raise FormatError(f"it knows mount {known}; the last possible is {EPOCH_MAX - 1}")
        return known
    except Exception as error:  # whatever LMDB says of a damaged file: _open_index says what becomes of it
        log.warning("index %s: %s", path, error)
        return 0
    finally:
        index.close()


def _number(index: LmdbIndex, key: bytes) -> int:
    value = index.meta_get(key)
    if value is not None and len(value) != META_NUMBER.size:
        raise FormatError(f"{key.decode()} has {len(value)} bytes; {META_NUMBER.size} are needed")
    return 0 if value is None else int(META_NUMBER.unpack(value)[0])
