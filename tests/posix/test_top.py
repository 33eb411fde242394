"""`kvfs top` in a terminal: a pseudo-terminal whose screen is read."""

import contextlib
import fcntl
import io
import json
import os
import pathlib
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

from kvfs.status import top

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
        self._theirs = theirs
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

    def press(self, key: str) -> None:
        os.write(self._terminal, key.encode())

    def flags(self) -> int:
        """Local flags of the terminal: whether it reads by lines, and echoes."""
        return termios.tcgetattr(self._theirs)[3]

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
        os.close(self._theirs)


def read_from_device(path: pathlib.Path) -> None:
    """It drops what the kernel has cached: no read of that is a hit of a block."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        assert os.read(fd, 100)
    finally:
        os.close(fd)


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
            assert screen.wait(r"asked/s ([1-9][\d.]*k?)  found 100.0%", lambda: read_file(block))
            # Of this minute, or the ten before.
            screen.wait(r"blocks/s +(0 +)?[1-9]", lambda: read_from_device(block))
            screen.wait(r"devices/1 +online")
            screen.wait(r"asked/s 0 ")
            screen.press("h")
            screen.wait(r"p or space +pause, and go on")
            screen.press("h")
            screen.wait(r"s sort: bytes")
            screen.press("s")
            screen.wait(r"s sort: errors, hits")
            screen.press("p")
            screen.wait(r"paused  h help")
            screen.press(" ")
            screen.process.send_signal(signal.SIGINT)
            assert screen.ends() == 130
        finally:
            screen.close()


def test_top_ends_at_q_and_puts_the_terminal_back() -> None:
    with Pool(files=1, size="64M") as pool:
        screen = Screen("top", str(pool.mount), "--interval", "600")
        try:
            screen.wait(r"q quit")
            assert not screen.flags() & termios.ICANON
            screen.press("q")
            assert screen.ends() == 0 and screen.flags() & termios.ICANON and screen.flags() & termios.ECHO
        finally:
            screen.close()


def test_a_screen_of_24_rows_holds_what_matters_of_many_devices_and_namespaces() -> None:
    from rich.console import Console

    devices = [
        {
            "index": i,
            "path": f"/dev/nvme{i}n1",
            "state": "failed" if i == 29 else "online",
            "read_bytes": i,
            "errors": 0,
        }
        for i in range(32)
    ]
    nothing = {"count": 0, "total_ns": 0, "buckets": [0] * 40}
    change = {
        "seconds": 1.0, "devices": devices, "pool": {"path": "/srv/pool", "state": "mounted"}, "found_ages": [0] * 40,
        "latency": {name: nothing for name in ("read", "write", "open", "seal")},
    }  # fmt: skip
    found = {"namespaces": [{"path": f"/space-{i}", "blocks": 1, "bytes": i, "hits": 40 - i} for i in range(40)]}

    def drawn(controls: top.Controls) -> list[str]:
        console = Console(width=100, height=24, record=True, file=io.StringIO())
        console.print(top.view(change, found, controls, 24))
        return console.export_text().rstrip("\n").splitlines()

    lines = drawn(top.Controls())
    text = "\n".join(lines)
    assert len(lines) <= 24 and lines[-1].startswith("h help")
    # The failed one is first, the busiest come next; how many are left out is said.
    places = [line.split()[1] for line in lines if "/dev/nvme" in line]
    assert places[:3] == ["/dev/nvme29n1", "/dev/nvme31n1", "/dev/nvme30n1"] and len(places) >= 4
    assert f"device ({32 - len(places)} more)" in text and "namespace (" in text and "/space-39" in text
    by_name = drawn(top.Controls(order=2))
    assert next(line.split()[1] for line in by_name if "/dev/nvme" in line) == "/dev/nvme0n1"
    assert "/space-0 " in "\n".join(drawn(top.Controls(order=1)))
    assert top.fit([2, 30, 5], 12) == [2, 5, 5] and top.fit([1, 2], 100) == [1, 2] and top.fit([3, 3], 0) == [1, 1]


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
