"""A pool as real guests see it: POSIX, fio, checksums, several guests and the host at once, eviction, deaths.

Two guests share one pool with the host's mount for most of it. `small` has the queue size that QEMU takes by default;
`large` has the largest one, and four request queues.
"""

import contextlib
import errno
import json
import os
import pathlib
import shlex
import subprocess
import sys
import time
import xml.etree.ElementTree

import pytest
import workload
from helpers import (
    MIB,
    REPOSITORY,
    Pool,
    assert_same,
    content,
    process_alive,
    read_file,
    run,
    slowness,
    wait_until,
    write_file,
)

from benches.guest import Guest, Share

VISITOR = pathlib.Path(__file__).with_name("visitor.py")
# How long a guest relies on its cache without asking: not at all for names and files, this long for a directory's mode
# and times.
DIRECTORY_BOUND_S = 1.0
# An emulated CPU is so much slower.
SLOWNESS = 16
# Files of the POSIX suite, half for each guest; what lasts longest is apart.
SUITE = {
    "small": [
        "test_create.py",
        "test_eviction.py",
        "test_groups.py",
        "test_mmap.py",
        "test_permissions.py",
        "test_rename.py",
        "test_slab.py",
        "test_storm.py",
        "test_unlink.py",
        "test_xattr.py",
    ],
    "large": [
        "test_coherence.py",
        "test_directory.py",
        "test_filesystem.py",
        "test_fio.py",
        "test_read.py",
        "test_write.py",
    ],
}
# Left out in a guest: they need the daemon's own command line, its death, or a pool of a certain size.
LEFT_OUT = "needs a kvfs pool of its own"
OWN_POOLS = {
    "test_create.py",
    "test_directory.py",
    "test_eviction.py",
    "test_groups.py",
    "test_slab.py",
    "test_xattr.py",
}
# The same of every test in them.
OF_THE_DAEMON = {
    "test_counters.py",
    "test_file_chains.py",
    "test_metrics.py",
    "test_read_ahead.py",
    "test_rings.py",
    "test_rm_verb.py",
    "test_store_batches.py",
    "test_top.py",
    "test_verbs.py",
}

pytestmark = pytest.mark.timeout(300)


class Exported(Pool):
    """A mounted pool with sockets for guests: {tag: request queues}."""

    def __init__(self, queues, **arguments):
        self.sockets = {}
        self.queues = queues
        super().__init__(**arguments)

    def start(self, *extra, **arguments):
        self.sockets = {tag: self.base / f"{tag}.socket" for tag in self.queues}
        words = [f"--virtiofs={self.sockets[tag]},tag={tag},queues={count}" for tag, count in self.queues.items()]
        super().start(*words, *extra, **arguments)

    def guest(self, tag, queue_size=1024, **arguments):
        share = Share(self.sockets[tag], tag, queue_size=queue_size, queue_count=self.queues[tag])
        return Guest([share], name=tag, **arguments)

    def exported(self, tag):
        """The part of `kvfs status` about an export."""
        [found] = [export for export in self.status()["exports"] if export["tag"] == tag]
        return found

    def umount(self, *, timeout_s=60):
        """End mount and exports, and wait for the daemon's end."""
        pid = self.pid()
        self.command("umount", str(self.path), timeout_s=timeout_s)
        wait_until(lambda: not process_alive(pid), f"the end of daemon {pid} after umount", timeout_s=timeout_s)

    def fsck(self):
        """Unmount, and demand that every block of it is right."""
        self.umount()
        self.command("fsck", str(self.path), "--verify-data")


@pytest.fixture(scope="module")
def pool():
    with Exported({"small": 1, "large": 4}) as made:
        yield made


@pytest.fixture(scope="module")
def guests(pool):
    """Two guests that have the pool mounted."""
    with pool.guest("small", 128, lifetime_s=6000) as small, pool.guest("large", lifetime_s=6000) as large:
        small.mount("small")
        large.mount("large")
        yield {"small": small, "large": large}


@pytest.fixture
def sides(pool, guests, request):
    """A directory of this test's own, as the host and the two guests know it."""
    name = request.node.name.replace("[", "-").rstrip("]")
    (pool.mount / name).mkdir()
    return {"host": pool.mount / name, "small": f"/run/shares/small/{name}", "large": f"/run/shares/large/{name}"}


def visitor(verb, root, *words):
    return shlex.join([sys.executable, str(VISITOR), verb, str(root), *map(str, words)])


def visit(guest, verb, root, *words, timeout_s=60):
    return json.loads(guest.run(visitor(verb, root, *words), timeout_s=timeout_s).stdout)


# --- the suite -------------------------------------------------------------------------------------------------


def suite(tag, root):
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:hypothesispytest",
        "--run-slow",
        "--directory",
        str(root),
        "--kvfs",
        "--junit-xml=/run/tmp/results.xml",
        *(f"tests/posix/{name}" for name in SUITE[tag]),
    ]
    return f"cd {REPOSITORY} && KVFS_TEST_SLOWNESS={SLOWNESS} {shlex.join(command)}"


def _said(text):
    """pytest's report of failures; the end of its output if there is none."""
    lines = [line for line in text.splitlines() if line.startswith(("E  ", "FAILED", "ERROR", "____"))]
    return "\n".join(lines)[-8000:] or text[-8000:]


@pytest.mark.slow
@pytest.mark.timeout(2700)
def test_the_posix_suite_passes_in_guests_beside_each_other(guests, sides):
    """All of what the host's mount passes, fio with its verification too, but what needs a pool of its own."""
    running = {tag: guest.start(suite(tag, sides[tag]), timeout_s=2400) for tag, guest in guests.items()}
    passed, left_out = set(), set()
    # Of both before anything is said: what still runs in one would disturb the tests after this.
    outputs = {tag: started.wait(check=False) for tag, started in running.items()}
    for tag, guest in guests.items():
        output = outputs[tag]
        assert output.status == 0, f"in guest {tag}, ended with {output.status}:\n{_said(output.text)}"
        for case in xml.etree.ElementTree.fromstring(guest.get("/run/tmp/results.xml")).iter("testcase"):
            name = f"{case.get('classname').rpartition('.')[2]}.py::{case.get('name')}"
            skipped = case.find("skipped")
            if skipped is None:
                passed.add(name)
            else:
                assert LEFT_OUT in skipped.get("message"), f"{name}: {skipped.get('message')}"
                left_out.add(name)
    listed = run(sys.executable, "-m", "pytest", "-q", "--collect-only", "--run-slow", "tests/posix").stdout
    everything = {line.removeprefix("tests/posix/") for line in listed.splitlines() if line.startswith("tests/posix/")}
    assert passed | left_out == {name for name in everything if name.partition("::")[0] not in OF_THE_DAEMON}
    assert {name.partition("::")[0] for name in left_out} == OWN_POOLS
    assert {name.partition("::")[0] for name in passed} == {name for names in SUITE.values() for name in names} - {
        "test_eviction.py",
        "test_groups.py",
    }


# --- bytes -----------------------------------------------------------------------------------------------------


SIZES = (0, 1, 4095, 4096, 100_001, MIB, 3 * MIB + 17, 12 * MIB)


@pytest.mark.slow
@pytest.mark.parametrize("tag", ["small", "large"])
def test_files_written_by_the_host_have_the_same_checksums_in_a_guest(guests, sides, tag):
    for size in SIZES:
        write_file(sides["host"] / f"file-{size}", content(size, size))
    told = visit(guests[tag], "sums", sides[tag])
    assert told == json.loads(run(sys.executable, VISITOR, "sums", sides["host"]).stdout)
    assert len(told) == 2 * len(SIZES)


@pytest.mark.slow
@pytest.mark.parametrize("tag", ["small", "large"])
def test_files_written_by_a_guest_have_the_same_checksums_on_the_host(guests, sides, tag):
    """Buffered, with O_DIRECT, and by pieces; what is written is this machine's, read by 9p."""
    guest, target = guests[tag], sides[tag]
    for size in SIZES:
        source = sides["host"].parent.parent / f"source-{tag}-{size}"  # 9p remembers: no name twice
        write_file(source, content(size, size))
        guest.run(f"cp {source} {target}/buffered-{size}; dd if={source} of={target}/pieces-{size} bs=9999")
        if size and size % 4096 == 0:
            guest.run(f"dd if={source} of={target}/direct-{size} bs=1M oflag=direct")
    names = sorted(os.listdir(sides["host"]))
    assert len(names) == 2 * len(SIZES) + sum(size % 4096 == 0 < size for size in SIZES)
    for name in names:
        size = int(name.rpartition("-")[2])
        assert_same(read_file(sides["host"] / name), content(size, size), name)


@pytest.mark.slow
def test_a_sealed_block_is_read_without_a_copy(pool, guests, sides):
    """Whole pages by O_DIRECT: DMA into the guest's own."""
    write_file(sides["host"] / "block", content(8 * MIB))
    before = pool.exported("large")
    guests["large"].run(f"dd if={sides['large']}/block of=/dev/null bs=1M iflag=direct")
    after = pool.exported("large")
    assert after["bytes_read"] - before["bytes_read"] == 8 * MIB
    assert after["zero_copy_bytes"] - before["zero_copy_bytes"] == 8 * MIB


@pytest.mark.slow
def test_chains_are_guessed_of_each_guest_s_processes(guests, sides):
    """Both store at once, perhaps by threads of the same number. An emulated CPU may pause for longer than a chain."""
    count, known = 12, 0
    running = [guest.start(visitor("store", sides[tag], tag, count, 300_000)) for tag, guest in guests.items()]
    for started in running:
        started.wait()
    for tag in guests:
        for index in range(1, count):
            try:
                parent = os.getxattr(sides["host"] / f"{tag}-{index}", "user.kvfs.parent").decode()
            except OSError as error:
                assert error.errno == errno.ENODATA, error
                continue
            assert parent == f"{tag}-{index - 1}"
            known += 1
    assert known >= count, f"{known} of {2 * (count - 1)} parents are known"


# --- several at once -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_change_by_one_is_seen_by_the_next_open_of_the_others(guests, sides):
    """Names, content, sizes and modes, whoever changes them, though each has looked before."""

    def seen(side, command):
        directory = shlex.quote(str(sides[side]))
        if side == "host":
            return run("bash", "-c", f"shopt -s nullglob; cd {directory}; {command}").stdout
        return guests[side].run(f"shopt -s nullglob; cd {directory}; {command}").text

    show = "echo *; for f in *; do echo $(<$f); stat -c '%s %a' $f; done"
    changes = [
        ("create", "echo one > a"),
        ("replace", "echo 22 > t && mv t a"),
        ("rewrite in place", "echo 333 > a"),
        ("append", "echo 4 >> a"),
        ("truncate", "truncate -s 3 a"),
        ("mode", "chmod 600 a"),
        ("rename", "mv a b"),
        ("remove", "rm b"),
    ]
    for changer in sides:
        for what, command in changes:
            expected = seen(changer, f"{command}; {show}")
            for other in sides:
                if other != changer:
                    assert seen(other, show) == expected, f"{what} by {changer}, looked at by {other}"


@pytest.mark.slow
def test_a_directory_s_mode_is_seen_within_the_bound(guests, sides):
    look = f"stat -c %a {sides['small']}"
    for mode in (0o700, 0o711, 0o755):
        guests["small"].run(look)
        os.chmod(sides["host"], mode)
        time.sleep(DIRECTORY_BOUND_S)
        assert guests["small"].run(look).text.strip() == f"{mode:o}"


READER = """
import os, sys, time
path, ready, go = sys.argv[1:]
descriptor = os.open(path, os.O_RDONLY)
first = os.pread(descriptor, 8192, 0)
assert set(first) == {1}, "before"
open(ready, "w").close()
while not os.path.exists(go):
    time.sleep(0.05)
again = os.open(path, os.O_RDONLY)
for name, handle in (("a new handle", again), ("the old handle", descriptor)):
    data = os.pread(handle, 1 << 20, 0)
    assert set(data) == {2}, f"{name}: versions {set(data)}"
"""


@pytest.mark.slow
@pytest.mark.parametrize("tag", ["small", "large"])
def test_pages_a_guest_keeps_are_not_served_for_a_file_rewritten_elsewhere(guests, sides, tag):
    """The page cache of a guest is told nothing: neither a new open nor an open handle may mix two versions."""
    guest = guests[tag]
    write_file(sides["host"] / "file", b"\1" * MIB)
    guest.run("rm -f /run/tmp/ready /run/tmp/go")
    words = [sys.executable, "-c", READER, f"{sides[tag]}/file", "/run/tmp/ready", "/run/tmp/go"]
    running = guest.start(shlex.join(words))
    guest.run("until [ -e /run/tmp/ready ]; do sleep 0.1; done")
    write_file(sides["host"] / "file", b"\2" * MIB, flags=os.O_WRONLY)
    guest.run("touch /run/tmp/go")
    running.wait()


@pytest.mark.slow
def test_pages_the_host_keeps_are_not_served_for_a_file_rewritten_by_a_guest(guests, sides, tmp_path):
    write_file(sides["host"] / "file", b"\1" * MIB)
    words = [sys.executable, "-c", READER, sides["host"] / "file", tmp_path / "ready", tmp_path / "go"]
    with subprocess.Popen(words, stderr=subprocess.PIPE) as reader:
        try:
            wait_until((tmp_path / "ready").exists, "the first read")
            guests["large"].run(f"tr '\\0' '\\2' </dev/zero | head -c {MIB} | dd of={sides['large']}/file conv=notrunc")
            (tmp_path / "go").touch()
            _, errors = reader.communicate(timeout=30)
        finally:
            reader.kill()
    assert reader.returncode == 0, errors.decode()


@pytest.mark.slow
def test_attributes_the_host_keeps_follow_a_guest_s_changes(guests, sides):
    """stat alone, which asks nobody while it knows the answer."""
    path, inside = sides["host"] / "file", f"{sides['small']}/file"
    write_file(path, content(1000))
    for command, expected in (
        ("chmod 640", (0o640, 1000)),
        ("truncate -s 500", (0o640, 500)),
        ("cp /bin/true", None),
        ("touch -d @1000000000", None),
    ):
        path.stat()
        guests["small"].run(f"{command} {inside}")
        status = path.stat()
        assert expected is None or (status.st_mode & 0o777, status.st_size) == expected, command
        told = guests["small"].run(f"stat -c '%s %a %Y' {inside}").text.split()
        assert told == [f"{status.st_size}", f"{status.st_mode & 0o777:o}", f"{int(status.st_mtime)}"], command
    away, back = f"mv {inside} {inside}2", f"mv {inside}2 {inside}"
    for command, there in ((away, False), (back, True), (f"rm {inside}", False)):
        path.exists()
        guests["small"].run(command)
        assert path.exists() is there, command


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_two_guests_and_the_host_change_and_read_one_directory(pool, guests, sides):
    """Each replaces and removes names of its own and reads everybody's: whole, of that name, never an older version."""
    seconds, patience = 20, 150
    running = [
        guest.start(visitor("churn", sides[tag], tag, index, seconds, patience), timeout_s=seconds + patience + 60)
        for index, (tag, guest) in enumerate(guests.items())
    ]
    churn = [VISITOR, "churn", sides["host"], "host", "2", f"{seconds}", f"{patience}"]
    done = [json.loads(run(sys.executable, *churn, timeout_s=seconds + patience + 60).stdout)]
    done += [json.loads(command.wait().stdout) for command in running]
    for report in done:
        assert report["reads"] > 5 and report["changes"] > 1 and report["others"] > 0, done
    assert pool.exported("small")["io_errors"] == 0
    assert pool.exported("small")["descriptor_errors"] == pool.exported("large")["descriptor_errors"] == 0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_guest_reads_while_blocks_are_evicted():
    """The host writes three times the pool; in the guest each block is whole, or missing."""
    size = 2 * MIB
    with Exported({"reader": 1}, files=4, size="64M") as pool, pool.guest("reader") as guest:
        root = guest.mount("reader")
        prefix, count = "block", 3 * 4 * 64 * MIB // size
        run(sys.executable, VISITOR, "store", pool.mount, prefix, "40", f"{size}", timeout_s=300)
        running = guest.start(visitor("read", root, prefix, count, 25), timeout_s=180)
        run(sys.executable, VISITOR, "store", pool.mount, prefix, f"{count}", f"{size}", timeout_s=300)
        done = json.loads(running.wait().stdout)
        assert done["reads"] > 10 and done["misses"] > 10, done
        assert len(os.listdir(pool.mount)) < count
        # And when the guest itself writes more than there is room for.
        guest.run(
            f"for i in $(seq 200); do dd if=/dev/zero of={root}/full-$i bs=2M count=1 status=none; done", timeout_s=300
        )
        assert guest.get(f"{root}/full-200") == bytes(2 * MIB)
        guest.kill()
        pool.fsck()


# --- deaths ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_guest_killed_in_mid_write_leaves_nothing_behind():
    """Its handles are closed, others go on, another guest takes its place, and the pool is right."""
    with Exported({"victim": 2, "witness": 1}) as pool:
        with pool.guest("witness") as witness:
            root = witness.mount("witness")
            for index in range(3):
                with pool.guest("victim", (128, 1024)[index % 2]) as victim:
                    place = victim.mount("victim")
                    victim.run(
                        f"dd if=/dev/urandom of={place}/held bs=1M count=4 && exec 9<{place}/held && "
                        f"rm {place}/held && (sleep 1000 <&9 >/dev/null 2>&1 &)"
                    )
                    victim.start(
                        f"for i in $(seq 0 999); do dd if=/dev/zero of={place}/w$i bs=1M count=8 oflag=direct; done"
                    )
                    victim.start(f"while :; do dd if=/dev/zero of={place}/buffered bs=64k count=400; done")
                    wait_until(lambda: (pool.mount / "w0").exists(), "the victim's first file")
                    time.sleep(1)
                    victim.kill()
                wait_until(lambda: not pool.exported("victim")["connected"], "the end of the connection", timeout_s=20)
                wait_until(
                    lambda: pool.status()["counters"]["open_handles"] == 0, "the release of its handles", timeout_s=20
                )
                for path in pool.mount.iterdir():
                    assert set(read_file(path)) <= {0}, path
                assert witness.run(f"echo {index} > {root}/l && cat {root}/l && rm {root}/*").text == f"{index}\n"
        pool.fsck()


@contextlib.contextmanager
def kept(pool, tag, *, timeout_s):
    """`kvfs keep` before an export; yields the socket for QEMU."""
    path = pool.base / "keep.socket"
    words = [sys.executable, "-m", "kvfs", "keep", str(path), str(pool.sockets[tag]), "--timeout", str(timeout_s)]
    with subprocess.Popen(words, cwd=REPOSITORY, stdin=subprocess.DEVNULL) as process:
        try:
            wait_until(path.exists, "the socket of kvfs keep")
            yield path
        finally:
            process.terminate()


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_daemon_killed_under_load_is_a_pause_for_a_guest_that_is_kept():
    """Twice: reads and look-ups go on in the guest with the next daemon, and every byte is right."""
    size = MIB
    with Exported({"kvfs": 2}) as pool, kept(pool, "kvfs", timeout_s=60) as path:
        with Guest([Share(path, "kvfs", queue_count=2)]) as guest:
            root = guest.mount()
            guest.run(visitor("store", root, "kept", 10, size) + f" && sync -f {root}")
            guest.run(f"exec 9<{root}/kept-1; (sleep 1000 <&9 >/dev/null 2>&1 &)")
            reading = guest.start(visitor("read", root, "kept", 10, 20), timeout_s=90)
            looking = guest.start(
                f"while [ $SECONDS -lt 20 ]; do stat {root}/kept-3 {root} >/dev/null || exit 1; done", timeout_s=90
            )
            for _ in range(2):
                time.sleep(3)
                pool.kill()
                assert guest.run("echo alive").text == "alive\n"
                pool.remount()
                assert guest.run(f"stat -c %s {root}/kept-1").text == f"{size}\n"
            looking.wait()
            done = json.loads(reading.wait().stdout)
            assert done["reads"] > 5 and done["misses"] == 0, done
            guest.run(f"pkill -x sleep; echo new > {root}/new")
            assert (pool.mount / "new").read_text() == "new\n"
            assert sorted(workload.check(read_file(pool.mount / f"kept-{index}"), index)[0] for index in range(10)) == [
                f"kept-{index}" for index in range(10)
            ]
            guest.run(f"umount {root}")
        pool.fsck()


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_guest_without_a_daemon_gets_errors_until_there_is_one():
    """Writers and readers under way, and whoever comes later: EIO when the time is over, no hang; then all is well."""
    with Exported({"kvfs": 1}) as pool, kept(pool, "kvfs", timeout_s=3) as path:
        with Guest([Share(path, "kvfs")]) as guest:
            root = guest.mount()
            guest.run(visitor("store", root, "kept", 10, MIB) + f" && sync -f {root}")
            reading = guest.start(f"while dd if={root}/kept-1 of=/dev/null bs=1M iflag=direct; do :; done")
            writing = guest.start(f"i=0; while head -c 3000000 /dev/zero > {root}/w$i; do i=$((i+1)); done")
            time.sleep(2)
            pool.kill()
            for command in (reading, writing):
                assert b"nput/output error" in command.wait(check=False).stderr
            started = time.monotonic()
            assert b"nput/output error" in guest.run(f"stat {root}/kept-2", check=False).stderr
            assert time.monotonic() - started < 30 * slowness()
            pool.remount()
            wait_until(lambda: guest.run(f"stat {root}/kept-2", check=False).status == 0, "the daemon in the guest")
            for index in range(10):
                assert workload.check(guest.get(f"{root}/kept-{index}"), index)[0] == f"kept-{index}"
            guest.run(f"umount {root}")
        pool.fsck()


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_daemon_killed_under_a_guest_that_is_not_kept_leaves_pool_and_others_well():
    """QEMU alone does not connect again: its guest waits. The guest itself lives, and the next finds the daemon."""
    with Exported({"kvfs": 1}) as pool:
        with pool.guest("kvfs") as guest:
            root = guest.mount()
            guest.run(visitor("store", root, "kept", 10, MIB) + f" && sync -f {root}")
            guest.start(f"while :; do dd if={root}/kept-1 of=/dev/null bs=1M iflag=direct; done")
            guest.start(f"for i in $(seq 1000); do head -c 3000000 /dev/zero > {root}/w$i; done")
            time.sleep(2)
            pool.kill()
            assert guest.run("echo alive").text == "alive\n"
        pool.remount()
        with pool.guest("kvfs") as guest:
            root = guest.mount()
            for index in range(10):
                assert workload.check(guest.get(f"{root}/kept-{index}"), index)[0] == f"kept-{index}"
            guest.run(f"umount {root}")
        pool.fsck()


def test_an_unmount_in_a_guest_and_a_shutdown_of_it_end_the_connection():
    with Exported({"kvfs": 1}) as pool:
        for _ in range(2):
            with pool.guest("kvfs") as guest:
                root = guest.mount()
                assert pool.exported("kvfs")["connected"]
                for round_ in range(3):
                    guest.run(f"echo {round_} > {root}/file && umount {root}")
                    guest.mount()
                    assert guest.get(f"{root}/file") == f"{round_}\n".encode()
                guest.run(f"umount {root}")
            wait_until(lambda: not pool.exported("kvfs")["connected"], "the end of the connection")
        pool.fsck()
