"""Groups: files that are worth nothing without each other. Eviction takes all of a group or none of it.

A file is in one group at most. Its extended attribute names the group; otherwise its directory is the group, if it has
the attribute or fits a rule of pool.toml. Without it the first rule decides that its name's ending fits. Only the
groups of the attribute are kept, by the index; all others follow from the names. Knows nothing of open, pinned or hot
files.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import translate

import trio

from kvfs.index.interface import Index
from kvfs.pool.config import GroupRule
from kvfs.record import Inode, Kind
from kvfs.types import ROOT_INODE, InodeNumber

_BATCH = 256
# The name of a group: the attribute's value; or the directory; or the directory, the rule, and the name less its
# ending.
_Key = bytes | InodeNumber | tuple[InodeNumber, int, bytes]


@dataclass(slots=True, eq=False)
class Group:
    """The files of one group, two at least; the evictor keeps here what it learns of them."""

    inodes: list[InodeNumber]
    held: bool = False  # one of them is open, pinned or being written: all stay
    use: tuple[int, int] = (0, 0)  # of the best of them: the tick of its last use, and hits


class Groups:
    def __init__(self, index: Index, rules: Sequence[GroupRule]) -> None:
        self._index = index
        self._patterns = [[re.compile(part) for part in _parts(r)] for r in rules if r.directory]
        self._endings = [
            # The longest ending of a name counts, so the longest are tried first.
            sorted((ending.encode() for ending in rule.endings), key=len, reverse=True)
            for rule in rules if rule.endings
        ]  # fmt: skip

    async def of(self, numbers: Sequence[InodeNumber]) -> dict[InodeNumber, Group]:
        """The groups of these files, by file: groups of two files or more, at any place. Costs nothing while there are
        no rules and the attribute is unset."""
        found: dict[InodeNumber, Group] = {}
        if not (self._patterns or self._endings or self._index.groups_used):
            return found
        units: dict[InodeNumber, bool] = {}
        for i, number in enumerate(numbers):
            if i % _BATCH == _BATCH - 1:
                await trio.lowlevel.checkpoint()
            inode = self._index.get(number)
            key = None if inode is None or number in found else self._key(inode, units)
            if key is None:
                continue
            group = Group([])
            for j, other in enumerate(self._candidates(key)):
                if j % _BATCH == _BATCH - 1:
                    await trio.lowlevel.checkpoint()
                candidate = self._index.get(other)
                if candidate is not None and self._key(candidate, units) == key:
                    group.inodes.append(other)
            if len(group.inodes) > 1:
                found.update((member, group) for member in group.inodes)
        return found

    def _key(self, inode: Inode, units: dict[InodeNumber, bool]) -> _Key | None:
        if inode.kind != Kind.FILE or inode.nameless:
            return None
        if inode.group:
            return inode.group
        if inode.parent not in units:
            units[inode.parent] = self._is_unit(inode.parent)
        if units[inode.parent]:
            return inode.parent
        for rule, endings in enumerate(self._endings):
            for ending in endings:
                if inode.name.endswith(ending) and len(inode.name) > len(ending):
                    return inode.parent, rule, inode.name[: len(inode.name) - len(ending)]
        return None

    def _is_unit(self, number: InodeNumber) -> bool:
        """Whether the files of a directory are a group."""
        directory = self._index.get(number)
        if directory is not None and directory.group:
            return True
        path: list[str] = []
        while self._patterns and directory is not None and directory.inode != ROOT_INODE:
            path.append(directory.name.decode(errors="surrogateescape"))
            directory = self._index.get(directory.parent)
        path.reverse()
        return any(
            len(path) == len(pattern) and all(part.match(name) for part, name in zip(pattern, path, strict=True))
            for pattern in self._patterns
        )

    def _candidates(self, key: _Key) -> Iterator[InodeNumber]:
        """Inodes that may be in this group: all that are, and perhaps others."""
        if isinstance(key, bytes):
            yield from self._index.group_inodes(key)
        elif isinstance(key, tuple):
            parent, rule, stem = key
            for ending in self._endings[rule]:
                number = self._index.lookup(parent, stem + ending)
                if number is not None:
                    yield number
        else:
            after = b""
            while entries := self._index.list(key, after, _BATCH):
                yield from (number for _, number in entries)
                after = entries[-1][0]


def _parts(rule: GroupRule) -> list[str]:
    """The pattern as regular expressions, one for each directory of the path: no wildcard crosses a slash."""
    return [translate(part) for part in rule.directory.split("/")]
