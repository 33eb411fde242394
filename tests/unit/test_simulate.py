"""The simulator: its references on traces that can be followed by hand, and the pool's policy on invented ones. It also
runs on a recorded trace where KVFS_TRACE names it."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Mapping
from pathlib import Path
from random import Random

import pytest
from helpers import slow
from hypothesis import given
from hypothesis import strategies as st

from benches.pod import SILENT, Feed, Pod, spread
from benches.simulate import (
    REFERENCES,
    foreseen,
    lru,
    main,
    podded,
    real,
    reference,
    segmented,
    separate,
    unique_blocks,
)
from benches.traces import load, mix
from kvfs.errors import UsageError
from kvfs.replay.invent import SHAPES, Trace, invent
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


def test_of_a_chain_the_tail_goes_first() -> None:
    trace = [[1, 2, 3], [4], [1, 2, 3]]
    # LRU drives the head out, and nothing behind it counts.
    assert [hits(name, trace, 3) for name in ("lru", "lru-tail-first", "belady")] == [0, 2, 3]


def test_traces_side_by_side_have_nothing_in_common() -> None:
    one, two = Trace([[1], [1, 2]], [0.0, 10.0], [0, 0]), Trace([[1], [2], [1]], [5.0, 6.0, 7.0], [0, 1, 0])
    both = mix([one, two])
    assert both.prompts == [[2], [3], [5], [2, 4], [3]] and both.times_s == [0, 0, 5, 10, 10]
    assert both.sessions == [0, 1, 2, 0, 1] and mix([one]) == one
    assert mix([one, Trace([[7]], [3.0], None)]).sessions is None
    assert unique_blocks(both.prompts) == 4


@pytest.mark.parametrize("shape", [slow("agents"), "rag"])
def test_a_choice_of_segments_that_knows_the_trace_finds_more(shape: str) -> None:
    prompts = invent(shape, 1, 1500).prompts
    capacity = unique_blocks(prompts) // 10
    pool, found = segmented(prompts, capacity, 60), foreseen(prompts, capacity, 60)
    assert pool.hits < found.hits < reference("belady", prompts, capacity).hits
    assert found.stored < found.written <= (1 + CARRY_SHARE) * found.stored


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
    slow("rag", 0.05, 0.98), slow("rag", 0.1, 0.98), ("chats", 0.25, 0.98), slow("mixed", 0.25, 0.98),
    slow("agents", 0.1, 0.88),
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


# ---- a pod ----

PART = 16  # blocks of a node, two in a segment


def pod_of(nodes: int, feed: Feed) -> Pod:
    return Pod(PART * nodes, 8, nodes, feed, Random(1))


def test_another_node_finds_a_block_once_it_has_heard_of_it() -> None:
    pod = pod_of(2, Feed(delay_s=0.02))
    pod.request(0, [1, 2], 5)
    pod.request(1, [1, 2], 5.03)
    assert pod.hits == pod.others == 2 and not pod.pools[1].stored
    pod.request(0, [1, 2], 5.03)
    assert (pod.hits, pod.others, pod.stale) == (4, 2, 0)


def test_of_two_that_store_one_key_at_once_the_higher_version_stays() -> None:
    pod = pod_of(2, Feed(delay_s=0.02))
    pod.request(0, [1], 5)
    pod.request(1, [1], 5.01)
    assert pod.hits == 0 and all(1 in pool.slots for pool in pod.pools)
    pod.request(0, [], 5.04)
    # One counter for both: the node's number decides.
    assert [1 in pool.slots for pool in pod.pools] == [False, True] and pod.dropped == 1
    pod.request(0, [1], 5.05)
    assert pod.hits == pod.others == 1


def test_a_block_that_its_owner_has_evicted_is_a_miss_once() -> None:
    pod = pod_of(2, Feed(delay_s=0.02))
    pod.request(0, [1], 0)
    pod.request(0, list(range(100, 150)), 1)
    pod.request(1, [1], 1.01)
    assert pod.hits == 0 and pod.stale == 1
    pod.request(0, [1], 2)
    assert pod.hits == pod.others == 1 and pod.stale == 1


def test_an_owner_hears_of_hits_within_a_second_as_far_as_it_is_told() -> None:
    for share, hits in ((1, 1), (0, 0)):
        pod = pod_of(2, Feed(delay_s=0.02, hit_share=share))
        pod.request(0, [1], 5)
        pod.request(1, [1], 5.5)
        pod.request(1, [], 6.01)
        assert pod.pools[0].use(1)[1] == 0
        pod.request(1, [], 6.03)
        assert pod.pools[0].use(1)[1] == hits


def test_without_the_engine_a_node_finds_its_own_blocks_and_those_it_had_heard_of() -> None:
    pod = pod_of(2, Feed(until_s=5))
    pod.request(0, [1], 4.99)
    pod.request(0, [2], 5.01)
    pod.request(1, [1], 9)
    assert pod.hits == pod.others == 1
    pod.request(1, [2], 9)
    pod.request(1, [2], 9)
    pod.request(0, [2], 9)
    assert (pod.hits, pod.others, pod.dropped) == (3, 1, 0)
    # Nobody hears that the owner has evicted it.
    pod.request(0, list(range(100, 150)), 10)
    pod.request(1, [1], 99)
    assert pod.stale == 1


requests = st.lists(
    st.tuples(st.integers(0, 2), st.lists(st.integers(0, 60), max_size=30, unique=True), st.floats(0, 0.03)),
    max_size=60,
)


@given(requests)
def test_at_rest_every_block_is_on_one_node_and_all_know_where(requests: list[tuple[int, list[int], float]]) -> None:
    pod = pod_of(3, Feed(delay_s=0.02, hits_every_s=0.05, hit_share=0.5))
    now_s = 0.0
    for node, prompt, pause_s in requests:
        now_s += pause_s
        pod.request(node, prompt, now_s)
    pod.request(0, [], now_s + 10)
    assert {block: list(copies.values()) for block, copies in pod.copies.items()} == {
        block: [place] for block, place in pod.known.items()
    }
    for node, pool in enumerate(pod.pools):
        assert set(pool.slots) == {block for block, place in pod.known.items() if place.node == node}
        assert len(pool.slots) <= PART


def test_sessions_stay_on_a_node_with_the_chance_that_is_asked_for() -> None:
    trace = invent("chats", 1, 2000)
    assert trace.sessions is not None

    def moves(sticky: float) -> float:
        on: dict[int, int] = {}
        further = moved = 0
        for session, node in zip(trace.sessions or (), spread(trace, 8, sticky, Random(1)), strict=True):
            further += session in on
            moved += on.get(session, node) != node
            on[session] = node
        return moved / further

    assert moves(1) == 0 and moves(0) == 1 and 0.05 < moves(0.9) < 0.15
    apart = Trace(trace.prompts, trace.times_s, None)
    assert list(spread(apart, 3, 0.9, Random(1)))[:5] == [0, 1, 2, 0, 1]


def test_a_pod_of_one_node_is_the_pool_and_separate_pools_are_pools() -> None:
    trace = invent("rag", 1, 1000)
    capacity = unique_blocks(trace.prompts) // 10
    pool = segmented(trace.prompts, capacity, 40)
    for one in (podded(trace, [0] * 1000, capacity, 40, 1, Feed()), separate(trace, [0] * 1000, capacity, 40, 1)):
        assert (one.hits, one.stored, one.written, one.others) == (pool.hits, pool.stored, pool.written, 0)
    on = list(spread(trace, 4, 0.9, Random(1)))
    apart = separate(trace, on, capacity, 10, 4)
    pools = [
        segmented([prompt for prompt, node in zip(trace.prompts, on, strict=True) if node == i], capacity // 4, 10)
        for i in range(4)
    ]
    assert apart.hits == sum(pool.hits for pool in pools) and apart.written == sum(pool.written for pool in pools)


@pytest.mark.parametrize("shape", [slow("chats"), slow("rag")])
def test_a_pod_finds_more_than_separate_pools_and_little_less_than_one(shape: str) -> None:
    trace = invent(shape, 1, 1200)
    capacity = unique_blocks(trace.prompts) // 10
    on = list(spread(trace, 4, 0.9, Random(1)))
    pool = segmented(trace.prompts, capacity, 30)
    apart = separate(trace, on, capacity, 30, 4)
    pod = podded(trace, on, capacity, 30, 4, Feed())
    assert apart.hits < pod.hits and 0.9 * pool.hits < pod.hits < 1.05 * pool.hits
    assert pod.stored < apart.stored and 0 < pod.others < pod.hits
    assert podded(trace, on, capacity, 30, 4, SILENT).hits == apart.hits


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


def test_the_command_with_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--invent", "chats", "--requests", "300", "--sessions", "20", "--shares", "0.5", "--references", ""]
    assert main([*options, "--segments", "8", "--nodes", "2,4", "--engine-lost", "0.5", "--news-ms", "5"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[0] for line in lines[2:]] == [
        "| pool", "| 2 separate pools", "| pod of 2", "| 4 separate pools", "| pod of 4",
    ]  # fmt: skip
    assert len({line.count("|") for line in lines}) == 1
    assert main([*options, "--segments", "8", "--nodes", "2", "-o", "json"]) == 0
    results = json.loads(capsys.readouterr().out)["results"]
    assert [(r["policy"], r["nodes"]) for r in results] == [("pool", 1), ("separate pools", 2), ("pod", 2)]
    assert results[2]["others"] > 0
    assert main([*options, "--segments", "7", "--nodes", "2"]) == 2
    assert "at least 8" in capsys.readouterr().err
    for wrong in (["--nodes", "0"], ["--sticky", "2"], ["--news-ms", "-1"], ["--engine-lost", "x"]):
        with pytest.raises(SystemExit):
            main([*options, *wrong])
