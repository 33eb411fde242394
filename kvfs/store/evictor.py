"""The evictor: frees whole segments, so that writers find one. What goes and what stays is eviction.py's to say.

A segment is evicted in this order: blocks that stay are copied to other segments and their records follow; the others
leave the block table, then the index; the hosts' caches are told once; then the segment is free. At no moment does a
name lead to a block that is not there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

import trio

from kvfs.errors import DeviceError, NoSpaceError
from kvfs.index.interface import Index
from kvfs.plane import Plane
from kvfs.store.eviction import BlockUse, Candidate, EvictionPolicy, Stream
from kvfs.store.format import FLAGS_OFFSET
from kvfs.store.groups import Group, Groups
from kvfs.store.pins import Pins
from kvfs.store.segments import Segment, Segments, State, usage
from kvfs.types import PAGE_SIZE, Inode, InodeFlags, InodeNumber

log = logging.getLogger(__name__)

_WRITTEN = 2  # plane.inode_is_open
_EVICT_BATCH = 256
_CARRY_TASKS = 8
# Bytes carried over because they were hit, of bytes written.
CARRY_SHARE = 0.10
# A segment of which eviction would keep more than this is left alone for a while: copying it frees next to nothing.
_KEEP_SHARE = 0.75
_AVOID_S = 5.0
_HOT_SAMPLE = 512
_HOT_AGE_S = 10.0
_PASSES = 6
_ORDER_S = 1.0
# Candidates a policy sees of each stream.
_OLDEST = 64
# The newest segments, one in so many, go only when no other can.
_SPARED = 4
# Everything left is pinned or open: said only after this long without a segment that could go.
_PATIENCE_S = 2.0


class BlockMover(Protocol):
    """What the evictor asks of the store."""

    async def carry(self, record: bytes) -> bool:
        """Copy a block to the carried-over stream. False if it is gone, or cannot be read any more."""
        ...

    def is_busy(self, inode: InodeNumber) -> bool:
        """It is being sealed, copied, or opened for writing right now."""
        ...

    def drop(self, inode: Inode) -> None:
        """The block left the block table: it leaves the index too."""
        ...


@dataclass(slots=True)
class EvictionCounters:
    segments: int = 0
    blocks: int = 0
    bytes: int = 0
    carried_blocks: int = 0
    carried_pages: int = 0


class Evictor:
    def __init__(
        self, segments: Segments, index: Index, plane: Plane, policy: EvictionPolicy, pins: Pins, groups: Groups,
        mover: BlockMover,
    ) -> None:
        self._segments, self._index, self._plane = segments, index, plane
        self._policy, self._pins, self._groups, self._mover = policy, pins, groups, mover
        self.counters = EvictionCounters()
        self._hot: dict[int, tuple[float, int]] = {}
        self._order: dict[Stream, list[tuple[Segment, int]]] = {}
        self._ordered_at = float("-inf")
        self._lock = trio.Lock()
        self._pages_at_start = segments.pages_written

    # Free segments, of which `reserve` are not for writers: below low the evictor works, up to high.

    @property
    def low(self) -> int:
        return self._segments.reserve + max(2, min(16, self._segments.usable // 50))

    @property
    def high(self) -> int:
        return self.low + max(1, min(16, self._segments.usable // 50))

    async def run(self, allowed: Callable[[], bool]) -> None:
        """Keep segments free, while `allowed`. Until cancelled."""
        stuck_since: float | None = None
        while True:
            with trio.move_on_after(0.5):
                await self._segments.need_space.wait()
            self._segments.need_space = trio.Event()
            if not allowed() or not self._segments.usable or self._segments.free_count() >= self.low:
                stuck_since = None
                self._segments.exhausted = False
                continue
            freed = await self.free_until(lambda: self._segments.free_count() >= self.high)
            if freed:
                stuck_since = None
                continue
            now = trio.current_time()
            stuck_since = now if stuck_since is None else stuck_since
            if now - stuck_since > _PATIENCE_S and not self._segments.exhausted:
                log.warning("nothing can be evicted: everything left is pinned or open")
                self._segments.exhausted = True
                self._segments.wake_waiters()
            await trio.sleep(0.1)

    async def free_until(self, enough: Callable[[], bool]) -> int:
        """Evict segments until enough() or none is left to evict; returns how many went."""
        freed = 0
        async with self._lock:
            while not enough():
                segment = await self._choose()
                if segment is None:
                    break
                if await self._evict(segment):
                    freed += 1
                else:
                    segment.avoid_until = trio.current_time() + _AVOID_S
                self._segments.need_flush.set()
                await trio.lowlevel.checkpoint()
        return freed

    async def drain(self, segment: Segment) -> bool:
        """Empty a segment for good: what is pinned, open or was hit since it was written is carried over, however much
        that is; the rest goes. False if there is no room for it."""
        async with self._lock:
            while segment.state == State.OPEN:
                await trio.sleep(0.01)
            return segment.state != State.CLOSED or segment.lost or await self._evict(segment, drain=True)

    # ---- choosing ----

    async def _choose(self) -> Segment | None:
        now = trio.current_time()
        closed = self._oldest(now)
        if not closed and self._ordered_at < now:
            self._ordered_at = float("-inf")
            closed = self._oldest(now)
        if not closed:
            self._ordered_at = float("-inf")
            closed = self._oldest(now, spare=False)
            self._ordered_at = float("-inf")
        shortlist = self._policy.shortlist(closed)
        weighed = []
        for candidate in shortlist:
            hot = await self._hot_pages(candidate.segment)
            weighed.append(Candidate(candidate.segment, candidate.stream, candidate.age, candidate.live_pages, hot))
        # Waiting above: some may have been freed meanwhile.
        weighed = [
            c for c in weighed
            if self._segments.all[c.segment].state == State.CLOSED and not self._segments.all[c.segment].avoided
        ]  # fmt: skip
        victim = self._policy.victim(weighed)
        return None if victim is None else self._segments.all[victim.segment]

    def _oldest(self, now: float, *, spare: bool = True) -> list[Candidate]:
        """The oldest closed segments of each stream, more of them than a policy weighs. `spare`: none of the newest.

        They are sorted once a second: to look at every segment for every victim took a fifth of the daemon's time.
        """
        if now - self._ordered_at >= _ORDER_S:
            closed = [s for s in self._segments.all if s.state == State.CLOSED]
            closed.sort(key=lambda s: s.generation)
            # A stream that few write to has no old ones, and its newest may be the emptiest of all: there lie files
            # that were closed a moment ago and are about to be renamed.
            if spare:
                del closed[len(closed) - len(closed) // _SPARED :]
            self._order = {stream: [(s, s.generation) for s in closed if s.stream == stream] for stream in Stream}
            self._ordered_at = now
        found: list[Candidate] = []
        for stream, order in self._order.items():
            # One that was freed and filled again since is not old any more, and perhaps of the other stream.
            may_go = (
                s for s, generation in order
                if s.generation == generation and s.state == State.CLOSED and not s.held and s.avoid_until <= now
                and not s.avoided
            )  # fmt: skip
            found += [Candidate(s.index, stream, s.generation, s.live_pages, 0) for s in islice(may_go, _OLDEST)]
        return found

    async def _hot_pages(self, number: int) -> int:
        """An estimate from a sample, some seconds old at most."""
        now = trio.current_time()
        known = self._hot.get(number)
        if known is not None and now - known[0] < _HOT_AGE_S:
            return known[1]
        segment = self._segments.all[number]
        inodes = self._index.segment_inodes(segment.index)
        step = max(1, len(inodes) // _HOT_SAMPLE)
        sample = inodes[::step]
        hits = self._plane.inode_hits(sample, clear=False)
        hot = segment.live_pages * sum(1 for h in hits if h) // max(1, len(sample))
        self._hot[number] = (now, hot)
        await trio.lowlevel.checkpoint()
        return hot

    # ---- evicting ----

    async def _evict(self, segment: Segment, *, drain: bool = False) -> bool:
        """Empty one segment and free it. False if too much of it must stay; then it is as it was."""
        assert segment.state == State.CLOSED, segment
        segment.state = State.EVICTING
        self._hot.pop(segment.index, None)
        removed = 0
        try:
            for turn in range(_PASSES):
                if segment.lost:
                    return False
                inodes = self._index.segment_inodes(segment.index)
                if not inodes:
                    break
                groups = await self._groups.of(inodes)
                await self._look_at(groups)
                plan = await self._plan(segment, inodes, groups, first=turn == 0, drain=drain)
                if plan is None:
                    return False
                must, hot = plan
                if not await self._carry_all(must):
                    return False
                # Those for which there is no room go: nothing would ever be freed if eviction waited for it.
                await self._carry_all(hot)
                await self._look_at(groups)
                removed += await self._remove(segment, inodes, groups)
            else:
                return False
            if segment.held:
                return False
            self._segments.free(segment)
            self.counters.segments += 1
            return True
        except NoSpaceError:
            # The reserve is used up: what was copied stays copied.
            return False
        finally:
            if removed:
                self._plane.notify_epoch()
            if segment.state == State.EVICTING:
                segment.state = State.CLOSED
                self._segments.changed(segment)
                self._segments.free_if_empty(segment)

    async def _look_at(self, groups: dict[InodeNumber, Group]) -> None:
        """Learn of each group what decides about all of it: whether one is in use, and the hits of the best."""
        looked = 0
        for group in set(groups.values()):
            group.held, group.hits = False, max(self._plane.inode_hits(group.inodes, clear=False))
            for number in group.inodes:
                record = self._index.raw(number)
                group.held = record is not None and (
                    bool(self._plane.inode_is_open(number)) or self._mover.is_busy(number) or self._pins.holds(record)
                )
                looked += 1
                if group.held:
                    break
                if looked % _EVICT_BATCH == 0:
                    await trio.lowlevel.checkpoint()

    async def _plan(
        self, segment: Segment, inodes: Sequence[InodeNumber], groups: dict[InodeNumber, Group], *, first: bool,
        drain: bool,
    ) -> tuple[list[bytes], list[bytes]] | None:
        """Records of the blocks that must be carried over, and of those that are worth it; None if the segment has to
        stay."""
        must: list[bytes] = []
        others: list[tuple[bytes, InodeNumber]] = []
        must_pages = 0
        for i, number in enumerate(inodes):
            if i % _EVICT_BATCH == _EVICT_BATCH - 1:
                await trio.lowlevel.checkpoint()
            record = self._index.raw(number)
            if record is None:
                continue
            state = self._plane.inode_is_open(number)
            if state == _WRITTEN or self._mover.is_busy(number):
                return None
            group = groups.get(number)
            if state or self._pins.holds(record) or (group is not None and group.held):
                must.append(record)
                must_pages += sum(usage(Inode.unpack(record)).values())
            elif first:
                others.append((record, number))
        if drain:
            hits = self._hits([number for _, number in others], groups, clear=False)
            return must + [record for (record, _), hit in zip(others, hits, strict=True) if hit], []
        if must_pages > _KEEP_SHARE * self._segments.area:
            return None
        return must, self._worth_keeping(others, groups) if first else []

    def _hits(self, numbers: Sequence[InodeNumber], groups: dict[InodeNumber, Group], *, clear: bool) -> list[int]:
        """The hits of each, or of the best in its group."""
        hits = self._plane.inode_hits(numbers, clear=clear)
        return [groups[n].hits if n in groups else h for n, h in zip(numbers, hits, strict=True)]

    def _worth_keeping(
        self, blocks: Sequence[tuple[bytes, InodeNumber]], groups: dict[InodeNumber, Group]
    ) -> list[bytes]:
        written = self._segments.pages_written - self._pages_at_start
        budget = int(written * CARRY_SHARE) - self.counters.carried_pages
        hits = self._hits([number for _, number in blocks], groups, clear=True)
        if budget <= 0 or not any(hits):
            return []
        uses = [
            BlockUse(sum(usage(Inode.unpack(record)).values()) if h else 0, h)
            for (record, _), h in zip(blocks, hits, strict=True)
        ]
        chosen = set(self._policy.carry(uses, budget))
        # With one of a group the others stay, also those that went beyond the budget: the next ones pay for them.
        kept_groups = {groups[blocks[i][1]] for i in chosen if blocks[i][1] in groups}
        kept = [i for i, (_, number) in enumerate(blocks) if i in chosen or groups.get(number) in kept_groups]
        self.counters.carried_pages += sum(uses[i].pages for i in kept)
        return [blocks[i][0] for i in kept]

    async def _carry_all(self, records: Sequence[bytes]) -> bool:
        """Carry blocks over, several at a time. False if there was no room for one."""
        queue = iter(records)
        full = False

        async def work() -> None:
            nonlocal full
            for record in queue:
                try:
                    if await self._mover.carry(record):
                        self.counters.carried_blocks += 1
                except NoSpaceError:
                    full = True
                    return
                except DeviceError as error:  # the devices take no writes now
                    log.warning("a block was not carried over: %s", error)
                    full = True
                    return

        if records:
            async with trio.open_nursery() as nursery:
                for _ in range(min(_CARRY_TASKS, len(records))):
                    nursery.start_soon(work)
        return not full

    async def _remove(
        self, segment: Segment, inodes: Sequence[InodeNumber], groups: dict[InodeNumber, Group]
    ) -> int:
        """Take those that are still there out of the table and the index, and with them the rest of their groups; not
        those that were opened meanwhile, nor a group with such a one."""
        removed = 0
        inodes, elsewhere = self._with_groups(segment, inodes, groups)
        for at in range(0, len(inodes), _EVICT_BATCH):
            if segment.lost:
                break
            here: list[InodeNumber] = []
            found: list[Inode] = []
            for number in inodes[at : at + _EVICT_BATCH]:
                record = self._index.raw(number)
                # Here is a part of a block whose other parts are on a device that is away: it cannot come back whole.
                if record is None and self._index.purge(number):
                    removed += 1
                # Carried over, unlinked or sealed anew since it was listed; or pinned.
                if record is None or record[FLAGS_OFFSET] & InodeFlags.PINNED or self._mover.is_busy(number):
                    continue
                inode = Inode.unpack(record)
                if (segment.index in usage(inode) or number in elsewhere) and not self._pins.holds(record):
                    here.append(number)
                    found.append(inode)
            # No await between the table's answer and the index: an open in between would find a block that is gone.
            busy = self._plane.inode_evict(here)
            for inode, is_open in zip(found, busy, strict=True):
                if not is_open:
                    self._mover.drop(inode)
                    self.counters.blocks += 1
                    self.counters.bytes += sum(usage(inode).values()) * PAGE_SIZE
                    removed += 1
            await trio.lowlevel.checkpoint()
        return removed

    def _with_groups(
        self, segment: Segment, inodes: Sequence[InodeNumber], groups: dict[InodeNumber, Group]
    ) -> tuple[Sequence[InodeNumber], set[InodeNumber]]:
        """All that go with what is left in the segment, and which of them lie elsewhere."""
        if not groups:
            return inodes, set()
        here: list[InodeNumber] = []
        elsewhere: dict[InodeNumber, None] = {}
        for number in inodes:
            group = groups.get(number)
            if group is None:
                here.append(number)
                continue
            inode = self._index.get(number)
            if not group.held and inode is not None and segment.index in usage(inode):
                here.append(number)
                elsewhere.update(dict.fromkeys(group.inodes))
        for number in here:
            elsewhere.pop(number, None)
        return [*here, *elsewhere], set(elsewhere)
