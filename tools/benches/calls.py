"""System calls of daemon and client, counted by strace."""

from __future__ import annotations

import contextlib
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

from benches.common import BenchError, Json, needs_program, number_at, wait_until
from benches.session import Bench

ATTACH_TIMEOUT_S = 10.0
FEW, MANY = 0.1, 0.3  # of the operations of a run: a traced call takes many times as long


def calls_an_operation(bench: Bench, pid: int, run: Callable[[float], Json], base: Path) -> Json:
    """Calls of the daemon `pid` and of the client for one operation of run(share of its operations).

    A short run is subtracted from a longer one, so a client's calls before its first operation fall out.
    """
    counts: list[dict[str, float]] = []
    for share in (FEW, MANY):
        with _traced(pid, base / "daemon.calls"), _client_traced(bench, base / "client.calls"):
            operations = number_at(run(share), "operations")
        counts.append(
            {"operations": operations, **{who: _total(base / f"{who}.calls") for who in ("daemon", "client")}}
        )
    few, many = counts
    more = many["operations"] - few["operations"]
    if more < 1:
        raise BenchError(f"{many['operations']:.0f} operations are too few to count their calls")
    return {who: (many[who] - few[who]) / more for who in ("daemon", "client")}


@contextlib.contextmanager
def _client_traced(bench: Bench, report: Path) -> Iterator[None]:
    bench.prefix = [needs_program("strace"), "-f", "-c", "-qq", "-o", report]
    try:
        yield
    finally:
        bench.prefix = []


@contextlib.contextmanager
def _traced(pid: int, report: Path) -> Iterator[None]:
    words = [needs_program("strace"), "-f", "-c", "-qq", "-o", str(report), "-p", str(pid)]
    process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        wait_until(
            lambda: process.poll() is not None or _all_traced(pid), f"strace of the daemon {pid}", ATTACH_TIMEOUT_S
        )
        if process.poll() is not None:
            raise BenchError(f"strace of the daemon {pid} ended with {process.returncode}")
        yield
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate()


def _all_traced(pid: int) -> bool:
    """Whether every thread has its tracer; io_uring's kernel threads can have none."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError):
            if (task / "comm").read_text().startswith("iou-"):
                continue
            if "\nTracerPid:\t0\n" in (task / "status").read_text():
                return False
    return True


def _total(report: Path) -> float:
    """Calls in strace's table: share of time, seconds, microseconds a call, calls, errors if any, name."""
    rows = [line.split() for line in report.read_text().splitlines()]
    return sum(int(row[3]) for row in rows if len(row) > 4 and row[0][:1].isdigit() and row[-1] != "total")
