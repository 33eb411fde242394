"""Changes of the index that are visible already and not committed yet: a layer over the layers below and LMDB."""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field


@dataclass(slots=True)
class Layer:
    """Changes on top of the layers below. A value of None (or False) says: removed."""

    inodes: dict[int, bytes | None] = field(default_factory=dict)
    names: dict[int, dict[bytes, int | None]] = field(default_factory=dict)
    members: dict[int, dict[int, bool]] = field(default_factory=dict)
    groups: dict[bytes, dict[int, bool]] = field(default_factory=dict)
    segments: dict[int, bytes] = field(default_factory=dict)
    meta: dict[bytes, bytes | None] = field(default_factory=dict)
    count: int = 0
    # Sorted names of directories that are being listed; dropped when the directory changes.
    sorted_names: dict[int, list[bytes]] = field(default_factory=dict)

    def set_name(self, parent: int, name: bytes, inode: int | None) -> None:
        names = self.names.get(parent)
        if names is None:
            names = self.names[parent] = {}
        names[name] = inode
        self.sorted_names.pop(parent, None)

    def drop_name(self, parent: int, name: bytes) -> None:
        names = self.names.get(parent)
        if names is not None and names.pop(name, 0) != 0:
            self.sorted_names.pop(parent, None)
            if not names:
                del self.names[parent]

    def set_member(self, segment: int, inode: int, present: bool) -> None:
        members = self.members.get(segment)
        if members is None:
            members = self.members[segment] = {}
        members[inode] = present

    def drop_member(self, segment: int, inode: int) -> None:
        members = self.members.get(segment)
        if members is not None:
            members.pop(inode, None)
            if not members:
                del self.members[segment]

    def set_group(self, group: bytes, inode: int, present: bool) -> None:
        self.groups.setdefault(group, {})[inode] = present

    def drop_group(self, group: bytes, inode: int) -> None:
        inodes = self.groups.get(group)
        if inodes is not None:
            inodes.pop(inode, None)
            if not inodes:
                del self.groups[group]

    def names_after(self, parent: int, after: bytes) -> list[bytes]:
        names = self.names.get(parent)
        if not names:
            return []
        order = self.sorted_names.get(parent)
        if order is None:
            order = self.sorted_names[parent] = sorted(names)
        return order[bisect.bisect_right(order, after) :]

    def update(self, newer: Layer) -> None:
        """Put newer's changes over these."""
        self.inodes.update(newer.inodes)
        for parent, names in newer.names.items():
            self.names.setdefault(parent, {}).update(names)
        for segment, members in newer.members.items():
            self.members.setdefault(segment, {}).update(members)
        for group, inodes in newer.groups.items():
            self.groups.setdefault(group, {}).update(inodes)
        self.segments.update(newer.segments)
        self.meta.update(newer.meta)
        self.count += newer.count
        self.sorted_names.clear()
