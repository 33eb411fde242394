"""Files of a mount into the kernel's page cache, where the next open finds their pages: `kvfs prestage`.

The bytes go from the page cache to nowhere by sendfile(2): never through this process. Blocks that native clients keep
in their own memory are not included (kvfs_prestage()).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass

from kvfs.errors import KvfsError

_PIECE = 4 << 20
_THREADS_MAX = 256
# Files that wait for a thread.
_AHEAD = 64
_PROGRESS_INTERVAL_S = 0.2

# A step, the bytes of it that are done, and all of them; 0 if nobody knows.
Progress = Callable[[str, int, int], None]


@dataclass(slots=True)
class Prestaged:
    blocks: int = 0
    bytes: int = 0
    # Evicted or removed meanwhile, or unreadable.
    missed: int = 0


def prestage(paths: Sequence[str], threads: int, progress: Progress) -> Prestaged:
    """Read these files, and all below these directories. KvfsError if a path that was named cannot be read."""
    done, lock = Prestaged(), threading.Lock()
    total = read_bytes = 0
    for path in _files(paths):
        with suppress(OSError):
            total += os.stat(path).st_size
        progress("looking", total, 0)
    sink = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)

    def note(size: int) -> None:
        nonlocal read_bytes
        with lock:
            read_bytes += size

    def read(path: str) -> None:
        try:
            size = _read(path, sink, note)
        except OSError:
            with lock:
                done.missed += 1
            return
        with lock:
            done.blocks += 1
            done.bytes += size

    try:
        with ThreadPoolExecutor(min(threads, _THREADS_MAX)) as pool:
            running: set[Future[None]] = set()
            for path in _files(paths):
                running.add(pool.submit(read, path))
                while len(running) >= threads + _AHEAD:
                    running = wait(running, _PROGRESS_INTERVAL_S, FIRST_COMPLETED).not_done
                    progress("reading", read_bytes, total)
            while running:
                running = wait(running, _PROGRESS_INTERVAL_S).not_done
                progress("reading", read_bytes, total)
    finally:
        os.close(sink)
    return done


def _files(paths: Sequence[str]) -> Iterator[str]:
    for path in paths:
        if not os.path.isdir(path):
            if not os.access(path, os.R_OK):
                raise KvfsError(f"{path}: cannot be read")
            yield path
            continue
        for directory, _, names in os.walk(path, onerror=_fail):
            for name in names:
                file = os.path.join(directory, name)
                if not os.path.islink(file):
                    yield file


def _fail(error: OSError) -> None:
    failure = KvfsError(f"{error.filename}: {error.strerror}")
    failure.errno = error.errno or failure.errno
    raise failure from error


def _read(path: str, sink: int, note: Callable[[int], None]) -> int:
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        at = 0
        while done := os.sendfile(sink, file, at, _PIECE):
            at += done
            note(done)
        return at
    finally:
        os.close(file)
