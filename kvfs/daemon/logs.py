"""What the log is spared: messages of one kind that come again and again, by a guest's, a client's or a device's doing.

A kind is the place in the code that a message comes from. Of each kind an interval has so many messages; those beyond
are counted, and the count is told when the interval is over and the log hears of anything, or ends.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvfs.errors import printable

BURST = 10
INTERVAL_S = 60.0
_TEXT_MAX = 80


class Escaping(logging.Formatter):
    """A name that a message has can neither begin a line nor move a terminal's cursor."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return printable(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:
        return "\n".join(printable(line) for line in super().formatException(ei).split("\n"))


@dataclass(slots=True)
class _Kind:
    text: str
    level: int
    name: str
    began_s: float
    count: int = 0
    left_out: int = 0


class Sparing(logging.Filter):
    """A handler's filter. It also speaks through that handler: when it begins to leave out, and how much it was."""

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
                self._tell(kind)
                del self._kinds[place]

    def tell(self) -> None:
        """Say what has been left out so far: the log ends."""
        for kind in self._kinds.values():
            self._tell(kind)
            kind.left_out = 0

    def _tell(self, kind: _Kind) -> None:
        if kind.left_out:
            self._say(kind, "%d more messages like %r were left out", kind.left_out, kind.text)

    def _say(self, kind: _Kind, message: str, *arguments: object) -> None:
        record = logging.LogRecord(kind.name, kind.level, __file__, 0, message, arguments, None)
        if kind.level >= self._handler.level:
            self._handler.emit(record)


def spare(handler: logging.Handler) -> logging.Handler:
    """The same handler, which is spared repetitions."""
    sparing = Sparing(handler)
    handler.addFilter(sparing)
    close = handler.close

    def close_and_tell() -> None:
        sparing.tell()
        close()

    handler.close = close_and_tell  # type: ignore[method-assign]
    return handler
