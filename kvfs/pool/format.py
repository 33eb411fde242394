"""Structures on devices except blocks: labels, beats, segment headers, summaries. Bytes in, values out, and back; no
I/O.

The layouts are the structs of native/include/kvfs_format.h; docs/format.md describes them byte by byte. Block headers
are the data plane's. Bytes from a device may hold anything, also under a valid checksum: every field is checked (I18).
A structure whose checksum fails is not there (None). A whole structure that no kvfs can have written raises
FormatError.
"""

from __future__ import annotations

import struct
import uuid as uuids
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

import xxhash

from kvfs.errors import ChecksumError, FormatError, OtherVersionError, PoolError
from kvfs.plane import Run
from kvfs.pool.config import LABEL_TEXT_OFFSET, PoolConfig, older_version, parse
from kvfs.pool.geometry import LABEL_SIZE
from kvfs.pool.pod import NODE_PAGES_OFFSET
from kvfs.types import COUNTER_BITS, EPOCH_MAX, PAGE_SIZE, SLOT_BITS, SegmentIndex

FORMAT_VERSION = 2
MAGIC_LABEL = 0x4C42414C5346564B
MAGIC_SEGMENT = 0x4D4745535346564B
MAGIC_EXTENT = 0x4E5458455346564B
MAGIC_SUMMARY = 0x4D4D55535346564B
MAGIC_BEAT = 0x544145425346564B
# A device's beat is the page behind the first label. In a pod each slot has such a page, one behind the other.
BEAT_OFFSET = NODE_PAGES_OFFSET
BEAT_ENDING = 1
# Of a pod's nodes. The node has gone, and its page stays for its epoch; the node is gone for good.
BEAT_LEFT = 2
BEAT_RETIRED = 4
SUMMARY_CLOSED = 1
SUMMARY_COMPRESSED = 2

_LABEL = struct.Struct("<QIIQ16s16sQIIQQQIIQQ")
_SEGMENT = struct.Struct("<QIIQQQ16sIIQQII")
_MEMBER = struct.Struct("<II")
_SUMMARY = struct.Struct("<QIIQQQQ16sIIQII")
_EXTENT_HEADER = struct.Struct("<QIIQQQQIIII")
_BEAT = struct.Struct("<QIIQQqQ16s16s16s16s16sQQIIII16sQ")
_BEAT_HOST, _BEAT_POOL, _BEAT_USE = (256, 64), (512, 1024), (1536, 512)
_CHECKSUM = struct.Struct("<Q")
_CHECKSUM_OFFSET = 16
assert _LABEL.size == 120 and _SEGMENT.size == 88 and _SUMMARY.size == 88 and _BEAT.size == 184


class Stream(IntEnum):
    NEW = 0
    CARRIED = 1
    CLIENT = 2  # written by native clients themselves
    SLAB = 3  # whole segments, overwritten in place; never evicted as long as they are


def _with_checksum(data: bytearray, seed: int) -> bytes:
    _CHECKSUM.pack_into(data, _CHECKSUM_OFFSET, xxhash.xxh3_64_intdigest(data, seed))
    return bytes(data)


def _sum_without_field(data: bytes | memoryview, seed: int) -> int:
    """The checksum of data with its own checksum field taken as zero."""
    state = xxhash.xxh3_64(seed=seed)
    state.update(data[:_CHECKSUM_OFFSET])
    state.update(bytes(8))
    state.update(data[_CHECKSUM_OFFSET + 8 :])
    return state.intdigest()


# ---- extent headers ----


def pack_extent_header(config: PoolConfig, epoch: int, run: Run) -> bytes:
    """One page that says: no block begins here, the next header is run.page_count pages on."""
    page = bytearray(PAGE_SIZE)
    _EXTENT_HEADER.pack_into(
        page, 0, MAGIC_EXTENT, FORMAT_VERSION, 0, 0, 0, run.generation, epoch, run.segment, run.page, run.page_count, 0
    )
    return _with_checksum(page, config.secret)


# ---- labels ----


@dataclass(frozen=True, slots=True)
class Label:
    pool_uuid: uuids.UUID
    device_uuid: uuids.UUID
    mount_epoch: int
    device_index: int
    device_size: int
    text: str
    version: int = FORMAT_VERSION

    def config(self, origin: str) -> PoolConfig:
        """The pool as this label describes it."""
        return parse(self.text, origin, self.version)


def pack_label(config: PoolConfig, device_index: int, mount_epoch: int) -> bytes:
    device, geometry = config.devices[device_index], config.geometry
    text = config.dump().encode()
    if len(text) > LABEL_SIZE - LABEL_TEXT_OFFSET:
        raise PoolError(
            f"pool.toml has {len(text)} bytes; a label holds {LABEL_SIZE - LABEL_TEXT_OFFSET}: use shorter paths"
        )
    data = bytearray(LABEL_SIZE)
    _LABEL.pack_into(
        data, 0, MAGIC_LABEL, FORMAT_VERSION, 0, 0, config.uuid.bytes, device.uuid.bytes, mount_epoch, device_index,
        len(config.devices), device.size, geometry.zone_size, geometry.stripe_unit, geometry.stripe_width,
        device.zone_count, device.zones_offset, len(text),
    )  # fmt: skip
    data[LABEL_TEXT_OFFSET : LABEL_TEXT_OFFSET + len(text)] = text
    return _with_checksum(data, 0)


_LABEL_FIELDS = ("pool_uuid", "device_uuid", "device_count", "device_size", "zone_size", "stripe_unit", "stripe_width",
                 "zone_count", "zones_offset")  # fmt: skip


def _shown(value: bytes | int) -> str:
    return str(uuids.UUID(bytes=value)) if isinstance(value, bytes) else str(value)


def holds_label(data: bytes) -> bool:
    """Whether there is a label, valid or not."""
    return len(data) >= 8 and int.from_bytes(data[:8], "little") == MAGIC_LABEL


def unpack_label(data: bytes, where: str, oldest: int = FORMAT_VERSION) -> Label:
    """FormatError if there is no valid label; OtherVersionError if it is of a newer format, or one before `oldest`."""
    if len(data) < LABEL_SIZE or not holds_label(data):
        raise FormatError(f"{where}: no kvfs label")
    (
        _, version, _, checksum, pool_uuid, device_uuid, epoch, index, count, size, zone_size, stripe_unit,
        stripe_width, zone_count, zones_offset, text_size,
    ) = _LABEL.unpack_from(data)  # fmt: skip
    actual = _sum_without_field(data[:LABEL_SIZE], 0)
    if version > FORMAT_VERSION:
        error = OtherVersionError(
            f"{where}: the label's format version is {version}; this kvfs knows up to {FORMAT_VERSION}"
        )
        error.proven = actual == checksum
        raise error
    if actual != checksum:
        raise ChecksumError(f"{where}: label checksum 0x{checksum:016x}, expected 0x{actual:016x}")
    if 0 < version < oldest:
        raise OtherVersionError(f"{where}: {older_version(version)}")
    if version < 1 or text_size > LABEL_SIZE - LABEL_TEXT_OFFSET:
        raise FormatError(f"{where}: label of version {version} with {text_size} bytes of text")
    try:
        text = data[LABEL_TEXT_OFFSET : LABEL_TEXT_OFFSET + text_size].decode()
    except UnicodeDecodeError as error:
        raise FormatError(f"{where}: the label's text is not UTF-8") from error
    # The next mount needs a number above this one.
    if epoch >= EPOCH_MAX:
        raise FormatError(f"{where}: label of mount {epoch}; the last possible is {EPOCH_MAX - 1}")
    try:
        config = parse(text, where, version)
    except OtherVersionError:
        raise
    except PoolError as error:
        raise FormatError(str(error)) from error
    if index >= len(config.devices):
        raise FormatError(f"{where}: label of device {index} of {len(config.devices)}")
    device, geometry = config.devices[index], config.geometry
    found = (pool_uuid, device_uuid, count, size, zone_size, stripe_unit, stripe_width, zone_count, zones_offset)
    expected = (
        config.uuid.bytes, device.uuid.bytes, len(config.devices), device.size, geometry.zone_size,
        geometry.stripe_unit, geometry.stripe_width, device.zone_count, device.zones_offset,
    )  # fmt: skip
    for i, name in enumerate(_LABEL_FIELDS):
        if found[i] != expected[i]:
            raise FormatError(f"{where}: {name} is {_shown(found[i])}, but its text says {_shown(expected[i])}")
    return Label(uuids.UUID(bytes=pool_uuid), uuids.UUID(bytes=device_uuid), epoch, index, size, text, version)


# ---- beats ----

NO_NODE = uuids.UUID(int=0)


@dataclass(frozen=True, slots=True)
class Beat:
    """The user of a device at the time of writing. `owner` names one start of one process.

    In a pod it is a node's page, and `slot` and `node` name the node. `mounted` is the last of the node's mounts in
    which the device took part.
    """

    owner: uuids.UUID
    epoch: int
    number: int = 0
    written_ns: int = 0
    flags: int = 0
    machine: bytes = bytes(16)
    boot: bytes = bytes(16)
    started: int = 0  # of the process, in clock ticks since its machine's boot
    namespace: int = 0  # of its pid
    pid: int = 0
    interval_ms: int = 0
    host: str = ""
    pool: str = ""
    use: str = ""
    slot: int = 0
    node: uuids.UUID = NO_NODE
    mounted: int = 0

    @property
    def in_use(self) -> bool:
        """Whether its writer meant to go on."""
        return not self.flags & (BEAT_LEFT | BEAT_RETIRED)


def beat_offset(slot: int) -> int:
    return BEAT_OFFSET + slot * PAGE_SIZE


def pack_beat(secret: int, pool: uuids.UUID, device: uuids.UUID, beat: Beat) -> bytes:
    data = bytearray(PAGE_SIZE)
    _BEAT.pack_into(
        data, 0, MAGIC_BEAT, FORMAT_VERSION, beat.flags, 0, beat.number, beat.written_ns, beat.epoch, pool.bytes,
        device.bytes, beat.owner.bytes, beat.machine, beat.boot, beat.started, beat.namespace, beat.pid, beat.slot,
        beat.interval_ms, 0, beat.node.bytes, beat.mounted,
    )  # fmt: skip
    for (offset, size), text in ((_BEAT_HOST, beat.host), (_BEAT_POOL, beat.pool), (_BEAT_USE, beat.use)):
        encoded = text.encode(errors="surrogateescape")[: size - 1]
        data[offset : offset + len(encoded)] = encoded
    return _with_checksum(data, secret)


def holds_beat(page: bytes) -> bool:
    """Whether the page has a beat, of any pool, valid or not."""
    return int.from_bytes(page[:8], "little") == MAGIC_BEAT


def unpack_beat(secret: int, pool: uuids.UUID, device: uuids.UUID, page: bytes, slot: int = 0) -> Beat | None:
    """The beat, or None if the page holds none of this device and slot: never written, cleared, damaged, of another
    pool. Nor is one whose epoch no kvfs gives."""
    (
        magic, version, flags, checksum, number, written_ns, epoch, pool_uuid, device_uuid, owner, machine, boot,
        started, namespace, pid, its_slot, interval_ms, _, node, mounted,
    ) = _BEAT.unpack_from(page)  # fmt: skip
    if magic != MAGIC_BEAT or version < 1 or pool_uuid != pool.bytes or device_uuid != device.bytes:
        return None
    if checksum != _sum_without_field(page[:PAGE_SIZE], secret):
        return None
    if its_slot != slot or epoch > EPOCH_MAX or mounted > epoch:
        return None
    host, path, use = (
        page[offset : offset + size].split(b"\0", 1)[0].decode(errors="replace")
        for offset, size in (_BEAT_HOST, _BEAT_POOL, _BEAT_USE)
    )
    return Beat(
        uuids.UUID(bytes=owner), epoch, number, written_ns, flags, machine, boot, started, namespace, pid, interval_ms,
        host, path, use, its_slot, uuids.UUID(bytes=node), mounted,
    )  # fmt: skip


# ---- segment headers ----


@dataclass(frozen=True, slots=True)
class SegmentHeader:
    generation: int
    owner_epoch: int
    segment: SegmentIndex
    stream: int
    members: tuple[tuple[int, int], ...]
    # Of the node that owns the segment; 0 where a pool has one node.
    slot: int = 0


def pack_segment_header(config: PoolConfig, header: SegmentHeader) -> bytes:
    geometry = config.geometry
    data = bytearray(PAGE_SIZE)
    _SEGMENT.pack_into(
        data, 0, MAGIC_SEGMENT, FORMAT_VERSION, 0, 0, header.generation, header.owner_epoch, config.uuid.bytes,
        header.segment, geometry.stripe_width, geometry.zone_size, geometry.stripe_unit, header.stream, header.slot,
    )  # fmt: skip
    for i, (device, zone) in enumerate(header.members):
        _MEMBER.pack_into(data, _SEGMENT.size + 8 * i, device, zone)
    return _with_checksum(data, config.secret)


def unpack_segment_header(
    config: PoolConfig, segment: SegmentIndex, members: Sequence[tuple[int, int]], data: bytes | memoryview
) -> SegmentHeader | None:
    """The header, or None if the page holds none of this pool and segment: never written, torn, or damaged.
    FormatError if it is whole, and no kvfs can have written it."""
    (
        magic, version, _, checksum, generation, epoch, pool_uuid, index, width, zone_size, stripe_unit, stream, slot,
    ) = _SEGMENT.unpack_from(data)  # fmt: skip
    geometry = config.geometry
    if magic != MAGIC_SEGMENT or version != FORMAT_VERSION or pool_uuid != config.uuid.bytes or index != segment:
        return None
    if (width, zone_size, stripe_unit) != (geometry.stripe_width, geometry.zone_size, geometry.stripe_unit):
        return None
    if checksum != _sum_without_field(data[:PAGE_SIZE], config.secret):
        return None
    found = tuple(_MEMBER.unpack_from(data, _SEGMENT.size + 8 * i) for i in range(width))
    if found != tuple(members):
        return None
    of_mount = generation and epoch <= EPOCH_MAX and generation >> COUNTER_BITS == epoch
    if stream >= len(Stream) or slot >> SLOT_BITS or not of_mount:
        raise FormatError(
            f"segment {segment}: its header says stream {stream}, generation {generation:#x}, mount {epoch}, slot "
            f"{slot}: no kvfs wrote that"
        )
    return SegmentHeader(generation, epoch, segment, stream, found, slot)


# ---- summaries ----


@dataclass(frozen=True, slots=True)
class Summary:
    generation: int
    sequence: int
    segment: SegmentIndex
    entry_count: int
    covered_page: int
    closed: bool
    entries: bytes
    compressed: bool = False  # the entries are one zlib stream

    def with_compressed(self, entries: bytes) -> Summary:
        return replace(self, entries=entries, compressed=True)

    def with_nothing(self) -> Summary:
        """One that says: the block headers alone describe this segment."""
        return replace(self, entries=b"", entry_count=0, covered_page=1, compressed=False)

    def expanded(self, limit: int) -> Summary | None:
        """Uncompressed; None if that is not possible within `limit` bytes."""
        stream = zlib.decompressobj()
        try:
            entries = stream.decompress(self.entries, limit)
        except zlib.error:
            return None
        return replace(self, entries=entries, compressed=False) if stream.eof else None


def pack_summary(config: PoolConfig, summary: Summary, owner_epoch: int) -> bytes:
    """A summary's bytes, padded to whole pages."""
    size = _SUMMARY.size + len(summary.entries)
    data = bytearray(_SUMMARY.size)
    flags = (SUMMARY_CLOSED if summary.closed else 0) | (SUMMARY_COMPRESSED if summary.compressed else 0)
    _SUMMARY.pack_into(
        data, 0, MAGIC_SUMMARY, FORMAT_VERSION, flags, 0, summary.generation,
        summary.sequence, owner_epoch, config.uuid.bytes, summary.segment, summary.entry_count, len(summary.entries),
        summary.covered_page, 0,
    )  # fmt: skip
    state = xxhash.xxh3_64(data, seed=config.secret)
    state.update(summary.entries)
    _CHECKSUM.pack_into(data, _CHECKSUM_OFFSET, state.intdigest())
    return b"".join((data, summary.entries, bytes(-size % PAGE_SIZE)))


def summary_size(first_page: bytes | memoryview) -> int:
    """Bytes, header included, that the summary beginning here claims to have; 0 if none begins here."""
    fields = _SUMMARY.unpack_from(first_page)
    if fields[0] != MAGIC_SUMMARY or fields[1] != FORMAT_VERSION:
        return 0
    return _SUMMARY.size + int(fields[10])


def summary_age(first_page: bytes | memoryview) -> tuple[int, int]:
    """(generation, sequence) that the summary beginning here claims: a later one is greater. (0, 0) if none begins
    here. Unchecked: its checksum is over all of it."""
    fields = _SUMMARY.unpack_from(first_page)
    if fields[0] != MAGIC_SUMMARY or fields[1] != FORMAT_VERSION:
        return 0, 0
    return int(fields[4]), int(fields[5])


def unpack_summary(config: PoolConfig, segment: SegmentIndex, data: bytes) -> Summary | None:
    """The summary, its entries unchecked, or None if there is no valid one of this pool and segment. FormatError if it
    is whole, and no kvfs can have written it."""
    size = summary_size(data)
    if not size or size > len(data):
        return None
    (
        _, _, flags, checksum, generation, sequence, epoch, pool_uuid, index, count, _, covered, _,
    ) = _SUMMARY.unpack_from(data)  # fmt: skip
    view = memoryview(data)[:size]
    if pool_uuid != config.uuid.bytes or index != segment or _sum_without_field(view, config.secret) != checksum:
        return None
    end = config.geometry.end_page
    if (
        not 1 <= covered <= end or sequence >> COUNTER_BITS != epoch or not generation
        or generation >> COUNTER_BITS > epoch
    ):  # fmt: skip
        raise FormatError(
            f"segment {segment}: its summary says generation {generation:#x}, sequence {sequence:#x}, mount {epoch}, "
            f"covered page {covered} of {end}: no kvfs wrote that"
        )
    entries = data[_SUMMARY.size : size]
    closed, compressed = bool(flags & SUMMARY_CLOSED), bool(flags & SUMMARY_COMPRESSED)
    return Summary(generation, sequence, segment, count, covered, closed, entries, compressed)


# ---- the index's meta values ----

META_UUID, META_CLEAN, META_EPOCH, META_VERSION = b"uuid", b"clean", b"epoch", b"version"
META_IN_FLIGHT, META_OPENING = b"in_flight", b"opening"
META_NUMBER = struct.Struct("<Q")
# Of which journal of names the index has what: its id, a sequence number, the mount epoch.
META_JOURNAL, META_JOURNAL_VALUE = b"journal", struct.Struct("<QQQ")
