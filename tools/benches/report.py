"""Results as text and as Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from benches.common import GIB, KIB, MIB, Json, number_at

# ---- output ----


def size_text(size: int) -> str:
    return f"{size // MIB} MiB" if size >= MIB else f"{size // KIB} KiB"


def figure(value: float) -> str:
    if value == 0:
        return "0"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    size = abs(value)
    return f"{value:.{0 if size >= 100 else 1 if size >= 10 else 2 if size >= 0.1 else 3}f}"


def _cells(row: Json) -> list[str]:
    """case, devices, what, score, target, verdict, kvfs, peer."""
    score, ours = cast(Json, row["score"]), cast(Json, row["kvfs"])
    relation, unit = str(row["relation"]), str(row["unit"])
    suffix = {"faster": "x faster", "share": "x", "cost": "x", "extra": f" {unit} more", "value": f" {unit}"}[relation]
    text = figure(number_at(score, "median")) + suffix
    if len(cast(Sequence[float], score["samples"])) > 1:
        text += f" ({figure(number_at(score, 'min'))}-{figure(number_at(score, 'max'))})"
    target = row["target"]
    sign = "at most" if row["at_most"] else "at least"
    goal = "" if target is None else f"{sign} {figure(cast(float, target))}"
    verdict = {None: "", True: "met", False: "MISSED"}[cast("bool | None", row["met"])]
    peer = cast("Json | None", row["peer"])
    theirs = f"{figure(number_at(peer, 'median'))} {unit} ({peer['name']})" if peer else ""
    return [
        str(row["case"]),
        str(row["devices"]),
        str(row["what"]),
        text,
        goal,
        verdict,
        f"{figure(number_at(ours, 'median'))} {unit}" if peer else "",
        theirs,
    ]


def row_text(row: Json) -> str:
    case, devices, what, score, goal, verdict, ours, theirs = _cells(row)
    against = f"; kvfs {ours}, {theirs}" if theirs else ""
    return f"{case} on {devices}: {score}{f' [{goal}: {verdict}]' if goal else ''}: {what}{against}"


def render(document: Mapping[str, object]) -> str:
    """The table for people: ratios first."""
    from kvfs.status.numbers import table

    rows = cast(Sequence[Json], document["rows"])
    lines = [["score", "target", "", "case", "devices", "what", "kvfs", "peer"]]
    for row in rows:
        case, devices, what, score, goal, verdict, ours, theirs = _cells(row)
        lines.append([score, goal, verdict, case, devices, what, ours, theirs])
    return "\n".join([*table(lines, left=8), *_notes(document)])


def render_markdown(document: Mapping[str, object]) -> str:
    """The rows of one run. The table of docs/performance.md is of several runs, and kept by hand."""
    rows = cast(Sequence[Json], document["rows"])
    host, scale = cast(Json, document["machine"]), cast(Json, document["scale"])
    lines = [
        f"{document['date']}; {host['cores']} cores ({host['cpu']}), {number_at(host, 'memory') / GIB:.0f} GiB, "
        f"kernel {host['kernel']}; medians (min-max) of {scale['rounds']} interleaved rounds"
        f"{f', beside {busy} that only compute' if (busy := scale['busy']) else ''}"
        f"{'; toy sizes (--quick)' if document['quick'] else ''}.",
        "",
        "| case | devices | what | score | target | | kvfs | peer |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [f"| {' | '.join(_cells(row))} |" for row in rows]
    return "\n".join([*lines, *_notes(document)])


def _notes(document: Mapping[str, object]) -> list[str]:
    notes = []
    for item in cast(Sequence[Json], document["skipped"]):
        notes.append(f"skipped: {item['case']} on {item['devices']}: {item['reason']}")
    for item in cast(Sequence[Json], document["failed"]):
        notes.append(f"FAILED: {item['case']} on {item['devices']}: {str(item['error']).splitlines()[0]}")
    return ["", *notes] if notes else []
