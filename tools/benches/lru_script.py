"""The script that users of engines run today beside a cache of plain files. When the filesystem is fuller than one
mark, it deletes the least recently used files until another mark. The driver is `tools/bench`.

It looks twenty times a second, far more often than those scripts do. It has the filesystem settle the deletions, so
that a peer is not held against kvfs for writes that find no room.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import time
from collections.abc import Iterator
from pathlib import Path

INTERVAL_S = 0.05


def files_below(directory: str) -> Iterator[tuple[float, int, str]]:
    """When each was used, its bytes on the disk, its path."""
    for entry in os.scandir(directory):
        with contextlib.suppress(FileNotFoundError):
            if entry.is_dir(follow_symlinks=False):
                yield from files_below(entry.path)
            elif not entry.name.startswith("."):  # those are being written
                status = entry.stat(follow_symlinks=False)
                yield status.st_atime, status.st_blocks * 512, entry.path


def sweep(directory: Path, high: float, low: float) -> int:
    """Delete if it is time; returns how many files went."""
    status = os.statvfs(directory)
    total = status.f_blocks * status.f_frsize
    used = total - status.f_bfree * status.f_frsize
    if used <= high * total:
        return 0
    deleted = 0
    for _, size, path in sorted(files_below(os.fspath(directory))):
        if used <= low * total:
            break
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
            used -= size
            deleted += 1
    descriptor = os.open(directory, os.O_RDONLY)
    ctypes.CDLL(None).syncfs(descriptor)
    os.close(descriptor)
    return deleted


def main() -> None:
    parser = argparse.ArgumentParser(prog="janitor", description="The driver is `tools/bench`.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--high", type=float, default=0.9)
    parser.add_argument("--low", type=float, default=0.8)
    arguments = parser.parse_args()
    while True:
        sweep(arguments.directory, arguments.high, arguments.low)
        time.sleep(INTERVAL_S)


if __name__ == "__main__":
    main()
