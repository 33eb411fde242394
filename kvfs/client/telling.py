"""Which of a namespace's changes go to routers, and when: a router must never believe in removed blocks.

The teller remembers what routers received. So after a gap or a reset it lists the existing blocks. It takes back
removed blocks one by one, and sends new ones. Some routers pass over the event that clears all.

A block whose tokens are not known yet waits for them. Chunks of two prompts with the same beginning hold the same
blocks of the engine: such a block is taken back with the last chunk.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import chain, islice
from typing import Protocol

from kvfs.client.client import Client
from kvfs.client.event_schemas import Chunk, Hash, Schema, short
from kvfs.client.events import Events, Gap, Removed, Reset, Stored
from kvfs.client.publisher import BATCH_EVENTS, Message
from kvfs.client.tokens import TokenFeed
from kvfs.errors import KvfsError, NotMountedError

# Blocks that wait for their tokens; each has some 500 bytes here.
WAITING_MAX = 262_144
_POLL_S = 0.1
# While a replay is under way, and while engines or other nodes may tell something.
_REPLAYING_POLL_S = 0.005
JOINING_POLL_S = 0.02
# An unmounted pool is looked for so often.
_AWAY_S = 1.0
# All is told again to who asks for it so often at most, between these two events. The second is kvfs's own.
_AGAIN_S = 5.0
ALL_CLEARED, ALL_TOLD = "AllBlocksCleared", "AllBlocksTold"
# Bytes that peers have not read, beyond which the telling of all blocks waits, while they read.
_PACE_SIZE = 16 << 20
_PACE_S, _PACE_PATIENCE_S = 0.005, 0.1
# All of these waits of one telling: so long, or as long as the telling itself has taken, if that is longer.
_PACED_MAX_S = 5.0
# Losses are said so often at most.
_SAY_S = 10.0


class Teller:
    """The knowledge of routers. tokens: None if blocks are sent without their tokens.

    Methods give events to send, one by one: what routers know changes as they are taken."""

    def __init__(self, schema: Schema, tokens: TokenFeed | None = None, *, waiting_max: int = WAITING_MAX) -> None:
        self._schema, self._tokens, self._waiting_max = schema, tokens, waiting_max
        # The hashes that were told of a block, if they are others than its key's.
        self._told: dict[bytes, tuple[Hash, ...] | None] = {}
        self._holders: Counter[tuple[Hash, int | None]] = Counter()
        # Blocks that wait, and for which hash; and the other way round.
        self._waiting: OrderedDict[bytes, int] = OrderedDict()
        self._awaited: dict[int, dict[bytes, None]] = {}
        # Blocks whose count of the engine's blocks is a guess, the last ones.
        self._guessed: OrderedDict[tuple[int, int | None], bytes] = OrderedDict()
        self.dropped = self.strange = 0

    @property
    def waiting_count(self) -> int:
        return len(self._waiting)

    def is_told(self, key: bytes) -> bool:
        return key in self._told

    def known(self) -> set[bytes]:
        """Blocks that were sent, or wait."""
        return {*self._told, *self._waiting}

    def stored(self, key: bytes) -> Iterator[Message]:
        ends = self._schema.ends(key)
        if ends is None:
            self.strange += 1
            return
        if self._tokens is None:
            self._told[key] = None
            yield self._schema.stored(key, None)
            return
        self._wait_no_more(key)
        chunk = self._tokens.chunk(*ends)
        if isinstance(chunk, Chunk):
            yield from self._tell(key, ends[1], chunk)
        elif key not in self._told:
            self._wait(key, chunk)

    def _tell(self, key: bytes, group: int | None, chunk: Chunk) -> Iterator[Message]:
        hashes = tuple(chunk.hashes) if len(chunk.hashes) > 1 else None
        if key in self._told and self._told[key] != hashes:
            yield from self.removed([key])  # more is known of it now
        if key not in self._told:
            self._told[key] = hashes
            self._holders.update((hash_, group) for hash_ in hashes or ())
        if chunk.guessed:
            self._guessed[short(chunk.hashes[-1]), group] = key
            if len(self._guessed) > self._waiting_max:
                self._guessed.popitem(last=False)
        yield self._schema.stored(key, chunk)

    def there(self, keys: Iterable[bytes], gone: set[bytes]) -> Iterator[Message]:
        """These exist: send the new ones. gone: known blocks that were not found yet."""
        for key in keys:
            if key in gone:
                gone.discard(key)
            elif key not in self._told and key not in self._waiting:
                yield from self.stored(key)

    def removed(self, keys: Iterable[bytes]) -> Iterator[Message]:
        """One event for each group of many."""
        gone: list[tuple[Hash, int | None]] = []
        for key in keys:
            self._wait_no_more(key)
            if key not in self._told:
                continue
            hashes = self._told.pop(key)
            ends = self._schema.ends(key)
            assert ends is not None
            self._guessed.pop((short(ends[0]), ends[1]), None)
            if hashes is None:
                gone.append(ends)
                continue
            for held in [(hash_, ends[1]) for hash_ in hashes]:
                self._holders[held] -= 1
                if not self._holders[held]:
                    del self._holders[held]
                    gone.append(held)
        for at in range(0, len(gone), BATCH_EVENTS):
            yield from self._schema.removed(gone[at : at + BATCH_EVENTS])

    def learned(self, new: Iterable[tuple[int, int | None]]) -> Iterator[Message]:
        """Tokens of these are known now, or how many blocks a chunk has."""
        for id_ in new:
            keys = list(self._awaited.get(id_[0], ()))
            if id_ in self._guessed:
                keys.append(self._guessed.pop(id_))
            for key in keys:
                yield from self.stored(key)

    def _wait(self, key: bytes, for_: int) -> None:
        self._waiting[key] = for_
        self._awaited.setdefault(for_, {})[key] = None
        if len(self._waiting) > self._waiting_max:
            self._wait_no_more(next(iter(self._waiting)))
            self.dropped += 1

    def _wait_no_more(self, key: bytes) -> None:
        for_ = self._waiting.pop(key, None)
        if for_ is not None:
            keys = self._awaited[for_]
            del keys[key]
            if not keys:
                del self._awaited[for_]


class Outlet(Protocol):
    """A Publisher, or something that prints."""

    is_asked_for_all: bool

    @property
    def is_replaying(self) -> bool: ...

    @property
    def unread_size(self) -> int: ...

    def send(self, events: Iterable[Message], now: Callable[[], object]) -> None: ...

    def serve_replay(self) -> None: ...


class Telling:
    """A namespace's changes on their way to a publisher. said: gets a line for each loss."""

    def __init__(
        self,
        client: Client,
        publisher: Outlet,
        schema: Schema,
        said: Callable[[str], None],
        *,
        tokens: TokenFeed | None = None,
        clear: bool = False,
    ) -> None:
        self._client, self._publisher, self._schema, self._said = client, publisher, schema, said
        self._tokens, self._clear = tokens, clear
        self.teller = Teller(schema, tokens)
        self._more = False
        self._begin_pacing()
        self._again_s = 0.0
        self._is_strange_said = False
        self._losses: dict[str, int] = {}
        self._said_s = time.monotonic()

    def run(self) -> None:
        """For ever. A pool that is unmounted has no blocks until it is mounted again."""
        cleared = self._schema.cleared()
        if self._clear and cleared is not None:
            self._send([cleared])
        with self._client.events() as events:
            self._tell_all()
            while True:
                try:
                    if not self.turn(events):
                        self._said("a gap or a reset: all blocks are looked at again")
                        self._tell_all()
                except NotMountedError as error:
                    self._said(str(error))
                    self._take_back(self._known())
                    self._wait_mounted(events)
                    self._tell_all()

    def turn(self, events: Events) -> bool:
        """Send present events, or soon ones, then a part of all else. False: some changes are lost."""
        batch: list[Stored | Removed] = []
        whole = True
        event = events.next_event(self._poll_s())
        while event is not None:
            if isinstance(event, (Gap, Reset)):
                whole = False
                break
            batch.append(event)
            event = events.next_event() if len(batch) < BATCH_EVENTS else None
        if whole:
            self._send(self._messages(batch))
        self._others()
        return whole

    def _poll_s(self) -> float:
        if self._more:
            return 0.0
        if self._publisher.is_replaying:
            return _REPLAYING_POLL_S
        return _POLL_S if self._tokens is None else JOINING_POLL_S

    def _others(self) -> None:
        """Engines' tokens and routers' replays, a bounded part of both."""
        self._more = False
        if self._tokens is not None:
            new, self._more = self._tokens.turn()
            self._send(self.teller.learned(new))
        self._publisher.serve_replay()
        if self._publisher.is_asked_for_all and time.monotonic() > self._again_s:
            self._tell_again()
        now = time.monotonic()
        if now > self._said_s + _SAY_S:
            self._said_s = now
            self._say_losses()

    def _tell_again(self) -> None:
        """Another node's subscriber has lost something: all that was told, between two marks."""
        self._publisher.is_asked_for_all = False
        self._again_s = float("inf")  # not within itself
        self._begin_pacing()
        self._send([{"type": ALL_CLEARED}])
        keys = iter(list(self.teller.known()))
        while page := list(islice(keys, BATCH_EVENTS)):
            self._send(chain.from_iterable(map(self.teller.stored, filter(self.teller.is_told, page))))
            self._pace()
            self._others()
        self._send([{"type": ALL_TOLD}])
        self._again_s = time.monotonic() + _AGAIN_S

    def _begin_pacing(self) -> None:
        self._is_pacing, self._paced_s, self._pacing_since_s = True, 0.0, time.monotonic()

    def _pace(self) -> None:
        """A subscriber's queue is shorter than a large pool's list. Wait for those that read, and for nobody else.
        Changes wait, too. So it ends where a subscriber reads far more slowly than all is told."""
        least, since_s = self._publisher.unread_size, time.monotonic()
        begun_s = since_s
        most_s = max(_PACED_MAX_S, begun_s - self._pacing_since_s - self._paced_s)
        while self._is_pacing and least > _PACE_SIZE:
            time.sleep(_PACE_S)
            unread = self._publisher.unread_size
            if unread < least:
                least, since_s = unread, time.monotonic()
            elif time.monotonic() > since_s + _PACE_PATIENCE_S:
                self._is_pacing = False
            if self._paced_s + time.monotonic() - begun_s > most_s:
                self._is_pacing = False
        self._paced_s += time.monotonic() - begun_s

    def _send(self, messages: Iterable[Message]) -> None:
        self._publisher.send(messages, self._schema.time)

    def _messages(self, batch: Sequence[Stored | Removed]) -> Iterator[Message]:
        """In their order; removals that follow one another are one event for each group."""
        removed: list[bytes] = []
        for event in batch:
            assert event.key is not None
            if isinstance(event, Removed):
                removed.append(event.key)
                continue
            yield from self._removed(removed)
            removed.clear()
            yield from self._stored(event.key)
        yield from self._removed(removed)

    # This node's own blocks: in a pod there are others' (pod_telling.py).

    def _known(self) -> set[bytes]:
        return self.teller.known()

    def _stored(self, key: bytes) -> Iterator[Message]:
        return self.teller.stored(key)

    def _removed(self, keys: Iterable[bytes]) -> Iterator[Message]:
        return self.teller.removed(keys)

    def _there(self, keys: Iterable[bytes], gone: set[bytes]) -> Iterator[Message]:
        return self.teller.there(keys, gone)

    def _tell_all(self) -> None:
        """Look at all blocks that are there. If the daemon goes meanwhile, a reset follows, and this is done again."""
        gone = self._known()
        keys = iter(self._client.list())
        self._begin_pacing()
        try:
            while page := list(islice(keys, BATCH_EVENTS)):
                self._send(self._there(page, gone))
                self._pace()
                self._others()
        except NotMountedError:
            return
        except KvfsError:
            if self._client.information().connected:
                raise
            return
        self._take_back(gone)

    def _take_back(self, keys: Iterable[bytes]) -> None:
        left = iter(keys)
        while page := list(islice(left, BATCH_EVENTS)):
            self._send(self._removed(page))
            self._others()

    def _wait_mounted(self, events: Events) -> None:
        while True:
            self._others()
            with suppress(NotMountedError):
                # A reset follows the mount; what is behind it is published later.
                events.next_event(0.0)
                return
            time.sleep(0.0 if self._more else _AWAY_S)

    def _say_losses(self) -> None:
        if self.teller.strange and not self._is_strange_said:
            self._is_strange_said = True
            self._said("some keys are none of the schema's: their blocks are not told")
        losses = {"blocks that waited for tokens for too long": self.teller.dropped}
        for name, counts in self._tokens.counts() if self._tokens is not None else ():
            losses |= {
                f"blocks' tokens of {name} dropped: no room": counts.dropped,
                f"batches and events of {name} passed over: they make no sense": counts.senseless,
                f"batches of {name} lost": counts.lost,
                f"blocks of {name} told again with other tokens": counts.different,
            }
        for what, count in losses.items():
            if count > self._losses.get(what, 0):
                self._said(f"{count - self._losses.get(what, 0)} {what}")
        self._losses = losses
