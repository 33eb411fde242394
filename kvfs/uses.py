"""Uses of a plane's blocks, which order eviction: their words, chains and ghosts (native/src/content/uses.c)."""

from __future__ import annotations

import os
from array import array
from collections.abc import Sequence
from typing import Any, cast

from kvfs._native import ffi, lib
from kvfs.chains import ChainStatistics
from kvfs.errors import KvfsError
from kvfs.lent import lent
from kvfs.types import InodeNumber
from kvfs.worth import TICK_MASK, Ages, Weights, Worths, price_of


class Uses:
    """Of one plane. Inodes that are not there are passed over."""

    def __init__(self, plane: Any) -> None:
        """plane: a struct kvfs_plane *, which lives while calls are made."""
        self._plane = plane

    def of(self, inodes: Sequence[int]) -> list[tuple[int, int]]:
        """For each inode: the tick of its last use, and hits: opens since the mount, 255 at most.

        The creation is a use, but no hit. A block that existed at the mount begins with the age of its segment (begin).
        (0, 0) for an inode that is not there.
        """
        if not inodes:
            return []
        words = ffi.new("uint32_t[]", len(inodes))
        lib.kvfs_inode_uses(self._plane, ffi.new("uint64_t[]", inodes), len(inodes), words)
        return [(word >> 8, word & 0xFF) for word in ffi.unpack(words, len(inodes))]

    def begin(self, ages: Sequence[int]) -> None:
        """All blocks were used so long ago, by the segment in which they begin; the clock is at 0."""
        lib.kvfs_uses_begin(self._plane, ffi.new("uint32_t[]", ages), len(ages))

    def tick(self, tick: int) -> None:
        """The time of uses from now on; 24 bits."""
        lib.kvfs_set_tick(self._plane, tick)

    def touch(self, inodes: Sequence[int], *, found: bool = True) -> None:
        """These are used now; `found`: they were read, which is a hit for each. Raises KvfsError."""
        asked = lent(array("Q", inodes), "uint64_t[]")
        error = lib.kvfs_inode_touch(self._plane, asked, len(inodes), found)
        if error < 0:
            raise KvfsError(f"block table: touch: {os.strerror(-error)}")

    def told(self, inodes: array[int], budget: int, cost: int, *, found: bool) -> int:
        """As touch() of these (uint64_t), by a report: while `budget` bytes last. A block costs a fixed amount, and a
        found one its size, too. Returns what was used up."""
        asked = lent(inodes, "uint64_t[]")
        return budget - cast(int, lib.kvfs_inode_told(self._plane, asked, len(inodes), found, budget, cost))

    def done(self, inodes: Sequence[int]) -> None:
        """These are no longer needed, says a user."""
        lib.kvfs_inode_done(self._plane, lent(array("Q", inodes), "uint64_t[]"), len(inodes))

    def follow(self, inode: int, parent: int) -> None:
        """The block is the one behind `parent` in its chain."""
        lib.kvfs_inode_follow(self._plane, inode, parent)

    def parent(self, inode: int) -> InodeNumber | None:
        """The block before it in its chain; None: that is not known, or not there."""
        found = lib.kvfs_inode_parent(self._plane, inode)
        return InodeNumber(found) if found > 0 else None

    def chains(self) -> ChainStatistics:
        """Of blocks whose parents are known, and of ghosts."""
        out = ffi.new("struct kvfs_chains_statistics *")
        lib.kvfs_plane_chains(self._plane, out)
        return ChainStatistics.of(out)

    def weigh(self, weights: Weights, worths: Worths, price: float, tick: int) -> None:
        """Weigh all segments by their blocks, and count these. It reads what changes meanwhile: in any thread, while
        the plane lives."""
        lib.kvfs_segments_weigh(
            self._plane, worths.table, price_of(price), tick & TICK_MASK, weights.all, weights.count, weights.ages.all
        )

    def count_ghosts(self, into: Ages, tick: int) -> None:
        """Add the ghosts of evicted blocks. In any thread, while the plane lives, and in no step."""
        lib.kvfs_ghosts_count(self._plane, tick & TICK_MASK, into.all)

    def take(self, into: Ages) -> None:
        """Uses since the last time, by the class and age that their blocks had before."""
        lib.kvfs_used_take(self._plane, into.all)
