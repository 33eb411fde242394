"""A follower: what this node knows of the others' feeds, and what it does about gaps.

A state machine: time is given in; of the outside it calls the sink alone. Rules:

- Batches of an owner are applied in the order of their numbers. A number seen before is dropped.
- A gap is asked for, one ask an owner at a time, with a deadline that doubles while nothing comes.
- A start of a higher epoch takes the place of the one before it: the owner's flash is read anew. Batches of a start
  that its owner has not announced are not believed; the owner is asked.
- Load first, then apply: while flash is read, batches wait. The first of them is the owner's `floor`, from where on
  flash may lack something.
- A gap that the owner cannot repeat is read from flash too; news goes on meanwhile, from the oldest that it can repeat.
- Numbers that an owner cannot repeat may not be on its flash yet. Flash that was read too soon is read again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from kvfs.pod.batch import VERSION, Header, read_header
from kvfs.pod.limits import Limits
from kvfs.pod.messages import State
from kvfs.units import percentile_ns

_BUCKETS = 44  # of a lag's histogram: up to 2^43 ns, 2.4 hours
_PAST_MAX = 16
# A batch that was damaged this often in a row is skipped, and flash is read.
_DAMAGED_MAX = 3


class Applied(Enum):
    """How a batch ended: applied, refused (checksum, bounds), or of a version that this kvfs does not know."""

    DONE = "done"
    DAMAGED = "damaged"
    UNKNOWN = "unknown"


class Sink(Protocol):
    """The pod map, as the feed sees it. Calls come from threads of the feed, one at a time; none may wait long."""

    def apply(self, slot: int, batch: bytes) -> Applied:
        """Apply a batch of an owner."""
        ...

    def reload(self, slot: int) -> None:
        """Begin to read an owner's flash: its entries are replaced by its contents. Follower.loaded() follows. It is
        not called again before that."""
        ...


@dataclass(slots=True)
class Ask:
    """The owner `slot` is asked for start `of` from number `first`; `of` 0 asks for its state."""

    slot: int
    of: int
    first: int
    number: int = 0  # of the message, once it has one
    deadline: float = 0.0
    next_then: int = 0


@dataclass(frozen=True, slots=True)
class OwnerStatistics:
    """An owner from this node's view. state: unknown, loading, following, silent (no sign; its flash was read), or
    unsupported. lag: from the owner's taking of a batch to its application here; clocks of two machines. behind:
    numbers that are known and not applied. lost: numbers that the owner could not repeat, so that flash is read."""

    slot: int
    state: str
    alive: bool
    epoch: int
    next: int
    behind: int
    lag_ms: float
    lag_ms_p50: float
    lag_ms_p99: float
    batches: int
    size: int
    gaps: int
    asks: int
    repeats: int
    duplicates: int
    damaged: int
    stale: int
    reloads: int
    lost: int
    held_size: int


@dataclass(slots=True)
class _Owner:
    slot: int
    epoch: int = -1
    start: int = 0
    next: int = 0
    # The highest number that the owner spoke of; from where it repeats; from where a load must be followed.
    claimed: int = 0
    oldest: int = 0
    floor: int = 0
    # By then flash has all before `oldest`, even of an owner that says nothing any more.
    settled_at: float = 0.0
    beat: int = -1
    sign_at: float = float("-inf")
    past: list[int] = field(default_factory=list)
    stranger: bool = False
    unsupported: bool = False
    held: dict[int, tuple[int, bytes, int, bool]] = field(default_factory=dict)  # number: end, data, wall_ns, repeated
    held_size: int = 0
    loading: bool = False
    loaded: bool = False
    again: bool = False
    too_soon: bool = False  # the load: flash may lack what cannot be repeated
    load_at: float | None = None
    load_wait_s: float = 0.0
    loaded_at: float = 0.0
    gap_at: float | None = None
    gap_next: int = -1
    ask: Ask | None = None
    ask_wait_s: float = 0.0
    damaged_at: int = -1
    damaged_times: int = 0
    lag_ns: int = 0
    lags: list[int] = field(default_factory=lambda: [0] * _BUCKETS)
    batches: int = 0
    size: int = 0
    gaps: int = 0
    asks: int = 0
    repeats: int = 0
    duplicates: int = 0
    damaged: int = 0
    stale: int = 0
    reloads: int = 0
    lost: int = 0


class Follower:
    """All other owners of a pod. links: how many engines there are."""

    def __init__(self, slot: int, slots: Sequence[int], sink: Sink, now: float, *, links: int, limits: Limits) -> None:
        self._sink, self._limits = sink, limits
        self._patience_s = limits.patience_s if links > 1 else 0.0
        self._first_load_at = now + limits.first_sign_s
        self._owners = {
            other: _Owner(other, load_wait_s=limits.load_again_s, ask_wait_s=limits.ask_s)
            for other in slots
            if other != slot
        }
        # Those that something may have to be done for; all others rest.
        self._busy = set(self._owners)
        self._sweep_at = now

    # ---- what comes ----

    def batch(self, slot: int, data: bytes, sent_ns: int, now: float, wall_ns: int, *, repeated: bool = False) -> None:
        """An entry with a batch came, of an owner's stream or as its repeat."""
        owner = self._owners.get(slot)
        if owner is None:
            return
        header = read_header(data)
        if header is None or (header.version == VERSION and header.slot != slot):
            owner.damaged += 1
            return
        if header.version != VERSION:
            owner.unsupported = True
            owner.stale += 1
            return
        owner.repeats += repeated
        if owner.epoch < 0 or header.start != owner.start:
            if header.start in owner.past:
                owner.stale += 1
            else:
                owner.stranger = True
                self._busy.add(slot)
            return
        owner.unsupported = False
        owner.sign_at = now if not repeated else owner.sign_at
        owner.claimed = max(owner.claimed, header.end)
        if header.end <= owner.next:
            owner.duplicates += 1
        elif owner.loading or self._is_ahead(header, owner):
            self._hold(owner, header, data, sent_ns, repeated)
            self._busy.add(slot)
        else:
            self._apply(owner, header.number, header.end, data, sent_ns, now, wall_ns, repeated)
            self._drain(owner, now, wall_ns)

    @staticmethod
    def _is_ahead(header: Header, owner: _Owner) -> bool:
        return header.number > owner.next

    def state(self, slot: int, state: State, now: float) -> None:
        """An owner said how far its feed is: a beat, an answer, or a greeting."""
        owner = self._owners.get(slot)
        if owner is None:
            return
        if state.epoch < owner.epoch or (state.epoch == owner.epoch and state.start != owner.start):
            owner.stale += 1
            return
        if state.epoch > owner.epoch:
            self._begin(owner, state, now)
        else:
            owner.claimed = max(owner.claimed, state.next)
            owner.floor = max(owner.floor, state.floor)
            if state.oldest > owner.oldest:
                owner.oldest, owner.settled_at = state.oldest, now + self._limits.settle_s
        if state.beat != owner.beat:
            owner.beat, owner.sign_at = state.beat, now
        if owner.ask is not None and state.ask == owner.ask.number:
            # The owner knows; a forged batch may have claimed more.
            owner.claimed = state.next if state.start == owner.start else owner.claimed
            if owner.next > owner.ask.next_then:
                owner.ask_wait_s = self._limits.ask_s
                owner.ask = None
            elif owner.ask.of == 0:
                owner.ask = None
        self._busy.add(slot)

    def _begin(self, owner: _Owner, state: State, now: float) -> None:
        """An owner's new start."""
        if owner.epoch >= 0:
            owner.past = [*owner.past[1 - _PAST_MAX :], owner.start]
        owner.epoch, owner.start = state.epoch, state.start
        owner.claimed, owner.oldest, owner.floor = state.next, state.oldest, state.floor
        owner.settled_at = now + self._limits.settle_s
        owner.next, owner.beat = max(state.oldest, state.floor), -1
        owner.held.clear()
        owner.held_size = 0
        owner.stranger = False
        owner.ask, owner.gap_at = None, None
        owner.ask_wait_s, owner.load_wait_s = self._limits.ask_s, self._limits.load_again_s
        self._new_start(owner, now)

    def _new_start(self, owner: _Owner, now: float) -> None:
        self._load(owner, now)

    def _load(self, owner: _Owner, now: float) -> None:
        owner.load_at = None
        if owner.loading:
            owner.again = True
            return
        owner.loading = True
        owner.reloads += 1
        if owner.epoch >= 0:
            # Whatever is younger than the floor may not be on flash: it is asked for and applied once more.
            owner.next = max(owner.oldest, min(owner.floor, owner.next) if owner.loaded else owner.floor)
            owner.too_soon = owner.floor < owner.oldest and now < owner.settled_at
        self._busy.add(owner.slot)
        self._sink.reload(owner.slot)

    def loaded(self, slot: int, now: float, wall_ns: int, *, whole: bool = True) -> None:
        """An owner's flash has been read. whole: False if some of it could not be; it is tried again."""
        owner = self._owners.get(slot)
        if owner is None or not owner.loading:
            return
        owner.loading = False
        self._busy.add(slot)
        if owner.again:
            owner.again = False
            self._load(owner, now)
            return
        owner.loaded, owner.loaded_at = True, now
        if not whole:
            self._load_later(owner, now)
        elif owner.too_soon:
            self._load_later(owner, now, not_before=owner.settled_at)
        self._drain(owner, now, wall_ns)

    def _load_later(self, owner: _Owner, now: float, *, not_before: float = 0.0) -> None:
        if owner.load_at is None:
            if now >= owner.loaded_at + owner.load_wait_s:
                owner.load_wait_s = self._limits.load_again_s
            owner.load_at = max(now + owner.load_wait_s, not_before)
            owner.load_wait_s = min(2 * owner.load_wait_s, self._limits.load_again_max_s)

    # ---- batches in order ----

    def _hold(self, owner: _Owner, header: Header, data: bytes, sent_ns: int, repeated: bool) -> None:
        if header.number in owner.held:
            owner.duplicates += 1
            return
        owner.held[header.number] = (header.end, data, sent_ns, repeated)
        owner.held_size += len(data)
        while owner.held_size > self._limits.held_size:
            # The last ones go: asks bring them again, in order.
            owner.held_size -= len(owner.held.pop(max(owner.held))[1])

    def _drain(self, owner: _Owner, now: float, wall_ns: int) -> None:
        while owner.held and not owner.loading:
            found = owner.held.pop(owner.next, None)
            if found is None:
                passed = [number for number, held in owner.held.items() if held[0] <= owner.next]
                for number in passed:
                    owner.held_size -= len(owner.held.pop(number)[1])
                    owner.duplicates += 1
                inside = [number for number in owner.held if number < owner.next]
                if not inside:
                    return
                number = min(inside)
                found = owner.held.pop(number)
            else:
                number = owner.next
            end, data, sent_ns, repeated = found
            owner.held_size -= len(data)
            if not self._apply(owner, number, end, data, sent_ns, now, wall_ns, repeated):
                return
        if owner.next >= owner.claimed:
            owner.gap_at = None

    def _apply(
        self, owner: _Owner, number: int, end: int, data: bytes, sent_ns: int, now: float, wall_ns: int, repeated: bool
    ) -> bool:
        """False: it is damaged, and is asked for again."""
        applied = self._sink.apply(owner.slot, data)
        if applied is Applied.DAMAGED:
            owner.damaged += 1
            self._busy.add(owner.slot)
            owner.damaged_times = owner.damaged_times + 1 if owner.damaged_at == number else 1
            owner.damaged_at = number
            if owner.damaged_times < _DAMAGED_MAX:
                return False
            self._load_later(owner, now)
        owner.next = end
        owner.batches += 1
        owner.size += len(data)
        if not repeated:
            owner.lag_ns = max(0, wall_ns - sent_ns)
            owner.lags[min(owner.lag_ns.bit_length(), _BUCKETS - 1)] += 1
        return True

    # ---- what is to be done ----

    @property
    def busy(self) -> bool:
        """Whether due() may have something soon."""
        return bool(self._busy)

    def due(self, now: float) -> list[Ask]:
        """The asks to send now; asked() must follow for each. Begins loads that are due."""
        if now >= self._sweep_at:
            self._sweep_at = now + self._limits.beat_s
            self._busy.update(self._owners)
        asks: list[Ask] = []
        for slot in sorted(self._busy):
            ask = self._due(self._owners[slot], now)
            if ask is not None:
                asks.append(ask)
        return asks

    def _due(self, owner: _Owner, now: float) -> Ask | None:
        # Each second every owner is looked at; those for which nothing may come sooner rest until then.
        is_first = owner.epoch < 0 and not owner.loaded and now >= self._first_load_at
        is_owed = owner.load_at is not None and now >= owner.load_at
        if (is_first or is_owed) and not owner.loading:
            self._load(owner, now)
        is_asking = owner.ask is not None and now < owner.ask.deadline
        if owner.stranger and not is_asking:
            owner.stranger = False
            return self._ask(owner, 0, now)
        if owner.loading or owner.epoch < 0:
            self._busy.discard(owner.slot)
            return None
        if owner.next >= owner.claimed:
            owner.gap_at = owner.ask = None
            owner.ask_wait_s = self._limits.ask_s
            self._busy.discard(owner.slot)
            return None
        if owner.next < owner.oldest:
            # It cannot be repeated: on with what can, and flash for the rest.
            owner.lost += owner.oldest - owner.next
            owner.next = owner.oldest
            owner.ask = None
            self._load_later(owner, now)
            self._drain(owner, now, 0)
            return None
        if owner.gap_at is None or owner.gap_next != owner.next:
            owner.gaps += owner.gap_at is None and bool(owner.held)
            owner.gap_at, owner.gap_next = now, owner.next
        patience_s = self._patience_s if owner.held else self._limits.beat_patience_s
        if now < owner.gap_at + patience_s or is_asking:
            return None
        return self._ask(owner, owner.start, now)

    def _ask(self, owner: _Owner, of: int, now: float) -> Ask:
        owner.asks += 1
        owner.ask = Ask(owner.slot, of, owner.next, deadline=now + owner.ask_wait_s, next_then=owner.next)
        owner.ask_wait_s = min(2 * owner.ask_wait_s, self._limits.ask_max_s)
        return owner.ask

    # ---- what others want to know ----

    def next_of(self, slot: int, start: int) -> int:
        """The number up to which a start's batches are applied. -1: another start is followed, or flash is yet to be
        read."""
        owner = self._owners[slot]
        is_behind = owner.epoch < 0 or owner.start != start or owner.loading or owner.load_at is not None
        return -1 if is_behind else owner.next

    def alive(self, now: float) -> list[int]:
        """Owners that gave a sign of life lately."""
        oldest = now - self._limits.beat_expire_s
        return [slot for slot, owner in self._owners.items() if owner.sign_at >= oldest]

    def statistics(self, now: float) -> tuple[OwnerStatistics, ...]:
        return tuple(self._statistics(owner, now) for owner in self._owners.values())

    def _statistics(self, owner: _Owner, now: float) -> OwnerStatistics:
        state = "following" if owner.epoch >= 0 else "silent" if owner.loaded else "unknown"
        if owner.unsupported:
            state = "unsupported"
        if owner.loading:
            state = "loading"
        alive = owner.sign_at >= now - self._limits.beat_expire_s
        p50, p99 = (percentile_ns(owner.lags, percent) / 1e6 for percent in (50, 99))
        return OwnerStatistics(
            owner.slot, state, alive, owner.epoch, owner.next, max(0, owner.claimed - owner.next), owner.lag_ns / 1e6,
            p50, p99, owner.batches, owner.size, owner.gaps, owner.asks, owner.repeats, owner.duplicates, owner.damaged,
            owner.stale, owner.reloads, owner.lost, owner.held_size,
        )  # fmt: skip
