"""A storm of random calls on one file, compared after each with a bytearray: fsx, in Python.

The seed is in the test's name and in every failure; KVFS_STORM_SEEDS=1,2,3 and KVFS_STORM_STEPS choose others.
The storm runs in a child, so that a mapping that cannot be read ends the child and not the session.
"""

import fcntl
import mmap
import os
import random

import pytest
from helpers import KIB, MIB, assert_same, in_child, often, read_file, repeated

SEEDS = [int(word) for word in (os.environ.get("KVFS_STORM_SEEDS") or often("1", "1,2,3,4")).split(",")]
STEPS = int(os.environ.get("KVFS_STORM_STEPS", f"{repeated(1500)}"))


class Storm:
    """One file, its shadow, and the calls made so far."""

    def __init__(self, directory, seed, largest, *, direct, mapped):
        self.directory, self.largest = directory, largest
        self.direct, self.mapped = direct, mapped
        self.dice = random.Random(seed)
        self.path = directory / "storm"
        self.shadow = bytearray()
        self.log = []
        self.descriptor = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o644)
        self.reader = None

    def run(self, steps):
        calls = [
            (self.write, 30),
            (self.append, 5),
            (self.read, 20),
            (self.read_all, 4),
            (self.truncate, 5),
            (self.truncate_by_path, 3),
            (self.size, 6),
            (self.reopen, 8),
            (self.reopen_truncated, 1),
            (self.rename, 4),
            (self.sync, 3),
            (self.duplicate, 3),
            (self.read_by_another, 8),
            (self.preallocate, 2),
        ]
        if self.mapped:
            calls += [(self.map_write, 8), (self.map_read, 8)]
        if self.direct:
            calls += [(self.toggle_direct, 5)]
        functions, weights = zip(*calls, strict=True)
        for step in range(steps):
            call = self.dice.choices(functions, weights)[0]
            try:
                call()
                if step % 10 == 9:
                    self.size()
            except BaseException as error:
                calls_made = "\n  ".join(self.log[-25:])
                raise AssertionError(f"step {step}: {error!r}\nlast calls:\n  {calls_made}") from error
        os.close(self.descriptor)
        if self.reader is not None:
            os.close(self.reader)
        assert_same(read_file(self.path), self.shadow, "at the end")
        assert self.path.stat().st_size == len(self.shadow)

    def note(self, text):
        self.log.append(text)

    def is_direct(self):
        return bool(fcntl.fcntl(self.descriptor, fcntl.F_GETFL) & os.O_DIRECT)

    def span(self, limit, align):
        """Return a random offset and size below limit, of every magnitude, on whole pages if align."""
        offset = self.dice.randrange(limit)
        size = min(self.dice.choice([1, 100, 4096, 5000, 70_000, limit // 2 + 1]), limit - offset)
        size = self.dice.randint(1, max(size, 1))
        if align:
            offset -= offset % 4096
            size += -size % 4096
        return offset, size

    def store(self, offset, data):
        if len(self.shadow) < offset:
            self.shadow.extend(bytes(offset - len(self.shadow)))
        self.shadow[offset : offset + len(data)] = data

    def memory(self, data):
        memory = mmap.mmap(-1, len(data))
        memory[:] = data
        return memory

    def write(self):
        direct = self.is_direct()
        offset, size = self.span(self.largest, direct)
        data = self.dice.randbytes(size)
        self.note(f"pwrite {size} at {offset}{' direct' if direct else ''}")
        assert os.pwrite(self.descriptor, self.memory(data) if direct else data, offset) == size
        self.store(offset, data)

    def append(self):
        data = self.dice.randbytes(self.dice.choice([1, 5000, 4096, 40_000]))
        if len(self.shadow) + len(data) > 2 * self.largest:
            return
        self.note(f"append {len(data)} to {len(self.shadow)}")
        descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND)
        assert os.write(descriptor, data) == len(data)
        assert os.fstat(descriptor).st_size == len(self.shadow) + len(data)
        os.close(descriptor)
        self.shadow += data

    def read(self):
        direct = self.is_direct()
        offset, size = self.span(self.largest, direct)
        self.note(f"pread {size} at {offset}{' direct' if direct else ''}")
        memory = mmap.mmap(-1, size)
        count = os.preadv(self.descriptor, [memory], offset)
        assert_same(memory[:count], self.shadow[offset : offset + size], f"pread {size} at {offset}")

    def read_all(self):
        self.note("read by path")
        assert_same(read_file(self.path), self.shadow, "read by path")

    def read_by_another(self):
        """Through a read-only descriptor that stays open over rewrites."""
        if self.reader is None or self.dice.random() < 0.2:
            if self.reader is not None:
                os.close(self.reader)
            self.reader = os.open(self.path, os.O_RDONLY)
            self.note("open the reader")
        offset, size = self.span(self.largest, align=False)
        self.note(f"reader's pread {size} at {offset}")
        assert_same(
            os.pread(self.reader, size, offset),
            self.shadow[offset : offset + size],
            f"reader's pread {size} at {offset}",
        )

    def resize(self, size):
        if size <= len(self.shadow):
            del self.shadow[size:]
        else:
            self.shadow.extend(bytes(size - len(self.shadow)))

    def truncate(self):
        size = self.dice.choice([0, self.dice.randrange(self.largest), len(self.shadow) // 2])
        self.note(f"ftruncate {size} from {len(self.shadow)}")
        os.ftruncate(self.descriptor, size)
        self.resize(size)

    def truncate_by_path(self):
        size = self.dice.randrange(self.largest)
        self.note(f"truncate {size} from {len(self.shadow)}")
        os.truncate(self.path, size)
        self.resize(size)

    def preallocate(self):
        size = self.dice.randrange(1, self.largest)
        self.note(f"posix_fallocate {size} from {len(self.shadow)}")
        os.posix_fallocate(self.descriptor, 0, size)
        self.resize(max(size, len(self.shadow)))

    def size(self):
        self.note(f"stat {len(self.shadow)}")
        assert os.fstat(self.descriptor).st_size == len(self.shadow), f"fstat {os.fstat(self.descriptor).st_size}"
        assert self.path.stat().st_size == len(self.shadow), f"stat {self.path.stat().st_size}"

    def reopen(self):
        flags = os.O_RDWR | (os.O_DIRECT if self.direct and self.dice.random() < 0.5 else 0)
        self.note(f"close, open {flags:#x}")
        os.close(self.descriptor)
        self.descriptor = os.open(self.path, flags)

    def reopen_truncated(self):
        self.note("close, open O_TRUNC")
        os.close(self.descriptor)
        self.descriptor = os.open(self.path, os.O_RDWR | os.O_TRUNC)
        self.shadow.clear()

    def rename(self):
        target = self.directory / f"storm-{self.dice.randrange(3)}"
        self.note(f"rename to {target.name}")
        if target != self.path and self.dice.random() < 0.5:
            target.write_bytes(b"replaced")
        os.rename(self.path, target)
        self.path = target

    def sync(self):
        self.note("fsync")
        os.fsync(self.descriptor)

    def duplicate(self):
        self.note("dup, close")
        os.close(os.dup(self.descriptor))

    def toggle_direct(self):
        flags = fcntl.fcntl(self.descriptor, fcntl.F_GETFL) ^ os.O_DIRECT
        self.note(f"F_SETFL {flags:#x}")
        fcntl.fcntl(self.descriptor, fcntl.F_SETFL, flags)

    def map_write(self):
        if not self.shadow:
            return
        offset, size = self.span(len(self.shadow), align=False)
        data = self.dice.randbytes(min(size, len(self.shadow) - offset))
        flush = self.dice.random() < 0.5
        self.note(f"mapped write {len(data)} at {offset}{' and msync' if flush else ''}")
        with mmap.mmap(self.descriptor, len(self.shadow), mmap.MAP_SHARED) as memory:
            memory[offset : offset + len(data)] = data
            if flush:
                memory.flush()
        self.store(offset, data)

    def map_read(self):
        if not self.shadow:
            return
        offset, size = self.span(len(self.shadow), align=False)
        self.note(f"mapped read {size} at {offset}")
        with mmap.mmap(self.descriptor, len(self.shadow), mmap.MAP_SHARED, mmap.PROT_READ) as memory:
            assert_same(memory[offset : offset + size], self.shadow[offset : offset + size], f"mapped read at {offset}")


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", ["buffered", "direct", "mapped"])
def test_random_calls_agree_with_a_bytearray(directory, seed, kind):
    print(f"seed {seed}, {kind}")
    in_child(lambda: Storm(directory, seed, 256 * KIB, direct=kind == "direct", mapped=kind == "mapped").run(STEPS))


@pytest.mark.parametrize("seed", SEEDS[:1])
def test_random_calls_on_a_large_file_agree_with_a_bytearray(directory, seed):
    """Over 3.5 MiB, where a block's header takes more than one page, and over several requests a call."""
    print(f"seed {seed}")
    in_child(lambda: Storm(directory, seed, 12 * MIB, direct=False, mapped=False).run(STEPS // 5))
