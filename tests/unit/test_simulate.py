"""The simulator: its references on traces that can be followed by hand, and the pool's policy on invented ones. It also
runs on a recorded trace where KVFS_TRACE names it."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Mapping
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
    assert len(trace.prompts) == 500 and all(len(set(prompt)) == len(prompt) > 0 for prompt in trace.prompts)
    assert trace.times_s == sorted(trace.times_s) and trace.sessions and len(trace.sessions) == 500
    before: dict[int, int | None] = {}
    for prompt in trace.prompts:
        for previous, block in zip([None, *prompt], prompt, strict=False):
            assert before.setdefault(block, previous) == previous, "an id stands for a block and all before it"


# Least shares of LRU's hits. Where ended and live sessions lie in the same segments, most of a segment would have to be
# copied to keep what LRU keeps.
@pytest.mark.parametrize(("shape", "share", "least"), [
    ("rag", 0.05, 0.98), ("rag", 0.1, 0.98), ("chats", 0.25, 0.98), ("mixed", 0.25, 0.98), ("agents", 0.1, 0.88),
])  # fmt: skip
def test_the_policy_beside_lru_of_single_blocks(shape: str, share: float, least: float) -> None:
    prompts = invent(shape, 1, 4000).prompts
    capacity = int(share * unique_blocks(prompts))
    result = segmented(prompts, capacity, 150)
    assert result.hits >= least * lru(prompts, capacity)[0]
    assert result.stored < result.written <= (1 + CARRY_SHARE) * result.stored


@pytest.mark.slow
def test_the_real_pool_does_as_the_simulated_one(tmp_path: Path) -> None:
    prompts = invent("rag", 2, 400).prompts
    capacity = unique_blocks(prompts) // 2
    pool, simulated = real(prompts, capacity, 40, tmp_path), segmented(prompts, capacity, 40)
    assert pool.looked_up == simulated.looked_up and pool.written <= (1 + CARRY_SHARE) * pool.stored
    assert 0.9 * simulated.hits < pool.hits < 1.1 * simulated.hits


def test_the_recorded_trace() -> None:
    path = os.environ.get("KVFS_TRACE")
    if not path:
        pytest.skip("KVFS_TRACE names no trace (Mooncake's conversation_trace.jsonl)")
    prompts = load(Path(path)).prompts
    for share, least in ((0.05, 0.195), (0.1, 0.275), (0.25, 0.35)):
        result = segmented(prompts, int(share * unique_blocks(prompts)), 200)
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
    first = '{"hash_ids": [1], "timestamp": 5, "session_id": "a"}\n'
    for line in ('"timestamp": 4, "session_id": "a"', '"timestamp": "6", "session_id": "a"', '"timestamp": 6'):
        path.write_text(first + '{"hash_ids": [1], ' + line + "}\n")
        with pytest.raises(UsageError, match="line 2"):
            load(path)
    with pytest.raises(UsageError, match="nothing"):
        load(tmp_path / "nothing")
    with pytest.raises(UsageError, match="segments"):
        segmented([[1, 2, 3]], 3, 2)


def test_times_and_sessions_of_a_recorded_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"

    def loaded(*lines: Mapping[str, object], session_blocks: int = 0) -> tuple[list[float], list[int] | None]:
        path.write_text("".join(json.dumps({"hash_ids": [1, 2], **line}) + "\n" for line in lines))
        trace = load(path, session_blocks)
        return trace.times_s, trace.sessions

    assert loaded({}, {}) == ([0, 1], None)
    # Three requests of one stamp share the three seconds until the next.
    assert loaded(*({"timestamp": t} for t in (0, 3000, 3000, 3000, 6000)))[0] == [0, 3, 4, 5, 6]
    assert loaded(*({"session_id": i} for i in ("b", "a", "b")))[1] == [0, 1, 0]
    assert loaded({}, {"hash_ids": [1, 3]}, {"hash_ids": [1]}, {}, session_blocks=2)[1] == [0, 1, 2, 0]
    packed = tmp_path / "trace.jsonl.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert load(packed) == load(path)
    packed.write_bytes(packed.read_bytes()[:-9])
    with pytest.raises(UsageError, match="gz"):
        load(packed)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace"
    path.write_text("".join(json.dumps({"hash_ids": prompt}) + "\n" for prompt in invent("rag", 1, 200).prompts))
    options = ["--shares", "0.5", "--segments", "10", "--references", "lru"]
    assert main([str(path), *options]) == 0
    assert "| lru |" in capsys.readouterr().out
    assert main([str(path), *options, "-o", "json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["version"] == 1 and [r["policy"] for r in report["results"]] == ["lru", "pool"]
    assert main([str(tmp_path / "nothing"), *options]) == 2
