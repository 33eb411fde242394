"""SGLang: HiCache's storage, loaded by `--hicache-storage-backend dynamic`. docs/engines.md has the configuration.

A page of a host pool is one block: K and V of all layers, or the state of a side pool. It is read and written where it
lies in SGLang's pinned memory. Three threads of SGLang's call: look-ups, loads, stores. Interface:
sglang.srt.mem_cache.hicache_storage (versions.py).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import islice
from typing import Any, TypeVar

from kvfs.client.keys import Key
from kvfs.client.memory import Pieces
from kvfs.connectors import versions
from kvfs.connectors.common import Connection, Counters, State, options_of
from kvfs.connectors.leases import Leases, seconds_of
from kvfs.connectors.metrics import Exporter
from kvfs.connectors.spoiled import Spoiled
from kvfs.errors import KvfsError

try:
    import torch
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolHitPolicy, PoolName, PoolTransferResult

    from kvfs.connectors.sglang_pools import Pool, flat, lengths, options_given, pool_of
except ImportError as error:
    raise versions.missing("sglang", error) from error

LEASE_S = 5.0
CLOSE_TIMEOUT_S = 30.0
# Of options, those that are SGLang's own.
_OF_SGLANG = frozenset({"backend_name", "module_path", "class_name", "interface_v1", "allocator", "lease_s"})
_RATES_KEPT = 1024
# SGLang 0.5.21 has none.
_BLOCK_GROUPS = getattr(PoolHitPolicy, "BLOCK_GROUPS", None)
_DELETE_COUNT = 4096

T = TypeVar("T")
_logger = logging.getLogger("kvfs.connectors.sglang")


@dataclass(frozen=True, slots=True)
class _Registered:
    """A pool, and how keys of its blocks end: one end for each block of a page. written: by this rank."""

    pool: Pool
    ends: tuple[bytes, ...]
    written: bool

    def keys(self, pages: Sequence[str]) -> list[bytes]:
        return [page.encode() + end for page in pages for end in self.ends]


class HiCacheKvfs(HiCacheStorage):  # type: ignore[misc]
    """Pages of one rank. A call never raises for kvfs: a page that cannot be had is a miss.

    config: HiCacheStorageConfig. Its extra_config has mount, namespace, revision, timeout_s and depth, as in
    common.Options. The namespace is "sglang" if none is given, the revision SGLang's own. lease_s: a look-up holds what
    it found for this number of seconds, or until it is loaded; 0 is not at all.

    Blocks lie in NAMESPACE/MODEL/LAYOUT, and LAYOUT names all that shapes their bytes. A rank of data parallelism is no
    part of it: the same tokens have the same KV there.
    """

    def __init__(self, config: Any, kwargs: Mapping[str, object] | None = None) -> None:
        extra = options_given(config.extra_config)
        self._lease_s = seconds_of("sglang", extra.get("lease_s", LEASE_S))
        self._options = options_of("sglang", extra, known=_OF_SGLANG)
        self._config = config
        versions.check("sglang", _logger)
        self._in_place = bool(extra.get("interface_v1"))
        if not self._in_place:
            _logger.warning('kvfs for sglang: each page is copied: add "interface_v1": 1 to the extra configuration')
        self._lock = threading.Lock()
        self._pools: dict[str, _Registered] = {}
        self._rates: dict[str, deque[tuple[int, float]]] = {
            "prefetch": deque(maxlen=_RATES_KEPT),
            "backup": deque(maxlen=_RATES_KEPT),
        }
        self._warned: set[str] = set()
        self._spoiled = Spoiled()

    # ---- pools ----

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """The pool of KV, first and once: its layout is known now, so kvfs can be connected to."""
        super().register_mem_pool_host(mem_pool_host)
        config = self._config
        # Ranks of all sizes of tensor parallelism that divide tp_lcm_size share blocks: those of a part of the heads.
        shared = self._in_place and bool(config.tp_lcm_size) and mem_pool_host.layout == "page_head"
        shared = shared and not config.is_mla_model
        factor = config.tp_lcm_size // config.tp_size if shared else 1
        pool = pool_of(mem_pool_host, factor, in_place=self._in_place)
        if config.is_mla_model:
            ranks, ends = "", [_end("kv")]
        elif shared:
            first = config.tp_rank * factor
            ranks, ends = f"of {config.tp_lcm_size}", [_end("kv", f"h{first + i}") for i in range(factor)]
        else:
            ranks, ends = f"of {config.tp_size}", [_end("kv", f"t{config.tp_rank}")]
        ends = [end + self._slice() for end in ends]
        layout = _digest(pool.geometry, ranks, str(config.attn_cp_size), str(config.pp_size))
        space = self._options.space(
            config.model_name or "unnamed",
            f"{mem_pool_host.layout}.{str(mem_pool_host.dtype).removeprefix('torch.')}.{pool.page_size}.{layout}",
        )
        self._pools[PoolName.KV] = _Registered(pool, tuple(ends), _writes(config))
        # Copies of pages have an order of their own; without interface_v1 there is nothing else.
        self._copied_end = _end("flat", f"t{config.tp_rank}") + self._slice() if self._in_place else ends[0]
        self._connection = Connection(self._options, space, engine="sglang", logger=_logger)
        self._leases = Leases(self._connection, self._lease_s)
        self._exporter = Exporter("sglang", space)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """A side pool of a hybrid model. The pool of KV comes here too, and is known."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        name, config = str(host_pool_name), self._config
        if name == PoolName.KV:
            return
        pool = pool_of(host_pool)
        # Pages that are the same on all ranks are stored by one. State of Mamba layers is split among ranks always.
        own = not config.is_mla_model or name == PoolName.MAMBA or _is_drafts_own(name, host_pool)
        rank = f"t{config.tp_rank}of{config.tp_size}" if own else ""
        end = _end(name, rank, pool.geometry) + self._slice()
        self._pools[name] = _Registered(pool, (end,) if pool.blocks else (), own or _writes(config))

    # ---- look-ups ----

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """How many pages from the first on exist."""
        kv = self._pools[PoolName.KV]
        if not kv.pool.blocks:
            return len(keys)
        names = kv.keys(keys)
        count = self._connection.exists_prefix(names) // kv.pool.blocks
        self._leases.take(names[: count * kv.pool.blocks])
        return count

    def batch_exists_v2(self, keys: list[str], pool_transfers: Any = None, extra_info: Any = None) -> Any:
        """The same, as far as every pool has what a prefix of that length needs: restorable_prefix_pages are all such
        lengths. Of pools whose policy is BLOCK_GROUPS only the reach is returned."""
        pages = self.batch_exists(keys, extra_info)
        hits: dict[str, int] = {PoolName.KV: pages} if pages else {}
        restorable = list(range(1, pages + 1))
        for transfer in pool_transfers or ():
            if _BLOCK_GROUPS is not None and transfer.hit_policy == _BLOCK_GROUPS:
                hits[transfer.name] = self._reach_of_groups(transfer)
                continue
            possible = self._possible(transfer, keys[:pages])
            if possible:
                hits[transfer.name] = max(possible)
            restorable = [length for length in restorable if length in possible]
        return PoolTransferResult(max(restorable, default=0), hits, restorable)

    def _possible(self, transfer: Any, keys: Sequence[str]) -> set[int]:
        """The lengths of prefixes, in pages, for which this pool has all that it must have."""
        there = self._pages_there(transfer.name, keys)
        try:
            return lengths(there, transfer.hit_policy, len(transfer.keys or ()))
        except ValueError as reason:
            self._warn(f"policy {transfer.hit_policy}", f"pool {transfer.name}: {reason}")
            return set()

    def _reach_of_groups(self, transfer: Any) -> int:
        size = transfer.group_pages
        if size < 1:
            return 0
        there = self._pages_there(transfer.name, transfer.keys or ())
        whole = [all(there[i : i + size]) for i in range(0, len(there) - size + 1, size)]
        return int([*whole, False].index(False) * transfer.block_pages)

    def _pages_there(self, name: str, keys: Sequence[str]) -> list[bool]:
        registered = self._pools.get(name)
        if registered is None:
            self._warn(f"pool {name}", f"pool {name} was not registered: none of its pages is found")
            return [False] * len(keys)
        names = registered.keys(keys)
        found = self._connection.exists(names) if names else []
        self._leases.take([key for key, is_there in zip(names, found, strict=True) if is_there])
        return _pages(found, len(keys), registered.pool.blocks)

    # ---- pages, where they lie ----

    def batch_get_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        return self._load(PoolName.KV, keys, host_indices)

    def batch_set_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        """True for a page that exists already: it is not written again, unless it could not be loaded."""
        return self._store(PoolName.KV, keys, host_indices, extra_info)

    def batch_get_v2(self, transfers: Any, extra_info: Any = None) -> dict[str, list[bool]]:
        return {
            transfer.name: self._load(transfer.name, transfer.keys or (), transfer.host_indices)
            for transfer in transfers
        }

    def batch_set_v2(self, transfers: Any, extra_info: Any = None) -> dict[str, list[bool]]:
        return {
            transfer.name: self._store(transfer.name, transfer.keys or (), transfer.host_indices, extra_info)
            for transfer in transfers
        }

    def _load(self, name: str, keys: Sequence[str], indices: torch.Tensor | None) -> list[bool]:
        def load(registered: _Registered) -> list[bool]:
            assert indices is not None
            names, memories = registered.keys(keys), registered.pool.destinations(indices)
            begun = time.perf_counter()
            loaded = self._read(names, memories, [registered.pool.block_size] * len(names))
            pages = _pages(loaded, len(keys), registered.pool.blocks)
            if names:
                registered.pool.arrived(indices, memories, pages)
                self._rate("prefetch", loaded.count(True), registered.pool.block_size, time.perf_counter() - begun)
            return pages

        return self._with_pool(name, keys, indices, load)

    def _store(self, name: str, keys: Sequence[str], indices: torch.Tensor | None, extra_info: Any) -> list[bool]:
        def store(registered: _Registered) -> list[bool]:
            assert indices is not None
            if not registered.written or not registered.pool.blocks:
                return [True] * len(keys)
            names, memories = registered.keys(keys), registered.pool.sources(indices)
            begun, before = time.perf_counter(), self._connection.counters.stored_bytes
            there = self._write(names, memories, self._parents(name, keys, extra_info))
            # One thread of SGLang's stores. Pages that were there already are no part of its rate.
            written = (self._connection.counters.stored_bytes - before) // registered.pool.block_size
            self._rate("backup", written, registered.pool.block_size, time.perf_counter() - begun)
            return _pages(there, len(keys), registered.pool.blocks)

        return self._with_pool(name, keys, indices, store)

    def _with_pool(
        self,
        name: str,
        keys: Sequence[str],
        indices: torch.Tensor | None,
        call: Callable[[_Registered], list[bool]],
    ) -> list[bool]:
        registered = self._pools.get(name)
        if registered is None:
            self._warn(f"pool {name}", f"pool {name} was not registered: none of its pages is stored or loaded")
            return [False] * len(keys)
        given = 0 if indices is None else indices.numel()
        if given != len(keys) * registered.pool.page_size:
            self._warn(
                f"indices {name}",
                f"pool {name}: {given} indices for {len(keys)} pages of {registered.pool.page_size}: a miss",
            )
            return [False] * len(keys)
        return call(registered)

    def _parents(self, name: str, keys: Sequence[str], extra_info: Any) -> list[Key | None] | None:
        """The page before each, as far as SGLang tells; of a side pool's page, the KV that it goes with."""
        kv = self._pools[PoolName.KV]
        if not kv.pool.blocks:
            return None
        if name != PoolName.KV:
            return [page.encode() + kv.ends[0] for page in keys]
        before = list(getattr(extra_info, "prefix_keys", None) or ())[-1:]
        pages: list[str | None] = [*(before or [None]), *keys[:-1]]
        return [None if page is None else page.encode() + end for page in pages for end in kv.ends]

    # ---- pages that SGLang copies: without interface_v1 ----

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> torch.Tensor | None:
        if target_location is None:
            self._warn("get", "get() without a tensor to load into: a miss")
            return None
        return self.batch_get([key], [target_location])[0]

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        targets = list(target_locations or ())
        if len(targets) != len(keys):
            return [None] * len(keys)
        # A tensor that is not contiguous is loaded into a copy.
        loose = [tensor if tensor.is_contiguous() else torch.empty_like(tensor).contiguous() for tensor in targets]
        memories = [flat(tensor) for tensor in loose]
        sizes = [tensor.numel() * tensor.element_size() for tensor in targets]
        loaded = self._read([self._copied(key) for key in keys], memories, sizes)
        for target, tensor, is_loaded in zip(targets, loose, loaded, strict=True):
            if is_loaded and tensor is not target:
                target.copy_(tensor)
        return [target if is_loaded else None for target, is_loaded in zip(targets, loaded, strict=True)]

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        return self.batch_set([key], [value])

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        tensors = list(values or ())
        if len(tensors) != len(keys) or any(tensor is None for tensor in tensors):
            return False
        if not self._pools[PoolName.KV].written:
            return True
        names = [self._copied(key) for key in keys]
        return all(self._write(names, [flat(tensor) for tensor in tensors], None))

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def _copied(self, key: str) -> bytes:
        return key.encode() + self._copied_end

    # ---- life ----

    def clear(self) -> bool:
        """Delete all pages of this model and layout, of all ranks. Whether that could be done."""
        client = self._connection.client
        try:
            if client is None:
                return False
            keys = client.list()
            while page := list(islice(keys, _DELETE_COUNT)):
                client.delete(page)
        except (KvfsError, OSError) as reason:
            _logger.warning("kvfs for sglang: %s was not cleared: %s", self._connection.space, reason)
            return False
        return True

    def get_stats(self) -> Any:
        """SGLang's StorageMetrics since the last call: blocks of each batch, and its GB/s."""
        from sglang.srt.observability.metrics_collector import StorageMetrics

        metrics = StorageMetrics()
        with self._lock:
            for name, rates in self._rates.items():
                getattr(metrics, f"{name}_pgs").extend(count for count, _ in rates)
                getattr(metrics, f"{name}_bandwidth").extend(rate for _, rate in rates)
                rates.clear()
        self._exporter.update(self._connection.counters)
        return metrics

    def statistics(self) -> Counters:
        return self._connection.counters.copy()

    def close(self) -> None:
        """SGLang's threads have ended. A second close() does nothing."""
        if hasattr(self, "_connection"):
            self._connection.close(timeout_s=CLOSE_TIMEOUT_S)

    # ---- helpers ----

    def _read(self, names: Sequence[bytes], memories: Sequence[Pieces], sizes: Sequence[int]) -> list[bool]:
        results = self._connection.get_into(list(zip(names, memories, strict=True))) if names else []
        loaded = [read == size for read, size in zip(results, sizes, strict=True)]
        self._leases.give_back(names)
        if all(loaded):
            self._spoiled.discard(names)
        elif self._connection.state is not State.AWAY:
            self._spoiled.add(name for name, is_loaded in zip(names, loaded, strict=True) if not is_loaded)
        self._exporter.update(self._connection.counters)
        return loaded

    def _write(
        self, names: Sequence[bytes], memories: Sequence[Pieces], parents: Sequence[Key | None] | None
    ) -> list[bool]:
        """Is each block there afterwards?"""
        items = list(zip(names, memories, strict=True))
        there = self._connection.put(items, if_absent=not self._spoiled.any_of(names), parents=parents)
        self._spoiled.discard(name for name, is_there in zip(names, there, strict=True) if is_there)
        self._exporter.update(self._connection.counters)
        return there

    def _slice(self) -> bytes:
        """The end of keys for ranks that have other tokens or layers of the same page."""
        config = self._config
        context = f".c{config.attn_cp_rank}" if config.attn_cp_size > 1 else ""
        return f"{context}.p{config.pp_rank}".encode() if config.pp_size > 1 else context.encode()

    def _rate(self, name: str, count: int, block_size: int, seconds: float) -> None:
        if self._config.enable_storage_metrics and count:
            with self._lock:
                self._rates[name].append((count, count * block_size / 1e9 / max(seconds, 1e-9)))

    def _warn(self, about: str, text: str) -> None:
        """Once for each matter: it would come with every batch."""
        if about not in self._warned:
            self._warned.add(about)
            _logger.warning("kvfs for sglang: %s", text)


def _writes(config: Any) -> bool:
    """Does this rank store the pages that are the same on all ranks? Before 0.5.23 SGLang lets the first one do so."""
    return bool(getattr(config, "is_storage_writer", not config.is_mla_model or config.tp_rank == 0))


def _is_drafts_own(name: str, host_pool: Any) -> bool:
    """A draft model with KV for each head has another part of it on each rank, beside whichever model."""
    if name not in (PoolName.DRAFT, PoolName.DRAFT_SWA):
        return False
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

    return isinstance(host_pool, MHATokenToKVPoolHost)


def _pages(blocks: Sequence[bool], count: int, each: int) -> list[bool]:
    """A page is as good as all of its blocks; one without any is good."""
    return [all(blocks[i * each : (i + 1) * each]) for i in range(count)]


def _end(*parts: str) -> bytes:
    return "".join(f".{part}" for part in parts if part).encode()


def _digest(*parts: str) -> str:
    return sha256(repr(parts).encode()).hexdigest()[:16]
