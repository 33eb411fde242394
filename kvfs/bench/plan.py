"""The cells of a measure: each kind of work, by each side, with blocks of two sizes and a number at once. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

BLOCK_SIZES = (64 << 10, 2 << 20)
DEPTHS = (1, 8, 32)
# Each cell runs so many times, in turn with the others of its row: a machine is not the same all minute long.
ROUNDS = 2
# A call of libkvfs stores so many blocks at most.
BATCH_MAX = 8
# Stores end at so many bytes, or at this share of the pool or of what is free.
STORE_MAX = 2 << 30
STORE_SHARE = 8
# The share of the time that preparation may take beside, for each set of blocks.
PREPARE_SHARE = 0.05
PREPARE_MIN_S = 0.5
SECONDS_MIN = 3.0


class Work(StrEnum):
    STORES = "stores"
    READS = "reads"
    LOOKUPS = "look-ups"


class Side(StrEnum):
    RAW = "raw"
    NATIVE = "libkvfs"
    FILES = "files"


@dataclass(frozen=True, slots=True)
class Cell:
    """depth: blocks under way at once."""

    work: Work
    side: Side
    block_size: int
    depth: int

    @property
    def batch(self) -> int:
        """Blocks of one call: connectors store by libkvfs in batches."""
        return min(self.depth, BATCH_MAX) if (self.work, self.side) == (Work.STORES, Side.NATIVE) else 1

    @property
    def threads(self) -> int:
        return self.depth // self.batch


@dataclass(frozen=True, slots=True)
class Plan:
    """cells: in the order in which they run, each ROUNDS times in its row. cell_s: the time of one run."""

    rows: tuple[tuple[Cell, ...], ...]
    cell_s: float

    @property
    def runs(self) -> int:
        return ROUNDS * sum(len(row) for row in self.rows)


def plan(sides: Sequence[Side], works: Sequence[Work], seconds: float) -> Plan:
    """Rows of cells that are compared with each other, for a number of seconds in all."""
    rows = []
    for block_size in BLOCK_SIZES:
        for work in (work for work in Work if work in works):
            # A look-up has no size: those of the first blocks are enough. Without a filesystem there is none.
            compared = [side for side in sides if work is not Work.LOOKUPS or side is not Side.RAW]
            if work is not Work.LOOKUPS or block_size == BLOCK_SIZES[0]:
                rows += [tuple(Cell(work, side, block_size, depth) for side in compared) for depth in DEPTHS]
    count = ROUNDS * sum(len(row) for row in rows)
    return Plan(tuple(rows), seconds / count)


def store_limit(room: int) -> int:
    """Bytes of the set of blocks that is read, where a pool or a filesystem has this much room. A cell stores as many
    in addition."""
    return min(STORE_MAX, room // STORE_SHARE) // 2


def prepare_s(seconds: float) -> float:
    return max(PREPARE_MIN_S, PREPARE_SHARE * seconds)
