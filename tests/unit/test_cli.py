"""The command line: what it refuses, in one line, with which status, and that nothing has changed then."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvfs import cli
from kvfs.cli import programs, usage, watching
from kvfs.cli.command import parser
from kvfs.cli.targets import in_a_mount
from kvfs.errors import DeadlineError
from kvfs.frontend import asking, mount
from kvfs.virtiofs import relay


def run(*arguments: object, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    try:
        status = cli.main([str(argument) for argument in arguments])
    except SystemExit as ending:
        status = int(ending.code or 0)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def tree(path: Path) -> list[tuple[str, int]]:
    """Every file below a path, with its size: to see that nothing has changed."""
    return sorted((str(file), file.lstat().st_size) for file in path.rglob("*"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "VERB"),
        (["frobnicate"], "frobnicate"),
        (["format"], "POOL"),
        (["format", "{pool}"], "--device"),
        (["format", "{pool}", "--files", "2"], "--size"),
        (["format", "{pool}", "--files", "0", "--size", "64M"], "'0'"),
        (["format", "{pool}", "--files", "two", "--size", "64M"], "'two'"),
        (["format", "{pool}", "--files", "2", "--size", "64X"], "64X"),
        (["format", "{pool}", "--files", "2", "--size", "-4M"], "--size"),
        (["format", "{pool}", "--files", "2", "--size", ""], "--size"),
        (["format", "{pool}", "--files", "2", "--size", "64M", "--device", "/dev/null"], "--files"),
        (["format", "{pool}", "--device", "/dev/null", "--size", "64M"], "--size"),
        (["format", "{pool}", "--files", "2", "--size", "64M", "--stripe-unit", "lots"], "lots"),
        (["format", "{pool}", "--files", "2", "--size", "64M", "--stripe-width", "3"], "3"),
        (["mount", "{pool}"], "MOUNTPOINT"),
        (["mount", "{pool}", "{pool}", "--staging", "1Q"], "1Q"),
        (["mount", "{pool}", "{pool}", "--virtiofs", "/tmp/a.sock,queues=0"], "queues=0"),
        (["export"], "POOL"),
        (["export", "{pool}"], "--virtiofs"),
        (["export", "{pool}", "--show-qemu"], "not exported now"),
        (["export", "{pool}", "--virtiofs", "/tmp/a.sock,tag="], "0 bytes"),
        (["export", "{pool}", "--virtiofs", "/tmp/a.sock", "--virtiofs", "/tmp/a.sock"], "given twice"),
        (["export", "{pool}", "--allow-other"], "--allow-other"),
        (["keep", "/tmp/a.sock"], "EXPORT"),
        (["keep", "/tmp/a.sock", "/tmp/b.sock", "--timeout", "0"], "'0'"),
        (["keep", "/tmp/a.sock,queues=0", "/tmp/b.sock"], "queues=0"),
        (["umount"], "MOUNTPOINT|POOL"),
        (["stats"], "POOL|MOUNTPOINT"),
        (["stats", "{pool}", "--interval", "soon"], "soon"),
        (["stats", "{pool}", "--interval", "0"], "'0'"),
        (["evict", "{pool}"], "--size"),
        (["evict", "{pool}", "--size", "1G", "--all"], "--all"),
        (["pin"], "PATH"),
        (["import", "{pool}"], "--device"),
        (["status", "-o", "xml"], "xml"),
        (["doctor", "--repair"], "--repair"),
        (["events", "{pool}", "--clear"], "--clear is of --zmq"),
        (["events", "{pool}", "--zmq", "tcp://*:1", "--clear", "--hashes", "keys"], "--clear with --hashes keys"),
    ],
)
def test_a_command_line_without_sense_is_one_line_and_status_2(
    arguments: Sequence[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pool = tmp_path / "pool"
    status, out, error = run(*[argument.format(pool=pool) for argument in arguments], capsys=capsys)
    assert status == 2, error
    assert out == ""
    assert error.startswith("kvfs") and words in error and error.count("\n") == 1, error
    assert tree(tmp_path) == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["mount", "{none}", "{directory}"], "none: "),
        (["mount", "{directory}", "{directory}"], "directory: "),
        (["mount", "{directory}", "/proc"], ""),
        (["mount", "{file}", "{directory}"], "file: "),
        (["export", "{none}", "--virtiofs", "{socket}"], "none: "),
        (["export", "{directory}", "--virtiofs", "{socket}"], "directory: "),
        (["export", "{file}", "--virtiofs", "{socket}"], "file: "),
        (["mount", "{directory}", "{directory}", "--virtiofs", "{socket}"], "directory: "),
        (["keep", "{file}", "{socket}"], "file: exists and is no socket"),
        (["umount", "{directory}"], "directory: not mounted"),
        (["umount", "{none}"], "none: not mounted"),
        (["umount", "/proc"], "/proc: not a kvfs mount (proc)"),
        (["status", "{none}"], "none: no such pool"),
        (["status", "{directory}"], "directory: "),
        (["stats", "{directory}"], "directory: not mounted, and no pool"),
        (["evict", "{directory}", "--all"], "directory: not mounted, and no pool"),
        (["fsck", "{directory}"], "directory: "),
        (["fsck", "{none}"], "none: "),
        (["pin", "{file}"], "file: not in a kvfs mount"),
        (["unpin", "{none}"], "none: no such file"),
        (["import", "{directory}", "--device", "{file}"], "file: "),
        (["format", "{pool}", "--device", "{none}"], "none: "),
        (["format", "{pool}", "--device", "{directory}"], "directory: "),
        (["format", "{pool}", "--device", "{file}", "--force"], "file: "),
    ],
)
def test_what_cannot_be_done_is_one_line_that_names_the_object(
    arguments: Sequence[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = {name: tmp_path / name for name in ("none", "directory", "file", "pool", "socket")}
    names["directory"].mkdir()
    names["file"].write_bytes(b"x")
    before = tree(tmp_path)
    status, out, error = run(*[argument.format(**names) for argument in arguments], capsys=capsys)
    assert status in (1, 2), error
    assert out == ""
    assert error.startswith("kvfs: ") and words in error and error.count("\n") == 1, error
    assert "Traceback" not in error and "internal error" not in error, error
    assert tree(tmp_path) == before


def test_an_unexpected_error_is_one_line_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def explode(path: object) -> None:
        raise ZeroDivisionError("division\nby zero")

    monkeypatch.setattr(mount, "find_mount", explode)
    status, _, error = run("umount", tmp_path, capsys=capsys)
    assert status == 1
    assert error == "kvfs: internal error: ZeroDivisionError: division by zero (KVFS_DEBUG=1 shows where)\n"
    monkeypatch.setenv("KVFS_DEBUG", "1")
    assert "Traceback" in run("umount", tmp_path, capsys=capsys)[2]


def test_kvfs_does_not_run_without_its_assertions() -> None:
    result = subprocess.run(
        [sys.executable, "-O", "-m", "kvfs", "status"], capture_output=True, text=True, check=False, timeout=60
    )
    assert result.returncode == 1
    assert result.stderr.startswith("kvfs: python -O") and result.stderr.count("\n") == 1


def test_status_of_nothing_is_an_empty_list(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(mount, "mounts", lambda: [])
    status, out, _ = run("status", "-o", "json", capsys=capsys)
    assert status == 0
    assert json.loads(out) == {"version": 1, "pools": []}


def status_of(failures: dict[str, Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two pools are mounted; these cannot be asked."""

    def answer(pool: Path) -> dict[str, object]:
        if str(pool) in failures:
            raise failures[str(pool)]
        return {"pool": {"path": str(pool), "state": "mounted"}}

    monkeypatch.setattr(watching, "pools_mounted", lambda: [Path("/srv/a"), Path("/srv/b")])
    monkeypatch.setattr(watching, "status_of", answer)


def test_status_of_a_pool_that_does_not_answer_hides_no_other(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status_of({"/srv/a": DeadlineError("/srv/a: the daemon gave no answer")}, monkeypatch)
    status, out, error = run("status", capsys=capsys)
    assert (status, error) == (1, "kvfs: /srv/a: the daemon gave no answer\n")
    assert "/srv/b" in out
    status, out, _ = run("status", "-o", "json", capsys=capsys)
    document = json.loads(out)
    assert status == 1 and [pool["pool"]["path"] for pool in document["pools"]] == ["/srv/b"]
    assert document["errors"] == [{"error": "/srv/a: the daemon gave no answer", "errno": errno.ETIMEDOUT}]


def test_status_of_pools_of_others_alone_is_a_failure_and_beside_ones_own_is_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    refused = asking.NotAllowedError("not yours")
    status_of({"/srv/a": refused}, monkeypatch)
    assert run("status", capsys=capsys)[0] == 0
    status_of({"/srv/a": refused, "/srv/b": refused}, monkeypatch)
    assert run("status", capsys=capsys) == (1, "", "kvfs: not yours\n" * 2)
    status, out, _ = run("status", "-o", "json", capsys=capsys)
    assert status == 1 and [item["errno"] for item in json.loads(out)["errors"]] == [errno.EACCES] * 2


def test_every_verb_that_stays_kvfs_takes_json() -> None:
    others = {"completion", "man", "help", *programs.RUN_VERBS}
    _, verbs = usage.read(parser())
    takes = {verb.name for verb in verbs if any("-o" in option.names for option in verb.options)}
    assert takes == {verb.name for verb in verbs} - others


def test_keep_says_in_json_where_it_listens_and_leaves_no_handler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(relay, "keep", lambda *_: None)
    before = {number: signal.getsignal(number) for number in signal.valid_signals()}
    status, out, _ = run("keep", tmp_path / "a.sock", tmp_path / "b.sock", "-o", "json", capsys=capsys)
    assert status == 0
    assert {number: signal.getsignal(number) for number in signal.valid_signals()} == before
    assert json.loads(out) == {"version": 1, "socket": str(tmp_path / "a.sock"), "export": str(tmp_path / "b.sock")}


def test_doctor_answers_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run("doctor", "-o", "json", capsys=capsys)
    document = json.loads(out)
    assert document["version"] == 1
    assert document["mount_can_work"] == (status == 0)
    assert {"name", "state", "found", "action", "required"} == set(document["checks"][0])


def test_completion_is_bash_and_knows_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run("completion", capsys=capsys)
    assert status == 0
    verbs = "format mount export keep umount status stats fsck pin unpin evict doctor import"
    for verb in verbs.split():
        assert verb in out
    assert subprocess.run(["bash", "-n"], input=out, text=True, check=False).returncode == 0
    script = out + '\nCOMP_WORDS=(kvfs fsck --re); COMP_CWORD=2; _kvfs; echo "${COMPREPLY[@]}"'
    found = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
    assert found.stdout.strip() == "--repair"


def test_a_path_in_a_mount_below_another_one_is_judged_by_the_nearer() -> None:
    kvfs = mount.Mount("/mnt/kv", "/srv/pool", mount.FILESYSTEM_TYPE, "rw", "0:50")
    tmpfs = mount.Mount("/mnt/kv/tmp", "tmpfs", "tmpfs", "rw", "0:51")
    root = mount.Mount("/", "/dev/sda1", "ext4", "rw", "8:1")
    assert in_a_mount("/mnt/kv/file", [root, kvfs, tmpfs])
    assert not in_a_mount("/mnt/kv/tmp/file", [root, kvfs, tmpfs])
    assert not in_a_mount("/mnt/kvx", [root, kvfs, tmpfs])


def test_mount_kvfs_translates_mount_options(tmp_path: Path) -> None:
    helper = Path(__file__).resolve().parents[2] / "tools" / "mount.kvfs"
    command = [
        str(helper),
        "/srv/pool",
        "/mnt/kv",
        "-n",
        "-o",
        "defaults,allow_other,idmap,noexec,ro,staging=1G,nofail,x-systemd.automount",
        "-f",
    ]
    environment = {**os.environ, "KVFS": "/bin/true"}
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert result.stdout.split() == [
        "/bin/true", "mount", "/srv/pool", "/mnt/kv", "--allow-other", "--idmap", "--staging", "1G", "--options",
        "noexec,ro",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        (("moutn", "p", "m"), "mount"),
        (("umount", "p", "--lazi"), "--lazy"),
        (("status", "p", "-o", "jsno"), "json"),
        (("mount", "p", "m", "--allow-othr"), "--allow-other"),
    ],
)
def test_a_typing_mistake_is_answered_with_what_was_meant(
    typed: tuple[str, ...], meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, _, errors = run(*typed, capsys=capsys)
    assert status == 2 and f"; did you mean {meant}?" in errors and errors.count("\n") == 1


def test_nothing_is_guessed_where_nothing_comes_near(capsys: pytest.CaptureFixture[str]) -> None:
    status, _, errors = run("xyzzy", "p", capsys=capsys)
    assert status == 2 and "did you mean" not in errors


def test_dir_names_what_is_loaded_later() -> None:
    code = "import kvfs, sys; print('connect' in dir(kvfs), 'Client' in dir(kvfs), 'kvfs.client' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout
    assert shown.split() == ["True", "True", "False"]
