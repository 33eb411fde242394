"""Counters of lookups and hits in `kvfs status`: they match users' idea of a hit, whatever the kernel's caches
answer."""

import mmap
import os
import pathlib
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
from helpers import Pool, content, opened, read_file, write_file

import kvfs
from kvfs.frontend.asking import ControlClient

SIZE = 64 * 1024


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(files=2, size="128M") as made:
        yield made


def status(pool: Pool) -> dict[str, Any]:
    """Without a process of its own: a fork closes copies of what is open for writing, and that seals it."""
    with ControlClient(pool.path) as client:
        return cast(dict[str, Any], client.call("status"))


class Counted:
    """Counters of a pool, as differences to those of before."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._before = self._now()

    def _now(self) -> tuple[int, int]:
        counters = status(self._pool)["counters"]
        return counters["blocks_found"], counters["blocks_missed"]

    def take(self) -> tuple[int, int]:
        """Found and missed since the last time."""
        before, self._before = self._before, self._now()
        return self._before[0] - before[0], self._before[1] - before[1]


def beside_others(test: Callable[[Pool, pathlib.Path], None]) -> Callable[[Pool], None]:
    """Run the test in a directory of its own, and up to five times.

    Somebody else's `kvfs metrics` may be told of a name between its look-up and its CREATE. What was told never falls.
    """

    def run(pool: Pool) -> None:
        for attempt in range(5):
            place = pool.mount / f"{test.__name__}-{attempt}"
            place.mkdir()
            try:
                test(pool, place)
                return
            except AssertionError:
                if attempt == 4:
                    raise

    return run


def store(path: pathlib.Path, seed: object = 0) -> None:
    """As engines do: a temporary file, renamed."""
    temporary = path.with_name(path.name + f".tmp-{os.getpid()}")
    write_file(temporary, content(SIZE, seed))
    os.rename(temporary, path)


@beside_others
def test_blocks_that_are_there_are_found_though_the_kernel_knows_their_names(pool: Pool, place: pathlib.Path) -> None:
    """The kernel answers a stat of a name that it knows by itself, so only missing names reach the daemon. With 92 of
    100 blocks found, the hit ratio was once 0."""
    names = [place / f"known-{i}" for i in range(92)]
    for path in names:
        store(path)
    counted = Counted(pool)
    for path in [*names, *(place / f"unknown-{i}" for i in range(8))]:
        if os.path.exists(path):
            read_file(path)
    assert counted.take() == (92, 8)


@beside_others
def test_what_is_stored_was_not_missed(pool: Pool, place: pathlib.Path) -> None:
    """Before a name is made or renamed to, the kernel asks for it. Nobody else did."""
    counted = Counted(pool)
    for i in range(20):
        store(place / f"stored-{i}")
    os.makedirs(place / "stored" / "below")
    os.symlink("stored-1", place / "stored" / "link")
    os.mknod(place / "stored" / "node", 0o644)
    assert counted.take() == (0, 1), "os.makedirs asks whether the upper one is there"


@beside_others
def test_a_block_that_is_asked_for_and_then_stored_is_missed_once(pool: Pool, place: pathlib.Path) -> None:
    counted = Counted(pool)
    for i in range(10):
        path = place / f"asked-{i}"
        assert not os.path.exists(path)
        store(path, i)
    assert counted.take() == (0, 10)
    for i in range(10):
        store(place / f"asked-{i}", i + 1)  # over the other: asked for by nobody
    assert counted.take() == (0, 0)


def test_a_file_that_is_being_written_is_no_block_yet(pool: Pool) -> None:
    counted, before = Counted(pool), status(pool)["blocks"]
    with open(pool.mount / "unsealed", "wb") as file:
        file.write(b"x" * SIZE)
        file.flush()
        assert len(read_file(pool.mount / "unsealed")) == SIZE
        assert counted.take() == (0, 0)
        assert status(pool)["blocks"] == before
    read_file(pool.mount / "unsealed")
    assert counted.take() == (1, 0)
    assert status(pool)["blocks"] == before + 1


def test_only_blocks_count_as_blocks(pool: Pool) -> None:
    """Directories, symbolic links, and what lost its name do not; a block that is rewritten or renamed is one."""
    before = status(pool)["blocks"]
    os.makedirs(pool.mount / "directory" / "another")
    os.symlink("nowhere", pool.mount / "directory" / "link")
    assert status(pool)["blocks"] == before
    for name in ("one", "two", "two", "three"):
        store(pool.mount / "directory" / name)
    assert status(pool)["blocks"] == before + 3
    os.rename(pool.mount / "directory" / "one", pool.mount / "directory" / "two")
    assert status(pool)["blocks"] == before + 2
    with open(pool.mount / "directory" / "three", "rb"):
        os.unlink(pool.mount / "directory" / "three")
        assert status(pool)["blocks"] == before + 1
    write_file(pool.mount / "directory" / "two", content(SIZE, 2))
    assert status(pool)["blocks"] == before + 1


def test_a_native_client_s_blocks_count_alike(pool: Pool) -> None:
    counted = Counted(pool)
    with kvfs.connect(pool.mount, namespace="counted") as client:
        keys = [b"%02d" % i for i in range(12)]
        client.put([(key, content(SIZE, key)) for key in keys[:10]])
        there = [key for key, found in zip(keys, client.exists(keys), strict=True) if found]
        client.get_into([(key, client.buffer(SIZE)) for key in there])
    found, missed = counted.take()
    assert (found, missed) == (10, 2)


def test_how_old_blocks_were_when_they_were_found(pool: Pool) -> None:
    store(pool.mount / "aged")
    before = status(pool)["found_ages"]
    for age_s in (0, 3, 1000):
        os.utime(pool.mount / "aged", ns=(0, (int(os.stat(pool.mount).st_ctime) - age_s) * 10**9))
        # Past the kernel's cache: pages from there are read unseen, which is no hit.
        with opened(pool.mount / "aged", os.O_RDONLY | os.O_DIRECT) as descriptor:
            os.preadv(descriptor, [mmap.mmap(-1, 4096)], 0)
    changed = [now - then for now, then in zip(status(pool)["found_ages"], before, strict=True)]
    # Of a second's slack: the time of the daemon's start may be long ago on a busy machine.
    assert sum(changed) == 3 and sum(changed[9:12]) == 1, changed
