"""Batches as calls and queues take them: checked and taken apart; and what became of their blocks, in words."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Sequence
from typing import TypeAlias, TypeVar

from kvfs.client import keys as keys_
from kvfs.client import memory as memory_
from kvfs.client.keys import Key, shown
from kvfs.client.library import Library
from kvfs.client.memory import Pieces, Region
from kvfs.errors import InvalidBufferError, InvalidKeyError, KvfsError, SmallBufferError, client_error

M = TypeVar("M")
# For each key the bytes read; None: a miss.
Results: TypeAlias = list[int | None]

_REASONS = {
    errno.ENOSPC: "no room: all that is left is pinned or open",
    errno.EFBIG: "larger than the pool can hold",
    errno.EOVERFLOW: "a device is a file, and this process may not write so far into one (RLIMIT_FSIZE, `ulimit -f`)",
    errno.EISDIR: "there is a directory of this name",
    errno.ENOTDIR: "a part of its path is no directory",
    errno.ETIMEDOUT: "a device gave no answer in time",
    errno.ECANCELED: "not tried",
}


def pairs(items: Iterable[tuple[Key, M]]) -> tuple[list[bytes], list[M]]:
    """Keys and memories of a batch, apart. Raises InvalidKeyError, TypeError."""
    pairs = list(items)
    try:
        names = [keys_.one(key) for key, _ in pairs]
    except (TypeError, ValueError) as error:
        if isinstance(error, InvalidKeyError):
            raise
        raise TypeError(f"items: pairs of key and memory are expected: {error}") from error
    return names, [memory for _, memory in pairs]


def ranges(items: Iterable[tuple[Key, int, Pieces]]) -> tuple[list[bytes], list[int], list[Pieces]]:
    """The same of a batch of get_ranges()."""
    triples = list(items)
    try:
        names = [keys_.one(key) for key, _, _ in triples]
    except (TypeError, ValueError) as error:
        if isinstance(error, InvalidKeyError):
            raise
        raise TypeError(f"items: key, offset and memory are expected: {error}") from error
    for key, offset, _ in triples:
        if type(offset) is not int or not 0 <= offset < 1 << 63:
            raise ValueError(f"key {shown(key)}: offset {offset!r}: bytes from the block's start are expected")
    return names, [offset for _, offset, _ in triples], [memory for _, _, memory in triples]


def parents(parents: Sequence[Key | None], count: int) -> list[bytes]:
    """The key before each of `count` blocks, b"" where there is none. Raises InvalidKeyError, ValueError."""
    names = [b"" if parent is None else keys_.one(parent) for parent in parents]
    if len(names) != count:
        raise ValueError(f"{len(names)} parents of {count} blocks")
    return names


def host_destinations(names: Sequence[bytes], memories: Sequence[Pieces]) -> list[tuple[Region, ...]]:
    """Destinations of calls that take host memory alone. Raises InvalidBufferError."""
    vectors = list(map(memory_.destinations, names, memories))
    for name, pieces in zip(names, vectors, strict=True):
        if any(piece.device is not None for piece in pieces):
            raise InvalidBufferError(
                f"key {shown(name)}: its destination is in GPU memory: get_into() alone takes that"
            )
    return vectors


def or_none(value: int) -> int | None:
    return value if value >= 0 else None


def put_failure(name: bytes, size: int, result: int) -> KvfsError:
    """Why a block was not stored; result is -errno."""
    return client_error(-result, f"key {shown(name)}, {size} bytes: {_REASONS.get(-result, os.strerror(-result))}")


def small_buffer(
    library: Library, names: Sequence[bytes], vectors: Sequence[Sequence[Region]], values: Sequence[int]
) -> SmallBufferError:
    """The error of a read in which some blocks were larger than their destinations."""
    small = [i for i, value in enumerate(values) if value == -errno.ERANGE]
    first = small[0]
    size = library.sizes(library.keys([names[first]]))[0]
    others = f", and {len(small) - 1} more such" if len(small) > 1 else ""
    room = memory_.size_of(vectors[first])
    return SmallBufferError(
        f"key {shown(names[first])}: the block has {size} bytes, its destination {room}{others}",
        [or_none(value) for value in values],
    )
