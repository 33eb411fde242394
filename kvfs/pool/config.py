"""pool.toml: what a pool is made of. Parsing, dumping and comparing it.

Knows nothing of devices themselves. docs/format.md describes the file; its text is also part of every label.
"""

from __future__ import annotations

import datetime
import re
import secrets
import tomllib
import uuid as uuids
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from kvfs.errors import OtherVersionError, PoolError
from kvfs.pool.geometry import (
    DEVICES_MAX,
    LABEL_SIZE,
    STRIPE_UNIT_MIN,
    STRIPE_WIDTH_MAX,
    ZONES_OFFSET,
    Geometry,
    check_geometry,
    layout,
    zones_on,
)
from kvfs.pool.pod import (
    ENGINES_MAX,
    LOOKUP_WAIT_MAX_MS,
    LOT_MAX,
    MAP_SIZE_MAX,
    MAP_SIZE_MIN,
    NODES_MAX,
    POD_SEGMENT_PAGES_MAX,
    PodConfig,
    check_pod,
    same_but,
    zones_offset,
)
from kvfs.types import NAME_MAX, PAGE_SIZE
from kvfs.units import counted

CONFIG_NAME = "pool.toml"
SLAB_QUOTA = 0.25
USER_SHARE = 0.25
LOG_LEVEL = "info"
LOG_LEVELS = ("debug", "info", "warning", "error")
CONFIG_VERSION = 2
LABEL_TEXT_OFFSET = 4096
GROUPS_MAX = 64
GROUP_ENDINGS_MAX = 16


@dataclass(frozen=True, slots=True)
class DeviceConfig:
    index: int
    uuid: uuids.UUID
    path: str
    size: int
    zone_count: int
    zones_offset: int
    # Devices that were added together have one number. 0: the devices that the pool was made of.
    group: int = 0
    # Taken out for good; its entry stays, so that the others' segments keep their numbers.
    removed: bool = False


@dataclass(frozen=True, slots=True)
class GroupRule:
    """Files that are evicted together: all in one directory whose names differ only in these endings, or all in a
    directory whose path fits the pattern. One of the two is set."""

    endings: tuple[str, ...] = ()
    directory: str = ""


@dataclass(frozen=True, slots=True)
class PoolConfig:
    uuid: uuids.UUID
    secret: int
    created: str
    geometry: Geometry
    devices: tuple[DeviceConfig, ...]
    # Rises when devices are added, removed or replaced. Of two descriptions of a pool the one with the higher revision
    # is true.
    revision: int = 0
    groups: tuple[GroupRule, ...] = ()
    # The part of the pool's segments that slabs may have.
    slab_quota: float = SLAB_QUOTA
    # The part of the pool that one user may hold: open, pinned, reserved and in slabs.
    user_share: float = USER_SHARE
    # The nodes that share the pool, if one node does not have it alone.
    pod: PodConfig | None = None
    log_level: str = LOG_LEVEL

    @property
    def segment_count(self) -> int:
        return len(self._members)

    def segments_of(self, slot: int) -> Sequence[int]:
        """The segments that the node of this slot writes."""
        count = self.segment_count
        return range(count) if self.pod is None else self.pod.segments_of(slot, count)

    def owner(self, segment: int) -> int:
        """The slot of the node that writes a segment."""
        return 0 if self.pod is None else self.pod.owner(segment)

    def members(self) -> list[tuple[tuple[int, int], ...]]:
        """The members, (device, zone), of every segment. Segments of devices that were added follow on the others and
        lie on their own devices."""
        return list(self._members)

    @property
    def _members(self) -> Sequence[tuple[tuple[int, int], ...]]:
        shape = tuple((device.index, device.zone_count, device.group) for device in self.devices)
        return _members(shape, self.geometry.stripe_width)

    def dump(self) -> str:
        """pool.toml's text."""
        lines = [
            "# A kvfs pool. Made by `kvfs format`; every device's label holds a copy.",
            f"version = {CONFIG_VERSION}",
            f'uuid = "{self.uuid}"',
            f'secret = "{self.secret:016x}"',
            f'created = "{self.created}"',
            *([f"revision = {self.revision}"] if self.revision else []),
            *([f"slab_quota = {self.slab_quota}"] if self.slab_quota != SLAB_QUOTA else []),
            *([f"user_share = {self.user_share}"] if self.user_share != USER_SHARE else []),
            *([f'log_level = "{self.log_level}"'] if self.log_level != LOG_LEVEL else []),
            "",
            "[geometry]",
            f"stripe_width = {self.geometry.stripe_width}",
            f"stripe_unit = {self.geometry.stripe_unit}",
            f"zone_size = {self.geometry.zone_size}",
            *([] if self.pod is None else _pod_lines(self.pod)),
        ]
        for device in self.devices:
            lines += [
                "",
                "[[device]]",
                f"index = {device.index}",
                f'uuid = "{device.uuid}"',
                f"path = {_quoted(device.path)}",
                f"size = {device.size}",
                f"zone_count = {device.zone_count}",
                f"zones_offset = {device.zones_offset}",
                *([f"group = {device.group}"] if device.group else []),
                *(["removed = true"] if device.removed else []),
            ]
        for rule in self.groups:
            endings = ", ".join(_quoted(ending) for ending in rule.endings)
            lines += [
                "",
                "[[group]]",
                f"directory = {_quoted(rule.directory)}" if rule.directory else f"suffixes = [{endings}]",
            ]
        return "\n".join(lines) + "\n"


@lru_cache(maxsize=2)
def _members(shape: tuple[tuple[int, int, int], ...], stripe_width: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    """The members of every segment over devices of (index, zone count, group). Half a million take some seconds."""
    found: list[tuple[tuple[int, int], ...]] = []
    for group in sorted({group for _, _, group in shape}):
        here = [(index, zones) for index, zones, its_group in shape if its_group == group]
        for segment in layout([zones for _, zones in here], stripe_width):
            found.append(tuple((here[device][0], zone) for device, zone in segment))
    return tuple(found)


def _pod_lines(pod: PodConfig) -> list[str]:
    return [
        "",
        "[pod]",
        f"engine = [{', '.join(map(_quoted, pod.engine))}]",
        f"nodes = {pod.nodes}",
        f"lot = {pod.lot}",
        *([f"map_size = {pod.map_size}"] if pod.map_size else []),
        *([f"lookup_wait_ms = {pod.lookup_wait_ms}"] if pod.lookup_wait_ms else []),
        *([f"password_file = {_quoted(pod.password_file)}"] if pod.password_file else []),
        *([f"retired = {list(pod.retired)}"] if pod.retired else []),
    ]


def _quoted(text: str) -> str:
    """A TOML basic string."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in escaped) + '"'


def parse(text: str, origin: str, oldest: int = CONFIG_VERSION) -> PoolConfig:
    """The configuration in pool.toml's text. PoolError names `origin` and the key; OtherVersionError the version, if it
    is newer than this kvfs or older than `oldest`."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise PoolError(f"{origin}: not valid TOML: {error}") from error
    reader = _Reader(origin, "", document)
    version = reader.integer("version", 1, 1 << 31)
    if version > CONFIG_VERSION:
        raise OtherVersionError(
            f"{origin}: version is {version}; this kvfs knows up to {CONFIG_VERSION}, a newer one made it"
        )
    if version < oldest:
        raise OtherVersionError(f"{origin}: {older_version(version)}")
    geometry_reader = reader.table("geometry")
    geometry = Geometry(
        stripe_width=geometry_reader.integer("stripe_width", 1, STRIPE_WIDTH_MAX),
        stripe_unit=geometry_reader.integer("stripe_unit", STRIPE_UNIT_MIN, 1 << 40),
        zone_size=geometry_reader.integer("zone_size", STRIPE_UNIT_MIN, 1 << 50),
    )
    geometry_reader.finish()
    devices = []
    for index, device in enumerate(reader.tables("device")):
        devices.append(
            DeviceConfig(
                index=device.integer("index", index, index),
                uuid=device.uuid("uuid"),
                path=device.text("path"),
                size=device.integer("size", PAGE_SIZE, 1 << 62),
                zone_count=device.integer("zone_count", 1, 1 << 31),
                zones_offset=device.integer("zones_offset", LABEL_SIZE, 1 << 40),
                group=device.integer("group", 1, DEVICES_MAX) if device.has("group") else 0,
                removed=device.has("removed") and device.boolean("removed"),
            )
        )
        device.finish()
    config = PoolConfig(
        reader.uuid("uuid"), reader.hexadecimal("secret"), reader.text("created"), geometry, tuple(devices),
        reader.integer("revision", 1, 1 << 31) if reader.has("revision") else 0,
        tuple(_group_rule(group) for group in reader.tables("group", GROUPS_MAX)) if reader.has("group") else (),
        reader.fraction("slab_quota") if reader.has("slab_quota") else SLAB_QUOTA,
        reader.fraction("user_share") if reader.has("user_share") else USER_SHARE,
        _pod(reader.table("pod")) if reader.has("pod") else None,
        reader.one_of("log_level", LOG_LEVELS) if reader.has("log_level") else LOG_LEVEL,
    )  # fmt: skip
    reader.finish()
    _check(config, origin)
    return config


def _pod(reader: _Reader) -> PodConfig:
    pod = PodConfig(
        engine=reader.texts("engine", ENGINES_MAX),
        nodes=reader.integer("nodes", 1, NODES_MAX),
        lot=reader.integer("lot", 1, LOT_MAX),
        map_size=reader.integer("map_size", MAP_SIZE_MIN, MAP_SIZE_MAX) if reader.has("map_size") else 0,
        lookup_wait_ms=reader.integer("lookup_wait_ms", 0, LOOKUP_WAIT_MAX_MS) if reader.has("lookup_wait_ms") else 0,
        password_file=reader.text("password_file") if reader.has("password_file") else "",
        retired=reader.integers("retired", NODES_MAX) if reader.has("retired") else (),
    )
    reader.finish()
    return pod


def older_version(version: int) -> str:
    """The words for a pool that an older kvfs made."""
    return (
        f"version is {version}: a pool of format {version}, and this kvfs reads format {CONFIG_VERSION}: read what is "
        "needed with the kvfs that made it, or make the pool anew with `kvfs format --force`"
    )


def _group_rule(reader: _Reader) -> GroupRule:
    if reader.has("suffixes") == reader.has("directory"):
        raise reader.error("", "one of suffixes and directory is needed")
    rule = (
        GroupRule(endings=reader.texts("suffixes", GROUP_ENDINGS_MAX)) if reader.has("suffixes")
        else GroupRule(directory=reader.text("directory"))
    )  # fmt: skip
    reader.finish()
    if rule.directory:
        parts = rule.directory.split("/")
        if "" in parts or "." in parts or ".." in parts or "**" in parts:
            raise reader.error("directory", f"{rule.directory!r} is no path of directories, as kv/*/prompts")
    elif len(set(rule.endings)) != len(rule.endings) or len(rule.endings) < 2:
        raise reader.error("suffixes", f"{list(rule.endings)!r}: two or more, all different, are needed")
    elif any("/" in ending or "\0" in ending or len(ending.encode()) > NAME_MAX for ending in rule.endings):
        raise reader.error("suffixes", f"{list(rule.endings)!r}: names of files do not end so")
    return rule


def _check(config: PoolConfig, origin: str) -> None:
    geometry = config.geometry
    check_geometry(geometry, origin)
    if not 1 <= len(config.devices) <= DEVICES_MAX:
        raise PoolError(f"{origin}: device: {len(config.devices)} of them; 1 to {DEVICES_MAX} are possible")
    if geometry.stripe_width > len(config.devices):
        raise PoolError(
            f"{origin}: geometry.stripe_width is {geometry.stripe_width}, but the pool has "
            f"{counted(len(config.devices), 'device')}"
        )
    for device in config.devices:
        end = device.zones_offset + device.zone_count * geometry.zone_size
        if device.zones_offset % PAGE_SIZE or device.size % PAGE_SIZE or end > device.size - LABEL_SIZE:
            raise PoolError(
                f"{origin}: device.zone_count: {device.zone_count} zones of {geometry.zone_size} bytes from "
                f"{device.zones_offset} on do not fit before the label at {device.size - LABEL_SIZE}"
            )
    if len({device.uuid for device in config.devices}) != len(config.devices):
        raise PoolError(f"{origin}: device.uuid: two devices have the same")
    if config.pod is not None:
        check_pod(config.pod, origin)
        if geometry.segment_pages > POD_SEGMENT_PAGES_MAX:
            raise PoolError(
                f"{origin}: segments of {geometry.segment_size} bytes; in a pod "
                f"{POD_SEGMENT_PAGES_MAX * PAGE_SIZE} is the most"
            )
        room = zones_offset(config.pod.nodes)
        for device in config.devices:
            if device.zones_offset < room:
                raise PoolError(
                    f"{origin}: device[{device.index}].zones_offset is {device.zones_offset}; the pages of "
                    f"{counted(config.pod.nodes, 'node')} end at {room}"
                )


class _Reader:
    """One TOML table; every error names the file and the key."""

    def __init__(self, origin: str, prefix: str, table: dict[str, object]) -> None:
        self._origin, self._prefix, self._table = origin, prefix, dict(table)

    def _take(self, key: str, kind: type, what: str) -> object:
        if key not in self._table:
            raise PoolError(f"{self._origin}: {self._prefix}{key} is missing")
        value = self._table.pop(key)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise PoolError(f"{self._origin}: {self._prefix}{key} is {value!r}; {what} is needed")
        return value

    def error(self, key: str, what: str) -> PoolError:
        return PoolError(f"{self._origin}: {(self._prefix + key).removesuffix('.')}: {what}")

    def has(self, key: str) -> bool:
        return key in self._table

    def boolean(self, key: str) -> bool:
        value = self._table.pop(key)
        if not isinstance(value, bool):
            raise PoolError(f"{self._origin}: {self._prefix}{key} is {value!r}; true or false is needed")
        return value

    def integer(self, key: str, least: int, most: int) -> int:
        value = self._take(key, int, "a whole number")
        assert isinstance(value, int)
        if not least <= value <= most:
            wanted = str(least) if least == most else f"{least} to {most}"
            raise PoolError(f"{self._origin}: {self._prefix}{key} is {value}; {wanted} is possible")
        return value

    def fraction(self, key: str) -> float:
        value = self._table.pop(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
            raise PoolError(f"{self._origin}: {self._prefix}{key} is {value!r}; a number from 0 to 1 is needed")
        return float(value)

    def text(self, key: str) -> str:
        value = self._take(key, str, "a string")
        assert isinstance(value, str)
        if not value or "\0" in value:
            raise PoolError(f"{self._origin}: {self._prefix}{key} is {value!r}; a string that is not empty is needed")
        return value

    def one_of(self, key: str, choices: Sequence[str]) -> str:
        value = self.text(key)
        if value not in choices:
            raise PoolError(f"{self._origin}: {self._prefix}{key} is {value!r}; one of {', '.join(choices)} is needed")
        return value

    def texts(self, key: str, most: int) -> tuple[str, ...]:
        value = self._take(key, list, "an array of strings")
        assert isinstance(value, list)
        if len(value) > most or not all(isinstance(item, str) for item in value):
            raise self.error(key, f"an array of at most {most} strings is needed")
        return tuple(value)

    def integers(self, key: str, most: int) -> tuple[int, ...]:
        value = self._take(key, list, "an array of whole numbers")
        assert isinstance(value, list)
        if len(value) > most or not all(isinstance(item, int) and not isinstance(item, bool) for item in value):
            raise self.error(key, f"an array of at most {most} whole numbers is needed")
        return tuple(value)

    def uuid(self, key: str) -> uuids.UUID:
        value = self.text(key)
        try:
            return uuids.UUID(value)
        except ValueError as error:
            raise PoolError(f"{self._origin}: {self._prefix}{key} is {value!r}, which is no UUID") from error

    def hexadecimal(self, key: str) -> int:
        value = self.text(key)
        if re.fullmatch("[0-9a-f]{16}", value) is None:
            raise PoolError(f"{self._origin}: {self._prefix}{key} is not 16 hexadecimal digits")
        return int(value, 16)

    def table(self, key: str) -> _Reader:
        value = self._take(key, dict, "a table")
        assert isinstance(value, dict)
        return _Reader(self._origin, f"{self._prefix}{key}.", value)

    def tables(self, key: str, most: int | None = None) -> list[_Reader]:
        value = self._take(key, list, "an array of tables")
        assert isinstance(value, list)
        if not all(isinstance(item, dict) for item in value):
            raise PoolError(f"{self._origin}: {self._prefix}{key}: write it as [[{key}]] tables")
        if most is not None and len(value) > most:
            raise self.error(key, f"{len(value)} of them; at most {most} are possible")
        return [_Reader(self._origin, f"{self._prefix}{key}[{i}].", item) for i, item in enumerate(value)]

    def finish(self) -> None:
        for key in self._table:
            raise PoolError(f"{self._origin}: {self._prefix}{key} is not a key that kvfs knows")


def load(pool: Path) -> PoolConfig | None:
    """The pool's pool.toml; None if there is none."""
    path = pool / CONFIG_NAME
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise PoolError(f"{path}: {error}") from error
    return parse(text, str(path))


def new_config(geometry: Geometry, devices: list[tuple[str, int]], offset: int = ZONES_OFFSET) -> PoolConfig:
    """A configuration with fresh identities for devices of (path, size), whose zones begin at `offset`."""
    return PoolConfig(
        uuid=uuids.uuid4(),
        secret=secrets.randbits(64),
        created=datetime.datetime.now(datetime.UTC).replace(microsecond=0).isoformat(),
        geometry=geometry,
        devices=tuple(
            DeviceConfig(
                index=index, uuid=uuids.uuid4(), path=path, size=size // PAGE_SIZE * PAGE_SIZE,
                zone_count=zones_on(size, geometry.zone_size, offset), zones_offset=offset,
            )
            for index, (path, size) in enumerate(devices)
        ),
    )  # fmt: skip


def compare(found: PoolConfig, origin: str, expected: PoolConfig, source: str, own: int | None = None) -> None:
    """Raise PoolError naming the first key where `found` (at origin) disagrees with `expected` (at source). Paths
    may differ. With `own` only that device counts: one of the two is older than a change of the pool's devices."""

    def check(key: str, a: object, b: object) -> None:
        if a != b:
            raise PoolError(f"{origin}: {key} is {a}, but {source} says {b}")

    check("uuid", found.uuid, expected.uuid)
    if found.secret != expected.secret:
        raise PoolError(f"{origin}: secret differs from that of {source}")
    for key in ("stripe_width", "stripe_unit", "zone_size"):
        check(f"geometry.{key}", getattr(found.geometry, key), getattr(expected.geometry, key))
    check("pod", *("not there" if config.pod is None else "there" for config in (found, expected)))
    if own is None:
        check("revision", found.revision, expected.revision)
        for what, a, b in same_but(found.pod, expected.pod):
            check(what, a, b)
        check("number of devices", len(found.devices), len(expected.devices))
        pairs = list(zip(found.devices, expected.devices, strict=True))
    else:
        for which, where in ((found, origin), (expected, source)):
            if own >= len(which.devices):
                raise PoolError(f"{where}: device[{own}] is missing")
        pairs = [(found.devices[own], expected.devices[own])]
    for a, b in pairs:
        for key in ("uuid", "size", "zone_count", "zones_offset", "group", *(() if own is not None else ("removed",))):
            check(f"device[{a.index}].{key}", getattr(a, key), getattr(b, key))
