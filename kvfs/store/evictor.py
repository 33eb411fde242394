"""The evictor: frees whole segments, so that writers find one. eviction.py decides which blocks go and which stay.

A segment is evicted in this order. Blocks that stay are copied to other segments, and their records follow. The others
leave the block table, then the index (I11). Then the segment is free. Hosts get notice within a quarter of a second. An
open by a name that a kernel kept until then fails, and the kernel looks the name up again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from heapq import nsmallest
from operator import attrgetter

import trio

from kvfs.errors import DeviceError, NoSpaceError, first_error
from kvfs.names import NamesError, step
from kvfs.plane import OpenState
from kvfs.record import Inode, Kind
from kvfs.store.blocks import Blocks
from kvfs.store.eviction import (
    CARRY_SHARE,
    CARRY_SHARE_BUSY,
    SPARED,
    TICKS_PER_POOL,
    CopyBudget,
    EvictionPolicy,
    Lost,
)
from kvfs.store.groups import Group, Groups
from kvfs.store.sealing import Sealing
from kvfs.store.segment import Segment, State, usage
from kvfs.types import PAGE_SIZE, InodeNumber
from kvfs.worth import Ages, Choice, ChooseBy, Looks, Weights, word_of

log = logging.getLogger(__name__)
_generation = attrgetter("generation")

# Blocks that are open beyond the shares of their users go as if they were not open. A lease keeps a block, and not the
# rest of its group: that may be more than leases may keep.
_KEPT_OPEN = (OpenState.OPEN, OpenState.BEING_WRITTEN)
# Blocks looked at, or removed, in one go: others wait meanwhile.
_LOOK_BATCH = 256
_EVICT_BATCH = 64
_SLOW_BATCH = 16
# So many files of a group leave in one step, for which all opens wait. A larger group may be cut by an open.
_GROUP_MAX = 1024
_CARRY_TASKS = 8
# Segments emptied at once while writers need some: one that copies blocks waits for devices.
_AT_ONCE = 3
# A segment of which eviction would keep more than this is left alone for a while: copying it frees next to nothing.
_KEEP_SHARE = 0.75
_AVOID_S = 5.0
# All segments are weighed anew when one part in so many of the pool has been written since. Not later than after one
# part in so many of the segments have gone.
_WEIGHED_SHARE = 256
# So many blocks are weighed at once, in half a millisecond: to go to a thread and back takes longer. Of millions a
# thread weighs.
_WEIGHED_HERE = 1 << 17
# Chosen besides, as some may be held when their turn comes.
_SPARE_CHOICES = 16
_PASSES = 6
# Segments kept free for writers that wait, and 1/20 of the pool. A freed segment waits for summaries and the index,
# while fast writers fill five of 16 MiB in 50 ms.
_AHEAD_MAX = 32
_AHEAD_SHARE = 20
_AHEAD_S = 10.0
# Of the blocks that `kvfs evict` leaves, so many are named.
_NAMED = 8
_META_LEARNT = b"learnt"
_NO_RECORDS = float("inf")
# Everything left is pinned or open: said only after this long without a segment that could go.
_PATIENCE_S = 2.0


@dataclass(slots=True)
class Kept:
    """The blocks that stay when all goes that may: number, bytes, and the first of them."""

    blocks: int = 0
    bytes: int = 0
    inodes: list[InodeNumber] = field(default_factory=list)

    def add(self, number: InodeNumber, size: int) -> None:
        self.blocks += 1
        self.bytes += size
        if len(self.inodes) < _NAMED:
            self.inodes.append(number)


@dataclass(slots=True)
class EvictionCounters:
    segments: int = 0
    blocks: int = 0
    bytes: int = 0
    carried_blocks: int = 0
    carried_pages: int = 0


class Evictor:
    def __init__(self, blocks: Blocks, sealing: Sealing, policy: EvictionPolicy, groups: Groups) -> None:
        self._segments, self._index, self._plane = blocks.segments, blocks.index, blocks.plane
        self._policy, self._pins, self._groups = policy, blocks.pins, groups
        self._blocks, self._sealing, self.names = blocks, sealing, blocks.names
        self.counters = EvictionCounters()
        self._weights, self._used = Weights(len(self._segments.all)), Ages()
        # The next ones to go, with their generations; the ticks at which that was decided, and the policy learnt.
        self._chosen: list[tuple[Segment, int]] = []
        self._weighed_at = self._learnt_at = 0
        # Free segments kept for writers; when that changed; how often they had waited by then.
        self._ahead, self._ahead_at, self._waits = 1, 0.0, 0
        self._room = blocks.table_room
        self._by_record = False  # their order is the one that frees records
        self._lock = trio.Lock()
        self._pages_at_start = self._segments.pages_written
        self._budget = CopyBudget(len(self._segments.own) * self._segments.area, self._segments.area)
        # Segments that will be free soon.
        self._emptying: set[int] = set()
        # A segment stayed for that, and none has gone since.
        self._lacks_memory = False

    def take_groups(self, groups: Groups) -> None:
        """Other rules, for each segment that is looked at from now on."""
        self._groups = groups

    # Free segments, of which `reserve` are not for writers: below low the evictor works, up to high. As few as writers
    # let it: what stands empty keeps nothing.

    @property
    def low(self) -> int:
        return self._segments.reserve + self._ahead

    @property
    def high(self) -> int:
        return self.low + self._ahead // 2

    def _look_ahead(self, now: float) -> None:
        """More free segments while writers had to wait for one, fewer when they have not for long."""
        if self._segments.waits != self._waits:
            self._ahead = min(2 * self._ahead, max(2, min(_AHEAD_MAX, self._segments.usable // _AHEAD_SHARE)))
            self._ahead_at = now
        elif now - self._ahead_at > _AHEAD_S and self._ahead > 1:
            self._ahead -= 1
            self._ahead_at = now
        self._waits = self._segments.waits

    async def run(self, allowed: Callable[[], bool]) -> None:
        """Keep segments free, while `allowed`. Until cancelled."""
        stuck_since: float | None = None
        while True:
            with trio.move_on_after(0.5):
                await self._segments.need_space.wait()
            self._segments.need_space = trio.Event()
            self._segments.take_notes()
            self._look_ahead(trio.current_time())
            if self._is_to_learn():  # also before the pool is full
                async with self._lock:
                    await self._weigh_all()
            lacks_space, lacks_records = self._segments.free_count() < self.low, self._room.is_short()
            self._segments.exhausted = self._segments.exhausted and lacks_space
            self._room.exhausted = self._room.exhausted and lacks_records
            if not allowed() or not self._segments.usable or not (lacks_space or lacks_records):
                stuck_since = None
                continue
            freed = await self.free_until(lambda: self._has_space() and self._has_records(), at_once=_AT_ONCE)
            self._room.wake()
            if freed:
                stuck_since = None
                continue
            now = trio.current_time()
            if stuck_since is None:
                stuck_since = now
                if lacks_records and self._blocks.plane.table_statistics()["blocks"]:
                    self._segments.retire_open()  # they may lie in segments that are written to
            if now - stuck_since > _PATIENCE_S:
                self._give_up(lacks_space, lacks_records)
            await trio.sleep(0.1)

    def _has_space(self) -> bool:
        return self._segments.free_count() + len(self._emptying) >= self.high

    def _is_enough_for_writers(self) -> bool:
        return self._segments.free_count() + len(self._emptying) >= self.low

    def _has_records(self) -> bool:
        return self._room.left() >= self._room.high

    def _give_up(self, space: bool, records: bool) -> None:
        """Nothing can go: those that wait are told."""
        if space and not self._segments.exhausted:
            why = "there is no memory for it" if self._lacks_memory else "everything left is pinned, open or leased"
            log.warning("nothing can be evicted: %s", why)
            self._segments.exhausted = True
            self._segments.wake_waiters()
        if records and not self._room.exhausted:
            log.warning("the table of names is nearly full, %d of %d records are left: %d are of directories, links "
                        "and files that are being made, and no block can be evicted",
                        self._room.left(), self._room.most, self._room.kept())  # fmt: skip
            self._room.exhausted = True
            self._room.wake()

    async def free_until(self, enough: Callable[[], bool], *, at_once: int = 1) -> int:
        """Evict segments, `at_once` at a time, until enough() or none is left to evict; returns how many went. More
        where writers wait meanwhile.

        Segments opened since then are left out: pinned blocks that cannot lie closer together would be copied for ever.
        """
        freed, working, choosing = 0, 0, trio.Lock()
        copying: set[int] = set()

        async def work(newest: int, nursery: trio.Nursery, enough: Callable[[], bool]) -> None:
            nonlocal freed, working

            def copies() -> None:
                """They wait for devices: meanwhile others empty other segments."""
                assert segment is not None
                copying.add(segment.index)
                if working < at_once:
                    another(newest, nursery, enough)

            while True:
                async with choosing:
                    segment = None if enough() else await self._choose(newest)
                    if segment is None:
                        break
                    segment.state = State.EVICTING
                    self._emptying.add(segment.index)
                try:
                    if await self._evict(segment, before_copies=copies):
                        freed += 1
                    else:
                        segment.avoid_until = trio.current_time() + _AVOID_S
                finally:
                    self._emptying.discard(segment.index)
                    copying.discard(segment.index)
                self._segments.need_flush.set()
            working -= 1
            if not working:
                nursery.cancel_scope.cancel()

        def another(newest: int, nursery: trio.Nursery, enough: Callable[[], bool]) -> None:
            nonlocal working
            working += 1
            nursery.start_soon(work, newest, nursery, enough)

        async def watch(newest: int, nursery: trio.Nursery) -> None:
            """Writers have used up what was free. What is copied now does not help them soon."""
            while True:
                await self._segments.need_space.wait()
                self._segments.need_space = trio.Event()
                if copying:
                    self._emptying -= copying
                    if working < _AT_ONCE:
                        another(newest, nursery, enough if at_once > 1 else self._is_enough_for_writers)

        try:
            async with self._lock, trio.open_nursery() as nursery:
                newest = max((s.generation for s in self._segments.own), default=0)
                another(newest, nursery, enough)
                nursery.start_soon(watch, newest, nursery)
        except BaseExceptionGroup as group:
            raise first_error(group) from None
        return freed

    async def clear(self, enough: Callable[[], bool]) -> None:
        """Evict blocks until enough(), hot ones too: all present ones and neither pinned nor open. Blocks that stay are
        moved together."""
        async with self._lock:
            used = [s for s in self._segments.own if s.state in (State.CLOSED, State.OPEN)]
            for segment in sorted(used, key=lambda s: s.generation):
                if enough():
                    return
                if segment.lost:
                    continue
                if segment.state == State.CLOSED:
                    segment.state = State.EVICTING
                    await self._evict(segment, clear=True)
                    self._segments.need_flush.set()
                elif segment.state == State.OPEN:
                    inodes = self._index.segment_inodes(segment.index)
                    groups = await self._groups.of(inodes)
                    await self._look_at(groups)
                    await self._drop_blocks(segment, inodes, groups)
                await trio.lowlevel.checkpoint()

    async def kept(self) -> dict[str, Kept]:
        """The blocks that are left, by the reason that they stay: pinned, leased, open, in a group with such a file
        ("grouped"), or none ("others"). The last were stored meanwhile, or lie on a device that is away."""
        kept: dict[str, Kept] = {}
        for segment in self._segments.own:
            inodes = self._index.segment_inodes(segment.index)
            groups = await self._groups.of(inodes)
            await self._look_at(groups)
            for i, number in enumerate(inodes):
                if i % _EVICT_BATCH == _EVICT_BATCH - 1:
                    await trio.lowlevel.checkpoint()
                record = self._index.raw(number)
                inode = None if record is None else Inode.unpack(record)
                if record is None or inode is None or inode.segment != segment.index:
                    continue
                group, state = groups.get(number), self._plane.inode_is_open(number)
                if self._pins.holds(record):
                    why = "pinned"
                elif state == OpenState.LEASED:
                    why = "leased"
                elif state or self._sealing.is_busy(number):
                    why = "open"
                else:
                    why = "grouped" if group is not None and group.held else "others"
                kept.setdefault(why, Kept()).add(number, sum(usage(inode).values()) * PAGE_SIZE)
        for number in self._index.volatile_inodes():
            record = self._index.raw(number)
            inode = None if record is None else Inode.unpack(record)
            if inode is not None and inode.kind == Kind.FILE and not inode.sealed:
                kept.setdefault("open", Kept()).add(inode.inode, inode.size)
        return kept

    async def drain(self, segment: Segment, lost: Callable[[int], None]) -> bool:
        """Empty a segment for good: what is pinned, open or was hit since it was written is carried over, however much
        that is; the rest goes. `lost` gets the number of dropped blocks. False if there is no room for it."""
        while True:
            while segment.state == State.OPEN:  # others are emptied meanwhile
                await trio.sleep(0.01)
            async with self._lock:
                if segment.state == State.OPEN:
                    continue
                if segment.state != State.CLOSED or segment.lost:
                    return True
                segment.state = State.EVICTING
                return await self._evict(segment, drain=True, lost=lost)

    # ---- choosing ----

    async def _choose(self, newest: int) -> Segment | None:
        """The segment of a generation up to `newest` that goes next."""
        by_record = self._has_space() and not self._has_records()
        for weighed in (False, True):
            if weighed:
                await self._weigh_all()
                self._by_record = by_record
                self._chosen = self._next_ones(newest)
            elif self._is_stale() or by_record != self._by_record:
                continue
            while self._chosen:
                segment, generation = self._chosen.pop()
                # One that was freed and filled again since is another.
                if segment.generation == generation <= newest and self._can_go(segment, trio.current_time()):
                    return segment
        return None

    def _is_stale(self) -> bool:
        """Whether more has been written since all was weighed than a choice may be old."""
        return self._segments.tick - self._weighed_at > TICKS_PER_POOL // _WEIGHED_SHARE

    def _is_to_learn(self) -> bool:
        return self._segments.tick - self._learnt_at >= self._policy.learn_ticks

    async def _weigh_all(self) -> None:
        """Weigh all segments, and let the policy learn from what was there since the last time."""
        worths, price = self._policy.worths(), self._policy.price(self._budget_segments())
        tick = self._segments.tick
        learns = self._is_to_learn()

        def weigh() -> None:
            self._plane.uses.weigh(self._weights, worths, price, tick)
            if learns:
                self._plane.uses.count_ghosts(self._weights.ages, tick)

        if self._plane.table_statistics()["records"] <= _WEIGHED_HERE:
            weigh()
        else:
            await trio.to_thread.run_sync(weigh)
        if learns:
            self._plane.uses.take(self._used)
            self._policy.learn(self._used.take(), self._weights.ages.take(), tick - self._learnt_at)
            self._learnt_at = tick
        self._weighed_at = tick

    def _next_ones(self, newest: int) -> list[tuple[Segment, int]]:
        """The segments that go next, the first last, with their generations."""
        losses = self._weights.losses_by_record() if self._by_record else self._weights.losses(self._segments.area)
        now = trio.current_time()
        closed = [s for s in self._segments.own if s.state is State.CLOSED]
        closed.sort(key=_generation)
        spared = {s.index for s in closed[len(closed) - len(closed) // SPARED :]}
        able = [
            s for s in closed
            if s.generation <= newest and not s.held and not s.avoided and s.avoid_until <= now
        ]  # fmt: skip
        found = [(losses[s.index], s.generation, s.index) for s in able if s.index not in spared]
        if not found:
            found = [(losses[s.index], s.generation, s.index) for s in able]
        if self._by_record:
            found = [item for item in found if item[0] != _NO_RECORDS]
        count = len(closed) // _WEIGHED_SHARE + 1 + _SPARE_CHOICES
        return [(self._segments.all[index], g) for _, g, index in reversed(nsmallest(count, found))]

    def _can_go(self, segment: Segment, now: float) -> bool:
        if segment.held or segment.avoided or segment.avoid_until > now:
            return False
        return segment.state is State.CLOSED

    def begin(self) -> None:
        """After a mount: blocks are as old as the writes after them, and what was learnt is known again."""
        closed = sorted((s for s in self._segments.own if s.state != State.FREE), key=_generation, reverse=True)
        ages = [0] * len(self._segments.all)
        for i, segment in enumerate(closed):
            ages[segment.index] = i * TICKS_PER_POOL // len(self._segments.own)
        self._plane.uses.begin(ages)
        kept = self._index.meta_get(_META_LEARNT)
        if kept is not None and not self._policy.unpack(kept):
            log.warning("eviction: what was learnt before is not readable: %d bytes in the index", len(kept))

    def end(self) -> None:
        """Before the last commit of a mount."""
        self._index.meta_put(_META_LEARNT, self._policy.pack())

    def _budget_pages(self) -> int:
        """The pages that may still be carried over."""
        stored = self._segments.pages_written - self._pages_at_start - self.counters.carried_pages
        return self._budget.left(stored, CARRY_SHARE if self._ahead == 1 else CARRY_SHARE_BUSY)

    def _budget_segments(self) -> float:
        return self._budget_pages() / self._segments.area

    # ---- evicting ----

    async def _evict(
        self, segment: Segment, *, drain: bool = False, clear: bool = False,
        lost: Callable[[int], None] = lambda count: None, before_copies: Callable[[], None] = lambda: None,
    ) -> bool:  # fmt: skip
        """Empty one segment, which is EVICTING, and free it. False if too much of it must stay; then it is CLOSED
        again. `clear`: what need not stay goes first, and in any case. Where nothing is copied, a segment of up to 64
        blocks goes without a checkpoint."""
        removed, life = 0, segment.generation

        def is_ours() -> bool:
            """Its device may have gone, and come back without its blocks: then it was freed, perhaps filled again."""
            return segment.state is State.EVICTING and segment.generation == life and not segment.lost

        try:
            for turn in range(_PASSES):
                if not is_ours():
                    return False
                inodes = self._index.segment_inodes(segment.index)
                if not inodes:
                    break
                groups = await self._groups.of(inodes)
                await self._look_at(groups)
                if clear and turn == 0:
                    removed += await self._drop_blocks(segment, inodes, groups)
                    if not removed:  # all of it stays: to move that frees nothing
                        return False
                by = ChooseBy.HELD if turn else ChooseBy.HITS if drain else ChooseBy.WORTH
                choice = await self._decide(segment, inodes, groups, by, however_much=drain)
                if choice is None:
                    return False
                if choice.held or choice.kept:
                    before_copies()
                    if not await self._carry_all(choice.held):
                        return False
                    # Those for which there is no room go: nothing would ever be freed if eviction waited for it.
                    await self._carry_all(choice.kept)
                await self._look_at(groups)
                if not is_ours():
                    return False
                gone = await self._drop_blocks(segment, inodes, groups)
                removed += gone
                if gone == len(inodes) and not groups:  # nothing comes to a segment that is EVICTING
                    break
            else:
                return False
            if segment.held or not is_ours():
                return False
            self._segments.free(segment)
            self.counters.segments += 1
            self._lacks_memory = False
            return True
        except NoSpaceError:
            # The reserve is used up: what was copied stays copied.
            return False
        except (MemoryError, NamesError) as error:
            if not self._lacks_memory:
                log.warning("segment %d stays: %s", segment.index, str(error) or "no memory")
            self._lacks_memory = True
            return False
        finally:
            lost(removed)
            if segment.state is State.EVICTING and segment.generation == life:
                segment.state = State.CLOSED
                self._segments.changed(segment)
                with self._counted_free():
                    self._segments.free_if_empty(segment)

    @contextmanager
    def _counted_free(self) -> Iterator[None]:
        """Count the segments that a step frees: a large block lies in others beside the one that is emptied."""
        before = self._segments.freed
        yield
        self.counters.segments += self._segments.freed - before

    async def _look_at(self, groups: dict[InodeNumber, Group]) -> None:
        """Learn of each group what decides about all of it: whether one is in use, and the last use of
        the best."""
        looked = 0
        for group in set(groups.values()):
            group.held, group.use = False, max(self._plane.uses.of(group.inodes))
            for number in group.inodes:
                record = self._index.raw(number)
                group.held = record is not None and (
                    self._plane.inode_is_open(number) in _KEPT_OPEN
                    or self._sealing.is_busy(number)
                    or self._pins.holds(record)
                )
                looked += 1
                if group.held:
                    break
                if looked % _EVICT_BATCH == 0:
                    await trio.lowlevel.checkpoint()

    async def _decide(
        self,
        segment: Segment,
        inodes: Sequence[InodeNumber],
        groups: dict[InodeNumber, Group],
        by: ChooseBy,
        *,
        however_much: bool,
    ) -> Choice | None:
        """Which blocks must be carried over, and which are worth it; None if the segment has to stay. It has to where
        too much must be carried, unless `however_much`."""
        looks = Looks(len(inodes))
        for at in range(0, len(inodes), _LOOK_BATCH):
            if at:
                await trio.lowlevel.checkpoint()
            self._blocks.look(segment, inodes[at : at + _LOOK_BATCH], looks, at)
        if self._pins:
            await self._tell_pinned(inodes, looks)
        units = self._tell_groups(inodes, groups, looks) if groups else 0
        if busy := self._sealing.busy_of(inodes):
            for i, number in enumerate(inodes):
                looks.all[i].busy |= number in busy and looks.all[i].pages > 0
        budget = self._budget_pages() if by is ChooseBy.WORTH else 0
        price = self._policy.price(budget / self._segments.area)
        choice = looks.choose(by, self._policy.worths(), self._segments.tick, price, budget, units)
        if choice.busy or (not however_much and choice.held_pages > _KEEP_SHARE * self._segments.area):
            return None
        if by is ChooseBy.WORTH:
            self._count_choice(segment, choice)
        return choice

    def _count_choice(self, segment: Segment, choice: Choice) -> None:
        """The budget pays the copies, and the policy is told of the rest, which is lost."""
        self.counters.carried_pages += choice.copied_pages
        self._budget.spend(choice.copied_pages)
        gained = max(1, self._segments.area - choice.kept_pages)
        share = max(0, segment.live_pages - choice.kept_pages) / gained
        self._policy.gone(Lost(choice.lost, choice.gone, share))

    async def _tell_pinned(self, inodes: Sequence[InodeNumber], looks: Looks) -> None:
        """Blocks below a pin stay, whatever they are worth."""
        for i, number in enumerate(inodes):
            if i % _EVICT_BATCH == _EVICT_BATCH - 1:
                await trio.lowlevel.checkpoint()
            record = self._index.raw(number) if looks.all[i].pages else None
            if record is not None and self._pins.holds(record):
                looks.all[i].held = 1

    def _tell_groups(self, inodes: Sequence[InodeNumber], groups: dict[InodeNumber, Group], looks: Looks) -> int:
        """The files of a group are kept together, as used as the best of them. Returns how many groups there are."""
        units: dict[Group, int] = {}
        for i, number in enumerate(inodes):
            group = groups.get(number)
            if group is not None:
                look = looks.all[i]
                look.unit = units.setdefault(group, len(units) + 1)
                look.use, look.orphan = word_of(group.use), 0
                look.held |= group.held
        return len(units)

    async def _carry_all(self, blocks: Sequence[InodeNumber]) -> bool:
        """Carry blocks over, several at a time. False if there was no room for one."""
        queue = (record for number in blocks if (record := self._index.raw(number)) is not None)
        full = False

        async def work() -> None:
            nonlocal full
            for record in queue:
                try:
                    if await self._sealing.carry(record):
                        self.counters.carried_blocks += 1
                except NoSpaceError:
                    full = True
                    return
                except (DeviceError, MemoryError, NamesError) as error:  # the devices take no writes, or memory ends
                    log.warning("a block was not carried over: %s", error)
                    full = True
                    return

        if blocks:
            async with trio.open_nursery() as nursery:
                for _ in range(min(_CARRY_TASKS, len(blocks))):
                    nursery.start_soon(work)
        return not full

    async def _drop_blocks(
        self,
        segment: Segment,
        inodes: Sequence[InodeNumber],
        groups: dict[InodeNumber, Group],
    ) -> int:
        """Take the blocks that are still there out of the table and the index, and with them the rest of their groups.
        Blocks that were opened meanwhile stay, and so does a group with such a block."""
        removed = 0
        alone, together = self._by_groups(segment, inodes, groups)
        # Where Python looks at each block, a step of as many would be long.
        size = _SLOW_BATCH if self._pins or self._index.removed_names is not None else _EVICT_BATCH
        batches: list[tuple[Segment | None, Sequence[InodeNumber]]] = [
            (segment, alone[at : at + size]) for at in range(0, len(alone), size)
        ]
        batches += [
            (None, numbers[at : at + _GROUP_MAX]) for numbers in together for at in range(0, len(numbers), _GROUP_MAX)
        ]
        for i, (where, batch) in enumerate(batches):
            if i:
                await trio.lowlevel.checkpoint()
            if segment.lost:
                break
            self._blocks.bring_to_evict(batch)
            removed += self._drop_some(where, batch)
        return removed

    @step
    def _drop_some(self, segment: Segment | None, inodes: Sequence[InodeNumber]) -> int:
        """One step from the table's answer to the index: an open in between would find a block that is gone. Without a
        segment these are a group."""
        # A part of a block whose other parts are on a device that is away: it cannot come back whole.
        removed = sum(self._index.drop_hidden(number) for number in inodes) if self._index.is_hiding else 0
        # Those that are sealed anew or copied right now.
        if busy := self._sealing.busy_of(inodes):
            inodes = [] if segment is None else [number for number in inodes if number not in busy]
        with self._counted_free():
            evicted = self._blocks.evict(segment, inodes)
        self.counters.blocks += evicted.blocks
        self.counters.bytes += evicted.pages * PAGE_SIZE
        return removed + evicted.blocks

    def _by_groups(
        self, segment: Segment, inodes: Sequence[InodeNumber], groups: dict[InodeNumber, Group]
    ) -> tuple[Sequence[InodeNumber], list[list[InodeNumber]]]:
        """Those that are left in the segment: the ones in no group, and each group that goes, wherever it lies."""
        if not groups:
            return inodes, []
        alone: list[InodeNumber] = []
        together: dict[Group, list[InodeNumber]] = {}
        for number in inodes:
            group = groups.get(number)
            if group is None:
                alone.append(number)
                continue
            inode = self._index.get(number)
            if not group.held and inode is not None and segment.index in usage(inode):
                together[group] = group.inodes
        return alone, list(together.values())
