"""Eviction policy: which stream a block goes to, what its blocks are worth, and what a copy costs.

So it decides which segment goes next, and which of its blocks are carried over. Pure, to be replaced: it sees numbers,
changes nothing, and knows neither index nor devices. `tools/simulate` runs this very module on traces;
docs/performance.md has the results.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from kvfs.pool.format import Stream
from kvfs.worth import AGES, WORTH_CLASSES, Use, Worths

# Blocks age by a clock of pages written, not of seconds: a block's place costs what could be written there. So nothing
# here depends on the size of a pool or the speed of its engines. The clock has so many ticks while as much is written
# as the pool holds.
TICKS_PER_POOL = 1024

# The chance of a next use falls with the time since the last. It falls as 1/age where popularity alone decides, faster
# where blocks belong to conversations that end. The power lies between the two.
_AGE_POWER = -1.5
# Some 2% of the pool: smaller ages say only that a burst is not over.
_AGE_SOFT = 20
_BY_AGE = [(age + _AGE_SOFT) ** _AGE_POWER for age in AGES]
# More hits say no more. Up to it, classes of worths are numbers of hits.
_HITS_MAX = 3
# The worth of a hit is learnt from blocks that were lost: of those with so many hits, how many had one more. But the
# policy itself decides which are lost. So a hit adds at most the worth of two blocks that were never hit.
_HIT_WORTH_MAX = 2.0
# Counts assumed at the start: blocks with at least 0, 1, ... hits.
_REACHED = (200.0, 60.0, 30.0, 15.0, 8.0)
# Counts decay by this with each segment that goes: some 200 segments count.
_REACHED_KEPT = 0.995
# A copy costs a page written besides the page kept. So it must be worth this many times the loss of eviction by the
# page.
_COPY_FACTOR = 1.5
# The price of a copy rises as the budget runs out, and has doubled at so many segments left.
_BUDGET_LOW = 0.3
# Weight of one segment in the running mean of eviction's loss by the page: the last 20 count.
_SMOOTHING = 0.05
# CARRY_SHARE: pages copied because they are worth it, of pages stored. The budget saves up so much of the pool at most,
# and two segments at least. With more, a pool that was just filled for the first time copies for seconds while writers
# wait for a free segment.
CARRY_SHARE = 0.14
_SAVED_SHARE = 1 / 64
_SAVED_SEGMENTS = 2


class Lost(NamedTuple):
    """The blocks of a segment that went, but those that were carried over."""

    uses: Sequence[Use]
    share: float  # of the pages that were gained by it


class CopyBudget:
    """Budget of copies that are made because they are worth it. In any unit: the pool counts pages, the simulator
    blocks."""

    def __init__(self, pool_size: int, segment_size: int) -> None:
        self._most = max(pool_size * _SAVED_SHARE, _SAVED_SEGMENTS * segment_size)
        self._left, self._stored = 0.0, 0

    def left(self, stored: int) -> int:
        """stored: all writes but copies."""
        self._left = min(self._most, self._left + (stored - self._stored) * CARRY_SHARE)
        self._stored = stored
        return int(self._left)

    def spend(self, size: int) -> None:
        self._left -= size


class EvictionPolicy(Protocol):
    """The segment goes whose blocks are worth least, by the page. Those that are worth more than the price of a copy
    are carried over."""

    def stream_of(self, size: int) -> Stream:
        """The stream for a new block of `size` bytes."""
        ...

    def worths(self) -> Worths:
        """The worth of blocks now, by hits and age in ticks."""
        ...

    def price(self, budget: float) -> float:
        """A block must be worth more than that for a copy. budget: of copies that may be made now, in segments."""
        ...

    def gone(self, lost: Lost, tick: int) -> None:
        """A segment was emptied."""
        ...


def worth_copying(worths: Sequence[float], price: float) -> list[int]:
    """Indexes of the blocks that are worth a copy, those worth most first.

    They are in the order of their creation. Equal blocks keep their order: a chain's head is of use without its tail.
    """
    return sorted((i for i, worth in enumerate(worths) if worth > price), key=lambda i: -worths[i])


class LeastLoss:
    """A block is worth its estimated chance of being used within the next tick. The price follows from the loss of
    the segments that went by the page, and from the budget left."""

    def __init__(self) -> None:
        self._lost, self._gone = 0.0, 0  # running mean, by the page gained, of so many segments
        self._reached = list(_REACHED)
        self._worths = _worths(self._reached)

    def stream_of(self, size: int) -> Stream:
        return Stream.NEW

    def worths(self) -> Worths:
        return self._worths

    def price(self, budget: float) -> float:
        if budget <= 0 or not self._lost:  # nothing was lost yet: the worth of a page is unknown
            return float("inf")
        return _COPY_FACTOR * self._lost * (1 + _BUDGET_LOW / budget)

    def gone(self, lost: Lost, tick: int) -> None:
        loss = sum(self._worths.of(lost.uses, tick)) * lost.share / max(1, len(lost.uses))
        # The mean of the first few is theirs alone. A mean that begins at 0 makes copies cheap: the budget goes on
        # blocks of no worth, and those in use are lost behind it.
        self._gone += 1
        self._lost += (loss - self._lost) * max(_SMOOTHING, 1 / self._gone)
        had = [0] * (_HITS_MAX + 2)
        for _, hits in lost.uses:
            had[min(hits, _HITS_MAX + 1)] += 1
        for hits in range(_HITS_MAX, -1, -1):
            had[hits] += had[hits + 1]
        self._reached = [seen * _REACHED_KEPT + had[hits] for hits, seen in enumerate(self._reached)]
        self._worths = _worths(self._reached)


def _worths(reached: Sequence[float]) -> Worths:
    factors = _factors(reached)
    return Worths([[factors[min(hits, _HITS_MAX)] * worth for worth in _BY_AGE] for hits in range(WORTH_CLASSES)])


def _factors(reached: Sequence[float]) -> list[float]:
    """By hits: how much likelier the next hit is than the first of a block that was never hit."""
    first = (reached[1] + 1) / (reached[0] + 1)
    factors = []
    for hits in range(_HITS_MAX + 1):
        likelier = (reached[hits + 1] + 1) / (reached[hits] + 1) / first
        factors.append(max(1.0, min(1 + _HIT_WORTH_MAX * hits, likelier)))
    return factors
