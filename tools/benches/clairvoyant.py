"""The bound of segments: a pool without devices, whose choice knows the whole trace.

A block is worth one over the time until its next use. Nobody has proved an optimum for segments.
"""

from __future__ import annotations

from collections.abc import Sequence

from benches.segments import Segments
from kvfs.replay.invent import Prompts
from kvfs.store.eviction import Lost
from kvfs.worth import Choice, ChooseBy

# As the pool's policy does: a copy must be worth so many times the mean loss by the page, more as the budget runs out.
_COPY_FACTOR, _BUDGET_LOW, _SMOOTHING = 1.0, 0.3, 0.05


def next_uses(prompts: Prompts) -> list[int]:
    """For each look-up of the trace in turn: the place of the next one of the same block. A place behind the trace, of
    the block's own, where there is none."""
    following: list[int] = []
    seen: dict[int, int] = {}
    never = sum(map(len, prompts))
    for prompt in reversed(prompts):
        for block in reversed(prompt):
            following.append(seen.get(block, never + block))
            seen[block] = never - len(following)
    following.reverse()
    return following


class _Foreseeing(Segments):
    """Segments whose blocks are weighed by the places of their next uses in the trace. The clock is the place now."""

    def __init__(self, prompts: Prompts, capacity: int, segments: int) -> None:
        self.place = 0
        self._following = next_uses(prompts)
        self._next: dict[int, int] = {}
        self._lost, self._gone_count = 0.0, 0
        # By segment: what it cost when it was weighed, and the price then. Until one of its blocks is used, time only
        # makes it dearer.
        self._least: dict[int, tuple[float, float]] = {}
        super().__init__(capacity, segments, lambda block, segment: None, lambda block: None)

    def open(self, block: int) -> None:
        self._next[block] = self._following[self.place]
        self._least.pop(self._of[block], None)

    def store(self, block: int, parent: int | None = None) -> None:
        super().store(block, parent)
        self.open(block)

    def _price(self, budget: int) -> float:
        if budget <= 0 or not self._lost:
            return float("inf")
        return _COPY_FACTOR * self._lost * (1 + _BUDGET_LOW * self.area / budget)

    def _worths(self, blocks: Sequence[int]) -> list[float]:
        never, now = len(self._following), self.place
        places = (self._next[block] for block in blocks)
        return [1 / max(1, place - now) if place < never else 0.0 for place in places]

    def _choose(self, blocks: Sequence[int], price: float, budget: int) -> Choice:
        looks = self._look(blocks)
        for i, worth in enumerate(self._worths(blocks)):
            looks.all[i].worth = worth
        return looks.choose(ChooseBy.WORTH, None, 0, price, budget)

    def _victim(self, price: float) -> int:
        least = self._least

        def bound(segment: int) -> float:
            loss, then = least.get(segment, (0.0, price))
            return loss if price >= then else 0.0

        best, victim = float("inf"), 0
        for segment in sorted(self._closed, key=bound):
            if victim and bound(segment) >= best:
                break
            loss = sum(min(price, worth) for worth in self._worths(list(self._blocks[segment])))
            least[segment] = loss, price
            if not victim or (loss, segment) < (best, victim):
                best, victim = loss, segment
        return victim

    def _gone(self, segment: int, lost: Lost) -> None:
        self._least.pop(segment, None)
        loss = lost.worth * lost.share / max(1, lost.blocks)
        self._gone_count += 1
        self._lost += (loss - self._lost) * max(_SMOOTHING, 1 / self._gone_count)


def clairvoyant(prompts: Prompts, capacity: int, segments: int) -> tuple[Segments, int]:
    """The pool at the end of the trace, and its hits."""
    pool = _Foreseeing(prompts, capacity, segments)
    hits = 0
    for prompt in prompts:
        whole = True
        for block in prompt:
            there = block in pool.slots
            whole = whole and there
            hits += whole
            if there:
                pool.open(block)
            else:
                pool.store(block)
            pool.place += 1
    return pool, hits
