"""Keys as libkvfs takes them: their bytes back to back, and the size of each (struct kvfs_keys, native/include/kvfs.h).

Packing is what `exists` of thousands of keys spends its time on: lists of bytes go through without a Python loop.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable, Sequence
from typing import cast

from kvfs._native import ffi
from kvfs.errors import InvalidKeyError
from kvfs.lent import lent

Key = bytes | str
KEY_MAX = 255
PATH_MAX = 1023
_SHOWN = 32
_PATH = re.compile(rb"(?:(?!\.{1,2}(?:/|\Z))[^/\0]{1,255}(?:/(?!\Z)|\Z))+")
_KEYS, _PATHS = 0, 1


class Keys:
    """A batch of keys in memory that libkvfs can read. `struct` points into memory that lives while this does.

    paths: they are paths below the namespace (KVFS_PATHS). gaps: a key may be b"", which stands for none."""

    __slots__ = ("_kind", "_memory", "count", "data", "sizes", "struct")

    def __init__(self, keys: Sequence[bytes], *, paths: bool = False, gaps: bool = False) -> None:
        self.count = len(keys)
        self.data = b"".join(keys)
        self.sizes = array("I", map(len, keys))
        most = PATH_MAX if paths else KEY_MAX
        if self.count and (max(self.sizes) > most or (min(self.sizes) == 0 and not gaps)):
            wrong = next(key for key in keys if not 0 < len(key) <= most)
            raise InvalidKeyError(
                f"{'path' if paths else 'key'} {shown(wrong)}: {len(wrong)} bytes, 1 to {most} are possible"
            )
        if paths:
            for key in keys:
                if key and not _PATH.fullmatch(key):
                    raise InvalidKeyError(
                        f"path {shown(key)}: names of 1 to 255 bytes between slashes, none of them '.' or '..', are "
                        "expected"
                    )
        self._memory = (lent(self.data), lent(self.sizes, "uint32_t[]"))
        self._kind = _PATHS if paths else _KEYS
        self.struct: object = ffi.new("struct kvfs_keys *", [*self._memory, self.count, self._kind])

    def part(self, first: int, end: int) -> object:
        """struct kvfs_keys * of some of them; it points into the same memory."""
        data, sizes = self._memory
        at = sum(self.sizes[:first])
        return ffi.new("struct kvfs_keys *", [data + at, sizes + first, end - first, self._kind])


def pack(keys: Iterable[Key], *, paths: bool = False) -> Keys:
    """Raises InvalidKeyError naming the key that is not 1 to 255 bytes, is no path, or is neither bytes nor str."""
    return Keys(normalized(keys), paths=paths)


def normalized(keys: Iterable[Key]) -> Sequence[bytes]:
    """Keys as bytes: a str is its UTF-8."""
    if isinstance(keys, (bytes, str)):
        raise InvalidKeyError(f"key {shown(keys)}: a list of keys is expected, this is one")
    if not isinstance(keys, (list, tuple)):
        keys = list(keys)
    types = set(map(type, keys))
    if types <= {bytes}:
        return cast(Sequence[bytes], keys)
    return [one(key) for key in keys]


def one(key: Key) -> bytes:
    if isinstance(key, bytes):
        return key
    if not isinstance(key, str):
        raise InvalidKeyError(f"key {shown(key)}: bytes or str are expected, not {type(key).__name__}")
    try:
        return key.encode()
    except UnicodeEncodeError as error:
        raise InvalidKeyError(f"key {shown(key)}: no UTF-8: {error.reason}") from error


def shown(key: object) -> str:
    """A key as errors name it, shortened."""
    if isinstance(key, (bytes, str)) and len(key) > _SHOWN:
        return f"{key[:_SHOWN]!r}... ({len(key)} {'bytes' if isinstance(key, bytes) else 'characters'})"
    text = repr(key)
    return text if len(text) <= 2 * _SHOWN else text[: 2 * _SHOWN] + "..."
