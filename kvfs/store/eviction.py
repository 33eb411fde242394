"""Eviction policy: which stream a block goes to, which segment goes next, and which of its blocks are carried over.

Pure and small, to be replaced: it sees numbers, changes nothing, and knows neither index nor devices. Simulated on the
real trace with 100 to 500 segments, choosing the segment with the least live value among the oldest of each stream beat
plain FIFO and two-stream S3-FIFO.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

_STEPS = 8


class Stream(IntEnum):
    NEW = 0
    CARRIED = 1
    CLIENT = 2  # written by native clients themselves
    SLAB = 3  # whole segments, overwritten in place; never evicted as long as they are


@dataclass(frozen=True, slots=True)
class Candidate:
    """A closed segment that may be evicted."""

    segment: int
    stream: int
    age: int  # grows with every opening: the smallest is the oldest
    live_pages: int
    hot_pages: int  # of blocks that were hit since they were written or carried over


@dataclass(frozen=True, slots=True)
class BlockUse:
    """A block of a segment that is being evicted."""

    pages: int
    hits: int


class EvictionPolicy(Protocol):
    def stream_of(self, size: int) -> Stream:
        """Where a new block of `size` bytes goes."""
        ...

    def shortlist(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Those worth counting hits for. Their hot_pages is not known yet."""
        ...

    def victim(self, candidates: Sequence[Candidate]) -> Candidate | None: ...

    def carry(self, blocks: Sequence[BlockUse], budget_pages: int) -> list[int]:
        """Indexes of the blocks to carry over, of at most budget_pages together."""
        ...


class OldestLeastLive:
    """The least live value among the `depth` oldest segments of each stream; blocks hit since written are carried
    over."""

    def __init__(self, depth: int = 8, hot_weight: int = 8) -> None:
        self._depth = depth
        self._hot_weight = hot_weight

    def stream_of(self, size: int) -> Stream:
        return Stream.NEW

    def shortlist(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        oldest: list[Candidate] = []
        for stream in Stream:
            of_stream = sorted((c for c in candidates if c.stream == stream), key=lambda c: c.age)
            oldest += of_stream[: self._depth]
        return oldest

    def victim(self, candidates: Sequence[Candidate]) -> Candidate | None:
        # In coarse steps: between nearly equal segments age decides, else the fullest of the old ones would never go.
        step = max(1, max((c.live_pages for c in candidates), default=0) // _STEPS)
        return min(
            candidates, key=lambda c: ((c.live_pages + self._hot_weight * c.hot_pages) // step, c.age), default=None
        )

    def carry(self, blocks: Sequence[BlockUse], budget_pages: int) -> list[int]:
        # Most hits a page first: a small block that is read often costs little to keep.
        hit = [i for i, block in enumerate(blocks) if block.hits]
        chosen: list[int] = []
        for i in sorted(hit, key=lambda i: (-blocks[i].hits / max(1, blocks[i].pages), i)):
            if blocks[i].pages <= budget_pages:
                budget_pages -= blocks[i].pages
                chosen.append(i)
        return chosen
