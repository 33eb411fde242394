"""Memory that C is lent: the one door for buffers of Python's own (kvfs/client/memory.py is that of callers' memory).

C is never lent a memoryview. The garbage collector of CPython 3.11 clears a memoryview that has exports, and the end of
such an export is a crash. A traceback makes the cycles that are collected: that of a cancelled request holds what was
lent for it. So C gets an object that is no container, and an offset in it.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any

from kvfs._native import ffi

if TYPE_CHECKING:
    Lendable = bytes | bytearray | array[int]

_KINDS = (bytes, bytearray, array)


def lent(memory: Lendable, kind: str = "char[]") -> Any:
    """A C array of this kind over the memory, which lives and is not resized while the array is referred to."""
    assert isinstance(memory, _KINDS), type(memory)
    return ffi.from_buffer(kind, memory)


class Part:
    """The bytes of a message from an offset on, which are lent while this is referred to."""

    __slots__ = ("_whole", "data", "size", "start")

    def __init__(self, message: bytes, start: int = 0) -> None:
        """start: beyond the end nothing is left."""
        self.start = min(start, len(message))
        self._whole = lent(message)
        self.data, self.size = self._whole + self.start, len(message) - self.start
