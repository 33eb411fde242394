"""UCM (unified-cache-management): a store of blocks for its connectors to vLLM and SGLang.

    ucm_connectors:
      - ucm_connector_name: KvfsStore
        ucm_connector_module_path: kvfs.connectors.ucm
        ucm_connector_config: {mount: /mnt/kv, namespace: ucm}

UCM hashes the tokens of a block, the model, the layout and the rank into the block's id, and asks by it. A block has
one shard, or one for each layer; a shard is a block of kvfs. A block of several shards has a mark, too, which is stored
when all of its shards are. So a look-up asks for one key a block. A load that fails raises, and UCM computes those
blocks again. Interface: ucm.store.ucmstore_v1 (versions.py); docs/engines.md has the configuration.

Memory comes as addresses. Addresses of a GPU go through libkvfs, through pinned memory of the host. No test has tried
that.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, cast

from kvfs.client.memory import Memory
from kvfs.connectors import versions
from kvfs.connectors.common import BUSY_TIMEOUT_S, Connection, options_of
from kvfs.errors import DeadlineError

try:
    from ucm.store.pipeline.errors import StoreNotFoundError
    from ucm.store.ucmstore_v1 import Task, UcmKVStoreBaseV1
except ImportError as error:
    raise versions.missing("ucm", error) from error

# Loads have threads of their own: a request waits for them, and nobody for a store.
LOADERS, STORERS = 4, 2
# A task that takes longer has failed. Each of its blocks has a deadline of its own besides.
TASK_TIMEOUT_S = 120.0
# For the end of one that has failed so: a device that still writes into memory is given up after BUSY_TIMEOUT_S.
END_TIMEOUT_S = 2 * BUSY_TIMEOUT_S
# Of so many blocks it is known which of their shards are stored; the oldest are forgotten, and stay without a mark.
PARTS_MAX = 1 << 16
_ID_MAX = 240
# The options of UCM itself, which it adds to the user's.
_UCM_OPTIONS = (
    "unique_id", "device_id", "tensor_size_list", "shard_size", "block_size", "local_rank_size", "tensor_layout",
    "share_buffer_enable", "gpu_kv_buffer_addrs", "gpu_kv_buffer_sizes", "posix_gc_enable", "cpu_affinity_cores",
    "cache_buffer_capacity_gb", "storage_backends", "store_pipeline", "io_direct", "stream_number", "timeout_ms",
)  # fmt: skip

_logger = logging.getLogger("kvfs.connectors.ucm")


class Transfer(Task):  # type: ignore[misc]  # UCM has no types
    """A load or a store under way. UCM may wait for it once, and check it as often as it likes."""

    def __init__(self, future: Future[None], given_up: threading.Event | None = None) -> None:
        self.future = future
        # Nobody waits any more, and its memory may hold anything.
        self.given_up = given_up or threading.Event()


class _OnGpu:
    """Bytes at an address of a GPU's memory, as `__cuda_array_interface__` tells them."""

    def __init__(self, address: int, size: int) -> None:
        self.nbytes = size
        self.__cuda_array_interface__ = {
            "shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3, "strides": None,
        }  # fmt: skip


class KvfsStore(UcmKVStoreBaseV1):  # type: ignore[misc]
    """One store of a process of UCM: the scheduler's, which looks up, or a worker's, which moves blocks."""

    def __init__(self, config: Mapping[str, object]) -> None:
        super().__init__(config)
        versions.check("ucm", _logger)
        options = options_of("ucm", config, known=_UCM_OPTIONS)
        device = config.get("device_id", -1)
        self._on_gpu = isinstance(device, int) and device >= 0
        self._sizes, self.shards = _layout(config)
        self.connection = Connection(
            options, options.space(), engine="ucm", logger=_logger, gpu="auto" if self._on_gpu else None
        )
        self._loading = ThreadPoolExecutor(LOADERS, "kvfs-load")
        self._storing = ThreadPoolExecutor(STORERS, "kvfs-store")
        # Of blocks with several shards: those that are stored.
        self._parts: OrderedDict[bytes, set[int]] = OrderedDict()
        self._lock = threading.Lock()

    def close(self) -> None:
        """Wait for all calls under way, and disconnect. UCM has no call for it, and calls nothing."""
        self._loading.shutdown()
        self._storing.shutdown()
        self.connection.close()

    def cc_store(self) -> int:
        raise NotImplementedError("kvfs for ucm: it is no store of C++: it cannot be below UCM's own (store_pipeline)")

    # ---- look-ups ----

    def lookup(self, block_ids: Sequence[bytes]) -> list[bool]:
        return self.connection.exists([_block_key(block) for block in block_ids])

    def lookup_on_prefix(self, block_ids: Sequence[bytes]) -> int:
        """The last of the blocks from the first on that exist without a gap; -1: not even the first."""
        return self.connection.exists_prefix([_block_key(block) for block in block_ids]) - 1

    def lookup_on_reverse(self, block_ids: Sequence[bytes]) -> int:
        """The last existing block; -1: none is."""
        return max((i for i, there in enumerate(self.lookup(block_ids)) if there), default=-1)

    def prefetch(self, block_ids: Sequence[bytes]) -> None:
        """UCM says so of blocks that it still trusts: they are used."""
        self.connection.touch([_block_key(block) for block in block_ids])

    # ---- moving ----

    def load(
        self, block_ids: Sequence[bytes], shard_index: Sequence[int], dst_tensor: Sequence[Sequence[Memory]]
    ) -> Transfer:
        return self._load(block_ids, shard_index, [list(row) for row in dst_tensor])

    def dump(
        self, block_ids: Sequence[bytes], shard_index: Sequence[int], src_tensor: Sequence[Sequence[Memory]]
    ) -> Transfer:
        return self._dump(block_ids, shard_index, [list(row) for row in src_tensor], 0)

    def load_data(self, block_ids: Sequence[bytes], shard_index: Sequence[int], dst_addr: Any) -> Transfer:
        """dst_addr: a row for each block, with an address for each of tensor_size_list; 0: none exists."""
        return self._load(block_ids, shard_index, self._rows(dst_addr))

    def dump_data(
        self, block_ids: Sequence[bytes], shard_index: Sequence[int], src_addr: Any, prerequisite_handle: int = 0
    ) -> Transfer:
        """prerequisite_handle: a CUDA event before which the memory is not to be read; 0: there is none."""
        return self._dump(block_ids, shard_index, self._rows(src_addr), int(prerequisite_handle))

    def wait(self, task: Transfer) -> None:
        """Raises StoreNotFoundError for a block that is not there, or not as it was stored: UCM computes it again.

        The task's memory is its owner's again with the answer. So a task that takes too long does not begin any more,
        or has ended, before DeadlineError is raised. Only after END_TIMEOUT_S more is a running one left; the error
        says so."""
        if not wait([task.future], TASK_TIMEOUT_S).done:
            began = not task.future.cancel()
            if began and not wait([task.future], END_TIMEOUT_S).done:
                task.given_up.set()
                raise DeadlineError(
                    f"kvfs for ucm: a task has not ended after {TASK_TIMEOUT_S + END_TIMEOUT_S:g} s: it may still use "
                    "its memory"
                )
            raise DeadlineError(
                f"kvfs for ucm: a task {'was under way' if began else 'had not begun'} after {TASK_TIMEOUT_S:g} s"
            )
        task.future.result()

    def check(self, task: Transfer) -> bool:
        return task.future.done()

    def _rows(self, addresses: Any) -> list[list[Memory]]:
        rows: list[list[Memory]] = []
        for row in addresses:
            if len(row) != len(self._sizes):
                raise ValueError(f"kvfs for ucm: {len(row)} addresses a block, tensor_size_list has {len(self._sizes)}")
            pairs = zip(map(int, row), self._sizes, strict=True)
            rows.append([self._piece(address, size) for address, size in pairs if address and size])
        return rows

    def _piece(self, address: int, size: int) -> Memory:
        if self._on_gpu:
            return cast(Memory, _OnGpu(address, size))
        return cast(Memory, (ctypes.c_char * size).from_address(address))

    def _items(
        self, block_ids: Sequence[bytes], shard_index: Sequence[int], rows: Sequence[list[Memory]]
    ) -> list[tuple[bytes, list[Memory]]]:
        if not len(block_ids) == len(shard_index) == len(rows):
            raise ValueError(
                f"kvfs for ucm: {len(block_ids)} blocks, {len(shard_index)} shards, {len(rows)} rows of memory"
            )
        keys = [self._shard_key(block, int(shard)) for block, shard in zip(block_ids, shard_index, strict=True)]
        return list(zip(keys, rows, strict=True))

    def _shard_key(self, block: bytes, shard: int) -> bytes:
        if not 0 <= shard < self.shards:
            raise ValueError(f"kvfs for ucm: shard {shard} of a block of {self.shards}")
        return _block_key(block) if self.shards == 1 else _block_key(block) + shard.to_bytes(2, "big")

    def _load(self, block_ids: Sequence[bytes], shard_index: Sequence[int], rows: Sequence[list[Memory]]) -> Transfer:
        items, blocks = self._items(block_ids, shard_index, rows), list(block_ids)
        return Transfer(self._loading.submit(self._load_now, blocks, items))

    def _load_now(self, blocks: Sequence[bytes], items: Sequence[tuple[bytes, list[Memory]]]) -> None:
        results = self.connection.get_into(items)
        wanted = [sum(map(_size, memory)) for _, memory in items]
        missing = [block for block, got, size in zip(blocks, results, wanted, strict=True) if got != size]
        if missing:
            # It is found no more until it is stored again.
            self.connection.delete([_block_key(block) for block in missing])
            raise StoreNotFoundError(
                f"kvfs for ucm: {len(missing)} of {len(blocks)} blocks are not there any more, the first is "
                f"{missing[0].hex()[:32]}"
            )

    def _dump(
        self, block_ids: Sequence[bytes], shard_index: Sequence[int], rows: Sequence[list[Memory]], event: int
    ) -> Transfer:
        items, shards = self._items(block_ids, shard_index, rows), [int(shard) for shard in shard_index]
        given_up = threading.Event()
        future = self._storing.submit(self._dump_now, list(block_ids), shards, items, event, given_up)
        return Transfer(future, given_up)

    def _dump_now(
        self,
        blocks: Sequence[bytes],
        shards: Sequence[int],
        items: Sequence[tuple[bytes, list[Memory]]],
        event: int,
        given_up: threading.Event,
    ) -> None:
        if event:
            _wait_event(event)
        stored = [] if given_up.is_set() else self.connection.put(items)
        if given_up.is_set():
            self.connection.delete([key for key, _ in items])
            raise RuntimeError(f"kvfs for ucm: {len(blocks)} blocks were not stored: it took too long")
        if self.shards > 1:
            self._mark([(block, shard) for block, shard, there in zip(blocks, shards, stored, strict=True) if there])
        if not all(stored):
            raise RuntimeError(f"kvfs for ucm: {stored.count(False)} of {len(blocks)} blocks were not stored")

    def _mark(self, stored: Iterable[tuple[bytes, int]]) -> None:
        """Store the marks of blocks whose last shard this was."""
        whole = []
        with self._lock:
            for block, shard in stored:
                parts = self._parts.setdefault(block, set())
                parts.add(shard)
                if len(parts) == self.shards:
                    whole.append(block)
                    del self._parts[block]
            while len(self._parts) > PARTS_MAX:
                self._parts.popitem(last=False)
        if whole:
            self.connection.put([(_block_key(block), self.shards.to_bytes(8, "little")) for block in whole])


def _layout(config: Mapping[str, object]) -> tuple[list[int], int]:
    """The sizes of a shard's tensors, and how many shards a block has. The scheduler's store is told neither."""
    sizes = [int(size) for size in cast("Iterable[int]", config.get("tensor_size_list") or ())]
    shard_size, block_size = (_number(config, name) for name in ("shard_size", "block_size"))
    if not sizes or not shard_size or not block_size:
        return sizes, 1
    if block_size % shard_size or not 1 <= block_size // shard_size <= 1 << 16 or min(sizes) < 0:
        raise ValueError(f"kvfs for ucm: block_size {block_size} in shards of {shard_size}: 1 to 65536 are possible")
    return sizes, block_size // shard_size


def _number(config: Mapping[str, object], name: str) -> int:
    given = config.get(name) or 0
    if isinstance(given, bool) or not isinstance(given, int) or given < 0:
        raise ValueError(f"kvfs for ucm: {name} {given!r} is no number of bytes")
    return given


def _block_key(block: bytes) -> bytes:
    if not 0 < len(block) <= _ID_MAX:
        raise ValueError(f"kvfs for ucm: a block's id of {len(block)} bytes: 1 to {_ID_MAX} are possible")
    return bytes(block)


def _size(memory: Memory) -> int:
    return ctypes.sizeof(memory) if isinstance(memory, ctypes.Array) else int(cast(Any, memory).nbytes)


def _wait_event(event: int) -> None:
    """Wait until a CUDA event has happened: until then a kernel writes what is to be stored."""
    driver = ctypes.CDLL("libcuda.so.1")
    if status := driver.cuEventSynchronize(ctypes.c_void_p(event)):
        raise RuntimeError(f"kvfs for ucm: cuEventSynchronize: CUDA error {status}")
