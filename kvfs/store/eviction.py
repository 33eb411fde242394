"""Eviction policy: which stream a block goes to, what its blocks are worth, and what a copy costs.

So it decides which segment goes next, and by their worths and a price which of its blocks are carried over (Looks in
kvfs/worth.py). Pure, to be replaced: it sees numbers, changes nothing, and knows neither index nor devices.
`tools/simulate` runs this very module on traces; docs/performance.md has the results.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from kvfs.pool.format import Stream
from kvfs.store.learning import Learner
from kvfs.worth import Table, Worths

# Blocks age by a clock of pages written, not of seconds: a block's place costs what could be written there. So nothing
# here depends on the size of a pool or the speed of its engines. The clock has so many ticks while as much is written
# as the pool holds.
TICKS_PER_POOL = 1024
# The newest segments, one in so many, go only when no other can. Files that were closed a moment ago and are about to
# be renamed lie there. New blocks may be read for the first time. In a stream with few writes, the newest
# segment may be the emptiest of all.
SPARED = 4
# A policy learns after so many; later after this share of what it has learnt from, as less would change little. Each
# time costs a millisecond, and a small pool that is written fast comes to many.
LEARN_TICKS = 16
_LEARN_SHARE = 64

# A copy costs a page written besides the page kept. So it must be worth this many times the loss of eviction by the
# page.
_COPY_FACTOR = 1.6
# The price of a copy rises as the budget runs out, and has doubled at so many segments left.
_BUDGET_LOW = 1.0
# Weight of one segment in the running mean of eviction's loss by the page: the last 20 count.
_SMOOTHING = 0.05
# An orphan is worth something: its client may fill the hole before it, and the chain is whole again.
_ORPHAN = 0.3
# CARRY_SHARE: pages copied because they are worth it, of pages stored; the second while writers wait for free segments,
# which each copy delays. The budget saves up so much of the pool at most, and two segments at least. With more, a pool
# that was just filled for the first time copies for seconds while writers wait.
CARRY_SHARE, CARRY_SHARE_BUSY = 0.14, 0.06
_SAVED_SHARE = 1 / 64
_SAVED_SEGMENTS = 2


class Lost(NamedTuple):
    """The blocks that an eviction dropped, copied ones excluded."""

    worth: float  # of all of them
    blocks: int
    share: float  # of the pages that were gained by it


class CopyBudget:
    """Budget of copies that are made because they are worth it. In any unit: the pool counts pages, the simulator
    blocks."""

    def __init__(self, pool_size: int, segment_size: int) -> None:
        self._most = max(pool_size * _SAVED_SHARE, _SAVED_SEGMENTS * segment_size)
        self._left, self._stored = 0.0, 0

    def left(self, stored: int, share: float = CARRY_SHARE) -> int:
        """stored: all writes but copies. share: of those since the last call that may be copied besides."""
        self._left = min(self._most, self._left + (stored - self._stored) * share)
        self._stored = stored
        return int(self._left)

    def spend(self, size: int) -> None:
        self._left -= size


class EvictionPolicy(Protocol):
    """The segment goes whose blocks are worth least, by the page. Blocks worth more than the price of a copy are
    carried over."""

    def stream_of(self, size: int) -> Stream:
        """The stream for a new block of `size` bytes."""
        ...

    @property
    def learn_ticks(self) -> int:
        """After how many ticks learn() is to be called next."""
        ...

    def learn(self, uses: Table, there: Table, ticks: int) -> None:
        """Called after learn_ticks. uses: since the last time, by the class and age that blocks had before, in the
        shape of a table of worths. there: the blocks and ghosts of that class and age, times ticks."""
        ...

    def pack(self) -> bytes:
        """All that was learnt, for unpack() after a restart."""
        ...

    def unpack(self, data: bytes) -> bool:
        """False: it is not as pack() makes it, and nothing has changed."""
        ...

    def worths(self) -> Worths:
        """The worth of blocks now, by hits and age in ticks."""
        ...

    def price(self, budget: float) -> float:
        """A block must be worth more than that for a copy. budget: of copies that may be made now, in segments."""
        ...

    def gone(self, lost: Lost) -> None:
        """A segment was emptied."""
        ...


class LeastLoss:
    """Blocks have their learnt worths (learning.py). The price follows from the loss of the segments that went by the
    page, and from the budget left."""

    def __init__(self) -> None:
        self._lost, self._gone = 0.0, 0  # running mean, by the page gained, of so many segments
        self._learner = Learner()
        self._learnt_ticks = 0
        self._worths = Worths(self._learner.values(), _ORPHAN)

    @property
    def learn_ticks(self) -> int:
        return max(LEARN_TICKS, self._learnt_ticks // _LEARN_SHARE)

    def stream_of(self, size: int) -> Stream:
        return Stream.NEW

    def learn(self, uses: Table, there: Table, ticks: int) -> None:
        self._learnt_ticks += ticks
        self._learner.learn(uses, there, ticks)
        self._worths = Worths(self._learner.values(), _ORPHAN)

    def pack(self) -> bytes:
        return self._learner.pack()

    def unpack(self, data: bytes) -> bool:
        if not self._learner.unpack(data):
            return False
        self._worths = Worths(self._learner.values(), _ORPHAN)
        return True

    def worths(self) -> Worths:
        return self._worths

    def price(self, budget: float) -> float:
        if budget <= 0 or not self._lost:  # nothing was lost yet: the worth of a page is unknown
            return float("inf")
        return _COPY_FACTOR * self._lost * (1 + _BUDGET_LOW / budget)

    def gone(self, lost: Lost) -> None:
        loss = lost.worth * lost.share / max(1, lost.blocks)
        # The mean of the first few is theirs alone. A mean that begins at 0 makes copies cheap: the budget goes on
        # blocks of no worth, and those in use are lost behind it.
        self._gone += 1
        self._lost += (loss - self._lost) * max(_SMOOTHING, 1 / self._gone)
