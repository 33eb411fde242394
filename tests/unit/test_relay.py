"""The relay between a hypervisor and the daemon: what the next daemon is told, and a guest without one."""

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
from pathlib import Path

import pytest
from helpers import wait_until

from kvfs.virtiofs import relay
from kvfs.virtiofs.relay import Memory, Message, Queue, fail_requests, receive, send

SIZE = 8
MEMORY = 1 << 16
GUEST, USER = 0x1_0000_0000, 0x7F00_0000_0000
DESC, AVAIL, USED, DATA = 0, 0x1000, 0x2000, 0x3000
NEXT, WRITE, INDIRECT = 1, 2, 4
READ, FORGET = 15, 2


class GuestDouble:
    """A double of a guest's memory: one queue and what its driver writes there."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("guest")
        os.ftruncate(self.fd, MEMORY)
        self.map = mmap.mmap(self.fd, MEMORY)
        self.call, self.kick = (os.eventfd(0, os.EFD_NONBLOCK) for _ in range(2))
        self.available = 0

    def region(self) -> bytes:
        return struct.pack("<QQQQ", GUEST, MEMORY, USER, 0)

    def address(self, index: int = 0) -> bytes:
        return struct.pack("<IIQQQQ", index, 0, USER + DESC, USER + USED, USER + AVAIL, 0)

    def describe(self, index: int, address: int, size: int, flags: int = 0, following: int = 0, at: int = DESC) -> None:
        struct.pack_into("<QIHH", self.map, at + 16 * index, address, size, flags, following)

    def ask(self, head: int, opcode: int = READ, unique: int = 0, at: int = DESC, index: int | None = None) -> None:
        """A request in two descriptors: the header, and room for the answer."""
        index = head if index is None else index
        struct.pack_into("<IIQ", self.map, DATA + 256 * head, 40, opcode, unique or 100 + head)
        if opcode == FORGET:
            self.describe(index, GUEST + DATA + 256 * head, 40, at=at)
        else:
            self.describe(index, GUEST + DATA + 256 * head, 40, NEXT, index + 1, at=at)
            self.describe(index + 1, GUEST + DATA + 256 * head + 64, 128, WRITE, at=at)

    def offer(self, head: int) -> None:
        struct.pack_into("<H", self.map, AVAIL + 4 + 2 * (self.available % SIZE), head)
        self.available += 1
        struct.pack_into("<H", self.map, AVAIL + 2, self.available & 0xFFFF)

    def used(self) -> list[tuple[int, int]]:
        (index,) = struct.unpack_from("<H", self.map, USED + 2)
        return [struct.unpack_from("<II", self.map, USED + 4 + 8 * (i % SIZE)) for i in range(index)]

    def answer(self, head: int) -> tuple[int, int, int]:
        return struct.unpack_from("<IiQ", self.map, DATA + 256 * head + 64)

    def queue(self) -> Queue:
        queue = Queue(size=SIZE)
        for request, payload, fds in (
            (relay.SET_VRING_ADDR, self.address(), []),
            (relay.SET_VRING_CALL, struct.pack("<Q", 0), [self.call]),
            (relay.SET_VRING_KICK, struct.pack("<Q", 0), [self.kick]),
        ):
            queue.keep(Message(request, 1, payload, list(fds)))
        return queue

    def memory(self) -> Memory:
        memory = Memory()
        memory.add(self.region(), self.fd)
        return memory

    def close(self) -> None:
        self.map.close()
        for fd in (self.fd, self.call, self.kick):
            os.close(fd)


@pytest.fixture
def guest() -> Iterator[GuestDouble]:
    made = GuestDouble()
    yield made
    made.close()


def fail(guest: GuestDouble, inflight: mmap.mmap | None = None) -> int:
    """fail_requests, with everything closed again."""
    queue, memory = guest.queue(), guest.memory()
    try:
        return fail_requests(queue, memory, inflight, 0)
    finally:
        queue.forget(*list(queue.messages))
        memory.close()


# ---- errors for a guest ----


def test_requests_are_answered_with_eio_once(guest: GuestDouble) -> None:
    guest.ask(0, unique=7)
    guest.ask(4, FORGET)
    guest.offer(0)
    guest.offer(4)
    assert fail(guest) == 2
    assert guest.used() == [(0, 16), (4, 0)]
    assert guest.answer(0) == (16, -errno.EIO, 7)
    assert os.eventfd_read(guest.call) == 1
    assert fail(guest) == 0
    with pytest.raises(BlockingIOError):
        os.eventfd_read(guest.call)


def test_the_rings_go_round(guest: GuestDouble) -> None:
    for value in (65534, 65535, 65536, 65537):
        guest.available = value & 0xFFFF
        struct.pack_into("<H", guest.map, USED + 2, value & 0xFFFF)
        guest.ask(value % 4 * 2)
        guest.offer(value % 4 * 2)
        assert fail(guest) == 1
        assert struct.unpack_from("<H", guest.map, USED + 2)[0] == (value + 1) & 0xFFFF
        assert struct.unpack_from("<II", guest.map, USED + 4 + 8 * (value % SIZE)) == (value % 4 * 2, 16)


def test_an_indirect_request_is_answered(guest: GuestDouble) -> None:
    guest.describe(0, GUEST + 0x8000, 32, INDIRECT)
    guest.ask(3, unique=9, at=0x8000, index=0)
    guest.offer(0)
    assert fail(guest) == 1 and guest.answer(3) == (16, -errno.EIO, 9) and guest.used() == [(0, 16)]


def test_what_the_daemon_took_and_did_not_answer_is_answered_first(guest: GuestDouble) -> None:
    for head in (0, 2, 4):
        guest.ask(head)
        guest.offer(head)
    inflight = mmap.mmap(-1, 4096)
    # It took 2, then 0; its numbers say in which order.
    for head, counter in ((2, 11), (0, 12)):
        struct.pack_into("<B5xHQ", inflight, 16 + 16 * head, 1, 0, counter)
    assert fail(guest, inflight) == 3
    assert [head for head, _ in guest.used()] == [2, 0, 4]
    assert not any(inflight[16 + 16 * head] for head in range(SIZE))
    assert struct.unpack_from("<H", inflight, 14)[0] == 3
    inflight.close()


def test_an_answer_that_was_published_and_not_noted_is_not_given_twice(guest: GuestDouble) -> None:
    guest.ask(0)
    guest.offer(0)
    struct.pack_into("<II", guest.map, USED + 4, 0, 80)
    struct.pack_into("<H", guest.map, USED + 2, 1)
    inflight = mmap.mmap(-1, 4096)
    struct.pack_into("<HH", inflight, 12, 0, 0)  # the last head is 0, the used index was 0
    struct.pack_into("<B5xHQ", inflight, 16, 1, 0, 1)
    assert fail(guest, inflight) == 0 and guest.used() == [(0, 80)]
    inflight.close()


@pytest.mark.parametrize(
    "case", ["jump", "head", "address", "wrap", "table", "nested", "empty table", "table address", "avail address"]
)
def test_rings_that_cannot_be_are_given_up(guest: GuestDouble, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    guest.ask(0)
    head = 0
    if case == "head":
        head = SIZE
    elif case == "address":
        guest.describe(0, GUEST + MEMORY - 8, 40)
    elif case == "wrap":
        guest.describe(0, 0xFFFF_FFFF_FFFF_FFF8, 40)
    elif case == "table":
        guest.describe(0, GUEST + MEMORY, 32, INDIRECT)
    elif case == "nested":
        guest.describe(0, GUEST + 0x8000, 32, INDIRECT)
        guest.describe(0, GUEST + 0x8000, 32, INDIRECT, at=0x8000)
    elif case == "empty table":
        guest.describe(0, GUEST + 0x8000, 8, INDIRECT)
    elif case == "table address":
        monkeypatch.setattr(guest, "address", lambda: struct.pack("<IIQQQQ", 0, 0, 0, USER + USED, USER + AVAIL, 0))
    elif case == "avail address":
        end = USER + MEMORY - 2
        monkeypatch.setattr(guest, "address", lambda: struct.pack("<IIQQQQ", 0, 0, USER, USER + USED, end, 0))
    guest.offer(head)
    if case == "jump":
        struct.pack_into("<H", guest.map, AVAIL + 2, SIZE + 1)
    with pytest.raises(relay.GuestError):
        fail(guest)
    assert guest.used() == []


def test_a_chain_without_an_end_ends(guest: GuestDouble) -> None:
    guest.ask(0)
    guest.describe(1, GUEST + DATA, 8, NEXT, 1)
    guest.offer(0)
    assert fail(guest) == 1 and guest.used() == [(0, 0)]


# ---- one daemon after another ----


class DaemonDouble:
    """A double of the daemon's end: answers what has an answer, and remembers what it was told."""

    def __init__(self, path: Path) -> None:
        self.told: list[tuple[int, bytes, int]] = []
        self.connection: socket.socket | None = None
        self.listener = socket.socket(socket.AF_UNIX)
        path.unlink(missing_ok=True)
        self.listener.bind(str(path))
        self.listener.listen()
        self.thread = threading.Thread(target=self.serve, daemon=True)
        self.thread.start()

    def serve(self) -> None:
        try:
            self.connection, _ = self.listener.accept()
            while True:
                message = receive(self.connection)
                self.told.append((message.request, message.payload, len(message.fds)))
                message.close()
                if message.request == relay.GET_INFLIGHT_FD:
                    fd = os.memfd_create("inflight")
                    os.ftruncate(fd, 1 << 16)
                    payload = struct.pack("<QQHH", 1 << 16, 0, 2, 1024)
                    send(self.connection, message.request, 5, payload, [fd])
                    os.close(fd)
                elif message.request == relay.GET_QUEUE_NUM:
                    send(self.connection, message.request, 5, struct.pack("<Q", 2))
                elif message.request in relay._ANSWERED or message.flags & 8:
                    send(self.connection, message.request, 5, bytes(8))
        except (relay.RelayError, OSError):
            return

    def end(self) -> None:
        self.listener.close()
        if self.connection is not None:
            self.connection.shutdown(socket.SHUT_RDWR)
            self.connection.close()
        self.thread.join(10)


class FrontEnd:
    """A double of QEMU's end."""

    def __init__(self, front: socket.socket, guest: GuestDouble, served_by: relay.Relay) -> None:
        self.socket, self.guest, self.served_by = front, guest, served_by
        self.socket.settimeout(10)

    def say(self, request: int, payload: bytes = b"", fds: tuple[int, ...] = (), *, ack: bool = False) -> bytes:
        send(self.socket, request, 9 if ack else 1, payload, fds)
        if not ack and request not in relay._ANSWERED:
            return b""
        answer = receive(self.socket)
        assert answer.request == request and answer.flags == 5
        return answer.payload

    def set_up(self) -> None:
        guest = self.guest
        for request in (relay.GET_FEATURES, relay.GET_PROTOCOL_FEATURES):
            self.say(request)
        self.say(relay.SET_PROTOCOL_FEATURES, struct.pack("<Q", 1 << 3 | 1))
        assert self.say(relay.GET_QUEUE_NUM) == struct.pack("<Q", 2)
        self.say(relay.SET_OWNER)
        self.say(relay.SET_FEATURES, struct.pack("<Q", 1 << 32))
        assert self.say(relay.ADD_MEM_REG, bytes(8) + guest.region(), (guest.fd,), ack=True) == bytes(8)
        self.say(relay.SET_VRING_NUM, struct.pack("<II", 0, SIZE))
        self.say(relay.SET_VRING_BASE, struct.pack("<II", 0, 0))
        self.say(relay.SET_VRING_ADDR, guest.address())
        self.say(relay.SET_VRING_KICK, struct.pack("<Q", 0), (guest.kick,))
        self.say(relay.SET_VRING_CALL, struct.pack("<Q", 0), (guest.call,))
        self.say(relay.SET_VRING_ENABLE, struct.pack("<II", 0, 1), ack=True)


@pytest.fixture
def front_end(tmp_path: Path, guest: GuestDouble) -> Iterator[FrontEnd]:
    """Behind a relay; there is no daemon yet."""
    ours, theirs = socket.socketpair()
    served_by = relay.Relay(theirs, tmp_path / "export.sock", 30)
    thread = threading.Thread(target=served_by.run, daemon=True)
    thread.start()
    with ours:
        yield FrontEnd(ours, guest, served_by)
    thread.join(10)
    theirs.close()
    assert not thread.is_alive()


def wait_for(condition: object, what: str) -> None:
    assert callable(condition)
    wait_until(condition, what, timeout_s=10)


def test_the_next_daemon_is_told_what_the_first_was(front_end: FrontEnd, tmp_path: Path, guest: GuestDouble) -> None:
    first = DaemonDouble(tmp_path / "export.sock")
    front_end.set_up()
    assert (relay.GET_INFLIGHT_FD, struct.pack("<QQHH", 0, 0, 2, 1024), 0) in first.told
    first.end()
    with pytest.raises(BlockingIOError):
        os.eventfd_read(guest.kick)
    second = DaemonDouble(tmp_path / "export.sock")
    assert select.select([guest.kick], [], [], 10)[0], "the queue is looked at again"
    assert [request for request, _, _ in second.told] == [
        relay.SET_PROTOCOL_FEATURES, relay.SET_OWNER, relay.SET_FEATURES, relay.ADD_MEM_REG,
        relay.SET_INFLIGHT_FD, relay.SET_VRING_NUM, relay.SET_VRING_BASE, relay.SET_VRING_ADDR,
        relay.SET_VRING_CALL, relay.SET_VRING_KICK, relay.SET_VRING_ENABLE, relay.GET_FEATURES,
    ]  # fmt: skip
    told = {request: (payload, fds) for request, payload, fds in second.told}
    assert told[relay.ADD_MEM_REG] == (bytes(8) + guest.region(), 1)
    assert told[relay.SET_INFLIGHT_FD] == (struct.pack("<QQHH", 1 << 16, 0, 2, 1024), 1)
    assert told[relay.SET_VRING_ADDR] == (guest.address(), 0) and told[relay.SET_VRING_KICK][1] == 1
    # And what is stopped by then is not started again.
    assert front_end.say(relay.GET_VRING_BASE, struct.pack("<II", 0, 0)) == bytes(8)
    second.end()
    third = DaemonDouble(tmp_path / "export.sock")
    wait_for(lambda: third.told and third.told[-1][0] == relay.GET_FEATURES, "the third daemon is told")
    assert relay.SET_VRING_KICK not in [request for request, _, _ in third.told]
    third.end()


def test_without_a_daemon_a_guest_gets_errors_and_its_front_end_answers(
    front_end: FrontEnd, tmp_path: Path, guest: GuestDouble
) -> None:
    first = DaemonDouble(tmp_path / "export.sock")
    front_end.set_up()
    guest.ask(0, unique=5)
    guest.offer(0)
    front_end.served_by._timeout_s = 0.5
    began = time.monotonic()
    first.end()
    assert select.select([guest.call], [], [], 10)[0], "the guest is signalled"
    assert time.monotonic() - began > 0.3, "a daemon that comes back soon is waited for"
    assert guest.used() == [(0, 16)] and guest.answer(0) == (16, -errno.EIO, 5)
    guest.ask(2, unique=6)
    guest.offer(2)
    wait_for(lambda: len(guest.used()) == 2, "later requests fail too")
    assert front_end.say(relay.SET_VRING_ENABLE, struct.pack("<II", 0, 0), ack=True) == bytes(8)
    guest.ask(4)
    guest.offer(4)
    # A queue that its front end stops owes nothing.
    assert front_end.say(relay.GET_VRING_BASE, struct.pack("<II", 0, 0)) == struct.pack("<II", 0, 3)
    assert front_end.say(relay.GET_QUEUE_NUM) == struct.pack("<Q", 2)


def test_a_front_end_that_finds_no_daemon_is_hung_up_on(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(relay.RelayError, match=r"export\.sock: nobody listens there"):
        relay.Relay(theirs, tmp_path / "export.sock", 0.3).run()


@pytest.mark.parametrize(
    "data", [b"\x01\0\0\0", struct.pack("<III", 1, 1, 1 << 20), struct.pack("<III", 1, 1, 8) + b"half"]
)
def test_a_message_that_is_none_ends_the_conversation(data: bytes) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(data)
        ours.shutdown(socket.SHUT_WR)
        theirs.settimeout(5)
        with pytest.raises(relay.RelayError):
            receive(theirs)
