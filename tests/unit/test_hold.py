"""The words between a holder and daemons, and what a holder refuses."""

from __future__ import annotations

import fcntl
import json
import os
import pathlib
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from typing import cast

import pytest
import trio
import trio.testing

from kvfs import journal
from kvfs.daemon.holding import _MEMORIES, SETTLE_TURNS, Holding, _check_known, known_versions
from kvfs.errors import KvfsError
from kvfs.held import check_journal, check_opens, check_state, check_written, opens_make, written_make
from kvfs.hold import claim as claims
from kvfs.hold import holder as holders
from kvfs.hold import words
from kvfs.hold.claim import Left
from kvfs.hold.holder import Held, Holder
from kvfs.hold.words import FUSE, JOURNAL, OPENS, WRITTEN, HoldError, receive, roles_of, send
from kvfs.names import Names

# struct kvfs_held: version, minor, flags, max_read, max_write, reserved.
STATE = struct.pack("=IIQII40x", 1, 45, 0, 1 << 20, 1 << 20)


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        ours.settimeout(5)
        theirs.settimeout(5)
        yield ours, theirs


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"{", "no JSON"),
        (b"\xff\xfe", "no JSON"),
        (b"[" * 9000, "no JSON"),
        (b"[1]", "no JSON object"),
        (b"{}", "protocol version None; this end speaks 1 to 2"),
        (b'{"v": 3}', "protocol version 3"),
        (b'{"v": "\\u001b"}', "version '.*x1b'"),
        (b'{"v": 1, "a": "' + b"x" * words.SIZE_MAX + b'"}', f"more than {words.SIZE_MAX} bytes"),
    ],
)
def test_a_packet_that_is_none_is_refused(ends: tuple[socket.socket, socket.socket], data: bytes, why: str) -> None:
    ends[0].send(data)
    with pytest.raises(HoldError, match=why):
        receive(ends[1])


def test_too_many_descriptors_are_refused_and_closed(ends: tuple[socket.socket, socket.socket]) -> None:
    before = len(os.listdir("/proc/self/fd"))
    socket.send_fds(ends[0], [b'{"v": 1}'], [0] * (words.FDS_MAX + 1))
    with pytest.raises(HoldError, match=f"{words.FDS_MAX} descriptors"):
        receive(ends[1])
    assert len(os.listdir("/proc/self/fd")) == before
    with pytest.raises(HoldError, match="33 descriptors"):
        send(ends[0], {}, [0] * (words.FDS_MAX + 1))


def test_descriptors_come_with_their_words_and_the_end_is_none(ends: tuple[socket.socket, socket.socket]) -> None:
    with open(os.devnull, "rb") as file:
        send(ends[0], {"op": "x"}, [file.fileno()])
        packet = receive(ends[1])
        assert packet is not None
        found, fds = packet
        assert found == {"v": words.VERSION, "op": "x"}
        assert os.fstat(fds[0]).st_rdev == os.fstat(file.fileno()).st_rdev
        words.close_all(fds)
    ends[0].close()
    assert receive(ends[1]) is None


@pytest.fixture
def kinds() -> Iterator[dict[str, int]]:
    """A descriptor of each kind. Memory stands for both lists."""
    try:
        fuse = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        pytest.skip(f"needs /dev/fuse: {error}")
    memory, null = os.memfd_create("test"), os.open(os.devnull, os.O_RDWR)
    yield {"fuse": fuse, "memory": memory, "null": null}
    words.close_all([fuse, memory, null])


@pytest.mark.parametrize(
    ("roles", "names", "why"),
    [
        ([FUSE, WRITTEN], ["fuse"], "for each of 1 descriptors"),
        ([FUSE, "Magic"], ["fuse", "memory"], "one of fuse, written, journal|a word of 1 to 32 letters"),
        ([FUSE, "a" * 33], ["fuse", "memory"], "one of fuse, written, journal|a word of 1 to 32 letters"),
        ("fuse", ["fuse"], "roles"),
        (None, ["fuse"], "roles"),
        ([FUSE, {}], ["fuse", "memory"], "roles"),
        ([FUSE], ["fuse"], "one list of written inodes"),
        ([WRITTEN], ["memory"], "a mount has /dev/fuse"),
        ([FUSE, WRITTEN, JOURNAL, JOURNAL], ["fuse", "memory", "memory", "memory"], "at most one memory"),
        ([FUSE, WRITTEN, WRITTEN], ["fuse", "memory", "memory"], "at most one memory"),
        ([FUSE, WRITTEN], ["null", "memory"], "no /dev/fuse .*device 1:3"),
        ([FUSE, WRITTEN], ["memory", "memory"], "no /dev/fuse"),
        ([FUSE, WRITTEN], ["fuse", "fuse"], "no written .*device 10:229"),
        ([FUSE, WRITTEN], ["fuse", "null"], "no written"),
    ],
)
@pytest.mark.parametrize("version", [1, 2])
def test_descriptors_of_other_kinds_are_refused(
    kinds: dict[str, int], roles: object, names: list[str], why: str, version: int
) -> None:
    with pytest.raises(HoldError, match=why):
        roles_of({"v": version, "roles": roles}, [kinds[name] for name in names])
    assert roles_of({"v": version, "roles": [FUSE, WRITTEN]}, [kinds["fuse"], kinds["memory"]]) == [FUSE, WRITTEN]
    assert roles_of({"v": version, "roles": []}, []) == []


def test_memory_of_another_role_is_kept_from_version_2_on(kinds: dict[str, int]) -> None:
    fds = [kinds[name] for name in ("fuse", "memory", "memory")]
    assert roles_of({"v": 2, "roles": [FUSE, WRITTEN, "magic"]}, fds) == [FUSE, WRITTEN, "magic"]
    with pytest.raises(HoldError, match="one of fuse, written, journal is expected"):
        roles_of({"v": 1, "roles": [FUSE, WRITTEN, "magic"]}, fds)
    with pytest.raises(HoldError, match=r"no magic .*device 1:3"):
        roles_of({"v": 2, "roles": [FUSE, WRITTEN, "magic"]}, [*fds[:2], kinds["null"]])


def test_descriptors_of_two_connections_are_refused(kinds: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    second = os.dup(kinds["fuse"])
    monkeypatch.setattr(words, "connection_of", lambda fd: "40" if fd == second else "39")
    with pytest.raises(HoldError, match=r"2 FUSE connections: .*39.*40"):
        roles_of({"v": 2, "roles": [FUSE, FUSE, WRITTEN]}, [kinds["fuse"], second, kinds["memory"]])
    os.close(second)


# ---- the holder ----


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Played:
    """A holder that takes its turns when it is asked something."""

    def __init__(self, path: pathlib.Path) -> None:
        self.clock, self.path = Clock(), path
        self.listener = holders.listen(path)
        self.holder = Holder(self.listener, 60.0, self.clock)
        self.peers: list[socket.socket] = []

    def connect(self) -> socket.socket:
        peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        peer.settimeout(5)
        peer.connect(os.fspath(self.path))
        self.peers.append(peer)
        self.holder.turn(0)
        return peer

    def ask(
        self, peer: socket.socket, fds: tuple[int, ...] = (), version: int = words.VERSION, **question: object
    ) -> tuple[dict[str, object], int]:
        send(peer, question, fds, version)
        self.holder.turn(0)
        packet = receive(peer)
        assert packet is not None
        words.close_all(packet[1])
        return packet[0], len(packet[1])

    def close(self) -> None:
        for peer in self.peers:
            peer.close()
        self.holder.close()
        self.listener.close()


@pytest.fixture
def played(tmp_path: pathlib.Path) -> Iterator[Played]:
    made = Played(tmp_path / "hold.sock")
    yield made
    made.close()


P = {"pool": "/p", "mountpoint": "/m"}


def test_a_mount_goes_from_a_daemon_that_ended_to_the_next(
    played: Played, kinds: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Held, "is_alive", lambda self: True)
    first, fds = played.connect(), (kinds["fuse"], kinds["memory"])
    assert played.ask(first, op="claim", **P) == ({"v": 2, "roles": [], "idle_ms": 0}, 0)
    assert played.ask(first, fds, op="put", state="0102", roles=[FUSE, WRITTEN]) == ({"v": 2}, 0)
    second = played.connect()
    answer, _ = played.ask(second, op="claim", **P)
    assert answer == {
        "v": 2,
        "error": f"process {os.getpid()} serves /m of pool /p: it must end first",
        "pid": os.getpid(),
    }
    (owner,) = [each for each in played.holder._connections.values() if each.claims]
    owner.pid = 0  # so says the kernel of a process in another container
    answer, _ = played.ask(second, op="claim", **P)
    assert answer["error"] == "a process in another pid namespace serves /m of pool /p: it must end first"
    owner.pid = os.getpid()
    listed, _ = played.ask(second, op="list")
    assert listed["mounts"] == [{**P, "descriptors": 2, "pid": os.getpid()}]
    first.close()
    played.holder.turn(0)
    played.clock.now += 1.5
    answer, count = played.ask(second, op="claim", **P)
    assert (answer["state"], answer["roles"], answer["idle_ms"], count) == ("0102", [FUSE, WRITTEN], 1500, 2)
    assert answer["takeovers"] == 1
    # A daemon that puts its own, as one that found no journal does, begins no other count.
    played.ask(second, fds, op="put", state="03", roles=[FUSE, WRITTEN])
    second.close()
    played.holder.turn(0)
    assert played.ask(played.connect(), op="claim", **P)[0]["takeovers"] == 2
    assert not played.holder._is_done()


def test_a_mount_that_is_gone_or_that_nobody_serves_is_let_go(
    played: Played, kinds: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    alive = True
    monkeypatch.setattr(Held, "is_alive", lambda self: alive)
    fds = (kinds["fuse"], kinds["memory"])
    for waits in (True, False):
        peer = played.connect()
        assert played.ask(peer, op="claim", **P)[0]["roles"] == []
        played.ask(peer, fds, op="put", state="00", roles=[FUSE, WRITTEN])
        if waits:
            peer.close()
            played.holder.turn(0)
            played.clock.now += 59
            played.holder.turn(0)
            assert not played.holder._is_done()
            played.clock.now += 2
        else:
            alive = False
            peer.close()
        played.holder.turn(0)
        assert played.holder._is_done()


@pytest.mark.parametrize(
    ("question", "why"),
    [
        ({"op": "put", "state": "00", "roles": []}, "not known, or comes at the wrong time"),
        ({"op": "claim", "pool": "", "mountpoint": "/m"}, "pool: a text of 1 to 4096"),
        ({"op": "claim", "pool": "/p"}, "mountpoint: a text"),
        ({"op": "claim", "pool": 7, "mountpoint": "/m"}, "pool: a text"),
        ({"op": "steal"}, "'steal' is not known"),
        ({}, "None is not known"),
    ],
)
def test_a_question_that_makes_no_sense_ends_the_connection(
    played: Played, question: dict[str, object], why: str
) -> None:
    peer = played.connect()
    answer, _ = played.ask(peer, **question)
    assert why in str(answer["error"])
    assert receive(peer) is None


def test_a_put_that_makes_no_sense_leaves_what_was_there(
    played: Played, kinds: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Held, "is_alive", lambda self: True)
    peer = played.connect()
    played.ask(peer, op="claim", **P)
    played.ask(peer, (kinds["fuse"], kinds["memory"]), op="put", state="07", roles=[FUSE, WRITTEN])
    answer, _ = played.ask(peer, (kinds["null"], kinds["memory"]), op="put", state="08", roles=[FUSE, WRITTEN])
    assert "no /dev/fuse" in str(answer["error"])
    answer, count = played.ask(played.connect(), op="claim", **P)
    assert (answer["state"], count) == ("07", 2)


def test_a_daemon_speaks_the_version_of_an_older_holder(played: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "VERSION", 3)
    done = threading.Event()

    def turn() -> None:
        while not done.is_set():
            played.holder.turn(0.05)

    thread = threading.Thread(target=turn)
    thread.start()
    try:
        claimed = claims.claim(played.path, "/p", "/m", lambda _: False)
        assert (claimed.version, claimed.left) == (2, None)
        claimed.close()
    finally:
        done.set()
        thread.join()


def test_a_holder_answers_an_older_daemon_in_its_version(played: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(words, "VERSION", 3)
    for version in (1, 2, 3):
        assert played.ask(played.connect(), version=version, op="list")[0] == {"v": version, "mounts": []}


def test_memory_that_a_version_has_no_word_for_is_not_told_of_in_it(
    played: Played, kinds: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later build's daemon is followed by an older one, and that by the later one again."""
    monkeypatch.setattr(Held, "is_alive", lambda self: True)
    fds = (kinds["fuse"], kinds["memory"], kinds["memory"])
    later = played.connect()
    played.ask(later, op="claim", **P)
    assert played.ask(later, fds, op="put", state="01", roles=[FUSE, WRITTEN, "magic"]) == ({"v": 2}, 0)
    later.close()
    played.holder.turn(0)
    older = played.connect()
    answer, count = played.ask(older, version=1, op="claim", **P)
    assert (answer["roles"], count) == ([FUSE, WRITTEN], 2)
    played.ask(older, fds[:2], version=1, op="put", state="01", roles=[FUSE, WRITTEN])
    older.close()
    played.holder.turn(0)
    answer, count = played.ask(played.connect(), op="claim", **P)
    assert (answer["roles"], count) == ([FUSE, WRITTEN], 2)


def test_memory_of_a_role_that_this_build_does_not_know_is_let_go(
    kinds: dict[str, int], caplog: pytest.LogCaptureFixture
) -> None:
    before = len(os.listdir("/proc/self/fd"))
    fds = [os.dup(kinds[name]) for name in ("fuse", "memory", "memory")]
    left = claims.left_of({"v": 2, "roles": [FUSE, WRITTEN, "magic"], "state": "01"}, fds)
    assert left is not None and left.memories == {WRITTEN: fds[1]} and left.fuse == fds[:1]
    assert "another build has left memory 'magic', which this one does not know: it is let go" in caplog.text
    left.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_an_older_holder_is_given_what_it_knows(kinds: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[object, list[int]]] = []
    monkeypatch.setattr(claims, "_ask", lambda path, sock, said, version, fds=(): asked.append((said["roles"], fds)))
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    memories = {WRITTEN: kinds["memory"], "magic": kinds["null"]}
    for version in (1, 2):
        claims.SocketClaim(pathlib.Path("/s"), ends[0], None, version).put(b"\x01", [kinds["fuse"]], memories)
    for end in ends:
        end.close()
    assert asked == [
        ([FUSE, WRITTEN], [kinds["fuse"], kinds["memory"]]),
        ([FUSE, WRITTEN, "magic"], [kinds["fuse"], kinds["memory"], kinds["null"]]),
    ]


@pytest.mark.parametrize(("oldest", "newest", "asked", "answered"), [(2, 3, 1, 2), (1, 2, 7, 2), (1, 2, 0, 1)])
def test_a_holder_that_does_not_know_a_version_names_both(
    played: Played, monkeypatch: pytest.MonkeyPatch, oldest: int, newest: int, asked: int, answered: int
) -> None:
    monkeypatch.setattr(words, "OLDEST", oldest)
    monkeypatch.setattr(words, "VERSION", newest)
    peer = played.connect()
    send(peer, {"op": "list"}, version=asked)
    played.holder.turn(0)
    why = f"protocol version {asked}; this end speaks {oldest} to {newest}"
    assert receive(peer) == ({"v": answered, "error": why}, [])
    assert receive(peer) is None


def test_what_another_build_left_is_refused_by_its_name_and_both_versions() -> None:
    memories = {WRITTEN: written_make(), JOURNAL: journal.make(), OPENS: opens_make()}
    _check_known("/m", Left(STATE, [-1], memories, None, 7))
    _check_known("/m", Left(STATE, [-1], {WRITTEN: memories[WRITTEN]}, None, 7))
    for number in (0, 9, 2**32 - 1):
        why = f"/m: .* an answer to INIT of version {number}, and this build knows version 1: start the build that left"
        with pytest.raises(KvfsError, match=why):
            _check_known("/m", Left(struct.pack("=I", number) + STATE[4:], [-1], memories, None, 7))
        for role, what in (
            (WRITTEN, "a list of written inodes"),
            (JOURNAL, "a journal of names"),
            (OPENS, "a list of open handles"),
        ):
            former = os.pread(memories[role], 4, 8)
            os.pwrite(memories[role], struct.pack("=I", number), 8)
            why = f"/m: .* {what} of version {number}, and this build knows version 1: start the build that left it; "
            with pytest.raises(KvfsError, match=why + "or end the mount with kvfs umount, and mount anew"):
                _check_known("/m", Left(STATE, [-1], memories, None, 7))
            os.pwrite(memories[role], former, 8)
    words.close_all(list(memories.values()))


@pytest.mark.parametrize(
    ("state", "descriptors", "why"),
    [
        (b"", 1, "of version 0, and"),
        (STATE[:3], 1, "that is none: its size"),
        (STATE[:4], 1, "that is none: its size"),
        (STATE[:-1], 1, "that is none: its size"),
        (STATE + b"\0", 1, "that is none: its size"),
        (STATE * 100, 1, "that is none: its size"),
        (STATE, 0, "with numbers that cannot be"),
        (STATE, 9, "with numbers that cannot be"),
        (STATE[:4] + bytes(4) + STATE[8:], 1, "with numbers that cannot be"),
        (
            STATE[:8] + b"\xff" * 8 + STATE[16:],
            1,
            "with flags that this build does not know: start the build that left",
        ),
        (STATE[:-1] + b"\1", 1, "with numbers that cannot be"),
    ],
)
def test_a_state_that_cannot_be_served_is_refused_before_anything_is_changed(
    state: bytes, descriptors: int, why: str
) -> None:
    with pytest.raises(KvfsError, match=f"^an answer to INIT {why}"):
        check_state(state, descriptors)


def _memory(data: bytes, size: int, seals: int = fcntl.F_SEAL_SHRINK) -> int:
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.truncate(fd, size)
    os.pwrite(fd, data, 0)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


@pytest.mark.parametrize(
    ("make", "check", "what"),
    [
        (written_make, check_written, "a list of written inodes"),
        (journal.make, check_journal, "a journal of names"),
        (opens_make, check_opens, "a list of open handles"),
    ],
)
def test_memory_that_is_none_is_refused_before_anything_is_changed(
    make: Callable[[], int], check: Callable[[int], int], what: str
) -> None:
    fd = make()
    size, head = os.fstat(fd).st_size, os.pread(fd, 4096, 0)
    assert check(fd) == 1
    os.close(fd)
    wrong = {
        "empty": _memory(b"", 0), "not sealed": _memory(head, size, 0), "cut off": _memory(head, 4096),
        "too long": _memory(head, size + 4096), "no page": _memory(head[:12], 12), "zeros": _memory(b"", size),
        "another thing": _memory(b"x" + head[1:], size), "too short": _memory(head, size - 4096),
    }  # fmt: skip
    for name, fd in wrong.items():
        with pytest.raises(KvfsError, match=f"^{what} that is none: its size or its first bytes"):
            pytest.fail(f"{name}: {check(fd)}")
        os.close(fd)
    with pytest.raises(KvfsError, match=f"^{what} "):
        check(-1)


def test_a_build_says_which_versions_it_takes_over() -> None:
    assert known_versions() == dict.fromkeys(("state", *_MEMORIES), (1, 1))


def test_requests_of_earlier_daemons_are_let_go_of() -> None:
    told: list[float] = []

    class Journal:
        def journal_settled(self) -> None:
            told.append(trio.current_time())

    async def settle() -> float:
        began = trio.current_time()
        await Holding.settle(object.__new__(Holding), cast("Names", Journal()))
        return told[0] - began

    assert trio.run(settle, clock=trio.testing.MockClock(autojump_threshold=0)) == SETTLE_TURNS


def test_one_who_says_nothing_is_hung_up_on(played: Played) -> None:
    peer = played.connect()
    played.clock.now += holders.SILENT_S + 1
    played.holder.turn(0)
    assert receive(peer) is None


def test_strangers_are_refused(played: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holders, "peer", lambda _: (7, 12345))
    assert receive(played.connect()) is None


def test_a_socket_that_a_stranger_listens_on_is_refused(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(os.fspath(path))
        listener.listen()
        monkeypatch.setattr(claims, "peer", lambda _: (7, 12345))
        with pytest.raises(
            HoldError, match=f"process 7 of user 12345 listens there: a holder of root or user {os.geteuid()}"
        ):
            claims.connect(path)


def test_a_socket_has_one_holder_and_is_its_users_alone(tmp_path: pathlib.Path) -> None:
    path, file = tmp_path / "a.sock", tmp_path / "file"
    file.write_text("")
    with holders.listen(path):
        assert path.stat().st_mode & 0o777 == 0o600
        with pytest.raises(HoldError, match="another process listens there"):
            holders.listen(path)
    with holders.listen(path):  # one that ended without a word
        pass
    with pytest.raises(HoldError, match="a file that is no socket is there"):
        holders.listen(file)
    assert file.exists()
    with pytest.raises(HoldError, match="No such file"):
        holders.listen(tmp_path / "none" / "a.sock")


def test_an_answer_with_other_descriptors_is_refused(kinds: dict[str, int]) -> None:
    found = json.loads(json.dumps({"v": 2, "roles": [FUSE, WRITTEN], "state": "00"}))
    with pytest.raises(HoldError, match="--hold /s: a descriptor that is no /dev/fuse"):
        claims._left(pathlib.Path("/s"), found, [os.dup(kinds["null"]), os.dup(kinds["memory"])])
    with pytest.raises(HoldError, match="--hold /s: state: a text"):
        claims._left(
            pathlib.Path("/s"), {"v": 2, "roles": [FUSE, WRITTEN]}, [os.dup(kinds["fuse"]), os.dup(kinds["memory"])]
        )
