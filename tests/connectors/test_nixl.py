"""NIXL's wheel with libplugin_KVFS.so in it: the agent of its Python API stores, finds and loads objects and files.

The plugin's own C++ runs under sanitizers too, in a program in NIXL's place; that needs no wheel.
"""

import contextlib
import json
import os
import re
import select
import shutil
import struct
import subprocess
import sys
import time
from pathlib import Path

import helpers
import pytest
from helpers import MIB, REPOSITORY, wait_until
from image import Image, flipped

import kvfs

helpers.give_devices_time()

PLAYER = REPOSITORY / "tests/connectors/nixl_player.py"
SHIM = REPOSITORY / "native/shims/nixl"
ANSWER_TIMEOUT_S = 150
KEYS = [f"key {index}" for index in range(6)]


class Player:
    """A process with an agent; calls are those of nixl_player.Player."""

    def __init__(self, engine, plugins, log, name="agent", **environment):
        self.log = log
        # NIXL_LOG_LEVEL: errors are told, and the reason why a plugin was not loaded.
        environment = {"NIXL_PLUGIN_DIR": str(plugins), "NIXL_LOG_LEVEL": "INFO", **environment}
        self.process = engine.start(PLAYER, name, log, **environment)
        assert self.answer() == "ready"

    def answer(self):
        readable, _, _ = select.select([self.process.stdout], [], [], ANSWER_TIMEOUT_S * helpers.SLOWNESS)
        assert readable, f"no answer: {self.said()[-3000:]}"
        line = self.process.stdout.readline()
        assert line, (
            f"it ended with {self.process.wait(10)}: {self.process.stderr.read()[-2000:]} {self.said()[-3000:]}"
        )
        return json.loads(line)

    def __call__(self, *words):
        self.process.stdin.write(json.dumps(words) + "\n")
        self.process.stdin.flush()
        return self.answer()

    def said(self):
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def finish(self):
        """End of input: agent and back end go, and the process ends well."""
        self.process.stdin.close()
        assert self.process.wait(60) == 0, self.said()[-3000:]

    def stop(self):
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            with contextlib.suppress(BrokenPipeError):
                stream.close()


@pytest.fixture(scope="module")
def nixl(engine):
    return engine("nixl")


@pytest.fixture(scope="module")
def plugins(nixl, tmp_path_factory):
    """Made by the command, as a user makes it, in the engine's own environment."""
    directory = tmp_path_factory.mktemp("nixl") / "plug ins"
    said = nixl.run("-m", "kvfs", "nixl-plugins", directory, "-o", "json").stdout
    document = json.loads(said)
    assert {"KVFS", "POSIX", "UCX"} <= set(document["plugins"])
    return document["environment"]["NIXL_PLUGIN_DIR"]


@pytest.fixture
def player(nixl, plugins, tmp_path):
    """player(): a new process; its second is another agent."""
    with contextlib.ExitStack() as stack:

        def start(name="agent", **environment):
            made = Player(nixl, plugins, tmp_path / f"{name}.log", name, **environment)
            stack.callback(made.stop)
            return made

        yield start


def damage(pool, path):
    """Flip a bit in the middle of a block on the devices, and have the kernel forget what it knew of it."""
    image = Image(pool.path)
    pages = image.block_of(os.stat(path).st_ino).data_pages()
    segment, page, _ = pages[len(pages) // 2]
    image.write(segment, page, flipped(image.read(segment, page), 12_345))


def file_of(mount, space, key):
    name = key.encode().hex()
    return mount / space / name[:2] / name


# --- objects -----------------------------------------------------------------------------------------------------


def test_objects_are_stored_found_and_loaded(player, directory):
    agent = player()
    assert agent("create", {"mount": str(directory), "namespace": "objects"}) == ["DRAM_SEG", "FILE_SEG", "OBJ_SEG"]
    assert agent("query", KEYS) == [None] * len(KEYS)
    assert agent("store", KEYS, MIB) == "DONE"
    assert agent("query", [*KEYS, "another", "k" * 1000]) == [MIB] * len(KEYS) + [None, None]
    assert agent("load", KEYS, MIB) == ["DONE", [True] * len(KEYS)]
    # They are blocks as any client has them, and replaced as they are.
    with kvfs.connect(directory, "objects", gpu=None) as client:
        assert client.exists(KEYS) == [True] * len(KEYS)
    assert agent("store", KEYS[:2], 4096, 1) == "DONE"
    assert agent("load", KEYS[:2], 4096, 1) == ["DONE", [True, True]] and agent("query", KEYS[:1]) == [4096]
    # Memory that is not aligned, sizes that are not whole pages.
    assert agent("store", ["odd"], 123_457) == "DONE" and agent("load", ["odd"], 123_457) == ["DONE", [True]]
    agent.finish()


def test_a_hole_fails_the_transfer_and_nothing_else(player, directory):
    agent = player()
    agent("create", {"mount": str(directory), "namespace": "holes"})
    assert agent("store", KEYS, MIB) == "DONE"
    with kvfs.connect(directory, "holes", gpu=None) as client:
        client.delete([KEYS[3]])
    state, same = agent("load", KEYS, MIB)
    assert state in ("ERR", "nixlNotFoundError: NIXL_ERR_NOT_FOUND") and not same[3]
    assert agent("query", KEYS) == [MIB, MIB, MIB, None, MIB, MIB]
    assert "NIXL_ERR_NOT_FOUND" in agent.said()
    # An object that is shorter than what is asked for is no hole, and no success.
    assert agent("load", KEYS[:1], 2 * MIB)[0] != "DONE"
    others = [key for key in KEYS if key != KEYS[3]]
    assert agent("load", others, MIB) == ["DONE", [True] * len(others)]


def test_parts_of_an_object(player, directory):
    agent = player()
    agent("create", {"mount": str(directory), "namespace": "parts"})
    written, read, same = agent("parts", "in parts", MIB, 8)
    assert (written, read, same) == ("DONE", "DONE", True)


def test_a_post_does_not_wait_for_devices(player, directory):
    agent = player()
    agent("create", {"mount": str(directory), "namespace": "posts", "depth": "1"})
    names = [f"post {index}" for index in range(64)]
    assert agent("store", names, MIB) == "DONE"
    state, longest, whole = agent("posts", names, MIB)
    assert state == "DONE" and longest < max(0.1, whole / 4), (longest, whole)


def test_wrong_parameters_are_refused_and_named(player, directory):
    agent = player()
    for parameters, said in (
        ({}, "'mount' is missing"),
        ({"mount": str(directory), "bucket": "b"}, "no parameter 'bucket'"),
        ({"mount": str(directory), "depth": "65"}, "depth is '65': 1 to 64"),
        ({"mount": str(directory), "timeout_ms": "soon"}, "timeout_ms is 'soon'"),
    ):
        assert "NIXL_ERR_BACKEND" in agent("create", parameters)
        assert said in agent.said(), agent.said()[-2000:]
    assert agent("create", {"mount": str(directory), "namespace": "", "depth": "", "timeout_ms": "5000"})
    assert agent("refused", "OBJ", 1, "k" * 1000) and "a key of 1000 bytes" in agent.said()
    assert agent("refused", "VRAM", 0, "") and "GPU memory is not" in agent.said()
    assert agent("refused", "OBJ", 1, "one key") is None
    assert agent("refused", "OBJ", 1, "another") and "device 1 is registered already" in agent.said()


def test_two_agents_share_a_pool(player, directory):
    one, other = player("one"), player("other")
    for agent in (one, other):
        agent("create", {"mount": str(directory), "namespace": "shared"})
    assert one("store", KEYS, MIB) == "DONE"
    assert other("query", KEYS) == [MIB] * len(KEYS) and other("load", KEYS, MIB) == ["DONE", [True] * len(KEYS)]
    assert other("store", KEYS, 2 * MIB, 1) == "DONE"
    assert one("load", KEYS, 2 * MIB, 1) == ["DONE", [True] * len(KEYS)]
    # Another namespace, or another revision of the weights, is another set.
    for name, parameters in (("third", {"namespace": "alone"}), ("fourth", {"namespace": "shared", "revision": "v2"})):
        apart = player(name)
        apart("create", {"mount": str(directory), **parameters})
        assert apart("query", KEYS) == [None] * len(KEYS)
    assert apart("store", KEYS[:1], MIB) == "DONE"
    assert file_of(directory, "shared/@v2", KEYS[0]).exists()
    assert one("load", KEYS, 2 * MIB, 1) == ["DONE", [True] * len(KEYS)]


def test_with_telemetry_transfers_are_counted(player, directory):
    """NIXL then looks into a part of the back end that it never touches otherwise."""
    agent = player(NIXL_TELEMETRY_ENABLE="y", NIXL_TELEMETRY_DIR="/tmp")
    agent("create", {"mount": str(directory), "namespace": "telemetry"})
    assert agent("store", KEYS, MIB) == "DONE" and agent("load", KEYS, MIB)[0] == "DONE"
    time.sleep(0.3)
    assert agent("load", KEYS, MIB)[0] == "DONE"
    agent.finish()


# --- files -------------------------------------------------------------------------------------------------------


def test_files_by_path_and_by_descriptor(player, directory):
    agent = player()
    agent("create", {"mount": str(directory)})
    paths = [f"{directory}/file-{index}" for index in range(4)]
    create, read = [f"rw,create:{path}" for path in paths], [f"ro:{path}" for path in paths]
    assert agent("query", paths, "FILE") == [None] * 4
    assert agent("refused", "FILE", 7, read[0])
    assert agent("store", create, MIB, 0, "FILE") == "DONE"
    assert agent("query", paths, "FILE") == [MIB] * 4 == agent("query", read, "FILE")
    assert [os.path.getsize(path) for path in paths] == [MIB] * 4
    for modes in ("ro", "ro,direct"):
        named = [f"{modes}:{path}" for path in paths]
        assert agent("load", named, MIB, 0, "FILE", create) == ["DONE", [True] * 4]
    os.unlink(paths[1])
    assert agent("query", paths, "FILE") == [MIB, None, MIB, MIB]
    assert agent("refused", "FILE", 8, read[1])
    # Files of other filesystems are not read by inode numbers of this one.
    assert agent("refused", "FILE", 9, "rw,create:/dev/null") and agent("refused", "FILE", 10, f"ro:{PLAYER}")
    assert "not on the mount of" in agent.said()


# --- what goes wrong ---------------------------------------------------------------------------------------------


def test_a_damaged_block_is_a_miss(player, own_pool):
    pool = own_pool(files=2, size="256M")
    agent = player()
    agent("create", {"mount": str(pool.mount), "namespace": "damaged"})
    assert agent("store", KEYS, MIB) == "DONE"
    path = file_of(pool.mount, "damaged", KEYS[2])
    damage(pool, path)
    state, same = agent("load", KEYS, MIB)
    assert state != "DONE" and not same[2]
    wait_until(lambda: agent("query", [KEYS[2]]) == [None], "the end of a block that was found damaged")
    assert agent("store", [KEYS[2]], MIB) == "DONE"
    assert agent("load", KEYS, MIB) == ["DONE", [True] * len(KEYS)]


def test_a_daemon_that_is_killed_costs_stores_until_it_is_back(player, own_pool):
    pool = own_pool(files=2, size="256M")
    agent = player()
    agent("create", {"mount": str(pool.mount), "namespace": "killed", "timeout_ms": "2000"})
    assert agent("store", KEYS, MIB) == "DONE"
    pool.kill()
    # Reads go on; a store fails, at once, and one line says why.
    assert agent("query", KEYS) == [MIB] * len(KEYS) and agent("load", KEYS, MIB) == ["DONE", [True] * len(KEYS)]
    before = time.monotonic()
    assert agent("store", ["new"], MIB) != "DONE" and time.monotonic() - before < 10 * helpers.slowness()
    assert "the daemon is gone" in agent.said()
    pool.remount()
    assert agent("store", ["new"], MIB) == "DONE"
    assert agent("load", [*KEYS, "new"], MIB) == ["DONE", [True] * 7]
    agent.finish()


def test_kvfs_may_come_after_the_agent_and_be_formatted_anew(player, own_pool):
    pool = own_pool(files=2, size="256M")
    pool.umount()
    agent = player()
    assert agent("create", {"mount": str(pool.mount), "namespace": "later"}) == ["DRAM_SEG", "FILE_SEG", "OBJ_SEG"]
    assert "not on a kvfs mount" in agent.said()
    assert agent("query", KEYS) == [None] * len(KEYS)
    assert agent("load", KEYS, MIB)[0] != "DONE" and agent("store", KEYS, MIB) != "DONE"
    for stored in (False, True):
        if stored:
            pool.umount()
            pool.command("format", "--force", str(pool.path), "--files", "2", "--size", "256M")
        pool.start()
        wait_until(lambda: agent("store", KEYS, MIB) == "DONE", "a store after the mount", timeout_s=30, interval_s=0.2)
        assert agent("query", KEYS) == [MIB] * len(KEYS) and agent("load", KEYS, MIB)[0] == "DONE"
    agent.finish()


def test_a_full_pool_fails_stores_and_serves_loads(player, own_pool):
    pool = own_pool(files=2, size="64M")
    (pool.mount / "full").mkdir()
    pool.command("pin", str(pool.mount / "full"))
    agent = player()
    agent("create", {"mount": str(pool.mount), "namespace": "full"})
    stored = []
    for index in range(200):
        if agent("store", [f"pinned {index}"], MIB) != "DONE":
            break
        stored.append(f"pinned {index}")
    assert 20 < len(stored) < 200 and "No space left on device" in agent.said()
    assert agent("query", [*stored, f"pinned {len(stored)}"]) == [MIB] * len(stored) + [None]
    assert agent("load", stored[:32], MIB) == ["DONE", [True] * min(32, len(stored))]
    with kvfs.connect(pool.mount, "full", gpu=None) as client:
        client.delete(stored[:8])
    wait_until(lambda: agent("store", ["again"], MIB) == "DONE", "a store when there is room", timeout_s=60)


# --- versions, and the interface ---------------------------------------------------------------------------------


def site_of(nixl):
    """Where its packages lie: a folder of their own, beside the environment."""
    return Path(nixl.run("-c", "import nixl; print(nixl.__path__[0])").stdout.splitlines()[-1]).parent


def test_another_version_is_warned_of_and_loaded_if_its_interface_is_the_same(
    nixl, plugins, player, directory, tmp_path
):
    """The same wheel under another version: directories of links, and another name of its metadata."""
    site, other = site_of(nixl), tmp_path / "site"
    other.mkdir()
    for name in ("nixl", "nixl_cu12", ".nixl_cu12.mesonpy.libs", "nixl_cu12.libs"):
        shutil.copytree(site / name, other / name, copy_function=os.symlink)
    for path in site.glob("nixl_meta_utils.py"):
        os.symlink(path, other / path.name)
    (other / "nixl_cu12-9.8.7.dist-info").mkdir()
    path = f"{other}:{nixl.site}"
    tried = player("tried", PYTHONPATH=path)
    tried("create", {"mount": str(directory), "namespace": "another"})
    assert tried("store", KEYS, MIB) == "DONE" and tried("load", KEYS, MIB) == ["DONE", [True] * len(KEYS)]
    line = next(line for line in tried.said().splitlines() if "9.8.7" in line)
    assert "was not tried with" in line and "its interface is the same" in line and str(other) in line
    # Two slots of the tables are exchanged in NIXL's own plugin, as if two functions had changed places.
    own = other / ".nixl_cu12.mesonpy.libs/plugins"
    exchanged = exchange(site / ".nixl_cu12.mesonpy.libs/plugins/libplugin_POSIX.so", "_ZTV15nixlPosixEngine", 3, 4)
    (own / "libplugin_POSIX.so").unlink()
    (own / "libplugin_POSIX.so").write_bytes(exchanged)
    refused = player("refused", PYTHONPATH=path)
    assert "NIXL_ERR_NOT_FOUND" in refused("create", {"mount": str(directory)})
    line = next(line for line in refused.said().splitlines() if "9.8.7" in line)
    assert "virtual function 3 is supportsNotif() const, and not supportsLocal() const" in line
    assert "KVFS_NIXL_ANY_VERSION=1" in line and "plugins/libplugin_POSIX.so" in line
    forced = player("forced", PYTHONPATH=path, KVFS_NIXL_ANY_VERSION="1")
    forced("create", {"mount": str(directory), "namespace": "forced"})
    assert forced("store", KEYS, MIB) == "DONE" and "loaded all the same" in forced.said()


def exchange(library, kind, first, second):
    """A library's bytes, with two slots of a table of virtual functions exchanged: by the relocations that fill it."""
    readelf = shutil.which("readelf")
    if not readelf:
        pytest.skip("NOT RUN: no readelf: binutils")
    said = subprocess.run([readelf, "-W", "--dyn-syms", library], capture_output=True, text=True, check=True).stdout
    table = next(int(line.split()[1], 16) for line in said.splitlines() if line.endswith(f" {kind}"))
    data = bytearray(library.read_bytes())
    # A relocation has the slot's address, then the symbol with the type, then an addend.
    places = [data.index(struct.pack("<Q", table + 16 + 8 * slot)) + 8 for slot in (first, second)]
    symbols = [data[at : at + 8] for at in places]
    for at, symbol in zip(places, reversed(symbols), strict=True):
        data[at : at + 8] = symbol
    return bytes(data)


def virtual_functions(library, kind):
    """Names and arguments of the virtual functions of a class, slot by slot; by the relocations of its table."""
    readelf, demangle = shutil.which("readelf"), shutil.which("c++filt")
    if not readelf or not demangle:
        pytest.skip("no readelf and c++filt: binutils")

    def said(*options):
        return subprocess.run([readelf, "-W", *options, library], capture_output=True, text=True, check=True).stdout

    symbols = {}  # address -> names
    table = None
    for line in said("--syms", "--dyn-syms").splitlines():
        fields = line.split()
        if len(fields) == 8 and fields[0][:-1].isdigit():
            symbols.setdefault(int(fields[1], 16), fields[7].partition("@")[0])
            if fields[7] == kind:
                table = (int(fields[1], 16), int(fields[2], 0))
    assert table, f"{library}: no {kind}"
    slots = {}
    for line in said("--relocs").splitlines():
        match = re.match(r"([0-9a-f]+) +[0-9a-f]+ R_\w+ +([0-9a-f]+)(?: +(\S+))?", line)
        if match:
            slots[int(match[1], 16)] = match[3].partition("@")[0] if match[3] else symbols.get(int(match[2], 16), "?")
    # Behind the offset to the object's top and its type.
    names = [slots.get(table[0] + at, "?") for at in range(16, table[1], 8)]
    text = subprocess.run([demangle], input="\n".join(names), capture_output=True, text=True, check=True).stdout
    return [re.fullmatch(r".*?::(~?\w+)\((.*)\)(?: const)?", line).groups() for line in text.splitlines()]


def test_the_virtual_functions_are_in_the_order_of_the_wheel(nixl, plugins):
    """A function that is added, or moves, is called in another's place: nothing else would tell."""
    theirs = virtual_functions(f"{plugins}/libplugin_POSIX.so", "_ZTV15nixlPosixEngine")
    ours = virtual_functions(REPOSITORY / "kvfs/lib/libplugin_KVFS.so", "_ZTV6Engine")
    named = [[re.sub(r"^~.*", "~", name) for name, _ in one] for one in (theirs, ours)]
    assert named[0] == named[1] and len(named[0]) == 27
    counts = [[arguments.count("&") + arguments.count("*") for _, arguments in one] for one in (theirs, ours)]
    assert counts[0][:5] == counts[1][:5]
    # Two have one name.
    assert [index for index, (_, arguments) in enumerate(theirs) if "Remote" in arguments] == [
        index for index, (_, arguments) in enumerate(ours) if "Remote" in arguments
    ]


# --- NIXL's own plugin of files ---

TRUNCATED = """
import json, os, sys, time
import numpy as np
from nixl._api import nixl_agent, nixl_agent_config
agent = nixl_agent("a", nixl_agent_config(backends=[]))
agent.create_backend("POSIX", json.loads(sys.argv[2]))
with open(sys.argv[1], "wb") as file:
    file.write(b"A" * 4096)
descriptor, memory = os.open(sys.argv[1], os.O_RDWR), np.full(1 << 20, 0x5A, dtype=np.uint8)
here, there = [(memory.ctypes.data, memory.nbytes, 0)], [(0, memory.nbytes, descriptor)]
for rows, kind in ((here, "DRAM"), (there, "FILE")):
    agent.register_memory(agent.get_reg_descs([(*row, "") for row in rows], kind), backends=["POSIX"])
try:
    handle = agent.initialize_xfer(
        "READ", agent.get_xfer_descs(here, "DRAM"), agent.get_xfer_descs(there, "FILE"), "a", backends=["POSIX"]
    )
    state, begun = agent.transfer(handle), time.monotonic()
    while state == "PROC" and time.monotonic() < begun + 100:
        time.sleep(0.001)
        state = agent.check_xfer_state(handle)
except Exception as error:
    state = type(error).__name__
print(json.dumps([state, int((memory == 0x5A).sum())]), flush=True)
os._exit(0)
"""


@pytest.mark.parametrize("version", ["1.3.2", "1.4.1", "1.5.1"])
def test_a_short_file_is_a_load_that_succeeds_before_1_5(engine, tmp_path, version):
    """As docs/engines.md has it, of NIXL's own plugin; ours refuses it with each (above)."""
    try:
        there = engine(f"nixl=={version}")
    except pytest.skip.Exception:
        pytest.skip(f"NOT RUN: no NIXL {version}; tools/engine-matrix makes it")
    for parameters, refuses in (({}, version >= "1.5"), ({"use_posix_aio": "true"}, True)):
        said = there.run("-c", TRUNCATED, tmp_path / "short", json.dumps(parameters)).stdout
        assert json.loads(said.splitlines()[-1]) == ["nixlBackendError" if refuses else "DONE", MIB - 4096], parameters


# --- the directory of plugins ------------------------------------------------------------------------------------


def test_every_plugin_of_the_wheel_loads_from_the_directory_as_it_does_from_its_own(nixl, plugins):
    code = """
import ctypes, glob, os, sys, nixl
for path in sorted(glob.glob(sys.argv[1] + "/libplugin_*.so")):
    if os.path.basename(path) != "libplugin_KVFS.so":
        pid = os.fork()
        if pid == 0:
            try:
                ctypes.CDLL(path)
            except OSError as error:
                os.write(1, f"{os.path.basename(path)}: {str(error).partition(':')[0]}\\n".encode())
            os._exit(0)
        os.waitpid(pid, 0)
"""
    own = site_of(nixl) / ".nixl_cu12.mesonpy.libs/plugins"
    said = [nixl.run("-c", code, where).stdout for where in (own, plugins)]
    assert said[0] == said[1]
    assert "libplugin_POSIX.so" not in said[0] and "libplugin_UCX.so" not in said[0]


def test_the_directory_is_brought_up_to_date(nixl, plugins, tmp_path):
    directory = tmp_path / "plugins"
    (directory / "lib/plugins").mkdir(parents=True)
    (directory / "lib/plugins/libplugin_GONE.so").symlink_to("/nowhere")
    (directory / "lib/plugins/libplugin_POSIX.so").symlink_to("/nowhere")
    said = nixl.run("-m", "kvfs", "nixl-plugins", directory).stdout
    assert said == f"export NIXL_PLUGIN_DIR={directory}/lib/plugins\n"
    names = {path.name for path in (directory / "lib/plugins").iterdir()}
    assert "libplugin_GONE.so" not in names and {"libplugin_KVFS.so", "libkvfs.so.1"} <= names
    assert (directory / "lib/plugins/libplugin_POSIX.so").exists()
    # Nothing of a user's is replaced.
    (directory / "lib/plugins/libplugin_UCX.so").unlink()
    (directory / "lib/plugins/libplugin_UCX.so").write_text("mine")
    refused = nixl.run("-m", "kvfs", "nixl-plugins", directory, check=False)
    assert refused.returncode == 2 and "in the way of a link" in refused.stderr


def test_a_nixl_that_is_not_there_is_said(tmp_path):
    words = (sys.executable, "-m", "kvfs", "nixl-plugins", tmp_path / "made", "--nixl", tmp_path)
    refused = helpers.run(*words, check=False)
    assert refused.returncode == 2 and f"{tmp_path}: no NIXL" in refused.stderr and not (tmp_path / "made").exists()
    for package in ("nixl_cu12", "nixl_cu13"):
        (tmp_path / f".{package}.mesonpy.libs/plugins").mkdir(parents=True)
        (tmp_path / f".{package}.mesonpy.libs/libnixl.so").touch()
    refused = helpers.run(*words, check=False)
    assert refused.returncode == 2 and "more than one NIXL" in refused.stderr


# --- under sanitizers, without NIXL ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["address", "thread"])
def test_the_plugin_under_sanitizers(kind, directory):
    if shutil.which("g++") is None:
        pytest.skip("NOT RUN: no g++")
    helpers.run("make", "-s", "-j2", "-C", SHIM, kind, timeout_s=280)
    done = helpers.run(REPOSITORY / f"build/nixl/{kind}-drive", directory, timeout_s=200)
    assert done.stdout.endswith("\nok\n"), done.stderr[-3000:]
