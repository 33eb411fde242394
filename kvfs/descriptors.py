"""Descriptors of ours are above 2, where nothing is printed; and whose limit it was that there is none left.

A program prints to descriptors 0 to 2. Where it has closed those, the next files get their numbers, and a device would
be overwritten. The data plane and libkvfs have native/src/base/descriptor.h.
"""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import select
import sys
from contextlib import suppress

_MIN = 3


def above(fd: int) -> int:
    """The same file under a number above 2; fd itself if it is. Raises OSError, and fd is closed then."""
    if fd >= _MIN:
        return fd
    try:
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _MIN)
    finally:
        os.close(fd)


def all_above(fds: list[int]) -> list[int]:
    """above() of each. Raises OSError, and all are closed then."""
    kept: list[int] = []
    left = list(fds)
    try:
        while left:
            kept.append(above(left.pop(0)))
    except OSError:
        for fd in kept + left:
            os.close(fd)
        raise
    return kept


def epoll() -> select.epoll:
    made = select.epoll()
    if made.fileno() >= _MIN:
        return made
    with made:
        return select.epoll.fromfd(fcntl.fcntl(made.fileno(), fcntl.F_DUPFD_CLOEXEC, _MIN))


def fill_standard() -> None:
    """Lead closed descriptors among 0 to 2 to /dev/null, and Python's streams with them. For a process of ours, before
    it opens anything."""
    for fd in range(_MIN):
        try:
            os.fstat(fd)
        except OSError:
            with suppress(OSError):
                # The lowest number that is free: this one.
                os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    for name, fd, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
        if getattr(sys, name) is None:
            with suppress(OSError):
                stream = os.fdopen(fd, mode, closefd=False)
                setattr(sys, name, stream)
                setattr(sys, f"__{name}__", stream)


def reason(error: OSError) -> str:
    """Why a call failed, in words: EMFILE and ENFILE say whose limit it is."""
    if error.errno == errno.EMFILE:
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return f"process {os.getpid()} has all the {soft} descriptors that it may have (RLIMIT_NOFILE)"
    if error.errno == errno.ENFILE:
        return "the machine has no descriptor left (fs.file-max)"
    return error.strerror or str(error)
