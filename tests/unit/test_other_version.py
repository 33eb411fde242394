"""A pool of format 1, which this kvfs cannot read: it says so by version, and overwrites nothing that nobody forced.

The pool is a double, made by bytes: labels and pool.toml were in format 1 what they are now, but for their version.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import xxhash
from helpers import slowness
from store_pools import make_pool

from kvfs.errors import InUseError, OtherVersionError, PoolError
from kvfs.pool import owner
from kvfs.pool.config import CONFIG_NAME, PoolConfig, load
from kvfs.pool.format import BEAT_OFFSET, FORMAT_VERSION, pack_beat, pack_label, unpack_label
from kvfs.pool.geometry import LABEL_SIZE
from kvfs.pool.lock import INDEX_NAME, locked
from kvfs.pool.making import FormatRequest, format_devices, import_pool
from kvfs.pool.opening import open_pool

SAYS = "version is 1: a pool of format 1, and this kvfs reads format 2"


def label_of_format_1(config: PoolConfig, index: int, *, text_version: int = 1) -> bytes:
    data = bytearray(pack_label(config, index, 7))
    at = data.index(b"version = 2\n")
    data[at : at + 12] = b"version = %d\n" % text_version
    data[8:12] = (1).to_bytes(4, "little")
    data[16:24] = bytes(8)
    data[16:24] = xxhash.xxh3_64_intdigest(bytes(data)).to_bytes(8, "little")
    return bytes(data)


def patch(path: Path, offset: int, data: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(data)


def make_older(pool: Path, copies: tuple[int, ...] = (0, 1)) -> PoolConfig:
    """Labels of format 1 on all devices of a pool; `copies` of each."""
    config = load(pool)
    assert config is not None
    for device in config.devices:
        for copy in copies:
            patch(pool / device.path, copy * (device.size - LABEL_SIZE), label_of_format_1(config, device.index))
    return config


def set_text_version(pool: Path, version: int) -> None:
    text = (pool / CONFIG_NAME).read_text()
    assert "version = 2\n" in text
    (pool / CONFIG_NAME).write_text(text.replace("version = 2\n", f"version = {version}\n"))


@pytest.fixture
def older(tmp_path: Path) -> Path:
    pool = make_pool(tmp_path / "pool")
    make_older(pool)
    set_text_version(pool, 1)
    return pool


def contents(pool: Path) -> dict[str, bytes]:
    return {str(p.relative_to(pool)): p.read_bytes() for p in sorted(pool.rglob("*")) if p.is_file()}


@contextmanager
def nothing_changed(pool: Path) -> Iterator[None]:
    before = contents(pool)
    yield
    assert contents(pool) == before


def refused(pool: Path, message: str, kind: type[PoolError] = OtherVersionError) -> None:
    with nothing_changed(pool), pytest.raises(kind, match=message) as caught, locked(pool):
        open_pool(pool)
    assert "\n" not in str(caught.value) and str(pool) in str(caught.value)


def test_pool_toml_of_format_1_is_refused_by_version(older: Path) -> None:
    refused(older, SAYS)


def test_labels_of_format_1_are_refused_by_version(tmp_path: Path) -> None:
    """pool.toml alone was made anew, or its version was changed by hand."""
    pool = make_pool(tmp_path / "pool")
    make_older(pool)
    refused(pool, f"devices/0: first label: {SAYS}")


@pytest.mark.parametrize("copy", [0, 1])
def test_one_copy_of_format_1_stops_everything(tmp_path: Path, copy: int) -> None:
    pool = make_pool(tmp_path / "pool")
    make_older(pool, (copy,))
    refused(pool, f"devices/0: {('first', 'second')[copy]} label: {SAYS}")


@pytest.mark.parametrize("copy", [0, 1])
@pytest.mark.parametrize("bit", range(32))
def test_a_bit_that_flips_in_the_version_of_one_copy_is_damage(tmp_path: Path, copy: int, bit: int) -> None:
    """A pool whose other copies are right was refused as one of "format version 8194"."""
    pool = make_pool(tmp_path / "pool")
    config = load(pool)
    assert config is not None
    device = config.devices[0]
    version = FORMAT_VERSION ^ 1 << bit
    patch(pool / device.path, copy * (device.size - LABEL_SIZE) + 8, version.to_bytes(4, "little"))
    with locked(pool):
        opened = open_pool(pool)
        opened.close()
    assert len(opened.notes) == 1 and "the other copy is used" in opened.notes[0], opened.notes


def test_both_copies_of_a_newer_version_are_refused_whatever_their_checksum(tmp_path: Path) -> None:
    pool = make_pool(tmp_path / "pool")
    config = load(pool)
    assert config is not None
    device = config.devices[0]
    for copy in (0, 1):
        patch(pool / device.path, copy * (device.size - LABEL_SIZE) + 8, (3).to_bytes(4, "little"))
    refused(pool, "devices/0: first label: the label's format version is 3; this kvfs knows up to 2")


def test_without_pool_toml_the_labels_of_format_1_say_it(older: Path) -> None:
    (older / CONFIG_NAME).unlink()
    with nothing_changed(older), pytest.raises(OtherVersionError, match=SAYS), locked(older):
        open_pool(older)
    devices = tuple(sorted((older / "devices").iterdir()))
    with pytest.raises(PoolError, match=SAYS):
        import_pool(older, devices)


def test_a_label_that_contradicts_itself_is_refused(tmp_path: Path) -> None:
    pool = make_pool(tmp_path / "pool")
    config = load(pool)
    assert config is not None
    data = bytearray(pack_label(config, 0, 7))
    at = data.index(b"version = 2\n")
    data[at : at + 12] = b"version = 1\n"
    data[16:24] = bytes(8)
    data[16:24] = xxhash.xxh3_64_intdigest(bytes(data)).to_bytes(8, "little")
    with pytest.raises(OtherVersionError, match=SAYS):
        unpack_label(bytes(data), "nvme1: first label")
    # Of format 1 with a text of format 2: no kvfs wrote it, and it is not read as either.
    with pytest.raises(OtherVersionError, match=SAYS):
        unpack_label(label_of_format_1(config, 0, text_version=2), "nvme1: first label")


def test_format_sees_a_pool_of_format_1_and_overwrites_it_by_force_alone(older: Path, tmp_path: Path) -> None:
    config = load_older(older)
    devices = tuple(older / device.path for device in config.devices)
    for request, says in (
        (FormatRequest(older, files=2, file_size=32 << 20), "holds a kvfs pool; use --force"),
        (FormatRequest(tmp_path / "new", devices), f"label of kvfs pool {config.uuid}, of format 1; use --force"),
    ):
        with nothing_changed(older), pytest.raises(PoolError, match=says):
            format_devices(request)
    # A first label that is gone: the second one is enough.
    patch(devices[0], 0, bytes(LABEL_SIZE))
    with nothing_changed(older), pytest.raises(PoolError, match="second label of a kvfs pool; use --force"):
        format_devices(FormatRequest(tmp_path / "new", devices[:1]))
    format_devices(FormatRequest(tmp_path / "new", devices, force=True))
    with locked(tmp_path / "new"):
        opened = open_pool(tmp_path / "new")
        assert opened.config.uuid != config.uuid
        opened.close()
    # The other pool is still refused, by its pool.toml.
    refused(older, SAYS)


def test_a_pool_of_format_1_becomes_one_of_format_2_by_force(older: Path) -> None:
    (older / INDEX_NAME / "data.mdb").write_bytes(b"of another time")
    format_devices(FormatRequest(older, files=2, file_size=32 << 20, force=True))
    with locked(older):
        open_pool(older).close()


def load_older(pool: Path) -> PoolConfig:
    return unpack_label((pool / "devices/0").read_bytes()[:LABEL_SIZE], "label", oldest=1).config("label")


@contextmanager
def beating(pool: Path, config: PoolConfig) -> Iterator[None]:
    """The daemon of another machine, which has the pool mounted with an older kvfs."""
    elsewhere = replace(owner.this_process(7), machine=b"m" * 16, boot=b"b" * 16, host="elsewhere", interval_ms=200)
    begun, over = threading.Event(), threading.Event()

    def beat() -> None:
        number = 0
        while not over.wait(0.05):
            number += 1
            for device in config.devices:
                page = pack_beat(config.secret, config.uuid, device.uuid, replace(elsewhere, number=number))
                patch(pool / device.path, BEAT_OFFSET, page)
            begun.set()

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        assert begun.wait(60 * slowness())
        yield
    finally:
        over.set()
        thread.join()


@pytest.mark.parametrize("request_of", [
    pytest.param(lambda pool, devices: FormatRequest(pool, files=2, file_size=32 << 20, force=True), id="in place"),
    pytest.param(lambda pool, devices: FormatRequest(pool.parent / "new", devices, force=True), id="devices"),
])  # fmt: skip
def test_a_pool_of_format_1_that_an_older_kvfs_uses_is_not_overwritten_even_by_force(
    older: Path, request_of: Callable[[Path, tuple[Path, ...]], FormatRequest]
) -> None:
    config = load_older(older)
    devices = tuple(older / device.path for device in config.devices)
    with beating(older, config), pytest.raises(InUseError, match="elsewhere"):
        format_devices(request_of(older, devices))
    assert load_older(older).uuid == config.uuid
