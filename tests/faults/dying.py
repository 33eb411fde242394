"""`python dying.py DIRECTORY mount ...`: kvfs with a store that can be told to die: a double of a bug in it.

DIRECTORY/hold: from when it is there no job of the data plane is completed, and no sync ends; DIRECTORY/held says so.
DIRECTORY/die: a background task of the store raises.
"""

from __future__ import annotations

import sys
from pathlib import Path

import trio

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kvfs.cli import main
from kvfs.store.store import Store

DIRECTORY = Path(sys.argv.pop(1))


async def sleep_for_ever(store: Store) -> None:
    await trio.sleep_forever()


async def dying(store: Store) -> None:
    while not (DIRECTORY / "die").exists():
        await trio.sleep(0.02)
        if (DIRECTORY / "hold").exists():
            store.plane._deliver = lambda cookie, result: None  # type: ignore[method-assign]
            Store.sync = sleep_for_ever  # type: ignore[method-assign]
            (DIRECTORY / "held").touch()
    raise LookupError("the task that dies")


Store._count_pins_loop = dying  # type: ignore[method-assign]
sys.exit(main())
