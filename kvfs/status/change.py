"""The difference of two status documents: what happened between them.

Pure: documents in, a document out. It has the form of a status document, and `seconds`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from kvfs.status.numbers import EXPORT_ERRORS, Json, buckets_of, items, number, section
from kvfs.status.pod import pod_difference

_DEVICE_COUNTERS = ("reads", "read_bytes", "writes", "write_bytes", "errors", "timeouts", "read_ns", "write_ns")
_EXPORT_COUNTERS = (
    "connections", "requests", "bytes_read", "bytes_written", "zero_copy_bytes", "copied_bytes", *EXPORT_ERRORS,
)  # fmt: skip


def difference(now: Json, before: Json | None) -> dict[str, object]:
    """Counters and latencies of `now` less `before`'s, and the seconds between them."""
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
    if section(now, "pod"):
        result["pod"] = pod_difference(section(now, "pod"), section(before, "pod"))
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
