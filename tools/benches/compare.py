"""`tools/compare`: two builds of kvfs in pairs, on the same machine at the same time, by the same load generators.

Each build has a daemon with a pool of its own, and both stay mounted. A pair is one short run of a case on each build.
Pairs alternate: A B, B A, A B, ... so that drift of the machine falls on both builds alike.

A pool has luck of its own. The places of its devices' pages and of the daemon's memory change figures by some percent,
and stay while the pool lives. So the pairs of a case are spread over several makings. For each making, devices and
pools of both builds are made anew and filled, in the order A B, B A, B A, A B. The interval is a bootstrap that draws
makings first and pairs of each then, and each making's own median stands beside it.

The build `old` is a commit, `new` this tree as it is. Of the old build only its command line and its libkvfs are used.
The clients are this tree's; the native one loads the libkvfs of the build whose pool it works on.

With --one-pool both libkvfs read blocks of one pool, the new build's. Only native reads can be so: what differs then is
the client.

A replay is this tree's `kvfs replay`, also by libkvfs: a daemon speaks with newer clients. Its pool is full from the
start, and each run goes on in the trace where the one before it ended.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import datetime
import functools
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benches.builds import Build, checked_out, here
from benches.calls import calls_an_operation
from benches.common import (
    DEVICE_COUNT,
    FULL,
    KIB,
    MIB,
    QUICK,
    REPOSITORY,
    BenchError,
    Json,
    MissingError,
    number_at,
    parse_json,
    run_command,
    say,
)
from benches.nvme import enclosure
from benches.pairs import Pair, case_document, is_wide, making_orders, render, run_orders, shares
from benches.rig import Kvfs, Side, block_names, disk_files, zram
from benches.run import Parser, chosen
from benches.session import Bench, machine
from kvfs import signals
from kvfs.errors import KvfsError, UsageError
from kvfs.replay.invent import invent

JSON_VERSION = 1
MEMORY = Path("/dev/shm")
BLOCK = 2 * MIB
LARGE = 16 * MIB
KEYS_A_CALL = 4_096
SPACE = "compare/blocks"
WARM_UP = 0.1  # of a run, before the first pair of a making
# Of a replay: its blocks, requests of a run, and the trace that is invented for it where none is given.
REPLAY_BLOCK = 64 * KIB
REPLAY_REQUESTS = 550
INVENTED = ("mixed", 1, 12_000)


@dataclass(frozen=True, slots=True)
class Size:
    """How much of everything: share is of the operations of a run."""

    device: int  # bytes of each of a pool's four
    blocks: int  # to be read
    keys: int  # among which `exists` looks
    share: float
    settle_s: float  # until a daemon has written summaries and committed its index


REAL = Size(device=128 * MIB, blocks=32, keys=8_192, share=1.0, settle_s=1.1)
TOY = Size(device=64 * MIB, blocks=4, keys=1_000, share=0.02, settle_s=0.1)


class Contender:
    """One build's daemon, with a pool of its own."""

    def __init__(self, bench: Bench, build: Build, pool: Kvfs, side: Side, size: Size, trace: Path) -> None:
        self.bench, self.build, self.pool, self.side, self.size = bench, build, pool, side, size
        self.trace = trace
        self.written = 0  # blocks, through the mount
        self.put = 0  # and by native clients
        self.replayed: dict[str, int] = {}  # requests, by case

    def client(self, *words: object) -> Json:
        return self.side.measured(lambda: self.bench.client(*words))

    def native(self, *words: object) -> Json:
        words = (*words, "--mount", self.side.root)
        return self.side.measured(lambda: self.bench.native(*words, library=self.build.library))

    def settled(self, run: Callable[[], Json]) -> Json:
        """run(), with the daemon's CPU of the seconds after it."""
        before = self.side.cpu_s()
        document = run()
        time.sleep(self.size.settle_s)
        return {**document, "daemon_cpu_s": self.side.cpu_s() - before}

    @functools.cached_property
    def listed(self) -> Path:
        """Paths of the blocks that are read through the mount, written at their first use."""
        directory = self.side.root / "blocks"
        directory.mkdir()
        words = ["--size", BLOCK, "--count", self.size.blocks, "--threads", 4, "--direct"]
        self.client("write", "--dir", directory, *words)
        path = self.pool.pool.with_name("blocks.list")
        path.write_text("".join(f"{name}\n" for name in block_names(directory, self.size.blocks)))
        return path

    @functools.cached_property
    def space(self) -> str:
        """The namespace of the blocks that native clients read."""
        words = ["--size", BLOCK, "--count", self.size.blocks, "--batch", min(64, self.size.blocks)]
        self.native("put", "--space", SPACE, *words)
        return SPACE

    @functools.cached_property
    def large(self) -> str:
        """The namespace of blocks that are many I/Os each."""
        space = "compare/large"
        self.native("put", "--space", space, "--size", LARGE, "--count", self.size.blocks // 2, "--batch", 4)
        return space

    @functools.cached_property
    def keys(self) -> str:
        """The namespace of the small blocks that `exists` finds."""
        space = "compare/keys"
        words = ["--size", 4 * KIB, "--count", self.size.keys, "--batch", 1024, "--packable"]
        self.native("put", "--space", space, *words)
        return space

    def write(self, count: int) -> Json:
        """Store `count` more blocks through the mount: create, write 2 MiB, close, rename."""
        directory = self.side.root / "stored"
        directory.mkdir(exist_ok=True)
        words = ["--size", BLOCK, "--count", count, "--threads", 4, "--direct", "--first", self.written]
        self.written += count
        return self.client("write", "--dir", directory, *words)

    def put_blocks(self, count: int) -> Json:
        """Put `count` more blocks by a native client."""
        words = ["--size", BLOCK, "--count", count, "--batch", min(64, count), "--first", self.put]
        self.put += count
        return self.native("put", "--space", "compare/put", *words)

    def replay(self, name: str, count: int, *words: str) -> Json:
        """The next `count` requests of the trace, as fast as they go."""
        skip = self.replayed.get(name, 0)
        self.replayed[name] = skip + count
        words = ("--block-size", str(REPLAY_BLOCK), "--full-speed", *words, "-o", "json")
        words = ("--target", str(self.side.root / name), "--skip", str(skip), "--requests", str(count), *words)
        carried = number_at(self.pool.status(), "counters", "carried_blocks")
        program = (sys.executable, "-m", "kvfs", "replay", self.trace)
        replayed = run_command(
            *program, *words, timeout_s=600, environment={"PYTHONPATH": str(REPOSITORY), "PYTHONSAFEPATH": "1"}
        )
        document = parse_json(replayed.stdout, "kvfs replay")
        carried = number_at(self.pool.status(), "counters", "carried_blocks") - carried
        return {
            "seconds": number_at(document, "seconds"),
            "operations": number_at(document, "requests"),
            "cpu_s": document["cpu_s"],
            "figures": {
                "hits": number_at(document, "prefix_hit_ratio"),
                "load p99 ms": number_at(document, "latency_ms", "load", "p99"),
                "store p99 ms": number_at(document, "latency_ms", "store", "p99"),
                "copies a store": carried / max(1.0, number_at(document, "blocks", "stored")),
            },
        }

    @functools.cached_property
    def evicts(self) -> bool:
        """Fill the pool beyond its size."""
        for _ in range(0, DEVICE_COUNT * self.size.device * 11 // 10 // BLOCK, 32):
            self.write(32)
        return True


# ---- the cases: each runs a share of its operations on one side; its first call prepares what it needs ----

Run = Callable[[Contender, int, float], Json]


def _part(count: int, share: float) -> int:
    return max(1, int(count * share))


def _read(size: int, count: int) -> Run:
    def run(side: Contender, index: int, share: float) -> Json:
        words = ["--size", size, "--count", _part(count, share), "--direct", "--seed", 1 + index]
        return side.client("read", "--list", side.listed, *words)

    return run


def _open(side: Contender, index: int, share: float) -> Json:
    side.bench.client("open", "--list", side.listed, "--count", side.size.blocks)  # the kernel knows the names now
    return side.client("open", "--list", side.listed, "--count", _part(15_000, share))


def _lookup(side: Contender, index: int, share: float) -> Json:
    seed = time.monotonic_ns() & 0x7FFFFFFF  # names that were never looked up
    words = ["--count", _part(15_000, share), "--seed", seed]
    return side.client("stat", "--dir", side.listed.parent / "mount/blocks", *words)


def _get(batch: int, depth: int) -> Run:
    def run(side: Contender, index: int, share: float) -> Json:
        words = ["--size", BLOCK, "--count", side.size.blocks, "--batch", batch, "--depth", depth]
        return side.native("get", "--space", side.space, *words, "--passes", _part(30, share), "--seed", 1 + index)

    return run


def _get_large(side: Contender, index: int, share: float) -> Json:
    count = side.size.blocks // 2
    words = ["--size", LARGE, "--count", count, "--batch", count, "--depth", 64, "--passes", _part(8, share)]
    return side.native("get", "--space", side.large, *words, "--seed", 1 + index)


def _exists(side: Contender, index: int, share: float) -> Json:
    words = ["--count", side.size.keys, "--batch", KEYS_A_CALL, "--passes", _part(100, share), "--seed", 1 + index]
    return side.native("exists", "--space", side.keys, *words)


def _store(count: int) -> Run:
    def run(side: Contender, index: int, share: float) -> Json:
        assert side.evicts
        return side.write(_part(count, share))

    return run


def _put(side: Contender, index: int, share: float) -> Json:
    assert side.evicts
    return side.put_blocks(_part(128, share))


def _replay(name: str, *words: str) -> Run:
    def run(side: Contender, index: int, share: float) -> Json:
        assert side.evicts
        return side.side.measured(lambda: side.replay(name, _part(REPLAY_REQUESTS, share), *words))

    return run


@dataclass(frozen=True, slots=True)
class Case:
    kind: str  # of devices
    what: str  # one operation
    run: Run
    settles: bool = False  # a store: the daemon has work left when the client has ended


# Stores evict the blocks that are read, so they come last among the cases of one kind of devices.
CASES = {
    "read-4k": Case("files", "4 KiB O_DIRECT read of an open block", _read(4 * KIB, 10_000)),
    "read-1m": Case("files", "1 MiB O_DIRECT read of an open block", _read(MIB, 1_000)),
    "open": Case("files", "open and close", _open),
    "lookup": Case("files", "stat of a missing name", _lookup),
    "get": Case("files", "get of one 2 MiB block", _get(1, 1)),
    "get-batch": Case("files", "2 MiB block of a get of 32, depth 8", _get(32, 8)),
    "get-deep": Case("files", "2 MiB block of a get of 32, depth 64", _get(32, 64)),
    "get-large": Case("files", "16 MiB block of a get of 16, depth 64", _get_large),
    "exists": Case("files", f"key of an exists for {KEYS_A_CALL:,}", _exists),
    "store": Case("files", "write of 2 MiB and close, 4 threads, evicting", _store(96), settles=True),
    "put": Case("files", "2 MiB block of a put of 64, evicting", _put, settles=True),
    "replay": Case("files", "request of a trace by files, evicting", _replay("replay"), settles=True),
    "replay-native": Case(
        "files", "request of a trace by libkvfs, evicting", _replay("replay-native", "--native"), settles=True
    ),
    "zram-read-4k": Case("zram", "4 KiB O_DIRECT read, zram, inline", _read(4 * KIB, 10_000)),
    "zram-read-1m": Case("zram", "1 MiB O_DIRECT read, zram, inline", _read(MIB, 1_000)),
    "nvme-read-4k": Case("nvme", "4 KiB O_DIRECT read, NVMe/TCP", _read(4 * KIB, 4_000)),
    "nvme-read-1m": Case("nvme", "1 MiB O_DIRECT read, NVMe/TCP", _read(MIB, 400)),
    "nvme-store": Case("nvme", "write of 2 MiB and close, 4 threads, evicting, NVMe/TCP", _store(48), settles=True),
}
KINDS = ("files", "zram", "nvme")
# Native reads: blocks that one client has put are those of any.
ONE_POOL = ("get", "get-batch", "get-deep", "get-large", "exists")


# ---- makings ----


class Comparison:
    """Both builds, and the results of their pairs so far."""

    def __init__(
        self, bench: Bench, builds: Sequence[Build], cases: Sequence[str], size: Size, base: Path, trace: Path,
        one_pool: bool,
    ) -> None:  # fmt: skip
        self.one_pool = one_pool
        self.bench, self.cases, self.size, self.base, self.trace = bench, cases, size, base, trace
        self.builds = {build.name: build for build in builds}
        self.pairs: dict[str, list[Pair]] = {name: [] for name in cases}
        self.calls: dict[str, Json] = {}

    def run(self, rounds: int, pools: int) -> None:
        counts = shares(rounds, pools)
        for kind in KINDS:
            wanted = [name for name in CASES if name in self.cases and CASES[name].kind == kind]
            for making, first in enumerate(making_orders(len(counts))):
                if not wanted:
                    break
                say(f"{kind}: making {making + 1} of {len(counts)}, {first[0]} first")
                try:
                    with contextlib.ExitStack() as stack:
                        sides = self._made(stack, kind, making, first)
                        for name in wanted:
                            pairs = functools.partial(self._pairs, name, sides, making, counts[making], rounds)
                            self.bench.guarded(name, kind, pairs)
                except MissingError as error:
                    for name in wanted:
                        self.bench.skip(name, kind, str(error))
                    break

    def _made(
        self, stack: contextlib.ExitStack, kind: str, making: int, order: Sequence[str]
    ) -> Mapping[str, Contender]:
        """Devices and pools of both builds, in this order."""
        if self.one_pool:
            order = ["new"]
        devices: dict[str, Sequence[Path | str]] = {}
        files: dict[str, list[Path]] = {}
        for name in order:
            base = self.base / f"{kind}-{making}-{name}"
            base.mkdir()
            stack.callback(shutil.rmtree, base, ignore_errors=True)
            if kind == "zram":
                files[name] = stack.enter_context(zram(DEVICE_COUNT, self.size.device))
            else:
                files[name] = stack.enter_context(disk_files(base, "device", DEVICE_COUNT, self.size.device))
            devices[name] = files[name]
        if kind == "nvme":
            # One enclosure for both: two processes would have luck of their own.
            port = stack.enter_context(enclosure({_nqn(name): files[name] for name in order}))
            devices = {name: [f"nvme-tcp://127.0.0.1:{port}/{_nqn(name)}"] for name in order}
        sides = {}
        for name in order:
            build = self.builds[name]
            pool = Kvfs(self.base / f"{kind}-{making}-{name}", devices[name], build.environment())
            stack.callback(pool.stop)
            pool.format()
            mounted = pool.mount()
            side = Side(name, mounted.root, mounted.lower, mounted.pid)
            sides[name] = Contender(self.bench, build, pool, side, self.size, self.trace)
        if self.one_pool:
            filled = sides["new"]
            assert filled.space and filled.large and filled.keys  # put once, by the new build
            sides["old"] = copy.copy(filled)
            sides["old"].build = self.builds["old"]
        return sides

    def _pairs(self, name: str, sides: Mapping[str, Contender], making: int, count: int, rounds: int) -> None:
        """The pairs of one case on one making. After the last of all, the system calls, if the interval is wide."""
        case, pairs, share = CASES[name], self.pairs[name], self.size.share
        for side in sides.values():
            case.run(side, 0, WARM_UP * share)
        if case.settles:
            time.sleep(self.size.settle_s)
        for order in run_orders(len(pairs) + count)[len(pairs) :]:
            index = len(pairs)
            runs = {build: self._measured(case, sides[build], index, share) for build in order}
            digests = {str(run.get("digest")) for run in runs.values()}
            if len(digests) > 1:
                raise BenchError(f"{name}: the builds gave different bytes: {', '.join(digests)}")
            pairs.append(Pair(making, order[0], runs["old"], runs["new"]))
        if len(pairs) == rounds and is_wide(pairs) and "figures" not in pairs[0].new:
            try:
                self.calls[name] = {build: self._calls(case, side, share) for build, side in sides.items()}
            except (BenchError, MissingError) as error:
                self.calls[name] = {"reason": str(error).splitlines()[0]}

    def _measured(self, case: Case, side: Contender, index: int, share: float) -> Json:
        def run() -> Json:
            return case.run(side, index, share)

        return side.settled(run) if case.settles else run()

    def _calls(self, case: Case, side: Contender, share: float) -> Json:
        pid = side.side.pid
        assert pid is not None
        return calls_an_operation(self.bench, pid, lambda part: case.run(side, 0, part * share), self.base)

    def document(self, rounds: int) -> Json:
        return {
            "version": JSON_VERSION,
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "machine": machine(),
            "builds": [build.document() for build in self.builds.values()],
            "rounds": rounds,
            "size": dataclasses.asdict(self.size),
            "cases": [
                case_document(name, CASES[name].what, pairs, self.calls.get(name))
                for name, pairs in self.pairs.items()
                if len(pairs) == rounds
            ],
            "skipped": self.bench.skipped,
            "failed": self.bench.failed,
        }


def _invented(path: Path) -> Path:
    """A trace for the replays, as a file."""
    shape, seed, requests = INVENTED
    trace = invent(shape, seed, requests)
    with path.open("w") as file:
        for blocks, time_s in zip(trace.prompts, trace.times_s, strict=True):
            file.write(json.dumps({"timestamp": time_s * 1000, "input_length": 512 * len(blocks), "hash_ids": blocks}))
            file.write("\n")
    return path


def _nqn(name: str) -> str:
    return f"nqn.2026-11.bench:{name}"


# ---- the command line ----


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        prog="tools/compare",
        description="Compare this tree with a commit in pairs of runs; the ratio is of times, so below 1 is faster.",
        allow_abbrev=False,
    )
    parser.add_argument("commit", metavar="COMMIT", help="the old build; it is built under build/compare")
    parser.add_argument("--cases", metavar="CASE,...", help=f"of {', '.join(CASES)} (default: all)")
    parser.add_argument("--rounds", type=int, metavar="N", default=20, help="pairs of each case (default 20)")
    parser.add_argument("--pools", type=int, metavar="N", default=10, help="makings of the pools (default 10)")
    parser.add_argument("--one-pool", action="store_true", help=f"for {', '.join(ONE_POOL)}: only the client differs")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="of the replays (default: an invented one)")
    parser.add_argument("--quick", action="store_true", help="toy sizes: does everything still work?")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write the JSON document there: every pair")
    parser.add_argument(
        "--directory", type=Path, metavar="DIR", default=MEMORY, help=f"where pools and devices lie (default {MEMORY})"
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Compare; 0 if every case ran or was skipped for a reason, whichever build is faster."""
    with signals.handled() as heard:  # so that everything made is removed, however it ends
        try:
            return _main(_arguments(list(sys.argv[1:] if argv is None else argv)))
        except UsageError as error:
            failure, status = str(error), 2
        except KvfsError as error:
            failure, status = str(error), 1
        except KeyboardInterrupt:
            failure, status = heard.text, heard.status
        print(f"tools/compare: {failure}", file=sys.stderr)
        return status


def _main(arguments: argparse.Namespace) -> int:
    known = list(ONE_POOL if arguments.one_pool else CASES)
    cases = chosen(arguments.cases, known, "cases") if arguments.cases is not None else known
    if arguments.rounds < 1 or arguments.pools < 1:
        raise UsageError("--rounds, --pools: at least 1")
    builds = [checked_out("old", arguments.commit), here("new")]
    binaries = REPOSITORY / "build/bench"
    scale = QUICK if arguments.quick else FULL
    bench = Bench(scale, client=binaries / "bench_client", passthrough_hp=binaries, quick=arguments.quick)
    base = Path(tempfile.mkdtemp(prefix="kvfs-compare-", dir=arguments.directory))
    try:
        trace = arguments.trace or _invented(base / "trace.jsonl")
        comparison = Comparison(bench, builds, cases, TOY if arguments.quick else REAL, base, trace, arguments.one_pool)
        comparison.run(arguments.rounds, arguments.pools)
    finally:
        shutil.rmtree(base, ignore_errors=True)
    document = comparison.document(arguments.rounds)
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(document, indent=2) + "\n")
    print("old {commit}, ".format(**builds[0].document()) + "new {commit}".format(**builds[1].document()))
    print(render(document))
    return 1 if bench.failed else 0


if __name__ == "__main__":
    sys.exit(main())
