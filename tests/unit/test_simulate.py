"""The simulator: its references on traces that can be followed by hand, and the pool's policy on invented ones. It also
runs on a recorded trace where KVFS_TRACE names it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from kvfs.bench.simulate import REFERENCES, lru, main, real, reference, segmented, unique_blocks
from kvfs.bench.traces import SHAPES, invent, load
from kvfs.errors import UsageError
from kvfs.store.eviction import CARRY_SHARE


def hits(name: str, trace: list[list[int]], capacity: int) -> int:
    return reference(name, trace, capacity).hits


def test_references_by_hand() -> None:
    trace = [[1], [2], [1], [3], [1], [2]]
    # FIFO: 3 drives 1 out, 1 drives 2 out. LRU: 3 drives 2 out, and 1 stays. Belady lets 3 go.
    assert [hits(name, trace, 2) for name in ("fifo", "lru", "belady")] == [1, 2, 3]
    # Only a whole prefix counts: 2 is there, but 1 is not.
    assert hits("lru", [[1, 2], [3], [1, 2]], 2) == 0
    for name in REFERENCES:
        assert hits(name, trace * 3, 3) == 15, name


def test_a_scan_does_not_take_what_is_used_from_s3_fifo() -> None:
    trace = [[1], [1], [1]] + [[i] for i in range(10, 60)] + [[1]]
    assert hits("s3-fifo", trace, 20) == 3 and hits("lru", trace, 20) == 2


@pytest.mark.parametrize("shape", SHAPES)
def test_invented_traces_are_the_same_every_time_and_have_prefixes(shape: str) -> None:
    trace = invent(shape, 3, 500)
    assert trace == invent(shape, 3, 500) != invent(shape, 4, 500)
    assert len(trace) == 500 and all(len(set(request)) == len(request) > 0 for request in trace)
    before: dict[int, int | None] = {}
    for request in trace:
        for previous, block in zip([None, *request], request, strict=False):
            assert before.setdefault(block, previous) == previous, "an id stands for a block and all before it"


# Least shares of LRU's hits. Where ended and live sessions lie in the same segments, most of a segment would have to be
# copied to keep what LRU keeps.
@pytest.mark.parametrize(("shape", "share", "least"), [
    ("rag", 0.05, 0.98), ("rag", 0.1, 0.98), ("chats", 0.25, 0.98), ("mixed", 0.25, 0.98), ("agents", 0.1, 0.88),
])  # fmt: skip
def test_the_policy_beside_lru_of_single_blocks(shape: str, share: float, least: float) -> None:
    trace = invent(shape, 1, 4000)
    capacity = int(share * unique_blocks(trace))
    result = segmented(trace, capacity, 150)
    assert result.hits >= least * lru(trace, capacity)[0]
    assert result.stored < result.written <= (1 + CARRY_SHARE) * result.stored


@pytest.mark.slow
def test_the_real_pool_does_as_the_simulated_one(tmp_path: Path) -> None:
    trace = invent("rag", 2, 400)
    capacity = unique_blocks(trace) // 2
    pool, simulated = real(trace, capacity, 40, tmp_path), segmented(trace, capacity, 40)
    assert pool.looked_up == simulated.looked_up and pool.written <= (1 + CARRY_SHARE) * pool.stored
    assert 0.9 * simulated.hits < pool.hits < 1.1 * simulated.hits


def test_the_recorded_trace() -> None:
    path = os.environ.get("KVFS_TRACE")
    if not path:
        pytest.skip("KVFS_TRACE names no trace (Mooncake's conversation_trace.jsonl)")
    trace = load(Path(path))
    for share, least in ((0.05, 0.195), (0.1, 0.275), (0.25, 0.35)):
        result = segmented(trace, int(share * unique_blocks(trace)), 200)
        assert result.ratio >= least and result.write_ratio <= 1.13


def test_traces_that_are_none_are_refused_by_name_and_line(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    for line in ("{}", "[1]", "no", '{"hash_ids": [1, -2]}', '{"hash_ids": [1, "2"]}', '{"hash_ids": [1, 1]}'):
        path.write_text('{"hash_ids": [1]}\n' + line + "\n")
        with pytest.raises(UsageError, match="line 2"):
            load(path)
    path.write_text('{"hash_ids": []}\n')
    with pytest.raises(UsageError, match="no blocks"):
        load(path)
    with pytest.raises(UsageError, match="nothing"):
        load(tmp_path / "nothing")
    with pytest.raises(UsageError, match="segments"):
        segmented([[1, 2, 3]], 3, 2)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace"
    path.write_text("".join(json.dumps({"hash_ids": request}) + "\n" for request in invent("rag", 1, 200)))
    options = ["--shares", "0.5", "--segments", "10", "--references", "lru"]
    assert main([str(path), *options]) == 0
    assert "| lru |" in capsys.readouterr().out
    assert main([str(path), *options, "-o", "json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["version"] == 1 and [r["policy"] for r in report["results"]] == ["lru", "pool"]
    assert main([str(tmp_path / "nothing"), *options]) == 2
