"""Slabs: files that are preallocated and overwritten in place. Which segments are theirs, and within which quota.

A slab has whole segments of the SLAB stream to itself for as long as its inode is open; the data plane reads and
writes them (native/src/slab.c). Nothing of it is in the index on disk: after a restart its segments are empty. One
that was closed without ever having been overwritten is a file as any other: its pages stay where they are, and get a
header.
"""
from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field

import trio

from kvfs.errors import BusyError, DeviceError, InvalidArgumentError, KvfsError, NoSpaceError
from kvfs.index.interface import Index
from kvfs.plane import Plane, PlaneError, Run
from kvfs.store.sealing import Sealing
from kvfs.store.segments import Segment, Segments
from kvfs.types import PAGE_SIZE, InodeFlags, InodeNumber

log = logging.getLogger(__name__)

# Who changes a slab waits this long for another change of it: that it becomes a file, at most.
_TURN_TIMEOUT_S = 60.0
_TURN_POLL_S = 0.005


@dataclass(slots=True)
class _Slab:
    """The segments of one, each with the generation that it was opened with."""

    segments: list[tuple[Segment, int]] = field(default_factory=list)
    failed: bool = False


class Slabs:
    """All slabs of a pool. One trio thread."""

    def __init__(self, segments: Segments, index: Index, plane: Plane, sealing: Sealing, quota: float,
                 on_change: Callable[[], None]) -> None:  # fmt: skip
        """`quota`: the part of the pool's segments that slabs may have. on_change: they have more, or fewer."""
        self._segments, self._index, self._plane, self._sealing = segments, index, plane, sealing
        self._on_change = on_change
        self._slabs: dict[int, _Slab] = {}
        self._lock = trio.Lock()
        self.quota = int(len(segments.all) * quota)
        # Pages of a segment that a slab has: whole stripe units, so that its I/O is cut where a file's would be.
        unit = segments.geometry.stripe_unit // PAGE_SIZE
        end = segments.geometry.end_page
        self._first_page = unit if end >= 2 * unit else 1
        self._run_pages = (end - unit) // unit * unit if end >= 2 * unit else end - 1

    @property
    def count(self) -> int:
        return len(self._slabs)

    @property
    def segment_count(self) -> int:
        return sum(len(slab.segments) for slab in self._slabs.values())

    @property
    def bytes(self) -> int:
        """What slabs take of the pool, in whole segments."""
        return self.segment_count * self._segments.area * PAGE_SIZE

    async def make(self, number: InodeNumber, size: int, *, chosen: bool = False) -> None:
        """Make an empty file that is being written a slab of at least `size` bytes, or a slab larger.

        `chosen`: by its owner; it goes with its last descriptor, used or not. NoSpaceError beyond the quota, or if no
        segments are free; InvalidArgumentError if nobody has the file open for writing; BusyError if it has content.
        """
        async with self._lock:
            await self._make(number, size, chosen)

    async def _make(self, number: InodeNumber, size: int, chosen: bool) -> None:
        pages = self._pages(number)
        needed = max(1, -(-size // (self._run_pages * PAGE_SIZE))) - pages // self._run_pages
        used = self.segment_count
        if used + needed > self.quota:
            area = self._segments.area * PAGE_SIZE
            raise NoSpaceError(
                f"inode {number}: a slab of {size} bytes takes {needed} segments more of {area} bytes; slabs have "
                f"{used} of the {self.quota} that slab_quota gives them"
            )
        slab = _Slab()
        try:
            for _ in range(needed):
                segment = await self._segments.take_whole()
                slab.segments.append((segment, segment.generation))
            if any(segment.lost for segment, _ in slab.segments):
                raise DeviceError(f"inode {number}: a device failed while its slab was made")
            runs = [
                Run(generation, segment.index, self._first_page, self._run_pages)
                for segment, generation in slab.segments
            ]
            await self._extend(number, size, chosen, runs)
        except BaseException:
            self._release(slab)
            raise
        self._slabs.setdefault(number, _Slab()).segments += slab.segments
        self._on_change()
        inode = self._index.get(number)
        if inode is not None and InodeFlags.SLAB not in inode.flags:
            inode.flags |= InodeFlags.SLAB
            self._index.put(inode, inode)
            self._plane.inode_update(inode.pack())

    async def _extend(self, number: InodeNumber, size: int, chosen: bool, runs: list[Run]) -> None:
        with trio.fail_after(_TURN_TIMEOUT_S):
            while True:
                try:
                    self._plane.slab_extend(number, size, chosen, runs)
                    return
                except PlaneError as error:
                    if error.errno != errno.EAGAIN:
                        raise _refused(number, error) from error
                await trio.sleep(_TURN_POLL_S)

    def _pages(self, number: InodeNumber) -> int:
        try:
            return self._plane.slab_pages(number)
        except PlaneError as error:
            raise _refused(number, error) from error

    async def wanted(self, number: InodeNumber, size: int) -> None:
        """A file of that size, with no content, is written with O_DIRECT (KVFS_EVENT_SLAB_WANTED). If it cannot be a
        slab it is a file as any other: its writes wait for this, and do not fail by it."""
        try:
            await self.make(number, size)
        except KvfsError as error:
            log.warning("inode %d: is written like a slab, and is none: %s", number, error)
        finally:
            with suppress(PlaneError):
                self._plane.slab_answer(number)

    async def choose(self, number: InodeNumber) -> None:
        """As make(), of the size that the file has, because its owner says so. It may be one already."""
        try:
            size = self._plane.file_size(number)
        except PlaneError as error:
            raise _refused(number, error) from error
        await self.make(number, size, chosen=True)

    async def resize(self, number: InodeNumber, size: int) -> bool:
        """ftruncate of a slab. What it has room for it keeps. False if it is none any more."""
        with trio.fail_after(_TURN_TIMEOUT_S):
            while True:
                async with self._lock:
                    try:
                        pages = self._plane.slab_pages(number)
                        if not pages:
                            return False
                        if size > pages * PAGE_SIZE:
                            await self._make(number, size, False)
                        else:
                            await self._plane.slab_resize(number, size)
                        return True
                    except PlaneError as error:
                        if error.errno not in (errno.EBUSY, errno.ENOENT):
                            raise
                    if not self._is_slab(number):
                        return False
                # It is just becoming a file.
                await trio.sleep(_TURN_POLL_S)

    def _is_slab(self, number: InodeNumber) -> bool:
        try:
            return self._plane.slab_pages(number) > 0
        except PlaneError:
            return False

    # ---- the end of one ----

    async def closed(self, number: InodeNumber, goes: bool) -> None:
        """Nobody writes it any more (KVFS_EVENT_SLAB_CLOSED); if it `goes`, nobody has it open."""
        if not goes:
            try:
                await self._plane.slab_settle(number)
                self._unmark(number)
                await self._sealing.seal_quietly(number)
                return
            except PlaneError as error:
                # Open for writing again, or gone: then there is nothing to do.
                if error.errno in (errno.EBUSY, errno.ENOENT):
                    return
                if error.errno != errno.EPERM:
                    log.warning("inode %d: a slab that was closed cannot become a file: %s; it goes", number, error)
        with suppress(PlaneError):  # opened again, or unlinked: another event follows
            self._plane.slab_close(number)
            inode = self._index.get(number)
            if inode is not None:
                self._index.delete(inode)

    def _unmark(self, number: InodeNumber) -> None:
        inode = self._index.get(number)
        if inode is not None:
            inode.flags &= ~InodeFlags.SLAB
            self._index.put(inode, inode)
            self._plane.inode_update(inode.pack())

    def freed(self, number: InodeNumber) -> None:
        """Nothing of it is under way any more (KVFS_EVENT_SLAB_FREE). Runs in one step."""
        slab = self._slabs.pop(number, None)
        if slab is not None:
            # It may be a file now, whose pages lie here.
            self._sealing.hold_extents(number)
            self._release(slab)
            self._on_change()

    def _release(self, slab: _Slab) -> None:
        for segment, generation in slab.segments:
            self._segments.give_back(segment, generation)

    def close(self) -> None:
        """The store closes: nobody reads or writes any more."""
        for number in list(self._slabs):
            self.freed(InodeNumber(number))

    # ---- devices ----

    def on_segments(self, numbers: Iterable[int]) -> list[int]:
        """The inodes of the slabs that lie in any of these segments, and can still be used."""
        wanted = set(numbers)
        return sorted(
            number for number, slab in self._slabs.items()
            if not slab.failed and any(segment.index in wanted for segment, _ in slab.segments)
        )  # fmt: skip

    def fail(self, numbers: Iterable[int]) -> None:
        """A device is away: slabs there say EIO from now on. Without checksums nobody could tell what it lost."""
        for number in self.on_segments(numbers):
            self._slabs[number].failed = True
            log.error("inode %d: a device that its slab lies on is away: it says EIO until it is closed", number)
            with suppress(PlaneError):
                self._plane.slab_fail(number)


def _refused(number: int, error: PlaneError) -> KvfsError:
    if error.errno == errno.EBUSY:
        return BusyError(f"inode {number}: has content already: a slab is made of an empty file, before it is written")
    if error.errno == errno.ENOENT:
        return InvalidArgumentError(f"inode {number}: not open for writing: a slab is there as long as it is open")
    return error
