"""kvfs.events(): each change of a name is told once, in order, or its loss is; nothing else is told."""

import contextlib
import os
import random
import threading
import time

import pytest
from helpers import KIB, MIB, content, opened, slowness, wait_until, write_file

import kvfs
from kvfs.client.events import Gap, Reason, Removed, Reset, Stored
from kvfs.errors import NotMountedError

SMALL_FEED = {"KVFS_EVENTS_SIZE": str(256 << 10)}


def told(events, count, timeout_s=10.0):
    """The next `count` events, then no more for a moment."""
    found = []
    began = time.monotonic()
    while len(found) < count and time.monotonic() - began < timeout_s * slowness():
        event = events.next_event(0.1)
        if event is not None:
            found.append(event)
    assert len(found) == count, found
    assert events.next_event(0.05) is None
    return found


def short(event):
    """The event without number and time."""
    if isinstance(event, (Stored, Removed)):
        return type(event).__name__.lower(), event.path.decode(), event.reason.name.lower(), event.size
    if isinstance(event, Gap):
        return ("gap", event.lost)
    return "reset", event.path.decode(), event.reason.name.lower()


def key_path(key):
    return f"{key.hex()[:2]}/{key.hex()}"


@pytest.fixture
def events(directory):
    with kvfs.events(directory, "llama", keys=False) as subscription:
        yield subscription


@pytest.mark.smoke
def test_puts_and_deletes_of_clients(client, events):
    before = time.time_ns()
    client.put([(b"a", b"x" * 5000), (b"b", b"")])
    client.put([(b"a", b"y" * 70)])
    assert client.delete([b"b", b"none"]) == [True, False]
    found = told(events, 4)
    assert list(map(short, found)) == [
        ("stored", "61/61", "written", 5000), ("stored", "62/62", "written", 0), ("stored", "61/61", "replaced", 70),
        ("removed", "62/62", "deleted", 0),
    ]  # fmt: skip
    assert [event.key for event in found] == [b"a", b"b", b"a", b"b"]
    numbers = [event.number for event in found]
    assert numbers == list(range(numbers[0], numbers[0] + 4))
    assert before <= found[0].time_ns <= found[3].time_ns <= time.time_ns()


def test_files_of_the_mount(directory, events):
    space = directory / "llama"
    (space / "sub").mkdir(parents=True)
    write_file(space / "sub" / "new.tmp", b"1" * 4096)
    os.rename(space / "sub" / "new.tmp", space / "sub" / "new")
    write_file(space / "sub" / "other", b"2" * 10)
    os.rename(space / "sub" / "new", space / "sub" / "other")
    with opened(space / "sub" / "other", os.O_WRONLY) as file:
        os.pwrite(file, b"3" * 20, 0)
    os.chmod(space / "sub" / "other", 0o600)
    os.unlink(space / "sub" / "other")
    (space / "sub").rmdir()
    assert list(map(short, told(events, 8))) == [
        ("stored", "sub/new.tmp", "written", 4096), ("removed", "sub/new.tmp", "renamed", 4096),
        ("stored", "sub/new", "renamed", 4096), ("stored", "sub/other", "written", 10),
        ("removed", "sub/new", "renamed", 4096), ("stored", "sub/other", "renamed", 4096),
        ("stored", "sub/other", "replaced", 4096), ("removed", "sub/other", "deleted", 4096),
    ]  # fmt: skip


def test_a_file_that_is_no_block_takes_a_block_s_name(directory, events):
    space = directory / "llama"
    space.mkdir()
    write_file(space / "block", b"1" * 100)
    with opened(space / "dirty", os.O_CREAT | os.O_WRONLY) as file:
        os.write(file, b"22")
        os.rename(space / "dirty", space / "block")
        assert list(map(short, told(events, 2))) == [
            ("stored", "block", "written", 100), ("removed", "block", "replaced", 100)
        ]  # fmt: skip
    assert list(map(short, told(events, 1))) == [("stored", "block", "written", 2)]


def test_only_the_namespace_is_told_and_keys_only_if_asked(directory, client):
    other = kvfs.connect(directory, "other", gpu=None)
    with other, client.events() as keys, kvfs.events(directory, keys=False) as all_:
        other.put([(b"elsewhere", b"1")])
        client.put([(b"here", b"12")])
        write_file(directory / "llama" / "68" / "no-key", b"123")
        write_file(directory / "llamas", b"1234")
        write_file(directory / "llama" / "68" / b"home".hex(), b"12345")
        assert [event.key for event in told(keys, 2)] == [b"here", b"home"]
        assert [(event.path.decode(), event.key) for event in told(all_, 5)] == [
            (f"other/{key_path(b'elsewhere')}", None), (f"llama/{key_path(b'here')}", None),
            ("llama/68/no-key", None), ("llamas", None), (f"llama/{key_path(b'home')}", None),
        ]  # fmt: skip


def test_a_directory_that_is_renamed_is_looked_at_again(directory, client, events):
    client.put([(b"a", b"1")])
    told(events, 1)
    os.rename(directory / "llama" / "61", directory / "llama" / "moved")
    assert list(map(short, told(events, 2))) == [("reset", "61", "renamed"), ("reset", "moved", "renamed")]
    os.rename(directory / "llama", directory / "away")
    assert list(map(short, told(events, 1))) == [("reset", "", "renamed")]
    os.unlink(directory / "away" / "moved" / "61")
    client.put([(b"b", b"2")])
    os.rename(directory / "away" / "moved", directory / "llama" / "x")
    assert list(map(short, told(events, 2))) == [("stored", "62/62", "written", 1), ("reset", "x", "renamed")]


def test_the_client_s_own_directory_may_be_renamed(directory):
    inner = directory / "inner"
    inner.mkdir()
    with kvfs.connect(inner, "llama", gpu=None) as client, client.events() as events:
        client.put([(b"a", b"1")])
        assert told(events, 1)[0].key == b"a"
        os.rename(inner, directory / "outer")
        assert {short(event) for event in told(events, 2)} == {("reset", "", "renamed")}
        client.put([(b"b", b"2")])
        assert told(events, 1)[0].key == b"b"


def test_evictions_are_told(own_pool):
    pool = own_pool(files=2, size="64M")
    with kvfs.connect(pool.mount, "llama", gpu=None) as client, client.events() as events:
        there = set()
        for first in range(0, 200, 8):
            keys = [b"key %d" % number for number in range(first, first + 8)]
            client.put([(key, content(MIB, number)) for number, key in enumerate(keys)])
        evicted = 0
        while (event := events.next_event(0.5)) is not None:
            if isinstance(event, Stored):
                assert event.key not in there
                there.add(event.key)
            else:
                assert isinstance(event, Removed) and event.reason == Reason.EVICTED, event
                there.remove(event.key)
                evicted += 1
        assert evicted >= 50
        assert sorted(client.list()) == sorted(there)
        pool.command("evict", str(pool.mount), "--all")
        while (event := events.next_event(0.5)) is not None:
            there.remove(event.key)
        assert sorted(client.list()) == sorted(there)


def test_two_subscribers_of_whom_one_stops(own_pool):
    """The one that goes on is told everything. The one that stops is told how many changes it lost, and what came
    after."""
    pool = own_pool(files=2, size="256M", environment=SMALL_FEED)
    with kvfs.connect(pool.mount, "llama", gpu=None) as client, client.events() as one, client.events() as two:
        ones = []
        done = threading.Event()

        def follow():
            while not done.is_set() or one._library is None:
                event = one.next_event(0.05)
                if event is not None:
                    ones.append(event)
                elif len(ones) >= 20000:
                    return

        follower = threading.Thread(target=follow)
        follower.start()
        for number in range(0, 10000, 100):
            client.put([(b"%06d" % n, b"x") for n in range(number, number + 100)])
            client.delete([b"%06d" % n for n in range(number, number + 100)])
        wait_until(lambda: len(ones) + sum(e.lost for e in ones if isinstance(e, Gap)) >= 20000, "all to be told")
        done.set()
        follower.join()
        assert len(ones) == 20000 and not any(isinstance(event, Gap) for event in ones)
        assert [event.number for event in ones] == list(range(ones[0].number, ones[0].number + 20000))
        late = []
        while (event := two.next_event(0.1)) is not None:
            late.append(event)
        assert isinstance(late[0], Gap) and late[0].lost + len(late) - 1 == 20000
        assert late[1:] == ones[late[0].lost :]


def test_a_daemon_that_is_killed_and_one_that_comes_after(own_pool):
    pool = own_pool(files=2, size="64M")
    with kvfs.connect(pool.mount, "llama", gpu=None) as client, client.events() as events:
        client.put([(b"a", b"1")])
        pool.kill()
        assert [event.key for event in told(events, 1)] == [b"a"]
        assert events.next_event(0.3) is None
        pool.remount()
        assert list(map(short, told(events, 1))) == [("reset", "", "daemon")]
        client.put([(b"b", b"2")])
        assert [event.key for event in told(events, 1)] == [b"b"]
        pool.umount()
        with pytest.raises(NotMountedError):
            while True:
                events.next_event(0.1)
        pool.start()
        assert list(map(short, told(events, 1))) == [("reset", "", "daemon")]
        client.put([(b"c", b"3")])
        assert [event.key for event in told(events, 1)] == [b"c"]


def test_a_bad_block_is_removed(own_pool):
    pool = own_pool(files=1, size="64M")
    with kvfs.connect(pool.mount, "llama", gpu=None) as client, client.events() as events:
        data = content(64 * KIB, 1)
        client.put([(b"a", data), (b"b", content(64 * KIB, 2))])
        told(events, 2)
        with open(pool.path / "devices" / "0", "r+b") as file:
            at = file.read().find(data[:4096])
            file.seek(at + 10)
            file.write(b"damage")
            file.flush()
            os.fsync(file.fileno())
        assert client.get(b"a") is None
        assert [(event.key, event.reason) for event in told(events, 1)] == [(b"a", Reason.DELETED)]


@pytest.mark.parametrize("seed", [1, 2])
def test_random_changes_beside_a_model(directory, seed):
    """Whatever clients and files do, the events make the same set of blocks."""
    rng = random.Random(seed)
    space = directory / "llama"
    model, last = {}, 0
    with kvfs.connect(directory, "llama", gpu=None) as client, kvfs.events(directory, "llama", keys=False) as events:
        keys = [b"%c%d" % (97 + n % 3, n) for n in range(12)]
        paths = [key_path(key) for key in keys]
        client.put([(key, b"") for key in keys])
        for _ in range(400):
            which, other = rng.sample(range(12), 2)
            size = rng.randrange(3 * 4096)
            match rng.randrange(6):
                case 0:
                    client.put([(keys[which], bytes(size)), (keys[other], bytes(size // 2))])
                case 1:
                    client.delete([keys[which]])
                case 2:
                    write_file(space / paths[which], bytes(size))
                case 3:
                    with contextlib.suppress(FileNotFoundError):
                        os.rename(space / paths[which], space / paths[other])
                case 4:
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(space / paths[which])
                case 5:
                    with contextlib.suppress(FileNotFoundError):
                        os.truncate(space / paths[which], size)
        while (event := events.next_event(0.5)) is not None:
            assert isinstance(event, (Stored, Removed)), event
            assert event.number > last
            last = event.number
            if isinstance(event, Stored):
                model[event.path.decode()] = event.size
            else:
                assert model.pop(event.path.decode()) == event.size
        assert model == {
            str(path.relative_to(space)): path.stat().st_size for path in space.rglob("*") if path.is_file()
        }


def test_a_closed_subscription_and_a_reset_are_no_surprise(client):
    events = client.events()
    events.close()
    events.close()
    with pytest.raises(kvfs.errors.ClientError, match="closed"):
        events.next_event()
    assert Reset(b"", Reason.DAEMON) == Reset(b"", Reason.DAEMON)
