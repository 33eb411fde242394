"""Native clients that are cheap to run and mean to cost much. They speak the protocol on raw sockets, so these tests
hold for whatever answers there. They count where they can, and measure no time."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from client_double import COMMIT, DELETE, FRAME, LIST, RESERVE, WireClient, counted, wanted, where
from helpers import REPOSITORY, Pool

BLOCK = 1 << 20


def frame(kind: int, payload: bytes, number: int = 1) -> bytes:
    return FRAME.pack(len(payload), kind, 0, 0, number) + payload


def base_of(pool: Pool) -> int:
    return os.stat(pool.mount).st_ino


def pid_of(pool: Pool) -> int:
    return int((pool.path / "kvfs.pid").read_text())


# ---- memory that C is lent ----


@pytest.fixture(scope="module")
def eager_pool() -> Iterator[Pool]:
    """Its daemon collects garbage at every chance."""
    with Pool(files=2, size="256M", program=(REPOSITORY / "tests/eager_gc.py",)) as pool:
        yield pool


@pytest.mark.parametrize("how", ["a frame that is none", "the end"])
def test_clients_that_leave_with_requests_under_way_end_no_daemon(eager_pool: Pool, how: str) -> None:
    """Their requests are cancelled, and what C was lent for them is garbage in a cycle."""
    base, daemon = base_of(eager_pool), pid_of(eager_pool)
    names = [b"%04x" % i for i in range(100)]
    for number in range(25):
        with WireClient(eager_pool.path).welcome() as client, suppress(ConnectionError):
            asked = where(base, b"gc%d" % (number % 4), len(names))
            # Beyond what may be reserved: these wait.
            for i in range(4):
                client.socket.sendall(frame(RESERVE, asked + wanted([(name, BLOCK) for name in names]), i))
            client.socket.sendall(frame(DELETE, asked + b"".join(map(counted, names)), 5))
            client.socket.sendall(frame(COMMIT, struct.pack("<Q", 1) + struct.pack("<Qq", 7, 0), 6))
            client.socket.sendall(frame(LIST, where(base, b"gc1", 100) + counted(b""), 7) * 20)
            client.frame()
            if how != "the end":
                client.socket.sendall(frame(77, b""))
                while client.socket.recv(1 << 16):
                    pass
        assert Path(f"/proc/{daemon}").exists(), f"the daemon died in round {number}"
    (eager_pool.mount / "alive").write_bytes(b"alive")
    assert (eager_pool.mount / "alive").read_bytes() == b"alive" and pid_of(eager_pool) == daemon
