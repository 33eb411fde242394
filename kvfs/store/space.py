"""How much the pool holds, and how much of it may be open or being written at one time."""

from __future__ import annotations

from dataclasses import dataclass
from errno import EIO, ENOSPC

from kvfs.plane import Plane
from kvfs.store.segments import Segments
from kvfs.store.shares import PINNED, Shares
from kvfs.types import PAGE_SIZE


@dataclass(frozen=True, slots=True)
class Space:
    """Bytes of the pool: its size, live blocks and slabs, and of these the pinned ones and slabs, which eviction leaves
    alone. And inodes, of which eviction cannot take `inodes_kept`."""

    size: int
    used: int
    pinned: int
    slabs: int
    inodes: int
    inodes_kept: int
    inodes_max: int


class SpaceLimit:
    """The bytes that users may have open or write. Slabs and reservations enter here what they hold."""

    def __init__(self, segments: Segments, plane: Plane, shares: Shares) -> None:
        self._segments, self._plane, self._shares = segments, plane, shares
        self.slab_segments = 0
        self.reserved_pages = 0

    def update(self) -> None:
        """Set what may be open or being written at one time: all that eviction can make room for, less pinned and
        reserved pages.

        A tenth is left for the tails of segments and for headers. So a write fails while the close after it still
        succeeds.
        """
        assert self.slab_segments >= 0 and self.reserved_pages >= 0
        count = self._segments.usable
        segments = max(count - self._segments.reserve - 5, count // 2) - self.slab_segments
        self._shares.resize(count * self._segments.area * PAGE_SIZE)
        self._shares.notify()
        pinned = self._shares.firm(PINNED) // PAGE_SIZE
        pages = segments * self._segments.area * 9 // 10 - pinned - self.reserved_pages
        self._plane.set_space(max(0, pages) * PAGE_SIZE, ENOSPC if count else EIO)
