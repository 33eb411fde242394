"""Builds of other versions under one mount. A newer daemon takes an older holder's mount, and the other way round. A
mount that a build does not know stays for the one that left it."""

from __future__ import annotations

import mmap
import os
import signal
import struct
from collections.abc import Iterator

import helpers
import pytest
from builds import make_build
from helpers import KIB, content, mount_device
from test_held_mounts import HeldPool, _kernel, in_thread  # noqa: F401

from kvfs.hold.claim import claim

_VERSION_AT = struct.Struct("=I"), 8  # of journal and list of written inodes, behind the magic number


@pytest.fixture
def pool() -> Iterator[HeldPool]:
    """Without a holder and a mount."""
    with HeldPool(files=2, size="256M", started=False) as made:
        made.mount_args = ("--allow-other", "--hold", str(made.socket))
        yield made


@pytest.mark.slow
def test_a_mount_goes_to_a_newer_build_and_back(pool: HeldPool) -> None:
    old, new = pool.program, make_build(pool.base, "99.9")
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
def test_a_daemon_and_a_holder_that_share_no_version_name_both(pool: HeldPool) -> None:
    pool.hold()
    pool.start()
    (pool.mount / "a").write_bytes(b"a")
    pid = pool.end(signal.SIGKILL)
    old, pool.program = pool.program, make_build(pool.base, "99.9", oldest=2, newest=3)
    with pytest.raises(helpers.CommandError, match="protocol version 1; this end speaks 2 to 3"):
        pool.start()
    pool.program = old
    pool.start()
    assert pool.pid() != pid
    assert (pool.mount / "a").read_bytes() == b"a"


@pytest.mark.parametrize("what", ["journal", "written"])
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
    number = version(pool, what, 9)
    before = index_of(pool)
    with pytest.raises(helpers.CommandError, match=f"of version 9, and this build knows version {number}: start the"):
        pool.start()
    assert index_of(pool) == before
    assert mount_device(pool.mount) is not None
    version(pool, what, number)
    pool.start()
    assert waits() == b"a"
    assert os.listdir(pool.mount) == ["c"]


def version(pool: HeldPool, what: str, number: int) -> int:
    """Set the version of memory that the holder keeps. Returns the former."""
    claimed = claim(pool.socket, str(pool.path), str(pool.mount), lambda _: False)
    try:
        assert claimed.left is not None
        fd = claimed.left.journal if what == "journal" else claimed.left.written
        assert fd is not None
        form, at = _VERSION_AT
        (former,) = form.unpack(os.pread(fd, form.size, at))
        os.pwrite(fd, form.pack(number), at)
        return int(former)
    finally:
        claimed.close()


def index_of(pool: HeldPool) -> bytes:
    """The index's own file, whole."""
    return (pool.path / "index" / "data.mdb").read_bytes()
