"""A pod in one thread: the real feed and follower of N nodes on engines in memory, with a fake plane, by a seed.

Time is virtual, and every choice is the seed's: who takes a turn when, which entries are lost, doubled or late. Any
call of an engine or of the plane may be a node's last. Engines are flushed, trimmed, cut off and brought back as they
were. The fake plane has tables, maps and flash as dicts, with the rules of the pod map. The higher version wins, and
an entry dies with its segment's life.

The oracle:

- Bytes are returned only if they were stored under that name, in that life of the segment.
- A barrier that passed shows everything that its owners had when it began. At rest every barrier passes.
- At rest all nodes agree with the owners' tables. A miss is allowed for a name over which two owners met.

In a short world owners' memories drop news before they are on flash. Of 100,000 other worlds few do so when it matters.

    python tests/pod/simulation.py [--seeds N] [--first N] [--processes N] [--short]
    KVFS_POD_SEED=17 pytest tests/pod/test_simulation.py
"""

from __future__ import annotations

import argparse
import functools
import heapq
import multiprocessing
import random
import struct
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from memory_engine import Faults, MemoryEngine, MemoryServer

from kvfs.errors import EngineAwayError, FreshError
from kvfs.pod.asking import Barrier, LeaseAsk
from kvfs.pod.batch import HEADER, MAGIC, VERSION, span
from kvfs.pod.engine import Engine, Entry, Fields, Position
from kvfs.pod.follow import Applied
from kvfs.pod.limits import Limits
from kvfs.pod.member import Identity, LeaseName, Member

HERE, GONE = 1, 2
_SEGMENT, _RECORD = struct.Struct("<QII"), struct.Struct("<QQQIHH")
_ENDED = 1
PAGES, SEGMENTS_A_NODE, RECORDS_A_BATCH = 6, 3, 4
SECRET = b"of the simulation"
ACTIVE_S, REST_MAX_S, COMMIT_S = 2.5, 20.0, 0.25
SHORT_HISTORY_SIZE, SHORT_COMMIT_S = 500, 0.5
# As in a pod, but for the size of everything.
LIMITS = Limits(
    verify_max_s=2.0,
    history_s=4.0, history_size=6000, stream_s=1.5, stream_size=4000, settle_s=0.6, beat_s=0.25, beat_expire_s=0.8,
    message_s=0.5, held_size=1500, repeat_size=1200, ask_s=0.1, ask_max_s=0.6, patience_s=0.02, beat_patience_s=0.1,
    first_sign_s=0.6, load_again_s=0.2, load_again_max_s=1.0, retry_s=0.02, retry_max_s=0.3, silence_s=0.5,
    read_count=4,
)  # fmt: skip


class Wrong(Exception):
    """The oracle's word."""


class Crash(BaseException):
    """The end of a node, in the middle of anything."""


# ---- flash: it outlives its node ----


@dataclass(slots=True)
class Block:
    name: int
    version: int
    volatile: bool = True  # not committed yet: a crash takes it, and nobody else finds it
    dead: bool = False


@dataclass(slots=True)
class Life:
    """One life of a segment."""

    generation: int = 0
    blocks: dict[int, Block] = field(default_factory=dict)


@dataclass(slots=True)
class Flash:
    """All that a node has on its devices. `pending` becomes true with the next commit."""

    slot: int
    epoch: int = 0
    segments: dict[int, Life] = field(default_factory=dict)
    tombstones: dict[int, int] = field(default_factory=dict)
    pending: list[Callable[[], None]] = field(default_factory=list)

    def commit(self) -> None:
        for change in self.pending:
            change()
        self.pending.clear()
        for life in self.segments.values():
            for block in life.blocks.values():
                block.volatile = False

    def crash(self) -> None:
        self.pending.clear()
        for life in self.segments.values():
            life.blocks = {page: block for page, block in life.blocks.items() if not block.volatile}


@dataclass(slots=True)
class Place:
    version: int
    segment: int
    page: int
    generation: int


# ---- the plane of one node ----


class Plane:
    """The table, the map and the queue of news of one start of a node. It is the member's source, sink and keeper."""

    by_version = True
    tells_of_its_drops = True

    def __init__(self, node: Node, start: int) -> None:
        self.node, self.flash, self.start = node, node.flash, start
        self.last = self.flash.epoch << 28
        self.table: dict[int, Place] = {}
        self.map: dict[int, Place] = {}
        self.lives: dict[int, tuple[int, bool]] = {}
        # Names of which a record of one owner took the place of another's, or kept it out.
        self.met: set[int] = set()
        self.queue: list[tuple[float, int, int, int, Place | None]] = []  # due, kind, name, version, place
        self.ended: list[tuple[int, int]] = []
        self.number = 0
        self.leases: set[LeaseName] = set()
        self.reloads: list[int] = []
        self.open = min(self.flash.segments)
        # Pages that a crash took may be in others' maps: no start writes into a life of the one before it.
        self.is_new = True
        self._recover()

    def _recover(self) -> None:
        for segment, life in self.flash.segments.items():
            self.lives[segment] = (life.generation, True)
            for page, block in life.blocks.items():
                place = Place(block.version, segment, page, life.generation)
                known = self.table.get(block.name)
                if not block.dead and (known is None or known.version < block.version):
                    self.table[block.name] = place

    # -- numbers --

    def new_number(self) -> int:
        self.last += 1
        return self.last << 12 | self.flash.slot

    def saw(self, number: int) -> None:
        self.last = max(self.last, number >> 12)

    # -- what users do --

    def store(self, name: int, now: float) -> None:
        life = self.flash.segments[self.open]
        if self.is_new or not life.generation or max(life.blocks, default=-1) + 1 >= PAGES:
            life = self._next_segment()
        page = max(life.blocks, default=-1) + 1
        version = self.new_number()
        block = Block(name, version)
        life.blocks[page] = block
        self._bury(name)
        place = Place(version, self.open, page, life.generation)
        self.table[name] = place
        self.node.world.ledger[(self.open, life.generation, page)] = name
        held = self.node.world.random.choice((0.0, 0.0, 0.02, 0.3))
        self.queue.append((now + held, HERE, name, version, place))
        self.node.wake()

    def _next_segment(self) -> Life:
        segments = sorted(self.flash.segments)
        self.is_new = False
        self.open = segments[(segments.index(self.open) + 1) % len(segments)]
        old = self.flash.segments[self.open]
        if old.generation:
            self.ended.append((self.open, old.generation))
            for name in [name for name, place in self.table.items() if place.segment == self.open]:
                del self.table[name]
            self.queue = [told for told in self.queue if told[4] is None or told[4].segment != self.open]
        life = self.flash.segments[self.open] = Life(self.new_number())
        self.lives[self.open] = (life.generation, True)
        return life

    def remove(self, name: int, now: float) -> None:
        if self.look(name) is None:
            return
        version = self.new_number()
        if name in self.table:
            self._bury(name)
            del self.table[name]
        if self.map.pop(name, None) is not None:
            self.met.add(name)
            self.flash.pending.append(lambda: self.flash.tombstones.__setitem__(name, version))
        self._tell_gone(name, version, now)

    def _bury(self, name: int) -> None:
        place = self.table.get(name)
        if place is not None:
            block = self.flash.segments[place.segment].blocks[place.page]
            self.flash.pending.append(lambda: setattr(block, "dead", True))

    def _tell_gone(self, name: int, version: int, now: float) -> None:
        self.queue = [told for told in self.queue if told[1] != HERE or told[2] != name]
        self.queue.append((now, GONE, name, version, None))
        self.node.wake()

    def look(self, name: int) -> Place | None:
        place = self.table.get(name)
        if place is None:
            place = self.map.get(name)
            if place is not None and not self._is_alive(place):
                place = None
        return place

    def read(self, name: int) -> None:
        """Read as a user would: the life of the segment is proved; the oracle looks at the rest."""
        place = self.look(name)
        if place is None:
            return
        world = self.node.world
        life = world.segment(place.segment)
        if life.generation != place.generation or place.page not in life.blocks:
            return
        stored = world.ledger[(place.segment, place.generation, place.page)]
        if stored != name:
            raise Wrong(f"slot {self.flash.slot}: name {name} led to bytes of name {stored}: {place}")

    def _is_alive(self, place: Place) -> bool:
        return self.lives.get(place.segment) == (place.generation, True)

    # -- Source --

    def take(self, *, everything: bool) -> Sequence[bytes]:
        self.node.step()
        now = self.node.world.now
        due = [told for told in self.queue if everything or told[0] <= now]
        if not due and not self.ended:
            return []
        self.queue = [] if everything else [told for told in self.queue if told[0] > now]
        batches: list[bytes] = []
        while due or self.ended:
            batches.append(self._batch(due[:RECORDS_A_BATCH], self.ended))
            due, self.ended = due[RECORDS_A_BATCH:], []
        return batches

    def _batch(
        self, told: Sequence[tuple[float, int, int, int, Place | None]], ended: Sequence[tuple[int, int]]
    ) -> bytes:
        segments = [(generation, segment, _ENDED) for segment, generation in ended]
        records: list[bytes] = []
        for _, kind, name, version, place in told:
            index = 0
            if place is not None:
                entry = (place.generation, place.segment, 0)
                if entry not in segments:
                    segments.append(entry)
                index = segments.index(entry)
            page = 0 if place is None else place.page
            records.append(_RECORD.pack(name, 0, version, page | kind << 24, index, 0))
        body = b"".join([*(_SEGMENT.pack(*one) for one in segments), *records])
        head = HEADER.pack(
            MAGIC, VERSION, HEADER.size + len(body), 0, self.start, self.number, self.flash.slot, len(segments), 0, 0,
            len(records), 0,
        )  # fmt: skip
        self.number += span(len(records))
        return head + body

    def wait(self, timeout_s: float) -> None: ...

    def wake(self) -> None:
        self.node.wake()

    def due_s(self) -> float:
        """In how many seconds something of the queue is due."""
        if self.ended:
            return 0.0
        return min((told[0] for told in self.queue), default=float("inf")) - self.node.world.now

    # -- Sink --

    def apply(self, slot: int, batch: bytes) -> Applied:
        self.node.step()
        count, records = struct.unpack_from("<H", batch, 42)[0], struct.unpack_from("<I", batch, 48)[0]
        segments = [_SEGMENT.unpack_from(batch, HEADER.size + 16 * index) for index in range(count)]
        # Ends first: a record of the same batch may be of the segment's next life.
        for generation, segment, flags in sorted(segments):
            self._see_life(segment, generation, not flags & _ENDED)
        at = HEADER.size + 16 * count
        for index in range(records):
            name, _, version, page_kind, segment_index, _ = _RECORD.unpack_from(batch, at + _RECORD.size * index)
            if page_kind >> 24 == HERE:
                generation, segment, _ = segments[segment_index]
                self.here(slot, name, Place(version, segment, page_kind & 0xFFFFFF, generation))
            else:
                self.gone(slot, name, version)
        return Applied.DONE

    def _see_life(self, segment: int, generation: int, is_alive: bool) -> None:
        self.saw(generation)
        known = self.lives.get(segment, (0, False))
        if generation > known[0]:
            self.lives[segment] = (generation, is_alive)
        elif generation == known[0] and not is_alive:
            self.lives[segment] = (generation, False)

    def here(self, slot: int, name: int, place: Place) -> None:
        self.saw(place.version)
        if not self._is_alive(place):
            return
        own = self.table.get(name)
        if own is not None:
            self.met.add(name)
            if own.version < place.version:
                self._drop_own(name, own)
        known = self.map.get(name)
        if known is not None and self._is_alive(known):
            if owner_of(known.segment) != slot:
                self.met.add(name)
            if known.version >= place.version and self.by_version:
                return
        self.map[name] = place

    def gone(self, slot: int, name: int, version: int) -> None:
        self.saw(version)
        own = self.table.get(name)
        if own is not None and own.version <= version:
            self._drop_own(name, own)
        known = self.map.get(name)
        if known is not None and (known.version <= version or not self.by_version):
            if owner_of(known.segment) != slot:
                self.met.add(name)
            del self.map[name]

    def _drop_own(self, name: int, own: Place) -> None:
        """For another's sake. It is said in this node's own feed, behind the record that brought it into all maps."""
        self._bury(name)
        del self.table[name]
        if self.tells_of_its_drops:
            self._tell_gone(name, own.version, self.node.world.now)

    def reload(self, slot: int) -> None:
        self.node.step()
        self.map = {name: place for name, place in self.map.items() if owner_of(place.segment) != slot}
        self.node.world.after(self.node, 0.0, lambda: self._load(slot, 0))

    def _load(self, slot: int, index: int) -> None:
        """Read an owner's flash, a segment at a time, while it writes on."""
        world = self.node.world
        flash = world.nodes[slot].flash
        if index < SEGMENTS_A_NODE:
            segment = slot * SEGMENTS_A_NODE + index
            life = flash.segments[segment]
            if life.generation:
                self._see_life(segment, life.generation, True)
                for page, block in life.blocks.items():
                    if not block.volatile and not block.dead:
                        self.here(slot, block.name, Place(block.version, segment, page, life.generation))
            world.after(self.node, world.random.random() * 0.05, lambda: self._load(slot, index + 1))
            return
        for name, version in flash.tombstones.items():
            self.gone(slot, name, version)
        member = self.node.member
        assert member is not None
        member.loaded(slot, world.now, world.wall(), whole=world.random.random() >= world.load_fails)

    # -- Keeper --

    def lease(self, lease: LeaseName, keys: Sequence[bytes], seconds: float) -> Sequence[bool]:
        self.leases.add(lease)
        return [int.from_bytes(key[:8], "little") in self.table for key in keys]

    def release(self, lease: LeaseName) -> None:
        self.leases.discard(lease)

    def touch(self, asker: int, keys: Sequence[bytes]) -> None: ...


def owner_of(segment: int) -> int:
    return segment // SEGMENTS_A_NODE


# ---- nodes, their engines, the world ----


class CrashingEngine:
    """A node's engine, each call of which may be the node's last, before it is done or after."""

    def __init__(self, node: Node, inner: MemoryEngine) -> None:
        self._node, self._inner = node, inner
        self.name = inner.name

    def append(self, stream: str, fields: Fields, *, oldest: Position | None = None) -> Position:
        self._node.step()
        position = self._inner.append(stream, fields, oldest=oldest)
        self._node.step()
        return position

    def read(self, after: Mapping[str, Position], *, wait_s: float, count: int) -> list[Entry]:
        entries = self._inner.read(after, wait_s=wait_s, count=count)
        self._node.step()
        return entries

    def put(self, key: str, value: bytes, *, expire_s: float | None = None) -> None:
        self._node.step()
        self._inner.put(key, value, expire_s=expire_s)

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)


class Node:
    """A slot: its flash, and the process that lives now, if one does."""

    def __init__(self, world: World, slot: int) -> None:
        self.world, self.slot = world, slot
        first = slot * SEGMENTS_A_NODE
        self.flash = Flash(slot, segments={first + index: Life() for index in range(SEGMENTS_A_NODE)})
        self.member: Member | None = None
        self.plane: Plane | None = None
        self.inner: list[MemoryEngine] = []
        self.life = 0
        self.appending: list[Engine] = []
        self.woken: list[bool] = []
        self.turns: list[int] = []  # of each link: the number of its next turn
        self.steps_left = -1  # a node in danger dies at a step

    def start(self) -> None:
        world = self.world
        self.life += 1
        self.steps_left = -1
        self.flash.epoch = 1 + max(node.flash.epoch for node in world.nodes)
        start = world.random.getrandbits(63) | 1
        self.plane = Plane(self, start)
        identity = Identity("pool", self.slot, start, self.flash.epoch, tuple(range(len(world.nodes))), SECRET)
        names = [server.name for server in world.servers]
        plane = self.plane
        self.member = Member(
            identity, names, plane, plane, plane, world.now, limits=world.limits, dice=world.random.random
        )  # fmt: skip
        self.inner = [server.engine(self.slot) for server in world.servers]
        self.appending = [CrashingEngine(self, inner) for inner in self.inner]
        self.woken, self.turns = [False] * len(self.inner), [0] * len(self.inner)
        for index, inner in enumerate(self.inner):
            engine = CrashingEngine(self, inner)
            world.after(self, world.random.random() * 0.05, lambda i=index, e=engine: self._read(i, e))
        self.wake()
        world.after(self, world.random.random() * world.commit_s, self._commit)

    def step(self) -> None:
        if self.steps_left > 0:
            self.steps_left -= 1
        elif self.steps_left == 0:
            raise Crash

    def crash(self) -> None:
        self.member = self.plane = None
        self.life += 1
        self.flash.crash()

    def wake(self) -> None:
        """All threads that append take a turn soon."""
        for index in range(len(self.inner)):
            if not self.woken[index]:
                self.woken[index] = True
                self._append_after(index, 0.0)

    def _append_after(self, index: int, delay_s: float) -> None:
        self.turns[index] += 1
        turn = self.turns[index]
        self.world.after(self, delay_s + self.world.random.random() * 0.04, lambda: self._append(index, turn))

    def _append(self, index: int, turn: int) -> None:
        member, plane, world = self.member, self.plane, self.world
        if turn != self.turns[index]:
            return  # it was woken before
        assert member is not None and plane is not None
        self.woken[index] = False
        wait_s = 0.0
        for _ in range(world.random.randint(1, 4)):
            wait_s = member.append_turn(index, self.appending[index], world.now, world.wall())
            if wait_s > 0:
                break
        if not self.woken[index]:
            self._append_after(index, max(0.01, min(wait_s, plane.due_s())))

    def _read(self, index: int, engine: Engine) -> None:
        member, world = self.member, self.world
        assert member is not None
        wait_s = member.read_turn(index, engine, world.now, 1.0, lambda: world.now, world.wall)
        delay_s = 0.01 + world.random.random() * min(0.08, max(0.03, wait_s))
        world.after(self, delay_s, lambda: self._read(index, engine))

    def _commit(self) -> None:
        self.flash.commit()
        self.world.after(self, self.world.commit_s, self._commit)


class World:
    """All nodes, their engines, and time."""

    def __init__(self, seed: int, *, short: bool = False) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.now = 1000.0
        self._events: list[tuple[float, int, Node | None, int, Callable[[], None]]] = []
        self._order = 0
        self.ledger: dict[tuple[int, int, int], int] = {}
        engines = 2 if self.random.random() < 0.3 else 1
        self.servers = [MemoryServer(f"memory:{index}", lambda: self.now, self.random) for index in range(engines)]
        self.nodes: list[Node] = []
        count = self.random.choice((2, 3, 3, 4))
        self.nodes = [Node(self, slot) for slot in range(count)]
        self.limits = replace(LIMITS, history_size=self.random.choice((1500, 3000, 6000)))
        self.commit_s = COMMIT_S
        if short:
            self.limits, self.commit_s = replace(self.limits, history_size=SHORT_HISTORY_SIZE), SHORT_COMMIT_S
        self.load_fails = 0.0
        # In half of the worlds every name is one owner's alone, so that nothing excuses a miss.
        self.shared = self.random.random() < 0.5
        self.snapshots: list[dict[str, list[tuple[Position, Fields]]]] = []
        self.done = dict.fromkeys(("fresh", "leases", "crashes", "repeats", "reloads", "lost", "dropped", "resets"), 0)

    def wall(self) -> int:
        return int(self.now * 1e9)

    def segment(self, segment: int) -> Life:
        return self.nodes[owner_of(segment)].flash.segments[segment]

    def after(self, node: Node | None, delay_s: float, do: Callable[[], None]) -> None:
        self._order += 1
        life = 0 if node is None else node.life
        heapq.heappush(self._events, (self.now + delay_s, self._order, node, life, do))

    def run_until(self, end: float) -> None:
        while self._events and self._events[0][0] <= end:
            when, _, node, life, do = heapq.heappop(self._events)
            if node is not None and node.life != life:
                continue
            self.now = max(self.now, when)
            try:
                do()
            except Crash:
                assert node is not None
                self._crash(node)
        self.now = end

    def _crash(self, node: Node) -> None:
        self.count(node)
        node.crash()
        self.done["crashes"] += 1
        self.after(None, self.random.random() * 1.5, lambda: None if node.member else node.start())

    def count(self, node: Node) -> None:
        if node.member is not None:
            statistics = node.member.statistics(self.now)
            self.done["repeats"] += statistics.feed.repeated
            self.done["lost"] += sum(owner.lost > 0 for owner in statistics.owners)
            self.done["dropped"] += statistics.feed.dropped
            self.done["reloads"] += sum(owner.reloads for owner in statistics.owners)
            self.done["resets"] += sum(link.resets for link in statistics.links)
            if statistics.forged or statistics.malformed:
                raise Wrong(f"slot {node.slot}: {statistics.forged} forged, {statistics.malformed} malformed messages")

    # -- a seed --

    def run(self) -> None:
        dice = self.random
        for node in self.nodes:
            self.after(None, dice.random() * 0.5, node.start)
        if dice.random() < 0.6:
            rate = dice.choice((0.02, 0.1, 0.3))
            faults = Faults(*(dice.choice((0.0, rate)) for _ in range(3)), 0.4, dice.choice((0.0, rate / 2)), rate / 4)
            for server in self.servers:
                server.faults = faults
        for _ in range(50):
            self.after(None, 0.3 + dice.random() * ACTIVE_S, self._operate)
        for _ in range(dice.randint(0, 6)):
            self.after(None, 0.3 + dice.random() * ACTIVE_S, self._trouble)
        self.run_until(1000.3 + ACTIVE_S)
        self._heal()
        end, calm = self.now + REST_MAX_S, 0
        said = ""
        self.run_until(self.now + 0.8)
        while calm < 2:
            self.run_until(self.now + 0.3)
            said = self._disagreement()
            calm = 0 if said else calm + 1
            if said and self.now > end:
                raise Wrong(said)
        self._fresh_at_rest()
        for node in self.nodes:
            self.count(node)

    def _fresh_at_rest(self) -> None:
        """With every engine there, a barrier passes on all nodes."""
        waiting = {node: "" for node in self.nodes}
        for _ in range(10):
            barriers = {node: node.member.flush(self.now, 0.5) for node in waiting if node.member is not None}
            self.run_until(self.now + 0.5)
            for node, barrier in barriers.items():
                assert node.member is not None
                try:
                    node.member.flushed(barrier)
                    del waiting[node]
                except FreshError as error:
                    waiting[node] = f"at rest slot {node.slot} has no {error}"
            if not waiting:
                return
        raise Wrong("; ".join(waiting.values()))

    def _name(self, node: Node) -> int:
        if self.shared:
            return self.random.randint(1, 8)
        return 100 * (node.slot + 1) + self.random.randint(1, 8)

    def _operate(self) -> None:
        alive = [node for node in self.nodes if node.plane is not None]
        if not alive:
            return
        node = self.random.choice(alive)
        plane, member, roll = node.plane, node.member, self.random.random()
        assert plane is not None and member is not None
        if roll < 0.55:
            plane.store(self._name(node), self.now)
        elif roll < 0.7:
            plane.remove(self._name(node), self.now)
        elif roll < 0.85:
            for other in self.nodes:
                for name in range(1, 9):
                    plane.read(name if self.shared else 100 * (other.slot + 1) + name)
        elif roll < 0.95:
            self._barrier(node, member)
        else:
            slot = self.random.choice([other.slot for other in self.nodes if other is not node])
            key = struct.pack("<QQ", self._name(self.nodes[slot]), 0)
            ask = member.lease(slot, [key], 1.0, self.now, 0.2)
            self.after(node, 0.2, lambda: self._leased(member, ask))

    def _leased(self, member: Member, ask: LeaseAsk) -> None:
        held = member.finish_lease(ask)
        owner = self.nodes[ask.slot].plane
        lease = LeaseName(member.identity.slot, member.identity.start, ask.number)
        if any(held):
            self.done["leases"] += 1
            # An owner that has started anew has lost it; a read then misses.
            if owner is not None and self.nodes[ask.slot].life == 1 and lease not in owner.leases:
                raise Wrong(
                    f"slot {member.identity.slot}: lease {ask.number} is held, and slot {ask.slot} keeps nothing"
                )

    def _barrier(self, node: Node, member: Member) -> None:
        try:
            barrier = member.flush(self.now, 0.4)
        except EngineAwayError:
            return
        alive = [self.nodes[slot] for slot in barrier.unanswered]
        had = {(other, other.life): dict(other.plane.table) for other in alive if other.plane is not None}
        self._wait_barrier(node, member, barrier, had)

    def _wait_barrier(
        self, node: Node, member: Member, barrier: Barrier, had: Mapping[tuple[Node, int], Mapping[int, Place]]
    ) -> None:
        if not barrier.finished and self.now < barrier.deadline:
            self.after(node, 0.02, lambda: self._wait_barrier(node, member, barrier, had))
            return
        try:
            member.flushed(barrier)
        except FreshError:
            return
        self.done["fresh"] += 1
        plane = node.plane
        assert plane is not None
        for (other, life), table in had.items():
            if other.life != life or other.plane is None:
                continue
            for name, place in table.items():
                found = plane.look(name)
                is_still = other.plane.table.get(name) == place
                if is_still and name not in plane.met and (found is None or found.version < place.version):
                    raise Wrong(
                        f"slot {node.slot}: fresh, and name {name} of slot {other.slot} is {found}, not {place}"
                    )

    def _trouble(self) -> None:
        dice = self.random
        server, node = dice.choice(self.servers), dice.choice(self.nodes)
        kind = dice.choice(("crash", "crash", "crash", "cut", "away", "flush", "restore", "trim", "load", "replace"))
        if kind == "crash":
            node.steps_left = dice.randint(0, 12)
        elif kind == "cut":
            server.cut = set(dice.sample(range(len(self.nodes)), dice.randint(1, len(self.nodes) - 1)))
            self.after(None, dice.random() * 1.5, server.cut.clear)
        elif kind == "away":
            server.away = True
            self.after(None, dice.random() * 2.0, lambda: setattr(server, "away", False))
        elif kind == "flush":
            server.flush()
        elif kind == "restore":
            snapshot = server.snapshot()
            self.after(None, dice.random() * 1.5, lambda: server.restore(snapshot))
        elif kind == "replace":
            # By an empty server whose clock is behind.
            server.flush()
            server.clock_behind_s += 60 * dice.random()
        elif kind == "trim":
            server.trim_all(dice.randint(0, 2))
        else:
            self.load_fails = 0.5

    def _heal(self) -> None:
        self.load_fails = 0.0
        for server in self.servers:
            server.faults = Faults()
            server.cut, server.away = set(), False
        for node in self.nodes:
            node.steps_left = -1
            if node.member is None:
                node.start()

    def _disagreement(self) -> str:
        """How nodes differ from the owners' tables; empty if they do not."""
        planes = [node.plane for node in self.nodes]
        assert None not in planes
        there = [plane for plane in planes if plane is not None]
        names = {name for plane in there for name in (*plane.table, *plane.map)}
        for name in sorted(names):
            owners = [plane for plane in there if name in plane.table]
            if len(owners) > 1:
                return f"name {name} is in the tables of slots {[plane.flash.slot for plane in owners]}"
            for plane in there:
                found = plane.look(name)
                wanted = owners[0].table[name] if owners else None
                is_excused = found is None and name in plane.met
                if found != wanted and not is_excused:
                    return f"at rest slot {plane.flash.slot} has name {name} at {found}; its owner has it at {wanted}"
            for plane in there:
                plane.read(name)
        return ""


def run_seed(seed: int, *, short: bool = False) -> dict[str, int]:
    """Run one seed. Wrong, with the seed in its message."""
    world = World(seed, short=short)
    try:
        world.run()
    except Exception as error:
        raise Wrong(f"KVFS_POD_SEED={seed}{' KVFS_POD_SHORT=1' * short}: {error}") from error
    return world.done


def run_seeds(seeds: Sequence[int], *, short: bool = False) -> tuple[dict[str, int], list[str]]:
    """Counts of all that happened in them, and all that was wrong."""
    total: dict[str, int] = {}
    wrong: list[str] = []
    for seed in seeds:
        try:
            for name, count in run_seed(seed, short=short).items():
                total[name] = total.get(name, 0) + count
        except Wrong as error:
            wrong.append(str(error))
    return total, wrong


def main() -> int:
    parser = argparse.ArgumentParser(description="seeds of the pod's simulation")
    parser.add_argument("--seeds", type=int, default=100_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--processes", type=int, default=multiprocessing.cpu_count())
    parser.add_argument("--short", action="store_true", help="worlds of short memories")
    options = parser.parse_args()
    run = functools.partial(run_seeds, short=options.short)
    begin = time.monotonic()
    seeds = range(options.first, options.first + options.seeds)
    parts = [seeds[at : at + 500] for at in range(0, len(seeds), 500)]
    total: dict[str, int] = {}
    wrong: list[str] = []
    with multiprocessing.Pool(options.processes) as pool:
        for done, (counts, said) in enumerate(pool.imap_unordered(run, parts), 1):
            for name, count in counts.items():
                total[name] = total.get(name, 0) + count
            wrong += said
            if said or done % 20 == 0:
                print(f"{min(done * 500, len(seeds))} seeds, {time.monotonic() - begin:.0f} s: {said}", flush=True)
    print(f"{len(seeds)} seeds in {time.monotonic() - begin:.0f} s; {len(wrong)} wrong; {total}")
    for said in wrong[:20]:
        print(said)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
