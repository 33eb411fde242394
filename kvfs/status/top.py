"""`kvfs top`: a live view of one pool in the terminal, by the rich package (pip install 'kvfs[top]').

Draws the daemon's numbers at every interval, and computes none. Leaves the terminal as it was, however it ends.
"""

from __future__ import annotations

import os
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

from kvfs.errors import MissingFeatureError, printable
from kvfs.status.change import difference
from kvfs.status.holder import holder_text
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
from kvfs.status.text import memory_text
from kvfs.units import size_text

# The daemon walks its index for a survey.
SURVEY_EVERY_S = 10.0
# The orders of devices and namespaces that `s` goes through.
ORDERS = ("bytes", "errors, hits", "name")
HELP = (
    "h or ?       this page, and back",
    "s            sort devices and namespaces: by bytes, by errors and hits, by name",
    "p or space   pause, and go on",
    "q or Ctrl-C  quit",
    "",
    "Rates are of the last interval; the first are since the mount.",
    "kvfs top --help explains the columns.",
)
# Rows of found_ages, whose entry i counts blocks younger than 2**i s: names for runs of them.
_AGES = (("< 1 min", 7), ("< 10 min", 10), ("< 1 h", 13), ("< 1 d", 17), ("older", 64))

Ask = Callable[[], Json]


def require() -> None:
    """MissingFeatureError without the package."""
    try:
        import rich  # noqa: F401
    except ImportError as error:
        raise MissingFeatureError("the package rich is missing: pip install 'kvfs[top]'") from error


@dataclass
class Controls:
    """The choice of the keys. order: of devices and namespaces, the biggest first."""

    help: bool = False
    paused: bool = False
    order: int = 0
    ended: bool = False

    def press(self, key: str) -> bool:
        """Take a key; returns whether it is one."""
        if key in ("q", "Q"):
            self.ended = True
        elif key in ("h", "?"):
            self.help = not self.help
        elif key in ("p", " "):
            self.paused = not self.paused
        elif key == "s":
            self.order = (self.order + 1) % len(ORDERS)
        else:
            return False
        return True


class Keys:
    """Single keys of a terminal, which is put back as it was. Without one there are no keys."""

    def __enter__(self) -> Self:
        self._fd = sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else -1
        if self._fd >= 0:
            self._before = termios.tcgetattr(self._fd)
            tty.setcbreak(self._fd, termios.TCSADRAIN)  # Ctrl-C stays an interrupt
        return self

    def __exit__(self, *_: object) -> None:
        if self._fd >= 0:
            termios.tcsetattr(self._fd, termios.TCSADRAIN, self._before)

    def wait(self, timeout_s: float) -> str:
        """Keys that were typed within this time; empty for none. It returns at the first key."""
        if self._fd < 0:
            time.sleep(timeout_s)
            return ""
        if not select.select([self._fd], [], [], timeout_s)[0]:
            return ""
        typed = os.read(self._fd, 64)
        if not typed:  # hung up: no key comes any more
            self._fd = -1
        return typed.decode(errors="replace")


def run(status: Ask, survey: Ask, interval_s: float, count: int | None) -> None:
    """Draw until `q` or an interrupt, or `count` times. Raises the errors of `status`: the pool is gone."""
    from rich.console import Console
    from rich.live import Live

    console, controls = Console(), Controls()
    with Live(console=console, screen=True, auto_refresh=False) as live, Keys() as keys:

        def pause(seconds: float) -> bool:
            """Wait for the next interval and answer keys meanwhile; returns whether it goes on."""
            until = time.monotonic() + seconds
            while not controls.ended:
                left_s = until - time.monotonic()
                if left_s <= 0 and not controls.paused:
                    return True
                typed = keys.wait(1.0 if controls.paused else left_s)
                if any([controls.press(key) for key in typed]):
                    draw()
            return False

        def draw() -> None:
            live.update(view(change, found, controls, console.size.height), refresh=True)

        # draw() has those of the last interval, also when a key asks for it.
        for change, found in looks(status, survey, interval_s, count, pause):  # noqa: B007
            draw()


def _sleep(seconds: float) -> bool:
    time.sleep(seconds)
    return True


def looks(
    status: Ask, survey: Ask, interval_s: float, count: int | None, pause: Callable[[float], bool] = _sleep
) -> Iterator[tuple[Json, Json]]:
    """A difference() of statuses and a survey: first since the mount, then of each interval. It ends when `pause`
    returns False."""
    before, found, found_at, drawn = status(), survey(), time.monotonic(), 0
    yield difference(before, None), found
    while (count is None or drawn < count) and pause(interval_s):
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


def view(change: Json, found: Json, controls: Controls, height: int) -> Any:
    """One screen of a number of rows, from a difference() of statuses and a survey. Rows without room are left out, and
    counted: first the tail of the longest table."""
    from rich.console import Group
    from rich.text import Text

    if controls.help:
        return Group(*map(_text, HELP))
    seconds = number(change, "seconds") or 1.0
    owners = owner_rows(section(change, "pod"), seconds)
    key = ORDERS[controls.order]
    head = _head(change, seconds)
    tables: list[tuple[Sequence[str], Sequence[Sequence[str]]]] = [
        (("device", "state", "read/s", "written/s", "rd p99", "wr p99", "errors"), _devices(change, seconds, key)),
        (("namespace", "blocks", "bytes", "hits", "newest", "oldest"), _namespaces(found, key)),
        (("operation", "ops/s", "p50", "p99"), _latencies(change, seconds)),
        (("hits by age", *(name for name, _ in _AGES)), [("blocks/s", *_by_age(change, seconds))]),
    ]
    if len(owners) > 1:
        tables.insert(1, (tuple(owners[0]), owners[1:]))
    # Each table has a row of heads.
    rooms = fit([len(rows) for _, rows in tables], height - len(head) - 1 - len(tables))
    state = "paused  " if controls.paused else ""
    return Group(
        *map(_text, head),
        *(_table(heads, rows, room) for (heads, rows), room in zip(tables, rooms, strict=True)),
        Text(f"{state}h help  s sort: {key}  p pause  q quit", style="reverse", no_wrap=True),
    )


def fit(wanted: Sequence[int], room: int) -> list[int]:
    """Rows for each table: all if there is room, else the longest give way first, down to one."""
    given = list(wanted)
    while sum(given) > room and max(given, default=0) > 1:
        longest = max(range(len(given)), key=lambda i: given[i])
        given[longest] -= 1
    return given


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
        *([f"memory: {memory_text(change)}; I/O by {change.get('rings')}"] if "memory" in change else []),
        *([f"held {holder_text(change)}"] if "holder" in change else []),
        *(line.strip() for line in pod_lines(change)[:2]),
    ]


def _latencies(change: Json, seconds: float) -> list[Sequence[str]]:
    rows: list[Sequence[str]] = []
    for name in section(change, "latency"):
        summary = latency_summary(section(section(change, "latency"), name))
        times = [time_text(summary[key]) if summary["count"] else "-" for key in ("p50_us", "p99_us")]
        rows.append((name, count_text(summary["count"] / seconds), *times))
    return rows


def _devices(change: Json, seconds: float, key: str) -> list[Sequence[str]]:
    rows: list[Sequence[str]] = []
    devices = items(change, "devices")
    if key != "name":
        # The trouble first: one that is not online, or had errors.
        devices = sorted(devices, key=lambda one: (one.get("state") == "online", -_weight(one, key)))
    for device in devices:
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


def _weight(device: Json, key: str) -> float:
    kinds = ("errors",) if key == "errors, hits" else ("read_bytes", "write_bytes")
    return sum(number(device, kind) for kind in kinds)


def _namespaces(found: Json, key: str) -> list[Sequence[str]]:
    places = items(found, "namespaces")
    if key != "name":
        by = "hits" if key == "errors, hits" else "bytes"
        places = sorted(places, key=lambda place: -number(place, by))
    return [
        (
            str(place.get("path")),
            f"{number(place, 'blocks'):.0f}",
            size_text(number(place, "bytes")),
            count_text(number(place, "hits")),
            *(age_text(number(place, key)) if key in place else "-" for key in ("newest_s", "oldest_s")),
        )
        for place in places
    ]


def _by_age(change: Json, seconds: float) -> list[str]:
    ages, at, cells = _ages(change), 0, []
    for _, end in _AGES:
        cells.append(count_text(sum(ages[at:end]) / seconds))
        at = end
    return cells


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], room: int) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    left_out = len(rows) - room
    for i, head in enumerate(heads):
        more = f" ({left_out} more)" if left_out and i == 0 else ""
        table.add_column(head + more, justify="left" if i == 0 else "right", no_wrap=True)
    for row in rows[:room]:
        # Text, not markup: paths may have brackets.
        table.add_row(*(_text(cell) for cell in row))
    return table


def _text(cell: str) -> Any:
    from rich.text import Text

    return Text(printable(cell), no_wrap=True, overflow="ellipsis")
