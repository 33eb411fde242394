"""A double of libkvfs: packs blocks as docs/format.md has them, writes them with pwrite(2), speaks its frames.

Written from the format's and the protocol's text, not from the library's code.
"""

from __future__ import annotations

import array
import mmap
import os
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import xxhash

from kvfs.checks import checksum
from kvfs.plane import Run
from kvfs.record import Inode
from kvfs.types import SegmentIndex

PAGE = 4096
TABLE, HASHES, LONG, PARENTS = 1, 2, 4, 8
HELLO, DESCRIPTORS, RESERVE, COMMIT, DELETE, LIST, LOOKUP, BAD_BLOCK, HITS, REPORT, CLOSE, LEASE, RELEASE = range(1, 14)
EVENTS, TOUCH = 14, 15
FRAME = struct.Struct("<IHHiI")


def padded(data: bytes, unit: int = 8) -> bytes:
    return data + bytes(-len(data) % unit)


def run_bytes(
    record: bytes, runs: Sequence[Run], header_pages: int, ancestors: bytes, content: bytes, secret: int, epoch: int
) -> list[bytes]:
    """The bytes that each run is to hold: block header or extent header, then data."""
    inode = Inode.unpack(record)
    assert inode.size == len(content)
    leaves = [checksum(content[at : at + PAGE], secret) for at in range(0, len(content), PAGE)]
    leaf_count = len(leaves)
    digest = xxhash.xxh3_128_intdigest(struct.pack("<Q", inode.parent) + inode.name, seed=secret)
    key = digest & ((1 << 64) - 1), digest >> 64
    record_at = 104 + 8 * (header_pages - 1)
    ancestors_at = record_at + len(record)
    leaves_at = len(padded(bytes(ancestors_at + len(ancestors))))
    head = bytearray(header_pages * PAGE)
    struct.pack_into(
        "<QIIQQQQIIIIIIIIQQq", head, 0, 0x4B434C425346564B, 2, 0, 0, key[0], key[1], epoch, header_pages, leaf_count,
        record_at, ancestors_at, len(ancestors), 104, leaves_at, runs[0].page_count, 0, 0, 0,
    )  # fmt: skip
    head[record_at : record_at + len(record)] = record
    head[ancestors_at : ancestors_at + len(ancestors)] = ancestors
    head[leaves_at : leaves_at + 8 * leaf_count] = struct.pack(f"<{leaf_count}Q", *leaves)
    for page in range(header_pages - 1, 0, -1):
        struct.pack_into("<Q", head, 104 + 8 * (page - 1), checksum(head[page * PAGE : (page + 1) * PAGE], secret))
    struct.pack_into("<Q", head, 16, checksum(head[:PAGE], secret))
    whole, parts, at = padded(content, PAGE), [], 0
    for i, run in enumerate(runs):
        if i:
            head = bytearray(PAGE)
            struct.pack_into(
                "<QIIQQQQIIII", head, 0, 0x4E5458455346564B, 2, 0, 0, inode.inode, run.generation, epoch, run.segment,
                run.page, run.page_count, at // PAGE,
            )  # fmt: skip
            struct.pack_into("<Q", head, 16, checksum(head, secret))
        size = run.page_count * PAGE - len(head)
        parts.append(bytes(head) + whole[at : at + size])
        at += size
    assert at == len(whole)
    return parts


@dataclass
class Place:
    """RESERVE's answer for one block."""

    reservation: int
    error: int
    header_pages: int
    runs: list[Run]
    record: bytes
    ancestors: bytes


class WireClient:
    """One connection. Everything has a deadline of 50 s."""

    def __init__(
        self, pool: Path, flags: int = 0, version: int = 4, magic: bytes = b"KVFSCLI1", timeout_ms: int = 50_000
    ) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(50)
        self.socket.connect(str(pool / "control.sock"))
        self.fds: list[int] = []
        self.version = version
        self._id = 0
        self.socket.sendall(struct.pack("<8sIIII", magic, version, flags, timeout_ms, 0))

    def __enter__(self) -> WireClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.socket.close()
        for fd in self.fds:
            os.close(fd)
        self.fds.clear()

    # ---- frames ----

    def receive(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            piece = self.socket.recv(size - len(data))
            if not piece:
                raise EOFError(f"{len(data)} of {size} bytes")
            data += piece
        return data

    def frame(self) -> tuple[int, int, int, bytes]:
        """Type, status, id, payload."""
        size, kind, reserved, status, id_ = FRAME.unpack(self.receive(FRAME.size))
        assert reserved == 0
        return kind, status, id_, self.receive(size)

    def send(self, kind: int, payload: bytes) -> int:
        self._id += 1
        self.socket.sendall(FRAME.pack(len(payload), kind, 0, 0, self._id) + payload)
        return self._id

    def ask(self, kind: int, payload: bytes) -> bytes:
        """The answer; OSError with the daemon's status and message."""
        asked = self.send(kind, payload)
        answered, status, id_, answer = self.frame()
        assert (answered, id_) == (kind, asked)
        if status:
            raise OSError(-status, answer.decode())
        return answer

    def hung_up(self) -> bool:
        try:
            return self.socket.recv(1) == b""
        except ConnectionResetError:
            return True

    # ---- the beginning ----

    def refused(self) -> tuple[int, str]:
        kind, status, _, text = self.frame()
        assert kind == HELLO and status < 0 and self.hung_up()
        return -status, text.decode()

    def welcome(self) -> WireClient:
        kind, status, _, payload = self.frame()
        assert kind == HELLO and status == 0, (status, payload)
        (
            version, self.writable, self.uuid, self.epoch, self.secret, self.zone_size, self.stripe_unit, self.width,
            segments, devices, self.reservation_ms, _, _,
        ) = struct.unpack_from("<II16sQQQQIIIIII", payload)  # fmt: skip
        assert version == self.version
        self.zones_offset = struct.unpack_from(f"<{devices}Q", payload, 80)
        flat = struct.unpack_from(f"<{2 * segments * self.width}I", payload, 80 + 8 * devices)
        assert len(payload) == 80 + 8 * devices + 8 * segments * self.width
        places = list(zip(flat[::2], flat[1::2], strict=True))
        self.members = [places[i : i + self.width] for i in range(0, len(places), self.width)]
        while len(self.fds) < 1 + devices:
            head, fds, _, _ = socket.recv_fds(self.socket, FRAME.size, 128)
            assert FRAME.unpack(head)[:2] == (0, DESCRIPTORS) and fds
            self.fds += fds
        return self

    def pwrite(self, segment: int, page: int, data: bytes) -> None:
        """Write pages of a segment: striped over the devices."""
        memory = mmap.mmap(-1, len(data))
        memory[:] = data
        view, at = memoryview(memory), page * PAGE
        while len(view):
            unit, inside = divmod(at, self.stripe_unit)
            size = min(self.stripe_unit - inside, len(view))
            device, zone = self.members[segment][unit % self.width]
            offset = self.zones_offset[device] + zone * self.zone_size + unit // self.width * self.stripe_unit + inside
            assert os.pwrite(self.fds[1 + device], view[:size], offset) == size
            at += size
            view = view[size:]
        view.release()
        memory.close()

    # ---- requests ----

    def reserve(self, base: int, space: bytes, items: Sequence[tuple[bytes, int]]) -> list[Place]:
        payload = where(base, space, len(items)) + wanted(items)
        return places_in(self.ask(RESERVE, payload), len(items))

    def lease(self, inodes: Sequence[int], milliseconds: int = 60_000, lease: int = 0) -> tuple[int, bytes]:
        """The lease's number, and a byte for each inode."""
        answer = self.ask(LEASE, struct.pack(f"<QII{len(inodes)}Q", lease, milliseconds, 0, *inodes))
        assert len(answer) == 8 + len(inodes)
        return int.from_bytes(answer[:8], "little"), answer[8:]

    def release(self, lease: int) -> int:
        return int.from_bytes(self.ask(RELEASE, struct.pack("<Q", lease)), "little")

    def write(self, place: Place, content: bytes) -> None:
        parts = run_bytes(
            place.record, place.runs, place.header_pages, place.ancestors, content, self.secret, self.epoch
        )
        for run, part in zip(place.runs, parts, strict=True):
            self.pwrite(run.segment, run.page, part)

    def commit(self, items: Sequence[tuple[int, int]]) -> list[int]:
        payload = struct.pack("<Q", len(items)) + b"".join(struct.pack("<Qq", *item) for item in items)
        return array.array("q", self.ask(COMMIT, payload)).tolist()

    def put(self, base: int, space: bytes, blocks: dict[bytes, bytes]) -> list[int]:
        places = self.reserve(base, space, [(name, len(content)) for name, content in blocks.items()])
        for place, content in zip(places, blocks.values(), strict=True):
            assert place.error == 0, place
            self.write(place, content)
        return self.commit([(place.reservation, 0) for place in places])

    def delete(self, base: int, space: bytes, names: Sequence[bytes]) -> bytes:
        return self.ask(DELETE, where(base, space, len(names)) + b"".join(counted(name) for name in names))

    def list(self, base: int, space: bytes, after: bytes, count: int, flags: int = 0) -> list[bytes]:
        answer = self.ask(LIST, where(base, space, count, flags) + counted(after))
        (found,), at, names = struct.unpack_from("<Q", answer), 8, []
        for _ in range(found):
            (size,) = struct.unpack_from("<Q", answer, at)
            names.append(answer[at + 8 : at + 8 + size])
            at += 8 + len(padded(names[-1]))
        assert at == len(answer)
        return names


def where(base: int, space: bytes, count: int, flags: int = 0) -> bytes:
    return struct.pack("<QHHI", base, len(space), flags, count) + padded(space)


def table(directories: Sequence[bytes]) -> bytes:
    return struct.pack("<Q", len(directories)) + b"".join(map(counted, directories))


def wanted(items: Sequence[tuple[bytes, int]], directory: int = 0, parent: bytes = b"") -> bytes:
    """RESERVE's items: names and sizes, all in one directory of the table; and of each the 8 bytes about its parent."""
    return b"".join(struct.pack("<QII", size, len(name), directory) + parent + padded(name) for name, size in items)


def places_in(answer: bytes, count: int) -> list[Place]:
    """RESERVE's answer."""
    at, places = 0, []
    for _ in range(count):
        number, error, pages, run_count, record_size, ancestors_size, _ = struct.unpack_from("<QiIIIII", answer, at)
        at += 32
        runs = []
        for _ in range(run_count):
            generation, segment, page, page_count, _ = struct.unpack_from("<QIIII", answer, at)
            runs.append(Run(generation, SegmentIndex(segment), page, page_count))
            at += 24
        record = answer[at : at + record_size]
        at += len(padded(record))
        ancestors = answer[at : at + ancestors_size]
        at += len(padded(ancestors))
        places.append(Place(number, error, pages, runs, record, ancestors))
    assert at == len(answer)
    return places


def counted(name: bytes, directory: int = 0) -> bytes:
    """DELETE's item; and, with directory 0, whatever else is a size and so many bytes."""
    return struct.pack("<II", len(name), directory) + padded(name)
