"""Worths of blocks for eviction, as the data plane looks them up: by hits, and by ticks since the last use.

Which block is worth how much is decided in kvfs/store/eviction.py. Shape of a table: WORTH_CLASSES rows of worths, one
for each of AGES. A row is for the blocks of class_of(hits). Between two ages worths lie on a line.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import TypeAlias, cast

from kvfs._native import ffi, lib

WORTH_CLASSES = cast(int, lib.KVFS_WORTH_CLASSES)
AGES: tuple[int, ...] = tuple(lib.kvfs_worth_age(i) for i in range(lib.KVFS_WORTH_AGES))
# The clock of uses has 24 bits and goes round.
TICK_MASK = (1 << 24) - 1
_WEIGHT = struct.Struct("<dQ")
assert _WEIGHT.size == ffi.sizeof("struct kvfs_weight")
_PRICE_MAX = 3.0e38

# Uses of a block: the tick of its last use, or of its creation; and the number of hits.
Use: TypeAlias = tuple[int, int]


def class_of(hits: int) -> int:
    return cast(int, lib.kvfs_worth_class(hits))


class Worths:
    """A table. Only ratios of worths mean something."""

    def __init__(self, rows: Sequence[Sequence[float]]) -> None:
        assert len(rows) == WORTH_CLASSES and all(len(row) == len(AGES) for row in rows)
        self.table = ffi.new("struct kvfs_worths *", {"worths": rows})

    def of(self, uses: Sequence[Use], tick: int) -> list[float]:
        """The worth of each block."""
        words = ffi.new("uint32_t[]", [(used & TICK_MASK) << 8 | min(255, hits) for used, hits in uses])
        out = ffi.new("float[]", len(uses))
        lib.kvfs_worth(self.table, tick & TICK_MASK, words, len(uses), out)
        return cast(list[float], ffi.unpack(out, len(uses))) if uses else []


class Weights:
    """The loss of each segment of a pool, if it went now. To weigh them fills `all`."""

    def __init__(self, segments: int) -> None:
        self.count = segments
        self.all = ffi.new("struct kvfs_weight[]", segments)

    def weigh(self, worths: Worths, price: float, tick: int, uses: object, places: object, slots: int) -> None:
        """By blocks that are in no pool: `uint32_t uses[slots]` and `uint64_t places[slots]`, as kvfs_weigh() has
        them."""
        price = price_of(price)
        lib.kvfs_weigh(worths.table, price, tick & TICK_MASK, uses, places, slots, self.all, self.count)

    def by_page(self) -> list[float | None]:
        """By segment: the mean of what its blocks are worth, by the page. Copied ones are worth the price of a copy.
        A segment where no block begins has None."""
        return [loss / pages if pages else None for loss, pages in _WEIGHT.iter_unpack(ffi.buffer(self.all))]


def price_of(price: float) -> float:
    """As C has it: there is no infinite one."""
    return min(price, _PRICE_MAX)
