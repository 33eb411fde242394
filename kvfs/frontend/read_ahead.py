"""The kernel's read-ahead of a mount, in /sys/class/bdi: it decides how large the READs of buffered reads and mappings
are. Knows a mount's device number and files of sysfs; never the mount itself, which may hang."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

DIRECTORY = Path("/sys/class/bdi")
# A block of 2 MiB is then one READ where requests of 4 MiB are possible, and two elsewhere. By the kernel's own 128 KiB
# it is 16.
DEFAULT = 2 << 20


@dataclass(frozen=True, slots=True)
class ReadAhead:
    """The read-ahead that a mount asks for, in bytes, or 0 for the kernel's own; `why` says why it could not be set."""

    device: str  # major:minor
    size: int
    why: str | None = None

    def status(self) -> dict[str, object]:
        """Return the bytes in force (None: unknown), those asked for (None: the kernel's own), and why they differ."""
        size, unread = _in_force(self.device)
        changed = f"another has set {_path(self.device)}" if size is not None and size < self.size else None
        return {"size": size, "asked": self.size or None, "why": self.why or unread or changed}


def set_read_ahead(device: str, size: int) -> ReadAhead:
    """Set a mount's read-ahead; 0 leaves it. The answer to INIT must be there: the kernel lowers read-ahead by it."""
    if not size:
        return ReadAhead(device, 0)
    path = _path(device)
    try:
        path.write_text(f"{size >> 10}\n")
    except OSError as error:
        return ReadAhead(device, size, f"{path}: {os.strerror(error.errno or 0)}")
    return ReadAhead(device, size)


def _path(device: str) -> Path:
    return DIRECTORY / device / "read_ahead_kb"


def _in_force(device: str) -> tuple[int | None, str | None]:
    """Return the bytes of read-ahead now, or the reason why they cannot be read."""
    path = _path(device)
    try:
        return int(path.read_text()) << 10, None
    except (OSError, ValueError) as error:
        return None, f"{path}: {error.strerror if isinstance(error, OSError) else error}"
