"""`kvfs preload-run`: run a program with libkvfs_preload.so, which takes its calls on kvfs mounts to the native path.

Knows where the library lies and how the dynamic linker finds it; what it does is in native/shims/preload/.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from kvfs.errors import MissingFeatureError, UsageError

LIBRARY = Path(__file__).resolve().parents[1] / "lib" / "libkvfs_preload.so"


def library() -> Path:
    """The library. MissingFeatureError if it is not built."""
    if not LIBRARY.exists():
        raise MissingFeatureError(f"{LIBRARY}: not built; run tools/setup")
    # The dynamic linker takes these for separators and knows no escape.
    if any(character in str(LIBRARY) for character in ": \t\n"):
        raise MissingFeatureError(f"{LIBRARY}: LD_PRELOAD cannot name a path with a space or a colon in it")
    return LIBRARY


def environment(base: Mapping[str, str]) -> dict[str, str]:
    """`base`, with the library before all other preloaded ones."""
    others = base.get("LD_PRELOAD", "")
    return {**base, "LD_PRELOAD": f"{library()}:{others}" if others else str(library())}


def run(command: Sequence[str]) -> int:
    """Become the command. Returns only by an exception: MissingFeatureError, or UsageError if it cannot be run."""
    if not command:
        raise UsageError("preload-run: no command given")
    given = environment(os.environ)
    try:
        os.execvpe(command[0], list(command), given)
    except OSError as error:
        raise UsageError(f"{command[0]}: {os.strerror(error.errno or 0)}") from error
