"""The daemon's dealings with the machine: limits, the size of FUSE requests, its pid file, and a word to systemd."""

from __future__ import annotations

import logging
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import trio

from kvfs.frontend.asking import PID_NAME
from kvfs.hold.service import notify
from kvfs.hold.words import HoldError
from kvfs.pool.directory import open_own

# One logger name for the whole room: it is in every line of the log.
log = logging.getLogger(__package__)

FUSE_PAGES = 1024
# A mount that answers does so in less. Probes of Kubernetes wait one second, unless they say otherwise.
LOOK_S = 2.0
FUSE_PAGES_PATH = Path("/proc/sys/fs/fuse/max_pages_limit")


def raise_limits() -> None:
    """Raise the limits of descriptors, locked memory and files' sizes as far as this user may. A part that finds its
    limit too low says so itself."""
    for what, wanted in (
        (resource.RLIMIT_NOFILE, 1 << 17),
        (resource.RLIMIT_MEMLOCK, resource.RLIM_INFINITY),
        (resource.RLIMIT_FSIZE, resource.RLIM_INFINITY),  # of devices that are files
    ):
        _, hard = resource.getrlimit(what)
        with suppress(OSError, ValueError):
            if os.geteuid() == 0 and hard != resource.RLIM_INFINITY:
                resource.setrlimit(what, (wanted, wanted))
                continue
        with suppress(OSError, ValueError):
            resource.setrlimit(what, (hard, hard))


def raise_fuse_pages() -> None:
    """Let requests be of 4 MiB, where this user may set that."""
    if os.geteuid() == 0 and fuse_pages() < FUSE_PAGES and FUSE_PAGES_PATH.exists():
        with suppress(OSError):
            FUSE_PAGES_PATH.write_text(f"{FUSE_PAGES}\n")
            log.info("fs.fuse.max_pages_limit raised to %d", FUSE_PAGES)


def fuse_pages() -> int:
    """The pages that one request may have: a limit since kernel 6.13, 256 before."""
    try:
        return int(FUSE_PAGES_PATH.read_text())
    except (OSError, ValueError):
        return 256


@contextmanager
def pid_file(pool: Path) -> Iterator[None]:
    path = pool / PID_NAME
    fd = open_own(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        os.write(fd, f"{os.getpid()}\n".encode())
    finally:
        os.close(fd)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


class Look:
    """Looks at a mount from outside, in a thread. One that hangs keeps the thread, and later ones wait for it."""

    def __init__(self) -> None:
        self._thread = trio.CapacityLimiter(1)

    async def lacks(self, mountpoint: str) -> list[str]:
        """The reason why a request through the mount is not answered; none: it is."""
        try:
            with trio.fail_after(LOOK_S):
                await trio.to_thread.run_sync(os.statvfs, mountpoint, abandon_on_cancel=True, limiter=self._thread)
        except trio.TooSlowError:
            return [f"{mountpoint}: no answer within {LOOK_S:g} s"]
        except OSError as error:
            return [f"{mountpoint}: {error.strerror}"]
        return []


def notify_manager(state: str) -> None:
    """Tell systemd, if it has started us with Type=notify (sd_notify(3))."""
    with suppress(HoldError):
        notify(state)
