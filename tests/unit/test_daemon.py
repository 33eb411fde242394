"""Starting the daemon: what its parent hears, and what it does about silence and death."""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from kvfs import cgroup
from kvfs.daemon import process
from kvfs.daemon.daemon import Daemon
from kvfs.daemon.host import pid_file
from kvfs.daemon.options import MountOptions, check_idmap
from kvfs.daemon.process import _relay
from kvfs.daemon.reporter import Reporter
from kvfs.errors import DeadlineError, KvfsError, MissingFeatureError, UsageError, first_error
from kvfs.plane import EventType
from kvfs.store.store import Store

OPTIONS = MountOptions(pool=Path("/srv/pool"), mountpoint=Path("/mnt/kv"), start_timeout_s=20)
Start = Callable[[str], tuple[int, int]]


def test_a_kernel_without_idmapped_mounts_is_told_of_and_so_is_a_mount_of_one_user(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = replace(OPTIONS, idmap=True, allow_other=True)
    monkeypatch.setattr("platform.release", lambda: "6.11.4")
    with pytest.raises(UsageError, match=r"--idmap: Linux 6\.12 or newer can do that; this is 6\.11\.4"):
        check_idmap(asked)
    check_idmap(replace(asked, idmap=False))
    monkeypatch.setattr("platform.release", lambda: "6.12.0")
    check_idmap(asked)
    with pytest.raises(UsageError, match="--allow-other alone: give both"):
        check_idmap(replace(asked, allow_other=False))


@pytest.fixture
def start() -> Start:
    """Run a Python program as the starting daemon; its file descriptor 3 leads to the parent."""

    def run(program: str) -> tuple[int, int]:
        reading, writing = os.pipe()
        actions = [(os.POSIX_SPAWN_DUP2, writing, 3)]
        pid = os.posix_spawn(sys.executable, [sys.executable, "-c", program], os.environ, file_actions=actions)
        os.close(writing)
        return pid, reading

    return run


def said(*messages: dict[str, object]) -> str:
    text = "".join(json.dumps(message) + "\n" for message in messages)
    return f"import os; os.write(3, {text.encode()!r})"


def test_the_parent_returns_the_pid_once_the_mount_answers(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    pid, reading = start(said({"info": "segments read: 10%"}, {"ready": 1}))
    assert _relay(pid, reading, OPTIONS) == pid
    assert capsys.readouterr().err == "kvfs: segments read: 10%\n"
    os.waitpid(pid, 0)
    os.close(reading)


@pytest.mark.parametrize(("usage", "kind"), [(False, KvfsError), (True, UsageError)])
def test_an_error_of_the_daemon_is_raised_in_the_parent(start: Start, usage: bool, kind: type[KvfsError]) -> None:
    pid, reading = start(said({"error": "device 2: gone", "errno": errno.ENXIO, "usage": usage}))
    with pytest.raises(kind, match="device 2: gone") as raised:
        _relay(pid, reading, OPTIONS)
    assert raised.value.errno == errno.ENXIO
    os.close(reading)


def test_a_daemon_that_dies_is_reported_with_its_signal(start: Start) -> None:
    pid, reading = start("import os; os.kill(os.getpid(), 11)")
    with pytest.raises(KvfsError, match=r"ended while starting \(signal SIGSEGV\)"):
        _relay(pid, reading, OPTIONS)
    os.close(reading)


def test_a_daemon_that_says_nothing_is_stopped(start: Start) -> None:
    pid, reading = start("import time; time.sleep(600)")
    options = MountOptions(pool=Path("/srv/pool"), mountpoint=Path("/mnt/kv"), start_timeout_s=0.2)
    with pytest.raises(DeadlineError, match="said nothing for"):
        _relay(pid, reading, options)
    with pytest.raises(ChildProcessError):
        os.waitpid(pid, 0)
    os.close(reading)


def test_the_error_that_says_most_is_told() -> None:
    group = BaseExceptionGroup(
        "nursery", [RuntimeError("loose end"), ExceptionGroup("inner", [ValueError("x"), KvfsError("segment 3: torn")])]
    )
    assert str(first_error(group)) == "segment 3: torn"
    assert str(first_error(BaseExceptionGroup("nursery", [RuntimeError("alone")]))) == "alone"


def test_the_pid_file_is_there_while_the_daemon_is(tmp_path: Path) -> None:
    with pid_file(tmp_path):
        assert int((tmp_path / "kvfs.pid").read_text()) == os.getpid()
    assert not (tmp_path / "kvfs.pid").exists()


def test_whoever_mounts_after_the_last_transport_is_gone_may_wait() -> None:
    """Before anything else of the end, which may take a while, so that no mount in between is refused."""
    told: list[bool] = []
    serving = Daemon(OPTIONS, "/mnt/kv")
    serving._store = cast(Store, SimpleNamespace(ending=lambda: told.append(serving._gone.is_set())))
    serving._on_event(EventType.TRANSPORTS_GONE, 0, 0)
    assert told == [False] and serving._gone.is_set()


def test_a_daemon_that_gets_no_thread_says_how_many_it_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(process, "_prepare_and_serve", refused)
    monkeypatch.setattr(cgroup, "threads_told", lambda: "pids.max: 20 in /sys/fs/cgroup/pids.max")
    with pytest.raises(MissingFeatureError, match=r"/pool: .*no thread could be made.*; pids\.max: 20 in /sys"):
        process._run(MountOptions(pool=Path("/pool")), Reporter(None))
