"""A daemon's part in its pod: the store's news go out, the others' come in, and what only flash has is read.

kvfs.pod carries batches and knows no store; the store knows no engine. Here they meet. The feed's threads call in; what
changes names or segments is handed on to trio's thread.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import trio

from kvfs.errors import KvfsError, MissingFeatureError
from kvfs.frames import LeasedBlocks, Room
from kvfs.frontend.foreign import Kept
from kvfs.lent import Part
from kvfs.pod.engine import Engine, Names
from kvfs.pod.follow import Applied, OwnerStatistics
from kvfs.pod.limits import Limits
from kvfs.pod.member import Identity, LeaseName, Member
from kvfs.pod.threads import Pod
from kvfs.pod.url import EngineUrl, parse_urls
from kvfs.podmap import DIRECTORY_HERE, Conflict, PodMap, PodMapError
from kvfs.pool.config import PoolConfig
from kvfs.store.foreign import ForeignLoader, Tombstones
from kvfs.store.store import Store
from kvfs.types import COUNTER_BITS, SLOT_BITS

log = logging.getLogger("kvfs.pod")

# Blocks that all other nodes together may lease here: a part of the pool, and a number.
_LEASE_SHARE = 16
_LEASED_MAX = 1 << 18
_LEASE_MAX_S = 60.0
# An owner that gave no answer about a lease is not asked again for this time: look-ups of an engine's loop take leases.
_SILENT_S = 1.0
# A new epoch is taken when this part of the numbers of one is used up.
_EPOCH_USED = 0.5
_EPOCH_POLL_S = 1.0
_STOP_S = 2.0
_REMOVALS_POLL_S = 0.1
# An owner that was followed so long without a gap has heard of every removal before: streams keep 60 s.
_HEARD_S = 120.0


class NewsSource:
    """The data plane's queue of news, as the feed takes it."""

    def __init__(self, podmap: PodMap) -> None:
        self._map = podmap
        self._due_s: float | None = None
        self._wakes: dict[int, int] = {}
        self._lock = threading.Lock()

    def take(self, *, everything: bool) -> Sequence[bytes]:
        """The batches that are due, in order. Under the feed's lock."""
        if everything:
            self._map.flush()
        found: list[bytes] = []
        while True:
            batch = self._map.take(time.monotonic_ns())
            self._due_s = batch.next_due_s
            if batch.lost:
                log.error("pod: %d changes had no room in the queue; the other nodes read this one's flash", batch.lost)
            if not batch.data:
                break
            found.append(batch.data)
        if found:
            self.wake(but=threading.get_ident())
        return found

    def wait(self, timeout_s: float) -> None:
        me = threading.get_ident()
        with self._lock:
            wake = self._wakes.get(me)
            if wake is None:
                wake = self._wakes[me] = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        due = self._due_s
        if due is not None:
            timeout_s = min(timeout_s, due - time.monotonic())
        poll = select.poll()
        poll.register(self._map.news_fd, select.POLLIN)
        poll.register(wake, select.POLLIN)
        if timeout_s > 0:
            poll.poll(timeout_s * 1000 + 0.5)
        with suppress(BlockingIOError):
            os.eventfd_read(wake)

    def wake(self, but: int = 0) -> None:
        with self._lock:
            for thread, fd in self._wakes.items():
                if thread != but:
                    os.eventfd_write(fd, 1)

    def close(self) -> None:
        with self._lock:
            for fd in self._wakes.values():
                os.close(fd)
            self._wakes.clear()


@dataclass(slots=True)
class _Lease:
    told: LeasedBlocks
    until: float


@dataclass(slots=True)
class PodCounters:
    """Since the mount."""

    batches: int = 0
    batches_refused: int = 0
    records: int = 0
    skipped: int = 0
    conflicts: int = 0
    leases: int = 0
    touches: int = 0


class PodNode:
    """Use: `async with` the daemon's nursery: `nursery.start_soon(node.run)`. It ends with the nursery."""

    def __init__(self, store: Store, make_engine: Callable[[EngineUrl, PoolConfig, Path | None], Engine] | None = None,
                 limits: Limits | None = None) -> None:  # fmt: skip
        pod, podmap = store.config.pod, store.plane.pod
        assert pod is not None and podmap is not None
        self._store, self._map = store, podmap
        self._frames = store.plane.frames
        self._tombstones = Tombstones(store.index, podmap)
        self._loader = ForeignLoader(store.segments, store.plane, podmap)
        self.counters = PodCounters()
        self._leases: dict[LeaseName, _Lease] = {}
        self._lease_lock = threading.Lock()
        self._silent_until: dict[int, float] = {}
        # The start of each other node that was told of this one's directories.
        self._told: dict[int, int] = {}
        self._nursery: trio.Nursery | None = None
        self._token: trio.lowlevel.TrioToken | None = None
        self._source = NewsSource(podmap)
        self._lookup_wait_s = pod.lookup_wait_ms / 1000
        self._asking, self._asked_next = False, trio.Event()
        podmap.wait_on_misses(pod.lookup_wait_ms > 0)
        urls = parse_urls(pod.engine)
        password = Path(pod.password_file) if pod.password_file else None
        make = make_engine or _redis
        identity = Identity(
            str(store.config.uuid), store.slot, podmap.options.start, store.epoch, tuple(range(pod.nodes)),
            store.config.secret.to_bytes(8, "little"),
        )  # fmt: skip
        self._member = Member(identity, [str(url) for url in urls], self._source, self, self, time.monotonic(),
                              limits=limits)  # fmt: skip
        config = store.config
        makers = [partial(make, url, config, password) for url in urls]
        self._pod = Pod(self._member, self._source, makers)

    async def run(self) -> None:
        """Until cancelled."""
        self._token = trio.lowlevel.current_trio_token()
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            self._pod.start()
            try:
                nursery.start_soon(self._expire_leases)
                nursery.start_soon(self._follow_numbers)
                nursery.start_soon(self._follow_removals)
                await trio.sleep_forever()
            finally:
                # No request can come any more: those of the last moment, before the index closes.
                self._tombstones.take()
                with trio.CancelScope(shield=True):
                    await trio.to_thread.run_sync(self._pod.stop, _STOP_S)
                self._source.close()

    # ---- the feed's sink: its threads call ----

    def apply(self, slot: int, batch: bytes) -> Applied:
        """Take in a batch of another node."""
        try:
            applied = self._map.apply(slot, batch)
        except PodMapError as error:
            self.counters.batches_refused += 1
            log.warning("%s", error)
            return Applied.DAMAGED
        self.counters.batches += 1
        self.counters.records += applied.records
        self.counters.skipped += applied.skipped
        if applied.conflicts:
            self.counters.conflicts += sum(conflict.kind != DIRECTORY_HERE for conflict in applied.conflicts)
            self._soon(self._drop, applied.conflicts)
        return Applied.DONE

    def reload(self, slot: int) -> None:
        """Begin to read the flash of a node."""
        self._soon(self._begin_load, slot)

    def _soon(self, function: Callable[..., object], *arguments: object) -> None:
        assert self._token is not None
        with suppress(trio.RunFinishedError):
            self._token.run_sync_soon(function, *arguments)

    def _begin_load(self, slot: int) -> None:
        if self._nursery is not None:
            with suppress(RuntimeError):  # the nursery is closed: the daemon ends
                self._nursery.start_soon(self._load, slot)

    async def _load(self, slot: int) -> None:
        whole = False
        try:
            whole = await self._loader.load(slot)
        except KvfsError as error:
            log.warning("pod: slot %d: its flash cannot be read: %s", slot, error)
        # An owner that is back does not know what was removed meanwhile, and its flash has it.
        self._tombstones.take()
        self._tombstones.tell(slot)
        self._pod.loaded(slot, whole=whole)
        epoch = next((owner.epoch for owner in self._pod.statistics().owners if owner.slot == slot), -1)
        if epoch > self._told.get(slot, -1):
            # It reads this one's flash, where empty directories are not.
            self._told[slot] = epoch
            await trio.to_thread.run_sync(self._map.tell_directories)

    def _drop(self, conflicts: Sequence[Conflict]) -> None:
        for conflict in conflicts:
            self._store.blocks.drop_overtaken(conflict.inode, conflict.version)

    # ---- what others ask about this node's blocks: the feed's threads call ----

    def lease(self, lease: LeaseName, keys: Sequence[bytes], seconds: float) -> Sequence[bool]:
        inodes = self._map.own_inodes(keys)
        segments = self._store.segments
        pages = max(1, segments.usable * segments.area // _LEASE_SHARE)
        known = [number for number in inodes if number]
        with self._lease_lock:
            told = self._frames.lease()
            blocks = sum(held.told.count for held in self._leases.values())
            room = Room(pages, pages, max(0, _LEASED_MAX - blocks))
            held = iter(self._frames.lease_add(told, Part(array("Q", known).tobytes()), room))
            if told.count:
                until = time.monotonic() + min(seconds, _LEASE_MAX_S)
                self._leases[lease] = _Lease(told, until)
                self.counters.leases += 1
            else:
                self._frames.lease_end(told)
        return [bool(number) and bool(next(held)) for number in inodes]

    def release(self, lease: LeaseName) -> None:
        with self._lease_lock:
            found = self._leases.pop(lease, None)
            if found is not None:
                self._frames.lease_end(found.told)

    def touch(self, asker: int, keys: Sequence[bytes]) -> None:
        inodes = [number for number in self._map.own_inodes(keys) if number]
        if inodes:
            self._store.plane.uses.touch(array("Q", inodes), found=False)
            self.counters.touches += len(inodes)

    async def _expire_leases(self) -> None:
        while True:
            await trio.sleep(1.0)
            now = time.monotonic()
            with self._lease_lock:
                for name in [name for name, lease in self._leases.items() if lease.until <= now]:
                    self._frames.lease_end(self._leases.pop(name).told)

    async def _follow_removals(self) -> None:
        """Remember what was removed of others, until they have heard of it."""
        since: dict[int, float] = {}
        while True:
            await trio.sleep(_REMOVALS_POLL_S)
            self._tombstones.take()
            now = trio.current_time()
            for owner in self._pod.statistics().owners if len(self._tombstones) else ():
                heard = owner.alive and owner.state == "following" and not owner.behind
                began = since.setdefault(owner.slot, now) if heard else since.pop(owner.slot, now)
                if heard and now - began > _HEARD_S:
                    self._tombstones.forget(owner.slot)
                    since.pop(owner.slot)

    # ---- what this node's clients ask ----

    def fresh(self) -> None:
        """Return once all is here that living nodes had when this was called. Blocks. FreshError, EngineAwayError."""
        self._pod.fresh()

    def keep(self, wanted: Mapping[int, Sequence[bytes]], seconds: float) -> Sequence[Kept]:
        """Have other nodes keep blocks from eviction. Blocks, for 50 ms at most: who gives no answer keeps nothing."""
        now = time.monotonic()
        heard = {slot: keys for slot, keys in wanted.items() if self._silent_until.get(slot, 0.0) <= now}
        asks = self._pod.lease_all(heard, seconds)
        for ask in asks:
            if not ask.finished:
                self._silent_until[ask.slot] = time.monotonic() + _SILENT_S
        return [Kept(ask.slot, ask.held, partial(self._pod.release, ask)) for ask in asks]

    def tell_used(self, slot: int, keys: Sequence[bytes]) -> None:
        """Blocks of another node are used here, without a read."""
        self._pod.touch(slot, keys)

    async def wait_for_news(self) -> None:
        """Return once all is here that living nodes had when this was called, or after the pool's lookup_wait_ms. All
        who wait share what they wait for."""
        waiting = self._asked_next
        if not self._asking:
            self._soon_ask()
        with trio.move_on_after(self._lookup_wait_s):
            await waiting.wait()

    def _soon_ask(self) -> None:
        if self._nursery is not None:
            self._asking = True
            self._nursery.start_soon(self._ask_for_news)

    async def _ask_for_news(self) -> None:
        """One barrier at a time, for all who came before it began."""
        while True:
            asked, self._asked_next = self._asked_next, trio.Event()
            with suppress(KvfsError):  # an owner or the engine gave no answer: the look-up is a miss
                await trio.to_thread.run_sync(self._pod.fresh, self._lookup_wait_s)
            asked.set()
            if not self._asked_next.statistics().tasks_waiting:
                self._asking = False
                return

    # ---- numbers ----

    async def _follow_numbers(self) -> None:
        """Numbers of an epoch are many, and not endless."""
        store, names = self._store, self._store.plane.names
        counters = 1 << COUNTER_BITS - SLOT_BITS
        while True:
            await trio.sleep(_EPOCH_POLL_S)
            used = (names.last_version & (1 << COUNTER_BITS) - 1) >> SLOT_BITS
            if used > counters * _EPOCH_USED and names.last_version >> COUNTER_BITS >= store.epoch:
                await store.raise_epoch()

    # ---- status ----

    def status(self) -> Mapping[str, object]:
        """The pod, for `kvfs status` and Prometheus."""
        statistics = self._pod.statistics()
        owners = statistics.owners
        is_heard = any(link.state == "up" for link in statistics.links)
        return {
            "slot": self._store.slot,
            "nodes": self._map.options.nodes,
            "epoch": self._store.epoch,
            # Nobody can tell while no engine carries signs of life. Slots that no node ever had do not count.
            "frozen": [owner.slot for owner in owners if self._is_frozen(owner)] if is_heard else None,
            # Of the slowest owner.
            "lag_ms_p50": max((owner.lag_ms_p50 for owner in owners), default=0.0),
            "lag_ms_p99": max((owner.lag_ms_p99 for owner in owners), default=0.0),
            "gaps": sum(owner.gaps for owner in owners),
            "repeats": sum(owner.repeats for owner in owners),
            "feed": asdict(statistics.feed),
            "engines": [asdict(link) for link in statistics.links],
            "owners": [asdict(owner) for owner in owners],
            "asks": asdict(statistics.asks),
            "map": self._map.statistics(),
            "loads": self._loader.loads,
            "tombstones": len(self._tombstones),
            "loaded_names": self._loader.blocks,
            "forged": statistics.forged,
            "malformed": statistics.malformed,
            "doubled": statistics.doubled,
            **asdict(self.counters),
        }

    def _is_frozen(self, owner: OwnerStatistics) -> bool:
        return not owner.alive and (owner.epoch >= 0 or owner.slot in self._loader.used)


def _redis(url: EngineUrl, config: PoolConfig, password_file: Path | None) -> Engine:
    try:
        from kvfs.pod.redis_engine import RedisEngine
    except ImportError as error:
        raise MissingFeatureError("a pod needs redis-py: pip install 'kvfs[pod]'") from error
    key = Names(str(config.uuid)).stream(0)
    return RedisEngine(url, pool_key=key, password_file=password_file)
