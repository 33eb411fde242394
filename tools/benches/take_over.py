"""A take-over under a live mount: how long a program waits as the daemon is killed and the next one comes."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benches.common import KIB, BenchError, MissingError, process_cpu_s, say, wait_until
from benches.rig import Rig
from kvfs.units import kernel_version

HOLD_KERNEL = (6, 9)
DEADLINE_S = 120.0
# Between two questions of the program.
_INTERVAL_S = 0.001
# An answer that takes longer is a pause.
_PAUSE_S = 0.03
# Between two take-overs: the index has been committed since.
_REST_S = 1.5


@dataclass(frozen=True, slots=True)
class TakeOver:
    pause_s: float  # the program's longest
    cpu_s: float  # of the next daemon and its command, up to then


class Prober:
    """A program that looks up names, in a thread, and notes when it got each answer that took long. The next daemon's
    CPU time is read as the answer comes."""

    def __init__(self, mountpoint: Path) -> None:
        self._mountpoint = mountpoint
        self._stopping = False
        self.pauses: list[tuple[float, float, float]] = []  # begin, end, CPU seconds of the command
        self.command: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Prober:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping = True
        self._thread.join(DEADLINE_S)

    def _run(self) -> None:
        number = 0
        while not self._stopping:
            began = time.monotonic()
            with contextlib.suppress(OSError):
                os.stat(self._mountpoint / f"missing-{number}")
            ended = time.monotonic()
            if ended - began > _PAUSE_S:
                self.pauses.append((began, ended, _cpu_s(self.command)))
            number += 1
            time.sleep(_INTERVAL_S)


def _cpu_s(command: subprocess.Popen[bytes] | None) -> float:
    """Of the command, and of the daemon that it forked."""
    if command is None:
        return 0.0
    with contextlib.suppress(OSError):
        forked = Path(f"/proc/{command.pid}/task/{command.pid}/children").read_text().split()
        return process_cpu_s(command.pid) + sum(process_cpu_s(int(pid)) for pid in forked)
    return 0.0


@contextlib.contextmanager
def _held(rig: Rig) -> Iterator[tuple[str | Path, ...]]:
    """The pool mounted with a holder; the words of its mount."""
    socket = rig.base / "hold.sock"
    holder = subprocess.Popen(
        [sys.executable, "-m", "kvfs", "hold", socket], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    )
    try:
        wait_until(socket.exists, "the holder")
        rig.pool.mount("--hold", str(socket))
        yield ("mount", rig.pool.pool, rig.pool.mountpoint, "--hold", socket)
        rig.pool.umount()
        holder.wait(DEADLINE_S)
    finally:
        holder.kill()  # and with it the mount, if one is left that nobody serves
        holder.wait()


def _take_over(rig: Rig, prober: Prober, words: tuple[str | Path, ...]) -> TakeOver:
    """Kill the daemon by -9, and start the next as it has ended."""
    pid, noted = rig.pool.pid(), len(prober.pauses)
    ended = os.pidfd_open(pid)
    try:
        os.kill(pid, signal.SIGKILL)
        if not select.select([ended], [], [], DEADLINE_S)[0]:
            raise BenchError(f"daemon {pid}: killed, and there after {DEADLINE_S:.0f} s")
    finally:
        os.close(ended)
    started = time.monotonic()
    prober.command = subprocess.Popen(
        [sys.executable, "-m", "kvfs", *words], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    )
    if prober.command.wait(DEADLINE_S):
        raise BenchError(f"kvfs mount: status {prober.command.returncode}; {rig.pool.log_tail()}")
    wait_until(lambda: any(end > started for _, end, _ in prober.pauses[noted:]), "an answer", DEADLINE_S)
    pauses = [pause for pause in prober.pauses[noted:] if pause[1] > started]
    return TakeOver(max(end - begin for begin, end, _ in pauses), pauses[0][2])


def case_take_over(rig: Rig) -> None:
    """Take-overs with few blocks, then with many."""
    if kernel_version(os.uname().release) < HOLD_KERNEL:
        raise MissingError("needs Linux 6.9 (FUSE_NOTIFY_RESEND)")
    scale, side = rig.scale, rig.kvfs
    for blocks in (scale.few_taken, scale.many_taken):
        rig.stored("take-over", 16 * KIB, blocks, packable=True)
        rig.pool.umount()
        found: list[TakeOver] = []
        with _held(rig) as words, Prober(rig.pool.mountpoint) as prober:
            for _ in range(scale.take_overs):
                time.sleep(_REST_S)
                found.append(_take_over(rig, prober, words))
                say(f"take-over: {found[-1].pause_s:.2f} s, {found[-1].cpu_s:.2f} s of CPU")
        side.pid = rig.pool.mount().pid
        what = f"by kill -9, {blocks:,} blocks of 16 KiB"
        pauses = [one.pause_s for one in found]
        load = {"load": os.getloadavg()[0]}
        rig.add("take-over", f"longest pause of a program, {what}", "s", pauses, target=1.0, details=load)
        told = f"CPU of the next daemon before its first answer, {what}"
        rig.add("take-over", told, "s", [one.cpu_s for one in found])
