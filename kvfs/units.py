"""Numbers that every room may need: sizes as people write them, percentiles, versions. Pure."""

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


def kernel_version(release: str) -> tuple[int, int]:
    """(6, 18) of 6.18.44-generic."""
    match = re.match(r"(\d+)(?:\.(\d+))?", release)
    return (int(match[1]), int(match[2] or 0)) if match else (0, 0)


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


def size_text(size: float) -> str:
    """1536 -> 1.50K, 1023 * 1024 -> 1023K: two decimals below a hundred, none above, and never a power of ten."""
    for suffix in ("", "K", "M", "G", "T"):
        # 1023.7 of a unit reads as 1.00 of the next one, not as 1024.
        if round(abs(size)) < 1024:
            return f"{size:.{2 if suffix and abs(size) < 100 else 0}f}{suffix}"
        size /= 1024
    return f"{size:.2f}P"


def duration_text(seconds: float) -> str:
    """A time to come, of two units at most: 45 s, 3 min 20 s, 2 h 5 min."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def told_size(size: int) -> str:
    """A size for a message: exact, and short where that needs no rounding: 36M, else 36.0M (37748737 bytes)."""
    exact = format_size(size)
    return f"{size_text(size)} ({size} bytes)" if exact.isdigit() and size >= 1024 else exact


def counted(count: float, noun: str) -> str:
    """1 block, 2 blocks, 0 entries: a count with its noun, which is given as one."""
    return f"{count:.0f} {noun if count == 1 else plural(noun)}"


def plural(noun: str) -> str:
    """Of English as kvfs needs it: directory -> directories, device -> devices, thing damaged -> things damaged."""
    first, _, rest = noun.partition(" ")
    if first.endswith("y") and first[-2:-1] not in "aeiou":
        first = f"{first[:-1]}ie"
    return f"{first}{'es' if first.endswith(('ch', 's', 'x')) else 's'} {rest}".rstrip()
