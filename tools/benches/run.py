"""`tools/bench`: the command line, and the cases that it asks for."""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from benches import results
from benches.cases import BOTH, CASES
from benches.common import (
    DEVICE_COUNT,
    FULL,
    KIB,
    MIB,
    QUICK,
    REPOSITORY,
    BenchError,
    parse_json,
)
from benches.report import render, render_markdown, size_text
from benches.rig import Rig
from benches.session import Bench
from kvfs.errors import KvfsError, UsageError
from kvfs.units import parse_size

BUSY_MAX = 256


def run_cases(bench: Bench, cases: Sequence[str], devices: Sequence[str], base: Path) -> None:
    """The cases on each kind of devices, in the order of CASES; `million` on larger devices of its own."""
    for kind in devices:
        wanted = [name for name, case in CASES.items() if name in cases and kind in case.devices]
        # Header and data of 4 KiB each, and room so that nothing is evicted; zram keeps little of packable data.
        million_size = max(bench.scale.million * 8 * KIB * 3 // 2 // DEVICE_COUNT, 64 * MIB) // MIB * MIB
        for names, size in (
            ([name for name in wanted if name != "million"], bench.scale.device_size),
            ([name for name in wanted if name == "million"], million_size),
        ):
            if not names:
                continue
            rig = Rig(bench, kind, base / f"{kind}-{names[0]}", size)
            try:
                for name in names:
                    bench.guarded(name, kind, functools.partial(CASES[name].run, rig))
            finally:
                rig.close()


@contextlib.contextmanager
def computing(count: int) -> Iterator[None]:
    """Processes that only compute, as an engine does."""
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            process = stack.enter_context(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
            stack.callback(process.kill)
        yield


def chosen(text: str, known: Sequence[str], what: str) -> list[str]:
    names = [name for name in text.split(",") if name]
    for name in names:
        if name not in known:
            raise UsageError(f"--{what}: {name!r} is none of {', '.join(known)}")
    if not names:
        raise UsageError(f"--{what}: names none of {', '.join(known)}")
    return names


class Parser(argparse.ArgumentParser):
    """Reports a wrong command line in one line and exits with 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (try {self.prog} --help)\n")


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        prog="tools/bench",
        description="Measure kvfs against its peers; docs/internals/benches.md says what each case compares.",
        allow_abbrev=False,
    )
    # A million blocks take minutes, so this case runs only by name, or with --quick.
    parser.add_argument("--only", metavar="CASE,...", help=f"cases: {', '.join(CASES)} (default: all but million)")
    parser.add_argument("--devices", metavar="KIND,...", default=",".join(BOTH), help="zram, files (default: both)")
    parser.add_argument("--rounds", type=int, metavar="N", help=f"default {FULL.rounds}, with --quick {QUICK.rounds}")
    parser.add_argument("--busy", type=int, metavar="N", default=0, help="beside N processes that only compute")
    parser.add_argument("--quick", action="store_true", help="toy sizes: does everything still work?")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write the JSON document there")
    parser.add_argument(
        "--markdown", type=Path, metavar="FILE", help="measure nothing: print the table of this JSON document"
    )
    parser.add_argument(
        "--results", nargs="?", const="", metavar="PATTERN", help="measure nothing: print earlier results that match"
    )
    parser.add_argument(
        "--directory", type=Path, metavar="DIR", help="where files as devices are made (default build/bench)"
    )
    parser.add_argument(
        "--trace", type=Path, metavar="FILE", help="what `replay` replays (with --quick one is invented)"
    )
    parser.add_argument("--plots", type=Path, metavar="DIR", help="draw `replay` there")
    size = size_text(FULL.replay_block)
    parser.add_argument("--replay-block", metavar="SIZE", help=f"of `replay`; as many bytes a round (default {size})")
    parser.add_argument("--client", type=Path, default=REPOSITORY / "build/bench/bench_client", help=argparse.SUPPRESS)
    parser.add_argument("--peer", type=Path, default=REPOSITORY / "build/peers/passthrough_hp", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the bench; 0 if every case ran or was skipped for a reason, however fast it was."""
    try:
        return _main(_arguments(list(sys.argv[1:] if argv is None else argv)))
    except UsageError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    except KvfsError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1


def _print_results(pattern: str) -> int:
    """Print the results that match; 1 if there are none."""
    try:
        text = results.render(results.load(), pattern)
    except re.error as error:
        raise UsageError(f"--results: {pattern}: {error}") from error
    if not text:
        raise BenchError(f"--results: no result matches {pattern}")
    print(text)
    return 0


def _main(arguments: argparse.Namespace) -> int:
    if arguments.results is not None:
        return _print_results(arguments.results)
    if arguments.markdown is not None:
        try:
            print(render_markdown(parse_json(arguments.markdown.read_text(), str(arguments.markdown))))
        except OSError as error:
            raise BenchError(f"{error.filename}: {error.strerror}") from error
        return 0
    default = [name for name in CASES if arguments.quick or name != "million"]
    cases = chosen(arguments.only, list(CASES), "only") if arguments.only is not None else default
    devices = chosen(arguments.devices, BOTH, "devices")
    scale = QUICK if arguments.quick else FULL
    if arguments.rounds is not None:
        if arguments.rounds < 1:
            raise UsageError("--rounds: at least 1")
        scale = replace(scale, rounds=arguments.rounds)
    if not 0 <= arguments.busy <= BUSY_MAX:
        raise UsageError(f"--busy: 0 to {BUSY_MAX}")
    scale = replace(scale, busy=arguments.busy)
    if arguments.replay_block is not None:
        block = parse_size(arguments.replay_block, what="--replay-block")
        requests = max(1, scale.replay_requests * scale.replay_block // max(1, block))
        scale = replace(scale, replay_block=block, replay_requests=requests)
    if arguments.trace is not None and not arguments.trace.is_file():
        raise UsageError(f"--trace: {arguments.trace}: no such file")
    directory = arguments.directory or REPOSITORY / "build/bench"
    directory.mkdir(parents=True, exist_ok=True)
    bench = Bench(
        scale,
        client=arguments.client,
        passthrough_hp=arguments.peer,
        quick=arguments.quick,
        trace=arguments.trace and arguments.trace.resolve(),
        plots=arguments.plots,
    )
    base = Path(tempfile.mkdtemp(prefix="run-", dir=directory))
    try:
        with computing(arguments.busy):
            run_cases(bench, cases, devices, base)
    finally:
        shutil.rmtree(base, ignore_errors=True)
    document = bench.document()
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(document, indent=2) + "\n")
    print(render(document))
    return 1 if bench.failed else 0
