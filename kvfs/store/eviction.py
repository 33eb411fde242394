"""Eviction policy: which stream a block goes to, which segment goes next, and which of its blocks are carried over.

Pure, to be replaced: it sees numbers, changes nothing, and knows neither index nor devices. `tools/simulate` runs this
very module on traces; docs/performance.md has what came out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from heapq import nsmallest
from typing import NamedTuple, Protocol

# Blocks age by a clock of pages written, not of seconds: what a block's place costs is what could be written there. So
# nothing here depends on the size of a pool or the speed of its engines. As much as the pool holds is so many ticks.
TICKS_PER_POOL = 1024
# The clock has 24 bits and goes round, after 16,384 times the pool.
TICK_MASK = (1 << 24) - 1

# The chance of a next use falls with the time since the last: as 1/age where popularity alone decides, faster where
# blocks belong to conversations that end. Between the two.
_AGE_POWER = -1.5
# Some 2% of the pool: ages below say only that a burst is not over.
_AGE_SOFT = 20
# Each use so far makes the next one likelier by the first's worth, as far as that goes on: not beyond the third.
_HIT_WORTH = 1.0
_HITS_MAX = 3
# A copy costs a page written besides the page kept: it has to be worth so much more than what eviction loses a page.
_COPY_FACTOR = 1.5
# The price rises as the budget runs out, so that it is there for what comes: doubled at so many segments left.
_BUDGET_LOW = 0.3
# Of what a segment costs, in the running mean of what eviction loses a page: the last 20 count.
_SMOOTHING = 0.05
# How many segments are weighed for one that goes: the next in turn, and those that seem best.
_TURN = 16
_AGAIN = 8


class Stream(IntEnum):
    NEW = 0
    CARRIED = 1
    CLIENT = 2  # written by native clients themselves


# How a block was used: the tick of its last open, or of its creation; and how many opens there were since that.
Use = tuple[int, int]


class Contents(NamedTuple):
    """What lies in a closed segment."""

    uses: Sequence[Use]  # of its blocks, or of a sample of them
    live_share: float  # of its pages


class EvictionPolicy(Protocol):
    def stream_of(self, size: int) -> Stream:
        """Where a new block of `size` bytes goes."""
        ...

    def choose(
        self, closed: Sequence[int], contents: Callable[[int], Contents], budget: float, tick: int
    ) -> int | None:
        """The segment of `closed` that goes; None if that is empty.

        contents() is asked of a bounded number of segments. budget: what may be carried over now, in segments; tick:
        the clock.
        """
        ...

    def carry(self, uses: Sequence[Use], budget: float, tick: int) -> list[int]:
        """Indexes of the blocks of a segment that are worth a copy, those worth most first.

        uses: in the order of their creation. Of equals the first is first: a chain's head is of use without its tail.
        """
        ...

    def gone(self, segment: int, lost: Contents, tick: int) -> None:
        """The segment was emptied. lost: what was not carried over, and its share of the pages that were gained."""
        ...


class LeastLoss:
    """A block is worth its estimated chance of being used within the next tick; a segment what is lost with it: of each
    block its worth, or the price of a copy where that is less. The one of least loss goes.

    The price follows from what is lost elsewhere, by the page, and from how much may still be copied.
    """

    def __init__(self) -> None:
        self._losses: dict[int, tuple[float, int]] = {}  # by segment: a page's, and when it was weighed
        self._next = 0
        self._lost = 0.0  # by the page of what was gained: running mean

    def stream_of(self, size: int) -> Stream:
        return Stream.NEW

    def choose(
        self, closed: Sequence[int], contents: Callable[[int], Contents], budget: float, tick: int
    ) -> int | None:
        if not closed:
            return None
        price, losses = self._price(budget), self._losses

        def weigh(segment: int) -> float:
            uses, live_share = contents(segment)
            loss = sum(min(worth, price) for worth in _worths(uses, tick)) * live_share / max(1, len(uses))
            losses[segment] = loss, tick
            return loss

        for i in range(min(_TURN, len(closed))):
            weigh(closed[(self._next + i) % len(closed)])
        self._next = (self._next + _TURN) % len(closed)
        # What was weighed before may have been used since, and is older.
        likely = nsmallest(_AGAIN, (s for s in closed if s in losses), key=losses.__getitem__)
        return min(likely, key=lambda s: losses[s][0] if losses[s][1] == tick else weigh(s))

    def carry(self, uses: Sequence[Use], budget: float, tick: int) -> list[int]:
        price = self._price(budget)
        worths = _worths(uses, tick)
        return sorted((i for i, worth in enumerate(worths) if worth > price), key=lambda i: -worths[i])

    def gone(self, segment: int, lost: Contents, tick: int) -> None:
        self._losses.pop(segment, None)
        loss = sum(_worths(lost.uses, tick)) * lost.live_share / max(1, len(lost.uses))
        self._lost += (loss - self._lost) * _SMOOTHING

    def _price(self, budget: float) -> float:
        if budget <= 0:
            return float("inf")
        return _COPY_FACTOR * self._lost * (1 + _BUDGET_LOW / budget)


_HIT_FACTORS = [1 + _HIT_WORTH * min(hits, _HITS_MAX) for hits in range(256)]


def _worths(uses: Sequence[Use], tick: int) -> list[float]:
    return [_HIT_FACTORS[hits] * (((tick - used) & TICK_MASK) + _AGE_SOFT) ** _AGE_POWER for used, hits in uses]
