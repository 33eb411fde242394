"""Slots: taken by one node each, also when two join at once; shown; retired."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from pods import join_node, make_pod
from still_clock import Time

from kvfs.errors import DeviceError, InUseError, PoolError, UsageError
from kvfs.pool import joining, owner
from kvfs.pool.config import load
from kvfs.pool.format import BEAT_LEFT, BEAT_RETIRED, Beat, beat_offset, pack_beat
from kvfs.pool.heart import Heart
from kvfs.pool.joining import import_node, retire, slot_states
from kvfs.pool.labels import read_beats, read_labels
from kvfs.pool.lock import pool_lock
from kvfs.pool.node import Node, load_node, write_node
from kvfs.pool.opening import open_device, open_pool


def pages(pool: Path, device: int = 0) -> dict[int, Beat]:
    config = load(pool)
    assert config is not None
    opened = open_device(Path(config.devices[device].path), exclusive=False, writable=False)
    try:
        return read_beats(opened, config, device)
    finally:
        opened.close()


def put(pool: Path, beat: Beat, devices: tuple[int, ...] = (0, 1)) -> None:
    config = load(pool)
    assert config is not None
    for device in devices:
        opened = open_device(Path(config.devices[device].path), exclusive=False)
        opened.write(beat_offset(beat.slot), pack_beat(config.secret, config.uuid, config.devices[device].uuid, beat))
        opened.close()


def elsewhere(slot: int, **change: object) -> Beat:
    """The page of a node on another machine."""
    made = replace(owner.this_process(3), slot=slot, node=uuid.uuid4(), boot=b"b" * 16, host="elsewhere", mounted=3)
    return replace(made, **change)  # type: ignore[arg-type]


# ---- joining ----


def test_each_node_takes_the_first_free_slot_and_its_page_says_so(tmp_path: Path) -> None:
    pools = make_pod(tmp_path, joined=3)
    for slot, pool in enumerate(pools):
        node = load_node(pool)
        assert node is not None and node.slot == slot
        for device in range(2):
            page = pages(pool, device)[slot]
            assert page.node == node.uuid and page.flags == BEAT_LEFT and page.mounted == 0
    with pytest.raises(PoolError, match=r"no slot of 3 is free.*--force"):
        join_node(tmp_path / "node-3")


def test_a_node_keeps_its_slot_and_joins_once(tmp_path: Path) -> None:
    (pool,) = make_pod(tmp_path)
    before = load_node(pool), pages(pool)
    assert join_node(pool) == before[0] == join_node(pool, 0)
    assert pages(pool) == before[1]
    with pytest.raises(PoolError, match="has slot 0; another needs another pool directory"):
        join_node(pool, 1)


def test_a_join_that_was_cut_off_goes_on_with_its_page(tmp_path: Path) -> None:
    (pool,) = make_pod(tmp_path)
    second = tmp_path / "node-1"
    node = join_node(second, 1)
    write_node(second, Node(node.uuid))
    assert join_node(second) == node
    assert set(pages(pool)) == {0, 1}


def test_a_slot_may_be_chosen_but_not_another_nodes(tmp_path: Path) -> None:
    make_pod(tmp_path)
    second = tmp_path / "node-1"
    with pytest.raises(UsageError, match="slot 3: the pod has slots 0 to 2"):
        join_node(second, 3)
    with pytest.raises(InUseError, match=r"slot 0 belongs to node .*--force takes it"):
        join_node(second, 0)
    assert join_node(second, 2).slot == 2


def test_the_slot_of_a_node_that_is_gone_can_be_taken_by_force_and_no_others(tmp_path: Path) -> None:
    (pool,) = make_pod(tmp_path)
    second, time, numbers = tmp_path / "node-1", Time(), iter(range(10, 10**6))
    gone = elsewhere(1)
    put(pool, gone)
    time.on_sleep = lambda: put(pool, replace(gone, number=next(numbers)))
    with pytest.raises(InUseError, match="on elsewhere"):
        join_node(second, 1, force=True, clock=time.clock)
    time.on_sleep = lambda: None
    node = join_node(second, 1, force=True, clock=time.clock)
    assert node.slot == 1 and pages(pool)[1].node == node.uuid
    # The next mount is above those of the node that had the slot, and knows none of them.
    assert pages(pool)[1].epoch == 3 and pages(pool)[1].mounted == 0


@pytest.mark.parametrize("first", ["other", "this"])
def test_of_two_that_join_at_one_moment_each_has_a_slot(tmp_path: Path, first: str) -> None:
    """Both have seen the slot free, and their writes go past each other: the first device decides."""
    (pool,) = make_pod(tmp_path)
    second, time, other = tmp_path / "node-1", Time(), elsewhere(1, flags=BEAT_LEFT)
    wrote: list[int] = []

    def write_late() -> None:
        if not wrote:
            wrote.append(1)
            put(pool, other, (0,) if first == "other" else (1,))

    time.on_sleep = write_late
    node = join_node(second, clock=time.clock)
    assert node.slot == (2 if first == "other" else 1)
    for device in range(2):
        found = pages(pool, device)
        assert found[node.slot].node == node.uuid
    assert pages(pool)[1].node == (other.node if first == "other" else node.uuid)


def test_two_that_really_join_at_once_have_two_slots(tmp_path: Path) -> None:
    make_pod(tmp_path)
    devices = sorted(tmp_path.glob("device-*"))
    slots: list[int | None] = []

    def run(pool: Path) -> None:
        slots.append(join_node(pool, clock=owner.REAL).slot)

    pools = [tmp_path / f"node-{i}" for i in (1, 2)]
    for pool in pools:
        import_node(pool, devices)
    threads = [threading.Thread(target=run, args=(pool,)) for pool in pools]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(slots, key=str) == [1, 2]


def test_a_pause_between_look_and_write_begins_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that stood still meanwhile must not write over a slot that was taken."""
    (pool,) = make_pod(tmp_path)
    second, time, other = tmp_path / "node-1", Time(), elsewhere(1, flags=BEAT_LEFT)
    choose: Callable[..., int] = joining._choose

    def pause(*arguments: object) -> int:
        chosen = choose(*arguments)
        if time.now == 1000.0:
            time.now += 10
            put(pool, other)
        return chosen

    monkeypatch.setattr(joining, "_choose", pause)
    assert join_node(second, clock=time.clock).slot == 2
    assert pages(pool)[1].node == other.node


def _slow(monkeypatch: pytest.MonkeyPatch, time: Time, took_s: Callable[[], float]) -> None:
    """Each read of a node's page, and of all of them, takes so long."""
    for name in ("read_beat", "read_beats"):
        read = getattr(joining, name)

        def slow(*arguments: object, read: Callable[..., object] = read) -> object:
            time.now += took_s()
            return read(*arguments)

        monkeypatch.setattr(joining, name, slow)


def test_devices_that_are_slow_make_a_join_wait_longer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (pool,) = make_pod(tmp_path)
    second, time, said = tmp_path / "node-1", Time(), list[str]()
    import_node(second, sorted(tmp_path.glob("device-*")))
    _slow(monkeypatch, time, lambda: 0.4)
    with pool_lock(second, "joining a pod"):
        assert joining.join(second, clock=time.clock, tell=said.append).slot == 1
    assert pages(pool)[1].in_use is False and time.now < 1020
    assert said == [
        "slot 1: its pages on 2 devices took 0.8 s to read and write; waiting for 3 s whether another takes it"
    ]


def test_a_join_that_never_gets_to_its_write_ends_and_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (pool,) = make_pod(tmp_path)
    second, time = tmp_path / "node-1", Time()
    took_s = 0.1

    def slower() -> float:
        nonlocal took_s
        took_s *= 2
        return took_s

    _slow(monkeypatch, time, slower)
    with pytest.raises(DeviceError, match=r"no slot taken within 300 s: \d tries, .* slot 1, whose pages on 2 devices"):
        join_node(second, clock=time.clock)
    assert 1 not in pages(pool)


class Turns:
    """Time of several threads: the one that wakes first runs, alone, until it sleeps."""

    def __init__(self) -> None:
        self._turn, self._wakes, self.now = threading.Condition(), dict[str, float](), 0.0
        self.clock = owner.Clock(lambda: self.now, self.sleep)

    def sleep(self, seconds: float) -> None:
        me = threading.current_thread().name
        with self._turn:
            self._wakes[me] = self.now + seconds
            self._turn.notify_all()
            assert self._turn.wait_for(lambda: min(self._wakes, key=lambda name: (self._wakes[name], name)) == me, 60)
            self.now = self._wakes[me]

    def run(self, **do: Callable[[], object]) -> None:
        def one(name: str) -> None:
            try:
                self.sleep(0)
                do[name]()
            finally:
                with self._turn:
                    del self._wakes[name]
                    self._turn.notify_all()

        self._wakes = dict.fromkeys(do, 0.0)
        threads = [threading.Thread(target=one, args=(name,), name=name) for name in do]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


@pytest.mark.parametrize("look_s", [0.3, 0.9, 1.1, 10.0])
def test_two_of_different_speed_never_have_one_slot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, look_s: float
) -> None:
    """One's look is as old as it took, its write is slow. The other is quick, and joins at any moment of that look."""
    reads, writes = joining._read_slot, joining._write

    def look(*arguments: object) -> object:
        found = reads(*arguments)  # type: ignore[arg-type]
        if threading.current_thread().name == "slow":
            turns.sleep(look_s)
        return found

    def write(*arguments: object) -> None:
        if threading.current_thread().name == "slow":
            turns.sleep(0.9)
        writes(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(joining, "_read_slot", look)
    monkeypatch.setattr(joining, "_write", write)
    for turn in range(12):
        turns, path, after_s = Turns(), tmp_path / f"{turn}", turn * look_s / 6
        path.mkdir()
        (pool,) = make_pod(path)
        slow, quick = path / "node-slow", path / "node-quick"

        def join_slowly(slow: Path = slow, clock: owner.Clock = turns.clock) -> None:
            if look_s < joining.LOOK_MAX_S:
                join_node(slow, clock=clock)
            else:
                with pytest.raises(DeviceError, match=r"took \d+\.\d+ s to read, of 1 s at most"):
                    join_node(slow, clock=clock)

        def join_quickly(quick: Path = quick, turns: Turns = turns, after_s: float = after_s) -> None:
            turns.sleep(after_s)
            join_node(quick, clock=turns.clock)

        turns.run(slow=join_slowly, quick=join_quickly)
        nodes = [node for node in (load_node(one) for one in (slow, quick)) if node and node.slot is not None]
        assert len({node.slot for node in nodes}) == len(nodes) == (2 if look_s < joining.LOOK_MAX_S else 1)
        for node in nodes:
            assert node.slot is not None
            assert all(pages(pool, device)[node.slot].node == node.uuid for device in range(2))


def test_the_pages_of_all_devices_are_read_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_pod(tmp_path)
    both, read = threading.Barrier(2, timeout=60), joining.read_beats

    def together(*arguments: object) -> object:
        both.wait()
        return read(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(joining, "read_beats", together)
    assert join_node(tmp_path / "node-1").slot == 1


def test_all_devices_are_needed_to_join_and_nothing_else_makes_a_directory(tmp_path: Path) -> None:
    make_pod(tmp_path)
    second = tmp_path / "node-1"
    with pytest.raises(PoolError, match="device 1 of 2 is missing"):
        import_node(second, [tmp_path / "device-0"])
    assert not second.exists()
    import_node(second, sorted(tmp_path.glob("device-*")))
    (tmp_path / "device-1").rename(tmp_path / "gone")
    with pytest.raises(DeviceError, match="to join, all are needed"):
        join_node(second)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("slot = 4096\n", "slot is 4096; 0 to 4095"), ("slot = true\n", "slot is True"), ("slot = 0\n", "uuid is None"),
        ('slot = 0\nuuid = "x"\n', "'x', which is no UUID"), ("size = 3\n", "size is not a key"), ("=", "node.toml: "),
    ],
)  # fmt: skip
def test_a_node_toml_may_hold_anything(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "node.toml").write_text(text)
    with pytest.raises(PoolError, match=words):
        load_node(tmp_path)


def test_a_node_toml_is_read_back_and_no_link_is_followed(tmp_path: Path) -> None:
    assert load_node(tmp_path) is None
    for node in (Node(uuid.uuid4()), Node(uuid.uuid4(), 7)):
        write_node(tmp_path, node)
        assert load_node(tmp_path) == node
    (tmp_path / "node.toml").rename(tmp_path / "there")
    (tmp_path / "node.toml").symlink_to(tmp_path / "there")
    with pytest.raises(PoolError, match="symbolic link"):
        load_node(tmp_path)


# ---- looking ----


def test_states_of_slots_are_told_from_their_pages(tmp_path: Path) -> None:
    (pool,) = make_pod(tmp_path, nodes=5)
    time, numbers, beating = Time(), iter(range(100, 10**6)), elsewhere(1)
    put(pool, beating)
    put(pool, elsewhere(2))
    put(pool, elsewhere(3, flags=BEAT_RETIRED))
    time.on_sleep = lambda: put(pool, replace(beating, number=next(numbers)))
    config, states = slot_states(pool, clock=time.clock)
    assert [state.state for state in states] == ["left", "beating", "frozen", "retired", "free"]
    assert [state.frozen for state in states] == [True, False, True, True, True]
    assert sum(state.segments for state in states) == config.segment_count
    page = states[1].page
    assert page is not None and page.host == "elsewhere" and states[1].devices == 2 and states[4].page is None
    assert time.now - 1000 >= 2.5 * owner.INTERVAL_S


# ---- retiring ----


def test_a_node_whose_beat_moves_is_not_retired(tmp_path: Path) -> None:
    (pool,) = make_pod(tmp_path)
    time, numbers, alive = Time(), iter(range(100, 10**6)), elsewhere(1)
    put(pool, alive)

    def beat_once() -> None:
        if time.now >= 1028:
            put(pool, replace(alive, number=next(numbers)))

    time.on_sleep = beat_once
    with pytest.raises(InUseError, match=r"slot 1 is alive.*on elsewhere"):
        retire(pool, 1, clock=time.clock)
    assert not pages(pool)[1].flags & BEAT_RETIRED


def test_a_retired_slot_is_so_on_pages_in_labels_and_for_every_node(tmp_path: Path) -> None:
    pools = make_pod(tmp_path, joined=3)
    time = Time()
    before = pages(pools[0])[2]
    config = retire(pools[0], 2, clock=time.clock)
    assert time.now - 1000 >= joining.RETIRE_WATCH_S
    assert config.pod is not None and config.pod.retired == (2,) and config.revision == 1
    for device in range(2):
        page = pages(pools[0], device)[2]
        assert page.flags & BEAT_RETIRED and page.node == before.node and page.epoch == before.epoch
    assert load(pools[0]) == config
    # Another node learns of it from the labels, and keeps its paths; the retired one does not mount.
    opened = open_pool(pools[1])
    assert opened.config.pod == config.pod and load(pools[1]) == opened.config
    for device, described in zip(opened.devices, opened.config.devices, strict=True):
        label = read_labels(device, described.size).best()
        assert label is not None and label.config("").pod == config.pod
    opened.close()
    opened = open_pool(pools[2])
    with pytest.raises(PoolError, match="slot 2 was retired"):
        Heart.take(opened, use="", next_epoch=True, force=True)
    opened.close()
    with pytest.raises(PoolError, match="no slot of 3 is free"):
        join_node(tmp_path / "node-3")
    with pytest.raises(PoolError, match="slot 2 was retired"):
        join_node(tmp_path / "node-3", 2, force=True)
    # Once more changes nothing.
    assert retire(pools[0], 2, clock=Time().clock) == config


def test_two_nodes_may_retire_two_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pools = make_pod(tmp_path, nodes=4, joined=4)
    time, done = Time(), list[int]()

    def other_too() -> None:
        # Between the write of one and its second look at the labels.
        if not done and time.now > 1000 + joining.RETIRE_WATCH_S + 2.5 * owner.INTERVAL_S:
            done.append(1)
            retire(pools[1], 3, clock=Time().clock)

    time.on_sleep = other_too
    config = retire(pools[0], 2, clock=time.clock)
    assert done and config.pod is not None and config.pod.retired == (2, 3)
    opened = open_pool(pools[1])
    assert opened.config.pod == config.pod
    opened.close()


def test_a_node_that_comes_to_itself_cannot_take_its_page_back(tmp_path: Path) -> None:
    pools = make_pod(tmp_path, joined=2)
    opened = open_pool(pools[1])
    taken = Heart.take(opened, use="", next_epoch=True, clock=Time().clock)
    time = Time()
    woke: list[str] = []

    def wake() -> None:
        # It had read its page before the flag was there, and writes one page more. Then it looks again.
        if time.now > 1000 + joining.RETIRE_WATCH_S and not woke:
            taken._write(0, opened.devices[0])
            for device in range(2):
                page = opened.devices[device].read(beat_offset(1), 4096)
                woke.append(str(taken.judge(device, page, opened.config)))

    time.on_sleep = wake
    retire(pools[0], 1, clock=time.clock)
    assert woke[0] == "None" and "slot 1 was retired" in woke[1]
    assert all(pages(pools[0], device)[1].flags & BEAT_RETIRED for device in range(2))
    opened.close()


def test_slots_that_cannot_be_retired(tmp_path: Path) -> None:
    (pool,) = make_pod(tmp_path)
    for slot, words in ((0, "this node's own"), (1, "no node has it"), (3, "slots 0 to 2")):
        with pytest.raises(UsageError, match=words):
            retire(pool, slot, clock=Time().clock)
