"""The cases of the native path: libkvfs from C and through Python, against raw reads and writes of like devices.

Blocks are put by native_client and known by number: it and python_client.py make the same key of the same number.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benches.common import (
    DEVICE_COUNT,
    GIB,
    KIB,
    RAW_BASE,
    STRIPE_UNIT,
    Json,
    column_at,
    cpu_per_gib,
    latency_points,
    number_at,
    parse_json,
    rates,
    run_command,
)
from benches.report import size_text
from benches.rig import Rig, fio_stripe

DEPTH = 8  # blocks in flight
BATCH = 64  # blocks in a call of get or put
KEYS = 4_096  # in a call of exists
BLOCKS = "native/blocks"
MISSING = 1 << 40  # native_client puts no block of this number, or a higher one


def key_of(number: int) -> bytes:
    """native_client's key of a block: a hash of its number, then the number."""
    return ((number * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF).to_bytes(8) + number.to_bytes(8)


def key_path(directory: Path, number: int) -> Path:
    """Its file in a namespace."""
    name = key_of(number).hex()
    return directory / name[:2] / name


def _passes(rig: Rig) -> int:
    return rig.scale.ram_passes if rig.devices == "zram" else rig.scale.passes


def _block_count(rig: Rig) -> int:
    return rig.scale.working_set // rig.scale.block_size


def _get_words(rig: Rig, **options: object) -> list[object]:
    """Get the blocks of the working set, each `passes` times."""
    size, count = rig.scale.block_size, _block_count(rig)
    rig.stored(BLOCKS, size, count)
    words: list[object] = ["get", "--space", BLOCKS, "--size", size, "--count", count, "--batch", BATCH]
    for name, value in {"depth": DEPTH, "passes": _passes(rig), **options}.items():
        words += [f"--{name}", value]
    return words


def _native(rig: Rig, words: Sequence[object]) -> Callable[[int], Json]:
    """native_client, in another order each round."""
    return lambda index: rig.native(*words, "--seed", 1 + index)


def _python(rig: Rig, words: Sequence[object]) -> Callable[[int], Json]:
    """The same through Python."""

    def run(index: int) -> Json:
        module = [sys.executable, "-m", "benches.python_client"]
        command = [*module, *map(str, words), "--mount", str(rig.kvfs.root), "--seed", str(1 + index)]
        return rig.kvfs.measured(lambda: parse_json(run_command(*command).stdout, "python_client"))

    return run


def _raw(rig: Rig, pattern: str, passes: int, index: int, *, depth: int = DEPTH) -> Json:
    """fio in one process with one ring, `depth` blocks in flight, each cut as kvfs cuts it: a piece a device."""
    scale = rig.scale
    size = scale.write_set if "write" in pattern else scale.working_set
    return fio_stripe(
        pattern,
        rig.raw,
        block_size=scale.block_size // DEVICE_COUNT,
        depth=depth * DEVICE_COUNT,
        size=size,
        passes=passes,
        seed=1 + index,
    )


def _cpu(document: Json) -> float:
    return number_at(document, "client_cpu_s") * GIB / number_at(document, "bytes")


def case_native_read(rig: Rig) -> None:
    """Blocks into host memory, in C and through Python, with and without checksums, against raw fio; and their CPU."""
    scale = rig.scale
    blocks, passes = size_text(scale.block_size), _passes(rig)
    rig.fresh()
    words = _get_words(rig)
    memory = ["checksum", "--size", scale.block_size, "--batch", BATCH, "--passes", passes]
    results = rig.bench.interleave(
        {
            "get": _native(rig, words),
            "raw fio": functools.partial(_raw, rig, "randread", passes),
            "get_into": _python(rig, words),
            "unchecked": _native(rig, [*words, "--no-verify"]),
            "raw fio, 4 jobs": lambda index: rig.raw_fio("randread", index, passes),
            "checksum": _native(rig, memory),
        }
    )
    raw, checksum = results["raw fio"], [_cpu(document) for document in results["checksum"]]
    target = 0.75 if rig.devices == "zram" else 0.97
    for name, told, wanted in (
        ("get", "get in C", target),
        ("get_into", "get_into through Python", target),
        ("unchecked", "get in C, no checksums", None),
    ):
        details = {"cpu": cpu_per_gib(results[name]), "peer_cpu": cpu_per_gib(raw), "checksum_s_per_gib": checksum}
        what = f"{told}, {blocks}, depth {DEPTH}"
        ours = rates(results[name])
        rig.add("native-read", what, "GB/s", ours, "raw fio", rates(raw), "share", wanted, details=details)
    what = f"get in C, {blocks}, depth {DEPTH}"
    many = "raw fio, 4 jobs"
    rig.add("native-read", what, "GB/s", rates(results["get"]), many, rates(results[many]), "share")
    theirs = [_cpu(document) for document in raw]
    ours = [_cpu(document) for document in results["get"]]
    less = [cost - own for cost, own in zip(ours, checksum, strict=True)]
    details = {"get": ours, "checksum": checksum}
    what = f"CPU of get in C less the checksum's, {blocks}"
    rig.add("native-read", what, "s/GiB", less, "raw fio", theirs, "cost", 1.2, details=details)
    rig.add("native-read", f"CPU of the checksum, {blocks}", "s/GiB", checksum)


def case_native_exists(rig: Rig) -> None:
    """Keys a second that exist or do not, among a hundred thousand blocks (`million` has the same among its own)."""
    space, count = "native/exists", rig.scale.exists
    rig.fresh()
    rig.stored(space, 4 * KIB, count, packable=True)
    exists_among(rig, "native-exists", space, count)


def exists_among(rig: Rig, case: str, space: str, count: int) -> None:
    """Every key of a namespace once or more, in random order, then as many missing ones."""
    words = ["exists", "--space", space, "--count", count, "--batch", KEYS]
    words += ["--passes", max(1, 1_000_000 // count) if not rig.bench.quick else 1]
    runs: dict[str, Callable[[int], Json]] = {}
    for kind, flags in (("hits", []), ("misses", ["--missing"])):
        runs[f"C, {kind}"] = _native(rig, [*words, *flags])
        runs[f"Python, {kind}"] = _python(rig, [*words, *flags])
    results = rig.bench.interleave(runs)
    for name, documents in results.items():
        speeds = [number_at(document, "operations") / number_at(document, "seconds") for document in documents]
        target = 1_000_000.0 if name.startswith("C") else 500_000.0
        what = f"exists for {KEYS:,} keys among {count:,}, {name}"
        details = {"latency": latency_points(documents)}
        rig.add(case, what, "keys/s", speeds, target=target, at_most=False, details=details)


def case_native_latency(rig: Rig) -> None:
    """One 64 KiB block at a time, against pread of as much of a raw device, and against the same pages of a raw stripe.

    In many short runs: a disk's latency drifts within seconds by more than the difference sought.
    """
    scale, size = rig.scale, 64 * KIB
    count = max(1, scale.working_set // 16 // size)
    rig.fresh()
    rig.stored("native/small", size, count)
    passes = max(1, scale.reads // 4 // count)
    words = ["get", "--space", "native/small", "--size", size, "--count", count, "--batch", 1, "--depth", 1]
    raw = ["--list", rig.raw_list, "--base", RAW_BASE, "--count", count * passes, "--direct"]

    def pread(index: int) -> Json:
        place = ["--size", size, "--span", count * size // DEVICE_COUNT, "--seed", 1 + index]
        return rig.bench.client("read", *raw, *place)

    def stripe(index: int) -> Json:
        # Header and data: every other one lies on two devices.
        pages = ["--size", 4 * KIB + size, "--span", count * (4 * KIB + size), "--seed", 1 + index]
        return rig.bench.client("stripe", *raw, *pages, "--unit", STRIPE_UNIT)

    runs = {"get": _native(rig, [*words, "--passes", passes]), "raw pread": pread, "raw stripe, 68 KiB": stripe}
    results = rig.bench.interleave(runs, finer=1 if rig.bench.quick else 4)
    for peer in ("raw pread", "raw stripe, 68 KiB"):
        for point in ("mean", "p50", "p99"):
            ours, theirs = (column_at(results[name], "latency_us", point) for name in ("get", peer))
            what = f"get of a {size_text(size)} block, depth 1, {point}"
            wanted = 10.0 if (peer, point != "p99") == ("raw pread", True) else None
            rig.add("native-latency", what, "us", ours, peer, theirs, "extra", wanted)


def case_native_ranges(rig: Rig) -> None:
    """64 KiB out of each block, one at a time, against pread of as much of a raw device.

    In many short runs, as native-latency.
    """
    scale, size = rig.scale, 64 * KIB
    count = _block_count(rig)
    rig.fresh()
    rig.stored(BLOCKS, scale.block_size, count)
    passes = max(1, scale.reads // 4 // count)
    words = ["ranges", "--space", BLOCKS, "--size", scale.block_size, "--count", count, "--part", size]
    raw = ["--list", rig.raw_list, "--base", RAW_BASE, "--count", count * passes, "--direct"]
    place = ["--size", size, "--span", scale.working_set // DEVICE_COUNT]

    def pread(index: int) -> Json:
        return rig.bench.client("read", *raw, *place, "--seed", 1 + index)

    runs = {
        "ranges": _native(rig, [*words, "--batch", 1, "--depth", 1, "--passes", passes]),
        "raw pread": pread,
    }
    results = rig.bench.interleave(runs, finer=1 if rig.bench.quick else 4)
    for point in ("mean", "p50", "p99"):
        ours, theirs = (column_at(results[name], "latency_us", point) for name in runs)
        what = f"{size_text(size)} of a block of {size_text(scale.block_size)}, depth 1, {point}"
        wanted = 15.0 if point != "p99" else None
        rig.add("native-ranges", what, "us", ours, "raw pread", theirs, "extra", wanted)


def case_native_queue(rig: Rig) -> None:
    """One thread that keeps 64 blocks in flight by a queue, against raw fio with as many."""
    depth = 64
    rig.fresh()
    words = _get_words(rig, depth=depth)
    words[0], words[words.index("--batch") + 1] = "queue", 1
    raw = functools.partial(_raw, rig, "randread", _passes(rig), depth=depth)
    results = rig.bench.interleave({"queue": _native(rig, words), "raw fio": raw})
    what = f"a queue in C, {size_text(rig.scale.block_size)}, {depth} in flight"
    details = {"cpu": cpu_per_gib(results["queue"]), "peer_cpu": cpu_per_gib(results["raw fio"])}
    ours, theirs = rates(results["queue"]), rates(results["raw fio"])
    rig.add("native-queue", what, "GB/s", ours, "raw fio", theirs, "share", 0.95, details=details)


def case_native_put(rig: Rig) -> None:
    """Batches of blocks from memory, against raw sequential writes: into an empty pool, then into a full one."""
    scale = rig.scale
    count = scale.write_set // scale.block_size
    written = 0

    def put() -> Json:
        nonlocal written
        words = ["--space", "native/put", "--size", scale.block_size, "--batch", BATCH, "--depth", DEPTH]
        document = rig.native("put", *words, "--count", count, "--first", written)
        written += count
        return document

    def settled(run: Callable[[], Json]) -> Json:
        document = run()
        time.sleep(scale.settle_s)  # for the last summaries, and the disk's delayed writes
        return document

    def put_into_empty(index: int) -> Json:
        nonlocal written
        rig.fresh()
        written = 0
        return settled(put)

    def raw(index: int) -> Json:
        return settled(functools.partial(_raw, rig, "write", 1, index))

    # The segments of a pool of 4 GiB are of 16 MiB: each is opened, closed and freed for eight blocks.
    large = (DEVICE_COUNT * scale.device_size).bit_length() - 6
    large_name = f"full pool of {size_text(1 << large)} segments, evicting"
    for state in ("empty pool", "full pool, evicting", large_name):
        run = put_into_empty if state == "empty pool" else lambda index: settled(put)
        if state == large_name:
            rig.fresh(1 << large)
            written = 0
        while state != "empty pool" and written * scale.block_size < DEVICE_COUNT * scale.device_size * 11 // 10:
            put()
        results = rig.bench.interleave({"put": run, "raw fio": raw})
        details = {"cpu": cpu_per_gib(results["put"]), "peer_cpu": cpu_per_gib(results["raw fio"])}
        what = f"put in C, {size_text(scale.block_size)}, {BATCH} a batch, depth {DEPTH}, {state}"
        target = 0.9 if rig.devices == "files" else None
        ours, theirs = rates(results["put"]), rates(results["raw fio"])
        rig.add("native-put", what, "GB/s", ours, "raw fio", theirs, "share", target, details=details)


def case_native_processes(rig: Rig) -> None:
    """Eight client processes together, against one with as many blocks in flight."""
    rig.fresh()
    for depth in (1, 8):
        passes = max(1, _passes(rig) // 2)
        many = _get_words(rig, processes=8, depth=depth, passes=passes)
        one = _get_words(rig, depth=8 * depth, passes=passes)
        peer = f"one process, depth {8 * depth}"
        results = rig.bench.interleave({"eight": _native(rig, many), peer: _native(rig, one)})
        details = {"cpu": cpu_per_gib(results["eight"]), "peer_cpu": cpu_per_gib(results[peer])}
        what = f"8 processes, get in C, {size_text(rig.scale.block_size)}, depth {depth} each"
        ours, theirs = rates(results["eight"]), rates(results[peer])
        rig.add("native-processes", what, "GB/s", ours, peer, theirs, "share", 1.0, details=details)
