"""The memory that this process may have: its cgroup's limit, or else the machine's memory. And how many processes.

A container, a unit with MemoryMax= and a pod with limits are cgroups. Beyond the limit the kernel kills, and no call
fails before. Sources: Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst of the kernel, cgroups(7).
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc/self")
# The name of the limit's file by controller and by the filesystem's type.
_LIMIT_FILES = {
    "memory": {"cgroup2": "memory.max", "cgroup": "memory.limit_in_bytes"},
    "pids": {"cgroup2": "pids.max", "cgroup": "pids.max"},
}
# Memory of a daemon beside staging and reads: interpreter, tables and rings. A small pool's daemon had 54 MiB in all.
DAEMON_SIZE = 64 << 20
# Staging and reads have no less; kvfs_plane.h calls it 16 chunks.
PART_MIN = 16 << 20
# The smallest limit that a daemon starts with.
LEAST = DAEMON_SIZE + 2 * PART_MIN
# A hierarchy is some levels deep: what is deeper is not the kernel's.
_DEPTH_MAX = 64
# Digits of 2**64.
_DIGITS_MAX = 20


@dataclass(frozen=True, slots=True)
class Limit:
    """The smallest limit of a process's cgroups: bytes, or a number of processes, and the file that has it."""

    size: int
    path: Path


def machine_memory() -> int:
    """Bytes of this machine's memory."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def memory() -> int:
    """Bytes of memory that this process may have at most."""
    limit = memory_limit()
    return machine_memory() if limit is None else limit.size


def fitting(limit: Limit | None, staging: int, reads: int) -> tuple[int, int]:
    """Sizes of staging and of reads, or as much of them as fits: at most a quarter and an eighth of the memory."""
    size = machine_memory() if limit is None else limit.size
    return max(min(staging, size // 4 >> 20 << 20), PART_MIN), max(min(reads, size // 8 >> 20 << 20), PART_MIN)


def memory_limit(proc: Path = _PROC) -> Limit | None:
    """The smallest memory limit of this process's cgroup and those above it, of either version. It is None if
    nothing here says one below the machine's memory."""
    found = _smallest(proc, "memory")
    return found if found is not None and found.size < machine_memory() else None


def no_thread(error: BaseException) -> str | None:
    """The text for an error by which Python got no thread; None for any other error."""
    if not isinstance(error, RuntimeError) or "start new thread" not in str(error):  # Python's words for EAGAIN
        return None
    how = "raise pids.max of the cgroup (--pids-limit) or the limit of processes (ulimit -u)"
    return f"no thread could be made: {how}; {threads_told()}"


def threads_told(proc: Path = _PROC) -> str:
    """The limits of threads, as the end of an error. A thread counts as a process."""
    found, processes = _smallest(proc, "pids"), resource.getrlimit(resource.RLIMIT_NPROC)[0]
    pids = "no limit is seen here" if found is None else f"{found.size} in {found.path}"
    return f"pids.max: {pids}; ulimit -u: {'unlimited' if processes == resource.RLIM_INFINITY else processes}"


def _smallest(proc: Path, controller: str) -> Limit | None:
    try:
        own = (proc / "cgroup").read_text(errors="surrogateescape")
        mounted = (proc / "mountinfo").read_text(errors="surrogateescape")
    except OSError:
        return None
    found: Limit | None = None
    for kind, root, mountpoint in _hierarchies(mounted, controller):
        path = _own_path(own, kind, controller)
        for directory in [] if path is None else _directories(path, root, mountpoint):
            limit = _read(directory / _LIMIT_FILES[controller][kind])
            if limit is not None and (found is None or limit.size < found.size):
                found = limit
    return found


def _hierarchies(mounted: str, controller: str) -> Iterator[tuple[str, str, Path]]:
    """The mounts of cgroups that may have the controller's limits: type, the cgroup that is their root, mount point."""
    for line in mounted.splitlines():
        left, _, right = line.partition(" - ")
        fields, filesystem = left.split(" "), right.split(" ")
        if len(fields) < 6 or len(filesystem) < 3 or filesystem[0] not in _LIMIT_FILES[controller]:
            continue
        if filesystem[0] == "cgroup" and controller not in filesystem[2].split(","):
            continue
        yield filesystem[0], _unescaped(fields[3]), Path(_unescaped(fields[4]))


def _unescaped(text: str) -> str:
    for code, char in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        text = text.replace(code, char)
    return text


def _own_path(own: str, kind: str, controller: str) -> str | None:
    """This process's cgroup in /proc/self/cgroup: of the controller of version 1, or of version 2."""
    for line in own.splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if kind == "cgroup2" and number == "0" and not controllers:
            return path
        if kind == "cgroup" and controller in controllers.split(","):
            return path
    return None


def _directories(path: str, root: str, mountpoint: Path) -> list[Path]:
    """The directory of a cgroup in a mount, and those above it there. A container may see its own cgroup as the root,
    and its path as of the machine's: then the mount point alone is looked at."""
    root = root.rstrip("/")
    if path != root and not path.startswith(f"{root}/"):
        return [mountpoint]
    parts = [part for part in path.removeprefix(root).split("/") if part]
    if ".." in parts or len(parts) > _DEPTH_MAX:
        return [mountpoint]
    return [mountpoint.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1)]


def _read(path: Path) -> Limit | None:
    """The limit in a file; None: no file, "max", or no number of bytes."""
    try:
        text = path.read_text(errors="replace").strip()
    except OSError:
        return None
    digits = text.isascii() and text.isdigit() and len(text) <= _DIGITS_MAX
    return Limit(int(text), path) if digits else None
