"""The test enclosure (tools/nvme_tcp_target) as a process under a test, and its control socket."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import signal
import socket
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any, Self

from helpers import slowness, wait_until

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
NQN = "nqn.2026-01.test:kv"
START_TIMEOUT_S = 240  # it may have to be built


class EnclosureError(AssertionError):
    """It did not start, refused a command, or ended badly; the message holds what it said."""


class Enclosure:
    """`with Enclosure({NQN: [path]}, "--no-success") as enclosure: enclosure.control("fault drop count=1")`.

    At the end it must still be there and end well: a sanitizer's report fails the test.
    """

    def __init__(
        self,
        subsystems: Mapping[str, Sequence[os.PathLike[str] | str]],
        *options: str,
        port: int = 0,
        sanitizer: str = "",
        host: str = "127.0.0.1",
        inside: Sequence[str] = (),
    ) -> None:
        """inside: the words that run it in another network namespace."""
        self.host, self.inside = host, tuple(inside)
        self.subsystems, self.options, self.port, self.sanitizer = subsystems, options, port, sanitizer
        self.directory = tempfile.TemporaryDirectory(prefix="kvfs-enclosure-")
        self.log = open(pathlib.Path(self.directory.name) / "log", "w+b")  # noqa: SIM115
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        words = [
            *self.inside,
            f"{REPOSITORY}/tools/nvme_tcp_target",
            "--listen",
            f"{self.host}:{self.port}",
            "--control",
            self.control_path,
            *self.options,
        ]
        for nqn, paths in self.subsystems.items():
            words += ["--subsystem", f"{nqn}={','.join(map(os.fspath, paths))}"]
        self.process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self.log,
            env={**os.environ, "KVFS_ENCLOSURE_SANITIZER": self.sanitizer},
        )
        assert self.process.stdout is not None
        watchdog = subprocess.Popen(["sh", "-c", f"sleep {START_TIMEOUT_S}; kill {self.process.pid}"])
        line = self.process.stdout.readline().decode()
        watchdog.kill()
        watchdog.wait()
        if not line.startswith("listening "):
            self._destroy()
            raise EnclosureError(f"it did not start: {self.said()}")
        self.port = int(line.rpartition(":")[2])
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        status = self.process.poll() if self.process else None
        if status is None:
            with contextlib.suppress(OSError, EnclosureError):
                self.control("quit")
            status = self._wait(20)
        said = self.said()
        self._destroy()
        if error is not None:
            error.add_note(f"the enclosure said:\n{said[-3000:]}")
        elif status != 0:
            raise EnclosureError(f"it ended with {status}: {said}")

    @property
    def control_path(self) -> str:
        return f"{self.directory.name}/control"

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def control(self, line: str) -> dict[str, Any]:
        """One command; its answer. Raises EnclosureError if it is refused."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(10 * slowness())
            connection.connect(self.control_path)
            connection.sendall(line.encode() + b"\n")
            with connection.makefile() as lines:
                answer: dict[str, Any] = json.loads(lines.readline())
        if not answer["ok"]:
            raise EnclosureError(f"{line}: {answer['error']}")
        return answer

    def status(self) -> dict[str, Any]:
        return self.control("status")

    def wait_connections(self, count: int, timeout_s: float = 30) -> None:
        wait_until(lambda: self.status()["connections"] == count, f"{count} connections", timeout_s=timeout_s)

    def said(self) -> str:
        self.log.seek(0)
        return self.log.read().decode(errors="replace")

    def kill(self) -> None:
        """As when the enclosure loses its power; leaving the `with` is no error then."""
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self._wait(10)
        self.process.returncode = 0

    def _wait(self, timeout_s: float) -> int | None:
        assert self.process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.wait(timeout_s)
        self.process.kill()
        self.process.wait()
        return None

    def _destroy(self) -> None:
        if self.process is not None:
            if self.process.poll() is None:
                self._wait(0)
            assert self.process.stdout is not None
            self.process.stdout.close()
        self.log.close()
        self.directory.cleanup()
