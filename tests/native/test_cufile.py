"""libkvfs_cufile.so against NVIDIA's libcufile 1.20: the same calls on the same mount, in a process each.

The reference is the real library with host buffers, in its compatibility mode. Two of ours are compared with it. One
has the real library behind it ("ours"), and one has none and must answer for it ("alone"). The differences of the real
one, and why they are not copied:

- a failed read or write of the descriptor is (-1, EPERM) in the real one, whatever the reason; "alone" gives the reason
- when the application has closed a descriptor that is still registered, the real one reads whatever file has its number
  now. Ours reads the registered file
- cuFileReadv of the real one aborts on an empty vector and hangs from 33 vectors on; ours reads
- a batch item without memory aborts the process there; "alone" refuses it (5022)
- of several batch items in one registered buffer, the real one checks the range of the first only; ours of all
- whether a completion is there at once is a matter of time: the real one reads small files of a mount while submitting

GPU memory is a double here (native/shims/cufile/test/fake_cuda.c), and says nothing about a GPU.
"""

import contextlib
import errno
import hashlib
import json
import os
import pathlib
import random
import subprocess
import sys
import tempfile

import helpers
import pytest

from kvfs.client import cufile

REFERENCE_DIRECTORY = helpers.REPOSITORY / "build/clients/nvidia-cufile"
PLAYER = pathlib.Path(__file__).with_name("cufile_player.py")
DOUBLES = helpers.REPOSITORY / "build/cufile"
OURS = cufile.NAMES / "libcufile.so"
SEEDS = range(12)
CALLS = 40
PLAY_TIMEOUT_S = 60

MIB = helpers.MIB
BUFFER_SIZE = 4 * MIB
# Sizes that are no multiple of anything; "large" is striped over all devices.
FILES = {"large": 3_000_017, "aligned": MIB, "page": 4096, "small": 100, "empty": 0}


# --- libraries -------------------------------------------------------------------------------------------------


def needs_unpacked(directory, pattern):
    """The folder that tools/setup-clients has unpacked; skip where it could not."""
    found = sorted(directory.glob(pattern))
    if not found:
        pytest.skip(f"no {directory}/{pattern}: tools/setup-clients brings it, where it can be had")
    return found[0]


@pytest.fixture(scope="session")
def doubles():
    """The directory of native/shims/cufile/test's libraries."""
    helpers.requires_program("make")
    helpers.run("make", "-C", helpers.REPOSITORY / "native/shims/cufile", "all", "test")
    return DOUBLES


@pytest.fixture(scope="session")
def preloads(doubles):
    """A need of the real library on a kernel without modules: it waits for /proc/modules."""
    return "" if os.path.exists("/proc/modules") else str(doubles / "proc_modules.so")


@pytest.fixture(scope="session")
def reference(preloads):
    """The real library, once it was seen to open its driver; else the tests against it skip, and say so."""
    pattern = "nvidia/*/lib/libcufile.so.0"
    found = needs_unpacked(REFERENCE_DIRECTORY, pattern)
    outcomes, status = play(found, [{"op": "driver_open"}, {"op": "version"}], preloads=preloads, timeout_s=30)
    if outcomes != [[0, 0], [0, 0, 1200]]:
        pytest.skip(f"NO REFERENCE: the real libcufile does not work here: {outcomes}, exit status {status}")
    return found


def play(library, steps, *, preloads="", real="none", stats=None, timeout_s=PLAY_TIMEOUT_S, environment=None):
    """Play the steps; their outcomes, as far as it came, and the exit status (None: it hung)."""
    with tempfile.TemporaryDirectory() as directory, tempfile.TemporaryFile("w+") as out:
        given = {
            **os.environ,
            "LD_PRELOAD": preloads,
            "KVFS_CUFILE_REAL": str(real),
            "CUFILE_LOGFILE_PATH": "/dev/null",
            **({"KVFS_CUFILE_STATS": str(stats)} if stats else {}),
            **(environment or {}),
        }
        process = subprocess.Popen(
            [sys.executable, PLAYER, library],
            stdin=subprocess.PIPE,
            stdout=out,
            cwd=directory,
            stderr=subprocess.PIPE,
            env=given,
            text=True,
        )
        try:
            error = process.communicate(json.dumps(steps), timeout=timeout_s)[1]
            status = process.returncode
        except subprocess.TimeoutExpired:
            process.kill()
            error, status = process.communicate()[1], None
        out.seek(0)
        outcomes = [json.loads(line) for line in out]
    if status == 1:
        raise AssertionError(f"the player failed:\n{error[-3000:]}")
    return outcomes, status


class Stage:
    """A directory of the mount for each library, with the same files in them, and what was played there."""

    def __init__(self, directory, reference, preloads):
        self.directory, self.preloads = directory, preloads
        self.libraries = {"real": (reference, "none"), "ours": (OURS, reference), "alone": (OURS, "none")}
        self.stats = {name: pathlib.Path(tempfile.mkstemp(prefix="kvfs-cufile-")[1]) for name in self.libraries}
        for name in self.libraries:
            make_files(directory / name)

    def play(self, name, steps):
        library, real = self.libraries[name]
        text = json.dumps(steps).replace("{dir}", str(self.directory / name))
        return play(library, json.loads(text), preloads=self.preloads, real=real, stats=self.stats[name])

    def counts(self, name):
        return read_stats(self.stats[name])

    def close(self):
        for path in self.stats.values():
            path.unlink()


def make_files(directory):
    directory.mkdir()
    (directory / "directory").mkdir()
    for name, size in FILES.items():
        helpers.write_file(directory / name, helpers.content(size, name))


def wait_sealed(directory, names=tuple(FILES)):
    """Until all were sealed and the block table says so: from then on libkvfs reads them."""
    names = [name for name in names if FILES[name]]
    steps = [
        buffer(),
        *(step for name in names for step in opened(name, name)),
        *(read(f"h{name}", 1, 0) for name in names),
    ]
    steps = json.loads(json.dumps(steps).replace("{dir}", str(directory)))

    def all_native():
        with tempfile.NamedTemporaryFile() as stats:
            outcomes, status = play(OURS, steps, stats=stats.name)
            assert status == 0 and all(outcome[0] == 1 for outcome in outcomes[-len(names) :]), outcomes
            return read_stats(pathlib.Path(stats.name))["native_reads"] == len(names)

    helpers.wait_until(all_native, f"the seal of {names}", interval_s=0.2)


def read_stats(path):
    """The sum over all processes that added a line."""
    total = {}
    for line in path.read_text().splitlines():
        for key, value in json.loads(line).items():
            total[key] = total.get(key, 0) + value
    return total


@pytest.fixture
def stage(directory, reference, preloads):
    with contextlib.closing(Stage(directory, reference, preloads)) as made:
        yield made


def plain(outcome):
    """Without what "alone" knows better: why a read or write of the descriptor failed."""
    if isinstance(outcome, list):
        if len(outcome) == 3 and outcome[0] == -1 and outcome[1] in ("EFAULT", "EBADF", "EIO", "EPERM"):
            return [-1, "the descriptor's", outcome[2]]
        return [plain(each) for each in outcome]
    return outcome


def assert_alike(stage, steps, note):
    """The real library's answers to these are ours too, with and without the real one behind it."""
    expected, expected_status = stage.play("real", steps)
    assert expected_status == 0, f"{note}: the real one: exit status {expected_status} at {steps[len(expected)]}"
    for name in ("ours", "alone"):
        actual, status = stage.play(name, steps)
        for index, step in enumerate(steps):
            here = actual[index] if index < len(actual) else "nothing more"
            real = expected[index]
            if name == "alone":
                here, real = plain(here), plain(real)
            assert here == real, f"{note}, {name}, step {index}: {step}: {here}, the real one {real}"
        assert status == 0, f"{note}, {name}: exit status {status}"


# --- sequences -------------------------------------------------------------------------------------------------


def buffer(name="B", size=BUFFER_SIZE, **more):
    return {"op": "buffer", "name": name, "size": size, **more}


def opened(name, file, flags="O_RDONLY"):
    return [
        {"op": "open", "name": name, "path": f"{{dir}}/{file}", "flags": flags},
        {"op": "register", "name": f"h{name}", "fd": name},
    ]


def read(handle, size, offset, buffer="B", **more):
    return {"op": "read", "handle": handle, "buffer": buffer, "size": size, "offset": offset, **more}


def write(handle, size, offset, buffer="B", **more):
    return {"op": "write", "handle": handle, "buffer": buffer, "size": size, "offset": offset, **more}


def item(handle, size, offset, cookie, buffer="B", **more):
    return {"handle": handle, "buffer": buffer, "size": size, "offset": offset, "cookie": cookie, **more}


def submit(*items, batch="b", **more):
    return {"op": "submit", "batch": batch, "items": list(items), **more}


def batch(count, name="b"):
    return {"op": "batch", "name": name, "count": count}


def drain(count, capacity=8, batch="b", buffers=("B",)):
    return {"op": "drain", "batch": batch, "count": count, "capacity": capacity, "buffers": list(buffers)}


START = [buffer(), *opened("f", "large")]
BAD_POINTERS = (1, 4096, 65536, 1 << 40, (1 << 47) - 4096, 1 << 47, 1 << 63, (1 << 64) - 4096)
EDGES = {
    "ends": [
        *START,
        *(
            read("hf", size, offset)
            for size, offset in (
                (4096, 0),
                (3_000_017, 0),
                (BUFFER_SIZE, 0),
                (100, 3_000_016),
                (100, 3_000_017),
                (100, 3_000_018),
                (100, 1 << 40),
                (0, 0),
                (0, 1 << 62),
                (1, 0),
                (4096, 4095),
                (10, -1),
                (10, -4096),
                (0, -1),
                (1 << 33, 0),
                (1 << 32, 1),
                (1 << 31, 0),
                (10, (1 << 63) - 1),
                (10, (1 << 63) - 11),
                (10, (1 << 63) - 5),
                ((1 << 63) - 1, 0),
                (1 << 63, 0),
                ((1 << 64) - 1, 0),
            )
        ),
    ],
    "buffer offsets": [
        *START,
        read("hf", 1000, 777, buffer_offset=13),
        read("hf", 10, 0, at=4096, buffer_offset=-1),
        read("hf", 4096, 4096, at=8192, buffer_offset=-8192),
        read("hf", 8192, 100, at=1, buffer_offset=4095),
    ],
    "no memory": [
        *START,
        read("hf", 10, 0, None),
        read("hf", 0, 0, None),
        read("hf", 10, 1 << 40, None),
        read(77, 10, 0, None),
        write("hf", 10, 0, None),
    ],
    "bad memory": [
        *START,
        buffer("R", 8192, read_only=True),
        read("hf", 100, 0, "R"),
        read("hf", 8192, 0, "R"),
        read("hf", BUFFER_SIZE, 0, buffer_offset=BUFFER_SIZE - 4096),
        read("hf", 8, 0, buffer_offset=BUFFER_SIZE - 4),
        read("hf", 8192, 0, buffer_offset=-4096),
        *(
            read("hf", size, offset, where)
            for where in BAD_POINTERS
            for size, offset in ((4096, 0), (5, 7), (MIB, 4096))
        ),
    ],
    "handles": [
        buffer(),
        read(None, 10, 0),
        {"op": "use_count"},
        {"op": "driver_open"},
        read(None, 10, 0),
        read(12345, 10, 0),
        *opened("f", "large"),
        {"op": "use_count"},
        {"op": "deregister", "handle": "hf"},
        read("hf", 10, 0),
        {"op": "deregister", "handle": "hf"},
        {"op": "deregister", "handle": None},
        {"op": "deregister", "handle": 4242},
        {"op": "register", "name": "again", "fd": "f"},
        read("again", 10, 5),
    ],
    "registering": [
        buffer(),
        {"op": "register", "name": "h", "fd": -1},
        {"op": "use_count"},
        {"op": "register", "name": "h", "fd": 99},
        *opened("f", "large"),
        {"op": "register", "name": "h", "fd": "f"},
        *({"op": "register", "name": "h", "fd": "f", "type": kind} for kind in (0, 2, 3, 77)),
        {"op": "register", "name": "h", "fd": "f", "null_out": True},
        {"op": "register", "name": "h", "fd": "f", "null_description": True},
        {"op": "open", "name": "d", "path": "{dir}/directory", "flags": "O_RDONLY"},
        {"op": "register", "name": "hd", "fd": "d"},
        *opened("g", "large"),
        read("hg", 10, 0),
        {"op": "deregister", "handle": "hf"},
        {"op": "register", "name": "h", "fd": "f"},
        read("h", 10, 0),
    ],
    "open flags": [
        buffer(),
        *opened("w", "large", "O_WRONLY"),
        read("hw", 10, 0),
        read("hw", 0, 0),
        read("hw", 10, -1),
        read("hw", 10, 0, None),
        read("hw", 10, 0, 1 << 40),
        *opened("r", "large"),
        write("hr", 10, 0),
        write("hr", 0, 0),
        write("hr", 10, -1),
        *opened("d", "large", "O_RDONLY|O_DIRECT"),
        *(read("hd", size, offset) for size, offset in ((4096, 0), (10, 0), (4096, 1), (100, 3_000_000))),
    ],
    "small files": [
        buffer(),
        *opened("e", "empty"),
        read("he", 10, 0),
        *opened("s", "small"),
        read("hs", 4096, 0),
        read("hs", 50, 60),
        read("hs", 50, 100),
        *opened("p", "page"),
        read("hp", 4096, 0),
        read("hp", 1, 4095),
    ],
    "buffers": [
        *START,
        {"op": "buffer_register", "buffer": "B", "size": 8192},
        {"op": "buffer_register", "buffer": "B", "size": 8192},
        {"op": "buffer_register", "buffer": "B", "size": 100},
        read("hf", 8192, 0),
        read("hf", 8193, 0),
        read("hf", 4096, 0, buffer_offset=4096),
        read("hf", 4096, 0, buffer_offset=8192),
        read("hf", 4096, 0, buffer_offset=-4096),
        read("hf", 8193, -1),
        read("hf", 8193, 4_000_000),
        read("hf", 0, 0, buffer_offset=9000),
        read("hf", 0, 0, buffer_offset=-1),
        read("hf", 4096, 0, at=4096),
        read("hf", 8192, 0, at=4096),
        {"op": "buffer_deregister", "buffer": "B", "at": 10},
        {"op": "buffer_deregister", "buffer": "B"},
        {"op": "buffer_deregister", "buffer": "B"},
        read("hf", 8193, 0),
        {"op": "buffer_deregister", "buffer": None},
        {"op": "buffer_register", "buffer": None, "size": 5},
        {"op": "buffer_register", "buffer": "B", "size": 0},
        *(
            {"op": "buffer_register", "buffer": "B", "size": 100, "at": 4096 * flags, "flags": flags}
            for flags in (1, 2, 3, 4, 7)
        ),
        {"op": "buffer_register", "buffer": 1 << 40, "size": 4096},
        read("hf", 100, 0, 1 << 40),
    ],
    "driver": [
        *START,
        {"op": "use_count"},
        {"op": "driver_open"},
        {"op": "driver_open"},
        {"op": "use_count"},
        {"op": "buffer_register", "buffer": "B", "size": 8192},
        {"op": "driver_close"},
        {"op": "use_count"},
        read("hf", 10, 0),
        {"op": "driver_close", "v2": False},
        {"op": "use_count"},
        read("hf", 10, 0),
        {"op": "driver_close"},
        {"op": "use_count"},
        {"op": "buffer_deregister", "buffer": "B"},
        read("hf", 10, 0),
        {"op": "register", "name": "h", "fd": "f"},
        read("h", 8193, 0),
        {"op": "buffer_register", "buffer": "B", "size": 8192},
        read("h", 8193, 0),
    ],
    "driver unused": [
        buffer(),
        {"op": "use_count"},
        {"op": "version"},
        {"op": "properties"},
        {"op": "properties", "null": True},
        batch(4),
        {"op": "use_count"},
        {"op": "buffer_deregister", "buffer": "B"},
        {"op": "use_count"},
        {"op": "driver_open"},
        {"op": "properties"},
        {"op": "driver_close"},
        {"op": "use_count"},
    ],
    "vectors": [
        *START,
        {"op": "readv", "handle": "hf", "vectors": [["B", 0, 10], ["B", 100, 20]], "offset": 5},
        {"op": "readv", "handle": "hf", "vectors": [["B", 0, 10], ["B", 100, 20]], "offset": 3_000_000},
        {"op": "readv", "handle": "hf", "vectors": [["B", 0, 10], ["B", 100, 20]], "offset": 3_000_017},
        {"op": "readv", "handle": "hf", "vectors": [["B", 4096 * i, 4000] for i in range(32)], "offset": 12345},
        {"op": "readv", "handle": "hf", "vectors": [], "offset": 0},
        {"op": "readv", "handle": "hf", "vectors": [["B", 0, 10]], "offset": 0, "flags": 1},
        {"op": "readv", "handle": "hf", "vectors": [["B", 0, 10]], "offset": -1},
        {"op": "readv", "handle": "hf", "vectors": [[1 << 40, 0, 10]], "offset": 0},
        {"op": "readv", "handle": "hf", "vectors": [["B", 0, 4]] * 1024, "offset": 0},
        {"op": "readv", "handle": None, "vectors": [["B", 0, 10]], "offset": 0},
        {"op": "readv", "handle": 77, "vectors": [["B", 0, 10]], "offset": 0},
        {"op": "writev", "handle": "hf", "vectors": [["B", 0, 10]], "offset": 0},
        {"op": "buffer_register", "buffer": "B", "size": 8192},
        {"op": "readv", "handle": "hf", "vectors": [["B", 0, 10], ["B", 100, 10]], "offset": 0},
        {"op": "readv", "handle": "hf", "vectors": [["B", 0, 8193]], "offset": 0},
    ],
    "streams without CUDA": [
        *START,
        {"op": "read_async", "handle": "hf", "buffer": "B", "size": 100, "offset": 0},
        {"op": "read_async", "handle": None, "buffer": "B", "size": 100, "offset": 0},
        {"op": "read_async", "handle": "hf", "buffer": None, "size": 100, "offset": 0},
        {"op": "read_async", "handle": "hf", "buffer": "B", "size": 100, "offset": 0, "null": True},
        {"op": "write_async", "handle": "hf", "buffer": "B", "size": 100, "offset": 0},
        {"op": "stream_register"},
        {"op": "stream_register", "flags": 15},
        {"op": "stream_deregister"},
        {"op": "stream_deregister"},
    ],
    "batches": [
        *START,
        *({"op": "batch", "name": "x", "count": count} for count in (0, 1, 128, 129, 1 << 31)),
        {"op": "batch", "name": "x", "count": 4, "null": True},
        batch(4),
        {"op": "status", "batch": "b", "least": 0, "count": 4},
        {"op": "status", "batch": "b", "least": 1, "count": 4, "timeout_ms": 100},
        submit(
            item("hf", 4096, 0, 1),
            item("hf", 100, 2_999_990, 2, buffer_offset=8192),
            item("hf", 100, 3_000_017, 3, buffer_offset=16384),
            item("hf", 100, 10, 4, buffer_offset=32768),
        ),
        drain(4),
        {"op": "status", "batch": "b", "least": 0, "count": 4},
        {"op": "status", "batch": "b", "least": 1, "count": 4},
        submit(item("hf", 3_000_017, 0, 5)),
        drain(1),
        submit(item("hf", 1000, 1, 6)),
        submit(item("hf", 1000, 2, 7, buffer_offset=5000)),
        drain(2),
        {"op": "status", "batch": "b", "least": 0, "count": 0},
        {"op": "status", "batch": "b", "least": 2, "count": 1},
        {"op": "status", "batch": "b", "least": 5, "count": 5, "timeout_ms": 100},
        {"op": "status", "batch": "b", "least": 1, "count": 4, "null": True},
        {"op": "status", "batch": None, "least": 1, "count": 4},
        {"op": "status", "batch": 999, "least": 1, "count": 4},
        submit(item("hf", 1, 0, 1), batch=None),
        submit(item("hf", 1, 0, 1), batch=999),
        {"op": "cancel", "batch": None},
        {"op": "cancel", "batch": 999},
        {"op": "destroy", "batch": None},
        {"op": "cancel", "batch": "b"},
        submit(item("hf", 4096, 0, 8)),
        {"op": "deregister", "handle": "hf"},
        drain(1),
        {"op": "destroy", "batch": "b"},
        {"op": "cancel", "batch": "b"},
        {"op": "status", "batch": "b", "least": 0, "count": 4},
        submit(item("hf", 4096, 0, 9)),
    ],
    "batches cancelled": [
        *START,
        batch(8),
        submit(*(item("hf", 1_000_000, i, i) for i in range(8))),
        {"op": "cancel", "batch": "b"},
        {"op": "status", "batch": "b", "least": 0, "count": 8},
        # A cancelled item may have been read, or not.
        submit(item("hf", 1000, 0, 1)),
        drain(1, buffers=()),
        submit(*(item("hf", 1_000_000, i, i) for i in range(8))),
        {"op": "destroy", "batch": "b"},
        batch(8),
        submit(item("hf", 1000, 0, 1)),
        {"op": "driver_close"},
        {"op": "status", "batch": "b", "least": 1, "count": 8},
    ],
    "batches full": [
        *START,
        batch(2),
        submit(*(item("hf", 4096, 0, i) for i in range(3))),
        {"op": "status", "batch": "b", "least": 0, "count": 2},
        submit(item("hf", 4096, 0, 1)),
        submit(item("hf", 4096, 0, 2)),
        submit(item("hf", 4096, 0, 3)),
        {"op": "status", "batch": "b", "least": 0, "count": 2},
        submit(item("hf", 4096, 0, 4)),
        drain(1, 2),
        submit(),
        submit(item("hf", 1, 0, 1), null=True),
        submit(item("hf", 1, 0, 5)),
        drain(1, 2),
    ],
}
for _name, _bad in {
    "no handle": item(None, 4096, 0, 9),
    "unknown handle": item(77, 4096, 0, 9),
    "negative offset": item("hf", 4096, -1, 9),
    "bad memory": item("hf", 4096, 0, 9, 1 << 40),
    "nothing": item("hf", 0, 0, 9),
    "write": item("hf", 10, 0, 9, opcode=1),
    "opcode": item("hf", 10, 0, 9, opcode=7),
    "mode": item("hf", 10, 0, 9, mode=3),
    "before the buffer": item("hf", 10, 0, 9, buffer_offset=-100),
}.items():
    EDGES[f"batch with {_name}"] = [
        *START,
        batch(4),
        submit(item("hf", 4096, 0, 1, buffer_offset=4096), _bad, item("hf", 4096, 0, 2, buffer_offset=8192)),
        # After an error the items before the bad one may have been read, or not.
        drain(2) if _name == "nothing" else drain(0, buffers=()),
        {"op": "status", "batch": "b", "least": 0, "count": 4},
        submit(item("hf", 1, 0, 3)),
        drain(1, buffers=()),
        # Alone in a batch, bad memory is 5035 or 5040 there, by what was in the batch before.
        *([submit(_bad)] if _name != "bad memory" else []),
        {"op": "status", "batch": "b", "least": 0, "count": 4},
    ]


def generated(seed):
    """A sequence of calls on several files, with what is odd now and then. The same seed gives the same one."""
    rng = random.Random(seed)
    steps = [buffer(), buffer("C", MIB), {"op": "driver_open"}]
    handles = {}
    for index, (name, flags) in enumerate(
        (
            ("large", "O_RDONLY"),
            ("aligned", "O_RDONLY|O_DIRECT"),
            ("small", "O_RDONLY"),
            ("large", "O_RDONLY"),
            ("page", "O_RDWR"),
            ("new", "O_RDWR|O_CREAT"),
        )
    ):
        steps += opened(f"f{index}", name, flags)
        handles[f"hf{index}"] = flags
    steps.append(batch(8))
    sizes = (1, 7, 100, 512, 4095, 4096, 4097, 65536, 131072, 131073, 524288, MIB)
    offsets = (0, 1, 99, 100, 4095, 4096, 4097, 131071, 131072, MIB - 1, MIB, 3_000_000, 3_000_017, 5_000_000)
    registered = {}

    def spot(writing=False):
        handle = rng.choice([name for name, flags in handles.items() if "RDWR" in flags] if writing else list(handles))
        size, offset = rng.choice(sizes), rng.choice(offsets) if rng.random() < 0.6 else rng.randrange(3_100_000)
        if rng.random() < 0.3:
            size = rng.randrange(1, 600_000)
        if writing and offset > MIB:
            offset %= MIB
        return handle, size, offset

    for _ in range(CALLS):
        kind = rng.choices(
            ("read", "write", "batch", "readv", "odd", "register", "descriptor", "again", "closed"),
            (30, 8, 15, 6, 8, 8, 3, 6, 3),
        )[0]
        where = rng.choice("BC")
        limit = registered.get(where) or (BUFFER_SIZE if where == "B" else MIB)
        handle, size, offset = spot(kind == "write")
        if kind in ("read", "write"):
            size = min(size, limit)
            at = rng.choice((0, limit - size, rng.randrange(limit - size + 1)))
            steps.append((read if kind == "read" else write)(handle, size, offset, where, buffer_offset=at))
        elif kind == "batch":
            count = rng.randrange(1, 9)
            # Parts of the buffer of their own, and no reads of what is being written: order is nobody's promise.
            part = BUFFER_SIZE // 8
            readable = [name for name in handles if "RDWR" not in handles[name]]
            items = [
                item(rng.choice(readable), min(rng.choice(sizes), part), rng.choice(offsets), i, at=i * part)
                for i in range(count)
            ]
            steps += [submit(*items), drain(count)]
        elif kind == "readv":
            vectors, at = [], 0
            for _ in range(rng.randrange(1, 9)):
                length = rng.choice(sizes[:8])
                vectors.append(["B", at, length])
                at += length + rng.randrange(100)
            steps.append({"op": "readv", "handle": handle, "vectors": vectors, "offset": offset})
        elif kind == "odd":
            steps.append(
                rng.choice(
                    (
                        read(77, size, offset),
                        read(handle, size, -offset - 1),
                        read(handle, 0, offset),
                        read(handle, size, offset, None),
                        read(handle, size, offset, 1 << 40),
                        write("hf0", size, offset, where),
                        {"op": "use_count"},
                        {"op": "register", "name": "x", "fd": "f0"},
                        read(handle, BUFFER_SIZE + 1, 0, "B"),
                    )
                )
            )
        elif kind == "register":
            if where in registered:
                del registered[where]
                steps.append({"op": "buffer_deregister", "buffer": where})
            else:
                registered[where] = limit
                steps.append({"op": "buffer_register", "buffer": where, "size": limit})
        elif kind == "descriptor":
            steps += [
                {
                    "op": "file_write",
                    "name": rng.choice(("f4", "f5")),
                    "size": size,
                    "offset": offset % MIB,
                    "byte": rng.randrange(256),
                },
                read(rng.choice(("hf4", "hf5")), size, offset % MIB, "B" if "B" not in registered else None),
            ]
        elif kind == "again":
            name = handle.removeprefix("h")
            steps += [
                {"op": "deregister", "handle": handle},
                read(handle, 10, 0),
                {"op": "register", "name": handle, "fd": name},
            ]
        else:
            # Closed, so sealed, and opened again.
            steps += [
                {"op": "deregister", "handle": "hf5"},
                {"op": "close", "name": "f5"},
                {"op": "file_digest", "path": "{dir}/new"},
                *opened("f5", "new", "O_RDWR"),
            ]
    return steps


@pytest.mark.parametrize("edge", EDGES)
def test_edges_are_as_in_the_real_one(stage, edge):
    assert_alike(stage, EDGES[edge], edge)


@pytest.mark.parametrize("seed", SEEDS)
def test_generated_calls_end_as_in_the_real_one(stage, seed):
    assert_alike(stage, generated(seed), f"seed {seed}")
    for name in ("ours", "alone"):
        assert stage.counts(name)["native_reads"] > 0


# --- what ours does by itself ----------------------------------------------------------------------------------


@pytest.fixture
def sealed(directory, doubles):
    """A directory of files that libkvfs reads, and a function that plays steps there with ours and counts."""
    make_files(directory / "files")
    wait_sealed(directory / "files")

    def player(steps, *, real="none", preloads="", environment=None, timeout_s=PLAY_TIMEOUT_S):
        text = json.dumps(steps).replace("{dir}", str(directory / "files"))
        with tempfile.NamedTemporaryFile() as stats:
            outcomes, status = play(
                OURS,
                json.loads(text),
                real=real,
                preloads=preloads,
                stats=stats.name,
                environment=environment,
                timeout_s=timeout_s,
            )
            assert status == 0, f"exit status {status} at {steps[len(outcomes) :][:1]}"
            return outcomes, read_stats(pathlib.Path(stats.name))

    return player


def data(file="large"):
    return helpers.content(FILES[file], file)


def digest(*parts):
    """Of a buffer of BUFFER_SIZE, 0xA5 but for (offset, bytes)."""
    content = bytearray(b"\xa5" * BUFFER_SIZE)
    for offset, part in parts:
        content[offset : offset + len(part)] = part
    return hashlib.sha256(content).hexdigest()[:16]


def functions(library):
    """The exported functions, without the templates of the C++ library that libcufile also exports."""
    lines = helpers.run("nm", "--dynamic", "--defined-only", library).stdout.splitlines()
    names = {line.split()[2] for line in lines if line.split()[1] == "T"}
    return {name for name in names if "cufile" in name.lower()}


def test_every_function_of_the_real_one_is_there(reference):
    assert functions(cufile.LIBRARY) == functions(reference)
    assert len(functions(cufile.LIBRARY)) > 80


def test_it_is_libcufile_by_name_and_stands_under_both_names():
    dynamic = helpers.run("readelf", "--dynamic", cufile.LIBRARY).stdout
    assert "Library soname: [libcufile.so.0]" in dynamic
    for name in ("libcufile.so.0", "libcufile.so"):
        needed = helpers.run("readelf", "--dynamic", cufile.NAMES / name).stdout
        assert "Shared library: [libkvfs_cufile.so]" in needed and "Library runpath: [$ORIGIN/..]" in needed


def test_other_calls_reach_the_real_one_with_their_arguments(doubles, reference, preloads):
    outcomes, status = play(OURS, [{"op": "object_initialize"}, {"op": "version"}], real=doubles / "fake_cufile.so")
    assert outcomes == [[sum(n * n for n in range(1, 9)) + 150 + 2250] * 2, [0, 0, 1999]] and status == 0
    steps = [{"op": "parameter", "number": number} for number in (1, 5, 9)]
    assert play(OURS, steps, real=reference, preloads=preloads) == play(reference, steps, preloads=preloads)
    # With no real one they say that there is no driver.
    assert play(OURS, [{"op": "parameter", "number": 1}])[0] == [[[5001, 0], 0, [5001, 0]]]


@pytest.mark.parametrize("behind", ["the real one", "nothing"])
def test_no_byte_of_a_sealed_file_comes_through_the_mount(own_pool, reference, preloads, behind):
    pool = own_pool(files=4, size="256M")
    make_files(pool.mount / "files")
    wait_sealed(pool.mount / "files")
    before = pool.status()["counters"]
    steps = [
        buffer(),
        *opened("f", "large"),
        *opened("s", "small"),
        read("hf", BUFFER_SIZE, 0),
        read("hf", 1000, 777, at=5),
        read("hs", 100, 0),
        {"op": "readv", "handle": "hf", "vectors": [["B", 0, 4096], ["B", 9000, 100]], "offset": 1},
        batch(4),
        submit(*(item("hf", MIB, i * 700_000, i, at=i * MIB) for i in range(4))),
        drain(4, 4),
    ]
    text = json.dumps(steps).replace("{dir}", str(pool.mount / "files"))
    with tempfile.NamedTemporaryFile() as stats:
        outcomes, status = play(
            OURS,
            json.loads(text),
            stats=stats.name,
            preloads=preloads,
            real=reference if behind == "the real one" else "none",
        )
        counts = read_stats(pathlib.Path(stats.name))
    after = pool.status()["counters"]
    assert status == 0
    content = data()
    assert outcomes[5] == [len(content), 0, digest((0, content))]
    assert outcomes[-1][0] == [[i, 16, min(MIB, len(content) - i * 700_000)] for i in range(4)]
    assert after["reads"] == before["reads"] and after["read_bytes"] == before["read_bytes"]
    assert counts["native_reads"] == 9 and counts["forwarded_reads"] == counts["writes"] == 0
    assert counts["native_bytes"] == 3_000_017 + 1000 + 100 + 4196 + sum(r for _, _, r in outcomes[-1][0])


def test_a_file_that_is_written_is_read_by_its_descriptor_until_it_is_sealed(sealed):
    outcomes, counts = sealed(
        [
            buffer(),
            {"op": "open", "name": "w", "path": "{dir}/new", "flags": "O_WRONLY|O_CREAT"},
            *opened("r", "new"),
            {"op": "file_write", "name": "w", "size": 5000, "offset": 0, "byte": 7},
            read("hr", 8192, 0),
            {"op": "file_write", "name": "w", "size": 5000, "offset": 5000, "byte": 8},
            read("hr", 16384, 0),
        ]
    )
    assert outcomes[5] == [5000, 0, digest((0, b"\7" * 5000))]
    assert outcomes[7] == [10000, 0, digest((0, b"\7" * 5000 + b"\10" * 5000))]
    assert counts["native_reads"] == 0 and counts["forwarded_reads"] == 2
    # The same handle, before and after.
    outcomes, counts = sealed(
        [
            buffer(),
            {"op": "open", "name": "w", "path": "{dir}/newer", "flags": "O_WRONLY|O_CREAT"},
            *opened("r", "newer"),
            {"op": "file_write", "name": "w", "size": 5000, "offset": 0, "byte": 7},
            read("hr", 100, 0),
            {"op": "close", "name": "w"},
            *([read("hr", 8192, 0)] * 50),
        ]
    )
    assert outcomes[5][0] == 100 and all(outcome[:2] == [5000, 0] for outcome in outcomes[7:])
    assert counts["native_reads"] > 0


def test_what_was_written_by_cufile_is_read_back(sealed, directory):
    outcomes, counts = sealed(
        [
            buffer(),
            {"op": "fill", "buffer": "B", "byte": 3},
            *opened("w", "made", "O_RDWR|O_CREAT"),
            *opened("f", "page", "O_RDWR"),
            write("hw", 100_000, 0),
            write("hf", 100, 50),
            {"op": "fill", "buffer": "B", "byte": 0xA5},
            *opened("g", "page"),
            read("hf", 4096, 0),
            read("hg", 4096, 0),
            {"op": "deregister", "handle": "hw"},
            {"op": "close", "name": "w"},
        ]
    )
    changed = bytearray(data("page"))
    changed[50:150] = b"\3" * 100
    assert outcomes[6] == [100_000, 0, digest((0, b"\3" * BUFFER_SIZE))] and outcomes[7][:2] == [100, 0]
    assert outcomes[11] == outcomes[12] == [4096, 0, digest((0, bytes(changed)))]
    assert counts["writes"] == 2 and counts["native_reads"] == 0
    assert (directory / "files/made").read_bytes() == b"\3" * 100_000
    assert (directory / "files/page").read_bytes() == bytes(changed)


def test_what_another_descriptor_overwrites_is_seen(sealed):
    outcomes, _ = sealed(
        [
            buffer(),
            *opened("f", "page"),
            read("hf", 4096, 0),
            {"op": "open", "name": "w", "path": "{dir}/page", "flags": "O_WRONLY"},
            {"op": "file_write", "name": "w", "size": 100, "offset": 0, "byte": 9},
            read("hf", 4096, 0),
            {"op": "close", "name": "w"},
            read("hf", 4096, 0),
        ]
    )
    changed = b"\11" * 100 + data("page")[100:]
    assert outcomes[3] == [4096, 0, digest((0, data("page")))]
    assert outcomes[6] == outcomes[8] == [4096, 0, digest((0, changed))]


def test_a_descriptor_that_was_closed_and_a_name_that_is_gone(sealed):
    outcomes, counts = sealed(
        [
            buffer(),
            *opened("f", "large"),
            {"op": "close", "name": "f"},
            read("hf", 10, 0),
            *opened("g", "small"),
            read("hf", 10, 5),
            {"op": "unlink", "path": "{dir}/small"},
            read("hg", 100, 0),
            read("hg", 100, 0),
        ]
    )
    content = data()
    assert outcomes[4][:2] == [10, 0] and outcomes[7] == [10, 0, digest((0, content[5:15]))]
    assert outcomes[9] == outcomes[10] == [100, 0, digest((0, data("small")))]
    assert counts["native_reads"] >= 2


def test_it_reads_on_while_the_daemon_is_gone(own_pool):
    pool = own_pool(files=4, size="256M")
    make_files(pool.mount / "files")
    wait_sealed(pool.mount / "files")
    code = f"""
import json, os, signal, sys, time
sys.path.insert(0, {str(PLAYER.parent)!r})
import cufile_player
player = cufile_player.Player({str(OURS)!r})
for step in json.loads(sys.argv[1]):
    player.play(step)
read = {{"handle": "hf", "buffer": "B", "size": 3000017, "offset": 0}}
print(json.dumps(player.do_read(**read)), flush=True)
os.kill({pool.pid()}, signal.SIGKILL)
time.sleep(1)
print(json.dumps(player.do_read(**read)), flush=True)
"""
    steps = json.dumps([buffer(), *opened("f", "large")]).replace("{dir}", str(pool.mount / "files"))
    result = helpers.run(sys.executable, "-c", code, steps, environment={"KVFS_CUFILE_REAL": "none"})
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert lines == [[3_000_017, 0, digest((0, data()))]] * 2


@pytest.mark.parametrize("error", ["EIO", "ETIMEDOUT", "EAGAIN", "ENOTCONN"])
@pytest.mark.parametrize("behind", ["the real one", "nothing"])
def test_what_libkvfs_cannot_read_is_read_by_the_descriptor(sealed, doubles, reference, preloads, error, behind):
    """With a double of libkvfs. Memory that a device still owns is not given back: its late bytes are not seen."""
    outcomes, counts = sealed(
        [
            buffer(),
            *opened("f", "large"),
            read("hf", 8192, 5),
            {"op": "buffer_register", "buffer": "B", "size": BUFFER_SIZE},
            read("hf", 3000, 1),
            batch(4),
            submit(item("hf", 500, 3, 1)),
            drain(1, 4),
        ],
        real=reference if behind == "the real one" else "none",
        preloads=":".join(filter(None, (str(doubles / "slow_kvfs.so"), preloads))),
        environment={"KVFS_DOUBLE_ERROR": str(getattr(errno, error))},
    )
    content = data()
    assert outcomes[3] == [8192, 0, digest((0, content[5:8197]))]
    assert outcomes[5] == [3000, 0, digest((0, content[5:8197]), (0, content[1:3001]))]
    assert outcomes[8] == [[[1, 16, 500]], [digest((0, content[5:8197]), (0, content[1:3001]), (0, content[3:503]))]]
    assert counts["native_reads"] == 0 and counts["forwarded_reads"] == 3 and counts["forwarded_bytes"] == 11692


def test_a_forked_child_reads_on(sealed):
    child = [
        read("hf", 3_000_017, 0),
        {"op": "fill", "buffer": "B", "byte": 0xA5},
        *opened("g", "large"),
        read("hg", 1000, 1),
        batch(4, "c"),
        submit(item("hg", 100, 0, 1), batch="c"),
        drain(1, 4, "c", buffers=()),
    ]
    outcomes, _ = sealed(
        [
            buffer(),
            *opened("f", "large"),
            read("hf", 10, 0),
            batch(4),
            submit(item("hf", 10, 0, 1)),
            drain(1, 4),
            {"op": "fork", "steps": child},
            read("hf", 20, 0),
            submit(item("hf", 30, 0, 1)),
            drain(1, 4),
        ]
    )
    results, status = outcomes[7]
    assert status == 0
    content = data()
    assert results[0] == [3_000_017, 0, digest((0, content))] and results[4] == [1000, 0, digest((0, content[1:1001]))]
    assert results[7][0] == [[1, 16, 100]]
    assert outcomes[8][:2] == [20, 0] and outcomes[10][0] == [[1, 16, 30]]


def test_threads_read_at_once(sealed):
    outcomes, counts = sealed(
        [
            buffer(),
            *opened("f", "large"),
            {"op": "threads", "handle": "hf", "buffer": "B", "size": 300_000, "count": 10, "rounds": 20},
        ]
    )
    assert outcomes[3] == [[300_000 * 20] * 10, digest((0, data()[:3_000_000]))]
    assert counts["native_reads"] == 200


def test_a_batch_may_hold_files_of_both_kinds(sealed, reference, preloads):
    with tempfile.TemporaryDirectory(dir="/dev/shm") as elsewhere:
        helpers.write_file(f"{elsewhere}/file", data("aligned"))
        foreign = [
            {"op": "open", "name": "s", "path": f"{elsewhere}/file", "flags": "O_RDWR"},
            {"op": "register", "name": "hs", "fd": "s"},
        ]
        outcomes, counts = sealed(
            [
                buffer(),
                *opened("f", "large"),
                *foreign,
                batch(8),
                submit(
                    item("hf", 4096, 0, 1),
                    item("hs", 4096, 0, 2, at=4096),
                    item("hf", 4096, 4096, 3, at=8192),
                    item("hs", 4096, 4096, 4, at=12288),
                ),
                drain(4),
                submit(*(item("hs" if i % 2 else "hf", 1000, i, i, at=i * 1000) for i in range(8))),
                drain(8),
                submit(item("hf", 10, 0, 1), item(77, 10, 0, 2)),
                submit(item("hf", 10, 0, 1), item("hs", 10, 0, 2)),
                drain(2),
                submit(*(item("hs" if i % 2 else "hf", 10, 0, i) for i in range(6))),
                submit(*(item("hs" if i % 2 else "hf", 10, 0, i) for i in range(3))),
                {"op": "status", "batch": "b", "least": 0, "count": 8},
                submit(item("hs", 10, 500, 1, opcode=1), item("hf", 10, 0, 2)),
                drain(2),
                read("hs", 5, 0),
                {"op": "cancel", "batch": "b"},
                {"op": "destroy", "batch": "b"},
            ],
            real=reference,
            preloads=preloads,
        )
    large, aligned = data(), data("aligned")
    first = ((0, large[:4096]), (4096, aligned[:4096]), (8192, large[4096:8192]), (12288, aligned[4096:8192]))
    assert outcomes[7] == [[[i, 16, 4096] for i in range(1, 5)], [digest(*first)]]
    second = [(i * 1000, (aligned if i % 2 else large)[i : i + 1000]) for i in range(8)]
    assert outcomes[9] == [[[i, 16, 1000] for i in range(8)], [digest(*first, *second)]]
    assert outcomes[10] == [5027, 0] and outcomes[12][0] == [[1, 16, 10], [2, 16, 10]]
    # Nine of eight: refused, and then nothing is heard of the others.
    assert outcomes[13] == [0, 0] and outcomes[14] == [5037, 0] and outcomes[15] == [0, 0, []]
    assert outcomes[17][0] == [[1, 16, 10], [2, 16, 10]] and outcomes[18][:2] == [5, 0]
    # Of the six, three are of kvfs: read before the end of the batch, or not.
    assert 8 <= counts["native_reads"] <= 12 and counts["forwarded_reads"] == 0


def test_files_that_are_not_on_kvfs_are_the_real_ones(stage):
    with tempfile.TemporaryDirectory(dir="/dev/shm") as elsewhere:
        helpers.write_file(f"{elsewhere}/file", data("aligned"))
        steps = [
            buffer(),
            {"op": "open", "name": "f", "path": f"{elsewhere}/file", "flags": "O_RDONLY"},
            {"op": "register", "name": "hf", "fd": "f"},
            read("hf", 5000, 5),
            read("hf", 10, -1),
            batch(4),
            submit(item("hf", 100, 0, 1)),
            drain(1, 4),
            {"op": "deregister", "handle": "hf"},
            read("hf", 1, 0),
        ]
        assert stage.play("ours", steps) == stage.play("real", steps)
        assert not stage.stats["ours"].read_text()
        outcomes, _ = stage.play("alone", steps[:3])
        assert outcomes[-1] == [5008, 0, False]


def test_a_real_one_that_refuses_the_mount_is_not_asked(sealed, doubles):
    outcomes, counts = sealed(
        [
            buffer(),
            {"op": "driver_open"},
            *opened("f", "large"),
            {"op": "buffer_register", "buffer": "B", "size": BUFFER_SIZE},
            read("hf", 3_000_017, 0),
            {"op": "register", "name": "twice", "fd": "f"},
            batch(4),
            submit(item("hf", 100, 0, 1), item("hf", 100, 100, 2, buffer_offset=100)),
            drain(2, 4),
            submit(item("hf", 1, -1, 1)),
            read("hf", 10, -1),
            read(77, 10, 0),
        ],
        real=doubles / "fake_cufile.so",
    )
    assert outcomes[5] == [3_000_017, 0, digest((0, data()))]
    assert outcomes[6][0] == 5028 and outcomes[9][0] == [[1, 16, 100], [2, 16, 100]]
    assert outcomes[10] == [5022, 0] and outcomes[11][:2] == [-1, 5022]
    assert outcomes[12][0] == -4711, "a handle that is nobody's is the real one's"
    assert counts["native_reads"] == 3


# --- GPU memory, a double --------------------------------------------------------------------------------------


@pytest.fixture
def with_cuda(doubles):
    return [
        {"op": "cuda", "path": str(doubles / "fake_cuda/libcuda.so.1")},
        {"op": "device_buffer", "name": "G", "size": 12 * MIB},
    ]


def device_digest(*parts):
    content = bytearray(b"\xa5" * 12 * MIB)
    for offset, part in parts:
        content[offset : offset + len(part)] = part
    return hashlib.sha256(content).hexdigest()[:16]


def test_device_memory_is_filled_through_pinned_memory(sealed, with_cuda, directory):
    big = helpers.content(11 * MIB + 333, "big")
    helpers.write_file(directory / "files/big", big)
    outcomes, counts = sealed(
        [
            *with_cuda,
            *opened("b", "big"),
            read("hb", 12 * MIB, 0, "G"),
            {"op": "cuda_live"},
            *opened("s", "small"),
            {"op": "fill", "buffer": "G", "byte": 0xA5},
            read("hs", 4096, 10, "G", buffer_offset=12 * MIB - 100),
            {"op": "cuda_live"},
            {"op": "fill", "buffer": "G", "byte": 0xA5},
            batch(8),
            submit(*(item("hb", MIB + i, i * MIB, i, "G", at=i * MIB * 3 // 2) for i in range(8))),
            {"op": "drain", "batch": "b", "count": 8, "capacity": 8, "buffers": ["G"]},
            {"op": "cuda_live"},
        ]
    )
    assert outcomes[4] == [len(big), 0, device_digest((0, big))]
    assert outcomes[9] == [90, 0, device_digest((12 * MIB - 100, data("small")[10:]))]
    assert outcomes[14] == [
        [[i, 16, MIB + i] for i in range(8)],
        [device_digest(*((i * MIB * 3 // 2, big[i * MIB : i * MIB + MIB + i]) for i in range(8)))],
    ]
    assert outcomes[5] == outcomes[10] == outcomes[15] == [0, 0], "copies under way, or without a context"
    assert counts["gpu_bytes"] == counts["native_bytes"] > 0


def test_device_memory_is_written_from_and_read_by_the_descriptor(sealed, with_cuda, directory):
    outcomes, counts = sealed(
        [
            *with_cuda,
            {"op": "fill", "buffer": "G", "byte": 5},
            *opened("w", "made", "O_RDWR|O_CREAT"),
            write("hw", 9 * MIB + 7, 0, "G"),
            {"op": "fill", "buffer": "G", "byte": 0xA5},
            read("hw", 12 * MIB, 1, "G"),
            {"op": "cuda_live"},
            {"op": "deregister", "handle": "hw"},
            {"op": "close", "name": "w"},
        ]
    )
    assert outcomes[5][:2] == [9 * MIB + 7, 0]
    assert outcomes[7] == [9 * MIB + 6, 0, device_digest((0, b"\5" * (9 * MIB + 6)))]
    assert outcomes[8] == [0, 0] and counts["native_reads"] == 0
    assert (directory / "files/made").read_bytes() == b"\5" * (9 * MIB + 7)


def test_a_read_on_a_stream_waits_for_what_was_there_before(sealed, with_cuda):
    content = data()
    outcomes, counts = sealed(
        [
            *with_cuda,
            buffer(),
            {"op": "stream", "name": "s"},
            *opened("f", "large"),
            {"op": "stream_register", "stream": "s"},
            {
                "op": "read_async",
                "handle": "hf",
                "buffer": "G",
                "size": 3_000_017,
                "offset": 0,
                "late_size": 1000,
                "stream": "s",
            },
            {"op": "read_async", "handle": "hf", "buffer": "B", "size": 3_000_017, "offset": 7, "stream": "s"},
            {"op": "read_async", "handle": "hf", "buffer": "B", "size": 10, "offset": -7, "stream": "s"},
            {"op": "read_async", "handle": "hf", "buffer": "B", "size": 10, "offset": 0, "stream": "s", "null": True},
            {"op": "capture", "on": True},
            {"op": "read_async", "handle": "hf", "buffer": "B", "size": 10, "offset": 0, "stream": "s"},
            {"op": "capture", "on": False},
            {"op": "stream_deregister", "stream": "s"},
            {"op": "cuda_live"},
            *opened("w", "made", "O_RDWR|O_CREAT"),
            {
                "op": "write_async",
                "handle": "hw",
                "buffer": "B",
                "size": 99,
                "offset": 0,
                "late_size": 50,
                "stream": "s",
            },
            read("hw", 100, 0),
        ]
    )
    assert outcomes[7] == [0, 0, 1000, device_digest((0, content[:1000]))]
    assert outcomes[8] == [0, 0, len(content) - 7, digest((0, content[7:]))]
    assert outcomes[9][:3] == [0, 0, -5022] and outcomes[10][:2] == [5022, 0]
    assert outcomes[12][:2] == [5022, 0], "a stream that is being captured cannot be waited for"
    assert outcomes[15] == [0, 0]
    assert outcomes[18][:3] == [0, 0, 50] and outcomes[19][:2] == [50, 0]
    assert counts["async_reads"] == 3


# --- kvfs cufile-run, real clients -----------------------------------------------------------------------------


def cufile_run(*command, environment=None, **more):
    return helpers.run(
        sys.executable,
        "-m",
        "kvfs",
        "cufile-run",
        *command,
        environment={"CUFILE_LOGFILE_PATH": "/dev/null", **(environment or {})},
        **more,
    )


def test_cufile_run_sets_up_the_program(reference):
    shown = "import json, os; print(json.dumps({k: v for k, v in os.environ.items() if k[:3] in ('LD_', 'KVF')}))"
    result = cufile_run(
        "--", sys.executable, "-c", shown, environment={"LD_LIBRARY_PATH": str(reference.parent), "LD_PRELOAD": ""}
    )
    given = json.loads(result.stdout)
    assert given["LD_PRELOAD"].split(":")[0] == str(cufile.LIBRARY)
    assert given["LD_LIBRARY_PATH"].split(":") == [str(cufile.NAMES), str(reference.parent)]
    assert given["KVFS_CUFILE_REAL"] == str(reference)
    environment = {"KVFS_CUFILE_REAL": "none"}
    assert (
        json.loads(cufile_run(sys.executable, "-c", shown, environment=environment).stdout)["KVFS_CUFILE_REAL"]
        == "none"
    )
    assert cufile_run("true", environment=environment).stderr == ""


def test_cufile_run_says_what_it_cannot_run():
    result = cufile_run("no-such-program", check=False)
    assert result.returncode == 2 and "kvfs: no-such-program: No such file or directory\n" in result.stderr
    result = cufile_run(check=False)
    assert result.returncode == 2 and result.stderr == "kvfs: cufile-run: no command given\n"


@pytest.mark.parametrize("name", ["libcufile.so.0", "libcufile.so"])
def test_a_program_that_opens_libcufile_by_name_gets_ours(sealed, reference, preloads, name):
    code = f"""
import ctypes, os
library = ctypes.CDLL({name!r})
print(hasattr(library, "cuFileObjectInitialize"), "libkvfs_cufile.so" in open("/proc/self/maps").read())
version = ctypes.c_int()
library.cuFileGetVersion(ctypes.byref(version))
print(version.value, {str(reference)!r} in open("/proc/self/maps").read())
"""
    environment = {"KVFS_CUFILE_REAL": str(reference), "LD_PRELOAD": preloads}
    assert cufile_run(sys.executable, "-c", code, environment=environment).stdout.split() == [
        "True",
        "True",
        "1200",
        "True",
    ]


LINKED = """
#include <stdio.h>
struct status { int error, cuda_error; } cuFileGetVersion(int *out), cuFileDriverOpen(void);
int main(void) {
    int version = 0;
    struct status status = cuFileGetVersion(&version);
    printf("%d %d %d\\n", status.error, cuFileDriverOpen().error, version);
}
"""


def test_a_program_that_is_linked_with_libcufile_gets_ours(directory, reference, preloads):
    helpers.requires_program("gcc")
    (directory / "linked.c").write_text(LINKED)
    helpers.run("gcc", directory / "linked.c", reference, "-o", directory / "linked", "-Wl,--allow-shlib-undefined")
    assert "libcufile.so.0" in helpers.run("readelf", "--dynamic", directory / "linked").stdout
    for real in (reference, "none"):
        result = cufile_run(directory / "linked", environment={"KVFS_CUFILE_REAL": str(real), "LD_PRELOAD": preloads})
        assert result.stdout == "0 0 1200\n"


CLIENT = """
import ctypes, hashlib, os, sys
import cufile
path, made, size = sys.argv[1], sys.argv[2], int(sys.argv[3])
memory = ctypes.create_string_buffer(size)
address = ctypes.cast(memory, ctypes.c_void_p)
cufile.bindings.cuFileBufRegister(address, size, 0)
with cufile.CuFile(path, "r", use_direct_io=True) as file:
    assert file.read(address, size) == size
print(hashlib.sha256(memory.raw).hexdigest())
with cufile.CuFile(made, "w") as file:
    assert file.write(address, size - 1, 0, 1) == size - 1
cufile.bindings.cuFileBufDeregister(address)
"""


@pytest.mark.parametrize("behind", ["the real one", "nothing"])
def test_the_client_that_lmcache_uses_runs_unchanged(own_pool, reference, preloads, behind):
    client = needs_unpacked(helpers.REPOSITORY / "build/clients/cufile-python", "cufile").parent
    pool = own_pool(files=4, size="256M")
    make_files(pool.mount / "files")
    wait_sealed(pool.mount / "files")
    before = pool.status()["counters"]
    with tempfile.NamedTemporaryFile() as stats:
        result = cufile_run(
            sys.executable,
            "-c",
            CLIENT,
            pool.mount / "files/large",
            pool.mount / "files/made",
            str(FILES["large"]),
            environment={
                "PYTHONPATH": f"{client}:{helpers.REPOSITORY}",
                "KVFS_CUFILE_STATS": stats.name,
                "LD_PRELOAD": preloads,
                "KVFS_CUFILE_REAL": str(reference) if behind == "the real one" else "none",
            },
        )
        counts = read_stats(pathlib.Path(stats.name))
    after = pool.status()["counters"]
    assert result.stdout.strip() == hashlib.sha256(data()).hexdigest()
    assert after["read_bytes"] == before["read_bytes"], "bytes came through the mount"
    assert counts["native_bytes"] == FILES["large"] and counts["forwarded_reads"] == 0 and counts["writes"] == 1
    assert (pool.mount / "files/made").read_bytes() == data()[1:]
