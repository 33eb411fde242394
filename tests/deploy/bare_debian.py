"""A bare Debian that mmdebstrap makes once, kvfs's package, and a machine of both: a root in namespaces of its own.

$KVFS_TEST_DEBIAN_ROOT names a root's tar archive that is there already, $KVFS_TEST_DEB a package.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import pathlib
import platform
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator

import helpers
import pytest

WORK = helpers.REPOSITORY / "build/deploy"
MIRROR = "http://deb.debian.org/debian"
SLOW_COMMAND_TIMEOUT_S = 500


def needed(program: str) -> str:
    found = shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
    if found is None:
        pytest.skip(f"no {program} on this machine")
    return found


@contextlib.contextmanager
def _one_at_a_time() -> Iterator[None]:
    WORK.mkdir(parents=True, exist_ok=True)
    with (WORK / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@functools.cache
def root_archive() -> pathlib.Path:
    """Debian 12 with nothing but its essential packages and apt."""
    if given := os.environ.get("KVFS_TEST_DEBIAN_ROOT"):
        return pathlib.Path(given)
    if os.getuid() != 0:
        pytest.skip("a Debian root is made by root")
    program = needed("mmdebstrap")
    with _one_at_a_time():
        made = WORK / "root.tar"
        if not made.exists():
            unfinished = WORK / "unfinished.tar"
            try:
                helpers.run(
                    program, "--variant=minbase", "bookworm", unfinished, MIRROR, timeout_s=SLOW_COMMAND_TIMEOUT_S
                )
            except helpers.CommandError as error:
                pytest.skip(f"mmdebstrap makes no Debian root here: {str(error)[-300:]}")
            unfinished.rename(made)
    return made


@functools.cache
def package() -> pathlib.Path:
    """kvfs's, of these sources."""
    if given := os.environ.get("KVFS_TEST_DEB"):
        return pathlib.Path(given)
    system = pathlib.Path("/etc/os-release").read_text()
    if "VERSION_CODENAME=bookworm" not in system or platform.machine() != "x86_64":
        pytest.skip("the package is built on Debian 12 for its own Python")
    needed("dpkg-shlibdeps")
    with _one_at_a_time():
        said = helpers.run(helpers.REPOSITORY / "packaging/deb/build", timeout_s=SLOW_COMMAND_TIMEOUT_S).stderr
    (made,) = (helpers.REPOSITORY / "build/deb").glob("kvfs_*.deb")
    assert f"{made.relative_to(helpers.REPOSITORY)}: " in said
    return made


class Machine:
    """A root in a mount namespace and a pid namespace: with their first process all daemons and mounts end."""

    def __init__(self, root: pathlib.Path) -> None:
        self.root = root
        helpers.run("tar", "-C", root, "--exclude=./dev/*", "-xf", root_archive(), timeout_s=SLOW_COMMAND_TIMEOUT_S)
        for name in ("resolv.conf", "hosts"):
            with contextlib.suppress(FileNotFoundError):
                shutil.copyfile(f"/etc/{name}", root / "etc" / name)
        mounts = 'mount --rbind /dev "$0/dev" && mount -t proc proc "$0/proc" && mount -t tmpfs run "$0/run"'
        script = f"{mounts} && exec sleep infinity"
        self._first = subprocess.Popen(
            ["unshare", "--mount", "--pid", "--fork", "--propagation", "private", "sh", "-c", script, root],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        deadline = time.monotonic() + 20
        while not self._inside("test", "-e", root / "proc/self", check=False):
            assert time.monotonic() < deadline and self._first.poll() is None, "no namespaces of its own"
            time.sleep(0.05)

    def _pid(self) -> int | None:
        with contextlib.suppress(OSError, ValueError, IndexError):
            pid = self._first.pid
            return int(pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])
        return None

    def _inside(self, *command: str | os.PathLike[str], check: bool = True) -> bool:
        pid = self._pid()
        words = ("nsenter", "--target", str(pid), "--mount", "--pid", *command)
        return pid is not None and helpers.run(*words, check=check).returncode == 0

    def run(self, *command: str | os.PathLike[str], check: bool = True) -> subprocess.CompletedProcess[str]:
        environment = (
            "env",
            "-i",
            "PATH=/usr/sbin:/usr/bin:/sbin:/bin",
            "LC_ALL=C.UTF-8",
            "DEBIAN_FRONTEND=noninteractive",
        )
        proxies = [f"{name}={value}" for name, value in os.environ.items() if name.lower().endswith("_proxy")]
        return helpers.run(
            "nsenter", "--target", str(self._pid()), "--mount", "--pid", "chroot", self.root, *environment, *proxies,
            *command, timeout_s=SLOW_COMMAND_TIMEOUT_S, check=check,
        )  # fmt: skip

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            if (pid := self._pid()) is not None:
                os.kill(pid, signal.SIGKILL)
        self._first.wait(60)
        shutil.rmtree(self.root)


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    made = Machine(tmp_path_factory.mktemp("debian"))
    try:
        yield made
    finally:
        made.close()
