"""Builds of other versions under one mount. A newer daemon takes an older holder's mount, and the other way round. A
mount that a build does not know stays for the one that left it.

The other builds have a data plane of their own, with newer versions of all that a holder keeps.
"""

from __future__ import annotations

import errno
import mmap
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator

import helpers
import pytest
from builds import make_build
from helpers import KIB, content, mount_device
from test_held_mounts import HeldPool, _kernel, errno_of, in_thread, meanwhile  # noqa: F401

from kvfs.hold.claim import claim

_VERSION_AT = struct.Struct("=I"), 8  # of journal and list of written inodes, behind the magic number
BOTH, ONLY_NEW = (1, 2), (2, 2)  # versions of what is held that a newer build knows


@pytest.fixture
def pool() -> Iterator[HeldPool]:
    """Without a holder and a mount."""
    with HeldPool(files=2, size="256M", started=False) as made:
        made.mount_args = ("--allow-other", "--hold", str(made.socket))
        yield made


@pytest.mark.slow
def test_a_mount_goes_to_a_newer_build_and_back(pool: HeldPool) -> None:
    old, new = pool.program, make_build(pool.base, "99.9", held=BOTH)
    data = content(300 * KIB, 1)
    pool.hold()
    pool.start()
    (pool.mount / "a").write_bytes(data)
    with (pool.mount / "a").open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        for turn, program in enumerate((new, old, new)):
            (pool.mount / f"a{turn}").write_bytes(data)
            (pool.mount / f"a{turn}").rename(pool.mount / f"b{turn}")
            pool.program = program
            pool.take_over((signal.SIGKILL, signal.SIGTERM)[turn % 2])
            assert not (pool.mount / f"a{turn}").exists()
            assert (pool.mount / f"b{turn}").read_bytes() == data
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            mapped.madvise(mmap.MADV_DONTNEED)
            assert mapped[:] == data
    assert set(versions(pool).values()) == {1}


@pytest.mark.slow
def test_a_newer_build_s_mount_is_refused_by_an_older_one_and_taken_back(pool: HeldPool) -> None:
    """Nothing is changed by the one that refuses. The list of written inodes has a layout here that it cannot read."""
    old, pool.program = pool.program, make_build(pool.base, "99.9", held=BOTH)
    new = pool.program
    pool.hold(new)
    pool.start()
    assert set(versions(pool).values()) == {2}
    for turn, number in enumerate((signal.SIGKILL, signal.SIGTERM)):
        for name in ("a", "b"):
            (pool.mount / name).write_bytes(name.encode() * 5000)
        os.sync()
        go_on = meanwhile(pool.base, lambda: opened(pool), lambda fd: errno_of(lambda: os.write(fd, b"y")))  # type: ignore[arg-type]
        (pool.mount / "a").rename(pool.mount / f"c{turn}")
        (pool.mount / "b").unlink()
        pool.end(number)
        waits = in_thread((pool.mount / f"c{turn}").read_bytes)
        before = index_of(pool)
        pool.program = old
        with pytest.raises(helpers.CommandError, match=r"version 2, and this build knows version 1: start the build"):
            pool.start()
        assert index_of(pool) == before
        assert mount_device(pool.mount) is not None
        pool.program = new
        pool.start()
        assert waits() == b"a" * 5000
        assert go_on() == errno.EBADF
        (pool.mount / "open").unlink(missing_ok=True)
        assert sorted(os.listdir(pool.mount)) == [f"c{number}" for number in range(turn + 1)]


@pytest.mark.slow
def test_a_build_that_reads_no_older_versions_leaves_the_mount_to_the_former(pool: HeldPool) -> None:
    newest = make_build(pool.base, "99.9", held=ONLY_NEW)
    pool.hold()
    pool.start()
    assert "this build can take it over" in doctor(pool, pool.program)
    assert "state of version 1, and this build knows 2 to 2" in doctor(pool, newest)
    (pool.mount / "a").write_bytes(b"a")
    os.sync()
    (pool.mount / "a").rename(pool.mount / "b")
    pool.end(signal.SIGKILL)
    waits = in_thread((pool.mount / "b").read_bytes)
    before, old = index_of(pool), pool.program
    pool.program = newest
    with pytest.raises(helpers.CommandError, match=r"an answer to INIT of version 1, and this build knows version 2"):
        pool.start()
    assert index_of(pool) == before
    pool.program = old
    pool.start()
    assert waits() == b"a"
    assert os.listdir(pool.mount) == ["b"]


@pytest.mark.slow
def test_take_overs_by_two_builds_die_in_the_middle(pool: HeldPool) -> None:
    data = content(200 * KIB, 2)
    programs = (make_build(pool.base, "99.9", held=BOTH), pool.program)
    pool.hold()
    pool.start()
    (pool.mount / "a").write_bytes(data)
    os.sync()
    (pool.mount / "a").rename(pool.mount / "b")
    pool.end(signal.SIGKILL)
    read = in_thread((pool.mount / "b").read_bytes)
    for turn, delay_s in enumerate((0.0, 0.1, 0.2, 0.3, 0.5, 0.7)):
        pool.die_in_the_middle(programs[turn % 2], delay_s)
    for program in programs:
        pool.program = program
        pool.start()
        assert read() == data
        assert os.listdir(pool.mount) == ["b"]
        pool.end(signal.SIGKILL)
    pool.start()
    assert (pool.mount / "b").read_bytes() == data


@pytest.mark.slow
def test_a_newer_holder_serves_an_older_daemon(pool: HeldPool) -> None:
    new = make_build(pool.base, "99.9")
    pool.hold(new)
    pool.start()
    (pool.mount / "a").write_bytes(b"a")
    pool.program = new
    pool.take_over(signal.SIGKILL)
    assert (pool.mount / "a").read_bytes() == b"a"


@pytest.mark.slow
def test_an_older_holder_serves_a_newer_daemon(pool: HeldPool) -> None:
    pool.hold(make_build(pool.base, "0.1", newest=1))
    pool.start()
    (pool.mount / "a").write_bytes(b"a")
    os.sync()
    (pool.mount / "a").rename(pool.mount / "b")
    pool.take_over(signal.SIGKILL)
    assert (pool.mount / "b").read_bytes() == b"a"
    assert os.listdir(pool.mount) == ["b"]


@pytest.mark.slow
def test_a_daemon_and_a_holder_that_share_no_version_name_both(pool: HeldPool) -> None:
    pool.hold()
    pool.start()
    (pool.mount / "a").write_bytes(b"a")
    pid = pool.end(signal.SIGKILL)
    old, pool.program = pool.program, make_build(pool.base, "99.9", oldest=3, newest=4)
    with pytest.raises(helpers.CommandError, match="protocol version 2; this end speaks 3 to 4"):
        pool.start()
    pool.program = old
    pool.start()
    assert pool.pid() != pid
    assert (pool.mount / "a").read_bytes() == b"a"


@pytest.mark.parametrize("what", ["journal", "written", "opens", "state"])
def test_what_this_build_does_not_know_stays_for_the_one_that_does(pool: HeldPool, what: str) -> None:
    """The test stands for that build: it changes a number in what the holder keeps."""
    pool.hold()
    pool.start()
    for name in ("a", "b"):
        (pool.mount / name).write_bytes(name.encode())
    os.sync()
    (pool.mount / "a").rename(pool.mount / "c")
    (pool.mount / "b").unlink()
    pool.end(signal.SIGKILL)
    waits = in_thread((pool.mount / "c").read_bytes)
    former = change(pool, what, struct.pack("=I", 9))
    before = index_of(pool)
    with pytest.raises(helpers.CommandError, match="of version 9, and this build knows version 1: start the build"):
        pool.start()
    assert index_of(pool) == before
    assert mount_device(pool.mount) is not None
    change(pool, what, former)
    pool.start()
    assert waits() == b"a"
    assert os.listdir(pool.mount) == ["c"]


def change(pool: HeldPool, what: str, version: bytes) -> bytes:
    """Set the version of something that the holder keeps. Returns the former."""
    claimed = claim(pool.socket, str(pool.path), str(pool.mount), lambda _: False)
    try:
        left = claimed.left
        assert left is not None
        if what == "state":
            claimed.put(version + left.state[4:], left.fuse, left.memories)
            return left.state[:4]
        (form, at), fd = _VERSION_AT, left.memories[what]
        former = os.pread(fd, form.size, at)
        os.pwrite(fd, version, at)
        return former
    finally:
        claimed.close()


def versions(pool: HeldPool) -> dict[str, int]:
    """Of all that the daemon's holder keeps."""
    found: dict[str, int] = pool.status()["holder"]["versions"]
    return found


def doctor(pool: HeldPool, program: tuple[str, ...]) -> str:
    """The line of a build on the mount that the present daemon would leave."""
    done = subprocess.run(
        [sys.executable, *program, "doctor", str(pool.path)], cwd=helpers.REPOSITORY, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    return "".join(line for line in done.stdout.splitlines() if line.startswith("held mount"))


def opened(pool: HeldPool) -> int:
    fd = os.open(pool.mount / "open", os.O_RDWR | os.O_CREAT)
    os.write(fd, b"x" * 100)
    return fd


def index_of(pool: HeldPool) -> bytes:
    """The index's own file, whole."""
    return (pool.path / "index" / "data.mdb").read_bytes()
