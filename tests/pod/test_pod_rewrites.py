"""A block that its node writes again in place while another node unlinks or stores its name: the names agree.

The news may come while only the handle is open, and the seal is done. So each case here has the handle open when they
come; `race` finds the moments in between.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import pytest
from helpers import often, requires_fuse, requires_root, wait_until
from podmounts import NEWS_S, Node, Pod, block, found, settle, stored, written_in_place

import kvfs

SIZE = 8192


@pytest.fixture(scope="module")
def pod() -> Iterator[Pod]:
    requires_root()
    requires_fuse()
    with Pod(nodes=3) as started:
        settle(started.nodes)
        yield started


@pytest.fixture
def here(pod: Pod, request: pytest.FixtureRequest) -> str:
    """The name of a directory that all nodes know."""
    name = request.node.name.replace("[", "-").replace("]", "")
    (pod.nodes[0].mount / name).mkdir()
    for node in pod.nodes[1:]:
        wait_until((node.mount / name).is_dir, f"{name} at node {node.number}", timeout_s=30)
    return name


def content(path: pathlib.Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def unlink(node: Node, name: str, data: bytes) -> None:
    (node.mount / name).unlink()


def rename(node: Node, name: str, data: bytes) -> None:
    stored(node, name, data)


def in_place(node: Node, name: str, data: bytes) -> None:
    written_in_place(node.mount / name, data)


def put(node: Node, name: str, data: bytes) -> None:
    with kvfs.connect(node.path, paths=True) as client:
        client.put([(name, data)])


def agree(nodes: Sequence[Node], name: str, wanted: bytes | None) -> None:
    def same() -> bool:
        return all(content(node.mount / name) == wanted for node in nodes)

    wait_until(same, f"{name} as it was changed last, on every node", timeout_s=NEWS_S)


@pytest.mark.parametrize("change", [unlink, rename, in_place, put])
@pytest.mark.parametrize("writes", [True, False], ids=["sealed-again", "unchanged"])
def test_a_change_by_another_node_while_only_the_handle_is_open(
    pod: Pod, here: str, writes: bool, change: Callable[[Node, str, bytes], None]
) -> None:
    a, b, _ = pod.nodes
    name, first, second, third = f"{here}/a", block(1, SIZE), block(2, SIZE), block(3, SIZE)
    stored(a, name, first)
    found(b.mount / name, first)
    handle = os.open(a.mount / name, os.O_RDWR | (os.O_TRUNC if writes else 0))
    try:
        if writes:
            os.write(handle, second)
            os.close(os.dup(handle))  # which seals it; the file is open for writing still
            wait_until(lambda: content(b.mount / name) == second, "what was written again", timeout_s=NEWS_S)
        heard = a.part()["conflicts"]
        change(b, name, third)
        wait_until(lambda: a.part()["conflicts"] > heard, "the news at the writer's node", timeout_s=NEWS_S)
    finally:
        os.close(handle)
    agree(pod.nodes, name, None if change is unlink else third)


def test_a_write_after_the_news_is_the_later_store(pod: Pod, here: str) -> None:
    a, b, _ = pod.nodes
    name = f"{here}/a"
    stored(a, name, block(1, SIZE))
    found(b.mount / name, block(1, SIZE))
    with (a.mount / name).open("r+b", buffering=0) as opened:
        heard = a.part()["conflicts"]
        stored(b, name, block(2, SIZE))
        wait_until(lambda: a.part()["conflicts"] > heard, "the news at the writer's node", timeout_s=NEWS_S)
        opened.write(block(3, SIZE))
    agree(pod.nodes, name, block(3, SIZE))


def _race(pod: Pod, here: str, writer: Callable[[Node, str, bytes], None], other: Callable[[Node, str, bytes], None],
          rounds: int) -> None:  # fmt: skip
    """Two nodes change one name within some ms of one another, again and again."""
    a, b, _ = pod.nodes
    dice = random.Random(5)
    for round_ in range(rounds):
        name = f"{here}/{round_}"
        stored(a, name, block(3 * round_, SIZE))
        found(b.mount / name, block(3 * round_, SIZE))
        barrier = threading.Barrier(2)

        def late(node: Node, change: Callable[[Node, str, bytes], None], data: bytes, delay_s: float) -> None:
            barrier.wait()  # noqa: B023 - ended within the round
            time.sleep(delay_s)
            with contextlib.suppress(FileNotFoundError):
                change(node, name, data)  # noqa: B023 - the same

        threads = [
            threading.Thread(target=late, args=(node, change, block(3 * round_ + n, SIZE), delay_s))
            for n, (node, change, delay_s) in enumerate(
                [
                    (a, writer, dice.choice([0, dice.random() * 0.004])),
                    (b, other, dice.choice([0, dice.random() * 0.004])),
                ],
                start=1,
            )
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def same() -> bool:
        for round_ in range(rounds):
            if len({content(node.mount / f"{here}/{round_}") for node in pod.nodes}) > 1:
                return False
        return True

    wait_until(same, f"one content of {rounds} names on every node", timeout_s=NEWS_S)


@pytest.mark.slow
@pytest.mark.parametrize("other", [unlink, rename, put])
@pytest.mark.parametrize("writer", [in_place, rename, put])
def test_two_nodes_at_once(
    pod: Pod, here: str, writer: Callable[[Node, str, bytes], None], other: Callable[[Node, str, bytes], None]
) -> None:
    _race(pod, here, writer, other, often(60, 100, 1000))
