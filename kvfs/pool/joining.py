"""Slots of a pod on its devices: a node takes one, is looked at, and is retired.

A slot is taken by the page that its node wrote on each device. Nothing is between two that join at the same moment, so
each writes, waits, and reads again, as the beats do (heart.py). All calls block.
"""

from __future__ import annotations

import itertools
import uuid as uuids
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from kvfs.errors import DeviceError, InUseError, PoolError, UsageError, printable
from kvfs.pool import owner
from kvfs.pool.config import CONFIG_NAME, PoolConfig, load
from kvfs.pool.devices import Device, DeviceAddress, Tell
from kvfs.pool.format import BEAT_LEFT, BEAT_RETIRED, Beat, beat_offset, pack_beat
from kvfs.pool.labels import read_beat, read_beats, read_labels, write_labels
from kvfs.pool.lock import INDEX_NAME, pool_lock
from kvfs.pool.making import make_index
from kvfs.pool.node import Node, load_node, write_node
from kvfs.pool.opening import (
    check_device,
    config_from_labels,
    device_path,
    latest_config,
    open_device,
    write_config,
)
from kvfs.pool.pod import PodConfig
from kvfs.units import counted

_T = TypeVar("_T")

# A node that looked at a slot for so long does not write there. A device that takes so long for a page could hardly
# carry beats.
LOOK_MAX_S = 1.0
# Longer than a look and a write of any other node: twice LOOK_MAX_S, and some for what is between (_take_slot).
JOIN_S = 2.5
# A join that others, or devices, begin anew again and again ends after this.
JOIN_DEADLINE_S = 300.0
# Devices that are read or written at once.
_AT_ONCE_MAX = 64
# A node whose beat moved within this time is not retired.
RETIRE_WATCH_S = 30.0
_POLL_S = 0.5
# A node that comes to itself again writes one more page, which is in the way of a flag. So often is it written anew.
_RETIRE_ROUNDS = 5


@contextmanager
def _devices(pool: Path, config: PoolConfig, *, writable: bool) -> Iterator[Mapping[int, Device]]:
    """The devices of a pod that can be opened and are its. DeviceError if none can."""
    found: dict[int, Device] = {}
    failure: DeviceError | None = None
    try:
        for described in config.devices:
            try:
                device = open_device(device_path(pool, described), exclusive=writable, shared=True, writable=writable)
                found[described.index] = device
                check_device(config, device, described, str(pool / CONFIG_NAME))
            except DeviceError as error:
                failure = failure or error
                lost = found.pop(described.index, None)
                if lost is not None:
                    lost.close()
        if not found:
            raise failure or DeviceError(f"{pool}: no device is there")
        yield found
    finally:
        for device in found.values():
            device.close()


def _on_each(devices: Mapping[int, Device], do: Callable[[int, Device], _T]) -> dict[int, _T]:
    """Do it on all devices at once, so that it takes as long as the slowest of them. The first error, when all have
    ended."""
    with ThreadPoolExecutor(min(len(devices), _AT_ONCE_MAX), "join") as pool:
        done = {index: pool.submit(do, index, device) for index, device in devices.items()}
    return {index: one.result() for index, one in done.items()}


def _read(devices: Mapping[int, Device], config: PoolConfig) -> dict[int, dict[int, Beat]]:
    """The pages of each slot, by device."""
    found: dict[int, dict[int, Beat]] = {}
    for index, beats in _on_each(devices, lambda index, device: read_beats(device, config, index)).items():
        for slot, beat in beats.items():
            found.setdefault(slot, {})[index] = beat
    return found


def _read_slot(devices: Mapping[int, Device], config: PoolConfig, slot: int) -> dict[int, Beat]:
    """The pages of one slot, by device."""
    beats = _on_each(devices, lambda index, device: read_beat(device, config, index, slot))
    return {index: beat for index, beat in beats.items() if beat is not None}


def _write(devices: Mapping[int, Device], config: PoolConfig, beat: Beat, mounted: Mapping[int, int]) -> None:
    """Write a node's page on all devices, durably. Each keeps its last mount. DeviceError."""

    def write(index: int, device: Device) -> None:
        uuid, page = config.devices[index].uuid, replace(beat, mounted=mounted.get(index, 0))
        device.write(beat_offset(beat.slot), pack_beat(config.secret, config.uuid, uuid, page))

    _on_each(devices, write)


def _pod(pool: Path, config: PoolConfig) -> PodConfig:
    if config.pod is None:
        raise UsageError(f"{pool}: not a pod; kvfs pod create makes one")
    return config.pod


# ---- joining ----


def import_node(pool: Path, paths: Sequence[DeviceAddress]) -> None:
    """Make a pool's directory on another node of its pod, from the labels of its devices. All refusals come before the
    first change."""
    config = config_from_labels(paths, pool)
    _pod(pool, config)
    if not pool.exists() and not pool.parent.is_dir():
        raise PoolError(f"{pool}: {pool.parent} is not a directory")
    pool.mkdir(mode=0o700, exist_ok=True)
    with pool_lock(pool, "joining a pod"):
        write_config(pool, config)


def join(
    pool: Path, slot: int | None = None, *, force: bool = False, tell: Tell | None = None,
    clock: owner.Clock = owner.REAL,
) -> Node:  # fmt: skip
    """Take a slot of the pod for this pool's directory: the first that is free, or this one. A node that has a slot
    keeps it. The caller holds the pool's lock.

    `force`: take the slot of a node that is gone; its pool's directory is gone with it. PoolError, InUseError.
    """
    config = load(pool)
    if config is None:
        raise PoolError(f"{pool}: no {CONFIG_NAME}; kvfs pod join {pool} --device PATH ... makes one from the labels")
    pod = _pod(pool, config)
    if slot is not None and not 0 <= slot < pod.nodes:
        raise UsageError(f"slot {slot}: the pod has slots 0 to {pod.nodes - 1}")
    node = load_node(pool)
    if node is not None and node.slot is not None:
        if slot not in (None, node.slot):
            raise PoolError(f"{pool}: this node has slot {node.slot}; another needs another pool directory")
        return node
    if node is None:
        # Before any page: a join that is cut off finds its page again.
        node = Node(uuids.uuid4())
        write_node(pool, node)
    with _devices(pool, config, writable=True) as devices:
        if len(devices) < sum(not device.removed for device in config.devices):
            raise DeviceError(f"{pool}: a device of the pod is not there; to join, all are needed")
        config = _latest(pool, config, devices)
        joined, is_fresh = _take_slot(pool, config, devices, node, slot, force, tell, clock)
    if is_fresh and not (pool / INDEX_NAME).exists():
        # Nobody had the slot before, so the first mount has nothing to look for.
        make_index(pool / INDEX_NAME, config)
    write_node(pool, joined)
    return joined


def ensure_joined(pool: Path, tell: Tell | None = None) -> None:
    """Take a slot where the pool is a pod and this node has none. The caller holds the pool's lock. PoolError."""
    config = load(pool)
    if config is None or config.pod is None:
        return
    node = load_node(pool)
    if node is None or node.slot is None:
        joined = join(pool, tell=tell)
        if tell is not None:
            tell(f"{pool}: joined the pod as slot {joined.slot}")


def _take_slot(
    pool: Path, config: PoolConfig, devices: Mapping[int, Device], node: Node, wanted: int | None, force: bool,
    tell: Tell | None, clock: owner.Clock,
) -> tuple[Node, bool]:  # fmt: skip
    """Returns also whether no node had the slot before. DeviceError after JOIN_DEADLINE_S.

    Each looks at the slot, writes its page, waits, and looks again. Say A is sure, and B looked before A's pages were
    there. A waited longer than B takes from the begin of its look to the end of its write. So B's pages were there
    before A looked again: both see the same pages, and the first device decides.

    A cannot know what devices take for B, so one bound holds for all. A look of LOOK_MAX_S begins anew, however slow
    the devices are, and everybody waits for JOIN_S at least. All devices are read at once, one page of each, so slow
    ones stay far below the bound. A join on devices that never do ends with an error.

    A write cannot be called back. One that took too long may have taken the slot of a node that was sure. The latter
    sees the page at its next beat or mount, and stops. Its blocks may be there, so the slot is not as fresh as it
    looked.
    """
    fresh: set[int] = set()
    start = clock.now()
    here = replace(owner.this_process(pool=str(pool), use="joining"), node=node.uuid, flags=BEAT_LEFT)
    if force and wanted is not None:
        _wait_still(pool, config, devices, wanted, here, clock)
    for tries in itertools.count(1):
        found = _read(devices, config)
        slot = _choose(pool, _pod(pool, config), found, node, wanted, force)
        pages = found.get(slot, {})
        if not pages:
            fresh.add(slot)
        mounted = {index: beat.mounted for index, beat in pages.items() if beat.node == node.uuid}
        epoch = max((beat.epoch for beats in found.values() for beat in beats.values()), default=0)
        number = 1 + max((beat.number for beat in pages.values()), default=0)
        # The pages of all nodes may take long; between a last look at this slot and the write nothing else happens.
        began = clock.now()
        is_still = _read_slot(devices, config, slot) == pages
        look_s = clock.now() - began
        if clock.now() - start >= JOIN_DEADLINE_S:
            raise DeviceError(
                f"{pool}: no slot taken within {JOIN_DEADLINE_S:.0f} s: {tries} tries, the last for slot {slot}, whose "
                f"pages on {counted(len(devices), 'device')} took {look_s:.2f} s to read, of {LOOK_MAX_S:g} s at most"
            )
        # Another may have taken the slot during a long look, or a pause in it, and been sure of it.
        if not is_still or look_s >= LOOK_MAX_S:
            continue
        _write(devices, config, replace(here, slot=slot, epoch=epoch, number=number), mounted)
        took_s = clock.now() - began
        if took_s >= JOIN_S:
            fresh.discard(slot)
        # Devices that are slow for this node may be slow for others.
        wait_s = max(JOIN_S, 4 * took_s)
        if tell is not None and wait_s > JOIN_S:
            tell(f"slot {slot}: its pages on {counted(len(devices), 'device')} took {took_s:.1f} s to read and write; "
                 f"waiting for {wait_s:.0f} s whether another takes it")  # fmt: skip
        clock.sleep(wait_s)
        holders = {index: beat.node for index, beat in _read_slot(devices, config, slot).items()}
        if all(holders.get(index) == node.uuid for index in devices):
            return Node(node.uuid, slot), slot in fresh
        # Another wrote at the same moment. Whose page stands on the first device takes the others as well.
    raise AssertionError


def _choose(
    pool: Path, pod: PodConfig, found: Mapping[int, Mapping[int, Beat]], node: Node, wanted: int | None, force: bool
) -> int:
    """The slot to try next. PoolError if there is none, InUseError if it has another node."""
    first = min((index for pages in found.values() for index in pages), default=0)
    for slot, pages in found.items():
        # Its own, of a join that was cut off, or of the turn before.
        if first in pages and pages[first].node == node.uuid and wanted in (None, slot):
            return slot
    retired = {*pod.retired, *(slot for slot, pages in found.items() if _retired(pages))}
    free = [slot for slot in range(pod.nodes) if slot not in found and slot not in retired]
    if wanted is None:
        if not free:
            raise PoolError(
                f"{pool}: no slot of {pod.nodes} is free: kvfs pod status shows their nodes; kvfs pod join --slot S "
                "--force takes that of one that is gone"
            )
        return free[0]
    if wanted in retired:
        raise PoolError(f"{pool}: slot {wanted} was retired")
    if wanted not in free and not force:
        holder = next(iter(found[wanted].values()))
        raise InUseError(
            f"{pool}: slot {wanted} belongs to node {holder.node} on {printable(holder.host) or 'another machine'}; "
            "--force takes it from a node that is gone for good"
        )
    return wanted


def _retired(pages: Mapping[int, Beat]) -> bool:
    return any(beat.flags & BEAT_RETIRED for beat in pages.values())


def _wait_still(
    pool: Path, config: PoolConfig, devices: Mapping[int, Device], slot: int, here: Beat, clock: owner.Clock
) -> None:  # fmt: skip
    """InUseError if the beat of a slot moves, or its process is there."""
    claims = dict.fromkeys(devices, False)
    try:
        list(owner.wait_free(lambda: _read(devices, config).get(slot, {}), here, claims, None, clock))
    except InUseError as error:
        raise InUseError(f"{pool}: {error}") from error


# ---- looking ----


@dataclass(frozen=True, slots=True)
class SlotState:
    """A slot of a pod, as the pages on the devices tell."""

    slot: int
    # Not taken, left, frozen, beating, or retired. A frozen node did not say that it leaves, and does not beat.
    state: str
    lots: int
    segments: int
    # The newest page; a free slot has none.
    page: Beat | None = None
    # How many devices have a page of it.
    devices: int = 0

    @property
    def frozen(self) -> bool:
        """Whether its lots have no writer now."""
        return self.state != "beating"


def slot_states(
    pool: Path, *, watch_s: float = 2.5 * owner.INTERVAL_S, clock: owner.Clock = owner.REAL
) -> tuple[PoolConfig, list[SlotState]]:  # fmt: skip
    """The pod, and all its slots, watched for so long. Changes nothing. PoolError if it is no pod."""
    config = load(pool)
    if config is None:
        raise PoolError(f"{pool}: not a kvfs pool (no {CONFIG_NAME})")
    pod = _pod(pool, config)
    with _devices(pool, config, writable=False) as devices:
        config = _latest(pool, config, devices)
        before = _read(devices, config)
        moving: set[int] = set()
        began = clock.now()
        while any(_newest(pages).in_use for slot, pages in before.items() if slot not in moving):
            if clock.now() - began >= watch_s:
                break
            clock.sleep(_POLL_S)
            now = _read(devices, config)
            moving |= {slot for slot in now if slot in before and _moved(before[slot], now[slot])}
        now = _read(devices, config)
    pod, count, states = _pod(pool, config), config.segment_count, []
    for slot in range(pod.nodes):
        pages = now.get(slot, {})
        page = _newest(pages) if pages else None
        gone = slot in pod.retired or _retired(pages)
        state = (
            "retired" if gone else "free" if page is None else "beating" if slot in moving
            else "left" if not page.in_use else "frozen"
        )  # fmt: skip
        states.append(SlotState(
            slot, state, pod.lots_of(slot, count), len(pod.segments_of(slot, count)), page, len(pages)
        ))  # fmt: skip
    return config, states


def _newest(pages: Mapping[int, Beat]) -> Beat:
    return max(pages.values(), key=lambda beat: (beat.epoch, beat.number))


def _moved(before: Mapping[int, Beat], now: Mapping[int, Beat]) -> bool:
    """Whether a node wrote meanwhile, and did not leave."""
    return any(beat.in_use and index in before and beat != before[index] for index, beat in now.items())


def _latest(pool: Path, config: PoolConfig, devices: Mapping[int, Device]) -> PoolConfig:
    labels = _on_each(devices, lambda index, device: read_labels(device, config.devices[index].size).best())
    return latest_config(config, [label.config(f"{pool}: label") for label in labels.values() if label is not None])


# ---- retiring ----


def retire(pool: Path, slot: int, *, tell: Tell | None = None, clock: owner.Clock = owner.REAL) -> PoolConfig:
    """Mark the node of a slot as gone for good, on its pages and in the labels. Its lots stay frozen. The node stops if
    it is alive after all. UsageError, PoolError, InUseError if its beat moves."""
    config = load(pool)
    if config is None:
        raise PoolError(f"{pool}: not a kvfs pool (no {CONFIG_NAME})")
    pod = _pod(pool, config)
    if not 0 <= slot < pod.nodes:
        raise UsageError(f"slot {slot}: the pod has slots 0 to {pod.nodes - 1}")
    own = load_node(pool)
    if own is not None and own.slot == slot:
        raise UsageError(f"slot {slot}: it is this node's own; retire it from another")
    with _devices(pool, config, writable=True) as devices:
        config = _latest(pool, config, devices)
        _watch_still(pool, config, devices, slot, tell, clock)
        for _ in range(_RETIRE_ROUNDS):
            pages = _read(devices, config).get(slot, {})
            unmarked = {index: device for index, device in devices.items()
                        if index not in pages or not pages[index].flags & BEAT_RETIRED}  # fmt: skip
            if not unmarked:
                break
            here = replace(owner.this_process(pool=str(pool)), slot=slot)
            last = _newest(pages) if pages else here
            mounted = {index: beat.mounted for index, beat in pages.items()}
            _write(unmarked, config, replace(last, flags=last.flags | BEAT_RETIRED, number=last.number + 1), mounted)
            clock.sleep(2.5 * owner.INTERVAL_S)
        else:
            raise InUseError(f"{pool}: slot {slot}: its node writes its page again and again; stop it first")
        return _retire_in_labels(pool, config, devices, slot, clock)


def _watch_still(
    pool: Path, config: PoolConfig, devices: Mapping[int, Device], slot: int, tell: Tell | None,
    clock: owner.Clock,
) -> None:  # fmt: skip
    """InUseError if the slot's beat moves within RETIRE_WATCH_S."""
    before = _read(devices, config).get(slot, {})
    if not before and slot not in _pod(pool, config).retired:
        raise UsageError(f"slot {slot}: no node has it")
    if not before or _retired(before):
        return
    if tell is not None:
        tell(f"watching for {RETIRE_WATCH_S:.0f} s whether the node of slot {slot} is still at work")
    began = clock.now()
    while clock.now() - began < RETIRE_WATCH_S:
        clock.sleep(_POLL_S)
        now = _read(devices, config).get(slot, {})
        if _moved(before, now):
            beat = _newest(now)
            raise InUseError(
                f"{pool}: slot {slot} is alive: {owner.describe(beat, owner.this_process())}; only a node that is gone "
                "for good is retired"
            )


def _retire_in_labels(
    pool: Path, config: PoolConfig, devices: Mapping[int, Device], slot: int, clock: owner.Clock
) -> PoolConfig:  # fmt: skip
    """Write the labels until all say that the slot is retired: another node may retire another at the same moment."""
    while True:
        latest = _latest(pool, config, devices)
        pod = _pod(pool, latest)
        retired = tuple(sorted({*pod.retired, slot}))
        agree = all(_says(device, latest, index, retired) for index, device in devices.items())
        if agree:
            write_config(pool, latest)
            return latest
        changed = replace(latest, revision=latest.revision + 1, pod=replace(pod, retired=retired))
        whole = [devices.get(described.index) for described in changed.devices]
        absent = {index for index, device in enumerate(whole) if device is None}
        present = [device for device in whole if device is not None]
        any_device = present[0]
        failed = write_labels(changed, [device or any_device for device in whole], 0, absent)
        if failed:
            raise DeviceError(next(iter(failed.values())))
        config = replace(changed, revision=latest.revision)
        clock.sleep(JOIN_S)


def _says(device: Device, config: PoolConfig, index: int, retired: tuple[int, ...]) -> bool:
    label = read_labels(device, config.devices[index].size).best()
    if label is None:
        return False
    found = label.config(f"{device.path}: label")
    return found.pod is not None and found.pod.retired == retired and found.revision == config.revision
