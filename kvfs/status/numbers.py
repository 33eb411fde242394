"""Numbers of a status document: percentiles, differences, and their forms for people.

Pure: documents in, numbers and words out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from kvfs.errors import printable
from kvfs.units import percentile_ns

STATUS_VERSION = 1
PERCENTILES = (50.0, 90.0, 99.0, 99.9)
_DEVICE_COUNTERS = ("reads", "read_bytes", "writes", "write_bytes", "errors", "timeouts", "read_ns", "write_ns")
EXPORT_ERRORS = ("protocol_errors", "descriptor_errors", "io_errors")
_EXPORT_COUNTERS = (
    "connections", "requests", "bytes_read", "bytes_written", "zero_copy_bytes", "copied_bytes", *EXPORT_ERRORS,
)  # fmt: skip
Json = Mapping[str, object]


def number(document: Json, *path: str) -> float:
    """The number at a path of keys; 0 where there is none."""
    value: object = document
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value if isinstance(value, (int, float)) else 0


def section(document: Json, key: str) -> Json:
    value = document.get(key)
    return cast(Json, value) if isinstance(value, Mapping) else {}


def items(document: Json, key: str) -> list[Json]:
    value = document.get(key)
    return [cast(Json, item) for item in value if isinstance(item, Mapping)] if isinstance(value, (list, tuple)) else []


def buckets_of(latency: Json) -> list[int]:
    value = latency.get("buckets")
    return [int(item) for item in value] if isinstance(value, (list, tuple)) else []


def latency_summary(latency: Json) -> dict[str, float]:
    """Count, mean and percentiles in microseconds of one operation."""
    buckets = buckets_of(latency)
    count = number(latency, "count")
    summary = {"count": count, "mean_us": number(latency, "total_ns") / count / 1000 if count else 0.0}
    for percent in PERCENTILES:
        summary[f"p{percent:g}_us"] = percentile_ns(buckets, percent) / 1000
    return summary


def size_text(size: float) -> str:
    """1536 -> 1.50K; three significant digits, as zpool prints them."""
    for suffix in ("", "K", "M", "G", "T"):
        if abs(size) < 1024:
            return f"{size:.0f}" if not suffix else f"{size:.3g}{suffix}" if abs(size) >= 100 else f"{size:.2f}{suffix}"
        size /= 1024
    return f"{size:.2f}P"


def count_text(count: float) -> str:
    """12345 -> 12.3k; below a thousand the number itself."""
    if abs(count) < 1000:
        return f"{count:.0f}" if count >= 10 or count == int(count) else f"{count:.1f}"
    for suffix in ("k", "M"):
        count /= 1000
        if abs(count) < 1000:
            return f"{count:.1f}{suffix}"
    return f"{count / 1000:.1f}G"


def time_text(us: float) -> str:
    """Microseconds in the unit that reads best."""
    if us < 1000:
        return f"{us:.1f}us"
    return f"{us / 1000:.1f}ms" if us < 1_000_000 else f"{us / 1_000_000:.2f}s"


def age_text(seconds: float) -> str:
    """90 -> 1m; the largest unit that is full."""
    for suffix, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f}{suffix}"
    return f"{seconds:.0f}s"


def table(rows: Sequence[Sequence[str]], *, indent: str = "", left: int = 1) -> list[str]:
    """Rows as aligned lines; the first `left` columns to the left, the others to the right."""
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))] if rows else []
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append((indent + "  ".join(cells)).rstrip())
    return lines


def asked_and_found(counters: Json) -> tuple[float, float | None]:
    """How many blocks files and native clients asked for, and the share that was found; None if they asked for none."""
    found = number(counters, "blocks_found")
    asked = found + number(counters, "blocks_missed")
    return asked, found / asked if asked else None


def difference(now: Json, before: Json | None) -> dict[str, object]:
    """Counters and latencies of `now` less those of `before`, and the seconds between them."""
    if before is None:
        seconds = number(now, "pool", "uptime_s")
        return {**now, "seconds": seconds or 1.0}
    result = dict(now)
    result["seconds"] = max(number(now, "time_s") - number(before, "time_s"), 1e-3)
    result["counters"] = {
        key: number(now, "counters", key) - number(before, "counters", key) for key in section(now, "counters")
    }
    latencies: dict[str, object] = {}
    for name, value in section(now, "latency").items():
        old = section(section(before, "latency"), name)
        new = cast(Json, value)
        old_buckets = buckets_of(old) or [0] * len(buckets_of(new))
        latencies[name] = {
            "count": number(new, "count") - number(old, "count"),
            "total_ns": number(new, "total_ns") - number(old, "total_ns"),
            "buckets": [a - b for a, b in zip(buckets_of(new), old_buckets, strict=True)],
        }
    result["latency"] = latencies
    result["devices"] = _differences(now, before, "devices", "index", _DEVICE_COUNTERS)
    result["exports"] = _differences(now, before, "exports", "socket", _EXPORT_COUNTERS)
    return result


def _differences(now: Json, before: Json, what: str, name: str, counters: Sequence[str]) -> list[Json]:
    olds = {old.get(name): old for old in items(before, what)}
    return [
        {
            key: number(item, key) - number(olds.get(item.get(name), {}), key) if key in counters else value
            for key, value in item.items()
        }
        for item in items(now, what)
    ]
