"""Background tasks of an open store. A task that fails ends the store as a crash would."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import TypeVarTuple

import trio

from kvfs.plane import Plane

log = logging.getLogger("kvfs.store.pool")

Arguments = TypeVarTuple("Arguments")


class Tasks:
    def __init__(self, nursery: trio.Nursery, plane: Plane) -> None:
        self._nursery, self._plane = nursery, plane

    def start(self, task: Callable[[*Arguments], Awaitable[None]], *arguments: *Arguments) -> None:
        """Run the task in the background. If it fails the store ends at once, as after a crash. Writing ends: the state
        is unknown."""

        async def run() -> None:
            try:
                await task(*arguments)
            except Exception as error:
                log.critical("a task of the store failed (%s): %s: %s; it ends as after a crash",
                             task.__qualname__, type(error).__name__, error)  # fmt: skip
                self._plane.abandon("a task of the store failed")
                raise

        self._nursery.start_soon(run)
