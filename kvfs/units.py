"""Numbers that every room may need: sizes as people write them, percentiles of a latency histogram. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

from kvfs.errors import UsageError

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40, "P": 1 << 50}
_SIZE = re.compile(r"([0-9]+)(?:\.([0-9]{1,6}))?\s*([KMGTP]?)(?:i?B)?", re.IGNORECASE)


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


def parse_size(text: str, *, what: str = "size") -> int:
    """Bytes of "4096", "64K", "4M", "1G", "1.5T"; units are powers of 1024. UsageError names `what`."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"{what}: {text!r} is not a size; write 4096, 64K, 4M, 1G")
    whole, fraction, unit = match.groups()
    scale = _UNITS[unit.upper()]
    size = int(whole) * scale
    if fraction:
        size += int(fraction) * scale // 10 ** len(fraction)
    if size >= 1 << 63:
        raise UsageError(f"{what}: {text!r} is too large")
    return size


def format_size(size: int) -> str:
    """The shortest exact form: 4M, 1G, 4097."""
    for unit in ("P", "T", "G", "M", "K"):
        if size and size % _UNITS[unit] == 0:
            return f"{size // _UNITS[unit]}{unit}"
    return str(size)
