"""A pod without devices: nodes with segments of their own, and the news between them.

A node stores its misses into its own segments, and evicts from them alone (tools/benches/segments.py). It knows its own
blocks at once, and others' from news, which every node hears after the same delay. So one map stands for the maps of
all nodes. Nothing takes time but news: neither reads nor stores.

A block that eviction carries to another segment cannot be read by others until they hear of it. Here that is a miss. In
a real pod its old place mostly still has the bytes for so long.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from random import Random
from typing import NamedTuple

from benches.segments import Segments
from kvfs.replay.invent import Trace


@dataclass(frozen=True, slots=True)
class Feed:
    """delay_s: from a change to all other nodes. hits_every_s: a node tells owners so often of hits in their blocks.
    hit_share: of those hits that it tells of. until_s: the engine is lost then, and nothing is heard that was said
    later."""

    delay_s: float = 0.02
    hits_every_s: float = 1.0
    hit_share: float = 1.0
    until_s: float = math.inf


SILENT = Feed(until_s=-math.inf)


class Place(NamedTuple):
    """A block's version, counter | node, and where it lies. Of two versions the greater one is valid. Of two places of
    one version the later news: a block may be carried over into a segment that was opened before its own."""

    counter: int
    node: int
    segment: int

    @property
    def version(self) -> tuple[int, int]:
        return self.counter, self.node


class _Kind(Enum):
    HERE = auto()
    GONE = auto()
    HIT = auto()


class _Record(NamedTuple):
    due_s: float
    number: int  # of all records: those due at one time are heard in the order in which they were said
    kind: _Kind
    block: int
    place: Place


class Pod:
    """`nodes` nodes, each with a part of `capacity` blocks in `segments` segments."""

    def __init__(self, capacity: int, segments: int, nodes: int, feed: Feed, random: Random) -> None:
        self.pools = [
            Segments(capacity // nodes, segments, partial(self._placed, node), partial(self._removed, node))
            for node in range(nodes)
        ]
        self.hits = 0
        self.others = 0  # of the hits: in other nodes' blocks
        self.stale = 0  # look-ups of blocks that their owners had no more
        self.dropped = 0  # copies, where another node's version was higher
        self._feed, self._random = feed, random
        self._now_s = 0.0
        self.known: dict[int, Place] = {}  # of all that was heard: where a block is
        self.copies: dict[int, dict[int, Place]] = {}  # by block and node: what there is, whoever has heard of it
        self._counters = [0] * nodes
        self._heard = 0  # the highest counter
        self._records: list[_Record] = []
        self._said = 0

    def request(self, node: int, prompt: list[int], now_s: float) -> None:
        """Look the blocks of a prompt up, use those that are there with all before them, store what is not."""
        self._hear(now_s)
        found = 0
        while found < len(prompt) and self._use(node, prompt[found]):
            found += 1
        self.hits += found
        pool = self.pools[node]
        for index in range(found, len(prompt)):
            block = prompt[index]
            # The first was looked for, so a stale entry of it is gone. Those behind it are believed to be there.
            if block in pool.slots:
                pool.open(block)  # to be stored unless it is there is a use
            elif index == found or self._elsewhere(node, block) is None:
                pool.store(block, prompt[index - 1] if index else None)

    def _use(self, node: int, block: int) -> bool:
        if block in self.pools[node].slots:
            self.pools[node].open(block)
            return True
        place = self._elsewhere(node, block)
        if place is None:
            return False
        if self.copies.get(block, {}).get(place.node) != place:
            self.stale += 1
            return False
        self.others += 1
        if self._random.random() < self._feed.hit_share:
            every_s = self._feed.hits_every_s
            self._say(_Kind.HIT, block, place, (self._now_s // every_s + 1) * every_s)
        return True

    def _elsewhere(self, node: int, block: int) -> Place | None:
        place = self.known.get(block)
        return None if place is None or place.node == node else place

    def _placed(self, node: int, block: int, segment: int) -> None:
        copies = self.copies.setdefault(block, {})
        if node in copies:
            counter = copies[node].counter
        else:
            counter = self._counters[node] = max(self._counters[node], self._heard) + 1
        copies[node] = Place(counter, node, segment)
        self._say(_Kind.HERE, block, copies[node], self._now_s)

    def _removed(self, node: int, block: int) -> None:
        place = self.copies[block].pop(node)
        if not self.copies[block]:
            del self.copies[block]
        self._say(_Kind.GONE, block, place, self._now_s)

    def _say(self, kind: _Kind, block: int, place: Place, at_s: float) -> None:
        if at_s < self._feed.until_s:
            self._said += 1
            heapq.heappush(self._records, _Record(at_s + self._feed.delay_s, self._said, kind, block, place))

    def _hear(self, now_s: float) -> None:
        while self._records and self._records[0].due_s <= now_s:
            record = heapq.heappop(self._records)
            self._now_s = record.due_s
            self._apply(record.kind, record.block, record.place)
        self._now_s = now_s

    def _apply(self, kind: _Kind, block: int, place: Place) -> None:
        known = self.known.get(block)
        if kind is _Kind.HIT:
            if block in self.pools[place.node].slots:
                self.pools[place.node].open(block)
        elif kind is _Kind.GONE:
            if known == place:
                del self.known[block]
        else:
            self._heard = max(self._heard, place.counter)
            if known is None or known.version <= place.version:
                self.known[block] = place
            copies = self.copies.get(block, {})
            for node in [node for node, own in copies.items() if own.version < place.version and node != place.node]:
                self.pools[node].drop(block)
                self.dropped += 1


def spread(trace: Trace, nodes: int, sticky: float, random: Random) -> Iterable[int]:
    """The node of each request. Sessions begin on one node after the other. Before each further request a session stays
    with a chance of `sticky`, and else moves to any other. Without sessions requests go to one node after the other."""
    if trace.sessions is None or nodes == 1:
        for index in range(len(trace.prompts)):
            yield index % nodes
        return
    on: dict[int, int] = {}
    for session in trace.sessions:
        if session not in on:
            on[session] = session % nodes
        elif random.random() >= sticky:
            on[session] = (on[session] + random.randrange(1, nodes)) % nodes
        yield on[session]
