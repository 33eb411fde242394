"""The daemon's part with a holder (kvfs/hold): it hands over its mount's descriptors, and the journal of names, and
takes an earlier daemon's."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import trio

from kvfs import journal
from kvfs.daemon.options import MountOptions
from kvfs.errors import KvfsError
from kvfs.frontend import mount as mounting
from kvfs.held import (
    HeldMount,
    PartError,
    check_journal,
    check_opens,
    check_state,
    check_written,
    opens_make,
    written_make,
)
from kvfs.hold import service
from kvfs.hold.claim import Claim, Left, claim
from kvfs.hold.service import SYSTEMD
from kvfs.hold.words import JOURNAL, OPENS, WRITTEN, HoldError, close_all, connection_of, process
from kvfs.journal import Fill
from kvfs.names import Names
from kvfs.pool.owner import Life, process_life

# One logger name for the whole room: it is in every line of the log.
log = logging.getLogger(__package__)

# Requests under way get that long to be answered, when the daemon leaves its mount.
LEAVE_MS = 5000
# Once it is asked, a kernel puts the requests without an answer before all others: they have come within that. Turns of
# a second, so that a process that was stopped meanwhile does not count.
SETTLE_TURNS = 5
# The memories of a mount by their roles: how one that another build has left is checked, and how one is made. Each
# keeps the version of its maker (docs/internals/recovery.md).
_MEMORIES: dict[str, tuple[Callable[[int], int], Callable[[], int]]] = {
    WRITTEN: (check_written, written_make),
    JOURNAL: (check_journal, journal.make),
    OPENS: (check_opens, opens_make),
}
_KERNEL_LIMITS = ("default_request_timeout", "max_request_timeout")
_FUSE_SETTINGS = Path("/proc/sys/fs/fuse")


class Holding:
    """A mount that the holder keeps for the daemon after this one. `alive`: the holder is alive."""

    def __init__(self, mountpoint: str, claimed: Claim) -> None:
        """KvfsError: this build does not know what was left. Nothing was changed then."""
        self.mountpoint, self._claim, self.alive = mountpoint, claimed, True
        left = claimed.left
        self.taken = left is not None
        self._versions = {} if left is None else _check_known(mountpoint, left)
        kept = {} if left is None else left.memories
        # An older kvfs may have left less.
        self._memories = {role: os.dup(kept[role]) if role in kept else make() for role, (_, make) in _MEMORIES.items()}

    @property
    def journal(self) -> int:
        return self._memories[JOURNAL]

    @property
    def pid(self) -> int:
        """The holder's."""
        return self._claim.pid

    def status(self, fill: Fill | None) -> dict[str, object]:
        """The holder, and how full the journal of names is, for the status document."""
        left = self._claim.left
        return {
            "path": str(self._claim.path),
            "pid": self.pid,
            "alive": self.alive,
            "takeovers": 0 if left is None else left.takeovers,
            "versions": self._versions,
            "journal": None if fill is None else dataclasses.asdict(fill),
        }

    def begin(self, mount: HeldMount) -> None:
        """Before the mount is served, and before any block may go: some are open by handles of earlier daemons."""
        mount.begin(self._memories[WRITTEN])
        mount.keep_opens(self._memories[OPENS])

    def take(self, mount: HeldMount) -> None:
        """Serve the mount that was left. KvfsError; it waits for the next daemon then."""
        left = self._claim.left
        assert left is not None
        # Before it is served: what another build has left, and this one would not keep true, is not to be found.
        self._put(left.state, left.fuse)
        fds, left.fuse = left.fuse, []
        mount.take(fds, left.state)
        idle = "" if left.idle_s is None else f"; it had no daemon for {left.idle_s:.2f} s"
        log.info("%s: taken over from %s%s", self.mountpoint, process(left.pid, "pid"), idle)

    def keep(self, mount: HeldMount) -> None:
        """Have the holder keep the mount, once it is served. HoldError."""
        if not self.taken:
            fds, state = mount.state()
            self._put(state, fds)
        for name in _KERNEL_LIMITS:
            if (limit := _setting(name)) > 0:
                log.warning("fs.fuse.%s is %d s: the kernel ends the mount if no daemon serves it so long", name, limit)

    def _put(self, state: bytes, fds: Sequence[int]) -> None:
        self._claim.put(state, fds, self._memories)
        self._versions = _versions_of(state, len(fds), self._memories)
        log.info("%s: kept by the holder, %s, at %s", self.mountpoint, process(self.pid, "pid"), self._claim.path)

    async def settle(self, names: Names) -> None:
        """Let go of the requests of earlier daemons, once none can come again. If not, the journal keeps all since
        then. Each next daemon would read more of it, until there is no room."""
        for _ in range(SETTLE_TURNS):
            await trio.sleep(1.0)
        names.journal_settled()

    async def watch(self) -> None:
        """Say so if the holder ends. The mount goes on, but not beyond this daemon."""
        await trio.lowlevel.wait_readable(self._claim.fileno())
        self.alive = False
        log.error(
            "the holder at %s (%s) has ended: the mount ends with this daemon; "
            "unmount, start kvfs hold, and mount again when it suits",
            self._claim.path, process(self.pid, "pid"),
        )  # fmt: skip

    def drop(self) -> None:
        """The mount ends with this daemon: also where a holder keeps it and would wait for the next one."""
        if self.alive:
            with suppress(HoldError):  # an older holder knows no such word
                self._claim.drop()

    def close(self) -> None:
        """The end of this process's claim."""
        close_all(list(self._memories.values()))
        self._claim.close()


def _setting(name: str) -> int:
    try:
        return int((_FUSE_SETTINGS / name).read_text())
    except (OSError, ValueError):
        return 0


def hold(options: MountOptions) -> Holding | None:
    """Claim the mount at the options' holder, if they name one. KvfsError: no holder keeps it there, another daemon
    serves it, or what was left is of another mount."""
    if options.hold is None or options.mountpoint is None:
        return None
    pool, mountpoint = mounting.resolve(options.pool), mounting.resolve(options.mountpoint)
    if options.hold == SYSTEMD:
        claimed: Claim = service.claim(pool, mountpoint)
    else:
        claimed = claim(options.hold, pool, mountpoint, _is_going)
    try:
        if claimed.left is not None:
            _check_mount(pool, mountpoint, claimed.left.fuse[0])
        return Holding(mountpoint, claimed)
    except BaseException:
        claimed.close()
        raise


def _versions_of(state: bytes, descriptors: int, memories: Mapping[str, int]) -> dict[str, int]:
    """KvfsError: this build does not know one."""
    return {
        "state": check_state(state, descriptors), **{role: _MEMORIES[role][0](fd) for role, fd in memories.items()}
    }  # fmt: skip


def known_versions() -> dict[str, tuple[int, int]]:
    """The oldest and the newest version of each part that this build takes over, by its name in status()."""
    found: dict[str, tuple[int, int]] = {}
    checks = {
        "state": partial(check_state, b"", 0),
        **{role: partial(check, -1) for role, (check, _) in _MEMORIES.items()},
    }
    for part, check in checks.items():
        try:
            check()  # of nothing, which cannot be served
        except PartError as error:
            found[part] = error.known
    return found


def _check_known(mountpoint: str, left: Left) -> dict[str, int]:
    """The versions of what an earlier daemon left. KvfsError if this build does not know one. Before anything is
    changed: the mount then waits for the right build, which takes it over with its journal."""
    try:
        return _versions_of(left.state, len(left.fuse), left.memories)
    except KvfsError as error:
        raise KvfsError(
            f"{mountpoint}: the mount that is held has {error}; or end the mount with kvfs umount, and mount anew"
        ) from error


def _is_going(pid: int) -> bool:
    return process_life(pid, 0) in (Life.GOING, Life.GONE)


def _check_mount(pool: str, mountpoint: str, fd: int) -> None:
    present = mounting.find_mount(mountpoint)
    if present is None:
        log.warning("%s: a mount is held for it, which this process does not see: in another mount namespace?", pool)
        return
    if not present.is_kvfs or present.source != pool:
        raise KvfsError(
            f"{mountpoint}: {present.source} ({present.type}) is mounted there, over the held mount of pool {pool}"
        )
    connection, device = connection_of(fd), present.device.partition(":")[2]
    if connection is not None and connection != device:
        raise KvfsError(f"{mountpoint}: FUSE connection {device} is mounted there, and {connection} is held")
