"""One user cannot hold a pool full for all: by blocks kept open, by files being written, by pins, by slabs."""

import errno
import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from helpers import (
    BOTH_WAYS,
    IDMAP,
    MIB,
    USERS,
    Pool,
    assert_same,
    content,
    in_child,
    opened,
    opened_by,
    pool_of_shares,
    raises_errno,
    read_file,
    requires_root,
    wait_until,
    write_file,
)

pytestmark = pytest.mark.usefixtures("only_root")

MALLORY, ALICE = 41_001, 41_002
BLOCK = MIB

# Opens all files in a directory, says how many, and then, for each line of input, how many of them can be read whole.
_HOLDER = """
import mmap, os, sys
os.setgid(int(sys.argv[2])); os.setuid(int(sys.argv[2]))
held = []
for name in sorted(os.listdir(sys.argv[1])):
    try:
        held.append((name, os.open(os.path.join(sys.argv[1], name), os.O_RDONLY | os.O_DIRECT)))
    except FileNotFoundError:  # evicted since it was listed
        pass
print(len(held), flush=True)
page = mmap.mmap(-1, 1 << 20)
for line in sys.stdin:
    whole = failed = 0
    for name, descriptor in held:
        try:
            assert os.preadv(descriptor, [page], 0) == 1 << 20, name
            assert bytes(page[:8]) == name.encode().ljust(8), name  # never another block's
            whole += 1
        except OSError as error:
            assert error.errno == 5, (name, error)
            failed += 1
    print(whole, failed, flush=True)
"""


# Keeps files open for writing, in one of three ways, until it is refused; says how many, by which errno, and waits.
_WRITER = """
import os, sys
os.setgid(int(sys.argv[2])); os.setuid(int(sys.argv[2]))
os.chdir(sys.argv[1])
count, refused = 0, 0
try:
    if sys.argv[3] == "truncate":
        descriptor = os.open("sparse", os.O_CREAT | os.O_RDWR)
        while True:
            os.ftruncate(descriptor, (count + 1) << 20)
            count += 1
    for name in sorted(os.listdir(".")) if sys.argv[3] == "reopen" else map(str, range(1 << 20)):
        try:
            descriptor = os.open(name, os.O_RDWR if sys.argv[3] == "reopen" else os.O_CREAT | os.O_WRONLY)
        except FileNotFoundError:  # evicted since it was listed
            continue
        if sys.argv[3] == "write":
            os.write(descriptor, bytes(1 << 20))
        count += 1
except OSError as error:
    refused = error.errno
print(count, refused, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def pool(request: pytest.FixtureRequest, own_pool: Callable[..., Pool]) -> Pool:
    return pool_of_shares(request, own_pool, "32M")


@contextmanager
def holder(pool: Pool, user: int) -> Iterator[Callable[[], tuple[int, int]]]:
    """A process of `user` with all files there open; how many of them it can read, and cannot."""
    process = subprocess.Popen([sys.executable, "-c", _HOLDER, str(pool.mount), str(user)], text=True,
                               stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # fmt: skip
    assert process.stdin is not None and process.stdout is not None

    def look() -> tuple[int, int]:
        print(file=process.stdin, flush=True)
        whole, failed = process.stdout.readline().split()
        return int(whole), int(failed)

    try:
        assert int(process.stdout.readline()) > 0
        yield look
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()


def block(name: str) -> bytes:
    return name.encode().ljust(8) + content(BLOCK - 8, name)


def fill(pool: Pool, first: int, count: int) -> None:
    for i in range(first, first + count):
        write_file(pool.mount / f"{i:06d}", block(f"{i:06d}"))


def user_of(pool: Pool, user: int) -> dict[str, int]:
    return next((entry for entry in pool.status()["users"] if entry["user"] == user), {})


@BOTH_WAYS
def test_a_user_who_holds_all_blocks_open_loses_those_beyond_the_share_and_others_go_on(pool: Pool) -> None:
    share = pool.status()["share"]
    fill(pool, 0, 3 * pool.status()["space"]["size"] // BLOCK // 4)
    for path in pool.mount.iterdir() if pool.mount_args == IDMAP else ():
        os.chown(path, MALLORY, MALLORY)
    with holder(pool, MALLORY) as look:
        before = user_of(pool, MALLORY)
        assert before["open"] > 2 * share, "more than twice the share is open"
        fill(pool, 1000, 3 * pool.status()["space"]["size"] // BLOCK)  # no ENOSPC

        def settled() -> dict[str, int] | None:
            """The status and the readable blocks agree: the evictor may have been at work in between."""
            whole, failed = look()
            after = user_of(pool, MALLORY)
            return after if (whole * BLOCK, failed) == (after["open"], after["evicted_open"]) else None

        after = wait_until(settled, "an account that is right")
        assert after["evicted_open"] > 0
        assert share - BLOCK <= after["open"] <= share + 8 * MIB, "what lies within the share was left"
        assert f"user {MALLORY}" in pool.command("status", str(pool.path)).stdout
    wait_until(lambda: user_of(pool, MALLORY)["open"] == 0, "the release of all that was open")


def test_a_user_within_the_share_and_root_keep_what_they_have_open(pool: Pool) -> None:
    fill(pool, 0, 10)
    with holder(pool, ALICE) as alice, holder(pool, 0) as root:
        fill(pool, 1000, 2 * pool.status()["space"]["size"] // BLOCK)
        assert alice() == (10, 0) and root() == (10, 0)


def test_a_block_that_others_have_open_within_their_share_stays(pool: Pool) -> None:
    """The one beyond the share opened it first; whoever opens it next is charged for it, and keeps it."""
    fill(pool, 0, 3 * pool.status()["space"]["size"] // BLOCK // 4)
    with holder(pool, MALLORY) as mallory:
        path = pool.mount / "000003"
        with opened_by(ALICE, lambda: os.open(path, os.O_RDONLY | os.O_DIRECT)) as descriptor:
            fill(pool, 1000, 2 * pool.status()["space"]["size"] // BLOCK)
            assert mallory()[1] > 0
            page = mmap.mmap(-1, BLOCK)
            assert os.preadv(descriptor, [page], 0) == BLOCK
            assert_same(page[:], block("000003"), "a block open within the share")


@pytest.mark.parametrize(
    ("pool", "how"),
    [(USERS, "write"), (USERS, "truncate"), (USERS, "reopen"), (IDMAP, "reopen")],
    indirect=["pool"],
    ids=["write", "truncate", "reopen", "reopen-idmap"],
)
def test_a_user_who_keeps_files_open_for_writing_leaves_room_for_others(pool: Pool, how: str) -> None:
    status = pool.status()
    share, size = status["share"], status["space"]["size"]
    mine = pool.mount / "mine"
    mine.mkdir()
    for i in range(3 * size // BLOCK // 4 if how == "reopen" else 0):
        write_file(mine / f"{i:06d}", block(f"{i:06d}"))
    for path in (mine, *mine.iterdir()):
        os.chown(path, MALLORY, MALLORY)
    with subprocess.Popen([sys.executable, "-c", _WRITER, str(mine), str(MALLORY), how], text=True,
                          stdin=subprocess.PIPE, stdout=subprocess.PIPE) as writer:  # fmt: skip
        assert writer.stdin is not None and writer.stdout is not None
        count, refused = map(int, writer.stdout.readline().split())
        assert refused == errno.EDQUOT and share <= (count + 1) * BLOCK * (2 if how == "reopen" else 1) < size
        assert user_of(pool, MALLORY)["writing"] == count * BLOCK
        fill(pool, 1000, 2 * size // BLOCK)  # no ENOSPC

        def alices() -> None:
            directory = pool.mount / "alices"
            for i in range(share // BLOCK // 2):
                write_file(directory / f"{i}", bytes(BLOCK))

        (pool.mount / "alices").mkdir()
        (pool.mount / "alices").chmod(0o777)
        in_child(alices, user=ALICE, group=ALICE)
        writer.communicate("")
    wait_until(lambda: not user_of(pool, MALLORY).get("writing"), "the end of what was being written")


def test_a_user_alone_may_write_more_than_the_share(pool: Pool) -> None:
    """Blocks that are stored and closed are nobody's, and there may be any number."""
    status = pool.status()
    directory = pool.mount / "alices"
    directory.mkdir()
    directory.chmod(0o777)

    def store() -> None:
        for i in range(2 * status["space"]["size"] // BLOCK):
            write_file(directory / f"{i}", bytes(BLOCK))

    in_child(store, user=ALICE, group=ALICE)


@BOTH_WAYS
def test_a_pin_beyond_the_share_is_refused_and_one_within_it_counts(pool: Pool) -> None:
    share = pool.status()["share"]
    directory = pool.mount / "large"
    directory.mkdir()
    for i in range(share // BLOCK + 2):
        write_file(directory / f"{i}", content(BLOCK, i))
    write_file(pool.mount / "small", content(BLOCK, "small"))
    for path in (directory, *directory.iterdir(), pool.mount / "small"):
        os.chown(path, MALLORY, MALLORY)

    def pin(path: Path, value: bytes = b"1") -> None:
        os.setxattr(path, "user.kvfs.pin", value)

    def attack() -> None:
        with raises_errno(errno.EDQUOT):
            pin(directory)
        assert os.listxattr(directory) == []
        pin(pool.mount / "small")
        refused = 0
        for path in directory.iterdir():
            try:
                pin(path)
            except OSError as error:
                assert error.errno == errno.EDQUOT
                refused += 1
        assert refused >= 2
        pin(pool.mount / "small", b"0")
        pin(pool.mount / "small")  # released bytes count no longer, at once

    in_child(attack, user=MALLORY, group=MALLORY)
    assert share - 2 * BLOCK < user_of(pool, MALLORY)["pinned"] <= share
    fill(pool, 0, 2 * pool.status()["space"]["size"] // BLOCK)
    assert_same(read_file(pool.mount / "small"), content(BLOCK, "small"), "a pinned block")
    held = user_of(pool, MALLORY)["pinned"]
    pool.umount()
    pool.start()
    wait_until(lambda: user_of(pool, MALLORY).get("pinned") == held, "the pins, still charged to who made them")
    os.setxattr(directory, "user.kvfs.pin", b"1")  # root may


def test_a_pinned_directory_that_grows_beyond_the_share_holds_no_longer(pool: Pool) -> None:
    directory = pool.mount / "mine"
    directory.mkdir()
    os.chown(directory, MALLORY, MALLORY)
    in_child(lambda: os.setxattr(directory, "user.kvfs.pin", b"1"), user=MALLORY, group=MALLORY)
    for i in range(2 * pool.status()["space"]["size"] // BLOCK):  # no ENOSPC
        write_file(directory / f"{i}", content(BLOCK, i))
    status = pool.status()
    assert user_of(pool, MALLORY)["pinned"] > status["share"] / 2
    fill(pool, 0, status["space"]["size"] // BLOCK)
    assert user_of(pool, MALLORY)["pinned"] <= status["share"] + 8 * MIB


def test_what_is_moved_into_a_pinned_directory_counts_at_once(pool: Pool) -> None:
    """Or whoever pins an empty directory first would hold any amount until pins are counted again."""
    share = pool.status()["share"]
    mine = pool.mount / "mine"
    for directory in (mine, pool.mount / "many"):
        directory.mkdir()
        os.chown(directory, MALLORY, MALLORY)
    in_child(lambda: os.setxattr(mine, "user.kvfs.pin", b"1"), user=MALLORY, group=MALLORY)
    write_file(pool.mount / "one", content(BLOCK, 1))
    os.rename(pool.mount / "one", mine / "one")
    one = user_of(pool, MALLORY)["pinned"]
    assert one > BLOCK
    os.rename(mine / "one", pool.mount / "one")
    assert user_of(pool, MALLORY).get("pinned", 0) == 0
    for i in range(share // BLOCK + 2):
        write_file(pool.mount / "many" / f"{i}", content(BLOCK, i))
    os.rename(pool.mount / "many", mine / "many")
    wait_until(lambda: user_of(pool, MALLORY).get("pinned", 0) > share, "all below the directory to count",
               timeout_s=20)  # fmt: skip
    fill(pool, 0, pool.status()["space"]["size"] // BLOCK)
    wait_until(lambda: user_of(pool, MALLORY)["pinned"] <= share + 8 * MIB, "what lies beyond the share to go")


def test_slabs_count_and_the_share_is_configured(own_pool: Callable[..., Pool]) -> None:
    requires_root()
    pool = own_pool(files=2, size="64M", started=False)
    text = (pool.path / "pool.toml").read_text()
    (pool.path / "pool.toml").write_text(text.replace("\n[geometry]", "user_share = 0.1\n\n[geometry]", 1))
    pool.start()
    status = pool.status()
    assert status["share"] == pytest.approx(status["space"]["size"] / 10, rel=0.2)
    directory = pool.mount / "slabs"
    directory.mkdir(mode=0o777)
    directory.chmod(0o777)

    def make() -> int:
        descriptor = os.open(directory / "slab", os.O_CREAT | os.O_RDWR)
        os.ftruncate(descriptor, status["share"] * 3 // 2)
        with raises_errno(errno.EDQUOT):
            os.setxattr(descriptor, "user.kvfs.slab", b"1")
        os.ftruncate(descriptor, MIB)
        os.setxattr(descriptor, "user.kvfs.slab", b"1")
        return descriptor

    with opened_by(MALLORY, make):
        assert 0 < user_of(pool, MALLORY)["slabs"] <= status["share"]
    wait_until(lambda: not user_of(pool, MALLORY).get("slabs"), "the end of the slab")
    with opened(directory / "root's", os.O_CREAT | os.O_RDWR) as descriptor:  # root is exempt
        os.ftruncate(descriptor, status["share"] * 3 // 2)
        os.setxattr(descriptor, "user.kvfs.slab", b"1")
        assert user_of(pool, 0)["slabs"] > status["share"]
