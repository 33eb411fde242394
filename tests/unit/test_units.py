"""The systemd units of tools/: systemd takes them, and none of them may more than its service needs."""

from __future__ import annotations

import configparser
import re
import shutil
import subprocess
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"
# As systemd-analyze counts exposure, times ten; a service without any sandbox has 96.
EXPOSED_AT_MOST = {"kvfs@.service": 60, "kvfs-export@.service": 45, "kvfs-keep@.service": 15}


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
    commands = re.findall(r"^Exec(?:Start|Stop)\w*=(\S+)", (TOOLS / name).read_text(), flags=re.M)
    assert commands and set(commands) == {"@bindir@/kvfs"}


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
