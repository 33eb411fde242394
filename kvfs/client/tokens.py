"""Tokens of blocks, from engines' own KV events: kvfs knows keys alone, and routers want tokens.

An engine is subscribed to (vLLM's and SGLang's schema over ZeroMQ). Its events say of each block the tokens, the block
before and the size. These are kept by hash, whatever becomes of the block in the engine: a hash means the same tokens
for ever. A secondary tier's block may be a chunk of several; engines tell chunks whole, or the count is given.

An engine is not believed. Each field is checked, an event that makes no sense is counted and passed over. Memory is
bounded for each engine by itself, so one that floods drops what it told itself, the oldest first.
"""

from __future__ import annotations

import time
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Annotated, Any, Self

import msgspec
import zmq

from kvfs.client.event_schemas import Chunk, Hash, short
from kvfs.errors import UsageError

# Of each engine: messages that wait here, and the longest one. Beyond, they wait at the engine.
_HIGH_WATER = 16
_MESSAGE_SIZE_MAX = 4 << 20
# One turn, of all engines: it ends with the message that reaches one of them.
TURN_MESSAGES = 16
TURN_SIZE = 256 << 10
_HASHES_MAX = 65_536
_HASH_SIZE_MAX = 64
_BLOCK_SIZE_MAX = 65_536
_TOKENS_MAX = 1 << 20
_NAME_MAX = 256
_EXTRA_SIZE_MAX = 16 << 10
# A chunk that would have more is told from where it has so many: a liar's chain may be a ring.
_CHUNK_TOKENS_MAX = 65_536
# A block in memory beside its tokens, measured in tests/unit/test_event_tokens.py.
_BLOCK_COST = 360
_SHARED_MAX = 1024
# A replay is given up that says nothing for so long; another one begins no sooner than that after the last.
_REPLAY_PATIENCE_S = 10.0
_REPLAY_END = (1 << 64) - 1


class _Fields(msgspec.Struct, gc=False):
    block_hashes: Annotated[list[bytes | int], msgspec.Meta(max_length=_HASHES_MAX)]
    parent_block_hash: bytes | int | None
    token_ids: Annotated[list[int], msgspec.Meta(max_length=_TOKENS_MAX)]
    block_size: Annotated[int, msgspec.Meta(ge=0, le=_BLOCK_SIZE_MAX)]
    lora_id: int | None = None
    medium: str | None = None
    lora_name: Annotated[str, msgspec.Meta(max_length=_NAME_MAX)] | None = None
    extra_keys: list[msgspec.Raw] | None = None
    group_idx: Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)] | None = None


class _Stored(_Fields, tag="BlockStored", tag_field="type", gc=False):
    kv_cache_spec_kind: Annotated[str, msgspec.Meta(max_length=_NAME_MAX)] | None = None
    kv_cache_spec_sliding_window: int | None = None
    cache_salt: Annotated[str, msgspec.Meta(max_length=_NAME_MAX)] | None = None
    lookahead_token_ids: list[msgspec.Raw] | None = None


class _StoredArray(_Fields, tag="BlockStored", array_like=True, gc=False):
    """An array has no room for the others."""


class _Removed(msgspec.Struct, tag="BlockRemoved", tag_field="type"):
    """Of no interest, as is the next."""


class _Cleared(msgspec.Struct, tag="AllBlocksCleared", tag_field="type"):
    pass


class _RemovedArray(msgspec.Struct, tag="BlockRemoved", array_like=True):
    pass


class _ClearedArray(msgspec.Struct, tag="AllBlocksCleared", array_like=True):
    pass


_BATCH = msgspec.msgpack.Decoder(list[msgspec.Raw])
_EVENTS = msgspec.msgpack.Decoder(list[msgspec.Raw])
_MAP = msgspec.msgpack.Decoder(_Stored | _Removed | _Cleared)
_ARRAY = msgspec.msgpack.Decoder(_StoredArray | _RemovedArray | _ClearedArray)
_NIL = b"\xc0"


class _Senseless(Exception):
    pass


@dataclass(slots=True)
class _Block:
    """tokens: of 32 bits. own: its extra keys and its tokens of a look-ahead, in msgpack. shared: the fields that all
    blocks of an event have. span: the blocks of the chunk that ends with this one, if an engine told of one."""

    hash: Hash
    parent: Hash | None
    tokens: bytes
    shared: dict[str, object]
    own: tuple[bytes, bytes] | None
    span: int

    @property
    def cost(self) -> int:
        return _BLOCK_COST + len(self.tokens) + (sum(map(len, self.own)) if self.own else 0)


@dataclass(slots=True)
class Counts:
    """blocks and size: kept now. The others are since the start. events: with blocks. senseless: batches and events.
    different: blocks that were told again with other tokens. dropped: blocks, for want of memory. lost: batches, for
    good. replays: those that were asked for. starts: of the engine."""

    blocks: int = 0
    size: int = 0
    batches: int = 0
    events: int = 0
    senseless: int = 0
    different: int = 0
    dropped: int = 0
    lost: int = 0
    replays: int = 0
    starts: int = 0


class Tokens:
    """Blocks that one engine sent, by hash and group. size_max: their bytes. count_max: how many."""

    def __init__(self, size_max: int, count_max: int) -> None:
        self._size_max, self._count_max = size_max, count_max
        self._blocks: OrderedDict[int, _Block] = OrderedDict()
        self._shared: dict[tuple[object, ...], dict[str, object]] = {}
        self.counts = Counts()

    def find(self, hash_: int, group: int | None) -> _Block | None:
        """group: blocks that were sent without one are of any."""
        found = self._blocks.get(_id(hash_, group))
        return found if found is not None or group is None else self._blocks.get(_id(hash_, None))

    def learn(self, payload: bytes) -> list[tuple[int, int | None]]:
        """Take a batch of an engine's. Returns hashes and groups that are known now, or of which more is known."""
        self.counts.batches += 1
        new: list[tuple[int, int | None]] = []
        try:
            batch = _BATCH.decode(payload)
            if len(batch) < 2:
                raise _Senseless
            events = _EVENTS.decode(batch[1])
        except (msgspec.MsgspecError, ValueError, RecursionError, _Senseless):
            self.counts.senseless += 1
            return new
        for event in events:
            try:
                first = memoryview(event)[0]
                told = (_MAP if 0x80 <= first <= 0x8F or 0xDE <= first <= 0xDF else _ARRAY).decode(event)
                if isinstance(told, (_Stored, _StoredArray)):
                    new += self._learn(told)
            except (msgspec.MsgspecError, ValueError, RecursionError, OverflowError, _Senseless):
                self.counts.senseless += 1
        self._bound()
        return new

    def _learn(self, told: _Stored | _StoredArray) -> list[tuple[int, int | None]]:
        hashes, size = told.block_hashes, told.block_size
        if not size and not told.token_ids:
            return []  # a storage tier's, without tokens
        if not hashes or not size or len(told.token_ids) != len(hashes) * size:
            raise _Senseless
        parent = told.parent_block_hash
        for hash_ in hashes if parent is None else (*hashes, parent):
            if isinstance(hash_, bytes) and not 8 <= len(hash_) <= _HASH_SIZE_MAX:
                raise _Senseless
        extra = told.extra_keys
        ahead = told.lookahead_token_ids if isinstance(told, _Stored) else None
        for each in (extra, ahead):
            if each is not None and (len(each) != len(hashes) or any(len(one) > _EXTRA_SIZE_MAX for one in each)):
                raise _Senseless
        tokens = array("I", told.token_ids).tobytes()
        step = len(tokens) // len(hashes)
        # An engine's own memory is told of by runs of blocks, tiers below it by chunks.
        is_chunk = told.medium is not None and not told.medium.upper().startswith("GPU")
        shared = self._shared_of(told)
        new = []
        for index, hash_ in enumerate(hashes):
            own = None
            if extra is not None or ahead is not None:
                pair = (_NIL if extra is None else bytes(extra[index]), _NIL if ahead is None else bytes(ahead[index]))
                own = None if pair == (_NIL, _NIL) else pair
            span = len(hashes) if is_chunk and index == len(hashes) - 1 else 0
            block = _Block(hash_, parent, tokens[index * step : (index + 1) * step], shared, own, span)
            if self._add(short(hash_), told.group_idx, block):
                new.append((short(hash_), told.group_idx))
            parent = hash_
        self.counts.events += 1
        return new

    def _add(self, hash_: int, group: int | None, block: _Block) -> bool:
        id_ = _id(hash_, group)
        before = self._blocks.get(id_)
        if before is None:
            self._blocks[id_] = block
            self.counts.size += block.cost
            return True
        self._blocks.move_to_end(id_)
        if before.tokens != block.tokens or (before.parent is None) != (block.parent is None):
            self.counts.different += 1  # the first counts: routers may have been told of it
            return False
        if not block.span or before.span == block.span:
            return False
        before.span = block.span
        return True

    def _shared_of(self, told: _Stored | _StoredArray) -> dict[str, object]:
        """The same fields are the same dictionary."""
        kind = told.kv_cache_spec_kind if isinstance(told, _Stored) else None
        window = told.kv_cache_spec_sliding_window if isinstance(told, _Stored) else None
        salt = told.cache_salt if isinstance(told, _Stored) else None
        values = (told.block_size, told.lora_id, told.lora_name, kind, window, salt)
        found = self._shared.get(values)
        if found is None:
            if len(self._shared) >= _SHARED_MAX:
                self._shared.clear()
            names = ("block_size", "lora_id", "lora_name", "kv_cache_spec_kind", "kv_cache_spec_sliding_window",
                     "cache_salt")  # fmt: skip
            found = {name: value for name, value in zip(names, values, strict=True) if value is not None}
            self._shared[values] = found
        return found

    def _bound(self) -> None:
        while len(self._blocks) > self._count_max or self.counts.size > self._size_max:
            _, gone = self._blocks.popitem(last=False)
            self.counts.size -= gone.cost
            self.counts.dropped += 1
        self.counts.blocks = len(self._blocks)


class _Engine:
    """The subscription of one engine. Numbers of its messages show what was lost: asked for again, where it answers."""

    def __init__(self, context: zmq.Context[Any], endpoint: str, replay: str | None, tokens: Tokens) -> None:
        self.name, self.tokens = endpoint, tokens
        self._replay_endpoint, self._context = replay, context
        self._next: int | None = None
        self._missing: tuple[int, int] | None = (0, 0) if replay is not None else None  # all it still has, at first
        self._asked: tuple[int, int] | None = None
        self._asked_s = float("-inf")
        self._replay: zmq.Socket[bytes] | None = None
        self._socket = connected(context, zmq.SUB, endpoint)
        self._socket.subscribe(b"")

    def turn(self, left: list[int]) -> list[tuple[int, int | None]]:
        """Take a part of what waits. left: messages and bytes that this turn may still take. Returns what was
        learned."""
        new: list[tuple[int, int | None]] = []
        self._ask(time.monotonic())
        if self._replay is not None:
            self._take(self._replay, new, left, self._replayed)
        self._take(self._socket, new, left, self._heard)
        return new

    def _take(
        self,
        socket: zmq.Socket[bytes],
        new: list[tuple[int, int | None]],
        left: list[int],
        take: Callable[[Sequence[bytes]], bytes],
    ) -> None:
        while min(left) > 0 and not socket.closed:
            try:
                parts = socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            left[0] -= 1
            left[1] -= sum(map(len, parts))
            payload = take(parts)
            if payload:
                new += self.tokens.learn(payload)

    def _heard(self, parts: Sequence[bytes]) -> bytes:
        if len(parts) != 3 or len(parts[1]) != 8:
            self.tokens.counts.senseless += 1
            return b""
        number = int.from_bytes(parts[1], "big")
        if self._next is None:
            self.tokens.counts.starts += 1
        elif number < self._next:
            self.tokens.counts.starts += 1  # the engine began anew
            self._miss(0, number)
        elif number > self._next:
            self._miss(self._next, number)
        self._next = number + 1
        return parts[2]

    def _miss(self, first: int, end: int) -> None:
        if self._replay_endpoint is None:
            self.tokens.counts.lost += end - first
        elif end > first or not end:
            self._missing = (min(first, self._missing[0]) if self._missing else first, end)

    def _ask(self, now: float) -> None:
        """Ask for what is missing, one question at a time."""
        if self._replay is not None and now > self._asked_s + _REPLAY_PATIENCE_S:
            self._replay.close(linger=0)
            self._replay, self._asked_s = None, now
            if self._asked is not None:
                self._miss(*self._asked)
        if self._missing is None or self._replay is not None or self._replay_endpoint is None:
            return
        if now < self._asked_s + _REPLAY_PATIENCE_S:
            return
        self._replay = connected(self._context, zmq.DEALER, self._replay_endpoint)
        self._replay.send_multipart((b"", self._missing[0].to_bytes(8, "big")))
        self._asked, self._missing, self._asked_s = self._missing, None, now
        self.tokens.counts.replays += 1

    def _replayed(self, parts: Sequence[bytes]) -> bytes:
        """An empty part, the topic (not of older engines), the number, and the batch."""
        assert self._replay is not None
        if len(parts) not in (3, 4) or len(parts[-2]) != 8:
            self.tokens.counts.senseless += 1
            return b""
        self._asked_s = time.monotonic()
        if int.from_bytes(parts[-2], "big") == _REPLAY_END:
            self._replay.close(linger=0)
            self._replay, self._asked_s = None, float("-inf")
            return b""
        return parts[-1]


class TokenFeed:
    """Tokens of several engines. endpoints: of each engine its events, and after a comma its replays, if it has any.
    size_max, count_max: of all engines together. span: blocks of a chunk of which no engine has told as of one.

    One thread. Nothing here waits. UsageError: an endpoint that cannot be had."""

    def __init__(self, endpoints: Sequence[str], *, size_max: int, count_max: int, span: int = 1) -> None:
        self._span = span
        self._context = zmq.Context()
        self._engines: list[_Engine] = []
        self._first = 0
        try:
            for endpoint in endpoints:
                events, _, replay = endpoint.partition(",")
                tokens = Tokens(size_max // len(endpoints), max(1, count_max // len(endpoints)))
                self._engines.append(_Engine(self._context, events.strip(), replay.strip() or None, tokens))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._context.destroy(linger=0)

    def turn(self) -> tuple[list[tuple[int, int | None]], bool]:
        """Take a bounded part of the engines' events. Returns hashes and groups that were learned, and whether more may
        wait."""
        new: list[tuple[int, int | None]] = []
        left = [TURN_MESSAGES, TURN_SIZE]
        for _ in self._engines:
            new += self._engines[self._first].turn(left)
            self._first = (self._first + 1) % len(self._engines)
            if min(left) <= 0:
                return new, True
        return new, False

    def chunk(self, hash_: Hash, group: int | None) -> Chunk | int:
        """The chunk that ends with this block. A hash: nothing can be sent until its block is known."""
        blocks: deque[_Block] = deque()
        at: Hash = hash_
        count, tokens = 1, 0
        while len(blocks) < count:
            block = self._find(short(at), group)
            if block is None:
                return short(at)
            if not blocks:
                count = block.span or self._span
            tokens += len(block.tokens) // 4
            if blocks and (tokens > _CHUNK_TOKENS_MAX or len(block.tokens) != len(blocks[0].tokens)):
                break
            blocks.appendleft(block)
            if block.parent is None:
                break
            at = block.parent
        last, first = blocks[-1], blocks[0]
        token_ids = array("I")
        for block in blocks:
            token_ids.frombytes(block.tokens)
        more = dict(last.shared)
        size = more.pop("block_size")
        assert isinstance(size, int)
        for index, name in enumerate(("extra_keys", "lookahead_token_ids")):
            if any(block.own and block.own[index] != _NIL for block in blocks):
                more[name] = [msgspec.Raw(block.own[index] if block.own else _NIL) for block in blocks]
        hashes: list[Hash] = [block.hash for block in blocks]
        hashes[-1] = hash_ if isinstance(hash_, bytes) else hashes[-1]
        return Chunk(hashes, first.parent, token_ids, size, more, guessed=not last.span)

    def _find(self, hash_: int, group: int | None) -> _Block | None:
        for engine in self._engines:
            if (found := engine.tokens.find(hash_, group)) is not None:
                return found
        return None

    def counts(self) -> Iterator[tuple[str, Counts]]:
        for engine in self._engines:
            yield engine.name, engine.tokens.counts


def _id(hash_: int, group: int | None) -> int:
    return hash_ << 33 | (0 if group is None else group + 1)


def connected(context: zmq.Context[Any], kind: int, endpoint: str) -> zmq.Socket[bytes]:
    """A socket with bounds for a peer's messages. UsageError: an endpoint that cannot be had."""
    socket: zmq.Socket[bytes] = context.socket(kind)
    socket.set_hwm(_HIGH_WATER)
    socket.setsockopt(zmq.MAXMSGSIZE, _MESSAGE_SIZE_MAX)
    # A host that goes without a word is noticed, and connected to again.
    for option, value in ((zmq.TCP_KEEPALIVE, 1), (zmq.TCP_KEEPALIVE_IDLE, 10), (zmq.TCP_KEEPALIVE_INTVL, 5),
                          (zmq.TCP_KEEPALIVE_CNT, 3), (zmq.RECONNECT_IVL_MAX, 5000), (zmq.LINGER, 0)):  # fmt: skip
        socket.setsockopt(option, value)
    try:
        socket.connect(endpoint)
    except zmq.ZMQError as error:
        raise UsageError(f"endpoint {endpoint}: {error.strerror or error}") from error
    return socket
