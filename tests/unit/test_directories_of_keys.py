"""A connection of a native client, in one process with its store: what it remembers of directories, and its end."""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence
from pathlib import Path

import pytest
import trio
from client_double import padded, places_in, wanted, where
from store_pools import LAZY, make_pool, with_store

from kvfs.frontend import clients
from kvfs.frontend.clients import Clients
from kvfs.frontend.wire import Peer
from kvfs.namespace.files import Changes, Namespace
from kvfs.record import Inode
from kvfs.store.store import Store
from kvfs.types import ROOT_INODE, InodeNumber


class Connection:
    """One connection that says nothing: its requests are called."""

    def __init__(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        self.store, self.namespace = store, Namespace(store)
        self.walks = 0
        self.inodes: dict[int, Inode] = {}
        self.ours, self.theirs = socket.socketpair()
        stream = trio.SocketStream(trio.socket.from_stdlib_socket(self.ours))
        self.clients = Clients(store, self.namespace)
        self.connection = clients._Connection(self.clients, store, self.namespace, stream, b"", Peer.of(stream.socket))
        self.connection._holder = self.holder = store.reservations.join()
        self.connection._timeout_s = 50.0
        # Turns are those of users, who have none here.
        monkeypatch.setattr(self.connection, "_pause", trio.lowlevel.checkpoint)
        self._walk = self.namespace.make_directories
        monkeypatch.setattr(self.namespace, "make_directories", self._count)

    def close(self) -> None:
        self.store.reservations.take_back_all(self.holder)
        self.connection.end()
        self.ours.close()
        self.theirs.close()

    def _count(self, number: InodeNumber, path: Sequence[bytes], *args: int) -> object:
        self.walks += 1
        return self._walk(number, path, *args)

    async def reserve(self, *keys: bytes, space: bytes = b"model") -> list[int]:
        """The numbers of reservations, in order."""
        frame = where(ROOT_INODE, space, len(keys)) + wanted([(key, 4096) for key in keys])
        places = places_in(await self.connection.reserve(frame), len(keys))
        self.inodes |= {place.reservation: Inode.unpack(place.record) for place in places}
        return [place.reservation for place in places]

    def place(self, number: int) -> Inode:
        return self.inodes[number]


def test_directories_of_keys_are_looked_up_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(store: Store) -> None:
        connection = Connection(store, monkeypatch)
        first = await connection.reserve(b"aa00", b"aa01", b"bb00")
        walks = connection.walks
        assert walks
        second = await connection.reserve(b"aa02", b"bb01")
        assert connection.walks == walks
        places = [connection.place(number) for number in (*first, *second)]
        assert places[0].parent == places[1].parent == places[3].parent
        assert places[2].parent == places[4].parent != places[0].parent
        await connection.reserve(b"aa03", space=b"other")
        assert connection.walks > walks
        connection.close()

    with_store(make_pool(tmp_path / "pool"), work, LAZY)


@pytest.mark.parametrize("change", ["rename", "rename above", "remove", "replace", "group"])
def test_directories_of_keys_are_looked_up_again_after_a_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    async def work(store: Store) -> None:
        connection = Connection(store, monkeypatch)
        namespace = connection.namespace
        (number,) = await connection.reserve(b"aa00")
        old = connection.place(number).parent
        model = namespace.lookup(ROOT_INODE, b"model").inode
        if change == "rename":
            namespace.rename(model, b"aa", ROOT_INODE, b"moved")
        elif change == "rename above":
            namespace.rename(ROOT_INODE, b"model", ROOT_INODE, b"moved")
        elif change == "remove":
            namespace.rmdir(model, b"aa")
        elif change == "replace":
            namespace.open_directory(old)  # it stays, without a name
            namespace.mkdir(ROOT_INODE, b"new", 0o755, 0, 0)
            namespace.rename(ROOT_INODE, b"new", model, b"aa")
        else:
            await namespace.setattr(old, Changes(mode=0o2755, gid=4711))
        (number,) = await connection.reserve(b"aa01")
        place = connection.place(number)
        assert place.parent == namespace.lookup(namespace.lookup(ROOT_INODE, b"model").inode, b"aa").inode
        assert (place.parent == old) == (change == "group")
        assert (place.gid == 4711) == (change == "group")
        connection.close()

    with_store(make_pool(tmp_path / "pool"), work, LAZY)


def test_a_connection_remembers_a_bounded_number_of_directories(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clients, "SPACES_MAX", 2)

    async def work(store: Store) -> None:
        connection = Connection(store, monkeypatch)
        for space in (b"one", b"two", b"three"):
            await connection.reserve(b"aa00", space=space)
        walks = connection.walks
        await connection.reserve(b"aa01", space=b"two")
        await connection.reserve(b"aa01", space=b"three")
        assert connection.walks == walks
        await connection.reserve(b"aa01", space=b"one")
        assert connection.walks > walks
        connection.close()

    with_store(make_pool(tmp_path / "pool"), work, LAZY)


def test_a_put_under_a_name_that_was_evicted_is_seen_by_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(store: Store) -> None:
        connection = Connection(store, monkeypatch)
        told = 0

        def tell() -> None:
            nonlocal told
            told += 1

        monkeypatch.setattr(store.plane, "notify_epoch", tell)
        for evicted in (False, True):
            (number,) = await connection.reserve(b"aa0%d" % evicted)
            inode = connection.place(number)
            if evicted:
                store.blocks.names.untold(inode.parent, inode.name)
            answer = await connection.connection.commit(struct.pack("<QQq", 1, number, 0))
            assert answer == bytes(8) and told == evicted
        connection.close()

    with_store(make_pool(tmp_path / "pool"), work, LAZY)


def test_hosts_are_told_of_a_removal_though_its_client_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(store: Store) -> None:
        connection = Connection(store, monkeypatch)
        told: list[int] = []
        monkeypatch.setattr(store.plane, "notify_epoch", lambda: told.append(1))
        keys = [b"aa%02x" % i for i in range(100)]
        numbers = await connection.reserve(*keys)
        items = b"".join(struct.pack("<Qq", number, 0) for number in numbers)
        assert await connection.connection.commit(struct.pack("<Q", len(numbers)) + items) == bytes(8 * len(keys))
        assert not told
        names = b"".join(struct.pack("<Q", len(key)) + padded(key) for key in keys)
        with trio.CancelScope() as gone:
            gone.cancel()
            await connection.connection.delete(where(ROOT_INODE, b"model", len(keys)) + names)
        assert gone.cancelled_caught
        left = [key for key in keys if store.plane.table_find_name(connection.place(numbers[0]).parent, key)]
        assert 0 < len(left) < len(keys) and told
        connection.close()

    with_store(make_pool(tmp_path / "pool"), work, LAZY)


def test_an_end_beside_a_peer_that_does_not_take_its_descriptors_is_clean(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(store: Store) -> None:
        of = Connection(store, monkeypatch)
        of.clients._connections.add(of.connection)
        of.ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        with trio.fail_after(30):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(of.connection.welcome, True)
                while not trio.lowlevel.current_statistics().io_statistics.tasks_waiting_write:
                    await trio.sleep(0.01)
                with pytest.raises(BlockingIOError):
                    while True:
                        of.ours.send(bytes(64))
                await of.clients.close()
                nursery.cancel_scope.cancel()
        of.close()

    with_store(make_pool(tmp_path / "pool"), work)
