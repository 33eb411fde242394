"""Numbers that every room may need: percentiles of a latency histogram. Pure; imports nothing of kvfs."""

from __future__ import annotations

from collections.abc import Sequence


def percentile_ns(buckets: Sequence[int], percent: float) -> float:
    """The latency that `percent` of the requests stayed under. Bucket i counts those in [2^(i-1), 2^i) ns.

    Inside a bucket the requests are taken as spread evenly. 0 without requests.
    """
    count = sum(buckets)
    if count == 0:
        return 0.0
    wanted = count * percent / 100
    below = 0
    for index, here in enumerate(buckets):
        if here and below + here >= wanted:
            low = float(1 << (index - 1)) if index else 0.0
            return low + (float(1 << index) - low) * max(0.0, wanted - below) / here
        below += here
    return float(1 << (len(buckets) - 1))
