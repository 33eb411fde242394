"""URLs of engines, and the file that has their password. A password never stands in a URL: those are seen by all.

    redis://[USER@]HOST[:PORT][/DATABASE]
    redis+sentinel://[USER@]HOST[:PORT],HOST.../MASTER[/DATABASE]
    redis+cluster://[USER@]HOST[:PORT],HOST...
    unix://[USER@]/PATH/OF/SOCKET[?database=N]

`rediss`, `rediss+sentinel` and `rediss+cluster` are the same in TLS, with `?ca=FILE&cert=FILE&key=FILE`. `valkey` may
stand for `redis`. `?password_file=FILE` takes the place of the pool's. `?sentinel_login=1` logs in at sentinels too.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qsl, unquote

from kvfs.errors import PoolError, UsageError, printable

PORT, SENTINEL_PORT = 6379, 26379
_PASSWORD_MAX = 4096
_SCHEMES = ("redis", "rediss", "redis+sentinel", "rediss+sentinel", "redis+cluster", "rediss+cluster", "unix")
_OPTIONS = ("ca", "cert", "key", "password_file", "sentinel_login", "database")
_HOST = re.compile(r"(\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9._-]+)(?::([0-9]{1,5}))?")


@dataclass(frozen=True, slots=True)
class EngineUrl:
    """One engine. kind: "standalone", "sentinel" or "cluster". hosts: of the server, of sentinels, or of some nodes."""

    kind: str
    hosts: tuple[tuple[str, int], ...] = ()
    socket: Path | None = None
    user: str | None = None
    database: int = 0
    master: str = ""
    tls: bool = False
    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None
    password_file: Path | None = None
    sentinel_login: bool = False

    def __str__(self) -> str:
        """The URL, for messages: it has no secret."""
        user = f"{self.user}@" if self.user else ""
        if self.socket is not None:
            return f"unix://{user}{self.socket}" + (f"?database={self.database}" if self.database else "")
        hosts = ",".join(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in self.hosts)
        scheme = ("rediss" if self.tls else "redis") + ("" if self.kind == "standalone" else f"+{self.kind}")
        master = f"/{self.master}" if self.master else ""
        return f"{scheme}://{user}{hosts}{master}" + (f"/{self.database}" if self.database else "")


def parse_urls(texts: Sequence[str]) -> list[EngineUrl]:
    """UsageError: one of them is no engine's, has a password, or stands there twice."""
    urls = [parse_url(text) for text in texts]
    names = [str(url) for url in urls]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise UsageError(f"engine {twice[0]}: named {names.count(twice[0])} times")
    return urls


def parse_url(text: str) -> EngineUrl:
    """UsageError: no URL of an engine, or one with a password."""
    shown = printable(without_password(text))
    scheme, separator, rest = text.partition("://")
    scheme = scheme.replace("valkey", "redis", 1)
    if not separator or scheme not in _SCHEMES:
        raise UsageError(f"engine {shown}: not one of {', '.join(name + '://' for name in _SCHEMES)}")
    rest, _, query = rest.partition("?")
    user, at, rest = rest.rpartition("@")
    if ":" in user or "password" in dict(parse_qsl(query)):
        raise UsageError(
            f"engine {shown}: a password has no place in a URL, which everybody sees; write it into a file of mode "
            f"0600 and name that file as password_file"
        )
    if at and not user:
        raise UsageError(f"engine {shown}: no user before the @")
    options = _options(query, shown)
    try:
        url = _parts(scheme, unquote(user) or None, rest, options)
    except ValueError as error:
        raise UsageError(f"engine {shown}: {error}") from None
    if not url.tls and (url.ca or url.cert or url.key):
        raise UsageError(f"engine {shown}: ca, cert and key need TLS; write rediss:// for redis://")
    return url


def without_password(text: str) -> str:
    """A text in which a URL may be, for a message: what stands between a user's colon and the @ is left out."""
    text = re.sub(r"(//[^:/@?\s]*):.*@", r"\1:...@", text)
    return re.sub(r"(password=)[^&\s]*", r"\1...", text)


def _options(query: str, shown: str) -> Mapping[str, str]:
    pairs = parse_qsl(query, keep_blank_values=True)
    options = dict(pairs)
    for name, _ in pairs:
        if name not in _OPTIONS:
            raise UsageError(f"engine {shown}: no option {printable(name)}; there are {', '.join(_OPTIONS)}")
    if len(options) != len(pairs):
        raise UsageError(f"engine {shown}: an option stands there twice")
    return options


def _parts(scheme: str, user: str | None, rest: str, options: Mapping[str, str]) -> EngineUrl:
    """ValueError says what is wrong."""

    def path(name: str) -> Path | None:
        if name not in options:
            return None
        if not options[name].startswith("/"):
            raise ValueError(f"{name}={options[name]} is no absolute path")
        return Path(options[name])

    login = options.get("sentinel_login", "0")
    if login not in ("0", "1"):
        raise ValueError(f"sentinel_login={login} is neither 0 nor 1")
    given_database = options.get("database")
    if scheme == "unix":
        if not rest.startswith("/"):
            raise ValueError("no absolute path of a socket")
        database = _database(given_database or "0")
        return EngineUrl("standalone", (), Path(rest), user, database, password_file=path("password_file"))
    server, _, tail = rest.partition("/")
    kind = scheme.partition("+")[2] or "standalone"
    hosts = tuple(_host(part, SENTINEL_PORT if kind == "sentinel" else PORT) for part in server.split(","))
    if kind == "standalone" and len(hosts) > 1:
        raise ValueError("several hosts; name several engines, or write redis+cluster:// or redis+sentinel://")
    master = ""
    if kind == "sentinel":
        master, _, tail = tail.partition("/")
        if not re.fullmatch(r"[A-Za-z0-9._-]+", master):
            raise ValueError("no name of a master behind the sentinels: redis+sentinel://HOST,HOST/MASTER")
    if tail and given_database is not None:
        raise ValueError("two databases")
    database = _database(tail or given_database or "0")
    if kind == "cluster" and database:
        raise ValueError("a cluster has database 0 alone")
    return EngineUrl(
        kind, hosts, None, user, database, master, scheme.startswith("rediss"), path("ca"), path("cert"), path("key"),
        path("password_file"), login == "1",
    )  # fmt: skip


def _host(text: str, port: int) -> tuple[str, int]:
    match = _HOST.fullmatch(text)
    if match is None:
        raise ValueError(f"{printable(text)!r} is no HOST[:PORT]")
    port = int(match.group(2) or port)
    if not 0 < port < 65536:
        raise ValueError(f"no port {port}")
    return match.group(1).strip("[]"), port


def _database(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,5}", text):
        raise ValueError(f"{printable(text)!r} is no number of a database")
    return int(text)


def read_password(path: Path) -> str:
    """The first line of a file that its owner alone can read. PoolError. Read anew for each connection, so that it may
    be changed."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise PoolError(f"password file {path}: {os.strerror(error.errno or 0)}") from error
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        os.close(fd)
        raise PoolError(f"password file {path}: not a plain file")
    with open(fd, "rb") as file:
        mode = stat.S_IMODE(status.st_mode)
        if mode & 0o077:
            raise PoolError(f"password file {path}: mode {mode:04o}, so others can read it; chmod 0600 {path}")
        if status.st_uid not in (0, os.geteuid()):
            raise PoolError(f"password file {path}: belongs to user {status.st_uid}; kvfs runs as {os.geteuid()}")
        text = file.read(_PASSWORD_MAX + 1)
    line = text.partition(b"\n")[0].rstrip(b"\r")
    if not line or len(text) > _PASSWORD_MAX:
        raise PoolError(f"password file {path}: {len(text)} bytes; the first line must have the password")
    try:
        return line.decode()
    except UnicodeDecodeError:
        raise PoolError(f"password file {path}: not UTF-8") from None
