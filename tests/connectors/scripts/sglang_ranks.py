"""Ranks of one model on one mount, each with a back end of its own by SGLang's factory: sglang_ranks.py MOUNT.

Prints one JSON line: for each case the pages that ranks stored, found and loaded right, and the blocks on the mount.
"""

import json
import os
import random
import sys

import torch
from sglang_player import HEADS, LAYERS, PAGE, WIDTH, MHATokenToKVPool, MHATokenToKVPoolHost, host_of

from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig  # isort: skip
from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.srt.mem_cache.storage import StorageBackendFactory

PAGES = 4
HASHES = [f"{page:064x}" for page in range(PAGES)]


def mha(layout, heads):
    device = MHATokenToKVPool(16 * PAGE, PAGE, torch.bfloat16, heads, WIDTH, LAYERS, "cpu", enable_memory_saver=False)
    return host_of(MHATokenToKVPoolHost, device, layout)


def mla(layout):
    device = MLATokenToKVPool(16 * PAGE, PAGE, torch.bfloat16, 64, 16, LAYERS, "cpu", enable_memory_saver=False)
    options = {"target_layer_num": device.layer_num, "override_kv_cache_dim": device.kv_cache_dim}
    return host_of(MLATokenToKVPoolHost, device, layout, **options)


class Rank:
    def __init__(self, mount, model, host, rank, size, *, is_mla=False, lcm=None):
        extra = {
            "backend_name": "kvfs", "module_path": "kvfs.connectors.sglang", "class_name": "HiCacheKvfs",
            "interface_v1": 1, "mount": mount, "timeout_s": 20,
        }  # fmt: skip
        split = bool(lcm) and lcm > size
        config = HiCacheStorageConfig(
            rank, size, 0, 1, 0, 1, is_mla, False, False, model, tp_lcm_size=lcm, should_split_heads=split,
            extra_config=extra,
        )  # fmt: skip
        self.host = host
        self.backend = StorageBackendFactory.create_backend("dynamic", config, host)
        self.backend.register_mem_pool_host(host)
        self.indices = host.alloc(PAGES * PAGE)

    def store(self, content):
        self.write(content)
        return sum(self.backend.batch_set_v1(HASHES, self.indices))

    def load(self, content):
        """[found, right]"""
        found = self.backend.batch_exists([*HASHES, "f" * 64])
        self.host.kv_buffer.view(torch.uint8).fill_(0xA5)
        loaded = self.backend.batch_get_v1(HASHES, self.indices)
        got = self.read()
        self.write(content)
        return [found, all(loaded) and torch.equal(got, self.read())]

    def write(self, content):
        """content: of the whole model's heads, one tensor a page; a rank has its part."""
        for slot, page in zip(self.indices[::PAGE].tolist(), content, strict=True):
            self.host.set_from_flat_data_page(slot, page.flatten())

    def read(self):
        return torch.cat([self.host.get_data_page(slot, flat=True).flatten() for slot in self.indices[::PAGE].tolist()])


def content(heads, shape):
    generator = torch.Generator().manual_seed(heads)
    return [torch.randn(shape, generator=generator).to(torch.bfloat16) for _ in range(PAGES)]


def blocks(mount, model):
    return sum(len(files) for _, _, files in os.walk(f"{mount}/sglang/{model}"))


def main(mount):
    seen = {}

    # MLA: both ranks have the same, one stores it.
    ranks = [Rank(mount, "mla", mla("page_first_direct"), rank, 2, is_mla=True) for rank in range(2)]
    pages = content(0, (LAYERS, PAGE, 1, 80))
    stored = [each.store(pages) for each in reversed(ranks)]
    loads = [each.load(pages) for each in ranks]
    seen["mla"] = (stored, loads, blocks(mount, "mla"))

    # Each of two ranks has half the heads.
    ranks = [Rank(mount, "heads", mha("page_head", HEADS // 2), rank, 2) for rank in range(2)]
    pages = content(1, (2, HEADS, PAGE, LAYERS, WIDTH))
    parts = [[page[:, rank : rank + 1] for page in pages] for rank in range(2)]
    stored = [each.store(part) for each, part in zip(ranks, parts, strict=True)]
    loads = [each.load(part) for each, part in zip(ranks, parts, strict=True)]
    seen["heads"] = (stored, loads, blocks(mount, "heads"))

    # One rank with all heads stores what two ranks with half of them load.
    stored = [Rank(mount, "split", mha("page_head", HEADS), 0, 1, lcm=2).store(pages)]
    ranks = [Rank(mount, "split", mha("page_head", HEADS // 2), rank, 2, lcm=2) for rank in range(2)]
    loads = [each.load(part) for each, part in zip(ranks, parts, strict=True)]
    seen["split"] = (stored, loads, blocks(mount, "split"))

    print(json.dumps({
        name: {"stored": stored, "found": [found for found, _ in loads], "right": [right for _, right in loads],
               "blocks": count}
        for name, (stored, loads, count) in seen.items()
    }))  # fmt: skip


if __name__ == "__main__":
    random.seed(0)
    main(sys.argv[1])
