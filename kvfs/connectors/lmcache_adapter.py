"""LMCache (MP mode): its L2 adapter over kvfs that reports kvfs's removals. docs/routers.md has the configuration.

    {"type": "plugin", "module_path": "kvfs.connectors.lmcache_adapter", "class_name": "KvfsAdapter", ...}

LMCache's adapter of native clients tells its server of stores and of LMCache's own deletions. This one adds what is
evicted, deleted or lost in kvfs, by any process: the server's policies and the coordinator's directory hear of it.
Interface: lmcache.v1.distributed.l2_adapters.native_connector_l2_adapter (versions.py).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

from kvfs.client.keys import KEY_MAX
from kvfs.connectors import versions
from kvfs.connectors.changes import Changes
from kvfs.connectors.lmcache import KvfsClient, key_of
from kvfs.errors import KvfsError

try:
    from lmcache.v1.distributed.api import ObjectKey
    from lmcache.v1.distributed.l2_adapters.native_connector_l2_adapter import (
        NativeConnectorL2Adapter,
        _object_key_to_string,
    )
except ImportError as error:
    raise versions.missing("lmcache adapter", error) from error

# Keys that are looked up at once: about a millisecond.
_LOOKUPS = 4096

_logger = logging.getLogger("kvfs.connectors.lmcache")


class KvfsAdapter(NativeConnectorL2Adapter):  # type: ignore[misc]
    """adapter_params: as of KvfsClient, and max_capacity_gb, as of LMCache's native_plugin."""

    def __init__(self, params: dict[str, Any], l1_memory_desc: object = None) -> None:
        options = dict(params)
        capacity_gb = options.pop("max_capacity_gb", 0)
        if isinstance(capacity_gb, bool) or not isinstance(capacity_gb, (int, float)) or capacity_gb < 0:
            raise ValueError(f"kvfs for lmcache: max_capacity_gb {capacity_gb!r}: a number from 0 on is possible")
        versions.check("lmcache adapter", _logger)
        client = KvfsClient(**options)
        self._of_long_names: dict[bytes, ObjectKey] = {}
        self._suspects: set[bytes] = set()  # of the thread of changes alone
        super().__init__(client, max_capacity_gb=capacity_gb, type_name="kvfs")
        self._changes = Changes(client.connection, self._look)

    def close(self) -> None:
        self._changes.close()
        super().close()

    def _notify_keys_stored(self, keys: list[ObjectKey], sizes: list[int]) -> None:
        for key in keys:
            text = _object_key_to_string(key)
            if len(text.encode()) > KEY_MAX:
                self._of_long_names[key_of(text)] = key
        super()._notify_keys_stored(keys, sizes)

    def _look(self, keys: Sequence[bytes], everything: bool) -> None:
        """Look up keys that something happened to; after a gap, those that LMCache stored."""
        self._suspects.update(keys)
        if everything:
            with self._lock:
                stored = list(self._key_sizes)
            self._suspects.update(key_of(_object_key_to_string(key)) for key in stored)
        while self._suspects:
            chunk = list(islice(self._suspects, _LOOKUPS))
            client = self._client.connection.client
            try:
                found = None if client is None else client.exists(chunk)
            except KvfsError:
                found = None
            if found is None:
                return  # kvfs is away: they wait for it
            self._suspects.difference_update(chunk)
            self._tell(name for name, is_there in zip(chunk, found, strict=True) if not is_there)

    def _tell(self, names: Iterable[bytes]) -> None:
        keys = [key for name in names if (key := self._object_key_of(name)) is not None]
        if keys:
            with self._lock:
                # Those that another server stored were not counted here.
                sizes = [self._key_sizes.pop(key, 0) for key in keys]
            self._notify_keys_deleted(keys, sizes)

    def _object_key_of(self, name: bytes) -> ObjectKey | None:
        """The result is None for a name that is no object's of LMCache, and for a long one of another server."""
        if (long := self._of_long_names.pop(name, None)) is not None:
            return long
        try:
            model, rank, group, chunk_hash, *salt = name.decode().split("@")
            if len(salt) > 1 or (len(name) == KEY_MAX and name[-65:-64] == b"~"):
                return None
            return ObjectKey(bytes.fromhex(chunk_hash), model, int(rank, 16), int(group, 16), "".join(salt))
        except ValueError:
            return None
