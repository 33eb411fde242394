"""One history leads to the same, whoever answers: a thread of C, or Python.

Three hands run each history (hands.py): C, Python while C's threads are held off, and C with next to nothing in memory.
Python has seals of its own. Names and attributes it has C change, and brings what that lacks. After each operation all
that is found must be equal. Compared are inode records in every field, the block table, uses, accounts by segment and
by user, pins, and the last commit. Results are compared, too, and all that the next store finds. A clock time is
compared as the operation that it is of.

Chains are left out: they depend on the milliseconds between two stores of a process (native/src/content/processes.c).
So each operation is another process's. A test of its own has them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest
import trio
from drawing import Drawing, shortest
from hands import Answered, Hand, Side
from helpers import often, slow
from history import Operation, Pools, compare, run_all, story

# Of drawn histories: how many, the first one's seed, operations of each. Usually the seeds are the same.
EXAMPLES = int(os.environ.get("KVFS_MODEL_EXAMPLES") or often(3, 30))
SEED = int(os.environ.get("KVFS_MODEL_SEED", "1"))
STEPS = int(os.environ.get("KVFS_MODEL_STEPS", "40"))
# Finds the shortest part of a failing history: takes minutes.
SHRINK = bool(os.environ.get("KVFS_MODEL_SHRINK"))
NOREPLACE = 1
MIB = 1 << 20
ALICE = 41_002
TMP = "block.tmp0"


@dataclass(frozen=True)
class Case:
    """A history; and the kinds that C answers in it, if its memory is full."""

    operations: tuple[Operation, ...]
    by_c: str = "create seal"
    journal: bool = False


def case(*operations: Operation, by_c: str = "create seal", journal: bool = False) -> Case:
    return Case(operations, by_c, journal)


CASES = {
    "files are made, sealed, renamed and removed": case(
        ("mkdir", "d"), ("create", "a"), ("write", "a", 0, 5000), ("seal", "a"), ("release", "a"),
        ("rename", "a", "d/b"),
        ("store_file", "c", 4096), ("unlink", "c"), ("commit",), ("set", "d/b", {"mode": 0o600}), ("crash",),
        ("settle",),
        ("restart",), ("unlink", "d/b"), by_c="create seal rename unlink",
    ),
    "an engine's block gets its name before the seal": case(
        ("create", TMP), ("write", TMP, 0, 20_000), ("rename", TMP, "block"), ("close", TMP), ("commit",), ("crash",),
        ("create", TMP), ("write", TMP, 0, 30_000, "y"), ("rename", TMP, "block"), ("close", TMP), ("settle",),
        by_c="create seal rename",
    ),
    "an engine's block gets its name after the seal": case(
        ("store_file", TMP, 20_000), ("rename", TMP, "block"), ("store_file", TMP, 30_000, "y"),
        ("rename", TMP, "block"),
        ("settle",), ("store_file", TMP, 10_000, "z"), ("rename", TMP, "block", NOREPLACE),
        ("rename", TMP, "other", NOREPLACE),
        by_c="create seal rename",
    ),
    "a rename over an open block": case(
        ("store_file", "a", 5000), ("store_file", "b", 6000, "y"), ("open", "b", "reader"), ("rename", "a", "b"),
        ("read", "reader", 0, 10), ("release", "reader"), ("settle",), by_c="create seal rename",
    ),
    "a rename over a file that is being written": case(
        ("create", "b"), ("write", "b", 0, 100), ("store_file", "a", 5000), ("rename", "a", "b"), ("close", "b"),
        ("settle",),
        ("crash",),
    ),
    "a rename of a file that is being written over a block, and a kill": case(
        ("store_file", "b", 6000), ("commit",), ("create", "a"), ("write", "a", 0, 100), ("rename", "a", "b"),
        ("crash",),
        ("settle",), journal=True,
    ),
    "a rename onto itself": case(("store_file", "a", 10), ("rename", "a", "a"), ("rename", "a", "a", NOREPLACE)),
    "renames of directories": case(
        ("mkdir", "d"), ("mkdir", "d/e"), ("store_file", "d/e/a", 10), ("rename", "d", "f"), ("mkdir", "d"),
        ("rename", "f", "d"), ("rename", "d", "d/e/g"), ("mkdir", "h"), ("store_file", "h/a", 10),
        ("rename", "d", "h"),
        ("rename", "h/a", "d"), ("rename", "d/e", "h/e"), ("settle",), ("restart",), ("rename", "h/e/a", "d/b"),
    ),
    "names that are not there": case(
        ("unlink", "a"), ("rename", "a", "b"), ("rmdir", "a"), ("mkdir", "d"), ("unlink", "d"),
        ("store_file", "a", 10),
        ("rename", "a", "none/b"), ("rmdir", "a"), ("rename", "d", "a"), ("rename", "a", "d"), ("create", "a/b"),
        ("create", "d" + "x" * 255), ("rename", "a", "x" * 256),
    ),
    "names of any length": case(
        ("store_file", "a" * 7, 10), ("rename", "a" * 7, "b" * 8), ("rename", "b" * 8, "c" * 9),
        ("rename", "c" * 9, "d" * 255),
        ("rename", "d" * 255, "e"), ("settle",), by_c="rename",
    ),
    "renames across directories below pins": case(
        ("mkdir", "d"), ("mkdir", "p"), ("store_file", "a", 5000), ("store_file", "p/b", 6000), ("pin", "p"),
        ("settle",),
        ("rename", "a", "p/a"), ("rename", "p/b", "d/b"), ("rename", "p/a", "p/c"), ("store_file", "p/d", 100),
        ("create", "p/e"), ("write", "p/e", 0, 100), ("rename", "p/e", "d/e"), ("close", "p/e"),
        ("rename", "d/b", "b"),
        ("settle",), ("crash",), ("unlink", "p/a"), ("unlink", "p/c"), ("pin", "p", False), ("settle",),
        by_c="create seal rename",
    ),
    "a pinned file": case(
        ("store_file", "a", 5000), ("pin", "a"), ("rename", "a", "b"), ("mkdir", "d"), ("rename", "b", "d/b"),
        ("store_file", "c", 70_000), ("rename", "c", "d/b"), ("pin", "d/b"), ("settle",), ("unlink", "d/b"),
        ("settle",),
    ),
    "a pin of what is being written": case(
        ("create", "a"), ("write", "a", 0, 9000), ("pin", "a"), ("close", "a"), ("open", "a", "again", os.O_RDWR),
        ("write", "again", 0, 30_000), ("close", "again"), ("settle",), by_c="create",
    ),
    "links to nothing": case(
        ("symlink", "l", "nowhere"), ("create", "l"), ("store_file", "a", 10), ("rename", "a", "l"),
        ("symlink", "m", "nowhere"),
        ("rename", "m", "n"), ("rename", "n", "l"), ("unlink", "l"), ("settle",), ("restart",), ("symlink", "l", "x"),
        ("unlink", "l"),
    ),
    "unlinks of open blocks": case(
        ("store_file", "a", 5000), ("open", "a", "reader"), ("unlink", "a"), ("read", "reader", 0, 10),
        ("store_file", "a", 10, "y"),
        ("commit",), ("release", "reader"), ("store_file", "b", 5000), ("open", "b", "reader"), ("unlink", "b"),
        ("crash",),
        by_c="create seal unlink",
    ),
    "unlinks of files that are being written": case(
        ("create", "a"), ("write", "a", 0, 5000), ("unlink", "a"), ("write", "a", 0, 6000),
        ("set_open", "a", {"mode": 0o600}),
        ("close", "a"), ("create", "b"), ("write", "b", 0, 5000), ("seal", "b"), ("write", "b", 0, 9),
        ("unlink", "b"),
        ("close", "b"), ("settle",), by_c="create seal unlink",
    ),
    "two handles of one file": case(
        ("create", "a"), ("open", "a", "second", os.O_RDWR), ("write", "a", 0, 5000), ("seal", "a"), ("release", "a"),
        ("write", "second", 5000, 5000, "y"), ("open", "a", "reader"), ("close", "second"),
        ("read", "reader", 4990, 20),
        ("release", "reader"), ("settle",),
    ),
    # Over two segments: in which one a file of four ends depends on how many were opened ahead.
    "seals of any content": case(
        ("store_file", "empty", 0), ("create", "hole"), ("write", "hole", 300_000, 10), ("close", "hole"),
        ("create", "only hole"), ("set", "only hole", {"size": 100_000}), ("close", "only hole"),
        ("store_file", "large", MIB + 5), ("store_file", "page", 4096), ("seal", "page"), ("settle",),
    ),
    "rewrites and truncations": case(
        ("store_file", "a", 9000), ("open", "a", "w", os.O_RDWR), ("write", "w", 4000, 10, "y"), ("close", "w"),
        ("open", "a", "w", os.O_RDWR | os.O_TRUNC), ("write", "w", 0, 10, "z"), ("close", "w"),
        ("set", "a", {"size": 5}),
        ("set", "a", {"size": 8192}), ("open", "a", "w", os.O_WRONLY), ("write", "w", 0, 10), ("rename", "a", "b"),
        ("close", "w"), ("open", "b", "w", os.O_RDWR), ("write", "w", 0, 1), ("unlink", "b"), ("close", "w"),
        ("settle",),
    ),
    "attributes before the seal": case(
        ("create", "a", 0o4755), ("set", "a", {"mtime_ns": 5_000_000_007, "atime_ns": 6_000_000_000}),
        ("write", "a", 0, 10),
        ("set", "a", {"uid": ALICE, "gid": 7}), ("set_attribute", "a", "user.x", "1"),
        ("set_attribute", "a", "user.kvfs.group", "g"),
        ("set", "a", {"mtime_ns": 5_000_000_009}), ("close", "a"), ("remove_attribute", "a", "user.x"),
        ("set_attribute", "a", "user.longer", "x" * 300), ("set", "a", {"mtime_ns": -1}), ("rename", "a", "b"),
        ("settle",),
        ("crash",), by_c="create seal rename",
    ),
    "attributes of directories": case(
        ("mkdir", "d", 0o2775), ("set", "d", {"gid": 77}), ("create", "d/a", {"user": ALICE}),
        ("write", "d/a", 0, 10),
        ("set_attribute", "d", "user.x", "y" * 100), ("close", "d/a"), ("mkdir", "d/e"), ("store_file", "d/e/b", 10),
        ("set", "d", {"mtime_ns": 7_000_000_000}), ("store_file", "d/c", 10), ("settle",),
        ("set", "d", {"mode": 0o700}),
        ("rename", "d/e/b", "d/b"), ("settle",), ("crash",), by_c="create seal rename",
    ),
    "a touch during a seal": case(
        ("create", "a"), ("write", "a", 0, 9000), ("begin_seal", "a"), ("set", "a", {"mtime_ns": 5_000_000_000}),
        ("end_seal",),
        ("create", "b"), ("write", "b", 0, 9000), ("begin_seal", "b"), ("set", "b", {"mtime_ns": -1}), ("commit",),
        ("end_seal",),
        ("create", "c"), ("write", "c", 0, 9000), ("begin_seal", "c"), ("set", "c", {"atime_ns": 7}), ("end_seal",),
        ("settle",),
    ),
    "a chmod during a seal": case(
        ("create", "a"), ("write", "a", 0, 9000), ("begin_seal", "a"), ("set", "a", {"mode": 0o600}), ("end_seal",),
        ("create", "b", 0o4755), ("write", "b", 0, 9000), ("begin_seal", "b"),
        ("set", "b", {"uid": ALICE, "gid": 3}), ("end_seal",),
        ("settle",), ("crash",),
    ),
    "attributes during a seal": case(
        ("create", "a"), ("write", "a", 0, 9000), ("set_attribute", "a", "user.old", "1"), ("begin_seal", "a"),
        ("set_attribute", "a", "user.x", "y" * 50), ("remove_attribute", "a", "user.old"), ("end_seal",),
        ("settle",), ("crash",),
    ),
    "a rename during a seal": case(
        ("mkdir", "d"), ("create", "a"), ("write", "a", 0, 9000), ("begin_seal", "a"),
        ("rename", "a", "d/longer name"),
        ("end_seal",), ("store_file", "c", 10), ("create", "b"), ("write", "b", 0, 9000), ("begin_seal", "b"),
        ("rename", "b", "c"),
        ("end_seal",), ("create", "e"), ("write", "e", 0, 9000), ("begin_seal", "e"), ("rename", "c", "e"),
        ("end_seal",),
        ("settle",), ("crash",), by_c="create seal rename",
    ),
    "a directory's rename during a seal": case(
        ("mkdir", "d"), ("create", "d/a"), ("write", "d/a", 0, 9000), ("begin_seal", "d/a"), ("rename", "d", "e"),
        ("end_seal",),
        ("settle",), ("crash",),
    ),
    "an unlink during a seal": case(
        ("create", "a"), ("write", "a", 0, 9000), ("begin_seal", "a"), ("unlink", "a"), ("end_seal",),
        ("release", "a"),
        ("settle",), ("create", "b"), ("write", "b", 0, 9000), ("begin_seal", "b"), ("unlink", "b"), ("create", "b"),
        ("end_seal",),
        ("crash",), by_c="create unlink",
    ),
    "a pin during a seal": case(
        ("create", "a"), ("write", "a", 0, 9000), ("begin_seal", "a"), ("pin", "a"), ("end_seal",), ("settle",),
    ),
    "a pin above during a seal": case(
        ("mkdir", "d"), ("create", "d/a"), ("write", "d/a", 0, 9000), ("begin_seal", "d/a"), ("pin", "d"),
        ("end_seal",), ("settle",),
    ),
    "an unpin during a seal": case(
        ("create", "a"), ("write", "a", 0, 9000), ("pin", "a"), ("begin_seal", "a"), ("pin", "a", False),
        ("end_seal",), ("settle",),
        by_c="create",
    ),
    "puts and deletes": case(
        ("mkdir", "d"), ("put", "d/a", 9000), ("store_file", "b", 9000), ("put", "b", 100), ("put", "b", 200, "y"),
        ("rename", "b", "d/b"), ("delete", "d/b"), ("delete", "d/b"), ("delete", "d"), ("settle",),
        ("delete", "d/a"), ("crash",),
        by_c="put delete rename",
    ),
    "puts over open and pinned files": case(
        ("store_file", "a", 9000), ("open", "a", "reader"), ("put", "a", 100), ("release", "reader"), ("pin", "a"),
        ("put", "a", 300),
        ("settle",), ("create", "b"), ("write", "b", 0, 10), ("put", "b", 300), ("close", "b"), ("pin", "a"),
        ("delete", "a"),
        ("settle",), by_c="put",
    ),
    "eviction between": case(
        ("store_file", "a", 9000), ("store_file", "b", 9000), ("commit",), ("evict", "a"), ("open", "a", "r"),
        ("store_file", "a", 5000),
        ("evict", "b"), ("rename", "a", "b"), ("evict", "b"), ("tell",), ("store_file", "b", 10), ("open", "b", "r"),
        ("evict", "b"),
        ("unlink", "b"), ("release", "r"), ("put", "c", 9000), ("settle",), ("evict", "c"), ("put", "c", 100),
        ("crash",),
    ),
    "eviction of several": case(
        ("store_file", "a", 9000), ("store_file", "b", 9000), ("store_file", "c", 9000), ("open", "a", "r"),
        ("release", "r"),
        ("evict", "a"), ("rename", "c", "d"), ("store_file", "a", 9000), ("evict", "b", "d"), ("settle",),
        by_c="create seal rename",
    ),
    "many blocks fill segments": case(
        *(("store_file", f"f{number}", 150_000) for number in range(14)), ("rename", "f0", "g"), ("unlink", "f1"),
        ("evict", "g", "f2"),
        ("settle",), ("store_file", "f2", 150_000), ("settle",), by_c="create seal rename unlink",
    ),
    "creations of what is there": case(
        ("store_file", "a", 10), ("create", "a", {"flags": os.O_RDWR | os.O_EXCL}), ("create", "a"),
        ("write", "a", 0, 3, "y"), ("close", "a"),
        ("create", "a", {"flags": os.O_RDWR | os.O_TRUNC, "user": ALICE}), ("close", "a"), ("mkdir", "d"),
        ("create", "d"),
    ),
    "what is not in memory": case(
        ("mkdir", "d"), ("store_file", "d/a", 9000), ("store_file", "d/b", 9000), ("store_file", "c", 9000),
        ("settle",), ("restart",),
        ("rename", "d/a", "a"), ("restart",), ("rename", "c", "d/b"), ("restart",), ("unlink", "d/b"),
        ("store_file", "d/c", 10),
        ("restart",), ("create", "d/c", {"flags": os.O_RDWR | os.O_EXCL}), ("delete", "d/c"), ("rmdir", "d"), by_c="",
    ),
    "a kill whose journal is kept": case(
        ("mkdir", "d"), ("store_file", "a", 9000), ("commit",), ("rename", "a", "d/b"), ("store_file", "c", 10),
        ("unlink", "c"),
        ("create", "e"), ("write", "e", 0, 10), ("put", "f", 100), ("delete", "f"), ("set", "d/b", {"mode": 0o600}),
        ("crash",),
        ("rename", "d/b", "g"), ("open", "g", "r"), ("unlink", "g"), ("crash",), journal=True,
        by_c="create seal rename unlink put delete",
    ),
    "renames of what is not in memory": case(
        ("mkdir", "d"), ("mkdir", "d/e"), ("mkdir", "p"), ("mkdir", "empty"), ("store_file", "d/e/a", 9000),
        ("store_file", "d/b", 9000),
        ("store_file", "p/c", 9000), ("store_file", "p/d", 9000), ("pin", "p"), ("settle",), ("restart",),
        ("rename", "d/e/a", "p/a"), ("restart",), ("rename", "d/b", "p/d"), ("restart",), ("rename", "p/c", "d/c"),
        ("restart",), ("rename", "d", "p/e"), ("restart",), ("unlink", "p/a"), ("rename", "p/d", "p/a", NOREPLACE),
        ("restart",), ("rename", "p/e/e", "empty"), ("rename", "p/e/c", "p/a", NOREPLACE), ("settle",),
        ("restart",), ("rename", "p", "p/e/loop"), ("rename", "p/a", "empty/a"), ("rmdir", "empty"), ("settle",),
        by_c="",
    ),
    "slabs are renamed, replaced and removed": case(
        ("create", "a"), ("set_attribute", "a", "user.kvfs.slab", "1"), ("rename", "a", "b"), ("mkdir", "d"),
        ("rename", "b", "d/b"), ("store_file", "c", 9000), ("release", "a"), ("settle",), ("rename", "d/b", "c"),
        ("rename", "c", "d/b"), ("create", "e"), ("set_attribute", "e", "user.kvfs.slab", "1"), ("unlink", "e"),
        ("release", "e"),
        ("store_file", "f", 9000), ("rename", "f", "d/b"), ("settle",), ("unlink", "d/b"), ("settle",),
    ),
    "C renames over files, links and what is written": case(
        ("store_file", "a", 9000), ("store_file", "b", 9000), ("mkdir", "d"), ("symlink", "d/l", "x"),
        ("rename", "a", "b"), ("rename", "b", "d/l"), ("create", "w"), ("write", "w", 0, 10),
        ("rename", "d/l", "w"), ("close", "w"),
        ("create", "v"), ("write", "v", 0, 10), ("rename", "v", "w"), ("close", "v"), ("rename", "v", "v"),
        ("rename", "w", "d"), ("rename", "d", "w"), ("rename", "w", "d/w", NOREPLACE),
        ("settle",), ("crash",), by_c="create seal rename",
    ),
    "files that are synced": case(
        ("create", "a"), ("write", "a", 0, 9000), ("fsync", "a"), ("write", "a", 0, 9), ("rename", "a", "b"),
        ("fsync", "a"), ("release", "a"),
        ("crash",), by_c="create rename",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def pools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pools]:
    yield Pools(tmp_path_factory.mktemp("hands"))


# Each takes half a second; the ordinary tier has one of each kind.
SLOW = {
    "an engine's block gets its name after the seal", "a rename onto itself",
    "renames of directories", "names that are not there", "names of any length", "a pinned file",
    "a pin of what is being written", "links to nothing", "two handles of one file", "seals of any content",
    "attributes of directories", "a directory's rename during a seal",
    "a pin above during a seal", "an unpin during a seal", "puts over open and pinned files", "eviction of several",
    "many blocks fill segments", "creations of what is there", "files that are synced",
    "slabs are renamed, replaced and removed",
}  # fmt: skip
assert CASES.keys() >= SLOW


@pytest.mark.parametrize("name", [slow(name) if name in SLOW else name for name in CASES])
def test_c_and_python_do_the_same(name: str, pools: Pools) -> None:
    history = CASES[name]
    runs = run_all(pools, history.operations, list(Side), with_journal=history.journal)
    compare(history.operations, runs)
    by = {run.side: run.answered for run in runs}
    assert not +by[Side.PYTHON].c, f"C was held off: {by[Side.PYTHON]}"
    kinds = set(history.by_c.split())
    assert kinds <= set(+by[Side.PYTHON].python), f"{by[Side.PYTHON]}"
    assert kinds <= set(+by[Side.C].c), f"{by[Side.C]}"


@pytest.mark.parametrize("side", Side)
def test_a_block_follows_the_one_whose_seal_took_long(side: Side, pools: Pools) -> None:
    """A burst of stores goes on for 100 ms after the close of the one before, whoever seals it. On a machine where the
    next takes longer it is tried again."""

    async def work(hand: Hand) -> None:
        for turn in range(20):
            first, second = f"first{turn}", f"second{turn}"
            await hand.create(first)
            await hand.write(first, 0, 10)
            await hand.begin_seal(first)
            await trio.sleep(0.15)
            await hand.end_seal()
            await hand.create(second)
            if await hand.behind(second) == f"/{first}":
                return
            await trio.sleep(0.2)  # the burst is over
        pytest.fail(f"{side}: no block came behind the one before it")

    Hand(pools.copy(), side).live(work)


def drawn(seed: int) -> tuple[list[Operation], bool]:
    """A history, and whether the journal is kept over its kills."""
    return Drawing(seed).draw(STEPS), bool(seed % 2)


def fails(pools: Pools, history: Sequence[Operation], journal: bool) -> bool:
    try:
        compare(history, run_all(pools, history, list(Side), with_journal=journal))
    except Exception:
        return True
    return False


def test_c_and_python_do_the_same_in_drawn_histories(pools: Pools) -> None:
    total = {side: Answered() for side in Side}
    for seed in range(SEED, SEED + EXAMPLES):
        history, journal = drawn(seed)
        try:
            runs = run_all(pools, history, list(Side), with_journal=journal)
            compare(history, runs)
        except Exception as error:
            error.add_note(f"KVFS_MODEL_SEED={seed}")
            if SHRINK:
                short = shortest(history, lambda part, journal=journal: fails(pools, part, journal))
                error.add_note(f"the shortest that fails, with journal {journal}:\n{story(short)}")
            raise
        for run in runs:
            total[run.side].c += run.answered.c
            total[run.side].python += run.answered.python
    kinds = {"create", "seal", "rename", "unlink", "put", "delete"}
    assert not +total[Side.PYTHON].c and kinds <= set(+total[Side.PYTHON].python), f"{total[Side.PYTHON]}"
    assert kinds <= set(+total[Side.C].c), f"{total[Side.C]}"
    assert {"create", "seal", "unlink"} <= set(+total[Side.BARE].c), f"{total[Side.BARE]}"
    assert {"create", "seal", "rename"} <= set(+total[Side.BARE].python), f"{total[Side.BARE]}"
