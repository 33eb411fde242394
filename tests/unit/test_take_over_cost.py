"""A take-over's time before its first answer: nothing is done for each block in Python, or loaded that is not needed.

Requests wait for all of it. Calls and modules are counted: seconds would tell of the machine.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import FrameType

import trio
from store_pools import LAZY, crashed_store, make_pool, write

from kvfs import journal
from kvfs.store.store import Store

FEW, MANY = 100, 1000
# A turn of the loop more or less makes some.
TURNS = 300


def calls_to_open(pool: Path, blocks: int) -> int:
    """How many calls of Python functions, those of C included, open a store that was killed with so many blocks."""
    fd, count = journal.make(1 << 20), 0

    async def fill(store: Store) -> None:
        for number in range(blocks):
            await write(store, b"%d" % number, 4096)
        await store.sync()

    def note(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    async def opened() -> None:
        async with Store.open(pool, replace(LAZY, journal=fd)) as store:
            sys.setprofile(None)
            assert store.statistics().blocks == blocks

    try:
        crashed_store(pool, fill, replace(LAZY, journal=fd))
        sys.setprofile(note)
        try:
            trio.run(opened)
        finally:
            sys.setprofile(None)
    finally:
        os.close(fd)
    return count


def test_a_store_that_was_killed_opens_without_a_call_for_each_block(tmp_path: Path) -> None:
    few = calls_to_open(make_pool(tmp_path / "few"), FEW)
    many = calls_to_open(make_pool(tmp_path / "many"), MANY)
    assert many - few < (MANY - FEW) // 2 + TURNS, (few, many)


def modules(*command: str) -> set[str]:
    """Modules that a command has loaded at its end."""
    code = (
        "import sys; from kvfs.cli import main; status = main(sys.argv[1:]); "
        "print(*sys.modules, sep='\\n', file=sys.stderr); sys.exit(status)"
    )
    done = subprocess.run([sys.executable, "-c", code, *command], capture_output=True, text=True, check=False)
    return set(done.stderr.split())


def test_a_verb_loads_no_other_verbs_file() -> None:
    assert {name for name in modules("hold", "/nowhere/socket") if name.startswith("kvfs.cli.")} == {
        f"kvfs.cli.{name}" for name in ("arguments", "command", "holding", "output", "programs")
    }
