"""Eviction policy: which stream a block goes to, which segment goes next, and which of its blocks are carried over.

Pure, to be replaced: it sees numbers, changes nothing, and knows neither index nor devices. `tools/simulate` runs this
very module on traces; docs/performance.md has the results.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from heapq import nsmallest
from typing import NamedTuple, Protocol

from kvfs.pool.format import Stream

# Blocks age by a clock of pages written, not of seconds: a block's place costs what could be written there. So nothing
# here depends on the size of a pool or the speed of its engines. The clock has so many ticks while as much is written
# as the pool holds.
TICKS_PER_POOL = 1024
# The clock has 24 bits and goes round, after 16,384 times the pool.
TICK_MASK = (1 << 24) - 1

# The chance of a next use falls with the time since the last. It falls as 1/age where popularity alone decides, faster
# where blocks belong to conversations that end. The power lies between the two.
_AGE_POWER = -1.5
# Some 2% of the pool: smaller ages say only that a burst is not over.
_AGE_SOFT = 20
# More hits say no more.
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
# The number of segments weighed for one that goes. The next in turn: at least _TURN, one in _TURN_SHARE of all, at most
# _TURN_MAX, none once _TURN_BLOCKS blocks were looked at. Then again the _AGAIN that seem best.
_TURN = 16
_TURN_SHARE = 16
_TURN_MAX = 128
_TURN_BLOCKS = 4096
_AGAIN = 7
# CARRY_SHARE: pages copied because they are worth it, of pages stored. The budget saves up so much of the pool at most,
# and two segments at least. With more, a pool that was just filled for the first time copies for seconds while writers
# wait for a free segment.
CARRY_SHARE = 0.14
_SAVED_SHARE = 1 / 64
_SAVED_SEGMENTS = 2


# Uses of a block: the tick of its last open, or of its creation; and the number of opens.
Use = tuple[int, int]


class Contents(NamedTuple):
    """The content of a closed segment."""

    uses: Sequence[Use]  # of its blocks, or of a sample of them
    live_share: float  # of its pages


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
    def stream_of(self, size: int) -> Stream:
        """The stream for a new block of `size` bytes."""
        ...

    def choose(
        self, closed: Sequence[int], contents: Callable[[int], Contents], budget: float, tick: int, count: int = 1
    ) -> list[int]:
        """The segments of `closed` that go, the first first: `count`, or fewer where there are not so many.

        contents() is asked of a bounded number of segments. budget: what may be carried over now, in segments; tick:
        the clock.
        """
        ...

    def carry(self, uses: Sequence[Use], budget: float, tick: int) -> list[int]:
        """Indexes of the blocks of a segment that are worth a copy, those worth most first.

        uses: in the order of their creation. Equal blocks keep their order: a chain's head is of use without its tail.
        """
        ...

    def gone(self, segment: int, lost: Contents, tick: int) -> None:
        """The segment was emptied. lost: the blocks that were not carried over, and their share of the pages that were
        gained."""
        ...


class LeastLoss:
    """A block is worth its estimated chance of being used within the next tick. A segment costs the sum over its blocks
    of that worth, or of the price of a copy where that is less. The segment that costs least goes.

    The price follows from the loss of other segments by the page, and from the budget left.
    """

    def __init__(self) -> None:
        self._losses: dict[int, tuple[float, int]] = {}  # by segment: the loss by the page, and when it was weighed
        self._next = 0
        self._lost, self._gone = 0.0, 0  # running mean, by the page gained, of so many segments
        self._reached = list(_REACHED)
        self._factors = _factors(self._reached)

    def stream_of(self, size: int) -> Stream:
        return Stream.NEW

    def choose(
        self, closed: Sequence[int], contents: Callable[[int], Contents], budget: float, tick: int, count: int = 1
    ) -> list[int]:
        if not closed:
            return []
        price, losses = self._price(budget), self._losses

        def weigh(segment: int) -> int:
            uses, live_share = contents(segment)
            # Blocks of a burst are used at one tick, and so are worth the same.
            alike = Counter(uses)
            worths = zip(self._worths(list(alike), tick), alike.values(), strict=True)
            loss = sum(min(worth, price) * count for worth, count in worths)
            losses[segment] = loss * live_share / max(1, len(uses)), tick
            return len(uses)

        turn = min(len(closed), max(_TURN, min(_TURN_MAX, len(closed) // _TURN_SHARE)))
        weighed = blocks = 0
        while weighed < turn and (weighed < _TURN or blocks < _TURN_BLOCKS):
            blocks += weigh(closed[(self._next + weighed) % len(closed)])
            weighed += 1
        self._next = (self._next + weighed) % len(closed)
        # Segments weighed before are older now, and may have been used since.
        likely = nsmallest(_AGAIN + count, (s for s in closed if s in losses), key=losses.__getitem__)
        for segment in likely:
            if losses[segment][1] != tick:
                weigh(segment)
        return nsmallest(count, likely, key=losses.__getitem__)

    def carry(self, uses: Sequence[Use], budget: float, tick: int) -> list[int]:
        price = self._price(budget)
        worths = self._worths(uses, tick)
        return sorted((i for i, worth in enumerate(worths) if worth > price), key=lambda i: -worths[i])

    def gone(self, segment: int, lost: Contents, tick: int) -> None:
        self._losses.pop(segment, None)
        loss = sum(self._worths(lost.uses, tick)) * lost.live_share / max(1, len(lost.uses))
        # The mean of the first few is theirs alone. A mean that begins at 0 makes copies cheap: the budget goes on
        # blocks of no worth, and those in use are lost behind it.
        self._gone += 1
        self._lost += (loss - self._lost) * max(_SMOOTHING, 1 / self._gone)
        had = Counter(min(hits, _HITS_MAX + 1) for _, hits in lost.uses)
        for hits in range(_HITS_MAX, -1, -1):
            had[hits] += had[hits + 1]
        self._reached = [seen * _REACHED_KEPT + had[hits] for hits, seen in enumerate(self._reached)]
        self._factors = _factors(self._reached)

    def _price(self, budget: float) -> float:
        if budget <= 0 or not self._lost:  # nothing was lost yet: the worth of a page is unknown
            return float("inf")
        return _COPY_FACTOR * self._lost * (1 + _BUDGET_LOW / budget)

    def _worths(self, uses: Sequence[Use], tick: int) -> list[float]:
        """The worth of each block; only ratios mean something."""
        factors = self._factors
        return [
            factors[min(hits, _HITS_MAX)] * (((tick - used) & TICK_MASK) + _AGE_SOFT) ** _AGE_POWER
            for used, hits in uses
        ]  # fmt: skip


def _factors(reached: Sequence[float]) -> list[float]:
    """By hits: how much likelier the next hit is than the first of a block that was never hit."""
    first = (reached[1] + 1) / (reached[0] + 1)
    factors = []
    for hits in range(_HITS_MAX + 1):
        likelier = (reached[hits + 1] + 1) / (reached[hits] + 1) / first
        factors.append(max(1.0, min(1 + _HIT_WORTH_MAX * hits, likelier)))
    return factors
