"""The daemon: builds every part of a pool that is mounted, exported or both, runs them, takes them down in order. The
one module that builds objects.

The order matters. Up: limits, store (first its lock, labels and epoch), session, control socket, exports. The mount
comes last, so that its users get answers. Down: exports and mount first, then the session, then the store, which seals
dirty files and marks the pool clean.
"""

from __future__ import annotations

import gc
import logging
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import closing, suppress
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, cast

import trio

from kvfs.cgroup import memory_limit
from kvfs.daemon.devices import device_command
from kvfs.daemon.hearing import Hearing, reload
from kvfs.daemon.holding import LEAVE_MS, Holding
from kvfs.daemon.host import Look, fuse_pages, notify_manager, pid_file
from kvfs.daemon.options import MountOptions, own_limit_ms
from kvfs.daemon.reporter import Reporter, log_level
from kvfs.errors import KvfsError, NotPermittedError, UsageError, printable
from kvfs.frontend import mount as mounting
from kvfs.frontend.asked import Asked, missing
from kvfs.frontend.calls import Calls
from kvfs.frontend.clients import HOSTS_TIMEOUT_S, Clients
from kvfs.frontend.control import Arguments, Command, ControlServer, Progress
from kvfs.frontend.foreign import OtherNodes
from kvfs.frontend.fuse import Session, room_in_journal
from kvfs.frontend.holders import describe, holders
from kvfs.frontend.read_ahead import ReadAhead, set_read_ahead
from kvfs.namespace.files import Namespace
from kvfs.namespace.foreign import ForeignNames
from kvfs.namespace.forgetting import Forgetting, NextNames
from kvfs.namespace.survey import DEPTH_MAX, EVERY, Survey
from kvfs.plane import FEED_SIZE, EventType
from kvfs.status.document import live_counters, live_status
from kvfs.status.endpoint import Endpoint, listen
from kvfs.store.evictor import Kept
from kvfs.store.opening import StoreOptions
from kvfs.store.store import Store
from kvfs.types import PAGE_SIZE, InodeNumber
from kvfs.virtiofs.exports import Exports

if TYPE_CHECKING:
    from kvfs.daemon.pod import PodNode

# One logger name for the whole room: it is in every line of the log.
log = logging.getLogger(__package__)

# The largest READ request: 4 MiB where the kernel allows 1024 pages a request.
MAX_READ = 4 << 20
# Files that are still open when the daemon is told to stop get this long to be closed.
GRACE_S = 10.0
ANSWER_TIMEOUT_S = 30.0
# The last transport goes within that, once the filesystem is unmounted and nobody keeps it.
_GOING_S = 1.0
_GOING_POLL_S = 0.1
# Priority of the threads that answer requests: until they do, the kernel holds a directory's lock, and others wait.
_NICENESS = -10
# Threshold of the garbage collector: most objects of a request are freed without it.
_GC_THRESHOLDS = (20_000, 20, 20)
# Names of slow operations by FUSE opcode (linux/fuse.h). With "in", the inode is the directory of the requested name.
_OPERATIONS = {
    1: "lookup in", 4: "setattr of", 5: "readlink of", 6: "symlink in", 8: "mknod in", 9: "mkdir in", 10: "unlink in",
    11: "rmdir in", 12: "rename in", 14: "open of", 15: "read of", 16: "write of", 17: "statfs of", 20: "fsync of",
    21: "setxattr of", 22: "getxattr of", 23: "listxattr of", 24: "removexattr of", 25: "flush of", 27: "opendir of",
    28: "readdir of", 30: "fsyncdir of", 34: "access of", 35: "create in", 43: "fallocate of", 44: "readdir of",
    45: "rename in",
}  # fmt: skip


async def serve(
    options: MountOptions, mountpoint: str | None, reporter: Reporter, holding: Holding | None = None
) -> int | None:
    """Returns the signal that asked for the end, if one did. `holding`: the mount outlives this daemon."""
    daemon = Daemon(options, mountpoint, holding)
    async with daemon.hearing.listening(), Store.open(options.pool, daemon.store_options(reporter)) as store:
        log_level(store.config.log_level)
        for note in store.notes:
            reporter.info(note)
        for reason in store.service.missing():
            reporter.info(f"degraded: {reason}; what lies there is not there until it is back")
        podmap = store.plane.pod
        foreign = None if podmap is None else ForeignNames(store, podmap)
        namespace = Namespace(store, foreign)
        daemon.join(store, foreign)
        if holding is not None:
            holding.begin(store.plane.held)
        clients = Clients(
            store, namespace, feed_size(), daemon.others, read_only=options.read_only, outlived=daemon.is_held
        )
        control = ControlServer(options.pool, daemon.commands(), clients.serve)
        with pid_file(options.pool), closing(control), closing(Exports(options.exports, store.plane)) as exports:
            # From here on pyfuse3 closes the session's end of the socket.
            asked = Asked(namespace, control.serve, options.native_in)
            with closing(Session(namespace, store.plane.session_open(), asked)) as session:
                await daemon.run(store, namespace, session, control, clients, asked, exports, reporter)
    return daemon.hearing.ended_by


def feed_size() -> int:
    """Bytes of the feed of changes, as the environment says, or as is usual. UsageError."""
    text = os.environ.get("KVFS_EVENTS_SIZE") or str(FEED_SIZE)
    size = int(text) if text.isascii() and text.isdigit() else 0
    if not 256 << 10 <= size <= 1 << 30 or size % (64 << 10):
        raise UsageError(f"KVFS_EVENTS_SIZE is {text!r}: a multiple of 65536 bytes, 262144 to 1073741824, is expected")
    return size


class Daemon:
    """A pool that is mounted or exported: its tasks, its commands, its end."""

    _store: Store
    _namespace: Namespace
    _clients: Clients
    _exports: Exports
    _survey: Survey
    _pod: PodNode | None = None

    def __init__(self, options: MountOptions, mountpoint: str | None, holding: Holding | None = None) -> None:
        self._options, self._holding = options, holding
        self._mountpoint = mountpoint
        self._started_s = time.time()
        self._max_read = min(MAX_READ, fuse_pages() * PAGE_SIZE)
        # Set when the last transport is gone: no request can come any more.
        self._gone = trio.Event()
        self._mounted = False
        # The mount as it was made: its number, by which others are found that keep it, and its source. After an unmount
        # another filesystem may have the number.
        self._made: mounting.Mount | None = None
        self._read_ahead: ReadAhead | None = None
        self._ready = False
        self._look = Look()
        self._stop = trio.Event()
        self.hearing = Hearing(self._stop.set, self._reload)

    def store_options(self, reporter: Reporter) -> StoreOptions:
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
            idmap=asked.idmap,
            request_timeout_ms=own_limit_ms(asked.request_timeout_s, default.request_timeout_ms),
            slow_ms=asked.slow_ms,
            max_read=self._max_read,
            on_event=self._on_event,
            on_devices=self._on_devices,
            use=", ".join(uses),
            take_over=asked.force,
            journal=None if self._holding is None else self._holding.journal,
            join=True,
            on_wait=reporter.info,
        )

    def join(self, store: Store, foreign: ForeignNames | None) -> None:
        """Make this node's part of a pod, if the pool is one. MissingFeatureError, UsageError."""
        if store.config.pod is not None:
            from kvfs.daemon.pod import PodNode  # and with it the engine's client: a pool of one node needs neither

            self._pod = PodNode(store)
            if store.config.pod.lookup_wait_ms and foreign is not None:
                foreign.wait_for_news = self._pod.wait_for_news

    @property
    def others(self) -> OtherNodes | None:
        """The other nodes of the pod; None: the pool is none."""
        return self._pod

    async def run(
        self, store: Store, namespace: Namespace, session: Session, control: ControlServer, clients: Clients,
        asked: Asked, exports: Exports, reporter: Reporter,
    ) -> None:  # fmt: skip
        """Mount and export, serve, and return when the last transport is gone and the session has ended."""
        self._store, self._namespace, self._clients, self._exports = store, namespace, clients, exports
        self._survey = Survey(store.index, store.plane, store.pins.numbers, store.segments)
        with suppress(PermissionError):
            os.setpriority(os.PRIO_PROCESS, 0, _NICENESS)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._store.run)
            if self._pod is not None:
                nursery.start_soon(self._pod.run)
            await nursery.start(Calls(namespace, store.plane, NextNames(store.index)).run)
            nursery.start_soon(session.run)
            nursery.start_soon(clients.run)
            nursery.start_soon(asked.run)
            nursery.start_soon(self._start, nursery, control, reporter)
            try:
                await self._gone.wait()
            finally:
                session.stop()
                if self._mountpoint is not None and self._mounted and not self._ready and not self._gone.is_set():
                    # The start has failed: the mount point is left as it was found.
                    with suppress(KvfsError):
                        mounting.unmount(self._mountpoint, lazy=True)
                ended = self._gone.is_set() and not self._leaves if self._ready else self._mounted
                if self._holding is not None and ended:
                    self._holding.drop()
            await clients.close(stays=self._leaves)
            nursery.cancel_scope.cancel()

    async def _start(self, nursery: trio.Nursery, control: ControlServer, reporter: Reporter) -> None:
        pool = self._options.pool
        assert not self._ready
        assert not self._mounted
        self._exports.serve()
        if self._mountpoint is not None:
            await self._serve_mount(self._mountpoint)
        # Signals are handled before anybody hears that we are ready: one that comes then must not kill.
        self.hearing.begin()
        nursery.start_soon(self._end_on_stop)
        nursery.start_soon(control.run)
        # A mount that was taken over answers: there is no INIT to wait for. And who is killed while it waits for itself
        # never ends, as the next daemon would have to answer it.
        if self._mountpoint is not None and not (self._holding is not None and self._holding.taken):
            await self._wait_answer(self._mountpoint)
        self._check_idmap()
        self._set_read_ahead()
        if self._holding is not None:
            self._holding.keep(self._store.plane.held)
            nursery.start_soon(self._holding.watch)
            if self._holding.taken:
                nursery.start_soon(self._holding.settle, self._store.plane.names)
        if self._options.metrics is not None:
            listeners = await listen(self._options.metrics)
            nursery.start_soon(Endpoint(self._collect, self._lacks).run, listeners)
        self._ready = True
        # Objects that exist now stay: a collection need not look at them, and is seldom needed.
        gc.freeze()
        gc.set_threshold(*_GC_THRESHOLDS)
        gc.enable()
        reporter.ready(pool)
        notify_manager("READY=1")
        if self._mountpoint is not None:
            log.info("pool %s mounted at %s by pid %d", pool, self._mountpoint, os.getpid())
        for export in self._options.exports:
            log.info("pool %s exported at %s by pid %d", pool, export.socket, os.getpid())
        rings = self._store.plane.rings()
        log.log(logging.INFO if rings == "io_uring" else logging.WARNING, "device I/O goes by %s", rings)
        for note in self._store.notes:
            log.warning("%s", note)
        for lack in missing() if self._options.native_in else ():
            log.warning("--native-in: the daemon lacks %s: such clients are refused", lack)

    async def _serve_mount(self, mountpoint: str) -> None:
        """Mount, or take the mount of an earlier daemon."""
        plane = self._store.plane
        if self._holding is not None and self._holding.taken:
            self._made = mounting.find_mount(mountpoint)
            self._holding.take(plane.held)
        else:
            plane.fuse_add(await self._mount(mountpoint))

    def _check_idmap(self) -> None:
        """A mount that was taken over is as it was made."""
        asked, has = self._options.idmap, self._store.plane.held.idmap()
        if self._mountpoint is None or asked == has:
            return
        if self._holding is None or not self._holding.taken:
            raise KvfsError(
                f"--idmap: the kernel of {self._mountpoint} does not offer it: Linux 6.12 or newer can do that"
            )
        made = "was made with --idmap, and keeps it" if has else "was made without --idmap, and goes on without it"
        log.warning("%s: the mount that was taken over %s until it is unmounted and made anew", self._mountpoint, made)

    def _set_read_ahead(self) -> None:
        """A mount that was taken over may have another one: it gets what this command line says."""
        if self._made is None:
            return
        self._read_ahead = set_read_ahead(self._made.device, self._options.read_ahead)
        if self._read_ahead.why is not None:
            log.info("read-ahead stays as it is: %s", self._read_ahead.why)

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
        self._made = mounting.find_mount(mountpoint)
        return fd

    async def _wait_answer(self, mountpoint: str) -> None:
        """Wait until a request through the mount is answered."""
        try:
            with trio.fail_after(ANSWER_TIMEOUT_S):
                await trio.to_thread.run_sync(os.statvfs, mountpoint, abandon_on_cancel=True)
        except (trio.TooSlowError, OSError) as error:
            with suppress(KvfsError):
                if self._mounted:  # a mount of an earlier daemon waits for the next one
                    await trio.to_thread.run_sync(lambda: mounting.unmount(mountpoint, lazy=True))
            raise KvfsError(f"{mountpoint}: mounted, but gave no answer: {error or 'deadline'}") from error

    def _mounts(self) -> list[str]:
        """The mount point now, if any. With exports the daemon outlives its mount."""
        if self._mountpoint is None:
            return []
        present = mounting.find_mount(self._mountpoint)
        ours = present is not None and present.is_kvfs and present.source == mounting.resolve(self._options.pool)
        return [self._mountpoint] if ours else []

    def _reload(self) -> None:
        if self._ready and not self._stop.is_set() and not self._gone.is_set():
            reload(self._store)
        else:
            log.info("SIGHUP: ignored: the daemon is %s", "ending" if self._ready else "starting")

    # ---- the end ----

    def _on_event(self, kind: int, inode: int, value: int) -> None:
        """Handle the events of the data plane that the store passes on."""
        if kind == EventType.TRANSPORTS_GONE:
            # Unmounted, or the connection was aborted, and nothing is exported: no request can come any more. The next
            # mount already waits for this pool, and steps before the store closes (a CLOSE to each client) may take a
            # while.
            self._store.ending()
            self._gone.set()
        elif kind == EventType.IDLE:
            self._namespace.idle(InodeNumber(inode))
        elif kind == EventType.GUEST:
            self._exports.broken(inode, value >> 32, value & 0xFFFFFFFF)
        elif kind == EventType.SLOW:
            self._log_slow(InodeNumber(inode), value >> 56, value & (1 << 56) - 1)

    def _log_slow(self, number: InodeNumber, opcode: int, took_us: int) -> None:
        path = self._namespace.find_path(number)
        where = f"inode {number}" if path is None else f"{printable(os.fsdecode(path))} (inode {number})"
        what = _OPERATIONS.get(opcode, f"request {opcode} of")
        log.warning("slow %s %s: %s ms", what, where, f"{took_us // 1000:,}")

    def _on_devices(self) -> None:
        # Clients hold descriptors of their own, and learn of the new ones when they connect again.
        if hasattr(self, "_clients"):
            self._clients.hang_up()

    def is_held(self) -> bool:
        """Whether another process keeps the mount for the next daemon."""
        return self._holding is not None and self._holding.alive

    @property
    def _leaves(self) -> bool:
        """Whether the mount outlives this daemon: a signal ended it, and another process keeps the mount."""
        return self.is_held() and self.hearing.ended_by is not None

    async def _end_on_stop(self) -> None:
        await self._stop.wait()
        if not self._leaves:  # else ExecStop= of the unit unmounts, unless it is being restarted
            notify_manager("STOPPING=1")
        self._store.ending()
        if self._leaves:
            log.info("%s stays mounted, for the next daemon", self._mountpoint)
            self._store.leave()
            self._store.plane.held.leave(LEAVE_MS)
        # Also where it is bound to. The upper ones first.
        for present in [] if self._leaves else reversed(mounting.mounts()):
            if self._made is not None and present.is_same(self._made.device, self._made.source):
                await self._unmount(present.mountpoint)
        self._exports.stop()
        with trio.move_on_after(GRACE_S):
            with trio.move_on_after(_GOING_S):
                await self._gone.wait()
            if not self._gone.is_set() and not self._leaves and (made := self._made) is not None:
                kept = await trio.to_thread.run_sync(holders, made.device, made.source, abandon_on_cancel=True)
                log.warning("the mount is kept by %s; it ends with the daemon", describe(kept))
            while not self._gone.is_set() and self._store.plane.statistics()["open_handles"]:
                await trio.sleep(_GOING_POLL_S)
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
        """The commands that the control socket accepts."""
        return {
            "status": self._command_status,
            "list": self._command_list,
            "pins": self._command_pins,
            "evict": self._command_evict,
            "rm": self._command_rm,
            "sync": self._command_sync,
            "device_remove": self._command_device_remove,
            "device_replace": self._command_device_replace,
            "stop": self._command_stop,
        }

    async def _collect(self) -> list[Mapping[str, object]]:
        return [self._status()]

    async def _lacks(self) -> list[str]:
        """The reasons why engines cannot use this pool now, for /readyz."""
        if self._stop.is_set() or self._gone.is_set():
            return ["the daemon is ending"]
        found: list[str] = []
        if self._mountpoint is not None:
            gone = [f"{self._mountpoint}: not mounted"]
            found += await self._look.lacks(self._mountpoint) if self._mounts() else gone
        why = None if self._options.read_only else self._store.service.writes_nothing()
        return found if why is None else [*found, why]

    async def _command_status(self, arguments: Arguments, progress: Progress) -> object:
        return self._status()

    def _status(self) -> dict[str, object]:
        counters = live_counters(self._store, self._clients)
        exports = self._exports.statistics()
        found = live_status(self._store, counters, self._options.pool, self._mounts(), exports, self._started_s)
        if self._stop.is_set() or self._gone.is_set():
            found["pool"] = {**cast(dict[str, object], found["pool"]), "state": "ending"}
        found["rings"] = self._store.plane.rings()
        found["memory"] = self._memory(counters)
        if self._read_ahead is not None and self._mounts():
            found["read_ahead"] = self._read_ahead.status()
        if self._holding is not None:
            found["holder"] = self._holding.status(self._store.plane.names.journal_fill())
        if self._made is not None:
            found["mount_device"] = self._made.device
        if self._pod is not None:
            found["pod"] = dict(self._pod.status())
        return found

    def _memory(self, counters: Mapping[str, int]) -> dict[str, object]:
        limit = memory_limit()
        return {
            "staging_size": counters["staging_size"],
            "read_memory_size": self._options.read_memory_size,
            "limit": None if limit is None else limit.size,
            "limit_path": None if limit is None else str(limit.path),
        }

    async def _command_list(self, arguments: Arguments, progress: Progress) -> object:
        depth = arguments.get("depth", 1)
        if depth is None:
            depth = EVERY
        elif not isinstance(depth, int) or not 0 <= depth <= DEPTH_MAX:
            raise UsageError(f"list: depth {depth!r}; 0 to {DEPTH_MAX}")
        path, fresh = arguments.get("path", "/"), arguments.get("fresh") is True
        if not isinstance(path, str) or not path.startswith("/"):
            raise UsageError(f"list: path {path!r}; one from the mount's root on is expected")
        return await self._with_progress(lambda: self._survey.take(depth, path, fresh=fresh), progress)

    async def _command_pins(self, arguments: Arguments, progress: Progress) -> object:
        return {"pins": self._survey.pins()}

    async def _command_sync(self, arguments: Arguments, progress: Progress) -> object:
        await self._namespace.sync()
        return {}

    async def _command_device_remove(self, arguments: Arguments, progress: Progress) -> object:
        done = total = 0

        def note(drained: int, all_of_it: int) -> None:
            nonlocal done, total
            done, total = drained, all_of_it

        work = partial(device_command, self._store, "remove", arguments, note)
        return await self._with_progress(work, progress, lambda: {"done": done, "total": total})

    async def _command_device_replace(self, arguments: Arguments, progress: Progress) -> object:
        return await self._with_progress(lambda: device_command(self._store, "replace", arguments), progress)

    async def _with_progress(
        self,
        work: Callable[[], Awaitable[object]],
        progress: Progress,
        how_far: Callable[[], Mapping[str, object]] = dict,
    ) -> object:
        """Run a command that may take long: once a second the client hears that it goes on, and how far it is."""

        async def notify() -> None:
            while True:
                await trio.sleep(1)
                with suppress(trio.BrokenResourceError, trio.ClosedResourceError, trio.TooSlowError):
                    await progress(how_far())

        result: object = None
        failure: KvfsError | None = None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(notify)
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
        if arguments.get("dry_run"):
            stays = cast(dict[str, Kept], await self._with_progress(self._store.evictor.kept, progress))
            goes = stays.pop("others", Kept())
            return {"dry_run": True, "evictable_blocks": goes.blocks, "evictable_bytes": goes.bytes,
                    "kept": self._kept(stays)}  # fmt: skip
        done = wanted = 0

        def note(freed: int, total: int) -> None:
            nonlocal done, wanted
            done, wanted = freed, total

        async def work() -> dict[str, Kept]:
            await self._store.evict(size, note)
            # The evictions are told to the kernel before the answer: a look at the mount after it sees what has gone.
            with trio.move_on_after(HOSTS_TIMEOUT_S), suppress(KvfsError):
                await self._store.plane.notify_flush()
            return await self._store.evictor.kept() if size is None or done < wanted else {}

        kept = await self._with_progress(work, progress, lambda: {"done": done, "total": wanted})
        after = live_counters(self._store, self._clients)
        names = ("evicted_segments", "evicted_blocks", "evicted_bytes")
        result: dict[str, object] = {name: after.get(name, 0) - before.get(name, 0) for name in names}
        if size is None or done < wanted:
            result["kept"] = self._kept(cast(dict[str, Kept], kept))
        return result

    async def _command_rm(self, arguments: Arguments, progress: Progress) -> object:
        """Forget all below a path; tells once a second how far it is."""
        path, whole = arguments.get("path"), arguments.get("whole") is True
        if not isinstance(path, str) or not path.startswith("/"):
            raise UsageError(f"rm: path {path!r}; one from the mount's root on is expected")
        if self._options.read_only:
            raise NotPermittedError(f"{path}: the pool is mounted read-only")
        if self._store.rebuilding:
            raise KvfsError("the index is being rebuilt; nothing can be forgotten until that is done")
        forgetting = Forgetting(self._namespace, self._store, lambda: room_in_journal(self._store.plane.names))

        async def work() -> None:
            try:
                await forgetting.forget(path, whole=whole)
            finally:
                self._store.blocks.tell_hosts()
            # Durable before the answer: a crash does not bring back what was forgotten.
            await self._store.blocks.commit()
            with trio.move_on_after(HOSTS_TIMEOUT_S), suppress(KvfsError):
                await self._store.plane.notify_flush()

        await self._with_progress(work, progress, lambda: {"done": forgetting.done.files})
        return {"path": path, **asdict(forgetting.done)}

    def _kept(self, kept: Mapping[str, Kept]) -> dict[str, object]:
        """Blocks that stay, by the reason, as part of an answer."""
        return {
            why: {
                "blocks": some.blocks,
                "bytes": some.bytes,
                "names": [os.fsdecode(self._namespace.path(number)) for number in some.inodes],
            }
            for why, some in kept.items()
        }
