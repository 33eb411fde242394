"""NVMe namespaces that the kernel has, PCIe or fabrics: their devices and their description in sysfs.

Sources: Documentation/ABI/stable/sysfs-block and drivers/nvme/host/{core,sysfs,multipath}.c of the kernel. With its
multipath a namespace's block device belongs to a subsystem, to which several controllers lead; otherwise to a
controller.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SYSFS = Path("/sys")
_NAME = re.compile(r"nvme(\d+)n(\d+)")


@dataclass(frozen=True, slots=True)
class Controller:
    """A way to a namespace."""

    name: str
    transport: str
    state: str
    address: str


@dataclass(frozen=True, slots=True)
class Namespace:
    name: str
    nqn: str
    block_size: int
    transfer_size: int  # largest of one command: MDTS, or the driver's limit
    write_cache: bool
    policy: str  # policy that chooses among paths; empty: no multipath
    controllers: tuple[Controller, ...]

    @property
    def text(self) -> str:
        """In one line."""
        transports = "/".join(sorted({controller.transport for controller in self.controllers}))
        paths = "no multipath"
        if self.policy:
            listed = ", ".join(f"{one.name} {one.state} {one.address}".strip() for one in self.controllers)
            paths = f"multipath ({self.policy}): {listed or 'no path'}"
        limits = limits_text(self.block_size, self.transfer_size, self.write_cache)
        return f"{transports or 'no controller'}, {self.nqn}, {limits}, {paths}"

    @property
    def reachable(self) -> bool:
        return any(controller.state == "live" for controller in self.controllers)


def limits_text(block_size: int, transfer_size: int, write_cache: bool) -> str:
    """The text is the same for namespaces of every transport."""
    cache = "" if write_cache else "no "
    return f"blocks of {block_size} bytes, MDTS {transfer_size >> 10} KiB, {cache}volatile write cache"


def namespaces() -> list[Namespace]:
    """All namespaces that have a block device."""
    found = (_NAME.fullmatch(path.name) for path in (SYSFS / "class/block").glob("nvme*"))
    names = [(int(match[1]), int(match[2]), match[0]) for match in found if match is not None]
    return [_namespace(name) for _, _, name in sorted(names)]


def namespace_at(place: str) -> Namespace | None:
    """The namespace of a block device, by its path; None if the kernel has none there."""
    name = Path(place).resolve().name
    return _namespace(name) if _NAME.fullmatch(name) and (SYSFS / "class/block" / name).exists() else None


def _namespace(name: str) -> Namespace:
    block = SYSFS / "class/block" / name
    owner = (block / "device").resolve()
    return Namespace(
        name, _read(owner / "subsysnqn"), int(_read(block / "queue/logical_block_size") or 0),
        int(_read(block / "queue/max_hw_sectors_kb") or 0) << 10, _read(block / "queue/write_cache") == "write back",
        _read(owner / "iopolicy"), tuple(_controllers(name, owner)),
    )  # fmt: skip


def _controllers(name: str, owner: Path) -> Iterator[Controller]:
    subsystem, _, number = name.rpartition("n")
    for path in sorted(owner.glob("nvme*")) if owner.name.startswith("nvme-subsys") else [owner]:
        if path == owner or any(path.glob(f"{subsystem}c*n{number}")):
            yield Controller(path.name, _read(path / "transport"), _read(path / "state"), _read(path / "address"))


def _read(path: Path) -> str:
    """The attribute's text; empty if it is not there. Attributes come with kernels, and go with devices."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
