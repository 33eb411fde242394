"""Making and changing pools: `kvfs format`, new devices for a pool, and a pool.toml again from labels.

Each refuses all that it can refuse before anything changes. Blocking calls, for the command line.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from kvfs.errors import DeviceError, InUseError, PoolError, UsageError
from kvfs.index.lmdb import LmdbIndex
from kvfs.pool import owner
from kvfs.pool.config import CONFIG_NAME, PoolConfig, new_config
from kvfs.pool.devices import DEVICE_SIZE_MIN, Device, DeviceAddress
from kvfs.pool.directory import LOCK_NAME, check_owner
from kvfs.pool.format import META_CLEAN, META_UUID, Beat
from kvfs.pool.geometry import DEVICES_MAX, Geometry, choose_geometry
from kvfs.pool.labels import beats_by_label, write_labels
from kvfs.pool.lock import DEVICES_NAME, INDEX_NAME, locked, pool_lock
from kvfs.pool.node import NODE_NAME
from kvfs.pool.opening import config_from_labels, open_device, open_pool, stored_path, write_config
from kvfs.pool.pod import (
    POD_SEGMENT_PAGES_MAX,
    PodConfig,
    check_pod,
    check_room,
    choose_lot,
    refuse_change,
    zones_offset,
)
from kvfs.pool.signatures import signature
from kvfs.types import PAGE_SIZE
from kvfs.units import counted, format_size, told_size


@dataclass(frozen=True, slots=True)
class FormatRequest:
    """`kvfs format`: existing devices, or `files` sparse files of `file_size` bytes in the pool."""

    pool: Path
    devices: tuple[DeviceAddress, ...] = ()
    files: int = 0
    file_size: int = 0
    stripe_width: int | None = None
    stripe_unit: int | None = None
    segment_size: int | None = None
    force: bool = False
    # Of a pool that is a pod. A lot of 0 segments is chosen by the pool's size.
    pod: PodConfig | None = None
    # Check everything, and write nothing.
    dry_run: bool = False

    @property
    def zones_offset(self) -> int:
        return zones_offset(1 if self.pod is None else self.pod.nodes)

    @property
    def nodes(self) -> int:
        return 1 if self.pod is None else self.pod.nodes


@dataclass(frozen=True, slots=True)
class FormatResult:
    config: PoolConfig
    notes: tuple[str, ...]


def format_devices(request: FormatRequest) -> FormatResult:
    """Make the pool's directory, devices, labels and pool.toml. All refusals come before the first change."""
    pool = request.pool
    if request.pod is not None:
        try:
            check_pod(replace(request.pod, lot=request.pod.lot or 1), "pod create")
        except PoolError as error:
            raise UsageError(str(error)) from error
    _check_directory(pool, request.force)
    if request.files:
        sizes = [request.file_size] * request.files
        _check_files(request)
        geometry, notes = choose_geometry(
            sizes, stripe_width=request.stripe_width, stripe_unit=request.stripe_unit, segment_size=request.segment_size
        )
        paths = [pool / DEVICES_NAME / str(index) for index in range(request.files)]
        if request.dry_run:
            for old in filter(Path.exists, paths):
                _check_old_file(old)
            notes += _room(pool if pool.exists() else pool.parent, sum(sizes))
            return FormatResult(_described(request, geometry, [(str(path), request.file_size) for path in paths]),
                                tuple(notes))  # fmt: skip
        created = not pool.exists()
        pool.mkdir(mode=0o700, exist_ok=True)
        try:
            with pool_lock(pool, "being formatted"):
                for old in filter(Path.exists, paths):
                    _check_old_file(old)
                _make_files(paths, request.file_size)
                notes += _room(pool, sum(sizes))
                made = [open_device(path) for path in paths]
                return _write_pool(request, _new_config(request, geometry, made), notes, made)
        except BaseException:
            if created:
                shutil.rmtree(pool, ignore_errors=True)
            raise
    opened: list[Device] = []
    try:
        for path in request.devices:
            if any(other.same(path) for other in opened):
                raise UsageError(f"{path}: given twice")
            device = open_device(path)
            opened.append(device)
            if device.size < DEVICE_SIZE_MIN:
                raise UsageError(
                    f"{path}: {told_size(device.size)}; a device needs at least {told_size(DEVICE_SIZE_MIN)}"
                )
            _check_content(device, request.force)
        geometry, notes = choose_geometry(
            [device.size for device in opened], stripe_width=request.stripe_width, stripe_unit=request.stripe_unit,
            segment_size=request.segment_size, zones_offset=request.zones_offset, nodes=request.nodes,
        )  # fmt: skip
        if 1 < geometry.stripe_width == len(opened):
            notes.append(
                f"stripe width {geometry.stripe_width} of {counted(len(opened), 'device')}: each segment lies on all "
                "of them, so one that fails takes the whole cache, and writes fail until it is back; "
                f"--stripe-width {geometry.stripe_width - 1} leaves some of it"
            )
        config = _new_config(request, geometry, opened)
        if request.dry_run:
            return FormatResult(config, tuple(notes))
        pool.mkdir(mode=0o700, exist_ok=True)
        with pool_lock(pool, "being formatted"):
            return _write_pool(request, config, notes, opened)
    finally:
        for device in opened:
            with suppress(OSError):
                device.close()


def _check_content(device: Device, force: bool, me: Beat | None = None) -> None:
    """Check that a device may be overwritten: its content with `force` alone, a device in use never."""
    what = None if force else signature(device)
    if what is not None:
        raise PoolError(f"{device.path}: holds {what}; use --force to overwrite it")
    check_unused(device, me)


def check_unused(
    device: Device, me: Beat | None = None, slot: int | None = None, dead: Beat | None = None
) -> None:  # fmt: skip
    """Check that only `me` uses the pool whose label a device has. In a pod, no node, or not that of `slot`. `dead`: of
    owner.Watch. InUseError."""
    here = me or owner.this_process()

    def read() -> dict[int, Beat]:
        _, beats = beats_by_label(device)
        return beats if slot is None else {slot: beats[slot]} if slot in beats else {}

    try:
        # A claim on a device that more than one may have says nothing of other nodes.
        owner.wait_free(read, here, {0: device.claim >= 0 and slot is None}, dead=dead)
    except InUseError as error:
        raise InUseError(f"{device.path}: {error}") from error


def _check_old_file(path: Path) -> None:
    """Check that nobody uses the file that is about to go: another pool's directory may lead to it."""
    device = open_device(path)
    try:
        check_unused(device)
    finally:
        device.close()


def _new_config(request: FormatRequest, geometry: Geometry, opened: list[Device]) -> PoolConfig:
    """UsageError if a pod has no room for its nodes."""
    return _described(request, geometry, [(stored_path(device.path, request.pool), device.size) for device in opened])


def _described(request: FormatRequest, geometry: Geometry, devices: list[tuple[str, int]]) -> PoolConfig:
    config, pod = new_config(geometry, devices, request.zones_offset), request.pod
    if pod is None:
        return config
    count = config.segment_count
    pod = replace(pod, lot=pod.lot or choose_lot(count, pod.nodes))
    check_room(pod, count, "pod create")
    if geometry.segment_pages > POD_SEGMENT_PAGES_MAX:
        raise UsageError(f"--segment-size: {format_size(POD_SEGMENT_PAGES_MAX * PAGE_SIZE)} is the most in a pod")
    return replace(config, pod=pod)


def _write_pool(request: FormatRequest, config: PoolConfig, notes: list[str], opened: list[Device]) -> FormatResult:
    try:
        # The index of a pool that was here before describes other blocks.
        shutil.rmtree(request.pool / INDEX_NAME, ignore_errors=True)
        (request.pool / NODE_NAME).unlink(missing_ok=True)
        for failed in write_labels(config, opened, 0).values():
            raise DeviceError(failed)
        make_index(request.pool / INDEX_NAME, config)
    finally:
        if request.files:
            for device in opened:
                device.close()
    write_config(request.pool, config)
    return FormatResult(config, tuple(notes))


def make_index(path: Path, config: PoolConfig) -> None:
    """Make an empty index, so that the first mount has nothing to rebuild."""
    index = LmdbIndex(path)
    try:
        index.meta_put(META_UUID, config.uuid.bytes)
        index.meta_put(META_CLEAN, b"1")
        index.commit_now()
    finally:
        index.close()


def _check_directory(pool: Path, force: bool) -> None:
    if pool.exists() and not pool.is_dir():
        raise PoolError(f"{pool}: not a directory")
    if not pool.exists():
        if not pool.parent.is_dir():
            raise PoolError(f"{pool}: {pool.parent} is not a directory")
        return
    check_owner(pool)
    if (pool / LOCK_NAME).exists():
        with pool_lock(pool, "being formatted"):
            pass
    if force:
        return
    if (pool / CONFIG_NAME).exists():
        raise PoolError(f"{pool}: holds a kvfs pool; use --force to overwrite it")
    if any(entry.name != LOCK_NAME for entry in pool.iterdir()):
        raise PoolError(f"{pool}: not empty; use --force to make a pool there all the same")


def _check_files(request: FormatRequest) -> None:
    size, count = request.file_size, request.files
    if not 1 <= count <= DEVICES_MAX:
        raise UsageError(f"--files: {count}; 1 to {DEVICES_MAX} are possible")
    if size < DEVICE_SIZE_MIN or size % PAGE_SIZE:
        raise UsageError(
            f"--size: {told_size(size)}; it must be a multiple of {PAGE_SIZE}, at least {told_size(DEVICE_SIZE_MIN)}"
        )


def _room(pool: Path, size: int) -> list[str]:
    """A note, if the disk below sparse files has less room than they may grow to."""
    disk = os.statvfs(pool)
    free = disk.f_bavail * disk.f_frsize
    if size <= free:
        return []
    unit = 30 if free >= 10 << 30 else 20
    return [
        f"{pool}: the pool may grow to {format_size(size)}, and its disk has {format_size(free >> unit << unit)} free: "
        "writes that find the disk full fail (ENOSPC)"
    ]


def _make_files(paths: Sequence[Path], size: int) -> None:
    """Sparse files: they take disk space as the pool fills."""
    try:
        paths[0].parent.mkdir(mode=0o700, exist_ok=True)
        for path in paths:
            path.unlink(missing_ok=True)
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                os.ftruncate(fd, size)
            finally:
                os.close(fd)
    except OSError as error:
        raise PoolError(f"{paths[0].parent}: {os.strerror(error.errno or 0)}") from error


def add_devices(pool: Path, paths: Sequence[DeviceAddress], *, force: bool) -> tuple[PoolConfig, PoolConfig]:
    """Add devices to an unused pool: new segments on them alone. Returns the pool as it was and as it is.

    The new devices' labels come first, then pool.toml, then the labels of the others. A reader in between finds the
    pool as it was, or labels that their revision shows to be older.
    """
    with locked(pool, "being given devices") as lock:
        opened = open_pool(pool)
        fresh: list[Device] = []
        try:
            config, geometry = opened.config, opened.config.geometry
            refuse_change(config.pod, "add")
            for index, device in enumerate(opened.devices):
                if index not in opened.absent:
                    check_unused(device, dead=lock.left)
            for path in paths:
                fresh.append(open_new(path, [*opened.devices, *fresh], force=force))
            first, group = len(config.devices), 1 + max(device.group for device in config.devices)
            added = new_config(geometry, [(stored_path(device.path, pool), device.size) for device in fresh]).devices
            changed = replace(
                config, revision=config.revision + 1,
                devices=(*config.devices, *(replace(d, index=first + d.index, group=group) for d in added)),
            )  # fmt: skip
            if len(changed.devices) > DEVICES_MAX:
                raise UsageError(f"{counted(len(changed.devices), 'device')}: at most {DEVICES_MAX} are possible")
            if changed.segment_count == config.segment_count:
                raise UsageError(
                    f"{counted(len(fresh), 'device')}: a segment needs {geometry.stripe_width}, with a zone of "
                    f"{format_size(geometry.zone_size)} on each: add that many at a time"
                )
            devices = [*opened.devices, *fresh]
            new, old = range(first, len(devices)), range(first)
            for absent in (old, new):
                if absent is new:
                    write_config(pool, changed)
                for failed in write_labels(changed, devices, opened.epoch, {*absent, *opened.absent}).values():
                    raise DeviceError(failed)
            return config, changed
        finally:
            for device in fresh:
                device.close()
            opened.close()


def open_new(
    path: DeviceAddress, others: Sequence[Device], *, force: bool, old: Device | None = None, me: Beat | None = None
) -> Device:  # fmt: skip
    """A device that is to become one of a pool, in the place of `old`, which is `me`'s. UsageError, PoolError,
    DeviceError."""
    if any(other.same(path) for other in others):
        raise UsageError(f"{path}: is a device of this pool, or given twice")
    device = open_device(path, holder=old)
    try:
        if device.size < DEVICE_SIZE_MIN:
            raise UsageError(f"{path}: {told_size(device.size)}; a device needs at least {told_size(DEVICE_SIZE_MIN)}")
        _check_content(device, force, me)
    except BaseException:
        device.close()
        raise
    return device


def import_pool(pool: Path, paths: Sequence[DeviceAddress]) -> PoolConfig:
    """Write pool.toml again from the labels of the devices at `paths`. All refusals come before the first change."""
    if (pool / CONFIG_NAME).exists():
        raise PoolError(f"{pool / CONFIG_NAME}: exists; remove it first to import")
    config = config_from_labels(paths, pool)
    pool.mkdir(mode=0o700, exist_ok=True)
    with pool_lock(pool, "being imported"):
        write_config(pool, config)
    return config
