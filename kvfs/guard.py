"""Whose a pool's directory is, and how its small files are opened: what another user can prepare is not followed.

Root takes no pool that somebody else can change: a symbolic link in the place of a log leads anywhere.
"""

from __future__ import annotations

import errno
import os
import pwd
import stat
from pathlib import Path

from kvfs.errors import PoolError


def check_owner(pool: Path) -> None:
    """For root: that nobody else can change what lies in a pool's directory. PoolError, with EPERM."""
    if os.geteuid() != 0:
        return
    try:
        status = os.stat(pool)
    except OSError as error:
        raise PoolError(f"{pool}: {os.strerror(error.errno or 0)}") from error
    refusal = None
    if status.st_uid != 0:
        refusal = PoolError(
            f"{pool}: belongs to user {_name(status.st_uid)}, and root uses no pool of another user's; run kvfs as "
            f"that user, or give the directory to root (chown root {pool})"
        )
    elif status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        refusal = PoolError(
            f"{pool}: mode {stat.S_IMODE(status.st_mode):04o}: others than its owner can write there, and root uses no "
            f"such pool (chmod go-w {pool})"
        )
    if refusal is not None:
        refusal.errno = errno.EPERM
        raise refusal


def _name(uid: int) -> str:
    try:
        return f"{uid} ({pwd.getpwuid(uid).pw_name})"
    except KeyError:
        return str(uid)


def open_own(path: Path, flags: int, mode: int) -> int:
    """Open, or make, a plain file of the pool's directory. PoolError for a link, and for what is no plain file."""
    try:
        # A pipe that nobody reads is not waited for.
        fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, mode)
    except OSError as error:
        raise PoolError(f"{path}: {_reason(error)}") from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise PoolError(f"{path}: not a plain file; remove it")
    return fd


def _reason(error: OSError) -> str:
    if error.errno == errno.ELOOP:
        return "is a symbolic link, which kvfs does not follow here; remove it"
    return os.strerror(error.errno or 0)
