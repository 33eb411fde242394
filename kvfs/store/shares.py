"""Shares: the part of the pool that one user may hold by pins, open sealed blocks, reservations and slabs together.
Eviction leaves all of these alone. And the part of the names that it leaves alone, which the data plane counts.

The data plane counts what is open (content/shares.c), and may let go of it beyond the share; holdings that are counted
here come first. Pins beyond the share hold no longer; reservations and slabs beyond it are refused. Files being
written, which the data plane counts too, may be more, while a share of room is left to others. Root and the daemon's
own user may hold all. A guest is one user, whatever users it has.

Memory of files being written has shares of the same part (content/staging.c). A user beyond the share leaves one share
to others, and has files spilled.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from kvfs.errors import ShareError
from kvfs.plane import Plane
from kvfs.types import UserNumbers
from kvfs.units import told_size

PINNED, RESERVED, SLABS = "pinned", "reserved", "slabs"
_KINDS = (PINNED, RESERVED, SLABS)
ROOT = 0
_ALL = 1 << 62
# The part of the block table from which on a user's directories are worth a word.
_MANY_NAMES = 64


@dataclass(frozen=True, slots=True)
class UserStatistics:
    """Bytes that a user holds, and how many blocks were evicted while they were open. And names that eviction cannot
    take: of directories, links, and files that are being made or have lost theirs. Then bytes of memory of files being
    written, and how many writes were refused for want of it."""

    user: int
    open: int
    writing: int
    pinned: int
    reserved: int
    slabs: int
    evicted_open: int
    names: int
    names_beyond: bool  # it makes no more directories
    staged: int
    staging_refusals: int


class Shares:
    def __init__(self, plane: Plane, part: float, exempt: int) -> None:
        """`part`: the share of one user, as a part of the pool's room."""
        self._plane, self._part, self._exempt = plane, part, exempt
        self._held: dict[str, Counter[int]] = {kind: Counter() for kind in _KINDS}
        self._changed: set[int] = set()
        self.size = 0
        self.staging_size = 0

    def resize(self, capacity: int) -> None:
        """Set the number of bytes that the pool can hold now."""
        self.size = int(capacity * self._part)
        self._plane.set_share(self.size, self._part, self._exempt)
        self.staging_size = int(self._plane.statistics()["staging_size"] * self._part)
        self._plane.set_staging_share(self.staging_size)

    def take_part(self, part: float) -> None:
        """Another share from the next resize() on."""
        self._part = part

    def notify(self) -> None:
        """Tell the data plane the holdings that have changed."""
        for user in self._changed:
            # What is reserved is the data plane's to count.
            self._plane.user_hold(user, self._held[PINNED][user] + self._held[SLABS][user])
        self._changed.clear()

    def is_exempt(self, user: int) -> bool:
        return user in (ROOT, self._exempt)

    def held(self, user: int) -> int:
        return sum(self.held_as(kind, user) for kind in _KINDS)

    def held_as(self, kind: str, user: int) -> int:
        # The data plane reserves by itself, and says so later.
        return self._plane.user_reserved(user) if kind == RESERVED else self._held[kind][user]

    def add(self, kind: str, user: int, size: int) -> None:
        """Change the user's amount."""
        held = self._held[kind]
        held[user] = max(0, held[user] + size)
        if not held[user]:
            del held[user]
        if kind != RESERVED:  # it goes on reserving meanwhile
            self._changed.add(user)
            self.notify()

    def replace(self, kind: str, sizes: Mapping[int, int]) -> None:
        """All users' holdings of a kind, counted anew."""
        self._changed.update(self._held[kind], sizes)
        self._held[kind] = Counter({user: size for user, size in sizes.items() if size})

    def keeps(self, user: int) -> bool:
        """Whether the user's pins hold."""
        return self.is_exempt(user) or self.held(user) <= self.size

    def room(self, user: int) -> int:
        """Bytes that the user may still hold."""
        return _ALL if self.is_exempt(user) else max(0, self.size - self.held(user))

    def has_room(self, user: int, size: int) -> bool:
        return self.is_exempt(user) or self.held(user) + size <= self.size

    def check(self, user: int, size: int, what: str) -> None:
        """ShareError unless the user may hold this much more."""
        if not self.has_room(user, size):
            parts = ", ".join(f"{told_size(self.held_as(kind, user))} {kind}" for kind in _KINDS)
            raise ShareError(
                f"{what}: {told_size(size)} more for {name_of(user)}, who holds {parts}; the share of one user is "
                f"{told_size(self.size)}"
            )

    def check_names(self, user: int, what: str) -> None:
        """ShareError unless the user may make one more directory."""
        if not self._plane.may_make_directory(user):
            raise ShareError(f"{what}: {name_of(user)} has all the directories, links and unfinished files that a user "
                             f"may have, with {self._plane.table_statistics()['records']} names there")  # fmt: skip

    def firm(self, kind: str) -> int:
        """Bytes of a kind that stay whatever happens: of each user at most the share."""
        held = self._held[kind]
        return sum(size if self.is_exempt(user) else min(size, self.size) for user, size in held.items())

    def statistics(self) -> list[UserStatistics]:
        """Users that hold anything, or lost an open block; the largest holders first. Of names only those count who
        have many."""
        many = self._plane.table_statistics()["records_max"] // _MANY_NAMES
        known = {user.user: user for user in self._plane.users()}
        found: list[UserStatistics] = []
        for user in known.keys() | {user for held in self._held.values() for user in held}:
            seen = known.get(user) or UserNumbers(user, 0, 0, 0, 0, 0, 0)
            pinned, reserved, slabs = (self._held[kind][user] for kind in _KINDS)
            beyond = seen.names > many and not self._plane.may_make_directory(user)
            if seen.names > many or any(
                (seen.open, seen.writing, pinned, reserved, slabs, seen.evicted, seen.staged, seen.staging_refusals)
            ):
                found.append(
                    UserStatistics(
                        user, seen.open, seen.writing, pinned, reserved, slabs, seen.evicted, seen.names, beyond,
                        seen.staged, seen.staging_refusals,
                    )
                )  # fmt: skip
        return sorted(found, key=_most)


def _most(user: UserStatistics) -> tuple[int, int, int]:
    return -(user.open + user.writing + user.pinned + user.reserved + user.slabs), -user.names, user.user


_GUEST, _OTHERS = 0xFFFF0000, 0xFFFFFFFF  # kvfs_plane.h: KVFS_USER_GUEST, KVFS_USER_OTHERS


def name_of(user: int) -> str:
    """A user's name in messages and in the status."""
    if user == _OTHERS:
        return "all other users"
    return f"guest {user - _GUEST}" if user >= _GUEST else f"user {user}"
