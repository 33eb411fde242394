"""LMCache (MP mode): a client for its L2 adapter `native_plugin`. docs/engines.md has the configuration.

LMCache makes one of these from `adapter_params` and calls it by name. Its store loop and its prefetch loop submit, and
a separate thread polls event_fd() and drains. Nothing here imports LMCache. Interface: the module
lmcache.v1.distributed.l2_adapters.native_connector_l2_adapter (versions.py).
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from hashlib import sha256
from typing import cast

from kvfs.client.keys import KEY_MAX
from kvfs.connectors import versions
from kvfs.connectors.common import Connection, Counters, Done, State, options_of
from kvfs.connectors.leases import Leases, seconds_of
from kvfs.connectors.metrics import Exporter
from kvfs.connectors.spoiled import Spoiled

LEASE_S = 10.0
CLOSE_TIMEOUT_S = 30.0

# Future id, whether all of it went well, a reason if not, and a result for each key (of a set: none).
Answer = tuple[int, bool, str, "list[bool] | None"]

_logger = logging.getLogger("kvfs.connectors.lmcache")


@dataclass(slots=True)
class _Request:
    kind: str
    keys: list[bytes]
    sizes: list[int]


class KvfsClient:
    """LMCache's objects as blocks of one namespace. Any thread may call anything.

    mount, namespace, revision, timeout_s, depth: see common.Options; the namespace is "lmcache" if none is given.
    lease_s: a look-up holds what it found for this number of seconds, or until it is loaded; 0 is not at all. An object
    has its size and nothing else to tell one layout from another, so give each layout (dtype, chunk size) a namespace.
    """

    def __init__(self, mount: str, namespace: str = "lmcache", *, lease_s: float = LEASE_S, **options: object) -> None:
        seconds = seconds_of("lmcache", lease_s)
        given = options_of("lmcache", {"mount": mount, "namespace": namespace, **options})
        versions.check("lmcache", _logger)
        self._connection = Connection(given, given.space(), engine="lmcache", logger=_logger)
        self._leases = Leases(self._connection, seconds)
        self._spoiled = Spoiled()
        self._exporter = Exporter("lmcache", self._connection.space)
        # A completion may be drained before its submission has returned.
        self._lock = threading.Lock()
        self._requests: dict[int, _Request] = {}

    # ---- LMCache's calls ----

    def event_fd(self) -> int:
        """Readable while drain_completions() has something; the same for this object's life."""
        return self._connection.fileno()

    def submit_batch_set(self, keys: list[str], bufs: list[memoryview]) -> int:
        """It goes well if every object exists afterwards. An existing object is not written again, unless it could not
        be loaded."""
        names = list(map(key_of, keys))
        if_absent = not self._spoiled.any_of(names)
        with self._lock:
            ticket = self._connection.submit_put(list(zip(names, bufs, strict=True)), if_absent=if_absent)
            return self._begun(ticket, "set", names)

    def submit_batch_get(self, keys: list[str], bufs: list[memoryview]) -> int:
        """An object is loaded if it is as large as its buffer. The buffers are the caller's again with the answer."""
        names, sizes = list(map(key_of, keys)), [buffer.nbytes for buffer in bufs]
        with self._lock:
            ticket = self._connection.submit_get(list(zip(names, bufs, strict=True)))
            return self._begun(ticket, "get", names, sizes)

    def submit_batch_exists(self, keys: list[str]) -> int:
        """Answered from shared memory."""
        names = list(map(key_of, keys))
        with self._lock:
            return self._begun(self._connection.submit_exists(names), "exists", names)

    def submit_batch_delete(self, keys: list[str]) -> int:
        names = list(map(key_of, keys))
        with self._lock:
            return self._begun(self._connection.submit_delete(names), "delete", names)

    def drain_completions(self) -> list[Answer]:
        """Never blocks."""
        with self._lock:
            over = [(done, self._requests.pop(done.ticket)) for done in self._connection.drain()]
        answers = [self._answer(done, request) for done, request in over]
        self._exporter.update(self._connection.counters)
        return answers

    def close(self) -> None:
        """Waits until no device writes into a buffer. Raises DeadlineError if one still does then."""
        self._connection.close(timeout_s=CLOSE_TIMEOUT_S)
        self._exporter.update(self._connection.counters)

    @property
    def connection(self) -> Connection:
        return self._connection

    # ---- for people ----

    def statistics(self) -> Counters:
        return self._connection.counters.copy()

    # ---- helpers ----

    def _begun(self, ticket: int, kind: str, keys: list[bytes], sizes: list[int] | None = None) -> int:
        self._requests[ticket] = _Request(kind, keys, sizes or [])
        return ticket

    def _answer(self, done: Done, request: _Request) -> Answer:
        if request.kind == "get":
            return self._loaded(done, request)
        results = cast("list[bool]", done.results)
        if request.kind == "set":
            self._spoiled.discard(key for key, is_there in zip(request.keys, results, strict=True) if is_there)
            lacking = results.count(False)
            reason = f"kvfs: {lacking} of {len(results)} objects were not stored ({self._why()})" if lacking else ""
            return done.ticket, not lacking, reason, None
        if request.kind == "exists":
            self._leases.take([key for key, found in zip(request.keys, results, strict=True) if found])
        return done.ticket, True, "", results

    def _loaded(self, done: Done, request: _Request) -> Answer:
        loaded = [read == size for read, size in zip(done.results, request.sizes, strict=True)]
        self._leases.give_back(request.keys)
        if all(loaded):
            self._spoiled.discard(request.keys)
        elif self._connection.state is not State.AWAY:
            self._spoiled.add(key for key, is_loaded in zip(request.keys, loaded, strict=True) if not is_loaded)
        lacking = loaded.count(False)
        reason = f"kvfs: {lacking} of {len(loaded)} objects are misses" if lacking else ""
        return done.ticket, not lacking, reason, loaded

    def _why(self) -> str:
        return "the log has the reason" if self._connection.state is State.UP else self._connection.reason


def key_of(name: str) -> bytes:
    """The key of an object: its name's UTF-8. One longer than keys may be ends with a digest of the whole."""
    key = name.encode()
    if len(key) <= KEY_MAX:
        return key
    digest = sha256(key).hexdigest().encode()
    return key[: KEY_MAX - 1 - len(digest)] + b"~" + digest
