"""One replay: the settings, the arrays that C runs over, and the outcome."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import threading
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvfs._native import ffi, lib
from kvfs.errors import KvfsError, UsageError
from kvfs.lent import lent
from kvfs.replay.trace import Request
from kvfs.units import told_size

PAGE = 4096
BLOCK_SIZE_MAX = 1 << 40
WINDOW_MAX = 64
PROGRESS_INTERVAL_S = 0.2
_BUFFERED, _VERIFY, _TOUCH = 1, 2, 4
_ERRNO_COUNT = 256


@dataclass(frozen=True, slots=True)
class Settings:
    """block_size: bytes of a block. threads: requests at once. io_threads: blocks of them being loaded at once, and as
    many being stored. memory: bytes for blocks on their way. speed: factor by which the trace's time runs faster; None:
    requests do not wait for their time. lru_bytes: most bytes kept in the directory, by an index in memory."""

    target: Path
    block_size: int
    native: bool = False
    threads: int = 4
    io_threads: int = 16
    memory: int = 1 << 30
    speed: float | None = 1.0
    buffered: bool = False
    verify: bool = False
    touch: bool = False
    lru_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Record:
    """A request that ended. start and end are seconds since the replay began; the other counts are blocks."""

    request: Request
    start_s: float
    end_s: float
    lookup_s: float
    load_s: float
    store_s: float
    found: int
    loaded: int
    stored: int
    present: int
    lost: int
    failed: int
    wrong: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """records: by request; None if it never began. errors: of loads and stores, a count by errno's name."""

    records: list[Record | None]
    load_errors: dict[str, int]
    store_errors: dict[str, int]
    cpu_user_s: float
    cpu_system_s: float
    interrupted: bool


def check(settings: Settings) -> None:
    """Raises UsageError for settings that make no sense, KvfsError for a target that cannot be used."""
    size = settings.block_size
    if not 0 < size <= BLOCK_SIZE_MAX or size % PAGE:
        raise UsageError(
            f"a block of {told_size(size)}: a multiple of {PAGE}, at most {told_size(BLOCK_SIZE_MAX)}, is needed "
            "(--block-size)"
        )
    if size > settings.memory:
        raise UsageError(f"--memory: {told_size(settings.memory)} cannot hold a block of {told_size(size)}")
    if settings.native and (settings.lru_bytes or settings.touch or settings.buffered):
        raise UsageError("--native: not together with --lru, --touch or --buffered, which are about files")
    if settings.lru_bytes and settings.lru_bytes < size:
        raise UsageError(f"--lru: {told_size(settings.lru_bytes)} cannot hold a block of {told_size(size)}")
    try:
        settings.target.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = "not a directory" if isinstance(error, FileExistsError) else error.strerror
        raise KvfsError(f"{settings.target}: {why}") from error
    if not settings.native:
        _probe(settings)


def _probe(settings: Settings) -> None:
    """Check that a file can be written there, in the way that blocks will be."""
    path = settings.target / f".replay-probe.{os.getpid()}"
    direct = 0 if settings.buffered else os.O_DIRECT
    try:
        file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | direct, 0o600)
        os.close(file)
    except OSError as error:
        if error.errno == errno.EINVAL and direct:
            raise KvfsError(f"{settings.target}: no O_DIRECT there; --buffered goes without") from error
        raise KvfsError(f"{settings.target}: no file can be made there: {error.strerror}") from error
    finally:
        with contextlib.suppress(OSError):
            path.unlink()


def replay(
    settings: Settings,
    trace: Sequence[Request],
    requests: Sequence[Request],
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Outcome:
    """Replay requests, a part of trace; the whole trace says which blocks there are (settings.lru_bytes needs them).

    progress(done, total) is called from time to time. KeyboardInterrupt ends it early: requests under way are finished.
    Raises the errors of check() and of kvfs.connect().
    """
    check(settings)
    with contextlib.ExitStack() as stack:
        run, records, _memory = _prepare(settings, trace, requests, stack)
        before = resource.getrusage(resource.RUSAGE_SELF)
        interrupted = _run(run, len(requests), progress)
        after = resource.getrusage(resource.RUSAGE_SELF)
        return Outcome(
            [_record(entry, request) for entry, request in zip(records, requests, strict=True)],
            _errors(run.load_errors),
            _errors(run.store_errors),
            after.ru_utime - before.ru_utime,
            after.ru_stime - before.ru_stime,
            interrupted,
        )


def _prepare(
    settings: Settings, trace: Sequence[Request], requests: Sequence[Request], stack: contextlib.ExitStack
) -> tuple[ffi.CData, ffi.CData, list[object]]:
    """The run, the records that it fills, and the arrays besides that it points into. They are kept until its end."""
    numbers: dict[int, int] = {}
    for request in trace:
        for block in request.blocks:
            numbers.setdefault(block, len(numbers))
    hashes = array("Q", numbers)
    blocks = array("I", (numbers[block] for request in requests for block in request.blocks))
    resident = array("I", _resident(settings.target, numbers) if settings.lru_bytes else ())
    run = ffi.new("struct kvfs_replay *")
    listed = ffi.new("struct kvfs_replay_request[]", len(requests))
    records = ffi.new("struct kvfs_replay_record[]", len(requests))
    first, start_ms = 0, requests[0].due_ms
    for request, entry in zip(requests, listed, strict=True):
        entry.first, entry.count = first, len(request.blocks)
        if settings.speed is not None:
            entry.due_ns = round((request.due_ms - start_ms) * 1e6 / settings.speed)
        first += len(request.blocks)
    memory = [lent(values, f"{kind}[]") for kind, values in (
        ("uint32_t", blocks), ("uint64_t", hashes), ("uint32_t", resident)
    )]  # fmt: skip
    run.blocks, run.hashes, run.resident = memory
    run.requests, run.request_count, run.records = listed, len(requests), records
    run.hash_count, run.resident_count = len(hashes), len(resident)
    run.lru_blocks = settings.lru_bytes // settings.block_size
    run.block_size, run.threads, run.io_threads = settings.block_size, settings.threads, settings.io_threads
    run.window = min(WINDOW_MAX, max(1, settings.memory // (2 * settings.threads * settings.block_size)))
    run.flags = _BUFFERED * settings.buffered | _VERIFY * settings.verify | _TOUCH * settings.touch
    if settings.native:
        from kvfs.client.client import connect

        # A request that is alone has all file threads to itself.
        depth = min(64, settings.io_threads)
        client = stack.enter_context(connect(settings.target, depth=depth, timeout_s=10, gpu=None))
        stack.enter_context(client.library.call())
        run.client, run.directory = client.library.handle, -1
    else:
        run.directory = os.open(settings.target, os.O_RDONLY | os.O_DIRECTORY)
        stack.callback(os.close, run.directory)
    return run, records, [listed, blocks, hashes, resident, *memory]


def _resident(target: Path, numbers: dict[int, int]) -> Iterator[int]:
    """The trace's blocks that are in the directory, oldest first."""
    found: list[tuple[int, int]] = []
    for directory in os.scandir(target):
        if len(directory.name) == 2 and directory.is_dir():
            for entry in os.scandir(directory.path):
                try:
                    number = numbers.get(int(entry.name[16:], 16)) if len(entry.name) == 32 else None
                except ValueError:
                    continue
                if number is not None:
                    found.append((entry.stat().st_mtime_ns, number))
    return (number for _, number in sorted(found))


def _run(run: ffi.CData, total: int, progress: Callable[[int, int], None]) -> bool:
    """Run C in a thread of its own, so that this one can report progress and be interrupted. Returns whether it was
    interrupted."""
    results: list[int] = []
    # Not join(): after an interrupt in it CPython 3.11 takes a thread that runs for one that has ended. An interrupt
    # may come at any line: a thread that was started twice plays once.
    first, ended = threading.Lock(), threading.Event()

    def body() -> None:
        if first.acquire(blocking=False):
            try:
                results.append(lib.kvfs_replay_run(run))
            finally:
                ended.set()

    is_started = interrupted = False
    while not ended.is_set():
        try:
            if not is_started:
                threading.Thread(target=body, name="replay").start()
                is_started = True
            ended.wait(PROGRESS_INTERVAL_S)
            progress(run.done, total)
        except KeyboardInterrupt:
            run.stop, interrupted = 1, True
    if results[0] < 0:
        raise KvfsError(f"replay: {os.strerror(-results[0])}")
    return interrupted


def _record(entry: ffi.CData, request: Request) -> Record | None:
    if not entry.end_ns:
        return None
    return Record(
        request,
        entry.start_ns / 1e9,
        entry.end_ns / 1e9,
        entry.lookup_ns / 1e9,
        entry.load_ns / 1e9,
        entry.store_ns / 1e9,
        *(entry.found, entry.loaded, entry.stored, entry.present, entry.lost, entry.failed, entry.wrong),
    )


def _errors(counts: ffi.CData) -> dict[str, int]:
    return {
        errno.errorcode.get(number, str(number)): counts[number] for number in range(_ERRNO_COUNT) if counts[number]
    }
