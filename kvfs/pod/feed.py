"""A node's feed: its batches of news on their way into each engine, and its memory of them, for followers that missed
some.

A state machine: time is given in, nothing is called, nothing waits. kvfs.pod.member drives it.

The history is the queue too. Each link (an engine) has a cursor in it. While no engine can be reached, the history
grows to its bound, then the oldest batches go. Followers see a gap, ask, and hear that they must read flash.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvfs.pod.batch import read_header
from kvfs.pod.engine import BATCH, MESSAGE, REPEATED, TIME, Fields, Names, Position
from kvfs.pod.limits import Limits
from kvfs.pod.messages import STATE, Message, State, Value, seal

# Of a batch in memory, beside its bytes.
_OVERHEAD = 256
# Marks of one settle_s: the floor follows in steps of so small a part of it.
_MARKS = 64


@dataclass(slots=True)
class _Kept:
    number: int
    end: int
    data: bytes
    at: float
    wall_ns: int
    sent: bool = False

    @property
    def size(self) -> int:
        return len(self.data) + _OVERHEAD


@dataclass(slots=True)
class _Mark:
    """Numbers before `end` were collected by `at`; the first of those behind the mark before it at `begin`."""

    begin: float
    at: float
    end: int


@dataclass(slots=True)
class Outgoing:
    """The next entry for a link. `kept`: the batch's index in all of this start; None for messages and repeats."""

    stream: str
    fields: Fields
    oldest: Position | None
    kept: int | None = None


@dataclass(slots=True)
class _Link:
    cursor: int = 0
    messages: deque[tuple[float, str, bytes]] = field(default_factory=deque)
    repeats: deque[Outgoing] = field(default_factory=deque)
    repeat_turn: bool = False
    # Of the node's own stream: when each entry was appended, where, and its size.
    appended: deque[tuple[float, Position, int]] = field(default_factory=deque)
    appended_size: int = 0
    oldest: Position | None = None
    # Of the other streams: where the last entry came to lie. Streams of one server need not go alike: after a flush, or
    # behind a clock that was set back, one begins anew and another goes on.
    last: dict[str, Position] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FeedStatistics:
    """start, next and oldest number; batches and bytes in memory. Since the start: batches collected, entries
    and bytes appended over all engines, batches dropped before any engine had them. Then numbers that the source
    skipped, batches repeated, asks that came too late."""

    start: int
    next: int
    oldest: int
    history_batches: int
    history_size: int
    unsent_batches: int
    collected: int
    collected_size: int
    appended: int
    appended_size: int
    dropped: int
    skipped: int
    repeated: int
    too_old: int


class Feed:
    """The publisher of one start of a node. Its first record has the number 0."""

    def __init__(
        self,
        names: Names,
        slot: int,
        start: int,
        epoch: int,
        secret: bytes,
        *,
        links: int,
        limits: Limits,
    ) -> None:
        assert links > 0 and start > 0 and epoch >= 0
        self.slot, self.start, self.epoch, self.next = slot, start, epoch, 0
        self._names, self._secret, self._limits = names, secret, limits
        self._links = [_Link() for _ in range(links)]
        self._kept: deque[_Kept] = deque()
        self._first = 0  # the index of _kept[0] in all batches of this start
        # Numbers get old on their way to flash whether or not their batches are still in memory.
        self._floor = 0
        self._marks: deque[_Mark] = deque()
        self._whole_from = 0  # before it the source skipped numbers
        self._size = self._message_number = self._beat = 0
        self._collected = self._collected_size = self._appended = self._appended_size = 0
        self._dropped = self._skipped = self._repeated = self._too_old = 0

    # ---- in ----

    def collect(self, batches: Sequence[bytes], now: float, wall_ns: int) -> None:
        """Take new batches of the source, in order."""
        for data in batches:
            header = read_header(data)
            assert header is not None and header.slot == self.slot and header.start == self.start, header
            assert header.number >= self.next, f"slot {self.slot}: batch {header.number} after {self.next}"
            if header.number > self.next:
                self._skipped += header.number - self.next
                self._whole_from = header.number
            self.next = header.end
            kept = _Kept(header.number, header.end, data, now, wall_ns)
            self._kept.append(kept)
            self._size += kept.size
            self._collected += 1
            self._collected_size += len(data)
        if self._marks and now < self._marks[-1].begin + self._limits.settle_s / _MARKS:
            self._marks[-1].at, self._marks[-1].end = now, self.next
        else:
            self._marks.append(_Mark(now, now, self.next))
        self._forget(now)

    def _forget(self, now: float) -> None:
        kept, limits = self._kept, self._limits
        while kept and (
            self._size > limits.history_size or (kept[0].sent and kept[0].at < now - limits.history_s)
        ):  # fmt: skip
            gone = kept.popleft()
            self._first += 1
            self._size -= gone.size
            self._dropped += not gone.sent
        while self._marks and self._marks[0].at <= now - limits.settle_s:
            self._floor = self._marks.popleft().end

    def post(
        self, kind: str, fields: dict[str, Value], now: float, *, to: int | None = None, wait_s: float | None = None
    ) -> int:
        """Send a message to one node, or to all; it is dropped after wait_s. Returns its number."""
        self._message_number += 1
        number = self._message_number
        data = seal(Message(kind, self.slot, self.start, number, fields), self._secret)
        stream = self._names.stream(self.slot) if to is None else self._names.inbox(to)
        end = now + (self._limits.message_s if wait_s is None else wait_s)
        for link in self._links:
            while link.messages and (link.messages[0][0] < now or len(link.messages) >= self._limits.messages_max):
                link.messages.popleft()
            link.messages.append((end, stream, data))
        return number

    def repeat(self, link: int, to: int, start: int, first: int, now: float, *, ask: int, ask_start: int) -> None:
        """Answer an ask for the batches from number `first` of a start: with some of them, and with the state. The
        state says from where they can be had."""
        if start == self.start and self.oldest <= first < self.next:
            size = 0
            index = bisect_right(self._kept, first, key=lambda kept: kept.end)
            queue = self._links[link].repeats
            if any(out.stream == self._names.inbox(to) for out in queue):
                return  # the last answer is still on its way
            while index < len(self._kept) and size < self._limits.repeat_size:
                kept = self._kept[index]
                fields = {BATCH: kept.data, TIME: kept.wall_ns.to_bytes(8, "little"), REPEATED: b"1"}
                queue.append(Outgoing(self._names.inbox(to), fields, None))
                size += kept.size
                index += 1
                self._repeated += 1
            # Behind the repeats, so that it says that they are through.
            state = self.state(now, ask=ask, ask_start=ask_start)
            self._message_number += 1
            message = Message(STATE, self.slot, self.start, self._message_number, state.fields())
            queue.append(Outgoing(self._names.inbox(to), {MESSAGE: seal(message, self._secret)}, None))
            return
        self._too_old += start == self.start and first < self.oldest
        self.post(STATE, self.state(now, ask=ask, ask_start=ask_start).fields(), now, to=to)

    # ---- out ----

    @property
    def oldest(self) -> int:
        """The first number that can be repeated, with all behind it."""
        first = self._kept[0].number if self._kept else self.next
        return max(first, self._whole_from)

    @property
    def is_talking(self) -> bool:
        """Whether messages or repeats wait for a link."""
        return any(link.messages or link.repeats for link in self._links)

    def state(self, now: float, *, ask: int = 0, ask_start: int = 0) -> State:
        self._forget(now)
        return State(self.epoch, self.start, self.next, self.oldest, self._floor, self._beat, ask, ask_start)

    def beat(self, now: float) -> bytes:
        """The sealed state, with another count of beats."""
        self._beat += 1
        self._message_number += 1
        fields = self.state(now).fields()
        return seal(Message(STATE, self.slot, self.start, self._message_number, fields), self._secret)

    def outgoing(self, index: int, now: float) -> Outgoing | None:
        """The next entry for a link: it stays the next until sent()."""
        link = self._links[index]
        while link.messages and link.messages[0][0] < now:
            link.messages.popleft()
        if link.messages:
            _, stream, data = link.messages[0]
            return Outgoing(stream, {MESSAGE: data}, self._oldest_of(link, stream, now))
        link.cursor = max(link.cursor, self._first)
        is_more = link.cursor < self._first + len(self._kept)
        if link.repeats and (link.repeat_turn or not is_more):
            out = link.repeats[0]
            out.oldest = self._oldest_of(link, out.stream, now)
            return out
        if not is_more:
            return None
        kept = self._kept[link.cursor - self._first]
        stream = self._names.stream(self.slot)
        fields = {BATCH: kept.data, TIME: kept.wall_ns.to_bytes(8, "little")}
        return Outgoing(stream, fields, self._oldest_of(link, stream, now), link.cursor)

    def sent(self, index: int, out: Outgoing, position: Position, now: float) -> None:
        """The entry that outgoing() gave is in the engine."""
        link = self._links[index]
        size = sum(len(value) for value in out.fields.values())
        self._appended += 1
        self._appended_size += size
        if out.kept is not None:
            if self._first <= out.kept:
                self._kept[out.kept - self._first].sent = True
            link.cursor = max(link.cursor, out.kept + 1)
            link.repeat_turn = True
        elif link.repeats and link.repeats[0] is out:
            link.repeats.popleft()
            link.repeat_turn = False
        elif link.messages and link.messages[0][2] == out.fields[MESSAGE]:
            link.messages.popleft()
        if out.stream == self._names.stream(self.slot):
            if link.appended and position < link.appended[-1][1]:
                self._forget_places(link)
            link.appended.append((now, position, size))
            link.appended_size += size
        else:
            link.last[out.stream] = position

    def link_up(self, index: int) -> None:
        """An engine is back. Whatever another engine had meanwhile is not appended late: who needs it asks."""
        link = self._links[index]
        link.repeats.clear()
        self._forget_places(link)
        link.cursor = max(link.cursor, self._first)
        if len(self._links) > 1:
            while link.cursor < self._first + len(self._kept) and self._kept[link.cursor - self._first].sent:
                link.cursor += 1

    @staticmethod
    def _forget_places(link: _Link) -> None:
        """The stream may be another now. An entry that is trimmed by an old place would go as it comes."""
        link.appended.clear()
        link.appended_size = 0
        link.oldest = None
        link.last.clear()

    def own_oldest(self, index: int, now: float) -> Position | None:
        """Where a link's stream may begin by now."""
        return self._oldest_of(self._links[index], self._names.stream(self.slot), now)

    def _oldest_of(self, link: _Link, stream: str, now: float) -> Position | None:
        if stream != self._names.stream(self.slot):
            # Its reader trims what it has read; this is for a reader that is gone.
            last = link.last.get(stream)
            return None if last is None else (max(0, last[0] - int(self._limits.stream_s * 1000)), 0)
        appended = link.appended
        while len(appended) > 1 and (
            appended[0][0] < now - self._limits.stream_s or link.appended_size > self._limits.stream_size
        ):
            link.appended_size -= appended.popleft()[2]
            link.oldest = appended[0][1]
        # Nothing is known of entries before the first one here: they stay until these reach a bound.
        return link.oldest

    def statistics(self) -> FeedStatistics:
        return FeedStatistics(
            self.start, self.next, self.oldest, len(self._kept), self._size, sum(not kept.sent for kept in self._kept),
            self._collected, self._collected_size, self._appended, self._appended_size, self._dropped, self._skipped,
            self._repeated, self._too_old,
        )  # fmt: skip
