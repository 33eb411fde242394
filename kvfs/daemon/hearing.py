"""A daemon's signals: some end it cleanly, SIGHUP has it read pool.toml again, and all others are a line in its log."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import trio

from kvfs import signals
from kvfs.daemon.reporter import LOG_NAME, log_again, log_level
from kvfs.errors import KvfsError
from kvfs.pool.config import CONFIG_NAME, LOG_LEVEL, load
from kvfs.store.store import Store

# One logger name for the whole room: it is in every line of the log.
log = logging.getLogger(__package__)


class Hearing:
    """`stop` is called when the daemon is asked to end, `reload` at SIGHUP."""

    def __init__(self, stop: Callable[[], None], reload: Callable[[], None]) -> None:
        self._stop, self._reload = stop, reload
        self.ended_by: int | None = None
        self._stack: AsyncExitStack | None = None
        self._nursery: trio.Nursery | None = None

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        """No signal except a request to end ends the daemon from here on. After begin() these do not end it at once
        either, until the store is closed: no call under way breaks off."""
        async with AsyncExitStack() as self._stack:
            caught = self._stack.enter_context(trio.open_signal_receiver(signals.HANGUP, *signals.IGNORED))
            async with trio.open_nursery() as self._nursery:
                self._nursery.start_soon(self._hear_others, caught)
                yield
                self._nursery.cancel_scope.cancel()

    def begin(self) -> None:
        """Hear what asks for an end, from now on."""
        assert self._stack is not None
        assert self._nursery is not None
        caught = self._stack.enter_context(trio.open_signal_receiver(signals.INTERRUPT, *signals.ENDING))
        self._nursery.start_soon(self._hear_ending, caught)

    async def _hear_others(self, caught: AsyncIterator[int]) -> None:
        async for number in caught:
            if number == signals.HANGUP:
                self._reload()
            else:
                log.info("%s: ignored", signals.name_of(number))

    async def _hear_ending(self, caught: AsyncIterator[int]) -> None:
        async for number in caught:
            log.info("%s: ending", signals.name_of(number))
            self.ended_by = self.ended_by or number
            self._stop()


def reload(store: Store) -> None:
    """Read pool.toml again, take what can change while the pool is mounted, and log what that was. The log file is
    opened anew."""
    log_again(store.path / LOG_NAME)
    try:
        config = load(store.path)
        if config is None:
            log.error("SIGHUP: %s is gone; the rules that were read before stay", store.path / CONFIG_NAME)
            return
        taken, waiting = store.take_rules(config)
    except KvfsError as error:
        log.error("SIGHUP: %s; the rules that were read before stay", error)
        return
    log_level(LOG_LEVEL)  # the answer is logged at any level
    log.info("SIGHUP: %s was read again: %s", CONFIG_NAME, "; ".join(taken) or "nothing has changed")
    if waiting:
        log.warning("SIGHUP: %s: needs a new mount: %s", CONFIG_NAME, "; ".join(waiting))
    log_level(config.log_level)
