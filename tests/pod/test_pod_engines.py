"""Engines' storage clients on the nodes of a pod: what one stores on a node is looked up and loaded on another.

Clients of files are those of tests/engines, unchanged: `tools/setup-clients` brings them in, and one that is not there
is a skip by its name. The connection under the connectors is tested without them. The connectors in real engines on a
pod are in tests/connectors/test_pod_connectors.py.
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Callable, Iterator, Sequence

import pytest
from file_clients import CASES, COUNT, MISSES, Player, store
from helpers import MIB, content, requires_fuse, requires_root, wait_until
from podmounts import NEWS_S, Node, Pod, settle

import kvfs
from kvfs.connectors.common import Connection, Done, options_of
from kvfs.connectors.leases import Leases

BLOCKS = list(range(COUNT))
KEYS = [b"block %d" % i for i in range(8)]
SIZE = MIB // 4

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def pod() -> Iterator[Pod]:
    requires_root()
    requires_fuse()
    with Pod(nodes=2, size="512M") as started:
        settle(started.nodes)
        yield started


# ---- clients of files ----


def loaded(player: Player, blocks: Sequence[int]) -> list[bool]:
    """Which of these blocks are loaded. Bytes of another block or version are an error at once."""
    results = player.ask("load", blocks)
    for block, result in zip(blocks, results, strict=True):
        assert result == "same" or result in MISSES, f"block {block}: {result!r}: {player.tail()}"
    return [result == "same" for result in results]


def come(player: Player, blocks: Sequence[int]) -> None:
    """Wait for the news of these blocks: then each look-up finds it, and each load has its bytes."""
    wait_until(lambda: all(player.ask("lookup", blocks)), f"blocks {blocks} on the other node", timeout_s=NEWS_S)
    assert all(loaded(player, blocks)), player.tail()


def gone(player: Player, block: int) -> None:
    wait_until(lambda: player.ask("lookup", [block]) == [False], f"the end of block {block}", timeout_s=NEWS_S)
    assert loaded(player, [block]) == [False]


# Those that believe their own memory about what is there ask no files for what others have stored.
ASKING = [name for name, case in CASES.items() if not case.index]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name.startswith("vllm") else pytest.mark.slow) for name in ASKING]
)
def test_an_engine_loads_what_the_same_engine_stored_on_another_node(
    pod: Pod, tmp_path: pathlib.Path, name: str
) -> None:
    players: list[Player] = []
    try:
        for node in pod.nodes:
            home = tmp_path / f"home{node.number}"
            home.mkdir()
            players.append(Player(CASES[name], node.mount / name, home))
        for player in players:
            assert player.answer() == "ready", player.tail()
        here, there = players
        assert loaded(there, BLOCKS) == [False] * COUNT
        store(here, BLOCKS)
        come(there, BLOCKS)
        store(there, range(20, 24))
        come(here, range(20, 24))

        # One is removed, and stored anew with other bytes.
        (path,) = here.ask("files", [1])
        os.unlink(path)
        gone(there, 1)
        come(there, [0, *BLOCKS[2:]])
        for player in players:
            player.ask("version", [1])
        store(here, [1])
        come(there, [1])

        # The other node may remove it as well. A directory is listed with its own node's names alone: no engine there
        # is asked for the path.
        (path,) = here.ask("files", [2])
        os.unlink(pod.nodes[1].mount / pathlib.Path(path).relative_to(pod.nodes[0].mount))
        gone(here, 2)
        store(there, [2])
        come(here, [2])

        # One is stored over. Some engines keep what is there; the other node tells the same as this one. Some write
        # under the final name, and have a miss before the new bytes.
        store(here, [3])
        is_new = here.ask("load", [3])[0]
        assert is_new in ("same", "wrong"), is_new

        def agree() -> bool:
            seen = there.ask("load", [3])[0]
            assert seen in ("same", "wrong") or (CASES[name].stumps and seen in MISSES), seen
            return bool(seen == is_new)

        wait_until(agree, "the block that was stored over, on the other node", timeout_s=NEWS_S)
        for player in players:
            player.ask("version", [0])
        assert loaded(there, BLOCKS[4:]) == [True] * 4
        for player in players:
            player.end()
    finally:
        for player in players:
            player.stop()


# ---- what the connectors rest on ----


@pytest.fixture
def connect(request: pytest.FixtureRequest) -> Iterator[Callable[[Node], Connection]]:
    """connect(node) is a connection in the test's namespace; closed at the end."""
    opened: list[Connection] = []

    def connect(node: Node) -> Connection:
        options = options_of("test", {"mount": str(node.mount), "timeout_s": 20.0})
        opened.append(Connection(options, request.node.name, engine="test"))
        assert opened[-1].state.value == "up", opened[-1].reason
        return opened[-1]

    yield connect
    for connection in opened:
        connection.close()


def items(*, keys: Sequence[bytes] = KEYS, version: int | None = None) -> list[tuple[bytes, memoryview]]:
    """Memory for each key; with a version, filled."""
    memories = [kvfs.Client.buffer(SIZE) for _ in keys]
    for i, memory in enumerate(memories):
        if version is not None:
            memory[:] = content(SIZE, 1000 * version + i)
    return list(zip(keys, memories, strict=True))


def bytes_of(given: Sequence[tuple[bytes, memoryview]]) -> list[bytes]:
    return [bytes(memory) for _, memory in given]


def finished(connection: Connection, ticket: int) -> Done:
    assert connection.wait(20)
    (done,) = connection.drain()
    assert done.ticket == ticket
    return done


def shared(here: Connection, there: Connection, version: int = 1) -> list[tuple[bytes, memoryview]]:
    """Blocks that the one stored and the other has heard of."""
    stored = items(version=version)
    assert here.put(stored) == [True] * 8
    wait_until(lambda: there.exists(KEYS) == [True] * 8, "the blocks on the other node", timeout_s=NEWS_S)
    return stored


def test_a_connection_reads_what_another_nodes_stored(pod: Pod, connect: Callable[[Node], Connection]) -> None:
    here, there = map(connect, pod.nodes)
    assert there.exists(KEYS) == [False] * 8 and there.exists_prefix(KEYS) == 0
    stored = shared(here, there)
    assert there.exists_prefix([*KEYS, b"none"]) == 8
    assert there.exists_prefix([*KEYS[:3], b"none", *KEYS[3:]]) == 3
    assert there.sizes([*KEYS, b"none"]) == [SIZE] * 8 + [None]
    read = items()
    assert there.get_into([*read, (b"none", bytearray(9))]) == [SIZE] * 8 + [None]
    assert bytes_of(read) == bytes_of(stored)
    read = items()
    assert finished(there, there.submit_get(read)).results == [SIZE] * 8
    assert bytes_of(read) == bytes_of(stored)
    assert finished(there, there.submit_exists([*KEYS, b"none"])).results == [True] * 8 + [False]
    parts = [bytearray(1000), bytearray(5000), bytearray(10)]
    wanted = list(zip((KEYS[0], KEYS[1], b"none"), (0, 12_345, 0), parts, strict=True))
    assert there.get_ranges(wanted) == [1000, 5000, None]
    assert parts[0] == stored[0][1][:1000] and parts[1] == stored[1][1][12_345:17_345]
    counted = there.counters
    assert (counted.loaded, counted.failed_loads, counted.stored) == (8 + 8 + 2, 1 + 1, 0)


def test_a_connection_does_not_store_again_what_another_nodes_stored(
    pod: Pod, connect: Callable[[Node], Connection]
) -> None:
    here, there = map(connect, pod.nodes)
    stored, others = shared(here, there), items(version=2)
    assert there.put(others) == [True] * 8
    assert finished(there, there.submit_put(others)).results == [True] * 8
    assert (there.counters.present, there.counters.stored) == (16, 0)
    for connection in (here, there):
        read = items()
        assert connection.get_into(read) == [SIZE] * 8
        assert bytes_of(read) == bytes_of(stored), "the first stays"


def test_a_connection_replaces_and_deletes_what_another_nodes_stored(
    pod: Pod, connect: Callable[[Node], Connection]
) -> None:
    here, there = map(connect, pod.nodes)
    stored, others = shared(here, there), items(version=2)
    assert there.put(others[:2], if_absent=False) == [True] * 2
    assert there.counters.stored == 2

    def replaced() -> bool:
        read = items()
        assert here.get_into(read) == [SIZE] * 8
        found = bytes_of(read)
        assert all(found[i] in (bytes(stored[i][1]), bytes(others[i][1])) for i in range(8))
        return found == bytes_of([*others[:2], *stored[2:]])

    wait_until(replaced, "the new blocks on the first node", timeout_s=NEWS_S)
    assert here.delete([KEYS[3]]) == [True]
    wait_until(lambda: there.exists_prefix(KEYS) == 3, "the end of a block", timeout_s=NEWS_S)
    assert there.delete([KEYS[1], KEYS[5]]) == [True, True]
    kept = [True, False, True, False, True, False, True, True]
    assert there.exists(KEYS) == kept
    wait_until(lambda: here.exists(KEYS) == kept, "the end of blocks that the other node deleted", timeout_s=NEWS_S)


def test_a_connection_leases_what_another_nodes_stored(pod: Pod, connect: Callable[[Node], Connection]) -> None:
    here, there = map(connect, pod.nodes)
    stored = shared(here, there)
    leases = Leases(there, 60)
    owner = pod.nodes[0]
    taken = 0

    def held() -> bool:
        """An owner is given 50 ms for an answer, which a busy machine may need more than."""
        nonlocal taken
        taken += 1
        leases.take(KEYS)
        return bool(owner.status()["counters"]["leased_blocks"] == 8)

    wait_until(held, "the leases at the owner", timeout_s=NEWS_S)
    owner.command("evict", str(owner.path), "--all")
    read = items()
    assert there.get_into(read) == [SIZE] * 8
    assert bytes_of(read) == bytes_of(stored)
    for _ in range(taken):
        leases.give_back(KEYS)

    def evicted() -> bool:
        owner.command("evict", str(owner.path), "--all")
        return there.exists(KEYS) == [False] * 8

    wait_until(evicted, "the end of blocks that nobody leases", timeout_s=NEWS_S)
    assert there.get_into(items()) == [None] * 8
