"""The lock of a pool's directory: one process at a time has a pool. The lock's text names the process and its use."""

from __future__ import annotations

import fcntl
import json
import os
import uuid as uuids
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from kvfs.errors import InUseError, PoolError
from kvfs.pool import owner
from kvfs.pool.config import CONFIG_NAME
from kvfs.pool.devices import Tell
from kvfs.pool.directory import LOCK_NAME, check_owner, open_own
from kvfs.pool.format import Beat

INDEX_NAME = "index"
DEVICES_NAME = "devices"
_LOCK_TEXT_MAX = 4096


@contextmanager
def locked(
    pool: Path, use: str = "in use", *, wait: bool = True, tell: Tell | None = None
) -> Iterator[PoolLock]:  # fmt: skip
    """Hold the pool's lock. PoolError if it is no pool, InUseError if another process has it.

    `use` is shown to others that want the pool. `wait`: a holder that is about to give the lock up is waited for.
    """
    if not pool.is_dir():
        raise PoolError(f"{pool}: {'not a directory' if pool.exists() else 'no such pool'}")
    if not (pool / CONFIG_NAME).exists() and not (pool / INDEX_NAME).is_dir() and not (pool / DEVICES_NAME).is_dir():
        raise PoolError(f"{pool}: not a kvfs pool (no {CONFIG_NAME})")
    with pool_lock(pool, use, wait=wait, tell=tell) as lock:
        yield lock


def is_locked(pool: Path) -> bool:
    """Whether the pool's lock is held. Writes nothing, so it also knows on a read-only filesystem. PoolError."""
    if not os.path.lexists(pool / LOCK_NAME):
        return False
    fd = open_own(pool / LOCK_NAME, os.O_RDONLY, 0)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def lock_holder(pool: Path) -> Beat | None:
    """The holder of the pool's lock, by its text, in its own pid namespace's numbers; None if it is free."""
    if not is_locked(pool):
        return None
    fd = open_own(pool / LOCK_NAME, os.O_RDONLY, 0)
    try:
        return _lock_holder(fd, pool)
    finally:
        os.close(fd)


@dataclass(frozen=True, slots=True)
class PoolLock:
    """The lock of a pool's directory, which this process holds. Its text names the process.

    left: the process that had this very lock before, in this boot, and ended without giving it up. It is dead, even if
    its pid namespace is none that we see.
    """

    fd: int
    holder: Beat
    left: Beat | None = None

    def describe(self, *, ending: bool = False) -> None:
        """Write the text for others. On a full disk the lock holds without it."""
        beat = self.holder
        text = json.dumps({
            "pid": beat.pid, "started": beat.started, "namespace": beat.namespace, "boot": beat.boot.hex(),
            "host": beat.host, "use": beat.use, "ending": ending, "file": _identity(self.fd),
        })  # fmt: skip
        with suppress(OSError):
            os.ftruncate(self.fd, 0)
            os.pwrite(self.fd, text.encode()[:_LOCK_TEXT_MAX], 0)


def _lock_holder(fd: int, pool: Path) -> Beat | None:
    """The lock's holder by its text; None if the text names none."""
    try:
        read = json.loads(os.pread(fd, _LOCK_TEXT_MAX, 0))
        return replace(
            owner.this_process(), pid=int(read["pid"]), started=int(read["started"]), host=str(read["host"]),
            namespace=int(read["namespace"]), boot=bytes.fromhex(read["boot"]), use=str(read["use"]), pool=str(pool),
            flags=int(bool(read["ending"])),
        )  # fmt: skip
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _identity(fd: int) -> list[int]:
    """A copy of a pool's directory has the text too, and not these numbers."""
    status = os.fstat(fd)
    return [status.st_dev, status.st_ino]


def _left(fd: int, pool: Path, here: Beat) -> Beat | None:
    """The process that wrote the text of a lock that is ours now. Another file, or another boot, proves nothing: its
    machine may not see the lock."""
    left = _lock_holder(fd, pool)
    if left is None or left.boot != here.boot or left.boot == bytes(16):
        return None
    return left if json.loads(os.pread(fd, _LOCK_TEXT_MAX, 0)).get("file") == _identity(fd) else None


@contextmanager
def pool_lock(
    pool: Path, use: str, *, wait: bool = True, tell: Tell | None = None
) -> Iterator[PoolLock]:  # fmt: skip
    check_owner(pool)
    fd = open_own(pool / LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o600)
    here = owner.this_process(use=use)

    def claim() -> bool:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True

    try:
        if wait:
            found = owner.wait_claim(claim, lambda: _lock_holder(fd, pool), here, tell)
        else:
            found = None if claim() else _lock_holder(fd, pool) or replace(here, owner=uuids.UUID(int=0))
        if found is not None:
            who = owner.describe(found, here) if found.owner.int else "in use by another kvfs"
            raise InUseError(f"{pool}: {who}")
        text = os.pread(fd, _LOCK_TEXT_MAX, 0)
        lock = PoolLock(fd, here, _left(fd, pool, here))
        lock.describe()
        try:
            yield lock
        finally:
            # The beats of a dead process may stand on the devices still: then the next holder is to know it, too.
            with suppress(OSError):
                os.ftruncate(fd, 0)
                os.pwrite(fd, text if lock.left is not None else b"", 0)
    finally:
        os.close(fd)
