"""One engine's storage client, unchanged, told what to do: player.py ENGINE DIRECTORY SOURCE.

Each line of stdin is a JSON request: {"do": "store" | "lookup" | "load" | "files", "blocks": [indexes]}. Each line of
stdout is the answer, a list with one item a block:
  store   null, or what went wrong
  lookup  whether the engine says that it is there
  load    "same", "miss" (the engine itself said so), "wrong" (it said that it has it, and gave other bytes), or the
          name of the exception that its caller gets
  files   the path below DIRECTORY
  version null: from here on "blocks" is the version of all contents, which are compared with that one

The test stands between the requests and takes blocks away. End of input is the end.
"""

import asyncio
import contextlib
import ctypes
import importlib.util
import json
import mmap
import os
import random
import select
import socket
import subprocess
import sys
import threading
import time
import types

SIZE = 1 << 20


VERSION = [0]


def content(block):
    return random.Random(f"block {block} {VERSION}").randbytes(SIZE)


class Engine:
    """The methods below answer for one block; engines that take batches get batches of one, or override."""

    def __init__(self, directory, source):
        os.makedirs(directory, exist_ok=True)
        self.directory, self.source = directory, source
        self.memory = mmap.mmap(-1, SIZE)

    def all(self, what, blocks):
        work = getattr(self, "file" if what == "files" else what)
        return [self.attempt(work, block) for block in blocks]

    def attempt(self, work, block):
        try:
            return work(block)
        except Exception as error:  # whichever it is, the test judges it
            return type(error).__name__

    def judge(self, data, block):
        return "same" if bytes(data) == content(block) else "wrong"


class Vllm(Engine):
    """vLLM's fs tier. Importing vLLM itself needs a GPU build's world, so only the module is loaded."""

    def __init__(self, directory, source):
        super().__init__(directory, source)
        package = types.ModuleType("vllm")
        package.__path__ = [f"{source}/vllm"]
        sys.modules["vllm"] = package
        spec = importlib.util.spec_from_file_location("fs_tier_io", f"{source}/vllm/v1/kv_offload/tiering/fs/io.py")
        self.tier = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(self.tier)
        assert bool(os.environ.get("WITH_C")) == self.tier._HAS_FSIO_C, "the C path is there, or not, against the plan"
        assert self.tier.probe_o_direct(directory)

    def file(self, block):
        return f"{self.directory}/m_abc_r0/{block % 4096:03x}/00_g0/{block:064x}.bin"

    def store(self, block):
        self.memory[:] = content(block)
        self.tier.batch_store_block([self.file(block)], memoryview(self.memory), [0], SIZE, True)

    def lookup(self, block):
        if not self.tier._HAS_FSIO_C:
            return os.access(self.file(block), os.F_OK)
        from vllm.fs_io_C import batch_lookup

        return bool(batch_lookup([self.file(block)])[0])

    def load(self, block):
        self.memory[:] = bytes(SIZE)
        self.tier.batch_load_block([self.file(block)], memoryview(self.memory), [0], SIZE, True)
        return self.judge(self.memory, block)


class LmcacheFsNative(Engine):
    def __init__(self, directory, source):
        super().__init__(directory, source)
        from lmcache.lmcache_fs import LMCacheFSClient

        self.client = LMCacheFSClient(directory, 4, "", bool(os.environ.get("DIRECT")), 0)

    def key(self, block):
        return f"meta-llama/Llama-3.1-8B@00000000@0@{block:064x}"

    def file(self, block):
        [name] = [name for name in os.listdir(self.directory) if f"{block:064x}" in name]
        return f"{self.directory}/{name}"

    def done(self):
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            select.select([self.client.event_fd()], [], [], 1)
            completions = self.client.drain_completions()
            if completions:
                [(_, succeeded, message, hits)] = completions
                return succeeded, message, hits
        raise TimeoutError("no completion from LMCache within 60 s")

    def store(self, block):
        self.memory[:] = content(block)
        self.client.submit_batch_set([self.key(block)], [memoryview(self.memory)])
        succeeded, message, _ = self.done()
        return None if succeeded else message or "failed"

    def lookup(self, block):
        self.client.submit_batch_exists([self.key(block)])
        return bool(self.done()[2][0])

    def load(self, block):
        self.memory[:] = bytes(SIZE)
        self.client.submit_batch_get([self.key(block)], [memoryview(self.memory)])
        _, _, hits = self.done()
        return self.judge(self.memory, block) if hits and hits[0] else "miss"


class Memory:
    """The part of a memory object that LMCache uses. Theirs wants pinned memory, so this plain one stands in for it."""

    def __init__(self, shapes=None, dtypes=None, memory_format=None, size=SIZE):
        import torch

        # O_DIRECT needs page-aligned memory: torch's own is aligned to 64 bytes only.
        whole = torch.zeros(size + 4096, dtype=torch.uint8)
        start = -whole.data_ptr() % 4096
        self.tensor = whole[start : start + size]
        self.shapes, self.dtypes, self.memory_format = shapes, dtypes, memory_format
        self.metadata = self.meta = types.SimpleNamespace(
            shape=self.tensor.shape, dtype=self.tensor.dtype, address=0, fmt=memory_format, cached_positions=None
        )

    @property
    def byte_array(self):
        return memoryview(self.tensor.numpy())

    def fill(self, block):
        self.byte_array[:] = content(block)
        return self

    def get_shapes(self):
        return self.shapes

    def get_dtypes(self):
        return self.dtypes

    def get_memory_format(self):
        return self.memory_format

    def get_physical_size(self):
        return self.tensor.numel()

    get_size = get_physical_size

    def _nothing(self):
        pass

    ref_count_up = ref_count_down = pin = unpin = _nothing


def loop_in_thread():
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return loop


class LmcacheLocalDisk(Engine):
    def __init__(self, directory, source):
        super().__init__(directory, source)
        from lmcache.v1.config import LMCacheEngineConfig
        from lmcache.v1.memory_management import MemoryFormat
        from lmcache.v1.storage_backend.local_disk_backend import LocalDiskBackend

        class Allocator:
            def allocate(self, shape, _dtype, memory_format, **_options):
                return Memory(memory_format=memory_format, size=shape[0])

        self.memory_format = MemoryFormat.KV_2LTD
        config = LMCacheEngineConfig.from_defaults(
            local_disk=directory, max_local_disk_size=1, extra_config={"use_odirect": bool(os.environ.get("DIRECT"))}
        )
        self.backend = LocalDiskBackend(config, loop_in_thread(), Allocator(), dst_device="cpu")
        # A write that fails leaves nothing to wait for but its log line: see it go by.
        self.failed = {}
        write_file = self.backend.write_file

        def watched(buffer, path):
            try:
                write_file(buffer, path)
            except OSError as error:
                self.failed[path] = type(error).__name__
                raise

        self.backend.write_file = watched

    def key(self, block):
        import torch
        from lmcache.utils import CacheEngineKey

        return CacheEngineKey("m/x", 1, 0, block, torch.bfloat16)

    def file(self, block):
        return self.backend._key_to_path(self.key(block))

    def store(self, block):
        path = self.file(block)
        self.failed.pop(path, None)
        self.backend.submit_put_task(self.key(block), Memory(memory_format=self.memory_format).fill(block))
        deadline = time.monotonic() + 60
        while self.backend.exists_in_put_tasks(self.key(block)) and path not in self.failed:
            if time.monotonic() > deadline:
                raise TimeoutError(f"block {block} is not stored after 60 s")
            time.sleep(0.005)
        return self.failed.get(path)

    def lookup(self, block):
        return self.backend.contains(self.key(block))

    def load(self, block):
        memory = self.backend.get_blocking(self.key(block))
        return "miss" if memory is None else self.judge(memory.byte_array, block)


class LmcacheFsConnector(Engine):
    """The remote connector fs://, with its metadata in front of the data."""

    def __init__(self, directory, source):
        super().__init__(directory, source)
        import torch
        from lmcache.v1.config import LMCacheEngineConfig
        from lmcache.v1.memory_management import MemoryFormat
        from lmcache.v1.metadata import LMCacheMetadata
        from lmcache.v1.storage_backend.connector.fs_connector import FSConnector

        direct = bool(os.environ.get("DIRECT"))
        # It reads with O_DIRECT only what has no metadata in front.
        config = LMCacheEngineConfig.from_defaults(
            extra_config={"save_chunk_meta": not direct, "fs_connector_use_odirect": direct}
        )
        # 2 x 8 layers x 256 tokens x 2 heads x 64 of 2 bytes: SIZE
        metadata = LMCacheMetadata("m/x", 1, 1, 0, 0, torch.bfloat16, (8, 2, 256, 2, 64))
        self.shapes, self.dtypes = metadata.get_shapes(), metadata.get_dtypes()
        self.memory_format = MemoryFormat.KV_2LTD
        backend = types.SimpleNamespace(config=config, metadata=metadata, allocate=Memory)
        self.loop = loop_in_thread()
        self.connector = FSConnector(self.loop, backend, config, base_paths_str=directory)
        assert self.connector.full_chunk_size_bytes == SIZE and self.connector.use_odirect == direct

    def key(self, block):
        import torch
        from lmcache.utils import CacheEngineKey

        return CacheEngineKey("m/x", 1, 0, block, torch.bfloat16)

    def file(self, block):
        return os.fspath(self.connector._get_file_path(self.key(block)))

    def wait(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(60)

    def store(self, block):
        memory = Memory(self.shapes, self.dtypes, self.memory_format).fill(block)
        self.wait(self.connector.put(self.key(block), memory))

    def lookup(self, block):
        return self.wait(self.connector.exists(self.key(block)))

    def load(self, block):
        memory = self.wait(self.connector.get(self.key(block)))
        return "miss" if memory is None else self.judge(memory.byte_array, block)


class LmcacheL2(Engine):
    """The fs adapter of LMCache's distributed storage manager."""

    def __init__(self, directory, source):
        super().__init__(directory, source)
        from lmcache.v1.distributed.l2_adapters.fs_l2_adapter import FSL2Adapter, FSL2AdapterConfig

        self.adapter = FSL2Adapter(FSL2AdapterConfig(directory, use_odirect=bool(os.environ.get("DIRECT"))))

    def key(self, block):
        from lmcache.v1.distributed.api import ObjectKey

        return ObjectKey(block.to_bytes(32, "big"), "m/x", 0)

    def file(self, block):
        return os.fspath(self.adapter._key_to_path(self.key(block)))

    def wait(self, poll):
        deadline = time.monotonic() + 60
        while (answer := poll()) is None:
            if time.monotonic() > deadline:
                raise TimeoutError("no completion from LMCache within 60 s")
            time.sleep(0.002)
        return answer

    def store(self, block):
        task = self.adapter.submit_store_task([self.key(block)], [Memory().fill(block)])
        result = self.wait(lambda: self.adapter.pop_completed_store_tasks().get(task))
        return None if result.is_successful() else "failed"

    def lookup(self, block):
        task = self.adapter.submit_lookup_and_lock_task([self.key(block)], {})
        return bool(self.wait(lambda: self.adapter.query_lookup_and_lock_result(task)).test(0))

    def load(self, block):
        memory = Memory()
        task = self.adapter.submit_load_task([self.key(block)], [memory])
        found = self.wait(lambda: self.adapter.query_load_result(task))
        return self.judge(memory.byte_array, block) if found.test(0) else "miss"


class SglangFile(Engine):
    def __init__(self, directory, source):
        super().__init__(directory, source)
        os.environ["SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"] = directory
        import torch
        from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorageConfig

        self.torch = torch
        self.cache = HiCacheFile(
            HiCacheStorageConfig(0, 1, 0, 1, 0, 1, False, False, False, "meta-llama/Llama-3.1-8B", extra_config=None)
        )

    def key(self, block):
        return f"{block:064x}"

    def file(self, block):
        [name] = [name for name in os.listdir(self.directory) if name.startswith(self.key(block))]
        return f"{self.directory}/{name}"

    def store(self, block):
        value = self.torch.frombuffer(bytearray(content(block)), dtype=self.torch.uint8)
        return None if self.cache.set(self.key(block), value) else "failed"

    def lookup(self, block):
        return bool(self.cache.exists(self.key(block)))

    def load(self, block):
        value = self.cache.get(self.key(block), self.torch.zeros(SIZE, dtype=self.torch.uint8))
        return "miss" if value is None else self.judge(value.numpy().data, block)


class SglangNixl(Engine):
    """HiCacheNixl over NIXL's POSIX plugin, and its cleaner. The host's KV pool, which is memory of the engine, has a
    plain tensor of one page for a double."""

    def __init__(self, directory, source):
        super().__init__(directory, source)
        os.environ["SGLANG_HICACHE_NIXL_BACKEND_STORAGE_DIR"] = directory
        stub = types.ModuleType("sglang.srt.mem_cache.pool_host")  # it wants CUDA kernels; only the type is used
        stub.HostKVCache = object
        sys.modules["sglang.srt.mem_cache.pool_host"] = stub
        import torch
        from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
        from sglang.srt.mem_cache.storage.nixl.hicache_nixl import HiCacheNixl

        class HostPool:
            layout, page_size = "layer_first", 1
            kv_buffer = page = torch.zeros(SIZE, dtype=torch.uint8)

            def get_dummy_flat_data_page(self):
                return torch.zeros(SIZE, dtype=torch.uint8)

            def get_data_page(self, _index, flat=True):
                return self.page

            def set_from_flat_data_page(self, _index, data):
                self.page.copy_(data)

        self.torch, self.pool = torch, HostPool()
        options = {"plugin": {"posix": {"active": True}}, "use_direct_io": True}
        self.cache = HiCacheNixl(
            HiCacheStorageConfig(0, 1, 0, 1, 0, 1, False, False, False, "m/x", extra_config=options)
        )
        self.cache.register_mem_pool_host(self.pool)
        self.index = torch.zeros(1, dtype=torch.int64)

    def key(self, block):
        return f"{block:064x}"

    def file(self, block):
        return self.cache.file_manager.get_file_path(self.cache._get_suffixed_key(self.key(block)))

    def store(self, block):
        self.pool.page.copy_(self.torch.frombuffer(bytearray(content(block)), dtype=self.torch.uint8))
        return None if self.cache.batch_set_v1([self.key(block)], self.index) == [True] else "failed"

    def lookup(self, block):
        # Its cleaner looks at the pool as often as it likes: it finds nothing to do.
        assert self.cache._l3_cleaner is not None and not self.cache._l3_cleaner._tick(), "the cleaner cleans"
        return self.cache.exists(self.key(block))

    def load(self, block):
        self.pool.page.zero_()
        if self.cache.batch_get_v1([self.key(block)], self.index) != [True]:
            return "miss"
        return self.judge(self.pool.page.numpy().data, block)


class Nixl(Engine):
    """NIXL's POSIX plugin itself, by descriptors, as LMCache's and Dynamo's dynamic pools use it."""

    def __init__(self, directory, source):
        super().__init__(directory, source)
        from nixl._api import nixl_agent, nixl_agent_config

        self.agent = nixl_agent("player", nixl_agent_config(backends=[]))
        self.agent.create_backend("POSIX", {})
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.host = self.agent.register_memory(self.agent.get_reg_descs([(self.address, SIZE, 0, "")], "DRAM"))

    def file(self, block):
        return f"{self.directory}/{block:064x}"

    def move(self, block, direction, flags):
        descriptor = os.open(self.file(block), flags | os.O_DIRECT, 0o644)
        try:
            registered = self.agent.register_memory(self.agent.get_reg_descs([(0, SIZE, descriptor, "")], "FILE"))
            try:
                return self.transfer(direction, 0, descriptor)
            finally:
                self.agent.deregister_memory(registered)
        finally:
            os.close(descriptor)

    def transfer(self, direction, offset, descriptor):
        transfer = self.agent.initialize_xfer(
            direction,
            self.agent.get_xfer_descs([(self.address, SIZE, 0)], "DRAM"),
            self.agent.get_xfer_descs([(offset, SIZE, descriptor)], "FILE"),
            "player",
        )
        deadline = time.monotonic() + 60
        state = self.agent.transfer(transfer)
        while state not in ("DONE", "ERR") and time.monotonic() < deadline:
            time.sleep(0.0005)
            state = self.agent.check_xfer_state(transfer)
        self.agent.release_xfer_handle(transfer)
        return None if state == "DONE" else f"transfer {state}"

    def store(self, block):
        self.memory[:] = content(block)
        return self.move(block, "WRITE", os.O_CREAT | os.O_RDWR)

    def lookup(self, block):
        found = self.agent.query_memory([(0, 0, 0, self.file(block))], "POSIX", mem_type="FILE")
        return found[0] is not None

    def load(self, block):
        self.memory[:] = bytes(SIZE)
        return self.move(block, "READ", os.O_RDONLY) or self.judge(self.memory, block)


class NixlPool(Nixl):
    """A static pool: one file, preallocated and open as long as the process lives, whose slots are overwritten."""

    SLOTS = 4

    def __init__(self, directory, source):
        super().__init__(directory, source)
        first = os.open(self.file(0), os.O_CREAT | os.O_RDWR, 0o644)
        os.posix_fallocate(first, 0, 256 << 20)
        self.descriptor = os.open(self.file(0), os.O_RDWR | os.O_DIRECT)
        os.close(first)
        self.agent.register_memory(self.agent.get_reg_descs([(0, 256 << 20, self.descriptor, "")], "FILE"))
        self.slots = {}

    def file(self, block):
        return f"{self.directory}/pool_0.bin"

    def move(self, block, direction, flags):
        return self.transfer(direction, block % self.SLOTS * SIZE, self.descriptor)

    def store(self, block):
        self.slots[block % self.SLOTS] = block
        return super().store(block)

    def lookup(self, block):
        return self.slots.get(block % self.SLOTS) == block

    def load(self, block):
        return super().load(block) if self.lookup(block) else "miss"


class Mooncake(Engine):
    """Mooncake's store with its master and one real client, whose offload goes to the directory. A store is done when
    the block is in a file and no more in memory: what is loaded comes from the file."""

    OFFLOAD_S = 6

    def __init__(self, directory, source):
        super().__init__(directory, source)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        master = f"{source}/mooncake/mooncake_master"
        os.chmod(master, 0o755)  # a wheel's own start script does that
        options = {
            "rpc_port": port,
            "rpc_address": "127.0.0.1",
            "metrics_port": 0,
            "enable_metric_reporting": "false",
            "enable_offload": "true",
            "default_kv_lease_ttl": 50,
            "max_threads": 2,
            "minloglevel": 2,
        }
        # It goes with this process, whatever ends that.
        self.master = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", master, *(f"--{name}={value}" for name, value in options.items())],
            stdin=subprocess.DEVNULL,
        )
        self.wait(lambda: self.listens(port), 30)
        settings = {"HEARTBEAT_INTERVAL_SECONDS": 1, "BUCKET_KEYS_LIMIT": 1, "LOCAL_BUFFER_SIZE_BYTES": 64 << 20}
        os.environ.update({f"MOONCAKE_OFFLOAD_{name}": str(value) for name, value in settings.items()})
        from mooncake.store import MooncakeDistributedStore

        self.cache = MooncakeDistributedStore()
        assert (
            self.cache.setup(
                local_hostname="127.0.0.1",
                metadata_server="P2PHANDSHAKE",
                global_segment_size=64 << 20,
                local_buffer_size=32 << 20,
                protocol="tcp",
                rdma_devices="",
                master_server_addr=f"127.0.0.1:{port}",
                enable_ssd_offload=True,
                ssd_offload_path=directory,
            )
            == 0
        )

    @staticmethod
    def listens(port):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return True

    @staticmethod
    def wait(condition, timeout_s):
        deadline = time.monotonic() + timeout_s
        while not condition() and time.monotonic() < deadline:
            time.sleep(0.05)
        return condition()

    def key(self, block):
        return f"block-{block:08x}"

    def file(self, block):
        """A file for each key has the key in its name, a bucket before the data, and a pool is one file."""
        for directory, _, names in os.walk(self.directory):
            for name in names:
                path = f"{directory}/{name}"
                if self.key(block) in name or name == "kv_cache.data":
                    return path
                if name.endswith(".bucket") and self.key(block).encode() in self.head(path):
                    return path
        raise FileNotFoundError(self.key(block))

    @staticmethod
    def head(path):
        with open(path, "rb") as file:
            return file.read(64)

    def replicas(self, keys):
        """In memory and in a file, of each key."""
        found = [self.cache.get_replica_desc(key) for key in keys]
        return [
            (any(one.is_memory_replica() for one in every), any(one.is_local_disk_replica() for one in every))
            for every in found
        ]

    def all(self, what, blocks):
        return self.store_all(blocks) if what == "store" else super().all(what, blocks)

    def store_all(self, blocks):
        keys = [self.key(block) for block in blocks]
        for key, block in zip(keys, blocks, strict=True):
            assert self.cache.put(key, content(block)) == 0
        self.wait(lambda: all(in_file for _, in_file in self.replicas(keys)), self.OFFLOAD_S)
        # The key is leased for a moment to the client that asks for it.
        self.wait(lambda: len(self.cache.batch_replica_clear(keys, self.cache.get_hostname())) == len(keys), 1)
        self.wait(lambda: not any(in_memory for in_memory, _ in self.replicas(keys)), 1)
        return [None if here == (False, True) else "failed" for here in self.replicas(keys)]

    def lookup(self, block):
        return self.cache.is_exist(self.key(block)) == 1

    def load(self, block):
        data = self.cache.get(self.key(block))
        return self.judge(data, block) if data else "miss"


class Safetensors(Engine):
    def __init__(self, directory, source):
        super().__init__(directory, source)
        import safetensors.torch
        import torch

        self.torch, self.library = torch, safetensors.torch

    def file(self, block):
        return f"{self.directory}/{block:04d}.safetensors"

    def store(self, block):
        tensor = self.torch.frombuffer(bytearray(content(block)), dtype=self.torch.uint8)
        self.library.save_file({"kv": tensor}, self.file(block))

    def lookup(self, block):
        return os.path.exists(self.file(block))

    def load(self, block):
        """Through a mapping: what is wrong with the bytes is told by a signal, if they are not read before."""
        return self.judge(self.library.load_file(self.file(block))["kv"].numpy().data, block)


class TorchSave(Safetensors):
    def file(self, block):
        return f"{self.directory}/{block:04d}.pt"

    def store(self, block):
        tensor = self.torch.frombuffer(bytearray(content(block)), dtype=self.torch.uint8)
        self.torch.save({"kv": tensor}, self.file(block))

    def load(self, block):
        mapped = bool(os.environ.get("MAPPED"))
        return self.judge(self.torch.load(self.file(block), mmap=mapped)["kv"].numpy().data, block)


ENGINES = {
    "vllm": Vllm,
    "lmcache-fs-native": LmcacheFsNative,
    "lmcache-local-disk": LmcacheLocalDisk,
    "lmcache-fs-connector": LmcacheFsConnector,
    "lmcache-l2": LmcacheL2,
    "sglang-file": SglangFile,
    "sglang-nixl": SglangNixl,
    "nixl": Nixl,
    "nixl-pool": NixlPool,
    "mooncake": Mooncake,
    "safetensors": Safetensors,
    "torch": TorchSave,
}


def main(name, directory, source):
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the engines' own prints
    sys.path.insert(0, source)
    engine = ENGINES[name](directory, source)
    print(json.dumps("ready"), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        if request["do"] == "version":
            VERSION[:] = request["blocks"]
            answer = [None]
        else:
            answer = engine.all(request["do"], request["blocks"])
        print(json.dumps(answer), file=answers, flush=True)
    os._exit(0)  # threads and loops of the engines would outlive main


if __name__ == "__main__":
    main(*sys.argv[1:4])
