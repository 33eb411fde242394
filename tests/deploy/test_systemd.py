"""kvfs@.service under systemd, which is process 1 of namespaces of its own: `--hold systemd` over restarts, kills and a
stop. By hand (tools/test --long), as it boots an overlay of this machine.
"""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Iterator

import helpers
import pytest

from kvfs.units import kernel_version

SYSTEMD = pathlib.Path("/lib/systemd/systemd")
_BOOT = """
set -e
mount --make-rprivate /
mount -t tmpfs tmpfs {base}/over
mkdir {base}/over/up {base}/over/work
mount -t overlay overlay -o lowerdir=/,upperdir={base}/over/up,workdir={base}/over/work {base}/root
cd {base}/root
mount -t proc proc proc
mount --rbind /sys sys
mount --rbind /dev dev
mount -t tmpfs tmpfs run
mount -t tmpfs tmpfs tmp
mkdir -p run/share srv mnt/kv etc/kvfs etc/systemd/system/kvfs@.service.d .{repository}
mount --bind {base}/share run/share
mount --bind {repository} .{repository}
ln -s /run/share/pool srv/kv
echo 'KVFS_OPTIONS=--allow-other --hold systemd' >etc/kvfs/kv.conf
cp {base}/share/kvfs@.service etc/systemd/system
printf '[Unit]\\nDefaultDependencies=no\\n' >etc/systemd/system/kvfs@.service.d/alone.conf
printf '[Unit]\\nDefaultDependencies=no\\n' >etc/systemd/system/nothing.target
exec chroot . env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin container=kvfs {systemd} --system --unit=nothing.target
"""


class Machine:
    def __init__(self, base: pathlib.Path, process: subprocess.Popen[bytes]) -> None:
        self.base, self.process = base, process
        self.first = 0

    def run(self, *command: str) -> str:
        inside = ["nsenter", f"--target={self.first}", "--mount", "--pid", "--ipc", "--uts", "--cgroup", "--net",
                  "--root", "--wd"]  # fmt: skip
        return helpers.run(*inside, *command, timeout_s=120).stdout.strip()

    def unit(self, name: str) -> str:
        """A property of the unit."""
        return self.run("systemctl", "show", "--value", f"--property={name}", "kvfs@kv")


@pytest.fixture
def machine(tmp_path: pathlib.Path) -> Iterator[Machine]:
    if not os.environ.get("KVFS_RUN_LONG"):
        pytest.skip("by hand: tools/test --long")
    if os.geteuid() or not SYSTEMD.exists() or shutil.which("unshare") is None:
        pytest.skip(f"needs root, {SYSTEMD} and unshare")
    if kernel_version(os.uname().release) < (6, 9):
        pytest.skip(f"needs Linux 6.9 (FUSE_NOTIFY_RESEND); this is {os.uname().release}")
    for name in ("over", "root", "share"):
        (tmp_path / name).mkdir()
    share = tmp_path / "share"
    command = share / "kvfs"
    command.write_text(f'#!/bin/sh\nPYTHONPATH={helpers.REPOSITORY} exec {sys.executable} -m kvfs "$@"\n')
    command.chmod(0o755)
    unit = (helpers.REPOSITORY / "tools/kvfs@.service").read_text()
    (share / "kvfs@.service").write_text(unit.replace("@bindir@", "/run/share"))
    helpers.run(command, "format", share / "pool", "--files", "2", "--size", "128M")
    boot = _BOOT.format(base=tmp_path, repository=helpers.REPOSITORY, systemd=SYSTEMD)
    words = ["unshare", "--pid", "--mount", "--fork", "--ipc", "--uts", "--cgroup", "--net", "bash", "-c", boot]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    made = Machine(tmp_path, process)
    children = pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children")
    try:
        helpers.wait_until(lambda: children.read_text().strip(), "the first process")
        made.first = int(children.read_text())
        private = pathlib.Path(f"/proc/{made.first}/root/run/systemd/private")
        helpers.wait_until(lambda: private.exists() or process.poll() is not None, "systemd")
        assert process.poll() is None, (tmp_path / "log").read_text()
        yield made
    finally:
        if made.first:
            os.kill(made.first, 9)
        process.wait(60)


def test_systemd_keeps_the_mount_over_restarts_and_a_stop_unmounts(machine: Machine) -> None:
    machine.run("systemctl", "start", "kvfs@kv")
    kept = int(machine.unit("NFileDescriptorStore"))
    assert kept >= 5
    machine.run("sh", "-c", "head -c 300000 /dev/urandom >/mnt/kv/a")
    before = machine.run("md5sum", "/mnt/kv/a")
    mounted = machine.run("stat", "--format=%d", "/mnt/kv")
    machine.run(
        "sh", "-c", 'exec 9</mnt/kv/a; systemctl restart kvfs@kv; test "$(md5sum <&9)" = "$(md5sum </mnt/kv/a)"'
    )
    for turn in range(3):
        number = machine.unit("MainPID")
        machine.run("systemctl", "kill", "--signal=KILL", "--kill-who=main", "kvfs@kv")
        assert machine.run("md5sum", "/mnt/kv/a") == before
        helpers.wait_until(lambda: machine.unit("SubState") == "running", f"daemon {turn + 2}")
        assert machine.unit("MainPID") != number
    machine.run("systemctl", "daemon-reexec")
    machine.run("systemctl", "restart", "kvfs@kv")
    assert machine.run("md5sum", "/mnt/kv/a") == before
    assert machine.run("stat", "--format=%d", "/mnt/kv") == mounted
    assert int(machine.unit("NFileDescriptorStore")) == kept
    assert "taken over 5 times" in machine.run("/run/share/kvfs", "status", "/srv/kv")
    machine.run("systemctl", "stop", "kvfs@kv")
    assert machine.unit("ActiveState") == "inactive" and machine.unit("NFileDescriptorStore") == "0"
    assert "fuse.kvfs" not in machine.run("cat", "/proc/mounts")
    machine.run("systemctl", "start", "kvfs@kv")
    assert machine.run("md5sum", "/mnt/kv/a") == before
    machine.run("/run/share/kvfs", "umount", "/mnt/kv")
    helpers.wait_until(lambda: machine.unit("SubState") == "dead", "the end of the unit")
    assert machine.unit("Result") == "success"
