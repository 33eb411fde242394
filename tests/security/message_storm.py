"""A front end that says anything: messages of vhost-user of every kind, right and wrong, with any descriptors.

Meanwhile it writes over the guest's rings and cuts its memory off. Everything follows from the seed but the daemon's
part.
"""

from __future__ import annotations

import array
import contextlib
import errno
import os
import pathlib
import random
import socket
import struct
from collections.abc import Callable

import front_end
from front_end import Guest

_REQUESTS = (*range(1, 21), 24, 25, 31, 32, 36, 37, 38, 39, 40, 99, 0, (1 << 32) - 1)
_NUMBERS = (
    0, 1, 2, 3, 8, 15, 16, 17, 64, 128, 255, 256, 1024, 1025, 4095, 4096, 4097, 65535, 65536, 4 << 20, (1 << 31) - 1,
    1 << 31, (1 << 32) - 1, 1 << 32, 1 << 46, 1 << 47, (1 << 63) - 1, 1 << 63, (1 << 64) - 4096, (1 << 64) - 1,
    0x40000000, 0x40001000, 0x40400000, 0x7F1200000000, 0x7F1200001000, 0x7F1200002000, 0x7F1200400000,
)  # fmt: skip
# Sizes of the payloads that the protocol has: numbers, a ring's state and addresses, regions, in-flight, configuration.
_SIZES = (0, 4, 8, 8, 8, 12, 16, 20, 24, 40, 40, 40, 48, 72, 264, 268, 272)


class Storm:
    """On one export, until told to stop; counts what it has said, and how often it was hung up on."""

    def __init__(self, path: pathlib.Path, seed: int) -> None:
        self._path, self._random = path, random.Random(seed)
        self.messages = self.connections = 0

    def blow(self, goes_on: Callable[[], bool]) -> None:
        with contextlib.ExitStack() as stack:
            fds = self._descriptors(stack)
            while goes_on():
                self.connections += 1
                with contextlib.suppress(OSError, AssertionError, struct.error), Guest(self._path, bare=True) as guest:
                    if self._random.random() < 0.7 and guest.region(guest.memory_fd, 4 << 20) == 0:
                        guest.start()
                    self._talk(guest, fds, goes_on)

    def _descriptors(self, stack: contextlib.ExitStack) -> list[int]:
        fds: list[int] = []
        for size in (0, 4096, 4 << 20, 1 << 46):
            fds.append(os.memfd_create("any", os.MFD_CLOEXEC))
            os.ftruncate(fds[-1], size)
        fds += [os.eventfd(0, os.EFD_CLOEXEC), *os.pipe(), os.open("/dev/null", os.O_RDWR), os.open("/", os.O_RDONLY)]
        ends = socket.socketpair()
        for fd in (*fds, *(end.detach() for end in ends)):
            stack.callback(os.close, fd)
        return fds

    def _number(self) -> int:
        return self._random.choice(_NUMBERS) if self._random.random() < 0.8 else self._random.getrandbits(64)

    def _payload(self) -> bytes:
        size = self._random.choice(_SIZES)
        words = [self._random.getrandbits(1) if self._random.random() < 0.3 else self._number() for _ in range(34)]
        if self._random.random() < 0.5:  # two numbers: a queue and its state, a count of regions
            words[0] = self._random.randrange(4) | self._random.choice(_NUMBERS) % (1 << 32) << 32
        return struct.pack("<34Q", *words)[:size]

    def _talk(self, guest: Guest, fds: list[int], goes_on: Callable[[], bool]) -> None:
        rnd = self._random
        guest.socket.setblocking(False)
        for _ in range(rnd.randrange(1, 400)):
            if not goes_on():
                return
            request, payload = rnd.choice(_REQUESTS), self._payload()
            size = len(payload) if rnd.random() < 0.98 else self._number() % (1 << 32)
            flags = 1 | (8 if rnd.random() < 0.5 else 0) | (rnd.getrandbits(5) if rnd.random() < 0.02 else 0)
            given = [*fds, guest.memory_fd, guest.kick, guest.call, guest.memory_fd, guest.kick]
            chosen = rnd.choices(given, k=rnd.choice((0, 0, 0, 1, 1, 1, 2, 8, 9)))
            control = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", chosen))] if chosen else []
            guest.socket.sendmsg([struct.pack("<III", request, flags, size), payload], control)
            self.messages += 1
            self._drain(guest)
            self._scribble(guest)

    def _drain(self, guest: Guest) -> None:
        try:
            while data := guest.socket.recv(65536):
                del data
            raise ConnectionResetError(errno.ECONNRESET, "hung up")
        except BlockingIOError:
            pass

    def _scribble(self, guest: Guest) -> None:
        rnd = self._random
        if rnd.random() < 0.3:
            at = rnd.choice((0, 0x1000, 0x2000, 0x10000)) + rnd.randrange(64)
            guest.memory[at : at + 8] = struct.pack("<Q", self._number())
            os.eventfd_write(guest.kick, 1)
        elif rnd.random() < 0.1:
            with contextlib.suppress(AssertionError):
                guest.offer(rnd.randrange(1, 50), rnd.randrange(4), rnd.randbytes(rnd.randrange(200)))
        elif rnd.random() < 0.003:
            # Our own map of it is touched no more: the next connection has another.
            os.ftruncate(guest.memory_fd, 0)
            os.ftruncate(guest.memory_fd, front_end.MEMORY)
