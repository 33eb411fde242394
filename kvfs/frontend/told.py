"""Totals of reads that native clients report, as far as they are possible: the daemon did not see them.

They go into the status, and are bounded by the devices' rate in that time. Devices are not measured: the bounds fit a
fast one. Uses, which order eviction, have a bound of the same kind (native/src/frames/answer.c).
"""

from __future__ import annotations

from collections.abc import Sequence

from kvfs._native import ffi

# One device's, in a second.
DEVICE_BYTES_S = 8 << 30
# Totals are told once a second, or later by a client that is slow.
TOGETHER_S = 2.0
# Anything that is counted, in a second of one user's clients.
_COUNT_S = 100_000_000
# Buffers that devices still own.
_BUSY_MAX = 1 << 20

# struct kvfs_client_statistics. All but the last, `busy`, are totals.
REPORTED = tuple(name for name, _ in ffi.typeof("struct kvfs_client_statistics").fields)
_RECONNECTS = REPORTED.index("reconnects")
# A report's totals; then comes `busy`.
TOTALS = len(REPORTED) - 1


class Credit:
    """The amount that may be reported now: it comes at a rate, of TOGETHER_S at most."""

    def __init__(self, rate: int) -> None:
        self._rate = rate
        self._left = self._most = int(rate * TOGETHER_S)
        self._as_of_s: float | None = None

    def left(self, now_s: float) -> int:
        if self._as_of_s is not None:
            self._left = min(self._most, self._left + int((now_s - self._as_of_s) * self._rate))
        self._as_of_s = now_s
        return self._left

    def take(self, size: int) -> None:
        self._left = max(0, self._left - size)


class Told:
    """The totals that one user's clients may report."""

    def __init__(self, device_count: int) -> None:
        bytes_s = DEVICE_BYTES_S * max(1, device_count)
        self.totals = [Credit(bytes_s if name.endswith("_bytes") else _COUNT_S) for name in REPORTED[:TOTALS]]


class Report:
    """The totals of one connection's client, and its `busy`."""

    def __init__(self) -> None:
        self.totals: Sequence[int] = (0,) * len(REPORTED)
        self._before: Sequence[int] | None = None

    def take(self, told: Sequence[int], user: Told, now_s: float) -> None:
        """Its totals and `busy`, as it reports them. More than can be counts later or never. A total that falls
        stays."""
        if self._before is None:
            # Totals of a client that was connected before were reported on its earlier connection.
            self._before = (0,) * TOTALS if not told[_RECONNECTS] else told[:TOTALS]
        totals = []
        for now, before, last, credit in zip(told, self._before, self.totals, user.totals, strict=False):
            more = max(0, min(now - before - last, credit.left(now_s)))
            credit.take(more)
            totals.append(last + more)
        self.totals = (*totals, min(told[TOTALS], _BUSY_MAX))
