"""Slabs: files that are preallocated and overwritten in place. Their segments and their quota.

A slab has whole segments of the SLAB stream to itself while its inode is open. The data plane reads and writes them
(native/src/content/). Nothing of it is in the index on disk: after a restart its segments are empty. A slab that was
closed without ever having been overwritten becomes an ordinary file: its pages stay where they are, and get a header.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field

import trio

from kvfs.errors import BusyError, DeadlineError, DeviceError, InvalidArgumentError, KvfsError, NoSpaceError
from kvfs.plane import PlaneError, Run
from kvfs.record import InodeFlags
from kvfs.store.blocks import Blocks
from kvfs.store.sealing import Sealing
from kvfs.store.segment import Segment
from kvfs.store.shares import ROOT, SLABS
from kvfs.types import PAGE_SIZE, InodeNumber
from kvfs.units import counted, told_size

log = logging.getLogger(__name__)

# A change of a slab waits this long for a running one. The slowest turns the slab into a file.
_TURN_TIMEOUT_S = 60.0
_TURN_POLL_S = 0.005


@dataclass(slots=True)
class _Slab:
    """The segments of a slab, each with the generation that it was opened with."""

    inode: InodeNumber
    segments: list[tuple[Segment, int]] = field(default_factory=list)
    user: int = ROOT  # the user to whom it is charged
    failed: bool = False

    @property
    def first(self) -> int:
        return self.segments[0][0].index


class Slabs:
    """All slabs of a pool. One trio thread."""

    def __init__(self, blocks: Blocks, sealing: Sealing, quota: float) -> None:
        """`quota`: the part of the pool's segments that slabs may have. refused: advice about
        the last file that became no slab for it, or ""."""
        segments, self._blocks = blocks.segments, blocks
        self._segments, self._index, self._plane, self._sealing = segments, blocks.index, blocks.plane, sealing
        self._space, self._shares, self.names = blocks.space, blocks.shares, blocks.names
        self._slabs: dict[int, _Slab] = {}
        # Slabs that are no file's any more, and still read by requests under way; by first segment. Their inodes may
        # have others.
        self._ended: dict[int, _Slab] = {}
        self._lock = trio.Lock()
        self.take_quota(quota)
        # A slab has these pages of a segment: whole stripe units, so that its I/O is cut where a file's would be.
        unit = segments.geometry.stripe_unit // PAGE_SIZE
        end = segments.geometry.end_page
        self._first_page = unit if end >= 2 * unit else 1
        self._run_pages = (end - unit) // unit * unit if end >= 2 * unit else end - 1

    def take_quota(self, quota: float) -> None:
        """Slabs that there are stay, also beyond a smaller one."""
        self.quota = int(len(self._segments.own) * quota)
        self.refused = ""

    @property
    def count(self) -> int:
        return len(self._slabs)

    @property
    def segment_count(self) -> int:
        return sum(len(slab.segments) for slab in (*self._slabs.values(), *self._ended.values()))

    @property
    def bytes(self) -> int:
        """Bytes of the pool that slabs take, in whole segments."""
        return self.segment_count * self._segments.area * PAGE_SIZE

    def _changed(self) -> None:
        """Slabs have more segments, or fewer."""
        self._space.slab_segments = self.segment_count
        self._space.update()

    async def make(self, number: InodeNumber, size: int, *, chosen: bool = False) -> None:
        """Make an empty file that is being written a slab of at least `size` bytes, or a slab larger.

        `chosen`: by its owner; it goes with its last descriptor, used or not. NoSpaceError beyond the quota, or if no
        segments are free; InvalidArgumentError if the file is not open for writing; BusyError if it has content.
        """
        async with self._lock:
            await self._make(number, size, chosen)

    async def _make(self, number: InodeNumber, size: int, chosen: bool) -> None:
        pages, used, needed = self._pages(number), self.segment_count, self._needed(number, size)
        if used + needed > self.quota:
            area = self._segments.area * PAGE_SIZE
            raise NoSpaceError(
                f"inode {number}: a slab of {told_size(size)} takes {counted(needed, 'segment')} of "
                f"{told_size(area)} more; slabs have {used} of the {self.quota} that slab_quota gives them"
            )
        known = self._slabs.get(number) if pages else None
        slab = _Slab(number, user=self._user(number) if known is None else known.user)
        self._shares.check(slab.user, needed * self._segment_size, f"inode {number}: a slab of {told_size(size)}")
        try:
            for _ in range(needed):
                segment = await self._segments.take_whole()
                slab.segments.append((segment, segment.generation))
                self._shares.add(SLABS, slab.user, self._segment_size)
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
        if not pages and (ended := self._slabs.pop(number, None)) is not None:
            self._ended[ended.first] = ended
        self._slabs.setdefault(number, _Slab(number, user=slab.user)).segments += slab.segments
        self._changed()
        self._mark(number, True)

    def _needed(self, number: InodeNumber, size: int) -> int:
        """Segments that a slab of `size` bytes takes beyond those that it has."""
        return max(1, -(-size // (self._run_pages * PAGE_SIZE))) - self._pages(number) // self._run_pages

    def _advise(self, number: InodeNumber, size: int) -> None:
        wanted, own = self.segment_count + self._needed(number, size), len(self._segments.own)
        if self.quota < wanted <= own:
            share = next(each / 100 for each in range(1, 101) if int(own * (each / 100)) >= wanted)
            self.refused = (
                f"a file that asked for a slab of {told_size(size)} is one as any other: slabs would take {wanted} of "
                f"{own} segments, slab_quota gives them {self.quota}: slab_quota = {share:g} in pool.toml, SIGHUP to "
                "the daemon, then the file anew"
            )

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

    async def preallocate(self, number: InodeNumber, size: int) -> bool:
        """fallocate, or ftruncate, of a file that should be a slab, or is one: as make().

        Returns False if it has no room as a slab (the quota is used up, no segments are free), or was written
        meanwhile. Then it is an ordinary file from now on, with the bytes that were written to it.
        """
        return await self._alone(number, lambda: self._preallocate(number, size))

    async def _preallocate(self, number: InodeNumber, size: int) -> bool:
        try:
            await self._make(number, size, False)
            return True
        except BusyError:
            return False
        except NoSpaceError as error:
            self._advise(number, size)
            if not self._is_slab(number):
                log.warning("inode %d: a file as any other: %s", number, error)
                return False
            try:
                await self._plane.slab_to_file(number, writers_stay=True)
            except PlaneError as refused:
                if refused.errno == errno.EPERM:  # its owner chose a slab, or no file can be so large
                    raise error from None
                raise
            log.warning("inode %d: no slab any more, a file as any other: %s", number, error)
            self._mark(number, False)
            # Its pages count as a file's now. Until its segments are given back they would count twice.
            while number in self._slabs:
                await trio.sleep(_TURN_POLL_S)
            return False

    async def _alone(self, number: InodeNumber, change: Callable[[], Awaitable[bool]]) -> bool:
        """Change a slab while nothing else does. False if it is none any more."""
        try:
            with trio.fail_after(_TURN_TIMEOUT_S):
                while True:
                    async with self._lock:
                        try:
                            return await change()
                        except PlaneError as error:
                            if error.errno not in (errno.EBUSY, errno.ENOENT):
                                raise
                        if not self._is_slab(number):
                            return False
                    # The slab is just becoming a file.
                    await trio.sleep(_TURN_POLL_S)
        except trio.TooSlowError:
            raise DeadlineError(f"inode {number}: its slab was busy for {_TURN_TIMEOUT_S:g} s") from None

    @property
    def _segment_size(self) -> int:
        return self._segments.area * PAGE_SIZE

    def _user(self, number: InodeNumber) -> int:
        """The user that has the file open."""
        try:
            return self._plane.inode_user(number)
        except PlaneError:
            return ROOT

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
        """ftruncate of a slab. The slab keeps all its room. False if it no longer is one, as preallocate()."""
        return await self._alone(number, lambda: self._resize(number, size))

    async def _resize(self, number: InodeNumber, size: int) -> bool:
        pages = self._plane.slab_pages(number)
        if not pages:
            return False
        if size > pages * PAGE_SIZE:
            return await self._preallocate(number, size)
        await self._plane.slab_resize(number, size)
        return True

    def _is_slab(self, number: InodeNumber) -> bool:
        try:
            return self._plane.slab_pages(number) > 0
        except PlaneError:
            return False

    # ---- the end of one ----

    async def closed(self, number: InodeNumber, goes: bool) -> None:
        """The slab has lost its last writer (KVFS_EVENT_SLAB_CLOSED); if it `goes`, it is closed."""
        if not goes:
            try:
                await self._plane.slab_to_file(number)
                self._mark(number, False)
                await self._sealing.seal_quietly(number)
                return
            except PlaneError as error:
                # The slab is open for writing again, or gone: nothing is to be done.
                if error.errno in (errno.EBUSY, errno.ENOENT):
                    return
                if error.errno != errno.EPERM:
                    log.warning("inode %d: a slab that was closed cannot become a file: %s; it goes", number, error)
        # In one step: a name that leads to it may be changed by others.
        with suppress(PlaneError), self.names:  # opened again, or unlinked: another event follows
            self._plane.slab_close(number)
            inode = self._index.get(number)
            if inode is not None:
                self._index.delete(inode)

    def _mark(self, number: InodeNumber, slab: bool) -> None:
        on, off = (InodeFlags.SLAB, InodeFlags.NONE) if slab else (InodeFlags.NONE, InodeFlags.SLAB)
        self._blocks.mark(number, on=on, off=off)

    def freed(self, number: InodeNumber, first: int) -> None:
        """Nothing of the slab that began with segment `first` is under way (KVFS_EVENT_SLAB_FREE). Runs in one step."""
        slab = self._ended.pop(first, None)
        if slab is None and (current := self._slabs.get(number)) is not None and current.first == first:
            slab = self._slabs.pop(number)
        if slab is not None:
            # The inode may be a file now, whose pages lie here.
            self._sealing.hold_extents(number)
            self._release(slab)
            self._changed()

    def _release(self, slab: _Slab) -> None:
        for segment, generation in slab.segments:
            self._segments.give_back(segment, generation)
            self._shares.add(SLABS, slab.user, -self._segment_size)

    def close(self) -> None:
        """The store closes: reads and writes have ended."""
        for slab in [*self._ended.values(), *self._slabs.values()]:
            self.freed(slab.inode, slab.first)

    # ---- devices ----

    def on_segments(self, numbers: Iterable[int]) -> list[int]:
        """The inodes of the slabs that lie in any of these segments, and can still be used."""
        wanted = set(numbers)
        return sorted(
            number for number, slab in self._slabs.items()
            if not slab.failed and any(segment.index in wanted for segment, _ in slab.segments)
        )  # fmt: skip

    def fail(self, numbers: Iterable[int]) -> None:
        """A device is away: its slabs answer EIO from now on. Without checksums its losses cannot be told."""
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
