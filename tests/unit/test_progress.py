"""How far a long verb is: in lines, or as a bar on a terminal; by an injected clock."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvfs.cli.progress import AFTER_S, Progress, told_by_daemon
from kvfs.prestage import prestage


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def lines(capsys: pytest.CaptureFixture[str]) -> Callable[[], list[str]]:
    return lambda: capsys.readouterr().err.splitlines()


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Terminal]:
    """Puts a terminal in place of stderr. pytest puts its own there once more, as the test begins."""
    for name, value in (("TERM", "xterm-256color"), ("COLUMNS", "100"), ("LINES", "25")):
        monkeypatch.setenv(name, value)
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)

    def put() -> Terminal:
        found = Terminal()
        monkeypatch.setattr(sys, "stderr", found)
        return found

    return put


def test_a_short_step_is_not_told_of(clock: Clock, lines: Callable[[], list[str]]) -> None:
    with Progress(clock) as progress:
        progress("reading", 1, 10)
        clock.now += AFTER_S - 0.1
        progress("reading", 10, 10)
    assert lines() == []


def test_a_line_says_how_far_and_how_long_the_rest_takes(clock: Clock, lines: Callable[[], list[str]]) -> None:
    with Progress(clock) as progress:
        progress("reading", 0, 100)
        clock.now += 10
        progress("reading", 10, 100)
        progress("reading", 11, 100)
        assert lines() == ["kvfs: reading: 10 of 100 (10%), some 1 min 30 s left"]
        clock.now += 1
        progress("reading", 100, 100)
        progress("reading", 100, 100)
    assert lines() == ["kvfs: reading: 100 of 100 (100%)"]


def test_the_rest_takes_at_least_what_the_verb_knows(clock: Clock, lines: Callable[[], list[str]]) -> None:
    progress = Progress(clock)
    progress("requests", 0, 100)
    clock.now += 20
    progress("requests", 20, 100, least_s=7000)
    assert lines() == ["kvfs: requests: 20 of 100 (20%), some 1 h 56 min left"]


def test_bytes_are_told_as_sizes_with_their_speed(clock: Clock, lines: Callable[[], list[str]]) -> None:
    progress = Progress(clock)
    progress("draining", 0, 1 << 30, size=True)
    clock.now += 4
    progress("draining", 256 << 20, 1 << 30, size=True)
    assert lines() == ["kvfs: draining: 256M of 1.00G (25%), 64.00M/s, some 12 s left"]


def test_the_speed_is_that_of_the_last_half_minute(clock: Clock, lines: Callable[[], list[str]]) -> None:
    progress = Progress(clock)
    for done in range(0, 1001, 100):
        progress("reading", done, 10_000)
        clock.now += 1
    for done in range(1000, 1101, 1):  # a hundred times as slow from here on
        progress("reading", done, 10_000)
        clock.now += 1
    assert lines()[-1].endswith(", some 2 h 28 min left")


def test_without_headway_no_end_is_guessed(clock: Clock, lines: Callable[[], list[str]]) -> None:
    progress = Progress(clock)
    for _ in range(100):
        progress("reading", 5, 10)
        clock.now += 1
    assert set(lines()) == {"kvfs: reading: 5 of 10 (50%)"}


def test_lines_grow_rare(clock: Clock, lines: Callable[[], list[str]]) -> None:
    progress = Progress(clock)
    for second in range(3600):
        progress("reading", second, 3600)
        clock.now += 1
    assert 60 < len(lines()) < 120


def test_a_step_without_numbers_says_its_time(clock: Clock, lines: Callable[[], list[str]]) -> None:
    progress = Progress(clock)
    progress("recovering", 0)
    clock.now += 7
    progress("recovering", 0)
    progress("looking", 0)
    clock.now += 3
    progress("looking", 0)
    assert lines() == ["kvfs: recovering: 7 s", "kvfs: looking: 3 s"]


def test_what_a_daemon_says_is_bytes_and_may_be_nothing(clock: Clock, lines: Callable[[], list[str]]) -> None:
    tell = told_by_daemon(Progress(clock), "evicting")
    tell({})
    for second, document in enumerate(({"done": "many"}, {"done": 1 << 20, "total": 4 << 20}, {}), 1):
        clock.now += 3 * second
        tell(document)
    assert lines() == [
        "kvfs: evicting: 1.00M of 4.00M (25%), 114K/s, some 27 s left",
        "kvfs: evicting: 18 s",
    ]


def test_a_terminal_gets_a_bar_that_leaves_nothing(clock: Clock, terminal: Callable[[], Terminal]) -> None:
    pytest.importorskip("rich")
    stderr = terminal()
    with Progress(clock) as progress:
        progress("reading [blocks]", 0, 100)
        clock.now += 10
        progress("reading [blocks]", 25, 100)
        shown = stderr.getvalue()
        assert "kvfs: reading [blocks]" in shown and "25 of 100 (25%), some 30 s left" in shown and "━" in shown
        assert "\n" not in shown.rstrip("\n")
    after = stderr.getvalue()[len(shown) :]
    # The line is erased, and the cursor shown again.
    assert "\x1b[2K" in after and stderr.getvalue().rindex("\x1b[?25h") > stderr.getvalue().rindex("\x1b[?25l")


def test_an_interrupt_gives_the_terminal_back(clock: Clock, terminal: Callable[[], Terminal]) -> None:
    pytest.importorskip("rich")
    stderr = terminal()
    with pytest.raises(KeyboardInterrupt), Progress(clock) as progress:
        clock.now += 10
        progress("reading", 25, 100)
        raise KeyboardInterrupt
    assert sys.stderr is stderr
    assert stderr.getvalue().rindex("\x1b[?25h") > stderr.getvalue().rindex("\x1b[?25l")


@pytest.mark.parametrize("lacks", ["rich", "a terminal that can"])
def test_a_terminal_without_rich_or_without_a_cursor_gets_lines(
    lacks: str, clock: Clock, terminal: Callable[[], Terminal], monkeypatch: pytest.MonkeyPatch
) -> None:
    if lacks == "rich":
        for name in ("rich", "rich.console", "rich.progress"):
            monkeypatch.setitem(sys.modules, name, None)
    else:
        monkeypatch.setenv("TERM", "dumb")
    stderr = terminal()
    with Progress(clock) as progress:
        progress("reading", 0, 100)
        clock.now += 10
        progress("reading", 25, 100)
    assert stderr.getvalue() == "kvfs: reading: 25 of 100 (25%), some 30 s left\n"


def test_prestage_knows_how_much_there_is_before_it_reads(tmp_path: Path) -> None:
    for i in range(200):
        (tmp_path / str(i)).write_bytes(bytes(1000))
    told: list[tuple[str, int, int]] = []
    done = prestage([str(tmp_path)], 2, lambda *so_far: told.append(so_far))
    assert (done.blocks, done.bytes, done.missed) == (200, 200_000, 0)
    reading = [so_far for so_far in told if so_far[0] == "reading"]
    assert reading[-1] == ("reading", 200_000, 200_000) and {total for _, _, total in reading} == {200_000}
