"""A target of a measure: a mounted pool, a directory of another filesystem, or devices. At its end nothing is left."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Protocol, Self

from kvfs._native import lib
from kvfs.bench.engine import Measured, Runner
from kvfs.bench.plan import STORE_MAX, STORE_SHARE, Cell, Side, Work, prepare_s, store_limit
from kvfs.client.client import Client, connect
from kvfs.errors import KvfsError, PoolError, UsageError
from kvfs.frontend import mount
from kvfs.frontend.asking import ControlClient, how_to_mount
from kvfs.pool.devices import Device, device_address
from kvfs.units import counted, format_size, size_text, told_size

# Of the directory that is made in a mount.
_PREFIX = ".kvfs-bench."
_PREPARE_THREADS = 4
_PREPARE_BLOCK = 2 << 20
_DELETED_AT_ONCE = 256
_KINDS = {
    (Work.STORES, Side.RAW): lib.KVFS_MEASURE_POOL_WRITE,
    (Work.STORES, Side.NATIVE): lib.KVFS_MEASURE_PUT,
    (Work.STORES, Side.FILES): lib.KVFS_MEASURE_FILE_STORE,
    (Work.READS, Side.RAW): lib.KVFS_MEASURE_POOL_READ,
    (Work.READS, Side.NATIVE): lib.KVFS_MEASURE_GET,
    (Work.READS, Side.FILES): lib.KVFS_MEASURE_FILE_READ,
    (Work.LOOKUPS, Side.NATIVE): lib.KVFS_MEASURE_EXISTS,
    (Work.LOOKUPS, Side.FILES): lib.KVFS_MEASURE_FILE_LOOKUP,
}


class Target(Protocol):
    """kind: pool, directory, devices. name: for people; does: what a measure does there. notes: what the reader
    of the figures should know."""

    kind: str
    name: str
    does: str
    notes: list[str]
    sides: Sequence[Side]
    works: Sequence[Work]
    daemon: int | None

    def __enter__(self) -> Self: ...
    def __exit__(self, *_: object) -> None: ...

    def prepare(self, runner: Runner, block_size: int, seconds: float) -> None:
        """Make what is to be read, of blocks of that size."""
        ...

    def measure(self, runner: Runner, cell: Cell, seconds: float) -> Measured: ...


def target_of(names: Sequence[str], *, write: bool) -> Target:
    """KvfsError if there is nothing to measure. Nothing is opened yet."""
    first = names[0]
    if len(names) == 1 and os.path.isdir(first):
        if write:
            raise UsageError("--write: of devices alone; a pool and a directory are written to in any case")
        present = mount.mount_of(first)
        if present is not None and present.is_kvfs:
            return PoolTarget(Path(present.source), first)
        if not (Path(first) / "pool.toml").exists():
            return DirectoryTarget(first)
        mounts = mount.mounts_of(first)
        if not mounts and _daemon_of(Path(first)) is not None:
            raise KvfsError(f"{first}: it is served, and mounted nowhere here; a mount is needed to measure it")
        if not mounts:
            raise KvfsError(f"{first}: not mounted{how_to_mount(Path(first))} first")
        return PoolTarget(Path(first), mounts[0].mountpoint)
    for name in names:
        if os.path.isdir(name):
            raise UsageError(f"{name}: a directory; several can be measured together only if all are devices")
    return DevicesTarget(names, write=write)


class PoolTarget:
    """A directory of a mount, by libkvfs, by files, and the pool's devices raw."""

    kind = "pool"
    sides: Sequence[Side] = tuple(Side)
    works: Sequence[Work] = tuple(Work)

    def __init__(self, pool: Path, directory: str) -> None:
        self.pool, self._parent = pool, directory
        self.notes: list[str] = []
        self.daemon = _daemon_of(pool)
        space = os.statvfs(directory)
        self._room = store_limit(space.f_blocks * space.f_frsize)
        # A name of its own for each run of a cell that stores.
        self._runs = itertools.count()
        self._sets: dict[int, int] = {}
        self.name = f"pool {pool} at {directory}, {size_text(space.f_blocks * space.f_frsize)}"
        self.does = f"stores up to {size_text(2 * self._room)} of blocks, and deletes them; a full pool evicts as much"

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            try:
                self._path = tempfile.mkdtemp(prefix=_PREFIX, dir=self._parent)
            except OSError as error:
                raise _failure(self._parent, error) from error
            stack.callback(shutil.rmtree, self._path, ignore_errors=True)
            self._directory = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            stack.callback(os.close, self._directory)
            # So many are under way as a call has blocks.
            self._client: Client = stack.enter_context(
                connect(self._parent, os.path.basename(self._path), depth=64, timeout_s=10, gpu=None, paths=True)
            )
            stack.callback(self._delete_all)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def prepare(self, runner: Runner, block_size: int, seconds: float) -> None:
        """The set of an earlier size goes."""
        self._delete_all()
        self._sets.clear()
        done = self._run(
            runner, lib.KVFS_MEASURE_PUT, "storing what is to be read", seconds=prepare_s(seconds),
            block_size=block_size, count=self._count(block_size), threads=_PREPARE_THREADS, batch=8, prefix="set-",
        )  # fmt: skip
        self._sets[block_size] = done.blocks

    def measure(self, runner: Runner, cell: Cell, seconds: float) -> Measured:
        what = f"{cell.work} of {format_size(cell.block_size)} by {cell.side}"
        stores = cell.work is Work.STORES
        prefix = f"run{next(self._runs)}-" if stores else "set-"
        count = self._count(cell.block_size) if stores else self._sets[cell.block_size]
        measured = self._run(
            runner, _KINDS[cell.work, cell.side], what, seconds=seconds, block_size=cell.block_size, count=count,
            threads=cell.threads, batch=cell.batch, prefix=prefix,
        )  # fmt: skip
        if stores and cell.side is not Side.RAW:
            tried = min(count, measured.blocks + measured.misses + cell.depth)
            self._delete(f"{prefix}{i}" for i in range(tried))
        return measured

    def _run(
        self, runner: Runner, kind: int, what: str, *, seconds: float, block_size: int, count: int, threads: int,
        batch: int, prefix: str,
    ) -> Measured:  # fmt: skip
        by_files = kind >= lib.KVFS_MEASURE_FILE_READ
        with self._client.library.call():
            return runner.run(
                kind, what=f"{self._parent}: {what}", seconds=seconds, block_size=block_size, count=count,
                threads=threads, batch=batch, prefix=prefix,
                client=None if by_files else self._client.library.handle,
                directory=self._directory if by_files else -1,
            )  # fmt: skip

    def _count(self, block_size: int) -> int:
        if self._room < block_size:
            raise KvfsError(
                f"{self._parent}: an eighth of the pool, {told_size(2 * self._room)}, does not hold two blocks of "
                f"{format_size(block_size)}"
            )
        return self._room // block_size

    def _delete(self, names: Iterable[str]) -> None:
        keys = iter(names)
        while batch := [name.encode() for name in itertools.islice(keys, _DELETED_AT_ONCE)]:
            self._client.delete(batch)

    def _delete_all(self) -> None:
        """Beside rmtree(), which takes ten times as long for each."""
        with suppress(OSError):
            self._delete(os.listdir(self._directory))


class _RawTarget:
    """Descriptors that are read and written at random places, each as large as the smallest."""

    sides: Sequence[Side] = (Side.RAW,)
    daemon: int | None = None

    def __init__(self) -> None:
        self.works: Sequence[Work] = (Work.READS,)
        self.notes: list[str] = []
        self.name = self.does = ""
        self._stack = ExitStack()
        self._files: list[int] = []
        self._size = 0
        self._is_filled = False

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def prepare(self, runner: Runner, block_size: int, seconds: float) -> None:
        """Fill the files, so that nothing is allocated later, and nothing is read that was never written."""
        if Work.STORES not in self.works or self._is_filled:
            return
        done = runner.run(
            lib.KVFS_MEASURE_WRITE, what=f"{self.name}: writing what is to be read", seconds=2 * prepare_s(seconds),
            block_size=_PREPARE_BLOCK, count=self._size // _PREPARE_BLOCK * len(self._files),
            threads=_PREPARE_THREADS, once=True, files=self._files,
        )  # fmt: skip
        self._size = max(1, done.blocks // len(self._files)) * _PREPARE_BLOCK
        self._is_filled = True

    def measure(self, runner: Runner, cell: Cell, seconds: float) -> Measured:
        kind = lib.KVFS_MEASURE_WRITE if cell.work is Work.STORES else lib.KVFS_MEASURE_READ
        return self._measure(runner, kind, cell, seconds, self._files)

    def _measure(self, runner: Runner, kind: int, cell: Cell, seconds: float, files: Sequence[int]) -> Measured:
        return runner.run(
            kind, what=f"{self.name}: {cell.work} of {format_size(cell.block_size)}", seconds=seconds,
            block_size=cell.block_size, count=self._size // cell.block_size * len(files), threads=cell.threads,
            files=files,
        )  # fmt: skip


class DirectoryTarget(_RawTarget):
    """A directory of another filesystem: a candidate for a pool of files, or for another cache."""

    kind = "directory"

    def __init__(self, path: str) -> None:
        super().__init__()
        self._path = path
        self.works = (Work.STORES, Work.READS)

    def __enter__(self) -> Self:
        space = os.statvfs(self._path)
        free = space.f_bavail * space.f_frsize
        self._size = store_limit(free) * 2 // _PREPARE_BLOCK * _PREPARE_BLOCK
        if self._size < _PREPARE_BLOCK:
            least = format_size(STORE_SHARE * _PREPARE_BLOCK)
            raise KvfsError(
                f"{self._path}: {told_size(free)} are free there, and an eighth of it is used: {least} at least"
            )
        try:
            self._files = [_unnamed(self._path)]
        except OSError as error:
            raise _failure(self._path, error) from error
        self._stack.callback(os.close, self._files[0])
        self.name, self.does = f"directory {self._path}", f"writes a file of {size_text(self._size)} without a name"
        return self


class DevicesTarget(_RawTarget):
    """Block devices, or files, together."""

    kind = "devices"

    def __init__(self, names: Sequence[str], *, write: bool) -> None:
        super().__init__()
        self._write = write
        self.names: list[str] = []
        for name in names:
            if not isinstance(device_address(name), Path):
                raise UsageError(f"{name}: block devices and files can be measured; others as devices of a pool")
            self.names.append(name)
        if write:
            self.works = (Work.STORES, Work.READS)

    def __enter__(self) -> Self:
        # The daemon's packages are needed for devices alone.
        from kvfs.pool.opening import open_device

        with self._stack as stack:
            devices: list[Device] = []
            for name in self.names:
                device = open_device(Path(name), exclusive=self._write, writable=self._write)
                stack.callback(device.close)
                if any(other.same(Path(name)) for other in devices):
                    raise UsageError(f"{name}: given twice")
                if self._write:
                    _check_free(device)
                if device.size < _PREPARE_BLOCK:
                    raise KvfsError(f"{name}: {told_size(device.size)}; at least {format_size(_PREPARE_BLOCK)}")
                if not device.direct:
                    self.notes.append(f"{name}: its filesystem has no direct I/O: the page cache is measured")
                devices.append(device)
            self._files = [device.fd for device in devices]
            self._size = min(device.size for device in devices)
            self.name = f"{counted(len(devices), 'device')} {', '.join(self.names)}"
            self.does = f"reads {size_text(self._size)} of each"
            if self._write:
                self._size = min(self._size, STORE_MAX)
                self.does = f"overwrites {size_text(self._size)} of each"
            else:
                self.notes.append(
                    "one that was never written, or was trimmed, may answer without its flash: --write writes first"
                )
            self._stack = stack.pop_all()
        return self

    def alone(self, runner: Runner, cell: Cell, seconds: float) -> dict[str, Measured]:
        """The reads of each device by itself."""
        return {
            name: self._measure(runner, lib.KVFS_MEASURE_READ, cell, seconds, [file])
            for name, file in zip(self.names, self._files, strict=True)
        }


def _check_free(device: Device) -> None:
    """PoolError or InUseError for a device that holds something: nothing is destroyed for a measure."""
    from kvfs.pool.making import check_unused
    from kvfs.pool.signatures import signature

    what = signature(device)
    if what is not None:
        raise PoolError(f"{device.path}: holds {what}; --write would destroy it: wipefs -a {device.path} gives it free")
    check_unused(device)


def _unnamed(path: str) -> int:
    """A file that goes with its descriptor."""
    flags = os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC
    try:
        return os.open(path, flags | os.O_TMPFILE, 0o600)
    except IsADirectoryError:  # so says a kernel or filesystem without O_TMPFILE, open(2)
        pass
    except OSError as error:
        if error.errno != errno.EOPNOTSUPP:
            raise
    name = os.path.join(path, f"{_PREFIX}{os.urandom(4).hex()}")
    file = os.open(name, flags | os.O_CREAT | os.O_EXCL, 0o600)
    os.unlink(name)
    return file


def _daemon_of(pool: Path) -> int | None:
    """The daemon's process, if it can be seen from here."""
    with suppress(KvfsError), ControlClient(pool) as client:
        return client.peer_pid() or None
    return None


def _failure(path: str, error: OSError) -> KvfsError:
    why = error.strerror if error.errno != errno.EINVAL else "no O_DIRECT there: only the page cache would be measured"
    failure = KvfsError(f"{path}: nothing can be made there to measure: {why}")
    failure.errno = error.errno or failure.errno
    return failure
