"""A daemon that listens and says nothing: each verb that asks it gives up in the same time, and says why."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvfs.cli import main, mounting
from kvfs.frontend import asking
from kvfs.frontend.asking import socket_path

VERBS = [
    ("status",), ("list",), ("stats",), ("top", "-o", "json"), ("evict", "--all"), ("evict", "--size", "1M"),
    ("device", "list"), ("device", "remove", "0"), ("device", "replace", "0", "/dev/null"), ("umount",),
    ("export", "--show-qemu"),
]  # fmt: skip


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(asking, "TIMEOUT_S", 0.2)
    monkeypatch.setattr(mounting, "UMOUNT_STATUS_TIMEOUT_S", 0.2)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        with socket_path(tmp_path) as path:
            listener.bind(path)
        listener.listen(16)
        (tmp_path / "kvfs.pid").write_text(f"{os.getpid()}\n")
        yield tmp_path


def words(verb: tuple[str, ...], pool: Path) -> list[str]:
    """The pool is the first argument, after the action of `device`."""
    at = 2 if verb[0] == "device" else 1
    return [*verb[:at], str(pool), *verb[at:]]


@pytest.mark.parametrize("verb", VERBS, ids=" ".join)
def test_each_verb_gives_up_in_the_same_time(
    pool: Path, verb: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words(verb, pool)) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"kvfs: {pool}: the daemon gave no answer to '") and said.endswith("' for 0.2 s\n")


@contextlib.contextmanager
def stopped(program: str, pool: Path) -> Iterator[int]:
    """A process in the pool's directory that says a line and is stopped then."""
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, cwd=pool, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None and process.stdout.readline()
            process.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, process.pid, os.WSTOPPED)
            yield process.pid
        finally:
            process.kill()


LISTENER = """import os, socket, time
os.unlink("control.sock")
listener = socket.socket(socket.AF_UNIX)
listener.bind("control.sock")
listener.listen()
print("listens", flush=True)
time.sleep(600)"""


def test_a_daemon_that_is_stopped_is_called_so(pool: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with stopped(LISTENER, pool) as pid:
        assert main(["evict", str(pool), "--all"]) == 1
        assert capsys.readouterr().err == (
            f"kvfs: {pool}: the daemon (pid {pid}) is stopped, by SIGSTOP or a debugger: "
            f"kill -CONT {pid} lets it go on\n"
        )


def test_a_stopped_process_that_has_the_number_of_an_earlier_daemon_is_not_meant(
    pool: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with stopped('print("here", flush=True); import time; time.sleep(600)', pool) as pid:
        (pool / "kvfs.pid").write_text(f"{pid}\n")
        assert main(["evict", str(pool), "--all"]) == 1
        assert capsys.readouterr().err == f"kvfs: {pool}: the daemon gave no answer to 'evict' for 0.2 s\n"
