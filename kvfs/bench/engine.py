"""One cell, in C, in a thread with a stop flag; and how busy the machine is meanwhile."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from kvfs._native import ffi, lib
from kvfs.errors import KvfsError

BUCKETS: int = lib.KVFS_MEASURE_BUCKETS
TICK_S = 0.1
# Of /proc/stat and /proc/PID/task/TID/stat.
_TICKS_S: int = os.sysconf("SC_CLK_TCK")


@dataclass(slots=True)
class Measured:
    """One or more runs of a cell. busy_s: of all cores; own_s: by this process and the daemon; thread_s: by the thread
    of these that used most. histogram: operations by latency, as kvfs_measure.h has it."""

    blocks: int = 0
    misses: int = 0
    seconds: float = 0.0
    busy_s: float = 0.0
    own_s: float = 0.0
    thread_s: float = 0.0
    histogram: list[int] = field(default_factory=lambda: [0] * BUCKETS)

    def add(self, other: Measured) -> None:
        self.blocks += other.blocks
        self.misses += other.misses
        self.seconds += other.seconds
        self.busy_s += other.busy_s
        self.own_s += other.own_s
        self.thread_s += other.thread_s
        self.histogram = [a + b for a, b in zip(self.histogram, other.histogram, strict=True)]

    @property
    def blocks_per_s(self) -> float:
        return self.blocks / self.seconds if self.seconds else 0.0

    def percentile_ns(self, percent: float) -> float:
        """The latency that `percent` of the operations stayed under; 0 without any."""
        wanted, below = sum(self.histogram) * percent / 100, 0
        for bucket, here in enumerate(self.histogram):
            if here and below + here >= wanted:
                low, high = bucket_from_ns(bucket), bucket_from_ns(bucket + 1)
                return low + (high - low) * max(0.0, wanted - below) / here
            below += here
        return 0.0


def bucket_from_ns(bucket: int) -> float:
    """The least latency of a bucket."""
    octave, part = divmod(bucket, 8)
    return float(bucket) if octave < 3 else (8 + part) * 2.0 ** (octave - 3)


class Runner:
    """Runs cells, one after the other. tick is called while one runs. daemon: its process, if it may be seen."""

    def __init__(self, tick: Callable[[], None], daemon: int | None = None) -> None:
        self._tick, self._daemon = tick, daemon
        self.interrupted = False

    def run(
        self, kind: int, *, what: str, seconds: float, block_size: int, count: int, threads: int = 1, batch: int = 1,
        prefix: str = "", once: bool = False, client: object = None, directory: int = -1, files: Sequence[int] = (),
    ) -> Measured:  # fmt: skip
        """KvfsError if it failed, with `what` was measured. After an interrupt KeyboardInterrupt, once C has ended."""
        measure = ffi.new("struct kvfs_measure *")
        kept = ffi.new("char[]", prefix.encode()), ffi.new("int32_t[]", list(files) or [0])
        measure.prefix, measure.files = kept
        measure.kind, measure.threads, measure.batch, measure.once = kind, threads, batch, once
        measure.directory, measure.file_count = directory, len(files)
        measure.client = ffi.NULL if client is None else client
        measure.block_size, measure.count = block_size, count
        measure.duration_ns = max(1, round(seconds * 1e9))
        busy, own, started, before = _busy_s(), time.process_time(), time.monotonic(), self._daemon_threads()
        error = self._run(measure)
        error = error or measure.error
        passed = time.monotonic() - started
        threads_s = [now - before.get(thread, 0.0) for thread, now in self._daemon_threads().items()]
        if self.interrupted:
            raise KeyboardInterrupt
        if error:
            reason = ffi.string(measure.reason).decode(errors="replace") or os.strerror(-error)
            failure = KvfsError(f"{what}: {reason}")
            failure.errno = -error
            raise failure
        took = measure.elapsed_ns / 1e9
        # Its threads may have taken a while to begin: a share of the time is what counts.
        share = took / passed if passed else 0.0
        return Measured(
            measure.blocks,
            measure.misses,
            took,
            (_busy_s() - busy) * share,
            (time.process_time() - own + sum(threads_s)) * share,
            max([measure.busiest_ns / 1e9, *threads_s]),
            list(measure.histogram),
        )

    def _run(self, measure: ffi.CData) -> int:
        """As in replay/engine.py: this thread tells of progress, and can be interrupted at any line."""
        results: list[int] = []
        first, ended = threading.Lock(), threading.Event()

        def body() -> None:
            if first.acquire(blocking=False):
                try:
                    results.append(lib.kvfs_measure_run(measure))
                finally:
                    ended.set()

        is_started = False
        while not ended.is_set():
            try:
                if not is_started:
                    threading.Thread(target=body, name="bench").start()
                    is_started = True
                ended.wait(TICK_S)
                self._tick()
            except KeyboardInterrupt:
                measure.stop, self.interrupted = 1, True
        return results[0]

    def _daemon_threads(self) -> dict[str, float]:
        """CPU time of the daemon's threads."""
        found: dict[str, float] = {}
        if self._daemon is not None:
            with suppress(OSError):
                for task in Path(f"/proc/{self._daemon}/task").iterdir():
                    with suppress(OSError, ValueError, IndexError):
                        words = (task / "stat").read_text().rpartition(")")[2].split()
                        found[task.name] = (int(words[11]) + int(words[12])) / _TICKS_S
        return found


def _busy_s() -> float:
    """Time that all cores together have worked, proc(5)."""
    try:
        with open("/proc/stat") as file:
            words = [int(word) for word in file.readline().split()[1:9]]
    except (OSError, ValueError):
        return 0.0
    idle = words[3] + words[4]
    return (sum(words) - idle) / _TICKS_S
