"""Segments: their states, where the next block goes, their summaries. Knows extents and records, but no names or files.

A segment is FREE, then OPEN (its header is durable, blocks are appended), then CLOSED, then EVICTING, then FREE again.
Its generation changes when it is opened, and only then. A freed segment rests until the summaries of the others have
what was removed or renamed before a block last came to it or was renamed there. Otherwise an older block under that
block's name could come back by them (I16). Its own is written as it is opened, or in its turn if that comes first.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import trio

from kvfs.errors import DeviceError, FileTooLargeError, FormatError, KvfsError, NoSpaceError
from kvfs.index.interface import Index
from kvfs.names import CLIENT_HEADS, HEAD_NEW, Note, step
from kvfs.plane import Plane, Run
from kvfs.pool.config import PoolConfig
from kvfs.pool.format import (
    SegmentHeader,
    Stream,
    Summary,
    pack_extent_header,
    pack_segment_header,
    summary_age,
)
from kvfs.pool.geometry import Geometry
from kvfs.record import Inode
from kvfs.store.eviction import TICKS_PER_POOL
from kvfs.store.segment import Counter, Head, Segment, SegmentStatistics, State, usage
from kvfs.store.segment_reader import SegmentReader
from kvfs.store.summaries import Summaries
from kvfs.types import PAGE_SIZE, SLOT_STEP, SegmentIndex
from kvfs.units import counted

log = logging.getLogger(__name__)

# A writer that found no free segment waits this long for the evictor.
SPACE_TIMEOUT_S = 60.0
_SPACE_POLL_S = 0.5
_OPEN_TRIES = 8
# A tail shorter than this is not worth an extent of its own.
_PIECE_PAGES_MIN = 16
_SUMMARY_WRITERS = 4
# Append points of native clients: at most so many, and one in so many segments that can be written.
_SEGMENTS_A_HEAD = 48
# Segments opened ahead, the data plane's supply: at most so many, and one in so many.
_READY_MAX = 32
_READY_SHARE = 33
# So many freed at once are those of a device.
_ROTATE = 16
# After this time, I/O that a dead client's process had under way has landed or failed.
LATE_WRITES_S = 10.0
# After a start: a client of the daemon before goes on writing what it reserved, for half its time at most.
_LENT_REST_S = 20.0


def _log_impossible(segment: int, message: str) -> None:
    log.warning("%s", message)


class Segments:
    """All segments of a pool. One trio thread."""

    def __init__(
        self, config: PoolConfig, members: Sequence[tuple[tuple[int, int], ...]], plane: Plane, index: Index,
        epoch: int, on_impossible: Callable[[int, str], None] | None = None, slot: int = 0,
    ) -> None:  # fmt: skip
        """`slot`: this node's, in a pod. `on_impossible`: called for structures under a valid checksum that no kvfs can
        have written; by default a warning is logged."""
        self.config = config
        self.geometry: Geometry = config.geometry
        self.members = members
        # Pages of a segment that runs may take.
        self.area = config.geometry.end_page - 1
        self.names = plane.names
        self._tick_pages = max(1, len(config.segments_of(slot)) * self.area // TICKS_PER_POOL)
        places = self.names.places(len(members), config.geometry.end_page, self._tick_pages)
        self.all = [Segment(SegmentIndex(i), place=place) for i, place in enumerate(places)]
        # Those of this node: in a pod no other is ever opened, written or judged here.
        self.own = [self.all[i] for i in config.segments_of(slot)]
        for segment in self.all:
            segment.foreign = True
        for segment in self.own:
            segment.foreign = False
        self.epoch, self.slot = epoch, slot
        # Segments that can be written.
        self.usable = len(self.own)
        self.on_impossible = on_impossible or _log_impossible
        self.reader = SegmentReader(config, members, plane, epoch, self.on_impossible)
        # Set by the evictor: nothing can be freed now.
        self.exhausted = False
        # How many segments became free, ever.
        self.freed = 0
        self.need_space = trio.Event()
        self.need_flush = trio.Event()
        # One of the segments opened ahead was taken, or there may be room for one.
        self.ready_taken = trio.Event()
        self._plane = plane
        self._index = index
        self._summaries = Summaries(config, index, epoch)
        step = 1 if config.pod is None else SLOT_STEP
        self._generations = Counter(epoch, slot, step)
        self._sequences = Counter(epoch, slot, step)
        self._free: deque[SegmentIndex] = deque()
        # Free, and avoided.
        self._aside: set[SegmentIndex] = set()
        self._lost: set[SegmentIndex] = set()
        self._resting: set[SegmentIndex] = set()
        self._opening: dict[SegmentIndex, trio.Event] = {}
        # Lent to native clients, or late writes may land there until this (trio) time.
        self._late: dict[SegmentIndex, float] = {}
        self._ready: deque[Segment] = deque()
        # A commit of native clients waits for what others were given before in its segments: so they have several.
        self._led = [
            Head(Stream.CLIENT if i else Stream.NEW, partial(self._lead, HEAD_NEW + i)) for i in range(1 + CLIENT_HEADS)
        ]
        self._heads = {s: [Head(s, lambda *_: None)] for s in Stream}
        self._heads |= {Stream.NEW: self._led[:1], Stream.CLIENT: self._led[1:]}
        # Runs of the data plane that were not written.
        self._failed: list[Run] = []
        self._flush_lock = trio.Lock()
        self._freed = trio.Event()
        self._dirty: set[SegmentIndex] = set()
        # The turn of all summaries that comes next, and the last one that is over.
        self._turn, self._turns_done = 1, 0
        # Told when the runs before theirs are released; by segment.
        self._unsettled: dict[int, list[tuple[Sequence[Run], Callable[[], None]]]] = {}
        self._changed: set[SegmentIndex] = set()
        self._summaries_written = 0
        self._write_errors = 0
        # How often a writer found no free segment.
        self.waits = 0
        self._told_tick = 0
        self._stopped = False
        self._open_error = KvfsError("none")

    # ---- states ----

    @property
    def reserve(self) -> int:
        """Left to carried-over blocks, so that eviction itself never waits for a free segment."""
        return min(3, max(1, self.usable // 8))

    def load(self, states: Iterable[tuple[SegmentIndex, bytes]]) -> None:
        """Take the states from the index. FormatError."""
        for number, data in states:
            if number >= len(self.all):
                raise FormatError(f"index: segment {number} of a pool with {len(self.all)}")
            if self.all[number].foreign:
                raise FormatError(f"index: segment {number} is another node's, not of slot {self.slot}")
            self.all[number].unpack_into(data)

    def start(self) -> None:
        """States are known: free segments may be handed out. Call once."""
        now = trio.current_time()
        # From the oldest on: the longest rest for late writes of whoever had the pool before.
        for segment in sorted(self.own, key=lambda s: s.generation):
            assert segment.state in (State.FREE, State.CLOSED), segment
            if segment.late:
                self._late[segment.index] = now + _LENT_REST_S
                segment.late = False  # the next start need not wait for the same clients
                self._changed.add(segment.index)
            if segment.state == State.CLOSED and not segment.live_pages:
                self.free(segment)
            elif segment.state == State.FREE:
                if segment.dirty:
                    self._resting.add(segment.index)
                else:
                    self._add_free(segment.index)
            if segment.dirty:
                self._dirty.add(segment.index)
        self._rotate()
        self.names.client_heads(self._head_count())

    def _rotate(self) -> None:
        """Let free segments that come in turn lie on different devices: those of one that is new, or back, are many."""
        queues: dict[int, list[SegmentIndex]] = {}
        for number in self._free:
            queues.setdefault(self.members[number][0][0], []).append(number)
        order = [((i + 0.5) / len(queue), number) for queue in queues.values() for i, number in enumerate(queue)]
        self._free = deque(number for _, number in sorted(order))

    def free_count(self) -> int:
        """Free segments, resting ones included, unless for late writes: that can take long."""
        resting = sum(not self.all[number].avoided for number in self._resting)
        return len(self._free) + resting + len(self._ready) - self._late_count()

    def _add_free(self, number: SegmentIndex) -> None:
        if self.all[number].avoided:
            self._aside.add(number)
        else:
            self._free.append(number)

    @step
    def set_places(self, lost: set[SegmentIndex], avoided: set[SegmentIndex]) -> None:
        """Which segments lie on devices that are away, and which others are not to be written."""
        self.take_notes()
        self._lost = lost
        for segment in self.own:
            segment.lost = segment.index in lost
            segment.avoided = segment.lost or segment.index in avoided
        self.usable = sum(not segment.avoided for segment in self.own)
        self.names.client_heads(self._head_count())
        for number in list(self._free):
            if self.all[number].avoided:
                self._free.remove(number)
                self._aside.add(number)
        for number in list(self._aside):
            if not self.all[number].avoided:
                self._aside.discard(number)
                self._free.append(number)
        self._rotate()
        for segment in (*self._ready, *self._appended()):
            if segment.avoided:
                self.retire(segment)
        self.look_again()
        self.wake_waiters()

    @step
    def forget_life(self, segment: Segment, generation: int) -> None:
        """Its old content is not free: nothing counts, and it rests until a summary says so. `generation`: on the
        device."""
        segment.state, segment.held = State.CLOSED, 0
        segment.generation = max(segment.generation, generation)
        segment.next_page = self.geometry.end_page
        self._aside.discard(segment.index)
        self.free(segment)

    def _late_count(self) -> int:
        """Free segments that a native client may still write to."""
        now, count = trio.current_time(), 0
        for number, until in list(self._late.items()):
            segment = self.all[number]
            if segment.lent or until > now:
                count += segment.state == State.FREE and not segment.avoided
            else:
                del self._late[number]
                segment.late = False
                self._changed.add(number)
        return count

    @property
    def pages_written(self) -> int:
        return self.names.pages_written

    @property
    def tick(self) -> int:
        """The clock by which blocks age (eviction.py)."""
        return self.pages_written // self._tick_pages

    @property
    def tick_size(self) -> int:
        """Bytes that are stored in a tick of it."""
        return self._tick_pages * PAGE_SIZE

    # ---- what the data plane did ----

    @step
    def take_notes(self) -> None:
        """Take in the data plane's changes to segments since the last time."""
        led = False
        for number, notes in self.names.noted():
            segment, gone = self.all[number], bool(notes & Note.GONE)
            self._changed.add(segment.index)
            if segment.lent:
                self._late.setdefault(segment.index, 0.0)
            if notes & Note.RESTS:
                segment.late = True
                self._late[segment.index] = trio.current_time() + LATE_WRITES_S
            if notes & Note.LED:
                led = True
                self._ready.remove(segment)
                self.ready_taken.set()
                self.need_space.set()
            if notes & Note.LEFT:
                self._retire(segment)
            if notes & Note.RENAMED:
                self.renamed(segment, gone=gone)
            elif notes & Note.ENTERED:
                segment.batch, segment.turn = self._index.pending_batch, self._turn
            if notes & Note.DIRTY:
                self.mark_dirty(segment, gone=gone)
            if notes & Note.FAILED:
                self._failed += [
                    Run(run.generation, segment.index, run.page, run.page_count)
                    for run in self.names.failed(number, segment.generation)
                ]
            if notes & Note.SETTLED:
                self._look_at_settled(segment)
            if not segment.live_pages:
                self.free_if_empty(segment)
        for i, head in enumerate(self._led) if led else ():
            lead = self.names.lead(HEAD_NEW + i)
            # Of one that the data plane does not append to the segment is known here alone.
            if lead is not None:
                head.segment = self.all[lead]
                head.segment.stream = head.stream

    def take_failed(self) -> list[Run]:
        """Runs of the data plane that were not written, for tombstone() and release()."""
        failed, self._failed = self._failed, []
        return failed

    def _look_at_settled(self, segment: Segment) -> None:
        """Its first run in flight is another, or there is none."""
        for waiting, told in self._unsettled.pop(segment.index, ()):
            self.when_settled(waiting, told)
        if segment.closing and not segment.in_flight:
            self._close(segment)
        segment.place.awaited = int(segment.closing or segment.index in self._unsettled)

    @step
    def _hold(self, head: Head) -> None:
        """Nobody but the caller, who has the head's lock, appends to it. In one step: the segment that the data plane
        went on to last is the head's then."""
        self.take_notes()
        head.on_lead(None, True)

    def _lead(self, head: int, segment: Segment | None, held: bool) -> None:
        """The data plane appends to this segment, too."""
        self.names.head(head, *((None, 0) if segment is None else (segment.index, segment.generation)), held=held)

    def changed(self, segment: Segment) -> None:
        self._changed.add(segment.index)

    def save_changed(self) -> None:
        """Put the states that changed into the index, in the step that a commit begins with."""
        for number in self._changed:
            self._index.segment_put(number, self.all[number].pack())
        self._changed.clear()

    @step
    def account(self, before: Inode | None, after: Inode | None) -> None:
        """A block came, went or moved: live pages follow, and a segment without live pages becomes free."""
        if after is not None:
            for number, pages in usage(after).items():
                segment = self.all[number]
                segment.live_pages += pages
                segment.batch, segment.turn = self._index.pending_batch, self._turn
                self._changed.add(segment.index)
        if before is not None:
            for number, pages in usage(before).items():
                segment = self.all[number]
                segment.live_pages = max(0, segment.live_pages - pages)
                self._changed.add(segment.index)
                if not segment.live_pages:
                    self.free_if_empty(segment)

    def free_if_empty(self, segment: Segment) -> None:
        if segment.state == State.CLOSED and not segment.live_pages and not segment.held:
            self.free(segment)

    @step
    def free(self, segment: Segment) -> None:
        """Nothing in it is wanted. It can be opened again after the next flush_summaries()."""
        assert segment.state in (State.CLOSED, State.EVICTING), segment
        segment.state = State.FREE
        segment.live_pages = 0
        self.freed += 1
        if self._plane.pod is not None:
            self._plane.pod.life_ended(segment.index, segment.generation)
        self._resting.add(segment.index)
        self._changed.add(segment.index)
        self.mark_dirty(segment, gone=True)

    def mark_dirty(self, segment: Segment, *, gone: bool) -> None:
        """Its summary must be written again; `gone`: because something that it names is gone, or elsewhere."""
        if not segment.dirty:
            segment.dirty = True
            self._changed.add(segment.index)
        if gone:
            segment.copy_stale = True
        self._dirty.add(segment.index)

    @property
    def waits_for_commit(self) -> bool:
        """Freed segments are waiting for the index."""
        return any(self._waits(self.all[number]) for number in self._resting if not self.all[number].lost)

    def _waits(self, segment: Segment) -> bool:
        return segment.batch > self._index.durable_batch and not self._index.distrusted

    # ---- places for blocks ----

    def head(self, stream: Stream) -> Head:
        """Where to append what belongs together: of the stream's heads the one with least in flight."""

        def busy(head: Head) -> tuple[bool, int]:
            return head.lock.locked(), 0 if head.segment is None else head.segment.in_flight

        return min(self._heads[stream][: self._head_count()], key=busy)

    def _head_count(self) -> int:
        return max(1, self.usable // _SEGMENTS_A_HEAD)

    def _appended(self) -> list[Segment]:
        return [head.segment for heads in self._heads.values() for head in heads if head.segment is not None]

    async def allocate(self, head: Head, header_pages: int, data_pages: int) -> list[Run]:
        """Runs for a block (header_pages > 0) or a spill (0: each run begins with an extent header). NoSpaceError,
        FileTooLargeError.

        The caller hands every run back by release(), whatever happened.
        """
        overhead = header_pages or 1
        if overhead >= self.area:  # a file of very many pieces: the data plane bounds those of one
            raise FileTooLargeError(f"a header of {overhead} pages does not fit in a segment of {self.area}")
        run = self.allocate_now(head, overhead + data_pages)
        if run is not None:
            return [run]
        async with head.lock:
            runs: list[Run] = []
            self._hold(head)
            try:
                await self._allocate(head, overhead, data_pages, runs)
            except BaseException:
                self.release(runs)
                raise
            finally:
                if not head.lock.statistics().tasks_waiting:
                    head.on_lead(head.segment, False)
            return runs

    @step
    def allocate_now(self, head: Head, pages: int) -> Run | None:
        """One run in the segment that is open, for a block all of whose pages these are. Returns None if there is no
        room, or others wait for a segment. Almost always there is."""
        self.take_notes()
        segment = head.segment
        if segment is None or head.lock.locked() or segment.next_page + pages > self.geometry.end_page:
            return None
        return self._take(segment, pages)

    async def _allocate(self, head: Head, overhead: int, left: int, runs: list[Run]) -> None:
        while True:
            segment = head.segment
            if segment is None:
                segment = head.segment = await self._next(head.stream)
            # Nobody else appends to it: the lock is held, and the data plane was told.
            room = self.geometry.end_page - segment.next_page
            need = overhead + left
            if need <= room:
                runs.append(self._take(segment, need))
                return
            if (runs or self._spans(need, room)) and room >= overhead + _PIECE_PAGES_MIN:
                runs.append(self._take(segment, room))
                left -= room - overhead
                overhead = 1
            self.retire(segment)

    def _spans(self, need: int, room: int) -> bool:
        """A block goes into one segment unless that wastes too much of this one, or it is large anyway. As place_take()
        of the data plane has it."""
        return need > self.area // 4 or room > self.area // 16

    async def take_whole(self) -> Segment:
        """A segment for a slab, to itself: neither evicted nor written by anybody else until give_back(). NoSpaceError,
        DeviceError."""
        async with self.head(Stream.SLAB).lock:
            segment = await self._next(Stream.SLAB)
        segment.state, segment.next_page = State.CLOSED, self.geometry.end_page
        segment.held += 1
        with self.names:
            segment.live_pages += self.area
        # There is no block header in it for a scan to look for.
        self.mark_dirty(segment, gone=False)
        self._changed.add(segment.index)
        return segment

    @step
    def give_back(self, segment: Segment, generation: int) -> None:
        """Free it: its slab is gone. Blocks may lie there by now."""
        if segment.state != State.CLOSED or segment.generation != generation or not segment.held:
            return  # its device was away, or another's: it has a new life
        segment.held -= 1
        segment.live_pages = max(0, segment.live_pages - self.area)
        self._changed.add(segment.index)
        self.free_if_empty(segment)

    def runs_bound(self, pages: int) -> int:
        """How many runs a block of that many pages gets at most."""
        return 2 + pages // max(1, self.area - 1)

    def _take(self, segment: Segment, pages: int) -> Run:
        run = Run(segment.generation, segment.index, self.names.take(segment.index, pages), pages)
        if (tick := self.tick) != self._told_tick:
            self._told_tick = tick
            self._plane.uses.tick(tick)
        self._changed.add(segment.index)
        return run

    def release(self, runs: Iterable[Run]) -> None:
        """The runs' blocks are in the index, or never will be."""
        for run in runs:
            segment = self.all[run.segment]
            self.names.release(run.segment, run.page)
            self._changed.add(segment.index)
            # Only what was the first in flight can have kept others from being settled.
            if segment.place.awaited and run.page < (
                segment.covered_page() if segment.in_flight else self.geometry.end_page
            ):
                self._look_at_settled(segment)

    def is_settled(self, runs: Iterable[Run]) -> bool:
        """Whether settle() would return at once."""
        return all(not self._has_before(run) for run in runs)

    def _has_before(self, run: Run) -> bool:
        segment = self.all[run.segment]
        return segment.generation == run.generation and segment.in_flight > 0 and segment.covered_page() < run.page

    @step
    def when_settled(self, runs: Sequence[Run], told: Callable[[], None]) -> None:
        """Call `told`, perhaps now, when every run before these in their segments has been released.

        A scan after a crash walks headers from one to the next and ends at the first that is torn. So a block is
        acknowledged only when nothing before it can be torn (I13). Writes before it began before it and have deadlines.
        """
        for run in runs:
            if self._has_before(run):
                self._unsettled.setdefault(run.segment, []).append((runs, told))
                self.all[run.segment].place.awaited = 1
                return
        told()

    async def settle(self, runs: Sequence[Run]) -> None:
        """As when_settled; returns then."""
        settled = trio.Event()
        self.when_settled(runs, settled.set)
        await settled.wait()

    async def tombstone(self, runs: Iterable[Run]) -> None:
        """Writes to these runs failed: put something there that a scan can step over, and append nothing behind it."""
        for run in runs:
            self.retire(self.all[run.segment])
            try:
                await self._plane.store_write(run.segment, run.page, pack_extent_header(self.config, self.epoch, run))
            except KvfsError as error:
                log.warning("segment %d: page %d stays torn: %s", run.segment, run.page, error)

    @step
    def retire(self, segment: Segment) -> None:
        """Retire it: nothing is appended, and it closes when its last run does."""
        self.take_notes()
        if segment in self._ready:
            self._ready.remove(segment)
            self.names.withdraw(segment.index)
        for heads in self._heads.values():
            for head in heads:
                if head.segment is segment:
                    head.segment = None
                    head.on_lead(None, head.lock.locked())
        self._retire(segment)

    def _retire(self, segment: Segment) -> None:
        if segment.state == State.OPEN and not segment.closing:
            segment.closing = True
            segment.place.awaited = 1
            if not segment.in_flight:
                self._close(segment)

    def _close(self, segment: Segment) -> None:
        segment.closing = False
        segment.state = State.CLOSED
        self.mark_dirty(segment, gone=False)
        self._changed.add(segment.index)
        self.free_if_empty(segment)

    async def _next(self, stream: Stream) -> Segment:
        """A segment with a durable header, OPEN. Waits for the evictor."""
        deadline = trio.current_time() + SPACE_TIMEOUT_S
        failed = 0
        while True:
            if self._plane.abandoned is not None:
                raise DeviceError(f"no segment can be opened: {self._plane.abandoned}")
            if stream not in (Stream.CARRIED, Stream.SLAB) and (segment := self._take_ready()) is not None:
                segment.stream = stream
                return segment
            picked = self._pick(0 if stream == Stream.CARRIED else self.reserve)
            if picked is None:
                await self._wait_for_space(stream, deadline)
            elif await self._format(picked, stream):
                return picked
            else:
                failed += 1
                if failed == _OPEN_TRIES:
                    failure = DeviceError(f"not to be opened: {counted(failed, 'segment')}: {self._open_error}")
                    failure.errno = self._open_error.errno  # ENOSPC where a disk under file-backed devices is full
                    raise failure

    @step
    def _take_ready(self) -> Segment | None:
        self.take_notes()
        if not self._ready:
            return None
        segment = self._ready.popleft()
        self.names.withdraw(segment.index)
        self.ready_taken.set()
        self.need_space.set()
        return segment

    async def make_room(self, head: Head, pages: int) -> None:
        """Let the data plane append a block of that many pages, which may go on in a segment behind the head's.
        NoSpaceError, DeviceError."""
        async with head.lock:
            self._hold(head)
            try:
                segment = head.segment
                room = 0 if segment is None else self.geometry.end_page - segment.next_page
                if segment is not None and room < pages and not (self._spans(pages, room) and room > _PIECE_PAGES_MIN):
                    self.retire(segment)
                if head.segment is None:
                    head.segment = await self._next(head.stream)
                elif room < pages and not self._ready:
                    self._supply(await self._next(head.stream))
            finally:
                if not head.lock.statistics().tasks_waiting:
                    head.on_lead(head.segment, False)

    async def prepare(self) -> None:
        """Keep segments open ahead, so that a writer at the end of one does not wait for a header."""
        while len(self._ready) < min(_READY_MAX, max(1, self.usable // _READY_SHARE)):
            segment = self._pick(self.reserve)
            if segment is None or not await self._format(segment, Stream.NEW):
                return
            self._supply(segment)
            # A writer may have found nothing while this one was being opened.
            self._freed.set()
            self._freed = trio.Event()

    def _supply(self, segment: Segment) -> None:
        """The data plane may go on to this segment."""
        with self.names:
            self._ready.append(segment)
            self.names.supply(segment.index, segment.generation)
        if self._stopped:
            self.retire_open()

    @step
    def _pick(self, keep: int) -> Segment | None:
        """Take a free segment whose device I/O has drained, clients' late writes included, leaving `keep` of them."""
        self.take_notes()  # which have to rest
        if len(self._free) - self._late_count() <= keep or self._stopped:
            return None
        for _ in range(len(self._free)):
            number = self._free.popleft()
            segment = self.all[number]
            if number not in self._late and not segment.writing and self._plane.segment_busy(number) == 0:
                return segment
            self._free.append(number)
        return None

    async def _format(self, segment: Segment, stream: Stream) -> bool:
        """Give it a new generation; write its header, and a summary that knows no block. False if that failed: then it
        rests again, with its former generation."""
        assert segment.state == State.FREE and not segment.in_flight and not segment.live_pages
        before = segment.generation, segment.sequence, segment.slot
        segment.state = State.OPEN
        # A turn of summaries waits for the end of this: until then the device may have those of the former life.
        opened = self._opening[segment.index] = trio.Event()
        segment.generation, segment.sequence, segment.slot = (
            self._generations.next(), self._sequences.next(), 1 - segment.slot,
        )  # fmt: skip
        segment.stream, segment.next_page = stream, 1
        segment.dirty = segment.copy_stale = segment.summarized = segment.closing = False
        self._dirty.discard(segment.index)
        assert not segment.foreign, segment
        try:
            await self._plane.store_write_pages(segment.index, self._first_pages(segment))
        except BaseException as error:
            self._write_errors += 1
            # The header may still land: no generation is used again, and nothing of this one is in use.
            segment.generation, segment.sequence, segment.slot = before
            segment.state = State.FREE
            self._resting.add(segment.index)
            self._changed.add(segment.index)
            self.mark_dirty(segment, gone=True)
            if not isinstance(error, KvfsError):
                raise
            self._open_error = error
            log.warning("segment %d: cannot be opened: %s", segment.index, error)
            return False
        finally:
            del self._opening[segment.index]
            opened.set()
        self._changed.add(segment.index)
        if segment.avoided:  # its device went while the header was written, perhaps to another
            self._open_error = DeviceError("its device went away meanwhile")
            self._retire(segment)
            return False
        return True

    def _first_pages(self, segment: Segment) -> dict[int, bytes]:
        """The pages that begin its life. The summary is for a header that gets damaged: the former life is over."""
        number, generation, stream = segment.index, segment.generation, Stream(segment.stream)
        header = SegmentHeader(generation, self.epoch, number, stream, self.members[number], self.slot)
        summary = Summary(generation, segment.sequence, number, 0, 1, closed=False, entries=b"")
        return {
            0: pack_segment_header(self.config, header),
            self.geometry.summary_page(segment.slot): self._summaries.pack_small(summary),
        }

    async def _wait_for_space(self, stream: Stream, deadline: float) -> None:
        if not self.usable:
            raise DeviceError("every segment lies on a device that is away")
        # Those on devices that are away rest until they are back.
        self.waits += stream != Stream.CARRIED
        resting = bool(self._resting - self._lost)
        if resting:
            self.need_flush.set()
        self.need_space.set()
        if stream == Stream.CARRIED and not resting:
            raise NoSpaceError("no free segment to carry blocks over to")
        if self.exhausted and not resting and not self._late_count():
            raise NoSpaceError("everything left in the pool is pinned or open")
        # Now and then without being woken: a device may have drained meanwhile.
        with trio.move_on_after(_SPACE_POLL_S):
            await self._freed.wait()
        if trio.current_time() > deadline:
            if self.waits_for_commit:
                raise DeviceError(
                    f"no segment became free in {SPACE_TIMEOUT_S:.0f} s: {len(self._resting)} that were emptied wait "
                    "for a commit of the index"
                )
            raise NoSpaceError(f"no segment became free in {SPACE_TIMEOUT_S:.0f} s")

    def wake_waiters(self) -> None:
        """Something that writers wait for has changed: look again."""
        self._freed.set()
        self._freed = trio.Event()
        self.ready_taken.set()

    def look_again(self) -> None:
        """Something that eviction had to leave may go now."""
        self.exhausted = False
        for segment in self.own:
            segment.avoid_until = 0.0
        self.need_space.set()

    # ---- summaries ----

    def renamed(self, segment: Segment, *, gone: bool) -> None:
        """One of its blocks has another name or other attributes, or has lost its name: then it is `gone`."""
        segment.batch, segment.turn = self._index.pending_batch, self._turn
        self.mark_dirty(segment, gone=gone)
        # Before the first summary no slot has the old name.
        segment.copy_stale |= segment.summarized or segment.writing

    async def flush_summaries(self, *, all_dirty: bool = True) -> None:
        """Write the stale summaries, then release the segments freed before to be opened again.

        Without `all_dirty` none is written, and a freed segment's own summary goes with its next opening. But all have
        their turn where a block came to a freed segment, or was renamed there, since the last turn began. Such a block
        may have had the name of another that was removed or renamed since then. The other's summary still has that
        name.

        A freed segment has to wait for the index if a block in it was younger than the last commit. Such a block may
        have taken the name of an older one, and the index does not know yet that the older one is gone. Unless the
        index is distrusted: after a crash it is not asked.
        """
        async with self._flush_lock:
            self.take_notes()
            # Those on devices that are away stay dirty, and resting, until they are back.
            lost = self._lost
            resting = [number for number in self._resting - lost if not self._waits(self.all[number])]
            if not all_dirty and not resting:
                return
            if all_dirty or any(self.all[number].turn > self._turns_done for number in resting):
                await self._take_turn(self._dirty - lost)
            for number in resting:
                # Its device may have gone meanwhile.
                if not self.all[number].lost:
                    self._resting.discard(number)
                    self._add_free(number)
            if len(resting) >= _ROTATE:
                self._rotate()
            if resting:
                self.exhausted = False
                self.wake_waiters()

    async def _take_turn(self, due: set[SegmentIndex]) -> None:
        """Write these summaries. Those of segments that are being opened say nothing of a former life afterwards."""
        batch, turn = sorted(due), self._turn
        self._dirty.difference_update(batch)
        self._turn += 1
        if batch:
            queue = iter(batch)
            async with trio.open_nursery() as nursery:
                for _ in range(min(_SUMMARY_WRITERS, len(batch))):
                    nursery.start_soon(self._flush_some, queue)
        for opened in list(self._opening.values()):
            await opened.wait()
        self._turns_done = turn

    async def _flush_some(self, queue: Iterable[SegmentIndex]) -> None:
        for number in queue:
            segment = self.all[number]
            generation, gone = segment.generation, segment.copy_stale
            segment.writing = True
            try:
                await self._write_summary(segment)
            except KvfsError as error:
                self._write_errors += 1
                log.warning("segment %d: summary not written: %s", number, error)
                # Tried again with the next flush, unless it has a new life already.
                if segment.generation == generation:
                    self.mark_dirty(segment, gone=gone)
            finally:
                segment.writing = False
                self._changed.add(number)

    async def _write_summary(self, segment: Segment) -> None:
        if not segment.generation or (segment.state == State.OPEN and segment.next_page == 1):
            segment.dirty = segment.copy_stale = False
            return
        # The other slot's turn comes with the next flush if it names blocks that are gone. The mark is cleared first,
        # so that a change during this write counts for the next.
        again = segment.copy_stale and segment.dirty
        segment.dirty = segment.copy_stale = False
        generation, closed = segment.generation, segment.state != State.OPEN
        with self.names:  # the data plane appends meanwhile: no run may lie before the page that it says
            covered = self.geometry.end_page if segment.state == State.FREE else segment.covered_page()
        free = segment.state == State.FREE
        entries, count = (b"", 0) if free else await self._summaries.collect(segment.index)
        summary = Summary(
            generation, self._sequences.next(), segment.index, count, covered, closed, entries, compressed=False
        )
        data = await self._summaries.pack(summary)
        if segment.generation != generation:
            return
        slot = 1 - segment.slot
        await self._plane.store_write(segment.index, self.geometry.summary_page(slot), data)
        self._summaries_written += 1
        if segment.generation != generation:
            return
        segment.slot, segment.sequence, segment.summarized = slot, summary.sequence, True
        self._changed.add(segment.index)
        if again or (segment.state == State.OPEN and segment.in_flight and covered < segment.next_page):
            segment.copy_stale |= again
            self._dirty.add(segment.index)
            if not again:
                segment.dirty = True

    async def mark_overtaken(self) -> None:
        """After a crash: have the summaries written again that are newer than the index.

        They leave out what had gone by then, and the crash undid some of that: an eviction, a removal, a carry-over.
        """
        used = [segment.index for segment in self.own if segment.state != State.FREE and not segment.lost]
        for slot in (0, 1):
            async for number, page in self.reader.pages(used, self.geometry.summary_page(slot)):
                segment = self.all[number]
                if summary_age(page) > (segment.generation, segment.sequence):
                    self.mark_dirty(segment, gone=True)

    # ---- the end ----

    def runs_in_flight(self) -> bool:
        """Whether a block is on its way to a segment that is appended to, or was."""
        return any(segment.state == State.OPEN and segment.in_flight for segment in self.own)

    def stop(self) -> None:
        """Close what is open and open nothing more."""
        self._stopped = True
        self.retire_open()

    def retire_open(self) -> None:
        """Retire all open segments."""
        for segment in (*self._ready, *self._appended()):
            self.retire(segment)

    def statistics(self) -> SegmentStatistics:
        counts = dict.fromkeys(State, 0)
        live = lost = 0
        for segment in self.own:
            if segment.lost:
                lost += 1
            else:
                counts[segment.state] += 1
                live += segment.live_pages
        return SegmentStatistics(
            count=len(self.own), size=self.geometry.segment_size, free=counts[State.FREE], open=counts[State.OPEN],
            closed=counts[State.CLOSED], evicting=counts[State.EVICTING], live_bytes=live * PAGE_SIZE,
            capacity=(len(self.own) - lost) * self.area * PAGE_SIZE, summaries_written=self._summaries_written,
            summaries_too_large=self._summaries.too_large, write_errors=self._write_errors, lost=lost,
        )  # fmt: skip
