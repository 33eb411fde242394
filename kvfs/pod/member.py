"""One node in its pod: the feed, the follower and the questions, a turn at a time.

kvfs.pod.threads takes the turns of production, two threads for each engine: one appends, one waits in a read. The
simulation takes the same turns with its own clock. All state is under one lock, which is never held over a call of an
engine. Calls of the sink, the source and the keeper come under it: none of them may wait.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from kvfs.errors import EngineAwayError, EngineError, FreshError
from kvfs.pod.asking import Asks, AskStatistics, Barrier, LeaseAsk
from kvfs.pod.engine import BATCH, BEGINNING, MESSAGE, REPEATED, TIME, Engine, Entry, Names, Position
from kvfs.pod.feed import Feed, FeedStatistics
from kvfs.pod.follow import Follower, OwnerStatistics, Sink
from kvfs.pod.limits import KEYS_MAX, Limits
from kvfs.pod.messages import (
    FLUSH,
    HELD,
    LEASE,
    RELEASE,
    REPEAT,
    STATE,
    TOUCH,
    Message,
    State,
    Value,
    join_keys,
    unseal,
)

# Of each sender: the messages that came by one engine are not taken again from another.
_SEEN_MAX = 1024
_LEASE_MAX_MS = 60_000
_TRIM_BEATS = 10
# At an orderly end; what is left is found on flash.
_LEAVE_MAX = 64


class Source(Protocol):
    """Where the news of this node come from: the data plane's queue, in batches (kvfs.pod.batch)."""

    def take(self, *, everything: bool) -> Sequence[bytes]:
        """The batches that are due, in the order of their numbers; with `everything` also what is held back."""
        ...

    def wait(self, timeout_s: float) -> None:
        """Return when a batch may be due, after wake(), or after the timeout. Called without the lock."""
        ...

    def wake(self) -> None:
        """From any thread: end a wait()."""
        ...


class LeaseName(NamedTuple):
    """The asker's slot and start, and the number of its message: a node that starts anew counts from 1 again."""

    slot: int
    start: int
    number: int


class Keeper(Protocol):
    """The blocks of this node, for others' questions. Keys are name keys, 16 bytes."""

    def lease(self, lease: LeaseName, keys: Sequence[bytes], seconds: float) -> Sequence[bool]:
        """Keep blocks from eviction, each for so long; returns which are kept."""
        ...

    def release(self, lease: LeaseName) -> None:
        """End a lease; it may have ended, or never begun."""
        ...

    def touch(self, asker: int, keys: Sequence[bytes]) -> None:
        """Others read these blocks."""
        ...


@dataclass(frozen=True, slots=True)
class LinkStatistics:
    """One engine. state: "up" or "away", with the last error. failures: calls; ups: how often it came back."""

    url: str
    state: str
    error: str
    failures: int
    ups: int
    entries: int
    read_size: int
    resets: int


@dataclass(frozen=True, slots=True)
class MemberStatistics:
    feed: FeedStatistics
    links: tuple[LinkStatistics, ...]
    owners: tuple[OwnerStatistics, ...]
    asks: AskStatistics
    forged: int
    malformed: int
    doubled: int


@dataclass(slots=True)
class Half:
    """One direction of a link: its engine's state, and when it is tried again."""

    up: bool = False
    error: str = ""
    failures: int = 0
    ups: int = 0
    retry_at: float = 0.0
    retry_s: float = 0.0


@dataclass(slots=True)
class Link:
    """An engine as this node sees it. Each half belongs to the thread that takes its turns."""

    index: int
    writing: Half = field(default_factory=Half)
    reading: Half = field(default_factory=Half)
    beat_at: float = 0.0
    beats: int = 0
    positions: dict[str, Position] | None = None
    verify_at: float = 0.0
    verified_at: float = 0.0
    trim_at: float = 0.0
    entries: int = 0
    read_size: int = 0
    resets: int = 0

    @property
    def error(self) -> str:
        """Of both halves: one may know why the engine refuses, and the other only that it went."""
        return "; ".join(dict.fromkeys(half.error for half in (self.writing, self.reading) if half.error))


@dataclass(slots=True)
class _Seen:
    """The last messages of a slot, of all its starts: one of an old start may come between two of the new one."""

    messages: set[tuple[int, int]] = field(default_factory=set)
    order: deque[tuple[int, int]] = field(default_factory=deque)

    def is_new(self, start: int, number: int) -> bool:
        message = start, number
        if message in self.messages:
            return False
        self.messages.add(message)
        self.order.append(message)
        if len(self.order) > _SEEN_MAX:
            self.messages.discard(self.order.popleft())
        return True


@dataclass(frozen=True, slots=True)
class Identity:
    """This node in the pod. start: random, of this mount. epoch: of this mount, higher at each one. slots: of all."""

    uuid: str
    slot: int
    start: int
    epoch: int
    slots: tuple[int, ...]
    secret: bytes = field(repr=False)


class Member:
    """The turns, and what the daemon asks of its pod. engines: names for messages, one a link."""

    def __init__(
        self,
        identity: Identity,
        engines: Sequence[str],
        source: Source,
        sink: Sink,
        keeper: Keeper,
        now: float,
        *,
        limits: Limits | None = None,
        dice: Callable[[], float] = random.random,
    ) -> None:
        limits = limits or Limits()
        self.identity, self.names = identity, Names(identity.uuid)
        self._source, self._keeper, self._limits, self._dice = source, keeper, limits, dice
        self._engines = tuple(engines)
        self._lock = threading.RLock()
        self.links = [Link(index) for index in range(len(engines))]
        self._feed = Feed(
            self.names,
            identity.slot,
            identity.start,
            identity.epoch,
            identity.secret,
            links=len(engines),
            limits=limits,
        )
        self._follower = Follower(identity.slot, identity.slots, sink, now, links=len(engines), limits=limits)
        self._asks = Asks(self._follower)
        self._others = [slot for slot in identity.slots if slot != identity.slot]
        self._slot_of = {self.names.stream(slot): slot for slot in self._others}
        self._inbox = self.names.inbox(identity.slot)
        self._seen = {slot: _Seen() for slot in self._others}
        self._forged = self._malformed = self._doubled = 0

    # ---- the turn that appends ----

    def append_turn(self, index: int, engine: Engine, now: float, wall_ns: int) -> float:
        """One call of an engine at most. Returns in how many seconds the next turn is due, unless the source wakes."""
        link = self.links[index]
        with self._lock:
            self._collect(now, wall_ns)
            self._send_asks(now)
            if now < link.writing.retry_at:
                return link.writing.retry_at - now
            is_beat = now >= link.beat_at
            out = None if is_beat else self._feed.outgoing(index, now)
        if not is_beat and out is None:
            return max(0.0, min(link.beat_at - now, self._limits.patience_s if self._follower.busy else 1.0))
        try:
            if is_beat:
                self._beat(link, engine, now)
            elif out is not None:
                position = engine.append(out.stream, out.fields, oldest=out.oldest)
        except EngineError as error:
            with self._lock:
                self._failed(link.writing, error, now)
            return link.writing.retry_at - now
        with self._lock:
            if not link.writing.up:
                self._is_up(link.writing)
                self._feed.link_up(index)
                # A greeting: those who follow hear of a new start at once.
                self._feed.post(STATE, self._feed.state(now).fields(), now)
            elif out is not None:
                self._feed.sent(index, out, position, now)
            return 0.0

    def leave(self, index: int, engine: Engine, now: float, wall_ns: int) -> None:
        """The last turn of an orderly end: publish everything, and end the life. An engine that fails is let be."""
        with self._lock:
            self._collect(now, wall_ns, everything=True)
        try:
            for _ in range(_LEAVE_MAX):
                with self._lock:
                    out = self._feed.outgoing(index, now)
                if out is None:
                    break
                position = engine.append(out.stream, out.fields, oldest=out.oldest)
                with self._lock:
                    self._feed.sent(index, out, position, now)
            engine.remove(self.names.beat(self.identity.slot))
        except EngineError as error:
            with self._lock:
                self._failed(self.links[index].writing, error, now)

    def _collect(self, now: float, wall_ns: int, *, everything: bool = False) -> None:
        batches = self._source.take(everything=everything)
        if batches:
            self._feed.collect(batches, now, wall_ns)

    def _send_asks(self, now: float) -> None:
        for ask in self._follower.due(now):
            fields: dict[str, Value] = {"of": ask.of, "from_": ask.first}
            ask.number = self._feed.post(REPEAT, fields, now, to=ask.slot, wait_s=max(0.0, ask.deadline - now))

    def _beat(self, link: Link, engine: Engine, now: float) -> None:
        """Say that this node lives, and hear who else does."""
        with self._lock:
            beat = self._feed.beat(now)
            oldest = self._feed.own_oldest(link.index, now)
        engine.put(self.names.beat(self.identity.slot), beat, expire_s=self._limits.beat_expire_s)
        if link.beats % _TRIM_BEATS == 0:
            own = self.names.stream(self.identity.slot)
            engine.trim(own, oldest=oldest or BEGINNING, expire_s=self._limits.stream_expire_s)
        beats = engine.get([self.names.beat(slot) for slot in self._others])
        with self._lock:
            link.beats += 1
            link.beat_at = now + self._limits.beat_s
            for slot, data in zip(self._others, beats, strict=True):
                message = None if data is None else unseal(data, self.identity.secret)
                if message is not None and message.slot == slot and message.kind == STATE:
                    self._state(message, now)

    # ---- the turn that reads ----

    def read_turn(self, index: int, engine: Engine, now: float, wait_s: float, clock: Callable[[], float],
                  wall: Callable[[], int]) -> float:  # fmt: skip
        """One read, and all that follows from it. Returns in how many seconds the next turn is due."""
        link = self.links[index]
        if now < link.reading.retry_at:
            return link.reading.retry_at - now
        try:
            if not link.reading.up or now >= link.verify_at:
                self._verify(link, engine)
                link.verified_at = clock()
                link.verify_at = link.verified_at + self._limits.silence_s
                if not link.reading.up:
                    with self._lock:
                        self._is_up(link.reading)
            assert link.positions is not None
            entries = engine.read(link.positions, wait_s=wait_s, count=self._limits.read_count)
        except EngineError as error:
            with self._lock:
                self._failed(link.reading, error, clock())
            return max(0.0, link.reading.retry_at - clock())
        for entry in entries:
            with self._lock:
                self._entry(link, entry, clock(), wall())
        if entries:
            # One stream alone may have gone back, while others go on.
            link.verify_at = min(clock() + self._limits.silence_s, link.verified_at + self._limits.verify_max_s)
            if self._feed.is_talking or self._follower.busy:
                self._source.wake()
            self._trim_inbox(link, engine, clock())
        return 0.0

    def _verify(self, link: Link, engine: Engine) -> None:
        """The first time: begin at the streams' ends. Later: streams may have gone back, as after a flush.

        Then it is read on from their ends too: one ask for each owner brings the rest. Read from the beginning, they
        would bring 60 s of all owners' news once more, on every node at the same time.
        """
        streams = [*self._slot_of, self._inbox]
        tails = dict(zip(streams, engine.tails(streams), strict=True))
        if link.positions is None:
            link.positions = tails
            return
        for stream, tail in tails.items():
            if tail < link.positions[stream]:
                link.positions[stream] = tail
                link.resets += 1

    def _trim_inbox(self, link: Link, engine: Engine, now: float) -> None:
        """Of what others wrote to this node, only what it has not read need stay."""
        assert link.positions is not None
        if now < link.trim_at or link.positions[self._inbox] == BEGINNING:
            return
        link.trim_at = now + self._limits.beat_s
        try:
            engine.trim(self._inbox, oldest=link.positions[self._inbox], expire_s=self._limits.stream_expire_s)
        except EngineError as error:
            with self._lock:
                self._failed(link.reading, error, now)

    def _entry(self, link: Link, entry: Entry, now: float, wall_ns: int) -> None:
        assert link.positions is not None
        known = link.positions.get(entry.stream)
        if known is None:
            return
        link.positions[entry.stream] = max(known, entry.position)
        link.entries += 1
        link.read_size += sum(len(value) for value in entry.fields.values())
        message = entry.fields.get(MESSAGE)
        if message is not None:
            self._message(link, message, now, wall_ns)
        data = entry.fields.get(BATCH)
        if data is not None:
            # An inbox has batches of all owners; the slot is in them, and the sink checks their seal.
            slot = self._slot_of.get(entry.stream, -1)
            if slot < 0:
                slot = int.from_bytes(data[40:42], "little")
            sent_ns = int.from_bytes(entry.fields.get(TIME, b""), "little")
            self._follower.batch(slot, data, sent_ns, now, wall_ns, repeated=REPEATED in entry.fields)
        self._asks.check()

    # ---- messages ----

    def _message(self, link: Link, data: bytes, now: float, wall_ns: int) -> None:
        message = unseal(data, self.identity.secret)
        if message is None:
            self._forged += 1
            return
        seen = self._seen.get(message.slot)
        if seen is None:
            return
        try:
            if message.kind == STATE:
                self._state(message, now)
            elif seen.is_new(message.start, message.number):
                self._do(link, message, now, wall_ns)
            else:
                self._doubled += 1
        except ValueError:
            self._malformed += 1

    def _state(self, message: Message, now: float) -> None:
        state = State.of(message)
        if state.ask and state.ask_start != self.identity.start:
            return
        self._follower.state(message.slot, state, now)
        if state.ask:
            self._asks.answered(message.slot, state)

    def _do(self, link: Link, message: Message, now: float, wall_ns: int) -> None:
        """Somebody asks this node. Kinds that it does not know are a newer kvfs's, and skipped."""
        post, slot = self._feed.post, message.slot
        if message.kind == REPEAT:
            of, first = message.integer("of"), message.integer("from_")
            self._feed.repeat(link.index, slot, of, first, now, ask=message.number, ask_start=message.start)
        elif message.kind == FLUSH:
            self._collect(now, wall_ns, everything=True)
            state = self._feed.state(now, ask=message.number, ask_start=message.start)
            post(STATE, state.fields(), now, to=slot)
        elif message.kind == LEASE:
            name = LeaseName(slot, message.start, message.number)
            keys, ms = message.keys(), min(message.integer("ms"), _LEASE_MAX_MS)
            held = self._keeper.lease(name, keys, ms / 1000) if len(keys) <= KEYS_MAX else []
            said = "".join("1" if one else "0" for one in held)
            post(HELD, {"ask": message.number, "ask_start": message.start, "held": said}, now, to=slot)
        elif message.kind == HELD:
            number = message.integer("ask")
            is_mine = message.integer("ask_start") == self.identity.start
            if is_mine and not self._asks.lease_answered(slot, number, message.text("held")):
                post(RELEASE, {"lease": number}, now, to=slot)
        elif message.kind == RELEASE:
            self._keeper.release(LeaseName(slot, message.start, message.integer("lease")))
        elif message.kind == TOUCH:
            self._keeper.touch(slot, message.keys())
        else:
            self._malformed += 1

    # ---- a link's state ----

    def _failed(self, half: Half, error: EngineError, now: float) -> None:
        half.up = False
        half.error = str(error)
        half.failures += 1
        half.retry_s = min(max(self._limits.retry_s, 2 * half.retry_s), self._limits.retry_max_s)
        # Nodes that lost their engine together do not come back together.
        half.retry_at = now + half.retry_s * (0.5 + self._dice() / 2)

    def _is_up(self, half: Half) -> None:
        half.up, half.error, half.retry_s = True, "", 0.0
        half.ups += 1

    # ---- what the daemon asks ----

    def loaded(self, slot: int, now: float, wall_ns: int, *, whole: bool = True) -> None:
        """An owner's flash has been read, as the sink was asked to. From any thread."""
        with self._lock:
            self._follower.loaded(slot, now, wall_ns, whole=whole)
            self._asks.check()
        self._source.wake()

    def flush(self, now: float, timeout_s: float) -> Barrier:
        """Begin a barrier: all owners that live publish what they hold back. EngineAwayError: no engine answers."""
        with self._lock:
            if not self._is_connected:
                raise EngineAwayError("; ".join(self._away()))
            barrier = Barrier(now + timeout_s, self._follower.alive(now))
            if not barrier.finished:
                self._asks.add_barrier(self._feed.post(FLUSH, {}, now, wait_s=timeout_s), barrier)
        self._source.wake()
        return barrier

    def flushed(self, barrier: Barrier) -> None:
        """Drop the waiters of a barrier. FreshError names the owners that did not answer."""
        with self._lock:
            self._asks.end_barrier(barrier)
            if barrier.finished:
                return
            unanswered, unapplied = sorted(barrier.unanswered), sorted(barrier.unapplied)
        said = [f"slot {slot} gave no answer" for slot in unanswered]
        said += [f"the news of slot {slot} are not all applied here" for slot in unapplied]
        raise FreshError(f"fresh: {'; '.join(said)}", [*unanswered, *unapplied])

    def lease(self, slot: int, keys: Sequence[bytes], seconds: float, now: float, timeout_s: float) -> LeaseAsk:
        """Ask an owner to keep blocks; one that does not live is not. finish_lease() must follow."""
        assert 0 < len(keys) <= KEYS_MAX
        with self._lock:
            ask = LeaseAsk(now + timeout_s, slot, len(keys))
            if slot not in self._follower.alive(now) or not self._is_connected:
                self._asks.leases_unanswered += len(keys)
                ask.finish()
                return ask
            fields: dict[str, Value] = {"keys": join_keys(list(keys)), "ms": int(seconds * 1000)}
            self._asks.add_lease(self._feed.post(LEASE, fields, now, to=slot, wait_s=timeout_s), ask)
        self._source.wake()
        return ask

    def finish_lease(self, ask: LeaseAsk) -> tuple[bool, ...]:
        """Which keys are held: none without an answer. An answer that comes later is released."""
        with self._lock:
            self._asks.end_lease(ask)
            return ask.held

    def release(self, ask: LeaseAsk, now: float) -> None:
        with self._lock:
            self._feed.post(RELEASE, {"lease": ask.number}, now, to=ask.slot)
        self._source.wake()

    def touch(self, slot: int, keys: Sequence[bytes], now: float) -> None:
        """Tell an owner that its blocks are used here."""
        with self._lock:
            for at in range(0, len(keys), KEYS_MAX):
                self._feed.post(TOUCH, {"keys": join_keys(list(keys[at : at + KEYS_MAX]))}, now, to=slot)
        self._source.wake()

    def wake(self) -> None:
        self._source.wake()

    @property
    def _is_connected(self) -> bool:
        return any(link.writing.up and link.reading.up for link in self.links)

    def _away(self) -> list[str]:
        return [
            link.error or f"engine {self._engines[link.index]}: not connected yet"
            for link in self.links
            if not (link.writing.up and link.reading.up)
        ]

    def statistics(self, now: float) -> MemberStatistics:
        with self._lock:
            return MemberStatistics(
                self._feed.statistics(), tuple(self._link(link) for link in self.links),
                self._follower.statistics(now), self._asks.statistics(), self._forged, self._malformed, self._doubled,
            )  # fmt: skip

    def _link(self, link: Link) -> LinkStatistics:
        is_up = link.writing.up and link.reading.up
        return LinkStatistics(
            self._engines[link.index], "up" if is_up else "away", link.error,
            link.writing.failures + link.reading.failures, min(link.writing.ups, link.reading.ups), link.entries,
            link.read_size, link.resets,
        )  # fmt: skip
