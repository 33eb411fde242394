"""Real redis-servers for tests: each starts in some 50 ms, in a directory of its own, and keeps nothing."""

from __future__ import annotations

import functools
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Self

import helpers
import pytest

from kvfs.pod.redis_engine import RedisEngine
from kvfs.pod.url import parse_url

START_S = 20.0
_STARTS_MAX = 5


@functools.cache
def missing() -> str:
    """Why no server can be started here; empty if one can."""
    if shutil.which("redis-server") is None:
        return "no redis-server (apt-get install redis-server)"
    try:
        import redis  # noqa: F401
    except ImportError:
        return "no redis-py (pip install 'redis>=5')"
    return ""


needs_redis = pytest.mark.skipif(bool(missing()), reason=missing() or "there")


def free_port() -> int:
    """A port above which another is left for a cluster's bus, 10,000 higher."""
    while True:
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            port: int = found.getsockname()[1]
        if port < 55_000:
            return port


def wait_until(what: Callable[[], object], timeout_s: float = START_S) -> None:
    helpers.wait_until(what, f"{what}", timeout_s=timeout_s, interval_s=0.005)


class Server:
    """One redis-server: on a port of 127.0.0.1 and on a socket. `options` are those of its command line."""

    def __init__(self, directory: Path, *options: str, port: int | None = None) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory, self.options = directory, options
        self.port = free_port() if port is None else port
        self._has_own_port, self._has_run = port is not None, False
        self.socket = directory / "s"
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def start(self) -> Self:
        """Start it, on another port if somebody was quicker; once it ran, its port stays."""
        assert self.process is None
        for _ in range(_STARTS_MAX):
            self.process = subprocess.Popen(self._words(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            try:
                wait_until(self._answers)
                self._has_run = True
                return self
            except AssertionError as error:
                self.kill()
                failure = error
                if not self._has_run and not self._has_own_port:
                    self.port = free_port()
        raise failure

    def _words(self) -> list[str]:
        words = [
            "redis-server", *self._files(), "--port", str(self.port), "--dir", str(self.directory),
            "--bind", "127.0.0.1", "--logfile", str(self.directory / "log"), *self.options,
        ]  # fmt: skip
        if "--sentinel" not in self.options:
            words += ["--save", "", "--appendonly", "no", "--unixsocket", str(self.socket)]
        return words

    def _files(self) -> list[str]:
        return []

    def _answers(self) -> bool:
        assert self.process is not None and self.process.poll() is None, (self.directory / "log").read_text()
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1):
                return True
        except OSError:
            return False

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        os.kill(self.process.pid, number)

    def command(self, *words: str, user: str = "") -> str:
        """By redis-cli: what an operator would do."""
        login = ["--user", user, "--askpass"] if user else []
        said = subprocess.run(
            ["redis-cli", "-s", str(self.socket), *login, *words],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        )
        return said.stdout.strip()

    def engine(self, *, deadline_s: float = 1.0, url: str = "", password_file: Path | None = None) -> RedisEngine:
        return RedisEngine(
            parse_url(url or self.url), pool_key="kvfs:{u}:0", password_file=password_file, deadline_s=deadline_s
        )


class Sentinel(Server):
    """A sentinel that watches one master, and believes itself alone."""

    def __init__(self, directory: Path, master: Server) -> None:
        super().__init__(directory, "--sentinel")
        self.file = directory / "sentinel.conf"
        self.file.write_text(
            f"sentinel monitor mymaster 127.0.0.1 {master.port} 1\n"
            "sentinel down-after-milliseconds mymaster 300\nsentinel failover-timeout mymaster 3000\n"
        )

    def _files(self) -> list[str]:
        return [str(self.file)]
