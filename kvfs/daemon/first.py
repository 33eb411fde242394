"""The first process of a container: it passes signals on to the daemon, reaps orphans, and ends as the daemon did.

With the first process the kernel kills all others of its pid namespace. So it is not the daemon itself. It outlives the
daemon for a moment, in which a `kvfs umount` that runs in its container (a preStop hook) ends with its own status.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from kvfs import signals

_PASSED = (signals.INTERRUPT, signals.HANGUP, *signals.ENDING, *signals.IGNORED)
# Commands that were brought into the container have so long to end after the daemon.
LEAVE_S = 5.0


def leave_first() -> None:
    """As process 1: go on in a child, and never return in the parent. As any other process: return at once."""
    if os.getpid() != 1:
        return
    # Blocked before the fork, so that none is lost.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (*_PASSED, signal.SIGCHLD))
    daemon = os.fork()
    if daemon == 0:
        # A terminal's Ctrl-C reaches it through the first process alone.
        os.setsid()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return
    _stand_by(daemon)


def _stand_by(daemon: int) -> NoReturn:
    status: int | None = None
    while status is None:
        number = signal.sigwaitinfo((*_PASSED, signal.SIGCHLD)).si_signo
        if number != signal.SIGCHLD:
            os.kill(daemon, number)
            continue
        for pid, code in _reaped():
            if pid == daemon:
                status = code
    deadline = time.monotonic() + LEAVE_S
    for visitor in _visitors():
        poller = select.poll()
        poller.register(visitor, select.POLLIN)
        poller.poll(max(0.0, deadline - time.monotonic()) * 1000)
    os._exit(status if status >= 0 else 128 - status)


def _reaped() -> Iterator[tuple[int, int]]:
    """Each child that has ended, with its exit code."""
    with suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            yield pid, os.waitstatus_to_exitcode(status)


def _visitors() -> Iterator[int]:
    """A pidfd of each process whose parent is outside the pid namespace."""
    with suppress(OSError):  # no /proc
        for name in os.listdir("/proc"):
            if name.isdigit() and name != "1":
                with suppress(OSError):
                    if Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[1] == "0":
                        yield os.pidfd_open(int(name))
