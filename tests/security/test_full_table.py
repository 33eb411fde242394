"""One user cannot fill the table of names for all: by directories, links or empty files. Here it has 6,000 names."""

import errno
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers import Pool, in_child, raises_errno, requires_root, wait_until, write_file

from kvfs.status import prometheus

pytestmark = pytest.mark.usefixtures("only_root")

MALLORY, ALICE = 41_001, 41_002
RECORDS = 6_000
# `kvfs`, with a table that no option makes so small.
_PROGRAM = f"""
import sys
from kvfs.store.opening import StoreOptions
StoreOptions.__init__.__kwdefaults__["records_max"] = {RECORDS}
from kvfs.__main__ import main
sys.exit(main())
"""


@pytest.fixture
def pool(own_pool: Callable[..., Pool]) -> Pool:
    requires_root()
    made = own_pool(files=1, size="256M", program=("-c", _PROGRAM))
    assert made.status()["names"]["size"] == RECORDS
    return made


def home(pool: Pool, user: int) -> Path:
    path = pool.mount / str(user)
    path.mkdir()
    os.chown(path, user, user)
    return path


def make_all(path: Path, make: Callable[[str], object]) -> tuple[int, int]:
    """How many names of that kind could be made, and the error of the next."""
    for made in range(2 * RECORDS):
        try:
            make(str(path / str(made)))
        except OSError as error:
            return made, error.errno or 0
    return 2 * RECORDS, 0


def kept_of(pool: Pool, user: int) -> dict[str, int]:
    return next((entry for entry in pool.status()["users"] if entry["user"] == user), {})


def touch(path: str) -> None:
    os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))


def test_a_user_who_fills_the_table_of_names_is_refused_and_others_go_on(pool: Pool) -> None:
    mine, hers = home(pool, MALLORY), home(pool, ALICE)

    def fill() -> None:
        made, refused = make_all(mine, os.mkdir)
        assert RECORDS // 6 < made < RECORDS // 4 and refused == errno.EDQUOT, (made, refused)
        with raises_errno(errno.EDQUOT):
            os.symlink("to", mine / "link")
        (mine / "0" / "file").write_bytes(b"stored all the same")
        held = []
        with raises_errno(errno.EDQUOT):
            while True:
                held.append(os.open(mine / f"open-{len(held)}", os.O_CREAT | os.O_WRONLY))
                assert len(held) < RECORDS // 10
        with raises_errno(errno.EDQUOT):
            os.mknod(mine / "node")

    in_child(fill, user=MALLORY, group=MALLORY)
    write_file(pool.mount / "of-root", b"x" * 100_000)
    (pool.mount / "directory-of-root").mkdir()

    def go_on() -> None:
        for i in range(200):
            (hers / f"d{i}").mkdir()
            (hers / f"d{i}" / "file").write_bytes(b"%d" % i)

    in_child(go_on, user=ALICE, group=ALICE)
    kept = kept_of(pool, MALLORY)
    assert kept["names"] > RECORDS // 6 and kept["names_beyond"]
    assert f"user {MALLORY} has {kept['names']} directories" in pool.command("status", str(pool.path)).stdout
    assert f'user="user {MALLORY}"' in prometheus.render([pool.status()]).decode()

    def clear() -> None:
        subprocess.run(["find", str(mine), "-mindepth", "1", "-type", "d", "-empty", "-delete"], check=True)
        (mine / "again").mkdir()

    pool.umount()
    pool.start()
    assert kept_of(pool, MALLORY)["names_beyond"], "a mount counts anew"
    in_child(clear, user=MALLORY, group=MALLORY)


def test_a_storm_of_empty_files_evicts_them_and_no_name_is_refused(pool: Pool) -> None:
    mine = home(pool, MALLORY)
    held = os.open(mine / "held", os.O_CREAT | os.O_RDWR, 0o644)
    write_file(pool.mount / "large", os.urandom(2 << 20))
    pinned = mine / "pinned"
    touch(str(pinned))
    os.setxattr(pinned, "user.kvfs.pin", b"1")

    def storm() -> None:
        made, refused = make_all(mine, touch)
        assert (made, refused) == (2 * RECORDS, 0)

    in_child(storm, user=MALLORY, group=MALLORY)
    assert (mine / f"{2 * RECORDS - 1}").stat().st_size == 0 and pinned.stat().st_size == 0
    os.write(held, b"still open")
    os.close(held)
    assert (mine / "held").read_bytes() == b"still open"
    wait_until(lambda: pool.status()["names"]["used"] <= RECORDS - RECORDS // 32, "free records")
    status = pool.status()
    assert status["counters"]["evicted_blocks"] > RECORDS // 2
    assert status["segments"]["free"] > status["segments"]["count"] // 2, "and nearly all of the pool is free"
    assert len(list(mine.iterdir())) < RECORDS
    (pool.mount / "after").mkdir()
