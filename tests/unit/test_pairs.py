"""The results that tools/compare makes of its pairs: orders, ratios, intervals, the table."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from benches.calls import _total
from benches.common import Json
from benches.pairs import (
    Pair,
    case_document,
    interval,
    is_wide,
    making_orders,
    operation_us,
    render,
    run_orders,
    shares,
)


def run(us: float, operations: int = 100, daemon_cpu_s: float = 0.0) -> Json:
    return {
        "seconds": us * operations / 1e6,
        "operations": operations,
        "daemon_cpu_s": daemon_cpu_s,
        "client_cpu_s": 0.001,
    }


def pairs_of(ratios: list[list[float]], old_us: float = 10.0) -> list[Pair]:
    return [
        Pair(making, "old", run(old_us), run(old_us * ratio)) for making, some in enumerate(ratios) for ratio in some
    ]


def noisy(makings: list[float], noise: float, count: int = 5) -> list[list[float]]:
    source = random.Random(7)
    return [[source.gauss(middle, noise) for _ in range(count)] for middle in makings]


def test_an_operation_takes_seconds_over_operations() -> None:
    assert operation_us(run(12.5, operations=7)) == pytest.approx(12.5)
    assert Pair(0, "old", run(10), run(11)).ratio() == pytest.approx(1.1)


def test_each_build_runs_first_in_half_of_the_pairs_and_drift_cancels() -> None:
    orders = run_orders(20)
    assert [order[0] for order in orders[:4]] == ["old", "new", "old", "new"]
    assert sum(order[0] == "old" for order in orders) == 10
    sequence = [name for order in orders for name in order]
    assert sequence[:8] == ["old", "new", "new", "old", "old", "new", "new", "old"]
    # A machine that slows down steadily slows both: the mean place of each build's runs is the same.
    places = {name: [index for index, one in enumerate(sequence) if one == name] for name in ("old", "new")}
    assert sum(places["old"]) == sum(places["new"])


def test_each_build_has_its_pool_made_first_in_half_of_the_makings() -> None:
    assert [order[0] for order in making_orders(4)] == ["old", "new", "new", "old"]
    assert {order[0] for order in making_orders(2)} == {"old", "new"}


@pytest.mark.parametrize(
    ("rounds", "pools", "expected"), [(20, 4, [5] * 4), (2, 4, [1, 1]), (7, 3, [3, 2, 2]), (1, 1, [1])]
)
def test_pairs_are_spread_over_the_makings_and_none_is_idle(rounds: int, pools: int, expected: list[int]) -> None:
    assert shares(rounds, pools) == expected


def test_the_interval_holds_the_median_and_is_the_same_each_time() -> None:
    groups = noisy([1.0] * 4, 0.02)
    low, high = interval(groups)
    assert low < 1.005 and high > 0.995 and high - low < 0.04
    assert interval(groups) == (low, high)


def test_the_interval_of_equal_pairs_is_a_point() -> None:
    assert interval([[1.25, 1.25], [1.25]]) == (1.25, 1.25)


def test_makings_that_disagree_widen_the_interval_however_many_pairs_each_has() -> None:
    """Pools made in one order were 5 % faster, in the other 5 % slower: that is no difference of the builds."""
    agree, disagree = noisy([1.0] * 4, 0.005, 20), noisy([0.95, 1.05, 1.05, 0.95], 0.005, 20)
    assert not is_wide(pairs_of(agree))
    low, high = interval(disagree)
    assert low < 1 < high and is_wide(pairs_of(disagree))


def test_the_interval_misses_the_truth_about_as_seldom_as_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal builds, on pools with luck of their own. On 4 makings of 5 pairs 10 % were missed, on 10 of 2 some 3 %."""
    monkeypatch.setattr("benches.pairs.RESAMPLES", 200)
    source = random.Random(3)
    missed = 0
    for _ in range(100):
        groups = [[source.gauss(luck, 0.01) for _ in range(2)] for luck in (source.gauss(1, 0.01) for _ in range(10))]
        low, high = interval(groups)
        missed += not low <= 1 <= high
    assert missed <= 8


@pytest.mark.parametrize(
    ("ratios", "verdict"),
    [
        ([[1.2] * 5] * 4, "SLOWER"),
        ([[0.8] * 5] * 4, "faster"),
        ([[0.999, 1.001, 1.0]] * 4, ""),
        ([[0.9, 1.1, 1.0], [1.1, 0.9, 1.0]], "wide"),
        ([[1.5], [1.6]], "few pairs"),
    ],
)
def test_the_verdict_follows_the_interval(ratios: list[list[float]], verdict: str) -> None:
    assert case_document("read", "a read", pairs_of(ratios), None)["verdict"] == verdict


def test_cpu_of_an_operation_is_of_all_runs_together() -> None:
    """A tick of the CPU clock is 10 ms, as long as a short run's CPU: each run alone would say 0 or 10 ms."""
    pairs = [Pair(0, "old", run(10, 1000, cpu), run(10, 1000, 0.01)) for cpu in (0.0, 0.01, 0.0, 0.01)]
    document: dict[str, object] = case_document("read", "a read", pairs, None)
    old, new = document["old"], document["new"]
    assert isinstance(old, dict) and isinstance(new, dict)
    assert old["daemon_cpu_us"] == pytest.approx(5.0) and new["daemon_cpu_us"] == pytest.approx(10.0)


def test_the_table_has_a_line_for_every_case_and_for_what_was_left_out() -> None:
    calls: Json = {"old": {"daemon": 2.0, "client": 1.0}, "new": {"daemon": 3.0, "client": 1.0}}
    cases = [
        case_document("read", "a read", pairs_of([[1.2] * 5] * 4), None),
        case_document("store", "a store", pairs_of([[0.5, 1.5]] * 4), calls),
        case_document("open", "an open", pairs_of([[0.5, 1.5]] * 4), {"reason": "needs the program strace"}),
    ]
    skipped = [{"case": "zram-read", "devices": "zram", "reason": "needs root"}]
    text = render({"cases": cases, "skipped": skipped, "failed": []}).splitlines()
    assert len(text) == 5 and "1.200" in text[1] and "SLOWER" in text[1]
    assert "daemon 2.00 > 3.00, client 1.00 > 1.00" in text[2] and text[3].endswith("needs the program strace")
    assert text[4] == "skipped: zram-read: needs root"


def test_calls_are_summed_from_the_table_of_strace(tmp_path: Path) -> None:
    report = tmp_path / "calls"
    report.write_text(
        "% time     seconds  usecs/call     calls    errors syscall\n"
        "------ ----------- ----------- --------- --------- ----------------\n"
        " 90.00    0.000900           9       100        40 read\n"
        " 10.00    0.000100           5        20           io_uring_enter\n"
        "------ ----------- ----------- --------- --------- ----------------\n"
        "100.00    0.001000           8       120        40 total\n"
    )
    assert _total(report) == 120
    report.write_text("")
    assert _total(report) == 0
