"""The store of one mounted pool: opens it, runs its tasks, closes it.

Durable in this order: data and block header (before the seal is answered), index (a second later, or at fsync),
summaries. An evicted segment may be written again before the index says so. internals/recovery.md in docs/ says what a
crash takes. blocks.py keeps index, block table and summaries in step; sealing.py writes blocks.
"""

from __future__ import annotations

import logging
import os
from array import array
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from errno import EBADMSG
from functools import partial
from pathlib import Path

import trio

from kvfs.errors import DeviceError, InUseError, KvfsError, NoSpaceError
from kvfs.index.lmdb import LmdbIndex, PoolIndexError
from kvfs.names import Leave
from kvfs.plane import Event, EventType, Plane, PlaneError
from kvfs.pool.config import CONFIG_NAME, PoolConfig, compare
from kvfs.pool.devices import Device, DeviceAddress
from kvfs.pool.format import (
    META_CLEAN,
    META_EPOCH,
    META_IN_FLIGHT,
    META_JOURNAL,
    META_NUMBER,
    META_OPENING,
    META_UUID,
    META_VERSION,
)
from kvfs.pool.heart import Heart
from kvfs.pool.joining import ensure_joined
from kvfs.pool.labels import write_labels
from kvfs.pool.lock import INDEX_NAME, PoolLock, locked
from kvfs.pool.opening import OpenPool, open_pool
from kvfs.record import RECORD_HEAD, Inode, Kind, split_records
from kvfs.store import recovery
from kvfs.store.blocks import Blocks
from kvfs.store.device_service import DeviceService
from kvfs.store.eviction import EvictionPolicy, LeastLoss
from kvfs.store.evictor import EvictionCounters, Evictor
from kvfs.store.groups import Groups
from kvfs.store.inheritance import Inheritance, nameless_blocks
from kvfs.store.leases import Leases, LeaseStatistics
from kvfs.store.opening import StoreOptions, index_epoch, make_plane, meta_number, open_index, pod_options
from kvfs.store.pins import Pins
from kvfs.store.reservations import Reservations, ReservationStatistics
from kvfs.store.sealing import Sealing
from kvfs.store.segment import SegmentStatistics, usage
from kvfs.store.segments import Segments
from kvfs.store.shares import Shares
from kvfs.store.slabs import Slabs
from kvfs.store.space import Space
from kvfs.store.tasks import Tasks
from kvfs.types import COUNTER_BITS, PAGE_SIZE, ROOT_INODE, InodeNumber, SegmentIndex

log = logging.getLogger("kvfs.store.pool")

_COMMIT_CHANGES = 20_000
_COMMIT_POLL_S = 0.1
_PIN_COUNT_S = 60.0
_SEAL_AT_CLOSE_S = 60.0
# Time to drain one segment of a device.
_DRAIN_TIMEOUT_S = 120.0
_CHUNK = 1 << 20
# Blocks that go in one turn of the loop: about two milliseconds.
_IDLE_BATCH = 256
_RUN_POLL_S = 0.002


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
    rebuilt: tuple[int, int]
    notes: tuple[str, ...]
    reservations: ReservationStatistics
    leases: LeaseStatistics


class Store:
    """Use: `async with Store.open(path) as store:`. Its background work runs while it is open; `run` may be awaited
    too."""

    def __init__(self, opened: OpenPool, index: LmdbIndex, plane: Plane, options: StoreOptions, heart: Heart,
                 lock: PoolLock, records_max: int, policy: EvictionPolicy, nursery: trio.Nursery) -> None:  # fmt: skip
        """For Store.open only."""
        self.path, self.epoch = opened.path, heart.me.epoch
        self._opened, self._options, self._records_max = opened, options, records_max
        self._heart, self._lock = heart, lock
        self.notes = list(opened.notes)
        self.index, self.plane = index, plane
        self.slot = opened.slot
        self.segments = Segments(opened.config, opened.config.members(), plane, index, self.epoch, slot=self.slot)
        self.shares = Shares(plane, opened.config.user_share, os.geteuid())
        self._tasks = Tasks(nursery, plane)
        # The data plane appends all new blocks to one stream.
        self._policy_is_plain = type(policy).stream_of is LeastLoss.stream_of
        self.blocks = Blocks(index, plane, self.segments, self.shares, self.epoch)
        self.sealing = Sealing(self.blocks, policy, self._tasks)
        self.reservations = Reservations(self.blocks)
        self.leases = Leases(self.blocks, self.epoch)
        self.slabs = Slabs(self.blocks, self.sealing, opened.config.slab_quota)
        self.service = DeviceService(opened, self.blocks, self.slabs, heart, self._devices_changed)
        self.evictor = Evictor(self.blocks, self.sealing, policy, Groups(index, opened.config.groups))
        self.rebuilding = False
        self._job: recovery.Rebuild | None = None
        self._ended = False
        self._leaves = False
        self._commit_failed = False
        self._lost = trio.Event()

    # ---- opening ----

    @classmethod
    @asynccontextmanager
    async def open(
        cls, pool: Path, options: StoreOptions | None = None, policy: EvictionPolicy | None = None
    ) -> AsyncIterator[Store]:
        """Open a pool for use: locked, recovered, its block table loaded. Raises PoolError, DeviceError, PlaneError."""
        options = options or StoreOptions()
        failure: BaseException | None = None
        async with AsyncExitStack() as stack:
            lock = options.lock or stack.enter_context(locked(pool, options.use, tell=options.on_wait))
            if options.join:
                ensure_joined(pool, options.on_wait)
            opened = open_pool(pool, degraded=True, tell=options.on_wait)
            stack.callback(opened.close)
            known = index_epoch(opened)
            if known > opened.epoch and not opened.absent:
                raise PoolIndexError(f"index {pool / INDEX_NAME}: it knows mount {known}, the labels none after "
                                  f"{opened.epoch}: other devices?")  # fmt: skip
            opened.leave_stale(known)
            heart = Heart.take(opened, use=options.use, known=known, next_epoch=True, force=options.take_over,
                               tell=options.on_wait, dead=lock.left)  # fmt: skip
            stack.callback(heart.stop)
            epoch = heart.me.epoch
            # The data plane is made before anything but beats is written: it finds what this machine lacks.
            size = sum(device.size for device in opened.config.devices)
            records_max = options.records_max or min(64 << 20, max(2 << 20, (size >> 13) + (1 << 20)))
            plane = make_plane(opened, options, epoch, records_max)
            stack.callback(plane.destroy)
            options_of_pod = pod_options(opened)
            if options_of_pod is not None:
                plane.join(options_of_pod)
            index, rebuild = open_index(opened, plane.names)
            stack.callback(index.close)
            # This ties labels of this mount to this index, also if the mount ends while it writes them.
            index.meta_put(META_OPENING, META_NUMBER.pack(epoch))
            index.commit_now()
            if opened.config.pod is None:
                failed = write_labels(opened.config, opened.devices, epoch, opened.absent)
            else:
                failed = heart.mount()
            opened.absent.update(failed)
            if failed and len(opened.absent) == len(opened.devices):
                raise DeviceError(next(iter(failed.values())))
            nursery = await stack.enter_async_context(trio.open_nursery())
            stack.callback(nursery.cancel_scope.cancel)
            # An error is not raised in here: the nursery would wrap it, and the caller looks for a KvfsError.
            try:
                store = cls(opened, index, plane, options, heart, lock, records_max, policy or LeastLoss(), nursery)
                stack.callback(store._end)
                store._guard(nursery)
                pumping = trio.CancelScope(shield=True)
                stack.callback(pumping.cancel)
                store._tasks.start(store._pump, pumping)
                await store._start(rebuild, stack)
                yield store
            except BaseException as error:
                failure = error
        if failure is not None:
            raise failure

    def _end(self) -> None:
        self._ended = True

    async def _start(self, rebuild: bool, stack: AsyncExitStack) -> None:
        """Recover, load the block table, and begin the work in the background. Once segments and block table are
        loaded, `stack` closes the store at its end."""
        index = self.index
        clean = index.meta_get(META_CLEAN) == b"1" and not rebuild
        inherited = self._inherit(rebuild)
        index.meta_put(META_CLEAN, b"0")
        index.meta_put(META_EPOCH, META_NUMBER.pack(self.epoch))
        index.meta_put(META_UUID, self.config.uuid.bytes)
        if index.raw(ROOT_INODE) is None:
            index.put(self._root(), None)
        index.commit_now()
        self.segments.load(index.segment_items())
        self.service.start()
        if rebuild:
            self.notes.append("the index was missing or unreadable; it is being rebuilt from the devices")
            job = recovery.Rebuild(self.index, self.segments, self.plane, self.pins)
            await job.prepare()
        elif not clean or (inherited is not None and inherited.has_news):
            clean = False
            in_flight = array("Q", index.meta_get(META_IN_FLIGHT) or b"")
            known_version = meta_number(index, META_VERSION)
            await recovery.recover(self.index, self.segments, self.plane, self.pins, known_version, set(in_flight),
                                   inherited)  # fmt: skip
        if inherited is not None:
            inherited.follow(self.epoch, taken=True)
        # From here on each commit carries versions: before it, recovery needed those of the last mount.
        self.blocks.commit_now()
        if inherited is not None:
            inherited.attach(self.plane.names)
        if not rebuild:
            for chunk in index.records(_CHUNK):
                self.plane.table_load(self._visible(chunk) if index.is_hiding else chunk)
                await trio.lowlevel.checkpoint()
            self.plane.table_load(b"".join(nameless_blocks(index)))
            self.plane.table_set_complete(True)
        else:
            self.plane.table_load(self._root_record())
        self.segments.start()
        self.evictor.begin()
        if not clean and not rebuild and (inherited is None or inherited.is_new):
            # The summaries keep what recovery found, even if the next crash takes the index along. Under a mount that
            # is taken over requests wait: there the first turn of summaries has it, within a second.
            await self.segments.flush_summaries()
        stack.push_async_callback(self._close)
        self.blocks.space.update()
        await self.service.take_in_stale()
        self.rebuilding = rebuild
        if rebuild:
            self._job = job
            self._tasks.start(self._rebuild, job)
        self._tasks.start(self.service.run)
        self._tasks.start(self._commit_loop)
        self._tasks.start(self._flush_loop)
        self._tasks.start(self._retry_loop)
        self._tasks.start(self.reservations.run)
        self._tasks.start(self.leases.run)
        self._tasks.start(self.evictor.run, lambda: not self.rebuilding)
        self._tasks.start(self._prepare_loop)
        self._tasks.start(self._count_pins_loop)
        self._tasks.start(self.blocks.follow_moves)
        self._tasks.start(self.blocks.follow_overtaken)
        if not rebuild:
            self._open_names()
        self._tasks.start(self.blocks.tell_evictions)

    def _inherit(self, rebuild: bool) -> Inheritance | None:
        """The journal's changes above the index, before this mount changes that. JournalError."""
        if self._options.journal is None:
            self.index.meta_put(META_JOURNAL, None)
            return None
        inherited = Inheritance(self._options.journal, self.index, rebuild=rebuild)
        if inherited.ignored:
            log.warning("%s", inherited.ignored)
        inherited.follow(self.epoch, taken=False)
        return inherited

    def _open_names(self) -> None:
        """From now on the data plane makes, renames, removes and seals files."""
        self.index.keep(ROOT_INODE)  # whatever lies below a pin lies below it
        if self.plane.abandoned is None and self._policy_is_plain:
            self.plane.names.leave(Leave.CLOSED, False)

    def _root(self) -> Inode:
        owner = os.stat(self.path)
        now = owner.st_mtime_ns
        return Inode(
            inode=ROOT_INODE, parent=ROOT_INODE, name=b"", kind=Kind.DIRECTORY, mode=0o040755, uid=owner.st_uid,
            gid=owner.st_gid, nlink=2, mtime_ns=now, ctime_ns=now, atime_ns=now,
        )  # fmt: skip

    def _visible(self, records: bytes) -> bytes:
        """The records but those of blocks on devices that are away."""
        places = split_records(records)
        pieces = [records[at : at + size] for at, size in places]
        return b"".join(piece for piece in pieces if self.index.raw(RECORD_HEAD.unpack_from(piece)[4]) is not None)

    def _root_record(self) -> bytes:
        record = self.index.raw(ROOT_INODE)
        assert record is not None
        return record

    @property
    def rebuilt(self) -> tuple[int, int]:
        """Segments that the rebuild of the index has read, and all that hold something; zeros if there was none."""
        return (0, 0) if self._job is None else (self._job.done, self._job.total)

    async def _rebuild(self, job: recovery.Rebuild) -> None:
        try:
            count = await job.run()
            await self.blocks.make_durable()
            log.info("the index was rebuilt: %d blocks", count)
            self.notes = [note for note in self.notes if "rebuilt" not in note]
        except KvfsError as error:
            log.error("the rebuild of the index broke off: %s; what was found so far is there", error)
        self.rebuilding = False
        self.plane.table_set_complete(True)
        self._open_names()
        self.segments.need_space.set()

    # ---- owning ----

    def _guard(self, nursery: trio.Nursery) -> None:
        """Beat, and end as after a crash, at once, when another has taken the devices."""
        token = trio.lowlevel.current_trio_token()

        def lost(reason: str) -> None:
            with suppress(trio.RunFinishedError):
                token.run_sync_soon(self._lose, reason)

        async def wait() -> None:
            await self._lost.wait()
            raise InUseError(f"{self.path}: {self._heart.lost}")

        nursery.start_soon(wait)
        self._heart.start(lost)

    def _lose(self, reason: str) -> None:
        if self.plane.abandoned is None and not self._ended:
            log.critical("%s; it ends as after a crash: nothing more is written", reason)
            for device in range(len(self._opened.devices)):
                self.plane.device_stop(device)
            self.plane.abandon(reason)
            self._lost.set()

    async def raise_epoch(self) -> None:
        """In a pod: take another epoch, as the numbers of the last one run out."""
        epoch = await trio.to_thread.run_sync(self._heart.next_epoch)
        self.index.meta_put(META_OPENING, META_NUMBER.pack(epoch))
        await self.blocks.commit()
        await trio.to_thread.run_sync(self._heart.raise_epoch, epoch)
        self.index.meta_put(META_EPOCH, META_NUMBER.pack(epoch))
        self.index.follow_journal(META_JOURNAL, META_NUMBER.pack(epoch))
        await self.blocks.commit()
        self.blocks.names.number(epoch << COUNTER_BITS | self.slot, in_pod=True)
        log.info("mount epoch %d: the numbers of the last one were running out", epoch)

    def ending(self) -> None:
        """Tell others that want the pool that it will soon be free."""
        self._heart.ending()
        self._lock.describe(ending=True)

    def leave(self) -> None:
        """Kernels keep their handles, for the next store that has the journal: sealed blocks without a name stay in
        it."""
        self._leaves = self._options.journal is not None

    # ---- background ----

    async def run(self) -> None:
        """Until cancelled. The background tasks are the store's own; a failure in one ends `async with Store.open`."""
        await trio.sleep_forever()

    async def _pump(self, scope: trio.CancelScope) -> None:
        """Deliver completions until the scope is cancelled: shielded tasks wait for them also when all else was
        cancelled."""
        with scope:
            await self.plane.pump(self._on_event)

    async def _commit_loop(self) -> None:
        while True:
            deadline = trio.current_time() + self._options.commit_interval_s
            while (now := trio.current_time()) < deadline and not self._is_commit_due():
                pending = self.index.changes_pending
                await trio.sleep(min(_COMMIT_POLL_S, deadline - now) if pending else deadline - now)
            await self._commit_and_flush()
            if self.plane.flush_wanted():  # its event is lost where memory ends
                self._tasks.start(self.sealing.make_room)

    def _is_commit_due(self) -> bool:
        """Whether so much waits for a commit that it begins before its time."""
        fill = self.plane.names.journal_fill()
        return self.index.changes_pending >= _COMMIT_CHANGES or (fill is not None and fill.used > fill.size // 2)

    async def _flush_loop(self) -> None:
        """Writers wait for segments that were freed: when the summaries say so, they may have them. The index, whose
        commit takes long on a busy disk, seldom has to say it first."""
        segments = self.segments
        while True:
            await segments.need_flush.wait()
            segments.need_flush = trio.Event()
            await segments.flush_summaries(all_dirty=False)
            if segments.waits_for_commit:
                await self._commit_and_flush(all_dirty=False)

    async def _commit_and_flush(self, *, all_dirty: bool = True) -> None:
        self.plane.expire()
        self._take_notes()
        try:
            await self.blocks.commit()
            self.blocks.commit_failed(None)
            if self._commit_failed:
                log.info("the index can be committed again")
            self._commit_failed = False
        except KvfsError as error:
            self.blocks.commit_failed(error)
            if not self._commit_failed:
                log.error("%s; tried again every second", error)
            self._commit_failed = True
            # Writers go on: they may not wait for a disk that is not the pool's.
            try:
                self.index.distrust()
            except OSError as failure:
                log.error("index: cannot be marked for a rebuild: %s; freed segments wait for its commit", failure)
        await self.segments.flush_summaries(all_dirty=all_dirty)
        self.sealing.forget_ancestors()
        self.sealing.check_held()
        while ended := self.blocks.end_lingering(_IDLE_BATCH):
            for number in ended:
                if self._options.on_event is not None:
                    self._options.on_event(int(EventType.IDLE), number, 0)
            await trio.lowlevel.checkpoint()  # a second's stores may have replaced tens of thousands
        self.blocks.space.update()

    async def _retry_loop(self) -> None:
        """A task of its own: a seal may wait for space, which commits and summaries make."""
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
            self.blocks.space.update()
            with trio.move_on_after(_PIN_COUNT_S if self.pins else float("inf")):
                await self.pins.changed.wait()
            self.pins.changed = trio.Event()

    # ---- events ----

    def _on_event(self, event: Event) -> None:
        if event.type == EventType.SPILL:
            self._tasks.start(self.sealing.spill_quietly, InodeNumber(event.inode))
        elif event.type == EventType.RESEAL:
            self._tasks.start(self.sealing.seal_quietly, InodeNumber(event.inode))
        elif event.type == EventType.BAD_BLOCK:
            # The block is being moved or written right now. A later reader will report it again.
            if self.sealing.is_busy(event.inode):
                return
            self.blocks.drop_bad(InodeNumber(event.inode), event.value)
        elif event.type == EventType.OVERTAKEN:
            self.blocks.drop_overtaken(InodeNumber(event.inode), event.value)
        elif event.type == EventType.SLAB_WANTED:
            self._tasks.start(self.slabs.wanted, InodeNumber(event.inode), event.value)
        elif event.type == EventType.SLAB_CLOSED:
            self._tasks.start(self.slabs.closed, InodeNumber(event.inode), bool(event.value))
        elif event.type == EventType.SLAB_FREE:
            self.slabs.freed(InodeNumber(event.inode), event.value)
        elif event.type == EventType.IO_ERROR:
            self.service.note_error(event.value >> 32, event.value & 0xFFFFFFFF)
        elif event.type == EventType.ROOM:
            self._tasks.start(self.sealing.make_room)
        elif event.type == EventType.LINGERS:
            self.blocks.linger(InodeNumber(event.inode))
        elif event.type == EventType.PINNED:
            self.pins.changed.set()
        elif event.type == EventType.PLACES:
            self._take_notes()
        elif event.type == EventType.RESERVED:
            self.reservations.look()
        elif event.type == EventType.DEVICE:
            self.service.note_connection(event.value, *self.plane.device_message(event.value))
        elif event.type == EventType.IDLE and self.index.raw(event.inode) is None:
            # The file was open when its device went. Now nobody has it open any more. The index may have lost it since.
            with suppress(PlaneError):
                self.plane.inode_hide(event.inode)
        elif self._options.on_event is not None:
            self._options.on_event(int(event.type), event.inode, event.value)

    def _take_notes(self) -> None:
        self.segments.take_notes()
        for run in self.segments.take_failed():
            self._tasks.start(self.sealing.bury, run)

    async def check_block(self, number: InodeNumber, segment: int) -> None:
        """A native client says that a block failed its checksums: it is dropped if that is so."""
        record = self.index.raw(number)
        if record is None or self.sealing.is_busy(number):
            return
        inode = Inode.unpack(record)
        if not inode.sealed or all(segment != used for used in usage(inode)):
            return
        try:
            await self.plane.store_verify(record, verify_data=True)
        except PlaneError as error:
            if error.errno == EBADMSG and self.index.raw(number) == record and not self.sealing.is_busy(number):
                self.blocks.drop_bad(number, segment)

    # ---- for the front ----

    async def evict(self, size: int | None, progress: Callable[[int, int], None] | None = None) -> int:
        """Evict blocks of `size` bytes together. With None, all blocks that are neither pinned nor open are evicted.
        Blocks that are worth a copy go last. Returns the bytes evicted."""
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
                # The rest lies in segments that are still written to, or were when this began.
                before = self.evictor.counters.bytes
                self.segments.retire_open()
                await self.evictor.free_until(enough)
        if not enough():
            self.segments.retire_open()
            await self.evictor.clear(enough)
        self.blocks.tell_hosts()
        await self._commit_and_flush()
        return self.evictor.counters.bytes - start

    async def sync(self) -> None:
        """All that was sealed and changed so far is durable when this returns. KvfsError if it cannot be."""
        await self.service.sync()
        await self.blocks.commit()

    @property
    def pins(self) -> Pins:
        return self.blocks.pins

    @property
    def config(self) -> PoolConfig:
        return self._opened.config

    def take_rules(self, config: PoolConfig) -> tuple[list[str], list[str]]:
        """Take what may change of a mounted pool from a pool.toml that was read again. Returns what has changed, and
        what waits for the next mount, as words. PoolError if it describes another pool."""
        old = self.config
        compare(config, CONFIG_NAME, old, "the pool that is mounted")
        new = replace(
            old, groups=config.groups, slab_quota=config.slab_quota, user_share=config.user_share,
            log_level=config.log_level,
        )  # fmt: skip
        taken = [
            f"{key} was {getattr(old, key)}, is {getattr(new, key)}"
            for key in ("log_level", "slab_quota", "user_share") if getattr(old, key) != getattr(new, key)
        ]  # fmt: skip
        if new.groups != old.groups:
            taken.append(f"rules of groups: {len(old.groups)} before, {len(new.groups)} now")
        waiting = [
            f"device[{here.index}].path is {here.path}, was {there.path}"
            for here, there in zip(config.devices, old.devices, strict=True) if here.path != there.path
        ]  # fmt: skip
        if config.pod is not None and old.pod is not None and config.pod.password_file != old.pod.password_file:
            waiting.append("pod.password_file")
        self._opened.config = new  # also what a change of devices writes
        self.evictor.take_groups(Groups(self.index, new.groups))
        self.slabs.take_quota(new.slab_quota)
        self.shares.take_part(new.user_share)
        self.blocks.space.update()
        return taken, waiting

    @property
    def devices(self) -> Sequence[Device]:
        return self._opened.devices

    def space(self) -> Space:
        statistics = self.segments.statistics()
        table = self.plane.table_statistics()
        return Space(
            statistics.capacity, statistics.live_bytes, self.pins.bytes, self.slabs.bytes, table["records"],
            self.blocks.table_room.kept(), self._records_max,
        )  # fmt: skip

    def statistics(self) -> StoreStatistics:
        index = self.index.statistics()
        return StoreStatistics(
            uuid=str(self.config.uuid), epoch=self.epoch, blocks=self.plane.table_statistics()["blocks"],
            segments=self.segments.statistics(), space=self.space(), eviction=self.evictor.counters,
            bad_blocks=self.blocks.bad_blocks, sealed=self.sealing.sealed + self.plane.statistics()["flushes_sealed"],
            seal_retries=self.sealing.retries, index_bytes=index.bytes, index_pending=index.changes_pending,
            commit_failures=index.commit_failures, rebuilding=self.rebuilding, rebuilt=self.rebuilt,
            notes=tuple(self.notes), reservations=self.reservations.statistics(), leases=self.leases.statistics(),
        )  # fmt: skip

    # ---- devices ----

    def _devices_changed(self) -> None:
        if self._options.on_devices is not None:
            self._options.on_devices()

    async def remove_device(
        self, device: int, *, drain: bool, progress: Callable[[int, int], None] | None = None
    ) -> int:
        """Take a device out for good. `drain`: pinned, open and hot blocks are carried over first, and
        progress hears how many bytes of how many are done. Returns how many blocks went."""
        self._check_not_rebuilding()
        return await self.service.remove(device, partial(self._drain, progress) if drain else None)

    async def replace_device(self, device: int, path: DeviceAddress, *, force: bool) -> int:
        """Let another device take its place, empty. Returns how many blocks went with the old one."""
        self._check_not_rebuilding()
        return await self.service.replace(device, path, force)

    def _check_not_rebuilding(self) -> None:
        if self.rebuilding:
            raise KvfsError("the index is being rebuilt; devices can be changed when that is done")

    async def _drain(self, progress: Callable[[int, int], None] | None, indexes: Sequence[SegmentIndex]) -> int:
        """Empty these segments; returns how many blocks were not carried over."""
        gone = done_bytes = 0
        live_bytes = [self.segments.all[index].live_pages * PAGE_SIZE for index in indexes]

        def lost(count: int) -> None:
            nonlocal gone
            gone += count

        for index, size in zip(indexes, live_bytes, strict=True):
            done = False
            with trio.move_on_after(_DRAIN_TIMEOUT_S):
                while not await self.evictor.drain(self.segments.all[index], lost):
                    # There is no room: other blocks go first.
                    if not await self.evictor.free_until(lambda: self.segments.free_count() > self.evictor.low):
                        await trio.sleep(0.1)
                    await self._commit_and_flush()
                done = True
            if not done:
                raise NoSpaceError(f"segment {index}: not drained in {_DRAIN_TIMEOUT_S:.0f} s: no room for its blocks")
            done_bytes += size
            if progress is not None:
                progress(done_bytes, sum(live_bytes))
        return gone

    # ---- closing ----

    async def _close(self) -> None:
        """Unless it ends as after a crash: seal what is dirty, close the open segments, commit, mark the pool clean."""
        self.leases.close()
        if self.plane.abandoned is None:
            with trio.CancelScope(shield=True):
                await self._close_cleanly()

    async def _close_cleanly(self) -> None:
        self.ending()
        self.plane.names.leave(Leave.CLOSED, True)
        clean = not self.rebuilding
        with trio.move_on_after(_SEAL_AT_CLOSE_S) as scope:
            await self.reservations.close()
            await self._seal_all()
        if scope.cancelled_caught:
            log.error("not everything could be sealed within %.0f s", _SEAL_AT_CLOSE_S)
            # Segments with runs in flight stay open.
            clean = clean and not self.reservations.pages and not self.segments.runs_in_flight()
        self.slabs.close()
        self.segments.stop()
        for number in self.index.volatile_inodes():
            inode = self.index.get(number)
            if inode is not None and inode.sealed and self._leaves:
                clean = False  # its pages are counted anew by whoever inherits it, or does not
            elif inode is not None and inode.sealed:
                try:
                    self.blocks.end_nameless(number, even_open=True)
                except KvfsError as error:
                    log.error("inode %d, which has no name: %s", number, error)
                    clean = False
        try:
            await self.blocks.commit()
            for _ in range(2):  # the second writes the other copy where the first names what is gone
                await self.segments.flush_summaries()
            await self.service.sync()
            self.evictor.end()
            self.index.meta_put(META_CLEAN, b"1" if clean else b"0")
            await self.blocks.commit()
        except KvfsError as error:
            log.error("the pool could not be closed cleanly: %s", error)

    async def _seal_all(self) -> None:
        """Seal all files that are not sealed yet, also those whose seal has failed before."""
        for number in self.plane.dirty_files():
            if not self.sealing.is_busy(number):
                await self.sealing.seal_quietly(number)
        await self.sealing.retry()
        await self.sealing.wait_idle()
        # A file that the data plane has sealed is not dirty any more a moment before its run is released.
        while self.segments.runs_in_flight():
            self._take_notes()
            await trio.sleep(_RUN_POLL_S)
        self._take_notes()
