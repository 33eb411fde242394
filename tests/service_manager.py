"""A double of systemd, for a unit's descriptor store: it hears sd_notify(3), keeps descriptors, and starts the unit's
main process with them (sd_listen_fds(3)).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pathlib
import socket
import subprocess
import sys
import threading

import helpers

_SYS_KCMP = {"x86_64": 312, "aarch64": 272}[os.uname().machine]
# As systemd does before execve(2): descriptors from 3 on, and the number of this very process.
_EXEC = """
import fcntl, os, sys
given = [int(word) for word in sys.argv[1].split(",") if word]
high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 100) for fd in given]
for fd in given:
    os.close(fd)
for i, fd in enumerate(high):
    os.dup2(fd, 3 + i)
if given:
    os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS=str(len(given)), LISTEN_FDNAMES=sys.argv[2])
os.execv(sys.executable, [sys.executable, "-m", "kvfs", *sys.argv[3:]])
"""


def is_same_file(one: int, other: int) -> bool:
    """Whether two descriptors of this process are of one open file."""
    pid = os.getpid()
    return ctypes.CDLL(None).syscall(_SYS_KCMP, pid, pid, 0, one, other) == 0


class ServiceManager:
    """Of one unit. `maximum`: its FileDescriptorStoreMax=. `tells`: it tells that to the process, as from version 254
    on."""

    def __init__(self, base: pathlib.Path, maximum: int = 32, *, tells: bool = False) -> None:
        self.base, self.maximum, self.tells = base, maximum, tells
        self.stored: list[tuple[str, int]] = []
        self.messages: list[dict[str, str]] = []
        self.process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self.path = base / "notify.sock"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self._socket.bind(os.fspath(self.path))
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            data, fds, _, _ = socket.recv_fds(self._socket, 4096, 64)
            if data == b"end":
                return
            words = dict(line.split("=", 1) for line in data.decode().splitlines())
            with self._lock:
                self.messages.append(words)
                if words.get("FDSTORE") == "1":
                    assert words["FDPOLL"] == "0"
                    for fd in fds:
                        self._store(words.get("FDNAME", "stored"), fd)
                    continue
                if words.get("FDSTOREREMOVE") == "1":
                    self._remove(words["FDNAME"])
                for fd in fds:  # BARRIER=1: its end is the answer
                    os.close(fd)

    def _store(self, name: str, fd: int) -> None:
        if len(self.stored) >= self.maximum or any(is_same_file(fd, kept) for _, kept in self.stored):
            os.close(fd)
        else:
            self.stored.append((name, fd))

    def _remove(self, name: str) -> None:
        for entry in [entry for entry in self.stored if entry[0] == name]:
            self.stored.remove(entry)
            os.close(entry[1])

    def names(self) -> list[str]:
        with self._lock:
            return sorted(name for name, _ in self.stored)

    def put(self, name: str, fd: int) -> None:
        """Into the store, by the test."""
        with self._lock:
            self.stored.append((name, fd))

    def take(self, name: str, count: int = 64) -> None:
        """Out of the store."""
        with self._lock:
            for entry in [entry for entry in self.stored if entry[0] == name][:count]:
                self.stored.remove(entry)
                os.close(entry[1])

    def start(self, *words: str, environment: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
        """Start the main process, and return once it is ready or has ended."""
        with self._lock:
            self.messages.clear()
            fds, names = [fd for _, fd in self.stored], ":".join(name for name, _ in self.stored)
        env = {**os.environ, **(environment or {}), "NOTIFY_SOCKET": str(self.path)}
        env |= {"FDSTORE": str(self.maximum)} if self.tells else {}
        with (self.base / "unit.log").open("ab") as log:
            process = self.process = subprocess.Popen(
                [sys.executable, "-c", _EXEC, ",".join(map(str, fds)), names, *words],
                cwd=helpers.REPOSITORY, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env, pass_fds=fds,
            )  # fmt: skip
        helpers.wait_until(lambda: self.is_ready() or process.poll() is not None, "the unit's start", timeout_s=90)
        return process

    def is_ready(self) -> bool:
        with self._lock:
            return {"READY": "1"} in self.messages

    def log(self) -> str:
        return (self.base / "unit.log").read_text()

    def close(self) -> None:
        """Stop the unit: its store goes, then its process."""
        with self._lock:
            for _, fd in self.stored:
                os.close(fd)
            self.stored.clear()
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
        if self.process is not None:
            self.process.wait()
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.sendto(b"end", os.fspath(self.path))
        self._thread.join(10)
        self._socket.close()
