"""Daemons in a cgroup with a memory limit, as a container's."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
from helpers import REPOSITORY, Pool, content, read_file, requires_fuse, run, wait_until

from kvfs.frontend.asking import ControlClient
from kvfs.status.numbers import number, section

MIB = 1 << 20


def own_directory() -> tuple[pathlib.Path, str] | None:
    """The directory of this process's cgroup that can have a memory limit, and its file's name."""
    for line in pathlib.Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            return pathlib.Path("/sys/fs/cgroup/memory") / path.strip("/"), "memory.limit_in_bytes"
        if not controllers:
            directory = pathlib.Path("/sys/fs/cgroup") / path.strip("/")
            if "memory" in _text(directory / "cgroup.subtree_control").split():
                return directory, "memory.max"
    return None


def _text(path: pathlib.Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text()
    return ""


class Group:
    """A cgroup of our own with a limit."""

    def __init__(self, directory: pathlib.Path, name: str) -> None:
        self.directory, self.limit = directory, directory / name

    def kvfs(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run kvfs in it. A shell steps in, as the interpreter's own memory must count there."""
        script = 'echo $$ >"$0" && exec "$@"'
        command = ["sh", "-c", script, str(self.directory / "cgroup.procs"), sys.executable, "-m", "kvfs", *words]
        return run(*command, check=False, environment={"PYTHONPATH": str(REPOSITORY)})

    def killed(self) -> int:
        """Processes that the kernel has killed in it."""
        for name in ("memory.oom_control", "memory.events"):
            for line in _text(self.directory / name).splitlines():
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
        return 0


@pytest.fixture
def group() -> Iterator[Group]:
    found = own_directory()
    if found is None:
        pytest.skip("no cgroup here can have a memory limit")
    directory, name = found[0] / f"kvfs-test-{os.getpid()}", found[1]
    try:
        directory.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup can be made: {error}")
    try:
        yield Group(directory, name)
    finally:
        for pid in _text(directory / "cgroup.procs").split():
            os.kill(int(pid), signal.SIGKILL)
        wait_until(lambda: _removed(directory), "the cgroup is empty")


def _removed(directory: pathlib.Path) -> bool:
    with contextlib.suppress(OSError):
        directory.rmdir()
    return not directory.exists()


def test_a_daemon_in_128_mib_serves_writers_and_readers(group: Group) -> None:
    requires_fuse()
    group.limit.write_text(f"{128 * MIB}\n")
    with Pool(size="256M", started=False) as pool:
        started = group.kvfs("mount", str(pool.path), str(pool.mount), "--allow-other")
        assert started.returncode == 0, started.stderr
        with ControlClient(pool.path) as client:
            status = client.call("status")
        memory = section(status, "memory")
        assert number(memory, "staging_size") == 32 * MIB and number(memory, "read_memory_size") == 16 * MIB
        assert number(memory, "limit") == 128 * MIB and memory["limit_path"] == str(group.limit)
        assert "staging 32.00M, reads 16.00M, cgroup's limit 128M" in pool.command("status", str(pool.path)).stdout
        failures: list[BaseException] = []

        def work(index: int) -> None:
            try:
                data = content(24 * MIB, index)
                for turn in range(3):
                    path = pool.mount / f"{index}-{turn}"
                    path.write_bytes(data)
                    assert read_file(path) == data
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(index,)) for index in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures and group.killed() == 0
        pool.umount()
        checked = group.kvfs("fsck", str(pool.path), "--verify-data")
        assert checked.returncode == 0 and "432M read and right" in checked.stdout, checked.stderr
        assert group.killed() == 0


def test_a_limit_below_the_need_is_named_before_anything_is_made(group: Group) -> None:
    group.limit.write_text(f"{80 * MIB}\n")
    with Pool(size="256M", started=False) as pool:
        before = sorted(path.name for path in pool.path.iterdir())
        failed = group.kvfs("mount", str(pool.path), str(pool.mount))
        assert failed.returncode == 1
        for words in ("memory limit is 80M", str(group.limit), "20M of --staging", "96M in all is the least"):
            assert words in failed.stderr
        checked = group.kvfs("fsck", str(pool.path))
        assert checked.returncode == 1 and str(group.limit) in checked.stderr
        assert "memory limit is 80M" in checked.stderr and "needs 96M at least" in checked.stderr
        assert sorted(path.name for path in pool.path.iterdir()) == before
        doctor = group.kvfs("doctor")
        assert "80 MiB: the cgroup's limit" in doctor.stdout and "a mount cannot work: memory" in doctor.stdout
