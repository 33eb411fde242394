"""The verdict on a device, by its errors, its silences, and its times against its peers'.

Pure: numbers and times in, verdicts out. device_service.py asks and acts.
"""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import median

from kvfs.units import percentile_ns

# Errors and missed deadlines count for this long.
WINDOW_S = 10.0
# A device has failed with so many errors, if they are this share of its I/O. One bad sector, however often it is read,
# is no failed device.
FAILURES = 8
FAILURES_SHARE = 0.05
# It has also failed with a single missed deadline, if it has answered nothing at all for this long.
SILENCE_S = 5.0
# Slow: a p99 of so many times that of its peers, and at least this long, in two turns that follow on each other.
SLOW_FACTOR = 10.0
SLOW_NS = 10_000_000
SLOW_TURNS = 2
# Not slow any more: below so many times that of its peers, or too short for that, in so many turns.
FAST_FACTOR = 4.0
FAST_TURNS = 3
# A turn needs this many I/Os of a kind to say anything.
SAMPLES = 32
# A slow device that was not used for so long may show again how it is.
UNHEARD_S = 60.0

# Errors of a descriptor that leads nowhere any more.
GONE = frozenset((errno.ENODEV, errno.ENXIO, errno.ENOTCONN, errno.ESHUTDOWN, errno.ESTALE, errno.EBADF))
# Errors of a full disk below a device file: the device itself is well.
HARMLESS = frozenset((errno.ENOSPC, errno.EDQUOT))


class DeviceState(StrEnum):
    ONLINE = "online"
    SLOW = "slow"
    FAILED = "failed"
    REMOVED = "removed"
    RETURNING = "returning"

    @property
    def away(self) -> bool:
        """Nothing on the device can be read or written."""
        return self in (DeviceState.FAILED, DeviceState.REMOVED, DeviceState.RETURNING)


@dataclass(slots=True)
class Failures:
    """The errors of one device. Times are of any one clock."""

    recent: deque[tuple[float, int]] = field(default_factory=deque)
    # (when, I/Os that went well until then)
    counts: deque[tuple[float, int]] = field(default_factory=deque)

    def note(self, error: int, now: float) -> str | None:
        """An I/O failed with this errno. Returns the reason if the device has failed by it."""
        if error in GONE:
            return f"gone: {errno.errorcode[error]}"
        if error not in HARMLESS:
            self.recent.append((now, error))
        return None

    def verdict(self, good: int, now: float) -> str | None:
        """The reason why the device has failed; None if it has not. `good`: I/Os that went well since it came."""
        self.counts.append((now, good))
        while self.counts[0][0] < now - WINDOW_S:
            self.counts.popleft()
        while self.recent and self.recent[0][0] < now - WINDOW_S:
            self.recent.popleft()
        bad = len(self.recent)
        if bad >= FAILURES and bad >= FAILURES_SHARE * (bad + good - self.counts[0][1]):
            return f"{bad} errors and missed deadlines in {WINDOW_S:.0f} s, the last: {_name(self.recent[-1][1])}"
        if any(error == errno.ETIMEDOUT for _, error in self.recent) and now - self._heard(now) >= SILENCE_S:
            return f"a deadline missed, and no answer to anything for {SILENCE_S:.0f} s"
        return None

    def _heard(self, now: float) -> float:
        """The time when the device last answered, or was new."""
        last = self.counts[-1][1]
        return next((when for when, good in reversed(self.counts) if good != last), self.counts[0][0])

    def clear(self) -> None:
        self.recent.clear()
        self.counts.clear()


def _name(error: int) -> str:
    return errno.errorcode.get(error, str(error))


@dataclass(slots=True)
class Pace:
    """Times of one device, turn by turn. `buckets` are histograms since it came, by kind of I/O."""

    before: dict[str, Sequence[int]] = field(default_factory=dict)
    p99_ns: dict[str, float] = field(default_factory=dict)
    # The last p99 of each kind, for comparison: turns with enough samples need not be those of its peers.
    last_ns: dict[str, float] = field(default_factory=dict)
    slow_turns: int = 0
    fast_turns: int = 0
    heard: float = 0.0

    def take(self, buckets: Mapping[str, Sequence[int]], now: float) -> None:
        """Turn: find p99 of each kind of which there are enough samples since the turn that had them."""
        self.p99_ns = {}
        self.heard = self.heard or now
        for kind, counts in buckets.items():
            change = [a - b for a, b in zip(counts, self.before.get(kind, [0] * len(counts)), strict=True)]
            if sum(change) >= SAMPLES:
                self.p99_ns[kind] = self.last_ns[kind] = percentile_ns(change, 99)
                self.before[kind] = counts
                self.heard = now

    def clear(self) -> None:
        self.slow_turns = self.fast_turns = 0
        self.heard = 0.0


def judge(paces: Mapping[int, Pace], slow: frozenset[int], now: float) -> dict[int, str | None]:
    """After each take(): the devices whose verdict changes, each with the reason why it is slow; None: it no longer
    is."""
    changed: dict[int, str | None] = {}
    for device, pace in paces.items():
        worst, kind_of_worst, peers_ns = 0.0, "", 0.0
        for kind, own in pace.p99_ns.items():
            others = [other.last_ns[kind] for key, other in paces.items() if key != device and kind in other.last_ns]
            if others and own / max(1.0, median(others)) > worst:
                worst, kind_of_worst, peers_ns = own / max(1.0, median(others)), kind, median(others)
        if device in slow:
            if worst:
                fast = worst < FAST_FACTOR or max(pace.p99_ns.values()) < SLOW_NS
                pace.fast_turns = pace.fast_turns + 1 if fast else 0
            if pace.fast_turns >= FAST_TURNS or now - pace.heard > UNHEARD_S:
                pace.clear()
                changed[device] = None
        elif worst > SLOW_FACTOR and pace.p99_ns[kind_of_worst] >= SLOW_NS:
            pace.slow_turns += 1
            if pace.slow_turns >= SLOW_TURNS:
                pace.clear()
                changed[device] = (
                    f"p99 of {kind_of_worst}s {pace.p99_ns[kind_of_worst] / 1e6:.1f} ms, "
                    f"{worst:.0f} times that of its peers ({peers_ns / 1e6:.2f} ms)"
                )
        elif worst:
            pace.slow_turns = 0
    return changed
