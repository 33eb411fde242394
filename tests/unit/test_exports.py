"""virtio-fs exports: what --virtiofs may say, sockets and those left behind, and what a hypervisor is told."""

from __future__ import annotations

import errno
import json
import os
import shlex
import shutil
import socket
import stat
import subprocess
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from kvfs import cli
from kvfs.daemon.host import notify_manager
from kvfs.errors import KvfsError, UsageError
from kvfs.virtiofs import hypervisor
from kvfs.virtiofs.exports import Export, ExportError, Exports, listen, parse_export, parse_exports

COUNTS = {"connected": 1, "queues_running": 2, "connections": 3, "requests": 40, "bytes_read": 5}


class PlaneDouble:
    """A double of the data plane's three methods for exports: remembers what it was asked for."""

    def __init__(self, refuse: str = "") -> None:
        self.refuse = refuse
        self.added: list[tuple[str, str, int]] = []
        self.memory_types: list[tuple[int, ...]] = []
        self.removed: list[int] = []

    def virtiofs_add(self, fd: int, tag: str, queues: int, *, memory_types: Sequence[int] = ()) -> int:
        with socket.socket(fileno=os.dup(fd)) as listener:
            assert listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) == 1
            name = str(listener.getsockname())
        if tag == self.refuse:
            raise KvfsError(f"transport {tag}: refused")
        self.added.append((name, tag, queues))
        self.memory_types.append(tuple(memory_types))
        return len(self.added) - 1

    def virtiofs_remove(self, transport: int) -> None:
        self.removed.append(transport)
        if self.refuse == "remove":
            raise KvfsError(f"transport {transport}: does not end")

    def virtiofs_statistics(self, transport: int) -> dict[str, int]:
        return {**COUNTS, "requests": 40 + transport}


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A directory for sockets with a short name."""
    yield tmp_path
    for left in tmp_path.rglob("*.sock"):
        left.unlink()


# ---- --virtiofs ----


def test_an_export_is_a_socket_with_a_tag_and_queues(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert parse_export("/run/a.sock") == Export(Path("/run/a.sock"), "kvfs", 1)
    assert parse_export("/run/a.sock,tag=cache") == Export(Path("/run/a.sock"), "cache", 1)
    assert parse_export("a.sock,queues=64,tag=x") == Export(tmp_path / "a.sock", "x", 64)
    assert parse_export("/run/a.sock,memory=58465342,tag=x,memory=ef53").memory_types == (0x58465342, 0xEF53)
    assert parse_export("/run/a.sock,tag=" + "t" * 36).tag == "t" * 36
    assert parse_export("/run/a.sock,tag=" + "é" * 18).tag == "é" * 18


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "missing"),
        (",tag=x", "missing"),
        ("/run/a.sock,", "''"),
        ("/run/a.sock,tag", "1 to 36"),
        ("/run/a.sock,tag=", "0 bytes"),
        ("/run/a.sock,tag=" + "t" * 37, "37 bytes"),
        ("/run/a.sock,tag=" + "é" * 19, "38 bytes"),
        ("/run/a.sock,tag=a b", "'a b'"),
        ("/run/a.sock,tag=a/b", "'a/b'"),
        ("/run/a.sock,tag=a\nb", "printable"),
        ("/run/a.sock,tag=a,tag=b", "'tag=b'"),
        ("/run/a.sock,queues=0", "queues=0: 1 to 64"),
        ("/run/a.sock,queues=65", "queues=65"),
        ("/run/a.sock,queues=-1", "queues=-1"),
        ("/run/a.sock,queues=two", "queues=two"),
        ("/run/a.sock,queues=²", "queues=²"),
        ("/run/a.sock,queues=" + "9" * 5000, "1 to 64"),
        ("/run/a.sock,memory=", "memory=: the type"),
        ("/run/a.sock,memory=xfs", "memory=xfs: the type"),
        ("/run/a.sock,memory=-1", "memory=-1: the type"),
        ("/run/a.sock,memory=" + "f" * 17, "hexadecimal"),
        ("/run/a.sock" + ",memory=1" * 5, "memory= 5 times; at most 4"),
        ("/run/a.sock,cache=none", "'cache=none'"),
        ("/run/" + "s" * 103, "108 bytes long"),
    ],
)
def test_an_export_without_sense_is_refused(text: str, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_export(text)
    assert words in str(caught.value) and str(caught.value).startswith("--virtiofs ")


def test_the_longest_path_that_a_socket_can_have_is_taken(place: Path) -> None:
    path = place / ("s" * (107 - len(os.fsencode(place)) - 1))
    with listen(parse_export(str(path)).socket) as listener:
        assert listener.getsockname() == str(path)
    path.unlink()


def test_every_export_needs_a_socket_of_its_own() -> None:
    with pytest.raises(UsageError, match=r"/run/a\.sock: given twice"):
        parse_exports(["/run/a.sock", "/run/b.sock", "/run/../run/a.sock,tag=other"])
    with pytest.raises(UsageError, match="at most 64"):
        parse_exports([f"/run/{i}.sock" for i in range(65)])
    assert len(parse_exports([f"/run/{i}.sock" for i in range(64)])) == 64


# ---- sockets ----


def test_a_socket_is_open_to_its_group_and_to_nobody_else(place: Path) -> None:
    before = os.umask(0)
    try:
        with listen(place / "a.sock") as listener:
            status = (place / "a.sock").lstat()
            assert stat.S_ISSOCK(status.st_mode) and stat.S_IMODE(status.st_mode) == 0o660
            assert status.st_gid == os.getegid()
            assert not listener.get_inheritable()
    finally:
        os.umask(before)


def test_a_socket_that_nobody_listens_on_is_replaced(place: Path) -> None:
    listen(place / "a.sock").close()
    with socket.socket(socket.AF_UNIX) as client, pytest.raises(ConnectionRefusedError):
        client.connect(str(place / "a.sock"))
    with listen(place / "a.sock"), socket.socket(socket.AF_UNIX) as client:
        client.connect(str(place / "a.sock"))


def test_a_socket_that_somebody_listens_on_stays(place: Path) -> None:
    with listen(place / "a.sock") as first:
        before = (place / "a.sock").lstat().st_ino
        for _ in range(2):
            with pytest.raises(ExportError, match=r"a\.sock: in use: somebody listens there"):
                listen(place / "a.sock")
        assert (place / "a.sock").lstat().st_ino == before
        # Nobody accepts: once the backlog is full it is in use all the same.
        waiting = []
        with pytest.raises(BlockingIOError):
            while True:
                waiting.append(socket.socket(socket.AF_UNIX))
                waiting[-1].setblocking(False)
                waiting[-1].connect(str(place / "a.sock"))
        with pytest.raises(ExportError, match="in use"):
            listen(place / "a.sock")
        for client in waiting:
            client.close()
        assert first.fileno() >= 0


def test_what_is_no_socket_is_left_alone(place: Path) -> None:
    (place / "file").write_bytes(b"precious")
    (place / "directory").mkdir()
    (place / "link").symlink_to(place / "file")
    for name in ("file", "directory", "link"):
        with pytest.raises(ExportError, match=f"{name}: exists and is no socket"):
            listen(place / name)
    assert (place / "file").read_bytes() == b"precious"


def test_a_bad_directory_is_named(place: Path) -> None:
    (place / "file").write_bytes(b"")
    (place / "open").mkdir()
    (place / "open").chmod(0o777)
    (place / "sticky").mkdir()
    (place / "sticky").chmod(0o1777)
    for path, words in (
        (place / "none" / "a.sock", "its directory: No such file"),
        (place / "file" / "a.sock", "file is not a directory"),
        (place / "open" / "a.sock", "open to all (mode 0777)"),
    ):
        with pytest.raises(ExportError) as caught:
            listen(path)
        assert str(caught.value).startswith(f"{path}: ") and words in str(caught.value)
    listen(place / "sticky" / "a.sock").close()


# ---- served ----


def test_exports_listen_are_counted_and_are_gone_at_the_end(place: Path) -> None:
    plane = PlaneDouble()
    wanted = (Export(place / "a.sock", "one", 2), Export(place / "b.sock", "two"))
    exports = Exports(wanted, plane)
    assert len(exports) == 2 and exports.statistics() == []
    exports.serve()
    assert plane.added == [(str(place / "a.sock"), "one", 2), (str(place / "b.sock"), "two", 1)]
    first, second = exports.statistics()
    assert first == {"socket": str(place / "a.sock"), "tag": "one", "queues": 2, **COUNTS}
    assert second["requests"] == 41
    exports.stop()
    assert plane.removed == [0, 1]
    assert exports.statistics() == [] and list(place.iterdir()) == []
    exports.stop()
    exports.close()
    assert plane.removed == [0, 1]


def test_one_bad_socket_means_none(place: Path) -> None:
    (place / "b.sock").write_bytes(b"")
    with pytest.raises(ExportError, match=r"b\.sock"):
        Exports((Export(place / "a.sock"), Export(place / "b.sock")), PlaneDouble())
    assert [path.name for path in place.iterdir()] == ["b.sock"]


def test_what_the_data_plane_refuses_is_told_and_leaves_nothing(place: Path) -> None:
    exports = Exports((Export(place / "a.sock", "good"), Export(place / "b.sock", "bad")), PlaneDouble(refuse="bad"))
    with pytest.raises(KvfsError, match="transport bad: refused"):
        exports.serve()
    exports.close()
    assert list(place.iterdir()) == []


def test_an_export_that_does_not_end_does_not_keep_the_others(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    plane = PlaneDouble(refuse="remove")
    exports = Exports((Export(place / "a.sock"), Export(place / "b.sock")), plane)
    exports.serve()
    exports.stop()
    assert plane.removed == [0, 1] and "transport 1: does not end" in caplog.text


def test_a_guest_that_breaks_the_rules_does_not_fill_the_log(
    place: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    exports = Exports((Export(place / "a.sock"), Export(place / "b.sock")), PlaneDouble())
    exports.serve()
    now = 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    for _ in range(100):
        exports.broken(0, 1, errno.EFAULT)
    exports.broken(1, 0xFFFFFFFF, errno.EPROTO)
    exports.broken(7, 1, errno.EFAULT)
    assert [record.message for record in caplog.records] == [
        f"{place}/a.sock: queue 1 has stopped: Bad address; see kvfs status",
        f"{place}/b.sock: its front end broke the protocol: Protocol error; see kvfs status",
    ]
    now += 60
    caplog.clear()
    exports.broken(0, 1, errno.EFAULT)
    exports.broken(1, 0xFFFFFFFF, errno.EMEDIUMTYPE)
    first, second = (record.message for record in caplog.records)
    assert first.endswith("Bad address; see kvfs status; 99 such messages before it were left out")
    assert "its memory is of neither memfd, tmpfs, hugetlbfs" in second and second.endswith("; see kvfs status")
    for _ in range(5):
        exports.broken(0, 1, errno.EFAULT)
    caplog.clear()
    exports.close()
    exports.close()
    # The end of the log tells the count too.
    assert [r.message for r in caplog.records] == [f"{place}/a.sock: 5 more messages of broken rules were left out"]


def test_the_data_plane_learns_of_the_memory_that_an_operator_allows(place: Path) -> None:
    plane = PlaneDouble()
    exports = Exports((Export(place / "a.sock"), Export(place / "b.sock", memory_types=(0xEF53,))), plane)
    exports.serve()
    assert plane.memory_types == [(), (0xEF53,)]
    exports.close()


def test_a_socket_that_has_become_another_s_is_not_removed(place: Path) -> None:
    exports = Exports((Export(place / "a.sock"),), PlaneDouble())
    (place / "a.sock").unlink()
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(place / "a.sock"))
        exports.close()
        assert (place / "a.sock").exists()


# ---- what a hypervisor is told ----

EXPORT = Export(Path("/run/kvfs/it's here.sock"), "kv<&>", 8)


def test_the_qemu_line_is_a_command_with_shared_memory_and_the_largest_queue() -> None:
    text = hypervisor.render_qemu([EXPORT])
    host = text[: text.index("# guest")]
    words = [word for word in shlex.split(host, comments=True) if word.strip()]
    assert words == hypervisor.qemu_arguments(EXPORT)
    assert "socket,id=kvfs,path=/run/kvfs/it's here.sock" in words
    assert "vhost-user-fs-pci,chardev=kvfs,tag=kv<&>,queue-size=1024,num-request-queues=8" in words
    memory = words[words.index("-m") + 1]
    assert f"memory-backend-memfd,id=mem,size={memory},share=on" in words
    assert int(words[words.index("-smp") + 1]) >= 8
    assert "mount -t virtiofs 'kv<&>' /mnt/kv" in text


def test_qemu_takes_the_line(place: Path) -> None:
    """As far as the socket, on which nobody listens."""
    words = hypervisor.qemu_arguments(Export(place / "none.sock", "tag", 3))
    if shutil.which(words[0]) is None:
        pytest.skip(f"needs {words[0]}")
    # TCG alone: where there is KVM it may not be ours to use.
    words = [word.replace("accel=kvm:tcg", "accel=tcg") for word in words]
    result = subprocess.run(
        ["timeout", "120", *words, "-display", "none", "-S"], capture_output=True, text=True, check=False, timeout=150
    )
    assert result.returncode == 1
    assert "Failed to connect" in result.stderr and "none.sock" in result.stderr, result.stderr


def test_the_libvirt_text_is_xml_with_the_socket_and_the_tag() -> None:
    tree = ElementTree.fromstring(f"<domain>{hypervisor.render_libvirt([EXPORT])}</domain>")
    access, source = tree.find("memoryBacking/access"), tree.find("filesystem/source")
    target = tree.find("filesystem/target")
    assert access is not None and access.get("mode") == "shared"
    assert source is not None and source.get("socket") == str(EXPORT.socket)
    assert target is not None and target.get("dir") == "kv<&>"


# ---- the command line and the daemon ----


def test_show_qemu_starts_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["export", str(tmp_path), "--show-qemu", "--virtiofs", f"{tmp_path}/a.sock,tag=x,queues=2"]
    assert cli.main(command) == 0
    assert "tag=x" in capsys.readouterr().out
    assert cli.main([*command, "--show-libvirt", "-o", "json"]) == 0
    document = json.loads(capsys.readouterr().out)
    (export,) = document["exports"]
    assert document["version"] == 1 and export["queues"] == 2 and export["qemu"][0].startswith("qemu-system-")
    assert export["guest"] == ["mount", "-t", "virtiofs", "x", "/mnt/kv"] and "<memoryBacking>" in export["libvirt"]
    assert list(tmp_path.iterdir()) == []


def test_systemd_is_told_when_the_daemon_is_ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(5)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        notify_manager("READY=1")
        assert manager.recv(100) == b"READY=1"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(f"\0kvfs-test-{os.getpid()}")
        manager.settimeout(5)
        monkeypatch.setenv("NOTIFY_SOCKET", f"@kvfs-test-{os.getpid()}")
        notify_manager("STOPPING=1")
        assert manager.recv(100) == b"STOPPING=1"
    # One that is gone, or none at all, is no failure.
    for value in (str(tmp_path / "gone"), "", "relative"):
        monkeypatch.setenv("NOTIFY_SOCKET", value)
        notify_manager("READY=1")
