"""How a block becomes an event: in vLLM's schema of KV cache events, or in that of Mooncake's objects.

vLLM's (0.33, distributed/kv_events.py): an event is a map with its type, or an array, as older routers have it. Keys
are vLLM's offloading keys, a block hash and the number of a KV cache group. A block is sent with its tokens where they
are known (tokens.py), otherwise as vLLM's own storage tiers send it: without tokens, parent and size.

An event names a block's medium, and neither owner nor place. Dynamo 1.6.1 credits no block with an `ownership`, not
even an empty one.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from kvfs.client.publisher import Message

_GROUP_SIZE = 4
# A page of SGLang's, as its connector keys the part of the first rank or head: one of a page's parts is told.
_SGLANG = re.compile(rb"([0-9a-f]{16})[0-9a-f]{48}\.(?:kv|flat)(?:\.[th]0)?")
_HASH_MASK = (1 << 64) - 1

Hash: TypeAlias = bytes | int


def short(hash_: Hash) -> int:
    """A hash's last 64 bits: vLLM's own integers, with VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=1."""
    return hash_ & _HASH_MASK if isinstance(hash_, int) else int.from_bytes(hash_[-8:], "big")


@dataclass(slots=True)
class Chunk:
    """The engine's blocks that one block of kvfs holds, in the order of their tokens.

    parent: the hash before the first. more: fields of the event besides every event's fields, as the engine has them.
    guessed: no engine has sent their number."""

    hashes: Sequence[Hash]
    parent: Hash | None
    token_ids: Sequence[int]
    block_size: int
    more: dict[str, object]
    guessed: bool = False


class Schema(Protocol):
    """stored: chunk is None where tokens are not asked for."""

    def ends(self, key: bytes) -> tuple[Hash, int | None] | None:
        """The hash of the key's last block, and its group. It is None for a key of another kind."""

    def stored(self, key: bytes, chunk: Chunk | None) -> Message: ...

    def removed(self, hashes: Iterable[tuple[Hash, int | None]]) -> list[Message]: ...

    def cleared(self) -> Message | None:
        """All blocks are gone; None: it cannot be said."""

    def time(self) -> object: ...


@dataclass(frozen=True, slots=True)
class VllmSchema:
    """medium: where routers believe a block to lie. groups: keys end with a group (4 bytes, big-endian), which events
    have apart. integers: hashes are their last 64 bits. arrays: an event is an array, as older routers have it. sglang:
    keys are SGLang's connector's, and hashes the first 64 bits of a page's, as in SGLang's events."""

    medium: str = "STORAGE"
    groups: bool = True
    integers: bool = True
    arrays: bool = False
    sglang: bool = False

    def ends(self, key: bytes) -> tuple[Hash, int | None] | None:
        """A key that is too short to have a group is all hash."""
        if self.sglang:
            found = _SGLANG.fullmatch(key)
            return None if found is None else (int(found[1], 16), None)
        hash_, group = key, None
        if self.groups and len(key) > _GROUP_SIZE:
            hash_, group = key[:-_GROUP_SIZE], int.from_bytes(key[-_GROUP_SIZE:], "big")
        return short(hash_) if self.integers else hash_, group

    def stored(self, key: bytes, chunk: Chunk | None) -> Message:
        ends = self.ends(key)
        assert ends is not None
        hash_, group = ends
        if chunk is None:
            chunk = Chunk((hash_,), None, (), 0, {})
        more = chunk.more
        fields: dict[str, object] = {
            "block_hashes": [self._hash(one) for one in chunk.hashes],
            "parent_block_hash": None if chunk.parent is None else self._hash(chunk.parent),
            "token_ids": list(chunk.token_ids), "block_size": chunk.block_size, "lora_id": more.get("lora_id"),
            "medium": self.medium, "lora_name": more.get("lora_name"), "extra_keys": more.get("extra_keys"),
            "group_idx": group,
        }  # fmt: skip
        # An array has no names, and so no room for fields that some engines have.
        return self._made("BlockStored", fields if self.arrays else fields | more)

    def removed(self, hashes: Iterable[tuple[Hash, int | None]]) -> list[Message]:
        """One event for each group."""
        groups: dict[int | None, list[Hash]] = {}
        for hash_, group in hashes:
            groups.setdefault(group, []).append(self._hash(hash_))
        return [
            self._made("BlockRemoved", {"block_hashes": of_group, "medium": self.medium, "group_idx": group})
            for group, of_group in groups.items()
        ]

    def cleared(self) -> Message:
        return self._made("AllBlocksCleared", {})

    def time(self) -> object:
        return time.time()

    def _hash(self, hash_: Hash) -> Hash:
        return short(hash_) if self.integers else hash_

    def _made(self, name: str, fields: dict[str, object]) -> Message:
        if self.arrays:
            return [name, *fields.values()]
        return {"type": name, **fields}


@dataclass(frozen=True, slots=True)
class PlainSchema:
    """For people and scripts: what happened, and the key in hex."""

    def ends(self, key: bytes) -> tuple[Hash, int | None]:
        return key, None

    def stored(self, key: bytes, chunk: Chunk | None) -> Message:
        return {"event": "stored", "key": key.hex()}

    def removed(self, hashes: Iterable[tuple[Hash, int | None]]) -> list[Message]:
        return [{"event": "removed", "key": hash_.hex()} for hash_, _ in hashes if isinstance(hash_, bytes)]

    def cleared(self) -> None:
        return None

    def time(self) -> object:
        return time.time()


@dataclass(frozen=True, slots=True)
class MooncakeSchema:
    """Events of objects, as Mooncake's master has them, for routers that compute SGLang's keys themselves.

    An object's key is the block's key, as SGLang's connector has it: a page's hash in hex, and its part. Keys that are
    no text are none of SGLang's."""

    tenant: str = "default"

    def ends(self, key: bytes) -> tuple[Hash, int | None] | None:
        return (key, None) if key.isascii() and key.decode("ascii").isprintable() else None

    def stored(self, key: bytes, chunk: Chunk | None) -> Message:
        return self._made("stored", key)

    def removed(self, hashes: Iterable[tuple[Hash, int | None]]) -> list[Message]:
        return [self._made("removed", hash_) for hash_, _ in hashes]

    def cleared(self) -> None:
        return None

    def time(self) -> object:
        return time.time_ns() // 1_000_000

    def _made(self, name: str, key: Hash) -> Message:
        assert isinstance(key, bytes)
        return {"event_type": name, "object_key": key.decode("ascii"), "tenant_id": self.tenant}
