"""The log's lines as text, as JSON and for the journal. Repeated messages of one kind, which a guest, a client or a
device can cause, are left out.

A kind is the place in the code that a message comes from. Each kind may log a number of messages in an interval; those
beyond are counted. The count is logged at the first message after the interval, or when the log ends.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
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


class JsonLines(logging.Formatter):
    """One JSON object a line: time (UTC), level, logger, message, and exception where there is one."""

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        told = {"time": when, "level": record.levelname, "logger": record.name, "message": _told(record.getMessage())}
        if record.exc_info:
            told["exception"] = _told(self.formatException(record.exc_info))
        return json.dumps(told)


def _told(text: str) -> str:
    """A name that is no UTF-8 would be a lone surrogate, which JSON's readers refuse."""
    return text.encode("utf-8", "backslashreplace").decode()


class Journal(logging.Formatter):
    """The lines of another form, each with its level before it as the journal reads it (sd-daemon(3))."""

    _PRIORITIES = ((logging.CRITICAL, 2), (logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6))

    def __init__(self, form: logging.Formatter) -> None:
        super().__init__()
        self._form = form

    def format(self, record: logging.LogRecord) -> str:
        priority = next((number for level, number in self._PRIORITIES if record.levelno >= level), 7)
        return "\n".join(f"<{priority}>{line}" for line in self._form.format(record).split("\n"))


def form(log_format: str, *, journal: bool = False) -> logging.Formatter:
    """A formatter of lines: "text" or "json". The journal has its own time and level."""
    text = Escaping("%(name)s: %(message)s" if journal else "%(asctime)s %(levelname)s %(name)s: %(message)s")
    chosen = JsonLines() if log_format == "json" else text
    return Journal(chosen) if journal else chosen


def is_journal(fd: int) -> bool:
    """Whether a descriptor leads to the journal: systemd names its device and inode in $JOURNAL_STREAM."""
    device, _, inode = os.environ.get("JOURNAL_STREAM", "").partition(":")
    try:
        status = os.fstat(fd)
        return (status.st_dev, status.st_ino) == (int(device), int(inode))
    except (OSError, ValueError):
        return False


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
