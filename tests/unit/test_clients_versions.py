"""A client of the protocol's version 2 at a daemon of version 3: an engine that was not upgraded works as before.

Version2 is a recorded double of the older client. Its frames are written down here as version 2 has them: they do not
follow what later versions make of them.
"""

from __future__ import annotations

import array
import os
import struct
from collections.abc import Iterator, Sequence

import pytest
from client_double import FRAME, Place, Run, WireClient
from helpers import Pool, wait_until

from kvfs.types import SegmentIndex

SPACE = b"team/llama"


class Version2(WireClient):
    """Says the hello of version 2, and speaks its frames and no other."""

    def __init__(self, pool: Pool) -> None:
        super().__init__(pool.path, version=2)

    def reserve(self, base: int, space: bytes, items: Sequence[tuple[bytes, int]]) -> list[Place]:
        request = struct.pack("<QII", base, len(space), len(items)) + _padded(space)
        for name, size in items:
            request += struct.pack("<QII", size, len(name), 0) + _padded(name)
        answer = self.ask(3, request)
        places, at = [], 0
        for _ in items:
            number, error, pages, runs, record_size, ancestors_size, _ = struct.unpack_from("<QiIIIII", answer, at)
            at += 32
            found = []
            for _ in range(runs):
                generation, segment, page, page_count, _ = struct.unpack_from("<QIIII", answer, at)
                found.append(Run(generation, SegmentIndex(segment), page, page_count))
                at += 24
            record = answer[at : at + record_size]
            at += len(_padded(record))
            ancestors = answer[at : at + ancestors_size]
            at += len(_padded(ancestors))
            places.append(Place(number, error, pages, found, record, ancestors))
        assert at == len(answer)
        return places

    def commit(self, items: Sequence[tuple[int, int]]) -> list[int]:
        request = struct.pack("<Q", len(items)) + b"".join(struct.pack("<Qq", *item) for item in items)
        return array.array("q", self.ask(4, request)).tolist()

    def delete(self, base: int, space: bytes, names: Sequence[bytes]) -> bytes:
        request = struct.pack("<QII", base, len(space), len(names)) + _padded(space)
        return self.ask(5, request + b"".join(struct.pack("<Q", len(name)) + _padded(name) for name in names))

    def list(self, base: int, space: bytes, after: bytes, count: int) -> list[bytes]:
        request = struct.pack("<QII", base, len(space), count) + _padded(space)
        answer = self.ask(6, request + struct.pack("<Q", len(after)) + _padded(after))
        (found,), at, names = struct.unpack_from("<Q", answer), 8, []
        for _ in range(found):
            (size,) = struct.unpack_from("<Q", answer, at)
            names.append(answer[at + 8 : at + 8 + size])
            at += 8 + (size + 7 & ~7)
        assert at == len(answer)
        return names

    def lookup(self, parent: int, name: bytes) -> bytes:
        return self.ask(7, struct.pack("<QQ", parent, len(name)) + name)


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 8)


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    if not os.path.exists("/dev/fuse"):
        pytest.skip("no /dev/fuse")
    with Pool(files=2, size="256M") as pool:
        yield pool


def test_a_client_of_version_2_stores_finds_and_deletes_as_it_always_did(pool: Pool) -> None:
    base = os.stat(pool.mount).st_ino
    blocks = {b"%02x%030x" % (i * 50, i): os.urandom(5000 + 70_000 * i) for i in range(5)}
    with Version2(pool) as client:
        client.welcome()
        assert client.put(base, SPACE, blocks) == [0] * 5
        assert client.list(base, SPACE, b"", 10) == sorted(blocks)
        for name, content in blocks.items():
            path = pool.mount / os.fsdecode(SPACE) / os.fsdecode(name[:2]) / os.fsdecode(name)
            assert path.read_bytes() == content
            assert client.lookup(os.stat(path.parent).st_ino, name)
        assert client.delete(base, SPACE, [*blocks, b"00" * 16]) == bytes([1] * 5 + [0])
        assert client.list(base, SPACE, b"", 10) == []
        # Those without an answer: hits, and a report of what that version counts, `busy` last.
        client.send(9, struct.pack("<Q", base))
        before = pool.status()["counters"]["native_hits"]
        client.send(10, struct.pack("<17Q", 1, 2, *[0] * 14, 1))
        wait_until(lambda: pool.status()["counters"]["native_hits"] == before + 2, "the report to be counted")
    wait_until(lambda: pool.status()["counters"]["native_clients"] == 0, "the end of the connection")


@pytest.mark.parametrize("kind", [12, 13, 14])
def test_a_client_of_version_2_that_sends_what_only_version_3_has_is_hung_up_on(pool: Pool, kind: int) -> None:
    with Version2(pool) as client:
        client.welcome()
        client.socket.sendall(FRAME.pack(8, kind, 0, 0, 1) + bytes(8))
        assert client.hung_up()
    with Version2(pool) as client:
        client.welcome()


@pytest.mark.parametrize("version", [0, 1, 4, 2**32 - 1])
def test_a_version_further_away_is_refused_with_both_named(pool: Pool, version: int) -> None:
    with WireClient(pool.path, version=version) as client:
        number, text = client.refused()
        assert number == 71  # EPROTO
        assert "version 3" in text and "serves version 2" in text and text.endswith(f"the client speaks {version}")
