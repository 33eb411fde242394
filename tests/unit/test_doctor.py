"""The doctor on this machine, and its words for machines that lack something."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvfs import doctor, units

KNOWS = "this build knows"


def test_every_check_says_what_it_found() -> None:
    checks = doctor.examine()
    assert {"python", "kernel", "/dev/fuse", "io_uring", "memlock", "open files", "cpu"} <= {
        check.name for check in checks
    }
    for check in checks:
        assert check.state in ("ok", "missing", "note") and check.found and "\n" not in check.found
        assert check.action or check.state != "missing"


@pytest.mark.parametrize(
    ("status", "found"),
    [
        ({}, []),
        ({"holder": {"pid": 7}}, []),  # a daemon that tells no versions
        (
            {"holder": {"versions": {"journal": 2, "later": 9}}},
            [("ok", "this build can take it over from the daemon that runs")],
        ),
        (
            {"holder": {"versions": {"journal": 3, "written": 0}}},
            [("missing", f"written of version 0, and {KNOWS} 1 to 1; journal of version 3, and {KNOWS} 1 to 2")],
        ),
    ],
)
def test_a_held_mount_that_this_build_cannot_take_over_is_told_of(
    status: dict[str, object], found: list[tuple[str, str]]
) -> None:
    checks = list(doctor.held_mount(status, {"written": (1, 1), "journal": (1, 2)}))
    assert [(check.state, check.found) for check in checks] == found


@pytest.mark.parametrize(
    ("release", "version"), [("6.18.44-generic", (6, 18)), ("5.15.0", (5, 15)), ("6.1-rc3", (6, 1)), ("7", (7, 0))]
)
def test_kernel_releases_are_compared_as_numbers(release: str, version: tuple[int, int]) -> None:
    assert units.kernel_version(release) == version


def test_an_old_kernel_cannot_mount(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.release", lambda: "4.19.0-6-amd64")
    kernel = next(check for check in doctor.examine() if check.name == "kernel")
    assert kernel.fatal and "newer" in kernel.action
    text = doctor.render([kernel])
    assert text.endswith("a mount cannot work: kernel")


def test_an_export_needs_no_fuse() -> None:
    check = doctor.Check("/dev/fuse", "missing", "not there", "modprobe fuse", required=True)
    assert doctor.render([check]).endswith("a mount cannot work: /dev/fuse; kvfs export can")


def test_a_kernel_before_6_16_is_slower_but_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.release", lambda: "6.1.0-28-amd64")
    epoch = next(check for check in doctor.examine() if check.name == "fuse epoch")
    assert epoch.state == "note" and not epoch.fatal


def test_a_kernel_without_io_uring_is_told_how_to_enable_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(self: object, entries: int = 4) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(doctor._Ring, "__init__", refuse)
    switch = tmp_path / "io_uring_disabled"
    switch.write_text("2\n")
    monkeypatch.setattr(doctor, "IO_URING_DISABLED_PATH", switch)
    ring = next(check for check in doctor.examine() if check.name == "io_uring")
    assert not ring.fatal and "device I/O goes by threads" in ring.found
    assert "kernel.io_uring_disabled = 2" in ring.found and "sysctl kernel.io_uring_disabled=0" in ring.action


def test_a_probe_that_breaks_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def explode(path: str) -> object:
        raise RuntimeError("no sysfs here")

    monkeypatch.setattr("os.stat", explode)
    assert any("no sysfs here" in check.found for check in doctor.examine())


def check_of(name: str) -> doctor.Check:
    return next(check for check in doctor.examine() if check.name == name)


def test_qemu_is_told_with_its_version(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "qemu-system-test"
    monkeypatch.setattr("platform.machine", lambda: "test")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert check_of("qemu").state == "note" and "no qemu-system-test" in check_of("qemu").found
    for said, state, words in (
        ("QEMU emulator version 7.2.22 (Debian 1:7.2+dfsg-7)", "ok", "version 7.2.22;"),
        ("QEMU emulator version 10.0.2", "ok", "version 10.0.2;"),
        ("QEMU emulator version 4.2.0", "note", "older than 5.0"),
        ("no emulator", "note", "says no version"),
    ):
        program.write_text(f"#!/bin/sh\necho '{said}'\n")
        program.chmod(0o755)
        found = check_of("qemu")
        assert found.state == state and words in found.found, found


def test_a_qemu_that_hangs_is_a_finding(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "qemu-system-test"
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    program.chmod(0o755)
    monkeypatch.setattr("platform.machine", lambda: "test")
    monkeypatch.setattr(doctor, "PROGRAM_TIMEOUT_S", 0.2)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert "timed out" in check_of("qemu").found


def test_huge_pages_for_guests_are_advice(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    chosen = tmp_path / "shmem_enabled"
    monkeypatch.setattr(doctor, "SHMEM_HUGE_PATH", chosen)
    chosen.write_text("always within_size [advise] never deny force\n")
    assert check_of("guest memory").state == "ok"
    chosen.write_text("always within_size advise [never] deny force\n")
    found = check_of("guest memory")
    assert "never" in found.found and (found.state == "note") == found.found.endswith("4 KiB")


def test_a_bluefield_is_recognized_by_its_platform_devices(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor, "PLATFORM_DEVICES_PATH", tmp_path)
    monkeypatch.setattr(doctor, "DOCA_PATH", tmp_path / "doca")
    assert not any(check.name == "dpu" for check in doctor.examine())
    (tmp_path / "MLNXBF01:00").mkdir()
    (tmp_path / "alarmtimer.0").mkdir()
    assert "MLNXBF01:00" in check_of("dpu").found and "no DOCA" in check_of("dpu").found
    (tmp_path / "doca").mkdir()
    assert f"DOCA is at {tmp_path}/doca" in check_of("dpu").found


def test_small_request_limits_are_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    limit = tmp_path / "max_pages_limit"
    limit.write_text("256\n")
    monkeypatch.setattr(doctor, "MAX_PAGES_PATH", limit)
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    pages = next(check for check in doctor.examine() if check.name == "fuse max_pages")
    assert pages.state == "missing" and "max_pages_limit=1024" in pages.action
    limit.write_text("4096\n")
    assert next(check for check in doctor.examine() if check.name == "fuse max_pages").state == "ok"


def test_the_switch_of_fuse_over_io_uring_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    switch = tmp_path / "enable_uring"
    monkeypatch.setattr(doctor, "FUSE_RINGS_PATH", switch)

    def check() -> doctor.Check:
        return next(check for check in doctor.examine() if check.name == "fuse rings")

    assert check().state == "note" and "Linux 6.14" in check().found and not check().action
    switch.write_text("N\n")
    assert check().state == "note" and f"echo Y > {switch}" in check().action
    switch.write_text("Y\n")
    assert check().state == "ok" and "1 GiB" in check().found


@pytest.mark.parametrize(("release", "state"), [("6.11.9", "note"), ("6.12.0", "ok")])
def test_a_kernel_without_idmapped_mounts_is_named(monkeypatch: pytest.MonkeyPatch, release: str, state: str) -> None:
    monkeypatch.setattr("platform.release", lambda: release)
    check = next(check for check in doctor.examine() if check.name == "fuse idmap")
    assert check.state == state and "hostUsers: false" in check.found


def test_limits_of_the_machine_on_fuse_requests_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor, "FUSE_SYSCTL_PATH", tmp_path)
    (tmp_path / "max_request_timeout").write_text("40\n")
    (tmp_path / "default_request_timeout").write_text("0\n")

    def found(release: str) -> tuple[str, str]:
        monkeypatch.setattr("platform.release", lambda: release)
        return next((check.state, check.found) for check in doctor.examine() if check.name == "fuse timeout")

    state, text = found("6.18.1")
    assert state == "note" and "fs.fuse.max_request_timeout = 40: the kernel ends each FUSE mount" in text
    assert "default_request_timeout" not in text
    (tmp_path / "max_request_timeout").write_text("0\n")
    state, text = found("6.15.0")
    assert state == "ok" and "--request-timeout" in text and "unsealed files" in text
    state, text = found("6.14.9")
    assert state == "note" and "older than 6.15" in text
