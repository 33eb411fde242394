"""`kvfs top` in a terminal: a pseudo-terminal whose screen is read."""

import contextlib
import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time

import pytest
from helpers import REPOSITORY, Pool, read_file, run, write_file

pytest.importorskip("rich", reason="the package rich is not installed")
_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Screen:
    """A program in a terminal of 160 columns, and all that it has drawn. Its parent ignores interrupts."""

    def __init__(self, *command: str) -> None:
        self._terminal, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 60, 160, 0, 0))
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "kvfs", *command], stdin=theirs, stdout=theirs, stderr=theirs, cwd=REPOSITORY,
                env={**os.environ, "TERM": "xterm"}, start_new_session=True,
            )  # fmt: skip
        finally:
            signal.signal(signal.SIGINT, before)
        os.close(theirs)
        self.text = ""

    def wait(self, pattern: str, meanwhile=lambda: None, timeout_s: float = 90) -> re.Match[str]:
        """The first match in what is drawn from now on."""
        self.text, until = "", time.monotonic() + timeout_s
        while time.monotonic() < until:
            meanwhile()
            if select.select([self._terminal], [], [], 0.05)[0]:
                try:
                    self.text += _ESCAPE.sub("", os.read(self._terminal, 65536).decode(errors="replace"))
                except OSError:
                    break
            found = re.search(pattern, self.text)
            if found:
                return found
        raise AssertionError(f"{pattern!r} was not drawn: {self.text[-3000:]}")

    def ends(self, timeout_s: float = 60) -> int:
        """Its exit status. Its output until then is read: a full terminal would hold it up."""
        until = time.monotonic() + timeout_s
        while self.process.poll() is None:
            assert time.monotonic() < until, f"it goes on: {self.text[-3000:]}"
            if select.select([self._terminal], [], [], 0.05)[0]:
                with contextlib.suppress(OSError):  # its end has closed the other side
                    os.read(self._terminal, 65536)
        return self.process.returncode

    def close(self) -> None:
        self.process.kill()
        self.process.wait(30)
        os.close(self._terminal)


def test_top_shows_rates_that_move_and_leaves_on_an_interrupt() -> None:
    with Pool(files=2, size="64M") as pool:
        (pool.mount / "llama").mkdir()
        write_file(pool.mount / "llama" / "block", b"x" * 100_000)
        screen = Screen("top", str(pool.mount), "--interval", "0.2")
        try:
            screen.wait(rf"kvfs  {pool.path}  mounted")
            screen.wait(r"asked/s 0 ")
            screen.wait(r"/llama +1 ")
            block = pool.mount / "llama" / "block"
            moving = screen.wait(r"asked/s ([1-9][\d.]*k?)  found 100.0%", lambda: read_file(block))
            assert moving
            screen.wait(r"< 1 min +[1-9]", lambda: read_file(block))
            screen.wait(r"devices/1 +online")
            screen.wait(r"asked/s 0 ")
            screen.process.send_signal(signal.SIGINT)
            assert screen.ends() == 130
        finally:
            screen.close()


def test_top_needs_a_terminal() -> None:
    result = run(sys.executable, "-m", "kvfs", "top", "/", check=False)
    assert result.returncode == 2 and "no terminal" in result.stderr and result.stdout == ""


def test_top_in_json_is_a_line_for_each_interval_and_needs_no_terminal() -> None:
    with Pool(files=1, size="64M") as pool:
        (pool.mount / "llama").mkdir()
        write_file(pool.mount / "llama" / "block", b"x" * 100_000)
        result = pool.command("top", str(pool.mount), "-o", "json", "--interval", "0.05", "--count", "2")
        since_the_mount, *intervals = map(json.loads, result.stdout.splitlines())
        assert len(intervals) == 2 and {line["version"] for line in intervals} == {1}
        assert since_the_mount["counters"]["writes"] > 0
        assert all(line["counters"]["writes"] == 0 and line["seconds"] >= 0.05 for line in intervals)
        assert all(line["namespaces"][0]["path"] == "/llama" for line in intervals)
