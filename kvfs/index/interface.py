"""The interface of an index, whichever engine holds it.

A change is visible to the next call, and durable with the next commit. An inode whose bytes are not sealed yet (a FILE
without SEALED) is never committed. Nor is one that lost its name: neither may survive a restart. All calls come from
the one trio thread unless said otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Protocol

from kvfs.record import Inode
from kvfs.types import InodeNumber, SegmentIndex

# Named here because the index's own method `list` hides the type inside the class.
Dentries = list[tuple[bytes, InodeNumber]]
Numbers = list[InodeNumber]
States = list[tuple[SegmentIndex, bytes]]
Pairs = list[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class IndexStatistics:
    inodes: int
    bytes: int
    changes_pending: int
    commits: int
    commit_failures: int


class Index(Protocol):
    """Inode records, dentries, segment membership, segment states and meta values. Values are bytes in their on-disk
    form."""

    def get(self, inode: InodeNumber) -> Inode | None: ...

    def raw(self, inode: int) -> bytes | None:
        """The inode record, verbatim."""
        ...

    def lookup(self, parent: InodeNumber, name: bytes) -> InodeNumber | None: ...

    def put(self, new: Inode, old: Inode | None, record: bytes | None = None) -> None:
        """Insert or change. `old` is this inode's previous record, None if it is new; its dentry and memberships
        follow. `record`: new.pack(), if the caller has it."""
        ...

    def delete(self, old: Inode) -> None: ...

    def list(self, parent: InodeNumber, after: bytes, limit: int) -> Dentries:
        """At most `limit` names greater than `after`, in byte order."""
        ...

    def is_empty(self, parent: InodeNumber) -> bool: ...

    def segment_inodes(self, segment: SegmentIndex) -> Numbers:
        """Every inode with an extent or its header in the segment, in order of inode number."""
        ...

    def live_records(self, numbers: Numbers, segment: SegmentIndex | None) -> tuple[bytes, int, set[InodeNumber]]:
        """The records of these inodes, concatenated, how many they are, and the directories that they are in. With a
        segment: only of sealed blocks with a name and their header there."""
        ...

    @property
    def groups_used(self) -> bool:
        """Whether any inode is in a group by its extended attribute."""
        ...

    def group_inodes(self, group: bytes) -> Numbers:
        """Every inode whose extended attribute names this group, files and directories, in order of inode number."""
        ...

    def segment_put(self, segment: SegmentIndex, state: bytes) -> None: ...

    def segment_items(self) -> States: ...

    def meta_get(self, key: bytes) -> bytes | None: ...

    def meta_put(self, key: bytes, value: bytes | None) -> None:
        """A value of None removes the key."""
        ...

    def meta_items(self, prefix: bytes) -> Pairs: ...

    def records(self, chunk_bytes: int) -> Iterator[bytes]:
        """The committed inode records, concatenated, in pieces of about chunk_bytes; for loading tables. Nothing may
        be pending."""
        ...

    @property
    def changes_pending(self) -> int: ...

    @property
    def pending_batch(self) -> int:
        """The number of the batch that a change made now belongs to; batches become durable in their order."""
        ...

    @property
    def durable_batch(self) -> int:
        """The last batch that a commit has made durable."""
        ...

    def hide(self, segments: Collection[int], on_drop: Callable[[Inode], None]) -> None:
        """These segments, and no others, are on devices that are away: inodes with a part there are hidden. raw, get,
        lookup and list do not find a hidden inode. It is dropped when its name is given to another or its directory is
        removed; on_drop is called with each."""
        ...

    @property
    def is_hiding(self) -> bool:
        """Whether any segment is on a device that is away."""
        ...

    def show(self, inode: int) -> None:
        """Exempt an inode of a device that comes back, until hide() leaves its segments out."""
        ...

    def hide_shown(self) -> None:
        """End all exemptions from hide()."""
        ...

    def volatile_inodes(self) -> Numbers:
        """Inodes that no commit writes: files not sealed yet, and nameless ones."""
        ...

    def hidden(self, inode: int) -> bytes | None:
        """The record of an inode that is hidden; None if it is not."""
        ...

    def drop_hidden(self, inode: int) -> bool:
        """Remove a hidden inode for good. False if it is not hidden."""
        ...

    distrusted: bool
    """Commits fail, and the next start, unless one goes well before it, makes the index anew from the devices."""

    def statistics(self) -> IndexStatistics: ...

    def close(self) -> None:
        """Close the engine; what is pending is dropped."""
        ...
