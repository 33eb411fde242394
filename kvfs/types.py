"""Small types that every room shares: numbers that must not be confused, and constants of the format."""

from __future__ import annotations

from typing import NewType

InodeNumber = NewType("InodeNumber", int)
SegmentIndex = NewType("SegmentIndex", int)

PAGE_SIZE = 4096
NAME_MAX = 255
ROOT_INODE = InodeNumber(1)
# Mount epoch in the high bits, a counter in the low ones: numbers never go back (I14), whatever a crash forgot.
COUNTER_BITS = 36
# The last epoch that such numbers have room for.
EPOCH_MAX = (1 << 64 - COUNTER_BITS) - 1
