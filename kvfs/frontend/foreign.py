"""Requests of native clients about blocks of other nodes of a pod: FOREIGN, FOREIGN_LEASE, FRESH
(native/include/kvfs_wire.h).

A client finds such blocks in the pod map and reads them by itself. Their names are known by their keys alone; the owner
of a block is that of its segment. Knows frames, the pod map, and this node's leases. The daemon knows how nodes are
asked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

import trio

from kvfs._native import lib
from kvfs.frames import FrameError
from kvfs.frontend.wire import FOREIGN, LEASE, WORD
from kvfs.lent import Part
from kvfs.podmap import FOREIGN_BLOCK_SIZE, PodMap
from kvfs.store.leases import Leases, Lessee

_TOUCH, _LAST = lib.WIRE_FOREIGN_TOUCH, lib.WIRE_FOREIGN_BAD


class Kept(NamedTuple):
    """An owner's answer about a lease: which keys it keeps, in the asked order; and how to end that."""

    slot: int
    held: Sequence[bool]
    release: Callable[[], None]


class OtherNodes(Protocol):
    """The other nodes of the pod."""

    def fresh(self) -> None:
        """Return once all is here that living nodes had when this was called. Blocks. FreshError, EngineAwayError."""
        ...

    def keep(self, wanted: Mapping[int, Sequence[bytes]], seconds: float) -> Iterable[Kept]:
        """Have the nodes with these slots keep blocks from eviction: keys of 16 bytes. Blocks, for some 50 ms at most.
        A slot may have several answers, in the order of its keys. One that keeps something is to be released."""
        ...

    def tell_used(self, slot: int, keys: Sequence[bytes]) -> None:
        """Tell a node that its blocks are used, without a read. Does not block."""
        ...


class ForeignRequests:
    """The requests of all native clients of a pod's node."""

    def __init__(self, podmap: PodMap, leases: Leases, others: OtherNodes) -> None:
        self._map, self._leases, self._others = podmap, leases, others

    def note(self, payload: bytes) -> None:
        what, count = FOREIGN.unpack_from(payload)
        blocks = memoryview(payload)[FOREIGN.size :]
        if not 1 <= what <= _LAST or not count or len(blocks) != count * FOREIGN_BLOCK_SIZE:
            raise FrameError(f"news {what} of {count} blocks of other nodes in {len(blocks)} bytes")
        if what != _TOUCH:
            self._map.note(what, Part(payload, FOREIGN.size))
            return
        for slot, (_, keys) in self._map.by_owner(blocks).items():
            self._others.tell_used(slot, keys)

    async def fresh(self) -> None:
        # Not abandoned: the caller's limit counts threads, and a peer that hangs up would have more.
        await trio.to_thread.run_sync(self._others.fresh)

    async def lease(self, lessee: Lessee, payload: bytes) -> bytes:
        number, milliseconds, reserved = LEASE.unpack_from(payload)
        blocks = memoryview(payload)[LEASE.size :]
        if not milliseconds or reserved or not blocks or len(blocks) % FOREIGN_BLOCK_SIZE:
            raise FrameError(f"a lease for {milliseconds} ms with {len(blocks)} bytes of blocks of other nodes")
        count = len(blocks) // FOREIGN_BLOCK_SIZE
        held = bytearray(count)
        with self._leases.ask_others(lessee, number, milliseconds, count) as asking:
            if asking.blocks:
                owners = self._map.by_owner(blocks[: asking.blocks * FOREIGN_BLOCK_SIZE])
                places = {slot: iter(indexes) for slot, (indexes, _) in owners.items()}
                wanted = {slot: keys for slot, (_, keys) in owners.items()}
                # Not abandoned: an answer that comes must be released with its lease.
                for kept in await trio.to_thread.run_sync(self._others.keep, wanted, asking.seconds):
                    for one, place in zip(kept.held, places[kept.slot], strict=False):
                        held[place] = one
                    asking.add(sum(kept.held), kept.release)
                number = asking.enter()
        return WORD.pack(number) + (held if number else bytes(count))
