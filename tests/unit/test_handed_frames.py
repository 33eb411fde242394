"""Frames of native clients that the data plane's thread has left to Python: what happens between the two."""

from __future__ import annotations

import errno
import socket
import struct
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
from client_double import BAD_BLOCK, COMMIT, RELEASE, REPORT, WireClient
from helpers import slowness
from kvfs._native import ffi
from store_pools import LAZY, make_pool, with_store

from kvfs.errors import KvfsError
from kvfs.frames import Commit
from kvfs.frontend import clients as clients_module
from kvfs.frontend.clients import Clients
from kvfs.frontend.told import TOTALS, Report
from kvfs.frontend.users import User
from kvfs.frontend.wire import Peer
from kvfs.namespace.files import Namespace
from kvfs.store.reservations import Holder
from kvfs.store.store import Store
from kvfs.types import ROOT_INODE, InodeNumber

SPACE = b"handed"
KEY = b"00aa"


class Paired(WireClient):
    """A client at the other end of a pair of sockets. What waits for an answer is called in a thread of its own."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket, self.fds, self.version, self._id = sock, [], 4, 0
        sock.settimeout(50 * slowness())
        sock.sendall(struct.pack("<8sIIII", b"KVFSCLI1", 4, 0, 50_000, 0))

    async def reserved(self, name: bytes = KEY) -> int:
        (place,) = await trio.to_thread.run_sync(self.reserve, ROOT_INODE, SPACE, [(name, 4096)])
        assert not place.error
        return place.reservation

    async def entered(self, name: bytes = KEY) -> None:
        number = await self.reserved(name)
        assert await trio.to_thread.run_sync(self.commit, [(number, 0)]) == [0]


def items(*of: tuple[int, int]) -> bytes:
    return struct.pack("<Q", len(of)) + b"".join(struct.pack("<Qq", *item) for item in of)


@asynccontextmanager
async def serving(store: Store) -> AsyncIterator[Callable[[], Awaitable[Paired]]]:
    """Connects a client."""
    clients = Clients(store, Namespace(store))
    made: list[Paired] = []

    async def serve(sock: socket.socket) -> None:
        stream = trio.SocketStream(trio.socket.from_stdlib_socket(sock))
        async with stream:
            await clients.serve(stream, b"", Peer.of(stream.socket))

    async def connect() -> Paired:
        ours, theirs = socket.socketpair()
        nursery.start_soon(serve, ours)
        made.append(Paired(theirs))
        await trio.to_thread.run_sync(made[-1].welcome)
        return made[-1]

    async with trio.open_nursery() as nursery:
        nursery.start_soon(clients.run)
        try:
            yield connect
        finally:
            for client in made:
                client.close()
            with trio.move_on_after(50 * slowness()):
                while clients.counters()["native_clients"]:
                    await trio.sleep(0.01)
            nursery.cancel_scope.cancel()


def served(path: Path, work: Callable[[Store, Callable[[], Awaitable[Paired]]], Awaitable[None]]) -> None:
    async def main(store: Store) -> None:
        with trio.fail_after(100 * slowness()):
            async with serving(store) as connect:
                await work(store, connect)

    with_store(make_pool(path / "pool"), main, LAZY)


def test_what_was_replaced_is_known_though_the_client_hangs_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(store: Store, connect: Callable[[], Awaitable[Paired]]) -> None:
        lingering: list[InodeNumber] = []
        told = 0
        client, other = await connect(), await connect()
        await client.entered()
        directory = store.index.lookup(ROOT_INODE, SPACE)
        assert directory is not None
        shard = store.index.lookup(directory, KEY[:2])
        assert shard is not None
        before = store.index.lookup(shard, KEY)
        number = await client.reserved()
        linger, tell_hosts = store.blocks.linger, store.blocks.tell_hosts

        def lingers(inode: InodeNumber) -> None:
            lingering.append(inode)
            linger(inode)

        def tell() -> None:
            nonlocal told
            told += 1
            tell_hosts()

        monkeypatch.setattr(store.blocks, "linger", lingers)
        monkeypatch.setattr(store.blocks, "tell_hosts", tell)
        client.send(COMMIT, items((number, 0)))
        client.socket.shutdown(socket.SHUT_RDWR)
        time.sleep(0.3 * slowness())  # both are handed on before Python looks
        await other.entered(b"00bb")
        assert store.index.lookup(shard, KEY) != before
        assert lingering == [before] and told

    served(tmp_path, work)


@pytest.mark.parametrize("error", [0, -errno.ECANCELED, -errno.EIO])
def test_a_reservation_that_another_commit_ends_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    """C's thread may have the second COMMIT in the moment in which Python enters the first one's block."""

    async def work(store: Store, connect: Callable[[], Awaitable[Paired]]) -> None:
        client = await connect()
        await client.entered(b"00bb")
        directory = store.index.lookup(ROOT_INODE, SPACE)
        assert directory is not None
        await store.blocks.pin(directory)  # C leaves what lies below
        number = await client.reserved()
        take_in, left = store.reservations.take_in, 0

        def meanwhile(holder: Holder, frame: Commit) -> bool:
            nonlocal left
            replaced = take_in(holder, frame)
            left += frame.told.block != ffi.NULL
            if left == 2:  # when it was handed on, and now that Python has asked again
                left += 1
                client.send(COMMIT, items((number, error)))
                time.sleep(0.3 * slowness())
            return replaced

        monkeypatch.setattr(store.reservations, "take_in", meanwhile)
        first = client.send(COMMIT, items((number, 0)))
        answers = {}
        for _ in range(2):
            kind, status, asked, answer = await trio.to_thread.run_sync(client.frame)
            assert (kind, status) == (COMMIT, 0)
            (answers[asked],) = struct.unpack("<q", answer)
        assert left == 3 and answers == {first: 0, first + 1: -errno.ETIMEDOUT}

    served(tmp_path, work)


@pytest.mark.parametrize("kind", [REPORT, RELEASE])
def test_a_frame_at_which_the_daemon_fails_ends_one_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: int
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError

    async def work(store: Store, connect: Callable[[], Awaitable[Paired]]) -> None:
        client, other = await connect(), await connect()
        with monkeypatch.context() as patch:
            if kind == REPORT:
                patch.setitem(clients_module._REQUESTS, kind, clients_module._Request(hear=fail))
            else:
                patch.delitem(clients_module._REQUESTS, kind)
            client.send(kind, bytes(512 if kind == REPORT else 8))
            assert await trio.to_thread.run_sync(client.hung_up)
        await other.entered()

    served(tmp_path, work)


def test_totals_that_a_client_tells_before_it_hangs_up_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though its user has no turn until then."""
    taken: list[Sequence[int]] = []

    async def work(store: Store, connect: Callable[[], Awaitable[Paired]]) -> None:
        client = await connect()
        for i in range(3):
            client.send(REPORT, bytes(8 * TOTALS) + struct.pack("<Q", i))
        client.send(BAD_BLOCK, bytes(16))
        client.socket.shutdown(socket.SHUT_RDWR)
        while not taken:
            await trio.sleep(0.01)
        assert [told[TOTALS] for told in taken] == [2]

    monkeypatch.setattr(User, "may_begin", False)
    monkeypatch.setattr(Report, "take", lambda self, told, user, now_s: taken.append(told))
    served(tmp_path, work)


def test_a_handed_request_has_an_error_that_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(store: Store, connect: Callable[[], Awaitable[Paired]]) -> None:
        client = await connect()

        async def fail(*_: object) -> bytes:
            error = KvfsError("what it is")
            error.errno = 1 << 20
            raise error

        monkeypatch.setitem(clients_module._REQUESTS, RELEASE, clients_module._Request(fail))
        with pytest.raises(OSError, match="what it is") as caught:
            await trio.to_thread.run_sync(client.release, 1)
        assert caught.value.errno == errno.EIO

    served(tmp_path, work)
