"""A daemon that is the first process of a pid namespace, as in a container: its end, signals and orphans."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers import REPOSITORY, Pool, often, requires_fuse, run, slowness, wait_until

KVFS = (sys.executable, "-m", "kvfs")
ENDS_WITHIN_S = 120


class Contained:
    """A daemon in the foreground, in a pid and a mount namespace of its own."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        words = (
            "unshare",
            "--pid",
            "--mount",
            "--fork",
            "--mount-proc",
            "--kill-child",
            *KVFS,
            "mount",
            "--foreground",
        )
        with (pool.base / "container.log").open("ab") as log:
            self.outside = subprocess.Popen(
                [*words, str(pool.path), str(pool.mount)], cwd=REPOSITORY, stdout=log, stderr=log
            )
        self.first = wait_until(lambda: next(iter(children(self.outside.pid)), None), "the first process")
        wait_until(lambda: self.inside("mountpoint", pool.mount).returncode == 0, "the mount answers")

    def words(self, *command: str | Path) -> list[str]:
        return ["nsenter", "--target", str(self.first), "--pid", "--mount", *map(str, command)]

    def inside(self, *command: str | Path) -> subprocess.CompletedProcess[str]:
        return run(*self.words(*command), check=False)

    def status(self) -> int:
        return self.outside.wait(ENDS_WITHIN_S * slowness())

    def stop(self) -> None:
        self.outside.kill()
        self.outside.wait(60)


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.fixture
def contained(own_pool: Callable[..., Pool]) -> Iterator[Callable[[], Contained]]:
    requires_fuse()
    if os.getuid() != 0:
        pytest.skip("namespaces are made by root")
    pool = own_pool(files=1, size="256M", started=False)
    made: list[Contained] = []

    def start() -> Contained:
        made.append(Contained(pool))
        return made[-1]

    yield start
    for each in made:
        each.stop()


def test_an_unmount_beside_the_first_process_ends_with_its_own_status(contained: Callable[[], Contained]) -> None:
    for _ in range(often(3, 5, 100)):
        container = contained()
        assert container.inside("cp", "/etc/passwd", container.pool.mount / "block").returncode == 0
        ended = container.inside(*KVFS, "umount", container.pool.mount)
        assert ended.returncode == 0, ended.stderr
        assert container.status() == 0
    assert "nothing is damaged" in run(*KVFS, "fsck", container.pool.path).stdout


@pytest.mark.slow
def test_an_unmount_by_a_shell_ends_before_the_first_process_too(contained: Callable[[], Contained]) -> None:
    container = contained()
    # As a hook has it: the shell is the one that came from outside.
    ended = container.inside("sh", "-c", f'"{KVFS[0]}" -m kvfs umount "$0" && echo done', container.pool.mount)
    assert (ended.returncode, ended.stdout.endswith("done\n")) == (0, True), ended.stderr
    assert container.status() == 0


def test_orphans_are_reaped(contained: Callable[[], Contained]) -> None:
    container = contained()
    daemon = set(children(container.first))
    assert len(daemon) == 1
    said = container.inside("sh", "-c", "setsid sleep 1000 >/dev/null 2>&1 & echo $!")
    orphan = said.stdout.strip()
    wait_until(lambda: len(children(container.first)) == 2, "the orphan is the first process's")
    assert container.inside("sh", "-c", f"kill -9 {orphan}").returncode == 0
    wait_until(lambda: set(children(container.first)) == daemon, "the orphan is reaped")


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_signals_reach_the_daemon(contained: Callable[[], Contained], number: int, status: int) -> None:
    container = contained()
    log = container.pool.base / "container.log"
    os.kill(container.first, signal.SIGUSR1)
    wait_until(lambda: "SIGUSR1" in log.read_text(), "the daemon says that it ignores it")
    os.kill(container.first, number)
    assert container.status() == status


def test_the_end_of_the_daemon_is_the_container_s(contained: Callable[[], Contained]) -> None:
    container = contained()
    (daemon,) = children(container.first)
    os.kill(daemon, signal.SIGKILL)
    assert container.status() == 128 + signal.SIGKILL


@pytest.mark.slow
def test_a_visitor_who_stays_holds_up_the_end_for_a_moment_alone(contained: Callable[[], Contained]) -> None:
    container = contained()
    with subprocess.Popen(container.words("sleep", "1000")) as visitor:
        shell = f"/proc/{visitor.pid}/task/{visitor.pid}/children"
        wait_until(lambda: Path(shell).read_text(), "the visitor came in")
        os.kill(container.first, signal.SIGTERM)
        assert container.status() == 0
        assert visitor.wait(60) != 0
