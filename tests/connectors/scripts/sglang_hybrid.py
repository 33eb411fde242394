"""A hybrid model for sglang_player.py: SGLang's HybridCacheController over a group of host pools, with their v2 calls.

Beside the pool of KV lie two of the same kind. A prefix needs the last WINDOW pages of "swa", and every page of
"indexer". A request of `store` may leave out a pool.
"""

import threading

import sglang_player
import torch
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
from sglang.srt.mem_cache.pool_host import HostPoolGroup, PoolEntry
from sglang_player import PAGE, Allocator, awaited, popped

WINDOW = 2


class Hybrid(sglang_player.Player):
    def controller_of(self, host, settings):
        self.sides = {PoolName.SWA: self.host_pool(self.device), PoolName.INDEXER: self.host_pool(self.device)}
        entries = [
            PoolEntry(name, pool, self.device, lambda layer: layer, is_primary_index_anchor=name == PoolName.KV)
            for name, pool in {PoolName.KV: host, **self.sides}.items()
        ]
        return HybridCacheController(
            Allocator(self.device), HostPoolGroup(entries), PAGE, tp_group=torch.distributed.group.WORLD,
            load_cache_event=threading.Event(), io_backend="direct", storage_backend="dynamic", prefetch_threshold=PAGE,
            model_name="org/a-hybrid-model", storage_backend_extra_config=dict(settings["extra"]),
            enable_storage_metrics=True,
        )  # fmt: skip

    def transfers(self, hashes, indices):
        """Every page of the indexer, the last ones of the window."""
        policies = {PoolName.SWA: PoolHitPolicy.TRAILING_PAGES, PoolName.INDEXER: PoolHitPolicy.ALL_PAGES}
        keys = {PoolName.SWA: hashes[-WINDOW:], PoolName.INDEXER: hashes}
        return [
            PoolTransfer(name, host_indices=indices.get(name), keys=keys[name], hit_policy=policies[name])
            for name in self.sides
        ]

    def store(self, blocks, without=()):
        """The window that ends with the last page named goes with the KV of all of them."""
        prompt, pages = blocks[-1] // 100, blocks[-1] % 100 + 1
        hashes = self.hashes(prompt, pages)
        indices, sides = self.host.alloc(pages * PAGE), {}
        self.fill(self.host, indices, prompt)
        for name, pool in self.sides.items():
            count = min(WINDOW, pages) if name == PoolName.SWA else pages
            sides[name] = pool.alloc(count * PAGE)
            self.fill(pool, sides[name], prompt, pages - count, name.value)
        transfers = [each for each in self.transfers(hashes, sides) if each.name.value not in without]
        self.controller.write_storage(indices, self.tokens(prompt, pages), hashes, extra_pools=transfers)
        done = awaited(lambda: popped(self.controller.ack_backup_queue))
        self.host.free(indices)
        for name, held in sides.items():
            self.sides[name].free(held)
        return [done.completed_tokens // PAGE, done.pool_storage_result.extra_pool_hit_pages]

    def lookup(self, blocks):
        """SGLang's look-up: pages found, those of each pool, all lengths that can be restored."""
        hashes = self.hashes(blocks[-1] // 100, blocks[-1] % 100 + 1)
        result = self.backend.batch_exists_v2(hashes, self.transfers(hashes, {}))
        return [result.kv_hit_pages, dict(result.extra_pool_hit_pages), result.restorable_prefix_pages]

    def load(self, blocks):
        """Sides first, as batch_get_v2 is called with them, then KV: pages loaded of each, whether all are right."""
        prompt, pages = blocks[-1] // 100, blocks[-1] % 100 + 1
        hashes = self.hashes(prompt, pages)
        result = self.backend.batch_exists_v2(hashes, self.transfers(hashes, {}))
        pages, hashes = result.kv_hit_pages, hashes[: result.kv_hit_pages]
        if not pages:
            return [{}, True]
        pools = {PoolName.KV: self.host, **self.sides}
        counts = {PoolName.KV: pages, PoolName.SWA: min(WINDOW, pages), PoolName.INDEXER: pages}
        indices = {name: pools[name].alloc(count * PAGE) for name, count in counts.items()}
        for pool in pools.values():
            pool.kv_buffer.view(torch.uint8).fill_(0xA5)
        loaded = self.backend.batch_get_v2(self.transfers(hashes, indices))
        loaded[PoolName.KV] = self.backend.batch_get_v1(hashes, indices[PoolName.KV])
        right = all(
            self.is_right(pools[name], indices[name][: sum(loaded[name]) * PAGE], prompt, pages - count, name.value)
            for name, count in counts.items()
            if all(loaded[name])
        )
        for name, held in indices.items():
            pools[name].free(held)
        return [{name.value: sum(loaded[name]) for name in counts}, right]

    def groups(self, blocks, group_pages, block_pages):
        """The reach of a pool whose policy is BLOCK_GROUPS, and the pages of KV; nothing where SGLang has none."""
        if not hasattr(PoolHitPolicy, "BLOCK_GROUPS"):
            return None
        hashes = self.hashes(blocks[-1] // 100, blocks[-1] % 100 + 1)
        transfer = PoolTransfer(
            PoolName.INDEXER, keys=hashes, hit_policy=PoolHitPolicy.BLOCK_GROUPS, group_pages=group_pages,
            block_pages=block_pages,
        )  # fmt: skip
        result = self.backend.batch_exists_v2(hashes, [transfer])
        return [result.kv_hit_pages, dict(result.extra_pool_hit_pages)]
