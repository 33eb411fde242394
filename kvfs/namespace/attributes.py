"""Extended attributes to which the namespace gives a meaning, and those by which the data plane asks for something."""

from __future__ import annotations

# Where a symbolic link keeps its target; never shown to callers.
SYMLINK_KEY = b"kvfs.symlink"
# Reads as b"1" on an inode that is pinned itself; setting it pins, removing it unpins.
PIN_ATTRIBUTE = b"user.kvfs.pin"
# Reads as b"1" on a slab; setting it to that makes an empty file that is open for writing one.
SLAB_ATTRIBUTE = b"user.kvfs.slab"
# Hints for eviction, which no record has. The block before it in its chain: a name in the same directory. Or its path
# from the root of the mount on, with a slash before it.
PARENT_ATTRIBUTE = b"user.kvfs.parent"
# Seconds, in decimal digits, for which a block is to be kept at least; 0: it is needed no more. Can only be set.
KEEP_ATTRIBUTE = b"user.kvfs.keep"
HINTS = (PARENT_ATTRIBUTE, KEEP_ATTRIBUTE)
# The data plane passes a FALLOCATE on by these: a slab, or a file, of so many bytes, in decimal digits.
SLAB_REQUEST = b"kvfs.slab"
ALLOCATE_REQUEST = b"kvfs.allocate"
