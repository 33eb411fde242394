"""The verb that measures one's own hardware: bench."""

from __future__ import annotations

import argparse
import os
import time
from typing import TYPE_CHECKING

from kvfs.cli import arguments
from kvfs.cli.arguments import Verbs
from kvfs.cli.output import as_json, emit, note, note_lines
from kvfs.cli.progress import Progress
from kvfs.errors import UsageError

if TYPE_CHECKING:
    from kvfs.bench.report import Outcome


def add_bench(verbs: Verbs) -> None:
    sub = verbs.add("bench", _bench, "measure a pool, a directory or devices, and say where the limit is")
    sub.add_argument(
        "targets", metavar="POOL|MOUNTPOINT|DIR|DEVICE", nargs="+",
        help="a pool that is mounted, a directory, or devices that are measured together",
    )  # fmt: skip
    sub.add_argument(
        "--seconds", type=arguments.seconds, default=60.0, metavar="S",
        help="of measuring, in all; some more to prepare and to clean up (default 60)",
    )  # fmt: skip
    sub.add_argument(
        "--write", action="store_true",
        help="write to the devices too: what lies there is lost; one that holds something, or is used, is refused",
    )  # fmt: skip


def _bench(args: argparse.Namespace) -> int:
    from kvfs.bench.plan import SECONDS_MIN
    from kvfs.bench.report import document, render

    if args.seconds < SECONDS_MIN:
        raise UsageError(f"--seconds: {args.seconds:g}; at least {SECONDS_MIN:g} are needed for so many cells")
    outcome = _measure(args)
    emit(args, document(outcome), lambda: "\n".join([render(outcome), *note_lines(outcome.notes)]))
    return 0


def _measure(args: argparse.Namespace) -> Outcome:
    from kvfs.bench.engine import Measured, Runner
    from kvfs.bench.plan import BLOCK_SIZES, DEPTHS, ROUNDS, Cell, Side, Work, plan
    from kvfs.bench.report import Outcome, misses_note
    from kvfs.bench.targets import DevicesTarget, target_of

    target = target_of(args.targets, write=args.write)
    with Progress() as progress, target:
        if not as_json(args):
            note(f"{target.name}: {target.does}")
        wanted = plan(target.sides, target.works, args.seconds)
        began = time.monotonic()
        # Cleaning up takes time too: what is told is the share of runs, and their speed so far.
        done = 0

        def tick() -> None:
            left_s = (wanted.runs - done) * wanted.cell_s
            progress("measuring", done, wanted.runs, least_s=left_s)

        runner = Runner(tick, target.daemon)
        outcome = Outcome(target.kind, target.name, len(os.sched_getaffinity(0)), 0.0, notes=target.notes)
        prepared = 0
        for row in wanted.rows:
            size = row[0].block_size
            if size != prepared and (row[0].work is not Work.STORES or Side.NATIVE not in target.sides):
                target.prepare(runner, size, args.seconds)
                prepared = size
            for cell in row * ROUNDS:
                outcome.cells.setdefault(cell, Measured()).add(target.measure(runner, cell, wanted.cell_s))
                done += 1
        if isinstance(target, DevicesTarget) and len(target.names) > 1:
            cell = Cell(Work.READS, Side.RAW, BLOCK_SIZES[-1], DEPTHS[1])
            alone = target.alone(runner, cell, wanted.cell_s)
            outcome.alone = {name: one.blocks_per_s * cell.block_size for name, one in alone.items()}
        outcome.seconds = time.monotonic() - began
        outcome.notes = [*target.notes, *misses_note(outcome.cells)]
    return outcome
