"""Small types that every room shares: numbers that must not be confused, and constants of the format."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NewType

InodeNumber = NewType("InodeNumber", int)
SegmentIndex = NewType("SegmentIndex", int)

PAGE_SIZE = 4096
NAME_MAX = 255
ROOT_INODE = InodeNumber(1)
# Mount epoch in the high bits, a counter and the node's slot in the low ones: numbers never go back (I14), whatever a
# crash forgot.
SLOT_BITS = 12
SLOT_STEP = 1 << SLOT_BITS
COUNTER_BITS = 40
# The last epoch that such numbers have room for.
EPOCH_MAX = (1 << 21) - 1
# The inode numbers of a pod's directories: made of parent and name.
INODE_DERIVED = 1 << 62


@dataclass(frozen=True, slots=True)
class UserNumbers:
    """Bytes of open blocks and of files being written, blocks evicted while they were open, and names that eviction
    cannot take. Then bytes of memory of files being written, and writes that were refused for want of it."""

    user: int
    open: int
    writing: int
    evicted: int
    names: int
    staged: int
    staging_refusals: int
