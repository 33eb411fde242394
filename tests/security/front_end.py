"""A double of a vhost-user front end and of the guest behind it, in Python: does what it is told, right or wrong.

Memory in a memfd, one ring for requests, FUSE requests in it. Sources: QEMU's docs/interop/vhost-user.rst; virtio 1.1,
2.6 (split rings); linux/fuse.h.
"""

from __future__ import annotations

import array
import contextlib
import mmap
import os
import pathlib
import socket
import struct
import time
from collections.abc import Sequence
from typing import Self

GET_FEATURES, SET_FEATURES, SET_OWNER = 1, 2, 3
SET_MEM_TABLE = 5
SET_VRING_NUM, SET_VRING_ADDR, SET_VRING_BASE = 8, 9, 10
SET_VRING_KICK, SET_VRING_CALL, SET_VRING_ERR = 12, 13, 14
GET_PROTOCOL_FEATURES, SET_PROTOCOL_FEATURES = 15, 16
SET_VRING_ENABLE = 18
SET_INFLIGHT_FD = 32
ADD_MEM_REG = 37

LOOKUP, MKDIR, OPENDIR, READDIR, CREATE, INIT, GETATTR, WRITE = 1, 9, 27, 28, 35, 26, 3, 16

_VERSION_1, _NEED_REPLY = 1, 8
MEMORY = 4 << 20
_GUEST, _USER = 0x40000000, 0x7F1200000000
_QUEUE = 1  # the request queue; 0 is the one of high priority
_SIZE = 16
_AVAIL, _USED, _REQUEST, _REPLY = 0x1000, 0x2000, 0x10000, 0x100000
ROOM = 0x20000


def send(connection: socket.socket, request: int, payload: bytes, fds: Sequence[int], flags: int = 0) -> None:
    """One message of vhost-user."""
    header = struct.pack("<III", request, _VERSION_1 | flags, len(payload))
    control = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    sent = connection.sendmsg([header, payload], control)
    assert sent == len(header) + len(payload)


class Guest:
    """Connected, its queue set up and its FUSE session begun, unless `bare`."""

    def __init__(self, path: pathlib.Path, *, bare: bool = False, timeout_s: float = 60) -> None:
        self._timeout_s = timeout_s
        supported = self._connect(path)
        self.memory_fd = os.memfd_create("guest", os.MFD_CLOEXEC)
        os.ftruncate(self.memory_fd, MEMORY)
        self.memory = mmap.mmap(self.memory_fd, MEMORY)
        self.kick = os.eventfd(0, os.EFD_CLOEXEC)
        self.call = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._unique = 0
        self._next = 0
        features = supported & ~(1 << 29)  # no EVENT_IDX
        self.tell(SET_PROTOCOL_FEATURES, struct.pack("<Q", self.question(GET_PROTOCOL_FEATURES)), acknowledged=False)
        assert self.tell(SET_OWNER) == 0
        assert self.tell(SET_FEATURES, struct.pack("<Q", features)) == 0
        if not bare:
            assert self.region(self.memory_fd, MEMORY) == 0
            self.start()

    def _connect(self, path: pathlib.Path) -> int:
        """Its features. While the one before is not gone altogether the next is turned away."""
        deadline = time.monotonic() + self._timeout_s
        while True:
            self.socket = socket.socket(socket.AF_UNIX)
            self.socket.settimeout(self._timeout_s)
            try:
                self.socket.connect(str(path))
                return self.question(GET_FEATURES)
            except OSError:
                self.socket.close()
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.005)

    def start(self) -> None:
        """The driver's part of a device's start."""
        self.tell(SET_VRING_NUM, struct.pack("<II", _QUEUE, _SIZE))
        self.tell(SET_VRING_BASE, struct.pack("<II", _QUEUE, 0))
        places = (_USER, _USER + _USED, _USER + _AVAIL)
        assert self.tell(SET_VRING_ADDR, struct.pack("<IIQQQQ", _QUEUE, 0, *places, 0)) == 0
        assert self.event(SET_VRING_KICK, self.kick) == 0
        assert self.event(SET_VRING_CALL, self.call) == 0
        assert self.tell(SET_VRING_ENABLE, struct.pack("<II", _QUEUE, 1)) == 0
        error, _ = self.ask(INIT, 0, struct.pack("<IIII48x", 7, 38, 1 << 20, 0))
        assert error == 0

    # ---- vhost-user ----

    def _reply(self) -> int:
        answer = self.socket.recv(20, socket.MSG_WAITALL)
        if len(answer) < 20:
            raise ConnectionResetError(f"hung up after {len(answer)} bytes")
        return int(struct.unpack("<IIIQ", answer)[3])

    def question(self, request: int) -> int:
        send(self.socket, request, b"", ())
        return self._reply()

    def tell(self, request: int, payload: bytes = b"", fds: Sequence[int] = (), *, acknowledged: bool = True) -> int:
        """0: done; 1: refused."""
        send(self.socket, request, payload, fds, _NEED_REPLY if acknowledged else 0)
        return self._reply() if acknowledged else 0

    def event(self, request: int, fd: int) -> int:
        return self.tell(request, struct.pack("<Q", _QUEUE), (fd,))

    def region(self, fd: int, size: int, at: int = _GUEST) -> int:
        return self.tell(ADD_MEM_REG, struct.pack("<QQQQQ", 0, at, size, at - _GUEST + _USER, 0), (fd,))

    # ---- FUSE ----

    def offer(self, opcode: int, node: int, body: bytes = b"") -> None:
        """One request into the ring, and a kick."""
        self._unique += 1
        head = struct.pack("<IIQQIIII", 40 + len(body), opcode, self._unique, node, 0, 0, 1, 0)
        request = head + body
        self.memory[_REQUEST : _REQUEST + len(request)] = request
        self.memory[0:32] = struct.pack("<QIHHQIHH", _GUEST + _REQUEST, len(request), 1, 1, _GUEST + _REPLY, ROOM, 2, 0)
        struct.pack_into("<H", self.memory, _AVAIL + 4 + self._next % _SIZE * 2, 0)
        self._next = (self._next + 1) % 65536
        struct.pack_into("<H", self.memory, _AVAIL + 2, self._next)
        os.eventfd_write(self.kick, 1)

    def answer(self) -> tuple[int, bytes]:
        """The result of the last request: a negative errno or 0, and the reply's body."""
        deadline = time.monotonic() + self._timeout_s
        while struct.unpack_from("<H", self.memory, _USED + 2)[0] != self._next:
            assert time.monotonic() < deadline, f"request {self._unique}: no answer in {self._timeout_s} s"
            time.sleep(0.0005)
        size, error, unique = struct.unpack_from("<IiQ", self.memory, _REPLY)
        assert unique == self._unique
        return error, bytes(self.memory[_REPLY + 16 : _REPLY + size])

    def ask(self, opcode: int, node: int, body: bytes = b"") -> tuple[int, bytes]:
        self.offer(opcode, node, body)
        return self.answer()

    def close(self) -> None:
        self.socket.close()
        self.memory.close()
        for fd in (self.memory_fd, self.kick, self.call):
            with contextlib.suppress(OSError):
                os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
