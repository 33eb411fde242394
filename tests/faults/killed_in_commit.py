"""`python killed_in_commit.py DIRECTORY mount ...`: kvfs that ends by SIGKILL at one step of a commit.

DIRECTORY/STEP names the step. It is a double of a machine that fails just there.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kvfs.cli import main
from kvfs.index.lmdb import LmdbIndex
from kvfs.store.segments import Segments

DIRECTORY = Path(sys.argv.pop(1))


def die_after(owner: type, method: str, step: str) -> None:
    original: Callable[..., Any] = getattr(owner, method)

    def dying(self: Any, *arguments: Any) -> Any:
        result = original(self, *arguments)
        if (DIRECTORY / step).exists():
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, method, dying)


die_after(LmdbIndex, "_begin_commit", "frozen")
die_after(LmdbIndex, "_write_inodes", "half-written")
die_after(LmdbIndex, "_write_batch", "written")
die_after(LmdbIndex, "_write", "committed")
die_after(LmdbIndex, "_end_commit", "shown")
die_after(Segments, "take_notes", "noted")
sys.exit(main())
