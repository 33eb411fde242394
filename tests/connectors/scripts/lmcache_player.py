"""LMCache's L2 adapter of kvfs, made by LMCache's own factory from its configuration: lmcache_player.py CONFIGURATION.

The protocol is that of engine_players.py. Answers have an item a block:
  store   whether LMCache takes it for stored
  lookup  whether it is found
  load    "same", "miss", or "wrong": LMCache takes it for loaded, and its bytes are others
  delete  null
"counters" answers with those of the connector, "fd" with its descriptor's number. "removed": the blocks that LMCache's
listeners were told of since the last time; "used": the bytes that it counts.
"""

import argparse
import dataclasses
import random
import sys
import time

import torch
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.internal_api import L2AdapterListener
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.config import parse_args_to_l2_adapters_config
from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj
from player_lines import serve

SIZE = 1 << 20
DEADLINE_S = 60
LAYOUT = MemoryLayoutDesc(shapes=[], dtypes=[])


def content(block):
    return torch.frombuffer(bytearray(random.Random(f"block {block}").randbytes(SIZE)), dtype=torch.uint8)


def key(block, model="org/a-model-of-lmcache", salt=""):
    return ObjectKey(block.to_bytes(32, "big"), model, kv_rank=block % 8, cache_salt=salt)


def memory(tensor):
    metadata = MemoryObjMetadata(
        shape=tensor.shape, dtype=torch.uint8, address=0, phy_size=tensor.numel(), fmt=MemoryFormat.KV_2LTD, ref_count=1
    )
    return TensorMemoryObj(raw_data=tensor, metadata=metadata, parent_allocator=None)


def awaited(poll):
    deadline = time.monotonic() + DEADLINE_S
    while (result := poll()) is None:
        assert time.monotonic() < deadline, "LMCache has no answer"
        time.sleep(0.001)
    return result


class Listener(L2AdapterListener):
    def __init__(self):
        self.removed = []

    def on_l2_keys_stored(self, keys, sizes):
        pass

    def on_l2_keys_accessed(self, keys):
        pass

    def on_l2_keys_deleted(self, keys):
        self.removed += keys


class Player:
    def __init__(self, configuration):
        config = parse_args_to_l2_adapters_config(argparse.Namespace(l2_adapter=[configuration])).adapters[0]
        self.adapter = create_l2_adapter(config)
        self.listener = Listener()
        self.adapter.register_listener(self.listener)
        self.stored = {}

    def store(self, blocks, **which):
        objects = [memory(content(block)) for block in blocks]  # LMCache, too, keeps them until the answer
        tasks = [
            self.adapter.submit_store_task([key(block, **which)], [each])
            for block, each in zip(blocks, objects, strict=True)
        ]

        def poll():
            self.stored.update(self.adapter.pop_completed_store_tasks())
            return True if all(task in self.stored for task in tasks) else None

        awaited(poll)
        return [bool(self.stored.pop(task).is_successful()) for task in tasks]

    def lookup(self, blocks, **which):
        keys = [key(block, **which) for block in blocks]
        task = self.adapter.submit_lookup_and_lock_task(keys, {0: LAYOUT})
        bitmap = awaited(lambda: self.adapter.query_lookup_and_lock_result(task))
        self.adapter.submit_unlock(keys)
        return [bool(bitmap.test(index)) for index in range(len(blocks))]

    def load(self, blocks, size=SIZE, shift=0, **which):
        """shift: how far the memory is from an aligned address."""
        targets = [torch.zeros(size + 4096, dtype=torch.uint8) for _ in blocks]
        targets = [target[(-target.data_ptr()) % 4096 + shift :][:size] for target in targets]
        keys = [key(block, **which) for block in blocks]
        task = self.adapter.submit_load_task(keys, [memory(target) for target in targets])
        bitmap = awaited(lambda: self.adapter.query_load_result(task))
        return [
            "miss" if not bitmap.test(index) else "same" if torch.equal(target, content(block)) else "wrong"
            for index, (block, target) in enumerate(zip(blocks, targets, strict=True))
        ]

    def delete(self, blocks, **which):
        self.adapter.delete([key(block, **which) for block in blocks])

    def removed(self, blocks, **which):
        told, self.listener.removed = self.listener.removed, []
        numbers = [int.from_bytes(each.chunk_hash, "big") for each in told]
        assert told == [key(number, **which) for number in numbers]
        return numbers

    def used(self, blocks):
        return self.adapter.get_usage().total_bytes_used

    def counters(self, blocks):
        return dataclasses.asdict(self.adapter._client.statistics())

    def close(self):
        self.adapter.close()

    def fd(self, blocks):
        return self.adapter._client.event_fd()


if __name__ == "__main__":
    serve(Player(sys.argv[1]))
