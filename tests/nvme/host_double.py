"""A double of an NVMe/TCP host, for tests of the enclosure: one queue a connection, by raw sockets.

It sends what it is told to, right or wrong, and checks what comes. From the TCP transport specification 1.0.
"""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass, field
from typing import Self

ICREQ, ICRESP, H2C_TERM, C2H_TERM, COMMAND, RESPONSE, H2C_DATA, C2H_DATA, R2T = 0, 1, 2, 3, 4, 5, 6, 7, 9
HDGST, DDGST, LAST, SUCCESS = 1, 2, 4, 8
HOST_NQN = "nqn.2026-01.test:host"
TIMEOUT_S = 20.0

_TABLE = []
for _byte in range(256):
    for _ in range(8):
        _byte = _byte >> 1 ^ (0x82F63B78 if _byte & 1 else 0)
    _TABLE.append(_byte)


def crc32c(data: bytes) -> bytes:
    """The digest of a header or of data, as it is sent."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    return struct.pack("<I", crc ^ 0xFFFFFFFF)


class ClosedError(Exception):
    """The target has closed the connection, or reset it."""


class TermError(Exception):
    """The target has ended it with a C2HTermReq."""

    def __init__(self, fes: int, fei: int) -> None:
        super().__init__(f"C2HTermReq: error {fes}, at {fei}")
        self.fes, self.fei = fes, fei


class DigestError(Exception):
    """A digest that the target sent is wrong."""


class StatusError(Exception):
    def __init__(self, status: int, dw0: int) -> None:
        super().__init__(f"status {status:#x}")
        self.code = status & 0x7FF  # type and code
        self.dnr, self.dw0 = bool(status & 0x4000), dw0


@dataclass
class Answer:
    data: bytes = b""
    dw0: int = 0
    dw1: int = 0
    pdus: list[tuple[int, int]] = field(default_factory=list)  # type, flags


@dataclass
class Waiting:
    write: bytes
    answer: Answer
    into: bytearray


class Queue:
    """A connection. As it is made it has done ICReq, and Connect unless connect is False."""

    def __init__(
        self,
        port: int,
        nqn: str,
        *,
        qid: int = 0,
        cntlid: int = 0xFFFF,
        size: int = 32,
        digests: int = 0,
        hpda: int = 0,
        cattr: int = 4,
        kato_ms: int = 0,
        connect: bool = True,
        greet: bool = True,
        host: str = HOST_NQN,
    ) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.header_digest = self.data_digest = False
        self.hpda, self.cpda, self.maxh2c, self.cid = hpda, 0, 0, 0
        self.waiting: dict[int, Waiting] = {}
        self.cntlid = cntlid
        self.log: list[tuple[int, int]] = []
        if not greet:
            return
        try:
            self.greet(digests)
            if connect:
                self.connect(nqn, qid, cntlid, size, cattr=cattr, kato_ms=kato_ms, host=host)
        except BaseException:
            self.socket.close()
            raise

    def greet(self, digests: int) -> None:
        self.socket.sendall(
            struct.pack("<BBBBIHBBI", ICREQ, 0, 128, 0, 128, 0, self.hpda, digests, 0).ljust(128, b"\0")
        )
        head = self.receive(128)
        kind, _, hlen, _, plen, pfv, self.cpda, granted, self.maxh2c = struct.unpack_from("<BBBBIHBBI", head)
        if kind == C2H_TERM:
            raise TermError(*struct.unpack_from("<HI", head, 8))
        assert (kind, hlen, plen, pfv) == (ICRESP, 128, 128, 0), (kind, hlen, plen, pfv)
        assert granted & ~digests == 0
        self.header_digest, self.data_digest = bool(granted & 1), bool(granted & 2)

    def connect(
        self, nqn: str, qid: int, cntlid: int, size: int, *, cattr: int = 4, kato_ms: int = 0, host: str = HOST_NQN
    ) -> None:
        data = struct.pack("<16sH238x256s256s256x", b"h" * 16, cntlid, nqn.encode(), host.encode())
        last = struct.pack("<HHHBxI12x", 0, qid, size - 1, cattr, kato_ms)
        self.cntlid = self.wait(self.submit(0x7F, b"\x01\0\0\0", last, write=data, in_capsule=True)).dw0 & 0xFFFF

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    # ---- bytes ----

    def receive(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            try:
                part = self.socket.recv(size - len(data))
            except ConnectionError as error:
                raise ClosedError("reset") from error
            if not part:
                raise ClosedError(f"closed with {len(data)} bytes of a PDU received")
            data += part
        return bytes(data)

    def send(self, head: bytes, data: bytes = b"", *, digest_xor: int = 0, data_digest_xor: int = 0) -> None:
        """A PDU: head is its header, with type and flags; lengths, digests and padding are put in here."""
        kind, flags, hlen = head[0], head[1], len(head)
        digest = 4 if self.header_digest else 0
        align = (self.cpda + 1) * 4
        begin = -(-(hlen + digest) // align) * align if data else hlen + digest
        flags |= (HDGST if digest else 0) | (DDGST if data and self.data_digest else 0)
        tail = crc32c(data) if data and self.data_digest else b""
        pdo = begin if data else 0
        head = struct.pack("<BBBBI", kind, flags, hlen, pdo, begin + len(data) + len(tail)) + head[8:]
        sum_ = bytes(byte ^ digest_xor for byte in crc32c(head)) if digest else b""
        pad = bytes(begin - hlen - digest)
        try:
            self.socket.sendall(head + sum_ + pad + data + bytes(byte ^ data_digest_xor for byte in tail))
        except ConnectionError as error:
            raise ClosedError("reset") from error

    # ---- commands ----

    def submit(
        self,
        opcode: int,
        nsid: int | bytes,
        last: bytes,
        *,
        write: bytes = b"",
        read: int = 0,
        in_capsule: bool = False,
        cid: int | None = None,
        sgl: bytes | None = None,
        flags: int = 0x40,
        data_digest_xor: int = 0,
    ) -> int:
        """last: CDW10 to 15. Returns the command id."""
        if cid is None:
            cid = self.cid
            self.cid = (self.cid + 1) % 0xFFF0
        size = len(write) or read
        if sgl is None:
            sgl = struct.pack("<QI3xB", 0, size, 0x01 if in_capsule else 0x5A) if size else bytes(16)
        nsid = struct.pack("<I", nsid) if isinstance(nsid, int) else nsid
        entry = struct.pack("<BBH", opcode, flags, cid) + nsid + bytes(16) + sgl + last.ljust(24, b"\0")
        self.waiting[cid] = Waiting(write, Answer(), bytearray(read))
        self.send(bytes([COMMAND]) + bytes(7) + entry, write if in_capsule else b"", data_digest_xor=data_digest_xor)
        return cid

    def take(self) -> int | None:
        """One PDU. Returns the command that has ended with it."""
        head = self.receive(8)
        kind, flags, hlen, pdo, plen = struct.unpack("<BBBBI", head)
        self.log.append((kind, flags))
        head += self.receive(hlen - 8)
        if kind == C2H_TERM:
            self.receive(plen - hlen)
            raise TermError(*struct.unpack_from("<HI", head, 8))
        assert kind in (RESPONSE, C2H_DATA, R2T), f"a PDU of type {kind:#x}"
        assert hlen == 24, hlen
        assert bool(flags & HDGST) == self.header_digest
        if self.header_digest and self.receive(4) != crc32c(head):
            raise DigestError("header")
        there = hlen + (4 if self.header_digest else 0)
        if kind == C2H_DATA:
            return self._take_data(head, flags, pdo, plen, there)
        assert plen == there, (kind, plen)
        if kind == R2T:
            self._take_r2t(head)
            return None
        dw0, dw1, _, _, cid, status = struct.unpack("<IIHHHH", head[8:])
        waiting = self.waiting[cid]
        waiting.answer.dw0, waiting.answer.dw1 = dw0, dw1
        waiting.answer.pdus.append((kind, flags))
        if status >> 1:
            del self.waiting[cid]
            raise StatusError(status >> 1, dw0)
        return cid

    def _take_data(self, head: bytes, flags: int, pdo: int, plen: int, there: int) -> int | None:
        cid, _, offset, size = struct.unpack_from("<HHII", head, 8)
        assert pdo >= there and pdo % ((self.hpda + 1) * 4) == 0, (pdo, there)
        assert plen == pdo + size + (4 if flags & DDGST else 0), (plen, pdo, size)
        assert bool(flags & DDGST) == self.data_digest
        self.receive(pdo - there)
        data = self.receive(size)
        if flags & DDGST and self.receive(4) != crc32c(data):
            raise DigestError("data")
        waiting = self.waiting[cid]
        assert offset + size <= len(waiting.into), (offset, size, len(waiting.into))
        waiting.into[offset : offset + size] = data
        waiting.answer.pdus.append((C2H_DATA, flags))
        assert bool(flags & LAST) == (offset + size == len(waiting.into))
        return cid if flags & SUCCESS else None

    def _take_r2t(self, head: bytes) -> None:
        cid, tag, offset, size = struct.unpack_from("<HHII", head, 8)
        waiting = self.waiting[cid]
        assert offset + size <= len(waiting.write), (offset, size, len(waiting.write))
        waiting.answer.pdus.append((R2T, 0))
        while size:
            part = min(size, self.maxh2c)
            flags = LAST if part == size else 0
            self.send_data(cid, tag, offset, waiting.write[offset : offset + part], flags=flags)
            offset, size = offset + part, size - part

    def send_data(
        self, cid: int, tag: int, offset: int, data: bytes, *, flags: int = LAST, size: int | None = None
    ) -> None:
        head = struct.pack("<BB6xHHII4x", H2C_DATA, flags, cid, tag, offset, len(data) if size is None else size)
        self.send(head, data)

    def wait(self, cid: int) -> Answer:
        while self.take() != cid:
            pass
        waiting = self.waiting.pop(cid)
        waiting.answer.data = bytes(waiting.into)
        return waiting.answer

    # ---- what tests do often ----

    def read(self, nsid: int, block: int, count: int, *, block_size: int = 4096) -> bytes:
        return self.wait(self.submit_read(nsid, block, count, block_size=block_size)).data

    def submit_read(self, nsid: int, block: int, count: int, *, block_size: int = 4096) -> int:
        return self.submit(2, nsid, struct.pack("<QI", block, count - 1), read=count * block_size)

    def write(self, nsid: int, block: int, data: bytes, *, in_capsule: bool = False, block_size: int = 4096) -> Answer:
        return self.wait(self.submit_write(nsid, block, data, in_capsule=in_capsule, block_size=block_size))

    def submit_write(
        self, nsid: int, block: int, data: bytes, *, in_capsule: bool = False, block_size: int = 4096
    ) -> int:
        return self.submit(
            1, nsid, struct.pack("<QI", block, len(data) // block_size - 1), write=data, in_capsule=in_capsule
        )

    def property_get(self, offset: int, *, eight: bool = False) -> int:
        answer = self.wait(self.submit(0x7F, b"\x04\0\0\0", struct.pack("<BxxxI", eight, offset)))
        return answer.dw1 << 32 | answer.dw0

    def property_set(self, offset: int, value: int) -> None:
        self.wait(self.submit(0x7F, b"\0\0\0\0", struct.pack("<xxxxIQ", offset, value)))

    def enable(self) -> None:
        self.property_set(0x14, 6 << 16 | 4 << 20 | 1)
        assert self.property_get(0x1C) & 1

    def identify(self, cns: int, nsid: int = 0) -> bytes:
        return self.wait(self.submit(6, nsid, struct.pack("<I", cns), read=4096)).data

    def log_page(self, log: int, size: int, offset: int = 0) -> bytes:
        words = size // 4 - 1
        last = struct.pack("<IIQ", log | (words & 0xFFFF) << 16, words >> 16, offset)
        return self.wait(self.submit(2, 0, last, read=size)).data


class Host:
    """A controller: admin queue, enabled, and I/O queues. `with Host(port, NQN) as host: host[1].read(...)`."""

    def __init__(
        self,
        port: int,
        nqn: str,
        *,
        queues: int = 1,
        digests: int = 0,
        hpda: int = 0,
        kato_ms: int = 0,
        cattr: int = 4,
        size: int = 128,
    ) -> None:
        self.queues: list[Queue] = []
        try:
            self.queues.append(Queue(port, nqn, digests=digests, hpda=hpda, kato_ms=kato_ms, cattr=cattr))
            self.admin.enable()
            for qid in range(1, queues + 1):
                self.queues.append(
                    Queue(
                        port, nqn, qid=qid, cntlid=self.admin.cntlid, digests=digests, hpda=hpda, cattr=cattr, size=size
                    )
                )
        except BaseException:
            self.close()
            raise

    @property
    def admin(self) -> Queue:
        return self.queues[0]

    def __getitem__(self, qid: int) -> Queue:
        return self.queues[qid]

    def close(self) -> None:
        for queue in reversed(self.queues):
            queue.socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
