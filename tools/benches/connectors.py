"""`tools/bench_connectors`: kvfs under LMCache and SGLang beside their file back ends, under vLLM beside raw devices.

Each round gives the devices to every back end in turn, made anew: as a pool to kvfs, as an XFS stripe to the others.
With --apart each back end has loop devices of its own on the same disk. LMCache is measured by its own `lmcache bench
l2`, with kvfs's leases and without. Its last look-up has the keys of a long prompt. SGLang is measured by its
controller's page functions, vLLM by its tiering manager, both in batches of 128 blocks. Beside vLLM's loads fio reads
as much from the same devices.
Between stores and loads the page cache is dropped, so that loads come from the devices. Figures are medians of rounds.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

from benches.common import (
    GIB,
    KIB,
    MIB,
    REPOSITORY,
    STRIPE_UNIT,
    BenchError,
    Json,
    MissingError,
    needs_root,
    number_at,
    say,
)
from benches.rig import Kvfs, disk_files, filesystem, fio, loops, mapped_stripe
from benches.run import Parser, chosen
from kvfs.errors import KvfsError, UsageError

RUN_TIMEOUT_S = 900.0
ENGINES = ("lmcache", "sglang", "vllm")
OPERATIONS = ("Store", "Lookup", "Load")
# Of LMCache: a look-up of a long prompt.
LONG_LOOKUP = "Lookup of 3,600"
LONG_KEYS, LONG_ROUNDS, LONG_KIB = 3600, 4, 4
SCRIPTS = REPOSITORY / "tests/connectors/scripts"
RAW = "raw devices (fio)"
RAW_DEPTH = 64


@dataclass(frozen=True, slots=True)
class Settings:
    rounds: int
    devices: int
    device_size: int
    keys: int  # of LMCache: a submission
    in_flight: int
    object_kib: int
    repeats: int  # LMCache's own rounds
    batches: int  # of SGLang: 128 pages each
    page_kib: int
    long_keys: int = LONG_KEYS


# LMCache stores 2 GiB: a kernel that cannot stripe has one device for all.
FULL = Settings(5, 4, 4 * GIB, 32, 4, 2048, 8, 6, 1024)
QUICK = Settings(1, 2, 512 * MIB, 4, 2, 256, 2, 1, 64, 100)


@dataclass(slots=True)
class Figures:
    """Of one back end: for each operation p50 and p99 in ms of LMCache's rounds, and MB/s or keys a second."""

    samples: dict[tuple[str, str], list[float]] = field(default_factory=dict)

    def add(self, operation: str, name: str, value: float) -> None:
        self.samples.setdefault((operation, name), []).append(value)

    def median(self, operation: str, name: str) -> float:
        return statistics.median(self.samples[operation, name])

    def time(self, operation: str, name: str) -> str:
        return f"{self.median(operation, name):.2f}" if (operation, name) in self.samples else ""


# ---- devices and back ends ----


@contextlib.contextmanager
def kvfs_on(devices: Sequence[Path], base: Path) -> Iterator[Path]:
    pool = Kvfs(base / "kvfs", devices)
    try:
        pool.format()
        yield pool.mount("--allow-other").root
    finally:
        pool.stop()


@contextlib.contextmanager
def xfs_on(devices: Sequence[Path], base: Path) -> Iterator[Path]:
    with contextlib.ExitStack() as stack:
        device = devices[0] if len(devices) == 1 else stack.enter_context(mapped_stripe(devices, STRIPE_UNIT))
        yield stack.enter_context(filesystem("xfs", [device], base / "xfs"))


def usable(devices: Sequence[Path]) -> Sequence[Path]:
    """All of them, if this kernel can make an XFS stripe of them. Else one, for every back end alike."""
    try:
        with contextlib.ExitStack() as stack:
            if len(devices) > 1:
                stack.enter_context(mapped_stripe(devices, STRIPE_UNIT))
        return devices
    except MissingError as error:
        say(f"one device for all: {error}")
        return devices[:1]


def adapters(mount: Path) -> dict[str, Json]:
    """LMCache's, by name: kvfs at its mount, the others in a directory of XFS."""

    def plugin(**options: float) -> Json:
        return {
            "type": "native_plugin", "module_path": "kvfs.connectors.lmcache", "class_name": "KvfsClient",
            "adapter_params": {"mount": str(mount), **options}, "max_capacity_gb": 0, "shared": True,
        }  # fmt: skip

    return {
        "kvfs": plugin(),
        "kvfs without leases": plugin(lease_s=0),
        "fs": {"type": "fs", "base_path": str(mount / "lmcache")},
        "fs_native": {"type": "fs_native", "base_path": str(mount / "lmcache")},
        "fs_native O_DIRECT": {"type": "fs_native", "base_path": str(mount / "lmcache"), "use_odirect": True},
    }  # fmt: skip


def drop_page_cache() -> None:
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3")


def python_of(engine: str) -> Path | None:
    command = [sys.executable, str(REPOSITORY / "tools/setup-engines"), "--where", engine]
    said = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if said.returncode:
        say(f"{engine}: left out: {said.stderr.strip()}")
        return None
    return Path(said.stdout.strip())


def run(python: Path, *words: str | Path, environment: Mapping[str, str] | None = None) -> str:
    """A program of an engine's environment, with this tree's kvfs. Returns its output."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    variables = {"PYTHONPATH": str(REPOSITORY), "HF_HUB_OFFLINE": "1", "LMCACHE_TRACK_USAGE": "false"}
    said = subprocess.run(
        [python, *words], env={**kept, **variables, **(environment or {})}, capture_output=True, text=True,
        timeout=RUN_TIMEOUT_S, check=False,
    )  # fmt: skip
    if said.returncode:
        raise BenchError(f"{' '.join(map(str, words[:4]))} ended with {said.returncode}: {said.stderr[-2000:]}")
    return said.stdout


# ---- the engines ----


def lmcache(python: Path, settings: Settings, name: str, mount: Path, figures: Figures, work: Path) -> None:
    output = work / "lmcache.json"
    adapter = json.dumps(adapters(mount)[name])

    def bench(operation: str, keys: int, in_flight: int, rounds: int, object_kib: int) -> Json:
        drop_page_cache()
        run(
            python, "-m", "lmcache.cli.main", "bench", "l2", "--l2-adapter", adapter, "--num-keys", str(keys),
            "--in-flight", str(in_flight), "--rounds", str(rounds), "--data-size-kb", str(object_kib),
            "--l1-align-bytes", "4096", "--lookup-max-hit-rate", "1.0", "--format", "json", "--output", output,
            "--only", operation.lower(),
        )  # fmt: skip
        result = cast(Json, cast(Json, json.loads(output.read_text())["metrics"])["op_0"])
        wanted = rounds * in_flight * keys
        if number_at(result, "total_success") != wanted:
            raise BenchError(f"{name}: {operation}: {result['total_success']} of {wanted} keys")
        return result

    def add(operation: str, result: Json, rate: str) -> None:
        figures.add(operation, "p50_ms", number_at(result, "duration_p50_ms"))
        figures.add(operation, "p99_ms", number_at(result, "duration_p99_ms"))
        figures.add(operation, "rate", number_at(result, rate))

    for operation in OPERATIONS:
        result = bench(operation, settings.keys, settings.in_flight, settings.repeats, settings.object_kib)
        add(operation, result, "ops_per_sec_avg" if operation == "Lookup" else "throughput_avg_mbps")
    # Keys have numbers from 0 on in each run: what was stored above goes away.
    shutil.rmtree(mount / "lmcache")
    bench("Store", settings.long_keys, 1, LONG_ROUNDS, LONG_KIB)
    add(LONG_LOOKUP, bench("Lookup", settings.long_keys, 1, LONG_ROUNDS, LONG_KIB), "ops_per_sec_avg")


def sglang(python: Path, settings: Settings, name: str, mount: Path, figures: Figures) -> None:
    for operation in OPERATIONS:
        drop_page_cache()
        words = (name, mount, operation.lower(), settings.batches, settings.page_kib)
        said = run(
            python,
            SCRIPTS / "sglang_bench.py",
            *map(str, words),
            environment={"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(mount)},
        )
        add_batches(figures, operation, settings, said)


def vllm(python: Path, settings: Settings, mount: Path, figures: Figures) -> None:
    for operation in OPERATIONS:
        drop_page_cache()
        words = (mount, operation.lower(), settings.batches, settings.page_kib)
        said = run(python, SCRIPTS / "vllm_bench.py", *map(str, words), environment={"VLLM_TARGET_DEVICE": "cpu"})
        add_batches(figures, operation, settings, said)


def add_batches(figures: Figures, operation: str, settings: Settings, said: str) -> None:
    """The seconds of batches of 128 that a script printed last."""
    seconds = [float(value) for value in json.loads(said.splitlines()[-1])]
    figures.add(operation, "p50_ms", 1000 * statistics.median(seconds))
    figures.add(operation, "p99_ms", 1000 * max(seconds))
    size = 128 * (1 if operation == "Lookup" else settings.page_kib / 1024)
    figures.add(operation, "rate", size * len(seconds) / sum(seconds))


def raw(settings: Settings, devices: Sequence[Path], figures: Figures) -> None:
    """As many bytes as the loads', in requests of a block's size."""
    drop_page_cache()
    block = settings.page_kib * KIB
    share = settings.batches * 128 * block // len(devices)
    found = fio("read", devices, block_size=block, depth=max(1, RAW_DEPTH // len(devices)), size=share)
    figures.add("Load", "rate", number_at(found, "bytes") / number_at(found, "seconds") / MIB)


# ---- the table ----


def table(title: str, all_figures: Mapping[str, Figures]) -> str:
    """Markdown; the share is kvfs's rate over the best other's."""
    lines = [f"{title}\n", "| operation | back end | p50 ms | p99 ms | MB/s, or keys/s | kvfs/best other |"]
    lines.append("|---|---|---|---|---|---|")
    for operation in (*OPERATIONS, LONG_LOOKUP):
        measured = {name: each for name, each in all_figures.items() if (operation, "rate") in each.samples}
        rates = {name: figures.median(operation, "rate") for name, figures in measured.items()}
        best = max((rate for name, rate in rates.items() if not name.startswith("kvfs")), default=0.0)
        for name, figures in measured.items():
            share = f"{rates[name] / best:.2f}" if name.startswith("kvfs") and best else ""
            times = " | ".join(figures.time(operation, each) for each in ("p50_ms", "p99_ms"))
            lines.append(f"| {operation} | {name} | {times} | {rates[name]:,.0f} | {share} |")
    return "\n".join(lines) + "\n"


def measure(
    settings: Settings, wanted: Sequence[str], devices_of: Callable[[str], Sequence[Path]], work: Path
) -> tuple[str, Json]:
    engines = {name: python for name in wanted if (python := python_of(name)) is not None}
    of_lmcache = {name: Figures() for name in adapters(work)}
    of_sglang = {name: Figures() for name in ("kvfs", "file")}
    of_vllm = {name: Figures() for name in ("kvfs", RAW)}
    of_engine = dict(zip(ENGINES, (of_lmcache, of_sglang, of_vllm), strict=True))
    for number in range(settings.rounds):
        for engine, python in engines.items():
            names = list(of_engine[engine])
            for name in names[number % len(names) :] + names[: number % len(names)]:
                say(f"round {number + 1}: {engine}: {name}")
                devices = devices_of(name)
                if name == RAW:
                    raw(settings, devices, of_vllm[name])
                    continue
                base = Path(tempfile.mkdtemp(dir=work))
                with (kvfs_on if name.startswith("kvfs") else xfs_on)(devices, base) as mount:
                    if engine == "lmcache":
                        lmcache(python, settings, name, mount, of_lmcache[name], work)
                    elif engine == "sglang":
                        sglang(python, settings, name, mount, of_sglang[name])
                    else:
                        vllm(python, settings, mount, of_vllm[name])
    texts, document = [], cast(Json, {})
    for engine, all_figures in of_engine.items():
        if engine in engines:
            texts.append(table(engine, all_figures))
            document[engine] = {
                name: {" ".join(key): values for key, values in figures.samples.items()}
                for name, figures in all_figures.items()
            }
    return "\n".join(texts), document


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="tools/bench_connectors", description=str(__doc__).partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="toy sizes: does everything still work?")
    parser.add_argument("--engines", metavar="NAME,...", default=",".join(ENGINES), help=f"of {', '.join(ENGINES)}")
    parser.add_argument("--rounds", type=int, metavar="N", help=f"default {FULL.rounds}")
    parser.add_argument("--devices", type=int, metavar="N", help=f"loop devices, default {FULL.devices}")
    parser.add_argument(
        "--device-mib", type=int, metavar="MIB", help=f"of a loop device, default {FULL.device_size // MIB}"
    )
    parser.add_argument("--object-kib", type=int, metavar="KIB", help=f"of LMCache, default {FULL.object_kib}")
    parser.add_argument("--apart", action="store_true", help="each back end has loop devices of its own")
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--device", action="append", type=Path, metavar="PATH", help="a block device; its content is lost"
    )
    where.add_argument(
        "--directory", type=Path, metavar="DIR", help="loop devices over files in it (default: below /var/tmp)"
    )
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write all samples there, as JSON")
    try:
        arguments = parser.parse_args(argv)
        needs_root()
        given = {name: getattr(arguments, name) for name in ("rounds", "devices", "object_kib")}
        chosen_ones = {name: value for name, value in given.items() if value is not None}
        if arguments.device_mib is not None:
            chosen_ones["device_size"] = arguments.device_mib * MIB
        settings = replace(QUICK if arguments.quick else FULL, **chosen_ones)
        if arguments.apart and arguments.device:
            raise UsageError("--apart makes loop devices: it goes with --directory, not with --device")
        with contextlib.ExitStack() as stack:
            work = Path(
                stack.enter_context(tempfile.TemporaryDirectory(prefix="kvfs-bench-", ignore_cleanup_errors=True))
            )
            # Not zram: a read of Linux 6.18's into memory that is not page-aligned writes beyond it.
            below = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=arguments.directory or "/var/tmp")))

            @functools.cache
            def made(name: str) -> Sequence[Path]:
                files = disk_files(below, name.replace(" ", "-"), settings.devices, settings.device_size)
                return usable(stack.enter_context(loops(stack.enter_context(files))))

            devices = usable(arguments.device) if arguments.device else None
            text, document = measure(
                settings, chosen(arguments.engines, ENGINES, "engines"),
                lambda name: devices or made(name if arguments.apart else "device"), work,
            )  # fmt: skip
        print(text)
        if arguments.output:
            arguments.output.write_text(json.dumps(document, indent=1) + "\n")
    except (KvfsError, OSError, subprocess.TimeoutExpired) as error:
        print(f"tools/bench_connectors: {error}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
