"""kvfs's Debian package in a bare Debian: installed, mounted by fstab, upgraded under the mount, removed, purged."""

from __future__ import annotations

import pathlib
import re
import subprocess

import helpers
import pytest
from bare_debian import Machine, machine, needed, package

__all__ = ["machine"]
DEBIAN = helpers.REPOSITORY / "packaging/deb"
CONTENT = b"a block of a cache, " * 50_000


def names_of(machine: Machine) -> set[str]:
    """All that lies in the machine's root, but what is not a package's: apt's and dpkg's own notes, caches, logs."""
    notes = r"var/(lib/(dpkg|apt|systemd)|cache|log)|proc|dev|run|sys|tmp|etc/(ssl|ld\.so\.cache|mtab)"
    compiled = r"usr/(lib|share)/python3/.*__pycache__|usr/lib/python3\.\d+/.*__pycache__"
    left_out = re.compile(rf"({notes}|{compiled})(/|$)")
    found = {str(path.relative_to(machine.root)) for path in machine.root.rglob("*")}
    return {name for name in found if not left_out.match(name)}


@pytest.fixture(scope="module")
def bare(machine: Machine) -> set[str]:
    """The names when all that kvfs depends on is there, and kvfs not yet."""
    fields = helpers.run("dpkg-deb", "--field", package(), "Depends").stdout
    depends = re.findall(r"(?:^|, )([\w.+-]+)", fields)
    assert {"python3", "fuse3", "libfuse3-3", "libc6"} <= set(depends)
    machine.run("apt-get", "update", "-qq")
    machine.run("apt-get", "install", "-y", "-qq", "--no-install-recommends", *depends)
    return names_of(machine)


@pytest.fixture(scope="module")
def installed(machine: Machine, bare: set[str]) -> Machine:
    (machine.root / "root/kvfs.deb").write_bytes(package().read_bytes())
    machine.run("dpkg", "--install", "/root/kvfs.deb")
    return machine


def test_the_packages_scripts_are_of_sh_and_each_override_has_its_reason():
    for name in ("postinst", "prerm", "postrm"):
        helpers.run("sh", "-n", DEBIAN / name)
        assert (DEBIAN / name).read_text().startswith("#!/bin/sh\nset -e\n")
    reason = False
    for line in (DEBIAN / "lintian-overrides").read_text().splitlines():
        reason = line.startswith("# ") or reason
        assert reason, line


@pytest.mark.slow
def test_lintian_finds_no_error():
    command = [needed("lintian"), "--allow-root", "--fail-on", "error", package()]
    said = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert said.returncode == 0 and "E: " not in said.stdout, said.stdout


@pytest.mark.slow
def test_the_command_the_manual_the_units_and_completion_are_where_a_machine_looks(installed):
    assert installed.run("kvfs", "--version").stdout.startswith("kvfs ")
    listed = installed.run("dpkg", "--listfiles", "kvfs").stdout.splitlines()
    names = {
        "/usr/bin/kvfs", "/usr/sbin/mount.kvfs", "/usr/share/man/man1/kvfs.1.gz", "/usr/share/man/man8/mount.kvfs.8.gz",
        "/usr/bin/kvfs-csi", "/usr/share/man/man8/kvfs-csi.8.gz", "/usr/share/bash-completion/completions/kvfs",
        "/usr/share/zsh/vendor-completions/_kvfs",
        "/usr/share/fish/vendor_completions.d/kvfs.fish", "/usr/share/doc/kvfs/copyright",
        "/usr/share/doc/kvfs/changelog.Debian.gz",
        *(f"/usr/lib/systemd/system/{path.name}" for path in helpers.REPOSITORY.glob("tools/*.service")),
    }  # fmt: skip
    assert names <= set(listed), names - set(listed)
    for unit in installed.root.glob("usr/lib/systemd/system/kvfs*.service"):
        assert re.findall(r"^ExecStart=(\S+)", unit.read_text(), flags=re.M) == ["/usr/bin/kvfs"]
        assert "@bindir@" not in unit.read_text()
    # No place of the machine that built it, and modules that are compiled already.
    packages = installed.root / "usr/lib/kvfs"
    assert (packages / "bin/kvfs").read_text().startswith("#!/usr/lib/kvfs/bin/python3\n")
    assert list(packages.glob("lib/python3*/site-packages/kvfs/__pycache__/*.pyc"))
    # Compiled parts find their libraries.
    (library,) = packages.glob("lib/python3*/site-packages/kvfs/lib/libkvfs.so.1")
    loaded = f"import kvfs._native, ctypes; ctypes.CDLL('/{library.relative_to(installed.root)}')"
    installed.run("/usr/lib/kvfs/bin/python3", "-c", loaded)


@pytest.mark.slow
def test_a_pool_is_mounted_by_fstab_outlives_an_upgrade_and_a_purge_leaves_it_alone(installed, bare, tmp_path):
    machine = installed
    (machine.root / "mnt/kv").mkdir()
    machine.run("kvfs", "format", "/srv/pool", "--files", "1", "--size", "1G")
    (machine.root / "etc/fstab").write_text("/srv/pool  /mnt/kv  kvfs  allow_other,nofail,noexec  0  0\n")
    machine.run("mount", "-a", "-t", "kvfs")
    store(machine, "block")
    assert " /mnt/kv fuse.kvfs " in machine.run("cat", "/proc/mounts").stdout

    newer = with_version(package(), "99.0-1", tmp_path)
    (machine.root / "root/kvfs-newer.deb").write_bytes(newer.read_bytes())
    machine.run("dpkg", "--install", "/root/kvfs-newer.deb")
    assert machine.run("dpkg-query", "-W", "-f", "${Version}", "kvfs").stdout == "99.0-1"
    assert read(machine, "block") == CONTENT
    store(machine, "another")
    # The new command ends the old daemon, and a new one has what that one had.
    machine.run("kvfs", "umount", "/mnt/kv")
    machine.run("mount", "/mnt/kv")
    assert read(machine, "block") == read(machine, "another") == CONTENT

    # A removal refuses nothing and says what is left.
    said = machine.run("dpkg", "--remove", "kvfs")
    assert "/srv/pool stays mounted at /mnt/kv" in said.stderr
    assert read(machine, "block") == CONTENT
    machine.run("umount", "/mnt/kv")
    helpers.wait_until(lambda: not daemons(machine), "the daemon ended", timeout_s=60)
    machine.run("dpkg", "--purge", "kvfs")
    left = {name for name in names_of(machine) - bare if not name.startswith(("srv/pool", "root/kvfs"))}
    assert left <= {"mnt/kv", "etc/fstab"}, left

    # Installed once more it finds the pool.
    machine.run("dpkg", "--install", "/root/kvfs.deb")
    assert "nothing is damaged" in machine.run("kvfs", "fsck", "/srv/pool").stdout
    machine.run("mount", "/mnt/kv")
    assert read(machine, "block") == CONTENT
    machine.run("kvfs", "umount", "/mnt/kv")


def daemons(machine: Machine) -> str:
    return machine.run(
        "sh", "-c", "cat /proc/[0-9]*/cmdline | tr '\\0' ' ' | grep -a '[k]vfs mount'", check=False
    ).stdout


def store(machine: Machine, name: str) -> None:
    (machine.root / "root/content").write_bytes(CONTENT)
    machine.run("cp", "/root/content", f"/mnt/kv/{name}")
    (machine.root / "root/content").unlink()


def read(machine: Machine, name: str) -> bytes:
    machine.run("cp", f"/mnt/kv/{name}", "/root/copy")
    copy = machine.root / "root/copy"
    content = copy.read_bytes()
    copy.unlink()
    return content


def with_version(path: pathlib.Path, version: str, work: pathlib.Path) -> pathlib.Path:
    """The same package under a higher version."""
    helpers.run("dpkg-deb", "--raw-extract", path, work / "newer")
    control = work / "newer/DEBIAN/control"
    control.write_text(re.sub(r"^Version: .*", f"Version: {version}", control.read_text(), flags=re.M))
    made = work / f"kvfs_{version}.deb"
    helpers.run("dpkg-deb", "--root-owner-group", "-Zgzip", "--build", work / "newer", made)
    return made
