"""The native path's protocol against a mounted pool, spoken by a double of the client. Tested are the answers, and the
breaches that end a connection and nothing else."""

from __future__ import annotations

import errno
import json
import os
import random
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from client_double import (
    BAD_BLOCK,
    CLOSE,
    COMMIT,
    DELETE,
    EVENTS,
    FRAME,
    HITS,
    LEASE,
    LIST,
    LONG,
    LOOKUP,
    PARENTS,
    RELEASE,
    REPORT,
    RESERVE,
    TABLE,
    TOUCH,
    WireClient,
    counted,
    padded,
    places_in,
    table,
    wanted,
    where,
)
from helpers import Pool, in_child, wait_until

from kvfs.record import Inode

pytestmark = pytest.mark.files
SPACE = b"team/llama"
READ_ONLY = 1
NOBODY = 65534


@pytest.fixture(scope="module")
def shared_pool() -> Iterator[Pool]:
    if not os.path.exists("/dev/fuse"):
        pytest.skip("no /dev/fuse")
    with Pool(files=2, size="256M") as pool:
        yield pool


@pytest.fixture
def pool(shared_pool: Pool) -> Iterator[Pool]:
    yield shared_pool
    # Whatever the test did to its connection, the daemon serves, and nothing stays reserved.
    wait_until(lambda: counters(shared_pool)["reservations_open"] == 0, "the end of all reservations")
    with connected(shared_pool) as client:
        name, content = key("after the test"), os.urandom(5000)
        assert client.put(base(shared_pool), SPACE, {name: content}) == [0]
        assert file_of(shared_pool, name).read_bytes() == content


def connected(pool: Pool, flags: int = 0) -> WireClient:
    return WireClient(pool.path, flags).welcome()


def counters(pool: Pool) -> dict[str, int]:
    found: dict[str, int] = pool.status()["counters"]
    return found


def base(pool: Pool) -> int:
    return os.stat(pool.mount).st_ino


def key(text: str) -> bytes:
    return text.encode().hex().encode()


def file_of(pool: Pool, name: bytes, space: bytes = SPACE) -> Path:
    return pool.mount / os.fsdecode(space) / os.fsdecode(name[:2]) / os.fsdecode(name)


# ---- the beginning ----


def test_hello_is_answered_with_the_layout_and_descriptors(pool: Pool) -> None:
    with connected(pool) as client:
        status = pool.status()
        assert client.uuid.hex() == status["pool"]["uuid"].replace("-", "")
        assert client.epoch == status["pool"]["epoch"] and client.writable == 1
        assert len(client.members) == status["segments"]["count"]
        assert client.width * client.zone_size == status["segments"]["size"]
        assert client.reservation_ms == 30_000 and len(client.fds) == 3
        for fd, writable in zip(client.fds, (False, True, True), strict=True):
            flags = int(Path(f"/proc/self/fdinfo/{fd}").read_text().split("flags:")[1].split()[0], 8)
            assert flags & os.O_ACCMODE == (os.O_RDWR if writable else os.O_RDONLY)
            assert bool(flags & os.O_DIRECT) == writable
        assert counters(pool)["native_clients"] == 1
    wait_until(lambda: counters(pool)["native_clients"] == 0, "the end of the connection")


def test_who_only_reads_gets_descriptors_that_only_read(pool: Pool) -> None:
    with connected(pool, READ_ONLY) as client:
        assert client.writable == 0
        for fd in client.fds:
            with pytest.raises(OSError):
                os.pwrite(fd, bytes(4096), 1 << 20)
        for kind, payload in ((RESERVE, where(1, b"", 0)), (DELETE, where(1, b"", 0)), (COMMIT, bytes(8))):
            with pytest.raises(OSError, match="for reading only") as caught:
                client.ask(kind, payload)
            assert caught.value.errno == errno.EROFS
        assert client.list(base(pool), SPACE, b"", 10) is not None


def test_another_version_is_told_so(pool: Pool) -> None:
    with WireClient(pool.path, version=7) as client:
        number, text = client.refused()
        assert number == errno.EPROTO and "version 4" in text and "7" in text


@pytest.mark.parametrize("timeout_ms", [0, 3_600_001])
def test_a_timeout_that_cannot_be_is_refused(pool: Pool, timeout_ms: int) -> None:
    with WireClient(pool.path, timeout_ms=timeout_ms) as client:
        number, text = client.refused()
        assert number == errno.EINVAL and f"{timeout_ms} ms" in text


def test_unknown_flags_are_refused(pool: Pool) -> None:
    with WireClient(pool.path, flags=4) as client:
        assert client.refused()[0] == errno.EINVAL


def test_a_beginning_of_neither_kind_is_answered_as_a_command_is(pool: Pool) -> None:
    with WireClient(pool.path, magic=b"KVFSCLI2") as client:
        client.socket.sendall(b"\n")
        assert json.loads(client.socket.makefile().readline())["ok"] is False


@pytest.fixture
def open_directory(pool: Pool) -> Iterator[Path]:
    """The pool's directory, as one that lets others in has it."""
    pool.path.chmod(0o711)
    yield pool.path
    pool.path.chmod(0o700)


def test_a_user_outside_the_group_is_refused(pool: Pool, open_directory: Path) -> None:
    def ask(gid: int) -> object:
        os.setresgid(gid, gid, gid)
        os.setresuid(NOBODY, NOBODY, NOBODY)
        with WireClient(open_directory, flags=READ_ONLY) as client:
            try:
                return client.refused()
            except AssertionError:
                return "welcome"

    def outside() -> object:
        os.setgroups([])
        return ask(NOBODY)

    def member() -> object:
        os.setgroups([os.getegid()])
        return ask(NOBODY)

    socket_path = open_directory / "control.sock"
    assert socket_path.stat().st_mode & 0o777 == 0o660 and socket_path.stat().st_gid == os.getegid()
    with pytest.raises(AssertionError, match="PermissionError"):
        in_child(outside)
    socket_path.chmod(0o666)
    try:
        number, text = in_child(outside)
        assert number == errno.EACCES and f"user {NOBODY}" in text
        assert in_child(member) == "welcome"

        def command() -> bytes:
            os.setgroups([os.getegid()])
            os.setresuid(NOBODY, NOBODY, NOBODY)
            with socket.socket(socket.AF_UNIX) as control:
                control.settimeout(10)
                control.connect(str(socket_path))
                control.sendall(b'{"command": "stop"}\n')
                return control.recv(1000)

        assert b"may not control" in in_child(command)
    finally:
        socket_path.chmod(0o660)


# ---- blocks ----


def test_a_block_put_is_a_file_and_the_reverse(pool: Pool) -> None:
    blocks = {key(f"block {i}"): random.Random(i).randbytes(1 + 37_777 * i) for i in range(12)}
    with connected(pool) as client:
        assert client.put(base(pool), SPACE, blocks) == [0] * 12
        for name, content in blocks.items():
            path = file_of(pool, name)
            assert path.read_bytes() == content
            assert path.stat().st_mode == 0o100644 and path.parent.stat().st_mode == 0o40755
        made = file_of(pool, key("made by the mount"))
        made.parent.mkdir(exist_ok=True)
        made.write_bytes(b"m" * 100)
        names = sorted([*blocks, key("made by the mount")])
        listed = client.list(base(pool), SPACE, b"", 4096)
        assert [name for name in listed if name in names] == names and listed == sorted(listed)
        for at in range(0, len(listed), 5):
            assert client.list(base(pool), SPACE, listed[at - 1] if at else b"", 5) == listed[at : at + 5]
        parent = os.stat(made.parent).st_ino
        record = Inode.unpack(client.ask(LOOKUP, struct.pack("<Q", parent) + counted(os.fsencode(made.name))))
        assert record.sealed and record.size == 100 and record.inode == made.stat().st_ino
        with pytest.raises(FileNotFoundError):
            client.ask(LOOKUP, struct.pack("<Q", parent) + counted(b"none"))
        assert client.delete(base(pool), SPACE, [*names, key("never")]) == b"\1" * 13 + b"\0"
        assert client.list(base(pool), SPACE, names[0][:-1] + b"0", 1) != names[:1]
        assert not made.exists()


def test_a_block_is_replaced_under_its_readers(pool: Pool) -> None:
    name = key("replaced")
    path = file_of(pool, name)
    with connected(pool) as client:
        assert client.put(base(pool), SPACE, {name: b"1" * 10_000}) == [0]
        with path.open("rb") as reader:
            assert client.put(base(pool), SPACE, {name: b"2" * 20_000}) == [0]
            assert reader.read() == b"1" * 10_000
        assert path.read_bytes() == b"2" * 20_000
        assert client.delete(base(pool), SPACE, [name]) == b"\1" and not path.exists()


def test_a_batch_without_a_namespace_and_below_a_directory(pool: Pool) -> None:
    (pool.mount / "below").mkdir(exist_ok=True)
    inode = os.stat(pool.mount / "below").st_ino
    with connected(pool) as client:
        assert client.put(inode, b"", {key("k"): b"content"}) == [0]
        assert (pool.mount / "below" / "6b" / "6b").read_bytes() == b"content"
        with pytest.raises(FileNotFoundError):
            client.reserve(1 << 60, b"", [(key("k"), 1)])
        with pytest.raises(NotADirectoryError):
            client.reserve(os.stat(pool.mount / "below" / "6b" / "6b").st_ino, b"", [(key("k"), 1)])
        assert client.list(1 << 60, b"", b"", 10) == [] and client.delete(1 << 60, b"", [key("k")]) == b"\0"


def test_directories_belong_to_who_made_them(pool: Pool, open_directory: Path) -> None:
    def put() -> None:
        os.setgroups([os.getegid()])
        os.setresgid(7, 7, 7)
        os.setresuid(NOBODY, NOBODY, NOBODY)
        with WireClient(open_directory).welcome() as client:
            assert client.put(root, b"own", {key("k"): b"content"}) == [0]

    root = base(pool)
    in_child(put)
    for path in (pool.mount / "own", pool.mount / "own" / "6b", pool.mount / "own" / "6b" / "6b"):
        assert (path.stat().st_uid, path.stat().st_gid) == (NOBODY, 7)


def test_a_connection_that_ends_gives_everything_back(pool: Pool) -> None:
    client = connected(pool)
    before = counters(pool)["reservations_reclaimed"]
    places = client.reserve(base(pool), SPACE, [(key(f"lost {i}"), 100_000) for i in range(100)])
    client.write(places[0], b"w" * 100_000)
    assert counters(pool)["reservations_open"] == 100
    client.close()
    wait_until(lambda: counters(pool)["reservations_open"] == 0, "the end of the reservations")
    assert counters(pool)["reservations_reclaimed"] == before + 100
    assert not file_of(pool, key("lost 0")).exists()


def test_requests_are_answered_while_a_reservation_waits(pool: Pool) -> None:
    # A quarter of the pool's 512 MiB is lent at one time, headers included.
    large = [(key(f"large {i}"), 30 << 20) for i in range(4)]
    with connected(pool) as client:
        with connected(pool) as other:
            assert [place.error for place in other.reserve(base(pool), SPACE, large)] == [0] * 4
            name = key("waits")
            item = struct.pack("<QII", 30 << 20, len(name), 0) + padded(name)
            waiting = client.send(RESERVE, where(base(pool), SPACE, 1) + item)
            listing = client.send(LIST, where(base(pool), SPACE, 1) + counted(b""))
            assert client.frame()[:3] == (LIST, 0, listing)
            assert client.put(base(pool), SPACE, {key("small"): b"bytes"}) == [0]
        # The other one is gone, and with it what it had.
        kind, status, id_, answer = client.frame()
        assert (kind, status, id_) == (RESERVE, 0, waiting)
        assert struct.unpack_from("<i", answer, 8) == (0,)


@pytest.mark.slow
def test_what_clients_report_is_shown(pool: Pool) -> None:
    before = counters(pool)

    def report(client: WireClient, gets: int, reconnects: int = 0) -> None:
        values = [0] * 17
        values[3], values[4], values[12], values[15], values[16] = gets, 1000 * gets, 5, reconnects, 2
        client.send(REPORT, struct.pack("<17Q", *values))

    def since(name: str) -> int:
        return counters(pool)[f"native_{name}"] - before[f"native_{name}"]

    with connected(pool) as one, connected(pool) as two:
        report(one, 10)
        report(one, 30)
        report(two, 100)
        # One that was connected before: what it did then has been counted.
        report(two, 100)
        wait_until(lambda: since("gets") == 130, "the reports")
        assert since("get_bytes") == 130_000 and since("prestaged") == 10 and since("busy") == 4
        assert since("clients") == 2
    wait_until(lambda: since("clients") == 0, "the end of the connections")
    assert since("gets") == 130 and since("busy") == 0
    with connected(pool) as again:
        report(again, 1000, reconnects=1)
        report(again, 1007, reconnects=1)
        wait_until(lambda: since("gets") == 137, "the report")
        text = pool.command("stats", str(pool.path), "--prometheus").stdout
        assert 'kvfs_native_clients{pool="' in text and "kvfs_native_gets_total{" in text
        assert "native: 1 client; read " in pool.command("status", str(pool.path)).stdout


def test_hits_and_bad_blocks_are_taken_and_not_believed(pool: Pool) -> None:
    name = key("not bad")
    with connected(pool) as client:
        assert client.put(base(pool), SPACE, {name: b"g" * 9000}) == [0]
        inode = file_of(pool, name).stat().st_ino
        record = Inode.unpack(
            client.ask(LOOKUP, struct.pack("<Q", file_of(pool, name).parent.stat().st_ino) + counted(name))
        )
        client.send(HITS, struct.pack("<3Q", inode, inode, 1 << 50))
        for _ in range(50):
            client.send(BAD_BLOCK, struct.pack("<QQ", inode, record.segment))
            client.send(BAD_BLOCK, struct.pack("<QQ", 1 << 50, 1 << 40))
        assert client.list(base(pool), SPACE, b"", 1)
        time.sleep(0.3)
        assert file_of(pool, name).read_bytes() == b"g" * 9000 and counters(pool)["bad_blocks"] == 0


def test_a_subscription_hands_out_the_feed_for_reading_alone(pool: Pool) -> None:
    with connected(pool) as client:
        with pytest.raises(OSError, match="directory 12345678: gone"):
            client.ask(EVENTS, struct.pack("<IIQ", 2, 0, 12345678))
        assert client.ask(EVENTS, struct.pack("<IIQ", 2, 0, 1)) == b""
        client.send(EVENTS, struct.pack("<IIQ", 1, 0, 0))
        data, fds, _, _ = socket.recv_fds(client.socket, FRAME.size, 4)
        size, kind, _, status, _ = FRAME.unpack(data)
        assert (size, kind, status, len(fds)) == (24, EVENTS, 0, 1)
        feed_size, position, _ = struct.unpack("<QQQ", client.receive(size))
        try:
            assert os.fstat(fds[0]).st_size == 4096 + feed_size and position == 0
            with pytest.raises(OSError):
                os.pwrite(fds[0], b"x", 4096)
        finally:
            os.close(fds[0])


# ---- violations ----

NAME = key("k")
ITEM = struct.pack("<QII", 4096, len(NAME), 0) + padded(NAME)


@pytest.mark.parametrize(
    ("kind", "payload"),
    [
        (RESERVE, b""),
        (RESERVE, where(1, b"", 5000) + ITEM),
        (RESERVE, where(1, b"", 2) + ITEM),
        (RESERVE, where(1, b"", 1) + ITEM + bytes(8)),
        (RESERVE, where(1, b"/absolute", 1) + ITEM),
        (RESERVE, where(1, b"a/../b", 1) + ITEM),
        (RESERVE, where(1, b"a//b", 1) + ITEM),
        (RESERVE, where(1, b"a/.", 1) + ITEM),
        (RESERVE, where(1, b"nul\0nul", 1) + ITEM),
        (RESERVE, where(1, b"p" * 256, 1) + ITEM),
        (RESERVE, where(1, b"p/" * 600 + b"p", 1) + ITEM),
        (RESERVE, struct.pack("<QII", 1, 1 << 31, 1) + ITEM),
        (RESERVE, where(1, b"", 1) + struct.pack("<QII", 1, 3, 0) + b"abc".ljust(8)),
        (RESERVE, where(1, b"", 1) + struct.pack("<QII", 1, 2, 0) + b"AB".ljust(8)),
        (RESERVE, where(1, b"", 1) + struct.pack("<QII", 1, 2, 0) + b"..".ljust(8)),
        (RESERVE, where(1, b"", 1) + struct.pack("<QII", 1, 0, 0)),
        (RESERVE, where(1, b"", 1) + struct.pack("<QII", 1, 256, 0) + b"ab" * 128),
        (RESERVE, where(1, b"", 1) + struct.pack("<QII", 1, (1 << 32) - 1, 0) + b"ab" * 128),
        (RESERVE, where(1, b"", 1) + struct.pack("<QII", 1, 2, 9) + b"ab".ljust(8)),
        (RESERVE, where(1, b"", 1, 16) + ITEM),
        (RESERVE, where(1, b"", 1, LONG) + ITEM),
        (RESERVE, where(1, b"", 1, PARENTS) + ITEM),
        (RESERVE, where(1, b"", 1, TABLE) + ITEM),
        (RESERVE, where(1, b"", 1, TABLE) + struct.pack("<Q", 0) + ITEM),
        (RESERVE, where(1, b"", 1, TABLE) + struct.pack("<Q", 1 << 40) + counted(b"a") + ITEM),
        (RESERVE, where(1, b"", 1, TABLE) + table([b"a"] * 257) + ITEM),
        (RESERVE, where(1, b"", 1, TABLE) + table([b"a"]) + wanted([(b"k", 1)], 1)),
        (RESERVE, where(1, b"", 1, TABLE) + table([b"a"]) + wanted([(b"k", 1)], (1 << 32) - 1)),
        (RESERVE, where(1, b"", 1, TABLE) + table([b"/a"]) + wanted([(b"k", 1)])),
        (RESERVE, where(1, b"", 1, TABLE) + table([b"a/../b"]) + wanted([(b"k", 1)])),
        (RESERVE, where(1, b"", 1, TABLE) + table([b"a/"]) + wanted([(b"k", 1)])),
        (RESERVE, where(1, b"", 1, TABLE) + table([b"n" * 256]) + wanted([(b"k", 1)])),
        (RESERVE, where(1, b"", 1, TABLE) + table([b"n/" * 511 + b"nn"]) + wanted([(b"k", 1)])),
        (RESERVE, where(1, b"", 1, TABLE) + table([b"a\0b"]) + wanted([(b"k", 1)])),
        (RESERVE, where(1, b"", 1, TABLE) + table([b"a"]) + wanted([(b"..", 1)])),
        (RESERVE, where(1, b"", 1, TABLE) + table([b"a"]) + wanted([(b"a/b", 1)])),
        (RESERVE, where(1, b"", 1, TABLE) + table([b"a"]) + wanted([(b"a\0b", 1)])),
        (RESERVE, where(1, b"", 1, TABLE) + table([b"a"]) + wanted([(b"", 1)])),
        (RESERVE, where(1, b"", 1, TABLE) + table([b"a"]) + wanted([(b"n" * 256, 1)])),
        (DELETE, where(1, b"", 1, PARENTS) + counted(b"6b")),
        (DELETE, where(1, b"", 1) + counted(b"6b", 1)),
        (DELETE, where(1, b"", 1, TABLE) + table([b"a"]) + counted(b"name", 1)),
        (DELETE, where(1, b"", 1, TABLE) + table([b"a"]) + counted(b".")),
        (DELETE, where(1, b"", 1, TABLE) + table([])),
        (LIST, where(1, b"", 10, TABLE) + counted(b"")),
        (LIST, where(1, b"", 10) + counted(b"6b" * 128)),
        (LIST, where(1, b"", 10, LONG) + counted(b"6b" * 256)),
        (LIST, where(1, b"", 10, LONG) + counted(b"6b" * 200 + b"6")),
        (COMMIT, b""),
        (COMMIT, struct.pack("<Q", 1 << 60)),
        (COMMIT, struct.pack("<QQq", 2, 1, 0)),
        (COMMIT, struct.pack("<QQq", 1, 1, 5)),
        (COMMIT, struct.pack("<QQq", 1, 1, -(1 << 40))),
        (DELETE, where(1, b"", 1)),
        (DELETE, where(1, b"", 1) + counted(b"zz")),
        (LIST, where(1, b"", 10)),
        (LIST, where(1, b"", 10) + counted(b"xy")),
        (LOOKUP, struct.pack("<Q", 1)),
        (LOOKUP, struct.pack("<Q", 1) + counted(b"a/b")),
        (LOOKUP, struct.pack("<Q", 1) + counted(b"..")),
        (LOOKUP, struct.pack("<QQ", 1, 1 << 40)),
        (LOOKUP, struct.pack("<QQ", 1, 0)),
        (BAD_BLOCK, bytes(8)),
        (HITS, bytes(7)),
        (TOUCH, bytes(9)),
        (TOUCH, bytes(8 * 4097)),
        (LEASE, b""),
        (LEASE, struct.pack("<QII", 0, 1, 0)),
        (LEASE, struct.pack("<QIIQ", 0, 0, 0, 1)),
        (LEASE, struct.pack("<QIIQ", 0, 1, 1, 1)),
        (LEASE, struct.pack("<QIIQ", 0, 1, 0, 1) + bytes(4)),
        (LEASE, struct.pack("<QII", 0, 1, 0) + bytes(8 * 4097)),
        (RELEASE, b""),
        (RELEASE, bytes(16)),
        (REPORT, bytes(8)),
        (EVENTS, b""),
        (EVENTS, struct.pack("<IIQ", 3, 0, 0)),
        (EVENTS, struct.pack("<IIQ", 1, 0, 5)),
        (EVENTS, struct.pack("<IIQ", 2, 1, 1)),
        (1, b""),
        (2, b""),
        (CLOSE, b""),
        (99, b""),
        (0, b""),
    ],
)
def test_a_violation_ends_the_connection(pool: Pool, kind: int, payload: bytes) -> None:
    with connected(pool) as client:
        client.send(kind, payload)
        assert client.hung_up()


def test_items_are_in_the_directories_of_a_table(pool: Pool) -> None:
    directories = [b"deep/er", b"", b"file/below", b"not used"]
    with connected(pool) as client:
        assert client.put(base(pool), SPACE, {key("k"): b"content"}) == [0]
        root = pool.mount / os.fsdecode(SPACE)
        (root / "file").write_bytes(b"no directory")
        (root / "there").mkdir(exist_ok=True)
        items = b"".join(
            wanted([(name, 4)], directory, struct.pack("<Q", directory))
            for name, directory in ((b"any name.bin", 0), (b"6b", 1), (b"lost", 2), (b"there", 1))
        )
        head = where(base(pool), SPACE, 4, TABLE | PARENTS) + table(directories)
        places = places_in(client.ask(RESERVE, head + items), 4)
        assert [place.error for place in places] == [0, 0, -errno.ENOTDIR, 0]
        for place in (places[0], places[1], places[3]):
            client.write(place, b"data")
        assert client.commit([(places[i].reservation, 0) for i in (0, 1, 3)]) == [0, -errno.EISDIR, -errno.EISDIR]
        assert (root / "deep/er/any name.bin").read_bytes() == b"data"
        assert (root / "deep").stat().st_mode == 0o40755 and not (root / "not used").exists()
        removed = [(b"any name.bin", 0), (b"any name.bin", 1), (b"there", 1), (b"lost", 2), (b"file", 1), (b"x", 3)]
        payload = where(base(pool), SPACE, len(removed), TABLE) + table(directories)
        payload += b"".join(counted(*item) for item in removed)
        assert client.ask(DELETE, payload) == b"\1\0\0\0\1\0"
        assert not (root / "file").exists() and (root / "there").is_dir() and not (root / "not used").exists()


def test_a_frame_may_have_256_directories_of_many_parts(pool: Pool) -> None:
    """And others are served meanwhile."""
    deep = [b"/".join([b"%d" % i, *[b"d"] * 40]) for i in range(256)]
    with connected(pool) as client, connected(pool) as other:
        items = b"".join(wanted([(b"name", 1)], i) for i in range(256))
        asked = client.send(RESERVE, where(base(pool), b"deep", 256, TABLE) + table(deep) + items)
        assert other.list(base(pool), b"none", b"", 10) == []
        kind, status, id_, answer = client.frame()
        assert (kind, status, id_) == (RESERVE, 0, asked)
        assert all(place.error == 0 for place in places_in(answer, 256))
        assert len(list((pool.mount / "deep").iterdir())) == 256


def test_long_keys_are_listed_to_who_asks_for_them(pool: Pool) -> None:
    short, long = b"ab" * 127, b"ab" * 127 + b"3f" + b"0123" * 3
    with connected(pool) as client:
        items = wanted([(short, 1)]) + wanted([(long[255:], 1)], 1)
        head = where(base(pool), b"long", 2, TABLE) + table([b"ab", b"ab/" + long[:254] + b"j"])
        places = places_in(client.ask(RESERVE, head + items), 2)
        for place in places:
            client.write(place, b"x")
        assert client.commit([(place.reservation, 0) for place in places]) == [0, 0]
        assert client.list(base(pool), b"long", b"", 10) == [short]
        assert client.list(base(pool), b"long", b"", 10, LONG) == [short, long]
        assert client.list(base(pool), b"long", b"", 1, LONG) == [short]
        for after, found in ((short, [long]), (short + b"3f", [long]), (long, []), (short + b"40", []), (b"ac", [])):
            assert client.list(base(pool), b"long", after, 10, LONG) == found, after


def test_frames_that_are_none_end_the_connection(pool: Pool) -> None:
    for head in (
        FRAME.pack(1 << 31, RESERVE, 0, 0, 1),
        FRAME.pack(17 << 20, RESERVE, 0, 0, 1),
        FRAME.pack(8, COMMIT, 1, 0, 1),
        FRAME.pack(8, COMMIT, 0, -1, 1),
        b"\xff" * 64,
        os.urandom(64),
    ):
        with connected(pool) as client:
            client.socket.sendall(head)
            assert client.hung_up()
    with connected(pool) as client:
        client.socket.sendall(FRAME.pack(100, COMMIT, 0, 0, 1) + bytes(50))
        client.socket.shutdown(socket.SHUT_WR)
        assert client.hung_up()


def test_a_frame_in_small_pieces_is_one_frame(pool: Pool) -> None:
    with connected(pool) as client:
        payload = where(base(pool), SPACE, 0)
        frame = FRAME.pack(len(payload), RESERVE, 0, 0, 77) + payload
        for i in range(len(frame)):
            client.socket.sendall(frame[i : i + 1])
        assert client.frame() == (RESERVE, 0, 77, b"")
        # And several at once are several.
        client.socket.sendall(frame * 3)
        assert [client.frame()[2] for _ in range(3)] == [77] * 3


def test_unknown_and_repeated_reservations_are_answered(pool: Pool) -> None:
    with connected(pool) as client, connected(pool) as other:
        (place,) = client.reserve(base(pool), SPACE, [(key("once"), 10)])
        assert other.commit([(place.reservation, 0)]) == [-errno.ETIMEDOUT]
        client.write(place, b"0123456789")
        late = -errno.ETIMEDOUT
        assert client.commit([(place.reservation, 0), (place.reservation, 0), (1 << 63, 0)]) == [0, late, late]
        assert client.commit([]) == []


def test_leases_are_of_one_client_and_of_sealed_blocks(pool: Pool) -> None:
    stored = [key(f"leased {i}") for i in range(3)]
    with connected(pool) as client, connected(pool) as other:
        assert client.put(base(pool), SPACE, {name: b"l" * 9000 for name in stored}) == [0] * 3
        inodes = [file_of(pool, name).stat().st_ino for name in stored]
        with open(pool.mount / "being written", "w") as file:
            file.write("half")
            file.flush()
            nothing = [base(pool), 0, 1 << 63, (1 << 64) - 1, os.fstat(file.fileno()).st_ino]
            assert client.lease(nothing) == (0, bytes(5))
            lease, held = client.lease([*inodes[:1], *nothing, *inodes[:1]])
        assert lease and held == b"\1" + bytes(5) + b"\1"
        assert client.lease(inodes[1:], 1, lease) == (lease, b"\1\1")  # its deadline is the lease's
        assert counters(pool)["leased_blocks"] == 3
        # A number is worth nothing to anybody else, and nothing that it never was.
        for number in (lease, lease + 1, 1, (1 << 64) - 1, 0):
            assert other.release(number) == 0
            assert other.lease(inodes, 1000, number)[1] == (b"\1\1\1" if number == 0 else bytes(3))
        assert client.release(lease) == 1 and client.release(lease) == 0
        assert client.lease(inodes, 1000, lease) == (0, bytes(3))
    wait_until(lambda: counters(pool)["leases_open"] == 0, "the end of the leases")


def test_a_flood_of_leases_and_releases_holds_nothing(pool: Pool) -> None:
    name = key("flooded")
    with connected(pool) as client:
        assert client.put(base(pool), SPACE, {name: b""}) == [0]  # one page, of its header
        inode = file_of(pool, name).stat().st_ino
        for turn in range(500):
            lease, held = client.lease([inode] * 8)
            assert held == b"\1" * 8
            if turn % 2:
                assert client.release(lease) == 1
        # All that a client may have, and no more.
        while client.lease([inode])[0]:
            pass
        assert counters(pool)["leases_open"] == 4096 and counters(pool)["leased_blocks"] == 1
        assert client.lease([inode]) == (0, b"\0") and client.lease([inode], 1, lease)[1] == b"\0"
    wait_until(lambda: counters(pool)["leases_open"] == 0, "the end of the leases")
    with connected(pool) as client:
        # A sixteenth of the pool, however often it is the same page; and a hundred frames at once.
        asked = struct.pack("<QII", 0, 60_000, 0) + struct.pack("<Q", inode) * 4096
        for _ in range(17):
            client.send(LEASE, asked)
        held = sum(sum(client.frame()[3][8:]) for _ in range(17))
        assert 7000 < held <= (512 << 20) // 16 // 4096
        for _ in range(100):
            client.send(TOUCH, struct.pack("<Q", inode) * 4096)
            client.send(RELEASE, bytes(8))
        assert {client.frame()[0] for _ in range(100)} == {RELEASE}
        assert counters(pool)["leased_blocks"] == 1


def test_a_name_twice_in_one_batch_is_stored_once(pool: Pool) -> None:
    name = key("twice")
    with connected(pool) as client:
        one, two = client.reserve(base(pool), SPACE, [(name, 4), (name, 4)])
        client.write(one, b"1111")
        client.write(two, b"2222")
        assert client.commit([(two.reservation, 0), (one.reservation, 0)]) == [0, 0]
        assert file_of(pool, name).read_bytes() == b"2222"


def test_native_clients_do_not_keep_the_command_line_out(pool: Pool) -> None:
    clients = [connected(pool, READ_ONLY) for _ in range(100)]
    try:
        assert counters(pool)["native_clients"] == 100
    finally:
        for client in clients:
            client.close()


# ---- the end ----


def test_an_unmount_sends_a_close_and_a_crash_does_not() -> None:
    with Pool(files=2, size="64M") as pool:
        with connected(pool) as client:
            client.reserve(base(pool), SPACE, [(key("open"), 10_000)])
            pool.umount()
            assert client.frame()[:2] == (CLOSE, 0) and client.hung_up()
        pool.start()
        with connected(pool) as client:
            assert client.put(base(pool), SPACE, {key("kept"): b"k"}) == [0]
            client.reserve(base(pool), SPACE, [(key("open"), 10_000)])
            pool.kill()
            assert client.hung_up()
        pool.remount()
        assert file_of(pool, key("kept")).read_bytes() == b"k"
        pool.umount()
        assert pool.command("fsck", "--verify-data", str(pool.path)).returncode == 0
