"""A run of tests tells how they end while it runs: a failing test's name at once, and a line for each, for counts.

A plugin of pytest: tests/conftest.py names it. $KVFS_TEST_TOLD, if set, is a file that gets a line for each test:
"passed", "failed", NAME, REASON or "skipped", NAME, REASON, with tabs between. It is for tools/check and tools/test
(tests/run.sh). tests/tell writes the same for C. SIGTERM ends a run as Ctrl-C does: fixtures are torn down, so
nothing stays mounted.
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType

import pytest

REASON_LENGTH = 160


class Progress:
    def __init__(self, told: str | None, reporter: pytest.TerminalReporter | None) -> None:
        self._told, self._reporter = told, reporter
        self._stopping = False

    def stop(self, number: int, frame: FrameType | None) -> None:
        """SIGTERM: as Ctrl-C, once. The holder of SIGINT's place (trio, a test) is asked in its own way."""
        if not self._stopping:
            self._stopping = True
            signal.raise_signal(signal.SIGINT)

    @pytest.hookimpl(tryfirst=True)
    def pytest_keyboard_interrupt(self) -> None:
        self._stopping = True

    def _tell(self, *words: str) -> None:
        if self._told is not None:
            line = "\t".join(word.replace("\t", " ") for word in words)
            with open(self._told, "ab", buffering=0) as file:  # one write: lines of several processes stay whole
                file.write(line.encode(errors="replace") + b"\n")

    def _show(self, line: str) -> None:
        if self._reporter is not None:
            if self._reporter._tw.width_of_current_line:
                self._reporter.write("\n")
            self._reporter.write_line(line, red=True)

    @pytest.hookimpl(trylast=True)  # after the reporter's own letter
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._tell("failed", _name(report), _reason(report))
            self._show(f"FAILED {_name(report)}: {_reason(report)}")
        elif report.skipped:
            self._tell("skipped", _name(report), _reason(report))
        elif report.when == "call":
            self._tell("passed")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._tell("failed", report.nodeid, f"cannot be collected: {_reason(report)}")
            self._show(f"FAILED {report.nodeid}: cannot be collected: {_reason(report)}")
        elif report.skipped:
            self._tell("skipped", report.nodeid, _reason(report))


def _name(report: pytest.TestReport) -> str:
    return report.nodeid if report.when == "call" or report.skipped else f"{report.nodeid} ({report.when})"


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    """The first line of why."""
    told = report.longrepr
    if isinstance(told, tuple):  # of a skip: file, line, reason
        text = told[2].removeprefix("Skipped: ")
    elif (crash := getattr(told, "reprcrash", None)) is not None:
        text = crash.message
    else:
        text = (str(told).strip().splitlines() or [""])[-1]
    return (text.strip().splitlines() or [""])[0][:REASON_LENGTH]


@pytest.hookimpl(trylast=True)  # after the reporter is there
def pytest_configure(config: pytest.Config) -> None:
    # Not for the children of a test: they would tell of theirs.
    told = os.environ.pop("KVFS_TEST_TOLD", None)
    progress = Progress(told, config.pluginmanager.get_plugin("terminalreporter"))
    config.pluginmanager.register(progress, "kvfs-progress")
    if threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # a shell's own, for what it runs in the background
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        signal.signal(signal.SIGTERM, progress.stop)
        # A child that a test forks is not pytest.
        os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))
