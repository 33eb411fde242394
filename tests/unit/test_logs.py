"""Messages that come again and again are kept out of the log."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import sys
from collections.abc import Iterator

import pytest

from kvfs.daemon import logs

FORMAT = "%(levelname)s %(name)s: %(message)s"


class Stand:
    """A logger with one handler, whose clock stands still."""

    def __init__(self, level: int = logging.INFO) -> None:
        self.now = 1000.0
        self.text = io.StringIO()
        self.handler = logging.StreamHandler(self.text)
        self.handler.setFormatter(logging.Formatter(FORMAT))
        self.handler.setLevel(level)
        self.sparing = logs.Sparing(self.handler, burst=3, interval_s=60, clock=lambda: self.now)
        self.handler.addFilter(self.sparing)
        self.log = logging.Logger("guest", logging.INFO)
        self.log.addHandler(self.handler)

    def repeat(self, count: int) -> None:
        for number in range(count):
            self.log.warning("inode %d: refused", number)

    def lines(self) -> list[str]:
        text = self.text.getvalue()
        self.text.seek(0)
        self.text.truncate()
        return text.splitlines()


@pytest.fixture
def stand() -> Iterator[Stand]:
    yield Stand()


def test_messages_of_one_kind_beyond_a_burst_are_counted(stand: Stand) -> None:
    stand.repeat(1000)
    assert stand.lines() == [
        "WARNING guest: inode 0: refused",
        "WARNING guest: inode 1: refused",
        "WARNING guest: inode 2: refused",
        "WARNING guest: 3 messages like 'inode %d: refused' within 0 s: more are counted and left out",
    ]
    stand.log.error("another kind")
    assert stand.lines() == ["ERROR guest: another kind"]
    stand.now += 60
    stand.log.error("something else")
    assert stand.lines() == [
        "WARNING guest: 997 more messages like 'inode %d: refused' were left out",
        "ERROR guest: something else",
    ]
    stand.repeat(1)
    assert stand.lines() == ["WARNING guest: inode 0: refused"]


def test_few_messages_are_all_there_in_every_interval(stand: Stand) -> None:
    for _ in range(5):
        stand.repeat(3)
        stand.now += 60
    assert len(stand.lines()) == 15


def test_the_end_of_the_log_tells_the_count(stand: Stand) -> None:
    stand.repeat(10)
    stand.lines()
    stand.sparing.log_counts()
    stand.sparing.log_counts()
    assert stand.lines() == ["WARNING guest: 7 more messages like 'inode %d: refused' were left out"]


def test_a_traceback_is_left_out_with_its_message(stand: Stand) -> None:
    for _ in range(100):
        try:
            raise ValueError("offset -1")
        except ValueError:
            stand.log.exception("%s failed", "readdir")
    assert sum(line.startswith("Traceback") for line in stand.lines()) == 3


def test_what_a_handler_is_not_told_of_it_is_not_told_the_count_of() -> None:
    stand = Stand(level=logging.ERROR)
    stand.repeat(10)
    stand.sparing.log_counts()
    assert stand.lines() == []


def test_a_spared_handler_tells_the_count_when_it_closes() -> None:
    text = io.StringIO()
    handler = logs.spare(logging.StreamHandler(text))
    log = logging.Logger("guest", logging.INFO)
    log.addHandler(handler)
    for number in range(logs.BURST + 5):
        log.warning("message %d", number)
    handler.close()
    assert len(text.getvalue().splitlines()) == logs.BURST + 2
    assert re.search(r"\n5 more messages like 'message %d' were left out\n$", text.getvalue())


def raised(record_args: tuple[object, ...] = ()) -> logging.LogRecord:
    try:
        raise ValueError("offset\n-1")
    except ValueError:
        return logging.LogRecord("kvfs.store", logging.ERROR, __file__, 1, "%s failed", record_args, sys.exc_info())


def test_json_lines_are_one_object_each() -> None:
    text = logs.form("json").format(raised(("a\nb \udcff",)))
    told = json.loads(text)
    assert "\n" not in text and list(told) == ["time", "level", "logger", "message", "exception"]
    assert told["level"] == "ERROR" and told["logger"] == "kvfs.store" and told["message"] == "a\nb \\udcff failed"
    assert "ValueError: offset\n-1" in told["exception"] and told["time"].endswith("+00:00")
    plain = logging.LogRecord("kvfs", logging.INFO, __file__, 1, "ready", (), None)
    assert "exception" not in json.loads(logs.form("json").format(plain))


@pytest.mark.parametrize(
    ("level", "priority"),
    [(logging.DEBUG, 7), (logging.INFO, 6), (logging.WARNING, 4), (logging.ERROR, 3), (logging.CRITICAL, 2)],
)
def test_the_journal_gets_levels_before_each_line(level: int, priority: int) -> None:
    record = raised(("readdir",))
    record.levelno = level
    lines = logs.form("text", journal=True).format(record).split("\n")
    assert lines[0] == f"<{priority}>kvfs.store: readdir failed" and len(lines) > 3
    assert all(line.startswith(f"<{priority}>") for line in lines)
    assert json.loads(logs.form("json", journal=True).format(record).removeprefix(f"<{priority}>"))["level"]


def test_the_journal_is_known_by_its_device_and_inode(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    status = os.fstat(writing)
    for stream, expected in (
        (f"{status.st_dev}:{status.st_ino}", True),
        (f"{status.st_dev}:{status.st_ino + 1}", False),
        ("", False),
        ("8:", False),
        ("a:b", False),
    ):
        monkeypatch.setenv("JOURNAL_STREAM", stream)
        assert logs.is_journal(writing) is expected
    os.close(reading)
    os.close(writing)
    assert not logs.is_journal(writing)
