"""Native clients that are cheap to run and mean to cost much. They speak the protocol on raw sockets, so these tests
hold for whatever answers there. They count where they can, and measure no time."""

from __future__ import annotations

import errno
import mmap
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from client_double import (
    BAD_BLOCK,
    COMMIT,
    DELETE,
    EVENTS,
    FRAME,
    HITS,
    LIST,
    RELEASE,
    REPORT,
    RESERVE,
    WireClient,
    counted,
    wanted,
    where,
)
from helpers import REPOSITORY, Pool, in_child

BLOCK = 1 << 20
READ_ONLY = 1


def frame(kind: int, payload: bytes, number: int = 1) -> bytes:
    return FRAME.pack(len(payload), kind, 0, 0, number) + payload


def base_of(pool: Pool) -> int:
    return os.stat(pool.mount).st_ino


def counters(pool: Pool) -> dict[str, int]:
    found: dict[str, int] = pool.status()["counters"]
    return found


def pid_of(pool: Pool) -> int:
    return int((pool.path / "kvfs.pid").read_text())


# ---- memory that C is lent ----


@pytest.fixture(scope="module")
def eager_pool() -> Iterator[Pool]:
    """Its daemon collects garbage at every chance."""
    with Pool(files=2, size="256M", program=(REPOSITORY / "tests/eager_gc.py",)) as pool:
        yield pool


@pytest.mark.parametrize("how", ["a frame that is none", "the end"])
def test_clients_that_leave_with_requests_under_way_end_no_daemon(eager_pool: Pool, how: str) -> None:
    """Their requests are cancelled, and what C was lent for them is garbage in a cycle."""
    base, daemon = base_of(eager_pool), pid_of(eager_pool)
    names = [b"%04x" % i for i in range(100)]
    for number in range(25):
        with WireClient(eager_pool.path).welcome() as client, suppress(ConnectionError):
            asked = where(base, b"gc%d" % (number % 4), len(names))
            # Beyond what may be reserved: these wait.
            for i in range(4):
                client.socket.sendall(frame(RESERVE, asked + wanted([(name, BLOCK) for name in names]), i))
            client.socket.sendall(frame(DELETE, asked + b"".join(map(counted, names)), 5))
            client.socket.sendall(frame(COMMIT, struct.pack("<Q", 1) + struct.pack("<Qq", 7, 0), 6))
            client.socket.sendall(frame(LIST, where(base, b"gc1", 100) + counted(b""), 7) * 20)
            client.frame()
            if how != "the end":
                client.socket.sendall(frame(77, b""))
                while client.socket.recv(1 << 16):
                    pass
        assert Path(f"/proc/{daemon}").exists(), f"the daemon died in round {number}"
    (eager_pool.mount / "alive").write_bytes(b"alive")
    assert (eager_pool.mount / "alive").read_bytes() == b"alive" and pid_of(eager_pool) == daemon


# ---- work ----


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(files=2, size="512M") as pool:
        yield pool


class Flood:
    """Connections to which as much of one frame is sent as goes, in a thread, until `most` bytes."""

    def __init__(self, pool: Pool, count: int, data: bytes, most: int = 1 << 62) -> None:
        self._clients = [WireClient(pool.path, READ_ONLY).welcome() for _ in range(count)]
        self._data = data * max(1, (1 << 17) // len(data))
        self._left = dict.fromkeys((client.socket for client in self._clients), self._data)
        self._sent, self._most = mmap.mmap(-1, 8), most
        self._ended, self._full = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run)
        for sock in self._left:
            sock.setblocking(False)

    def __enter__(self) -> Flood:
        self._thread.start()
        assert self._full.wait(100), "the daemon takes all"
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        for client in self._clients:
            client.close()

    @property
    def sent(self) -> int:
        """Bytes so far. Children see it, too."""
        return int.from_bytes(self._sent[:], "little")

    @sent.setter
    def sent(self, size: int) -> None:
        self._sent[:] = size.to_bytes(8, "little")

    def _run(self) -> None:
        while not self._ended.is_set() and self.sent < self._most:
            _, there, _ = select.select([], self._left, [], 0.01)
            if not there:
                self._full.set()
            for sock in there:
                with suppress(BlockingIOError):
                    size = sock.send(self._left[sock])
                    self.sent += size
                    self._left[sock] = self._left[sock][size:] or self._data


@pytest.mark.parametrize("what", ["blocks that are not bad", "reports"])
def test_frames_without_an_answer_leave_others_their_turns(pool: Pool, what: str) -> None:
    """Each request of the mount waits for a turn of this user's at a time, not for all that its connections have sent:
    some 4 MiB."""
    victim = pool.mount / "victim"
    victim.write_bytes(bytes(300_000))
    number = victim.stat().st_ino
    frames = {
        "blocks that are not bad": frame(BAD_BLOCK, struct.pack("<QQ", number, 0)),
        "reports": frame(REPORT, bytes(8 * 17)),
    }
    with Flood(pool, 32, frames[what]) as flood:
        before = flood.sent
        for i in range(10):
            (pool.mount / f"directory{i}").mkdir()
            (pool.mount / f"directory{i}").rmdir()
        taken = flood.sent - before
    assert victim.read_bytes() == bytes(300_000)
    assert taken < 12 << 20, f"20 requests of the mount waited for {taken} bytes of frames"


@pytest.mark.parametrize("count", [0, 16], ids=["hits of nothing", "hits"])
def test_uses_leave_other_users_their_turns(pool: Pool, count: int) -> None:
    """The data plane takes uses by itself, and answers another user by itself meanwhile. Each of that one's requests
    waits for a turn of a millisecond, not for all that was sent."""
    number, nothing = base_of(pool), struct.pack("<QQq", 1, 4711, 0)

    def other() -> object:
        with WireClient(pool.path).welcome() as client:
            before = flood.sent
            for _ in range(20):
                assert client.ask(COMMIT, nothing) == struct.pack("<q", -errno.ETIMEDOUT)
            return flood.sent - before

    pool.path.chmod(0o711)
    try:
        with Flood(pool, 32, frame(HITS, struct.pack("<Q", number) * count), most=1 << 28) as flood:
            taken = in_child(other, user=65534, group=os.getegid())
    finally:
        pool.path.chmod(0o700)
    assert taken < 12 << 20, f"20 requests of another user waited for {taken} bytes of frames"


# ---- memory ----


def memory_of(pool: Pool) -> int:
    """Resident bytes of the daemon."""
    return int(Path(f"/proc/{pid_of(pool)}/statm").read_text().split()[1]) * 4096


@pytest.fixture(scope="module")
def listed(pool: Pool) -> Pool:
    """Its namespace `listed` has 1,024 blocks, whose names are 280 KiB."""
    base = base_of(pool)
    names = [b"%02x%08x" % (i % 4, i) + b"ab" * 120 for i in range(1024)]
    with WireClient(pool.path).welcome() as client:
        for at in range(0, len(names), 256):
            part = names[at : at + 256]
            places = client.reserve(base, b"listed", [(name, 10) for name in part])
            assert client.commit([(place.reservation, 0) for place in places]) == [0] * len(part)
    return pool


def test_answers_that_nobody_reads_are_bounded_in_bytes(listed: Pool) -> None:
    """Four connections ask for 4 x 256 lists of 280 KiB. A fifth, of the same user, is answered meanwhile."""
    pool, base = listed, base_of(listed)
    with WireClient(pool.path).welcome() as client:
        before, most = memory_of(pool), 0
        silent = [WireClient(pool.path, READ_ONLY).welcome() for _ in range(4)]
        try:
            asked = frame(LIST, where(base, b"listed", 4096) + counted(b""))
            for one in silent:
                one.socket.setblocking(False)
                assert one.socket.send(asked * 256) == 256 * len(asked)
            for _ in range(20):
                assert len(client.list(base, b"listed", b"", 100)) == 100
                most = max(most, memory_of(pool) - before)
        finally:
            for one in silent:
                one.close()
    # The address sanitizer keeps what was freed: 256 MiB of it.
    most -= (256 << 20) * bool(os.environ.get("KVFS_TEST_SANITIZED"))
    assert most < 128 << 20, f"{most} bytes more"


def test_a_peer_that_does_not_read_goes_when_its_user_wants_the_room(listed: Pool) -> None:
    pool, base = listed, base_of(listed)
    with WireClient(pool.path).welcome() as client:
        asked = frame(LIST, where(base, b"listed", 4096) + counted(b""))
        silent = [WireClient(pool.path, READ_ONLY).welcome() for _ in range(8)]
        try:
            for one in silent:
                one.socket.setblocking(False)
                one.socket.send(asked * 256)
            # The user's room is taken now: eight connections keep more than it. All the same this one is answered.
            for _ in range(10):
                assert len(client.list(base, b"listed", b"", 4096)) >= 1024
        finally:
            for one in silent:
                one.close()


# ---- descriptors ----


def descriptors_of(pool: Pool) -> int:
    return len(os.listdir(f"/proc/{pid_of(pool)}/fd"))


def test_descriptors_that_nobody_takes_are_bounded(pool: Pool) -> None:
    clients = [WireClient(pool.path, READ_ONLY).welcome() for _ in range(20)]
    try:
        before, most = descriptors_of(pool), 0
        for client in clients:
            client.socket.sendall(frame(EVENTS, struct.pack("<IIQ", 1, 0, 0)) * 300)
            most = max(most, descriptors_of(pool))
        # A request behind them is answered, once they are taken.
        for client in clients:
            client.socket.sendall(frame(RELEASE, struct.pack("<Q", 7), 9))
        refused = 0
        for client in clients:
            taken = 0
            for _ in range(301):
                data, fds, _, _ = socket.recv_fds(client.socket, FRAME.size, 8)
                size, kind, _, status, _ = FRAME.unpack(data + client.receive(FRAME.size - len(data)))
                client.receive(size)
                taken += len(fds)
                for fd in fds:
                    os.close(fd)
                refused += status == -errno.EMFILE
                most = max(most, descriptors_of(pool))
                assert kind == (EVENTS if fds or status else RELEASE)
            assert taken
    finally:
        for client in clients:
            client.close()
    assert refused and most - before < 40, (refused, before, most)


@pytest.mark.slow
def test_one_user_cannot_take_all_connections(pool: Pool) -> None:
    """One of 512 is another user's."""

    def connect() -> socket.socket:
        client = socket.socket(socket.AF_UNIX)
        client.settimeout(50)
        client.connect(str(pool.path / "control.sock"))
        client.sendall(struct.pack("<8sIIII", b"KVFSCLI1", 5, READ_ONLY, 50_000, 0))
        return client

    def status_of(client: socket.socket) -> int:
        data = b""
        while len(data) < FRAME.size:
            data += client.recv(FRAME.size - len(data))
        return FRAME.unpack(data)[3]

    def member() -> object:
        os.setgroups([os.getegid()])
        os.setresuid(65534, 65534, 65534)
        return status_of(connect())

    pool.path.chmod(0o711)
    clients = []
    try:
        clients = [connect() for _ in range(512)]
        assert {status_of(client) for client in clients} == {0}
        clients.append(connect())
        assert status_of(clients[-1]) == -errno.EMFILE
        assert in_child(member) == 0
    finally:
        pool.path.chmod(0o700)
        for client in clients:
            client.close()


# ---- what clients tell ----


def test_uses_that_are_told_are_those_that_could_be(pool: Pool) -> None:
    """One block of 1 MiB is said to have been read 400,000 times, by 20 connections of one user."""
    name = b"ab" * 8
    with WireClient(pool.path).welcome() as client:
        assert client.put(base_of(pool), b"told", {name: bytes(BLOCK)}) == [0]
        inode = (pool.mount / "told" / "ab" / name.decode()).stat().st_ino
        before, begun = counters(pool)["uses"], time.monotonic()
        tellers = [WireClient(pool.path, READ_ONLY).welcome() for _ in range(20)]
        try:
            for teller in tellers:
                teller.socket.sendall(frame(HITS, struct.pack("<Q", inode) * 4000) * 5)
                teller.ask(RELEASE, struct.pack("<Q", 7))
            after, took_s = counters(pool)["uses"], time.monotonic() - begun
        finally:
            for teller in tellers:
                teller.close()
    # Two devices: 16 GiB a second, and of two seconds before.
    assert 0 < after - before <= (took_s + 2) * (16 << 30) / BLOCK < 400_000, (after - before, took_s)


def test_totals_that_cannot_be_are_cut(pool: Pool) -> None:
    with WireClient(pool.path).welcome() as client:
        client.send(REPORT, bytes(8 * 17))
        client.send(REPORT, struct.pack("<Q", (1 << 64) - 1) * 17)
        client.ask(RELEASE, struct.pack("<Q", 7))
        found = {name: value for name, value in counters(pool).items() if name.startswith("native_")}
    assert all(0 <= value < 1 << 50 for value in found.values()) and found["native_gets"], found


# ---- room ----


def test_room_that_clients_reserve_and_leave_counts_until_it_may_be_used_again(pool: Pool) -> None:
    """Late writes may land for 10 s where a client that is gone had places. A client that reserves and leaves,
    again and again, would keep others' stores from all segments."""
    base, got, begun = base_of(pool), [], time.monotonic()
    names = [(b"%04x" % i, BLOCK) for i in range(120)]
    for _ in range(6):
        with WireClient(pool.path).welcome() as client:
            got.append(sum(place.error == 0 for place in client.reserve(base, b"left", names)))
    # A quarter of the pool's GiB, and again after each 10 s.
    most = 256 * (1 + (time.monotonic() - begun) // 10)
    assert got[0] > 50 and sum(got) <= most, (got, most)


@pytest.fixture
def own_pool() -> Iterator[Pool]:
    """Where nothing rests."""
    with Pool(files=2, size="512M") as pool:
        yield pool


@pytest.mark.parametrize("error", [-errno.ETIMEDOUT, -errno.EIO], ids=["late", "failed"])
def test_room_that_a_client_takes_again_and_again_counts_while_it_may_write_there(own_pool: Pool, error: int) -> None:
    """Its writes failed, or are late, it says: in either case some may land. Others store meanwhile."""
    pool, base, got, begun = own_pool, base_of(own_pool), [], time.monotonic()
    names = [(b"%04x" % i, BLOCK) for i in range(120)]

    def other() -> object:
        with WireClient(pool.path).welcome() as client:
            return client.put(base, b"others", {b"%04x" % i: bytes(100_000) for i in range(50)})

    pool.path.chmod(0o711)
    (pool.mount / "others").mkdir()
    (pool.mount / "others").chmod(0o777)
    with WireClient(pool.path, timeout_ms=1000).welcome() as client:
        for _ in range(6):
            places = [place for place in client.reserve(base, b"again", names) if not place.error]
            got.append(len(places))
            answers = client.commit([(place.reservation, error) for place in places])
            assert answers == [error] * len(places)
        assert in_child(other, user=65534, group=os.getegid()) == [0] * 50
    # A quarter of the pool's GiB, and what was failed again after each 10 s.
    most = 256 * (1 + (time.monotonic() - begun) // 10)
    assert got[0] > 50 and sum(got) <= most, (got, most)
