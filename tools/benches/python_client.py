"""The Python half of the native path's cases: kvfs.connect() called in fixed loops. `native_client` puts the blocks
that it reads; their options and JSON are the same.
"""

from __future__ import annotations

import argparse
import functools
import json
import random
import resource
import struct
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import kvfs
from benches.common import BenchError
from benches.native import MISSING, key_of

_T = TypeVar("_T")
# native_client begins each page of a block with its number and the page's offset.
_STAMP = struct.Struct("<QQ")
_PAGE = 4096


class Clock:
    """Seconds of calls, and the process's CPU time from the first to the last."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.before = self.after = resource.getrusage(resource.RUSAGE_SELF)

    def start(self) -> None:
        self.before = resource.getrusage(resource.RUSAGE_SELF)

    def time(self, call: Callable[[], _T]) -> _T:
        before = time.perf_counter()
        result = call()
        self.seconds.append(time.perf_counter() - before)
        return result

    def stop(self) -> None:
        self.after = resource.getrusage(resource.RUSAGE_SELF)


def _batches(numbers: Sequence[int], size: int) -> list[Sequence[int]]:
    return [numbers[at : at + size] for at in range(0, len(numbers), size)]


def _get(client: kvfs.Client, arguments: argparse.Namespace, numbers: list[int], clock: Clock) -> None:
    size = arguments.size
    buffers = [client.buffer(size) for _ in range(min(arguments.batch, len(numbers)))]

    def read(batch: Sequence[int], timed: bool) -> None:
        items = list(zip(map(key_of, batch), buffers, strict=False))
        call = functools.partial(client.get_into, items)
        sizes = clock.time(call) if timed else call()
        if sizes != [size] * len(batch):
            raise BenchError(f"get_into of {len(batch)} blocks of {size} bytes: {sizes[:10]}")

    def check(batch: Sequence[int]) -> None:
        for number, buffer in zip(batch, buffers, strict=False):
            for offset in range(0, size, _PAGE):
                if _STAMP.unpack_from(buffer, offset) != (number, offset):
                    raise BenchError(f"block {number}: other bytes at {offset} than were put")

    batch: Sequence[int] = ()
    for batch in _batches(numbers, arguments.batch):
        read(batch, timed=False)
        check(batch)
    clock.start()
    for _ in range(arguments.passes):
        random.shuffle(numbers)
        for batch in _batches(numbers, arguments.batch):
            read(batch, timed=True)
    clock.stop()
    check(batch)


def _exists(client: kvfs.Client, arguments: argparse.Namespace, numbers: list[int], clock: Clock) -> None:
    random.shuffle(numbers)
    batches = [[key_of(number) for number in batch] for batch in _batches(numbers, arguments.batch)]
    clock.start()
    for _ in range(arguments.passes):
        for keys in batches:
            found = clock.time(functools.partial(client.exists, keys))
            if found.count(not arguments.missing) != len(keys):
                raise BenchError(f"exists of {len(keys)} keys: {found.count(True)} are there")
    clock.stop()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python_client", description="The driver is `tools/bench`.")
    parser.add_argument("command", choices=("get", "exists"))
    for name in ("--mount", "--space"):
        parser.add_argument(name, required=True)
    for name, default in (("size", 4096), ("count", 1), ("batch", 64), ("depth", 8), ("passes", 1), ("seed", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--missing", action="store_true")
    arguments = parser.parse_args()
    random.seed(arguments.seed)
    clock = Clock()
    first = MISSING if arguments.missing else 0
    numbers = list(range(first, first + arguments.count))
    with kvfs.connect(arguments.mount, arguments.space, depth=arguments.depth, gpu=None, timeout_s=20) as client:
        (_get if arguments.command == "get" else _exists)(client, arguments, numbers, clock)
    seconds, before, after = sorted(clock.seconds), clock.before, clock.after
    operations = arguments.count * arguments.passes
    document = {
        "command": arguments.command,
        "operations": operations,
        "bytes": operations * arguments.size if arguments.command == "get" else 0,
        "seconds": sum(seconds),
        "calls": len(seconds),
        "latency_us": {
            "mean": sum(seconds) / len(seconds) * 1e6,
            "p50": seconds[(len(seconds) - 1) * 50 // 100] * 1e6,
            "p99": seconds[(len(seconds) - 1) * 99 // 100] * 1e6,
        },
        "cpu_s": {"user": after.ru_utime - before.ru_utime, "system": after.ru_stime - before.ru_stime},
    }
    print(json.dumps(document))


if __name__ == "__main__":
    main()
