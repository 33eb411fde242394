"""The memory limit of a cgroup, on made-up trees of both versions, and what it makes of the sizes of a mount."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from kvfs import doctor
from kvfs.cgroup import LEAST, Limit, memory_limit, threads_told
from kvfs.daemon import options as daemon_options
from kvfs.daemon.options import MountOptions, fit_memory
from kvfs.errors import KvfsError

MIB = 1 << 20


class Tree:
    """A /proc/self and a hierarchy of cgroups in a folder."""

    def __init__(self, folder: Path, own: str, *, version: int = 2, root: str = "/", at: str = "sys fs cgroup") -> None:
        self.proc, self.at, self.version = folder / "proc", folder / at, version
        self.proc.mkdir()
        self.at.mkdir()
        mountpoint = str(self.at).replace(" ", "\\040")
        kind, line, options = (
            ("cgroup2", f"0::{own}", "rw") if version == 2 else ("cgroup", f"4:memory,pids:{own}", "memory,pids")
        )
        (self.proc / "cgroup").write_text(f"9:name=systemd:/\n1:cpu,cpuacct:/else\n{line}\n")
        (self.proc / "mountinfo").write_text(
            "23 1 0:20 / / rw - ext4 /dev/sda rw\n"
            "31 23 0:28 / /nowhere rw - cgroup cgroup rw,cpu\n"
            f"32 23 0:29 {root} {mountpoint} rw shared:9 - {kind} {kind} rw,{options}\n"
        )

    def limit(self, where: str, text: str) -> Path:
        directory = self.at / where
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / ("memory.max" if self.version == 2 else "memory.limit_in_bytes")
        path.write_text(text)
        return path


@pytest.mark.parametrize("version", [1, 2])
def test_the_smallest_limit_up_the_tree_counts(tmp_path: Path, version: int) -> None:
    tree = Tree(tmp_path, "/kubepods/pod 1/engine", version=version)
    tree.limit("kubepods/pod 1/engine", f"{300 * MIB}\n")
    path = tree.limit("kubepods/pod 1", f"{200 * MIB}\n")
    tree.limit("kubepods", f"{900 * MIB}\n")
    tree.limit("other", f"{MIB}\n")
    assert memory_limit(tree.proc) == Limit(200 * MIB, path)


@pytest.mark.parametrize("version", [1, 2])
def test_the_limit_of_threads_is_told_with_its_file(tmp_path: Path, version: int) -> None:
    tree = Tree(tmp_path, "/a/b", version=version)
    tree.limit("a/b", f"{MIB}\n").with_name("pids.max").write_text("max\n")
    assert threads_told(tree.proc).startswith("pids.max: no limit is seen here; ulimit -u: ")
    path = tree.limit("a", "max\n").with_name("pids.max")
    path.write_text("20\n")
    assert threads_told(tree.proc).startswith(f"pids.max: 20 in {path}; ulimit -u: ")


@pytest.mark.parametrize("text", ["max\n", "9223372036854771712\n", "", "-1\n", "12 34\n", "\u0663\n", "9" * 40, "1e9"])
def test_no_limit_and_what_is_no_number_are_none(tmp_path: Path, text: str) -> None:
    tree = Tree(tmp_path, "/a")
    tree.limit("a", text)
    assert memory_limit(tree.proc) is None


@pytest.mark.parametrize(
    ("own", "root"),
    [
        ("/", "/"),  # a cgroup namespace of its own
        ("/docker/1f", "/docker/1f"),  # without one: the mount begins at the container's cgroup
        ("/docker/1f", "/docker/2e"),  # the path is the machine's, the mount the container's
        ("/../../1f", "/"),  # moved out of its namespace
        ("/docker/../1f", "/docker"),
    ],
)
def test_a_container_finds_its_limit_at_the_mount_point(tmp_path: Path, own: str, root: str) -> None:
    tree = Tree(tmp_path, own, root=root)
    path = tree.limit("", f"{512 * MIB}\n")
    assert memory_limit(tree.proc) == Limit(512 * MIB, path)


def test_nothing_to_read_is_no_limit(tmp_path: Path) -> None:
    assert memory_limit(tmp_path / "none") is None
    tree = Tree(tmp_path, "/a/b")
    assert memory_limit(tree.proc) is None  # no file of a limit
    (tree.proc / "mountinfo").write_bytes(b"broken\n - \n1 2 3 4 - cgroup2\n\xff")
    assert memory_limit(tree.proc) is None


def fitted(monkeypatch: pytest.MonkeyPatch, limit: int | None, **sizes: int) -> tuple[int | None, int | None]:
    found = None if limit is None else Limit(limit, Path("/sys/fs/cgroup/memory.max"))
    monkeypatch.setattr(daemon_options, "memory_limit", lambda: found)
    options = fit_memory(MountOptions(pool=Path("/srv/pool"), **sizes))  # type: ignore[arg-type]
    return options.staging_size, options.read_memory_size


def test_defaults_are_at_most_a_quarter_and_an_eighth(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fitted(monkeypatch, 4096 * MIB) == (256 * MIB, 128 * MIB)
    assert fitted(monkeypatch, 512 * MIB) == (128 * MIB, 64 * MIB)
    assert fitted(monkeypatch, 128 * MIB) == (32 * MIB, 16 * MIB)
    assert fitted(monkeypatch, 512 * MIB, staging_size=300 * MIB) == (300 * MIB, 64 * MIB)
    assert fitted(monkeypatch, LEAST, staging_size=MIB, read_memory_size=0) == (16 * MIB, 16 * MIB)


def test_a_limit_that_is_too_small_is_named_with_all_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KvfsError) as caught:
        fitted(monkeypatch, 90 * MIB)
    said = str(caught.value)
    for number in ("/srv/pool", "90M", "/sys/fs/cgroup/memory.max", "64M", "22M", "16M", "96M"):
        assert number in said
    with pytest.raises(KvfsError, match="500M of --staging"):
        fitted(monkeypatch, 512 * MIB, staging_size=500 * MIB)
    assert fitted(monkeypatch, None, staging_size=500 * MIB)[0] == 500 * MIB


@pytest.mark.parametrize(("size", "state"), [(95 * MIB, "missing"), (512 * MIB, "note"), (1 << 30, "ok")])
def test_the_doctor_shows_the_limit(monkeypatch: pytest.MonkeyPatch, size: int, state: str) -> None:
    monkeypatch.setattr(doctor, "memory_limit", lambda: Limit(size, Path("/sys/fs/cgroup/a/memory.max")))
    check = next(itertools.chain(doctor._memory()))
    assert check.state == state and check.fatal == (state == "missing")
    assert f"{size >> 20} MiB" in check.found and "/sys/fs/cgroup/a/memory.max" in check.found
