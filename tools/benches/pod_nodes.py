"""`tools/bench_pod`: what a pod costs its nodes, and how soon its nodes know of one another's blocks.

All nodes run on this machine: pool directories and mounts of their own, the same devices, one redis-server. A node of
the pod is compared with a pool of one node on devices of the same size, in pairs that take turns. Each figure says what
it counts; ratios are medians of pairs with a bootstrapped interval of 95 %.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import cast

import kvfs
from benches.common import MIB, BenchError, Json, MissingError, needs_root, number_at, process_cpu_s, say, wait_until
from benches.pairs import interval
from benches.rig import Kvfs
from benches.run import Parser
from kvfs.client.client import Client
from kvfs.errors import KvfsError

SPACE = "bench"
_BLOCK = 2 * MIB
_BATCH = 32
_FOUND_S = 10.0


class Redis:
    """A redis-server of its own, without persistence."""

    def __init__(self, directory: Path) -> None:
        if shutil.which("redis-server") is None:
            raise MissingError("needs redis-server")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = cast(int, free.getsockname()[1])
        self.url = f"redis://127.0.0.1:{self.port}"
        words = ["redis-server", "--port", str(self.port), "--save", "", "--appendonly", "no", "--dir", str(directory)]
        self.process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        wait_until(self._answers, "redis-server", timeout_s=20)

    def _answers(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
            return True
        return False

    def cpu_s(self) -> float:
        return process_cpu_s(self.process.pid)

    def stop(self) -> None:
        self.process.kill()
        self.process.wait(20)


class Bench:
    """Nodes of a pod, and a pool of one node alone."""

    def __init__(self, base: Path, devices: Sequence[str], size: int, nodes: int, rounds: int) -> None:
        self.base, self.rounds, self.count = base, rounds, nodes
        self.results: list[Json] = []
        self.redis = Redis(base)
        self.nodes: list[Kvfs] = []
        # Of a node's part of the pod, so that both evict as much.
        self.part = 2 * size // nodes
        self.alone = Kvfs(base / "alone", self._files("alone", 2, self.part // 2))
        self._devices = list(devices) or self._files("pod", 2, size)

    def _files(self, name: str, count: int, size: int) -> list[str]:
        (self.base / name).mkdir(exist_ok=True)
        found = [str(self.base / name / f"device{i}") for i in range(count)]
        for file in found:
            with open(file, "wb") as made:
                for _ in range(size // MIB):  # a page that nothing was written to costs more at its first write
                    made.write(bytes(MIB))
        return found

    def start(self) -> None:
        where = [word for device in self._devices for word in ("--device", device)]
        self.nodes = [Kvfs(self.base / f"node{i}", self._devices) for i in range(self.count)]
        first = self.nodes[0]
        first.command("pod", "create", first.pool, *where, "--engine", self.redis.url, "--nodes", str(self.count),
                      "--force")  # fmt: skip
        for node in self.nodes[1:]:
            node.command("pod", "join", node.pool, *where)
        self.alone.format()
        for node in (*self.nodes, self.alone):
            node.mount()

    def stop(self) -> None:
        for node in (*self.nodes, self.alone):
            with contextlib.suppress(KvfsError, OSError, ValueError):
                os.kill(node.pid(), signal.SIGCONT)
            node.stop()
        self.redis.stop()

    # ---- results ----

    def add(self, name: str, what: str, target: str, **figures: object) -> None:
        self.results.append({"case": name, "what": what, "target": target, **figures})
        say(f"{name}: {', '.join(f'{key} {_shown(value)}' for key, value in figures.items())} ({target})")

    def pairs(self, name: str, what: str, target: str, base: Callable[[], float], other: Callable[[], float],
              *, beside_alone: bool = False) -> None:  # fmt: skip
        """Seconds of the same work, in turns; the ratio is other to base. beside_alone: also the CPU of the daemons,
        of the pool alone and of the first node."""
        daemons = (self.alone, self.nodes[0]) if beside_alone else ()
        ratios, times = [], ([], [])  # type: tuple[list[float], tuple[list[float], list[float]]]
        base(), other()  # warm
        began = [process_cpu_s(daemon.pid()) for daemon in daemons]
        for index in range(self.rounds):
            order = (base, other) if index % 2 == 0 else (other, base)
            took = {work: work() for work in order}
            ratios.append(took[other] / took[base])
            times[0].append(took[base])
            times[1].append(took[other])
        low, high = interval([ratios])
        cpu = [(process_cpu_s(daemon.pid()) - before) * 1e3 / self.rounds
               for daemon, before in zip(daemons, began, strict=True)]  # fmt: skip
        self.add(name, what, target, ratio=statistics.median(ratios), low=low, high=high,
                 base_ms=statistics.median(times[0]) * 1e3, other_ms=statistics.median(times[1]) * 1e3,
                 **dict(zip(("base_daemon_cpu_ms", "other_daemon_cpu_ms"), cpu, strict=False)),
                 pairs=[round(ratio, 4) for ratio in ratios])  # fmt: skip


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3f}" if value < 100 else f"{value:.0f}"
    return f"{len(value)} pairs" if isinstance(value, list) else str(value)


def _timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _percentiles(samples: Sequence[float]) -> dict[str, float]:
    ordered = sorted(samples)
    return {f"p{p}_ms": ordered[min(len(ordered) - 1, len(ordered) * p // 100)] * 1e3 for p in (50, 99)}


def _keys(name: str, count: int) -> list[bytes]:
    return [f"{name}-{i}".encode() for i in range(count)]


@contextlib.contextmanager
def _clients(*nodes: Kvfs) -> Iterator[list[Client]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(kvfs.connect(str(node.mountpoint), SPACE, depth=8)) for node in nodes]


def _put(client: Client, keys: Sequence[bytes], size: int = _BLOCK) -> None:
    data = client.buffer(size)
    memoryview(data)[:] = os.urandom(4096) * (size // 4096)
    for at in range(0, len(keys), _BATCH):
        client.put((key, data) for key in keys[at : at + _BATCH])


def _await(client: Client, keys: Sequence[bytes]) -> None:
    wait_until(lambda: all(client.exists(keys)), f"{len(keys)} blocks of another node", timeout_s=_FOUND_S)


# ---- cases ----


def look_ups(bench: Bench) -> None:
    """exists() of blocks of one and of many owners, and of own ones."""
    keys = {}
    with _clients(*bench.nodes) as clients:
        for i, client in enumerate(clients):
            keys[i] = _keys(f"look-{i}", 2000)
            _put(client, keys[i], 4096)
        for i in keys:
            _await(clients[0], keys[i])
        one = keys[1]
        spread = [key for i in keys if i for key in keys[i][: len(one) // (len(keys) - 1)]]
        one = one[: len(spread)]
        reader, own = clients[0], keys[0][: len(spread)]

        def look(wanted: Sequence[bytes]) -> float:
            return _timed(lambda: [reader.exists(wanted) for _ in range(10)])

        if len(keys) > 2:
            bench.pairs("exists, many owners", f"{len(one)} keys of {len(keys) - 1} other owners beside as many of one",
                        "1.1", lambda: look(one), lambda: look(spread))  # fmt: skip
        bench.pairs("exists, own and another's", f"{len(one)} keys of another owner beside as many own ones: two "
                    "look-ups, not one", "-", lambda: look(own), lambda: look(one))  # fmt: skip


def look_ups_by_files(bench: Bench) -> None:
    """stat(2) of another node's block: no I/O, no Python."""
    here, there = bench.nodes[0].mountpoint / "lookups", bench.nodes[1].mountpoint / "lookups"
    there.mkdir(exist_ok=True)
    names = [f"b{i}" for i in range(300)]
    for name in names:
        (there / name).write_bytes(b"x" * 65536)
    wait_until(lambda: all((here / name).exists() for name in names), "names of the other node", timeout_s=_FOUND_S)
    before, cpu = bench.nodes[0].status(), time.perf_counter()
    for _ in range(20):
        for name in names:
            os.stat(here / name)
    took = time.perf_counter() - cpu
    after = bench.nodes[0].status()
    moved = {
        name: number_at(after, "counters", name) - number_at(before, "counters", name)
        for name in ("lookups", "forwarded")
    }
    reads = sum(number_at(d, "read_bytes") for d in cast(list[Json], after["devices"])) - sum(
        number_at(d, "read_bytes") for d in cast(list[Json], before["devices"]))  # fmt: skip
    bench.add("LOOKUP of another's name", f"{20 * len(names)} stats", "0 of Python, 0 bytes of I/O",
              us=took / (20 * len(names)) * 1e6, lookups=moved["lookups"], forwarded_to_python=moved["forwarded"],
              bytes_read=reads)  # fmt: skip


def gets(bench: Bench) -> None:
    """get of 2 MiB blocks, depth 8: another node's beside own ones."""
    with _clients(*bench.nodes[:2]) as (here, there):
        own, others = _keys("get-own", 64), _keys("get-other", 64)
        _put(here, own)
        _put(there, others)
        _await(here, others)
        memory = [here.buffer(_BLOCK) for _ in range(_BATCH)]

        def read(keys: Sequence[bytes]) -> None:
            for at in range(0, len(keys), _BATCH):
                found = here.get_into(zip(keys[at : at + _BATCH], memory, strict=True))
                if any(size != _BLOCK for size in found):
                    raise BenchError(f"get: {sum(size != _BLOCK for size in found)} misses of {_BATCH}")

        bench.pairs("get of another's block", "64 blocks of 2 MiB, depth 8, beside own ones (time)", "1.03 (0.97)",
                    lambda: _timed(lambda: read(own)), lambda: _timed(lambda: read(others)))  # fmt: skip


def stores(bench: Bench) -> None:
    """put and files: a node of the pod beside one node alone."""
    with _clients(bench.nodes[0], bench.alone) as (member, alone):
        counter = iter(range(1 << 30))

        def put(client: Client) -> float:
            keys = _keys(f"put-{next(counter)}", 64)
            return _timed(lambda: _put(client, keys))

        for _ in range(bench.part // (64 * _BLOCK) + 1):  # until both evict
            put(member)
            put(alone)
        bench.pairs("put", "64 blocks of 2 MiB on a node of the pod, beside one node alone (time)", "1.03 (0.97)",
                    lambda: put(alone), lambda: put(member), beside_alone=True)  # fmt: skip

        def write(node: Kvfs) -> float:
            directory = node.mountpoint / f"files{next(counter)}"
            directory.mkdir()
            data = b"d" * (512 << 10)

            def work() -> None:
                for i in range(100):
                    (directory / f"{i}.tmp").write_bytes(data)
                    os.rename(directory / f"{i}.tmp", directory / str(i))

            return _timed(work)

        bench.pairs("store by files", "100 files of 512 KiB, written and renamed, beside one node alone (time)",
                    "1.03 (0.97)", lambda: write(bench.alone), lambda: write(bench.nodes[0]),
                    beside_alone=True)  # fmt: skip


def misses(bench: Bench, what: str) -> None:
    """A failed stat and a CREATE beside one node alone."""
    counter = iter(range(1 << 30))

    def fail(node: Kvfs) -> float:
        path = str(node.mountpoint / "nothing")

        def work() -> None:
            for _ in range(3000):
                with contextlib.suppress(FileNotFoundError):
                    os.stat(path)

        return _timed(work)

    def create(node: Kvfs) -> float:
        directory = node.mountpoint / f"made-{what}-{next(counter)}"
        directory.mkdir()

        def work() -> None:
            for i in range(500):
                os.close(os.open(directory / str(i), os.O_CREAT | os.O_WRONLY))

        return _timed(work)

    bench.pairs(f"failed stat, engine {what}", "3,000 stats of a name that no node has", "1.05",
                lambda: fail(bench.alone), lambda: fail(bench.nodes[0]), beside_alone=True)  # fmt: skip
    bench.pairs(f"CREATE, engine {what}", "500 empty files", "1.05", lambda: create(bench.alone),
                lambda: create(bench.nodes[0]), beside_alone=True)  # fmt: skip


def news(bench: Bench, samples: int, *, loaded: bool) -> None:
    """How long until a block of one node is found on another."""
    under = "under load" if loaded else "idle"
    stop = threading.Event()

    def load() -> None:
        with _clients(bench.nodes[0]) as (client,):
            number = 0
            while not stop.is_set():
                _put(client, _keys(f"load-{number % 8}", 8))
                number += 1

    thread = threading.Thread(target=load)
    with _clients(*bench.nodes[:2]) as (here, there):
        if loaded:
            thread.start()
        try:
            took, data = [], here.buffer(65536)
            for i in range(samples):
                key = f"news-{under}-{i}".encode()
                here.put([(key, data)])
                began = time.perf_counter()
                while not there.exists([key])[0]:
                    if time.perf_counter() - began > _FOUND_S:
                        raise BenchError(f"{key!r}: not found in {_FOUND_S} s")
                took.append(time.perf_counter() - began)
            bench.add(f"news by libkvfs, {under}", f"{samples} puts, each until exists() on the other node",
                      "p50 40 ms, p99 100 ms", **_percentiles(took))  # fmt: skip
            took = []
            a, b = bench.nodes[0].mountpoint / "news", bench.nodes[1].mountpoint / "news"
            a.mkdir(exist_ok=True)
            wait_until(b.is_dir, "the directory", timeout_s=_FOUND_S)
            for i in range(samples):
                name = f"{under}{i}"
                (a / f"{name}.tmp").write_bytes(bytes(65536))
                os.rename(a / f"{name}.tmp", a / name)
                began = time.perf_counter()
                while not (b / name).exists():
                    if time.perf_counter() - began > _FOUND_S:
                        raise BenchError(f"{name}: not found in {_FOUND_S} s")
                took.append(time.perf_counter() - began)
            bench.add(f"news by files, {under}", f"{samples} files, each until stat() on the other node",
                      "p50 40 ms, p99 100 ms", **_percentiles(took))  # fmt: skip
            took = [_timed(lambda: there.fresh()) for _ in range(samples)]
            bench.add(f"fresh, {under}", f"{samples} barriers over {bench.count - 1} other nodes", "p50 5 ms",
                      **_percentiles(took))  # fmt: skip
        finally:
            stop.set()
            if loaded:
                thread.join()


def redis_cost(bench: Bench) -> None:
    """Redis' CPU for each block stored, at two rates."""
    with _clients(bench.nodes[0]) as (client,):
        data = client.buffer(4096)
        for rate, count, batch in (("as fast as puts go", 20000, 512), ("in batches of 64, each 50 ms", 1280, 64)):
            before, blocks = bench.redis.cpu_s(), 0
            for at in range(0, count, batch):
                client.put((f"redis-{rate}-{i}".encode(), data) for i in range(at, at + batch))
                blocks += batch
                if batch == 64:
                    time.sleep(0.05)
            time.sleep(0.5)
            bench.add(f"Redis, {rate}", f"{blocks} blocks, {bench.count - 1} readers", "1 us",
                      us_a_block=(bench.redis.cpu_s() - before) / blocks * 1e6)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="tools/bench_pod", description=__doc__, allow_abbrev=False)
    parser.add_argument("--device", action="append", default=[], help="of the pod; what it holds is lost")
    parser.add_argument("--directory", default="/dev/shm", help="for files that take the place of devices")
    parser.add_argument("--size", type=int, default=2048, metavar="MIB", help="of each file")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--quick", action="store_true", help="few rounds, small files: a check, no measurement")
    parser.add_argument("-o", "--output", choices=("text", "json"), default="text")
    options = parser.parse_args(argv)
    rounds, samples = (3, 20) if options.quick else (options.rounds, 200)
    try:
        needs_root()
        with tempfile.TemporaryDirectory(prefix="kvfs-bench-pod-", dir=options.directory) as base:
            bench = Bench(Path(base), options.device, options.size * MIB, options.nodes, rounds)
            try:
                bench.start()
                look_ups(bench)
                look_ups_by_files(bench)
                gets(bench)
                stores(bench)
                misses(bench, "there")
                news(bench, samples, loaded=False)
                news(bench, samples, loaded=True)
                redis_cost(bench)
                bench.redis.process.send_signal(signal.SIGSTOP)
                misses(bench, "stopped")
                bench.redis.process.send_signal(signal.SIGCONT)
            finally:
                bench.stop()
    except KvfsError as error:
        print(f"tools/bench_pod: {error}", file=sys.stderr)
        return 1
    print(json.dumps(bench.results, indent=1) if options.output == "json" else "")
    return 0


if __name__ == "__main__":
    sys.exit(main())
