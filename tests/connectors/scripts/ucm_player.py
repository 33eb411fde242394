"""UCM's own factory and its manager of ranks with kvfs's store in them, on memory of the host. One argument: the mount.

The wheel is for another Python, so what is compiled in it cannot be loaded: UCM's logger, and what its package imports
first. These two are doubles here; the base class, the factory, the errors and the manager are UCM's own files.
"""

import importlib
import logging
import sys
import types
from pathlib import Path

import numpy as np
import torch

PATH = next(Path(entry, "ucm") for entry in sys.path if Path(entry, "ucm", "store").is_dir())


def packages(*names: str) -> None:
    """Packages of UCM without their __init__.py: only files that are asked for are loaded."""
    for name in names:
        package = types.ModuleType(name)
        package.__path__ = [str(PATH.parent.joinpath(*name.split(".")))]
        sys.modules[name] = package


packages("ucm", "ucm.store", "ucm.store.pipeline", "ucm.integration", "ucm.integration.vllm")
logger = types.ModuleType("ucm.logger")
logger.init_logger = lambda name: logging.getLogger(name)
sys.modules["ucm.logger"] = logger

from ucm.integration.vllm.rank_consistency import RankConsistencyManager  # noqa: E402
from ucm.store.factory_v1 import UcmConnectorFactoryV1  # noqa: E402
from ucm.store.pipeline.errors import StoreNotFoundError  # noqa: E402
from ucm.store.ucmstore_v1 import UcmKVStoreBaseV1  # noqa: E402

LAYERS, SIZE, BLOCKS = 4, 8192, 16
IDS = [bytes([i]) * 16 for i in range(BLOCKS)]


def store(**config: object) -> UcmKVStoreBaseV1:
    """As UCM's connectors make one."""
    user = {"mount": sys.argv[1], "timeout_s": 20, "namespace": "ucm"}
    ucm = {"unique_id": "e", "tensor_layout": "gqa", "share_buffer_enable": False, "posix_gc_enable": False}
    return UcmConnectorFactoryV1.create_connector("KvfsStore", {**user, **ucm, **config}, "kvfs.connectors.ucm")


def worker(shards: int) -> UcmKVStoreBaseV1:
    tensors = [SIZE, SIZE // 2] * (LAYERS // shards)
    shard = sum(tensors)
    return store(tensor_size_list=tensors, shard_size=shard, block_size=shard * shards, device_id=-1, local_rank_size=1)


def addresses(memory: torch.Tensor, layers: range) -> np.ndarray:
    """Of each block the tensors of these layers, as UCM tells them: a row of pointers."""
    rows = []
    for block in range(len(memory)):
        base = memory[block].data_ptr()
        rows.append([base + layer * 2 * SIZE + part * SIZE for layer in layers for part in range(2)])
    return np.array(rows, dtype=np.uint64)


def memory(fill: bool) -> torch.Tensor:
    made = torch.zeros(BLOCKS, LAYERS, 2, SIZE, dtype=torch.uint8)
    if fill:
        made.copy_(torch.randint(0, 256, made.shape, dtype=torch.uint8))
        made[:, :, 1, SIZE // 2 :] = 0  # beyond the smaller tensor
    return made


def whole_blocks() -> None:
    scheduler, one = store(), worker(1)
    assert one.shards == 1
    manager = RankConsistencyManager(is_scheduler=False)
    source, target = memory(True), memory(False)
    assert scheduler.lookup(IDS) == [False] * BLOCKS and scheduler.lookup_on_prefix(IDS) == -1
    task = manager.submit_dump(one, {"r": set(IDS)}, IDS, [0] * BLOCKS, addresses(source, range(LAYERS)), 0)
    manager.wait_dump(task)
    assert one.check(task)
    manager.finish_dump({"r"})
    assert scheduler.lookup(IDS) == [True] * BLOCKS and scheduler.lookup_on_prefix(IDS) == BLOCKS - 1
    assert scheduler.lookup_on_reverse([*IDS[:3], b"none"]) == 2
    scheduler.prefetch(IDS)
    task = manager.submit_load(one, {"r": IDS}, IDS, [0] * BLOCKS, addresses(target, range(LAYERS)))
    manager.wait_load(task)
    assert torch.equal(source, target)
    # As tensors, and what is there already.
    again = memory(False)
    one.wait(one.dump(IDS, [0] * BLOCKS, [tensors(row) for row in source]))
    one.wait(one.load(IDS, [0] * BLOCKS, [tensors(row) for row in again]))
    assert torch.equal(source, again)
    # One block goes: its load fails, and it is found no more.
    assert one.connection.delete([IDS[3]]) == [True]
    task = manager.submit_load(one, {"r": IDS}, IDS, [0] * BLOCKS, addresses(target, range(LAYERS)))
    try:
        manager.wait_load(task)
    except StoreNotFoundError as error:
        assert IDS[3].hex() in str(error), error
    else:
        raise AssertionError("a block that is gone was loaded")
    assert scheduler.lookup_on_prefix(IDS) == 2
    one.close()
    scheduler.close()


def tensors(row: torch.Tensor) -> list[torch.Tensor]:
    return [part for layer in row for part in (layer[0], layer[1][: SIZE // 2])]


def by_layers() -> None:
    """A block is found when its last layer is there, and no more once one of its layers is gone."""
    ids = [b"layers" + block for block in IDS]
    scheduler, one = store(), worker(LAYERS)
    source, target = memory(True), memory(False)
    assert one.shards == LAYERS
    for layer in range(LAYERS):
        assert scheduler.lookup_on_prefix(ids) == -1
        one.wait(one.dump_data(ids, [layer] * BLOCKS, addresses(source, range(layer, layer + 1))))
    assert scheduler.lookup_on_prefix(ids) == BLOCKS - 1
    tasks = [
        one.load_data(ids, [layer] * BLOCKS, addresses(target, range(layer, layer + 1))) for layer in range(LAYERS)
    ]
    for task in tasks:
        one.wait(task)
    assert torch.equal(source, target)
    assert one.connection.delete([ids[5] + (2).to_bytes(2, "big")]) == [True]
    try:
        one.wait(one.load_data(ids, [2] * BLOCKS, addresses(target, range(2, 3))))
    except StoreNotFoundError:
        pass
    else:
        raise AssertionError("a layer that is gone was loaded")
    assert scheduler.lookup(ids) == [i != 5 for i in range(BLOCKS)]
    one.close()
    scheduler.close()


assert issubclass(importlib.import_module("kvfs.connectors.ucm").KvfsStore, UcmKVStoreBaseV1)
whole_blocks()
by_layers()
print("done")
