"""LIST: the keys of a namespace, in their order, as native clients ask for them.

Keys are names of files, in a directory for each first byte. Files of longer keys lie one directory deeper.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

from kvfs.errors import KvfsError
from kvfs.frontend.wire import WORD, Flags, parse_after, parse_end, parse_where
from kvfs.index.interface import Index
from kvfs.namespace.files import Namespace
from kvfs.record import FLAGS_OFFSET, InodeFlags
from kvfs.types import InodeNumber

# Names that are looked at in a step.
_STEP = 64
_SEALED = int(InodeFlags.SEALED)
_NAME = re.compile(rb"(?:[0-9a-f][0-9a-f]){1,127}")
# The directory of longer keys: 254 digits, and the next as a letter. And the names of files there.
_LONG = re.compile(rb"[0-9a-f]{254}[g-v]")
_REST = re.compile(rb"[0-9a-f](?:[0-9a-f][0-9a-f]){0,127}")
_LONG_KEY = re.compile(rb"(?:[0-9a-f][0-9a-f]){1,255}")
_SHORT_DIGITS = 254
_DIGITS, _LETTERS = b"0123456789abcdef", b"ghijklmnopqrstuv"
# Of one key in an answer.
KEY_MAX, LONG_KEY_MAX = 8 + 256, 8 + 512


def directory_at(namespace: Namespace, base: InodeNumber | None, path: Sequence[bytes]) -> InodeNumber | None:
    """The directory that a path leads to from another, or None if one of both is not there."""
    with suppress(KvfsError):
        return None if base is None else namespace.find_directory(base, path)
    return None


class Listing:
    """pause: called between two steps."""

    def __init__(self, namespace: Namespace, index: Index, pause: Callable[[], Awaitable[None]]) -> None:
        self._namespace, self._index, self._pause = namespace, index, pause

    async def answer(self, payload: bytes) -> bytes:
        base, space, count, flags, at = parse_where(payload, Flags.LONG)
        longer = bool(flags & Flags.LONG)
        after, at = parse_after(payload, at, _LONG_KEY if longer else _NAME)
        parse_end(payload, at)
        root = directory_at(self._namespace, base, space)
        found: list[bytes] = []
        for byte in range(int(after[:2] or b"0", 16), 256):
            if len(found) >= count or root is None:
                break
            shard = b"%02x" % byte
            directory = directory_at(self._namespace, root, (shard,))
            if directory is not None:
                await self._list_shard(directory, shard, after if after[:2] == shard else b"", count, found, longer)
            await self._pause()
        parts = [WORD.pack(len(found))]
        for name in found:
            parts.append(WORD.pack(len(name)) + name + bytes(-len(name) % 8))
        return b"".join(parts)

    async def _list_shard(
        self, directory: InodeNumber, shard: bytes, after: bytes, count: int, found: list[bytes], longer: bool
    ) -> None:
        """Add the keys of one directory to `found`, up to `count` in all, in hex: sealed names that a put could have
        made. With `longer` also those of the directories in it that long keys have. Their order is that of keys."""
        if len(after) > _SHORT_DIGITS:
            within = (
                after[:_SHORT_DIGITS] + _LETTERS[(at := int(after[_SHORT_DIGITS : _SHORT_DIGITS + 1], 16)) : at + 1]
            )
            above = directory_at(self._namespace, directory, (within,))
            if above is not None:
                await self._list_long(above, within, after[_SHORT_DIGITS + 1 :], count, found)
            after = within
        while len(found) < count:
            entries = self._index.list(directory, after, min(count - len(found), _STEP))
            for name, number in entries:
                if name[:2] != shard or len(found) >= count:
                    continue
                if _NAME.fullmatch(name):
                    self._list_file(number, name, found)
                elif longer and _LONG.fullmatch(name):
                    await self._list_long(number, name, b"", count, found)
            if not entries:
                return
            after = entries[-1][0]
            await self._pause()

    async def _list_long(
        self, directory: InodeNumber, name: bytes, after: bytes, count: int, found: list[bytes]
    ) -> None:
        """The same of a directory that long keys have; `after` is a name in it."""
        digits = name[:_SHORT_DIGITS] + _DIGITS[(at := _LETTERS.index(name[_SHORT_DIGITS:])) : at + 1]
        while len(found) < count:
            entries = self._index.list(directory, after, min(count - len(found), _STEP))
            for rest, number in entries:
                if _REST.fullmatch(rest):
                    self._list_file(number, digits + rest, found)
            if not entries:
                return
            after = entries[-1][0]
            await self._pause()

    def _list_file(self, number: InodeNumber, key: bytes, found: list[bytes]) -> None:
        record = self._index.raw(number)
        if record is not None and record[FLAGS_OFFSET] & _SEALED:
            found.append(key)
