"""Devices in service and out of it: the effects of failure, return, removal and replacement on segments and blocks.

A device that is away takes its segments along: nothing is written there, and every block with a part there is a miss.
Such a block is hidden, not forgotten: the index keeps its entry, and the block table drops it. If the device comes back
with the same label and generations, those entries count again, but for names that were given anew meanwhile. Its
summaries and headers are never believed about blocks. A device that is removed or replaced is forgotten with its
blocks.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import time
import uuid as uuids
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import trio

from kvfs.errors import DeviceError, KvfsError, PoolError, UsageError
from kvfs.names import step
from kvfs.pool import nvme_tcp
from kvfs.pool.config import CONFIG_NAME, DeviceConfig, PoolConfig
from kvfs.pool.devices import Device, DeviceAddress
from kvfs.pool.format import SegmentHeader
from kvfs.pool.geometry import LABEL_SIZE, SEGMENTS_MIN
from kvfs.pool.heart import Heart
from kvfs.pool.labels import write_label
from kvfs.pool.making import open_new
from kvfs.pool.opening import OpenPool, check_device, device_path, open_device, stored_path, write_config
from kvfs.pool.pod import refuse_change
from kvfs.record import Inode
from kvfs.store.blocks import Blocks
from kvfs.store.health import HARMLESS, DeviceState, Failures, Pace, judge
from kvfs.store.segment import State, usage
from kvfs.store.slabs import Slabs
from kvfs.types import PAGE_SIZE, InodeNumber, SegmentIndex
from kvfs.units import counted, told_size

log = logging.getLogger("kvfs.store.service")

T = TypeVar("T")

_WATCH_S = 0.25
# Times are compared at every so many turns.
_COMPARE_TURNS = 8
# An idle device is asked this often, a slow one at each turn. Native clients report nothing that they see, and several
# answers are needed to find that a device is not slow any more.
_BEAT_S = 1.0
# After a connection has been lost for so long, its devices have failed.
_CUT_S = 1.0
# Interval of probes for a failed device.
_PROBE_S = 1.0
# An open, a sync, or an I/O on a label that takes longer is given up on.
_LABEL_TIMEOUT_S = 20.0
_BATCH = 256
# A slow device is avoided only if this share of the segments that can be written is left.
_AVOID_LEAVES = 4
# A disk that had no room for its device file counts as full for this long.
_FULL_S = 60.0


@dataclass(slots=True)
class ServedDevice:
    """One device."""

    state: DeviceState = DeviceState.ONLINE
    reason: str = ""
    since_s: float = field(default_factory=time.time)
    draining: bool = False
    failures: Failures = field(default_factory=Failures)
    pace: Pace = field(default_factory=Pace)
    probe_at: float = 0.0
    # The reason why the last probe did not bring it back.
    missed: str = ""
    # The index has no entry on it any more: nothing has to be hidden.
    forgotten: bool = False
    # One return, removal or replacement of the device at a time. Taken before the lock of all devices.
    turn: trio.Lock = field(default_factory=trio.Lock)
    # Blocking calls on a device, one at a time: a device that never answers holds one thread.
    limit: trio.CapacityLimiter = field(default_factory=lambda: trio.CapacityLimiter(1))
    errors: int = 0
    # Trio times: when the disk below a device file last had no room, and when that was last logged.
    full_at: float = -math.inf
    full_told: float = -math.inf
    good: int = -1
    good_at: float = 0.0
    # Errors that were counted; whether some of them came since it last did well.
    errors_seen: int = 0
    troubled: bool = False
    beating: bool = False
    # Of an NVMe/TCP device: the time since which it cannot be used, and the reason.
    cut_at: float | None = None
    cut: str = ""


@dataclass(slots=True)
class _Headers:
    """Segment headers as a device has them, and the segments that never had one."""

    found: dict[int, SegmentHeader | None] = field(default_factory=dict)
    blank: set[int] = field(default_factory=set)


class DeviceService:
    """The devices of a pool that is in use. One trio thread."""

    def __init__(
        self, opened: OpenPool, blocks: Blocks, slabs: Slabs, heart: Heart, on_devices: Callable[[], None]
    ) -> None:
        """on_devices: descriptors lead to other devices than before."""
        self._opened, self._index, self._plane, self._segments = opened, blocks.index, blocks.plane, blocks.segments
        self._blocks, self._slabs, self._devices_changed = blocks, slabs, on_devices
        self.names = blocks.names
        self._heart, self._epoch = heart, heart.me.epoch
        self.all = [ServedDevice() for _ in opened.devices]
        # Until devices that only missed a mount have been taken in, nothing is logged about segments that cannot be
        # written.
        self._complete = self._said = False
        # Held while blocks are hidden, shown or forgotten.
        self._lock = trio.Lock()
        self._to_hide: set[SegmentIndex] = set()
        self._work = trio.Event()
        self._of: list[list[SegmentIndex]] = [[] for _ in opened.devices]
        for segment in self._segments.own:
            for device, _ in self._segments.members[segment.index]:
                self._of[device].append(segment.index)

    @property
    def config(self) -> PoolConfig:
        return self._opened.config

    def start(self) -> None:
        """Take note of the devices that were not there when the pool was opened. Called before anything of the index is
        used."""
        for device, reason in self._opened.absent.items():
            removed = self.config.devices[device].removed
            self._set(device, DeviceState.REMOVED if removed else DeviceState.FAILED, reason)
            self.all[device].forgotten = removed
            self._plane.device_stop(device)
        if self._opened.absent:
            self._apply_states()

    async def take_in_stale(self) -> None:
        """Take in the devices that are present, but missed a mount. Called before anybody asks for their blocks."""
        for device, service in enumerate(self.all):
            if service.state == DeviceState.FAILED and self._opened.devices[device].size:
                try:
                    await self.bring_back(device)
                except (KvfsError, OSError) as error:
                    log.error("device %d (%s): %s", device, self._path(device), error)
        self._complete = True
        self._say()

    def missing(self) -> list[str]:
        """The reason of each failed device."""
        return [f"device {device}: {service.reason}" for device, service in enumerate(self.all)
                if service.state == DeviceState.FAILED]  # fmt: skip

    def segments_of(self, device: int) -> Sequence[SegmentIndex]:
        return self._of[device]

    def _path(self, device: int) -> DeviceAddress:
        return device_path(self._opened.path, self.config.devices[device])

    def _set(self, device: int, state: DeviceState, reason: str) -> None:
        service = self.all[device]
        service.state, service.reason, service.since_s = state, reason, time.time()
        service.failures.clear()
        service.pace.clear()

    def _apply_states(self) -> None:
        """Tell index and segments which segments are away, and which others are not to be written."""
        away = [device for device, service in enumerate(self.all) if service.state.away]
        lost = {segment for device in away for segment in self._of[device]}
        avoided: set[SegmentIndex] = set()
        for device, service in enumerate(self.all):
            if service.draining:
                avoided.update(self._of[device])
        for device, service in enumerate(self.all):
            if service.state == DeviceState.SLOW:
                more = avoided.union(self._of[device])
                if len(self._segments.own) - len(lost | more) >= (len(self._segments.own) - len(lost)) // _AVOID_LEAVES:
                    avoided = more
        hidden = {
            segment for device in away if not self.all[device].forgotten for segment in self._of[device]
        }  # fmt: skip
        self._index.hide(hidden, lambda number: self._blocks.hide_in_table([number]), self._blocks.forget)
        self._segments.set_places(lost, avoided)
        self._say()
        self._blocks.space.update()

    def _say(self) -> None:
        if not self._complete:
            return
        why = self.writes_nothing()
        if why is not None and not self._said:
            log.error("%s", why)
        # Logged once, until a segment can be written again.
        self._said = not self._segments.usable and (self._said or why is not None)

    def writes_nothing(self) -> str | None:
        """The reason why no segment can be written, as a message; None if one can, or can in a moment. The content of
        a device that is back is compared with the index first."""
        if self._segments.usable:
            return None
        away = [
            device for device, service in enumerate(self.all)
            if service.state.away and service.state != DeviceState.RETURNING and not service.forgotten
        ]  # fmt: skip
        draining = [device for device, service in enumerate(self.all) if service.draining]
        hit = {segment for device in away for segment in self._of[device]}
        if len(hit) == len(self._segments.own):
            return (
                f"no segment can be written, writes get EIO: each lies on a device that is away ({_listed(away)}); "
                "bring it back, or kvfs device replace"
            )
        hit.update(segment for device in draining for segment in self._of[device])
        if draining and len(hit) == len(self._segments.own):
            return (
                "no segment can be written, writes get EIO: each lies on a device that is being drained "
                f"({_listed(draining)})" + (f" or away ({_listed(away)})" if away else "")
            )
        return None

    def full(self) -> list[str]:
        """A warning for each device whose disk had no room a moment ago."""
        since = trio.current_time() - _FULL_S
        return [self._full(device) for device, service in enumerate(self.all) if service.full_at > since]

    def _full(self, device: int) -> str:
        return (
            f"device {device} ({self._path(device)}): the disk below it is full (ENOSPC): new blocks are refused, "
            "what is stored stays; make room on that disk"
        )

    # ---- watching ----

    def note_error(self, device: int, code: int) -> None:
        """An I/O of the data plane failed."""
        if device >= len(self.all):
            return
        service = self.all[device]
        service.errors += 1
        if service.errors in (1, 10, 100) or service.errors % 1000 == 0:
            log.error("device %d (%s): %s, %d so far", device, self._path(device), os.strerror(code), service.errors)
        if code in HARMLESS:
            service.full_at = trio.current_time()
            if service.full_at - service.full_told > _FULL_S:
                service.full_told = service.full_at
                log.error("%s", self._full(device))
        if code == errno.ENOTCONN and nvme_tcp.is_url(self._path(device)):
            return  # the news of its connection says whether it is gone; errors of what was under way say no more
        if service.cut_at is None and (not service.state.away or service.state == DeviceState.RETURNING):
            gone = service.failures.note(code, trio.current_time())
            if gone is not None:
                self.fail(device, gone)

    def note_connection(self, device: int, usable: bool, message: str) -> None:
        """News of the connection to an NVMe/TCP device. A short interruption is ignored: the connection is made again
        at once."""
        if device >= len(self.all):
            return
        service = self.all[device]
        log.log(logging.INFO if usable else logging.ERROR, "device %d (%s): %s", device, self._path(device), message)
        if usable:
            service.cut_at = None
            if service.state == DeviceState.FAILED:
                service.probe_at = trio.current_time()
        elif service.cut_at is None:
            service.cut_at, service.cut = trio.current_time(), message
            service.failures.note(errno.EIO, service.cut_at)

    async def run(self) -> None:
        """Until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch, nursery)
            nursery.start_soon(self._hide_loop)
            # Each device has its own task: one that does not answer must not keep the others away.
            for device in range(len(self.all)):
                nursery.start_soon(self._probe_loop, device)

    async def _beat(self, device: int) -> None:
        """Read a page. The data plane counts and reports the result."""
        segment = self._of[device][0]
        member = [of for of, _ in self._segments.members[segment]].index(device)
        try:
            await self._plane.store_read(segment, member * self.config.geometry.stripe_unit // PAGE_SIZE, PAGE_SIZE)
        except KvfsError as error:
            log.debug("device %d: %s", device, error)
        finally:
            self.all[device].beating = False

    async def _watch(self, nursery: trio.Nursery) -> None:
        turn = 0
        while True:
            await trio.sleep(_WATCH_S)
            turn += 1
            now = trio.current_time()
            for device, service in enumerate(self.all):
                if service.state.away and service.state != DeviceState.RETURNING:
                    continue
                counts = self._plane.device_statistics(device)
                good = counts["reads"] + counts["writes"] - counts["errors"]
                reason = service.failures.verdict(good, now)
                if service.cut_at is not None:
                    reason = service.cut if now - service.cut_at >= _CUT_S else None
                if reason is not None:
                    self.fail(device, reason)
                    continue
                if counts["errors"] != service.errors_seen:
                    service.errors_seen, service.troubled = counts["errors"], True
                elif good != service.good and service.troubled:
                    service.troubled = False
                    if self._plane.pod is not None:
                        self._plane.pod.avoid_none()
                if good != service.good:
                    service.good, service.good_at = good, now
                beat_s = 0.0 if service.state == DeviceState.SLOW else _BEAT_S
                if now - service.good_at >= beat_s and not service.beating and self._of[device]:
                    service.beating, service.good_at = True, now
                    nursery.start_soon(self._beat, device)
            if turn % _COMPARE_TURNS == 0:
                self._compare(now)

    def _compare(self, now: float) -> None:
        here = {device: service for device, service in enumerate(self.all) if not service.state.away}
        for device, service in here.items():
            service.pace.take(self._plane.device_latency(device), now)
        slow = frozenset(device for device, service in here.items() if service.state == DeviceState.SLOW)
        verdicts = judge({device: service.pace for device, service in here.items()}, slow, now)
        for device, reason in verdicts.items():
            if reason is None:
                log.info("device %d (%s): not slow any more", device, self._path(device))
                self._set(device, DeviceState.ONLINE, "")
            else:
                log.warning("device %d (%s): slow, gets no new segments: %s", device, self._path(device), reason)
                self._set(device, DeviceState.SLOW, reason)
        if verdicts:
            self._apply_states()

    # ---- failing ----

    def fail(self, device: int, reason: str) -> None:
        """Take the device out of service. At once nothing is read or written there, and the index finds none of its
        blocks; the block table follows."""
        service = self.all[device]
        if service.state.away and service.state != DeviceState.RETURNING:
            return
        log.error("device %d (%s): failed: %s", device, self._path(device), reason)
        self._plane.device_stop(device)
        self._heart.pause(device)
        self._set(device, DeviceState.FAILED, reason)
        service.probe_at = trio.current_time() + _PROBE_S
        self._take_away(device)

    def _take_away(self, device: int) -> None:
        self._slabs.fail(self._of[device])
        self._to_hide.update(self._of[device])
        self._index.hide_shown()
        self._apply_states()
        self._work.set()

    async def _hide_loop(self) -> None:
        while True:
            await self._work.wait()
            self._work = trio.Event()
            async with self._lock:
                await self._hide_all()

    async def _hide_all(self) -> None:
        """Take hidden blocks out of the block table. The caller holds the lock."""
        count = 0
        while self._to_hide:
            segment = self._to_hide.pop()
            inodes = self._index.segment_inodes(segment)
            for at in range(0, len(inodes), _BATCH):
                count += self.hide_in_table(inodes[at : at + _BATCH])
                await trio.lowlevel.checkpoint()
        if count:
            self._blocks.tell_hosts()
            log.info("%d blocks are not there until their device is back", count)

    @step
    def hide_in_table(self, inodes: Iterable[InodeNumber]) -> int:
        """Take the hidden ones of these inodes out of the block table; returns how many."""
        hidden = [inode for inode in inodes if self._index.hidden(inode) is not None]
        self._index.bring(hidden)  # subscribers are told of their names
        self._blocks.hide_in_table(hidden)
        return len(hidden)

    async def _drop_hidden(self, segments: Iterable[SegmentIndex]) -> int:
        """Remove the hidden blocks of these segments from the index. The caller holds the lock."""
        count = 0
        for segment in segments:
            for i, inode in enumerate(self._index.segment_inodes(segment)):
                count += self._index.drop_hidden(inode)
                if i % _BATCH == _BATCH - 1:
                    await trio.lowlevel.checkpoint()
            await trio.lowlevel.checkpoint()
        return count

    # ---- coming back ----

    async def _probe_loop(self, device: int) -> None:
        service = self.all[device]
        while True:
            await trio.sleep(_WATCH_S)
            if service.state == DeviceState.FAILED and service.probe_at <= trio.current_time():
                try:
                    await self.bring_back(device)
                    service.missed = ""
                except (KvfsError, OSError) as error:
                    if str(error) not in (service.missed, service.reason):
                        log.info("device %d (%s): not back: %s", device, self._path(device), error)
                    service.missed = str(error)
                    service.probe_at = trio.current_time() + _PROBE_S

    async def bring_back(self, device: int) -> None:
        """Take a failed device into service if it is the one that went. KvfsError gives the reason if it is not."""
        async with self.all[device].turn:
            if self.all[device].state != DeviceState.FAILED:
                return
            was = self.all[device].reason
            with trio.move_on_after(_LABEL_TIMEOUT_S):
                # The opening of a segment that began before the failure must fail, and not succeed late.
                while any(self._segments.all[segment].opening for segment in self._of[device]):
                    await trio.sleep(0.01)
            if any(self._segments.all[segment].opening for segment in self._of[device]):
                raise DeviceError(f"{self._path(device)}: still owes an answer")
            found = await _in_thread(self.all[device].limit, self._path(device), lambda: self._find(device), _close)
            self._set(device, DeviceState.RETURNING, "its segments are being checked")
            headers = _Headers()
            try:
                await self._take_in(device, found)
                # Read without the lock: other devices must not wait for this one.
                await self._read_headers(device, headers)
                async with self._lock:
                    await self._hide_all()
                    await self._read_headers(device, headers)
                    back = await self._reconcile(device, headers)
                    if back is not None:
                        self._set(device, DeviceState.ONLINE, "")
                        self._apply_states()
                        self._index.hide_shown()
                        if self._plane.pod is not None:
                            self._plane.pod.avoid_none()
            except BaseException as error:
                if self.all[device].state == DeviceState.RETURNING:
                    self._plane.device_stop(device)
                    self._heart.pause(device)
                    self._set(device, DeviceState.FAILED, str(error) or was)
                self._take_away(device)
                raise
            if back is None:
                self._take_away(device)
                return
        self._blocks.tell_hosts()
        if found is not None:
            # Otherwise native clients have the right descriptor. To connect again would hold up their reads of all
            # devices.
            self._devices_changed()
        log.info("device %d (%s): back, with %d blocks", device, self._path(device), back)

    def _find(self, device: int) -> Device | None:
        """The device, checked and labelled anew, or None if it is the descriptor that is open. Blocks."""
        described, path, old = self.config.devices[device], self._path(device), self._opened.devices[device]
        shared = self.config.pod is not None
        fresh = None if old.leads_to(path) else open_device(path, holder=old, shared=shared)
        try:
            here = fresh or old
            label, _ = check_device(self.config, here, described, CONFIG_NAME)
            if label.mount_epoch > self._epoch:
                raise PoolError(
                    f"{path}: its label has mount epoch {label.mount_epoch}, this mount is {self._epoch}: "
                    "it was used elsewhere meanwhile; replace it"
                )
            self._heart.check(here, device)
            if self.config.pod is None:
                write_label(self.config, here, device, self._epoch)
            else:
                self._heart.mark(here, device)
        except BaseException:
            if fresh is not None:
                fresh.close()
            raise
        return fresh

    async def _take_in(self, device: int, fresh: Device | None) -> None:
        """Let the data plane use a device that was opened anew, under the descriptor number that it knows."""
        old = self._opened.devices[device]
        # The connection's news are of the last one; device_use waits for the next.
        self.all[device].cut_at = None

        def use() -> None:
            if fresh is not None:
                fresh.take_over(old)
                self._opened.devices[device] = fresh
            self._plane.device_use(device)

        await _in_thread(self.all[device].limit, self._path(device), use)
        self._heart.resume(device)
        self._opened.absent.pop(device, None)

    def _away_without(self, device: int) -> set[SegmentIndex]:
        """Segments that would be away if this device was not."""
        return {segment for i, service in enumerate(self.all) if service.state.away and i != device
                for segment in self._of[i]}  # fmt: skip

    async def _read_headers(self, device: int, headers: _Headers) -> None:
        """Read the headers of the device's segments, but those read already or with a part on another device that is
        away."""
        away = self._away_without(device)
        wanted = [segment for segment in self._of[device] if segment not in away and segment not in headers.found]
        before = self._plane.device_statistics(device)
        found, blank = await self._segments.reader.headers(wanted)
        after = self._plane.device_statistics(device)
        if (after["errors"], after["timeouts"]) != (before["errors"], before["timeouts"]):
            raise DeviceError(f"{self._path(device)}: its label can be read, its segments cannot")
        headers.found.update(found)
        headers.blank.update(blank)

    async def _reconcile(self, device: int, headers: _Headers) -> int | None:
        """Compare the device's segments with the index, and show the blocks that are there again. Returns None if the
        device went again. The caller holds the lock."""
        away = self._away_without(device)
        count = 0
        for index in self._of[device]:
            if index in away:
                continue
            segment, header = self._segments.all[index], headers.found[index]
            generation = 0 if header is None else header.generation
            if segment.state == State.FREE:
                if generation > segment.generation:
                    self._segments.forget_life(segment, generation)
            elif index in headers.blank or (header is not None and generation != segment.generation):
                await self._drop_hidden([index])
                self._segments.forget_life(segment, generation)
            else:
                inodes = self._index.segment_inodes(index)
                for at in range(0, len(inodes), _BATCH):
                    if self.all[device].state != DeviceState.RETURNING:
                        return None
                    count += self._show(inodes[at : at + _BATCH], away)
                    await trio.lowlevel.checkpoint()
        return count if self.all[device].state == DeviceState.RETURNING else None

    @step
    def _show(self, inodes: Sequence[InodeNumber], away: set[SegmentIndex]) -> int:
        """Hidden entries of which nothing is away any more count again, unless their directory has gone."""
        records: list[bytes] = []
        parents: list[InodeNumber] = []
        for number in inodes:
            record = self._index.hidden(number)
            if record is None:
                continue
            inode = Inode.unpack(record)
            if not away.isdisjoint(usage(inode)):
                continue
            # It should have gone with its name or its directory, but memory may have ended then.
            holder = self._index.lookup(inode.parent, inode.name)
            has_lost_name = holder not in (None, number) or self._blocks.bringing.has_lost_name(number)
            if has_lost_name or self._index.raw(inode.parent) is None:
                self._index.drop_hidden(number)
                continue
            self._index.show(number)
            self._segments.mark_dirty(self._segments.all[inode.segment], gone=False)
            records.append(record)
            parents.append(inode.parent)
        if records:
            self._index.bring(parents)
            self._plane.table_load(b"".join(records))
        return len(records)

    # ---- as the operator says ----

    def find(self, text: str) -> int:
        """A device by its number, or its path. UsageError."""
        if text.isascii() and text.isdigit() and int(text) < len(self.all):
            return int(text)
        for device, described in enumerate(self.config.devices):
            if text in (described.path, str(self._path(device))):
                return device
        raise UsageError(f"{text}: no device of this pool; kvfs device list shows them")

    def check_removable(self, device: int) -> None:
        """UsageError unless enough is left without it."""
        refuse_change(self.config.pod, "remove")
        if self.all[device].state == DeviceState.REMOVED:
            raise UsageError(f"device {device}: removed already")
        lost = {segment for i, service in enumerate(self.all) if service.state == DeviceState.REMOVED or i == device
                for segment in self._of[i]}  # fmt: skip
        left = len(self._segments.own) - len(lost)
        if left < SEGMENTS_MIN:
            raise UsageError(
                f"device {device}: without it {counted(left, 'segment')} would be left, at least {SEGMENTS_MIN} are "
                f"needed (stripe width {self.config.geometry.stripe_width}); replace it"
            )

    def _check_slabs(self, device: int) -> None:
        """UsageError if a slab lies there: it can be neither moved nor read from anywhere else."""
        found = self._slabs.on_segments(self._of[device])
        if found:
            inodes = ", ".join(str(inode) for inode in found[:8])
            raise UsageError(
                f"device {device} has {counted(len(found), 'slab')} (inodes {inodes}); end the programs that have "
                "them open"
            )

    async def would_lose(self, device: int) -> int:
        """The blocks that lie on the device, at least in part. UsageError if it cannot be removed."""
        self.check_removable(device)
        self._check_slabs(device)
        found: set[int] = set()
        for segment in self._of[device]:
            found.update(self._index.segment_inodes(segment))
            await trio.lowlevel.checkpoint()
        return len(found)

    async def remove(self, device: int, drain: Callable[[Sequence[SegmentIndex]], Awaitable[int]] | None) -> int:
        """Remove the device for good. `drain` empties segments before, and returns how many blocks it lost by that.
        Returns how many went with the device, those included."""
        self.check_removable(device)
        self._check_slabs(device)
        drained = 0
        if drain is not None and not self.all[device].state.away:
            self.all[device].draining = True
            self._apply_states()
            try:
                drained = await drain(self._of[device])
            finally:
                self.all[device].draining = False
                self._apply_states()
        devices = list(self.config.devices)
        devices[device] = replace(devices[device], removed=True)
        async with self.all[device].turn, self._lock:
            self._check_slabs(device)
            self._plane.device_stop(device)
            self._heart.pause(device, clear=True)
            self._set(device, DeviceState.REMOVED, "")
            self._take_away(device)
            try:
                count = drained + await self._drop_blocks(device)
                await self._describe(devices)
            except BaseException as error:
                self._set(device, DeviceState.FAILED, f"could not be removed: {error}")
                raise
            self.all[device].forgotten = True
            self._apply_states()
        log.info("device %d (%s): removed, %d blocks with it", device, self._path(device), count)
        self._devices_changed()
        return count

    async def replace(self, device: int, path: DeviceAddress, force: bool) -> int:
        """Let another device take its place, empty. Returns how many blocks went with the old one."""
        refuse_change(self.config.pod, "replace")
        described = self.config.devices[device]
        limit = trio.CapacityLimiter(1)
        # A new device may have the old one's place.
        others = [other for i, other in enumerate(self._opened.devices) if i != device]
        old = self._opened.devices[device]
        fresh = await _in_thread(limit, path, lambda: open_new(path, others, force=force, old=old, me=self._heart.me),
                                 _close)  # fmt: skip
        try:
            needed = described.zones_offset + described.zone_count * self.config.geometry.zone_size + LABEL_SIZE
            if fresh.size < needed:
                raise UsageError(
                    f"{path}: {told_size(fresh.size)}; to replace device {device} it needs {told_size(needed)}"
                )
            devices = list(self.config.devices)
            devices[device] = replace(
                described, uuid=uuids.uuid4(), path=stored_path(path, self._opened.path), removed=False,
                size=fresh.size // PAGE_SIZE * PAGE_SIZE,
            )  # fmt: skip
            changed = replace(self.config, devices=tuple(devices), revision=self.config.revision + 1)
            async with self.all[device].turn, self._lock:
                self._check_slabs(device)
                self._plane.device_stop(device)
                self._heart.pause(device)
                self._set(device, DeviceState.FAILED, "being replaced")
                self.all[device].probe_at = float("inf")
                self._take_away(device)
                await self._hide_all()
                for segment in self._of[device]:
                    # I/O under way fails, at its deadline at the latest. What was written already enters.
                    while self._segments.all[segment].state in (State.OPEN, State.EVICTING):
                        await trio.sleep(0.01)
                self._to_hide.update(self._of[device])
                count = await self._drop_blocks(device)
                # Free segments as well: the new device may have been this pool's before, and name blocks.
                for segment in self._of[device]:
                    self._segments.forget_life(self._segments.all[segment], 0)
                await _in_thread(limit, path, lambda: write_label(changed, fresh, device, self._epoch))
                await self._describe(devices)
                await self._take_in(device, fresh)
                self._set(device, DeviceState.ONLINE, "")
                self.all[device].forgotten = False
                self._apply_states()
        except BaseException:
            if fresh.fd != self._opened.devices[device].fd:
                fresh.close()
            self.all[device].probe_at = 0.0
            raise
        log.info("device %d: replaced by %s, %d blocks went", device, path, count)
        self._devices_changed()
        return count

    async def _drop_blocks(self, device: int) -> int:
        """Remove all blocks on the device from the index, durably. The caller holds the lock."""
        await self._hide_all()
        count = await self._drop_hidden(self._of[device])
        await self._blocks.commit()
        return count

    async def _describe(self, devices: Sequence[DeviceConfig]) -> None:
        """Write a description of the pool with these devices: pool.toml first, then the labels. A reader tells older
        labels by their revision."""
        before = None
        while before is not self.config:  # a SIGHUP may bring other rules while they are written
            before = self.config
            config = replace(before, devices=tuple(devices), revision=before.revision + 1)
            await trio.to_thread.run_sync(write_config, self._opened.path, config)
        self._opened.config = config

        async def label(device: int) -> None:
            try:
                await _in_thread(
                    self.all[device].limit, self._path(device),
                    lambda: write_label(config, self._opened.devices[device], device, self._epoch),
                )  # fmt: skip
            except KvfsError as error:
                self.fail(device, str(error))

        async with trio.open_nursery() as nursery:
            for device, service in enumerate(self.all):
                if not service.state.away:
                    nursery.start_soon(label, device)

    # ---- durability ----

    async def sync(self) -> None:
        """Make all writes to the devices in service durable. KvfsError if one fails."""
        failed: list[KvfsError] = []

        async def sync_one(index: int, device: Device) -> None:
            try:
                await _in_thread(self.all[index].limit, device.path, device.sync)
            except OSError as error:
                failure = KvfsError(f"{device.path}: {os.strerror(error.errno or 0)}")
                failure.errno = error.errno or failure.errno
                failed.append(failure)
            except KvfsError as error:
                self.note_error(index, errno.ETIMEDOUT)
                failed.append(error)

        async with trio.open_nursery() as nursery:
            for index, device in enumerate(self._opened.devices):
                if not self.all[index].state.away:
                    nursery.start_soon(sync_one, index, device)
        if failed:
            raise failed[0]


async def _in_thread(
    limit: trio.CapacityLimiter, what: DeviceAddress, work: Callable[[], T], undo: Callable[[T], None] | None = None
) -> T:
    """Blocking work on a device. A device that does not answer is given up on; the thread waits on, and undoes its
    result."""
    late = False

    def run() -> T:
        result = work()
        if late and undo is not None:
            undo(result)
        return result

    with trio.move_on_after(_LABEL_TIMEOUT_S):
        return await trio.to_thread.run_sync(run, abandon_on_cancel=True, limiter=limit)
    late = True
    raise DeviceError(f"{what}: no answer within {_LABEL_TIMEOUT_S:.0f} s")


def _listed(devices: Sequence[int]) -> str:
    return ", ".join(map(str, devices))


def _close(device: Device | None) -> None:
    if device is not None:
        device.close()
