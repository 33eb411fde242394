"""vLLM: kvfs as a secondary tier behind the CPU's memory, loaded by the configuration alone (docs/engines.md).

    {"type": "KvfsTier", "module_path": "kvfs.connectors.vllm", "mount": "/mnt/kv"}

vLLM's TieringOffloadingManager asks in its scheduler's loop. A look-up reads shared memory, so it answers HIT or MISS
at once. Blocks go between the devices and the tier in the CPU's memory without a copy, whatever step runs meanwhile.
Interface: vllm.v1.kv_offload.tiering.base (versions.py). Since 0.33 calls come from any thread, and between steps.
"""

from __future__ import annotations

import functools
import itertools
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, TypeVar

from kvfs.connectors import versions
from kvfs.connectors.common import Connection, Counters, State, options_of
from kvfs.connectors.spoiled import Spoiled
from kvfs.connectors.vllm_ahead import Ahead
from kvfs.connectors.vllm_events import TierEvents
from kvfs.connectors.vllm_hints import HINT_METRICS, HintCounters, Hints, Plan
from kvfs.errors import DeadlineError

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
        ReqContext,
        RequestOffloadingContext,
    )
    from vllm.v1.kv_offload.file_mapper import FileMapper
    from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager
except ImportError as error:
    raise versions.missing("vllm", error) from error

# init_logger() gives a logger that prints only below this name.
_logger = init_logger("vllm.kvfs")

# Keys are looked up by so many at once: 0.3 us of processor time a key, against 9 us for one alone.
_WINDOW = 128
# An answer of a look-up holds for one step, and so long at most: other tiers ask between steps.
_ANSWER_S = 0.005
# Of vLLM's memory so much may be blocks that were read ahead and not used yet.
_AHEAD_SHARE = 0.25
# Names of the requests by which they are read begin so.
_AHEAD = "kvfs-ahead-"
# An OffloadKey ends with the number of its group of layers.
_GROUP_SIZE = 4
# For all that is under way: a device that hangs is given up by the kernel after 30 s by default.
_DRAIN_TIMEOUT_S = 60.0
# vLLM keeps tokens and hashes of a block for its removal, where it is told to expect one. Not every version can.
_EXPECTED = {"removal_expected": True} if "removal_expected" in {f.name for f in fields(OffloadingEvent)} else {}

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

Result = TypeVar("Result")


@dataclass(slots=True)
class _Job:
    """One job of vLLM's, done by `left` more batches. there: loaded, or stored."""

    id: int
    is_load: bool
    request: str
    plan: Plan | None = None
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


def _alone(method: Callable[..., Result]) -> Callable[..., Result]:
    """One thread at a time."""

    @functools.wraps(method)
    def alone(self: KvfsTier, *arguments: Any) -> Result:
        with self._lock:
            return method(self, *arguments)

    return alone


class KvfsTier(SecondaryTierManager):  # type: ignore[misc]
    """Options: as in docs/engines.md, of which vLLM itself has locality and enable_kv_events.

    Any thread may call anything. Raises ValueError for an option that cannot be; kvfs itself may be away.
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
        hints: bool = True,
        **given: object,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        versions.check("vllm", _logger, vllm.__version__)
        options = options_of("vLLM", given)
        if not isinstance(hints, bool):
            raise ValueError(f"kvfs for vLLM: hints {hints!r}: true and false are possible")
        self.locality = Locality(locality) if locality is not None else Locality.LOCAL
        self._size: int = self.block_size_bytes
        space = options.space(*_identity(offloading_spec, self._size))
        # Its manager has a lock too, from 0.33 on. Look-ups by the thread that holds it come back in here.
        self._lock = threading.RLock()
        self._jobs: dict[int, tuple[_Job, Sequence[bytes]]] = {}  # by the ticket of a batch
        self._finished: list[JobResult] = []
        self._chains: dict[str, _Chain] = {}
        self._found: dict[bytes, bool] = {}
        self._found_until = 0.0
        self._spoiled = Spoiled()
        self._told, self._told_hints = Counters(), HintCounters()
        self._connection = Connection(options, space, engine="vLLM", logger=_logger)
        self._hints = Hints(self._connection, _logger, obeyed=hints)
        self._ahead = Ahead(self._connection, int(len(primary_kv_view) * _AHEAD_SHARE))
        self._ahead_steps, self._ahead_until = 0, 0.0
        self._events: TierEvents | None = None
        if enable_kv_events and offloading_spec.kv_events_config.enable_kv_cache_events:
            self._events = TierEvents(self._connection)
        # Last: nothing above may fail with memory of vLLM's in its hands.
        self._memory = primary_kv_view.cast("B")

    # ---- look-ups ----

    def lookup(self, key: bytes, req_context: Any) -> LookupResult:
        now = time.monotonic()
        with self._lock:
            if now >= self._found_until:
                self._found.clear()
                self._found_until = now + _ANSWER_S
            found = self._found.get(key)
            if found is None:
                chain = self._chain(req_context)
                keys = chain.window(key) if chain is not None else (key,)
                self._found.update(zip(keys, self._connection.exists(keys), strict=True))
                found = self._found[key]
        return LookupResult.HIT if found and key not in self._spoiled else LookupResult.MISS

    @_alone
    def on_schedule_end(self, context: Any) -> None:
        self._found.clear()
        if self._events is not None:
            self._events.scheduled(context.new_req_ids)

    def touch(self, keys: Collection[bytes], req_context: Any) -> None:
        self._connection.touch(list(keys))

    @_alone
    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        for hint in self._hints.new_request(req_context.req_id, req_context):
            self._hints.count(hints_refused=self._ahead.want(hint, req_context.load_tier_filter))
        return RequestOffloadingContext()

    @_alone
    def on_request_finished(self, req_context: Any) -> None:
        chain = self._chain(req_context)
        self._chains.pop(req_context.req_id, None)
        keys = chain.keys() if chain is not None else ()
        self._hints.finished(req_context.req_id, keys, self._coming(req_context.req_id))
        if used := self._ahead.used(keys):
            self._hints.count(hints_used=used)

    @_alone
    def serve_external_requests(self, parent: Any) -> None:
        """For a hint, have vLLM bring blocks to its own memory as if a request had asked for them. It does so by
        itself, with all its checks; a tier may not write there. `parent` leaves out the tier that asks."""
        keys, until, load_filter, refused = self._ahead.take()
        manager = getattr(parent, "_m", None)
        if manager is None or not hasattr(ReqContext, "set_offload_key_position"):
            refused += len(keys)
        elif keys:
            self._ahead_steps += 1
            context = ReqContext(f"{_AHEAD}{self._ahead_steps}", load_tier_filter=load_filter)
            for place, key in enumerate(keys):
                context.set_offload_key_position(key, place + 1)
            manager.on_new_request(context)
            answers = [manager.lookup(key, context) for key in keys]
            manager.on_request_finished(context)
            self._ahead_until = until
            refused += sum(answer not in (LookupResult.HIT, LookupResult.HIT_PENDING) for answer in answers)
        if refused:
            self._hints.count(hints_refused=refused)

    def _coming(self, request: str) -> frozenset[bytes]:
        """The keys that jobs of a request with hints are still storing or loading."""
        if self._hints.plan(request) is None:
            return frozenset()
        return frozenset(key for job, keys in self._jobs.values() if job.request == request for key in keys)

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

    @_alone
    def submit_store(self, job_metadata: Any) -> None:
        """An existing block is not written again, unless a load of it failed: that one is replaced."""
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
        self._expect(self._job(job_metadata, is_load=False), tickets)

    @_alone
    def submit_load(self, job_metadata: Any) -> None:
        items = list(zip(job_metadata.keys, self._chunks(job_metadata), strict=True))
        tickets = {self._connection.submit_get(items): [key for key, _ in items]} if items else {}
        if job_metadata.req_context.req_id.startswith(_AHEAD):
            # It is of this step: serve_external_requests() came just before.
            self._ahead.started(job_metadata.keys, self._ahead_until)
        self._expect(self._job(job_metadata, is_load=True), tickets)

    @_alone
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
        return bool(self._jobs or self._finished or self._ahead.has_work())

    def drain_jobs(self) -> None:
        """For a reset of vLLM's own tiers: wait until nothing touches the primary tier's memory. Raises DeadlineError:
        vLLM must not use it again."""
        if self._events is not None:
            self._events.cleared()
        if not self._connection.wait(_DRAIN_TIMEOUT_S):
            raise DeadlineError(f"kvfs for vLLM: {len(self._jobs)} batches are under way after {_DRAIN_TIMEOUT_S:g} s")

    def shutdown(self) -> None:
        """Raises DeadlineError if a device still writes into the primary tier's memory; vLLM then keeps it."""
        if self._events is not None:
            self._events.close()
        self._hints.close()
        self._ahead.close()
        self._connection.close()
        with self._lock:
            self._jobs.clear()
            self._memory.release()

    def _chunks(self, job_metadata: Any) -> Sequence[memoryview]:
        size = self._size
        return [self._memory[chunk * size : (chunk + 1) * size] for chunk in job_metadata.chunk_ids.tolist()]

    def _job(self, job_metadata: Any, *, is_load: bool) -> _Job:
        request = job_metadata.req_context.req_id
        return _Job(job_metadata.job_id, is_load, request, self._hints.plan(request))

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
            if job.request.startswith(_AHEAD):
                self._hints.count(hints_ahead=len(job.there))
                self._ahead.failed(job.failed)
            elif self._events is not None:
                self._events.loaded(job.request, job.there)
        else:
            self._spoiled.discard(job.there)
            if self._events is not None:
                self._events.stored(job.there)
        if job.plan is not None:
            self._hints.arrived(job.plan, job.there, job.failed)
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
            return ()
        with self._lock:
            told = list(self._events.take())
        # No ownership: a router takes an event with one for another's, and drops it.
        return [
            OffloadingEvent(
                keys=keys, medium=self.medium, removed=removed, locality=self.locality, ownership=None, **_EXPECTED
            )
            for keys, removed in told
        ]

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        """Of one tier; extra_config is its configuration."""
        counters = {
            _metric(name): OffloadingCounterMetadata(documentation=text)
            for name, text in (_METRICS | HINT_METRICS).items()
        }
        return {
            **counters,
            _UP: OffloadingGaugeMetadata(documentation="1 if kvfs takes stores and gives blocks, else 0."),
        }

    @_alone
    def get_stats(self) -> OffloadingConnectorStats | None:
        stats = OffloadingConnectorStats()
        counters = self._connection.counters.copy()
        for name in _METRICS:
            if change := getattr(counters, name) - getattr(self._told, name):
                stats.increase_counter(_metric(name), change)
        hints = replace(self._hints.counters)
        for name, change in hints.since(self._told_hints).items():
            stats.increase_counter(_metric(name), change)
        stats.set_gauge(_UP, int(self._connection.state is State.UP))
        self._told, self._told_hints = counters, hints
        return stats


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
