"""Replays over time as an SVG: the prefix hit ratio above, load latency below. Each replay is a line, so that several
can be compared."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import cast

Json = dict[str, object]
Point = tuple[float, float]
WIDTH, LEFT, RIGHT, TOP, HEIGHT, GAP = 760, 64, 16, 44, 190, 44
COLOURS = ("#0b62a4", "#d9541e", "#2e8b57", "#8e44ad", "#b8860b", "#444444", "#c2185b", "#00838f")
_TICKS = 5
_SMOOTHED = 3


def render(replays: Mapping[str, Json], title: str) -> str:
    """An SVG document. replays: documents of report.document(), by the names of their lines."""
    hits: dict[str, list[Point]] = {}
    loads: dict[str, dict[str, list[Point]]] = {}
    for name, replay in replays.items():
        series = cast(Sequence[Mapping[str, float]], replay["series"])
        hits[name] = []
        for place, _ in enumerate(series):
            near = series[max(0, place - _SMOOTHED + 1) : place + 1]
            asked = sum(part["blocks"] for part in near)
            if asked:
                hits[name].append((series[place]["s"], sum(part["loaded"] for part in near) / asked))
        loaded = [part for part in series if part["load_count"]]
        loads[name] = {key: [(part["s"], part[f"load_{key}_ms"]) for part in loaded] for key in ("p50", "p99")}
    end = max((x for points in hits.values() for x, _ in points), default=0.0) or 1.0
    values = [y for lines in loads.values() for points in lines.values() for _, y in points if y > 0]
    low = math.floor(math.log10(min(values))) if values else -1
    high = max(low + 1, math.ceil(math.log10(max(values)))) if values else 1
    top = max((y for points in hits.values() for _, y in points), default=0.0)
    most = max(0.1, math.ceil(top * 10) / 10)

    def across(seconds: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * seconds / end

    def ratio(base: float) -> Callable[[float], float]:
        return lambda value: base - HEIGHT * value / most

    def latency(base: float) -> Callable[[float], float]:
        return lambda value: base - HEIGHT * (math.log10(max(value, 10.0**low)) - low) / (high - low)

    first, second = TOP + HEIGHT, TOP + 2 * HEIGHT + GAP
    total = second + 48
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{total}" viewBox="0 0 {WIDTH} {total}"'
        ' font-family="sans-serif" font-size="11">',
        f'<rect width="{WIDTH}" height="{total}" fill="white"/>',
        f'<text x="{LEFT}" y="16" font-size="13">{escape(title)}</text>',
    ]
    steps = [most * step / _TICKS for step in range(_TICKS + 1)]
    lines += _panel(first, "prefix hit ratio", [(ratio(first)(step), f"{step:.0%}") for step in steps])
    powers = [10.0**power for power in range(low, high + 1)]
    lines += _panel(second, "load, ms: p99, p50 dashed", [(latency(second)(step), f"{step:g}") for step in powers])
    for step in range(_TICKS + 1):
        seconds = end * step / _TICKS
        lines.append(f'<text x="{across(seconds):.1f}" y="{second + 16}" text-anchor="middle">{seconds:.3g} s</text>')
    for place, name in enumerate(replays):
        colour = COLOURS[place % len(COLOURS)]
        lines.append(_line(hits[name], across, ratio(first), colour))
        lines.append(_line(loads[name]["p99"], across, latency(second), colour))
        lines.append(_line(loads[name]["p50"], across, latency(second), colour, ' stroke-dasharray="4 3"'))
        x = LEFT + place * (WIDTH - LEFT - RIGHT) / len(replays)
        lines.append(f'<rect x="{x:.1f}" y="{total - 20}" width="10" height="10" fill="{colour}"/>')
        lines.append(f'<text x="{x + 14:.1f}" y="{total - 11}">{escape(name)}</text>')
    return "\n".join([*lines, "</svg>\n"])


def _panel(base: float, title: str, ticks: Sequence[tuple[float, str]]) -> list[str]:
    lines = [f'<text x="{LEFT}" y="{base - HEIGHT - 6}" font-weight="bold">{escape(title)}</text>']
    for y, text in ticks:
        lines.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#dddddd"/>')
        lines.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{text}</text>')
    return lines


def _line(
    points: Sequence[Point], across: Callable[[float], float], up: Callable[[float], float], colour: str, more: str = ""
) -> str:
    text = " ".join(f"{across(x):.1f},{up(y):.1f}" for x, y in points)
    return f'<polyline points="{text}" fill="none" stroke="{colour}" stroke-width="1.6"{more}/>'
