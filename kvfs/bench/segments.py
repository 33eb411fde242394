"""A pool without devices: blocks in segments, the pool's own policy (kvfs/store/eviction.py), and the evictor's budget.

It holds numbers of blocks, all of one size. `kvfs/bench/simulate.py` plays traces over it.
"""

from __future__ import annotations

from collections.abc import Callable

from kvfs.store.eviction import TICKS_PER_POOL, Contents, CopyBudget, EvictionPolicy, LeastLoss, Use

# Left free for copies when a segment is opened for writers: the pool's reserve, less the one that it opens ahead.
_SPARE = 2
SEGMENTS_MIN = 2 * _SPARE + 2


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
        self.policy = policy or LeastLoss()
        self.uses: dict[int, Use] = {}
        self.stored = self.copied = 0
        self._placed, self._removed = placed, removed
        self._budget = CopyBudget(self.count * self.area, self.area)
        self._tick_blocks = capacity / TICKS_PER_POOL
        self._of: dict[int, int] = {}
        self._blocks: dict[int, dict[int, None]] = {}
        self._open = [0, 0]  # the writers' segment, and that of copies
        self._room = [0, 0]
        self._closed: dict[int, None] = {}
        self._last = 0

    @property
    def tick(self) -> int:
        return int((self.stored + self.copied) / self._tick_blocks)

    def open(self, block: int) -> None:
        self.uses[block] = self.tick, min(255, self.uses[block][1] + 1)

    def store(self, block: int) -> None:
        if not self._room[0]:
            while self.free <= _SPARE and self._closed:
                self._evict()
        self._append(0, block)
        self.stored += 1
        self.uses[block] = self.tick, 0

    def drop(self, block: int) -> None:
        """Its room is empty until its segment goes."""
        del self.uses[block], self._blocks[self._of.pop(block)][block]
        self._removed(block)

    def _append(self, stream: int, block: int) -> None:
        if not self._room[stream]:
            if self._open[stream]:
                self._closed[self._open[stream]] = None
            self._last += 1
            self._open[stream], self._room[stream] = self._last, self.area
            self._blocks[self._last] = {}
            self.free -= 1
            assert self.free >= 0
        self._room[stream] -= 1
        self._blocks[self._open[stream]][block] = None
        self._of[block] = self._open[stream]
        self._placed(block, self._open[stream])

    def _contents(self, segment: int) -> Contents:
        blocks = self._blocks[segment]
        return Contents([self.uses[block] for block in blocks], len(blocks) / self.area)

    def _evict(self) -> None:
        budget = self._budget.left(self.stored)
        closed = list(self._closed)
        (victim,) = self.policy.choose(closed, self._contents, budget / self.area, self.tick)
        blocks = list(self._blocks[victim])
        uses = [self.uses[block] for block in blocks]
        kept = set(self.policy.carry(uses, budget / self.area, self.tick)[: max(0, budget)])
        lost = [use for i, use in enumerate(uses) if i not in kept]
        self.policy.gone(victim, Contents(lost, len(lost) / max(1, self.area - len(kept))), self.tick)
        del self._blocks[victim], self._closed[victim]
        self._budget.spend(len(kept))
        for i, block in enumerate(blocks):
            if i in kept:
                self._append(1, block)
                self.copied += 1
            else:
                del self.uses[block], self._of[block]
                self._removed(block)
        self.free += 1
