"""Recovery at a mount: after an unclean end, and when there is no index.

After an unclean end the index is right but up to a second old (or older, if commits failed). Segments that were opened
since, and open segments from the committed append point on, are scanned for block headers. Blocks that the index cannot
know enter it. Summaries that are newer than the index are written again: they leave out what the crash brought back.
Without an index all blocks are found again, by the summaries of all segments, then by the block headers that no summary
covers. The highest version of a name wins, and of an inode. A block is admitted only if each extent's generation is its
segment's, so nothing of an overwritten segment comes back.
"""

from __future__ import annotations

import logging
import struct
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field

import trio

from kvfs.checks import count_pages
from kvfs.errors import FormatError, KvfsError
from kvfs.index.lmdb import Bulk, LmdbIndex
from kvfs.plane import Plane
from kvfs.pool.format import SegmentHeader, Stream
from kvfs.record import RECORD_EXTENT, RECORD_HEAD, RECORD_SIZE, Inode, InodeFlags, Kind, split_records
from kvfs.store.inheritance import Inheritance, nameless_blocks
from kvfs.store.pins import Pins
from kvfs.store.segment import Segment, State, usage
from kvfs.store.segments import Segments
from kvfs.types import ROOT_INODE, SLOT_BITS, InodeNumber

log = logging.getLogger(__name__)

_SCAN_CAPACITY = 4 << 20
_YIELD_EVERY = 256
# Records that one transaction of a rebuild takes, and so the block table at once.
_BATCH_BYTES = 4 << 20
_VERIFY_TASKS = 16
_READ_AHEAD = 8
_NAME_BITS = 26
# A path has at most this many directories: longer than PATH_MAX allows.
_DEPTH_MAX = 4096
_U64 = struct.Struct(">Q")
_MEMBER = struct.Struct(">IQ")
_VALUE = struct.Struct("<Q")


async def scan(segments: Segments, plane: Plane, segment: Segment, first_page: int) -> list[bytes]:
    """The records in the block headers from first_page on, each followed by its directories' records. All are of mounts
    before this one."""
    found: list[bytes] = []
    page, end = first_page, segments.geometry.end_page
    capacity = _SCAN_CAPACITY
    while page < end:
        try:
            result = await plane.store_scan(segment.index, segment.generation, segments.epoch - 1, page, end, capacity)
        except KvfsError as error:
            log.warning("segment %d: scan from page %d broke off: %s", segment.index, page, error)
            break
        if result.impossible:
            segments.on_impossible(
                segment.index,
                f"segment {segment.index}: {result.impossible} block headers from page {page} on say what no kvfs "
                "writes; they are left out",
            )
        if result.records:
            found.append(result.records)
        if not result.full:
            break
        if result.next_page == page:
            capacity *= 4
        page = result.next_page
    return found


# ---- after an unclean end ----


async def recover(
    index: LmdbIndex, segments: Segments, plane: Plane, pins: Pins, known_version: int, in_flight: set[int],
    inherited: Inheritance | None = None,
) -> None:  # fmt: skip
    """Bring index and segments together after an unclean end. Afterwards every segment is FREE or CLOSED.

    The caller has the summaries written then, which takes time for each block.

    The index knows the fate of every block up to known_version, but those in flight. An inheritance is newer.
    """
    headers, _ = await segments.reader.headers([segment.index for segment in segments.own], segments.epoch - 1)
    to_scan: list[tuple[Segment, int]] = []
    lost: set[int] = set()
    for segment in segments.own:
        header = headers[segment.index]
        if segment.lost:
            # Only the index knows anything of this segment. device_service.py takes care of its device's return.
            if segment.state == State.OPEN:
                segments.mark_dirty(segment, gone=True)
            if segment.state != State.FREE:
                segment.state, segment.next_page = State.CLOSED, segments.geometry.end_page
                segments.changed(segment)
            continue
        if segment.state == State.FREE:
            if header is not None and header.generation > segment.generation:
                # The segment was opened after the last commit.
                _reopened(segment, header)
                to_scan.append((segment, 1))
            continue
        if header is None:
            # The header's page is damaged; blocks prove themselves by their own headers.
            log.warning("segment %d: its header is not readable; its blocks are kept", segment.index)
            if segment.state == State.OPEN:
                to_scan.append((segment, segment.next_page))
        elif header.generation != segment.generation:
            lost.update(await _drop_blocks(index, segment))
            if header.generation > segment.generation:
                _reopened(segment, header)
                to_scan.append((segment, 1))
            else:
                # The header of this generation never arrived, so no block of it did. The summaries may be of the former
                # life: the next one goes into the slot that was to have the first of this one.
                segment.state, segment.live_pages = State.FREE, 0
                segment.generation, segment.slot = header.generation, 1 - segment.slot
                segments.mark_dirty(segment, gone=True)
        elif segment.state == State.OPEN:
            to_scan.append((segment, segment.next_page))
        if segment.state != State.FREE:
            segment.state = State.CLOSED
            # The daemon that died may have had writes of a slab under way.
            segment.late |= segment.stream == Stream.SLAB
        segments.changed(segment)
    told = set() if inherited is None else (await inherited.replay(segments, pins)).inodes
    admission = Admission(index, segments, plane, pins, lost, known_version, in_flight, told)
    for segment, first_page in sorted(to_scan, key=lambda item: -item[0].generation):
        segment.state = State.CLOSED
        segment.late = True  # clients of the daemon that died may still write to it
        segments.mark_dirty(segment, gone=True)
        try:
            await _admit_segment(segments, plane, segment, first_page, admission)
        except Exception as error:  # all is checked before; a failure all the same costs this segment, not the mount
            segments.on_impossible(
                segment.index, f"segment {segment.index}: its recovery broke off: {type(error).__name__}: {error}"
            )
        # Nothing is appended any more, and a later scan must not find what was not admitted.
        segment.next_page = segments.geometry.end_page
    await recount(index, segments)
    await segments.mark_overtaken()
    if to_scan or lost:
        log.info("recovered: %d segments scanned, %d blocks found, %d lost with overwritten segments",
                 len(to_scan), admission.admitted, max(0, len(lost) - admission.readmitted))  # fmt: skip


async def _admit_segment(
    segments: Segments, plane: Plane, segment: Segment, first_page: int, admission: Admission
) -> None:
    covered = 0
    if first_page == 1:
        covered = await _admit_summary(segments, segment, admission)
    # Pages that the summary covers are scanned too: it leaves out what was replaced, perhaps by a block that this crash
    # undoes.
    for page in (first_page, covered) if covered > first_page else (first_page,):
        for records in await scan(segments, plane, segment, page):
            await admission.admit_all(records, verify=True)


def _reopened(segment: Segment, header: SegmentHeader) -> None:
    segment.state, segment.generation, segment.stream = State.CLOSED, header.generation, header.stream
    segment.next_page, segment.live_pages = 1, 0


async def _drop_blocks(index: LmdbIndex, segment: Segment) -> list[int]:
    """The segment was overwritten: every block with a part in it is gone."""
    gone: list[int] = []
    for number in index.segment_inodes(segment.index):
        inode = index.get(number)
        if inode is not None:
            index.delete(inode)
            gone.append(number)
        if len(gone) % _YIELD_EVERY == 0:
            await trio.lowlevel.checkpoint()
    return gone


async def _admit_summary(segments: Segments, segment: Segment, admission: Admission) -> int:
    """A segment that was opened after the last commit may have a summary already, with newer names. Returns the page
    before which it covers all. A scan may not get there if a page between could not be written."""
    summary = await segments.reader.summary(segment.index, segment.generation, segments.epoch - 1)
    if summary is None:
        return 0
    await admission.admit_all(summary.entries)
    return summary.covered_page


async def recount(index: LmdbIndex, segments: Segments) -> None:
    """Count live pages anew from all records, uncommitted ones included."""
    live = array("Q", bytes(8 * len(segments.all)))
    index.commit_now()
    for chunk in index.records(1 << 20):
        count_pages(chunk, live)
        await trio.lowlevel.checkpoint()
    count_pages(b"".join(nameless_blocks(index)), live)
    for segment in segments.own:
        if segment.live_pages != live[segment.index]:
            segment.live_pages = live[segment.index]
            segments.changed(segment)


@dataclass(slots=True)
class Admission:
    """Takes blocks that were found on the devices into an index that is a little older."""

    index: LmdbIndex
    segments: Segments
    plane: Plane
    pins: Pins
    lost: set[int]
    known_version: int
    in_flight: set[int] = field(default_factory=set)
    told: set[int] = field(default_factory=set)  # inodes whose fate is known, whatever a header says
    admitted: int = 0
    readmitted: int = 0

    async def admit_all(self, records: bytes, *, verify: bool = False) -> None:
        """`verify`: only blocks whose leaves are all right.

        A header proves itself, not its data. A write that the crash cut off may have brought the header and not the
        rest, or the first of several runs. Such a block was never acknowledged, and must not take the place of an older
        one that was.
        """
        directories: dict[int, Inode] = {}
        files: list[Inode] = []
        for i, (at, _) in enumerate(split_records(records)):
            try:
                inode = Inode.unpack(records, at)
            except FormatError as error:
                log.warning("a record that was found is not readable: %s", error)
                return
            if inode.kind == Kind.DIRECTORY:
                known = directories.get(inode.inode)
                if known is None or known.version < inode.version:
                    directories[inode.inode] = inode
            elif inode.kind == Kind.FILE:
                files.append(inode)
            if i % _YIELD_EVERY == _YIELD_EVERY - 1:
                await trio.lowlevel.checkpoint()
        torn = await self._torn(files) if verify else set()
        for i, inode in enumerate(files):
            if i not in torn:
                self._admit(inode, directories)
            if i % _YIELD_EVERY == _YIELD_EVERY - 1:
                await trio.lowlevel.checkpoint()

    async def _torn(self, files: list[Inode]) -> set[int]:
        """The inodes that would be admitted, and whose data does not fit their headers."""
        torn: set[int] = set()
        queue = iter([i for i, inode in enumerate(files) if self._is_new(inode)])

        async def work() -> None:
            for i in queue:
                inode = files[i]
                try:
                    await self.plane.store_verify(inode.pack(), verify_data=True)
                except KvfsError as error:
                    torn.add(i)
                    log.info("inode %d in segment %d: cut off by the crash: %s", inode.inode, inode.segment, error)

        async with trio.open_nursery() as nursery:
            for _ in range(_VERIFY_TASKS):
                nursery.start_soon(work)
        return torn

    def _is_new(self, inode: Inode) -> bool:
        """Whether the index may lack the block only because the index is older."""
        if not inode.sealed or inode.nameless or inode.inode in self.told or not self._in_place(inode):
            return False
        # The block was sealed before the last commit. If the index does not have it, it was removed, unless its segment
        # was lost.
        known_then = inode.version <= self.known_version and inode.version not in self.in_flight
        if known_then and inode.inode not in self.lost:
            return False
        known = self.index.get(inode.inode)
        return known is None or known.version < inode.version

    def _admit(self, inode: Inode, directories: dict[int, Inode]) -> None:
        if not self._is_new(inode):
            return
        placed = self._take_name(inode, directories)
        known = self.index.get(inode.inode)  # not before: it may have lain in a directory that gave way
        if not placed:
            # The new version is lost, and the old one must not reappear.
            if known is not None:
                self._delete(known)
            return
        if known is not None:
            self._dirty(known)
        self.index.put(inode, known)
        self.pins.follow(inode)
        self.admitted += 1
        self.readmitted += inode.inode in self.lost

    def _take_name(self, inode: Inode, directories: dict[int, Inode]) -> bool:
        """Free the block's name from older holders. False if its directory is gone, or something newer has the name."""
        parent = self._directory(inode.parent, directories, 0)
        if parent is None:
            return False
        inode.parent = parent
        number = self.index.lookup(parent, inode.name)
        other = None if number is None else self.index.get(number)
        if other is None or other.inode == inode.inode:
            return True
        if other.version > inode.version:
            return False
        self._delete(other)
        return True

    def _delete(self, old: Inode) -> None:
        """Remove an inode that lost its name after the last commit: a directory with all that is still in it."""
        doomed = [old]
        for inode in doomed:
            after = b""
            while inode.kind == Kind.DIRECTORY and (names := self.index.list(inode.inode, after, _YIELD_EVERY)):
                after = names[-1][0]
                doomed += [below for _, number in names if (below := self.index.get(number)) is not None]
        for inode in doomed:
            self.index.delete(inode)
            self.pins.remove(inode.inode)
            self._dirty(inode)
        if len(doomed) > 1:
            log.warning("directory %d (%r) gave way to a newer file of its name, with %d entries in it", old.inode,
                        old.name, len(doomed) - 1)  # fmt: skip

    def _in_place(self, inode: Inode) -> bool:
        home = self.segments.all[inode.segment] if inode.segment < len(self.segments.all) else None
        if home is None or home.generation != inode.generation:
            return False
        return all(
            extent.segment < len(self.segments.all)
            and self.segments.all[extent.segment].generation == extent.generation
            for extent in inode.extents
        )

    def _dirty(self, inode: Inode) -> None:
        if inode.sealed and inode.kind == Kind.FILE:
            self.segments.mark_dirty(self.segments.all[inode.segment], gone=True)

    def _directory(self, number: int, directories: dict[int, Inode], depth: int) -> InodeNumber | None:
        """The directory in the index, made again if the index never knew it. Returns None if it was removed."""
        known = self.index.get(InodeNumber(number))
        if known is not None:
            return known.inode if known.kind == Kind.DIRECTORY else None
        found = directories.get(number)
        if found is None or depth > 64 or (found.version <= self.known_version and not self.lost):
            return None
        parent = self._directory(found.parent, directories, depth + 1)
        if parent is None:
            return None
        found.parent = parent
        other = self.index.lookup(parent, found.name)
        taken = None if other is None else self.index.get(other)
        if taken is not None and taken.kind == Kind.DIRECTORY:
            return taken.inode  # it takes the part of this one
        if taken is not None:
            if taken.version > found.version:
                return None
            self._delete(taken)  # an older file: it had left that name, and the crash undid that
        self.index.put(found, None)
        self.pins.follow(found)
        return found.inode


# ---- without an index ----


class _Numbers:
    """A set of numbers of one node: a bit each."""

    def __init__(self, low_bits: int) -> None:
        """low_bits: those that all of them have the same, at the end."""
        self._low_bits = low_bits
        self._maps: dict[int, bytearray] = {}

    def add(self, number: int) -> bool:
        """Returns whether it was there."""
        number >>= self._low_bits
        high, low = number >> 20, number & 0xFFFFF
        bits = self._maps.get(high)
        if bits is None:
            bits = self._maps[high] = bytearray(1 << 17)
        mask = 1 << (low & 7)
        present = bits[low >> 3] & mask
        bits[low >> 3] |= mask
        return bool(present)


# Changes by users that are not committed: key of a name -> (inode, is a directory), or None if it was removed.
_Overlay = dict[bytes, tuple[int, bool] | None]


@dataclass(slots=True)
class _Found:
    """One batch on its way into the index: keys and values of the three databases, and the table's records."""

    inodes: dict[int, bytes] = field(default_factory=dict)
    names: dict[bytes, bytes] = field(default_factory=dict)
    members: set[bytes] = field(default_factory=set)


class Rebuild:
    """Fills an empty index from the devices, newest segments first, behind a mount that already answers."""

    def __init__(self, index: LmdbIndex, segments: Segments, plane: Plane, pins: Pins) -> None:
        self._index, self._segments, self._plane, self._pins = index, segments, plane, pins
        self._seen = _Numbers(0 if segments.config.pod is None else SLOT_BITS)
        # One bit for each hash of a name. Clear: the name was not met. Set: it must be looked up.
        self._names = bytearray(1 << (_NAME_BITS - 3))
        self._directories: dict[int, int] = {ROOT_INODE: 1 << 63}
        self._aliases: dict[int, int] = {}
        self._live: dict[int, int] = {}
        self._pinned: list[int] = []
        self.blocks = 0
        # Segments that were read, and all that hold something.
        self.done = self.total = 0

    async def prepare(self) -> None:
        """Learn which segments hold something: they are not free. Before the mount answers."""
        everywhere = [segment.index for segment in self._segments.own]
        headers, blank = await self._segments.reader.headers(everywhere, self._segments.epoch - 1)
        damaged: list[Segment] = []
        for segment in self._segments.own:
            header = headers[segment.index]
            if header is not None:
                segment.state, segment.generation, segment.stream = State.CLOSED, header.generation, header.stream
                segment.late |= segment.stream == Stream.SLAB  # as in recover()
            elif segment.index not in blank and not segment.lost:
                damaged.append(segment)
        queue = iter(damaged)
        async with trio.open_nursery() as nursery:
            for _ in range(min(8, len(damaged))):
                nursery.start_soon(self._by_summary, queue)
        for segment in self._segments.own:
            if segment.state == State.CLOSED:
                # The segment counts as not empty until its blocks have been looked for.
                segment.live_pages = 1
                segment.next_page = self._segments.geometry.end_page
                segment.held += 1
                self._segments.changed(segment)

    async def _by_summary(self, queue: Iterable[Segment]) -> None:
        """Without a header a summary says whether the segment holds anything, and of which generation."""
        for segment in queue:
            summary = await self._segments.reader.summary(segment.index, None, self._segments.epoch - 1)
            if summary is not None:
                segment.state, segment.generation = State.CLOSED, summary.generation

    async def run(self) -> int:
        """Find every block. Returns how many. The block table has them too; the caller marks it complete."""
        self._index.removed_names = set()
        order = sorted(
            (s for s in self._segments.own if s.state == State.CLOSED and s.held), key=lambda s: -s.generation
        )
        self.total = len(order)
        send, receive = trio.open_memory_channel[list[bytes]](_READ_AHEAD)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._read, order, send)
            batch: list[bytes] = []
            size = 0
            async with receive:
                async for pieces in receive:
                    batch += pieces
                    size += sum(len(piece) for piece in pieces)
                    if size >= _BATCH_BYTES:
                        await self._load_contained(batch)
                        batch, size = [], 0
                    self.done += 1
            await self._load_contained(batch)
        self._index.removed_names = None
        for number in self._pinned:
            self._pins.add(number)
        for segment in order:
            # Live pages were counted beside the 1 that kept the segment from being taken for empty.
            segment.held -= 1
            segment.live_pages = max(0, segment.live_pages - 1)
            self._segments.changed(segment)
            self._segments.mark_dirty(segment, gone=False)
            self._segments.free_if_empty(segment)
        return self.blocks

    async def _read(self, order: list[Segment], send: trio.MemorySendChannel[list[bytes]]) -> None:
        """The records of every segment, newest first, several segments at a time."""
        results: dict[int, list[bytes]] = {}

        async def one(at: int) -> None:
            results[at] = await self._read_segment(order[at])

        async with send:
            for first in range(0, len(order), _READ_AHEAD):
                async with trio.open_nursery() as nursery:
                    for at in range(first, min(first + _READ_AHEAD, len(order))):
                        nursery.start_soon(one, at)
                for at in sorted(results):
                    await send.send(results[at])
                results.clear()

    async def _read_segment(self, segment: Segment) -> list[bytes]:
        summary = await self._segments.reader.summary(segment.index, segment.generation, self._segments.epoch - 1)
        pieces = [] if summary is None else [summary.entries]
        if summary is None or not (summary.closed and summary.covered_page >= self._segments.geometry.end_page):
            pieces += await scan(self._segments, self._plane, segment, 1 if summary is None else summary.covered_page)
        return pieces

    async def _load_contained(self, pieces: list[bytes]) -> None:
        """Records are checked where they are read. A failure all the same costs these blocks, not this mount or the
        next."""
        try:
            await self._load(pieces)
        except KvfsError:
            raise
        except Exception as error:
            self._live.clear()
            log.error("%d pieces of segments could not be taken into the index: %s: %s", len(pieces),
                      type(error).__name__, error)  # fmt: skip

    async def _load(self, pieces: list[bytes]) -> None:
        if not pieces:
            return
        overlay = self._overlay()
        taken: list[_Found] = []

        def work(bulk: Bulk) -> None:
            taken.append(self._merge(bulk, pieces, overlay))

        # A rebuild fills the index first, then the table (I11): both change while no commit and no other request runs.
        async with self._index.exclusive():
            await trio.to_thread.run_sync(self._index.bulk, work)
            self._index.refresh()
            found = taken[0]
            self._drop_overtaken(found)
            if found.inodes:
                self._plane.table_load(b"".join(found.inodes.values()))
            for index, pages in self._live.items():
                self._segments.all[index].live_pages = max(0, self._segments.all[index].live_pages + pages)
                self._segments.changed(self._segments.all[index])
            self._live.clear()

    def _overlay(self) -> _Overlay:
        overlay: _Overlay = {}
        for parent, name, number in self._index.overlay_names():
            record = None if number is None else self._index.raw(number)
            is_directory = record is not None and record[4] == Kind.DIRECTORY
            overlay[_U64.pack(parent) + name] = None if number is None else (number, is_directory)
        return overlay

    def _drop_overtaken(self, found: _Found) -> None:
        """Names that were made or removed while the batch was on its way: the user's change counts."""
        overtaken = [(parent, name, inode) for parent, name, inode in self._index.overlay_names()]
        overtaken += [(parent, name, None) for parent, name in self._index.removed_names or ()]
        for parent, name, inode in overtaken:
            stored = self._index.stored_inode(parent, name)
            if stored is None or stored == inode or stored not in found.inodes:
                continue
            record = self._index.raw(stored)
            found.inodes.pop(stored, None)
            if record is not None:
                old = Inode.unpack(record)
                self._index.delete(old)
                self._count(old, -1)

    def _count(self, inode: Inode, sign: int) -> None:
        if inode.kind == Kind.FILE:
            self.blocks += sign
            for segment, pages in usage(inode).items():
                self._live[segment] = self._live.get(segment, 0) + sign * pages

    # Runs in a thread: nothing here touches what the trio thread changes.

    def _merge(self, bulk: Bulk, pieces: Iterable[bytes], overlay: _Overlay) -> _Found:
        found = _Found()
        for data in pieces:
            for at, size in split_records(data):
                if data[at + 4] == Kind.DIRECTORY:
                    self._merge_directory(bulk, found, data[at : at + size], overlay)
            self._merge_files(bulk, found, data, overlay)
        self._store(bulk, found)
        return found

    def _store(self, bulk: Bulk, found: _Found) -> None:
        bulk.load(
            [(_U64.pack(number), record) for number, record in found.inodes.items()],
            list(found.names.items()),
            [(key, b"") for key in found.members],
        )

    def _merge_directory(self, bulk: Bulk, found: _Found, record: bytes, overlay: _Overlay) -> None:
        head = RECORD_HEAD.unpack_from(record)
        number, version, name_size = head[4], head[6], head[3]
        if self._directories.get(number, -1) >= version or number in self._aliases:
            return
        parent = self._aliases.get(head[5], head[5])
        if self._is_above(bulk, found, number, parent):
            log.warning("directory %d: its header says that it lies below itself; it is left out", number)
            return
        name = record[RECORD_SIZE : RECORD_SIZE + name_size]
        key = _U64.pack(parent) + name
        other = self._holder(bulk, found, key, parent, name, overlay)
        if other is not None and other[0] != number:
            if other[1]:
                # The user, or an older block, has a directory of that name already: this one's blocks go there.
                self._aliases[number] = other[0]
                return
            self._drop(bulk, found, other[0])
        before = found.inodes.get(number) or bulk.record(number)
        if before is not None:
            old = Inode.unpack(before)
            found.names.pop(_U64.pack(old.parent) + old.name, None)
            bulk.remove(old)
        self._directories[number] = version
        if head[2] & InodeFlags.PINNED:
            self._pinned.append(number)
        if parent != head[5]:
            record = record[:16] + _VALUE.pack(parent) + record[24:]
        found.inodes[number] = record
        found.names[key] = _VALUE.pack(number)
        self._mark_name(key)

    def _is_above(self, bulk: Bulk, found: _Found, number: int, below: int) -> bool:
        """Whether `below` is this directory, or lies below it: a walk up from there would never end."""
        for _ in range(_DEPTH_MAX):
            if below == number:
                return True
            record = found.inodes.get(below) or bulk.record(below)
            if below == ROOT_INODE or record is None:
                return False
            below = RECORD_HEAD.unpack_from(record)[5]
        return True

    def _merge_files(self, bulk: Bulk, found: _Found, data: bytes, overlay: _Overlay) -> None:
        """The hot loop: 100,000 blocks a second and more, so no objects, and names locals."""
        unpack, aliases, generations = (
            RECORD_HEAD.unpack_from,
            self._aliases,
            [s.generation for s in self._segments.all],
        )
        count, live, directories = len(generations), self._live, self._directories
        inodes, names, members = found.inodes, found.names, found.members
        sealed, nameless, pinned = int(InodeFlags.SEALED), int(InodeFlags.NAMELESS), int(InodeFlags.PINNED)
        name_mask, seen_names = (1 << _NAME_BITS) - 1, self._names
        for at, size in split_records(data):
            (_, kind, flags, name_size, number, parent, version, length, generation, home, _, header_pages,
             extent_count) = unpack(data, at)  # fmt: skip
            if kind != 1 or not flags & sealed or flags & nameless or home >= count or generations[home] != generation:
                continue
            used: dict[int, int] | None = None
            if extent_count:
                used = _extents_in_place(data, at, name_size, extent_count, generations)
                if used is None:
                    continue
                used[home] = used.get(home, 0) + header_pages
            moved = parent in aliases
            if moved:
                parent = aliases[parent]
            if parent not in directories and not self._user_directory(bulk, parent, overlay):
                continue
            key = parent.to_bytes(8, "big") + data[at + RECORD_SIZE : at + RECORD_SIZE + name_size]
            name_bit = hash(key) & name_mask
            # A rare case: the inode or the name was met before, or is in use right now.
            if self._seen.add(number) and not self._supersedes(bulk, found, number, version):
                continue
            if (seen_names[name_bit >> 3] >> (name_bit & 7)) & 1 or key in overlay:
                name = data[at + RECORD_SIZE : at + RECORD_SIZE + name_size]
                if not self._takes_name(bulk, found, key, parent, name, number, version, overlay):
                    continue
            seen_names[name_bit >> 3] |= 1 << (name_bit & 7)
            record = data[at : at + size]
            if moved:
                record = record[:16] + _VALUE.pack(parent) + record[24:]
            inodes[number] = record
            names[key] = _VALUE.pack(number)
            self.blocks += 1
            if used is None:
                members.add(_MEMBER.pack(home, number))
                live[home] = live.get(home, 0) + header_pages + (length + 4095) // 4096
            else:
                for segment, pages in used.items():
                    members.add(_MEMBER.pack(segment, number))
                    live[segment] = live.get(segment, 0) + pages
            if flags & pinned:
                self._pinned.append(number)

    def _mark_name(self, key: bytes) -> None:
        bit = hash(key) & ((1 << _NAME_BITS) - 1)
        self._names[bit >> 3] |= 1 << (bit & 7)

    def _user_directory(self, bulk: Bulk, number: int, overlay: _Overlay) -> bool:
        """A directory that a user made since the mount. By an alias it can be a parent."""
        record = bulk.record(number)
        if record is None:
            return any(value is not None and value[0] == number for value in overlay.values())
        if record[4] != Kind.DIRECTORY:
            return False
        self._directories.setdefault(number, 0)
        return True

    def _holder(
        self, bulk: Bulk, found: _Found, key: bytes, parent: int, name: bytes, overlay: _Overlay
    ) -> tuple[int, bool] | None:
        """(inode, is a directory) that has the name now."""
        if key in overlay:
            return overlay[key]
        value = found.names.get(key)
        number = bulk.named(parent, name) if value is None else _VALUE.unpack(value)[0]
        if number is None:
            return None
        record = found.inodes.get(number) or bulk.record(number)
        return number, record is not None and record[4] == Kind.DIRECTORY

    def _takes_name(
        self, bulk: Bulk, found: _Found, key: bytes, parent: int, name: bytes, number: int, version: int,
        overlay: _Overlay,
    ) -> bool:  # fmt: skip
        if key in overlay or (parent, name) in (self._index.removed_names or ()):
            return False
        other = self._holder(bulk, found, key, parent, name, overlay)
        if other is None or other[0] == number:
            return True
        record = found.inodes.get(other[0]) or bulk.record(other[0])
        if other[1] or (record is not None and RECORD_HEAD.unpack_from(record)[6] > version):
            return False
        self._drop(bulk, found, other[0])
        return True

    def _supersedes(self, bulk: Bulk, found: _Found, number: int, version: int) -> bool:
        """The inode was met before. Whether this record is newer; the old one is then gone."""
        record = found.inodes.get(number) or bulk.record(number)
        if record is None:
            return True
        if RECORD_HEAD.unpack_from(record)[6] >= version:
            return False
        self._drop(bulk, found, number)
        return True

    def _drop(self, bulk: Bulk, found: _Found, number: int) -> None:
        """Take out the entries of an older record, in this batch or before."""
        record = found.inodes.pop(number, None)
        stored = bulk.record(number)
        for data in (record, stored):
            if data is None:
                continue
            old = Inode.unpack(data)
            key = _U64.pack(old.parent) + old.name
            if found.names.get(key) == _VALUE.pack(number):
                del found.names[key]
            for segment in usage(old):
                found.members.discard(_MEMBER.pack(segment, number))
        if record is not None:
            self._count(Inode.unpack(record), -1)
        if stored is not None:
            old = Inode.unpack(stored)
            bulk.remove(old)
            if record is None:
                self._count(old, -1)


def _extents_in_place(
    data: bytes, at: int, name_size: int, count: int, generations: list[int]
) -> dict[int, int] | None:
    """Pages in each segment, or None if an extent lies in a segment that has been opened anew since."""
    used: dict[int, int] = {}
    first = at + RECORD_SIZE + (name_size + 7 & ~7)
    for i in range(count):
        generation, segment, _, pages, _ = RECORD_EXTENT.unpack_from(data, first + i * RECORD_EXTENT.size)
        if segment >= len(generations) or generations[segment] != generation:
            return None
        used[segment] = used.get(segment, 0) + pages
    return used
