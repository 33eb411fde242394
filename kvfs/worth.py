"""Worths of blocks for eviction, as the data plane looks them up: by hits, and by ticks since the last use.

Which block is worth how much is decided in kvfs/store/eviction.py. Shape of a table: WORTH_CLASSES rows of numbers, one
for each of AGES. A row is for the blocks of class_of(hits). Between two ages worths lie on a line.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias, cast

from kvfs._native import ffi, lib

WORTH_CLASSES = cast(int, lib.KVFS_WORTH_CLASSES)
AGES: tuple[int, ...] = tuple(lib.kvfs_worth_age(i) for i in range(lib.KVFS_WORTH_AGES))
# The clock of uses has 24 bits and goes round.
TICK_MASK = (1 << 24) - 1
# Blocks that are done with have this age, or more; no other grows so old: it takes 4,096 pools' worth of writes.
DONE_AGE = cast(int, lib.KVFS_DONE_AGE)
_PRICE_MAX = 3.0e38

Table: TypeAlias = Sequence[Sequence[float]]


class Use(NamedTuple):
    """Uses of a block: the tick of its last use, or of its creation; and the number of hits."""

    tick: int
    hits: int


def class_of(hits: int) -> int:
    return cast(int, lib.kvfs_worth_class(hits))


def word_of(use: tuple[int, int]) -> int:
    """As C has a use."""
    tick, hits = use
    return (tick & TICK_MASK) << 8 | min(255, hits)


class Worths:
    """A table, and what orphans are worth of it. Only ratios of worths mean something."""

    def __init__(self, rows: Table, orphan: float = 1.0) -> None:
        assert len(rows) == WORTH_CLASSES and all(len(row) == len(AGES) for row in rows)
        self.table = ffi.new("struct kvfs_worths *", {"worths": rows, "orphan": orphan})

    def of(self, uses: Sequence[tuple[int, int]], tick: int, orphans: Sequence[bool] | None = None) -> list[float]:
        """The worth of each block."""
        words, out = ffi.new("uint32_t[]", list(map(word_of, uses))), ffi.new("float[]", len(uses))
        marks = ffi.NULL if orphans is None else ffi.new("uint8_t[]", list(map(int, orphans)))
        lib.kvfs_worth(self.table, tick & TICK_MASK, words, marks, len(uses), out)
        return cast(list[float], ffi.unpack(out, len(uses))) if uses else []


class Ages:
    """Numbers of blocks, or of their uses, in the shape of a table: at ages from each of AGES to the next."""

    def __init__(self) -> None:
        self.all = ffi.new("struct kvfs_ages *")

    def count(self, uses: object, count: int, tick: int) -> None:
        """Add `uint32_t uses[count]`."""
        lib.kvfs_worth_count(self.all, tick & TICK_MASK, uses, count)

    def take(self) -> Table:
        """The numbers; from now on they are 0."""
        numbers = [ffi.unpack(row, len(AGES)) for row in self.all.counts]
        ffi.memmove(self.all, bytes(ffi.sizeof(self.all[0])), ffi.sizeof(self.all[0]))
        return numbers


class Weights:
    """The loss of each segment of a pool, if it went now. To weigh them fills `all` and `ages`."""

    def __init__(self, segments: int) -> None:
        self.count = segments
        self.all = ffi.new("struct kvfs_weight[]", segments)
        self.ages = Ages()
        self._losses = ffi.new("double[]", segments)

    def weigh(self, worths: Worths, price: float, tick: int, blocks: object) -> None:
        """By blocks that are in no pool: a `struct kvfs_weighed *`."""
        price = price_of(price)
        lib.kvfs_weigh(worths.table, price, tick & TICK_MASK, blocks, self.all, self.count, self.ages.all)

    def losses_by_record(self) -> list[float]:
        """By segment: what goes with it, by the record that is gained in the block table; infinite where none is."""
        return [w.loss / w.count if w.count else float("inf") for w in self.all]

    def losses(self, area: int) -> list[float]:
        """By segment of a number of pages: the loss with it, by the page that is gained (kvfs_losses)."""
        lib.kvfs_losses(self.all, self.count, area, self._losses)
        return cast(list[float], ffi.unpack(self._losses, self.count))


def price_of(price: float) -> float:
    """As C has it: there is no infinite one."""
    return min(price, _PRICE_MAX)
