"""kvfs replay: traces are read or refused, an engine's steps those of an exact simulation, the report adds up."""

from __future__ import annotations

import json
import os
import random
import sys
import xml.etree.ElementTree as ElementTree
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from helpers import run

from kvfs import cli
from kvfs.errors import KvfsError, UsageError
from kvfs.replay import engine, plot, report
from kvfs.replay.trace import MODELS, Request, invented_trace, read_trace, unlimited_hits

BLOCK = 8192
GOOD = {"timestamp": 0, "input_length": 1000, "output_length": 5, "hash_ids": [1, 2]}


def invented(count: int, seed: int = 1) -> list[Request]:
    """Prompts that begin like earlier ones and go on differently."""
    draw = random.Random(seed)
    known, prompts, requests = 0, [()], []
    for index in range(count):
        old = draw.choice(prompts[-12:])
        kept, added = old[: draw.randrange(len(old) + 1)], draw.randrange(1, 6)
        prompts.append(kept + tuple(range(known, known + added)))
        known += added
        requests.append(Request(10.0 * index, 512 * len(prompts[-1]), prompts[-1]))
    return requests


def written(path: Path, requests: Sequence[Request]) -> Path:
    path.write_text(
        "".join(
            json.dumps({"timestamp": request.due_ms, "input_length": request.input_tokens, "hash_ids": request.blocks})
            + "\n"
            for request in requests
        )
    )
    return path


def settings(target: Path, **changes: Any) -> engine.Settings:
    """One request and one block at a time, so that the order of everything is known."""
    wanted = {"block_size": BLOCK, "threads": 1, "io_threads": 1, "speed": None, "buffered": True, "verify": True}
    return engine.Settings(target, **{**wanted, **changes})


def files(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.is_file()]


def ended(outcome: engine.Outcome) -> list[engine.Record]:
    return [record for record in outcome.records if record is not None]


# ---- traces ----


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "not JSON"),
        ("\xff", "not UTF-8"),
        ("[1]", "not a JSON object"),
        ("{}", "no timestamp"),
        ({**GOOD, "timestamp": "1"}, 'timestamp "1"'),
        ({**GOOD, "timestamp": -1}, "timestamp -1"),
        ({**GOOD, "timestamp": True}, "timestamp true"),
        ('{"timestamp": NaN, "input_length": 1, "hash_ids": []}', "timestamp NaN"),
        ({**GOOD, "timestamp": 10}, "timestamp 10 is before the last one, 50"),
        ({**GOOD, "input_length": 1.5}, "input_length 1.5"),
        ({**GOOD, "input_length": -7}, "input_length -7"),
        ({**GOOD, "hash_ids": "1,2"}, "hash_ids"),
        ({**GOOD, "hash_ids": [1, "2"]}, '"2" is not a number'),
        ({**GOOD, "hash_ids": [1, -2]}, "-2 is not a number"),
        ({**GOOD, "hash_ids": [1 << 64]}, "is not a number from 0"),
        ({**GOOD, "hash_ids": [4, 5, 4]}, "4 is in it twice"),
        ({"timestamp": 60, "hash_ids": []}, "no input_length"),
        ({"timestamp": 60, "input_length": 3}, "no hash_ids"),
    ],
)
def test_a_malformed_line_is_answered_with_file_and_line(tmp_path: Path, line: object, words: str) -> None:
    path = tmp_path / "trace.jsonl"
    text = line if isinstance(line, str) else json.dumps(line)
    path.write_bytes(json.dumps({**GOOD, "timestamp": 50}).encode() + b"\n\n" + text.encode("latin-1") + b"\n")
    with pytest.raises(UsageError) as caught:
        read_trace(path)
    assert str(caught.value).startswith(f"{path}:3: ") and words in str(caught.value)


def test_a_trace_without_requests_or_without_a_file_is_refused(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.write_text("\n\n")
    with pytest.raises(UsageError, match="no requests"):
        read_trace(empty)
    with pytest.raises(UsageError, match="No such file"):
        read_trace(tmp_path / "none")


def test_a_trace_is_read_as_it_was_written(tmp_path: Path) -> None:
    requests = invented(40)
    assert read_trace(written(tmp_path / "trace", requests)) == requests


def test_hits_without_a_limit_are_the_known_beginnings() -> None:
    first, second = Request(0, 1536, (1, 2, 3)), Request(0, 1536, (1, 2, 4))
    assert unlimited_hits([], [first, second, second]) == 0 + 2 + 3
    assert unlimited_hits([first], [Request(0, 512, (9, 1, 2))]) == 0  # the first miss ends the prefix


# ---- the engine ----


def test_hits_are_those_of_an_exact_simulation(tmp_path: Path) -> None:
    requests = invented(80)
    outcome = engine.replay(settings(tmp_path), requests, requests)
    known: set[int] = set()
    for request, record in zip(requests, ended(outcome), strict=True):
        hits = next((i for i, block in enumerate(request.blocks) if block not in known), len(request.blocks))
        assert (record.found, record.loaded) == (hits, hits)
        assert record.stored == len(set(request.blocks) - known)
        assert record.present == len(request.blocks) - record.loaded - record.stored
        assert (record.lost, record.failed, record.wrong) == (0, 0, 0)
        known |= set(request.blocks)
    assert len(files(tmp_path)) == len(known)
    assert all(path.stat().st_size == BLOCK for path in files(tmp_path))
    assert outcome.load_errors == outcome.store_errors == {} and not outcome.interrupted


def test_many_at_once_lose_and_mix_up_nothing(tmp_path: Path) -> None:
    requests = invented(300)
    for _ in range(2):
        outcome = engine.replay(settings(tmp_path, threads=8, io_threads=8), requests, requests)
        for record in ended(outcome):
            assert record.loaded + record.stored + record.present == len(record.request.blocks)
            assert (record.lost, record.failed, record.wrong) == (0, 0, 0)
    assert all(record.loaded == len(record.request.blocks) for record in ended(outcome))
    assert not [path for path in files(tmp_path) if path.name.endswith(".tmp")]


def test_an_index_in_memory_keeps_the_most_recent(tmp_path: Path) -> None:
    """Against a least-recently-used list in Python, over two runs: the second finds what the first has left."""
    requests, kept = invented(120), 25
    lru: OrderedDict[int, None] = OrderedDict()
    for part in (requests[:60], requests[60:]):
        outcome = engine.replay(settings(tmp_path, lru_bytes=kept * BLOCK), requests, part)
        for request, record in zip(part, ended(outcome), strict=True):
            hits = 0
            for block in request.blocks:
                if block not in lru:
                    break
                lru.move_to_end(block)
                hits += 1
            for block in request.blocks[hits:]:
                if block not in lru:
                    while len(lru) >= kept:
                        lru.popitem(last=False)
                    lru[block] = None
            assert record.found == record.loaded == hits
            assert (record.lost, record.failed, record.wrong) == (0, 0, 0)
        assert len(files(tmp_path)) == len(lru) == kept
        # The second run's list begins in the order of the files' times: uses are forgotten with the engine.
        lru = OrderedDict.fromkeys(block for _, block in sorted(map(_written, files(tmp_path))))


def _written(path: Path) -> tuple[int, int]:
    return path.stat().st_mtime_ns, int(path.name[16:], 16)


def test_other_bytes_than_were_stored_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    requests = invented(5)
    target = tmp_path / "blocks"
    target.mkdir()
    engine.replay(settings(target), requests, requests)
    one = next(path for path in files(target) if int(path.name[16:], 16) == requests[0].blocks[0])
    data = bytearray(one.read_bytes())
    data[BLOCK // 2 + 100] ^= 1
    one.write_bytes(data)
    outcome = engine.replay(settings(target), requests, requests[:1])
    assert [(record.loaded, record.wrong) for record in ended(outcome)] == [(0, 1)]
    words = ["replay", str(written(tmp_path / "t", requests)), "--target", str(target), "--block-size", str(BLOCK)]
    assert cli.main([*words, "--full-speed", "--buffered", "--verify"]) == 1
    assert "not as stored" in capsys.readouterr().err


def test_a_short_file_and_a_store_that_fails_are_counted_by_errno(tmp_path: Path) -> None:
    requests = invented(5)
    engine.replay(settings(tmp_path), requests, requests)
    block = requests[0].blocks[0]
    one = next(path for path in files(tmp_path) if int(path.name[16:], 16) == block)
    one.write_bytes(b"short")
    outcome = engine.replay(settings(tmp_path), requests, requests[:1])
    assert outcome.load_errors == {"EIO": 1} and outcome.records[0] is not None
    assert outcome.records[0].loaded == 0
    for path in files(one.parent):
        path.unlink()
    one.parent.rmdir()
    one.parent.write_text("not a directory")
    outcome = engine.replay(settings(tmp_path), requests, requests[:1])
    assert outcome.store_errors.keys() == {"ENOTDIR"}


def test_requests_begin_at_their_time(tmp_path: Path) -> None:
    requests = [Request(5000.0, 512, (1,)), Request(5300.0, 512, (2,)), Request(5400.0, 512, (3,))]
    outcome = engine.replay(settings(tmp_path, speed=2.0, threads=4), requests, requests)
    starts = [record.start_s for record in ended(outcome)]
    assert starts[0] < starts[1] and starts[1] >= 0.15 and starts[2] >= 0.2


def test_an_interrupt_ends_it_early_and_keeps_what_was_measured(tmp_path: Path) -> None:
    requests = [Request(0.0, 512, (1,)), Request(3_600_000.0, 512, (2,))]

    def interrupt(done: int, total: int) -> None:
        if done == 1:
            raise KeyboardInterrupt

    outcome = engine.replay(settings(tmp_path, speed=1.0), requests, requests, interrupt)
    assert outcome.interrupted and outcome.records[0] is not None and outcome.records[1] is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"block_size": 5000}, r"a block of 4.88K \(5000 bytes\)"),
        ({"block_size": 0}, "a block of 0: a multiple"),
        ({"memory": 4096}, "--memory: 4K cannot hold"),
        ({"lru_bytes": 4096}, "--lru: 4K cannot hold"),
        ({"native": True}, "--native: not together"),
        ({"target": Path("/dev/null")}, "/dev/null: not a directory"),
        ({"target": Path("/proc/self"), "buffered": False}, "/proc/self: no file can be made there"),
    ],
)
def test_what_cannot_be_replayed_is_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    changes = {"target": tmp_path, **changes}
    with pytest.raises(KvfsError, match=words):
        engine.check(settings(changes.pop("target"), **changes))


# ---- what is reported ----


def test_the_report_counts_what_happened(tmp_path: Path) -> None:
    requests = invented(50)
    first = Request(0.0, 1000, (10**6, 10**6 + 1))
    outcome = engine.replay(settings(tmp_path), [first, *requests], [first, *requests])
    made = report.document(
        settings(tmp_path), "t", [], [first, *requests], outcome, prefill_tokens_per_s=1000.0, warmup=0.1
    )
    counted = ended(outcome)[5:]
    assert made["requests"] == len(counted) == 46
    assert made["blocks"]["asked"] == sum(len(record.request.blocks) for record in counted)
    assert made["prefix_hit_ratio"] == made["prefix_hit_ratio_unlimited"] > 0
    assert made["stored_bytes"] == BLOCK * sum(record.stored for record in counted)
    token = made["latency_ms"]["first_token"]
    tokens = [512 * (len(record.request.blocks) - record.loaded) for record in counted]
    assert sum(tokens) / len(tokens) <= token["mean"] < sum(tokens) / len(tokens) + made["seconds"] * 1000
    for line in made["latency_ms"].values():
        assert line["p50"] <= line["p90"] <= line["p99"] <= line["max"]
    assert sum(part["requests"] for part in made["series"]) == len(ended(outcome))
    assert "46 requests" in report.render(made)


def test_a_plot_is_an_svg_with_a_line_for_each_replay(tmp_path: Path) -> None:
    requests = invented(30)
    outcome = engine.replay(settings(tmp_path), requests, requests)
    made = report.document(settings(tmp_path), "t", [], requests, outcome, prefill_tokens_per_s=1.0, warmup=0.0)
    names = ["kvfs", "a <peer> & another"]
    root = ElementTree.fromstring(plot.render(dict.fromkeys(names, made), "a title"))
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"a title", *names} <= set(texts)
    lines = [element.get("points") for element in root.iter("{http://www.w3.org/2000/svg}polyline")]
    assert len(lines) == 3 * len(names) and all(lines)
    ElementTree.fromstring(plot.render({"nothing": {**made, "series": []}}, "empty"))


@pytest.mark.parametrize("end", [0.001, 0.37, 1, 9.99, 60, 61, 777, 86_400])
def test_ticks_are_round_and_few_and_cover_what_they_should(end: float) -> None:
    for inside in (False, True):
        ticks = plot.round_ticks(end, inside=inside)
        step = ticks[1] - ticks[0]
        assert f"{step:.0e}"[0] in "125" and 3 <= len(ticks) <= 10 and ticks[0] == 0
        assert end - step <= ticks[-1] <= end * 1.000001 if inside else end * 0.999999 <= ticks[-1] < end + step
    logs = plot.log_ticks(end, 3 * end)
    assert logs[0] <= end and logs[-1] >= 3 * end and len(logs) <= 6
    assert all(f"{tick:.0e}"[0] in "125" for tick in logs)


def test_no_label_of_a_plot_leaves_it_and_lines_are_told_apart_without_colour(tmp_path: Path) -> None:
    requests = invented(30)
    outcome = engine.replay(settings(tmp_path), requests, requests)
    made = report.document(settings(tmp_path), "t", [], requests, outcome, prefill_tokens_per_s=1.0, warmup=0.0)
    names = [f"/mnt/a/rather/long/path/of/a/directory/number/{index}/where/blocks/are" for index in range(8)]
    root = ElementTree.fromstring(plot.render(dict.fromkeys(names, made), "a title " * 40))
    width, height = float(root.get("width", 0)), float(root.get("height", 0))
    for element in root.iter("{http://www.w3.org/2000/svg}text"):
        size = 6.2 * len(element.text or "") * float(element.get("font-size", 11)) / 11
        x, anchor = float(element.get("x", 0)), element.get("text-anchor", "start")
        left = x - {"start": 0.0, "middle": size / 2, "end": size}[anchor]
        assert left >= 0 and left + size <= width and float(element.get("y", 0)) < height, element.text
    marks = [e.get("d") for e in root.iter("{http://www.w3.org/2000/svg}path") if e.get("transform")]
    assert len(set(marks)) == len(names)


def test_each_failure_has_one_reason() -> None:
    assert report._failures("store", {"EIO": 1, "ENOSPC": 20}) == [
        "20 stores failed: No space left on device (ENOSPC): the target is full, and evicts nothing",
        "1 store failed: Input/output error (EIO): a device failed, or bytes were not what their checksum says",
    ]
    assert report._failures("load", {"999": 2}) == ["2 loads failed: unknown (999)"]


def test_an_estimate_says_how_long_and_how_much_before_anything_is_stored(tmp_path: Path) -> None:
    requests = [Request(0, 512, (1, 2)), Request(90_000, 512, (1, 3))]
    said = report.estimate(settings(tmp_path, block_size=1 << 20, memory=1 << 30, speed=0.5), requests)
    assert said == ("2 requests for 4 blocks, 3 of them different, of 1.00M: 3 min 0 s at least, stores 3.00M at most")
    assert "as fast as it goes" in report.estimate(settings(tmp_path, speed=None), requests)


# ---- the command ----

KEYS = {
    "version", "trace", "target", "engine", "settings", "interrupted", "requests", "seconds", "requests_per_s",
    "blocks", "prefix_hit_ratio", "prefix_hit_ratio_unlimited", "loaded_bytes", "stored_bytes", "load_bytes_per_s",
    "store_bytes_per_s", "latency_ms", "errors", "cpu_s", "series",
}  # fmt: skip


def test_the_command_prints_json_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, target, drawn = written(tmp_path / "trace", invented(40)), tmp_path / "blocks", tmp_path / "plot.svg"
    target.mkdir()
    words = ["replay", str(trace), "--target", str(target), "--bytes-per-token", "8", "--full-speed", "--buffered"]
    words += ["--skip", "10", "--requests", "20", "--plot", str(drawn), "-o", "json"]
    assert cli.main(words) == 0
    document = json.loads(capsys.readouterr().out)
    assert set(document) == KEYS
    assert document["requests"] == 20 and document["settings"]["block_size"] == 512 * 8
    assert document["errors"] == {"load": {}, "store": {}, "wrong": 0}
    ElementTree.parse(drawn)
    assert cli.main(words[:-2]) == 0
    assert capsys.readouterr().out.startswith("20 requests in ")


def test_an_invented_trace_is_replayed_without_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["replay", "--invent", "chats", "--requests", "30", "--target", str(tmp_path / "blocks"), "--buffered"]
    words += ["--bytes-per-token", "8", "--full-speed"]
    assert cli.main(words) == 0
    told = capsys.readouterr()
    assert told.out.startswith("30 requests in ") and told.err.startswith("kvfs: 30 requests for ")
    assert invented_trace("rag", 3, 50) == invented_trace("rag", 3, 50) != invented_trace("rag", 4, 50)
    for wrong in (["--invent", "nothing"], ["trace", "--invent", "rag"], []):
        assert cli.main(["replay", *wrong, "--target", str(tmp_path / "none"), "--block-size", "4K"]) == 2
    assert not (tmp_path / "none").exists()


def test_what_is_reported_is_read_before_its_memory_is_freed(tmp_path: Path) -> None:
    """glibc overwrites what is freed: M_PERTURB of mallopt(3)."""
    trace, target = written(tmp_path / "trace", invented(400)), tmp_path / "blocks"
    words = ["replay", trace, "--target", target, "--block-size", "4K", "--full-speed", "--buffered", "-o", "json"]
    environment = {**os.environ, "MALLOC_PERTURB_": "90"}
    document = json.loads(run(sys.executable, "-m", "kvfs", *words, environment=environment).stdout)
    assert document["requests"] == 400
    counts = document["blocks"]
    assert (
        counts["found"] == counts["loaded"]
        and counts["found"] + counts["stored"] + counts["present"] == counts["asked"]
    )
    assert counts["lost"] == counts["failed"] == counts["wrong"] == 0


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ([], "--model"),
        (["--model", "llama-3-8b", "--block-size", "4K"], "--block-size"),
        (["--model", "gpt-9"], "gpt-9"),
        (["--block-size", "4K", "--full-speed", "--time-scale", "2"], "--time-scale"),
        (["--block-size", "4K", "--time-scale", "0"], "'0'"),
        (["--block-size", "4K", "--warmup", "1"], "'1'"),
        (["--block-size", "4K", "--skip", "9"], "3 requests, 9"),
        (["--block-size", "4K", "--threads", "999"], "--threads: 999"),
        (["--block-size", "4K", "--plot", "x.gif"], "x.gif"),
        (["--block-size", "5000"], "5000"),
    ],
)
def test_a_command_line_that_makes_no_sense_stores_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str], words: str
) -> None:
    trace, target = written(tmp_path / "trace", invented(3)), tmp_path / "blocks"
    target.mkdir()
    try:
        status = cli.main(["replay", str(trace), "--target", str(target), *more])
    except SystemExit as ending:
        status = int(ending.code or 0)
    captured = capsys.readouterr()
    assert (status, captured.out) == (2, "") and words in captured.err and captured.err.count("\n") == 1
    assert files(target) == []


def test_models_are_what_their_blocks_take() -> None:
    assert MODELS["llama-3-8b"] == 2 * 32 * 8 * 128 * 2  # K and V, layers, heads, dimensions, bf16
    assert MODELS["llama-3-70b"] == 2 * 80 * 8 * 128 * 2
    assert MODELS["deepseek-v3"] == 61 * (512 + 64) * 2
    assert all(size * 512 % engine.PAGE == 0 for size in MODELS.values())
