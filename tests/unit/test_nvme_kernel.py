"""The kernel's sysfs on NVMe namespaces, and devices that were used by NVMe passthrough."""

from __future__ import annotations

from pathlib import Path

import pytest
from store_pools import make_pool

from kvfs import doctor
from kvfs.errors import UsageError
from kvfs.pool import nvme_kernel
from kvfs.pool.config import load
from kvfs.pool.devices import device_address
from kvfs.pool.opening import open_device, open_pool


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def add_controller(path: Path, transport: str, state: str, address: str) -> None:
    for name, text in (("transport", transport), ("state", state), ("address", address), ("subsysnqn", "nqn.a")):
        write(path / name, text)


def add_block(sysfs: Path, owner: Path, name: str, cache: str) -> None:
    for attribute, text in (("logical_block_size", "4096"), ("max_hw_sectors_kb", "512"), ("write_cache", cache)):
        write(owner / name / "queue" / attribute, text)
    (owner / name / "device").symlink_to(owner)
    (sysfs / "class/block").mkdir(parents=True, exist_ok=True)
    (sysfs / "class/block" / name).symlink_to(owner / name)


@pytest.fixture
def sysfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(nvme_kernel, "SYSFS", tmp_path)
    return tmp_path


def test_a_pcie_namespace(sysfs: Path) -> None:
    controller = sysfs / "devices/pci/nvme/nvme0"
    add_controller(controller, "pcie", "live", "0000:00:04.0")
    add_block(sysfs, controller, "nvme0n1", "write back")
    add_block(sysfs, controller, "nvme0n1p1", "write back")
    [found] = nvme_kernel.namespaces()
    assert found.text == "pcie, nqn.a, blocks of 4096 bytes, MDTS 512 KiB, volatile write cache, no multipath"
    assert found == nvme_kernel.namespace_at("/dev/nvme0n1") and nvme_kernel.namespace_at("/dev/sda") is None
    assert ("nvme0n1", "ok") in {(check.name, check.state) for check in doctor.examine()}


def test_a_namespace_of_several_paths(sysfs: Path) -> None:
    """Two lead to it, of three controllers of the subsystem."""
    subsystem = sysfs / "devices/virtual/nvme-subsystem/nvme-subsys0"
    write(subsystem / "subsysnqn", "nqn.a")
    write(subsystem / "iopolicy", "round-robin")
    for number, state in ((0, "live"), (1, "connecting"), (2, "live")):
        add_controller(sysfs / f"devices/nvme{number}", "tcp", state, f"traddr=10.0.0.{number}")
        (subsystem / f"nvme{number}").symlink_to(sysfs / f"devices/nvme{number}")
    for number in (0, 1):
        (sysfs / f"devices/nvme{number}/nvme0c{number}n1").mkdir()
    add_block(sysfs, subsystem, "nvme0n1", "write through")
    [found] = nvme_kernel.namespaces()
    assert found.reachable and found.text == (
        "tcp, nqn.a, blocks of 4096 bytes, MDTS 512 KiB, no volatile write cache, "
        "multipath (round-robin): nvme0 live traddr=10.0.0.0, nvme1 connecting traddr=10.0.0.1"
    )
    write(sysfs / "devices/nvme0/state", "connecting")
    assert not nvme_kernel.namespaces()[0].reachable


@pytest.mark.parametrize(
    ("place", "block"),
    [("ng:/dev/ng0n1", "/dev/nvme0n1,"), ("ng:/dev/ng12n3", "/dev/nvme12n3,"), ("ng:/dev/null", "/dev/null,")],
)
def test_passthrough_is_refused_and_the_block_device_named(place: str, block: str) -> None:
    with pytest.raises(UsageError, match="no longer has NVMe passthrough") as caught:
        open_device(device_address(place))
    assert str(caught.value).startswith(f"{place}: ") and block in str(caught.value)


def test_a_pool_with_such_a_device_is_not_opened_without_it(tmp_path: Path) -> None:
    """The block device has its content: the pool is whole."""
    pool = make_pool(tmp_path / "pool")
    description = pool / "pool.toml"
    text = description.read_text()
    found = load(pool)
    assert found is not None and text.count(f'"{found.devices[1].path}"') == 1
    description.write_text(text.replace(f'"{found.devices[1].path}"', '"ng:/dev/ng1n1"'))
    for degraded in (False, True):
        with pytest.raises(UsageError, match="name the block device, /dev/nvme1n1,"):
            open_pool(pool, degraded=degraded)
    assert [
        check for check in doctor.examine([str(pool)]) if "/dev/nvme1n1" in check.found and check.state == "missing"
    ]
