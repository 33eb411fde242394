"""A pod under test on one machine: devices, a redis-server, and nodes, each a pool directory with a mount."""

from __future__ import annotations

import contextlib
import errno
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any, Self, cast

import pytest
from helpers import Pool, requires_program, run, sanitizer_environment, slowness, wait_until

from kvfs.frontend.asking import ControlClient

# A pod promises news of a store or a removal within 50 ms; a busy machine gets more time.
NEWS_S = 10.0
# The longest that calls of a node may take while its engine is away; generous to a busy machine.
CALLS_S = 10.0


class Network:
    """Namespaces of the network: a hub with an engine and an enclosure, each at an address of its own, and the nodes.
    All end with the `with`."""

    engine, enclosure = "10.213.0.1", "10.213.0.2"

    def __init__(self, nodes: int) -> None:
        self._names = [f"kvfs-{os.getpid()}-{name}" for name in ("hub", *map(str, range(nodes)))]
        self._count = nodes
        self.hub = self._inside(0)

    def _inside(self, index: int) -> tuple[str, ...]:
        return "nsenter", f"--net=/run/netns/{self._names[index]}", "--"

    def node(self, number: int) -> tuple[str, ...]:
        """The words that run a command there."""
        return self._inside(number + 1)

    def _ip(self, index: int, *words: str) -> None:
        run("ip", "-n", self._names[index], *words)

    def __enter__(self) -> Self:
        requires_program("ip")
        try:
            for index, name in enumerate(self._names):
                if run("ip", "netns", "add", name, check=False).returncode != 0:
                    pytest.skip("no network namespaces here")
                self._ip(index, "link", "set", "lo", "up")
            for address in (self.engine, self.enclosure):
                self._ip(0, "address", "add", f"{address}/32", "dev", "lo")
            for node in range(self._count):
                end, other = f"10.213.{node + 1}.1", f"10.213.{node + 1}.2"
                words = ("link", "add", f"node{node}", "type", "veth", "peer", "name", "eth0", "netns")
                self._ip(0, *words, self._names[node + 1])
                self._ip(0, "address", "add", f"{end}/24", "dev", f"node{node}")
                self._ip(0, "link", "set", f"node{node}", "up")
                self._ip(node + 1, "address", "add", f"{other}/24", "dev", "eth0")
                self._ip(node + 1, "link", "set", "eth0", "up")
                self._ip(node + 1, "route", "add", "default", "via", end)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in self._names:
            run("ip", "netns", "del", name, check=False)

    @contextlib.contextmanager
    def cut(self, address: str, node: int) -> Iterator[None]:
        """Whatever this address sends to a node is lost meanwhile, without a word."""
        words = ("from", address, "to", f"10.213.{node + 1}.2", "blackhole")
        self._ip(0, "rule", "add", *words)
        try:
            yield
        finally:
            self._ip(0, "rule", "del", *words)


class Redis:
    """A redis-server of its own, without persistence: on a free port, or in a network on the usual one."""

    def __init__(self, directory: pathlib.Path, options: Sequence[str] = (), network: Network | None = None) -> None:
        if shutil.which("redis-server") is None:
            pytest.skip("needs redis-server (apt install redis-server)")
        self.directory, self.options, self.inside = directory, list(options), ()
        self.host, self.port = "127.0.0.1", 6379
        if network is None:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                self.port = free.getsockname()[1]
        else:
            self.host, self.inside = network.engine, network.hub
            self.options += ["--protected-mode", "no"]
        self.url = f"redis://{self.host}:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *options: str) -> None:
        words = [*self.inside, "redis-server", "--port", str(self.port), "--save", "", "--appendonly", "no", "--dir",
                 str(self.directory), "--bind", self.host, *options]  # fmt: skip
        words += self.options
        log = (self.directory / f"redis-{self.port}.log").open("ab")
        self._process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        log.close()
        wait_until(self._answers, f"redis-server at port {self.port}", timeout_s=20)

    def _answers(self) -> bool:
        words = (*self.inside, "redis-cli", "-h", self.host, "-p", str(self.port), "PING")
        return run(*words, timeout_s=20, check=False).stdout.startswith(("PONG", "NOAUTH"))

    def command(self, *words: str) -> str:
        return run(
            *self.inside, "redis-cli", "-h", self.host, "-p", str(self.port), *words, timeout_s=20
        ).stdout.strip()

    def signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """It answers nobody meanwhile."""
        self.signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.signal(signal.SIGCONT)

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(20)
            self._process = None


class Node(Pool):
    """One node: what helpers.Pool is, in a pod."""

    def __init__(self, pod: Pod, number: int) -> None:
        super().__init__()
        self.pod, self.number = pod, number
        if pod.network is not None:
            self.inside = pod.network.node(number)
        self.base = pod.base / f"node{number}"
        self.path, self.mount = self.base / "pool", self.base / "mount"
        self.mount.mkdir(parents=True)

    def stop(self) -> None:
        self._stop()

    def part(self) -> dict[str, Any]:
        """The pod, as the daemon tells of it."""
        with ControlClient(self.path) as client:
            return cast("dict[str, Any]", cast("dict[str, Any]", client.call("status"))["pod"])

    def signal(self, number: int) -> None:
        os.kill(self.pid(), number)

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """The daemon stands still meanwhile. Its mount must not be touched."""
        self.signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.signal(signal.SIGCONT)


class Pod:
    """`with Pod(nodes=2) as pod: pod.nodes[0].mount / "a"`. All nodes are mounted unless started=False."""

    def __init__(
        self, *, nodes: int = 2, devices: int = 2, size: str = "256M", create_args: Sequence[str] = (),
        started: bool = True, addresses: Sequence[str] = (), engines: int = 1, acl: str = "",
        user: str = "", network: Network | None = None,
    ) -> None:  # fmt: skip
        """acl: lines of the engines' users; user: the one of this pod. network: where engine and nodes live."""
        self.network = network
        self._engines, self._acl, self._user = engines, acl, user
        self._count, self._devices, self._size = nodes, devices, size
        self._create_args, self._started, self._addresses = tuple(create_args), started, tuple(addresses)
        self.nodes: list[Node] = []

    def __enter__(self) -> Self:
        self.base = pathlib.Path(tempfile.mkdtemp(prefix="kvfs-pod-"))
        self.base.chmod(0o755)
        acl: list[str] = []
        if self._acl:
            (self.base / "users.acl").write_text(self._acl)
            acl = ["--aclfile", str(self.base / "users.acl")]
        self.engines = [Redis(self.base, acl, self.network) for _ in range(self._engines)]
        self.redis = self.engines[0]
        try:
            for engine in self.engines:
                engine.start()
            self.devices = list(self._addresses) or [str(self.base / f"device{i}") for i in range(self._devices)]
            if not self._addresses:
                for device in self.devices:
                    run("truncate", "--size", self._size, device)
            where = [word for device in self.devices for word in ("--device", device)]
            self.nodes = [Node(self, i) for i in range(self._count)]
            urls = ",".join(map(self._url, self.engines))
            options = ("--engine", urls, "--nodes", str(self._count), *self._create_args)
            self.nodes[0].command("pod", "create", str(self.nodes[0].path), *where, *options)
            for node in self.nodes[1:]:
                node.command("pod", "join", str(node.path), *where)
            if self._started:
                for node in self.nodes:
                    node.start()
        except BaseException as error:
            self._annotate(error)
            self._destroy()
            raise
        return self

    def _url(self, engine: Redis) -> str:
        return engine.url.replace("//", f"//{self._user}@") if self._user else engine.url

    def kvfs(self, *words: str | os.PathLike[str], check: bool = True) -> subprocess.CompletedProcess[str]:
        return run(sys.executable, "-m", "kvfs", *words, check=check, environment=sanitizer_environment())

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self._annotate(error)
        self._destroy()

    def _annotate(self, error: BaseException) -> None:
        for node in self.nodes:
            error.add_note(f"--- node {node.number}: {node.path}/kvfs.log ---\n{node.log_tail()}")

    def _destroy(self) -> None:
        for node in self.nodes:
            with contextlib.suppress(OSError, ValueError):
                node.signal(signal.SIGCONT)
            node.stop()
        for engine in self.engines:
            engine.stop()
        if os.environ.get("KVFS_KEEP_POOL"):
            print(f"kept {self.base}", file=sys.stderr)
        else:
            shutil.rmtree(self.base, ignore_errors=True)


def found(path: pathlib.Path, data: bytes, timeout_s: float = NEWS_S) -> None:
    """Wait until the file has this content. Any other content is an error at once."""

    def there() -> bool:
        try:
            content = path.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return False
        assert content == data, f"{path}: {len(content)} bytes that were never stored under this name"
        return True

    wait_until(there, f"{path} as stored", timeout_s=timeout_s, interval_s=0.002)


def written_in_place(path: pathlib.Path, data: bytes) -> None:
    """As write_bytes(), beside another node that replaces the name. An open may be ESTALE then: it is to be repeated
    (docs/pod.md)."""
    for _ in range(100):
        try:
            opened = path.open("wb", buffering=0)
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
            continue
        with opened:
            assert opened.write(data) == len(data)
        return
    raise AssertionError(f"{path}: 100 opens were ESTALE")


def settle(nodes: Sequence[Node], timeout_s: float = 30.0) -> None:
    """Wait until each of these nodes hears of what each stores."""
    for node in nodes:
        name, data = f"settled-{node.number}-{time.monotonic_ns()}", os.urandom(8)
        (node.mount / name).write_bytes(data)
        for other in nodes:
            found(other.mount / name, data, timeout_s)


def missing(path: pathlib.Path, timeout_s: float = NEWS_S) -> None:
    """Wait until nothing has this name."""
    wait_until(lambda: not path.exists(), f"the end of {path}", timeout_s=timeout_s, interval_s=0.002)


def block(number: int, size: int = 1 << 20) -> bytes:
    """A block's content, by number."""
    word = number.to_bytes(8, "little")
    return word * (size // 8) + word[: size % 8]


@contextlib.contextmanager
def timed(limit_s: float, what: str) -> Iterator[None]:
    began = time.monotonic()
    yield
    took = time.monotonic() - began
    assert took < limit_s * slowness(), f"{what}: {took:.2f} s, at most {limit_s} s"


def all_calls(node: Node, name: str) -> None:
    """Whatever a client may ask of a node by files, in a bounded time."""
    with timed(CALLS_S, f"calls of node {node.number}"):
        top = node.mount / f"{name}-calls-{time.monotonic_ns()}"
        top.mkdir()
        (top / "a.tmp.1").write_bytes(block(1))
        os.rename(top / "a.tmp.1", top / "a")
        assert (top / "a").read_bytes() == block(1)
        assert os.listdir(top) == ["a"]
        assert not (top / "b").exists()
        os.statvfs(top)
        with (top / "a").open("r+b") as opened:
            opened.write(b"new")
            os.fsync(opened.fileno())
        (top / "a").unlink()
        top.rmdir()


def stored(node: Node, name: str, data: bytes) -> pathlib.Path:
    """As engines store: written aside, then renamed."""
    path = node.mount / name
    aside = path.with_name(path.name + f".tmp.{node.number}")
    aside.write_bytes(data)
    os.rename(aside, path)
    return path
