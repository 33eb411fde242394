"""Messages between the nodes of a pod: small, sealed with the pool's secret, and harmless if lost or doubled.

Bytes: 16 of keyed BLAKE2b over the rest, then JSON. Kinds, with their fields:

- `state`    of the sender: epoch, next, oldest, floor, beat; `ask` and `ask_start` if it answers one
- `repeat`   asks an owner: from number `from_` of start `of`; of 0 asks for its state alone
- `flush`    asks all owners to publish what they hold back; each answers with its state
- `lease`    asks an owner to keep blocks from eviction: keys, ms; it answers `held`, a character a key: 0 or 1
- `release`  ends the lease that the message `lease` asked for
- `touch`    tells an owner that its blocks were read
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

_SEAL_SIZE = 16
# A field is a number, a text, or keys in hexadecimal, one behind the other.
Value: TypeAlias = int | str

STATE, REPEAT, FLUSH, LEASE, HELD, RELEASE, TOUCH = "state", "repeat", "flush", "lease", "held", "release", "touch"
_KEY_SIZE = 16


@dataclass(frozen=True, slots=True)
class Message:
    """slot and start are the sender's; `number` counts its messages."""

    kind: str
    slot: int
    start: int
    number: int
    fields: Mapping[str, Value]

    def integer(self, name: str) -> int:
        """A required field. ValueError."""
        value = self.fields.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 64:
            raise ValueError(f"message {self.kind} of slot {self.slot}: field {name} is {value!r}")
        return value

    def text(self, name: str) -> str:
        """A field that must be there. ValueError."""
        value = self.fields.get(name)
        if not isinstance(value, str):
            raise ValueError(f"message {self.kind} of slot {self.slot}: field {name} is {value!r}")
        return value

    def keys(self) -> list[bytes]:
        """Keys of blocks, 16 bytes each. ValueError."""
        joined = bytes.fromhex(self.text("keys"))
        if len(joined) % _KEY_SIZE:
            raise ValueError(f"message {self.kind} of slot {self.slot}: keys of {len(joined)} bytes")
        return [joined[at : at + _KEY_SIZE] for at in range(0, len(joined), _KEY_SIZE)]


def join_keys(keys: list[bytes]) -> str:
    assert all(len(key) == _KEY_SIZE for key in keys)
    return b"".join(keys).hex()


def seal(message: Message, secret: bytes) -> bytes:
    head = {"kind": message.kind, "slot": message.slot, "start": message.start, "number": message.number}
    body = json.dumps({**head, **message.fields}, separators=(",", ":")).encode()
    return _digest(body, secret) + body


def unseal(data: bytes, secret: bytes) -> Message | None:
    """The message; None for one that is forged, damaged, or of another pool."""
    body = data[_SEAL_SIZE:]
    if data[:_SEAL_SIZE] != _digest(body, secret):
        return None
    try:
        found = json.loads(body)
        kind, slot, start, number = (found.pop(name) for name in ("kind", "slot", "start", "number"))
    except (ValueError, KeyError, AttributeError, TypeError):
        return None
    if not isinstance(kind, str) or not all(isinstance(value, int) for value in (slot, start, number)):
        return None
    return Message(kind, slot, start, number, found)


def _digest(body: bytes, secret: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=_SEAL_SIZE, key=secret, person=b"kvfs pod").digest()


@dataclass(frozen=True, slots=True)
class State:
    """An owner's word on its feed. epoch: of its mount, higher at each one. next: the number that comes. oldest: from
    where it can repeat. floor: records before it are on its flash; if below `oldest`, the ones between are nowhere yet.
    ask: the number of the ask that this answers, of the asker's ask_start; 0 if none."""

    epoch: int
    start: int
    next: int
    oldest: int
    floor: int
    beat: int
    ask: int = 0
    ask_start: int = 0

    def fields(self) -> dict[str, Value]:
        names = ("epoch", "next", "oldest", "floor", "beat", "ask", "ask_start")
        return {name: getattr(self, name) for name in names}

    @classmethod
    def of(cls, message: Message) -> State:
        """ValueError if a field is missing."""
        read = message.integer
        state = cls(
            read("epoch"), message.start, read("next"), read("oldest"), read("floor"), read("beat"),
            read("ask"), read("ask_start"),
        )  # fmt: skip
        if max(state.oldest, state.floor) > state.next:
            raise ValueError(f"state of slot {message.slot}: {state}")
        return state
