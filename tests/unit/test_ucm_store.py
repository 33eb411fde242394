"""kvfs as a store of UCM, without UCM: which keys its blocks have, and what a failure leaves behind.

Doubles stand for UCM's base class and for the connection. tests/connectors has UCM's own.
"""

from __future__ import annotations

import ctypes
import importlib
import sys
import threading
import types
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from helpers import wait_until

from kvfs.connectors import common
from kvfs.errors import DeadlineError

SIZES = [64, 32]


class NotFound(RuntimeError):
    """As UCM's."""


class Base:
    """As UCM's, without what is abstract."""

    def __init__(self, config: object) -> None:
        self.config = config


class Connection:
    """Blocks in a dict. `full`: nothing more is stored."""

    def __init__(self, options: object, space: str, **_: object) -> None:
        self.space, self.blocks, self.full, self.touched = space, dict[bytes, bytes](), False, 0

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        return [key in self.blocks for key in keys]

    def exists_prefix(self, keys: Sequence[bytes]) -> int:
        return [*self.exists(keys), False].index(False)

    def touch(self, keys: Sequence[bytes]) -> int:
        self.touched += len(keys)
        return len(keys)

    def delete(self, keys: Sequence[bytes]) -> list[bool]:
        return [self.blocks.pop(key, None) is not None for key in keys]

    def put(self, items: Sequence[tuple[bytes, Any]]) -> list[bool]:
        for key, pieces in items if not self.full else ():
            self.blocks.setdefault(key, b"".join(map(bytes, pieces)) if isinstance(pieces, list) else pieces)
        return self.exists([key for key, _ in items])

    def get_into(self, items: Sequence[tuple[bytes, Any]]) -> list[int | None]:
        results: list[int | None] = []
        for key, pieces in items:
            found = self.blocks.get(key)
            results.append(None if found is None else len(found))
            at = 0
            for piece in pieces if found is not None else ():
                data = found[at : at + len(piece)]
                piece[: len(data)] = data
                at += len(piece)
        return results

    def close(self) -> None:
        pass


@pytest.fixture
def ucm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    names = ("ucm", "ucm.store", "ucm.store.pipeline", "ucm.store.pipeline.errors", "ucm.store.ucmstore_v1")
    modules: dict[str, Any] = {name: types.ModuleType(name) for name in names}
    modules["ucm.store.pipeline.errors"].StoreNotFoundError = NotFound
    modules["ucm.store.ucmstore_v1"].Task, modules["ucm.store.ucmstore_v1"].UcmKVStoreBaseV1 = object, Base
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(common, "Connection", Connection)
    monkeypatch.delitem(sys.modules, "kvfs.connectors.ucm", raising=False)
    yield importlib.import_module("kvfs.connectors.ucm")
    sys.modules.pop("kvfs.connectors.ucm", None)


def store(ucm: Any, shards: int = 1, **more: object) -> Any:
    shard = sum(SIZES)
    sizes = {"tensor_size_list": SIZES, "shard_size": shard, "block_size": shards * shard}
    return ucm.KvfsStore({"mount": "/mnt/kv", "namespace": "a", "revision": "2", **sizes, **more})


KEPT: list[object] = []


class Block:
    """Memory of one shard's tensors, which stays."""

    def __init__(self, fill: int = 0) -> None:
        KEPT.append(self)
        self.tensors = [ctypes.create_string_buffer(bytes([fill]) * size, size) for size in SIZES]
        self.row = [ctypes.addressof(tensor) for tensor in self.tensors]

    @property
    def data(self) -> bytes:
        return b"".join(tensor.raw for tensor in self.tensors)


def test_a_block_of_one_shard_has_its_id_as_key(ucm: Any) -> None:
    made, source, target = store(ucm), Block(7), Block()
    assert made.connection.space == "a/@2"
    task = made.dump_data([b"x" * 16], [0], [source.row])
    made.wait(task)
    assert made.check(task) and made.connection.blocks == {b"x" * 16: source.data}
    made.wait(made.load_data([b"x" * 16], [0], [target.row]))
    assert target.data == source.data
    assert made.lookup([b"x" * 16, b"y"]) == [True, False]
    assert (made.lookup_on_prefix([b"x" * 16, b"y", b"x" * 16]), made.lookup_on_prefix([b"y"])) == (0, -1)
    assert (made.lookup_on_reverse([b"x" * 16, b"y"]), made.lookup_on_reverse([b"y"])) == (0, -1)
    made.prefetch([b"x" * 16])
    assert made.connection.touched == 1
    with pytest.raises(NotImplementedError):
        made.cc_store()


def test_a_block_of_layers_is_found_when_all_of_them_are_stored(ucm: Any) -> None:
    made, layers = store(ucm, shards=3), [Block(i + 1) for i in range(3)]
    for i in (2, 0, 0, 1):
        assert made.lookup([b"x"]) == [False]
        made.wait(made.dump_data([b"x"], [i], [layers[i].row]))
    assert made.lookup([b"x"]) == [True] and len(made.connection.blocks) == 4
    target = Block()
    made.wait(made.load_data([b"x"], [1], [target.row]))
    assert target.data == layers[1].data
    with pytest.raises(ValueError, match="shard 3 of a block of 3"):
        made.dump_data([b"x"], [3], [layers[0].row])


@pytest.mark.parametrize("is_other", [False, True])
def test_a_load_of_what_is_not_as_it_was_stored_is_told_and_the_block_forgotten(ucm: Any, is_other: bool) -> None:
    made = store(ucm)
    made.wait(made.dump_data([b"x", b"y"], [0, 0], [Block(1).row, Block(2).row]))
    if is_other:
        made.connection.blocks[b"y"] = b"of another layout"
    else:
        del made.connection.blocks[b"y"]
    with pytest.raises(NotFound, match="1 of 2 blocks are not there any more, the first is 79"):
        made.wait(made.load_data([b"x", b"y"], [0, 0], [Block().row, Block().row]))
    assert made.lookup([b"x", b"y"]) == [True, False]


def test_a_store_that_fails_is_told_and_has_no_mark(ucm: Any) -> None:
    made = store(ucm, shards=2)
    made.wait(made.dump_data([b"x"], [0], [Block(1).row]))
    made.connection.full = True
    with pytest.raises(RuntimeError, match="1 of 1 blocks were not stored"):
        made.wait(made.dump_data([b"x"], [1], [Block(1).row]))
    assert made.lookup([b"x"]) == [False]


@pytest.fixture
def held(ucm: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, threading.Event, list[str]]]:
    """A store whose loads wait for the event, and say when they begin and end; a task may take no time at all."""
    made, gate, said = store(ucm), threading.Event(), list[str]()
    get_into = made.connection.get_into

    def slow(items: Sequence[tuple[bytes, Any]]) -> list[int | None]:
        said.append("begins")
        assert gate.wait(60)
        results: list[int | None] = get_into(items)
        said.append("ends")
        return results

    made.connection.get_into = slow
    made.wait(made.dump_data([b"x"], [0], [Block(7).row]))
    monkeypatch.setattr(ucm, "TASK_TIMEOUT_S", 0.01)
    yield made, gate, said
    gate.set()
    made.close()


def test_a_load_that_had_not_begun_in_time_never_touches_its_memory(ucm: Any, held: Any) -> None:
    made, gate, said = held
    first = [made.load_data([b"x"], [0], [Block().row]) for _ in range(ucm.LOADERS)]
    wait_until(lambda: len(said) == ucm.LOADERS, "the first ones")
    target = Block()
    late = made.load_data([b"x"], [0], [target.row])
    with pytest.raises(DeadlineError, match="had not begun after"):
        made.wait(late)
    assert made.check(late)
    gate.set()
    for task in first:
        task.future.result(60)
    made.close()
    assert said.count("begins") == ucm.LOADERS and target.data == bytes(sum(SIZES))


def test_a_load_that_is_under_way_too_long_has_ended_when_it_is_told(ucm: Any, held: Any) -> None:
    made, gate, said = held
    target = Block()
    task = made.load_data([b"x"], [0], [target.row])
    wait_until(lambda: bool(said), "its begin")
    threading.Timer(0.1, gate.set).start()
    with pytest.raises(DeadlineError, match="was under way after"):
        made.wait(task)
    assert said == ["begins", "ends"] and target.data == b"\7" * sum(SIZES)


def test_a_load_that_never_ends_is_said_to_use_its_memory(ucm: Any, held: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made, _, said = held
    monkeypatch.setattr(ucm, "END_TIMEOUT_S", 0.01)
    task = made.load_data([b"x"], [0], [Block().row])
    wait_until(lambda: bool(said), "its begin")
    with pytest.raises(DeadlineError, match="may still use its memory"):
        made.wait(task)


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_store_that_was_given_up_leaves_no_block_of_reused_memory(
    ucm: Any, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    made, source, gate, said = store(ucm), Block(7), threading.Event(), threading.Event()
    put = made.connection.put

    def late(items: Sequence[tuple[bytes, Any]]) -> list[bool]:
        if when == "meanwhile":
            said.set()
            assert gate.wait(60)
        stored: list[bool] = put(items)
        return stored

    def event(_: int) -> None:
        if when == "before":
            said.set()
            assert gate.wait(60)

    made.connection.put = late
    monkeypatch.setattr(ucm, "_wait_event", event)
    monkeypatch.setattr(ucm, "TASK_TIMEOUT_S", 0.01)
    monkeypatch.setattr(ucm, "END_TIMEOUT_S", 0.01)
    task = made.dump_data([b"x"], [0], [source.row], 1)
    assert said.wait(60)
    with pytest.raises(DeadlineError, match="may still use its memory"):
        made.wait(task)
    gate.set()
    with pytest.raises(RuntimeError, match="it took too long"):
        task.future.result(60)
    assert made.connection.blocks == {}
    made.close()


def test_what_ucm_tells_is_checked(ucm: Any) -> None:
    made, block = store(ucm), Block(1)
    for ids, shards, rows, words in (
        ([b"x"], [0, 0], [block.row], "1 blocks, 2 shards, 1 rows"), ([b"x"], [0], [block.row[:1]], "1 addresses"),
        ([b""], [0], [block.row], "id of 0 bytes"), ([b"x" * 241], [0], [block.row], "id of 241 bytes"),
        ([b"x"], [1], [block.row], "shard 1 of a block of 1"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            made.load_data(ids, shards, rows)
    for wrong in ({"block_size": 100}, {"shard_size": "1"}, {"mount": "relative"}):
        with pytest.raises(ValueError, match="kvfs for ucm"):
            store(ucm, **wrong)
    # The scheduler's store is told no sizes. A row may have holes.
    assert ucm.KvfsStore({"mount": "/mnt/kv", "block_size": 5}).shards == 1
    made.wait(made.dump_data([b"x"], [0], [[block.row[0], 0]]))
    assert made.connection.blocks[b"x"] == block.tensors[0].raw
