"""Questions of this node to others with a waiter: the barrier, and leases of another's blocks.

State machines, with time given in. `Waiting.wait()` alone blocks, for threads; it never outlasts its deadline.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvfs.pod.follow import Follower
from kvfs.pod.messages import State

_ANSWERED_MAX = 256


class Waiting:
    """An answer that comes, or does not until `deadline` (of the feed's clock)."""

    def __init__(self, deadline: float) -> None:
        self.deadline = deadline
        self._finished = threading.Event()

    @property
    def finished(self) -> bool:
        return self._finished.is_set()

    def finish(self) -> None:
        self._finished.set()

    def wait(self, clock: Callable[[], float] = time.monotonic) -> bool:
        """Whether it finished before its deadline."""
        return self._finished.wait(max(0.0, self.deadline - clock()))


class Barrier(Waiting):
    """Owners that are yet to answer, and those whose answers are yet to be applied: slot -> (start, next)."""

    def __init__(self, deadline: float, slots: Sequence[int]) -> None:
        super().__init__(deadline)
        self.unanswered = set(slots)
        self.unapplied: dict[int, tuple[int, int]] = {}
        self.number = 0
        if not slots:
            self.finish()


class LeaseAsk(Waiting):
    """held: one for each key, all False until the owner has said so."""

    def __init__(self, deadline: float, slot: int, count: int) -> None:
        super().__init__(deadline)
        self.slot, self.number = slot, 0
        self.held = (False,) * count


@dataclass(frozen=True, slots=True)
class AskStatistics:
    """Since the start: barriers that passed and failed; leases that were held, refused, and not answered in time."""

    fresh: int
    not_fresh: int
    leases_held: int
    leases_refused: int
    leases_unanswered: int


@dataclass
class Asks:
    """The questions in flight, by the number of their message."""

    follower: Follower
    barriers: dict[int, Barrier] = field(default_factory=dict)
    leases: dict[int, LeaseAsk] = field(default_factory=dict)
    # Leases that are held, or were: a second answer is no reason to release one.
    answered_leases: deque[int] = field(default_factory=lambda: deque(maxlen=_ANSWERED_MAX))
    fresh: int = 0
    not_fresh: int = 0
    leases_held: int = 0
    leases_refused: int = 0
    leases_unanswered: int = 0

    def add_barrier(self, number: int, barrier: Barrier) -> None:
        barrier.number = number
        self.barriers[number] = barrier

    def add_lease(self, number: int, lease: LeaseAsk) -> None:
        lease.number = number
        self.leases[number] = lease

    def answered(self, slot: int, state: State) -> None:
        """An owner answered a barrier's question."""
        barrier = self.barriers.get(state.ask)
        if barrier is not None and slot in barrier.unanswered:
            barrier.unanswered.discard(slot)
            barrier.unapplied[slot] = (state.start, state.next)

    def check(self) -> None:
        """Something was applied, or an answer came."""
        for number, barrier in list(self.barriers.items()):
            for slot, (start, wanted) in list(barrier.unapplied.items()):
                if self.follower.next_of(slot, start) >= wanted:
                    del barrier.unapplied[slot]
            if not barrier.unanswered and not barrier.unapplied:
                del self.barriers[number]
                self.fresh += 1
                barrier.finish()

    def lease_answered(self, slot: int, number: int, held: str) -> bool:
        """False: its waiter has gone, so it is to be released."""
        lease = self.leases.get(number)
        if lease is None or lease.slot != slot or len(held) != len(lease.held):
            return number in self.answered_leases
        del self.leases[number]
        self.answered_leases.append(number)
        lease.held = tuple(one == "1" for one in held)
        self.leases_held += held.count("1")
        self.leases_refused += len(held) - held.count("1")
        lease.finish()
        return True

    def end_barrier(self, barrier: Barrier) -> None:
        """Drop the waiter."""
        if self.barriers.pop(barrier.number, None) is not None:
            self.not_fresh += 1

    def end_lease(self, lease: LeaseAsk) -> None:
        """Drop the waiter: not held."""
        if self.leases.pop(lease.number, None) is not None:
            self.leases_unanswered += len(lease.held)

    def statistics(self) -> AskStatistics:
        return AskStatistics(self.fresh, self.not_fresh, self.leases_held, self.leases_refused, self.leases_unanswered)
