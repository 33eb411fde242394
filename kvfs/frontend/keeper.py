"""A process between a virtual machine monitor and the daemon, which outlives the daemon.

QEMU's vhost-user-fs cannot reconnect: when its back end goes away the guest's file operations hang for ever, whoever
comes back. The keeper is the back end that QEMU sees. It relays the few messages of the vhost-user protocol to the
daemon's own socket and remembers what they set up: features, memory, queues and their event descriptors, and the list
of requests in flight, which the daemon keeps in memory that the keeper holds. When the daemon is gone it waits for the
next one and sets all up again; requests that had no answer are done again. The data path does not pass through here:
rings, guest memory and event descriptors are shared between guest and daemon directly.

If no daemon comes back within the patience, the keeper answers what is in the queues itself, with EIO, and goes on
doing so: a guest gets errors, not a hang. A daemon that comes later takes over again.

    python -m kvfs.frontend.keeper LISTEN BACKEND [PATIENCE_S]

Protocol: QEMU's docs/interop/vhost-user.rst.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import select
import signal
import socket
import struct
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import IntEnum
from pathlib import Path
from typing import TypeVar

log = logging.getLogger(__name__)

PATIENCE_S = 20.0
_RETRY_S = 0.05
# The daemon answers GET_VRING_BASE within its own deadlines, some 25 s; everything else at once.
_ANSWER_TIMEOUT_S = 60.0
_HEADER = struct.Struct("=III")
_REGION = struct.Struct("=QQQQ")
_NEED_REPLY = 8
_PAYLOAD_MAX = 4096
_INFLIGHT_SHMFD = 1 << 12
_REPLY_ACK = 1 << 3
_QUEUE_SIZE_MAX = 1024
_NO_FD = 0x100


class Request(IntEnum):
    GET_FEATURES = 1
    SET_FEATURES = 2
    SET_OWNER = 3
    SET_MEM_TABLE = 5
    SET_VRING_NUM = 8
    SET_VRING_ADDR = 9
    SET_VRING_BASE = 10
    GET_VRING_BASE = 11
    SET_VRING_KICK = 12
    SET_VRING_CALL = 13
    SET_VRING_ERR = 14
    GET_PROTOCOL_FEATURES = 15
    SET_PROTOCOL_FEATURES = 16
    GET_QUEUE_NUM = 17
    SET_VRING_ENABLE = 18
    GET_CONFIG = 24
    GET_INFLIGHT_FD = 31
    SET_INFLIGHT_FD = 32
    GET_MAX_MEM_SLOTS = 36
    ADD_MEM_REG = 37
    REM_MEM_REG = 38


_ANSWERED = {
    Request.GET_FEATURES, Request.GET_VRING_BASE, Request.GET_PROTOCOL_FEATURES, Request.GET_QUEUE_NUM,
    Request.GET_CONFIG, Request.GET_INFLIGHT_FD, Request.GET_MAX_MEM_SLOTS,
}  # fmt: skip
_QUEUE_REQUESTS = (
    Request.SET_VRING_NUM, Request.SET_VRING_BASE, Request.SET_VRING_ADDR, Request.SET_VRING_ERR,
    Request.SET_VRING_CALL, Request.SET_VRING_KICK, Request.SET_VRING_ENABLE,
)  # fmt: skip


K = TypeVar("K", bytes, int)


class GoneError(Exception):
    """The other side has hung up, or breaks the protocol."""


@dataclass
class Message:
    request: int
    flags: int = 1
    payload: bytes = b""
    fds: list[int] = field(default_factory=list)

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)
        self.fds = []

    def number(self) -> int:
        return int.from_bytes(self.payload[:8], "little")

    def needs_answer(self) -> bool:
        return self.request in _ANSWERED or bool(self.flags & _NEED_REPLY)


def receive(sock: socket.socket) -> Message:
    try:
        data, fds, _, _ = socket.recv_fds(sock, _HEADER.size, 8)
        message = Message(0, fds=fds)
        while 0 < len(data) < _HEADER.size:
            more = sock.recv(_HEADER.size - len(data))
            if not more:
                break
            data += more
        if len(data) < _HEADER.size:
            raise GoneError("hung up")
        message.request, message.flags, size = _HEADER.unpack(data)
        if size > _PAYLOAD_MAX:
            raise GoneError(f"a message of {size} bytes")
        while len(message.payload) < size:
            more = sock.recv(size - len(message.payload))
            if not more:
                raise GoneError("hung up")
            message.payload += more
    except OSError as error:
        raise GoneError(str(error)) from error
    return message


def send(sock: socket.socket, message: Message) -> None:
    data = _HEADER.pack(message.request, message.flags, len(message.payload)) + message.payload
    try:
        if socket.send_fds(sock, [data], message.fds) != len(data):
            raise GoneError("does not read")
    except OSError as error:
        raise GoneError(str(error)) from error


class Setup:
    """What a front end has set up: enough to set it up again."""

    def __init__(self) -> None:
        self.single: dict[int, Message] = {}
        self.regions: dict[bytes, Message] = {}
        self.queues: dict[int, dict[int, Message]] = {}

    def close(self) -> None:
        for message in self.messages():
            message.close()
        self.single.clear()
        self.regions.clear()
        self.queues.clear()

    def note(self, message: Message) -> None:
        """Takes a message over, unless it sets up nothing."""
        request = message.request
        if request in (Request.SET_FEATURES, Request.SET_OWNER, Request.SET_PROTOCOL_FEATURES, Request.SET_INFLIGHT_FD):
            self._put(self.single, request, message)
        elif request == Request.SET_MEM_TABLE:
            for region in self.regions.values():
                region.close()
            self.regions.clear()
            self._put(self.single, request, message)
        elif request == Request.ADD_MEM_REG:
            self._put(self.regions, message.payload[8:32], message)
        elif request == Request.REM_MEM_REG:
            if (known := self.regions.pop(message.payload[8:32], None)) is not None:
                known.close()
            message.close()
        elif request in _QUEUE_REQUESTS:
            self._put(self.queues.setdefault(message.number() & 0xFF, {}), request, message)
        else:
            message.close()

    def stopped(self, queue: int, base: int) -> None:
        """GET_VRING_BASE: the queue needs a kick to start again."""
        messages = self.queues.setdefault(queue, {})
        for request in (Request.SET_VRING_KICK, Request.SET_VRING_ENABLE):
            if (known := messages.pop(request, None)) is not None:
                known.close()
        payload = struct.pack("=II", queue, base)
        self._put(messages, Request.SET_VRING_BASE, Message(Request.SET_VRING_BASE, 1, payload))

    @staticmethod
    def _put(table: dict[K, Message], key: K, message: Message) -> None:
        if (known := table.get(key)) is not None:
            known.close()
        table[key] = message

    def messages(self) -> list[Message]:
        """All of it, in an order that a back end takes."""
        order = (
            Request.SET_PROTOCOL_FEATURES, Request.SET_OWNER, Request.SET_FEATURES, Request.SET_MEM_TABLE,
        )  # fmt: skip
        result = [self.single[request] for request in order if request in self.single]
        result += self.regions.values()
        if Request.SET_INFLIGHT_FD in self.single:
            result.append(self.single[Request.SET_INFLIGHT_FD])
        for _, messages in sorted(self.queues.items()):
            result += [messages[request] for request in _QUEUE_REQUESTS if request in messages]
        return result

    def queue_fd(self, queue: int, request: Request) -> int | None:
        message = self.queues.get(queue, {}).get(request)
        return message.fds[0] if message is not None and message.fds else None


class Refuser:
    """Answers the requests in a guest's queues with EIO, as long as there is nobody who could do better.

    Reads what the guest has written with the same distrust as the daemon: what makes no sense is left alone.
    """

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._maps: list[tuple[int, int, int, mmap.mmap, int]] = []
        self._inflight: mmap.mmap | None = None
        regions: list[tuple[tuple[int, int, int, int], int]] = []
        for message in setup.regions.values():
            regions.append((_REGION.unpack_from(message.payload, 8), message.fds[0]))
        if (table := setup.single.get(Request.SET_MEM_TABLE)) is not None:
            for i, fd in enumerate(table.fds):
                regions.append((_REGION.unpack_from(table.payload, 8 + i * _REGION.size), fd))
        for (guest, size, user, offset), fd in regions:
            self._maps.append((guest, size, user, mmap.mmap(fd, offset + size), offset))
        self._entries = 0
        if (tracking := setup.single.get(Request.SET_INFLIGHT_FD)) is not None:
            size, _, _, self._entries = struct.unpack_from("=QQHH", tracking.payload)
            self._inflight = mmap.mmap(tracking.fds[0], size)

    def close(self) -> None:
        for *_, memory, _ in self._maps:
            memory.close()
        if self._inflight is not None:
            self._inflight.close()

    def kicks(self) -> list[int]:
        found = (self._setup.queue_fd(queue, Request.SET_VRING_KICK) for queue in self._setup.queues)
        return [fd for fd in found if fd is not None]

    def _at(self, address: int, size: int, user: bool = False) -> tuple[mmap.mmap, int] | None:
        for guest_start, length, user_start, memory, offset in self._maps:
            inside = address - (user_start if user else guest_start)
            if inside >= 0 and inside + size <= length:
                return memory, offset + inside
        return None

    def refuse_all(self) -> int:
        """The number of requests answered."""
        return sum(self._refuse_queue(queue) for queue in self._setup.queues)

    def _refuse_queue(self, queue: int) -> int:
        messages = self._setup.queues[queue]
        if Request.SET_VRING_KICK not in messages or Request.SET_VRING_ADDR not in messages:
            return 0
        size = messages[Request.SET_VRING_NUM].number() >> 32
        addresses = messages[Request.SET_VRING_ADDR].payload
        _, _, desc_user, used_user, avail_user, _ = struct.unpack_from("=IIQQQQ", addresses)
        desc = self._at(desc_user, 16 * size, user=True)
        avail = self._at(avail_user, 6 + 2 * size, user=True)
        used = self._at(used_user, 6 + 8 * size, user=True)
        if desc is None or avail is None or used is None:
            return 0
        (used_index,) = struct.unpack_from("=H", used[0], used[1] + 2)
        (avail_index,) = struct.unpack_from("=H", avail[0], avail[1] + 2)
        heads, base = self._in_flight(queue, size, used_index)
        taken = (used_index + len(heads)) & 0xFFFF
        fresh = (avail_index - taken) & 0xFFFF
        if fresh > size:
            return 0
        for i in range(fresh):
            heads += struct.unpack_from("=H", avail[0], avail[1] + 4 + (taken + i) % size * 2)
        for head in heads:
            length = self._refuse(desc, head, size) if head < size else 0
            struct.pack_into("=II", used[0], used[1] + 4 + used_index % size * 8, head, length)
            used_index = (used_index + 1) & 0xFFFF
            struct.pack_into("=H", used[0], used[1] + 2, used_index)
            if self._inflight is not None and base is not None and head < self._entries:
                self._inflight[base + 16 + head * 16] = 0
                struct.pack_into("=H", self._inflight, base + 14, used_index)
        # All that was made available is answered: ask to be kicked at the next one.
        struct.pack_into("=H", used[0], used[1] + 4 + 8 * size, avail_index)
        struct.pack_into("=H", used[0], used[1], 0)
        if heads and (call := self._setup.queue_fd(queue, Request.SET_VRING_CALL)) is not None:
            with suppress(OSError):
                os.write(call, (1).to_bytes(8, "little"))
        return len(heads)

    def _in_flight(self, queue: int, size: int, used_index: int) -> tuple[list[int], int | None]:
        """Heads that were taken and not answered, and where the queue's list begins."""
        if self._inflight is None:
            return [], None
        base = queue * ((16 + self._entries * 16 + 63) // 64 * 64)
        if base + 16 + self._entries * 16 > len(self._inflight) or size > self._entries:
            return [], None
        last, noted = struct.unpack_from("=HH", self._inflight, base + 12)
        if noted != used_index and last < self._entries:
            # The daemon ended between publishing an answer and noting it.
            self._inflight[base + 16 + last * 16] = 0
            struct.pack_into("=H", self._inflight, base + 14, used_index)
        return [head for head in range(size) if self._inflight[base + 16 + head * 16] == 1], base

    def _refuse(self, table: tuple[mmap.mmap, int], head: int, count: int) -> int:
        """Write an error as the reply; its length, 0 if the chain has no room for one."""
        unique: bytes | None = None
        index, indirect = head, False
        for _ in range(2 * _QUEUE_SIZE_MAX):
            if index >= count:
                return 0
            address, length, flags, following = struct.unpack_from("=QIHH", table[0], table[1] + index * 16)
            if flags & 4:
                place = self._at(address, length)
                if indirect or place is None:
                    return 0
                table, count, index, indirect = place, length // 16, 0, True
                continue
            if flags & 2:
                place = self._at(address, 16)
                if unique is None or length < 16 or place is None:
                    return 0
                place[0][place[1] : place[1] + 16] = struct.pack("=Ii", 16, -errno.EIO) + unique
                return 16
            if unique is None:
                place = self._at(address, 16)
                if length < 16 or place is None:
                    return 0
                unique = bytes(place[0][place[1] + 8 : place[1] + 16])
            if not flags & 1:
                return 0
            index = following
        return 0


class Keeper:
    """One socket: front ends one after the other, daemons one after the other."""

    def __init__(self, listener: socket.socket, backend: Path, patience_s: float) -> None:
        self._listener, self._backend_path, self._patience_s = listener, backend, patience_s
        self._front: socket.socket | None = None
        self._back: socket.socket | None = None
        self._setup = Setup()
        self._acknowledges = False

    def run(self) -> None:
        """Serve until the listening socket is shut down."""
        while True:
            try:
                front, _ = self._listener.accept()
            except OSError as error:
                if error.errno == errno.EINVAL:
                    return
                log.warning("accept: %s", error)
                time.sleep(1)
                continue
            self._front = front
            front.settimeout(_ANSWER_TIMEOUT_S)
            try:
                self._serve(front)
            except GoneError as error:
                log.info("front end: %s", error)
            finally:
                front.close()
                self._front = None
                self._drop_back()
                self._setup.close()

    def _serve(self, front: socket.socket) -> None:
        self._connect(front)
        while True:
            readable = select.select([front, *([self._back] if self._back else [])], [], [])[0]
            if self._back in readable:
                # It says nothing by itself: it has gone.
                log.warning("%s: the daemon is gone", self._backend_path)
                self._drop_back()
                self._connect(front)
            elif front in readable:
                self._relay(front, receive(front))

    def _drop_back(self) -> None:
        if self._back is not None:
            self._back.close()
            self._back = None

    # ---- towards the daemon ----

    def _connect(self, front: socket.socket) -> None:
        """Find a daemon and set it up as the last one was. Answers the guest with errors when that takes too long."""
        until = time.monotonic() + self._patience_s
        refuser: Refuser | None = None
        try:
            while True:
                try:
                    self._try_connect()
                    return
                except (OSError, GoneError) as error:
                    self._drop_back()
                    if refuser is None and time.monotonic() > until:
                        log.warning("%s: %s; a guest gets EIO until a daemon comes", self._backend_path, error)
                        refuser = Refuser(self._setup)
                if refuser is not None:
                    refuser.refuse_all()
                kicks = refuser.kicks() if refuser is not None else []
                for fd in select.select(kicks, [], [], _RETRY_S)[0]:
                    with suppress(OSError):
                        os.read(fd, 8)
                # A front end that speaks waits for the daemon, as for any answer; one that has hung up ends this.
                if select.select([front], [], [], 0)[0] and front.recv(1, socket.MSG_PEEK) == b"":
                    raise GoneError("hung up")
        finally:
            if refuser is not None:
                refuser.close()

    def _try_connect(self) -> None:
        back = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._back = back
        back.settimeout(_ANSWER_TIMEOUT_S)
        back.connect(str(self._backend_path))
        for message in self._setup.messages():
            send(back, replace(message, flags=1))
        # A daemon that has refused anything has hung up instead of answering this.
        send(back, Message(Request.GET_FEATURES))
        receive(back).close()
        for queue in self._setup.queues:
            # The daemon of before may have ended between publishing an answer and signalling it.
            if (call := self._setup.queue_fd(queue, Request.SET_VRING_CALL)) is not None:
                with suppress(OSError):
                    os.write(call, (1).to_bytes(8, "little"))

    def _exchange(self, message: Message) -> Message | None:
        """Send a message to the daemon; its answer, if it is one that has an answer. GoneError: no daemon."""
        if self._back is None:
            raise GoneError("no daemon")
        send(self._back, message)
        return receive(self._back) if message.needs_answer() else None

    def _track(self) -> None:
        """Before the first queue is set up: have the daemon keep in our memory what it has under way."""
        if Request.SET_INFLIGHT_FD in self._setup.single:
            return
        queues = self._exchange(Message(Request.GET_QUEUE_NUM))
        assert queues is not None
        ask = Message(Request.GET_INFLIGHT_FD, 1, struct.pack("=QQHH", 0, 0, queues.number(), _QUEUE_SIZE_MAX))
        layout = self._exchange(ask)
        if layout is None or not layout.fds:
            raise GoneError("no list of what is in flight")
        tracking = Message(Request.SET_INFLIGHT_FD, 1, layout.payload, layout.fds)
        self._exchange(tracking)
        self._setup.note(tracking)

    def _relay(self, front: socket.socket, message: Message) -> None:
        if message.request == Request.SET_PROTOCOL_FEATURES:
            wanted = message.number() | _INFLIGHT_SHMFD | _REPLY_ACK
            self._acknowledges = bool(message.number() & _REPLY_ACK)
            message.payload = wanted.to_bytes(8, "little")
        if not self._acknowledges:
            message.flags &= ~_NEED_REPLY
        while True:
            try:
                if message.request == Request.SET_VRING_NUM:
                    self._track()
                answer = self._exchange(message)
                break
            except GoneError as error:
                log.warning("%s: %s", self._backend_path, error)
                self._drop_back()
                self._connect(front)
        if answer is not None:
            if message.request == Request.GET_PROTOCOL_FEATURES:
                # What is in flight is between the daemon and us.
                answer.payload = (answer.number() & ~_INFLIGHT_SHMFD).to_bytes(8, "little")
            send(front, answer)
            answer.close()
        if message.request == Request.GET_VRING_BASE and answer is not None:
            self._setup.stopped(message.number() & 0xFF, answer.number() >> 32)
        refused = message.request not in _ANSWERED and answer is not None and answer.number() != 0
        if refused:
            message.close()
        else:
            self._setup.note(message)


def listen(path: Path) -> socket.socket:
    """A socket for front ends, for this user and group. A stale one is replaced."""
    with suppress(FileNotFoundError):
        path.unlink()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    path.chmod(0o660)
    listener.listen(4)
    return listener


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    # Whoever stops the daemon with its process group does not mean us.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    path, backend = Path(sys.argv[1]), Path(sys.argv[2])
    Keeper(listen(path), backend, float(sys.argv[3]) if len(sys.argv) > 3 else PATIENCE_S).run()


if __name__ == "__main__":
    main()
