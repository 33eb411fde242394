"""The engine on Redis (6.2 or newer) or Valkey: one server, behind sentinels, or a cluster.

redis-py is imported with this module alone, which a daemon without a pod never imports. Of redis-py the connection is
used, not the client: a client tries again by itself, and a deadline would then be several. All keys of a pool lie on
one node of a cluster. So every kind of engine comes down to one connection to one server; only finding it differs.
"""

from __future__ import annotations

import importlib
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Protocol, cast

from kvfs.errors import EngineAwayError, EngineError, KvfsError, MissingFeatureError, printable
from kvfs.pod.engine import BEGINNING, Engine, Entry, Fields, Information, Position, StreamSize
from kvfs.pod.url import EngineUrl, read_password

DEADLINE_S = 1.0
# A read that waits looks this often whether it shall end.
_SLICE_S = 0.1
# Sentinels are asked again after this time: an old master that is cut off says nothing of a new one.
_VERIFY_S = 10.0
_REDIRECTS_MAX = 3
# "MOVED 3999 127.0.0.1:6381"; without a host it is the one that was asked. redis-py takes the first word away.
_MOVED = re.compile(r"(?:MOVED )?[0-9]+ (\S*):([0-9]+)$")
# Errors of a server that another one, or a later time, mends.
_PASSING = re.compile(r"(LOADING|CLUSTERDOWN|MASTERDOWN|READONLY|TRYAGAIN|BUSY|NOREPLICAS|MISCONF|OOM)\b")


class _Connection(Protocol):
    """The part of redis.connection.Connection that is used here; it is the same in redis-py 5 to 8."""

    def connect(self) -> None: ...
    def disconnect(self) -> None: ...
    def pack_commands(self, commands: Sequence[Sequence[object]]) -> list[bytes]: ...
    def send_packed_command(self, command: list[bytes]) -> None: ...
    def can_read(self, timeout: float) -> bool: ...
    def read_response(self) -> object: ...


@dataclass(frozen=True)
class _Library:
    """redis-py."""

    connection: ModuleType
    exceptions: ModuleType
    retry: object
    key_slot: Callable[[bytes], int]

    @classmethod
    def load(cls) -> _Library:
        try:
            connection, exceptions, retry, backoff, crc = (
                importlib.import_module(f"redis.{name}")
                for name in ("connection", "exceptions", "retry", "backoff", "crc")
            )
        except ImportError as error:
            raise MissingFeatureError("a pod's engine needs redis-py 5 or newer: pip install 'kvfs[pod]'") from error
        once = retry.Retry(backoff.NoBackoff(), 0)
        return cls(connection, exceptions, once, cast("Callable[[bytes], int]", crc.key_slot))


class _Credentials:
    """Gives redis-py a name and a password when it connects; nothing else holds the password."""

    def __init__(self, user: str | None, path: Path) -> None:
        self._user, self._path = user, path

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        password = read_password(self._path)
        return (password,) if self._user is None else (self._user, password)


class RedisEngine:
    """See Engine. password_file: if the URL names no other. pool_key: any key of the pool, to find it in a cluster."""

    def __init__(
        self,
        url: EngineUrl,
        *,
        pool_key: str,
        password_file: Path | None = None,
        client_name: str = "kvfs",
        deadline_s: float = DEADLINE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._library = _Library.load()
        self._url, self._pool_key = url, pool_key
        self._password_file = url.password_file or password_file
        self._client_name, self._deadline_s, self._clock = client_name, deadline_s, clock
        self._connection: _Connection | None = None
        self._place: tuple[str, int] | None = None
        self._hosts = list(url.hosts)
        self._verified_at = 0.0
        self._interrupted = threading.Event()

    @property
    def name(self) -> str:
        return str(self._url)

    def __repr__(self) -> str:
        return f"RedisEngine({self.name})"

    # ---- verbs ----

    def append(self, stream: str, fields: Fields, *, oldest: Position | None = None) -> Position:
        words: list[object] = ["XADD", stream]
        if oldest is not None:
            words += ["MINID", "~", _text(oldest)]
        words.append("*")
        for name, value in fields.items():
            words += [name, value]
        return self._position(self._call(words))

    def read(self, after: Mapping[str, Position], *, wait_s: float, count: int) -> list[Entry]:
        words: list[object] = ["XREAD", "COUNT", count]
        wait_s = 0.0 if self._interrupted.is_set() else wait_s
        if wait_s > 0:
            words += ["BLOCK", max(1, int(wait_s * 1000))]
        words += ["STREAMS", *after, *map(_text, after.values())]
        return list(self._entries(self._call(words, wait_s=wait_s)))

    def tails(self, streams: Sequence[str]) -> list[Position]:
        replies = self._calls([["XREVRANGE", stream, "+", "-", "COUNT", 1] for stream in streams])
        last = [_list(reply[0]) if reply else [] for reply in map(_list, replies)]
        return [self._position(entry[0]) if entry else BEGINNING for entry in last]

    def trim(self, stream: str, *, oldest: Position, expire_s: float | None = None) -> None:
        words: list[list[object]] = [["XTRIM", stream, "MINID", _text(oldest)]]
        if expire_s is not None:
            words.append(["PEXPIRE", stream, int(expire_s * 1000)])
        self._calls(words)

    def put(self, key: str, value: bytes, *, expire_s: float | None = None) -> None:
        words: list[object] = ["SET", key, value]
        if expire_s is not None:
            words += ["PX", int(expire_s * 1000)]
        self._call(words)

    def get(self, keys: Sequence[str]) -> list[bytes | None]:
        replies = self._calls([["GET", key] for key in keys])
        return [reply if isinstance(reply, bytes) else None for reply in replies]

    def remove(self, key: str) -> None:
        self._call(["DEL", key])

    def ping(self) -> None:
        self._call(["PING"])

    def time_s(self) -> float:
        seconds, microseconds = (int(_text_of(word)) for word in _list(self._call(["TIME"])))
        return seconds + microseconds / 1e6

    def information(self) -> Information:
        text = _text_of(self._call(["INFO"]))
        found = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
        version = found.get("valkey_version") or found.get("redis_version", "0")
        return Information(
            product="valkey" if "valkey_version" in found or found.get("server_name") == "valkey" else "redis",
            version=tuple(int(part) for part in re.findall(r"\d+", version)[:3]),
            mode=found.get("server_mode") or found.get("redis_mode", "standalone"),
            role=found.get("role", ""),
            eviction_policy=found.get("maxmemory_policy", ""),
            memory=int(found.get("used_memory", 0)),
            memory_max=int(found.get("maxmemory", 0)),
            cpu_s=float(found.get("used_cpu_user", 0)) + float(found.get("used_cpu_sys", 0)),
            uptime_s=int(found.get("uptime_in_seconds", 0)),
            run_id=found.get("run_id", ""),
        )

    def sizes(self, streams: Sequence[str]) -> list[StreamSize]:
        commands: list[list[object]] = []
        for stream in streams:
            commands += [["XLEN", stream], ["MEMORY", "USAGE", stream]]
        numbers = [reply if isinstance(reply, int) else 0 for reply in self._calls(commands)]
        return [StreamSize(*pair) for pair in zip(numbers[::2], numbers[1::2], strict=True)]

    def interrupt(self) -> None:
        self._interrupted.set()

    def close(self) -> None:
        self._interrupted.set()
        self._drop()

    # ---- calls ----

    def _call(self, words: Sequence[object], *, wait_s: float = 0.0) -> object:
        return self._calls([words], wait_s=wait_s)[0]

    def _calls(self, commands: Sequence[Sequence[object]], *, wait_s: float = 0.0) -> list[object]:
        """The replies. A server that names another one in a cluster is followed there."""
        errors = self._library.exceptions
        for _ in range(_REDIRECTS_MAX):
            try:
                connection = self._connected()
                connection.send_packed_command(connection.pack_commands(commands))
                replies = self._replies(connection, len(commands), wait_s)
            except (errors.RedisError, OSError, ValueError, AttributeError) as error:
                self._drop()
                raise self._failure(error) from error
            refused = next((reply for reply in replies if isinstance(reply, Exception)), None)
            if refused is None:
                return replies
            # redis-py 5 has no class for it at this level.
            moved = _MOVED.match(str(refused)) if isinstance(refused, errors.ResponseError) else None
            if moved is None:
                if not isinstance(refused, errors.ResponseError) or self._passes(refused):
                    self._drop()
                raise self._failure(refused) from refused
            here = self._place
            self._drop()
            self._place = (moved[1] or (here or ("", 0))[0], int(moved[2]))
        raise EngineAwayError(f"engine {self.name}: {_REDIRECTS_MAX} nodes name another one for the pool's keys")

    def _replies(self, connection: _Connection, count: int, wait_s: float) -> list[object]:
        end = self._clock() + wait_s + self._deadline_s
        while wait_s > 0 and not connection.can_read(timeout=_SLICE_S):
            if self._interrupted.is_set():
                # The reply still comes; this connection must not take it for the next one's.
                self._drop()
                return [None] * count
            if self._clock() >= end:
                raise TimeoutError(f"no answer within {wait_s + self._deadline_s:.1f} s")
        replies: list[object] = []
        for _ in range(count):
            try:
                replies.append(connection.read_response())
            except self._library.exceptions.ResponseError as error:
                replies.append(error)
        return replies

    def _passes(self, error: Exception) -> bool:
        kinds = ("ReadOnlyError", "ClusterDownError", "MasterDownError", "TryAgainError", "OutOfMemoryError")
        known = tuple(getattr(self._library.exceptions, kind) for kind in kinds)
        return isinstance(error, known) or _PASSING.match(str(error)) is not None

    def _failure(self, error: Exception) -> EngineError:
        if isinstance(error, EngineError):
            return error
        errors = self._library.exceptions
        said = printable(str(error)) or type(error).__name__
        if isinstance(error, errors.AuthenticationError):
            return EngineError(f"engine {self.name}: user {self._url.user or 'default'} is refused: {said}")
        if isinstance(error, errors.TimeoutError | TimeoutError):
            return EngineAwayError(f"engine {self.name}: no answer within {self._deadline_s:g} s ({said})")
        if not isinstance(error, errors.ResponseError) or self._passes(error):
            return EngineAwayError(f"engine {self.name}: {said}")
        return EngineError(f"engine {self.name}: {said}")

    # ---- the connection ----

    def _connected(self) -> _Connection:
        stale = self._url.kind == "sentinel" and self._clock() - self._verified_at >= _VERIFY_S
        if self._connection is not None and not stale:
            return self._connection
        place = self._place if self._place is not None and self._url.kind == "cluster" else self._found()
        self._verified_at = self._clock()
        if self._connection is not None and place == self._place:
            return self._connection
        self._drop()
        connection = self._open(place, login=True, database=self._url.database)
        self._place, self._connection = place, connection
        return connection

    def _found(self) -> tuple[str, int]:
        """Where the server is; where it was, if it is connected and no sentinel answers."""
        try:
            return self._locate()
        except EngineAwayError:
            if self._connection is None or self._place is None:
                raise
            return self._place

    def _drop(self) -> None:
        connection, self._connection, self._place = self._connection, None, None
        if connection is not None:
            connection.disconnect()

    def _locate(self) -> tuple[str, int]:
        """The server that has the pool's keys."""
        if self._url.kind == "standalone":
            return self._url.hosts[0] if self._url.hosts else ("", 0)
        said: list[str] = []
        for host in tuple(self._hosts):
            try:
                connection = self._open(host, login=self._url.kind == "cluster" or self._url.sentinel_login, database=0)
                try:
                    is_sentinel = self._url.kind == "sentinel"
                    place = self._master(connection) if is_sentinel else self._owner(connection, host)
                finally:
                    connection.disconnect()
                # The next time a dead one is not waited for.
                self._hosts.remove(host)
                self._hosts.insert(0, host)
                return place
            except (self._library.exceptions.RedisError, OSError, ValueError, EngineError) as error:
                said.append(f"{host[0]}:{host[1]}: {str(error) or type(error).__name__}")
        raise EngineAwayError(f"engine {self.name}: {'; '.join(said)}")

    def _master(self, connection: _Connection) -> tuple[str, int]:
        command = ["SENTINEL", "GET-MASTER-ADDR-BY-NAME", self._url.master]
        connection.send_packed_command(connection.pack_commands([command]))
        reply = connection.read_response()
        if not isinstance(reply, list):
            raise EngineAwayError(f"it knows no master {self._url.master}")
        return _text_of(reply[0]), int(_text_of(reply[1]))

    def _owner(self, connection: _Connection, asked: tuple[str, int]) -> tuple[str, int]:
        connection.send_packed_command(connection.pack_commands([["CLUSTER", "SLOTS"]]))
        wanted = self._library.key_slot(self._pool_key.encode())
        for first, last, master, *_ in map(_list, _list(connection.read_response())):
            if isinstance(first, int) and isinstance(last, int) and first <= wanted <= last:
                host, port, *_ = _list(master)
                return (_text_of(host) if host else asked[0]), int(str(port))
        raise EngineAwayError(f"no node of the cluster has its slot {wanted}")

    def _open(self, place: tuple[str, int], *, login: bool, database: int) -> _Connection:
        options: dict[str, object] = {
            "socket_timeout": self._deadline_s, "retry": self._library.retry, "protocol": 2, "db": database,
            "health_check_interval": 0, "encoding": "utf-8",
        }  # fmt: skip
        if login and self._password_file is not None:
            options["credential_provider"] = _Credentials(self._url.user, self._password_file)
        kind = "Connection"
        if self._url.socket is not None:
            kind = "UnixDomainSocketConnection"
            options["path"] = str(self._url.socket)
        else:
            options |= {"host": place[0], "port": place[1], "socket_connect_timeout": self._deadline_s}
        if self._url.tls:
            kind = "SSLConnection"
            for name, path in (("ca_certs", self._url.ca), ("certfile", self._url.cert), ("keyfile", self._url.key)):
                if path is not None:
                    options[f"ssl_{name}"] = str(path)
        connection = cast(_Connection, getattr(self._library.connection, kind)(**options))
        try:
            connection.connect()
            self._introduce(connection)
        except KvfsError as error:  # of the password file
            connection.disconnect()
            raise EngineError(f"engine {self.name}: {error}") from error
        except BaseException:
            connection.disconnect()
            raise
        return connection

    def _introduce(self, connection: _Connection) -> None:
        """Give the connection a name, for an operator's CLIENT LIST; a user may lack the right."""
        connection.send_packed_command(connection.pack_commands([["CLIENT", "SETNAME", self._client_name]]))
        with suppress(self._library.exceptions.ResponseError):
            connection.read_response()

    # ---- replies: bytes from outside ----

    def _position(self, reply: object) -> Position:
        milliseconds, _, count = _text_of(reply).partition("-")
        try:
            return int(milliseconds), int(count)
        except ValueError:
            raise EngineError(f"engine {self.name}: {reply!r} is no position of a stream") from None

    def _entries(self, reply: object) -> Iterator[Entry]:
        for stream, entries in map(_list, _list(reply)):
            for position, words in map(_list, _list(entries)):
                values = [word for word in _list(words) if isinstance(word, bytes)]
                fields = dict(zip(values[::2], values[1::2], strict=False))
                yield Entry(_text_of(stream), self._position(position), fields)


def _list(reply: object) -> list[object]:
    return reply if isinstance(reply, list) else []


def _text_of(reply: object) -> str:
    return reply.decode("utf-8", "replace") if isinstance(reply, bytes) else str(reply)


def _text(position: Position) -> str:
    return f"{position[0]}-{position[1]}"


def _is_engine(engine: RedisEngine) -> Engine:
    return engine
