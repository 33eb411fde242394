"""Numbers of a status document: percentiles, and their forms for people.

Pure: documents in, numbers and words out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from kvfs.errors import printable
from kvfs.units import percentile_ns

STATUS_VERSION = 1
PERCENTILES = (50.0, 90.0, 99.0, 99.9)
EXPORT_ERRORS = ("protocol_errors", "descriptor_errors", "io_errors")
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


def count_text(count: float) -> str:
    """12345 -> 12.3k; below a thousand the number itself."""
    if round(abs(count)) < 1000:
        return f"{count:.0f}" if count >= 10 or count == int(count) else f"{count:.1f}"
    for suffix in ("k", "M", "G"):
        count /= 1000
        if round(abs(count), 1) < 1000:
            return f"{count:.1f}{suffix}"
    return f"{count / 1000:.1f}T"


def time_text(us: float) -> str:
    """Microseconds in the unit that reads best."""
    if round(us, 1) < 1000:
        return f"{us:.1f}us"
    return f"{us / 1000:.1f}ms" if round(us / 1000, 1) < 1000 else f"{us / 1_000_000:.2f}s"


def age_text(seconds: float) -> str:
    """119 -> 1m; full ones of the largest unit that is full."""
    for suffix, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= size:
            return f"{int(seconds / size)}{suffix}"
    return f"{int(seconds)}s"


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
