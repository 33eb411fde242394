"""A guest's reads and writes: kvfs's virtio-fs export against Debian's virtiofsd over ext4, side by side in one guest.

Both are asked by fio in the guest. The guest's CPU is emulated, and its own work counts for both sides alike. So beside
each figure stands the share of time that the emulated CPU was at work. Where that is nearly all of it, no back end
could be much faster.

CPU is that of the back end's process, and that of the whole machine but for the emulated CPU. virtiofsd's loop devices
and ext4 work in the kernel's own threads. The second figure needs a machine that does nothing else. Beside both stand
reads of virtiofsd's own files here, without a guest, into memory of small pages, as a guest's is.
"""

from __future__ import annotations

import functools
import os
import shlex
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from benches.common import (
    DEVICE_COUNT,
    GIB,
    KIB,
    MIB,
    BenchError,
    Json,
    column_at,
    machine_cpu_s,
    needs_program,
    number_at,
    parse_json,
    process_cpu_s,
    rates,
)
from benches.guest import Guest, Share, children, virtiofsd
from benches.rig import Kvfs, Rig, filesystem, raw_fio

OURS = "kvfs"
# The peer reads devices where a guest asks for O_DIRECT, as kvfs does, in each of its cache modes.
PEERS = {f"virtiofsd cache={mode}": f"cache={mode},allow_direct_io" for mode in ("auto", "none", "always")}
# As it comes, it answers O_DIRECT out of the host's page cache and here never reads a device: shown, not a target.
CACHED = "virtiofsd, host's page cache"
# sysv shared memory: pages of 4 KiB, as a guest's memory has on a host that gives it no huge ones.
FLOOR = ["--name=floor", "--rw=read", "--ioengine=psync", "--bs=1M", "--thread", "--mem=shm"]
FLOOR += ["--loops=4", "--file_service_type=sequential"]


@dataclass(slots=True)
class _Door:
    """One side: where its files are in the guest and here, and whose CPU it costs."""

    root: Path
    lower: Path
    pid: int

    def cpu_s(self) -> float:
        return sum(process_cpu_s(pid) for pid in (self.pid, *children(self.pid)))


def case_virtiofs(rig: Rig) -> None:
    """1 and 4 MiB reads, 4 KiB reads, 1 MiB writes, all O_DIRECT, of one thread in a guest."""
    scale = rig.scale
    with_guest = _Guest(rig)
    large = scale.working_set * scale.passes
    for size in (MIB, 4 * MIB):
        what = f"{size // MIB} MiB O_DIRECT reads in a guest, 1 thread"
        results = with_guest.rounds(functools.partial(_read, size, large))
        peer = _best(results, lambda documents: statistics.median(rates(documents)))
        ours, theirs = rates(results[OURS]), rates(results[peer])
        details = {"sides": {name: rates(documents) for name, documents in results.items()}}
        rig.add("virtiofs", what, "GB/s", ours, peer, theirs, "share", 1.2, details=details)
        rig.add("virtiofs", what, "GB/s", ours, CACHED, rates(results[CACHED]), "share")
        _add_cpu(with_guest, what, results, peer)
    what = "4 KiB O_DIRECT reads in a guest, 1 thread, mean"
    results = with_guest.rounds(functools.partial(_read, 4 * KIB, scale.reads * 4 * KIB))
    latencies = {name: column_at(documents, "latency_us") for name, documents in results.items()}
    peer = _best(results, lambda documents: -statistics.median(column_at(documents, "latency_us")))
    details = {"sides": latencies}
    rig.add("virtiofs", what, "us", latencies[OURS], peer, latencies[peer], "cost", 0.8, details=details)
    rig.add("virtiofs", what, "us", latencies[OURS], CACHED, latencies[CACHED], "cost")
    _add_vcpu(rig, what, results, peer)
    what = "1 MiB O_DIRECT writes in a guest, 1 thread, fsync at the end"
    results = with_guest.rounds(_write)
    peer = _best(results, lambda documents: statistics.median(rates(documents)))
    ours, theirs = rates(results[OURS]), rates(results[peer])
    details = {"sides": {name: rates(documents) for name, documents in results.items()}}
    rig.add("virtiofs", what, "GB/s", ours, peer, theirs, "share", 1.0, details=details)
    _add_vcpu(rig, what, results, peer)


class _Guest:
    """The guest with all doors, and files of the same bytes behind each."""

    def __init__(self, rig: Rig) -> None:
        self.rig, self.scale = rig, rig.scale
        self.fio = needs_program("fio")
        base = rig.base / "virtiofs"
        pool = Kvfs(base / "kvfs", rig.make_devices("virtiofs", DEVICE_COUNT, rig.device_size))
        rig.stack.callback(pool.stop)
        pool.format()
        sockets = base / "kvfs.socket"
        mounted = pool.mount("--virtiofs", f"{sockets},tag={OURS}")
        size = 2 * self.scale.working_set + self.scale.working_set // 4 + 192 * MIB
        (device,) = rig.make_block_devices("virtiofsd", 1, size)
        lower = self.lower = rig.stack.enter_context(filesystem("ext4", [device], base / "ext4"))
        assert mounted.pid is not None
        self.doors = {OURS: _Door(Path(), mounted.root, mounted.pid)}
        shares = [Share(sockets, OURS)]
        peers = PEERS if not rig.bench.quick else dict(list(PEERS.items())[:1])
        for index, (name, options) in enumerate({**peers, CACHED: "cache=none"}.items()):
            path = base / f"{index}.socket"
            self.doors[name] = _Door(Path(), lower, rig.stack.enter_context(virtiofsd(lower, path, options)))
            shares.append(Share(path, f"virtiofsd{index}"))
        # Of one CPU, as in the figures so far: a second one would take the back end's.
        self.guest = rig.stack.enter_context(Guest(shares, cpu_count=1, memory_mib=1024, lifetime_s=3600))
        for share, door in zip(shares, self.doors.values(), strict=True):
            door.root = self.guest.mount(share.tag)
        for lower in {door.lower for door in self.doors.values()}:
            self._fill(lower)

    def _fill(self, directory: Path) -> None:
        for index in range(self.count):
            with (directory / f"block-{index}").open("wb", buffering=0) as file:
                for _ in range(self.scale.large_file // MIB):
                    file.write(os.urandom(MIB))
        os.sync()

    @property
    def count(self) -> int:
        return max(1, self.scale.working_set // 2 // self.scale.large_file)

    def floor_s_per_gib(self) -> float:
        """CPU of reading a GiB of the peer's own files here, past the page cache, 1 MiB at a time, in small pages."""
        each, files = self.scale.large_file, ":".join(f"{self.lower}/block-{index}" for index in range(self.count))
        document = raw_fio("read", [*FLOOR, f"--filename={files}", f"--size={self.count * each}", f"--filesize={each}"])
        return number_at(document, "thread_cpu_s") / number_at(document, "bytes") * GIB

    def rounds(self, run: Callable[[_Guest, _Door, int], Json]) -> dict[str, list[Json]]:
        runs = {name: functools.partial(run, self, door) for name, door in self.doors.items()}
        return self.rig.bench.interleave(runs)

    def job(self, door: _Door, pattern: str, *words: str) -> Json:
        """One fio job in the guest: bytes, seconds, latency, and the CPU seconds of who serves and of the guest."""
        command = [self.fio, "--output-format=json", "--output=/run/tmp/fio.json", "--name=job", f"--rw={pattern}"]
        command += ["--ioengine=psync", "--direct=1", "--thread", "--fallocate=none", f"--directory={door.root}"]
        command += ["--filename_format=block-$filenum", f"--filesize={self.scale.large_file}", *words]
        text = shlex.join(command)
        before, vcpu, host, started = door.cpu_s(), self.guest.cpu_s()["vcpu"], machine_cpu_s(), time.monotonic()
        output = self.guest.run(f"{text} >&2 && cat /run/tmp/fio.json", timeout_s=600)
        elapsed_s = time.monotonic() - started
        used, vcpu, host = door.cpu_s() - before, self.guest.cpu_s()["vcpu"] - vcpu, machine_cpu_s() - host
        (job,) = cast(list[Json], parse_json(output.text, "fio in the guest")["jobs"])
        if number_at(job, "error"):
            raise BenchError(f"{text} in the guest: error {job['error']}")
        direction = "write" if "write" in pattern else "read"
        seconds = number_at(job, direction, "runtime") / 1000
        return {
            "bytes": number_at(job, direction, "io_bytes"),
            "seconds": max(seconds, 0.001),
            "latency_us": number_at(job, direction, "lat_ns", "mean") / 1000,
            "daemon_cpu_s": used,
            "host_cpu_s": max(host - vcpu, 0.001),  # in ticks of 10 ms
            "vcpu_s": vcpu,
            "elapsed_s": elapsed_s,
        }


def _read(size: int, total: int, guest: _Guest, door: _Door, index: int) -> Json:
    passes, rest = divmod(total, guest.count * guest.scale.large_file)
    words = [f"--nrfiles={guest.count}", f"--size={guest.count * guest.scale.large_file}", f"--bs={size}"]
    if size < MIB:
        words += [f"--io_size={total}", f"--randseed={1 + index}"]
        return guest.job(door, "randread", *words)
    return guest.job(door, "read", *words, f"--loops={max(1, passes + bool(rest))}", "--file_service_type=sequential")


def _write(guest: _Guest, door: _Door, index: int) -> Json:
    """New files, that are removed afterwards, outside the clock."""
    size = guest.scale.working_set // 2
    where = f"{door.root}/written"
    guest.guest.run(f"mkdir {where}")
    try:
        words = [f"--directory={where}", f"--nrfiles={guest.count}", f"--size={size}", f"--bs={MIB}"]
        return guest.job(door, "write", *words, "--file_service_type=sequential", "--end_fsync=1", "--create_on_open=1")
    finally:
        guest.guest.run(f"rm -r {where}")


def _best(results: dict[str, list[Json]], score: Callable[[list[Json]], float]) -> str:
    """The peer's cache mode that is the best at this."""
    return max((name for name in results if name in PEERS), key=lambda name: score(results[name]))


def _add_cpu(guest: _Guest, what: str, results: dict[str, list[Json]], peer: str) -> None:
    """CPU of the back end, of the host, and of the guest."""

    def per_gib(name: str, whose: str) -> list[float]:
        return [number_at(one, whose) / number_at(one, "bytes") * GIB for one in results[name]]

    rig = guest.rig
    for whose, told in {"daemon_cpu_s": "the back end", "host_cpu_s": "the host without the emulated CPU"}.items():
        told = f"{what}: CPU of {told} a GiB"
        rig.add("virtiofs", told, "s/GiB", per_gib(OURS, whose), peer, per_gib(peer, whose), "cost", 0.6)
    none, floor = "the same files, no guest", [guest.floor_s_per_gib() for _ in range(rig.scale.rounds)]
    told = f"{what}: CPU of the back end a GiB"
    rig.add("virtiofs", told, "s/GiB", per_gib(OURS, "daemon_cpu_s"), none, floor, "cost")
    rig.add("virtiofs", f"{told}, of the peer", "s/GiB", per_gib(peer, "daemon_cpu_s"), none, floor, "cost")
    _add_vcpu(rig, what, results, peer)


def _add_vcpu(rig: Rig, what: str, results: dict[str, list[Json]], peer: str) -> None:
    """Share of the time that the emulated CPU was at work, fio's start included."""

    def share(name: str) -> list[float]:
        return [number_at(one, "vcpu_s") / number_at(one, "elapsed_s") for one in results[name]]

    told = f"{what}: share of the time at work, emulated CPU"
    rig.add("virtiofs", told, "", share(OURS), peer, share(peer), "cost")
