"""Looks whether the daemons of this process's connections are alive: one thread for all of them, twice a second.

A look costs some microseconds, as libkvfs has heard of the end already. Without it an unused connection would count as
up until its next call, and an engine would learn of an unmount by a miss.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from typing import Protocol

PERIOD_S = 0.5


class Watched(Protocol):
    def look(self) -> bool:
        """It never raises and never waits. Returns whether to look again."""


_lock = threading.Lock()
_watched: weakref.WeakSet[Watched] = weakref.WeakSet()
# Those that were added since the thread took its list: an earlier no of theirs holds no more.
_added: weakref.WeakSet[Watched] = weakref.WeakSet()
_thread: threading.Thread | None = None


def add(one: Watched) -> None:
    """It is looked at until it says no, or its owner is gone. Where no thread can start, a later add() tries."""
    global _thread
    with _lock:
        _watched.add(one)
        _added.add(one)
        if _thread is None or not _thread.is_alive():
            _thread = threading.Thread(target=_run, name="kvfs-watch", daemon=True)
            with contextlib.suppress(RuntimeError):
                _thread.start()


def _run() -> None:
    global _thread
    while True:
        time.sleep(PERIOD_S)
        with _lock:
            every = list(_watched)
            _added.clear()
        over = [one for one in every if not one.look()]
        every.clear()
        with _lock:
            _watched.difference_update(one for one in over if one not in _added)
            over.clear()
            if not _watched:
                _thread = None
                return


def _after_fork() -> None:
    """A child has neither the thread nor the lock's holder; what its parent connected is not its own."""
    global _lock, _thread
    _lock, _thread = threading.Lock(), None
    _watched.clear()
    _added.clear()


os.register_at_fork(after_in_child=_after_fork)
