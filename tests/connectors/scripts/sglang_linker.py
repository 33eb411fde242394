"""SGLang's unified radix cache with kvfs as its external linker: a mode of sglang_player.py ("linker": true).

The cache, its allocator, pools, transfers and the factory of linkers are SGLang's own. The pools are those of a model
with sparse attention: KV and an indexer; "device" is the CPU. A request is a double: what the cache asks of one.

    store     insert the pages of a prompt, as after its prefill: pages that SGLang takes for stored
    load      match the prompt in an empty tree: [pages found, whether the load landed, whether all bytes are right]
    lookup    lengths of prefixes, in pages, that the linker can restore
    evict     forget the tree, and what lies in the device's pools
"""

import random
import types
from array import array

import sglang_player
import torch
from sglang.srt import runtime_context
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache import linker_factory
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang_player import awaited

PAGE = 64
LAYERS = 4


class Linked(sglang_player.Player):
    page_tokens = PAGE

    def __init__(self, settings):
        torch.distributed.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
        # No server was started: what its arguments would tell.
        runtime_context._CONTEXT._config_bags = {
            "model": types.SimpleNamespace(model_path="org/a-sparse-model"),
            "disagg": types.SimpleNamespace(disaggregation_mode="null"),
        }
        size = settings.get("pages", 40) * PAGE
        self.device = DSATokenToKVPool(size, PAGE, 512, torch.bfloat16, 64, LAYERS, "cpu", 128, False, 576)
        self.allocator = PagedTokenToKVPoolAllocator(size, PAGE, torch.bfloat16, "cpu", self.device, need_sort=False)
        params = CacheInitParams(
            disable=False, req_to_token_pool=ReqToTokenPool(8, 8192, "cpu", False),
            token_to_kv_pool_allocator=self.allocator, page_size=PAGE, tree_components=(ComponentType.FULL,),
            tp_cache_group=torch.distributed.group.WORLD,
        )  # fmt: skip
        self.cache = UnifiedRadixCache(params)
        arguments = types.SimpleNamespace(enable_linker_mla_dedup=False)
        from kvfs.connectors import sglang_linker

        sglang_linker._GROUP_SIZE = settings.get("group_size", sglang_linker._GROUP_SIZE)
        self.backend = linker_factory.create_unified_cache_linker(
            arguments, params, backend="dynamic", config=settings["linker"], components={ComponentType.FULL}
        )
        self.cache.init_cache_linker(self.backend)
        self.requests = 0

    def parts(self, slots, prompt):
        """Each buffer's bytes of each page, and what they should be."""
        for page, slot in enumerate(slots[::PAGE].tolist()):
            for layer in range(LAYERS):
                kv = self.device.kv_buffer[layer][slot : slot + PAGE]
                indexer = self.device.index_k_with_scale_buffer[layer][slot // PAGE]
                for name, part in (("kv", kv), ("indexer", indexer)):
                    data = random.Random(f"{name} {prompt} {page} {layer}").randbytes(part.nbytes)
                    yield part.view(torch.uint8).view(-1), torch.frombuffer(bytearray(data), dtype=torch.uint8)

    def store(self, blocks):
        prompt, pages = blocks[-1] // 100, blocks[-1] % 100 + 1
        slots = self.allocator.alloc(pages * PAGE)
        for part, expected in self.parts(slots, prompt):
            part.copy_(expected)
        linker, stored = self.cache.linker, []
        commit = linker.commit_completed_offloads
        linker.commit_completed_offloads = lambda done: (stored.extend(done), commit(done))
        try:
            self.cache.insert(
                InsertParams(key=RadixKey(array("q", self.tokens(prompt, pages)), None), value=slots.to(torch.int64))
            )
            expected = len(linker.pending_offloads)
            awaited(lambda: (self.cache.check_hicache_events(), len(stored) == expected or None)[1])
        finally:
            del linker.commit_completed_offloads
        return pages if expected and all(stored) else 0

    def load(self, blocks):
        prompt, pages = blocks[-1] // 100, blocks[-1] % 100 + 1
        self.requests += 1
        request = types.SimpleNamespace(
            rid=f"r{self.requests}", kv=None, last_node=None, swa_branching_seqlen=None, session=None
        )
        # One token beyond the last page: a prompt that is there whole has one to compute.
        key = RadixKey(array("q", [*self.tokens(prompt, pages), 1]), None)
        match = self.cache.match_prefix(MatchPrefixParams(key=key, req=request))
        found = match.host_hit_length // PAGE
        if not found:
            return [0, True, True]
        request.last_node = match.last_device_node
        self.poison()
        tokens, _ = self.cache.linker.load_back(request)
        slots = self.cache.linker.private_load_indices[request.rid]
        assert tokens == len(slots) == found * PAGE
        self.cache.ready_to_load_host_cache()
        counter = self.backend.layer_done_counter
        counter.set_consumer(counter.producer_index)
        for layer in range(LAYERS):
            counter.wait_until(layer)
        landed = self.cache.linker.finish_loads() == []
        right = landed and all(torch.equal(*part) for part in self.parts(slots, prompt))
        self.allocator.free(slots)
        return [found, landed, bool(right)]

    def lookup(self, blocks):
        keys = self.hashes(blocks[-1] // 100, blocks[-1] % 100 + 1)
        return self.backend.lookup("a look-up", [PoolTransfer(PoolName.KV, keys=keys)])

    def poison(self):
        for buffer in (*self.device.kv_buffer, *self.device.index_k_with_scale_buffer):
            buffer.view(torch.uint8).fill_(0xA5)

    def evict(self, blocks):
        self.cache.reset()
        self.allocator.clear()
        self.poison()
        return True

    def close(self):
        self.cache.linker.close()
        torch.distributed.destroy_process_group()
