"""`kvfs keep`: stands between the daemon and a hypervisor that never connects twice (QEMU's vhost-user-fs), so that a
guest outlives the daemon's restart.

Passes vhost-user messages on and remembers what they set up: features, memory, queues, and the "inflight" memory in
which the daemon notes requests under way. When the daemon goes, the relay connects to the next one and repeats those
messages; the guest sees a pause. When no daemon comes in time, the relay answers the guest's requests with EIO until
one does: an error, not a hang. Payload never passes through it. Knows no pool, no file, and of virtqueues only how to
answer with an error. Sources: QEMU's docs/interop/vhost-user.rst, virtio 1.2 section 2.7, linux/fuse.h.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import select
import socket
import struct
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from kvfs.descriptors import all_above
from kvfs.errors import KvfsError

# The logger's name stays when a module moves.
log = logging.getLogger("kvfs.frontend.keeper")

GET_FEATURES, SET_FEATURES, SET_OWNER, SET_MEM_TABLE = 1, 2, 3, 5
SET_VRING_NUM, SET_VRING_ADDR, SET_VRING_BASE, GET_VRING_BASE = 8, 9, 10, 11
SET_VRING_KICK, SET_VRING_CALL, SET_VRING_ERR = 12, 13, 14
GET_PROTOCOL_FEATURES, SET_PROTOCOL_FEATURES, GET_QUEUE_NUM, SET_VRING_ENABLE = range(15, 19)
GET_CONFIG, GET_INFLIGHT_FD, SET_INFLIGHT_FD, GET_MAX_MEM_SLOTS, ADD_MEM_REG, REM_MEM_REG = 24, 31, 32, 36, 37, 38
_ANSWERED = (
    GET_FEATURES, GET_VRING_BASE, GET_PROTOCOL_FEATURES, GET_QUEUE_NUM, GET_CONFIG, GET_INFLIGHT_FD, GET_MAX_MEM_SLOTS,
)  # fmt: skip
_VERSION, _REPLY, _NEED_REPLY = 1, 4, 8
_REPLY_ACK = 1 << 3
_FDS_MAX = 8
_PAYLOAD_MAX = 4096
_QUEUE_SIZE_MAX = 1024
# The daemon answers within its own deadlines; the longest is that of requests under way when a queue stops.
ANSWER_TIMEOUT_S = 20.0
MESSAGE_TIMEOUT_S = 5.0
RETRY_S = 0.2
FAIL_INTERVAL_S = 0.05

_HEADER = struct.Struct("<III")
_REGION = struct.Struct("<QQQQ")  # guest address, size, the front end's address, offset in the file
_STATE = struct.Struct("<II")
_ADDRESS = struct.Struct("<IIQQQQ")  # index, flags, descriptors, used, available, log
_INFLIGHT = struct.Struct("<QQHH")
_DESCRIPTOR = struct.Struct("<QIHH")
_NEXT, _WRITE, _INDIRECT = 1, 2, 4
_FUSE_OUT = struct.Struct("<IiQ")
# Requests that have no answer: FORGET, INTERRUPT, BATCH_FORGET.
_FUSE_SILENT = (2, 36, 42)
# struct inflight_queue: features, version, size, last head, used index; then entries: flag, padding, next, counter.
_INFLIGHT_HEAD, _INFLIGHT_ENTRY = 16, 16


class RelayError(KvfsError):
    """An end of the conversation is gone or breaks the protocol."""


class GuestError(KvfsError):
    """A guest's rings hold impossible values."""


@dataclass(slots=True)
class Message:
    request: int
    flags: int
    payload: bytes
    fds: list[int] = field(default_factory=list)

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)
        self.fds = []


def receive(sock: socket.socket) -> Message:
    """One message. Raises RelayError at the end, or if it is none."""
    try:
        data, fds, flags, _ = socket.recv_fds(sock, _HEADER.size, _FDS_MAX)
        message = Message(0, 0, b"", all_above(list(fds)))
    except OSError as error:
        raise RelayError(f"{error.strerror}") from error
    try:
        if flags & socket.MSG_CTRUNC:
            raise RelayError("too many descriptors")
        data += _receive_exactly(sock, _HEADER.size - len(data)) if data else b""
        if not data:
            raise RelayError("hung up")
        message.request, message.flags, size = _HEADER.unpack(data)
        if size > _PAYLOAD_MAX:
            raise RelayError(f"a message of {size} bytes")
        message.payload = _receive_exactly(sock, size)
    except BaseException:
        message.close()
        raise
    return message


def _receive_exactly(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        try:
            piece = sock.recv(size - len(data))
        except OSError as error:
            raise RelayError(f"{error.strerror or error}") from error
        if not piece:
            raise RelayError("hung up in the middle of a message")
        data += piece
    return data


def send(sock: socket.socket, request: int, flags: int, payload: bytes, fds: Sequence[int] = ()) -> None:
    try:
        socket.send_fds(sock, [_HEADER.pack(request, flags, len(payload)) + payload], list(fds))
    except OSError as error:
        raise RelayError(f"{error.strerror or error}") from error


# ---- the guest's memory, for answers that are errors ----


@dataclass(slots=True)
class Region:
    guest_address: int
    size: int
    user_address: int
    offset: int
    fd: int
    map: mmap.mmap | None = None

    def view(self) -> mmap.mmap:
        if self.map is None:
            self.map = mmap.mmap(self.fd, self.offset + self.size)
        return self.map

    def close(self) -> None:
        if self.map is not None:
            self.map.close()
        os.close(self.fd)


class Memory:
    def __init__(self) -> None:
        self.regions: list[Region] = []

    def add(self, payload: bytes, fd: int) -> None:
        guest_address, size, user_address, offset = _REGION.unpack(payload)
        self.regions.append(Region(guest_address, size, user_address, offset, os.dup(fd)))

    def remove(self, payload: bytes) -> None:
        guest_address, size, user_address, _ = _REGION.unpack(payload)
        for region in self.regions:
            if (region.guest_address, region.size, region.user_address) == (guest_address, size, user_address):
                region.close()
                self.regions.remove(region)
                return

    def close(self) -> None:
        for region in self.regions:
            region.close()
        self.regions = []

    def guest(self, address: int, size: int) -> tuple[mmap.mmap, int]:
        for region in self.regions:
            if region.guest_address <= address and address + size <= region.guest_address + region.size:
                return region.view(), region.offset + address - region.guest_address
        raise GuestError(f"{size} bytes at guest address 0x{address:x} are not in its memory")

    def user(self, address: int, size: int) -> tuple[mmap.mmap, int]:
        for region in self.regions:
            if region.user_address <= address and address + size <= region.user_address + region.size:
                return region.view(), region.offset + address - region.user_address
        raise GuestError(f"a ring of {size} bytes at 0x{address:x} is not in the guest's memory")


@dataclass(slots=True)
class Queue:
    size: int = 0
    messages: dict[int, Message] = field(default_factory=dict)

    @property
    def started(self) -> bool:
        """Whether answers are owed."""
        kick = self.messages.get(SET_VRING_KICK)
        return bool(self.size and SET_VRING_ADDR in self.messages and kick is not None and kick.fds)

    def keep(self, message: Message) -> None:
        old = self.messages.pop(message.request, None)
        if old is not None:
            old.close()
        fds = [os.dup(fd) for fd in message.fds]
        self.messages[message.request] = Message(message.request, message.flags, message.payload, fds)

    def forget(self, *requests: int) -> None:
        for request in requests:
            message = self.messages.pop(request, None)
            if message is not None:
                message.close()


def fail_requests(queue: Queue, memory: Memory, inflight: mmap.mmap | None, inflight_at: int) -> int:
    """Answer with EIO every request of the guest that has no answer yet; return their number. The queue has no other
    server now. Raises GuestError."""
    size = queue.size
    _, _, desc_user, used_user, avail_user, _ = _ADDRESS.unpack(queue.messages[SET_VRING_ADDR].payload)
    table, table_at = memory.user(desc_user, 16 * size)
    avail, avail_at = memory.user(avail_user, 4 + 2 * size)
    used, used_at = memory.user(used_user, 4 + 8 * size)
    used_index = ctypes.c_uint16.from_buffer(used, used_at + 2)
    try:
        heads = _unanswered(size, used_index.value, inflight, inflight_at)
        position = used_index.value + len(heads)
        (available,) = struct.unpack_from("<H", avail, avail_at + 2)
        fresh = (available - position) & 0xFFFF
        if fresh > size:
            raise GuestError(f"{fresh} requests in a queue of {size}")
        for i in range(position, position + fresh):
            heads.append(struct.unpack_from("<H", avail, avail_at + 4 + 2 * (i % size))[0])
        for head in heads:
            if head >= size:
                raise GuestError(f"descriptor {head} in a queue of {size}")
            written = _fail_one(memory, table, table_at, size, head)
            struct.pack_into("<II", used, used_at + 4 + 8 * (used_index.value % size), head, written)
            used_index.value = (used_index.value + 1) & 0xFFFF
            if inflight is not None:
                inflight[inflight_at + _INFLIGHT_HEAD + _INFLIGHT_ENTRY * head] = 0
                struct.pack_into("<H", inflight, inflight_at + 14, used_index.value)
    finally:
        del used_index  # it holds the map
    call = queue.messages.get(SET_VRING_CALL)
    if heads and call is not None and call.fds:
        os.eventfd_write(call.fds[0], 1)
    return len(heads)


def _unanswered(size: int, used_index: int, inflight: mmap.mmap | None, at: int) -> list[int]:
    """Requests that the daemon took and did not answer, in its order."""
    if inflight is None:
        return []
    last_head, told = struct.unpack_from("<HH", inflight, at + 12)
    if told != used_index and last_head < size:  # the daemon ended between publishing an answer and noting it
        inflight[at + _INFLIGHT_HEAD + _INFLIGHT_ENTRY * last_head] = 0
    struct.pack_into("<H", inflight, at + 14, used_index)
    found = []
    for head in range(size):
        place = at + _INFLIGHT_HEAD + _INFLIGHT_ENTRY * head
        if inflight[place] == 1:
            found.append((struct.unpack_from("<Q", inflight, place + 8)[0], head))
    return [head for _, head in sorted(found)]


def _fail_one(memory: Memory, table: mmap.mmap, table_at: int, size: int, head: int) -> int:
    """Write the answer EIO into a request's memory; return its length."""
    unique: int | None = None
    index, left, indirect = head, size, False
    while left:
        left -= 1
        address, length, flags, following = _DESCRIPTOR.unpack_from(table, table_at + 16 * index)
        if flags & _INDIRECT:
            count = min(length // 16, _QUEUE_SIZE_MAX)
            if indirect or count == 0:
                raise GuestError("an indirect table that cannot be")
            table, table_at = memory.guest(address, 16 * count)
            index, size, left, indirect = 0, count, count, True
            continue
        if not flags & _WRITE and unique is None:
            place, at = memory.guest(address, 16)
            _, opcode, unique = struct.unpack_from("<IIQ", place, at)
            if length < 16 or opcode in _FUSE_SILENT:
                return 0
        elif flags & _WRITE and unique is not None and length >= _FUSE_OUT.size:
            place, at = memory.guest(address, _FUSE_OUT.size)
            _FUSE_OUT.pack_into(place, at, _FUSE_OUT.size, -errno.EIO, unique)
            return _FUSE_OUT.size
        if not flags & _NEXT or following >= size:
            break
        index = following
    return 0


# ---- one front end ----


class Relay:
    """A front end and, one after the other, the daemons that serve it."""

    def __init__(self, front: socket.socket, export: Path, timeout_s: float) -> None:
        self._front, self._export, self._timeout_s = front, export, timeout_s
        self._back: socket.socket | None = None
        self._lost_s = time.monotonic()
        self._cache: dict[int, bytes] = {}
        self._set: dict[int, Message] = {}
        self._protocol_features = 0
        self._memory = Memory()
        self._table = False  # the front end gives all memory in one message
        self._queues: dict[int, Queue] = {}
        self._inflight: tuple[int, bytes] | None = None
        self._inflight_map: mmap.mmap | None = None
        self.failed = 0

    def run(self) -> None:
        """Serve until the front end hangs up."""
        try:
            deadline = time.monotonic() + self._timeout_s
            while not self._connect():
                if time.monotonic() > deadline:
                    raise RelayError(f"{self._export}: nobody listens there; hung up on the front end")
                time.sleep(RETRY_S)
            while self._turn():
                pass
        finally:
            self._end()

    def _turn(self) -> bool:
        poller = select.poll()
        poller.register(self._front, select.POLLIN)
        if self._back is not None:
            poller.register(self._back, select.POLLIN)
        failing = self._back is None and time.monotonic() > self._lost_s + self._timeout_s
        timeout_s = None if self._back is not None else FAIL_INTERVAL_S if failing else RETRY_S
        ready = {fd for fd, _ in poller.poll(None if timeout_s is None else timeout_s * 1000)}
        if self._back is not None and self._back.fileno() in ready:
            self._lose()  # it says nothing unasked
        if self._front.fileno() in ready:
            try:
                message = receive(self._front)
            except RelayError:
                return False
            try:
                self._from_front(message)
            finally:
                message.close()
        if self._back is None and self._connect():
            log.info("%s: connected again after %.1f s", self._export, time.monotonic() - self._lost_s)
        elif self._back is None and failing:
            self._fail_all()
        return True

    # ---- the daemon ----

    def _connect(self) -> bool:
        back = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        back.settimeout(ANSWER_TIMEOUT_S)
        try:
            back.connect(str(self._export))
            self._repeat_setup(back)
        except (OSError, RelayError):
            back.close()
            return False
        self._back = back
        return True

    def _lose(self) -> None:
        if self._back is not None:
            self._back.close()
            self._back = None
            self._lost_s = time.monotonic()
            log.warning("%s: the daemon is gone; waiting for the next", self._export)

    def _repeat_setup(self, back: socket.socket) -> None:
        """The state that this front end has set up so far."""
        for request in (SET_PROTOCOL_FEATURES, SET_OWNER, SET_FEATURES):
            if request in self._set:
                send(back, request, _VERSION, self._set[request].payload)
        regions = self._memory.regions
        texts = [_REGION.pack(r.guest_address, r.size, r.user_address, r.offset) for r in regions]
        if self._table:
            payload = struct.pack("<II", len(regions), 0) + b"".join(texts)
            send(back, SET_MEM_TABLE, _VERSION, payload, [region.fd for region in regions])
        else:
            for region, text in zip(regions, texts, strict=True):
                send(back, ADD_MEM_REG, _VERSION, bytes(8) + text, [region.fd])
        if self._inflight is not None:
            send(back, SET_INFLIGHT_FD, _VERSION, self._inflight[1], [self._inflight[0]])
        for queue in self._queues.values():
            for request in (
                SET_VRING_NUM, SET_VRING_BASE, SET_VRING_ADDR, SET_VRING_CALL, SET_VRING_ERR, SET_VRING_KICK,
                SET_VRING_ENABLE,
            ):  # fmt: skip
                if request in queue.messages:
                    message = queue.messages[request]
                    send(back, request, _VERSION, message.payload, message.fds)
        # An answer proves that all messages before it were understood.
        send(back, GET_FEATURES, _VERSION, b"")
        receive(back).close()
        for queue in self._queues.values():
            if queue.started:
                # Requests that the guest has made meanwhile.
                os.eventfd_write(queue.messages[SET_VRING_KICK].fds[0], 1)

    # ---- the front end ----

    def _from_front(self, message: Message) -> None:
        if message.request == SET_VRING_NUM and self._inflight is None:
            self._track()
        wanted = message.request in _ANSWERED or (
            bool(message.flags & _NEED_REPLY) and bool(self._protocol_features & _REPLY_ACK)
        )
        answer = self._ask(message, wanted)
        if answer is None:
            answer = self._answer_alone(message)
        # Remembered only now: a daemon that goes in the middle of a message is told it once more.
        if message.request in _ANSWERED or answer == bytes(8):
            self._remember(message)
        if wanted:
            send(self._front, message.request, _VERSION | _REPLY, answer)

    def _ask(self, message: Message, wanted: bool) -> bytes | None:
        """The daemon's answer, or success if no answer is wanted; None if there is no daemon."""
        if self._back is None:
            return None
        try:
            send(self._back, message.request, message.flags, message.payload, message.fds)
            if not wanted:
                return bytes(8)
            answer = receive(self._back)
            answer.close()
            if message.request in _ANSWERED:
                self._cache[message.request] = answer.payload
            return answer.payload
        except RelayError:
            self._lose()
            return None

    def _answer_alone(self, message: Message) -> bytes:
        if message.request not in _ANSWERED:
            return bytes(8)
        if message.request == GET_VRING_BASE:
            # The front end stops the queue: requests under way end now.
            index, _ = _STATE.unpack_from(message.payload)
            self._fail(index)
            return _STATE.pack(index, self._used_index(index))
        return self._cache.get(message.request, bytes(8))

    def _remember(self, message: Message) -> None:
        request, payload = message.request, message.payload
        if request in (SET_PROTOCOL_FEATURES, SET_OWNER, SET_FEATURES):
            self._set[request] = Message(request, message.flags, payload)
            if request == SET_PROTOCOL_FEATURES:
                (self._protocol_features,) = struct.unpack("<Q", payload)
        elif request == SET_MEM_TABLE:
            self._memory.close()
            self._table = True
            for i, fd in enumerate(message.fds):
                self._memory.add(payload[8 + 32 * i : 40 + 32 * i], fd)
        elif request == ADD_MEM_REG and message.fds:
            self._memory.add(payload[8:40], message.fds[0])
        elif request == REM_MEM_REG:
            self._memory.remove(payload[8:40])
        elif request in (SET_VRING_KICK, SET_VRING_CALL, SET_VRING_ERR):
            (word,) = struct.unpack("<Q", payload)
            self._queue(word & 0xFF).keep(message)
        elif request in (SET_VRING_NUM, SET_VRING_BASE, SET_VRING_ENABLE):
            index, number = _STATE.unpack(payload)
            queue = self._queue(index)
            queue.keep(message)
            if request == SET_VRING_NUM and 0 < number <= _QUEUE_SIZE_MAX:
                queue.size = number
        elif request == SET_VRING_ADDR:
            self._queue(_STATE.unpack_from(payload)[0]).keep(message)
        elif request == GET_VRING_BASE:
            self._queue(_STATE.unpack_from(payload)[0]).forget(SET_VRING_KICK, SET_VRING_ADDR, SET_VRING_BASE)

    def _queue(self, index: int) -> Queue:
        return self._queues.setdefault(index, Queue())

    def _track(self) -> None:
        """Have the daemon note requests under way in memory that outlives it."""
        count = self._cache.get(GET_QUEUE_NUM, bytes(8))[0] or 2
        if self._back is None:
            return
        try:
            send(self._back, GET_INFLIGHT_FD, _VERSION, _INFLIGHT.pack(0, 0, count, _QUEUE_SIZE_MAX))
            answer = receive(self._back)
        except RelayError:
            self._lose()
            return
        if len(answer.payload) >= _INFLIGHT.size and len(answer.fds) == 1:
            size, offset, _, _ = _INFLIGHT.unpack_from(answer.payload)
            self._inflight = (os.dup(answer.fds[0]), answer.payload)
            self._inflight_map = mmap.mmap(self._inflight[0], offset + size)
        answer.close()

    # ---- errors for the guest ----

    def _fail_all(self) -> None:
        for index in list(self._queues):
            self._fail(index)

    def _fail(self, index: int) -> None:
        queue = self._queue(index)
        if not queue.started:
            return
        at, inflight = 0, self._inflight_map
        if self._inflight is not None:
            _, at, count, size = _INFLIGHT.unpack_from(self._inflight[1])
            at += index * ((_INFLIGHT_HEAD + _INFLIGHT_ENTRY * size + 63) // 64 * 64)
            if index >= count:
                inflight = None
        try:
            failed = fail_requests(queue, self._memory, inflight, at)
        except (GuestError, ValueError, OSError) as error:
            log.warning("%s: queue %d: %s; given up", self._export, index, error)
            queue.forget(SET_VRING_KICK)
            return
        if failed and not self.failed:
            log.warning("%s: no daemon: requests of the guest are answered with EIO", self._export)
        self.failed += failed

    def _used_index(self, index: int) -> int:
        message = self._queue(index).messages.get(SET_VRING_ADDR)
        if message is None:
            return 0
        used_user = _ADDRESS.unpack(message.payload)[3]
        with suppress(GuestError, ValueError, OSError):
            used, at = self._memory.user(used_user, 4)
            return int(struct.unpack_from("<H", used, at + 2)[0])
        return 0

    def _end(self) -> None:
        if self._back is not None:
            self._back.close()
        for queue in self._queues.values():
            queue.forget(*list(queue.messages))
        self._memory.close()
        if self._inflight_map is not None:
            self._inflight_map.close()
        if self._inflight is not None:
            os.close(self._inflight[0])


def keep(listener: socket.socket, export: Path, timeout_s: float) -> None:
    """Serve front ends on `listener`, one at a time, from the export's socket. Never returns."""
    while True:
        front, _ = listener.accept()
        with front:
            front.settimeout(MESSAGE_TIMEOUT_S)
            log.info("a front end has connected")
            try:
                Relay(front, export, timeout_s).run()
            except (KvfsError, struct.error) as error:
                log.warning("hung up: %s", error)
            else:
                log.info("the front end has gone")
