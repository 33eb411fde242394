"""Reads that native clients tell of, as far as they can be: nobody saw them.

Uses order eviction, and totals go into the status. So both are bounded by what the devices could have given in that
time. Devices are not measured: the bounds are those of a fast one.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvfs._native import ffi

# One device's, in a second: bytes, and what one block costs beside its own.
DEVICE_BYTES_S = 8 << 30
BLOCK_COST = 16 << 10
# Uses are told once a second, or later by a client that is slow.
_TOGETHER_S = 2.0
# Anything that is counted, in a second of one client.
_COUNT_S = 10_000_000
# Buffers that devices still own.
_BUSY_MAX = 1 << 20

# struct kvfs_client_statistics. All but the last, `busy`, are totals.
REPORTED = tuple(name for name, _ in ffi.typeof("struct kvfs_client_statistics").fields)
_RECONNECTS = REPORTED.index("reconnects")
# A report's totals; then comes `busy`.
TOTALS = len(REPORTED) - 1


class Reads:
    """Bytes that one user may have read and not told yet."""

    def __init__(self, device_count: int) -> None:
        self._rate = DEVICE_BYTES_S * max(1, device_count)
        self._left = self._most = int(self._rate * _TOGETHER_S)
        self._as_of_s: float | None = None

    def left(self, now_s: float) -> int:
        if self._as_of_s is not None:
            self._left = min(self._most, self._left + int((now_s - self._as_of_s) * self._rate))
        self._as_of_s = now_s
        return self._left

    def take(self, size: int) -> None:
        self._left = max(0, self._left - size)


class Report:
    """The totals of one connection's client, and its `busy`."""

    def __init__(self, device_count: int, now_s: float) -> None:
        self.totals: Sequence[int] = (0,) * len(REPORTED)
        self._before: Sequence[int] | None = None
        self._since_s, self._bytes_s = now_s, DEVICE_BYTES_S * max(1, device_count)

    def take(self, told: Sequence[int], now_s: float) -> None:
        """Its totals and `busy`, as it tells them. More than can be is cut; a total that falls stays."""
        if self._before is None:
            # Totals of a client that was connected before were reported on its earlier connection.
            self._before = (0,) * TOTALS if not told[_RECONNECTS] else told[:TOTALS]
        seconds = now_s - self._since_s + _TOGETHER_S
        most = [int(seconds * (self._bytes_s if name.endswith("_bytes") else _COUNT_S)) for name in REPORTED[:TOTALS]]
        since = [now - before for now, before in zip(told, self._before, strict=False)]
        totals = [max(last, min(now, limit)) for last, now, limit in zip(self.totals, since, most, strict=False)]
        self.totals = (*totals, min(told[TOTALS], _BUSY_MAX))
