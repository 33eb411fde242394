"""A network that fails in part: three nodes, an engine and an NVMe/TCP enclosure in network namespaces of their own."""

from __future__ import annotations

import os
import pathlib
import sys
from collections.abc import Iterator

import pytest
from enclosure import NQN, Enclosure
from helpers import requires_fuse, requires_root, run, wait_until
from podmounts import Network, Node, Pod, all_calls, block, found, settle, stored, timed

BACK_S = 40.0
# A call of a node whose devices give no answer: its deadline, and that of the device.
AWAY_S = 20.0


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pod]:
    requires_root()
    requires_fuse()
    files = [tmp_path_factory.mktemp("enclosure") / f"device{i}" for i in range(4)]
    for file in files:
        file.touch()
        os.truncate(file, 256 << 20)
    with (
        Network(3) as network,
        Enclosure({NQN: files}, host=network.enclosure, inside=network.hub) as enclosure,
        Pod(nodes=3, network=network, addresses=[f"nvme-tcp://{network.enclosure}:{enclosure.port}"]) as pod,
    ):
        yield pod


@pytest.fixture
def network(shared: Pod) -> Network:
    assert shared.network is not None
    return shared.network


@pytest.fixture
def pod(shared: Pod) -> Pod:
    """A pod in which all is well."""
    settle(shared.nodes, BACK_S)
    return shared


def fresh(node: Node) -> str:
    """By a client at the node; the error's text, or nothing."""
    script = "import sys, kvfs\nwith kvfs.connect(sys.argv[1], gpu=None, timeout_s=20) as c: c.fresh()"
    done = run(*node.inside, sys.executable, "-c", script, node.path, check=False, timeout_s=30)
    return done.stderr if done.returncode else ""


def content(path: pathlib.Path) -> bytes | None:
    """A miss, of whatever kind, is None."""
    try:
        return path.read_bytes()
    except OSError:
        return None


def test_an_engine_that_one_node_cannot_reach(pod: Pod, network: Network) -> None:
    a, b, c = pod.nodes
    stored(a, "before", block(1))
    for node in (b, c):
        found(node.mount / "before", block(1))
    with network.cut(network.engine, b.number):
        wait_until(lambda: b.part()["engines"][0]["state"] == "away", "the engine to be away at node 1", timeout_s=20)
        stored(a, "of-a", block(2))
        stored(b, "of-b", block(3))
        stored(c, "of-c", block(4))
        # The others hear of one another as before.
        found(c.mount / "of-a", block(2))
        found(a.mount / "of-c", block(4))
        for node in pod.nodes:
            all_calls(node, "partition")
        assert (b.mount / "before").read_bytes() == block(1) and (b.mount / "of-b").read_bytes() == block(3)
        assert "redis" in fresh(b)
        # Once it gives no more sign of life, it is not waited for.
        wait_until(lambda: not fresh(a), "news of all who live", timeout_s=20)
        # As a rule the block of the node without an engine is not known; but its flash may have been read.
        assert content(a.mount / "of-b") in (None, block(3))
    found(b.mount / "of-a", block(2), BACK_S)
    found(b.mount / "of-c", block(4), BACK_S)
    for node in (a, c):
        found(node.mount / "of-b", block(3), BACK_S)
    wait_until(lambda: not fresh(b), "all news at node 1", timeout_s=20)


@pytest.mark.slow
def test_an_enclosure_that_one_node_cannot_reach(pod: Pod, network: Network) -> None:
    a, b, c = pod.nodes
    names = [f"enclosure-{i}" for i in range(6)]
    for i, name in enumerate(names):
        stored(a, name, block(i))
    for node in (b, c):
        for i, name in enumerate(names[:3]):
            found(node.mount / name, block(i))
    for name in names[3:]:
        wait_until((b.mount / name).exists, name, timeout_s=20)
    with network.cut(network.enclosure, b.number):
        for name in names[3:]:
            with timed(AWAY_S, f"a read of {name} at node 1"):
                assert content(b.mount / name) is None, "there was no way to it"
        # Hits elsewhere, and new ones.
        for i, name in enumerate(names):
            found(c.mount / name, block(i))
        stored(c, "enclosure-new", block(9))
        found(a.mount / "enclosure-new", block(9))
        with timed(AWAY_S, "names of node 1"):
            assert not (b.mount / "enclosure-none").exists()
            assert "enclosure" not in os.listdir(b.mount)

    def back(i: int, name: str) -> bool:
        data = content(b.mount / name)
        assert data in (None, block(i)), f"{name}: {len(data or b'')} bytes that were never stored under this name"
        return data is not None

    # The devices are back a second or two later, and what failed meanwhile is read again at once.
    with timed(20, "the way back"):
        for i, name in [*enumerate(names), (9, "enclosure-new")]:
            wait_until(lambda i=i, name=name: back(i, name), f"{name} at node 1", timeout_s=20)
    stored(b, "enclosure-own", block(10))
    found(c.mount / "enclosure-own", block(10), BACK_S)
