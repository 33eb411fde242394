"""Extended attributes to which the namespace gives a meaning, and those by which the data plane asks for something."""

from __future__ import annotations

from kvfs.errors import InvalidArgumentError
from kvfs.record import GROUP_ATTRIBUTE, GROUP_NAME_MAX
from kvfs.types import InodeNumber

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
# No other names begin with this: one that is mistyped is refused, and not kept without a meaning.
OWN_PREFIX = b"user.kvfs."
OWN = (PIN_ATTRIBUTE, GROUP_ATTRIBUTE, SLAB_ATTRIBUTE, *HINTS)
KEEP_SECONDS_MAX = 3600
# The data plane passes a FALLOCATE on by these: a slab, or a file, of so many bytes, in decimal digits.
SLAB_REQUEST = b"kvfs.slab"
ALLOCATE_REQUEST = b"kvfs.allocate"


def check(number: InodeNumber, name: bytes, value: bytes) -> None:
    """InvalidArgumentError for a name of kvfs's own that does not exist, or for a value that it cannot have. A
    parent is looked up later."""
    if name.startswith(OWN_PREFIX) and name not in OWN:
        known = ", ".join(one.decode() for one in OWN)
        raise InvalidArgumentError(f"inode {number}: {name!r} does not exist; there are {known}")
    possible = {
        PIN_ATTRIBUTE: ("0 and 1 are", value in (b"0", b"1")),
        SLAB_ATTRIBUTE: ("1 is", value == b"1"),
        KEEP_ATTRIBUTE: (
            f"seconds are, 0 to {KEEP_SECONDS_MAX},",
            value.isdigit() and len(value) < 10 and int(value) <= KEEP_SECONDS_MAX,
        ),
        PARENT_ATTRIBUTE: ("a name, or a /PATH, is", bool(value.strip(b"/"))),
        GROUP_ATTRIBUTE: (f"names of 1 to {GROUP_NAME_MAX} bytes are", 1 <= len(value) <= GROUP_NAME_MAX),
    }
    what, fits = possible.get(name, ("", True))
    if not fits:
        shown = repr(value) if len(value) <= 40 else f"of {len(value)} bytes"
        raise InvalidArgumentError(f"inode {number}: {name.decode()} is {shown}; {what} possible")
