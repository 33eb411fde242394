"""Native readers and writers, files through the mount, an evictor at full speed, and kill -9 of all of them.

Every block describes itself (workload.py) and every actor logs what it began and what was acknowledged, into a file
that outlives it. Afterwards each read is checked against all writes: its bytes must be whole, and of that key. No
acknowledged write may have replaced their version before the read began. A miss is always right: the pool is too small.

A crash of the daemon may undo one thing: a rename or unlink of its last second (GRACE_NS here). Not a put that was
acknowledged: its header carries its name. While no daemon runs, readers see what the last one had acknowledged.

KVFS_STORM_S sets the length (default 20; 4 without --run-slow), KVFS_STORM_SEED repeats a run's choices.
"""

from __future__ import annotations

import bisect
import collections
import concurrent.futures
import contextlib
import errno
import itertools
import json
import mmap
import os
import pathlib
import random
import signal
import struct
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, NoReturn

import helpers
import pytest
from helpers import KIB, MIB, Pool, process_alive, slowness, wait_until
from workload import DEAD, check, make

import kvfs
from kvfs.errors import BusyBufferError, ClientError, DeadlineError, NotMountedError, PutError

SECONDS = float(os.environ.get("KVFS_STORM_S") or helpers.often(4, 20))
SEED = int(os.environ.get("KVFS_STORM_SEED", "0")) or random.SystemRandom().randrange(1, 1 << 32)

SPACE = "team/storm"
KEYS = [f"{chr(97 + i % 13)}{i:03d}" for i in range(360)]
HOT = KEYS[:24]
BLOCK_MAX = 400 * KIB
BATCH_MAX = len(HOT)
TIMEOUT_S = 2.0
# The longest a call may take, with its deadlines, on two busy cores. Calls are a read (reconnect, device), a change
# (the daemon evicts first), a call on the mount.
READ_LIMIT_S, CHANGE_LIMIT_S, MOUNT_LIMIT_S = 12.0, 45.0, 45.0
# The daemon learns of a client's death by its socket; what that client had asked before may still be done.
SETTLE_NS = 3_000_000_000
# A rename or removal of the last second may be undone by a crash; the rest is for commits that wait for a busy disk.
GRACE_NS = 6_000_000_000
NEVER = 1 << 63


class Kind(IntEnum):
    """The meaning of a line of a log. BEGIN to FAILED are about a write, with its version; the rest about a read."""

    PUT = 1  # begun
    RENAME = 2
    DELETE = 3
    DONE = 4  # acknowledged
    FAILED = 5  # refused: must not have happened
    READ = 6  # version 0: a miss
    MOUNT_READ = 7
    EXISTS = 8


_LINE = struct.Struct("<BxHIQQQ")  # kind, key, actor, version, begun, ended: CLOCK_MONOTONIC ns


# ---- actors: processes that may be killed at any moment ----


class Actor:
    """A forked process. Shared with its parent: since when it has been in which call (0: in none)."""

    def __init__(
        self, role: str, number: int, directory: pathlib.Path, stop: mmap.mmap, body: Callable[[Diary], None]
    ) -> None:
        self.role, self.number, self.body = role, number, body
        self._errors = directory / f"{number:04d}-{role}.error"
        self._call = mmap.mmap(-1, 16)
        self.killed = False
        self.pid = os.fork()
        if self.pid == 0:
            self._run(Diary(number, directory / f"{number:04d}-{role}.log", self._call, stop), body)

    def _run(self, diary: Diary, body: Callable[[Diary], None]) -> NoReturn:
        status = 1
        with contextlib.suppress(BaseException):
            signal.setitimer(signal.ITIMER_REAL, 0)  # pytest-timeout's alarm is the parent's
            try:
                body(diary)
                status = 0
            except BaseException:  # for the parent, whatever it is
                self._errors.write_text(traceback.format_exc())
        os._exit(status)

    @property
    def in_call(self) -> tuple[float, int]:
        """Seconds so far and the kind of call; (0, 0): in none."""
        begun, kind = struct.unpack("<QQ", self._call[:16])
        return ((time.monotonic_ns() - begun) / 1e9, kind) if begun else (0.0, 0)

    def kill(self) -> None:
        self.killed = True
        os.kill(self.pid, signal.SIGKILL)

    def ended(self) -> bool:
        """Whether it is gone; AssertionError if that was neither its task nor ours."""
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        if pid == 0:
            return False
        code = os.waitstatus_to_exitcode(status)
        if not self.killed:
            said = self._errors.read_text() if self._errors.exists() else f"exit status {code}"
            assert code == 0, f"{self.role} {self.number}:\n{said}"
        return True


class Diary:
    """An actor's log, and when to stop."""

    def __init__(self, number: int, path: pathlib.Path, call: mmap.mmap, stop: mmap.mmap) -> None:
        self.number = number
        self._fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
        self._call, self._stop = call, stop
        self.chooser = random.Random(f"{SEED} {number}")
        self._version = 0

    def another(self, thread: int) -> Diary:
        """Of another thread of this process; whose calls nobody watches."""
        log = pathlib.Path(os.readlink(f"/proc/self/fd/{self._fd}"))
        diary = Diary(self.number, log.with_suffix(f".{thread}.log"), mmap.mmap(-1, 16), self._stop)
        diary.chooser = random.Random(f"{SEED} {self.number} {thread}")
        return diary

    def goes_on(self) -> bool:
        return self._stop[0] == 0

    def next_version(self) -> int:
        """Greater than any before of this actor, and no other's."""
        self._version = max(self._version + 1, time.time_ns() // 1000)
        return self._version << 12 | self.number & 0xFFF

    @contextlib.contextmanager
    def call(self, kind: Kind) -> Iterator[None]:
        self._call[:16] = struct.pack("<QQ", time.monotonic_ns(), kind)
        try:
            yield
        finally:
            self._call[:8] = bytes(8)

    def note(self, kind: Kind, lines: list[tuple[str, int]], begun: int, ended: int = 0) -> None:
        """One write(2): it is there, or it is not, when this process is killed."""
        os.write(
            self._fd,
            b"".join(_LINE.pack(kind, _index[key], self.number, version, begun, ended) for key, version in lines),
        )


_index = {key: i for i, key in enumerate(KEYS)}


def _pick(chooser: random.Random, count: int) -> list[str]:
    hot = chooser.random() < 0.5
    return chooser.sample(HOT if hot else KEYS, count)


def _connect(root: pathlib.Path, diary: Diary) -> kvfs.Client:
    """Of a pool that may be between two daemons."""
    began = time.monotonic()
    while True:
        try:
            return kvfs.connect(root, SPACE, timeout_s=TIMEOUT_S, staging_size=8 * MIB, gpu=None)
        except (ClientError, DeadlineError) as error:
            assert time.monotonic() - began < 60 * slowness(), f"not connected for 60 s: {error}"
            time.sleep(0.05)


def read_natively(root: pathlib.Path, *, prestages: bool = False, threads: int = 1) -> Callable[[Diary], None]:
    """get_into of batches, some into memory of odd alignment, and exists; by threads that share a client."""

    def body(diary: Diary) -> None:
        with _connect(root, diary) as client, concurrent.futures.ThreadPoolExecutor(threads) as pool:
            others = [pool.submit(_read, client, diary.another(i), prestages) for i in range(1, threads)]
            _read(client, diary, prestages)
            for other in others:
                other.result(READ_LIMIT_S * slowness())

    return body


def _read(client: kvfs.Client, diary: Diary, prestages: bool) -> None:
    chooser = diary.chooser
    aligned = memoryview(kvfs.Client.buffer(BATCH_MAX * BLOCK_MAX))
    odd = memoryview(bytearray(BATCH_MAX * BLOCK_MAX + 64))
    while diary.goes_on():
        keys = _pick(chooser, chooser.choice((1, 1, 1, 2, 4, BATCH_MAX)))
        dice = chooser.random()
        try:
            if dice < 0.15:
                _look(client, diary, keys)
                continue
            if prestages and dice < 0.5:
                with diary.call(Kind.READ):
                    client.prestage(keys)
            memory = odd[chooser.randrange(64) :] if dice > 0.7 else aligned
            pairs = [(key, memory[i * BLOCK_MAX : (i + 1) * BLOCK_MAX]) for i, key in enumerate(keys)]
            begun = time.monotonic_ns()
            with diary.call(Kind.READ):
                sizes = client.get_into(pairs)
            ended = time.monotonic_ns()
        except BusyBufferError:  # a device was slower than its deadline
            aligned, odd = memoryview(kvfs.Client.buffer(len(aligned))), memoryview(bytearray(len(odd)))
            continue
        except (NotMountedError, DeadlineError):  # unmounted in good order; starting
            time.sleep(0.02)
            continue
        seen = []
        for (key, block), size in zip(pairs, sizes, strict=True):
            version = 0
            if size is not None:
                found, version = check(bytes(block[:size]), f"get_into of {key}")
                assert found == key, f"{key}: holds version {version} of {found}"
            seen.append((key, version))
        diary.note(Kind.READ, seen, begun, ended)


def _look(client: kvfs.Client, diary: Diary, keys: list[str]) -> None:
    begun = time.monotonic_ns()
    with diary.call(Kind.EXISTS):
        found = client.exists(keys)
    diary.note(
        Kind.EXISTS, [(key, int(there)) for key, there in zip(keys, found, strict=True)], begun, time.monotonic_ns()
    )


def write_natively(root: pathlib.Path) -> Callable[[Diary], None]:
    """put of batches over what is there, sometimes delete."""

    def body(diary: Diary) -> None:
        chooser = diary.chooser
        with _connect(root, diary) as client:
            while diary.goes_on():
                keys = _pick(chooser, chooser.choice((1, 2, 4, 8)))
                versions = [(key, diary.next_version()) for key in keys]
                removes = chooser.random() < 0.08
                blocks = (
                    []
                    if removes
                    else [(key, _placed(make(key, version, _size(chooser)), chooser)) for key, version in versions]
                )
                begun = time.monotonic_ns()
                diary.note(Kind.DELETE if removes else Kind.PUT, versions, begun)
                try:
                    with diary.call(Kind.PUT):
                        if removes:
                            client.delete(keys)
                        else:
                            client.put(blocks)
                except PutError as error:
                    ended = time.monotonic_ns()
                    full = [key for key, failure in error.failed.items() if failure.errno == errno.ENOSPC]
                    diary.note(Kind.FAILED, [line for line in versions if line[0].encode() in full], begun, ended)
                    diary.note(
                        Kind.DONE, [line for line in versions if line[0].encode() not in error.failed], begun, ended
                    )
                except (NotMountedError, DeadlineError):  # nobody reported its outcome
                    time.sleep(0.02)
                else:
                    diary.note(Kind.DONE, versions, begun, time.monotonic_ns())

    return body


def _size(chooser: random.Random) -> int:
    return chooser.choice((chooser.randint(100, 4096), chooser.randint(4096, BLOCK_MAX), 4096 * chooser.randint(1, 64)))


def _placed(data: bytes, chooser: random.Random) -> memoryview | bytes:
    """In memory that is written from without a copy, or not."""
    if chooser.random() < 0.5:
        return data
    buffer = kvfs.Client.buffer(len(data))
    buffer[:] = data
    return buffer


def _path(root: pathlib.Path, key: str) -> str:
    name = key.encode().hex()
    return f"{root}/{SPACE}/{name[:2]}/{name}"


def write_files(root: pathlib.Path) -> Callable[[Diary], None]:
    """tmp, write, rename onto the same keys; sometimes unlink."""

    def body(diary: Diary) -> None:
        chooser = diary.chooser
        while diary.goes_on():
            (key,) = _pick(chooser, 1)
            path, version, begun = _path(root, key), diary.next_version(), 0
            kind = Kind.DELETE if chooser.random() < 0.08 else Kind.RENAME
            try:
                with diary.call(kind):
                    if kind == Kind.RENAME:
                        temporary = f"{os.path.dirname(path)}/.{version}"
                        helpers.write_file(temporary, make(key, version, _size(chooser)))
                    begun = time.monotonic_ns()
                    diary.note(kind, [(key, version)], begun)
                    if kind == Kind.RENAME:
                        os.rename(temporary, path)
                    else:
                        os.unlink(path)
            except FileNotFoundError:  # evicted before it could be renamed; the mount of a dead daemon was taken away
                if kind == Kind.RENAME and begun:
                    diary.note(Kind.FAILED, [(key, version)], begun, time.monotonic_ns())
            except OSError as error:
                if error.errno not in DEAD | {errno.ENOSPC}:
                    raise
                time.sleep(0.02)
            else:
                diary.note(Kind.DONE, [(key, version)], begun, time.monotonic_ns())

    return body


def read_files(root: pathlib.Path) -> Callable[[Diary], None]:
    """open, read, close of the same keys."""

    def body(diary: Diary) -> None:
        while diary.goes_on():
            (key,) = _pick(diary.chooser, 1)
            begun, version = time.monotonic_ns(), 0
            try:
                with diary.call(Kind.MOUNT_READ), open(_path(root, key), "rb", buffering=0) as file:
                    data = file.readall()
                found, version = check(data, f"file of {key}")
                assert found == key, f"{key}: holds version {version} of {found}"
            except OSError as error:
                # Evicted meanwhile: before or after the open. Never short: check() would see that.
                if error.errno not in DEAD | {errno.ENOENT, errno.EIO, errno.ESTALE}:
                    raise
                if error.errno in DEAD:
                    time.sleep(0.02)
                    continue
            diary.note(Kind.MOUNT_READ, [(key, version)], begun, time.monotonic_ns())
            time.sleep(0.002)

    return body


def evict_all_the_time(pool: Pool) -> Callable[[Diary], None]:
    """`kvfs evict`, as often as it goes. While the pool is not mounted it fails."""

    def body(diary: Diary) -> None:
        while diary.goes_on():
            size = diary.chooser.choice(("1M", "8M", "24M"))
            pool.command("evict", str(pool.path), "--size", size, check=False)
            time.sleep(diary.chooser.uniform(0, 1))

    return body


# ---- the judgement ----


@dataclass
class Write:
    kind: Kind
    version: int
    actor: int
    begun: int
    done: int = 0  # acknowledged; 0: nobody said
    failed: bool = False
    over: int = NEVER  # cannot take effect after that


@dataclass
class Daemon:
    """One daemon's life, in CLOCK_MONOTONIC ns."""

    ready: int
    ended: int = NEVER
    crashed: bool = False


@dataclass
class Figures:
    reads: collections.Counter[str] = field(default_factory=collections.Counter)
    writes: collections.Counter[str] = field(default_factory=collections.Counter)
    kills: collections.Counter[str] = field(default_factory=collections.Counter)
    longest_s: dict[str, float] = field(default_factory=dict)
    daemon: collections.Counter[str] = field(default_factory=collections.Counter)

    def __str__(self) -> str:
        return json.dumps({name: getattr(self, name) for name in self.__dataclass_fields__}, indent=1)


def judge(
    directory: pathlib.Path, daemons: list[Daemon], deaths: dict[int, int], stopped: set[int], figures: Figures
) -> None:
    """Hold every read against all writes. deaths: when an actor was killed; stopped: those whose times say nothing."""
    writes: dict[int, list[Write]] = collections.defaultdict(list)
    reads: dict[int, list[tuple[int, int, int, Kind, int]]] = collections.defaultdict(list)
    by_version: dict[int, Write] = {}
    lines = [
        line
        for path in sorted(directory.glob("*.log"))
        for line in _LINE.iter_unpack(path.read_bytes()[: path.stat().st_size // _LINE.size * _LINE.size])
    ]
    for number, key, actor, version, begun, ended in lines:
        kind = Kind(number)
        if kind <= Kind.DELETE:
            by_version[version] = Write(kind, version, actor, begun)
            writes[key].append(by_version[version])
            figures.writes[kind.name] += 1
        elif kind == Kind.DONE:
            by_version[version].done = ended
            figures.writes["acknowledged"] += 1
        elif kind == Kind.FAILED:
            by_version[version].failed = True
            figures.writes["refused"] += 1
        else:
            reads[key].append((begun, ended, version, kind, actor))
            figures.reads[kind.name] += 1
            figures.reads[f"{kind.name} hits"] += version != 0
        if ended:
            name = by_version[version].kind.name if kind in (Kind.DONE, Kind.FAILED) else kind.name
            name += " of one that was stopped" if actor in stopped else ""
            figures.longest_s[name] = max(figures.longest_s.get(name, 0), round((ended - begun) / 1e9, 3))
    for write in by_version.values():
        write.over = write.done or _fate_known(write, daemons, deaths)
    wrong = [line for key in reads for line in _judge_key(KEYS[key], writes[key], reads[key], daemons)]
    assert not wrong, f"{len(wrong)} wrong reads, seed {SEED}:\n" + "\n".join(wrong[:20])


def _fate_known(write: Write, daemons: list[Daemon], deaths: dict[int, int]) -> int:
    """The time by which an unacknowledged write has happened or never will: some time after its writer or the daemon
    died. If the daemon is dead by then, it is when the next one has recovered."""
    ends = [
        time for time in (deaths.get(write.actor, NEVER), *(daemon.ended for daemon in daemons)) if time > write.begun
    ]
    over = min(ends, default=NEVER) + round(SETTLE_NS * slowness())
    for before, after in itertools.pairwise(daemons):
        if before.ended <= over:
            over = max(over, after.ready + round(SETTLE_NS * slowness())) if after.ready > write.begun else over
    return over


def _judge_key(
    key: str, writes: list[Write], reads: list[tuple[int, int, int, Kind, int]], daemons: list[Daemon]
) -> list[str]:
    by_version = {write.version: write for write in writes}
    done = sorted((write for write in writes if write.done), key=lambda write: write.done)
    wrong = []
    # Epoch by epoch: what a crash may have undone replaces nothing any more.
    bounds = [0, *(daemon.ended for daemon in daemons)]
    alive: list[Write] = []
    undone: set[int] = set()
    for (start, stop), daemon in zip(itertools.pairwise(bounds), daemons, strict=True):
        alive += [write for write in done if start < write.done <= stop and write.version not in undone]
        alive.sort(key=lambda write: write.done)
        times = [write.done for write in alive]
        replaced_before = list(itertools.accumulate((write.begun for write in alive), max))
        for begun, ended, version, kind, actor in reads:
            # By its end: one that began before a crash may have asked the next daemon.
            if not start < ended <= stop or not version:
                continue
            at = bisect.bisect_left(times, begun)
            newest = replaced_before[at - 1] if at else 0
            if kind == Kind.EXISTS:
                if any(
                    write.kind != Kind.DELETE and not write.failed and write.begun <= ended and write.over >= newest
                    for write in writes
                ):
                    continue
                wrong.append(f"{key}: actor {actor}: exists() said yes, all versions were deleted")
                continue
            write = by_version.get(version)
            if write is None or write.kind == Kind.DELETE:
                wrong.append(f"{key}: actor {actor} read version {version}, which nobody wrote")
            elif write.failed:
                wrong.append(f"{key}: actor {actor} read version {version}, which was refused")
            elif write.over < newest:
                wrong.append(_story(key, write, kind, actor, begun, ended, alive[:at], daemons))
        if daemon.crashed:
            undone |= {
                write.version
                for write in done
                if write.kind != Kind.PUT and write.begun < stop and write.done > stop - round(GRACE_NS * slowness())
            }
            alive = [write for write in alive if write.version not in undone]
    return wrong


def _story(
    key: str, write: Write, kind: Kind, actor: int, begun: int, ended: int, before: list[Write], daemons: list[Daemon]
) -> str:
    """A stale read, with what it should have seen. Times are seconds before the read began."""

    def ago(moment: int) -> str:
        return f"{(begun - moment) / 1e9:.4f}"

    later = [
        f"{new.kind.name} {new.version} by {new.actor} from -{ago(new.begun)} to -{ago(new.done)}"
        for new in before
        if new.begun > write.over
    ]
    about = [
        f"ready -{ago(daemon.ready)} ended -{ago(daemon.ended) if daemon.ended < NEVER else ''} "
        f"crashed {daemon.crashed}"
        for daemon in daemons
        if daemon.ended > write.begun and daemon.ready < begun
    ]
    return (
        f"{key}: actor {actor}, {kind.name} of {(ended - begun) / 1e9:.4f} s: stale: version {write.version} "
        f"({write.kind.name} by {write.actor} from -{ago(write.begun)}, "
        f"{'acknowledged' if write.done else 'fate known'} -{ago(write.over)}); after it came {later[-4:]}; "
        f"daemons {about}"
    )


# ---- the storm ----


class Storm:
    def __init__(self, pool: Pool, directory: pathlib.Path) -> None:
        self.pool, self.directory = pool, directory
        self.chooser = random.Random(SEED)
        self.stop = mmap.mmap(-1, 1)
        self.numbers = itertools.count(1)
        self.deaths: dict[int, int] = {}
        self.stopped: set[int] = set()
        self.daemons = [Daemon(time.monotonic_ns())]
        self.figures = Figures()
        root = pool.mount
        self.actors = [
            self._start(role, body)
            for role, body in (
                ("reader", read_natively(root)),
                ("reader", read_natively(root, threads=3)),
                ("reader", read_natively(root, prestages=True)),
                ("writer", write_natively(root)),
                ("writer", write_natively(root)),
                ("file-writer", write_files(root)),
                ("file-reader", read_files(root)),
                ("evictor", evict_all_the_time(pool)),
            )
        ]

    def _start(self, role: str, body: Callable[[Diary], None]) -> Actor:
        return Actor(role, next(self.numbers), self.directory, self.stop, body)

    def run(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        next_crash = time.monotonic() + self.chooser.uniform(2, 4)
        while time.monotonic() < end:
            self._watch()
            if time.monotonic() > next_crash:
                self._end_daemon()
                next_crash = time.monotonic() + self.chooser.uniform(2, 6)
            elif self.chooser.random() < 0.5:
                self._kill_one()
            else:
                self._stop_one()
            time.sleep(self.chooser.uniform(0.02, 0.4))
        self.stop[0] = 1
        wait_until(self._all_ended, "the end of all actors", timeout_s=MOUNT_LIMIT_S + 20, interval_s=0.05)

    def _watch(self) -> None:
        """Nobody has failed, nobody hangs."""
        for actor in self.actors:
            assert not actor.ended(), f"{actor.role} {actor.number} ended by itself"
            seconds, kind = actor.in_call
            limit = {Kind.READ: READ_LIMIT_S, Kind.EXISTS: READ_LIMIT_S, Kind.PUT: CHANGE_LIMIT_S}.get(
                Kind(kind) if kind else Kind.READ, MOUNT_LIMIT_S
            )
            limit *= slowness() * (2 if actor.number in self.stopped else 1)
            assert seconds < limit, f"{actor.role} {actor.number} hangs in {Kind(kind).name} for {seconds:.1f} s"

    def _all_ended(self) -> bool:
        self.actors = [actor for actor in self.actors if not actor.ended()]
        return not self.actors

    def _one(self, roles: tuple[str, ...]) -> Actor:
        """Mostly while it is in a call, which for a writer is in the middle of a put."""
        actor = self.chooser.choice([actor for actor in self.actors if actor.role in roles])
        if self.chooser.random() < 0.7:
            until = time.monotonic() + 0.2
            while actor.in_call[0] == 0 and time.monotonic() < until:
                pass
            time.sleep(self.chooser.choice((0, self.chooser.uniform(0, 0.01))))
        return actor

    def _stop_one(self) -> None:
        """For a moment: long enough for what it reads to be evicted and written over. Or the daemon."""
        actor = self._one(("reader", "writer", "file-reader", "file-writer"))
        pid, role = (actor.pid, actor.role) if self.chooser.random() < 0.8 else (self.pool.pid(), "daemon")
        os.kill(pid, signal.SIGSTOP)
        time.sleep(self.chooser.choice((0.05, 0.3, 1.0)))
        os.kill(pid, signal.SIGCONT)
        self.stopped.add(actor.number)
        self.figures.kills[f"{role}, stopped and continued"] += 1

    def _kill_one(self) -> None:
        actor = self._one(("reader", "writer"))
        actor.kill()
        wait_until(actor.ended, f"the end of {actor.role} {actor.number}", interval_s=0.001)
        self.deaths[actor.number] = time.monotonic_ns()
        self.figures.kills[actor.role] += 1
        self.actors.remove(actor)
        self.actors.append(self._start(actor.role, actor.body))

    def _end_daemon(self) -> None:
        """kill -9, or every fourth time SIGTERM; then mount again, some time later. Readers that are stopped meanwhile
        go on with the table of the dead daemon, while the next one writes over what that says."""
        self.count()
        sleepers = {self._one(("reader",)) for _ in range(2)}
        for sleeper in sleepers:
            os.kill(sleeper.pid, signal.SIGSTOP)
            self.stopped.add(sleeper.number)
        daemon, pid = self.daemons[-1], self.pool.pid()
        daemon.crashed = self.chooser.random() < 0.75
        self.figures.kills["daemon" if daemon.crashed else "daemon, SIGTERM"] += 1
        os.kill(pid, signal.SIGKILL if daemon.crashed else signal.SIGTERM)
        daemon.ended = time.monotonic_ns()
        wait_until(lambda: not process_alive(pid), f"the end of daemon {pid}", timeout_s=60)
        if not daemon.crashed:
            daemon.ended = time.monotonic_ns()
        time.sleep(self.chooser.choice((0, 0.1, 1.0)))
        self.pool.start()
        self.daemons.append(Daemon(time.monotonic_ns()))
        time.sleep(self.chooser.choice((0, 1.0, 2.0)))
        for sleeper in sleepers:
            os.kill(sleeper.pid, signal.SIGCONT)
            self.figures.kills["reader, stopped over a daemon's end"] += 1

    def count(self) -> None:
        """Add the daemon's counters to the figures."""
        counters = self.pool.status()["counters"]
        for name in (
            "evicted_blocks",
            "evicted_segments",
            "bad_blocks",
            "reservations_committed",
            "reservations_superseded",
            "reservations_reclaimed",
            "native_prestage_used",
            "native_checksum_errors",
            "native_timeouts",
            "native_retries",
        ):
            self.figures.daemon[name] += counters[name]

    def close(self) -> None:
        for actor in self.actors:
            with contextlib.suppress(ProcessLookupError):
                actor.kill()
        for actor in self.actors:  # all are killed by then: one may wait in the kernel for as long as the mount hangs
            with contextlib.suppress(ChildProcessError):
                os.waitpid(actor.pid, 0)


@pytest.mark.timeout(150 + 3 * SECONDS)
def test_a_storm_with_kills_reads_no_wrong_byte_and_leaks_nothing(
    own_pool: Callable[..., Pool], tmp_path: pathlib.Path
) -> None:
    pool = own_pool(files=4, size="16M")
    for shard in sorted({key.encode().hex()[:2] for key in KEYS}):
        (pool.mount / SPACE / shard).mkdir(parents=True)
    with helpers.opened(pool.mount, os.O_RDONLY | os.O_DIRECTORY) as directory:
        os.fsync(directory)  # a crash may not undo the directories
    storm = Storm(pool, tmp_path)
    try:
        storm.run(SECONDS)
        judge(tmp_path, storm.daemons, storm.deaths, storm.stopped, storm.figures)
        storm.count()
        _leaks_nothing(pool)
        _both_paths_agree(pool)
        pool.umount()
        fsck = pool.command("fsck", str(pool.path), "--verify-data", check=False, timeout_s=120)
        assert fsck.returncode == 0, fsck.stdout + fsck.stderr
    except BaseException as error:
        error.add_note(f"repeat with KVFS_STORM_SEED={SEED}; so far: {storm.figures}")
        raise
    finally:
        storm.close()
        print(f"storm of {SECONDS:g} s, seed {SEED}: {storm.figures}")
    figures = storm.figures
    assert figures.reads["READ hits"] > 100 and figures.reads["MOUNT_READ hits"] > 10, figures
    assert figures.reads["READ hits"] < figures.reads["READ"], "nothing was evicted: the pool is too large"
    assert figures.writes["PUT"] > 100 and figures.writes["RENAME"] > 10, figures
    assert figures.writes["refused"] < figures.writes["acknowledged"] / 10, figures
    assert figures.daemon["bad_blocks"] == 0, figures


def _leaks_nothing(pool: Pool) -> None:
    def counters() -> dict[str, Any]:
        return pool.status()["counters"]

    wait_until(lambda: counters()["native_clients"] == 0, "the daemon to notice that all clients are gone")
    wait_until(lambda: counters()["reserved_bytes"] == 0, "every reservation to be taken back")
    assert counters()["reservations_open"] == 0


def _both_paths_agree(pool: Pool) -> None:
    """At rest, key by key: the native path and the mount."""
    differ = []
    with kvfs.connect(pool.mount, SPACE, gpu=None) as client:
        assert set(client.list()) <= {key.encode() for key in KEYS}
        for key in KEYS:
            native = client.get(key)
            try:
                data = helpers.read_file(_path(pool.mount, key))
            except FileNotFoundError:
                data = None
            if (None if native is None else bytes(native)) != data:
                differ.append(key)
    assert not differ, f"the mount and the native path differ: {differ}"
