"""SGLang: a linker between the device's pools and kvfs, without a host tier: `--enable-unified-cache-external-linker`.

A page of a device pool is one block, the bytes of its layers one after the other. So the bytes of some layers are one
range of it, and a load goes by layers: the forward begins while the later ones are read. Bytes go through a staging
buffer on the host, pinned where the device is a GPU. Interface: sglang.srt.mem_cache.unified_cache.unified_cache_linker
(versions.py). docs/engines.md has the configuration, and the models for which SGLang has a linker at all.

A load that fails aborts its requests: nothing is computed in its place. So what a look-up has found is leased until it
is loaded. A block that could not be loaded is not found until it is stored again.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from queue import Empty, Queue
from typing import Any, cast

from kvfs.client.keys import Key
from kvfs.connectors import versions
from kvfs.connectors.common import Connection, Counters, State, options_of
from kvfs.connectors.leases import Leases, seconds_of
from kvfs.connectors.metrics import Exporter
from kvfs.connectors.spoiled import Spoiled
from kvfs.errors import KvfsError

try:
    import torch
    from sglang.srt.mem_cache.hicache_storage import PoolName
    from sglang.srt.mem_cache.hybrid_cache.linker_pool_assembler import resolve_hybrid_device_pool_group
    from sglang.srt.mem_cache.unified_cache import linker_factory as _linker_factory  # noqa: F401, it loads this class
    from sglang.srt.mem_cache.unified_cache.unified_cache_linker import LayerWiseLoadCounter, UnifiedCacheLinker
    from sglang.srt.runtime_context import get_model, get_parallel
    from sglang.srt.utils import get_device_module

    from kvfs.connectors.sglang_pools import lengths, memory_at, options_given
except ImportError as error:
    raise versions.missing("sglang linker", error) from error

LEASE_S = 30.0
CLOSE_TIMEOUT_S = 30.0
# Bytes of each of the two staging buffers: one of loads, one of stores.
STAGING_SIZE = 64 << 20
# Layers are read together until a page has so many bytes of them: a read of fewer costs as much.
_GROUP_SIZE = 256 << 10
_ALIGNMENT = 4096

_logger = logging.getLogger("kvfs.connectors.sglang")
_device = get_device_module()


@dataclass(frozen=True, slots=True)
class _Part:
    """One buffer's bytes of a page: size of them, from offset on in the block."""

    buffer: torch.Tensor
    offset: int
    size: int


class DevicePool:
    """One physical pool of the device as blocks, a page each. entry: SGLang's DevicePoolEntry.

    parts: by layer of the model, in the order of the layers. block_size: bytes of a page. Raises ValueError for a pool
    with a buffer that belongs to no layer, or to two.
    """

    def __init__(self, entry: Any, layer_count: int) -> None:
        self.entry, self.name = entry, str(entry.name)
        self.parts: list[list[_Part]] = []
        self.block_size, mapped = 0, []
        for layer in range(layer_count):
            found = entry.layer_mapping.get(layer)
            indices = [] if found is None else [found] if isinstance(found, int) else list(found)
            mapped += indices
            parts = []
            for buffers, metas in zip(entry.components, entry.buffer_meta, strict=True):
                for index in indices:
                    size = int(metas[index][2])
                    parts.append(_Part(buffers[index], self.block_size, size))
                    self.block_size += size
            self.parts.append(parts)
        counts = {len(component) for component in entry.components}
        if counts != {len(mapped)} or sorted(mapped) != list(range(len(mapped))):
            raise ValueError(
                f"kvfs for sglang: pool {self.name}: {sorted(counts)} buffers, layers have {sorted(mapped)}"
            )
        shape = [[(part.size, str(part.buffer.dtype)) for part in parts] for parts in self.parts]
        self.geometry = sha256(repr([self.name, int(entry.page_size), shape]).encode()).hexdigest()[:16]

    def pages(self, indices: torch.Tensor) -> list[int]:
        """Numbers of the pages that these slots are: whole ones, in order. Raises SGLang's ValueError."""
        span = self._span()
        return [row // span for row in self.entry.prepare_locations(indices)]

    def range_of(self, first: int, end: int) -> tuple[int, int]:
        """Offset and size of the bytes of layers from first up to end."""
        parts = [part for parts in self.parts[first:end] for part in parts]
        return (parts[0].offset, sum(part.size for part in parts)) if parts else (0, 0)

    def gather(self, pages: Sequence[int], rows: torch.Tensor) -> None:
        """Copy these pages into rows, one each, from its first byte on."""
        for parts in self.parts:
            for part in parts:
                paged, index = self._paged(part, pages)
                whole = paged[index].contiguous().view(len(pages), -1).view(torch.uint8)
                rows[:, part.offset : part.offset + part.size].copy_(whole)

    def scatter(self, pages: Sequence[int], rows: torch.Tensor, first: int, end: int) -> None:
        """Copy the bytes of layers from first up to end, with which the rows begin, to these pages."""
        begin, _ = self.range_of(first, end)
        for parts in self.parts[first:end]:
            for part in parts:
                paged, index = self._paged(part, pages)
                at = part.offset - begin
                column, dtype = rows[:, at : at + part.size], part.buffer.dtype
                if at % dtype.itemsize:
                    column = column.contiguous()
                column = column.to(part.buffer.device, non_blocking=True)
                paged[index] = column.view(dtype).reshape(len(pages), *paged.shape[1:])

    def _span(self) -> int:
        """Rows of a buffer that are one page."""
        part = next(part for parts in self.parts for part in parts)
        return part.size // (int(part.buffer.nbytes) // int(part.buffer.shape[0]))

    def _paged(self, part: _Part, pages: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """A buffer with its rows by pages, and the numbers of some, on its device."""
        span = self._span()
        count = part.buffer.shape[0] // span
        paged = part.buffer[: count * span].unflatten(0, (count, span))
        return paged, torch.tensor(pages, dtype=torch.int64, device=part.buffer.device)


class Staging:
    """Memory of the host that bytes go through, in rows of which each begins at a page of memory."""

    def __init__(self, size: int, *, pinned: bool) -> None:
        memory = torch.empty(size + _ALIGNMENT, dtype=torch.uint8, pin_memory=pinned)
        self._memory = memory[-memory.data_ptr() % _ALIGNMENT :][:size]

    def rows(self, count: int, size: int) -> tuple[torch.Tensor, int]:
        """As many rows of size bytes as there is room for, count at most and one at least; and their addresses' step.
        Raises ValueError where not even one fits."""
        step = -(-size // _ALIGNMENT) * _ALIGNMENT
        fit = min(count, len(self._memory) // step)
        if not fit:
            raise ValueError(f"kvfs for sglang: a page of {size} bytes, a staging buffer of {len(self._memory)}")
        return self._memory[: fit * step].view(fit, step), step


class KvfsLinker(UnifiedCacheLinker):  # type: ignore[misc]
    """Pages of one rank. extra_config: mount, namespace, revision, timeout_s, depth as in common.Options, and lease_s.

    lookup(), load() and offload() are the scheduler's and wait for no device. Two threads read and store.
    """

    def __init__(
        self,
        server_args: Any,
        params: Any,
        *,
        components: Any,
        extra_config: Mapping[str, object] | None = None,
        forward_stream: Any = None,
    ) -> None:
        extra = options_given(extra_config)
        lease_s = seconds_of("sglang", extra.get("lease_s", LEASE_S))
        options = options_of("sglang", extra, known={"lease_s"})
        versions.check("sglang linker", _logger)
        self.forward_stream = forward_stream
        self._group = resolve_hybrid_device_pool_group(
            kvcache=params.token_to_kv_pool_allocator.get_kvcache(),
            page_size=params.page_size,
            params=params,
            components=components,
        )
        self.pools = self._group.entry_map
        self._blocks = {entry.name: DevicePool(entry, self._group.num_layers) for entry in self._group.entries}
        self._layers = self._layer_groups()
        rank, ranks = _rank_of(params)
        # Pages that are the same on all ranks are stored by the first.
        self._writes = not self._group.rank_replicated or rank == 0
        own = "" if self._group.rank_replicated else f".t{rank}"
        self._suffix = f"{own}.c{params.attn_cp_rank}.p{params.pp_rank}".encode()
        shape = [own and ranks, params.attn_cp_size, params.pp_size, *(pool.geometry for pool in self._blocks.values())]
        layout = sha256(repr(shape).encode()).hexdigest()[:16]
        model = get_model().model_path or "unnamed"
        space = options.space(model, f"linker.{params.page_size}.{layout}")
        self._connection = Connection(options, space, engine="sglang", logger=_logger)
        self._leases = Leases(self._connection, lease_s)
        self._spoiled = Spoiled()
        self._exporter = Exporter("sglang", space)
        buffer = self._group.entries[0].kv_buffer[0]
        self._device, pinned = buffer.device, buffer.device.type == "cuda"
        size = max(STAGING_SIZE, *(pool.block_size + _ALIGNMENT for pool in self._blocks.values()))
        self._staging_in, self._staging_out = Staging(size, pinned=pinned), Staging(size, pinned=pinned)
        self.layer_done_counter = LayerWiseLoadCounter(self._group.num_layers)
        if PoolName.MAMBA in self.pools:
            params.req_to_token_pool.register_layer_transfer_counter(self.layer_done_counter)
        self._pending: dict[str, list[Any]] = {}
        self._loads: Queue[tuple[int, list[Any], Any] | None] = Queue()
        self._stores: Queue[tuple[list[Any], list[Any]] | None] = Queue()
        self._stored: Queue[bool] = Queue()
        self._threads = [
            threading.Thread(target=work, name=f"kvfs-sglang-{name}", daemon=True)
            for name, work in (("load", self._load_all), ("store", self._store_all))
        ]
        for thread in self._threads:
            thread.start()

    # ---- the scheduler's calls ----

    def lookup(self, rid: str, transfers: list[Any]) -> list[int]:
        """All lengths of prefixes, in pages, of which every pool has what it needs. Their blocks are leased."""
        expanded = self._group.resolve_transfers(transfers)
        pages = next((list(each.keys or ()) for each in transfers if each.name == PoolName.KV), [])
        if not expanded or not pages:
            return []
        found: list[bytes] = []
        possible = set(range(1, len(pages) + 1))
        for transfer in expanded:
            # No pool can restore more than the one before it.
            names = self._keys(transfer.name, pages[: max(possible, default=0)])
            there = [
                is_there and name not in self._spoiled
                for name, is_there in zip(names, self._connection.exists(names) if names else [], strict=True)
            ]
            found += [name for name, is_there in zip(names, there, strict=True) if is_there]
            possible &= lengths(there, transfer.hit_policy, len(transfer.keys or ()))
        if possible:
            self._leases.take(found)
        return sorted(possible)

    def load(self, rid: str, transfers: list[Any]) -> bool:
        """The answer depends on the transfers alone: it must be the same on all ranks."""
        expanded = self._group.resolve_transfers(transfers, allow_partial=True, allow_missing_kv=True)
        if not expanded:
            return False
        if rid in self._pending:
            raise RuntimeError(f"kvfs for sglang: request {rid} is queued for loading already")
        self._pending[rid] = expanded
        return True

    def cancel_queued_load(self, rid: str) -> bool:
        transfers = self._pending.pop(rid, None)
        for transfer in transfers or ():
            self._leases.give_back(self._keys(transfer.name, transfer.keys))
        return transfers is not None

    def start_layer_wise_loading(self) -> int:
        if not self._pending:
            return -1
        pending, self._pending = self._pending, {}
        index = cast(int, self.layer_done_counter.update_producer())
        ready = _device.Event()
        ready.record()
        self._loads.put((index, [each for transfers in pending.values() for each in transfers], ready))
        return index

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        return bool(self.layer_done_counter.finish(counter_index))

    def offload(self, transfers: list[Any], session_id: str | None = None) -> bool:
        expanded = self._group.resolve_transfers(transfers, allow_partial=True)
        if not expanded:
            return False
        if self._writes:
            self._stores.put((expanded, self.record_offload_ready()))
        else:
            self._stored.put(True)
        return True

    def num_completed_offloads(self) -> int:
        return self._stored.qsize()

    def pop_completed_offload(self) -> bool:
        return self._stored.get_nowait()

    def reset(self) -> None:
        for rid in list(self._pending):
            self.cancel_queued_load(rid)
        self._loads.join()
        self._stores.join()
        while True:
            try:
                self._stored.get_nowait()
            except Empty:
                break
        self.layer_done_counter.reset()

    def close(self) -> None:
        """A second close() does nothing."""
        if not self._threads:
            return
        self.reset()
        self._loads.put(None)
        self._stores.put(None)
        for thread in self._threads:
            thread.join(CLOSE_TIMEOUT_S)
        self._threads = []
        self._connection.close(timeout_s=CLOSE_TIMEOUT_S)

    def statistics(self) -> Counters:
        return self._connection.counters.copy()

    # ---- loads, in a thread ----

    def _load_all(self) -> None:
        self._take_device()
        while (task := self._loads.get()) is not None:
            index, transfers, ready = task
            try:
                ready.synchronize()
                self._load(index, transfers)
            except Exception as reason:
                # The forward that waits is told, and SGLang aborts its requests.
                self.layer_done_counter.fail(index, reason)
                _logger.warning("kvfs for sglang: a load failed, its requests are aborted: %s", reason)
            finally:
                for transfer in transfers:
                    self._leases.give_back(self._keys(transfer.name, transfer.keys))
                self._exporter.update(self._connection.counters)
                self._loads.task_done()
        self._loads.task_done()

    def _load(self, index: int, transfers: Sequence[Any]) -> None:
        batches: dict[Any, tuple[list[bytes], list[int]]] = {}
        for transfer in transfers:
            names, pages = batches.setdefault(transfer.name, ([], []))
            names += self._keys(transfer.name, transfer.keys)
            pages += self._blocks[transfer.name].pages(transfer.host_indices)
        for first, end in self._layers:
            for name, (names, pages) in batches.items():
                self._load_layers(self._blocks[name], names, pages, first, end)
            for layer in range(first, end):
                self.layer_done_counter.complete(index, layer)

    def _load_layers(
        self, pool: DevicePool, names: Sequence[bytes], pages: Sequence[int], first: int, end: int
    ) -> None:
        offset, size = pool.range_of(first, end)
        done = 0 if size else len(names)
        while done < len(names):
            rows, step = self._staging_in.rows(len(names) - done, size)
            part = slice(done, done + len(rows))
            items = [(name, offset, memory_at(rows.data_ptr() + i * step, size)) for i, name in enumerate(names[part])]
            results = self._connection.get_ranges(items)
            missed = [name for name, result in zip(names[part], results, strict=True) if result != size]
            if missed:
                if self._connection.state is not State.AWAY:
                    self._spoiled.add(missed)
                raise KvfsError(f"{len(missed)} of {len(rows)} pages of pool {pool.name} could not be read")
            pool.scatter(pages[part], rows, first, end)
            self._wait_for_copies()
            done += len(rows)

    # ---- stores, in a thread ----

    def _store_all(self) -> None:
        self._take_device()
        while (task := self._stores.get()) is not None:
            transfers, ready = task
            stored = False
            try:
                for event in ready:
                    event.synchronize()
                stored = all([self._store(transfer) for transfer in transfers])
            except Exception as reason:
                _logger.warning("kvfs for sglang: pages were not stored: %s", reason)
            finally:
                self._stored.put(stored)
                self._exporter.update(self._connection.counters)
                self._stores.task_done()
        self._stores.task_done()

    def _store(self, transfer: Any) -> bool:
        """Is every page there afterwards? One that is there already is not copied, unless it could not be loaded."""
        pool, names = self._blocks[transfer.name], self._keys(transfer.name, transfer.keys)
        above = self._parents(transfer.name, transfer.keys)
        pages = pool.pages(transfer.host_indices)
        there = self._connection.exists(names)
        wanted = [i for i, name in enumerate(names) if not there[i] or name in self._spoiled]
        while wanted:
            rows, step = self._staging_out.rows(len(wanted), pool.block_size)
            some, wanted = wanted[: len(rows)], wanted[len(rows) :]
            pool.gather([pages[i] for i in some], rows[:, : pool.block_size])
            self._wait_for_copies()
            items = [(names[i], memory_at(rows.data_ptr() + k * step, pool.block_size)) for k, i in enumerate(some)]
            replaces = self._spoiled.any_of(names[i] for i in some)
            stored = self._connection.put(items, if_absent=not replaces, parents=[above[i] for i in some])
            self._spoiled.discard(names[i] for i, is_there in zip(some, stored, strict=True) if is_there)
            if not all(stored):
                return False
        return True

    # ---- helpers ----

    def _keys(self, name: Any, pages: Sequence[str] | None) -> list[bytes]:
        end = f".{name}".encode() + self._suffix
        return [page.encode() + end for page in pages or ()]

    def _parents(self, name: Any, pages: Sequence[str]) -> list[Key | None]:
        """The page of KV before each; of a side pool's page, the KV that it goes with."""
        names: list[Key] = list(self._keys(PoolName.KV, pages))
        return [None, *names[:-1]] if name == PoolName.KV else list(names)

    def _layer_groups(self) -> list[tuple[int, int]]:
        """First layer and end of each group that is read together."""
        groups, first, size = [], 0, 0
        for layer in range(self._group.num_layers):
            size += sum(part.size for pool in self._blocks.values() for part in pool.parts[layer])
            if size >= _GROUP_SIZE or layer == self._group.num_layers - 1:
                groups.append((first, layer + 1))
                first, size = layer + 1, 0
        return groups

    def _take_device(self) -> None:
        if self._device.type == "cuda":
            _device.set_device(self._device)

    def _wait_for_copies(self) -> None:
        event = _device.Event()
        event.record()
        event.synchronize()


def _rank_of(params: Any) -> tuple[int, int]:
    """This rank of tensor parallelism, and how many there are."""
    group = params.attn_tp_cache_group or params.tp_cache_group
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(group=group), torch.distributed.get_world_size(group=group)
    return 0, int(get_parallel().tp_size)
