"""Reservations: places that native clients write blocks to themselves, and their committed blocks.

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

The table and the rules are C's (native/src/content/reserve.c, commit.c), one call for 64 blocks; what needs no wait its
thread does alone (native/src/frames/answer.c). Here are the waits: for places that no open segment has, for others'
pages, for expiry, and until a commit is safe.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from errno import EIO, ENOTCONN

import trio

from kvfs.errors import KvfsError, NoSpaceError
from kvfs.frames import Commit, HolderPages, Next, Reserve, RunFields, Shards
from kvfs.lent import Part
from kvfs.names import NamesError
from kvfs.plane import Run
from kvfs.pool.format import Stream
from kvfs.record import Inode
from kvfs.store.blocks import Blocks
from kvfs.store.segments import LATE_WRITES_S, SPACE_TIMEOUT_S
from kvfs.store.shares import RESERVED, ROOT, name_of
from kvfs.types import PAGE_SIZE, InodeNumber, SegmentIndex
from kvfs.units import told_size

log = logging.getLogger(__name__)

RESERVATION_MS = 30_000
# A client that may still write where its reservations have expired keeps those segments from all others. So long it
# may; then it is hung up on. A write that lands after the rest that follows is a miss to whoever reads there.
LATE_HELD_S = 60.0
# Reserved at one time: of the pool, so that eviction always has something to go for, and in number.
_SHARE = 4
_OPEN_MAX = 65_536
# A commit waits this long for earlier reservations of its segments to be settled, then for the index instead.
_SETTLE_S = 0.02
_TOMBSTONE_TASKS = 8
# Reservations that are buried in one round: others' work is done before the next.
_BURIED_MAX = 1024
# Items of a COMMIT that C leaves, between two looks at other work.
_YIELD_EVERY = 64


def _nobody() -> None:
    """Nobody is to be hung up on."""


@dataclass(slots=True, eq=False)
class Holder:
    """One client. Only Reservations changes it."""

    told: HolderPages
    user: int
    hang_up: Callable[[], None]
    # Of told.pages, late_pages, rested_pages: the shares and the space know of them.
    charged: int = 0
    late: int = 0
    rested: int = 0
    left: bool = False
    hung_up: bool = False


@dataclass(frozen=True, slots=True)
class ReservationStatistics:
    open: int
    reserved_bytes: int
    committed: int
    superseded: int
    reclaimed: int


# Brings into memory what a block needs for its name, and returns who has that. KvfsError: it cannot have it.
MakeWay = Callable[[Inode], Inode | None]
# Called between two parts of a request's work: that of others is done meanwhile.
Pause = Callable[[], Awaitable[None]]


class Reservations:
    """All native clients' reservations of a mounted pool. `run()` must run."""

    def __init__(self, blocks: Blocks) -> None:
        self._segments, self._index, self._blocks, self._shares = blocks.segments, blocks.index, blocks, blocks.shares
        self._frames, self.names = blocks.plane.frames, blocks.names
        self.pages = 0
        # Pages of clients that are gone, where late writes may land: until when, whose, how many. They count as
        # reserved, for their segments are nobody else's.
        self._resting: deque[tuple[float, int, int]] = deque()
        self._frames.limit(len(self._segments.own) * self._segments.area // _SHARE, _OPEN_MAX)
        # Those that are gone as long as something of theirs is not buried.
        self._holders: dict[HolderPages, Holder] = {}
        self._work = trio.Event()
        self._idle = False  # run() knows of nothing that will expire
        self._released = trio.Event()
        self._gains = 0  # as of the last wake-up

    # ---- clients ----

    def join(self, user: int = ROOT, hang_up: Callable[[], None] = _nobody) -> Holder:
        """`hang_up`: has take_back_all() called soon."""
        holder = Holder(self._frames.join(user), user, hang_up)
        self._holders[holder.told] = holder
        return holder

    def take_back_all(self, holder: Holder) -> None:
        """The client is gone: everything it has not committed is taken back."""
        if not holder.left:
            holder.left = True
            self._frames.leave(holder.told)
            self._look(holder)
            self._work.set()

    def look(self) -> None:
        """Take in what the data plane did for clients by itself, until now: it goes on meanwhile, and says so again."""
        for told in self._frames.changed(len(self._holders)):
            self._look(self._holders[told])
        self._work.set()

    def _look(self, holder: Holder) -> None:
        """After each call for one of this client's frames, with no await between: take in what it did."""
        with self.names:
            self._segments.take_notes()
            self._count(holder)
        self._wake_for_gains()

    def _count(self, holder: Holder) -> None:
        told = holder.told
        change, late, rested = (
            told.pages - holder.charged, told.late_pages - holder.late, told.rested_pages - holder.rested
        )  # fmt: skip
        holder.charged, holder.late, holder.rested = told.pages, told.late_pages, told.rested_pages
        if rested:
            self._resting.append((trio.current_time() + LATE_WRITES_S, holder.user, rested))
        if change or late or rested:
            self.pages += change
            self._reserved()
            self._shares.add(RESERVED, holder.user, (change + late + rested) * PAGE_SIZE)
        if change < 0 or late < 0:
            self._wake()
        if holder.left and not told.count and told in self._holders:
            del self._holders[told]
            self._frames.free(told)

    def _reserved(self) -> None:
        totals = self._frames.totals()
        self._blocks.space.reserved_pages = totals.pages + totals.resting

    def _end_rests(self) -> None:
        """Late writes of clients that are gone cannot land any more where these were."""
        ended = False
        while self._resting and self._resting[0][0] <= trio.current_time():
            _, user, pages = self._resting.popleft()
            self._frames.rested(user, pages)
            self._reserved()
            self._shares.add(RESERVED, user, -pages * PAGE_SIZE)
            ended = True
        if ended:
            self._wake()

    @staticmethod
    def _check(holder: Holder) -> None:
        if holder.left:
            error = KvfsError("the client is gone")
            error.errno = ENOTCONN
            raise error

    # ---- reserving ----

    async def reserve(
        self,
        holder: Holder,
        items: Part,
        count: int,
        shards: Shards,
        uid: int,
        timeout_s: float = float("inf"),
        flags: int = 0,
        pause: Pause = trio.lowlevel.checkpoint,
    ) -> bytes:
        """The answer to a RESERVE, whose items were checked with these flags: a place for each, or -errno: -EFBIG,
        -ENOSPC.

        An item that finds no place within timeout_s, and a minute at most, gets none. The error is -EIO where only a
        commit of the index keeps room back.
        """
        self._check(holder)
        with self._frames.reserve(holder.told, items, count, shards, uid, flags) as frame:
            await self.reserve_on(holder, frame, Next.MORE, timeout_s, pause)
            return frame.answer()

    async def reserve_on(
        self, holder: Holder, frame: Reserve, found: Next | None, timeout_s: float, pause: Pause
    ) -> None:
        """Go on with a RESERVE until it has its answer. found: what it has said last."""
        begun = trio.current_time()
        with trio.move_on_after(min(timeout_s, SPACE_TIMEOUT_S)) as patience, suppress(NoSpaceError, NamesError):
            await self._reserve(holder, frame, found, pause)
        if patience.cancelled_caught:
            behind = self._segments.waits_for_commit
            log.warning("a put found no room in %.0f s: %s", trio.current_time() - begun,
                        "emptied segments wait for a commit of the index" if behind else "others have reserved it"
                        if self._segments.free_count() else "no segment is free")  # fmt: skip
            frame.told.refusal = -EIO if behind else 0
        frame.finish(_nanoseconds(trio.current_time()) + RESERVATION_MS * 1_000_000)
        self._look(holder)
        if self._idle:
            self._work.set()

    async def _reserve(self, holder: Holder, frame: Reserve, found: Next | None, pause: Pause) -> None:
        # There may be room since another thread found none: C looks again.
        told, first = frame.told, found not in (Next.MORE, Next.ROOM)
        self._shares.notify()
        while True:
            self._check(holder)
            released = self._released  # before C looks: what is released behind that look ends the wait
            found = found if first else frame.go()
            first = False
            self._look(holder)
            if found == Next.MORE:
                await pause()
            elif found == Next.ROOM:
                await released.wait()
                await pause()
            elif found == Next.PLACE:
                await self._place(holder, frame)
                await pause()
            elif found == Next.NAMES:
                self._index.keep_above(InodeNumber(told.parent))
                told.loaded = 1
            else:
                return

    async def _place(self, holder: Holder, frame: Reserve) -> None:
        """Places that the open segment does not have: in the next one, or in several."""
        try:
            head = self._segments.head(Stream.CLIENT)
            runs = await self._segments.allocate(head, frame.told.header_pages, frame.told.data_pages)
        except NoSpaceError:
            raise
        except KvfsError as error:
            frame.no_place(-(error.errno or EIO))
        else:
            frame.place([(run.generation, run.segment, run.page, run.page_count) for run in runs])
        self._look(holder)

    # ---- committing ----

    async def commit(
        self, holder: Holder, items: Part, count: int, make_way: MakeWay, timeout_s: float = float("inf"),
        pause: Pause = trio.lowlevel.checkpoint,
    ) -> tuple[bytes, bool]:  # fmt: skip
        """The answers to a COMMIT, whose items were checked: 0 for entered or superseded blocks. And whether hosts may
        know what had a name before.

        When this returns a crash cannot lose a block that it said 0 for. timeout_s: for the wait for room in the table.
        """
        with self._frames.commit(holder.told, items, count) as frame:
            replaced = await self.commit_on(holder, frame, Next.MORE, make_way, timeout_s, pause)
            return frame.answers(), replaced

    async def commit_on(
        self, holder: Holder, frame: Commit, found: Next, make_way: MakeWay, timeout_s: float, pause: Pause
    ) -> bool:
        """Go on with a COMMIT until its answers are true. found: what it has said last; take_in() was called then.
        Returns whether hosts may know what had a name before."""
        until = trio.current_time() + timeout_s
        replaced, full, left = False, False, 0
        # What was said to another thread may not be true any more: C says it again.
        found = Next.MORE if found == Next.NAMES else found
        while found != Next.DONE:
            self._check(holder)
            # One step: else another thread may end the item by another COMMIT, and its record is gone.
            with self.names:
                found = frame.go()
                replaced |= self.take_in(holder, frame)
                enters = found == Next.NAMES and (full or self._blocks.table_room.left() > 0)
                if enters:
                    replaced |= self._enter(holder, frame, make_way)
            left += enters
            if found == Next.NAMES and not enters:
                full = not await self._has_room(until - trio.current_time())
            if found == Next.MORE or left == _YIELD_EVERY:
                left = 0
                await pause()
        await self._secure([_run(run) for run in frame.runs()], bool(frame.told.durable))
        return replaced

    async def _has_room(self, timeout_s: float) -> bool:
        """Wait for room in the block table."""
        try:
            await self._blocks.table_room.wait(timeout_s)
        except NoSpaceError as error:
            log.warning("native put: %s", error)
            return False
        return True

    def take_in(self, holder: Holder, frame: Commit) -> bool:
        """As _look(), after each call for this frame, another thread's too. Whether hosts may know what had a name
        before."""
        self._look(holder)
        for inode in frame.lingering():
            self._blocks.linger(InodeNumber(inode))
        replaced = bool(frame.told.replaced)
        frame.told.replaced = 0
        if replaced:
            self._blocks.tell_hosts()
        if frame.told.taken_back:
            frame.told.taken_back = 0
            self._work.set()
        return replaced

    def _enter(self, holder: Holder, frame: Commit, make_way: MakeWay) -> bool:
        """An item that C has left in this step: a name is not in memory, a device is away, or the block lies below a
        pin."""
        block, error, replaced = Inode.unpack(frame.block()), 0, None
        try:
            replaced = make_way(block)
        except KvfsError as failure:
            error = -(failure.errno or EIO)
        # A hidden block that has the name goes once it has lost that, for the table may refuse the new one.
        hidden = frame.told.hidden = 0 if error else self._index.hidden_holder(block.parent, block.name)
        if frame.item(error):
            if hidden:
                self._blocks.bringing.name_lost(hidden)
            self._blocks.entered(block, replaced)
        return self.take_in(holder, frame)

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

    def _wake(self) -> None:
        self._released.set()
        self._released = trio.Event()

    def _wake_for_gains(self) -> None:
        """Another thread may reserve more than it has ended, before and after: what holders have now does not tell."""
        gains = self._frames.gains()
        if gains != self._gains:
            self._gains = gains
            self._wake()

    async def run(self) -> None:
        """Take back what expired or was given up. Until cancelled."""
        while True:
            self._work = trio.Event()
            self._end_rests()
            until = await self._expire()
            with trio.CancelScope(shield=True):
                buried = await self._bury()
            if buried:
                continue
            self._idle = until is None
            rests = self._resting[0][0] if self._resting else float("inf")
            with trio.move_on_at(min(rests, self._end_late(), float("inf") if until is None else until / 1e9)):
                await self._work.wait()
            self._idle = False

    async def _expire(self) -> int | None:
        now, taken_back = _nanoseconds(trio.current_time()), 0
        while True:
            expired, until = self._frames.expire(now)
            taken_back += expired
            if until is None or until > now:
                break
            await trio.lowlevel.checkpoint()
        if taken_back:
            log.warning("%d reservations of native clients were not committed within %d s: taken back",
                        taken_back, RESERVATION_MS // 1000)  # fmt: skip
            self._wake_for_gains()
        return until

    def _end_late(self) -> float:
        """Hang up on clients that keep what expired for too long. Returns when to look again."""
        again = float("inf")
        for holder in self._holders.values():
            since = self._frames.late_since(holder.told) if holder.late and not holder.hung_up else None
            if since is None:
                continue
            until = since / 1e9 + LATE_HELD_S
            if until > trio.current_time():
                again = min(again, until)
                continue
            log.warning("a native client of %s is hung up on: for %.0f s it has not said that no write of its can land "
                        "any more where its reservations expired, %s", name_of(holder.user), LATE_HELD_S,
                        told_size(holder.late * PAGE_SIZE))  # fmt: skip
            holder.hung_up = True
            holder.hang_up()
        return again

    async def _bury(self) -> bool:
        """Make scans step over what was returned. Every run by itself: a write of a dead client may still land on its
        first page, and must not hide the next."""
        numbers: list[int] = []
        runs: list[Run] = []
        while len(numbers) < _BURIED_MAX and (returned := self._frames.returned()) is not None:
            numbers.append(returned[0])
            runs += [_run(run) for run in returned[1]]
        if not numbers:
            return False
        queue = iter(runs)

        async def work() -> None:
            for run in queue:
                await self._segments.tombstone([run])

        async with trio.open_nursery() as nursery:
            for _ in range(_TOMBSTONE_TASKS):
                nursery.start_soon(work)
        for number in numbers:
            self._frames.buried(number)
        for holder in list(self._holders.values()):
            self._look(holder)
        return True

    async def close(self) -> None:
        """Take everything back. Afterwards no segment has a client's run in flight."""
        for holder in list(self._holders.values()):
            self.take_back_all(holder)
        while self.pages:
            await self._released.wait()

    def statistics(self) -> ReservationStatistics:
        totals = self._frames.totals()
        return ReservationStatistics(
            totals.open, totals.pages * PAGE_SIZE, totals.committed, totals.superseded, totals.reclaimed
        )


def _run(fields: RunFields) -> Run:
    generation, segment, page, page_count = fields
    return Run(generation, SegmentIndex(segment), page, page_count)


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
