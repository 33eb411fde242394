"""vLLM: kvfs as a secondary tier behind the CPU's memory, loaded by the configuration alone (docs/engines.md).

    {"type": "KvfsTier", "module_path": "kvfs.connectors.vllm", "mount": "/mnt/kv"}

vLLM's TieringOffloadingManager asks in its scheduler's loop. A look-up reads shared memory, so it answers HIT or MISS
at once. Blocks go between the devices and the tier in the CPU's memory without a copy, whatever step runs meanwhile.
Interface: vllm.v1.kv_offload.tiering.base, of the versions in TRIED.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import kvfs
from kvfs.connectors.common import Connection, Counters, State, namespace_of, options_of
from kvfs.connectors.spoiled import Spoiled
from kvfs.errors import DeadlineError, KvfsError

TRIED = ("0.32.0", "0.33.0")

try:
    import vllm
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
    from vllm.logger import init_logger
    from vllm.v1.kv_offload.base import (
        Locality,
        LookupResult,
        Medium,
        OffloadingCounterMetadata,
        OffloadingEvent,
        OffloadingGaugeMetadata,
        RequestOffloadingContext,
    )
    from vllm.v1.kv_offload.file_mapper import FileMapper
    from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager
except ImportError as error:
    raise ImportError(
        f"kvfs.connectors.vllm needs vLLM with secondary tiers; it was tried with {' and '.join(TRIED)}: {error}"
    ) from error

# init_logger() gives a logger that prints only below this name.
_logger = init_logger("vllm.kvfs")

# Keys are looked up by so many at once: 0.3 us of processor time a key, against 9 us for one alone.
_WINDOW = 128
# An OffloadKey ends with the number of its group of layers.
_GROUP_SIZE = 4
# For all that is under way: a device that hangs is given up by the kernel after 30 s by default.
_DRAIN_TIMEOUT_S = 60.0
_EVENTS_WAIT_S, _EVENTS_CLOSE_S = 0.5, 2.0

_METRICS = {
    "loaded": "Blocks read from kvfs.",
    "loaded_bytes": "Bytes read from kvfs.",
    "failed_loads": "Blocks that were found and could not be read: evicted meanwhile, damaged, no answer.",
    "stored": "Blocks stored in kvfs.",
    "stored_bytes": "Bytes stored in kvfs.",
    "present": "Blocks that were not stored as they were there.",
    "failed_stores": "Blocks that could not be stored: no room, a device without answer.",
    "dropped": "Blocks that were not stored while kvfs was away.",
    "lost": "Times that kvfs went away.",
}
_UP = "vllm:kvfs_up"


@dataclass(slots=True)
class _Job:
    """One job of vLLM's, done by `left` more batches. there: loaded, or stored."""

    id: int
    is_load: bool
    left: int = 0
    there: list[bytes] = field(default_factory=list)
    failed: list[bytes] = field(default_factory=list)
    seconds: float = 0.0


class _Chain:
    """The keys of one request in the order of its tokens, for each group of layers, as far as vLLM has told them."""

    def __init__(self) -> None:
        self._places: dict[bytes, tuple[list[bytes], int]] = {}
        self._groups: dict[bytes, list[bytes]] = {}
        self._seen = 0

    def extend(self, positions: Collection[bytes]) -> None:
        if len(positions) == self._seen:
            return
        for key in itertools.islice(positions, self._seen, None):
            keys = self._groups.setdefault(key[-_GROUP_SIZE:], [])
            self._places[key] = keys, len(keys)
            keys.append(key)
        self._seen = len(positions)

    def window(self, key: bytes) -> Sequence[bytes]:
        """The key, and those around it that are likely to be asked for next."""
        if key not in self._places:
            return (key,)
        keys, index = self._places[key]
        start = index - index % _WINDOW
        return keys[start : start + _WINDOW]

    def keys(self) -> Iterable[bytes]:
        return self._places

    def parent(self, key: bytes) -> bytes | None:
        keys, index = self._places.get(key, ((), 0))
        return keys[index - 1] if index else None


@dataclass(frozen=True, slots=True)
class _Hint:
    """A request says it of its blocks, in `kv_transfer_params` under "kvfs": {"done": true}, or {"keep_s": seconds}."""

    keep_s: float  # 0: they are needed no more

    @classmethod
    def of(cls, request: Any) -> _Hint | None:
        """It says nothing: None. It makes no sense: ValueError."""
        given = (getattr(request, "kv_transfer_params", None) or {}).get("kvfs")
        if given is None:
            return None
        if isinstance(given, dict) and len(given) == 1:
            keep_s = given.get("keep_s")
            if given.get("done") is True:
                return cls(0.0)
            if isinstance(keep_s, (int, float)) and not isinstance(keep_s, bool) and 0 < keep_s <= 3600:
                return cls(float(keep_s))
        raise ValueError(f'{given!r}: {{"done": true}} and {{"keep_s": S}} are possible, S from 0 to 3600')


class KvfsTier(SecondaryTierManager):  # type: ignore[misc]
    """Options: mount, namespace, timeout_s, depth (docs/engines.md), and of vLLM's own locality and enable_kv_events.

    Called by one thread at a time. Raises ValueError for an option that cannot be; kvfs itself may be away.
    """

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        *,
        locality: str | None = None,
        enable_kv_events: bool = False,
        **given: object,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        if vllm.__version__.split("+")[0] not in TRIED:
            _logger.warning("kvfs for vLLM: version %s was not tried, %s were", vllm.__version__, " and ".join(TRIED))
        options = options_of("vLLM", given)
        self.locality = Locality(locality) if locality is not None else None
        self._size: int = self.block_size_bytes
        space = namespace_of(options.namespace, *_identity(offloading_spec, self._size))
        self._jobs: dict[int, tuple[_Job, Sequence[bytes]]] = {}  # by the ticket of a batch
        self._finished: list[JobResult] = []
        self._chains: dict[str, _Chain] = {}
        self._found: dict[bytes, bool] = {}
        self._hints: dict[bytes, _Hint] = {}  # of blocks that are being stored
        self._spoiled = Spoiled()
        self._told = Counters()
        self._connection = Connection(options, space, engine="vLLM", logger=_logger)
        self._events: _Events | None = None
        if enable_kv_events and offloading_spec.kv_events_config.enable_kv_cache_events:
            self._events = _Events(self._connection)
        # Last: nothing above may fail with memory of vLLM's in its hands.
        self._memory = primary_kv_view.cast("B")

    # ---- look-ups ----

    def lookup(self, key: bytes, req_context: Any) -> LookupResult:
        found = self._found.get(key)
        if found is None:
            chain = self._chain(req_context)
            keys = chain.window(key) if chain is not None else (key,)
            self._found.update(zip(keys, self._connection.exists(keys), strict=True))
            found = self._found[key]
        return LookupResult.HIT if found and key not in self._spoiled else LookupResult.MISS

    def on_schedule_end(self, context: Any) -> None:
        self._found.clear()  # answers hold for one step

    def touch(self, keys: Collection[bytes], req_context: Any) -> None:
        self._connection.touch(list(keys))

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: Any) -> None:
        chain = self._chain(req_context)
        self._chains.pop(req_context.req_id, None)
        try:
            hint = _Hint.of(req_context)
        except ValueError as error:
            _logger.warning("kvfs for vLLM: request %s: its hint is passed over: %s", req_context.req_id, error)
            return
        if hint is not None and chain is not None:
            # Some may be on their way: they are told of when they have come.
            hints = dict.fromkeys(chain.keys(), hint)
            self._tell(hints)
            under_way = {key for job, keys in self._jobs.values() if not job.is_load for key in keys}
            self._hints.update((key, hint) for key in hints if key in under_way)

    def _tell(self, hints: Mapping[bytes, _Hint]) -> None:
        for hint in set(hints.values()):
            keys = [key for key, of_key in hints.items() if of_key == hint]
            if hint.keep_s:
                self._connection.keep(keys, hint.keep_s)
            else:
                self._connection.done(keys)

    def _chain(self, req_context: Any) -> _Chain | None:
        """The request's keys, if vLLM has told them beforehand."""
        positions = getattr(req_context, "_offload_key_positions", None)
        if not positions:
            return None
        chain = self._chains.get(req_context.req_id)
        if chain is None:
            chain = self._chains[req_context.req_id] = _Chain()
        chain.extend(positions)
        return chain

    # ---- transfers ----

    def submit_store(self, job_metadata: Any) -> None:
        """A block that is there is not written again, unless a load of it failed: that one is replaced."""
        chain = self._chain(job_metadata.req_context)
        items = list(zip(job_metadata.keys, self._chunks(job_metadata), strict=True))
        whole = [item for item in items if item[0] not in self._spoiled]
        again = [item for item in items if item[0] in self._spoiled] if len(whole) < len(items) else []
        tickets = {}
        for chosen, if_absent in ((whole, True), (again, False)):
            if chosen:
                parents = None if chain is None else [chain.parent(key) for key, _ in chosen]
                ticket = self._connection.submit_put(chosen, if_absent=if_absent, parents=parents)
                tickets[ticket] = [key for key, _ in chosen]
        self._expect(_Job(job_metadata.job_id, is_load=False), tickets)

    def submit_load(self, job_metadata: Any) -> None:
        items = list(zip(job_metadata.keys, self._chunks(job_metadata), strict=True))
        tickets = {self._connection.submit_get(items): [key for key, _ in items]} if items else {}
        self._expect(_Job(job_metadata.job_id, is_load=True), tickets)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        for done in self._connection.drain():
            job, keys = self._jobs.pop(done.ticket)
            for key, result in zip(keys, done.results, strict=True):
                arrived = result == self._size if job.is_load else bool(result)
                (job.there if arrived else job.failed).append(key)
            job.seconds = max(job.seconds, done.seconds)
            job.left -= 1
            if not job.left:
                self._finish(job)
        finished, self._finished = self._finished, []
        return finished

    def has_pending_work(self) -> bool:
        return bool(self._jobs or self._finished)

    def drain_jobs(self) -> None:
        """Wait until nothing touches the primary tier's memory. Raises DeadlineError: vLLM must not use it again."""
        if not self._connection.wait(_DRAIN_TIMEOUT_S):
            raise DeadlineError(f"kvfs for vLLM: {len(self._jobs)} batches are under way after {_DRAIN_TIMEOUT_S:g} s")

    def shutdown(self) -> None:
        """Raises DeadlineError if a device still writes into the primary tier's memory; vLLM then keeps it."""
        if self._events is not None:
            self._events.close()
        self._connection.close()
        self._jobs.clear()
        self._memory.release()

    def _chunks(self, job_metadata: Any) -> Sequence[memoryview]:
        size = self._size
        return [self._memory[chunk * size : (chunk + 1) * size] for chunk in job_metadata.chunk_ids.tolist()]

    def _expect(self, job: _Job, tickets: Mapping[int, Sequence[bytes]]) -> None:
        job.left = len(tickets)
        for ticket, keys in tickets.items():
            self._jobs[ticket] = job, keys
        if not tickets:
            self._finish(job)

    def _finish(self, job: _Job) -> None:
        if job.is_load:
            # vLLM asks again at once: a key that cannot be loaded has to be a miss, or it asks for ever.
            self._spoiled.add(job.failed)
        else:
            self._spoiled.discard(job.there)
            if self._hints:
                hinted = {key: hint for key in job.there if (hint := self._hints.pop(key, None)) is not None}
                for key in job.failed:
                    self._hints.pop(key, None)
                self._tell(hinted)
            if self._events is not None:
                self._events.stored(job.there)
        self._finished.append(
            JobResult(
                job_id=job.id,
                success=not job.failed,
                successful_keys=tuple(job.there) if job.is_load and job.failed and job.there else None,
                transfer_time=job.seconds,
                transfer_bytes=len(job.there) * self._size,
            )
        )

    # ---- what vLLM publishes ----

    def take_events(self) -> Iterable[OffloadingEvent]:
        if self._events is None:
            return
        for keys, removed in self._events.take():
            yield OffloadingEvent(
                keys=keys, medium=self.medium, removed=removed, locality=self.locality, ownership=self._events.owner
            )

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        """Of one tier; extra_config is its configuration."""
        counters = {_metric(name): OffloadingCounterMetadata(documentation=text) for name, text in _METRICS.items()}
        return {
            **counters,
            _UP: OffloadingGaugeMetadata(documentation="1 if kvfs takes stores and gives blocks, else 0."),
        }

    def get_stats(self) -> OffloadingConnectorStats | None:
        stats = OffloadingConnectorStats()
        counters = self._connection.counters.copy()
        for name in _METRICS:
            if change := getattr(counters, name) - getattr(self._told, name):
                stats.increase_counter(_metric(name), change)
        stats.set_gauge(_UP, int(self._connection.state is State.UP))
        self._told = counters
        return stats


# Of a kvfs that has no events yet: no removal is told.
_subscribe: Any = getattr(kvfs, "events", None)


class _Events:
    """Which of the blocks that this tier announced are gone, and which came: for take_events().

    A thread of its own reads kvfs's events of the namespace, to know which keys to look up again; the block table has
    the answer. After a gap all announced keys are looked up.
    """

    def __init__(self, connection: Connection) -> None:
        self.owner = f"kvfs:{connection.space}"
        self._connection = connection
        self._announced: set[bytes] = set()
        self._new: list[bytes] = []
        self._changed: set[bytes] = set()
        self._all_changed = False
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="kvfs-events", daemon=True)
        if _subscribe is not None:
            self._thread.start()

    def stored(self, keys: Iterable[bytes]) -> None:
        self._new += [key for key in keys if key not in self._announced]
        self._announced.update(self._new)

    def take(self) -> Iterable[tuple[list[bytes], bool]]:
        """Lists of keys, and whether they were removed."""
        if self._new:
            new, self._new = self._new, []
            yield new, False
        if self._connection.client is None:
            return  # kvfs is away: nobody knows
        with self._lock:
            changed, self._changed = self._changed, set()
            if self._all_changed:
                changed, self._all_changed = set(self._announced), False
        keys = [key for key in changed if key in self._announced]
        if keys:
            gone = [key for key, found in zip(keys, self._connection.exists(keys), strict=True) if not found]
            if gone and self._connection.client is not None:
                self._announced.difference_update(gone)
                yield gone, True

    def close(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(_EVENTS_CLOSE_S)

    def _listen(self) -> None:
        while not self._stop.is_set():
            try:
                with _subscribe(self._connection.options.mount, self._connection.space) as events:
                    self._note(None)  # whatever happened before
                    while not self._stop.is_set():
                        event = events.next_event(_EVENTS_WAIT_S)
                        if event is not None:
                            self._note(getattr(event, "key", None))  # a gap or a reset has none
            except (KvfsError, OSError):
                self._stop.wait(_EVENTS_WAIT_S)

    def _note(self, key: bytes | None) -> None:
        """Something happened to this key; None: to any."""
        with self._lock:
            if key is None:
                self._all_changed = True
            else:
                self._changed.add(key)


def _metric(name: str) -> str:
    return f"vllm:kvfs_{name}"


def _identity(offloading_spec: Any, size: int) -> tuple[str, str]:
    """Model, type, parallelism and groups of layers, as vLLM itself tells caches apart. Then what its own file tiers
    leave out: the bytes' layout, and the size of a block."""
    mapper = FileMapper.from_offloading_spec(
        root_dir="",
        offloading_spec=offloading_spec,
        blocks_per_file=offloading_spec.blocks_per_chunk,
        parallel_agnostic=True,
    )
    layout = offloading_spec.config.kv_cache_layout or "default"
    return f"{mapper.base_path.strip('/')}_r{mapper.rank}", f"{layout}_{size}"
