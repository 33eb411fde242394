"""systemd as the holder: which descriptors are taken from it, and which are refused by name. A double stands for it."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator

import pytest
from helpers import REPOSITORY
from service_manager import ServiceManager

from kvfs.hold import service
from kvfs.hold.words import HoldError, close_all

WORDS = {"v": 1, "pool": "/p", "mountpoint": "/m", "state": "0102", "roles": ["fuse", "written", "journal"],
         "last_pid": 7, "takeovers": 4}  # fmt: skip


def memory(data: bytes = b"") -> int:
    fd = os.memfd_create("test", os.MFD_CLOEXEC)
    os.pwrite(fd, data, 0)
    return fd


def fuse() -> int:
    try:
        return os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        pytest.skip(f"needs /dev/fuse: {error}")


def null() -> int:
    return os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)


def whole(**changes: object) -> dict[str, list[int]]:
    """Descriptors of a mount, as the next process is given them."""
    words = json.dumps({**WORDS, **changes}).encode()
    return {"kvfs-fuse": [fuse()], "kvfs-written": [memory()], "kvfs-journal": [memory()],
            "kvfs-state": [memory(words.ljust(service.SIZE_MAX))], "kvfs-watch": [null()]}  # fmt: skip


@pytest.fixture(autouse=True)
def _alive(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A /dev/fuse that was never mounted stands for a mount; each test closes all that it opens."""
    monkeypatch.setattr(service, "is_alive", lambda fd: True)
    monkeypatch.setenv("NOTIFY_SOCKET", "/nobody/listens")
    before = len(os.listdir("/proc/self/fd"))
    yield
    assert len(os.listdir("/proc/self/fd")) == before


def test_what_was_left_is_taken() -> None:
    claim = service._claim("/p", "/m", whole())
    assert claim.left is not None
    assert (claim.left.state, claim.left.pid, claim.left.takeovers) == (b"\x01\x02", 7, 5)
    assert (
        len(claim.left.fuse) == 1 and set(claim.left.memories) == {"written", "journal"} and claim.left.idle_s is None
    )
    claim.close()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kvfs-fuse": null}, "a descriptor that is no /dev/fuse .*device 1:3"),
        ({"kvfs-journal": null}, "a descriptor that is no journal .*device 1:3"),
        ({"kvfs-written": fuse}, "a descriptor that is no written .*device 10:229"),
        ({"kvfs-state": null}, "kvfs-state is no memory"),
        ({"kvfs-state": memory}, "a packet that is no JSON"),
        ({"kvfs-state": None}, "0 descriptors kvfs-state: one is expected"),
        ({"kvfs-fuse": None}, "a mount has /dev/fuse, one list of written inodes"),
        ({"kvfs-written": None}, "a mount has /dev/fuse, one list of written inodes"),
    ],
)
def test_descriptors_that_are_wrong_are_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, object], said: str
) -> None:
    given = whole()
    for name, make in changes.items():
        close_all(given.pop(name))
        if callable(make):
            given[name] = [make()]
    monkeypatch.setattr(service, "_take_given", lambda into: into.update(given))
    with pytest.raises(HoldError, match=f"^--hold systemd: .*{said}.*stopping the unit ends what systemd keeps"):
        service.claim("/p", "/m")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"pool": "/q"}, "/m of pool /q is kept for this unit, not /m of pool /p"),
        ({"mountpoint": "/n"}, "/n of pool /p is kept for this unit, not /m of pool /p"),
        ({"pool": 3}, "pool: a text of 1 to 4096 characters"),
        ({"state": "xx"}, "state: hexadecimal digits"),
        ({"v": 9}, "protocol version 9; this end speaks 1 to 2"),
    ],
)
def test_another_mount_is_refused(monkeypatch: pytest.MonkeyPatch, changes: dict[str, object], said: str) -> None:
    monkeypatch.setattr(service, "_take_given", lambda into: into.update(whole(**changes)))
    with pytest.raises(HoldError, match=f"^--hold systemd: .*{said}"):
        service.claim("/p", "/m")


def test_descriptors_that_kvfs_did_not_store_are_closed_and_told_of(caplog: pytest.LogCaptureFixture) -> None:
    claim = service._claim("/p", "/m", {"http": [null()]})
    assert claim.left is None and "descriptors http, which this kvfs does not put into systemd's store" in caplog.text
    claim.close()


def test_the_words_keep_the_version_of_the_build_that_made_the_mount(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that build reads them again, and is told of no memory that it has no word for. Names that the one in between
    does not know go as it puts its own."""
    manager, magic = ServiceManager(tmp_path, 20), memory()
    monkeypatch.setenv("NOTIFY_SOCKET", str(manager.path))
    try:
        for version in (1, 2):
            given = whole(v=version) | {"kvfs-other": [memory()]}
            service.notify("FDSTORE=1\nFDNAME=kvfs-other\nFDPOLL=0", given["kvfs-other"])
            claim = service._claim("/p", "/m", given)
            assert claim.left is not None
            service.barrier()
            assert manager.names() == ["kvfs-other"]
            claim.put(claim.left.state, claim.left.fuse, {**claim.left.memories, "magic": magic})
            service.barrier()
            names = ["kvfs-fuse", "kvfs-journal", "kvfs-state", "kvfs-watch", "kvfs-written"]
            assert manager.names() == sorted([*names, *(["kvfs-magic"] if version == 2 else [])])
            assert json.loads(service._read(claim._state))["v"] == version
            claim.drop()
            for name in set(manager.names()):
                manager.take(name)
            claim.close()
    finally:
        os.close(magic)
        manager.close()


def test_fewer_descriptors_than_there_were_are_told_of(caplog: pytest.LogCaptureFixture) -> None:
    claim = service._claim("/p", "/m", whole(roles=["fuse"] * 5 + ["written", "journal"]))
    assert "systemd has kept 3 of 7 descriptors of /m" in caplog.text and "must be 9 or more" in caplog.text
    claim.close()


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({"LISTEN_PID": "1"}, "LISTEN_PID is '1', and this is process"),
        (
            {"LISTEN_PID": "self", "LISTEN_FDS": "2", "LISTEN_FDNAMES": "a"},
            "LISTEN_FDS is '2', and LISTEN_FDNAMES has 1",
        ),
        ({"LISTEN_PID": "self", "LISTEN_FDS": "x"}, "LISTEN_FDS is 'x'"),
        ({"LISTEN_PID": "self", "LISTEN_FDS": "33", "LISTEN_FDNAMES": ":".join("a" * 33)}, ".*33 names: .*32 at most"),
    ],
)
def test_an_environment_that_cannot_be_is_refused(
    monkeypatch: pytest.MonkeyPatch, told: dict[str, str], said: str
) -> None:
    for name, value in told.items():
        monkeypatch.setenv(name, str(os.getpid()) if value == "self" else value)
    with pytest.raises(HoldError, match=f"^--hold systemd: {said}"):
        service.claim("/p", "/m")
    assert "LISTEN_PID" not in os.environ


@pytest.mark.parametrize("address", ["", "vsock:2:1"])
def test_without_systemd_it_says_what_is_missing(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", address)
    with pytest.raises(HoldError, match=rf"--hold systemd: NOTIFY_SOCKET is '{address}': .*or use kvfs hold SOCKET"):
        service.claim("/p", "/m")


def test_in_the_background_it_is_refused() -> None:
    words = ["mount", "/p", "/m", "--hold", "systemd"]
    found = subprocess.run([sys.executable, "-m", "kvfs", *words], cwd=REPOSITORY, capture_output=True, text=True)
    assert found.returncode == 2
    assert "--hold systemd: needs --foreground, as the main process of a unit" in found.stderr


def test_what_is_put_is_known_by_its_name_and_a_full_store_is_seen(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = ServiceManager(tmp_path, 6)
    monkeypatch.setenv("NOTIFY_SOCKET", str(manager.path))
    fds = [fuse(), fuse(), memory(), memory()]
    try:
        for maximum, fits in ((5, False), (6, True)):
            manager.maximum = maximum
            claim = service.claim("/p", "/m")
            if fits:
                claim.put(b"\x01", fds[:2], {"written": fds[2], "journal": fds[3]})
                assert manager.names() == [
                    "kvfs-fuse", "kvfs-fuse", "kvfs-journal", "kvfs-state", "kvfs-watch", "kvfs-written",
                ]  # fmt: skip
                assert not service._hangs_up(claim.fileno(), 0)
                claim.drop()
                service.barrier()
                assert service._hangs_up(claim.fileno(), 0)
            else:
                with pytest.raises(
                    HoldError, match=r"systemd does not keep the mount: .*too small.*set it to 6 or more"
                ):
                    claim.put(b"\x01", fds[:2], {"written": fds[2], "journal": fds[3]})
                service.barrier()
            assert manager.names() == []
            claim.close()
    finally:
        close_all(fds)
        manager.close()
