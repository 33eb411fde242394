"""A clock of owners (kvfs.pool.owner.Clock) that a test sets: it stands still but for sleeps."""

from __future__ import annotations

from collections.abc import Callable

from kvfs.pool import owner


class Time:
    """A clock that stands still but for sleeps."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.on_sleep: Callable[[], None] = lambda: None
        self.clock = owner.Clock(lambda: self.now, self._sleep)

    def _sleep(self, seconds: float) -> None:
        self.now += seconds
        self.on_sleep()
