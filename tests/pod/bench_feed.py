"""Figures of the feed through a real redis-server: its CPU a record, latency of calls, lag between two processes.

    python tests/pod/bench_feed.py [--seconds N] [--readers N]

Each case says how many readers there are; Redis works for each of them. One line of JSON a case.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
import time
from collections.abc import Callable
from multiprocessing.synchronize import Event
from pathlib import Path

from members import Node, make_batch
from servers import Server, wait_until

from kvfs.pod.engine import BEGINNING, Engine
from kvfs.pod.limits import Limits
from kvfs.pod.redis_engine import RedisEngine
from kvfs.pod.url import parse_url

STREAM = "kvfs:{u}:0"


def engine_of(url: str) -> RedisEngine:
    return RedisEngine(parse_url(url), pool_key=STREAM)


def percentiles(samples: list[float]) -> dict[str, float]:
    ordered = sorted(samples)
    return {
        f"p{percent}": round(ordered[min(len(ordered) - 1, len(ordered) * percent // 100)], 3) for percent in (50, 99)
    }


def cpu_of(engine: Engine, work: Callable[[], int]) -> tuple[float, int]:
    """Redis' CPU seconds in some work, and the records of it."""
    before = engine.information().cpu_s
    records = work()
    return engine.information().cpu_s - before, records


def cpu_a_record(url: str, records: int, entries: int, readers: int, pause_s: float) -> dict[str, float | int]:
    """Append so many entries, each read by so many readers as it comes."""
    engine = engine_of(url)
    engine.remove(STREAM)
    stopping = multiprocessing.Event()
    processes = [multiprocessing.Process(target=read_all, args=(url, stopping)) for _ in range(readers)]
    for process in processes:
        process.start()
    time.sleep(0.5)
    data = make_batch(0, 1, 0, records)

    def work() -> int:
        oldest = None
        for index in range(entries):
            position = engine.append(STREAM, {b"b": data, b"t": bytes(8)}, oldest=oldest)
            if index == 64:
                oldest = position
            time.sleep(pause_s)
        return records * entries

    cpu_s, count = cpu_of(engine, work)
    stopping.set()
    for process in processes:
        process.join()
    engine.close()
    return {
        "readers": readers, "records_an_entry": records, "entry_size": len(data),
        "cpu_us_an_entry": round(cpu_s / entries * 1e6, 1), "cpu_ns_a_record": round(cpu_s / count * 1e9, 1),
    }  # fmt: skip


def read_all(url: str, stopping: Event) -> None:
    engine = engine_of(url)
    position = BEGINNING
    while not stopping.is_set():
        for entry in engine.read({STREAM: position}, wait_s=0.2, count=8):
            position = entry.position
    engine.close()


def latency(url: str, count: int) -> dict[str, dict[str, float]]:
    """Of calls, in ms, one after another."""
    engine = engine_of(url)
    found: dict[str, dict[str, float]] = {}
    small, large = make_batch(0, 1, 0, 10), make_batch(0, 1, 0, 1600)
    last = engine.append(STREAM, {b"b": large})
    cases: dict[str, Callable[[], object]] = {
        "ping": engine.ping,
        "xadd_456_bytes": lambda: engine.append(STREAM, {b"b": small}, oldest=last),
        "xadd_64_kib": lambda: engine.append(STREAM, {b"b": large}, oldest=last),
        "xread_64_kib": lambda: engine.read({STREAM: (last[0] - 1, 0)}, wait_s=0, count=1),
    }
    for name, call in cases.items():
        samples = []
        for _ in range(count):
            begin = time.perf_counter()
            call()
            samples.append((time.perf_counter() - begin) * 1000)
        found[f"{name}_ms"] = percentiles(samples)
    engine.close()
    return found


def publish(url: str, seconds: float, records: int, pause_s: float) -> None:
    node = Node(0, 2, [lambda: engine_of(url)], limits=Limits())
    wait_until(lambda: node.follows(1))
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        node.source.put(records)
        time.sleep(pause_s)
    time.sleep(0.5)
    node.stop()


def lag(url: str, seconds: float, records: int, pause_s: float) -> dict[str, object]:
    """From the owner's taking of a batch in one process to its application in another."""
    node = Node(1, 2, [lambda: engine_of(url)], limits=Limits())
    process = multiprocessing.Process(target=publish, args=(url, seconds, records, pause_s))
    process.start()
    process.join()
    owner = node.pod.statistics().owners[0]
    node.stop()
    return {
        "records_a_batch": records, "pause_ms": pause_s * 1000, "batches": owner.batches, "mb_a_second":
        round(owner.size / seconds / 1e6, 2), "lag_ms_p50": round(owner.lag_ms_p50, 2), "lag_ms_p99":
        round(owner.lag_ms_p99, 2), "gaps": owner.gaps, "repeats": owner.repeats,
    }  # fmt: skip


def barrier(url: str, count: int) -> dict[str, object]:
    """Barriers and leases between two nodes of one process: each is four trips through the engine."""
    a, b = (Node(slot, 2, [lambda: engine_of(url)], limits=Limits()) for slot in (0, 1))
    wait_until(lambda: a.follows(1) and b.follows(0))
    found: dict[str, object] = {}
    b.keeper.keys.add(b"k" * 16)
    calls: dict[str, Callable[[], object]] = {
        "fresh": lambda: a.pod.fresh(5.0),
        "lease": lambda: a.pod.lease(1, [b"k" * 16], 1.0, 5.0),
    }
    for name, call in calls.items():
        samples = []
        for _ in range(count):
            b.source.hold()
            begin = time.perf_counter()
            call()
            samples.append((time.perf_counter() - begin) * 1000)
        found[f"{name}_ms"] = percentiles(samples)
    a.stop()
    b.stop()
    return found


def run(seconds: float, readers: int) -> list[dict[str, object]]:
    """All cases, each printed as it ends."""
    results: list[dict[str, object]] = []

    def told(name: str, found: dict[str, object]) -> None:
        results.append({"case": name, **found})
        print(json.dumps(results[-1]), flush=True)

    with tempfile.TemporaryDirectory() as directory:
        server = Server(Path(directory)).start()
        try:
            count = max(20, int(seconds * 200))
            told("latency", dict(latency(server.url, count)))
            for many in (0, readers):
                told("cpu: entries of 64 KiB", dict(cpu_a_record(server.url, 1600, count, many, 0.0)))
                told("cpu: batches of 20 ms", dict(cpu_a_record(server.url, 50, int(seconds * 50), many, 0.02)))
            told("lag: a batch each 20 ms", lag(server.url, seconds, 50, 0.02))
            told("lag: entries of 64 KiB, 100 a second", lag(server.url, seconds, 1600, 0.01))
            told("barrier and lease", barrier(server.url, count))
        finally:
            server.kill()
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description="figures of a pod's feed")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--readers", type=int, default=4)
    options = parser.parse_args()
    run(options.seconds, options.readers)


if __name__ == "__main__":
    main()
