"""The keepers of a mount: the places where it is mounted, in this mount namespace and in others.

They are found in mountinfo of all processes that this user may look at (proc_pid_mountinfo(5)). Root sees every process
of its pid namespace.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kvfs.frontend.mount import parse_mountinfo

_PROC = Path("/proc")
_NAMED = 3


@dataclass(frozen=True, slots=True)
class Holder:
    """A place where a filesystem is mounted. pid: of the first process in that mount namespace; None in our own, 0 if
    its pid namespace is none that we see."""

    mountpoint: str
    pid: int | None = None
    program: str = ""

    def __str__(self) -> str:
        if self.pid is None:
            return self.mountpoint
        if self.pid == 0:
            return f"the daemon's own mount namespace, at {self.mountpoint}"
        return f"pid {self.pid} ({self.program}) in another mount namespace, at {self.mountpoint}"


def holders(device: str, source: str, proc: Path = _PROC) -> list[Holder]:
    """Each place where the filesystem with this number (major:minor) and source is mounted; of one namespace the first
    process."""
    found = [Holder(mountpoint) for mountpoint in _places(proc / "self", device, source)]
    seen = {_namespace(proc / "self")}
    for pid in sorted(int(entry) for entry in os.listdir(proc) if entry.isdigit()):
        process = proc / str(pid)
        with suppress(OSError):
            namespace = _namespace(process)
            if namespace not in seen:
                seen.add(namespace)
                found += [Holder(place, pid, _program(process)) for place in _places(process, device, source)]
    return found


def describe(found: Sequence[Holder]) -> str:
    """The holders as a phrase; without any that can be seen, the reasons that are left."""
    if not found:
        return "files that are open in it, or a mount namespace that this user cannot look into"
    more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
    return ", ".join(map(str, found[:_NAMED])) + more


def _namespace(process: Path) -> str:
    return os.readlink(process / "ns/mnt")


def _places(process: Path, device: str, source: str) -> Iterator[str]:
    text = (process / "mountinfo").read_text(encoding="utf-8", errors="surrogateescape")
    return (mount.mountpoint for mount in parse_mountinfo(text) if mount.is_same(device, source))


def _program(process: Path) -> str:
    try:
        return (process / "comm").read_text(errors="replace").rstrip("\n")
    except OSError:
        return "?"


def is_stopped(pid: int, proc: Path = _PROC) -> bool:
    """Whether a process stands still: by SIGSTOP, or held by a debugger."""
    try:
        return (proc / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()[0] in "Tt"
    except (OSError, IndexError):
        return False
