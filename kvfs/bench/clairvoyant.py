"""The bound of segments: a pool without devices, whose choice knows the whole trace.

A block is worth one over the time until its next use. Nobody has proved an optimum for segments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvfs.bench.segments import Segments
from kvfs.bench.traces import Prompts
from kvfs.pool.format import Stream
from kvfs.store.eviction import Contents, Use

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


class NextUse:
    """An EvictionPolicy. The first of a block's uses is the place of the next one, and the clock is the place now."""

    def __init__(self, never: int) -> None:
        self._never = never
        self._lost, self._gone = 0.0, 0
        # By segment: what it cost when it was weighed, and the price then. Until one of its blocks is used, time only
        # makes it dearer.
        self._least: dict[int, tuple[float, float]] = {}

    def stream_of(self, size: int) -> Stream:
        return Stream.NEW

    def choose(
        self, closed: Sequence[int], contents: Callable[[int], Contents], budget: float, tick: int, count: int = 1
    ) -> list[int]:
        price = self._price(budget)
        least = self._least

        def bound(segment: int) -> float:
            loss, then = least.get(segment, (0.0, price))
            return loss if price >= then else 0.0

        def weigh(segment: int) -> float:
            uses, live_share = contents(segment)
            loss = sum(min(price, worth) for worth in self._worths(uses, tick)) * live_share / max(1, len(uses))
            least[segment] = loss, price
            return loss

        found: list[tuple[float, int]] = []
        for segment in sorted(closed, key=bound):
            if len(found) == count and bound(segment) >= found[-1][0]:
                break
            found = sorted([*found, (weigh(segment), segment)])[:count]
        return [segment for _, segment in found]

    def used(self, segment: int) -> None:
        """A block of the segment was used, or went."""
        self._least.pop(segment, None)

    def carry(self, uses: Sequence[Use], budget: float, tick: int) -> list[int]:
        price, worths = self._price(budget), self._worths(uses, tick)
        return sorted((i for i, worth in enumerate(worths) if worth > price), key=lambda i: -worths[i])

    def gone(self, segment: int, lost: Contents, tick: int) -> None:
        loss = sum(self._worths(lost.uses, tick)) * lost.live_share / max(1, len(lost.uses))
        self._gone += 1
        self._lost += (loss - self._lost) * max(_SMOOTHING, 1 / self._gone)

    def _price(self, budget: float) -> float:
        return _COPY_FACTOR * self._lost * (1 + _BUDGET_LOW / budget) if budget > 0 and self._lost else float("inf")

    def _worths(self, uses: Sequence[Use], tick: int) -> list[float]:
        return [1 / max(1, place - tick) if place < self._never else 0.0 for place, _ in uses]


class _Foreseeing(Segments):
    """Segments whose uses are places in the trace."""

    def __init__(self, prompts: Prompts, capacity: int, segments: int) -> None:
        self.place = 0
        self._following = next_uses(prompts)
        self._next_use = NextUse(len(self._following))
        super().__init__(capacity, segments, lambda block, segment: None, lambda block: None, self._next_use)

    @property
    def tick(self) -> int:
        return self.place

    def open(self, block: int) -> None:
        self.uses[block] = self._following[self.place], 0
        self._next_use.used(self._of[block])

    def store(self, block: int) -> None:
        super().store(block)
        self.open(block)


def clairvoyant(prompts: Prompts, capacity: int, segments: int) -> tuple[Segments, int]:
    """The pool at the end of the trace, and its hits."""
    pool = _Foreseeing(prompts, capacity, segments)
    hits = 0
    for prompt in prompts:
        whole = True
        for block in prompt:
            there = block in pool.uses
            whole = whole and there
            hits += whole
            if there:
                pool.open(block)
            else:
                pool.store(block)
            pool.place += 1
    return pool, hits
