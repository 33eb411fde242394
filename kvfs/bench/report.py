"""The report of a measure: one JSON document, and its text for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvfs.bench.engine import Measured
from kvfs.bench.limit import Limit, Seen, limit, rate, raw_limit
from kvfs.bench.plan import BLOCK_SIZES, Cell, Side, Work
from kvfs.status.numbers import table
from kvfs.units import counted, duration_text, format_size

Json = dict[str, object]
# Devices whose reads alone are so much slower than the fastest one's.
SLOW_SHARE = 0.8


@dataclass(slots=True)
class Outcome:
    """alone: bytes a second that each device reads by itself."""

    kind: str
    name: str
    cores: int
    seconds: float
    cells: dict[Cell, Measured] = field(default_factory=dict)
    alone: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def limits(outcome: Outcome) -> dict[Work, Limit]:
    """Of reads and of stores, in the largest blocks."""
    size = BLOCK_SIZES[-1]
    found = {}
    for work in (Work.READS, Work.STORES):
        raw = _seen(outcome, work, Side.RAW, size)
        ours = _seen(outcome, work, Side.NATIVE, size)
        if raw and ours:
            found[work] = limit(work, Side.NATIVE, size, ours, raw, outcome.cores)
        elif raw:
            found[work] = raw_limit(work, size, raw, outcome.cores)
    return found


def _seen(outcome: Outcome, work: Work, side: Side, size: int) -> list[Seen]:
    return [
        Seen(
            cell.depth,
            measured.blocks_per_s * size,
            measured.busy_s / measured.seconds / outcome.cores if measured.seconds else 0.0,
            measured.own_s / measured.seconds / outcome.cores if measured.seconds else 0.0,
            measured.thread_s / measured.seconds if measured.seconds else 0.0,
        )
        for cell, measured in sorted(outcome.cells.items(), key=lambda item: item[0].depth)
        if (cell.work, cell.side, cell.block_size) == (work, side, size)
    ]


def document(outcome: Outcome) -> Json:
    """Latencies in us, of calls; rates a second."""
    return {
        "kind": outcome.kind,
        "target": outcome.name,
        "cores": outcome.cores,
        "seconds": round(outcome.seconds, 1),
        "cells": [
            {
                "work": str(cell.work),
                "side": str(cell.side),
                "block_size": cell.block_size,
                "at_once": cell.depth,
                "blocks_per_s": round(measured.blocks_per_s, 1),
                **(
                    {} if cell.work is Work.LOOKUPS else {"bytes_per_s": round(measured.blocks_per_s * cell.block_size)}
                ),
                "p50_us": round(measured.percentile_ns(50) / 1e3, 2),
                "p99_us": round(measured.percentile_ns(99) / 1e3, 2),
                "misses": measured.misses,
                "cores_busy": round(measured.busy_s / measured.seconds, 2) if measured.seconds else 0.0,
                "cores_used": round(measured.own_s / measured.seconds, 2) if measured.seconds else 0.0,
            }
            for cell, measured in outcome.cells.items()
        ],
        **({"devices_alone_bytes_per_s": outcome.alone} if outcome.alone else {}),
        "limits": {str(work): {"cause": one.cause, "text": one.text} for work, one in limits(outcome).items()},
        "notes": outcome.notes,
    }


def render(outcome: Outcome) -> str:
    lines = [f"{outcome.name}: {duration_text(outcome.seconds)}, {counted(outcome.cores, 'core')}"]
    sides = [side for side in Side if any(cell.side is side for cell in outcome.cells)]
    for work in (Work.READS, Work.STORES):
        if any(cell.work is work for cell in outcome.cells):
            lines += ["", *_throughput(outcome, work, sides)]
    if any(cell.work is Work.LOOKUPS for cell in outcome.cells):
        lines += ["", *_lookups(outcome)]
    if outcome.alone:
        fastest = max(outcome.alone.values())
        rows = [
            [
                name,
                f"{rate(speed)} GB/s",
                "" if speed >= SLOW_SHARE * fastest else f"{speed / fastest:.2f} of the fastest",
            ]
            for name, speed in outcome.alone.items()
        ]
        lines += ["", "each device alone, reads", *table(rows, indent="  ")]
    lines.append("")
    lines += [f"Limit of {work}: {one.text}." for work, one in limits(outcome).items()]
    return "\n".join(lines)


def _throughput(outcome: Outcome, work: Work, sides: Sequence[Side]) -> list[str]:
    """Rates, and beside kvfs's the share of the raw one; then latencies."""
    head = [f"{work}, GB/s", "at once"]
    for side in sides:
        head += [str(side)] if side is Side.RAW else [str(side), "of raw"]
    head += [f"ms p50/p99: {side}" if side is sides[0] else str(side) for side in sides]
    rows = [head]
    for size in BLOCK_SIZES:
        cells = {(cell.side, cell.depth): one for cell, one in outcome.cells.items()
                 if (cell.work, cell.block_size) == (work, size)}  # fmt: skip
        for depth in sorted({depth for _, depth in cells}):
            raw = cells[Side.RAW, depth].blocks_per_s
            row = [f"blocks of {format_size(size)}", str(depth)]
            for side in sides:
                mine = cells[side, depth].blocks_per_s
                row.append(rate(mine * size))
                if side is not Side.RAW:
                    row.append(f"{mine / raw:.2f}" if raw else "-")
            rows.append([*row, *(_latency(cells[side, depth], 1e6) for side in sides)])
    return table(rows)


def _lookups(outcome: Outcome) -> list[str]:
    cells = {(cell.side, cell.depth): one for cell, one in outcome.cells.items() if cell.work is Work.LOOKUPS}
    sides = [side for side in Side if any(found is side for found, _ in cells)]
    rows = [[f"{Work.LOOKUPS}, 1000/s", "at once", *map(str, sides),
             *(f"us p50/p99: {side}" if side is sides[0] else str(side) for side in sides)]]  # fmt: skip
    for depth in sorted({depth for _, depth in cells}):
        rows.append([
            "", str(depth), *(rate(cells[side, depth].blocks_per_s * 1e6) for side in sides),
            *(_latency(cells[side, depth], 1e3) for side in sides),
        ])  # fmt: skip
    return table(rows)


def _latency(measured: Measured, unit_ns: float) -> str:
    return "/".join(f"{measured.percentile_ns(percent) / unit_ns:.3g}" for percent in (50, 99))


def misses_note(cells: Mapping[Cell, Measured]) -> list[str]:
    """Reads that found nothing, where they are more than a few: the figures are then of fewer bytes."""
    missed = sum(one.misses for one in cells.values())
    asked = missed + sum(one.blocks for cell, one in cells.items() if cell.work is not Work.STORES)
    if missed * 100 <= asked:
        return []
    return [f"{missed / asked:.0%} of what was read had been evicted meanwhile: the pool is full, and others store"]
