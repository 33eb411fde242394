"""The result of pairs of runs: the ratio of two builds, how sure it is, and the table of it. Pure."""

from __future__ import annotations

import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from benches.common import Json, number_at
from benches.report import figure
from kvfs.status.numbers import table

RESAMPLES = 2000
WIDE = 0.06  # an interval wider than this says too little about a change of some percent
FEW = 6  # fewer pairs than this cannot all fall on one side by chance less than once in 32 times


@dataclass(frozen=True, slots=True)
class Pair:
    """One run of each build, one right after the other, on the pools that were made as number `pool`."""

    pool: int
    first: str  # old, new: the build that ran first
    old: Json
    new: Json

    def ratio(self) -> float:
        return operation_us(self.new) / operation_us(self.old)

    def document(self) -> Json:
        return {"pool": self.pool, "first": self.first, "ratio": self.ratio(), "old": self.old, "new": self.new}


def operation_us(run: Json) -> float:
    """Wall time of an operation: a client's seconds over its operations."""
    return number_at(run, "seconds") / number_at(run, "operations") * 1e6


def run_orders(count: int) -> list[tuple[str, str]]:
    """Which build runs first in each pair: A B, B A, A B, ... so that drift falls on both."""
    return [("old", "new") if index % 2 == 0 else ("new", "old") for index in range(count)]


def making_orders(count: int) -> list[tuple[str, str]]:
    """Which build's pool is made first each time: A B, B A, B A, A B, ..."""
    return [("old", "new") if index % 4 in (0, 3) else ("new", "old") for index in range(count)]


def shares(rounds: int, pools: int) -> list[int]:
    """How many pairs run on each making; no making is without one."""
    pools = min(rounds, pools)
    return [rounds // pools + (index < rounds % pools) for index in range(pools)]


def interval(groups: Sequence[Sequence[float]], seed: int = 1) -> tuple[float, float]:
    """95 % interval of the median of all values, by a bootstrap of two levels: makings, then pairs of each.

    Pairs on the same pools err together. Where makings disagree, more pairs on each do not make the interval narrower.
    """
    source = random.Random(seed)
    medians = []
    for _ in range(RESAMPLES):
        drawn = [source.choices(group, k=len(group)) for group in source.choices(groups, k=len(groups))]
        medians.append(statistics.median([value for group in drawn for value in group]))
    medians.sort()
    return medians[RESAMPLES * 25 // 1000], medians[RESAMPLES * 975 // 1000 - 1]


def by_making(pairs: Sequence[Pair]) -> list[list[float]]:
    """Ratios of the pairs on each making."""
    return [[pair.ratio() for pair in pairs if pair.pool == pool] for pool in sorted({pair.pool for pair in pairs})]


def is_wide(pairs: Sequence[Pair]) -> bool:
    low, high = interval(by_making(pairs))
    return high - low > WIDE


def _side(runs: Sequence[Json]) -> Json:
    operations = sum(number_at(run, "operations") for run in runs)
    return {
        "us": statistics.median(operation_us(run) for run in runs),
        "daemon_cpu_us": sum(number_at(run, "daemon_cpu_s") for run in runs) * 1e6 / operations,
        "client_cpu_us": sum(number_at(run, "client_cpu_s") for run in runs) * 1e6 / operations,
    }


def figures_document(pairs: Sequence[Pair]) -> Json:
    """Each figure that the runs have besides their time: its median on both sides, and the ratio of the pairs."""
    names = cast(Json, pairs[0].new.get("figures", {}))
    found: Json = {}
    for name in names:
        sides = {side: [number_at(getattr(pair, side), "figures", name) for pair in pairs] for side in ("old", "new")}
        groups: dict[int, list[float]] = {}
        for pair, old, new in zip(pairs, sides["old"], sides["new"], strict=True):
            if old:
                groups.setdefault(pair.pool, []).append(new / old)
        ratio: Json | None = None
        if groups:
            low, high = interval(list(groups.values()))
            values = [value for group in groups.values() for value in group]
            ratio = {"median": statistics.median(values), "low": low, "high": high}
        found[name] = {**{side: statistics.median(values) for side, values in sides.items()}, "ratio": ratio}
    return found


def case_document(name: str, what: str, pairs: Sequence[Pair], calls: Json | None) -> Json:
    """A case: ratio of new to old, each build's median time and CPU an operation, and every pair.

    calls: system calls an operation, of daemon and client of each build, where they were counted.
    """
    groups = by_making(pairs)
    low, high = interval(groups)
    return {
        "case": name,
        "what": what,
        "ratio": {"median": statistics.median(pair.ratio() for pair in pairs), "low": low, "high": high},
        "makings": [statistics.median(group) for group in groups],
        "wide": high - low > WIDE,
        "verdict": _verdict(len(pairs), low, high),
        "old": _side([pair.old for pair in pairs]),
        "new": _side([pair.new for pair in pairs]),
        "calls": calls,
        "figures": figures_document(pairs),
        "pairs": [pair.document() for pair in pairs],
    }


def _verdict(count: int, low: float, high: float) -> str:
    if count < FEW:
        return "few pairs"
    if low > 1 or high < 1:
        return "faster" if high < 1 else "SLOWER"
    return "wide" if high - low > WIDE else ""


def render(document: Mapping[str, object]) -> str:
    """The table for people. Below 1 the new build takes less time."""
    head = ["case", "new/old", "95 %", "", "old", "new", "daemon CPU", "client CPU", "makings", "system calls"]
    lines = [head]
    for case in cast(Sequence[Json], document["cases"]):
        old, new = cast(Json, case["old"]), cast(Json, case["new"])
        ratio = [number_at(case, "ratio", name) for name in ("median", "low", "high")]
        lines.append(
            [
                str(case["case"]),
                f"{ratio[0]:.3f}",
                f"{ratio[1]:.3f}-{ratio[2]:.3f}",
                str(case["verdict"]),
                *(f"{figure(number_at(side, 'us'))} us" for side in (old, new)),
                *(
                    f"{figure(number_at(old, name))} > {figure(number_at(new, name))} us"
                    for name in ("daemon_cpu_us", "client_cpu_us")
                ),
                " ".join(f"{value:.3f}" for value in cast(Sequence[float], case["makings"])),
                _calls_text(cast("Json | None", case["calls"])),
            ]
        )
    notes = [
        _figure_text(str(case["case"]), name, cast(Json, found))
        for case in cast(Sequence[Json], document["cases"])
        for name, found in cast(Json, case.get("figures", {})).items()
    ]
    notes += [f"skipped: {item['case']}: {item['reason']}" for item in cast(Sequence[Json], document["skipped"])]
    notes += [f"FAILED: {item['case']}: {item['error']}" for item in cast(Sequence[Json], document["failed"])]
    return "\n".join([*table(lines, left=len(head)), *notes])


def _figure_text(case: str, name: str, found: Json) -> str:
    text = f"{case}: {name}: {figure(number_at(found, 'old'))} > {figure(number_at(found, 'new'))}"
    if found["ratio"] is None:
        return text
    median, low, high = (number_at(found, "ratio", key) for key in ("median", "low", "high"))
    return f"{text}, ratio {median:.3f} ({low:.3f}-{high:.3f})"


def _calls_text(calls: Json | None) -> str:
    if calls is None:
        return ""
    if "reason" in calls:
        return str(calls["reason"])
    return ", ".join(
        f"{who} {figure(number_at(calls, 'old', who))} > {figure(number_at(calls, 'new', who))}"
        for who in ("daemon", "client")
    )
