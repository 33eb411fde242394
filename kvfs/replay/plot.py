"""Replays over time as an SVG: the prefix hit ratio above, load latency below. Each replay is a line, so that several
can be compared: by its colour, and where there is none by the shape of its marks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from typing import cast

Json = dict[str, object]
Point = tuple[float, float]
WIDTH, LEFT, RIGHT, TOP, HEIGHT, GAP = 760, 64, 28, 44, 190, 44
COLOURS = ("#0b62a4", "#d9541e", "#2e8b57", "#8e44ad", "#b8860b", "#444444", "#c2185b", "#00838f")
# Paths of marks around (0, 0): of eight lines no two are alike without colour.
MARKS = (
    "M-3,0a3,3 0 1,0 6,0a3,3 0 1,0 -6,0z", "M-3,-3h6v6h-6z", "M0,-4L4,3H-4z", "M0,-4L4,0L0,4L-4,0z",
    "M0,4L4,-3H-4z", "M-4,0H4M0,-4V4", "M-3,-3L3,3M3,-3L-3,3", "M-4,0H4M-2,-3.4L2,3.4M2,-3.4L-2,3.4",
)  # fmt: skip
_MARKS_A_LINE = 6
_SMOOTHED = 3
# The width of a letter of a font of 11, on average at most.
_LETTER = 6.2
_NAME_MOST = 44
_TITLE_MOST = 90


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
    ratios = round_ticks(max((y for points in hits.values() for _, y in points), default=0.0) or 0.1)
    latencies = log_ticks(min(values, default=0.1), max(values, default=10.0))
    low, high = math.log10(latencies[0]), math.log10(latencies[-1])

    def across(seconds: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * seconds / end

    def ratio(value: float) -> float:
        return first - HEIGHT * value / ratios[-1]

    def latency(value: float) -> float:
        return second - HEIGHT * (math.log10(max(value, latencies[0])) - low) / (high - low)

    first, second = TOP + HEIGHT, TOP + 2 * HEIGHT + GAP
    legend = list(_legend(list(replays), second + 40))
    total = legend[-1][1] + 16 if legend else second + 40
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{total}" viewBox="0 0 {WIDTH} {total}"'
        ' font-family="sans-serif" font-size="11">',
        f'<rect width="{WIDTH}" height="{total}" fill="white"/>',
        f'<text x="{LEFT}" y="16" font-size="13">{escape(_cut(title, _TITLE_MOST))}</text>',
    ]
    lines += _panel(first, "prefix hit ratio", [(ratio(step), f"{step * 100:.3g}%") for step in ratios])
    titled = "latency of a request's load, ms: p99; p50 thin and dashed"
    lines += _panel(second, titled, [(latency(step), f"{step:g}") for step in latencies])
    for step in round_ticks(end, inside=True):
        x = across(step)
        lines.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{second}" y2="{second + 4}" stroke="#888888"/>')
        lines.append(
            f'<text x="{x:.1f}" y="{second + 16}" text-anchor="middle">{step:g}{" s" if not step else ""}</text>'
        )
    for place, name in enumerate(replays):
        lines += _line(hits[name], across, ratio, place)
        lines += _line(loads[name]["p99"], across, latency, place)
        lines += _line(loads[name]["p50"], across, latency, place, thin=True)
    for place, (x, y, name) in enumerate(legend):
        colour, mark = COLOURS[place % len(COLOURS)], MARKS[place % len(MARKS)]
        lines.append(f'<path d="M{x:.0f},{y - 4}h24" stroke="{colour}" stroke-width="1.6"/>')
        lines.append(_mark(x + 12, y - 4, colour, mark))
        lines.append(f'<text x="{x + 30:.0f}" y="{y}">{escape(name)}</text>')
    return "\n".join([*lines, "</svg>\n"])


def round_ticks(end: float, *, inside: bool = False) -> list[float]:
    """Four to ten steps of 1, 2 or 5 times a power of ten from 0 on: to `end` or just above it, `inside`: below it."""
    power = 10.0 ** math.floor(math.log10(end / 4))
    step = next(power * factor for factor in (1, 2, 5, 10) if end / (power * factor) <= 8)
    count = math.floor(end / step + 1e-9) if inside else math.ceil(end / step - 1e-9)
    return [float(f"{index * step:.6g}") for index in range(count + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten around the values; where they are few, twice and five times these, too."""
    first, last = math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9)
    factors = (1, 2, 5) if last - first <= 2 else (1,)
    steps = [float(f"{factor * 10.0**power:.6g}") for power in range(first, last + 1) for factor in factors]
    below = max((step for step in steps if step <= low), default=steps[0])
    above = min((step for step in steps if step >= high), default=steps[-1])
    chosen = [step for step in steps if below <= step <= above]
    return chosen if len(chosen) > 1 else [below, 10 * below]


def _legend(names: Sequence[str], top: int) -> Iterator[tuple[float, int, str]]:
    """Place and text of each name: as many in a row as there is room for."""
    x, y = float(LEFT), top
    for name in names:
        shown = _cut(name, _NAME_MOST)
        width = 30 + _LETTER * len(shown) + 14
        if x > LEFT and x + width > WIDTH - RIGHT:
            x, y = float(LEFT), y + 18
        yield x, y, shown
        x += width


def _cut(text: str, most: int) -> str:
    """The end of a long text says more than its beginning: a file's name."""
    return text if len(text) <= most else f"...{text[3 - most :]}"


def _panel(base: float, title: str, ticks: Sequence[tuple[float, str]]) -> list[str]:
    lines = [f'<text x="{LEFT}" y="{base - HEIGHT - 8}" font-weight="bold">{escape(title)}</text>']
    for y, text in ticks:
        lines.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#dddddd"/>')
        lines.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{text}</text>')
    return lines


def _line(
    points: Sequence[Point], across: Callable[[float], float], up: Callable[[float], float], place: int, *,
    thin: bool = False,
) -> list[str]:  # fmt: skip
    colour, mark = COLOURS[place % len(COLOURS)], MARKS[place % len(MARKS)]
    text = " ".join(f"{across(x):.1f},{up(y):.1f}" for x, y in points)
    style = 'stroke-width="1" stroke-dasharray="4 3"' if thin else 'stroke-width="1.6"'
    lines = [f'<polyline points="{text}" fill="none" stroke="{colour}" {style}/>']
    # Each replay's marks begin elsewhere, so that they are seen where lines lie on each other.
    every = max(1, len(points) // _MARKS_A_LINE)
    return lines + [_mark(across(x), up(y), colour, mark) for x, y in points[place % every :: every]]


def _mark(x: float, y: float, colour: str, mark: str) -> str:
    return f'<path d="{mark}" transform="translate({x:.1f},{y:.1f})" stroke="{colour}" fill="{colour}"/>'
