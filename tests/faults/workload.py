"""Load whose every file describes itself, and the ledger of what must be there after the daemon's death.

A file's content names its path's key and its version and ends in a digest. So a reader knows of any bytes whether they
are whole, and which promise they keep. A writer reports every call that was acknowledged, with the time, and those it
had begun. The ledger derives from that the states that a crash may leave.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import pathlib
import pickle
import random
import signal
import struct
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

_HEAD = struct.Struct("<8sIIQ32s")
_MAGIC = b"kvfstest"
# The errors that a client gets from a daemon that died; the last one only by FUSE over io_uring.
DEAD = {errno.ENOTCONN, errno.ECONNABORTED, errno.ECANCELED}
# A rename or unlink of the last second may be undone; the rest is for a machine and disk that are busy. A round is
# shorter than this: what was there before it is settled, and must stay.
GRACE_S = 30.0

_noise = random.Random(0x6B766673).randbytes(2 << 20)


def make(key: str, version: int, size: int) -> bytes:
    """A file's content: head, incompressible bytes of this version's own, digest. At least 100 bytes."""
    assert size >= 100
    inner = size - _HEAD.size - 16
    start = (version * 7919 + len(key)) % (len(_noise) // 2)
    body = bytearray(_noise[start : start + inner].ljust(inner, b"\5"))
    for at in range(0, inner - 16, 4096):  # no page may pass for one of another version
        struct.pack_into("<QQ", body, at, version, hash_of(key))
    head = _HEAD.pack(_MAGIC, len(key), size, version, key.encode())
    return b"".join((head, body, hashlib.blake2b(head + body, digest_size=16).digest()))


def hash_of(key: str) -> int:
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little")


def check(data: bytes, what: object) -> tuple[str, int]:
    """The key and version of whole content. AssertionError for anything else."""
    assert len(data) >= 100, f"{what}: {len(data)} bytes"
    magic, key_size, size, version, key = _HEAD.unpack_from(data)
    assert magic == _MAGIC, f"{what}: begins with {data[:16].hex()}"
    assert size == len(data), f"{what}: version {version} has {size} bytes, {len(data)} were read"
    digest = hashlib.blake2b(memoryview(data)[:-16], digest_size=16).digest()
    assert digest == data[-16:], f"{what}: version {version}: wrong bytes"
    return key[:key_size].decode(), version


# ---- children ----


class Child:
    """A forked process that runs a function; result() waits for its value, and raises what it raised."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._source, sink = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            signal.setitimer(signal.ITIMER_REAL, 0)  # pytest-timeout's alarm is the parent's
            try:
                answer = (True, function())
            except BaseException:  # all of it goes to the parent
                answer = (False, traceback.format_exc())
            with contextlib.suppress(BaseException), os.fdopen(sink, "wb") as stream:
                stream.write(pickle.dumps(answer))
            os._exit(0)
        os.close(sink)

    def result(self) -> Any:
        """Waits without a deadline of its own: the watchdog of the test frees a child that hangs in the kernel."""
        with os.fdopen(self._source, "rb") as stream:
            received = stream.read()
        _, status = os.waitpid(self.pid, 0)
        assert received, f"a child died with status {os.waitstatus_to_exitcode(status)}"
        succeeded, value = pickle.loads(received)
        assert succeeded, f"in a child:\n{value}"
        return value


# ---- writers ----


@dataclass
class Report:
    """A writer's actions until the daemon died: acknowledged changes in order, and changes that were under way."""

    events: list[tuple[float, str, int | None, str]] = field(default_factory=list)  # time, path, version, kind
    pending: list[tuple[str, int | None, str]] = field(default_factory=list)
    reads: int = 0
    misses: int = 0
    stopped_by: int = 0


def write_until_dead(
    root: str, writer: int, seed: int, known: dict[str, int], names: int, sizes: tuple[int, int], may_miss: bool
) -> Report:
    """Put, replace, overwrite, unlink and read back under root/w<writer> until a call says that the daemon is gone.

    known: version by path, of what is there. Reads are checked at once. may_miss: a file may have been evicted.
    """
    chooser = random.Random(seed)
    report = Report()
    current: dict[str, int | None] = dict(known)
    version = max(known.values(), default=0)
    version = max(version, time.time_ns() // 1000)  # greater than any before, also than those that were lost
    try:
        while True:
            name = f"w{writer}/k{chooser.randrange(names):03d}"
            path = f"{root}/{name}"
            dice = chooser.random()
            report.pending = []
            if dice < 0.55:
                version += 1
                temporary = f"w{writer}/.k.{version}"
                report.pending = [(temporary, version, "closed")]
                _store(f"{root}/{temporary}", make(name, version, chooser.randint(*sizes)), os.O_EXCL, chooser)
                report.events.append((time.monotonic(), temporary, version, "closed"))
                report.pending = [(temporary, None, "moved"), (name, version, "moved")]
                try:
                    os.rename(f"{root}/{temporary}", path)
                except FileNotFoundError:
                    # A pool this small is written over in a fraction of a second, and this process had to wait longer.
                    assert may_miss, f"{temporary} is missing"
                    report.events.append((time.monotonic(), temporary, None, "removed"))
                    report.misses += 1
                    continue
                now = time.monotonic()
                report.events += [(now, temporary, None, "moved"), (now, name, version, "moved")]
                current[name] = version
            elif dice < 0.62:
                version += 1
                report.pending = [(name, version, "closed")]
                _store(path, make(name, version, chooser.randint(*sizes)), os.O_TRUNC, chooser)
                report.events.append((time.monotonic(), name, version, "closed"))
                current[name] = version
            elif dice < 0.72:
                report.pending = [(name, None, "removed")]
                try:
                    os.unlink(path)
                except FileNotFoundError:
                    assert may_miss or current.get(name) is None, f"{name}: version {current[name]} is missing"
                report.events.append((time.monotonic(), name, None, "removed"))
                current[name] = None
            else:
                _read_back(path, name, current.get(name), may_miss, report)
    except OSError as error:
        if error.errno not in DEAD:
            raise
        report.stopped_by = error.errno or 0
    return report


def _store(path: str, data: bytes, flag: int, chooser: random.Random) -> None:
    descriptor = os.open(path, os.O_CREAT | os.O_WRONLY | flag, 0o644)
    try:
        step = chooser.choice((len(data), len(data), 65536, 100_000))
        for at in range(0, len(data), step):
            piece = data[at : at + step]
            written = os.pwrite(descriptor, piece, at)
            assert written == len(piece), f"{path}: wrote {written} of {len(piece)}"
    finally:
        os.close(descriptor)


def _read_back(path: str, name: str, wanted: int | None, may_miss: bool, report: Report) -> None:
    report.reads += 1
    try:
        with open(path, "rb", buffering=0) as file:
            data = file.readall()
    except FileNotFoundError:
        report.misses += 1
        assert may_miss or wanted is None, f"{name}: version {wanted} is missing"
        return
    found = check(data, path)
    assert found == (name, wanted), f"{name}: found {found}, expected version {wanted}"


# ---- the ledger ----


class Ledger:
    """Every path's versions, oldest first, with the time each was acknowledged. With None there is no file."""

    def __init__(self) -> None:
        self._states: dict[str, list[tuple[float, int | None, str]]] = {}
        self._pending: dict[str, list[tuple[int | None, str]]] = {}
        # Of each key: its newest closed version and where that may be, unless it was unlinked.
        self._newest: dict[str, tuple[int, set[str]]] = {}

    def known(self, writer: int) -> dict[str, int]:
        """Version by path, of what one writer has."""
        return {
            path: states[-1][1]
            for path, states in self._states.items()
            if path.startswith(f"w{writer}/") and states[-1][1] is not None
        }  # type: ignore[misc]

    def add(self, report: Report) -> None:
        homes: dict[int, str] = {}
        for when, path, version, kind in report.events:
            self._states.setdefault(path, [(-1e9, None, "closed")]).append((when, version, kind))
            if kind == "closed":
                key = path
                assert version is not None
                homes[version] = path
                if "/.k." not in path:
                    self._newest[key] = (version, {path})
            elif kind == "moved" and version is not None:
                self._newest[path] = (version, {path, homes[version]})
            elif kind == "removed":
                self._newest.pop(path, None)
        for path, version, kind in report.pending:
            self._states.setdefault(path, [(-1e9, None, "closed")])
            self._pending.setdefault(path, []).append((version, kind))
            if kind == "removed":
                self._newest.pop(path, None)
            elif kind == "moved" and version is not None:  # closed already, only the rename was under way
                self._newest[path] = (version, {path, homes[version]})

    def removed(self, path: str) -> None:
        """The caller unlinked it."""
        self._states[path].append((time.monotonic(), None, "removed"))

    def allowed(self, path: str, killed_at: float) -> set[int | None]:
        """The versions that may be found: the last one, those under way, and what a lost rename or unlink leaves."""
        states = self._states.get(path, [(-1e9, None, "closed")])
        versions = {version for version, _ in self._pending.get(path, [])}
        for when, version, kind in reversed(states):
            versions.add(version)
            if kind == "closed" or when < killed_at - GRACE_S:
                break
        return versions

    def settle(self, found: dict[str, tuple[str, int]], killed_at: float, may_miss: bool) -> None:
        """Compare what is found (key and version by path) with the promises; then it is the new beginning.

        may_miss: eviction was at work, so any file may be missing.
        """
        wrong = []
        for path in sorted(found.keys() | self._states.keys()):
            key, version = found.get(path, (path, None))
            allowed = self.allowed(path, killed_at) | ({None} if may_miss else set())
            if version not in allowed:
                ages = [
                    (f"{killed_at - when:.3f} s before the kill", old, kind)
                    for when, old, kind in self._states.get(path, [])[-4:]
                ]
                wrong.append(
                    f"{path}: found version {version}, allowed {allowed}; had {ages}, "
                    f"under way {self._pending.get(path)}"
                )
            if "/.k." not in path and path in found and key != path:
                wrong.append(f"{path}: holds a file of {key}")
        places: dict[tuple[str, int], list[str]] = {}
        for path, content in found.items():
            places.setdefault(content, []).append(path)
        wrong += [f"{content} is at {paths}" for content, paths in places.items() if len(paths) > 1]
        if not may_miss:
            for key, (version, homes) in self._newest.items():
                there = {home: found[home][1] for home in homes | {key} if home in found}
                if not any(other >= version for other in there.values()):
                    wrong.append(f"{key}: version {version} was closed and is nowhere; found {there}")
        assert not wrong, f"{len(wrong)} broken promises:\n" + "\n".join(wrong[:20])
        self._states = {path: [(-1e9, version, "closed")] for path, (_, version) in found.items()}
        self._pending = {}
        self._newest = {path: (version, {path}) for path, (key, version) in found.items() if key == path}


def walk(root: pathlib.Path) -> dict[str, tuple[str, int]]:
    """Read and check every file: key and version by path. Opening may miss (evicted since the listing); reading not."""
    found, broken = {}, []
    for directory, _, names in os.walk(root):
        for name in names:
            path = pathlib.Path(directory, name)
            inode = 0
            try:
                inode = path.lstat().st_ino
                with open(path, "rb", buffering=0) as file:
                    found[str(path.relative_to(root))] = check(file.readall(), path)
            except FileNotFoundError:
                continue
            except OSError as error:
                broken.append(f"{path.relative_to(root)} (inode {inode}): {error}")
    assert not broken, f"{len(broken)} files cannot be read, {len(found)} can:\n" + "\n".join(broken[:20])
    return found
