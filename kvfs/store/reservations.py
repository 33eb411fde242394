"""Reservations: places that native clients write blocks to themselves, and the blocks of those that they commit.

A reservation has a place (runs of the CLIENT stream), an inode number and a version. Until its commit nothing leads to
it; then the block enters index and table in one step, as a seal's does. A reservation that is not committed in time, or
whose client ends, is taken back. Scans step over its runs from then on, and its runs are not used again before the
segment is.

Versions are given out here, seconds before the block enters, and count as in flight until then. A crash in between
leaves whole blocks that recovery may adopt (I14). Two rules keep a name's index entry and what recovery would make of
the headers in agreement. A block whose name was given to a newer inode meanwhile is superseded. It never enters, and
its version is lower than the version of the inode that stays. A block may replace an older inode whose version has
risen above its own (attributes changed, a rewrite). It enters with a new version. Its header has the old one, so the
commit is answered when the index is durable.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from errno import ECANCELED, EFBIG, EIO, ENOSPC, ETIMEDOUT
from typing import NamedTuple

import trio

from kvfs.errors import KvfsError, NoSpaceError
from kvfs.names import step
from kvfs.plane import Run
from kvfs.pool.format import Stream
from kvfs.record import RECORD_SIZE, Extent, Inode, InodeFlags, Kind
from kvfs.store.blocks import Blocks
from kvfs.store.sealing import Sealing
from kvfs.store.segment import Head
from kvfs.store.shares import RESERVED, ROOT
from kvfs.types import PAGE_SIZE, InodeNumber

log = logging.getLogger(__name__)

RESERVATION_MS = 30_000
# Reserved at one time: of the pool, so that eviction always has something to go for, and in number.
_SHARE = 4
_OPEN_MAX = 65_536
# A batch that must wait for eviction, or for others' reservations, waits this long at most.
_SPACE_TIMEOUT_S = 10.0
# A commit waits this long for earlier reservations of its segments to be settled, then for the index instead.
_SETTLE_S = 0.02
_YIELD_EVERY = 64
_TOMBSTONE_TASKS = 8


class Wanted(NamedTuple):
    """A block that a client is about to write."""

    parent: InodeNumber
    name: bytes
    size: int
    uid: int
    gid: int


@dataclass(slots=True, eq=False)
class Reservation:
    number: int
    inode: Inode  # as its header is to have it
    runs: list[Run]
    pages: int
    user: int  # whom it is charged to
    moves: int  # directories renamed until then
    ancestors: bytes


@dataclass(slots=True, eq=False)
class Holder:
    """One client's reservations. Only Reservations changes it."""

    user: int = ROOT
    open: dict[int, Reservation] = field(default_factory=dict)
    pages: int = 0
    # Taken back while the client may still write there: until it says that it cannot any more, or ends.
    late: dict[int, list[Run]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ReservationStatistics:
    open: int
    reserved_bytes: int
    committed: int
    superseded: int
    reclaimed: int


# Gives a block its name. False: the name has a newer one.
Enter = Callable[[Inode], bool]


class Reservations:
    """All native clients' reservations of a mounted pool. `run()` must run."""

    def __init__(self, blocks: Blocks, sealing: Sealing) -> None:
        self._segments, self._index, self._plane, self._blocks = blocks.segments, blocks.index, blocks.plane, blocks
        self._versions, self._shares = blocks.versions, blocks.shares
        self._sealing, self.names = sealing, blocks.names
        self.pages = 0
        self._numbers = 0
        self._holders: set[Holder] = set()
        # (when, whose, first number, last number): a batch.
        self._expiries: deque[tuple[float, Holder, int, int]] = deque()
        self._returned: list[Reservation] = []
        self._work = trio.Event()
        self._released = trio.Event()
        self._open = self._committed = self._superseded = self._reclaimed = 0

    # ---- clients ----

    def join(self, user: int = ROOT) -> Holder:
        holder = Holder(user)
        self._holders.add(holder)
        return holder

    def take_back_all(self, holder: Holder) -> None:
        """The client is gone: everything it has not committed is taken back."""
        if holder in self._holders:
            self._holders.discard(holder)
            for reservation in list(holder.open.values()):
                self._take_back(holder, reservation)
            for runs in holder.late.values():
                self._segments.end_lending(runs)
            holder.late.clear()

    # ---- reserving ----

    async def reserve(
        self, holder: Holder, wanted: Sequence[Wanted | int], timeout_s: float = float("inf")
    ) -> list[Reservation | int]:
        """Places for a batch, or -errno for each: -EFBIG, -ENOSPC. An item that is an errno already stays it.

        An item that finds no place within timeout_s, and ten seconds at most, gets none.
        """
        answers: list[Reservation | int] = []
        first = self._numbers + 1
        header_pages: dict[tuple[int, int, int], int] = {}
        head = self._segments.head(Stream.CLIENT)
        with trio.move_on_after(min(timeout_s, _SPACE_TIMEOUT_S)):
            for i, item in enumerate(wanted):
                if i % _YIELD_EVERY == _YIELD_EVERY - 1:
                    await trio.lowlevel.checkpoint()
                if isinstance(item, int):
                    answers.append(item)
                    continue
                try:
                    answers.append(await self._reserve(holder, head, item, header_pages))
                except NoSpaceError:
                    break
                except KvfsError as error:
                    answers.append(-(error.errno or EIO))
        answers += [item if isinstance(item, int) else -ENOSPC for item in wanted[len(answers) :]]
        if self._numbers >= first:
            self._expiries.append((trio.current_time() + RESERVATION_MS / 1000, holder, first, self._numbers))
            self._work.set()
        return answers

    async def _reserve(
        self, holder: Holder, head: Head, item: Wanted, known: dict[tuple[int, int, int], int]
    ) -> Reservation | int:
        data_pages = (item.size + PAGE_SIZE - 1) // PAGE_SIZE
        share = len(self._segments.all) * self._segments.area // _SHARE
        if data_pages > share:
            return -EFBIG
        ancestors = self._sealing.ancestors(item.parent)
        record_size = RECORD_SIZE + (len(item.name) + 7 & ~7)
        sizes = (item.size, record_size, len(ancestors))
        header_pages = known.get(sizes)
        if header_pages is None:
            extents = self._segments.runs_bound(data_pages)
            header_pages = known[sizes] = self._plane.header_pages(*sizes, extents)
        pages = header_pages + data_pages
        if pages > share:
            return -EFBIG
        while self.pages + pages > share or self._open >= _OPEN_MAX:
            # Others' go in time; one's own only with a commit that comes after this answer.
            if holder.pages + pages > share or len(holder.open) >= _OPEN_MAX // 2:
                raise NoSpaceError(f"{holder.pages} pages are reserved by one client, {share} may be")
            await self._released.wait()
        self._shares.check(holder.user, pages * PAGE_SIZE, f"a block of {item.size} bytes")
        # Counted before the wait for a place, so that two that wait do not both find room.
        self._count(holder.user, pages)
        try:
            runs = await self._segments.allocate(head, header_pages, data_pages)
        except BaseException:
            self._count(holder.user, -pages)
            self._wake()
            raise
        self._segments.lend(runs)
        self._numbers += 1
        now = time.time_ns()
        home = runs[0]
        inode = Inode(
            inode=self._blocks.next_inode(), parent=item.parent, name=item.name, kind=Kind.FILE, mode=0o100644,
            uid=item.uid, gid=item.gid, flags=InodeFlags.SEALED, version=self._versions.begin(), size=item.size,
            generation=home.generation, segment=home.segment, page=home.page, header_pages=header_pages,
            mtime_ns=now, ctime_ns=now, atime_ns=now, extents=_extents(runs, header_pages),
        )  # fmt: skip
        moves = self._blocks.directory_moves
        reservation = Reservation(self._numbers, inode, runs, pages, holder.user, moves, ancestors)
        holder.open[self._numbers] = reservation
        holder.pages += pages
        self._open += 1
        return reservation

    # ---- committing ----

    async def commit(self, holder: Holder, items: Sequence[tuple[int, int]], enter: Enter) -> list[int]:
        """(number, 0 or -errno of the client's write) each; the answers say 0 for what entered or was superseded.

        When this returns a crash cannot lose a block that it said 0 for.
        """
        answers: list[int] = []
        last: dict[int, Run] = {}
        durable = False
        for i, (number, error) in enumerate(items):
            if i % _YIELD_EVERY == _YIELD_EVERY - 1:
                self._wake()
                await trio.lowlevel.checkpoint()
            reservation = holder.open.get(number)
            if reservation is None:
                if error != -ETIMEDOUT and number in holder.late:
                    self._segments.end_lending(holder.late.pop(number))
                answers.append(-ETIMEDOUT)
                continue
            version = reservation.inode.version
            if not error:
                try:
                    self._enter(holder, reservation, enter)
                except KvfsError as failure:
                    error = -(failure.errno or EIO)
            answers.append(error)
            if error:
                self._take_back(holder, reservation, late=error == -ETIMEDOUT, begun=error != -ECANCELED)
                continue
            durable |= reservation.inode.version != version
            for run in reservation.runs:
                known = last.get(run.segment)
                if known is None or known.page < run.page:
                    last[run.segment] = run
        self._wake()
        await self._secure(list(last.values()), durable)
        return answers

    @step
    def _enter(self, holder: Holder, reservation: Reservation, enter: Enter) -> None:
        inode, home = reservation.inode, self._segments.all[reservation.inode.segment]
        version = inode.version
        entered = enter(inode)
        if not entered or inode.version != version or reservation.moves != self._blocks.directory_moves:
            # Its header is not all of the truth.
            self._segments.mark_dirty(home, gone=True)
        self._committed += entered
        if not entered:
            self._superseded += 1
            # The last commit may know this one as in flight: a crash would bring it back if its successor was gone.
            number = self._index.lookup(inode.parent, inode.name)
            successor = None if number is None else self._index.get(number)
            if successor is not None:
                self._segments.wait_for_commit(successor)
        self._close(holder, reservation)
        self._segments.end_lending(reservation.runs, rest=False)
        self._end(reservation, version)

    async def _secure(self, runs: Sequence[Run], durable: bool) -> None:
        """Return when recovery would find the blocks that end with these runs.

        It finds them by a scan if everything before them in their segments is settled. But there may be another
        client's reservation that takes half a minute, or one of the same client whose commit comes next. So after a
        moment the index is made durable instead.
        """
        if not durable:
            if self._segments.is_settled(runs):
                return
            with trio.move_on_after(_SETTLE_S):
                await self._segments.settle(runs)
                return
        try:
            await self._blocks.commit()
        except KvfsError as error:
            log.warning("a native put waits for its segments: %s", error)
            await self._segments.settle(runs)

    # ---- taking back ----

    def _take_back(self, holder: Holder, reservation: Reservation, *, late: bool = False, begun: bool = True) -> None:
        """`late`: the client lives and may write there still. Not `begun`: it never wrote there."""
        self._close(holder, reservation)
        self._reclaimed += 1
        if late:
            holder.late[reservation.number] = reservation.runs
        else:
            self._segments.end_lending(reservation.runs, rest=begun)
        self._returned.append(reservation)
        self._work.set()

    def _close(self, holder: Holder, reservation: Reservation) -> None:
        del holder.open[reservation.number]
        holder.pages -= reservation.pages
        self._open -= 1

    def _end(self, reservation: Reservation, version: int) -> None:
        self._segments.release(reservation.runs)
        self._versions.end(version)
        self._count(reservation.user, -reservation.pages)

    def _count(self, user: int, pages: int) -> None:
        self.pages += pages
        self._blocks.space.reserved_pages = self.pages
        self._shares.add(RESERVED, user, pages * PAGE_SIZE)

    def _wake(self) -> None:
        self._released.set()
        self._released = trio.Event()

    async def run(self) -> None:
        """Take back what expired or was given up. Until cancelled."""
        while True:
            self._work = trio.Event()
            self._expire()
            if self._returned:
                with trio.CancelScope(shield=True):
                    await self._tombstone()
                continue
            with trio.move_on_at(self._expiries[0][0] if self._expiries else float("inf")):
                await self._work.wait()

    def _expire(self) -> None:
        while self._expiries and self._expiries[0][0] <= trio.current_time():
            _, holder, first, last = self._expiries.popleft()
            expired = [number for number in holder.open if first <= number <= last]
            if expired:
                log.warning("%d reservations of a native client were not committed within %d s: taken back",
                            len(expired), RESERVATION_MS // 1000)  # fmt: skip
            for number in expired:
                self._take_back(holder, holder.open[number], late=True)

    async def _tombstone(self) -> None:
        """Make scans step over what was returned. Every run by itself: a write of a dead client may still land on its
        first page, and must not hide the next."""
        returned, self._returned = self._returned, []
        queue = iter([run for reservation in returned for run in reservation.runs])

        async def work() -> None:
            for run in queue:
                await self._segments.tombstone([run])

        async with trio.open_nursery() as nursery:
            for _ in range(_TOMBSTONE_TASKS):
                nursery.start_soon(work)
        for reservation in returned:
            self._end(reservation, reservation.inode.version)
        self._wake()

    async def close(self) -> None:
        """Take everything back. Afterwards no segment has a client's run in flight."""
        for holder in list(self._holders):
            self.take_back_all(holder)
        while self.pages:
            await self._released.wait()

    def statistics(self) -> ReservationStatistics:
        return ReservationStatistics(
            self._open, self.pages * PAGE_SIZE, self._committed, self._superseded, self._reclaimed
        )


def _extents(runs: Sequence[Run], header_pages: int) -> tuple[Extent, ...]:
    """Where the data lies: behind the block header in the first run, behind an extent header in the others. A single
    run needs none to say so."""
    if len(runs) == 1:
        return ()
    extents: list[Extent] = []
    file_page, overhead = 0, header_pages
    for run in runs:
        count = run.page_count - overhead
        extents.append(Extent(run.generation, run.segment, run.page + overhead, count, file_page))
        file_page, overhead = file_page + count, 1
    return tuple(extents)
