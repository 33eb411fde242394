"""A daemon is killed between a change of names and its answer. The kernel sends the request again, and the next daemon
knows that it was done: to do it again would fail, or hit another file."""

from __future__ import annotations

import os
import pathlib
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
from helpers import content, process_alive, wait_until
from test_held_mounts import HeldPool, in_thread
from workload import Child

SOURCE = pathlib.Path(__file__).parent / "die_before_reply.c"
OLD, NEW = content(5000, 1), content(6000, 2)


@dataclass(frozen=True)
class Verb:
    """A request, as the kernel numbers it, and what it does to files that are there."""

    opcode: int
    work: Callable[[pathlib.Path], object]
    expected: dict[str, object]  # name -> bytes, a link's target, or None of a directory


def _write(path: pathlib.Path) -> None:
    path.write_bytes(NEW)


def _create(root: pathlib.Path) -> None:
    """O_EXCL: a second one would fail if the first had left a file."""
    with (root / "made").open("xb") as file:
        file.write(NEW)


VERBS = {
    "unlink": Verb(10, lambda root: (root / "file").unlink(), {}),
    "rename": Verb(12, lambda root: (root / "file").rename(root / "new"), {"new": OLD}),
    "rename over": Verb(12, lambda root: (root / "file").rename(root / "other"), {"other": OLD}),
    "rmdir": Verb(11, lambda root: (root / "empty").rmdir(), {}),
    "mkdir": Verb(9, lambda root: (root / "new").mkdir(), {"new": None}),
    "symlink": Verb(6, lambda root: (root / "new").symlink_to("target"), {"new": "target"}),
    "setxattr": Verb(21, lambda root: os.setxattr(root / "file", "user.x", b"y", os.XATTR_CREATE), {}),
    "removexattr": Verb(24, lambda root: os.removexattr(root / "file", "user.there"), {}),
    "flush": Verb(25, lambda root: _write(root / "new"), {"new": NEW}),
    "flush of a rewrite": Verb(25, lambda root: _write(root / "other"), {"other": NEW}),
    "create": Verb(35, _create, {"made": NEW}),
}
LEAVE = {"unlink": "file", "rename": "file", "rename over": "file", "rmdir": "empty"}


@pytest.fixture
def dying(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HeldPool]:
    library = tmp_path / "die.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", str(library), str(SOURCE), "-ldl"], check=True)
    with HeldPool(files=2, size="256M", started=False) as made:
        made.hold()
        made.mount_args = ("--allow-other", "--hold", str(made.socket))
        monkeypatch.setenv("DIE_AT", str(made.base / "die"))
        monkeypatch.setenv("LD_PRELOAD", str(library))
        made.start()
        monkeypatch.delenv("LD_PRELOAD")
        made.preload = str(library)  # type: ignore[attr-defined]
        yield made


def _seen(root: pathlib.Path) -> dict[str, object]:
    return {
        path.name: str(path.readlink()) if path.is_symlink() else None if path.is_dir() else path.read_bytes()
        for path in root.iterdir()
    }


def _one(pool: HeldPool, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    verb, root, pid = VERBS[name], pool.mount / name.replace(" ", "-"), pool.pid()
    root.mkdir()
    for file in ("file", "other"):
        (root / file).write_bytes(OLD if file == "file" else OLD[::-1])
    os.setxattr(root / "file", "user.there", b"1")
    (root / "empty").mkdir()
    os.sync()
    expected = {"file": OLD, "other": OLD[::-1], "empty": None} | verb.expected
    expected.pop(LEAVE.get(name, ""), None)
    # Its own process: files that are open for writing are nobody else's.
    go = pool.base / "go"
    child = Child(lambda: (wait_until(go.exists, "the request"), verb.work(root))[1] and None)
    (pool.base / "die").write_text(str(verb.opcode))
    go.touch()
    wait_until(lambda: not process_alive(pid), f"the end of daemon {pid}, at its answer to {name}")
    go.unlink()
    assert not (pool.base / "die").exists()
    with monkeypatch.context() as patch:
        patch.setenv("LD_PRELOAD", pool.preload)  # type: ignore[attr-defined]
        pool.start()
    child.result()  # no error
    assert in_thread(lambda: _seen(root))() == expected
    attributes = {"setxattr": ["user.there", "user.x"], "removexattr": []}.get(name, ["user.there"])
    where = root / ("new" if name == "rename" else "other" if name == "rename over" else "file")
    if name != "unlink":
        assert sorted(os.listxattr(where)) == attributes


def test_a_request_that_was_done_is_not_done_again(dying: HeldPool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("rename over", "mkdir", "flush"):
        _one(dying, name, monkeypatch)


@pytest.mark.slow
def test_no_request_that_was_done_is_done_again(dying: HeldPool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VERBS:
        _one(dying, name, monkeypatch)
