"""Leases: what a client has leased is not evicted, until the lease ends; what leases hold is bounded. And touches."""

import contextlib
import os
import signal
import subprocess
import sys
import time

import pytest
from helpers import (
    KIB,
    MIB,
    REPOSITORY,
    assert_same,
    content,
    in_child,
    opened,
    read_file,
    slowness,
    wait_until,
    write_file,
)

import kvfs
from kvfs.errors import DeadlineError, NotMountedError
from kvfs.frontend.asking import ControlClient
from kvfs.status.text import render_status

BLOCK = 256 * KIB + 100
KEYS = [f"key {index}".encode() for index in range(40)]
# Eight segments, the fewest there can be, and some sixty.
FEW = {"files": 4, "size": "70M", "format_args": ("--segment-size", "32M")}
MANY = {"files": 4, "size": "64M", "format_args": ("--segment-size", "4M")}
SIZE = 4 * 64 * MIB


@pytest.fixture
def pool(own_pool):
    return own_pool(**MANY)


@pytest.fixture
def client(pool):
    with kvfs.connect(pool.mount, "llama", gpu=None) as connected:
        yield connected


def ask(pool, command, **arguments):
    """By the control socket: a command of the command line would take a good part of a lease's time."""
    with ControlClient(pool.path, 100) as control:
        return control.call(command, **arguments)


def counters(pool):
    return ask(pool, "status")["counters"]


def file_of(pool, key):
    return pool.mount / "llama" / key.hex()[:2] / key.hex()


def store(pool, client, keys, by_file):
    for key in keys:
        if by_file:
            path = file_of(pool, key)
            path.parent.mkdir(parents=True, exist_ok=True)
            write_file(path.with_suffix(".tmp"), content(BLOCK, key))
            os.rename(path.with_suffix(".tmp"), path)
        else:
            client.put([(key, content(BLOCK, key))])


def write_over(pool, client, size, by_file=False, name="over"):
    """Store so many bytes more. Every store succeeds."""
    data = content(MIB, name)
    for index in range(size // MIB):
        if by_file:
            write_file(pool.mount / f"{name}-{index}", data)
        else:
            client.put([(f"{name} {index}", data)])


def evict_all(pool):
    """How many blocks stay, by the reason."""
    return {why: kept["blocks"] for why, kept in ask(pool, "evict", all=True)["kept"].items()}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("by_file", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["puts", "files"])
@pytest.mark.parametrize("segments", [FEW, pytest.param(MANY, marks=pytest.mark.slow)], ids=["few", "many"])
def test_a_leased_block_survives_three_times_the_pool_written_over_it(own_pool, segments, by_file):
    pool = own_pool(**segments)
    with kvfs.connect(pool.mount, "llama", gpu=None) as client:
        store(pool, client, KEYS, by_file)
        leased, others = KEYS[::2], KEYS[1::2]
        # Renewed, as this may take longer than a lease may last.
        lease = client.lease(leased, 60)
        assert lease.held == [True] * len(leased)
        for part in range(6):
            write_over(pool, client, SIZE // 2, by_file, f"part {part}")
            before, lease = lease, client.lease(leased, 60)
            assert lease.held == [True] * len(leased) and before.release() is True
        for key in leased:
            assert_same(client.get(key), content(BLOCK, key), f"the leased {key}")
        assert not any(client.exists(others)), "blocks that nobody leased"
        assert lease.release() is True and counters(pool)["leased_blocks"] == 0
        evict_all(pool)
        assert not any(client.exists(leased))
    pool.umount()
    assert pool.command("fsck", str(pool.path)).returncode == 0


def test_kvfs_evict_leaves_what_is_leased_and_says_so(pool, client):
    store(pool, client, KEYS, False)
    with client.lease(KEYS[:3], 60) as lease:
        assert lease.held == [True] * 3
        figures = counters(pool)
        assert (figures["leases_open"], figures["leased_clients"], figures["leased_blocks"]) == (1, 1, 3)
        assert 3 * BLOCK < figures["leased_bytes"] < 3 * BLOCK + 64 * KIB
        assert evict_all(pool) == {"leased": 3}
        assert client.exists(KEYS[:6]) == [True] * 3 + [False] * 3
    with client.lease(KEYS[:3], 60):
        said = pool.command("evict", str(pool.mount), "--all").stdout
        assert "kept 3 blocks, " in said and "leased by a native client: /llama/" in said, said
    with client.lease(KEYS[:3], 60):
        text = render_status(ask(pool, "status"))
        assert "leased 3 blocks (7" in text and "K) by 1 client" in text, text
        assert "kvfs_leased_blocks{" in pool.command("stats", str(pool.path), "--prometheus").stdout
    assert evict_all(pool) == {} and not any(client.exists(KEYS))


def test_a_lease_ends_with_its_release_or_its_deadline_and_two_with_the_last(pool, client):
    store(pool, client, KEYS[:2], False)
    one, two = client.lease(KEYS[:1], 60), client.lease(KEYS[:2], 60)
    assert one.release() is True and one.release() is False
    evict_all(pool)
    assert client.exists(KEYS[:2]) == [True, True], "the second lease holds"
    two.release()
    evict_all(pool)
    assert client.exists(KEYS[:2]) == [False, False]
    store(pool, client, KEYS[:2], False)
    began = time.monotonic()
    short, long = client.lease(KEYS[:1], 1.5), client.lease(KEYS[1:2], 60)
    evict_all(pool)
    if time.monotonic() - began < 1.5:
        assert client.exists(KEYS[:2]) == [True, True]
    wait_until(lambda: counters(pool)["leased_blocks"] == 1, "the end of the short lease", timeout_s=20)
    assert time.monotonic() - began >= 1.5 and counters(pool)["leases_expired"] == 1
    evict_all(pool)
    assert client.exists(KEYS[:2]) == [False, True]
    assert short.release() is False and long.release() is True


def test_times_that_are_none_are_refused_and_long_ones_are_cut(pool, client):
    """A minute is the longest: tests/unit/test_leases.py."""
    store(pool, client, KEYS[:1], False)
    for seconds in (0, -1, float("nan")):
        with pytest.raises(ValueError, match="a lease of"):
            client.lease(KEYS[:1], seconds)
    for seconds in (1e9, float("inf")):
        assert client.lease(KEYS[:1], seconds).release() is True
    assert client.lease(KEYS[:1], 0.000001).release() in (True, False)


def test_a_client_that_is_killed_loses_its_leases_within_a_second(pool, client):
    store(pool, client, KEYS[:4], False)
    script = (
        "import sys, time, kvfs\n"
        "client = kvfs.connect(sys.argv[1], 'llama', gpu=None)\n"
        "print(sum(client.lease([key.encode() for key in sys.argv[2:]], 60).held), flush=True)\n"
        "time.sleep(100)\n"
    )
    words = [sys.executable, "-c", script, str(pool.mount), *(key.decode() for key in KEYS[:4])]
    with subprocess.Popen(words, stdout=subprocess.PIPE, cwd=REPOSITORY) as other:
        assert other.stdout.readline() == b"4\n"
        evict_all(pool)
        assert client.exists(KEYS[:4]) == [True] * 4
        other.send_signal(signal.SIGKILL)
        other.wait()
        wait_until(lambda: counters(pool)["leased_blocks"] == 0, "the end of the leases", timeout_s=1, interval_s=0)
    assert counters(pool)["leases_expired"] == 0, "they ended by their deadline"
    evict_all(pool)
    assert not any(client.exists(KEYS[:4]))


def test_a_lease_holds_no_more_than_a_sixteenth_of_the_pool_and_the_rest_of_the_batch_is_told(pool, client):
    count = SIZE // 8 // MIB
    keys = [f"large {index}".encode() for index in range(count)]
    client.put([(key, content(MIB, key)) for key in keys])
    with client.lease([*keys, b"not there"], 60) as lease:
        held = sum(lease.held)
        assert 0.8 * count / 2 < held <= count / 2 and not lease.held[-1]
        assert sum(client.lease(keys, 60).held) == 0, "a client's second lease of the same blocks counts again"
        assert counters(pool)["leases_refused"] >= count - held + 1
        assert counters(pool)["leased_bytes"] <= SIZE // 16
    with client.lease(keys, 60) as lease:
        assert sum(lease.held) == held


@pytest.mark.timeout(300)
def test_when_clients_lease_all_that_they_can_others_store_for_ever(pool, client):
    keys = [f"large {index}".encode() for index in range(SIZE // 4 // MIB)]
    client.put([(key, content(MIB, key)) for key in keys])
    with contextlib.ExitStack() as stack:
        others = [stack.enter_context(kvfs.connect(pool.mount, "llama", gpu=None)) for _ in range(6)]
        for turn in range(4):
            leases = [
                other.lease(keys[index * 4 :] + [f"turn {turn} {i}" for i in range(200)], 60)
                for index, other in enumerate(others)
            ]
            figures = counters(pool)
            assert SIZE // 20 < figures["leased_bytes"] <= SIZE // 8, figures
            for by_file in (False, True):
                write_over(pool, client, SIZE // 2, by_file, f"turn {turn}")
            for lease in leases[::2]:
                lease.release()
    wait_until(lambda: counters(pool)["leases_open"] == 0, "the end of all leases")


def test_others_replace_and_delete_what_is_leased(pool, client, tmp_path):
    store(pool, client, KEYS[:4], False)
    with kvfs.connect(pool.mount, "llama", gpu=None) as other, other.lease(KEYS[:4], 60) as lease:
        assert lease.held == [True] * 4
        client.put([(KEYS[0], b"new")])
        assert client.delete(KEYS[1:2]) == [True]
        os.unlink(file_of(pool, KEYS[2]))
        assert counters(pool)["leased_blocks"] == 1
        assert bytes(other.get(KEYS[0])) == b"new" and other.exists(KEYS[:4]) == [True, False, False, True]
        evict_all(pool)
        assert other.exists(KEYS[:4]) == [False, False, False, True], "the new block is not the leased one"
        # A rename keeps the block, and its lease.
        os.rename(file_of(pool, KEYS[3]), pool.mount / "elsewhere")
        evict_all(pool)
        assert_same(read_file(pool.mount / "elsewhere"), content(BLOCK, KEYS[3]), "the renamed block")


def test_what_is_no_block_is_not_held(pool, client):
    store(pool, client, KEYS[:1], False)
    path = file_of(pool, b"written")
    path.parent.mkdir(parents=True, exist_ok=True)
    with opened(path, os.O_CREAT | os.O_WRONLY) as descriptor:
        os.write(descriptor, b"half")
        assert client.lease([KEYS[0], b"written", b"missing", KEYS[0]], 60).held == [True, False, False, True]
    assert client.lease([b"written"], 60).held == [True]
    assert client.lease([], 60).held == [] and client.touch([]) == 0


def test_a_reader_without_the_right_to_write_leases_too(pool, client):
    store(pool, client, KEYS[:1], False)
    with kvfs.connect(pool.mount, "llama", gpu=None, read_only=True) as reader:
        assert reader.lease(KEYS[:1], 60).held == [True] and reader.touch(KEYS[:2]) == 1


def test_a_block_of_a_group_is_held_and_its_group_is_not(pool, client):
    """A group may be larger than leases may be."""
    store(pool, client, KEYS[:6], False)
    for key in KEYS[:6]:
        os.setxattr(file_of(pool, key), "user.kvfs.group", b"together")
    with client.lease(KEYS[:1], 60):
        evict_all(pool)
        assert client.exists(KEYS[:6]) == [True] + [False] * 5
    evict_all(pool)
    assert not any(client.exists(KEYS[:6]))


@pytest.mark.parametrize("drain", [True, False])
def test_a_device_that_is_drained_keeps_what_is_leased_and_one_that_goes_ends_it(own_pool, drain):
    pool = own_pool(files=4, size="64M", format_args=("--stripe-width", "1", "--segment-size", "2M"))
    with kvfs.connect(pool.mount, "llama", gpu=None) as client:
        store(pool, client, KEYS, False)
        lease = client.lease(KEYS[:20], 60)
        assert lease.held == [True] * 20
        pool.command("device", "remove", str(pool.path), "2", *(["--drain"] if drain else []))
        there = client.exists(KEYS)
        if drain:
            assert all(there[:20]) and not all(there[20:]), "leased blocks moved, others went"
        else:
            assert 0 < sum(there[:20]) < 20
        for key in [key for key, is_there in zip(KEYS, there, strict=True) if is_there]:
            assert_same(client.get(key), content(BLOCK, key), f"{key} after the removal")
        # Devices have changed: clients connect anew, and their leases end.
        wait_until(lambda: counters(pool)["leased_blocks"] == 0, "the end of the lease")
        assert lease.release() is False
        assert client.lease(KEYS, 60).held == there


def test_a_lease_ends_with_its_daemon(pool, client):
    store(pool, client, KEYS[:4], False)
    lease = client.lease(KEYS[:4], 60)
    pool.kill()
    with pytest.raises(NotMountedError):
        client.lease(KEYS[:4], 60)
    assert client.touch(KEYS[:6]) == 4
    other = client.lease([], 1)
    assert lease.release() is False and other.release() is False
    pool.remount()
    again = client.lease(KEYS[:4], 60)
    assert again.held == [True] * 4
    assert lease.release() is False and counters(pool)["leased_blocks"] == 4, "a number of the daemon before"
    pool.umount()
    assert again.release() is False
    with pytest.raises(NotMountedError):
        client.lease(KEYS[:4], 60)
    pool.start()
    assert counters(pool)["leased_blocks"] == 0 and client.lease(KEYS[:4], 60).held == [True] * 4


def test_a_daemon_that_hangs_is_a_deadline(pool):
    with kvfs.connect(pool.mount, "llama", gpu=None, timeout_s=1) as client:
        store(pool, client, KEYS[:1], False)
        lease = client.lease(KEYS[:1], 60)
        os.kill(pool.pid(), signal.SIGSTOP)
        try:
            began = time.monotonic()
            with pytest.raises(DeadlineError):
                client.lease(KEYS[:1], 60)
            with pytest.raises(DeadlineError):
                lease.release()
            lease.end()
            assert time.monotonic() - began < 30 * slowness() and client.touch(KEYS[:2]) == 1
        finally:
            os.kill(pool.pid(), signal.SIGCONT)
        wait_until(lambda: counters(pool)["leases_open"] == 0, "the end of the lease with its connection")

        def released():
            with contextlib.suppress(DeadlineError):  # a daemon that was silent is not asked again at once
                return [lease.release()]

        assert wait_until(released, "the daemon to be asked again") == [False]


def test_claims_keep_blocks_like_leases_and_end_when_they_were_loaded(pool, client):
    store(pool, client, KEYS, False)
    assert client.claim([*KEYS[:3], b"none"], 60) == 3 and client.claim(KEYS[2:4], 60) == 2
    assert evict_all(pool) == {"leased": 4}
    assert client.exists(KEYS[:6]) == [True] * 4 + [False] * 2
    assert client.unclaim([*KEYS[:3], b"none"]) == 3
    wait_until(lambda: counters(pool)["leased_blocks"] == 2, "the first claim to end")
    assert client.unclaim(KEYS[2:4]) == 2 and client.unclaim(KEYS) == 0
    wait_until(lambda: counters(pool)["leases_open"] == 0, "the second to end")
    assert evict_all(pool) == {} and not any(client.exists(KEYS))


def test_claims_wait_for_no_daemon_and_end_with_it(pool):
    with kvfs.connect(pool.mount, "llama", gpu=None, timeout_s=1) as client:
        store(pool, client, KEYS[:4], False)
        os.kill(pool.pid(), signal.SIGSTOP)
        try:
            began = time.monotonic()
            assert client.claim(KEYS[:2], 60) == 2, "the daemon reads it when it goes on"
            assert client.unclaim(KEYS[:1]) == 1
            while time.monotonic() < began + 1.01:
                time.sleep(0.05)
            assert client.claim(KEYS[2:4], 60) == 0, "nothing more is asked of a daemon that is late"
        finally:
            os.kill(pool.pid(), signal.SIGCONT)
        wait_until(lambda: counters(pool)["leased_blocks"] == 2, "the claim")
        assert client.unclaim(KEYS[:2]) == 1, "its answer is taken in late"
        wait_until(lambda: counters(pool)["leases_open"] == 0, "the end of the claim")
        assert client.claim(KEYS[:4], 60) == 4
        pool.kill()
        began = time.monotonic()
        assert client.unclaim(KEYS[:4]) in (0, 4) and client.claim(KEYS[:4], 60) == 0
        assert time.monotonic() - began < 0.5 * slowness()
        pool.remount()
        wait_until(lambda: client.exists(KEYS[:1]) and client.claim(KEYS[:4], 60) == 4, "the next daemon")
        wait_until(lambda: counters(pool)["leased_blocks"] == 4, "the claim on it")


def test_a_forked_child_has_no_lease(client):
    lease = client.lease(KEYS[:1], 60)

    def body():
        lease.end()
        with pytest.raises(kvfs.errors.ForkError):
            client.lease(KEYS[:1], 60)

    in_child(body)


@pytest.mark.timeout(300)
def test_what_is_touched_stays_longer_and_counts_no_hit(pool, client):
    """The pool is written twice. Half of the first blocks are touched while others are stored."""
    touched, others = KEYS[:20], KEYS[20:]
    store(pool, client, touched, False)
    write_over(pool, client, 8 * MIB, False, "between")  # else some others stay, in a segment of touched ones
    store(pool, client, others, False)

    def hits():
        status = ask(pool, "status")
        return status["counters"]["blocks_found"], sum(status["found_ages"]), status["counters"]["blocks_missed"]

    before = hits()
    assert client.touch([*touched, b"missing"]) == len(touched)
    for part in range(128):
        write_over(pool, client, SIZE // 64, False, f"part {part}")
        client.touch(touched)
    assert hits() == before
    assert sum(client.exists(touched)) > len(touched) // 2 > sum(client.exists(others))
