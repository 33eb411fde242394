"""Devices and pools: what is refused, with the object's name and nothing changed; labels and their second copies."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import struct
import subprocess
from pathlib import Path

import pytest
import xxhash
from store_pools import make_pool

from kvfs.errors import DeviceError, KvfsError, PoolError, UsageError
from kvfs.pool.config import load
from kvfs.pool.format import Label
from kvfs.pool.geometry import LABEL_SIZE
from kvfs.pool.labels import read_labels, write_labels
from kvfs.pool.lock import locked
from kvfs.pool.making import FormatRequest, format_devices, import_pool
from kvfs.pool.opening import open_device, open_pool
from kvfs.pool.signatures import signature
from kvfs.units import format_size

SIZE = 32 << 20


def sparse(path: Path, size: int = SIZE) -> Path:
    with path.open("wb") as file:
        file.truncate(size)
    return path


def patch(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def contents(pool: Path) -> dict[str, bytes]:
    return {str(p.relative_to(pool)): p.read_bytes()[:200_000] for p in sorted(pool.rglob("*")) if p.is_file()}


def refused(pool: Path, message: str, *devices: Path, kind: type[KvfsError] = PoolError) -> None:
    with pytest.raises(kind, match=message) as caught:
        format_devices(FormatRequest(pool=pool, devices=devices))
    assert "\n" not in str(caught.value)
    assert not pool.exists()


@pytest.mark.parametrize(
    ("offset", "magic", "what"),
    [
        (1080, b"\x53\xef", "ext2/3/4"), (0, b"XFSB", "XFS"), (65600, b"_BHRfS_M", "btrfs"),
        (4086, b"SWAPSPACE2", "swap"), (536, b"LVM2 001", "LVM"), (512, b"EFI PART", "GPT"),
        (0, b"LUKS\xba\xbe", "LUKS"),
        (446, b"\0\0\0\0\x83\0\0\0" + struct.pack("<II", 8, 8) + bytes(48) + b"\x55\xaa", "MBR"),
    ],
)  # fmt: skip
def test_a_device_that_holds_something_is_refused(tmp_path: Path, offset: int, magic: bytes, what: str) -> None:
    device = sparse(tmp_path / "d")
    patch(device, offset, magic)
    before = device.read_bytes()[:200_000]
    refused(tmp_path / "pool", f"{device}: holds .*{what}", device)
    assert device.read_bytes()[:200_000] == before


@pytest.mark.parametrize("program", ["mkfs.ext4", "mkfs.xfs", "mkfs.btrfs", "mkswap"])
def test_a_real_filesystem_is_recognized(tmp_path: Path, program: str) -> None:
    tool = shutil.which(program, path=os.environ["PATH"] + ":/sbin:/usr/sbin")
    if tool is None:
        pytest.skip(f"needs {program}")
    device = sparse(tmp_path / "d", 512 << 20)
    if subprocess.run([tool, str(device)], capture_output=True, check=False).returncode:
        pytest.skip(f"{program} cannot do it here")
    opened = open_device(device)
    assert signature(opened) is not None
    opened.close()


def test_an_empty_device_is_taken(tmp_path: Path) -> None:
    devices = [sparse(tmp_path / str(i)) for i in range(2)]
    result = format_devices(FormatRequest(pool=tmp_path / "pool", devices=tuple(devices)))
    assert load(tmp_path / "pool") == result.config
    assert [Path(d.path) for d in result.config.devices] == devices


def test_another_pools_device_is_refused_and_taken_by_force(tmp_path: Path) -> None:
    devices = (sparse(tmp_path / "0"), sparse(tmp_path / "1"))
    format_devices(FormatRequest(pool=tmp_path / "one", devices=devices))
    refused(tmp_path / "two", "label of kvfs pool", *devices)
    patch(devices[0], 0, bytes(4096))
    refused(tmp_path / "two", "second label", devices[0])
    format_devices(FormatRequest(pool=tmp_path / "two", devices=devices, force=True))
    with locked(tmp_path / "one"), pytest.raises(PoolError, match="uuid"):
        open_pool(tmp_path / "one")


def test_a_device_given_twice_missing_or_no_device_is_refused(tmp_path: Path) -> None:
    device = sparse(tmp_path / "d")
    refused(tmp_path / "pool", "given twice", device, tmp_path / "." / "d", kind=UsageError)
    refused(tmp_path / "pool", "No such file", tmp_path / "none", kind=DeviceError)
    refused(tmp_path / "pool", "neither a block device nor a file", tmp_path, kind=DeviceError)
    refused(tmp_path / "pool", "1M; a device needs at least", sparse(tmp_path / "s", 1 << 20), kind=UsageError)


def test_a_directory_in_use_is_not_made_a_pool(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(PoolError, match="not empty"):
        format_devices(FormatRequest(pool=tmp_path, files=1, file_size=SIZE))
    pool = make_pool(tmp_path / "pool")
    with pytest.raises(PoolError, match="holds a kvfs pool"):
        make_pool(pool)
    before = contents(pool)
    with locked(pool), pytest.raises(PoolError, match="in use"):
        make_pool(pool, force=True)
    assert contents(pool) == before


def test_files_may_be_larger_than_the_disk_and_a_note_says_so(tmp_path: Path) -> None:
    disk = os.statvfs(tmp_path)
    size = disk.f_bavail * disk.f_frsize // 4 // SIZE * SIZE + (1 << 30)
    result = format_devices(FormatRequest(pool=tmp_path / "large", files=4, file_size=size))
    note = rf"may grow to {format_size(4 * size)}, and its disk has \d+[KMGT]? free"
    assert any(re.search(note, text) for text in result.notes)
    assert [path.stat().st_size for path in (tmp_path / "large/devices").iterdir()] == [size] * 4
    assert sum(path.stat().st_blocks for path in (tmp_path / "large/devices").iterdir()) * 512 < SIZE
    small = format_devices(FormatRequest(tmp_path / "small", files=1, file_size=SIZE))
    assert not any("may grow" in text for text in small.notes)


def test_a_pool_is_used_by_one_at_a_time(tmp_path: Path) -> None:
    pool = make_pool(tmp_path / "pool")
    with locked(pool), pytest.raises(PoolError, match="in use by another kvfs"), locked(pool):
        pass
    with pytest.raises(PoolError, match="no such pool"), locked(tmp_path / "none"):
        pass
    with pytest.raises(PoolError, match="not a kvfs pool"), locked(tmp_path):
        pass


def open_error(pool: Path, message: str, kind: type[KvfsError] = PoolError) -> None:
    with locked(pool), pytest.raises(kind, match=message) as caught:
        open_pool(pool)
    assert "\n" not in str(caught.value)


def test_a_missing_or_shrunk_device_is_named(tmp_path: Path) -> None:
    pool = make_pool(tmp_path / "pool")
    os.truncate(pool / "devices/1", SIZE // 2)
    open_error(pool, "devices/1.*has shrunk", DeviceError)
    (pool / "devices/1").unlink()
    open_error(pool, "devices/1: No such file", DeviceError)


def test_swapped_devices_are_named(tmp_path: Path) -> None:
    pool = make_pool(tmp_path / "pool")
    (pool / "devices/0").rename(pool / "devices/x")
    (pool / "devices/1").rename(pool / "devices/0")
    (pool / "devices/x").rename(pool / "devices/1")
    open_error(pool, r"device\[0\].uuid")


def test_an_edited_pool_toml_is_an_error_with_both_values(tmp_path: Path) -> None:
    pool = make_pool(tmp_path / "pool")
    text = (pool / "pool.toml").read_text()
    config = load(pool)
    assert config is not None
    zone = config.geometry.zone_size
    (pool / "pool.toml").write_text(text.replace(f"zone_size = {zone}", f"zone_size = {zone // 2}"))
    open_error(pool, f"geometry.zone_size is {zone // 2}, but the label of .* says {zone}")


@pytest.mark.parametrize("which", ["first", "second"])
def test_one_damaged_label_copy_is_not_missed(tmp_path: Path, which: str) -> None:
    pool = make_pool(tmp_path / "pool")
    patch(pool / "devices/0", 100 if which == "first" else SIZE - LABEL_SIZE + 100, b"damage")
    with locked(pool):
        opened = open_pool(pool)
        assert len(opened.notes) == 1 and which in opened.notes[0] and "devices/0" in opened.notes[0]
        write_labels(opened.config, opened.devices, 7)
        opened.close()
        opened = open_pool(pool)
        assert opened.epoch == 7 and not opened.notes
        opened.close()


def test_two_damaged_labels_are_an_error(tmp_path: Path) -> None:
    pool = make_pool(tmp_path / "pool")
    patch(pool / "devices/0", 100, b"damage")
    patch(pool / "devices/0", SIZE - LABEL_SIZE + 100, b"damage")
    open_error(pool, "devices/0: device 0 of the pool has no valid kvfs label", DeviceError)


def test_a_newer_label_is_an_error_even_beside_an_old_copy(tmp_path: Path) -> None:
    """Its checksum is right: it is no damage."""
    pool = make_pool(tmp_path / "pool")
    data = bytearray((pool / "devices/1").read_bytes()[:LABEL_SIZE])
    data[8], data[16:24] = 7, bytes(8)
    data[16:24] = xxhash.xxh3_64_intdigest(bytes(data)).to_bytes(8, "little")
    patch(pool / "devices/1", 0, bytes(data))
    open_error(pool, "format version is 7")


def test_an_older_epoch_that_lands_late_loses(tmp_path: Path) -> None:
    pool = make_pool(tmp_path / "pool")
    with locked(pool):
        opened = open_pool(pool)
        old = (pool / "devices/0").read_bytes()[:LABEL_SIZE]
        write_labels(opened.config, opened.devices, 9)
        patch(pool / "devices/0", 0, old)
        opened.close()
        opened = open_pool(pool)
        assert opened.epoch == 9
        opened.close()


def test_a_deleted_pool_toml_is_written_again_from_the_labels(tmp_path: Path) -> None:
    pool = make_pool(tmp_path / "pool")
    before = (pool / "pool.toml").read_text()
    (pool / "pool.toml").unlink()
    with locked(pool):
        opened = open_pool(pool)
        opened.close()
        assert "written again" in opened.notes[0]
    assert (pool / "pool.toml").read_text() == before


def test_import_finds_devices_that_moved(tmp_path: Path) -> None:
    devices = (sparse(tmp_path / "0"), sparse(tmp_path / "1"))
    made = format_devices(FormatRequest(pool=tmp_path / "pool", devices=devices)).config
    devices[1].rename(tmp_path / "moved")
    with pytest.raises(PoolError, match="device 1 of 2 is missing"):
        import_pool(tmp_path / "new", [devices[0]])
    imported = import_pool(tmp_path / "new", [tmp_path / "moved", devices[0]])
    assert imported.uuid == made.uuid and imported.devices[1].path == str(tmp_path / "moved")
    with locked(tmp_path / "new"):
        open_pool(tmp_path / "new").close()


def test_labels_read_from_both_ends(tmp_path: Path) -> None:
    pool = make_pool(tmp_path / "pool")
    device = open_device(pool / "devices/0")
    first, second = read_labels(device).copies
    assert isinstance(first, Label) and first == second
    device.close()


def test_the_lock_is_not_inherited(tmp_path: Path) -> None:
    pool = make_pool(tmp_path / "pool")
    with locked(pool):
        flags = [
            fcntl.fcntl(int(fd), fcntl.F_GETFD)
            for fd in os.listdir("/proc/self/fd")
            if os.path.realpath(f"/proc/self/fd/{fd}") == str(pool / "lock")
        ]
    assert flags == [fcntl.FD_CLOEXEC]
