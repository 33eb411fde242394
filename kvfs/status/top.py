"""`kvfs top`: a live view of one pool in the terminal, by the rich package (pip install 'kvfs[top]').

Draws the daemon's numbers at every interval, and computes none of its own. Leaves the terminal as it was, however it
ends.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from kvfs.errors import MissingFeatureError, printable
from kvfs.status.change import difference
from kvfs.status.numbers import (
    Json,
    age_text,
    asked_and_found,
    count_text,
    items,
    latency_summary,
    number,
    section,
    time_text,
)
from kvfs.status.pod import owner_rows, pod_lines
from kvfs.units import size_text

# The daemon walks its index for a survey.
SURVEY_EVERY_S = 10.0
_NAMESPACES_MAX = 12
# Rows of found_ages, whose entry i counts blocks younger than 2**i s: names for runs of them.
_AGES = (("< 1 min", 7), ("< 10 min", 10), ("< 1 h", 13), ("< 1 d", 17), ("older", 64))

Ask = Callable[[], Json]


def require() -> None:
    """MissingFeatureError without the package."""
    try:
        import rich  # noqa: F401
    except ImportError as error:
        raise MissingFeatureError("the package rich is missing: pip install 'kvfs[top]'") from error


def run(status: Ask, survey: Ask, interval_s: float, count: int | None) -> None:
    """Draw until interrupted, or `count` times. Raises the errors of `status`: the pool is gone."""
    from rich.console import Console
    from rich.live import Live

    with Live(console=Console(), screen=True, auto_refresh=False) as live:
        for change, found in looks(status, survey, interval_s, count):
            live.update(view(change, found), refresh=True)


def looks(status: Ask, survey: Ask, interval_s: float, count: int | None) -> Iterator[tuple[Json, Json]]:
    """A difference() of statuses and a survey: first since the mount, then of each interval."""
    before, found, found_at, drawn = status(), survey(), time.monotonic(), 0
    yield difference(before, None), found
    while count is None or drawn < count:
        time.sleep(interval_s)
        now = status()
        if time.monotonic() - found_at > SURVEY_EVERY_S:
            found, found_at = survey(), time.monotonic()
        change = difference(now, before)
        change["found_ages"] = [a - b for a, b in zip(_ages(now), _ages(before), strict=False)]
        yield change, found
        before, drawn = now, drawn + 1


def _ages(status: Json) -> list[int]:
    value = status.get("found_ages")
    return [int(item) for item in value] if isinstance(value, (list, tuple)) else []


def view(change: Json, found: Json) -> Any:
    """One screen, from a difference() of statuses and a survey."""
    from rich.console import Group
    from rich.text import Text

    seconds = number(change, "seconds") or 1.0
    owners = owner_rows(section(change, "pod"), seconds)
    return Group(
        *(_text(line) for line in _head(change, seconds)),
        Text(),
        _table(("operation", "ops/s", "p50", "p99"), _latencies(change, seconds)),
        _table(("device", "state", "read/s", "written/s", "rd p99", "wr p99", "errors"), _devices(change, seconds)),
        *([_table(owners[0], owners[1:])] if len(owners) > 1 else []),
        _table(("namespace", "blocks", "bytes", "hits", "newest", "oldest"), _namespaces(found)),
        _table(("hits by age", "blocks/s"), _by_age(change, seconds)),
    )


def _head(change: Json, seconds: float) -> list[str]:
    counters, pool = section(change, "counters"), section(change, "pool")
    asked, share = asked_and_found(counters)
    size, used = number(change, "space", "size"), number(change, "space", "used")
    names = [str(item.get("mountpoint")) for item in items(change, "mounts")]
    names += [str(item.get("socket")) for item in items(change, "exports")]

    def rate(key: str) -> str:
        return size_text(number(counters, key) / seconds)

    # The number of clients is a gauge: its difference says nothing.
    return [
        f"kvfs  {pool.get('path')}  {pool.get('state')}  {' '.join(names)}",
        f"asked/s {count_text(asked / seconds)}  found {'-' if share is None else f'{share * 100:.1f}%'}  "
        f"files read {rate('read_bytes')}/s  written {rate('write_bytes')}/s  "
        f"clients read {rate('native_get_bytes')}/s  stored {rate('native_put_bytes')}/s",
        f"use {size_text(used)} of {size_text(size)}  blocks {number(change, 'blocks'):.0f}  "
        f"clients {number(change, 'native_clients'):.0f}  "
        f"evicted {count_text(number(counters, 'evicted_blocks') / seconds)} blocks/s",
        *(line.strip() for line in pod_lines(change)[:2]),
    ]


def _latencies(change: Json, seconds: float) -> list[Sequence[str]]:
    rows: list[Sequence[str]] = []
    for name in section(change, "latency"):
        summary = latency_summary(section(section(change, "latency"), name))
        times = [time_text(summary[key]) if summary["count"] else "-" for key in ("p50_us", "p99_us")]
        rows.append((name, count_text(summary["count"] / seconds), *times))
    return rows


def _devices(change: Json, seconds: float) -> list[Sequence[str]]:
    rows: list[Sequence[str]] = []
    for device in items(change, "devices"):
        times = [latency_summary(section(section(device, "latency"), kind)) for kind in ("read", "write")]
        rows.append(
            (
                f"{number(device, 'index'):.0f} {device.get('path')}",
                str(device.get("state")),
                size_text(number(device, "read_bytes") / seconds),
                size_text(number(device, "write_bytes") / seconds),
                *(time_text(summary["p99_us"]) if summary["count"] else "-" for summary in times),
                f"{number(device, 'errors'):.0f}",
            )
        )
    return rows


def _namespaces(found: Json) -> list[Sequence[str]]:
    places = sorted(items(found, "namespaces"), key=lambda place: -number(place, "bytes"))
    return [
        (
            str(place.get("path")),
            f"{number(place, 'blocks'):.0f}",
            size_text(number(place, "bytes")),
            count_text(number(place, "hits")),
            *(age_text(number(place, key)) if key in place else "-" for key in ("newest_s", "oldest_s")),
        )
        for place in places[:_NAMESPACES_MAX]
    ]


def _by_age(change: Json, seconds: float) -> list[Sequence[str]]:
    ages, at, rows = _ages(change), 0, []
    for name, end in _AGES:
        rows.append((name, count_text(sum(ages[at:end]) / seconds)))
        at = end
    return list(rows)


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for i, head in enumerate(heads):
        table.add_column(head, justify="left" if i == 0 else "right", no_wrap=True)
    for row in rows:
        # Text, not markup: paths may have brackets.
        table.add_row(*(_text(cell) for cell in row))
    return table


def _text(cell: str) -> Any:
    from rich.text import Text

    return Text(printable(cell))
