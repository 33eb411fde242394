"""A virtio-fs back end without a guest: kvfs's export against virtiofsd over ext4, driven from user space.

native/tools/virtiofs_client.c plays the guest's driver on the same kind of virtqueue: no emulated CPU stands between.
A run is of one case on one side for half a second, and sides alternate. The peer reads the device where O_DIRECT is
asked for, as kvfs does.

CPU is that of the back end's process with all its threads, kernel threads of its io_uring among them. On files, loop
devices copy the peer's bytes in kernel threads that no process owns. So the machine's CPU without the client's stands
beside it; that figure needs a machine that does nothing else.
"""

from __future__ import annotations

import contextlib
import filecmp
import functools
import os
import selectors
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from benches.common import (
    DEVICE_COUNT,
    GIB,
    MIB,
    BenchError,
    Json,
    MissingError,
    column_at,
    latency_points,
    machine_cpu_s,
    number_at,
    parse_json,
    process_cpu_s,
    rates,
)
from benches.guest import children, virtiofsd
from benches.rig import Kvfs, Rig, filesystem

OURS, PEER = "kvfs", "virtiofsd/ext4"
FILE = "read"
STORED = "stored"
STORED_SIZE = 3 * 64 * 2 * MIB  # names that are stored again and again, old and new blocks, and as much to spare
GRACE_S = 60.0  # beyond a case's seconds: more than the client's own deadline of a request


@dataclass(frozen=True, slots=True)
class _Case:
    command: str  # of the client
    what: str
    depth: int
    path: str = FILE
    target: float | None = None  # of throughput
    cpu_target: float | None = None


CASES = (
    _Case("read-4k", "4 KiB reads", 1),
    _Case("read-4k", "4 KiB reads", 16),
    _Case("read-1m", "1 MiB reads", 1),
    _Case("read-1m", "1 MiB reads", 8, target=1.2, cpu_target=0.8),
    _Case("read-4m", "4 MiB reads", 2),
    _Case("store-2m", "stores of 2 MiB", 4, path=STORED),
)


class Driver:
    """virtiofs_client on one back end: commands in, a JSON document for each out."""

    def __init__(self, process: subprocess.Popen[bytes], errors: IO[bytes]) -> None:
        self._process, self._errors = process, errors
        self.pid = process.pid

    def ask(self, command: str, *, timeout_s: float = GRACE_S) -> Json:
        """Raises BenchError with the client's own words if it ends, or if it is late."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(f"{command}\n".encode())
            self._process.stdin.flush()
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            if not selector.select(timeout_s):
                raise BenchError(f"virtiofs_client: {command}: not done in {timeout_s:.0f} s")
        line = self._process.stdout.readline().decode()
        if not line.endswith("\n"):
            status = self._process.wait(GRACE_S)
            self._errors.seek(0)
            said = self._errors.read().decode(errors="replace").strip()
            raise BenchError(f"virtiofs_client: {command}: ended with {status}: {said[-1000:]}")
        return parse_json(line, "virtiofs_client")

    def end(self) -> None:
        """End it in order; killed if it is late."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()


@contextlib.contextmanager
def driver(program: Path, socket_path: Path) -> Iterator[Driver]:
    if not program.exists():
        raise MissingError(f"needs {program}: tools/bench_clients builds it")
    words = [program, socket_path]
    pipe = subprocess.PIPE
    with tempfile.TemporaryFile() as errors, subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=errors) as process:
        one = Driver(process, errors)
        try:
            yield one
        finally:
            one.end()


@dataclass(slots=True)
class _Side:
    driver: Driver
    pid: int

    def cpu_s(self) -> float:
        return sum(process_cpu_s(pid) for pid in (self.pid, *children(self.pid)))

    def run(self, case: _Case, seconds: float, index: int) -> Json:
        command = f"{case.command} {case.path} {case.depth} {seconds}"
        before, machine, client = self.cpu_s(), machine_cpu_s(), process_cpu_s(self.driver.pid)
        document = self.driver.ask(command, timeout_s=seconds + GRACE_S)
        client = process_cpu_s(self.driver.pid) - client
        host = max(machine_cpu_s() - machine - client, 0.001)  # in ticks of 10 ms
        return {**document, "daemon_cpu_s": self.cpu_s() - before, "host_cpu_s": host}


def case_vhost(rig: Rig) -> None:
    """4 KiB, 1 and 4 MiB reads and stores of 2 MiB on the request queue of each back end."""
    sides = _sides(rig)
    seconds = 0.1 if rig.bench.quick else 0.5
    for case in CASES:
        what = f"{case.what} by virtio-fs, no guest, depth {case.depth}"
        for side in sides.values():
            side.run(case, seconds / 4, 0)
        runs = {name: functools.partial(side.run, case, seconds) for name, side in sides.items()}
        results = rig.bench.interleave(runs)
        ours, theirs = results[OURS], results[PEER]
        details: Json = {"latency": latency_points(ours), "peer_latency": latency_points(theirs)}
        rig.add("vhost", what, "GB/s", rates(ours), PEER, rates(theirs), "share", case.target, details=details)
        p50, peer_p50 = column_at(ours, "latency_us", "p50"), column_at(theirs, "latency_us", "p50")
        rig.add("vhost", f"{what}: p50", "us", p50, PEER, peer_p50, "cost")
        for whose, who in {"daemon_cpu_s": "the back end", "host_cpu_s": "the machine without the client"}.items():
            goal = case.cpu_target if whose == "daemon_cpu_s" else None
            told = f"{what}: CPU of {who} a GiB"
            rig.add("vhost", told, "s/GiB", _cpu(ours, whose), PEER, _cpu(theirs, whose), "cost", goal)


def _cpu(documents: list[Json], whose: str) -> list[float]:
    return [number_at(one, whose) / number_at(one, "bytes") * GIB for one in documents]


def _sides(rig: Rig) -> dict[str, _Side]:
    """Both back ends, each with a file of the same bytes, which the client reads back before anything is measured."""
    base = rig.base / "vhost"
    pool = Kvfs(base / "kvfs", rig.make_devices("vhost", DEVICE_COUNT, rig.device_size))
    rig.stack.callback(pool.stop)
    pool.format()
    socket_path = base / "kvfs.socket"
    mounted = pool.mount("--virtiofs", f"{socket_path},tag={OURS}")
    size = min(rig.scale.working_set, DEVICE_COUNT * rig.device_size // 4)
    (device,) = rig.make_block_devices("vhost-peer", 1, size + STORED_SIZE + 192 * MIB)
    lower = rig.stack.enter_context(filesystem("ext4", [device], base / "ext4"))
    first = base / "first"
    rig.stack.callback(first.unlink, missing_ok=True)
    _fill(first, size)
    for root in (mounted.root, lower):
        (root / STORED).mkdir()
        _copy(first, root / FILE)
    os.sync()
    peer_socket = base / "peer.socket"
    peer_pid = rig.stack.enter_context(virtiofsd(lower, peer_socket, "cache=auto,allow_direct_io"))
    program = rig.bench.client_path.with_name("virtiofs_client")
    assert mounted.pid is not None
    sides = {}
    for name, pid, path in ((OURS, mounted.pid, socket_path), (PEER, peer_pid, peer_socket)):
        sides[name] = _Side(rig.stack.enter_context(driver(program, path)), pid)
        copied = base / "copied"
        sides[name].driver.ask(f"copy {FILE} {copied}")
        if not filecmp.cmp(first, copied, shallow=False):
            raise BenchError(f"{name}: the client read other bytes than were stored")
        copied.unlink()
    return sides


def _fill(path: Path, size: int) -> None:
    with path.open("wb", buffering=0) as file:
        for _ in range(size // MIB):
            file.write(os.urandom(MIB))


def _copy(source: Path, target: Path) -> None:
    with source.open("rb", buffering=0) as file, target.open("wb", buffering=0) as out:
        while chunk := file.read(MIB):
            out.write(chunk)
