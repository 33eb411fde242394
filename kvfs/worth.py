"""Worths of blocks for eviction, as the data plane looks them up: by hits, and by ticks since the last use. And which
blocks of a segment stay when it is emptied.

Which block is worth how much is decided in kvfs/store/eviction.py. Shape of a table: WORTH_CLASSES rows of numbers, one
for each of AGES. A row is for the blocks of class_of(hits). Between two ages worths lie on a line.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NamedTuple, TypeAlias, cast

from kvfs._native import ffi, lib
from kvfs.types import InodeNumber

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


class ChooseBy(IntEnum):
    """enum kvfs_choose_by."""

    HELD = 0
    HITS = 1
    WORTH = 2


class Choice(NamedTuple):
    """Which blocks stay: numbers of those that are held, and of those that are kept for their worth."""

    held: list[InodeNumber]
    kept: list[InodeNumber]
    held_pages: int  # in all segments
    kept_pages: int  # of those kept for their worth, in the segment
    copied_pages: int  # of the same, in all segments
    lost: float  # the worth of those that go
    gone: int  # blocks that go
    busy: bool  # one cannot even be copied now: then nothing can be done


class Looks:
    """Blocks as eviction looks at them: `all` is a struct kvfs_look[], which the data plane fills. More of a block may
    be said there before one chooses."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.all: Any = ffi.new("struct kvfs_look[]", count)

    def choose(
        self, by: ChooseBy, worths: Worths | None, tick: int, price: float = 0.0, budget: int = 0, units: int = 0
    ) -> Choice:
        """Choose which blocks stay. worths: None: the blocks' are set already. price: a block must be worth more.
        budget: of pages to copy. units: the last one of those that blocks have. MemoryError."""
        out, copies = ffi.new("struct kvfs_choice *"), ffi.new("uint64_t[]", self.count)
        out.price, out.budget, out.tick, out.units, out.by = price, max(0, budget), tick & TICK_MASK, units, by
        table = ffi.NULL if worths is None else worths.table
        if lib.kvfs_looks_choose(table, self.all, self.count, out, copies) < 0:
            raise MemoryError(f"no memory to choose among {self.count} blocks")
        stay = cast(list[InodeNumber], ffi.unpack(copies, out.held + out.kept)) if out.held + out.kept else []
        return Choice(
            stay[: out.held], stay[out.held :], out.held_pages, out.kept_pages, out.copied_pages, out.lost, out.gone,
            out.busy > 0,
        )  # fmt: skip
