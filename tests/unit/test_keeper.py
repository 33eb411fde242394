"""The keeper between a monitor and the daemon. Both are doubles here: one says what QEMU says, one notes what it is
told."""

from __future__ import annotations

import errno
import mmap
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvfs.frontend.keeper import GoneError, Keeper, Message, Request, listen, receive, send

SIZE = 8
GUEST, USER = 0x10000, 0x7F0000000000
MEMORY = 1 << 16
DESC, AVAIL, USED, IN, OUT = 0, 0x1000, 0x2000, 0x3000, 0x4000


class BackEndDouble:
    """Answers what must be answered, notes the rest, for one connection; close() is its death."""

    def __init__(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        self.seen: list[int] = []
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(1)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        connection, _ = self._listener.accept()
        self._connection = connection
        answers = {Request.GET_FEATURES: 1 << 30, Request.GET_PROTOCOL_FEATURES: 0x9209, Request.GET_QUEUE_NUM: 2}
        try:
            while True:
                message = receive(connection)
                self.seen.append(message.request)
                if message.request == Request.GET_INFLIGHT_FD:
                    fd = os.memfd_create("inflight")
                    size = 2 * (16 + 1024 * 16 + 63) // 64 * 64 + 64
                    os.ftruncate(fd, size)
                    payload = struct.pack("=QQHH", size, 0, 2, 1024)
                    send(connection, Message(message.request, 5, payload, [fd]))
                elif message.needs_answer():
                    send(
                        connection,
                        Message(message.request, 5, answers.get(Request(message.request), 0).to_bytes(8, "little")),
                    )
                message.close()
        except GoneError:
            pass

    def close(self) -> None:
        self._listener.close()
        self._connection.shutdown(socket.SHUT_RDWR)
        self._thread.join(10)
        self._connection.close()


@pytest.fixture
def paths(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    front, back = tmp_path / "front", tmp_path / "back"
    listener = listen(front)
    thread = threading.Thread(target=Keeper(listener, back, patience_s=0.5).run, daemon=True)
    thread.start()
    yield front, back
    listener.shutdown(socket.SHUT_RDWR)
    thread.join(10)
    listener.close()
    assert not thread.is_alive()


def _tell(front: socket.socket, request: Request, payload: bytes = b"", fds: list[int] | None = None) -> int:
    send(front, Message(request, 9 if request != Request.SET_PROTOCOL_FEATURES else 1, payload, fds or []))
    return receive(front).number() if request != Request.SET_PROTOCOL_FEATURES else 0


def _start(front: socket.socket, memory: int, kick: int, call: int) -> None:
    assert _tell(front, Request.GET_PROTOCOL_FEATURES) == 0x8209, "in-flight tracking is not the front end's"
    _tell(front, Request.SET_PROTOCOL_FEATURES, (0x8009).to_bytes(8, "little"))
    assert _tell(front, Request.SET_FEATURES, (1 << 32).to_bytes(8, "little")) == 0
    assert _tell(front, Request.ADD_MEM_REG, struct.pack("=QQQQQ", 0, GUEST, MEMORY, USER, 0), [memory]) == 0
    assert _tell(front, Request.SET_VRING_NUM, struct.pack("=II", 1, SIZE)) == 0
    addresses = struct.pack("=IIQQQQ", 1, 0, USER + DESC, USER + USED, USER + AVAIL, 0)
    assert _tell(front, Request.SET_VRING_ADDR, addresses) == 0
    assert _tell(front, Request.SET_VRING_CALL, struct.pack("=Q", 1), [call]) == 0
    assert _tell(front, Request.SET_VRING_KICK, struct.pack("=Q", 1), [kick]) == 0


def test_a_guest_outlives_daemons_and_gets_errors_without_one(paths: tuple[Path, Path]) -> None:
    first = BackEndDouble(paths[1])
    front = socket.socket(socket.AF_UNIX)
    front.settimeout(20)
    front.connect(str(paths[0]))
    memory, kick, call = os.memfd_create("guest"), os.eventfd(0), os.eventfd(0, os.EFD_NONBLOCK)
    os.ftruncate(memory, MEMORY)
    _start(front, memory, kick, call)
    assert first.seen.index(Request.SET_INFLIGHT_FD) < first.seen.index(Request.SET_VRING_NUM)
    first.close()
    # A request without a daemon: an error, once the patience is over.
    with mmap.mmap(memory, MEMORY) as guest:
        struct.pack_into("=IIQ", guest, IN, 40, 3, 0x1234)
        struct.pack_into("=QIHH", guest, DESC, GUEST + IN, 40, 1, 1)
        struct.pack_into("=QIHH", guest, DESC + 16, GUEST + OUT, 64, 2, 0)
        struct.pack_into("=HHH", guest, AVAIL, 0, 1, 0)
        until = time.monotonic() + 20
        while struct.unpack_from("=H", guest, USED + 2)[0] == 0 and time.monotonic() < until:
            time.sleep(0.01)
        assert struct.unpack_from("=HHII", guest, USED) == (0, 1, 0, 16)
        assert struct.unpack_from("=IiQ", guest, OUT) == (16, -errno.EIO, 0x1234)
    assert os.read(call, 8) != b""
    # The next daemon is told all that the first one was, before any kick.
    second = BackEndDouble(paths[1])
    until = time.monotonic() + 20
    while Request.SET_VRING_KICK not in second.seen and time.monotonic() < until:
        time.sleep(0.01)
    wanted = [
        Request.SET_PROTOCOL_FEATURES, Request.SET_FEATURES, Request.ADD_MEM_REG, Request.SET_INFLIGHT_FD,
        Request.SET_VRING_NUM, Request.SET_VRING_ADDR, Request.SET_VRING_CALL, Request.SET_VRING_KICK,
    ]  # fmt: skip
    assert [request for request in second.seen if request != Request.GET_FEATURES] == wanted
    assert _tell(front, Request.GET_QUEUE_NUM) == 2
    front.close()
    second.close()
    for fd in (memory, kick, call):
        os.close(fd)
