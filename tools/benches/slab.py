"""Slabs against fio on the devices themselves: reads and writes at random, 32 in flight, O_DIRECT, by one job."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import cast

from benches.common import (
    DEVICE_COUNT,
    HUGE_PAGES,
    KIB,
    MIB,
    RAW_BASE,
    BenchError,
    Json,
    cpu_per_gib,
    needs_program,
    number_at,
    parse_json,
    rates,
    run_command,
)
from benches.rig import Kvfs, Rig, Side

DEPTH = 32
ENGINES = ("libaio", "io_uring")
PEER = "raw fio"


def case_slab(rig: Rig) -> None:
    """4 KiB and 128 KiB, by libaio and by io_uring."""
    needs_program("fio")
    size = rig.scale.slab
    # A quarter of the pool is for slabs, in whole segments.
    devices = rig.make_devices("slab", DEVICE_COUNT, size // DEVICE_COUNT * 5 + 64 * MIB)
    raw = rig.make_devices("slab-raw", DEVICE_COUNT, size // DEVICE_COUNT + 2 * RAW_BASE)
    pool = Kvfs(rig.base / "slab-kvfs", devices)
    rig.stack.callback(pool.stop)
    pool.format()
    side = pool.mount()
    span = size // DEVICE_COUNT // MIB * MIB
    with _slab(side.root / "slab", size) as path:
        slab, stripe = [path], list(raw)
        _fio(slab, ["--rw=write", "--ioengine=libaio", f"--bs={MIB}", f"--size={size}"])
        for block_size in (4 * KIB, 128 * KIB):
            for engine in ENGINES:
                words = ["--rw=randrw", f"--bs={block_size}", f"--ioengine={engine}", "--norandommap", "--time_based"]
                words.append(f"--runtime={rig.scale.slab_s}")

                def ours(index: int, words: Sequence[str] = words) -> Json:
                    return _served(side, slab, [*words, f"--size={size}", f"--randseed={1 + index}"])

                def theirs(index: int, words: Sequence[str] = words) -> Json:
                    where = [f"--size={span * DEVICE_COUNT}", f"--offset={RAW_BASE}", "--file_service_type=random"]
                    return _fio(stripe, [*words, *where, f"--randseed={1 + index}"])

                results = rig.bench.interleave({"kvfs": ours, PEER: theirs})
                what = f"slab, {block_size // KIB} KiB reads and writes at random, depth {DEPTH}, {engine}"
                details = {name: cpu_per_gib(documents) for name, documents in results.items()}
                values = {name: rates(documents) for name, documents in results.items()}
                rig.add("slab", what, "GB/s", values["kvfs"], PEER, values[PEER], "share", 0.9, details=details)


@contextlib.contextmanager
def _slab(path: Path, size: int) -> Iterator[Path]:
    """A slab there, as long as this is open."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    try:
        os.ftruncate(descriptor, size)
        os.setxattr(descriptor, "user.kvfs.slab", b"1")
        yield path
    finally:
        os.close(descriptor)


def _served(side: Side, files: Sequence[Path], words: Sequence[str]) -> Json:
    before = side.cpu_s()
    document = _fio(files, words)
    return {**document, "daemon_cpu_s": side.cpu_s() - before}


def _fio(files: Sequence[Path], words: Sequence[str]) -> Json:
    """One job with one queue over all files; both directions together."""
    common = ["--name=slab", f"--filename={':'.join(map(str, files))}", f"--iodepth={DEPTH}", "--direct=1"]
    common += ["--output-format=json", "--fallocate=none", "--allow_file_create=0", "--invalidate=0"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = run_command(needs_program("fio"), *common, *words, environment=HUGE_PAGES)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    (job,) = cast(Sequence[Json], parse_json(result.stdout, "fio")["jobs"])
    if number_at(job, "error"):
        raise BenchError(f"fio {' '.join(words)}: error {number_at(job, 'error'):.0f}")
    return {
        "bytes": number_at(job, "read", "io_bytes") + number_at(job, "write", "io_bytes"),
        "seconds": max(number_at(job, "job_runtime") / 1000, 0.001),
        "client_cpu_s": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        "daemon_cpu_s": 0.0,
    }
