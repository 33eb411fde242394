"""`python stalling.py DIRECTORY mount ...`: kvfs whose Python can be told to stall. It is a double of a slow command.

DIRECTORY/stall: once it is there and a segment is open ahead, the event loop stands still for SECONDS. Then there is
DIRECTORY/stalling.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import trio

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kvfs.cli import main
from kvfs.store.store import Store

SECONDS = 1.0
DIRECTORY = Path(sys.argv.pop(1))


async def stalling(store: Store) -> None:
    while True:
        await trio.sleep(0.02)
        if (DIRECTORY / "stall").exists() and store.segments._ready:
            (DIRECTORY / "stall").unlink()
            (DIRECTORY / "stalling").touch()
            time.sleep(SECONDS)
            (DIRECTORY / "stalling").unlink()


Store._count_pins_loop = stalling  # type: ignore[method-assign]
sys.exit(main())
