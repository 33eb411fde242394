"""Each signal to each command that stays, and to the daemon: it ends cleanly and says so, or goes on and says so."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
from helpers import REPOSITORY, Pool, process_alive, read_file, slow, wait_until, write_file

from kvfs import signals

# A last resort: a command that stays alive is a failure before.
LIMIT_S = 60
# Real-time signals are alike: the first, and the last.
IGNORED = [number for number in signals.IGNORED if number <= signal.SIGRTMIN] + [signal.SIGRTMAX]
ENDING = [signal.SIGINT, signal.SIGHUP, *signals.ENDING]


class Command:
    """`kvfs WORDS` in a process of its own, whose output lies in files."""

    def __init__(self, directory: pathlib.Path, *words: object) -> None:
        self.directory = directory
        self._out, self._err = directory / "out", directory / "err"
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = subprocess.Popen(
                # A script's background, where a test may run, ignores INT and QUIT, and so would its children.
                ["env", "--default-signal", sys.executable, "-m", "kvfs", *map(str, words)],
                stdin=subprocess.DEVNULL, stdout=out, stderr=err, cwd=REPOSITORY,
            )  # fmt: skip

    @property
    def out(self) -> str:
        return self._out.read_text(errors="replace")

    @property
    def said(self) -> list[str]:
        """The lines on stderr, without those of a log, and without what a replay says before it begins."""
        lines = self._err.read_text(errors="replace").splitlines()
        return [line for line in lines if line.startswith("kvfs:") and "requests for" not in line]

    @property
    def errors(self) -> str:
        return self._err.read_text(errors="replace")

    def wait(self, condition: Callable[[], object], what: str) -> None:
        def holds() -> object:
            assert self.process.poll() is None, f"it has ended with {self.process.returncode}: {self.errors}"
            return condition()

        wait_until(holds, what, timeout_s=LIMIT_S)

    def close(self) -> None:
        self.process.kill()
        self.process.wait(LIMIT_S)


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(files=1, size="64M") as pool:
        write_file(pool.mount / "block", b"x" * 4096)
        yield pool


@pytest.fixture
def start(pool: Pool, tmp_path: pathlib.Path) -> Iterator[Callable[[str], Command]]:
    """start(VERB): a command that runs until it is told to end."""
    running: list[Command] = []

    def begin(verb: str) -> Command:
        words: dict[str, tuple[object, ...]] = {
            "keep": ("keep", tmp_path / "front.sock", tmp_path / "back.sock", "-o", "json"),
            "metrics": ("metrics", "0"),
            "events": ("events", pool.mount),
            "publisher": ("events", pool.mount, "--zmq", f"ipc://{tmp_path}/zmq"),
            "top": ("top", pool.mount, "--interval", "0.1", "-o", "json"),
            "stats": ("stats", pool.mount, "--interval", "0.1"),
            "replay": ("replay", tmp_path / "trace", "--target", tmp_path / "target", "--block-size", "4K"),
        }
        if verb == "publisher":
            pytest.importorskip("zmq")
        if verb == "replay":
            (tmp_path / "target").mkdir()
            requests = [{"timestamp": at * 1000, "input_length": 512, "hash_ids": [at]} for at in range(600)]
            (tmp_path / "trace").write_text("\n".join(map(json.dumps, requests)))
        command = Command(tmp_path, *words[verb])
        running.append(command)
        if verb == "events":

            def heard() -> bool:
                write_file(pool.mount / "block", b"y" * 4096)
                return command.out != ""

            command.wait(heard, "its first line")
        elif verb == "replay":
            command.wait(lambda: [n for n in os.listdir(tmp_path / "target") if n[0] != "."], "its first block")
        else:
            command.wait(lambda: command.out != "", "its first line")
        return command

    yield begin
    for command in running:
        command.close()


SERVICES = ("keep", "metrics", "events", "publisher", "top", "stats")
VERBS = ("keep", slow("metrics"), slow("events"), "publisher", slow("top"), slow("stats"), "replay")


@pytest.mark.parametrize("verb", VERBS)
def test_a_command_ignores_other_signals_and_says_so(start: Callable[[str], Command], verb: str) -> None:
    command = start(verb)
    ignored = [*IGNORED, signal.SIGHUP] if verb == "keep" else IGNORED
    for number in ignored:
        command.process.send_signal(number)
        line = f"kvfs: {signals.name_of(number)}: ignored"
        command.wait(lambda line=line: line in command.said, line)


@pytest.mark.parametrize("number", ENDING, ids=lambda number: signal.Signals(number).name)
@pytest.mark.parametrize("verb", ["keep", "metrics", slow("events"), "publisher", slow("top"), slow("stats"), "replay"])
def test_a_command_ends_with_one_line(start: Callable[[str], Command], verb: str, number: signal.Signals) -> None:
    if verb == "keep" and number == signal.SIGHUP:
        pytest.skip("it is ignored there")
    command = start(verb)
    command.process.send_signal(number)
    status = command.process.wait(LIMIT_S)
    if number == signal.SIGTERM and verb in SERVICES:
        assert status == 0 and command.said == []
    else:
        assert status == 128 + number
        assert command.said == [f"kvfs: {'interrupted' if number == signal.SIGINT else f'ended by {number.name}'}"]
    assert "Traceback" not in command.errors
    if verb == "keep":
        assert not (command.directory / "front.sock").exists()
    if verb == "replay":
        assert "(interrupted)" in command.out, "the report of what was done"


# A bench whose one case gets a signal, after it has made something.
BENCH = """
import dataclasses, signal, sys
sys.path.insert(0, "tools")
from benches import cases, main
from kvfs.cli.command import guarded

def run(rig):
    print(len(list(rig.base.parent.parent.glob("run-*"))), flush=True)
    signal.raise_signal(int(sys.argv[1]))

cases.CASES["random-read"] = dataclasses.replace(cases.CASES["random-read"], run=run)
words = ["--only", "random-read", "--quick", "--devices", "files", "--directory", sys.argv[2]]
sys.exit(guarded(lambda: main(words)))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, slow(signal.SIGHUP), slow(signal.SIGQUIT)])
def test_a_bench_removes_what_it_made(tmp_path: pathlib.Path, number: signal.Signals) -> None:
    command = ["env", "--default-signal", sys.executable, "-c", BENCH, str(int(number)), str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, cwd=REPOSITORY, check=False)
    assert result.stdout == "1\n" and list(tmp_path.iterdir()) == []
    told = "interrupted" if number == signal.SIGINT else f"ended by {number.name}"
    assert (result.returncode, result.stderr) == (128 + number, f"bench: random-read on files\nkvfs: {told}\n")


# ---- the daemon ----


def logged(pool: Pool, text: str) -> bool:
    return text in (pool.path / "kvfs.log").read_text()


def test_the_daemon_ignores_other_signals_and_logs_them(pool: Pool) -> None:
    pid = pool.pid()
    with (pool.mount / "open").open("wb") as file:
        file.write(b"not sealed yet")
        for number in IGNORED:
            os.kill(pid, number)
            line = f"{signals.name_of(number)}: ignored"
            wait_until(lambda line=line: logged(pool, line), line)
    assert read_file(pool.mount / "open") == b"not sealed yet"
    assert pool.pid() == pid and process_alive(pid)


@pytest.mark.parametrize("served", ["mount", slow("export")])
def test_a_signal_that_asks_for_it_ends_the_daemon_cleanly(own_pool, tmp_path: pathlib.Path, served: str) -> None:
    pool = own_pool(files=1, size="64M", started=False)
    for number in (signal.SIGINT, *signals.ENDING):
        if served == "mount":
            pool.start()
            write_file(pool.mount / number.name, number.name.encode())
        else:
            pool.command("export", str(pool.path), "--virtiofs", str(tmp_path / "x.sock"))
        pid = pool.pid()
        os.kill(pid, number)
        wait_until(lambda pid=pid: not process_alive(pid), f"the end by {number.name}")
        assert logged(pool, f"{number.name}: ending")
        assert not (pool.path / "kvfs.pid").exists()
        assert "nothing is damaged" in pool.command("fsck", str(pool.path)).stdout


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), slow(signal.SIGTERM, 0), slow(signal.SIGQUIT, 0)])
def test_a_daemon_in_the_foreground_outlives_its_terminal(own_pool, tmp_path, number, status) -> None:
    pool = own_pool(files=1, size="64M", started=False)
    command = Command(tmp_path, "mount", pool.path, pool.mount, "--foreground")
    try:
        command.wait(lambda: "mounted at" in command.errors, "the mount")
        command.process.send_signal(signal.SIGHUP)
        command.wait(lambda: "SIGHUP: pool.toml was read again: nothing has changed" in command.errors, "its line")
        write_file(pool.mount / "block", b"x")
        command.process.send_signal(number)
        assert command.process.wait(LIMIT_S) == status
        assert command.said == (["kvfs: interrupted"] if status else [])
    finally:
        command.close()


def test_hup_reads_the_rules_again_and_a_broken_file_keeps_them(own_pool) -> None:
    pool = own_pool(files=1, size="64M")
    path, pid = pool.path / "pool.toml", pool.pid()
    text = path.read_text()

    def told(line: str) -> None:
        os.kill(pid, signal.SIGHUP)
        wait_until(lambda: logged(pool, line), line)

    head, _, rest = text.partition("\n[geometry]")
    rules = 'log_level = "warning"\nslab_quota = 0.5\nuser_share = 0.125\n'
    share = pool.status()["share"]
    path.write_text(f'{head}{rules}\n[geometry]{rest}\n[[group]]\nsuffixes = ["", ".meta"]\n')
    told("SIGHUP: pool.toml was read again: log_level was info, is warning; slab_quota was 0.25, is 0.5; "
         "user_share was 0.25, is 0.125; rules of groups: 0 before, 1 now")  # fmt: skip
    assert pool.status()["share"] == share // 2
    os.kill(pid, signal.SIGUSR1)  # less than a warning
    path.write_text(f"{text}\nnonsense\n")
    told("pool.toml: not valid TOML")
    assert logged(pool, "the rules that were read before stay")
    assert pool.status()["share"] == share // 2 and not logged(pool, "SIGUSR1")
    path.write_text(text.replace("uuid = ", 'uuid = "12345678-1234-1234-1234-123456789012"\n#', 1))
    told("pool.toml: uuid is 12345678-1234-1234-1234-123456789012, but the pool that is mounted says")
    path.write_text(text)
    told("SIGHUP: pool.toml was read again: log_level was warning, is info")
    assert pool.status()["share"] == share


def test_hup_names_what_needs_a_new_mount(own_pool) -> None:
    pool = own_pool(files=1, size="64M")
    path = pool.path / "pool.toml"
    text = path.read_text()
    path.write_text(text.replace('path = "devices/0"', 'path = "devices/elsewhere"'))
    os.kill(pool.pid(), signal.SIGHUP)
    wait_until(
        lambda: logged(pool, "needs a new mount: device[0].path is devices/elsewhere, was devices/0"), "its line"
    )
    path.write_text(text)


def test_hup_opens_a_rotated_log_anew(own_pool) -> None:
    pool = own_pool(files=1, size="64M")
    pid, log = pool.pid(), pool.path / "kvfs.log"
    log.rename(pool.path / "kvfs.log.1")
    os.kill(pid, signal.SIGHUP)
    wait_until(lambda: log.exists() and logged(pool, "SIGHUP"), "the new log")
    assert os.path.samefile(f"/proc/{pid}/fd/2", log)
