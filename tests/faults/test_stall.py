"""The daemon's Python stands still for a second. Writers go on while the supply of open segments lasts, then wait."""

from __future__ import annotations

import os
import pathlib
import sys
import threading
import time
from collections.abc import Callable

import helpers
import pytest
from helpers import KIB, Pool, assert_same, content, read_file, wait_until

WRITERS = 16
SIZE = 16 * KIB
# The request's deadline is 60 s; nobody needs a fraction of it.
LONGEST_S = 10.0


Ends = list[tuple[int, float, float]]  # of each store its number, begin and end


def store(directory: pathlib.Path, writer: int, ends: Ends, until: Callable[[], bool]) -> None:
    index = 0
    while not until():
        begun = time.monotonic()
        made = directory / f"tmp-{index}"
        descriptor = os.open(made, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        os.write(descriptor, content(SIZE, (writer, index)))
        os.close(descriptor)
        made.rename(directory / f"{index}")
        ends.append((index, begun, time.monotonic()))
        index += 1


@pytest.mark.parametrize("full", [False, True], ids=["empty", "full"])
def test_writers_go_on_while_python_stands_still(
    full: bool, own_pool: Callable[..., Pool], tmp_path: pathlib.Path
) -> None:
    pool = own_pool(size="64M", started=False, format_args=("--segment-size", "4M"))
    helpers.run(
        sys.executable,
        pathlib.Path(__file__).with_name("stalling.py"),
        tmp_path,
        "mount",
        pool.path,
        pool.mount,
        *pool.mount_args,
        environment=pool.environment,
    )
    if full:
        for index in range(300):
            helpers.write_file(pool.mount / f"old-{index}", content(1024 * KIB, ("old", index)))
    ends: list[Ends] = [[] for _ in range(WRITERS)]
    failures: list[BaseException] = []
    over = threading.Event()

    def write(writer: int) -> None:
        directory = pool.mount / f"writer-{writer}"
        try:
            directory.mkdir()
            store(directory, writer, ends[writer], over.is_set)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=write, args=(writer,)) for writer in range(WRITERS)]
    for thread in threads:
        thread.start()
    wait_until(lambda: all(len(each) > 20 for each in ends) or failures, "every writer stores")
    (tmp_path / "stall").touch()
    wait_until((tmp_path / "stalling").exists, "Python stands still", timeout_s=30)
    begun = time.monotonic()
    wait_until(lambda: not (tmp_path / "stalling").exists(), "Python goes on", timeout_s=30)
    ended = time.monotonic()
    count = [len(each) for each in ends]
    wait_until(lambda: all(len(each) > at + 5 for each, at in zip(ends, count, strict=True)) or failures, "all go on")
    over.set()
    for thread in threads:
        thread.join(60)
    assert not failures and not any(thread.is_alive() for thread in threads), failures
    meanwhile = sum(begun < end < ended for each in ends for _, _, end in each)
    assert meanwhile > WRITERS, f"{meanwhile} stores ended while Python stood still for {ended - begun:.2f} s"
    longest = max(end - start for each in ends for _, start, end in each)
    assert longest < LONGEST_S * helpers.slowness(), f"a store took {longest:.1f} s"
    for writer, each in enumerate(ends):
        index = each[-1][0]
        assert_same(
            read_file(pool.mount / f"writer-{writer}" / f"{index}"), content(SIZE, (writer, index)), f"{writer}-{index}"
        )
