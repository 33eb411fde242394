"""A daemon in pid and mount namespaces of its own, as in a container, by unshare(1): it is process 1 there.

Its mount is seen here if the directory that it lies in is shared. Needs root.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence

from helpers import REPOSITORY, Pool, mount_device, run, slowness, wait_until

# A /proc of its own, seen by nobody else; then what is given.
INSIDE = 'mount --make-private /proc && mount -t proc proc /proc && exec "$@"'
UNSHARE = ("unshare", "--pid", "--fork", "--kill-child", "--mount", "--propagation")


def inside(*words: str | os.PathLike[str], propagation: str = "private") -> list[str]:
    """The words that run a command in new namespaces."""
    return [*UNSHARE, propagation, "bash", "-c", INSIDE, "bash", *map(os.fspath, words)]


def kvfs(*words: str | os.PathLike[str]) -> list[str]:
    return [sys.executable, "-m", "kvfs", *map(os.fspath, words)]


class Box:
    """A pool's daemon in namespaces of its own."""

    def __init__(self, pool: Pool, process: subprocess.Popen[bytes], log: pathlib.Path) -> None:
        self.pool, self.process, self.log = pool, process, log

    @property
    def pid(self) -> int:
        """The number of its first process here; the daemon is that one's child."""
        path = pathlib.Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return int(path.read_text().split()[0])

    def answers(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()
        return "mounted at" in self.log.read_text()

    def ended(self) -> int:
        """Its exit status, once it has ended."""
        return self.process.wait(60 * slowness())

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        self.ended()


@contextlib.contextmanager
def box(pool: Pool, *extra: str, propagation: str = "private", prefix: Sequence[str] = ()) -> Iterator[Box]:
    """Start a daemon of an unmounted pool; its end is the test's, or comes by SIGKILL."""
    log = pool.base / "box.log"
    words = inside(*prefix, *kvfs("mount", pool.path, pool.mount, "--foreground", *extra), propagation=propagation)
    with log.open("wb") as out:
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            cwd=REPOSITORY,
            env={**os.environ, **pool.environment},
        )
    made = Box(pool, process, log)
    try:
        wait_until(made.answers, "the mount in the box")
        yield made
    finally:
        process.kill()  # and with it all in its namespaces
        process.wait()


@contextlib.contextmanager
def shared(place: pathlib.Path) -> Iterator[None]:
    """Mounts that are made below `place`, in other namespaces, are seen here, as with Docker's rshared."""
    run("mount", "--bind", place, place)
    try:
        run("mount", "--make-shared", place)
        yield
    finally:
        run("umount", "--lazy", "--recursive", place)


def is_mounted(pool: Pool) -> bool:
    return mount_device(pool.mount) is not None
