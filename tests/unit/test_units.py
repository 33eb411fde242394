"""The systemd units of tools/: systemd takes them, and none of them may more than its service needs."""

from __future__ import annotations

import configparser
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from kvfs.hold.words import FDS_MAX

TOOLS = Path(__file__).resolve().parents[2] / "tools"
# As systemd-analyze counts exposure, times ten; a service without any sandbox has 96.
EXPOSED_AT_MOST = {"kvfs@.service": 60, "kvfs-export@.service": 45, "kvfs-keep@.service": 15, "kvfs-hold@.service": 20}


def _analyze(*command: str | Path) -> subprocess.CompletedProcess[str]:
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("no systemd-analyze")
    return subprocess.run([program, *command], capture_output=True, text=True, timeout=60, check=False)


def test_every_unit_is_looked_at() -> None:
    assert {path.name for path in TOOLS.glob("*.service")} == set(EXPOSED_AT_MOST)


@pytest.mark.parametrize("name", EXPOSED_AT_MOST)
def test_systemd_takes_a_unit_and_finds_it_sandboxed(name: str, tmp_path: Path) -> None:
    unit = tmp_path / name.replace("@", "@pool")
    unit.write_text(re.sub(r"@bindir@/\S+", shutil.which("true") or "/bin/true", (TOOLS / name).read_text()))
    verified = _analyze("verify", "--man=no", "--generators=no", unit)
    # It names units of the machine as well, where those are at fault.
    assert name.partition("@")[0] not in verified.stderr, verified.stderr
    rated = _analyze("security", "--offline=true", f"--threshold={EXPOSED_AT_MOST[name]}", "--no-pager", unit)
    if "unrecognized option" in rated.stderr:
        pytest.skip("this systemd-analyze rates no unit that is not loaded")
    assert rated.returncode == 0, rated.stdout[-300:] + rated.stderr


@pytest.mark.parametrize("name", EXPOSED_AT_MOST)
def test_a_unit_leaves_the_place_of_the_command_to_who_installs_it(name: str) -> None:
    commands = re.findall(r"^Exec(?:Start|Stop)\w*=(.+)", (TOOLS / name).read_text(), flags=re.M)
    assert commands and all(
        set(re.findall(r"[^\s-]\S*/kvfs(?= )", command)) == {"@bindir@/kvfs"} for command in commands
    )


def test_systemd_s_store_has_room_for_a_mount() -> None:
    """Each clone of /dev/fuse, and the lists, the words and the pipe of kvfs/hold/service.py."""
    header = (TOOLS.parent / "native/include/kvfs_plane.h").read_text()
    clones = re.search(r"#define KVFS_HELD_DESCRIPTORS_MAX (\d+)", header)
    room = re.search(r"^FileDescriptorStoreMax=(\d+)$", (TOOLS / "kvfs@.service").read_text(), flags=re.M)
    assert clones and room and int(clones[1]) + 5 <= int(room[1]) <= FDS_MAX


def test_a_unit_whose_daemon_fails_at_once_goes_on_for_minutes() -> None:
    """systemd drops the mount that it keeps as it gives up. 20 starts, which fail at once, were 12 s. But it does give
    up, also where each start takes five seconds: nothing waits for ever."""
    text = (TOOLS / "kvfs@.service").read_text()
    found = [re.search(rf"^StartLimit{name}=(\d+)$", text, flags=re.M) for name in ("Burst", "IntervalSec")]
    starts, within_s = (int(match[1]) for match in found if match)
    assert "\nRestartSec=" not in text, "it would be part of each pause"
    assert starts * 0.5 >= 300 and within_s >= starts * 5


@pytest.mark.parametrize(
    ("job", "unmounts"),
    [("7 kvfs@kv.service restart running", False), ("7 kvfs@kv.service stop running", True), ("", True)],
)
def test_a_mount_is_unmounted_as_its_unit_stops_and_not_as_it_restarts(
    tmp_path: Path, job: str, unmounts: bool
) -> None:
    """ExecStop= runs for both: systemd's job tells which it is. A double of systemctl lists it; the mount is busy."""
    for name, text in (("systemctl", f"echo '{job}'"), ("kvfs", 'echo "$@"; exit 1')):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    (line,) = re.findall(r"^ExecStop=(.+)", (TOOLS / "kvfs@.service").read_text(), flags=re.M)
    text = line.removeprefix("-").replace("%n", "kvfs@kv.service").replace("%i", "kv")
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    words = shlex.split(text.replace("@bindir@", str(tmp_path)))
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False, env=environment)
    assert done.stdout.splitlines() == (["umount /srv/kv", "umount --lazy /srv/kv"] if unmounts else [])


def test_an_unmount_by_hand_is_no_failure_of_the_unit() -> None:
    """ExecStop= then runs as well, with nothing to unmount, and Restart=on-failure mounted it again."""
    for name in ("kvfs@.service", "kvfs-export@.service"):
        assert "\nExecStop=-" in (TOOLS / name).read_text()


def test_the_relay_is_not_root() -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string((TOOLS / "kvfs-keep@.service").read_text())
    service = unit["Service"]
    assert service["DynamicUser"] == "yes" and service["CapabilityBoundingSet"] == ""
    export = (TOOLS / "kvfs-export@.service").read_text()
    assert f"\nGroup={service['Group']}\n" in export, "the relay reaches the export's socket by its group"


def test_the_mount_of_a_service_is_seen_outside() -> None:
    """An option that makes a mount namespace would hide the mount from the machine."""
    text = (TOOLS / "kvfs@.service").read_text()
    assert not re.findall(r"^(?:Private\w+|Protect\w+|ReadWritePaths|InaccessiblePaths|MountFlags)=", text, flags=re.M)


@pytest.mark.parametrize("name", EXPOSED_AT_MOST)
def test_the_command_in_a_unit_s_head_fills_every_place(name: str) -> None:
    lines = (TOOLS / name).read_text().splitlines()
    (told,) = [line for line in lines if line.startswith("#   sed ")]
    *command, target = shlex.split(told.removeprefix("#   "))
    filled = subprocess.run(
        [*command[:-1], TOOLS / name], capture_output=True, text=True, timeout=20, check=True
    ).stdout  # fmt: skip
    assert command[-1] == f"tools/{name}" and target == f">/etc/systemd/system/{name}"
    assert "@bindir@" not in "\n".join(line for line in filled.splitlines() if not line.startswith("#"))
