"""LMCache's remote back end of kvfs, as in an engine's process: lmcache_remote_player.py EXTRA, a JSON object.

EXTRA is LMCache's extra_config. Back end, memory, event loop and the loader of plugins are LMCache's own; no engine
runs. The protocol is that of engine_players.py. Chunk b has the bytes that its number makes, and as many tokens as
"tokens" says. Answers have an item a block, but those of prefix:
  store    whether LMCache's task ended
  lookup   whether it is found; prefix: how many are from the first on
  load     "same", "miss", or "wrong"; batch: all in one call; cancel: begin one, and give up
"counters" answers with those of the connector, "held" with how many chunks of LMCache's memory are in use.
"""

import asyncio
import dataclasses
import json
import random
import sys
import threading
import time

import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
from lmcache.v1.storage_backend.remote_backend import RemoteBackend
from player_lines import serve

TOKENS, LAYERS, HEADS, WIDTH = 256, 4, 8, 64
DEADLINE_S = 60


class Player:
    def __init__(self, extra):
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        config = LMCacheEngineConfig.from_defaults(
            chunk_size=TOKENS, local_cpu=False, max_local_cpu_size=0.25, remote_storage_plugins=["kvfs"],
            extra_config=extra, remote_serde="naive",
        )  # fmt: skip
        metadata = LMCacheMetadata(
            "org/a-model", 1, 1, 0, 0, torch.bfloat16, (LAYERS, 2, TOKENS, HEADS, WIDTH), chunk_size=TOKENS
        )
        self.memory = LocalCPUBackend(config, metadata, dst_device="cpu")
        self.backend = RemoteBackend(config, metadata, self.loop, self.memory, dst_device="cpu", plugin_name="kvfs")
        assert self.backend.connection is not None, "LMCache has no connection"
        self.connector = self.backend.connection.getWrappedConnector()

    def key(self, block):
        return CacheEngineKey("org/a-model", 1, 0, block, torch.bfloat16)

    def content(self, block, size):
        return random.Random(f"chunk {block}").randbytes(size)

    def store(self, blocks, tokens=TOKENS):
        connector, chunks = self.connector, []
        for block in blocks:
            shape = torch.Size((*connector.meta_shapes[0][:2], tokens, *connector.meta_shapes[0][3:]))
            chunk = self.memory.allocate([shape], connector.meta_dtypes, connector.meta_fmt)
            chunk.byte_array.cast("B")[:] = self.content(block, len(chunk.byte_array))
            chunks.append(chunk)
        over = set()
        keys = list(map(self.key, blocks))
        self.backend.batched_submit_put_task(keys, chunks, on_complete_callback=over.add)
        deadline = time.monotonic() + DEADLINE_S
        while len(over) < len(blocks):
            assert time.monotonic() < deadline, "LMCache has no answer"
            time.sleep(0.001)
        for chunk in chunks:
            chunk.ref_count_down()
        return [key in over for key in keys]

    def lookup(self, blocks):
        return [self.backend.contains(self.key(block)) for block in blocks]

    def prefix(self, blocks):
        return self.backend.batched_contains(list(map(self.key, blocks)))

    def load(self, blocks, batch=True, tokens=TOKENS):
        keys = list(map(self.key, blocks))
        chunks = self.backend.batched_get_blocking(keys) if batch else list(map(self.backend.get_blocking, keys))
        return [self.judge(*each, tokens) for each in zip(blocks, chunks, strict=True)]

    def judge(self, block, chunk, tokens):
        if chunk is None:
            return "miss"
        same = bytes(chunk.byte_array) == self.content(block, len(chunk.byte_array)) and chunk.get_shape()[2] == tokens
        chunk.ref_count_down()
        return "same" if same else "wrong"

    def cancel(self, blocks):
        """A load that LMCache gives up once it is under way: was it?"""

        async def give_up():
            task = self.loop.create_task(self.connector.batched_get(list(map(self.key, blocks))))
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            return task.cancelled()

        return asyncio.run_coroutine_threadsafe(give_up(), self.loop).result(DEADLINE_S)

    def held(self, blocks):
        return self.memory.memory_allocator.pin_allocator.num_active_allocations

    def remove(self, blocks):
        return [self.connector.remove_sync(self.key(block)) for block in blocks]

    def names(self, blocks):
        return sorted(asyncio.run_coroutine_threadsafe(self.connector.list(), self.loop).result(DEADLINE_S))

    def ping(self, blocks):
        return asyncio.run_coroutine_threadsafe(self.connector.ping(), self.loop).result(DEADLINE_S)

    def counters(self, blocks):
        return dataclasses.asdict(self.connector.statistics())

    def close(self):
        for _ in range(2):
            asyncio.run_coroutine_threadsafe(self.connector.close(), self.loop).result(DEADLINE_S)
        self.loop.call_soon_threadsafe(self.loop.stop)


if __name__ == "__main__":
    serve(Player(json.loads(sys.argv[1])))
