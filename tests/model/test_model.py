"""The mount against a model in memory: a miss is allowed where eviction or a crash may make one, a wrong byte never.

The model is a tree of nodes, each with the places (directory and name) it has had. After a kill -9 a rename or unlink
of the last seconds may be undone, and nothing else. So each file must be found, whole, at its place or at one it had
within that time, and no file that was removed before. KVFS_MODEL_EXAMPLES sets how many runs there are (default 60).
Without --run-slow there are 4, and 4 more with the next seed until every kind of restart has been seen. KVFS_MODEL_SEED
repeats a run's choices, KVFS_MODEL_SHRINK=1 looks for the shortest failing run.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import itertools
import mmap
import os
import pathlib
import random
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import helpers
import pytest
from helpers import MIB, Pool, assert_same, content
from hypothesis import HealthCheck, Phase, currently_in_test_context, note, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

EXAMPLES = int(os.environ.get("KVFS_MODEL_EXAMPLES") or helpers.often(4, 60))
# Within so many runs every kind of restart has been seen.
ENOUGH = 60
STEPS = int(os.environ.get("KVFS_MODEL_STEPS", "50"))
SEED = int(os.environ.get("KVFS_MODEL_SEED", "0")) or random.SystemRandom().randrange(1, 1 << 32)
# Makes a failing run shorter: takes minutes.
SHRINK = bool(os.environ.get("KVFS_MODEL_SHRINK"))
# A pool is used for this many runs, so that it never fills: what is missing was then evicted by the test itself.
EXAMPLES_A_POOL = 15
# Of one run: each costs as much as hundreds of other steps.
RESTARTS, EVICTIONS = 4, 4
# The index follows in a second, the summaries in two more; the rest is for a machine and disk that are busy.
INDEX_GRACE_S = 15.0
SUMMARY_GRACE_S = 20.0
FOREVER = -1e9

# The daemon compares the data plane's names with the index after each commit.
COMPARING = pathlib.Path(__file__).with_name("comparing_mount.py")

NAMES = st.sampled_from(["a", "b", "c", "d", "e.tmp", "f"])
SIZES = st.sampled_from([0, 1, 100, 4095, 4096, 4097, 50_000, 131_072, 200_001, MIB + 1, 1_300_000])


@dataclass(eq=False)
class Node:
    """A file (content is bytes) or a directory (None). Places: (directory, name, since), the present one last."""

    content: bytes | None
    places: list[tuple[Node | None, str, float]]
    removed: float | None = None
    may_be_missing: bool = False
    pinned: bool = False
    pinned_since: float = FOREVER

    @property
    def parent(self) -> Node | None:
        return self.places[-1][0]

    @property
    def name(self) -> str:
        return self.places[-1][1]

    def paths(self, settled: float, below: tuple[Node, ...] = ()) -> set[str]:
        """Where it may be found when what happened since `settled` may be undone. `below` are those that this one is
        asked for: two directories may each have been in the other."""
        if self.parent is None:
            return {""}
        possible = set()
        for i, (parent, name, _) in enumerate(self.places):
            present = i + 1 == len(self.places)
            if parent is not None and parent not in below and (present or self.places[i + 1][2] > settled):
                possible |= {f"{above}/{name}".lstrip("/") for above in parent.paths(settled, (*below, self))}
        return possible

    def path(self) -> str:
        return "" if self.parent is None else f"{self.parent.path()}/{self.name}".lstrip("/")

    def began_after(self, settled: float) -> bool:
        """Whether it, or a directory above it, was moved or made lately."""
        return self.parent is not None and (self.places[-1][2] > settled or self.parent.began_after(settled))


@dataclass
class Mounted:
    """The pool that the machines use one after the other."""

    stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    pool: Pool | None = None
    used: int = 0

    def take(self) -> Pool:
        if self.pool is None or self.used >= EXAMPLES_A_POOL:
            self.stack.close()
            self.pool = self.stack.enter_context(Pool(files=4, size="512M", program=[COMPARING]))
            self.used = 0
        self.used += 1
        return self.pool


mounted = Mounted()


def say(what: str) -> None:
    if currently_in_test_context():
        note(what)


# How often each thing happened in all runs, printed at the end.
tally: collections.Counter[str] = collections.Counter()


class Machine(RuleBasedStateMachine):
    """One run on a directory of its own.

    No preconditions: what is drawn may not depend on what an eviction or a crash happened to leave. A rule that makes
    no sense now does nothing.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pool = mounted.take()
        self.root = Node(None, [(None, "", FOREVER)])
        self.nodes: list[Node] = []
        self.removed: list[Node] = []
        self.held: list[tuple[int, Node]] = []
        self.counter = 0
        self.settled = FOREVER  # fsync: names before this are durable
        self.restarts = self.evictions = self.steps = 0

    @initialize()
    def begin(self) -> None:
        self.base = self.pool.mount / f"run-{time.monotonic_ns()}"
        self.base.mkdir()
        self._fsync(self.base)

    def teardown(self) -> None:
        self._drop_handles()
        with contextlib.suppress(AttributeError):
            self._check_all()
            shutil.rmtree(self.base)

    # ---- what there is ----

    def files(self) -> list[Node]:
        return [node for node in self.nodes if node.content is not None]

    def directories(self) -> list[Node]:
        return [self.root, *(node for node in self.nodes if node.content is None)]

    def at(self, parent: Node, name: str) -> Node | None:
        return next((node for node in self.nodes if node.parent is parent and node.name == name), None)

    def full(self, node: Node) -> pathlib.Path:
        self.steps += 1
        tally["steps on files"] += 1
        return self.base / node.path()

    def fresh(self, size: int) -> bytes:
        self.counter += 1
        return content(size, (str(self.base), self.counter))

    def pick(self, number: int, of: list[Node]) -> Node:
        return of[number % len(of)]

    def _remove(self, node: Node, now: float) -> None:
        node.removed = now
        self.nodes.remove(node)
        self.removed.append(node)

    def _gone(self, node: Node) -> bool:
        """A call found nothing: right only where an eviction may have been at work."""
        if not node.may_be_missing:
            return False
        self._remove(node, time.monotonic())
        tally["misses"] += 1
        return True

    # ---- making and writing ----

    @rule(
        where=st.integers(0, 99),
        name=NAMES,
        size=SIZES,
        pieces=st.integers(1, 6),
        order=st.randoms(use_true_random=False),
        flag=st.sampled_from([os.O_TRUNC, os.O_EXCL, 0]),
        sync=st.sampled_from([False, False, False, True]),
    )
    def store(self, where: int, name: str, size: int, pieces: int, order: random.Random, flag: int, sync: bool) -> None:
        """Create or overwrite by open and write, in pieces in any order."""
        parent = self.pick(where, self.directories())
        old = self.at(parent, name)
        if old is not None and old.content is None:
            return
        data = self.fresh(size)
        path = self.full(parent) / name
        try:
            descriptor = os.open(path, os.O_CREAT | os.O_WRONLY | flag, 0o644)
        except FileExistsError:
            assert old is not None and flag == os.O_EXCL
            return
        created = old is None
        if old is not None and flag == os.O_EXCL:
            assert self._gone(old), f"{path}: O_EXCL made a file that exists"
            created = True
        try:
            evictable = old is not None and old.may_be_missing and bool(old.content)
            if evictable and flag == 0 and not created and os.fstat(descriptor).st_size == 0:
                assert old is not None
                self._remove(old, time.monotonic())  # evicted: this is a new one
                created = True
            cuts = sorted({0, size, *(order.randrange(size + 1) for _ in range(pieces - 1))})
            spans = list(itertools.pairwise(cuts))
            order.shuffle(spans)
            for begin, end in spans:
                assert os.pwrite(descriptor, data[begin:end], begin) == end - begin
            if sync:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
        if not created and old is not None and flag == 0:
            assert old.content is not None
            data += old.content[size:]
        if not created and old is not None:
            old.content, old.may_be_missing = data, False
        else:
            self.nodes.append(Node(data, [(parent, name, time.monotonic())]))

    @rule(which=st.integers(0, 99), size=SIZES)
    def append(self, which: int, size: int) -> None:
        if not self.files():
            return
        node = self.pick(which, self.files())
        data = self.fresh(min(size, 100_000))
        try:
            descriptor = os.open(self.full(node), os.O_WRONLY | os.O_APPEND)
        except FileNotFoundError:
            assert self._gone(node), f"{node.path()} is missing"
            return
        with os.fdopen(descriptor, "wb", buffering=0) as file:
            for begin in range(0, len(data), 30_000):
                piece = data[begin : begin + 30_000]
                assert file.write(piece) == len(piece)
        assert node.content is not None
        node.content += data
        node.may_be_missing = False

    @rule(which=st.integers(0, 99), offset=st.integers(0, 1_400_000), size=SIZES)
    def overwrite(self, which: int, offset: int, size: int) -> None:
        """A part of a sealed file, perhaps behind its end: zeros between."""
        if not self.files():
            return
        node = self.pick(which, self.files())
        assert node.content is not None
        offset = min(offset, len(node.content) + 10_000)
        data = self.fresh(min(size, 200_001))
        try:
            with open(self.full(node), "r+b", buffering=0) as file:
                assert os.pwrite(file.fileno(), data, offset) == len(data)
        except FileNotFoundError:
            assert self._gone(node), f"{node.path()} is missing"
            return
        if data:
            before = node.content.ljust(offset, b"\0")
            node.content = before[:offset] + data + before[offset + len(data) :]
            node.may_be_missing = False

    @rule(which=st.integers(0, 99), size=SIZES, by_handle=st.booleans())
    def truncate(self, which: int, size: int, by_handle: bool) -> None:
        if not self.files():
            return
        node = self.pick(which, self.files())
        assert node.content is not None
        try:
            if by_handle:
                with open(self.full(node), "r+b", buffering=0) as file:
                    os.ftruncate(file.fileno(), size)
            else:
                os.truncate(self.full(node), size)
        except FileNotFoundError:
            assert self._gone(node), f"{node.path()} is missing"
            return
        if size != len(node.content):
            node.may_be_missing = False
        node.content = node.content[:size].ljust(size, b"\0")

    @rule(where=st.integers(0, 99), name=NAMES)
    def mkdir(self, where: int, name: str) -> None:
        parent = self.pick(where, self.directories())
        old = self.at(parent, name)
        if parent.path().count("/") > 2:
            return
        try:
            (self.full(parent) / name).mkdir()
        except FileExistsError:
            assert old is not None
            return
        if old is not None:
            assert self._gone(old), f"{old.path()}: mkdir over it succeeded"
        self.nodes.append(Node(None, [(parent, name, time.monotonic())]))

    # ---- names ----

    @rule(which=st.integers(0, 99), where=st.integers(0, 99), name=NAMES, replace=st.booleans())
    def rename(self, which: int, where: int, name: str, replace: bool) -> None:
        """A file, also onto an existing one and across directories; RENAME_NOREPLACE too."""
        if not self.files():
            return
        node, parent = self.pick(which, self.files()), self.pick(where, self.directories())
        old = self.at(parent, name)
        source, target = self.full(node), self.full(parent) / name
        try:
            helpers.renameat2(source, target, 0 if replace else helpers.RENAME_NOREPLACE)
        except FileNotFoundError:
            assert self._gone(node), f"{node.path()} is missing"
            return
        except FileExistsError:
            assert old is not None and not replace
            return
        except OSError as error:  # onto a directory; the kernel itself says ENOTEMPTY of one that the file lies in
            assert error.errno in (errno.EISDIR, errno.ENOTEMPTY), error
            assert old is not None and old.content is None and replace, error
            return
        if old is node:
            assert replace, f"{node.path()}: RENAME_NOREPLACE onto itself succeeded"
            return
        now = time.monotonic()
        if old is not None:
            assert old.content is not None, f"{old.path()}: a directory was replaced by a file"
            assert replace or old.may_be_missing, f"{old.path()}: replaced in spite of RENAME_NOREPLACE"
            self._remove(old, now)
        node.places.append((parent, name, now))

    @rule(which=st.integers(0, 99), where=st.integers(0, 99), name=NAMES)
    def rename_directory(self, which: int, where: int, name: str) -> None:
        if len(self.directories()) == 1:
            return
        node, parent = self.pick(which, self.directories()[1:]), self.pick(where, self.directories())
        old = self.at(parent, name)
        above: Node | None = parent
        inside = False
        while above is not None:
            inside, above = inside or above is node, above.parent
        try:
            os.rename(self.full(node), self.full(parent) / name)
        except OSError as error:
            if error.errno == errno.EINVAL:
                assert inside, error
            elif error.errno == errno.ENOTEMPTY:
                assert inside or (old is not None and any(child.parent is old for child in self.nodes)), error
            elif error.errno == errno.ENOTDIR:
                assert old is not None and old.content is not None, error
            else:
                raise
            return
        assert not inside, f"{node.path()} was moved into itself"
        if old is node:
            return
        now = time.monotonic()
        if old is not None:
            if old.content is not None:
                assert old.may_be_missing, f"{old.path()}: a file was replaced by a directory"
            for child in [child for child in self.nodes if child.parent is old]:
                assert self._gone(child), f"{child.path()}: its directory was replaced"
            self._remove(old, now)
        node.places.append((parent, name, now))

    @rule(which=st.integers(0, 99))
    def unlink(self, which: int) -> None:
        if not self.files():
            return
        node = self.pick(which, self.files())
        try:
            os.unlink(self.full(node))
        except FileNotFoundError:
            assert self._gone(node), f"{node.path()} is missing"
            return
        self._remove(node, time.monotonic())

    @rule(which=st.integers(0, 99))
    def rmdir(self, which: int) -> None:
        if len(self.directories()) == 1:
            return
        node = self.pick(which, self.directories()[1:])
        children = [child for child in self.nodes if child.parent is node]
        try:
            os.rmdir(self.full(node))
        except OSError as error:
            assert error.errno == errno.ENOTEMPTY and children, error
            return
        for child in children:
            assert self._gone(child), f"{child.path()}: its directory was removed"
        self._remove(node, time.monotonic())

    # ---- reading ----

    @rule(
        which=st.integers(0, 99),
        how=st.sampled_from(["buffered", "direct", "part", "stat", "mapped"]),
        offset=st.integers(0, 1_400_000),
        size=st.integers(1, 300_000),
    )
    def read(self, which: int, how: str, offset: int, size: int) -> None:
        if not self.files():
            return
        node = self.pick(which, self.files())
        assert node.content is not None
        path = self.full(node)
        try:
            about = os.stat(path)
            assert about.st_size == len(node.content), f"{node.path()}: st_size {about.st_size}"
            if how == "stat":
                return
            descriptor = os.open(path, os.O_RDONLY | (os.O_DIRECT if how == "direct" else 0))
        except FileNotFoundError:
            assert self._gone(node), f"{node.path()} is missing"
            assert not os.path.lexists(path)
            return
        try:
            if how == "part":
                wanted = node.content[offset : offset + size]
                assert_same(os.pread(descriptor, size, offset), wanted, f"{node.path()} from {offset}")
            elif how == "direct":
                assert_same(read_direct(descriptor, len(node.content)), node.content, f"{node.path()} by O_DIRECT")
            elif how == "mapped" and node.content:
                with mmap.mmap(descriptor, len(node.content), mmap.MAP_PRIVATE, mmap.PROT_READ) as memory:
                    assert_same(memory[:], node.content, f"{node.path()} mapped")
            else:
                assert_same(os.pread(descriptor, len(node.content) + 1, 0), node.content, node.path())
        finally:
            os.close(descriptor)

    @rule(which=st.integers(0, 99))
    def hold(self, which: int) -> None:
        """An open file stays readable whatever happens to its name, until the daemon dies."""
        if not self.files() or len(self.held) >= 8:
            return
        node = self.pick(which, self.files())
        try:
            self.held.append((os.open(self.full(node), os.O_RDONLY), node))
        except FileNotFoundError:
            assert self._gone(node), f"{node.path()} is missing"

    @rule(close=st.booleans())
    def check_held(self, close: bool) -> None:
        self._check_held()
        if close:
            self._drop_handles()

    def _check_held(self) -> None:
        for descriptor, node in self.held:
            assert node.content is not None
            assert_same(os.pread(descriptor, len(node.content) + 1, 0), node.content, f"held {node.path()}")

    def _drop_handles(self) -> None:
        for descriptor, _ in self.held:
            with contextlib.suppress(OSError):
                os.close(descriptor)
        self.held = []

    @rule(which=st.integers(0, 99))
    def list_directory(self, which: int) -> None:
        directory = self.pick(which, self.directories())
        names = os.listdir(self.full(directory))
        children = [node for node in self.nodes if node.parent is directory]
        assert len(set(names)) == len(names)
        assert set(names) <= {node.name for node in children}
        assert set(names) >= {node.name for node in children if not node.may_be_missing}

    # ---- eviction, pins ----

    @rule(which=st.integers(0, 99))
    def pin(self, which: int) -> None:
        if not self.files():
            return
        node = self.pick(which, self.files())
        try:
            os.setxattr(self.full(node), "user.kvfs.pin", b"1")
        except FileNotFoundError:
            assert self._gone(node), f"{node.path()} is missing"
            return
        node.pinned_since = node.pinned_since if node.pinned else time.monotonic()
        node.pinned, node.may_be_missing = True, False

    @rule(everything=st.booleans())
    def evict(self, everything: bool) -> None:
        """Blocks that are neither pinned nor open may be gone afterwards; held ones stay readable."""
        if not self.files() or self.evictions >= EVICTIONS:
            return
        self.evictions += 1
        tally["evictions"] += 1
        how_much = ["--all"] if everything else ["--size", "2M"]
        result = self.pool.command("evict", str(self.pool.path), *how_much, check=False)
        # There may be less than that, or less that is not held.
        few = not everything and result.returncode == 1 and "of 2M could be evicted" in result.stderr
        assert result.returncode == 0 or few, f"exited with {result.returncode}: {result.stdout}{result.stderr}"
        held = [node for _, node in self.held]
        for node in self.files():
            if not node.pinned and node not in held:
                node.may_be_missing = True
        self._check_held()

    # ---- durability ----

    @rule()
    def fsync(self) -> None:
        self._fsync(self.base)

    def _fsync(self, directory: pathlib.Path) -> None:
        with helpers.opened(directory, os.O_RDONLY | os.O_DIRECTORY) as descriptor:
            os.fsync(descriptor)
        self.settled = time.monotonic()

    def _may_restart(self) -> bool:
        """Not one after the other without a change in between, and not too often."""
        return self.restarts < RESTARTS and bool(self.nodes or self.removed) and self.steps > 4

    @rule(quiet=st.sampled_from([False, False, True]))
    def crash(self, quiet: bool) -> None:
        """kill -9, at once or after everything had the time to settle."""
        if not self._may_restart():
            return
        if quiet:
            quiet_since = time.monotonic()
            helpers.wait_until(lambda: self.pool.status()["counters"]["index_pending"] == 0, "the index's commit")
            self.settled = quiet_since
        self._drop_handles()
        killed = time.monotonic()
        tally["kills"] += 1
        self.pool.kill()
        self.pool.remount()
        self._reconcile(max(self.settled, killed - INDEX_GRACE_S))

    @rule()
    def remount(self) -> None:
        if not self._may_restart():
            return
        self._drop_handles()
        tally["clean remounts"] += 1
        self.pool.umount()
        self.pool.start()
        self._reconcile(float("inf"))

    @rule(kill=st.booleans())
    def lose_index(self, kill: bool) -> None:
        """Unmounted or killed, the index deleted: found again from summaries and headers. Empty directories are not."""
        if not self._may_restart():
            return
        self._drop_handles()
        stopped = time.monotonic()
        tally["lost indexes"] += 1
        if kill:
            self.pool.kill()
            helpers.detach(self.pool.mount)
        else:
            self.pool.umount()
        shutil.rmtree(self.pool.path / "index")
        self.pool.start()
        self.pool.wait_rebuilt()
        self._reconcile(stopped - SUMMARY_GRACE_S if kill else float("inf"), index_lost=True)

    # ---- comparing ----

    def _observe(self) -> tuple[dict[str, bytes], set[str]]:
        files, directories = {}, set()
        for directory, names, leaves in os.walk(self.base):
            above = pathlib.Path(directory)
            directories |= {str((above / name).relative_to(self.base)) for name in names}
            for leaf in leaves:
                files[str((above / leaf).relative_to(self.base))] = helpers.read_file(above / leaf)
        return files, directories

    def _reconcile(self, settled: float, *, index_lost: bool = False) -> None:
        """After a restart: everything found is allowed, everything owed is found. Then the model is what was found."""
        if index_lost and not self.base.exists():
            assert not any(not node.may_be_missing for node in self.files()), "the whole tree is missing"
            self.base.mkdir()
            self._fsync(self.base)  # else a kill within the next second may undo it
        found, directories = self._observe()
        candidates = self.nodes + [node for node in self.removed if (node.removed or FOREVER) > settled]
        places = {node: node.paths(settled) for node in candidates}
        takers: dict[Node, int] = {}
        new: list[tuple[str, Node]] = []
        for path, data in sorted(found.items()):
            fitting = [node for node in candidates if node.content == data and path in places[node]]
            if not fitting:
                known = [
                    f"{'removed' if other.removed else 'live'} {other.path()} of {sorted(other.paths(FOREVER))}"
                    for other in self.nodes + self.removed
                    if other.content == data
                ]
                raise AssertionError(f"{path}: {len(data)} bytes that must not be there; they are those of {known}")
            node = min(fitting, key=lambda other: takers.get(other, 0))
            takers[node] = takers.get(node, 0) + 1
            assert takers[node] == 1 or not data, f"one block has two names, {path} and another"
            new.append((path, node))
        for node in self.files():
            if node in takers or node.may_be_missing or self._contested(node, candidates, places, settled):
                continue
            if any(other.content == node.content and other in takers for other in candidates):
                continue  # of the same content: empty files
            raise AssertionError(
                f"{node.path()} ({len(node.content or b'')} bytes, allowed at {places[node]}) is "
                f"missing; found {sorted(found)}"
            )
        wanted = {path for node in candidates if node.content is None for path in places[node]} | {""}
        wanted |= {str(above) for node in candidates for path in places[node] for above in pathlib.Path(path).parents}
        assert directories <= wanted, f"directories that must not be there: {directories - wanted}"
        if not index_lost:
            for node in self.directories()[1:]:
                if not node.began_after(settled):
                    assert places[node] & directories, (
                        f"directory {node.path()} is missing; the run's own: {self.base.exists()}, found {directories}"
                    )
        self._adopt(new, directories, settled)

    def _contested(self, node: Node, candidates: list[Node], places: dict[Node, set[str]], settled: float) -> bool:
        """Its rename may be undone, and meanwhile something else has that name: then it may be gone."""
        elsewhere = places[node] - {node.path()}
        return node.began_after(settled) and any(
            path in places[other] or any(path.startswith(f"{place}/") for place in places[other])
            for path in elsewhere
            for other in candidates
            if other is not node
        )

    def _adopt(self, files: list[tuple[str, Node]], directories: set[str], settled: float) -> None:
        """The present state is durable and may not change by another crash."""
        self.restarts, self.steps = self.restarts + 1, 0
        made: dict[str, Node] = {"": self.root}
        for path in sorted(directories):
            above, _, name = path.rpartition("/")
            made[path] = Node(None, [(made[above], name, FOREVER)])
        adopted = []
        for path, old in files:
            above, _, name = path.rpartition("/")
            pinned = "user.kvfs.pin" in os.listxattr(self.base / path)
            assert pinned or not old.pinned or old.pinned_since > settled or not old.content, f"{path}: its pin is gone"
            adopted.append(Node(old.content, [(made[above], name, FOREVER)], None, old.may_be_missing, pinned))
        self.nodes = [node for path, node in made.items() if path] + adopted
        self.removed = []
        say(f"after the restart: {[node.path() for node in self.nodes]}")

    def _check_all(self) -> None:
        found, directories = self._observe()
        files = {node.path(): node for node in self.files()}
        assert found.keys() <= files.keys(), f"strange files: {found.keys() - files.keys()}"
        for path, node in files.items():
            assert path in found or node.may_be_missing, f"{path} is missing"
            if path in found:
                assert_same(found[path], node.content or b"", path)
        assert directories == {node.path() for node in self.directories()[1:]}


def read_direct(descriptor: int, size: int) -> bytes:
    """Read a whole file into aligned memory, a part at a time."""
    with mmap.mmap(-1, size + 4096) as memory:
        at = 0
        while at < size:
            done = os.preadv(descriptor, [memoryview(memory)[at : at + 512 * 1024]], at)
            assert done > 0, f"end at {at} of {size}"
            at += done
        return memory[:at]


KINDS: dict[str, Callable[[Machine], None]] = {
    "kills": lambda machine: machine.crash(False),
    "lost indexes": lambda machine: machine.lose_index(True),
    "clean remounts": lambda machine: machine.remount(),
    "evictions": lambda machine: machine.evict(False),
}


@pytest.fixture
def pools() -> Iterator[None]:
    helpers.requires_root()
    helpers.requires_fuse()
    global mounted
    mounted = Mounted()
    try:
        yield
    finally:
        print(mounted.pool.log_tail() if mounted.pool else "no pool")
        mounted.stack.close()


def seen_enough() -> bool:
    return all(tally[kind] for kind in KINDS) and tally["steps on files"] > 100


def take_turns() -> None:
    """One run of given steps, with those that were not drawn: few runs may draw no eviction at all."""
    machine = Machine()
    machine.begin()
    for kind in [kind for kind in KINDS if not tally[kind]]:
        for number, name in enumerate("abcdf"):
            machine.store(0, name, 50_000 + number, 3, random.Random(number), os.O_TRUNC, False)
            machine.rename(number, 0, "e.tmp", True)
        KINDS[kind](machine)
    machine.teardown()


@pytest.mark.timeout(120 + 30 * max(EXAMPLES, ENOUGH))
def test_the_mount_behaves_like_the_model(pools: None) -> None:
    """Whatever is done, evicted, killed and mounted: what is read is what was written, or a miss where one may be."""
    for number in range(max(1, ENOUGH // EXAMPLES)):
        print(f"seed {SEED + number} (KVFS_MODEL_SEED), {EXAMPLES} runs of {STEPS} steps")
        run_state_machine_as_test(  # type: ignore[no-untyped-call]
            seed(SEED + number)(Machine),
            settings=settings(
                max_examples=EXAMPLES,
                stateful_step_count=STEPS,
                deadline=None,
                database=None,
                phases=[Phase.generate, *([Phase.shrink] if SHRINK else [])],
                print_blob=True,
                report_multiple_bugs=False,
                suppress_health_check=list(HealthCheck),
            ),
        )
        print(dict(tally))
        if seen_enough():
            break
    if not seen_enough():
        take_turns()
    assert seen_enough(), tally


def test_what_lost_its_name_a_moment_before_the_unmount_leaves_names_and_table_alike() -> None:
    helpers.requires_root()
    helpers.requires_fuse()
    with Pool(files=2, size="256M", program=[COMPARING]) as pool:
        for name in ("replaced", "new"):
            helpers.write_file(pool.mount / name, name.encode())
        with helpers.opened(pool.mount / "replaced", os.O_RDONLY):
            os.rename(pool.mount / "new", pool.mount / "replaced")
        pool.umount()
        assert "names and index differ" not in pool.log_tail()
        pool.start()
        assert helpers.read_file(pool.mount / "replaced") == b"new" and os.listdir(pool.mount) == ["replaced"]


def test_an_index_that_loses_a_record_is_noticed() -> None:
    """The comparison that the runs above depend on can fail."""
    helpers.requires_root()
    helpers.requires_fuse()
    environment = {"KVFS_MODEL_LOSE": "lost"}
    with Pool(files=2, size="256M", program=[COMPARING], environment=environment) as pool:
        helpers.write_file(pool.mount / "kept", b"x")
        with helpers.opened(pool.mount, os.O_RDONLY | os.O_DIRECTORY) as descriptor:
            os.fsync(descriptor)
        pid = pool.pid()
        assert helpers.process_alive(pid)
        helpers.write_file(pool.mount / "lost", b"x")
        helpers.wait_until(lambda: not helpers.process_alive(pid), "the end of the daemon")
        assert "names and index differ" in pool.log_tail()
        helpers.detach(pool.mount)
