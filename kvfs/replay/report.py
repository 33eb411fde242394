"""The report of a replay: one JSON document, and its text for people."""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import cast

from kvfs.errors import KvfsError
from kvfs.replay.engine import Outcome, Record, Settings
from kvfs.replay.trace import BLOCK_TOKENS, Request, unlimited_hits
from kvfs.status.numbers import table
from kvfs.units import counted, duration_text, size_text

Json = dict[str, object]
SERIES_LENGTH = 60
POINTS = (50, 90, 99)
COUNTS = ("found", "loaded", "stored", "present", "lost", "failed", "wrong")


def document(
    settings: Settings,
    trace_name: str,
    before: Sequence[Request],
    requests: Sequence[Request],
    outcome: Outcome,
    *,
    prefill_tokens_per_s: float,
    warmup: float,
) -> Json:
    """Latencies in ms, sizes in bytes, times in s. before: the trace's requests that were skipped. warmup: the share of
    requests that are not counted (but for errors and the series).

    The time to the first token is a sum: the request's delay, its look-up, its load, and the prefill of blocks that
    were not loaded. Raises KvfsError if no request that counts has ended.
    """
    first = math.floor(len(requests) * warmup)
    ended = [record for record in outcome.records if record is not None]
    counted = [record for record in outcome.records[first:] if record is not None]
    if not counted:
        raise KvfsError(f"replay: no request that counts has ended, of {len(requests) - first}")
    blocks = sum(len(record.request.blocks) for record in counted)
    totals = {name: sum(getattr(record, name) for record in counted) for name in COUNTS}
    seconds = max(record.end_s for record in counted) - min(record.start_s for record in counted)
    seen = [*before, *(record.request for record in outcome.records[:first] if record is not None)]
    best = unlimited_hits(seen, [record.request for record in counted])
    size = settings.block_size
    started_ms = requests[0].due_ms

    def late(record: Record) -> float:
        if settings.speed is None:
            return 0.0
        return max(0.0, record.start_s - (record.request.due_ms - started_ms) / 1000 / settings.speed)

    def first_token(record: Record) -> float:
        tokens = max(0, record.request.input_tokens - record.loaded * BLOCK_TOKENS)
        return late(record) + record.lookup_s + record.load_s + tokens / prefill_tokens_per_s

    return {
        "trace": trace_name,
        "target": str(settings.target),
        "engine": "native" if settings.native else "posix",
        "settings": {
            "block_size": size,
            "threads": settings.threads,
            "io_threads": settings.io_threads,
            "speed": settings.speed,
            "buffered": settings.buffered,
            "verify": settings.verify,
            "touch": settings.touch,
            "lru_bytes": settings.lru_bytes,
            "prefill_tokens_per_s": prefill_tokens_per_s,
            "warmup": warmup,
        },
        "interrupted": outcome.interrupted,
        "requests": len(counted),
        "seconds": seconds,
        "requests_per_s": len(counted) / seconds,
        "blocks": {"asked": blocks, **totals},
        "prefix_hit_ratio": totals["loaded"] / blocks if blocks else 0.0,
        "prefix_hit_ratio_unlimited": best / blocks if blocks else 0.0,
        "loaded_bytes": totals["loaded"] * size,
        "stored_bytes": totals["stored"] * size,
        "load_bytes_per_s": totals["loaded"] * size / seconds,
        "store_bytes_per_s": totals["stored"] * size / seconds,
        "latency_ms": {
            "lookup": _latency([record.lookup_s for record in counted]),
            "load": _latency([record.load_s for record in counted if record.found]),
            "store": _latency([record.store_s for record in counted if record.stored]),
            "first_token": _latency([first_token(record) for record in counted]),
        },
        "errors": {
            "load": outcome.load_errors,
            "store": outcome.store_errors,
            "wrong": sum(record.wrong for record in ended),
        },
        "cpu_s": {"user": outcome.cpu_user_s, "system": outcome.cpu_system_s},
        "series": _series(ended, first_token),
    }


def estimate(settings: Settings, requests: Sequence[Request]) -> str:
    """A line before a replay begins: how long it takes where requests wait for their time, what it stores at most."""
    blocks = {block for request in requests for block in request.blocks}
    most = size_text(len(blocks) * settings.block_size)
    asked = counted(sum(len(request.blocks) for request in requests), "block")
    pace = "as fast as it goes"
    if settings.speed is not None:
        pace = f"{duration_text((requests[-1].due_ms - requests[0].due_ms) / 1000 / settings.speed)} at least"
    kept = f"; the LRU keeps {size_text(settings.lru_bytes)}" if settings.lru_bytes else ""
    return (
        f"{counted(len(requests), 'request')} for {asked}, {len(blocks)} of them different, of "
        f"{size_text(settings.block_size)}: {pace}, stores {most} at most{kept}"
    )


def _percentile(ordered: Sequence[float], percent: int) -> float:
    """The smallest value that percent of the values do not exceed."""
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def _latency(seconds: Sequence[float]) -> Json:
    if not seconds:
        return {"count": 0, "mean": 0.0, **{f"p{point}": 0.0 for point in POINTS}, "max": 0.0}
    ordered = sorted(value * 1000 for value in seconds)
    points = {f"p{point}": _percentile(ordered, point) for point in POINTS}
    return {"count": len(ordered), "mean": sum(ordered) / len(ordered), **points, "max": ordered[-1]}


def _series(records: Sequence[Record], first_token: Callable[[Record], float]) -> list[Json]:
    """Equal spans of time, by when requests ended; a span in which none ended is left out."""
    span = max(record.end_s for record in records) / SERIES_LENGTH
    spans: dict[int, list[Record]] = {}
    for record in records:
        spans.setdefault(min(SERIES_LENGTH - 1, int(record.end_s / span)), []).append(record)
    series: list[Json] = []
    for place, inside in sorted(spans.items()):
        asked = sum(len(record.request.blocks) for record in inside)
        loads = _latency([record.load_s for record in inside if record.found])
        series.append(
            {
                "s": (place + 1) * span,
                "requests": len(inside),
                "blocks": asked,
                "loaded": sum(record.loaded for record in inside),
                "lookup_p99_ms": _latency([record.lookup_s for record in inside])["p99"],
                "load_count": loads["count"],
                "load_p50_ms": loads["p50"],
                "load_p99_ms": loads["p99"],
                "first_token_p50_ms": _latency([first_token(record) for record in inside])["p50"],
            }
        )
    return series


# The likely cause of an errno, in a line that says what failed.
_CAUSES = {
    "ENOSPC": "the target is full, and evicts nothing",
    "EDQUOT": "a share or quota of this user is used up",
    "EACCES": "this user may not write there",
    "EROFS": "it is mounted read-only",
    "EIO": "a device failed, or bytes were not what their checksum says",
    "ESTALE": "the file went while it was open",
    "ENOTCONN": "its daemon is gone",
    "ETIMEDOUT": "a device or the daemon gave no answer in time",
    "ENODATA": "the file was shorter than a block",
}


def _failures(kind: str, errors: Mapping[str, int]) -> list[str]:
    """One line for each errno, with the one reason that is likely."""
    return [
        f"{counted(count, f'{kind} failed')}: {_reason(name)}"
        for name, count in sorted(errors.items(), key=lambda item: -item[1])
    ]


def _reason(name: str) -> str:
    number = getattr(errno, name, None)
    text = os.strerror(number) if isinstance(number, int) else "unknown"
    return f"{text} ({name}){f': {_CAUSES[name]}' if name in _CAUSES else ''}"


def render(result: Json) -> str:
    """The same for people."""
    blocks, latency, errors = (cast(Json, result[name]) for name in ("blocks", "latency_ms", "errors"))
    figure = cast("dict[str, float]", result)
    rows = [["ms", "count", "mean", *(f"p{point}" for point in POINTS), "max"]]
    for name, told in (("lookup", "look-up"), ("load", "load"), ("store", "store"), ("first_token", "first token")):
        line = cast("dict[str, float]", latency[name])
        rows.append(
            [told, f"{line['count']:.0f}", *(f"{line[key]:.2f}" for key in ("mean", *(f"p{p}" for p in POINTS), "max"))]
        )
    lines = [
        f"{counted(figure['requests'], 'request')} in {figure['seconds']:.2f} s: {figure['requests_per_s']:.1f} a "
        f"second{' (interrupted)' if result['interrupted'] else ''}",
        f"prefix hits: {figure['prefix_hit_ratio']:.1%} of {counted(cast(int, blocks['asked']), 'block')}"
        f" ({figure['prefix_hit_ratio_unlimited']:.1%} with a cache that loses nothing)",
        f"loaded {size_text(figure['loaded_bytes'])} at {size_text(figure['load_bytes_per_s'])}/s,"
        f" stored {size_text(figure['stored_bytes'])} at {size_text(figure['store_bytes_per_s'])}/s",
        *table(rows, left=1),
    ]
    if blocks["lost"]:
        lines.append(f"{counted(cast(int, blocks['lost']), 'block')} gone between look-up and load")
    for kind in ("load", "store"):
        lines += _failures(kind, cast("dict[str, int]", errors[kind]))
    if errors["wrong"]:
        lines.append(f"{errors['wrong']} BLOCKS WERE NOT WHAT WAS STORED")
    return "\n".join(lines)
