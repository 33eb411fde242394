"""python eager_gc.py WORDS: kvfs WORDS, whose daemon collects garbage at every chance.

An object that the collector clears in the wrong order crashes at once, and not once in an hour.
"""

from __future__ import annotations

import gc
import runpy

_set_threshold = gc.set_threshold


def _every_time(*_: int) -> None:
    _set_threshold(1, 5, 5)


gc.set_threshold = _every_time
runpy.run_module("kvfs", run_name="__main__", alter_sys=True)
