"""Nodes of a pod for tests: the real threads and engines, with a plane that only remembers what came."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence

from kvfs.pod.batch import HEADER, MAGIC, VERSION, read_header
from kvfs.pod.engine import Engine
from kvfs.pod.follow import Applied
from kvfs.pod.limits import Limits
from kvfs.pod.member import Identity, LeaseName, Member
from kvfs.pod.threads import Pod

SECRET = b"s" * 8
RECORD_SIZE = 40
# Short times, so that a test sees in a second what takes a pod a minute.
QUICK = Limits(
    beat_s=0.1, beat_expire_s=1.0, first_sign_s=0.5, ask_s=0.1, ask_max_s=0.4, retry_s=0.05, retry_max_s=0.3,
    silence_s=0.3, verify_max_s=0.5, settle_s=0.0, beat_patience_s=0.05,
)  # fmt: skip


def make_batch(slot: int, start: int, number: int, records: int, fill: int = 0) -> bytes:
    body = bytes([fill & 0xFF]) * (RECORD_SIZE * records)
    size = HEADER.size + len(body)
    return HEADER.pack(MAGIC, VERSION, size, 0, start, number, slot, 0, 0, 0, records, 0) + body


class MemorySource:
    """News that a test puts in."""

    def __init__(self, slot: int, start: int) -> None:
        self._slot, self._start = slot, start
        self._lock, self._due = threading.Lock(), threading.Event()
        self._batches: list[bytes] = []
        self._held: list[int] = []
        self.number = 0

    def put(self, records: int = 1) -> int:
        """News of so many records, due at once. Returns the number behind them."""
        with self._lock:
            self._batches.append(make_batch(self._slot, self._start, self.number, records, self.number))
            self.number += records
            end = self.number
        self._due.set()
        return end

    def hold(self, records: int = 1) -> None:
        """News that are held back, until a barrier."""
        with self._lock:
            self._held.append(records)

    def take(self, *, everything: bool) -> Sequence[bytes]:
        if everything:
            held, self._held = self._held, []
            for records in held:
                self.put(records)
        with self._lock:
            batches, self._batches = self._batches, []
        return batches

    def wait(self, timeout_s: float) -> None:
        self._due.wait(timeout_s)
        self._due.clear()

    def wake(self) -> None:
        self._due.set()


class MemorySink:
    """Remembers the numbers that came, in their order; flash is read at once, or when the test says so."""

    def __init__(self) -> None:
        self.numbers: dict[int, list[tuple[int, int]]] = {}
        self.reloads: list[int] = []
        self.pod: Pod | None = None
        self.damage: set[int] = set()
        self.changed = threading.Condition()

    def apply(self, slot: int, batch: bytes) -> Applied:
        header = read_header(batch)
        assert header is not None
        if header.number in self.damage:
            self.damage.discard(header.number)
            return Applied.DAMAGED
        with self.changed:
            self.numbers.setdefault(slot, []).append((header.number, header.end))
            self.changed.notify_all()
        return Applied.DONE

    def reload(self, slot: int) -> None:
        self.reloads.append(slot)
        threading.Thread(target=self._load, args=(slot,), daemon=True).start()

    def _load(self, slot: int) -> None:
        assert self.pod is not None
        self.pod.loaded(slot)

    def next(self, slot: int) -> int:
        found = self.numbers.get(slot)
        return found[-1][1] if found else 0

    def wait_next(self, slot: int, number: int, timeout_s: float = 15.0) -> None:
        with self.changed:
            came = self.changed.wait_for(lambda: self.next(slot) >= number, timeout_s)
        assert came, f"slot {slot}: {number} did not come within {timeout_s} s; {self.next(slot)} did"

    def is_whole(self, slot: int) -> bool:
        """Whether the numbers followed one another, each once."""
        pairs = self.numbers.get(slot, [])
        return all(before[1] == after[0] for before, after in itertools.pairwise(pairs))


class MemoryKeeper:
    """Holds the keys it is told to."""

    def __init__(self) -> None:
        self.keys: set[bytes] = set()
        self.leases: dict[LeaseName, Sequence[bytes]] = {}
        self.granted = 0
        self.touched: list[bytes] = []
        self.delay_s = 0.0

    def lease(self, lease: LeaseName, keys: Sequence[bytes], seconds: float) -> Sequence[bool]:
        time.sleep(self.delay_s)
        self.leases[lease] = keys
        self.granted += 1
        return [key in self.keys for key in keys]

    def release(self, lease: LeaseName) -> None:
        self.leases.pop(lease, None)

    def touch(self, asker: int, keys: Sequence[bytes]) -> None:
        self.touched += keys


class Node:
    """One node of a pod of `slots` nodes, with its threads."""

    def __init__(
        self,
        slot: int,
        slots: int,
        make: Sequence[Callable[[], Engine]],
        *,
        start: int = 0,
        epoch: int = 1,
        limits: Limits = QUICK,
    ) -> None:
        self.slot, self.start = slot, start or 1000 + slot
        self.source, self.sink, self.keeper = MemorySource(slot, self.start), MemorySink(), MemoryKeeper()
        identity = Identity("u", slot, self.start, epoch, tuple(range(slots)), SECRET)
        names = [f"engine {index}" for index in range(len(make))]
        self.member = Member(
            identity, names, self.source, self.sink, self.keeper, time.monotonic(), limits=limits
        )  # fmt: skip
        self.pod = Pod(self.member, self.source, make)
        self.sink.pod = self.pod
        self.pod.start()

    def follows(self, slot: int) -> bool:
        """Whether all engines are there, and an owner's feed is followed."""
        statistics = self.pod.statistics()
        return all(link.state == "up" for link in statistics.links) and any(
            owner.slot == slot and owner.state == "following" for owner in statistics.owners
        )

    def stop(self) -> None:
        assert self.pod.stop(5.0), "threads of the pod did not end"
        assert self.pod.failed is None, self.pod.failed
