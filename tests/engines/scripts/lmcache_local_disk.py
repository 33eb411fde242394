"""LMCache's LocalDisk backend against a directory: lmcache_local_disk.py DIRECTORY SOURCE buffered|direct.

Its staging allocator wants pinned memory, so a plain one stands in for it. Prints what it saw as one JSON line;
the test judges.
"""

import asyncio
import json
import os
import sys
import threading
import time
import types

sys.path.insert(0, sys.argv[2])

import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.memory_management import MemoryFormat
from lmcache.v1.storage_backend.local_disk_backend import LocalDiskBackend

SIZE = 2 << 20


class Memory:
    """The part of a memory object that LocalDisk uses."""

    def __init__(self, size):
        # O_DIRECT needs page-aligned memory: torch's own is aligned to 64 bytes only.
        whole = torch.zeros(size + 4096, dtype=torch.uint8)
        start = -whole.data_ptr() % 4096
        self.tensor = whole[start : start + size]
        self.metadata = types.SimpleNamespace(
            shape=self.tensor.shape, dtype=self.tensor.dtype, address=0, fmt=MemoryFormat.KV_2LTD, cached_positions=None
        )
        self.meta = self.metadata

    @property
    def byte_array(self):
        return memoryview(self.tensor.numpy())

    def get_physical_size(self):
        return self.tensor.numel()

    get_size = get_physical_size

    def _nothing(self):
        pass

    ref_count_up = ref_count_down = pin = unpin = _nothing


class Allocator:
    def allocate(self, shape, _dtype, _format, **_options):
        return Memory(shape[0])


def key(index):
    return CacheEngineKey("m/x", 1, 0, index, torch.bfloat16)


def main(directory, direct):
    os.makedirs(directory, exist_ok=True)
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    config = LMCacheEngineConfig.from_defaults(
        local_disk=directory, max_local_disk_size=1, extra_config={"use_odirect": direct}
    )
    backend = LocalDiskBackend(config, loop, Allocator(), dst_device="cpu")

    def put(index):
        memory = Memory(SIZE)
        memory.tensor.fill_(index + 1)
        backend.submit_put_task(key(index), memory)
        deadline = time.monotonic() + 60
        while not backend.contains(key(index)):
            if time.monotonic() > deadline:
                raise TimeoutError(f"block {index} is not stored after 60 s")
            time.sleep(0.01)

    def get(index):
        try:
            memory = backend.get_blocking(key(index))
        except Exception as error:  # whichever it is, the test asserts it
            return type(error).__name__
        return None if memory is None else bool((memory.tensor == index + 1).all())

    seen = {}
    for index in range(5):
        put(index)
    seen["names"] = sorted(os.listdir(directory))
    seen["sizes"] = [os.path.getsize(os.path.join(directory, name)) for name in seen["names"]]
    seen["get"] = [get(index) for index in range(5)]
    os.truncate(backend._key_to_path(key(1)), 4096)
    seen["truncated"] = get(1)
    os.unlink(backend._key_to_path(key(2)))
    seen["missing"] = get(2)
    os.unlink(backend._key_to_path(key(4)))
    seen["batch"] = [memory is not None for memory in backend.batched_get_blocking([key(3), key(4)])]
    path = backend._key_to_path(key(3))
    backend.remove(key(3))
    deadline = time.monotonic() + 20
    while os.path.exists(path) and time.monotonic() < deadline:
        time.sleep(0.01)
    seen["removed"] = not os.path.exists(path)
    seen["use_odirect"] = bool(backend.use_odirect)
    print(json.dumps(seen), flush=True)
    os._exit(0)  # its threads and loop would outlive main


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[3] == "direct")
