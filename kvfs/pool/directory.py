"""A pool's directory: its owner is checked, and its small files are opened without following links.

Root takes no pool that another user can change: a symbolic link in the place of a log leads anywhere.
"""

from __future__ import annotations

import errno
import os
import pwd
import stat
from contextlib import suppress
from pathlib import Path

from kvfs.errors import PoolError

LOCK_NAME = "lock"
# Directories of a pool in which kvfs makes, and writes to, files of its own; and whose files it opens for writing.
_DIRECTORIES, _INDEX = ("index", "devices"), "index"


def check_owner(pool: Path) -> None:
    """For root: that no other user can change a pool's directory, and that users who could before has left no link
    where root writes. PoolError, with EPERM."""
    if os.geteuid() != 0:
        return
    try:
        _check_directory(pool, pool, os.stat(pool))
        for name in _DIRECTORIES:
            with suppress(FileNotFoundError):
                _check_directory(pool, pool / name, os.stat(pool / name))
        with suppress(FileNotFoundError):
            for entry in os.scandir(pool / _INDEX):
                if not entry.is_file(follow_symlinks=False) or entry.stat(follow_symlinks=False).st_uid != 0:
                    raise _refusal(f"{entry.path}: not a plain file of root's; remove {pool / _INDEX}: it is made anew")
    except OSError as error:
        raise PoolError(f"{error.filename or pool}: {os.strerror(error.errno or 0)}") from error


def _check_directory(pool: Path, path: Path, status: os.stat_result) -> None:
    if status.st_uid != 0:
        raise _refusal(
            f"{path}: belongs to user {_name(status.st_uid)}, and root uses no pool of another user's; run kvfs as "
            f"that user, or give the pool to root (chown -R root {pool})"
        )
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise _refusal(
            f"{path}: mode {stat.S_IMODE(status.st_mode):04o}: others than its owner can write there, and root uses no "
            f"such pool (chmod go-w {path})"
        )


def _refusal(text: str) -> PoolError:
    refusal = PoolError(text)
    refusal.errno = errno.EPERM
    return refusal


def _name(uid: int) -> str:
    try:
        return f"{uid} ({pwd.getpwuid(uid).pw_name})"
    except KeyError:
        return str(uid)


def open_own(path: Path, flags: int, mode: int) -> int:
    """Open, or make, a plain file of the pool's directory. PoolError for a link, and for anything but a plain file."""
    try:
        # A pipe that nobody reads is not waited for.
        fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, mode)
    except OSError as error:
        raise PoolError(f"{path}: {_reason(error)}") from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise PoolError(f"{path}: not a plain file; remove it")
    return fd


def replace_own(path: Path, content: bytes) -> None:
    """Replace a file of the pool's directory, durably. PoolError."""
    temporary = path.with_name(f"{path.name}.new")
    try:
        fd = open_own(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            os.write(fd, content)
            os.fsync(fd)
        finally:
            os.close(fd)
        os.replace(temporary, path)
        directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
    except OSError as error:
        raise PoolError(f"{path}: {os.strerror(error.errno or 0)}") from error


def _reason(error: OSError) -> str:
    if error.errno == errno.ELOOP:
        return "is a symbolic link, which kvfs does not follow here; remove it"
    return os.strerror(error.errno or 0)
