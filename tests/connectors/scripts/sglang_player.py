"""SGLang's HiCache controller with kvfs as its storage: sglang_player.py SETTINGS, a JSON object.

    extra     the extra configuration of the dynamic backend
    layout    of the host pools; hybrid: a hybrid controller, with side pools; pages: how many the host pool has
    linker    the configuration of an external linker: the unified radix cache instead, see sglang_linker.py

Pools, controller, threads and factory are SGLang's own; only "device" is the CPU. The protocol is that of
engine_players.py. Block b is page b % 100 of prompt b // 100, and SGLang's keys are hashes of all tokens up to a page.
A request is about the pages from a prompt's first on, up to the last one named.

    store     how many pages SGLang takes for stored
    load      [pages found by the look-up, pages loaded, whether their bytes are right]
    counters  those of the connector
    call      what a method of the backend returns, for keys that are given
"""

import dataclasses
import importlib.util
import inspect
import json
import random
import sys
import threading
import time
import types

# SGLang imports torchvision, which on a CPU comes with CUDA's libraries. It is not called here.
import transformers.utils.import_utils  # noqa: F401  (looks for torchvision itself, so first)


def stubbed(attribute):
    if attribute.startswith("__"):
        raise AttributeError(attribute)
    return types.SimpleNamespace()


if importlib.util.find_spec("torchvision") is None:
    for name in ("torchvision", "torchvision.io", "torchvision.transforms", "torchvision.transforms.functional"):
        module = types.ModuleType(name)
        module.__spec__ = importlib.util.spec_from_loader(name, None)
        module.__getattr__ = stubbed
        sys.modules[name] = module

import torch  # noqa: E402
from player_lines import serve  # noqa: E402
from sglang.srt.runtime_context import get_parallel  # noqa: E402

get_parallel().override_permanently(
    tp_rank=0, tp_size=1, attn_tp_rank=0, attn_tp_size=1, attn_dp_rank=0, pp_rank=0, pp_size=1, attn_dcp_size=1,
    attn_dcp_rank=0,
)  # fmt: skip

from sglang.srt.managers.cache_controller import HiCacheController  # noqa: E402
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool  # noqa: E402
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost  # noqa: E402

PAGE, HEADS, WIDTH, LAYERS = 16, 2, 32, 4
DEADLINE_S = 60


def awaited(poll):
    deadline = time.monotonic() + DEADLINE_S
    while (result := poll()) is None:
        assert time.monotonic() < deadline, "SGLang has no answer"
        time.sleep(0.001)
    return result


def popped(queue):
    return None if queue.empty() else queue.get_nowait()


def host_of(kind, device, layout, **options):
    """A host pool of that class. From 0.5.23 on it knows nothing of the device's pool but what it is told, such as
    `options`."""
    common = {"pin_memory": False}
    if "device_pool" in inspect.signature(kind.__init__).parameters:
        return kind(device, 2.0, 0, PAGE, layout, **common)
    common |= {"start_layer": device.start_layer, "end_layer": device.end_layer, "device_capacity_tokens": device.size}
    return kind(device.get_device_pool_infos()[0].buffer_info, 2.0, 0, PAGE, layout, **common, **options)


class Allocator:
    """The controller asks an allocator of device slots for its pool, and no slots are allocated here."""

    def __init__(self, pool):
        self.pool = pool

    def get_kvcache(self):
        return self.pool


class Player:
    page_tokens = PAGE

    def __init__(self, settings):
        torch.distributed.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
        self.layout, self.pages = settings["layout"], settings.get("pages", 40)
        self.device = MHATokenToKVPool(
            self.pages * PAGE, PAGE, torch.bfloat16, HEADS, WIDTH, LAYERS, "cpu", enable_memory_saver=False
        )
        self.host = self.host_pool(self.device)
        self.controller = self.controller_of(self.host, settings)
        self.backend = self.controller.storage_backend
        self.hashes(0, 1)  # builds an extension at its first use

    def host_pool(self, device):
        return host_of(MHATokenToKVPoolHost, device, self.layout)

    def controller_of(self, host, settings):
        return HiCacheController(
            Allocator(self.device), host, PAGE, tp_group=torch.distributed.group.WORLD, io_backend="direct",
            load_cache_event=threading.Event(), storage_backend="dynamic", prefetch_threshold=PAGE,
            model_name="org/a-model", storage_backend_extra_config=dict(settings["extra"]), enable_storage_metrics=True,
        )  # fmt: skip

    # ---- prompts ----

    def tokens(self, prompt, pages):
        return random.Random(f"prompt {prompt}").choices(range(50_000), k=100 * self.page_tokens)[
            : pages * self.page_tokens
        ]

    def page(self, pool, prompt, index, name="kv"):
        """The bytes of a page, as SGLang has a flat one."""
        like = pool.get_dummy_flat_data_page()
        size = like.numel() * like.element_size()
        data = random.Random(f"{name} {prompt} {index}").randbytes(size)
        return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(like.dtype).reshape(like.shape)

    def fill(self, pool, indices, prompt, first=0, name="kv"):
        for index, slot in enumerate(indices[:: pool.page_size].tolist()):
            pool.set_from_flat_data_page(slot, self.page(pool, prompt, first + index, name))

    def is_right(self, pool, indices, prompt, first=0, name="kv"):
        return all(
            torch.equal(
                pool.get_data_page(slot, flat=True).contiguous().view(torch.uint8),
                self.page(pool, prompt, first + index, name).view(torch.uint8),
            )
            for index, slot in enumerate(indices[:: pool.page_size].tolist())
        )

    def hashes(self, prompt, pages):
        from sglang.srt.mem_cache.utils import get_storage_hash_str

        return get_storage_hash_str(self.tokens(prompt, pages), None, page_size=self.page_tokens)

    # ---- requests ----

    def store(self, blocks):
        prompt, pages = blocks[-1] // 100, blocks[-1] % 100 + 1
        indices = self.host.alloc(pages * PAGE)
        self.fill(self.host, indices, prompt)
        self.controller.write_storage(indices, self.tokens(prompt, pages), self.hashes(prompt, pages))
        done = awaited(lambda: popped(self.controller.ack_backup_queue))
        self.host.free(indices)
        return done.completed_tokens // PAGE

    def load(self, blocks):
        prompt, pages = blocks[-1] // 100, blocks[-1] % 100 + 1
        self.controller.prefetch(f"{prompt}", self.tokens(prompt, pages))
        operation = awaited(lambda: popped(self.controller.prefetch_hit_queue))
        found = operation.storage_hit_count // PAGE
        if not found:
            return [0, 0, True]
        # The scheduler's part of a hit.
        operation.host_indices = self.host.alloc(found * PAGE)
        self.host.kv_buffer.view(torch.uint8).fill_(0xA5)
        self.controller.prefetch_buffer.put(operation)
        loaded = 0
        while not (ack := awaited(lambda: popped(self.controller.ack_prefetch_queue))).completed_req:
            loaded = (ack.completed_tokens or 0) // PAGE
        right = self.is_right(self.host, operation.host_indices[: loaded * PAGE], prompt)
        self.host.free(operation.host_indices)
        return [found, loaded, right]

    def keys(self, blocks):
        return self.hashes(blocks[-1] // 100, blocks[-1] % 100 + 1)

    def counters(self, blocks):
        return dataclasses.asdict(self.backend.statistics())

    def stats(self, blocks):
        stats = self.backend.get_stats()
        return [stats.prefetch_pgs, stats.backup_pgs, stats.prefetch_bandwidth, stats.backup_bandwidth]

    def call(self, blocks, method, arguments):
        return getattr(self.backend, method)(*arguments)

    def close(self):
        self.controller.detach_storage_backend()
        torch.distributed.destroy_process_group()


def main():
    settings = json.loads(sys.argv[1])
    if settings.get("linker"):
        import sglang_linker

        player = sglang_linker.Linked(settings)
    elif settings.get("hybrid"):
        import sglang_hybrid

        player = sglang_hybrid.Hybrid(settings)
    else:
        player = Player(settings)
    serve(player)


if __name__ == "__main__":
    main()
