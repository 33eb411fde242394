"""The daemon: builds every part of a pool that is mounted, exported or both, runs them, takes them down in order. The
one module that builds objects.

The order matters. Up: limits, store (its lock, labels and epoch first), session, control socket, exports, and last the
mount, so that whoever sees it gets answers. Down: exports and mount first, then the session, then the store, which
seals what is dirty and marks the pool clean.
"""

from __future__ import annotations

import gc
import json
import logging
import logging.handlers
import os
import platform
import resource
import select
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from enum import IntEnum
from io import TextIOWrapper
from pathlib import Path
from typing import NoReturn, cast

import trio

from kvfs.errors import DeadlineError, KvfsError, PoolError, UsageError, first_error, printable
from kvfs.frontend import mount as mounting
from kvfs.frontend.calls import Calls
from kvfs.frontend.clients import HOSTS_TIMEOUT_S, Clients
from kvfs.frontend.control import Arguments, Command, ControlServer, Progress
from kvfs.frontend.endpoint import Endpoint, listen
from kvfs.frontend.fuse import Session
from kvfs.frontend.status import live_counters, live_status
from kvfs.frontend.virtiofs import Export, Exports
from kvfs.guard import check_owner, open_own
from kvfs.logs import Escaping, spare
from kvfs.namespace.files import Namespace
from kvfs.namespace.survey import DEPTH_MAX, Survey
from kvfs.pool.devices import place_of
from kvfs.store.opening import StoreOptions
from kvfs.store.store import Store
from kvfs.types import PAGE_SIZE, InodeNumber

log = logging.getLogger(__name__)

PID_NAME = "kvfs.pid"
LOG_NAME = "kvfs.log"
LOCK_NAME = "lock"
# What READ requests may ask for at most: 4 MiB where the kernel allows 1024 pages a request.
MAX_READ = 4 << 20
FUSE_PAGES = 1024
FUSE_PAGES_PATH = Path("/proc/sys/fs/fuse/max_pages_limit")
# Seconds that the kernel can be told (fuse_init_out.request_timeout): it rounds up what is less, and looks as often.
REQUEST_TIMEOUT_MIN_S, REQUEST_TIMEOUT_MAX_S = 15, 65535
# Files that are open when the daemon is told to go get this long to be closed.
GRACE_S = 10.0
ANSWER_TIMEOUT_S = 30.0
# Of the threads that answer requests: the kernel holds a directory's lock, and others wait, until they do.
_NICENESS = -10
# Of the garbage collector: most of what a request makes goes by itself.
_GC_THRESHOLDS = (20_000, 20, 20)


# Of a slow operation, by FUSE opcode (linux/fuse.h); "in": the inode is the directory of the name that was asked for.
_OPERATIONS = {
    1: "lookup in", 4: "setattr of", 5: "readlink of", 6: "symlink in", 8: "mknod in", 9: "mkdir in", 10: "unlink in",
    11: "rmdir in", 12: "rename in", 14: "open of", 15: "read of", 16: "write of", 17: "statfs of", 20: "fsync of",
    21: "setxattr of", 22: "getxattr of", 23: "listxattr of", 24: "removexattr of", 25: "flush of", 27: "opendir of",
    28: "readdir of", 30: "fsyncdir of", 34: "access of", 35: "create in", 43: "fallocate of", 44: "readdir of",
    45: "rename in",
}  # fmt: skip


class Event(IntEnum):
    """The events of the data plane that are not the store's (enum kvfs_event_type)."""

    IDLE = 3
    TRANSPORTS_GONE = 6
    GUEST = 8
    SLOW = 13


@dataclass(frozen=True, slots=True)
class MountOptions:
    """A `kvfs mount` or `kvfs export` command line. None: the default of the part it belongs to; no mount point: no
    mount."""

    pool: Path
    mountpoint: Path | None = None
    exports: tuple[Export, ...] = ()
    foreground: bool = False
    allow_other: bool = False
    options: tuple[str, ...] = ()
    staging_size: int | None = None
    read_memory_size: int | None = None
    server_threads: int | None = None
    io_timeout_ms: int | None = None
    # The kernel ends the mount when a request has waited this long.
    request_timeout_s: int | None = None
    # What takes longer is logged; 0: nothing is.
    slow_ms: int = 1000
    force: bool = False
    start_timeout_s: float = 120.0
    # Where Prometheus finds the metrics.
    metrics: tuple[str, int] | None = None


# ---- starting ----


def _own_limit_ms(request_timeout_s: int | None, limit_ms: int) -> int:
    """What one request may take here: one that is slow fails by itself before the kernel ends the mount for it."""
    return limit_ms if request_timeout_s is None else min(limit_ms, request_timeout_s * 1000 * 2 // 3)


def _check_request_timeout(options: MountOptions) -> None:
    from kvfs.doctor import REQUEST_TIMEOUT_KERNEL, kernel_version

    timeout_s, release = options.request_timeout_s, platform.release()
    if timeout_s is None:
        return
    if not REQUEST_TIMEOUT_MIN_S <= timeout_s <= REQUEST_TIMEOUT_MAX_S:
        raise UsageError(
            f"--request-timeout {timeout_s}: {REQUEST_TIMEOUT_MIN_S} to {REQUEST_TIMEOUT_MAX_S} s are possible"
        )
    if kernel_version(release) < REQUEST_TIMEOUT_KERNEL:
        raise UsageError(f"--request-timeout {timeout_s}: Linux 6.15 or newer can do that; this is {release}")
    io_timeout_ms = options.io_timeout_ms or StoreOptions().io_timeout_ms
    if io_timeout_ms > _own_limit_ms(timeout_s, io_timeout_ms):
        raise UsageError(
            f"--request-timeout {timeout_s}: a device may take {io_timeout_ms} ms (--io-timeout), "
            f"so the kernel must wait {-(-io_timeout_ms * 3 // 2000)} s or longer"
        )


def start(options: MountOptions) -> int:
    """Mount the pool, export it, or both. In the background: return the daemon's pid once the mount answers and every
    socket listens. In the foreground: return when it has ended.

    Raises KvfsError with what went wrong; the mount point and the pool are then as they were.
    """
    assert options.mountpoint is not None or options.exports
    _check_request_timeout(options)
    if options.foreground:
        _log_to_stderr(logging.INFO)
        _run(options, _Reporter(None))
        return os.getpid()
    return _start_in_background(options)


def _start_in_background(options: MountOptions) -> int:
    # The child is a fork rather than a new interpreter: it sees the same files and needs no second start. Nothing here
    # has threads yet.
    reading, writing = os.pipe2(os.O_CLOEXEC)
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        _child(options, _Reporter(writing))
    os.close(writing)
    try:
        return _relay(pid, reading, options)
    except KeyboardInterrupt:
        os.kill(pid, signal.SIGTERM)
        raise
    finally:
        os.close(reading)


def _relay(pid: int, reading: int, options: MountOptions) -> int:
    """Pass on what the starting daemon says, until it is ready or has failed."""
    poller = select.poll()
    poller.register(reading, select.POLLIN)
    pending = b""
    while True:
        if not poller.poll(options.start_timeout_s * 1000):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise DeadlineError(
                f"{options.pool}: the daemon said nothing for {options.start_timeout_s:g} s while starting; stopped"
            )
        data = os.read(reading, 65536)
        pending += data
        *lines, pending = pending.split(b"\n")
        for line in lines:
            message = json.loads(line)
            if "ready" in message:
                return pid
            if "error" in message:
                os.waitpid(pid, 0)
                failure = (UsageError if message.get("usage") else KvfsError)(message["error"])
                failure.errno = message["errno"]
                raise failure
            print(printable(f"kvfs: {message.get('info')}"), file=sys.stderr, flush=True)
        if not data:
            _, status = os.waitpid(pid, 0)
            code = os.waitstatus_to_exitcode(status)
            reason = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
            raise KvfsError(
                f"{options.pool}: the daemon ended while starting ({reason}); see {options.pool / LOG_NAME}"
            )


def _child(options: MountOptions, reporter: _Reporter) -> NoReturn:
    """The daemon's life after the fork; never returns into the command line."""
    status = 1
    try:
        os.setsid()
        os.chdir("/")
        devnull = os.open(os.devnull, os.O_RDWR)
        os.dup2(devnull, 0)
        os.dup2(devnull, 1)
        _log_to_stderr(logging.WARNING)
        _run(options, reporter)
        status = 0
    except KvfsError as error:
        if reporter.done:
            log.error("%s", error)
        reporter.error(error)
    except OSError as error:
        _log_failure(options.pool, reporter)
        reporter.error(KvfsError(f"{error.filename or options.pool}: {error.strerror or error}"))
    except BaseException as error:
        _log_failure(options.pool, reporter)
        reporter.error(KvfsError(f"{options.pool}: internal error: {type(error).__name__}: {error}"))
    finally:
        logging.shutdown()
        os._exit(status)


def _log_failure(pool: Path, reporter: _Reporter) -> None:
    """Where it failed is for the log; whoever waits gets one line."""
    if not reporter.done and os.environ.get("KVFS_DEBUG") != "1":
        if not (pool / "pool.toml").exists():
            return
        try:
            check_owner(pool)
            _log_to_file(pool / LOG_NAME)
        except PoolError as error:
            log.error("%s", error)
    log.exception("the daemon failed")


class _Reporter:
    """The starting daemon's words to the command line that waits for it."""

    def __init__(self, fd: int | None) -> None:
        self._fd = fd

    @property
    def done(self) -> bool:
        """Nobody waits any more: what there is to say belongs into the log."""
        return self._fd is None

    def _send(self, message: Mapping[str, object]) -> None:
        if self._fd is not None:
            with suppress(BrokenPipeError):
                os.write(self._fd, json.dumps(message).encode() + b"\n")

    def info(self, text: str) -> None:
        if self._fd is None:
            log.info("%s", text)
        self._send({"info": text})

    def error(self, error: KvfsError) -> None:
        self._send({"error": str(error), "errno": error.errno, "usage": isinstance(error, UsageError)})

    def ready(self, pool: Path) -> None:
        """From here on the daemon speaks to its log alone."""
        if self._fd is None:
            return
        _log_to_file(pool / LOG_NAME)
        self._send({"ready": os.getpid()})
        os.close(self._fd)
        self._fd = None


_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def _log_to_stderr(level: int) -> None:
    handler = spare(logging.StreamHandler(sys.stderr))
    handler.setFormatter(Escaping(_FORMAT if level <= logging.INFO else "kvfs: %(message)s"))
    handler.setLevel(level)
    # What stderr is not told is kept for the log file.
    early = logging.handlers.MemoryHandler(sys.maxsize, flushLevel=sys.maxsize)
    handlers = [handler, early] if level > logging.INFO else [handler]
    logging.basicConfig(level=logging.INFO, handlers=handlers, force=True)


class _LogFile(logging.handlers.WatchedFileHandler):
    """A rotated log is noticed and made anew. One that cannot be costs no more than the log."""

    def _open(self) -> TextIOWrapper:
        fd = open_own(Path(self.baseFilename), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        return cast(TextIOWrapper, open(fd, self.mode, encoding=self.encoding, errors=self.errors))

    def emit(self, record: logging.LogRecord) -> None:
        try:
            super().emit(record)
        except (OSError, PoolError):
            with suppress(OSError, ValueError):
                print(self.format(record), file=sys.stderr, flush=True)


def _log_to_file(path: Path) -> None:
    handler = spare(_LogFile(path))
    handler.setFormatter(Escaping(_FORMAT))
    for early in logging.getLogger().handlers:
        if isinstance(early, logging.handlers.MemoryHandler):
            early.setTarget(handler)  # which it gives all to when it is closed, next
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    fd = open_own(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)


# ---- running ----


def _run(options: MountOptions, reporter: _Reporter) -> None:
    mountpoint = None
    mounting.refuse_inside(options.pool, "a pool")
    if options.mountpoint is not None:
        mountpoint = mounting.check_mountpoint(options.mountpoint, options.pool)
        mounting.check_device()
        _raise_fuse_pages()
    _raise_limits()
    try:
        trio.run(_serve, options, mountpoint, reporter)
    except BaseExceptionGroup as group:
        raise first_error(group) from None


def change_device(pool: Path, action: str, arguments: Mapping[str, object]) -> Mapping[str, object]:
    """Remove or replace a device of a pool that nobody uses: as its daemon would. KvfsError."""

    async def change() -> Mapping[str, object]:
        async with Store.open(pool) as store:
            return await device_command(store, action, arguments)

    try:
        return trio.run(change)
    except BaseExceptionGroup as group:
        raise first_error(group) from None


async def device_command(store: Store, action: str, arguments: Mapping[str, object]) -> Mapping[str, object]:
    """`kvfs device remove` and `replace`."""
    device = store.service.find(str(arguments.get("device")))
    if action == "remove":
        return {"device": device, "lost_blocks": await store.remove_device(device, drain=bool(arguments.get("drain")))}
    path = arguments.get("path")
    place = place_of(path) if isinstance(path, str) else Path()
    if isinstance(place, Path) and not place.is_absolute():
        raise UsageError(f"device replace: path {path!r} is no absolute path")
    count = await store.replace_device(device, place, force=bool(arguments.get("force")))
    return {"device": device, "path": path, "lost_blocks": count}


def _raise_limits() -> None:
    """As many descriptors and as much locked memory as this user may have. What is then too little is said by who needs
    it."""
    for what, wanted in ((resource.RLIMIT_NOFILE, 1 << 17), (resource.RLIMIT_MEMLOCK, resource.RLIM_INFINITY)):
        _, hard = resource.getrlimit(what)
        with suppress(OSError, ValueError):
            if os.geteuid() == 0 and hard != resource.RLIM_INFINITY:
                resource.setrlimit(what, (wanted, wanted))
                continue
        with suppress(OSError, ValueError):
            resource.setrlimit(what, (hard, hard))


def _raise_fuse_pages() -> None:
    """Let requests be of 4 MiB, where this user may decide that."""
    if os.geteuid() == 0 and _fuse_pages() < FUSE_PAGES and FUSE_PAGES_PATH.exists():
        with suppress(OSError):
            FUSE_PAGES_PATH.write_text(f"{FUSE_PAGES}\n")
            log.info("fs.fuse.max_pages_limit raised to %d", FUSE_PAGES)


def _fuse_pages() -> int:
    """Pages that one request may have: a limit since kernel 6.13, 256 before."""
    try:
        return int(FUSE_PAGES_PATH.read_text())
    except (OSError, ValueError):
        return 256


async def _serve(options: MountOptions, mountpoint: str | None, reporter: _Reporter) -> None:
    daemon = Daemon(options, mountpoint)
    async with Store.open(options.pool, daemon.store_options(reporter)) as store:
        for note in store.notes:
            reporter.info(note)
        for reason in store.service.missing():
            reporter.info(f"degraded: {reason}; what lies there is not there until it is back")
        namespace = Namespace(store)
        clients = Clients(store, namespace)
        control = ControlServer(options.pool, daemon.commands(), clients.serve)
        with _pid_file(options.pool), closing(control), closing(Exports(options.exports, store.plane)) as exports:
            # The session's end of the socket is pyfuse3's to close from here on.
            with closing(Session(namespace, store.plane.session_open())) as session:
                await daemon.run(store, namespace, session, control, clients, exports, reporter)


@contextmanager
def _pid_file(pool: Path) -> Iterator[None]:
    path = pool / PID_NAME
    fd = open_own(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        os.write(fd, f"{os.getpid()}\n".encode())
    finally:
        os.close(fd)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def _tell_manager(state: str) -> None:
    """Tell systemd, if it has started us with Type=notify (sd_notify(3))."""
    path = os.environ.get("NOTIFY_SOCKET", "")
    if not path.startswith(("/", "@")):
        return
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
        sender.connect(path.replace("@", "\0", 1) if path[0] == "@" else path)
        sender.send(state.encode())


class Daemon:
    """A pool that is mounted or exported: its tasks, its commands, its end."""

    _store: Store
    _namespace: Namespace
    _clients: Clients
    _exports: Exports
    _survey: Survey

    def __init__(self, options: MountOptions, mountpoint: str | None) -> None:
        self._options = options
        self._mountpoint = mountpoint
        self._started_s = time.time()
        self._max_read = min(MAX_READ, _fuse_pages() * PAGE_SIZE)
        # Set when the last transport is gone: nobody can send a request any more.
        self._gone = trio.Event()
        self._mounted = False
        self._ready = False
        self._stop = trio.Event()

    def store_options(self, reporter: _Reporter) -> StoreOptions:
        """The store's options, as the command line has them."""
        asked, default = self._options, StoreOptions()
        uses = [f"exported at {export.socket}" for export in asked.exports]
        if self._mountpoint is not None:
            uses.insert(0, f"mounted at {self._mountpoint}")
        return StoreOptions(
            staging_size=default.staging_size if asked.staging_size is None else asked.staging_size,
            read_memory_size=default.read_memory_size if asked.read_memory_size is None else asked.read_memory_size,
            server_threads=asked.server_threads or default.server_threads,
            io_timeout_ms=asked.io_timeout_ms or default.io_timeout_ms,
            kernel_timeout_s=asked.request_timeout_s or 0,
            request_timeout_ms=_own_limit_ms(asked.request_timeout_s, default.request_timeout_ms),
            slow_ms=asked.slow_ms,
            max_read=self._max_read,
            on_event=self._on_event,
            on_devices=self._on_devices,
            use=", ".join(uses),
            take_over=asked.force,
            on_wait=reporter.info,
        )

    async def run(
        self, store: Store, namespace: Namespace, session: Session, control: ControlServer, clients: Clients,
        exports: Exports, reporter: _Reporter,
    ) -> None:  # fmt: skip
        """Mount and export, serve, and return when the last transport is gone and the session has ended."""
        self._store, self._namespace, self._clients, self._exports = store, namespace, clients, exports
        self._survey = Survey(store.index, store.plane, store.pins.numbers)
        with suppress(PermissionError):
            os.setpriority(os.PRIO_PROCESS, 0, _NICENESS)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._store.run)
            await nursery.start(Calls(namespace, store.plane).run)
            nursery.start_soon(session.run)
            nursery.start_soon(self._start, nursery, control, reporter)
            try:
                await self._gone.wait()
            finally:
                session.stop()
                if self._mountpoint is not None and self._mounted and not self._ready and not self._gone.is_set():
                    # The start has failed: whoever asked for the mount finds the directory as it was.
                    with suppress(KvfsError):
                        mounting.unmount(self._mountpoint, lazy=True)
            await clients.goodbye()
            nursery.cancel_scope.cancel()

    async def _start(self, nursery: trio.Nursery, control: ControlServer, reporter: _Reporter) -> None:
        pool = self._options.pool
        self._exports.serve()
        if self._mountpoint is not None:
            self._store.plane.fuse_add(await self._mount(self._mountpoint))
        # Before anybody hears that we are ready: a signal that comes then must not kill.
        await nursery.start(self._stop_on_signal)
        nursery.start_soon(self._end_on_stop)
        nursery.start_soon(control.run)
        if self._mountpoint is not None:
            await self._wait_answer(self._mountpoint)
        if self._options.metrics is not None:
            listeners = await listen(self._options.metrics)
            nursery.start_soon(Endpoint(self._collect).run, listeners)
        self._ready = True
        # What is there now stays: no collection need look at it, and none is needed often.
        gc.freeze()
        gc.set_threshold(*_GC_THRESHOLDS)
        reporter.ready(pool)
        _tell_manager("READY=1")
        if self._mountpoint is not None:
            log.info("pool %s mounted at %s by pid %d", pool, self._mountpoint, os.getpid())
        for export in self._options.exports:
            log.info("pool %s exported at %s by pid %d", pool, export.socket, os.getpid())
        for note in self._store.notes:
            log.warning("%s", note)

    async def _mount(self, mountpoint: str) -> int:
        options = self._options
        fd = await trio.to_thread.run_sync(
            lambda: mounting.mount(
                mounting.resolve(options.pool),
                mountpoint,
                max_read=self._max_read,
                allow_other=options.allow_other,
                options=options.options,
            )
        )
        self._mounted = True
        return fd

    async def _wait_answer(self, mountpoint: str) -> None:
        """Wait until a request through the mount is answered."""
        try:
            with trio.fail_after(ANSWER_TIMEOUT_S):
                await trio.to_thread.run_sync(os.statvfs, mountpoint, abandon_on_cancel=True)
        except (trio.TooSlowError, OSError) as error:
            with suppress(KvfsError):
                await trio.to_thread.run_sync(lambda: mounting.unmount(mountpoint, lazy=True))
            raise KvfsError(f"{mountpoint}: mounted, but gave no answer: {error or 'deadline'}") from error

    def _mounts(self) -> list[str]:
        """Where it is mounted now. With exports the daemon outlives its mount."""
        if self._mountpoint is None:
            return []
        present = mounting.find_mount(self._mountpoint)
        ours = present is not None and present.is_kvfs and present.source == mounting.resolve(self._options.pool)
        return [self._mountpoint] if ours else []

    # ---- the end ----

    def _on_event(self, kind: int, inode: int, value: int) -> None:
        """What the store passes on of the data plane's events."""
        if kind == Event.TRANSPORTS_GONE:
            # Unmounted, or the connection was aborted, and nothing is exported: nobody can send a request any more.
            # Whoever mounts now waits; what comes before the store is closed (goodbyes to clients) may take a while.
            self._store.ending()
            self._gone.set()
        elif kind == Event.IDLE:
            self._namespace.idle(InodeNumber(inode))
        elif kind == Event.GUEST:
            self._exports.broken(inode, value >> 32, value & 0xFFFFFFFF)
        elif kind == Event.SLOW:
            self._tell_slow(InodeNumber(inode), value >> 56, value & (1 << 56) - 1)

    def _tell_slow(self, number: InodeNumber, opcode: int, took_us: int) -> None:
        path = self._namespace.find_path(number)
        where = f"inode {number}" if path is None else f"{printable(os.fsdecode(path))} (inode {number})"
        what = _OPERATIONS.get(opcode, f"request {opcode} of")
        log.warning("slow %s %s: %s ms", what, where, f"{took_us // 1000:,}")

    def _on_devices(self) -> None:
        # They hold descriptors of their own, and learn of the new ones when they connect again.
        if hasattr(self, "_clients"):
            self._clients.hang_up()

    async def _stop_on_signal(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            task_status.started()
            async for number in signals:
                log.info("%s: ending", signal.Signals(number).name)
                self._stop.set()

    async def _end_on_stop(self) -> None:
        await self._stop.wait()
        _tell_manager("STOPPING=1")
        self._store.ending()
        for mountpoint in self._mounts():
            await self._unmount(mountpoint)
        self._exports.stop()
        with trio.move_on_after(GRACE_S):
            await self._gone.wait()
        self._gone.set()

    async def _unmount(self, mountpoint: str) -> None:
        try:
            await trio.to_thread.run_sync(lambda: mounting.unmount(mountpoint), abandon_on_cancel=True)
        except KvfsError as error:
            log.warning("%s; files that are open get %.0f s", error, GRACE_S)
            with suppress(KvfsError):
                await trio.to_thread.run_sync(lambda: mounting.unmount(mountpoint, lazy=True), abandon_on_cancel=True)

    # ---- commands ----

    def commands(self) -> Mapping[str, Command]:
        """What the control socket may ask for."""
        return {
            "status": self._command_status,
            "list": self._command_list,
            "pins": self._command_pins,
            "evict": self._command_evict,
            "sync": self._command_sync,
            "device_remove": self._command_device_remove,
            "device_replace": self._command_device_replace,
            "stop": self._command_stop,
        }

    async def _collect(self) -> list[Mapping[str, object]]:
        return [self._status()]

    async def _command_status(self, arguments: Arguments, progress: Progress) -> object:
        return self._status()

    def _status(self) -> dict[str, object]:
        counters = live_counters(self._store, self._clients)
        exports = self._exports.statistics()
        return live_status(self._store, counters, self._options.pool, self._mounts(), exports, self._started_s)

    async def _command_list(self, arguments: Arguments, progress: Progress) -> object:
        depth = arguments.get("depth", 1)
        if not isinstance(depth, int) or not 0 <= depth <= DEPTH_MAX:
            raise UsageError(f"list: depth {depth!r}; 0 to {DEPTH_MAX}")
        return await self._telling(lambda: self._survey.take(depth), progress)

    async def _command_pins(self, arguments: Arguments, progress: Progress) -> object:
        return {"pins": self._survey.pins()}

    async def _command_sync(self, arguments: Arguments, progress: Progress) -> object:
        await self._namespace.sync()
        return {}

    async def _command_device_remove(self, arguments: Arguments, progress: Progress) -> object:
        return await self._telling(lambda: device_command(self._store, "remove", arguments), progress)

    async def _command_device_replace(self, arguments: Arguments, progress: Progress) -> object:
        return await self._telling(lambda: device_command(self._store, "replace", arguments), progress)

    async def _telling(self, work: Callable[[], Awaitable[object]], progress: Progress) -> object:
        """What may take long: once a second the client hears that it goes on."""

        async def tell() -> None:
            while True:
                await trio.sleep(1)
                with suppress(trio.BrokenResourceError, trio.ClosedResourceError, trio.TooSlowError):
                    await progress({})

        result: object = None
        failure: KvfsError | None = None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(tell)
            try:
                result = await work()
            except KvfsError as error:
                failure = error
            nursery.cancel_scope.cancel()
        if failure is not None:
            raise failure
        return result

    async def _command_stop(self, arguments: Arguments, progress: Progress) -> object:
        self._stop.set()
        return {"pid": os.getpid()}

    async def _command_evict(self, arguments: Arguments, progress: Progress) -> object:
        """Free space; tells once a second how far it is."""
        size, before = arguments.get("size"), live_counters(self._store, self._clients)
        if arguments.get("all"):
            size = None
        elif not isinstance(size, int) or isinstance(size, bool) or size < 0:
            raise UsageError(f"evict: size {size!r} is no number of bytes")
        done = wanted = 0
        failure: KvfsError | None = None

        def note(freed: int, total: int) -> None:
            nonlocal done, wanted
            done, wanted = freed, total

        async def tell() -> None:
            while True:
                await trio.sleep(1)
                with suppress(trio.BrokenResourceError, trio.ClosedResourceError, trio.TooSlowError):
                    await progress({"freed": done, "wanted": wanted})

        async with trio.open_nursery() as nursery:
            nursery.start_soon(tell)
            try:
                await self._store.evict(size, note)
            except KvfsError as error:
                failure = error
            nursery.cancel_scope.cancel()
        if failure is not None:
            raise failure
        # Who asks a mount after the answer sees what has gone.
        with trio.move_on_after(HOSTS_TIMEOUT_S), suppress(KvfsError):
            await self._store.plane.notify_flush()
        after = live_counters(self._store, self._clients)
        names = ("evicted_segments", "evicted_blocks", "evicted_bytes")
        result: dict[str, object] = {name: after.get(name, 0) - before.get(name, 0) for name in names}
        if size is None or done < wanted:
            result["kept"] = {
                why: {
                    "blocks": kept.blocks,
                    "bytes": kept.bytes,
                    "names": [os.fsdecode(self._namespace.path(number)) for number in kept.inodes],
                }
                for why, kept in (await self._store.evictor.kept()).items()
            }
        return result
