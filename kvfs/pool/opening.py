"""Opening devices, and all devices of a pool: claimed, measured, their labels checked against pool.toml and each other.

Blocking calls throughout: for the command line and for the time before a mount answers. Knows labels, not segments.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import uuid as uuids
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

from kvfs.errors import DeviceError, ForeignLabelError, InUseError, KvfsError, PoolError, UsageError
from kvfs.pool import nvme_tcp, owner
from kvfs.pool.config import CONFIG_NAME, DeviceConfig, PoolConfig, compare, load
from kvfs.pool.devices import Device, DeviceAddress, RemoteDevice, Tell, device_address, open_absent, passthrough_error
from kvfs.pool.directory import replace_own
from kvfs.pool.format import NO_NODE, Beat, Label
from kvfs.pool.labels import beat_by_label, read_beats, read_labels
from kvfs.pool.lock import DEVICES_NAME
from kvfs.pool.node import NODE_NAME, Member, load_node
from kvfs.units import counted, told_size


def open_device(
    path: DeviceAddress, *, exclusive: bool = True, shared: bool = False, writable: bool = True,
    holder: Device | None = None, tell: Tell | None = None,
) -> Device:  # fmt: skip
    """Open for direct I/O. A device that is mounted or otherwise claimed is an error when exclusive, unless `holder`,
    which is open, has the claim. `shared`, as by the nodes of a pod: others may have it shared too, and none
    exclusively, where it is a file. DeviceError, InUseError, UsageError."""
    if isinstance(path, str):
        if not nvme_tcp.is_url(path):
            raise passthrough_error(path)
        return _open_remote(path)
    try:
        mode = os.stat(path).st_mode
    except OSError as error:
        raise DeviceError(f"{path}: {os.strerror(error.errno or 0)}") from error
    is_block = stat.S_ISBLK(mode)
    if not is_block and not stat.S_ISREG(mode):
        raise DeviceError(f"{path}: neither a block device nor a file")
    claim = -1
    if holder is not None and holder.claim >= 0 and holder.same(path):
        claim = os.dup(holder.claim)
    elif exclusive and not (shared and is_block):
        claim = _claim(path, is_block, shared, tell)
    flags = (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC
    direct = True
    try:
        try:
            fd = os.open(path, flags | os.O_DIRECT)
        except OSError as error:
            # The file's filesystem has no direct I/O. Without it kvfs is slower, and still right.
            if is_block or error.errno != errno.EINVAL:
                raise
            fd, direct = os.open(path, flags), False
        size = os.lseek(fd, 0, os.SEEK_END)
    except OSError as error:
        if claim >= 0:
            os.close(claim)
        raise DeviceError(f"{path}: {os.strerror(error.errno or 0)}") from error
    return Device(path, fd, size, is_block, direct, claim=claim)


def _open_remote(url: str) -> Device:
    controller = nvme_tcp.Controller(url)
    try:
        if not controller.size:
            raise UsageError(f"{url}: names no namespace (nsid)")
        return RemoteDevice(url, controller.descriptor(), controller.size, True, False, controller)
    except BaseException:
        controller.close()
        raise


def _claim(path: Path, is_block: bool, shared: bool, tell: Tell | None) -> int:
    """A descriptor that keeps others away: by O_EXCL from a block device (open(2)), by flock(2) from a file. A file's
    may be shared."""
    claimed = -1

    def claim() -> bool:
        nonlocal claimed
        try:
            # Readable and writable: flock on NFS asks for that.
            claimed = os.open(path, (os.O_RDONLY | os.O_EXCL if is_block else os.O_RDWR) | os.O_CLOEXEC)
            if not is_block:
                fcntl.flock(claimed, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except OSError as error:
            if claimed >= 0:
                os.close(claimed)
                claimed = -1
            if error.errno in (errno.EBUSY, errno.EWOULDBLOCK):
                return False
            if error.errno in (errno.ENOLCK, errno.EOPNOTSUPP, errno.EROFS, errno.EACCES) and not is_block:
                return True  # a filesystem without locks, or a file that can only be read: the beat has to do
            raise DeviceError(f"{path}: {os.strerror(error.errno or 0)}") from error
        return True

    if claim():
        return claimed
    if label_beat(path)[0]:
        here = owner.this_process()
        found = owner.wait_claim(claim, lambda: label_beat(path)[1], here, tell)
        if found is None:
            return claimed
        who = owner.describe(found, here) if found.owner.int else "in use by another kvfs, or mounted"
        raise InUseError(f"{path}: {who}")
    busy = DeviceError(f"{path}: in use (mounted, or part of another device)")
    busy.errno = errno.EBUSY
    raise busy


def label_beat(path: DeviceAddress) -> tuple[bool, Beat | None]:
    """Whether there is a kvfs label, and the user that the beat names. For devices that others have claimed."""
    try:
        device = open_device(path, exclusive=False, writable=False)
    except KvfsError:
        return False, None
    try:
        return beat_by_label(device)
    finally:
        device.close()


@dataclass(slots=True)
class OpenPool:
    """A pool's devices, checked against its configuration and each other.

    `epoch`: of the last mount by this node; `seen`: of the last by any node of its pod.
    """

    path: Path
    config: PoolConfig
    devices: list[Device]
    epoch: int
    notes: list[str]
    # Devices that could not be opened, or were removed, each with its reason. Their descriptors give nothing.
    absent: dict[int, str] = field(default_factory=dict)
    # Mount epochs in the labels of the other devices; of a pod, in this node's pages.
    epochs: dict[int, int] = field(default_factory=dict)
    # This node's, in a pod.
    slot: int = 0
    node: uuids.UUID = NO_NODE
    seen: int = 0

    @property
    def highest(self) -> int:
        """No number on the devices is of a later mount."""
        return max(self.epoch, self.seen)

    def leave_stale(self, known: int) -> None:
        """Count devices that missed a mount as absent: their content has to be compared first.

        `known`: the last mount that the index knows, 0 if it cannot say. A mount that ended while it wrote the labels
        wrote nothing else, and the index does not know it. The devices that it did not reach missed nothing.
        """
        last = known or self.epoch
        for index, epoch in self.epochs.items():
            if epoch < last:
                what = "label" if self.config.pod is None else "node page"
                self.absent[index] = f"its {what} has mount epoch {epoch}, the pool {last}"
        self.epoch = max(self.epoch, known)

    def close(self) -> None:
        # At once: a controller that is silent has half a second to say that it has shut down.
        with ThreadPoolExecutor(len(self.devices)) as threads:
            for device in self.devices:
                threads.submit(device.close)


def open_pool(
    pool: Path, *, writable: bool = True, degraded: bool = False, tell: Tell | None = None
) -> OpenPool:  # fmt: skip
    """Open and check every device. The caller holds the lock and closes the result. PoolError, DeviceError.

    `degraded`: devices that cannot be opened or read are absent, unless none is left.
    """
    config, notes = load(pool), []
    if config is None:
        config = discover(pool)
        if writable:
            write_config(pool, config)
        notes.append(f"{pool / CONFIG_NAME} was missing; {'written' if writable else 'read'} again from the labels")
    node = own_node(pool, config)
    devices: list[Device] = []
    absent: dict[int, str] = {}
    epochs: dict[int, int] = {}
    labels: list[Label] = []
    seen, failure = 0, None
    try:
        for described in config.devices:
            path = device_path(pool, described)
            if described.removed:
                absent[described.index] = "removed"
                devices.append(open_absent(path))
                continue
            device = None
            try:
                device = open_device(
                    path, exclusive=writable, shared=config.pod is not None, writable=writable, tell=tell
                )
                label, note = check_device(config, device, described, str(pool / CONFIG_NAME))
                epochs[described.index] = label.mount_epoch
                if node is not None:
                    epochs[described.index], highest = read_epochs(device, config, described.index, node.slot)
                    seen = max(seen, highest)
                    labels.append(label)
                notes += note
                devices.append(device)
            except BaseException as error:
                if device is not None:
                    device.close()
                # A device that somebody else uses is not absent: nobody may write around it.
                lost = isinstance(error, DeviceError) and error.errno != errno.EBUSY
                if not degraded or not (lost or isinstance(error, ForeignLabelError)):
                    raise
                failure = failure or error
                absent[described.index] = str(error)
                devices.append(open_absent(path))
        if failure is not None and len(absent) == len(devices):
            raise failure
        latest = latest_config(config, [label.config(f"{pool}: label") for label in labels])
        if latest != config and writable:
            write_config(pool, latest)
    except BaseException:
        for device in devices:
            device.close()
        raise
    epoch = max(epochs.values(), default=0)
    if node is None:
        return OpenPool(pool, latest, devices, epoch, notes, absent, epochs)
    return OpenPool(pool, latest, devices, epoch, notes, absent, epochs, node.slot, node.uuid, seen)


def read_epochs(device: Device, config: PoolConfig, index: int, slot: int) -> tuple[int, int]:
    """Of a pod's device: the last mount of a slot that it took part in, and the last of any. DeviceError."""
    beats = read_beats(device, config, index)
    mounted = beats[slot].mounted if slot in beats else 0
    return mounted, max((beat.epoch for beat in beats.values()), default=0)


def own_node(pool: Path, config: PoolConfig) -> Member | None:
    """The node of a pod that this directory belongs to; None if the pool is no pod. PoolError."""
    if config.pod is None:
        return None
    node = load_node(pool)
    if node is None or node.slot is None:
        raise PoolError(f"{pool}: this node has no slot in the pod yet: kvfs mount, or kvfs pod join {pool}")
    if node.slot >= config.pod.nodes:
        raise PoolError(f"{pool / NODE_NAME}: slot is {node.slot}; the pod has {counted(config.pod.nodes, 'node')}")
    return Member(node.slot, node.uuid)


def latest_config(config: PoolConfig, labels: Sequence[PoolConfig]) -> PoolConfig:
    """A pod's description with other nodes' changes since: the paths are kept. A slot is retired if it is so in any
    label."""
    if config.pod is None:
        return config
    newest = max([config, *labels], key=lambda found: found.revision)
    pods = [found.pod for found in (config, *labels) if found.pod is not None]
    assert newest.pod is not None
    pod = replace(
        newest.pod, password_file=config.pod.password_file,
        retired=tuple(sorted({slot for found in pods for slot in found.retired})),
    )  # fmt: skip
    devices = tuple(
        replace(device, path=own.path) for device, own in zip(newest.devices, config.devices, strict=True)
    )  # fmt: skip
    return replace(newest, pod=pod, devices=devices)


def check_device(config: PoolConfig, device: Device, described: DeviceConfig, origin: str) -> tuple[Label, list[str]]:
    """The device's best label, checked against pool.toml, and notes about the other copy."""
    if device.size < described.size:
        raise DeviceError(
            f"{device.path}: {told_size(device.size)}, but {origin} says {told_size(described.size)}: "
            f"device {described.index} has shrunk"
        )
    found = read_labels(device, described.size)
    other = found.other_version()
    if other is not None:
        raise other
    label = found.best()
    if label is None:
        raise DeviceError(
            f"{device.path}: device {described.index} of the pool has no valid kvfs label: {found.copies[0]}"
        )
    if label.pool_uuid != config.uuid:
        raise ForeignLabelError(
            f"{origin}: uuid is {config.uuid}, but the label of {device.path} says {label.pool_uuid}: "
            f"{_replace_advice(described.index)}"
        )
    if label.device_uuid != described.uuid:
        # If the label is of another device of this pool, paths were mixed up and can be put right. Else it was one
        # once.
        known = any(label.device_uuid == other.uuid for other in config.devices)
        raise (PoolError if known else ForeignLabelError)(
            f"{origin}: device[{described.index}].uuid is {described.uuid}, but the label of {device.path} says "
            f"{label.device_uuid} (device {label.device_index})"
            + (": put the paths right" if known else f": {_replace_advice(described.index)}")
        )
    described_there = label.config(f"{device.path}: label")
    same_devices = len(described_there.devices) == len(config.devices)
    if described_there.revision > config.revision and not (config.pod is not None and same_devices):
        raise PoolError(
            f"{origin}: revision is {config.revision}, but the label of {device.path} has {described_there.revision}: "
            "remove the file, and mount or import the pool by its labels"
        )
    # Devices were added, removed or replaced while this one was away.
    own = described.index if described_there.revision != config.revision else None
    compare(config, origin, described_there, f"the label of {device.path}", own)
    return label, [f"{copy}; the other copy is used" for copy in found.copies if not isinstance(copy, Label)]


def _replace_advice(index: int) -> str:
    return (
        f"give pool.toml the path of the right device, or `kvfs device replace POOL {index} PATH` a new one, with "
        f"--force this one, or `kvfs device remove POOL {index}`"
    )


def discover(pool: Path) -> PoolConfig:
    """The configuration from the labels of the devices in the pool's own directory."""
    directory = pool / DEVICES_NAME
    candidates = sorted(directory.iterdir()) if directory.is_dir() else []
    if not candidates:
        raise PoolError(
            f"{pool}: no {CONFIG_NAME} and no devices in {directory}; use `kvfs import POOL --device PATH ...`"
        )
    return config_from_labels(candidates, pool)


def config_from_labels(paths: Sequence[DeviceAddress], pool: Path) -> PoolConfig:
    """The configuration that the labels of these devices agree on, with their present paths. PoolError."""
    found: dict[int, tuple[DeviceAddress, Label]] = {}
    for path in paths:
        device = open_device(path, exclusive=False, writable=False)
        try:
            copies = read_labels(device)
            label = copies.best()
            if label is None:
                raise copies.other_version() or PoolError(f"{path}: no valid kvfs label")
        finally:
            device.close()
        other = found.get(label.device_index)
        if other is not None:
            raise PoolError(f"{path}: says it is device {label.device_index}, and so does {other[0]}")
        found[label.device_index] = (path, label)
    # The label with the latest description; of several the first.
    first_path, first = max(
        (found[index] for index in sorted(found)), key=lambda item: item[1].config(str(item[0])).revision
    )
    config = first.config(f"{first_path}: label")
    for path, label in found.values():
        own = label.config(f"{path}: label")
        older = label.device_index if own.revision < config.revision else None
        compare(own, f"{path}: label", config, f"the label of {first_path}", older)
    missing = [device.index for device in config.devices if device.index not in found and not device.removed]
    if missing:
        listed = ", ".join(str(index) for index in missing)
        raise PoolError(f"pool {config.uuid}: device {listed} of {len(config.devices)} is missing")
    devices = tuple(
        device if device.index not in found else replace(device, path=stored_path(found[device.index][0], pool))
        for device in config.devices
    )
    return latest_config(
        replace(config, devices=devices), [label.config(f"{path}: label") for path, label in found.values()]
    )


def device_path(pool: Path, device: DeviceConfig) -> DeviceAddress:
    """Relative paths are relative to the pool."""
    place = device_address(device.path)
    return pool / place if isinstance(place, Path) else place


def stored_path(path: DeviceAddress, pool: Path) -> str:
    """The path for pool.toml: relative inside the pool, absolute outside."""
    if isinstance(path, str):
        return path
    absolute, base = Path(os.path.abspath(path)), Path(os.path.abspath(pool))
    return os.fspath(absolute.relative_to(base) if absolute.is_relative_to(base) else absolute)


def write_config(pool: Path, config: PoolConfig) -> None:
    """Replace pool.toml, durably."""
    replace_own(pool / CONFIG_NAME, config.dump().encode())
