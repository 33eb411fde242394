"""`python comparing_mount.py mount ...`: kvfs that compares its names with the index after each commit.

The names in memory and the block table are the data plane's, the index is Python's. In the step in which a commit ends
they must say the same, but for what has changed since the commit began. A difference ends the daemon by SIGABRT, and
its log has it. KVFS_MODEL_LOSE names a file whose records the commits leave out: a double of an index that forgets.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kvfs.cli import main
from kvfs.index.lmdb import LmdbIndex
from kvfs.names import Names
from kvfs.record import Inode, InodeFlags, Kind, segments_of
from kvfs.store.store import Store

LOST = os.environ.get("KVFS_MODEL_LOSE", "").encode()
stores: list[Store] = []


def committed(index: LmdbIndex) -> dict[int, bytes]:
    """The records of the last commit, by inode."""
    cursor: Any = index._read.cursor(index._inodes_db)
    records = cursor.iternext(keys=False, values=True) if cursor.first() else ()
    return {int(Inode.unpack(record).inode): record for record in records}


def differences(store: Store) -> list[str]:
    """Within a step."""
    index, names, plane = store.index, store.blocks.names, store.plane
    stored = committed(index)
    if store.rebuilding or index.is_hiding:
        return []
    found: list[str] = []
    changed = {(parent, name): inode for parent, name, inode in names.changed()}
    dentries = {(parent, name): inode for parent, name, inode in index.dentries()}
    # Nothing waits: the names in memory are the index's records.
    if not names.pending:
        volatile = set(names.volatile())
        for number, record in stored.items():
            here = names.get(number)
            if here is not None and here != record and number not in volatile:
                found.append(f"inode {number}: in memory {here!r}, in the index {record!r}")
    for (parent, name), number in {**dentries, **changed}.items():
        in_table, in_memory = plane.table_find_name(parent, name), names.find(parent, name)
        if (in_table or 0) != number:
            found.append(f"{name!r} in directory {parent}: inode {number}, in the block table {in_table}")
        if in_memory not in (None, number):
            found.append(f"{name!r} in directory {parent}: inode {number}, in memory {in_memory}")
        record = names.get(number) if number else b""
        record = stored.get(number, b"") if record is None else record
        inode = Inode.unpack(record) if record else None
        if number and (inode is None or (inode.parent, inode.name) != (parent, name)):
            found.append(f"{name!r} in directory {parent}: inode {number} is {inode}")
    named_inodes = {number for number in {**dentries, **changed}.values() if number}
    nameless = [number for number in names.volatile() if Inode.unpack(names.get(number) or b"").nameless]
    expected, there = 1 + len(named_inodes) + len(nameless), plane.table_statistics()["records"]
    if there != expected:
        found.append(
            f"{there} records in the block table: the root, {len(named_inodes)} named, {len(nameless)} nameless"
        )
    memberships = set(index.memberships())
    for number, record in stored.items():
        inode = Inode.unpack(record)
        named = bool(inode.name) and not inode.nameless
        if named and dentries.get((inode.parent, inode.name)) != number:
            found.append(f"inode {number} in the index: its name {inode.name!r} leads elsewhere")
        if (
            inode.kind == Kind.FILE
            and InodeFlags.SEALED in inode.flags
            and (int(inode.segment), number) not in memberships
        ):
            found.append(f"inode {number} in the index: no member of segment {inode.segment}")
    if not names.pending:
        found += different_members(store, stored)
    return found


def different_members(store: Store, stored: dict[int, bytes]) -> list[str]:
    """Segments whose members are not the blocks that lie there."""
    names, lies = store.blocks.names, dict[int, set[int]]()
    for number in {*stored, *names.volatile()}:
        record = names.get(number)
        record = stored.get(number, b"") if record is None else record
        inode = Inode.unpack(record) if record else None
        if inode is not None and inode.kind == Kind.FILE and InodeFlags.SEALED in inode.flags:
            for segment in segments_of(inode):
                lies.setdefault(int(segment), set()).add(number)
    found = []
    for each in store.segments.all:
        members, expected = store.index.segment_inodes(each.index), sorted(lies.get(each.index, ()))
        if [int(number) for number in members] != expected:
            found.append(f"segment {each.index}: members {members}, and {expected} lie there")
    return found


def lose_records() -> None:
    changes: Callable[..., Any] = Names.index_changes

    def kept(begun: Any, records: Any) -> Any:
        inodes, names, members, groups, *dropped = changes(begun, records)
        lost = {key for key, record in inodes if Inode.unpack(record).name == LOST}
        return [
            [item for item in inodes if item[0] not in lost],
            [item for item in names if item[1][::-1] not in lost],  # the inode, little-endian
            *([item for item in items if item[0][-8:] not in lost] for items in (members, groups)),
            *dropped,
        ]

    Names.index_changes = staticmethod(kept)  # type: ignore[assignment, method-assign]


def compare_after_commits() -> None:
    started: Callable[..., Any] = Store._start
    ended: Callable[..., Any] = LmdbIndex._end_commit

    async def start(self: Store, *arguments: Any) -> None:
        await started(self, *arguments)
        stores.append(self)

    def end(self: LmdbIndex, batch: Any, error: BaseException | None) -> None:
        with self._names:
            ended(self, batch, error)
            found = differences(stores[0]) if stores and stores[0].index is self and error is None else []
        if found:
            logging.getLogger("kvfs.daemon").critical("names and index differ: %s", "; ".join(found[:10]))
            os.abort()

    Store._start = start  # type: ignore[method-assign]
    LmdbIndex._end_commit = end  # type: ignore[method-assign]


if __name__ == "__main__":
    compare_after_commits()
    if LOST:
        lose_records()
    sys.exit(main())
