"""A trace replayed at full speed on kvfs, by files and by libkvfs, and on its alternatives of today, at the same
capacity.

Each round is the next part of the trace, and every side replays it in turn, with the blocks that it kept from earlier
rounds. The first part fills them and is not counted.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benches.common import (
    DEVICE_COUNT,
    GIB,
    MIB,
    BenchError,
    Json,
    MissingError,
    column_at,
    cpu_s,
    number_at,
    parse_json,
    run_command,
    say,
)
from benches.report import size_text
from benches.rig import Kvfs, Rig, Side, disk_files, filesystem, loops
from kvfs.replay import plot

HIGH, LOW = 0.9, 0.8
# btrfs stripes over no smaller devices, and XFS makes no smaller filesystem of four.
DEVICE_MIN = 128 * MIB
KVFS, NATIVE = "kvfs", "kvfs native"
IN_MEMORY = "ext4, LRU in memory"
# Shares of the requests a second of the best filesystem with a deletion script; a load is to be no slower than there.
TARGETS = {KVFS: 0.85, NATIVE: 0.95}
# Blocks that a peer may refuse for want of room, of the twenty or so of a request.
REFUSED_MOST = 1


@dataclass(frozen=True, slots=True)
class ReplaySide:
    """words: further arguments of `kvfs replay`. lru_script: whether an LRU script deletes files beside it. server: the
    process that serves the target."""

    name: str
    target: Path
    words: tuple[str, ...] = ()
    lru_script: bool = False
    server: int | None = None


def case_replay(rig: Rig) -> None:
    """On four devices, then on one of their total size, to show the part of striping."""
    with contextlib.ExitStack() as stack:
        trace = rig.bench.trace
        if trace is None:
            if not rig.bench.quick:
                raise MissingError("needs --trace FILE: a trace of requests as `kvfs replay` takes it")
            trace = rig.base / "invented.jsonl"
            trace.write_text(invented_trace((rig.scale.rounds + 1) * rig.scale.replay_requests))
            stack.callback(trace.unlink)
        for count in (DEVICE_COUNT, 1):
            _replay_on(rig, trace, count)


def _replay_on(rig: Rig, trace: Path, count: int) -> None:
    size = max(rig.scale.device_size, DEVICE_MIN)
    places = f"{count} devices" if count > 1 else f"one device of {size_text(size * DEVICE_COUNT)}"
    with contextlib.ExitStack() as stack:
        sides = _sides(rig, stack, count, size * DEVICE_COUNT // count)
        for side in sides:
            say(f"replay on {places}: {side.name} is filled")
            _run(rig, trace, side, 0)
        results = rig.bench.interleave(
            {side.name: lambda index, side=side: _run(rig, trace, side, index + 1) for side in sides}  # type: ignore[misc]
        )
    _add_rows(rig, places, results)
    if rig.bench.plots is not None:
        rig.bench.plots.mkdir(parents=True, exist_ok=True)
        path = rig.bench.plots / f"replay-{count}-device{'s' if count > 1 else ''}.svg"
        title = f"{trace.name}, {size_text(rig.scale.replay_block)} blocks, {places}"
        path.write_text(plot.render({name: _joined(documents) for name, documents in results.items()}, title))
        say(f"replay on {places}: drawn in {path}")


def _sides(rig: Rig, stack: contextlib.ExitStack, count: int, size: int) -> list[ReplaySide]:
    """Each has devices of its own, which are loop devices on every side: ext4 and XFS on one of the total size."""
    base = rig.base

    def devices(name: str, number: int, each: int) -> list[Path]:
        paths = stack.enter_context(disk_files(base, f"replay-{count}-{name}", number, each))
        return stack.enter_context(loops(paths))

    def mounted(name: str) -> Side:
        kvfs = Kvfs(base / f"replay-{count}-{name}", devices(name, count, size))
        stack.callback(kvfs.stop)
        kvfs.format()
        return kvfs.mount()

    by_files, native = mounted("kvfs"), mounted("native")
    sides = [
        ReplaySide(KVFS, by_files.root, server=by_files.pid),
        ReplaySide(NATIVE, native.root, ("--native",), server=native.pid),
    ]
    for kind, name, numbers in (
        ("ext4", "ext4", 1),
        ("xfs", "XFS", 1),
        ("btrfs", "btrfs raid0" if count > 1 else "btrfs", count),
        ("ext4", IN_MEMORY, 1),
    ):
        tag = name.replace(" ", "-").replace(",", "")
        try:
            made = devices(tag, numbers, size * count // numbers)
            root = stack.enter_context(filesystem(kind, made, base / f"replay-{count}-{tag}-mount"))
        except MissingError as error:
            rig.bench.skip(f"replay: {name}", rig.devices, str(error))
            continue
        if name == IN_MEMORY:
            # An engine's own index, as LMCache's LocalDisk keeps: it deletes the least recently used files.
            kept = int(HIGH * os.statvfs(root).f_bfree * os.statvfs(root).f_frsize)
            sides.append(ReplaySide(name, root, ("--lru", str(kept))))
        else:
            sides.append(ReplaySide(name, root, ("--touch",), lru_script=True))
    return sides


@contextlib.contextmanager
def lru_script(directory: Path) -> Iterator[int]:
    """Yields its process."""
    words = [sys.executable, "-m", "benches.lru_script", str(directory), "--high", str(HIGH), "--low", str(LOW)]
    process = subprocess.Popen(words, stdin=subprocess.DEVNULL)
    try:
        yield process.pid
        if process.poll() is not None:
            raise BenchError(f"the janitor of {directory} ended with {process.returncode}")
    finally:
        process.kill()
        process.wait()


def _run(rig: Rig, trace: Path, side: ReplaySide, part: int) -> Json:
    """One part of the trace on a side."""
    scale = rig.scale
    words = ["replay", str(trace), "--target", str(side.target), "--block-size", str(scale.replay_block)]
    words += ["--full-speed", "--threads", "4", "--io-threads", "16", "-o", "json", *side.words]
    words += ["--skip", str(part * scale.replay_requests), "--requests", str(scale.replay_requests)]
    with contextlib.ExitStack() as stack:
        beside = [] if side.server is None else [side.server]
        if side.lru_script:
            beside.append(stack.enter_context(lru_script(side.target)))
        before = sum(map(cpu_s, beside))
        result = run_command(sys.executable, "-m", "kvfs", *words)
        used = sum(map(cpu_s, beside)) - before
    document = parse_json(result.stdout, f"kvfs replay on {side.name}")
    used += number_at(document, "cpu_s", "user") + number_at(document, "cpu_s", "system")
    moved = number_at(document, "stored_bytes") + number_at(document, "loaded_bytes")
    document["cpu_ms_per_block"] = 1000 * used / max(1.0, moved / scale.replay_block)
    if number_at(document, "errors", "wrong"):
        raise BenchError(f"replay on {side.name}: blocks came back as other bytes")
    return document


def _add_rows(rig: Rig, places: str, results: dict[str, list[Json]]) -> None:
    peers = [name for name in results if name not in (KVFS, NATIVE)]
    speeds = {name: column_at(documents, "requests_per_s") for name, documents in results.items()}
    loads = {name: column_at(documents, "latency_ms", "load", "p99") for name, documents in results.items()}
    hits = {name: column_at(documents, "prefix_hit_ratio") for name, documents in results.items()}
    # CPU of the client, and of the processes that serve the target or delete there; not of the kernel's own threads.
    spent = {name: column_at(documents, "cpu_ms_per_block") for name, documents in results.items()}
    scripts = [name for name in peers if name != IN_MEMORY and _stores(results[name])]
    best = max(scripts, key=lambda name: statistics.median(speeds[name]), default=None)
    for ours in (KVFS, NATIVE):
        how = "by files" if ours == KVFS else "by libkvfs"
        for peer in peers:
            first = peer == best
            details = {name: _details(results[name]) for name in (ours, peer)}
            add = functools.partial(rig.add, "replay", details=details)
            what = f"requests a second, {how}, {places}"
            add(what, "/s", speeds[ours], peer, speeds[peer], "share", TARGETS[ours] if first else None)
            what = f"p99 of a request's load, {how}, {places}"
            add(what, "ms", loads[ours], peer, loads[peer], "faster", 1.0 if first else None)
            what = f"CPU of a block stored or loaded, {how}, {places}"
            add(what, "ms", spent[ours], peer, spent[peer], "cost")
            what = f"prefix hit ratio, {how}, {places}"
            add(what, "of blocks", hits[ours], peer, hits[peer], "share")


def _stores(documents: Sequence[Json]) -> bool:
    """Whether a side stored what it was asked to. One that has no room for most of it is fast, and no peer."""
    refused = 0.0
    for document in documents:
        errors = document["errors"]
        assert isinstance(errors, dict)
        refused += sum(errors["store"].values())
    return refused <= REFUSED_MOST * sum(column_at(documents, "requests"))


def _details(documents: Sequence[Json]) -> Json:
    """Medians over the rounds, and the failures of all of them."""
    paths = {
        "hit_ratio": ("prefix_hit_ratio",),
        "hit_ratio_unlimited": ("prefix_hit_ratio_unlimited",),
        "lookup_p99_ms": ("latency_ms", "lookup", "p99"),
        "load_p50_ms": ("latency_ms", "load", "p50"),
        "store_p99_ms": ("latency_ms", "store", "p99"),
        "first_token_p50_ms": ("latency_ms", "first_token", "p50"),
        "stored_gib": ("stored_bytes",),
    }
    medians = {name: statistics.median(column_at(documents, *path)) for name, path in paths.items()}
    medians["stored_gib"] /= GIB
    return {**medians, "errors": [document["errors"] for document in documents]}


def _joined(documents: Sequence[Json]) -> Json:
    """The rounds of a side one after the other, for a plot."""
    series: list[Json] = []
    start = 0.0
    for document in documents:
        parts = document["series"]
        assert isinstance(parts, list)
        series += [{**part, "s": start + number_at(part, "s")} for part in parts]
        start += number_at(document, "seconds")
    return {"series": series}


def invented_trace(count: int) -> str:
    """Requests of conversations that go on, for --quick: turns of a few blocks each, on a few common beginnings."""
    draw = random.Random(1)
    conversations: list[list[int]] = []
    lines, known = [], 8
    for index in range(count):
        if not conversations or draw.random() < 0.5:
            conversations.append([draw.randrange(8)])
        blocks = draw.choice(conversations[-20:])
        added = draw.randrange(1, 16)
        blocks += range(known, known + added)
        known += added
        lines.append(
            json.dumps(
                {"timestamp": 20 * index, "input_length": 512 * len(blocks), "output_length": 1, "hash_ids": blocks}
            )
        )
    return "\n".join(lines) + "\n"
