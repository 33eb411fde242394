"""kvfs and engines in containers by runc, as Docker starts them: its capabilities, its memory to lock, no io_uring.

Containers have this machine's own programs and this clone, read-only, so no image is made. The daemon's container has
what docs/containers.md says, the engine's has the mount and nothing else.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pathlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from bare_debian import needed
from helpers import (
    REPOSITORY,
    Pool,
    assert_same,
    content,
    mount_device,
    read_file,
    requires_fuse,
    requires_root,
    run,
    wait_until,
    write_file,
)
from oci import Container

DATA = content(3 << 20, "container")
# Of Docker: https://docs.docker.com/engine/containers/run/#runtime-privilege-and-linux-capabilities
DEFAULT = [
    f"CAP_{name}"
    for name in (
        "AUDIT_WRITE", "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "MKNOD", "NET_BIND_SERVICE", "NET_RAW",
        "SETFCAP", "SETGID", "SETPCAP", "SETUID", "SYS_CHROOT",
    )
]  # fmt: skip
RINGS = ["io_uring_setup", "io_uring_enter", "io_uring_register"]
# Calls that Docker's profile leaves to those who have CAP_SYS_ADMIN.
ADMINS = ["mount", "umount2", "setns", "unshare", "pivot_root", "bpf", "perf_event_open", "open_by_handle_at"]
FUSE = {"path": "/dev/fuse", "type": "c", "major": 10, "minor": 229, "fileMode": 0o666, "uid": 0, "gid": 0}
ENGINE = """
import sys, kvfs
data = bytes(range(256)) * 20000
with kvfs.connect(sys.argv[1], "engine", gpu=None, timeout_s=20) as client:
    client.put([(b"a", data)])
    assert client.get(b"a") == data and client.get(b"b") is None
    print(client.statistics().rings)
open(sys.argv[1] + "/by-file", "wb").write(data)
assert open(sys.argv[1] + "/by-file", "rb").read() == data
"""


class Root:
    """A root with this machine's programs and this clone."""

    def __init__(self, work: pathlib.Path) -> None:
        self.root = work / "root"
        self.root.mkdir()
        for name in ("bin", "sbin", "lib", "lib64", "lib32"):
            link = pathlib.Path("/") / name
            if link.is_symlink():
                (self.root / name).symlink_to(os.readlink(link))
        prefixes = {os.path.realpath(prefix) for prefix in (sys.prefix, sys.base_prefix)}
        self.bound = ["/usr", "/etc", str(REPOSITORY), *sorted(prefixes)]


class Jail(Container):
    """A container as Docker makes it. `admin`: with --cap-add SYS_ADMIN --cap-add SYS_PTRACE --device /dev/fuse.
    `pids`: of the host, as with --pid host. `rings`: its profile allows io_uring."""

    def __init__(
        self, root: Root, name: str, work: pathlib.Path, words: Sequence[str | pathlib.Path],
        mounts: Sequence[tuple[pathlib.Path, str, str]], *, admin: bool = False, pids: bool = False,
        rings: bool = False,
    ) -> None:  # fmt: skip
        self.admin, self.pids, self.rings, self.made_of = admin, pids, rings, root
        super().__init__(root, name, work, list(map(str, words)), mounts)  # type: ignore[arg-type]

    def _specification(self, image: Any, words: Sequence[str], mounts: Any) -> dict[str, Any]:  # type: ignore[override]
        made = super()._specification(image, words, mounts)
        process, linux = made["process"], made["linux"]
        capabilities = DEFAULT + (["CAP_SYS_ADMIN", "CAP_SYS_PTRACE"] if self.admin else [])
        process["capabilities"] = {kind: capabilities for kind in ("bounding", "effective", "permitted")}
        process["rlimits"].append({"type": "RLIMIT_MEMLOCK", "soft": 65536, "hard": 65536})
        process["env"] += [f"PYTHONPATH={REPOSITORY}", "PYTHONDONTWRITEBYTECODE=1"]
        own = [
            {"destination": path, "type": "bind", "source": path, "options": ["rbind", "ro"]}
            for path in self.made_of.bound
        ]
        made["mounts"] = [
            made["mounts"][0],
            {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "mode=755"]},
            {"destination": "/tmp", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "mode=1777"]},
            *own,
            *made["mounts"][1:],
        ]
        if self.pids:
            linux["namespaces"] = [kind for kind in linux["namespaces"] if kind["type"] != "pid"]
        linux["resources"]["devices"] = [{"allow": False, "access": "rwm"}]
        if self.admin:
            linux["devices"] = [FUSE]
            linux["resources"]["devices"].append(
                {"allow": True, "type": "c", "major": 10, "minor": 229, "access": "rwm"}
            )
        denied = ([] if self.rings else RINGS) + ([] if self.admin else ADMINS)
        linux["seccomp"] = {
            "defaultAction": "SCMP_ACT_ALLOW",
            "syscalls": [{"names": denied, "action": "SCMP_ACT_ERRNO", "errnoRet": errno.EPERM}] if denied else [],
        }
        return made

    def said(self) -> str:
        return self.log.read_text(errors="replace")


def kvfs(*words: str | pathlib.Path) -> list[str | pathlib.Path]:
    return [sys.executable, "-m", "kvfs", *words]


Start = Callable[..., Jail]


@pytest.fixture
def start(tmp_path: pathlib.Path) -> Iterator[Start]:
    """Start a container; all go at the end of the test."""
    requires_root()
    requires_fuse()
    needed("runc")
    root = Root(tmp_path)
    with contextlib.ExitStack() as stack:

        def made(name: str, words: Sequence[str | pathlib.Path], *mounts: Any, **how: Any) -> Jail:
            jail = Jail(root, name, tmp_path, words, mounts, **how)
            stack.callback(jail.close)
            return jail

        yield made


def daemon(start: Start, pool: Pool, name: str = "daemon", *extra: str, **how: Any) -> Jail:
    """A daemon's container: the pool's directory is elsewhere there, and its mount point is in a directory that is
    bound with rshared."""
    words = kvfs("mount", "/pool", "/shared/mount", "--foreground", "--allow-other", *extra)
    jail = start(name, words, (pool.path, "/pool", "rw"), (pool.base, "/shared", "rshared"), admin=True, **how)

    def mounted() -> bool:
        assert jail.process.poll() is None, jail.said()
        return "mounted at" in jail.said()

    wait_until(mounted, "the daemon's mount")
    return jail


def test_a_daemon_in_a_container_shows_its_mount_outside_and_ends_by_an_unmount_there(
    unmounted: Pool, start: Start
) -> None:
    pool = unmounted
    jail = daemon(start, pool)
    assert mount_device(pool.mount) is not None
    write_file(pool.mount / "file", DATA)
    assert_same(read_file(pool.mount / "file"), DATA, "the file, outside")
    assert pool.status()["rings"].startswith("threads (io_uring_setup: Operation not permitted)")
    done = run(*kvfs("umount", pool.path, "-o", "json"), timeout_s=60)
    assert '"clean": true' in done.stdout and jail.wait() == 0 and mount_device(pool.mount) is None
    pool.start()
    assert_same(read_file(pool.mount / "file"), DATA, "the file, by a daemon of the host")
    pool.umount()


def test_a_killed_container_is_followed_by_another_at_once(unmounted: Pool, start: Start) -> None:
    pool = unmounted
    jail = daemon(start, pool)
    write_file(pool.mount / "file", DATA)
    run("sync", "--file-system", pool.mount)
    jail.signal("KILL")
    jail.wait()
    with pytest.raises(OSError) as caught:
        os.statvfs(pool.mount)
    assert caught.value.errno == errno.ENOTCONN
    follower = daemon(start, pool, "follower")
    assert_same(read_file(pool.mount / "file"), DATA, "the file, after a kill")
    assert "watching for" not in follower.said() and "taken over" not in follower.said()
    follower.signal("TERM")
    assert follower.wait() == 0


@pytest.mark.parametrize("rings", [(False, False), (True, False), (False, True)], ids=["none", "daemon's", "engine's"])
def test_an_engine_in_a_container_needs_the_mount_alone(
    unmounted: Pool, start: Start, rings: tuple[bool, bool]
) -> None:
    """Each side goes by io_uring where its own profile allows it, whatever the other's."""
    pool = unmounted
    jail = daemon(start, pool, "daemon", "--native-in", "/", pids=True, rings=rings[0])
    engine = start("engine", [sys.executable, "-c", ENGINE, "/kv"], (pool.mount, "/kv", "rslave"), rings=rings[1])
    assert engine.wait() == 0, engine.said()
    for allowed, said in zip(rings, (pool.status()["rings"], engine.said()), strict=True):
        assert allowed or said.startswith("threads (io_uring_setup: Operation not permitted)"), said
        assert not allowed or "Operation not permitted" not in said, said
    run(*kvfs("umount", pool.path), timeout_s=60)
    assert jail.wait() == 0
