"""Faults put into the feed on purpose, one at a time: the simulation has to find each."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

from simulation import Plane

from kvfs.pod import follow, member
from kvfs.pod.feed import Feed
from kvfs.pod.follow import Follower


def _gap_is_not_seen() -> Any:
    return mock.patch.object(Follower, "_is_ahead", staticmethod(lambda header, owner: False))


def _by_arrival() -> Any:
    """The last record that comes wins, whatever its version."""
    return mock.patch.object(Plane, "by_version", False)


def _no_reload_on_a_new_start() -> Any:
    def ignore(self: Follower, owner: follow._Owner, now: float) -> None:
        owner.loaded = True

    return mock.patch.object(Follower, "_new_start", ignore)


def _apply_while_loading() -> Any:
    """Flash is read, and news are applied at once instead of after it."""

    original = Follower._load

    def load(self: Follower, owner: follow._Owner, now: float) -> None:
        original(self, owner, now)
        owner.loading = False

    return mock.patch.object(Follower, "_load", load)


def _no_floor() -> Any:
    """A load is followed from the owner's next number, as if flash had all before it."""
    original = Feed.state

    def state(self: Feed, now: float, *, ask: int = 0, ask_start: int = 0) -> Any:
        found = original(self, now, ask=ask, ask_start=ask_start)
        return found.__class__(**{**{name: getattr(found, name) for name in found.__slots__}, "floor": found.next})

    return mock.patch.object(Feed, "state", state)


def _floor_hides_what_was_dropped() -> Any:
    """An owner says of news that it dropped from memory that they are on flash, however young they are."""
    original = Feed.state

    def state(self: Feed, now: float, *, ask: int = 0, ask_start: int = 0) -> Any:
        found = original(self, now, ask=ask, ask_start=ask_start)
        return replace(found, floor=max(found.floor, found.oldest))

    return mock.patch.object(Feed, "state", state)


def _beats_are_not_compared() -> Any:
    """A lost last batch is missed for good: only a later one would show the gap."""

    def claimed(self: Follower, slot: int, state: Any, now: float) -> None:
        owner = self._owners[slot]
        before = owner.claimed
        original(self, slot, state, now)
        if owner.start == state.start and before:
            owner.claimed = max(before, owner.next)

    original = Follower.state
    return mock.patch.object(Follower, "state", claimed)


def _drops_are_not_told() -> Any:
    """An owner that drops its block for another's sake says nothing: a record that comes late stays for good."""
    return mock.patch.object(Plane, "tells_of_its_drops", False)


def _lost_is_lost() -> Any:
    """Numbers that the owner cannot repeat are passed over, and flash is not read."""
    return mock.patch.object(Follower, "_load_later", lambda self, owner, now, **_: None)


def _positions_never_go_back() -> Any:
    """A stream that begins anew behind the place where this node reads is never looked at again."""

    def verify(self: member.Member, link: member.Link, engine: Any) -> None:
        if link.positions is None:
            original(self, link, engine)

    original = member.Member._verify
    return mock.patch.object(member.Member, "_verify", verify)


MUTATIONS: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "the gap check is dropped": _gap_is_not_seen,
    "by arrival instead of by version": _by_arrival,
    "no reload on a new start": _no_reload_on_a_new_start,
    "news are applied while flash is read": _apply_while_loading,
    "a load is followed from the newest number": _no_floor,
    "the floor hides what was dropped": _floor_hides_what_was_dropped,
    "beats are not compared with what was applied": _beats_are_not_compared,
    "an owner does not tell what it drops": _drops_are_not_told,
    "what cannot be repeated is passed over": _lost_is_lost,
    "positions never go back": _positions_never_go_back,
}
# Those that only short worlds find soon.
SHORT = frozenset({"the floor hides what was dropped"})


@contextlib.contextmanager
def mutated(name: str) -> Iterator[None]:
    with MUTATIONS[name]():
        yield
