"""Labels and beats on an open device: both copies of a label, and the device's user.

format.py packs and unpacks; this reads and writes. All calls block.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass

from kvfs.errors import DeviceError, FormatError, KvfsError, OtherVersionError, PoolError
from kvfs.pool.config import DeviceConfig, PoolConfig
from kvfs.pool.devices import DEVICE_SIZE_MIN, Device
from kvfs.pool.format import (
    BEAT_OFFSET,
    FORMAT_VERSION,
    Beat,
    Label,
    beat_offset,
    pack_label,
    unpack_beat,
    unpack_label,
)
from kvfs.pool.geometry import LABEL_SIZE
from kvfs.types import PAGE_SIZE


@dataclass(frozen=True, slots=True)
class LabelCopies:
    """Both label places of a device: each a label, or the reason why there is none."""

    copies: tuple[Label | FormatError | PoolError, Label | FormatError | PoolError]

    def best(self) -> Label | None:
        valid = [copy for copy in self.copies if isinstance(copy, Label)]
        return max(valid, key=lambda label: label.mount_epoch, default=None)

    def other_version(self) -> PoolError | None:
        """The complaint about another version of the format, if that is what one copy is. A version whose label has a
        wrong checksum is damage where the other copy is valid."""
        valid = self.best() is not None
        for copy in self.copies:
            if isinstance(copy, PoolError) and not (valid and isinstance(copy, OtherVersionError) and not copy.proven):
                return copy
        return None


def read_labels(device: Device, size: int | None = None, oldest: int = FORMAT_VERSION) -> LabelCopies:
    """Both copies. `size`: of the device as the pool has it; by default its real size. `oldest`: as unpack_label()."""
    end = (device.size if size is None else size) // PAGE_SIZE * PAGE_SIZE
    places = ((0, "first"), (end - LABEL_SIZE, "second"))
    first, second = (_read_label(device, offset, which, oldest) for offset, which in places)
    return LabelCopies((first, second))


def _read_label(device: Device, offset: int, which: str, oldest: int) -> Label | FormatError | PoolError:
    where = f"{device.path}: {which} label"
    if offset < 0:
        return FormatError(f"{where}: the device is too small")
    try:
        return unpack_label(device.read(offset, LABEL_SIZE), where, oldest)
    except (FormatError, PoolError) as error:
        return error
    except DeviceError as error:
        return FormatError(str(error))


def write_labels(
    config: PoolConfig, devices: Sequence[Device], epoch: int, absent: Container[int] = ()
) -> dict[int, str]:
    """Write both copies on every device but those `absent`. All first copies come before the second ones: a crash in
    between leaves one of them whole. Returns the failure of each device."""
    failed: dict[int, str] = {}
    for second in (False, True):
        for device, described in zip(devices, config.devices, strict=True):
            if described.index in absent or described.index in failed:
                continue
            offset = described.size - LABEL_SIZE if second else 0
            try:
                device.write(offset, pack_label(config, described.index, 0 if config.pod else epoch))
            except DeviceError as error:
                failed[described.index] = str(error)
    return failed


def write_label(config: PoolConfig, device: Device, index: int, epoch: int) -> None:
    """Write both copies on one device. DeviceError."""
    for offset in (0, config.devices[index].size - LABEL_SIZE):
        device.write(offset, pack_label(config, index, 0 if config.pod else epoch))


def has_beat(described: DeviceConfig, slot: int = 0) -> bool:
    """Whether there is room for a beat before the zones of a device."""
    return described.zones_offset >= beat_offset(slot) + PAGE_SIZE and not described.removed


def read_beat(device: Device, config: PoolConfig, index: int, slot: int = 0) -> Beat | None:
    """The beat on a device: its user now, or the one that was killed last. In a pod, of a slot. DeviceError."""
    if not has_beat(config.devices[index], slot):
        return None
    page = device.read(beat_offset(slot), PAGE_SIZE)
    return unpack_beat(config.secret, config.uuid, config.devices[index].uuid, page, slot)


def read_beats(device: Device, config: PoolConfig, index: int) -> dict[int, Beat]:
    """The beats on a device, by slot: of all nodes of a pod. DeviceError."""
    count = 1 if config.pod is None else config.pod.nodes
    if not has_beat(config.devices[index], count - 1):
        return {}
    pages, uuid = device.read(BEAT_OFFSET, count * PAGE_SIZE), config.devices[index].uuid
    found: dict[int, Beat] = {}
    for slot in range(count):
        page = pages[slot * PAGE_SIZE : (slot + 1) * PAGE_SIZE]
        beat = unpack_beat(config.secret, config.uuid, uuid, page, slot)
        if beat is not None:
            found[slot] = beat
    return found


def beats_by_label(device: Device) -> tuple[bool, dict[int, Beat]]:
    """Whether there is a kvfs label, and the beats of its pool, by slot. Of an open device whose label alone says which
    pool it is of."""
    try:
        # Older formats too: a pool that this kvfs cannot read may be in use by one that can.
        label = read_labels(device, oldest=1).best() if device.size >= DEVICE_SIZE_MIN else None
        if label is None:
            return False, {}
        config = label.config(f"{device.path}: label")
        return True, read_beats(device, config, label.device_index)
    except (KvfsError, OSError, IndexError):
        return False, {}


def beat_by_label(device: Device) -> tuple[bool, Beat | None]:
    """As beats_by_label(). Of the users of a pod, the one whose beat is the newest."""
    labelled, beats = beats_by_label(device)
    users = [beat for beat in beats.values() if beat.in_use]
    return labelled, max(users, key=lambda beat: beat.written_ns, default=None)
