"""The messages of CSI's Identity and Node services that are used here, and their protobuf encoding.

Fields and numbers are as in csi.proto v1.12 (container-storage-interface/spec). Fields that are not named here are
skipped, as protobuf asks. Five requests of strings, maps and one nesting need neither a generator nor its runtime.
"""

from __future__ import annotations

# The fields' makers give each dataclass a field of its own.
# ruff: noqa: RUF009
from dataclasses import dataclass, field, fields
from enum import IntEnum
from typing import Any, ClassVar, Self

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_VARINT_BYTES_MOST = 10
_SIGN = 1 << 63


class EncodingError(ValueError):
    """Bytes that are no message of this kind."""


def _varint(number: int) -> bytes:
    number &= 2 * _SIGN - 1  # a negative int64 is ten bytes of two's complement
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    found.append(number)
    return bytes(found)


def _take_varint(data: bytes, at: int) -> tuple[int, int]:
    number = 0
    for index in range(_VARINT_BYTES_MOST):
        if at + index >= len(data):
            raise EncodingError(f"a number ends beyond the message of {len(data)} bytes")
        byte = data[at + index]
        number |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            number &= 2 * _SIGN - 1
            return number - 2 * _SIGN if number >= _SIGN else number, at + index + 1
    raise EncodingError(f"the number at byte {at} has more than {_VARINT_BYTES_MOST} bytes")


def _taken(data: bytes) -> list[tuple[int, int | bytes]]:
    """Each field of a message: its number, and its number or bytes as value."""
    found: list[tuple[int, int | bytes]] = []
    at = 0
    while at < len(data):
        key, at = _take_varint(data, at)
        number, kind = key >> 3, key & 7
        if number < 1:
            raise EncodingError(f"field {number} before byte {at}: fields count from 1")
        if kind == _VARINT:
            value, at = _take_varint(data, at)
            found.append((number, value))
            continue
        if kind == _BYTES:
            size, at = _take_varint(data, at)
        elif kind in (_FIXED32, _FIXED64):
            size = 4 if kind == _FIXED32 else 8
        else:
            raise EncodingError(f"field {number} has the wire type {kind}, which proto3 does not have")
        if not 0 <= size <= len(data) - at:
            raise EncodingError(f"field {number} has {size} bytes, the message {len(data) - at} more")
        found.append((number, data[at : at + size]))
        at += size
    return found


def _text(value: int | bytes, name: str) -> str:
    try:
        return _bytes(value, name).decode()
    except UnicodeDecodeError as error:
        raise EncodingError(f"{name} is no UTF-8: {error}") from error


def _bytes(value: int | bytes, name: str) -> bytes:
    if isinstance(value, int):
        raise EncodingError(f"{name} is a number, where bytes belong")
    return value


class Message:
    """A dataclass whose fields name their protobuf number and kind in their metadata."""

    def encode(self) -> bytes:
        """This message's bytes. Fields with their default are left out, as proto3 has it."""
        found = bytearray()
        for part in fields(self):  # type: ignore[arg-type]
            number, value = part.metadata["number"], getattr(self, part.name)
            if isinstance(value, dict):
                items = [_Entry(key, word).encode() for key, word in value.items()]
            elif isinstance(value, list):
                items = [item.encode() for item in value]
            elif isinstance(value, Message):
                items = [value.encode()]
            elif isinstance(value, str):
                items = [value.encode()] if value else []
            else:
                if value:
                    found += _varint(number << 3 | _VARINT) + _varint(int(value))
                continue
            for item in items:
                found += _varint(number << 3 | _BYTES) + _varint(len(item)) + item
        return bytes(found)

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """A message of these bytes; raises EncodingError. Lists are of strings: no request has another."""
        message = cls()
        known = {part.metadata["number"]: part for part in fields(message)}  # type: ignore[arg-type]
        for number, value in _taken(data):
            if (part := known.get(number)) is None:
                continue
            name, kind = f"{cls.__name__}.{part.name}", part.metadata["kind"]
            if kind is str:
                setattr(message, part.name, _text(value, name))
            elif kind is dict:
                entry = _Entry.decode(_bytes(value, name))
                getattr(message, part.name)[entry.key] = entry.value
            elif kind is list:
                getattr(message, part.name).append(_text(value, name))
            elif kind in (int, bool):
                if isinstance(value, bytes):
                    raise EncodingError(f"{name} is bytes, where a number belongs")
                setattr(message, part.name, kind(value))
            else:
                setattr(message, part.name, kind.decode(_bytes(value, name)))
        return message


def _text_field(number: int) -> Any:
    return field(default="", metadata={"number": number, "kind": str})


def _number_field(number: int) -> Any:
    return field(default=0, metadata={"number": number, "kind": int})


def _flag_field(number: int) -> Any:
    return field(default=False, metadata={"number": number, "kind": bool})


def _map_field(number: int) -> Any:
    return field(default_factory=dict, metadata={"number": number, "kind": dict})


def _list_field(number: int) -> Any:
    return field(default_factory=list, metadata={"number": number, "kind": list})


def _message_field(number: int, kind: type[Message]) -> Any:
    return field(default=None, metadata={"number": number, "kind": kind})


@dataclass
class _Entry(Message):
    """Of a map: in protobuf a repeated message of two fields."""

    key: str = _text_field(1)
    value: str = _text_field(2)


@dataclass
class Empty(Message):
    """Of requests and replies without fields, and of a block volume."""


@dataclass
class Flag(Message):
    """google.protobuf.BoolValue."""

    value: bool = _flag_field(1)


@dataclass
class PluginInfo(Message):
    name: str = _text_field(1)
    vendor_version: str = _text_field(2)


@dataclass
class Kind(Message):
    """PluginCapability.Service and NodeServiceCapability.RPC: one enumeration."""

    type: int = _number_field(1)


@dataclass
class Capability(Message):
    """PluginCapability with a service, or NodeServiceCapability with an RPC: both are field 1."""

    kind: Kind | None = _message_field(1, Kind)


@dataclass
class Capabilities(Message):
    """GetPluginCapabilitiesResponse and NodeGetCapabilitiesResponse."""

    ACCESSIBILITY_CONSTRAINTS: ClassVar[int] = 2  # of the plugin
    GET_VOLUME_STATS: ClassVar[int] = 2  # of the node
    VOLUME_CONDITION: ClassVar[int] = 4

    capabilities: list[Capability] = _list_field(1)

    @classmethod
    def of(cls, *types: int) -> Self:
        return cls([Capability(Kind(number)) for number in types])


@dataclass
class ProbeReply(Message):
    ready: Flag | None = _message_field(1, Flag)


@dataclass
class Topology(Message):
    segments: dict[str, str] = _map_field(1)


@dataclass
class NodeInfo(Message):
    node_id: str = _text_field(1)
    max_volumes_per_node: int = _number_field(2)
    accessible_topology: Topology | None = _message_field(3, Topology)


class AccessMode(IntEnum):
    SINGLE_NODE_WRITER = 1
    SINGLE_NODE_READER_ONLY = 2
    MULTI_NODE_READER_ONLY = 3
    MULTI_NODE_SINGLE_WRITER = 4
    MULTI_NODE_MULTI_WRITER = 5
    SINGLE_NODE_SINGLE_WRITER = 6
    SINGLE_NODE_MULTI_WRITER = 7


@dataclass
class Mode(Message):
    mode: int = _number_field(1)


@dataclass
class MountVolume(Message):
    fs_type: str = _text_field(1)
    mount_flags: list[str] = _list_field(2)


@dataclass
class VolumeCapability(Message):
    block: Empty | None = _message_field(1, Empty)
    mount: MountVolume | None = _message_field(2, MountVolume)
    access_mode: Mode | None = _message_field(3, Mode)


@dataclass
class PublishRequest(Message):
    volume_id: str = _text_field(1)
    target_path: str = _text_field(4)
    volume_capability: VolumeCapability | None = _message_field(5, VolumeCapability)
    readonly: bool = _flag_field(6)
    volume_context: dict[str, str] = _map_field(8)


@dataclass
class UnpublishRequest(Message):
    volume_id: str = _text_field(1)
    target_path: str = _text_field(2)


@dataclass
class StatsRequest(Message):
    volume_id: str = _text_field(1)
    volume_path: str = _text_field(2)


@dataclass
class Usage(Message):
    BYTES: ClassVar[int] = 1
    INODES: ClassVar[int] = 2

    available: int = _number_field(1)
    total: int = _number_field(2)
    used: int = _number_field(3)
    unit: int = _number_field(4)


@dataclass
class Condition(Message):
    abnormal: bool = _flag_field(1)
    message: str = _text_field(2)


@dataclass
class StatsReply(Message):
    usage: list[Usage] = _list_field(1)
    volume_condition: Condition | None = _message_field(2, Condition)
