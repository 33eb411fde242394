"""libkvfs_preload.so: an unchanged program gets the same answers with it as without, and gets them natively.

Two players run the same calls side by side, one with the library and one without; every answer must be the same: bytes,
attributes, errno. The library's own answers are read from its counters, so that no test passes because everything fell
through.
"""

import contextlib
import errno
import json
import os
import pathlib
import random
import select
import subprocess
import sys
import tempfile
import time

import pytest
from helpers import (
    KIB,
    MIB,
    REPOSITORY,
    content,
    opened,
    read_file,
    requires_io_uring,
    requires_program,
    requires_root,
    run,
    slowness,
    wait_until,
    write_file,
)

from kvfs.client import preload

PLAYER = pathlib.Path(__file__).parent / "preload_player.py"
ALICE, BOB, TEAM = 20_001, 20_002, 30_000
# Of mounts and connections the library looks again this often.
PERIOD_S = 0.03

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.skipif(not preload.LIBRARY.exists(), reason=f"{preload.LIBRARY} is not built: run tools/setup"),
]


class Player:
    """A process that plays calls; with stats, it has the library and leaves its counters there."""

    def __init__(self, stats=None, user=None):
        environment = dict(os.environ)
        if stats is not None:
            environment = preload.environment(environment) | {"KVFS_PRELOAD_STATS": os.fspath(stats)}
        self.stats = stats
        self.process = subprocess.Popen(
            [sys.executable, PLAYER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        if user is not None:  # from inside: another user may not reach this Python. The daemon's group may connect.
            self("become", user, [0, TEAM])

    def __call__(self, *call):
        self.process.stdin.write(json.dumps(call) + "\n")
        self.process.stdin.flush()
        ready, _, _ = select.select([self.process.stdout], [], [], 60 * slowness())
        assert ready, f"{call}: no answer in 60 s of an idle machine"
        answer = self.process.stdout.readline()
        assert answer, f"{call}: the player died"
        return json.loads(answer)

    def end(self):
        """Returns its counters."""
        self.process.stdin.close()
        assert self.process.wait(30) == 0
        self.process.stdout.close()
        if self.stats is None or not self.stats.exists():
            return None
        counters = [json.loads(line) for line in self.stats.read_text().splitlines()]
        return next((found for found in counters if found["pid"] == self.process.pid), None)

    def kill(self):
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(30)
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):
                pipe.close()


class Pair:
    """One player with the library and one without."""

    def __init__(self, stats, user=None):
        self.native, self.plain = Player(stats, user), Player(None, user)

    def __call__(self, *call):
        expected, answer = self.plain(*call), self.native(*call)
        assert answer == expected, f"{call}: {answer} with the library, {expected} without"
        return answer

    def end(self):
        self.plain.end()
        counters = self.native.end()
        assert counters is not None, "the library has met no kvfs mount"
        assert counters["error"] == "", counters
        return counters

    def kill(self):
        self.native.kill()
        self.plain.kill()


@pytest.fixture
def stats():
    with tempfile.TemporaryDirectory(prefix="kvfs-preload-") as directory:
        os.chmod(directory, 0o777)  # for Alice's player; tmp_path lies in a directory of this user's
        yield pathlib.Path(directory) / "stats.json"


@pytest.fixture
def group_may_connect(service):
    """The pool's directory is its owner's alone until he says otherwise."""
    if service.pool is None:
        pytest.skip("needs a kvfs pool of its own, not --directory")
    service.pool.path.chmod(0o710)


@pytest.fixture
def pair(stats):
    both = Pair(stats)
    yield both
    both.kill()


def total(stats, *names):
    """The counters of all processes together."""
    lines = [json.loads(line) for line in stats.read_text().splitlines()] if stats.exists() else []
    return {name: sum(line[name] for line in lines) for name in names}


# ---- the same answers ----


SIZES = [0, 1, 4095, 4096, 4097, 64 * KIB, 100_000, 512 * KIB, MIB, 1_124_352, 2 * MIB + 1, 5 * MIB]


def populate(directory, random_):
    """A tree with all kinds of names, modes and owners. Returns paths of what is there, most of it."""
    paths = [str(directory)]
    for name, mode, owner in [
        ("open", 0o755, 0),
        ("open/deep", 0o755, 0),
        ("open/deep/er", 0o711, 0),
        ("private", 0o700, 0),
        ("private/in", 0o755, 0),
        ("alices", 0o700, ALICE),
        ("team", 0o750, BOB),
        ("others", 0o705, BOB),
        ("blind", 0o644, BOB),
    ]:
        path = directory / name
        path.mkdir()
        os.chown(path, owner, TEAM if name == "team" else owner)
        path.chmod(mode)
        paths.append(str(path))
    directories = list(paths)
    for index in range(40):
        place = pathlib.Path(random_.choice(directories))
        path = place / random_.choice([f"file{index}", f"{index:064x}.bin", f"a b\n{index}", f"ü\udcff{index}"])
        write_file(path, content(random_.choice(SIZES), index))
        owner = random_.choice([0, 0, ALICE, BOB])
        os.chown(path, owner, random_.choice([owner, TEAM]))
        path.chmod(random_.choice([0o644, 0o644, 0o600, 0o640, 0o000, 0o755, 0o604]))
        os.utime(path, ns=(random_.randrange(1, 1 << 60), random_.randrange(1, 1 << 60)))
        paths.append(str(path))
    for name, target in [
        ("to-file", "open"),
        ("to-nothing", "no/where"),
        ("to-itself", "to-itself"),
        ("open/up", ".."),
        ("absolute", str(directory / "open")),
    ]:
        (directory / name).symlink_to(target)
        paths.append(str(directory / name))
    return paths


def some_path(random_, paths):
    """A path that is there, or nearly."""
    path = random_.choice(paths)
    how = random_.randrange(16)
    if how == 0:
        return path + "/" + random_.choice(["missing", "a/b", "..", ".", "x" * 255, "x" * 256, "y" * 1100, ""])
    if how == 1:
        return path + random_.choice(["x", "/", "//", "/../" + os.path.basename(path)])
    if how == 2:
        return path.replace("/open", random_.choice(["/open/", "/./open", "/open/../open", "/to-file", "//open"]), 1)
    if how == 3:
        return os.path.dirname(path) + "/no" + os.path.basename(path)
    return path


def some_call(random_, paths):
    path = some_path(random_, paths)
    name = random_.choice(
        [
            "stat",
            "stat",
            "lstat",
            "fstatat",
            "statx",
            "access",
            "access",
            "faccessat",
            "open",
            "whole",
            "reads",
            "reads",
        ]
    )
    if name == "fstatat":
        return [[name, path, random_.random() < 0.5]]
    if name == "statx":
        # The flags: none, NOFOLLOW, FORCE_SYNC. The masks: basic, all that 5.10 knew, birth time, mount id, alignment
        # of direct I/O.
        return [[name, path, random_.choice([0, 0x100, 0x2000]), random_.choice([0x7FF, 0xFFF, 0x2, 0x1FFF, 0x3FFF])]]
    if name == "access":
        return [[name, path, random_.choice([os.F_OK, os.F_OK, os.R_OK, os.W_OK, os.X_OK, os.R_OK | os.W_OK])]]
    if name == "faccessat":
        return [[name, path, random_.choice([0, 4, 2, 1, 8]), random_.choice([0, 0x100, 0x200, 0x300])]]
    flags = random_.choice(
        [
            0,
            os.O_DIRECT,
            os.O_NOFOLLOW,
            os.O_CLOEXEC,
            os.O_DIRECTORY,
            os.O_PATH,
            os.O_RDWR,
            os.O_WRONLY,
            os.O_RDONLY | os.O_NONBLOCK,
        ]
    )
    if name == "open":
        return [["open", "f", path, flags], ["fstat", "f"], ["close", "f"]]
    if name != "reads":
        return [[name, path]]
    calls = [["open", "f", path, random_.choice([os.O_RDONLY, os.O_DIRECT, os.O_DIRECT, os.O_RDWR])]]
    for _ in range(random_.randrange(1, 6)):
        sizes = [
            random_.choice([1, 512, 4096, 64 * KIB, 513 * KIB, 600_000, MIB, 3 * MIB])
            for _ in range(random_.choice([1, 1, 1, 2, 3]))
        ]
        offset = random_.choice([0, 0, 1, 4096, 100_000, 512 * KIB, MIB + 13, 1 << 40, (1 << 63) - 1, -1])
        aligned = random_.random() < 0.6
        calls.append(
            random_.choice(
                [
                    ["read", "f", sizes, aligned],
                    ["pread", "f", sizes, offset, aligned],
                    ["read_plain", "f", sizes[0]],
                    ["pread_plain", "f", sizes[0], offset],
                    ["lseek", "f", offset, random_.choice([0, 1, 2])],
                    ["lseek", "f", 0, 1],
                    ["fstat", "f"],
                ]
            )
        )
    return [*calls, ["lseek", "f", 0, 1], ["close", "f"]]


@pytest.mark.usefixtures("group_may_connect")
@pytest.mark.parametrize("who", ["root", "alice"])
@pytest.mark.parametrize("seed", range(3))
def test_random_calls_have_the_same_answers(directory, stats, seed, who):
    requires_root()
    random_ = random.Random(f"preload {seed}")
    print("seed", seed)
    paths = populate(directory, random_)
    with opened(directory / "open" / "unsealed", os.O_CREAT | os.O_WRONLY) as writing:
        os.write(writing, b"unsealed" * 1000)
        paths.append(str(directory / "open" / "unsealed"))
        pair = Pair(stats, ALICE if who == "alice" else None)
        try:
            for _ in range(400):
                calls = some_call(random_, paths)
                for call in calls:
                    if isinstance(pair(*call), str) and call[0] == "open":
                        break
            counters = pair.end()
        finally:
            pair.kill()
    for name in ("opens", "reads", "stats", "accesses", "absent"):
        assert counters[name] > 0, f"nothing of this was answered natively: {counters}"


def test_relative_paths_follow_the_working_directory(directory, pair):
    (directory / "a" / "b").mkdir(parents=True)
    (directory / "other").mkdir()
    write_file(directory / "a" / "b" / "f", content(MIB, 1))
    write_file(directory / "other" / "f", content(MIB, 2))
    pair("chdir", str(directory / "a"))
    for path in ("b/f", "b", ".", "..", "f", "b/../b/f", "b/f/x"):
        pair("stat", path)
        pair("access", path, os.F_OK)
    assert pair("whole", "b/f")[0] == MIB
    pair("chdir", "b")
    pair("stat", "f")
    # Renamed under their feet: the working directory is the directory, not its name.
    os.rename(directory / "a", directory / "a2")
    os.rename(directory / "other", directory / "a")
    for _ in range(3):
        pair("stat", "f")
        pair("stat", str(directory / "a" / "f"))
        pair("stat", str(directory / "a" / "b" / "f"))
        pair("access", "g", os.F_OK)
    pair("chdir", "/tmp")
    assert pair("stat", "f") == "ENOENT"
    counters = pair.end()
    assert counters["absent"] >= 5 and counters["stats"] >= 5, counters


@pytest.mark.usefixtures("group_may_connect")
def test_permissions_change_at_once(directory, stats):
    requires_root()
    (directory / "d").mkdir(0o755)
    write_file(directory / "d" / "f", content(MIB))
    pair = Pair(stats, ALICE)
    try:
        path = str(directory / "d" / "f")
        for mode in (0o755, 0o700, 0o711, 0o754, 0o755):
            (directory / "d").chmod(mode)
            pair("stat", path)
            pair("access", path, os.R_OK)
            pair("access", path + "x", os.F_OK)
        for mode in (0o600, 0o644, 0o040, 0o644):
            (directory / "d" / "f").chmod(mode)
            pair("access", path, os.R_OK)
            pair("stat", path)
        assert pair.end()["stats"] > 0
    finally:
        pair.kill()


# ---- files that change ----


def test_replaced_and_unlinked_files_stay_readable_where_they_are_open(directory, pair):
    path = str(directory / "f")
    old, new = content(2 * MIB, "old"), content(2 * MIB + 5, "new")
    write_file(path, old)
    pair("open", "f", path, os.O_DIRECT)
    first = pair("pread", "f", [2 * MIB], 0, True)
    write_file(directory / "tmp", new)
    os.rename(directory / "tmp", path)
    assert pair("pread", "f", [2 * MIB], 0, True) == first
    pair("fstat", "f")
    pair("stat", path)
    pair("open", "g", path, os.O_DIRECT)
    assert pair("pread", "g", [3 * MIB], 0, True)[0] == len(new)
    os.unlink(path)
    assert pair("stat", path) == "ENOENT"
    assert pair("access", path, os.F_OK) is False
    assert pair("open", "h", path, os.O_RDONLY) == "ENOENT"
    assert pair("pread", "f", [2 * MIB], 0, False) == first
    assert pair("pread", "g", [3 * MIB], 0, False)[0] == len(new)
    assert pair("read", "g", [3 * MIB], False)[0] == len(new)
    assert pair("fstat", "g")[3] == 0
    counters = pair.end()
    assert counters["reads"] >= 6, counters
    assert counters["absent"] >= 2 and counters["opens_absent"] >= 1, counters


def wait_sealed(pool):
    """The kernel tells the daemon of the last close some time later."""
    if pool is None:  # --directory
        time.sleep(1)
    else:
        wait_until(lambda: pool.status()["counters"]["staged_files"] == 0, "the seal of what was written")


def test_a_file_that_is_written_is_the_mounts(directory, pair, service):
    path = str(directory / "f")
    with opened(path, os.O_CREAT | os.O_WRONLY) as descriptor:
        for step in range(4):
            os.write(descriptor, content(700_000, step))
            assert pair("stat", path)[7] == 700_000 * (step + 1)
            assert pair("access", path, os.R_OK)
            pair("open", "f", path, os.O_DIRECT)
            assert pair("pread", "f", [4 * MIB], 0, True)[0] == 700_000 * (step + 1)
    wait_sealed(service.pool)
    assert pair("stat", path)[7] == 2_800_000
    pair("open", "f", path, os.O_DIRECT)
    assert pair("pread", "f", [4 * MIB], 0, True)[0] == 2_800_000
    counters = pair.end()
    assert counters["reads"] == 1 and counters["stats"] == 1, counters


def test_a_file_that_is_rewritten_in_place_is_the_mounts_until_its_seal(directory, pair):
    path = str(directory / "f")
    write_file(path, content(2 * MIB, "old"))
    pair("open", "f", path, os.O_DIRECT)
    pair("pread", "f", [4 * MIB], 0, True)
    with opened(path, os.O_RDWR) as descriptor:
        os.pwrite(descriptor, content(MIB, "new"), 500_000)
        pair("pread", "f", [4 * MIB], 0, True)
        pair("stat", path)
        os.pwrite(descriptor, content(MIB, "longer"), 3 * MIB)
        pair("pread", "f", [6 * MIB], 0, True)
        assert pair("stat", path)[7] == 4 * MIB
        os.ftruncate(descriptor, 5000)
        pair("pread", "f", [6 * MIB], 0, True)
        assert pair("stat", path)[7] == 5000
        # Flushed, and written on: a seal is not the end of it.
        os.fsync(descriptor)
        os.pwrite(descriptor, b"more", 6000)
        pair("pread", "f", [6 * MIB], 0, True)
        assert pair("stat", path)[7] == 6004
    pair("stat", path)
    assert pair("pread", "f", [6 * MIB], 0, True)[0] == 6004
    os.truncate(path, 100)
    assert pair("pread", "f", [6 * MIB], 0, True)[0] == 100
    assert pair("stat", path)[7] == 100
    assert pair.end()["reads"] >= 2


def same(pair, *call):
    """As pair(), of what may be evicted between the two questions. Hosts are told within a quarter of a second."""
    began = time.monotonic()
    while True:
        try:
            return pair(*call)
        except AssertionError:
            if time.monotonic() - began > 5 * slowness():
                raise
            time.sleep(0.05)


@pytest.mark.slow
def test_evicted_files_vanish_and_open_ones_stay_readable(own_pool, stats):
    pool = own_pool(size="128M", files=2)
    pair = Pair(stats)
    try:
        write_file(pool.mount / "open", content(2 * MIB, "open"))
        write_file(pool.mount / "gone", content(2 * MIB, "gone"))
        wait_sealed(pool)
        pair("open", "f", str(pool.mount / "open"), os.O_DIRECT)
        first = pair("pread", "f", [2 * MIB], 0, True)
        for index in range(300):
            write_file(pool.mount / f"filler{index}", content(2 * MIB, index))
            if index % 10 == 0:
                same(pair, "stat", str(pool.mount / "gone"))
                same(pair, "access", str(pool.mount / f"filler{max(0, index - 60)}"), os.F_OK)
                assert pair("pread", "f", [2 * MIB], 0, True) == first
        assert pair("stat", str(pool.mount / "gone")) == "ENOENT"
        assert pair("whole", str(pool.mount / "gone")) == "ENOENT"
        counters = pair.end()
        assert counters["reads"] >= 20 and counters["absent"] > 0 and counters["opens_absent"] == 1, counters
    finally:
        pair.kill()


# ---- descriptors ----


def test_only_reading_descriptors_are_taken(directory, pair):
    path = str(directory / "f")
    write_file(path, content(2 * MIB))
    for flags in (os.O_RDWR, os.O_RDWR | os.O_DIRECT, os.O_PATH, os.O_WRONLY):
        pair("open", "f", path, flags)
        pair("pread", "f", [2 * MIB], 0, True)
        pair("close", "f")
    counters = pair.end()
    assert counters["opens"] == 0 and counters["reads"] == 0, counters


def test_the_file_offset_is_the_kernels(directory, pair):
    path = str(directory / "f")
    write_file(path, content(5 * MIB + 17))
    pair("open", "f", path, os.O_DIRECT)
    pair("dup", "f", "g")
    for size in (100, MIB, 4096, 3 * MIB, 2 * MIB, 10):
        pair("read", "f", [size], True)
        assert pair("lseek", "f", 0, os.SEEK_CUR) == pair("lseek", "g", 0, os.SEEK_CUR)
    pair("lseek", "g", MIB, os.SEEK_SET)
    pair("read", "g", [4096], True)
    pair("read", "f", [MIB, MIB], False)
    pair("lseek", "f", 7 * MIB, os.SEEK_SET)
    assert pair("read", "f", [4096], True)[0] == 0
    assert pair("lseek", "f", 0, os.SEEK_CUR) == 7 * MIB
    assert pair.end()["reads"] >= 6


def test_numbers_that_become_other_files(directory, pair, tmp_path):
    (directory / "d").mkdir()
    one, two, outside = str(directory / "one"), str(directory / "d" / "two"), str(tmp_path / "outside")
    for path in (one, two, outside):
        write_file(path, content(2 * MIB, os.path.basename(path)))
    contents = {path: pair("whole", path)[1] for path in (one, two, outside)}
    for path in (two, outside):
        pair("open", "f", one, os.O_DIRECT)
        assert pair("pread", "f", [2 * MIB], 0, True)[1] == contents[one]
        pair("raw_replace", "f", path)
        assert pair("pread", "f", [2 * MIB], 0, True)[1] == contents[path]
        assert pair("read", "f", [2 * MIB], True)[1] == contents[path]
        pair("close", "f")
        pair("open", "f", one, os.O_DIRECT)
        pair("open", "g", path, os.O_DIRECT)
        pair("dup2", "g", "f")
        assert pair("pread", "f", [2 * MIB], 0, True)[1] == contents[path]
        pair("close", "f")
        assert pair("pread", "g", [2 * MIB], 0, True)[1] == contents[path]
        pair("close", "g")
    assert pair.end()["reads"] >= 3


@pytest.mark.parametrize("how", ["close_all", "close_each"])
def test_closing_every_descriptor_leaves_the_library_its_own(directory, stats, how):
    path = str(directory / "f")
    write_file(path, content(2 * MIB))
    player = Player(stats)
    try:
        expected = [2 * MIB, digest_of(read_file(path))]
        for _ in range(3):
            player("open", "f", path, os.O_DIRECT)
            assert player("pread", "f", [2 * MIB], 0, True) == expected
            before = [what for number, what in player("descriptors") if number > 2 and what != path]
            player(how)
            # Its mounts, its connection, its devices and its rings are there; none of it in the way.
            after = player("descriptors")
            assert [what for number, what in after if number > 2] == before
            assert all(number > 500 for number, _ in after if number > 2), after
        assert player.end()["reads"] == 3
    finally:
        player.kill()


def digest_of(data):
    import hashlib

    return hashlib.sha256(data).hexdigest()


def test_what_the_library_does_not_know_works_on_its_files(directory, pair):
    path = str(directory / "f")
    write_file(path, content(2 * MIB + 100))
    pair("open", "f", path, os.O_RDONLY)
    pair("map", "f", 2 * MIB + 100)
    pair("set_direct", "f")
    pair("pread", "f", [2 * MIB], 4096, True)
    pair("fstat", "f")
    pair("pread", "f", [2 * MIB + 4096], 0, True)


# ---- processes, threads, signals ----


def test_forked_children_read_on(directory, pair):
    for index in range(3):
        write_file(directory / f"f{index}", content(5 * MIB, index))
    pair("open", "f", str(directory / "f0"), os.O_DIRECT)
    pair("read", "f", [MIB], True)
    for index in (1, 2):
        given = pair("fork_read", "f", 600_000, str(directory / f"f{index}"))
        assert given[0][2][0] == 5 * MIB and given[1][0] == 600_000
    pair("read", "f", [MIB], True)
    assert pair.end()["reads"] >= 4


def test_threads_share_a_file_offset(directory, pair):
    write_file(directory / "f", content(24 * MIB + 777))
    pieces, end = pair("threads_read", str(directory / "f"), 256 * KIB, 6)
    assert sum(size for size, _ in pieces) == end == 24 * MIB + 777
    assert pair.end()["reads"] >= 97


def test_threads_open_read_and_close(directory, pair):
    paths = []
    for index in range(12):
        paths.append(str(directory / f"f{index}"))
        write_file(paths[-1], content(300_000 + 4096 * index, index))
    failures, digests = pair("threads_churn", paths, 60)
    assert failures == []
    for (path, found), expected in zip(digests, sorted(paths), strict=True):
        assert path == expected and len(found) == 1, path
    assert pair.end()["reads"] >= 300


_SIGNALS = """
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <unistd.h>

static int file;
static char *expected, *other;
static long size, handled;
static volatile sig_atomic_t over;
static const struct itimerval once = {{0, 0}, {0, 3000}};

static void handle(int number) {
    int error = errno, fd = open("/proc/self/stat", O_RDONLY);
    char some[64];
    struct stat st;
    if (fd < 0 || read(fd, some, sizeof(some)) <= 0 || stat("/tmp", &st) < 0 || access("/nowhere", F_OK) == 0)
        abort();
    close(fd);
    if (pread(file, other, size, 0) != size || memcmp(other, expected, size))
        abort();
    handled += number > 0;
    if (number && !over)  /* only now: on a slow machine signals would leave no time for anything else */
        setitimer(ITIMER_REAL, &once, NULL);
    errno = error;
}

int main(int count, char **words) {
    struct stat st;
    char path[4096];
    file = open(words[1], O_RDONLY | O_DIRECT);
    if (count != 2 || fstat(file, &st) < 0)
        return 2;
    size = st.st_size;
    char *data = aligned_alloc(4096, size);
    expected = aligned_alloc(4096, size);
    other = aligned_alloc(4096, size);
    if (pread(file, expected, size, 0) != size)
        return 3;
    handle(0);
    signal(SIGALRM, handle);
    setitimer(ITIMER_REAL, &once, NULL);
    for (int i = 0; i < 1500; i++) {
        snprintf(path, sizeof(path), "%s%d", words[1], i);
        errno = 0;
        if (stat(path, &st) == 0 || errno != ENOENT || stat(words[1], &st) < 0)
            return 4;
        memset(data, 0, 4096);
        if (pread(file, data, size, 0) != size || memcmp(data, expected, size))
            return 5;
    }
    over = 1;
    setitimer(ITIMER_REAL, &(struct itimerval){{0, 0}, {0, 0}}, NULL);
    printf("%ld\\n", handled);
    return 0;
}
"""


def compiled(tmp_path, source, name):
    requires_program("gcc")
    (tmp_path / f"{name}.c").write_text(source)
    run("gcc", "-O2", "-o", tmp_path / name, tmp_path / f"{name}.c")
    return tmp_path / name


def test_signal_handlers_may_read_and_close(directory, tmp_path, stats):
    program = compiled(tmp_path, _SIGNALS, "signals")
    write_file(directory / "f", content(64 * KIB))
    result = run(
        program,
        directory / "f",
        timeout_s=120,
        environment=preload.environment({}) | {"KVFS_PRELOAD_STATS": os.fspath(stats)},
    )
    assert int(result.stdout) > 20, "too few signals arrived to prove anything"
    assert total(stats, "reads")["reads"] > 1000


# libkvfs's promise for a device that gives no answer, without such a device.
_DOUBLE = """
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include "kvfs.h"

struct kvfs_client { double busy_until; void *data; };
struct kvfs_file { struct kvfs_client *client; };

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec / 1e9;
}
int kvfs_connect(const char *path, const char *space, const struct kvfs_options *options, struct kvfs_client **out) {
    *out = calloc(1, sizeof(**out));
    return 0;
}
void kvfs_close(struct kvfs_client *client) {}
const char *kvfs_error(void) { return "the double"; }
int kvfs_client_information_get(struct kvfs_client *client, struct kvfs_client_information *out) {
    memset(out, 0, sizeof(*out));
    return 0;
}
int kvfs_find(struct kvfs_client *client, const char *path, struct kvfs_attributes *out) { return -EAGAIN; }
int kvfs_walk(struct kvfs_client *client, const char *path, struct kvfs_attributes *out, uint32_t size, uint32_t *n) {
    return -EAGAIN;
}
int kvfs_file_open(struct kvfs_client *client, uint64_t inode, struct kvfs_file **out) {
    *out = malloc(sizeof(**out));
    (*out)->client = client;
    return 0;
}
int64_t kvfs_file_read(struct kvfs_file *file, uint64_t offset, void *data, uint64_t size) {
    if (getenv("DOUBLE_ERROR"))
        return -atoi(getenv("DOUBLE_ERROR"));
    file->client->busy_until = now() + 0.5;
    file->client->data = data;
    return -ETIMEDOUT;
}
int kvfs_busy(struct kvfs_client *client, const void *data, uint64_t size) {
    if (client->data != data)
        abort();
    if (now() < client->busy_until)
        return 1;
    memset((void *)data, 'x', size); /* the device's late bytes */
    return 0;
}
void kvfs_file_close(struct kvfs_file *file) { free(file); }
"""


@pytest.mark.parametrize("error", [0, errno.EIO, errno.EPERM, errno.EAGAIN])
def test_reads_that_fail_natively_are_the_mounts(directory, tmp_path, monkeypatch, stats, error):
    """With a test double of libkvfs. Error 0: a device gives no answer for half a second, and then writes."""
    requires_program("gcc")
    (tmp_path / "double.c").write_text(_DOUBLE)
    run(
        "gcc",
        "-shared",
        "-fPIC",
        "-I",
        REPOSITORY / "native" / "include",
        "-Wl,-soname,libkvfs.so.1",
        f"-Wl,--version-script={REPOSITORY / 'native' / 'libkvfs.map'}",
        "-o",
        tmp_path / "libkvfs.so.1",
        tmp_path / "double.c",
    )
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    if error:
        monkeypatch.setenv("DOUBLE_ERROR", str(error))
    data = content(2 * MIB)
    write_file(directory / "f", data)
    player = Player(stats)
    try:
        player("open", "f", str(directory / "f"), os.O_DIRECT)
        began = time.monotonic()
        assert player("pread", "f", [2 * MIB], 0, True) == [2 * MIB, digest_of(data)]
        assert player("read", "f", [2 * MIB], True) == [2 * MIB, digest_of(data)]
        assert player("lseek", "f", 0, os.SEEK_CUR) == 2 * MIB
        assert error or time.monotonic() - began > 0.9, "memory was given back while the device had it"
        counters = player.end()
        assert counters["opens"] == 1 and counters["reads"] == 0 and counters["read_fallthroughs"] == 2, counters
    finally:
        player.kill()


# ---- the mount goes, and comes ----


def test_daemon_killed(own_pool, stats):
    """Open files go on by the old block table; paths say what the dead mount says; a new daemon is found."""
    pool = own_pool(size="256M")
    write_file(pool.mount / "f", content(2 * MIB))
    path = str(pool.mount / "f")
    pair = Pair(stats)
    try:
        pair("open", "f", path, os.O_DIRECT)
        first = pair("pread", "f", [2 * MIB], 0, True)
        pair("stat", path)
        run("sync", "-f", pool.mount)
        time.sleep(1.5)  # the kernel's cached attributes expire
        pool.kill()
        time.sleep(PERIOD_S)
        for _ in range(3):
            assert pair.native("pread", "f", [2 * MIB], 0, True) == first
            assert pair("stat", path) == "ENOTCONN"
            assert pair("stat", path + "x") == "ENOTCONN"
            assert pair("open", "g", path, os.O_RDONLY) == "ENOTCONN"
        pair("close", "f")
        pool.remount()
        time.sleep(PERIOD_S)
        pair("stat", path)
        assert pair("stat", path + "x") == "ENOENT"
        pair("open", "f", path, os.O_DIRECT)
        assert pair("pread", "f", [2 * MIB], 0, True) == first
        counters = pair.end()
        assert counters["reads"] == 5 and counters["stats"] == 2 and counters["absent"] == 1, counters
    finally:
        pair.kill()


@pytest.mark.slow
def test_unmounted_and_mounted_again(own_pool, stats):
    pool = own_pool(size="256M")
    path = str(pool.mount / "f")
    write_file(path, content(2 * MIB))
    pair = Pair(stats)
    try:
        for _ in range(3):
            pair("stat", path)
            pair("open", "f", path, os.O_DIRECT)
            assert pair("pread", "f", [2 * MIB], 0, True)[0] == 2 * MIB
            pair("close", "f")
            pool.umount()
            time.sleep(PERIOD_S)
            assert pair("stat", path) == "ENOENT"
            held = [what for _, what in pair.native("descriptors") if what.startswith(str(pool.path))]
            assert held == [], "devices of the unmounted pool are held"
            pool.start()
            time.sleep(PERIOD_S)
        counters = pair.end()
        assert counters["reads"] == 3 and counters["stats"] == 3, counters
    finally:
        pair.kill()


def test_other_mounts_below_and_above(own_pool, pair):
    requires_root()
    pool = own_pool(size="256M")
    (pool.mount / "in").mkdir()
    write_file(pool.mount / "in" / "f", content(MIB))
    write_file(pool.mount / "f", content(MIB))
    paths = [str(pool.mount / name) for name in ("in", "in/f", "in/g", "f", "")]

    def look():
        time.sleep(PERIOD_S)
        return [pair("stat", path) for path in paths]

    before = look()
    for place in (pool.mount / "in", pool.mount, pool.base):
        run("mount", "-t", "tmpfs", "tmpfs", place)
        try:
            look()
            if place == pool.mount / "in":
                write_file(place / "g", b"of another filesystem")
                assert look()[2][7] == 21
        finally:
            run("umount", place)
        assert look() == before
    assert pair.end()["stats"] >= 12


# ---- programs ----


def test_programs(directory, tmp_path, stats):
    data = content(7 * MIB + 123)
    write_file(directory / "f", data)
    environment = preload.environment({"PATH": os.environ["PATH"]}) | {"KVFS_PRELOAD_STATS": os.fspath(stats)}
    path = str(directory / "f")

    def output(*words):
        with opened(path, os.O_RDONLY) as descriptor:  # the kernel answers faster from its page cache
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        result = subprocess.run(words, env=environment, capture_output=True, timeout=60, check=False)
        assert result.stderr == b"", f"{words}: {result.stderr.decode()}"
        assert result.returncode == 0, words
        return result.stdout

    assert output("cat", path) == data
    assert output("sha256sum", path).split()[0].decode() == digest_of(data)
    output("cp", "-a", path, str(tmp_path / "copy"))
    assert read_file(tmp_path / "copy") == data
    assert os.stat(tmp_path / "copy").st_mtime_ns == os.stat(path).st_mtime_ns
    output("cp", path, str(directory / "copy"))
    assert read_file(directory / "copy") == data
    assert output("dd", f"if={path}", "bs=1M", "iflag=direct", "status=none") == data
    assert output("dd", f"if={path}", "bs=4M", "status=none", "iflag=fullblock") == data
    copy = "import sys; sys.stdout.buffer.write(open(sys.argv[1], 'rb').read())"
    assert output(sys.executable, "-c", copy, path) == data
    script = f"exec 3<{path}; cd {directory}; test -r f && test ! -e g && cat <&3 | wc -c; stat -c %s f; [ -d . ] && ls"
    assert output("bash", "-c", script).decode().split() == [str(len(data)), str(len(data)), "copy", "f"]
    assert output("stat", path).startswith(b"  File: ")
    counters = total(stats, "reads", "stats", "absent")
    assert counters["reads"] >= 7 and counters["stats"] >= 3 and counters["absent"] >= 1, counters
    os.utime(path, ns=(-1_500_000_000, -1))  # before 1970
    assert output("stat", "-c", "%x %y", path) == subprocess.check_output(["stat", "-c", "%x %y", path])


@pytest.mark.parametrize("engine", ["psync", "pvsync2", "libaio", "io_uring"])
def test_fio_reads_and_verifies(directory, stats, engine):
    requires_program("fio")
    if engine == "io_uring":
        requires_io_uring()  # fio's own
    words = [
        "--name=job",
        f"--filename={directory}/data",
        "--size=16M",
        "--bs=1m",
        "--direct=1",
        "--verify=crc32c",
        "--verify_state_save=0",
        "--verify_fatal=1",
        "--fallocate=none",
        "--thread=1",
        "--output-format=json",
    ]
    run("fio", *words, "--ioengine=psync", "--rw=write", "--do_verify=0", timeout_s=70)
    result = run(
        "fio",
        *words,
        f"--ioengine={engine}",
        "--rw=read",
        "--iodepth=4",
        "--loops=1",
        timeout_s=70,
        environment=preload.environment(os.environ) | {"KVFS_PRELOAD_STATS": os.fspath(stats)},
    )
    [job] = json.loads(result.stdout[result.stdout.index("{") :])["jobs"]
    assert job["error"] == 0 and job["read"]["io_bytes"] == 16 * MIB
    reads = total(stats, "reads")["reads"]
    assert reads >= 16 if engine.startswith("p") else reads == 0, reads


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_posix_contract(service, stats):
    """The mount's duties hold with the library too: the same tests, in a process that has it."""
    requires_root()
    wanted = "(read or stat or unlink or rename or permission or coherence) and not ahead and not fio and not storm"
    result = run(
        *(sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--run-slow", "tests/posix"),
        *("--directory", service.root, "-k", wanted),
        environment=preload.environment(os.environ) | {"KVFS_PRELOAD_STATS": os.fspath(stats)},
        timeout_s=540,
    )
    counters = total(stats, "reads", "stats", "absent", "opens")
    print(result.stdout.splitlines()[-1], counters)
    assert all(counters.values()), counters


# ---- engines ----

CLIENTS = REPOSITORY / ".venv-clients" / "bin" / "python"


def play(client, script, directory, home, stats, *arguments):
    source = REPOSITORY / "build" / "clients" / client
    if not CLIENTS.exists() or not (source / ".unpacked").exists():
        pytest.skip(f"the client {client} is not installed: run tools/setup-clients")
    environment = preload.environment(os.environ) | {
        "KVFS_PRELOAD_STATS": os.fspath(stats),
        "HOME": os.fspath(home),
        "LMCACHE_TRACK_USAGE": "false",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "2",
    }
    result = run(
        CLIENTS,
        REPOSITORY / "tests" / "engines" / "scripts" / script,
        directory / "kv",
        source,
        *arguments,
        timeout_s=200,
        environment=environment,
    )
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.timeout(240)
def test_vllm_fs_tier_unchanged(directory, tmp_path, stats):
    seen = play("vllm", "vllm_fs_tier.py", directory, tmp_path, stats, str(2 * MIB))
    assert seen["lookup_before"] == [False] * 8 and seen["lookup_after"] == [True] * 8
    assert seen["load"] == {"error": None, "same": [True] * 8}
    assert seen["load_again"] == {"error": None, "same": [True] * 8}
    assert seen["truncated"]["error"] == "OSError" and seen["truncated"]["succeeded"] == 2
    assert seen["missing"]["error"] == "FileNotFoundError" and seen["missing"]["succeeded"] == 1
    assert seen["lookup_missing"] == [True, False, False] + [True] * 5
    counters = total(stats, "reads", "accesses", "absent")
    assert counters["reads"] >= 16 and counters["accesses"] >= 8 and counters["absent"] >= 8, counters


@pytest.mark.timeout(240)
@pytest.mark.parametrize("how", ["buffered", "direct"])
def test_lmcache_local_disk_unchanged(directory, tmp_path, stats, how):
    seen = play("lmcache", "lmcache_local_disk.py", directory, tmp_path, stats, how)
    assert seen["sizes"] == [2 * MIB] * 5 and seen["get"] == [True] * 5
    assert seen["missing"] in (None, "KeyError") and seen["batch"] == [True, False] and seen["removed"]
    assert total(stats, "opens")["opens"] > 0


# ---- running it ----


def test_preload_run(directory, stats):
    write_file(directory / "f", content(MIB))
    program = f"import os, sys; print(os.stat({str(directory / 'f')!r}).st_size); sys.exit(7)"
    result = run(
        sys.executable,
        "-m",
        "kvfs",
        "preload-run",
        sys.executable,
        "-c",
        program,
        check=False,
        environment={"KVFS_PRELOAD_STATS": os.fspath(stats)},
    )
    assert (result.stdout, result.stderr, result.returncode) == (f"{MIB}\n", "", 7)
    assert total(stats, "stats")["stats"] == 1
    result = run(sys.executable, "-m", "kvfs", "preload-run", "/no/such/program", check=False)
    assert result.stderr == "kvfs: /no/such/program: No such file or directory\n"


def test_preload_run_says_what_is_missing(monkeypatch, tmp_path):
    monkeypatch.setattr(preload, "LIBRARY", tmp_path / "libkvfs_preload.so")
    with pytest.raises(preload.MissingFeatureError, match="not built; run tools/setup"):
        preload.run(["true"])
    with pytest.raises(preload.UsageError, match="no command"):
        preload.run([])


# ---- what it costs: printed, not judged ----

_COST = """
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1e6 + t.tv_nsec / 1e3;
}

#define TIME(name, rounds, call)                                                      \\
    do {                                                                              \\
        call;                                                                         \\
        double from = now();                                                          \\
        for (int i = 0; i < (rounds); i++)                                            \\
            call;                                                                     \\
        printf("%s %.3f\\n", name, (now() - from) / (rounds));                        \\
    } while (0)

static void whole(const char *path, int flags, void *data) {
    int fd = open(path, O_RDONLY | flags);
    if (pread(fd, data, 2 << 20, 0) != 2 << 20)
        abort();
    close(fd);
}

int main(int count, char **words) {
    struct stat st;
    char missing[4096], byte;
    void *data = aligned_alloc(2 << 20, 2 << 20);
    snprintf(missing, sizeof(missing), "%s.missing", words[1]);
    int other = open("/proc/self/exe", O_RDONLY);
    TIME("stat_miss_us", 3000, stat(missing, &st));
    TIME("open_miss_us", 3000, open(missing, O_RDONLY));
    TIME("access_hit_us", 3000, access(words[1], F_OK));
    TIME("open_pread_close_direct_us", 200, whole(words[1], O_DIRECT, data));
    TIME("elsewhere_access_us", 100000, access("/nowhere", F_OK));
    TIME("elsewhere_pread_us", 100000, pread(other, &byte, 1, 0));
    return count != 2;
}
"""


@pytest.mark.slow
def test_cost(directory, tmp_path, stats):
    program = compiled(tmp_path, _COST, "cost")
    (directory / "00" / "1a").mkdir(parents=True)
    write_file(directory / "00" / "1a" / "f", content(2 * MIB))
    print()
    for name, environment in [
        ("plain", {}),
        ("preload", preload.environment({})),
        ("plain", {}),
        ("preload", preload.environment({})),
    ]:
        result = run(program, directory / "00" / "1a" / "f", environment=environment)
        print(f"{name:8}", " ".join(result.stdout.split()))
