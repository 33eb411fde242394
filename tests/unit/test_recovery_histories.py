"""Histories drawn by chance, each cut off by a crash or ended: what recovery finds is allowed and complete, and stays.

Nothing is committed and no summary written but by the history's own steps. So the age of the index and the summaries at
the crash is drawn too. KVFS_HISTORIES sets how many there are in each of the groups (default 20; 4 without --run-slow).
"""

from __future__ import annotations

import itertools
import os
import random
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from helpers import often
from store_pools import LAZY, crashed_store, make_pool, names, rename, unlink, verify_all, with_store, write

from kvfs.store.segment import State
from kvfs.store.store import Store
from kvfs.types import ROOT_INODE, InodeNumber

HISTORIES = int(os.environ.get("KVFS_HISTORIES") or often(4, 20))
LIVES, STEPS = 4, 30
KINDS = (
    ["write"] * 6
    + ["rename"] * 3
    + ["unlink", "pin", "carry", "drain", "evict", "commit", "flush", "release", "settle"]
)
NAMES = [b"n%d" % i for i in range(12)]
# Sparse files: their headers alone take a page or a whole part of a segment.
SIZES = [4096, 8 << 20, 64 << 20, 128 << 20]


@dataclass
class Block:
    """One content, known by its size: no two are equal. Times are steps of the history."""

    size: int
    names: list[tuple[int, bytes]]
    removed: int | None = None

    def possible(self, mark: int) -> set[bytes]:
        """The names it may have if what came after `mark` may be undone."""
        if self.removed is not None and self.removed <= mark:
            return set()
        until = itertools.chain((since for since, _ in self.names[1:]), [1 << 60])
        return {name for (_, name), end in zip(self.names, until, strict=True) if end > mark}


@dataclass
class History:
    """The actions, and the states that may be found after them."""

    choices: random.Random
    blocks: list[Block] = field(default_factory=list)
    now: int = 0
    committed: int = 0
    settled: int = 0
    written: int = 0
    log: list[str] = field(default_factory=list)

    def live(self) -> dict[bytes, Block]:
        return {block.names[-1][1]: block for block in self.blocks if block.removed is None}

    async def live_once(self, store: Store) -> None:
        for _ in range(self.choices.randrange(1, STEPS)):
            self.now += 1
            kind = self.choices.choice(KINDS)
            await getattr(self, f"_{kind}")(store)
            for name, block in self.live().items():
                if store.index.lookup(ROOT_INODE, name) is None:  # evicted, or drained
                    block.removed = self.now
                    self.log.append(f"{self.now}: {name!r} went")

    def _pick(self, store: Store) -> tuple[bytes, InodeNumber] | None:
        live = self.live()
        if not live:
            return None
        name = self.choices.choice(sorted(live))
        number = store.index.lookup(ROOT_INODE, name)
        assert number is not None
        return name, number

    async def _write(self, store: Store) -> None:
        name = self.choices.choice(NAMES)
        old = self.live().get(name)
        if old is not None:
            unlink(store, name)
            old.removed = self.now
        self.written += 1
        size = self.choices.choice(SIZES) + self.written
        await write(store, name, size)
        self.blocks.append(Block(size, [(self.now, name)]))
        self.log.append(f"{self.now}: write {name!r} of {size}")

    async def _rename(self, store: Store) -> None:
        picked, to = self._pick(store), self.choices.choice(NAMES)
        if picked is None or picked[0] == to:
            return
        live = self.live()
        if to in live:
            live[to].removed = self.now
        rename(store, picked[1], to)
        live[picked[0]].names.append((self.now, to))
        self.log.append(f"{self.now}: rename {picked[0]!r} to {to!r}")

    async def _unlink(self, store: Store) -> None:
        picked = self._pick(store)
        if picked is not None:
            self.live()[picked[0]].removed = self.now
            unlink(store, picked[0])
            self.log.append(f"{self.now}: unlink {picked[0]!r}")

    async def _pin(self, store: Store) -> None:
        picked = self._pick(store)
        if picked is not None:
            await store.blocks.pin(picked[1])
            self.log.append(f"{self.now}: pin {picked[0]!r}")

    async def _carry(self, store: Store) -> None:
        picked = self._pick(store)
        record = None if picked is None else store.index.raw(picked[1])
        if picked is not None and record is not None:
            await store.sealing.carry(record)
            self.log.append(f"{self.now}: carry {picked[0]!r}")

    async def _drain(self, store: Store) -> None:
        store.segments.retire_open()
        closed = [segment for segment in store.segments.all if segment.state == State.CLOSED]
        if closed:
            segment = self.choices.choice(closed)
            await store.evictor.drain(segment, lambda count: None)
            self.log.append(f"{self.now}: drain {segment.index}")

    async def _evict(self, store: Store) -> None:
        """Without the commit that `kvfs evict` ends with."""
        until = store.evictor.counters.segments + self.choices.randrange(1, 4)
        await store.evictor.free_until(lambda: store.evictor.counters.segments >= until)
        self.log.append(f"{self.now}: evict")

    async def _commit(self, store: Store) -> None:
        await store.blocks.commit()
        self.committed = self.now
        self.log.append(f"{self.now}: commit")

    async def _flush(self, store: Store) -> None:
        await store.segments.flush_summaries()
        self.log.append(f"{self.now}: flush")

    async def _release(self, store: Store) -> None:
        """As the store does for writers that wait for freed segments."""
        await store.segments.flush_summaries(all_dirty=False)
        self.log.append(f"{self.now}: release")

    async def _settle(self, store: Store) -> None:
        await self._commit(store)
        for _ in range(2):
            await self._flush(store)
        self.settled = self.now

    def adopt(self, found: dict[bytes, int], mark: int) -> None:
        """Compare, then go on from what was found."""
        told = "\n".join([*self.log, f"found {found}, mark {mark}"])
        by_size = {block.size: block for block in self.blocks}
        for name, size in found.items():
            assert size in by_size, f"{name!r} has {size} bytes, which nothing ever had\n{told}"
            possible = by_size[size].possible(mark)
            assert name in possible, f"{name!r} has the {size} bytes that may be at {possible}\n{told}"
        assert len(set(found.values())) == len(found), f"one block at two names\n{told}"
        for name, block in self.live().items():
            if len(block.possible(mark)) == 1:
                assert found.get(name) == block.size, f"{name!r} of {block.size} bytes is missing\n{told}"
        self.now += 1
        self.blocks = [Block(size, [(self.now, name)]) for name, size in found.items()]
        self.committed = self.settled = self.now
        self.log.append(f"{self.now}: found {found}")


def observe(pool: Path, *, crash: bool) -> dict[bytes, int]:
    """Name and size of all that a mount finds, every block verified; it ends well, or by a crash when all settled."""
    found: dict[bytes, int] = {}

    async def work(store: Store) -> None:
        for name in names(store):
            number = store.index.lookup(ROOT_INODE, name)
            inode = None if number is None else store.index.get(number)
            assert inode is not None
            found[name] = inode.size
        await verify_all(store)
        if crash:
            await store.blocks.commit()
            for _ in range(2):
                await store.segments.flush_summaries()

    (crashed_store if crash else with_store)(pool, work, LAZY)
    return found


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("group", range(6))
def test_what_recovery_finds_is_allowed_and_stays(tmp_path: Path, group: int) -> None:
    for number in range(HISTORIES):
        history = History(random.Random(f"{group}/{number}"))
        pool = make_pool(tmp_path / "pool", files=2, size=24 << 20)
        for _ in range(history.choices.randrange(1, LIVES)):
            crash, without_index = history.choices.random() < 0.8, history.choices.random() < 0.25
            (crashed_store if crash else with_store)(pool, history.live_once, LAZY)
            mark = history.now if not crash else history.settled if without_index else history.committed
            history.log.append(f"{'crash' if crash else 'end'}{', index lost' if without_index else ''}")
            if without_index:
                shutil.rmtree(pool / "index")
            found = observe(pool, crash=history.choices.random() < 0.5)
            history.adopt(found, mark)
            shutil.rmtree(pool / "index")
            again = observe(pool, crash=False)
            assert again == found, "\n".join([*history.log, f"without the index: {again}"])
        shutil.rmtree(pool)
