"""Extended attributes to which the namespace gives a meaning, and those by which the data plane asks for something."""

from __future__ import annotations

# Where a symbolic link keeps its target; never shown to callers.
SYMLINK_KEY = b"kvfs.symlink"
# Reads as b"1" on an inode that is pinned itself; setting it pins, removing it unpins.
PIN_ATTRIBUTE = b"user.kvfs.pin"
# Reads as b"1" on a slab; setting it to that makes an empty file that is open for writing one.
SLAB_ATTRIBUTE = b"user.kvfs.slab"
# The data plane passes a FALLOCATE on by these: a slab, or a file, of so many bytes, in decimal digits.
SLAB_REQUEST = b"kvfs.slab"
ALLOCATE_REQUEST = b"kvfs.allocate"
