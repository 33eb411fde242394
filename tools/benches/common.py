"""Shared by the benchmark's parts: scales, results, commands."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from kvfs.errors import KvfsError

JSON_VERSION = 1
KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
REPOSITORY = Path(__file__).resolve().parents[2]
DEVICE_COUNT = 4
STRIPE_UNIT = 128 * KIB
DIRECTORIES = 16
# Raw devices are read and written from here on, as kvfs leaves its labels alone.
RAW_BASE = MIB
COMMAND_TIMEOUT_S = 600.0
# glibc then asks for huge pages for what malloc() hands out. The number of pieces of a buffer decides how fast a
# virtual disk is. The same read ran at 1.1 GB/s into pages of 4 KiB, at 2.7 into huge ones, and between by chance.
HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}

Json = dict[str, object]


class BenchError(KvfsError):
    """A case could not be measured, or measured something else than it was meant to."""


class MissingError(KvfsError):
    """This machine lacks what a case needs; the case is skipped with this reason."""


@dataclass(frozen=True, slots=True)
class Scale:
    """How much of everything."""

    rounds: int
    device_size: int  # of each of kvfs's four
    working_set: int  # bytes of blocks read in one round
    write_set: int  # written: more, as a disk's cache takes the first bytes
    block_size: int
    large_file: int
    threads: int
    reads: int  # 4 KiB reads a round
    lookups: int
    passes: int  # over the working set, in a round of the native path, on a disk
    ram_passes: int  # and on devices in RAM
    exists: int  # blocks among which the native path looks for keys
    prompt: int
    small_files: int
    million: int
    few: int  # the counterpart of a million
    take_overs: int
    few_taken: int  # blocks in the pool then, at first
    many_taken: int  # and at last
    slab: int
    slab_s: int
    idle_s: int
    replay_requests: int  # of a trace, in a round
    replay_block: int
    settle_s: float  # until the daemon has done its delayed work
    busy: int = 0  # processes beside that only compute


FULL = Scale(
    rounds=5,
    device_size=GIB,
    working_set=512 * MIB,
    write_set=GIB,
    block_size=2 * MIB,
    large_file=8 * MIB,
    threads=8,
    reads=20_000,
    lookups=5_000,
    passes=8,
    ram_passes=16,
    exists=100_000,
    prompt=3_600,
    small_files=4_000,
    million=1_000_000,
    few=10_000,
    take_overs=20,
    few_taken=200,
    many_taken=100_000,
    slab=GIB,
    slab_s=5,
    idle_s=5,
    replay_requests=1_000,
    replay_block=512 * KIB,
    settle_s=3.0,
)
QUICK = Scale(
    rounds=2,
    device_size=96 * MIB,
    working_set=32 * MIB,
    write_set=32 * MIB,
    block_size=512 * KIB,
    large_file=8 * MIB,
    threads=4,
    reads=500,
    lookups=200,
    passes=1,
    ram_passes=2,
    exists=2_000,
    prompt=360,
    small_files=100,
    million=2_000,
    few=500,
    take_overs=2,
    few_taken=50,
    many_taken=500,
    slab=32 * MIB,
    slab_s=1,
    idle_s=2,
    replay_requests=60,
    replay_block=512 * KIB,
    settle_s=1.0,
)


# ---- results ----


@dataclass(slots=True)
class Row:
    """One line of the table: samples of kvfs, perhaps of a peer, and the relation between them.

    relation: `faster` is peer / kvfs (times, of latencies), `share` is kvfs / peer (of throughputs). `cost` is kvfs /
    peer (of costs), `extra` is kvfs - peer (in the unit), `value` is kvfs alone. target is the least score for the
    first two, the most for `cost`, `extra` and, with at_most, for `value`.
    """

    case: str
    devices: str
    what: str
    unit: str
    kvfs: list[float]
    peer_name: str = ""
    peer: list[float] = field(default_factory=list)
    relation: str = "value"
    target: float | None = None
    at_most: bool = True
    details: Json = field(default_factory=dict)

    def scores(self) -> list[float]:
        if self.relation == "value":
            return self.kvfs
        pairs = list(zip(self.kvfs, self.peer, strict=True))
        if self.relation == "faster":
            return [peer / kvfs for kvfs, peer in pairs]
        if self.relation in ("share", "cost"):
            return [kvfs / peer for kvfs, peer in pairs]
        return [kvfs - peer for kvfs, peer in pairs]

    def met(self) -> bool | None:
        if self.target is None:
            return None
        score = statistics.median(self.scores())
        return score <= self.target if self.limits() else score >= self.target

    def limits(self) -> bool:
        """Whether the target is an upper bound."""
        return self.relation in ("cost", "extra") or (self.relation == "value" and self.at_most)

    def document(self) -> Json:
        return {
            "case": self.case,
            "devices": self.devices,
            "what": self.what,
            "unit": self.unit,
            "relation": self.relation,
            "score": _spread(self.scores()),
            "target": self.target,
            "at_most": self.limits(),
            "met": self.met(),
            "kvfs": _spread(self.kvfs),
            "peer": {"name": self.peer_name, **_spread(self.peer)} if self.peer else None,
            "details": self.details,
        }


def _spread(samples: Sequence[float]) -> Json:
    return {"median": statistics.median(samples), "min": min(samples), "max": max(samples), "samples": list(samples)}


def number_at(document: Mapping[str, object], *path: str) -> float:
    """The number at a path of keys of a document that must have it."""
    value: object = document
    for key in path:
        if not isinstance(value, Mapping) or key not in value:
            raise BenchError(f"no {'.'.join(path)} in {json.dumps(document)[:300]}")
        value = value[key]
    if not isinstance(value, (int, float)):
        raise BenchError(f"{'.'.join(path)} is {value!r}, not a number")
    return value


def column_at(documents: Sequence[Json], *path: str) -> list[float]:
    return [number_at(document, *path) for document in documents]


def rates(documents: Sequence[Json]) -> list[float]:
    """GB/s of each."""
    return [number_at(document, "bytes") / number_at(document, "seconds") / 1e9 for document in documents]


def latency_points(documents: Sequence[Json]) -> Json:
    """The median round's mean, p50 and p99."""
    points = ("mean", "p50", "p99")
    return {f"{point}_us": statistics.median(column_at(documents, "latency_us", point)) for point in points}


def cpu_per_gib(documents: Sequence[Json]) -> Json:
    """CPU seconds per GiB: server, client."""
    gib = sum(column_at(documents, "bytes")) / GIB
    return {f"{who}_s_per_gib": sum(column_at(documents, f"{who}_cpu_s")) / gib for who in ("daemon", "client")}


# ---- commands ----


def say(text: str) -> None:
    """Progress, for people."""
    print(f"bench: {text}", file=sys.stderr, flush=True)


def run_command(
    *command: str | Path,
    timeout_s: float = COMMAND_TIMEOUT_S,
    check: bool = True,
    environment: Mapping[str, str] | None = None,
    directory: Path = REPOSITORY,
) -> subprocess.CompletedProcess[str]:
    """`environment`: variables set besides our own. `directory`: where the command runs."""
    words = [os.fspath(word) for word in command]
    try:
        result = subprocess.run(
            words,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
            cwd=directory,
            env={**os.environ, **environment} if environment else None,
        )
    except subprocess.TimeoutExpired as error:
        raise BenchError(f"{' '.join(words[:6])}: not done after {timeout_s:.0f} s") from error
    except FileNotFoundError as error:
        raise MissingError(f"needs the program {words[0]}") from error
    if check and result.returncode:
        said = (result.stderr or result.stdout).strip()[-1500:]
        raise BenchError(f"{' '.join(words)} ended with {result.returncode}: {said}")
    return result


def parse_json(text: str, what: str) -> Json:
    try:
        return cast(Json, json.loads(text))
    except ValueError as error:
        raise BenchError(f"{what}: its output is no JSON: {text[:200]!r}") from error


def needs_program(program: str) -> str:
    path = shutil.which(program, path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")
    if path is None:
        raise MissingError(f"needs the program {program}")
    return path


def needs_root() -> None:
    if os.geteuid() != 0:
        raise MissingError("needs root")


def cpu_s(pid: int) -> float:
    """CPU seconds that a process has used, with its kernel threads for I/O."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def process_cpu_s(pid: int) -> float:
    """The same in nanoseconds' steps: /proc counts in hundredths, and a toy run needs less than one."""
    return time.clock_gettime((~pid << 3) | 2)


def machine_cpu_s() -> float:
    """Time that the machine's CPUs have been at work: user, nice, system, irq, softirq (proc(5), /proc/stat)."""
    fields = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:8]]
    return (sum(fields[:3]) + sum(fields[5:7])) / os.sysconf("SC_CLK_TCK")


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = 30.0, interval_s: float = 0.02) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise BenchError(f"{what}: not within {timeout_s:.0f} s")
        time.sleep(interval_s)


def forget_names() -> None:
    """Make the kernel forget names and inodes (not pages), so that each filesystem is asked again."""
    with contextlib.suppress(OSError):
        Path("/proc/sys/vm/drop_caches").write_text("2")
