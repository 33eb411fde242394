"""Chains of blocks and ghosts of evicted ones (native/include/kvfs_chains.h): by their slots in the block table."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

from kvfs._native import ffi, lib
from kvfs.errors import KvfsError

_GHOSTS_AT_ONCE = 1 << 16
_NONE = (1 << 32) - 1


@dataclass(frozen=True, slots=True)
class ChainStatistics:
    parents: int  # blocks whose parent is known
    orphans: int  # blocks that were marked as orphans, since the start
    ghosts: int
    returned: int  # ghosts that came back
    forgotten: int
    bytes: int

    @classmethod
    def of(cls, found: Any) -> Self:
        """found: a struct kvfs_chains_statistics *."""
        return cls(found.parents, found.orphans, found.ghosts, found.returned, found.forgotten, found.bytes)


class Chains:
    """Chains outside of a pool: their holder changes them."""

    def __init__(self, slots: int, ghosts: int) -> None:
        out = ffi.new("struct kvfs_chains **")
        error = lib.kvfs_chains_create(slots, ghosts, out)
        if error < 0:
            raise KvfsError(f"chains of {slots} blocks and {ghosts} ghosts: {os.strerror(-error)}")
        self.all: Any = ffi.gc(out[0], lib.kvfs_chains_destroy)
        self._word = ffi.new("uint32_t *")

    def enter(self, slot: int, key: int) -> int | None:
        """The use of its ghost, as a word; None: it has none."""
        return self._word[0] if lib.kvfs_chains_enter(self.all, slot, key, self._word) else None

    def follow(self, slot: int, parent: int | None) -> None:
        lib.kvfs_chains_follow(self.all, slot, _NONE if parent is None else parent)

    def leave(self, slot: int, key: int, word: int, *, evicted: bool) -> None:
        lib.kvfs_chains_leave(self.all, slot, key, word, evicted)

    def used(self, slot: int) -> None:
        lib.kvfs_chains_used(self.all, slot)

    @property
    def orphans(self) -> Any:
        """uint64_t[]: one bit a slot."""
        return lib.kvfs_chains_orphans(self.all)

    def is_orphan(self, slot: int) -> bool:
        return bool(self.orphans[slot // 64] >> slot % 64 & 1)


def ghosts_of(chains: Any) -> Iterator[tuple[Any, int]]:
    """Uses of all ghosts, some at a time: uint32_t[], and how many."""
    at, uses = ffi.new("uint32_t *"), ffi.new("uint32_t[]", _GHOSTS_AT_ONCE)
    while count := lib.kvfs_chains_ghosts(chains, at, uses, _GHOSTS_AT_ONCE):
        yield uses, count
