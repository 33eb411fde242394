"""The pod's feed under seeds: whatever an engine, a network and crashes do, no wrong bytes, and one truth at rest.

KVFS_POD_SEED=N runs one seed, with KVFS_POD_SHORT=1 in a short world.
`python tests/pod/simulation.py --seeds 100000` runs as many as there is time for.
"""

from __future__ import annotations

import os

import pytest
from helpers import often
from mutations import MUTATIONS, SHORT, mutated
from simulation import Wrong, run_seed, run_seeds

PARTS = often(4, 8)
SEEDS = often(1000, 4000)
SHORT_SEEDS = often(200, 2000)


def test_one_seed() -> None:
    """The one to look at."""
    run_seed(int(os.environ.get("KVFS_POD_SEED", "0")), short="KVFS_POD_SHORT" in os.environ)


@pytest.mark.parametrize("part", range(PARTS))
def test_whatever_happens_no_wrong_bytes_and_one_truth_at_rest(part: int) -> None:
    happened, wrong = run_seeds(range(part, SEEDS, PARTS))
    assert wrong == []
    # It did happen; a simulation in which nothing goes wrong proves nothing.
    for name in ("fresh", "leases", "crashes", "repeats", "reloads", "lost", "dropped", "resets"):
        assert happened[name] > 10, happened


def test_news_that_an_owner_dropped_too_soon_are_found_on_flash() -> None:
    happened, wrong = run_seeds(range(SHORT_SEEDS), short=True)
    assert wrong == []
    assert happened["lost"] > 10 and happened["dropped"] > 10, happened


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_fault_that_is_put_in_is_found(name: str) -> None:
    with mutated(name):
        for seed in range(1500):
            try:
                run_seed(seed, short=name in SHORT)
            except Wrong:
                return
    raise AssertionError(f"1,500 seeds saw nothing wrong, although {name}")


def test_a_seed_is_the_same_each_time() -> None:
    assert [run_seed(7) for _ in range(2)] == [run_seed(7)] * 2
