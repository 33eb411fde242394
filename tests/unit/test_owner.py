"""The owner of a device: the meaning of a beat, how long one waits and for whom, and the end of a pool's use."""

from __future__ import annotations

import os
import shutil
import signal
import struct
import subprocess
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import xxhash
from still_clock import Time
from store_pools import make_pool

from kvfs.errors import InUseError
from kvfs.pool import heart, owner
from kvfs.pool.devices import Device
from kvfs.pool.format import BEAT_ENDING, BEAT_OFFSET, Beat, pack_beat, unpack_beat
from kvfs.pool.heart import Heart
from kvfs.pool.labels import read_beat
from kvfs.pool.lock import PoolLock, locked
from kvfs.pool.opening import OpenPool, open_device, open_pool
from kvfs.types import PAGE_SIZE

SECRET, POOL, DEVICE = 0x1234_5678_9ABC_DEF0, uuid.UUID(int=7), uuid.UUID(int=8)


HERE = owner.this_process(7, pool="/srv/here", use="mounted at /mnt/here")
# Of another machine, of which nothing but its beats can be seen.
ELSEWHERE = replace(
    HERE, owner=uuid.UUID(int=99), machine=b"m" * 16, boot=b"b" * 16, host="elsewhere", pool="/srv/there", pid=77
)


def dead_process() -> Beat:
    """Of this machine; its process has just ended."""
    process = subprocess.Popen(["true"])
    started = owner._started(process.pid) or 1
    process.wait()
    return replace(HERE, owner=uuid.uuid4(), pid=process.pid, started=started)


def wait(read: Callable[[], Mapping[int, Beat | None]], time: Time, *, claimed: bool = True) -> list[Beat]:
    return list(owner.wait_free(read, HERE, {0: claimed}, None, time.clock))


# ---- the page ----


def test_a_beat_lies_where_the_format_says_and_is_read_back() -> None:
    beat = replace(ELSEWHERE, epoch=5, number=42, written_ns=-9, flags=BEAT_ENDING, namespace=11, started=12)
    page = pack_beat(SECRET, POOL, DEVICE, beat)
    assert len(page) == PAGE_SIZE and page[:8] == b"KVFSBEAT"
    version, flags, checksum, number, written, epoch = struct.unpack_from("<IIQQqQ", page, 8)
    assert (version, flags, number, written, epoch) == (2, BEAT_ENDING, 42, -9, 5)
    assert checksum == xxhash.xxh3_64_intdigest(page[:16] + bytes(8) + page[24:], SECRET)
    assert page[48:64] == POOL.bytes and page[64:80] == DEVICE.bytes and page[80:96] == beat.owner.bytes
    assert page[96:112] == beat.machine and page[112:128] == beat.boot
    assert struct.unpack_from("<QQIIII", page, 128) == (12, 11, 77, 0, 1000, 0)
    assert page[256:320].rstrip(b"\0") == b"elsewhere" and page[512:1536].rstrip(b"\0") == b"/srv/there"
    assert page[1536:2048].rstrip(b"\0") == b"mounted at /mnt/here"
    assert not any(page[160:256] + page[320:512] + page[2048:])
    assert unpack_beat(SECRET, POOL, DEVICE, page) == beat


@pytest.mark.parametrize(
    ("secret", "pool", "device", "damage"),
    [(1, POOL, DEVICE, None), (SECRET, DEVICE, DEVICE, None), (SECRET, POOL, POOL, None), (SECRET, POOL, DEVICE, 2000)],
)
def test_a_page_of_another_pool_or_device_or_a_damaged_one_is_no_beat(
    secret: int, pool: uuid.UUID, device: uuid.UUID, damage: int | None
) -> None:
    page = bytearray(pack_beat(SECRET, POOL, DEVICE, HERE))
    if damage is not None:
        page[damage] ^= 1
    assert unpack_beat(secret, pool, device, bytes(page)) is None
    assert unpack_beat(SECRET, POOL, DEVICE, bytes(PAGE_SIZE)) is None


def test_a_path_that_does_not_fit_is_cut_and_what_moves_the_cursor_is_escaped() -> None:
    beat = replace(ELSEWHERE, pool="/" + "x" * 5000, use="mounted at \x1b[2J", host="h" * 100)
    read = unpack_beat(SECRET, POOL, DEVICE, pack_beat(SECRET, POOL, DEVICE, beat))
    assert read is not None and read.pool == "/" + "x" * 1022 and read.host == "h" * 63
    assert "\x1b" not in owner.describe(read, HERE) and "\\x1b[2J" in owner.describe(read, HERE)


# ---- whom one waits for ----


def test_a_dead_process_of_this_machine_delays_nobody() -> None:
    time, dead = Time(), dead_process()
    assert wait(lambda: {0: dead}, time, claimed=False) == []
    assert time.now == 1000.0


def test_a_process_number_that_was_given_anew_is_another_process() -> None:
    time = Time()
    wait(lambda: {0: replace(HERE, owner=uuid.uuid4(), started=HERE.started - 1)}, time, claimed=False)
    assert time.now == 1000.0


def test_the_beat_of_another_boot_counts_as_dead_when_it_stood_still_for_some_beats() -> None:
    """Also with this machine's id: clones of an image have it as well."""
    time = Time()
    still = replace(ELSEWHERE, machine=HERE.machine)
    assert wait(lambda: {0: still}, time) == [still]
    assert owner.watch_s(still) <= time.now - 1000 < owner.watch_s(still) + 1


def test_a_beat_that_moves_is_refused_as_soon_as_it_does() -> None:
    time = Time()
    with pytest.raises(InUseError, match=r"pid 77 on elsewhere, pool /srv/there, mounted at .*umount.*--force"):
        wait(lambda: {0: replace(ELSEWHERE, number=int(time.now))}, time)
    assert time.now - 1000 < 1.5


def test_a_beat_that_begins_to_move_late_is_not_overlooked() -> None:
    """An owner that missed all beats but the last that it may miss."""
    time = Time()
    with pytest.raises(InUseError):
        wait(lambda: {0: replace(ELSEWHERE, number=time.now >= 1000 + owner.watch_s(ELSEWHERE) - 0.5)}, time)


def test_a_slow_owner_is_watched_for_its_own_intervals() -> None:
    time, slow = Time(), replace(ELSEWHERE, interval_ms=3000)
    wait(lambda: {0: slow}, time)
    assert time.now - 1000 >= 3 * owner.WATCH_BEATS


def test_a_process_that_stands_still_is_alive() -> None:
    """SIGSTOP; no claim says that it has let go, as over NVMe/TCP."""
    process = subprocess.Popen(["sleep", "1000"])
    try:
        process.send_signal(signal.SIGSTOP)
        beat = replace(HERE, owner=uuid.uuid4(), pid=process.pid, started=owner._started(process.pid) or 0)
        time = Time()
        with pytest.raises(InUseError, match=f"pid {process.pid}, pool /srv/here.*kvfs umount /srv/here ends it"):
            wait(lambda: {0: beat}, time, claimed=False)
        assert time.now == 1000.0
        # With a claim on the device it has let go, unless it beats.
        assert wait(lambda: {0: beat}, time) == [beat]
    finally:
        process.kill()
        process.wait()


def test_an_owner_that_is_ending_is_waited_for() -> None:
    time = Time()

    def read() -> Mapping[int, Beat | None]:
        return {0: replace(ELSEWHERE, number=int(time.now), flags=BEAT_ENDING) if time.now < 1020 else None}

    assert wait(read, time) == []
    assert 20 <= time.now - 1000 < 21


def test_an_owner_that_is_ending_for_ever_is_not_waited_for_so_long() -> None:
    time = Time()
    with pytest.raises(InUseError):
        wait(lambda: {0: replace(ELSEWHERE, number=int(time.now), flags=BEAT_ENDING)}, time)
    assert owner.ENDING_S <= time.now - 1000 < owner.ENDING_S + 1


def test_whoever_waits_is_told_for_whom() -> None:
    time, told = Time(), list[str]()
    list(owner.wait_free(lambda: {0: ELSEWHERE}, HERE, {0: True}, told.append, time.clock))
    assert len(told) == 1 and "pid 77 on elsewhere; watching for 5 s" in told[0]


def test_one_device_of_many_is_enough_to_refuse() -> None:
    time = Time()
    with pytest.raises(InUseError):
        wait(lambda: {0: None, 1: dead_process(), 2: replace(ELSEWHERE, number=int(time.now))}, time)


def test_a_killed_process_is_going_until_it_is_gone() -> None:
    process = subprocess.Popen(["sleep", "1000"])
    started = owner._started(process.pid) or 0
    assert owner.process_life(process.pid, started) == owner.Life.HERE
    process.send_signal(signal.SIGSTOP)
    process.kill()
    assert owner.process_life(process.pid, started) in (owner.Life.GOING, owner.Life.GONE)
    process.wait()
    assert owner.process_life(process.pid, started) == owner.Life.GONE


# ---- locks ----


def lock(holder: Callable[[], Beat | None], time: Time, free_at: float = 1e9) -> Beat | None:
    return owner.wait_claim(lambda: time.now >= free_at, holder, HERE, None, time.clock)


def test_a_lock_of_a_process_that_is_ending_or_gone_is_waited_for_and_of_no_other() -> None:
    time, dead = Time(), dead_process()
    assert lock(lambda: replace(HERE, flags=BEAT_ENDING), time, free_at=1030) is None
    assert lock(lambda: dead, time, free_at=time.now + 30) is None
    began = time.now
    assert lock(lambda: HERE, time) == HERE
    assert time.now == began
    held = lock(lambda: dead, time)
    assert held is not None and owner.ENDING_S <= time.now - began < owner.ENDING_S + 1


def test_a_pools_lock_says_who_has_it_and_what_to_do(tmp_path: Path) -> None:
    pool = make_pool(tmp_path / "pool")
    with locked(pool, "mounted at /mnt/a"):
        with (
            pytest.raises(InUseError, match=f"pid {os.getpid()}, pool {pool}, mounted at /mnt/a; kvfs umount {pool}"),
            locked(pool),
        ):
            pass
    assert (pool / "lock").read_bytes() == b""


# A process of a container that ran here: its pid namespace is none that we see.
BOXED = replace(HERE, owner=uuid.UUID(int=98), pid=1, started=5, namespace=HERE.namespace + 1, host="box")


def test_a_dead_process_of_another_pid_namespace_delays_nobody_if_it_had_the_lock() -> None:
    for dead, waits_s in (
        (None, 5),
        (BOXED, 0),
        (replace(BOXED, started=6), 5),
        (replace(BOXED, pid=2), 5),
        (replace(BOXED, namespace=3), 5),
        (replace(BOXED, host="other"), 5),
    ):
        time = Time()
        began = time.now
        list(owner.wait_free(lambda: {0: BOXED}, HERE, {0: True}, None, time.clock, dead))
        assert waits_s <= time.now - began < waits_s + 1, dead
    # One of another boot is another machine's, which this machine's locks may say nothing of.
    time = Time()
    began = time.now
    list(owner.wait_free(lambda: {0: ELSEWHERE}, HERE, {0: True}, None, time.clock, ELSEWHERE))
    assert time.now - began >= 5


def left_by(pool: Path, process: Beat) -> None:
    """The pool's lock as a process has left it that was killed."""
    fd = os.open(pool / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    PoolLock(fd, process).describe()
    os.close(fd)


def test_a_lock_names_who_had_it_and_was_killed(tmp_path: Path) -> None:
    pool = make_pool(tmp_path / "pool")

    def left() -> Beat | None:
        with locked(pool) as lock:
            return lock.left

    assert left() is None, "given up in good order"
    left_by(pool, BOXED)
    shutil.copy(pool / "lock", tmp_path / "text")
    for _ in range(2):  # its beats may stand on the devices still: the next one is to know it, too
        found = left()
        assert found is not None and owner._process(found) == owner._process(BOXED)
    left_by(pool, ELSEWHERE)
    assert left() is None, "of another boot"
    left_by(pool, replace(BOXED, boot=bytes(16)))
    assert left() is None, "of a machine that has no /proc"
    # As in a copy of the directory: those who had the other lock may live.
    shutil.copy(tmp_path / "text", pool / "lock.new")
    (pool / "lock.new").rename(pool / "lock")
    assert left() is None, "the text of another file"


def test_the_text_of_a_lock_may_be_anything(tmp_path: Path) -> None:
    pool = make_pool(tmp_path / "pool")
    with locked(pool):
        for text in (b"", b"\xff\xfe", b"[]", b'{"pid": "x"}', b"x" * 10000):
            (pool / "lock").write_bytes(text)
            with pytest.raises(InUseError, match="in use by another kvfs"), locked(pool, wait=False):
                pass


def test_a_device_file_is_claimed_by_one_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, "_PATIENCE_S", 0.05)
    pool = make_pool(tmp_path / "pool")
    first = open_device(pool / "devices/0")
    with pytest.raises(InUseError, match="devices/0: in use by another kvfs"):
        open_device(pool / "devices/0")
    # A reader may open it, and so may an owner that takes over from the present one.
    open_device(pool / "devices/0", exclusive=False, writable=False).close()
    second = open_device(pool / "devices/0", holder=first)
    first.close()
    with pytest.raises(InUseError):
        open_device(pool / "devices/0")
    second.close()
    open_device(pool / "devices/0").close()


def test_native_clients_and_io_uring_hold_no_claim(tmp_path: Path) -> None:
    """Their hold on a device outlives the daemon; nobody must wait for its end."""
    pool = make_pool(tmp_path / "pool")
    device = open_device(pool / "devices/0")
    theirs = [os.dup(device.fd), os.open(f"/proc/self/fd/{device.fd}", os.O_RDWR)]
    device.close()
    open_device(pool / "devices/0").close()
    for fd in theirs:
        os.close(fd)


# ---- the heart ----


@contextmanager
def opened_pool(path: Path, *, shared: bool = False) -> Iterator[OpenPool]:
    """`shared`: as another machine would, that shares the devices: no claim keeps it away."""
    opened = open_pool(path)
    if shared:
        for device in opened.devices:
            device.unclaim()
            device.is_block = True
    try:
        yield opened
    finally:
        opened.close()


def page(opened: OpenPool, number: int = 0) -> bytes:
    return opened.devices[number].read(BEAT_OFFSET, PAGE_SIZE)


def put(opened: OpenPool, beat: Beat, number: int = 0) -> bytes:
    config = opened.config
    data = pack_beat(config.secret, config.uuid, config.devices[number].uuid, beat)
    opened.devices[number].write(BEAT_OFFSET, data)
    return data


def unexpected(reason: str) -> None:
    pytest.fail(f"lost: {reason}")


def test_a_heart_beats_on_every_device_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, "INTERVAL_S", 0.01)
    with opened_pool(make_pool(tmp_path / "pool")) as opened:
        labels = [device.read(0, BEAT_OFFSET) for device in opened.devices]
        taken = Heart.take(opened, use="mounted at /mnt/a", next_epoch=True)
        assert taken.me.epoch == opened.epoch + 1
        first = [page(opened, number) for number in range(2)]
        taken.start(unexpected)
        for number in range(2):
            while page(opened, number) == first[number]:
                pass
            beat = read_beat(opened.devices[number], opened.config, number)
            assert beat is not None and beat.owner == taken.me.owner and beat.pool == str(tmp_path / "pool")
        taken.ending()
        while not (read_beat(opened.devices[0], opened.config, 0) or HERE).flags & BEAT_ENDING:
            pass
        taken.stop()
        assert [page(opened, number) for number in range(2)] == [bytes(PAGE_SIZE)] * 2
        assert [device.read(0, BEAT_OFFSET) for device in opened.devices] == labels


def test_the_epoch_is_above_that_of_every_beat(tmp_path: Path) -> None:
    """An owner that died before it had written labels may have got further than they say."""
    with opened_pool(make_pool(tmp_path / "pool")) as opened:
        put(opened, replace(dead_process(), epoch=41), 1)
        taken = Heart.take(opened, use="", next_epoch=True)
        assert taken.me.epoch == 42
        taken.stop()


def test_a_pool_whose_zones_leave_no_room_has_no_beats(tmp_path: Path) -> None:
    with opened_pool(make_pool(tmp_path / "pool")) as opened:
        config = opened.config
        tight = tuple(replace(device, zones_offset=BEAT_OFFSET) for device in config.devices)
        opened.config = replace(config, devices=tight)
        before = page(opened)
        taken = Heart.take(opened, use="", next_epoch=True)
        taken.start(unexpected)
        assert not taken._slots and page(opened) == before
        taken.stop()


def test_of_two_that_take_at_the_same_moment_one_sees_the_other(tmp_path: Path) -> None:
    """Both have looked when the first writes: no lock is between them, as between two machines."""
    path, time = make_pool(tmp_path / "pool"), Time()
    with opened_pool(path, shared=True) as opened, opened_pool(path, shared=True) as other:
        late = Heart(other, replace(ELSEWHERE, epoch=1))

        def write_late() -> None:
            for number in range(2):
                late._write(number, other.devices[number])

        time.on_sleep = write_late
        with pytest.raises(InUseError, match="on elsewhere"):
            Heart.take(opened, use="", next_epoch=True, clock=time.clock)
        # The one that stays is not harmed by it.
        assert late.judge(0, page(other), other.config) is None


def test_an_owner_pushed_aside_by_force_is_given_time_to_notice(tmp_path: Path) -> None:
    path, time = make_pool(tmp_path / "pool"), Time()
    with opened_pool(path) as opened:
        beats = iter(range(10**6))

        def beat() -> None:
            if time.now < 1002:
                put(opened, replace(ELSEWHERE, epoch=3, number=next(beats)))

        beat()
        time.on_sleep = beat
        with pytest.raises(InUseError):
            Heart.take(opened, use="", next_epoch=True, clock=time.clock)
        time.now = 1000.0
        taken = Heart.take(opened, use="", next_epoch=True, force=True, clock=time.clock)
        assert taken.me.epoch == 4 and time.now >= 1002
        assert taken.judge(0, page(opened), opened.config) is None
        assert any("taken over by --force" in note for note in opened.notes)
        taken.stop()


@pytest.mark.parametrize(
    ("change", "at_once"),
    [
        ({"epoch": 8}, True), ({"epoch": 7}, True), ({"epoch": 6}, False),
        ({"epoch": 7, "owner": HERE.owner, "number": 10**6}, True), ({"epoch": 7, "owner": HERE.owner}, False),
    ],
    ids=["newer", "as-old", "older", "clone-ahead", "clone-behind"],
)  # fmt: skip
def test_another_owners_beat_ends_the_use_of_the_pool(tmp_path: Path, change: dict[str, object], at_once: bool) -> None:
    """A newer one's at once; an older one's when it moves: one may be a write that was late."""
    with opened_pool(make_pool(tmp_path / "pool")) as opened:
        taken = Heart(opened, HERE)
        for _ in range(4):
            taken._write(0, opened.devices[0])
        foreign = replace(ELSEWHERE, **change)  # type: ignore[arg-type]
        first = taken.judge(0, put(opened, foreign), opened.config)
        assert (first is not None) == at_once
        if not at_once:
            taken._write(0, opened.devices[0])
            assert taken.judge(0, put(opened, foreign), opened.config) is None
        assert taken.judge(0, put(opened, replace(foreign, written_ns=1)), opened.config) is not None


def test_what_is_no_beat_ends_nothing_but_two_of_another_pool_do(tmp_path: Path) -> None:
    with opened_pool(make_pool(tmp_path / "pool")) as opened:
        taken = Heart(opened, HERE)
        for data in (bytes(PAGE_SIZE), os.urandom(PAGE_SIZE), os.urandom(PAGE_SIZE)):
            assert taken.judge(0, data, opened.config) is None
        assert taken.judge(0, pack_beat(1, POOL, DEVICE, ELSEWHERE), opened.config) is None
        assert taken.judge(0, pack_beat(1, POOL, DEVICE, HERE), opened.config) is not None


def test_an_own_write_that_lands_late_is_nobody_elses(tmp_path: Path) -> None:
    with opened_pool(make_pool(tmp_path / "pool")) as opened:
        taken = Heart(opened, HERE)
        taken._write(0, opened.devices[0])
        late = page(opened)
        for _ in range(5):
            taken._write(0, opened.devices[0])
        assert taken.judge(0, late, opened.config) is None


class HangingDevice(Device):
    """A device that answers reads and never ends a write; the test ends it."""

    begun = threading.Event()
    end = threading.Event()

    def door(self) -> Device:
        return HangingDevice(self.path, os.dup(self.fd), self.size, False, self.direct)

    def write(self, offset: int, data: bytes, *, durable: bool = True) -> None:
        self.begun.set()
        self.end.wait()


def test_a_device_that_hangs_in_a_beat_stops_neither_the_others_nor_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, "INTERVAL_S", 0.01)
    monkeypatch.setattr(heart, "_STOP_S", 0.1)
    with opened_pool(make_pool(tmp_path / "pool")) as opened:
        taken = Heart.take(opened, use="", next_epoch=True)
        good = opened.devices[0]
        opened.devices[0] = HangingDevice(good.path, good.fd, good.size, False, good.direct, claim=good.claim)
        taken.start(unexpected)
        assert HangingDevice.begun.wait(60)
        before = page(opened, 1)
        while page(opened, 1) == before:
            pass
        taken.stop()
        assert page(opened, 0) != bytes(PAGE_SIZE)
        HangingDevice.end.set()


def test_a_foreign_beat_is_told_of_once_and_not_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, "INTERVAL_S", 0.01)
    with opened_pool(make_pool(tmp_path / "pool")) as opened:
        taken, lost, told = Heart.take(opened, use="", next_epoch=True), threading.Event(), list[str]()

        def on_lost(reason: str) -> None:
            told.append(reason)
            lost.set()

        foreign = [put(opened, replace(ELSEWHERE, epoch=taken.me.epoch + 1), number) for number in range(2)]
        taken.start(on_lost)
        assert lost.wait(60)
        taken.stop()
        assert len(told) == 1 and "pid 77 on elsewhere" in told[0] and "devices/" in told[0]
        assert [page(opened, number) for number in range(2)] == foreign
