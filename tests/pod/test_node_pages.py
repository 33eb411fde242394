"""The pages of nodes: each beats on its own, keeps its epoch, and stops when its page is another's."""

from __future__ import annotations

import shutil
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import trio
from helpers import slowness
from pods import join_node, make_pod
from still_clock import Time
from store_pools import OPTIONS, names, rebuilt, write

from kvfs.errors import DeviceError, FormatError, InUseError, PoolError, UsageError, first_error
from kvfs.index.lmdb import LmdbIndex
from kvfs.pool import owner
from kvfs.pool.config import load
from kvfs.pool.devices import Device
from kvfs.pool.format import (
    BEAT_LEFT,
    BEAT_OFFSET,
    BEAT_RETIRED,
    META_EPOCH,
    META_NUMBER,
    Beat,
    Label,
    beat_offset,
    pack_beat,
    unpack_beat,
)
from kvfs.pool.heart import Heart
from kvfs.pool.joining import retire
from kvfs.pool.labels import beats_by_label, read_beat, read_beats, read_labels
from kvfs.pool.making import FormatRequest, add_devices, check_unused, format_devices
from kvfs.pool.opening import OpenPool, open_device, open_pool
from kvfs.store.fsck import fsck
from kvfs.store.health import DeviceState
from kvfs.store.store import Store
from kvfs.types import EPOCH_MAX, PAGE_SIZE

SECRET, POOL, DEVICE = 1, uuid.UUID(int=7), uuid.UUID(int=8)


@contextmanager
def opened(path: Path) -> Iterator[OpenPool]:
    found = open_pool(path)
    try:
        yield found
    finally:
        found.close()


def page_of(found: OpenPool, device: int = 0, slot: int | None = None) -> Beat:
    beat = read_beat(found.devices[device], found.config, device, found.slot if slot is None else slot)
    assert beat is not None
    return beat


def put(found: OpenPool, beat: Beat, device: int = 0) -> None:
    config = found.config
    data = pack_beat(config.secret, config.uuid, config.devices[device].uuid, beat)
    found.devices[device].write(beat_offset(beat.slot), data)


def unexpected(reason: str) -> None:
    pytest.fail(f"lost: {reason}")


def mounted(found: OpenPool, time: Time | None = None, **arguments: object) -> Heart:
    """A heart, as Store.open takes it and goes on."""
    heart = Heart.take(found, use="mounted", next_epoch=True, clock=(time or Time()).clock, **arguments)  # type: ignore[arg-type]
    assert heart.mount() == {}
    return heart


# ---- the page ----


def test_a_page_lies_where_the_format_says_and_is_read_back() -> None:
    beat = replace(owner.this_process(9), slot=5, node=uuid.UUID(int=99), mounted=8, flags=BEAT_LEFT)
    page = pack_beat(SECRET, POOL, DEVICE, beat)
    assert page[12:16] == b"\2\0\0\0" and page[148:152] == b"\5\0\0\0"
    assert page[160:176] == beat.node.bytes and page[176:184] == b"\x08" + bytes(7) and not any(page[184:256])
    assert unpack_beat(SECRET, POOL, DEVICE, page, 5) == beat
    assert beat_offset(5) == BEAT_OFFSET + 5 * PAGE_SIZE == 65536 + 5 * 4096


@pytest.mark.parametrize("change", [{"slot": 4}, {"epoch": 1 << 21}, {"mounted": 10}])
def test_a_page_of_another_slot_or_with_impossible_mounts_is_no_page(change: dict[str, int]) -> None:
    beat = replace(owner.this_process(9), slot=5, node=uuid.UUID(int=99), mounted=8)
    page = pack_beat(SECRET, POOL, DEVICE, replace(beat, **change))  # type: ignore[arg-type]
    assert unpack_beat(SECRET, POOL, DEVICE, page, 5) is None


# ---- epochs ----


def test_a_mount_is_above_those_of_all_nodes_and_two_nodes_are_there_at_once(tmp_path: Path) -> None:
    one, two = make_pod(tmp_path, joined=2)
    with opened(one) as a, opened(two) as b:
        labels = [device.read(0, BEAT_OFFSET) for device in a.devices]
        first = mounted(a)
        assert first.me.epoch == 1
        second = mounted(b)
        assert second.me.epoch == 2
        first.start(unexpected)
        second.start(unexpected)
        assert {slot: beat.epoch for slot, beat in read_beats(a.devices[0], a.config, 0).items()} == {0: 1, 1: 2}
        first.stop()
        second.stop()
        # The pages stay and say that their nodes have left: epochs survive, labels are not written.
        for device in range(2):
            assert page_of(a, device).flags == page_of(b, device).flags == BEAT_LEFT
            assert (page_of(a, device).epoch, page_of(a, device).mounted) == (1, 1)
        assert [device.read(0, BEAT_OFFSET) for device in a.devices] == labels
    with opened(one) as a:
        assert (a.epoch, a.seen, a.highest) == (1, 2, 2)
        again = mounted(a)
        assert again.me.epoch == 3
        again.stop()


def test_the_epoch_of_a_mount_is_durable_before_anything_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (pool,) = make_pod(tmp_path)
    written: list[tuple[bool, int, int]] = []
    write_page = Device.write

    def spy(device: Device, offset: int, data: bytes, *, durable: bool = True) -> None:
        beat = unpack_beat(found.config.secret, found.config.uuid, found.config.devices[0].uuid, data)
        if beat is not None:
            written.append((durable, beat.epoch, beat.mounted))
        write_page(device, offset, data, durable=durable)

    with opened(pool) as found:
        monkeypatch.setattr(Device, "write", spy)
        heart = mounted(found)
        assert written == [(True, 1, 0), (True, 1, 1)]
        heart.stop()


def test_a_device_that_missed_a_mount_of_this_node_is_known_by_its_page(tmp_path: Path) -> None:
    (pool,) = make_pod(tmp_path)
    with opened(pool) as found:
        mounted(found).stop()
        heart = Heart.take(found, use="", next_epoch=True, clock=Time().clock)
        found.absent[1] = "away"
        assert heart.mount() == {}
        heart.stop()
    with opened(pool) as found:
        assert found.epochs == {0: 2, 1: 1}
        found.leave_stale(2)
        assert found.absent == {1: "its node page has mount epoch 1, the pool 2"}
        heart = mounted(found)
        # Until it has been compared it keeps the mount that it took part in last, whatever becomes of this one.
        assert (page_of(found, 1).epoch, page_of(found, 1).mounted) == (3, 1)
        heart.mark(found.devices[1], 1)
        assert page_of(found, 1).mounted == 3
        heart.stop()


def test_a_check_of_the_pool_takes_no_part_in_a_mount(tmp_path: Path) -> None:
    one, two = make_pod(tmp_path, joined=2)
    with opened(one) as a, opened(two) as b:
        mounted(a).stop()
        mounted(b).stop()
    with opened(one) as a:
        heart = Heart.take(a, use="being checked", clock=Time().clock)
        assert heart.me.epoch == 1 and page_of(a).mounted == 1
        heart.stop()


def test_a_running_node_takes_a_new_epoch_durably_on_all_devices(tmp_path: Path) -> None:
    one, two = make_pod(tmp_path, joined=2)
    with opened(one) as a, opened(two) as b:
        first, second = mounted(a), mounted(b)
        first.start(unexpected)
        epoch = first.next_epoch()
        assert epoch == 3
        assert first.raise_epoch(epoch) == {}
        for device in range(2):
            assert (page_of(a, device).epoch, page_of(a, device).mounted) == (3, 3)
        assert second.next_epoch() == 4
        first.stop()
        second.stop()
        assert page_of(a).mounted == 3


def test_a_beat_that_is_being_written_never_lands_on_a_newer_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (pool,) = make_pod(tmp_path)
    write_page, held, raised, landed = Device.write, threading.Event(), threading.Event(), threading.Event()

    def slow(device: Device, offset: int, data: bytes, *, durable: bool = True) -> None:
        beats = threading.current_thread().name == "beat 0"
        if beats and not held.is_set():
            held.set()
            # It may land as soon as the epoch was raised. A raise that waits for it finds it ended at last.
            raised.wait(0.5)
        write_page(device, offset, data, durable=durable)
        if beats:
            landed.set()

    monkeypatch.setattr(Device, "write", slow)
    # The next beat would write the page anew.
    monkeypatch.setattr(owner, "INTERVAL_S", 60.0)
    with opened(pool) as found:
        heart = mounted(found)
        heart.start(unexpected)
        assert held.wait(10 * slowness())
        assert heart.raise_epoch(heart.next_epoch()) == {}
        raised.set()
        assert landed.wait(10 * slowness())
        assert [page_of(found, device).mounted for device in range(2)] == [2, 2]
        heart.stop()


def test_a_mark_on_a_device_whose_beat_hangs_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvfs.pool.heart._MARK_S", 0.05)
    (pool,) = make_pod(tmp_path)
    with opened(pool) as found:
        heart = mounted(found)
        heart.start(unexpected)
        with heart._slots[0].writing:
            failed = heart.raise_epoch(heart.next_epoch())
        assert list(failed) == [0] and "the write of a beat has not ended" in failed[0]
        heart.stop()


class FailingDevice(Device):
    def write(self, offset: int, data: bytes, *, durable: bool = True) -> None:
        raise DeviceError("no write")


def failing(device: Device) -> Device:
    return FailingDevice(device.path, device.fd, device.size, device.is_block, device.direct, claim=device.claim)


def test_a_device_that_takes_no_page_is_told_and_a_pod_without_any_is_an_error(tmp_path: Path) -> None:
    (pool,) = make_pod(tmp_path)
    with opened(pool) as found:
        heart = mounted(found)
        heart.start(unexpected)
        sound = list(found.devices)
        found.devices[1] = failing(sound[1])
        assert heart.raise_epoch(heart.next_epoch()) == {1: "no write"}
        found.devices[0] = failing(sound[0])
        with pytest.raises(DeviceError, match="no write"):
            heart.raise_epoch(heart.next_epoch())
        found.devices[:] = sound
        heart.stop()


# ---- whose a page is ----


@pytest.mark.parametrize(
    ("change", "words"),
    [({"node": uuid.UUID(int=5)}, "slot 0 belongs to node"), ({"flags": BEAT_RETIRED}, "slot 0 was retired")],
)
def test_a_page_of_another_node_or_a_retired_one_ends_the_use_and_the_next_mount(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, object], words: str
) -> None:
    """At once, also with an epoch that is lower."""
    monkeypatch.setattr(owner, "INTERVAL_S", 0.01)
    (pool,) = make_pod(tmp_path)
    with opened(pool) as found:
        heart, lost, told = mounted(found), threading.Event(), list[str]()

        def on_lost(reason: str) -> None:
            told.append(reason)
            lost.set()

        put(found, replace(page_of(found), owner=uuid.uuid4(), epoch=0, mounted=0, **change))  # type: ignore[arg-type]
        heart.start(on_lost)
        assert lost.wait(60)
        heart.stop()
        assert words in told[0]
        with pytest.raises(PoolError, match=words):
            Heart.take(found, use="", next_epoch=True, force=True, clock=Time().clock)


def test_of_two_machines_with_one_node_toml_the_second_is_refused_or_ends_the_first(tmp_path: Path) -> None:
    """A cloned image: the same slot and uuid, and another boot."""
    (pool,) = make_pod(tmp_path)
    elsewhere = replace(owner.this_process(), boot=b"b" * 16, host="clone")
    with opened(pool) as found:
        heart, time = mounted(found), Time()
        beats = iter(range(10**6))

        def beat() -> None:
            for device in range(2):
                theirs = replace(page_of(found), owner=elsewhere.owner, boot=elsewhere.boot, host="clone")
                put(found, replace(theirs, epoch=7, number=next(beats), flags=0), device)

        beat()
        config = found.config
        page = found.devices[0].read(BEAT_OFFSET, PAGE_SIZE)
        reason = heart.judge(0, page, config)
        assert reason is not None and "slot 0, pid" in reason and "on clone" in reason
        time.on_sleep = beat
        with pytest.raises(InUseError, match="on clone"):
            Heart.take(found, use="", next_epoch=True, clock=time.clock)
        time.on_sleep = lambda: None
        assert mounted(found, time, force=True).me.epoch == 8


def test_a_node_that_was_killed_is_taken_up_by_its_next_mount(tmp_path: Path) -> None:
    (pool,) = make_pod(tmp_path)
    with opened(pool) as found:
        mounted(found)  # never stopped, and of this process: its successor has to be told apart
        put(found, replace(page_of(found), boot=b"b" * 16))
        put(found, replace(page_of(found, 1), boot=b"b" * 16), 1)
        time = Time()
        heart = mounted(found, time)
        assert heart.me.epoch == 2 and time.now >= 1005
        assert any("did not move for 5 s" in note for note in found.notes)


# ---- who may open the devices ----


def test_two_nodes_of_one_machine_have_the_devices_and_no_other_pool_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, "_PATIENCE_S", 0.05)
    one, two = make_pod(tmp_path, joined=2)
    with opened(one) as a, opened(two) as b:
        heart = mounted(b)
        with pytest.raises(InUseError, match=r"in use by another kvfs: slot 1, pid"):
            open_device(tmp_path / "device-0")
        with pytest.raises(InUseError, match="in use by another kvfs"):
            format_devices(FormatRequest(pool=tmp_path / "x", devices=(tmp_path / "device-0",), force=True))
        device = a.devices[0]
        assert set(beats_by_label(device)[1]) == {0, 1}
        check_unused(device, slot=0)
        with pytest.raises(InUseError, match="slot 1"):
            check_unused(device)
        heart.stop()
        check_unused(device)
        # Where there is no claim, as over NVMe/TCP, two pools of one machine have nothing but the page.
        assert not any(heart._claims().values())


def test_a_pool_that_is_no_pod_has_its_devices_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, "_PATIENCE_S", 0.05)
    devices = make_pod(tmp_path, joined=0)
    files = sorted(tmp_path.glob("device-*"))
    assert devices == []
    format_devices(FormatRequest(pool=tmp_path / "pool", devices=tuple(files), force=True))
    with opened(tmp_path / "pool"), pytest.raises(InUseError):
        open_pool(tmp_path / "pool")


def test_the_devices_of_a_pod_stay_as_they_are(tmp_path: Path) -> None:
    (pool,) = make_pod(tmp_path)
    extra = tmp_path / "extra"
    with open(extra, "xb") as file:
        file.truncate(32 << 20)
    with pytest.raises(UsageError, match="device add: not possible in a pod"):
        add_devices(pool, [extra], force=False)


# ---- stores ----


def test_two_stores_on_one_set_of_devices_write_their_own_segments(tmp_path: Path) -> None:
    one, two = make_pod(tmp_path, joined=2)

    async def main() -> None:
        with trio.fail_after(120 * slowness()):
            async with Store.open(one, OPTIONS) as a, Store.open(two, OPTIONS) as b:
                assert (a.epoch, b.epoch) == (1, 2)
                await write(a, b"of-a")
                await write(b, b"of-b")
            async with Store.open(two, OPTIONS) as b, Store.open(one, OPTIONS) as a:
                assert (b.epoch, a.epoch) == (3, 4)
                assert names(a) == {b"of-a"} and names(b) == {b"of-b"}
                assert not a.notes and not b.notes

    trio.run(main)
    for pool, slot in ((one, 0), (two, 1)):
        report = fsck(pool, verify_data=True)
        assert report.healthy and report.clean and report.blocks == 1, report
        config = load(pool)
        assert config is not None
        index = LmdbIndex(pool / "index", read_only=True)
        assert META_NUMBER.unpack(index.meta_get(META_EPOCH) or b"") == (4 - slot,)
        index.close()
    with opened(one) as found:
        for device, described in zip(found.devices, found.config.devices, strict=True):
            label = read_labels(device, described.size).best()
            assert label is not None and label.mount_epoch == 0


def test_a_pod_is_checked_while_another_node_has_it_mounted(tmp_path: Path) -> None:
    one, two = make_pod(tmp_path, joined=2)

    async def main() -> None:
        with trio.fail_after(120 * slowness()):
            async with Store.open(one, OPTIONS) as a:
                await write(a, b"of-a")
            async with Store.open(two, OPTIONS):
                report = await trio.to_thread.run_sync(fsck, one)
                assert report.healthy and report.blocks == 1
                with pytest.raises(InUseError):
                    await trio.to_thread.run_sync(fsck, two)

    trio.run(main)


def test_a_mount_joins_and_every_other_use_asks_for_it(tmp_path: Path) -> None:
    make_pod(tmp_path)
    second = tmp_path / "node-1"
    join_node(second)
    (second / "node.toml").unlink()
    with pytest.raises(PoolError, match="this node has no slot in the pod yet: kvfs mount, or kvfs pod join"):
        open_pool(second)
    told: list[str] = []

    async def main() -> None:
        async with Store.open(second, replace(OPTIONS, join=True, on_wait=told.append)) as store:
            # Slot 1 has the uuid that went with node.toml.
            assert store.slot == 2

    trio.run(main)
    assert told == [f"{second}: joined the pod as slot 2"]


@pytest.mark.parametrize("lose_index", [False, True], ids=["index", "no-index"])
def test_a_device_that_missed_a_mount_is_compared_and_taken_in(tmp_path: Path, lose_index: bool) -> None:
    one, two = make_pod(tmp_path, joined=2, width=1)
    device, away = tmp_path / "device-1", tmp_path / "away"
    before: set[bytes] = set()

    async def work() -> None:
        with trio.fail_after(120 * slowness()):
            async with Store.open(one, OPTIONS) as a:
                for i in range(60):
                    await write(a, b"%d" % i, size=64 << 20)
                before.update(names(a))
            device.rename(away)
            async with Store.open(one, OPTIONS) as a:
                assert 0 < len(names(a)) < 60
            away.rename(device)
            # The other node's mount is later, and says nothing of this one's device.
            async with Store.open(two, OPTIONS):
                pass
            if lose_index:
                shutil.rmtree(one / "index")
            async with Store.open(one, OPTIONS) as a:
                await rebuilt(a)
                assert (names(a) == before) is not lose_index
                await until_online(a)

    trio.run(work)
    with opened(one) as found:
        assert found.epochs == {0: 4, 1: 4}


async def until_online(store: Store) -> None:
    with trio.fail_after(60 * slowness()):
        while any(service.state != DeviceState.ONLINE for service in store.service.all):
            await trio.sleep(0.02)


def test_a_device_comes_back_to_a_running_node_though_another_was_retired_meanwhile(tmp_path: Path) -> None:
    one = make_pod(tmp_path, joined=2, width=1)[0]

    async def work() -> None:
        with trio.fail_after(120 * slowness()):
            async with Store.open(one, OPTIONS) as a:
                for i in range(60):
                    await write(a, b"%d" % i, size=64 << 20)
                all_names = names(a)
                a.service.fail(1, "as the test says")
                assert names(a) < all_names
                await trio.to_thread.run_sync(lambda: retire(one, 1, clock=Time().clock))
                a.service.all[1].probe_at = 0.0
                await until_online(a)
                assert names(a) == all_names

    trio.run(work)
    with opened(one) as found:
        assert found.epochs == {0: 1, 1: 1} and found.config.revision == 1


def test_a_retired_node_that_is_mounted_ends_and_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, "INTERVAL_S", 0.05)
    one, two = make_pod(tmp_path, joined=2)

    async def work() -> None:
        async with Store.open(two, OPTIONS):
            with opened(one) as found:
                for device in range(2):
                    page = page_of(found, device, 1)
                    put(found, replace(page, flags=BEAT_RETIRED), device)
            await trio.sleep(60)

    with pytest.raises(BaseExceptionGroup) as ending:
        trio.run(work)
    assert isinstance(first_error(ending.value), InUseError) and "slot 1 was retired" in str(first_error(ending.value))


def test_the_first_mount_of_a_node_has_nothing_to_rebuild(tmp_path: Path) -> None:
    _, two = make_pod(tmp_path, joined=2)

    async def work() -> None:
        async with Store.open(two, OPTIONS) as store:
            assert not store.rebuilding and not store.notes

    trio.run(work)


def test_a_repair_of_labels_keeps_what_another_node_wrote_there(tmp_path: Path) -> None:
    one, two, _ = make_pod(tmp_path, joined=3)
    retire(two, 2, clock=Time().clock)
    with open(tmp_path / "device-0", "r+b") as file:
        file.seek(100)
        file.write(b"damage")
    report = fsck(one, repair=True)
    assert [(finding.what, finding.repaired) for finding in report.findings if finding.what == "label"] == [
        ("label", True)
    ]
    with opened(one) as found:
        assert found.config.revision == 1 and found.config.pod is not None and found.config.pod.retired == (2,)
        label = read_labels(found.devices[0], found.config.devices[0].size).copies[0]
        assert isinstance(label, Label) and label.config("").revision == 1 and label.mount_epoch == 0


def test_no_mount_follows_on_the_last_possible_one(tmp_path: Path) -> None:
    one, two = make_pod(tmp_path, joined=2)
    with opened(two) as found:
        put(found, replace(page_of(found), epoch=EPOCH_MAX))
    with opened(one) as found, pytest.raises(FormatError, match=f"mount {EPOCH_MAX}; the last possible is"):
        mounted(found)
