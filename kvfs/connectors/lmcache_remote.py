"""LMCache in the engine's process: a connector for `remote_storage_plugins`. docs/engines.md has the configuration.

A chunk is one block: its bytes, and behind them LMCache's RemoteMetadata. So it can be read in one go, into memory of
the shape that nearly all chunks have. All calls but look-ups come on LMCache's event loop, which waits for kvfs's
descriptor as for any other. Interface: lmcache.v1.storage_backend.connector (versions.py).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any, cast

from kvfs.client.memory import Memory
from kvfs.connectors import versions
from kvfs.connectors.common import Connection, Counters, Done, State, options_of
from kvfs.connectors.leases import Leases, seconds_of
from kvfs.connectors.lmcache import CLOSE_TIMEOUT_S, LEASE_S, key_of
from kvfs.connectors.metrics import Exporter
from kvfs.connectors.spoiled import Spoiled

try:
    from lmcache.v1.protocol import RemoteMetadata
    from lmcache.v1.storage_backend.connector import ConnectorAdapter, extract_plugin_type
    from lmcache.v1.storage_backend.connector.base_connector import RemoteConnector
except ImportError as error:
    raise versions.missing("lmcache remote", error) from error

_SCHEME = "plugin://"
_OWN = frozenset({"module_path", "class_name", "lease_s"})

_logger = logging.getLogger("kvfs.connectors.lmcache")


class KvfsAdapter(ConnectorAdapter):  # type: ignore[misc]
    """Makes the connector of a plugin named kvfs, or kvfs.ANYTHING where there are several. Its options are the keys
    remote_storage_plugin.NAME.OPTION of extra_config: mount, namespace, revision, timeout_s, depth, lease_s."""

    def __init__(self) -> None:
        super().__init__(f"{_SCHEME}kvfs")

    def can_parse(self, url: str) -> bool:
        return url.startswith(_SCHEME) and extract_plugin_type(url.removeprefix(_SCHEME)) == "kvfs"

    def create_connector(self, context: Any) -> KvfsConnector:
        prefix = f"remote_storage_plugin.{context.plugin_name or 'kvfs'}."
        extra = dict(context.config.extra_config or {}) if context.config is not None else {}
        options = {name.removeprefix(prefix): value for name, value in extra.items() if name.startswith(prefix)}
        return KvfsConnector(context.loop, context.local_cpu_backend, context.config, context.metadata, options)


class KvfsConnector(RemoteConnector):  # type: ignore[misc]
    """Chunks of one rank. No call raises for kvfs: a chunk that cannot be had is a miss, one that cannot be stored is
    dropped. LMCache gives back the memory of a stored chunk; what get() returns is the caller's."""

    def __init__(
        self, loop: Any, local_cpu_backend: Any, config: Any, metadata: Any, options: Mapping[str, object]
    ) -> None:
        super().__init__(config, metadata)
        given: dict[str, object] = {"namespace": "lmcache", **options}
        lease_s = seconds_of("lmcache", given.get("lease_s", LEASE_S))
        chosen = options_of("lmcache", given, known=_OWN)
        versions.check("lmcache remote", _logger)
        # The key has model, ranks, tokens and dtype; this is all else that shapes a chunk.
        shape = [str(each) for each in (self.meta_shapes, self.meta_dtypes, self.meta_fmt, metadata.chunk_size)]
        layout = sha256(repr([*shape, str(config.remote_serde)]).encode()).hexdigest()[:16]
        space = chosen.space(metadata.model_name or "unnamed", f"{metadata.chunk_size}.{layout}")
        self._loop, self._memory = loop, local_cpu_backend
        self._connection = Connection(chosen, space, engine="lmcache", logger=_logger)
        self._leases = Leases(self._connection, lease_s)
        self._spoiled = Spoiled()
        self._exporter = Exporter("lmcache", space)
        # Both are the loop's alone.
        self._waiting: dict[int, asyncio.Future[Done]] = {}
        self._closed = False
        loop.call_soon_threadsafe(loop.add_reader, self._connection.fileno(), self._drain)

    # ---- look-ups, from any thread ----

    def exists_sync(self, key: Any) -> bool:
        return self.batched_contains([key]) == 1

    async def exists(self, key: Any) -> bool:
        return await self.batched_async_contains("", [key]) == 1

    def support_batched_contains(self) -> bool:
        return True

    def batched_contains(self, keys: list[Any]) -> int:
        """How many chunks from the first on exist. They are leased until they are loaded, for a while."""
        names = _names(keys)
        count = self._connection.exists_prefix(names)
        self._leases.take(names[:count])
        return count

    async def batched_async_contains(self, lookup_id: str, keys: list[Any], pin: bool = False) -> int:
        # A daemon that is gone is looked for: the loop does not wait for it.
        return await self._loop.run_in_executor(None, self.batched_contains, keys)  # type: ignore[no-any-return]

    def support_ping(self) -> bool:
        return True

    async def ping(self) -> int:
        return int(self._connection.state is State.AWAY)

    # ---- loads ----

    async def get(self, key: Any) -> Any:
        return (await self.batched_get([key]))[0]

    def support_batched_get(self) -> bool:
        return True

    async def batched_get(self, keys: list[Any]) -> list[Any]:
        """The chunks, None for a miss."""
        names = _names(keys)
        sizes = self._connection.sizes(names)
        shapes = await self._shapes(names, sizes)
        chunks: list[Any] = [None if shape is None else self._memory.allocate(*shape) for shape in shapes]
        tails = [bytearray(self.remote_metadata_bytes) for _ in names]
        wanted = [i for i, chunk in enumerate(chunks) if chunk is not None]
        # Without room in LMCache's memory a chunk is a miss, and none the worse for it.
        bad = [i for i, size in enumerate(sizes) if size is not None and shapes[i] is None]
        if not wanted:
            self._loaded(names, bad)
            return chunks
        items = [(names[i], [cast("Memory", chunks[i].byte_array), cast("Memory", tails[i])]) for i in wanted]
        reading = self._over(self._connection.submit_get(items))
        try:
            done = await asyncio.shield(reading)
        except asyncio.CancelledError:
            # LMCache waits no longer, while devices may still write into the memory.
            reading.add_done_callback(lambda _: _give_back([chunks[i] for i in wanted]))
            raise
        for i, read in zip(wanted, done.results, strict=True):
            if read != sizes[i] or self._described(tails[i]) != shapes[i]:
                _give_back([chunks[i]])
                chunks[i] = None
                bad.append(i)
        self._loaded(names, bad)
        self._spoiled.discard(names[i] for i in wanted if chunks[i] is not None)
        return chunks

    def support_batched_get_non_blocking(self) -> bool:
        return True

    async def batched_get_non_blocking(self, lookup_id: str, keys: list[Any]) -> list[Any]:
        """The chunks before the first miss."""
        chunks = await self.batched_get(keys)
        count = [*chunks, None].index(None)
        _give_back(chunks[count:])
        return chunks[:count]

    async def _shapes(self, names: Sequence[bytes], sizes: Sequence[int | None]) -> list[tuple[Any, Any, Any] | None]:
        """Shapes, dtypes and format of each chunk; None: it is not there. A whole chunk's are known, those of the last
        of a prompt are read from its end."""
        whole = (self.meta_shapes, self.meta_dtypes, self.meta_fmt)
        tail = self.remote_metadata_bytes
        shapes = [whole if size == self.full_chunk_size_bytes + tail else None for size in sizes]
        parts = [i for i, size in enumerate(sizes) if shapes[i] is None and size is not None and size > tail]
        if parts:
            ends = [bytearray(tail) for _ in parts]
            items = [(names[i], cast(int, sizes[i]) - tail, end) for i, end in zip(parts, ends, strict=True)]
            read = await self._loop.run_in_executor(None, self._connection.get_ranges, items)
            for i, end, size in zip(parts, ends, read, strict=True):
                shapes[i] = self._described(end) if size == tail else None
        return shapes

    def _described(self, tail: bytearray) -> tuple[Any, Any, Any] | None:
        """Shapes, dtypes and format by a chunk's RemoteMetadata; None: it is none."""
        try:
            found = RemoteMetadata.deserialize(bytes(tail))
        except (ValueError, KeyError):
            return None
        return found.shapes, found.dtypes, found.fmt

    def _loaded(self, names: Sequence[bytes], bad: Sequence[int]) -> None:
        """A load is over; bad: those that are there, and could not be loaded."""
        self._leases.give_back(names)
        if self._connection.state is not State.AWAY:
            self._spoiled.add(names[i] for i in bad)
        self._exporter.update(self._connection.counters)

    # ---- stores ----

    async def put(self, key: Any, memory_obj: Any) -> None:
        await self.batched_put([key], [memory_obj])

    def support_batched_put(self) -> bool:
        return True

    async def batched_put(self, keys: list[Any], memory_objs: list[Any]) -> None:
        """An existing chunk is not written again, unless it could not be loaded."""
        names = _names(keys)
        items = [
            (name, [cast("Memory", chunk.byte_array), cast("Memory", _metadata(chunk))])
            for name, chunk in zip(names, memory_objs, strict=True)
        ]
        if_absent = not self._spoiled.any_of(names)
        done = await asyncio.shield(self._over(self._connection.submit_put(items, if_absent=if_absent)))
        self._spoiled.discard(name for name, is_there in zip(names, done.results, strict=True) if is_there)
        self._exporter.update(self._connection.counters)

    # ---- the rest ----

    def remove_sync(self, key: Any) -> bool:
        return self._connection.delete(_names([key])) == [True]

    async def list(self) -> list[str]:
        client = self._connection.client
        if client is None:
            return []
        return await self._loop.run_in_executor(  # type: ignore[no-any-return]
            None, lambda: [key.decode(errors="replace") for key in client.list()]
        )

    async def close(self) -> None:
        """A second close() does nothing. Raises DeadlineError if a device still writes into memory after 30 s."""
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._connection.fileno())
        await self._loop.run_in_executor(None, self._connection.wait, CLOSE_TIMEOUT_S)
        self._drain()
        self._connection.close(timeout_s=0)

    def statistics(self) -> Counters:
        return self._connection.counters.copy()

    def _over(self, ticket: int) -> asyncio.Future[Done]:
        future = self._loop.create_future()
        self._waiting[ticket] = future
        return cast("asyncio.Future[Done]", future)

    def _drain(self) -> None:
        for done in self._connection.drain():
            future = self._waiting.pop(done.ticket)
            if not future.done():
                future.set_result(done)


def _names(keys: Sequence[Any]) -> list[bytes]:
    return [key_of(key.to_string()) for key in keys]


def _metadata(chunk: Any) -> bytes:
    described = RemoteMetadata(len(chunk.byte_array), chunk.get_shapes(), chunk.get_dtypes(), chunk.get_memory_format())
    return cast(bytes, described.serialize())


def _give_back(chunks: Sequence[Any]) -> None:
    for chunk in chunks:
        if chunk is not None:
            chunk.ref_count_down()
