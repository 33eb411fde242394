"""The heart of a pool in use. A thread for each device writes there once a second that this process owns it, and looks
first whether another process says so.

The page that is found decides: our own is as it should be, a newer owner's ends the use of the pool at once. A device
that hangs stops its own thread alone. All calls block. docs/format.md describes the page; owner.py knows which owners
are alive.

In a pod each node has the page of its slot, and owns its part of the pool by it. The page also says what a label says
elsewhere: the last mount in which the device took part. So it is durable when a mount begins, and stays at its end.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace

from kvfs.errors import DeviceError, FormatError, InUseError, PoolError, printable
from kvfs.pool import fence, owner
from kvfs.pool.config import PoolConfig
from kvfs.pool.devices import Device, Tell
from kvfs.pool.format import (
    BEAT_ENDING,
    BEAT_LEFT,
    BEAT_RETIRED,
    Beat,
    beat_offset,
    holds_beat,
    pack_beat,
    unpack_beat,
)
from kvfs.pool.labels import has_beat, read_beat, read_beats
from kvfs.pool.opening import OpenPool
from kvfs.types import EPOCH_MAX, PAGE_SIZE

log = logging.getLogger("kvfs.store.heart")

# Writes that were given up on may land later: so many of their pages are remembered.
_HISTORY = 64
# Time to clear all pages. A device that takes longer keeps the page of a process that is gone.
_STOP_S = 2.0
# Two that begin at the same moment see each other after this. On a file the claim decides.
_FIRST_S = 0.2
# After this time an owner that is pushed aside has noticed.
_YIELD_S = 2.5 * owner.INTERVAL_S
# A mark waits this long for the beat that is being written. Beyond it the device hangs.
_MARK_S = 10.0


@dataclass(slots=True)
class _Slot:
    """One device's thread."""

    index: int
    door: Device
    wake: threading.Event = field(default_factory=threading.Event)
    stopping: bool = False
    clear: bool = True
    # Held from the making of a page until it is written: an older page never lands on a newer one.
    writing: threading.Lock = field(default_factory=threading.Lock)
    thread: threading.Thread | None = None


class Heart:
    """Beats from `take` to `stop`. One thread calls all methods but `check`."""

    def __init__(self, opened: OpenPool, me: Beat, clock: owner.Clock = owner.REAL) -> None:
        """For Heart.take only."""
        self._opened, self.me, self._clock = opened, me, clock
        self._pod = opened.config.pod
        self._offset = beat_offset(opened.slot)
        # In a pod: the last mount of this node in which each device took part.
        self._mounted: dict[int, int] = {}
        self._beat = 0
        self._flags = 0
        self._lock = threading.Lock()
        self._written: dict[int, deque[bytes]] = {}
        # Pages of others as they were last found. Such a page counts once it has changed.
        self._odd: dict[int, bytes] = {}
        self._slots: dict[int, _Slot] = {}
        # Devices that have reservations.
        self._fenced: set[int] = set()
        self._on_lost: Callable[[str], None] | None = None
        self.lost: str | None = None

    @classmethod
    def take(
        cls, opened: OpenPool, *, use: str, known: int = 0, next_epoch: bool = False, force: bool = False,
        tell: Tell | None = None, clock: owner.Clock = owner.REAL, dead: Beat | None = None,
    ) -> Heart:  # fmt: skip
        """Own the present devices. No other process does when this returns, and this process's beat stands on them.

        `known`: the last epoch that the index knows. `next_epoch`: raise the epoch, for a mount; otherwise the last one
        stays. `force`: push an owner aside that still beats. `dead`: of owner.Watch. InUseError.
        """
        here = replace(
            owner.this_process(pool=str(opened.path), use=use), slot=opened.slot, node=opened.node
        )  # fmt: skip
        heart = cls(opened, here, clock)
        beats = heart._read()
        heart._check_slot(beats)
        try:
            for beat in owner.wait_free(heart._read, here, heart._claims(), tell, clock, dead):
                who = f"pid {beat.pid} on {printable(beat.host)}"
                opened.notes.append(f"the beat of {who} did not move for {owner.watch_s(beat):.0f} s: taken over")
        except InUseError as error:
            if not force:
                raise InUseError(f"{opened.path}: {error}") from error
            opened.notes.append(f"taken over by --force: {error}")
        last = max([opened.epoch, known, *(beat.epoch for beat in beats.values() if beat is not None)])
        heart._mounted = {index: 0 if beat is None else beat.mounted for index, beat in beats.items()}
        if next_epoch:
            last = max(last, heart._highest())
            if last >= EPOCH_MAX:
                raise FormatError(f"{opened.path}: mount {last}; the last possible is {EPOCH_MAX - 1}")
        heart.me = replace(here, epoch=last + next_epoch)
        heart._reserve(beats)
        heart._write_first(pushing=force and any(beat is not None and beat.in_use for beat in beats.values()))
        return heart

    def _check_slot(self, beats: Mapping[int, Beat | None]) -> None:
        """In a pod: check that the slot is this node's. PoolError."""
        if self._pod is None:
            return
        for beat in beats.values():
            retired = self.me.slot in self._pod.retired or (beat is not None and beat.flags & BEAT_RETIRED)
            if retired:
                raise PoolError(f"{self._opened.path}: {_retired(self.me.slot)}")
            if beat is not None and beat.node != self.me.node:
                raise PoolError(f"{self._opened.path}: {_another_node(beat)}")

    def _highest(self) -> int:
        """The highest epoch of any node of the pod."""
        found = [self._opened.highest]
        for index in self._present() if self._pod is not None else ():
            try:
                beats = read_beats(self._opened.devices[index], self._opened.config, index)
                found += [beat.epoch for beat in beats.values()]
            except DeviceError as error:
                log.warning("%s", error)
        return max(found)

    # ---- taking ----

    def _present(self) -> list[int]:
        return [
            described.index for device, described in zip(self._opened.devices, self._opened.config.devices, strict=True)
            if device.size and has_beat(described, self._opened.slot)
        ]  # fmt: skip

    def _claims(self) -> Mapping[int, bool]:
        # The nodes of a pod share their claims: two of one machine may both have one.
        return {index: self._pod is None and self._opened.devices[index].claim >= 0 for index in self._present()}

    def _read(self) -> Mapping[int, Beat | None]:
        """All beats. A device that cannot be read is left out."""
        found: dict[int, Beat | None] = {}
        for index in self._present():
            try:
                found[index] = read_beat(
                    self._opened.devices[index], self._opened.config, index, self._opened.slot
                )  # fmt: skip
            except DeviceError as error:
                log.warning("%s", error)
        return found

    def _reserve(self, beats: Mapping[int, Beat | None]) -> None:
        """Keep the writes of other machines away where devices can, also those of the last owner. In a pod others
        write as well."""
        for index in self._present() if self._pod is None else ():
            before = beats.get(index)
            old = 0 if before is None else fence.key_of(before.owner)
            self._fenced.add(index)
            try:
                fence.reserve(self._opened.devices[index].reservation, fence.key_of(self.me.owner), old)
            except DeviceError as error:
                if error.errno == errno.EOPNOTSUPP:
                    self._fenced.discard(index)
                else:
                    log.warning("%s; beats alone keep others away", error)

    def _write_first(self, *, pushing: bool) -> None:
        """Write the first beats, and see that they stay where others can write as well."""
        began = self._clock.now()
        for index in self._present():
            self._write(index, self._opened.devices[index], durable=self._pod is not None)
        if not pushing and self._pod is None and all(not device.is_block for device in self._opened.devices):
            return
        while True:
            self._clock.sleep(_FIRST_S)
            others = {
                n: beat for n, beat in self._read().items()
                if beat is not None and beat.owner != self.me.owner and not beat.flags & BEAT_LEFT
            }  # fmt: skip
            if not pushing:
                for beat in others.values():
                    self._clear()
                    raise InUseError(f"{self._opened.path}: {owner.describe(beat, self.me)}")
                return
            for index in others:
                self._write(index, self._opened.devices[index])
            if self._clock.now() - began >= _YIELD_S:
                return

    def _clear(self) -> None:
        """Clear the beats that are still this process's."""
        for index in self._present():
            try:
                self._clear_one(index, self._opened.devices[index])
            except (DeviceError, OSError) as error:
                log.warning("%s", error)

    def _clear_one(self, index: int, door: Device) -> None:
        if door.read(self._offset, PAGE_SIZE) in self._written.get(index, ()):
            if self._pod is None:
                door.write(self._offset, bytes(PAGE_SIZE), durable=False)
            else:
                self._put(index, door, durable=False, flags=BEAT_LEFT)
        if index in self._fenced:
            fence.give_back(door.reservation, fence.key_of(self.me.owner))

    def _write(self, index: int, door: Device, *, durable: bool = False) -> None:
        try:
            self._put(index, door, durable=durable)
        except (DeviceError, OSError) as error:
            log.debug("%s", error)

    def _put(self, index: int, door: Device, *, durable: bool, flags: int | None = None) -> None:
        with self._lock:
            self._beat += 1
            beat = replace(
                self.me, number=self._beat, written_ns=time.time_ns(), flags=self._flags if flags is None else flags,
                mounted=self._mounted.get(index, 0),
            )  # fmt: skip
            config = self._opened.config
            page = pack_beat(config.secret, config.uuid, config.devices[index].uuid, beat)
            # Remembered before the write: a write that fails may land all the same.
            self._written.setdefault(index, deque(maxlen=_HISTORY)).append(page)
        door.write(self._offset, page, durable=durable)

    # ---- mounts of a pod's node ----

    def mount(self) -> dict[int, str]:
        """Say durably, in a pod, that the devices take part in this mount, but those absent. The index must know of the
        mount before. Returns the failure of each device."""
        assert self._pod is not None
        present = [index for index in self._present() if index not in self._opened.absent]
        return self._mark(present)

    def mark(self, device: Device, index: int) -> None:
        """Say the same on a device that is back. DeviceError, also where a beat's write there does not end."""
        self._mounted[index] = self.me.epoch
        slot = self._slots.get(index)
        if slot is None:
            self._put(index, device, durable=True)
            return
        if not slot.writing.acquire(timeout=_MARK_S):
            raise DeviceError(f"{device.path}: the write of a beat has not ended for {_MARK_S:.0f} s")
        try:
            self._put(index, device, durable=True)
        finally:
            slot.writing.release()

    def next_epoch(self) -> int:
        """The epoch that raise_epoch() may be given: above all of any node. Blocks. FormatError if there is none."""
        epoch = max(self.me.epoch, self._highest()) + 1
        if epoch >= EPOCH_MAX:
            raise FormatError(f"{self._opened.path}: mount {epoch}; the last possible is {EPOCH_MAX - 1}")
        return epoch

    def raise_epoch(self, epoch: int) -> dict[int, str]:
        """Take a higher epoch while the pod's pool is in use, durably: the numbers of the last one run out. Blocks.

        Call from a thread, in this order: the index takes `epoch` as one that is being opened, durably; this; the index
        takes it as its mount. Numbers of the new epoch may be given out afterwards. Returns the failure of each device;
        DeviceError if all failed.
        """
        assert self._pod is not None and epoch > self.me.epoch
        with self._lock:
            was, self.me = self.me.epoch, replace(self.me, epoch=epoch)
        # A device without a thread is away. It takes part again when it is back.
        present = [index for index in list(self._slots) if self._mounted.get(index) == was]
        failed = self._mark(present)
        if len(failed) == len(present):
            raise DeviceError(next(iter(failed.values()), f"{self._opened.path}: no device is there"))
        return failed

    def _mark(self, present: list[int]) -> dict[int, str]:
        failed: dict[int, str] = {}
        for index in present:
            try:
                self.mark(self._opened.devices[index], index)
            except (DeviceError, OSError) as error:
                failed[index] = str(error)
        return failed

    # ---- beating ----

    def start(self, on_lost: Callable[[str], None]) -> None:
        """`on_lost` is called once, in a thread, with the reason, when another has taken a device."""
        self._on_lost = on_lost
        for index in self._present():
            self.resume(index)

    def resume(self, index: int) -> None:
        """A device is present, again or instead of another."""
        self.pause(index)
        if self._on_lost is None or index not in self._present() or self.lost is not None:
            return
        slot = self._slots[index] = _Slot(index, self._opened.devices[index].door())
        slot.thread = threading.Thread(target=self._run, args=(slot,), name=f"beat {index}", daemon=True)
        slot.thread.start()

    def pause(self, index: int, *, clear: bool = False) -> None:
        """A device is away: no further beat is begun there. `clear`: it goes for good, so no owner is to wait for this
        one."""
        slot = self._slots.pop(index, None)
        if slot is not None:
            slot.clear, slot.stopping = clear, True
            slot.wake.set()

    def ending(self) -> None:
        """Others may wait: the end is near."""
        self._flags |= BEAT_ENDING
        for slot in self._slots.values():
            slot.wake.set()

    def stop(self) -> None:
        """Clear the pages where devices answer; a pod's node's stay, and say that it has left. Called last, after the
        last write."""
        if self._on_lost is None:
            self._clear()
        slots = list(self._slots.values())
        self._slots.clear()
        for slot in slots:
            slot.stopping = True
            slot.wake.set()
        until = time.monotonic() + _STOP_S
        for slot in slots:
            assert slot.thread is not None
            slot.thread.join(max(0.0, until - time.monotonic()))
            if slot.thread.is_alive():
                log.warning("%s: no answer; the beat there is not cleared", slot.door.path)

    def check(self, device: Device, index: int) -> None:
        """Check that a device that was away has no other owner. Blocks. InUseError, DeviceError."""
        config, slot = self._opened.config, self._opened.slot
        claims = {index: self._pod is None and device.claim >= 0}
        owner.wait_free(lambda: {index: read_beat(device, config, index, slot)}, self.me, claims, None, self._clock)
        beat = read_beat(device, config, index, slot) if self._pod is not None else None
        self._check_slot({index: beat})
        if beat is not None and beat.epoch > self.me.epoch:
            raise PoolError(
                f"{device.path}: the page of slot {slot} has mount epoch {beat.epoch}, this mount is {self.me.epoch}: "
                "it was used elsewhere meanwhile"
            )

    def _run(self, slot: _Slot) -> None:
        try:
            # A device that was away may have lost the reservation.
            if slot.index in self._fenced:
                with suppress(DeviceError):
                    fence.reserve(slot.door.reservation, fence.key_of(self.me.owner), 0)
            while not slot.stopping:
                try:
                    self._turn(slot)
                except (DeviceError, OSError) as error:
                    log.debug("%s", error)
                slot.wake.wait(owner.INTERVAL_S)
                slot.wake.clear()
            if slot.clear and self.lost is None:
                with slot.writing:
                    self._clear_one(slot.index, slot.door)
        except (DeviceError, OSError) as error:
            log.debug("%s", error)
        finally:
            # close(2) of a device that is gone fails, and closes it all the same.
            with suppress(OSError):
                slot.door.close()

    def _turn(self, slot: _Slot) -> None:
        page = slot.door.read(self._offset, PAGE_SIZE)
        # A write is allowed only by the page that was read just now.
        if slot.stopping or self.lost is not None:
            return
        reason = self.judge(slot.index, page, self._opened.config)
        if reason is None:
            with slot.writing:
                self._write(slot.index, slot.door)
            return
        with self._lock:
            if self.lost is not None:
                return
            self.lost = f"{slot.door.path}: {reason}"
        assert self._on_lost is not None
        self._on_lost(self.lost)

    def judge(self, index: int, page: bytes, config: PoolConfig) -> str | None:
        """The reason why the device is another's, by the page that was found there. Returns None if the device is
        ours."""
        with self._lock:
            if page in self._written.get(index, ()):
                return None
            beat = unpack_beat(config.secret, config.uuid, config.devices[index].uuid, page, self.me.slot)
            if beat is not None and beat.flags & BEAT_RETIRED:
                return _retired(beat.slot)
            if beat is not None and beat.node != self.me.node:
                return _another_node(beat)
            # A copy of this very process has the same owner. Its pages give it away.
            ours = beat is not None and beat.owner == self.me.owner
            if beat is not None and (beat.number > self._beat if ours else beat.epoch >= self.me.epoch):
                return owner.describe(beat, self.me)
            if not holds_beat(page):
                return None
            # The page is another pool's, or was written late by an older owner or this one. One such page is a
            # leftover; two mean that somebody is at work.
            before = self._odd.setdefault(index, page)
            if before == page:
                return None
            return "in use by another kvfs, of another pool" if beat is None else owner.describe(beat, self.me)


def _retired(slot: int) -> str:
    return (
        f"slot {slot} was retired (kvfs pod retire): its node is taken for gone for good; remove the pool's directory "
        "here, and join again"
    )


def _another_node(beat: Beat) -> str:
    where = printable(beat.host) or "another machine"
    return (
        f"slot {beat.slot} belongs to node {beat.node} on {where} now: of two machines with one node.toml one must "
        "go; remove the pool's directory on it, and join again"
    )


@contextmanager
def kept(opened: OpenPool, use: str, on_lost: Callable[[str], None], dead: Beat | None = None) -> Iterator[Heart]:
    """Own the devices of a pool that is not mounted. `dead`: of owner.Watch. InUseError."""
    heart = Heart.take(opened, use=use, dead=dead)
    try:
        heart.start(on_lost)
        yield heart
    finally:
        heart.stop()
