"""kvfs's image, built by buildah without a registry, and containers of it by runc, as a kubelet would start them."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pathlib
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import helpers
import pytest
from bare_debian import needed, package, root_archive

BUILD_TIMEOUT_S = 500
BASE, IMAGE = "localhost/kvfs-test-base", "localhost/kvfs-test"
# linux/capability.h, by number.
CAPABILITIES = (
    "CHOWN", "DAC_OVERRIDE", "DAC_READ_SEARCH", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID", "SETPCAP",
    "LINUX_IMMUTABLE", "NET_BIND_SERVICE", "NET_BROADCAST", "NET_ADMIN", "NET_RAW", "IPC_LOCK", "IPC_OWNER",
    "SYS_MODULE", "SYS_RAWIO", "SYS_CHROOT", "SYS_PTRACE", "SYS_PACCT", "SYS_ADMIN", "SYS_BOOT", "SYS_NICE",
    "SYS_RESOURCE", "SYS_TIME", "SYS_TTY_CONFIG", "MKNOD", "LEASE", "AUDIT_WRITE", "AUDIT_CONTROL", "SETFCAP",
    "MAC_OVERRIDE", "MAC_ADMIN", "SYSLOG", "WAKE_ALARM", "BLOCK_SUSPEND", "AUDIT_READ", "PERFMON", "BPF",
    "CHECKPOINT_RESTORE",
)  # fmt: skip


def own_capabilities() -> list[str]:
    """A privileged container has all that this process may have itself."""
    status = pathlib.Path("/proc/self/status").read_text()
    bounds = int(next(line.split()[1] for line in status.splitlines() if line.startswith("CapBnd")), 16)
    return [f"CAP_{name}" for number, name in enumerate(CAPABILITIES) if bounds >> number & 1]


class Image:
    """The image in a store of its own, with its files laid out and what it starts. It lies in memory, some 300 MB: to
    make and remove so many files took a minute and a half on a disk."""

    def __init__(self, work: pathlib.Path) -> None:
        self.work, self.driver = work, "overlay"
        helpers.run("mount", "-t", "tmpfs", "-o", "size=3g", "none", work)

    def build(self) -> None:
        base, context = root_archive(), self.work / "context"
        (context / "build/deb").mkdir(parents=True)
        shutil.copy(package(), context / "build/deb")
        try:
            made = self.buildah("from", "scratch").strip()
        except helpers.CommandError:  # the store lies on a filesystem that can be no layer: each has a whole copy
            self.driver = "vfs"
            made = self.buildah("from", "scratch").strip()
        self.buildah("add", "--quiet", made, str(base), "/")
        self.buildah("commit", "--quiet", made, BASE)
        self.buildah("rm", made)
        recipe = helpers.REPOSITORY / "packaging/Containerfile"
        words = ("--isolation", "chroot", "--file", str(recipe), "--build-arg", f"BASE={BASE}", "--tag", IMAGE)
        try:
            self.buildah("build", *words, str(context))
        except helpers.CommandError as error:
            if any(
                words in str(error) for words in ("Temporary failure resolving", "Unable to fetch", "Could not connect")
            ):
                pytest.skip("the image's build reaches no mirror of Debian")
            raise
        self.entrypoint: list[str] = json.loads(self.buildah("inspect", "--type", "image", IMAGE))["OCIv1"]["config"][
            "Entrypoint"
        ]
        self.root = pathlib.Path(self.buildah("mount", self.buildah("from", IMAGE).strip()).strip())

    def buildah(self, *words: str) -> str:
        store = ("--root", str(self.work / self.driver), "--runroot", str(self.work / "run"))
        command = (needed("buildah"), *store, "--storage-driver", self.driver, *words)
        return helpers.run(*command, timeout_s=BUILD_TIMEOUT_S).stdout

    def close(self) -> None:
        with contextlib.suppress(helpers.CommandError):
            self.buildah("rm", "--all")
        helpers.run("umount", "--recursive", "--lazy", self.work)
        self.work.rmdir()


@functools.cache
def _checked() -> None:
    if os.getuid() != 0:
        pytest.skip("images and containers are made by root")
    for program in ("buildah", "runc"):
        needed(program)


@pytest.fixture(scope="module")
def image() -> Iterator[Image]:
    _checked()
    made = Image(pathlib.Path(tempfile.mkdtemp(prefix="kvfs-image-")))
    try:
        made.build()
        yield made
    finally:
        made.close()


@contextlib.contextmanager
def shared(directory: pathlib.Path) -> Iterator[pathlib.Path]:
    """A directory whose mounts come in and go out, as /run is where systemd runs."""
    directory.mkdir(exist_ok=True)
    helpers.run("mount", "--bind", directory, directory)
    try:
        helpers.run("mount", "--make-shared", directory)
        yield directory
    finally:
        helpers.run("umount", "--recursive", "--lazy", directory, check=False)


class Container:
    """A container of the image. `mounts`: a path of the machine, the one inside, and how mounts go through."""

    def __init__(
        self,
        image: Image,
        name: str,
        work: pathlib.Path,
        words: Sequence[str],
        mounts: Sequence[tuple[pathlib.Path, str, str]],
    ) -> None:
        self.name, self.bundle = name, work / name
        self.bundle.mkdir()
        self.log = self.bundle / "log"
        (self.bundle / "config.json").write_text(json.dumps(self._specification(image, words, mounts)))
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                self._runc("run", "--bundle", str(self.bundle), name), stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def _runc(self, *words: str) -> list[str]:
        return [needed("runc"), "--root", str(self.bundle.parent / "runc"), *words]

    @staticmethod
    def _specification(
        image: Image, words: Sequence[str], mounts: Sequence[tuple[pathlib.Path, str, str]]
    ) -> dict[str, Any]:
        all_of = own_capabilities()
        bound = [
            {"destination": inside, "type": "bind", "source": str(path), "options": ["rbind", how]}
            for path, inside, how in mounts
        ]
        return {
            "ociVersion": "1.0.2",
            "process": {
                "args": list(words), "cwd": "/", "env": ["PATH=/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL=C.UTF-8"],
                "user": {"uid": 0, "gid": 0},
                "capabilities": {kind: all_of for kind in ("bounding", "effective", "permitted")},
                "rlimits": [{"type": "RLIMIT_NOFILE", "soft": 1024, "hard": 20000}],
            },
            "root": {"path": str(image.root), "readonly": True},
            "hostname": "node",
            "mounts": [{"destination": "/proc", "type": "proc", "source": "proc"}, *bound],
            # No network: a new namespace of it has none.
            "linux": {
                "namespaces": [{"type": kind} for kind in ("pid", "mount", "ipc", "uts", "network")],
                "rootfsPropagation": "rshared",
                "resources": {"devices": [{"allow": True, "access": "rwm"}]},
            },
        }  # fmt: skip

    def inside(self, *command: str | pathlib.Path) -> subprocess.CompletedProcess[str]:
        return helpers.run(*self._runc("exec", self.name, *map(str, command)), check=False)

    def signal(self, name: str) -> None:
        helpers.run(*self._runc("kill", self.name, name))

    def wait(self) -> int:
        return self.process.wait(120 * helpers.slowness())

    def close(self) -> None:
        helpers.run(*self._runc("delete", "--force", self.name), check=False)
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(60)
