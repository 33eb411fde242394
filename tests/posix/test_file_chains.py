"""Chains and uses by files: the order in which processes look blocks up, load and store them; and hints."""

from __future__ import annotations

import errno
import itertools
import mmap
import os
import sys

import pytest
from helpers import in_child, opened, raises_errno, requires_root, run, wait_until, write_file

PARENT, KEEP = "user.kvfs.parent", "user.kvfs.keep"
BLOCK = 128 << 10

# Other than the test's own process: what it does is known. Paths come in order.
PLAYER = """
import os, sys, time
from concurrent.futures import ThreadPoolExecutor
threads, takes, pause, *paths = sys.argv[1:]

def store(path):
    with open(path + ".tmp", "wb") as file:
        file.write(os.urandom({block}))
        time.sleep(float(takes))
    os.rename(path + ".tmp", path)
    time.sleep(float(pause))

def load(path):
    with open(path, "rb") as file:
        file.read()

there = 0
while there < len(paths) and os.path.exists(paths[there]):
    there += 1
for path in paths[:there]:
    load(path)
with ThreadPoolExecutor(int(threads)) as pool:
    list(pool.map(store, paths[there:]))
"""


def play(paths, threads=1, takes=0.0, pause=0.0):
    """Load what is there of the paths; store the rest in `takes` seconds each."""
    run(sys.executable, "-c", PLAYER.format(block=BLOCK), *map(str, [threads, takes, pause, *paths]), timeout_s=60)


def undisturbed(attempt):
    """Call attempt(number) until it returns what is true, and return that. A chain is a guess. It is not made where the
    machine pauses a process for 100 ms, or the daemon while it has the names."""
    numbers = itertools.count()
    return wait_until(lambda: attempt(next(numbers)), "a chain that nothing disturbed", interval_s=0)


def known(paths, parents):
    """Return whether each of the paths has its parent, by name. Fail if one has another."""
    found = [parent_of(path) for path in paths]
    assert all(one in (None, right) for one, right in zip(found, parents, strict=True)), (found, parents)
    return found == parents


def parent_of(path):
    try:
        return os.getxattr(path, PARENT).decode()
    except OSError as error:
        assert error.errno == errno.ENODATA, error
        return None


def chain(directory, name, count):
    return [directory / f"{name}-{i:03d}" for i in range(count)]


@pytest.fixture
def mounted(own_pool):
    pool = own_pool(files=2, size="64M")
    (pool.mount / "d").mkdir()
    return pool


@pytest.mark.timeout(120)
@pytest.mark.parametrize("takes", [0, 0.15], ids=["fast", "slow"])
def test_a_process_stores_a_prefix_behind_what_it_found_of_it(mounted, takes):
    """However long each store takes: no pause between them ends the chain."""
    directory = mounted.mount / "d"

    def first(number):
        paths = chain(directory, f"a{number}", 10)
        play(paths, takes=takes)
        return known(paths, [None, *(path.name for path in paths[:-1])]) and paths

    def second(number):
        """Another prompt that begins likewise, of another process."""
        paths = [*found[:4], *chain(directory, f"b{number}", 5)]
        play(paths, takes=takes)
        return known(paths[4:], [path.name for path in paths[3:-1]])

    found = undisturbed(first)
    undisturbed(second)
    assert mounted.status()["counters"]["parents_known"] >= 9 + 5


@pytest.mark.timeout(120)
def test_a_pause_between_stores_ends_a_chain(mounted):
    paths = chain(mounted.mount / "d", "a", 4)
    play(paths, pause=0.3)
    assert [parent_of(path) for path in paths] == [None] * 4


@pytest.mark.timeout(120)
def test_threads_of_one_process_are_one(mounted):
    """With as many files begun at a time as there are threads, a parent is a neighbour at least."""

    def attempt(number):
        paths = chain(mounted.mount / "d", f"a{number}", 64)
        play(paths, threads=4)
        parents = [parent_of(path) for path in paths[1:]]
        return all(parent and abs(int(parent[-3:]) - i) <= 8 for i, parent in enumerate(parents, 1))

    undisturbed(attempt)


@pytest.mark.timeout(120)
def test_a_parent_can_be_said(mounted):
    directory = mounted.mount / "d"
    play([directory / "one"])
    play([directory / "two"])
    (mounted.mount / "e").mkdir()
    play([mounted.mount / "e" / "three"])
    assert parent_of(directory / "two") is None
    os.setxattr(directory / "two", PARENT, b"one")
    assert parent_of(directory / "two") == "one"
    os.setxattr(directory / "two", PARENT, b"/e/three")
    assert parent_of(directory / "two") == "/e/three"
    assert PARENT not in os.listxattr(directory / "two")
    for value, error in ((b"nothing", errno.ENOENT), (b"/e/three/four", errno.ENOTDIR), (b"", errno.EINVAL)):
        with pytest.raises(OSError) as caught:
            os.setxattr(directory / "two", PARENT, value)
        assert caught.value.errno == error
    with pytest.raises(OSError) as caught:
        os.setxattr(directory, PARENT, b"one")
    assert caught.value.errno == errno.EINVAL
    os.unlink(mounted.mount / "e" / "three")
    assert parent_of(directory / "two") is None


@pytest.mark.timeout(120)
def test_a_parent_s_name_is_for_those_who_may_see_its_directory(mounted):
    requires_root()
    user, secret, shared = 20_001, mounted.mount / "secret", mounted.mount / "shared"
    secret.mkdir(mode=0o700)
    shared.mkdir()
    shared.chmod(0o777)
    write_file(secret / "one", b"one")
    write_file(shared / "two", b"two")
    in_child(lambda: write_file(shared / "mine", b"mine"), user=user)
    os.setxattr(shared / "mine", PARENT, b"/secret/one")
    assert parent_of(shared / "mine") == "/secret/one"
    assert in_child(lambda: parent_of(shared / "mine"), user=user) is None

    def ask_for_names():
        for name in (b"/secret/one", b"/secret/nothing"):
            with raises_errno(errno.EACCES):
                os.setxattr(shared / "mine", PARENT, name)
        with raises_errno(errno.ENOENT):
            os.setxattr(shared / "mine", PARENT, b"/shared/nothing")
        os.setxattr(shared / "mine", PARENT, b"/shared/two")
        return parent_of(shared / "mine")

    assert in_child(ask_for_names, user=user) == "two"
    shared.chmod(0o711)  # by name, and not listed
    assert in_child(lambda: parent_of(shared / "mine"), user=user) is None
    # Behind a directory that may not be searched, in one that may be listed.
    (secret / "open").mkdir()
    write_file(secret / "open" / "three", b"three")
    os.setxattr(shared / "mine", PARENT, b"/secret/open/three")
    assert in_child(lambda: parent_of(shared / "mine"), user=user) is None
    secret.chmod(0o711)
    assert in_child(lambda: parent_of(shared / "mine"), user=user) == "/secret/open/three"


@pytest.mark.timeout(240)
def test_what_is_kept_stays_and_what_is_done_with_goes(mounted):
    directory = mounted.mount / "d"
    kept, done, others = (chain(directory, name, 20) for name in ("kept", "done", "others"))
    play([path for three in zip(kept, done, others, strict=True) for path in three])
    # However they come together: a segment of which three quarters must stay is left as it is, and the others with it.
    for path in kept[:5]:
        os.setxattr(path, KEEP, b"600")
    for path in done:
        os.setxattr(path, KEEP, b"0")
    turn = 0
    while any(path.exists() for path in kept[5:] + done):
        turn += 1
        assert turn < 60, "nothing was evicted"
        play(chain(directory, f"turn-{turn}", 60))
    assert all(path.exists() for path in kept[:5])
    # The user takes it back; the block is as any other then.
    os.setxattr(kept[0], KEEP, b"0")
    while kept[0].exists():
        turn += 1
        assert turn < 120, "nothing was evicted"
        play(chain(directory, f"turn-{turn}", 60))
    assert all(path.exists() for path in kept[1:5])
    for value in (b"-1", b"soon", b"", b"1" * 20):
        with pytest.raises(OSError) as caught:
            os.setxattr(kept[1], KEEP, value)
        assert caught.value.errno == errno.EINVAL
    with open(directory / "new", "wb") as file, pytest.raises(OSError) as caught:
        os.setxattr(file.fileno(), KEEP, b"5")
    assert caught.value.errno == errno.EINVAL


@pytest.mark.timeout(120)
def test_a_user_keeps_a_sixteenth_of_the_pool_at_most(mounted):
    paths = chain(mounted.mount / "d", "a", 200)
    play(paths)
    kept = 0
    for path in paths:
        try:
            os.setxattr(path, KEEP, b"60")
            kept += 1
        except OSError as error:
            assert error.errno == errno.EDQUOT, error
    assert 20 < kept * BLOCK // (1 << 20) * 16 < 128 and kept < 200, kept


@pytest.mark.timeout(120)
@pytest.mark.parametrize("command", ["find {} -ls", "du -a {}", "tar cf /dev/null {}", "grep -r nothing {}"])
def test_a_walk_uses_nothing(mounted, command):
    directory = mounted.mount / "d"
    play(chain(directory, "a", 30))
    before = uses(mounted)
    run("sh", "-c", command.format(directory) + " >/dev/null; true", timeout_s=60)
    assert uses(mounted) == before
    # Past the kernel's cache, where the walk may have left the pages: those are read unseen.
    with opened(directory / "a-003", os.O_RDONLY | os.O_DIRECT) as descriptor:
        os.preadv(descriptor, [mmap.mmap(-1, 4096)], 0)
    assert uses(mounted) == before + 1


def uses(pool):
    return pool.status()["counters"]["uses"]
