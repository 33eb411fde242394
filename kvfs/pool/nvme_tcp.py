"""NVMe/TCP namespaces as devices: their URLs, and the questions before a mount: sizes, labels, discovery.

    nvme-tcp://HOST[:PORT]/NQN?nsid=1[&queues=N][&depth=N][&hdgst=0|1][&ddgst=0|1][&hostnqn=NQN][&kato=MS][&timeout=MS]

Without nsid a URL names all namespaces of a subsystem; without NQN, all subsystems that the discovery controller at
this address lists. Blocking calls. The protocol is the data plane's (native/src/io/nvme/).
"""

from __future__ import annotations

import os
import re
import threading
import uuid as uuids
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from kvfs._native import ffi, lib
from kvfs.errors import DeviceError, UsageError
from kvfs.pool.fence import Step

SCHEME = "nvme-tcp"
PORT = 4420
_NQN_MAX = 223
_HOST_MAX = 255
_NAMESPACES_MAX = 1024
_SUBSYSTEMS_MAX = 4096
_HOSTNQN = Path("/etc/nvme/hostnqn")
_MACHINE_ID = Path("/etc/machine-id")
# UUID namespace of host NQNs that are made from something else than a UUID. Any constant will do.
_HOSTS = uuids.UUID("0d1fd9d5-2a5e-4d4a-9d05-6b5fd6f5a1c7")
# Option, and its largest value.
_OPTIONS = {
    "nsid": 0xFFFFFFFE, "queues": 256, "depth": 1024, "hdgst": 1, "ddgst": 1, "kato": 600_000, "timeout": 600_000,
}  # fmt: skip
_TYPES = {1: "referral", 2: "nvm", 3: "discovery"}
_TRANSPORTS = {1: "rdma", 2: "fc", 3: "tcp"}


@dataclass(frozen=True, slots=True)
class Target:
    """The parts of a URL. 0: the default; no nsid: all namespaces."""

    host: str
    port: int
    nqn: str
    hostnqn: str
    options: dict[str, int]

    @property
    def nsid(self) -> int:
        return self.options.get("nsid", 0)

    @property
    def where(self) -> tuple[str, int, str, int]:
        """Two URLs with the same value lead to the same namespace."""
        return self.host, self.port, self.nqn, self.nsid


@dataclass(frozen=True, slots=True)
class Subsystem:
    """An entry of a discovery log."""

    nqn: str
    kind: str
    transport: str
    address: str
    port: str


def is_url(text: object) -> bool:
    return isinstance(text, str) and text.startswith(f"{SCHEME}://")


def parse(url: str) -> Target:
    """Raises UsageError, which names the part that is wrong."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
        pairs = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=True) if parts.query else []
    except ValueError as error:
        raise UsageError(f"{url}: {error}") from error
    if parts.scheme != SCHEME or not host or parts.username is not None or parts.fragment:
        raise UsageError(f"{url}: not of the form {SCHEME}://HOST[:PORT]/NQN?nsid=N")
    if len(host.encode()) > _HOST_MAX or port == 0:
        raise UsageError(f"{url}: no such host or port")
    nqn = unquote(parts.path.removeprefix("/"))
    options: dict[str, int] = {}
    hostnqn = ""
    for key, value in pairs:
        if key in options or (key == "hostnqn" and hostnqn):
            raise UsageError(f"{url}: {key} is given twice")
        if key == "hostnqn":
            hostnqn = value
        elif key not in _OPTIONS:
            raise UsageError(f"{url}: no option {key!r}; there are {', '.join(_OPTIONS)} and hostnqn")
        elif not re.fullmatch("[0-9]{1,10}", value) or not (key == "nsid") <= int(value) <= _OPTIONS[key]:
            raise UsageError(f"{url}: {key} is {value!r}; it is a number up to {_OPTIONS[key]}")
        else:
            options[key] = int(value)
    hostnqn = hostnqn or _default_hostnqn()
    for what, name in (("NQN", nqn), ("hostnqn", hostnqn)):
        if len(name.encode()) > _NQN_MAX or (name and not name.startswith("nqn.")) or not name.isprintable():
            raise UsageError(f"{url}: {what} is {name!r}; a name begins with 'nqn.' and has at most {_NQN_MAX} bytes")
    return Target(host, port or PORT, nqn, hostnqn, options)


def _default_hostnqn() -> str:
    """The machine's host NQN where it has one; else one that stays the same."""
    try:
        found = _HOSTNQN.read_text().strip()
        if found.startswith("nqn."):
            return found
    except (OSError, UnicodeDecodeError):
        pass
    try:
        machine = _MACHINE_ID.read_text().strip()
    except (OSError, UnicodeDecodeError):
        machine = os.uname().nodename
    return f"nqn.2014-08.org.nvmexpress:uuid:{uuids.uuid5(_HOSTS, machine)}"


def _host_id(hostnqn: str) -> uuids.UUID:
    try:
        return uuids.UUID(hostnqn.rpartition("uuid:")[2])
    except ValueError:
        return uuids.uuid5(_HOSTS, hostnqn)


def _native(target: Target) -> object:
    """struct kvfs_nvme_target."""
    out = ffi.new("struct kvfs_nvme_target *")
    out.host, out.nqn, out.hostnqn = target.host.encode(), target.nqn.encode(), target.hostnqn.encode()
    out.hostid = _host_id(target.hostnqn).bytes
    out.port, out.nsid = target.port, target.nsid
    out.queues, out.depth = target.options.get("queues", 0), target.options.get("depth", 0)
    out.header_digest, out.data_digest = target.options.get("hdgst", 0), target.options.get("ddgst", 0)
    out.kato_ms, out.timeout_ms = target.options.get("kato", 0), target.options.get("timeout", 0)
    return out


def _check(result: int, what: str) -> int:
    if result < 0:
        error = DeviceError(f"{what}: {ffi.string(lib.kvfs_nvme_error()).decode(errors='replace')}")
        error.errno = -result
        raise error
    return result


class Controller:
    """A connection to a controller, and with an nsid to that namespace."""

    def __init__(self, url: str) -> None:
        """UsageError, DeviceError."""
        self._url = url
        self._target = parse(url)
        if not self._target.nqn:
            raise UsageError(f"{url}: names no subsystem")
        out = ffi.new("struct kvfs_nvme **")
        _check(lib.kvfs_nvme_open(_native(self._target), out), url)
        self._nvme = out[0]
        # A call that takes too long is given up on. Its thread waits on, and closes the connection.
        self._lock = threading.Lock()
        self._closed = False

    def close(self) -> None:
        self._closed = True
        self._close_idle()

    def _close_idle(self) -> None:
        if self._closed and self._lock.acquire(blocking=False):
            nvme, self._nvme = self._nvme, None
            self._lock.release()
            if nvme is not None:
                lib.kvfs_nvme_close(nvme)

    @contextmanager
    def _used(self) -> Iterator[None]:
        try:
            with self._lock:
                if self._closed:
                    raise DeviceError(f"{self._url}: closed")
                yield
        finally:
            self._close_idle()

    @property
    def size(self) -> int:
        info = ffi.new("struct kvfs_nvme_info *")
        lib.kvfs_nvme_info(self._nvme, info)
        return int(info.size)

    @property
    def limits(self) -> tuple[int, int, bool]:
        """Block size, largest transfer of one command, whether there is a volatile write cache."""
        info = ffi.new("struct kvfs_nvme_info *")
        lib.kvfs_nvme_info(self._nvme, info)
        return info.block_size, info.transfer_size, bool(info.write_cache)

    def descriptor(self) -> int:
        """A descriptor that stands for the namespace; the caller closes it."""
        return _check(lib.kvfs_nvme_descriptor(_native(self._target)), self._url)

    def read(self, offset: int, size: int) -> bytes:
        out = ffi.new("uint8_t[]", size)
        with self._used():
            _check(lib.kvfs_nvme_read(self._nvme, offset, out, size), f"{self._url}: read at {offset}")
        return bytes(ffi.buffer(out))

    def write(self, offset: int, data: bytes) -> None:
        """The data is durable when this returns."""
        with self._used():
            _check(lib.kvfs_nvme_write(self._nvme, offset, data, len(data)), f"{self._url}: write at {offset}")

    def flush(self) -> None:
        with self._used():
            _check(lib.kvfs_nvme_flush(self._nvme), f"{self._url}: flush")

    def reservation(self, step: Step, key: int, other: int = 0) -> None:
        """DeviceError: EBADE for a conflict, EOPNOTSUPP where there are no reservations."""
        with self._used():
            result = lib.kvfs_nvme_reservation(self._nvme, int(step), key, other)
            _check(result, f"{self._url}: reservation: {step.name}")

    def namespaces(self) -> list[int]:
        out = ffi.new("uint32_t[]", _NAMESPACES_MAX)
        count = _check(lib.kvfs_nvme_namespaces(self._nvme, out, _NAMESPACES_MAX), self._url)
        return list(out[0:count])


def discover(url: str) -> list[Subsystem]:
    """The subsystems that the discovery controller at this address lists. UsageError, DeviceError."""
    out = ffi.new("struct kvfs_nvme_subsystem[]", _SUBSYSTEMS_MAX)
    target = parse(url)
    count = _check(lib.kvfs_nvme_discover(_native(target), out, _SUBSYSTEMS_MAX), f"{target.host}:{target.port}")
    return [
        Subsystem(
            _text(entry.nqn), _TYPES.get(entry.type, str(entry.type)), _TRANSPORTS.get(entry.transport, "other"),
            _text(entry.address), _text(entry.port),
        )
        for entry in out[0 : min(count, _SUBSYSTEMS_MAX)]
    ]  # fmt: skip


def _text(field: object) -> str:
    return str(ffi.string(field).decode(errors="replace"))


def expand(url: str) -> list[str]:
    """The URLs of single namespaces that a URL stands for: itself, its subsystem's, or an enclosure's."""
    target = parse(url)
    base, _, query = url.partition("?")
    query = "&" + query if query else ""
    if target.nqn and target.nsid:
        return [url]
    if target.nsid:
        raise UsageError(f"{url}: an nsid, but no NQN")
    if target.nqn:
        controller = Controller(url)
        try:
            found = controller.namespaces()
        finally:
            controller.close()
        if not found:
            raise DeviceError(f"{url}: the subsystem has no namespaces")
        return [f"{base}?nsid={nsid}{query}" for nsid in found]
    urls: list[str] = []
    for subsystem in discover(url):
        if subsystem.kind == "nvm" and subsystem.transport == "tcp":
            host = f"[{subsystem.address}]" if ":" in subsystem.address else subsystem.address
            whole = f"{SCHEME}://{host}:{subsystem.port}/{quote(subsystem.nqn, safe=':')}"
            urls += expand(whole + ("?" + query[1:] if query else ""))
    if not urls:
        raise DeviceError(f"{url}: no subsystems over TCP there")
    return urls
