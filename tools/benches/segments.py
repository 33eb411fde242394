"""A pool without devices: blocks in segments, the pool's own policy (kvfs/store/eviction.py), and the evictor's budget.

It holds numbers of blocks, all of one size. `tools/benches/simulate.py` plays traces over it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice

from kvfs._native import ffi

from kvfs.chains import Chains, ghosts_of
from kvfs.store.eviction import (
    SPARED,
    TICKS_PER_POOL,
    CopyBudget,
    EvictionPolicy,
    LeastLoss,
    Lost,
)
from kvfs.worth import DONE_AGE, Ages, Choice, ChooseBy, Looks, Use, Weights, word_of

# As the pool has it (Segments.reserve, Evictor.low): left free for copies, and for writers.
_RESERVE = 3
_AHEAD = 1
# Ghosts, of the blocks that the pool has room for.
_GHOSTS = 2
SEGMENTS_MIN = 6


class Segments:
    """`capacity` blocks in `segments` segments.

    placed(block, segment): it lies there now, stored or carried over. removed(block): it was evicted or dropped.
    Segments have rising numbers, and a new one each time they are filled.
    """

    def __init__(
        self,
        capacity: int,
        segments: int,
        placed: Callable[[int, int], None],
        removed: Callable[[int], None],
        policy: EvictionPolicy | None = None,
    ) -> None:
        self.area = capacity // segments
        self.count = capacity // self.area  # as many as fit: with few blocks in each, more than were asked for
        self.free = self.count
        self._low = min(_RESERVE, max(1, self.count // 8)) + _AHEAD
        self.policy = policy or LeastLoss()
        self.slots: dict[int, int] = {}  # of the blocks that are there
        self.stored = self.copied = 0
        self._placed, self._removed = placed, removed
        self._budget = CopyBudget(self.count * self.area, self.area)
        self._tick_blocks = capacity / TICKS_PER_POOL
        # By slot, as the block table has them: uses, and places of one page in segments with the numbers of `_free`.
        slots = self.count * self.area
        self._uses, self._places = ffi.new("uint32_t[]", slots), ffi.new("uint64_t[]", slots)
        self._free_slots = list(range(slots))
        self._chains = Chains(slots, _GHOSTS * slots)
        self._weighed = ffi.new(
            "struct kvfs_weighed *", [self._uses, self._places, self._chains.orphans, slots]
        )  # fmt: skip
        self._weights, self._hits, self._learnt = Weights(self.count), Ages(), 0
        self._of: dict[int, int] = {}
        self._blocks: dict[int, dict[int, None]] = {}
        self._at: dict[int, int] = {}  # by segment: its number among those that the pool has room for
        self._free = list(range(self.count))
        self._open = [0, 0]  # the writers' segment, and that of copies
        self._room = [0, 0]
        self._closed: dict[int, None] = {}
        self._last = 0

    @property
    def tick(self) -> int:
        return int((self.stored + self.copied) / self._tick_blocks)

    def use(self, block: int) -> Use:
        word: int = self._uses[self.slots[block]]
        return Use(word >> 8, word & 0xFF)

    def open(self, block: int) -> None:
        slot = self.slots[block]
        self._uses[slot] = self._hit(self._uses + slot)
        self._chains.used(slot)

    def _hit(self, word: object) -> int:
        """A block with this use is used again. Its use now."""
        self._hits.count(word, 1, self.tick)
        return word_of((self.tick, (word[0] & 0xFF) + 1))  # type: ignore[index]

    def store(self, block: int, parent: int | None = None) -> None:
        """parent: the block before it in its prompt."""
        if not self._room[0]:
            while self.free <= self._low and self._closed:
                self._evict()
        slot = self.slots[block] = self._free_slots.pop()
        self._append(0, block)
        self.stored += 1
        ghost = self._chains.enter(slot, block + 1)
        self._uses[slot] = word_of((self.tick, 0)) if ghost is None else self._hit(ffi.new("uint32_t *", ghost))
        if parent is not None and parent in self.slots:
            self._chains.follow(slot, self.slots[parent])

    def done(self, block: int) -> None:
        """It is needed no more, as its user says."""
        self._uses[self.slots[block]] = word_of((self.tick - DONE_AGE, 0))

    def restart(self) -> None:
        """The pool is unmounted and mounted again: what was learnt is kept, and each block is as old as its segment."""
        learnt = self.policy.pack()
        self.policy = LeastLoss()
        self.policy.unpack(learnt)
        self._chains = Chains(len(self._uses), _GHOSTS * len(self._uses))
        self._weighed.orphans = self._chains.orphans
        tick, self._learnt = self.tick, self.tick
        self._hits.take()
        for i, segment in enumerate(sorted(self._blocks, reverse=True)):
            for block in self._blocks[segment]:
                self._uses[self.slots[block]] = word_of((tick - i * TICKS_PER_POOL // self.count, 0))

    def drop(self, block: int) -> None:
        """Its room is empty until its segment goes."""
        del self._blocks[self._of.pop(block)][block]
        self._leave(block, evicted=False)

    def _leave(self, block: int, *, evicted: bool) -> None:
        slot = self.slots.pop(block)
        self._chains.leave(slot, block + 1, self._uses[slot], evicted=evicted)
        self._places[slot] = 0
        self._free_slots.append(slot)
        self._removed(block)

    def _append(self, stream: int, block: int) -> None:
        if not self._room[stream]:
            if not stream:
                self._learn()
            if self._open[stream]:
                self._closed[self._open[stream]] = None
            self._last += 1
            self._open[stream], self._room[stream] = self._last, self.area
            self._blocks[self._last], self._at[self._last] = {}, self._free.pop()
            self.free -= 1
            assert self.free >= 0
        segment = self._open[stream]
        self._room[stream] -= 1
        self._blocks[segment][block] = None
        self._of[block] = segment
        self._places[self.slots[block]] = self._at[segment] | 1 << 32
        self._placed(block, segment)

    # ---- choosing: what a bound with other knowledge has its own way of ----

    def _price(self, budget: int) -> float:
        return self.policy.price(budget / self.area)

    def _choose(self, blocks: Sequence[int], price: float, budget: int) -> Choice:
        return self._look(blocks).choose(ChooseBy.WORTH, self.policy.worths(), self.tick, price, budget)

    def _look(self, blocks: Sequence[int]) -> Looks:
        looks = Looks(len(blocks))
        for i, block in enumerate(blocks):
            look, slot = looks.all[i], self.slots[block]
            look.inode, look.pages, look.pages_all = block, 1, 1
            look.use, look.orphan = self._uses[slot], self._chains.is_orphan(slot)
        return looks

    def _learn(self) -> None:
        """By what was there since the last time."""
        tick = self.tick
        if tick - self._learnt >= self.policy.learn_ticks:
            self._weights.weigh(self.policy.worths(), 0.0, tick, self._weighed)
            for uses, count in ghosts_of(self._chains.all):
                self._weights.ages.count(uses, count, tick)
            self.policy.learn(self._hits.take(), self._weights.ages.take(), tick - self._learnt)
            self._learnt = tick

    def _victim(self, price: float) -> int:
        self._weights.weigh(self.policy.worths(), price, self.tick, self._weighed)
        for segment in self._closed:
            self._weights.all[self._at[segment]].live = len(self._blocks[segment])
        losses = self._weights.losses(self.area)
        spared = len(self._closed) // SPARED
        older = islice(self._closed, len(self._closed) - spared)
        return min(older, key=lambda segment: losses[self._at[segment]])

    def _gone(self, segment: int, lost: Lost) -> None:
        self.policy.gone(lost)

    def _evict(self) -> None:
        budget = self._budget.left(self.stored)
        price = self._price(budget)
        victim = self._victim(price)
        blocks = list(self._blocks[victim])
        choice = self._choose(blocks, price, budget)
        kept = set(choice.kept)
        self._gone(victim, Lost(choice.lost, choice.gone, choice.gone / max(1, self.area - len(kept))))
        del self._blocks[victim], self._closed[victim]
        self._free.append(self._at.pop(victim))
        self._budget.spend(len(kept))
        for block in blocks:
            if block in kept:
                self._append(1, block)
                self.copied += 1
            else:
                del self._of[block]
                self._leave(block, evicted=True)
        self.free += 1
