"""Filters of the log: repeated messages of one kind, which a guest, a client or a device can cause, are left out.

A kind is the place in the code that a message comes from. Each kind may log so many messages in an interval; those
beyond are counted. The count is told at the first message after the interval, or when the log ends.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvfs.descriptors import reason
from kvfs.errors import printable

BURST = 10
INTERVAL_S = 60.0
_TEXT_MAX = 80


class Escaping(logging.Formatter):
    """Control characters are escaped: a name in a message can neither begin a line nor move a terminal's cursor."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return printable(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:
        return "\n".join(printable(line) for line in super().formatException(ei).split("\n"))


class _Limits(logging.Filter):
    """trio's message of a connection that it cannot accept, in our words: whose limit it is. Without its traceback."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, OSError):
            record.msg, record.args, record.exc_info = "a connection waits: %s", (reason(error),), None
        return True


_LIMITS = _Limits()


def name_limits() -> None:
    logging.getLogger("trio.serve_listeners").addFilter(_LIMITS)


@dataclass(slots=True)
class _Kind:
    text: str
    level: int
    name: str
    began_s: float
    count: int = 0
    left_out: int = 0


class Sparing(logging.Filter):
    """A handler's filter. It also speaks through that handler: when it begins to leave messages out, and how many they
    were."""

    def __init__(
        self,
        handler: logging.Handler,
        *,
        burst: int = BURST,
        interval_s: float = INTERVAL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        self._handler = handler
        self._burst = burst
        self._interval_s = interval_s
        self._clock = clock
        self._kinds: dict[tuple[str, int], _Kind] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        self._handler.acquire()
        try:
            return self._passes(record)
        finally:
            self._handler.release()

    def _passes(self, record: logging.LogRecord) -> bool:
        now = self._clock()
        self._end_intervals(now)
        place = (record.pathname, record.lineno)
        kind = self._kinds.get(place)
        if kind is None:
            text = str(record.msg)
            text = text if len(text) <= _TEXT_MAX else text[:_TEXT_MAX] + "..."
            kind = self._kinds[place] = _Kind(text, record.levelno, record.name, now)
        kind.count += 1
        if kind.count <= self._burst:
            return True
        if kind.left_out == 0:
            self._say(kind, "%d messages like %r within %.0f s: more are counted and left out", kind.count - 1,
                      kind.text, now - kind.began_s)  # fmt: skip
        kind.left_out += 1
        return False

    def _end_intervals(self, now: float) -> None:
        for place, kind in list(self._kinds.items()):
            if now - kind.began_s >= self._interval_s:
                self._log_count(kind)
                del self._kinds[place]

    def log_counts(self) -> None:
        """Tell the counts of messages left out so far, as the log ends."""
        for kind in self._kinds.values():
            self._log_count(kind)
            kind.left_out = 0

    def _log_count(self, kind: _Kind) -> None:
        if kind.left_out:
            self._say(kind, "%d more messages like %r were left out", kind.left_out, kind.text)

    def _say(self, kind: _Kind, message: str, *arguments: object) -> None:
        record = logging.LogRecord(kind.name, kind.level, __file__, 0, message, arguments, None)
        if kind.level >= self._handler.level:
            self._handler.emit(record)


def spare(handler: logging.Handler) -> logging.Handler:
    """The same handler, with a filter against repetitions."""
    sparing = Sparing(handler)
    handler.addFilter(sparing)
    close = handler.close

    def close_and_log() -> None:
        sparing.log_counts()
        close()

    handler.close = close_and_log  # type: ignore[method-assign]
    return handler
