"""SGLang's HiCacheFile against a directory: sglang_hicache_file.py DIRECTORY SOURCE.

Prints what it saw as one JSON line; the test judges.
"""

import json
import os
import sys

sys.path.insert(0, sys.argv[2])
os.environ["SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"] = sys.argv[1]

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorageConfig

BLOCKS, SIZE = 4, 8 << 20


def main(directory):
    os.makedirs(directory, exist_ok=True)
    cache = HiCacheFile(
        HiCacheStorageConfig(0, 1, 0, 1, 0, 1, False, False, False, "meta-llama/Llama-3.1-8B", extra_config=None)
    )
    generator = torch.Generator().manual_seed(20_011)
    values = [torch.randint(0, 255, (SIZE,), dtype=torch.uint8, generator=generator) for _ in range(BLOCKS)]
    keys = [f"{index:064x}" for index in range(BLOCKS)]

    def target():
        return torch.zeros(SIZE, dtype=torch.uint8)

    def get(index):
        try:
            value = cache.get(keys[index], target())
        except Exception as error:  # whichever it is, the test asserts it
            return type(error).__name__
        return None if value is None else bool((value == values[index]).all())

    seen = {"set": cache.batch_set(keys, values)}
    seen["names"] = sorted(os.listdir(directory))
    seen["sizes"] = [os.path.getsize(os.path.join(directory, name)) for name in seen["names"]]
    seen["hit_pages"] = cache.batch_exists_v2([*keys, "f" * 64]).kv_hit_pages
    loaded = cache.batch_get(keys, [target() for _ in keys])
    seen["get"] = [
        value is not None and bool((value == original).all()) for value, original in zip(loaded, values, strict=True)
    ]
    seen["set_again"] = cache.batch_set(keys, values)
    seen["exists"] = [bool(cache.exists(name)) for name in [*keys, "f" * 64]]
    os.unlink(os.path.join(directory, seen["names"][0]))
    seen["missing"] = get(0)
    seen["missing_exists"] = bool(cache.exists(keys[0]))
    os.truncate(os.path.join(directory, seen["names"][1]), 4096)
    seen["truncated"] = get(1)
    seen["whole"] = [get(2), get(3)]
    print(json.dumps(seen))


if __name__ == "__main__":
    main(sys.argv[1])
