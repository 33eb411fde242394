"""What commits leave in the index's databases: its names, memberships and groups are those of its records, no more."""

from __future__ import annotations

import random
from pathlib import Path
from typing import cast

import pytest
from helpers import often

from kvfs.errors import FormatError
from kvfs.index.lmdb import LmdbIndex
from kvfs.names import Names
from kvfs.record import GROUP_ATTRIBUTE, Extent, Inode, InodeFlags, Kind
from kvfs.types import InodeNumber, SegmentIndex

ROUNDS = often(60, 400)


def made(chooser: random.Random, number: int, parents: list[int]) -> Inode:
    kind = (Kind.FILE, Kind.FILE, Kind.FILE, Kind.DIRECTORY, Kind.SYMLINK)[number % 5]
    flags = InodeFlags.NONE
    if kind == Kind.FILE:
        flags = chooser.choice((InodeFlags.SEALED, InodeFlags.SEALED, InodeFlags.SEALED | InodeFlags.NAMELESS))
    extents = () if kind != Kind.FILE else tuple(
        Extent(7, SegmentIndex(chooser.randrange(5)), 1, 1, i) for i in range(chooser.choice((0, 0, 1, 3)))
    )  # fmt: skip
    groups = (b"g", b"gg", b"\xff" * 255, b"x" * 256)  # the last is too long to be a name
    xattrs = {GROUP_ATTRIBUTE: chooser.choice(groups)} if chooser.random() < 0.4 else {}
    if chooser.random() < 0.3:
        xattrs = {b"user.other": chooser.randbytes(chooser.randrange(40)), **xattrs}
    name = b"%d-%d" % (number, chooser.randrange(3)) + b"n" * chooser.choice((0, 5, 240))
    return Inode(
        inode=InodeNumber(number), parent=InodeNumber(chooser.choice(parents)), name=name, kind=kind, mode=0o644,
        flags=flags, segment=SegmentIndex(chooser.randrange(5)), size=4096, extents=extents, xattrs=xattrs,
    )  # fmt: skip


def database(index: LmdbIndex, which: object) -> list[tuple[bytes, bytes]]:
    return [cast(tuple[bytes, bytes], item) for item in index._read.cursor(which).iternext()]


def check(index: LmdbIndex, live: dict[int, Inode]) -> None:
    kept = [inode for inode in live.values() if not inode.nameless]  # a nameless one does not survive a restart
    names, members, groups = {}, set(), set()
    for inode in kept:
        number = int(inode.inode)
        names[inode.parent.to_bytes(8, "big") + inode.name] = number.to_bytes(8, "little")
        if inode.kind == Kind.FILE:
            for segment in {inode.segment, *(extent.segment for extent in inode.extents)}:
                members.add(segment.to_bytes(4, "big") + number.to_bytes(8, "big"))
        group = inode.xattrs.get(GROUP_ATTRIBUTE, b"")
        if 1 <= len(group) <= 255:
            groups.add(bytes([len(group)]) + group + number.to_bytes(8, "big"))
    assert dict(database(index, index._inodes_db)) == {i.inode.to_bytes(8, "big"): i.pack() for i in kept}
    assert dict(database(index, index._names_db)) == names
    assert {key for key, _ in database(index, index._members_db)} == members
    assert {key for key, _ in database(index, index._groups_db)} == groups


@pytest.mark.parametrize("remembered", [2, 1 << 20])
def test_the_databases_are_those_of_the_records(tmp_path: Path, remembered: int) -> None:
    """With little in memory most changes meet what the index has, as after a restart."""
    chooser = random.Random(f"index {remembered}")
    index = LmdbIndex(tmp_path / "index")
    index._names.limit(remembered, remembered)
    live: dict[int, Inode] = {}
    number = 100
    for _ in range(ROUNDS):
        for _ in range(chooser.choice((1, 4, 40))):
            dice = chooser.random()
            if live and dice < 0.25:
                index.delete(live.pop(chooser.choice(list(live))))
            elif live and dice < 0.6:
                old = live[chooser.choice(list(live))]
                new = made(chooser, int(old.inode), [1, 2, 3])
                index.put(new, old)
                live[int(new.inode)] = new
            else:
                number += chooser.choice((1, 1, 300))
                live[number] = made(chooser, number, [1, 2, 3])
                index.put(live[number], None)
        if chooser.random() < 0.2 and len(live) > 1:  # two change their names with one another
            a, b = (live[i] for i in chooser.sample(sorted(live), 2))
            if not a.nameless and not b.nameless:
                spare = a.copy()
                spare.name = b"spare"
                c, d = a.copy(), b.copy()
                (c.parent, c.name), (d.parent, d.name) = (b.parent, b.name), (a.parent, a.name)
                for new, old in ((spare, a), (d, b), (c, spare)):
                    index.put(new, old)
                live[int(a.inode)], live[int(b.inode)] = c, d
        index.commit_now()
        check(index, live)
        named = [inode for inode in live.values() if not inode.nameless]
        if named and chooser.random() < 0.3:  # one takes another's name, which that one learns a commit later
            old = chooser.choice(named)
            number += 1
            new = made(chooser, number, [1])
            new.parent, new.name, new.flags = old.parent, old.name, new.flags & ~InodeFlags.NAMELESS
            index.put(new, None)
            live[number] = new
            index.commit_now()
            index.delete(live.pop(int(old.inode)))
            index.commit_now()
            check(index, live)
    index.close()


def test_what_is_no_record_is_refused_with_its_inode(tmp_path: Path) -> None:
    names = Names()
    inode = made(random.Random(3), 77, [1])
    inode.flags = InodeFlags.SEALED if inode.kind == Kind.FILE else InodeFlags.NONE
    record = inode.pack()
    names.put(record, False)
    begun = names.commit_begin()
    assert names.index_known(begun, 1) == []
    damaged = record[:4] + record[4:6] + b"\xff\xff" + record[8:]  # the size of its name
    for bad in (damaged, record[:-8], record[:64], record + record, record + b"\0" * 8):
        with pytest.raises(FormatError, match=r"index: what it has of inode (77|0) is no record"):
            names.index_changes(begun, [bad])
    assert [len(items) for items in names.index_changes(begun, [record])][:2] == [1, 1]
    names.commit_end(True)
