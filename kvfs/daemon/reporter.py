"""The daemon's messages: to the command line that waits for its start, from then on to its log."""

from __future__ import annotations

import json
import logging
import logging.handlers
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from io import TextIOWrapper
from pathlib import Path
from typing import cast

from kvfs.daemon.logs import Escaping, form, is_journal, name_limits, spare
from kvfs.errors import KvfsError, PoolError, UsageError
from kvfs.pool.directory import open_own

# One logger name for the whole room: it is in every line of the log.
log = logging.getLogger(__package__)

LOG_NAME = "kvfs.log"


class Reporter:
    """The starting daemon's words to the command line that waits for it."""

    def __init__(self, fd: int | None, log_format: str = "text") -> None:
        self._fd = fd
        self._log_format = log_format

    @property
    def done(self) -> bool:
        """The waiting command is gone: messages belong into the log."""
        return self._fd is None

    def _send(self, message: Mapping[str, object]) -> None:
        if self._fd is not None:
            with suppress(BrokenPipeError):
                os.write(self._fd, json.dumps(message).encode() + b"\n")

    def info(self, text: str) -> None:
        if self._fd is None:
            log.info("%s", text)
        self._send({"info": text})

    def error(self, error: KvfsError) -> None:
        self._send({"error": str(error), "errno": error.errno, "usage": isinstance(error, UsageError)})

    def ready(self, pool: Path) -> None:
        """From here on the daemon speaks to its log alone."""
        if self._fd is None:
            return
        log_to_file(pool / LOG_NAME, self._log_format)
        self._send({"ready": os.getpid()})
        os.close(self._fd)
        self._fd = None


def log_to_stderr(level: int, log_format: str = "text") -> None:
    """Log there. Above the level INFO it is a command's stderr, which people read."""
    handler = spare(logging.StreamHandler(sys.stderr))
    lines = form(log_format, journal=is_journal(sys.stderr.fileno())) if level <= logging.INFO else None
    handler.setFormatter(lines or Escaping("kvfs: %(message)s"))
    if level > logging.INFO:
        handler.setLevel(level)
    # Messages that stderr does not get are kept for the log file.
    early = logging.handlers.MemoryHandler(sys.maxsize, flushLevel=sys.maxsize)
    handlers = [handler, early] if level > logging.INFO else [handler]
    logging.basicConfig(level=logging.INFO, handlers=handlers, force=True)
    name_limits()


def log_to_file(path: Path, log_format: str = "text") -> None:
    handler = spare(_LogFile(path))
    handler.setFormatter(form(log_format))
    for early in logging.getLogger().handlers:
        if isinstance(early, logging.handlers.MemoryHandler):
            early.setTarget(handler)  # close() below gives all of them to this handler
    logging.basicConfig(level=logging.getLogger().level, handlers=[handler], force=True)
    _take_output(path)


def _take_output(path: Path) -> None:
    """Output, also of the interpreter, goes into the log."""
    fd = open_own(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)


def log_again(path: Path) -> None:
    """The log file may have been rotated: output goes to the new one. Nothing is done for a log on stderr."""
    if any(isinstance(handler, _LogFile) for handler in logging.getLogger().handlers):
        try:
            _take_output(path)
        except (OSError, PoolError) as error:
            log.error("%s", error)


def log_level(name: str) -> None:
    """Log what is as important as this level of pool.toml, or more."""
    logging.getLogger().setLevel(name.upper())


class _LogFile(logging.handlers.WatchedFileHandler):
    """A log file that was rotated is noticed and made anew. If it cannot be made, the log alone is lost."""

    def _open(self) -> TextIOWrapper:
        fd = open_own(Path(self.baseFilename), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        return cast(TextIOWrapper, open(fd, self.mode, encoding=self.encoding, errors=self.errors))

    def emit(self, record: logging.LogRecord) -> None:
        try:
            super().emit(record)
        except (OSError, PoolError):
            with suppress(OSError, ValueError):
                print(self.format(record), file=sys.stderr, flush=True)
