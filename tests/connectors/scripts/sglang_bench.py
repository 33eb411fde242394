"""One operation of SGLang's controller on a storage back end: sglang_bench.py BACKEND MOUNT OPERATION BATCHES PAGE_KIB.

BACKEND: kvfs, or SGLang's own `file`, whose directory an environment variable names. OPERATION: store, lookup or load
of BATCHES batches of 128 pages, by the functions that the controller's threads call. Loads are compared. Prints the
seconds of each batch as JSON.
"""

import json
import sys
import threading
import time
from types import SimpleNamespace

import torch
from sglang_player import PAGE, Allocator, HiCacheController, MHATokenToKVPool, MHATokenToKVPoolHost

BATCH = 128
WIDTH, HEADS = 128, 2


def controller_of(backend, mount, page_kib):
    layers = page_kib * 1024 // (2 * PAGE * HEADS * WIDTH * 2)
    device = MHATokenToKVPool(PAGE, PAGE, torch.bfloat16, HEADS, WIDTH, layers, "cpu", enable_memory_saver=False)
    host = MHATokenToKVPoolHost(
        device.get_device_pool_infos()[0].buffer_info, 0, 0, PAGE, "page_first_direct", pin_memory=False,
        device_capacity_tokens=device.size, start_layer=0, end_layer=layers, host_token_capacity=BATCH * PAGE,
    )  # fmt: skip
    extra = {
        "backend_name": "kvfs", "module_path": "kvfs.connectors.sglang", "class_name": "HiCacheKvfs", "interface_v1": 1,
        "mount": mount,
    }  # fmt: skip
    return HiCacheController(
        Allocator(device), host, PAGE, tp_group=torch.distributed.group.WORLD, load_cache_event=threading.Event(),
        io_backend="direct", storage_backend="dynamic" if backend == "kvfs" else backend, prefetch_threshold=PAGE,
        model_name="bench", storage_backend_extra_config=extra if backend == "kvfs" else {},
    )  # fmt: skip


def main(backend, mount, operation, batches, page_kib):
    torch.distributed.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
    controller = controller_of(backend, mount, int(page_kib))
    host = controller.mem_pool_host
    indices = host.alloc(BATCH * PAGE)
    words = host.kv_buffer.view(torch.int64)
    seconds = []
    for batch in range(int(batches)):
        hashes = [f"{batch:032x}{page:032x}" for page in range(BATCH)]
        generator = torch.Generator().manual_seed(batch)
        pattern = torch.randint(-(2**62), 2**62, words.shape, dtype=torch.int64, generator=generator)
        words.copy_(pattern if operation == "store" else torch.zeros_like(pattern))
        request = SimpleNamespace(request_id="bench", is_terminated=lambda: False, completed_tokens=0)
        begun = time.perf_counter()
        if operation == "store":
            assert controller.page_set_func(hashes, indices)
        elif operation == "lookup":
            assert controller.storage_backend.batch_exists(hashes) == BATCH
        else:
            assert controller.page_get_func(request, hashes, indices) == BATCH
        seconds.append(time.perf_counter() - begun)
        if operation == "load":
            assert torch.equal(words, pattern), "other bytes"
    controller.detach_storage_backend()
    torch.distributed.destroy_process_group()
    print(json.dumps(seconds))


if __name__ == "__main__":
    main(*sys.argv[1:])
