"""Owners of devices: the beat of this process, whether the process of another beat is still there, and how long to wait
for an answer.

Knows beats (pool/format.py, docs/format.md), processes and clocks; does no I/O on devices.
"""

from __future__ import annotations

import os
import signal
import time
import uuid as uuids
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache
from pathlib import Path

from kvfs.errors import InUseError, printable
from kvfs.pool.format import BEAT_ENDING, NO_NODE, Beat

# Interval of beats.
INTERVAL_S = 1.0
# A beat that has not moved for so many intervals is nobody's, if nothing else is known of its owner.
WATCH_BEATS = 5
_WATCH_MAX_S = 60.0
# Time that an owner has to end.
ENDING_S = 60.0
_POLL_S = 0.1
# An unknown holder may be on its way in or out; one that only looks is soon done.
_PATIENCE_S = 2.0
# A wait that lasts longer is reported.
_QUIET_S = 0.5
_PF_EXITING = 4
_PROC = Path("/proc")


class Life(Enum):
    """A process that wrote a beat."""

    GONE = "gone"
    GOING = "going"  # killed, and not gone yet
    HERE = "here"
    UNKNOWN = "unknown"  # of another machine, boot, or pid namespace


@dataclass(frozen=True, slots=True)
class Clock:
    """Time, for tests to put another in its place."""

    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


REAL = Clock()


# ---- this process ----


@cache
def _machine() -> tuple[bytes, bytes]:
    """Ids of this machine and of its boot; zeros for an id that is not to be had."""
    ids = []
    for path in (Path("/etc/machine-id"), _PROC / "sys/kernel/random/boot_id"):
        try:
            ids.append(bytes.fromhex(path.read_text().strip().replace("-", ""))[:16].ljust(16, b"\0"))
        except (OSError, ValueError):
            ids.append(bytes(16))
    return ids[0], ids[1]


def this_process(epoch: int = 0, *, pool: str = "", use: str = "") -> Beat:
    """The first beat of a new owner in this process."""
    machine, boot = _machine()
    return Beat(
        owner=uuids.uuid4(), epoch=epoch, machine=machine, boot=boot, started=_started(os.getpid()) or 0,
        namespace=_namespace(), pid=os.getpid(), interval_ms=int(INTERVAL_S * 1000), host=os.uname().nodename,
        pool=pool, use=use,
    )  # fmt: skip


def _namespace() -> int:
    try:
        return os.stat(_PROC / "self/ns/pid").st_ino
    except OSError:
        return 0


def _stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the third on (proc_pid_stat(5))."""
    return (_PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()


def _started(pid: int) -> int | None:
    try:
        return int(_stat(pid)[19])
    except (OSError, ValueError, IndexError):
        return None


# ---- another's ----


def process_life(pid: int, started: int) -> Life:
    """A process of this pid namespace."""
    try:
        fields = _stat(pid)
        if started and int(fields[19]) != started:
            return Life.GONE  # the number was given anew
        if fields[0] in "ZX" and len(os.listdir(_PROC / str(pid) / "task")) <= 1:
            return Life.GONE
        return Life.GOING if fields[0] in "ZX" or int(fields[6]) & _PF_EXITING or _killed(pid) else Life.HERE
    except (FileNotFoundError, ProcessLookupError):
        pass
    except (OSError, ValueError, IndexError):
        return Life.HERE
    # /proc may hide the processes of others.
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return Life.GONE
    except OSError:
        pass
    return Life.HERE if pid > 0 else Life.GONE


def _killed(pid: int) -> bool:
    """SIGKILL is on its way."""
    for line in (_PROC / str(pid) / "status").read_text(errors="replace").splitlines():
        if line.startswith(("SigPnd:", "ShdPnd:")) and int(line.split()[1], 16) & 1 << (signal.SIGKILL - 1):
            return True
    return False


def life(beat: Beat, here: Beat) -> Life:
    """The life of a beat's process, as far as this machine can tell. The machine's id proves nothing: clones have the
    same."""
    if beat.boot != here.boot or beat.boot == bytes(16) or beat.namespace != here.namespace:
        return Life.UNKNOWN
    return process_life(beat.pid, beat.started)


def serves(beat: Beat) -> bool:
    """Whether it is a daemon's, not a command's that looks at the pool for a moment."""
    return beat.use.startswith(("mounted", "exported"))


def describe(beat: Beat, here: Beat) -> str:
    """The owner, and the command that ends it, as a phrase."""
    host, pool, use = (printable(text) for text in (beat.host, beat.pool, beat.use))
    local = beat.boot == here.boot
    where = "" if local else f" on {host or 'another machine'}"
    command = f"kvfs umount {pool} ends it" if serves(beat) else "it ends by itself"
    if not local:
        command = f"on {host}, {command}; kvfs mount --force takes the pool from it"
    node = f"slot {beat.slot}, " if beat.node != NO_NODE else ""
    return f"in use by another kvfs: {node}pid {beat.pid}{where}, pool {pool}, {use or 'in use'}; {command}"


class Watch:
    """Decides from repeated reads of beats whether devices are free. Pure: the caller reads and gives the time."""

    def __init__(self, here: Beat, claimed: Mapping[int, bool], now: float, dead: Beat | None = None) -> None:
        """`claimed`: devices of which this process has the machine's only claim. `dead`: a process of this boot that is
        known to be dead, though its pid namespace may be none that we see."""
        self._here, self._claimed, self._began, self._dead = here, claimed, now, dead
        self._seen: dict[int, tuple[Beat, float]] = {}
        # Beats of other machines that stood still.
        self.given_up: dict[uuids.UUID, Beat] = {}

    def look(self, beats: Mapping[int, Beat | None], now: float) -> Beat | None:
        """A beat to wait for, or None: all devices are free. InUseError if one is not."""
        waits_for = None
        for index, beat in beats.items():
            if beat is None or not beat.in_use or beat.owner == self._here.owner:
                self._seen.pop(index, None)
                continue
            state = life(beat, self._here)
            if state == Life.GONE or (state == Life.UNKNOWN and self._is_dead(beat)):
                continue
            first, since = self._seen.setdefault(index, (beat, now))
            ending = state == Life.GOING or bool(beat.flags & BEAT_ENDING)
            # A process of this machine whose beat stands still is alive. Where it would have a claim and has none, it
            # has let go.
            surely = state in (Life.GOING, Life.HERE) and not self._claimed.get(index, False)
            if beat != first:
                if not ending:
                    raise in_use(beat, self._here)
                self._seen[index] = (beat, now)
            elif surely and not ending:
                raise in_use(beat, self._here)
            elif not surely and now - since >= watch_s(beat):
                self.given_up[beat.owner] = beat
                continue
            if ending and now - self._began >= ENDING_S:
                raise in_use(beat, self._here)
            waits_for = beat
        return waits_for

    def _is_dead(self, beat: Beat) -> bool:
        dead = self._dead
        return dead is not None and dead.boot == self._here.boot and _process(beat) == _process(dead)


def _process(beat: Beat) -> tuple[object, ...]:
    return beat.boot, beat.namespace, beat.pid, beat.started, beat.host


def watch_s(beat: Beat) -> float:
    """The time that a beat must stand still to have no owner."""
    return min(WATCH_BEATS * max(beat.interval_ms / 1000, INTERVAL_S), _WATCH_MAX_S)


def in_use(beat: Beat, here: Beat) -> InUseError:
    return InUseError(describe(beat, here))


def wait_free(
    read: Callable[[], Mapping[int, Beat | None]], here: Beat, claimed: Mapping[int, bool],
    tell: Callable[[str], None] | None = None, clock: Clock = REAL, dead: Beat | None = None,
) -> Iterable[Beat]:  # fmt: skip
    """Read until the devices are free; returns beats of other machines that stood still. InUseError if another process
    uses them."""
    began = clock.now()
    watch, told = Watch(here, claimed, began, dead), False
    while (beat := watch.look(read(), clock.now())) is not None:
        if tell is not None and not told and clock.now() - began >= _QUIET_S:
            told = True
            ending = life(beat, here) == Life.GOING or beat.flags & BEAT_ENDING
            who = f"pid {beat.pid} on {printable(beat.host) or 'another machine'}"
            watched = f"the devices were used by {who}; watching for {watch_s(beat):.0f} s whether they still are"
            tell(f"{who} is ending; waiting for it" if ending else watched)
        clock.sleep(_POLL_S)
    return watch.given_up.values()


def wait_claim(
    claim: Callable[[], bool], holder: Callable[[], Beat | None], here: Beat,
    tell: Callable[[str], None] | None = None, clock: Clock = REAL,
) -> Beat | None:  # fmt: skip
    """Try to get a lock, and wait for one that is just being given up. Returns None when it is ours, else the holder as
    far as `holder` knows; a beat without an owner: unknown."""
    began, told = clock.now(), False
    while not claim():
        beat = holder()
        waited = clock.now() - began
        state = Life.UNKNOWN if beat is None else life(beat, here)
        ending = beat is not None and (state in (Life.GONE, Life.GOING) or bool(beat.flags & BEAT_ENDING))
        patience_s = _PATIENCE_S if beat is None else 0.0
        if waited >= (ENDING_S if ending else patience_s):
            return beat or replace(here, owner=uuids.UUID(int=0), pid=0)
        if tell is not None and ending and not told and waited >= _QUIET_S:
            told = True
            assert beat is not None
            tell(f"pid {beat.pid} is ending; waiting for it")
        clock.sleep(min(_POLL_S, 0.02 + waited / 4))
    return None
