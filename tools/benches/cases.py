"""The cases: the work on each side, and how the two sides are compared."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benches.common import (
    DEVICE_COUNT,
    KIB,
    MIB,
    RAW_BASE,
    STRIPE_UNIT,
    BenchError,
    Json,
    column_at,
    cpu_per_gib,
    forget_names,
    latency_points,
    number_at,
    rates,
    say,
    wait_until,
)
from benches.native import (
    case_native_exists,
    case_native_latency,
    case_native_processes,
    case_native_put,
    case_native_queue,
    case_native_ranges,
    case_native_read,
    exists_among,
    key_path,
)
from benches.nvme import case_nvme
from benches.replay import case_replay
from benches.report import size_text
from benches.rig import Kvfs, Rig, Side
from benches.slab import case_slab
from benches.take_over import case_take_over
from benches.vhost import case_vhost
from benches.virtiofs import case_virtiofs

# ---- the cases ----


def _interleaved(
    rig: Rig,
    run: Callable[[Side, int], Json],
    others: Sequence[Side],
    raw: Mapping[str, Callable[[int], Json]] = {},
) -> dict[str, list[Json]]:
    """Rounds of kvfs, the other filesystems, and raw jobs, by name."""
    runs: dict[str, Callable[[int], Json]] = {}
    for side in (rig.kvfs, *others):
        runs[side.name] = functools.partial(run, side)
    return rig.bench.interleave({**runs, **raw})


def case_random_read(rig: Rig) -> None:
    """4 KiB O_DIRECT reads at random places of open, sealed blocks, one thread."""
    bench, scale = rig.bench, rig.scale
    count = scale.working_set // scale.block_size

    def words(listed: Path, index: int) -> list[object]:
        return ["read", "--list", listed, "--size", 4 * KIB, "--count", scale.reads, "--direct", "--seed", 1 + index]

    def read(side: Side, index: int) -> Json:
        blocks = rig.filled(side, "blocks", scale.block_size, count)
        return side.measured(lambda: bench.client(*words(blocks, index)))

    def raw(index: int) -> Json:
        return bench.client(
            *words(rig.raw_list, index), "--base", RAW_BASE, "--span", scale.working_set // DEVICE_COUNT
        )

    if rig.devices == "zram":
        peer, relation, target = rig.peer.name, "faster", 2.5
        results = _interleaved(rig, read, [rig.peer])
        _same_bytes(results)
    else:
        peer, relation, target = "raw pread", "extra", 20.0
        results = _interleaved(rig, read, [], {peer: raw})
    details = {
        "daemon_cpu_us_per_read": sum(column_at(results["kvfs"], "daemon_cpu_s")) * 1e6 / scale.reads / scale.rounds
    }
    for point in ("mean", "p50", "p99"):
        ours, theirs = (column_at(results[name], "latency_us", point) for name in ("kvfs", peer))
        what = f"4 KiB O_DIRECT read, 1 thread, {point}"
        wanted = target if point != "p99" else None
        rig.add("random-read", what, "us", ours, peer, theirs, relation, wanted, details=details)


def case_lookup(rig: Rig) -> None:
    """A stat that fails (another name each time), and open and close of a file that is there."""
    bench, scale = rig.bench, rig.scale
    count = min(scale.lookups, 2_000)

    def names(side: Side) -> Path:
        return rig.filled(side, "names", 4 * KIB, count)

    def stat(side: Side, index: int) -> Json:
        known = side is not rig.floor
        directory = Path(names(side).read_text().split("\n", 1)[0]).parent if known else side.root
        return bench.client("stat", "--dir", directory, "--count", scale.lookups, "--seed", _unused())

    def open_known(side: Side, index: int) -> Json:
        bench.client("open", "--list", names(side), "--count", count)  # the kernel knows the names now
        return bench.client("open", "--list", names(side), "--count", scale.lookups)

    def open_unknown(side: Side, index: int) -> Json:
        listed = names(side)
        forget_names()
        return bench.client("open", "--list", listed, "--count", count)

    peer = rig.peer.name
    for what, run, target in (
        ("stat of a missing name", stat, 5.0),
        ("open and close", open_known, 5.0),
        ("open and close, name not cached", open_unknown, None),
    ):
        floor = [rig.floor] if run is stat else []
        results = _interleaved(rig, run, [rig.peer, *floor])
        ours, theirs = (column_at(results[name], "latency_us", "mean") for name in ("kvfs", peer))
        details = {"latency": latency_points(results["kvfs"]), "peer_latency": latency_points(results[peer])}
        rig.add("lookup", f"{what}, 1 thread, mean", "us", ours, peer, theirs, "faster", target, details=details)
        for side in floor:
            bare = column_at(results[side.name], "latency_us", "mean")
            rig.add("lookup", f"{what}, 1 thread, mean", "us", ours, side.name, bare, "faster")


def case_rings(rig: Rig) -> None:
    """FUSE over io_uring beside /dev/fuse: a stat that fails, blocks of 512 KiB stored and read, daemon CPU."""
    scale, rings = rig.scale, rig.rings
    count = min(400, scale.working_set // (512 * KIB))  # more would evict what other cases read

    def stat(side: Side, index: int) -> Json:
        return side.measured(
            lambda: rig.bench.client("stat", "--dir", side.root, "--count", scale.lookups, "--seed", _unused())
        )

    def store(threads: int, side: Side, index: int) -> Json:
        return rig.write(side, "stored", size=512 * KIB, count=count, threads=threads, modulo=count)

    def read(side: Side, index: int) -> Json:
        words = ["--size", 512 * KIB, "--count", count, "--threads", 1, "--direct", "--seed", 1 + index]
        return side.measured(
            lambda: rig.bench.client("blocks", "--list", rig.filled(side, "read", 512 * KIB, count), *words)
        )

    def cpu_us(documents: Sequence[Json]) -> list[float]:  # the kernel counts in ticks of 10 ms
        return [max(number_at(each, "daemon_cpu_s"), 0.01) / number_at(each, "operations") * 1e6 for each in documents]

    results = _interleaved(rig, stat, [rings, rig.peer, rig.floor])
    ours = column_at(results[rings.name], "latency_us", "mean")
    for name, target in (("kvfs", None), (rig.peer.name, 3.0), (rig.floor.name, 2.0)):
        theirs = column_at(results[name], "latency_us", "mean")
        rig.add("rings", "stat of a missing name, 1 thread, mean", "us", ours, name, theirs, "faster", target)
    ours, theirs = cpu_us(results[rings.name]), cpu_us(results["kvfs"])
    rig.add("rings", "stat of a missing name, daemon CPU each", "us", ours, "kvfs", theirs, "faster")
    for threads, target in ((1, 2.5), (16, None)):
        results = _interleaved(rig, functools.partial(store, threads), [rings])
        what = f"512 KiB tmp-write-rename, threads: {threads}"
        ours, theirs = rates(results[rings.name]), rates(results["kvfs"])
        rig.add("rings", what, "GB/s", ours, "kvfs", theirs, "share", target)
    results = _interleaved(rig, read, [rings])
    ours, theirs = rates(results[rings.name]), rates(results["kvfs"])
    rig.add("rings", "512 KiB open-read-close, 1 thread", "GB/s", ours, "kvfs", theirs, "share")


def case_prompt(rig: Rig) -> None:
    """vLLM's calls for one prompt: faccessat of each block's path, half of them missing, no name cached."""
    bench, scale = rig.bench, rig.scale
    half = scale.prompt // 2

    def access(side: Side, index: int) -> Json:
        present = rig.filled(side, "prompt", 4 * KIB, half).read_text().splitlines()
        tag = f"{_unused():x}"
        listed = rig.base / "prompt.list"
        listed.write_text("".join(f"{path}\n{path}-{tag}\n" for path in present))
        forget_names()
        document = bench.client("access", "--list", listed, "--count", 2 * half)
        if number_at(document, "found") != half:
            raise BenchError(f"{side.name}: {document['found']} of {half} blocks found")
        return document

    peer = rig.peer.name
    results = _interleaved(rig, access, [rig.peer])
    ours, theirs = ([value * 1000 for value in column_at(results[name], "seconds")] for name in ("kvfs", peer))
    what = f"{2 * half} faccessat, half missing"
    rig.add("prompt", what, "ms", ours, target=100.0)
    rig.add("prompt", what, "ms", ours, peer, theirs, "faster")


def case_large_read(rig: Rig) -> None:
    """1 and 4 MiB O_DIRECT reads of open, sealed blocks, one thread: against the peer, the raw stripe, and raid0."""
    bench, scale = rig.bench, rig.scale
    count = max(2, scale.working_set // scale.large_file)
    for size in (MIB, 4 * MIB):
        words = ["--size", size, "--count", max(8, scale.working_set // size), "--direct"]

        def read(side: Side, index: int, words: list[object] = words) -> Json:
            blocks = rig.filled(side, "large", scale.large_file, count)
            return side.measured(lambda: bench.client("read", "--list", blocks, "--seed", 1 + index, *words))

        def raw(index: int, words: list[object] = words) -> Json:
            place = ["--unit", STRIPE_UNIT, "--base", RAW_BASE, "--span", scale.working_set]
            return bench.client("stripe", "--list", rig.raw_list, "--seed", 1 + index, *place, *words)

        others = [rig.peer, *rig.striped] if rig.devices == "zram" else rig.striped
        results = _interleaved(rig, read, others, {"raw stripe": raw})
        _same_bytes(results, but="raw stripe")
        targets = {("zram", "passthrough_hp/ext4"): 2.0, ("files", "raw stripe"): 0.9}
        for name in list(results)[1:]:
            details = {"latency": latency_points(results["kvfs"]), "peer_latency": latency_points(results[name])}
            what, target = f"{size // MIB} MiB O_DIRECT reads, 1 thread", targets.get((rig.devices, name))
            ours, theirs = rates(results["kvfs"]), rates(results[name])
            rig.add("large-read", what, "GB/s", ours, name, theirs, "share", target, details=details)


def case_block_read(rig: Rig) -> None:
    """Whole blocks, open-read-close, many threads: against raw fio of the same size and total depth, and raid0."""
    bench, scale = rig.bench, rig.scale
    count = scale.working_set // scale.block_size
    words = ["--size", scale.block_size, "--count", count, "--threads", scale.threads, "--direct"]

    def read(side: Side, index: int) -> Json:
        blocks = rig.filled(side, "blocks", scale.block_size, count)
        digest = ["--digest"] if index == 0 else []
        return side.measured(lambda: bench.client("blocks", "--list", blocks, "--seed", 1 + index, *words, *digest))

    results = _interleaved(rig, read, rig.striped, {"raw fio": functools.partial(rig.raw_fio, "randread")})
    _same_bytes(results, but="raw fio")
    targets = {("zram", "raw fio"): 0.35, ("files", "raw fio"): 0.95}
    for name in list(results)[1:]:
        what, target = (
            f"{size_text(scale.block_size)} open-read-close, threads: {scale.threads}",
            targets.get((rig.devices, name)),
        )
        details = {"cpu": cpu_per_gib(results["kvfs"]), "peer_cpu": cpu_per_gib(results[name])}
        ours, theirs = rates(results["kvfs"]), rates(results[name])
        rig.add("block-read", what, "GB/s", ours, name, theirs, "share", target, details=details)


def case_idle(rig: Rig) -> None:
    """CPU that a mount uses without requests."""
    rig.filled(rig.kvfs, "names", 4 * KIB, 100)
    time.sleep(rig.scale.settle_s)
    before = rig.kvfs.cpu_s()
    time.sleep(rig.scale.idle_s)
    used = rig.kvfs.cpu_s() - before
    rig.add("idle", f"daemon CPU in {rig.scale.idle_s} s of an idle mount", "s", [used], target=0.01 * rig.scale.idle_s)


def case_small_files(rig: Rig) -> None:
    """Files of 64 KiB created, written and renamed a second, through the mount."""
    scale = rig.scale
    for threads in (1, 8):

        def write(side: Side, index: int, threads: int = threads) -> Json:
            directory = f"small-{threads}-{index}"
            return rig.write(side, directory, size=64 * KIB, count=scale.small_files, threads=threads)

        results = _interleaved(rig, write, [])["kvfs"]
        rates = [number_at(document, "operations") / number_at(document, "seconds") for document in results]
        what = f"create, write, rename of 64 KiB, threads: {threads}"
        details = {"latency": latency_points(results), "cpu": cpu_per_gib(results)}
        rig.add("small-files", what, "files/s", rates, details=details)


def case_block_write(rig: Rig) -> None:
    """Whole blocks, tmp-write-rename, many threads, against raw sequential writes: empty pool, then a full one."""
    scale = rig.scale
    count = scale.write_set // scale.block_size
    written = 0
    raw = functools.partial(rig.raw_fio, "write")

    def settled(run: Callable[[], Json]) -> Json:
        document = run()
        time.sleep(scale.settle_s)  # for the last summaries, and the disk's delayed writes
        return document

    def write(side: Side, index: int) -> Json:
        nonlocal written
        first = written
        if side is rig.kvfs:
            written += count
        # Other filesystems do not evict: there the same names are written again.
        modulo = 0 if side is rig.kvfs else count
        return rig.write(
            side, "written", size=scale.block_size, count=count, threads=scale.threads, first=first, modulo=modulo
        )

    for state in ("empty pool", "full pool, evicting"):
        if state == "empty pool":
            for side in rig.striped:  # room for the coming writes
                for directory in ("blocks", "large"):
                    shutil.rmtree(side.lower / directory, ignore_errors=True)
        else:
            while written * scale.block_size < DEVICE_COUNT * scale.device_size * 11 // 10:
                write(rig.kvfs, 0)

        def measure(side: Side, index: int, empty: bool = state == "empty pool") -> Json:
            nonlocal written
            if side is not rig.kvfs:
                return settled(lambda: write(side, index))
            if empty:
                rig.fresh()
                written = 0
            before = rig.pool.device_bytes_written()
            document = settled(lambda: write(side, index))
            stored = number_at(document, "bytes")
            return {**document, "amplification": (rig.pool.device_bytes_written() - before) / stored}

        results = _interleaved(rig, measure, rig.striped, {"raw fio": lambda index: settled(lambda: raw(index))})
        for name in list(results)[1:]:
            what = f"{size_text(scale.block_size)} tmp-write-rename, threads: {scale.threads}, {state}"
            target = 0.85 if (rig.devices, name) == ("files", "raw fio") else None
            cpu = {"cpu": cpu_per_gib(results["kvfs"]), "peer_cpu": cpu_per_gib(results[name])}
            details = {**cpu, "latency": latency_points(results["kvfs"])}
            ours, theirs = rates(results["kvfs"]), rates(results[name])
            rig.add("block-write", what, "GB/s", ours, name, theirs, "share", target, details=details)
        what = f"device bytes written / bytes stored, {state}"
        rig.add("block-write", what, "x", column_at(results["kvfs"], "amplification"), target=1.02)


def case_million(rig: Rig) -> None:
    """A million small blocks: memory, index, warm mount, rebuild without index, the cost of a lookup among so many."""
    scale = rig.scale
    pool, side = rig.pool, rig.kvfs
    words = ["--space", "million", "--size", 4 * KIB, "--batch", 1024, "--packable"]
    latencies: dict[int, dict[str, list[float]]] = {}
    done, started = 0, time.monotonic()
    for goal in (scale.few, scale.million):
        while done < goal:
            count = min(goal - done, 20_000)
            rig.native("put", *words, "--count", count, "--first", done)
            done += count
            say(f"million: {done} of {scale.million} blocks, {done / (time.monotonic() - started):.0f} a second")
        latencies[goal] = _lookup_latencies(rig, side.root / "million", goal)
    blocks = scale.million
    for what in ("missing", "present"):
        few, many = latencies[scale.few][what], latencies[scale.million][what]
        ratios = [b / a for a, b in zip(few, many, strict=True)]
        told = f"lookup of a {what} name among {blocks} / among {scale.few} blocks"
        rig.add("million", told, "x", ratios, target=1.5, details={"few_us": few, "many_us": many})
    exists_among(rig, "million", "million", blocks)
    held = int(number_at(pool.status(), "blocks"))
    memory = _memory(pool.pid())
    told = "daemon RSS besides mapped index pages"
    rig.add("million", told, "MB", [memory["other"] / 1e6], target=400.0, details=memory)
    rig.add("million", "block table in memory", "bytes/block", [memory["table"] / blocks], target=144.0)
    pool.umount()
    index = sum(path.stat().st_blocks * 512 for path in (pool.pool / "index").rglob("*") if path.is_file())
    rig.add("million", "index on disk", "bytes/block", [index / blocks], target=600.0)
    warm = [_timed_mount(pool, held) for _ in range(max(3, scale.rounds))]
    rig.add("million", "warm mount until it answers and holds all blocks", "s", warm, target=3.0)
    for source, target in (("summaries", 100_000.0), ("headers alone", 50_000.0)):
        if source == "headers alone":
            _erase_summaries(pool)
        shutil.rmtree(pool.pool / "index")
        seconds = _timed_mount(pool, held)
        told = f"rebuild from {source}, mount included"
        rig.add(
            "million", told, "blocks/s", [held / seconds], target=target, at_most=False, details={"seconds": seconds}
        )


def _unused() -> int:
    """A number that no earlier call gave: names made of it have not been looked up."""
    return time.monotonic_ns() & 0x7FFFFFFF


def _same_bytes(results: Mapping[str, Sequence[Json]], but: str = "") -> None:
    """Sides filled with the same seed must have been read as the same bytes, round by round."""
    names = [name for name in results if name != but]
    for documents in zip(*(results[name] for name in names), strict=True):
        digests = {name: document["digest"] for name, document in zip(names, documents, strict=True)}
        if len(set(digests.values())) != 1:
            raise BenchError(f"the sides were read as different bytes: {digests}")


def _lookup_latencies(rig: Rig, directory: Path, blocks: int) -> dict[str, list[float]]:
    """p50 in us, one a round, of a failing stat, and of faccessat of a block whose name the kernel has forgotten."""
    bench, scale = rig.bench, rig.scale
    sample = [str(key_path(directory, number)) for number in range(0, blocks, max(1, blocks // scale.lookups))]
    sample = sample[: scale.lookups]
    listed = rig.base / "million.list"
    listed.write_text("\n".join(sample) + "\n")
    found: dict[str, list[float]] = {"missing": [], "present": []}
    for _ in range(scale.rounds):
        document = bench.client("stat", "--dir", Path(sample[0]).parent, "--count", scale.lookups, "--seed", _unused())
        found["missing"].append(number_at(document, "latency_us", "p50"))
        forget_names()
        document = bench.client("access", "--list", listed, "--count", len(sample))
        if number_at(document, "found") != len(sample):
            raise BenchError(f"{document['found']} of {len(sample)} blocks found among {blocks}")
        found["present"].append(number_at(document, "latency_us", "p50"))
    return found


def _memory(pid: int) -> dict[str, float]:
    """Resident bytes of a process: mapped index pages, the block table (the largest memfd), all but the index."""
    index = table = total = 0
    name = ""
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        words = line.split()
        if not words[0].endswith(":"):
            name = words[5] if len(words) > 5 else ""
        elif words[0] == "Rss:":
            size = int(words[1]) * KIB
            total += size
            if name.endswith(".mdb"):
                index += size
            elif name.startswith("/memfd:"):
                table = max(table, size)
    return {"index": float(index), "table": float(table), "total": float(total), "other": float(total - index)}


def _timed_mount(pool: Kvfs, blocks: int) -> float:
    """Seconds from the command to a mount that answers and holds that many blocks again. Leaves it unmounted."""
    started = time.monotonic()
    pool.mount()
    what = f"{blocks} blocks after the mount"
    wait_until(lambda: number_at(pool.status(), "blocks") >= blocks, what, timeout_s=600, interval_s=0.05)
    seconds = time.monotonic() - started
    pool.umount()
    return seconds


def _erase_summaries(pool: Kvfs) -> None:
    """Overwrite both summary slots of every segment, so that only block headers are left to rebuild from."""
    from kvfs.pool.config import load
    from kvfs.types import PAGE_SIZE

    config = load(pool.pool)
    assert config is not None
    geometry = config.geometry
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(open(device.path, "r+b", buffering=0)) for device in config.devices]
        for members in config.members():
            for page in range(geometry.end_page, geometry.segment_pages):
                stripe, inside = divmod(page * PAGE_SIZE, geometry.stripe_unit)
                row, column = divmod(stripe, geometry.stripe_width)
                device, zone = members[column]
                place = config.devices[device].zones_offset + zone * geometry.zone_size
                os.pwrite(files[device].fileno(), bytes(PAGE_SIZE), place + row * geometry.stripe_unit + inside)
        for file in files:
            os.fsync(file.fileno())


@dataclass(frozen=True, slots=True)
class Case:
    run: Callable[[Rig], None]
    devices: tuple[str, ...]  # the kinds that it runs on


BOTH = ("zram", "files")
CASES = {
    "random-read": Case(case_random_read, BOTH),
    "lookup": Case(case_lookup, ("zram",)),
    "rings": Case(case_rings, ("zram",)),
    "prompt": Case(case_prompt, ("zram",)),
    "large-read": Case(case_large_read, BOTH),
    "block-read": Case(case_block_read, BOTH),
    "idle": Case(case_idle, BOTH),
    "small-files": Case(case_small_files, BOTH),
    "block-write": Case(case_block_write, BOTH),
    "slab": Case(case_slab, ("files",)),
    "native-read": Case(case_native_read, BOTH),
    "native-exists": Case(case_native_exists, ("zram",)),
    "native-latency": Case(case_native_latency, BOTH),
    "native-ranges": Case(case_native_ranges, BOTH),
    "native-queue": Case(case_native_queue, BOTH),
    "native-put": Case(case_native_put, BOTH),
    "native-processes": Case(case_native_processes, BOTH),
    "virtiofs": Case(case_virtiofs, BOTH),
    "vhost": Case(case_vhost, BOTH),
    "nvme": Case(case_nvme, ("zram",)),
    "take-over": Case(case_take_over, BOTH),
    "replay": Case(case_replay, ("files",)),
    "million": Case(case_million, ("zram",)),
}
