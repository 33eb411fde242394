"""libkvfs_cufile.so against NVIDIA's libcufile 1.20: the same calls on the same mount, in a process each.

The reference is the real library with host buffers, in its compatibility mode. Two of ours are held against it: one
that has the real library behind it ("ours"), and one that has none and must answer for it ("alone"). What the real one
does differently, and why that is not copied:

- a failed read or write of the descriptor is (-1, EPERM) in the real one, whatever the reason; "alone" gives the reason
- when the application has closed a descriptor that is still registered, the real one reads whatever file has its number
  now; ours reads the file that was registered
- cuFileReadv of the real one aborts on an empty vector and hangs from 33 vectors on; ours reads
- a batch item without memory aborts the process there; "alone" refuses it (5022)
- of several batch items in one registered buffer, the real one checks the range of the first only; ours of all
- whether a completion is there at once is a matter of time: the real one reads small files of a mount while submitting

GPU memory is a double here (native/cufile/test/fake_cuda.c), and says nothing about a GPU.
"""

import contextlib
import hashlib
import json
import os
import pathlib
import random
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile

import pytest

import helpers
from kvfs.client import cufile

REFERENCE_VERSION = "1.20.0.107"
REFERENCE_DIRECTORY = helpers.REPOSITORY / "build/clients/nvidia-cufile"
PYTHON_CLIENT = "cufile-python==0.2.0"
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


def download(package, target):
    """Unzip the wheel of a package into target; skip if it is not to be had."""
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", "download", "--no-deps",
                   "--only-binary", ":all:", "--dest", directory, package]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        wheels = list(pathlib.Path(directory).glob("*.whl"))
        if done.returncode or len(wheels) != 1:
            pytest.skip(f"{package} cannot be downloaded: {done.stderr[-300:]}")
        with zipfile.ZipFile(wheels[0]) as archive:
            archive.extractall(target)


@pytest.fixture(scope="session")
def doubles():
    """The directory of native/cufile/test's libraries."""
    helpers.requires_program("make")
    helpers.run("make", "-C", helpers.REPOSITORY / "native/cufile", "all", "test")
    return DOUBLES


@pytest.fixture(scope="session")
def preloads(doubles):
    """What the real library needs on a kernel without modules: it looks for /proc/modules until it is there."""
    return "" if os.path.exists("/proc/modules") else str(doubles / "proc_modules.so")


@pytest.fixture(scope="session")
def reference(preloads):
    """The real library, once it was seen to open its driver; else the tests against it skip, and say so."""
    pattern = "nvidia/*/lib/libcufile.so.0"
    if not list(REFERENCE_DIRECTORY.glob(pattern)):
        download(f"nvidia-cufile=={REFERENCE_VERSION}", REFERENCE_DIRECTORY)
    found = list(REFERENCE_DIRECTORY.glob(pattern))
    assert found, f"nvidia-cufile {REFERENCE_VERSION} has no {pattern}"
    outcomes, status = play(found[0], [{"op": "driver_open"}, {"op": "version"}], preloads=preloads, timeout_s=30)
    if outcomes != [[0, 0], [0, 0, 1200]]:
        pytest.skip(f"NO REFERENCE: the real libcufile does not work here: {outcomes}, exit status {status}")
    return found[0]


def play(library, steps, *, preloads="", real="none", stats=None, timeout_s=PLAY_TIMEOUT_S, environment=None):
    """Play the steps; their outcomes, as far as it came, and the exit status (None: it hung)."""
    with tempfile.TemporaryDirectory() as directory, tempfile.TemporaryFile("w+") as out:
        given = {**os.environ, "LD_PRELOAD": preloads, "KVFS_CUFILE_REAL": str(real), "CUFILE_LOGFILE_PATH": "/dev/null",
                 **({"KVFS_CUFILE_STATS": str(stats)} if stats else {}), **(environment or {})}
        process = subprocess.Popen([sys.executable, PLAYER, library], stdin=subprocess.PIPE, stdout=out, cwd=directory,
                                   stderr=subprocess.PIPE, env=given, text=True)
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
    steps = [buffer(), *(step for name in names for step in opened(name, name)), *(read(f"h{name}", 1, 0) for name in names)]
    steps = json.loads(json.dumps(steps).replace("{dir}", str(directory)))

    def all_native():
        with tempfile.NamedTemporaryFile() as stats:
            outcomes, status = play(OURS, steps, stats=stats.name)
            assert status == 0 and all(outcome[0] == 1 for outcome in outcomes[-len(names):]), outcomes
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
    """What the real library answers to these, ours answers too, with and without the real one behind it."""
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
    return [{"op": "open", "name": name, "path": f"{{dir}}/{file}", "flags": flags},
            {"op": "register", "name": f"h{name}", "fd": name}]


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
    "ends": [*START, *(read("hf", size, offset) for size, offset in (
        (4096, 0), (3_000_017, 0), (BUFFER_SIZE, 0), (100, 3_000_016), (100, 3_000_017), (100, 3_000_018), (100, 1 << 40),
        (0, 0), (0, 1 << 62), (1, 0), (4096, 4095), (10, -1), (10, -4096), (0, -1), (1 << 33, 0), (1 << 32, 1),
        (1 << 31, 0), (10, (1 << 63) - 1), (10, (1 << 63) - 11), (10, (1 << 63) - 5), ((1 << 63) - 1, 0), (1 << 63, 0),
        ((1 << 64) - 1, 0)))],
    "buffer offsets": [*START, read("hf", 1000, 777, buffer_offset=13), read("hf", 10, 0, at=4096, buffer_offset=-1),
                       read("hf", 4096, 4096, at=8192, buffer_offset=-8192), read("hf", 8192, 100, at=1, buffer_offset=4095)],
    "no memory": [*START, read("hf", 10, 0, None), read("hf", 0, 0, None), read("hf", 10, 1 << 40, None),
                  read(77, 10, 0, None), write("hf", 10, 0, None)],
    "bad memory": [*START, buffer("R", 8192, read_only=True), read("hf", 100, 0, "R"), read("hf", 8192, 0, "R"),
                   read("hf", BUFFER_SIZE, 0, buffer_offset=BUFFER_SIZE - 4096),
                   read("hf", 8, 0, buffer_offset=BUFFER_SIZE - 4), read("hf", 8192, 0, buffer_offset=-4096),
                   *(read("hf", size, offset, where) for where in BAD_POINTERS for size, offset in
                     ((4096, 0), (5, 7), (MIB, 4096)))],
    "handles": [buffer(), read(None, 10, 0), {"op": "use_count"}, {"op": "driver_open"}, read(None, 10, 0),
                read(12345, 10, 0), *opened("f", "large"), {"op": "use_count"}, {"op": "deregister", "handle": "hf"},
                read("hf", 10, 0), {"op": "deregister", "handle": "hf"}, {"op": "deregister", "handle": None},
                {"op": "deregister", "handle": 4242}, {"op": "register", "name": "again", "fd": "f"}, read("again", 10, 5)],
    "registering": [buffer(), {"op": "register", "name": "h", "fd": -1}, {"op": "use_count"},
                    {"op": "register", "name": "h", "fd": 99}, *opened("f", "large"),
                    {"op": "register", "name": "h", "fd": "f"},
                    *({"op": "register", "name": "h", "fd": "f", "type": kind} for kind in (0, 2, 3, 77)),
                    {"op": "register", "name": "h", "fd": "f", "null_out": True},
                    {"op": "register", "name": "h", "fd": "f", "null_description": True},
                    {"op": "open", "name": "d", "path": "{dir}/directory", "flags": "O_RDONLY"},
                    {"op": "register", "name": "hd", "fd": "d"}, *opened("g", "large"), read("hg", 10, 0),
                    {"op": "deregister", "handle": "hf"}, {"op": "register", "name": "h", "fd": "f"}, read("h", 10, 0)],
    "open flags": [buffer(), *opened("w", "large", "O_WRONLY"), read("hw", 10, 0), read("hw", 0, 0), read("hw", 10, -1),
                   read("hw", 10, 0, None), read("hw", 10, 0, 1 << 40), *opened("r", "large"), write("hr", 10, 0),
                   write("hr", 0, 0), write("hr", 10, -1), *opened("d", "large", "O_RDONLY|O_DIRECT"),
                   *(read("hd", size, offset) for size, offset in ((4096, 0), (10, 0), (4096, 1), (100, 3_000_000)))],
    "small files": [buffer(), *opened("e", "empty"), read("he", 10, 0), *opened("s", "small"), read("hs", 4096, 0),
                    read("hs", 50, 60), read("hs", 50, 100), *opened("p", "page"), read("hp", 4096, 0), read("hp", 1, 4095)],
    "buffers": [*START, {"op": "buffer_register", "buffer": "B", "size": 8192},
                {"op": "buffer_register", "buffer": "B", "size": 8192}, {"op": "buffer_register", "buffer": "B", "size": 100},
                read("hf", 8192, 0), read("hf", 8193, 0), read("hf", 4096, 0, buffer_offset=4096),
                read("hf", 4096, 0, buffer_offset=8192), read("hf", 4096, 0, buffer_offset=-4096),
                read("hf", 8193, -1), read("hf", 8193, 4_000_000), read("hf", 0, 0, buffer_offset=9000),
                read("hf", 0, 0, buffer_offset=-1), read("hf", 4096, 0, at=4096), read("hf", 8192, 0, at=4096),
                {"op": "buffer_deregister", "buffer": "B", "at": 10}, {"op": "buffer_deregister", "buffer": "B"},
                {"op": "buffer_deregister", "buffer": "B"}, read("hf", 8193, 0),
                {"op": "buffer_deregister", "buffer": None}, {"op": "buffer_register", "buffer": None, "size": 5},
                {"op": "buffer_register", "buffer": "B", "size": 0},
                *({"op": "buffer_register", "buffer": "B", "size": 100, "at": 4096 * flags, "flags": flags}
                  for flags in (1, 2, 3, 4, 7)),
                {"op": "buffer_register", "buffer": 1 << 40, "size": 4096}, read("hf", 100, 0, 1 << 40)],
    "driver": [*START, {"op": "use_count"}, {"op": "driver_open"}, {"op": "driver_open"}, {"op": "use_count"},
               {"op": "buffer_register", "buffer": "B", "size": 8192}, {"op": "driver_close"}, {"op": "use_count"},
               read("hf", 10, 0), {"op": "driver_close", "v2": False}, {"op": "use_count"}, read("hf", 10, 0),
               {"op": "driver_close"}, {"op": "use_count"}, {"op": "buffer_deregister", "buffer": "B"},
               read("hf", 10, 0), {"op": "register", "name": "h", "fd": "f"}, read("h", 8193, 0),
               {"op": "buffer_register", "buffer": "B", "size": 8192}, read("h", 8193, 0)],
    "driver unused": [buffer(), {"op": "use_count"}, {"op": "version"}, {"op": "properties"},
                      {"op": "properties", "null": True}, batch(4), {"op": "use_count"},
                      {"op": "buffer_deregister", "buffer": "B"}, {"op": "use_count"}, {"op": "driver_open"},
                      {"op": "properties"}, {"op": "driver_close"}, {"op": "use_count"}],
    "vectors": [*START, {"op": "readv", "handle": "hf", "vectors": [["B", 0, 10], ["B", 100, 20]], "offset": 5},
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
                {"op": "readv", "handle": "hf", "vectors": [["B", 0, 8193]], "offset": 0}],
    "streams without CUDA": [*START, {"op": "read_async", "handle": "hf", "buffer": "B", "size": 100, "offset": 0},
                             {"op": "read_async", "handle": None, "buffer": "B", "size": 100, "offset": 0},
                             {"op": "read_async", "handle": "hf", "buffer": None, "size": 100, "offset": 0},
                             {"op": "read_async", "handle": "hf", "buffer": "B", "size": 100, "offset": 0, "null": True},
                             {"op": "write_async", "handle": "hf", "buffer": "B", "size": 100, "offset": 0},
                             {"op": "stream_register"}, {"op": "stream_register", "flags": 15},
                             {"op": "stream_deregister"}, {"op": "stream_deregister"}],
    "batches": [*START, *({"op": "batch", "name": "x", "count": count} for count in (0, 1, 128, 129, 1 << 31)),
                {"op": "batch", "name": "x", "count": 4, "null": True}, batch(4),
                {"op": "status", "batch": "b", "least": 0, "count": 4},
                {"op": "status", "batch": "b", "least": 1, "count": 4, "timeout_ms": 100},
                submit(item("hf", 4096, 0, 1), item("hf", 100, 2_999_990, 2, buffer_offset=8192),
                       item("hf", 100, 3_000_017, 3, buffer_offset=16384), item("hf", 100, 10, 4, buffer_offset=32768)),
                drain(4), {"op": "status", "batch": "b", "least": 0, "count": 4},
                {"op": "status", "batch": "b", "least": 1, "count": 4},
                submit(item("hf", 3_000_017, 0, 5)), drain(1),
                submit(item("hf", 1000, 1, 6)), submit(item("hf", 1000, 2, 7, buffer_offset=5000)), drain(2),
                {"op": "status", "batch": "b", "least": 0, "count": 0}, {"op": "status", "batch": "b", "least": 2, "count": 1},
                {"op": "status", "batch": "b", "least": 5, "count": 5, "timeout_ms": 100},
                {"op": "status", "batch": "b", "least": 1, "count": 4, "null": True},
                {"op": "status", "batch": None, "least": 1, "count": 4}, {"op": "status", "batch": 999, "least": 1, "count": 4},
                submit(item("hf", 1, 0, 1), batch=None), submit(item("hf", 1, 0, 1), batch=999),
                {"op": "cancel", "batch": None}, {"op": "cancel", "batch": 999}, {"op": "destroy", "batch": None},
                {"op": "cancel", "batch": "b"}, submit(item("hf", 4096, 0, 8)), {"op": "deregister", "handle": "hf"},
                drain(1), {"op": "destroy", "batch": "b"}, {"op": "cancel", "batch": "b"},
                {"op": "status", "batch": "b", "least": 0, "count": 4}, submit(item("hf", 4096, 0, 9))],
    "batches cancelled": [*START, batch(8), submit(*(item("hf", 1_000_000, i, i) for i in range(8))),
                          {"op": "cancel", "batch": "b"}, {"op": "status", "batch": "b", "least": 0, "count": 8},
                          # What was cancelled may have been read, or not.
                          submit(item("hf", 1000, 0, 1)), drain(1, buffers=()),
                          submit(*(item("hf", 1_000_000, i, i) for i in range(8))), {"op": "destroy", "batch": "b"},
                          batch(8), submit(item("hf", 1000, 0, 1)), {"op": "driver_close"},
                          {"op": "status", "batch": "b", "least": 1, "count": 8}],
    "batches full": [*START, batch(2), submit(*(item("hf", 4096, 0, i) for i in range(3))),
                     {"op": "status", "batch": "b", "least": 0, "count": 2}, submit(item("hf", 4096, 0, 1)),
                     submit(item("hf", 4096, 0, 2)), submit(item("hf", 4096, 0, 3)),
                     {"op": "status", "batch": "b", "least": 0, "count": 2}, submit(item("hf", 4096, 0, 4)), drain(1, 2),
                     submit(), submit(item("hf", 1, 0, 1), null=True), submit(item("hf", 1, 0, 5)), drain(1, 2)],
}
for _name, _bad in {
        "no handle": item(None, 4096, 0, 9), "unknown handle": item(77, 4096, 0, 9), "negative offset": item("hf", 4096, -1, 9),
        "bad memory": item("hf", 4096, 0, 9, 1 << 40), "nothing": item("hf", 0, 0, 9), "write": item("hf", 10, 0, 9, opcode=1),
        "opcode": item("hf", 10, 0, 9, opcode=7), "mode": item("hf", 10, 0, 9, mode=3),
        "before the buffer": item("hf", 10, 0, 9, buffer_offset=-100)}.items():
    EDGES[f"batch with {_name}"] = [
        *START, batch(4), submit(item("hf", 4096, 0, 1, buffer_offset=4096), _bad, item("hf", 4096, 0, 2, buffer_offset=8192)),
        # After an error the items before the bad one may have been read, or not.
        drain(2) if _name == "nothing" else drain(0, buffers=()), {"op": "status", "batch": "b", "least": 0, "count": 4},
        submit(item("hf", 1, 0, 3)), drain(1, buffers=()), submit(_bad), {"op": "status", "batch": "b", "least": 0, "count": 4}]


def generated(seed):
    """A sequence of calls on several files, with what is odd now and then. The same seed gives the same one."""
    rng = random.Random(seed)
    steps = [buffer(), buffer("C", MIB), {"op": "driver_open"}]
    handles = {}
    for index, (name, flags) in enumerate((("large", "O_RDONLY"), ("aligned", "O_RDONLY|O_DIRECT"), ("small", "O_RDONLY"),
                                           ("large", "O_RDONLY"), ("page", "O_RDWR"), ("new", "O_RDWR|O_CREAT"))):
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
        kind = rng.choices(("read", "write", "batch", "readv", "odd", "register", "descriptor", "again", "closed"),
                           (30, 8, 15, 6, 8, 8, 3, 6, 3))[0]
        where = rng.choice("BC")
        limit = registered.get(where) or (BUFFER_SIZE if where == "B" else MIB)
        handle, size, offset = spot(kind == "write")
        if kind in ("read", "write"):
            size = min(size, limit)
            steps.append((read if kind == "read" else write)(handle, size, offset, where,
                                                             buffer_offset=rng.choice((0, limit - size, rng.randrange(limit - size + 1)))))
        elif kind == "batch":
            count = rng.randrange(1, 9)
            # Parts of the buffer of their own, and no reads of what is being written: order is nobody's promise.
            part = BUFFER_SIZE // 8
            readable = [name for name in handles if "RDWR" not in handles[name]]
            items = [item(rng.choice(readable), min(rng.choice(sizes), part), rng.choice(offsets), i, at=i * part)
                     for i in range(count)]
            steps += [submit(*items), drain(count)]
        elif kind == "readv":
            vectors, at = [], 0
            for _ in range(rng.randrange(1, 9)):
                length = rng.choice(sizes[:8])
                vectors.append(["B", at, length])
                at += length + rng.randrange(100)
            steps.append({"op": "readv", "handle": handle, "vectors": vectors, "offset": offset})
        elif kind == "odd":
            steps.append(rng.choice((read(77, size, offset), read(handle, size, -offset - 1), read(handle, 0, offset),
                                     read(handle, size, offset, None), read(handle, size, offset, 1 << 40),
                                     write("hf0", size, offset, where), {"op": "use_count"},
                                     {"op": "register", "name": "x", "fd": "f0"}, read(handle, BUFFER_SIZE + 1, 0, "B"))))
        elif kind == "register":
            if where in registered:
                del registered[where]
                steps.append({"op": "buffer_deregister", "buffer": where})
            else:
                registered[where] = limit
                steps.append({"op": "buffer_register", "buffer": where, "size": limit})
        elif kind == "descriptor":
            steps += [{"op": "file_write", "name": rng.choice(("f4", "f5")), "size": size, "offset": offset % MIB, "byte": rng.randrange(256)},
                      read(rng.choice(("hf4", "hf5")), size, offset % MIB, "B" if "B" not in registered else None)]
        elif kind == "again":
            name = handle.removeprefix("h")
            steps += [{"op": "deregister", "handle": handle}, read(handle, 10, 0),
                      {"op": "register", "name": handle, "fd": name}]
        else:
            # Closed, so sealed, and opened again for reading only.
            steps += [{"op": "deregister", "handle": "hf5"}, {"op": "close", "name": "f5"},
                      {"op": "file_digest", "path": "{dir}/new"}, *opened("f5", "new", "O_RDWR")]
    return steps


@pytest.mark.parametrize("edge", EDGES)
def test_edges_are_as_in_the_real_one(stage, edge):
    assert_alike(stage, EDGES[edge], edge)


@pytest.mark.parametrize("seed", SEEDS)
def test_generated_calls_end_as_in_the_real_one(stage, seed):
    assert_alike(stage, generated(seed), f"seed {seed}")
    for name in ("ours", "alone"):
        assert stage.counts(name)["native_reads"] > 0
