"""Surveys of a pool: blocks, bytes, hits and ages by directory, and pins. For `kvfs list` and `kvfs top`.

Walks the index in small steps, so that requests are answered in between. Entries that change meanwhile may be missing
or counted twice. Knows neither FUSE nor devices.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import trio

from kvfs.errors import NotFoundError
from kvfs.index.interface import Index
from kvfs.plane import Plane
from kvfs.record import RECORD_HEAD, RECORD_TIMES, TIMES_OFFSET, Inode, InodeFlags, Kind
from kvfs.types import ROOT_INODE, InodeNumber
from kvfs.worth import TICK_MASK

# Names looked at before other tasks have their turn: some 2 ms.
_STEP = 256
# A survey is given again for this long, with its age: a client that asks every second does not make the daemon walk
# every second. One that wants to know it says so.
FRESH_S = 5.0
DEPTH_MAX = 16
# A depth beyond all others, where directories of keys have no rows of their own, and none has beyond ROWS_MAX.
EVERY = 1 << 20
ROWS_MAX = 10_000
# Of a native client's namespace: the directory of keys that begin so.
_SHARD = re.compile(rb"[0-9a-f]{2}")
_SEALED = int(InodeFlags.SEALED)


@dataclass(slots=True)
class Row:
    """A directory and all below it, or a file. Ages are of the blocks' mtimes; hits since the mount, 255 a block.
    unused: ticks since the last use of any of its blocks."""

    path: str
    kind: str
    blocks: int = 0
    bytes: int = 0
    hits: int = 0
    oldest_ns: int = 0
    newest_ns: int = 0
    unused: int = 0

    def add(self, size: int, hits: int, mtime_ns: int, unused: int) -> None:
        self.unused = min(self.unused, unused) if self.blocks else unused
        self.oldest_ns = min(self.oldest_ns, mtime_ns) if self.blocks else mtime_ns
        self.newest_ns = max(self.newest_ns, mtime_ns) if self.blocks else mtime_ns
        self.blocks += 1
        self.bytes += size
        self.hits += hits

    def merge(self, other: Row) -> None:
        """Add all that another row counts."""
        if other.blocks:
            self.unused = min(self.unused, other.unused) if self.blocks else other.unused
            self.oldest_ns = min(self.oldest_ns, other.oldest_ns) if self.blocks else other.oldest_ns
            self.newest_ns = max(self.newest_ns, other.newest_ns) if self.blocks else other.newest_ns
        self.blocks += other.blocks
        self.bytes += other.bytes
        self.hits += other.hits

    def document(self, now_ns: int, tick_size: int) -> dict[str, object]:
        """Times as seconds before now; none where there is no block. tick_size: bytes that are stored in a tick."""
        known = {"path": self.path, "kind": self.kind, "blocks": self.blocks, "bytes": self.bytes, "hits": self.hits}
        if not self.blocks:
            return known
        ages = {"oldest_s": max(0, now_ns - self.oldest_ns) / 1e9, "newest_s": max(0, now_ns - self.newest_ns) / 1e9}
        return {**known, **ages, "unused_bytes": self.unused * tick_size}


class Clock(Protocol):
    """The pool's segments, whose ticks date uses."""

    @property
    def tick(self) -> int: ...

    @property
    def tick_size(self) -> int: ...


class Survey:
    """Surveys of one pool, one at a time."""

    def __init__(self, index: Index, plane: Plane, pinned: Callable[[], Sequence[int]], clock: Clock) -> None:
        self._index, self._plane, self._pinned, self._clock = index, plane, pinned, clock
        self._lock = trio.Lock()
        self._last: dict[tuple[int, str], tuple[float, dict[str, object]]] = {}

    def pins(self) -> list[dict[str, object]]:
        """Inodes that are pinned themselves, by path."""
        found: dict[str, str] = {}
        for number in self._pinned():
            inode = self._index.get(InodeNumber(number))
            if inode is not None and not inode.nameless:
                found[self._path(inode)] = _KIND_NAMES[inode.kind]
        return [{"path": path, "kind": found[path]} for path in sorted(found)]

    async def take(self, depth: int, path: str = "/", *, fresh: bool = False) -> dict[str, object]:
        """Namespaces: the directories from `path` down to `depth` below it that hold something. At the depth EVERY they
        are engines' at any place: a directory of keys is none by itself. Also the pins there, and the sum. The path
        begins at the mount's root. age_s: how long ago they were counted, 0 where `fresh`. NotFoundError."""
        asked_at = trio.current_time()
        async with self._lock:
            known = self._last.get((depth, path))
            # Also fresh: one that another has taken meanwhile, from its beginning on.
            if known is not None and (asked_at <= known[0] or (not fresh and trio.current_time() - known[0] < FRESH_S)):
                return {**known[1], "age_s": trio.current_time() - known[0]}
            began, now_ns, size = trio.current_time(), time.time_ns(), self._clock.tick_size
            spaces = await self._spaces(depth, path)
            pins = [row for number in self._pinned() if (row := await self._pin(number, path)) is not None]
            whole = Row(path, "directory")
            for space in spaces:
                whole.merge(space)
            document: dict[str, object] = {
                "path": path,
                "namespaces": [row.document(now_ns, size) for row in sorted(spaces, key=lambda row: row.path)],
                "pins": [row.document(now_ns, size) for row in sorted(pins, key=lambda row: row.path)],
                "total": whole.document(now_ns, size),
            }
            self._last = {(depth, path): (began, document)}
            return {**document, "age_s": 0.0}

    def _find(self, path: str) -> Inode:
        found = self._index.get(ROOT_INODE)
        for name in filter(None, os.fsencode(path).split(b"/")):
            number = None if found is None else self._index.lookup(found.inode, name)
            found = None if number is None else self._index.get(number)
        if found is None:
            raise NotFoundError(f"{path}: no such file or directory in this pool")
        return found

    async def _spaces(self, depth: int, path: str) -> list[Row]:
        top = self._find(path)
        rows = [Row(path, _KIND_NAMES[top.kind])]
        if top.kind != Kind.DIRECTORY:
            if top.sealed:
                self._add(rows[0], [(top.inode, top.size, top.mtime_ns)])
            return rows if rows[0].blocks else []
        # Each directory has the row to which its blocks are added. Directories down to the depth begin a row of their
        # own, but for those of keys, with all below them.
        left = [(top.inode, path.rstrip("/"), 0, rows[0])]
        while left:
            number, path, level, row = left.pop()
            async for name, kind, child in self._files(number, row):
                if kind != Kind.DIRECTORY:
                    continue
                below = f"{path}/{os.fsdecode(name)}"
                of = row
                if depth == EVERY and (_SHARD.fullmatch(name) or len(rows) >= ROWS_MAX):
                    left.append((child, below, EVERY, of))
                    continue
                if level < depth:
                    of = Row(below, "directory")
                    rows.append(of)
                left.append((child, below, level + 1, of))
        return [row for row in rows if row.blocks]

    async def _pin(self, number: int, below: str) -> Row | None:
        inode = self._index.get(InodeNumber(number))
        if inode is None or inode.nameless:
            return None
        row = Row(self._path(inode), _KIND_NAMES[inode.kind])
        if not f"{row.path}/".startswith(f"{below.rstrip('/')}/"):
            return None
        if inode.kind != Kind.DIRECTORY:
            if inode.sealed:
                self._add(row, [(number, inode.size, inode.mtime_ns)])
            return row
        left = [inode.inode]
        while left:
            async for _, kind, child in self._files(left.pop(), row):
                if kind == Kind.DIRECTORY:
                    left.append(child)
        return row

    async def _files(self, directory: InodeNumber, row: Row) -> AsyncIterator[tuple[bytes, int, InodeNumber]]:
        """Add the blocks of a directory to a row, and yield its other entries."""
        after = b""
        while entries := self._index.list(directory, after, _STEP):
            blocks: list[tuple[int, int, int]] = []
            others: list[tuple[bytes, int, InodeNumber]] = []
            for name, number in entries:
                record = self._index.raw(number)
                if record is None:
                    continue
                _, kind, flags, _, _, _, _, size, *_ = RECORD_HEAD.unpack_from(record)
                if kind != Kind.FILE:
                    others.append((name, kind, number))
                elif flags & _SEALED:
                    blocks.append((number, size, RECORD_TIMES.unpack_from(record, TIMES_OFFSET)[0]))
            self._add(row, blocks)
            after = entries[-1][0]
            await trio.lowlevel.checkpoint()
            for other in others:
                yield other

    def _add(self, row: Row, blocks: Sequence[tuple[int, int, int]]) -> None:
        """Add blocks to a row: inode, size, mtime."""
        now = self._clock.tick
        uses = self._plane.uses.of([number for number, _, _ in blocks])
        for (_, size, mtime_ns), (tick, hits) in zip(blocks, uses, strict=True):
            row.add(size, hits, mtime_ns, (now - tick) & TICK_MASK)

    def _path(self, inode: Inode) -> str:
        parts: list[bytes] = []
        above: Inode | None = inode
        while above is not None and above.inode != ROOT_INODE:
            parts.append(above.name)
            above = self._index.get(above.parent)
        return os.fsdecode(b"/" + b"/".join(reversed(parts)))


_KIND_NAMES = {Kind.FILE: "file", Kind.DIRECTORY: "directory", Kind.SYMLINK: "symbolic link"}
