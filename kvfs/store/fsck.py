"""Checking a pool that is not mounted. Reports; acts only when asked to repair.

Checked, in this order: labels against pool.toml; the index against itself (names, parents, memberships); extents
against segments (inside, not overlapping, of the segment's generation). Then segment headers; block headers, or every
leaf of every block; summaries. Damage that no second copy repairs is dropped: a lost block is a miss, a wrong one must
not be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import trio

from kvfs.errors import DeviceError, FormatError, InUseError, KvfsError
from kvfs.index.lmdb import Bulk, LmdbIndex
from kvfs.plane import Event, Plane
from kvfs.pool import config as configuration
from kvfs.pool.config import PoolConfig
from kvfs.pool.devices import Device, open_absent
from kvfs.pool.format import META_CLEAN, META_UUID, Beat, SegmentHeader, pack_segment_header
from kvfs.pool.heart import kept
from kvfs.pool.labels import read_labels, write_labels
from kvfs.pool.lock import INDEX_NAME, locked
from kvfs.pool.making import check_unused
from kvfs.pool.opening import (
    OpenPool,
    check_device,
    device_path,
    discover,
    latest_config,
    open_device,
    own_node,
    read_epochs,
    write_config,
)
from kvfs.record import Inode, Kind, split_records
from kvfs.store.opening import StoreOptions, check_index, make_plane, own_options
from kvfs.store.segment import Segment, State, usage
from kvfs.store.segments import Segments
from kvfs.store.store import Store
from kvfs.types import COUNTER_BITS, PAGE_SIZE, ROOT_INODE, InodeNumber

Progress = Callable[[str, int, int], None]

_VERIFY_TASKS = 16
_FINDINGS_MAX = 1000
_REPAIR_PASSES = 16
# Checking needs little of what serving needs.
_OPTIONS = StoreOptions(staging_size=16 << 20, read_memory_size=64 << 20, records_max=1 << 16, use="being checked")


@dataclass(frozen=True, slots=True)
class Finding:
    """A deviation from the format or among structures. `what` is its class: label, index, name, extent, segment, block,
    summary."""

    what: str
    message: str
    # Recovery or repair takes care of it without losing anything.
    harmless: bool = False
    repaired: bool = False


@dataclass(slots=True)
class FsckReport:
    findings: list[Finding] = field(default_factory=list)
    findings_left_out: int = 0
    damaged: int = 0  # findings that are not harmless
    repaired: int = 0
    blocks: int = 0
    directories: int = 0
    segments: int = 0
    bytes: int = 0
    verified_bytes: int = 0
    clean: bool = False

    @property
    def healthy(self) -> bool:
        """Nothing is damaged, or all damage has been repaired."""
        return self.damaged <= self.repaired

    def add(self, finding: Finding) -> None:
        self.damaged += not finding.harmless
        self.repaired += finding.repaired and not finding.harmless
        if len(self.findings) < _FINDINGS_MAX:
            self.findings.append(finding)
        else:
            self.findings_left_out += 1


def _quiet(step: str, done: int, total: int) -> None:
    pass


def fsck(pool: Path, *, repair: bool = False, verify_data: bool = False, progress: Progress = _quiet) -> FsckReport:
    """Check a pool. Blocks. PoolError or DeviceError if it cannot be checked at all: in use, a device missing."""
    return trio.run(_fsck, pool, repair, verify_data, progress)


async def _fsck(pool: Path, repair: bool, verify_data: bool, progress: Progress) -> FsckReport:
    report = FsckReport()
    options = own_options(pool, _OPTIONS)
    with ExitStack() as stack:
        lock = stack.enter_context(locked(pool, options.use))
        _check_labels(pool, repair, report, lock.left)
        state = _index_state(pool, report)
        if state != "clean" and repair:
            # A mount does the recovery, so --repair mounts.
            progress("recovering", 0, 0)
            async with Store.open(pool, replace(options, lock=lock)) as store:
                while store.rebuilding:
                    progress("rebuilding the index", *store.rebuilt)
                    await trio.sleep(0.05)
            lock.describe()
            state = "clean"
            told = "the index was brought up to date from the devices"
            report.add(Finding("index", told, harmless=True, repaired=True))
        if state == "missing":
            return report
        report.clean = state == "clean"
        opened = _open_devices(pool)
        stack.callback(opened.close)
        lost, token = trio.Event(), trio.lowlevel.current_trio_token()

        def lose(reason: str) -> None:
            with suppress(trio.RunFinishedError):
                token.run_sync_soon(lost.set)

        heart = stack.enter_context(kept(opened, options.use, lose, lock.left))

        async def guard() -> None:
            await lost.wait()
            raise InUseError(f"{pool}: {heart.lost}")

        plane = make_plane(opened, options, opened.highest, options.records_max)
        stack.callback(plane.destroy)
        index = LmdbIndex(pool / INDEX_NAME)
        stack.callback(index.close)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(plane.pump, _ignore)
            nursery.start_soon(guard)
            try:
                check = _Check(opened, index, plane, repair, verify_data, progress, report)
                await check.run()
            finally:
                nursery.cancel_scope.cancel()
    return report


def _ignore(event: Event) -> None:
    pass


# ---- labels ----


def _open_devices(pool: Path) -> OpenPool:
    config = configuration.load(pool) or discover(pool)
    node = own_node(pool, config)
    devices: list[Device] = []
    absent: dict[int, str] = {}
    epoch = seen = 0
    try:
        for described in config.devices:
            if described.removed:
                absent[described.index] = "removed"
                devices.append(open_absent(device_path(pool, described)))
                continue
            device = open_device(device_path(pool, described), shared=node is not None)
            devices.append(device)
            if node is not None:
                mounted, highest = read_epochs(device, config, described.index, node.slot)
                epoch, seen = max(epoch, mounted), max(seen, highest)
                continue
            best = read_labels(device, described.size).best()
            epoch = max(epoch, 0 if best is None else best.mount_epoch)
    except BaseException:
        for device in devices:
            device.close()
        raise
    opened = OpenPool(pool, config, devices, epoch, [], absent)
    if node is not None:
        opened.slot, opened.node, opened.seen = node.slot, node.uuid, seen
    return opened


def _check_labels(pool: Path, repair: bool, report: FsckReport, dead: Beat | None) -> None:
    config = configuration.load(pool)
    if config is None:
        config = discover(pool)
        report.add(Finding("label", f"{pool / configuration.CONFIG_NAME}: missing; the labels have it", True, repair))
        if repair:
            write_config(pool, config)
    opened = _open_devices(pool)
    try:
        for device, described in zip(opened.devices, config.devices, strict=True):
            if not described.removed:
                check_unused(device, slot=opened.slot if config.pod is not None else None, dead=dead)
        bad: list[str] = []
        labels: list[PoolConfig] = []
        for device, described in zip(opened.devices, config.devices, strict=True):
            if described.removed:
                continue
            try:
                label, notes = check_device(config, device, described, str(pool / configuration.CONFIG_NAME))
                labels.append(label.config(f"{device.path}: label"))
            except DeviceError as error:
                # There is no valid copy here. pool.toml and the other devices' labels have all that it said.
                if device.size < described.size or not _others_agree(opened, config, described.index):
                    raise
                notes = [str(error)]
            bad += notes
        if bad and repair:
            # In a pod another node may have changed the description.
            for failed in write_labels(
                latest_config(config, labels), opened.devices, opened.epoch, opened.absent
            ).values():
                raise DeviceError(failed)
        for message in bad:
            report.add(Finding("label", message, repaired=repair))
    finally:
        opened.close()


def _others_agree(opened: OpenPool, config: PoolConfig, index: int) -> bool:
    """Whether another device has a label of this pool."""
    for device, described in zip(opened.devices, config.devices, strict=True):
        if described.index != index and not described.removed:
            label = read_labels(device, described.size).best()
            if label is not None and label.pool_uuid == config.uuid:
                return True
    return False


def _index_state(pool: Path, report: FsckReport) -> str:
    """clean, unclean, or missing (then the next mount, or a repair, makes it anew)."""
    path = pool / INDEX_NAME
    if not path.is_dir():
        report.add(Finding("index", f"{path}: missing; a mount or --repair rebuilds it", harmless=True))
        return "missing"
    try:
        index = LmdbIndex(path)
    except KvfsError as error:
        report.add(Finding("index", f"{error}; a mount or --repair rebuilds it"))
        return "missing"
    try:
        if index.meta_get(META_UUID) is None or index.incomplete:
            report.add(Finding("index", f"{path}: not complete; a mount or --repair rebuilds it", harmless=True))
            return "missing"
        opened = _open_devices(pool)
        try:
            check_index(index, opened)
        finally:
            opened.close()
        if index.meta_get(META_CLEAN) != b"1":
            report.add(
                Finding("index", f"{pool}: not unmounted cleanly; a mount or --repair recovers it", harmless=True)
            )
            return "unclean"
    except Exception as error:  # LMDB may raise anything for a damaged file
        report.add(Finding("index", f"{path}: {error}; a mount or --repair rebuilds it"))
        return "missing"
    finally:
        index.close()
    return "clean"


# ---- everything else ----


class _Check:
    def __init__(self, opened: OpenPool, index: LmdbIndex, plane: Plane, repair: bool, verify_data: bool,
                 progress: Progress, report: FsckReport) -> None:  # fmt: skip
        self._index, self._plane, self._repair, self._verify = index, plane, repair, verify_data
        self._progress, self._report = progress, report
        self._config = opened.config
        self._segments = Segments(opened.config, opened.config.members(), plane, index, opened.highest,
                                  self._impossible, opened.slot)  # fmt: skip
        # After a crash the index is a second old: recovery judges what does not fit.
        self._stale = not report.clean
        self._on_impossible: Callable[[int, str], None]
        self._bad: dict[InodeNumber, Inode] = {}
        # Directories from which the way up ends at the root.
        self._ending: set[InodeNumber] = set()

    async def run(self) -> None:
        removed = {device.index for device in self._config.devices if device.removed}
        for segment in self._segments.own:
            segment.lost = any(device in removed for device, _ in self._segments.members[segment.index])
        try:
            self._segments.load(self._index.segment_items())
        except FormatError as error:
            self._add("index", str(error))
            return
        await self._check_headers()
        for _ in range(_REPAIR_PASSES):
            bad_before = self._report.damaged
            await self._check_inodes()
            await self._check_names()
            if not self._repair or self._report.damaged == bad_before:
                break
            self._drop_bad()
        await self._check_extents()
        await self._check_blocks()
        if self._repair:
            self._drop_bad()
        await self._check_summaries()
        if self._repair:
            self._segments.save_changed()
            self._index.commit_now()

    def _impossible(self, segment: int, message: str) -> None:
        """Called for a structure that no kvfs can have written. Each step has its own judgement."""
        self._on_impossible(segment, message)

    def _add(self, what: str, message: str, *, harmless: bool = False, repaired: bool = False) -> None:
        self._report.add(Finding(what, message, harmless or self._stale, repaired))

    def _records(self) -> Iterator[Inode]:
        for chunk in self._index.records(1 << 20):
            for at, _ in split_records(chunk):
                try:
                    yield Inode.unpack(chunk, at)
                except FormatError as error:
                    self._add("index", f"inode record: {error}")

    async def _check_headers(self) -> None:
        checked = [s.index for s in self._segments.own if not s.lost]
        impossible: list[int] = []

        def report(index: int, message: str) -> None:
            # Reported also where the index is stale: no recovery mends it.
            self._report.add(Finding("segment", message, repaired=self._repair))
            impossible.append(index)

        self._on_impossible = report
        headers, _ = await self._segments.reader.headers(checked)
        if self._repair:
            for index in impossible:
                await self._write_header(self._segments.all[index])
        checked = [index for index in checked if self._segments.all[index].state != State.FREE]
        self._report.segments = len(checked)
        for index in checked:
            segment, header = self._segments.all[index], headers[index]
            if header is None:
                self._add(
                    "segment", f"segment {index}: its header is damaged; its blocks have their own", harmless=True
                )
            elif header.generation != segment.generation:
                self._add(
                    "segment",
                    f"segment {index}: generation {header.generation:#x} on the devices, {segment.generation:#x} in "
                    "the index: its blocks are lost",
                    repaired=self._repair,
                )
                for number in self._index.segment_inodes(index):
                    inode = self._index.get(number)
                    if inode is not None:
                        self._bad[number] = inode

    async def _write_header(self, segment: Segment) -> None:
        """Write the header as the index has it; zeros if the segment was never opened."""
        header = SegmentHeader(segment.generation, segment.generation >> COUNTER_BITS, segment.index, segment.stream,
                               self._segments.members[segment.index], self._segments.slot)  # fmt: skip
        data = pack_segment_header(self._config, header) if segment.generation else bytes(PAGE_SIZE)
        await self._plane.store_write(segment.index, 0, data)

    async def _check_inodes(self) -> None:
        total = self._index.statistics().inodes
        self._report.blocks = self._report.directories = self._report.bytes = 0
        for done, inode in enumerate(self._records(), 1):
            if done % 4096 == 0:
                self._progress("checking inodes", done, total)
                await trio.lowlevel.checkpoint()
            problem = self._problem(inode)
            if problem is not None and inode.inode not in self._bad:
                self._bad[inode.inode] = inode
                self._add("name", f"inode {inode.inode} ({inode.name!r}): {problem}", repaired=self._repair)
            if inode.kind == Kind.DIRECTORY:
                self._report.directories += 1
            elif inode.kind == Kind.FILE:
                self._report.blocks += 1
                self._report.bytes += inode.size

    def _problem(self, inode: Inode) -> str | None:
        if inode.inode == ROOT_INODE:
            return None
        parent = self._index.get(inode.parent)
        if parent is None or parent.kind != Kind.DIRECTORY:
            return f"its directory, inode {inode.parent}, is not there"
        holder = self._index.lookup(inode.parent, inode.name)
        if holder != inode.inode:
            return f"its name leads to {'nothing' if holder is None else f'inode {holder}'}"
        if inode.kind == Kind.DIRECTORY and not self._comes_to_an_end(inode):
            return "it lies below itself"
        if inode.kind != Kind.FILE:
            return None
        if not inode.sealed:
            return "it was never sealed"
        for index in usage(inode):
            if index >= len(self._segments.all):
                return f"it lies in segment {index} of {len(self._segments.all)}"
        for generation, index in [
            (inode.generation, inode.segment),
            *((e.generation, e.segment) for e in inode.extents),
        ]:
            segment = self._segments.all[index]
            if segment.generation != generation or segment.state == State.FREE:
                return f"it lies in generation {generation:#x} of segment {index}, which is at {segment.generation:#x}"
        return None

    def _comes_to_an_end(self, directory: Inode) -> bool:
        """Whether the way up from a directory ends at the root."""
        way: set[InodeNumber] = set()
        above: Inode | None = directory
        while above is not None and above.inode != ROOT_INODE and above.inode not in self._ending:
            if above.inode in way:
                return False
            way.add(above.inode)
            above = self._index.get(above.parent)
        self._ending |= way
        return True

    async def _check_names(self) -> None:
        dangling: list[tuple[int, bytes]] = []
        for i, (parent, name, inode) in enumerate(self._index.dentries()):
            if i % 4096 == 0:
                await trio.lowlevel.checkpoint()
            found = self._index.get(InodeNumber(inode))
            if found is None or found.parent != parent or found.name != name:
                dangling.append((parent, name))
                self._add("name", f"{name!r} in directory {parent}: leads to inode {inode}, "
                          "which has another name or none",
                          repaired=self._repair)  # fmt: skip
        strays = [
            (segment, inode)
            for segment, inode in self._index.memberships()
            if (record := self._index.get(InodeNumber(inode))) is None or segment not in usage(record)
        ]
        for segment, inode in strays:
            self._add("index", f"segment {segment} lists inode {inode}, which is not in it", repaired=self._repair)
        if self._repair and (dangling or strays):

            def remove(bulk: Bulk) -> None:
                for parent, name in dangling:
                    bulk.remove_name(parent, name)
                for segment, inode in strays:
                    bulk.remove_member(segment, inode)

            self._index.bulk(remove)
            self._index.refresh()

    async def _check_extents(self) -> None:
        """Check that extents lie inside the runs' area, and that no two blocks share a page."""
        end = self._segments.geometry.end_page
        for segment in self._segments.own:
            if segment.state == State.FREE:
                continue
            taken: list[tuple[int, int, InodeNumber]] = []
            for number in self._index.segment_inodes(segment.index):
                inode = self._index.get(number)
                if inode is not None and number not in self._bad:
                    taken += [(first, last, number) for first, last in _pages(inode, segment)]
            taken.sort()
            before = 1
            for first, last, number in taken:
                if first < before or last > end:
                    self._add("extent", f"inode {number}: pages {first} to {last} of segment {segment.index} "
                              f"{'overlap another block' if first < before else 'lie outside'}",
                              repaired=self._repair)  # fmt: skip
                    found = self._index.get(number)
                    if found is not None:
                        self._bad[number] = found
                before = max(before, last)
            await trio.lowlevel.checkpoint()

    async def _check_blocks(self) -> None:
        total, done = self._report.blocks, 0
        step = "reading blocks" if self._verify else "reading block headers"
        records = self._records()

        async def work() -> None:
            nonlocal done
            for inode in records:
                if inode.kind != Kind.FILE or not inode.sealed or inode.inode in self._bad:
                    continue
                try:
                    await self._plane.store_verify(inode.pack(), self._verify)
                    self._report.verified_bytes += inode.size if self._verify else 0
                except KvfsError as error:
                    self._bad[inode.inode] = inode
                    self._add("block", f"inode {inode.inode} ({inode.name!r}) in segment {inode.segment}: {error}",
                              repaired=self._repair)  # fmt: skip
                done += 1
                self._progress(step, done, total)

        async with trio.open_nursery() as nursery:
            for _ in range(_VERIFY_TASKS):
                nursery.start_soon(work)

    def _drop_bad(self) -> None:
        for inode in self._bad.values():
            if self._index.raw(inode.inode) is None:
                continue
            self._index.delete(inode)
            if inode.sealed and all(index < len(self._segments.all) for index in usage(inode)):
                self._segments.mark_dirty(self._segments.all[inode.segment], gone=True)
                for index, pages in usage(inode).items():
                    segment = self._segments.all[index]
                    segment.live_pages = max(0, segment.live_pages - pages)
                    self._segments.changed(segment)
        self._segments.save_changed()
        self._index.commit_now()

    async def _check_summaries(self) -> None:
        """Check the summaries of closed segments. Without a valid one of since then the block headers describe the
        segment, and those still have removed blocks."""
        if self._stale:
            return

        def report(index: int, message: str) -> None:
            self._add("summary", message, repaired=self._repair)
            if self._repair:
                self._segments.mark_dirty(self._segments.all[index], gone=True)

        self._on_impossible = report
        for done, segment in enumerate(self._segments.own):
            if segment.state != State.CLOSED or segment.lost:
                continue
            self._progress("checking summaries", done, len(self._segments.own))
            if segment.dirty:
                continue
            found = await self._segments.reader.summary(segment.index, segment.generation)
            if found is not None and found.closed:
                continue
            if self._repair:
                self._segments.mark_dirty(segment, gone=False)
            self._add("summary", f"segment {segment.index}: no valid summary", repaired=self._repair)
        if self._repair:
            for _ in range(2):  # the second writes the other slot where the first one's is not enough
                await self._segments.flush_summaries()


def _pages(inode: Inode, segment: Segment) -> Iterator[tuple[int, int]]:
    """The [first, last) pages that a block takes in a segment."""
    if inode.segment == segment.index:
        yield inode.page, inode.page + inode.header_pages
    for extent in inode.all_extents():
        if extent.segment == segment.index:
            yield extent.page, extent.page + extent.page_count
